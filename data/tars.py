"""Members of tar files, read where they lie: `/dir/shard.tar/name.mp4` is the path of one.

A tar is data from elsewhere: only regular files with a relative name count, and nothing is ever unpacked.
"""

import glob
import io
import os
import re
import tarfile
import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import BinaryIO

SUFFIX = ".tar"
BLOCK = 512
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
KEPT = 1_000_000  # members whose places are remembered in a process, about 200 MB
MOST = 100_000  # files that one brace pattern may name


class TarError(ValueError):
    """A tar that cannot be read whole; the message names it."""


# -- an index --------------------------------------------------------------------------------------------------------


class _Indices:
    """Of the tars that were looked at last, as long as they stay what they were: (members by name, what is refused)."""

    def __init__(self):
        self.lock, self.known = threading.Lock(), OrderedDict()

    def get(self, tar: str) -> tuple[dict[str, tuple[int, int]], list[str]]:
        stat = os.stat(tar)
        stamp = stat.st_size, stat.st_mtime_ns
        with self.lock:
            if tar in self.known and self.known[tar][0] == stamp:
                self.known.move_to_end(tar)
                return self.known[tar][1]
            found = _scan(tar)
            self.known[tar] = stamp, found
            while len(self.known) > 1 and sum(len(index[0]) for _, index in self.known.values()) > KEPT:
                self.known.popitem(last=False)
            return found


_indices = _Indices()


def members(tar: Path, refused: list[str] | None = None) -> list[tuple[str, int, int]]:
    """(name, offset, size) of the regular files in a tar, in its order. Raises TarError.

    What else is in it and could be meant as a file (links, devices, names that lead out of it) is told in `refused`.
    """
    index, wrong = _indices.get(os.path.abspath(tar))
    if refused is not None:
        refused += wrong
    return [(name, *place) for name, place in index.items()]


def _scan(tar: str) -> tuple[dict[str, tuple[int, int]], list[str]]:
    found: dict[str, tuple[int, int]] = {}
    refused, twice = [], set()
    size = os.path.getsize(tar)
    with open(tar, "rb") as file:
        head = file.read(8)
        if kind := next((kind for magic, kind in COMPRESSED.items() if head.startswith(magic)), None):
            raise TarError(f"{tar}: compressed with {kind}; members are read where they lie: decompress it")
        if head.startswith(b"version "):
            raise TarError(f"{tar}: a Git LFS pointer, not the tar itself: run `git lfs pull`")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # or it keeps them all
                    name = _name(member.name)
                    reason = _reason(member, name)
                    if reason:
                        refused.append(f"{tar}: {_shown(member.name)} {reason}")
                    elif member.isreg() and name:
                        if name in found:
                            twice.add(name)
                        found[name] = member.offset_data, member.size
                        if member.offset_data + member.size > size:
                            raise TarError(f"{tar}: cut short in {_shown(name)}: copy or download it again")
                end = archive.offset
        except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
            if isinstance(error, TarError):
                raise
            raise TarError(f"{tar}: not a tar, or damaged ({error})") from error
        _check_end(file, tar, end, size)
    for name in twice:  # which of them is meant, nobody can say
        del found[name]
        refused.append(f"{tar}: {name} is in it more than once: leave one")
    return found, refused


def _check_end(file: BinaryIO, tar: str, end: int, size: int) -> None:
    """tarfile takes whatever it cannot read for the end: only two blocks of zeros are, and nothing may follow them."""
    file.seek(end)
    mark = file.read(2 * BLOCK)
    if len(mark) < 2 * BLOCK and not any(mark):
        raise TarError(f"{tar}: has no end mark at {end}, so it is cut short or still being written: make it again")
    if any(mark):
        raise TarError(f"{tar}: what is at byte {end} of {size} is no member: damaged, copy or download it again")
    while block := file.read(1 << 20):
        if any(block):
            raise TarError(f"{tar}: goes on after its end mark: tars cannot be joined with cat; use each by itself")


def _name(name: str) -> str:
    """As paths write it: a/b.mp4, also of ./a//b.mp4."""
    plain = str(PurePosixPath(name))
    return "" if plain == "." else plain


def _reason(member: tarfile.TarInfo, name: str) -> str | None:
    """Why a member is not read, if that is worth telling."""
    if member.isdir():
        return None
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        return "leads out of the tar: not read"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        return "is not named in UTF-8: name it anew"
    if member.issym() or member.islnk():
        return f"is a link (to {_shown(member.linkname)}), which is not followed: pack the file itself (tar -h)"
    if not member.isreg():
        return "is neither a file nor a folder: not read"
    return "is a sparse file: pack it without --sparse" if member.issparse() else None


