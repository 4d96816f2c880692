"""A content-addressed store of encoded samples: one safetensors file per entry, whole or absent.

`python -m data.cache verify|repair|prune|stats DIR` looks after one (data/cache_commands.py).
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

logger = logging.getLogger(__name__)

VERSION = "1"  # of the file's layout; entries of another one count as absent
MOST_HEADER = 100_000_000  # bytes; what safetensors itself accepts
STALE_SECONDS = 24 * 3600
OWN_FILES = frozenset({"clips.json", "weights.json"})  # what is remembered of clips and weights, beside the entries


class BrokenEntry(ValueError):
    """An entry that could not be read. It has been removed, so that the next precompute makes it again."""


class NonFinite(ValueError):
    """An encoder returned NaN or infinity. Nothing was written."""


class DiskFull(ValueError):
    """An entry did not fit on the disk; what was there before is whole. `needed`: its bytes."""

    def __init__(self, message: str, needed: int):
        super().__init__(message, needed)  # both as args, so that it can be pickled
        self.needed = needed

    def __str__(self) -> str:
        return self.args[0]


def entry_key(**facts: Any) -> str:
    """SHA-256 of everything that makes an entry what it is, as 64 hex digits.

    Facts must be JSON values (a dtype, path or array is a TypeError: say which text stands for it).
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class Cache:
    """Entries under root/ab/abcdef....safetensors. Any number of processes may read and write at the same time.

    An entry is written under root/tmp, flushed to the disk and renamed, so a killed run leaves only files there, which
    nobody reads and which are removed when a day old. Whatever else lies in the folder is left alone (`foreign`).
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        self._temp = self.root / "tmp"
        for path in self._temp.glob("*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process removed or renamed it

    def __contains__(self, key: str) -> bool:
        """Whether a whole entry is there, from its header and size alone; a broken one is removed with a warning."""
        path = self.path(key)
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                try:
                    return read_metadata(header_of(file), stat.st_size).get("version") == VERSION
                except BrokenEntry as error:
                    self.remove(path, stat)
                    logger.warning("%s: %s; removed, it will be made again", path, error)
                    return False
        except FileNotFoundError:
            return False

    def get(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry. KeyError if it is absent; BrokenEntry, after removing it, if it cannot be read."""
        if key not in self:
            raise KeyError(f"{key} is not in the cache {self.root}")
        path = self.path(key)
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            content = file.read()
        try:
            return safetensors.torch.load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            self.remove(path, stat)
            raise BrokenEntry(f"{path}: {error}; removed: run the precompute stage again") from error

    def put(self, key: str, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        """Write an entry, replacing any older one. NonFinite names note["source"] if a value is NaN or infinite;
        DiskFull says what is needed and what is free.

        note: what a person wants to know about the file (source, kind, model); kept in its metadata for `stats`.
        """
        path = self.path(key)
        if not tensors:
            raise ValueError(f"{note.get('source')}: an entry needs at least one tensor")
        if bad := non_finite(tensors):
            raise NonFinite(
                f"{note.get('source')}: the encoder returned NaN or infinite values ({', '.join(bad)}); not cached. "
                "Encode in fp32 or bf16 instead of fp16, or remove this sample"
            )
        # copies, because safetensors refuses two views of one storage
        own = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        text = json.dumps(note, sort_keys=True, default=str)  # ASCII, because a file's name need not be UTF-8
        content = safetensors.torch.save(own, {"version": VERSION, "note": text, "crc32": checksum(own)})
        temp = self._temp / f"{key}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._temp.mkdir(exist_ok=True)
            with open(temp, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut may leave the name with no bytes behind it
            temp.replace(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            temp.unlink(missing_ok=True)  # before what is free is counted
            raise DiskFull(
                f"{self.root}: no space left ({error.strerror}) for {note.get('source')}: {len(content)} bytes are "
                f"needed, {shutil.disk_usage(self.root).free} are free. What was encoded before is kept: free some "
                "space (python -m data.cache prune) or choose another data.cache_dir, and run again",
                len(content),
            ) from error
        finally:
            temp.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """All entries by name, sorted; whether each is whole is for `in` to say."""
        return sorted(path.stem for path in self._files() if self._is_entry(path))

    def foreign(self) -> list[Path]:
        """Files in the folder that are no entry, by name, and nothing else that this project keeps there; sorted."""
        return sorted(path for path in self._files() if not self._is_entry(path) and not self._is_own(path))

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self.root):
            yield from (Path(folder, name) for name in names)

    def _is_entry(self, path: Path) -> bool:
        return re.fullmatch(r"[0-9a-f]{64}\.safetensors", path.name) and path == self.path(path.stem)

    def _is_own(self, path: Path) -> bool:
        if path.parent == self._temp:
            return path.suffix == ".tmp"
        name = re.sub(r"^\.(.+\.json)\.\d+\.[0-9a-f]+$", r"\1", path.name)  # one that is being written
        return path.parent == self.root and name in OWN_FILES

    def path(self, key: str) -> Path:
        """The file of an entry, there or not."""
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError(f"cache key {key!r} is not the 64 hex digits of entry_key()")
        return self.root / key[:2] / f"{key}.safetensors"

    def remove(self, path: Path, stat: os.stat_result) -> None:
        """Unlink the entry that was looked at, unless another process has put a new one in its place."""
        try:
            if os.path.samestat(stat, path.stat()):
                path.unlink()
        except FileNotFoundError:
            pass


def non_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of those that hold NaN or infinity."""
    return [name for name, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of the bytes of contiguous CPU tensors in the order of their names: finds bits that a disk has changed."""
    total = 0
    for _, tensor in sorted(tensors.items()):
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy(), total)
    return f"{total:08x}"


def read_metadata(start: bytes, size: int | None = None) -> dict[str, str]:
    """The metadata of a safetensors file of `size` bytes that begins with `start`, its header; None: not looked at.

    BrokenEntry if the header cannot be read, or does not add up to `size`.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > len(start) - 8:
        raise BrokenEntry(f"broken entry ({len(start)} bytes, header missing)")
    try:
        header = json.loads(start[8 : 8 + length])
        metadata = dict(header.pop("__metadata__", {}))
        promised = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise BrokenEntry(f"broken entry ({size or len(start)} bytes, header unreadable)") from error
    if size is not None and promised != size:
        raise BrokenEntry(f"broken entry ({size} bytes, its header promises {promised})")
    return metadata


def header_of(file: BinaryIO) -> bytes:
    """The header of a safetensors file and its length before it, or what there is of them."""
    start = file.read(8)
    return start + file.read(min(int.from_bytes(start, "little"), MOST_HEADER))


if __name__ == "__main__":
    from data.cache_commands import main

    raise SystemExit(main())
