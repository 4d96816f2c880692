"""Where clips and captions come from: folders, lists and Hub data sets to rows, and everything that is wrong at once.

A caption never moves to another clip: what cannot be paired is a problem with its file and line, and nothing is left
out in silence.
"""

import difflib
import itertools
import json
import math
import os
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from data.buckets import Bucket
from data.hub import CLIPS, is_hub_id, snapshot
from data.lists import READERS, Columns, read_lines, read_list, read_text
from data.shards import read_shards, shards

LISTS = ("videos.txt", *(f"metadata{suffix}" for suffix in READERS))
ALLOW = "set allow_empty_captions of its entry in data.train"
JUNK = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
TRAIN, HELD_OUT = {"train", "training"}, {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}


@dataclass(frozen=True)
class Source:
    """One place to take clips from."""

    path: str
    """Folder of clips with a .txt caption beside each, or with a list (LISTS); such a list, or one clip, itself; tars
    (a file, a folder of them, shards/*.tar, shard-{000..009}.tar); or the id of a data set on the Hub, owner/name."""
    repeats: int = 1
    """How often each clip counts in an epoch."""
    caption_prefix: str = ""
    """Put before every caption as it is: end it with a blank if it should stand apart."""
    caption_column: str | None = None
    """Column of a list that holds the caption, or several such as "short,long"; null takes the first of caption, text,
    prompt."""
    allow_empty_captions: bool = False
    """Train clips without a caption on the empty one instead of reporting them."""
    weight: float = 1.0
    """What the loss of its clips is multiplied by, as for regularisation (prior-preservation) clips."""
    buckets: tuple[str, ...] = ()
    """Sizes that its clips train at, such as 49x512x768; none: those of data.buckets."""
    clip_column: str = "file_name"
    """Column of a list that names the clip."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the Hub."""
    split: str | None = None
    """Part of a data set to take, such as train: the folder of that name, or of that name in data/."""

    def __post_init__(self):
        wrong = []
        if isinstance(self.weight, int) and not isinstance(self.weight, bool):
            object.__setattr__(self, "weight", float(self.weight))
        buckets = [self.buckets] if isinstance(self.buckets, str) else self.buckets
        if isinstance(buckets, list | tuple) and all(isinstance(text, str) for text in buckets):
            object.__setattr__(self, "buckets", tuple(buckets))
        kinds = {"path": str, "repeats": int, "caption_prefix": str, "allow_empty_captions": bool, "clip_column": str}
        for name, kind in (kinds | {"weight": float, "buckets": tuple}).items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wrong.append(f"{name} must be {'a list of text' if kind is tuple else kind.__name__}, got {value!r}")
        for name in ("caption_column", "revision", "split"):
            if not isinstance(getattr(self, name), str | None):
                wrong.append(f"{name} must be str or null, got {getattr(self, name)!r}")
        if isinstance(self.path, str) and not self.path.strip():
            wrong.append("path is empty")
        if isinstance(self.repeats, int) and self.repeats < 1:
            wrong.append(f"repeats must be 1 or more, got {self.repeats}")
        if isinstance(self.weight, float) and not 0 < self.weight < math.inf:
            wrong.append(f"weight must be above 0 and finite, got {self.weight}")
        if isinstance(self.buckets, tuple):
            wrong += [str(error) for error in map(_bucket_error, self.buckets) if error]
        if isinstance(self.caption_column, str) and not Columns(captions=self.caption_column).named:
            wrong.append("caption_column is empty")
        if isinstance(self.split, str) and (self.split in ("", ".", "..") or set(self.split) & set("/\\")):
            wrong.append(f"split must be the name of a folder, got {self.split!r}")
        if wrong:
            raise ValueError(f"source {self.path!r}: {'; '.join(wrong)}")

    @classmethod
    def parse(cls, text: str) -> "Source":
        """A plain path, or a JSON object of the fields: '{"path": "clips/", "repeats": 2}'."""
        if not text.lstrip().startswith("{"):
            return cls(text)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"source {text!r}: not JSON, {error.msg} at column {error.colno}") from error
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"source {text!r}: unknown {', '.join(unknown)}; {hint}")
        if "path" not in values:
            raise ValueError(f"source {text!r}: path is missing")
        return cls(**values)


