"""Equalities that hold whatever the layout: ranks, accumulation, batch size, where encodings come from, validation.

All of it through real runs of both LTX families on clips of three buckets, with captions of different lengths and
different frame rates within a bucket.
"""

import hashlib
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import runs
from trainers.ltx import LTXTrainer
from trainers.plan import Text

pytestmark = pytest.mark.usefixtures("libraries")

FRAME = 6  # tokens of one latent frame at 64x96


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Six clips of 17 frames 64x96, three of 9 frames 96x64, two stills; rates and lengths of captions differ."""
    from PIL import Image

    root = tmp_path_factory.mktemp("mixed")
    captions = ["a dog", "the bunny in the forest, a video of dance and style", "cat", "a cat on the blurry video"]
    for i in range(6):
        runs.write_clip(root / f"wide_{i}.mp4", 17, 64, 96, (24, 10, 30)[i % 3], seed=i)
        (root / f"wide_{i}.txt").write_text(f"{captions[i % 4]} {i}")
    for i in range(3):
        runs.write_clip(root / f"tall_{i}.mp4", 9, 96, 64, (12, 25)[i % 2], seed=10 + i)
        (root / f"tall_{i}.txt").write_text(captions[(i + 1) % 4])
    for i in range(2):
        pixels = np.random.RandomState(i).randint(0, 255, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96, 64), Image.Resampling.BICUBIC).save(root / f"still_{i}.png")
        (root / f"still_{i}.txt").write_text(captions[i])
    return root


@pytest.fixture(params=["tiny_ltx", "tiny_ltx_condition"])
def family(request):
    return request.getfixturevalue(request.param)


BUCKETS = ["17x64x96", "9x96x64", "1x64x96"]
MIXED = {
    "data__buckets": BUCKETS,
    "data__caption_dropout": 0.3,
    "first_frame_p": 0.5,
    "train__steps": 6,
    "optimizer__learning_rate": 1e-3,
}


class Watched(runs.recorded(LTXTrainer)):
    """Keeps what a run drew and fed: `draws` by (step, slot, name), `fed` by step: a dict per micro-batch."""

    junk = None  # what the network answers for tokens that are given, if not its own answer

    def __init__(self, config):
        super().__init__(config)
        self.draws: dict[tuple[int, int, str], float | str] = {}
        self.fed: list[dict] = []
        self.picked: list[tuple[int, str, list[int]]] = []

    def normal(self, name, shape):
        rows = super().normal(name, shape)
        for slot, row in zip(self.slots, rows, strict=True):
            self.draws[self.step, slot, name] = hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
        return rows

    def uniform(self, name):
        values = super().uniform(name)
        self.draws |= {(self.step, s, name): v for s, v in zip(self.slots, values.tolist(), strict=True)}
        return values

    def build(self):
        super().build()

        def before(module, args, kwargs):
            kept = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask")
            self.fed.append({name: kwargs[name].detach().clone() for name in kept} | {"step": self.step})

        def after(module, args, kwargs, output):
            if self.junk is None or kwargs["timestep"].shape != output[0].shape[:2]:
                return None
            return (torch.where(kwargs["timestep"][..., None] == 0, self.junk, output[0]),)

        self.network.register_forward_pre_hook(before, with_kwargs=True)
        self.network.register_forward_hook(after, with_kwargs=True)

    def loss(self, batch):
        loss = super().loss(batch)
        self.fed[-1] |= {"fps": batch["fps"], "moments": batch["moments"], "loss": loss.detach()}
        return loss

    def batches(self):
        finish = self.encoders.finish

        def watched(batch, bucket, picks):
            self.picked.append((self.step, bucket, picks))
            return finish(batch, bucket, picks)

        self.encoders.finish = watched
        yield from super().batches()


Watched.__name__ = LTXTrainer.__name__


def watch(model, clips, output_dir, kind=Watched, **changes) -> Watched:
    """A run of Watched."""
    made = runs.trainer(kind, model, clips, output_dir, **changes)
    made.run()
    return made


def facts(made: Watched) -> dict:
    """What two layouts of the same run must share, in plain values."""
    return {
        "world": made.accelerator.num_processes,
        "losses": {(step, slot): loss for step, slot, loss in made.records},
        "draws": made.draws,
        "weights": runs.trained(made).numpy(),
        "picked": made.picked,
        "step": made.step,
    }


def on_each_rank(model, clips, output_dir, changes) -> dict:
    return facts(watch(model, clips, output_dir, **changes))


def two_ranks(model, clips, output_dir, **changes) -> list[dict]:
    ranks = runs.forked(on_each_rank, model, clips, output_dir, changes)
    assert [rank["world"] for rank in ranks] == [2, 2]  # without this, nothing below proves anything
    return ranks


def assert_same_run(whole: dict, parts: list[dict]) -> None:
    """`parts` (of the ranks) together drew the same bits as `whole`, with losses and weights equal to 1e-5."""
    draws = {}
    for part in parts:
        assert not draws.keys() & part["draws"].keys()
        draws |= part["draws"]
    assert draws == whole["draws"]
    losses = {key: loss for part in parts for key, loss in part["losses"].items()}
    assert losses.keys() == whole["losses"].keys()
    assert losses == pytest.approx(whole["losses"], abs=1e-5)
    for part in parts:
        assert np.abs(part["weights"] - whole["weights"]).max() < 1e-5


# -- layouts of the same global batch ----------------------------------------------------------------------------------


def test_two_processes_equal_one_with_twice_the_accumulation(family, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache}
    one = facts(watch(family, mixed, tmp_path / "one", **options, train__gradient_accumulation_steps=4))
    two = two_ranks(family, mixed, tmp_path / "two", **options, train__gradient_accumulation_steps=2)
    assert one["world"] == 1
    assert_same_run(one, two)
    assert np.array_equal(two[0]["weights"], two[1]["weights"])
    rows = [runs.metrics(tmp_path / name) for name in ("one", "two")]
    for name in ("step", "lr", "samples_seen", "tokens_seen", "epoch"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in rows[0]] == pytest.approx([row[name] for row in rows[1]], abs=1e-5)


def test_every_slot_and_rank_draws_its_own(tiny_ltx, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache, "train__batch_size": 2, "train__gradient_accumulation_steps": 2}
    ranks = two_ranks(tiny_ltx, mixed, tmp_path / "two", **options)
    slots = [{slot for _, slot, _ in rank["draws"]} for rank in ranks]
    assert slots == [{0, 1, 4, 5}, {2, 3, 6, 7}]  # (micro * world + rank) * batch_size + row
    values = [value for rank in ranks for value in rank["draws"].values()]
    names = {name for _, _, name in ranks[0]["draws"]}
    assert names == {"posterior", "noise", "noise_level", "first_frame", "caption"}
    assert len(values) == 6 * 8 * len(names) == len(set(values))  # no two draws of the whole run are the same

    again = two_ranks(tiny_ltx, mixed, tmp_path / "again", **options)
    assert [rank["draws"] for rank in again] == [rank["draws"] for rank in ranks]
    other = two_ranks(tiny_ltx, mixed, tmp_path / "other", **options, train__seed=43)
    assert not {v for rank in other for v in rank["draws"].values()} & set(values)


def test_accumulation_of_one_equals_a_batch_of_four(family, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache}
    four = facts(watch(family, mixed, tmp_path / "four", **options, train__batch_size=4))
    one = facts(watch(family, mixed, tmp_path / "one", **options, train__gradient_accumulation_steps=4))
    two = watch(family, mixed, tmp_path / "two", **options, train__batch_size=2, train__gradient_accumulation_steps=2)
    assert_same_run(four, [one])
    assert_same_run(four, [facts(two)])
    for name in ("four", "one", "two"):  # the logged loss is the mean of the step's samples
        means = [np.mean([four["losses"][step, slot] for slot in range(4)]) for step in range(6)]
        assert runs.losses(tmp_path / name) == pytest.approx(means, abs=1e-5)


def test_logged_loss_is_the_mean_over_the_window(tiny_ltx, mixed, cache, tmp_path):
    made = watch(
        tiny_ltx, mixed, tmp_path / "run", **MIXED, data__cache_dir=cache, train__batch_size=2, train__log_every=4
    )
    rows = runs.metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [4, 6]
    losses = [np.mean([loss for step, _, loss in made.records if step in window]) for window in (range(4), (4, 5))]
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-6)


def test_a_batch_equals_its_samples_one_by_one(family, mixed, cache, tmp_path):
    """Each sample's loss is its own: padding of text, conditioning of neighbours, their frame rates change nothing."""
    options = MIXED | {"data__cache_dir": cache, "train__steps": 10, "optimizer__learning_rate": 1e-12}
    pairs = watch(family, mixed, tmp_path / "pairs", **options, train__batch_size=4)
    alone = watch(family, mixed, tmp_path / "alone", **options, train__gradient_accumulation_steps=4)
    losses = [{(step, slot): loss for step, slot, loss in made.records} for made in (pairs, alone)]
    assert len(losses[0]) == 40
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def differ(values) -> bool:
        return len(set(values)) > 1

    lengths = [differ(fed["encoder_attention_mask"].sum(1).tolist()) for fed in pairs.fed]
    rates = [differ(fed["fps"].tolist()) for fed in pairs.fed]
    coins = [differ([pairs.draws[step, slot, "first_frame"] < 0.5 for slot in range(4)]) for step in range(10)]
    frames = [fed["moments"].shape[2] > 1 for fed in pairs.fed]
    together = [all(found) for found in zip(lengths, rates, coins, frames, strict=True)]
    assert sum(together) >= 2  # batches that had all of it at once
    trimmed = [max(fed["encoder_attention_mask"].shape[1] for fed in made.fed) for made in (pairs, alone)]
    assert trimmed[0] < pairs.text_length and trimmed == [trimmed[0]] * 2  # no row is longer than its batch needs


