"""VAE posteriors as plain tensors, so that they can be stored once and drawn from at every step.

Letters: B batch, C latent channels, F H W frames and pixels, f h w latent sizes. Packing is each pipeline's own.
"""

import torch
from torch import Tensor


def encode_moments(vae, pixels: Tensor) -> Tensor:
    """Posterior of `pixels` [B, 3, F, H, W] in [-1, 1]: [B, 2C, f, h, w] float32, mean and log-variance, raw.

    Computed in the VAE's own device and dtype; the log-variance is clamped to [-30, 20], as diffusers clamps it.
    """
    with torch.no_grad():
        posterior = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    return torch.cat([posterior.mean, posterior.logvar], dim=1).float()


def normalize_moments(
    moments: Tensor, mean: Tensor | float = 0.0, std: Tensor | float = 1.0, scaling_factor: float = 1.0
) -> Tensor:
    """Posterior of (z - mean) * scaling_factor / std from the posterior of z, both [B, 2C, ...] float32.

    `mean`, `std`: one number, or one per channel [C] (VAE buffers or config). The log-variance moves with the scale.
    """
    z_mean, z_logvar = moments.float().chunk(2, dim=1)
    mean, std = (_per_channel(x, z_mean) for x in (mean, std))
    return torch.cat([(z_mean - mean) * scaling_factor / std, z_logvar + 2 * torch.log(scaling_factor / std)], dim=1)


def draw(moments: Tensor, noise: Tensor) -> Tensor:
    """One sample [B, C, f, h, w] float32 of the posterior `moments` [B, 2C, f, h, w], from standard normal `noise`."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean + torch.exp(0.5 * logvar) * noise


def _per_channel(x: Tensor | float, like: Tensor) -> Tensor:
    """A number or [C] as float32, shaped to broadcast over `like` [B, C, ...]."""
    return torch.as_tensor(x, dtype=torch.float32, device=like.device).reshape(-1, *[1] * (like.ndim - 2))
