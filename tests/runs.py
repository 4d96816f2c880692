"""Runs for tests: small clips, options for a tiny run, whole runs in this process and in two forked ones."""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

LORA = "pytorch_lora_weights.safetensors"  # not ours to choose: diffusers and ComfyUI users know it by this name
TINY = {
    "data.buckets": ["17x64x96", "9x96x64"],
    "data.num_workers": 0,
    "data.cache_dtype": "fp32",
    "precision.weights": "fp32",
    "lora.rank": 4,
    "lora.alpha": 4,
    "train.steps": 4,
    "train.log_every": 1,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0,
    "checkpoint.every": 0,
}


def write_clip(path: Path, frames: int, height: int, width: int, fps: float, seed: int = 0) -> None:
    """A smooth random clip."""
    from data.video import write_video

    small = torch.rand(1, 3, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    big = torch.nn.functional.interpolate(small, (frames, height, width), mode="trilinear")[0]
    write_video(path, (big.permute(1, 2, 3, 0) * 255).byte().numpy(), fps)


def words(options: dict) -> list[str]:
    """{"train.steps": 4, "data.buckets": [...]} as command-line words."""
    out = []
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        out += [f"--{name}", *map(str, values)]
    return out


def options(model: Path, clips: Path, output_dir: Path, **changes) -> list[str]:
    """Command-line words of a tiny run; `changes` in dotted names with __ for the dot: train__steps=8."""
    given = {"model": model, "data.train": clips, "output_dir": output_dir} | TINY
    return words(given | {name.replace("__", "."): value for name, value in changes.items()})


def trainers_by_name() -> dict[str, type]:
    """ "ltx" -> LTXTrainer, and every other that a script train_<name>.py runs."""
    from trainers.base import Trainer

    found = {}
    for script in Path(__file__).parents[1].glob("train_*.py"):
        name = script.stem.removeprefix("train_")
        module = importlib.import_module(f"trainers.{name}")
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Trainer)]
        (found[name],) = [kind for kind in kinds if kind.__module__ == module.__name__]
    return found


def fresh_state() -> None:
    """Accelerate's process-wide state made anew, as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trainer(kind, model: Path, clips: Path, output_dir: Path, **changes):
    """A trainer with these options, not yet run. Accelerate's process-wide state is made anew."""
    from trainers.parsing import parse

    fresh_state()
    return kind(parse(kind.Config, options(model, clips, output_dir, **changes)))


def run(model: Path, clips: Path, output_dir: Path, **changes):
    """A whole LTX run in this process; the trainer afterwards."""
    from trainers.ltx import LTXTrainer

    made = trainer(LTXTrainer, model, clips, output_dir, **changes)
    made.run()
    return made


