"""Saving memory changes no number: checkpointing and compiled blocks against the plain network; tiling by size."""

from types import SimpleNamespace

import pytest
import torch

from models import adapters, latents, load, memory


def lora_net(folder):
    net = load.load(folder, "transformer")
    options = dict(rank=4, alpha=8.0, targets=[], exclude=[], also_train=[], dropout=0.0, type="lora")
    adapters.attach(net, SimpleNamespace(**options), ["to_q", "to_k", "to_v", "to_out.0"])
    g = torch.Generator().manual_seed(3)
    for parameter in adapters.trainable(net).values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=g)
    return net.train()


def step(net, tokens=6):
    """Loss and gradients of one step, and how often a block ran."""
    runs = []
    handle = net.transformer_blocks[0].ff.register_forward_hook(lambda *_: runs.append(1))
    g = torch.Generator().manual_seed(1)
    out = net(
        hidden_states=torch.randn(2, 2 * tokens, 16, generator=g),
        encoder_hidden_states=torch.randn(2, 7, 32, generator=g),
        timestep=torch.tensor([500.0, 20.5]),
        encoder_attention_mask=torch.ones(2, 7, dtype=torch.bool),
        num_frames=2,
        height=tokens,
        width=1,
        rope_interpolation_scale=(0.32, 32, 32),
        return_dict=False,
    )[0]
    loss = out.square().mean()
    loss.backward()
    handle.remove()
    grads = {name: p.grad.clone() for name, p in adapters.trainable(net).items()}
    net.zero_grad()
    return loss.item(), grads, len(runs)


def test_checkpointing_recomputes_and_gives_the_same_gradients(tiny_ltx):
    net = lora_net(tiny_ltx)
    plain = step(net)
    memory.checkpoint_blocks(net, "blocks")
    saving = step(net)
    assert (plain[2], saving[2]) == (1, 2) and plain[0] == saving[0]
    assert len(plain[1]) == 32 and all(torch.equal(g, saving[1][k]) and g.any() for k, g in plain[1].items())
    memory.checkpoint_blocks(net, "none")
    assert step(net)[2] == 1


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_compiled_blocks_give_the_same_step_and_keep_their_names(checkpointing, tiny_ltx):
    net = lora_net(tiny_ltx)
    names, expected = list(net.state_dict()), step(net)
    memory.checkpoint_blocks(net, checkpointing)
    memory.compile_blocks(net, "blocks", "eager")
    assert all(block._compiled_call_impl is not None for block in net.transformer_blocks)
    loss, grads, _ = step(net)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][key])
    step(net, tokens=5)  # another bucket
    assert list(net.state_dict()) == names and not any("_orig_mod" in name for name in names)


def test_compile_none_and_networks_that_do_not_say_what_repeats(tiny_ltx):
    net = lora_net(tiny_ltx)
    memory.compile_blocks(net, "none")
    assert all(block._compiled_call_impl is None for block in net.transformer_blocks)
    net._repeated_blocks = []
    with pytest.raises(ValueError, match="LTXVideoTransformer3DModel does not say which blocks repeat"):
        memory.compile_blocks(net, "blocks")
    memory.compile_blocks(net, "blocks", "eager", blocks=["LTXVideoTransformerBlock"])
    assert all(block._compiled_call_impl is not None for block in net.transformer_blocks)


def test_tiling_by_size_and_in_the_cache_key():
    small, large = (49, 768, 1024), (121, 704, 1216)
    assert [memory.tiles(mode, *small) for mode in ("auto", "on", "off")] == [False, True, False]
    assert [memory.tiles(mode, *large) for mode in ("auto", "on", "off")] == [True, True, False]
    assert memory.tiling_facts("auto", *small) == memory.tiling_facts("off", *small) == {"vae_tiling": False}
    assert memory.tiling_facts("auto", *large) == memory.tiling_facts("on", *small) == {"vae_tiling": True}


def test_tile_vae_switches_both_ways(tiny_ltx):
    vae = load.load(tiny_ltx, "vae")
    memory.tile_vae(vae, "on", 9, 64, 64)
    assert vae.use_tiling and vae.use_slicing
    vae.tile_sample_min_height = vae.tile_sample_min_width = 64
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 32
    pixels = torch.rand(1, 3, 1, 96, 96, generator=torch.Generator().manual_seed(1)) * 2 - 1
    tiled = latents.encode_moments(vae, pixels)
    memory.tile_vae(vae, "auto", 1, 96, 96)
    assert not vae.use_tiling and not vae.use_slicing
    whole = latents.encode_moments(vae, pixels)
    assert tiled.shape == whole.shape and not torch.allclose(tiled, whole)
