"""Training objectives as pure functions of tensors. Nothing here knows a model, a device or a random generator.

Letters: B batch; `sigma_B` is a noise level in [0, 1] per sample (1 is pure noise).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

Batch = dict[str, Tensor]
EDGE = 1e-7  # of the uniform numbers: their ends would map to levels 0 and 1 or to infinities

# Densities of the noise level as inverse distribution functions: uniform u in (0, 1) -> sigma in (0, 1).
# One uniform number per sample then serves every density, and a restricted range is a restricted range of u.


def expand(value_B: Tensor, like: Tensor) -> Tensor:
    """Trailing dimensions of size 1 added to value_B [B] until it broadcasts against `like` [B, ...]."""
    return value_B.view(-1, *[1] * (like.ndim - 1))


def to_device_of(value: Tensor, like: Tensor) -> Tensor:
    """`value` on the device of `like`. Does not wait for a GPU, as `.to` does until all its work is done."""
    return value.to(like.device, non_blocking=like.is_cuda)


def shift_levels(sigma: Tensor, shift: float) -> Tensor:
    """Moves noise levels towards 1: shift * s / (1 + (shift - 1) * s), SD3 paper (arXiv 2403.03206) eq. 23."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def density(
    u: Tensor, kind: str, mean: float = 0.0, std: float = 1.0, mode_scale: float = 1.29, shift: float = 1.0
) -> Tensor:
    """Noise levels with the density `kind`, from uniform numbers u in (0, 1), any shape.

    logit_normal: sigmoid(N(mean, std)); mode and cosmap: SD3 paper (arXiv 2403.03206) section 3.1. All are monotone.
    """
    if kind == "logit_normal":
        sigma = torch.sigmoid(mean + std * torch.special.ndtri(u))
    elif kind == "mode":
        sigma = 1 - u - mode_scale * (torch.cos(math.pi / 2 * u).square() - 1 + u)
    elif kind == "cosmap":
        sigma = 1 - 1 / (torch.tan(math.pi / 2 * u) + 1)
    elif kind == "uniform":
        sigma = u
    else:
        raise ValueError(f"unknown noise density {kind!r}: logit_normal, uniform, mode or cosmap")
    return shift_levels(sigma, shift)


def noise_levels(u_B: Tensor, low: float = 0.0, high: float = 1.0, **kind) -> Tensor:
    """The density `kind` (see `density`) restricted to [low, high]: truncated, not clamped, so no lump at the ends.

    [B] -> [B] float32, at least 1e-6 away from 0 and 1.
    """
    u = u_B.double().clamp(EDGE, 1 - EDGE)
    if low > 0 or high < 1:
        first, last = range_of_u(low, high, **kind)
        u = first + (last - first) * u
    # The search ends within 1e-16 of the bound; rounding to float32 may step over it.
    return density(u, **kind).float().clamp(max(low, 1e-6), min(high, 1 - 1e-6))


@lru_cache(maxsize=64)
def range_of_u(low: float, high: float, **kind) -> tuple[float, float]:
    """The uniform numbers that give the levels low and high, by bisection in float64: every density is monotone."""

    def level(u: float) -> float:
        return float(density(torch.tensor(u, dtype=torch.float64), **kind))

    rising = level(1 - EDGE) > level(EDGE)
    found = []
    for wanted in (low, high):
        a, b = EDGE, 1 - EDGE
        for _ in range(60):
            middle = (a + b) / 2
            a, b = (middle, b) if (level(middle) < wanted) == rising else (a, middle)
        found.append((a + b) / 2)
    return min(found), max(found)


def flow(x0: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    """Rectified flow's noisy input (1 - sigma) x0 + sigma noise; its target is `noise - x0` (arXiv 2209.03003)."""
    sigma = expand(sigma_B, x0)
    return (1 - sigma) * x0 + sigma * noise


def level_weight(sigma_B: Tensor, kind: str) -> Tensor:
    """Loss weight [B] of a noise level: none, sigma_sqrt (sigma ** -2) or cosmap, as in diffusers' SD3 training."""
    if kind == "none":
        return torch.ones_like(sigma_B)
    if kind == "sigma_sqrt":
        return sigma_B.square().reciprocal()
    if kind == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B.square()))
    raise ValueError(f"unknown loss weighting {kind!r}: none, sigma_sqrt or cosmap")


def loss_per_sample(
    prediction: Tensor, target: Tensor, mask: Tensor | None = None, kind: str = "mse", huber_delta: float = 0.1
) -> Tensor:
    """Loss of each sample in float32: [B, ...] -> [B]. `mask` (broadcastable) is True where the loss counts.

    The sum over a sample's own unmasked elements over their own count, so that every sample weighs the same.
    huber is d * (sqrt(e^2 + d^2) - d) * 2, the pseudo-Huber form: e^2 for small errors, 2 d |e| for large ones.
    """
    error = prediction.float() - target.float()
    if mask is not None:
        mask = mask.expand_as(error)
        # where, not a product, and before the square: a masked element may hold anything, NaN included, and NaN times
        # a gradient of 0 is NaN
        error = torch.where(mask, error, 0.0)
    if kind == "mse":
        error = error.square()
    elif kind == "huber":
        # The root minus d, written as a quotient: the difference would lose the digits of small errors.
        square = error.square()
        error = 2 * huber_delta * square / ((square + huber_delta**2).sqrt() + huber_delta)
    else:
        raise ValueError(f"unknown loss {kind!r}: mse or huber")
    if mask is None:
        return error.flatten(1).mean(1)
    return error.flatten(1).sum(1) / mask.flatten(1).sum(1)


def swap_rows(batch: Batch, other: Batch, rows_B: Tensor) -> Batch:
    """`batch` with the rows where rows_B [B] is True replaced by those of `other`, [1, ...] or [B, ...].

    Sequences of unequal length (dimension 1) are padded at the end with zeros (False) to the longer one.
    """
    out = dict(batch)
    for key, row in other.items():
        own = batch[key]
        if own.ndim > 1 and own.shape[1] != row.shape[1]:
            length = max(own.shape[1], row.shape[1])
            own, row = pad_to(own, length), pad_to(row, length)
        out[key] = torch.where(expand(to_device_of(rows_B, own), own), row.to(own), own)
    return out


def zero_rows(batch: Batch, keys: tuple[str, ...], rows_B: Tensor) -> Batch:
    """`batch` with the chosen rows of `keys` set to zero."""
    # masked_fill, for torch.where would turn a bool mask into integers
    return batch | {k: batch[k].masked_fill(expand(to_device_of(rows_B, batch[k]), batch[k]), 0) for k in keys}


def pad_to(sequence: Tensor, length: int) -> Tensor:
    """[B, L, ...] -> [B, length, ...], zeros (False) at the end."""
    extra = sequence.new_zeros(sequence.shape[0], length - sequence.shape[1], *sequence.shape[2:])
    return torch.cat([sequence, extra], dim=1)
