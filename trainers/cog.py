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
from models.comfy_names import COGVIDEOX
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
    """Image-to-video: noisy first frames encoded per clip, one of which each step picks; 0 takes the clean frame.
    The pre-training adds noise of deviation exp(N(-3, 0.5)) to the pixels, anew at every step (CogVideo, SAT code)."""
    condition_dropout: Fraction = 0.05
    """Image-to-video: how often, per sample, the first frame is withheld; 0.05 is the pre-training's (same code)."""
    condition_scale: Literal["pipeline", "multiply", "one"] = "pipeline"
    """Image-to-video: factor of the encoded first frame. pipeline is what diffusers samples with: the VAE's
    scaling_factor, and its inverse for 1.5; multiply is scaling_factor always, one is 1 (docs/models/cogvideox.md)."""
    data: DataOptions = field(default_factory=lambda: DataOptions(caption_technique="zero"))
    """CogVideoX was pre-trained with zero (CogVideo, SAT code)."""
    noise: NoiseOptions = field(default_factory=lambda: NoiseOptions(density="uniform"))
    """CogVideoX was pre-trained with whole timesteps, all alike: level x 1000, rounded down."""

    def problems(self) -> list[str]:
        weight = self.loss.weighting
        why = "the plain loss on the velocity is its published weighting already, 1 / (1 - alpha_bar): use none"
        return super().problems() + ([f"loss.weighting {weight}: for CogVideoX {why}"] if weight != "none" else [])


