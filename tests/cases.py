"""Troublesome clips, stills, captions and data sets of the kinds that people have, each of a few kB, made by `make`.

Every picture shows four coloured corners, which tell how it is turned and whether channels are swapped (`corners_of`),
a white square, and across its middle the bar code of its frame number, which tells which frames were taken
(`index_of`). `hue` tells clips apart. The same bytes come out each time.
"""

import csv
import io
import json
import shutil
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

import runs

CORNERS = {"r": (220, 30, 30), "g": (30, 200, 30), "b": (30, 30, 220), "y": (220, 220, 30)}
UPRIGHT = "rgby"  # top left, top right, bottom left, bottom right
NAMES = ["a.mp4", "b.mp4", "c.mp4", "d.mp4"]
CAPTIONS = ["red corner, white square", "the square slides", "bars in the middle row", "four coloured corners"]
CSV_CAPTIONS = ["red, green, and blue corners", 'a sign that says "STOP", twice', "plain", "semi;colon\tand tab"]
STILLS_AND_CLIPS = {
    "a.mp4": "moving",
    "still_0.png": "still zero",
    "b.mp4": "moving too",
    "still_1.png": "still one",
}
UNICODE = "clip with space #1 (ü 日本) 5%.mp4"
BUCKETS = ["25x64x96", "25x96x64"]
X264 = {"qp": "12", "preset": "veryfast"}
NO_B_FRAMES = X264 | {"g": "6", "bf": "0"}
VARIABLE = [33 * i if i < 15 else 462 + 150 * (i - 14) for i in range(30)]
"""Milliseconds of the 30 frames of vfr_30f.mp4: 15 at 30 frames per second, then 15 at 6.7."""


# -- what is seen ---------------------------------------------------------------------------------------------------


