"""What trains is exactly what was asked for, on the real (tiny) transformer."""

import pytest
import torch
from safetensors.torch import save_file

from models import adapters, export, load
from models.comfy_names import LTX
from nets import TARGETS, ltx_inputs, options

TYPES = ["lora", "dora", "rslora", "lokr", "loha"]


@pytest.fixture
def net(tiny_ltx):
    return load.load(tiny_ltx, "transformer")


def call(net, seed=1):
    return net(**ltx_inputs(seed))[0]


def train(net, steps=2):
    optimizer = torch.optim.AdamW(adapters.trainable(net).values(), lr=1e-2)
    net.train()
    for step in range(steps):
        (call(net, seed=step) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()


# -- attaching -------------------------------------------------------------------------------------------------------


def test_report_names_and_counts(net):
    total = sum(p.numel() for p in net.parameters())
    report = adapters.attach(net, options(), TARGETS)
    assert len(report.modules) == 2 * 2 * 4 and "transformer_blocks.1.attn2.to_out.0" in report.modules
    assert report.trainable == 16 * 4 * (32 + 32) and report.total == total + report.trainable
    assert "16 adapted modules" in str(report) and "4,096" in str(report)
    assert len(adapters.trainable(net)) == 32 and all("lora_" in name for name in adapters.trainable(net))


@pytest.mark.parametrize("kind", TYPES)
def test_all_that_trains_moves_and_nothing_else(kind, net):
    before = call(net).detach()
    frozen = {name: p.clone() for name, p in net.named_parameters()}
    adapters.attach(net, options(type=kind), TARGETS)
    torch.testing.assert_close(call(net), before, rtol=1e-5, atol=1e-6)  # an untrained adapter changes nothing
    start = {name: p.detach().clone() for name, p in adapters.trainable(net).items()}
    train(net)
    assert [name for name, p in adapters.trainable(net).items() if torch.equal(p, start[name])] == []
    left = {adapters.own_name(n): p for n, p in net.named_parameters() if n not in start}
    assert left.keys() == frozen.keys() and all(torch.equal(p, frozen[n]) for n, p in left.items())
    assert not torch.allclose(call(net), before, atol=1e-3)


def test_kinds_are_what_they_say(tiny_ltx):
    scale = {}
    for kind in TYPES:
        net = load.load(tiny_ltx, "transformer")
        adapters.attach(net, options(type=kind), TARGETS)
        leaves = {key.split("to_q.")[1] for key in adapters.adapter_state(net) if "to_q." in key}
        scale[kind] = set(adapters.scales(net).values())
        assert {
            "dora": "lora_magnitude_vector",
            "lokr": "lokr_w1",
            "loha": "hada_w1_a",
        }.get(kind, "lora_A.weight") in leaves
        assert ("lora_magnitude_vector" in leaves) == (kind == "dora")
    assert scale.pop("rslora") == {8 / 4**0.5} and all(s == {2.0} for s in scale.values())


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_dropout_where_peft_has_none_is_refused(kind, net):
    with pytest.raises(ValueError, match=f"lora.dropout 0.1: peft has no input dropout for {kind}"):
        adapters.attach(net, options(type=kind, dropout=0.1), TARGETS)


def test_initial_weights_depend_on_the_seed_alone(tiny_ltx):
    def start(seed, noise):
        net = load.load(tiny_ltx, "transformer")
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        adapters.attach(net, options(), TARGETS, seed)
        assert torch.equal(torch.get_rng_state(), state)
        return adapters.adapter_state(net)

    a, b, c = start(7, 1), start(7, 2), start(8, 1)
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)


