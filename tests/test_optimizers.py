"""Learning rates by closed form and as the optimizer really gets them; every optimizer resumes bit for bit."""

import copy
import math
import shutil
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

import runs
from models.adapters import AdapterError
from models.tiny import build
from trainers import optimizers
from trainers.checkpoints import CheckpointError
from trainers.config import OptimizerName, OptimizerOptions, OptionError
from trainers.fused_backward import FusedBackward, Joined
from trainers.ltx import LTXTrainer
from trainers.parsing import parse


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


def one(shape=(4,), dtype=torch.float32, name="transformer_blocks.0.attn1.to_q.weight") -> dict:
    return {name: torch.nn.Parameter(torch.ones(shape, dtype=dtype))}


def stored_bytes(state: dict) -> int:
    """Memory of one parameter's state, without counters and the lookup tables that bitsandbytes has once for all."""
    parts = []
    for name, value in state.items():
        if name in ("step", "RMS", "qmap1", "qmap2") or not isinstance(value, torch.Tensor):
            continue
        parts += [getattr(value, a) for a in value.tensor_attrs] if hasattr(value, "codes") else [value]
    return sum(part.numel() * part.element_size() for part in parts)


# name -> (names of a large tensor's moments, class, dtype of what they hold, bytes per number, tables left out)
OF_ADAM, OF_BNB = ("exp_avg", "exp_avg_sq"), ("state1", "state2")
OF_ROWS = ("exp_avg_sq_row", "exp_avg_sq_col")
OPTIMIZERS = {
    "adamw": (OF_ADAM, "Tensor", torch.float32, 8),
    "sgd": (("momentum_buffer",), "Tensor", torch.float32, 4),
    "adamw8bit": (OF_BNB, "Tensor", torch.uint8, 2 + 2 * 4 / 256),
    "lion8bit": (("state1",), "Tensor", torch.uint8, 1 + 4 / 256),
    "ademamix8bit": (OF_BNB, "Tensor", torch.uint8, 3 + 3 * 4 / 256),
    "adamw8bit-ao": (OF_ADAM, "OptimState8bit", torch.uint8, 2 + 2 * 4 / 256),
    "adamw4bit-ao": (OF_ADAM, "OptimState4bit", torch.uint8, 1 + 2 * 4 / 128),
    "adamwfp8-ao": (OF_ADAM, "OptimStateFp8", torch.float8_e4m3fn, 2 + 2 * 4 / 256),
    "adamw-kahan": ((*OF_ADAM, "kahan_comp"), "Tensor", torch.bfloat16, 6),
    "muon": (("momentum_buffer",), "Tensor", torch.float32, 4),
    "adafactor": (OF_ROWS, "Tensor", torch.float32, None),
    "came": (("exp_avg", *OF_ROWS, "exp_avg_res_row", "exp_avg_res_col"), "Tensor", torch.float32, None),
    "prodigy": ((*OF_ADAM, "s", "p0"), "Tensor", torch.float32, 16),
    "schedulefree": (("z", "exp_avg_sq"), "Tensor", torch.float32, 8),
}
OPTIMIZERS |= {f"paged_{name}": row for name, row in OPTIMIZERS.items() if row[0] == OF_BNB or name == "lion8bit"}
CHANGES = {
    "sgd": {"optimizer__learning_rate": 0.1},
    "prodigy": {"optimizer__learning_rate": 1.0},
    "schedulefree": {"optimizer__schedule": "constant"},
    "adamw-kahan": {"precision__trainable": "bf16", "precision__weights": "bf16"},
}


def options_of(name: str, cache, **changes) -> dict:
    """Of a run of 8 steps that trains everything with this optimizer, whose second checkpoint is the last."""
    options = {
        "method": "full",
        "train__steps": 8,
        "checkpoint__every": 4,
        "optimizer__name": name,
        "optimizer__learning_rate": 1e-3,
        "data__cache_dir": cache,
    }
    return options | CHANGES.get(name, {}) | changes


