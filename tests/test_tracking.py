"""Trackers: metrics.jsonl continues exactly, wandb and TensorBoard work offline, none of them stops or blocks a run."""

import importlib.util
import io
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb
from accelerate import Accelerator
from PIL import Image

from data.video import write_video
from trainers import tracking
from trainers.tracking import Tracker, TrackerError, check, contact_sheet, flatten, progress_line


@dataclass
class Part:
    learning_rate: float = 1e-4
    betas: tuple = (0.9, 0.999)


@dataclass
class Options:
    output_dir: str
    report_to: list = field(default_factory=list)
    project: str = "unit"
    run_name: str | None = None
    optimizer: Part = field(default_factory=Part)


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    """An environment in which wandb finds neither key nor terminal, and writes below tmp_path."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "RANK", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setattr(sys, "stdin", io.StringIO("never read"))
    wandb.teardown()
    yield tmp_path
    wandb.teardown()
    assert sys.stdin.tell() == 0, "somebody read from stdin"


def accelerator(folder: Path, *names: str) -> Accelerator:
    return Accelerator(log_with=list(names) or None, project_dir=str(folder))


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def clip(folder: Path, frames: int = 9) -> Path:
    pixels = (
        torch.arange(frames, dtype=torch.uint8).mul(20).view(frames, 1, 1, 1).expand(frames, 32, 48, 3).contiguous()
    )
    write_video(folder / "000-dog-1.mp4", pixels, 8.0)
    return folder / "000-dog-1.mp4"


def test_flatten_gives_plain_values_without_secrets():
    options = Options("out", ["wandb"])
    assert flatten(options) == {
        "output_dir": "out",
        "report_to": '["wandb"]',
        "project": "unit",
        "run_name": "null",
        "optimizer.learning_rate": 1e-4,
        "optimizer.betas": "[0.9, 0.999]",
    }
    secret = {"hub": {"token": "abc"}, "id": "hf_" + "a" * 30, "url": "https://me:pw@host/x", "seed": 3, "on": True}
    assert flatten(secret) == {"seed": 3, "on": True}


@pytest.mark.parametrize(
    ("seconds", "tail"),
    [
        (1.3, "1.3 s/step  eta 41 min"),
        (0.012, "0.012 s/step  eta 23 s"),
        (30.0, "30.0 s/step  eta 15 h 40 min"),
        (100.25, "100.2 s/step  eta 52 h 21 min"),
    ],
)
def test_progress_line(seconds, tail):
    values = {"loss": 0.12342, "lr": 1e-4, "grad_norm": 0.516, "seconds_per_step": seconds}
    assert progress_line(120, 2000, values) == f"step 120/2000  loss 0.1234  lr 1.0e-04  grad_norm 0.52  {tail}"


def test_metrics_continue_exactly_after_resume(tmp_path, capsys):
    config = Options(str(tmp_path))
    first = Tracker(accelerator(tmp_path), config, steps=40)
    for step in (10, 20, 30):
        first.log(step, {"loss": step / 100, "lr": 1e-4})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "loss"')  # killed while writing
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()[:2]

    second = Tracker(accelerator(tmp_path), config, steps=40, step=20)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == kept
    second.log(30, {"loss": 0.3})
    second.log(30, {"samples_failed": 1})
    assert [(r["step"], r.get("loss")) for r in rows(tmp_path)] == [(10, 0.1), (20, 0.2), (30, 0.3), (30, None)]
    assert not list(tmp_path.glob("*.part"))
    assert "step 30/40  loss 0.3000" in capsys.readouterr().out

    Tracker(accelerator(tmp_path), config, steps=40)  # a fresh run
    assert rows(tmp_path) == []


def test_metrics_stay_json_and_only_the_main_process_writes(tmp_path):
    tracker = Tracker(accelerator(tmp_path), Options(str(tmp_path)), steps=2)
    tracker.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None}]

    other = Tracker(SimpleNamespace(is_main_process=False), Options(str(tmp_path / "other"), ["wandb"]), steps=2)
    other.log(1, {"loss": 1.0})
    other.log_samples(1, [], [])
    other.finish()
    assert not (tmp_path / "other").exists()


def test_check_names_what_is_missing(monkeypatch, tmp_path, no_key):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(TrackerError, match="tensorboard is not installed"):
        check(["wandb", "tensorboard"], tmp_path)
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(TrackerError, match=r"ofline does not exist.*offline"):
        check(["wandb"], tmp_path)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(TrackerError, match="no API key was found: run `wandb login`"):
        check(["wandb"], tmp_path)
    check([], tmp_path)


def test_check_goes_offline_without_a_key(no_key, capsys, monkeypatch):
    check(["wandb"], no_key)
    assert tracking.os.environ["WANDB_MODE"] == "offline"
    notice = capsys.readouterr().out
    assert "no API key was found" in notice
    assert "wandb sync" in notice
    check(["wandb"], no_key)  # a chosen mode is respected in silence
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "too short")
    check(["wandb"], no_key)
    assert tracking.os.environ["WANDB_MODE"] == "offline"
    out = capsys.readouterr().out
    assert "unusable" in out
    assert "too short" not in out


def test_wandb_offline_keeps_run_samples_and_id(no_key):
    folder = no_key / "run"
    config = Options(str(folder), ["wandb"])
    check(config.report_to, folder)
    tracker = Tracker(accelerator(folder, "wandb"), config, steps=20)
    run = tracker.accelerator.get_tracker("wandb", unwrap=True)
    assert run.offline
    assert run.config["optimizer.learning_rate"] == 1e-4
    tracker.log(10, {"loss": 0.5})
    Image.new("RGB", (48, 32)).save(folder / "001-cat-1.png")
    tracker.log_samples(10, [clip(folder), folder / "001-cat-1.png"], ["a dog", "a cat"])
    tracker.log(20, {"loss": 0.25})  # wandb takes a step's row when the next one begins
    assert run.summary["loss"] == 0.5
    assert run.summary["samples/000-dog-1"]["caption"] == "a dog"
    tracker.finish()

    known = (folder / "wandb_id.txt").read_text().strip()
    [recorded] = (no_key / "wandb_dir" / "wandb").glob("offline-run-*")
    assert recorded.name.endswith(known)
    assert (recorded / f"run-{known}.wandb").stat().st_size > 0
    assert {p.suffix for p in (recorded / "files" / "media").rglob("*.*")} == {".mp4", ".png"}

    for step, same in ((10, True), (0, False)):  # resume continues the run, a fresh start is another one
        again = Tracker(accelerator(folder, "wandb"), config, steps=20, step=step)
        assert (again.accelerator.get_tracker("wandb", unwrap=True).id == known) == same
        again.finish()


@pytest.mark.slow
def test_unreachable_server_ends_offline_and_not_in_a_hang(no_key, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "INIT_TIMEOUT", 2.0)
    begun = time.monotonic()
    config = Options(str(no_key / "run"), ["tensorboard", "wandb"])
    check(config.report_to, no_key)
    tracker = Tracker(accelerator(no_key / "run", "tensorboard", "wandb"), config, steps=2)
    tracker.log(1, {"loss": 1.0})
    assert tracker.accelerator.get_tracker("wandb", unwrap=True).offline
    assert [t.name for t in tracker.accelerator.trackers] == ["tensorboard", "wandb"]
    tracker.finish()
    assert time.monotonic() - begun < 90
    assert "could not start online" in capsys.readouterr().out
    assert list((no_key / "wandb_dir" / "wandb").glob("offline-run-*"))


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "unit"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_numbers_and_contact_sheets_read_back(tmp_path):
    config = Options(str(tmp_path), ["tensorboard"])
    tracker = Tracker(accelerator(tmp_path, "tensorboard"), config, steps=30)
    for step in (10, 20, 30):
        tracker.log(step, {"loss": 1 / step, "lr": 1e-4})
    tracker.log_samples(10, [clip(tmp_path)], ["a dog"])
    tracker.finish()
    again = Tracker(accelerator(tmp_path, "tensorboard"), config, steps=30, step=20)
    again.log(30, {"loss": 7.0})
    again.finish()

    found = events(tmp_path)
    assert [(e.step, pytest.approx(e.value)) for e in found.Scalars("loss")] == [(10, 0.1), (20, 0.05), (30, 7.0)]
    [image] = found.Images("samples/000-dog-1")
    assert (image.step, image.height, image.width) == (10, 32, 8 * 48)


def test_tensorboard_forgets_the_run_that_was_overwritten(tmp_path):
    for length in (30, 10):
        config = Options(str(tmp_path), ["tensorboard"])
        tracker = Tracker(accelerator(tmp_path, "tensorboard"), config, steps=length)
        for step in range(10, length + 1, 10):
            tracker.log(step, {"loss": float(length)})
        tracker.finish()
        time.sleep(1.1)  # its files are ordered by their second
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("loss")] == [(10, 10.0)]


def test_contact_sheet_is_in_order_and_spans_the_clip(tmp_path):
    sheet = contact_sheet(clip(tmp_path), frames=3)
    assert sheet.shape == (32, 3 * 48, 3)
    assert sheet[16, [24, 72, 120], 1] == pytest.approx([0, 80, 160], abs=6)


def test_accelerator_without_the_tracker_is_refused(tmp_path):
    with pytest.raises(TrackerError, match="tensorboard"):
        Tracker(accelerator(tmp_path), Options(str(tmp_path), ["tensorboard"]), steps=1)


@pytest.mark.parametrize("error", [OSError("no space"), wandb.Error("gone"), ValueError("bad media")])
def test_a_failing_tracker_warns_once_and_training_goes_on(tmp_path, capsys, error):
    tracker = Tracker(accelerator(tmp_path), Options(str(tmp_path)), steps=3)

    class Broken:
        name = "wandb"

        def log(self, values, step):
            raise error

        def finish(self):
            raise error

    tracker.accelerator.trackers = [Broken()]
    for step in (1, 2):
        tracker.log(step, {"loss": 0.1})
    tracker.log_samples(2, [tmp_path / "gone.mp4"], ["x"])
    tracker.finish()
    assert capsys.readouterr().out.count("wandb failed") == 1
    assert [r["step"] for r in rows(tmp_path)] == [1, 2]
