"""A cache at a URL: what is stored there is what a folder holds, and a run neither knows nor shows the difference."""

import os
import pickle
import secrets
import struct
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote, unquote

import fsspec
import pytest
import torch
from fsspec.asyn import AsyncFileSystem

import runs
from caches import CLIPS, TEXTS, encoded
from data import cache as cache_module
from data.cache import BrokenEntry, Cache, NonFinite, entry_key
from data.cache_commands import main
from data.places import PlaceError, Store, place
from trainers import launch
from trainers.config import OptionError
from trainers.ltx import LTXTrainer
from trainers.parsing import parse
from trainers.plan import PlanError

pytestmark = pytest.mark.usefixtures("libraries")
KEY, OTHER = entry_key(clip="a"), entry_key(clip="b")
TENSORS = {"moments": torch.arange(24.0).reshape(2, 3, 4).bfloat16(), "mask": torch.tensor([True, False])}


@pytest.fixture
def memory():
    """memory://..., which this process alone has; empty before and after."""
    store = fsspec.filesystem("memory").store
    store.clear()
    yield "memory://bucket/cache"
    store.clear()


class Bucket(AsyncFileSystem):
    """Objects as files of one folder, asked for as S3 is: by fsspec's thread, which a fork does not take along."""

    folder: Path

    def _file(self, path: str) -> Path:
        return self.folder / quote(self._strip_protocol(path), safe="")

    async def _info(self, path, **_):
        file = self._file(path)
        stat = file.stat()
        written = datetime.fromtimestamp(stat.st_mtime, UTC)
        return {"name": unquote(file.name), "size": stat.st_size, "type": "file", "LastModified": written}

    async def _cat_file(self, path, start=None, end=None, **_):
        return self._file(path).read_bytes()[start:end]

    async def _pipe_file(self, path, value, mode="overwrite", **_):
        temp = self.folder / f".{secrets.token_hex(8)}"
        temp.write_bytes(value)
        temp.replace(self._file(path))

    async def _rm_file(self, path, **_):
        self._file(path).unlink()

    async def _find(self, path, detail=False, **_):
        if not any(self.folder.glob("[!.]*")):
            raise FileNotFoundError(path)
        names = [unquote(file.name) for file in self.folder.glob("[!.]*")]
        return {name: await self._info(name) for name in sorted(names) if name.startswith(f"{path}/")}


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> str:
    """s3://..., answered by `Bucket`."""
    Bucket.folder = tmp_path / "bucket"
    Bucket.folder.mkdir()
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Bucket)
    return "s3://bucket/cache"


@pytest.fixture(params=("memory", "file", "s3"))
def url(request, memory, bucket, tmp_path) -> str:
    return {"memory": memory, "file": f"file://{tmp_path}/cache", "s3": bucket}[request.param]


def at(cache: Cache, key: str = KEY):
    """(fsspec's file system, the path of an entry there)."""
    return fsspec.core.url_to_fs(cache.path(key))


def damage(cache: Cache, content: bytes, key: str = KEY) -> None:
    files, path = at(cache, key)
    files.pipe_file(path, content)


def raw(cache: Cache, key: str = KEY) -> bytes:
    files, path = at(cache, key)
    return files.cat_file(path)


def watched(name: str, do, seen: list):
    def doing(*given, **named):
        out = do(*given, **named)
        seen.append((name, len(out) if isinstance(out, bytes) else 0))
        return out

    return doing


@pytest.fixture
def requests(monkeypatch) -> list[tuple[str, int]]:
    """(what was asked of a file system, bytes that came back) from now on; `info` and `find` carry none."""
    seen = []
    for kind in (fsspec.get_filesystem_class("memory"), fsspec.get_filesystem_class("file")):
        for name in ("info", "find", "cat_file", "pipe_file", "rm_file"):
            monkeypatch.setattr(kind, name, watched(name, getattr(kind, name), seen))
    return seen


# -- entries -------------------------------------------------------------------------------------------------------


