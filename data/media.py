"""Opening clips and stills, and turning one decoded picture into upright RGB.

What is true of every picture that leaves this file: turned and mirrored as the display matrix or EXIF says; three
channels, values 0..255 (limited range widened, 10 and 16 bit scaled down); transparent parts on black. HDR is not tone
mapped, and YUV without a colour tag is read as BT.601, as FFmpeg does.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.sidedata.sidedata import Type as SideData
from av.video.reformatter import Interpolation
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from data import tars

VIDEO_SUFFIXES = frozenset(
    {".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"}
    | {".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv"}
)
IMAGE_SUFFIXES = frozenset({".avif", ".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

# The default path of swscale takes the nearest chroma sample and darkens by two levels; these flags do neither.
YUV_TO_RGB = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.BITEXACT
# Containers of VIDEO_SUFFIXES. Of a playlist or a script with such a name FFmpeg would open whatever that names.
CONTAINERS = "mov,mp4,matroska,webm,avi,flv,gif,mpegts,mpeg,mpegvideo,ogg,asf"
CLIPS_ONLY = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file,subfile"}
PICTURES = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # others, such as EPS, run programs
WEBP_TICK = 1e-3  # seconds
SEE_THROUGH = "transparent parts become black"


class UnreadableClip(ValueError):
    """A file that cannot be trained on as it is: `path`, and the `reason` with what to do about it."""

    def __init__(self, path: Path, reason: str):
        super().__init__(path, reason)  # both as args, so that it can be pickled
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# -- opening ------------------------------------------------------------------------------------------------------


def is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def check_head(path: Path) -> None:
    """Name the files that are no media at all, which decoders only call invalid data."""
    if not tars.is_file(path):
        raise UnreadableClip(path, "is a folder" if path.is_dir() else "no such file")
    with tars.open_bytes(path) as file:
        head = file.read(256)
    if not head:
        raise UnreadableClip(path, "empty file (0 bytes): copy or download it again")
    if head.startswith(b"version https://git-lfs"):
        raise UnreadableClip(path, "a Git LFS pointer, not the clip itself: run `git lfs pull`")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise UnreadableClip(path, "not media but a saved web page: download the clip again")


@contextmanager
def open_video(path: Path):
    """The container and its main video stream: the largest, single pictures and cover art last.

    Decoding stays in the calling thread. A codec thread that logs while PyAV closes the codec waits for the interpreter
    lock, which the closing thread holds: a deadlock wherever anyone called av.logging.set_level. One thread also
    fails at the same frame every time. Work on several files at once to use several cores.
    """
    try:
        # a title in another encoding than UTF-8 is no reason to refuse a clip
        container = av.open(tars.url(path), options=CLIPS_ONLY, metadata_errors="replace")
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
        try:
            yield container, stream
        except IndexError as error:  # PyAV, at the first packet of a stream that was not there at the start
            raise UnreadableClip(path, "damaged, or joined of parts with other streams: export it again") from error


def _lacks_moov(path: Path) -> bool:
    """Whether an MP4 or QuickTime file has no moov box, which recorders and downloads write last."""
    with tars.open_bytes(path) as file:
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


# -- pictures -----------------------------------------------------------------------------------------------------


def has_alpha(frame: av.VideoFrame) -> bool:
    return frame.format.has_palette or any(c.is_alpha for c in frame.format.components)


def convert(frame: av.VideoFrame, form: str) -> np.ndarray:
    return frame.reformat(format=form, interpolation=YUV_TO_RGB, threads=1).to_ndarray()


def upright(frame: av.VideoFrame) -> Tensor:
    """Any decoded frame as RGB uint8 [3, h, w], turned as its display matrix says."""
    array = _on_black(convert(frame, "rgba")) if has_alpha(frame) else convert(frame, "rgb24")
    rgb = torch.from_numpy(array).permute(2, 0, 1)
    swap, flip_x, flip_y = orientation(frame)
    if swap:
        rgb = rgb.transpose(1, 2)
    return rgb.flip([axis for axis, flip in ((1, flip_y), (2, flip_x)) if flip])


def orientation(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
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


def display_size(frame: av.VideoFrame, aspect: Fraction) -> tuple[int, int]:
    """Height and width on a screen: square pixels, upright."""
    size = frame.height, max(1, round(frame.width * aspect))
    return size[::-1] if orientation(frame)[0] else size


def _on_black(rgba: np.ndarray) -> np.ndarray:
    """uint8 [h, w, 4] over black: [h, w, 3]."""
    colour, alpha = rgba[..., :3].astype(np.uint16), rgba[..., 3:].astype(np.uint16)
    return ((colour * alpha + 127) // 255).astype(np.uint8)


@contextmanager
def _open_picture(path: Path):
    try:
        with tars.open_bytes(path) as file, Image.open(file, formats=PICTURES) as image:
            yield image
    except UnidentifiedImageError as error:
        raise UnreadableClip(path, "not a picture that Pillow can read") from error
    except (OSError, EOFError, SyntaxError, ValueError, TypeError, RuntimeError, Image.DecompressionBombError) as error:
        raise UnreadableClip(path, f"damaged picture ({error}): export it again") from error


def still(path: Path) -> tuple[Tensor, list[str]]:
    """A still as RGB uint8 [3, h, w], and what was done to it."""
    with _open_picture(path) as image:
        kind, pages = image.format, getattr(image, "n_frames", 1)
        image.load()
        stored_turn = image.getexif().get(0x0112, 1)
        image = ImageOps.exif_transpose(image)
    if pages > 1 and kind != "MPO":  # MPO: a phone's JPEG with a preview behind the picture
        raise UnreadableClip(path, f"an animated or many-paged {kind} ({pages} frames): convert it to mp4, webm or gif")
    notes = [] if stored_turn in (0, 1) else ["turned upright by its EXIF data"]
    if image.mode == "F":
        raise UnreadableClip(path, "float pixels have no stated white: save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise UnreadableClip(path, "32-bit pixels have no stated white: save it with 8 or 16 bits")
        notes.append("16 bits scaled to 8")
        array = np.repeat(((levels * 255 + 32767) // 65535).astype(np.uint8)[..., None], 3, axis=-1)
        return torch.from_numpy(array).permute(2, 0, 1), notes
    rgb, transparent = _eight_bits(image)
    return rgb, notes + [SEE_THROUGH] * transparent


def is_animation(path: Path) -> bool:
    """Whether it is a WebP of several frames: FFmpeg cannot decode those, Pillow can."""
    if path.suffix.lower() != ".webp":
        return False
    with _open_picture(path) as image:
        return image.format == "WEBP" and image.n_frames > 1


def animation(path: Path) -> Iterator[tuple[float, Tensor, bool]]:
    """(when it appears in seconds, RGB uint8 [3, h, w], whether parts are transparent) of the frames of a WebP."""
    with _open_picture(path) as image:
        count, shown = image.n_frames, 0
        for number in range(count):
            image.seek(number)
            image.load()
            yield shown / 1000, *_eight_bits(ImageOps.exif_transpose(image))
            stay = image.info["duration"]
            shown += stay if stay > 10 else 100  # milliseconds; what browsers make of 10 and less


def _eight_bits(image: Image.Image) -> tuple[Tensor, bool]:
    """RGB uint8 [3, h, w] of a picture of 8-bit channels, and whether parts of it are transparent."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = np.asarray(image.convert("RGBA"))
        return torch.from_numpy(_on_black(rgba)).permute(2, 0, 1), bool(rgba[..., 3].min() < 255)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1), False
