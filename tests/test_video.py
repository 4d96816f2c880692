"""Reading clips and stills: true counts, the right frames, upright RGB; and a named refusal of everything else."""

import json
import os
import pickle
from dataclasses import asdict
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cases import box, encode
from data.video import (
    HashMemo,
    Probe,
    UnreadableClip,
    content_sha256,
    probe,
    read_frames,
    to_pixels,
    write_video,
)

# top-left, top-right, bottom-left, bottom-right
CORNERS = np.array([[[200, 40, 40], [40, 180, 40]], [[40, 40, 200], [200, 200, 40]]], np.uint8)


def picture(index: int = 0, high: int = 64, wide: int = 96) -> np.ndarray:
    """Four coloured corners around a grey plane whose level tells the frame: 20 + 4 * index."""
    array = np.full((high, wide, 3), 20 + 4 * index, np.uint8)
    for y, rows in enumerate((slice(0, 16), slice(-16, None))):
        for x, columns in enumerate((slice(0, 16), slice(-16, None))):
            array[rows, columns] = CORNERS[y, x]
    return array


def index_of(frame: torch.Tensor) -> int:
    """The frame number that a decoded [3, h, w] shows."""
    high, wide = frame.shape[1:]
    plane = frame[:, high * 3 // 8 : high * 5 // 8, wide * 3 // 8 : wide * 5 // 8]
    return round((plane.float().mean().item() - 20) / 4)


def clip(path, count=25, high=64, wide=96, **how):
    return encode(path, [picture(i, high, wide) for i in range(count)], **how)


def refusal(path) -> str:
    with pytest.raises(UnreadableClip) as caught:
        probe(path)
    with pytest.raises(UnreadableClip):
        read_frames(path, 0, 25, 64, 96)  # what cannot be probed must not be read either
    assert str(path) in str(caught.value)
    return caught.value.reason


# -- counts and rates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, rate", [("a.mp4", 24), ("UPPER.MP4", 10), ("clip #1 (ü 日本) 5%.mp4", Fraction(30000, 1001))]
)
def test_probe_counts_frames_and_keeps_the_rate(tmp_path, name, rate):
    found = probe(clip(tmp_path / name, 49, fps=rate))
    assert found == Probe(49, 64, 96, float(rate), "video")


def test_webm_has_no_count_in_its_header(tmp_path):
    path = clip(tmp_path / "a.webm", 9, codec="libvpx-vp9")
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert probe(path) == Probe(9, 64, 96, 24.0, "video")


def test_variable_rate_comes_from_the_timestamps(tmp_path):
    times = [33 * i if i < 10 else 330 + 150 * (i - 10) for i in range(20)]
    found = probe(clip(tmp_path / "vfr.mp4", 20, fps=30, times=times))
    assert found.frames == 20
    assert found.fps == pytest.approx(19 / ((times[-1] - times[0]) / 1000))


def test_one_frame_clip_and_gif(tmp_path):
    assert probe(clip(tmp_path / "one.mp4", 1)) == Probe(1, 64, 96, 24.0, "video")
    pictures = [Image.fromarray(picture(3 * i)) for i in range(5)]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=100, loop=0)
    assert probe(tmp_path / "a.gif") == Probe(5, 64, 96, 10.0, "video")
    frames = read_frames(tmp_path / "a.gif", 2, 3, 64, 96)
    assert [index_of(frames[:, i]) for i in range(3)] == [6, 9, 12]


