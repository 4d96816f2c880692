"""Posterior moments against the pipelines' own normalisation, in both directions."""

import pytest
import torch

from models import latents, load


@pytest.fixture(scope="module")
def vae(tiny_ltx):
    return load.load(tiny_ltx, "vae")


@pytest.fixture(scope="module")
def pixels():
    return torch.rand(2, 3, 9, 64, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_encode_is_the_vaes_posterior(vae, pixels):
    moments = latents.encode_moments(vae, pixels)
    assert moments.shape == (2, 32, 2, 2, 1) and moments.dtype == torch.float32 and not moments.requires_grad
    posterior = vae.encode(pixels).latent_dist
    assert torch.equal(moments, torch.cat([posterior.mean, posterior.logvar], 1).detach())


def test_log_variance_is_clamped():
    class Wild:
        device, dtype = "cpu", torch.float32

        def encode(self, x):
            from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

            self.latent_dist = DiagonalGaussianDistribution(
                torch.tensor([1.0, 99.0, 2.0, -99.0]).reshape(2, 2, 1, 1, 1)
            )
            return self

    moments = latents.encode_moments(Wild(), torch.zeros(2, 3, 1, 1, 1))
    assert moments.flatten().tolist() == [1.0, 20.0, 2.0, -30.0]


def test_draw_equals_the_pipelines_normalised_sample(vae, pixels):
    from diffusers import LTXPipeline

    posterior = vae.encode(pixels).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(2))
    sample = posterior.mean + posterior.std * noise
    expected = (sample - vae.latents_mean.view(1, -1, 1, 1, 1)) * 3.0 / vae.latents_std.view(1, -1, 1, 1, 1)
    moments = latents.normalize_moments(latents.encode_moments(vae, pixels), vae.latents_mean, vae.latents_std, 3.0)
    drawn = latents.draw(moments, noise)
    torch.testing.assert_close(drawn, expected.detach(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(drawn, latents.draw(moments, noise * 0))
    back = LTXPipeline._denormalize_latents(drawn, vae.latents_mean, vae.latents_std, 3.0)
    torch.testing.assert_close(back, sample.detach(), rtol=1e-5, atol=1e-5)


def test_scaling_factor_alone_is_exact(vae, pixels):
    moments = latents.encode_moments(vae, pixels)
    scaled = latents.normalize_moments(moments, scaling_factor=0.476986)
    mean, logvar = moments.chunk(2, 1)
    assert torch.equal(scaled[:, :16], mean * 0.476986)
    torch.testing.assert_close(torch.exp(0.5 * scaled[:, 16:]), torch.exp(0.5 * logvar) * 0.476986)


def test_moments_kept_in_bf16_are_drawn_in_float32():
    moments = torch.tensor([0.5, -4.0], dtype=torch.bfloat16).reshape(1, 2, 1, 1, 1)
    drawn = latents.draw(moments, torch.full((1, 1, 1, 1, 1), 2.0))
    assert drawn.dtype == torch.float32 and drawn.item() == pytest.approx(0.5 + 2 * torch.tensor(-2.0).exp().item())
