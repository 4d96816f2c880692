"""A content-addressed store of encoded samples: one safetensors file per entry, whole or absent.

`python -m data.cache verify|repair|prune|stats DIR` (or URL) looks after one (data/cache_commands.py).
"""

import errno
import hashlib
import json
import logging
import re
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from data.places import TEMPORARY, Folder, Stamp, Store, place

logger = logging.getLogger(__name__)

VERSION = "1"  # of the file's layout; entries of another one count as absent
MOST_HEADER = 100_000_000  # bytes; what safetensors itself accepts
STALE_SECONDS = 24 * 3600
FEW = 100  # entries at a URL that are asked for one by one
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

    `root` is a local folder or an fsspec URL (data/places.py). In a folder an entry is written under root/tmp, flushed
    to the disk and renamed, so a killed run leaves only files there, which nobody reads and which are removed when a
    day old. Whatever else lies there is left alone (`foreign`).
    """

    def __init__(self, root: Path | str):
        self.place = place(root)
        self.root = self.place.root
        if self.place.local:
            sweep(self.place)

    def __contains__(self, key: str) -> bool:
        """Whether a whole entry is there, from its header and size alone; a broken one is removed with a warning."""
        name = self._name(key)
        try:
            start, stamp = self.place.head(name, MOST_HEADER)
        except FileNotFoundError:
            return False
        try:
            return read_metadata(start, stamp.size).get("version") == VERSION
        except BrokenEntry as error:
            self.place.remove(name, stamp)
            logger.warning("%s: %s; removed, it will be made again", self.path(key), error)
            return False

    def absent(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose entries are to be made.

        In a folder each entry is looked at, as by `in`. So are a few at a URL; of many there, names and sizes are
        listed, which costs one request in a thousand: an object that is there is whole, and what has happened to it
        since is found when it is read.
        """
        keys = set(keys)
        if self.place.local or len(keys) < FEW:
            return {key for key in keys if key not in self}
        return keys - {key for key, stamp in self.entries() if stamp.size}

    def get(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry. KeyError if it is absent; BrokenEntry, after removing it, if it cannot be read."""
        name = self._name(key)
        try:
            content, stamp = self.place.read(name)
        except FileNotFoundError:
            raise KeyError(f"{key} is not in the cache {self.root}") from None
        try:
            version = read_metadata(content, len(content)).get("version")
            tensors = safetensors.torch.load(content) if version == VERSION else None
        except (SafetensorError, ValueError, KeyError) as error:
            self.place.remove(name, stamp)
            raise BrokenEntry(f"{self.path(key)}: {error}; removed: run the precompute stage again") from error
        if tensors is None:
            raise KeyError(f"{key} in the cache {self.root} has another layout ({version}, not {VERSION})")
        return tensors

    def put(self, key: str, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        """Write an entry, replacing any older one. NonFinite names note["source"] if a value is NaN or infinite;
        DiskFull says what is needed and what is free.

        note: what a person wants to know about the file (source, kind, model); kept in its metadata for `stats`.
        """
        name = self._name(key)
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
        try:
            self.place.write(name, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or (free := self.place.free()) is None:
                raise
            raise DiskFull(
                f"{self.root}: no space left ({error.strerror}) for {note.get('source')}: {len(content)} bytes are "
                f"needed, {free} are free. What was encoded before is kept: free some "
                "space (python -m data.cache prune) or choose another data.cache_dir, and run again",
                len(content),
            ) from error

    def keys(self) -> list[str]:
        """All entries by name, sorted; whether each is whole is for `in` to say."""
        return sorted(Path(name).stem for name in self.place.names() if self._is_entry(name))

    def entries(self) -> list[tuple[str, Stamp]]:
        """All entries, as `keys`, and what the file of each is."""
        found = [(Path(name).stem, stamp) for name, stamp in self.place.files() if self._is_entry(name)]
        return sorted(found, key=lambda entry: entry[0])

    def foreign(self) -> list[Path | str]:
        """Files in the folder that are no entry, by name, and nothing else that this project keeps there; sorted."""
        names = (name for name in self.place.names() if not self._is_entry(name) and not self._is_own(name))
        return sorted(map(self.place.at, names))

    def _is_entry(self, name: str) -> bool:
        key = Path(name).stem
        return bool(re.fullmatch(r"[0-9a-f]{64}", key)) and name == self._name(key)

    def _is_own(self, name: str) -> bool:
        if re.fullmatch(rf"{TEMPORARY}/[^/]+\.tmp", name):
            return True
        return re.sub(r"^\.(.+\.json)\.\d+\.[0-9a-f]+$", r"\1", name) in OWN_FILES  # or one that is being written

    def _name(self, key: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError(f"cache key {key!r} is not the 64 hex digits of entry_key()")
        return f"{key[:2]}/{key}.safetensors"

    def path(self, key: str) -> Path | str:
        """The file of an entry, there or not; at a URL, its URL."""
        return self.place.at(self._name(key))

    def read(self, key: str, noted: bool) -> tuple[bytes, Stamp]:
        """All bytes of an entry and what its file is; not `noted`: so that it does not count as used."""
        return self.place.read(self._name(key), noted)

    def metadata(self, key: str) -> dict[str, str]:
        """The metadata of an entry; BrokenEntry if its header cannot be read."""
        return read_metadata(self.place.head(self._name(key), MOST_HEADER)[0])

    def remove(self, key: str, stamp: Stamp) -> None:
        """Removes the entry that was looked at, unless another process has put a new one in its place."""
        self.place.remove(self._name(key), stamp)


def sweep(at: Folder | Store) -> int:
    """Removes what killed runs left half written a day ago or earlier; returns how many."""
    stale = [(name, stamp) for name, stamp in at.files(TEMPORARY) if time.time() - stamp.written > STALE_SECONDS]
    stale = [(name, stamp) for name, stamp in stale if re.fullmatch(rf"{TEMPORARY}/[^/]+\.tmp", name)]
    for name, stamp in stale:
        at.remove(name, stamp)
    return len(stale)


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


if __name__ == "__main__":
    from data.cache_commands import main

    raise SystemExit(main())
