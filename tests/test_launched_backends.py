"""Every file in configs/accelerate, the Slurm script and torchrun, really launched on CPU ranks, what they train."""

import os
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import runs
from runs import LORA, free_port
from test_launch import ROOT, accelerate, finish, start, torchrun, until_step
from trainers import checkpoints
from trainers.cog import CogVideoXTrainer
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.ltx import LTXTrainer

pytestmark = pytest.mark.slow
MODELS = {"train_ltx.py": LTXTrainer, "train_hunyuan.py": HunyuanVideoTrainer, "train_cog.py": CogVideoXTrainer}
CONFIGS = {  # file -> script, processes, what the run calls its backend
    "ddp": ("train_hunyuan.py", 2, "one process or DDP"),
    "fsdp2": ("train_cog.py", 2, "FSDP2"),
    "fsdp2_offload": ("train_ltx.py", 2, "FSDP2"),
    "hsdp": ("train_ltx.py", 4, "FSDP2, 2 copies of the network in 2 shards each"),
    "zero1": ("train_ltx.py", 2, "DeepSpeed ZeRO-1 on 2 processes"),
    "zero2": ("train_hunyuan.py", 2, "DeepSpeed ZeRO-2 on 2 processes"),
    "zero3": ("train_cog.py", 2, "DeepSpeed ZeRO-3 on 2 processes"),
    "zero2_offload": ("train_ltx.py", 2, "DeepSpeed ZeRO-2 on 2 processes"),
    "zero3_offload": ("train_ltx.py", 2, "DeepSpeed ZeRO-3 on 2 processes"),
    "deepspeed_json": ("train_ltx.py", 2, "DeepSpeed ZeRO-2 on 2 processes"),
}
ELSEWHERE = {"multi_node": "here, through examples/slurm.sh", "one_gpu": "in test_launch.py"}
HERE = {"ACCELERATE_USE_CPU": "false", "PYTHONPATH": str(Path(__file__).parent / "launched")}  # see backends.py
OPTIONS = {"train__steps": 2}


@pytest.fixture(scope="module")
def alone(built, clips, tmp_path_factory):
    """alone(script, samples) -> the output_dir of one process that accumulates `samples`, its cache beside it."""
    root = tmp_path_factory.mktemp("alone")

    def run(script: str, samples: int) -> Path:
        out = root / f"{script}-{samples}"
        if not out.exists():
            kind = MODELS[script]
            more = OPTIONS | {"train__gradient_accumulation_steps": samples, "data__cache_dir": root / "cache"}
            runs.trainer(kind, built(kind.tiny[0]), clips, out, **more).run()
        return out

    return run


@pytest.fixture(scope="module")
def extensions(tmp_path_factory) -> dict[str, str]:
    """Where DeepSpeed builds its CPU optimizer (30 s, once), and how it finds its tools."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions")), "PATH": path}


def words(built, clips, out: Path, alone: Path, **changes) -> list[str]:
    kind = MODELS[alone.name.rpartition("-")[0]]
    return runs.options(built(kind.tiny[0]), clips, out, data__cache_dir=alone.parent / "cache", **OPTIONS | changes)


def assert_as_alone(text: str, out: Path, alone: Path, processes: int, backend: str) -> None:
    """The launch was what it was meant to be, which accelerate does not warn of, and trained what one process does."""
    assert text.count(f"global batch {processes} = 1 x 1 accumulation x {processes} processes") == 1, text
    assert text.count(f"distribution: {backend}; computes in fp32") == 1 and text.count("done: ") == 1, text
    for key, bound in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 0)):
        ours, theirs = ([row[key] for row in runs.metrics(folder)] for folder in (out, alone))
        assert len(ours) == 2 and ours == pytest.approx(theirs, rel=bound, abs=bound), key
    ours, theirs = load_file(out / LORA), load_file(alone / LORA)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in ours)


def test_every_config_is_launched():
    files = {file.stem for file in (ROOT / "configs" / "accelerate").glob("*.yaml")}
    assert files == CONFIGS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config, built, clips, alone, extensions, tmp_path):
    script, processes, backend = CONFIGS[config]
    if config.startswith("zero") and config.endswith("offload") and not (shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("DeepSpeed builds its CPU optimizer with g++ and ninja, which are not here")
    environment = HERE | extensions if backend != "one process or DDP" else {}
    single, out = alone(script, processes), tmp_path / "run"
    launcher = accelerate(f"{config}.yaml", "--num_processes", str(processes))
    code, text = finish(start(launcher, words(built, clips, out, single), script, **environment), 400)
    assert code == 0, text
    assert_as_alone(text, out, single, processes, backend)


def test_slurm_script(built, clips, alone, tmp_path):
    """Two nodes of one rank, played by two launchers here: configs/accelerate/multi_node.yaml."""
    commands = {
        "scontrol": '[ "$*" = "show hostnames one,two" ] && printf "127.0.0.1\\nnobody\\n"',
        "srun": 'shift; SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; first=$?; wait $! && exit $first',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_NODELIST": "one,two", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "PORT": str(free_port())}
    single, out = alone("train_ltx.py", 2), tmp_path / "run"
    command = ["bash", "examples/slurm.sh"]
    code, text = finish(start(command, words(built, clips, out, single), "train_ltx.py", PATH=path, **slurm), 120)
    assert code == 0, text
    assert_as_alone(text, out, single, 2, "one process or DDP")


TORCHRUN = {
    "FSDP2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "DeepSpeed ZeRO-2 on 2 processes": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
}


def test_torchrun(built, clips, alone, tmp_path):
    single, out = alone("train_ltx.py", 2), tmp_path / "run"
    code, text = finish(start(torchrun(), words(built, clips, out, single), **HERE, **TORCHRUN["FSDP2"]), 120)
    assert code == 0, text
    assert_as_alone(text, out, single, 2, "FSDP2")


@pytest.mark.parametrize("backend", TORCHRUN)
def test_a_rank_that_dies_ends_the_other(backend, built, clips, alone, tmp_path):
    """SIGKILL of rank 1: the launcher says which and fails within a minute, and the last checkpoint is whole."""
    single, root = alone("train_ltx.py", 2), tmp_path / "run"
    changes = dict(train__steps=100000, checkpoint__every=2, checkpoint__keep=1, checkpoint__keep_exports=1)
    process = start(torchrun(), words(built, clips, root, single, **changes), **HERE, **TORCHRUN[backend])
    until_step(process, root, 3)
    family = psutil.Process(process.pid).children(recursive=True)
    (second,) = (p for p in family if p.environ().get("LOCAL_RANK") == "1" and "train_ltx.py" in p.cmdline())
    begun = time.monotonic()
    second.kill()
    code, text = finish(process, 90)
    assert code > 0 and time.monotonic() - begun < 60
    assert f"distribution: {backend}; " in text and "local_rank: 1" in text and "Signal 9 (SIGKILL)" in text, text
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    assert checkpoints.find("latest", root)[0] and not (root / LORA).exists()
