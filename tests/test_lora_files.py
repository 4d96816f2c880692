"""ComfyUI's files of each model, against diffusers' own converters and loaders; fused layers there and back."""

from types import CodeType, FunctionType

import pytest
import torch
from safetensors.torch import load_file

from models import adapters, comfy_names, export, lora_files
from models.comfy_names import COGVIDEOX, HUNYUAN, KNOWN, LTX, SAME
from models.lora_files import AdapterError
from nets import (
    BLOCKS,
    COMFY,
    EVERYTHING,
    MAIN,
    QKV,
    WIDTH,
    call_hunyuan,
    call_ltx,
    cogvideox,
    hunyuan,
    hunyuan_pipeline,
    lora,
    ltx,
    trained,
)


def at_width(function, width):
    """diffusers' converter, which has the width of the published model written into it, for another one."""

    def changed(code):
        consts = (changed(c) if isinstance(c, CodeType) else width if c == 3072 else c for c in code.co_consts)
        return code.replace(co_consts=tuple(consts))

    return FunctionType(changed(function.__code__), function.__globals__)


# -- the maps, against diffusers' converters of whole checkpoints ----------------------------------------------------


def original_name(name):
    """What the published HunyuanVideo checkpoint calls a module that ComfyUI renames when it loads it."""
    for theirs, original in (
        ("time_in.in_layer", "time_in.mlp.0"),
        ("time_in.out_layer", "time_in.mlp.2"),
        ("guidance_in.in_layer", "guidance_in.mlp.0"),
        ("guidance_in.out_layer", "guidance_in.mlp.2"),
        ("t_embedder.in_layer", "t_embedder.mlp.0"),
        ("t_embedder.out_layer", "t_embedder.mlp.2"),
        ("c_embedder.in_layer", "c_embedder.linear_1"),
        ("c_embedder.out_layer", "c_embedder.linear_2"),
    ):
        name = name.replace(theirs, original)
    return name


def checkpoint(net, names, deltas):
    """The original checkpoint's weights of the linears and convolutions of `net`, each with its delta added."""
    weights = {name: m.weight.detach() for name, m in net.named_modules() if getattr(m, "weight", None) is not None}
    weights = {name: w for name, w in weights.items() if w.ndim > 1}
    out = {}
    for module in weights:
        layer = comfy_names.layer_of(module, names)
        weight = torch.cat([weights[part] for part in layer.parts])
        if layer.swapped:
            weight = torch.cat(weight.chunk(2)[::-1])
        delta = deltas.pop(layer.name, None)
        if delta is not None:
            weight = weight + delta.reshape(weight.shape)
        out.setdefault(f"{original_name(layer.name)}.weight", weight)
    assert not deltas
    return out, weights


def comfy_deltas(comfy):
    """What ComfyUI adds to each weight, from its formula in comfy/weight_adapter/lora.py."""
    out = {}
    for key, leaves in lora_files.split(comfy).items():
        scale = leaves["alpha"].item() / leaves["lora_A.weight"].shape[0] if "alpha" in leaves else 1.0
        delta = leaves["lora_B.weight"].flatten(1) @ leaves["lora_A.weight"].flatten(1) * scale
        out[key.removeprefix("diffusion_model.")] = delta
    return out


def converters():
    from diffusers.loaders import single_file_utils as single

    return {
        "hunyuan": at_width(single.convert_hunyuan_video_transformer_to_diffusers, WIDTH),
        "ltx": single.convert_ltx_transformer_checkpoint_to_diffusers,
    }


