"""Clips inside tars: found, paired, read and trained on as if they were unpacked; nothing else in them is trusted."""

import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

import runs
from caches import encoded, precompute
from data import tars
from data.memo import HashMemo, content_sha256
from data.sources import Source, read_source
from data.video import UnreadableClip, probe, read_frames

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """Three clips, a still and captions of both kinds, with names that mean something to shells, URLs and FFmpeg."""
    root = tmp_path_factory.mktemp("unpacked")
    for seed, name in enumerate(("000001", "a b,,:%20#1", "ü/日本")):
        runs.write_clip(root / f"{name}.mp4", 9, 64, 96, 24, seed=seed)
        (root / f"{name}.txt").write_text(f"a cat of {name}\n", encoding="utf-8")
    Image.new("RGB", (96, 64), (200, 30, 30)).save(root / "still.png")
    (root / "still.txt").write_text("a still")
    return root


def pack(folder: Path, tar: Path, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(tar, "w", format=form) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False)
    return tar


def put(
    archive: tarfile.TarFile, name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content) if kind == tarfile.REGTYPE else 0, kind, link
    archive.addfile(info, io.BytesIO(content))


def rows(path: object, **options) -> list[tuple[str, str]]:
    found, problems = read_source(Source(str(path), **options))
    assert problems == []
    return [(Path(row.path).name, row.caption) for row in found]


def problems_of(path: object, **options) -> list[str]:
    return read_source(Source(str(path), **options))[1]


# -- what is in a tar -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_read_where_they_lie(unpacked, tmp_path, form):
    long = "deep/" * 30 + "name.txt"  # beyond the 100 bytes of a plain header
    tar = pack(unpacked, tmp_path / "x,y: %1.tar", form)
    with tarfile.open(tar, "a", format=form) as archive:
        put(archive, long, b"far away")
        put(archive, "./dot//slash.txt", b"plain")
    found = {name: (offset, size) for name, offset, size in tars.members(tar)}
    files = {path.relative_to(unpacked).as_posix(): path for path in unpacked.rglob("*") if path.is_file()}
    assert found.keys() == files.keys() | {long, "dot/slash.txt"}
    raw = tar.read_bytes()
    for name, path in files.items():
        offset, size = found[name]
        assert tars.locate(tar / name) == (str(tar), offset, size)
        assert raw[offset : offset + size] == path.read_bytes() == tars.read_bytes(tar / name)
        assert content_sha256(tar / name) == content_sha256(path)
        assert tars.is_file(tar / name) and not tars.is_file(tar / (name + "x"))
    assert tars.read_bytes(tar / long) == b"far away" and tars.read_bytes(tar / "dot" / "slash.txt") == b"plain"
    assert tars.locate(tar) is None and tars.locate(tmp_path / "no.tar" / "a") is None and tars.locate("a.mp4") is None


def test_a_member_is_a_file_of_its_own_size(unpacked, tmp_path):
    tar = pack(unpacked, tmp_path / "a.tar")
    whole = (unpacked / "000001.mp4").read_bytes()
    with tars.open_bytes(tar / "000001.mp4") as file:
        assert file.seek(0, os.SEEK_END) == len(whole) and file.read() == b""
        assert file.seek(-5, os.SEEK_CUR) == len(whole) - 5 and file.read(99) == whole[-5:]
        assert file.seek(len(whole) + 7) and file.read(1) == b""
        with pytest.raises(OSError, match="cannot seek"):
            file.seek(-1)
        assert file.seek(3) == 3 and file.read(4) == whole[3:7]


def test_clips_and_stills_look_as_they_do_unpacked(unpacked, tmp_path):
    tar = pack(unpacked, tmp_path / "x,y: %1.tar")
    for path in unpacked.rglob("*.[mp][pn][4g]"):
        name = path.relative_to(unpacked)
        assert probe(tar / name) == probe(path)
        size = (1, 64, 96) if path.suffix == ".png" else (5, 48, 64)
        start = 0 if path.suffix == ".png" else 3
        assert torch.equal(read_frames(tar / name, start, *size), read_frames(path, start, *size))
    with pytest.raises(UnreadableClip, match="no such file"):
        probe(tar / "other.mp4")
    with HashMemo(tmp_path / "memo.json") as memo:
        first = probe(tar / "000001.mp4", memo), content_sha256(tar / "000001.mp4", memo)
    again = HashMemo(tmp_path / "memo.json")
    again.recall(tar / "000001.mp4", "probe", lambda: pytest.fail("probed again"))
    assert (probe(tar / "000001.mp4", again), content_sha256(tar / "000001.mp4", again)) == first


