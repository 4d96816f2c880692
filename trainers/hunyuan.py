"""HunyuanVideo: rectified flow on [B, C, f, h, w] latents, text-to-video and both kinds of image-to-video.

The transformer's own config says which kind it is (``image_condition_type``):

* none: text-to-video. Llama sees the caption in a template, CLIP gives a pooled vector; guidance is embedded.
* ``token_replace``: the first latent frame is the image's, clean, at timestep 0; guidance is embedded.
* ``latent_concat``: the image's latent and a mask are further channels; no guidance.

In both image kinds the text encoder (Llava) sees the first frame, so what stands for an absent caption is per clip.

Letters: B batch, C channels, f h w latent frames and sides, L text tokens, D width.
"""

from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from models import latents
from models.comfy_names import HUNYUAN
from models.load import ModelError
from trainers import objectives as ob
from trainers.base import Trainer
from trainers.config import Config, Fraction, NotNegative
from trainers.objectives import Batch
from trainers.plan import BLACK, Picture, Text

TEXT = ("text", "text_mask", "pooled")
TEXT_LENGTH = 256  # of the pipelines' calls, beside the template and the image


@dataclass
class HunyuanVideoConfig(Config):
    guidance: NotNegative = 1.0
    """Guidance (times 1000, as the pipeline has it) that the network is told in training, where it embeds one. 1.0: the
    target is the data's own velocity, unguided. Tencent's image-to-video LoRA trainer tells 6.0."""
    black_image_p: Fraction = 0.1
    """Image-to-video: how often, per sample, the text encoder is shown black in place of the first frame; 0.1 is the
    value of HunyuanVideo-I2V's training code."""


