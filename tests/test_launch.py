"""Real launches: accelerate and torchrun, two processes, signals, a rank that dies, launches that are refused."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import runs
from data.buckets import check_buckets
from models import precision
from runs import LORA, free_port
from trainers import checkpoints, launch, optimizers
from trainers.config import OptionError
from trainers.ltx import LTXConfig, LTXTrainer
from trainers.parsing import parse

ROOT = Path(__file__).parents[1]


def accelerate(config: str, *more: str) -> list[str]:
    """`accelerate launch` with a shipped config file."""
    file = ROOT / "configs" / "accelerate" / config
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*launcher, "--main_process_port", str(free_port()), *more]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]


def start(launcher: list[str], words: list[str], script="train_ltx.py", **environment: str) -> subprocess.Popen:
    """The real script under a launcher, in a process group of its own."""
    return subprocess.Popen(
        [*launcher, script, *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float) -> tuple[int, str]:
    """(exit code, output); whatever is left of it after `timeout` seconds is killed, and the test fails."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else [process]
    try:
        text, _ = process.communicate(timeout=timeout)
    finally:
        for member in family[1:]:
            if member.is_running():
                member.kill()
        process.kill()
    return process.returncode, text


def until_step(process: subprocess.Popen, root: Path, step: int, timeout: float = 120) -> None:
    """Waits until so many steps are in metrics.jsonl."""
    deadline, metrics = time.monotonic() + timeout, root / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 1)[1]
        time.sleep(0.02)


# Weights are compared to 1e-5. AdamW would divide a rounding error in a tiny gradient by that gradient.
PLAIN = {"optimizer__name": "sgd", "optimizer__learning_rate": 0.1}


@pytest.fixture(scope="module")
def alone(tiny_ltx, clips, tmp_path_factory) -> Path:
    """The output_dir of one process with accumulation 2; its cache is shared."""
    root = tmp_path_factory.mktemp("alone") / "run"
    changes = PLAIN | {"train__gradient_accumulation_steps": 2, "data__cache_dir": root.parent / "cache"}
    runs.run(tiny_ltx, clips, root, **changes)
    return root


# -- two processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_launched_processes_equal_one(launcher, tiny_ltx, clips, alone, tmp_path):
    words = runs.options(tiny_ltx, clips, tmp_path / "run", data__cache_dir=alone.parent / "cache", **PLAIN)
    command = accelerate("ddp.yaml", "--num_processes", "2") if launcher == "accelerate" else torchrun()
    code, text = finish(start(command, words), 180)
    assert code == 0, text
    assert text.count("global batch 2 = 1 x 1 accumulation x 2 processes") == 1  # told once
    assert "captions: 8 of 8 encoded already" in text and text.count("done: ") == 1
    rows = runs.metrics(tmp_path / "run")
    assert [row["samples_seen"] for row in rows] == [2, 4, 6, 8]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in runs.metrics(alone)], abs=1e-5)
    ours, theirs = load_file(tmp_path / "run" / LORA), load_file(alone / LORA)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)
    assert (tmp_path / "run" / "checkpoint-4" / "state" / "random_states_1.pkl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_ends_the_other(rank, tiny_ltx, clips, alone, tmp_path):
    """SIGKILL of one of two: the launcher fails within a minute, nobody waits on, the last checkpoint is whole."""
    changes = dict(train__steps=100000, checkpoint__every=2, checkpoint__keep=1, checkpoint__keep_exports=1)
    root = tmp_path / "run"
    words = runs.options(tiny_ltx, clips, root, data__cache_dir=alone.parent / "cache", **changes)
    process = start(torchrun(), words)
    until_step(process, root, 3)
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in family if p.environ().get("LOCAL_RANK") and "train_ltx.py" in p.cmdline()]
    assert sorted(p.environ()["LOCAL_RANK"] for p in ranks) == ["0", "1"]
    begun = time.monotonic()
    next(p for p in ranks if p.environ()["LOCAL_RANK"] == rank).kill()
    code, text = finish(process, 90)
    assert code not in (0, -signal.SIGKILL) and time.monotonic() - begun < 60
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    assert checkpoints.find("latest", root)[0] and not (root / LORA).exists()
    assert "done: " not in text


@pytest.mark.slow
@pytest.mark.parametrize(("config", "number"), [("one_gpu.yaml", signal.SIGTERM), ("ddp.yaml", signal.SIGINT)])
def test_a_signal_to_the_group_saves_and_the_same_command_goes_on(config, number, tiny_ltx, clips, alone, tmp_path):
    root = tmp_path / "run"
    changes = dict(train__steps=100000, checkpoint__resume="latest", data__cache_dir=alone.parent / "cache")
    process = start(accelerate(config), runs.options(tiny_ltx, clips, root, **changes))
    until_step(process, root, 2)
    os.killpg(process.pid, number)
    code, text = finish(process, 60)
    found = re.search(rf"stopped at step (\d+) of 100000 by {number.name}; run the same command", text)
    assert code != 0 and found, text
    step = int(found[1])
    assert [p.name for p in checkpoints.numbered(root)] == [f"checkpoint-{step}"]
    assert checkpoints.problem(root / f"checkpoint-{step}") is None
    assert len(runs.metrics(root)) == step

    code, text = finish(
        start(accelerate(config), runs.options(tiny_ltx, clips, root, **changes | {"train__steps": step + 2})), 120
    )
    assert code == 0, text
    assert f"resuming from {root / f'checkpoint-{step}'}" in text
    assert [row["step"] for row in runs.metrics(root)] == list(range(1, step + 3))
    assert (root / LORA).exists()


