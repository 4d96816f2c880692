"""Learning rates by closed form and as the optimizer really gets them; every optimizer resumes bit for bit."""

import math
import shutil

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import runs
from models.tiny import build
from trainers import optimizers
from trainers.config import OptimizerOptions
from trainers.ltx import LTXTrainer


def rates(steps: int, schedule: str, warmup: int = 0, **options) -> list[float]:
    """Of steps 0 to `steps`; the last is where the schedule ends, one after the last step of a run."""
    made = OptimizerOptions(learning_rate=2.0, schedule=schedule, warmup_steps=warmup, **options)
    return [optimizers.learning_rate(made, step, steps) for step in range(steps + 1)]


@pytest.mark.parametrize(
    "schedule, options, start, middle, last, end",
    [
        ("constant", {}, 2, 2, 2, 2),
        ("constant", {"min_lr_ratio": 0.5}, 2, 2, 2, 2),  # it never ends, so where it ends does not matter
        ("linear", {}, 2, 1, 2 * 0.05, 0),
        ("linear", {"min_lr_ratio": 0.1}, 2, 1.1, 0.2 + 1.8 * 0.05, 0.2),
        ("cosine", {}, 2, 1, 1 + math.cos(math.pi * 0.95), 0),
        ("cosine", {"min_lr_ratio": 0.25}, 2, 1.25, 0.5 + 1.5 * (1 + math.cos(math.pi * 0.95)) / 2, 0.5),
        ("polynomial", {"power": 1.0}, 2, 1, 2 * 0.05, 0),
        ("polynomial", {"power": 2.0}, 2, 0.5, 2 * 0.05**2, 0),
        ("polynomial", {"power": 3.0, "min_lr_ratio": 0.5}, 2, 1.125, 1 + 0.05**3, 1),
        ("cosine_with_restarts", {"cycles": 1}, 2, 1, 1 + math.cos(math.pi * 0.95), 0),
        ("cosine_with_restarts", {"cycles": 2}, 2, 2, 1 + math.cos(math.pi * 0.9), 0),
        ("cosine_with_restarts", {"cycles": 5, "min_lr_ratio": 0.5}, 2, 1.5, 1.5 + 0.5 * math.cos(0.75 * math.pi), 1),
    ],
)
def test_schedule_at_start_middle_and_end(schedule, options, start, middle, last, end):
    """20 steps without warm-up; and after one of 4 steps the same over the 20 that follow."""
    found = rates(20, schedule, **options)
    assert (found[0], found[10], found[19], found[20]) == pytest.approx((start, middle, last, end))
    warm = rates(24, schedule, warmup=4, **options)
    assert warm[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert warm[4:] == pytest.approx(found)
    assert min(warm[:-1]) > 0  # no step of a run is thrown away


def test_restarts_begin_again_at_the_full_rate():
    found = rates(12, "cosine_with_restarts", cycles=3)
    assert found[:12] == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)] * 3)


def test_warm_up_longer_than_the_run_ends_at_the_full_rate():
    assert rates(4, "cosine", warmup=100)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "polynomial", "cosine_with_restarts"])
def test_schedules_are_those_of_diffusers(schedule):
    from diffusers.optimization import get_scheduler

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=30, num_cycles=3, power=1.7)
    if schedule == "cosine":  # diffusers counts the half waves of this one with the same argument
        theirs = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=30)
    expected = []
    for _ in range(30):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    # diffusers' polynomial ends at 1e-7, not at 0
    assert rates(30, schedule, cycles=3, power=1.7)[:30] == pytest.approx(expected, abs=2e-7)


# -- what the optimizer of a real run gets -----------------------------------------------------------------------------

LINEAR = [0.005, 0.01, *(0.01 * (1 - k / 8) for k in range(8))]
RESTARTS = [0.001 + 0.009 * (1 + math.cos(math.pi * k / 5)) / 2 for k in range(5)] * 2
SCHEDULES = [
    ({"schedule": "linear", "warmup_steps": 2}, LINEAR),
    ({"schedule": "cosine_with_restarts", "cycles": 2, "min_lr_ratio": 0.1}, RESTARTS),
]


