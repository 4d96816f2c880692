"""The objectives against closed forms, brute force and the libraries that first had them."""

import math
from statistics import NormalDist

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

import runs
from trainers import objectives as ob
from trainers.ltx import LTXTrainer

QUANTILES = torch.tensor([1e-4, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 1e-4], dtype=torch.float64)


def cosmap_cdf(sigma):
    """Integral of the density 2 / (pi (1 - 2 s + 2 s^2)) from 0 to sigma."""
    return 0.5 + (2 * sigma - 1).arctan() * 2 / math.pi


# -- densities of the noise level --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (-0.7, 0.4), (1.2, 2.0)])
def test_logit_normal_quantiles(mean, std):
    expected = [1 / (1 + math.exp(-(mean + std * NormalDist().inv_cdf(u)))) for u in QUANTILES.tolist()]
    found = ob.density(QUANTILES, "logit_normal", mean=mean, std=std)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


def test_uniform_is_the_identity():
    assert torch.equal(ob.density(QUANTILES, "uniform"), QUANTILES)


def test_cosmap_inverts_its_own_distribution_function():
    torch.testing.assert_close(cosmap_cdf(ob.density(QUANTILES, "cosmap")), QUANTILES, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1.29, -0.5, 1.75, -1.0])
def test_mode_is_diffusers_formula_and_monotone(scale):
    torch.manual_seed(0)
    theirs = compute_density_for_timestep_sampling("mode", 500, mode_scale=scale)
    torch.manual_seed(0)
    u = torch.rand(500)
    torch.testing.assert_close(ob.density(u, "mode", mode_scale=scale), theirs, rtol=0, atol=1e-6)
    steps = ob.density(torch.linspace(0, 1, 10001, dtype=torch.float64), "mode", mode_scale=scale).diff()
    assert steps.max() <= 1e-12  # the allowed scales are those that keep it monotone: truncation relies on it


@pytest.mark.parametrize("kind", ["logit_normal", "mode"])
def test_quantiles_of_a_sample_of_diffusers(kind):
    """Brute force: the sorted draws of diffusers' own function have the quantiles that ours computes."""
    n = 200_000
    torch.manual_seed(1)
    options = dict(logit_mean=0.3, logit_std=0.8) if kind == "logit_normal" else dict(mode_scale=1.29)
    draws = compute_density_for_timestep_sampling(kind, n, **options).double().sort().values
    own = ob.density(QUANTILES, kind, mean=0.3, std=0.8, mode_scale=1.29).sort().values
    assert (draws[(QUANTILES * n).long()] - own)[1:-1].abs().max() < 4e-3


@pytest.mark.parametrize("shift", [0.4, 3.0, math.exp(2.05)])
def test_a_shift_adds_its_logarithm_to_the_logit(shift):
    sigma = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    moved = ob.shift_levels(sigma, shift)
    torch.testing.assert_close(moved.logit(), sigma.logit() + math.log(shift), rtol=1e-9, atol=1e-9)
    together = ob.density(QUANTILES, "logit_normal", mean=0.2, std=1.5, shift=shift)
    apart = ob.density(QUANTILES, "logit_normal", mean=0.2 + math.log(shift), std=1.5)
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-12)


KINDS = [
    dict(kind="logit_normal", mean=0.5, std=0.7),
    dict(kind="logit_normal", shift=4.0),
    dict(kind="uniform", shift=2.5),
    dict(kind="mode", mode_scale=1.29),
    dict(kind="mode", mode_scale=-0.8, shift=0.5),
    dict(kind="cosmap", shift=1.7),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["kind"])
@pytest.mark.parametrize("low, high", [(0.2, 0.85), (0.0, 0.6), (0.7, 1.0), (0.5, 0.501)])
def test_truncation_is_the_density_given_that_it_lies_inside(kind, low, high):
    """Equal to throwing away what lies outside (rejection), quantile by quantile: nothing piles up at the bounds."""
    n = 100_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    everything = ob.density(u, **kind)
    inside = everything[(everything >= low) & (everything <= high)].sort().values
    levels = ob.noise_levels(u, low, high, **kind)
    assert levels.dtype == torch.float32 and levels.min() >= low and levels.max() <= high
    at = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    expected = inside[(at * len(inside)).long()]
    found = levels.double().sort().values[(at * n).long()]
    assert (expected - found).abs().max() < max(2e-3 * (high - low), 3 / len(inside) * (high - low))


def test_levels_stay_off_the_ends():
    u = torch.tensor([0.0, 1.0, 0.5])
    for kind in KINDS:
        levels = ob.noise_levels(u, **kind)
        assert levels.isfinite().all() and levels.min() >= 1e-6 and levels.max() <= 1 - 1e-6


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"beta.*logit_normal, uniform, mode or cosmap"):
        ob.density(QUANTILES, "beta")
    with pytest.raises(ValueError, match=r"min_snr.*none, sigma_sqrt or cosmap"):
        ob.level_weight(QUANTILES, "min_snr")
    with pytest.raises(ValueError, match=r"l1.*mse or huber"):
        ob.loss_per_sample(torch.zeros(1, 2), torch.zeros(1, 2), kind="l1")