class HunyuanVideoTrainer(Trainer):
    Config = HunyuanVideoConfig
    config: HunyuanVideoConfig
    pipeline_classes = ("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline")
    transformer_class = "HunyuanVideoTransformer3DModel"
    tiny = ("hunyuan", "hunyuan-i2v", "hunyuan-i2v-concat")
    # A bare to_q would also adapt the blocks that refine the text.
    lora_targets = [r"(single_)?transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"]
    frame_rule, side_rule = (4, 1), 16
    trims = {"text": "text_mask"}
    comfy_names = HUNYUAN
    repeated_blocks = ["HunyuanVideoTokenReplaceTransformerBlock", "HunyuanVideoTokenReplaceSingleTransformerBlock"]

    # -- what the folder says -----------------------------------------------------------------------------------------

    @property
    def kind(self) -> str | None:
        """None (text-to-video), "token_replace" or "latent_concat"."""
        return self.net.image_condition_type

    @property
    def sees_image(self) -> bool:
        return self.kind is not None

    @property
    def interleave(self) -> int:
        """Every how many of the image's 576 tokens one is kept, as the image-to-video pipeline's call has it."""
        return 4 if self.kind == "token_replace" else 2

    def size_rules(self) -> tuple[tuple[int, int], int]:
        return (self.vae.temporal_compression_ratio, 1), self.vae.spatial_compression_ratio * self.net.patch_size

    def refuse_bucket(self, frames: int, height: int, width: int) -> str | None:
        why = (
            f"1x{height}x{width}: leave it out, an image-to-video model is given the first frame and learns the others"
        )
        return why if self.sees_image and frames == 1 else None

    def unfit(self) -> list[str]:
        found, defaults, name = [], HunyuanVideoConfig(), self.pretrained.pipeline_name
        if self.sees_image != ("Image" in name):
            found.append(
                f"{name} with a transformer whose image_condition_type is {self.kind}: text-to-video has none, "
                "image-to-video token_replace or latent_concat; take both from one model"
            )
        if not self.net.guidance_embeds and self.config.guidance != defaults.guidance:
            found.append(f"guidance {self.config.guidance}: this model embeds no guidance; leave the option out")
        if not self.sees_image and self.config.black_image_p != defaults.black_image_p:
            found.append(f"black_image_p {self.config.black_image_p}: this model takes no image; leave the option out")
        return found

    def text_facts(self) -> dict:
        return {"image_embed_interleave": self.interleave} if self.sees_image else {}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        length = TEXT_LENGTH + (576 // self.interleave if self.sees_image else 0)
        return {
            "text": (length, self.net.text_embed_dim),
            "text_mask": (length,),
            "pooled": (self.net.pooled_projection_dim,),
        }

    def caption_limits(self) -> dict[str, int]:
        return {"tokenizer": TEXT_LENGTH, "tokenizer_2": 77}

    # -- the four answers ---------------------------------------------------------------------------------------------

    def encode_video(self, pipe, pixels: Tensor) -> Batch:
        """moments [B, 2C, f, h, w] and, for image-to-video, condition [B, C, 1, h, w], the first frame's latent.

        The frame is encoded alone, as the pipeline does: the VAE's norms span time, so the clip's latents have another.
        """
        scale = pipe.vae.config.scaling_factor
        batch = {"moments": latents.normalize_moments(latents.encode_moments(pipe.vae, pixels), scaling_factor=scale)}
        if self.sees_image:
            batch["condition"] = latents.encode_moments(pipe.vae, pixels[:, :, :1]).chunk(2, dim=1)[0] * scale
        return batch

    def encode_text(self, pipe, captions: list[str], images=None) -> Batch:
        """text [B, L, D], text_mask [B, L] bool (True first, then False) and pooled [B, D], by the pipeline's own call.

        One caption at a time where an image is seen: of a batch with a caption that is cut the pipeline mixes up rows.
        """
        check_tokenizer(pipe)
        if self.sees_image:
            rows = [
                pipe.encode_prompt(
                    image=image,
                    prompt=[caption],
                    max_sequence_length=TEXT_LENGTH,
                    image_embed_interleave=self.interleave,
                )
                for caption, image in zip(captions, images, strict=True)
            ]
            text, pooled, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
        else:
            text, pooled, mask = pipe.encode_prompt(captions, max_sequence_length=TEXT_LENGTH)
        return {"text": text, "text_mask": mask.bool(), "pooled": pooled}

    def texts(self, caption: str, picture: Picture) -> dict[str, Text]:
        """With an image also what takes the text's place: black for the image, "" for the caption, where they may."""
        if not self.sees_image:
            return {"": Text(caption)}
        found = {"": Text(caption, picture)}
        if self.config.black_image_p:
            found["black/"] = Text(caption, BLACK)
        if self.config.data.caption_dropout and self.config.data.caption_technique == "empty":
            found["empty/"] = Text("", picture)
            if self.config.black_image_p:
                found["empty_black/"] = Text("", BLACK)
        return found

    def drop_captions(self, batch: Batch) -> Batch:
        """Image and caption are dropped independently, per sample. Text, mask and pooled vector go together.

        Zeros leave the mask: the transformer divides by its sum.
        """
        data = self.config.data
        empty = self.uniform("caption") < data.caption_dropout
        black = torch.zeros_like(empty)
        if self.sees_image:
            black = self.uniform("black_image") < self.config.black_image_p
            batch = take_rows(batch, "black/", black)
        if data.caption_technique == "zero":
            return ob.zero_rows(batch, ("text", "pooled"), empty)
        if not self.sees_image:
            return ob.swap_rows(batch, self.unconditional, empty)
        return take_rows(take_rows(batch, "empty/", empty & ~black), "empty_black/", empty & black)

    def loss(self, batch: Batch) -> Tensor:
        moments = batch["moments"]
        B, C, f, h, w = moments.shape[0], moments.shape[1] // 2, *moments.shape[2:]
        x0 = latents.draw(moments, self.normal("posterior", (B, C, f, h, w)))
        noise = self.normal("noise", (B, C, f, h, w))
        sigma = self.noise_levels(f * h * w // self.net.patch_size**2)
        level = ob.to_device_of(sigma, x0)
        guidance = torch.full((B,), self.config.guidance, dtype=self.dtype, device=x0.device) * 1000
        prediction = self.model(
            hidden_states=self.conditioned(ob.flow(x0, noise, level), batch.get("condition")).to(self.dtype),
            timestep=1000 * level,
            encoder_hidden_states=batch["text"].to(self.dtype),
            encoder_attention_mask=batch["text_mask"].to(self.dtype),
            pooled_projections=batch["pooled"].to(self.dtype),
            guidance=guidance if self.net.guidance_embeds else None,
            return_dict=False,
        )[0]
        counts = (torch.arange(f, device=x0.device) > 0).view(1, 1, f, 1, 1) if self.kind == "token_replace" else None
        return self.reduce(prediction, noise - x0, sigma, counts)

    # -- its parts ----------------------------------------------------------------------------------------------------

    def conditioned(self, noisy: Tensor, condition: Tensor | None) -> Tensor:
        """What the network is fed: the noisy latents with the image's latent [B, C, 1, h, w] in its place."""
        if self.kind is None:
            return noisy
        if self.kind == "token_replace":
            return torch.cat([condition.to(noisy), noisy[:, :, 1:]], dim=2)
        image, mask = torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])
        image[:, :, :1], mask[:, :, :1] = condition, 1
        return torch.cat([noisy, image, mask], dim=1)

    def noise_shift(self, tokens: int) -> float:
        """7 at every size: the flow shift of HunyuanVideo's training and of its published scheduler."""
        return 7.0

    def conditions(self) -> dict[str, float]:
        return {"image": 1.0} if self.sees_image else {"text": 1.0}

    def initial_noise(self, noise: Tensor, batch: Batch) -> Tensor:
        """The image-to-video pipeline begins at 0.999 noise + 0.001 image."""
        return (noise - 0.001 * batch["condition"]) / 0.999 if self.sees_image else noise

    def final_latents(self, latents: Tensor, batch: Batch) -> Tensor:
        image = batch["condition"] / self.vae.scaling_factor if self.kind == "token_replace" else latents[:, :, :1]
        return torch.cat([image, latents[:, :, 1:]], dim=2)

    @property
    def sample_defaults(self) -> dict:
        """Embedded guidance 6, of HunyuanVideo's and HunyuanVideo-I2V's sampling scripts."""
        return {"num_inference_steps": 50} | ({"guidance_scale": 6.0} if self.net.guidance_embeds else {})

    def sample(self, pipe, text: Batch, negative: Batch, **call):
        """Frames [F, H, W, 3] float in [0, 1] of one prompt; latent_concat models give back four frames less."""
        names = {"text": "prompt_embeds", "text_mask": "prompt_attention_mask", "pooled": "pooled_prompt_embeds"}
        rows = {names[key]: text[key].to(self.dtype) for key in TEXT}
        rows |= {f"negative_{names[key]}": negative[key].to(self.dtype) for key in TEXT}
        return pipe(**rows, output_type="np", **call).frames[0]


def take_rows(batch: Batch, prefix: str, rows_B: Tensor) -> Batch:
    """The batch with the text of the rows where rows_B (on the CPU) is True taken from the keys with this prefix."""
    return ob.swap_rows(batch, {key: batch[prefix + key] for key in TEXT}, rows_B) if rows_B.any() else batch


def check_tokenizer(pipe) -> None:
    """Raises ModelError where the template's beginning is not as many tokens as the pipeline cuts off the text.

    A Llama-3 tokenizer loaded by its class name in transformers 5 splits words otherwise and drops spaces.
    """
    template = signature(type(pipe).encode_prompt).parameters["prompt_template"].default
    found = len(pipe.tokenizer(template["template"].split("{}")[0]).input_ids)
    if found != template["crop_start"] or pipe.tokenizer.padding_side != "right":
        raise ModelError(
            f"tokenizer: the prompt template begins with {found} tokens, padded {pipe.tokenizer.padding_side}; the "
            f"pipeline cuts off {template['crop_start']}, padded right, and would mangle every caption. Take the "
            "tokenizer that the model was published with (components.tokenizer.id), loadable by AutoTokenizer"
        )
