"""HunyuanVideo: what the conformance kit (tests/test_check.py) cannot know of it, and its own pitfalls planted."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, HunyuanVideoTransformer3DModel
from PIL import Image
from transformers import LlamaTokenizerFast

import runs
from data.batches import collate
from data.buckets import check_buckets
from data.video import read_frames
from models import latents, load, memory, precision
from models.load import ModelError
from trainers import plan_report
from trainers.check import Kit
from trainers.config import OptionError
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.parsing import parse
from trainers.plan import BLACK, Picture, PlanError, Text
from trainers.precompute import image_of, rows
from trainers.prompts import PromptError

ROOT = Path(__file__).parents[1]
NAMES = ["hunyuan", "hunyuan-i2v", "hunyuan-i2v-concat"]
IMAGES = NAMES[1:]
SIZES = {"data__buckets": ["9x32x48", "5x48x32"]}
LONG = "the cat and the dog dance on a monkey " * 60  # cut at 256 tokens, and at CLIP's 77


@pytest.fixture
def make(folders, clips, tmp_path):
    """A trainer on one of the tiny pipelines."""

    def make(name, folder="run", kind=HunyuanVideoTrainer, **changes):
        return runs.trainer(kind, folders[name], clips, tmp_path / folder, **(SIZES | changes))

    return make


def picture(seed: int = 0) -> Image.Image:
    pixels = torch.rand(32, 48, 3, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray((pixels * 255).byte().numpy())


@torch.no_grad()
def encoded(trainer, pipe, captions, images=None):
    return trainer.encode_text(pipe, captions, images)


# -- text -------------------------------------------------------------------------------------------------------------


def test_text_is_the_pipelines_own(make, pipes):
    pipe, captions = pipes["hunyuan"], ["a cat", LONG, ""]
    ours = encoded(make("hunyuan"), pipe, captions)
    with torch.no_grad():
        text, pooled, mask = pipe.encode_prompt(captions)
        ids = pipe.tokenizer([f"x{c}" for c in captions], padding=True, return_tensors="pt")
        states = pipe.text_encoder(**ids, output_hidden_states=True).hidden_states
    assert ours["text"].shape == (3, 256, 32) and torch.equal(ours["text"], text)
    assert torch.equal(ours["pooled"], pooled) and torch.equal(ours["text_mask"].long(), mask)
    assert ours["text_mask"].sum(1).tolist()[1:] == [256, 1]  # "" is the end of its turn: never an empty mask
    assert ours["text_mask"].long().diff(dim=1).max() == 0  # True first, then False
    assert len(states) == 5  # hidden_states[-3] is the second of four layers, without the last norm


@pytest.mark.parametrize(("name", "every"), [("hunyuan-i2v", 4), ("hunyuan-i2v-concat", 2)])
def test_text_that_sees_an_image(make, pipes, name, every):
    """As a call for one prompt has it, whatever shares the batch: the pipeline mixes up a batch with a long caption."""
    pipe, captions, images = pipes[name], [LONG, "a cat", LONG], [picture(0), picture(1), picture(0)]
    trainer = make(name)
    ours = encoded(trainer, pipe, captions, images)
    for i, (caption, image) in enumerate(zip(captions, images, strict=True)):
        with torch.no_grad():
            text, pooled, mask = pipe.encode_prompt(image, caption, image_embed_interleave=every)
        assert torch.equal(ours["text"][i], text[0]) and torch.equal(ours["pooled"][i], pooled[0])
        assert torch.equal(ours["text_mask"][i].long(), mask[0])
    assert ours["text"].shape[1] == 576 // every + 252
    assert ours["text_mask"].long().diff(dim=1).max() == 0 and ours["text_mask"].any(1).all()
    other = encoded(trainer, pipe, ["a cat"], [picture(2)])
    assert not torch.allclose(other["text"][0], ours["text"][1], atol=1e-3)  # the image matters


def test_kinds_do_not_share_cached_text(make):
    assert make("hunyuan").text_facts() == {}
    facts = [make(name).text_facts() for name in IMAGES]
    assert facts[0] != facts[1] and all(facts)


def test_black_is_the_pipelines_black(make, pipes):
    ours = encoded(make("hunyuan-i2v"), pipes["hunyuan-i2v"], ["bad"], [image_of(BLACK)])
    theirs = encoded(make("hunyuan-i2v"), pipes["hunyuan-i2v"], ["bad"], [Image.new("RGB", (48, 32), 0)])
    assert torch.equal(ours["text"], theirs["text"])


def test_a_llama_tokenizer_is_loaded_as_it_was_published(folders, make, pipes, clips, tmp_path):
    """model_index.json and tokenizer_config.json say LlamaTokenizerFast, as the published ones: that class mangles."""
    folder = shutil.copytree(folders["hunyuan"], tmp_path / "published")
    for file, change in (
        ("model_index.json", {"tokenizer": ["transformers", "LlamaTokenizerFast"]}),
        ("tokenizer/tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"}),
    ):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    trainer = runs.trainer(HunyuanVideoTrainer, folder, clips, tmp_path / "run", **SIZES)
    parts = {name: trainer.pretrained.component(name) for name in trainer.pretrained.text_components}
    pipe = trainer.pretrained.assemble(trainer.pretrained.pipeline_type, **parts)
    ours, plain = (encoded(trainer, p, ["a cat dances"]) for p in (pipe, pipes["hunyuan"]))
    assert torch.equal(ours["text"], plain["text"])

    pipe.tokenizer = LlamaTokenizerFast.from_pretrained(folder / "tokenizer")
    with pytest.raises(ModelError, match=r"begins with \d+ tokens, padded right; the pipeline cuts off 95"):
        encoded(trainer, pipe, ["a cat"])
    pipe.tokenizer = trainer.pretrained.component("tokenizer")
    pipe.tokenizer.padding_side = "left"
    with pytest.raises(ModelError, match="padded left"):
        encoded(trainer, pipe, ["a cat"])


# -- conditions -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def whole_batch(trainer, pipe, captions=("a cat", "the dog on a monkey")):
    """A batch of two as training has it, of two clips that begin otherwise."""
    trainer.slots, trainer.step = list(range(len(captions))), 0
    pixels = torch.rand(len(captions), 3, 9, 32, 48, generator=torch.Generator().manual_seed(4)) * 2 - 1
    video = rows(trainer.encode_video(pipe, pixels), torch.float32, {})
    for row, caption, seed in zip(video, captions, range(len(captions)), strict=True):
        for prefix, text in trainer.texts(caption, Picture("clip", "", 0, 32, 48)).items():
            images = None
            if trainer.sees_image:
                images = [image_of(BLACK) if text.picture == BLACK else picture(seed)]
            one = rows(trainer.encode_text(pipe, [text.caption], images), torch.float32, trainer.trims)[0]
            row |= {prefix + key: value for key, value in one.items()}
    if not trainer.sees_image:
        trainer.unconditional = collate(rows(trainer.encode_text(pipe, [""]), torch.float32, trainer.trims))
    return collate(video) | {"fps": torch.full((len(captions),), 24.0)}


def test_the_image_is_encoded_alone(make, pipes):
    """The VAE's norms span time: the first frame of a clip's latents is not the latent of its first frame."""
    vae = pipes["hunyuan-i2v"].vae
    pixels = torch.rand(2, 3, 9, 32, 48, generator=torch.Generator().manual_seed(4)) * 2 - 1
    with torch.no_grad():
        batch = make("hunyuan-i2v").encode_video(pipes["hunyuan-i2v"], pixels)
        alone = vae.encode(pixels[:, :, :1]).latent_dist.mode() * 0.476986
        mean = vae.encode(pixels).latent_dist.mean * 0.476986
    torch.testing.assert_close(batch["condition"], alone)
    torch.testing.assert_close(batch["moments"].chunk(2, dim=1)[0], mean)
    assert (batch["condition"] - mean[:, :, :1]).abs().max() > 0.01
    assert "condition" not in make("hunyuan").encode_video(pipes["hunyuan"], pixels)


def test_long_and_large_clips_are_encoded_in_the_vaes_tiles(make, pipes):
    """More than 16 frames in tiles along time, as the VAE has it by itself; vae_tiling adds those in space."""
    pipe = pipes["hunyuan"]
    pixels = torch.rand(1, 3, 21, 32, 288, generator=torch.Generator().manual_seed(4)) * 2 - 1
    trainer, found = make("hunyuan"), {}
    for mode in ("off", "on"):
        memory.tile_vae(pipe.vae, mode, 21, 32, 288)
        with torch.no_grad():
            found[mode] = trainer.encode_video(pipe, pixels)["moments"].chunk(2, dim=1)[0]
            assert torch.equal(found[mode], pipe.vae.encode(pixels).latent_dist.mean * 0.476986)
    memory.tile_vae(pipe.vae, "off", 21, 32, 288)
    pipe.vae.use_framewise_encoding = False
    whole = latents.encode_moments(pipe.vae, pixels).chunk(2, dim=1)[0] * 0.476986
    pipe.vae.use_framewise_encoding = True
    assert not torch.allclose(found["off"], found["on"], atol=1e-3) and not torch.allclose(
        found["off"], whole, atol=1e-3
    )
    keys = [memory.tiling_facts(mode, 21, 32, 288) for mode in ("off", "on")]
    assert keys[0] != keys[1]  # the bucket, which is in the key too, decides on the tiles along time


@pytest.mark.parametrize("name", NAMES)
def test_what_is_fed_and_what_counts(make, pipes, name):
    trainer = make(name, black_image_p=0.0) if name != "hunyuan" else make(name)
    batch = whole_batch(trainer, pipes[name])
    fed = {}

    def network(**keywords):
        fed.update(keywords)
        return (trainer.answer,)

    trainer.model = network
    trainer.answer = torch.zeros(2, 16, 3, 4, 6)
    plain = trainer.loss(batch)
    trainer.answer[:, :, 0] = torch.nan
    masked = trainer.loss(batch)
    assert torch.equal(plain, masked) is (name == "hunyuan-i2v")  # there the first frame is given and does not count
    assert plain.shape == (2,) and plain.isfinite().all()

    x = fed["hidden_states"]
    if name == "hunyuan-i2v":
        assert torch.equal(x[:, :, :1], batch["condition"]) and not torch.equal(x[:, :, 1:2], batch["condition"])
    if name == "hunyuan-i2v-concat":
        assert x.shape[1] == 33 and torch.equal(x[:, 16:32, :1], batch["condition"]) and not x[:, 16:32, 1:].any()
        assert (x[:, 32, 0] == 1).all() and not x[:, 32, 1:].any()
    assert fed["timestep"].dtype == torch.float32 and (fed["timestep"] % 1).any()
    if name == "hunyuan-i2v-concat":
        assert fed["guidance"] is None
    else:
        assert fed["guidance"].tolist() == [1000.0, 1000.0]


def test_guidance_is_told_as_the_pipeline_tells_it(make, pipes):
    trainer = make("hunyuan", guidance=6.0)
    trainer.dtype = torch.bfloat16
    fed = {}
    trainer.model = lambda **k: (fed.update(k), (torch.zeros_like(k["hidden_states"]),))[1]
    trainer.loss(whole_batch(trainer, pipes["hunyuan"]))
    expected = torch.tensor([6.0, 6.0], dtype=torch.bfloat16) * 1000.0  # pipeline_hunyuan_video.py: 6016 in bf16
    assert fed["guidance"].dtype == torch.bfloat16 and torch.equal(fed["guidance"], expected)


@pytest.mark.parametrize("name", NAMES)
def test_cutting_masked_text_changes_nothing(make, pipes, name):
    """Text cut to the batch's longest row, padded among each other, against the pipeline's full length."""
    trainer, pipe = make(name), pipes[name]
    batch, full = whole_batch(trainer, pipe), dict(whole_batch(trainer, pipe))
    images = [picture(0), picture(1)] if trainer.sees_image else None
    full |= encoded(trainer, pipe, ["a cat", "the dog on a monkey"], images)
    assert full["text"].shape[1] > 200 + batch["text"].shape[1]
    trainer.model = pipe.transformer
    with torch.no_grad():
        torch.testing.assert_close(trainer.loss(batch), trainer.loss(full), rtol=1e-5, atol=1e-6)
        full["text_mask"] = torch.ones_like(full["text_mask"])
        assert (trainer.loss(batch) - trainer.loss(full)).abs().min() > 1e-6  # the mask matters


# -- dropped captions and images --------------------------------------------------------------------------------------


def holds(batch, i, source, j, prefix="") -> bool:
    """Whether row i of the batch's text is row j of `source` under a prefix, all three tensors."""
    length = min(batch["text"].shape[1], source[f"{prefix}text"].shape[1])
    same = torch.equal(batch["text"][i, :length], source[f"{prefix}text"][j, :length])
    masks = int(batch["text_mask"][i].sum()) == int(source[f"{prefix}text_mask"][j].sum())
    return same and masks and torch.equal(batch["pooled"][i], source[f"{prefix}pooled"][j])


