"""The encode stage: every clip and caption encoded once, by whichever rank has it in its share.

The functions here and data/fill.py are usable without a run (examples/precompute.py): give `fill` a cache, items and
a function that encodes. `Encoders` is the same for a run: the text encoder loads, encodes, is freed; then the VAE.
"""

import ast
import hashlib
import inspect
import signal
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.batches import collate, turn
from data.cache import Cache, entry_key
from data.fill import Item, ahead, fill, unique
from data.video import content_sha256, read_frames, to_pixels
from models import memory, quantize
from models.precision import DTYPES
from trainers.objectives import Batch
from trainers.plan import BLACK, Picture, PlanError, Sample, Text


def rows(batch: Batch, dtype: torch.dtype, trims: dict[str, str]) -> list[Batch]:
    """A batch of encodings [B, ...] as one dict per sample, on the CPU, as the cache stores and a batch collates them.

    Floating tensors become `dtype`. `trims` maps a sequence to its mask: both are cut after the last True of the mask's
    row, since the model gives the rest no weight.
    """
    batch = {k: v.detach().cpu() for k, v in batch.items()}
    out = []
    for i in range(len(next(iter(batch.values())))):
        row = {k: v[i] for k, v in batch.items()}
        for sequence, mask in trims.items():
            length = int(row[mask].nonzero().max()) + 1 if row[mask].any() else 1
            row[sequence], row[mask] = row[sequence][:length], row[mask][:length]
        # clone: a slice would keep, and pickle, the whole batch's storage
        out.append({k: (v.to(dtype) if v.is_floating_point() else v).clone() for k, v in row.items()})
    return out


def code_digest(function: Callable) -> str:
    """SHA-256 of a function's code without comments, layout, docstring: an edited encoder must not meet old entries."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = tree.body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body.pop(0)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def text_key(facts: dict, text: Text) -> str:
    """The cache key of a text encoded under `facts` (encoder weights, settings, code)."""
    seen = text.picture
    picture = {"picture": [seen.content, seen.start, seen.height, seen.width]} if seen else {}
    cut = cut_facts(seen.retime, seen.resize, seen.crop) if seen else {}
    return entry_key(kind="text", caption=text.caption, **picture, **cut, **facts)


def video_key(facts: dict, content: str, start: int, bucket: str, **cut) -> str:
    """The cache key of the frames from `start` of the clip with SHA-256 `content`, at `bucket`, under `facts`.

    `cut`: what `cut_facts` says.
    """
    return entry_key(kind="video", content=content, start=start, bucket=bucket, **cut, **facts)


def cut_facts(retime: float | None, resize: str, crop: tuple[float, float]) -> dict:
    """How a clip is retimed, scaled and cut, where that is not the default."""
    facts = {"retime": retime, "resize": resize, "crop": list(crop)}
    default = {"retime": None, "resize": "cover", "crop": [0.5, 0.5]}
    return {name: value for name, value in facts.items() if value != default[name]}


def to_device(batch: dict[str, Tensor], device, keep: tuple[str, ...] = ("fps",)) -> Batch:
    """The batch on `device` without waiting; the keys in `keep` stay on the CPU: looking at them costs no sync."""
    return {k: v if k in keep else v.to(device, non_blocking=True) for k, v in batch.items()}


def pinned(item: tuple) -> tuple:
    """An item of MicroBatches whose tensors a CUDA device copies without holding up the loop."""
    return *item[:-1], {name: tensor.pin_memory() for name, tensor in item[-1].items()}


@dataclass(frozen=True)
class CachedRows:
    """Reads one sample of a bucket from the cache, in any thread."""

    cache: Cache
    seed: int
    entries: dict[str, list["Entry"]]

    def __call__(self, bucket: str, index: int, epoch: int) -> Batch:
        entry = self.entries[bucket][index]
        crop = turn(bucket, index, epoch, self.seed, "crop", len(entry.videos))
        caption = turn(bucket, index, epoch, self.seed, "caption", len(entry.texts[crop]))
        row = self.cache.get(entry.videos[crop]) | facts_of(entry)
        for prefix, key in entry.texts[crop][caption].items():
            row |= {prefix + name: tensor for name, tensor in self.cache.get(key).items()}
        return row


@dataclass(frozen=True)
class Entry:
    """A sample's cache keys: of each crop, and of each crop's texts by caption and prefix."""

    videos: list[str]
    texts: list[list[dict[str, str]]]
    fps: float
    weight: float


@dataclass(frozen=True)
class RawRows:
    """Decodes one sample of a bucket, for encoding on the fly."""

    seed: int
    samples: dict[str, list[Sample]]

    def __call__(self, bucket: str, index: int, epoch: int) -> Batch:
        sample = self.samples[bucket][index]
        crop = turn(bucket, index, epoch, self.seed, "crop", len(sample.crops))
        caption = turn(bucket, index, epoch, self.seed, "caption", len(sample.captions))
        turns = torch.tensor([crop, caption])
        return {"pixels": frames_of(sample, crop), "turns": turns} | facts_of(sample)


def facts_of(sample: "Sample | Entry") -> Batch:
    """What a batch says of a sample beside its encodings."""
    return {name: torch.tensor(getattr(sample, name), dtype=torch.float32) for name in ("fps", "weight")}


def ignore_signals(worker: int) -> None:
    """For a loader worker: signals often go to the whole process group, and the rest of the step still needs it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def image_of(picture: Picture):
    """The picture as a PIL image, cut as clips are."""
    from PIL import Image

    if not picture.path:
        return Image.new("RGB", (picture.width, picture.height))
    size, cut = (picture.height, picture.width), (picture.retime, picture.resize, picture.crop)
    frame = read_frames(Path(picture.path), picture.start, 1, *size, *cut)[:, 0]
    return Image.fromarray(frame.permute(1, 2, 0).numpy())


