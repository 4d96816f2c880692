"""Looking at files that may hang or crash the decoder or eat the memory: by processes that can be lost.

The processes are forked, as loader workers are, and live until all files are seen; one that is lost is replaced. What
is remembered of a file costs none of them.
"""

import resource
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from data.media import UnreadableClip
from data.memo import HashMemo, content_sha256
from data.probe import Probe, probe

MEMORY = 4 << 30  # bytes that a process may take for one file; frames of 8192x4320 in 10 bit take 0.1 GB each
FORK = get_context("fork")
Seen = tuple[Probe, str] | UnreadableClip


def look(paths: Sequence[Path], memo: HashMemo, timeout: float, workers: int) -> Iterator[tuple[int, Seen]]:
    """(index, what is there) of each path, in no order: its probe and the SHA-256 of its bytes, or why it cannot be
    used; also if that took more than `timeout` seconds or MEMORY bytes. A path that comes twice is looked at once."""
    places: dict[str, list[int]] = {}
    for at, path in enumerate(paths):
        places.setdefault(str(path), []).append(at)
    waiting = deque()
    for path, at in places.items():
        stamp = memo.stamp(path)
        facts = memo.known(path, stamp)
        if "probe" in facts and "sha256" in facts:
            yield from ((place, (_probe_of(facts["probe"]), facts["sha256"])) for place in at)
        else:
            waiting.append((path, stamp))
    for path, stamp, facts, reason in _facts_of_all(waiting, timeout, workers):
        if facts:
            memo.remember(path, stamp, facts)
            seen = _probe_of(facts["probe"]), facts["sha256"]
        else:
            seen = UnreadableClip(Path(path), reason)
        yield from ((place, seen) for place in places[path])


def _probe_of(facts: dict) -> Probe:
    return Probe(**facts | {"notes": tuple(facts["notes"])})


# -- the side that waits ---------------------------------------------------------------------------------------------


class _Worker:
    """A process that looks at one file after the other."""

    def __init__(self, others: list["_Worker"]):
        self.pipe, theirs = FORK.Pipe()
        # without these ends of pipes closed, no process would see that this one is gone
        ours = [self.pipe, *(other.pipe for other in others)]
        self.process = FORK.Process(target=_serve, args=(theirs, ours), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, path: str, stamp: list[int] | None, timeout: float) -> None:
        self.path, self.stamp, self.deadline = path, stamp, time.monotonic() + timeout
        self.pipe.send(path)

    def end(self) -> int | None:
        self.process.kill()  # it has nothing to save
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


def _facts_of_all(waiting: deque, timeout: float, workers: int) -> Iterator[tuple[str, list | None, dict | None, str]]:
    """(path, stamp, facts or None, the reason if none) of all that wait."""
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(busy)
                busy.append(worker)
                worker.give(*waiting.popleft(), timeout)
            first = min(worker.deadline for worker in busy)
            wait([worker.pipe for worker in busy], max(0.0, first - time.monotonic()))
            for worker in list(busy):
                if worker.pipe.poll():
                    try:
                        facts, reason = worker.pipe.recv()
                        idle.append(worker)
                    except (EOFError, ConnectionResetError):
                        facts, reason = None, _crash(worker.end())
                elif time.monotonic() > worker.deadline:
                    worker.end()
                    facts = None
                    reason = f"took longer than {timeout:g} s to read: export it again, or raise data.decode_timeout"
                else:
                    continue
                busy.remove(worker)
                yield worker.path, worker.stamp, facts, reason
    finally:
        for worker in idle + busy:
            worker.end()


def _crash(code: int | None) -> str:
    name = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
    return f"ended the process that decodes it ({name}): damaged or hostile, export it again"


# -- the side that may be lost ---------------------------------------------------------------------------------------


def _serve(pipe: Connection, ours: list[Connection]) -> None:
    for end in ours:
        end.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they often go to the whole group: the one that waits decides
    torch.set_num_threads(1)  # threads of before the fork are not there any more
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY if hard < 0 else min(taken + MEMORY, hard), hard))
    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        pipe.send(_facts_of(Path(path)))


def _facts_of(path: Path) -> tuple[dict | None, str]:
    try:
        return {"probe": asdict(probe(path)), "sha256": content_sha256(path)}, ""
    except UnreadableClip as error:
        return None, error.reason
    except MemoryError:
        return None, f"takes more than {MEMORY >> 30} GiB to decode: export it again"
    except Exception as error:  # noqa: BLE001 (whatever a damaged file makes of a decoder: the file is named)
        return None, f"cannot be read ({type(error).__name__}: {error}): export it again"