def the_rest(whole, model, clips, output_dir, **changes):
    """A run like `whole`, continued from its first checkpoint in another folder."""
    half = whole.output_dir / "checkpoint-4"
    shutil.copytree(half, output_dir / half.name)
    return runs.run(model, clips, output_dir, checkpoint__resume="latest", **changes)


def check_resume(whole, rest) -> None:
    assert rest.step == whole.step == 8
    assert torch.equal(runs.trained(whole), runs.trained(rest))
    assert runs.same(whole.optimizer.state_dict(), rest.optimizer.state_dict())
    losses = [runs.losses(made.output_dir) for made in (whole, rest)]
    assert len(losses[0]) == 8 and losses[0][4:] == losses[1]


def named(made) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in made.network.named_parameters() if p.requires_grad}


def test_every_name_is_here():
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS) == set(optimizers.CLASSES)


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_is_what_its_name_says_and_resumes_exactly(wide, clips, cache, tmp_path, eager, name):
    options = options_of(name, cache)
    start = runs.trainer(LTXTrainer, wide, clips, tmp_path / "start", **options).pretrained.component("transformer")
    start = torch.cat([p.detach().flatten() for p in start.parameters()])
    whole = runs.run(wide, clips, tmp_path / "whole", **options)
    # prodigy begins at a millionth of its rate
    assert (runs.trained(whole) - start).abs().max() > (1e-6 if name == "prodigy" else 1e-3)
    assert runs.trained(whole).isfinite().all()

    keys, kind, dtype, bytes_each = OPTIMIZERS[name]
    rest = the_rest(whole, wide, clips, tmp_path / "rest", **options)
    for made in (whole, rest):  # a restored state is of the same kind too
        states = made.optimizer.state
        large = {n: p for n, p in named(made).items() if p.numel() >= 4096 and p.numel() % 256 == 0}
        if name == "muon":  # the rest is AdamW's
            large = {n: p for n, p in large.items() if ".transformer_blocks." in f".{n}"}
        assert len(large) >= 20
        for parameter in large.values():
            state = states[parameter]
            moments = [state[key] for key in keys]
            for moment in moments:
                held = getattr(moment, "codes", moment)
                assert type(moment).__name__ == kind and held.dtype == dtype
            tables = sum(4 * moment.qmap.numel() for moment in moments if hasattr(moment, "qmap"))
            rows_and_columns = 4 * sum(parameter.shape)
            each = {
                "adafactor": rows_and_columns / parameter.numel(),
                "came": 4 + 2 * rows_and_columns / parameter.numel(),
            }.get(name, bytes_each)
            assert stored_bytes(state) - tables == pytest.approx(each * parameter.numel(), rel=1e-3)
        told = sum(optimizers.state_bytes(name, p.shape, p.dtype, n) for n, p in named(made).items())
        assert sum(map(stored_bytes, states.values())) == pytest.approx(told, rel=0.02)
    check_resume(whole, rest)


@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit-ao", "muon", "prodigy"])
def test_state_of_a_lora(wide, clips, cache, tmp_path, eager, name):
    """Rank 64 on 64 features: 4096 numbers in each matrix, just enough for 8 bits."""
    options = options_of(name, cache, method="lora", lora__rank=64, lora__alpha=64, train__steps=2)
    made = runs.run(wide, clips, tmp_path / "run", **options)
    told = sum(optimizers.state_bytes(name, p.shape, p.dtype, n) for n, p in named(made).items())
    assert sum(map(stored_bytes, made.optimizer.state.values())) == pytest.approx(told, rel=0.02)
    if name == "adamw8bit":
        assert {state["state1"].dtype for state in made.optimizer.state.values()} == {torch.uint8}


