"""fp8 storage trains as weights rounded through fp8, fp8 products leave plain weights; what cannot work is refused."""

import re
from types import SimpleNamespace

import pytest
import torch

import nets
import runs
from models import adapters, load, memory, precision
from trainers.config import OptionError
from trainers.ltx import LTXTrainer


def config(**given):
    """Options as trainers.config.Config has them; keys like "precision.storage" set one."""
    made = SimpleNamespace(
        method="lora",
        components={},
        precision=SimpleNamespace(weights="bf16", trainable="fp32", storage="none"),
        optimizer=SimpleNamespace(name="adamw"),
        lora=SimpleNamespace(type="lora"),
        memory=SimpleNamespace(compile="none"),
    )
    for path, value in given.items():
        section, _, name = path.rpartition("__")
        setattr(getattr(made, section) if section else made, name, value)
    return made


def test_what_is_refused_and_what_is_not():
    assert precision.problems(config()) == []
    assert precision.problems(config(precision__weights="fp16"), ("fp16", "bf16")) == []
    for given, says in (
        (dict(precision__weights="fp16"), "precision.weights fp16: .*use bf16"),
        (dict(components={"text_encoder": SimpleNamespace(dtype="fp16")}), "components.text_encoder.dtype fp16"),
    ):
        (line,) = precision.problems(config(**given))
        assert re.search(says, line)
    both = config(precision__weights="fp16", components={"transformer": SimpleNamespace(dtype="fp16")})
    with pytest.raises(precision.PrecisionError, match=r"(?s)weights fp16.*\n.*transformer.dtype fp16"):
        precision.check(both)


def gradients(net):
    with torch.autocast("cpu", torch.bfloat16):
        out = net(**nets.ltx_inputs(dtype=torch.bfloat16))[0]
    out.float().square().mean().backward()
    return {name: p.grad for name, p in adapters.trainable(net).items()}


def lora_net(folder, kind="lora", also_train=()):
    net = load.load(folder, "transformer", torch.bfloat16)
    adapters.attach(net, nets.options(also_train=list(also_train), type=kind), nets.TARGETS)
    adapters.cast_trainable(net, torch.float32)
    g = torch.Generator().manual_seed(3)
    for name, parameter in adapters.trainable(net).items():
        if any(part in name for part in ("lora_", "lokr_", "hada_")):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=g)
    return net.train()


