"""What a model is asked, and what it may use to answer. trainers/base.py asks; trainers/<model>.py answers."""

from abc import ABC, abstractmethod
from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from models.comfy_names import SAME, Names
from trainers import objectives
from trainers.config import Config
from trainers.objectives import Batch
from trainers.plan import Picture, Text
from trainers.pretrained import Pretrained
from trainers.pulse import seed_of


class Contract(ABC):
    """One video model. A subclass names its classes and answers four questions.

    Letters: B batch, C channels, F H W frames and pixels, c f h w latent sizes, L tokens, D width.
    `Batch` is a dict of tensors, every value [B, ...]; the base adds `fps` [B], which stays on the CPU.
    """

    Config: ClassVar[type[Config]] = Config
    config: Config
    pretrained: Pretrained
    device: torch.device
    dtype: torch.dtype
    """What the network computes in."""
    model: torch.nn.Module
    """The network as it is called in training."""
    unconditional: Batch
    """The encoding of "", [1, ...]; absent where `sees_image`."""
    step: int
    slots: list[int]
    """Places of this micro-batch's rows in the global batch."""
    pipeline_classes: ClassVar[tuple[str, ...]]
    """diffusers pipeline classes whose folders this trainer takes, by name; the folder's own is used."""
    transformer_class: ClassVar[str]
    tiny: ClassVar[tuple[str, ...]] = ()
    """Its pipelines in models/tiny.py."""
    lora_targets: ClassVar[list[str]]
    frame_rule: ClassVar[tuple[int, int]]
    """(a, b): a clip may have a * k + b frames."""
    side_rule: ClassVar[int]
    """Height and width are multiples of this."""
    half_precision: ClassVar[tuple[str, ...]] = ("bf16",)
    """16-bit formats that the published weights were trained for."""
    pretrained_caption_technique: ClassVar[str] = "empty"
    trims: ClassVar[dict[str, str]] = {}
    """Sequence -> mask, for text whose masked rows the model ignores: stored and batched without them."""
    repeated_blocks: ClassVar[list[str]] = []
    """Class names of blocks that memory.compile compiles besides those that the network declares itself."""
    keep_precise: ClassVar[tuple[str, ...]] = ()
    """Linear layers that no option of precision makes less precise, besides norms, embeddings and the outermost
    projections (models/precision.py): regular expressions, searched in a module's name."""
    comfy_names: ClassVar[Names] = SAME
    """What ComfyUI calls the modules of the transformer: one of models.comfy_names, or a dict of that form."""
    sample_defaults: ClassVar[dict] = {}
    """Keywords of the pipeline's call that this model is really sampled with, where the call's own defaults are not."""
    sample_scheduler: str | None = None
    """diffusers scheduler class that this model is really sampled with, where its folder names another."""
    sees_image: bool = False
    """Whether the text encoder sees the first frame: then the unconditional row is per clip, see `texts`."""

    # -- the four questions -------------------------------------------------------------------------------------------

    @abstractmethod
    def encode_video(self, pipe, pixels: Tensor) -> Batch:
        """Pixels [B, 3, F, H, W] in [-1, 1] to cached tensors [B, ...]. Deterministic; needs no VAE later."""

    @abstractmethod
    def encode_text(self, pipe, captions: list[str], images: list | None = None) -> Batch:
        """Captions to cached tensors [B, ...] by the call that inference makes. Deterministic; also asked for [""].

        `images`: a PIL image for each caption where `sees_image`, else None.
        """

    @abstractmethod
    def drop_captions(self, batch: Batch) -> Batch:
        """The batch with some rows made unconditional, per sample. Runs at every step on cached tensors."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Per-sample loss [B] float32 of self.model. The only place that draws noise and time and calls the network."""

    @cached_property
    def net(self) -> SimpleNamespace:
        """The transformer's config, with its class's defaults for what an older file lacks."""
        return self.pretrained.settings("transformer")

    @cached_property
    def vae(self) -> SimpleNamespace:
        """The VAE's config, likewise."""
        return self.pretrained.settings("vae")

    # -- what a subclass may also say ---------------------------------------------------------------------------------

    def size_rules(self) -> tuple[tuple[int, int], int]:
        """(frame_rule, side_rule) of this very model folder."""
        return self.frame_rule, self.side_rule

    def refuse_bucket(self, frames: int, height: int, width: int) -> str | None:
        """Why this model cannot train at a size that its size_rules allow; None when it can."""
        return None

    def unfit(self) -> list[str]:
        """Options that do not fit the very model folder; told before anything loads."""
        return []

    def texts(self, caption: str, picture: Picture) -> dict[str, Text]:
        """Prefix of batch keys -> what is encoded as text for a sample. `picture`: its first frame."""
        return {"": Text(caption)}

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Video tokens of one sample, for logs and prices."""
        (a, b), side = self.size_rules()
        return ((frames - b) // a + 1) * (height // side) * (width // side)

    def text_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of a row of encode_text at its longest, to estimate memory by; None leaves activations out of it."""
        return None

    def caption_limits(self) -> dict[str, int]:
        """Tokenizer component -> tokens of a caption, special ones included, beyond which it is cut: for the plan."""
        return {}

    def text_facts(self) -> dict:
        """Settings besides weights and code that change what encode_text returns: they belong to the cache key."""
        return {}

    def video_facts(self) -> dict:
        """The same for encode_video."""
        return {}

    def noise_shift(self, tokens: int) -> float:
        """The model's own shift of noise levels for a sample of so many tokens (noise.shift: null)."""
        return 1.0

    def sample_class(self, call: dict) -> str:
        """The pipeline class that samples with these keywords."""
        return self.pretrained.pipeline_name

    @abstractmethod
    def sample(self, pipe, text: Batch, negative: Batch, **call):
        """Frames [F, H, W, 3] float in [0, 1]: one call of the pipeline with encoded prompts [1, ...]."""

    # -- how the conformance kit (trainers/check.py) lines the trainer up with its pipeline ---------------------------

    def conditions(self) -> dict[str, float]:
        """Kinds of sampling ("text", "image") -> the value of every coin under which `loss` conditions in that way."""
        return {"text": 1.0}

    def oracle_call(self) -> dict:
        """Keywords with which the pipeline's call conditions exactly as training does, such as no noise on images."""
        return {}

    def initial_noise(self, noise: Tensor, batch: Batch) -> Tensor:
        """What the pipeline must draw for its loop to begin at `noise`: some pipelines mix the image in."""
        return noise

    def final_latents(self, latents: Tensor, batch: Batch) -> Tensor:
        """Raw latents [B, C, f, h, w] of a clip as its pipeline would decode them: some put the image's into them."""
        return latents

    def example_size(self) -> tuple[int, int, int]:
        """A small (frames, height, width) that this model can train at."""
        (a, b), side = self.size_rules()
        return 2 * a + b, 2 * side, 3 * side

    def level_of(self, scheduler, i: int) -> float:
        """The noise level, as `noise_levels` would draw it, of the pipeline's i-th denoising step."""
        return float(scheduler.sigmas[i])

    # -- randomness: a function of (seed, step, slot, name) -----------------------------------------------------------

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers [B, ...] float32 on the compute device; each row has its own generator.

        The noise that diffusion adds is named "noise".
        """
        device = self.device
        draws = [torch.randn(shape[1:], generator=self.generator(s, name, device), device=device) for s in self.slots]
        return torch.stack(draws)

    def uniform(self, name: str) -> Tensor:
        """Uniform numbers [B] float32 in [0, 1) on the CPU, where looking at them costs no sync."""
        return torch.stack([torch.rand((), generator=self.generator(s, name, "cpu")) for s in self.slots])

    def generator(self, slot: int, name: str, device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed_of(self.config.train.seed, self.step, slot, name))

    # -- shared parts of a loss ---------------------------------------------------------------------------------------

    def noise_levels(self, tokens: int) -> Tensor:
        """Noise levels [B] on the CPU with the density of the noise options, shifted as the model wants it."""
        n = self.config.noise
        shift = self.noise_shift(tokens) if n.shift is None else n.shift
        kind = dict(kind=n.density, mean=n.mean, std=n.std, mode_scale=n.mode_scale, shift=shift)
        return objectives.noise_levels(self.uniform("noise_level"), n.min, n.max, **kind)

    def reduce(self, prediction: Tensor, target: Tensor, sigma_B: Tensor, mask: Tensor | None = None) -> Tensor:
        """Weighted loss of each sample [B]; `mask` is True where it counts."""
        o = self.config.loss
        loss = objectives.loss_per_sample(prediction, target, mask, o.type, o.huber_delta)
        if o.weighting == "none":
            return loss
        return loss * objectives.to_device_of(objectives.level_weight(sigma_B, o.weighting), loss)
