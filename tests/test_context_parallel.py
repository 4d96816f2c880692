"""Ranks that share the tokens of a sample: the same run as one process, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import runs
from models import context_parallel
from trainers import launch
from trainers.cog import CogVideoXTrainer
from trainers.config import OptionError
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.ltx import LTXConfig, LTXTrainer
from trainers.parsing import parse
from trainers.plan import PlanError

pytestmark = pytest.mark.usefixtures("libraries")

OPTIONS = {
    "optimizer__name": "sgd",
    "optimizer__learning_rate": 0.3,
    "optimizer__schedule": "constant",
    "optimizer__max_grad_norm": 0.02,  # below the norms of this run: it must clip by the same number everywhere
    "data__caption_dropout": 0.3,
    "first_frame_p": 0.5,
}


class Watched(LTXTrainer):
    """Keeps how many tokens a rank's own blocks are given, and what it samples."""

    def build(self) -> None:
        super().build()
        self.tokens_of_blocks: set[int] = set()
        self.sampled: list[np.ndarray] = []
        self.network.transformer_blocks[0].register_forward_pre_hook(
            lambda _, args, words: self.tokens_of_blocks.add((args[0] if args else words["hidden_states"]).shape[1]),
            with_kwargs=True,
        )

    def sample(self, *args, **call):
        frames = super().sample(*args, **call)
        self.sampled.append(np.asarray(frames))
        return frames


Watched.__name__ = LTXTrainer.__name__


def facts(model, clips, output_dir, changes) -> dict:
    kind = runs.recorded(Watched)
    made = runs.trainer(kind, model, clips, output_dir, **changes)
    made.run()
    return {
        "ranks": made.accelerator.num_processes,
        "weights": runs.trained(made).numpy(),
        "losses": {(step, slot): loss for step, slot, loss in made.records},
        "tokens": made.tokens_of_blocks,
        "sampled": made.sampled,
        "written": sorted(str(p.relative_to(output_dir)) for p in output_dir.rglob("samples/*/*.mp4")),
    }


def assert_equal_runs(one: dict, many: list[dict]) -> None:
    for rank in many:
        assert rank["ranks"] == len(many)
        assert np.abs(rank["weights"] - one["weights"]).max() < 1e-5
        assert np.array_equal(rank["weights"], many[0]["weights"])
    losses = {}
    for rank in many:
        losses |= rank["losses"]
    assert losses.keys() == one["losses"].keys()
    assert losses == pytest.approx(one["losses"], abs=1e-5)


def same_metrics(a: Path, b: Path) -> None:
    for name in ("loss", "grad_norm", "samples_seen", "tokens_seen"):
        values = [[row[name] for row in runs.metrics(root)] for root in (a, b)]
        assert values[0] == pytest.approx(values[1], abs=1e-5), name
    assert min(row["grad_norm"] for row in runs.metrics(a)) > OPTIONS["optimizer__max_grad_norm"]


