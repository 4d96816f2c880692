"""Files that hang, crash or feed on the decoder, and thousands damaged at random: each is named and no run dies."""

import faulthandler
import io
import json
import multiprocessing
import os
import random
import signal
import tarfile
import time
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

import cases
import runs
from caches import precompute
from data import tars, watch
from data.memo import HashMemo, content_sha256
from data.probe import Probe
from data.sources import Source, read_source
from data.video import UnreadableClip, probe, read_frames
from trainers.plan import PlanError

pytestmark = pytest.mark.usefixtures("libraries")


def look(paths: list, memo: HashMemo, timeout: float = 20.0, workers: int = 3) -> list:
    found = dict(watch.look(paths, memo, timeout, workers))
    assert found.keys() == set(range(len(paths)))
    return [found[at] for at in range(len(paths))]


def hostile(path: Path) -> Probe:
    """A decoder that does what the name of a file says."""
    if path.stem == "hangs":
        time.sleep(600)
    if path.stem == "spins":
        while True:
            pass
    if path.stem == "eats":
        bytearray(watch.MEMORY + (1 << 30))  # more than what is freed meanwhile
    if path.stem == "crashes":
        faulthandler.disable()  # pytest's would print this on purpose
        os.kill(os.getpid(), signal.SIGSEGV)
    if path.stem == "stumbles":
        raise ZeroDivisionError("division by zero")
    return Probe(17, 64, 96, 24.0, "video", (path.stem,))


BAD = {
    "hangs": "took longer than 0.5 s to read: export it again, or raise data.decode_timeout",
    "spins": "took longer than 0.5 s to read",
    "eats": "takes more than 4 GiB to decode",
    "crashes": "ended the process that decodes it (SIGSEGV)",
    "stumbles": "cannot be read (ZeroDivisionError: division by zero)",
}


def files(folder: Path, names) -> list[Path]:
    for name in names:
        (folder / f"{name}.mp4").write_text(name)
    return [folder / f"{name}.mp4" for name in names]


def test_hostile_files_are_named_and_the_others_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "probe", hostile)
    names = [*(f"good{i}" for i in range(20)), *BAD, *(f"fine{i}" for i in range(20))]
    paths = files(tmp_path, names)
    memo, start = HashMemo(tmp_path / "memo.json"), time.monotonic()
    for name, what in zip(names, look(paths, memo, timeout=0.5), strict=True):
        if name in BAD:
            assert isinstance(what, UnreadableClip) and what.path == tmp_path / f"{name}.mp4"
            assert BAD[name] in what.reason
        else:
            assert what == (Probe(17, 64, 96, 24.0, "video", (name,)), content_sha256(tmp_path / f"{name}.mp4"))
    assert time.monotonic() - start < 10
    # What is known is not looked at again, what is bad is.
    monkeypatch.setattr(watch, "probe", lambda path: pytest.fail("looked at again"))
    again = look(paths[:20], memo)
    assert again[3][0].notes == ("good3",)
    assert [isinstance(what, UnreadableClip) for what in look(paths[18:22], memo)] == [False, False, True, True]
    assert memo.known(paths[20], memo.stamp(paths[20])) == {}


def test_no_process_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "probe", hostile)
    paths = files(tmp_path, ["a", "hangs", "b", "c"])
    found = watch.look(paths, HashMemo(tmp_path / "m.json"), 60.0, 2)
    next(found)
    assert len(multiprocessing.active_children()) == 2
    found.close()  # as when Ctrl+C ends the run
    assert multiprocessing.active_children() == []


def test_a_path_that_comes_twice_is_looked_at_once(tmp_path, monkeypatch):
    log = tmp_path / "log"

    def noted(path: Path) -> Probe:
        with open(log, "a") as file:
            file.write(f"{path.name}\n")
        return hostile(path)

    monkeypatch.setattr(watch, "probe", noted)
    a, b = files(tmp_path, ["a", "b"])
    found = look([a, b, a, a, tmp_path / "none.mp4"], HashMemo(tmp_path / "m.json"))
    assert sorted(log.read_text().split()) == ["a.mp4", "b.mp4", "none.mp4"] and found[0] == found[2] == found[3]