def test_a_changed_tar_is_looked_at_anew(unpacked, tmp_path):
    tar = pack(unpacked, tmp_path / "a.tar")
    memo = HashMemo(tmp_path / "memo.json")
    before = content_sha256(tar / "000001.mp4", memo)
    with tarfile.open(tar, "w") as archive:
        put(archive, "first.txt", b"shifts what follows")
        put(archive, "000001.mp4", b"other bytes")
    assert tars.read_bytes(tar / "000001.mp4") == b"other bytes"
    assert content_sha256(tar / "000001.mp4", memo) != before


def test_what_leads_out_of_a_tar_is_not_read(unpacked, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("password")
    tar = tmp_path / "evil.tar"
    with tarfile.open(tar, "w") as archive:
        put(archive, "good.mp4", (unpacked / "000001.mp4").read_bytes())
        put(archive, "good.txt", b"fine")
        put(archive, "../up.txt")
        put(archive, "a/../../up.txt")
        put(archive, str(secret), b"absolute")
        put(archive, "soft.txt", kind=tarfile.SYMTYPE, link=str(secret))
        put(archive, "hard.txt", kind=tarfile.LNKTYPE, link="good.txt")
        put(archive, "disk.mp4", kind=tarfile.BLKTYPE)
        put(archive, "pipe.mp4", kind=tarfile.FIFOTYPE)
        put(archive, "folder.mp4", kind=tarfile.DIRTYPE)
        put(archive, "two.txt", b"1")
        put(archive, "./two.txt", b"2")
        put(archive, "\x1b[2Jbell\x07.txt")
        put(archive, "half\udcff.txt")
    refused: list[str] = []
    assert [name for name, _, _ in tars.members(tar, refused)] == ["good.mp4", "good.txt", "\x1b[2Jbell\x07.txt"]
    told = "\n".join(refused)
    assert (
        told.count("leads out of the tar") == 3
        and f"is a link (to {secret})" in told
        and "pack the file itself" in told
    )
    assert "disk.mp4 is neither a file nor a folder" in told and "pipe.mp4 is neither" in told
    assert "two.txt is in it more than once" in told and r"half\udcff.txt is not named in UTF-8" in told
    assert "\x1b" not in told and len(refused) == 9
    assert problems_of(tar)[: len(refused)] == refused
    assert read_source(Source(str(tar)))[0][0].captions == ("fine",)
    for name in ("../up.txt", "soft.txt", "hard.txt", "folder.mp4", str(secret)):
        assert tars.locate(f"{tar}/{name}") is None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "cut short"),
        (lambda raw: raw[: raw.rindex(b"a still") + 512 - raw.rindex(b"a still") % 512], "has no end mark"),
        (lambda raw: raw[:1536] + b"\xff" * 512 + raw[2048:], "not a tar|cut short|is no member"),
        (lambda raw: b"\xff" * 512 + raw[512:], "not a tar, or damaged"),
        (lambda raw: raw + raw, "tars cannot be joined with cat"),
        (lambda raw: b"", "not a tar, or damaged"),
        (lambda raw: b"\x1f\x8b" + raw, "compressed with gzip.*decompress it"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
    ids=["half", "at a member's end", "middle", "begin", "joined", "empty", "gzip", "pointer"],
)
def test_a_tar_that_is_not_whole_is_refused(unpacked, tmp_path, spoil, message):
    whole = pack(unpacked, tmp_path / "whole.tar", tarfile.USTAR_FORMAT)
    tar = tmp_path / "bad.tar"
    raw = spoil(whole.read_bytes())
    tar.write_bytes(raw)
    if message.startswith("not a tar|"):  # a header of a member in the middle
        offset = next(offset for name, offset, _ in tars.members(whole) if name == "still.png")
        raw = whole.read_bytes()
        tar.write_bytes(raw[: offset - 512] + b"\xff" * 512 + raw[offset:])
    with pytest.raises(tars.TarError, match=f"bad.tar.*({message})"):
        tars.members(tar)
    (problem,) = problems_of(tar)
    assert str(tar) in problem
    assert tars.locate(tar / "000001.mp4") is None


