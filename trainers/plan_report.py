"""The plan as text: what is trained on, what is left out and why, what it costs in steps and on the disk."""

import math
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from data.places import is_url
from models import precision
from trainers import estimate, objectives, sharding
from trainers.plan import Plan, PlanError, counted, printable

DISTILLED = re.compile("distil|turbo|lightning|fasthunyuan", re.IGNORECASE)  # all that tells them is their names
NAMED = 20  # rows of a list that are printed


def report(
    plan: Plan, trainer, missing: dict[str, tuple[int, int]], global_batch: int, disk: "Disk | None" = None
) -> str:
    """The plan as text; `missing`: kind -> (how many the cache lacks, of), `disk`: what it will take."""
    c = trainer.config
    steps = plan.steps(c.train, global_batch)
    lines = [
        f"{trainer.pretrained.pipeline_name}, {c.method}: {c.model}",
        "",
        totals(plan),
        "",
        "bucket (FxHxW)     clips   windows   samples   steps/epoch   video tokens   share of tokens",
    ]
    for row in bucket_rows(plan, trainer.tokens, global_batch):
        bucket, clips, windows, samples, per_epoch, tokens, share = row
        lines.append(f"{bucket:16s} {clips:7d} {windows:9d} {samples:9d} {per_epoch:13.1f} {tokens:14d} {share:17.1%}")
        if samples < global_batch:
            every = math.ceil(global_batch / samples)
            lines.append(f"  fewer samples than a global batch of {global_batch}: served about once in {every} epochs")
    lines += listed("cannot be read, left out", plan.bad) + listed("left out", plan.left_out)
    lines += listed("notes", plan.notes) + captions(plan)
    if tokens_counted(c, missing):
        lines += cut_captions(plan, trainer)
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
    lines += [str(disk)] if disk else []
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


def totals(plan: Plan) -> str:
    """The line with the sums."""
    parts = [
        f"clips: {plan.clips} ({length(plan.seconds)})",
        f"windows: {len(plan.samples)} ({length(plan.seconds_used)})",
        f"samples per epoch: {plan.total}",
        f"left out: {len(plan.left_out)}",
        f"cannot be read: {len(plan.bad)}",
    ]
    return ", ".join(parts)


def length(seconds: float) -> str:
    return f"{seconds / 3600:.2f} hours" if seconds >= 360 else f"{seconds:.1f} s"


def bucket_rows(plan: Plan, tokens, global_batch: int) -> list[tuple]:
    """Of each bucket: (its name, clips, windows, samples per epoch, steps per epoch, video tokens of a sample, share of
    all tokens of an epoch). `tokens(frames, height, width)`: video tokens of a sample."""
    each = {bucket: tokens(*map(int, bucket.split("x"))) for bucket in plan.buckets}
    everything = sum(each[bucket] * len(at) for bucket, at in plan.buckets.items())
    rows = []
    for bucket, at in plan.buckets.items():
        windows = sorted(set(at))
        clips = len({(plan.samples[i].path, plan.samples[i].where) for i in windows})
        share = each[bucket] * len(at) / everything
        rows.append((bucket, clips, len(windows), len(at), len(at) / global_batch, each[bucket], share))
    return rows


def captions(plan: Plan) -> list[str]:
    """How many captions there are, how long, empty or shared they are."""
    owners: dict[str, set[str]] = {}
    for sample in plan.samples:
        for caption in sample.captions:
            owners.setdefault(caption, set()).add(sample.content)
    words = sorted(len(caption.split()) for caption in owners)
    lines = [f"captions: {len(owners)} different, {words[0]} to {words[-1]} words, median {median(words):g}"]
    if empty := sum(len(found) for caption, found in owners.items() if not caption.strip()):
        lines.append(f"  empty: of {counted(empty, 'clip')}")
    shared = {caption: len(found) for caption, found in owners.items() if len(found) > 1 and caption.strip()}
    if shared:
        most = max(shared, key=shared.get)
        lines.append(
            f"  used by more than one clip: {len(shared)}, such as {printable(most[:60])!r} by {shared[most]} clips"
        )
    return lines


def tokens_counted(config, missing: dict[str, tuple[int, int]]) -> bool:
    """Whether captions are counted in tokens: at stage plan, unless that downloads tokenizers; else before encoding."""
    if config.stage == "plan":
        return Path(config.model).exists()
    if config.data.precompute == "off":
        return True
    return missing.get("captions", (0, 0))[0] > 0 and config.stage != "train" and config.precompute_only != "video"


