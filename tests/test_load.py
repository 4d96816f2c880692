"""Finding, naming and loading components: folders, a Hub cache, single files, and errors that say what to do."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import load
from models.load import ModelError

NAMES = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")


def override(**given):
    return SimpleNamespace(**(dict.fromkeys(("id", "revision", "variant", "subfolder", "dtype")) | given))


@pytest.fixture
def folder(tiny_ltx, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_ltx, tmp_path / "model")


@pytest.fixture
def hub(tiny_ltx, tmp_path, monkeypatch):
    """A Hub cache with owner/tiny as huggingface_hub lays it out, links to blobs; gives the snapshot folder."""
    from huggingface_hub import constants

    root = tmp_path / "hub" / "models--owner--tiny"
    snapshot = root / "snapshots" / ("c" * 40)
    for i, file in enumerate(f for f in sorted(tiny_ltx.rglob("*")) if f.is_file()):
        link = snapshot / file.relative_to(tiny_ltx)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = root / "blobs" / f"{i:064x}"
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


# -- loading ---------------------------------------------------------------------------------------------------------


def test_every_component_is_what_its_pipeline_would_load(tiny_ltx):
    from diffusers import LTXPipeline

    pipe = LTXPipeline.from_pretrained(tiny_ltx)
    model = load.resolve(tiny_ltx)
    for name in NAMES:
        own, theirs = load.load(model, name, torch.float32), pipe.components[name]
        assert type(own) is type(theirs)
        if isinstance(own, torch.nn.Module):
            assert not own.training
            states = own.state_dict(), theirs.state_dict()
            assert states[0].keys() == states[1].keys() and all(
                torch.equal(states[0][k], states[1][k]) for k in states[0]
            )
    assert load.load(model, "tokenizer")("a cat").input_ids == pipe.tokenizer("a cat").input_ids


def test_dtype_and_its_override(tiny_ltx):
    for name in ("transformer", "text_encoder"):
        assert load.load(tiny_ltx, name, torch.bfloat16).dtype == torch.bfloat16
        assert load.load(tiny_ltx, name, torch.bfloat16, override=override(dtype="fp32")).dtype == torch.float32
        assert load.load(tiny_ltx, name).dtype == torch.float32


def test_component_from_elsewhere(tiny_ltx, tiny_ltx_condition, folder):
    other = load.load(tiny_ltx, "vae", override=override(id=str(tiny_ltx_condition)))
    assert other.config.timestep_conditioning  # the later family's, from its vae/
    alone = load.load(tiny_ltx, "vae", override=override(id=str(tiny_ltx_condition / "vae")))
    assert alone.config.timestep_conditioning  # a folder that is the component
    (folder / "vae").rename(folder / "old_vae")
    assert load.load(folder, "vae", override=override(subfolder="old_vae")).config.latent_channels == 16
    with pytest.raises(
        ModelError, match="this is a AutoencoderKLLTXVideo, and the pipeline needs a LTXVideoTransformer"
    ):
        load.load(tiny_ltx, "transformer", override=override(id=str(tiny_ltx), subfolder="vae"))


def test_a_variant_falls_back_to_the_plain_files(folder):
    plain = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    marked = {k: v * 0 + 1 for k, v in load_file(plain).items()}
    save_file(marked, plain.with_name("diffusion_pytorch_model.fp16.safetensors"), metadata={"format": "pt"})
    model = load.resolve(folder, variant="fp16")
    assert load.load(model, "transformer", variant="fp16").proj_in.weight.eq(1).all()
    assert not load.load(model, "transformer").proj_in.weight.eq(1).all()
    assert load.load(model, "vae", variant="fp16").config.latent_channels == 16


def test_llama_tokenizers_go_through_auto(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<pad>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    shutil.rmtree(folder / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(folder / "tokenizer")
    config = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"})
    )
    index = load.model_index(folder) | {"tokenizer": ["transformers", "LlamaTokenizerFast"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    tokenizer = load.load(folder, "tokenizer")
    assert tokenizer.padding_side == "right"
    assert tokenizer.decode(tokenizer("a cat, dancing").input_ids) == "a cat, dancing"  # no space lost, none added
    assert len(tokenizer("a cat").input_ids) == 5


# -- single files ----------------------------------------------------------------------------------------------------


def original_names(folder):
    """The tiny pipeline's transformer and VAE under the key names of the published LTX checkpoints."""
    state = {}
    for key, tensor in load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors").items():
        for ours, theirs in (("proj_in", "patchify_proj"), ("time_embed", "adaln_single")):
            key = f"{theirs}{key.removeprefix(ours)}" if key.startswith(ours + ".") else key
        key = key.replace("norm_q", "q_norm").replace("norm_k", "k_norm")
        state[f"model.diffusion_model.{key}"] = tensor
    encoder = [("down_blocks.0.downsamplers.0", "down_blocks.1"), ("down_blocks.1.downsamplers.0", "down_blocks.4")]
    encoder += [("down_blocks.2.downsamplers.0", "down_blocks.7"), ("down_blocks.0", "down_blocks.0")]
    encoder += [
        ("down_blocks.1", "down_blocks.3"),
        ("down_blocks.2", "down_blocks.6"),
        ("down_blocks.3", "down_blocks.8"),
    ]
    encoder += [("mid_block", "down_blocks.9")]
    decoder = [("up_blocks.0.upsamplers.0", None), ("up_blocks.1.upsamplers.0", "up_blocks.2")]
    decoder += [("up_blocks.2.upsamplers.0", "up_blocks.5"), ("up_blocks.3.upsamplers.0", "up_blocks.8")]
    decoder += [("up_blocks.0", "up_blocks.1"), ("up_blocks.1", "up_blocks.3"), ("up_blocks.2", "up_blocks.6")]
    decoder += [("up_blocks.3", "up_blocks.9"), ("mid_block", "up_blocks.0")]
    for key, tensor in load_file(folder / "vae" / "diffusion_pytorch_model.safetensors").items():
        side, _, rest = key.partition(".")
        for ours, theirs in {"encoder": encoder, "decoder": decoder}.get(side, []):
            if rest.startswith(ours + "."):
                rest = theirs + rest.removeprefix(ours)
                break
        key = f"{side}.{rest}".rstrip(".").replace("resnets", "res_blocks")
        key = {
            "latents_mean": "per_channel_statistics.mean-of-means",
            "latents_std": "per_channel_statistics.std-of-means",
        }.get(key, key)
        state[f"vae.{key}"] = tensor
    return state


