"""A resumed run is the unbroken one, bit for bit; what cannot be resumed says why; stops lose nothing."""

import functools
import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

import runs
from trainers import checkpoints
from trainers.checkpoints import CheckpointError
from trainers.ltx import LTXTrainer
from trainers.publish import LORA

pytestmark = pytest.mark.usefixtures("libraries")

# Two buckets (5 and 2 clips), global batches of 2: an epoch is 3.5 steps, so 5 is mid-epoch and 7 the end of one.
PLAIN = {
    "train__steps": 12,
    "train__gradient_accumulation_steps": 2,
    "data__num_workers": 2,
    "checkpoint__every": 5,
    "checkpoint__keep": 9,
}
RANDOM = PLAIN | {
    "lora__dropout": 0.3,
    "data__caption_dropout": 0.3,
    "first_frame_p": 0.5,
    "train__log_every": 3,
    "checkpoint__every": 7,
}


class Seen(runs.recorded(LTXTrainer)):
    """Also keeps which sample (by its latents) each row was, as (step, slot, name)."""

    def __init__(self, config):
        super().__init__(config)
        self.samples: list[tuple[int, int, str]] = []

    def drop_captions(self, batch):
        names = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:8] for row in batch["moments"]]
        self.samples += [(self.step, slot, name) for slot, name in zip(self.slots, names, strict=True)]
        return super().drop_captions(batch)


Seen.__name__ = LTXTrainer.__name__


@pytest.fixture
def start(start):
    """start(name of the run, options ...), of a `Seen` unless told otherwise."""
    return functools.partial(start, kind=Seen)


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny_ltx", "tiny_ltx_condition"])
@pytest.mark.parametrize(
    "changes, step, dies",
    [
        (PLAIN, 5, 6),  # mid-epoch; the row of step 6 was logged and comes again
        (PLAIN, 10, 11),
        (RANDOM, 7, 8),  # an epoch's end; 7 is no multiple of log_every, so the row of 9 covers steps 7, 8 and 9
        (RANDOM | {"train__batch_size": 2, "train__log_every": 4, "precision__weights": "bf16"}, 7, 10),
    ],
    ids=["mid-epoch", "later", "random", "batch-bf16"],
)
def test_resumed_run_is_the_unbroken_one(start, request, tmp_path, model, changes, step, dies):
    options = changes | {"model": request.getfixturevalue(model)}
    whole = start("whole", **options)
    broken = runs.interrupted(Seen, dies)
    first = []

    class Kept(broken):
        def __init__(self, config):
            super().__init__(config)
            first.append(self)

    Kept.__name__ = LTXTrainer.__name__
    with pytest.raises(runs.Interrupted):
        start("parts", kind=Kept, **options)
    assert checkpoints.numbered(tmp_path / "parts")[0].name == f"checkpoint-{step}"
    rest = start("parts", **options, checkpoint__resume="latest")
    assert rest.step == 12
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "parts")

    def before(rows: list) -> list:
        return [row for row in rows if row[0] < step]

    assert before(first[0].records) + rest.records == whole.records
    assert before(first[0].samples) + rest.samples == whole.samples  # nothing twice, nothing left out
    assert min(row[0] for row in rest.samples) == step
    assert len(whole.samples) == len(set(whole.samples)) == 24 * whole.config.train.batch_size
    assert len(whole.plan.buckets) == 2


def test_steps_are_optimizer_steps(start, tmp_path):
    """Accumulation 4, 10 steps, then 10 more: checkpoints, rows and the epoch count optimizer steps."""
    options = {"train__gradient_accumulation_steps": 4, "optimizer__schedule": "constant", "checkpoint__every": 5}
    whole = start("whole", **options, train__steps=20)
    start("parts", **options, train__steps=10)
    rest = start("parts", **options, train__steps=20, checkpoint__resume="latest")
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "parts")
    assert {step for step, *_ in rest.records} == set(range(10, 20)) and len(rest.records) == 40
    names = [f"checkpoint-{step}" for step in (20, 15, 10, 5)]
    assert [folder.name for folder in checkpoints.numbered(tmp_path / "parts")] == names
    rows = runs.metrics(tmp_path / "parts")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["samples_seen"] for row in rows] == [4 * step for step in range(1, 21)]
    assert rows[-1]["epoch"] == pytest.approx(80 / 7)
    counts = runs.optimizer_state(tmp_path / "parts" / "checkpoint-20")["state"].values()
    assert {int(count["step"]) for count in counts} == {20}
    assert whole.step == 20


