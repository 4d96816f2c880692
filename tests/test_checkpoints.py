"""Which checkpoint a run goes on from and which it refuses, what is kept of old ones, and what a full disk leaves."""

import errno
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import runs
from models import export
from models.tiny import build
from trainers import checkpoints
from trainers.checkpoints import CheckpointError
from trainers.ltx import LTXTrainer
from trainers.publish import LORA

pytestmark = pytest.mark.usefixtures("libraries")

OPTIONS = {
    "train__steps": 8,
    "train__gradient_accumulation_steps": 2,
    "checkpoint__every": 2,
    "checkpoint__keep": 9,
}


# -- choosing a checkpoint ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(tiny_ltx, clips, cache, tmp_path_factory):
    """A run of 8 steps with checkpoints at 2, 4, 6 and 8. Copied, never changed."""
    root = tmp_path_factory.mktemp("four") / "run"
    runs.run(tiny_ltx, clips, root, data__cache_dir=cache, **OPTIONS)
    return root


@pytest.fixture
def go_on(start, four, tmp_path):
    """go_on(options ...): the run of `four`, copied to tmp_path / "run", resumed there."""
    shutil.copytree(four, tmp_path / "run")

    def run(**changes):
        return start("run", **OPTIONS | {"checkpoint__resume": "latest"} | changes)

    return run


