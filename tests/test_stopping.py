"""A run that is told to stop, or runs out of time, loses nothing: the same command goes on and ends equal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runs
from trainers import checkpoints
from trainers.ltx import LTXTrainer

pytestmark = pytest.mark.usefixtures("libraries")

ROOT = Path(__file__).parents[1]
STEPS = 150
OPTIONS = {
    "train__steps": STEPS,
    "train__gradient_accumulation_steps": 2,
    "data__num_workers": 2,
    "checkpoint__resume": "latest",
    "checkpoint__keep": 1,
}


@pytest.fixture(scope="module")
def unbroken(tiny_ltx, clips, cache, tmp_path_factory):
    """The run that nobody stops."""
    root = tmp_path_factory.mktemp("unbroken") / "run"
    runs.run(tiny_ltx, clips, root, **OPTIONS, data__cache_dir=cache)
    return root


def script(*arguments) -> subprocess.Popen:
    """train_ltx.py as a user runs it, leader of its own process group."""
    command = [sys.executable, str(ROOT / "train_ltx.py"), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_ends_equal(tiny_ltx, clips, cache, unbroken, tmp_path, number, code):
    """As schedulers and terminals send it: to the whole process group, so to the loader's workers as well."""
    root = tmp_path / "run"
    command = runs.options(tiny_ltx, clips, root, **OPTIONS, data__cache_dir=cache)
    run = script(*command)
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline and run.poll() is None:
            if (root / "metrics.jsonl").exists() and len(runs.metrics(root)) >= 4:
                break
            time.sleep(0.005)
        os.killpg(run.pid, number)
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == code, output
    (saved,) = checkpoints.numbered(root)
    step = int(saved.name.removeprefix("checkpoint-"))
    assert 4 <= step < STEPS and checkpoints.problem(saved) is None
    assert "Traceback" not in output
    assert output.count(f"{number.name}: saving at the next step boundary") == 1  # workers leave it to the trainer
    assert f"stopped at step {step} of {STEPS} by {number.name}; run the same command" in output
    assert not (root / "pytorch_lora_weights.safetensors").exists()  # not the result of the whole run
    assert len(runs.metrics(root)) == step

    again = script(*command)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert f"resuming from {saved}" in output
    runs.assert_same_outcome(unbroken, root)


def signalled(model, clips, root, changes, rank: int, at: int) -> dict:
    """A run in which `rank` gets SIGTERM at step `at`, in the middle of its accumulation."""

    class Signalled(LTXTrainer):
        def loss(self, batch):
            if self.accelerator.process_index == rank and self.step == at and self.slots[0] < self.world:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(batch)

    Signalled.__name__ = LTXTrainer.__name__
    made = runs.trainer(Signalled, model, clips, root, **changes)
    code = 0
    try:
        made.run()
    except SystemExit as stop:
        code = stop.code
    return {"world": made.accelerator.num_processes, "code": code, "step": made.step}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tiny_ltx, clips, cache, tmp_path, rank):
    changes = {"train__steps": 9, "train__gradient_accumulation_steps": 2, "data__cache_dir": cache}
    ranks = runs.forked(signalled, tiny_ltx, clips, tmp_path / "run", changes, rank, 3)
    assert ranks == [{"world": 2, "code": 143, "step": 4}] * 2  # the step that it came in was finished
    assert [folder.name for folder in checkpoints.numbered(tmp_path / "run")] == ["checkpoint-4"]
    runs.forked(signalled, tiny_ltx, clips, tmp_path / "whole", changes, rank, -1)
    resumed = changes | {"checkpoint__resume": "latest"}
    ranks = runs.forked(signalled, tiny_ltx, clips, tmp_path / "run", resumed, rank, -1)
    assert ranks == [{"world": 2, "code": 0, "step": 9}] * 2
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


def test_a_signal_in_the_last_step_lets_the_run_end(tiny_ltx, clips, cache, tmp_path):
    root = tmp_path / "run"
    found = signalled(tiny_ltx, clips, root, {"train__steps": 3, "data__cache_dir": cache}, 0, 2)
    assert found == {"world": 1, "code": 0, "step": 3}
    assert (root / "pytorch_lora_weights.safetensors").exists()


def test_max_hours_saves_and_stops_with_exit_code_0(tiny_ltx, clips, cache, tmp_path, capsys):
    root = tmp_path / "run"
    options = {"train__steps": 5, "checkpoint__resume": "latest", "data__cache_dir": cache}
    for step in (1, 2):  # each of these runs takes one step
        with pytest.raises(SystemExit) as stop:
            runs.run(tiny_ltx, clips, root, **options, train__max_hours=1e-9)
        assert stop.value.code == 0
        assert checkpoints.find("latest", root)[0] == root / f"checkpoint-{step}"
        assert f"stopped at step {step} of 5 by train.max_hours" in capsys.readouterr().out
    runs.run(tiny_ltx, clips, root, **options)
    runs.run(tiny_ltx, clips, tmp_path / "whole", **options)
    runs.assert_same_outcome(tmp_path / "whole", root)