def _shown(name: str) -> str:
    return repr(name)[1:-1]


# -- paths to members ------------------------------------------------------------------------------------------------


def split(path: Path) -> tuple[str, str] | None:
    """The tar file and the name of the member that a path names; None for any other path."""
    text = os.fspath(path)
    if f"{SUFFIX}/" not in text.lower():
        return None
    for found in re.finditer(re.escape(f"{SUFFIX}/"), text, re.IGNORECASE):
        tar = text[: found.end() - 1]
        if os.path.isfile(tar):
            return os.path.abspath(tar), _name(text[found.end() :])
    return None


def locate(path: Path) -> tuple[str, int, int] | None:
    """(tar file, offset, size) of the bytes of a member; None if `path` is not that of a member that can be read."""
    parts = split(path)
    if parts is None:
        return None
    tar, name = parts
    try:
        place = _indices.get(tar)[0].get(name)
    except (TarError, OSError):
        return None
    return None if place is None else (tar, *place)


def is_file(path: Path) -> bool:
    """Whether there is such a file, or such a member."""
    return os.path.isfile(path) or locate(path) is not None


def stat(path: Path) -> os.stat_result:
    """Of the file that holds the bytes of `path`, so of a member its tar."""
    parts = split(path)
    return os.stat(parts[0] if parts else path)


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file or a member, for reading."""
    place = locate(path)
    if place is None:
        return open(path, "rb")
    tar, offset, size = place
    return io.BufferedReader(_Part(open(tar, "rb", buffering=0), offset, size), 1 << 16)


def read_bytes(path: Path) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def url(path: Path) -> str:
    """How FFmpeg is told to open a file or a member; the prefix keeps ':' and '%' in a name from meaning anything."""
    place = locate(path)
    if place is None:
        return f"file:{path}"
    tar, offset, size = place
    return f"subfile,,start,{offset},end,{offset + size},,:file:{tar}"


class _Part(io.RawIOBase):
    """Bytes offset .. offset + size - 1 of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, size: int):
        self.file, self.offset, self.size, self.at = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, where: int, whence: int = os.SEEK_SET) -> int:
        at = where + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise OSError(f"cannot seek to {at}")
        self.at = at
        return at

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self.size - self.at))
        self.file.seek(self.offset + self.at)
        done = self.file.readinto(memoryview(buffer)[:count])
        self.at += done
        return done

    def close(self) -> None:
        self.file.close()
        super().close()


# -- which tars ------------------------------------------------------------------------------------------------------


def named(text: str) -> list[Path] | None:
    """The tars that a source's path names: one, a pattern with * ? [], or braces: shard-{000..009}.tar, {a,b}.tar.

    In order of the braces, else sorted. Those that are not there are in the list too, if they are named one by one.
    None: it names no tars.
    """
    text = os.path.expanduser(text.strip())
    if not text.lower().endswith(SUFFIX) or os.path.isdir(text):
        return None
    if os.path.isfile(text):  # whatever letters its name has
        return [Path(text)]
    found = []
    for name in braces(text):
        if re.search(r"[*?\[]", name) and not os.path.exists(name):
            found += sorted(Path(path) for path in glob.glob(name, recursive=True) if os.path.isfile(path))
        else:
            found.append(Path(name))
    return found


def below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The tars in a folder and below, sorted by relative path, and all other files; hidden ones left out."""
    found, others = [], []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                (found if name.lower().endswith(SUFFIX) else others).append(Path(where, name))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix()), others


def braces(text: str) -> list[str]:
    """Every name that {000..009} and {a,b} stand for, as shells write them. TarError where these are too many."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if not found:
        return [text]
    first, last, words = found.groups()
    if words is not None:
        inner = words.split(",")
    else:
        step = 1 if int(first) <= int(last) else -1
        if abs(int(last) - int(first)) >= MOST:
            raise TarError(f"{text}: names more than {MOST} files")
        wide = max(map(len, (first, last))) if "0" in (first[0], last[0]) else 0
        inner = [f"{number:0{wide}d}" for number in range(int(first), int(last) + step, step)]
    rest = braces(text[found.end() :])
    if len(inner) * len(rest) > MOST:
        raise TarError(f"{text}: names more than {MOST} files")
    return [text[: found.start()] + word + end for word in inner for end in rest]