@pytest.fixture
def single(tiny_ltx, tmp_path):
    file = tmp_path / "ltx-video-2b.safetensors"
    save_file(original_names(tiny_ltx), file, metadata={"format": "pt"})
    return file


@pytest.mark.parametrize("name", ["transformer", "vae"])
def test_single_file_holds_the_same_network(name, single, tiny_ltx):
    own = load.load(load.resolve(single), name, config=tiny_ltx)
    expected = load.load(tiny_ltx, name).state_dict()
    assert not own.training and own.state_dict().keys() == expected.keys()
    assert [k for k, v in own.state_dict().items() if not torch.equal(v, expected[k])] == []
    assert load.load(single, name, torch.bfloat16, config=tiny_ltx).dtype == torch.bfloat16


def test_single_file_takes_the_rest_from_the_pipeline_folder(single, tiny_ltx, tmp_path):
    assert load.load(single, "text_encoder", config=tiny_ltx).config.d_model == 32
    assert load.load(single, "scheduler", config=tiny_ltx).config.use_dynamic_shifting
    transformer_only = {k: v for k, v in load_file(single).items() if not k.startswith("vae.")}
    save_file(transformer_only, tmp_path / "no_vae.safetensors")
    assert load.locate(tmp_path / "no_vae.safetensors", "vae", config=tiny_ltx) == tiny_ltx / "vae"
    assert load.load(tiny_ltx, "transformer", override=override(id=str(single))).config.num_layers == 2
    assert load.locate(tiny_ltx, "vae", override(id=str(single)), weights=False) == tiny_ltx / "vae"
    with pytest.raises(ModelError, match="needs model_config"):
        load.load(single, "transformer")


def test_single_file_that_lacks_weights_or_is_cut_short(single, tiny_ltx, tmp_path):
    state = load_file(single)
    state.pop("model.diffusion_model.transformer_blocks.1.attn1.to_q.weight")
    save_file(state, tmp_path / "lacking.safetensors")
    with pytest.raises(ModelError, match=r"lacking\.safetensors: it does not hold all weights of the transformer"):
        load.load(tmp_path / "lacking.safetensors", "transformer", config=tiny_ltx)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(single.read_bytes()[:100_000])
    with pytest.raises(ModelError, match=r"cut\.safetensors"):
        load.load(cut, "transformer", config=tiny_ltx)
    (tmp_path / "model.ckpt").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only \.safetensors files are read"):
        load.resolve(tmp_path / "model.ckpt")


