"""LTX-Video: rectified flow on packed tokens, both published families, first-frame conditioning.

The families differ in what surrounds the transformer, and the model folder's own pipeline class says which one it is:

* ``LTXPipeline`` (0.9.0, 0.9.1): T5 without its mask, 128 tokens; coordinates scaled by (8 / fps, 32, 32).
* ``LTXConditionPipeline`` (0.9.5 and later): T5 with its mask, 256 tokens; causal coordinates in seconds and pixels.

Letters: B batch, C channels, f h w latent frames and sides, S = f * h * w video tokens, L text tokens.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models import latents
from models.comfy_names import LTX
from trainers import objectives as ob
from trainers.base import Trainer
from trainers.config import Config, Count, Fraction
from trainers.objectives import Batch


@dataclass
class LTXConfig(Config):
    first_frame_p: Fraction = 0.1
    """How often, per sample, the first frame is given clean (image-to-video); 0.1 is LTX-Video-Trainer's value."""
    max_sequence_length: Count | None = None
    """Text tokens. null: the pipeline's own length, 128 for 0.9.0 and 0.9.1, 256 for 0.9.5 and later."""


class LTXTrainer(Trainer):
    Config = LTXConfig
    config: LTXConfig
    pipeline_classes = ("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline")
    transformer_class = "LTXVideoTransformer3DModel"
    tiny = ("ltx", "ltx-condition")
    lora_targets = ["to_q", "to_k", "to_v", "to_out.0"]
    frame_rule, side_rule = (8, 1), 32
    trims = {"text": "text_mask"}
    keep_precise = ("caption_projection",)  # every token of text passes it; under 1 % of the weights
    comfy_names = LTX
    sample_defaults = {"num_inference_steps": 50, "guidance_scale": 3.0}

    def __init__(self, config: LTXConfig):
        super().__init__(config)
        self.grid = lru_cache(maxsize=16)(self.make_grid)  # which copies a constant to the device, and so waits for it

    # -- what the folder says ---------------------------------------------------------------------------------------

    @property
    def causal(self) -> bool:
        """True for the 0.9.5+ family."""
        return self.pretrained.pipeline_name == "LTXConditionPipeline"

    @property
    def compression(self) -> tuple[int, int]:
        """(temporal, spatial) size of a latent in frames and pixels, as AutoencoderKLLTXVideo has it."""
        c = self.vae
        steps = 2 ** sum(c.spatio_temporal_scaling)
        return (
            c.temporal_compression_ratio or c.patch_size_t * steps,
            c.spatial_compression_ratio or c.patch_size * steps,
        )

    def size_rules(self) -> tuple[tuple[int, int], int]:
        time, space = self.compression
        return (time, 1), space

    def text_facts(self) -> dict:
        return {"max_sequence_length": self.text_length}

    @property
    def text_length(self) -> int:
        return self.config.max_sequence_length or (256 if self.causal else 128)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"text": (self.text_length, self.net.caption_channels), "text_mask": (self.text_length,)}

    def caption_limits(self) -> dict[str, int]:
        return {"tokenizer": self.text_length}

    # -- the four answers -------------------------------------------------------------------------------------------

    def encode_video(self, pipe, pixels: Tensor) -> Batch:
        """moments [B, 2C, f, h, w]: mean and log-variance of the normalised latents."""
        vae = pipe.vae
        moments = latents.encode_moments(vae, pixels)
        return {
            "moments": latents.normalize_moments(moments, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        }

    def encode_text(self, pipe, captions: list[str], images=None) -> Batch:
        """text [B, L, D] and text_mask [B, L] bool, by the pipeline's own call (T5 without or with mask, see above)."""
        text, mask = pipe.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.text_length
        )[:2]
        return {"text": text, "text_mask": mask.bool()}

    def drop_captions(self, batch: Batch) -> Batch:
        rows = self.uniform("caption") < self.config.data.caption_dropout
        if self.config.data.caption_technique == "zero":  # the mask stays: LTX masks by a bias, all-zero masks nothing
            return ob.zero_rows(batch, ("text",), rows)
        return ob.swap_rows(batch, self.unconditional, rows)

    def loss(self, batch: Batch) -> Tensor:
        moments = batch["moments"]
        B, C, f, h, w = moments.shape[0], moments.shape[1] // 2, *moments.shape[2:]
        x0 = self.pack(latents.draw(moments, self.normal("posterior", (B, C, f, h, w))))
        noise = self.pack(self.normal("noise", (B, C, f, h, w)))
        sigma = self.noise_levels(f * h * w)

        # A still has nothing left to predict once its only frame is given.
        first = (self.uniform("first_frame") < self.config.first_frame_p) & (f > 1)
        given = first[:, None] & (
            torch.arange(f * h * w) < h * w
        )  # [B, S], on the CPU like every coin: no sync to look
        any_given = bool(first.any())
        level = sigma[:, None].where(~given, 0.0) if any_given else (sigma[:, None] if self.causal else sigma)
        level, given = ob.to_device_of(level, x0), ob.to_device_of(given, x0)

        noisy = ob.flow(x0, noise, ob.to_device_of(sigma, x0))
        prediction = self.model(
            hidden_states=torch.where(given[..., None], x0, noisy).to(self.dtype),
            encoder_hidden_states=batch["text"].to(self.dtype),
            encoder_attention_mask=batch["text_mask"],
            timestep=1000 * level,
            **self.coordinates(batch["fps"], f, h, w, x0),
            return_dict=False,
        )[0]
        return self.reduce(prediction, noise - x0, sigma, ~given[..., None] if any_given else None)

    # -- its parts --------------------------------------------------------------------------------------------------

    def noise_shift(self, tokens: int) -> float:
        """exp(mu), mu linear in the tokens through (1024, 0.95) and (4096, 2.05): the scheduler's own dynamic shift.

        mu is clamped at 2.05. Unclamped, 121x704x1216 (13376 tokens) has mu = 5.4 and a median level of 0.995: nearly
        every step would train on pure noise. 2.05 is also the most that the 0.9.0 scheduler was tuned with.
        """
        return math.exp(min(2.05, 0.95 + (tokens - 1024) * (2.05 - 0.95) / (4096 - 1024)))

    def pack(self, x: Tensor) -> Tensor:
        """[B, C, f, h, w] -> [B, S, C], order f h w."""
        return self.pretrained.pipeline_type._pack_latents(x, 1, 1)

    def make_grid(self, f: int, h: int, w: int, device) -> Tensor:
        """[1, 3, S]: each token's place in frames and pixels, by the pipeline's own functions."""
        pipe, (time, space) = self.pretrained.pipeline_type, self.compression
        return pipe._scale_video_ids(pipe._prepare_video_ids(1, f, h, w, device=device), space, time, 0, device).float()

    def coordinates(self, fps_B: Tensor, f: int, h: int, w: int, like: Tensor) -> dict:
        """The keywords that tell the transformer where its tokens are, at each clip's own frame rate."""
        time, space = self.compression
        if self.causal:
            coords = self.grid(f, h, w, like.device).repeat(len(fps_B), 1, 1)
            coords[:, 0] *= ob.to_device_of(1.0 / fps_B, like)[:, None]
            return {"video_coords": coords}
        rates = set(fps_B.tolist())  # fps stays on the CPU: no sync
        scale = time / rates.pop() if len(rates) == 1 else ob.to_device_of((time / fps_B).view(-1, 1, 1, 1, 1), like)
        return {"num_frames": f, "height": h, "width": w, "rope_interpolation_scale": (scale, space, space)}

    def conditions(self) -> dict[str, float]:
        return {"text": 1.0, "image": 0.0}

    def oracle_call(self) -> dict:
        return {"image_cond_noise_scale": 0.0} if self.causal else {}

    def sample_class(self, call: dict) -> str:
        """LTXPipeline has no image keyword; its image-to-video twin shares every component."""
        return "LTXImageToVideoPipeline" if "image" in call and not self.causal else self.pretrained.pipeline_name

    def sample(self, pipe, text: Batch, negative: Batch, **call):
        """Frames [F, H, W, 3] float in [0, 1] of one prompt. `text`, `negative`: rows [1, L, ...] of encode_text."""
        if (
            pipe.vae.config.timestep_conditioning
        ):  # the decoder wants a little noise (0.9.1 and later, LTX-Video configs)
            call = {"decode_timestep": 0.05, "decode_noise_scale": 0.025} | call
        rows = {}
        for prefix, batch in (("prompt", text), ("negative_prompt", negative)):
            rows[f"{prefix}_embeds"] = ob.pad_to(batch["text"], self.text_length).to(self.dtype)
            rows[f"{prefix}_attention_mask"] = ob.pad_to(batch["text_mask"], self.text_length)
        return pipe(**rows, output_type="np", **call).frames[0]
