"""Files that people really have: each is read right to the frame, or refused by name before a model loads.

Which kind of trouble is tested where; all files are those of tests/cases.py.

D01 unreadable: test_refusals, test_all_that_is_wrong_comes_in_one_report, test_a_bad_clip_in_the_middle
D02 partly readable: test_both_numbers_of_a_clip_cut_short; concealed damage: tests/test_video.py
D03 variable frame rate: test_probe; retimed: tests/test_retime.py test_two_speeds_in_one_clip
D04 turned by metadata: test_turned_upright_before_the_bucket_is_chosen
D05 too short: test_a_short_clip_takes_its_caption_with_it
D06 counts: test_probe, test_exact_counts_reach_the_bucket
D07 retiming: test_own_speed_by_default, test_retiming_is_told, test_too_short_once_it_is_retimed
D09 upper case, D10 hidden files, D22 gif, webp, webm: test_all_that_is_wrong_comes_in_one_report
D11 channels, D13 ranges, HDR: test_three_channels, test_ranges
D17 odd sizes and shapes: test_shapes_and_their_buckets
D18 paths: test_paths, test_a_missing_clip_is_named
D21 nothing left: test_nothing_left_to_train_on
"""

import shutil
from pathlib import Path

import av
import pytest
import torch

import runs
from cases import (
    BUCKETS,
    CAPTIONS,
    NAMES,
    UNICODE,
    UPRIGHT,
    VARIABLE,
    corners_of,
    indices_of,
    make,
    names,
    planned,
    uncaptioned,
)
from data.video import UnreadableClip, probe, read_frames
from trainers.ltx import LTXTrainer
from trainers.plan import PlanError
from trainers.precompute import frames_of

NTSC = 30000 / 1001
GOOD = {  # frames, height, width, frames per second
    "UPPER.MP4": (25, 64, 96, 24),
    UNICODE: (25, 64, 96, 24),
    "alpha.mov": (9, 64, 96, 24),
    "anim.gif": (9, 64, 96, 10),
    "anim.webp": (9, 64, 96, 10),
    "fps10.mp4": (25, 64, 96, 10),
    "frames_24.mp4": (24, 64, 96, 24),
    "full_range.mp4": (9, 64, 96, 24),
    "good_25f.mp4": (25, 64, 96, 24),
    "good_49f.mp4": (49, 64, 96, 24),
    "gray.mov": (9, 64, 96, 24),
    "hdr10.mp4": (9, 64, 96, 24),
    "matroska.mkv": (9, 64, 96, 24),
    "mpeg4.avi": (9, 64, 96, 24),
    "ntsc_2997.mp4": (49, 64, 96, NTSC),
    "odd_75x53.mp4": (25, 53, 75, 24),
    "one_frame.mp4": (1, 64, 96, 24),
    "rot90.mp4": (25, 96, 64, 24),
    "sar_2to1.mp4": (25, 64, 96, 24),
    "short_5f.mp4": (5, 64, 96, 24),
    "tall_32x192.mp4": (25, 192, 32, 24),
    "vfr_30f.mp4": (30, 64, 96, 29000 / VARIABLE[-1]),
    "vp9.webm": (25, 64, 96, 24),
    "with_audio.mp4": (25, 64, 96, 24),
}
REFUSED = {
    "audio_only.mp4": "no video stream that can be decoded: remove it, or export it as H.264",
    "corrupt_mid.mp4": "header promises 49 frames, ",
    "cut.gif": "5 frames decode (data ends within frame 4); cut short or corrupt: export it again",
    "html_page.mp4": "not media but a saved web page: download the clip again",
    "lfs_pointer.mp4": "a Git LFS pointer, not the clip itself: run `git lfs pull`",
    "trunc_no_moov.mp4": "cut short, its index (moov) is missing: copy or download it again",
    "trunc_tail.mp4": "header promises 49 frames, ",
    "zero.mp4": "empty file (0 bytes): copy or download it again",
}