def frames_of(sample: Sample, crop: int = 0) -> Tensor:
    """The uint8 frames [3, F, H, W] that a sample trains on in one of its crops."""
    size, cut = map(int, sample.bucket.split("x")), (sample.retime, sample.resize, sample.crops[crop])
    return read_frames(Path(sample.path), sample.start, *size, *cut)


class Encoders:
    """The encoders of a run: what keys their encodings, which are missing, and who makes them when."""

    def __init__(self, trainer, plan, prompts: Iterable):
        """`prompts`: the validation prompts, whose texts are encoded too."""
        self.trainer, self.plan, self.config = trainer, plan, trainer.config
        texts = [] if trainer.sees_image else [Text("")]
        texts += [text for prompt in prompts for text in self.prompt_texts(prompt)]
        texts += [
            text for sample in plan.samples for crop in self.sample_texts(sample) for t in crop for text in t.values()
        ]
        self.texts = list(dict.fromkeys(texts))
        self.cache = Cache(self.config.cache_dir)
        self.pipes: dict[str, object] = {}
        self.text = lru_cache(maxsize=1024)(self.read_text)

    # -- keys ------------------------------------------------------------------------------------------------------

    def facts(self, kind: str) -> dict:
        """Everything besides the content that an encoding depends on."""
        trainer, pretrained = self.trainer, self.trainer.pretrained
        names = self.names(kind)
        own = trainer.text_facts() if kind == "text" else trainer.video_facts()
        return {
            "pipeline": pretrained.pipeline_name,
            "weights": pretrained.fingerprint(names),
            "code": code_digest(trainer.encode_text if kind == "text" else trainer.encode_video),
            "dtype": [str(pretrained.dtype(name)) for name in names],
            "cache_dtype": self.config.data.cache_dtype,
            **({"quantize": quantised} if (quantised := self.quantised(names)) else {}),
            **own,
        }

    def quantised(self, names: Iterable[str]) -> dict[str, str]:
        """Those of the components that are quantised while they encode, and how."""
        own = self.config.components
        return {name: own[name].quantize for name in names if name in own and own[name].quantize}

    def names(self, kind: str) -> tuple[str, ...]:
        """The components that encode text, or video."""
        return self.trainer.pretrained.text_components if kind == "text" else ("vae",)

    @cached_property
    def text_facts(self) -> dict:
        return self.facts("text")

    @cached_property
    def video_facts(self) -> dict:
        return self.facts("video")

    def text_items(self) -> list[Item]:
        return [Item(text_key(self.text_facts, t), f"caption {t.caption[:80]!r}", t) for t in self.texts]

    def video_items(self) -> list[Item]:
        items = (
            Item(key, f"{s.path} at {s.bucket}", (s, crop), s.bucket)
            for s in self.plan.samples
            for crop, key in enumerate(self.video_keys(s))
        )
        return unique(items)

    def sample_texts(self, sample: Sample) -> list[list[dict[str, Text]]]:
        """For each crop and each caption of a sample: prefix -> what is encoded as text."""
        _, height, width = map(int, sample.bucket.split("x"))
        seen = (sample.path, sample.content, sample.start, height, width, sample.retime, sample.resize)
        pictures = [Picture(*seen, crop) for crop in sample.crops]
        return [[self.trainer.texts(caption, picture) for caption in sample.captions] for picture in pictures]

    def prompt_texts(self, prompt) -> tuple[Text, Text]:
        """The prompt and its negative as text. Pipelines whose text sees an image show the negative a black one."""
        if not self.trainer.sees_image:
            return Text(prompt.prompt), Text(prompt.negative_prompt)
        picture = Picture(str(prompt.image), content_sha256(prompt.image), 0, prompt.height, prompt.width)
        return Text(prompt.prompt, picture), Text(prompt.negative_prompt, BLACK)

    def video_keys(self, sample: Sample) -> list[str]:
        """Of each crop."""
        tiles = memory.tiling_facts(self.config.memory.vae_tiling, *map(int, sample.bucket.split("x")))
        what = (self.video_facts | tiles, sample.content, sample.start, sample.bucket)
        return [video_key(*what, **cut_facts(sample.retime, sample.resize, crop)) for crop in sample.crops]

    def missing(self) -> dict[str, tuple[int, int]]:
        """kind -> (how many the cache lacks, how many there are)."""
        kinds = {"captions": self.text_items(), "clips": self.video_items()}
        absent = self.cache.absent(item.key for items in kinds.values() for item in items)
        return {kind: (sum(item.key in absent for item in items), len(items)) for kind, items in kinds.items()}

    # -- the stage -------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Encodes what the cache lacks, all ranks their share: text first, then video, never both encoders at once."""
        if self.trainer.accelerator.is_main_process and (foreign := self.cache.foreign()):
            self.trainer.say(
                f"note: {self.cache.root} holds {len(foreign)} file{'s' * (len(foreign) > 1)} that no run wrote there, "
                f"such as {str(foreign[0]).removeprefix(f'{self.cache.root}/')}: not read, not removed"
            )
        only = self.config.precompute_only
        if only != "video":
            self.fill_kind("text", self.text_items(), self.encode_texts, read=None)
        if only != "text":
            self.fill_kind("video", self.video_items(), self.encode_pixels, read=lambda item: frames_of(*item))

    @property
    def model_note(self) -> str:
        return f"{self.trainer.pretrained.pipeline_name}, {self.config.model}"

    def fill_kind(self, kind: str, items: list[Item], encode: Callable, read: Callable | None) -> None:
        from tqdm import tqdm

        accelerator, data = self.trainer.accelerator, self.config.data
        for _ in range(8):  # until nobody finds a gap: another launch that fills the same cache may shift the shares
            absent = self.cache.absent(item.key for item in items)
            waiting = [item for item in items if item.key in absent]
            accelerator.wait_for_everyone()  # all ranks look before any of them writes
            if not accelerator.reduce(torch.tensor(len(waiting), device=accelerator.device), "sum").item():
                break
            mine = waiting[accelerator.process_index :: accelerator.num_processes]
            if mine:
                self.pipe(kind)  # before the bar, whose time left is about the encoding alone
            with tqdm(
                total=len(mine), desc=f"encoding {kind}", unit=kind, disable=not accelerator.is_main_process
            ) as bar:
                how = (data.encode_batch_size, read, data.num_workers, lambda _: bar.update())
                fill(self.cache, mine, encode, *how, note={"kind": kind, "model": self.model_note})
            accelerator.wait_for_everyone()
        else:
            raise PlanError(
                f"data.cache_dir {self.cache.root}: encodings vanish after they are written; is it shared by all "
                "machines, and does nothing delete files there?"
            )
        self.free()

    def require(self) -> None:
        """For --stage train: everything must be there already."""
        lacking = [f"{n} of {of} {kind}" for kind, (n, of) in self.missing().items() if n]
        if lacking:
            raise PlanError(
                f"{self.cache.root}: {' and '.join(lacking)} are not encoded for these options; run --stage precompute "
                "with the same options, or --stage all"
            )

    # -- encoding --------------------------------------------------------------------------------------------------

    def pipe(self, kind: str):
        """A pipeline that holds the text encoder, or the VAE, and nothing else; loaded at first use."""
        if kind not in self.pipes:
            pretrained = self.trainer.pretrained
            self.trainer.say(f"loading {', '.join(self.names(kind))}")
            parts = {name: pretrained.component(name) for name in self.names(kind)}
            for name, to in self.quantised(parts).items():
                self.trainer.say(f"{name}: {quantize.quantize(parts[name], to, self.trainer.device)}")
            self.pipes[kind] = pretrained.assemble(pretrained.pipeline_type, **parts).to(self.trainer.device)
        return self.pipes[kind]

    def free(self) -> None:
        """Gives the encoders' memory back."""
        if not self.pipes:
            return
        from accelerate.utils.memory import clear_device_cache

        self.pipes.clear()
        clear_device_cache(garbage_collection=True)

    @torch.no_grad()
    def encode_texts(self, texts: list[Text]) -> list[Batch]:
        images = [image_of(text.picture) for text in texts] if self.trainer.sees_image else None
        return self.rows(self.trainer.encode_text(self.pipe("text"), [text.caption for text in texts], images))

    @torch.no_grad()
    def encode_pixels(self, frames: list[Tensor]) -> list[Batch]:
        """`frames`: uint8 [3, F, H, W] each, of one bucket."""
        pipe = self.pipe("video")
        pixels = to_pixels(torch.stack(frames).to(self.trainer.device))
        memory.tile_vae(pipe.vae, self.config.memory.vae_tiling, *pixels.shape[-3:])
        return self.rows(self.trainer.encode_video(pipe, pixels))

    def rows(self, batch: Batch) -> list[Batch]:
        trims = {sequence: mask for sequence, mask in self.trainer.trims.items() if sequence in batch}
        return rows(batch, DTYPES[self.config.data.cache_dtype], trims)

    # -- reading ---------------------------------------------------------------------------------------------------

    def read_text(self, text: Text) -> Batch:
        """One encoded text, without batch dimension: from the cache, or encoded now (data.precompute: off)."""
        if self.config.data.precompute == "disk":
            return self.cache.get(text_key(self.text_facts, text))
        return self.encode_texts([text])[0]

    def reader(self) -> "CachedRows | RawRows":
        """What loader workers call for one sample of a bucket."""
        groups = {b: [self.plan.samples[i] for i in at] for b, at in self.plan.buckets.items()}
        seed = self.config.train.seed
        if self.config.data.precompute == "off":
            return RawRows(seed, groups)
        entries = {s: self.entry(s) for s in self.plan.samples}
        return CachedRows(self.cache, seed, {b: [entries[s] for s in samples] for b, samples in groups.items()})

    def entry(self, sample: Sample) -> Entry:
        """Where the cache has a sample's encodings."""
        keys = [
            [{prefix: text_key(self.text_facts, text) for prefix, text in texts.items()} for texts in crop]
            for crop in self.sample_texts(sample)
        ]
        return Entry(self.video_keys(sample), keys, sample.fps, sample.weight)

    def loader(self, dataset, order: range) -> Iterable:
        """The dataset's items in this order, read ahead by data.num_workers: threads where they come from the cache,
        processes where clips must be decoded. To get a batch from a process takes 3 ms, as long as reading it."""
        workers, pin = self.config.data.num_workers, self.trainer.device.type == "cuda"
        if self.config.data.precompute == "disk":
            return ahead(lambda n: pinned(dataset[n]) if pin else dataset[n], order, workers)
        return DataLoader(
            dataset,
            batch_size=None,  # the dataset makes whole micro-batches
            sampler=order,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=pin,
            worker_init_fn=ignore_signals,
        )

    def finish(self, batch: Batch, bucket: str, picks: list[int]) -> Batch:
        """A batch as the loader gives it, encoded if it is not yet."""
        if "pixels" not in batch:
            return batch
        size, frames = self.config.data.encode_batch_size, list(batch["pixels"])
        video = [row for i in range(0, len(frames), size) for row in self.encode_pixels(frames[i : i + size])]
        samples = [self.plan.samples[self.plan.buckets[bucket][i]] for i in picks]
        for row, sample, (crop, caption) in zip(video, samples, batch["turns"].tolist(), strict=True):
            for prefix, text in self.sample_texts(sample)[crop][caption].items():
                row |= {prefix + key: tensor for key, tensor in self.text(text).items()}
        return collate(video) | {name: batch[name] for name in ("fps", "weight")}
