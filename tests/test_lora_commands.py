"""`python -m models.export`: adapter files converted, merged and described, by the functions and as a program."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models import adapters, export, load, lora_commands, lora_files
from models.comfy_names import COGVIDEOX, HUNYUAN, LTX
from nets import (
    BLOCKS,
    COMFY,
    EVERYTHING,
    MAIN,
    QKV,
    call_hunyuan,
    call_ltx,
    cogvideox,
    hunyuan,
    hunyuan_pipeline,
    lora,
    ltx,
    trained,
)

# -- convert ---------------------------------------------------------------------------------------------------------


def saved(folder, net, pipeline, names):
    import diffusers

    export.save_lora(getattr(diffusers, pipeline), net, folder, names)
    return folder / MAIN


def same_file(one, other):
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def run(capsys, *words):
    code = lora_commands.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out if code == 0 else err


@pytest.mark.parametrize("alpha", [4.0, 8.0])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_convert_there_and_back(kind, alpha, tmp_path, capsys):
    net = trained(hunyuan(), EVERYTHING, alpha=alpha, type=kind)
    file = saved(tmp_path / "lora", net, "HunyuanVideoPipeline", HUNYUAN)
    code, out = run(capsys, "convert", file, "--to", "comfyui", "--out", tmp_path)
    modules = len(adapters.scales(net))
    assert (code, out) == (0, f"{tmp_path / COMFY}: {modules} modules, from diffusers to comfyui (hunyuan names)\n")
    assert same_file(tmp_path / COMFY, tmp_path / "lora" / COMFY)
    code, out = run(capsys, "convert", tmp_path / COMFY, "--to", "diffusers", "--out", tmp_path / "back.safetensors")
    assert code == 0 and same_file(tmp_path / "back.safetensors", file)
    pipe = hunyuan_pipeline(hunyuan())
    pipe.load_lora_weights(tmp_path, weight_name="back.safetensors")
    torch.testing.assert_close(call_hunyuan(pipe.transformer), call_hunyuan(net), rtol=1e-6, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back.safetensors", "lora", COMFY]


def test_converted_file_keeps_each_rank_and_alpha(tmp_path, capsys):
    """A file of another trainer: mixed ranks and alphas. diffusers must scale each module as ComfyUI does."""
    file, expected = {}, hunyuan()
    g = torch.Generator().manual_seed(0)
    for name, rank, alpha, module in (
        ("double_blocks.0.img_attn_proj", 2, 1.0, "transformer_blocks.0.attn.to_out.0"),
        ("double_blocks.1.img_attn_proj", 2, None, "transformer_blocks.1.attn.to_out.0"),
        ("double_blocks.1.txt_attn_proj", 4, 8.0, "transformer_blocks.1.attn.to_add_out"),
        ("single_blocks.1.linear2", 2, 4.0, "single_transformer_blocks.1.proj_out"),
        ("final_layer.linear", 2, 2.0, "proj_out"),
    ):
        weight = expected.get_submodule(module).weight
        a = torch.randn(rank, weight.shape[1], generator=g)
        b = torch.randn(weight.shape[0], rank, generator=g)
        file |= {f"diffusion_model.{name}.lora_A.weight": a, f"diffusion_model.{name}.lora_B.weight": b}
        if alpha is not None:
            file[f"diffusion_model.{name}.alpha"] = torch.tensor(alpha)
        weight.data += b @ a * (1.0 if alpha is None else alpha / rank)
    save_file(file, tmp_path / "foreign.safetensors")
    code, _ = run(capsys, "convert", tmp_path / "foreign.safetensors", "--to", "diffusers", "--out", tmp_path / MAIN)
    assert code == 0
    pipe = hunyuan_pipeline(hunyuan())
    pipe.load_lora_weights(tmp_path, weight_name=MAIN)
    torch.testing.assert_close(call_hunyuan(pipe.transformer), call_hunyuan(expected), rtol=1e-4, atol=1e-4)
    read = lora_files.read(tmp_path / MAIN, HUNYUAN)
    assert read.scales["transformer_blocks.1.attn.to_add_out"] == 2 and read.scales["proj_out"] == 1


def test_the_file_may_be_read_by_whom_the_folder_may(tmp_path, capsys):
    """safetensors writes with mode 600; ComfyUI often runs as another user."""
    file = saved(tmp_path, trained(ltx(), r".*attn2\.to_q"), "LTXPipeline", LTX)
    tmp_path.chmod(0o755)
    assert run(capsys, "convert", file, "--to", "comfyui", "--out", tmp_path / "new.safetensors")[0] == 0
    assert (tmp_path / "new.safetensors").stat().st_mode & 0o777 == 0o644


def test_convert_finds_the_model_and_names_the_file(tmp_path, capsys):
    file = saved(tmp_path, trained(ltx(), r".*(attn2\.to_q|proj_in)"), "LTXPipeline", LTX)
    (tmp_path / COMFY).unlink()
    code, out = run(capsys, "convert", tmp_path, "--to", "comfyui")
    assert code == 0 and out.endswith("from diffusers to comfyui (ltx names)\n")
    assert "diffusion_model.patchify_proj.alpha" in load_file(tmp_path / f"{file.stem}_comfyui.safetensors")
    assert run(capsys, "convert", file, "--to", "comfyui")[1].startswith(f"error: {tmp_path}/{file.stem}_comfyui")


def test_convert_asks_for_the_model_where_names_leave_doubt(tmp_path, capsys):
    file = saved(tmp_path, trained(cogvideox(), r".*attn1\.to_q"), "CogVideoXPipeline", COGVIDEOX)
    code, error = run(capsys, "convert", file, "--to", "comfyui", "--out", tmp_path / "x.safetensors")
    assert (code, error) == (
        1,
        f"error: {file}: the module names fit ltx and cogvideox; "
        "say with --model which it is (ltx, hunyuan, cogvideox)\n",
    )
    words = ["convert", file, "--to", "comfyui", "--out", tmp_path / "x.safetensors", "--model", "cogvideox"]
    assert run(capsys, *words)[0] == 0
    assert same_file(tmp_path / "x.safetensors", tmp_path / COMFY)


def test_original_names_behind_the_prefix_of_diffusers(tmp_path, capsys):
    """As Tencent's own files have them: ComfyUI takes them so, and so does diffusers."""
    net = trained(hunyuan(), BLOCKS, alpha=4.0)
    file = saved(tmp_path, net, "HunyuanVideoPipeline", HUNYUAN)
    renamed = {k.replace("diffusion_model.", "transformer."): v for k, v in load_file(tmp_path / COMFY).items()}
    save_file(renamed, tmp_path / "official.safetensors")
    code, _ = run(
        capsys, "convert", tmp_path / "official.safetensors", "--to", "diffusers", "--out", tmp_path / "new.safetensors"
    )
    assert code == 0 and same_file(tmp_path / "new.safetensors", file)
    assert adapters.load_lora_into(net, tmp_path / "official.safetensors", HUNYUAN) == []


