"""benchmarks/gpu_smoke.py, as far as a CPU can run it: its table, its failures, its limits, and what it covers."""

import importlib
import json
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import runs
from trainers.config import MemoryOptions, OptimizerName, OptimizerOptions, PrecisionOptions, Quantized

ROOT = Path(__file__).parents[1]
HEAD = ["case", "s/step", "peak MiB", "estimated", "first loss", "last loss", "result"]


@pytest.fixture
def smoke(monkeypatch):
    """The script as a module; what it sets for its own process is undone."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "gpu_smoke", raising=False)
    yield importlib.import_module("gpu_smoke")
    torch.compiler.set_stance("default")
    runs.fresh_state()


def table(out: Path) -> list[list[str]]:
    """The cells of its rows, head first."""
    lines = [line for line in (out / "table.md").read_text().splitlines() if line.startswith("|")]
    assert set(lines.pop(1)) == {"|", "-"}
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def results(out: Path) -> dict[str, dict]:
    return {row["case"]: row for row in json.loads((out / "results.json").read_text())["cases"]}


@pytest.mark.slow
def test_cases_that_work_and_cases_that_fail(smoke, tmp_path, monkeypatch, capsys):
    """A failure, of whichever kind, is told in its row; the others run; the exit code says that there was one."""
    every = {case.name: case for case in smoke.cases(6)}
    kept = ["LoRA", "deterministic", "block_swap, same bits", "quantize int8wo", "full, cpu_offload", "optimizer came"]
    bad = [
        smoke.Case("wrong option", {"memory.attention": "none such"}),
        smoke.Case("other weights", {"train.seed": 1}, same_as="deterministic"),
        smoke.Case("no growth", {"optimizer.learning_rate": 1e-45}),
        smoke.Case("not finite", {"optimizer.learning_rate": 1e38, "optimizer.name": "sgd"}),
    ]
    todo = [*bad[:1], *(every[name] for name in kept), *bad[1:]]
    monkeypatch.setattr(smoke, "cases", lambda blocks: todo)
    assert smoke.main(["--cpu", "--out", str(tmp_path)]) == 1

    head, *rows = table(tmp_path)
    assert head == HEAD and [row[0] for row in rows] == [case.name for case in todo if case.name != "full, cpu_offload"]
    told = {row[0]: row for row in rows}
    good = [name for name in kept if name != "full, cpu_offload"]
    assert {name: told[name][-1] for name in good} == dict.fromkeys(good, "ok")
    for name in good:
        seconds, peak, _, first, last = (float(cell.replace(",", "")) for cell in told[name][1:-1])
        assert 0 < seconds < 5 and peak > 100 and 0.5 < first < 2 and 0.5 < last < 2
    assert told["wrong option"][1:-1] == [""] * 5
    assert told["wrong option"][-1].startswith("failed: ModelError: memory.attention none such: diffusers has no such")
    assert told["other weights"][-1] == "failed: other weights than deterministic"
    assert told["no growth"][-1] == "failed: Failed: nothing that trains has changed"
    assert told["not finite"][-1].startswith("failed: NonFiniteStep: ")
    assert "Left out: full, cpu_offload (no CUDA)." in (tmp_path / "table.md").read_text()

    measured, logged = results(tmp_path), runs.metrics(tmp_path / "run")
    assert measured["block_swap, same bits"]["digest"] == measured["deterministic"]["digest"] != ""
    assert measured["block_swap, same bits"]["options"]["memory.block_swap"] == 6
    assert all(row["backend"] == "NO" for row in measured.values() if "backend" in row)
    assert len(logged) < 8 and not [*(tmp_path / "run").glob("checkpoint-*")]  # nothing is saved
    assert "Traceback" in (tmp_path / "logs" / "wrong_option.txt").read_text()
    assert capsys.readouterr().out.splitlines()[-1].startswith("9 cases, 4 failed, 1 left out: ")


def test_no_time_is_left(smoke, tmp_path):
    assert smoke.main(["--cpu", "--out", str(tmp_path), "--minutes", "0", "--cases", "LoRA", "storage fp8"]) == 0
    assert table(tmp_path) == [HEAD]
    assert "Left out: LoRA (no time left); storage fp8 (no time left)." in (tmp_path / "table.md").read_text()


def test_what_waits_for_the_device_is_looked_for_between_log_lines(smoke, tmp_path, monkeypatch):
    """In the second half of the steps, after that of their first half is logged; and only if torch notices waits."""
    at, modes = [], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(smoke.Failed, match="proves nothing"):  # a CPU does not wait
        smoke.forbid_waiting(torch.device("cpu"))
    assert modes == ["error"]
    monkeypatch.setattr(smoke, "forbid_waiting", lambda device: at.append(len(runs.metrics(tmp_path / "run"))))
    monkeypatch.setattr(smoke, "cases", lambda blocks: [smoke.Case("no waiting", waits=False)])
    assert smoke.main(["--cpu", "--out", str(tmp_path), "--steps", "6"]) == 0
    assert at == [1] and modes == ["error", "default"]
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == [3, 6]


def test_every_option_has_a_case(smoke, tmp_path):
    """And each case is named once, parses under the rules of the options, and leads to what it names."""
    place = smoke.Place(tmp_path, False, 8)
    every = smoke.cases(place.network("ltx").layers)
    for case in every:
        clips = place.clips(place.network(case.network))
        clips.mkdir(parents=True, exist_ok=True)
        place.config(case.network, case.options)
        assert not case.launch or (ROOT / "configs" / "accelerate" / f"{case.launch}.yaml").is_file()
    names = [case.name for case in every]
    assert len(set(names)) == len(names) and {case.same_as for case in every} <= {*names, ""}
    values = {(key, value) for case in every for key, value in case.options.items()}
    assert {value for key, value in values if key == "precision.quantize"} == {*get_args(Quantized)} - {"none"}
    assert {value for key, value in values if key == "optimizer.name"} == {*get_args(OptimizerName)}
    given = {key for key, _ in values}
    # With a case of their own elsewhere, in others' words, or without effect on a step.
    apart = {"memory.checkpoint_every", "memory.compile_backend", "memory.vae_tiling", "memory.context_parallel"}
    for section, kind in (("memory", MemoryOptions), ("precision", PrecisionOptions)):
        assert {f"{section}.{name}" for name in vars(kind())} - apart <= given
    assert {
        f"optimizer.{name}" for name in vars(OptimizerOptions()) if name in ("cpu_offload", "fused_backward")
    } <= given
    made = {smoke.ON_CUDA[case.network].trainer.rpartition(":")[2] for case in every}
    assert made == {kind.__name__ for kind in runs.trainers_by_name().values()}


def test_cases_by_name(smoke, capsys):
    every = smoke.cases(6)
    assert [case.name for case in smoke.chosen(every, ["block_swap, *"])] == ["deterministic", "block_swap, same bits"]
    with pytest.raises(SystemExit, match="no case is named blok"):
        smoke.chosen(every, ["blok*"])
    assert smoke.main(["--list"]) == 0 and capsys.readouterr().out.splitlines() == [case.name for case in every]
    with pytest.raises(SystemExit, match="no CUDA device here; --cpu"):
        smoke.main([])


@pytest.mark.slow
def test_a_launched_case(smoke, tmp_path):
    assert smoke.main(["--cpu", "--out", str(tmp_path), "--cases", "launched ddp"]) == 0
    row = results(tmp_path)["launched ddp"]
    assert row["backend"] == "MULTI_CPU" and 0.5 < row["first"] < 2