def rates_of_a_run(model, clips, output_dir, **changes) -> tuple[int, list[float], list[float]]:
    """(processes, rates at the optimizer's steps, rates in metrics.jsonl) of 10 steps."""
    used = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    try:
        made = runs.run(model, clips, output_dir, train__steps=10, **changes)
    finally:
        hook.remove()
    return made.accelerator.num_processes, used, [row["lr"] for row in runs.metrics(output_dir)]


@pytest.mark.parametrize("changes, expected", SCHEDULES, ids=["linear", "restarts"])
@pytest.mark.parametrize("world, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_rate_is_a_function_of_the_optimizer_step(
    tiny_ltx, clips, cache, tmp_path, changes, expected, world, accumulation
):
    """Neither processes nor accumulation make it faster: a prepared scheduler would be over after half the steps."""
    changes = {f"optimizer__{name}": value for name, value in changes.items()}
    changes |= {"train__gradient_accumulation_steps": accumulation, "data__cache_dir": cache}
    if world == 1:
        results = [rates_of_a_run(tiny_ltx, clips, tmp_path / "run", **changes)]
    else:
        results = runs.forked(_rates, tiny_ltx, clips, tmp_path / "run", changes, world=world)
    assert len(results) == world
    for processes, used, logged in results:
        assert processes == world
        assert used == pytest.approx(expected, rel=1e-12) and len(used) == 10
        assert logged == used


def _rates(model, clips, output_dir, changes):
    return rates_of_a_run(model, clips, output_dir, **changes)


# -- every optimizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide enough that optimizers quantise: only tensors of 4096 or more numbers, a multiple of their block, are."""
    return build("ltx", tmp_path_factory.mktemp("wide") / "ltx", width=64)


@pytest.fixture
def eager():
    """torchao compiles its step; its arithmetic is the same without, in a hundredth of the time."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def moments(state: dict) -> list[torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "state1", "state2", "momentum_buffer")
    return [state[name] for name in names if state.get(name) is not None]


def stored_bytes(state: dict) -> int:
    """Memory of one parameter's state, without lookup tables and counters that all parameters share."""
    parts = []
    for name, value in state.items():
        if name in ("step", "qmap1", "qmap2") or not isinstance(value, torch.Tensor):
            continue
        parts += [getattr(value, a) for a in value.tensor_attrs if a != "qmap"] if hasattr(value, "codes") else [value]
    return sum(part.numel() * part.element_size() for part in parts)


# name -> (class of a large tensor's moments, dtype of what they hold, bytes per parameter)
OPTIMIZERS = {
    "adamw": ("Tensor", torch.float32, 8),
    "sgd": ("Tensor", torch.float32, 4),
    "adamw8bit": ("Tensor", torch.uint8, 2 + 2 * 4 / 256),
    "adamw8bit-ao": ("OptimState8bit", torch.uint8, 2 + 2 * 4 / 256),
    "adamw4bit-ao": ("OptimState4bit", torch.uint8, 1 + 2 * 4 / 128),
    "adamwfp8-ao": ("OptimStateFp8", torch.float8_e4m3fn, 2 + 2 * 4 / 256),
}


def ten_more(whole, model, clips, output_dir, **changes):
    """A run like `whole`, of 20 steps, continued from its checkpoint-10 in another folder."""
    shutil.copytree(whole.output_dir / "checkpoint-10", output_dir / "checkpoint-10")
    return runs.run(model, clips, output_dir, checkpoint__resume="latest", **changes)