class CogVideoXTrainer(Trainer):
    Config = CogVideoXConfig
    config: CogVideoXConfig
    pipeline_classes = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    transformer_class = "CogVideoXTransformer3DModel"
    tiny = ("cogvideox-2b", "cogvideox-5b", "cogvideox-5b-i2v", "cogvideox-1.5", "cogvideox-1.5-i2v")
    lora_targets = ["to_q", "to_k", "to_v", "to_out.0"]
    # 4k + 1 is not enough: the VAE decodes latent frames in pairs after the first, an even number to a wrong length.
    frame_rule, side_rule = (8, 1), 16
    pixels = 8  # along the side of a latent
    repeated_blocks = ["CogVideoXBlock"]
    pretrained_caption_technique = "zero"
    comfy_names = COGVIDEOX

    def __init__(self, config: CogVideoXConfig):
        super().__init__(config)
        self.rotary = lru_cache(maxsize=16)(self.make_rotary)

    # -- what the folder says ---------------------------------------------------------------------------------------

    @property
    def from_image(self) -> bool:
        return self.pretrained.pipeline_name == "CogVideoXImageToVideoPipeline"

    @property
    def half_precision(self) -> tuple[str, ...]:
        """2b was trained in fp16, the others in bf16 (CogVideo, README)."""
        return ("bf16",) if self.net.use_rotary_positional_embeddings else ("bf16", "fp16")

    @property
    def sample_scheduler(self) -> str:
        """CogVideo, inference/cli_demo.py: DDIM for 2b, DPM for the others."""
        return DPM if self.net.use_rotary_positional_embeddings else "CogVideoXDDIMScheduler"

    @property
    def sample_defaults(self) -> dict:
        """The same script: dynamic guidance with the DPM scheduler, and only with it. 1.5 has 16 frames a second."""
        dynamic = (self.config.validation.scheduler or self.sample_scheduler) == DPM
        rate = 16.0 if self.net.patch_size_t else 8.0
        return {"num_inference_steps": 50, "guidance_scale": 6.0, "use_dynamic_cfg": dynamic, "frame_rate": rate}

    def refuse_bucket(self, frames: int, height: int, width: int) -> str | None:
        size, reason = f"{frames}x{height}x{width}", None
        home = (self.net.sample_frames, self.net.sample_height * self.pixels, self.net.sample_width * self.pixels)
        if self.net.use_learned_positional_embeddings and (frames, height, width) != home:
            reason = f"the positions of this model are learned for {'x'.join(map(str, home))} and no other size"
        elif self.net.patch_size_t and (height > home[1] or width > home[2]):
            reason = f"the positions of this model end at {home[1]} (height) x {home[2]} (width)"
        elif self.from_image and frames == 1:
            reason = "a still leaves an image-to-video model nothing to predict after the frame it is given"
        return reason and f"{size}: {reason}"

    def unfit(self) -> list[str]:
        c, name, found = self.config, self.pretrained.pipeline_name, []
        for option in ("condition_variants", "condition_dropout", "condition_scale"):
            if not self.from_image and getattr(c, option) != getattr(type(c)(), option):
                found.append(f"{option} is for image-to-video models, but {c.model} is text-to-video, a {name}")
        wanted, takes = self.vae.latent_channels * (2 if self.from_image else 1), self.net.in_channels
        if takes != wanted:
            found.append(f"{c.model} is a {name}, but its transformer takes {takes} channels, not {wanted}")
        predicts = self.pretrained.settings("scheduler").prediction_type
        if predicts != "v_prediction":
            found.append(f"{c.model}: its scheduler's prediction_type is {predicts}, CogVideoX's is v_prediction")
        return found

    def tokens(self, frames: int, height: int, width: int) -> int:
        f = (frames - 1) // self.vae.temporal_compression_ratio + 1
        return math.ceil(f / (self.net.patch_size_t or 1)) * (height // self.side_rule) * (width // self.side_rule)

    def text_facts(self) -> dict:
        return {"max_sequence_length": self.net.max_text_seq_length}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"text": (self.net.max_text_seq_length, self.net.text_embed_dim)}

    def caption_limits(self) -> dict[str, int]:
        return {"tokenizer": self.net.max_text_seq_length}

    def video_facts(self) -> dict:
        noise = [self.config.condition_variants, code_digest(self.first_frames)]
        return {"condition": noise} if self.from_image else {}

    # -- the four answers -------------------------------------------------------------------------------------------

    def encode_video(self, pipe, pixels: Tensor) -> Batch:
        """moments [B, 2C, f, h, w] of scaled latents; image-to-video also condition [B, V + 1, 2C, h, w], unscaled."""
        moments = latents.encode_moments(pipe.vae, pixels)
        batch = {"moments": latents.normalize_moments(moments, scaling_factor=pipe.vae.config.scaling_factor)}
        if self.from_image:  # encoded by itself, as in sampling: the clip's own first latent has seen later frames
            frames = [latents.encode_moments(pipe.vae, self.first_frames(clip[:, :1])) for clip in pixels]
            batch["condition"] = torch.stack(frames)[:, :, :, 0]
        return batch

    def encode_text(self, pipe, captions: list[str], images=None) -> Batch:
        """text [B, 226, D]. There is no mask: the network reads the padding too."""
        length = self.net.max_text_seq_length
        return {"text": pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=length)[0]}

    def drop_captions(self, batch: Batch) -> Batch:
        rows = self.uniform("caption") < self.config.data.caption_dropout
        if self.config.data.caption_technique == "zero":
            return ob.zero_rows(batch, ("text",), rows)
        return ob.swap_rows(batch, self.unconditional, rows)

    def loss(self, batch: Batch) -> Tensor:
        moments, p, p_t = batch["moments"], self.net.patch_size, self.net.patch_size_t or 1
        B, C, f, h, w = moments.shape[0], moments.shape[1] // 2, *moments.shape[2:]
        pad = -f % p_t
        x0 = latents.draw(moments, self.normal("posterior", (B, C, f, h, w))).transpose(1, 2)
        x0 = torch.cat([x0[:, :1]] * pad + [x0], dim=1)  # in front, where the pipeline cuts them off again
        noise = self.normal("noise", tuple(x0.shape))
        level = self.noise_levels((pad + f) // p_t * (h // p) * (w // p))
        t = (self.alphas.shape[1] * level).long()
        signal, spread = (ob.to_device_of(ob.expand(of_t, x0), x0) for of_t in self.alphas[:, t])

        fed = signal * x0 + spread * noise
        if self.from_image:
            fed = torch.cat([fed, self.condition(batch["condition"], x0)], dim=2)
        prediction = self.model(
            hidden_states=fed.to(self.dtype),
            encoder_hidden_states=batch["text"].to(self.dtype),
            timestep=ob.to_device_of(t, x0),
            image_rotary_emb=self.rotary(pad + f, h, w, x0.device),
            ofs=fed.new_full((1,), 2.0, dtype=self.dtype) if self.net.ofs_embed_dim else None,
            return_dict=False,
        )[0]
        counts = torch.arange(pad + f, device=x0.device).view(1, -1, 1, 1, 1) >= pad
        return self.reduce(prediction, signal * noise - spread * x0, level, counts if pad else None)

    # -- its parts --------------------------------------------------------------------------------------------------

    @cached_property
    def alphas(self) -> Tensor:
        """sqrt(alpha_bar) and sqrt(1 - alpha_bar) of the folder's own scheduler, [2, 1000] float32, on the CPU."""
        # float64: in float32 1 - alpha_bar loses three digits at the first timesteps
        alpha_bar = self.pretrained.component("scheduler").alphas_cumprod.double()
        return torch.stack([alpha_bar, 1 - alpha_bar]).sqrt().float()

    def make_rotary(self, F: int, h: int, w: int, device) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) [tokens, head size] by the pipeline's own function, for F latent frames; None for 2b."""
        if not self.net.use_rotary_positional_embeddings:
            return None
        # all that it reads of a pipeline
        reads = SimpleNamespace(vae_scale_factor_spatial=self.pixels, transformer=SimpleNamespace(config=self.net))
        make = self.pretrained.pipeline_type._prepare_rotary_positional_embeddings
        return make(reads, h * self.pixels, w * self.pixels, F, device)

    def first_frames(self, frame: Tensor) -> Tensor:
        """A first frame [3, 1, H, W] with noise that its content seeds, V times, and without: [V + 1, 3, 1, H, W]."""
        levels, frames = ((frame + 1) * 127.5).round().byte().cpu().numpy(), []
        content = hashlib.sha256(levels.tobytes()).hexdigest()
        for k in range(self.config.condition_variants):
            draw = torch.Generator().manual_seed(seed_of("condition", content, k))
            deviation = torch.exp(0.5 * torch.randn((), generator=draw) - 3)
            frames.append(frame + (deviation * torch.randn(frame.shape, generator=draw)).to(frame))
        return torch.stack([*frames, frame])

    def condition(self, moments: Tensor, like: Tensor) -> Tensor:
        """[B, F, C, h, w] as `like`: one of the first frames `moments` [B, V + 1, 2C, h, w], drawn, then zeros."""
        # A number below 1 picks one of V; 1 would pick the last, the clean one that sampling sees, and so does V = 0.
        picks = ((moments.shape[1] - 1) * self.uniform("variant")).long().tolist()
        picked = torch.stack([frames[k] for frames, k in zip(moments, picks, strict=True)])
        s = self.vae.scaling_factor
        factors = {"pipeline": 1 / s if self.vae.invert_scale_latents else s, "multiply": s, "one": 1.0}
        drawn = latents.draw(picked, self.normal("condition", tuple(like[:, 0].shape)))
        frame = factors[self.config.condition_scale] * drawn
        kept = self.uniform("condition_kept") >= self.config.condition_dropout
        out = torch.zeros_like(like)
        out[:, 0] = torch.where(ob.to_device_of(ob.expand(kept, frame), frame), frame, 0.0)
        return out

    def conditions(self) -> dict[str, float]:
        return {"image" if self.from_image else "text": 1.0}

    def level_of(self, scheduler, i: int) -> float:
        return (int(scheduler.timesteps[i]) + 0.5) / scheduler.config.num_train_timesteps

    def sample(self, pipe, text: Batch, negative: Batch, **call):
        """Frames [F, H, W, 3] float in [0, 1] of one prompt. `text`, `negative`: rows [1, 226, D] of encode_text."""
        d, against = self.config.data, negative["text"]
        zeros = d.caption_dropout > 0 and d.caption_technique == "zero"
        if zeros and torch.equal(against, self.unconditional["text"]):  # no negative prompt: as this run drops captions
            against = torch.zeros_like(against)
        # as the published scripts do; other spacings leave out the last timestep, the one of pure noise
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, timestep_spacing="trailing")
        if pipe.vae.dtype != self.dtype:  # this pipeline hands its VAE what the network returns
            pipe.vae = copy.deepcopy(pipe.vae).to(self.dtype)
        embeds = {"prompt_embeds": text["text"].to(self.dtype), "negative_prompt_embeds": against.to(self.dtype)}
        return pipe(**embeds, output_type="np", **call).frames[0]
