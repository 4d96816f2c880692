"""Numbers that must not go wrong in silence: NaN, half precision, fp8 storage, the logged loss, what moves."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import runs
from data.batches import Schedule
from models import memory
from models.adapters import AdapterError
from models.precision import PrecisionError
from runs import LORA, forked, losses
from trainers import checkpoints
from trainers.config import OptionError
from trainers.ltx import LTXTrainer
from trainers.pulse import NonFiniteStep

pytestmark = pytest.mark.usefixtures("libraries")

BASE = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def cache(encoded_cache) -> Path:
    return encoded_cache


# -- NaN ----------------------------------------------------------------------------------------------------------


def first_clip_of(step: int, planned, batch: int):
    """(sample, step's others) of the first sample that is used at `step` (0-based) and not before."""
    schedule = Schedule(planned.plan.sizes, batch, 42)

    def samples(at: int):
        bucket, picks = schedule.block(at)
        return [planned.plan.samples[planned.plan.buckets[bucket][i]] for i in picks]

    before = {s for at in range(step) for s in samples(at)}
    now = samples(step)
    return next(s for s in now if s not in before), now


def poison(path: Path) -> bytes:
    """Puts a NaN into the latents of a cache entry; what it was."""
    healthy = path.read_bytes()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    rows = load_file(path)
    rows["moments"][0, 0, 0, 0] = float("nan")
    save_file(rows, path, metadata)
    return healthy


@pytest.mark.parametrize(("batch", "accumulation", "log_every"), [(1, 1, 1), (1, 1, 100), (2, 1, 1), (1, 2, 100)])
def test_nan_latents_stop_the_run_and_name_the_clip(
    batch, accumulation, log_every, tiny_ltx, clips, cache, tmp_path, start
):
    changes = dict(train__batch_size=batch, train__gradient_accumulation_steps=accumulation, train__steps=4)
    changes |= dict(checkpoint__every=1, data__cache_dir=shutil.copytree(cache, tmp_path / "cache"))
    healthy_weights = runs.trained(start("healthy", **changes))
    planned = start("plan", stage="plan", **changes)
    step = 2 if batch * accumulation == 1 else 1
    clip, others = first_clip_of(step, planned, batch * accumulation)
    entry = planned.encoders.cache.path(planned.encoders.video_keys(clip)[0])
    healthy = poison(entry)

    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", train__log_every=log_every, **changes)
    with pytest.raises(NonFiniteStep) as error:
        made.run()
    text = str(error.value)
    assert text.startswith(f"step {step + 1}: loss nan, gradient norm nan. Samples with such a loss:")
    assert re.findall(r"\S+\.mp4", text) == [clip.path] and clip.where in text
    assert len({s.path for s in others}) == batch * accumulation
    assert made.step == step + 1  # no update after it
    root = made.output_dir
    assert [p.name for p in checkpoints.numbered(root)] == [f"checkpoint-{n}" for n in range(step, 0, -1)]
    assert checkpoints.problem(root / f"checkpoint-{step}") is None
    for file in root.rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file
    assert not list(root.glob("*.safetensors")) and not list(root.glob(".*"))
    assert len(runs.metrics(root)) == (step if log_every == 1 else 0)

    entry.write_bytes(healthy)
    again = start("run", checkpoint__resume="latest", train__log_every=log_every, **changes)
    assert again.step == 4 and torch.equal(runs.trained(again), healthy_weights)


def test_nan_ends_the_script_with_one_message(tiny_ltx, clips, cache, tmp_path, start):
    changes = dict(data__cache_dir=shutil.copytree(cache, tmp_path / "cache"))
    planned = start("plan", stage="plan", **changes)
    clip, _ = first_clip_of(0, planned, 1)
    poison(planned.encoders.cache.path(planned.encoders.video_keys(clip)[0]))
    with pytest.raises(SystemExit) as error:
        LTXTrainer.main(runs.options(tiny_ltx, clips, tmp_path / "run", **changes))
    assert error.value.code.startswith("error: step 1: loss nan") and clip.path in error.value.code


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_learning_rate_of_a_million(method, tiny_ltx, clips, cache, tmp_path):
    changes = dict(optimizer__learning_rate=1e6, optimizer__schedule="constant", train__steps=60, checkpoint__every=1)
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", data__cache_dir=cache, method=method, **changes)
    with pytest.raises(NonFiniteStep, match=r"lower optimizer.learning_rate") as error:
        made.run()
    assert str(error.value).startswith(f"step {made.step}: loss ") and 1 < made.step < 60
    kept = checkpoints.numbered(made.output_dir)
    assert kept[0].name == f"checkpoint-{made.step - 1}"
    for file in made.output_dir.rglob("*.safetensors"):
        assert all(tensor.float().isfinite().all() for tensor in load_file(file).values()), file
    assert not (made.output_dir / LORA).exists() and not (made.output_dir / "transformer").exists()


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_an_infinite_gradient_alone_is_seen_too(clip, start, tmp_path):
    class Steep(LTXTrainer):
        def build(self):
            super().build()
            self.parameters[3].register_hook(lambda g: g * float("inf") if self.step == 2 else g)

    with pytest.raises(NonFiniteStep) as error:
        start(kind=Steep, train__batch_size=2, optimizer__max_grad_norm=clip, checkpoint__every=1)
    found = re.match(r"step 3: loss ([\d.]+), gradient norm (inf|nan)\. Its samples:\n", str(error.value))
    assert found and float(found[1]) > 0
    assert len(re.findall(r"\S+\.mp4", str(error.value))) == 2
    assert checkpoints.numbered(tmp_path / "run")[0].name == "checkpoint-2"


def test_a_bad_network_is_not_sampled(start, tmp_path):
    """A step that is neither logged nor saved, but validated."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")

    class Bad(LTXTrainer):
        def loss(self, batch):
            return super().loss(batch) * (float("nan") if self.step == 1 else 1)

    with pytest.raises(NonFiniteStep, match=r"^step 2: "):
        start(
            kind=Bad, validation__prompts=prompts, validation__every=2, validation__at_start=False, train__log_every=9
        )
    assert not (tmp_path / "run" / "samples").exists()


def infinite_on_rank_one(model, clips, cache, out) -> list:
    class Bad(LTXTrainer):
        def loss(self, batch):
            return super().loss(batch) + (float("inf") if self.step == 2 and self.slots == [1] else 0)

    changes = dict(data__cache_dir=cache, checkpoint__every=1, train__steps=6, data__buckets="17x64x96")
    made = runs.trainer(Bad, model, clips, out, train__gradient_accumulation_steps=2, **changes)
    try:
        made.run()
    except NonFiniteStep as error:
        bucket, picks = Schedule(made.plan.sizes, 4, 42).block(2)
        return [made.world, made.step, str(error), made.plan.samples[made.plan.buckets[bucket][picks[1]]].path]
    return [made.world, made.step, "no error", ""]


def test_an_infinite_loss_on_one_rank_stops_both_with_one_message(tiny_ltx, clips, cache, tmp_path):
    """The second of four slots: rank 1, first micro-step."""
    first, second = forked(infinite_on_rank_one, tiny_ltx, clips, cache, tmp_path / "run", timeout=60)
    assert first == second and first[:2] == [2, 3]
    text, guilty = first[2:]
    assert text.startswith("step 3: loss inf, ") and re.findall(r"\S+\.mp4", text) == [guilty]
    assert checkpoints.numbered(tmp_path / "run")[0].name == "checkpoint-2"
    assert not (tmp_path / "run" / LORA).exists()


# -- half precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", ["precision.weights", "components.text_encoder.dtype", "components.transformer.dtype"]
)
def test_fp16_is_refused_before_anything_loads(option, tiny_ltx, clips, tmp_path):
    changes = {"precision__weights": "bf16", option.replace(".", "__"): "fp16"}
    words = runs.options(tiny_ltx, clips, tmp_path / "run", **changes)
    with pytest.raises(SystemExit) as error:
        LTXTrainer.main(words)
    assert f"{option} fp16: " in error.value.code and "use bf16" in error.value.code
    assert not (tmp_path / "run").exists()
    with pytest.raises(PrecisionError, match="65504"):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", **changes)


def test_fp16_of_the_launcher_is_refused_with_both_values(tiny_ltx, clips, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(OptionError, match=r"mixed_precision fp16, but precision.weights is bf16"):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", precision__weights="bf16")


def test_fp32_adapters_over_bf16_weights(start, tiny_ltx, tmp_path):
    made = start(precision__weights="bf16", train__steps=3)
    kinds = {p.requires_grad: set() for p in made.network.parameters()}
    for p in made.network.parameters():
        kinds[p.requires_grad].add(p.dtype)
    assert kinds == {True: {torch.float32}, False: {torch.bfloat16}}
    state = made.optimizer.state_dict()["state"]
    assert len(state) == len(made.parameters)
    assert {v.dtype for row in state.values() for v in row.values()} == {torch.float32}
    for file in (LORA, "pytorch_lora_weights_comfyui.safetensors", "checkpoint-3/state/trainable.safetensors"):
        tensors = load_file(tmp_path / "run" / file)
        assert tensors and {v.dtype for v in tensors.values()} == {torch.float32}, file
    base = load_file(tiny_ltx / BASE)
    frozen = {n.replace(".base_layer.", "."): p for n, p in made.network.named_parameters() if not p.requires_grad}
    assert frozen.keys() == base.keys()
    assert all(torch.equal(p, base[name].bfloat16()) for name, p in frozen.items())


def test_full_fine_tune_keeps_fp32_masters_and_exports_bf16(start, tiny_ltx, tmp_path):
    from diffusers import LTXVideoTransformer3DModel

    made = start(method="full", precision__weights="bf16", train__steps=3, optimizer__learning_rate=1e-4)
    master = dict(made.network.named_parameters())
    assert {p.dtype for p in master.values()} == {torch.float32}
    base = load_file(tiny_ltx / BASE)
    unmoved = [name for name, p in master.items() if torch.equal(p, base[name].bfloat16().float())]
    assert unmoved == []
    # fp32 masters hold what bf16 could not: most updates of 1e-4 are below its resolution
    assert sum((p != p.bfloat16().float()).float().mean().item() for p in master.values()) / len(master) > 0.9
    folder = tmp_path / "run" / "transformer"
    assert {v.dtype for v in load_file(folder / Path(BASE).name).values()} == {torch.bfloat16}
    loaded = LTXVideoTransformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert all(torch.equal(p, master[name].bfloat16()) for name, p in loaded.named_parameters())
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "state" / "trainable.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in master.items())


# -- gradients and the logged loss --------------------------------------------------------------------------------


class Watched(LTXTrainer):
    """Keeps what each parameter's gradient was at each optimizer step."""

    def build(self):
        super().build()
        self.gradients: list[dict[str, torch.Tensor]] = []
        clip = self.accelerator.clip_grad_norm_

        def watching(*arguments):
            named = self.network.named_parameters()
            self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
            return clip(*arguments)

        self.accelerator.clip_grad_norm_ = watching


@pytest.mark.parametrize("method", ["lora", "full"])
def test_checkpointing_gives_every_gradient_and_the_same(method, start):
    kept = start("none", kind=Watched, memory__checkpointing="none", method=method, train__steps=3)
    again = start("blocks", kind=Watched, memory__checkpointing="blocks", method=method, train__steps=3)
    assert again.network.is_gradient_checkpointing and not kept.network.is_gradient_checkpointing
    assert losses(kept.output_dir) == losses(again.output_dir)
    trainable = {n for n, p in kept.network.named_parameters() if p.requires_grad}
    for ours, theirs in zip(kept.gradients, again.gradients, strict=True):
        assert ours.keys() == theirs.keys() == trainable
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(again.gradients[2][name].abs().max() > 0 for name in trainable)


def test_parameters_without_a_gradient_are_refused(start, monkeypatch):
    """The old trap: reentrant checkpointing of frozen inputs cuts the blocks, with their adapters, off the graph."""
    from torch.utils.checkpoint import checkpoint

    def reentrant(net, *options):
        net.enable_gradient_checkpointing(lambda block, *inputs: checkpoint(block, *inputs, use_reentrant=True))

    monkeypatch.setattr(memory, "checkpoint_blocks", reentrant)
    with pytest.raises(AdapterError, match=r"32 of 34 trained parameters got no gradient.*transformer_blocks\.0"):
        start(lora__also_train="proj_out")


@pytest.mark.parametrize("log_every", [1, 2])
def test_the_logged_loss_is_the_mean_of_all_samples(log_every, start):
    """Over rows, micro-steps and the steps between two lines; not multiplied or divided by anything."""
    changes = dict(train__batch_size=2, train__gradient_accumulation_steps=3, train__log_every=log_every)
    made = start(kind=runs.recorded(LTXTrainer), **changes)
    assert len(made.records) == 4 * 6
    steps = [sum(loss for step, _, loss in made.records if step == n) / 6 for n in range(4)]
    expected = [sum(steps[n : n + log_every]) / log_every for n in range(0, 4, log_every)]
    assert losses(made.output_dir) == pytest.approx(expected, rel=1e-6)
    assert max(expected) / min(expected) > 1.001  # or a constant would pass


def recorded_rank(model, clips, cache, out) -> list:
    changes = dict(data__cache_dir=cache, train__gradient_accumulation_steps=2)
    made = runs.trainer(runs.recorded(LTXTrainer), model, clips, out, **changes)
    made.run()
    return [made.world, made.records]


def test_the_logged_loss_is_the_mean_over_ranks_too(tiny_ltx, clips, cache, tmp_path):
    ranks = forked(recorded_rank, tiny_ltx, clips, cache, tmp_path / "run")
    assert [world for world, _ in ranks] == [2, 2]
    records = [row for _, rows in ranks for row in rows]
    assert sorted((step, slot) for step, slot, _ in records) == [(step, slot) for step in range(4) for slot in range(4)]
    expected = [sum(loss for step, _, loss in records if step == n) / 4 for n in range(4)]
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)
    mine = [sum(loss for step, _, loss in ranks[0][1] if step == n) / 2 for n in range(4)]
    assert mine != pytest.approx(expected, rel=1e-3)


def test_the_gradient_scalers_overflow_is_no_fault():
    """With fp16 a step whose gradients overflow is left out by the scaler; one that never ends is a fault, and so is a
    loss that is not finite."""
    from types import SimpleNamespace

    from trainers.pulse import SCALER_TRIES, Pulse

    def go_on(scaler, loss: float, norm: float, times: int = 1) -> bool:
        pulse = Pulse(SimpleNamespace(scaler=scaler, gather=lambda rows: rows))
        for _ in range(times):
            pulse.send([torch.tensor([loss])], torch.tensor(norm), 0)
            last = pulse.read()[2]
        return last

    assert go_on(object(), 1.0, torch.inf) and not go_on(None, 1.0, torch.inf)
    assert go_on(object(), 1.0, torch.nan, SCALER_TRIES) and not go_on(object(), 1.0, torch.nan, SCALER_TRIES + 1)
    assert not go_on(object(), torch.nan, 1.0)