def coins(trainer, **values):
    trainer.uniform = lambda name: torch.tensor(values.get(name, [0.9, 0.9]))


def test_a_dropped_caption_takes_mask_and_pooled_vector_along(make, pipes):
    trainer = make("hunyuan", data__caption_dropout=0.5)
    batch = whole_batch(trainer, pipes["hunyuan"])
    coins(trainer, caption=[0.1, 0.9])
    after = trainer.drop_captions(batch)
    assert holds(after, 0, trainer.unconditional, 0) and after["text_mask"][0].sum() == 1
    assert holds(after, 1, batch, 1) and not holds(batch, 0, trainer.unconditional, 0)


@pytest.mark.parametrize("name", IMAGES)
def test_caption_and_image_drop_apart(make, pipes, name):
    trainer = make(name, data__caption_dropout=0.5, black_image_p=0.5)
    batch = whole_batch(trainer, pipes[name])
    assert {key.rpartition("/")[0] for key in batch} == {"", "empty", "black", "empty_black"}
    for caption, black, prefix in (
        ([0.9, 0.9], [0.9, 0.9], ("", "")),
        ([0.1, 0.9], [0.9, 0.1], ("empty/", "black/")),
        ([0.1, 0.1], [0.1, 0.9], ("empty_black/", "empty/")),
    ):
        coins(trainer, caption=caption, black_image=black)
        after = trainer.drop_captions(batch)
        assert [holds(after, i, batch, i, prefix[i]) for i in range(2)] == [True, True]
    shown = [batch[f"{p}text"][0] for p in ("", "empty/", "black/", "empty_black/")]
    assert not any(torch.equal(a, b) for i, a in enumerate(shown) for b in shown[:i])
    assert torch.equal(batch["empty_black/text"][0], batch["empty_black/text"][1])  # no clip left in it
    assert not torch.equal(batch["empty/text"][0], batch["empty/text"][1])


