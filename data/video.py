"""Clips and stills on disk to upright 8-bit RGB, and back to mp4.

What is true of every picture that leaves this file: turned and mirrored as the display matrix or EXIF says; square
pixels; three channels, values 0..255 (limited range widened, 10 and 16 bit scaled down); transparent parts on black;
scaled by bicubic interpolation with antialiasing until the wanted size is covered, then cropped at the centre.
HDR is not tone mapped, and YUV without a colour tag is read as BT.601, as FFmpeg does.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np
import torch
from av.sidedata.sidedata import Type as SideData
from av.video.reformatter import Interpolation
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from data.memo import HashMemo
from data.memo import content_sha256 as content_sha256  # part of this file's interface

VIDEO_SUFFIXES = frozenset(
    {".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"}
    | {".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv"}
)
IMAGE_SUFFIXES = frozenset({".avif", ".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

# A still has no rate, but models divide by one. Any number above 0 serves: the time scale of a single frame is zero.
STILL_FPS = 24.0
# The default path of swscale takes the nearest chroma sample and darkens by two levels; these flags do neither.
YUV_TO_RGB = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.BITEXACT
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}


class UnreadableClip(ValueError):
    """A file that cannot be trained on as it is: `path`, and the `reason` with what to do about it."""

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)  # both as args, so that it can be pickled
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Probe:
    """What a file holds: `frames` counted by decoding, `height` and `width` upright and in square pixels."""

    frames: int
    height: int
    width: int
    fps: float
    kind: Literal["video", "image"]
    notes: tuple[str, ...] = ()  # what was done to the picture that its owner may not expect


def probe(path: Path, memo: HashMemo | None = None) -> Probe:
    """Decode all of `path` once (converting nothing) and say what it holds. Raises UnreadableClip.

    fps is the stated rate where the timestamps agree with it, else (frames - 1) / (last time - first time).
    """
    path = Path(path)
    _check_head(path)
    if memo is None:
        return _probe(path)
    facts = memo.recall(path, "probe", lambda: asdict(_probe(path)))
    return Probe(**facts | {"notes": tuple(facts["notes"])})


def read_frames(path: Path, start: int, count: int, height: int, width: int) -> Tensor:
    """Frames start .. start + count - 1 as uint8 [3, count, height, width]. Raises UnreadableClip.

    Decoding begins at the key frame before `start` and ends with the last frame asked for.
    """
    path = Path(path)
    if start < 0 or count < 1 or height < 1 or width < 1:
        raise ValueError(f"{path}: cannot read {count} frames of {height}x{width} from frame {start}")
    _check_head(path)
    if _is_image(path):
        if (start, count) != (0, 1):
            raise UnreadableClip(path, f"a still has 1 frame, frames {start}..{start + count - 1} were wanted")
        rgb, _ = _still(path)
        return _cover(rgb, rgb.shape[1:], height, width)[:, None].clone()
    out = torch.empty(3, count, height, width, dtype=torch.uint8)
    for index, (rgb, display) in enumerate(_window(path, start, count)):
        out[:, index] = _cover(rgb, display, height, width)
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


# -- opening ------------------------------------------------------------------------------------------------------


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def _check_head(path: Path) -> None:
    """Name the files that are no media at all, which decoders only call invalid data."""
    if not path.is_file():
        raise UnreadableClip(path, "is a folder" if path.is_dir() else "no such file")
    with open(path, "rb") as file:
        head = file.read(256)
    if not head:
        raise UnreadableClip(path, "empty file (0 bytes): copy or download it again")
    if head.startswith(b"version https://git-lfs"):
        raise UnreadableClip(path, "a Git LFS pointer, not the clip itself: run `git lfs pull`")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise UnreadableClip(path, "not media but a saved web page: download the clip again")


@contextmanager
def _open_video(path: Path):
    """The container and its main video stream: the largest, single pictures and cover art last.

    Decoding stays in the calling thread. A codec thread that logs while PyAV closes the codec waits for the interpreter
    lock, which the closing thread holds: a deadlock wherever anyone called av.logging.set_level. One thread also
    fails at the same frame every time. Work on several files at once to use several cores.
    """
    try:
        container = av.open(f"file:{path}")  # the prefix keeps ':' and '%' in a name from meaning anything
    except av.FFmpegError as error:
        if _lacks_moov(path):
            raise UnreadableClip(path, "cut short, its index (moov) is missing: copy or download it again") from error
        raise UnreadableClip(path, f"not media that FFmpeg can read ({error.strerror})") from error
    with container:
        cover = av.stream.Disposition.attached_pic
        streams = [s for s in container.streams.video if s.codec_context and not s.disposition & cover]
        if not streams:
            raise UnreadableClip(path, "no video stream that can be decoded: remove it, or export it as H.264")
        stream = max(streams, key=lambda s: (s.frames != 1, s.width * s.height))
        stream.thread_count = 1
        yield container, stream


def _lacks_moov(path: Path) -> bool:
    """Whether an MP4 or QuickTime file has no moov box, which recorders and downloads write last."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        at, seen = 0, set()
        while at + 8 <= end:
            file.seek(at)
            size, kind = int.from_bytes(file.read(4), "big"), file.read(4)
            if size == 1:
                size = int.from_bytes(file.read(8), "big")
            seen.add(kind)
            at = at + size if size >= 8 else end
    return bool(seen & {b"ftyp", b"mdat", b"wide"}) and b"moov" not in seen


