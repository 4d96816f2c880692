"""The tiny pipelines are real ones: published layout, true ratios, every class the trainer meets."""

import inspect
import runpy
import sys

import pytest
import torch

from models import load, tiny

CLASSES = {"ltx": "LTXPipeline", "ltx-condition": "LTXConditionPipeline"}


@pytest.mark.parametrize("name", list(CLASSES))
def test_loads_and_runs_as_published(name, tmp_path):
    from diffusers import DiffusionPipeline

    folder = tiny.build(name, tmp_path / name)
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 3e6
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert type(pipe).__name__ == CLASSES[name]
    assert (pipe.vae.spatial_compression_ratio, pipe.vae.temporal_compression_ratio) == (32, 8)
    assert not torch.equal(pipe.vae.latents_mean, torch.zeros(16)) and not torch.equal(
        pipe.vae.latents_std, torch.ones(16)
    )
    pipe.set_progress_bar_config(disable=True)
    call = dict(height=64, width=96, num_frames=17, num_inference_steps=2, output_type="pt", max_sequence_length=16)
    if name == "ltx-condition":
        call |= {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
        assert pipe.vae.config.timestep_conditioning and pipe.vae.decoder.scale_shift_table is not None
    videos = [
        pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **call).frames for prompt in ("a cat", "a dog")
    ]
    assert videos[0].shape == (1, 17, 3, 64, 96) and all(v.isfinite().all() for v in videos)
    assert not torch.equal(*videos)  # the text matters


@pytest.mark.parametrize(
    ("name", "kind", "channels", "cut"),
    [
        ("hunyuan", None, 16, 95),
        ("hunyuan-i2v", "token_replace", 16, 103),
        ("hunyuan-i2v-concat", "latent_concat", 33, 103),
    ],
)
def test_hunyuan_loads_and_runs_as_published(name, kind, channels, cut, tmp_path):
    from diffusers import DiffusionPipeline
    from PIL import Image

    folder = tiny.build(name, tmp_path / name)
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 3e6
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert type(pipe).__name__ == ("HunyuanVideoImageToVideoPipeline" if kind else "HunyuanVideoPipeline")
    config = pipe.transformer.config
    assert (config.image_condition_type, config.in_channels, config.patch_size) == (kind, channels, 2)
    assert config.guidance_embeds is (kind != "latent_concat") and pipe.scheduler.config.shift == 7.0
    assert (pipe.vae.spatial_compression_ratio, pipe.vae.temporal_compression_ratio) == (8, 4)
    template = inspect.signature(pipe.encode_prompt).parameters["prompt_template"].default
    assert len(pipe.tokenizer(template["template"].split("{}")[0]).input_ids) == template["crop_start"] == cut
    pipe.set_progress_bar_config(disable=True)
    call = dict(height=32, width=48, num_frames=9, num_inference_steps=2, output_type="pt")
    call |= {"image": Image.new("RGB", (48, 32), (90, 140, 20))} if kind else {}
    videos = [
        pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **call).frames for prompt in ("a cat", "a dog")
    ]
    assert videos[0].shape == (1, 5 if channels == 33 else 9, 3, 32, 48) and all(v.isfinite().all() for v in videos)
    assert not torch.equal(*videos)  # the text matters


@pytest.mark.parametrize(
    ("name", "channels", "flags", "scale"),
    [  # rotary, learned, patch_size_t, ofs_embed_dim, invert_scale_latents
        ("cogvideox-2b", 16, (False, False, None, None, False), 1.15258426),
        ("cogvideox-5b", 16, (True, False, None, None, False), 0.7),
        ("cogvideox-5b-i2v", 32, (True, True, None, None, False), 0.7),
        ("cogvideox-1.5", 16, (True, False, 2, None, True), 0.7),
        ("cogvideox-1.5-i2v", 32, (True, False, 2, 16, True), 0.7),
    ],
)
def test_cogvideox_loads_and_runs_as_published(name, channels, flags, scale, tmp_path):
    from diffusers import DiffusionPipeline
    from PIL import Image

    folder = tiny.build(name, tmp_path / name)
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 3e6
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert type(pipe).__name__ == ("CogVideoXImageToVideoPipeline" if channels == 32 else "CogVideoXPipeline")
    c, vae = pipe.transformer.config, pipe.vae.config
    kinds = (c.use_rotary_positional_embeddings, c.use_learned_positional_embeddings, c.patch_size_t, c.ofs_embed_dim)
    assert (*kinds, vae.invert_scale_latents) == flags and (c.in_channels, c.max_text_seq_length) == (channels, 226)
    assert (pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal, vae.scaling_factor) == (8, 4, scale)
    assert pipe.scheduler.config.prediction_type == "v_prediction" and pipe.scheduler.alphas_cumprod[-1] == 0
    pipe.set_progress_bar_config(disable=True)
    call = dict(height=32, width=48, num_frames=17, num_inference_steps=2, output_type="pt")
    call |= {"image": Image.new("RGB", (48, 32), (90, 140, 20))} if channels == 32 else {}
    videos = [
        pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **call).frames for prompt in ("a cat", "a dog")
    ]
    assert videos[0].shape == (1, 17, 3, 32, 48) and all(v.isfinite().all() for v in videos)
    assert not torch.equal(*videos)  # the text matters


def test_schedulers_tell_the_families_apart(tiny_ltx, tiny_ltx_condition):
    assert load.component_config(tiny_ltx, "scheduler")["use_dynamic_shifting"] is True
    later = load.component_config(tiny_ltx_condition, "scheduler")
    assert later["use_dynamic_shifting"] is False and later["shift"] == 1.0


def test_same_bytes_every_time_and_the_global_generator_untouched(tmp_path):
    state = torch.get_rng_state()
    folders = [tiny.build("ltx", tmp_path / str(i)) for i in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    for part in ("transformer", "vae"):
        weights = [(f / part / "diffusion_pytorch_model.safetensors").read_bytes() for f in folders]
        assert weights[0] == weights[1]
    texts = [(f / "text_encoder" / "model.safetensors").read_bytes() for f in folders]
    assert texts[0] == texts[1]


def test_width_gives_matrices_that_quantised_optimizers_take(tmp_path):
    net = load.load(tiny.build("ltx", tmp_path, width=256), "transformer")
    assert net.transformer_blocks[0].attn1.to_q.weight.shape == (256, 256)
    assert 16 * 256 >= 4096 and 16 * 256 % 256 == 0  # a rank-16 LoRA matrix: torchao quantises its optimizer state
    with pytest.raises(ValueError, match="multiple of 8"):
        tiny.build("ltx", tmp_path, width=36)


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "models.tiny")  # or runpy warns
    monkeypatch.setattr(sys, "argv", ["tiny", "ltx", str(tmp_path / "made")])
    runpy.run_module("models.tiny", run_name="__main__")
    assert (
        capsys.readouterr().out.strip() == str(tmp_path / "made") and (tmp_path / "made" / "model_index.json").exists()
    )
    monkeypatch.setattr(sys, "argv", ["tiny"])
    with pytest.raises(SystemExit, match=r"usage: python -m models.tiny \{ltx,ltx-condition,.*\} FOLDER"):
        runpy.run_module("models.tiny", run_name="__main__")
    with pytest.raises(ValueError, match="no tiny pipeline 'wan'; there are: ltx, ltx-condition, "):
        tiny.build("wan", tmp_path)