def test_texts_names_only_what_is_used(make):
    seen = Picture("clip", "", 0, 32, 48)
    assert make("hunyuan", data__caption_dropout=0.1).texts("a", seen) == {"": Text("a")}
    assert make("hunyuan-i2v").texts("a", seen) == {"": Text("a", seen), "black/": Text("a", BLACK)}
    assert make("hunyuan-i2v", black_image_p=0.0).texts("a", seen) == {"": Text("a", seen)}
    every = make("hunyuan-i2v", data__caption_dropout=0.1).texts("a", seen)
    assert every["empty/"] == Text("", seen) and every["empty_black/"] == Text("", BLACK) and len(every) == 4
    zero = make("hunyuan-i2v", data__caption_dropout=0.1, data__caption_technique="zero").texts("a", seen)
    assert list(zero) == ["", "black/"]


@pytest.mark.parametrize("name", NAMES)
def test_zeros_keep_the_mask_and_stay_finite(make, pipes, name):
    trainer = make(name, data__caption_dropout=1.0, data__caption_technique="zero")
    batch = whole_batch(trainer, pipes[name])
    coins(trainer, caption=[0.5, 0.5])
    after = trainer.drop_captions(batch)
    assert not after["text"].any() and not after["pooled"].any() and torch.equal(after["text_mask"], batch["text_mask"])
    report = plan_report.report(trainer.make_plan(), trainer, {}, 1)
    assert "caption_technique is zero, but this model was pre-trained with empty" in report
    trainer.model = pipes[name].transformer
    with torch.no_grad():
        assert trainer.loss(after).isfinite().all()
        after["text_mask"] = torch.zeros_like(after["text_mask"])
        assert trainer.loss(after).isnan().all()  # why the mask is kept