# -- the noise levels of the LTX trainer -------------------------------------------------------------------------------


@pytest.fixture
def trainer(tiny_ltx, clips, tmp_path):
    def make(**changes) -> LTXTrainer:
        made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", **changes)
        made.slots = list(range(4000))
        return made

    return make


def test_ltx_shift_grows_with_the_tokens_and_is_clamped(trainer):
    shift = trainer().noise_shift
    assert shift(1024) == pytest.approx(math.exp(0.95))
    assert shift(2560) == pytest.approx(math.exp(1.5))
    assert shift(4096) == pytest.approx(math.exp(2.05))
    assert shift(13376) == shift(100_000) == pytest.approx(math.exp(2.05))  # unclamped, 13376 tokens have exp(5.4)
    assert shift(18) == pytest.approx(math.exp(0.95 - (1024 - 18) * 1.1 / 3072))


def test_ltx_shift_is_the_scheduler_s_own(trainer, tiny_ltx):
    """Between the two anchors it is the dynamic shift that the pipeline itself samples with."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

    config = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_ltx, subfolder="scheduler").config
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    for tokens in (1024, 1500, 3000, 4096):
        mu = calculate_shift(tokens, *(config[name] for name in names))
        assert trainer().noise_shift(tokens) == pytest.approx(math.exp(mu))


def test_options_reach_the_levels_that_are_drawn(trainer):
    drawn = trainer(noise__mean=-0.5, noise__std=0.5, noise__shift=2.0).noise_levels(4096)
    assert drawn.shape == (4000,) and drawn.dtype == torch.float32 and drawn.device.type == "cpu"
    logits = drawn.double().logit()
    assert logits.mean().item() == pytest.approx(-0.5 + math.log(2), abs=0.04)  # five standard errors
    assert logits.std().item() == pytest.approx(0.5, abs=0.03)
    assert trainer().noise_levels(4096).double().logit().mean().item() == pytest.approx(2.05, abs=0.08)
    bounded = trainer(noise__density="uniform", noise__shift=1.0, noise__min=0.25, noise__max=0.75).noise_levels(1)
    assert bounded.min() >= 0.25 and bounded.max() <= 0.75
    assert bounded.mean().item() == pytest.approx(0.5, abs=0.02)
    # cosmap: half of the mass where s < 1/2, F(0.25) = 0.5 - arctan(0.5) * 2 / pi
    cosmap = trainer(noise__density="cosmap", noise__shift=1.0).noise_levels(1)
    assert (cosmap < 0.25).float().mean().item() == pytest.approx(0.5 - math.atan(0.5) * 2 / math.pi, abs=0.04)
    mode = trainer(noise__density="mode", noise__mode_scale=0.0, noise__shift=1.0).noise_levels(1)
    assert (mode < 0.3).float().mean().item() == pytest.approx(0.3, abs=0.04)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_diffusers():
    sigma = torch.linspace(0.05, 0.95, 19)
    for kind in ("none", "sigma_sqrt", "cosmap"):
        torch.testing.assert_close(ob.level_weight(sigma, kind), compute_loss_weighting_for_sd3(kind, sigma))


def test_loss_is_float32_and_each_sample_s_own_mean():
    prediction, target = (
        torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.zeros(3, 5, 7),
    )
    loss = ob.loss_per_sample(prediction, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.stack([row.float().square().mean() for row in prediction]))


def test_masked_elements_do_not_count_whatever_they_hold():
    """Sample 0 keeps 2 of 4 tokens, sample 1 all: each is the mean over its own, so each weighs the same."""
    prediction = torch.tensor([[[1.0], [3.0], [7.0], [7.0]], [[1.0], [1.0], [1.0], [3.0]]], requires_grad=True)
    target = torch.zeros_like(prediction)
    mask = torch.tensor([[[True], [True], [False], [False]], [[True], [True], [True], [True]]])
    for kind in ("mse", "huber"):
        expected = [ob.loss_per_sample(prediction[:1, :2], target[:1, :2], kind=kind).item()]
        expected += [ob.loss_per_sample(prediction[1:], target[1:], kind=kind).item()]
        assert ob.loss_per_sample(prediction, target, mask, kind).tolist() == pytest.approx(expected)
    assert ob.loss_per_sample(prediction, target, mask).tolist() == [5.0, 3.0]

    for junk in (math.nan, math.inf, 1e30):
        filled = torch.where(mask, prediction.detach(), junk).requires_grad_()
        loss = ob.loss_per_sample(filled, target, mask)
        assert loss.tolist() == [5.0, 3.0]
        loss.mean().backward()
        # 2 e / count / B where it counts, exactly 0 elsewhere
        assert filled.grad.flatten().tolist() == pytest.approx([0.5, 1.5, 0, 0, 0.25, 0.25, 0.25, 0.75])


def test_mask_is_broadcast_over_channels():
    prediction, target = torch.ones(2, 4, 6), torch.zeros(2, 4, 6)
    prediction[:, 2:] = 5
    mask = (torch.arange(4) < 2)[None, :, None].expand(2, 4, 1)
    assert ob.loss_per_sample(prediction, target, mask).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("delta", [0.1, 1.0])
def test_huber_limits(delta):
    zero = torch.zeros(1, 1)
    small, large = torch.full((1, 1), 1e-2 * delta), torch.full((1, 1), 1e4 * delta)

    def huber(error):
        return ob.loss_per_sample(error, zero, kind="huber", huber_delta=delta).item()

    assert huber(small) == pytest.approx(small.item() ** 2, rel=1e-4)  # squared
    assert huber(-large) == pytest.approx(2 * delta * large.item(), rel=1e-3)  # linear, both signs
    assert huber(zero) == 0
    between = torch.full((1, 1), 0.37)
    assert huber(between) == pytest.approx(2 * delta * (math.sqrt(0.37**2 + delta**2) - delta))


def test_flow_ends_and_target():
    x0, noise = torch.randn(3, 4), torch.randn(3, 4)
    noisy = ob.flow(x0, noise, torch.tensor([0.0, 1.0, 0.25]))
    assert torch.equal(noisy[0], x0[0]) and torch.equal(noisy[1], noise[1])
    torch.testing.assert_close(noisy[2] - 0.25 * (noise - x0)[2], x0[2])


# -- rows --------------------------------------------------------------------------------------------------------------


def texts(lengths: list[int], longest: int) -> dict:
    """Rows of text padded to `longest`: row i is filled with i + 1 up to its length."""
    text, mask = torch.zeros(len(lengths), longest, 2), torch.zeros(len(lengths), longest, dtype=torch.bool)
    for i, length in enumerate(lengths):
        text[i, :length], mask[i, :length] = i + 1, True
    return {"text": text, "text_mask": mask}


@pytest.mark.parametrize("other", [2, 3, 6], ids=["shorter", "equal", "longer"])
def test_swapped_rows_take_the_other_s_text_and_mask(other):
    batch = texts([3, 1, 2], 3) | {"moments": torch.ones(3, 4)}
    row = {"text": torch.full((1, other, 2), 9.0), "text_mask": torch.ones(1, other, dtype=torch.bool)}
    out = ob.swap_rows(batch, row, torch.tensor([False, True, False]))
    longest = max(3, other)
    assert out["text"].shape == (3, longest, 2) and out["text_mask"].shape == (3, longest)
    assert out["moments"] is batch["moments"]
    assert out["text_mask"].sum(1).tolist() == [3, other, 2] and out["text_mask"].dtype == torch.bool
    assert (out["text"][1, :other] == 9).all() and (out["text"][1, other:] == 0).all()
    for i in (0, 2):
        assert torch.equal(out["text"][i, :3], batch["text"][i]) and (out["text"][i, 3:] == 0).all()
    assert batch["text"].shape == (3, 3, 2)  # the batch itself is left alone
    none = ob.swap_rows(batch, row, torch.zeros(3, dtype=torch.bool))
    assert torch.equal(none["text"][:, :3], batch["text"]) and torch.equal(none["text_mask"][:, :3], batch["text_mask"])


def test_swapped_rows_keep_the_batch_s_dtype():
    batch = {"text": torch.zeros(2, 3, 2, dtype=torch.bfloat16)}
    out = ob.swap_rows(batch, {"text": torch.ones(1, 3, 2)}, torch.tensor([True, False]))
    assert out["text"].dtype == torch.bfloat16 and out["text"][0].eq(1).all() and out["text"][1].eq(0).all()


def test_zeroed_rows():
    batch = texts([3, 2], 3)
    out = ob.zero_rows(batch, ("text",), torch.tensor([True, False]))
    assert out["text"][0].abs().sum() == 0 and torch.equal(out["text"][1], batch["text"][1])
    assert torch.equal(out["text_mask"], batch["text_mask"])  # named keys only
    assert batch["text"][0].abs().sum() > 0
    nan = {"text": torch.full((1, 2), math.nan)}
    assert ob.zero_rows(nan, ("text",), torch.tensor([True]))["text"].tolist() == [[0.0, 0.0]]


def test_torch_s_generator_is_neither_used_nor_moved():
    before = torch.get_rng_state()
    levels = ob.noise_levels(torch.rand(4, generator=torch.Generator().manual_seed(0)), 0.1, 0.9, **KINDS[0])
    noisy = ob.flow(torch.ones(4, 3), torch.zeros(4, 3), levels)
    ob.loss_per_sample(noisy, torch.zeros(4, 3)) * ob.level_weight(levels, "cosmap")
    ob.swap_rows({"text": noisy}, {"text": noisy[:1]}, levels > 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_zero_rows_keeps_a_mask_a_mask():
    batch = {"text": torch.ones(2, 3, 4, dtype=torch.bfloat16), "text_mask": torch.ones(2, 3, dtype=torch.bool)}
    out = ob.zero_rows(batch, ("text", "text_mask"), torch.tensor([True, False]))
    assert (out["text"].dtype, out["text_mask"].dtype) == (torch.bfloat16, torch.bool)
    assert out["text_mask"].tolist() == [[False] * 3, [True] * 3] and out["text"][1].all() and not out["text"][0].any()
