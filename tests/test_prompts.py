"""Prompts files in every form: what they mean, and every problem told at once with its line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from data.buckets import Bucket
from trainers.prompts import Prompt, PromptError, read_prompts

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
