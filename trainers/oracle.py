"""A pipeline and a trainer side by side: what each feeds the network, the trainer's target as its answer."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainers.contract import Contract
from trainers.objectives import Batch

IGNORED = ("attention_kwargs", "return_dict")
BLAME = {
    "timestep": "loss: the timestep's scale, type or shape, and 0 where tokens are given",
    "encoder_hidden_states": "encode_text: the call, its length, layers and template",
    "encoder_attention_mask": "encode_text: the mask; trims",
    "pooled_projections": "encode_text: the pooled text",
    "guidance": "loss: the guidance embedding (pipelines pass 1000 x the value)",
    "rope_interpolation_scale": "loss: time and space scale of the positions, frames per second",
    "video_coords": "loss: coordinates, the causal shift of the first frame, frames per second",
    "image_rotary_emb": "loss: rotary embeddings of the real (padded) size",
    "ofs": "loss: ofs",
}


class Oracle:
    """What the trainer's loss feeds the network at a level, and the target it would teach."""

    def __init__(self, trainer: Contract, batch: Batch, coin: float):
        self.trainer, self.batch, self.noise = trainer, batch, None
        self.draw = torch.Generator().manual_seed(3)
        size = len(batch["fps"])
        trainer.uniform = lambda name: torch.full((size,), coin)
        trainer.normal = self.normal
        trainer.model = self.network
        reduce = trainer.reduce

        def keep(prediction, target, level_B, mask=None):
            self.target, self.mask = target, torch.ones_like(target, dtype=torch.bool) if mask is None else mask
            return reduce(torch.zeros_like(target), target, level_B, mask)

        trainer.reduce = keep

    def normal(self, name: str, shape) -> Tensor:
        if name != "noise":
            return torch.zeros(shape)
        if self.noise is None:
            self.noise = torch.randn(shape, generator=self.draw)
        return self.noise

    def network(self, **keywords):
        self.keywords = {k: v for k, v in keywords.items() if k not in IGNORED}
        return (torch.zeros_like(keywords["hidden_states"]),)

    def ask(self, level: float) -> None:
        size = len(self.batch["fps"])
        self.trainer.noise_levels = lambda tokens: torch.full((size,), level)
        self.trainer.loss(dict(self.batch))

    def noise_as_fed(self) -> Tensor:
        """The noise in the layout of the target, which is affine in it: (target(noise) - target(0)) / coefficient."""
        self.ask(0.5)
        noise, answers = self.noise, []
        for self.noise in (noise, torch.zeros_like(noise), torch.ones_like(noise)):
            self.ask(0.5)
            answers.append(self.target)
        self.noise = noise
        return (answers[0] - answers[1]) / (answers[2] - answers[1])


def differences(pipeline: dict, trainer: dict, trimmed: bool) -> list[str]:
    """The keywords in which the two differ. `trimmed` text may end after the batch's longest row."""
    pipeline = {k: v for k, v in pipeline.items() if k not in IGNORED}
    trainer = dict(trainer)
    if trimmed and "encoder_attention_mask" in trainer:
        for side in (pipeline, trainer):
            side["encoder_hidden_states"], side["encoder_attention_mask"] = cut(side)
    return [k for k in sorted({*pipeline, *trainer}) if not same(pipeline.get(k), trainer.get(k))]


def cut(keywords: dict) -> tuple[Tensor, Tensor]:
    """Text and mask up to the longest row, zero where masked."""
    text, mask = keywords["encoder_hidden_states"], keywords["encoder_attention_mask"]
    length = int(mask.bool().any(0).nonzero().max()) + 1
    return text[:, :length] * mask[:, :length, None].to(text.dtype), mask[:, :length]


def same_text(pipeline: dict, trainer: dict) -> bool:
    """Whether the text is equal to the last bit."""
    if "encoder_attention_mask" in trainer:
        texts = [cut(side)[0] for side in (pipeline, trainer)]
    else:
        texts = [side["encoder_hidden_states"] for side in (pipeline, trainer)]
    return torch.equal(*texts)


def same(a, b) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        alike = a.shape == b.shape and a.is_floating_point() == b.is_floating_point()
        return alike and torch.allclose(a.double(), b.double(), atol=2e-4, rtol=1e-4)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return not torch.is_tensor(a) and not torch.is_tensor(b) and a == b


def blame(keyword: str, steps: list[int]) -> str:
    """The member to look at for a keyword that differs at these steps."""
    if keyword == "hidden_states":
        late = min(steps) > 0
        return "hidden_states differ " + (
            "after the first step: loss: the target's sign, scale or mask"
            if late
            else "from the start: loss: noising, packing, conditioning; encode_video: the condition"
        )
    return f"{keyword} differs: {BLAME.get(keyword, 'loss')}"


def decode(pipe, pixels: Tensor, trainer: Contract, batch: Batch) -> Tensor:
    """The clip through the VAE alone, [B, F, 3, H, W] in [0, 1]."""
    raw = trainer.final_latents(pipe.vae.encode(pixels).latent_dist.mean, batch)
    level = (torch.zeros(len(raw)),) if getattr(pipe.vae.config, "timestep_conditioning", False) else ()
    return pipe.video_processor.postprocess_video(pipe.vae.decode(raw, *level, return_dict=False)[0], output_type="pt")


@contextmanager
def means() -> Iterator[None]:
    """The VAE's posterior gives its mean: pipelines draw their condition from it."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    sample = DiagonalGaussianDistribution.sample
    DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mean
    try:
        yield
    finally:
        DiagonalGaussianDistribution.sample = sample


@contextmanager
def initial_noise(pipe, noise: Tensor, as_fed: Tensor) -> Iterator[None]:
    """The pipeline starts from this noise, in the network's layout or the trainer's, whichever it asks for."""
    module = sys.modules[type(pipe).__module__]
    draw = module.randn_tensor

    def fixed(shape, *arguments, **keywords):
        for known in (as_fed, noise):
            if tuple(shape) == tuple(known.shape):
                return known.clone()
        return draw(shape, *arguments, **keywords)

    module.randn_tensor = fixed
    try:
        yield
    finally:
        module.randn_tensor = draw


def holds_row(batched: Tensor, row: Tensor) -> bool:
    """Whether every row of batched [B, ...] is `row`, zero-padded at the end if it is a longer sequence."""
    if batched.ndim > 1 and batched.shape[1:] != row.shape:
        length = min(batched.shape[1], len(row))
        return not batched[:, length:].any() and bool((batched[:, :length] == row[:length]).all())
    return bool((batched == row).all())


def others(trainer: Contract, value: float) -> None:
    """Every coin but the one named caption comes up `value`."""
    draw = trainer.uniform
    trainer.uniform = lambda name: draw(name) if name == "caption" else torch.full((len(trainer.slots),), value)


def gradients(trainer: Contract, batch: Batch) -> tuple[dict[str, Tensor | None], float]:
    """Gradient of every trainable tensor, and the loss."""
    from models.adapters import trainable

    parameters = trainable(trainer.network)
    for parameter in parameters.values():
        parameter.grad = None
    trainer.slots = [0, 1]
    loss = trainer.loss(dict(batch)).mean()
    loss.backward()
    return {name: p.grad for name, p in parameters.items()}, loss.item()
