"""Lists of clips and captions, row by row: lines of text, CSV, TSV, JSON, JSONL and parquet.

A list is UTF-8 (with or without BOM, any line ending), whatever the system's own encoding is. Whatever cannot be read
becomes a problem with its file, line and column, and no other row moves.
"""

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.tars import read_bytes

CAPTION_COLUMNS = ("caption", "text", "prompt")
LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Columns:
    """Which columns hold the clip and its captions."""

    clip: str = "file_name"
    captions: str | None = None
    """One name, or several with commas between; None takes the first of CAPTION_COLUMNS that there is."""

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.captions or "").split(",") if name.strip())

    def choose(self, there: list[str], where: str, problems: list[str], all_of: bool = True) -> list[str] | None:
        """The caption columns among those `there`, or None and a problem. `all_of`: all that are named must be."""
        if self.captions in there:
            wanted, found = [self.captions], [self.captions]
        elif self.named:
            wanted, found = list(self.named), [name for name in self.named if name in there]
        else:
            wanted, found = list(CAPTION_COLUMNS), [name for name in CAPTION_COLUMNS if name in there][:1]
        if len(set(there)) < len(there):
            problems.append(f"{where}: two columns have one name: {', '.join(there)}")
            return None
        missing = [] if self.clip in there else [self.clip]
        if self.named and all_of:
            missing += [name for name in wanted if name not in found]
        elif not found:
            missing.append(" or ".join(wanted))
        if not missing:
            return found
        near = ""
        if {";", "\t"} & set("".join(there)) or (len(there) == 1 and "," in there[0]):
            near = "; columns are separated by commas in .csv and by tabs in .tsv"
        elif missing[0] == "file_name":
            near = "; name the column of the clips with clip_column"
        problems.append(f"{where}: no column {' and no '.join(missing)}; there are {', '.join(there) or 'none'}{near}")
        return None


@dataclass(frozen=True)
class Record:
    """One row of a list: the clip as it is named there, and its captions, which may be empty or none."""

    clip: str
    captions: tuple[str, ...]
    place: str
    """Where in the list: "line 3"."""


def read_list(listing: Path, columns: Columns, problems: list[str]) -> Iterator[Record]:
    """The sound rows of a list in a format of READERS, in order."""
    yield from READERS[listing.suffix.lower()](listing, columns, problems)


# -- text -----------------------------------------------------------------------------------------------------------


def read_text(path: Path, problems: list[str]) -> str | None:
    """The text of a UTF-8 file with line ends as \\n, or None and a problem for each line that is not UTF-8."""
    try:
        raw = read_bytes(path)
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        problems.append(f"{path}: is UTF-16: save it as UTF-8")
        return None
    if raw.startswith(LFS):
        problems.append(f"{path}: a Git LFS pointer, not the text itself: run `git lfs pull`")
        return None
    raw = raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\x00" in raw:
        number = raw[: raw.index(b"\x00")].count(b"\n") + 1
        problems.append(f"{path} line {number}: holds a byte 0x00: it may be UTF-16, or no text: save it as UTF-8")
        return None
    try:
        return raw.decode("utf-8")
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


def read_lines(path: Path, problems: list[str]) -> list[str] | None:
    """Lines without surrounding blanks. Split at line ends only, unlike str.splitlines, which also cuts captions."""
    text = read_text(path, problems)
    return None if text is None else [line.strip() for line in text.removesuffix("\n").split("\n")]


def _line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


# -- tables ---------------------------------------------------------------------------------------------------------


def _separated(listing: Path, columns: Columns, problems: list[str]) -> Iterator[Record]:
    text = read_text(listing, problems)
    if text is None:
        return
    separator, name = ("\t", "tabs") if listing.suffix.lower() == ".tsv" else (",", "commas")
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # 131072 unless told: captions may be longer
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for values in reader:
            line, number = number, reader.line_num + 1  # a quoted caption may span lines: name its first
            if not values:
                continue
            if header is None:
                header = [title.strip() for title in values]
                chosen = columns.choose(header, f"{listing} line {line}", problems)
                if chosen is None:
                    return
                continue
            if len(values) != len(header):
                problems.append(
                    f"{listing} line {line}: {len(values)} fields, the header has {len(header)}; "
                    f"put double quotes around a caption with {name}"
                )
                continue
            row = dict(zip(header, values, strict=True))
            yield from _record(row, columns, chosen, listing, f"line {line}", problems)
    except csv.Error as error:
        problems.append(
            f'{listing} line {number}: {error}; write a double quote in a quoted caption as "" (rest not read)'
        )