# -- what does not fit ------------------------------------------------------------------------------------------------


def test_sizes(make):
    assert make("hunyuan").size_rules() == ((4, 1), 16)
    assert make("hunyuan").tokens(9, 32, 48) == 3 * 2 * 3
    assert make("hunyuan").noise_shift(1) == make("hunyuan").noise_shift(99999) == 7.0
    assert make("hunyuan").refuse_bucket(1, 32, 48) is None
    for name in IMAGES:
        with pytest.raises(PlanError, match="1x32x48: leave it out, an image-to-video model is given the first frame"):
            make(name, data__buckets=["9x32x48", "1x32x48"]).make_plan()
    with pytest.raises(PlanError, match="10x32x40"):
        make("hunyuan", data__buckets=["10x32x40"]).make_plan()


def test_options_of_another_kind_are_refused(make, folders, clips, tmp_path):
    for name, option, message in (
        ("hunyuan-i2v-concat", {"guidance": 6.0}, "guidance 6.0: this model embeds no guidance"),
        ("hunyuan", {"black_image_p": 0.5}, "black_image_p 0.5: this model takes no image"),
        ("hunyuan", {"components__transformer__id": folders["hunyuan-i2v"]}, "image_condition_type is token_replace"),
        ("hunyuan-i2v", {"components__transformer__id": folders["hunyuan"]}, "image_condition_type is None"),
    ):
        with pytest.raises(OptionError, match=message):
            make(name, **option).run()
    with pytest.raises(OptionError, match=r"black_image_p is 1\.5; it must be in \[0, 1\]"):
        make("hunyuan-i2v", black_image_p=1.5)
    for name in NAMES:
        assert make(name).unfit() == []