def test_peft_files_convert_both_ways(tmp_path, capsys):
    net = trained(ltx(), r".*attn2\.to_[qkv]", type="loha")
    saved(tmp_path, net, "LTXPipeline", LTX)
    code, _ = run(capsys, "convert", tmp_path, "--to", "comfyui", "--out", tmp_path / "x.safetensors")
    assert code == 0 and same_file(tmp_path / "x.safetensors", tmp_path / COMFY)
    code, error = run(capsys, "convert", tmp_path / COMFY, "--to", "diffusers")
    assert code == 1 and "diffusers' pipelines read LoRA and DoRA only, not hada_w1_a, hada_w1_b" in error
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["convert", "{}/nothing", "--to", "comfyui"], "nothing: there is no such file or folder"),
        (["convert", "{}/ltx", "--to", "diffusers"], "already has the key names of diffusers"),
        (
            ["convert", "{}/ltx", "--to", "comfyui", "--model", "hunyuan", "--out", "{}/x"],
            "blocks.0.attn2.to_q has no ComfyUI name",
        ),
        (["convert", "{}/other.safetensors", "--to", "comfyui"], "no known model has all of them, such as layers.0.q"),
        (["convert", "{}/cut.safetensors", "--to", "comfyui"], "cannot be read as safetensors"),
        (["convert", "{}/kohya.safetensors", "--to", "diffusers"], "keys begin with neither transformer. .diffusers"),
    ],
)
def test_convert_says_what_is_wrong_in_one_line(words, says, tmp_path, capsys):
    file = saved(tmp_path / "ltx", trained(ltx(), r".*attn2\.to_q"), "LTXPipeline", LTX)
    other = {"transformer.layers.0.q.lora_A.weight": torch.ones(2, 4)}
    save_file(other, tmp_path / "other.safetensors")
    save_file({"lora_unet_double_blocks_0_img_attn_qkv.alpha": torch.ones(1)}, tmp_path / "kohya.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-9])
    code, error = run(capsys, *(word.format(tmp_path) for word in words))
    assert code == 1 and error.startswith("error: ") and says.replace(" .diff", " (diff") in error
    assert error.count("\n") == 1


# -- merge -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lora", "dora", "rslora", "loha", "lokr"])
def test_merged_transformer_gives_the_output_of_base_and_adapter(kind, dtype, tmp_path, capsys):
    from diffusers import LTXVideoTransformer3DModel

    base = ltx().to(dtype)
    base.save_pretrained(tmp_path / "base" / "transformer", max_shard_size="40KB")
    net = trained(ltx().to(dtype).float(), r".*(to_[qkv]|proj_in|time_embed\.linear)", type=kind)
    saved(tmp_path / "lora", net, "LTXPipeline", LTX)
    words = ["merge", tmp_path / "lora", "--base", tmp_path / "base", "--out", tmp_path / "merged"]
    code, out = run(capsys, *words)
    assert code == 0 and out.startswith(f"{tmp_path / 'merged'}: 14 of 14 adapted weights changed, ")
    merged = LTXVideoTransformer3DModel.from_pretrained(tmp_path / "merged", dtype=dtype)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    before, after = base.state_dict(), merged.state_dict()
    adapted = {f"{module}.weight" for module in adapters.scales(net)}
    assert {key for key in after if not torch.equal(before[key], after[key])} == adapted
    assert all(p.dtype == dtype for p in merged.parameters())
    if dtype == torch.float32:
        torch.testing.assert_close(call_ltx(merged), call_ltx(net), rtol=1e-4, atol=1e-4)
    for module in adapters.scales(net):  # rounded once, from the exact sum
        layer = net.get_submodule(module)
        layer.merge()
        exact = layer.base_layer.weight.detach()
        error = (after[f"{module}.weight"].float() - exact).abs()
        assert (error <= torch.finfo(dtype).eps * exact.abs() + 2e-6).all()


def test_merge_of_a_comfyui_file_with_convolution_and_what_trained_beside_it(tmp_path, capsys):
    from diffusers import HunyuanVideoTransformer3DModel

    base = hunyuan()
    base.save_pretrained(tmp_path / "base")
    net = trained(hunyuan(), EVERYTHING, also_train=["*norm_q*", "x_embedder.proj.bias"])
    saved(tmp_path / "lora", net, "HunyuanVideoPipeline", HUNYUAN)
    words = ["merge", tmp_path / "lora" / COMFY, "--base", tmp_path / "base", "--out", tmp_path / "merged"]
    code, out = run(capsys, *words)
    assert code == 0 and "weights of" in out and "also_trained.safetensors" in out
    merged = HunyuanVideoTransformer3DModel.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(call_hunyuan(merged), call_hunyuan(net), rtol=1e-4, atol=1e-4)


def bad_base(name, folder):
    base = ltx()
    if name == "fp8":
        base.proj_in.weight.data = base.proj_in.weight.data.to(torch.float8_e4m3fn)
    base.save_pretrained(folder)
    if name == "bitsandbytes":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (folder / "config.json").write_text(json.dumps(config))
    if name == "no weights":
        (folder / "diffusion_pytorch_model.safetensors").unlink()
    if name == "cut short":
        file = folder / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
    if name == "config":
        (folder / "config.json").write_text("{")
    if name == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        ("bitsandbytes", {}, "is quantised (bitsandbytes): merge into the weights it was quantised from"),
        ("fp8", {}, "proj_in.weight is stored as float8_e4m3fn: merge into the weights it was quantised from"),
        ("no weights", {}, "holds no weights as safetensors"),
        ("cut short", {}, "cannot be read as safetensors"),
        ("config", {}, "not valid JSON"),
        ("no config", {}, "no config.json; --base is a diffusers pipeline folder or its transformer folder"),
        ("good", {"x.lora_A.weight": (2, 4)}, "is not for"),
        ("good", {"proj_in.lora_B.weight": (40, 2)}, "proj_in: the adapter is for [40, 16], the weight has [32, 16]"),
        ("good", {"proj_in.lora_B.bias": (32,)}, "proj_in: an adapter of lora_A.weight, lora_B.bias, lora_B.weight"),
        ("good", {"proj_in.lora_B.weight": float("inf")}, "proj_in merged into torch.float32 is not finite"),
        ("good", {"proj_in.lora_B.weight": 1e-30}, "nothing of it is left after rounding"),
    ],
)
def test_merge_refuses(base, change, says, tmp_path, capsys):
    bad_base(base, tmp_path / "base")
    state = {"proj_in.lora_A.weight": torch.ones(2, 16), "proj_in.lora_B.weight": torch.ones(32, 2)}
    for key, value in change.items():
        state[key] = torch.ones(value) if isinstance(value, tuple) else torch.full((32, 2), value)
    save_file({f"transformer.{key}": tensor for key, tensor in state.items()}, tmp_path / "x.safetensors")
    words = ["merge", tmp_path / "x.safetensors", "--base", tmp_path / "base", "--out", tmp_path / "out"]
    code, error = run(capsys, *words)
    assert code == 1 and says in error and error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "x.safetensors"]