def _bucket_error(text: str) -> ValueError | None:
    try:
        Bucket.parse(text)
    except ValueError as error:
        return error
    return None


@dataclass(frozen=True)
class Row:
    """One clip with its captions (prefix included), and where the pair was found: "prompts.txt line 3"."""

    path: Path
    captions: tuple[str, ...]
    where: str
    repeats: int
    weight: float = 1.0
    buckets: tuple[str, ...] = ()
    prefix: str = ""
    """What the captions begin with because their source says so."""

    @property
    def caption(self) -> str:
        """The first, and mostly the only one."""
        return self.captions[0]


Entry = tuple[Path, tuple[str, ...], str]  # clip, captions, where


def read_source(source: Source) -> tuple[list[Row], list[str]]:
    """All rows of a source in a fixed order, and all problems. With problems, the rows are those that are sound.

    Clips are looked for, not opened. Folders are read with their subfolders, sorted by relative path. A Hub data set is
    downloaded, or found in the cache, and read as a folder.
    """
    root = Path(os.path.expanduser(source.path))
    if not root.exists():
        root = Path(os.path.expanduser(source.path.strip()))  # a blank pasted along with the path
    problems: list[str] = []
    if not root.exists() and not source.path.strip().lower().endswith(".tar"):  # nor a pattern of tars
        if not is_hub_id(source.path):
            tried = "" if root.is_absolute() else f" (tried {root.absolute()})"
            return [], [f"{source.path}: no such file or folder{tried}"]
        found = snapshot(source.path, source.revision, source.split, problems)
        if found is None:
            return [], problems
        root = found
    elif source.revision:
        problems.append(f"{root}: is no data set on the Hub, so it has no revision {source.revision}: leave that out")
    entries: list[Entry] = []
    try:
        entries += _entries(root, source, problems)
    except OSError as error:
        problems.append(f"{error.filename or root}: {error.strerror}")
    if not entries and not problems:
        problems.append(f"{root}: lists no clips")
    prefix = source.caption_prefix
    rows = [
        Row(clip, tuple(prefix + text for text in texts), where, source.repeats, source.weight, source.buckets, prefix)
        for clip, texts, where in entries
    ]
    return rows, problems


def _entries(root: Path, source: Source, problems: list[str]) -> Iterator[Entry]:
    part = _part(root, source, problems)
    if part is None:
        return
    suffix = root.suffix.lower()
    if (tars := shards(str(part), problems)) is not None:
        for clip, texts, where in read_shards(tars, source, problems):
            fine = [_caption_ok(text, str(clip), source, problems) for text in texts or ("",)]
            if all(fine):
                yield clip, texts or ("",), where
    elif root.is_dir():
        yield from _folder(root, part, source, problems)
    elif suffix in CLIPS:
        beside = [path for path in root.parent.iterdir() if path.suffix.lower() == ".txt"]
        yield from _pairs(root.parent, [root, *beside], source, problems)
    else:
        yield from _listed(root, root.name, source, problems)


def _listed(listing: Path, name: str, source: Source, problems: list[str]) -> Iterator[Entry]:
    """The rows of a list, whatever its format; `name` says in `where` which list it is."""
    if listing.suffix.lower() in READERS:
        for record in read_list(listing, Columns(source.clip_column, source.caption_column), problems):
            where = f"{listing} {record.place}"
            path = _find(record.clip, listing.parent, where, problems)
            texts = record.captions or ("",)
            fine = [_caption_ok(text, where, source, problems) for text in texts]
            if path and all(fine):
                yield path, texts, f"{name} {record.place}"
    elif listing.name.lower() == "videos.txt":
        yield from _two_lists(listing, name, source, problems)
    else:
        kinds = ", ".join(READERS)
        problems.append(f"{listing}: not a list that is read here: use videos.txt (with prompts.txt), {kinds}")


# -- folders --------------------------------------------------------------------------------------------------------