# -- probing ------------------------------------------------------------------------------------------------------


def _probe(path: Path) -> Probe:
    if _is_image(path):
        rgb, notes = _still(path)
        return Probe(1, *rgb.shape[1:], STILL_FPS, "image", tuple(notes))
    found = _scan(path)
    if found.damage or found.first is None:
        raise UnreadableClip(path, f"{found.damage or 'no frame decodes'}; cut short or corrupt: export it again")
    height, width = _display_size(found.first, found.pixel_aspect)
    return Probe(len(found.times), height, width, found.fps, "video", tuple(_video_notes(found)))


@dataclass
class _Scan:
    times: list[float | None]
    first: av.VideoFrame | None
    pixel_aspect: Fraction
    fps: float
    damage: str | None


def _scan(path: Path) -> _Scan:
    """Decode everything and compare it with what the header promises."""
    times, first, damage = [], None, None
    with _open_video(path) as (container, stream):
        promised, seconds = _promise(container, stream)
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    damage = damage or f"data ends or is damaged at frame {len(times)}"
                for frame in packet.decode():
                    if frame.is_corrupt:
                        damage = damage or f"frame {len(times)} is damaged"
                    first = frame if first is None else first
                    times.append(frame.time)
        except av.FFmpegError as error:
            damage = damage or f"frame {len(times)} does not decode ({error.strerror})"
        fps = _rate(stream, times)
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
    return _Scan(times, first, aspect, fps, damage)