def test_sound_does_not_add_frames(tmp_path):
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as out:
        video, audio = out.add_stream("libx264", rate=24), out.add_stream("aac", rate=16000, layout="mono")
        video.height, video.width, video.pix_fmt = 64, 96, "yuv420p"
        for i in range(25):
            frame = av.VideoFrame.from_ndarray(picture(i), format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
        for start in range(0, 40960, 1024):
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            sound.sample_rate, sound.pts = 16000, start
            out.mux(audio.encode(sound))
        out.mux(audio.encode(None))
    assert probe(path) == Probe(25, 64, 96, 24.0, "video")


def test_trimmed_clip_is_not_called_cut_short(tmp_path):
    """Copying with negative times makes an edit list: the header counts 40 samples, 23 are meant to be seen."""
    source, trimmed = clip(tmp_path / "a.mp4", 40, options={"qp": "8", "g": "12"}), tmp_path / "b.mp4"
    with av.open(str(source)) as old, av.open(str(trimmed), "w", options={"avoid_negative_ts": "disabled"}) as new:
        stream = old.streams.video[0]
        copy, shift = new.add_stream_from_template(stream), int(17 / 24 / stream.time_base)
        for packet in old.demux(stream):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, copy
                new.mux(packet)
    with av.open(str(trimmed)) as container:
        assert container.streams.video[0].frames == 40
    assert probe(trimmed).frames == 23
    for start in (0, 5, 20):
        frames = read_frames(trimmed, start, 3, 64, 96)
        assert [index_of(frames[:, i]) for i in range(3)] == [17 + start + i for i in range(3)]


def test_an_avi_that_dropped_frames_is_not_called_cut_short(tmp_path):
    """Its header counts a frame for each tick: 30, of which 5 were never there. Without its index it is cut short."""
    path = tmp_path / "a.avi"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=24)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for i in range(25):
            frame = av.VideoFrame.from_ndarray(picture(i), format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = i if i < 10 else i + 5, Fraction(1, 24)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    assert (probe(path).frames, probe(path).fps) == (25, pytest.approx(24 / 29 * 24))
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(UnreadableClip, match="header promises 30 frames"):
        probe(path)


def test_the_film_is_read_not_the_small_picture_beside_it(tmp_path):
    path = tmp_path / "thumb.mp4"
    with av.open(str(path), "w") as out:
        small, film = out.add_stream("mjpeg", rate=1), out.add_stream("libx264", rate=24)
        small.height, small.width, small.pix_fmt = 32, 32, "yuvj420p"
        film.height, film.width, film.pix_fmt = 64, 96, "yuv420p"
        for stream, count in ((small, 1), (film, 9)):
            for i in range(count):
                array = picture(i, stream.height, stream.width)
                frame = av.VideoFrame.from_ndarray(array, format="rgb24").reformat(format=stream.pix_fmt)
                frame.pts, frame.time_base = i, Fraction(1, 24)
                out.mux(stream.encode(frame))
            out.mux(stream.encode(None))
    assert probe(path) == Probe(9, 64, 96, 24.0, "video")


# -- the right frames -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix, how",
    [
        ("mp4", dict(options={"qp": "8", "g": "12", "bf": "3", "b-adapt": "0"})),
        ("mp4", dict(options={"qp": "8", "x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0"})),
        ("mp4", dict(options={"qp": "8", "g": "12", "bf": "3"}, times=[40 * i + 7 * (i % 3) for i in range(45)])),
        ("mkv", dict(options={"qp": "8", "g": "12", "bf": "3", "b-adapt": "0"})),
        ("ts", dict(options={"qp": "8", "g": "12", "bf": "3", "b-adapt": "0"})),
        ("avi", dict(codec="mpeg4", options={"b": "8000000", "g": "12", "bf": "2", "sc_threshold": "1000000000"})),
        ("webm", dict(codec="libvpx-vp9", options={"g": "12", "crf": "10", "b:v": "0"})),
    ],
)
def test_any_window_holds_the_frames_asked_for(tmp_path, suffix, how):
    path = clip(tmp_path / f"a.{suffix}", 45, **how)
    everything = read_frames(path, 0, 45, 64, 96)
    assert [index_of(everything[:, i]) for i in range(45)] == list(range(45))
    for start, count in [(1, 3), (11, 2), (12, 1), (13, 9), (23, 14), (36, 9), (44, 1)]:
        assert torch.equal(read_frames(path, start, count, 64, 96), everything[:, start : start + count]), start


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_seeking_leaves_out_the_frames_before(tmp_path, monkeypatch, name):
    import data.video as video

    path = clip(tmp_path / name, 45, options={"qp": "8", "g": "8", "bf": "3", "b-adapt": "0"})
    turned, original = [], video.upright
    monkeypatch.setattr(video, "upright", lambda frame: turned.append(1) or original(frame))
    decoded = []
    monkeypatch.setattr(video, "open_video", _counting(video.open_video, decoded))
    read_frames(path, 40, 3, 64, 96)
    assert len(turned) == 3  # only what is used is converted
    assert 3 <= len(decoded) < 15  # and decoding starts at a key frame near by


