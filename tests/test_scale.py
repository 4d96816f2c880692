"""What must hold at any size: ten million samples on 1,024 ranks, and long lists, in bounded time and memory."""

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data.memo
import data.probe
import runs
from data.batches import MicroBatches, Schedule
from data.sources import Source, read_source
from trainers.ltx import LTXTrainer

pytestmark = pytest.mark.usefixtures("libraries")

SIZES = {
    "49x512x768": 5_600_000,
    "49x768x512": 2_900_000,
    "25x512x768": 1_400_000,
    "1x512x768": 99_997,
    "1x768x512": 3,
}
WORLD, ACCUMULATION = 1024, 2
G = WORLD * ACCUMULATION


def memory() -> dict[str, int]:
    """Resident memory of this process in MB: now, and the most that it was."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"now": int(lines["VmRSS"].split()[0]) // 1024, "most": int(lines["VmHWM"].split()[0]) // 1024}


def measured(function, *arguments) -> dict:
    """The result of `function`, with the seconds of processor time and the MB of memory that it took at most."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the most that there was before
    before, start = memory()["now"], time.process_time()
    result = function(*arguments)
    return result | {"seconds": time.process_time() - start, "mb": memory()["most"] - before}


def whole_epoch() -> dict:
    """Every step until each bucket that fills a batch has been seen once whole."""
    assert sum(SIZES.values()) == 10_000_000
    schedule, steps = Schedule(SIZES, G, seed=1), 5300  # an epoch has 4,882.8; the small buckets may be served late
    seen = {name: np.zeros(size, bool) for name, size in SIZES.items()}
    for step in range(steps):
        name, picks = schedule.block(step)
        assert len(picks) == G
        first = np.array(picks)[np.array(schedule.epochs(step)) == 0]
        assert len(np.unique(first)) == len(first) and not seen[name][first].any(), f"step {step}: a sample twice"
        seen[name][first] = True
    return {"lost": {name: int((~seen[name]).sum()) for name, size in SIZES.items() if size >= G}}


def any_step() -> dict:
    """A step in the middle and one far away, by schedules that saw no other; and what every rank takes of it."""
    found = {}
    for step in (3456, 10**7 + 7):
        first, again = Schedule(SIZES, G, seed=1).block(step), Schedule(SIZES, G, seed=1)
        again.block(step + 5000)
        assert again.block(step) == first
        found[str(step)] = [first[0], len(first[1])]
    return found


def every_rank() -> dict:
    """The micro-batches of one step on all 1,024 ranks: together its block, each place once, as many on each."""
    schedule, step = Schedule(SIZES, G, seed=1), 3456
    bucket, picks = schedule.block(step)

    def read(of, index, epoch):
        assert of == bucket
        return {"index": torch.tensor(index)}

    slots, counts = {}, Counter()
    for rank in range(WORLD):
        part = MicroBatches(schedule, read, 1, ACCUMULATION, rank, WORLD)
        for micro in range(ACCUMULATION):
            own, of, indices, batch = part[step * ACCUMULATION + micro]
            assert of == bucket and batch["index"].tolist() == indices
            slots |= dict(zip(own, indices, strict=True))
            counts[rank] += len(own)
    assert set(counts.values()) == {ACCUMULATION} and len(counts) == WORLD
    return {"right": [slots[slot] for slot in range(G)] == picks}


def test_ten_million_samples_on_1024_ranks():
    epoch, one, ranks = (runs.forked(measured, part, world=1)[0] for part in (whole_epoch, any_step, every_rank))
    assert epoch["lost"] == {name: 0 for name, size in SIZES.items() if size >= G}
    assert [one[step][1] for step in ("3456", "10000007")] == [G, G] and ranks["right"]
    print({"epoch": epoch, "any step": one, "ranks": ranks})
    assert max(part["mb"] for part in (epoch, one, ranks)) < 300
    assert sum(part["seconds"] for part in (epoch, one, ranks)) < 10  # of the processor, whoever else uses it


def test_an_order_is_that_of_a_permutation_whatever_its_memory():
    for size in (1, 2, 7, 1000, 70_000):
        order = Schedule({"a": size}, size, seed=5)._order("a", 3)
        digest = hashlib.sha256(b"5/a/3").digest()
        state = np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32))
        assert order.dtype == np.int32 and order.tolist() == state.permutation(size).tolist()


# -- long lists --------------------------------------------------------------------------------------------------------


def read_long_list(listing: str, rows: int) -> dict:
    found, problems = read_source(Source(listing))
    assert problems == [] and len(found) == rows
    assert all(found[at].caption == f"caption number {at}" for at in range(0, rows, 97))
    return {}


def test_a_list_of_100_000_rows(tmp_path):
    rows = 100_000
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"x")
    with open(tmp_path / "metadata.jsonl", "w") as file:
        for at in range(rows):
            file.write(json.dumps({"file_name": "ab"[at % 2] + ".mp4", "caption": f"caption number {at}"}) + "\n")
    (cost,) = runs.forked(measured, read_long_list, str(tmp_path / "metadata.jsonl"), rows, world=1)
    print(cost)
    assert cost["seconds"] < 10 and cost["mb"] < 200  # about 1 kB a row


def plan_of(model: str, folder: str, out: str, known: bool) -> dict:
    if known:
        data.probe._probe = data.memo.hashlib = None  # nothing is decoded or hashed again
    trainer = runs.trainer(LTXTrainer, model, folder, out, stage="plan", data__buckets=["1x32x32"])
    plan = trainer.make_plan()
    return {"samples": len(plan.samples)}


@pytest.mark.slow
def test_a_plan_of_10_000_files_is_bounded(tiny_ltx, tmp_path):
    rows, folder = 10_000, tmp_path / "stills"
    folder.mkdir()
    Image.new("RGB", (32, 32), (200, 30, 30)).save(tmp_path / "still.png")
    for at in range(rows):
        os.link(tmp_path / "still.png", folder / f"{at:05d}.png")
        (folder / f"{at:05d}.txt").write_text(f"caption number {at}")
    words = str(tiny_ltx), str(folder), str(tmp_path / "out")
    first, second = (runs.forked(measured, plan_of, *words, known, world=1)[0] for known in (False, True))
    print(first, second)
    assert first["samples"] == second["samples"] == rows
    assert max(first["mb"], second["mb"]) < 150  # about 10 kB a row, of which no picture is part
