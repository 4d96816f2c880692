"""The order of training is a pure function of the step: proportional, complete, and the same everywhere."""

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from data.batches import Schedule, collate

SIZES = [
    {"a": 7},
    {"a": 5, "b": 3},
    {"49x512x768": 101, "25x512x768": 13, "1x512x768": 1},
    {f"b{i}": (i * i * 7) % 23 + 1 for i in range(11)},
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [1, 4, 6])
def test_buckets_are_served_in_proportion_over_every_prefix(sizes, batch):
    schedule, total = Schedule(sizes, batch, seed=3), sum(sizes.values())
    served, bound = Counter(), 1 + math.log2(len(sizes))
    for step in range(400):
        served[schedule.block(step)[0]] += 1
        for name, size in sizes.items():
            assert abs(served[name] - (step + 1) * size / total) <= bound
    exact = Counter(schedule.block(step)[0] for step in range(total))
    assert exact == sizes  # over N steps to the last one


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [1, 4, 6])
def test_every_epoch_of_a_bucket_holds_each_index_once(sizes, batch):
    schedule, streams = Schedule(sizes, batch, seed=3), {name: [] for name in sizes}
    for step in range(3 * sum(sizes.values())):
        name, rows = schedule.block(step)
        assert len(rows) == batch
        streams[name] += rows
    orders = set()
    for name, size in sizes.items():
        epochs = [streams[name][at : at + size] for at in range(0, len(streams[name]) - size + 1, size)]
        assert len(epochs) >= 2
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        orders |= {tuple(epoch) for epoch in epochs if size > 12}
        if size > 12:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # a new order every epoch
    assert all(order != tuple(sorted(order)) for order in orders)


@pytest.mark.parametrize("sizes", SIZES)
def test_any_step_is_found_without_replaying(sizes):
    walking = Schedule(sizes, 4, seed=9)
    replayed = [walking.block(step) for step in range(300)]
    for step in (299, 0, 150, 151, 3, 298):
        assert Schedule(sizes, 4, seed=9).block(step) == replayed[step]
        assert walking.block(step) == replayed[step]
    backwards = Schedule(dict(reversed(sizes.items())), 4, seed=9)
    assert [backwards.block(step) for step in range(300)] == replayed


def test_the_far_end_is_exact():
    """Float arithmetic would lose count: 2**60 steps are beyond its 53 bits."""
    sizes, far = {"a": 3, "b": 5, "c": 9}, 2**60
    far -= far % 17
    near, schedule = Counter(), Schedule(sizes, 2, seed=0)
    for step in range(17):
        assert schedule.block(far + step)[0] == schedule.block(step)[0]
        near[schedule.block(step)[0]] += 1
    assert near == sizes


def test_seed_bucket_and_epoch_each_change_the_order():
    def order(seed, sizes, epoch):
        return Schedule(sizes, 50, seed).block(epoch)[1]

    base = order(0, {"a": 50}, 0)
    assert (
        len({tuple(base), *map(tuple, (order(1, {"a": 50}, 0), order(0, {"b": 50}, 0), order(0, {"a": 50}, 1)))}) == 4
    )


def test_known_answer():
    """Fixed: a release that orders samples in another way could not resume the runs of this one."""
    schedule = Schedule({"25x64x96": 5, "9x64x96": 3}, 2, seed=42)
    a, b = "25x64x96", "9x64x96"
    known = [(a, [0, 4]), (b, [1, 0]), (a, [2, 3]), (a, [1, 4]), (b, [2, 1]), (a, [3, 2])]
    assert [schedule.block(step) for step in range(6)] == known


def test_other_processes_agree():
    code = (
        "from data.batches import Schedule as S; s = S({'x': 9, 'y': 4}, 3, 7); print([s.block(i) for i in range(40)])"
    )
    schedule = Schedule({"x": 9, "y": 4}, 3, 7)
    expected = str([schedule.block(step) for step in range(40)])
    for hash_seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        found = subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env=env, text=True)
        assert found.strip() == expected


def test_random_state_of_the_process_is_neither_used_nor_moved():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = Schedule({"a": 9}, 3, 0).block(0)
    assert torch.equal(torch.rand(3), expected) and Schedule({"a": 9}, 3, 0).block(0) == first


def test_epoch_counts_samples():
    schedule = Schedule({"a": 5, "b": 3}, 2, 0)
    assert [schedule.epoch(step) for step in (0, 1, 4, 6)] == [0.0, 0.25, 1.0, 1.5]


@pytest.mark.parametrize("sizes, batch", [({}, 1), ({"a": 0}, 1), ({"a": 1, "b": -1}, 1), ({"a": 1}, 0)])
def test_nothing_to_serve_is_refused(sizes, batch):
    with pytest.raises(ValueError, match="need buckets"):
        Schedule(sizes, batch, 0)


def test_memory_stays_small():
    schedule = Schedule({"a": 3, "b": 4}, 2, 0)
    for step in range(200):
        schedule.block(step)
    assert all(len(orders) <= 2 for orders in schedule._orders.values())


def test_collate_stacks_and_pads_text():
    long, short = torch.arange(6.0).view(3, 2), torch.full((1, 2), 7.0)
    rows = [
        {
            "moments": torch.zeros(4, 2, 3, 3),
            "text": long,
            "text_mask": torch.ones(3, dtype=torch.bool),
            "fps": torch.tensor(24.0),
        },
        {
            "moments": torch.ones(4, 2, 3, 3),
            "text": short,
            "text_mask": torch.ones(1, dtype=torch.bool),
            "fps": torch.tensor(10.0),
        },
    ]
    batch = collate(rows)
    assert batch["moments"].shape == (2, 4, 2, 3, 3) and batch["moments"][1].eq(1).all()
    assert torch.equal(batch["text"], torch.stack([long, torch.tensor([[7.0, 7], [0, 0], [0, 0]])]))
    assert batch["text_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["text_mask"].dtype == torch.bool and batch["fps"].tolist() == [24.0, 10.0]
    assert collate([{"x": torch.ones(2, 3, dtype=torch.bfloat16)}])["x"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "other keys"),
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], r"x: rows differ.*\[2, 3\].*\[2, 4\]"),
        ([{"x": torch.ones(2)}, {"x": torch.ones(2).bfloat16()}], "x: rows differ.*bfloat16"),
        ([{"x": torch.tensor(1.0)}, {"x": torch.ones(1)}], "x: rows differ"),
    ],
)
def test_collate_refuses_other_differences(rows, message):
    with pytest.raises(ValueError, match=message):
        collate(rows)