def test_where_timestamps_stop_proving_it_decoding_goes_on_from_the_start(tmp_path, monkeypatch):
    import data.video as video

    path, original = clip(tmp_path / "a.mp4", 20), video._after_seek
    monkeypatch.setattr(video, "_after_seek", lambda *window: islice(original(*window), 2))
    frames = read_frames(path, 9, 5, 64, 96)
    assert [index_of(frames[:, i]) for i in range(5)] == [9, 10, 11, 12, 13]


def test_decoding_stays_in_the_calling_thread(tmp_path):
    """More threads can deadlock with PyAV's logging when a window ends before the clip does."""
    import data.video as video

    with video.open_video(clip(tmp_path / "a.mp4", 9)) as (container, stream):
        next(container.decode(stream))
        assert stream.codec_context.thread_count == 1


def _counting(opened, decoded):
    from contextlib import contextmanager

    class Container:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def decode(self, stream):
            for frame in self.inner.decode(stream):
                decoded.append(frame.pts)
                yield frame

    @contextmanager
    def counted(*args):
        with opened(*args) as (container, stream):
            yield Container(container), stream

    return counted


def test_wrong_windows_are_refused(tmp_path):
    path = clip(tmp_path / "a.mp4", 9)
    with pytest.raises(UnreadableClip, match=r"frames 5\.\.13 were wanted, 9 decode"):
        read_frames(path, 5, 9, 64, 96)
    with pytest.raises(ValueError, match="cannot read 0 frames"):
        read_frames(path, 0, 0, 64, 96)


# -- the right pixels -----------------------------------------------------------------------------------------------


def corners_of(frame: torch.Tensor) -> np.ndarray:
    high, wide = frame.shape[1:]
    at = frame[:, [4, high - 5]][:, :, [4, wide - 5]]
    return at.permute(1, 2, 0).numpy()


