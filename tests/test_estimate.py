"""The memory table: parameter counts of the published models, and every part against the tensors of real tiny ones."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import runs
from models import adapters, footprint, memory
from trainers import estimate
from trainers.cog import CogVideoXTrainer
from trainers.config import options
from trainers.estimate import Bucket, Estimate
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.ltx import LTXTrainer

# What the published config.json files say, where it is not what diffusers' classes have by default; without weights.
T5 = dict(d_model=4096, d_ff=10240, d_kv=64, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
LLAMA |= dict(num_key_value_heads=8, vocab_size=128320)
CLIP = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, vocab_size=49408)
LTX_VAE_095 = dict(
    block_out_channels=(128, 256, 512, 1024, 2048),
    down_block_types=("LTXVideo095DownBlock3D",) * 4,
    decoder_block_out_channels=(256, 512, 1024),
    layers_per_block=(4, 6, 6, 2, 2),
    decoder_layers_per_block=(5, 5, 5, 5),
    spatio_temporal_scaling=(True,) * 4,
    decoder_spatio_temporal_scaling=(True,) * 3,
    decoder_inject_noise=(False,) * 4,
    downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    upsample_residual=(True,) * 3,
    upsample_factor=(2,) * 3,
    timestep_conditioning=True,
    spatial_compression_ratio=32,
    temporal_compression_ratio=8,
)
COG_5B = dict(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True)
COG_15 = COG_5B | dict(patch_size_t=2, patch_bias=False, sample_width=300, sample_height=300, sample_frames=81)
I2V = dict(in_channels=32)
# name: (trainer, pipeline class, transformer's config, VAE's config, numbers of the transformer, its LoRA's at rank 64)
PUBLISHED = {
    "ltx-2b": (LTXTrainer, "LTXPipeline", {}, {}, 1_923_385_472, 58_720_256),
    "ltx-2b-0.9.5": (LTXTrainer, "LTXConditionPipeline", {}, LTX_VAE_095, 1_923_385_472, 58_720_256),
    "ltx-13b": (
        LTXTrainer,
        "LTXConditionPipeline",
        dict(num_layers=48, attention_head_dim=128, cross_attention_dim=4096),
        LTX_VAE_095,
        13_042_569_344,
        201_326_592,
    ),
    "hunyuan": (HunyuanVideoTrainer, "HunyuanVideoPipeline", {}, {}, 12_821_012_544, 110_100_480),
    "cogvideox-2b": (CogVideoXTrainer, "CogVideoXPipeline", {}, {}, 1_693_783_872, 29_491_200),
    "cogvideox-5b": (CogVideoXTrainer, "CogVideoXPipeline", COG_5B, {}, 5_570_283_072, 66_060_288),
    "cogvideox-5b-i2v": (
        CogVideoXTrainer,
        "CogVideoXImageToVideoPipeline",
        COG_5B | I2V | dict(use_learned_positional_embeddings=True),
        {},
        5_570_479_680,
        66_060_288,
    ),
    "cogvideox-1.5": (CogVideoXTrainer, "CogVideoXPipeline", COG_15, {}, 5_570_676_352, 66_060_288),
    "cogvideox-1.5-i2v": (
        CogVideoXTrainer,
        "CogVideoXImageToVideoPipeline",
        COG_15 | I2V | dict(ofs_embed_dim=512),
        {},
        5_571_594_880,
        66_060_288,
    ),
}
VAES = {LTXTrainer: "AutoencoderKLLTXVideo", HunyuanVideoTrainer: "AutoencoderKLHunyuanVideo"}
VAES[CogVideoXTrainer] = "AutoencoderKLCogVideoX"
NATIVE = {"ltx-2b": "49x512x768", "ltx-13b": "121x704x1216", "hunyuan": "129x720x1280"}
TINY = {"ltx": LTXTrainer, "hunyuan": HunyuanVideoTrainer, "cogvideox-5b": CogVideoXTrainer}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """published(name) -> folder of that model with its config files alone."""
    root = tmp_path_factory.mktemp("published")

    def write(name: str):
        kind, pipeline, net, vae, *_ = PUBLISHED[name]
        cog, hunyuan = kind is CogVideoXTrainer, kind is HunyuanVideoTrainer
        parts = {
            "transformer": ["diffusers", kind.transformer_class, net],
            "vae": ["diffusers", VAES[kind], vae],
            "scheduler": ["diffusers", "CogVideoXDDIMScheduler", {"prediction_type": "v_prediction"}]
            if cog
            else ["diffusers", "FlowMatchEulerDiscreteScheduler", {}],
            "text_encoder": ["transformers", "LlamaModel", LLAMA]
            if hunyuan
            else ["transformers", "T5EncoderModel", T5],
        }
        if hunyuan:
            parts["text_encoder_2"] = ["transformers", "CLIPTextModel", CLIP]
        for part, (_, class_name, config) in parts.items():
            (root / name / part).mkdir(parents=True, exist_ok=True)
            file = "scheduler_config.json" if part == "scheduler" else "config.json"
            (root / name / part / file).write_text(json.dumps({"_class_name": class_name} | config))
        index = {"_class_name": pipeline} | {part: [library, kind] for part, (library, kind, _) in parts.items()}
        (root / name / "model_index.json").write_text(json.dumps(index))
        return root / name

    return write


@pytest.fixture
def priced(published, tmp_path):
    """priced(name, options ...) -> the Estimate of a run of a published model at its native size."""

    def make(name: str, size: str | None = None, **changes) -> Estimate:
        size = size or NATIVE.get(name, "81x768x1360" if "1.5" in name else "49x480x720")
        given = {"data__buckets": [size], "precision__weights": "bf16", "lora__rank": 64, "lora__alpha": 64} | changes
        if changes.get("method") == "full":
            given = {key: value for key, value in given.items() if not key.startswith("lora")}
        made = runs.trainer(PUBLISHED[name][0], published(name), tmp_path, tmp_path / "out", **given)
        made.plan = SimpleNamespace(buckets={size: [0]})
        frames, height, width = map(int, size.split("x"))
        made.validation = SimpleNamespace(prompts=[SimpleNamespace(num_frames=frames, height=height, width=width)])
        return Estimate(made)

    return make


@pytest.fixture(scope="module")
def eager():
    """torchao's optimizers without the compiler: the same state, no minutes of compiling."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_numbers(priced, name):
    of, numbers, lora = priced(name), *PUBLISHED[name][-2:]
    made = estimate.network(of.trainer, of.trainer.config)
    trained = adapters.trainable(made.net)
    assert all(p.is_meta for p in made.net.parameters())
    assert sum(p.numel() for p in made.net.parameters()) - numbers == sum(p.numel() for p in trained.values()) == lora
    parts = estimate.persistent(of.trainer, of.trainer.config, made)
    assert (parts.weights, parts.adapter, parts.gradients, parts.optimizer) == (
        2 * numbers,
        4 * lora,
        4 * lora,
        8 * lora,
    )