def test_merge_replaces_nothing(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    code, error = run(capsys, "merge", tmp_path / "x", "--base", tmp_path, "--out", tmp_path / "out")
    assert code == 1 and error == f"error: {tmp_path / 'out'}: exists already; give another --out\n"


# -- info ------------------------------------------------------------------------------------------------------------


def test_info_tells_what_is_in_a_file(tmp_path, capsys):
    file = saved(tmp_path, trained(hunyuan(), BLOCKS), "HunyuanVideoPipeline", HUNYUAN)
    code, out = run(capsys, "info", tmp_path)
    lines = out.splitlines()
    assert code == 0 and lines[:4] == [
        f"file      {file}",
        "names     diffusers",
        "model     hunyuan (by its module names)",
        "type      LoRA",
    ]
    assert lines[4].startswith("tensors   44, ") and ", float32, " in lines[4]
    assert lines[5:9] == [
        "finite    yes",
        "effect    yes",
        "modules   22",
        "     2 x single_transformer_blocks.*.attn.to_k: rank 4, alpha 8, scale 2",
    ]
    assert any(line.startswith("metadata  lora_adapter_metadata: {") for line in lines)
    code, out = run(capsys, "info", tmp_path / COMFY)
    assert "names     comfyui\nmodel     hunyuan" in out
    assert "     2 x double_blocks.*.img_attn_qkv: rank 12, alpha 24, scale 2\n" in out


def test_info_of_mixed_and_broken_files(tmp_path, capsys):
    state, _ = lora((2, 4, 2), zero=(1,))
    state |= lora((3, 2, 2), modules=[m.replace("0", "1") for m in QKV])[0]
    state[f"{QKV[0]}.lora_A.weight"][0, 0] = float("nan")
    save_file({f"transformer.{key}": tensor.bfloat16() for key, tensor in state.items()}, tmp_path / "x.safetensors")
    code, out = run(capsys, "info", tmp_path / "x.safetensors")
    assert code == 0
    assert f"finite    NO: {QKV[0]}.lora_A.weight\n" in out
    assert f"effect    none in {QKV[1]}\n" in out
    assert f"         {QKV[0]}: rank 2, alpha 2, scale 1\n" in out
    assert f"         {QKV[0].replace('0', '1')}: rank 3, alpha 3, scale 1\n" in out
    assert "     2 x transformer_blocks.*.attn.to_v: rank 2, alpha 2, scale 1\n" in out
    save_file(
        {f"transformer.{key}": torch.zeros_like(tensor) for key, tensor in state.items()}, tmp_path / "x.safetensors"
    )
    assert "effect    NONE\n" in run(capsys, "info", tmp_path / "x.safetensors")[1]


def test_info_of_a_model_that_is_not_known(tmp_path, capsys):
    file = {"diffusion_model.blocks.0.self_attn.q.lora_down.weight": torch.ones(2, 4)}
    file["diffusion_model.blocks.0.self_attn.q.lora_up.weight"] = torch.ones(4, 2)
    save_file(file, tmp_path / "wan.safetensors")
    code, out = run(capsys, "info", tmp_path / "wan.safetensors")
    assert code == 0 and "model     unknown" in out and "blocks.*.self_attn.q: rank 2, alpha 2, scale 1" in out


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "DoRA"])
def test_info_of_the_other_types(kind, tmp_path, capsys):
    net = trained(ltx(), r".*attn2\.to_q", type=kind.lower(), rank=2)
    saved(tmp_path, net, "LTXPipeline", LTX)
    code, out = run(capsys, "info", tmp_path)
    assert code == 0 and f"type      {kind}\n" in out and "effect    yes\n" in out
    assert "     2 x transformer_blocks.*.attn2.to_q: rank 2, alpha 8, scale 4\n" in out