def pairs(trainer) -> dict[str, str]:
    return {Path(sample.path).name: sample.caption for sample in trainer.plan.samples}


def test_the_files_are_the_same_each_time(cases, tmp_path):
    again = make(tmp_path / "again")
    first, second = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (cases, again)
    )
    assert len(first) > 100 and first == second
    assert max(map(len, first.values())) < 60_000


# -- single files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_probe(cases, name):
    frames, height, width, fps = GOOD[name]
    found = probe(cases / "media" / name)
    assert (found.frames, found.height, found.width, found.kind) == (frames, height, width, "video")
    assert found.fps == pytest.approx(fps, rel=1e-9)
    seen = read_frames(cases / "media" / name, 0, frames, height, width)
    if name == "rot90.mp4":
        seen = seen.rot90(-1, (2, 3))  # the bar code lies on its side
    if name != "alpha.mov":  # half of its bars are transparent
        assert indices_of(seen) == list(range(frames))
    for start in (1, frames - 2):
        if 0 <= start < frames and name not in ("rot90.mp4", "alpha.mov"):
            assert indices_of(read_frames(cases / "media" / name, start, 1, height, width)) == [start]


@pytest.mark.parametrize("name", [*REFUSED, "cut.jpg"])
def test_refusals(cases, name):
    path = cases / ("images" if name == "cut.jpg" else "media") / name
    with pytest.raises(UnreadableClip) as error:
        probe(path)
    reason = REFUSED.get(name, "damaged picture (image file is truncated")
    assert str(error.value).startswith(f"{path}: {reason}")
    with pytest.raises(UnreadableClip):
        read_frames(path, 0, 25, 64, 96)


@pytest.mark.parametrize("name", ["trunc_tail.mp4", "corrupt_mid.mp4"])
def test_both_numbers_of_a_clip_cut_short(cases, name):
    """The number is that of frames that really decode, and no frame is read as another one."""
    decoded = 0
    with av.open(str(cases / "media" / name)) as container:
        try:
            for _ in container.decode(video=0):
                decoded += 1
        except av.FFmpegError:
            pass
    with pytest.raises(UnreadableClip, match=rf"promises 49 frames, {decoded} decode \(.*frame \d+.*\); cut short or"):
        probe(cases / "media" / name)
    assert 9 < decoded < 49
    assert indices_of(read_frames(cases / "media" / name, 0, 9, 64, 96)) == list(range(9))
    with pytest.raises(UnreadableClip, match="frame"):
        read_frames(cases / "media" / name, 0, 49, 64, 96)


def test_three_channels(cases):
    gray = read_frames(cases / "media" / "gray.mov", 0, 9, 64, 96)
    assert (gray[0] == gray[1]).all() and (gray[0] == gray[2]).all() and gray.float().std() > 30
    assert indices_of(gray) == list(range(9))
    alpha = read_frames(cases / "media" / "alpha.mov", 0, 1, 64, 96)[:, 0]
    assert corners_of(alpha) == UPRIGHT and (alpha[:, :, 48:52] == 0).all() and (alpha[:, :16, 88:92] == 0).all()
    assert probe(cases / "media" / "alpha.mov").notes == ("transparent parts become black",)
    levels = {}
    for name in ("rgba.png", "gray.png", "gray16.png", "palette.png", "cmyk.jpg"):
        still = cases / "images" / name
        assert probe(still).kind == "image"
        levels[name] = read_frames(still, 0, 1, 64, 96)[:, 0]
        assert levels[name].shape == (3, 64, 96) and levels[name].dtype == torch.uint8
        assert ("????" if "gray" in name else UPRIGHT) == corners_of(levels[name])
    assert torch.equal(levels["gray16.png"], levels["gray.png"])  # scaled, not clipped to white
    assert torch.equal(levels["rgba.png"][:, :, 48:52], torch.zeros(3, 64, 4, dtype=torch.uint8))


