"""Clips and stills on disk to 8-bit RGB of a wanted size and rate, and back to mp4.

Pictures are upright, of square pixels, and scaled by bicubic interpolation with antialiasing (data/media.py says what
else is done to them). `resize` says how they meet the wanted size: "cover" scales until it is covered and cuts off the
rest, "pad" scales to fit inside and adds black borders, "stretch" scales height and width apart.
"""

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from math import isfinite
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from data import tars
from data.media import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    WEBP_TICK,
    YUV_TO_RGB,
    UnreadableClip,
    animation,
    check_head,
    display_size,
    is_animation,
    is_image,
    open_video,
    still,
    upright,
)
from data.memo import HashMemo, content_sha256
from data.probe import Probe, frames_at, probe, retimed_count, scan, source_frames, true_rate

__all__ = [  # what others import from here, some of it made elsewhere
    "IMAGE_SUFFIXES",
    "VIDEO_SUFFIXES",
    "HashMemo",
    "Probe",
    "UnreadableClip",
    "content_sha256",
    "frames_at",
    "probe",
    "read_frames",
    "to_pixels",
    "write_video",
]

# In these FFmpeg seeks to a time of decoding, in others to a time of showing.
SEEK_BY_DECODING_TIME = {"mpegts", "mpeg"}
RESIZES = ("cover", "pad", "stretch")
Pictures = Iterator[tuple[Tensor, tuple[int, int], int]]  # RGB uint8 [3, h, w], display size, how often it is shown


def read_frames(
    path: Path,
    start: int,
    count: int,
    height: int,
    width: int,
    fps: float | None = None,
    resize: str = "cover",
    crop: tuple[float, float] = (0.5, 0.5),
) -> Tensor:
    """Frames start .. start + count - 1 as uint8 [3, count, height, width]. Raises UnreadableClip.

    fps: retime the clip, `start` and `count` then count retimed frames; frame k is what is on the screen k / fps
    seconds after the first frame, so that speed stays and frames are left out or repeated. None keeps every frame.
    crop: where the window of "cover" lies, (vertical, horizontal) from 0 (top, left) to 1 (bottom, right).

    Decoding begins at the key frame before the window and ends with its last frame.
    """
    path = Path(path)
    if start < 0 or count < 1 or height < 1 or width < 1:
        raise ValueError(f"{path}: cannot read {count} frames of {height}x{width} from frame {start}")
    if fps is not None and not (fps > 0 and isfinite(fps)):
        raise ValueError(f"{path}: fps must be above 0, got {fps}")
    if resize not in RESIZES or not all(0 <= place <= 1 for place in crop):
        raise ValueError(f"{path}: resize {resize!r} is not one of {RESIZES}, or crop {crop} is not within 0 .. 1")
    check_head(path)
    if is_animation(path):
        readers = [_animated]
    elif is_image(path):
        readers = [_still]
    else:
        readers = [_after_seek, _from_start] if start or fps else [_from_start]
    out = torch.empty(3, count, height, width, dtype=torch.uint8)
    for reader in readers:
        done = 0
        for rgb, display, repeats in reader(path, start, count, fps):
            out[:, done : done + repeats] = _fit(rgb, display, height, width, resize, crop)[:, None]
            done += repeats
        if done == count:
            break
    return out


def to_pixels(frames: Tensor) -> Tensor:
    """uint8 0..255, any shape, to float32 in [-1, 1]."""
    return frames.float() / 127.5 - 1