def test_the_rate_goes_on_where_it_was(start, tmp_path, capsys):
    """Cosine with warm-up over 20 steps; another length on resume changes the rate, and is said."""
    options = {"optimizer__warmup_steps": 3, "optimizer__schedule": "cosine", "checkpoint__every": 10}
    start("whole", **options, train__steps=20)
    with pytest.raises(runs.Interrupted):
        start("parts", kind=runs.interrupted(Seen, 13), **options, train__steps=20)
    start("parts", **options, train__steps=20, checkpoint__resume="latest")
    rates = [[row["lr"] for row in runs.metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert rates[0] == rates[1] and len(rates[0]) == 20 and rates[0][2] == pytest.approx(0.01)
    assert "note: " not in capsys.readouterr().out
    start("parts", **options, train__steps=24, checkpoint__resume="latest")
    assert "note: steps was 20 in checkpoint-20, now 24" in capsys.readouterr().out


def test_a_finished_run_may_be_asked_again(start, tmp_path):
    start("run", **PLAIN)
    before = runs.contents(tmp_path / "run")
    again = start("run", **PLAIN, checkpoint__resume="latest")
    assert runs.contents(tmp_path / "run") == before
    assert again.step == 12 and not again.records


def test_another_folder_may_be_continued_elsewhere(start, tmp_path):
    whole = start("whole", **PLAIN)
    start("elsewhere", **PLAIN, checkpoint__resume=tmp_path / "whole" / "checkpoint-5")
    rows = runs.numbers(tmp_path / "whole")
    assert runs.numbers(tmp_path / "elsewhere") == rows[5:]
    weights = [safetensors.torch.load_file(tmp_path / name / LORA) for name in ("whole", "elsewhere")]
    assert runs.same(*weights)
    assert whole.step == 12


# -- two processes, and another number of them -------------------------------------------------------------------------


def on_each_rank(model, clips, root, changes, dies: int | None = None) -> dict:
    kind = Seen if dies is None else runs.interrupted(Seen, dies)
    made = runs.trainer(kind, model, clips, root, **changes)
    try:
        made.run()
    except runs.Interrupted:
        assert dies
    return {
        "world": made.accelerator.num_processes,
        "weights": runs.trained(made).numpy(),
        "losses": made.records,
        "accumulation": made.accelerator.gradient_accumulation_steps,
    }


def test_two_processes_resume_bit_for_bit(tiny_ltx, clips, cache, tmp_path):
    options = RANDOM | {"data__cache_dir": cache}
    whole = runs.forked(on_each_rank, tiny_ltx, clips, tmp_path / "whole", options)
    first = runs.forked(on_each_rank, tiny_ltx, clips, tmp_path / "parts", options, 9)
    rest = runs.forked(on_each_rank, tiny_ltx, clips, tmp_path / "parts", options | {"checkpoint__resume": "latest"})
    for rank in range(2):
        assert [part[rank]["world"] for part in (whole, first, rest)] == [2, 2, 2]
        assert np.array_equal(whole[rank]["weights"], rest[rank]["weights"])
        before = [row for row in first[rank]["losses"] if row[0] < 7]
        assert before + rest[rank]["losses"] == whole[rank]["losses"]
    assert whole[0]["losses"] != whole[1]["losses"]
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_another_number_of_ranks_keeps_the_global_batch(tiny_ltx, clips, cache, tmp_path, before, after, capfd):
    """2 ranks without accumulation go on as 1 rank with accumulation 2, and the other way round."""
    options = PLAIN | {"data__cache_dir": cache, "optimizer__learning_rate": 1e-3, "data__num_workers": 0}

    def launch(world: int, root: Path, dies=None, **changes) -> list[dict]:
        changes = options | {"train__gradient_accumulation_steps": 2 // before} | changes
        if world == 1:
            return [on_each_rank(tiny_ltx, clips, root, changes, dies)]
        return runs.forked(on_each_rank, tiny_ltx, clips, root, changes, dies)

    whole = launch(before, tmp_path / "whole")
    launch(before, tmp_path / "parts", dies=6)
    rest = launch(after, tmp_path / "parts", checkpoint__resume="latest")
    assert [rank["world"] for rank in whole] == [before] * before
    assert [(rank["world"], rank["accumulation"]) for rank in rest] == [(after, 2 // after)] * after
    assert f"keeping the checkpoint's global batch 2: accumulation {2 // after}" in capfd.readouterr().out
    for rank in rest:
        assert np.abs(rank["weights"] - whole[0]["weights"]).max() < 1e-5
    a, b = runs.numbers(tmp_path / "whole"), runs.numbers(tmp_path / "parts")
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], abs=1e-5)
    for name in ("step", "lr", "samples_seen", "tokens_seen", "epoch"):
        assert [row[name] for row in a] == [row[name] for row in b]


def test_an_impossible_layout_is_told_what_works(start, tmp_path):
    start("run", **PLAIN | {"train__gradient_accumulation_steps": 4, "train__steps": 5})
    with pytest.raises(CheckpointError) as caught:
        start("run", **PLAIN, train__batch_size=3, checkpoint__resume="latest")
    assert "global batch of 4" in str(caught.value) and "train.batch_size 3" in str(caught.value)
    assert str(caught.value).endswith("that can: 1 x 4, 2 x 2, 4 x 1")
    with pytest.raises(CheckpointError, match="none with 3 processes, take a divisor of 4"):
        checkpoints.accumulation(start("other", train__steps=1).config.train, 3, 4)
