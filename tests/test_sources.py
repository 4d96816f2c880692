"""Folders and lists to rows: the right caption for every clip, and every problem named with file and line."""

import csv
import fnmatch
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data.captions import prepare, strip_preamble
from data.sources import Source, read_source
from trainers.config import Config
from trainers.parsing import parse

CAPTIONS = ["red, green and blue", "the square slides", "bars in the row", "four corners"]
NAMES = ["a.mp4", "b.mp4", "c.mp4", "d.mp4"]


def touch(root: Path, *names: str) -> Path:
    """Clips are looked for here, not opened: any bytes will do."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"clip")
    return root


def two_lists(root: Path, videos: bytes | None = None, prompts: bytes | None = None) -> Path:
    touch(root, *(f"videos/{name}" for name in NAMES))
    (root / "videos.txt").write_bytes("".join(f"videos/{n}\n" for n in NAMES).encode() if videos is None else videos)
    (root / "prompts.txt").write_bytes("".join(f"{c}\n" for c in CAPTIONS).encode() if prompts is None else prompts)
    return root


def pairs(path, **options) -> dict[str, str]:
    rows, problems = read_source(Source(str(path), **options))
    assert problems == []
    return {row.path.name: row.caption for row in rows}


def problems_of(path, count: int | None = 1, **options) -> list[str]:
    _, problems = read_source(Source(str(path), **options))
    assert count is None or len(problems) == count, problems
    return problems


# -- videos.txt + prompts.txt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text[:-1],
        lambda text: text + b"\n \n\n",
        lambda text: text.replace(b"/", b"\\") if b".mp4" in text else text,
        lambda text: text.replace(b"videos/b.mp4", b'"videos/b.mp4"'),
    ],
)
def test_two_lists_in_any_dress(tmp_path, change):
    root = two_lists(tmp_path)
    for name in ("videos.txt", "prompts.txt"):
        (root / name).write_bytes(change((root / name).read_bytes()))
    expected = dict(zip(NAMES, CAPTIONS, strict=True))
    assert pairs(root) == expected
    assert pairs(root / "videos.txt") == expected
    assert pairs(f"{root}/ ") == expected
    rows, _ = read_source(Source(str(root), repeats=3, caption_prefix="BW_STYLE "))
    assert rows[2].caption == "BW_STYLE bars in the row" and rows[2].where == "prompts.txt line 3"
    assert [row.repeats for row in rows] == [3] * 4
    assert rows[2].path.read_bytes() == b"clip"


def test_counts_name_both_files(tmp_path):
    root = two_lists(tmp_path, prompts=b"one\ntwo\nthree\n")
    (problem,) = problems_of(root)
    assert f"{root / 'videos.txt'} has 4 lines" in problem and f"{root / 'prompts.txt'} has 3" in problem
    assert read_source(Source(str(root)))[0] == []  # no pair is sure


def test_inner_blank_lines_are_named(tmp_path):
    root = two_lists(tmp_path / "a", prompts=b"one\n\nthree\nfour\n\n\n")
    (problem,) = problems_of(root)
    assert f"{root / 'prompts.txt'} line 2" in problem
    assert pairs(root, allow_empty_captions=True) == {"a.mp4": "one", "b.mp4": "", "c.mp4": "three", "d.mp4": "four"}
    root = two_lists(tmp_path / "b", prompts=b"one\ntwo\nthree\n\n\n")
    assert "4 lines" in problems_of(root)[0]
    assert pairs(root, allow_empty_captions=True)["d.mp4"] == ""
    root = two_lists(tmp_path / "c", videos=b"videos/a.mp4\n\nvideos/b.mp4\nvideos/c.mp4\nvideos/d.mp4")
    assert any(f"{root / 'videos.txt'} line 2" in problem for problem in problems_of(root, 2))


def test_bytes_that_are_no_utf8(tmp_path):
    root = two_lists(tmp_path, prompts=b"one\ncaf\xe9 \x92\ntwo\n\xff\n")
    first, second = problems_of(root, 2)
    assert f"{root / 'prompts.txt'} line 2" in first and "0xe9" in first and "column 4" in first and "UTF-8" in first
    assert "line 4" in second and "0xff" in second
    (root / "prompts.txt").write_text("one", encoding="utf-16")
    assert "UTF-16" in problems_of(root)[0]


def test_all_problems_come_together(tmp_path):
    root = two_lists(
        tmp_path, videos=b"videos/a.mp4\nvideos/nope.mp4\nvideos\nvideos/d.mp4\n", prompts=b"1\n2\n3\n\xff"
    )
    problems = problems_of(root, 3)
    assert f"line 2: no such file videos/nope.mp4 (tried {root / 'videos/nope.mp4'})" in problems[1]
    assert "prompts.txt line 4" in problems[0] and "videos.txt line 3" in problems[2]


def test_a_missing_clip_shifts_nobody(tmp_path):
    root = two_lists(tmp_path, videos=b"videos/a.mp4\nvideos/nope.mp4\nvideos/c.mp4\nvideos/d.mp4\n")
    rows, problems = read_source(Source(str(root)))
    assert len(problems) == 1
    assert {r.path.name: r.caption for r in rows} == {
        n: c for n, c in zip(NAMES, CAPTIONS, strict=True) if n != "b.mp4"
    }


def test_lists_without_their_partner(tmp_path):
    root = two_lists(tmp_path)
    (root / "prompts.txt").unlink()
    assert "prompts.txt: no such file" in problems_of(root)[0]
    (root / "other.txt").write_text("videos/a.mp4")
    assert "not a list" in problems_of(root / "other.txt")[0]


def test_two_kinds_of_list_at_once(tmp_path):
    root = two_lists(tmp_path)
    (root / "metadata.csv").write_text("file_name,text\nvideos/a.mp4,one\n")
    (problem,) = problems_of(root)
    assert "videos.txt and metadata.csv" in problem
    assert pairs(root / "metadata.csv") == {"a.mp4": "one"}


def test_line_separators_inside_a_caption_do_not_split_it(tmp_path):
    root = two_lists(tmp_path, prompts="one\u2028more\ntwo\x0bmore\nthree\x85more\nfour\n".encode())
    assert pairs(root)["d.mp4"] == "four" and pairs(root)["a.mp4"] == "one\u2028more"


# -- folders --------------------------------------------------------------------------------------------------------


def folder(root: Path) -> Path:
    touch(root, "b.mp4", "a.MP4", "sub/c.mov", "sub/still.PNG")
    for name, text in {
        "a.txt": "one\n",
        "b.TXT": "\ufefftwo",
        "sub/c.txt": "three\r\n",
        "sub/still.txt": "four",
    }.items():
        (root / name).write_text(text, encoding="utf-8", newline="")
    return root


def test_folder_of_clips_and_captions(tmp_path):
    root = folder(tmp_path)
    touch(root, "._a.MP4", ".DS_Store", ".hidden/x.mp4", "__MACOSX/y.mp4", "notes.pdf", "README.txt")
    rows, problems = read_source(Source(str(root)))
    assert problems == []
    assert [row.path.relative_to(root).as_posix() for row in rows] == ["a.MP4", "b.mp4", "sub/c.mov", "sub/still.PNG"]
    assert [row.caption for row in rows] == ["one", "two", "three", "four"]
    assert [row.where for row in rows] == ["a.txt", "b.TXT", "sub/c.txt", "sub/still.txt"]
    assert pairs(root / "b.mp4") == {"b.mp4": "two"}


def test_folder_problems(tmp_path):
    root = folder(tmp_path)
    touch(root, "bare.mp4", "sub/c.png", "photo.heic")
    (root / "a.txt").write_text(" \n")
    (root / "photo.txt").write_text("five")
    (root / "b.TXT").write_bytes(b"caf\xe9")
    rows, problems = read_source(Source(str(root)))
    text = "\n".join(problems)
    assert len(problems) == 5 and [row.caption for row in rows] == ["three", "four"]
    assert f"{root / 'bare.mp4'}: no caption: write bare.txt" in text
    assert f"{root / 'sub/c.png'}: shares c.txt with c.mov" in text
    assert f"{root / 'a.txt'}: the caption is empty" in text
    assert f"{root / 'photo.heic'}: has a caption, but .heic is not" in text
    assert "line 1: byte 0xe9" in text


def test_line_ends_inside_a_caption_file(tmp_path):
    root = touch(tmp_path, "a.mp4", "b.mp4")
    (root / "a.txt").write_bytes(b"one\r\nmore\r\n")
    (root / "b.txt").write_bytes(b"two\rmore\r")
    assert pairs(root) == {"a.mp4": "one\nmore", "b.mp4": "two\nmore"}


def test_empty_captions_are_opted_in(tmp_path):
    root = touch(folder(tmp_path), "bare.mp4")
    problems_of(root)
    assert pairs(root, allow_empty_captions=True, caption_prefix="X ")["bare.mp4"] == "X "


def test_nothing_there(tmp_path):
    assert "no such file or folder" in problems_of(tmp_path / "none")[0]
    assert "no clips" in problems_of(tmp_path)[0]
    (tmp_path / "metadata.jsonl").write_text("\n")
    assert "lists no clips" in problems_of(tmp_path)[0]
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "prompts.txt").write_text("one\n")
    assert "no videos.txt" in problems_of(touch(tmp_path, "a.mp4"), 2)[1]


def test_links_are_followed_once(tmp_path):
    root = folder(tmp_path / "clips")
    (root / "sub" / "loop").symlink_to(root)
    (tmp_path / "link").symlink_to(root)
    rows, problems = read_source(Source(str(tmp_path / "link")))
    assert [row.path.name for row in rows] == ["a.MP4", "b.mp4", "c.mov", "still.PNG"] and problems == []


def test_composed_and_decomposed_names_meet(tmp_path):
    name = "\u00fcber.mp4"
    touch(tmp_path, unicodedata.normalize("NFD", name))
    (tmp_path / "\u00fcber.txt").write_text("one")
    assert list(pairs(tmp_path).values()) == ["one"]
    (tmp_path / "videos.txt").write_text(name, encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("two")
    assert list(pairs(tmp_path).values()) == ["two"]


def test_two_captions_that_differ_in_the_spelling_of_their_names(tmp_path):
    root = touch(tmp_path, "a.mp4")
    (root / "a.txt").write_text("one")
    (root / "a.TXT").write_text("two")
    (problem,) = problems_of(root)
    assert f"{root / 'a.txt'}: has the name of a.TXT" in problem


# -- csv and jsonl --------------------------------------------------------------------------------------------------


def test_csv_captions_are_exact(tmp_path):
    root = touch(tmp_path, *NAMES)
    text = 'file_name,text\r\na.mp4,"red, green"\r\nb.mp4,"says ""STOP"", twice"\r\n\r\nc.mp4,semi;colon\tand tab\r\n'
    (root / "metadata.csv").write_bytes(b"\xef\xbb\xbf" + text.encode() + b'd.mp4,"two\nlines"\n')
    found = ["red, green", 'says "STOP", twice', "semi;colon\tand tab", "two\nlines"]
    assert pairs(root) == dict(zip(NAMES, found, strict=True))


def test_a_caption_of_half_a_million_letters(tmp_path):
    root, caption = touch(tmp_path, "a.mp4"), ("a word, " * 65_000).strip()
    (root / "metadata.csv").write_text(f'file_name,text\na.mp4,"{caption}"\n')
    assert pairs(root) == {"a.mp4": caption}


def test_caption_column(tmp_path):
    root = touch(tmp_path, "a.mp4")
    (root / "metadata.csv").write_text("prompt, file_name ,text,extra\np,a.mp4,t,e\n")
    assert pairs(root) == {"a.mp4": "t"}  # caption before text before prompt, wherever they stand
    assert pairs(root, caption_column="extra") == {"a.mp4": "e"}
    (problem,) = problems_of(root, caption_column="captoin")
    assert "line 1" in problem and "no column captoin" in problem and "prompt, file_name, text, extra" in problem


def test_csv_problems(tmp_path):
    root = touch(tmp_path, *NAMES)
    listing = root / "metadata.csv"
    listing.write_text('file_name,text\na.mp4,one,two\nnope.mp4,"a\nb"\nc.mp4,\nd.mp4,"x"y\n')
    first, second, third, fourth = problems_of(root, 4)
    assert f"{listing} line 2: 3 fields, the header has 2" in first
    assert f"{listing} line 3: no such file nope.mp4" in second
    assert f"{listing} line 5: the caption is empty" in third
    assert f"{listing} line 6" in fourth
    listing.write_text("file_name;text\na.mp4;one\n")
    assert "separated by commas" in problems_of(root)[0]
    listing.write_text("file_name;text,in words\na.mp4;one\n")
    assert "separated by commas" in problems_of(root)[0]
    listing.write_text("path,words\na.mp4,one\n")
    assert "no column file_name and no caption or text or prompt; there are path, words" in problems_of(root)[0]
    listing.write_text("file_name,text,text\na.mp4,one,two\n")
    assert "two columns have one name" in problems_of(root)[0]


def test_jsonl(tmp_path):
    root = touch(tmp_path, *NAMES, "cat.png")
    listing = root / "metadata.jsonl"
    lines = [{"file_name": n, "prompt": c} for n, c in zip([*NAMES, "cat.png"], [*CAPTIONS, "a cat"], strict=True)]
    listing.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert pairs(root) == dict(zip([*NAMES, "cat.png"], [*CAPTIONS, "a cat"], strict=True))
    listing.rename(root / "mine.jsonl")
    assert len(pairs(root / "mine.jsonl")) == 5


def test_jsonl_problems(tmp_path):
    root = touch(tmp_path, *NAMES)
    listing = root / "metadata.jsonl"
    bad = '{"file_name": "b.mp4", "text": "say "hi" now"}'
    lines = [
        '{"file_name": "a.mp4", "text": "one"}',
        bad,
        "[1]",
        '{"file_name": "c.mp4"}',
        '{"file_name": 3, "text": "x"}',
    ]
    listing.write_text("\n".join([*lines, '{"file_name": "d.mp4", "text": "\\ud83d"}']))
    first, *rest = problems_of(root, 5)
    assert f"{listing} line 2 column {bad.index('hi') + 1}" in first
    assert [f"line {n}" in problem for n, problem in zip((3, 4, 5, 6), rest, strict=True)] == [True] * 4
    assert (
        "no column caption or text or prompt" in rest[1] and "must be text" in rest[2] and "half a character" in rest[3]
    )


# -- sources --------------------------------------------------------------------------------------------------------


def test_parse():
    assert Source.parse("my clips/") == Source("my clips/")
    text = '{"path": "a", "repeats": 2, "caption_prefix": "X ", "caption_column": "c", "allow_empty_captions": true}'
    assert Source.parse(text) == Source("a", 2, "X ", "c", True)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"path": "a", "repeat": 2}', "did you mean repeats"),
        ('{"repeats": 2}', "path is missing"),
        ('{"path": "a"', "not JSON"),
        ('{"path": "a", "repeats": 0}', "repeats must be 1 or more"),
        (
            '{"path": "a", "repeats": "2", "allow_empty_captions": "no"}',
            "repeats must be int.*allow_empty_captions must",
        ),
        (" ", "path is empty"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        Source.parse(text)


def test_the_system_encoding_does_not_matter(tmp_path):
    root = two_lists(tmp_path, prompts="caf\u00e9\ntwo\nthree\nfour\n".encode())
    code = "import sys; from data.sources import *; print(ascii(read_source(Source(sys.argv[1]))[0][0].caption))"
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    repository = Path(__file__).parents[1]
    command = [sys.executable, "-c", code, str(root)]
    assert subprocess.check_output(command, env=env, cwd=repository, text=True).strip() == r"'caf\xe9'"


# -- every format ---------------------------------------------------------------------------------------------------


def write_list(listing: Path, columns: list[str], rows: list[list[str]]) -> Path:
    """A list in the format of its suffix, written by the library that people use for it."""
    objects = [dict(zip(columns, row, strict=True)) for row in rows]
    if listing.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(dict(zip(columns, zip(*rows, strict=True), strict=True))), listing)
    elif listing.suffix in (".csv", ".tsv"):
        with listing.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="," if listing.suffix == ".csv" else "\t").writerows([columns, *rows])
    elif listing.suffix == ".json":
        listing.write_text(json.dumps(objects, indent=1))
    else:
        listing.write_text("\n".join(map(json.dumps, objects)))
    return listing


FORMATS = [".csv", ".tsv", ".json", ".jsonl", ".parquet"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format(tmp_path, suffix):
    root = touch(tmp_path, *NAMES)
    captions = ["red,\tgreen", 'says "STOP"', "two\r\n\r\nlines", "ü"]
    rows = [[name, caption, "extra"] for name, caption in zip(NAMES, captions, strict=True)]
    write_list(root / f"metadata{suffix}", ["file_name", "text", "id"], rows)
    expected = dict(zip(NAMES, [*captions[:2], "two\n\nlines", "ü"], strict=True))
    assert pairs(root) == pairs(root / f"metadata{suffix}") == expected
    (root / f"metadata{suffix}").rename(root / f"mine{suffix}")
    assert pairs(root / f"mine{suffix}") == expected
    rows, _ = read_source(Source(str(root / f"mine{suffix}")))
    first, last = {".csv": (2, 7), ".tsv": (2, 7), ".json": (2, 17), ".jsonl": (1, 4), ".parquet": (1, 4)}[suffix]
    word = "row" if suffix == ".parquet" else "line"
    assert (rows[0].where, rows[3].where) == (f"mine{suffix} {word} {first}", f"mine{suffix} {word} {last}")


@pytest.mark.parametrize("suffix", FORMATS)
def test_columns_of_every_format(tmp_path, suffix):
    root, name = touch(tmp_path, "a.mp4", "b.mp4"), f"metadata{suffix}"
    write_list(root / name, ["video", "short", "long"], [["a.mp4", "s", "l"], ["b.mp4", " ", "only long"]])
    problem = problems_of(root, None)[0]
    assert "no column file_name and no caption or text or prompt; there are video, short, long; name the" in problem
    assert pairs(root, clip_column="video", caption_column="long") == {"a.mp4": "l", "b.mp4": "only long"}
    options = dict(clip_column="video", caption_column="short, long", caption_prefix="X ")
    rows, problems = read_source(Source(str(root), **options))
    assert problems == [] and [row.captions for row in rows] == [("X s", "X l"), ("X only long",)]
    assert {row.prefix for row in rows} == {"X "}
    problem = problems_of(root, None, clip_column="video", caption_column="short,lnog")[-1]
    assert "no column lnog" in problem or "no row has the column lnog" in problem
    empty = problems_of(root, clip_column="video", caption_column="short")
    assert "the caption is empty" in empty[0] and ("line " in empty[0] or "row 2" in empty[0])
    write_list(root / name, ["file_name", "text"], [["a.mp4", "one"], ["nope.mp4", "two"]])
    assert "no such file nope.mp4" in problems_of(root)[0]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_a_list_of_captions(tmp_path, suffix):
    root = touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    values = [["a.mp4", ["one", " ", "two"]], ["b.mp4", ["three"]], ["c.mp4", None]]
    listing = write_list(root / f"metadata{suffix}", ["file_name", "caption"], values)
    rows, problems = read_source(Source(str(root), allow_empty_captions=True))
    assert problems == [] and [row.captions for row in rows] == [("one", "two"), ("three",), ("",)]
    assert "the caption is empty" in problems_of(root)[0]
    write_list(listing, ["file_name", "caption"], [["a.mp4", [1, 2]], ["b.mp4", [3]]])
    first, second = problems_of(root, 2)
    assert "caption must be text, got [1, 2]" in first and "got [3]" in second


def test_columns_that_only_some_rows_have(tmp_path):
    root = touch(tmp_path, "a.mp4", "b.mp4")
    (root / "metadata.jsonl").write_text('{"file_name": "a.mp4", "s": "1"}\n{"file_name": "b.mp4", "l": "2"}')
    assert pairs(root, caption_column="s,l") == {"a.mp4": "1", "b.mp4": "2"}
    assert problems_of(root, caption_column="s,l,xl") == [f"{root / 'metadata.jsonl'}: no row has the column xl"]
    (root / "metadata.jsonl").unlink()
    write_list(root / "metadata.csv", ["file_name", "a,b"], [["a.mp4", "one"]])
    assert pairs(root, caption_column="a,b") == {"a.mp4": "one"}


def test_json_problems(tmp_path):
    root, listing = touch(tmp_path, *NAMES), tmp_path / "metadata.json"
    listing.write_text('[\n {"file_name": "a.mp4",\n  "text": "say "hi""}\n]')
    assert f"{listing} line 3 column 17: not JSON" in problems_of(root)[0]
    listing.write_text('[{"file_name": "a.mp4", "text": "one"},\n null,\n\n {"file_name": "b.mp4", "text": 2},')
    assert "line 4" in problems_of(root)[0]
    listing.write_text(listing.read_text().removesuffix(",") + ',\n{"file_name": "c.mp4", "text": "", "text": "x"}]')
    first, second, third = problems_of(root, 3)
    assert f"{listing} line 2: not an object" in first and f"{listing} line 4: text must be text, got 2" in second
    assert f"{listing} line 5: two columns have one name: file_name, text, text" in third
    assert [row.where for row in read_source(Source(str(root)))[0]] == ["metadata.json line 1"]
    listing.write_text('{"file_name": "a.mp4", "text": "one"}\n{"file_name": "b.mp4", "text": "two"}')
    assert "line 2 column 1" in problems_of(root)[0] and "name the file .jsonl" in problems_of(root)[0]
    listing.write_text('{"a.mp4": "one"}')
    assert "not a list like [" in problems_of(root)[0]
    listing.write_text("[" * 100_000)
    assert "recursion" in problems_of(root)[0]
    listing.write_text(f'[{{"file_name": "a.mp4", "text": "one", "n": {"1" * 5000}}}]')
    assert "4300 digits" in problems_of(root)[0]
    listing.rename(root / "metadata.jsonl")
    listing = root / "metadata.jsonl"
    assert "begins a list" not in problems_of(root)[0]  # it is JSON, if odd
    listing.write_text('[\n {"file_name": "a.mp4", "text": "one"}\n]')
    assert "name the file .json" in problems_of(root)[0]
    listing.write_text('{"file_name": "a.mp4", "text": "one", "text": "two"}')
    assert "line 1: two columns have one name" in problems_of(root)[0]


def test_tables_of_the_wrong_separator(tmp_path):
    root = touch(tmp_path, "a.mp4")
    (root / "metadata.tsv").write_text("file_name,text\na.mp4,one\n")
    assert "columns are separated by commas in .csv and by tabs in .tsv" in problems_of(root)[0]
    (root / "metadata.tsv").write_text("file_name\ttext\na.mp4\tone\ttwo\n")
    assert "line 2: 3 fields, the header has 2; put double quotes around a caption with tabs" in problems_of(root)[0]


def test_parquet_problems(tmp_path, monkeypatch):
    root, listing = touch(tmp_path, "a.mp4"), tmp_path / "metadata.parquet"
    write_list(listing, ["file_name", "text"], [["a.mp4", "one"]])
    whole = listing.read_bytes()
    listing.write_bytes(whole[:-20])
    assert f"{listing}: not a whole parquet file" in problems_of(root)[0]
    listing.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in problems_of(root)[0]
    rows = [["a.mp4", "one"], ["a.mp4", "café"], ["a.mp4", "two"]]
    write_list(listing, ["file_name", "text"], rows)
    listing.write_bytes(listing.read_bytes().replace("café".encode(), b"caf\xe9 "))
    found, problems = read_source(Source(str(root)))
    assert problems == [f"{listing} row 2: byte 0xe9 of its text is not UTF-8"]
    assert [row.caption for row in found] == ["one", "two"]
    listing.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install -e '.[data]'" in problems_of(root)[0]


def test_rows_of_a_long_parquet_keep_their_numbers(tmp_path):
    root = touch(tmp_path, "a.mp4")
    write_list(root / "metadata.parquet", ["file_name", "text"], [["a.mp4", f"caption {n}"] for n in range(1, 9001)])
    rows, problems = read_source(Source(str(root)))
    assert problems == [] and (rows[8999].caption, rows[8999].where) == ("caption 9000", "metadata.parquet row 9000")


def test_names_that_no_file_can_have(tmp_path):
    root = touch(tmp_path, "a.mp4")
    names = ["x" * 5000, "nul\0.mp4", "half \ud83d.mp4", "/", ".."]
    (root / "metadata.jsonl").write_text("\n".join(json.dumps({"file_name": n, "text": "one"}) for n in names))
    problems = problems_of(root, 5)
    assert all("no such file" in problem for problem in problems) and "half \\ud83d.mp4" in problems[2]
    "\n".join(problems).encode("utf-8")


def test_what_cannot_be_opened_is_told(tmp_path, monkeypatch):
    root = folder(tmp_path)
    (root / "a.txt").unlink()
    (root / "a.txt").symlink_to("nowhere")
    assert problems_of(root) == [f"{root / 'a.txt'}: No such file or directory"]
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    (root / "a.txt").unlink()
    (root / "a.txt").write_text("one")
    monkeypatch.setattr(os, "scandir", closed)
    assert problems_of(root) == [f"{root / 'sub'}: Permission denied"]
    assert f"{root / 'sub'}: Permission denied" in problems_of(root / "sub", None)


def test_names_that_are_no_utf8(tmp_path):
    root = touch(tmp_path, "a.mp4")
    (root / "a.txt").write_text("one")
    odd = os.fsdecode(b"caf\xe9.mp4")
    (root / odd).write_bytes(b"clip")
    (problem,) = problems_of(root)
    assert problem == f"{root}/caf\\udce9.mp4: its name is not UTF-8: rename it"
    (root / "metadata.jsonl").write_text(json.dumps({"file_name": odd, "text": "one"}))
    assert "no such file caf\\udce9.mp4" in problems_of(root)[0]


def test_a_list_of_another_name_is_pointed_at(tmp_path):
    root = touch(tmp_path, "a.mp4", "captions.csv")
    assert problems_of(root, 2)[1] == f"{root / 'captions.csv'}: not used: give it as path if it lists these clips"


# -- folders of data sets -------------------------------------------------------------------------------------------


def splits(root: Path) -> Path:
    for split, names in {"train": NAMES[:2], "test": NAMES[2:]}.items():
        touch(root / split, *names)
        write_list(root / split / "metadata.csv", ["file_name", "text"], [[name, f"{split} {name}"] for name in names])
    return root


def test_a_list_in_a_subfolder(tmp_path):
    root = folder(tmp_path)
    touch(root, "more/x.mp4", "more/deep/y.mp4", "more/._x.mp4")
    write_list(root / "more" / "metadata.jsonl", ["file_name", "text"], [["x.mp4", "ten"], ["deep/y.mp4", "eleven"]])
    rows, problems = read_source(Source(str(root)))
    assert problems == []
    assert [row.caption for row in rows] == ["one", "two", "three", "four", "ten", "eleven"]
    assert rows[5].where == "more/metadata.jsonl line 2" and rows[5].path == root / "more/deep/y.mp4"
    (root / "more" / "METADATA.csv").write_text("file_name,text\n")
    assert "more: holds METADATA.csv and metadata.jsonl" in problems_of(root)[0]


def test_splits(tmp_path):
    root = splits(tmp_path / "a")
    assert "has the splits train and test: name one with split" in problems_of(root)[0]
    assert pairs(root, split="test") == {"c.mp4": "test c.mp4", "d.mp4": "test d.mp4"}
    assert pairs(root / "train") == pairs(root, split="train") == {"a.mp4": "train a.mp4", "b.mp4": "train b.mp4"}
    assert "no folder for the split validation" in problems_of(root, split="validation")[0]
    (tmp_path / "b").mkdir()
    (tmp_path / "a").rename(tmp_path / "b" / "data")
    assert "splits train and test" in problems_of(tmp_path / "b")[0]
    assert set(pairs(tmp_path / "b", split="test")) == {"c.mp4", "d.mp4"}


def test_one_list_for_all_splits(tmp_path):
    root = splits(tmp_path)
    rows = [[f"train/{name}", "one"] for name in NAMES[:2]] + [[f"test/{name}", "two"] for name in NAMES[2:]]
    write_list(root / "metadata.csv", ["file_name", "text"], rows)
    assert pairs(root) == dict.fromkeys(NAMES[:2], "one") | dict.fromkeys(NAMES[2:], "two")
    assert pairs(root, split="test") == dict.fromkeys(NAMES[2:], "two")


def test_split_and_revision_where_they_mean_nothing(tmp_path):
    root = folder(tmp_path)
    assert "no folder for the split train" in problems_of(root / "b.mp4", split="train")[0]
    (problem,) = problems_of(root, revision="main")
    assert problem == f"{root}: is no data set on the Hub, so it has no revision main: leave that out"


def test_junk_of_other_programs(tmp_path):
    root = folder(tmp_path)
    touch(
        root, "@eaDir/a.MP4/SYNOPHOTO_THUMB.jpg", "$RECYCLE.BIN/x.mp4", "lost+found/x.mp4", "Thumbs.db", "desktop.ini"
    )
    assert len(pairs(root)) == 4


def test_videos_txt_may_be_a_caption(tmp_path):
    root = touch(tmp_path, "videos.mp4")
    (root / "videos.txt").write_text("one")
    assert pairs(root) == {"videos.mp4": "one"}
    assert "prompts.txt: no such file" in problems_of(touch(tmp_path / "b", "videos.txt"))[0]


# -- the Hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set owner/name in a cache of the Hub, without a network: files are links to blobs."""
    from huggingface_hub import constants

    root = tmp_path / "hub" / "datasets--owner--name"
    (root / "refs").mkdir(parents=True)
    (root / "blobs").mkdir()
    for revision, text in {"main": "one", "v2": "two"}.items():
        commit = f"{len(text) + ord(text[0]):040x}"
        (root / "refs" / revision).write_text(commit)
        snapshot = splits(root / "snapshots" / commit)
        write_list(snapshot / "train" / "metadata.csv", ["file_name", "text"], [["a.mp4", text], ["b.mp4", text]])
        for file in [path for path in snapshot.rglob("*") if path.is_file()]:
            blob = root / "blobs" / f"{len(list((root / 'blobs').iterdir())):064x}"
            file.rename(blob)
            file.symlink_to(os.path.relpath(blob, file.parent))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return root