def _part(root: Path, source: Source, problems: list[str]) -> Path | None:
    """The folder of the source's split, or all of the source if it needs none."""
    if source.split:
        there = [path for path in (root / source.split, root / "data" / source.split) if path.is_dir()]
        if not there:
            problems.append(f"{root}: no folder for the split {source.split}, neither here nor in data/")
        return there[0] if there else None
    if root.is_dir() and not _lists_in(os.listdir(root)) and (splits := _splits(root)):
        problems.append(f"{root}: has the splits {' and '.join(splits)}: name one with split, or give its folder")
        return None
    return root


def _lists_in(names: Collection[str]) -> list[str]:
    """The lists among the files of a folder; videos.txt may also be the caption of a clip, such as videos.mp4."""
    captions = set()
    if "prompts.txt" not in map(str.lower, names):
        captions = {f"{stem}.txt" for stem, suffix in map(os.path.splitext, names) if suffix.lower() in CLIPS}
    return sorted(
        {name for name in names if name.lower() in LISTS} - captions, key=lambda name: LISTS.index(name.lower())
    )


def _folder(root: Path, part: Path, source: Source, problems: list[str]) -> Iterator[Entry]:
    """Where a folder has a list, that says what is in it and below; all other clips have caption files beside them."""
    files, lists = _walk(root if _lists_in(os.listdir(root)) else part, problems)  # a list at the top is for all splits
    for folder, group in itertools.groupby(lists, lambda path: path.parent):
        if len(names := [path.name for path in group]) > 1:
            problems.append(f"{folder}: holds {' and '.join(names)}: keep one, or give the one you mean as path")
            lists = [path for path in lists if path.parent != folder]
    if any(path.suffix.lower() in CLIPS for path in files) or not (lists or problems):
        yield from _pairs(part, files, source, problems)
    for listing in lists:
        for entry in _listed(listing, listing.relative_to(root).as_posix(), source, problems):
            if part == root or entry[0].is_relative_to(part):  # a list may name clips anywhere, a split not
                yield entry


def _splits(root: Path) -> list[str]:
    """The folders for training and for tests, if a data set has both: nobody means to train on all of them."""
    for place in (root, root / "data"):
        names = sorted(path.name for path in place.iterdir() if path.is_dir()) if place.is_dir() else []
        train, held_out = ([name for name in names if name.lower() in kind] for kind in (TRAIN, HELD_OUT))
        if train and held_out:
            return train + held_out
    return []


def _walk(root: Path, problems: list[str]) -> tuple[list[Path], list[Path]]:
    """Files below root, and lists, which stand for all that is in their folders and below.

    Links are followed once; hidden files and folders (also macOS "._x" companions) and junk are left out.
    """
    seen, found, lists = set(), [], []

    def closed(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=closed, followlinks=True):
        true_folder = os.path.realpath(folder)
        if true_folder in seen:
            folders.clear()
            continue
        seen.add(true_folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in JUNK)
        files = {name for name in files if not name.startswith(".")}
        if own := _lists_in(files):
            lists += [Path(folder, name) for name in own]
            folders.clear()
            continue
        odd = sorted(name for name in (*folders, *files) if not _is_unicode(name))
        problems += [f"{_printable(os.path.join(folder, name))}: its name is not UTF-8: rename it" for name in odd]
        folders[:] = [name for name in folders if name not in odd]
        found += [Path(folder, name) for name in files.difference(odd)]
    return found, lists


