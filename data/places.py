"""Where a cache is: a local folder, or a store of objects at an fsspec URL. Both keep files under names like ab/x.y.

A folder is written to by rename, after a flush to the disk; a store takes objects whole, so that no reader sees half.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec

TEMPORARY = "tmp"  # the folder of what is being written
FIRST = 1 << 16  # bytes that are fetched for a header: those of entries are below 2 KB
STORES = {  # what fsspec can write whole, and the package that it does so with
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
    "memory": "fsspec",
    "file": "fsspec",
}


class PlaceError(ValueError):
    """A URL that no cache can be kept at; the message says why, and what to do."""


@dataclass(frozen=True)
class Stamp:
    """A file as it was when it was looked at: bytes, and seconds since 1970."""

    size: int
    written: float
    used: float
    """Last read or, where that is later or reads are not noted, written."""
    identity: tuple[int, int] | None = None
    """Of a local file: device and inode."""


def is_url(root: Path | str) -> bool:
    return isinstance(root, str) and "://" in root


def place(root: Path | str) -> "Folder | Store":
    """What is kept at a path or URL, there or not. PlaceError for a URL that cannot be one."""
    return Store(root.rstrip("/")) if is_url(root) else Folder(Path(root))


@dataclass(frozen=True)
class Folder:
    """A folder of the local file system, or of one that is mounted. Methods raise FileNotFoundError, OSError."""

    root: Path
    local = True

    def at(self, name: str) -> Path:
        return self.root / name

    def head(self, name: str, most: int) -> tuple[bytes, Stamp]:
        """The 8 bytes that tell the length of a safetensors header, and as much of it as there is, up to `most`."""
        with open(self.at(name), "rb") as file:
            start = file.read(8)
            return start + file.read(min(int.from_bytes(start, "little"), most)), _stamp(os.fstat(file.fileno()))

    def read(self, name: str, noted: bool = True) -> tuple[bytes, Stamp]:
        """All bytes; where not `noted`, the reading does not count as use if that can be said (its owner may)."""
        descriptor = None
        if not noted and hasattr(os, "O_NOATIME"):
            with contextlib.suppress(PermissionError):  # somebody else's file
                descriptor = os.open(self.at(name), os.O_RDONLY | os.O_NOATIME)
        with open(self.at(name) if descriptor is None else descriptor, "rb") as file:
            return file.read(), _stamp(os.fstat(file.fileno()))

    def write(self, name: str, content: bytes) -> None:
        """Replaces what has this name; readers see the old bytes or the new ones."""
        temp = self.at(_temporary(name))
        try:
            self.at(name).parent.mkdir(parents=True, exist_ok=True)
            temp.parent.mkdir(exist_ok=True)
            with open(temp, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut may leave the name with no bytes behind it
            temp.replace(self.at(name))
        finally:
            temp.unlink(missing_ok=True)

    def remove(self, name: str, stamp: Stamp) -> None:
        """Unlink the file that was looked at, unless another process has put a new one in its place."""
        with contextlib.suppress(FileNotFoundError):
            if _stamp(self.at(name).stat()).identity == stamp.identity:
                self.at(name).unlink()

    def names(self, under: str = "") -> Iterator[str]:
        """All files, or those in a folder of it, in no order."""
        for folder, _, names in os.walk(self.at(under)):
            yield from (Path(folder, name).relative_to(self.root).as_posix() for name in names)

    def files(self, under: str = "") -> Iterator[tuple[str, Stamp]]:
        """The same, and what each is."""
        for name in self.names(under):
            with contextlib.suppress(FileNotFoundError):  # removed or renamed meanwhile
                yield name, _stamp(self.at(name).stat())

    def free(self) -> int | None:
        """Bytes."""
        return shutil.disk_usage(self.root).free


@dataclass(frozen=True)
class Store:
    """What is below a URL such as s3://bucket/folder. Methods raise FileNotFoundError, and what the store raises."""

    root: str
    local = False

    def __post_init__(self):
        if self.scheme not in STORES:
            raise PlaceError(
                f"{self.root}: a cache can be at {'://, '.join(STORES)}://, or in a local folder (mount other places)"
            )
        try:
            self._found("")
        except ImportError as error:
            package = STORES[self.scheme]
            raise PlaceError(f"{self.root}: needs the package {package}: pip install {package} ({error})") from error

    @property
    def scheme(self) -> str:
        return self.root.partition("://")[0]

    def _found(self, name: str) -> tuple[Any, str]:
        """(fsspec's file system, the path there). It is asked for each time: after a fork the old one is of no use."""
        # no listings cache: what other processes write must be seen
        return fsspec.core.url_to_fs(self.at(name), use_listings_cache=False)

    def at(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def head(self, name: str, most: int) -> tuple[bytes, Stamp]:
        files, path = self._found(name)
        stamp = _told(files.info(path))
        start = files.cat_file(path, 0, min(stamp.size, FIRST)) if stamp.size else b""
        end = min(8 + min(int.from_bytes(start[:8], "little"), most), stamp.size)
        return (start + files.cat_file(path, len(start), end) if end > len(start) else start), stamp

    def read(self, name: str, noted: bool = True) -> tuple[bytes, Stamp]:
        """All bytes, in one request: when they were written is not asked."""
        files, path = self._found(name)
        content = files.cat_file(path)
        return content, Stamp(len(content), 0.0, 0.0)

    def write(self, name: str, content: bytes) -> None:
        """Replaces what has this name; readers see the old bytes or the new ones."""
        files, path = self._found(name)
        if self.scheme != "file":
            files.pipe_file(path, content)
            return
        temp = self._found(_temporary(name))[1]  # fsspec writes local files in place
        for each in (path, temp):
            files.makedirs(files._parent(each), exist_ok=True)
        files.pipe_file(temp, content)
        files.mv(temp, path)

    def remove(self, name: str, stamp: Stamp) -> None:
        """Delete what was looked at, unless something of another size is there by now: as good as a store can tell."""
        files, path = self._found(name)
        with contextlib.suppress(FileNotFoundError):
            if files.info(path)["size"] == stamp.size:
                files.rm_file(path)

    def names(self, under: str = "") -> Iterator[str]:
        """All files, or those in a folder of it, in no order: one request for about 1,000 of them."""
        yield from (name for name, _ in self.files(under))

    def files(self, under: str = "") -> Iterator[tuple[str, Stamp]]:
        """The same, and what each is."""
        files, root = self._found("")
        try:
            found = files.find(self._found(under)[1], detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            yield path.removeprefix(root).lstrip("/"), _told(info)

    def free(self) -> int | None:
        """Not known."""
        return None

    def check(self, writes: bool) -> None:
        """Asks the store once, where it is written to by writing and removing an object. PlaceError if it refuses."""
        name = _temporary("check")
        try:
            if writes:
                self.write(name, b"x")
                self.remove(name, Stamp(1, 0.0, 0.0))
            else:
                next(self.files(TEMPORARY), None)
        except Exception as error:  # (no bucket, no right, no network: each store's package has its own)
            what = "written to" if writes else "read"
            raise PlaceError(f"{self.root}: cannot be {what} ({type(error).__name__}: {error})") from error


def _temporary(name: str) -> str:
    """A name of one's own to write `name` under."""
    return f"{TEMPORARY}/{Path(name).stem}.{os.getpid()}.{secrets.token_hex(8)}.tmp"


def _stamp(stat: os.stat_result) -> Stamp:
    return Stamp(stat.st_size, stat.st_mtime, max(stat.st_atime, stat.st_mtime), (stat.st_dev, stat.st_ino))


def _told(info: dict[str, Any]) -> Stamp:
    """What fsspec tells of a file: each store in its own words, and not all of them when it was written."""
    words = ("mtime", "LastModified", "last_modified", "created")
    when = next((info[word] for word in words if info.get(word) is not None), float("inf"))  # of unknown age: young
    written = when.timestamp() if isinstance(when, datetime) else float(when)
    return Stamp(info["size"], written, written)
