"""The conformance kit: proves a Trainer subclass against the diffusers pipeline that it must agree with, on CPU.

    python -m trainers.check trainers.ltx:LTXTrainer [--model FOLDER]

Without a folder it checks the tiny pipelines that the class names. Every line of the table is one property; a line that
does not hold names the member at fault and what to look at, and the exit code is 1.

The heart is an oracle: the real pipeline runs with its transformer replaced by the trainer's own target. Each call is
compared with what the trainer's `loss` feeds the network at that level, and the clip must come back.
"""

import argparse
import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.batches import collate
from data.cache import Cache, entry_key
from data.video import read_frames, to_pixels, write_video
from trainers import launch
from trainers.base import Trainer
from trainers.objectives import Batch
from trainers.oracle import (
    BLAME,
    Oracle,
    blame,
    decode,
    differences,
    gradients,
    holds_row,
    initial_noise,
    means,
    others,
    same_text,
)
from trainers.parsing import parse
from trainers.plan import BLACK, Picture, Text
from trainers.precompute import image_of, rows

STEPS, FPS = 4, 30.0
CAPTIONS = ["a cat", "the dog on a monkey"]  # of unlike lengths, so that a batch of two is padded


@dataclass(frozen=True)
class Result:
    """One property: whether it holds, the figure that says so, and what to look at if it does not."""

    name: str
    holds: bool
    figure: str
    hint: str = ""