def test_unmatched_targets_are_all_named_with_the_nearest(net):
    before = [name for name, _ in net.named_parameters()]
    with pytest.raises(ValueError, match=r"lora.targets: nothing matches 'to_qq' \(nearest: to_q") as error:
        adapters.attach(net, options(targets=["to_q", "to_qq", "feed.net"]), TARGETS)
    assert "'feed.net'" in str(error.value) and "'to_q'" not in str(error.value)
    assert [name for name, _ in net.named_parameters()] == before  # nothing was attached
    with pytest.raises(ValueError, match=r"lora.exclude: nothing matches 'attn3'"):
        adapters.attach(net, options(exclude=["attn3"]), TARGETS)
    with pytest.raises(ValueError, match=r"'\(to_q' is not a regular expression"):
        adapters.attach(net, options(targets=["(to_q"]), TARGETS)
    with pytest.raises(ValueError, match="leaves nothing"):
        adapters.attach(net, options(targets=["to_q"], exclude=["to_q"]), TARGETS)


def test_patterns_mean_module_endings_or_regular_expressions(tiny_ltx):
    def modules(**given):
        return adapters.attach(load.load(tiny_ltx, "transformer"), options(**given), TARGETS).modules

    assert modules(targets=[r".*attn1\.to_[qk]"]) == [
        f"transformer_blocks.{i}.attn1.to_{x}" for i in (0, 1) for x in "qk"
    ]
    assert modules(targets=["(transformer_blocks).*(ff.net.2)"]) == [f"transformer_blocks.{i}.ff.net.2" for i in (0, 1)]
    assert modules(targets=["to_q"], exclude=[r".*\.attn2\..*", "0.attn1.to_q"]) == ["transformer_blocks.1.attn1.to_q"]
    # A whole name is that module alone, though others end like it: linear_1 of two different parents.
    assert modules(targets=["^caption_projection.linear_1$"]) == ["caption_projection.linear_1"]
    assert modules(targets=["proj_in"]) == ["proj_in"]


def test_also_train(net):
    with pytest.raises(ValueError, match=r"lora.also_train: nothing matches '\*nrom\*'"):
        adapters.attach(net, options(also_train=["*nrom*"]), TARGETS)
    norms = [n for n, _ in net.named_parameters() if "norm" in n]
    report = adapters.attach(net, options(also_train=["*norm*", "caption_projection"]), TARGETS)
    assert report.parameters[: len(norms)] and set(norms) < set(report.parameters)
    assert "caption_projection.linear_2.bias" in report.parameters and len(report.parameters) == len(norms) + 4
    assert set(adapters.also_trained(net)) == set(report.parameters)
    assert len(adapters.trainable(net)) == 32 + len(report.parameters)


def test_also_train_reaches_a_weight_under_an_adapter(net):
    name = "transformer_blocks.0.attn1.to_q.bias"
    assert adapters.attach(net, options(also_train=[name]), TARGETS).parameters == [name]
    assert list(adapters.also_trained(net)) == [name]


def test_full_and_parts_of_it(net):
    everything = adapters.select(net)
    assert everything.trainable == everything.total and everything.modules == []
    part = adapters.select(net, ["transformer_blocks.1.*", "proj_out"])
    assert {n.split(".")[0] for n in part.parameters} == {"transformer_blocks", "proj_out"}
    assert set(adapters.trainable(net)) == set(part.parameters) and not any(".0." in n[:20] for n in part.parameters)
    assert adapters.select(net, [r"transformer_blocks\.\d+\.attn1\.to_(q|k)\.weight"]).trainable == 2 * 2 * 32 * 32
    with pytest.raises(ValueError, match="train_modules: nothing matches 'blocks'"):
        adapters.select(net, ["blocks"])


def test_cast_trainable_only(tiny_ltx):
    net = load.load(tiny_ltx, "transformer", torch.bfloat16)
    adapters.attach(net, options(), TARGETS)
    held = adapters.trainable(net)
    adapters.cast_trainable(net, torch.float32)
    assert all(p.dtype == torch.float32 and p is held[n] for n, p in adapters.trainable(net).items())
    assert all(p.dtype == torch.bfloat16 for p in net.parameters() if not p.requires_grad)


