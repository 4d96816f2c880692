"""Each option for memory, optimizers and precision once, through the real trainers: time, peak memory, losses.

    python benchmarks/gpu_smoke.py --minutes 6    on a machine with a CUDA device
    python benchmarks/gpu_smoke.py --cpu          what a CPU can do of it, at tiny size: to try the script itself

A case is a run of a few steps that stops before it would save anything. The networks have random weights: the main one
is LTX-Video 2B at half its width, with small encoders. `--out` gets table.md and results.json, written anew after each
case, and what each case printed in logs/; models, clips and the cache in it are used again. A case that fails is told
and the others still run; the exit code is 1 then.
"""

import argparse
import contextlib
import fnmatch
import gc
import hashlib
import json
import math
import os
import pkgutil
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# What CUDA reads when it starts: for train.deterministic, and for cases of all sizes in one process.
os.environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"})

import torch
from gpu_cases import ON_CPU, ON_CUDA, Case, Network, cases, lacking

from models import tiny
from trainers import estimate

ROOT = Path(__file__).resolve().parents[1]
LAUNCHED_SECONDS = 120  # that a launched case may take at least


# -- one case ---------------------------------------------------------------------------------------------------------


class Enough(Exception):
    """The steps of a case are done."""


class Failed(Exception):
    """A case ran and did not do what it should."""


def stopping(kind: type, steps: int, waits: bool) -> type:
    """The trainer class `kind`, which ends after `steps` with Enough; from half of them on nothing waits, or raises."""

    class Stopping(kind):
        def fit(self) -> None:
            self.at_first = some_of(self.parameters)
            super().fit()

        def after_step(self) -> None:
            super().after_step()
            if not waits and self.step == steps // 2:
                forbid_waiting(self.device)
            if self.step == steps:
                raise Enough

    Stopping.__name__ = kind.__name__
    return Stopping