@pytest.mark.parametrize("name", ["adamw8bit-ao", "adamwfp8-ao"])
def test_bf16_with_stochastic_rounding_resumes_exactly(wide, clips, cache, tmp_path, eager, name):
    """The rounding draws from torch's global generator, which is re-seeded before each micro-step."""
    options = options_of(
        name,
        cache,
        train__gradient_accumulation_steps=2,
        optimizer__learning_rate=1e-4,  # below half a step of bf16 for most weights: plain rounding would lose it
        optimizer__schedule="constant",
        precision__weights="bf16",
        precision__trainable="bf16",
    )
    whole = runs.run(wide, clips, tmp_path / "whole", **options)
    assert {p.dtype for p in whole.parameters} == {torch.bfloat16}
    rest = the_rest(whole, wide, clips, tmp_path / "rest", **options)
    assert {p.dtype for p in rest.parameters} == {torch.bfloat16}
    check_resume(whole, rest)


@pytest.mark.parametrize("name", ["adamw8bit-ao", "adamw4bit-ao", "adamwfp8-ao", "adamw-kahan"])
def test_bf16_keeps_updates_that_plain_rounding_loses(eager, name):
    """1e-3 on weights of 1 is less than half of bf16's step there (2^-8 below 1): plain rounding would never move."""
    parameters = one((64, 64), torch.bfloat16)
    (parameter,) = parameters.values()
    options = OptimizerOptions(name=name, learning_rate=1e-3, weight_decay=0.0)
    optimizer = optimizers.build(options, parameters)
    for step in range(50):
        torch.manual_seed(step)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.float().mean().item() == pytest.approx(1 - 50 * 1e-3, abs=3e-3)


# -- options -----------------------------------------------------------------------------------------------------------

ADAMS = [name for name in OPTIMIZERS if "adamw" in name and name != "adamw-kahan"]


def test_options_reach_the_algorithms():
    options = dict(learning_rate=0.3, weight_decay=0.2, betas=(0.5, 0.6), epsilon=1e-3, momentum=0.7)

    def group(name):
        return optimizers.build(OptimizerOptions(name=name, **options), one((8, 8))).param_groups[0]

    for name in OPTIMIZERS:
        assert float(group(name)["lr"]) == pytest.approx(0.3) and group(name)["weight_decay"] == 0.2
    for name in [*ADAMS, "prodigy", "schedulefree"]:
        assert (tuple(group(name)["betas"]), group(name)["eps"]) == ((0.5, 0.6), 1e-3)
    kahan = group("adamw-kahan")
    assert (kahan["beta1"], kahan["beta2"], kahan["eps"]) == (0.5, 0.6, 1e-3)
    assert group("sgd")["momentum"] == group("muon")["momentum"] == 0.7
    assert group("lion8bit")["betas"] == (0.5, 0.6)
    assert group("ademamix8bit")["betas"] == group("came")["betas"] == (0.5, 0.6, 0.9999)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_is_set_in_place_and_used(eager, name):
    """torchao keeps it in a tensor and refuses a number. The gradient is constant: Adam's step is the rate itself."""
    options = OptimizerOptions(name=name, learning_rate=9.0, weight_decay=0.0, momentum=0.0)
    parameters = one((4, 4)) if name == "muon" else one()
    (parameter,) = parameters.values()
    optimizer = optimizers.build(options, parameters)
    for rate in (0.5, 0.25):
        before = parameter.detach().clone()
        optimizers.set_rate(optimizer, rate)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == [rate]
        moved = (before - parameter.detach()).mean().item()
        if name in ("prodigy", "schedulefree"):  # 1e-6 of it at first; y moves by less than z
            assert moved > 0
        elif name == "came":  # its average of the gradient is not corrected for its start at 0
            assert moved == pytest.approx(rate * (0.1 if rate == 0.5 else 0.19), rel=1e-3)
        elif name.endswith("ademamix8bit"):  # 5 times a slow average on top, of which 1e-4 is there
            assert moved == pytest.approx(rate, rel=2e-3)
        elif name == "muon":  # all ones has one singular value, 4, which becomes 0.7 to 1.2: a quarter in each of 4 x 4
            assert 0.6 < moved / (rate * 0.2 * 2 / 4) < 1.3
        else:
            assert moved == pytest.approx(rate, rel=1e-3)


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        optimizers.build(OptimizerOptions(name="lion"), one())
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        optimizers.state_bytes("lion", (4,))


