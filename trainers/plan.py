"""What a run trains on, what it costs, what is wrong with it: known before any weight loads."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from data import watch
from data.buckets import (
    Bucket,
    assign,
    assign_automatic,
    automatic,
    check_buckets,
    check_frames,
    crop_places,
    kept_share,
    overhang,
    windows,
)
from data.captions import prepare
from data.sources import Row, read_source
from data.video import HashMemo, Probe, UnreadableClip, frames_at
from trainers.config import DEFAULT_STEPS, Config

PROBES = 8  # files looked at side by side
KEPT_AT_LEAST = 0.6  # share of a picture that its bucket keeps, below which the plan says so


class PlanError(ValueError):
    """Data that cannot be trained on; the message lists every fault."""


@dataclass(frozen=True)
class Sample:
    """A window of a clip (or a still) with its captions, as it is trained on: `frames` of its bucket from `start`."""

    path: str
    captions: tuple[str, ...]
    """All of them are encoded; each epoch trains on the next one."""
    bucket: str
    start: int
    """First frame, of the clip as retimed."""
    fps: float
    content: str
    """SHA-256 of the file."""
    where: str
    """The list and line it was named in."""
    weight: float = 1.0
    """What its loss is multiplied by."""
    retime: float | None = None
    """Frames per second that it is retimed to by its timestamps; None keeps its own frames."""
    resize: str = "cover"
    crops: tuple[tuple[float, float], ...] = ((0.5, 0.5),)
    """Where the window of each crop lies, (vertical, horizontal), 0 top and left, 1 bottom and right. All are encoded;
    each epoch trains on the next one."""

    @property
    def caption(self) -> str:
        """The first, and mostly the only one."""
        return self.captions[0]

    @property
    def identity(self) -> list:
        """What is trained on, without where it was found."""
        return [self.content, *self.captions, self.start, self.retime, self.resize, self.crops, self.weight]


@dataclass(frozen=True)
class Picture:
    """Frame `start` of a file at a size: what a text encoder sees beside a caption. No path: black."""

    path: str = ""
    content: str = ""
    """SHA-256 of the file."""
    start: int = 0
    height: int = 64
    width: int = 64
    retime: float | None = None
    resize: str = "cover"
    crop: tuple[float, float] = (0.5, 0.5)


BLACK = Picture()


@dataclass(frozen=True)
class Text:
    """What is encoded as text: a caption, and the picture beside it for models whose text encoder sees one."""

    caption: str
    picture: Picture | None = None


@dataclass
class Plan:
    samples: list[Sample] = field(default_factory=list)
    buckets: dict[str, list[int]] = field(default_factory=dict)
    """Bucket -> indices into samples, an index as often as its source's repeats say."""
    left_out: list[str] = field(default_factory=list)
    """Clips that fit no bucket, each with its reason."""
    bad: list[str] = field(default_factory=list)
    """Clips that cannot be read, likewise (data.on_bad: skip)."""
    notes: list[str] = field(default_factory=list)
    """What is done to clips that their owner may not expect."""
    clips: int = 0
    """Clips and stills that are trained on, each row of the sources."""
    seconds: float = 0.0
    """Length of all of them, as retimed."""
    seconds_used: float = 0.0
    """Length of their windows."""
    retimed: list[float] = field(default_factory=list)
    """Frames per second of the clips whose speed data.fps changes."""

    @property
    def sizes(self) -> dict[str, int]:
        return {bucket: len(at) for bucket, at in self.buckets.items()}

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def most_used(self) -> Bucket:
        """The bucket with the most samples."""
        return Bucket.parse(max(self.sizes, key=self.sizes.get))

    def digest(self) -> str:
        """Names the data and their order: equal digests give equal batches."""
        rows = {b: [self.samples[i].identity for i in at] for b, at in self.buckets.items()}
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]

    def steps(self, train, global_batch: int) -> int:
        """Optimizer steps of the run, from train.steps, train.epochs or train.max_samples."""
        if train.epochs is not None:
            return max(1, math.ceil(train.epochs * self.total / global_batch))
        if train.max_samples is not None:
            return max(1, math.ceil(train.max_samples / global_batch))
        return DEFAULT_STEPS if train.steps is None else train.steps