def forbid_waiting(device: torch.device) -> None:
    """Whatever waits for the device raises from now on; waiting for an event does not count."""
    number = torch.ones(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    with contextlib.suppress(RuntimeError):
        number.item()
        raise Failed("torch did not notice that .item() waits: this case proves nothing")


def some_of(parameters: list) -> torch.Tensor:
    """64 numbers of each, of what lies on this rank."""
    local = (getattr(p, "to_local", lambda p=p: p)() for p in parameters)
    return torch.cat([p.detach().flatten()[:64].float().cpu() for p in local])


def digest(parameters: list) -> str:
    made = hashlib.sha256()
    for parameter in parameters:
        made.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return made.hexdigest()


@dataclass
class Place:
    """Where a session runs: folders, sizes, and what is ready in them."""

    out: Path
    cpu: bool
    steps: int
    ready: set[str] = field(default_factory=set)

    def network(self, name: str) -> Network:
        return (ON_CPU if self.cpu else ON_CUDA)[name]

    def model(self, of: Network) -> Path:
        return self.out / "models" / f"{of.tiny}-{of.width}x{of.layers}"

    def clips(self, of: Network) -> Path:
        return self.out / "clips" / of.bucket

    def config(self, name: str, changes: dict[str, Any]):
        """(trainer class, Config) of a run of network `name`."""
        from trainers.parsing import parse

        of = self.network(name)
        options = {
            "model": self.model(of),
            "output_dir": self.out / "run",
            "overwrite": True,
            "data.train": self.clips(of),
            "data.buckets": of.bucket,
            "data.cache_dir": self.out / "cache",
            "data.num_workers": 0,
            "lora.rank": 16,
            "lora.alpha": 16,
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 0,
            "train.steps": self.steps + 1,  # the last one would save
            "train.log_every": 1,
            "checkpoint.every": 0,
        } | changes
        kind = pkgutil.resolve_name(of.trainer)
        return kind, parse(kind.Config, [word for key, value in options.items() for word in (f"--{key}", str(value))])

    def prepare(self, name: str) -> None:
        """Writes a network and clips for it, if they are not there, and encodes these."""
        of = self.network(name)
        if name in self.ready:
            return
        if not (self.model(of) / "model_index.json").exists():
            tiny.build(of.tiny, self.model(of), of.width, of.layers)
        if not self.clips(of).exists():
            write_clips(self.clips(of), *map(int, of.bucket.split("x")))
        kind, config = self.config(name, {"stage": "precompute"})
        fresh()
        kind(config).run()
        self.ready.add(name)


def write_clips(folder: Path, frames: int, height: int, width: int) -> None:
    """Two smooth random clips with captions."""
    from data.video import write_video

    folder.mkdir(parents=True)
    for i, caption in enumerate(("a dog in the forest", "a cat and a bunny dance on a video of good quality")):
        small = torch.rand(1, 3, 3, 4, 4, generator=torch.Generator().manual_seed(i))
        big = torch.nn.functional.interpolate(small, (frames, height, width), mode="trilinear")[0]
        write_video(folder / f"{i}.mp4", (big.permute(1, 2, 3, 0) * 255).byte().numpy(), 24)
        (folder / f"{i}.txt").write_text(caption)


def fresh() -> None:
    """The process as a new one: no Accelerator, no memory of the last case, nothing that a case had switched on."""
    from accelerate.state import AcceleratorState, GradientState

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a trainer's own handlers would keep it, and all that it holds
    signal.signal(signal.SIGINT, signal.default_int_handler)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(case: Case, place: Place, compared: bool) -> dict[str, Any]:
    """Runs a case in this process; what it measured. `compared`: with the digest of what it trained."""
    shutil.rmtree(place.out / "run", ignore_errors=True)
    own = {} if case.waits else {"train.log_every": place.steps // 2}
    kind, config = place.config(case.network, own | case.options)
    fresh()
    held = torch.cuda.memory_allocated() >> 20 if torch.cuda.is_available() else 0
    trainer = stopping(kind, place.steps, case.waits)(config)
    try:
        with contextlib.suppress(Enough):
            trainer.run()
    finally:
        if not case.waits:
            torch.cuda.set_sync_debug_mode("default")
        for parameter in getattr(
            trainer, "parameters", ()
        ):  # hooks that hold the optimizer hold all it holds, for good
            (parameter._post_accumulate_grad_hooks or {}).clear()
    if case.launch and (world := os.environ.get("WORLD_SIZE")) != "1":
        raise Failed(f"not launched as it should be: WORLD_SIZE is {world}")
    if len(trainer.at_first) and torch.equal(trainer.at_first, some_of(trainer.parameters)):
        raise Failed("nothing that trains has changed")  # ZeRO-3 shows no number of its shards
    rows = [json.loads(line) for line in (place.out / "run" / "metrics.jsonl").read_text().splitlines()]
    later = rows[max(1, len(rows) // 4) :]
    return {
        "seconds": statistics.median(row["seconds_per_step"] for row in later),
        "peak": rows[-1]["peak_memory_mb"],
        "held_before": held,
        "estimate": estimate.Estimate(trainer).parts(trainer.config).total >> 20,
        "first": rows[0]["loss"],
        "last": rows[-1]["loss"],
        "backend": str(trainer.accelerator.distributed_type.value),
        "digest": digest(trainer.parameters) if compared else "",
    }


def run(case: Case, place: Place, compared: bool, seconds: float | None = None) -> dict[str, Any]:
    """What a case measured, or how it failed; what is printed goes to its log. `seconds`: for one to be launched."""
    with log_of(place, case).open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            place.prepare(case.network)
            return measure(case, place, compared) if seconds is None else launch(case, place, seconds)
        except Exception as error:  # noqa: BLE001 (in whichever way a case fails, it is told and the others run)
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}


def log_of(place: Place, case: Case) -> Path:
    return place.out / "logs" / f"{case.name.replace(', ', '-').replace(' ', '_')}.txt"


def launch(case: Case, place: Place, seconds: float) -> dict[str, Any]:
    """The same in a process of its own, by `accelerate launch`, in at most so many seconds."""
    file, log = place.out / "launched.json", log_of(place, case)
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--main_process_port", "0"]
    command += ["--config_file", f"configs/accelerate/{case.launch}.yaml", str(Path(__file__).resolve())]
    command += ["--out", str(place.out), "--steps", str(place.steps), "--case", case.name, *["--cpu"] * place.cpu]
    with log.open("a") as told:
        process = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=told, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"failed": f"not done in {seconds:.0f} s"}
    if not file.exists():
        return {"failed": f"accelerate launch ended with {process.returncode} and no result: {log}"}
    return json.loads(file.read_text())


# -- all of them ------------------------------------------------------------------------------------------------------


def outcome(case: Case, result: dict[str, Any], digests: dict[str, str]) -> str:
    """ "ok", or why it is not."""
    if "failed" in result:
        return "failed: " + " ".join(str(result["failed"]).split())
    if not all(math.isfinite(result[key]) for key in ("first", "last")):
        return "failed: its loss is not finite"
    if case.same_as and case.same_as not in digests:
        return f"failed: {case.same_as} gave nothing to compare with"
    if case.same_as and digests[case.same_as] != result["digest"]:
        return f"failed: other weights than {case.same_as}"
    return "ok"


def broken() -> str:
    """Why CUDA does nothing any more in this process, "" if it does: such an error would fail all that follows."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def write(place: Place, head: str, rows: list[dict], left_out: dict[str, str]) -> None:
    lines = [
        head,
        "",
        "| case | s/step | peak MiB | estimated | first loss | last loss | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [""] * 5
        if "seconds" in row:
            numbers = [f"{row['seconds']:.3f}", *(f"{row[key]:,}" for key in ("peak", "estimate"))]
            numbers += [f"{row[key]:.4f}" for key in ("first", "last")]
        result = row["result"].replace("|", "/")
        lines.append(f"| {' | '.join([row['case'], *numbers, result[:200] + '...' * (len(result) > 200)])} |")
    if left_out:
        lines += ["", "Left out: " + "; ".join(f"{name} ({why})" for name, why in left_out.items()) + "."]
    (place.out / "table.md").write_text("\n".join(lines) + "\n")
    (place.out / "results.json").write_text(json.dumps({"of": head, "cases": rows, "left_out": left_out}, indent=1))


def heading(place: Place) -> str:
    of = place.network("ltx")
    device = "CPU (peak memory is the process's so far)"
    if not place.cpu:
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return (
        f"{device}, torch {torch.__version__}: {of.tiny} {of.width} wide with {of.layers} blocks at {of.bucket} unless "
        f"a case names another network, {place.steps} steps each"
    )


def chosen(every: list[Case], patterns: list[str]) -> list[Case]:
    """Those whose names match, and those that they are compared with. Raises SystemExit for a pattern without any."""
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in every], pattern):
            raise SystemExit(f"error: no case is named {pattern}; --list tells their names")
    named = [case for case in every if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    names = {case.name for case in named} | {case.same_as for case in named}
    return [case for case in every if case.name in names]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6, help="start no further case after so many (6)")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, at tiny size, nothing compiled")
    parser.add_argument("--cases", nargs="+", default=["*"], help="names or patterns, such as 'quantize *'")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each case (8)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_smoke", help="folder (runs/gpu_smoke)")
    parser.add_argument("--list", action="store_true", help="tell the names of the cases and stop")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # of a launched process: this one alone
    given = parser.parse_args(argv)
    place = Place(given.out.resolve(), given.cpu, max(4, given.steps))
    every = cases(place.network("ltx").layers)
    if given.list:
        print(*(case.name for case in every), sep="\n")
        return 0
    if given.cpu:
        os.environ.update(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
        torch.compiler.set_stance("force_eager")
    elif not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA device here; --cpu tries the script at tiny size")
    (place.out / "logs").mkdir(parents=True, exist_ok=True)
    from trainers.launch import quiet

    quiet()
    if given.case:
        (case,) = (case for case in every if case.name == given.case)
        place.ready.add(case.network)  # by the process that launched this one
        (place.out / "launched.json").write_text(json.dumps(run(case, place, False)))
        return 0
    return run_all(chosen(every, given.cases), place, 60 * given.minutes)


def run_all(todo: list[Case], place: Place, seconds: float) -> int:
    """Runs the cases and writes the table after each; the exit code."""
    end, head = time.monotonic() + seconds, heading(place)
    rows, left_out, digests, fault = [], {}, {}, ""
    references = {case.same_as for case in todo}
    for case in todo:
        left, why = end - time.monotonic(), lacking(case)
        if left < 0 or fault or why:
            left_out[case.name] = why or fault or "no time left"
            write(place, head, rows, left_out)
            continue
        log_of(place, case).unlink(missing_ok=True)
        compared = bool(case.same_as) or case.name in references
        result = run(case, place, compared, max(left, LAUNCHED_SECONDS) if case.launch else None)
        row = {"case": case.name} | result | {"result": outcome(case, result, digests), "options": case.options}
        if compared and row["result"] == "ok":
            digests[case.name] = result["digest"]
        print(f"{case.name}: {row['result']}", flush=True)
        rows.append(row)
        if row["result"] != "ok" and (error := broken()):
            fault = f"CUDA broke in {case.name}: {error}"
        write(place, head, rows, left_out)
    failed = sum(row["result"] != "ok" for row in rows)
    print(f"{len(rows)} cases, {failed} failed, {len(left_out)} left out: {place.out / 'table.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
