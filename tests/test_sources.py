"""Folders and lists to rows: the right caption for every clip, and every problem named with file and line."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from data.sources import Source, read_source

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


# -- csv and jsonl --------------------------------------------------------------------------------------------------


def test_csv_captions_are_exact(tmp_path):
    root = touch(tmp_path, *NAMES)
    text = 'file_name,text\r\na.mp4,"red, green"\r\nb.mp4,"says ""STOP"", twice"\r\n\r\nc.mp4,semi;colon\tand tab\r\n'
    (root / "metadata.csv").write_bytes(b"\xef\xbb\xbf" + text.encode() + b'd.mp4,"two\nlines"\n')
    found = ["red, green", 'says "STOP", twice', "semi;colon\tand tab", "two\nlines"]
    assert pairs(root) == dict(zip(NAMES, found, strict=True))


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