@pytest.mark.parametrize("name", ["hunyuan", "ltx"])
@pytest.mark.parametrize("alpha", [4.0, 8.0])
def test_a_checkpoint_with_the_comfyui_lora_is_the_network_with_its_adapter(name, alpha):
    """Every linear and convolution is adapted: names, order of rows, scale and swapped halves are all in it."""
    net = {"hunyuan": hunyuan, "ltx": ltx}[name]()
    original = {"hunyuan": hunyuan, "ltx": ltx}[name]()
    trained(net, EVERYTHING, alpha=alpha)
    comfy = lora_files.to_comfyui(adapters.adapter_state(net), adapters.scales(net), KNOWN[name])
    deltas = comfy_deltas(comfy)
    weights, own = checkpoint(original, KNOWN[name], deltas)
    assert len(own) == len(adapters.scales(net)) > 25
    found = converters()[name](weights)
    for module, layer in net.named_modules():
        if module in own:
            expected = own[module] + layer.get_delta_weight("default").detach()
            torch.testing.assert_close(found.pop(f"{module}.weight"), expected, rtol=1e-5, atol=1e-5)
    assert not found


@pytest.mark.parametrize(("net", "names"), [(hunyuan, HUNYUAN), (ltx, LTX), (cogvideox, COGVIDEOX)])
def test_every_layer_has_one_comfyui_name_and_comes_back(net, names):
    net = net()
    modules = [name for name, m in net.named_modules() if isinstance(m, adapters.ADAPTABLE["lora"])]
    layers = {module: comfy_names.layer_of(module, names) for module in modules}
    assert all(layers.values())
    assert sorted(part for name in {x.name for x in layers.values()} for part in layers_parts(name, names)) == sorted(
        modules
    )


def layers_parts(name, names):
    return comfy_names.layer_named(name, names).parts


def test_names_written_down():
    """ComfyUI: comfy/lora.py takes these for HunyuanVideo, and comfy/ldm/cogvideo/model.py has these."""
    for module, name in (
        ("transformer_blocks.3.attn.to_k", "double_blocks.3.img_attn_qkv"),
        ("transformer_blocks.3.attn.add_v_proj", "double_blocks.3.txt_attn_qkv"),
        ("transformer_blocks.3.attn.to_add_out", "double_blocks.3.txt_attn_proj"),
        ("transformer_blocks.3.ff_context.net.2", "double_blocks.3.txt_mlp.fc2"),
        ("single_transformer_blocks.11.proj_mlp", "single_blocks.11.linear1"),
        ("single_transformer_blocks.11.proj_out", "single_blocks.11.linear2"),
        ("single_transformer_blocks.11.norm.linear", "single_blocks.11.modulation.linear"),
        ("time_text_embed.text_embedder.linear_1", "vector_in.in_layer"),
        ("norm_out.linear", "final_layer.adaLN_modulation.1"),
    ):
        assert comfy_names.layer_of(module, HUNYUAN).name == name
    assert comfy_names.layer_of("transformer_blocks.7.attn1.to_out.0", COGVIDEOX).name == "blocks.7.attn_out"
    assert comfy_names.layer_of("time_embed.emb.timestep_embedder.linear_1", LTX).name == (
        "adaln_single.emb.timestep_embedder.linear_1"
    )
    assert comfy_names.layer_of("patchify_proj", LTX) is None
    assert comfy_names.layer_of("any.module.0", SAME).name == "any.module.0"