def make(config: Config, frame_rule: tuple[int, int], side_rule: int, refuse_bucket: Callable, memo: HashMemo) -> Plan:
    """Reads the sources, probes every file and gives it a bucket. Raises PlanError listing all that is wrong."""
    plan = Plan()
    choices = Choices(config.data, frame_rule, side_rule, refuse_bucket, plan.notes)
    rows, problems = [], []
    for source in config.data.train:
        found, wrong = read_source(source)
        rows += found
        problems += wrong
    seen = look(rows, memo, config.data.decode_timeout)
    for row, what in zip(rows, seen, strict=True):
        if isinstance(what, UnreadableClip):
            plan.bad.append(f"{what} [{row.where}]")
            continue
        clip, content = what
        add(plan, row, clip, content, choices, config.data)
    if plan.bad and config.data.on_bad == "error":
        problems += plan.bad
    if problems:
        can_skip = plan.bad and config.data.on_bad == "error"
        remedy = " (data.on_bad: skip leaves out clips that cannot be read)" if can_skip else ""
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise PlanError(f"{count} in the data{remedy}:\n  " + "\n  ".join(map(printable, problems)))
    if not plan.samples:
        reasons = [*plan.bad, *plan.left_out] or ["the sources name no clips"]
        raise PlanError("data.train: nothing to train on\n  " + "\n  ".join(map(printable, reasons)))
    plan.buckets = dict(sorted(plan.buckets.items()))
    plan.notes[:0] = [*changed_speed(plan.retimed, config.data.fps), *copies(rows, seen)]
    return plan


class Choices:
    """The buckets to choose from: those of data, and each source's own. Raises PlanError for what cannot be one."""

    def __init__(self, data, frame_rule: tuple[int, int], side_rule: int, refuse_bucket: Callable, notes: list[str]):
        self.data, self.rules, self.refuse = data, (frame_rule, side_rule), refuse_bucket
        self.listed = self.check(data.buckets, "data.buckets")
        own = [source for source in data.train if source.buckets]
        self.own = {tuple(s.buckets): self.check(s.buckets, f"data.train {s.path}: buckets") for s in own}
        self.groups = []
        if data.resolution:
            try:
                check_frames(data.frames, frame_rule)
            except ValueError as error:
                raise PlanError(f"data.frames: {error}") from None
            self.groups = self.possible(automatic(data.resolution, data.frames, side_rule), notes)

    def check(self, buckets: Iterable[Bucket | str], name: str) -> list[Bucket]:
        try:
            buckets = [Bucket.parse(b) if isinstance(b, str) else b for b in buckets]
            check_buckets(buckets, *self.rules)
        except ValueError as error:
            raise PlanError(f"{name}: {error}") from None
        refused = [self.refuse(b.frames, b.height, b.width) for b in buckets]
        if any(refused):
            raise PlanError(f"{name}: " + "; ".join(reason for reason in refused if reason))
        return buckets

    def possible(self, groups: list[list[Bucket]], notes: list[str]) -> list[list[Bucket]]:
        """The automatic buckets that the model takes; what it refuses is a note, and an error if that is all."""
        why = {b: self.refuse(b.frames, b.height, b.width) for group in groups for b in group}
        refused = {str(b): reason for b, reason in why.items() if reason}
        if len(refused) == len(why):
            name, reason = next(iter(refused.items()))
            raise PlanError(f"data.resolution: the model takes none of the {len(why)} sizes; {name}: {reason}")
        if refused:
            name, reason = next(iter(refused.items()))
            notes.append(f"data.resolution: {len(refused)} sizes are not used, such as {name}: {reason}")
        return [kept for group in groups if (kept := [b for b in group if not why[b]])]

    def bucket(self, row: Row, clip: Probe) -> Bucket | str:
        """The row's bucket, or why it has none."""
        limits = (self.data.max_upscale, self.data.resize)
        if row.buckets:
            return assign(clip, self.own[tuple(row.buckets)], *limits)
        return assign_automatic(clip, self.groups, *limits) if self.groups else assign(clip, self.listed, *limits)


def look(rows: list[Row], memo: HashMemo, timeout: float) -> list[tuple[Probe, str] | UnreadableClip]:
    """What each row's file holds and its SHA-256, or why it cannot be read; each file is decoded once and for all."""
    from tqdm import tqdm

    found = {}
    with tqdm(total=len(rows), desc="probing", unit="clip", disable=None) as bar:  # None: no bar where nobody watches
        for at, what in watch.look([row.path for row in rows], memo, timeout, PROBES):
            found[at] = what
            bar.update()
    memo.save()
    return [found[at] for at in range(len(rows))]