def _parquet(listing: Path, columns: Columns, problems: list[str]) -> Iterator[Record]:
    """Reads the chosen columns only, some thousand rows at a time."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        problems.append(f"{listing}: parquet needs pyarrow: pip install -e '.[data]', or save the list as .jsonl")
        return
    try:
        with listing.open("rb") as file:
            if file.read(len(LFS)) == LFS:
                problems.append(f"{listing}: a Git LFS pointer, not the table itself: run `git lfs pull`")
                return
        with ParquetFile(listing) as table:
            chosen = columns.choose(table.schema_arrow.names, str(listing), problems)
            if chosen is None:
                return
            numbers = itertools.count(1)
            for batch in table.iter_batches(4096, columns=[columns.clip, *chosen]):
                arrays = {name: batch[name] for name in (columns.clip, *chosen)}
                for at in range(batch.num_rows):
                    place = f"row {next(numbers)}"
                    try:
                        row = {name: array[at].as_py() for name, array in arrays.items()}
                    except UnicodeDecodeError as error:  # pyarrow writes and reads whatever bytes are called text
                        byte = error.object[error.start]
                        problems.append(f"{listing} {place}: byte 0x{byte:02x} of its text is not UTF-8")
                        continue
                    yield from _record(row, columns, chosen, listing, place, problems)
    except (pyarrow.ArrowException, OSError) as error:
        problems.append(f"{listing}: not a whole parquet file ({str(error).splitlines()[0]})")


# -- JSON -----------------------------------------------------------------------------------------------------------


class _Twice(ValueError):
    """A key that an object has more than once."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, which plain JSON gives the last of two equal keys."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(f"two columns have one name: {', '.join(keys)}")
    return row


def _json_lines(listing: Path, columns: Columns, problems: list[str]) -> Iterator[Record]:
    def rows() -> Iterator[tuple[int, Any]]:
        for number, line in enumerate((read_text(listing, problems) or "").split("\n"), 1):
            if not line.strip():
                continue
            where = f"{listing} line {number}"
            try:
                yield number, json.loads(line, object_pairs_hook=_once)
            except json.JSONDecodeError as error:
                if number == 1 and line.lstrip().startswith("["):
                    problems.append(f"{where}: begins a list, and .jsonl has one object per line: name the file .json")
                    return
                problems.append(
                    f'{where} column {error.colno}: not JSON ({error.msg}); a quote in a caption is written \\"'
                )
            except (ValueError, RecursionError) as error:  # also a number of thousands of digits
                problems.append(f"{where}: {error}")

    yield from objects(rows(), listing, columns, problems)


def _json_list(listing: Path, columns: Columns, problems: list[str]) -> Iterator[Record]:
    text = read_text(listing, problems)
    if text is None:
        return
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        hint = 'a quote in a caption is written \\"'
        if error.msg == "Extra data":
            hint = "for one object per line name the file .jsonl"
        problems.append(f"{listing} line {error.lineno} column {error.colno}: not JSON ({error.msg}); {hint}")
        return
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        problems.append(f"{listing}: {error}")
        return
    if not isinstance(whole, list):
        problems.append(f'{listing}: not a list like [{{"file_name": "a.mp4", "caption": "..."}}]')
        return

    count = len(whole)
    del whole

    def rows() -> Iterator[tuple[int, Any]]:
        """The entries once more, one by one: only so do they tell their line and their keys."""
        plain, decoder = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_once)
        between, line, end = re.compile(r"[\s,]*"), 1, 0
        for _ in range(count):
            start = between.match(text, end or text.index("[") + 1).end()
            line += text.count("\n", end, start)
            _, end = plain.raw_decode(text, start)
            try:
                yield line, decoder.decode(text[start:end])
            except _Twice as error:
                problems.append(f"{listing} line {line}: {error}")
            line += text.count("\n", start, end)

    yield from objects(rows(), listing, columns, problems)


def objects(rows: Iterable[tuple[int, Any]], listing: Path, columns: Columns, problems: list[str]) -> Iterator[Record]:
    """Rows that each have columns of their own: of the named ones one is enough, but none may be in no row at all."""
    names: set[str] = set()
    for number, row in rows:
        where = f"{listing} line {number}"
        if not isinstance(row, dict):
            problems.append(f'{where}: not an object like {{"file_name": "a.mp4", "caption": "..."}}')
            continue
        names.update(row)
        chosen = columns.choose(list(row), where, problems, all_of=False)
        if chosen is not None:
            yield from _record(row, columns, chosen, listing, f"line {number}", problems)
    if len(columns.named) > 1 and names and columns.captions not in names:
        problems += [f"{listing}: no row has the column {name}" for name in columns.named if name not in names]


def _record(
    row: dict[str, Any], columns: Columns, chosen: list[str], listing: Path, place: str, problems: list[str]
) -> Iterator[Record]:
    """The record of a row, if its values are text: the clip's name one, a caption one, a list of them or null."""
    captions: list[str] = []
    wrong = [] if isinstance(row[columns.clip], str) else [columns.clip]
    for name in chosen:
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        if all(text is None or isinstance(text, str) for text in texts):
            captions += filter(None, texts)
        else:
            wrong.append(name)
    if wrong:
        problems.append(f"{listing} {place}: {' and '.join(wrong)} must be text, got {row[wrong[0]]!r:.80}")
        return
    clean = (_line_ends(text).strip() for text in captions)
    yield Record(row[columns.clip], tuple(text for text in clean if text), place)


READERS: dict[str, Callable[[Path, Columns, list[str]], Iterator[Record]]] = {
    ".csv": _separated,
    ".tsv": _separated,
    ".json": _json_list,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