def test_what_decays_and_what_muon_takes(wide, clips, cache, tmp_path):
    made = runs.run(wide, clips, tmp_path / "run", **options_of("muon", cache, train__steps=1))
    of = {p: group for group in made.optimizer.param_groups for p in group["params"]}
    assert set(of) == set(made.parameters)
    decays = {name for name, p in named(made).items() if of[p]["weight_decay"]}
    flat = {name for name, p in named(made).items() if p.ndim == 1}
    tables = {name for name in named(made) if name.endswith("scale_shift_table")}
    assert flat and tables and decays == set(named(made)) - flat - tables
    by_muon = {name for name, p in named(made).items() if "momentum_buffer" in made.optimizer.state[p]}
    assert by_muon == {name for name in decays if name.startswith("transformer_blocks.")}
    assert all("exp_avg_sq" in made.optimizer.state[p] for name, p in named(made).items() if name not in by_muon)


def test_muon_moves_matrices_by_a_fifth_of_the_rate():
    """What AdamW's steps come to, so that its learning rates fit (adjust_lr_fn match_rms_adamw)."""
    torch.manual_seed(0)
    parameters = one((96, 64)) | one((64,), name="transformer_blocks.0.norm.bias")
    optimizer = optimizers.build(OptimizerOptions(name="muon", learning_rate=0.1, weight_decay=0.0), parameters)
    assert isinstance(optimizer, Joined)
    before = [p.detach().clone() for p in parameters.values()]
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    matrix, bias = (p.detach() - b for p, b in zip(parameters.values(), before, strict=True))
    assert matrix.square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.15)
    assert bias.abs().mean().item() == pytest.approx(0.1, rel=1e-3)
    with pytest.raises(OptionError, match="none trains: use adamw"):
        optimizers.build(OptimizerOptions(name="muon"), one((4,)))


def test_lora_plus(tiny_ltx, clips, cache, tmp_path):
    """B's rate is a multiple of A's at every step; a resumed run has its own multiple."""
    used = []

    def note(optimizer, *_):
        used.append({g["is_lora_b"]: g["lr"] for g in optimizer.param_groups})

    hook = register_optimizer_step_pre_hook(note)
    options = {"data__cache_dir": cache, "train__steps": 8, "checkpoint__every": 4, "optimizer__schedule": "linear"}
    try:
        whole = runs.run(tiny_ltx, clips, tmp_path / "whole", optimizer__lora_plus_ratio=16, **options)
        the_rest(whole, tiny_ltx, clips, tmp_path / "rest", optimizer__lora_plus_ratio=4, **options)
    finally:
        hook.remove()
    rates = [0.01 * (1 - k / 8) for k in range(8)]
    assert [row[False] for row in used] == pytest.approx(rates + rates[4:])
    assert [row[True] for row in used] == pytest.approx([16 * r for r in rates] + [4 * r for r in rates[4:]])
    names = {p: name for name, p in named(whole).items()}
    for group in whole.optimizer.param_groups:
        assert {"lora_B" in names[p] for p in group["params"]} == {group["is_lora_b"]}


