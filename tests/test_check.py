"""The conformance kit holds for every trainer and variant, and sees planted faults, naming the member at fault."""

import functools
import re

import pytest
import torch

import runs
from models.latents import encode_moments
from trainers import objectives
from trainers.check import Kit, main
from trainers.cog import CogVideoXTrainer
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.ltx import LTXTrainer

TRAINERS = {name: kind for kind in (LTXTrainer, HunyuanVideoTrainer, CogVideoXTrainer) for name in kind.tiny}
CHECKS = ["encoding", "oracle", "loss", "dropout", "gradients", "overfit", "runs"]


@pytest.fixture
def kit(built, tmp_path):
    """kit(a possibly faulty trainer, name of a tiny pipeline) -> its Kit."""
    return lambda kind, name: Kit(kind, built(name), tmp_path)


@pytest.mark.parametrize("name", TRAINERS)
def test_all_hold(kit, name):
    made = kit(TRAINERS[name], name)
    results = [result for check in CHECKS for result in getattr(made, f"check_{check}")()]
    assert [f"{r.name}: {r.figure}" for r in results if not r.holds] == []
    assert len(results) >= 17


# -- planted faults: (name, tiny pipeline, faulty trainer, check that sees it, what it says) ---------------------------


fed = functools.partial(runs.fed, LTXTrainer)


class FixedRate(LTXTrainer):
    def coordinates(self, fps_B, *where):
        return super().coordinates(torch.full_like(fps_B, 25.0), *where)


class OneFrameRope(LTXTrainer):
    """Time scaled by 1 / fps in place of 8 / fps."""

    def coordinates(self, fps_B, *where):
        return super().coordinates(fps_B, *where) | {"rope_interpolation_scale": (1 / 30, 32, 32)}


class NotCausal(LTXTrainer):
    """0.9.5 coordinates without the shift that gives the first frame its own position."""

    def coordinates(self, fps_B, f, h, w, like):
        ids = self.pretrained.pipeline_type._prepare_video_ids(len(fps_B), f, h, w, device=like.device).float()
        return {"video_coords": ids * torch.tensor([8 / 30, 32, 32])[None, :, None]}


class NotNormalised(LTXTrainer):
    def encode_video(self, pipe, pixels):
        return {"moments": encode_moments(pipe.vae, pixels)}


class RandomEncoding(LTXTrainer):
    def encode_video(self, pipe, pixels):
        found = super().encode_video(pipe, pixels)
        return {k: v + 0.1 * torch.randn_like(v) for k, v in found.items()}


class ShortText(LTXTrainer):
    text_length = 96


class BatchCoin(LTXTrainer):
    def drop_captions(self, batch):
        rows = (self.uniform("caption") < self.config.data.caption_dropout)[:1].expand(len(batch["text"]))
        return objectives.swap_rows(batch, self.unconditional, rows)


class TextWithoutMask(LTXTrainer):
    def drop_captions(self, batch):
        rows = self.uniform("caption") < self.config.data.caption_dropout
        return objectives.swap_rows(batch, {"text": self.unconditional["text"]}, rows)


class DropsAlways(LTXTrainer):
    def drop_captions(self, batch):
        return objectives.swap_rows(batch, self.unconditional, torch.ones(len(batch["text"]), dtype=torch.bool))


class BatchMean(LTXTrainer):
    def reduce(self, *arguments):
        loss = super().reduce(*arguments)
        return loss.mean().expand(len(loss))


class Scalar(LTXTrainer):
    def reduce(self, *arguments):
        return super().reduce(*arguments).mean()


class SharedNoise(LTXTrainer):
    def normal(self, name, shape):
        return super().normal(name, shape).flip(0)


class GlobalRandom(LTXTrainer):
    def uniform(self, name):
        GlobalRandom.calls = getattr(GlobalRandom, "calls", 0) + 1
        return (super().uniform(name) + 0.37 * GlobalRandom.calls) % 1


class DeadTarget(LTXTrainer):
    def loss(self, batch):
        return super().loss(batch | {"text": torch.zeros_like(batch["text"])}) * 0.0


FAULTS = {
    "sign": ("ltx", runs.flipped(LTXTrainer), "oracle", "target's sign"),
    "timestep in 0..1": ("ltx", fed(timestep=lambda t: t / 1000), "oracle", "timestep"),
    "whole timesteps": ("ltx", fed(timestep=lambda t: t.long()), "oracle", "timestep"),
    "noised input": ("ltx", fed(hidden_states=lambda x: x + 0.01), "oracle", "loss: noising"),
    "fixed frame rate": ("ltx", FixedRate, "oracle", "frames per second"),
    "fixed frame rate, 0.9.5": ("ltx-condition", FixedRate, "oracle", "frames per second"),
    "rope of one frame": ("ltx", OneFrameRope, "oracle", "scale of the positions"),
    "no causal shift": ("ltx-condition", NotCausal, "oracle", "causal shift"),
    "given tokens as noisy as the rest": (
        "ltx-condition",
        fed(timestep=lambda t: t.amax(-1, keepdim=True).expand_as(t)),
        "oracle",
        "0 where tokens are given",
    ),
    "no normalisation": ("ltx", NotNormalised, "oracle", "encode_video: normalisation"),
    "another text length": ("ltx", ShortText, "oracle", "encode_text"),
    "random encoding": ("ltx", RandomEncoding, "encoding", "encode_video"),
    "whole-batch dropout": ("ltx", BatchCoin, "dropout", "one draw per sample"),
    "text without its mask": ("ltx", TextWithoutMask, "dropout", "masks too"),
    "dropout at 0": ("ltx", DropsAlways, "dropout", "drop_captions"),
    "batch mean": ("ltx", BatchMean, "loss", "over the whole batch"),
    "scalar loss": ("ltx", Scalar, "loss", "self.reduce"),
    "noise by row": ("ltx", SharedNoise, "loss", "over the whole batch"),
    "dead loss": ("ltx", DeadTarget, "gradients", "lora_targets"),
    "hidden state": ("ltx", GlobalRandom, "runs", "self.normal and self.uniform"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(kit, fault):
    name, kind, check, hint = FAULTS[fault]
    faults = [r for r in getattr(kit(kind, name), f"check_{check}")() if not r.holds]
    assert faults, f"{fault} was not seen"
    assert any(hint in r.hint for r in faults), [r.hint for r in faults]


def test_command(tiny_ltx, capsys, monkeypatch):
    """Exit code 0 and a table; 1 with a fault, and the hint under it."""
    monkeypatch.setattr("trainers.check.CHECKS", (Kit.check_encoding, Kit.check_loss))
    with pytest.raises(SystemExit) as end:
        main(["trainers.ltx:LTXTrainer", "--model", str(tiny_ltx)])
    told = capsys.readouterr().out
    assert end.value.code == 0 and re.search(r"ok +loss is \[B\] float32", told) and "5 of 5 hold" in told
    with pytest.raises(SystemExit) as end:
        main(["test_check:BatchMean", "--model", str(tiny_ltx)])
    told = capsys.readouterr().out
    assert end.value.code == 1 and "FAULT a batch of two is two batches of one" in told and "look at loss" in told
    assert "4 of 5 hold, 1 do not" in told
