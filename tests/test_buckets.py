"""Buckets: their spelling, the model's rules for them, and which one a clip gets."""

import pytest

from data.buckets import Bucket, assign, check_buckets, kept_share
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
