"""CogVideoX: what the conformance kit cannot know of it, its own pitfalls planted, and whole runs of its variants."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel, DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

import runs
from data.buckets import check_buckets
from data.video import probe
from models import latents, precision
from models.load import ModelError
from models.precision import PrecisionError
from trainers.check import Kit
from trainers.cog import CogVideoXTrainer
from trainers.config import OptionError
from trainers.oracle import Oracle
from trainers.parsing import parse
from trainers.plan import PlanError
from trainers.prompts import PromptError

NAMES = CogVideoXTrainer.tiny
IMAGES = [name for name in NAMES if "i2v" in name]
PUBLISHED = {
    "THUDM/CogVideoX-2b": "cogvideox-2b",
    "THUDM/CogVideoX-5b": "cogvideox-5b",
    "THUDM/CogVideoX-5b-I2V": "cogvideox-5b-i2v",
    "THUDM/CogVideoX1.5-5B": "cogvideox-1.5",
    "THUDM/CogVideoX1.5-5B-I2V": "cogvideox-1.5-i2v",
}
ROOT = Path(__file__).parents[1]
FRAMES, HEIGHT, WIDTH = 17, 32, 48  # the one size that the learned positions of 5b-i2v allow
EDGES = [0, 10, 500, 998, 999]


@pytest.fixture
def make(folders, clips, tmp_path):
    """A trainer on one of the tiny pipelines."""

    def make(name, out="run", kind=CogVideoXTrainer, **changes):
        return runs.trainer(kind, folders[name], clips, tmp_path / out, **({"data__buckets": ["17x32x48"]} | changes))

    return make


def videos(batch: int = 2, frames: int = FRAMES, seed: int = 1) -> torch.Tensor:
    small = torch.rand(batch, 3, 4, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return torch.nn.functional.interpolate(small, (frames, HEIGHT, WIDTH), mode="trilinear")


@torch.no_grad()
def encoded(trainer, pipe, clips: torch.Tensor) -> dict[str, torch.Tensor]:
    text = trainer.encode_text(pipe, ["a cat", "a dog on a monkey"][: len(clips)])
    return trainer.encode_video(pipe, clips) | text | {"fps": torch.full((len(clips),), 8.0)}


def asked(trainer, pipe, clips: torch.Tensor, t: int = 500, coin: float = 1.0) -> Oracle:
    """What `loss` feeds the network and teaches at timestep t."""
    trainer.slots = list(range(len(clips)))
    oracle = Oracle(trainer, encoded(trainer, pipe, clips), coin)
    oracle.ask((t + 0.5) / 1000)
    return oracle


# -- the objective ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cogvideox-2b", "cogvideox-5b"])
def test_plain_loss_is_the_published_weighted_one(make, pipes, name):
    """Published: recover the clean video from the predicted velocity, weigh its error by 1 / (1 - alpha_bar)."""
    alpha_bar = pipes[name].scheduler.alphas_cumprod
    assert alpha_bar.dtype == torch.float64 and alpha_bar[999] == 0
    draw = torch.Generator().manual_seed(0)
    x0, noise, answer = (torch.randn(1000, 64, generator=draw, dtype=torch.float64) for _ in range(3))
    a, s = alpha_bar.sqrt()[:, None], (1 - alpha_bar).sqrt()[:, None]
    clean = a * (a * x0 + s * noise) - s * answer
    published = (clean - x0).square().mean(1) / (1 - alpha_bar)
    plain = (answer - (a * noise - s * x0)).square().mean(1)
    torch.testing.assert_close(plain, published, rtol=1e-9, atol=0)

    trainer = make(name)
    torch.testing.assert_close(trainer.alphas, torch.stack([alpha_bar, 1 - alpha_bar]).sqrt().float(), rtol=0, atol=0)
    batch = encoded(trainer, pipes[name], videos())
    trainer.slots = [0, 1]
    for t in EDGES:
        seen = {}

        def network(seen=seen, t=t, **keywords):
            seen |= keywords
            return (torch.randn(keywords["hidden_states"].shape, generator=torch.Generator().manual_seed(t)),)

        trainer.model, trainer.noise_levels = network, lambda tokens, t=t: torch.full((2,), (t + 0.5) / 1000)
        loss = trainer.loss(dict(batch))
        assert seen["timestep"].tolist() == [t, t] and seen["timestep"].dtype == torch.int64
        x0 = latents.draw(batch["moments"], trainer.normal("posterior", tuple(batch["moments"][:, :16].shape)))
        x0, fed = x0.transpose(1, 2).double(), seen["hidden_states"].double()
        answer = network(**seen)[0].double()
        clean = alpha_bar[t].sqrt() * fed - (1 - alpha_bar[t]).sqrt() * answer
        published = (clean - x0).square().flatten(1).mean(1) / (1 - alpha_bar[t])
        torch.testing.assert_close(loss.double(), published, rtol=2e-5, atol=0)


@pytest.mark.parametrize("kind", ["the folder's", "DPM"])
@pytest.mark.parametrize("name", ["cogvideox-2b", "cogvideox-5b"])
def test_noising_and_target_are_the_schedulers(make, pipes, name, kind):
    """Whichever scheduler samples: they share alpha_bar. Compared in float64, where theirs is exact."""
    scheduler = pipes[name].scheduler
    scheduler = scheduler if kind != "DPM" else CogVideoXDPMScheduler.from_config(scheduler.config)
    trainer = make(name)
    oracle = asked(trainer, pipes[name], videos())
    x0 = oracle.batch["moments"].chunk(2, dim=1)[0].transpose(1, 2).double()
    for t in EDGES:
        oracle.ask((t + 0.5) / 1000)
        steps, noise = torch.tensor([t, t]), oracle.noise.double()
        fed, target = scheduler.add_noise(x0, noise, steps), scheduler.get_velocity(x0, noise, steps)
        torch.testing.assert_close(oracle.keywords["hidden_states"].double(), fed, rtol=0, atol=1e-6)
        torch.testing.assert_close(oracle.target.double(), target, rtol=0, atol=1e-6)
    pure = asked(trainer, pipes[name], videos(), t=999)
    assert torch.equal(pure.keywords["hidden_states"], pure.noise)  # zero terminal signal-to-noise


def test_timesteps_are_uniform_over_all_thousand(make, pipes):
    trainer = make("cogvideox-2b")
    assert trainer.config.noise.density == "uniform" and trainer.config.data.caption_technique == "zero"
    for u, expected in ((0.0, 0), (0.4996, 499), (1 - 2**-24, 999)):
        trainer.uniform = lambda name, u=u: torch.full((1,), u)
        assert (1000 * trainer.noise_levels(18)).long().tolist() == [expected]
    trainer = make("cogvideox-2b")
    trainer.slots = list(range(20000))
    counts = torch.bincount((10 * trainer.noise_levels(18)).long(), minlength=10)
    assert counts.min() > 1850 and counts.max() < 2150
    scheduler = pipes["cogvideox-2b"].scheduler
    scheduler.set_timesteps(50)
    assert [int(1000 * torch.tensor(trainer.level_of(scheduler, i))) for i in range(50)] == scheduler.timesteps.tolist()


def test_other_weightings_are_refused(make):
    with pytest.raises(OptionError, match=r"loss.weighting sigma_sqrt: .*1 / \(1 - alpha_bar\): use none"):
        make("cogvideox-2b", loss__weighting="sigma_sqrt")


# -- sizes ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_frames_that_survive_the_vae(pipes):
    """8k + 1 is needed and enough, for 1.5 too: 2k + 1 latent frames, one in front of them, is even for every k."""
    vae = pipes["cogvideox-1.5"].vae
    kept = []
    for frames in range(1, 35, 4):
        f = latents.encode_moments(vae, videos(1, frames)).shape[2]
        if vae.decode(torch.zeros(1, 16, f, 4, 6)).sample.shape[2] == frames:
            kept.append((frames, f, f + -f % 2))
    assert kept == [(1, 1, 2), (9, 3, 4), (17, 5, 6), (25, 7, 8), (33, 9, 10)]
    assert CogVideoXTrainer.frame_rule == (8, 1)


def test_front_padding(make, pipes):
    """One frame in front, the first once more, with noise of its own; it counts for nothing."""
    trainer = make("cogvideox-1.5")
    assert trainer.tokens(81, 768, 1360) == 22 // 2 * 48 * 85 and trainer.tokens(17, 32, 48) == 18
    assert make("cogvideox-5b").tokens(49, 480, 720) == 13 * 30 * 45
    oracle = asked(trainer, pipes["cogvideox-1.5"], videos(), t=0)
    x0 = oracle.batch["moments"].chunk(2, dim=1)[0].transpose(1, 2)
    assert oracle.keywords["hidden_states"].shape == (2, 6, 16, 4, 6) and x0.shape[1] == 5
    signal, spread = trainer.alphas[:, 0]
    expected = signal * torch.cat([x0[:, :1], x0], dim=1) + spread * oracle.noise
    torch.testing.assert_close(oracle.keywords["hidden_states"], expected)
    assert oracle.mask.flatten().tolist() == [False, True, True, True, True, True]
    prediction = oracle.target.clone()
    prediction[:, 0] = torch.nan
    assert CogVideoXTrainer.reduce(trainer, prediction, oracle.target, torch.ones(2), oracle.mask).tolist() == [0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_rotary_is_the_pipelines_own(make, pipes, name):
    trainer, pipe = make(name), pipes[name]
    for F, h, w in ((6, 4, 6), (4, 8, 4), (2, 10, 20)):
        ours = trainer.rotary(F, h, w, torch.device("cpu"))
        if name == "cogvideox-2b":
            assert ours is None
            continue
        theirs = pipe._prepare_rotary_positional_embeddings(8 * h, 8 * w, F, torch.device("cpu"))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert trainer.rotary(F, h, w, torch.device("cpu")) is ours


@pytest.mark.parametrize(
    ("name", "bucket", "reason"),
    [
        ("cogvideox-2b", "13x32x48", "13"),
        ("cogvideox-5b", "17x32x40", "width 40 is not a multiple of 16"),
        ("cogvideox-5b-i2v", "17x48x32", "17x48x32: the positions of this model are learned for 17x32x48 and no other"),
        ("cogvideox-5b-i2v", "9x32x48", "9x32x48: the positions of this model are learned for 17x32x48"),
        ("cogvideox-1.5", "9x272x32", "9x272x32: the positions of this model end at 256 .height. x 256 .width."),
        ("cogvideox-1.5-i2v", "1x32x48", "1x32x48: a still leaves an image-to-video model nothing to predict"),
    ],
)
def test_refused_sizes(make, name, bucket, reason):
    with pytest.raises(PlanError, match=reason):
        make(name, data__buckets=[bucket]).run()


# -- image-to-video ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_first_frame_is_in_the_channels_behind(make, pipes, name):
    """It alone decides them: the image in front (in 1.5 on the frame of padding), zeros after it."""
    clips = videos(1)
    other_start, other_rest = clips.clone(), clips.clone()
    other_start[:, :, 0] *= 0.5
    other_rest[:, :, 1:] *= 0.5

    def condition(clip):
        fed = asked(make(name, condition_variants=0), pipes[name], clip).keywords["hidden_states"]
        assert fed.shape[1:3] == ((6 if "1.5" in name else 5), 32)
        return fed[:, :, 16:]

    plain = condition(clips)
    assert plain[:, 0].std() > 0.05 and not plain[:, 1:].any()
    assert torch.equal(plain, condition(other_rest))
    assert (plain - condition(other_start)).abs().max() > 0.05
    with torch.no_grad():
        alone = pipes[name].vae.encode(clips[:, :, :1]).latent_dist.mean[:, :, 0]
        sliced = pipes[name].vae.encode(clips).latent_dist.mean[:, :, 0]
    torch.testing.assert_close(plain[:, 0], alone / 0.7 if "1.5" in name else alone * 0.7)
    assert (alone - sliced).abs().max() > 0.01


def test_condition_scales(make, pipes):
    name, found = "cogvideox-1.5-i2v", {}
    for scale in ("pipeline", "multiply", "one"):
        oracle = asked(make(name, condition_scale=scale), pipes[name], videos(1))
        found[scale] = oracle.keywords["hidden_states"][:, 0, 16:]
    torch.testing.assert_close(found["pipeline"], found["one"] / 0.7)
    torch.testing.assert_close(found["multiply"], found["one"] * 0.7)


def test_noisy_first_frames(make, pipes):
    """Deviation exp(N(-3, 0.5)); a function of content and number, not of the seed; the clean frame comes last."""
    trainer = make("cogvideox-1.5-i2v", condition_variants=3)
    frame = (videos(1)[0, :, :1] * 127.5).round() / 127.5
    first = trainer.first_frames(frame)
    assert first.shape == (4, 3, 1, HEIGHT, WIDTH) and torch.equal(first[-1], frame)
    assert torch.equal(first, trainer.first_frames(frame))
    assert torch.equal(first[:2], make("cogvideox-1.5-i2v", condition_variants=2).first_frames(frame)[:2])
    assert torch.equal(first, make("cogvideox-1.5-i2v", condition_variants=3, train__seed=7).first_frames(frame))
    noises = [made[0] - made[-1] for made in [first, first[1:], trainer.first_frames(frame.flip(0))]]
    for i, noise in enumerate(noises):
        assert all((noise - other).abs().max() > 0.01 for other in noises[:i])
    trainer.config.condition_variants = 1
    small = (torch.rand(600, 3, 1, 8, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1).unbind()
    deviations = torch.stack([(made[0] - made[1]).std().log() for made in map(trainer.first_frames, small)])
    assert abs(deviations.mean() + 3) < 0.08 and abs(deviations.std() - 0.5) < 0.05

    pipe, clips = pipes["cogvideox-1.5-i2v"], videos(2)
    trainer.config.condition_variants = 3
    one, two = (encoded(trainer, pipe, clips)["condition"] for _ in range(2))
    assert one.shape == (2, 4, 32, 4, 6) and torch.equal(one, two)
    keys = [make("cogvideox-1.5-i2v").video_facts(), trainer.video_facts(), make("cogvideox-1.5").video_facts()]
    assert keys[2] == {} and len({json.dumps(key) for key in keys}) == 3


def test_cache_knows_the_condition(make, tmp_path, capsys):
    """Clips are encoded anew for another number of variants, not for another scale, dropout or seed."""
    changes = {"data__cache_dir": tmp_path / "cache", "condition_variants": 1}
    make("cogvideox-5b-i2v", stage="precompute", **changes).run()
    for other, lacking in (
        ({"condition_scale": "one", "condition_dropout": 0.5}, 0),
        ({"condition_variants": 2}, 5),
        ({"train__seed": 7}, 0),
    ):
        capsys.readouterr()
        make("cogvideox-5b-i2v", "plan", stage="plan", **(changes | other)).run()
        assert f"clips: {5 - lacking} of 5 encoded already" in capsys.readouterr().out


def test_a_step_picks_a_noisy_frame_or_withholds_it(make, pipes):
    name = "cogvideox-5b-i2v"
    trainer = make(name, condition_variants=3, condition_dropout=0.2)
    batch = encoded(trainer, pipes[name], videos(1))
    marked = batch["condition"].clone()
    marked[:, :, :16] = torch.arange(1.0, 5.0)[None, :, None, None, None]
    marked[:, :, 16:] = -60.0  # no posterior noise
    trainer.slots, like = list(range(4000)), torch.zeros(1, 5, 16, 4, 6)
    seen = trainer.condition(marked.expand(4000, -1, -1, -1, -1), like.expand(4000, -1, -1, -1, -1))
    assert not seen[:, 1:].any()
    counts = torch.bincount((seen[:, 0].amax((1, 2, 3)) / 0.7).round().long(), minlength=5) / 4000
    assert counts[0].item() == pytest.approx(0.2, abs=0.02) and counts[4] == 0  # the clean one is never trained on
    assert counts[1:4].tolist() == pytest.approx([0.8 / 3] * 3, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_ofs(make, pipes, name):
    ofs = asked(make(name), pipes[name], videos(1)).keywords["ofs"]
    assert (ofs if ofs is None else ofs.tolist()) == ([2.0] if name == "cogvideox-1.5-i2v" else None)


# -- the kit, and faults planted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_oracle(folders, tmp_path, name):
    found = list(Kit(CogVideoXTrainer, folders[name], tmp_path).check_oracle())
    assert [f"{r.name}: {r.figure}" for r in found if not r.holds] == [] and len(found) == 5


def test_resume(folders, tmp_path):
    found = list(Kit(CogVideoXTrainer, folders["cogvideox-1.5-i2v"], tmp_path).check_runs())
    assert [r.name for r in found if r.holds] == [
        "the saved LoRA loads in the pipeline",
        "resume equals the unbroken run",
    ]


class Sliced(CogVideoXTrainer):
    """The condition cut out of the clip's latents."""

    def encode_video(self, pipe, pixels):
        found = super().encode_video(pipe, pixels)
        return found | {"condition": latents.encode_moments(pipe.vae, pixels)[:, None, :, 0]}