def test_a_data_set_of_the_hub(hub):
    assert pairs("owner/name", split="train") == {"a.mp4": "one", "b.mp4": "one"}
    assert pairs("owner/name", split="train", revision="v2") == {"a.mp4": "two", "b.mp4": "two"}
    (problem,) = problems_of("owner/other", revision="v3")
    assert problem.startswith("owner/other (revision v3): there is no folder of that name here; HF_HUB_OFFLINE is set")
    assert problem.endswith("hf download owner/other --repo-type dataset --revision v3")
    for path in ("owner/name.csv", "./owner/name", "owner/name/train", "hub/none"):
        assert "no such file or folder" in problems_of(path)[0]
    touch(hub.parents[1] / "owner" / "name", "x.mp4")
    (hub.parents[1] / "owner" / "name" / "x.txt").write_text("local")
    assert pairs("owner/name") == {"x.mp4": "local"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "is gated: accept its terms at https://huggingface.co/datasets/owner/name, then log in"),
        ("RepositoryNotFoundError", "no such public data set on the Hub"),
        ("RevisionNotFoundError", "owner/name has no revision v9: give a branch"),
        ("HFValidationError", "the download failed: why"),
        ("OSError", "the download failed: why"),
    ],
)
def test_refusals_of_the_hub(hub, monkeypatch, error, message):
    import huggingface_hub
    from huggingface_hub import errors

    asked = {}

    def refuse(name, **options):
        asked.update(options)
        kind = getattr(errors, error, OSError)
        raise kind("why", response=Mock()) if issubclass(kind, errors.HfHubHTTPError) else kind("why")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert message in problems_of("owner/name", revision="v9", split="train")[0]
    wanted = [path for path in PATHS if any(fnmatch.fnmatchcase(path, pattern) for pattern in asked["allow_patterns"])]
    assert wanted == ["train/a.MP4", "data/train/b.txt", "train/c.tar", "metadata.parquet", "prompts.txt"]