# -- what is wrong with a folder -------------------------------------------------------------------------------------


def test_folders_that_are_no_pipeline(tmp_path, tiny_ltx):
    with pytest.raises(ModelError, match="there is no such file or folder"):
        load.resolve(tmp_path / "absent")
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no model_index.json.*given by its own path.*x\.safetensors"):
        load.resolve(tmp_path)
    with pytest.raises(ModelError, match=r"a single LTXVideoTransformer3DModel, not a pipeline"):
        load.resolve(tiny_ltx / "transformer")
    with pytest.raises(
        ModelError, match=r"this is a LTXPipeline, and this trainer is for WanPipeline or MochiPipeline"
    ):
        load.pipeline_class(tiny_ltx, ("WanPipeline", "MochiPipeline"))
    assert load.pipeline_class(tiny_ltx, ("LTXPipeline",)) == "LTXPipeline"


def test_missing_and_broken_weights(folder):
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    whole = load_file(weights)
    save_file({k: v for k, v in whole.items() if k != "proj_in.bias"}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for proj_in.bias \(1 in all\)"):
        load.load(folder, "transformer")
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="transformer: LTXVideoTransformer3DModel could not be loaded"):
        load.load(folder, "transformer")
    weights.unlink()
    with pytest.raises(ModelError, match=r"files are missing.*\n  transformer/diffusion_pytorch_model.safetensors"):
        load.resolve(folder)
    index = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors", "b": "second.safetensors"}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "transformer" / "second.safetensors").touch()
    with pytest.raises(ModelError) as error:
        load.resolve(folder)
    assert "00001-of-00002" in str(error.value) and "second" not in str(error.value)
    shutil.rmtree(folder / "vae")
    with pytest.raises(ModelError, match=r"\n  transformer/.*\n  vae/"):
        load.resolve(folder)
    assert load.resolve(folder, names=("text_encoder",)) == folder


def test_component_class_is_never_arbitrary_code(folder):
    index = load.model_index(folder) | {"transformer": ["os", "system"], "vae": ["diffusers", "NoSuchVAE"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"transformer is a os.system"):
        load.load(folder, "transformer")
    with pytest.raises(ModelError, match=r"vae is a diffusers.NoSuchVAE"):
        load.load(folder, "vae")
    with pytest.raises(ModelError, match="has no image_encoder"):
        load.load(folder, "image_encoder")


def test_configs_without_diffusers(tiny_ltx):
    assert load.component_config(tiny_ltx, "transformer")["num_layers"] == 2
    with pytest.raises(ModelError, match=r"no unet/config\.json"):
        load.component_config(tiny_ltx, "unet")


# -- the Hub ---------------------------------------------------------------------------------------------------------


def test_cached_snapshot_is_used_offline(hub):
    assert load.resolve("owner/tiny") == hub
    assert load.load(hub, "transformer").config.num_layers == 2
    assert load.locate(hub, "vae", override(id="owner/tiny")) == hub / "vae"


def test_offline_and_not_cached(hub):
    with pytest.raises(ModelError) as error:
        load.resolve("owner/other", revision="v2")
    text = str(error.value)
    assert "HF_HUB_OFFLINE is set" in text and "owner/other (revision v2)" in text
    assert "hf download owner/other --revision v2 --include '*/*' --include 'model_index.json'" in text
    (hub / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError) as error:  # only the configs were ever downloaded
        load.resolve("owner/tiny")
    assert "hf download owner/tiny" in str(error.value) and "transformer/diffusion_pytorch_model" in str(error.value)
    assert load.resolve("owner/tiny", names=()) == hub


def hub_error(kind):
    return kind("no", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("GatedRepoError", r"owner/tiny is gated: accept its licence at https?://\S+/owner/tiny, then .*hf auth login"),
        ("RepositoryNotFoundError", r"no such folder here and no such public repository .*hf auth login"),
        ("RevisionNotFoundError", r"owner/tiny has no revision None"),
        ("HfHubHTTPError", r"owner/tiny: the download failed: no"),
    ],
)
def test_hub_errors_in_plain_words(kind, says, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*args, **kwargs):
        raise hub_error(getattr(errors, kind))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=says):
        load.resolve("owner/tiny")