def _pairs(root: Path, files: list[Path], source: Source, problems: list[str]) -> Iterator[Entry]:
    def pair(path: Path) -> tuple[Path, str]:
        return path.parent, unicodedata.normalize("NFC", path.stem)  # macOS writes names decomposed

    files = sorted(files, key=lambda path: path.relative_to(root).as_posix())
    texts: dict[tuple[Path, str], Path] = {}
    for path in (path for path in files if path.suffix.lower() == ".txt"):
        if (other := texts.setdefault(pair(path), path)) != path:
            problems.append(f"{path}: has the name of {other.name} but for letters' case or spelling: keep one of them")
    clips = [path for path in files if path.suffix.lower() in CLIPS]
    owners: dict[tuple[Path, str], Path] = {}
    for clip in clips:
        text = texts.get(pair(clip))
        if text is None:
            if source.allow_empty_captions:
                yield clip, ("",), clip.relative_to(root).as_posix()
            else:
                problems.append(f"{clip}: no caption: write {clip.stem}.txt beside it, or {ALLOW}")
            continue
        owner = owners.setdefault(pair(clip), clip)
        if owner is not clip:
            problems.append(f"{clip}: shares {text.name} with {owner.name}: rename one, or list them in metadata.csv")
            continue
        content = read_text(text, problems)
        if content is None:
            continue
        if _caption_ok(content, str(text), source, problems):
            yield clip, (content.strip(),), text.relative_to(root).as_posix()
    taken = {pair(clip) for clip in clips}
    for path in files:
        if pair(path) in texts and pair(path) not in taken and path.suffix.lower() != ".txt":
            problems.append(f"{path}: has a caption, but {path.suffix or 'no suffix'} is not a kind of clip read here")
    if not clips:
        problems.append(f"{root}: no clips in it ({' '.join(sorted(CLIPS))})")
    if problems:
        named = (path for path in files if path.parent == root and path.suffix.lower() in READERS)
        problems += [f"{path}: not used: give it as path if it lists these clips" for path in named]
    if problems and (root / "prompts.txt").is_file():
        problems.append(f"{root / 'prompts.txt'}: not used, because there is no videos.txt beside it")


# -- lists ----------------------------------------------------------------------------------------------------------


def _two_lists(videos: Path, name: str, source: Source, problems: list[str]) -> Iterator[Entry]:
    prompts = videos.with_name("prompts.txt")
    if not prompts.is_file():
        problems.append(f"{prompts}: no such file; it holds the captions of {videos}, line by line")
        return
    clips, captions = read_lines(videos, problems), read_lines(prompts, problems)
    paths, fine = [], []
    if clips is not None:
        _drop_blank_end(clips, 0)
        paths = [_find(text, videos.parent, f"{videos} line {n}", problems) for n, text in enumerate(clips, 1)]
    if captions is not None:
        _drop_blank_end(captions, len(paths) if source.allow_empty_captions else 0)
        fine = [
            _caption_ok(text, f"{prompts} line {number}", source, problems) for number, text in enumerate(captions, 1)
        ]
    if clips is None or captions is None:
        return
    if len(clips) != len(captions):
        counts = f"{videos} has {len(clips)} lines, {prompts} has {len(captions)}"
        problems.append(f"{counts}: line n of the one must be the caption of line n of the other")
        return
    for number, (path, caption, ok) in enumerate(zip(paths, captions, fine, strict=True), 1):
        if path and ok:
            yield path, (caption,), f"{Path(name).with_name(prompts.name).as_posix()} line {number}"


# -- parts of lists -------------------------------------------------------------------------------------------------


def _drop_blank_end(lines: list[str], keep: int) -> None:
    while len(lines) > keep and not lines[-1]:
        lines.pop()


def _caption_ok(caption: str, where: str, source: Source, problems: list[str]) -> bool:
    if not caption.strip() and not source.allow_empty_captions:
        problems.append(f"{where}: the caption is empty: write one, or {ALLOW}")
        return False
    if not _is_unicode(caption):
        problems.append(f"{where}: the caption holds half a character (a lone \\ud800..\\udfff): write it anew")
        return False
    return True


def _is_unicode(text: str) -> bool:
    """Whether it has no half characters, which JSON may hold, and which stand for bytes of names that are no UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _find(text: str, folder: Path, where: str, problems: list[str]) -> Path | None:
    """The file that a list names, relative to the list; quotes, backslashes and composed letters are forgiven."""
    text = text.strip()
    if not text:
        problems.append(f"{where}: names no clip: a blank line would shift every later pair")
        return None
    plain = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    for name in dict.fromkeys((text, plain, plain.replace("\\", "/"))):
        for spelled in (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))):
            if _is_unicode(spelled) and os.path.isfile(
                path := folder / spelled
            ):  # unlike Path.is_file, False for a name that cannot be
                return path
    tried = folder.absolute() / plain.replace("\\", "/")
    problems.append(_printable(f"{where}: no such file {text} (tried {tried})"))
    return None
