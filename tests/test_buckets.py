"""Buckets: their spelling, the model's rules for them, and which one, which windows and which crops a clip gets."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.buckets import (
    RATIOS,
    Bucket,
    assign,
    assign_automatic,
    automatic,
    check_buckets,
    check_frames,
    crop_places,
    enlargement,
    kept_share,
    overhang,
    shapes,
    windows,
)
from data.video import Probe


def video(frames: int, height: int, width: int) -> Probe:
    return Probe(frames, height, width, 24.0, "video")


STILL = Probe(1, 512, 768, 24.0, "image")


def buckets(*names: str) -> list[Bucket]:
    return [Bucket.parse(name) for name in names]


def test_parse_and_str():
    bucket = Bucket.parse(" 49x512X768 ")
    assert bucket == Bucket(49, 512, 768) and str(bucket) == "49x512x768"
    assert Bucket(1, 2, 3) < Bucket(1, 3, 2) < Bucket(2, 1, 1)


@pytest.mark.parametrize("text", ["49x512", "49x512x768x3", "0x512x768", "49*512*768", "49x-512x768", "", "axbxc"])
def test_parse_names_the_order(text):
    with pytest.raises(ValueError, match="order is FxHxW"):
        Bucket.parse(text)


def test_rules_hold():
    assert check_buckets(buckets("1x32x32", "9x64x96", "121x512x768"), (8, 1), 32) is None
    assert check_buckets(buckets("81x480x832"), (4, 1), 16) is None


def test_rules_name_every_bad_bucket_and_the_nearest_good_values():
    with pytest.raises(ValueError) as caught:
        check_buckets(buckets("24x64x96", "49x512x768", "25x500x770", "3x20x64"), (8, 1), 32)
    head, *lines = str(caught.value).split("\n")
    assert "FxHxW" in head and len(lines) == 3
    assert "24x64x96: 24 frames is not 8k+1 (nearest: 17 or 25)" in lines[0]
    assert "height 500 is not a multiple of 32 (nearest: 480 or 512)" in lines[1]
    assert "width 770 is not a multiple of 32 (nearest: 768 or 800)" in lines[1] and "frames" not in lines[1]
    assert "3 frames is not 8k+1 (nearest: 1 or 9)" in lines[2] and "height 20 is not" in lines[2]
    assert "(nearest: 32)" in lines[2]
    with pytest.raises(ValueError, match=r"48 frames is not 4k\+1 \(nearest: 45 or 49\)"):
        check_buckets(buckets("48x480x832"), (4, 1), 16)


def test_swapped_order_is_recognised():
    with pytest.raises(ValueError, match=r"96 frames is not 8k\+1.*was 25x64x96 meant"):
        check_buckets(buckets("96x64x25"), (8, 1), 32)


@pytest.mark.parametrize(
    "clip, expected",
    [
        (video(100, 720, 1280), "49x512x768"),  # nearest ratio, then most frames
        (video(100, 1280, 720), "49x768x512"),
        (video(30, 720, 1280), "25x512x768"),
        (video(49, 480, 720), "49x512x768"),  # exactly enough
        (video(48, 480, 720), "25x512x768"),
        (video(25, 1280, 720), "25x512x768"),  # the portrait bucket is too long for it
        (STILL, "1x512x768"),
        (video(1, 64, 96), "1x512x768"),
    ],
)
def test_assign(clip, expected):
    choice = buckets("49x512x768", "25x512x768", "49x768x512", "1x512x768")
    assert str(assign(clip, choice)) == expected
    assert str(assign(clip, choice[::-1])) == expected


def test_ratios_are_compared_by_their_logarithm():
    # 1.4 lies nearer to 1.0 than to 2.0 by difference and by logarithm; 1.45 only by difference
    choice = buckets("9x64x64", "9x64x128")
    assert str(assign(video(9, 100, 140), choice)) == "9x64x64"
    assert str(assign(video(9, 100, 145), choice)) == "9x64x128"
    assert str(assign(video(9, 145, 100), buckets("9x64x64", "9x128x64"))) == "9x128x64"


def test_ties_go_to_more_frames_then_to_the_larger_area():
    assert str(assign(video(20, 64, 96), buckets("9x512x768", "17x64x96"))) == "17x64x96"
    assert str(assign(video(20, 64, 96), buckets("9x64x96", "9x512x768", "9x32x48"))) == "9x512x768"
    # a square clip lies between them, though the two logarithms may differ in the last bit
    for long, short in [
        ("17x96x64", "9x64x96"),
        ("17x64x96", "9x96x64"),
        ("17x96x32", "9x32x96"),
        ("17x32x96", "9x96x32"),
    ]:
        assert str(assign(video(20, 300, 300), buckets(long, short))) == long


def test_reasons_name_the_numbers():
    assert assign(video(5, 64, 96), buckets("25x64x96", "9x64x96")) == "5 frames, the smallest bucket needs 9"
    assert assign(video(5, 64, 96), buckets("9x64x96", "1x64x96")) == "5 frames, the smallest bucket needs 9"
    assert assign(video(1, 64, 96), buckets("9x64x96")) == "1 frame, the smallest bucket needs 9"
    reason = assign(STILL, buckets("9x64x96"))
    assert "a still" in reason and "1x64x96" in reason
    with pytest.raises(ValueError, match="no buckets"):
        assign(STILL, [])


def test_clips_become_stills_only_where_all_buckets_are():
    assert str(assign(video(50, 64, 96), buckets("1x64x96", "1x96x64"))) == "1x64x96"
    assert str(assign(video(50, 64, 96), buckets("1x64x96", "9x96x64"))) == "9x96x64"


def test_kept_share():
    assert kept_share(video(9, 192, 32), Bucket(9, 96, 64)) == pytest.approx((32 * 48) / (192 * 32))
    assert kept_share(video(9, 720, 1280), Bucket(9, 512, 768)) == pytest.approx(1.5 / (16 / 9))
    assert kept_share(video(9, 64, 96), Bucket(9, 512, 768)) == 1


# -- enlarging --------------------------------------------------------------------------------------------------------


def test_no_bucket_enlarges_more_than_asked():
    choice = buckets("9x64x96", "9x512x768", "17x512x768")
    assert str(assign(video(20, 64, 96), choice, max_upscale=2)) == "9x64x96"  # though others have more frames
    assert str(assign(video(20, 256, 384), choice, max_upscale=2)) == "17x512x768"  # exactly twice
    assert str(assign(video(20, 256, 383), choice, max_upscale=2)) == "9x64x96"
    reason = assign(video(20, 20, 30), choice, max_upscale=2)
    assert reason == (
        "30x20 pixels (width x height), 9x64x96 would enlarge it 3.20 times, more than data.max_upscale 2"
    )
    # the length comes first: enlarging a clip that is too short would not help
    assert assign(video(5, 20, 30), choice, max_upscale=2) == "5 frames, the smallest bucket needs 9"


def test_enlargement_is_that_of_how_the_picture_is_fitted():
    clip, bucket = video(9, 32, 96), Bucket(9, 64, 96)
    assert [enlargement(clip, bucket, how) for how in ("cover", "stretch", "pad")] == [2, 2, 1]
    assert assign(clip, [bucket], max_upscale=1.5, resize="pad") == bucket
    assert "2.00 times" in assign(clip, [bucket], max_upscale=1.5)


# -- automatic buckets ------------------------------------------------------------------------------------------------


def test_shapes_are_near_the_area_and_the_ratio():
    assert shapes(512, 32) == [
        (704, 352),
        (672, 384),
        (640, 416),
        (576, 448),
        (512, 512),
        (448, 576),
        (416, 640),
        (384, 672),
        (352, 704),
    ]
    assert shapes(16, 32) == [(32, 32)]  # nothing smaller is allowed


@given(resolution=st.integers(64, 2048), side=st.sampled_from([8, 16, 32]))
def test_shapes_of_any_resolution(resolution, side):
    found = shapes(resolution, side)
    assert 1 <= len(found) <= len(RATIOS) and len(set(found)) == len(found)
    assert [(w, h) for h, w in reversed(found)] == found  # portrait mirrors landscape
    for height, width in found:
        assert height % side == width % side == 0 and height and width
        if resolution >= 16 * side:
            assert abs(math.log(height * width / resolution**2)) < 0.09
    if resolution >= 16 * side:
        ratios = [width / height for height, width in found]
        assert len(found) == len(RATIOS)
        assert all(abs(math.log(r / (w / h))) < 0.09 for r, (w, h) in zip(ratios, RATIOS, strict=True))


def test_automatic_buckets_take_the_ratio_then_the_frames_then_the_resolution():
    groups = automatic([512, 256], [1, 17, 49], 32)
    assert [len(group) for group in groups] == [3 * len(shapes(256, 32)), 27]
    pick = lambda clip, **more: str(assign_automatic(clip, groups, **more))  # noqa: E731
    assert pick(video(100, 1080, 1920)) == "49x384x672"
    assert pick(video(100, 1920, 1080)) == "49x672x384"
    assert pick(video(20, 1000, 1000)) == "17x512x512"
    # 224x320 is farther from 2:3 than 416x640: what rounding does must not choose the resolution
    assert pick(video(100, 200, 300), max_upscale=2) == "49x224x320"
    assert pick(video(100, 200, 300), max_upscale=3) == "49x416x640"
    assert pick(Probe(1, 900, 1600, 24.0, "image")) == "1x384x672"
    assert assign_automatic(video(9, 900, 1600), groups) == "9 frames, the smallest bucket needs 17"
    still = Probe(1, 900, 1600, 24.0, "image")
    assert assign_automatic(still, automatic([64], [9], 32)) == "a still, and data.frames has no 1 (add it)"


def test_frames_are_checked_alone():
    assert check_frames([1, 9, 49], (8, 1)) is None
    with pytest.raises(ValueError, match=r"^24 frames is not 8k\+1 \(nearest: 17 or 25\); 48 frames is not"):
        check_frames([24, 25, 48], (8, 1))


# -- properties of the choice -----------------------------------------------------------------------------------------

CLIPS = st.builds(video, st.integers(2, 200), st.integers(16, 2000), st.integers(16, 2000))
LISTS = st.lists(
    st.builds(Bucket, st.sampled_from([1, 9, 17, 49]), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8
)


@given(clip=CLIPS, choice=LISTS, limit=st.floats(1, 4))
def test_the_choice_is_the_best_that_is_allowed(clip, choice, limit):
    choice = [Bucket(b.frames, 32 * b.height, 32 * b.width) for b in choice]
    made = assign(clip, choice, limit)
    assert made == assign(clip, choice[::-1] + choice, limit)  # neither order nor repeats matter
    moving = [b for b in choice if b.frames > 1] or choice
    fine = [b for b in moving if b.frames <= clip.frames and enlargement(clip, b) <= limit]
    if not fine:
        assert isinstance(made, str)
        return
    off = lambda b: abs(math.log(clip.width / clip.height) - math.log(b.width / b.height))  # noqa: E731
    assert made in fine and off(made) <= min(map(off, fine)) + 1e-8
    assert made.frames == max(b.frames for b in fine if abs(off(b) - off(made)) < 1e-10)


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "total", "length", "starts"),
    [
        ("first", 121, 49, [0]),
        ("middle", 121, 49, [36]),
        ("all", 121, 49, [0, 36, 72]),
        ("all", 98, 49, [0, 49]),
        ("all", 50, 49, [0, 1]),
        ("uniform:3", 121, 49, [0, 36, 72]),
        ("uniform:2", 121, 49, [0, 72]),
        ("uniform:1", 121, 49, [36]),
        ("uniform:9", 52, 49, [0, 1, 2, 3]),
        ("all", 3, 1, [0, 1, 2]),
    ],
)
def test_windows(kind, total, length, starts):
    assert windows(kind, total, length) == starts


KINDS = st.one_of(st.sampled_from(["first", "middle", "all"]), st.integers(1, 50).map(lambda count: f"uniform:{count}"))


@given(kind=KINDS, length=st.integers(1, 130), more=st.integers(0, 700))
def test_windows_lie_inside_the_clip(kind, length, more):
    total = length + more
    starts = windows(kind, total, length)
    assert starts == sorted(set(starts)) and starts
    assert all(0 <= start <= total - length for start in starts)
    if not more:
        assert starts == [0]
    seen = Counter(frame for start in starts for frame in range(start, start + length))
    assert sum(seen.values()) == len(starts) * length
    if kind == "all":  # every frame, in as few windows as can be
        assert sorted(seen) == list(range(total)) and len(starts) == -(-total // length)
    elif kind.startswith("uniform"):
        assert len(starts) == min(int(kind[8:]), more + 1)
        if len(starts) > 1:
            gaps = [b - a for a, b in itertools.pairwise(starts)]
            assert starts[0] == 0 and starts[-1] == more and max(gaps) - min(gaps) <= 1
    else:
        assert len(starts) == 1


def test_no_window_is_longer_than_the_clip():
    with pytest.raises(ValueError, match="no window of 9 frames in 8"):
        windows("all", 8, 9)


# -- crops ------------------------------------------------------------------------------------------------------------


def test_crops_lie_only_along_the_side_that_is_cut():
    assert overhang(video(9, 720, 1280), Bucket(9, 512, 768)) == (0, 142)
    assert overhang(video(9, 1280, 720), Bucket(9, 768, 512)) == (142, 0)
    assert overhang(video(9, 128, 192), Bucket(9, 64, 96)) == (0, 0)
    assert crop_places("ab", 4, 0, 0) == ((0.5, 0.5),)
    places = crop_places("ab", 4, 0, 142)
    assert len(places) == 4 and {vertical for vertical, _ in places} == {0.5}
    assert crop_places("ab", 8, 0, 142)[:4] == places  # more of them keep those that are encoded
    assert crop_places("cd", 4, 0, 142) != places


@given(content=st.text("0123456789abcdef", min_size=1), count=st.integers(1, 12), rows=st.integers(0, 5))
def test_crops_differ(content, count, rows):
    places = crop_places(content, count, rows, 0)
    assert len({round(vertical * rows) for vertical, _ in places}) == len(places) <= min(count, rows + 1)
    assert all(0 <= vertical <= 1 and horizontal == 0.5 for vertical, horizontal in places)
