"""`python -m data.cache verify|repair|prune|stats DIR` (or URL): what can be done with a cache, whoever filled it."""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from data.cache import VERSION, BrokenEntry, Cache, checksum, non_finite, read_metadata, sweep
from data.places import TEMPORARY, PlaceError, Stamp, is_url, place

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
DAY = 24 * 3600


# -- verify, repair --------------------------------------------------------------------------------------------------


def verify(root: Path | str) -> tuple[list[str], bool]:
    """Reads every entry whole; the lines to print, and whether there is nothing broken or foreign."""
    cache, total, broken, foreign = Cache(root), 0, [], []
    for key, _, fault in _faults(cache):
        total += 1
        if fault:
            broken.append(f"broken: {cache.path(key)}: {fault}")
        elif fault is None:
            told = f"written by another version, with another layout than {VERSION!r}"
            foreign.append(f"foreign: {cache.path(key)}: {told}")
    foreign += [f"foreign: {path}" for path in cache.foreign()]
    end = [f"{root}: {_count(total, 'entry')} read, {len(broken)} broken, {len(foreign)} foreign"]
    if broken:
        end.append(f"python -m data.cache repair {root} removes what is broken; the next precompute makes it again")
    if foreign:
        end.append("foreign files are neither read nor removed: move them elsewhere")
    return broken + foreign + end, not broken and not foreign


def repair(root: Path | str) -> list[str]:
    """Removes broken entries, and what killed runs left half written a day ago or earlier; the lines to print."""
    stale = sweep(place(root))
    cache, lines = Cache(root), []
    for key, stamp, fault in _faults(cache):
        if fault:
            cache.remove(key, stamp)
            lines.append(f"removed: {cache.path(key)}: {fault}")
    broken, stale = _count(len(lines), "broken entry"), _count(stale, "stale temporary file")
    return [*lines, f"{root}: {broken} removed, to be made again by the next precompute; {stale} removed"]


def _faults(cache: Cache) -> Iterator[tuple[str, Stamp, str | None]]:
    """Every entry's key, what it was, and what is wrong with it: "" nothing, None that another version wrote it."""
    for key, _ in cache.entries():
        try:
            content, stamp = cache.read(key, noted=False)
        except FileNotFoundError:
            continue  # pruned by somebody meanwhile
        yield key, stamp, _fault(content)


def _fault(content: bytes) -> str | None:
    """What is wrong with an entry, from all of its bytes, as _faults says it."""
    try:
        metadata = read_metadata(content, len(content))
        if metadata.get("version") != VERSION:
            return None
        tensors = safetensors.torch.load(content)
    except (BrokenEntry, SafetensorError, ValueError, KeyError) as error:
        return str(error)
    if not tensors:
        return "holds no tensors"
    if bad := non_finite(tensors):
        return f"NaN or infinite values in {', '.join(bad)}"
    found = checksum(tensors)
    if (stated := metadata.get("crc32", found)) != found:
        return f"its bytes are not those that were written (CRC-32 is {found}, was {stated})"
    return ""


# -- prune -----------------------------------------------------------------------------------------------------------


def prune(
    root: Path | str, older_than: float | None = None, larger_than: int | None = None, dry_run: bool = False
) -> list[str]:
    """Removes entries not used for `older_than` days, and the longest unused ones until the rest has at most
    `larger_than` bytes; the lines to print."""
    cache, now = Cache(root), time.time()
    entries = sorted(cache.entries(), key=lambda entry: (entry[1].used, entry[0]))
    total, gone, freed = sum(stamp.size for _, stamp in entries), 0, 0
    for key, stamp in entries:
        old = older_than is not None and now - stamp.used > older_than * DAY
        over = larger_than is not None and total - freed > larger_than
        if not old and not over:
            break  # entries after this one were used later
        if not dry_run:
            cache.remove(key, stamp)
        gone, freed = gone + 1, freed + stamp.size
    accuracy = _accuracy(cache.root) if cache.place.local else ": written, because reads at a URL are not noted"
    return [
        f"age: time since an entry was last read or written{accuracy}",
        f"{root}: {gone} of {_count(len(entries), 'entry')} {'would be ' * dry_run}removed, {_size(freed)} of "
        f"{_size(total)}; runs that want them make them again",
    ]