def half_a_file(path: Path) -> None:
    """safetensors whose header promises 1024 bytes, of which 100 are there."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)


def test_latest_passes_over_what_is_not_whole_and_says_why(go_on, four, tmp_path, capsys):
    root = tmp_path / "run"
    half_a_file(root / "checkpoint-4" / "state" / "trainable.safetensors")
    (root / "checkpoint-6" / "state" / "optimizer.bin").write_bytes(b"")
    (root / "checkpoint-8" / "state" / "trainer_state.json").write_text('{"step": 8, "fi')
    (root / "checkpoint-30").mkdir()
    (root / "checkpoint-40" / "state").mkdir(parents=True)
    (root / ".checkpoint-50.partial").mkdir()
    (root / "checkpoint-old").mkdir()
    size = (four / "checkpoint-6" / "state" / "optimizer.bin").stat().st_size
    halved = shutil.copytree(root, tmp_path / "halved")
    made = go_on()
    out = capsys.readouterr().out
    assert f"resuming from {root / 'checkpoint-2'}" in out
    assert f"checkpoint-6: incomplete: state/optimizer.bin has 0 of {size} bytes" in out
    half, whole = ((r / "checkpoint-4" / "state" / "trainable.safetensors").stat().st_size for r in (halved, four))
    assert f"checkpoint-4: incomplete: state/trainable.safetensors has {half} of {whole} bytes" in out
    assert "checkpoint-8: state/trainer_state.json cannot be read" in out
    for name in ("checkpoint-30", "checkpoint-40"):
        assert f"passed over {root / name}: incomplete: it has no state/trainer_state.json" in out
    assert "checkpoint-50" not in out and "checkpoint-old" not in out
    assert made.step == 8
    runs.assert_same_outcome(four, root)


@pytest.mark.parametrize("name", ["optimizer.bin", "trainable.safetensors"])
def test_damage_that_keeps_the_size_is_named(name, go_on, tmp_path):
    file = tmp_path / "run" / "checkpoint-8" / "state" / name
    file.write_bytes(b"\0" * 200 + file.read_bytes()[200:])
    with pytest.raises(
        CheckpointError, match=r"checkpoint-8: its state is damaged \(\w+\); name an earlier checkpoint"
    ):
        go_on(train__steps=10)


def test_a_missing_file_is_noticed_too(go_on, tmp_path, capsys):
    (tmp_path / "run" / "checkpoint-8" / "state" / "random_states_0.pkl").unlink()
    go_on()
    assert "checkpoint-8: state/random_states_0.pkl is missing" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["missing", "empty", "half"])
def test_a_named_folder_that_cannot_be_used_is_an_error(go_on, tmp_path, fault):
    root, folder = tmp_path / "run", tmp_path / "run" / "checkpoint-8"
    if fault == "missing":
        folder, why = root / "checkpoint-9", "there is no such folder"
    elif fault == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
        why = "incomplete: it has no state/trainer_state.json"
    else:
        half_a_file(folder / "state" / "trainable.safetensors")
        why = "incomplete: state/trainable.safetensors has"
    with pytest.raises(CheckpointError) as caught:
        go_on(checkpoint__resume=folder)
    assert str(folder) in str(caught.value) and why in str(caught.value)
    assert "checkpoint-6, checkpoint-4, checkpoint-2" in str(caught.value)


def test_latest_with_nothing_there_starts_fresh_and_says_so(start, tmp_path, capsys):
    made = start("run", train__steps=2, checkpoint__resume="latest")
    assert made.step == 2
    assert f"{tmp_path / 'run'} holds no whole checkpoint: starting fresh" in capsys.readouterr().out


@pytest.mark.parametrize("keep_exports", [None, 1])
def test_broken_folders_do_not_count_as_kept(go_on, tmp_path, keep_exports):
    """keep: 1 counts whole checkpoints: otherwise the one just saved would go, and an empty folder would stay."""
    root = tmp_path / "run"
    (root / "checkpoint-99").mkdir()
    half_a_file(root / "checkpoint-8" / "state" / "trainable.safetensors")
    with pytest.raises(runs.Interrupted):
        exports = {} if keep_exports is None else {"checkpoint__keep_exports": keep_exports}
        go_on(kind=runs.interrupted(LTXTrainer, 9), train__steps=12, checkpoint__every=3, checkpoint__keep=1, **exports)
    assert checkpoints.find("latest", root)[0] == root / "checkpoint-9"
    assert [folder for folder in checkpoints.numbered(root) if (folder / "state").exists()] == [root / "checkpoint-9"]
    if keep_exports is None:
        assert all((root / f"checkpoint-{step}" / LORA).exists() for step in (2, 4, 6, 8, 9))
    else:
        assert [folder.name for folder in checkpoints.numbered(root)] == ["checkpoint-9"]


def test_going_back_does_not_mix_with_what_came_after(go_on, start, four, tmp_path):
    """From checkpoint-4 while 6 and 8 are there: `latest` would later pick up their other future."""
    root = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"also holds checkpoint-8, checkpoint-6, which .* or move them away"):
        go_on(checkpoint__resume=root / "checkpoint-4")
    shutil.rmtree(root / "checkpoint-6")
    shutil.rmtree(root / "checkpoint-8")
    made = go_on(checkpoint__resume=root / "checkpoint-4")
    assert made.step == 8
    runs.assert_same_outcome(four, root)


def test_another_run_s_folder_is_not_mixed_into_a_used_output_dir(start, four, tmp_path):
    start("run", train__steps=1)
    before = runs.metrics(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run also holds checkpoint-1, metrics.jsonl"):
        start("run", checkpoint__resume=four / "checkpoint-4")
    assert runs.metrics(tmp_path / "run") == before


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return build("ltx", tmp_path_factory.mktemp("other") / "ltx", width=40)


MISFITS = {
    "rank": ({"lora__rank": 8}, "lora.rank: 4 in the checkpoint, 8 in this run"),
    "alpha": ({"lora__alpha": 2}, "lora.alpha: 4.0 in the checkpoint, 2.0 in this run"),
    "type": ({"lora__type": "dora"}, "lora.type: lora in the checkpoint, dora in this run"),
    "method": ({"method": "full"}, "method: lora in the checkpoint, full in this run"),
    "optimizer": ({"optimizer__name": "adamw8bit"}, "optimizer.name: adamw in the checkpoint, adamw8bit in this run"),
    "precision": (
        {"precision__trainable": "bf16", "optimizer__name": "adamw8bit-ao"},
        "precision.trainable: fp32 in the checkpoint, bf16 in this run",
    ),
    "targets": ({"lora__targets": ["to_q"]}, "trains other parameters than this run, e.g. transformer_blocks.0"),
    "also": (
        {"lora__also_train": ["proj_out"]},
        "trains other parameters than this run, e.g. proj_out.bias (2 differ)",
    ),
}


@pytest.mark.parametrize("changes, text", MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("resume", ["latest", "named"])
def test_what_does_not_fit_is_named_with_both_values(go_on, four, tmp_path, changes, text, resume):
    resume = "latest" if resume == "latest" else tmp_path / "run" / "checkpoint-8"
    with pytest.raises(CheckpointError) as caught:
        go_on(**changes, train__steps=12, checkpoint__resume=resume)
    assert text in str(caught.value) and "checkpoint-8" in str(caught.value)
    assert runs.contents(tmp_path / "run") == runs.contents(four)  # nothing of the earlier run was touched


def test_another_model_is_named_with_both_fingerprints(go_on, other_model, tmp_path):
    saved = checkpoints.read_state(tmp_path / "run" / "checkpoint-8")["facts"]["transformer"]
    with pytest.raises(CheckpointError, match=rf"transformer: {saved} in the checkpoint, [0-9a-f]{{64}} in this run"):
        go_on(model=other_model)


def test_every_misfit_is_told_at_once(go_on):
    with pytest.raises(CheckpointError) as caught:
        go_on(lora__rank=8, lora__alpha=2, optimizer__name="sgd")
    for text in ("lora.rank: 4", "lora.alpha: 4.0", "optimizer.name: adamw in the checkpoint, sgd", "lora.init_from"):
        assert text in str(caught.value)


def test_changed_data_and_seed_are_said(go_on, tmp_path, clips, capsys):
    fewer = tmp_path / "clips"
    shutil.copytree(clips, fewer)
    for path in fewer.glob("wide_4*"):
        path.unlink()
    go_on(data__train=fewer, train__seed=7, train__steps=9)
    out = capsys.readouterr().out
    assert "note: train.seed was 42 in checkpoint-8, now 7" in out
    assert "note: data was " in out and "note: steps was 8 in checkpoint-8, now 9" in out


def test_changed_options_hold_and_are_said(go_on, four, capsys):
    """The optimizer's state brings the old betas and decay along: the new ones must win."""
    go_on(train__steps=9)
    assert "note: steps was 8 in checkpoint-8, now 9\n" in (out := capsys.readouterr().out) and out.count("note: ") == 1
    changes = {"optimizer__betas": (0.5, 0.6), "optimizer__epsilon": 1e-3, "optimizer__weight_decay": 0.4}
    made = go_on(train__steps=10, **changes, optimizer__schedule="linear", noise__mean=0.5, first_frame_p=0.7)
    for group in made.optimizer.param_groups:
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-3, 0.4)
    out = capsys.readouterr().out
    for text in (
        "optimizer.betas was (0.9, 0.999) in checkpoint-9, now (0.5, 0.6)",
        "optimizer.epsilon was 1e-08 in checkpoint-9, now 0.001",
        "optimizer.weight_decay was 0.01 in checkpoint-9, now 0.4",
        "optimizer.schedule was cosine in checkpoint-9, now linear",
        "noise.mean was 0.0 in checkpoint-9, now 0.5",
        "first_frame_p was 0.1 in checkpoint-9, now 0.7",
    ):
        assert f"note: {text}\n" in out