class InvertedVideo(CogVideoXTrainer):
    """invert_scale_latents taken to concern the video too."""

    def encode_video(self, pipe, pixels):
        moments = latents.encode_moments(pipe.vae, pixels)
        return super().encode_video(pipe, pixels) | {
            "moments": latents.normalize_moments(moments, scaling_factor=1 / pipe.vae.config.scaling_factor)
        }


class Multiplied(CogVideoXTrainer):
    def __init__(self, config):
        config.condition_scale = "multiply"
        super().__init__(config)


class UnpaddedRope(CogVideoXTrainer):
    def make_rotary(self, F, *where):
        return super().make_rotary(F - 2, *where)


class SliceRope(CogVideoXTrainer):
    """1.5's kind of positions for 1.0: equal at 480x720 only."""

    def example_size(self):
        return 17, 64, 48  # at the kit's own size the tiny one is at home, and both are equal

    def make_rotary(self, F, h, w, device):
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        size = (h // 2, w // 2)
        return get_3d_rotary_pos_embed(16, None, size, F, grid_type="slice", max_size=size, device=device)


class PaddedAtTheEnd(CogVideoXTrainer):
    """By a batch whose latents are turned round, and turned back for the network."""

    def loss(self, batch):
        model, reduce = self.model, self.reduce
        self.model = lambda **k: model(**(k | {"hidden_states": k["hidden_states"].flip(1)}))
        self.reduce = lambda prediction, target, level, mask: reduce(
            prediction, target.flip(1), level, None if mask is None else mask.flip(1)
        )
        try:
            return super().loss(batch | {"moments": batch["moments"].flip(2)})
        finally:
            self.model, self.reduce = model, reduce


class ShortText(CogVideoXTrainer):
    def encode_text(self, pipe, captions, images=None):
        return {"text": pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=224)[0]}