BROKEN = [
    ({"precision.trainable": "bf16"}, "or optimizer.name adamw8bit-ao or adamw4bit-ao or adamwfp8-ao or adamw-kahan"),
    ({"optimizer.name": "adamw-kahan"}, "set precision.trainable bf16, or use adamw"),
    ({"optimizer.name": "prodigy"}, "use 1"),
    ({"optimizer.name": "schedulefree"}, "use constant (warm-up stays)"),
    ({"optimizer.name": "schedulefree", "optimizer.schedule": "constant", "optimizer.betas": (0, 0.9)}, "use 0.9"),
    ({"optimizer.lora_plus_ratio": 16, "method": "full"}, "is for the B matrices"),
    ({"optimizer.lora_plus_ratio": 16, "lora.type": "loha"}, "is for the B matrices"),
    ({"optimizer.lora_plus_ratio": 2, "optimizer.name": "prodigy", "optimizer.learning_rate": 1}, "one rate for all"),
    ({"optimizer.cpu_offload": True, "optimizer.max_grad_norm": 0, "optimizer.name": "sgd"}, "it is for adamw"),
    ({"optimizer.cpu_offload": True}, "set max_grad_norm 0"),
    ({"optimizer.fused_backward": True}, "set max_grad_norm 0"),
    ({"optimizer.fused_backward": True, "optimizer.max_grad_norm": 0, "precision.weights": "fp16"}, "use bf16"),
    (
        {"optimizer.fused_backward": True, "optimizer.max_grad_norm": 0, "train.gradient_accumulation_steps": 2},
        "use 1 and a larger train.batch_size",
    ),
    (
        {"optimizer.fused_backward": True, "optimizer.max_grad_norm": 0, "optimizer.cpu_offload": True},
        "need all gradients",
    ),
]


@pytest.mark.parametrize("changes, remedy", BROKEN)
def test_options_that_do_not_fit_are_refused_with_a_remedy(changes, remedy):
    words = runs.words({"model": "m", "data.train": "clips", "data.buckets": "1x32x32"} | changes)
    with pytest.raises(OptionError) as raised:
        parse(LTXTrainer.Config, words)
    problem = str(raised.value)
    assert remedy in problem and "problems:" not in problem
    for name in list(changes)[:1]:
        assert name.split(".")[-1] in problem


def test_a_missing_package_is_told_before_anything_loads(tiny_ltx, clips, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda module: None)
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", optimizer__name="came")
    monkeypatch.setattr(made, "make_plan", lambda: pytest.fail("read the clips"))
    with pytest.raises(OptionError, match=r"came needs the package came-pytorch.*pip install -e '\.\[optimizers\]'"):
        made.run()
    config = made.config
    config.stage = "precompute"  # which another machine may do
    assert optimizers.problems(config, torch.device("cpu"), 1) == []


# -- in the backward pass ----------------------------------------------------------------------------------------------

FUSED = {"optimizer__fused_backward": True, "optimizer__max_grad_norm": 0}


class Counting(LTXTrainer):
    """Counts the gradients that exist when another is ready."""

    def build(self):
        super().build()
        self.live = 0
        for p in self.parameters:
            p.register_hook(self.count)

    def count(self, gradient):
        self.live = max(self.live, 1 + sum(p.grad is not None for p in self.parameters))


Counting.__name__ = LTXTrainer.__name__  # a checkpoint names the class that made it


@pytest.mark.parametrize(
    "name", ["adamw", "sgd", "adamw8bit", "adamw4bit-ao", "adamw-kahan", "muon", "adafactor", "came", "schedulefree"]
)
def test_fused_backward_is_the_same_step_without_the_gradients(wide, clips, cache, tmp_path, eager, name):
    plain = options_of(name, cache, optimizer__max_grad_norm=0)
    made = {}
    for kind, changes in {"plain": {}, "fused": FUSED}.items():
        made[kind] = runs.trainer(Counting, wide, clips, tmp_path / kind, **(plain | changes))
        made[kind].run()
    whole, fused = made["plain"], made["fused"]
    assert isinstance(fused.optimizer.optimizer, FusedBackward)
    assert len(whole.parameters) == 65 and (whole.live, fused.live) == (len(whole.parameters), 1)
    assert torch.equal(runs.trained(whole), runs.trained(fused))
    assert runs.numbers(whole.output_dir) == runs.numbers(fused.output_dir)  # losses and gradient norms
    assert min(row["grad_norm"] for row in runs.numbers(fused.output_dir)) > 0
    exports = [load_file(next((m.output_dir / "transformer").glob("*.safetensors"))) for m in (whole, fused)]
    assert runs.same(*exports)
    assert runs.same(whole.optimizer.state_dict(), fused.optimizer.state_dict())
    check_resume(whole, the_rest(fused, wide, clips, tmp_path / "rest", **(plain | FUSED)))
    check_resume(whole, the_rest(whole, wide, clips, tmp_path / "other", **(plain | FUSED)))


