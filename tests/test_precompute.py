"""What is encoded again, and what is not: the rules of the cache's keys in whole runs."""

import multiprocessing
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import runs
from caches import CLIPS, TEXTS, encoded, entries, precompute
from data.cache import Cache
from trainers.ltx import LTXTrainer
from trainers.precompute import code_digest

pytestmark = pytest.mark.usefixtures("libraries")


def write(folder: Path, **captions: str) -> Path:
    """A folder of clips, 9 frames 64x96 each and different, with their captions."""
    folder.mkdir(exist_ok=True)
    for seed, (name, caption) in enumerate(captions.items()):
        runs.write_clip(folder / f"{name}.mp4", 9, 64, 96, 24, seed=seed)
        (folder / f"{name}.txt").write_text(caption)
    return folder


@pytest.fixture
def cache(filled, tmp_path) -> Path:
    """A copy of `filled`."""
    return shutil.copytree(filled, tmp_path / "cache")


# -- what is encoded again, and what is not -----------------------------------------------------------------------


def test_the_same_options_encode_nothing_and_load_nothing(tiny_ltx, clips, cache, log):
    before = entries(cache)
    precompute(tiny_ltx, clips, cache)
    assert log.loaded == [] and encoded(log) == (0, 0)
    assert entries(cache) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__learning_rate": 3e-4, "optimizer__name": "sgd", "train__steps": 9},
        {"lora__rank": 8, "method": "full"},
        {"train__batch_size": 2, "train__seed": 7, "data__caption_dropout": 0.5, "first_frame_p": 0.0},
        {"memory__vae_tiling": "off"},  # auto does not tile clips of this size either
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_no_encoding_depends_on_encodes_nothing(changes, tiny_ltx, clips, cache, log):
    before = entries(cache)
    precompute(tiny_ltx, clips, cache, **changes)
    assert encoded(log) == (0, 0)
    assert entries(cache) == before


