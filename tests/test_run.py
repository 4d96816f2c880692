"""Whole runs: what a user gets at the end, loaded as a user loads it."""

import pytest
import torch
from diffusers import DiffusionPipeline, LTXVideoTransformer3DModel
from safetensors.torch import load_file

import runs
from data.video import probe
from nets import call_ltx
from trainers import validation
from trainers.config import OptionError

PROMPTS = """
defaults: {steps: 2, seed: 7}
prompts:
  - a cat
  - {prompt: a dog, frames: 1, negative_prompt: blurry}
  - {prompt: a still comes alive, image: first.png, frames: 9, fps: 12}
"""


@pytest.fixture
def prompts(tmp_path):
    from PIL import Image

    Image.new("RGB", (96, 64), (90, 140, 20)).save(tmp_path / "first.png")
    (tmp_path / "prompts.yaml").write_text(PROMPTS)
    return tmp_path / "prompts.yaml"


@pytest.mark.parametrize("family", ["ltx", "condition"])
def test_lora(tiny_ltx, tiny_ltx_condition, clips, tmp_path, prompts, family, monkeypatch):
    """The exported LoRA, alpha unlike rank, gives in a plain pipeline what the trained network gives."""
    model = {"ltx": tiny_ltx, "condition": tiny_ltx_condition}[family]
    sampled, as_uint8 = [], validation.as_uint8
    monkeypatch.setattr(validation, "as_uint8", lambda frames: sampled.append(as_uint8(frames)) or sampled[-1])
    out = tmp_path / "run"
    changes = dict(validation__prompts=prompts, validation__from_export=True, lora__alpha=12, train__steps=6)
    made = runs.run(model, clips, out, **changes)
    trained = call_ltx(made.network.eval())

    pipe = DiffusionPipeline.from_pretrained(model)
    assert (call_ltx(pipe.transformer) - trained).abs().max() > 1e-3
    pipe.load_lora_weights(out)
    torch.testing.assert_close(call_ltx(pipe.transformer), trained, rtol=0, atol=1e-6)

    names = {p.name for p in (out / "samples" / "step-000006").iterdir()}
    assert len(names) == 4 and {p.name for p in (out / "samples" / "from_export").iterdir()} == names
    for name in names - {"samples.json"}:
        live, exported = (out / "samples" / at / name for at in ("step-000006", "from_export"))
        found = probe(live)
        assert exported.exists()
        assert (found.frames, found.height, found.width) == {"0": (17, 64, 96), "1": (1, 64, 96), "2": (9, 64, 96)}[
            name[2]
        ]
    assert len(sampled) == 9  # at the start, at the end, from the export
    for before, live, exported in zip(sampled[:3], sampled[3:6], sampled[6:], strict=True):
        assert torch.equal(live, exported) and not torch.equal(before, live)
    third = next(n for n in names if n.startswith("002"))
    assert probe(out / "samples" / "step-000006" / third).fps == 12
    assert [p.name for p in sorted((out / "samples").iterdir())] == ["from_export", "step-000000", "step-000006"]


def test_full(tiny_ltx, clips, tmp_path):
    out = tmp_path / "run"
    made = runs.run(tiny_ltx, clips, out, method="full", optimizer__learning_rate=1e-3)
    loaded = LTXVideoTransformer3DModel.from_pretrained(out, subfolder="transformer")
    torch.testing.assert_close(call_ltx(loaded), call_ltx(made.network.eval()), rtol=0, atol=1e-6)
    base = LTXVideoTransformer3DModel.from_pretrained(tiny_ltx, subfolder="transformer").state_dict()
    same = [k for k, v in loaded.state_dict().items() if torch.equal(v, base[k])]
    assert same == []  # every parameter moved


