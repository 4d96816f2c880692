"""A content-addressed store of encoded samples: one safetensors file per entry, whole or absent."""

import hashlib
import json
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

logger = logging.getLogger(__name__)

VERSION = "1"  # of the file's layout; entries of another one count as absent
STALE_SECONDS = 24 * 3600


class BrokenEntry(ValueError):
    """An entry that could not be read. It has been removed, so that the next precompute makes it again."""


class NonFinite(ValueError):
    """An encoder returned NaN or infinity. Nothing was written."""


def entry_key(**facts: Any) -> str:
    """SHA-256 of everything that makes an entry what it is, as 64 hex digits.

    Facts must be JSON values (a dtype, path or array is a TypeError: say which text stands for it).
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class Cache:
    """Entries under root/ab/abcdef....safetensors. Any number of processes may read and write at the same time.

    An entry is written under root/tmp, flushed to the disk and renamed, so a killed run leaves only files there, which
    nobody reads and which are removed when a day old. Whatever else lies in the folder is left alone.
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
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                try:
                    return _metadata(file, stat.st_size).get("version") == VERSION
                except BrokenEntry as error:
                    self._remove(path, stat)
                    logger.warning("%s: %s; removed, it will be made again", path, error)
                    return False
        except FileNotFoundError:
            return False

    def get(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry. KeyError if it is absent; BrokenEntry, after removing it, if it cannot be read."""
        if key not in self:
            raise KeyError(f"{key} is not in the cache {self.root}")
        path = self._path(key)
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            content = file.read()
        try:
            return safetensors.torch.load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            self._remove(path, stat)
            raise BrokenEntry(f"{path}: {error}; removed: run the precompute stage again") from error

    def put(self, key: str, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        """Write an entry, replacing any older one. NonFinite names note["source"] if a value is NaN or infinite.

        note: what a person wants to know about the file (source, bucket ...); kept in its metadata, never read back.
        """
        path = self._path(key)
        if not tensors:
            raise ValueError(f"{note.get('source')}: an entry needs at least one tensor")
        bad = [name for name, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]
        if bad:
            raise NonFinite(
                f"{note.get('source')}: the encoder returned NaN or infinite values ({', '.join(bad)}); not cached. "
                "Encode in fp32 or bf16 instead of fp16, or remove this sample"
            )
        # copies, because safetensors refuses two views of one storage
        own = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        metadata = {"version": VERSION, "note": json.dumps(note, sort_keys=True, ensure_ascii=False, default=str)}
        content = safetensors.torch.save(own, metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temp.mkdir(exist_ok=True)
        temp = self._temp / f"{key}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
        try:
            with open(temp, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut may leave the name with no bytes behind it
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """All entries by name, sorted; whether each is whole is for `in` to say."""
        found = self.root.glob("[0-9a-f][0-9a-f]/*.safetensors")
        return sorted(p.stem for p in found if re.fullmatch(r"[0-9a-f]{64}", p.stem) and p.stem[:2] == p.parent.name)

    def _path(self, key: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise ValueError(f"cache key {key!r} is not the 64 hex digits of entry_key()")
        return self.root / key[:2] / f"{key}.safetensors"

    def _remove(self, path: Path, stat: os.stat_result) -> None:
        """Unlink the file that was read, unless another process has put a new one in its place."""
        try:
            if os.path.samestat(stat, path.stat()):
                path.unlink()
        except FileNotFoundError:
            pass


def _metadata(file: BinaryIO, size: int) -> dict[str, str]:
    """The metadata of a safetensors file, or BrokenEntry if its header does not add up to `size` bytes."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise BrokenEntry(f"broken entry ({size} bytes, header missing)")
    try:
        header = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", {}))
        promised = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise BrokenEntry(f"broken entry ({size} bytes, header unreadable)") from error
    if promised != size:
        raise BrokenEntry(f"broken entry ({size} bytes, its header promises {promised})")
    return metadata
