"""WebDataset shards to rows: in each tar, `key.mp4` and `key.txt` or `key.json` are a clip and its captions."""

import json
import posixpath
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from data import tars
from data.lists import READERS, Columns, objects, read_text
from data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES

CLIPS = VIDEO_SUFFIXES | IMAGE_SUFFIXES
HELD_OUT = {"validation", "valid", "val", "dev", "test"}
CAPTIONS = (".txt", ".json")  # the first that a key has, unless columns are named: those are in the second
LISTS = frozenset({"videos.txt", "prompts.txt"} | {f"metadata{suffix}" for suffix in READERS})

Entry = tuple[Path, tuple[str, ...], str]  # clip, captions, where


def shards(path: str, problems: list[str]) -> list[Path] | None:
    """The tars that a source's path names, or is a folder of; None: none, so it is something else."""
    try:
        found = tars.named(path)
    except tars.TarError as error:
        problems.append(str(error))
        return []
    if found is None:
        folder = Path(path).expanduser()
        found, others = tars.below(folder) if folder.is_dir() else ([], [])
        if clips := [other for other in others if other.suffix.lower() in CLIPS or other.name.lower() in LISTS]:
            if found:
                problems.append(
                    f"{path}: holds {found[0].name} and {min(clips).name}: make sources of their own of tars and files"
                )
                return []
            return None
        return _one_split(folder, found, problems) if found else None
    if not found:
        problems.append(f"{path}: no tar is named so")
    return found


def _one_split(folder: Path, found: list[Path], problems: list[str]) -> list[Path]:
    """The tars, unless the words of their names say that some are for training and some for tests."""
    words = {word for tar in found for word in re.split(r"[/._-]", tar.relative_to(folder).as_posix().lower())}
    if "train" in words and (others := sorted(words & HELD_OUT)):
        problems.append(
            f"{folder}: has tars of the splits train and {' and '.join(others)}: give those of one as path, such as "
            f"{folder}/train-*.tar"
        )
        return []
    return found


def read_shards(paths: list[Path], source, problems: list[str]) -> Iterator[Entry]:
    """The clips of tars with their captions, tar by tar, sorted by name within each."""
    for tar in paths:
        if not tar.is_file():
            problems.append(f"{tar}: no such file")
            continue
        yield from read_tar(tar, source, problems)


def read_tar(tar: Path, source, problems: list[str]) -> Iterator[Entry]:
    """The clips of one tar with their captions, as a folder with the same files would give them."""
    refused: list[str] = []
    try:
        names = [name for name, _, _ in tars.members(tar, refused)]
    except (tars.TarError, OSError) as error:
        problems.append(str(error))
        return
    problems += refused
    names = sorted(name for name in names if not _hidden(name))
    keys: dict[str, dict[str, str]] = {}
    for name in names:
        stem, suffix = posixpath.splitext(name)
        if suffix.lower() in CAPTIONS:
            keys.setdefault(unicodedata.normalize("NFC", stem), {})[suffix.lower()] = name
    clips = [name for name in names if posixpath.splitext(name)[1].lower() in CLIPS]
    owners: dict[str, str] = {}
    for clip in clips:
        key = unicodedata.normalize("NFC", posixpath.splitext(clip)[0])
        if (owner := owners.setdefault(key, clip)) != clip:
            problems.append(f"{tar / clip}: has the key of {owner}: which of them its caption is of, nobody can say")
            continue
        found = _captions(tar, clip, keys.get(key, {}), source, problems)
        if found is not None:
            captions, where = found
            yield tar / clip, captions, f"{tar.name}/{where}"
    problems += [
        f"{tar / name}: a caption, but no clip of its name is with it"
        for key, files in keys.items()
        if key not in owners and not LISTS & {posixpath.basename(name).lower() for name in files.values()}
        for name in files.values()
    ]
    if lists := [name for name in names if posixpath.basename(name).lower() in LISTS and "/" not in name]:
        problems.append(f"{tar}: {lists[0]} is not read in a tar: give each clip its own .txt or .json, or unpack it")
    if not clips:
        problems.append(f"{tar}: no clips in it ({' '.join(sorted(CLIPS))})")


def _captions(tar: Path, clip: str, files: dict[str, str], source, problems: list[str]) -> tuple | None:
    """(captions, the member that holds them); None and a problem where they cannot be read."""
    kind = next((kind for kind in CAPTIONS if kind in files), None)
    if source.caption_column and ".json" in files:
        kind = ".json"
    if kind is None:
        if source.allow_empty_captions:
            return ("",), clip
        stem = posixpath.splitext(posixpath.basename(clip))[0]
        problems.append(
            f"{tar / clip}: no caption: pack {stem}.txt or {stem}.json with it, or set allow_empty_captions of its "
            "entry in data.train"
        )
        return None
    member = tar / files[kind]
    text = read_text(member, problems)
    if text is None:
        return None
    if kind == ".txt":
        return (text.strip(),), files[kind]
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{member}: not JSON ({error})")
        return None
    if isinstance(row, dict):
        row["file_name"] = clip
    records = list(objects([(1, row)], member, Columns(captions=source.caption_column), problems))
    return (records[0].captions, files[kind]) if records else None


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
