"""Samples are made when they are due, shared over ranks, and leave the training state exactly as it was."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from data.video import probe
from trainers.prompts import Prompt
from trainers.validation import Validation, as_uint8, evaluating, visiting

# -- when -------------------------------------------------------------------------------------------------------------


def planner(**options) -> Validation:
    options = SimpleNamespace(**{"every": 250, "at_start": True, "num_inference_steps": None} | options)
    trainer = SimpleNamespace(config=SimpleNamespace(validation=options), sample_defaults={})
    return Validation(trainer, [Prompt("a", None, 32, 32, 1)])


@pytest.mark.parametrize(
    ("options", "steps", "due"),
    [
        ({}, 600, [0, 250, 500, 600]),
        ({}, 500, [0, 250, 500]),
        ({"at_start": False}, 500, [250, 500]),
        ({"every": 0}, 600, [0, 600]),
        ({"every": 0, "at_start": False}, 600, [600]),
        ({"every": 1}, 3, [0, 1, 2, 3]),
    ],
)
def test_due(options, steps, due):
    validation, ran = planner(**options), []
    for step in range(steps + 1):
        for last in (False, step == steps):  # also when the loop asks twice about its last step
            if validation.due(step, last):
                ran.append(step)
                validation.last_run = step
    assert ran == due


def test_nothing_is_due_without_prompts():
    validation = planner()
    validation.prompts = []
    assert not validation.due(0, last=True)


# -- sampling ---------------------------------------------------------------------------------------------------------


class FakeTrainer:
    """The few members of a trainer that validation uses, around a tiny pipeline."""

    sample_defaults = {"num_inference_steps": 50, "guidance_scale": 2.0, "negative_prompt": "blurry"}

    def __init__(self, folder: Path, output_dir: Path, rank: int = 0, world: int = 1, steps: int | None = 2):
        from diffusers import DiffusionPipeline

        self.whole = DiffusionPipeline.from_pretrained(folder)
        self.whole.transformer.train()
        self.whole.transformer.proj_in.eval()  # a part with a mode of its own
        self.scheduler = self.whole.scheduler
        self.accelerator = SimpleNamespace(
            distributed_type="NO",
            process_index=rank,
            num_processes=world,
            is_main_process=rank == 0,
            device=torch.device("cpu"),
            autocast=contextlib.nullcontext,
        )
        options = SimpleNamespace(every=1, at_start=True, num_inference_steps=steps)
        memory = SimpleNamespace(context_parallel=1)
        self.config = SimpleNamespace(output_dir=str(output_dir), validation=options, memory=memory)
        self.calls, self.frames = [], []

    def pipeline(self, prompt: Prompt):
        import diffusers

        name = type(self.whole).__name__
        if prompt.image and name == "LTXPipeline":
            name = "LTXImageToVideoPipeline"
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        parts = {"vae": self.whole.vae, "transformer": self.whole.transformer, "scheduler": scheduler}
        return getattr(diffusers, name)(**parts, text_encoder=None, tokenizer=None)

    def prompt_rows(self, prompt) -> tuple[dict, dict]:
        assert not torch.is_grad_enabled()
        found = []
        for caption in (prompt.prompt, prompt.negative_prompt):
            text, mask = self.whole.encode_prompt([caption], do_classifier_free_guidance=False)[:2]
            found.append({"text": text, "text_mask": mask.bool()})
        return tuple(found)

    def sample(self, pipe, text, negative, **call):
        assert not any(m.training for m in pipe.transformer.modules())
        torch.rand(3)  # whatever a pipeline may draw from the global generator
        self.calls.append(call)
        rows = {"prompt": text, "negative_prompt": negative}
        embeds = {f"{k}_embeds": v["text"] for k, v in rows.items()}
        masks = {f"{k}_attention_mask": v["text_mask"] for k, v in rows.items()}
        self.frames.append(pipe(**embeds, **masks, output_type="np", **call).frames[0])
        return self.frames[-1]


def prompt(index: int, text: str = "a dog", **values) -> Prompt:
    base = {"height": 32, "width": 64, "num_frames": 9, "seed": 5, "name": f"{index:03d}-dog"}
    return Prompt(text, **base | values)


def made(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix in (".mp4", ".png")}


def test_samples_are_files_of_the_size_asked_for(tiny_ltx, tmp_path, capsys):
    Image.new("RGB", (90, 40), (200, 30, 30)).save(tmp_path / "first.png")
    prompts = [
        prompt(0, frame_rate=12, num_videos=2),
        prompt(1, num_frames=1),
        prompt(2, image=tmp_path / "first.png", num_inference_steps=3, guidance_scale=1.0, negative_prompt=""),
    ]
    trainer = FakeTrainer(tiny_ltx, tmp_path / "run")
    validation = Validation(trainer, prompts)
    assert [p.negative_prompt for p in validation.prompts] == ["blurry", "blurry", ""]
    assert validation.run(7) == 0
    folder = tmp_path / "run" / "samples" / "step-000007"
    samples = validation.results(7)
    assert [s.file.name for s in samples] == ["000-dog-5.mp4", "000-dog-6.mp4", "001-dog-5.png", "002-dog-5.mp4"]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*made(folder), "samples.json"])
    first = probe(samples[0].file)
    assert (first.frames, first.height, first.width, first.fps) == (9, 32, 64, 12)
    assert Image.open(samples[2].file).size == (64, 32)
    assert (trainer.frames[0] != trainer.frames[1]).any()  # two seeds
    assert trainer.calls[3]["image"].size == (64, 32)

    told = json.loads((folder / "samples.json").read_text())
    assert told["step"] == 7
    rows = told["samples"]
    assert (rows[0]["seed"], rows[1]["seed"]) == (5, 6)
    assert [r["num_inference_steps"] for r in rows] == [2, 2, 2, 3]
    assert [r["guidance_scale"] for r in rows] == [2.0, 2.0, 2.0, 1.0]
    assert [r["frame_rate"] for r in rows] == [12, 12, 25, 25]
    assert [r["pipeline"] for r in rows] == ["LTXPipeline"] * 3 + ["LTXImageToVideoPipeline"]
    assert rows[0]["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert rows[0]["negative_prompt"] == "blurry"
    assert len(rows[0]["scheduler_config_sha256"]) == 64
    assert capsys.readouterr().out.count("the first with LTXPipeline") == 1
    assert not validation.due(7, last=True)


def test_training_state_is_untouched(tiny_ltx, tmp_path):
    trainer = FakeTrainer(tiny_ltx, tmp_path)
    network = trainer.whole.transformer
    network.proj_out.requires_grad_(False)
    modes = [m.training for m in network.modules()]
    grads = [p.requires_grad for p in network.parameters()]
    weights = [p.clone() for p in network.parameters()]
    generator, timesteps = torch.get_rng_state(), trainer.scheduler.timesteps.clone()
    assert Validation(trainer, [prompt(0)]).run(1) == 0
    assert [m.training for m in network.modules()] == modes
    assert len(set(modes)) == 2
    assert [p.requires_grad for p in network.parameters()] == grads
    assert all(torch.equal(a, b) for a, b in zip(weights, network.parameters(), strict=True))
    assert all(p.grad is None for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(trainer.scheduler.timesteps, timesteps)  # the training scheduler is not the one that sampled


def test_ranks_share_the_samples(tiny_ltx, tmp_path):
    prompts = [prompt(0, num_videos=2), prompt(1, "the cat")]
    alone = FakeTrainer(tiny_ltx, tmp_path / "alone")
    torch.manual_seed(3)
    assert Validation(alone, prompts).run(1) == 0
    shares = {}
    for rank in (1, 0):
        torch.manual_seed(rank)
        trainer = FakeTrainer(tiny_ltx, tmp_path / "both", rank, 2)
        validation = Validation(trainer, prompts)
        assert validation.run(1) == 0
        shares[rank] = trainer.frames
    assert [s.file.name for s in validation.results(1)] == ["000-dog-5.mp4", "000-dog-6.mp4", "001-dog-5.mp4"]
    assert made(tmp_path / "both/samples/step-000001").keys() == made(tmp_path / "alone/samples/step-000001").keys()
    # The frames, not the files: x264 may write a video in other bytes the second time.
    assert len(alone.frames) == 3
    for ours, theirs in zip(alone.frames, [shares[0][0], shares[1][0], shares[0][1]], strict=True):
        assert (ours == theirs).all()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("height"), TypeError("x")])
def test_a_failing_sample_is_reported_and_the_others_are_made(tiny_ltx, tmp_path, capsys, error):
    class Failing(FakeTrainer):
        def sample(self, pipe, text, negative, **call):
            if call["num_frames"] == 17:
                raise error
            return super().sample(pipe, text, negative, **call)

    trainer = Failing(tiny_ltx, tmp_path)
    validation = Validation(trainer, [prompt(0, num_frames=17), prompt(1)])
    modes = [m.training for m in trainer.whole.transformer.modules()]
    assert validation.run(4) == 1
    assert [m.training for m in trainer.whole.transformer.modules()] == modes
    out = capsys.readouterr().out
    assert "sample 000-dog-5 failed" in out
    assert str(error) in out
    bad, good = validation.results(4)
    assert bad.file is None
    assert type(error).__name__ in bad.error
    assert good.file.exists()
    assert "1 of 2 samples" in capsys.readouterr().out
    rows = json.loads((tmp_path / "samples/step-000004/samples.json").read_text())["samples"]
    assert [r["file"] for r in rows] == [None, "001-dog-5.mp4"]
    assert str(error) in rows[0]["error"]

    assert (
        Validation(FakeTrainer(tiny_ltx, tmp_path), [prompt(0, num_frames=17), prompt(1)]).run(4) == 0
    )  # the run is repeated
    assert all(sample.file for sample in validation.results(4))
    assert not list(tmp_path.rglob("*.error.txt"))


def test_non_finite_frames_are_a_failure(tiny_ltx, tmp_path):
    trainer = FakeTrainer(tiny_ltx, tmp_path)
    with torch.no_grad():
        trainer.whole.transformer.proj_out.bias[0] = float("nan")
    validation = Validation(trainer, [prompt(0)])
    assert validation.run(1) == 1
    assert "NaN or infinite" in validation.results(1)[0].error
    assert not made(tmp_path / "samples/step-000001")


def test_a_stop_request_leaves_out_the_rest(tiny_ltx, tmp_path):
    trainer = FakeTrainer(tiny_ltx, tmp_path)
    validation = Validation(trainer, [prompt(0), prompt(1), prompt(2)])
    assert validation.run(1, stop=lambda: len(trainer.calls) == 1) == 0
    assert [sample.error for sample in validation.results(1)] == ["", "not sampled", "not sampled"]


def test_another_pipeline_and_folder(tiny_ltx, tmp_path):
    trainer, exported = FakeTrainer(tiny_ltx, tmp_path), []

    def pipeline(prompt):
        exported.append(prompt)
        return FakeTrainer.pipeline(trainer, prompt)

    validation = Validation(trainer, [prompt(0)])
    trainer.pipeline = None
    assert validation.run(3, pipeline=pipeline, folder="export") == 0
    assert (
        validation.results(3, pipeline=pipeline, folder="export")[0].file == tmp_path / "samples/export/000-dog-5.mp4"
    )
    assert len(exported) == 1  # a fresh network from files is dear: results needs none


def test_results_survive_a_pipeline_that_cannot_be_built(tiny_ltx, tmp_path):
    def pipeline(prompt):
        raise torch.OutOfMemoryError("no room")

    validation = Validation(FakeTrainer(tiny_ltx, tmp_path), [prompt(0)])
    assert validation.run(1, pipeline=pipeline) == 1
    assert "no room" in validation.results(1, pipeline=pipeline)[0].error


def test_condition_family_from_an_image(tiny_ltx_condition, tmp_path):
    Image.new("RGB", (90, 40), (200, 30, 30)).save(tmp_path / "first.png")
    trainer = FakeTrainer(tiny_ltx_condition, tmp_path)
    trainer.sample_defaults = {"num_inference_steps": 2, "decode_timestep": 0.05, "decode_noise_scale": 0.025}
    validation = Validation(trainer, [prompt(0, image=tmp_path / "first.png", extra={"image_cond_noise_scale": 0.0})])
    assert validation.run(1) == 0, validation.results(1)[0].error
    validation.results(1)
    [row] = json.loads((tmp_path / "samples/step-000001/samples.json").read_text())["samples"]
    assert (row["pipeline"], row["image_cond_noise_scale"]) == ("LTXConditionPipeline", 0.0)
    assert row["image"] == str(tmp_path / "first.png")


def test_visitor_goes_home_also_after_a_failure():
    class Traveller(nn.Linear):
        def to(self, device):
            trips.append(device)
            return self

    trips, away = [], torch.device("meta")
    with pytest.raises(RuntimeError), visiting(Traveller(1, 1), away):
        assert trips == [away]
        raise RuntimeError
    assert trips == [away, torch.device("cpu")]


def test_modes_come_back_also_after_a_failure():
    network = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    network[1].eval()
    with pytest.raises(RuntimeError), evaluating([network]):
        assert not any(m.training for m in network.modules())
        raise RuntimeError
    assert [m.training for m in network.modules()] == [True, True, False, False]


def test_frames_become_bytes():
    frames = torch.tensor([0.0, 0.5, 1.2]).expand(2, 4, 5, 3)
    assert as_uint8(frames)[1, 3, 4].tolist() == [0, 128, 255]
    assert as_uint8(frames.numpy())[0, 0, 0].tolist() == [0, 128, 255]
    bytes_ = torch.full((1, 2, 2, 3), 7, dtype=torch.uint8)
    assert torch.equal(as_uint8(bytes_), bytes_)
    for wrong in (frames[..., :2], frames[0], frames.long()):
        with pytest.raises(ValueError, match="must return"):
            as_uint8(wrong)
    with pytest.raises(ValueError, match="NaN"):
        as_uint8(frames * float("inf"))