def _accuracy(root: Path) -> str:
    """What is to be known of the times of reading on the file system of `root`."""
    with tempfile.NamedTemporaryFile(dir=root, prefix=".", suffix=".tmp") as file:
        file.write(b"x")
        file.flush()
        past = time.time() - 2 * DAY
        os.utime(file.name, (past, past))
        Path(file.name).read_bytes()
        kept = os.stat(file.name).st_atime > past + DAY
    if kept:
        return " (many systems note reads to a day only)"
    return ": written, because this file system is mounted so that reads are not noted (noatime)"


# -- stats -----------------------------------------------------------------------------------------------------------


def stats(root: Path | str) -> list[str]:
    """Entries and bytes, by kind and by model, as the entries themselves say; the lines to print."""
    cache = Cache(root)
    count, size = Counter(), Counter()
    for key, stamp in cache.entries():
        note = _note(cache, key)
        rows = (
            ["not readable: see verify"] if note is None else [note.get(x, f"{x} not noted") for x in ("kind", "model")]
        )
        for row in ("", *(f"  {row}" for row in rows)):
            count[row] += 1
            size[row] += stamp.size
    temporary = [stamp.size for _, stamp in cache.place.files(TEMPORARY)]
    lines = [f"{root}: {_count(count.pop('', 0), 'entry')}, {_size(size[''])}"]
    lines += [f"{row}: {_count(n, 'entry')}, {_size(size[row])}" for row, n in sorted(count.items())]
    if temporary:
        lines.append(f"  being written, or left by killed runs: {len(temporary)}, {_size(sum(temporary))}")
    if foreign := cache.foreign():
        lines.append(f"  foreign files: {len(foreign)}, such as {foreign[0]}")
    return lines


def _note(cache: Cache, key: str) -> dict | None:
    """What the writer of an entry noted; None if it cannot be read."""
    try:
        note = json.loads(cache.metadata(key).get("note", "{}"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else {}


def _count(number: int, what: str) -> str:
    plural = what.removesuffix("y") + "ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _size(count: int) -> str:
    for unit in reversed(UNITS):
        if unit and count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.1f} {unit}B"
    return f"{count} bytes"


# -- command line ----------------------------------------------------------------------------------------------------


def root_of(text: str) -> Path | str:
    """A folder that is there, or a URL that can be asked."""
    if is_url(text):
        try:
            place(text).check(writes=False)
        except PlaceError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text.rstrip("/")
    path = Path(text).expanduser()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return path


def days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 10**6:
        raise argparse.ArgumentTypeError(f"{text}: a number of days, such as 30")
    return value


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: a size, such as 500M, 20G or 1.5T (powers of 1000)")
    return int(float(found[1]) * UNITS[found[2].upper()])


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (--help tells more)\n")


def parser() -> Parser:
    top = Parser(
        prog="python -m data.cache", description="Look after encoded clips and captions, in a folder or at a URL."
    )
    commands = top.add_subparsers(dest="command", required=True)
    told = {
        "verify": "read every entry whole; exit code 1 if one is broken (cut, changed, NaN) or a file is foreign",
        "repair": "remove broken entries, which the next precompute makes again, and temporary files older than a day",
        "prune": "remove what has not been used for long; not while a run trains from this folder",
        "stats": "entries and bytes, by kind and by model",
    }
    made = {}
    for name, text in told.items():
        made[name] = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made[name].add_argument("root", metavar="DIR", type=root_of, help="data.cache_dir, or output_dir/cache")
    one = made["prune"]
    one.add_argument("--older-than", metavar="DAYS", type=days, help="what was last used longer ago than so many days")
    one.add_argument(
        "--larger-than",
        metavar="SIZE",
        type=size,
        help="the longest unused, until the entries take no more than so much: 500M, 20G",
    )
    one.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and prints what it did. Returns the exit code, 0 or 1."""
    top = parser()
    given = vars(top.parse_args(arguments))
    command = given.pop("command")
    if command == "prune" and given["older_than"] is None and given["larger_than"] is None:
        top.error("prune needs --older-than DAYS or --larger-than SIZE")
    try:
        lines, good = verify(**given) if command == "verify" else (COMMANDS[command](**given), True)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*lines, sep="\n")
    return 0 if good else 1


COMMANDS = {"repair": repair, "prune": prune, "stats": stats}