FAULTS = {
    "sign": ("cogvideox-2b", runs.flipped(CogVideoXTrainer), "target's sign"),
    "timesteps not whole": ("cogvideox-2b", runs.fed(CogVideoXTrainer, timestep=lambda t: t + 0.5), "timestep"),
    "224 text tokens": ("cogvideox-5b", ShortText, "encode_text"),
    "rope of the unpadded length": ("cogvideox-1.5", UnpaddedRope, "padded"),
    "rope of 1.5 in 1.0": ("cogvideox-5b", SliceRope, "image_rotary_emb"),
    "padding at the end": ("cogvideox-1.5", PaddedAtTheEnd, "where loss pads"),
    "video scaled inversely": ("cogvideox-1.5", InvertedVideo, "encode_video: normalisation"),
    "condition scaled as the video": ("cogvideox-1.5-i2v", Multiplied, "conditioning"),
    "condition sliced from the clip": ("cogvideox-5b-i2v", Sliced, "encode_video: the condition"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(folders, tmp_path, fault):
    name, kind, hint = FAULTS[fault]
    hints = [r.hint for r in Kit(kind, folders[name], tmp_path).check_oracle() if not r.holds]
    assert any(hint in text for text in hints), hints


# -- what does not fit ------------------------------------------------------------------------------------------------


def changed(folder, root, component, **settings):
    """A copy of a model folder with other settings in a config; None takes one out."""
    shutil.copytree(folder, root)
    file = next((root / component).glob("*config.json"))
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return root


def test_unfit(make, folders, tmp_path, tiny_ltx, clips):
    with pytest.raises(OptionError, match=r"condition_scale is for image-to-video models, but .* is text-to-video"):
        make("cogvideox-5b", condition_scale="one").run()
    two = make("cogvideox-2b", condition_variants=0, condition_dropout=0.5).unfit()
    assert len(two) == 2 and make("cogvideox-5b-i2v", condition_scale="one", condition_dropout=1).unfit() == []
    mixed = make("cogvideox-5b", components__transformer__id=folders["cogvideox-5b-i2v"])
    with pytest.raises(OptionError, match="is a CogVideoXPipeline, but its transformer takes 32 channels, not 16"):
        mixed.run()
    mixed = make("cogvideox-5b-i2v", components__transformer__id=folders["cogvideox-5b"])
    assert ["takes 16 channels, not 32" in text for text in mixed.unfit()] == [True]
    other = changed(folders["cogvideox-5b"], tmp_path / "epsilon", "scheduler", prediction_type="epsilon")
    with pytest.raises(OptionError, match="prediction_type is epsilon, CogVideoX's is v_prediction"):
        runs.trainer(CogVideoXTrainer, other, clips, tmp_path / "run").run()
    with pytest.raises(ModelError, match="this is a LTXPipeline, and this trainer is for CogVideoXPipeline or Cog"):
        runs.trainer(CogVideoXTrainer, tiny_ltx, clips, tmp_path / "run").run()


def test_keys_that_older_folders_lack(folders, clips, tmp_path):
    """diffusers' own defaults stand in for what the first published configs do not say."""
    newer = dict.fromkeys(("patch_size_t", "ofs_embed_dim", "patch_bias", "use_learned_positional_embeddings"))
    older = changed(folders["cogvideox-2b"], tmp_path / "older", "transformer", **newer)
    shutil.copy(changed(older, tmp_path / "o", "vae", invert_scale_latents=None) / "vae" / "config.json", older / "vae")
    made = runs.trainer(CogVideoXTrainer, older, clips, tmp_path / "run", data__buckets=["17x32x48"])
    assert made.unfit() == [] and made.tokens(49, 480, 720) == 13 * 30 * 45
    assert (made.net.patch_size_t, made.net.ofs_embed_dim, made.vae.invert_scale_latents) == (None, None, False)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_sampling_by_variant(make, name):
    trainer = make(name)
    small = name == "cogvideox-2b"
    assert trainer.half_precision == (("bf16", "fp16") if small else ("bf16",))
    trainer.config.precision.weights = "fp16"
    assert bool(precision.problems(trainer.config, trainer.half_precision)) is not small
    assert trainer.sample_scheduler == ("CogVideoXDDIMScheduler" if small else "CogVideoXDPMScheduler")
    rates = {"use_dynamic_cfg": not small, "frame_rate": 16.0 if "1.5" in name else 8.0}
    assert trainer.sample_defaults == {"num_inference_steps": 50, "guidance_scale": 6.0} | rates
    if not small:
        with pytest.raises(PrecisionError, match="fp16"):
            make(name, precision__weights="fp16")
        own = make(name, validation__scheduler="CogVideoXDDIMScheduler")
        assert own.sample_defaults["use_dynamic_cfg"] is False


@pytest.mark.parametrize(
    ("name", "prompt", "reason"),
    [
        ("cogvideox-5b-i2v", "- a cat", "line 1: image is missing"),
        ("cogvideox-5b", "- {prompt: a cat, image: first.png}", "image is not supported"),
        ("cogvideox-5b-i2v", "- {prompt: a cat, image: first.png, frames: 9}", "line 1: 9x32x48: the positions of"),
        ("cogvideox-1.5", "- {prompt: a cat, frames: 13}", "frames"),
    ],
)
def test_refused_prompts(make, tmp_path, name, prompt, reason):
    Image.new("RGB", (48, 32)).save(tmp_path / "first.png")
    (tmp_path / "prompts.yaml").write_text(prompt)
    with pytest.raises(PromptError, match=reason):
        make(name, validation__prompts=tmp_path / "prompts.yaml").run()


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "cog").glob("*.yaml")), ids=lambda file: file.name)
def test_configs(file, make, tmp_path):
    """They parse with nothing but data and output_dir given, and say nothing that the published folder would refuse."""
    words = ["--config", str(file), "--data.train", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    config = parse(CogVideoXTrainer.Config, words)
    config.check()
    name = PUBLISHED[config.model]
    trainer = make(name)
    sides = (300, 300) if trainer.net.patch_size_t else (60, 90)
    trainer.net.sample_frames, trainer.net.sample_height, trainer.net.sample_width = 49, *sides
    check_buckets(config.data.buckets, *trainer.size_rules())
    assert [b for b in config.data.buckets if trainer.refuse_bucket(b.frames, b.height, b.width)] == []
    assert precision.problems(config, trainer.half_precision) == []
    assert (config.method == "full") == ("full" in file.name) and (name in IMAGES) == ("i2v" in file.name)


# -- captions and samples ---------------------------------------------------------------------------------------------


def test_dropped_captions(make, pipes):
    for technique in ("zero", "empty"):
        trainer = make("cogvideox-5b", data__caption_dropout=1.0, data__caption_technique=technique)
        pipe, trainer.slots = pipes["cogvideox-5b"], [0, 1]
        with torch.no_grad():
            trainer.unconditional = trainer.encode_text(pipe, [""])
            batch = trainer.encode_text(pipe, ["a cat", "a dog"])
        dropped = trainer.drop_captions(batch)["text"]
        expected = trainer.unconditional["text"] if technique == "empty" else torch.zeros(1, 226, 32)
        assert torch.equal(dropped, expected.expand(2, -1, -1)) and dropped.shape == (2, 226, 32)
        trainer.config.data.caption_dropout = 0.0
        assert torch.equal(trainer.drop_captions(batch)["text"], batch["text"])


@pytest.mark.parametrize(
    ("dropout", "technique", "negative", "zeros"),
    [(0.1, "zero", "", True), (0.1, "zero", "blurry", False), (0.1, "empty", "", False), (0.0, "zero", "", False)],
)
def test_negative_embeddings(make, folders, dropout, technique, negative, zeros, monkeypatch):
    """Zeros where the run taught zeros and no negative prompt is given; the pipeline's own way otherwise."""
    trainer = make("cogvideox-5b", data__caption_dropout=dropout, data__caption_technique=technique)
    pipe = DiffusionPipeline.from_pretrained(folders["cogvideox-5b"])
    pipe.scheduler.register_to_config(timestep_spacing="leading")
    with torch.no_grad():
        text, against, trainer.unconditional = (trainer.encode_text(pipe, [t]) for t in ("a cat", negative, ""))
    seen = {}
    monkeypatch.setattr(type(pipe), "__call__", lambda self, **call: seen.update(call) or Frames([self.scheduler]))
    used = trainer.sample(pipe, text, against, num_frames=17, guidance_scale=6.0)
    assert used.config.timestep_spacing == "trailing"
    assert torch.equal(seen["prompt_embeds"], text["text"]) and seen["num_frames"] == 17
    expected = torch.zeros_like(against["text"]) if zeros else against["text"]
    assert torch.equal(seen["negative_prompt_embeds"], expected)


class Frames:
    def __init__(self, frames):
        self.frames = frames


# -- whole runs -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer(network, images: bool) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    pad = 1 if network.config.patch_size_t else 0
    inputs = {
        "hidden_states": torch.randn(1, 5 + pad, 32 if images else 16, 4, 6, generator=draw),
        "encoder_hidden_states": torch.randn(1, 226, 32, generator=draw),
        "timestep": torch.tensor([500]),
        "ofs": torch.tensor([2.0]) if network.config.ofs_embed_dim else None,
    }
    return network(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_run(make, folders, cache, tmp_path, name, method):
    """Trains with dropped captions, samples, exports; a plain pipeline gives what the trained network gives."""
    images, out = name in IMAGES, tmp_path / "run"
    Image.new("RGB", (60, 40), (90, 140, 20)).save(tmp_path / "first.png")
    image = ", image: first.png" if images else ""
    (tmp_path / "prompts.yaml").write_text(f"- {{prompt: a cat, steps: 2, seed: 7{image}}}\n")
    changes = {"method": method, "validation__prompts": tmp_path / "prompts.yaml", "data__caption_dropout": 0.5}
    changes |= {"optimizer__learning_rate": 1e-3} if method == "full" else {"lora__alpha": 12}
    changes["validation__at_start"] = method == "lora"
    made = make(name, train__steps=6, data__cache_dir=cache, **changes)
    made.run()
    trained = answer(made.network.eval(), images)

    if method == "lora":
        pipe = DiffusionPipeline.from_pretrained(folders[name])
        assert (answer(pipe.transformer, images) - trained).abs().max() > 1e-3
        pipe.load_lora_weights(out)
        loaded = pipe.transformer
        assert len(load_file(out / "pytorch_lora_weights_comfyui.safetensors")) == 8 * 3
    else:
        loaded = CogVideoXTransformer3DModel.from_pretrained(out, subfolder="transformer")
        base = CogVideoXTransformer3DModel.from_pretrained(folders[name], subfolder="transformer")
        still = [k for k, v in dict(base.named_parameters()).items() if torch.equal(v, loaded.get_parameter(k))]
        assert still == []
    torch.testing.assert_close(answer(loaded, images), trained, rtol=0, atol=1e-6)

    start, end = (out / "samples" / at / "000-a-cat-7.mp4" for at in ("step-000000", "step-000006"))
    found = probe(end)
    assert (found.frames, found.height, found.width, found.fps) == (17, 32, 48, 16 if "1.5" in name else 8)
    assert method == "full" or start.read_bytes() != end.read_bytes()
    facts = json.loads((end.parent / "samples.json").read_text())["samples"][0]
    assert facts["scheduler"] == made.sample_scheduler and facts["num_inference_steps"] == 2
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in runs.metrics(out))
    assert runs.metrics(out)[-1]["tokens_seen"] == 6 * (18 if "1.5" in name else 30)


def test_bf16_with_an_fp32_vae(make, tmp_path):
    """The pipeline itself cannot sample with a VAE of another precision than its latents."""
    Image.new("RGB", (48, 32)).save(tmp_path / "first.png")
    (tmp_path / "prompts.yaml").write_text("- {prompt: a cat, steps: 2, image: first.png}\n")
    changes = {"precision__weights": "bf16", "components__vae__dtype": "fp32", "data__cache_dtype": "bf16"}
    made = make("cogvideox-1.5-i2v", validation__prompts=tmp_path / "prompts.yaml", **changes)
    made.run()
    assert len(list((tmp_path / "run" / "samples").glob("*/*.mp4"))) == 2
    assert made.pretrained.vae.dtype == torch.float32 and next(made.network.parameters()).dtype == torch.bfloat16


def test_compiled_blocks(make, cache):
    """The network does not say which of its blocks repeat; the trainer does."""
    plain = make("cogvideox-5b", data__cache_dir=cache)
    compiled = make("cogvideox-5b", "compiled", data__cache_dir=cache, memory__compile="blocks")
    compiled.config.memory.compile_backend = "eager"
    for trainer in (plain, compiled):
        trainer.run()
    blocks = compiled.network.transformer_blocks
    assert all(block._compiled_call_impl is not None for block in blocks)
    torch.testing.assert_close(runs.trained(compiled), runs.trained(plain), rtol=0, atol=1e-5)