def test_fused_backward_names_what_gets_no_gradient():
    parameters = one((4,), name="a.weight") | one((4,), name="b.base_layer.weight")
    options = OptimizerOptions(fused_backward=True)
    optimizer = optimizers.build(options, parameters)
    parameters["a.weight"].sum().backward()
    with pytest.raises(AdapterError, match=r"1 of 2 .* such as b\.weight"):
        optimizer.gradient_norm()


def test_fused_backward_does_not_resume_a_batch_that_needs_accumulation(tiny_ltx, clips, cache, tmp_path):
    options = {"data__cache_dir": cache, "train__steps": 8, "checkpoint__every": 4} | FUSED
    whole = runs.run(tiny_ltx, clips, tmp_path / "whole", train__batch_size=2, **options)
    with pytest.raises(CheckpointError, match=r"set train\.batch_size 2"):
        the_rest(whole, tiny_ltx, clips, tmp_path / "rest", train__batch_size=1, **options)


# -- on the host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["cpu_offload", "fused_backward"])
def test_several_processes_are_refused(option):
    given = {f"optimizer.{option}": True, "optimizer.max_grad_norm": 0}
    words = runs.words({"model": "m", "data.train": "clips", "data.buckets": "1x32x32"} | given)
    config = parse(LTXTrainer.Config, words)
    (problem,) = optimizers.problems(config, torch.device("cuda"), 2)
    assert f"optimizer.{option} on 2 processes" in problem
    assert optimizers.problems(config, torch.device("cuda"), 1) == []


def test_cpu_offload_is_refused_without_cuda(tiny_ltx, clips, tmp_path):
    options = {"optimizer__cpu_offload": True, "optimizer__max_grad_norm": 0}
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", **options)
    with pytest.raises(OptionError, match=r"optimizer\.cpu_offload .* this run is on cpu: turn it off"):
        made.run()


class NoStreams:
    """What torchao's CPUOffloadOptimizer asks of a CUDA stream and of torch.cuda, where all is done at once."""

    def __getattr__(self, name):
        return lambda *_: None

    def stream(self, _):
        return torch.no_grad()

    def Stream(self):
        return NoStreams()

    def record_event(self):
        return NoStreams()


class TorchWithoutCuda:
    cuda = NoStreams()

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_like(self, tensor, pin_memory=False, **rest):
        return torch.empty_like(tensor, **rest)


