"""CogVideoX: diffusion with v-prediction at whole timesteps; versions 1.0 and 1.5, text- and image-to-video.

One transformer class; what its config says tells the variants apart:

* 2b: sine positions inside the network, any size. 5b: rotary positions. 5b-I2V: learned ones too, hence one size only.
* 1.5 (``patch_size_t`` 2): a token spans two latent frames, and an odd number of latent frames is padded in front.
* image-to-video (pipeline class, twice the input channels): the encoded first frame behind the noisy channels.

Letters: B batch, C channels, f h w latent frames and sides, F latent frames with padding, V noisy first frames.
The network takes and returns [B, F, C, h, w].
"""

import copy
import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from models import latents
from trainers import objectives as ob
from trainers.base import Trainer
from trainers.config import Config, CountOrZero, DataOptions, Fraction, NoiseOptions
from trainers.objectives import Batch
from trainers.precompute import code_digest
from trainers.pulse import seed_of

DPM = "CogVideoXDPMScheduler"


@dataclass
class CogVideoXConfig(Config):
    condition_variants: CountOrZero = 4
    """Image-to-video: noisy first frames encoded per clip, one of which a step picks; 0 takes the clean frame.

    The pre-training adds noise of deviation exp(N(-3, 0.5)) to the pixels, anew at every step (CogVideo, SAT code).
    """
    condition_dropout: Fraction = 0.05
    """Image-to-video: how often, per sample, the first frame is withheld; 0.05 is the pre-training's (CogVideo, SAT code)."""
    condition_scale: Literal["pipeline", "multiply", "one"] = "pipeline"
    """Image-to-video: factor of the encoded first frame. pipeline is what diffusers samples with, the VAE's
    scaling_factor, for version 1.5 its inverse; multiply is scaling_factor always, one is 1: see docs/models/cogvideox.md.
    """
    data: DataOptions = field(default_factory=lambda: DataOptions(caption_technique="zero"))
    """CogVideoX was pre-trained with zero (CogVideo, SAT code)."""
    noise: NoiseOptions = field(default_factory=lambda: NoiseOptions(density="uniform"))
    """CogVideoX was pre-trained with whole timesteps, all alike: level x 1000, rounded down."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.loss.weighting != "none":
            found.append(
                f"loss.weighting {self.loss.weighting} is made for flow models; CogVideoX's published weight, "
                "1 / (1 - alpha_bar) on the clean video, is what the plain loss on its velocity amounts to: use none"
            )
        return found


class CogVideoXTrainer(Trainer):
    Config = CogVideoXConfig
    config: CogVideoXConfig
    pipeline_classes = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    transformer_class = "CogVideoXTransformer3DModel"
    tiny = ("cogvideox-2b", "cogvideox-5b", "cogvideox-5b-i2v", "cogvideox-1.5", "cogvideox-1.5-i2v")
    lora_targets = ["to_q", "to_k", "to_v", "to_out.0"]
    # The VAE decodes latent frames in pairs after the first: with 4k + 1 frames and k odd it returns too few.
    frame_rule, side_rule = (8, 1), 16
    repeated_blocks = ["CogVideoXBlock"]
    pretrained_caption_technique = "zero"

    def __init__(self, config: CogVideoXConfig):
        super().__init__(config)
        self.rotary = lru_cache(maxsize=16)(self.make_rotary)

    # -- what the folder says ---------------------------------------------------------------------------------------

    @cached_property
    def net(self) -> SimpleNamespace:
        """The transformer's config."""
        assert self.pretrained.pipeline_name  # a folder of another model is told as that
        return self.pretrained.settings("transformer")

    @cached_property
    def vae(self) -> SimpleNamespace:
        """The VAE's config."""
        return self.pretrained.settings("vae")

    @property
    def sees_first_frame(self) -> bool:
        return self.pretrained.pipeline_name == "CogVideoXImageToVideoPipeline"

    @property
    def half_precision(self) -> tuple[str, ...]:
        """2b was trained in fp16, the others in bf16 (CogVideo, README)."""
        return ("bf16",) if self.net.use_rotary_positional_embeddings else ("bf16", "fp16")

    @property
    def sample_scheduler(self) -> str:
        """CogVideo's README and inference/cli_demo.py: DDIM for 2b, DPM for the others."""
        return DPM if self.net.use_rotary_positional_embeddings else "CogVideoXDDIMScheduler"

    @property
    def sample_defaults(self) -> dict:
        """The same script: dynamic guidance goes with the DPM scheduler."""
        dynamic = (self.config.validation.scheduler or self.sample_scheduler) == DPM
        return {"num_inference_steps": 50, "guidance_scale": 6.0, "use_dynamic_cfg": dynamic}

    @property
    def home_size(self) -> tuple[int, int, int]:
        """Frames, height and width that the network's own tables of positions are made for."""
        side = 2 ** (len(self.vae.block_out_channels) - 1)
        return self.net.sample_frames, self.net.sample_height * side, self.net.sample_width * side

    def refuse_bucket(self, frames: int, height: int, width: int) -> str | None:
        size, home = f"{frames}x{height}x{width}", self.home_size
        if self.net.use_learned_positional_embeddings and (frames, height, width) != home:
            return f"{size}: the positions of this model are learned for {'x'.join(map(str, home))} and no other size"
        if self.net.patch_size_t and (height > home[1] or width > home[2]):
            return f"{size}: the positions of this model end at a height of {home[1]} and a width of {home[2]}"
        if self.sees_first_frame and frames == 1:
            return f"{size}: after the frame that an image-to-video model is given, a still leaves nothing to predict"
        return None

    def example_size(self) -> tuple[int, int, int]:
        return self.home_size if self.net.use_learned_positional_embeddings else super().example_size()

    def unfit(self) -> list[str]:
        c, name, found = self.config, self.pretrained.pipeline_name, []
        if not self.sees_first_frame:
            for option in ("condition_variants", "condition_dropout", "condition_scale"):
                if getattr(c, option) != getattr(type(c)(), option):
                    found.append(f"{option} is for image-to-video models; {c.model} is text-to-video ({name})")
        channels = self.vae.latent_channels * (2 if self.sees_first_frame else 1)
        if self.net.in_channels != channels:
            found.append(
                f"{c.model} is a {name}, whose transformer takes {channels} channels, but this transformer takes "
                f"{self.net.in_channels}: model or components.transformer mixes text- and image-to-video"
            )
        predicts = self.pretrained.settings("scheduler").prediction_type
        if predicts != "v_prediction":
            found.append(f"{c.model}: its scheduler says prediction_type {predicts}; CogVideoX has v_prediction")
        return found

    def tokens(self, frames: int, height: int, width: int) -> int:
        f = (frames - 1) // self.vae.temporal_compression_ratio + 1
        return math.ceil(f / (self.net.patch_size_t or 1)) * (height // self.side_rule) * (width // self.side_rule)

    def text_facts(self) -> dict:
        return {"max_sequence_length": self.net.max_text_seq_length}

    def video_facts(self) -> dict:
        if not self.sees_first_frame:
            return {}
        code = code_digest(self.first_frames)
        return {"condition": [self.config.condition_variants, self.config.train.seed, code]}

    # -- the four answers -------------------------------------------------------------------------------------------

    def encode_video(self, pipe, pixels: Tensor) -> Batch:
        """moments [B, 2C, f, h, w] of the scaled latents; image-to-video also condition [B, V, 2C, h, w], unscaled."""
        moments = latents.encode_moments(pipe.vae, pixels)
        batch = {"moments": latents.normalize_moments(moments, scaling_factor=pipe.vae.config.scaling_factor)}
        if self.sees_first_frame:  # encoded by itself, as in sampling: in the clip's latents it has seen later frames
            frames = [latents.encode_moments(pipe.vae, self.first_frames(clip[:, :1])) for clip in pixels]
            batch["condition"] = torch.stack(frames)[:, :, :, 0]
        return batch

    def encode_text(self, pipe, captions: list[str], images=None) -> Batch:
        """text [B, 226, D]: CogVideoX has no mask, the padding is read too."""
        length = self.net.max_text_seq_length
        return {"text": pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=length)[0]}

    def drop_captions(self, batch: Batch) -> Batch:
        rows = self.uniform("caption") < self.config.data.caption_dropout
        if self.config.data.caption_technique == "zero":
            return ob.zero_rows(batch, ("text",), rows)
        return ob.swap_rows(batch, self.unconditional, rows)

    def loss(self, batch: Batch) -> Tensor:
        moments = batch["moments"]
        B, C, f, h, w = moments.shape[0], moments.shape[1] // 2, *moments.shape[2:]
        pad = -f % (self.net.patch_size_t or 1)
        x0 = latents.draw(moments, self.normal("posterior", (B, C, f, h, w))).transpose(1, 2)
        x0 = torch.cat([x0[:, :1]] * pad + [x0], dim=1)
        noise = self.normal("noise", tuple(x0.shape))
        level = self.noise_levels(math.prod(x0.shape[1:]) // C)
        t = (len(self.signal) * level).long()
        signal, spread = (ob.expand(table[t], x0).to(x0.device) for table in (self.signal, self.spread))

        fed = signal * x0 + spread * noise
        if self.sees_first_frame:
            fed = torch.cat([fed, self.condition(batch["condition"], x0)], dim=2)
        prediction = self.model(
            hidden_states=fed.to(self.dtype),
            encoder_hidden_states=batch["text"].to(self.dtype),
            timestep=t.to(x0.device),
            image_rotary_emb=self.rotary(pad + f, h, w, x0.device),
            ofs=fed.new_full((1,), 2.0, dtype=self.dtype) if self.net.ofs_embed_dim else None,
            return_dict=False,
        )[0]
        given = torch.arange(pad + f, device=x0.device) >= pad
        return self.reduce(prediction, signal * noise - spread * x0, level, given.view(1, -1, 1, 1, 1) if pad else None)

    # -- its parts --------------------------------------------------------------------------------------------------

    @cached_property
    def signal(self) -> Tensor:
        """sqrt(alpha_bar) of each timestep [1000], of the folder's own scheduler; on the CPU, as timesteps are."""
        return self.pretrained.component("scheduler").alphas_cumprod.double().sqrt().float()

    @cached_property
    def spread(self) -> Tensor:
        """sqrt(1 - alpha_bar); in float64, where 1 - alpha_bar keeps its digits at the first timesteps."""
        return (1 - self.pretrained.component("scheduler").alphas_cumprod.double()).sqrt().float()

    def make_rotary(self, F: int, h: int, w: int, device) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) [tokens, head size] as the pipeline makes them for F latent frames; None for 2b."""
        if not self.net.use_rotary_positional_embeddings:
            return None
        side = 2 ** (len(self.vae.block_out_channels) - 1)
        # All that the pipeline's function reads of a pipeline.
        reads = SimpleNamespace(vae_scale_factor_spatial=side, transformer=SimpleNamespace(config=self.net))
        make = self.pretrained.pipeline_type._prepare_rotary_positional_embeddings
        return make(reads, h * side, w * side, F, device)

    def first_frames(self, frame: Tensor) -> Tensor:
        """What conditions are encoded from, [V, 3, 1, H, W], of a first frame [3, 1, H, W]; noise keyed by its content."""
        levels = ((frame + 1) * 127.5).round().byte().cpu()
        content, frames = hashlib.sha256(levels.numpy().tobytes()).hexdigest(), []
        for k in range(self.config.condition_variants):
            draw = torch.Generator().manual_seed(seed_of(self.config.train.seed, "condition", content, k))
            deviation = torch.exp(0.5 * torch.randn((), generator=draw) - 3)
            frames.append(frame + (deviation * torch.randn(frame.shape, generator=draw)).to(frame))
        return torch.stack(frames or [frame])

    def condition(self, moments: Tensor, like: Tensor) -> Tensor:
        """[B, F, C, h, w] as `like`: one of the first frames `moments` [B, V, 2C, h, w], drawn, then zeros."""
        B, V = moments.shape[:2]
        picks = (self.uniform("variant") * V).long().clamp(max=V - 1)
        picked = torch.stack([row[k] for row, k in zip(moments, picks.tolist(), strict=True)])
        factor = {"multiply": self.vae.scaling_factor, "one": 1.0}.get(self.config.condition_scale)
        if factor is None:
            factor = self.vae.scaling_factor ** (-1 if self.vae.invert_scale_latents else 1)
        frame = factor * latents.draw(picked, self.normal("condition", (B, *like.shape[2:])))
        kept = self.uniform("condition_kept") >= self.config.condition_dropout
        out = torch.zeros_like(like)
        out[:, 0] = torch.where(ob.expand(kept, frame).to(frame.device), frame, 0.0)
        return out

    # -- sampling ---------------------------------------------------------------------------------------------------

    def conditions(self) -> dict[str, float]:
        return {"image" if self.sees_first_frame else "text": 1.0}

    def level_of(self, scheduler, i: int) -> float:
        return (int(scheduler.timesteps[i]) + 0.5) / scheduler.config.num_train_timesteps

    def sample(self, pipe, text: Batch, negative: Batch, **call):
        """Frames [H, W, 3] float in [0, 1] of one prompt. `text`, `negative`: rows [1, 226, D] of encode_text."""
        c, against = self.config, negative["text"]
        drops_to_zero = c.data.caption_dropout > 0 and c.data.caption_technique == "zero"
        if drops_to_zero and torch.equal(against, self.unconditional["text"]):
            against = torch.zeros_like(against)  # what this run teaches as no caption, not the encoding of ""
        # As the published scripts sample; other spacings may leave out the last timestep, which is pure noise.
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, timestep_spacing="trailing")
        if pipe.vae.dtype != self.dtype:  # this pipeline hands its VAE the network's dtype
            pipe.vae = copy.deepcopy(pipe.vae).to(self.dtype)
        embeds = {"prompt_embeds": text["text"].to(self.dtype), "negative_prompt_embeds": against.to(self.dtype)}
        return pipe(**embeds, output_type="np", **call).frames[0]
