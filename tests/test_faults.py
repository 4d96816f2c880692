"""What a user may get wrong is one plain message, told before anything is encoded or loaded."""

import json
import shutil

import pytest
import torch
import yaml
from torch import nn

import runs
from models.adapters import AdapterError
from models.load import ModelError
from trainers import publish
from trainers.config import OptionError
from trainers.ltx import LTXConfig, LTXTrainer
from trainers.parsing import parse


@pytest.fixture(scope="module")
def tiny_cog(tmp_path_factory):
    from models.tiny import build

    return build("cogvideox-2b", tmp_path_factory.mktemp("models") / "cog")


@pytest.fixture
def refused(tiny_ltx, clips, tmp_path, monkeypatch):
    """refused(error, message, **changes): the run ends in that error, and no component was loaded."""
    from trainers.pretrained import Pretrained

    def component(self, name):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(Pretrained, "component", component)

    def run(error, message, model=tiny_ltx, out=tmp_path / "run", **changes):
        with pytest.raises(error, match=message):
            runs.trainer(LTXTrainer, model, clips, out, **changes).run()

    return run


def test_folder_of_another_model(refused, tiny_cog):
    refused(ModelError, "this is a CogVideoXPipeline, and this trainer is for LTXPipeline", model=tiny_cog)


def test_component_of_another_model(refused, tiny_cog):
    wrong = "this is a AutoencoderKLCogVideoX, and the pipeline needs a AutoencoderKLLTXVideo"
    refused(ModelError, wrong, components__vae__id=tiny_cog)


def test_component_that_the_pipeline_has_not(refused):
    has = "scheduler, text_encoder, tokenizer, transformer, vae"
    refused(ModelError, f"components.vea: LTXPipeline has no such .* has {has}", components__vea__dtype="fp32")


@pytest.mark.parametrize(
    "changes",
    [
        {"lora__targets": ["to_q", "to_qq"]},
        {"lora__exclude": "to_qq"},
        {"lora__also_train": "to_qq"},
        {"method": "full", "train_modules": "to_qq"},
    ],
    ids=lambda changes: list(changes)[-1],
)
def test_patterns_that_match_nothing(refused, changes):
    refused(AdapterError, f"{list(changes)[-1].replace('__', '.')}: nothing matches 'to_qq'", **changes)


def test_a_network_without_weights_has_the_names(tiny_ltx, clips, tmp_path):
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run")
    bare, real = made.pretrained.skeleton("transformer"), made.pretrained.component("transformer")
    assert list(bare.state_dict()) == list(real.state_dict())
    assert all(p.is_meta for p in bare.parameters())


def test_half_weights_and_full_computation(refused):
    told = "components.transformer.dtype bf16: precision.weights fp32 computes in fp32"
    refused(OptionError, told, precision__weights="fp32", components__transformer__dtype="bf16")


def test_folders_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    told = r"(?s)output_dir .*file: cannot be written to .*data.cache_dir .*file/cache: cannot be written to"
    refused(OptionError, told, out=tmp_path / "file", data__cache_dir=tmp_path / "file" / "cache")
    refused(OptionError, "lora.init_from .*none: there is no such", lora__init_from=tmp_path / "none")


def test_a_lora_to_start_from_that_does_not_fit(tiny_ltx, clips, tmp_path, request):
    runs.run(tiny_ltx, clips, tmp_path / "first")
    refused = request.getfixturevalue("refused")  # only now: the first run loads components
    start = {"lora__init_from": tmp_path / "first"}
    refused(AdapterError, "rank 4 in the file, lora.rank 8 here", lora__rank=8, **start)
    refused(AdapterError, "alpha 4 in the file, alpha 9 here", lora__alpha=9, **start)
    refused(AdapterError, "another type of adapter", lora__type="lokr", **start)


