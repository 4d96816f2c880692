"""Sample videos during training, as a user would sample them, without touching the training state.

Every rank samples its share of the prompts with the live network and a scheduler of its own. The results are files, so
ranks never wait for each other in here.
"""

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from data.video import read_frames, write_video
from trainers.prompts import Prompt
from trainers.sharding import shares_weights

# What can go wrong inside one sample: memory, sizes, a keyword of the wrong type, a full disk. Training outlives it.
SAMPLE_ERRORS = (RuntimeError, ValueError, TypeError, OSError, ArithmeticError)
PLAIN_RATE = 24.0  # frames per second of the file where neither prompt, trainer nor pipeline has a rate


@dataclass(frozen=True)
class Sample:
    """One planned sample: its file, or why there is none."""

    prompt: Prompt
    seed: int
    file: Path | None = None
    error: str = ""

    @property
    def caption(self) -> str:
        return f"{self.prompt.prompt} (seed {self.seed})"


class Validation:
    """Samples every prompt when it is due.

    Of the trainer it uses: config (output_dir, validation), accelerator, sample_defaults, prompt_rows(prompt) -> two
    batches [1, ...] (text, negative), pipeline(prompt) -> diffusers pipeline of the live network, a fresh scheduler
    and the VAE, and sample(pipe, text, negative, **call) -> frames [F, H, W, 3], uint8 or float in [0, 1].
    """

    def __init__(self, trainer, prompts: list[Prompt]):
        self.trainer, self.options = trainer, trainer.config.validation
        self.defaults = dict(trainer.sample_defaults)
        negative = self.defaults.pop("negative_prompt", "")
        if self.options.num_inference_steps:
            self.defaults["num_inference_steps"] = self.options.num_inference_steps
        self.prompts = [p if p.negative_prompt is not None else replace(p, negative_prompt=negative) for p in prompts]
        self.jobs = [(p, p.seed + k) for p in self.prompts for k in range(p.num_videos)]
        self.last_run: int | None = None
        self.facts: dict[bool, dict] = {}  # of the pipelines that sample with (True) and without an image

    def due(self, step: int, last: bool = False) -> bool:
        """Whether to sample after optimizer step `step` (0: before the first); never twice for one step."""
        if not self.prompts or step == self.last_run:
            return False
        if step == 0:
            return self.options.at_start or last
        return last or (self.options.every > 0 and step % self.options.every == 0)

    def run(
        self,
        step: int,
        pipeline: Callable[[Prompt], object] | None = None,
        folder: str | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> int:
        """Sample this rank's share into output_dir/samples/step-NNNNNN, or samples/`folder`; returns how many failed.

        A sample that fails is named, with its error, and left out. `pipeline` replaces trainer.pipeline. `stop` is
        asked between samples: True leaves out the rest. All ranks call run, then wait for each other, then the main
        one calls `results`.
        """
        accelerator, pipeline = self.trainer.accelerator, pipeline or self.trainer.pipeline
        self.last_run = step
        root = self._folder(step, folder)
        rank, world = accelerator.process_index, accelerator.num_processes
        mine = self.jobs[rank::world]
        # Ranks in a row that each forward pass needs sample each other's share too, in the same order and to the end.
        together = world if shares_weights(accelerator) else self.trainer.config.memory.context_parallel
        jobs = [job for at, job in enumerate(self.jobs) if at % world // together == rank // together]
        stop = stop if together == 1 else None
        failed = 0
        for prompt, seed in mine:  # of an earlier run of this step
            for old in self._outcomes(root, prompt, seed):
                old.unlink(missing_ok=True)
        with self._untouched():
            for prompt, seed in jobs:
                if stop and stop():
                    break
                error = self._attempt(pipeline, prompt, seed, root, (prompt, seed) in mine)
                if error:
                    failed += 1
                    print(f"validation: sample {prompt.name}-{seed} failed, training goes on: {error}", flush=True)
                    note = self._outcomes(root, prompt, seed)[1]
                    note.parent.mkdir(parents=True, exist_ok=True)
                    note.write_text(error + "\n", encoding="utf-8")
        return failed

    def results(
        self, step: int, pipeline: Callable[[Prompt], object] | None = None, folder: str | None = None
    ) -> list[Sample]:
        """What all ranks have made, by their files; writes samples.json with the settings. For the main process."""
        root, done, rows = self._folder(step, folder), [], []
        pipeline = pipeline or self.trainer.pipeline
        for prompt, seed in self.jobs:
            if (prompt.image is not None) not in self.facts:  # only other ranks have sampled with this kind
                with suppress(*SAMPLE_ERRORS):
                    self._note_facts(pipeline(prompt), prompt)
            file, note = self._outcomes(root, prompt, seed)
            if file.exists():
                sample = Sample(prompt, seed, file)
            else:
                reason = note.read_text(encoding="utf-8").strip() if note.exists() else "not sampled"
                sample = Sample(prompt, seed, error=reason)
            done.append(sample)
            rows.append(self._settings(sample))
        root.mkdir(parents=True, exist_ok=True)
        part = root / f"samples.json.{os.getpid()}.part"
        part.write_text(json.dumps({"step": step, "samples": rows}, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(part, root / "samples.json")
        good = sum(not sample.error for sample in done)
        print(f"validation at step {step}: {good} of {len(done)} samples in {root}", flush=True)
        return done

    # -- one sample -------------------------------------------------------------------------------------------------

    def _attempt(self, make_pipeline: Callable, prompt: Prompt, seed: int, root: Path, keep: bool) -> str:
        """Sample and (`keep`) write one file; returns what went wrong, or "". Frees what the sample held either way."""
        from accelerate.utils.memory import clear_device_cache

        try:
            self._sample(make_pipeline(prompt), prompt, seed, root, keep)
            return ""
        except SAMPLE_ERRORS as error:
            text = f"{type(error).__name__}: {error}".strip()
            if isinstance(error, torch.OutOfMemoryError):
                text += " (give the prompt fewer frames or a smaller size, or set memory.vae_tiling: on)"
            return text
        finally:
            clear_device_cache(garbage_collection=True)

    def _sample(self, pipe, prompt: Prompt, seed: int, root: Path, keep: bool) -> None:
        trainer, device = self.trainer, self.trainer.accelerator.device
        parameters = inspect.signature(type(pipe).__call__).parameters
        call = {**self.defaults, **prompt.keywords()}
        rate = call.get("frame_rate") or getattr(parameters.get("frame_rate"), "default", PLAIN_RATE)
        if "frame_rate" not in parameters:
            call.pop("frame_rate", None)
        if prompt.image is not None:
            call["image"] = self._first_frame(prompt)
        if not self.facts and trainer.accelerator.is_main_process:
            shown = {k: v for k, v in call.items() if k != "image"}
            print(f"validation: {len(self.jobs)} samples; the first with {type(pipe).__name__} {shown}", flush=True)
        self._note_facts(pipe, prompt)
        pipe.set_progress_bar_config(disable=True)
        begun = time.monotonic()
        modules = [m for m in pipe.components.values() if isinstance(m, nn.Module)]
        with evaluating(modules), visiting(pipe.vae, device), torch.no_grad():  # the network has its own autocast
            text, negative = ({k: v.to(device) for k, v in rows.items()} for rows in trainer.prompt_rows(prompt))
            # On the CPU, so that a seed means the same video on every kind of device.
            frames = trainer.sample(pipe, text, negative, **call, generator=torch.Generator("cpu").manual_seed(seed))
        if not keep:
            return
        frames = as_uint8(frames)
        file = self._outcomes(root, prompt, seed)[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_png(file, frames[0]) if file.suffix == ".png" else write_video(file, frames, rate)
        print(f"validation: {file} ({time.monotonic() - begun:.1f} s)", flush=True)

    def _first_frame(self, prompt: Prompt):
        """The image cut to the sample's size, as clips are; the pipeline alone would stretch it."""
        from PIL import Image

        frame = read_frames(Path(prompt.image), 0, 1, prompt.height, prompt.width)[:, 0]
        return Image.fromarray(frame.permute(1, 2, 0).numpy())

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """torch's global generators are afterwards as they were: validation cannot disturb training."""
        device = self.trainer.accelerator.device
        if device.type == "cpu":
            with torch.random.fork_rng(devices=[]):
                yield
        else:
            index = device.index if device.index is not None else torch.get_device_module(device).current_device()
            with torch.random.fork_rng(devices=[index], device_type=device.type):
                yield

    # -- its files --------------------------------------------------------------------------------------------------

    def _folder(self, step: int, folder: str | None) -> Path:
        return Path(self.trainer.config.output_dir) / "samples" / (folder or f"step-{step:06d}")

    @staticmethod
    def _outcomes(root: Path, prompt: Prompt, seed: int) -> tuple[Path, Path]:
        """(sample file, note of its failure): one of the two exists after a sample was tried."""
        stem = f"{prompt.name}-{seed}"
        return root / f"{stem}{'.png' if prompt.num_frames == 1 else '.mp4'}", root / f"{stem}.error.txt"

    def _note_facts(self, pipe, prompt: Prompt) -> None:
        """Keep for samples.json what only the pipeline knows, so that it need not be built again."""
        parameters = inspect.signature(type(pipe).__call__).parameters
        shown = ("num_inference_steps", "guidance_scale", "frame_rate")
        config = json.dumps(dict(pipe.scheduler.config), sort_keys=True, default=str)
        self.facts[prompt.image is not None] = {
            **{n: parameters[n].default for n in shown if n in parameters},
            "pipeline": type(pipe).__name__,
            "scheduler": type(pipe.scheduler).__name__,
            "scheduler_config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        }

    def _settings(self, sample: Sample) -> dict:
        prompt = sample.prompt
        return {
            "file": sample.file.name if sample.file else None,
            "error": sample.error or None,
            "prompt": prompt.prompt,
            "negative_prompt": prompt.negative_prompt,
            "image": prompt.image,
            "seed": sample.seed,
            **self.facts.get(prompt.image is not None, {}),
            **self.defaults,
            **prompt.keywords(),
        }


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """In eval mode; afterwards every submodule in its own former mode: a part may be in eval while others train."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """On `device` for a while, then back where it was: the VAE needs the room only when it works."""
    home = next(module.parameters()).device
    try:
        module.to(device)
        yield
    finally:
        module.to(home)


def as_uint8(frames) -> Tensor:
    """Frames [F, H, W, 3] (tensor or array, uint8 or float in [0, 1]) as uint8 on the CPU; ValueError for others."""
    frames = torch.as_tensor(frames).cpu()
    if frames.ndim != 4 or frames.shape[-1] != 3 or not (frames.dtype == torch.uint8 or frames.is_floating_point()):
        raise ValueError(f"sample must return uint8 or float frames [F, H, W, 3], not {frames.dtype} {[*frames.shape]}")
    if frames.dtype == torch.uint8:
        return frames
    if not torch.isfinite(frames).all():
        raise ValueError("the frames hold NaN or infinite values")
    return frames.float().clamp(0, 1).mul(255).round().to(torch.uint8)


def write_png(path: Path, frame: Tensor) -> None:
    """uint8 [H, W, 3] to a PNG file that appears whole."""
    from PIL import Image

    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    Image.fromarray(frame.numpy()).save(part, format="PNG")
    os.replace(part, path)