# -- state and files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_state_round_trip(kind, tiny_ltx):
    nets = [load.load(tiny_ltx, "transformer") for _ in range(2)]
    for net in nets:
        adapters.attach(net, options(type=kind), TARGETS)
    train(nets[0])
    gathered = nets[0].state_dict()  # as sharded backends give it
    state = adapters.adapter_state(nets[0], gathered)
    assert all(torch.equal(v, adapters.adapter_state(nets[0])[k]) for k, v in state.items())
    adapters.set_adapter_state(nets[1], state)
    assert torch.equal(call(nets[0]), call(nets[1]))
    with pytest.raises(ValueError, match=r"no such adapter tensors here: elsewhere.lora_A.weight \(1 in all\)"):
        adapters.set_adapter_state(nets[1], {"elsewhere.lora_A.weight": torch.zeros(4, 32)})


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("style", ["diffusers", "comfyui"])
def test_init_from_gives_the_same_network(style, kind, tiny_ltx, tmp_path):
    from diffusers import LTXPipeline

    alpha = 4.0 if kind == "lokr" else 8.0  # ComfyUI's format has no scale for a rankless LoKr but 1
    nets = [load.load(tiny_ltx, "transformer") for _ in range(2)]
    for net in nets:
        adapters.attach(net, options(type=kind, alpha=alpha), TARGETS)
    train(nets[0])
    export.save_lora(LTXPipeline, nets[0], tmp_path, LTX)
    path = tmp_path if style == "diffusers" else tmp_path / "pytorch_lora_weights_comfyui.safetensors"
    assert adapters.load_lora_into(nets[1], path, LTX) == []
    assert torch.equal(call(nets[0]), call(nets[1]))


def test_init_from_renamed_modules_and_with_wider_targets(tiny_ltx, tmp_path):
    from diffusers import LTXPipeline

    nets = [load.load(tiny_ltx, "transformer") for _ in range(2)]
    adapters.attach(nets[0], options(targets=["proj_in", "time_embed.linear"]), TARGETS)
    train(nets[0])
    export.save_lora(LTXPipeline, nets[0], tmp_path, LTX)
    adapters.attach(nets[1], options(targets=["proj_in", "time_embed.linear", "proj_out"]), TARGETS)
    comfy = tmp_path / "pytorch_lora_weights_comfyui.safetensors"
    (line,) = adapters.load_lora_into(nets[1], comfy, LTX)
    assert line.endswith("has nothing for 1 adapted modules, such as proj_out: they start fresh")
    assert torch.equal(call(nets[0]), call(nets[1]))


def test_init_from_that_does_not_fit(tiny_ltx, tmp_path):
    from diffusers import LTXPipeline

    def other(**given):
        net = load.load(tiny_ltx, "transformer")
        adapters.attach(net, options(**given), TARGETS)
        return net

    net = other()
    train(net)
    export.save_lora(LTXPipeline, net, tmp_path, LTX)
    for given, says in (
        (dict(rank=8), "rank 4 in the file, lora.rank 8 here"),
        (dict(alpha=4.0), r"alpha 8 in the file, alpha 4 here"),
        (dict(type="dora"), "another type of adapter"),
        (dict(type="loha"), "another type of adapter"),
        (
            dict(targets=["to_q"]),
            "12 modules that lora.targets does not cover, such as transformer_blocks.0.attn1.to_k",
        ),
        (dict(targets=["to_q"], rank=2), r"12 modules .*rank 4 in the file, lora.rank 2 here"),
    ):
        with pytest.raises(ValueError, match=f"lora.init_from .*pytorch_lora_weights.safetensors does not fit.*{says}"):
            adapters.load_lora_into(other(**given), tmp_path, LTX)


def test_init_from_unreadable_files(net, tmp_path):
    adapters.attach(net, options(), TARGETS)
    for make, says in (
        (lambda p: None, "no such file or folder"),
        (lambda p: p.write_bytes(b"short"), "cannot be read as safetensors"),
        (
            lambda p: save_file({"lora_unet_x.lora_up.weight": torch.zeros(1)}, p),
            "neither transformer. .* nor diffusion_model",
        ),
        (lambda p: save_file({"transformer.x.weight": torch.zeros(1)}, p), "not adapter tensors: x.weight"),
    ):
        make(tmp_path / "file.safetensors")
        with pytest.raises(ValueError, match=says):
            adapters.load_lora_into(net, tmp_path / "file.safetensors", LTX)