@pytest.mark.parametrize("kind", ["lora", "rslora", "lokr", "loha"])
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_fp8_storage_has_the_gradients_of_rounded_weights(kind, checkpointing, tiny_ltx):
    stored, rounded = lora_net(tiny_ltx, kind), lora_net(tiny_ltx, kind)
    names = precision.apply_storage(stored, "fp8", torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        if name in names:
            parameter.data = parameter.data.to(torch.float8_e4m3fn).to(torch.bfloat16)
    for net in (stored, rounded):
        memory.checkpoint_blocks(net, checkpointing)
    found, expected = gradients(stored), gradients(rounded)
    assert all(torch.equal(found[k], expected[k]) and found[k].any() for k in expected)
    assert all(p.dtype == torch.float8_e4m3fn for n, p in stored.named_parameters() if n in names)  # cast back


def test_adapters_norms_and_sensitive_layers_never_become_fp8(tiny_ltx):
    net = lora_net(tiny_ltx, also_train=["caption_projection"])
    names = precision.apply_storage(net, "fp8", torch.bfloat16)
    assert sum("attn1.to_q.base_layer" in name for name in names) == 4 and len(names) == 40
    assert not [n for n in names if re.search("norm|lora_|time_embed|^proj_|caption_projection|table", n)]
    assert all(p.dtype == torch.float32 for p in adapters.trainable(net).values())
    assert precision.apply_storage(lora_net(tiny_ltx), "none", torch.bfloat16) == []


def test_fp8_storage_leaves_the_export_whole(tiny_ltx, tmp_path):
    from diffusers import LTXPipeline

    from models import export

    net = lora_net(tiny_ltx)
    precision.apply_storage(net, "fp8", torch.bfloat16)
    export.save_lora(LTXPipeline, net, tmp_path, {})
    export.verify_lora(LTXPipeline, tmp_path, net, {})
    assert all(v.dtype == torch.float32 for v in adapters.adapter_state(net).values())


# -- products in fp8 ---------------------------------------------------------------------------------------------------

FULL = {"method": "full", "precision__fp8_training": True, "optimizer__learning_rate": 1e-3}


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_a_full_run_in_fp8_learns_resumes_exactly_and_leaves_plain_weights(start, tiny_ltx, tmp_path, weights, capsys):
    from diffusers import LTXVideoTransformer3DModel
    from safetensors.torch import load_file
    from torchao.float8.float8_linear import Float8Linear

    options = FULL | {"precision__weights": weights, "train__steps": 6, "checkpoint__every": 3}
    whole = start("whole", **options)
    assert "20 of 27 linear layers multiply in fp8, emulated (slow) on this CPU" in capsys.readouterr().out
    plain = start("plain", **options | {"precision__fp8_training": False})
    made = {name for name, m in whole.network.named_modules() if isinstance(m, Float8Linear)}
    assert len(made) == 20 and all(re.match(r"transformer_blocks\.\d\.(attn[12]|ff)\.", name) for name in made)
    a, b = (torch.tensor(runs.losses(tmp_path / name)) for name in ("whole", "plain"))
    assert not torch.equal(a, b) and torch.allclose(a, b, rtol=0.02)
    assert not torch.equal(runs.trained(whole), runs.trained(plain))

    with pytest.raises(runs.Interrupted):
        start("broken", kind=runs.interrupted(LTXTrainer, 4), **options)
    resumed = start("broken", **options, checkpoint__resume="latest")
    assert runs.numbers(tmp_path / "broken") == runs.numbers(tmp_path / "whole")
    assert torch.equal(runs.trained(resumed), runs.trained(whole))
    assert runs.same(*(runs.optimizer_state(tmp_path / name / "checkpoint-6") for name in ("whole", "broken")))

    exported = LTXVideoTransformer3DModel.from_pretrained(tmp_path / "whole" / "transformer")
    dtype = precision.DTYPES[weights]
    state = {k: v.to(dtype).float() for k, v in whole.network.state_dict().items()}
    assert runs.same({k: v.float() for k, v in exported.state_dict().items()}, state)
    saved = load_file(tmp_path / "whole" / "checkpoint-6" / "state" / "trainable.safetensors")
    assert all(v.dtype == torch.float32 for v in saved.values()) and saved.keys() == state.keys()


def test_sides_that_fp8_cannot_multiply_stay():
    net = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(40, 32), "b": torch.nn.Linear(32, 48), "norm": torch.nn.Linear(32, 32)}
    )
    assert precision.train_in_fp8(net, torch.device("cpu")).startswith("1 of 3 linear layers")
    with pytest.raises(precision.PrecisionError, match="no linear layer of this ModuleDict has sides"):
        precision.train_in_fp8(torch.nn.ModuleDict({"a": torch.nn.Linear(40, 32)}), torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"precision__fp8_training": True}, "fp8_training is for method full; .* use precision.quantize fp8wo"),
        (FULL | {"precision__weights": "fp16"}, "fp8_training with precision.weights fp16: .*use bf16"),
        (FULL | {"precision__quantize": "nf4"}, "quantize nf4 with method full"),
        (FULL | {"precision__storage": "fp8"}, "storage fp8 keeps frozen weights only"),
    ],
)
def test_what_fp8_training_does_not_go_with(clips, tiny_ltx, tmp_path, given, says):
    with pytest.raises(OptionError, match=says):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path, **given)


def test_devices_that_cannot_are_refused(monkeypatch):
    def found(device, **given):
        plain = {"weights": "bf16", "fp8_training": False, "storage": "none", "quantize": "none"}
        options = SimpleNamespace(**plain | given)
        return " ".join(precision.device_problems(options, torch.device(device)))

    have = {"at": (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: have["at"])
    assert re.search("needs CUDA compute capability 8.9 .* cuda:0 has 8.6", found("cuda:0", fp8_training=True))
    have["at"] = (8, 9)
    assert found("cuda:0", fp8_training=True) == found("cpu", fp8_training=True) == ""
    assert found("cuda:0", quantize="nf4", storage="fp8") == found("cpu", quantize="fp8wo") == ""
    assert re.search("weights fp16: on a CPU .* use bf16 or fp32", found("cpu", weights="fp16"))
    assert found("cuda:0", weights="fp16") == ""
    assert "mps has no products in fp8" in found("mps", fp8_training=True)
    assert "quantize fp8wo: MPS" in found("mps", quantize="fp8wo") and "storage fp8: MPS" in found("mps", storage="fp8")
    assert "bitsandbytes does not train on MPS" in found("mps", quantize="nf4")
    assert found("mps", quantize="int8wo") == ""


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_as_the_option_says(clips, tiny_ltx, tmp_path, allowed):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest" if allowed else "high")
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path, precision__allow_tf32=allowed)
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    finally:
        torch.set_float32_matmul_precision(before)