def test_ranges(cases):
    plain, full, ten = (
        read_frames(cases / "media" / name, 0, 9, 64, 96).float()
        for name in ("good_25f.mp4", "full_range.mp4", "hdr10.mp4")
    )
    square = (slice(None), slice(None), slice(46, 48), slice(52, 56))
    bars = (slice(None), slice(None), slice(30, 34), slice(2, 8))  # the highest bit, 0 in all of them
    for frames, white in ((plain, 250), (full, 250), (ten, 235)):
        assert frames[square].min() >= white, frames[square].min()
        assert abs(frames[bars].mean() - 16) < 8
    assert probe(cases / "media" / "hdr10.mp4").notes == ("HDR (PQ), not tone mapped: colours will look flat",)
    assert probe(cases / "media" / "full_range.mp4").notes == ()


# -- what the plan makes of them ------------------------------------------------------------------------------------


def test_all_that_is_wrong_comes_in_one_report(tiny_ltx, cases, tmp_path, capsys):
    """One folder with everything in it: hidden files are no clips, the bad ones are named together, none is lost."""
    folder = shutil.copytree(cases / "media", tmp_path / "media")
    shutil.copy(cases / "images" / "cut.jpg", folder)
    reasons = REFUSED | {"cut.jpg": "damaged picture (image file is truncated"}
    with pytest.raises(PlanError) as error:
        planned(tiny_ltx, uncaptioned(folder), tmp_path / "run")
    head, *listed = str(error.value).splitlines()
    assert "9 problems" in head and "data.on_bad" in head
    for name, reason in reasons.items():
        assert len([line for line in listed if f"{folder / name}: {reason}" in line]) == 1, name
    assert len([line for line in listed if str(folder) in line]) == 9

    capsys.readouterr()
    changes = {"data__on_bad": "skip", "data__buckets": [*BUCKETS, "9x64x96"]}
    made = planned(tiny_ltx, uncaptioned(folder), tmp_path / "run", **changes)
    told = capsys.readouterr().out
    short = {"one_frame.mp4": "1 frame", "short_5f.mp4": "5 frames"}
    assert set(names(made.plan.samples)) == set(GOOD) - set(short)
    assert len(made.plan.samples) == len(GOOD) - len(short)
    assert (len(made.plan.bad), len(made.plan.left_out)) == (9, 2)
    assert "left out: 2, cannot be read: 9\n" in told
    for name, reason in (reasons | short).items():
        row = f"{folder / name}: {reason}"
        assert any(found.startswith(row) for found in made.plan.bad + made.plan.left_out) and row in told
    assert "DS_Store" not in told and "._good" not in told
    assert {sample.bucket for sample in made.plan.samples if Path(sample.path).suffix in (".gif", ".mov")} == {
        "9x64x96"
    }


def test_a_bad_clip_in_the_middle(tiny_ltx, cases, tmp_path):
    source = cases / "sets" / "bad_in_middle"
    bad = source / "videos" / "c.mp4"
    with pytest.raises(PlanError) as error:
        planned(tiny_ltx, source, tmp_path / "run")
    assert "1 problem " in str(error.value) and "prompts.txt line 3" in str(error.value)
    assert f"{bad}: not media that FFmpeg can read" in str(error.value) and "on_bad: skip" in str(error.value)
    with pytest.raises(SystemExit, match=r"error: 1 problem .*"):
        LTXTrainer.main(runs.options(tiny_ltx, source, tmp_path / "run", data__buckets=BUCKETS))
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    made = planned(tiny_ltx, source, tmp_path / "run", data__on_bad="skip")
    assert pairs(made) == {name: text for name, text in zip(NAMES, CAPTIONS, strict=True) if name != "c.mp4"}
    (left,) = made.plan.bad
    assert left.startswith(str(bad)) and "prompts.txt line 3" in left and made.plan.left_out == []