# -- which tars -------------------------------------------------------------------------------------------------------


def test_patterns_of_tars(tmp_path):
    names = [f"shard-{number:03d}.tar" for number in (8, 9, 10)]
    assert tars.braces("shard-{008..010}.tar") == names
    assert tars.braces("{a,b}/s{9..11}.tar") == [f"{x}/s{n}.tar" for x in "ab" for n in (9, 10, 11)]
    assert tars.braces("s{2..0}.tar") == ["s2.tar", "s1.tar", "s0.tar"] and tars.braces("s{x}.tar") == ["s{x}.tar"]
    with pytest.raises(tars.TarError, match="more than 100000 files"):
        tars.braces("s{0..999999}.tar")
    with pytest.raises(tars.TarError, match="more than 100000 files"):
        tars.braces("s{0..9999}{0..9999}.tar")
    assert problems_of(tmp_path / "s{0..999999}.tar") == [
        f"{tmp_path}/s{{0..999999}}.tar: names more than 100000 files"
    ]
    for number, name in enumerate(names):
        with tarfile.open(tmp_path / name, "w") as archive:
            put(archive, f"{number}.mp4")
            put(archive, f"{number}.txt", f"caption {number}".encode())
    expected = [(f"{number}.mp4", f"caption {number}") for number in range(3)]
    for pattern in ("", "*.tar", "shard-{008..010}.tar", "shard-0[01]?.tar", "shard-{008,009,010}.tar"):
        assert rows(tmp_path / pattern) == expected, pattern
    assert rows(tmp_path / names[1]) == expected[1:2]
    assert problems_of(tmp_path / "shard-{009..011}.tar") == [f"{tmp_path}/shard-011.tar: no such file"]
    assert problems_of(tmp_path / "other-*.tar") == [f"{tmp_path}/other-*.tar: no tar is named so"]
    assert problems_of(tmp_path / "other.tar") == [f"{tmp_path}/other.tar: no such file"]
    (tmp_path / "loose.mp4").write_bytes(b"x")
    assert "holds shard-008.tar and loose.mp4: make sources of their own" in problems_of(tmp_path)[0]


