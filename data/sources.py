"""Where clips and captions come from: folders and lists to rows, and everything that is wrong with them at once.

A list is UTF-8 (with or without BOM, any line ending), whatever the system's own encoding is. A caption never moves to
another clip: what cannot be paired is a problem with its file and line, and nothing is left out in silence.
"""

import csv
import difflib
import io
import json
import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from data.video import IMAGE_SUFFIXES, VIDEO_SUFFIXES

LISTS = ("videos.txt", "metadata.csv", "metadata.jsonl")
CAPTION_COLUMNS = ("caption", "text", "prompt")
ALLOW = "set allow_empty_captions of its entry in data.train"


@dataclass(frozen=True)
class Source:
    """One place to take clips from."""

    path: str
    """Folder of clips with a .txt caption beside each, or with videos.txt + prompts.txt, metadata.csv or
    metadata.jsonl; or such a list, or one clip, itself."""
    repeats: int = 1
    """How often each clip counts in an epoch."""
    caption_prefix: str = ""
    """Put before every caption as it is: end it with a blank if it should stand apart."""
    caption_column: str | None = None
    """Column of a csv or jsonl list that holds the caption; null takes the first of caption, text, prompt."""
    allow_empty_captions: bool = False
    """Train clips without a caption on the empty one instead of reporting them."""

    def __post_init__(self):
        wrong = []
        for name, kind in {"path": str, "repeats": int, "caption_prefix": str, "allow_empty_captions": bool}.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wrong.append(f"{name} must be {kind.__name__}, got {value!r}")
        if self.caption_column is not None and not isinstance(self.caption_column, str):
            wrong.append(f"caption_column must be str or null, got {self.caption_column!r}")
        if isinstance(self.path, str) and not self.path.strip():
            wrong.append("path is empty")
        if isinstance(self.repeats, int) and self.repeats < 1:
            wrong.append(f"repeats must be 1 or more, got {self.repeats}")
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


@dataclass(frozen=True)
class Row:
    """One clip with its caption (prefix included), and where the pair was found: "prompts.txt line 3"."""

    path: Path
    caption: str
    where: str
    repeats: int


Entry = tuple[Path, str, str]  # clip, caption, where


def read_source(source: Source) -> tuple[list[Row], list[str]]:
    """All rows of a source in a fixed order, and all problems. With problems, the rows are those that are sound.

    Clips are looked for, not opened. Folders are read with their subfolders, sorted by relative path.
    """
    root = Path(os.path.expanduser(source.path))
    if not root.exists():
        root = Path(os.path.expanduser(source.path.strip()))  # a blank pasted along with the path
    if not root.exists():
        tried = "" if root.is_absolute() else f" (tried {root.absolute()})"
        return [], [f"{source.path}: no such file or folder{tried}"]
    problems: list[str] = []
    entries = list(_entries(root, source, problems))
    if not entries and not problems:
        problems.append(f"{root}: lists no clips")
    return [Row(clip, source.caption_prefix + text, where, source.repeats) for clip, text, where in entries], problems


def _entries(root: Path, source: Source, problems: list[str]) -> Iterator[Entry]:
    listing = root
    if root.is_dir():
        found = [name for name in LISTS if (root / name).is_file()]
        if len(found) > 1:
            problems.append(f"{root}: holds {' and '.join(found)}: keep one, or give the one you mean as path")
            return
        listing = root / found[0] if found else root
    suffix = listing.suffix.lower()
    if listing.is_dir():
        yield from _pairs(listing, list(_walk(listing)), source, problems)
    elif suffix in VIDEO_SUFFIXES | IMAGE_SUFFIXES:
        beside = [path for path in listing.parent.iterdir() if path.suffix.lower() == ".txt"]
        yield from _pairs(listing.parent, [listing, *beside], source, problems)
    elif suffix == ".csv":
        yield from _csv_list(listing, source, problems)
    elif suffix == ".jsonl":
        yield from _jsonl_list(listing, source, problems)
    elif listing.name.lower() == "videos.txt":
        yield from _two_lists(listing, source, problems)
    else:
        problems.append(f"{listing}: not a list that is read here: use videos.txt (with prompts.txt), .csv or .jsonl")