def test_comfyui_reads_every_key_of_the_hunyuan_file():
    """ComfyUI renames the checkpoint's modules when it loads one, and takes LoRA keys by its own or an older name."""
    net = trained(hunyuan(), EVERYTHING)
    comfy = lora_files.to_comfyui(adapters.adapter_state(net), adapters.scales(net), HUNYUAN)
    weights, _ = checkpoint(hunyuan(), HUNYUAN, {})
    taken = {}
    for key, weight in weights.items():
        for old, new in (  # comfy/supported_models.py, HunyuanVideo.process_unet_state_dict
            ("txt_in.t_embedder.mlp.0.", "txt_in.t_embedder.in_layer."),
            ("txt_in.t_embedder.mlp.2.", "txt_in.t_embedder.out_layer."),
            ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
            ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
            ("_mod.linear.", "_mod.lin."),
            ("_attn_qkv.", "_attn.qkv."),
            ("mlp.fc1.", "mlp.0."),
            ("mlp.fc2.", "mlp.2."),
            ("_attn_proj.", "_attn.proj."),
            (".modulation.linear.", ".modulation.lin."),
            ("_in.mlp.2.", "_in.out_layer."),
            ("_in.mlp.0.", "_in.in_layer."),
        ):
            key = key.replace(old, new)
        taken[key.removesuffix(".weight")] = weight.shape
        for old, new in (  # comfy/lora.py, model_lora_keys_unet
            ("_mod.lin.", "_mod.linear."),
            ("_attn.qkv.", "_attn_qkv."),
            ("_attn.proj.", "_attn_proj."),
            ("mlp.0.", "mlp.fc1."),
            ("mlp.2.", "mlp.fc2."),
            (".modulation.lin.", ".modulation.linear."),
        ):
            key = key.replace(old, new)
        taken[key.removesuffix(".weight")] = weight.shape
    deltas = comfy_deltas(comfy)
    assert len(deltas) == len(weights)
    for name, delta in deltas.items():
        assert delta.numel() == taken[name].numel() and delta.shape[0] == taken[name][0], name


# -- diffusers' own loaders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets", [BLOCKS, r".*transformer_blocks\.\d+\.(attn\.(to_[qv]|add_k_proj)|proj_mlp|norm\.linear|ff\.net.*)"]
)
def test_diffusers_reads_the_hunyuan_file(targets, tmp_path, monkeypatch):
    from diffusers import HunyuanVideoPipeline
    from diffusers.loaders import lora_pipeline

    name = "_convert_hunyuan_video_lora_to_diffusers"
    monkeypatch.setattr(lora_pipeline, name, at_width(getattr(lora_pipeline, name), WIDTH))
    net = trained(hunyuan(), targets, alpha=4.0)
    assert export.save_lora(HunyuanVideoPipeline, net, tmp_path, HUNYUAN) == []
    export.verify_lora(HunyuanVideoPipeline, tmp_path, net, HUNYUAN)
    out = {}
    for file in (MAIN, COMFY):
        pipe = hunyuan_pipeline(hunyuan())
        base = call_hunyuan(pipe.transformer)
        pipe.load_lora_weights(tmp_path, weight_name=file)
        out[file] = call_hunyuan(pipe.transformer)
    torch.testing.assert_close(out[MAIN], call_hunyuan(net), rtol=0, atol=0)
    torch.testing.assert_close(out[COMFY], out[MAIN], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(base, out[MAIN], atol=1e-2)


def test_diffusers_reads_the_ltx_file(tmp_path):
    from diffusers import LTXPipeline

    net = trained(ltx(), r"transformer_blocks.*(to_[qkv]|to_out\.0|ff\.net.*)", alpha=4.0)
    export.save_lora(LTXPipeline, net, tmp_path, LTX)
    pipe = LTXPipeline(None, None, None, None, ltx())
    base = call_ltx(pipe.transformer)
    pipe.load_lora_weights(tmp_path, weight_name=COMFY)
    assert torch.equal(call_ltx(pipe.transformer), call_ltx(net))
    assert not torch.allclose(base, call_ltx(net), atol=1e-2)


# -- fused layers ----------------------------------------------------------------------------------------------------


def round_trip(state, scales, names=HUNYUAN, rows=None):
    comfy = lora_files.to_comfyui(state, scales, names, rows)
    back, back_scales = lora_files.from_comfyui(comfy, names)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], tensor) and back[key].is_contiguous() for key, tensor in state.items())
    assert back_scales == pytest.approx(scales, rel=1e-7)
    again = lora_files.to_comfyui(back, back_scales, names, rows)
    assert again.keys() == comfy.keys() and all(torch.equal(again[key], tensor) for key, tensor in comfy.items())
    return comfy