@pytest.mark.parametrize("where", ["folder", "saved"])
def test_distilled_checkpoints_are_warned_about(tiny_ltx, clips, tmp_path, capsys, where):
    name = "ltxv-2b-0.9.8-distilled" if where == "folder" else "ltxv"
    model = shutil.copytree(tiny_ltx, tmp_path / name)
    if where == "saved":
        file = model / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"_name_or_path": "Lightricks/LTX-2b-distilled"}))
    runs.run(model, clips, tmp_path / "run", stage="plan")
    assert "distilled looks distilled to few steps" in capsys.readouterr().out
    runs.run(tiny_ltx, clips, tmp_path / "run", stage="plan")
    assert "distilled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([["clips"]], 'data.train" must be one value or a list'),
        ([{"path": ["a", "b"]}], r"path must be str, got \['a', 'b'\]"),
        ([{"path": {"a": 1}}], r"path must be str, got \{'a': '1'\}"),
        ("[{path: a, repeats: 2, path: b}]", 'data.train" gives path twice'),
    ],
    ids=["list", "path list", "path mapping", "twice"],
)
def test_odd_sources(tmp_path, train, message):
    text = train if isinstance(train, str) else yaml.safe_dump(train, default_flow_style=True)
    (tmp_path / "c.yaml").write_text(f"model: a/b\ndata:\n  buckets: [9x32x32]\n  train: {text}\n")
    with pytest.raises(OptionError, match=message):
        parse(LTXConfig, ["--config", str(tmp_path / "c.yaml")])


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_the_card_loads_all_that_was_trained(tiny_ltx, clips, tmp_path, kind):
    """The lines of the model card, run as they are, give the trained network."""
    changes = dict(lora__also_train="*norm_k*", train__steps=3, lora__type=kind)
    made = runs.run(tiny_ltx, clips, tmp_path / "run", **changes)
    block = (tmp_path / "run" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for there, here in {
        "PATH_OR_ID_OF_THE_BASE_MODEL": tiny_ltx,
        "THIS_REPOSITORY_OR_FOLDER": tmp_path / "run",
        "THIS_FOLDER": tmp_path / "run",
        "bfloat16": "float32",
        '.to("cuda")': "",
    }.items():
        block = block.replace(there, str(here))
    found: dict = {}
    exec(block, found)
    network = found["pipe"].transformer
    assert isinstance(network, nn.Module)
    draw = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 12, 16, generator=draw),
        "encoder_hidden_states": torch.randn(1, 5, 32, generator=draw),
        "encoder_attention_mask": torch.ones(1, 5),
        "timestep": torch.tensor([500.0]),
        "num_frames": 2,
        "height": 2,
        "width": 3,
    }
    with torch.no_grad():
        ours, theirs = (net.eval()(**inputs, return_dict=False)[0] for net in (made.network, network))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)


def test_the_card_names_the_task(tmp_path):
    config = parse(LTXConfig, ["--model", "a/b", "--data.train", "c", "--data.buckets", "9x32x32"])
    for pipeline, task in {"LTXPipeline": "text-to-video", "CogVideoXImageToVideoPipeline": "image-to-video"}.items():
        assert f"- {task}\n" in publish.write_card(tmp_path, pipeline, config, ["9x32x32"]).read_text()


def two_ranks(words: list[str]) -> str:
    runs.fresh_state()
    try:
        LTXTrainer.main(words)
    except SystemExit as end:
        return str(end.code)
    return "ended well"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint__resume": "/none/checkpoint-7"}, "checkpoint-7: there is no such folder"),
        ({"lora__targets": "to_qq"}, "nothing matches 'to_qq'"),
    ],
    ids=["resume", "targets"],
)
def test_two_ranks_tell_a_fault_once_and_both_end(tiny_ltx, clips, tmp_path, changes, message):
    words = runs.options(tiny_ltx, clips, tmp_path / "run", **changes)
    first, second = runs.forked(two_ranks, words, timeout=60)
    assert message in first and second == "1"


def rank_1_fails(words: list[str]) -> str:
    from trainers.plan import PlanError

    runs.fresh_state()
    made = LTXTrainer(parse(LTXConfig, words))

    def fails():
        if made.accelerator.process_index == 1:
            raise PlanError("its disk is empty")

    made.take_stock = fails
    try:
        made.run()
    except (PlanError, SystemExit) as end:
        return str(end)
    return "ended well"


def test_a_fault_of_another_rank_ends_the_first_too(tiny_ltx, clips, tmp_path):
    words = runs.options(tiny_ltx, clips, tmp_path / "run")
    assert runs.forked(rank_1_fails, words, timeout=60) == ["its disk is empty", "1"]


def test_nothing_of_another_kind_of_adapter_stays(tiny_ltx, clips, tmp_path):
    runs.run(tiny_ltx, clips, tmp_path / "run", lora__type="lokr", train__steps=1)
    runs.run(tiny_ltx, clips, tmp_path / "run", overwrite=True, train__steps=1)
    runs.run(tiny_ltx, clips, tmp_path / "plain", train__steps=1)
    found, plain = ({p.name for p in (tmp_path / name).iterdir()} for name in ("run", "plain"))
    assert found == plain
