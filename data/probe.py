"""What a clip or still holds: frames counted by decoding, size, rate, damage; which of them a retimed clip shows."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Literal

import av
import numpy as np

from data import tars
from data.media import (
    SEE_THROUGH,
    WEBP_TICK,
    UnreadableClip,
    animation,
    check_head,
    convert,
    display_size,
    has_alpha,
    is_animation,
    is_image,
    open_video,
    orientation,
    still,
)
from data.memo import HashMemo

# A still has no rate, but models divide by one. Any number above 0 serves: the time scale of a single frame is zero.
STILL_FPS = 24.0
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}


@dataclass(frozen=True)
class Probe:
    """What a file holds: `frames` counted by decoding, `height` and `width` upright and in square pixels."""

    frames: int
    height: int
    width: int
    fps: float
    kind: Literal["video", "image"]
    notes: tuple[str, ...] = ()  # what was done to the picture that its owner may not expect
    steady: bool = True
    """Whether all frames come within half a frame of where a constant rate has them; False: the rate varies."""

    @property
    def duration(self) -> float:
        """Seconds: last time - first time + 1 / fps, the last frame staying as long as a frame does on average."""
        return 0.0 if self.kind == "image" else self.frames / self.fps


def probe(path: Path, memo: HashMemo | None = None) -> Probe:
    """Decode all of `path` once (converting nothing) and say what it holds. Raises UnreadableClip.

    fps is the stated rate where the timestamps agree with it, else (frames - 1) / (last time - first time).
    """
    path = Path(path)
    check_head(path)
    if memo is None:
        return _probe(path)
    facts = memo.recall(path, "probe", lambda: asdict(_probe(path)))
    return Probe(**facts | {"notes": tuple(facts["notes"])})


# -- retiming -----------------------------------------------------------------------------------------------------


def frames_at(found: Probe, fps: float | None) -> int:
    """How many frames `read_frames(..., fps=fps)` can give: those at k / fps before the clip's duration has passed."""
    if fps is None or found.kind == "image":
        return found.frames
    return retimed_count(found.frames, found.fps, fps)


def retimed_count(frames: int, rate: float, fps: float) -> int:
    """As frames_at, of a clip of `frames` frames at `rate`. At its own rate a clip keeps its count."""
    return max(1, ceil(frames * fps / rate - 1e-6))  # 49 / 24 * 24 is not quite 49


def source_frames(
    times: Sequence[float | None], rate: float, tick: float, start: int, count: int, fps: float | None
) -> list[int] | None:
    """Which frames of a clip are frames start .. start + count - 1 of it at `fps`; None where it has not so many.

    times: seconds, one per frame in the order they are shown. Frame k of the retimed clip is the one shown k / fps
    after the first: the last whose time is not later, give or take half a tick, by which a stored time may be rounded
    (not where a tick is about a frame, as in AVI: those times are exact). Frame i counts as shown at i / rate where
    the rate is constant but for that rounding, and where times are missing or run backwards.
    """
    if start + count > (len(times) if fps is None else retimed_count(len(times), rate, fps)):
        return None
    if fps is None:
        return list(range(start, start + count))
    slack = tick / 2 if tick < 0.5 / rate else 0.0
    steady, clock = np.arange(len(times)) / rate, np.array(times, dtype=float)  # None becomes nan
    clock -= clock[0]
    in_order = (np.diff(clock) >= 0).all()  # not so next to a nan
    if not in_order or (abs(clock - steady) <= 2 * slack + 1e-9).all():
        clock, slack = steady, 0.0
    moments = np.arange(start, start + count) / fps
    return (np.searchsorted(clock, moments + slack + 1e-9, side="right") - 1).tolist()


def is_steady(times: Sequence[float | None], rate: float) -> bool:
    """Whether frames come within half a frame of i / rate; times that are missing do not tell."""
    return all(t is None or abs(t - (times[0] or 0.0) - i / rate) < 0.5 / rate for i, t in enumerate(times))


def true_rate(times: Sequence[float | None], stated: float, tick: float) -> float:
    """Frames per second: `stated` (0: not said) where the times agree with it to 1.5 ticks, else their mean rate."""
    known = [t for t in times if t is not None]
    span = max(known) - min(known) if len(known) == len(times) > 1 else 0.0
    if span and (not stated or abs(span - (len(times) - 1) / stated) > 1.5 * tick):
        return (len(times) - 1) / span
    return stated or STILL_FPS


# -- decoding all of it -------------------------------------------------------------------------------------------


def _probe(path: Path) -> Probe:
    if is_animation(path):
        times, notes = [], set()
        for time, rgb, transparent in animation(path):
            times.append(time)
            size = rgb.shape[1:]
            notes |= {SEE_THROUGH} if transparent else set()
        rate = true_rate(times, 0.0, WEBP_TICK)
        return Probe(len(times), *size, rate, "video", tuple(notes), is_steady(times, rate))
    if is_image(path):
        rgb, notes = still(path)
        return Probe(1, *rgb.shape[1:], STILL_FPS, "image", tuple(notes))
    found = scan(path)
    height, width = display_size(found.first, found.pixel_aspect)
    steady = is_steady(found.times, found.fps)
    return Probe(len(found.times), height, width, found.fps, "video", tuple(_video_notes(found)), steady)


