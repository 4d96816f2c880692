"""python -m data.cache: what it finds, what it removes and what it never touches."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data import cache_commands
from data.cache import Cache, entry_key
from data.cache_commands import main

DAY = 24 * 3600


def key(number: int) -> str:
    return entry_key(clip=number)


@pytest.fixture
def cache(tmp_path) -> Cache:
    """Four clips of model one, two captions of model two, and what runs keep beside them."""
    cache = Cache(tmp_path / "cache")
    for number in range(6):
        kind, model = ("video", "one") if number < 4 else ("text", "two")
        tensors = {"x": torch.full((1000,), float(number)), "mask": torch.tensor([True, False])}
        cache.put(key(number), tensors, {"source": f"clip {number}", "kind": kind, "model": model})
    for name in ("clips.json", "weights.json"):
        (cache.root / name).write_text("{}")
    return cache


def run(capsys, *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


def spoil(path: Path, how: str) -> None:
    """One of the ways in which an entry breaks; some keep size and header right."""
    raw = path.read_bytes()
    if how == "cut":
        path.write_bytes(raw[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "bit":
        path.write_bytes(raw[:-700] + bytes([raw[-700] ^ 1]) + raw[-699:])
    elif how == "dtype":
        path.write_bytes(raw.replace(b'"F32"', b'"Q32"'))
    elif how == "nan":
        save_file(load_file(path) | {"x": torch.full((1000,), float("nan"))}, path, {"version": "1"})


BROKEN = {
    "cut": "header promises",
    "empty": "header missing",
    "bit": "its bytes are not those that were written",
    "dtype": "Q32",
    "nan": "NaN or infinite values in x",
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_broken_is_found_and_removed_and_the_rest_stays(cache, capsys, how):
    assert run(capsys, "verify", cache.root) == (0, f"{cache.root}: 6 entries read, 0 broken, 0 foreign\n")
    spoil(cache.path(key(2)), how)
    code, out = run(capsys, "verify", cache.root)
    assert code == 1 and f"broken: {cache.path(key(2))}: " in out and BROKEN[how] in out
    assert "6 entries read, 1 broken, 0 foreign" in out and f"data.cache repair {cache.root}" in out
    assert cache.path(key(2)).exists()  # verify only looks
    code, out = run(capsys, "repair", cache.root)
    assert code == 0 and f"removed: {cache.path(key(2))}: " in out and "1 broken entry removed" in out
    assert cache.keys() == sorted(key(number) for number in (0, 1, 3, 4, 5))
    assert run(capsys, "verify", cache.root)[0] == 0
    assert (cache.root / "clips.json").exists() and (cache.root / "weights.json").exists()


def test_entries_of_before_checksums_are_whole(cache, capsys):
    path = cache.path(key(0))
    save_file(load_file(path), path, {"version": "1", "note": "{}"})
    assert run(capsys, "verify", cache.root)[0] == 0


def test_foreign_files_are_named_and_never_removed(cache, capsys):
    other = cache.path(key(1))
    other.write_bytes(other.read_bytes().replace(b'"version":"1"', b'"version":"0"'))
    strays = [cache.root / "stray.pt", cache.root / "zz" / "notes.txt", cache.path(key(0)).with_suffix(".bak")]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"x")
    code, out = run(capsys, "verify", cache.root)
    assert code == 1 and "6 entries read, 0 broken, 4 foreign" in out and "move them elsewhere" in out
    assert all(f"foreign: {path}" in out for path in [*strays, other]) and "another layout" in out
    run(capsys, "repair", cache.root)
    run(capsys, "prune", cache.root, "--older-than", 0)
    assert all(stray.exists() for stray in strays)


def test_repair_removes_only_stale_temporary_files(cache, capsys):
    young, old = (cache.root / "tmp" / f"{key(0)}.{n}.a.tmp" for n in (1, 2))
    young.write_bytes(b"x")
    old.write_bytes(b"x")
    age(old, 1.1)
    assert run(capsys, "verify", cache.root)[0] == 0
    old.write_bytes(b"x")
    age(old, 1.1)
    code, out = run(capsys, "repair", cache.root)
    assert code == 0 and "0 broken entries removed" in out and "1 stale temporary file removed" in out
    assert young.exists() and not old.exists()


def test_prune_by_age_of_last_use(cache, capsys):
    for number in range(6):
        age(cache.path(key(number)), 10 * number + 1)
    os.utime(cache.path(key(5)), (time.time(), time.time() - 51 * DAY))  # written long ago, read today
    code, out = run(capsys, "prune", cache.root, "--older-than", 25, "--dry-run")
    assert code == 0 and "2 of 6 entries would be removed, 8.5 KB of 25.5 KB" in out and len(cache.keys()) == 6
    code, out = run(capsys, "prune", cache.root, "--older-than", 25)
    assert code == 0 and "2 of 6 entries removed" in out and "age: time since an entry was last read or written" in out
    assert cache.keys() == sorted(key(number) for number in (0, 1, 2, 5))


def test_prune_to_a_size_takes_the_longest_unused_first(cache, capsys):
    for number in range(6):
        age(cache.path(key(number)), number + 1)
    size = sum(cache.path(key(number)).stat().st_size for number in range(3))
    run(capsys, "prune", cache.root, "--larger-than", f"{size / 1000}K")
    assert cache.keys() == sorted(key(number) for number in range(3))
    run(capsys, "prune", cache.root, "--larger-than", size)
    assert len(cache.keys()) == 3
    run(capsys, "prune", cache.root, "--larger-than", "0")
    assert cache.keys() == [] and (cache.root / "clips.json").exists()


def test_reading_counts_as_use_and_verifying_does_not(cache, capsys):
    paths = {number: cache.path(key(number)) for number in range(6)}
    for path in paths.values():
        age(path, 30)
    run(capsys, "verify", cache.root)
    assert cache.get(key(4))["x"][0] == 4
    if paths[4].stat().st_atime < time.time() - DAY:
        assert "reads are not noted (noatime)" in run(capsys, "prune", cache.root, "--older-than", 1, "--dry-run")[1]
        pytest.skip("this file system notes no reads")
    _, out = run(capsys, "prune", cache.root, "--older-than", 20)
    assert "5 of 6 entries removed" in out and "to a day only" in out and cache.keys() == [key(4)]


def test_file_systems_without_times_of_reading_are_told_of(cache, capsys, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"x")  # nothing is read, so nothing is noted
    out = run(capsys, "prune", cache.root, "--older-than", 20)[1]
    assert "last read or written: written, because this file system is mounted so that reads are not noted" in out


def test_stats_by_kind_and_model(cache, capsys):
    spoil(cache.path(key(5)), "cut")
    save_file({"x": torch.ones(1000)}, cache.path(key(3)), {"version": "1", "note": '{"source": "a"}'})
    spoil(cache.path(key(4)), "empty")
    (cache.root / "stray.pt").write_bytes(b"x")
    (cache.root / "tmp" / "a.tmp").write_bytes(b"x" * 1500)
    code, out = run(capsys, "stats", cache.root)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(f"{cache.root}: 6 entries, ")
    counts = dict(line.strip().rsplit(": ", 1) for line in lines[1:-2])
    assert counts["video"].startswith("3 entries, 12.8 KB") and counts["one"].startswith("3 entries, 12.8 KB")
    assert counts["text"].startswith("1 entry") and counts["two"].startswith("1 entry")  # cut, its header is whole
    assert counts["kind not noted"].startswith("1 entry") and counts["model not noted"].startswith("1 entry")
    assert counts["not readable: see verify"] == "1 entry, 0 bytes"
    assert "1, 1.5 KB" in out and "foreign files: 1, such as" in out


def test_an_empty_folder(tmp_path, capsys):
    assert run(capsys, "verify", tmp_path) == (0, f"{tmp_path}: 0 entries read, 0 broken, 0 foreign\n")
    assert run(capsys, "stats", tmp_path) == (0, f"{tmp_path}: 0 entries, 0 bytes\n")
    assert run(capsys, "prune", tmp_path, "--larger-than", "1K")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune", "."], "needs --older-than DAYS or --larger-than SIZE"),
        (["prune", ".", "--older-than", "soon"], "soon: a number of days, such as 30"),
        (["prune", ".", "--older-than", "-3"], "-3: a number of days"),
        (["prune", ".", "--older-than", "nan"], "nan: a number of days"),
        (["prune", ".", "--larger-than", "20 GiB"], "20 GiB: a size, such as 500M, 20G"),
        (["verify", "nowhere"], "nowhere: no such folder"),
        (["verify"], "DIR"),
        (["shrink", "."], "shrink"),
    ],
)
def test_wrong_words_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1500", 1500), ("20G", 20 * 10**9), ("1.5 tb", 1_500_000_000_000), ("500MB", 5 * 10**8)],
)
def test_sizes(text, size):
    assert cache_commands.size(text) == size


def test_as_a_module(cache):
    spoil(cache.path(key(0)), "bit")
    command = [sys.executable, "-m", "data.cache", "verify", str(cache.root)]
    made = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert made.returncode == 1 and "1 broken" in made.stdout and made.stderr == ""
    told = subprocess.run(
        [*command[:3], "--help"], cwd=Path(__file__).parents[1], capture_output=True, text=True
    ).stdout
    assert all(f"    {name}  " in told for name in ("verify", "repair", "prune", "stats"))
