"""Which (frames, height, width) a clip trains at, and which windows and crops of it."""

import hashlib
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from data.video import Probe

ORDER = "the order is FxHxW: frames x height x width, as in 49x512x768"
RATIOS = ((1, 2), (9, 16), (2, 3), (3, 4), (1, 1), (4, 3), (3, 2), (16, 9), (2, 1))  # width : height


@dataclass(frozen=True, order=True)
class Bucket:
    """A training size; `str` and `parse` use the same spelling, 49x512x768."""

    frames: int
    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip().lower())
        if not match:
            raise ValueError(f"bucket {text!r}: three whole numbers above 0 are needed; {ORDER}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


def check_buckets(buckets: Iterable[Bucket], frame_rule: tuple[int, int], side_rule: int) -> None:
    """Raise one ValueError that lists every bucket the model cannot train at, with the nearest allowed values.

    frame_rule: (a, b), frames must be a*k + b, say (8, 1). side_rule: what height and width must be multiples of.
    """

    def fits(bucket: Bucket) -> bool:
        sides = bucket.height % side_rule == 0 and bucket.width % side_rule == 0
        return sides and not _wrong_frames(bucket.frames, frame_rule)

    wrong = []
    for bucket in buckets:
        if fits(bucket):
            continue
        faults = _wrong_frames(bucket.frames, frame_rule)
        for name in ("height", "width"):
            if (side := getattr(bucket, name)) % side_rule:
                faults.append(f"{name} {side} is not a multiple of {side_rule} ({_nearest(side, side_rule, 0)})")
        turned = Bucket(bucket.width, bucket.height, bucket.frames)
        hint = f"; was {turned} meant?" if fits(turned) else ""
        wrong.append(f"  {bucket}: {', '.join(faults)}{hint}")
    if wrong:
        raise ValueError("\n".join([f"buckets this model cannot train at ({ORDER}):", *wrong]))


def check_frames(frames: Iterable[int], frame_rule: tuple[int, int]) -> None:
    """Raise one ValueError that lists every number of frames the model cannot train at, with the nearest allowed."""
    if wrong := [fault for count in frames for fault in _wrong_frames(count, frame_rule)]:
        raise ValueError("; ".join(wrong))


def _wrong_frames(frames: int, frame_rule: tuple[int, int]) -> list[str]:
    every, first = frame_rule
    if frames >= first and (frames - first) % every == 0:
        return []
    rule = f"{every}k+{first}" if first else f"{every}k"
    return [f"{frames} frames is not {rule} ({_nearest(frames, every, first)})"]


def _nearest(value: int, every: int, first: int) -> str:
    """The allowed values every*k + first around one that is not allowed."""
    smallest = first or every
    below = first + (value - first) // every * every
    return f"nearest: {below} or {below + every}" if below >= smallest else f"nearest: {smallest}"


def automatic(resolutions: Iterable[int], frames: Iterable[int], side_rule: int) -> list[list[Bucket]]:
    """For each resolution, smallest first, buckets in every shape of RATIOS with about resolution^2 pixels.

    Sides are multiples of `side_rule`: of those around the exact ones, the pair that is off least in area and ratio
    together (by their logarithms).
    """
    return [
        [Bucket(count, *shape) for shape in shapes(resolution, side_rule) for count in sorted(set(frames))]
        for resolution in sorted(set(resolutions))
    ]


def shapes(resolution: int, side_rule: int) -> list[tuple[int, int]]:
    """(height, width) for each of RATIOS, portrait to landscape; fewer where small sides round to the same."""

    def around(side: float) -> list[int]:
        below = math.floor(side / side_rule) * side_rule
        return [value for value in (below, below + side_rule) if value]

    found = []
    for wide, high in RATIOS:

        def off(size: tuple[int, int], ratio: float = wide / high) -> float:
            area, shape = size[0] * size[1] / resolution**2, size[1] / size[0] / ratio
            return round(abs(math.log(area)) + abs(math.log(shape)), 9)

        root = math.sqrt(wide / high)
        found.append(min(itertools.product(around(resolution / root), around(resolution * root)), key=off))
    return list(dict.fromkeys(found))


def assign(
    probe: Probe, buckets: Iterable[Bucket], max_upscale: float = math.inf, resize: str = "cover"
) -> Bucket | str:
    """The bucket a clip trains at, or the reason why there is none.

    Of the buckets that the clip is long enough for and that enlarge it at most `max_upscale` times: the nearest aspect
    ratio (by its logarithm, so that 2:1 is as far from square as 1:2), then the most frames, then the largest area.
    Stills and one-frame clips go to one-frame buckets only; longer clips go there only if there are no other buckets,
    since a clip must not become a still unasked. `probe`: as retimed.
    """
    buckets = sorted(set(buckets))
    if not buckets:
        raise ValueError("no buckets to choose from")
    moving = [bucket for bucket in buckets if bucket.frames > 1]
    if probe.frames == 1:
        candidates = [bucket for bucket in buckets if bucket.frames == 1]
        if not candidates and probe.kind == "image":
            return f"a still, and no bucket has 1 frame (add one, say 1x{moving[0].height}x{moving[0].width})"
    else:
        candidates = [bucket for bucket in moving or buckets if bucket.frames <= probe.frames]
    if not candidates:
        frames = f"{probe.frames} frame{'s' if probe.frames > 1 else ''}"
        return f"{frames}, the smallest bucket needs {moving[0].frames}"
    small = min(candidates, key=lambda bucket: enlargement(probe, bucket, resize))
    if (times := enlargement(probe, small, resize)) > max_upscale:
        return (
            f"{probe.width}x{probe.height} pixels (width x height), {small} would enlarge it {times:.2f} times, more "
            f"than data.max_upscale {max_upscale:g}"
        )

    def distance(bucket: Bucket) -> float:
        # rounded, so that equal ratios written with other numbers tie instead of differing in the last bit
        return round(abs(math.log(probe.width * bucket.height / (probe.height * bucket.width))), 9)

    fine = [bucket for bucket in candidates if enlargement(probe, bucket, resize) <= max_upscale]
    return min(fine, key=lambda bucket: (distance(bucket), -bucket.frames, -bucket.height * bucket.width))


def assign_automatic(
    probe: Probe, groups: list[list[Bucket]], max_upscale: float = math.inf, resize: str = "cover"
) -> Bucket | str:
    """As assign, among what `automatic` made: the ratio first, within each resolution; then the most frames, then the
    highest resolution. So rounded sides never decide about the resolution."""
    picks = [assign(probe, group, max_upscale, resize) for group in groups]
    fine = [pick for pick in picks if isinstance(pick, Bucket)]
    if fine:
        return max(fine, key=lambda bucket: (bucket.frames, bucket.height * bucket.width))
    return "a still, and data.frames has no 1 (add it)" if picks[0].startswith("a still") else picks[0]


def enlargement(probe: Probe, bucket: Bucket, resize: str = "cover") -> float:
    """How many times longer a side of the picture becomes: of stretch, the one that grows more."""
    sides = bucket.height / probe.height, bucket.width / probe.width
    return min(sides) if resize == "pad" else max(sides)


def kept_share(probe: Probe, bucket: Bucket) -> float:
    """The share of the picture's area that scaling to cover and the crop keep: 1 when the ratios agree."""
    ratio = probe.width * bucket.height / (probe.height * bucket.width)
    return min(ratio, 1 / ratio)


def overhang(probe: Probe, bucket: Bucket) -> tuple[int, int]:
    """Rows and columns of the picture, scaled to cover the bucket, that are cut."""
    scale = enlargement(probe, bucket)
    tall, wide = round(probe.height * scale), round(probe.width * scale)
    return max(0, tall - bucket.height), max(0, wide - bucket.width)


def crop_places(content: str, count: int, rows: int, columns: int) -> tuple[tuple[float, float], ...]:
    """At most `count` different places (vertical, horizontal) in [0, 1] of a crop that cuts so many rows and columns.

    Place k is a function of the clip's SHA-256 `content` and k alone; along a side that is not cut it is 0.5.
    """
    places = {}
    for k in range(count if rows or columns else 1):
        digest = hashlib.sha256(f"{content}/{k}".encode()).digest()
        vertical, horizontal = (int.from_bytes(digest[i : i + 4], "big") / (2**32 - 1) for i in (0, 4))
        place = (vertical if rows else 0.5, horizontal if columns else 0.5)
        places.setdefault((round(place[0] * rows), round(place[1] * columns)), place)
    return tuple(places.values())


def windows(kind: str, total: int, length: int) -> list[int]:
    """First frames of the windows of `length` that are taken of `total` frames, in order, none twice.

    first, middle: one. uniform:N: N, the first at the start and the last at the end (all there are, if fewer; 1 is the
    middle). all: as few as reach every frame, evenly spread, so neighbours overlap where they do not fit exactly.
    """
    if not 1 <= length <= total:
        raise ValueError(f"no window of {length} frames in {total}")
    room = total - length
    count = {"first": 1, "middle": 1, "all": math.ceil(total / length)}.get(kind) or int(kind.removeprefix("uniform:"))
    count = min(count, room + 1)
    if count == 1:
        return [0 if kind == "first" else room // 2]
    return [(2 * i * room + count - 1) // (2 * (count - 1)) for i in range(count)]  # rounded, half up
