"""Tiny transformers with adapters, for the tests of adapter files."""

from types import SimpleNamespace

import torch

from models import adapters, lora_files
from runs import LORA

MAIN, COMFY = LORA, "pytorch_lora_weights_comfyui.safetensors"
WIDTH = 20  # of the tiny HunyuanVideo
BLOCKS = r"(single_)?transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
EVERYTHING = r".*(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|linear(_[12])?|net\.(0\.proj|2)|proj(_in|_out|_mlp)?)"
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]  # of the LTX trainer
QKV = [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"]


def hunyuan(**given):
    from diffusers import HunyuanVideoTransformer3DModel

    torch.manual_seed(0)
    config = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=WIDTH // 2, num_layers=2)
    config |= dict(num_single_layers=2, num_refiner_layers=1, text_embed_dim=12, pooled_projection_dim=8)
    config |= dict(rope_axes_dim=(2, 4, 4), guidance_embeds=True)
    return HunyuanVideoTransformer3DModel(**(config | given)).eval()


def cogvideox(**given):
    from diffusers import CogVideoXTransformer3DModel

    torch.manual_seed(0)
    config = dict(num_attention_heads=2, attention_head_dim=16, in_channels=8, out_channels=4, time_embed_dim=8)
    config |= dict(text_embed_dim=12, num_layers=2, sample_width=16, sample_height=16, sample_frames=9, patch_size=2)
    config |= dict(patch_size_t=2, ofs_embed_dim=8, use_rotary_positional_embeddings=True)
    return CogVideoXTransformer3DModel(**(config | given)).eval()


def ltx(**given):
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(0)
    config = dict(in_channels=16, out_channels=16, num_attention_heads=4, attention_head_dim=8, num_layers=2)
    config |= dict(cross_attention_dim=32, caption_channels=32)
    return LTXVideoTransformer3DModel(**(config | given)).eval()


def options(**given):
    """Those of lora.*: rank 4, alpha 8, the targets left to the trainer."""
    default = dict(rank=4, alpha=8.0, targets=[], exclude=[], also_train=[], dropout=0.0, type="lora")
    return SimpleNamespace(**(default | given))


def trained(net, *targets, **given):
    """`net` with an adapter whose numbers are as after training: none zero."""
    adapters.attach(net, options(**given), targets or TARGETS)
    g = torch.Generator().manual_seed(3)
    for parameter in adapters.trainable(net).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=g)
    return net


def hunyuan_inputs(seed=1):
    """Of two samples, for `hunyuan`."""
    g = torch.Generator().manual_seed(seed)
    return dict(
        hidden_states=torch.randn(2, 4, 2, 4, 4, generator=g),
        timestep=torch.tensor([500.0, 20.5]),
        encoder_hidden_states=torch.randn(2, 5, 12, generator=g),
        encoder_attention_mask=torch.ones(2, 5, dtype=torch.bool),
        pooled_projections=torch.randn(2, 8, generator=g),
        guidance=torch.tensor([1000.0, 1000.0]),
        return_dict=False,
    )


def call_hunyuan(net):
    return net(**hunyuan_inputs())[0].detach()


def cogvideox_inputs(seed=1):
    """Of two samples, for `cogvideox`."""
    g = torch.Generator().manual_seed(seed)
    return dict(
        hidden_states=torch.randn(2, 2, 8, 4, 4, generator=g),
        encoder_hidden_states=torch.randn(2, 5, 12, generator=g),
        timestep=torch.tensor([500, 20]),
        image_rotary_emb=(torch.rand(4, 16, generator=g), torch.rand(4, 16, generator=g)),
        ofs=torch.tensor([2.0]),
        return_dict=False,
    )


def ltx_inputs(seed=1, dtype=torch.float32):
    """Of two samples, for `ltx` and the transformer of the tiny pipelines."""
    g = torch.Generator().manual_seed(seed)
    return dict(
        hidden_states=torch.randn(2, 12, 16, generator=g).to(dtype),
        encoder_hidden_states=torch.randn(2, 7, 32, generator=g).to(dtype),
        timestep=torch.tensor([500.0, 20.5]),
        encoder_attention_mask=torch.ones(2, 7, dtype=torch.bool),
        num_frames=3,
        height=2,
        width=2,
        rope_interpolation_scale=(0.32, 32, 32),
        return_dict=False,
    )


def call_ltx(net):
    return net(**ltx_inputs())[0].detach()


def hunyuan_pipeline(transformer):
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

    empty = dict.fromkeys(("text_encoder", "tokenizer", "vae", "text_encoder_2", "tokenizer_2"))
    return HunyuanVideoPipeline(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **empty)


def lora(ranks, zero=(), width=WIDTH, modules=QKV):
    """LoRAs of these ranks (0: none) for `modules`, those of `zero` with B = 0."""
    g = torch.Generator().manual_seed(0)
    state = {}
    for i, (module, rank) in enumerate(zip(modules, ranks, strict=True)):
        if rank:
            state[f"{module}.lora_A.weight"] = torch.randn(rank, width, generator=g)
            b = torch.randn(width, rank, generator=g)
            state[f"{module}.lora_B.weight"] = torch.zeros_like(b) if i in zero else b
    return state, dict.fromkeys(lora_files.split(state), 2.0)