# -- a used output_dir -------------------------------------------------------------------------------------------------


def test_a_fresh_run_into_a_used_output_dir_is_refused(go_on, four, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"run holds an earlier run .*checkpoint-8.*resume: latest.*overwrite: true"
    ):
        go_on(checkpoint__resume="null")
    assert runs.contents(tmp_path / "run") == runs.contents(four)


def test_overwrite_starts_anew(go_on, start, tmp_path):
    root = tmp_path / "run"
    go_on(checkpoint__resume="null", overwrite=True, train__steps=3, train__seed=1)
    start("fresh", **OPTIONS | {"train__steps": 3, "train__seed": 1})
    assert [folder.name for folder in checkpoints.numbered(root)] == ["checkpoint-3", "checkpoint-2"]
    runs.assert_same_outcome(tmp_path / "fresh", root)


@pytest.mark.parametrize(
    "keep, keep_exports, resumable, exported",
    [
        (2, None, [10, 8], [10, 8, 6, 4, 2]),
        (1, 3, [10], [10, 8, 6]),
        (3, 1, [10, 8, 6], [10, 8, 6]),
        (9, 2, [10, 8, 6, 4, 2], [10, 8, 6, 4, 2]),
    ],
)
def test_keep_prunes_state_and_keep_exports_prunes_the_rest(start, tmp_path, keep, keep_exports, resumable, exported):
    exports = {} if keep_exports is None else {"checkpoint__keep_exports": keep_exports}
    options = {"train__steps": 10, "checkpoint__every": 2, "checkpoint__keep": keep}
    start("run", **options, **exports)
    found = checkpoints.numbered(tmp_path / "run")
    assert [int(folder.name[11:]) for folder in found] == exported
    assert [int(folder.name[11:]) for folder in found if checkpoints.problem(folder) is None] == resumable
    for folder in found:
        kept = {path.name for path in folder.iterdir()}
        assert LORA in kept and ("state" in kept) == (int(folder.name[11:]) in resumable)


