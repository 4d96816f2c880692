"""docs/memory.md against the code: its tables are what the code counts, its recipes fit their cards by the estimate."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

import runs
from models import adapters
from test_estimate import PUBLISHED, published  # noqa: F401 (a fixture, found by its name)
from test_readme import commands, launched
from trainers import estimate, optimizers
from trainers.config import Config, OptimizerName, Quantized
from trainers.estimate import GIB, Bucket, Estimate
from trainers.parsing import parse

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
TEXT = PAGE.read_text()
TITLES = {
    "LTX-Video 2B": "ltx-2b",
    "LTX-Video 13B": "ltx-13b",
    "HunyuanVideo": "hunyuan",
    "CogVideoX-2b": "cogvideox-2b",
    "CogVideoX-5b": "cogvideox-5b",
}
IDS = {
    "Lightricks/LTX-Video": "ltx-2b",
    "Lightricks/LTX-Video-0.9.7-dev": "ltx-13b",
    "hunyuanvideo-community/HunyuanVideo": "hunyuan",
    "THUDM/CogVideoX-5b": "cogvideox-5b",
}
OFFLOAD, BF16 = {"memory.offload_activations": True}, {"precision.trainable": "bf16"}
AO = BF16 | {"optimizer.name": "adamw8bit-ao"}
# What the columns of the two tables of estimates stand for.
LORA = [{}, OFFLOAD, OFFLOAD | {"precision.storage": "fp8"}, OFFLOAD | {"precision.quantize": "nf4"}]
LORA += [OFFLOAD | {"memory.block_swap": "all"}]
FULL = [{}, {"optimizer.name": "adamw8bit"}, BF16 | {"optimizer.name": "adamw-kahan"}, AO]
FULL += [AO | {"optimizer.fused_backward": True, "optimizer.max_grad_norm": 0.0}]


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    lines = TEXT.split(head)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def priced(request, tmp_path):
    """priced(name, options) -> the Estimate of a run of this published model, which is given by its configs alone."""

    def make(kind, name: str, words: list[str]) -> Estimate:
        runs.fresh_state()
        folder = request.getfixturevalue("published")(name)
        given = {"model": folder, "output_dir": tmp_path / "out"}
        trainer = kind(parse(kind.Config, [*words, *runs.words(given)]))
        buckets = trainer.config.data.buckets
        trainer.plan = SimpleNamespace(buckets={str(bucket): [0] for bucket in buckets})
        made = Estimate(trainer)
        b: Bucket = made.bucket
        prompt = SimpleNamespace(num_frames=b.frames, height=b.height, width=b.width)
        trainer.validation = SimpleNamespace(prompts=[prompt])
        return made

    return make


def table_of(priced, tmp_path, head: str, method: dict, columns: list[dict]) -> None:
    """Every row of a table of estimates, recomputed."""
    found = rows(head)
    assert {row[0] for row in found} == {*TITLES}
    for title, size, *cells in found:
        kind = PUBLISHED[TITLES[title]][0]
        given = {"data.train": tmp_path, "data.buckets": size, **method}
        of = priced(kind, TITLES[title], runs.words(given))
        of.parts(of.trainer.config)
        blocks = len(next(iter(of.networks.values())).blocks)
        for cell, changes in zip(cells, columns, strict=False):
            changes = {name: blocks if value == "all" else value for name, value in changes.items()}
            config: Config = estimate.changed(of.trainer.config, changes)
            assert config.problems() == []
            assert float(cell) == pytest.approx(of.parts(config).total / GIB, abs=0.06), (title, changes)
        if len(cells) > len(columns):
            vae, encoding, decoding = of.of_vae(*map(int, size.split("x")))
            beside = [estimate.of_text(of.trainer), vae + encoding, vae + decoding]
            assert [float(cell) for cell in cells[-3:]] == pytest.approx([x / GIB for x in beside], abs=0.06), title


@pytest.mark.slow
def test_estimates_of_a_lora(priced, tmp_path):
    head = "| model | largest bucket | as it is |"
    table_of(priced, tmp_path, head, {"lora.rank": 32, "lora.alpha": 32}, LORA)


@pytest.mark.slow
def test_estimates_of_a_full_fine_tune(priced, tmp_path):
    table_of(priced, tmp_path, "| model | largest bucket | adamw |", {"method": "full"}, FULL)


def test_quantised_weights(priced, tmp_path):
    kinds = {"int8": 1, "int8wo": 1, "fp8wo": 1, "nf4": 2, "fp4": 2, "int4": 3}
    assert {*kinds} == {*get_args(Quantized)} - {"none"}
    found = rows("| | bf16 | int8, int8wo, fp8wo | nf4, fp4 | int4 |")
    assert {row[0] for row in found} == {*TITLES}
    for title, *cells in found:
        words = runs.words({"data.train": tmp_path, "data.buckets": "9x64x96"})
        trainer = priced(PUBLISHED[TITLES[title]][0], TITLES[title], words).trainer
        net = estimate.network(trainer, trainer.config)
        trains = adapters.trainable(net.net)
        for kind, column in {"none": 0, **kinds}.items():
            sizes, _ = estimate.stored(trainer, estimate.changed(trainer.config, {"precision.quantize": kind}), net)
            weights = sum(size for name, size in sizes.items() if name not in trains)
            assert float(cells[column]) == pytest.approx(weights / GIB, abs=0.06), (title, kind)


def test_bytes_of_optimizers():
    said = {name: cells[1] for cells in rows("| `optimizer.name` | bytes |") for name in cells[0].split(", ")}
    assert {*said} == {*get_args(OptimizerName)}
    for name, cell in said.items():
        dtype = torch.bfloat16 if name == "adamw-kahan" else torch.float32
        state = optimizers.state_bytes(name, (4096, 4096), dtype, "transformer_blocks.0.attn1.to_q.weight")
        assert float(cell) == pytest.approx(state / 4096**2, abs=0.06), name


RECIPES = {
    command: int(gb)
    for gb, block in re.findall(r"^### (\d+) GB\n\n```bash\n(.*?)```", TEXT, re.M | re.S)
    for command in block.splitlines()
}


def test_each_size_of_card_has_recipes():
    assert [*dict.fromkeys(RECIPES.values())] == [12, 16, 24, 48, 80] and {*RECIPES} < {*commands(PAGE)}


@pytest.mark.slow
@pytest.mark.parametrize("command", RECIPES, ids=lambda command: " ".join(command.split()[2:5])[-40:])
def test_recipes_fit_their_cards(priced, tmp_path, monkeypatch, command):
    """The training step, encoding, and validation at the size of the largest bucket."""
    monkeypatch.chdir(PAGE.parents[1])
    kind, words = launched(command)
    assert "..." in command
    words += ["--data.train", str(tmp_path)]
    made = priced(kind, IDS[parse(kind.Config, words).model], words)
    (size,) = re.findall(r"common card for this run: (over )?(\d+) GB", made.stages(True)[-1])
    assert not size[0] and int(size[1]) <= RECIPES[command], made.stages(True)