def draw(index: int, high: int = 64, wide: int = 96, hue: float = 0.0) -> np.ndarray:
    """Frame `index` (below 256) as uint8 RGB [high, wide, 3]."""
    y, x = np.mgrid[0:high, 0:wide]
    waves = [60 + 60 * np.sin(hue + x / wide * 3), 80 + 50 * np.cos(hue + y / high * 3), 90 + 40 * np.sin(2 * hue + x)]
    array = np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)
    side = max(4, min(high, wide) // 5)
    array[high * 11 // 16 :, wide // 2 :][: side // 2, :side] = 255
    array[:side, :side], array[:side, -side:] = CORNERS["r"], CORNERS["g"]
    array[-side:, :side], array[-side:, -side:] = CORNERS["b"], CORNERS["y"]
    half, bar = max(2, high // 16), wide // 8
    for bit in range(8):
        array[high // 2 - half : high // 2 + half, bit * bar : (bit + 1) * bar] = 235 if index >> 7 - bit & 1 else 16
    return array


def index_of(frame: torch.Tensor) -> int:
    """The frame number that an uncropped uint8 [3, h, w] shows."""
    high, wide = frame.shape[1:]
    row = frame[:, high // 2 - 1 : high // 2 + 1].float().mean((0, 1))
    bars = [row[int(wide / 8 * (bit + 0.3)) : int(wide / 8 * (bit + 0.7)) + 1].mean() > 125 for bit in range(8)]
    return sum(int(bar) << 7 - bit for bit, bar in enumerate(bars))


def indices_of(frames: torch.Tensor) -> list[int]:
    """The frame numbers that uint8 [3, F, h, w] shows."""
    return [index_of(frame) for frame in frames.unbind(1)]


def corners_of(frame: torch.Tensor) -> str:
    """The colours of the corners of [3, h, w], top left, top right, bottom left, bottom right; ? for any other."""
    found = ""
    for pixel in frame[:, [3, -4]][:, :, [3, -4]].flatten(1).T.int():
        near = [name for name, colour in CORNERS.items() if (pixel - torch.tensor(colour)).abs().max() <= 30]
        found += near[0] if near else "?"
    return found


# -- writing --------------------------------------------------------------------------------------------------------


def encode(path: Path, frames: list[np.ndarray], codec="libx264", pix="yuv420p", fps=24, options=None, **more) -> Path:
    """Writes arrays [h, w], [h, w, 3] or [h, w, 4]. `more`: `times` of the frames in milliseconds, `turn`: (degrees,
    mirrored, upside down), seconds of `sound`, options `mux` of the container, and fields of the codec."""
    times, turn, sound, mux = (more.pop(name, None) for name in ("times", "turn", "sound", "mux"))
    path.parent.mkdir(parents=True, exist_ok=True)
    options = (X264 if codec == "libx264" else {}) if options is None else options
    with av.open(f"file:{path}", "w", options={"fflags": "+bitexact"} | (mux or {})) as out:
        stream = out.add_stream(codec, rate=Fraction(fps), options=options)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], pix
        stream.codec_context.thread_count = 1  # the same bytes every time
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in more.items():
            setattr(stream.codec_context, name, value)
        if turn:
            stream.set_display_rotation(*turn)
        audio = out.add_stream("aac", rate=16000, layout="mono") if sound else None
        for i, array in enumerate(frames):
            kind = {1: "gray", 3: "rgb24", 4: "rgba"}[1 if array.ndim == 2 else array.shape[2]]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format=kind)
            frame = frame.reformat(format=pix, dst_color_range="JPEG" if more.get("color_range") == 2 else None)
            frame.pts, frame.time_base = (times[i], Fraction(1, 1000)) if times else (i, 1 / Fraction(fps))
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if audio:
            hum(out, audio, sound)
    return path


def hum(out, audio, seconds: float) -> None:
    for start in range(0, int(16000 * seconds), 1024):
        wave = np.sin(np.arange(start, start + 1024) / 8).astype(np.float32)[None] / 5
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, start
        out.mux(audio.encode(frame))
    out.mux(audio.encode(None))


def clip(path: Path, count: int = 25, high: int = 64, wide: int = 96, hue: float = 0.0, **how) -> Path:
    return encode(path, [draw(i, high, wide, hue) for i in range(count)], **how)


def striped(array: np.ndarray) -> np.ndarray:
    """With alpha: of the right half, every other four columns are transparent."""
    _, x = np.mgrid[0 : array.shape[0], 0 : array.shape[1]]
    return np.dstack([array, np.where((x >= array.shape[1] // 2) & (x % 8 < 4), 0, 255).astype(np.uint8)])


def box(raw: bytes, name: bytes) -> tuple[int, int]:
    """Start of the content and end of a top-level MP4 box."""
    at = 0
    while raw[at + 4 : at + 8] != name:
        at += int.from_bytes(raw[at : at + 4], "big")
    return at + 8, at + int.from_bytes(raw[at : at + 4], "big")


# -- the cases ------------------------------------------------------------------------------------------------------


def make(root: Path) -> Path:
    media(root / "media")
    images(root / "images")
    sets(root / "sets")
    return root


def media(root: Path) -> None:
    """Clips that can be trained on, and files that only look so."""
    good = clip(root / "good_25f.mp4").read_bytes()
    clip(root / "good_49f.mp4", 49, hue=0.7)
    clip(root / "short_5f.mp4", 5)
    clip(root / "one_frame.mp4", 1)
    clip(root / "frames_24.mp4", 24)
    clip(root / "vfr_30f.mp4", 30, fps=30, times=VARIABLE)
    clip(root / "rot90.mp4", turn=(90,))
    clip(root / "odd_75x53.mp4", high=53, wide=75, pix="yuv444p")
    clip(root / "tall_32x192.mp4", high=192, wide=32)
    clip(root / "sar_2to1.mp4", wide=48, sample_aspect_ratio=Fraction(2, 1))
    clip(root / "UPPER.MP4")
    clip(root / "fps10.mp4", fps=10)
    clip(root / "ntsc_2997.mp4", 49, fps=Fraction(30000, 1001))
    clip(root / "with_audio.mp4", sound=2.5)
    clip(root / UNICODE)
    clip(root / "vp9.webm", codec="libvpx-vp9", options={"crf": "20", "b:v": "0"})
    clip(root / "mpeg4.avi", 9, codec="mpeg4", options={"b": "8000000"})
    clip(root / "matroska.mkv", 9)
    encode(root / "gray.mov", [draw(i)[..., 0] for i in range(9)], codec="png", pix="gray")
    encode(root / "alpha.mov", [striped(draw(i)) for i in range(9)], codec="qtrle", pix="argb")
    hdr = {"color_primaries": 9, "color_trc": 16, "colorspace": 9}
    x265 = {"x265-params": "log-level=none:pools=none:frame-threads=1", "crf": "20"}
    clip(root / "hdr10.mp4", 9, codec="libx265", pix="yuv420p10le", options=x265, **hdr)
    clip(root / "full_range.mp4", 9, pix="yuvj420p", color_range=2)
    pictures = [Image.fromarray(draw(i)) for i in range(9)]
    for name in ("anim.gif", "anim.webp"):
        pictures[0].save(root / name, save_all=True, append_images=pictures[1:], duration=100, loop=0)
    raw = (root / "anim.gif").read_bytes()
    (root / "cut.gif").write_bytes(raw[: len(raw) // 2])

    (root / "trunc_no_moov.mp4").write_bytes(good[: box(good, b"mdat")[1] - 200])
    raw = clip(root / "trunc_tail.mp4", 49, options=NO_B_FRAMES, mux={"movflags": "faststart"}).read_bytes()
    start, end = box(raw, b"mdat")
    (root / "trunc_tail.mp4").write_bytes(raw[: start + (end - start) * 2 // 5])
    raw = bytearray(clip(root / "corrupt_mid.mp4", 49, options=NO_B_FRAMES).read_bytes())
    start, end = box(bytes(raw), b"mdat")
    low, high = start + (end - start) * 2 // 5, start + (end - start) * 3 // 5
    raw[low:high] = b"\xff" * (high - low)
    (root / "corrupt_mid.mp4").write_bytes(raw)
    (root / "zero.mp4").write_bytes(b"")
    (root / "html_page.mp4").write_bytes(b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>\n")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
    (root / "lfs_pointer.mp4").write_bytes(pointer)
    with av.open(str(root / "audio_only.mp4"), "w") as out:
        hum(out, out.add_stream("aac", rate=16000, layout="mono"), 1.0)
    (root / "._good_25f.mp4").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + b"\x00" * 100)
    (root / ".DS_Store").write_bytes(b"\x00\x00\x00\x01Bud1" + b"\x00" * 60)


def images(root: Path) -> None:
    root.mkdir()
    picture = Image.fromarray(draw(3))
    Image.fromarray(striped(draw(3))).save(root / "rgba.png")
    picture.convert("L").save(root / "gray.png")
    Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257).save(root / "gray16.png")
    picture.quantize(64).save(root / "palette.png")
    picture.convert("CMYK").save(root / "cmyk.jpg", quality=95)
    turn = Image.Exif()
    turn[0x0112] = 6  # stored lying on its left side
    picture.save(root / "exif_rot.jpg", exif=turn, quality=95, subsampling=0)
    buffer = io.BytesIO()
    Image.fromarray(draw(3, 192, 192)).save(buffer, "JPEG", quality=95)
    (root / "cut.jpg").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])


def sets(root: Path) -> None:
    """Data sets of four clips and less, as a folder with a list or with a text beside each clip."""
    plain, listing = lines(CAPTIONS), lines(f"videos/{name}" for name in NAMES)
    lists = {  # name: (videos.txt, prompts.txt)
        "ok": (listing, plain),
        "crlf": (listing.replace(b"\n", b"\r\n"), plain.replace(b"\n", b"\r\n")),
        "bom": (b"\xef\xbb\xbf" + listing, b"\xef\xbb\xbf" + plain),
        "cp1252": (listing, plain.replace(b"the square", b"the square\x92s edge")),
        "blank_lines": (listing, lines([CAPTIONS[0], "", *CAPTIONS[1:], "", ""])),
        "no_final_newline": (listing, plain[:-1]),
        "count_mismatch": (listing, lines(CAPTIONS[:3])),
        "missing_clip": (listing.replace(b"b.mp4", b"nope.mp4"), plain),
        "backslashes": (listing.replace(b"/", b"\\").replace(b"\n", b"\r\n"), plain),
        "long_caption": (listing, lines([" ".join(f"word{i}" for i in range(700)), *CAPTIONS[1:]])),
        "short_in_middle": (listing, plain),
        "bad_in_middle": (listing, plain),
        "all_short": (listing, plain),
        "mixed_lengths": (listing, plain),
    }
    lengths = {"short_in_middle": [25, 5, 25, 25], "all_short": [5] * 4, "mixed_lengths": [25, 49, 25, 33]}
    made = root / "clips"
    for name, (videos, prompts) in lists.items():
        for i, count in enumerate(lengths.get(name, [25] * 4)):
            put(made, count, 1.2 * i, root / name / "videos" / NAMES[i])
        (root / name / "videos.txt").write_bytes(videos)
        (root / name / "prompts.txt").write_bytes(prompts)
    (root / "bad_in_middle" / "videos" / "c.mp4").write_bytes(b"\x00" * 300)

    folders = ("folder_pairs", "csv", "jsonl_bad_line", "mixed_image_video")
    for folder, count in zip(folders, (4, 4, 3, 2), strict=True):
        for i, name in enumerate(NAMES[:count]):
            put(made, 25, 1.2 * i, root / folder / name)
    for name, caption in zip(NAMES, CAPTIONS, strict=True):
        if name != "c.mp4":
            (root / "folder_pairs" / name).with_suffix(".txt").write_text(caption + "\n")
    with open(root / "csv" / "metadata.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file_name", "text"), *zip(NAMES, CSV_CAPTIONS, strict=True)])
    (root / "jsonl_bad_line" / "metadata.jsonl").write_text(
        '{"file_name": "a.mp4", "text": "one"}\n'
        '{"file_name": "b.mp4", "text": "say "hi" now"}\n'
        '{"file_name": "c.mp4", "text": "three"}\n'
    )
    for i in range(2):
        Image.fromarray(draw(i, hue=4.0 + i)).save(root / "mixed_image_video" / f"still_{i}.png")
    jsonl(root / "mixed_image_video", STILLS_AND_CLIPS)
    put(made, 25, 0.0, root / "same_stem" / "cat.mp4")
    Image.fromarray(draw(3, hue=2.0)).save(root / "same_stem" / "cat.png")
    jsonl(root / "same_stem", {"cat.mp4": "a moving pattern", "cat.png": "a still pattern"})
    shutil.rmtree(made)


def put(made: Path, count: int, hue: float, path: Path) -> None:
    """A clip at `path`, a copy of the one in `made` if there is one alike."""
    known = made / f"{count}-{hue:.1f}.mp4"
    if not known.exists():
        clip(known, count, hue=hue)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(known, path)


def lines(texts: Iterable[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def jsonl(folder: Path, captions: dict[str, str]) -> None:
    rows = (json.dumps({"file_name": name, "text": text}) + "\n" for name, text in captions.items())
    (folder / "metadata.jsonl").write_text("".join(rows))


# -- using them -----------------------------------------------------------------------------------------------------


def planned(model: Path, source, output_dir: Path, **changes):
    """A run up to its plan; the trainer. A run starts with the same report before any model loads."""
    return runs.run(model, source, output_dir, **{"stage": "plan", "data__buckets": BUCKETS} | changes)


def uncaptioned(folder: Path, **options) -> str:
    """A source of the clips of a folder, whose captions may be missing."""
    return json.dumps({"path": str(folder), "allow_empty_captions": True} | options)


def names(samples) -> list[str]:
    """The files of samples or rows."""
    return [Path(sample.path).name for sample in samples]