@pytest.mark.parametrize(
    ("targets", "given"),
    [
        (BLOCKS, {}),
        (EVERYTHING, {}),
        (EVERYTHING, dict(type="dora")),
        (EVERYTHING, dict(type="rslora", rank=3)),
        (r".*\.to_q", dict(rank=1)),
        (r".*\.(to_v|add_q_proj|add_v_proj)", {}),
        (r".*proj_mlp", {}),
        (r".*(attn\.to_k|proj_mlp)", dict(rank=6)),
        (r"x_embedder\.proj", {}),
    ],
)
def test_round_trip_is_exact(targets, given):
    net = trained(hunyuan(), targets, **given)
    round_trip(adapters.adapter_state(net), adapters.scales(net))


@pytest.mark.parametrize("net", [ltx, cogvideox])
def test_round_trip_of_the_other_models(net):
    names = {ltx: LTX, cogvideox: COGVIDEOX}[net]
    net = trained(net(), EVERYTHING)
    round_trip(adapters.adapter_state(net), adapters.scales(net), names)


@pytest.mark.parametrize("ranks", [(4, 2, 1), (2, 4, 0), (0, 1, 5), (3, 3, 6)])
def test_parts_of_different_ranks(ranks):
    comfy = round_trip(*lora(ranks))
    assert comfy["diffusion_model.double_blocks.0.img_attn_qkv.lora_A.weight"].shape == (sum(ranks), WIDTH)
    assert comfy["diffusion_model.double_blocks.0.img_attn_qkv.alpha"] == 2.0 * sum(ranks)


@pytest.mark.parametrize("zero", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_parts_that_never_moved(zero):
    round_trip(*lora((4, 4, 4), zero))


def test_a_part_that_never_moved_does_not_fail_the_export(tmp_path):
    from diffusers import HunyuanVideoPipeline

    net = trained(hunyuan(), r"transformer_blocks\.0\.attn\.to_[kv]")
    net.transformer_blocks[0].attn.to_k.lora_B["default"].weight.data.zero_()  # in the file it may as well be to_q
    assert export.save_lora(HunyuanVideoPipeline, net, tmp_path, HUNYUAN) == []
    export.verify_lora(HunyuanVideoPipeline, tmp_path, net, HUNYUAN)


def test_missing_part_has_the_rows_of_the_network(tmp_path):
    from diffusers import HunyuanVideoPipeline

    net = trained(hunyuan(mlp_ratio=3.0), r"single_transformer_blocks\.\d+\.attn\.to_[qkv]")
    export.save_lora(HunyuanVideoPipeline, net, tmp_path, HUNYUAN)
    export.verify_lora(HunyuanVideoPipeline, tmp_path, net, HUNYUAN)
    b = load_file(tmp_path / COMFY)["diffusion_model.single_blocks.1.linear1.lora_B.weight"]
    assert b.shape == ((3 + 3) * WIDTH, 12)
    assert not b[3 * WIDTH :].any() and not b[:WIDTH, 4:].any() and b[:WIDTH, :4].all()


def test_a_lora_trained_on_the_fused_layer_is_divided_by_rows():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, WIDTH, generator=g), torch.randn(7 * WIDTH, 4, generator=g)
    name = "diffusion_model.single_blocks.5.linear1"
    file = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": torch.tensor(2.0)}
    state, scales = lora_files.from_comfyui(file, HUNYUAN)
    modules = lora_files.split(state)
    block = "single_transformer_blocks.5"
    assert list(modules) == [*(f"{block}.attn.to_{x}" for x in "qkv"), f"{block}.proj_mlp"]
    assert all(torch.equal(leaves["lora_A.weight"], a) for leaves in modules.values())
    assert torch.equal(torch.cat([leaves["lora_B.weight"] for leaves in modules.values()]), b)
    assert set(scales.values()) == {0.5}
    comfy = round_trip(state, scales)  # and back to one A
    assert torch.equal(comfy[f"{name}.lora_A.weight"], a) and torch.equal(comfy[f"{name}.lora_B.weight"], b)


