"""The cache: entries are whole or absent, whoever writes them and whenever they are killed."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import runs
from caches import precompute
from data.cache import BrokenEntry, Cache, DiskFull, NonFinite, entry_key
from data.cache_commands import stats, verify
from data.fill import Item, fill
from trainers import launch

KEY = entry_key(clip="a")
TENSORS = {
    "moments": torch.randn(8, 2, 3, 4).bfloat16(),
    "text": torch.randn(5, 6),
    "text_mask": torch.tensor([True, True, False]),
}
HALF_HEADER = json.dumps({"latents": {"dtype": "F32", "shape": [4, 8, 8], "data_offsets": [0, 1024]}}).encode()
DAMAGE = {
    "empty": b"",
    "half": struct.pack("<Q", len(HALF_HEADER)) + HALF_HEADER + b"\0" * 100,
    "header cut": struct.pack("<Q", len(HALF_HEADER)) + HALF_HEADER[:20],
    "noise": bytes(range(256)) * 8,
    "zeros": b"\0" * 4096,
}


def path_of(cache: Cache, key: str = KEY) -> Path:
    return cache.path(key)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_entry_key_is_canonical():
    facts = dict(clip="\u00fc", bucket=[49, 512, 768], window=(0, 49), scale=0.5, none=None)
    assert entry_key(**facts) == entry_key(**dict(reversed(facts.items())))
    assert len(entry_key(**facts)) == 64
    # fixed: a new release that makes other keys would re-encode everybody's clips
    assert entry_key(a=1, b=[1, 2], c={"y": 0.5, "x": None}) == (
        "6a5c5b404876a4bf05d301404a5c84c935187e824bbd1256bc4a0ff692b90b94"
    )
    for name in facts:
        assert entry_key(**facts | {name: "other"}) != entry_key(**facts)
    assert entry_key(a="1") != entry_key(a=1)
    with pytest.raises(TypeError):
        entry_key(dtype=torch.bfloat16)
    with pytest.raises(ValueError):
        entry_key(scale=float("nan"))


def test_round_trip(tmp_path):
    cache = Cache(tmp_path / "cache")
    assert KEY not in cache and cache.keys() == [] and not cache.root.exists()
    with pytest.raises(KeyError, match=KEY):
        cache.get(KEY)
    cache.put(KEY, TENSORS, {"source": "a.mp4", "bucket": "9x64x96"})
    assert KEY in cache and same(cache.get(KEY), TENSORS) and cache.keys() == [KEY]
    with safe_open(path_of(cache), "pt") as file:
        assert file.metadata()["version"] == "1"
        assert json.loads(file.metadata()["note"]) == {"bucket": "9x64x96", "source": "a.mp4"}
    assert list((cache.root / "tmp").iterdir()) == []
    cache.get(KEY)["text"].zero_()  # what was read is the reader's own
    assert same(Cache(tmp_path / "cache").get(KEY), TENSORS)


def test_views_of_one_storage(tmp_path):
    whole = torch.randn(4, 6)
    cache = Cache(tmp_path)
    views = {"a": whole[:2], "b": whole[2:], "c": whole.T, "d": whole[:, ::2], "e": whole[:2]}
    cache.put(KEY, views, {})
    assert same(cache.get(KEY), views)
    assert path_of(cache).stat().st_size < 2000  # a view is stored, not what it looks into


def test_put_replaces(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS, {})
    cache.put(KEY, {"text": torch.ones(2)}, {})
    assert same(cache.get(KEY), {"text": torch.ones(2)})


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_entries_are_absent_and_removed(tmp_path, damage, caplog):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS, {})
    other = entry_key(clip="b")
    cache.put(other, TENSORS, {})
    path_of(cache).write_bytes(DAMAGE[damage])
    assert KEY not in cache
    assert str(path_of(cache)) in caplog.text and "broken" in caplog.text
    assert not path_of(cache).exists() and other in cache
    cache.put(KEY, TENSORS, {})
    assert same(cache.get(KEY), TENSORS)


def test_every_truncation_is_noticed(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"text": torch.randn(3)}, {"source": "a"})
    whole = path_of(cache).read_bytes()
    for length in range(len(whole)):
        path_of(cache).write_bytes(whole[:length])
        assert KEY not in cache, length
    path_of(cache).write_bytes(whole + b"\0")
    assert KEY not in cache
    path_of(cache).write_bytes(whole)
    assert KEY in cache


def test_get_removes_what_it_cannot_read(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"text": torch.randn(3)}, {})
    raw = path_of(cache).read_bytes()
    path_of(cache).write_bytes(raw.replace(b'"F32"', b'"Q32"'))  # sizes agree, content does not
    assert KEY in cache
    with pytest.raises(BrokenEntry, match="run the precompute stage again"):
        cache.get(KEY)
    assert KEY not in cache and not path_of(cache).exists()


def test_other_versions_count_as_absent_and_stay(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, {"text": torch.randn(3)}, {})
    raw = path_of(cache).read_bytes()
    assert raw.count(b'"version":"1"') == 1
    path_of(cache).write_bytes(raw.replace(b'"version":"1"', b'"version":"0"'))
    assert KEY not in cache and path_of(cache).exists()


def test_strays_are_left_alone(tmp_path):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS, {})
    strays = ["stray.pt", "ab/note.txt", f"{KEY[:2]}/other.safetensors", f"zz/{KEY}.safetensors", "memo.json"]
    for name in strays:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    again = Cache(tmp_path)
    assert again.keys() == [KEY] and KEY in again
    assert all((tmp_path / name).exists() for name in strays)
    for own in ("clips.json", "weights.json", ".clips.json.123.0a1b2c3d", f"tmp/{KEY}.1.a.tmp"):
        (tmp_path / own).write_bytes(b"{}")
    assert [str(path.relative_to(tmp_path)) for path in again.foreign()] == sorted(strays)
    for wrong in ("../../etc/passwd", "uncond", KEY.upper(), KEY + "\n"):
        with pytest.raises(ValueError, match="cache key"):
            wrong in again  # noqa: B015


def test_only_old_temporary_files_are_removed(tmp_path):
    Cache(tmp_path).put(KEY, TENSORS, {})
    young, old = tmp_path / "tmp" / f"{KEY}.1.a.tmp", tmp_path / "tmp" / f"{KEY}.2.b.tmp"
    young.write_bytes(b"x")
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 90000,) * 2)
    assert Cache(tmp_path).keys() == [KEY]
    assert young.exists() and not old.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_never_reach_the_disk(tmp_path, value):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS, {})
    for dtype in (torch.float32, torch.bfloat16):
        bad = torch.zeros(2, 3, dtype=dtype)
        bad[1, 2] = value
        with pytest.raises(NonFinite, match=r"cat\.mp4.*moments"):
            cache.put(KEY, {"text": torch.ones(2), "moments": bad}, {"source": "cat.mp4"})
    assert same(cache.get(KEY), TENSORS)
    with pytest.raises(ValueError, match=r"cat\.mp4.*at least one"):
        cache.put(KEY, {}, {"source": "cat.mp4"})


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_entries_and_says_what_is_needed(tmp_path, monkeypatch, call):
    cache = Cache(tmp_path)
    cache.put(KEY, TENSORS, {})
    real = open

    class Full:
        """A file that takes half of what is written to it."""

        def __init__(self, *arguments):
            self.file = real(*arguments)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.file.close()

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(
                "builtins.open", lambda name, mode="r", **k: (Full if mode == "xb" else real)(name, mode, **k)
            )
        else:
            patch.setattr(os, "fsync", full)
        patch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=4096))
        with pytest.raises(
            DiskFull, match=r"no space left .* for b\.mp4: (\d+) bytes are needed, 4096 are free"
        ) as told:
            cache.put(KEY, {"text": torch.ones(2)}, {"source": "b.mp4"})
    assert pickle.loads(pickle.dumps(told.value)).needed == told.value.needed > 8
    assert f"{told.value.needed} bytes are needed" in str(told.value)
    assert same(cache.get(KEY), TENSORS) and list((tmp_path / "tmp").iterdir()) == []
    assert DiskFull in launch.USER_ERRORS  # a message, no traceback


def test_other_faults_of_the_disk_are_raised_as_they_are(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        Cache(tmp_path).put(KEY, TENSORS, {})
    assert list((tmp_path / "tmp").iterdir()) == []


FILLER = """
import sys, torch
from data.cache import Cache, DiskFull, entry_key
from data.fill import Item, fill
cache = Cache(sys.argv[1])
items = [Item(entry_key(clip=i), f"clip {i}", i) for i in range(40)]
try:
    fill(cache, items, lambda contents: [{"x": torch.full((10000,), float(c))} for c in contents])