# -- what persists, against real tensors ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """wide(name) -> a tiny pipeline whose transformer is wide enough for 8-bit state (4096 numbers a tensor)."""
    from models.tiny import build

    root, made = tmp_path_factory.mktemp("wide"), {}

    def get(name: str):
        if name not in made:
            made[name] = build(name, root / name, width=128)
        return made[name]

    return get


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that `tensor` is made of: torchao's and bitsandbytes' own in place of theirs."""
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.nn.Parameter:
        return [part for name in tensor.__tensor_flatten__()[0] for part in plain(getattr(tensor, name))]
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return [tensor]
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return [tensor.data, state.absmax, state.code, *nested]


def held(tensors) -> int:
    """Bytes; tables that bitsandbytes shares between all states count once."""
    parts = {part.data_ptr(): part for tensor in tensors for part in plain(tensor)}
    return sum(part.numel() * part.element_size() for part in parts.values())


def stepped(kind, folder, tmp_path, **changes):
    """A trainer after one optimizer step with made-up gradients."""
    made = runs.trainer(kind, folder, tmp_path, tmp_path / "out", precision__weights="bf16", **changes)
    made.build()
    for parameter in made.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    made.optimizer.step()
    return made


CASES = [("full", "none"), *(("lora", kept) for kept in ("none", "fp8", "int8wo", "nf4"))]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adamw8bit-ao"])
@pytest.mark.parametrize(("method", "kept"), CASES)
def test_what_persists_is_what_is_held(wide, tmp_path, eager, name, optimizer, method, kept):
    changes = {"method": method, "optimizer__name": optimizer, "lora__rank": 32, "lora__alpha": 32}
    changes |= {"precision__storage": "fp8"} if kept == "fp8" else {"precision__quantize": kept}
    if method == "full":
        changes = {key: value for key, value in changes.items() if not key.startswith("lora")}
    real = stepped(TINY[name], wide(name), tmp_path, **changes)
    c = real.config
    made = estimate.network(real, c)
    parts, (_, whole) = estimate.persistent(real, c, made), estimate.stored(real, c, made)

    tensors = dict(real.network.named_parameters())
    frozen = [p for p in tensors.values() if not p.requires_grad]
    frozen += [b for n, b in real.network.named_buffers() if n.endswith((".scale", ".SCB"))]
    own = [p for n, p in tensors.items() if p.requires_grad and adapters.own_name(n) in made.own]
    added = [p for n, p in tensors.items() if p.requires_grad and adapters.own_name(n) not in made.own]
    state = [t for of in real.optimizer.state.values() for t in of.values() if torch.is_tensor(t) and t.numel() > 1]
    measured = {
        "weights": held(frozen),
        "trained": held(own),
        "adapter": held(added),
        "gradients": held([p.grad for p in real.parameters]),
        "optimizer": held(state),
    }
    if optimizer != "adamw":  # the test is about quantised state: most of it must be
        assert measured["optimizer"] < 0.5 * 8 * sum(p.numel() for p in real.parameters)
    for part, bytes_ in measured.items():
        expected = getattr(parts, part) - (whole if part == "weights" else 0)
        assert expected == pytest.approx(bytes_, rel=0.02, abs=64), part
    assert bool(measured["adapter"]) == (method == "lora")


# -- activations, against a real forward pass -------------------------------------------------------------------------


def bytes_of(storages: dict) -> int:
    return sum(storage.nbytes() for storage in storages.values())


class Seen:
    """What autograd keeps of a real forward pass without checkpointing, in all and inside each of `blocks`."""

    def __init__(self, net, blocks):
        self.there = footprint.storages([*net.parameters(), *net.buffers()])
        self.all, self.inside, self.now = {}, {}, None
        self.handles = []
        for block in blocks:
            self.handles.append(block.register_forward_pre_hook(self.enter, with_kwargs=True))
            self.handles.append(block.register_forward_hook(self.leave))

    def enter(self, block, args, kwargs):
        self.now = block
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        self.inside[block] = ({}, footprint.storages(given))

    def leave(self, block, args, out):
        self.now = None

    def pack(self, tensor):
        for key, storage in footprint.storages([tensor]).items():
            if key in self.there:
                continue
            if self.now is not None and key not in self.inside[self.now][1]:
                self.inside[self.now][0][key] = storage
            self.all[key] = storage
        return tensor

    def run(self, loss):
        with saved_tensors_hooks(self.pack, lambda tensor: tensor):
            self.loss = loss()
        for handle in self.handles:
            handle.remove()
        return self


def real_batch(of) -> dict:
    g = torch.Generator().manual_seed(0)
    batch = estimate.example(of, Bucket.parse("17x64x96"), 2)
    made = {key: torch.randn(t.shape, generator=g) for key, t in batch.items() if t.dtype != torch.bool}
    return made | {key: torch.ones(t.shape, dtype=torch.bool) for key, t in batch.items() if t.dtype == torch.bool}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", TINY)
def test_activations_are_those_of_a_real_forward_pass(built, tmp_path, monkeypatch, name, method):
    """Without checkpointing to the byte; with it a little less is seen here: torch keeps nested inputs out of sight."""

    def made(weights: str, mode: str):
        lora = {"train_modules": ["*transformer_blocks.*"]} if method == "full" else {"lora__rank": 4, "lora__alpha": 4}
        changes = {"precision__weights": weights, "memory__checkpointing": mode, "method": method} | lora
        of = runs.trainer(TINY[name], built(name), tmp_path, tmp_path / "out", **changes)
        of.build()
        of.step, of.slots = 0, [0, 1]
        return of, real_batch(of), [block for _, block in memory.repeated(of.network, of.repeated_blocks)]

    def estimated(of) -> int:
        batch = estimate.example(of, Bucket.parse("17x64x96"), 2)
        return estimate.activations(of, of.config, estimate.network(of, of.config), batch)

    of, batch, blocks = made("fp32", "none")
    plain = Seen(of.network, blocks).run(lambda: of.loss(batch))
    assert estimated(of) == bytes_of(plain.all) > 100_000
    again = max(bytes_of(kept) for kept, _ in plain.inside.values())

    of, batch, _ = made("fp32", "blocks")
    kept = bytes_of(Seen(of.network, []).run(lambda: of.loss(batch)).all)
    assert kept + again <= estimated(of) < 1.04 * (kept + again) and kept < 0.4 * bytes_of(plain.all)

    monkeypatch.setattr(footprint, "WIDE", {"prod", "mse_loss"})  # autocast on CPUs leaves norms and powers as they are
    of, batch, _ = made("bf16", "none")
    assert estimated(of) == pytest.approx(bytes_of(Seen(of.network, []).run(lambda: of.loss(batch)).all), rel=0.03)


def test_activations_fall_with_what_is_computed_again(priced):
    def of(mode: str, **changes) -> int:
        made = priced("ltx-2b", memory__checkpointing=mode, **changes)
        return made.parts(made.trainer.config).activations / estimate.GIB

    falling = [of("none"), of("ffn"), of("every_n"), of("blocks"), of("blocks", memory__offload_activations=True)]
    assert falling == sorted(falling, reverse=True) and falling[0] > 10 * falling[3]
    # 2688 tokens of 2048 numbers in bf16 are given to each of 28 blocks.
    hidden = 28 * 2688 * 2048 * 2 / estimate.GIB
    assert hidden < falling[3] < 2.5 * hidden and falling[3] - falling[4] == pytest.approx(hidden, rel=0.2)
    assert of("blocks", train__batch_size=2) == pytest.approx(2 * falling[3], rel=0.05)


def test_attention_keeps_no_matrix_of_tokens(priced):
    of = priced("ltx-13b", memory__checkpointing="none")
    tokens, heads, blocks = 16 * 22 * 38, 32, 48
    assert of.parts(of.trainer.config).activations < blocks * heads * tokens**2  # at a byte each


def test_live_tensors_of_a_real_decoder(built, tmp_path):
    """What a skeleton of the VAE holds at its most is what the real one holds, but for attention's own workspace."""
    for name, kind in TINY.items():
        of = runs.trainer(kind, built(name), tmp_path, tmp_path / "out")
        _, _, decoding = estimate.of_vae(of, 17, 64, 96)
        vae = of.pretrained.component("vae")
        latents = vae.encode(torch.zeros(1, 3, 17, 64, 96)).latent_dist.mean.detach()
        there = footprint.storages([*vae.parameters(), *vae.buffers(), latents])
        with torch.no_grad(), footprint.Live(there) as live:
            vae.decode(latents)
        assert decoding == pytest.approx(live.peak, rel=0.1), name