def test_what_is_found_is_what_probe_says(clips, tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")
    paths = [*sorted(clips.glob("*.mp4")), tmp_path / "empty.mp4", tmp_path / "gone.mp4", tmp_path]
    found = look(paths, HashMemo(tmp_path / "memo.json"))
    assert found[:7] == [(probe(path), content_sha256(path)) for path in paths[:7]]
    assert [what.reason.split(":")[0] for what in found[7:]] == ["empty file (0 bytes)", "no such file", "is a folder"]


def test_a_run_names_the_file_that_hangs(tiny_ltx, clips, tmp_path, monkeypatch):
    def slow(path: Path) -> Probe:
        if path.name == "wide_2.mp4":
            time.sleep(600)
        return probe(path)

    monkeypatch.setattr(watch, "probe", slow)
    with pytest.raises(PlanError, match=r"(?s)1 problem .*wide_2\.mp4: took longer than 3 s to read") as told:
        precompute(tiny_ltx, clips, tmp_path / "cache", data__decode_timeout=3)
    assert "on_bad" in str(told.value)
    made = precompute(tiny_ltx, clips, tmp_path / "cache", data__decode_timeout=3, data__on_bad="skip", stage="plan")
    assert len(made.plan.samples) == 6 and len(made.plan.bad) == 1


# -- damage at random -------------------------------------------------------------------------------------------------


def mutated(content: bytes, other: bytes, dice: random.Random) -> bytes:
    """`content` with bytes flipped, a part cut out, doubled or overwritten, or spliced with another file's."""
    raw = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        kind, at = dice.randrange(6), dice.randrange(max(1, len(raw)))
        end = min(len(raw), at + dice.choice((1, 4, 64, 1024)))
        if kind == 0 and raw:
            raw[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and raw:
            raw[at] = dice.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            del raw[at:end]
        elif kind == 3:
            raw[at:at] = raw[at:end]
        elif kind == 4:
            raw[at:end] = bytes(dice.randrange(256) for _ in range(end - at))
        else:
            raw[at:] = other[dice.randrange(max(1, len(other))) :]
    return bytes(raw)


def kinds(root: Path) -> list[Path]:
    """Small files of every kind, whole."""
    frames = [cases.draw(i, 32, 48) for i in range(6)]
    videos = [
        cases.encode(root / "a.mp4", frames),
        cases.encode(root / "front.mp4", frames, mux={"movflags": "faststart"}),
        cases.encode(root / "a.mkv", frames),
        cases.encode(root / "a.webm", frames, codec="libvpx-vp9", options={"crf": "40", "b:v": "0"}),
        cases.encode(root / "a.avi", frames, codec="mpeg4"),
        cases.encode(root / "a.mov", frames, codec="png", pix="rgb24"),
        cases.encode(root / "a.ts", frames, codec="mpeg2video"),
    ]
    stills = [Image.fromarray(frame) for frame in frames]
    stills[0].save(root / "a.gif", save_all=True, append_images=stills[1:], duration=100)
    for name in ("a.png", "a.jpg", "a.webp", "a.bmp", "a.tif", "a.avif"):
        stills[0].save(root / name)
    return [*videos, *(root / name for name in ("a.gif", "a.png", "a.jpg", "a.webp", "a.bmp", "a.tif", "a.avif"))]


def read_all(paths: list[str], memo: str) -> list[str]:
    """What becomes of each file: "bad", or "good" if it can be read as what it was found to be."""
    torch.set_num_threads(1)
    results = []
    for path, what in zip(paths, look(paths, HashMemo(memo), 20.0, 2), strict=True):
        if isinstance(what, UnreadableClip):
            assert str(what).startswith(f"{path}: ") and "\n" not in what.reason
            assert not what.reason.startswith(("cannot be read (", "ended the process", "took longer")), what
            results.append("bad")
            continue
        clip, content = what
        assert content == content_sha256(path) and clip.frames > 0 and clip.fps > 0
        if clip.height * clip.width <= 1 << 20:
            frames = read_frames(path, clip.frames - 1, 1, 16, 16)
            assert frames.shape == (3, 1, 16, 16) and frames.dtype == torch.uint8
        results.append("good")
    return results


@pytest.mark.slow
def test_damaged_media_are_read_or_named(tmp_path):
    whole = kinds(tmp_path)
    dice, contents, paths = random.Random(11), [path.read_bytes() for path in whole], []
    for at in range(2000):
        source = whole[at % len(whole)]
        path = tmp_path / f"{at}{source.suffix}"
        path.write_bytes(mutated(source.read_bytes(), dice.choice(contents), dice))
        paths.append(str(path))
    assert read_all([str(path) for path in whole], str(tmp_path / "memo.json")) == ["good"] * len(whole)
    (results,) = runs.forked(read_all, paths, str(tmp_path / "memo.json"), world=1, timeout=300)
    assert len(results) == 2000 and results.count("bad") > 300 and results.count("good") > 100


NAMES = ("a.mp4", "b.mp4", "c.mp4", "d.mp4")


def pairs(path: Path) -> tuple[dict[str, str], list[str]]:
    rows, problems = read_source(Source(str(path)))
    assert all("\n" not in problem for problem in problems)
    assert len({row.path for row in rows}) == len(rows) or path.suffix in (".jsonl", ".csv", ".txt")
    return {f"{Path(row.path).name} {row.where}": row.caption for row in rows}, problems


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sidecar", "metadata.csv", "metadata.jsonl", "prompts.txt", "tar"])
def test_damaged_captions_move_to_no_other_clip(tmp_path, kind):
    """120 times: what is damaged is told or is its own clip's caption; no other caption changes its clip."""
    captions = [f'{word}, "{name}" é' for word, name in zip(("red", "square", "bars", "corners"), NAMES, strict=True)]
    root = tmp_path / "set"
    root.mkdir()
    for name in NAMES:
        (root / name).write_bytes(name.encode())
    rows = dict(zip(NAMES, captions, strict=True))
    if kind == "sidecar":
        for name, caption in rows.items():
            (root / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
        damaged, source = root / "b.txt", root
    elif kind == "metadata.csv":
        doubled = (f'{name},"{caption.replace(chr(34), chr(34) * 2)}"' for name, caption in rows.items())
        (root / kind).write_text("file_name,text\n" + "\n".join(doubled), encoding="utf-8")
        damaged = source = root / kind
    elif kind == "metadata.jsonl":
        text = (json.dumps({"file_name": name, "text": caption}, ensure_ascii=False) for name, caption in rows.items())
        (root / kind).write_text("\n".join(text), encoding="utf-8")
        damaged = source = root / kind
    elif kind == "prompts.txt":
        (root / kind).write_text("\n".join(captions), encoding="utf-8")
        (root / "videos.txt").write_text("\n".join(NAMES))
        damaged, source = root / kind, root / "videos.txt"
    else:
        source = damaged = tmp_path / "set.tar"
        with tarfile.open(source, "w") as archive:
            for name, caption in rows.items():
                for member, content in ((name, name), (f"{Path(name).stem}.txt", caption)):
                    info = tarfile.TarInfo(member)
                    info.size = len(content.encode())
                    archive.addfile(info, io.BytesIO(content.encode()))
    right, problems = pairs(source)
    assert problems == [] and list(right.values()) == captions
    whole, dice, told = damaged.read_bytes(), random.Random(kind), 0
    lines = whole.split(b"\n")
    for _ in range(120):
        if kind == "tar" or kind == "sidecar":
            damaged.write_bytes(mutated(whole, whole, dice))
        else:  # one line of the list, which stays one
            line = mutated(lines[2], whole, dice).replace(b"\n", b" ").replace(b"\r", b" ")
            damaged.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
        found, problems = pairs(source)
        told += bool(problems)
        for where, caption in found.items():
            name = where.split()[0]
            if kind == "tar":  # whatever a name has become: clip and caption are of one pair
                clip = tars.read_bytes(source / name).decode(errors="replace")
                assert caption == rows.get(clip, caption) or caption not in captions, (where, clip, caption)
            elif where in right and not where.endswith(("line 3" if kind != "sidecar" else "b.txt", "line 4")):
                assert caption == right[where]
        missing = [where for where in right.keys() - found.keys() if not where.endswith("line 3")]
        assert not missing or problems, missing  # nothing is lost in silence
    assert told > 10


def test_a_title_in_another_encoding_is_no_reason_to_refuse_a_clip(tmp_path):
    path = tmp_path / "a.avi"
    with av.open(str(path), "w") as out:
        out.metadata["title"] = "Cafx"
        stream = out.add_stream("mpeg4", rate=24)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(cases.draw(number, 32, 48), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    raw = path.read_bytes()
    assert raw.count(b"Cafx") == 1
    path.write_bytes(raw.replace(b"Cafx", b"Caf\xe9"))
    assert probe(path).frames == 3
    assert read_frames(path, 2, 1, 32, 48).shape == (3, 1, 32, 48)