def test_only_needed_files_are_asked_for(hub, monkeypatch):
    import fnmatch

    import huggingface_hub

    asked = []

    def record(model, revision, allow_patterns):
        asked.extend(allow_patterns)
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    load.resolve("owner/tiny", names=("transformer", "tokenizer"), variant="fp16")

    def wanted(file):
        return any(fnmatch.fnmatchcase(file, pattern) for pattern in asked)

    assert wanted("transformer/config.json") and wanted("tokenizer/spiece.model")
    assert wanted("transformer/diffusion_pytorch_model.fp16-00001-of-00002.safetensors")
    assert wanted("transformer/diffusion_pytorch_model.safetensors")  # there is no fp16 one in this repository
    for file in ("ltx-video-2b.safetensors", "text_encoder/model.safetensors", "transformer/pytorch_model.bin"):
        assert not wanted(file)
    assert not wanted("transformer/diffusion_pytorch_model.bf16.safetensors")


# -- fingerprints ----------------------------------------------------------------------------------------------------


def test_fingerprint_changes_with_what_is_loaded_only(folder, tmp_path):
    memo = tmp_path / "memo.json"

    def text():
        return load.fingerprint(folder, ("text_encoder", "tokenizer"), memo)

    def video():
        return load.fingerprint(folder, ("vae",), memo)

    before = text(), video()
    assert before[0] != before[1] and len(before[0]) == 64
    config = folder / "vae" / "config.json"
    config.write_text(config.read_text().replace('"scaling_factor": 1.0', '"scaling_factor": 2.0'))
    (folder / "text_encoder" / "README.md").write_text("not loaded")
    assert text() == before[0] and video() != before[1]
    moved = shutil.move(folder, tmp_path / "moved")
    assert load.fingerprint(moved, ("text_encoder", "tokenizer"), tmp_path / "other.json") == before[0]


def test_fingerprint_hashes_a_file_once(folder, tmp_path, monkeypatch):
    memo = tmp_path / "deep" / "memo.json"
    first = load.fingerprint(folder, ("vae",), memo)
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    remembered = json.loads(memo.read_text())
    assert remembered[str(weights)][0] == weights.stat().st_size
    remembered[str(weights)][2] = "0" * 64
    memo.write_text(json.dumps(remembered))
    assert load.fingerprint(folder, ("vae",), memo) != first  # believed
    os.utime(weights, ns=(1, 1))
    assert load.fingerprint(folder, ("vae",), memo) == first  # changed time: hashed again
    memo.write_text("{broken")
    assert load.fingerprint(folder, ("vae",), memo) == first


def test_fingerprint_of_hub_links_is_the_blobs_name(hub, tmp_path):
    names = ("text_encoder",)
    first = load.fingerprint(hub, names, tmp_path / "memo.json")
    assert not (tmp_path / "memo.json").exists()  # nothing was hashed
    link = hub / "text_encoder" / "model.safetensors"
    blob = link.resolve().rename(link.resolve().with_name("f" * 64))
    link.unlink()
    link.symlink_to(os.path.relpath(blob, link.parent))
    assert load.fingerprint(hub, names, tmp_path / "memo.json") != first


def test_fingerprint_follows_overrides_and_single_files(tiny_ltx, tiny_ltx_condition, single, tmp_path):
    memo = tmp_path / "memo.json"
    other = {"vae": override(id=str(tiny_ltx_condition))}
    assert load.fingerprint(tiny_ltx, ("vae",), memo, other) == load.fingerprint(tiny_ltx_condition, ("vae",), memo)
    assert load.fingerprint(tiny_ltx, ("vae",), memo, other) != load.fingerprint(tiny_ltx, ("vae",), memo)
    whole = load.fingerprint(single, ("vae",), memo, config=tiny_ltx)
    assert whole != load.fingerprint(tiny_ltx, ("vae",), memo)
    from_file = {"vae": override(id=str(single))}
    assert load.fingerprint(tiny_ltx, ("vae",), memo, from_file) == whole
    text = load.fingerprint(single, ("text_encoder",), memo, config=tiny_ltx)
    assert text == load.fingerprint(tiny_ltx, ("text_encoder",), memo)
