"""Tiny random pipelines in the published folder layout, for tests and the demo: no network, well under a second each.

`python -m models.tiny ltx FOLDER` writes one. They keep what the code depends on (class names, sub-folders, config
keys, compression ratios, scheduler rules) and shrink everything else.
"""

import string
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from models import tiny_text

TEXT_DIM = 32
LATENT_CHANNELS = 16
WORDS = [
    "a",
    "the",
    "of",
    "in",
    "on",
    "and",
    "with",
    "dog",
    "cat",
    "video",
    "bunny",
    "forest",
    "dance",
    "style",
    "worst",
    "quality",
    "blurry",
]


def t5_tokenizer():
    """A real T5 tokenizer whose pieces are single characters and a few words; every printable ASCII text encodes."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(c, -6.0) for c in string.ascii_letters + string.digits + string.punctuation]
    pieces += [("▁" + word, -4.0) for word in WORDS]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def t5_encoder(vocab_size: int):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=vocab_size,
        d_model=TEXT_DIM,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5EncoderModel(config).eval()  # built from a config it would be in train mode, with dropout 0.1


def _ltx_vae(timestep_conditioning: bool):
    from diffusers import AutoencoderKLLTXVideo

    vae = AutoencoderKLLTXVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        timestep_conditioning=timestep_conditioning,
        patch_size=4,  # with three halvings: 32 x 32 pixels and 8 frames per latent, as the published one
        patch_size_t=1,
    ).eval()
    with torch.no_grad():
        # Far from the identity, or code that forgets to normalise would pass every test.
        vae.latents_mean.copy_(torch.linspace(-0.3, 0.3, LATENT_CHANNELS))
        vae.latents_std.copy_(torch.linspace(0.5, 1.5, LATENT_CHANNELS))
        # The last channel is the log-variance of all: a narrow posterior, as a trained VAE has.
        vae.encoder.conv_out.conv.bias[-1] = -5.0
    return vae


def _heads(width: int, least: int, size: int, multiple: int) -> tuple[int, int]:
    """(number, size) of attention heads that fill `width`: `least` of them, or as many as keep them to about `size`.

    That is the published size: wide models are slow with larger ones. Each is a `multiple` wide, else ValueError.
    """
    count = max(least, width // size)
    if width % (count * multiple):
        unit = count * multiple
        raise ValueError(f"width {width} must be a multiple of {unit}: {count} heads of a multiple of {multiple}")
    return count, width // count


def _ltx_parts(width: int, layers: int, conditioned_decoder: bool) -> dict:
    from diffusers import LTXVideoTransformer3DModel

    heads, size = _heads(width, 4, 64, 2)
    tokenizer = t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=size,
        cross_attention_dim=width,
        num_layers=layers,
        caption_channels=TEXT_DIM,
    ).eval()
    return {
        "tokenizer": tokenizer,
        "text_encoder": t5_encoder(len(tokenizer)),
        "vae": _ltx_vae(conditioned_decoder),
        "transformer": transformer,
    }


def ltx(width: int = 32, layers: int = 2):
    """LTX-Video 0.9.0 and 0.9.1: plain text-to-video pipeline, flow shift chosen from the number of tokens."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return LTXPipeline(scheduler=scheduler, **_ltx_parts(width, layers, conditioned_decoder=False))