def assert_corners(frame: torch.Tensor, expected: np.ndarray, within: int = 12):
    assert np.abs(corners_of(frame).astype(int) - expected.astype(int)).max() <= within


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
@pytest.mark.parametrize("mirror", [(False, False), (True, False), (False, True)])
def test_display_matrix_turns_and_mirrors(tmp_path, degrees, mirror):
    path = clip(tmp_path / "a.mp4", 2, turn=(degrees, *mirror))
    expected = np.rot90(CORNERS, degrees // 90)
    expected = expected[:, ::-1] if mirror[0] else expected
    expected = expected[::-1] if mirror[1] else expected
    upright = (96, 64) if degrees in (90, -90) else (64, 96)
    found = probe(path)
    assert (found.height, found.width) == upright
    assert bool(found.notes) == (degrees != 0 or any(mirror))
    assert_corners(read_frames(path, 0, 1, *upright)[:, 0], expected)


def test_exif_turns_stills(tmp_path):
    turn = Image.Exif()
    turn[0x0112] = 6  # stored lying on its left side
    Image.fromarray(picture()).save(tmp_path / "a.jpg", exif=turn, quality=95, subsampling=0)
    found = probe(tmp_path / "a.jpg")
    assert (found.frames, found.height, found.width, found.kind) == (1, 96, 64, "image")
    assert found.fps > 0
    assert_corners(read_frames(tmp_path / "a.jpg", 0, 1, 96, 64)[:, 0], np.rot90(CORNERS, -1))


def test_pixel_aspect_is_made_square(tmp_path):
    path = clip(tmp_path / "a.mp4", 2, wide=48, sample_aspect_ratio=Fraction(2, 1))
    found = probe(path)
    assert (found.height, found.width) == (64, 96) and "2:1" in found.notes[0]
    wide = read_frames(path, 0, 1, 64, 96)[:, 0]
    assert_corners(wide, CORNERS)
    assert (wide[0, 8, :26] > 150).all()  # the red corner of 16 stored pixels is 32 wide


def test_cover_crops_the_centre_and_does_not_stretch(tmp_path):
    bars = np.zeros((64, 128, 3), np.uint8)
    bars[:, 32:96] = 200  # the centre square
    path = encode(tmp_path / "a.mp4", [bars])
    square = read_frames(path, 0, 1, 64, 64)[:, 0]
    assert square.float().mean() > 195
    small = read_frames(path, 0, 1, 32, 64)[:, 0].float().mean((0, 1))
    assert small[:14].max() < 20 and small[18:46].min() > 190 and small[50:].max() < 20
    band = read_frames(encode(tmp_path / "b.mp4", [np.rot90(bars)]), 0, 1, 64, 64)[:, 0]
    assert band.float().mean() > 195
    still = tmp_path / "a.png"
    Image.fromarray(bars).save(still)
    assert (read_frames(still, 0, 1, 64, 64) == 200).all()
    assert torch.equal(read_frames(still, 0, 1, 64, 128)[:, 0], torch.from_numpy(bars).permute(2, 0, 1))


def test_scaling_down_does_not_alias(tmp_path):
    lines = np.zeros((96, 96, 3), np.uint8)
    lines[:, ::2] = 255
    Image.fromarray(lines).save(tmp_path / "a.png")
    small = read_frames(tmp_path / "a.png", 0, 1, 32, 32).float()
    assert (small - 127.5).abs().max() < 30  # nearest or plain bicubic gives black and white stripes


def test_odd_sizes(tmp_path):
    path = clip(tmp_path / "a.mp4", 3, high=53, wide=75, pix="yuv444p")
    assert probe(path) == Probe(3, 53, 75, 24.0, "video")
    assert read_frames(path, 0, 3, 64, 96).shape == (3, 3, 64, 96)


def plane(level: int, *shape) -> np.ndarray:
    return np.full((64, 96, *shape), level, np.uint8)


def test_full_and_limited_range_and_ten_bits(tmp_path):
    ramp = np.concatenate([plane(0, 3)[:, :48], plane(255, 3)[:, :48]], 1)
    how = {
        "limited.mp4": dict(),
        "full.mp4": dict(pix="yuvj420p", color_range=2),
        "ten.mp4": dict(codec="libx265", pix="yuv420p10le", options={"x265-params": "log-level=none", "crf": "4"}),
    }
    for name, kinds in how.items():
        frames = read_frames(encode(tmp_path / name, [ramp] * 9, **kinds), 0, 9, 64, 96)
        assert frames.dtype == torch.uint8 and frames.shape == (3, 9, 64, 96)
        assert frames[..., :40].max() <= 4 and frames[..., 56:].min() >= 251, name


def test_hdr_is_noted(tmp_path):
    path = encode(
        tmp_path / "a.mp4",
        [picture()] * 9,
        codec="libx265",
        pix="yuv420p10le",
        options={"x265-params": "log-level=none"},
        color_trc=16,
        color_primaries=9,
        colorspace=9,
    )
    assert any("HDR (PQ)" in note for note in probe(path).notes)
    assert read_frames(path, 0, 2, 64, 96).max() > 150


def test_grey_and_alpha_clips_have_three_channels(tmp_path):
    grey = encode(tmp_path / "grey.mov", [plane(90)] * 2, codec="png", pix="gray")
    assert (read_frames(grey, 0, 2, 64, 96) == 90).all()
    array = plane(200, 4)
    array[:, :48, 3], array[:, 48:, 3] = 255, 0
    array[:32, 48:, 3] = 128
    alpha = encode(tmp_path / "alpha.mov", [array] * 2, codec="qtrle", pix="argb")
    frames = read_frames(alpha, 0, 2, 64, 96)
    assert (frames[..., :48] == 200).all() and (frames[..., 32:, 48:] == 0).all()
    assert (frames[..., :32, 48:] == 100).all()
    assert probe(alpha).notes == ("transparent parts become black",)


def test_stills_of_every_mode(tmp_path):
    colour = picture()
    grey16 = np.full((64, 96), 25700, np.uint16)  # 100 * 257
    rgba = np.dstack([plane(200, 3), np.full((64, 96), 128, np.uint8)])
    Image.fromarray(grey16).save(tmp_path / "grey16.png")
    Image.fromarray(plane(90)).save(tmp_path / "grey.png")
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    Image.fromarray(colour).quantize(16).save(tmp_path / "palette.png")
    Image.fromarray(colour).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    Image.fromarray(colour).save(tmp_path / "a.webp", lossless=True)

    def read(name: str) -> torch.Tensor:
        assert probe(tmp_path / name).kind == "image"
        frames = read_frames(tmp_path / name, 0, 1, 64, 96)
        assert frames.shape == (3, 1, 64, 96) and frames.dtype == torch.uint8
        return frames[:, 0]

    assert (read("grey16.png") == 100).all() and (read("grey.png") == 90).all() and (read("rgba.png") == 100).all()
    for name in ("palette.png", "cmyk.jpg", "a.webp"):
        assert_corners(read(name), CORNERS)
    with pytest.raises(UnreadableClip, match="1 frame"):
        read_frames(tmp_path / "grey.png", 0, 9, 64, 96)


def test_to_pixels():
    assert torch.equal(to_pixels(torch.tensor([0, 51, 255], dtype=torch.uint8)), torch.tensor([-1.0, -0.6, 1.0]))


# -- refusals -------------------------------------------------------------------------------------------------------


def test_files_that_are_no_clips_say_why(tmp_path):
    def file(name: str, content: bytes):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    whole = clip(tmp_path / "whole.mp4").read_bytes()
    assert "empty file" in refusal(file("zero.mp4", b""))
    assert "web page" in refusal(file("page.mp4", b"\n<!DOCTYPE html><html></html>"))
    assert "LFS pointer" in refusal(file("lfs.mp4", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"))
    assert "not media" in refusal(file("noise.mp4", bytes(range(256)) * 8))
    assert "index (moov) is missing" in refusal(file("cut.mp4", whole[: box(whole, b"mdat")[1] - 50]))
    assert "not a picture" in refusal(file("noise.png", b"\x00" * 99))
    assert "no such file" in refusal(tmp_path / "none.mp4")
    assert "folder" in refusal(tmp_path)
    Image.fromarray(picture()).save(tmp_path / "a.jpg")
    assert "damaged picture" in refusal(file("half.jpg", (tmp_path / "a.jpg").read_bytes()[:500]))


def test_sound_alone_and_moving_png_are_refused(tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as out:
        audio = out.add_stream("aac", rate=16000, layout="mono")
        for start in range(0, 8192, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            out.mux(audio.encode(frame))
        out.mux(audio.encode(None))
    assert "no video stream" in refusal(tmp_path / "sound.mp4")
    pictures = [Image.fromarray(picture(3 * i)) for i in range(5)]
    pictures[0].save(tmp_path / "a.png", save_all=True, append_images=pictures[1:], duration=100)
    assert "animated" in refusal(tmp_path / "a.png") and "5 frames" in refusal(tmp_path / "a.png")


def test_fewer_frames_than_promised(tmp_path):
    options = {"qp": "8", "g": "6", "bf": "0"}
    path = clip(tmp_path / "tail.mp4", 49, options=options, mux={"movflags": "faststart"})
    raw = path.read_bytes()
    start, end = box(raw, b"mdat")
    path.write_bytes(raw[: start + (end - start) * 2 // 5])
    with pytest.raises(UnreadableClip, match=r"header promises 49 frames, \d\d decode"):
        probe(path)

    path = clip(tmp_path / "middle.mp4", 49, options=options)
    raw = bytearray(path.read_bytes())
    start, end = box(bytes(raw), b"mdat")
    low, high = start + (end - start) * 2 // 5, start + (end - start) * 3 // 5
    raw[low:high] = b"\xff" * (high - low)
    path.write_bytes(raw)
    with pytest.raises(UnreadableClip, match=r"header promises 49 frames, (1|2)\d decode \(frame \d+"):
        probe(path)
    with pytest.raises(UnreadableClip, match="frame"):
        read_frames(path, 0, 49, 64, 96)

    path = clip(tmp_path / "tail.webm", 49, codec="libvpx-vp9", options={"g": "6", "crf": "10", "b:v": "0"})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UnreadableClip, match=r"header promises 49 frames, \d\d decode"):
        probe(path)


def test_concealed_damage_is_found_though_all_frames_decode(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (25, 64, 96, 3), dtype=np.uint8)
    path = encode(tmp_path / "a.mp4", list(noise), options={"qp": "20", "g": "12", "bf": "0"})
    with av.open(str(path)) as container:
        packet = [p for p in container.demux(video=0) if p.size][18]
        middle = packet.pos + packet.size // 2
    raw = bytearray(path.read_bytes())
    raw[middle : middle + 40] = b"\xff" * 40
    path.write_bytes(raw)
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 25  # FFmpeg fills the hole and says nothing
    with pytest.raises(UnreadableClip, match=r"promises 25 frames, 25 decode \(frame 18 is damaged"):
        probe(path)
    with pytest.raises(UnreadableClip, match="frame 18 is damaged"):
        read_frames(path, 0, 25, 64, 96)
    with pytest.raises(UnreadableClip, match="frame 18 is damaged"):
        read_frames(path, 15, 9, 64, 96)


def test_half_a_last_frame_is_found(tmp_path):
    path = clip(tmp_path / "a.mov", 9, codec="qtrle", pix="rgb24", mux={"movflags": "faststart"})
    with av.open(str(path)) as container:
        last = [p for p in container.demux(video=0) if p.size][-1]
        end = last.pos + last.size // 2
    path.write_bytes(path.read_bytes()[:end])
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 9  # the lower half is that of the frame before
    with pytest.raises(UnreadableClip, match="data ends or is damaged at frame 8"):
        probe(path)


def test_lost_packets_of_a_stream_without_counts(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (25, 64, 96, 3), dtype=np.uint8)
    path = encode(tmp_path / "a.ts", list(noise), options={"qp": "20", "g": "1"})
    assert probe(path).frames == 25
    raw = path.read_bytes()
    middle = len(raw) // 2 // 188 * 188
    path.write_bytes(raw[:middle] + raw[middle + 3 * 188 :])
    with pytest.raises(UnreadableClip, match=r"\d+ frames decode \(.*damaged"):
        probe(path)


def test_a_stream_that_pyav_does_not_know_of(tmp_path):
    """A damaged transport stream has packets of streams that were not there at first: PyAV looks them up by number."""
    from data.media import open_video

    joined = pytest.raises(UnreadableClip, match="joined of parts with other streams")
    with joined, open_video(clip(tmp_path / "a.ts", 9)) as (container, _):
        container.streams[1]


def test_the_error_survives_a_process_border():
    error = pickle.loads(pickle.dumps(UnreadableClip("a.mp4", "empty file")))
    assert str(error) == "a.mp4: empty file" and error.reason == "empty file"


# -- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high, wide", [(64, 96), (53, 75)])
def test_write_video_round_trip(tmp_path, high, wide):
    frames = np.stack([picture(i, high, wide) for i in range(9)])
    write_video(tmp_path / "new" / "a.mp4", torch.from_numpy(frames), 24000 / 1001)
    found = probe(tmp_path / "new" / "a.mp4")
    assert (found.frames, found.height, found.width) == (9, high + high % 2, wide + wide % 2)
    assert found.fps == pytest.approx(24000 / 1001, rel=1e-6)
    back = read_frames(tmp_path / "new" / "a.mp4", 0, 9, found.height, found.width)
    assert [index_of(back[:, i]) for i in range(9)] == list(range(9))
    assert_corners(back[:, 4], CORNERS)
    assert os.listdir(tmp_path / "new") == ["a.mp4"]


def test_write_video_refuses_other_layouts_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="uint8"):
        write_video(path, np.zeros((3, 9, 64, 96), np.uint8), 24)
    with pytest.raises(ValueError, match="fps"):
        write_video(path, np.zeros((1, 64, 96, 3), np.uint8), 0)
    assert path.read_bytes() == b"old"


# -- memory ---------------------------------------------------------------------------------------------------------


def test_memo_knows_a_file_until_it_changes(tmp_path, monkeypatch):
    path, store = clip(tmp_path / "a.mp4", 3), tmp_path / "memo.json"
    with HashMemo(store) as memo:
        first, found = content_sha256(path, memo), probe(path, memo)
    assert first == content_sha256(path)

    import data.probe

    monkeypatch.setattr(data.probe, "_probe", lambda path: pytest.fail("decoded again"))
    with HashMemo(store) as memo:
        assert probe(path, memo) == found
        assert memo.recall(path, "sha256", lambda: pytest.fail("hashed again")) == first
    monkeypatch.undo()

    clip(path, 5)
    with HashMemo(store) as memo:
        assert content_sha256(path, memo) == content_sha256(path) != first
        assert probe(path, memo).frames == 5


def test_memo_survives_damage_and_sharing(tmp_path):
    path, other, store = tmp_path / "a", tmp_path / "b", tmp_path / "memo.json"
    path.write_bytes(b"one")
    other.write_bytes(b"two")
    for damage in ("", "{", "[]", '{"version": 2, "files": 3}', '{"version": 2, "files": {"a": {}}}', '{"version": 0}'):
        store.write_text(damage)
        with HashMemo(store) as memo:
            content_sha256(path, memo)
        assert json.loads(store.read_text())["files"][str(path)]["sha256"] == content_sha256(path)
    with HashMemo(store) as one, HashMemo(store) as two:
        content_sha256(other, one)
        two.recall(path, "length", lambda: 3)
    facts = json.loads(store.read_text())["files"]
    assert facts[str(other)]["sha256"] == content_sha256(other)
    assert facts[str(path)]["sha256"] == content_sha256(path) and facts[str(path)]["length"] == 3
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "memo.json"]


def test_a_failed_probe_is_not_remembered(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"\x00" * 99)
    with HashMemo(tmp_path / "memo.json") as memo:
        with pytest.raises(UnreadableClip):
            probe(path, memo)
        clip(path, 3)
        assert asdict(probe(path, memo))["frames"] == 3


def test_a_memo_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, caplog):
    def read_only(*arguments, **keywords):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_bytes(b"one")
    memo = HashMemo(tmp_path / "memo.json")
    monkeypatch.setattr(Path, "write_text", read_only)
    assert memo.recall(tmp_path / "a", "length", lambda: 3) == 3
    memo.save()
    assert os.listdir(tmp_path) == ["a"] and "memo.json cannot be written (Permission denied)" in caplog.text