except DiskFull as error:
    print(error)
found = [i for i in range(40) if items[i].key in cache]
assert all(torch.equal(cache.get(items[i].key)["x"], torch.full((10000,), float(i))) for i in found)
print("stored", len(found), "left over", len(list((cache.root / "tmp").iterdir())))
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 800 kB of its own: 40 entries of 40 kB do not fit, those that do are whole."""
    command = f'mount -t tmpfs -o size=800k none {tmp_path} && exec {sys.executable} -c "$FILLER" {tmp_path}/cache'
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    env = os.environ | {"FILLER": FILLER}
    made = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    message, last = made.stdout.splitlines()
    found = re.search(
        r"for clip \d+: (\d+) bytes are needed, (\d+) are free.*Not stored yet: (\d+), about (\d+)", message
    )
    needed, free, left, about = map(int, found.groups())
    assert 40_000 < needed < 41_000 and free < needed and about == left * needed
    assert last == f"stored {40 - left} left over 0" and 10 < 40 - left <= 20


WRITER = """
import sys, torch
from data.cache import Cache, entry_key
cache = Cache(sys.argv[1])
print("ready", flush=True)
for turn in range(10**6):
    for clip in range(int(sys.argv[2])):
        cache.put(entry_key(clip=clip), {"x": torch.full((20000,), float(clip))}, {"source": str(clip)})
    if len(sys.argv) > 3 and turn + 1 == int(sys.argv[3]):
        break
