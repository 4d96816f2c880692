"""Exported files, read by the loaders that users have, give the trained network; bad ones are never accepted."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nets
from models import adapters, export, load, lora_files
from models.comfy_names import LTX
from models.export import ExportError
from nets import COMFY, MAIN, TARGETS, call_ltx

LORAS, LYCORIS = ["lora", "dora", "rslora"], ["lokr", "loha"]


def trained(folder, **given):
    return nets.trained(load.load(folder, "transformer"), **given)


@pytest.fixture(scope="module")
def pipeline_class():
    from diffusers import LTXPipeline

    return LTXPipeline


def both(pipeline_class, net, folder):
    export.save_lora(pipeline_class, net, folder, LTX)
    export.verify_lora(pipeline_class, folder, net, LTX)


# -- diffusers and peft ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LORAS)
def test_plain_diffusers_gives_the_trained_output(kind, tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx, type=kind)
    both(pipeline_class, net, tmp_path)
    pipe = pipeline_class.from_pretrained(tiny_ltx)
    base = call_ltx(pipe.transformer)
    pipe.load_lora_weights(tmp_path)
    torch.testing.assert_close(call_ltx(pipe.transformer), call_ltx(net), rtol=0, atol=0)
    assert not torch.allclose(base, call_ltx(net), atol=1e-2)


@pytest.mark.parametrize("kind", LYCORIS)
def test_peft_gives_the_trained_output(kind, tiny_ltx, pipeline_class, tmp_path):
    from peft import PeftModel

    net = trained(tiny_ltx, type=kind)
    both(pipeline_class, net, tmp_path)
    assert not (tmp_path / MAIN).exists()
    base = load.load(tiny_ltx, "transformer")
    torch.testing.assert_close(call_ltx(PeftModel.from_pretrained(base, tmp_path)), call_ltx(net), rtol=0, atol=0)


def test_condition_pipeline_reads_it_too(tiny_ltx_condition, tmp_path):
    from diffusers import LTXConditionPipeline

    net = trained(tiny_ltx_condition)
    both(LTXConditionPipeline, net, tmp_path)
    pipe = LTXConditionPipeline.from_pretrained(tiny_ltx_condition)
    pipe.load_lora_weights(tmp_path)
    assert torch.equal(call_ltx(pipe.transformer), call_ltx(net))


def test_key_names_written_down(tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx, targets=["proj_in", "time_embed.linear", "0.attn1.to_out.0"])
    both(pipeline_class, net, tmp_path)
    modules = ["proj_in", "time_embed.linear", "transformer_blocks.0.attn1.to_out.0"]
    assert sorted(load_file(tmp_path / MAIN)) == [f"transformer.{m}.lora_{x}.weight" for m in modules for x in "AB"]
    modules = ["adaln_single.linear", "patchify_proj", "transformer_blocks.0.attn1.to_out.0"]
    leaves = ["alpha", "lora_A.weight", "lora_B.weight"]
    assert sorted(load_file(tmp_path / COMFY)) == [f"diffusion_model.{m}.{leaf}" for m in modules for leaf in leaves]


def test_metadata_holds_rank_and_alpha(tiny_ltx, pipeline_class, tmp_path):
    both(pipeline_class, trained(tiny_ltx, type="rslora"), tmp_path)
    with safe_open(tmp_path / MAIN, "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 8.0)
    assert metadata["transformer.use_rslora"] is True


def test_no_wrapper_prefixes_and_a_gathered_state(tiny_ltx, pipeline_class, tmp_path):
    from models.memory import compile_blocks

    net = trained(tiny_ltx, also_train=["*norm_q*"])
    compile_blocks(net, "blocks", "eager")
    full = net.state_dict()
    export.save_lora(pipeline_class, net, tmp_path, LTX, full)
    export.verify_lora(pipeline_class, tmp_path, net, LTX, full)
    keys = [key for file in tmp_path.glob("*.safetensors") for key in load_file(file)]
    parts = {part for key in keys for part in key.split(".")}
    assert len(keys) > 80 and not parts & {"_orig_mod", "module", "base_model", "base_layer", "default"}


def test_also_trained_parameters_have_their_own_file(tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx, also_train=["*norm*", "transformer_blocks.0.attn1.to_q.bias"])
    both(pipeline_class, net, tmp_path)
    pipe = pipeline_class.from_pretrained(tiny_ltx)
    also = load_file(tmp_path / "also_trained.safetensors")
    assert "transformer_blocks.0.attn1.to_q.bias" in also and len(also) == 9
    assert pipe.transformer.load_state_dict(also, strict=False).unexpected_keys == []
    pipe.load_lora_weights(tmp_path, weight_name=MAIN)
    assert torch.equal(call_ltx(pipe.transformer), call_ltx(net))


# -- ComfyUI ---------------------------------------------------------------------------------------------------------


def comfy_delta(leaves, shape):
    """What ComfyUI adds to a weight, written from its formulas: comfy/weight_adapter/{lora,loha,lokr}.py."""
    alpha = leaves["alpha"].item() if "alpha" in leaves else None
    if "lora_B.weight" in leaves:
        down = leaves["lora_A.weight"]
        return leaves["lora_B.weight"] @ down * (1.0 if alpha is None else alpha / down.shape[0])
    if "hada_w1_a" in leaves:
        a, b = (leaves[f"hada_w{i}_a"] @ leaves[f"hada_w{i}_b"] for i in (1, 2))
        return a * b * (alpha / leaves["hada_w1_b"].shape[0])
    rank, factors = None, []
    for i in (1, 2):
        if f"lokr_w{i}" in leaves:
            factors.append(leaves[f"lokr_w{i}"])
        else:
            rank = leaves[f"lokr_w{i}_b"].shape[0]
            factors.append(leaves[f"lokr_w{i}_a"] @ leaves[f"lokr_w{i}_b"])
    return torch.kron(*factors).reshape(shape) * (1.0 if alpha is None or rank is None else alpha / rank)


@pytest.mark.parametrize(
    ("kind", "rank"), [("lora", 4), ("rslora", 4), ("lora", 3), ("loha", 4), ("lokr", 2), ("lokr", 4)]
)
def test_comfyui_adds_what_peft_adds(kind, rank, tiny_ltx, pipeline_class, tmp_path):
    from peft.tuners.tuners_utils import BaseTunerLayer

    net = trained(tiny_ltx, type=kind, rank=rank, alpha=7.0)
    both(pipeline_class, net, tmp_path)
    files = lora_files.split(load_file(tmp_path / COMFY))
    layers = {name: m for name, m in net.named_modules() if isinstance(m, BaseTunerLayer)}
    assert len(layers) == 16 == len(files)
    for name, layer in layers.items():
        expected = layer.get_delta_weight("default").detach()
        found = comfy_delta(files[f"diffusion_model.{name}"], expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [*LORAS, *LYCORIS])
def test_comfyui_round_trip_is_exact(kind, tiny_ltx):
    alpha = 4.0 if kind == "lokr" else 8.0
    net = trained(tiny_ltx, type=kind, alpha=alpha, targets=["to_q", "proj_in", "time_embed.linear"])
    state, scales = adapters.adapter_state(net), adapters.scales(net)
    comfy = lora_files.to_comfyui(state, scales, LTX)
    back, back_scales = lora_files.from_comfyui(comfy, LTX)
    assert back.keys() == state.keys() and all(torch.equal(back[k], v) for k, v in state.items())
    assert back_scales == pytest.approx(scales, rel=1e-7)
    again = lora_files.to_comfyui(back, back_scales, LTX)
    assert again.keys() == comfy.keys() and all(torch.equal(again[k], v) for k, v in comfy.items())


def test_dora_magnitudes_are_columns_for_comfyui(tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx, type="dora")
    both(pipeline_class, net, tmp_path)
    ours = adapters.adapter_state(net)["transformer_blocks.0.attn1.to_q.lora_magnitude_vector"]
    theirs = load_file(tmp_path / COMFY)["diffusion_model.transformer_blocks.0.attn1.to_q.dora_scale"]
    assert theirs.shape == (32, 1) and torch.equal(theirs[:, 0], ours)


def test_alpha_is_left_out_where_it_changes_nothing(tiny_ltx, pipeline_class, tmp_path):
    both(pipeline_class, trained(tiny_ltx, rank=4, alpha=4.0), tmp_path / "one")
    assert not any(key.endswith("alpha") for key in load_file(tmp_path / "one" / COMFY))
    both(pipeline_class, trained(tiny_ltx, rank=4, alpha=8.0), tmp_path / "two")
    alphas = [v.item() for k, v in load_file(tmp_path / "two" / COMFY).items() if k.endswith("alpha")]
    assert alphas == [8.0] * 16


def test_an_adapter_without_comfyui_names_is_exported_without_them(tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx)
    (tmp_path / COMFY).write_text("of an earlier run")
    names = {"blocks.*.**": "transformer_blocks.*.attn1.**"}
    (line,) = export.save_lora(pipeline_class, net, tmp_path, names)
    assert line.startswith(f"no {COMFY}: transformer_blocks.0.attn2.to_q has no ComfyUI name; ")
    assert line.endswith(" (8 in all)")
    export.verify_lora(pipeline_class, tmp_path, net, names)
    assert sorted(p.name for p in tmp_path.iterdir()) == [MAIN]


# -- files that must not be accepted ---------------------------------------------------------------------------------


def edit(file, change):
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    state = load_file(file)
    change(state)
    save_file(state, file, metadata=metadata)


KEY = "transformer.transformer_blocks.0.attn1.to_q.lora_A.weight"
DAMAGE = {
    "not finite": lambda s: s[KEY][0].fill_(float("nan")),
    "missing": lambda s: s.pop(KEY),
    "too many": lambda s: s.update({"transformer.x.lora_A.weight": torch.ones(2, 2)}),
    "empty": lambda s: s.update({KEY: torch.zeros(0, 32)}),
    "not as in the network": lambda s: s[KEY][0, 0].add_(1e-3),
}


@pytest.mark.parametrize("says", list(DAMAGE))
def test_damage_in_the_file(says, tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx)
    both(pipeline_class, net, tmp_path)
    edit(tmp_path / MAIN, DAMAGE[says])
    with pytest.raises(ExportError, match=rf"{MAIN}: .*{says}"):
        export.verify_lora(pipeline_class, tmp_path, net, LTX)


@pytest.mark.parametrize("file", [MAIN, COMFY])
def test_file_cut_short(file, tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx)
    both(pipeline_class, net, tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-100])
    with pytest.raises(ExportError, match=f"{file}: cannot be read back"):
        export.verify_lora(pipeline_class, tmp_path, net, LTX)


def test_alpha_in_either_file(tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx)
    both(pipeline_class, net, tmp_path)
    edit(tmp_path / COMFY, lambda s: s["diffusion_model.transformer_blocks.0.attn1.to_q.alpha"].fill_(4))
    with pytest.raises(ExportError, match=f"{COMFY}: .*to_q.alpha not as in the network"):
        export.verify_lora(pipeline_class, tmp_path, net, LTX)
    save_file(load_file(tmp_path / MAIN), tmp_path / MAIN, metadata={"format": "pt"})  # what loses alpha
    with pytest.raises(ExportError, match=r"metadata is not the adapter's: .*lora_alpha None for 8.0"):
        export.verify_lora(pipeline_class, tmp_path, net, LTX)


@pytest.mark.parametrize("kind", [*LORAS, *LYCORIS])
def test_an_adapter_without_effect_is_refused(kind, tiny_ltx, pipeline_class, tmp_path):
    net = load.load(tiny_ltx, "transformer")
    given = dict(rank=4, alpha=8.0, targets=[], exclude=[], also_train=[], dropout=0.0, type=kind)
    adapters.attach(net, SimpleNamespace(**given), TARGETS)
    export.save_lora(pipeline_class, net, tmp_path, LTX)
    with pytest.raises(ExportError, match="no effect"):
        export.verify_lora(pipeline_class, tmp_path, net, LTX)


def test_nan_in_the_network_itself(tiny_ltx, pipeline_class, tmp_path):
    net = trained(tiny_ltx)
    next(iter(adapters.trainable(net).values())).data.fill_(float("inf"))
    export.save_lora(pipeline_class, net, tmp_path, LTX)
    with pytest.raises(ExportError, match="not finite"):
        export.verify_lora(pipeline_class, tmp_path, net, LTX)


# -- full fine-tune --------------------------------------------------------------------------------------------------


@pytest.fixture
def full_net(tiny_ltx):
    net = load.load(tiny_ltx, "transformer")
    for parameter in net.parameters():
        parameter.data += 0.01
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_folder_loads_and_the_live_one_stays(dtype, full_net, tmp_path):
    from diffusers import LTXVideoTransformer3DModel

    before = {k: v.clone() for k, v in full_net.state_dict().items()}
    export.save_transformer(full_net, tmp_path, dtype)
    export.verify_transformer(tmp_path, full_net, dtype)
    assert all(p.dtype == torch.float32 and torch.equal(p, before[k]) for k, p in full_net.state_dict().items())
    loaded = LTXVideoTransformer3DModel.from_pretrained(tmp_path, dtype=dtype)
    expected = full_net.to(dtype).state_dict()
    assert loaded.config.num_layers == 2
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())


def test_shards_and_a_gathered_state(full_net, tmp_path):
    from diffusers import LTXVideoTransformer3DModel

    full = full_net.state_dict()
    export.save_transformer(full_net, tmp_path, torch.bfloat16, full, max_shard_size="50KB")
    export.verify_transformer(tmp_path, full_net, torch.bfloat16, full)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and list(tmp_path.glob("*.index.json"))
    loaded = LTXVideoTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(v, full[k].bfloat16()) for k, v in loaded.state_dict().items())


def test_bad_transformer_folders(full_net, tmp_path):
    export.save_transformer(full_net, tmp_path, torch.float32, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ExportError, match="tensors were not written"):
        export.verify_transformer(tmp_path, full_net, torch.float32)
    shard.write_bytes(whole[:-10])
    with pytest.raises(ExportError, match="cannot be read back"):
        export.verify_transformer(tmp_path, full_net, torch.float32)
    shard.write_bytes(whole)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ExportError, match=r"config\.json"):
        export.verify_transformer(tmp_path, full_net, torch.float32)
    full_net.proj_in.weight.data[0, 0] = float("nan")
    export.save_transformer(full_net, tmp_path / "nan", torch.float32)
    with pytest.raises(ExportError, match=r"proj_in\.weight not finite"):
        export.verify_transformer(tmp_path / "nan", full_net, torch.float32)