# -- launches that are refused ------------------------------------------------------------------------------------


def test_processes_that_did_not_join_are_refused(tiny_ltx, clips, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")  # a launcher said two, and accelerate finds no group to join
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="2 processes were launched but accelerate joined 1"):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run")


@pytest.mark.slow
def test_two_lonely_processes_write_nothing(tiny_ltx, clips, tmp_path):
    """torchrun on a machine without GPU and without ACCELERATE_USE_CPU: accelerate would train twice in one folder."""
    words = runs.options(tiny_ltx, clips, tmp_path / "run")
    process = start(torchrun(), words, ACCELERATE_USE_CPU="false", CUDA_VISIBLE_DEVICES="")
    code, text = finish(process, 120)
    assert code not in (0, -signal.SIGKILL)
    assert "error: 2 processes were launched but accelerate joined 1" in text and "ACCELERATE_USE_CPU=true" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_contradicting_launch_ends_with_both_values(tiny_ltx, clips, tmp_path):
    words = runs.options(tiny_ltx, clips, tmp_path / "run", precision__weights="bf16")
    code, text = finish(start(accelerate("one_gpu.yaml", "--mixed_precision", "fp16"), words), 120)
    assert code != 0
    assert "error: accelerate is launched with mixed_precision fp16, but precision.weights is bf16" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ACCELERATE_MIXED_PRECISION", "no", None),
        ("ACCELERATE_MIXED_PRECISION", "bf16", None),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision fp16, but precision.weights is bf16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision fp8, but precision.weights is bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", None),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto", None),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3", None),
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "4",
            "gradient_accumulation_steps 4, but train.gradient_accumulation_steps is 3",
        ),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", None),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend inductor, but memory.compile is none"),
        ("ACCELERATE_USE_FSDP", "false", None),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "launched with MEGATRON_LM"),
    ],
)
def test_what_the_launcher_may_say(variable, value, says, monkeypatch):
    words = ["--model", "x/y", "--data.train", "clips", "--data.buckets", "9x64x96"]
    config = parse(LTXConfig, [*words, "--train.gradient_accumulation_steps", "3"])
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    found = launch.contradictions(config)
    assert len(found) == (says is not None)
    assert not says or says in found[0]


def test_all_contradictions_are_told_at_once(monkeypatch, tiny_ltx, clips, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    with pytest.raises(OptionError) as error:
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run")
    assert (
        "2 problems" in str(error.value) and "bf16" in str(error.value) and "accumulation_steps 8" in str(error.value)
    )


def test_other_versions_are_named_with_both(monkeypatch, tiny_ltx, clips, tmp_path, capsys):
    def absent(name):
        raise launch.metadata.PackageNotFoundError(name)

    installed = {"torch": "2.13.0+cpu", "diffusers": "0.43.1", "peft": "0.21.2", "av": "17.0"}
    needs = [
        "torch>=2.13,<3",
        "diffusers<0.43,>=0.42.1",
        "peft>=0.21.2,<0.22",
        "av>=18,<19",
        "tyro>=1",
        'pytest<1; extra == "dev"',
    ]
    monkeypatch.setattr(launch.metadata, "requires", lambda name: {"reeltune": needs}[name])
    monkeypatch.setattr(launch.metadata, "version", lambda name: installed.get(name) or absent(name))
    found = launch.other_versions()
    assert len(found) == 3
    assert "diffusers 0.43.1 installed, wanted is " in found[0] and "0.42.1" in found[0]
    assert "av 17.0 installed, wanted is " in found[1] and ">=18" in found[1]
    assert "tyro not installed, wanted is >=1" in found[2]
    runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run")
    assert "\n  ".join(["warning: not tested with these versions:", *found]) in capsys.readouterr().out

    monkeypatch.setattr(launch.metadata, "requires", absent)
    assert launch.other_versions() == []


# -- the files in configs/ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda file: file.name)
def test_accelerate_configs(file):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))  # refuses keys that accelerate does not know
    own_json = "deepspeed_config_file" in config.deepspeed_config  # beside which Accelerate allows no mixed_precision
    assert config.mixed_precision == (None if own_json else "no")  # precision.weights decides
    assert config.num_machines == (2 if file.stem == "multi_node" else 1)
    assert (config.num_processes > 1) == (config.distributed_type != "NO")
    first = file.read_text().splitlines()[0]
    assert f"accelerate launch --config_file {file.relative_to(ROOT)}" in first and "train_ltx.py" in first


TRAINERS = runs.trainers_by_name()
FILES = [file for name in TRAINERS for file in sorted((ROOT / "configs" / name).glob("*.yaml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_model_configs(file, tmp_path):
    """They parse with nothing but data and output_dir given, and say nothing that the trainer would refuse."""
    words = ["--config", str(file), "--data.train", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    trainer = TRAINERS[file.parent.name]
    config = parse(trainer.Config, words)
    config.check()
    check_buckets(config.data.buckets, trainer.frame_rule, trainer.side_rule)
    half = trainer.half_precision  # a property where the folder decides: bf16 then fits them all
    precision.check(config, ("bf16",) if isinstance(half, property) else half)
    assert config.method == ("full" if "full" in file.name else "lora")
    assert config.checkpoint.resume == "latest"  # the same command again goes on, as the README says
    dtype = precision.DTYPES[config.precision.trainable]
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = optimizers.build(config.optimizer, {"transformer_blocks.0.ff.net.2.weight": weight})
    weight.grad = torch.ones_like(weight)
    torch.compiler.set_stance("force_eager")
    optimizer.step()
    torch.compiler.set_stance("default")
    assert (weight < 1).any()
