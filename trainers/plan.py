"""What a run trains on, what it costs, what is wrong with it: known before any weight loads."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from data.buckets import Bucket, assign, check_buckets, kept_share
from data.sources import read_source
from data.video import HashMemo, UnreadableClip, content_sha256, probe
from trainers import objectives, sharding
from trainers.config import DEFAULT_STEPS, Config

DISTILLED = re.compile("distil|turbo|lightning|fasthunyuan", re.IGNORECASE)  # all that tells them is their names
KEPT_AT_LEAST = 0.6  # share of a picture that its bucket keeps, below which the plan says so


class PlanError(ValueError):
    """Data that cannot be trained on; the message lists every fault."""


@dataclass(frozen=True)
class Sample:
    """A clip (or still) with its caption, as it is trained on: `frames` of its bucket from frame `start`."""

    path: str
    caption: str
    bucket: str
    start: int
    fps: float
    content: str
    """SHA-256 of the file."""
    where: str
    """The list and line it was named in."""


@dataclass(frozen=True)
class Picture:
    """Frame `start` of a file at a size: what a text encoder sees beside a caption. No path: black."""

    path: str = ""
    content: str = ""
    """SHA-256 of the file."""
    start: int = 0
    height: int = 64
    width: int = 64


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
    """Clips that are not trained on, each with its reason."""
    notes: list[str] = field(default_factory=list)
    """What is done to clips that their owner may not expect."""

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
        rows = {b: [(self.samples[i].content, self.samples[i].caption) for i in at] for b, at in self.buckets.items()}
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
    try:
        check_buckets(config.data.buckets, frame_rule, side_rule)
    except ValueError as error:
        raise PlanError(f"data.buckets: {error}") from None
    refused = [refuse_bucket(b.frames, b.height, b.width) for b in config.data.buckets]
    if any(refused):
        raise PlanError("data.buckets: " + "; ".join(reason for reason in refused if reason))
    rows, problems, unreadable = [], [], 0
    for source in config.data.train:
        found, wrong = read_source(source)
        rows += found
        problems += wrong

    def look(row):
        try:
            return probe(row.path, memo), content_sha256(row.path, memo)
        except UnreadableClip as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:  # decoding releases the interpreter lock
        seen = list(pool.map(look, rows))
    memo.save()

    plan = Plan()
    for row, what in zip(rows, seen, strict=True):
        if isinstance(what, str):
            (plan.left_out if config.data.skip_bad else problems).append(f"{what} [{row.where}]")
            unreadable += 1
            continue
        clip, content = what
        bucket = assign(clip, config.data.buckets)
        if isinstance(bucket, str):
            plan.left_out.append(f"{row.path}: {bucket} [{row.where}]")
            continue
        kept = kept_share(clip, bucket)
        cropped = [f"only {kept:.0%} of the picture fits {bucket}"] if kept < KEPT_AT_LEAST else []
        plan.notes += [f"{row.path}: {note}" for note in (*clip.notes, *cropped)]
        at = plan.buckets.setdefault(str(bucket), [])
        at += [len(plan.samples)] * row.repeats
        plan.samples.append(Sample(str(row.path), row.caption, str(bucket), 0, clip.fps, content, row.where))
    if problems:
        can_skip = unreadable and not config.data.skip_bad
        remedy = " (data.skip_bad: true leaves out clips that cannot be read)" if can_skip else ""
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise PlanError(f"{count} in the data{remedy}:\n  " + "\n  ".join(problems))
    if not plan.samples:
        reasons = "\n  ".join(plan.left_out) or "the sources name no clips"
        raise PlanError(f"data.train: nothing to train on\n  {reasons}")
    plan.buckets = dict(sorted(plan.buckets.items()))
    return plan


def report(plan: Plan, trainer, missing: dict[str, tuple[int, int]], global_batch: int) -> str:
    """The plan as text: clips per bucket, what is left out and why, steps, cache, the density of noise levels."""
    c = trainer.config
    steps = plan.steps(c.train, global_batch)
    lines = [
        f"{trainer.pretrained.pipeline_name}, {c.method}: {c.model}",
        "",
        "bucket (FxHxW)     clips   samples   video tokens",
    ]
    for bucket, at in plan.buckets.items():
        b = Bucket.parse(bucket)
        lines.append(f"{bucket:16s} {len(set(at)):7d} {len(at):9d} {trainer.tokens(b.frames, b.height, b.width):14d}")
        if len(at) < global_batch:
            every = math.ceil(global_batch / len(at))
            lines.append(f"  fewer samples than a global batch of {global_batch}: served about once in {every} epochs")
    lines += listed("left out", plan.left_out) + listed("notes", plan.notes)
    together = c.memory.context_parallel
    ranks = "processes" if together == 1 else f"groups of {together} processes that share tokens"
    lines.append(
        f"global batch {global_batch} = {c.train.batch_size} x {global_batch // c.train.batch_size // trainer.world} "
        f"accumulation x {trainer.world} {ranks}; {plan.total / global_batch:.1f} steps per epoch; "
        f"{steps} steps = {steps * global_batch / plan.total:.1f} epochs"
    )
    lines.append(
        f"distribution: {sharding.described(trainer.accelerator)}; computes in {c.precision.weights}, "
        f"trains {c.precision.trainable} weights"
    )
    if (warmup := c.optimizer.warmup_steps) >= steps:
        lines.append(
            f"warning: optimizer.warmup_steps is {warmup} and the run has {steps} steps: the learning rate only "
            "rises, up to the last one; give fewer"
        )
    for kind, (lacking, of) in missing.items():
        lines.append(f"{kind}: {of - lacking} of {of} encoded already, {lacking} to encode")
    if c.data.caption_dropout and c.data.caption_technique != trainer.pretrained_caption_technique:
        lines.append(
            f"warning: data.caption_technique is {c.data.caption_technique}, but this model was pre-trained with "
            f"{trainer.pretrained_caption_technique}"
        )
    if fewer := [name for name in trainer.pretrained.names if DISTILLED.search(name)]:
        lines.append(
            f"warning: {fewer[0]} looks distilled to few steps, which training on real noise levels undoes: train the "
            "model that it was distilled from, and use the result with it"
        )
    b = plan.most_used
    lines += ["", *histogram(c.noise, trainer.noise_shift(trainer.tokens(b.frames, b.height, b.width)))]
    return "\n".join(lines)


def listed(title: str, rows: list[str]) -> list[str]:
    """The rows under a title with their count; named up to twenty."""
    if not rows:
        return []
    more = [f"  ... and {len(rows) - 20} more"] if len(rows) > 20 else []
    return [f"{title}: {len(rows)}", *(f"  {row}" for row in rows[:20]), *more]


def histogram(noise, own_shift: float, width: int = 40) -> list[str]:
    """The density of noise levels in ten bars, exact to 1/10000 of the samples."""
    shift = own_shift if noise.shift is None else noise.shift
    kind = dict(kind=noise.density, mean=noise.mean, std=noise.std, mode_scale=noise.mode_scale, shift=shift)
    u = (torch.arange(10000) + 0.5) / 10000
    levels = objectives.noise_levels(u, noise.min, noise.max, **kind)
    counts = Counter((levels * 10).long().clamp(max=9).tolist())
    most = max(counts.values())
    lines = [f"noise levels at the most used bucket: {noise.density}, shift {shift:.2f}, median {levels.median():.2f}"]
    for tenth in range(10):
        share = counts[tenth] / 10000
        lines.append(
            f"  {tenth / 10:.1f}-{(tenth + 1) / 10:.1f} {share:6.1%} {'#' * round(width * counts[tenth] / most)}"
        )
    return lines
