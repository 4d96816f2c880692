"""Validation: prompts files in every form, and samples that leave the training state exactly as it was."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from data.buckets import Bucket
from data.video import probe
from trainers.validation import Prompt, PromptError, Validation, as_uint8, evaluating, read_prompts, visiting

BUCKET = Bucket.parse("9x32x64")
CONFIG = SimpleNamespace(train=SimpleNamespace(seed=42))


def text_call(
    self,
    prompt=None,
    negative_prompt=None,
    height: int = 512,
    width: int = 704,
    num_frames: int = 161,
    frame_rate: int = 25,
    num_inference_steps: int = 50,
    guidance_scale: float = 3,
    guidance_rescale: float = 0.0,
    use_tricks: bool = False,
    decode_timestep: float | list[float] = 0.0,
    prompt_embeds=None,
    generator=None,
    num_videos_per_prompt: int = 1,
): ...


def image_call(self, image=None, prompt=None, guidance_rescale: float = 0.0, image_cond_noise_scale: float = 0.15): ...


def read(folder: Path, text: str, name: str = "prompts.yaml") -> list[Prompt]:
    path = folder / name
    path.write_bytes(text.encode())
    return read_prompts(path, text_call, BUCKET, CONFIG, image_call, frame_rule=(8, 1), side_rule=32)


def problems(folder: Path, text: str, name: str = "prompts.yaml") -> list[str]:
    with pytest.raises(PromptError) as caught:
        read(folder, text, name)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# -- prompts files ----------------------------------------------------------------------------------------------------


def test_one_prompt_per_line(tmp_path):
    text = "\ufeffa dog, running\r\n\r\n  # a comment\r\nthe cat: \u732b\u2028on a mat\n"
    first, second = read(tmp_path, text, "prompts.txt")
    assert first == Prompt("a dog, running", None, 32, 64, 9, seed=42, name="000-a-dog-running")
    assert second.prompt == "the cat: \u732b\u2028on a mat"
    assert second.name == "001-the-cat-on-a-mat"


def test_yaml_with_defaults_short_names_and_types(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "first.png")
    first, second, third, fourth = read(
        tmp_path,
        """
defaults: {fps: 24, steps: 30, guidance: 1e0, negative_prompt: bad}
prompts:
  - a plain one
  - prompt: 1984
    frames: 17
    height: 64
    width: 96
    seed: 7
    videos: 3
    guidance_rescale: 1e-3
    use_tricks: on
    decode_timestep: [0.05, 5e-2]
  - {prompt: "007", image: first.png, negative_prompt: null, image_cond_noise_scale: .025}
  - {prompt: off, negative_prompt: "null", fps: 29.97, steps: null}
""",
    )
    assert first == Prompt("a plain one", "bad", 32, 64, 9, 24, 30, 1.0, 42, name="000-a-plain-one")
    assert (second.prompt, second.num_frames, second.height, second.width) == ("1984", 17, 64, 96)
    assert (second.seed, second.num_videos) == (7, 3)
    assert second.extra == {"guidance_rescale": 1e-3, "use_tricks": True, "decode_timestep": [0.05, 0.05]}
    assert (third.prompt, third.image, third.negative_prompt) == ("007", tmp_path / "first.png", None)
    assert third.extra == {"image_cond_noise_scale": 0.025}
    assert (fourth.prompt, fourth.negative_prompt, fourth.frame_rate) == ("off", "null", 29.97)
    assert fourth.num_inference_steps is None


def test_yaml_list_and_json(tmp_path):
    assert [p.prompt for p in read(tmp_path, "- a dog\n- 'b: c'\n")] == ["a dog", "b: c"]
    assert read(tmp_path, '[{"prompt": "a", "seed": 3}]', "p.json")[0].seed == 3


def test_all_problems_are_told_at_once(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n cut")
    found = problems(
        tmp_path,
        """