def check_resume(whole, rest) -> None:
    assert rest.step == whole.step == 20
    assert torch.equal(runs.trained(whole), runs.trained(rest))
    assert runs.same(whole.optimizer.optimizer.state_dict(), rest.optimizer.optimizer.state_dict())
    losses = [runs.losses(made.output_dir) for made in (whole, rest)]
    assert len(losses[0]) == 20 and losses[0][10:] == losses[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_is_what_its_name_says_and_resumes_exactly(wide, clips, cache, tmp_path, eager, name):
    options = {
        "method": "full",
        "train__steps": 20,
        "checkpoint__every": 10,
        "optimizer__name": name,
        "optimizer__learning_rate": 0.1 if name == "sgd" else 1e-3,
        "data__cache_dir": cache,
    }
    start = runs.trainer(LTXTrainer, wide, clips, tmp_path / "start", **options).pretrained.component("transformer")
    start = torch.cat([p.detach().flatten() for p in start.parameters()])
    whole = runs.run(wide, clips, tmp_path / "whole", **options)
    assert (runs.trained(whole) - start).abs().max() > 1e-3
    assert runs.trained(whole).isfinite().all()

    kind, dtype, bytes_each = OPTIMIZERS[name]
    rest = ten_more(whole, wide, clips, tmp_path / "rest", **options)
    for made in (whole, rest):  # a restored state is of the same kind too
        states = made.optimizer.optimizer.state
        large = [p for p in made.parameters if p.numel() >= 4096 and p.numel() % 256 == 0]
        assert len(large) > 20
        for parameter in large:
            assert moments(states[parameter])
            for moment in moments(states[parameter]):
                held = getattr(moment, "codes", moment)
                assert type(moment).__name__ == kind and held.dtype == dtype
            assert stored_bytes(states[parameter]) == pytest.approx(bytes_each * parameter.numel(), rel=1e-3)
    check_resume(whole, rest)


@pytest.mark.parametrize("name", ["adamw8bit-ao", "adamwfp8-ao"])
def test_bf16_with_stochastic_rounding_resumes_exactly(wide, clips, cache, tmp_path, eager, name):
    """The rounding draws from torch's global generator, which is re-seeded before each micro-step."""
    options = {
        "method": "full",
        "train__steps": 20,
        "checkpoint__every": 10,
        "train__gradient_accumulation_steps": 2,
        "optimizer__name": name,
        "optimizer__learning_rate": 1e-4,  # below half a step of bf16 for most weights: plain rounding would lose it
        "optimizer__schedule": "constant",
        "precision__weights": "bf16",
        "precision__trainable": "bf16",
        "data__cache_dir": cache,
    }
    whole = runs.run(wide, clips, tmp_path / "whole", **options)
    assert {p.dtype for p in whole.parameters} == {torch.bfloat16}
    rest = ten_more(whole, wide, clips, tmp_path / "rest", **options)
    assert {p.dtype for p in rest.parameters} == {torch.bfloat16}
    check_resume(whole, rest)


def test_stochastic_rounding_keeps_updates_that_plain_rounding_loses(eager):
    """1e-3 on weights of 1 is less than half of bf16's step there (2^-8 below 1): only chance moves them."""
    options = OptimizerOptions(name="adamw8bit-ao", learning_rate=1e-3, weight_decay=0.0)
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = optimizers.build(options, [parameter])
    for step in range(50):
        torch.manual_seed(step)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.float().mean().item() == pytest.approx(1 - 50 * 1e-3, abs=3e-3)


def test_options_of_adamw_and_sgd_reach_torch():
    parameter = torch.nn.Parameter(torch.zeros(2))
    options = dict(learning_rate=0.3, weight_decay=0.2, betas=(0.5, 0.6), epsilon=1e-3, momentum=0.7)
    group = optimizers.build(OptimizerOptions(name="adamw", **options), [parameter]).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (0.3, 0.2, (0.5, 0.6), 1e-3)
    group = optimizers.build(OptimizerOptions(name="sgd", **options), [parameter]).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.3, 0.2, 0.7)
    for name in OPTIMIZERS:
        if name.startswith("adamw"):
            group = optimizers.build(OptimizerOptions(name=name, **options), [parameter]).param_groups[0]
            assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.2, (0.5, 0.6), 1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_is_set_in_place_and_used(eager, name):
    """torchao keeps it in a tensor and refuses a number."""
    parameter = torch.nn.Parameter(torch.ones(4))
    options = OptimizerOptions(name=name, learning_rate=9.0, weight_decay=0.0, momentum=0.0)
    optimizer = optimizers.build(options, [parameter])
    for rate in (0.5, 0.25):
        before = parameter.detach().clone()
        optimizers.set_rate(optimizer, rate)
        parameter.grad = torch.ones(4)  # constant, so that Adam's step is the rate itself
        optimizer.step()
        assert (before - parameter.detach()).tolist() == pytest.approx([rate] * 4, rel=1e-3)


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        optimizers.build(OptimizerOptions(name="lion"), [torch.nn.Parameter(torch.zeros(1))])