def write_video(path: Path, frames: Tensor | np.ndarray, fps: float) -> None:
    """Write uint8 RGB frames [F, H, W, 3] as H.264 (yuv420p, BT.709) under a temporary name, then rename.

    Odd sizes gain one repeated row or column, because 4:2:0 stores chroma in pairs.
    """
    path, frames = Path(path), np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ValueError(f"{path}: frames must be uint8 [F, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    if not fps > 0:
        raise ValueError(f"{path}: fps must be above 0, got {fps}")
    rate = Fraction(fps).limit_denominator(1001)  # exact for 24000/1001 and its kin
    _, high, wide, _ = frames.shape
    frames = np.pad(frames, ((0, 0), (0, high % 2), (0, wide % 2), (0, 0)), mode="edge")
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{path.suffix}")
    try:
        with av.open(f"file:{temp}", "w") as container:
            stream = container.add_stream("libx264", rate=rate, options={"crf": "17"})
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
            codec = stream.codec_context
            codec.colorspace = codec.color_primaries = codec.color_trc = 1  # all BT.709: players need not guess
            codec.color_range = 1
            for index, array in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
                frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", interpolation=YUV_TO_RGB)
                frame.pts, frame.time_base = index, 1 / rate
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


# -- decoding -----------------------------------------------------------------------------------------------------


def _still(path: Path, start: int, count: int, fps: float | None) -> Pictures:
    if (start, count) != (0, 1):
        raise UnreadableClip(path, f"a still has 1 frame, frames {start}..{start + count - 1} were wanted")
    rgb, _ = still(path)
    yield rgb, rgb.shape[1:], 1


def _animated(path: Path, start: int, count: int, fps: float | None) -> Pictures:
    times = [time for time, _, _ in animation(path)]
    runs = _runs(path, times, true_rate(times, 0.0, WEBP_TICK), WEBP_TICK, start, count, fps)
    for index, (_, rgb, _) in enumerate(animation(path)):
        if index in runs:
            yield rgb, rgb.shape[1:], runs.pop(index)
        if not runs:
            return


def _from_start(path: Path, start: int, count: int, fps: float | None) -> Pictures:
    """All frames up to the last one wanted are decoded; if times are needed, the whole clip is, once more."""
    if fps is None:
        runs = dict.fromkeys(range(start, start + count), 1)
    else:
        found = scan(path)
        runs = _runs(path, found.times, found.fps, found.tick, start, count, fps)
    decoded = 0
    with open_video(path) as (container, stream):
        aspect = stream.sample_aspect_ratio or Fraction(1)
        try:
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise UnreadableClip(path, f"frame {decoded} is damaged: export the clip again")
                if decoded in runs:
                    yield upright(frame), display_size(frame, aspect), runs.pop(decoded)
                decoded += 1
                if not runs:
                    return
        except av.FFmpegError as error:
            raise UnreadableClip(path, f"frame {decoded} does not decode ({error.strerror})") from error
    raise UnreadableClip(path, f"frames {start}..{start + count - 1} were wanted, {decoded} decode")


def _after_seek(path: Path, start: int, count: int, fps: float | None) -> Pictures:
    """As _from_start, but from the key frame before; ends early where timestamps do not prove the right frame.

    They prove it where the packets and the frames that decode have the same times, one by one, from the key frame to
    the last frame wanted.
    """
    stat = tars.stat(path)
    clock = _clock(path, stat.st_size, stat.st_mtime_ns)
    wanted = clock and source_frames(clock.times, clock.rate, clock.tick, start, count, fps)
    if not wanted:
        return
    before = clock.keys[clock.keys <= wanted[0]]
    if not len(before):
        return
    runs, at = _count_runs(wanted), int(before[-1])
    with open_video(path) as (container, stream):
        aspect, key = stream.sample_aspect_ratio or Fraction(1), int(clock.shown[at])
        try:
            container.seek(int(clock.seek[at]), stream=stream)
            for frame in container.decode(stream):
                if frame.pts is not None and frame.pts < key:
                    continue  # leading frames of an open group of pictures
                if at == len(clock.shown) or frame.pts != clock.shown[at] or frame.is_corrupt:
                    return
                if at in runs:
                    yield upright(frame), display_size(frame, aspect), runs.pop(at)
                at += 1
                if not runs:
                    return
        except av.FFmpegError:
            return  # decoding from the start will say what is wrong


@dataclass(frozen=True)
class _Clock:
    """What the packets of a clip say of its frames, in the order they are shown."""

    shown: np.ndarray
    """int64 [n], in ticks; `times` is the same in seconds."""
    seek: np.ndarray
    """What to seek to, for each of the n."""
    keys: np.ndarray
    """Those of the n that decoding can begin at."""
    times: np.ndarray
    rate: float
    tick: float


# The windows of a long film follow one another. An hour of it is 2 MB here, and takes seconds to go through.
@lru_cache(maxsize=8)
def _clock(path: Path, size: int, changed: int) -> _Clock | None:
    """None where packets do not tell the frames: times are missing or equal, or the first packets show nothing.

    The first frame is a key frame, or follows packets that an edit list hides, as in every trimmed clip of a phone.
    """
    with open_video(path) as (container, stream):
        if stream.codec_context.name == "vp8":
            return None  # some of its packets show nothing: alternate reference frames
        early = container.format.name in SEEK_BY_DECODING_TIME
        try:
            packets = (p for p in container.demux(stream) if p.size)
            stamps = [(p.pts, p.dts if early else p.pts, p.is_keyframe, p.is_discard) for p in packets]
        except av.FFmpegError:
            return None
        kept = [stamp[:3] for stamp in stamps if not stamp[3]]
        if not kept or any(None in stamp for stamp in kept):
            return None
        if not stream.codec_context.has_b_frames and kept != sorted(kept):
            return None  # times that run backwards, which only B-frames may in a file
        kept.sort()
        shown, seek, is_key = (np.array(column) for column in zip(*kept, strict=True))
        if (np.diff(shown) == 0).any() or (not is_key[0] and len(kept) == len(stamps)):
            return None
        tick = float(stream.time_base)
        times = shown * tick
        rate = true_rate(times.tolist(), float(stream.average_rate or 0), tick)
        return _Clock(shown, seek, np.flatnonzero(is_key), times, rate, tick)


def _runs(path: Path, times, rate: float, tick: float, start: int, count: int, fps: float | None) -> dict[int, int]:
    wanted = source_frames(times, rate, tick, start, count, fps)
    if wanted is None:
        has, pace = (retimed_count(len(times), rate, fps), f" at {fps:.5g} fps") if fps else (len(times), "")
        raise UnreadableClip(path, f"frames {start}..{start + count - 1}{pace} were wanted, it has {has}")
    return _count_runs(wanted)


def _count_runs(wanted: list[int]) -> dict[int, int]:
    """How often each frame is shown."""
    return {index: len(list(run)) for index, run in groupby(wanted)}


# -- sizing -------------------------------------------------------------------------------------------------------


def _fit(rgb: Tensor, display: tuple[int, int], height: int, width: int, resize: str, crop: tuple) -> Tensor:
    """uint8 [3, h, w] shown at `display` size, brought to height x width: [3, height, width]."""
    if resize == "stretch":
        return _scale(rgb, height, width)
    scales = height / display[0], width / display[1]
    if resize == "pad":
        tall = min(height, max(1, round(display[0] * min(scales))))
        wide = min(width, max(1, round(display[1] * min(scales))))
        top, left = (height - tall) // 2, (width - wide) // 2
        out = torch.zeros(3, height, width, dtype=torch.uint8)
        out[:, top : top + tall, left : left + wide] = _scale(rgb, tall, wide)
        return out
    tall, wide = max(height, round(display[0] * max(scales))), max(width, round(display[1] * max(scales)))
    top, left = int((tall - height) * crop[0]), int((wide - width) * crop[1])
    return _scale(rgb, tall, wide)[:, top : top + height, left : left + width]


def _scale(rgb: Tensor, height: int, width: int) -> Tensor:
    if rgb.shape[1:] == (height, width):
        return rgb
    scaled = interpolate(rgb[None].float(), size=(height, width), mode="bicubic", antialias=True)[0]
    return scaled.round_().clamp_(0, 255).to(torch.uint8)