def _promise(container, stream) -> tuple[int, float]:
    """Frames (0: not said) and seconds (0: not said) that the header promises."""
    promised = stream.frames
    if "mov" in container.format.name and promised:
        # An edit list (every trimmed phone clip has one) hides samples that the plain count still includes.
        promised = min(promised, sum(not entry.is_discard for entry in stream.index_entries))
    if "matroska" not in container.format.name:
        return promised, 0.0
    if tag := re.fullmatch(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", "")):
        hours, minutes, rest = map(float, tag.groups())
        return promised, 3600 * hours + 60 * minutes + rest
    alone = len(container.streams) == 1 and container.duration
    return promised, container.duration / av.time_base if alone else 0.0


def _rate(stream, times: list[float | None]) -> float:
    stated = float(stream.average_rate or 0)
    known = [t for t in times if t is not None]
    span = max(known) - min(known) if len(known) == len(times) > 1 else 0.0
    if span and (not stated or abs(span - (len(times) - 1) / stated) > 1.5 * float(stream.time_base)):
        return (len(times) - 1) / span
    return stated or STILL_FPS


def _video_notes(found: _Scan) -> Iterator[str]:
    swap, flip_x, flip_y = _orientation(found.first)
    if swap or flip_x or flip_y:
        mirrored = (swap + flip_x + flip_y) % 2
        yield "mirrored as its display matrix says" if mirrored else "turned upright by its display matrix"
    if found.pixel_aspect != 1:
        yield f"pixels are {found.pixel_aspect.numerator}:{found.pixel_aspect.denominator}, made square"
    if name := HDR_TRANSFERS.get(found.first.color_trc):
        yield f"HDR ({name}), not tone mapped: colours will look flat"
    if found.first.interlaced_frame:
        yield "interlaced, not deinterlaced"
    if _has_alpha(found.first) and _convert(found.first, "rgba")[..., 3].min() < 255:
        yield "transparent parts become black"


# -- decoding -----------------------------------------------------------------------------------------------------


def _window(path: Path, start: int, count: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """(RGB uint8 [3, h, w], display size) of frames start .. start + count - 1."""
    done = 0
    if start:
        for picture in _after_seek(path, start, count):
            yield picture
            done += 1
    if done == count:
        return
    decoded = 0
    with _open_video(path) as (container, stream):
        aspect = stream.sample_aspect_ratio or Fraction(1)
        try:
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise UnreadableClip(path, f"frame {decoded} is damaged: export the clip again")
                decoded += 1
                if decoded > start + done:
                    yield _upright(frame), _display_size(frame, aspect)
                    done += 1
                if done == count:
                    return
        except av.FFmpegError as error:
            raise UnreadableClip(path, f"frame {decoded} does not decode ({error.strerror})") from error
    raise UnreadableClip(path, f"frames {start}..{start + count - 1} were wanted, {decoded} decode")


def _after_seek(path: Path, start: int, count: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """As _window, but from the key frame before `start`; ends early where timestamps do not prove the right frame."""
    with _open_video(path) as (container, stream):
        aspect = stream.sample_aspect_ratio or Fraction(1)
        try:
            packets = container.demux(stream)
            stamps = [(p.pts, p.is_keyframe) for p in packets if p.size and not p.is_discard]
            if start >= len(stamps) or any(pts is None for pts, _ in stamps):
                return
            shown = sorted(pts for pts, _ in stamps)
            keys = [pts for pts, is_key in stamps if is_key and pts <= shown[start]]
            if not keys or len(set(shown)) < len(shown):
                return
            container.seek(max(keys), stream=stream)
            wanted = iter(shown[start : start + count])
            expected = next(wanted)
            for frame in container.decode(stream):
                if frame.pts is not None and frame.pts < expected:
                    continue
                if frame.pts != expected or frame.is_corrupt:
                    return
                yield _upright(frame), _display_size(frame, aspect)
                expected = next(wanted, None)
                if expected is None:
                    return
        except av.FFmpegError:
            return  # decoding from the start will say what is wrong


def _has_alpha(frame: av.VideoFrame) -> bool:
    return frame.format.has_palette or any(c.is_alpha for c in frame.format.components)


def _convert(frame: av.VideoFrame, form: str) -> np.ndarray:
    return frame.reformat(format=form, interpolation=YUV_TO_RGB, threads=1).to_ndarray()


def _upright(frame: av.VideoFrame) -> Tensor:
    """Any decoded frame as RGB uint8 [3, h, w], turned as its display matrix says."""
    array = _on_black(_convert(frame, "rgba")) if _has_alpha(frame) else _convert(frame, "rgb24")
    rgb = torch.from_numpy(array).permute(2, 0, 1)
    swap, flip_x, flip_y = _orientation(frame)
    if swap:
        rgb = rgb.transpose(1, 2)
    return rgb.flip([axis for axis, flip in ((1, flip_y), (2, flip_x)) if flip])


def _orientation(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Swap the axes, then mirror left-right, then top-bottom: the display matrix, to the nearest quarter turn.

    Not `frame.rotation`: it cannot tell a mirrored front-camera clip from one that was turned.
    """
    data = frame.side_data.get(SideData.DISPLAYMATRIX)
    if data is None:
        return False, False, False
    # x' = a x + c y,  y' = b x + d y
    a, b, _, c, d = (int(v) for v in np.frombuffer(bytes(data), "=i4")[:5])
    swap = abs(b) > abs(a)
    return swap, (c if swap else a) < 0, (b if swap else d) < 0


def _display_size(frame: av.VideoFrame, aspect: Fraction) -> tuple[int, int]:
    """Height and width on a screen: square pixels, upright."""
    size = frame.height, max(1, round(frame.width * aspect))
    return size[::-1] if _orientation(frame)[0] else size


def _on_black(rgba: np.ndarray) -> np.ndarray:
    """uint8 [h, w, 4] over black: [h, w, 3]."""
    colour, alpha = rgba[..., :3].astype(np.uint16), rgba[..., 3:].astype(np.uint16)
    return ((colour * alpha + 127) // 255).astype(np.uint8)


def _still(path: Path) -> tuple[Tensor, list[str]]:
    """A still as RGB uint8 [3, h, w], and what was done to it."""
    notes = []
    try:
        with Image.open(path) as image:
            kind, pages = image.format, getattr(image, "n_frames", 1)
            image.load()
            stored_turn = image.getexif().get(0x0112, 1)
            image = ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        raise UnreadableClip(path, "not a picture that Pillow can read") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadableClip(path, f"damaged picture ({error}): export it again") from error
    if pages > 1 and kind != "MPO":  # MPO: a phone's JPEG with a preview behind the picture
        raise UnreadableClip(path, f"an animated or many-paged {kind} ({pages} frames): convert it to mp4, webm or gif")
    if stored_turn not in (0, 1):
        notes.append("turned upright by its EXIF data")
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise UnreadableClip(path, "32-bit pixels have no stated white: save it with 8 or 16 bits")
        notes.append("16 bits scaled to 8")
        array = np.repeat(((levels * 255 + 32767) // 65535).astype(np.uint8)[..., None], 3, axis=-1)
    elif image.mode == "F":
        raise UnreadableClip(path, "float pixels have no stated white: save it with 8 or 16 bits")
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = np.asarray(image.convert("RGBA"))
        if rgba[..., 3].min() < 255:
            notes.append("transparent parts become black")
        array = _on_black(rgba)
    else:
        array = np.array(image.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1), notes


def _cover(rgb: Tensor, display: tuple[int, int], height: int, width: int) -> Tensor:
    """uint8 [3, h, w] shown at `display` size, scaled to cover height x width and cropped: [3, height, width]."""
    scale = max(height / display[0], width / display[1])
    tall, wide = max(height, round(display[0] * scale)), max(width, round(display[1] * scale))
    if rgb.shape[1:] != (tall, wide):
        scaled = interpolate(rgb[None].float(), size=(tall, wide), mode="bicubic", antialias=True)[0]
        rgb = scaled.round_().clamp_(0, 255).to(torch.uint8)
    top, left = (tall - height) // 2, (wide - width) // 2
    return rgb[:, top : top + height, left : left + width]
