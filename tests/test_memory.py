"""Saving memory changes no number: checkpointing, offloading and compiled blocks against the plain network."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import nets
import runs
from models import adapters, latents, load, memory
from models.load import ModelError
from trainers import launch, pulse
from trainers.config import Config, MemoryOptions, TrainOptions


def lora_net(folder):
    net = load.load(folder, "transformer")
    options = dict(rank=4, alpha=8.0, targets=[], exclude=[], also_train=[], dropout=0.0, type="lora")
    adapters.attach(net, SimpleNamespace(**options), ["to_q", "to_k", "to_v", "to_out.0"])
    g = torch.Generator().manual_seed(3)
    for parameter in adapters.trainable(net).values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=g)
    return net.train()


def inputs(tokens):
    """Of a video of so many tokens per frame, with a text of as many."""
    g = torch.Generator().manual_seed(1)
    return dict(
        hidden_states=torch.randn(2, 2 * tokens, 16, generator=g),
        encoder_hidden_states=torch.randn(2, tokens, 32, generator=g),
        timestep=torch.tensor([500.0, 20.5]),
        encoder_attention_mask=torch.ones(2, tokens, dtype=torch.bool),
        num_frames=2,
        height=tokens,
        width=1,
        rope_interpolation_scale=(0.32, 32, 32),
        return_dict=False,
    )


def step(net, tokens=6):
    """Loss and gradients of one step, and how often a block ran."""
    ran = []
    handle = net.transformer_blocks[0].ff.register_forward_hook(lambda *_: ran.append(1))
    loss = net(**inputs(tokens))[0].square().mean()
    loss.backward()
    handle.remove()
    grads = {name: p.grad.clone() for name, p in adapters.trainable(net).items()}
    net.zero_grad()
    return loss.item(), grads, len(ran)


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
    with pytest.raises(ModelError, match="LTXVideoTransformer3DModel does not say which blocks repeat"):
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


# -- what is kept, and what is computed again ------------------------------------------------------------------------

CPU = torch.device("cpu")
NETS = {
    "ltx": (lambda: nets.ltx(num_layers=5), nets.ltx_inputs, ()),
    "hunyuan": (lambda: nets.hunyuan(num_layers=2, num_single_layers=3), nets.hunyuan_inputs, ()),
    "cogvideox": (lambda: nets.cogvideox(num_layers=5), nets.cogvideox_inputs, ["CogVideoXBlock"]),
}


def measured(make, inputs, names, mode, every=2, to_host=False):
    """(loss, gradients), how often each block and each feed-forward ran, and the bytes kept for the backward pass."""
    net = nets.trained(make()).train()
    memory.checkpoint_blocks(net, mode, every, to_host, names)
    blocks = [block for _, block in memory.repeated(net, names)]
    ffs = memory.feed_forwards(net, names)
    ran = dict.fromkeys([*blocks, *[ff.net[0] for ff in ffs]], 0)
    for module in ran:
        module.register_forward_pre_hook(lambda module, _: ran.update({module: ran[module] + 1}))
    weights, kept = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

    def keep(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(**inputs())[0].square().mean()
    size = sum(kept.values())
    loss.backward()
    grads = {name: p.grad.clone() for name, p in adapters.trainable(net).items()}
    return (loss.item(), grads), [ran[b] for b in blocks], [ran[ff.net[0]] for ff in ffs], size


@pytest.mark.parametrize("name", NETS)
def test_each_mode_computes_its_modules_again_and_keeps_less(name):
    make, inputs, names = NETS[name]
    plain, blocks, ffs, whole = measured(make, inputs, names, "none")
    assert blocks == [1] * 5 and ffs == [1] * len(ffs) and len(ffs) == (4 if name == "hunyuan" else 5)
    again = {
        "blocks": ([2] * 5, [2] * len(ffs)),
        "every_n": ([2, 1, 2, 1, 2], [2, 2, 1, 1] if name == "hunyuan" else [2, 1, 2, 1, 2]),
        "ffn": ([1] * 5, [2] * len(ffs)),
    }
    sizes = {}
    for mode, expected in again.items():
        numbers, *ran, sizes[mode] = measured(make, inputs, names, mode)
        assert runs.same(numbers, plain) and tuple(ran) == expected, mode
    assert len(plain[1]) >= 30 and all(g.any() for g in plain[1].values())
    assert sizes["blocks"] < sizes["every_n"] < whole and sizes["ffn"] < whole


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("mode", ["blocks", "every_n"])
def test_inputs_of_blocks_wait_on_the_host(name, mode, monkeypatch):
    make, inputs, names = NETS[name]
    plain = measured(make, inputs, names, "none")[0]
    moved = []

    class ToHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory, **_):
            assert not pin_memory  # which is for CUDA
            super().__init__(lambda tensor: moved.append(tensor) or tensor.clone(), lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", ToHost)
    numbers, blocks, _, _ = measured(make, inputs, names, mode, to_host=True)
    assert runs.same(numbers, plain) and blocks == ([2] * 5 if mode == "blocks" else [2, 1, 2, 1, 2])
    # Of each checkpointed block what the block before made; of the first also what all are given: the text's encoding
    # (LTX: it does not change from block to block), time, masks.
    streams = 1 if name == "ltx" else 2
    assert 0 < len(moved) - streams * sum(n - 1 for n in blocks) <= 4
    sizes = [tensor.shape for tensor in moved]
    assert sizes[-streams:] == sizes[:streams]


def test_a_network_in_other_hands_is_told_what_it_cannot_do(tiny_ltx):
    net = load.load(tiny_ltx, "transformer")
    options = MemoryOptions(checkpointing="every_n", block_swap=3, group_offload="block", compile="blocks")
    assert len(found := memory.problems(net, options)) == 1 and "has 2 blocks; use at most 2" in found[0]
    net._repeated_blocks = []
    found = memory.problems(net, options)
    assert len(found) == 4 and all("does not say which of its blocks repeat" in text for text in found)
    assert "no feed-forward module" in memory.problems(net, MemoryOptions(checkpointing="ffn"))[0]
    type(net)._supports_gradient_checkpointing, before = False, type(net)._supports_gradient_checkpointing
    try:
        assert "has no checkpointing; use ffn or none" in memory.problems(net, MemoryOptions())[0]
    finally:
        type(net)._supports_gradient_checkpointing = before


def test_repeated_blocks_of_every_model_on_meta():
    from accelerate import init_empty_weights

    with init_empty_weights():
        made = {name: (make(), names) for name, (make, _, names) in NETS.items()}
    for net, names in made.values():
        blocks = memory.repeated(net, names)
        assert len(blocks) == 5 and all(p.is_meta for _, block in blocks for p in block.parameters())
        assert all(net.get_submodule(name) is block for name, block in blocks)
    assert [name for name, _ in memory.repeated(made["hunyuan"][0])] == [
        *(f"transformer_blocks.{i}" for i in range(2)),
        *(f"single_transformer_blocks.{i}" for i in range(3)),
    ]
    assert memory.repeated(made["cogvideox"][0]) == []
    token_replace = nets.hunyuan(image_condition_type="token_replace", num_layers=1, num_single_layers=1)
    assert len(memory.repeated(token_replace, runs.trainers_by_name()["hunyuan"].repeated_blocks)) == 2


# -- weights that move -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", ["block", "leaf"])
def test_group_offload_learns_the_same_and_moves_frozen_layers_alone(name, kind):
    make, inputs, names = NETS[name]

    def learn(options):
        net = nets.trained(make()).train()
        memory.checkpoint_blocks(net, "blocks")
        memory.place(net, options, CPU, names)
        optimizer, told = torch.optim.AdamW(adapters.trainable(net).values(), lr=1e-2), []
        for step in range(2):
            for micro in range(2):
                loss = net(**inputs(2 * step + micro))[0].square().mean()
                loss.backward()
                told.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                told.append(net(**inputs(9))[0].sum().item())
        return net, (told, dict(net.state_dict()))

    _, plain = learn(MemoryOptions())
    net, offloaded = learn(MemoryOptions(group_offload=kind))
    assert runs.same(offloaded, plain) and len(set(plain[0])) == 6
    if kind == "leaf":
        hooked = [m for m in net.modules() if hasattr(m, "_diffusers_hook")]
        held = [p for m in hooked for p in m.parameters()]
        linear = [m for m in net.modules() if isinstance(m, torch.nn.Linear)]
        assert not any(p.requires_grad for p in held)
        assert sum(m in hooked for m in linear) == len(linear) - len(adapters.trainable(net)) > 20


def test_advice_on_memory_in_pieces(monkeypatch):
    for name in memory.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    cuda, plain, moving = torch.device("cuda"), MemoryOptions(), MemoryOptions(group_offload="leaf")
    (line,) = memory.allocator_advice(cuda, 3, plain)
    assert "3 buckets" in line and "PYTORCH_ALLOC_CONF=expandable_segments:True" in line
    assert "weights that come and go" in memory.allocator_advice(cuda, 1, moving)[0]
    assert memory.allocator_advice(cuda, 1, plain) == memory.allocator_advice(CPU, 3, moving) == []
    for name in memory.ALLOCATOR:
        monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:False")  # decided by the user
        assert memory.allocator_advice(cuda, 3, plain) == []
        monkeypatch.delenv(name)


def test_peak_memory_asks_the_device(monkeypatch):
    assert 10 < pulse.peak_memory(CPU) < 1 << 20
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 << 20)
    assert pulse.peak_memory(torch.device("mps")) == 5
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 << 20)
    assert pulse.peak_memory(torch.device("cuda")) == 7


def refused(**changes):
    """What trainers.config says of these options of memory (and others, in dotted names)."""
    config = Config(model="m", method="lora")
    for name, value in changes.items():
        section, _, option = name.rpartition("__")
        setattr(getattr(config, section) if section else config, option, value)
    return [text for text in config.problems() if "memory." in text]


@pytest.mark.parametrize("moving", [{"memory__block_swap": 3}, {"memory__group_offload": "leaf"}], ids=["swap", "leaf"])
@pytest.mark.parametrize(
    "broken, told",
    [
        ({}, None),
        ({"method": "full"}, "use method lora"),
        ({"memory__checkpointing": "every_n"}, "use checkpointing blocks"),
        ({"memory__compile": "blocks"}, "use compile none"),
        ({"precision__quantize": "nf4"}, "use one of the two"),
        ({"precision__storage": "fp8"}, "use one of the two"),
    ],
    ids=str,
)
def test_what_does_not_go_with_weights_that_move(moving, broken, told):
    found = refused(**moving, **broken)
    assert (not found) if told is None else (len(found) == 1 and told in found[0])


def test_other_options_of_memory_that_do_not_fit():
    assert "use 3 or more" in refused(memory__block_swap=2)[0]
    dora = {"lora__type": "dora"}
    assert "while they are on the host" in refused(memory__group_offload="leaf", **dora)[0]
    assert not refused(memory__block_swap=3, **dora)
    assert "both move the weights" in refused(memory__block_swap=3, memory__group_offload="block")[0]
    for mode, broken in (("none", True), ("ffn", True), ("blocks", False), ("every_n", False)):
        found = refused(memory__checkpointing=mode, memory__offload_activations=True)
        assert bool(found) == broken and all("use checkpointing blocks or every_n" in text for text in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory__checkpointing": "none"},
        {"memory__checkpointing": "every_n", "memory__offload_activations": True},
        {"memory__checkpointing": "ffn"},
        {"memory__offload_activations": True},
        {"memory__group_offload": "leaf"},
        {"train__deterministic": True},
        {"memory__attention": "native"},
    ],
    ids=str,
)
def test_a_run_with_each_option_is_the_same(changes, start, tmp_path, own_attention):
    options = {"train__steps": 2, "train__gradient_accumulation_steps": 2, "precision__weights": "bf16"}
    plain = start("plain", **options)
    try:
        other = start("other", **options, **changes)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.equal(runs.trained(plain), runs.trained(other))
    runs.assert_same_outcome(tmp_path / "plain", tmp_path / "other")


# -- compute ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


def test_compiled_code_does_not_grow_with_buckets_and_text(tiny_ltx, fresh_dynamo):
    counter = CompileCounter()
    net = lora_net(tiny_ltx)
    memory.checkpoint_blocks(net, "blocks")
    memory.compile_blocks(net, "blocks", counter, buckets=3)
    counts = []
    for tokens in (6, 5, 9, 6):
        net(**inputs(tokens))[0].sum().backward()
        counts.append(counter.frame_count)
    net.eval()
    for tokens in (6, 5, 9):
        with torch.no_grad():
            net(**inputs(tokens))
        counts.append(counter.frame_count)
    assert counts[:4] == [2] * 4  # first block and others, once for all sizes
    assert counts[4] <= 4 and counts[4:] == [counts[4]] * 3  # and again without gradients
    assert torch._dynamo.config.recompile_limit == memory.COMPILED_AT_MOST


@pytest.mark.parametrize("mode", ["every_n", "ffn"])
def test_compiled_blocks_with_other_checkpointing(mode, tiny_ltx, fresh_dynamo):
    net = lora_net(tiny_ltx)
    expected = step(net)
    memory.checkpoint_blocks(net, mode, 2)
    memory.compile_blocks(net, "blocks", "aot_eager")
    loss, grads, _ = step(net)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][key])


@pytest.fixture
def own_attention():
    """The backend that diffusers keeps for all networks is afterwards as it was."""
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend("native"):
        yield


def test_attention_backends_by_name(tiny_ltx, own_attention):
    net = lora_net(tiny_ltx)
    expected = step(net)
    memory.try_attention(net, "_native_math", CPU, torch.float32, masked=True)
    memory.set_attention(net, "_native_math")
    assert {m.processor._attention_backend.value for m in net.modules() if hasattr(m, "processor")} == {"_native_math"}
    loss, grads, _ = step(net)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][key], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "name, masked, told",
    [
        ("flsh", False, "diffusers has no such backend; it has .*_native_math, .*xformers"),
        ("flash", False, "flash-attn.*Use another of .*native"),  # a package that is missing
        ("xformers", False, "does not work for training torch.float32 on cpu: .*xformers"),
        ("_native_flash", True, "on cpu with a text mask"),
        ("flex", False, "does not work for training torch.float32 on cpu"),  # it has no backward pass there
    ],
)
def test_attention_that_cannot_be_is_told(name, masked, told, tiny_ltx, own_attention):
    net = load.load(tiny_ltx, "transformer").to("meta")
    with pytest.raises(ModelError, match=f"(?s)memory.attention {name}.*{told}"):
        memory.try_attention(net, name, CPU, torch.float32, masked)


def test_attention_of_a_network_that_takes_no_backend(own_attention):
    with pytest.raises(ModelError, match="CogVideoXTransformer3DModel takes no backend"):
        memory.try_attention(nets.cogvideox(), "native", CPU, torch.float32)
    memory.try_attention(nets.cogvideox(), None, CPU, torch.float32)


def test_an_unknown_backend_ends_a_run_before_anything_is_encoded(tiny_ltx, clips, tmp_path):
    from trainers.ltx import LTXTrainer

    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", memory__attention="sag")
    with pytest.raises(ModelError, match=r"memory\.attention sag: diffusers has no such backend"):
        made.run()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_deterministic_sets_torch_before_the_device_starts(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert not TrainOptions().deterministic and not torch.are_deterministic_algorithms_enabled()
    try:
        launch.be_deterministic()
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
