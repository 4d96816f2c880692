"""Tiny random pipelines in the published folder layout, for tests and the demo: no network, well under a second each.

`python -m models.tiny ltx FOLDER` writes one. They keep what the code depends on (class names, sub-folders, config
keys, compression ratios, scheduler rules) and shrink everything else.
"""

import string
import sys
from collections.abc import Callable
from pathlib import Path

import torch

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


def _ltx_parts(width: int, conditioned_decoder: bool) -> dict:
    from diffusers import LTXVideoTransformer3DModel

    if width % 8:
        raise ValueError(f"width {width} must be a multiple of 8: four heads of an even size")
    tokenizer = t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=4,
        attention_head_dim=width // 4,
        cross_attention_dim=width,
        num_layers=2,
        caption_channels=TEXT_DIM,
    ).eval()
    return {
        "tokenizer": tokenizer,
        "text_encoder": t5_encoder(len(tokenizer)),
        "vae": _ltx_vae(conditioned_decoder),
        "transformer": transformer,
    }


def ltx(width: int = 32):
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
    return LTXPipeline(scheduler=scheduler, **_ltx_parts(width, conditioned_decoder=False))


def ltx_condition(width: int = 32):
    """LTX-Video 0.9.5 and later: condition pipeline, fixed shift 1, a decoder that takes a timestep and noise."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXConditionPipeline

    return LTXConditionPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), **_ltx_parts(width, conditioned_decoder=True)
    )


BUILDERS: dict[str, Callable] = {"ltx": ltx, "ltx-condition": ltx_condition}


def build(name: str, folder: str | Path, width: int = 32) -> Path:
    """Write the tiny pipeline `name` (float32) to `folder` in the published layout and return that folder.

    The same weights every time; torch's global generator is left as it was. `width` is the transformer's inner size.
    """
    if name not in BUILDERS:
        raise ValueError(f"no tiny pipeline {name!r}; there are: {', '.join(BUILDERS)}")
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU's only: torch.manual_seed would also re-seed the GPUs
        pipeline = BUILDERS[name](width)
    pipeline.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(f"usage: python -m models.tiny {{{','.join(BUILDERS)}}} FOLDER")
    print(build(sys.argv[1], sys.argv[2]))