def test_other_spellings_are_read():
    g = torch.Generator().manual_seed(0)
    for name, modules in (
        ("double_blocks.0.img_attn.qkv", QKV),
        ("double_blocks.0.img_attn.proj", ["transformer_blocks.0.attn.to_out.0"]),
        ("double_blocks.0.txt_mlp.0", ["transformer_blocks.0.ff_context.net.0.proj"]),
        ("time_in.mlp.0", ["time_text_embed.timestep_embedder.linear_1"]),
        ("txt_in.c_embedder.linear_2", ["context_embedder.time_text_embed.text_embedder.linear_2"]),
    ):
        leaves = {"lora_A.weight": torch.randn(2, 4, generator=g), "lora_B.weight": torch.randn(12, 2, generator=g)}
        state, _ = lora_files.from_comfyui({f"diffusion_model.{name}.{x}": t for x, t in leaves.items()}, HUNYUAN)
        assert list(lora_files.split(state)) == modules


@pytest.mark.parametrize(
    ("state", "scales", "says"),
    [
        (
            lora((2, 2, 2))[0],
            dict(zip(QKV, (1.0, 2.0, 1.0), strict=True)),
            "has one alpha, and .*to_q and .*differently",
        ),
        ({"elsewhere.lora_A.weight": torch.ones(2, 4)}, {"elsewhere": 1.0}, "elsewhere has no ComfyUI name"),
    ],
)
def test_what_has_no_place_in_a_comfyui_file(state, scales, says):
    with pytest.raises(AdapterError, match=says):
        lora_files.to_comfyui(state, scales, HUNYUAN)


@pytest.mark.parametrize(
    ("kind", "targets", "says"),
    [
        ("loha", r".*attn\.to_q", r"double_blocks.0.img_attn_qkv is one layer .*to_q \(hada_w1_a.*cannot be one"),
        ("lokr", r".*attn\.to_q", r"double_blocks.0.img_attn_qkv is one layer .*to_q \(lokr_w1.*cannot be one"),
        ("dora", BLOCKS, r"single_blocks.0.linear1 is one layer .*DoRA of it needs .*blocks.0.proj_mlp too"),
        ("lokr", r"norm_out\.linear", "final_layer.adaLN_modulation.1 has its rows in another order"),
    ],
)
def test_kinds_that_cannot_be_fused_are_exported_for_diffusers_alone(kind, targets, says, tmp_path):
    from diffusers import HunyuanVideoPipeline

    net = trained(hunyuan(), targets, type=kind)
    with pytest.raises(AdapterError, match=says):
        lora_files.to_comfyui(adapters.adapter_state(net), adapters.scales(net), HUNYUAN)
    (line,) = export.save_lora(HunyuanVideoPipeline, net, tmp_path, HUNYUAN)
    assert line.startswith(f"no {COMFY}: ") and not (tmp_path / COMFY).exists()
    export.verify_lora(HunyuanVideoPipeline, tmp_path, net, HUNYUAN)


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_kinds_that_need_no_fusing_are_exported(kind):
    net = trained(hunyuan(), r".*(to_out\.0|ff\.net\.2)", type=kind)
    round_trip(
        adapters.adapter_state(net),
        adapters.scales(net) if kind == "loha" else dict.fromkeys(adapters.scales(net), 1.0),
    )


def test_comfyui_files_that_do_not_fit():
    name = "diffusion_model.double_blocks.0.img_attn_qkv"
    a, b = {f"{name}.lora_A.weight": torch.ones(2, 8)}, f"{name}.lora_B.weight"
    for state, says in (
        ({"diffusion_model.blocks.0.q.lora_A.weight": torch.ones(2, 4)}, "blocks.0.q is no ComfyUI name of this model"),
        (a | {b: torch.ones(16, 2)}, "16 rows are too few for transformer_blocks.0.attn.to_q"),
        (a, r"img_attn_qkv: lora_A.weight cannot be divided"),
        ({f"{name}.hada_w1_a": torch.ones(2, 4)}, r"img_attn_qkv: hada_w1_a cannot be divided"),
    ):
        with pytest.raises(AdapterError, match=says):
            lora_files.from_comfyui(state, HUNYUAN)