def test_a_prompt_needs_an_image_where_videos_start_from_one(make, tmp_path):
    picture().save(tmp_path / "first.png")
    path = tmp_path / "prompts.yaml"
    path.write_text("- a cat\n- {prompt: a dog, image: first.png}\n- {prompt: one, image: first.png, frames: 1}\n")
    for name, message in (
        ("hunyuan-i2v", r"line 1: image is missing(.|\n)*line 3: 1x32x48: leave it out, an image-to-video model"),
        ("hunyuan", "line 2: image is not supported"),
    ):
        trainer = make(name, validation__prompts=path)
        trainer.plan = trainer.make_plan()
        with pytest.raises(PromptError, match=message):
            trainer.read_prompts()


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "hunyuan").glob("*.yaml")), ids=lambda file: file.name)
def test_configs(file, make, tmp_path):
    """They parse with nothing but data and output_dir given, and say nothing that the trainer would refuse."""
    words = ["--config", str(file), "--data.train", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    config = parse(HunyuanVideoTrainer.Config, words)
    config.check()
    trainer = make("hunyuan-i2v" if "i2v" in file.name else "hunyuan")
    check_buckets(config.data.buckets, *trainer.size_rules())
    assert [b for b in config.data.buckets if trainer.refuse_bucket(b.frames, b.height, b.width)] == []
    precision.check(config, HunyuanVideoTrainer.half_precision)
    assert config.method == ("full" if "full" in file.name else "lora") and ("I2V" in config.model) == (
        "i2v" in file.name
    )


# -- what trains ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_the_attention_of_both_streams(make, name):
    trainer = make(name)
    trainer.build()
    adapted = {n.partition(".lora_")[0] for n, p in trainer.network.named_parameters() if p.requires_grad}
    streams = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    expected = {f"transformer_blocks.0.attn.{n}" for n in streams}
    assert adapted == expected | {f"single_transformer_blocks.0.attn.to_{n}" for n in "qkv"}


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan-i2v"])
def test_every_repeated_block_is_compiled(make, name):
    trainer = make(name, memory__compile="blocks", memory__compile_backend="eager")
    trainer.plan = trainer.make_plan()  # how many sizes there are decides how it is compiled
    trainer.build()
    blocks = [*trainer.network.transformer_blocks, *trainer.network.single_transformer_blocks]
    assert len(blocks) == 2 and all(block._compiled_call_impl is not None for block in blocks)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_samples_and_its_lora_loads(make, folders, cache, name, tmp_path):
    picture().save(tmp_path / "first.png")
    image = ", image: first.png" if name != "hunyuan" else ""
    path = tmp_path / "prompts.yaml"
    path.write_text(f"- {{prompt: a cat, steps: 2, frames: 9, height: 32, width: 48{image}}}\n")
    options = {"data__caption_dropout": 0.5, "validation__prompts": path, "train__batch_size": 2, "lora__alpha": 8}
    trainer = make(name, data__cache_dir=cache, train__steps=3, **options)
    trainer.run()
    frames = 5 if name == "hunyuan-i2v-concat" else 9
    for step in ("000000", "000003"):
        [file] = (tmp_path / "run" / "samples" / f"step-{step}").glob("*.mp4")
        assert read_frames(file, 0, frames, 32, 48).shape[1] == frames
    settings = json.loads((tmp_path / "run/samples/step-000003/samples.json").read_text())["samples"][0]
    assert settings.get("guidance_scale") == (1.0 if name == "hunyuan-i2v-concat" else 6.0)

    pipe = DiffusionPipeline.from_pretrained(folders[name])
    pipe.load_lora_weights(tmp_path / "run")
    batch = whole_batch(trainer, pipe)
    with torch.no_grad():
        trained, plain = trainer.loss(batch), None
        trainer.model = pipe.transformer
        torch.testing.assert_close(trainer.loss(batch), trained, rtol=1e-5, atol=1e-6)
        pipe.disable_lora()
        plain = trainer.loss(batch)
    assert (plain - trained).abs().min() > 1e-4


@pytest.mark.parametrize("name", IMAGES)
def test_full_training_and_encoding_on_the_fly(make, folders, cache, name, tmp_path):
    """precompute: off sees the same batches as the cache, and the transformer loads in the plain pipeline."""
    options = {"method": "full", "train__steps": 2, "optimizer__learning_rate": 1e-3, "data__caption_dropout": 0.5}
    first = make(name, "disk", data__cache_dir=cache, **options)
    first.run()
    second = make(name, "off", data__precompute="off", **options)
    second.run()
    assert torch.equal(runs.trained(first), runs.trained(second))
    net = HunyuanVideoTransformer3DModel.from_pretrained(tmp_path / "disk" / "transformer")
    pipe = DiffusionPipeline.from_pretrained(folders[name], transformer=net)
    old = load.load(folders[name], "transformer").state_dict()
    assert all(not torch.equal(value, old[key]) for key, value in pipe.transformer.state_dict().items())
    batch = whole_batch(first, pipe)
    with torch.no_grad():
        trained = first.loss(batch)
        first.model = pipe.transformer
        torch.testing.assert_close(first.loss(batch), trained, rtol=1e-5, atol=1e-6)


# -- planted faults: the kit sees them and names the member -----------------------------------------------------------


fed = functools.partial(runs.fed, HunyuanVideoTrainer)


class Sliced(HunyuanVideoTrainer):
    """The condition cut from the clip's latents."""

    def encode_video(self, pipe, pixels):
        batch = super().encode_video(pipe, pixels)
        return batch | {"condition": batch["moments"].chunk(2, dim=1)[0][:, :, :1]}


class LastLayer(HunyuanVideoTrainer):
    """The text encoder's last state in place of the last but two."""

    def encode_text(self, pipe, captions, images=None):
        own = pipe._get_llama_prompt_embeds
        pipe._get_llama_prompt_embeds = lambda *a, **k: own(*a, **k, num_hidden_layers_to_skip=0)
        try:
            return super().encode_text(pipe, captions, images)
        finally:
            pipe._get_llama_prompt_embeds = own


class Interleave(HunyuanVideoTrainer):
    interleave = 3


class NotScaled(HunyuanVideoTrainer):
    def encode_video(self, pipe, pixels):
        return super().encode_video(pipe, pixels) | {"moments": latents.encode_moments(pipe.vae, pixels)}


START = "hidden_states differ from the start"
FAULTS = {
    "guidance without x1000": ("hunyuan", fed(guidance=lambda g: g / 1000), "guidance differs"),
    "whole timesteps": ("hunyuan", fed(timestep=lambda t: t.long().float()), "timestep differs"),
    "mask of ones": ("hunyuan", fed(encoder_attention_mask=torch.ones_like), "encoder_attention_mask differs"),
    "last layer": ("hunyuan", LastLayer, "encoder_hidden_states differs"),
    "not scaled": ("hunyuan", NotScaled, "normalisation"),
    "condition sliced": ("hunyuan-i2v", Sliced, START),
    "first frame noised": (
        "hunyuan-i2v",
        fed(hidden_states=lambda x: x * 1.01),
        START,
    ),
    "other image tokens": ("hunyuan-i2v", Interleave, "encoder_hidden_states differs"),
    "guidance embedded": ("hunyuan-i2v-concat", fed(guidance=lambda g: torch.ones(1)), "guidance differs"),
    "mask channel first": (
        "hunyuan-i2v-concat",
        fed(hidden_states=lambda x: x.roll(1, dims=1)),
        START,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(folders, tmp_path, fault):
    name, kind, message = FAULTS[fault]
    runs.fresh_state()
    results = list(Kit(kind, folders[name], tmp_path).check_oracle())
    wrong = [f"{r.name}: {r.hint}" for r in results if not r.holds]
    assert any(message in line for line in wrong), wrong