def test_metrics(tiny_ltx, clips, tmp_path):
    out = tmp_path / "run"
    runs.run(tiny_ltx, clips, out, train__batch_size=2, train__gradient_accumulation_steps=2)
    rows = runs.metrics(out)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert [r["samples_seen"] for r in rows] == [4, 8, 12, 16]
    assert rows[-1]["epoch"] == pytest.approx(16 / 7)
    tokens = {"17x64x96": 3 * 2 * 3, "9x96x64": 2 * 3 * 2}
    from data.batches import Schedule

    schedule = Schedule({"17x64x96": 5, "9x96x64": 2}, 4, 42)
    expected = [4 * tokens[schedule.block(step)[0]] for step in range(4)]
    assert [r["tokens_seen"] for r in rows] == [sum(expected[: n + 1]) for n in range(4)]
    assert all(r["loss"] > 0 and r["grad_norm"] > 0 and r["peak_memory_mb"] > 100 for r in rows)


def test_single_file_checkpoint(tiny_ltx, clips, tmp_path):
    """A transformer under the original checkpoint's names trains as the folder does."""
    import json

    from safetensors.torch import save_file

    base = load_file(tiny_ltx / "transformer" / "diffusion_pytorch_model.safetensors")
    renames = {"proj_in": "patchify_proj", "time_embed": "adaln_single", "norm_q": "q_norm", "norm_k": "k_norm"}
    original = {}
    for key, value in base.items():
        for ours, theirs in renames.items():
            key = key.replace(ours, theirs)
        original[f"model.diffusion_model.{key}"] = value
    save_file(original, tmp_path / "ltx.safetensors", metadata={"config": json.dumps({})})
    changes = dict(model_config=tiny_ltx, components__transformer__dtype="fp32")
    single = runs.run(tmp_path / "ltx.safetensors", clips, tmp_path / "single", **changes)
    folder = runs.run(tiny_ltx, clips, tmp_path / "folder")
    mine, theirs = single.network.state_dict(), folder.network.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items() if "lora_" not in name)
    # Not bit for bit: tensors lie at other addresses in the file, and CPU kernels round by alignment.
    first, second = (runs.metrics(tmp_path / name)[0]["loss"] for name in ("single", "folder"))
    assert first == pytest.approx(second, rel=1e-5)
    with pytest.raises(ValueError, match="model_config"):
        runs.run(tmp_path / "ltx.safetensors", clips, tmp_path / "none")


def test_faults_are_told_before_a_model_loads(tiny_ltx, clips, tmp_path):
    from trainers.ltx import LTXTrainer
    from trainers.plan import PlanError

    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", data__buckets=["24x64x96", "17x60x96"])
    with pytest.raises(PlanError) as error:
        made.run()
    text = str(error.value)
    assert "24x64x96" in text and "17x60x96" in text and "17" in text and "25" in text and "64" in text
    with pytest.raises(OptionError, match="first_frame_p"):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", first_frame_p=1.5)
    with pytest.raises(SystemExit, match=r"(?s)error: data.buckets: .*24x64x96"):
        LTXTrainer.main(runs.options(tiny_ltx, clips, tmp_path / "run", data__buckets=["24x64x96"]))


def test_plan_stage_stops_there(tiny_ltx, clips, tmp_path, capsys):
    made = runs.run(
        tiny_ltx, clips, tmp_path / "run", stage="plan", data__caption_dropout=0.1, data__caption_technique="zero"
    )
    told = capsys.readouterr().out
    assert "17x64x96" in told and "7 of 7" not in told and "clips: 0 of 7 encoded already, 7 to encode" in told
    assert "noise levels at the most used bucket: logit_normal" in told and "#" in told
    assert "warning: data.caption_technique is zero" in told
    assert not hasattr(made, "network") and not (tmp_path / "run" / "config.yaml").exists()


def test_config_repeats_the_run(tiny_ltx, clips, tmp_path):
    from trainers.ltx import LTXTrainer
    from trainers.parsing import parse

    first = runs.run(tiny_ltx, clips, tmp_path / "run", first_frame_p=0.3)
    words = ["--config", str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")]
    again = LTXTrainer(parse(LTXTrainer.Config, words))
    again.run()
    assert torch.equal(runs.trained(first), runs.trained(again))
    assert [r["loss"] for r in runs.metrics(tmp_path / "run")] == [r["loss"] for r in runs.metrics(tmp_path / "again")]