def test_turned_upright_before_the_bucket_is_chosen(tiny_ltx, cases, tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    shutil.copy(cases / "media" / "rot90.mp4", folder)
    shutil.copy(cases / "images" / "exif_rot.jpg", folder)
    buckets = [*BUCKETS, "1x64x96", "1x96x64"]
    made = planned(tiny_ltx, uncaptioned(folder), tmp_path / "run", data__buckets=buckets)
    chosen = {Path(sample.path).name: sample.bucket for sample in made.plan.samples}
    assert chosen == {"rot90.mp4": "25x96x64", "exif_rot.jpg": "1x96x64"}
    assert corners_of(read_frames(folder / "rot90.mp4", 3, 1, 96, 64)[:, 0]) == "gyrb"
    assert corners_of(read_frames(folder / "exif_rot.jpg", 0, 1, 96, 64)[:, 0]) == "bryg"
    notes = "\n".join(made.plan.notes)
    assert f"{folder / 'rot90.mp4'}: turned upright by its display matrix" in notes
    assert f"{folder / 'exif_rot.jpg'}: turned upright by its EXIF data" in notes


def test_a_short_clip_takes_its_caption_with_it(tiny_ltx, cases, tmp_path, capsys):
    source = cases / "sets" / "short_in_middle"
    made = planned(tiny_ltx, source, tmp_path / "run")
    assert pairs(made) == {name: text for name, text in zip(NAMES, CAPTIONS, strict=True) if name != "b.mp4"}
    reason = f"{source / 'videos' / 'b.mp4'}: 5 frames, the smallest bucket needs 25"
    assert len(made.plan.left_out) == 1 and made.plan.left_out[0].startswith(reason)
    assert "left out: 1\n" in (told := capsys.readouterr().out) and reason in told


def test_exact_counts_reach_the_bucket(tiny_ltx, cases, tmp_path):
    """49 frames are 49, at 24 and at 30000/1001 per second, and 2.5 s of sound add none."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in ("good_49f.mp4", "ntsc_2997.mp4", "with_audio.mp4"):
        shutil.copy(cases / "media" / name, folder)
    made = planned(tiny_ltx, uncaptioned(folder), tmp_path / "run", data__buckets=["49x64x96", "25x64x96"])
    chosen = {Path(sample.path).name: sample.bucket for sample in made.plan.samples}
    assert chosen == {"good_49f.mp4": "49x64x96", "ntsc_2997.mp4": "49x64x96", "with_audio.mp4": "25x64x96"}


def test_own_speed_by_default(tiny_ltx, cases, tmp_path):
    made = planned(tiny_ltx, uncaptioned(cases / "media" / "fps10.mp4"), tmp_path / "run")
    (sample,) = made.plan.samples
    assert (sample.fps, sample.start, sample.bucket) == (10, 0, "25x64x96")
    assert indices_of(read_frames(sample.path, 0, 25, 64, 96)) == list(range(25))


@pytest.mark.parametrize(
    ("name", "fps", "bucket", "taken", "told"),
    [
        ("good_25f.mp4", 16, "17x64x96", [k * 24 // 16 for k in range(17)], "to 16 fps, from 24\n"),
        (
            "fps10.mp4",
            24,
            "49x64x96",
            [k * 10 // 24 for k in range(49)],
            "to 24 fps, from 10; frames are repeated in 1 of them",
        ),
        ("good_25f.mp4", 24, "25x64x96", list(range(25)), None),
    ],
)
def test_retiming_is_told(tiny_ltx, cases, tmp_path, capsys, name, fps, bucket, taken, told):
    """From what to what and how many, once; the bucket is chosen by the new count, and the frames have the new rate."""
    buckets = ["17x64x96", "25x64x96", "49x64x96"]
    changes = {"data__fps": fps, "data__buckets": buckets}
    made = planned(tiny_ltx, uncaptioned(cases / "media" / name), tmp_path / "run", **changes)
    (sample,) = made.plan.samples
    assert (sample.bucket, sample.fps, sample.retime) == (bucket, fps, fps if told else None)
    assert indices_of(frames_of(sample)) == taken
    out = capsys.readouterr().out
    assert out.count("retimed") == bool(told)
    assert not told or f"data.fps: 1 clip retimed {told}" in out


def test_too_short_once_it_is_retimed(tiny_ltx, cases, tmp_path):
    """25 frames at 24 fps, which are 13 at 12: the message says which count it means."""
    path = cases / "media" / "good_25f.mp4"
    with pytest.raises(PlanError, match=r"good_25f\.mp4: at 12 fps: 13 frames, the smallest bucket needs 25"):
        planned(tiny_ltx, uncaptioned(path), tmp_path / "run", data__fps=12)


def test_shapes_and_their_buckets(tiny_ltx, cases, tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in ("odd_75x53.mp4", "tall_32x192.mp4", "sar_2to1.mp4"):
        shutil.copy(cases / "media" / name, folder)
    made = planned(tiny_ltx, uncaptioned(folder), tmp_path / "run")
    chosen = {Path(sample.path).name: sample.bucket for sample in made.plan.samples}
    assert chosen == {"odd_75x53.mp4": "25x64x96", "tall_32x192.mp4": "25x96x64", "sar_2to1.mp4": "25x64x96"}
    notes = "\n".join(made.plan.notes)
    assert f"{folder / 'tall_32x192.mp4'}: only 25% of the picture fits 25x96x64" in notes
    assert f"{folder / 'sar_2to1.mp4'}: pixels are 2:1, made square" in notes and "odd" not in notes
    assert corners_of(read_frames(folder / "sar_2to1.mp4", 0, 1, 64, 96)[:, 0]) == UPRIGHT
    odd = read_frames(folder / "odd_75x53.mp4", 0, 25, 64, 96)
    assert corners_of(odd[:, 0]) == UPRIGHT and indices_of(odd) == list(range(25))
    tall = read_frames(folder / "tall_32x192.mp4", 0, 25, 96, 64)  # the middle 48 of 192 rows, twice as large
    whole = read_frames(folder / "tall_32x192.mp4", 0, 25, 192, 32)
    assert corners_of(tall[:, 0]) == "????" and indices_of(tall) == list(range(25))
    halved = torch.nn.functional.avg_pool2d(tall.float().transpose(0, 1), 2).transpose(0, 1)
    assert (halved - whole[:, :, 72:120].float()).abs().mean() < 4


def test_paths(tiny_ltx, cases, tmp_path):
    made = planned(tiny_ltx, cases / "sets" / "backslashes", tmp_path / "run")
    assert pairs(made) == dict(zip(NAMES, CAPTIONS, strict=True))
    made = planned(tiny_ltx, f"{cases / 'sets' / 'ok'}/ ", tmp_path / "run")
    assert pairs(made) == dict(zip(NAMES, CAPTIONS, strict=True))
    made = planned(tiny_ltx, uncaptioned(cases / "media" / UNICODE), tmp_path / "run", stage="precompute")
    assert names(made.plan.samples) == [UNICODE] and len(made.encoders.cache.keys()) == 2  # the clip and ""


def test_a_missing_clip_is_named(tiny_ltx, cases, tmp_path):
    source = cases / "sets" / "missing_clip"
    with pytest.raises(PlanError) as error:
        planned(tiny_ltx, source, tmp_path / "run", data__on_bad="skip")  # which is about clips that are there
    tried = source / "videos" / "nope.mp4"
    assert f"{source / 'videos.txt'} line 2: no such file videos/nope.mp4 (tried {tried})" in str(error.value)


def test_nothing_left_to_train_on(tiny_ltx, cases, tmp_path):
    source = cases / "sets" / "all_short"
    words = runs.options(tiny_ltx, source, tmp_path / "run", data__buckets=BUCKETS)
    with pytest.raises(SystemExit) as error:
        LTXTrainer.main(words)
    told = str(error.value)  # a text as exit status: printed, and 1 to the shell
    assert told.startswith("error: data.train: nothing to train on")
    for name in NAMES:
        assert f"{source / 'videos' / name}: 5 frames, the smallest bucket needs 25" in told
    assert not list((tmp_path / "run").rglob("*.safetensors"))