@dataclass
class Scan:
    """A clip as decoded: the time of each frame in seconds, and `tick`, the step of its clock."""

    times: list[float | None]
    first: av.VideoFrame
    pixel_aspect: Fraction
    fps: float
    tick: float


def scan(path: Path) -> Scan:
    """Decode everything and compare it with what the header promises. Raises UnreadableClip where they differ."""
    times, first, damage = [], None, None
    with open_video(path) as (container, stream):
        promised, seconds = _promise(container, stream)
        tick = float(stream.time_base)
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    damage = damage or f"data ends or is damaged at frame {len(times)}"
                for frame in packet.decode():
                    if frame.is_corrupt:
                        damage = damage or f"frame {len(times)} is damaged"
                    first = frame if first is None else first
                    times.append(None if frame.pts is None else frame.pts * tick)
        except av.FFmpegError as error:
            damage = damage or f"frame {len(times)} does not decode ({error.strerror})"
        if container.format.name == "gif" and _gif_is_cut(path):
            damage = damage or f"data ends within frame {len(times) - 1}"
        fps = true_rate(times, float(stream.average_rate or 0), tick)
        aspect = stream.sample_aspect_ratio or Fraction(1)
    if not promised and seconds:
        step = 1 / fps
        end = max((t for t in times if t is not None), default=-step) + step
        if seconds - end > max(2 * step, 0.05 * seconds):  # some writers round, or count a pause at the end
            promised = round(seconds * fps)
    if damage or len(times) < promised:
        counts = f"{len(times)} frames decode"
        if promised:
            counts = f"header promises {promised} frames, {len(times)} decode"
        damage = f"{counts} ({damage})" if damage else counts
    if damage or first is None:
        raise UnreadableClip(path, f"{damage or 'no frame decodes'}; cut short or corrupt: export it again")
    return Scan(times, first, aspect, fps, tick)


def _gif_is_cut(path: Path) -> bool:
    """Whether a GIF ends within a block. It states no count, and FFmpeg fills a half frame up with the one before."""
    with tars.open_bytes(path) as file:

        def skip_colours(flags: int) -> None:
            if flags & 0x80:
                file.seek(3 << (flags & 7) + 1, os.SEEK_CUR)

        skip_colours(file.read(13)[10])
        while (kind := file.read(1)) and kind != b";":
            if kind == b"\0":  # padding of some writers
                continue
            if kind == b",":
                descriptor = file.read(9)
                if len(descriptor) < 9:
                    return True
                skip_colours(descriptor[8])
            file.read(1)  # how the picture is coded, or which extension it is
            while (size := file.read(1)) != b"\0":
                if not size:
                    return True
                file.seek(size[0], os.SEEK_CUR)
        return False


def _promise(container, stream) -> tuple[int, float]:
    """Frames (0: not said) and seconds (0: not said) that the header promises."""
    promised = 0 if container.format.name == "gif" else stream.frames  # of a GIF those that FFmpeg has found itself
    if "mov" in container.format.name and promised:
        # An edit list (every trimmed phone clip has one) hides samples that the plain count still includes.
        promised = min(promised, sum(not entry.is_discard for entry in stream.index_entries))
    entries = stream.index_entries
    if container.format.name == "avi" and len(entries) and entries[-1].timestamp + 1 == promised:
        promised = len(entries)  # its header counts the frames that a capture dropped, its whole index does not
    if "matroska" not in container.format.name:
        return promised, 0.0
    if tag := re.fullmatch(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", "")):
        hours, minutes, rest = map(float, tag.groups())
        return promised, 3600 * hours + 60 * minutes + rest
    alone = len(container.streams) == 1 and container.duration
    return promised, container.duration / av.time_base if alone else 0.0


def _video_notes(found: Scan) -> Iterator[str]:
    swap, flip_x, flip_y = orientation(found.first)
    if swap or flip_x or flip_y:
        mirrored = (swap + flip_x + flip_y) % 2
        yield "mirrored as its display matrix says" if mirrored else "turned upright by its display matrix"
    if found.pixel_aspect != 1:
        yield f"pixels are {found.pixel_aspect.numerator}:{found.pixel_aspect.denominator}, made square"
    if name := HDR_TRANSFERS.get(found.first.color_trc):
        yield f"HDR ({name}), not tone mapped: colours will look flat"
    if found.first.interlaced_frame:
        yield "interlaced, not deinterlaced"
    if has_alpha(found.first) and convert(found.first, "rgba")[..., 3].min() < 255:
        yield SEE_THROUGH