def test_tars_of_two_splits_are_not_mixed(tmp_path):
    for name in ("data/train-00000.tar", "data/train-00001.tar", "data/test-00000.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with tarfile.open(tmp_path / name, "w") as archive:
            put(archive, f"{Path(name).stem}.mp4")
            put(archive, f"{Path(name).stem}.txt", b"a cat")
    data = tmp_path / "data"
    assert [name for name, _ in rows(data / "train-*.tar")] == ["train-00000.mp4", "train-00001.mp4"]
    (problem,) = problems_of(data)
    assert f"{data}: has tars of the splits train and test: give those of one as path" in problem


# -- clips and captions -----------------------------------------------------------------------------------------------


def test_the_same_rows_as_the_unpacked_folder(unpacked, tmp_path):
    tar = pack(unpacked, tmp_path / "shard.tar")
    assert rows(tar) == rows(unpacked) and len(rows(tar)) == 4
    found, _ = read_source(Source(str(tar), caption_prefix="STYLE ", repeats=3, weight=0.5))
    assert found[0].captions == ("STYLE a cat of 000001",) and found[0].repeats == 3 and found[0].weight == 0.5
    assert str(found[0].path) == f"{tar}/000001.mp4" and found[0].where == "shard.tar/000001.txt"


def test_captions_in_json(tmp_path):
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w") as archive:
        for name, row in {
            "1": {"caption": "one", "url": "x"},
            "2": {"text": ["two", "zwei"], "file_name": "/etc/passwd"},
            "3": {"caption": "in json", "long": "at length"},
        }.items():
            put(archive, f"{name}.mp4")
            put(archive, f"{name}.json", json.dumps(row).encode())
        put(archive, "3.txt", "\ufefftext\r\n".encode())
    found, problems = read_source(Source(str(tar)))
    assert problems == [] and [row.captions for row in found] == [("one",), ("two", "zwei"), ("text",)]
    assert [Path(row.path).name for row in found] == ["1.mp4", "2.mp4", "3.mp4"]
    found, problems = read_source(Source(str(tar), caption_column="long"))
    assert [row.captions for row in found] == [("at length",)] and len(problems) == 2
    assert f"{tar}/1.json line 1: no column long; there are caption, url" in problems[0]


def test_what_cannot_be_paired_in_a_tar_is_told(tmp_path):
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w") as archive:
        for name in ("alone.mp4", "twin.mp4", "twin.png", "empty.mp4", "latin.mp4", "json.mp4", "list.mp4", "._x.mp4"):
            put(archive, name)
        for name, content in {
            "twin.txt": b"t",
            "empty.txt": b" \n",
            "latin.txt": b"a\x92b",
            "json.json": b"{'a'",
            "list.json": b"[1]",
            "metadata.csv": b"file_name,text\n",
            "nobody.txt": b"n",
            ".hidden.txt": b"",
        }.items():
            put(archive, name, content)
    found, problems = read_source(Source(str(tar)))
    told = "\n".join(problems)
    assert [Path(row.path).name for row in found] == ["twin.mp4"] and len(problems) == 8, told
    assert f"{tar}/alone.mp4: no caption: pack alone.txt or alone.json with it" in told
    assert f"{tar}/twin.png: has the key of twin.mp4" in told and f"{tar}/empty.mp4: the caption is empty" in told
    assert f"{tar}/latin.txt line 1: byte 0x92" in told and f"{tar}/json.json: not JSON" in told
    assert f"{tar}/list.json line 1: not an object" in told and "metadata.csv is not read in a tar" in told
    found, problems = read_source(Source(str(tar), allow_empty_captions=True))
    assert [row.captions for row in found][:2] == [("",), ("",)] and len(problems) == 6
    assert f"{tar}/nobody.txt: a caption, but no clip of its name is with it" in told


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_from_a_tar_equals_training_from_its_files(tiny_ltx, clips, tmp_path, log):
    """Bit for bit, with the same cache entries: they know the content of a clip, not where it lies."""
    tar = pack(clips, tmp_path / "shard.tar")
    made = precompute(tiny_ltx, clips, tmp_path / "cache", stage="all", output_dir=tmp_path / "files", train__steps=3)
    assert encoded(log) == (8, 7)
    other = precompute(tiny_ltx, tar, tmp_path / "cache", stage="all", output_dir=tmp_path / "tar", train__steps=3)
    assert encoded(log) == (0, 0)
    assert {s.content for s in made.plan.samples} == {s.content for s in other.plan.samples}
    assert all(tars.locate(s.path) for s in other.plan.samples)
    apart = precompute(tiny_ltx, tar, tmp_path / "own", stage="all", output_dir=tmp_path / "own_run", train__steps=3)
    assert encoded(log) == (8, 7)
    shutil.rmtree(tmp_path / "own" / "tmp")
    for run in (other, apart):
        runs.assert_same_outcome(tmp_path / "files", run.output_dir)


def test_training_from_a_tar_on_the_fly(tiny_ltx, clips, tmp_path):
    tar = pack(clips, tmp_path / "shard.tar")
    changes = dict(data__precompute="off", data__num_workers=2, train__steps=2)
    runs.run(tiny_ltx, clips, tmp_path / "files", **changes)
    runs.run(tiny_ltx, tar, tmp_path / "tar", **changes)
    runs.assert_same_outcome(tmp_path / "files", tmp_path / "tar")


# -- files that name others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ffconcat version 1.0\nfile real.mp4\n", "#EXTM3U\n#EXTINF:1,\nreal.mp4\n#EXT-X-ENDLIST\n"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_scripts_named_like_clips_open_nothing(unpacked, tmp_path, name, packed):
    """FFmpeg follows a playlist, whatever the file is called: to files beside it, or to the network."""
    shutil.copyfile(unpacked / "000001.mp4", tmp_path / "real.mp4")
    clip = tmp_path / "script.mp4"
    clip.write_text(name)
    if "ffconcat" in name:
        with av.open(f"file:{clip}") as container:
            assert sum(1 for _ in container.decode(video=0)) == 9  # it would
    if packed:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            archive.add(clip, "script.mp4")
        clip = tmp_path / "a.tar" / "script.mp4"
    with pytest.raises(UnreadableClip, match="not media that FFmpeg can read"):
        probe(clip)


def test_a_picture_that_is_a_program_is_not_run(tmp_path):
    """Pillow hands EPS to Ghostscript, whatever the file is called."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(UnreadableClip, match="not a picture that Pillow can read"):
        probe(tmp_path / "a.png")
