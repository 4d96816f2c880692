"""fp8 storage trains the same adapter as weights rounded through fp8; what cannot work is refused before loading."""

import re
from types import SimpleNamespace

import pytest
import torch

import nets
from models import adapters, load, memory, precision


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
