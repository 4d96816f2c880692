"""How pictures of every kind meet the wanted size: covered and cut at a chosen place, padded, or stretched."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate

from cases import UPRIGHT, clip, corners_of, draw, encode, index_of
from data.video import probe, read_frames

TEN_BITS = {"x265-params": "log-level=none:pools=none:frame-threads=1", "crf": "4"}
KINDS = {  # what it is called, how it is made; all are shown as 64x96 but for the odd one
    "plain.mp4": dict(),
    "alpha.mov": dict(codec="qtrle", pix="argb"),
    "ten.mp4": dict(codec="libx265", pix="yuv420p10le", options=TEN_BITS),
    "gray.mov": dict(codec="png", pix="gray"),
    "full.mp4": dict(pix="yuvj420p", color_range=2),
    "wide_pixels.mp4": dict(wide=48, sample_aspect_ratio=Fraction(2, 1)),
    "odd.mp4": dict(high=53, wide=75, pix="yuv444p"),
    "turned.mp4": dict(high=96, wide=64, turn=(90,)),
    "still.png": None,
    "moving.webp": None,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    for name, how in KINDS.items():
        path, frames = root / name, [draw(i) for i in range(5)]
        if name == "alpha.mov":
            encode(path, [np.dstack([frame, np.full((64, 96), 255, np.uint8)]) for frame in frames], **how)
        elif name == "gray.mov":
            encode(path, [frame[..., 0] for frame in frames], **how)
        elif how is None:
            pictures = [Image.fromarray(frame) for frame in frames]
            moving = dict(save_all=True, append_images=pictures[1:], duration=42) if name == "moving.webp" else {}
            pictures[0].save(path, lossless=True, **moving)
        else:
            clip(path, 5, **how)
    return root


def whole(path, start=0, count=1) -> torch.Tensor:
    """At its own size, [3, h, w] or [3, count, h, w]."""
    found = probe(path)
    frames = read_frames(path, start, count, found.height, found.width)
    return frames[:, 0] if count == 1 else frames


def one(path, height, width, **how) -> torch.Tensor:
    return read_frames(path, 0, 1, height, width, **how)[:, 0]


@pytest.mark.parametrize("name", KINDS)
def test_cover_keeps_the_place_that_crop_says(made, name):
    path, found = made / name, probe(made / name)
    picture, high, wide = whole(path), found.height, found.width
    if name not in ("turned.mp4", "gray.mov"):
        assert corners_of(picture) == UPRIGHT
    low, narrow = high - 16, wide - 16
    for down, across in [(0, 0), (0, 1), (1, 0), (1, 1), (0.25, 0.75), (0.5, 0.5)]:
        top, left = int(16 * down), int(16 * across)
        # one side is cut at a time: the other is covered without scaling
        assert torch.equal(one(path, low, wide, crop=(down, across)), picture[:, top : top + low])
        assert torch.equal(one(path, high, narrow, crop=(down, across)), picture[:, :, left : left + narrow])


@pytest.mark.parametrize("name", KINDS)
def test_pad_shows_all_of_it_between_black_borders(made, name):
    path, found = made / name, probe(made / name)
    picture, high, wide = whole(path), found.height, found.width
    tall = one(path, high + 21, wide, resize="pad")
    assert torch.equal(tall[:, 10 : 10 + high], picture) and not tall[:, :10].any() and not tall[:, 10 + high :].any()
    broad = one(path, high, wide + 40, resize="pad")
    assert torch.equal(broad[:, :, 20 : 20 + wide], picture)
    assert not broad[:, :, :20].any() and not broad[:, :, 20 + wide :].any()
    assert torch.equal(one(path, high, wide, resize="pad"), picture)
    small = one(path, 64, 64, resize="pad")
    inside = small.flatten(0, 1).any(0).sum(), small.transpose(1, 2).flatten(0, 1).any(0).sum()  # columns, rows
    assert max(inside) == 64
    assert min(inside) == round(64 * min(high, wide) / max(high, wide))


@pytest.mark.parametrize("name", KINDS)
def test_stretch_shows_all_of_it_and_fills(made, name):
    path, found = made / name, probe(made / name)
    square = one(path, 96, 96, resize="stretch")
    assert square[0].min() >= 0 and square.flatten(0, 1).any(0).all()
    expected = interpolate(whole(path)[None].float(), size=(96, 96), mode="bicubic", antialias=True)[0]
    if name != "wide_pixels.mp4":  # its stored 48 columns are scaled but once
        assert (square - expected.round().clamp(0, 255)).abs().max() == 0
    assert (square - expected).abs().mean() < 3
    if name not in ("turned.mp4", "gray.mov"):
        assert corners_of(square) == UPRIGHT
    assert torch.equal(one(path, found.height, found.width, resize="stretch"), whole(path))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "still.png"])
@pytest.mark.parametrize("resize", ["cover", "pad", "stretch"])
def test_together_with_retiming(made, name, resize):
    path, found = made / name, probe(made / name)
    every = read_frames(path, 0, 5, 40, 72, resize=resize, crop=(0, 1))
    half = read_frames(path, 1, 2, 40, 72, fps=found.fps / 2, resize=resize, crop=(0, 1))
    assert torch.equal(half, every[:, [2, 4]])
    double = read_frames(path, 1, 4, 40, 72, fps=found.fps * 2, resize=resize, crop=(0, 1))
    assert torch.equal(double, every[:, [0, 1, 1, 2]])
    assert [index_of(frame) for frame in whole(path, 0, 5).unbind(1)] == list(range(5)) or name == "turned.mp4"


def test_what_is_transparent_is_black_at_any_size(tmp_path):
    array = np.full((64, 96, 4), 200, np.uint8)
    array[:, :48, 3], array[:, 48:, 3] = 255, 0
    path = encode(tmp_path / "a.mov", [array] * 2, codec="qtrle", pix="argb")
    assert (one(path, 64, 48, crop=(0, 0)) == 200).all() and not one(path, 64, 48, crop=(0, 1)).any()
    for resize in ("pad", "stretch"):
        frame = one(path, 40, 120, resize=resize)
        assert (frame[:, :, 35:55] == 200).all() and not frame[:, :, 65:].any()


def test_the_turn_comes_before_the_crop(made):
    """Stored 96x64 and turned a quarter to the left: the stored right edge is the top."""
    path = made / "turned.mp4"
    assert corners_of(whole(path)) == "gyrb"
    assert corners_of(one(path, 64, 48, crop=(0, 0)))[::2] == "gr"
    assert corners_of(one(path, 64, 48, crop=(0, 1)))[1::2] == "yb"
    assert corners_of(one(path, 32, 96, crop=(0, 0)))[:2] == "gy"
    assert corners_of(one(path, 32, 96, crop=(1, 0)))[2:] == "rb"


def centre(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cover and cut at the centre, as all entries of a cache without resize and crop in their keys were made."""
    scale = max(height / picture.shape[1], width / picture.shape[2])
    tall, wide = max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale))
    if picture.shape[1:] != (tall, wide):
        scaled = interpolate(picture[None].float(), size=(tall, wide), mode="bicubic", antialias=True)[0]
        picture = scaled.round_().clamp_(0, 255).to(torch.uint8)
    top, left = (tall - height) // 2, (wide - width) // 2
    return picture[:, top : top + height, left : left + width]


SIDE, PLACE = st.integers(1, 120), st.floats(0, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(height=SIDE, width=SIDE)
def test_without_a_word_it_is_the_centre_to_the_bit(made, height, width):
    for name in ("odd.mp4", "still.png"):
        frame = one(made / name, height, width)
        assert torch.equal(frame, centre(whole(made / name), height, width))
        assert torch.equal(frame, one(made / name, height, width, resize="cover", crop=(0.5, 0.5)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(height=SIDE, width=SIDE, resize=st.sampled_from(["cover", "pad", "stretch"]), crop=st.tuples(PLACE, PLACE))
def test_any_size_comes_out(made, height, width, resize, crop):
    frame = one(made / "odd.mp4", height, width, resize=resize, crop=crop)
    assert frame.shape == (3, height, width) and frame.any()


@pytest.mark.parametrize(
    "how", [{"resize": "squash"}, {"crop": (0, 1.01)}, {"crop": (-0.1, 0)}, {"crop": (float("nan"), 0)}]
)
def test_what_is_no_resize_and_no_place(made, how):
    with pytest.raises(ValueError, match="resize"):
        read_frames(made / "plain.mp4", 0, 1, 64, 96, **how)
