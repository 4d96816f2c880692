"""Captions and lists that people really have: the exact text for every clip, or the file, line and byte of the fault.

Which kind of trouble is tested where; all files are those of tests/cases.py.

C01 Windows-1252 byte: test_faults_of_lists, test_the_line_of_a_bad_byte; other system encodings: tests/test_sources.py
C02 byte order mark, CRLF: test_lists_in_any_dress
C05 counts and blank lines: test_lists_in_any_dress, test_faults_of_lists
C06 caption missing: test_a_clip_without_its_caption
C07 caption cut off: test_a_cut_caption_is_told_once
C08 CSV and JSONL: test_csv_captions_are_exact, test_faults_of_lists
C09 dropout with encodings kept: tests/test_exactness.py
    test_caption_dropout_of_one_feeds_exactly_the_unconditional_rows
"""

import shutil
from pathlib import Path

import pytest

import runs
from cases import BUCKETS, CAPTIONS, CSV_CAPTIONS, NAMES, planned, uncaptioned
from data.sources import Source, read_source
from trainers.ltx import LTXTrainer
from trainers.plan import PlanError


def pairs(made) -> dict[str, str]:
    return {Path(sample.path).name: sample.caption for sample in made.plan.samples}


def pairs_of(source) -> dict[str, str]:
    rows, problems = read_source(Source(str(source)))
    assert problems == []
    return {Path(row.path).name: row.caption for row in rows}


@pytest.mark.parametrize("name", ["ok", "crlf", "bom", "no_final_newline", "backslashes", "mixed_lengths"])
def test_lists_in_any_dress(cases, name):
    assert pairs_of(cases / "sets" / name) == dict(zip(NAMES, CAPTIONS, strict=True))


def test_csv_captions_are_exact(cases):
    assert pairs_of(cases / "sets" / "csv") == dict(zip(NAMES, CSV_CAPTIONS, strict=True))


def test_a_list_may_name_clips_anywhere(cases, tmp_path):
    videos = cases / "sets" / "ok" / "videos"
    (tmp_path / "videos.txt").write_text("".join(f"{videos / name}\n" for name in NAMES))
    shutil.copy(cases / "sets" / "ok" / "prompts.txt", tmp_path)
    assert pairs_of(tmp_path) == dict(zip(NAMES, CAPTIONS, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.replace(b"\n", b"\r"), "line 2: byte 0x92 at column 11 is not UTF-8"),
        (lambda raw: raw.replace(b"\n", b"\r\n"), "line 2: byte 0x92 at column 11 is not UTF-8"),
        (lambda raw: raw.decode("cp1252").encode("utf-16"), ": is UTF-16: save it as UTF-8"),
        (lambda raw: raw.decode("cp1252").encode("utf-16-le"), "line 1: holds a byte 0x00: it may be UTF-16"),
        (lambda raw: raw.replace(b"bars", b"ba\x00rs").replace(b"\x92", b""), "line 3: holds a byte 0x00"),
    ],
)
def test_the_line_of_a_bad_byte(cases, tmp_path, change, message):
    root = shutil.copytree(cases / "sets" / "cp1252", tmp_path / "set")
    prompts = root / "prompts.txt"
    prompts.write_bytes(change(prompts.read_bytes()))
    rows, (problem,) = read_source(Source(str(root)))
    assert rows == [] and problem.startswith(f"{prompts}") and message in problem


FAULTS = {
    "cp1252": "{root}/prompts.txt line 2: byte 0x92 at column 11 is not UTF-8; it may be Windows-1252: save the file "
    "as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8)",
    "blank_lines": "{root}/prompts.txt line 2: the caption is empty: write one, or set allow_empty_captions",
    "count_mismatch": "{root}/videos.txt has 4 lines, {root}/prompts.txt has 3",
    "jsonl_bad_line": "{root}/metadata.jsonl line 2 column 38: not JSON (Expecting ',' delimiter)",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_lists(tiny_ltx, cases, tmp_path, name):
    """Told before a model loads, with on_bad: skip as well, which is about clips that cannot be read."""
    root = cases / "sets" / name
    for on_bad in ("error", "skip"):
        with pytest.raises(PlanError) as error:
            planned(tiny_ltx, root, tmp_path / "run", data__on_bad=on_bad)
        assert FAULTS[name].format(root=root) in str(error.value)
    words = runs.options(tiny_ltx, root, tmp_path / "run", data__buckets=BUCKETS)
    with pytest.raises(SystemExit, match="problem"):
        LTXTrainer.main(words)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_clip_without_its_caption(tiny_ltx, cases, tmp_path):
    root = cases / "sets" / "folder_pairs"
    with pytest.raises(PlanError) as error:
        planned(tiny_ltx, root, tmp_path / "run")
    assert f"{root / 'c.mp4'}: no caption: write c.txt beside it, or set allow_empty_captions" in str(error.value)
    assert "1 problem " in str(error.value)
    made = planned(tiny_ltx, uncaptioned(root), tmp_path / "run")
    assert pairs(made) == dict(zip(NAMES, CAPTIONS, strict=True)) | {"c.mp4": ""}


def test_a_cut_caption_is_told_once(tiny_ltx, cases, tmp_path, capsys):
    """How many, the longest and the limit, which can be set; counted with the model's own tokenizer."""
    from transformers import AutoTokenizer

    caption = (cases / "sets" / "long_caption" / "prompts.txt").read_text().split("\n")[0]
    tokens = len(AutoTokenizer.from_pretrained(tiny_ltx / "tokenizer")(caption).input_ids)
    told = {
        128: f"tokenizer: 1 of 4 captions lose their end: over 128 tokens, up to {tokens} ('word0 word1 word2 ",
        tokens: f"tokenizer: at most {tokens} tokens of {tokens}\n",
    }
    for limit, words in told.items():
        planned(tiny_ltx, cases / "sets" / "long_caption", tmp_path / "run", max_sequence_length=limit)
        out = capsys.readouterr().out
        assert words in out and out.count("tokenizer:") == 1