# -- a full disk -------------------------------------------------------------------------------------------------------

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# As the writers themselves say it: safetensors and torch give no errno.
FULL = {
    "trainable": (safetensors.torch, "save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    "optimizer": (torch, "save", NO_SPACE),
    "export": (export, "save_lora", NO_SPACE),
    "list of files": (checkpoints, "write_json", NO_SPACE),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(
    tiny_ltx, clips, cache, tmp_path, monkeypatch, what, capsys
):
    root = tmp_path / "run"
    options = {"train__steps": 6, "checkpoint__every": 2, "checkpoint__keep": 1, "data__cache_dir": cache}
    of, name, fault = FULL[what]
    write = getattr(of, name)

    def failing(*arguments, **keywords):
        target = next((a for a in map(str, arguments) if ".checkpoint-4.partial" in a), None)
        if target is None:
            return write(*arguments, **keywords)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if not Path(target).is_dir():
            Path(target).write_bytes(b"the first bytes")
        raise fault

    monkeypatch.setattr(of, name, failing)
    with pytest.raises(CheckpointError) as caught:
        runs.run(tiny_ltx, clips, root, **options)
    text = str(caught.value)
    assert f"{root / 'checkpoint-4'}: no space left on the disk (" in text
    taken = sum(path.stat().st_size for path in (root / "checkpoint-2").rglob("*") if path.is_file())
    assert f"the last checkpoint took {taken})" in text and "checkpoint.resume: latest" in text
    assert [path.name for path in root.iterdir() if "checkpoint" in path.name] == ["checkpoint-2"]
    assert checkpoints.problem(root / "checkpoint-2") is None

    monkeypatch.setattr(of, name, write)  # room again
    runs.run(tiny_ltx, clips, root, **options, checkpoint__resume="latest")
    runs.run(tiny_ltx, clips, tmp_path / "whole", **options)
    runs.assert_same_outcome(tmp_path / "whole", root)


def test_another_fault_of_writing_is_raised_as_it_is(tiny_ltx, clips, cache, tmp_path, monkeypatch):
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def refused(*arguments, **keywords):
        raise denied

    monkeypatch.setattr(export, "save_lora", refused)
    with pytest.raises(PermissionError):
        runs.run(tiny_ltx, clips, tmp_path / "run", train__steps=1, data__cache_dir=cache)
    assert not list((tmp_path / "run").glob("*checkpoint*"))


def test_what_killed_runs_left_half_written_is_cleared_away(tiny_ltx, clips, cache, tmp_path):
    root = tmp_path / "run"
    (root / ".checkpoint-7.partial" / "state").mkdir(parents=True)
    runs.run(tiny_ltx, clips, root, train__steps=1, data__cache_dir=cache)
    assert [path.name for path in root.glob("*checkpoint*")] + [p.name for p in root.glob(".*")] == ["checkpoint-1"]
    shutil.rmtree(root)