# -- as a program ----------------------------------------------------------------------------------------------------


def program(*words):
    command = [sys.executable, "-X", "importtime", "-m", "models.export", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert not re.search(r"\| +(diffusers|transformers|peft|accelerate)$", done.stderr, re.M), "slow to start"
    return done.returncode, done.stdout, told


def test_the_program(tmp_path):
    code, out, told = program("--help")
    assert code == 0 and "convert" in out and told == []
    file = saved(tmp_path, trained(ltx(), r".*attn2\.to_q"), "LTXPipeline", LTX)
    code, out, told = program("convert", file, "--to", "comfyui", "--out", tmp_path / "x.safetensors")
    assert code == 0 and "(ltx names)" in out and told == []
    assert same_file(tmp_path / "x.safetensors", tmp_path / COMFY)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    code, out, told = program("info", tmp_path / "none")
    assert (code, out, told) == (1, "", [f"error: {tmp_path / 'none'}: there is no such file or folder"])


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["convert", "x"], ["convert", "x", "--to", "kohya"]])
def test_wrong_words_are_told_in_one_line(words, capsys):
    with pytest.raises(SystemExit, match="1"):
        lora_commands.main(words)
    assert capsys.readouterr().err.count("\n") == 1


def test_the_commands_of_the_docs(tiny_ltx, tmp_path, monkeypatch, capsys):
    """In their order, on a run's folder and a pipeline; then the python block."""
    page = (Path(__file__).parents[1] / "docs" / "lora_files.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    net = trained(load.load(tiny_ltx, "transformer"), r".*attn[12]\.to_[qkv]")
    saved(tmp_path / "runs" / "rabbit", net, "LTXPipeline", LTX)
    (tmp_path / "LTX-Video").symlink_to(tiny_ltx)
    for line in block.splitlines():
        words = line.split()
        assert words[:3] == ["python", "-m", "models.export"]
        assert lora_commands.main(words[3:]) == 0, capsys.readouterr().err
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names = {}
    exec(block.replace("bfloat16", "float32"), names)
    torch.testing.assert_close(call_ltx(names["pipe"].transformer), call_ltx(net), rtol=1e-4, atol=1e-4)