def ltx_condition(width: int = 32, layers: int = 2):
    """LTX-Video 0.9.5 and later: condition pipeline, fixed shift 1, a decoder that takes a timestep and noise."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXConditionPipeline

    return LTXConditionPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), **_ltx_parts(width, layers, conditioned_decoder=True)
    )


def _cog_vae(scaling_factor: float, invert_scale_latents: bool):
    from diffusers import AutoencoderKLCogVideoX

    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,  # three halvings: 8 x 8 pixels per latent, as the published one
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=2,
        scaling_factor=scaling_factor,
        invert_scale_latents=invert_scale_latents,
    ).eval()
    with torch.no_grad():
        vae.encoder.conv_out.conv.bias[LATENT_CHANNELS:] = -5.0  # the log-variances: a narrow posterior
    return vae


def cogvideox(
    width: int = 32,
    layers: int = 2,
    positions: str = "sincos",
    images: bool = False,
    patch_size_t: int | None = None,
):
    """CogVideoX as its variants differ: `positions` sincos (2b), rotary (5b, 1.5) or rotary and learned (5b-I2V).

    `images`: image-to-video. `patch_size_t` 2: version 1.5.
    """
    from diffusers import (
        CogVideoXDDIMScheduler,
        CogVideoXImageToVideoPipeline,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    heads, size = _heads(width, 2, 64, 16)
    rotary, learned = positions != "sincos", positions == "learned"
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=size,
        in_channels=LATENT_CHANNELS * (2 if images else 1),
        out_channels=LATENT_CHANNELS,
        time_embed_dim=16,
        ofs_embed_dim=16 if images and patch_size_t else None,
        text_embed_dim=TEXT_DIM,
        num_layers=layers,
        # The published 1.0 is at home at 49x480x720, 1.5 at any size up to 2400 x 2400.
        sample_frames=17,
        sample_height=32 if patch_size_t else 4,
        sample_width=32 if patch_size_t else 6,
        patch_size_t=patch_size_t,
        patch_bias=not patch_size_t,
        use_rotary_positional_embeddings=rotary,
        use_learned_positional_embeddings=learned,
    ).eval()
    if learned:
        transformer.patch_embed.pos_embedding.normal_(std=0.2)  # it starts out as the sincos table of other variants
    scheduler = CogVideoXDDIMScheduler(
        snr_shift_scale=1.0 if rotary else 3.0,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        clip_sample=False,
        timestep_spacing="trailing",
    )
    tokenizer = t5_tokenizer()
    pipeline = CogVideoXImageToVideoPipeline if images else CogVideoXPipeline
    return pipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(len(tokenizer)),
        vae=_cog_vae(0.7 if rotary else 1.15258426, invert_scale_latents=bool(patch_size_t)),
        transformer=transformer,
        scheduler=scheduler,
    )


def hunyuan(width: int = 32, layers: int = 1, images: str | None = None):
    """HunyuanVideo with `layers` of each kind; `images`: the published image-to-video kinds, "token_replace" or
    "latent_concat"."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoImageToVideoPipeline,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPImageProcessor

    if width < 16:
        raise ValueError(f"width {width} must be 16 or more: two heads with three rotary axes")
    heads, head = _heads(width, 2, 128, 4)
    side = head * 3 // 16 * 2  # rotary sizes of the three axes are even and fill the head
    concat, pooled_dim = images == "latent_concat", 8
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=2 * LATENT_CHANNELS + 1 if concat else LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=head,
        num_layers=layers,
        num_single_layers=layers,
        num_refiner_layers=1,
        guidance_embeds=not concat,
        text_embed_dim=TEXT_DIM,
        pooled_projection_dim=pooled_dim,
        rope_axes_dim=(head - 2 * side, side, side),
        image_condition_type=images,
    ).eval()
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    ).eval()
    with torch.no_grad():
        vae.quant_conv.bias[LATENT_CHANNELS:] -= 5.0  # the log-variances: a narrow posterior, as a trained VAE has
    tokenizer, tokenizer_2 = tiny_text.llama_tokenizer(), tiny_text.clip_tokenizer()
    parts = {"image_processor": CLIPImageProcessor(size=336, crop_size=336)} if images else {}
    return (HunyuanVideoImageToVideoPipeline if images else HunyuanVideoPipeline)(
        tokenizer=tokenizer,
        text_encoder=(tiny_text.llava if images else tiny_text.llama)(tokenizer, TEXT_DIM),
        tokenizer_2=tokenizer_2,
        text_encoder_2=tiny_text.clip(tokenizer_2, pooled_dim),
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        **parts,
    )


BUILDERS: dict[str, Callable] = {
    "ltx": ltx,
    "ltx-condition": ltx_condition,
    "cogvideox-2b": cogvideox,
    "cogvideox-5b": partial(cogvideox, positions="rotary"),
    "cogvideox-5b-i2v": partial(cogvideox, positions="learned", images=True),
    "cogvideox-1.5": partial(cogvideox, positions="rotary", patch_size_t=2),
    "cogvideox-1.5-i2v": partial(cogvideox, positions="rotary", images=True, patch_size_t=2),
    "hunyuan": hunyuan,
    "hunyuan-i2v": partial(hunyuan, images="token_replace"),
    "hunyuan-i2v-concat": partial(hunyuan, images="latent_concat"),
}


def build(name: str, folder: str | Path, width: int = 32, layers: int | None = None) -> Path:
    """Write the tiny pipeline `name` (float32) to `folder` in the published layout and return that folder.

    The same weights every time; torch's global generator is left as it was. `width` is the transformer's inner size,
    `layers` how many blocks it has (None: the builder's one or two).
    """
    if name not in BUILDERS:
        raise ValueError(f"no tiny pipeline {name!r}; there are: {', '.join(BUILDERS)}")
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU's only: torch.manual_seed would also re-seed the GPUs
        pipeline = BUILDERS[name](width, **({} if layers is None else {"layers": layers}))
    pipeline.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(f"usage: python -m models.tiny {{{','.join(BUILDERS)}}} FOLDER")
    print(build(sys.argv[1], sys.argv[2]))