def test_an_entry_there_is_the_file_that_a_folder_holds(url, tmp_path):
    cache, local = Cache(f"{url}/"), Cache(tmp_path / "local")
    assert KEY not in cache and cache.keys() == [] and cache.foreign() == [] and cache.absent([KEY]) == {KEY}
    with pytest.raises(KeyError, match=KEY):
        cache.get(KEY)
    for each in (cache, local):
        each.put(KEY, TENSORS, {"source": "a.mp4"})
    assert cache.path(KEY) == f"{url}/{KEY[:2]}/{KEY}.safetensors"
    ours, theirs = raw(cache), local.path(KEY).read_bytes()
    assert len(ours) == len(theirs) and ours[-50:] == theirs[-50:]  # safetensors shuffles its metadata
    assert KEY in cache and runs.same(cache.get(KEY), TENSORS) and cache.keys() == [KEY] and not cache.absent([KEY])
    cache.put(KEY, {"x": torch.ones(2)}, {})
    again = pickle.loads(pickle.dumps(cache))  # as a loader worker gets it
    assert runs.same(again.get(KEY), {"x": torch.ones(2)}) and cache.foreign() == []
    with pytest.raises(NonFinite, match=r"cat\.mp4.*moments"):
        cache.put(OTHER, {"moments": torch.tensor([float("nan")])}, {"source": "cat.mp4"})
    assert cache.keys() == [KEY]


def test_every_truncation_is_found_and_removed(url, caplog):
    cache = Cache(url)
    cache.put(OTHER, TENSORS, {})
    cache.put(KEY, {"x": torch.ones(3)}, {})
    whole = raw(cache)
    for length in range(len(whole)):
        damage(cache, whole[:length])
        if length % 2:
            assert KEY not in cache
        else:
            with pytest.raises(BrokenEntry, match="run the precompute stage again"):
                cache.get(KEY)
        assert cache.keys() == [OTHER], length
    assert f"{cache.path(KEY)}: broken entry (9 bytes, header missing); removed" in caplog.text


def test_long_headers_and_huge_promises(memory):
    cache = Cache(memory)
    cache.put(KEY, TENSORS, {"source": "x" * 100_000})
    assert KEY in cache and runs.same(cache.get(KEY), TENSORS)
    damage(cache, struct.pack("<Q", 2**62) + b"{}")
    assert KEY not in cache and cache.keys() == []


def test_entries_of_another_version_are_absent_and_stay(memory):
    cache = Cache(memory)
    cache.put(KEY, TENSORS, {})
    damage(cache, raw(cache).replace(b'"version":"1"', b'"version":"0"'))
    assert KEY not in cache
    with pytest.raises(KeyError, match="another layout"):
        cache.get(KEY)
    assert cache.keys() == [KEY]


def test_what_was_replaced_meanwhile_is_not_removed(memory):
    cache = Cache(memory)
    damage(cache, b"half")
    _, stamp = cache.read(KEY, noted=True)
    cache.put(KEY, TENSORS, {})
    cache.remove(KEY, stamp)
    assert runs.same(cache.get(KEY), TENSORS)


def test_what_is_asked_of_a_store(memory, requests, monkeypatch):
    cache = Cache(memory)
    assert requests == []
    cache.put(KEY, {"x": torch.ones(100_000)}, {})
    assert requests == [("pipe_file", 0)]
    requests.clear()
    cache.get(KEY)
    ((name, size),) = requests
    assert name == "cat_file" and 400_000 < size < 401_000
    requests.clear()
    assert KEY in cache and [name for name, _ in requests] == ["info", "cat_file"] and requests[1][1] <= 65536
    requests.clear()
    many = [entry_key(clip=n) for n in range(cache_module.FEW)]
    damage(cache, b"", OTHER)  # an empty object is none
    requests.clear()
    assert cache.absent([*many, KEY, OTHER]) == {*many, OTHER} and [name for name, _ in requests] == ["find"]


# -- options ------------------------------------------------------------------------------------------------------