# -- where the encodings come from, and what else may happen meanwhile -------------------------------------------------


@pytest.mark.parametrize("cache_dtype, weights", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_on_the_fly_equals_precomputed_bit_for_bit(family, mixed, tmp_path, cache_dtype, weights):
    options = MIXED | {"data__cache_dtype": cache_dtype, "precision__weights": weights, "train__batch_size": 2}
    disk = watch(family, mixed, tmp_path / "disk", **options)
    off = watch(family, mixed, tmp_path / "off", **options, data__precompute="off")
    assert disk.records == off.records and len(disk.records) == 12
    assert torch.equal(runs.trained(disk), runs.trained(off))
    for a, b in zip(disk.fed, off.fed, strict=True):
        for name in ("moments", "fps", "hidden_states", "encoder_hidden_states", "encoder_attention_mask"):
            assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name])
    assert disk.fed[0]["moments"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[cache_dtype]
    assert not list((tmp_path / "off").rglob("cache/??/*.safetensors"))


def test_a_run_with_validation_equals_one_without(family, mixed, cache, tmp_path):
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text(f"- {{prompt: a dog, frames: 9, steps: 2}}\n- {{prompt: cat, image: {mixed / 'still_0.png'}}}\n")
    options = MIXED | {"data__cache_dir": cache, "lora__dropout": 0.3, "train__steps": 5}
    plain = watch(family, mixed, tmp_path / "plain", **options)
    sampled = watch(
        family,
        mixed,
        tmp_path / "sampled",
        **options,
        validation__prompts=prompts,
        validation__every=2,
        validation__num_inference_steps=2,
    )
    folders = sorted((tmp_path / "sampled" / "samples").iterdir())
    assert [folder.name for folder in folders] == ["step-000000", "step-000002", "step-000004", "step-000005"]
    assert all(len(list(folder.glob("*.mp4"))) == 2 for folder in folders)  # they were really made
    assert plain.records == sampled.records
    losses = [[(row["loss"], row["grad_norm"]) for row in runs.metrics(made.output_dir)] for made in (plain, sampled)]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert torch.equal(runs.trained(plain), runs.trained(sampled))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_the_same_gradients(family, mixed, cache, tmp_path, dropout):
    found = {}
    for mode in ("none", "blocks"):
        gradients = []
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_, kept=gradients: kept.append(
                [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
            )
        )
        options = MIXED | {"data__cache_dir": cache, "train__steps": 3, "lora__dropout": dropout}
        made = watch(family, mixed, tmp_path / mode, **options, train__batch_size=2, memory__checkpointing=mode)
        hook.remove()
        assert made.network.is_gradient_checkpointing == (mode == "blocks")
        assert [len(step) for step in gradients] == [len(made.parameters)] * 3  # every trained tensor got one
        found[mode] = gradients, made.records, runs.trained(made)
    assert found["none"][1] == found["blocks"][1]
    for step, again in zip(found["none"][0], found["blocks"][0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, again, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in found["blocks"][0][-1])
    assert torch.equal(found["none"][2], found["blocks"][2])


# -- captions ----------------------------------------------------------------------------------------------------------


def encoded(made: Watched, caption: str) -> dict:
    return made.encoders.text(Text(caption))


def rows_of(fed: dict):
    return zip(fed["encoder_hidden_states"], fed["encoder_attention_mask"], strict=True)


@pytest.mark.parametrize("precompute", ["disk", "off"])
def test_caption_dropout_of_one_feeds_exactly_the_unconditional_rows(family, mixed, cache, tmp_path, precompute):
    options = MIXED | {"data__cache_dir": cache, "data__caption_dropout": 1.0, "train__batch_size": 2}
    made = watch(family, mixed, tmp_path / "run", **options, data__precompute=precompute)
    expected = encoded(made, "")
    assert encoded(made, "a dog 0")["text"].shape != expected["text"].shape
    length = len(expected["text"])
    for text, mask in (row for fed in made.fed for row in rows_of(fed)):
        assert torch.equal(text[:length], expected["text"]) and torch.equal(mask[:length], expected["text_mask"])
        assert not mask[length:].any() and not text[length:].any()
    assert len(made.fed) == 6


def test_zeroed_captions(family, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache, "train__batch_size": 2, "data__caption_technique": "zero"}
    made = watch(family, mixed, tmp_path / "all", **options | {"data__caption_dropout": 1.0})
    kept = watch(family, mixed, tmp_path / "none", **options | {"data__caption_dropout": 0.0})
    for a, b in zip(made.fed, kept.fed, strict=True):
        assert not a["encoder_hidden_states"].any() and b["encoder_hidden_states"].any()
        assert torch.equal(a["encoder_attention_mask"], b["encoder_attention_mask"])
        assert a["loss"].isfinite().all()


def test_caption_dropout_of_zero_is_the_identity(tiny_ltx, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache, "train__batch_size": 2, "data__caption_dropout": 0.0}
    made = watch(tiny_ltx, mixed, tmp_path / "empty", **options)
    zero = watch(tiny_ltx, mixed, tmp_path / "zero", **options, data__caption_technique="zero")
    assert made.records == zero.records
    for fed, (_, bucket, picks) in zip(made.fed, made.picked, strict=True):
        for (text, mask), pick in zip(rows_of(fed), picks, strict=True):
            own = encoded(made, made.plan.samples[made.plan.buckets[bucket][pick]].caption)
            length = len(own["text"])
            assert torch.equal(text[:length], own["text"]) and not text[length:].any()
            assert mask.sum() == own["text_mask"].sum() and torch.equal(mask[:length], own["text_mask"])


@pytest.mark.parametrize("technique", ["empty", "zero"])
def test_caption_dropout_is_a_coin_per_sample(tiny_ltx, mixed, cache, tmp_path, technique):
    made = watch(tiny_ltx, mixed, tmp_path / "run", **MIXED, data__cache_dir=cache, data__caption_technique=technique)
    n, length = 1000, 7
    text = torch.arange(1.0, n + 1)[:, None, None].expand(n, length, 32).clone()
    batch = {"text": text, "text_mask": torch.ones(n, length, dtype=torch.bool)}
    made.slots, dropped = list(range(n)), []
    for made.step in (0, 1, 7):
        out = made.drop_captions(batch)
        padded = out["text"][:, :length]
        kept = torch.tensor([torch.equal(row, own) for row, own in zip(padded, text, strict=True)])
        gone = out["text"][~kept]
        expected = torch.zeros_like(gone)
        if technique == "empty":
            empty = made.unconditional["text"]
            expected[:, : empty.shape[1]] = empty
        assert torch.equal(gone, expected)
        assert abs((~kept).float().mean().item() - 0.3) < 0.05  # 3.4 standard deviations, of fixed draws
        dropped.append(tuple(kept.tolist()))
    assert len(set(dropped)) == 3  # other steps, other samples


# -- the first frame ---------------------------------------------------------------------------------------------------


def wide(made: Watched, frames: int = 3) -> list[dict]:
    """What was fed of clips with so many latent frames."""
    found = [fed for fed in made.fed if fed["moments"].shape[2] == frames]
    assert found
    return found


def test_first_frame_given_always(family, mixed, cache, tmp_path):
    """Its tokens are clean, their timestep is 0, and the loss does not care what the network answers there."""

    class Junk(Watched):
        junk = math.nan

    Junk.__name__ = LTXTrainer.__name__
    options = MIXED | {"data__cache_dir": cache, "first_frame_p": 1.0, "train__batch_size": 2}
    made = watch(family, mixed, tmp_path / "own", **options)
    for fed in wide(made):
        timestep, B = fed["timestep"], len(fed["moments"])
        assert timestep.shape == (B, 3 * FRAME) and not timestep[:, :FRAME].any()
        levels = torch.tensor([made.draws[fed["step"], slot, "noise_level"] for slot in range(B)])
        assert len(set(levels.tolist())) == B
        rest = timestep[:, FRAME:]
        assert (rest > 0).all() and torch.equal(rest, rest[:, :1].expand_as(rest))
        mean, logvar = fed["moments"].float().chunk(2, 1)
        made.step, made.slots = fed["step"], list(range(B))
        x0 = made.pack(mean + (0.5 * logvar).exp() * made.normal("posterior", mean.shape))
        torch.testing.assert_close(fed["hidden_states"][:, :FRAME], x0[:, :FRAME], rtol=0, atol=1e-6)
        assert (fed["hidden_states"][:, FRAME:] - x0[:, FRAME:]).abs().mean() > 0.1

    junk = watch(family, mixed, tmp_path / "junk", kind=Junk, **options)
    assert junk.records == made.records
    assert torch.equal(runs.trained(junk), runs.trained(made))


def test_first_frame_given_never(family, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache, "first_frame_p": 0.0, "train__batch_size": 2}
    made = watch(family, mixed, tmp_path / "run", **options)
    for fed in made.fed:
        assert fed["timestep"].shape == (
            (2, 1) if family.name == "ltx-condition" else (2,)
        )  # as the family's own pipeline has it
        assert (fed["timestep"] > 0).all()
        mean, logvar = fed["moments"].float().chunk(2, 1)
        made.step, made.slots = fed["step"], [0, 1]
        x0 = made.pack(mean + (0.5 * logvar).exp() * made.normal("posterior", mean.shape))
        noise = made.pack(made.normal("noise", mean.shape))
        sigma = (fed["timestep"] / 1000).reshape(2, 1, 1)
        torch.testing.assert_close(fed["hidden_states"], (1 - sigma) * x0 + sigma * noise, rtol=0, atol=1e-5)


def test_first_frame_is_a_coin_per_sample(family, mixed, cache, tmp_path):
    options = MIXED | {"data__cache_dir": cache, "first_frame_p": 0.3, "train__batch_size": 8, "train__steps": 40}
    made = watch(family, mixed, tmp_path / "run", **options | {"memory__checkpointing": "none"})
    given = []
    for fed in (fed for fed in made.fed if fed["moments"].shape[2] > 1):
        coins = [made.draws[fed["step"], slot, "first_frame"] < 0.3 for slot in range(8)]
        timestep = fed["timestep"].reshape(8, -1)
        assert (timestep[:, 0] == 0).tolist() == coins
        given += coins
    share = sum(given) / len(given)
    assert len(given) > 200 and abs(share - 0.3) < 4 * math.sqrt(0.21 / len(given))


def test_stills_never_end_with_an_empty_loss(family, mixed, cache, tmp_path):
    """A still has no other frame to predict: it trains as it is, whatever the coin says."""
    options = MIXED | {"data__cache_dir": cache, "first_frame_p": 1.0, "train__batch_size": 2, "train__steps": 12}
    made = watch(family, mixed, tmp_path / "run", **options)
    for fed in wide(made, frames=1):
        assert (fed["timestep"] > 0).all()
        assert fed["loss"].isfinite().all() and (fed["loss"] > 0.1).all()
    assert all(row["loss"] is not None for row in runs.metrics(tmp_path / "run"))


# -- data --------------------------------------------------------------------------------------------------------------


def test_order_of_the_data_does_not_change_the_cache(tiny_ltx, mixed, tmp_path):
    """Entries are named by what is in them: order of the sources, names of files and folders do not count."""
    one, two, moved = tmp_path / "one", tmp_path / "two", tmp_path / "moved"
    for folder, pattern in ((one, "wide*"), (two, "[ts]*")):
        folder.mkdir()
        for path in mixed.glob(pattern):
            shutil.copy(path, folder)
    moved.mkdir()
    for n, path in enumerate(sorted(two.glob("*.txt"))):
        for part in two.glob(f"{path.stem}.*"):
            shutil.copy(part, moved / f"other name {9 - n}{part.suffix}")
    made = []
    for name, sources in {"ab": (one, two), "ba": (two, one), "renamed": (moved, one)}.items():
        cache = tmp_path / f"cache-{name}"
        options = {"data__train": sources, "data__buckets": BUCKETS, "data__cache_dir": cache, "stage": "precompute"}
        made.append(runs.run(tiny_ltx, one, tmp_path / name, **options).encoders.cache.keys())
    captions = {path.read_text() for path in mixed.glob("*.txt")} | {""}
    assert len(made[0]) == len(set(made[0])) == 11 + len(captions)
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("world", [1, 2])
def test_no_clip_stays_unseen(tiny_ltx, mixed, cache, tmp_path, world):
    """Global batches of 4 from buckets of 6, 3 and 2: three epochs show every clip two to four times."""
    options = MIXED | {"data__cache_dir": cache, "train__batch_size": 2, "train__epochs": 3}
    options["train__steps"] = None
    if world == 1:
        ranks = [facts(watch(tiny_ltx, mixed, tmp_path, **options, train__gradient_accumulation_steps=2))]
    else:
        ranks = two_ranks(tiny_ltx, mixed, tmp_path, **options)
    seen = Counter((bucket, pick) for rank in ranks for _, bucket, picks in rank["picked"] for pick in picks)
    assert {rank["step"] for rank in ranks} == {9}  # ceil(3 * 11 / 4)
    assert sum(seen.values()) == 36
    assert Counter(bucket for bucket, _ in seen) == {"17x64x96": 6, "9x96x64": 3, "1x64x96": 2}
    assert min(seen.values()) >= 2 and max(seen.values()) <= 4


@pytest.mark.parametrize("count", [1, 3, 5])
def test_few_or_uneven_samples_do_not_hang(tiny_ltx, mixed, cache, tmp_path, count):
    """Two ranks with batches of 2 from 1, 3 and 5 samples, in two buckets where there are several."""
    names = ["tall_0", "wide_0", "tall_1", "wide_1", "wide_2"][:count]
    folder = tmp_path / "clips"
    folder.mkdir()
    for path in (path for name in names for path in mixed.glob(f"{name}.*")):
        shutil.copy(path, folder)
    options = MIXED | {"data__cache_dir": cache, "train__batch_size": 2, "checkpoint__every": 2}
    ranks = runs.forked(on_each_rank, tiny_ltx, folder, tmp_path / "run", options, timeout=60)
    assert [(rank["world"], rank["step"]) for rank in ranks] == [(2, 6), (2, 6)]
    assert np.array_equal(ranks[0]["weights"], ranks[1]["weights"])
    assert [len(rank["losses"]) for rank in ranks] == [12, 12]


def test_every_rank_saves_the_state(tiny_ltx, mixed, cache, tmp_path):
    """save_state is a collective for sharded weights: called on one rank alone it hangs."""
    options = MIXED | {"data__cache_dir": cache, "checkpoint__every": 3}
    assert runs.forked(count_saves, tiny_ltx, mixed, tmp_path / "run", options) == [[3, 6], [3, 6]]
    for step in (3, 6):
        state = tmp_path / "run" / f"checkpoint-{step}" / "state"
        assert sorted(p.name for p in state.glob("random_states_*")) == ["random_states_0.pkl", "random_states_1.pkl"]


def count_saves(model, clips, output_dir, changes) -> list[int]:
    made = runs.trainer(LTXTrainer, model, clips, output_dir, **changes)
    save_state, steps = made.accelerator.save_state, []

    def counted(*args, **kwargs):
        steps.append(made.step)
        return save_state(*args, **kwargs)

    made.accelerator.save_state = counted
    made.run()
    assert made.accelerator.num_processes == 2
    return steps