def test_cpu_offload_follows_rates_and_loaded_weights(monkeypatch):
    """The real optimizer of torchao, with streams that do nothing: small tensors stay where they are, large ones move.

    Bit-equal to AdamW; a fresh one that loads its state and weights goes on as it would have.
    """
    from torchao.optim import cpu_offload

    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(cpu_offload, "torch", TorchWithoutCuda())

    def made(**options):
        torch.manual_seed(0)
        shapes = {"a.weight": (64, 64), "a.bias": (64,), "b.lora_B.default.weight": (64, 64)}
        parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        options = OptimizerOptions(max_grad_norm=0, lora_plus_ratio=4, **options)
        return parameters, optimizers.build(options, parameters, torch.device("cuda"))

    def steps(parameters, optimizer, which):
        for step in which:
            optimizers.set_rate(optimizer, 0.1 / (step + 1))
            torch.manual_seed(step)
            sum((p * torch.randn_like(p)).sum() for p in parameters.values()).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, adamw = made()
    steps(plain, adamw, range(6))
    moved, offloaded = made(cpu_offload=True)
    offloaded.load_state_dict(offloaded.state_dict())  # as Accelerate does when it prepares it
    steps(moved, offloaded, range(3))
    again, restored = made(cpu_offload=True)
    restored.load_state_dict(restored.state_dict())
    for name, p in again.items():  # Accelerate restores the weights first
        p.data.copy_(moved[name].detach())
    restored.load_state_dict(copy.deepcopy(offloaded.state_dict()))
    steps(moved, offloaded, range(3, 6))
    steps(again, restored, range(3, 6))
    for name, p in plain.items():
        assert torch.equal(p, moved[name]) and torch.equal(p, again[name]), name


# -- schedulefree ------------------------------------------------------------------------------------------------------


class Watching(LTXTrainer):
    """Keeps the weights that each validation saw."""

    def pipeline(self, prompt, network=None):
        self.seen = [*getattr(self, "seen", ()), runs.trained(self)]
        return super().pipeline(prompt, network)


Watching.__name__ = LTXTrainer.__name__


def test_schedulefree_shows_its_average_and_trains_on_exactly(tiny_ltx, clips, cache, tmp_path):
    """What is validated and exported is the average; how often it is looked at changes nothing."""
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("- {prompt: a cat, num_frames: 9, height: 64, width: 64, num_inference_steps: 2}\n")
    options = options_of("schedulefree", cache, method="lora", optimizer__learning_rate=1e-2)
    seldom = runs.run(tiny_ltx, clips, tmp_path / "seldom", **options)
    looked = {"checkpoint__every": 1, "validation__prompts": prompts, "validation__every": 2, "checkpoint__keep": 9}
    often = runs.trainer(Watching, tiny_ltx, clips, tmp_path / "often", **(options | looked))
    often.run()
    assert torch.equal(runs.trained(seldom), runs.trained(often))
    assert runs.same(seldom.optimizer.state_dict(), often.optimizer.state_dict())
    assert runs.losses(seldom.output_dir) == runs.losses(often.output_dir)
    check_resume(seldom, the_rest(often, tiny_ltx, clips, tmp_path / "rest", **(options | {"checkpoint__every": 3})))

    training = runs.trained(often)
    z = torch.cat([often.optimizer.state[p]["z"].flatten() for p in often.parameters])
    average = training.lerp(z, 1 - 1 / 0.9)
    assert (average - training).abs().max() > 1e-4
    assert len(often.seen) >= 5 and torch.equal(often.seen[-1], average)
    kept = load_file(often.output_dir / "checkpoint-8" / "state" / "trainable.safetensors")
    assert torch.equal(torch.cat([kept[name].flatten() for name in named(often)]), training)
    exported = load_file(often.output_dir / runs.LORA)
    for name, p in named(often).items():
        key = "transformer." + name.replace(".default.", ".")
        assert torch.equal(exported[key], p.detach().lerp(often.optimizer.state[p]["z"], 1 - 1 / 0.9)), name


# -- several processes -------------------------------------------------------------------------------------------------


def _train(model, clips, root, cache, names):
    found = {}
    for name in names:
        options = options_of(name, cache, method="lora", train__steps=3)
        made = runs.run(model, clips, root / name, **options)
        assert made.accelerator.num_processes == 2
        found[name] = runs.trained(made).tolist()
    return found


def test_ranks_stay_equal(tiny_ltx, clips, cache, tmp_path):
    names = ["muon", "adafactor", "came", "prodigy", "schedulefree", "lion8bit"]
    first, second = runs.forked(_train, tiny_ltx, clips, tmp_path, cache, names)
    assert first == second and len(first) == len(names)