class Kit:
    """A trainer class on one model folder, with small clips, in fp32 on the CPU. Each `check_*` yields Results."""

    def __init__(self, kind: type[Trainer], model: Path, root: Path):
        self.kind, self.model, self.root = kind, Path(model), Path(root)
        (self.root / "clips").mkdir(parents=True, exist_ok=True)
        probe = self.trainer("size")
        self.size = probe.example_size()
        for i, caption in enumerate(CAPTIONS):
            draw = torch.Generator().manual_seed(i)
            small = torch.rand(1, 3, max(2, self.size[0] // 4), 4, 4, generator=draw)
            clip = torch.nn.functional.interpolate(small, self.size, mode="trilinear")[0]
            write_video(self.root / "clips" / f"{i}.mp4", (clip.permute(1, 2, 3, 0) * 255).byte().numpy(), FPS)
            (self.root / "clips" / f"{i}.txt").write_text(caption, encoding="utf-8")
        self.pixels = self.read_clips()

    # -- material ----------------------------------------------------------------------------------------------------

    def trainer(self, name: str, **options) -> Trainer:
        """A trainer that writes to root/name; options in dotted names with __ for the dot."""
        size = "x".join(map(str, getattr(self, "size", (1, 32, 32))))
        given = {
            "model": self.model,
            "data.train": self.root / "clips",
            "data.buckets": size,
            "data.cache_dtype": "fp32",
            "data.num_workers": 0,
            "output_dir": self.root / name,
            "precision.weights": "fp32",
            "lora.rank": 8,
            "lora.alpha": 16,
            "train.steps": 4,
            "train.batch_size": 2,
            "train.log_every": 1,
            "optimizer.learning_rate": 1e-2,
            "optimizer.warmup_steps": 0,
        } | {key.replace("__", "."): value for key, value in options.items()}
        return self.kind(parse(self.kind.Config, [w for k, v in given.items() for w in (f"--{k}", str(v))]))

    def read_clips(self) -> Tensor:
        """[2, 3, F, H, W] in [-1, 1]; both begin with the same frame, which one image can then stand for."""
        clips = torch.stack([read_frames(self.root / "clips" / f"{i}.mp4", 0, *self.size) for i in range(2)])
        clips[1, :, 0] = clips[0, :, 0]
        return to_pixels(clips)

    def first_image(self):
        from PIL import Image

        return Image.fromarray(((self.pixels[0, :, 0].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy())

    def pipeline(self):
        """The whole pipeline of the folder, as a user loads it."""
        pretrained = self.trainer("pipeline").pretrained
        names = (*pretrained.text_components, "transformer", "vae", "scheduler")
        pipe = pretrained.assemble(pretrained.pipeline_type, **{name: pretrained.component(name) for name in names})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @torch.no_grad()
    def text_rows(self, trainer: Trainer, pipe, captions: list[str]) -> list[Batch]:
        """Per caption its encoded rows under every prefix that the trainer's `texts` names."""
        picture = Picture("first", "", 0, *self.size[1:])
        out: list[Batch] = [{} for _ in captions]
        for row, caption in zip(out, captions, strict=True):
            for prefix, text in trainer.texts(caption, picture).items():
                row |= {prefix + key: tensor for key, tensor in self.encode_text(trainer, pipe, text).items()}
        return out

    @torch.no_grad()
    def encode_text(self, trainer: Trainer, pipe, text: Text) -> Batch:
        images = None
        if trainer.sees_image:
            images = [image_of(BLACK) if text.picture == BLACK else self.first_image()]
        return rows(trainer.encode_text(pipe, [text.caption], images), torch.float32, trainer.trims)[0]

    @torch.no_grad()
    def batch(self, trainer: Trainer, pipe, size: int = 2) -> Batch:
        """A batch as training has it: encoded, cut into rows, collated."""
        video = rows(trainer.encode_video(pipe, self.pixels[:size]), torch.float32, {})
        text = self.text_rows(trainer, pipe, CAPTIONS[:size])
        trainer.slots = list(range(size))
        if not trainer.sees_image:
            trainer.unconditional = collate([self.encode_text(trainer, pipe, Text(""))])
        return collate([v | t for v, t in zip(video, text, strict=True)]) | {"fps": torch.full((size,), FPS)}

    # -- encoding ----------------------------------------------------------------------------------------------------

    def check_encoding(self) -> Iterator[Result]:
        """Encodings are deterministic, and come out of the cache as they went in."""
        trainer, pipe = self.trainer("encoding"), self.pipeline()
        first, second = self.batch(trainer, pipe), self.batch(trainer, pipe)
        unlike = [k for k in first if not torch.equal(first[k], second[k])]
        yield Result(
            "encoded twice, equal",
            not unlike,
            f"{len(first)} tensors",
            f"encode_video or encode_text: {', '.join(unlike)} differ; no randomness here, it is frozen in the cache",
        )
        cache = Cache(self.root / "cache")
        row = {k: v[0] for k, v in first.items()}
        cache.put(entry_key(check="round trip"), row, {"source": "check"})
        back = cache.get(entry_key(check="round trip"))
        broken = [k for k in row if not torch.equal(row[k], back[k])]
        yield Result("cache round trip", not broken, f"{sum(v.nbytes for v in row.values())} bytes", ", ".join(broken))

    # -- the oracle --------------------------------------------------------------------------------------------------

    def check_oracle(self) -> Iterator[Result]:
        """The pipeline and the trainer feed the network alike, and the trainer's target leads back to the clip."""
        for name, coin in self.trainer("oracle").conditions().items():
            for size in (1, 2):
                yield from self.round_trip(name, coin, size)

    @torch.no_grad()
    def round_trip(self, name: str, coin: float, size: int) -> Iterator[Result]:
        trainer, pipe = self.trainer("oracle"), self.pipeline()
        call, image = dict(trainer.oracle_call()), {}
        if name == "image":
            kind = trainer.pretrained.type_named(trainer.sample_class({"image": True}))
            one = "conditions" in inspect.signature(kind.__call__).parameters  # reads a list as several conditions
            image = {"image": self.first_image() if one else [self.first_image()] * size}
            pipe = pipe if isinstance(pipe, kind) else kind(**pipe.components)
            pipe.set_progress_bar_config(disable=True)
        with means():
            oracle = Oracle(trainer, self.batch(trainer, pipe, size), coin)
            parameters = inspect.signature(type(pipe).__call__).parameters
            frames, height, width = self.size
            call |= {"height": height, "width": width, "num_frames": frames, "num_inference_steps": STEPS} | image
            call |= {"prompt": CAPTIONS[:size], "guidance_scale": 1.0, "frame_rate": FPS, "output_type": "pt"}
            call = {k: v for k, v in call.items() if k in parameters}
            differ: dict[str, list[int]] = {}
            text: list[bool] = []

            def network(**keywords):
                step = network.step
                network.step += 1
                oracle.ask(trainer.level_of(pipe.scheduler, step))
                if step and not oracle.mask.all():  # what does not count was answered with rubbish, and carried on
                    own = oracle.keywords["hidden_states"]
                    keywords["hidden_states"] = torch.where(oracle.mask, keywords["hidden_states"], own)
                for key in differences(keywords, oracle.keywords, bool(trainer.trims)):
                    differ.setdefault(key, []).append(step)
                text.append(same_text(keywords, oracle.keywords))
                return (torch.where(oracle.mask, oracle.target, 7.0),)

            network.step = 0
            pipe.transformer.forward = network
            as_fed = oracle.noise_as_fed()
            noises = (trainer.initial_noise(noise, oracle.batch) for noise in (oracle.noise, as_fed))
            with initial_noise(pipe, *noises):
                got = pipe(**call).frames
            decoded = decode(pipe, self.pixels[:size], trainer, oracle.batch)
        label = f"{name}-to-video, batch of {size}"
        yield Result(
            f"{label}: what the network is fed",
            not differ,
            f"{len(oracle.keywords)} keywords x {STEPS} steps",
            "; ".join(blame(key, steps) for key, steps in differ.items()),
        )
        if size == 1:  # texts encoded together may round otherwise
            yield Result(
                f"{label}: text is the pipeline's own",
                all(text),
                "bit for bit",
                "encode_text: " + BLAME["encoder_hidden_states"],
            )
        error = (got - decoded[:, -got.shape[1] :]).abs().max().item()
        yield Result(
            f"{label}: the clip comes back",
            error < 5e-3,
            f"largest error {error:.1e}",
            "encode_video: normalisation and layout, or where loss pads (the pipeline undoes something else)"
            if not differ
            else "see the keywords above, then the target's sign and scale in loss",
        )

    # -- the loss ----------------------------------------------------------------------------------------------------

    def check_loss(self) -> Iterator[Result]:
        """Per-sample, finite, and each sample's own affair."""
        trainer, batch = self.built("loss")
        with torch.no_grad():
            whole = trainer.loss(batch)
            single = []
            for i in range(2):
                trainer.slots = [i]
                single.append(trainer.loss({k: v[i : i + 1] for k, v in batch.items()}))
        shape = tuple(whole.shape) == (2,) and whole.dtype == torch.float32
        yield Result(
            "loss is [B] float32", shape, f"{list(whole.shape)} {whole.dtype}", "loss: return self.reduce(...)"
        )
        yield Result(
            "loss is finite", bool(whole.isfinite().all()), f"{whole.tolist()}", "loss; an empty mask gives 0/0"
        )
        if shape:
            apart = (whole - torch.cat(single)).abs().max().item()
            yield Result(
                "a batch of two is two batches of one",
                apart < 1e-4,
                f"largest difference {apart:.1e}",
                "loss: something is drawn or averaged over the whole batch; use self.normal and self.uniform",
            )

    def check_dropout(self) -> Iterator[Result]:
        """Caption dropout 0 changes nothing, 1 leaves the unconditional row alone, p is a coin per sample."""
        trainer, batch = self.built("dropout", data__caption_dropout=0.5)
        pipe = self.pipeline()
        plain = {k for k in self.text_rows(trainer, pipe, CAPTIONS[:1])[0] if "/" not in k}
        others(trainer, 1.0)
        results = {}
        for p in (0.0, 1.0, 0.5):
            trainer.config.data.caption_dropout = p
            trainer.slots = [0, 1]
            results[p] = trainer.drop_captions(dict(batch))
        kept = [k for k in plain if not torch.equal(results[0.0][k], batch[k])]
        yield Result("caption dropout 0 is the identity", not kept, ", ".join(sorted(plain)), "drop_captions")
        empty = Text("", Picture("first") if trainer.sees_image else None)
        row = self.encode_text(trainer, pipe, empty)
        if trainer.config.data.caption_technique == "zero":
            wrong = [k for k in plain if batch[k].is_floating_point() and results[1.0][k].any()]
        else:
            wrong = [k for k in plain if not holds_row(results[1.0][k], row[k])]
        yield Result(
            "caption dropout 1 feeds the unconditional row",
            not wrong,
            trainer.config.data.caption_technique,
            f"drop_captions: {', '.join(wrong)}; every key of the text belongs together, masks too",
        )
        whole, dropped = 0, 0
        for step in range(200):
            trainer.step = step
            after = trainer.drop_captions(dict(batch))
            key = max(plain, key=lambda k: batch[k][0].numel())
            changed = [not holds_row(after[key][i : i + 1], batch[key][i]) for i in range(2)]
            dropped += sum(changed)
            whole += changed[0] != changed[1]
        yield Result(
            "caption dropout 0.5 is a coin per sample",
            0.4 < dropped / 400 < 0.6 and whole > 60,
            f"{dropped / 400:.0%} of samples, {whole} of 200 batches mixed",
            "drop_captions: one draw per sample with self.uniform, not one per batch",
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def check_gradients(self) -> Iterator[Result]:
        """Every trainable tensor learns; activation checkpointing and bf16 change nothing that matters."""
        trainer, batch = self.built("gradients", memory__checkpointing="none")
        plain, loss = gradients(trainer, batch)
        dead = [
            name
            for name, gradient in plain.items()
            if gradient is None or not gradient.isfinite().all() or not gradient.any()
        ]
        yield Result(
            "gradients reach every trainable tensor",
            not dead,
            f"{len(plain)} tensors",
            f"lora_targets: {', '.join(dead[:3])} get none; the network does not use them",
        )
        trainer.network.enable_gradient_checkpointing()
        again, _ = gradients(trainer, batch)
        apart = max(((plain[n] - again[n]).abs().max().item() for n in plain if n not in dead), default=0.0)
        yield Result("activation checkpointing agrees", apart < 1e-5, f"largest difference {apart:.1e}", "the network")
        trainer.network.disable_gradient_checkpointing()
        trainer.dtype = torch.bfloat16
        for parameter in trainer.network.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            _, low = gradients(trainer, batch)
        yield Result(
            "bf16 agrees",
            abs(low - loss) < 0.05 * loss,
            f"loss {loss:.4f} in fp32, {low:.4f} in bf16",
            "loss: timesteps, noise levels and the loss itself stay in float32",
        )

    def check_overfit(self) -> Iterator[Result]:
        """One batch, seen again and again with the same noise, is learned."""
        trainer, batch = self.built("overfit", lora__rank=16, lora__alpha=16)
        losses = []
        for _ in range(40):
            loss = trainer.loss(batch).mean()
            losses.append(loss.item())
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        yield Result(
            "one batch is overfitted",
            losses[-1] < 0.9 * losses[0],
            f"loss {losses[0]:.4f} to {losses[-1]:.4f} in 40 steps",
            "loss: does the target depend on what the network is fed? lora_targets: do they matter?",
        )

    def check_runs(self) -> Iterator[Result]:
        """Whole runs: the export loads in the plain pipeline, and resuming equals not stopping."""
        whole = self.trainer("whole", train__steps=4)
        whole.run()
        pipe = self.pipeline()
        if (whole.output_dir / "pytorch_lora_weights.safetensors").exists():
            pipe.load_lora_weights(whole.output_dir)
        batch = self.batch(whole, pipe)
        whole.slots, whole.step = [0, 1], 0
        with torch.no_grad():
            trained = whole.loss(batch)
            whole.model = pipe.transformer
            loaded = whole.loss(batch)
        apart = (trained - loaded).abs().max().item()
        yield Result(
            "the saved LoRA loads in the pipeline",
            apart < 1e-5,
            f"largest difference {apart:.1e}",
            "pipeline_classes, lora_targets: the file must mean to the pipeline what it means here",
        )
        half = self.trainer("half", train__steps=4, checkpoint__every=2)
        half.run()
        for gone in ("checkpoint-4", "pytorch_lora_weights.safetensors"):
            (half.output_dir / gone).rename(half.output_dir / f"old-{gone}")
        rest = self.trainer("half", train__steps=4, checkpoint__resume="latest")
        rest.run()
        unlike = sum(not torch.equal(a, b) for a, b in zip(whole.parameters, rest.parameters, strict=True))
        yield Result(
            "resume equals the unbroken run",
            not unlike,
            f"{len(whole.parameters)} tensors, bit for bit",
            "loss or drop_captions: state or randomness besides self.normal and self.uniform",
        )

    def built(self, name: str, **options) -> tuple[Trainer, Batch]:
        """A trainer with its network, whose adapter is not at its start (there lora_B is 0), and a batch."""
        trainer = self.trainer(name, **options)
        batch = self.batch(trainer, self.pipeline())
        trainer.build()
        for i, parameter in enumerate(trainer.parameters):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        return trainer, batch


# -- all of it ----------------------------------------------------------------------------------------------------


CHECKS: tuple[Callable[[Kit], Iterator[Result]], ...] = (
    Kit.check_encoding,
    Kit.check_oracle,
    Kit.check_loss,
    Kit.check_dropout,
    Kit.check_gradients,
    Kit.check_overfit,
    Kit.check_runs,
)


def check(kind: type[Trainer], model: Path | None = None) -> list[Result]:
    """All results for a trainer class on a model folder; without one, on each of its tiny pipelines."""
    from models.tiny import build

    found = []
    with tempfile.TemporaryDirectory() as root:
        names = [None] if model else list(kind.tiny)
        for name in names:
            folder = model or build(name, Path(root) / name / "model")
            print(f"\n{kind.__name__} on {name or model}\n", flush=True)
            kit = Kit(kind, folder, Path(root) / (name or "model") / "work")
            for one in CHECKS:
                with launch.aside() as table:
                    for result in one(kit):
                        found.append(result)
                        print(f"{'ok   ' if result.holds else 'FAULT'} {result.name:58s} {result.figure}", file=table)
                        if not result.holds:
                            print(f"      look at {result.hint}", file=table)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trainers.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("trainer", type=launch.named, help="module:Class, such as trainers.ltx:LTXTrainer")
    parser.add_argument("--model", type=Path, help="folder in diffusers layout; default: the class's tiny pipelines")
    options = parser.parse_args(argv)
    launch.quiet()
    try:
        found = check(options.trainer, options.model)
    except launch.USER_ERRORS as error:
        raise SystemExit(f"error: {error}") from None
    faults = sum(not result.holds for result in found)
    print(f"\n{len(found) - faults} of {len(found)} hold" + (f", {faults} do not" if faults else ""))
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