# -- the table --------------------------------------------------------------------------------------------------------


def test_ranks_share_what_their_backend_shards(priced):
    of = priced("cogvideox-2b", method="full")
    made = estimate.network(of.trainer, of.trainer.config)
    n, block = 1_693_783_872, max(sum(p.numel() for p in block.parameters()) for block in made.blocks)

    def parts(kind: str) -> tuple[int, ...]:
        p = estimate.persistent(of.trainer, of.trainer.config, made, kind, 4)
        return p.trained, p.gradients, p.optimizer, p.weights

    assert parts("none") == (4 * n, 4 * n, 8 * n, 0)
    assert parts("fsdp") == (n, n, 2 * n, 4 * block)
    # DeepSpeed trains bf16 weights, with a float32 copy beside the two moments
    assert parts("zero1") == (2 * n, 2 * n, 3 * n, 0)
    assert parts("zero2") == (2 * n, n // 2, 3 * n, 0)
    assert parts("zero3") == (n // 2, n // 2, 3 * n, 4 * block)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_each_rung_fits_together_and_costs_less(priced, method):
    of = priced("ltx-2b", method=method, memory__checkpointing="none")
    tried = []

    def price(config):
        tried.append(config)
        return of.parts(config)

    rows = list(estimate.ladder(of.trainer.config, 28, price))
    assert not any(config.problems() for config in tried)
    totals = [parts.total for _, parts in rows]
    assert all(b <= 0.99 * a for a, b in itertools.pairwise(totals)) and len(rows) >= 6
    labels = [label for label, _ in rows]
    assert labels[:2] == ["this run", "+ memory.checkpointing blocks"]
    known = {name for name, _ in options(of.trainer.config)}
    assert {word for label in labels[1:] for word in label.replace(",", "").split() if "." in word} - {"0.0"} <= known
    if method == "lora":
        assert labels[-1].endswith("memory.block_swap 28") and rows[-1][1].weights < 0.1 * rows[0][1].weights
    else:
        assert "optimizer.fused_backward true" in labels[-1] and rows[-1][1].gradients < 0.01 * rows[0][1].gradients


def test_rungs_that_do_not_fit_are_left_out(priced, monkeypatch):
    def told(of) -> str:
        return " ".join(label for label, _ in estimate.ladder(of.trainer.config, 28, of.parts))

    of = priced("ltx-2b", lora__type="dora")
    assert "precision.quantize int8wo" in told(of) and "precision.storage fp8" not in told(of)
    rows = estimate.ladder(of.trainer.config, 28, of.parts, "bitsandbytes nf4")
    assert [label for label, _ in rows][1:] == ["+ optimizer.name adamw8bit", "+ memory.offload_activations true"]
    of = priced("ltx-2b")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    assert told(of) == "this run + memory.offload_activations true + precision.storage fp8"


def test_smallest_card():
    assert [estimate.card(int(gib * estimate.GIB)) for gib in (1, 6.3, 6.4, 70, 80)] == [
        "8 GB",
        "8 GB",
        "12 GB",
        "80 GB",
        "over 80 GB",
    ]


def test_text_encoders_are_counted_as_loaded(priced, built, tmp_path):
    assert estimate.of_text(priced("ltx-2b").trainer) == 2 * 4_762_310_656  # T5 v1.1 XXL's encoder
    of = runs.trainer(HunyuanVideoTrainer, built("hunyuan"), tmp_path, tmp_path / "out")
    loaded = [of.pretrained.component(name) for name in ("text_encoder", "text_encoder_2")]
    assert estimate.of_text(of) == sum(p.nbytes for net in loaded for p in net.parameters())


def test_plan_of_a_model_without_weights(priced):
    """What `--stage plan` tells of the 13B model, of which there are config files alone."""
    of = priced("ltx-13b")
    of.trainer.config.stage = "plan"
    told = "\n".join(estimate.report(of.trainer, {}))
    assert "estimated, not measured on a GPU" in told and "whose largest batch is 1 x 121x704x1216" in told
    rows = [line.split() for line in told.splitlines() if line.startswith(("this run", "+ "))]
    assert rows[0][2:8] == ["24.3", "0.0", "0.8", "0.8", "1.5", "8.3"] and rows[0][-2:] == ["48", "GB"]
    assert rows[-1][3:5] == ["memory.block_swap", "48"] and rows[-1][-2:] == ["12", "GB"]
    assert "encoding: text encoders 8.9, then VAE 2.3 + " in told and "decoding 121x704x1216 4.1" in told
    assert "the smallest common card for this run: 48 GB (35.6 in a training step; " in told
    told = priced("cogvideox-5b").stages(True)[-1]
    assert "48 GB (26.3 in validation, less with memory.vae_tiling on; " in told
    told = priced("cogvideox-5b", memory__vae_tiling="on").stages(True)[-1]
    assert "24 GB (18.1 in a training step; " in told
    told = priced("ltx-2b").stages(True)[-1]
    assert "12 GB (8.9 in encoding text, less with components.text_encoder.quantize; " in told


def test_plan_of_a_run(start, capsys):
    start(stage="plan")
    told = capsys.readouterr().out
    assert "whose largest batch is 1 x 17x64x96" in told and "\nthis run " in told
    assert "encoding: text encoders 0.0" in told and "card for this run: 8 GB (0.0 in " in told


def test_a_run_tells_its_own_step_in_a_line(start, capsys):
    start(stage="precompute")
    told = [line for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert len(told) == 1 and told[0].startswith("memory of a training step, estimated: 0.0 GiB (weights 0.0, ")


def test_models_that_do_not_say_enough(start, capsys):
    """No text_shapes, or a loss that looks at numbers: told, and no reason to stop."""

    class Silent(LTXTrainer):
        def text_shapes(self):
            return None

    class Looks(LTXTrainer):
        def loss(self, batch):
            assert batch["moments"].sum().item() != 0
            return super().loss(batch)

    start("a", kind=Silent, stage="plan")
    assert "activations are left out: Silent has no text_shapes" in capsys.readouterr().out
    start("b", kind=Looks, stage="plan")
    assert "activations are left out: loss or encode_video needs numbers (" in capsys.readouterr().out