def add(plan: Plan, row: Row, clip: Probe, content: str, choices: Choices, data) -> None:
    """Puts the windows of a row's clip into the plan, or the clip among those left out."""
    retime, own_fps = None, clip.fps
    if data.fps and clip.kind == "video" and clip.frames > 1:
        # Less than half a frame over the whole clip, as between 23.976 and 24 in 121 frames, is no change of speed.
        if not clip.steady or abs(clip.frames * (data.fps / own_fps - 1)) >= 0.5:
            retime, clip = data.fps, replace(clip, frames=frames_at(clip, data.fps))
        clip = replace(clip, fps=data.fps)
    bucket = choices.bucket(row, clip)
    if isinstance(bucket, str):
        at = f"at {data.fps:g} fps: " if retime else ""
        plan.left_out.append(f"{row.path}: {at}{bucket} [{row.where}]")
        return
    if retime:
        plan.retimed.append(own_fps)
    resize = data.resize if any(overhang(clip, bucket)) else "cover"  # where the ratios agree they are all the same
    plan.notes += [f"{row.path}: {note}" for note in (*clip.notes, *shaped(clip, bucket, resize))]
    crops = ((0.5, 0.5),)
    if data.crop == "random":
        crops = crop_places(content, data.crops, *overhang(clip, bucket))
    starts = windows(data.windows, clip.frames, bucket.frames)
    how = (clip.fps, content, row.where, row.weight, retime, resize, crops)
    captions = prepare(row.captions, row.prefix, data.tag_shuffle, data.keep_tags, data.strip_preamble)
    samples = [Sample(str(row.path), captions, str(bucket), start, *how) for start in starts]
    first = len(plan.samples)
    plan.samples += samples
    plan.buckets.setdefault(str(bucket), []).extend([*range(first, first + len(samples))] * row.repeats)
    plan.clips += 1
    plan.seconds += clip.frames / clip.fps if clip.kind == "video" else 0.0
    plan.seconds_used += len(samples) * bucket.frames / clip.fps if clip.kind == "video" else 0.0


def shaped(clip: Probe, bucket: Bucket, resize: str) -> list[str]:
    """What fitting a picture into its bucket costs, where it is much."""
    if (kept := kept_share(clip, bucket)) >= KEPT_AT_LEAST:
        return []
    return {
        "cover": [f"only {kept:.0%} of the picture fits {bucket}"],
        "pad": [f"{1 - kept:.0%} of {bucket} is black"],
        "stretch": [f"one side is stretched {1 / kept:.1f} times more than the other, to {bucket}"],
    }[resize]


def changed_speed(rates: list[float], fps: float) -> list[str]:
    """The note on clips that had these `rates` and are retimed to `fps`."""
    if not rates:
        return []
    low, high = f"{min(rates):.5g}", f"{max(rates):.5g}"
    slower = sum(rate < fps for rate in rates)
    repeats = f"; frames are repeated in {slower} of them, of fewer than {fps:g}" if slower else ""
    span = low if low == high else f"{low} to {high}"
    return [f"data.fps: {counted(len(rates), 'clip')} retimed to {fps:g} fps, from {span}{repeats}"]


def copies(rows: list[Row], seen: list[tuple[Probe, str] | UnreadableClip]) -> list[str]:
    """The note on rows whose files hold the same bytes, under one name or several."""
    places: dict[str, list[str]] = {}
    for row, what in zip(rows, seen, strict=True):
        if not isinstance(what, UnreadableClip):
            places.setdefault(what[1], []).append(f"{row.path} [{row.where}]")
    same = [found for found in places.values() if len(found) > 1]
    if not same:
        return []
    extra = sum(len(found) - 1 for found in same)
    return [f"{counted(extra, 'clip')} named again or copied: {same[0][1]} holds what {same[0][0]} does"]


def counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def printable(text: str) -> str:
    """The text with what a terminal would obey or cannot show (control characters, half characters) as escapes."""
    return "".join(c if c.isprintable() or c in "\n" else c.encode("unicode_escape").decode() for c in text)