"""


def writer(root: Path, *args: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(root), *map(str, args)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)


def all_whole(root: Path, clips: int) -> int:
    """How many entries there are, having asserted that each is right."""
    cache, keys = Cache(root), [entry_key(clip=clip) for clip in range(clips)]
    for clip, key in enumerate(keys):
        if key in cache:
            assert torch.equal(cache.get(key)["x"], torch.full((20000,), float(clip)))
    assert set(cache.keys()) <= set(keys)
    return sum(key in cache for key in keys)


def test_kill_at_any_moment(tmp_path):
    found = []
    process = writer(tmp_path, 400)
    assert process.stdout.readline() == "ready\n"
    for wait in (0.002, 0.02, 0.1):
        time.sleep(wait)
        os.kill(process.pid, signal.SIGSTOP)  # as good as dead: nothing it holds is flushed
        found.append(all_whole(tmp_path, 400))
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.wait()
    found.append(all_whole(tmp_path, 400))
    assert found == sorted(found) and found[-1] > found[0]


def test_two_processes_write_the_same_keys(tmp_path):
    processes = [writer(tmp_path, 10, 20) for _ in range(2)]
    for process in processes:
        process.stdout.readline()
    while any(process.poll() is None for process in processes):
        all_whole(tmp_path, 10)
        time.sleep(0.02)
    assert [process.returncode for process in processes] == [0, 0]
    assert all_whole(tmp_path, 10) == 10 and list((tmp_path / "tmp").iterdir()) == []


# -- two that fill one cache -------------------------------------------------------------------------------------------


def fill_slowly(root: str, clips: int, batch_size: int, workers: int) -> dict:
    """What one of two processes does: it fills the cache, each encoding taking a while; what it encoded and counted."""
    encoded, bar = [], []

    def encode(contents):
        time.sleep(0.003 * len(contents))
        encoded.extend(contents)
        return [{"x": torch.full((500,), float(clip))} for clip in contents]

    items = [Item(entry_key(clip=clip), str(clip), clip, f"bucket {clip % 3}") for clip in range(clips)]
    made = fill(Cache(root), items, encode, batch_size, lambda clip: clip, workers, bar.append, {"kind": "video"})
    assert made == len(encoded) == len(set(encoded)) <= len(bar) <= clips
    return {"encoded": encoded}


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (4, 2)])
def test_two_processes_fill_one_cache_and_share_the_work(tmp_path, batch_size, workers):
    clips = 240
    found = runs.forked(fill_slowly, str(tmp_path), clips, batch_size, workers)
    encoded = [rank["encoded"] for rank in found]
    assert set(encoded[0]) | set(encoded[1]) == set(range(clips))
    # Each would encode all 240 if they went in one order. Of r batches left they meet on one in r: about 6 batches.
    assert sum(map(len, encoded)) <= clips + 24 * batch_size
    assert min(map(len, encoded)) > clips / 5
    cache = Cache(tmp_path)
    assert cache.keys() == sorted(entry_key(clip=clip) for clip in range(clips)) and cache.foreign() == []
    assert all(torch.equal(cache.get(entry_key(clip=c))["x"], torch.full((500,), float(c))) for c in range(clips))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_encoded_together_does_not_depend_on_the_order(tmp_path):
    def batches(root):
        seen = []

        def encode(contents):
            seen.append(tuple(contents))
            return [{"x": torch.ones(1)} for _ in contents]

        items = [Item(entry_key(clip=clip), str(clip), clip, f"bucket {clip % 3}") for clip in range(50)]
        assert fill(Cache(root), items, encode, batch_size=4) == 50
        return seen

    first, second = batches(tmp_path / "a"), batches(tmp_path / "b")
    assert first != second and sorted(first) == sorted(second)
    assert all(len({clip % 3 for clip in batch}) == 1 for batch in first)


# -- what a run says of its cache --------------------------------------------------------------------------------------


def test_a_run_notes_foreign_files_once_and_says_what_its_entries_are(tiny_ltx, clips, tmp_path, capsys):
    root = tmp_path / "cache"
    for name in ("stray.pt", "ab/latents_0.pt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    precompute(tiny_ltx, clips, root)
    out = capsys.readouterr().out
    note = f"note: {root} holds 2 files that no run wrote there, such as ab/latents_0.pt: not read, not removed"
    assert out.count(note) == 1 and out.count("latents_0.pt") == 1
    assert (root / "stray.pt").read_bytes() == b"x" and len(Cache(root).keys()) == 15
    lines = [line.split(":")[0].strip() for line in stats(root)[1:-1]]
    assert lines == [f"LTXPipeline, {tiny_ltx}", "text", "video"]
    assert "  text: 8 entries" in "\n".join(stats(root)) and "  video: 7 entries" in "\n".join(stats(root))
    for stray in ("stray.pt", "ab/latents_0.pt"):
        (root / stray).unlink()
    precompute(tiny_ltx, clips, root)
    assert "no run wrote there" not in capsys.readouterr().out and verify(root)[1]
