"""Which (frames, height, width) a clip trains at."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from data.video import Probe

ORDER = "the order is FxHxW: frames x height x width, as in 49x512x768"


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
    every, first = frame_rule
    rule = f"{every}k+{first}" if first else f"{every}k"

    def fits(bucket: Bucket) -> bool:
        sides = bucket.height % side_rule == 0 and bucket.width % side_rule == 0
        return sides and bucket.frames >= first and (bucket.frames - first) % every == 0

    wrong = []
    for bucket in buckets:
        if fits(bucket):
            continue
        faults = []
        if bucket.frames < first or (bucket.frames - first) % every:
            faults.append(f"{bucket.frames} frames is not {rule} ({_nearest(bucket.frames, every, first)})")
        for name in ("height", "width"):
            if (side := getattr(bucket, name)) % side_rule:
                faults.append(f"{name} {side} is not a multiple of {side_rule} ({_nearest(side, side_rule, 0)})")
        turned = Bucket(bucket.width, bucket.height, bucket.frames)
        hint = f"; was {turned} meant?" if fits(turned) else ""
        wrong.append(f"  {bucket}: {', '.join(faults)}{hint}")
    if wrong:
        raise ValueError("\n".join([f"buckets this model cannot train at ({ORDER}):", *wrong]))


def _nearest(value: int, every: int, first: int) -> str:
    """The allowed values every*k + first around one that is not allowed."""
    smallest = first or every
    below = first + (value - first) // every * every
    return f"nearest: {below} or {below + every}" if below >= smallest else f"nearest: {smallest}"


def assign(probe: Probe, buckets: Iterable[Bucket]) -> Bucket | str:
    """The bucket a clip trains at, or the reason why there is none.

    Of the buckets that the clip is long enough for: the nearest aspect ratio (by its logarithm, so that 2:1 is as far
    from square as 1:2), then the most frames, then the largest area. Stills and one-frame clips go to one-frame buckets
    only; longer clips go there only if there are no other buckets, since a clip must not become a still unasked.
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

    def distance(bucket: Bucket) -> float:
        # rounded, so that equal ratios written with other numbers tie instead of differing in the last bit
        return round(abs(math.log(probe.width * bucket.height / (probe.height * bucket.width))), 9)

    return min(candidates, key=lambda bucket: (distance(bucket), -bucket.frames, -bucket.height * bucket.width))


def kept_share(probe: Probe, bucket: Bucket) -> float:
    """The share of the picture's area that scaling to cover and the centre crop keep: 1 when the ratios agree."""
    ratio = probe.width * bucket.height / (probe.height * bucket.width)
    return min(ratio, 1 / ratio)
