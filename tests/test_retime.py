"""Retiming by timestamps: which source frames are shown (told by their bar codes), how many, at what cost."""

import ctypes
from bisect import bisect_right
from fractions import Fraction
from itertools import islice
from math import ceil

import av
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import data.video as video
from cases import VARIABLE, clip, draw, indices_of
from data.probe import source_frames
from data.video import Probe, UnreadableClip, frames_at, probe, read_frames

B_FRAMES = {"qp": "12", "g": "12", "bf": "3", "b-adapt": "0", "sc_threshold": "0"}
OPEN = {"qp": "12", "x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0"}
MPEG4 = {"b": "8000000", "g": "12", "bf": "2", "sc_threshold": "1000000000"}
VPX = {"g": "12", "crf": "10", "b:v": "2M"}
JUMPY = [40 * i + 7 * (i % 3) for i in range(45)]
PAUSED = [33 * i + 2000 * (i > 20) for i in range(45)]
KINDS = {  # file name: (how it is made, milliseconds of its frames or frames per second)
    "b.mp4": (dict(options=B_FRAMES), 24),
    "open.mp4": (dict(options=OPEN, fps=Fraction(30000, 1001)), Fraction(30000, 1001)),
    "jumpy.mp4": (dict(options=B_FRAMES, times=JUMPY), JUMPY),
    "paused.mkv": (dict(options=B_FRAMES, times=PAUSED), PAUSED),
    "a.mkv": (dict(options=B_FRAMES), 24),
    "ntsc.mkv": (dict(fps=Fraction(24000, 1001)), Fraction(24000, 1001)),
    "a.ts": (dict(options=B_FRAMES, fps=Fraction(24000, 1001)), Fraction(24000, 1001)),
    "a.avi": (dict(codec="mpeg4", options=MPEG4), 24),
    "vp9.webm": (dict(codec="libvpx-vp9", options=VPX), 24),
    "vp8.webm": (dict(codec="libvpx", options=VPX, fps=30), 30),
    "delta.mov": (dict(codec="qtrle", pix="rgb24", options={}, fps=10), 10),
}


def shown(count: int, clock, fps, tick=Fraction(1, 1000)) -> list[int]:
    """By exact arithmetic: the frames of a clip of `count` frames on the screen at k / fps. Clock: as in KINDS."""
    fps = Fraction(fps)
    if isinstance(clock, list):
        times, step = [Fraction(t, 1000) for t in clock], Fraction(clock[-1] - clock[0], 1000 * (count - 1))
    else:
        times, step, tick = [i / Fraction(clock) for i in range(count)], 1 / Fraction(clock), Fraction(0)
    length = times[-1] - times[0] + step
    return [bisect_right(times, times[0] + k / fps + tick / 2) - 1 for k in range(ceil(length * fps))]


def tick_of(path) -> Fraction:
    if path.suffix == ".webp":
        return Fraction(1, 1000)
    with av.open(str(path)) as container:
        return container.streams.video[0].time_base


def read(path, start, count, fps=None) -> list[int]:
    return indices_of(read_frames(path, start, count, 64, 96, fps=fps))