def test_places_that_are_none():
    for text in ("ftp://x/y", "http://x/y", "simplecache::s3://x/y", "nonsense://x"):
        with pytest.raises(PlaceError, match=r"a cache can be at s3://, .* or in a local folder"):
            place(text)
    for text, package in (("s3://x/y", "s3fs"), ("gs://x/y", "gcsfs"), ("abfs://x@y/z", "adlfs")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)  # as if not installed, also where it is
            with pytest.raises(PlaceError, match=f"{text}: needs the package {package}: pip install {package}"):
                place(text)
    assert PlaceError in launch.USER_ERRORS


def test_an_option_keeps_a_url_and_makes_a_path_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", "m", "--data.train", "d", "--data.buckets", "9x64x96", "--output_dir", "out"]
    given = parse(LTXTrainer.Config, [*words, "--data.cache_dir", "s3://bucket/x"])
    assert given.data.cache_dir == given.cache_dir == "s3://bucket/x"
    assert given.memo_dir == tmp_path / "out" / "cache"
    (tmp_path / "c.yaml").write_text("data: {cache_dir: 'gs://bucket/y'}\n")
    assert parse(LTXTrainer.Config, ["--config", "c.yaml", *words]).data.cache_dir == "gs://bucket/y"
    for text in ("sub/c", f"{tmp_path}/sub/c"):
        given = parse(LTXTrainer.Config, [*words, "--data.cache_dir", text])
        assert given.cache_dir == given.memo_dir == tmp_path / "sub" / "c"
    given = parse(LTXTrainer.Config, words)
    assert given.cache_dir == given.memo_dir == tmp_path / "out" / "cache"


def test_what_cannot_be_used_is_said_before_anything_loads(tiny_ltx, clips, tmp_path, memory, log, monkeypatch):
    def told(**changes) -> str:
        with pytest.raises(OptionError) as error:
            runs.run(tiny_ltx, clips, tmp_path / "run", **changes)
        assert log.loaded == [] and not list(tmp_path.rglob("*:*"))  # no folder named after a URL
        return str(error.value)

    monkeypatch.setitem(sys.modules, "s3fs", None)
    text = told(data__cache_dir="s3://bucket/x")
    assert text.startswith("data.cache_dir s3://bucket/x: needs the package s3fs: pip install s3fs")
    assert "a local folder" in told(data__cache_dir="sftp://host/x")
    with monkeypatch.context() as patch:
        patch.setattr(launch, "accelerator", lambda config: SimpleNamespace(device=torch.device("cpu")))
        patch.setenv("WORLD_SIZE", "2")
        assert "each process has its own memory; launch one, or name a folder" in told(data__cache_dir=memory)
    (tmp_path / "file").write_text("x")
    text = told(data__cache_dir=f"file://{tmp_path}/file/x")
    assert text.startswith(f"data.cache_dir file://{tmp_path}/file/x: cannot be written to (")


def test_reading_needs_no_right_to_write(tmp_path, monkeypatch):
    store = Store(f"file://{tmp_path}")
    monkeypatch.setattr(fsspec.get_filesystem_class("file"), "pipe_file", None)
    store.check(writes=False)
    with pytest.raises(PlaceError, match="cannot be written to"):
        store.check(writes=True)


# -- runs ---------------------------------------------------------------------------------------------------------


def test_training_from_a_url_equals_training_from_a_folder(tiny_ltx, clips, tmp_path, memory, log):
    runs.run(tiny_ltx, clips, tmp_path / "local", data__cache_dir=tmp_path / "cache")
    assert encoded(log) == (TEXTS, CLIPS)
    made = runs.run(tiny_ltx, clips, tmp_path / "url", data__cache_dir=memory, data__num_workers=2)
    assert encoded(log) == (TEXTS, CLIPS)
    assert made.encoders.cache.keys() == Cache(tmp_path / "cache").keys()
    assert len(runs.losses(tmp_path / "url")) == 4
    runs.assert_same_outcome(tmp_path / "local", tmp_path / "url")
    assert made.encoders.cache.foreign() == []  # memos of local files are not there
    memos = {path.name for path in (tmp_path / "url" / "cache").iterdir()}
    assert memos == {"clips.json", "weights.json"}
    runs.run(tiny_ltx, clips, tmp_path / "second", data__cache_dir=memory)
    assert encoded(log) == (0, 0)
    runs.assert_same_outcome(tmp_path / "local", tmp_path / "second")


