"""The oracle round trip: the real diffusers pipeline, its transformer replaced by the trainer's own target.

At every denoising step the fake transformer asks the trainer what it would have fed the network at that noise level,
and compares every keyword with what the pipeline feeds it. It answers with the trainer's target (and with rubbish where the
trainer's loss is masked). If sign, scale, timestep, packing and coordinates are right, the clip comes back.
"""

import types

import pytest
import torch
from diffusers import DiffusionPipeline, LTXImageToVideoPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

import runs
from data.batches import collate
from trainers.ltx import LTXTrainer
from trainers.precompute import rows

FPS, PROMPTS = 30.0, ["a cat", "the dog on a monkey"]  # of unlike lengths, so that a batch of two is padded
STEPS = 4


def videos(batch: int) -> torch.Tensor:
    """Smooth random clips [B, 3, 17, 64, 96] in [-1, 1] that share one first frame of 8 bits."""
    small = torch.rand(batch, 3, 4, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    clips = torch.nn.functional.interpolate(small, (17, 64, 96), mode="trilinear")
    clips[:, :, 0] = ((clips[:1, :, 0] + 1) * 127.5).round() / 127.5 - 1
    return clips


def first_image(clips: torch.Tensor) -> Image.Image:
    return Image.fromarray(((clips[0, :, 0].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy())


class Oracle:
    """What the trainer would feed the network at a given level and noise, and the target it would learn."""

    def __init__(self, trainer: LTXTrainer, pipe, clips: torch.Tensor, first: bool):
        self.trainer, size = trainer, len(clips)
        with torch.no_grad():
            video = rows(trainer.encode_video(pipe, clips), torch.float32, {})
            text = rows(trainer.encode_text(pipe, PROMPTS[:size]), torch.float32, trainer.trims)
        self.batch = collate([v | t for v, t in zip(video, text, strict=True)]) | {"fps": torch.full((size,), FPS)}
        mean = self.batch["moments"].chunk(2, dim=1)[0]
        self.shape, self.x0 = mean.shape, trainer.pack(mean)
        trainer.uniform = lambda name: torch.full((size,), 0.0 if first else 1.0)
        trainer.model = self.network

    def ask(self, sigma: float, noise: torch.Tensor) -> None:
        """Runs the trainer's loss at one level; noise [B, C, f, h, w]."""
        t = self.trainer
        t.normal = lambda name, shape: noise.view(shape) if name == "noise" else torch.zeros(shape)
        t.noise_levels = lambda tokens: torch.full((len(noise),), sigma)
        t.reduce = types.MethodType(LTXTrainer.reduce, t)
        loss, reduce = None, t.reduce

        def keep(prediction, target, sigma_B, mask=None):
            self.target, self.mask = target, torch.ones_like(target, dtype=torch.bool) if mask is None else mask
            return reduce(torch.where(self.mask, target, torch.nan), target, sigma_B, mask)

        t.reduce = keep
        loss = t.loss(self.batch)
        assert loss.shape == (len(noise),) and (loss == 0).all()  # NaN under the mask does not reach it

    def network(self, **keywords):
        assert keywords.pop("return_dict") is False
        self.keywords = keywords
        return (torch.zeros_like(keywords["hidden_states"]),)


def differences(pipeline: dict, trainer: dict) -> list[str]:
    """The keywords in which the two differ. Text may be cut after the batch's longest row, where the mask ends."""
    pipeline = {k: v for k, v in pipeline.items() if k not in ("attention_kwargs", "return_dict")}
    length = trainer["encoder_attention_mask"].shape[1]
    mask, trainer = pipeline["encoder_attention_mask"], dict(trainer)
    assert mask.shape[1] > length and not mask[:, length:].any()
    pipeline["encoder_attention_mask"] = mask[:, :length]
    pipeline["encoder_hidden_states"] = pipeline["encoder_hidden_states"][:, :length] * mask[:, :length, None]
    trainer["encoder_hidden_states"] = trainer["encoder_hidden_states"] * trainer["encoder_attention_mask"][..., None]
    return [k for k in sorted({*pipeline, *trainer}) if not same(pipeline.get(k), trainer.get(k))]


def same(a, b) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        alike = a.shape == b.shape and a.is_floating_point() == b.is_floating_point()
        return alike and torch.allclose(a.double(), b.double(), atol=2e-4, rtol=1e-4)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b and torch.is_tensor(a) == torch.is_tensor(b)


@pytest.fixture(autouse=True)
def no_posterior_noise(monkeypatch):
    """The pipelines draw their condition from the posterior; here they take its mean."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mean)


@torch.no_grad()
def round_trip(folder, clips_folder, tmp_path, family, first, batch, kind=LTXTrainer, spoil=None):
    """(keywords that differ, largest error of the latents that came back, of the decoded frames)."""
    made = runs.trainer(kind, folder, clips_folder, tmp_path / "run", first_frame_p=0.5)
    pipe = DiffusionPipeline.from_pretrained(folder)
    if family == "ltx" and first:
        pipe = LTXImageToVideoPipeline(**pipe.components)
    pipe.set_progress_bar_config(disable=True)
    clips = videos(batch)
    oracle = Oracle(made, pipe, clips, first)
    if spoil:
        spoil(oracle)
    call = dict(prompt=PROMPTS[:batch], height=64, width=96, num_frames=17, frame_rate=FPS, guidance_scale=1.0)
    call["num_inference_steps"] = STEPS
    noise = randn_tensor(oracle.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    if family == "ltx":
        tokens = oracle.shape[3] * oracle.shape[4]
        start = made.pack(noise)
        if first:
            start[:, :tokens] = oracle.x0[:, :tokens]
            call["image"] = [first_image(clips)] * batch
        call["latents"] = start
    elif first:
        call |= {"image": first_image(clips), "image_cond_noise_scale": 0.0}

    found: dict[str, int] = {}

    def fake(**keywords):
        level = float(pipe.scheduler.sigmas[fake.step])
        fake.step += 1
        oracle.ask(level, noise)
        for name in differences(keywords, oracle.keywords):
            found[name] = found.get(name, 0) + 1
        return (torch.where(oracle.mask, oracle.target, 7.0),)

    pipe.transformer.forward = fake
    results = []
    for output_type in ("latent", "pt"):
        fake.step = 0
        generator = {"generator": torch.Generator().manual_seed(3)} if family == "condition" else {}
        results.append(pipe(**call, **generator, output_type=output_type).frames)
        assert fake.step == STEPS
    got = results[0] if family == "ltx" else made.pack(results[0])
    raw = pipe.vae.encode(clips).latent_dist.mean
    timestep = torch.zeros(batch) if pipe.vae.config.timestep_conditioning else None
    decoded = pipe.video_processor.postprocess_video(
        pipe.vae.decode(raw, timestep, return_dict=False)[0], output_type="pt"
    )
    return found, (got - oracle.x0).abs().max().item(), (results[1] - decoded).abs().max().item()


@pytest.fixture
def folders(tiny_ltx, tiny_ltx_condition):
    return {"ltx": tiny_ltx, "condition": tiny_ltx_condition}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("first", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("family", ["ltx", "condition"])
def test_clip_comes_back(folders, clips, tmp_path, family, first, batch):
    found, latents, pixels = round_trip(folders[family], clips, tmp_path, family, first, batch)
    assert found == {}
    assert latents < 1e-4
    assert pixels < 2e-3


# -- negative controls: each planted fault must be seen ---------------------------------------------------------------


def flipped_sign(oracle):
    ask = oracle.ask
    oracle.ask = lambda *a: (ask(*a), setattr(oracle, "target", -oracle.target))


def keyword_fault(name, change):
    def spoil(oracle):
        network = oracle.network
        oracle.trainer.model = lambda **k: network(**(k | {name: change(k[name])}))

    return spoil


class OneFrameRope(LTXTrainer):
    """Time scaled by 1 / fps in place of 8 / fps."""

    def coordinates(self, *where):
        found = super().coordinates(*where)
        return found | {"rope_interpolation_scale": (1 / FPS, 32, 32)}


class FixedRate(LTXTrainer):
    """Every clip taken for 25 fps."""

    def coordinates(self, fps_B, *where):
        return super().coordinates(torch.full_like(fps_B, 25.0), *where)


class NotCausal(LTXTrainer):
    """0.9.5 coordinates without the shift that gives the first frame its own position."""

    def coordinates(self, fps_B, f, h, w, device):
        ids = self.pretrained.pipeline_type._prepare_video_ids(len(fps_B), f, h, w, device=device).float()
        return {"video_coords": ids * torch.tensor([8 / FPS, 32, 32])[None, :, None]}


class NotNormalised(LTXTrainer):
    def encode_video(self, pipe, pixels):
        from models.latents import encode_moments

        return {"moments": encode_moments(pipe.vae, pixels)}


class OneTimestep(LTXTrainer):
    """The given first frame told to the network as if it were as noisy as the rest."""

    def loss(self, batch):
        model = self.model
        self.model = lambda **k: model(
            **(k | {"timestep": k["timestep"].amax(-1, keepdim=True).expand_as(k["timestep"])})
        )
        try:
            return super().loss(batch)
        finally:
            self.model = model


FAULTS = {
    "sign": ("ltx", False, LTXTrainer, flipped_sign, None),
    "timestep in 0..1": ("ltx", False, LTXTrainer, keyword_fault("timestep", lambda t: t / 1000), "timestep"),
    "whole timesteps": ("ltx", False, LTXTrainer, keyword_fault("timestep", lambda t: t.long()), "timestep"),
    "rope of one frame": ("ltx", False, OneFrameRope, None, "rope_interpolation_scale"),
    "fixed frame rate": ("ltx", False, FixedRate, None, "rope_interpolation_scale"),
    "fixed frame rate, 0.9.5": ("condition", False, FixedRate, None, "video_coords"),
    "no causal shift": ("condition", False, NotCausal, None, "video_coords"),
    "one timestep for given tokens": ("condition", True, OneTimestep, None, "timestep"),
    "first frame noised": (
        "ltx",
        True,
        LTXTrainer,
        keyword_fault("hidden_states", lambda x: x + 0.01),
        "hidden_states",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen(folders, clips, tmp_path, name):
    family, first, kind, spoil, keyword = FAULTS[name]
    found, latents, _ = round_trip(folders[family], clips, tmp_path, family, first, 1, kind, spoil)
    if keyword:
        assert found.get(keyword) == 2 * STEPS
    else:
        assert latents > 0.1


def test_missing_normalisation_is_seen(folders, clips, tmp_path):
    _, _, pixels = round_trip(folders["ltx"], clips, tmp_path, "ltx", False, 1, NotNormalised)
    assert pixels > 0.01


@pytest.mark.parametrize("family", ["ltx", "condition"])
def test_text_is_the_pipelines_own(folders, clips, tmp_path, family):
    """Bit for bit, at the length that the pipeline's call uses, and the families differ."""
    made = runs.trainer(LTXTrainer, folders[family], clips, tmp_path / "run")
    pipe = DiffusionPipeline.from_pretrained(folders[family])
    with torch.no_grad():
        ours = made.encode_text(pipe, PROMPTS)
        text, mask, _, _ = pipe.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    assert ours["text"].shape[1] == {"ltx": 128, "condition": 256}[family]
    assert torch.equal(ours["text"], text)
    assert torch.equal(ours["text_mask"], mask.bool())