- {prompt: a, guidence_scale: 3}
- {prompt: b, stesp: 4, seed: -1, frames: 9.5}
- {prompt: c, height: 40, width: 64}
- {prompt: d, frames: 10}
- {prompt: e, height: 32}
- {prompt: f, image: gone.png}
- {prompt: g, image: bad.png}
- {prompt: h, num_videos_per_prompt: 2, prompt_embeds: 1}
- {prompt: i, use_tricks: maybe, guidance_rescale: high, guidance: high, fps: 0}
- {seed: 3}
- [a, b]
- {prompt: k, seed: 1, seed: 2}
""",
    )
    text = "\n".join(found)
    for line in (
        "prompts.yaml line 2: guidence_scale is no keyword of the pipeline; did you mean guidance_scale?",
        "prompts.yaml line 3: stesp is no keyword of the pipeline; did you mean steps?",
        "prompts.yaml line 3: seed must be 0 or more, not -1",
        "prompts.yaml line 3: num_frames must be a whole number, not 9.5",
        "prompts.yaml line 6: give both height and width, or neither",
        f"prompts.yaml line 7: image {tmp_path / 'gone.png'} does not exist",
        "prompts.yaml line 9: num_videos_per_prompt is given by the trainer and cannot be set here; use num_videos",
        "prompts.yaml line 9: prompt_embeds is given by the trainer and cannot be set here",
        "prompts.yaml line 10: use_tricks must be true or false, not 'maybe'",
        "prompts.yaml line 10: guidance_rescale must be a number, not 'high'",
        "prompts.yaml line 10: guidance_scale must be a number, not 'high'",
        "prompts.yaml line 10: frame_rate must be above 0, not 0",
        "prompts.yaml line 11: the prompt is missing or empty",
        "prompts.yaml line 12: must be a mapping of keywords, such as `prompt: ...`",
        "prompts.yaml line 13: seed is given twice",
    ):
        assert line in found, text
    assert any(line.startswith("prompts.yaml line 4: ") and "height 40" in line for line in found), text
    assert any(line.startswith("prompts.yaml line 5: ") and "10 frames" in line for line in found), text
    assert any(f"line 8: image {tmp_path / 'bad.png'} is not a readable image" in line for line in found), text
    assert len(found) == 18, text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"# nothing\n\n", "holds no prompts"),
        ("p.yaml", b"", "holds no prompts"),
        ("p.yaml", b"prompts:\n", "must be a list"),
        ("p.yaml", b"a dog\n", "must be a list"),
        ("p.yaml", b"a: [\n", "is not YAML"),
        ("p.yaml", b"promts: [a]\n", "'promts': a mapping here has only"),
        ("p.txt", "caf\u00e9".encode("latin-1"), "is not UTF-8"),
        ("p.csv", b"a\n", "must end in"),
        ("gone.txt", None, "cannot be read"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message):
        read_prompts(tmp_path / name, text_call, BUCKET, CONFIG)


def test_an_image_needs_a_pipeline_that_takes_one(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "first.png")
    (tmp_path / "p.yaml").write_text("- {prompt: a, image: first.png}\n")
    with pytest.raises(PromptError, match="line 1: image is not supported"):
        read_prompts(tmp_path / "p.yaml", text_call, BUCKET, CONFIG)


def test_names_are_safe_and_unique(tmp_path):
    texts = ["../../etc/passwd", "\u732b" * 400, "x" * 400, "x" * 400, "Caf\u00e9: NUL\x00/\\?*"]
    names = [p.name for p in read(tmp_path, json.dumps(texts), "p.json")]
    assert names == ["000-etc-passwd", "001", "002-" + "x" * 60, "003-" + "x" * 60, "004-cafe-nul"]


def test_real_pipelines_keywords_are_known(tmp_path):
    from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline

    Image.new("RGB", (8, 8)).save(tmp_path / "i.png")
    path = tmp_path / "p.yaml"
    path.write_text("- {prompt: a, decode_timestep: 0.05}\n- {prompt: b, image: i.png, guidance_rescale: 0.7}\n")
    found = read_prompts(path, LTXPipeline.__call__, BUCKET, CONFIG, LTXImageToVideoPipeline.__call__)
    assert [p.extra for p in found] == [{"decode_timestep": 0.05}, {"guidance_rescale": 0.7}]
    path.write_text("- {prompt: b, image: i.png, image_cond_noise_scale: 0, strength: 0.9}\n")
    [only] = read_prompts(path, LTXConditionPipeline.__call__, BUCKET, CONFIG)
    assert only.extra == {"image_cond_noise_scale": 0, "strength": 0.9}
    path.write_text("- {prompt: b, conditions: 1}\n")
    with pytest.raises(PromptError, match="conditions is given by the trainer"):
        read_prompts(path, LTXConditionPipeline.__call__, BUCKET, CONFIG)


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
            process_index=rank,
            num_processes=world,
            is_main_process=rank == 0,
            device=torch.device("cpu"),
            autocast=contextlib.nullcontext,
        )
        options = SimpleNamespace(every=1, at_start=True, num_inference_steps=steps)
        self.config = SimpleNamespace(output_dir=str(output_dir), validation=options)
        self.calls = []

    def pipeline(self, prompt: Prompt):
        import diffusers

        name = type(self.whole).__name__
        if prompt.image and name == "LTXPipeline":
            name = "LTXImageToVideoPipeline"
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        parts = {"vae": self.whole.vae, "transformer": self.whole.transformer, "scheduler": scheduler}
        return getattr(diffusers, name)(**parts, text_encoder=None, tokenizer=None)

    def text_rows(self, caption: str) -> dict:
        assert not torch.is_grad_enabled()
        text, mask = self.whole.encode_prompt([caption], do_classifier_free_guidance=False)[:2]
        return {"text": text, "text_mask": mask.bool()}

    def sample(self, pipe, text, negative, **call):
        assert not any(m.training for m in pipe.transformer.modules())
        torch.rand(3)  # whatever a pipeline may draw from the global generator
        self.calls.append(call)
        rows = {"prompt": text, "negative_prompt": negative}
        embeds = {f"{k}_embeds": v["text"] for k, v in rows.items()}
        masks = {f"{k}_attention_mask": v["text_mask"] for k, v in rows.items()}
        return pipe(**embeds, **masks, output_type="np", **call).frames[0]


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
    assert validation.texts() == ["a dog", "blurry", ""]
    assert validation.run(7) == 0
    folder = tmp_path / "run" / "samples" / "step-000007"
    samples = validation.results(7)
    assert [s.file.name for s in samples] == ["000-dog-5.mp4", "000-dog-6.mp4", "001-dog-5.png", "002-dog-5.mp4"]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*made(folder), "samples.json"])
    first = probe(samples[0].file)
    assert (first.frames, first.height, first.width, first.fps) == (9, 32, 64, 12)
    assert Image.open(samples[2].file).size == (64, 32)
    assert samples[0].file.read_bytes() != samples[1].file.read_bytes()
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
    for rank in (1, 0):
        torch.manual_seed(rank)
        trainer = FakeTrainer(tiny_ltx, tmp_path / "both", rank, 2)
        validation = Validation(trainer, prompts)
        validation.run(1)
        assert len(trainer.calls) == (2, 1)[rank]
    assert all(sample.file for sample in validation.results(1))
    assert made(tmp_path / "both/samples/step-000001") == made(tmp_path / "alone/samples/step-000001")
    assert len(made(tmp_path / "both/samples/step-000001")) == 3


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