PATHS = ["train/a.MP4", "data/train/b.txt", "train/c.tar", "metadata.parquet", "prompts.txt"]
PATHS += ["test/a.mp4", "train/latents.safetensors", "README.md", "a.mp4"]


# -- docs/data.md ---------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
STOP = {"red.mp4": "a red square, sliding", "blue.mp4": 'a sign that says "STOP"'}


@pytest.mark.parametrize("names", ["metadata.csv", "metadata.jsonl", "metadata.json", "videos.txt prompts.txt"])
def test_the_examples_of_the_page(tmp_path, names):
    touch(tmp_path, *STOP)
    for name in names.split():
        assert f"`{name}`" in PAGE
        (tmp_path / name).write_text(BLOCKS[name.removeprefix("metadata.")])
    assert pairs(tmp_path) == STOP


def test_the_tsv_and_parquet_of_the_page(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(touch(tmp_path, *STOP))
    exec(BLOCKS["python"], {})
    assert pairs(tmp_path) == STOP
    Path("metadata.parquet").unlink()
    rows = list(csv.reader(BLOCKS["csv"].splitlines()))
    write_list(tmp_path / "metadata.tsv", rows[0], rows[1:])
    assert pairs(tmp_path) == STOP


def test_the_sources_of_the_page(tmp_path):
    (tmp_path / "my.yaml").write_text(f"model: owner/name\n{BLOCKS['yaml']}")
    train = parse(Config, ["--config", str(tmp_path / "my.yaml")]).data.train
    more = dict(caption_prefix="BW_STYLE, ", caption_column="short,long", buckets=("1x512x768",))
    assert train == [
        Source(str(tmp_path / "clips")),
        Source(str(tmp_path / "more" / "metadata.csv"), 3, **more),
        Source(str(tmp_path / "cats"), weight=0.5),
        Source("owner/name", split="train", revision="main", clip_column="video"),
    ]


def test_the_captions_of_the_page():
    (options,) = re.findall(r"^With (`caption_prefix.*):$", PAGE, re.MULTILINE)
    given = {name: yaml.safe_load(value) for name, value in re.findall(r"`(\w+): ([^`]+)`", options)}
    rows = PAGE[PAGE.index("| caption | trained on |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    prefix, strip = given.pop("caption_prefix"), given.pop("strip_preamble")
    found = prepare([prefix + cells[0][0]], prefix, **given, strip=strip)
    assert sorted(found) == sorted(cell for _, cell in cells)
    assert '"The video shows a cat" trains as "A cat"' in PAGE and strip_preamble("The video shows a cat") == "A cat"


# -- whatever is in them --------------------------------------------------------------------------------------------

LETTERS = st.sampled_from("\n\r\t ,;\"'\\\ufeff\u2028\x85a") | st.characters(
    exclude_categories=("Cs",), exclude_characters="\0"
)
TEXTS = st.text(LETTERS, min_size=1, max_size=30).filter(lambda text: text.strip())
"""Captions with anything in them: quotes, separators, line ends, byte order marks, letters of every script."""
ENDS = st.sampled_from(["\n", "\r\n", "\r"])
FEW = settings(max_examples=60, deadline=None, database=None)


def as_read(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


@FEW
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_every_format_gives_equal_rows(tmp_path_factory, texts):
    root = tmp_path_factory.mktemp("formats")
    names = [f"{at}.mp4" for at in range(len(texts))]
    touch(root, *names)
    for suffix in FORMATS:
        listing = write_list(
            root / f"mine{suffix}", ["file_name", "text"], [[*pair] for pair in zip(names, texts, strict=True)]
        )
        assert pairs(listing) == dict(zip(names, map(as_read, texts), strict=True)), suffix


@FEW
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    end=ENDS,
    mark=st.sampled_from(["", "\ufeff"]),
    blank=st.lists(st.sampled_from(["", " ", "\t"]), max_size=3),
    blank_at=st.none() | st.integers(0, 5),
)
def test_lines_never_move_to_another_clip(tmp_path_factory, texts, end, mark, blank, blank_at):
    """Whatever the marks, the line ends and blank lines at the end; a blank line inside is told and moves nobody."""
    root = tmp_path_factory.mktemp("lines")
    texts = [" ".join(text.replace("\r", "\n").split("\n")) for text in texts]
    texts = [text if text.strip() else "x" for text in texts]
    names = [f"{at}.mp4" for at in range(len(texts))]
    touch(root, *names)
    expected = dict(zip(names, (text.strip() for text in texts), strict=True))
    lines = list(texts)
    inside = blank_at is not None and blank_at < len(lines)
    if inside:
        lines[blank_at] = " "
    for name, rows in {"videos.txt": names, "prompts.txt": lines}.items():
        (root / name).write_bytes((mark + end.join([*rows, *blank])).encode())
    rows, problems = read_source(Source(str(root)))
    found = {row.path.name: row.caption for row in rows}
    assert bool(problems) == inside
    assert found.items() <= expected.items()
    assert inside or found == expected


@FEW
@given(
    clips=st.dictionaries(
        st.tuples(st.sampled_from(["", "sub/", "sub/deep/", "other/"]), st.sampled_from("abc")),
        st.tuples(st.sampled_from([".mp4", ".MOV", ".png"]), TEXTS | st.sampled_from(["", " \n"])),
        min_size=1,
        max_size=8,
    ),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_captions_beside_clips_never_move(tmp_path_factory, clips, mark):
    root = tmp_path_factory.mktemp("beside")
    expected, missing = {}, set()
    for (place, name), (suffix, text) in clips.items():
        touch(root, f"{place}{name}{suffix}")
        (root / f"{place}{name}.txt").write_bytes((mark + text).encode())
        text = as_read(text if mark else text.removeprefix("\ufeff"))
        if text:
            expected[f"{place}{name}{suffix}"] = text
        else:
            missing.add(str(root / f"{place}{name}.txt"))
    rows, problems = read_source(Source(str(root)))
    assert {row.path.relative_to(root).as_posix(): row.caption for row in rows} == expected
    assert {problem.split(": the caption is empty")[0] for problem in problems} == missing


@pytest.mark.parametrize("suffix", [*FORMATS, ".txt"])
def test_damaged_lists_give_no_wrong_pair(tmp_path, suffix):
    """350 lists with one place damaged: no crash, and a caption that is whole is with its clip or with none."""
    random, pieces = Random(suffix), [b'"', b"\n", b"\r", b"\0", b",", b"\t", b"{", b"\\", b"\xef\xbb\xbf", b"\xff\xfe"]
    names = [f"{word}-of-a-kind.mp4" for word in ("otter", "badger", "heron", "lynx")]
    touch(tmp_path, *names)
    expected = dict(zip(CAPTIONS, names, strict=True))
    if suffix == ".txt":
        targets = [tmp_path / "videos.txt", tmp_path / "prompts.txt"]
        targets[0].write_text("\n".join(names))
        targets[1].write_text("\n".join(CAPTIONS))
    else:
        targets = [write_list(tmp_path / f"mine{suffix}", ["file_name", "text"], [*zip(names, CAPTIONS, strict=True)])]
    whole = {path: path.read_bytes() for path in targets}
    told = 0
    for _ in range(350):
        target = random.choice(targets)
        content = whole[target]
        at = random.randrange(len(content))
        taken, put = random.choice([(1, random.randbytes(1)), (random.randint(1, 9), b""), (0, random.choice(pieces))])
        target.write_bytes(content[:at] + put + content[at + taken :])
        rows, problems = read_source(Source(str(targets[0])))
        told += bool(problems)
        for row in rows:
            assert expected.get(row.caption, row.path.name) == row.path.name, (target, at, taken, put)
        target.write_bytes(content)
    assert 50 < told < 350