@pytest.mark.parametrize("family", ["ltx", "ltx-condition"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_ranks_that_share_tokens_equal_one_process(family, method, built, clips, cache, tmp_path):
    options = OPTIONS | {"data__cache_dir": cache, "method": method, "train__gradient_accumulation_steps": 2}
    one = facts(built(family), clips, tmp_path / "one", options)
    shared = options | {"memory__context_parallel": 2}
    two = runs.forked(facts, built(family), clips, tmp_path / "two", shared)
    assert_equal_runs(one, two)
    assert one["losses"].keys() == two[0]["losses"].keys() == two[1]["losses"].keys()  # the same samples
    assert one["tokens"] == {18, 12} and two[0]["tokens"] == two[1]["tokens"] == {9, 6}
    same_metrics(tmp_path / "one", tmp_path / "two")
    start = facts(built(family), clips, tmp_path / "start", options | {"optimizer__learning_rate": 1e-9})
    assert np.abs(one["weights"] - start["weights"]).max() > 1e-3  # it did train


def test_two_groups_of_two_equal_one_process_with_twice_the_accumulation(tiny_ltx, clips, cache, tmp_path):
    options = OPTIONS | {"data__cache_dir": cache, "train__batch_size": 2}
    one = facts(tiny_ltx, clips, tmp_path / "one", options | {"train__gradient_accumulation_steps": 2})
    four = runs.forked(facts, tiny_ltx, clips, tmp_path / "four", options | {"memory__context_parallel": 2}, world=4)
    assert_equal_runs(one, four)
    slots = [{slot for _, slot in rank["losses"]} for rank in four]
    assert slots == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    same_metrics(tmp_path / "one", tmp_path / "four")


def test_one_process_goes_on_with_what_two_ranks_began(tiny_ltx, clips, cache, tmp_path):
    options = OPTIONS | {"data__cache_dir": cache, "checkpoint__every": 2}
    whole = facts(tiny_ltx, clips, tmp_path / "whole", options)
    shared = options | {"memory__context_parallel": 2, "train__steps": 2}
    runs.forked(facts, tiny_ltx, clips, tmp_path / "parts", shared)
    rest = facts(tiny_ltx, clips, tmp_path / "parts", options | {"checkpoint__resume": "latest"})
    assert {step for step, _ in rest["losses"]} == {2, 3}
    assert np.abs(rest["weights"] - whole["weights"]).max() < 1e-5


def test_samples_of_a_group_are_those_of_one_process(tiny_ltx, clips, cache, tmp_path):
    from PIL import Image

    rows = [{"prompt": f"a dog {i}", "num_frames": 9, "height": 64, "width": 96, "seed": i} for i in range(3)]
    Image.new("RGB", (96, 64), "red").save(tmp_path / "first.png")
    rows[1]["image"] = str(tmp_path / "first.png")  # whose tokens have a timestep each
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(rows))
    options = OPTIONS | {
        "data__cache_dir": cache,
        "train__steps": 1,
        "validation__prompts": prompts,
        "validation__at_start": True,
        "validation__every": 0,
        "validation__num_inference_steps": 2,
        "optimizer__learning_rate": 1e-6,
    }
    one = facts(tiny_ltx, clips, tmp_path / "one", options)
    shared = options | {"memory__context_parallel": 2}
    four = runs.forked(facts, tiny_ltx, clips, tmp_path / "four", shared, world=4)
    assert len(one["written"]) == 6 and four[0]["written"] == one["written"]
    a, b, c = one["sampled"][:3]
    assert a.shape == (9, 64, 96, 3) and a.std() > 0.1 and np.abs(a - b).max() > 0.1
    for rank, expected in zip(four, [[a, b], [a, b], [c], [c]], strict=True):  # a group samples the share of its ranks
        assert len(rank["sampled"]) == 2 * len(expected)
        for frames, wanted in zip(rank["sampled"], expected, strict=False):  # before training; after it the runs differ
            assert np.abs(frames - wanted).max() < 1e-4


def poisoned(model, clips, output_dir, changes) -> list[int]:
    """The places that Pulse.refuse names when the rows of global slots 1 and 2 are not finite."""
    from trainers.pulse import NonFiniteStep, Pulse

    made = runs.trainer(LTXTrainer, model, clips, output_dir, **changes)
    group, pulse = made.accelerator.process_index // 2, Pulse(made.accelerator, 2)
    rows = [[1.0, math.nan], [math.inf, 1.0]]
    pulse.send([torch.tensor(rows[group]), torch.ones(2)], torch.tensor(1.0), 0)
    assert not pulse.read()[2]
    with pytest.raises(NonFiniteStep) as error:
        pulse.refuse(7, [f"slot {slot};" for slot in range(8)])
    return [slot for slot in range(8) if f"slot {slot};" in str(error.value)]


def test_a_bad_sample_of_a_group_is_named(tiny_ltx, clips, tmp_path):
    options = OPTIONS | {"memory__context_parallel": 2, "train__batch_size": 2}
    assert runs.forked(poisoned, tiny_ltx, clips, tmp_path / "run", options, world=4) == [[1, 2]] * 4


# -- refused -----------------------------------------------------------------------------------------------------------


def refusal(kind, model, clips, output_dir, changes) -> str:
    made = runs.trainer(kind, model, clips, output_dir, **changes)
    made.accelerator.wait_for_everyone()  # or the first to end takes the store away that others join by
    load = made.pretrained.component
    # A scheduler is settings alone, and the plan's estimate asks for it.
    made.pretrained.component = lambda name: load(name) if name == "scheduler" else pytest.fail(f"{name} was loaded")
    with pytest.raises((OptionError, PlanError, SystemExit)) as error:
        made.run()
    return str(error.value)


@pytest.mark.parametrize(("kind", "name"), [(HunyuanVideoTrainer, "hunyuan"), (CogVideoXTrainer, "cogvideox-2b")])
def test_a_model_without_a_plan_is_refused_before_it_loads(kind, name, built, clips, tmp_path):
    options = {"memory__context_parallel": 2}
    told = runs.forked(refusal, kind, built(name), clips, tmp_path / "run", options)
    assert f"no context-parallel plan for {kind.transformer_class}; use 1" in told[0]


def test_tokens_that_cannot_be_shared_are_refused_in_the_plan(tiny_ltx, clips, tmp_path):
    options = {"memory__context_parallel": 4, "data__precompute": "off"}
    told = runs.forked(refusal, LTXTrainer, tiny_ltx, clips, tmp_path / "run", options, world=4)
    assert told[0] == (
        "data.buckets: 17x64x96 has 18 video tokens, which memory.context_parallel 4 does not divide: choose another "
        "size or number of ranks"
    )


def test_heads_that_cannot_be_shared_are_refused(tiny_ltx, clips, tmp_path):
    told = runs.forked(refusal, LTXTrainer, tiny_ltx, clips, tmp_path / "run", {"memory__context_parallel": 3}, world=3)
    assert "memory.context_parallel 3 must divide the 4 attention heads" in told[0]


WORDS = ["--model", "x/y", "--data.train", "clips", "--data.buckets", "9x64x96", "--output_dir", "out"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory.compile", "blocks"], "with memory.compile blocks"),
        (["--memory.group_offload", "block"], "with memory.group_offload block"),
        (["--memory.attention", "flash"], "with memory.attention flash"),
        (["--memory.attention", "native"], None),
    ],
)
def test_options_that_were_not_compared_are_refused(options, says):
    assert parse(LTXConfig, WORDS + options)
    if says is None:
        assert parse(LTXConfig, [*WORDS, *options, "--memory.context_parallel", "2"])
    else:
        with pytest.raises(OptionError, match=f"memory.context_parallel 2 {says}: "):
            parse(LTXConfig, [*WORDS, *options, "--memory.context_parallel", "2"])


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "4"}, None),
        ({}, "memory.context_parallel 2 needs a multiple of 2 processes, and 1 is launched"),
        ({"WORLD_SIZE": "3"}, "memory.context_parallel 2 needs a multiple of 2 processes, and 3 are launched"),
        ({"WORLD_SIZE": "4", "PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size 2: tensor parallelism is not supported"),
        ({"WORLD_SIZE": "4", "PARALLELISM_CONFIG_CP_SIZE": "2"}, "cp_size 2: its context parallelism"),
        ({"WORLD_SIZE": "4", "PARALLELISM_CONFIG_SP_SIZE": "2"}, "sp_size 2: its context parallelism"),
        ({"WORLD_SIZE": "4", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, None),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_MEGATRON_LM": "true"}, "MEGATRON_LM: its tensor parallelism"),
        (
            {"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            "memory.context_parallel 2 under FSDP2",
        ),
    ],
)
def test_what_the_launcher_may_ask(environment, says, monkeypatch):
    for name in ("WORLD_SIZE", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if any(name.startswith("PARALLELISM_CONFIG") for name in environment):
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    config = parse(LTXConfig, [*WORDS, "--memory.context_parallel", "2"])
    found = launch.contradictions(config)
    assert len(found) == bool(says) and all(says in text for text in found)


def test_tensor_parallelism_of_deepspeed_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    found = [text for text in launch.contradictions(parse(LTXConfig, WORDS)) if "tensor_parallel" in text]
    assert found == [
        f"the DeepSpeed config {file} has tensor_parallel, which is not supported: remove it, ZeRO-3 and FSDP2 shard "
        "the weights too"
    ]


def test_nothing_is_shared_by_one():
    net = torch.nn.Linear(2, 2)
    before = dict(vars(net))
    context_parallel.share_tokens(net, 1, torch.device("cpu"))
    assert vars(net) == before