@pytest.mark.parametrize(
    ("changes", "texts", "videos"),
    [
        ({"data__buckets": ["9x64x96", "9x96x64"]}, 0, 5),
        ({"data__buckets": ["17x64x96", "9x64x64"]}, 0, 2),
        ({"components__vae__dtype": "bf16"}, 0, CLIPS),
        ({"components__text_encoder__dtype": "bf16"}, TEXTS, 0),
        ({"precision__weights": "bf16"}, TEXTS, CLIPS),
        ({"data__cache_dtype": "bf16"}, TEXTS, CLIPS),
        ({"max_sequence_length": 64}, TEXTS, 0),
        ({"memory__vae_tiling": "on"}, 0, CLIPS),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_a_change_encodes_exactly_what_it_touches(changes, texts, videos, tiny_ltx, clips, cache, log):
    before = entries(cache)
    precompute(tiny_ltx, clips, cache, **changes)
    assert encoded(log) == (texts, videos)
    now = entries(cache)
    assert len(now) == len(before) + texts + videos and now.items() >= before.items()
    precompute(tiny_ltx, clips, cache)  # and back: the old entries are still there
    assert encoded(log) == (0, 0)


@pytest.mark.parametrize(
    ("file", "texts", "videos"),
    [
        ("vae/diffusion_pytorch_model.safetensors", 0, CLIPS),
        ("text_encoder/model.safetensors", TEXTS, 0),
        ("transformer/diffusion_pytorch_model.safetensors", 0, 0),
    ],
)
def test_other_weights_encode_what_they_make(file, texts, videos, tiny_ltx, clips, cache, log, tmp_path):
    other = shutil.copytree(tiny_ltx, tmp_path / "other")
    precompute(other, clips, cache)
    assert encoded(log) == (0, 0)  # the same weights in another folder
    weights = load_file(other / file)
    name = max(weights, key=lambda k: weights[k].numel())
    weights[name] = weights[name] * 1.01
    save_file(weights, other / file, {"format": "pt"})
    precompute(other, clips, cache)
    assert encoded(log) == (texts, videos)


def test_one_edited_caption_encodes_one_text(tiny_ltx, clips, cache, log, tmp_path):
    mine = shutil.copytree(clips, tmp_path / "clips")
    before = entries(cache)
    (mine / "wide_2.txt").write_text("a wide cat number two")
    precompute(tiny_ltx, mine, cache)
    assert log.texts == ["a wide cat number two"] and log.stored == ["caption 'a wide cat number two'"]
    assert encoded(log) == (1, 0)
    assert entries(cache).items() >= before.items()


def test_moved_renamed_touched_and_swapped_clips_encode_nothing(tiny_ltx, clips, cache, log, tmp_path):
    before = entries(cache)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for clip in clips.glob("*.mp4"):
        name = clip.stem.replace("wide", "broad")
        shutil.copyfile(clip, moved / f"{name}.mp4")  # with another time of change
        shutil.copyfile(clip.with_suffix(".txt"), moved / f"{name}.txt")
    precompute(tiny_ltx, moved, cache)
    assert encoded(log) == (0, 0)

    pairs = sorted((f"{p.stem}.mp4", p.read_text()) for p in moved.glob("*.txt"))
    for order in (pairs, pairs[::-1], pairs[3:] + pairs[:3]):
        (moved / "videos.txt").write_text("\n".join(video for video, _ in order))
        (moved / "prompts.txt").write_text("\n".join(caption for _, caption in order))
        precompute(tiny_ltx, moved, cache)
        assert encoded(log) == (0, 0)
    captions = [caption for _, caption in pairs]
    (moved / "videos.txt").write_text("\n".join(video for video, _ in pairs))
    (moved / "prompts.txt").write_text("\n".join(captions[1:] + captions[:1]))  # every clip has another's caption
    precompute(tiny_ltx, moved, cache)
    assert encoded(log) == (0, 0)
    assert entries(cache) == before


class Brighter(LTXTrainer):
    def encode_video(self, pipe, pixels):
        return super().encode_video(pipe, pixels * 0.5)


class Louder(LTXTrainer):
    def encode_text(self, pipe, captions, images=None):
        return super().encode_text(pipe, [caption.upper() for caption in captions])


@pytest.mark.parametrize(("kind", "counts"), [(Brighter, (0, CLIPS)), (Louder, (TEXTS, 0))])
def test_an_edited_encoder_does_not_meet_old_entries(kind, counts, tiny_ltx, clips, cache, log):
    precompute(tiny_ltx, clips, cache, kind=kind)
    assert encoded(log) == counts
    precompute(tiny_ltx, clips, cache, kind=kind)
    assert encoded(log) == (0, 0)


def test_the_digest_of_code_is_of_what_it_does():
    class A:
        def f(self, x):
            return x + 1

    class B:
        def f(
            self,
            x,
        ):
            """One more."""
            return x + 1  # a comment

    class C:
        def f(self, x):
            return x + 2

    assert code_digest(A().f) == code_digest(B().f) != code_digest(C().f)


def test_only_new_items_and_a_removed_clip_is_gone(tiny_ltx, tmp_path, log, capsys):
    data = write(tmp_path / "clips", one="a cat", two="a dog")
    cache = tmp_path / "cache"
    precompute(tiny_ltx, data, cache, data__buckets="9x64x96")
    assert encoded(log) == (3, 2)
    runs.write_clip(data / "three.mp4", 9, 64, 96, 24, seed=9)
    (data / "three.txt").write_text("a bunny")
    capsys.readouterr()
    precompute(tiny_ltx, data, cache, data__buckets="9x64x96")
    out = capsys.readouterr().out
    assert "captions: 3 of 4 encoded already, 1 to encode" in out
    assert "clips: 2 of 3 encoded already, 1 to encode" in out
    assert log.stored == ["caption 'a bunny'", f"{data / 'three.mp4'} at 9x64x96"]
    assert encoded(log) == (1, 1)
    (data / "one.mp4").unlink()
    (data / "one.txt").unlink()
    made = precompute(tiny_ltx, data, cache, stage="all", data__buckets="9x64x96", train__steps=2)
    assert encoded(log) == (0, 0)
    assert {Path(s.path).name for s in made.plan.samples} == {"two.mp4", "three.mp4"}
    rows = made.encoders.reader().entries["9x64x96"]
    assert len(rows) == 2 and len(Cache(cache).keys()) == 7  # its entries stay, for runs that want them


def test_cached_batches_are_read_ahead_by_no_process(start, monkeypatch):
    """To get one from a process takes as long as to read it. The threads give what is read without any."""
    from trainers import precompute as module

    read, seen = module.CachedRows.__call__, []

    class Watching(LTXTrainer):
        def after_step(self) -> None:
            super().after_step()
            seen.append((len(asked), len(multiprocessing.active_children())))

    asked = []
    monkeypatch.setattr(module.CachedRows, "__call__", lambda *what: asked.append(what) or read(*what))
    how = dict(train__steps=12, data__caption_dropout=0.3)
    ahead = start("ahead", Watching, data__num_workers=2, **how)
    assert {processes for _, processes in seen} == {0} and len(asked) == 12
    assert seen[0][0] >= 4
    assert runs.same(runs.trained(ahead), runs.trained(start("none", data__num_workers=0, **how)))


def test_equal_captions_and_equal_clips_are_encoded_once(tiny_ltx, tmp_path, log):
    data = write(tmp_path / "clips", a="a cat", b="a cat", c="a dog", d="")
    shutil.copyfile(data / "a.mp4", data / "copy.mp4")
    (data / "copy.txt").write_text("a dog")
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text(
        "- {prompt: a dog, negative_prompt: blurry}\n- {prompt: a bunny, negative_prompt: blurry}\n- a forest\n"
    )
    source = f'{{"path": "{data}", "allow_empty_captions": true}}'
    made = precompute(
        tiny_ltx, source, tmp_path / "cache", data__buckets="9x64x96", validation__prompts=prompts, train__steps=1
    )
    assert made.plan.total == 5
    assert sorted(log.texts) == ["", "a bunny", "a cat", "a dog", "a forest", "blurry"]
    assert encoded(log) == (6, 4)
    keys = {Path(s.path).name: made.encoders.video_keys(s)[0] for s in made.plan.samples}
    assert keys["a.mp4"] == keys["copy.mp4"] and len(set(keys.values())) == 4


def test_clip_and_still_of_one_name_are_two_entries(tiny_ltx, tmp_path, log):
    """Also clip.mp4 beside clip_1.mp4 and clip.mov: names are no keys."""
    from PIL import Image

    data = tmp_path / "clips"
    data.mkdir()
    for seed, name in enumerate(("clip.mp4", "clip_1.mp4", "clip.mov", "clip_1_9x64x96.mp4")):
        runs.write_clip(data / name, 9, 64, 96, 24, seed=seed)
    Image.new("RGB", (96, 64), (200, 30, 30)).save(data / "clip.png")
    names = ["clip.mp4", "clip.png", "clip_1.mp4", "clip.mov", "clip_1_9x64x96.mp4"]
    (data / "metadata.csv").write_text("file_name,caption\n" + "".join(f"{name},a cat\n" for name in names))
    made = precompute(tiny_ltx, data, tmp_path / "cache", data__buckets=["9x64x96", "1x64x96"])
    assert encoded(log) == (2, 5)
    rows = [made.encoders.cache.get(made.encoders.video_keys(s)[0])["moments"] for s in made.plan.samples]
    assert len({row.numpy().tobytes() for row in rows}) == 5
    assert sorted(row.shape[1] for row in rows) == [1, 2, 2, 2, 2]