def metrics(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> list[float]:
    return [row["loss"] for row in metrics(output_dir)]


def trained(of) -> torch.Tensor:
    """All trained numbers of a trainer in one vector."""
    return torch.cat([p.detach().flatten().float() for p in of.parameters])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def forked(function, *arguments, world: int = 2, timeout: float = 120) -> list:
    """function(*arguments) in `world` forked ranks that join over gloo; their results (JSON-able) by rank."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    pipes, ranks = [], []
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=_rank, args=(rank, world, port, there, function, arguments))
        process.start()
        there.close()
        pipes.append(here)
        ranks.append(process)
    deadline, results = time.monotonic() + timeout, []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} gave no result in {timeout} s")
            results.append(pipe.recv())
    finally:
        for process in ranks:
            process.kill()
            process.join()
    failed = [text for good, text in results if not good]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _rank(rank, world, port, pipe, function, arguments):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 (whatever it was, the parent must hear of it)
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no interpreter shutdown: gloo's threads can abort it


class Interrupted(Exception):
    """What `interrupted` ends a run with."""


def interrupted(kind, step: int):
    """The trainer class `kind`, whose runs die right after optimizer step `step`, saved or not, as by a kill."""

    class Dying(kind):
        def after_step(self) -> None:
            super().after_step()
            if self.step == step:
                raise Interrupted

    Dying.__name__ = kind.__name__  # a checkpoint names the class that made it
    return Dying


def recorded(kind):
    """The trainer class `kind`, which also keeps (step, slot, loss) of every row that it trained on in `records`."""

    class Recorded(kind):
        def __init__(self, config):
            super().__init__(config)
            self.records: list[tuple[int, int, float]] = []

        def loss(self, batch):
            loss = super().loss(batch)
            self.records += [(self.step, slot, value) for slot, value in zip(self.slots, loss.tolist(), strict=True)]
            return loss

    Recorded.__name__ = kind.__name__
    return Recorded


def fed(kind, **changes):
    """The trainer class `kind`, which feeds its network changed keywords: name=what to make of the right value."""

    class Fed(kind):
        def loss(self, batch):
            model = self.model
            self.model = lambda **k: model(**(k | {name: change(k[name]) for name, change in changes.items()}))
            try:
                return super().loss(batch)
            finally:
                self.model = model

    return Fed


def flipped(kind):
    """The trainer class `kind` with the sign of its target wrong."""

    class FlippedSign(kind):
        def loss(self, batch):
            reduce = self.reduce
            self.reduce = lambda prediction, target, *rest: reduce(prediction, -target, *rest)
            try:
                return super().loss(batch)
            finally:
                self.reduce = reduce

    return FlippedSign


@contextlib.contextmanager
def libraries():
    """Imports what runs import, before anything is forked; frozen, or each gc.collect of a run walks it all (1 s)."""
    import accelerate
    import diffusers
    import peft

    assert accelerate and peft and diffusers.LTXPipeline
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def killed(function, *arguments, timeout: float = 60) -> None:
    """function(*arguments) in a forked child, which must end by its own SIGKILL."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(timeout)
    child.kill()
    assert child.exitcode == -signal.SIGKILL, child.exitcode


def die() -> None:
    """kill -9 from within: nothing is cleaned up, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def same(a, b) -> bool:
    """Bitwise equality of nested states: containers, numbers, plain tensors and torchao's quantised ones."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "codes"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.tensor_attrs)
    if isinstance(a, torch.Tensor):
        if a.dtype.is_floating_point and a.dtype.itemsize == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def numbers(root: Path) -> list[dict]:
    """metrics.jsonl without what a clock and the machine decide."""
    return [{k: v for k, v in r.items() if k not in ("seconds_per_step", "peak_memory_mb")} for r in metrics(root)]


def optimizer_state(checkpoint: Path) -> dict:
    return torch.load(checkpoint / "state" / "optimizer.bin", weights_only=True)


def assert_same_outcome(whole: Path, other: Path) -> None:
    """Two finished LoRA runs, bit for bit: weights, optimizer, export, every logged number, the run's own state."""
    from safetensors.torch import load_file

    from trainers.checkpoints import numbered, read_state
    from trainers.publish import LORA

    last = numbered(whole)[0].name
    a, b = whole / last, other / last
    pairs = [(a / name, b / name) for name in ("state/trainable.safetensors", LORA)]
    for pair in [*pairs, (whole / LORA, other / LORA)]:
        ours, theirs = map(load_file, pair)  # not the bytes: safetensors shuffles its metadata
        assert ours and same(ours, theirs), pair
    assert same(optimizer_state(a), optimizer_state(b)) and optimizer_state(a)["state"]
    assert numbers(whole) == numbers(other) and numbers(whole)
    states = [read_state(folder) for folder in (a, b)]
    assert states[0].pop("files").keys() == states[1].pop("files").keys()
    assert states[0] == states[1]


def contents(root: Path) -> dict[str, bytes]:
    """What a run is: its checkpoints, metrics and result, without the options, which are those asked for last."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "config.yaml"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