def test_stages_on_two_machines_and_resume(tiny_ltx, clips, tmp_path, memory, log, capsys):
    """One machine encodes; another, with nothing but the URL in common, trains, is stopped and goes on."""
    with pytest.raises(PlanError, match=r"memory://bucket/cache: 8 of 8 captions and 7 of 7 clips are not encoded"):
        runs.run(tiny_ltx, clips, tmp_path / "b", stage="train", data__cache_dir=memory)
    runs.run(tiny_ltx, clips, tmp_path / "a", stage="precompute", data__cache_dir=memory)
    told = capsys.readouterr().out
    assert "to write to memory://bucket/cache; whether they fit there is not checked" in told
    assert encoded(log) == (TEXTS, CLIPS)
    for name in ("whole", "b"):
        kind = LTXTrainer if name == "whole" else runs.interrupted(LTXTrainer, 2)
        options = dict(stage="train", data__cache_dir=memory, checkpoint__every=2)
        made = runs.trainer(kind, tiny_ltx, clips, tmp_path / name, **options)
        if name == "whole":
            made.run()
        else:
            with pytest.raises(runs.Interrupted):
                made.run()
    runs.run(tiny_ltx, clips, tmp_path / "b", **options, checkpoint__resume="latest")
    assert encoded(log) == (0, 0)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "b")
    assert len(runs.losses(tmp_path / "whole")) == 4


def test_many_entries_are_listed_and_the_rest_is_encoded(tiny_ltx, clips, tmp_path, memory, log, monkeypatch):
    monkeypatch.setattr(cache_module, "FEW", 0)
    runs.run(tiny_ltx, clips, tmp_path / "a", stage="precompute", data__cache_dir=memory)
    assert encoded(log) == (TEXTS, CLIPS)
    files = fsspec.filesystem("memory")
    one, two, *_ = sorted(files.find("/bucket/cache"))
    files.rm_file(one)
    files.pipe_file(two, b"")
    runs.run(tiny_ltx, clips, tmp_path / "a", stage="precompute", data__cache_dir=memory)
    assert sum(encoded(log)) == 2


def encode_together(model, clips, out, url) -> list:
    """What a rank of two stored, and the losses that it logged."""
    from data.cache import Cache

    stored, put = [], Cache.put

    def store(self, key, tensors, note):
        put(self, key, tensors, note)
        stored.append(key)

    Cache.put = store
    made = runs.trainer(LTXTrainer, model, clips, out, data__cache_dir=url, data__num_workers=1)
    made.run()
    return stored


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_two_ranks_fill_and_read_one_url(tiny_ltx, clips, tmp_path, scheme, bucket):
    url = bucket if scheme == "s3" else f"file://{tmp_path}/cache"
    one, two = runs.forked(encode_together, tiny_ltx, clips, tmp_path / "run", url)
    assert one and two and sorted(one + two) == Cache(url).keys() and len(one + two) == TEXTS + CLIPS
    local = runs.forked(encode_together, tiny_ltx, clips, tmp_path / "local", str(tmp_path / "folder"))
    assert sorted(local[0] + local[1]) == sorted(one + two)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "local")


def rewrite(url) -> int:
    """Each rank writes, and reads what is there meanwhile: it is always one of the two whole entries."""
    cache, rank, seen = Cache(url), int(os.environ["RANK"]), 0
    end = time.monotonic() + 2
    while time.monotonic() < end:
        cache.put(KEY, {"x": torch.full((200_000,), float(rank))}, {})
        assert KEY in cache
        values = cache.get(KEY)["x"].unique()
        assert len(values) == 1
        seen += int(values.item()) != rank
    return seen


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_no_reader_of_a_url_sees_half_an_entry(tmp_path, scheme, bucket):
    url = bucket if scheme == "s3" else f"file://{tmp_path}/cache"
    Cache(url).put(KEY, {"x": torch.zeros(2)}, {})  # before the fork, which takes no thread of fsspec's along
    seen = runs.forked(rewrite, url)
    assert sum(seen) > 0  # they did meet
    assert not list(tmp_path.rglob("*.tmp"))