def assert_retimed(path, count, clock, fps):
    found, expected = probe(path), shown(count, clock, fps, tick_of(path))
    assert found.frames == count
    assert frames_at(found, float(fps)) == len(expected)
    assert abs(len(expected) / fps - found.duration) < 1 / fps + 1e-3  # neither faster nor slower
    assert read(path, 0, len(expected), float(fps)) == expected
    for start in {1, len(expected) // 2, max(0, len(expected) - 3)} & set(range(len(expected))):
        window = expected[start : start + 3]
        assert read(path, start, len(window), float(fps)) == window, start
    with pytest.raises(UnreadableClip, match=rf"fps were wanted, it has {len(expected)}$"):
        read_frames(path, len(expected), 1, 64, 96, fps=float(fps))
    with pytest.raises(UnreadableClip, match=f"it has {len(expected)}$"):
        read_frames(path, 0, len(expected) + 1, 64, 96, fps=float(fps))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The clip of 45 frames called so, of which KINDS says how it is made."""
    root = tmp_path_factory.mktemp("kinds")

    def path(name):
        return root / name if (root / name).exists() else clip(root / name, 45, **KINDS[name][0])

    return path


# -- which frames ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fps", [8, 16, 24, Fraction(60)])
def test_frames_are_those_on_the_screen(made, name, fps):
    assert_retimed(made(name), 45, KINDS[name][1], fps)


@pytest.mark.parametrize("name", KINDS)
def test_at_its_own_rate_a_clip_is_what_it_was(made, name):
    path, clock = made(name), KINDS[name][1]
    found = probe(path)
    if not isinstance(clock, list):
        assert found.fps == pytest.approx(float(clock), rel=1e-6)
        assert torch.equal(read_frames(path, 0, 45, 64, 96, fps=found.fps), read_frames(path, 0, 45, 64, 96))
    assert frames_at(found, found.fps) == frames_at(found, None) == 45


def test_two_speeds_in_one_clip(cases):
    path = cases / "media" / "vfr_30f.mp4"
    assert_retimed(path, 30, VARIABLE, 24)
    assert read(path, 0, 8, 24.0) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert probe(path).duration == pytest.approx((VARIABLE[-1] - VARIABLE[0]) / 1000 * 30 / 29)


def test_rounded_times_of_a_trimmed_clip_keep_every_frame(tmp_path):
    """Milliseconds of frames 2 .. 24 of a clip at 24 fps, counted from the first: 0, 42, 84 for 0, 41.7, 83.3."""
    times = [round(1000 * i / 24) - 83 for i in range(2, 25)]
    path = clip(tmp_path / "a.mkv", 23, times=times)
    assert read(path, 0, 23, 24.0) == list(range(23))
    assert source_frames([t / 1000 for t in times], 24, 1e-3, 0, 23, 24) == list(range(23))


@pytest.mark.parametrize(
    "times", [[None] * 9, [0.0, 0.1, None, *[0.1 * i for i in range(3, 9)]], [0.0, 0.2, 0.1, *[0.1] * 6]]
)
def test_without_usable_times_the_rate_counts(times):
    assert source_frames(times, 10, 1e-3, 0, 18, 20) == [i // 2 for i in range(18)]
    assert source_frames(times, 10, 1e-3, 0, 19, 20) is None


def test_a_clock_that_counts_frames_is_exact():
    """AVI without its frame 3: a time is not rounded by half a tick, which would be half a frame."""
    times = [0.0, 1 / 24, 2 / 24, 4 / 24, 5 / 24]
    assert source_frames(times, 4 / times[-1], 1 / 24, 0, 6, 24) == [0, 1, 2, 2, 3, 4]
    assert source_frames(times, 4 / times[-1], 1 / 24, 0, 8, 48)[5:] == [2, 2, 2]


def test_counts_are_those_of_exact_arithmetic():
    """In floating point 15 / rate * rate is more than 15 for a rate of 30000 / 1001."""
    for count in range(1, 300):
        for rate in (10, Fraction(24000, 1001), 24, Fraction(30000, 1001)):
            for fps in (16, Fraction(24000, 1001), 24, Fraction(30000, 1001)):
                found = Probe(count, 64, 96, float(rate), "video")
                assert frames_at(found, float(fps)) == ceil(count * fps / rate)


def test_a_stream_whose_times_run_backwards(tmp_path):
    """AVI has no times of showing: B-frames in it get those of decoding."""
    path = clip(tmp_path / "a.avi", 45, options=B_FRAMES)
    with av.open(str(path)) as container:
        times = [frame.pts for frame in container.decode(video=0)]
    assert times != sorted(times)
    assert_retimed(path, 45, 24, 10)


def test_two_frames_at_one_time_are_two_frames(tmp_path):
    """At 80 ms frames 2 and 3, both key frames: seeking to that time finds frame 2."""
    path = tmp_path / "a.mkv"
    made = clip(tmp_path / "made.mkv", 9, codec="mjpeg", pix="yuvj420p", options={"q": "2"}, fps=25)
    with av.open(str(made)) as old, av.open(str(path), "w") as new:
        copy = new.add_stream_from_template(old.streams.video[0])
        for i, packet in enumerate(p for p in old.demux(video=0) if p.size):
            packet.pts = packet.dts = 40 * (i - (i > 2))
            packet.stream = copy
            new.mux(packet)
    assert read(path, 0, 9) == list(range(9))
    assert read(path, 3, 1) == [3]
    assert read(path, 1, 3, 25.0) == [1, 3, 4]


def test_a_time_that_runs_back_at_the_end_counts_for_every_window(tmp_path):
    path, made = tmp_path / "a.mkv", clip(tmp_path / "made.mkv", 45, codec="libvpx-vp9", options=VPX, fps=25)
    with av.open(str(made)) as old, av.open(str(path), "w") as new:
        copy = new.add_stream_from_template(old.streams.video[0])
        for i, packet in enumerate(p for p in old.demux(video=0) if p.size):
            packet.pts, packet.dts, packet.stream = 40 * i - 100 * (i == 44), i, copy
            new.mux(packet)
    rate = probe(path).fps
    assert read(path, 0, 45, rate) == list(range(45))
    assert read(path, 41, 2, rate) == [41, 42]


def test_packets_that_show_nothing_are_no_frames(tmp_path):
    """VP8 keeps frames that are only looked back at in packets of their own. Here frame 5 becomes one."""
    path = clip(tmp_path / "a.webm", 45, codec="libvpx", options=VPX)
    with av.open(str(path)) as container:
        hidden = bytes(list(container.demux(video=0))[5])
    raw = path.read_bytes()
    assert raw.count(hidden) == 1 and hidden[0] & 0x10
    path.write_bytes(raw.replace(hidden, bytes([hidden[0] & ~0x10]) + hidden[1:]))
    frames = [i for i in range(45) if i != 5]
    assert probe(path).frames == 44
    assert read(path, 0, 44) == frames
    assert read(path, 26, 6) == frames[26:32]
    times = [round(1000 * i / 24) for i in frames]
    assert read(path, 0, 20, 12.0) == [frames[i] for i in shown(44, times, 12)[:20]]


@pytest.mark.parametrize(
    ("options", "cut", "first"),
    [
        ({"g": "12", "bf": "0"}, 7, 12),
        ({"x264-params": "intra-refresh=1:keyint=12:bframes=0"}, 12, 16),  # whole only some frames after its key frame
    ],
)
def test_a_clip_that_begins_before_it_decodes(tmp_path, options, cut, first):
    """Cut from a broadcast: packets that show nothing yet are not frames 0, 1, 2."""
    whole, path = clip(tmp_path / "whole.ts", 60, options={"qp": "12"} | options), tmp_path / "cut.ts"
    with av.open(str(whole)) as container, av.open(str(path), "w") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for packet in islice((p for p in container.demux(stream) if p.size), cut, None):
            packet.stream = copy
            out.mux(packet)
    count = 60 - first
    assert probe(path).frames == count
    assert read(path, 0, count) == list(range(first, 60))
    assert read(path, 24, 5) == list(range(first + 24, first + 29))
    assert read(path, 5, 5, 12.0) == [first + 10 + 2 * k for k in range(5)]


# -- animations and stills ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_animations_have_their_own_times(tmp_path, name):
    stays = [100] * 8 + [40] * 8
    pictures = [Image.fromarray(draw(i)) for i in range(16)]
    pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:], duration=stays, loop=0, quality=95)
    times = [sum(stays[:i]) for i in range(16)]
    found = probe(tmp_path / name)
    assert found == Probe(16, 64, 96, pytest.approx(15000 / times[-1]), "video", steady=False)
    assert read(tmp_path / name, 0, 16) == list(range(16))
    assert read(tmp_path / name, 9, 4) == [9, 10, 11, 12]
    assert_retimed(tmp_path / name, 16, times, 24)
    frame = read_frames(tmp_path / name, 9, 1, 64, 96)[:, 0]
    assert (frame.int() - torch.from_numpy(draw(9)).permute(2, 0, 1)).abs().float().mean() < 8
    with pytest.raises(UnreadableClip, match=r"frames 10\.\.16 were wanted, (it has 16|16 decode)"):
        read_frames(tmp_path / name, 10, 7, 64, 96)


def test_webp_frames_without_a_stay_are_shown_for_a_tenth_of_a_second(tmp_path):
    pictures = [Image.fromarray(draw(i)) for i in range(5)]
    pictures[0].save(tmp_path / "a.webp", save_all=True, append_images=pictures[1:], duration=0)
    assert probe(tmp_path / "a.webp").fps == pytest.approx(10)


def test_a_webp_of_one_picture_is_a_still_and_a_broken_one_is_refused(tmp_path):
    pictures = [Image.fromarray(draw(i)) for i in range(5)]
    pictures[0].save(tmp_path / "still.webp", lossless=True)
    assert probe(tmp_path / "still.webp") == Probe(1, 64, 96, 24.0, "image")
    pictures[0].save(tmp_path / "a.webp", save_all=True, append_images=pictures[1:], duration=100)
    raw = (tmp_path / "a.webp").read_bytes()
    (tmp_path / "a.webp").write_bytes(raw[: len(raw) // 2])
    for use in (lambda path: probe(path), lambda path: read_frames(path, 0, 1, 64, 96)):
        with pytest.raises(UnreadableClip, match="damaged picture"):
            use(tmp_path / "a.webp")


def test_transparent_parts_of_a_webp_become_black(tmp_path):
    from cases import striped

    pictures = [Image.fromarray(striped(draw(i))) for i in range(3)]
    pictures[0].save(tmp_path / "a.webp", save_all=True, append_images=pictures[1:], duration=100, lossless=True)
    assert probe(tmp_path / "a.webp").notes == ("transparent parts become black",)
    frame = read_frames(tmp_path / "a.webp", 1, 1, 64, 96)[:, 0]
    assert (frame[:, :, 48:52] == 0).all() and (frame[:, 20:24, 52:56] > 0).any()


def test_stills_have_one_frame_at_any_rate(tmp_path):
    Image.fromarray(draw(3)).save(tmp_path / "a.png")
    found = probe(tmp_path / "a.png")
    assert found.duration == 0 and frames_at(found, 60) == frames_at(found, None) == 1
    assert read(tmp_path / "a.png", 0, 1, 60.0) == [3]
    with pytest.raises(UnreadableClip, match="1 frame"):
        read_frames(tmp_path / "a.png", 0, 2, 64, 96, fps=60)


@pytest.mark.parametrize("fps", [0, -24, float("nan"), float("inf")])
def test_rates_that_are_none(made, fps):
    with pytest.raises(ValueError, match="fps must be above 0"):
        read_frames(made("b.mp4"), 0, 1, 64, 96, fps=fps)


# -- any clip, any rate ---------------------------------------------------------------------------------------------

RATES = st.sampled_from([5, 8, 10, 12, 15, 16, Fraction(24000, 1001), 24, 25, Fraction(30000, 1001), 30, 48, 60])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(frames=st.integers(1, 30), rate=RATES, fps=RATES, data=st.data())
def test_any_window_of_any_clip_at_any_rate(tmp_path_factory, frames, rate, fps, data):
    path = clip(tmp_path_factory.mktemp("any") / "a.mp4", frames, high=32, wide=64, fps=rate, options=B_FRAMES)
    expected = shown(frames, rate, fps)
    assert frames_at(probe(path), float(fps)) == len(expected)
    start = data.draw(st.integers(0, len(expected) - 1))
    count = data.draw(st.integers(1, len(expected) - start))
    taken = indices_of(read_frames(path, start, count, 32, 64, fps=float(fps)))
    assert taken == expected[start : start + count]
    with pytest.raises(UnreadableClip):
        read_frames(path, start, len(expected) - start + 1, 32, 64, fps=float(fps))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.integers(1, 400), min_size=2, max_size=60),
    first=st.integers(0, 5000),
    fps=RATES,
)
def test_any_times(steps, first, fps):
    times = [first + sum(steps[:i]) for i in range(len(steps))]
    count, span = len(times), times[-1] - times[0]
    if max(abs(1000 * span * i - 1000 * (count - 1) * (t - first)) for i, t in enumerate(times)) <= 1000 * (count - 1):
        return  # constant but for rounding
    expected = shown(count, times, fps)
    rate = (count - 1) * 1000 / span
    seconds = [t / 1000 for t in times]
    assert source_frames(seconds, rate, 1e-3, 0, len(expected), float(fps)) == expected
    assert source_frames(seconds, rate, 1e-3, 0, len(expected) + 1, float(fps)) is None
    assert expected == sorted(expected) and expected[0] == 0
    assert source_frames(seconds, rate, 1e-3, 1, len(expected) - 1, float(fps)) in (expected[1:], [])


# -- what it costs --------------------------------------------------------------------------------------------------


def watched(monkeypatch, look) -> list:
    """What `look()` gives at every frame that is decoded."""
    from contextlib import contextmanager

    class Container:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def decode(self, stream):
            for frame in self.inner.decode(stream):
                seen.append(look())
                yield frame

    seen, opened = [], video.open_video

    @contextmanager
    def open_video(*args):
        with opened(*args) as (container, stream):
            yield Container(container), stream

    monkeypatch.setattr(video, "open_video", open_video)
    return seen


def test_only_the_frames_needed_are_decoded_and_converted(made, monkeypatch):
    decoded, converted, original = watched(monkeypatch, lambda: 1), [], video.upright
    monkeypatch.setattr(video, "upright", lambda frame: converted.append(1) or original(frame))
    assert read(made("b.mp4"), 19, 3, 12.0) == [38, 40, 42]
    assert len(converted) == 3
    assert len(decoded) == 7  # from frame 36, a key frame
    del decoded[:], converted[:]
    assert read(made("b.mp4"), 50, 9, 48.0) == [25, 25, 26, 26, 27, 27, 28, 28, 29]
    assert len(converted) == 5  # a repeated frame is converted once
    assert len(decoded) == 6  # from frame 24


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("vp8.webm", "delta.mov")])
def test_no_kind_of_file_is_decoded_from_its_start(made, monkeypatch, name):
    decoded = watched(monkeypatch, lambda: 1)
    assert read(made(name), 40, 2) == [40, 41]
    assert len(decoded) < 24


def test_a_trimmed_clip_is_not_decoded_from_its_start(made, tmp_path, monkeypatch):
    """Frames 0 .. 4 are in the file, and hidden by its edit list; frame 0 is the key frame of 5 .. 11."""
    path = tmp_path / "trimmed.mp4"
    with av.open(str(made("b.mp4"))) as old, av.open(str(path), "w", options={"avoid_negative_ts": "disabled"}) as new:
        stream = old.streams.video[0]
        copy, shift = new.add_stream_from_template(stream), int(5 / 24 / stream.time_base)
        for packet in (p for p in old.demux(stream) if p.dts is not None):
            packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, copy
            new.mux(packet)
    assert probe(path).frames == 40
    decoded = watched(monkeypatch, lambda: 1)
    assert read(path, 33, 3) == [38, 39, 40]
    assert len(decoded) == 5  # from frame 36
    assert read(path, 2, 3) == [7, 8, 9]
    assert read(path, 1, 3, 12.0) == [7, 9, 11]


def test_the_packets_of_a_clip_are_gone_through_once(made, monkeypatch):
    video._clock.cache_clear()
    for start in (10, 20, 30):
        read_frames(made("b.mp4"), start, 2, 64, 96)
    assert video._clock.cache_info().misses == 1


def resident() -> float:
    """MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def test_memory_stays_flat_over_a_long_film(tmp_path, monkeypatch):
    """3000 frames of 128x192 are 211 MiB as RGB and 105 MiB as decoded; one window of it holds 17 at a time."""
    frames = [draw(i, 128, 192) for i in range(50)]
    from cases import encode

    path = encode(tmp_path / "film.mp4", frames * 60, options={"qp": "30", "preset": "ultrafast", "g": "250"})
    read_frames(path, 0, 2, 128, 192)
    levels = watched(monkeypatch, resident)
    ctypes.CDLL(None).malloc_trim(0)  # what encoding left behind would hide what reading takes
    before = resident()
    assert probe(path).frames == 3000
    assert resident() - before < 20
    assert indices_of(read_frames(path, 1450, 17, 128, 192, fps=12)) == [(2900 + 2 * k) % 50 for k in range(17)]
    assert len(levels) < 250
    monkeypatch.setattr(video, "_after_seek", lambda *window: iter(()))  # the worst case: all of it is decoded
    assert read_frames(path, 2980, 17, 128, 192).shape[1] == 17
    assert len(levels) > 2997
    assert max(levels) - before < 40
