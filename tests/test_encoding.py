"""The encode stage under trouble: damage, NaN, slow ranks, several launches; and what its latents and memory are."""

import os
import runpy
import shutil
import sys
import time
import weakref
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import runs
from caches import CLIPS, TEXTS, encoded, entries, precompute
from data.cache import Cache, NonFinite
from data.video import read_frames
from trainers.ltx import LTXTrainer
from trainers.plan import PlanError
from trainers.pretrained import Pretrained

pytestmark = pytest.mark.usefixtures("libraries")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cache(filled, tmp_path) -> Path:
    """A copy of `filled`."""
    return shutil.copytree(filled, tmp_path / "cache")


# -- damage and strangers -----------------------------------------------------------------------------------------


def test_strays_and_other_models_entries_do_no_harm(tiny_ltx, tiny_ltx_condition, clips, cache, log):
    ours = entries(cache)
    some = next(iter(ours))
    strays = [cache / "old.pt", cache / "latents.safetensors", cache / some[:2] / "readme.txt", cache / "ab.tmp"]
    for stray in strays:
        stray.write_bytes(b"not ours")
    precompute(tiny_ltx, clips, cache)
    assert encoded(log) == (0, 0)
    other = precompute(tiny_ltx_condition, clips, cache)
    assert encoded(log) == (TEXTS, CLIPS)
    theirs = entries(cache).keys() - ours.keys()
    wanted = {item.key for item in other.encoders.text_items() + other.encoders.video_items()}
    assert theirs == wanted and len(theirs) == TEXTS + CLIPS  # written set = read set, and none of the first model's
    assert all(stray.read_bytes() == b"not ours" for stray in strays)
    made = precompute(tiny_ltx, clips, cache, stage="train", train__steps=1)
    assert encoded(log) == (0, 0) and made.step == 1