def cut_captions(plan: Plan, trainer) -> list[str]:
    """For each text encoder with a limit, how many captions are longer and lose their end. Loads the tokenizers."""
    different = list(dict.fromkeys(caption for sample in plan.samples for caption in sample.captions))
    lines = []
    for name, limit in trainer.caption_limits().items():
        tokenizer = trainer.pretrained.component(name)
        lengths = [len(ids) for ids in tokenizer(different, truncation=False, verbose=False).input_ids]
        cut = [(tokens, caption) for tokens, caption in zip(lengths, different, strict=True) if tokens > limit]
        line = f"  {name}: at most {max(lengths)} tokens of {limit}"
        if cut:
            tokens, caption = max(cut)
            line = f"  {name}: {len(cut)} of {len(different)} captions lose their end: over {limit} tokens, up to "
            line += f"{tokens} ({printable(caption[:60])!r} ...)"
        lines.append(line)
    return lines or ["  not counted: captions cut by a text encoder's limit (the model states no caption_limits)"]


def listed(title: str, rows: list[str]) -> list[str]:
    """The rows under a title with their count; named up to twenty, the others in plan.html."""
    if not rows:
        return []
    more = [f"  ... and {len(rows) - NAMED} more, in plan.html"] if len(rows) > NAMED else []
    return [f"{title}: {len(rows)}", *(f"  {printable(row)}" for row in rows[:NAMED]), *more]


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


# -- the disk ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """Bytes that encoding writes into `folder` (or to its URL), and those free there."""

    folder: Path | str
    clips: int
    captions: int
    """At most."""
    sure: int
    """Of captions: what they take for certain."""
    free: int | None
    """None: not known, at a URL."""

    def __str__(self) -> str:
        about = f"{size(self.clips)} for clips and at most {size(self.captions)} for captions"
        if self.free is None:
            return f"disk: {about} to write to {self.folder}; whether they fit there is not checked"
        return f"disk: {about} to write into the cache, {size(self.free)} free"

    def refuse(self) -> None:
        """Raises PlanError where what must be written does not fit."""
        if self.free is not None and self.clips + self.sure > self.free:
            raise PlanError(
                f"data.cache_dir {self.folder}: encoding needs {size(self.clips + self.sure)}, {size(self.free)} are "
                "free: free some, set data.cache_dir to a larger disk, or data.precompute: off (encodes in each step)"
            )


def size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def disk(trainer, missing: dict[str, tuple[int, int]]) -> Disk | None:
    """What encoding what is `missing` will write, or None where nothing is or a size is not known.

    Sizes are exact but for file headers (about 300 bytes each), and for captions of models that store them trimmed.
    """
    folder, shapes = trainer.config.cache_dir, trainer.text_shapes()
    if not any(lacking for lacking, _ in missing.values()) or not shapes:
        return None
    to_encode = Counter()
    if missing["clips"][0]:
        cache = trainer.encoders.cache
        items = trainer.encoders.video_items()
        absent = cache.absent(item.key for item in items)
        to_encode.update(item.group for item in items if item.key in absent)
    number = precision.DTYPES[trainer.config.data.cache_dtype].itemsize
    vae, clips = estimate.skeleton(trainer.pretrained, "vae") if to_encode else None, 0
    for bucket, count in to_encode.items():
        frames, height, width = map(int, bucket.split("x"))
        pixels = torch.zeros(1).expand(1, 3, frames, height, width)  # one number, seen as many
        try:
            rows = trainer.encode_video(SimpleNamespace(vae=vae), pixels)
        except (RuntimeError, TypeError):  # a model of one's own that looks at numbers: here are none
            return None
        clips += count * number * sum(rows[key].numel() for key in rows)
    masks = set(trainer.trims.values())
    row = sum(math.prod(shape) * (1 if key in masks else number) for key, shape in shapes.items())
    captions, trimmed = missing["captions"][0] * row, bool(trainer.trims)
    return Disk(folder, clips, captions, 0 if trimmed else captions, None if is_url(folder) else free_bytes(folder))


def free_bytes(folder: Path) -> int:
    """Free on the disk of the folder, which need not exist yet."""
    return shutil.disk_usage(
        next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    ).free