# -- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(url) -> Cache:
    cache = Cache(url)
    for number in range(4):
        note = {"source": str(number), "kind": "video" if number < 3 else "text", "model": "one"}
        cache.put(entry_key(clip=number), {"x": torch.full((1000,), float(number))}, note)
    return cache


def run(capsys, *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


def test_verify_and_repair(kept, capsys):
    assert run(capsys, "verify", kept.root) == (0, f"{kept.root}: 4 entries read, 0 broken, 0 foreign\n")
    bad, good = entry_key(clip=1), entry_key(clip=2)
    content = raw(kept, bad)
    damage(kept, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], bad)
    files, path = fsspec.core.url_to_fs(f"{kept.root}/stray.pt")
    files.pipe_file(path, b"x")
    code, out = run(capsys, "verify", kept.root)
    assert code == 1 and f"broken: {kept.path(bad)}: its bytes are not those that were written" in out
    assert f"foreign: {kept.root}/stray.pt" in out and "4 entries read, 1 broken, 1 foreign" in out
    assert bad in kept
    code, out = run(capsys, "repair", kept.root)
    assert code == 0 and f"removed: {kept.path(bad)}" in out and "1 broken entry removed" in out
    assert bad not in kept and good in kept and len(kept.keys()) == 3 and files.exists(path)


def test_repair_removes_stale_temporary_files(tmp_path, capsys):
    cache = Cache(f"file://{tmp_path}")
    cache.put(KEY, TENSORS, {})
    young, old = tmp_path / "tmp" / "a.tmp", tmp_path / "tmp" / "b.tmp"
    for path in (young, old):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 90000,) * 2)
    Cache(f"file://{tmp_path}")
    assert old.exists()  # a start at a URL lists nothing
    assert "1 stale temporary file removed" in run(capsys, "repair", cache.root)[1]
    assert young.exists() and not old.exists()


def test_stats(kept, capsys):
    code, out = run(capsys, "stats", kept.root)
    assert code == 0 and out.splitlines()[0].startswith(f"{kept.root}: 4 entries, 16.8 KB")
    assert "  video: 3 entries" in out and "  text: 1 entry" in out and "  one: 4 entries" in out


def test_prune(kept, capsys):
    assert "0 of 4 entries removed" in run(capsys, "prune", kept.root, "--older-than", 1)[1]
    code, out = run(capsys, "prune", kept.root, "--older-than", 0, "--dry-run")
    assert code == 0 and "4 of 4 entries would be removed" in out and len(kept.keys()) == 4
    assert "read or written: written, because reads at a URL are not noted" in out
    _, out = run(capsys, "prune", kept.root, "--larger-than", "10K")
    assert "2 of 4 entries removed" in out and kept.keys() == sorted(entry_key(clip=n) for n in (2, 3))


def test_of_unknown_age_is_young(memory, capsys, monkeypatch):
    cache = Cache(memory)
    cache.put(KEY, TENSORS, {})
    kind = fsspec.get_filesystem_class("memory")
    find = kind.find
    plain = {"name", "size", "type"}
    monkeypatch.setattr(kind, "find", lambda *a, **k: {p: {w: i[w] for w in plain} for p, i in find(*a, **k).items()})
    assert "0 of 1 entry removed" in run(capsys, "prune", memory, "--older-than", 0)[1]


def test_commands_refuse_urls_that_are_none(capsys):
    with pytest.raises(SystemExit) as end:
        main(["stats", "ftp://x/y"])
    assert end.value.code == 2 and "a cache can be at s3://" in capsys.readouterr().err