# -- a folder of clip + caption file --------------------------------------------------------------------------------


def _walk(root: Path) -> Iterator[Path]:
    """Files below root, links followed once; hidden files and folders (also macOS "._x" companions) left out."""
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        true_folder = os.path.realpath(folder)
        if true_folder in seen:
            folders.clear()
            continue
        seen.add(true_folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _pairs(root: Path, files: list[Path], source: Source, problems: list[str]) -> Iterator[Entry]:
    def pair(path: Path) -> tuple[Path, str]:
        return path.parent, unicodedata.normalize("NFC", path.stem)  # macOS writes names decomposed

    files = sorted(files, key=lambda path: path.relative_to(root).as_posix())
    texts = {pair(path): path for path in files if path.suffix.lower() == ".txt"}
    clips = [path for path in files if path.suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES]
    owners: dict[tuple[Path, str], Path] = {}
    for clip in clips:
        text = texts.get(pair(clip))
        if text is None:
            if source.allow_empty_captions:
                yield clip, "", clip.relative_to(root).as_posix()
            else:
                problems.append(f"{clip}: no caption: write {clip.stem}.txt beside it, or {ALLOW}")
            continue
        owner = owners.setdefault(pair(clip), clip)
        if owner is not clip:
            problems.append(f"{clip}: shares {text.name} with {owner.name}: rename one, or list them in metadata.csv")
            continue
        content = _read_text(text, problems)
        if content is None:
            continue
        if _caption_ok(content, str(text), source, problems):
            yield clip, content.strip(), text.relative_to(root).as_posix()
    taken = {pair(clip) for clip in clips}
    for path in files:
        if pair(path) in texts and pair(path) not in taken and path.suffix.lower() != ".txt":
            problems.append(f"{path}: has a caption, but {path.suffix or 'no suffix'} is not a kind of clip read here")
    if not clips:
        problems.append(f"{root}: no clips in it ({' '.join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))})")
    if problems and (root / "prompts.txt").is_file():
        problems.append(f"{root / 'prompts.txt'}: not used, because there is no videos.txt beside it")


# -- lists ----------------------------------------------------------------------------------------------------------


def _two_lists(videos: Path, source: Source, problems: list[str]) -> Iterator[Entry]:
    prompts = videos.with_name("prompts.txt")
    if not prompts.is_file():
        problems.append(f"{prompts}: no such file; it holds the captions of {videos}, line by line")
        return
    clips, captions = _read_lines(videos, problems), _read_lines(prompts, problems)
    paths, fine = [], []
    if clips is not None:
        _drop_blank_end(clips, 0)
        paths = [_find(text, videos, number, problems) for number, text in enumerate(clips, 1)]
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
            yield path, caption, f"{prompts.name} line {number}"


def _csv_list(listing: Path, source: Source, problems: list[str]) -> Iterator[Entry]:
    text = _read_text(listing, problems)
    if text is None:
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for values in reader:
            line, number = number, reader.line_num + 1  # a quoted caption may span lines: name its first
            if not values:
                continue
            if header is None:
                header = [name.strip() for name in values]
                column = _caption_column(header, f"{listing} line {line}", source, problems)
                if column is None:
                    return
                continue
            if len(values) != len(header):
                problems.append(
                    f"{listing} line {line}: {len(values)} fields, the header has {len(header)}; "
                    "put double quotes around a caption with commas"
                )
                continue
            row = dict(zip(header, values, strict=True))
            path = _find(row["file_name"], listing, line, problems)
            if _caption_ok(row[column], f"{listing} line {line}", source, problems) and path:
                yield path, row[column].strip(), f"{listing.name} line {line}"
    except csv.Error as error:
        problems.append(
            f'{listing} line {number}: {error}; write a double quote in a quoted caption as "" (rest not read)'
        )


def _jsonl_list(listing: Path, source: Source, problems: list[str]) -> Iterator[Entry]:
    for number, line in enumerate((_read_text(listing, problems) or "").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{listing} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(
                f'{where} column {error.colno}: not JSON ({error.msg}); a quote in a caption is written \\"'
            )
            continue
        if not isinstance(row, dict):
            problems.append(f'{where}: not an object like {{"file_name": "a.mp4", "caption": "..."}}')
            continue
        column = _caption_column(list(row), where, source, problems)
        if column is None:
            continue
        if wrong := [name for name in ("file_name", column) if not isinstance(row[name], str)]:
            problems.append(f"{where}: {' and '.join(wrong)} must be text, got {row[wrong[0]]!r}")
            continue
        path = _find(row["file_name"], listing, number, problems)
        if _caption_ok(row[column], where, source, problems) and path:
            yield path, row[column].strip(), f"{listing.name} line {number}"


def _caption_column(columns: list[str], where: str, source: Source, problems: list[str]) -> str | None:
    wanted = [source.caption_column] if source.caption_column else CAPTION_COLUMNS
    column = next((name for name in wanted if name in columns), None)
    missing = [] if "file_name" in columns else ["file_name"]
    if column is None:
        missing.append(" or ".join(wanted))
    if len(set(columns)) < len(columns):
        problems.append(f"{where}: two columns have one name: {', '.join(columns)}")
        return None
    if not missing:
        return column
    near = "; columns are separated by commas" if len(columns) == 1 and {";", "\t"} & set(columns[0]) else ""
    problems.append(f"{where}: no column {' and no '.join(missing)}; there are {', '.join(columns) or 'none'}{near}")
    return None


# -- parts of lists -------------------------------------------------------------------------------------------------


def _read_text(path: Path, problems: list[str]) -> str | None:
    """The text of a UTF-8 file with line ends as \\n, or None and a problem for each line that is not UTF-8."""
    raw = path.read_bytes()
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        problems.append(f"{path}: is UTF-16: save it as UTF-8")
        return None
    if raw.startswith(b"version https://git-lfs"):
        problems.append(f"{path}: a Git LFS pointer, not the text itself: run `git lfs pull`")
        return None
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        for number, line in enumerate(raw.split(b"\n"), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                problems.append(
                    f"{path} line {number}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
                    "it may be Windows-1252: save the file as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)"
                )
        return None


def _read_lines(path: Path, problems: list[str]) -> list[str] | None:
    """Lines without surrounding blanks. Split at line ends only, unlike str.splitlines, which also cuts captions."""
    text = _read_text(path, problems)
    return None if text is None else [line.strip() for line in text.removesuffix("\n").split("\n")]


def _drop_blank_end(lines: list[str], keep: int) -> None:
    while len(lines) > keep and not lines[-1]:
        lines.pop()


def _caption_ok(caption: str, where: str, source: Source, problems: list[str]) -> bool:
    if not caption.strip() and not source.allow_empty_captions:
        problems.append(f"{where}: the caption is empty: write one, or {ALLOW}")
        return False
    try:
        caption.encode("utf-8")
    except UnicodeEncodeError:
        problems.append(f"{where}: the caption holds half a character (a lone \\ud800..\\udfff): write it anew")
        return False
    return True


def _find(text: str, listing: Path, number: int, problems: list[str]) -> Path | None:
    """The file that a list names, relative to the list; quotes, backslashes and composed letters are forgiven."""
    text = text.strip()
    if not text:
        problems.append(f"{listing} line {number}: names no clip: a blank line would shift every later pair")
        return None
    plain = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    for name in dict.fromkeys((text, plain, plain.replace("\\", "/"))):
        for form in ("NFC", "NFD"):
            for spelled in (name, unicodedata.normalize(form, name)):
                path = listing.parent / spelled
                if path.is_file():
                    return path
    tried = listing.parent.absolute() / plain.replace("\\", "/")
    problems.append(f"{listing} line {number}: no such file {text} (tried {tried})")
    return None