@pytest.mark.parametrize("broken", ["half", "empty", "rubbish"])
def test_broken_entries_are_made_again_and_others_kept(broken, tiny_ltx, clips, cache, filled, log, caplog):
    before = entries(cache)
    made = precompute(tiny_ltx, clips, cache, stage="plan")
    keys = [made.encoders.text_items()[3].key, *(item.key for item in made.encoders.video_items()[2:4])]
    for key in keys:
        path = made.encoders.cache.path(key)
        content = path.read_bytes()
        path.write_bytes({"half": content[: len(content) // 2], "empty": b"", "rubbish": b"\xff" * 300}[broken])
    precompute(tiny_ltx, clips, cache)
    assert encoded(log) == (1, 2)
    assert sum("it will be made again" in message for message in caplog.messages) == 3
    now = entries(cache)
    assert {key for key in before if now[key] != before[key]} == set(keys)
    for key in keys:
        assert all(torch.equal(v, Cache(filled).get(key)[k]) for k, v in Cache(cache).get(key).items())


def test_stage_train_says_how_much_is_missing(tiny_ltx, clips, cache, log, tmp_path):
    made = precompute(tiny_ltx, clips, cache, stage="plan")
    texts, videos = made.encoders.text_items(), made.encoders.video_items()
    for item in texts[1:3] + videos[:2]:
        made.encoders.cache.path(item.key).unlink()
    made.encoders.cache.path(videos[4].key).write_bytes(b"half")
    with pytest.raises(PlanError) as error:
        precompute(tiny_ltx, clips, cache, stage="train")
    assert "2 of 8 captions and 3 of 7 clips are not encoded" in str(error.value)
    assert str(cache) in str(error.value) and "--stage precompute" in str(error.value)
    assert log.loaded == ["tokenizer"] and encoded(log) == (0, 0)  # the plan counted tokens with it
    with pytest.raises(SystemExit, match=r"error: .*2 of 8 captions and 3 of 7 clips"):
        LTXTrainer.main(runs.options(tiny_ltx, clips, tmp_path / "out", stage="train", data__cache_dir=cache))


def test_nan_from_the_vae_names_the_clip(tiny_ltx, clips, tmp_path, log, monkeypatch):
    """Refused; what was encoded before stays, and a healthy encoder goes on from there."""
    from diffusers import AutoencoderKLLTXVideo

    marked = read_frames(clips / "wide_3.mp4", 0, 17, 64, 96)[:, 0].float() / 127.5 - 1
    encode = AutoencoderKLLTXVideo.encode

    def sick(self, pixels, *arguments):
        same = pixels.shape[-2:] == marked.shape[-2:] and torch.allclose(pixels[0, :, 0].float(), marked, atol=1e-3)
        return encode(self, pixels * float("nan") if same else pixels, *arguments)

    cache = tmp_path / "cache"
    monkeypatch.setattr(AutoencoderKLLTXVideo, "encode", sick)
    with pytest.raises(NonFinite) as error:
        precompute(tiny_ltx, clips, cache)
    assert str(clips / "wide_3.mp4") in str(error.value) and "moments" in str(error.value)
    assert not any("wide_3" in source for source in log.stored)
    with pytest.raises(SystemExit, match=r"error: .*wide_3\.mp4 at 17x64x96"):
        LTXTrainer.main(runs.options(tiny_ltx, clips, tmp_path / "out", data__cache_dir=cache))
    monkeypatch.setattr(AutoencoderKLLTXVideo, "encode", encode)
    have = entries(cache)
    log.texts, log.clips, log.stored = [], 0, []
    precompute(tiny_ltx, clips, cache)
    assert encoded(log) == (0, TEXTS + CLIPS - len(have)) and len(have) >= TEXTS


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_from_the_text_encoder_names_the_caption(value, tiny_ltx, clips, tmp_path, log):
    class Sick(LTXTrainer):
        def encode_text(self, pipe, captions, images=None):
            rows = super().encode_text(pipe, captions)
            rows["text"][[caption == "a tall dog number 1" for caption in captions], 0, 0] = value
            return rows

    with pytest.raises(NonFinite, match=r"caption 'a tall dog number 1'.*text"):
        precompute(tiny_ltx, clips, tmp_path / "cache", kind=Sick, data__encode_batch_size=3)
    assert not any("tall dog number 1" in source for source in log.stored)
    assert log.clips == 0


# -- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["tiny_ltx", "tiny_ltx_condition"])
def test_latents_are_the_pipelines_own(family, request, clips, tmp_path):
    """Cached -> the pipeline's inverse -> decode is what the VAE alone makes of the clip."""
    from diffusers import AutoencoderKLLTXVideo, LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline

    model = request.getfixturevalue(family)
    made = precompute(model, clips, tmp_path / "cache")
    vae = AutoencoderKLLTXVideo.from_pretrained(model, subfolder="vae").eval()
    pipeline = LTXPipeline if family == "tiny_ltx" else LTXConditionPipeline
    constants = vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    assert vae.latents_std.max() > 1.4 and vae.latents_mean.abs().max() > 0.2
    time = {} if family == "tiny_ltx" else {"temb": torch.tensor([0.05])}
    for sample in made.plan.samples:
        frames, height, width = map(int, sample.bucket.split("x"))
        pixels = read_frames(Path(sample.path), 0, frames, height, width)[None] / 127.5 - 1
        mean, logvar = made.encoders.cache.get(made.encoders.video_keys(sample)[0])["moments"][None].chunk(2, dim=1)
        with torch.no_grad():
            posterior = vae.encode(pixels).latent_dist
            assert torch.equal(mean, LTXImageToVideoPipeline._normalize_latents(posterior.mode(), *constants))
            inverse = pipeline._denormalize_latents(mean, *constants)
            torch.testing.assert_close(inverse, posterior.mode(), rtol=1e-5, atol=1e-5)
            direct, ours = (vae.decode(z, return_dict=False, **time)[0] for z in (posterior.mode(), inverse))
            torch.testing.assert_close(ours, direct, rtol=1e-4, atol=1e-4)
            assert (vae.decode(mean, return_dict=False, **time)[0] - direct).abs().max() > 1e-2  # not normalised
            spread = pipeline._denormalize_latents(mean + torch.exp(0.5 * logvar), *constants) - inverse
            torch.testing.assert_close(spread, posterior.std, rtol=1e-4, atol=1e-5)


# -- ranks and launches -------------------------------------------------------------------------------------------


def encode_share(model, clips, cache, seconds: float, timeout: int) -> list:
    """One rank's part: [processes, sources it stored]; rank 0 takes `seconds` for each item."""
    stored, put = [], Cache.put

    def slow_put(self, key, tensors, note):
        if os.environ["RANK"] == "0":
            time.sleep(seconds)
        put(self, key, tensors, note)
        stored.append(note["source"])

    Cache.put = slow_put
    made = precompute(model, clips, cache, output_dir=cache.parent / "run", train__process_group_timeout=timeout)
    return [made.world, stored]


def test_two_ranks_share_the_work_and_wait_for_the_slow_one(tiny_ltx, clips, filled, tmp_path):
    cache = tmp_path / "cache"
    shares = runs.forked(encode_share, tiny_ltx, clips, cache, 0.5, 60)
    assert [world for world, _ in shares] == [2, 2]
    first, second = (sources for _, sources in shares)
    assert abs(len(first) - len(second)) <= 2 and len(first) + len(second) == TEXTS + CLIPS
    assert len(set(first + second)) == TEXTS + CLIPS  # each once
    for stored in (first, second):
        assert {source.startswith("caption") for source in stored} == {True, False}
    assert entries(cache).keys() == entries(filled).keys()


@pytest.mark.slow
def test_ranks_wait_as_long_as_the_option_says(tiny_ltx, clips, tmp_path):
    """The control of the test above: with process_group_timeout 1 the same wait fails."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*(Timed out|timeout)"):
        runs.forked(encode_share, tiny_ltx, clips, tmp_path / "cache", 1.0, 1)


def encode_only(only, model, clips, cache, pipe) -> None:
    loaded, component = [], Pretrained.component
    Pretrained.component = lambda self, name: loaded.append(name) or component(self, name)
    precompute(model, clips, cache, precompute_only=only, output_dir=cache.parent / f"only-{only}")
    pipe.send(loaded)


def launches(function, cases, *arguments) -> list:
    """function(case, *arguments, pipe) in one forked process per case, all at the same time; what they sent."""
    context, started = get_context("fork"), []
    for case in cases:
        here, there = context.Pipe()
        started.append((context.Process(target=function, args=(case, *arguments, there)), here))
    for process, _ in started:
        process.start()
    results = [pipe.recv() if pipe.poll(60) else None for _, pipe in started]
    for process, _ in started:
        process.join(60)
        assert process.exitcode == 0
    return results


def test_text_and_video_by_two_launches_into_one_cache(tiny_ltx, clips, filled, tmp_path, log):
    cache = tmp_path / "cache"
    text, video = launches(encode_only, ["text", "video"], tiny_ltx, clips, cache)
    assert sorted({*text}) == ["text_encoder", "tokenizer"] and text.count("text_encoder") == 1 and video == ["vae"]
    assert entries(cache).keys() == entries(filled).keys()
    made = precompute(tiny_ltx, clips, cache, stage="train", train__steps=3)
    assert made.step == 3
    assert log.loaded == ["transformer"] and encoded(log) == (0, 0)


def encode_all(case, model, clips, cache, pipe) -> None:
    precompute(model, clips, cache, output_dir=cache.parent / f"launch-{case}")
    pipe.send(True)


def test_equal_launches_at_the_same_time_do_not_harm_each_other(tiny_ltx, clips, filled, tmp_path):
    cache = tmp_path / "cache"
    assert launches(encode_all, range(3), tiny_ltx, clips, cache) == [True] * 3
    assert entries(cache).keys() == entries(filled).keys()
    assert not list((cache / "tmp").iterdir())


# -- encoders and memory ------------------------------------------------------------------------------------------


def test_encoders_are_gone_before_the_transformer_loads(tiny_ltx, clips, tmp_path, monkeypatch):
    """Text encoder, then VAE, then transformer: of the earlier ones no object is alive when the next is loaded."""
    alive, order, component = {}, [], Pretrained.component

    def load(self, name):
        order.append((name, sorted(n for n, reference in alive.items() if reference() is not None)))
        made = component(self, name)
        if name != "tokenizer":  # many-parted; its size does not matter
            alive[name] = weakref.ref(made)
        return made

    monkeypatch.setattr(Pretrained, "component", load)
    precompute(tiny_ltx, clips, tmp_path / "cache", stage="all", train__steps=1)
    assert [name for name, _ in order if name != "tokenizer"] == ["text_encoder", "vae", "transformer"]
    assert dict(order)["vae"] == [] and dict(order)["transformer"] == []


def test_precompute_off_keeps_nothing_on_the_disk(tiny_ltx, clips, tmp_path, log, monkeypatch):
    def touched(*arguments):
        raise AssertionError("the cache was used")

    for name in ("put", "get", "__contains__"):
        monkeypatch.setattr(Cache, name, touched)
    made = precompute(tiny_ltx, clips, tmp_path / "cache", stage="all", data__precompute="off", train__steps=3)
    assert made.step == 3 and log.clips == 3 and set(log.loaded) >= {"text_encoder", "vae"}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("broken", [None, "no such word"])
def test_the_example_runs(broken, tiny_ltx, clips, tmp_path, monkeypatch, capsys):
    """examples/precompute.py as a script, twice; and with a clip that lacks its caption."""
    mine = shutil.copytree(clips, tmp_path / "clips")
    if broken:
        (mine / "wide_1.txt").unlink()
    words = [str(ROOT / "examples" / "precompute.py"), str(tiny_ltx), str(mine), str(tmp_path / "cache"), "9x64x96"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", sys.path[:])
    if broken:
        with pytest.raises(SystemExit, match="wide_1"):
            runpy.run_path(words[0], run_name="__main__")
        return
    runpy.run_path(words[0], run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("encoded /") == 7 and out.endswith("7 of 7 clips encoded, the others were there\n")
    assert len(entries(tmp_path / "cache")) == 7
    runpy.run_path(words[0], run_name="__main__")
    assert capsys.readouterr().out == "0 of 7 clips encoded, the others were there\n"
