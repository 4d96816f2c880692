"""Two ranks under DDP, FSDP2 and DeepSpeed ZeRO: the same training as one process, saved, resumed and exported."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import backends
import runs
from trainers import checkpoints, sharding
from trainers.cog import CogVideoXTrainer
from trainers.config import OptionError
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.ltx import LTXTrainer

pytestmark = pytest.mark.usefixtures("libraries")
TYPES = {"ddp": "MULTI_CPU", "fsdp": "FSDP"} | dict.fromkeys(("zero1", "zero2", "zero3"), "DEEPSPEED")
METHODS = {"lora": {}, "full": {"optimizer__name": "sgd", "optimizer__learning_rate": 1e-3}}


@pytest.fixture(scope="module", autouse=True)
def deepspeed():
    """Imported before anything is forked: 2 s that each rank would spend."""
    import deepspeed

    return deepspeed


def rank_run(backend, kind, model, clips, out, changes, environment=()) -> dict:
    """A run on this rank; what it was, and on rank 0 its trained weights in out/weights.pt."""
    os.environ.update(environment)
    backends.enable(backend)
    made = runs.trainer(kind, model, clips, out, **changes)
    made.run()
    whole = sharding.gathered(made.accelerator, made.network, True, torch.float32)
    if whole is None:
        whole = {name: p.detach() for name, p in made.network.named_parameters() if p.requires_grad}
    if made.accelerator.is_main_process:
        torch.save(whole, out / "weights.pt")
    return {
        "type": made.accelerator.distributed_type.value,
        "world": made.world,
        "rank": made.accelerator.process_index,
        "held": sum(local(p).numel() for p in made.network.parameters()),
    }


def local(tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def launch(backend, model, clips, out, kind=LTXTrainer, world=2, environment=(), **changes) -> list[dict]:
    facts = runs.forked(rank_run, backend, kind, model, clips, out, changes, environment, world=world)
    types = TYPES | ({"ddp": "NO"} if world == 1 else {})
    assert [(f["type"], f["world"], f["rank"]) for f in facts] == [(types[backend], world, r) for r in range(world)]
    return facts


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "weights.pt", weights_only=True)


def farthest(a: dict, b: dict) -> float:
    assert a.keys() == b.keys() and a
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def alone(tiny_ltx, clips, cache, tmp_path_factory):
    """alone(method) -> the folder of a run on one process that accumulates what two ranks share."""
    root, done = tmp_path_factory.mktemp("alone"), {}

    def run(method: str) -> Path:
        if method not in done:
            done[method] = root / method
            options = {"method": method, "data__cache_dir": cache, "train__gradient_accumulation_steps": 4}
            made = runs.run(tiny_ltx, clips, done[method], **options | METHODS[method])
            torch.save(
                {n: p.detach() for n, p in made.network.named_parameters() if p.requires_grad}, root / f"{method}.pt"
            )
            (root / f"{method}.pt").rename(done[method] / "weights.pt")
        return done[method]

    return run


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", backends.KINDS)
def test_two_ranks_train_save_resume_and_export(tiny_ltx, clips, cache, tmp_path, alone, backend, method):
    """Two ranks x accumulation 2 = one process x 4; a resumed run = an unbroken one; the export is what trained."""
    options = {"method": method, "data__cache_dir": cache, "train__gradient_accumulation_steps": 2} | METHODS[method]
    whole, again = tmp_path / "whole", tmp_path / "again"
    facts = launch(backend, tiny_ltx, clips, whole, checkpoint__every=2, **options)
    assert farthest(weights(whole), weights(alone(method))) < 1e-4
    for key, bound in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 0)):
        ours, single = ([row[key] for row in runs.metrics(out)] for out in (whole, alone(method)))
        assert ours == pytest.approx(single, abs=bound, rel=bound), key
    total = sum(p.numel() for p in _transformer(tiny_ltx).parameters())
    if backend in ("fsdp", "zero3"):  # each rank holds about half of the network
        assert all(f["held"] < 0.75 * total for f in facts), facts

    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    launch(backend, tiny_ltx, clips, again, checkpoint__resume="latest", **options)
    assert farthest(weights(again), weights(whole)) == 0
    assert runs.losses(again) == runs.losses(whole)[2:]
    assert_no_base(whole / "checkpoint-2" / "state", backend, method)

    assert_exported(tiny_ltx, whole, method)


def _transformer(folder: Path):
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel.from_pretrained(folder, subfolder="transformer")


def assert_no_base(state: Path, backend: str, method: str) -> None:
    """A checkpoint holds what trains and the optimizer's numbers (AdamW two each, SGD one): never the frozen base."""
    trained = {"lora": 4096, "full": 53_104}[method]
    numbers = trained * {"lora": 3, "full": 2}[method]
    if backend == "fsdp":
        from torch.distributed.checkpoint import FileSystemReader

        tensors = FileSystemReader(state / "sharded").read_metadata().state_dict_metadata.values()
        sizes = [m.size.numel() for m in tensors if hasattr(m, "size")]
        steps = {"lora": 32, "full": 0}[method]  # AdamW's count of steps, for each tensor
        assert sum(sizes) == numbers + steps
        return
    if backend in ("zero1", "zero2"):  # which also keep the copy that they compute with
        numbers += trained
    size = sum(p.stat().st_size for p in state.rglob("*") if p.suffix not in (".py", ".pkl", ".json"))
    assert 4 * numbers < size < 4 * numbers + 110_000, size  # the base of the LoRA: 212 kB


def assert_exported(model: Path, out: Path, method: str) -> None:
    """A fresh diffusers pipeline that loads the export has the very weights that were trained."""
    from diffusers import LTXPipeline

    trained = weights(out)
    pipe = LTXPipeline.from_pretrained(model)
    if method == "lora":
        pipe.load_lora_weights(out)
        names = {name.replace(".default_0.", ".default."): p for name, p in pipe.transformer.named_parameters()}
        assert farthest({n: names[n] for n in trained}, trained) == 0
    else:
        state = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
        assert state.keys() == pipe.transformer.state_dict().keys()
        assert farthest({n: state[n] for n in trained}, trained) == 0


@pytest.mark.parametrize(
    "kind, name", [(HunyuanVideoTrainer, HunyuanVideoTrainer.tiny[0]), (CogVideoXTrainer, CogVideoXTrainer.tiny[0])]
)
@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
def test_every_model_trains_sharded(built, clips, tmp_path, cache, kind, name, backend):
    """The same losses as two DDP ranks, in bf16 with checkpointing as users run it."""
    options = {"data__cache_dir": cache, "precision__weights": "fp32"}
    ours, plain = tmp_path / backend, tmp_path / "ddp"
    launch(backend, built(name), clips, ours, kind, **options)
    launch("ddp", built(name), clips, plain, kind, **options)
    assert runs.losses(ours) == pytest.approx(runs.losses(plain), abs=1e-5)
    assert farthest(weights(ours), weights(plain)) < 1e-4


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
def test_bf16_keeps_fp32_copies_of_what_trains(tiny_ltx, clips, tmp_path, cache, backend):
    """What trains is saved in float32, with digits that bf16 does not have; losses follow DDP's."""
    options = {"data__cache_dir": cache, "precision__weights": "bf16", "optimizer__name": "sgd"}
    ours, plain = tmp_path / backend, tmp_path / "ddp"
    launch(backend, tiny_ltx, clips, ours, **options)
    launch("ddp", tiny_ltx, clips, plain, **options)
    saved = load_file(ours / runs.LORA)
    assert all(p.dtype == torch.float32 for p in saved.values())
    b = torch.cat([p.flatten() for name, p in saved.items() if "lora_B" in name])
    assert (b.bfloat16().float() != b).float().mean() > 0.5
    assert runs.losses(ours) == pytest.approx(runs.losses(plain), abs=1e-3 if backend == "fsdp" else 0.02)
    if backend == "fsdp":  # autocast as on one GPU: the same arithmetic
        assert farthest(weights(ours), weights(plain)) < 1e-4


def test_backends_are_bit_equal(tiny_ltx, clips, tmp_path, cache, aligned):
    """A LoRA of AdamW, weights and losses; ZeRO-3 adds up in another order."""
    for backend in ("ddp", "fsdp", "zero1", "zero2"):
        launch(backend, tiny_ltx, clips, tmp_path / backend, data__cache_dir=cache)
        assert farthest(weights(tmp_path / "ddp"), weights(tmp_path / backend)) == 0, backend
        assert runs.losses(tmp_path / "ddp") == runs.losses(tmp_path / backend)


@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
def test_fsdp_goes_on_with_other_numbers_of_ranks(tiny_ltx, clips, tmp_path, cache, worlds):
    """Weights, optimizer state, order and step: a run that changes its ranks ends where an unbroken one does."""
    first, second = worlds
    whole, again = tmp_path / "whole", tmp_path / "again"
    options = {"data__cache_dir": cache, "train__gradient_accumulation_steps": 2 // first}
    launch("fsdp", tiny_ltx, clips, whole, world=first, checkpoint__every=2, **options)
    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    launch("fsdp", tiny_ltx, clips, again, world=second, checkpoint__resume="latest", **options)
    assert runs.losses(again) == pytest.approx(runs.losses(whole)[2:], abs=1e-6)
    assert farthest(weights(again), weights(whole)) < 1e-6


def refused(function, *arguments) -> str:
    """The message with which rank 0 refuses."""
    try:
        function(*arguments)
    except (OptionError, checkpoints.CheckpointError) as error:
        return str(error)
    except SystemExit as end:
        return f"exit {end.code}"
    return "went through"


def rank_refusal(backend, model, clips, out, changes) -> str:
    return refused(rank_run, backend, LTXTrainer, model, clips, out, changes)


def test_zero_refuses_other_numbers_of_ranks_and_other_backends(tiny_ltx, clips, tmp_path, cache):
    options = {"data__cache_dir": cache, "train__steps": 1}
    launch("zero2", tiny_ltx, clips, tmp_path, **options)
    again = options | {"train__steps": 2, "checkpoint__resume": "latest"}
    for backend, world, name in (("zero2", 1, "DeepSpeed ZeRO-2 on 1 processes"), ("ddp", 2, "one process or DDP")):
        changes = again | {"train__gradient_accumulation_steps": 2 // world}
        message, *others = runs.forked(rank_refusal, backend, tiny_ltx, clips, tmp_path, changes, world=world)
        assert f"distribution: DeepSpeed ZeRO-2 on 2 processes in the checkpoint, {name} in this run" in message
        assert "keeps its optimizer state in parts that only the same launch reads" in message
        assert others == ["exit 1"] * (world - 1)


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
def test_a_checkpoint_of_other_parameters_is_refused(tiny_ltx, clips, tmp_path, cache, backend):
    """DeepSpeed would read them into whatever has as many numbers, FSDP2 leave out what it does not find."""
    options = {"data__cache_dir": cache, "train__steps": 1}
    launch(backend, tiny_ltx, clips, tmp_path, **options, lora__targets=["to_q"])
    changes = options | {"train__steps": 2, "checkpoint__resume": "latest", "lora__targets": ["to_k"]}
    for message in runs.forked(rank_refusal, backend, tiny_ltx, clips, tmp_path, changes):
        assert "checkpoint-1: trains other parameters than this run, e.g. transformer_blocks.0.attn1.to_k" in message
        assert "(16 differ). Give lora.targets" in message


def test_zero_refuses_another_precision(tiny_ltx, clips, tmp_path, cache):
    options = {"data__cache_dir": cache, "train__steps": 1}
    launch("zero2", tiny_ltx, clips, tmp_path, **options)
    changes = options | {"train__steps": 2, "checkpoint__resume": "latest", "precision__weights": "bf16"}
    message, other = runs.forked(rank_refusal, "zero2", tiny_ltx, clips, tmp_path, changes)
    assert "precision.weights: fp32 in the checkpoint, bf16 in this run" in message and other == "exit 1"


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
def test_damaged_shards_are_told(tiny_ltx, clips, tmp_path, cache, backend):
    options = {"data__cache_dir": cache, "train__steps": 1}
    launch(backend, tiny_ltx, clips, tmp_path, **options)
    for path in (tmp_path / "checkpoint-1" / "state").rglob("*"):
        if path.suffix in (".distcp", ".pt"):
            path.write_bytes(bytes(path.stat().st_size))
    changes = options | {"train__steps": 2, "checkpoint__resume": "latest"}
    for message in runs.forked(rank_refusal, backend, tiny_ltx, clips, tmp_path, changes):
        assert "checkpoint-1: its state is damaged (" in message and "name an earlier checkpoint" in message


def rank_without_space(model, clips, out, changes) -> str:
    from torch.distributed.checkpoint.filesystem import FileSystem

    create = FileSystem.create_stream

    def failing(self, path, mode):
        if ".checkpoint-4.partial" in str(path) and "__1_" in str(path):  # rank 1's shards
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, path, mode)

    FileSystem.create_stream = failing
    return rank_refusal("fsdp", model, clips, out, changes)


def test_a_disk_that_is_full_for_one_rank_is_told_by_all(tiny_ltx, clips, tmp_path, cache):
    changes = {"data__cache_dir": cache, "checkpoint__every": 2}
    for message in runs.forked(rank_without_space, tiny_ltx, clips, tmp_path, changes):
        assert "checkpoint-4: no space left on the disk (" in message
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name] == ["checkpoint-2"]
    assert checkpoints.problem(tmp_path / "checkpoint-2") is None


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_sharded_ranks_encode_and_sample_together(tiny_ltx, clips, tmp_path, backend, count):
    """Any number of prompts on two ranks: each file once, no hang, and the training is that of a run without."""
    options = {"data__cache_dir": tmp_path / "cache", "train__steps": 2, "validation__num_inference_steps": 2}
    plain, out = tmp_path / "plain", tmp_path / "sampled"
    launch(backend, tiny_ltx, clips, plain, **options)
    prompts = tmp_path / "prompts.yaml"  # stills: PNG files lose nothing
    prompts.write_text("".join(f"- {{prompt: a cat number {i}, num_frames: 1}}\n" for i in range(count)))
    if count:
        options |= {"validation__prompts": prompts, "validation__every": 1}
    launch(backend, tiny_ltx, clips, out, **options)
    assert farthest(weights(plain), weights(out)) == 0
    for step in range(3 if count else 0):
        made = json.loads((out / "samples" / f"step-{step:06d}" / "samples.json").read_text())["samples"]
        assert [bool(row["file"]) and row["error"] for row in made] == [None] * count
    single = tmp_path / "single"
    if count:  # the same pictures as from one process
        runs.run(tiny_ltx, clips, single, **options | {"train__gradient_accumulation_steps": 2})
        from PIL import Image

        files = sorted((single / "samples").rglob("*.png"))
        assert len(files) == 3 * count
        for file in files:
            a, b = (torch.tensor(list(Image.open(path).getdata())) for path in (file, out / file.relative_to(single)))
            assert (a - b).abs().max() <= 1, file


HSDP = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
HSDP |= {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
OFFLOAD = {"FSDP_OFFLOAD_PARAMS": "true"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("environment, world", [(HSDP, 4), (OFFLOAD, 2)], ids=["hsdp", "offload"])
def test_hsdp_and_offloaded_fsdp_equal_one_process(tiny_ltx, clips, tmp_path, cache, alone, environment, world, method):
    options = {"method": method, "data__cache_dir": cache, "train__gradient_accumulation_steps": 4 // world}
    facts = launch("fsdp", tiny_ltx, clips, tmp_path, world=world, environment=environment, **options | METHODS[method])
    assert farthest(weights(tmp_path), weights(alone(method))) < 1e-4
    total = sum(p.numel() for p in _transformer(tiny_ltx).parameters())
    assert all(f["held"] < 0.75 * total for f in facts)
    assert_exported(tiny_ltx, tmp_path, method)


def test_fsdp_shards_weights_stored_in_fp8(tiny_ltx, clips, tmp_path, cache):
    options = {"data__cache_dir": cache, "precision__weights": "bf16", "precision__storage": "fp8"}
    for backend in ("ddp", "fsdp"):
        launch(backend, tiny_ltx, clips, tmp_path / backend, **options)
    ours, plain = (runs.losses(tmp_path / backend) for backend in ("fsdp", "ddp"))
    assert ours == pytest.approx(plain, abs=1e-3)


def test_ranks_that_round_stochastically_stay_alike(tiny_ltx, clips, tmp_path, cache):
    """bf16 weights under DDP: every rank rounds its own copy, to the same bits."""
    options = {"precision__weights": "bf16", "precision__trainable": "bf16", "optimizer__name": "adamw8bit-ao"}
    ranks = runs.forked(rank_trained, tiny_ltx, clips, tmp_path, options | {"data__cache_dir": cache})
    assert ranks[0] == ranks[1] and len(ranks[0]) == 4096


def rank_trained(model, clips, out, changes) -> list[float]:
    torch.compiler.set_stance("force_eager")
    made = runs.trainer(LTXTrainer, model, clips, out, **changes)
    made.run()
    return runs.trained(made).tolist()


def test_fsdp_with_compiled_and_recomputed_blocks(tiny_ltx, clips, tmp_path, cache):
    options = {"data__cache_dir": cache, "memory__compile": "blocks", "memory__compile_backend": "eager"}
    launch("fsdp", tiny_ltx, clips, tmp_path / "compiled", **options)
    launch("ddp", tiny_ltx, clips, tmp_path / "plain", data__cache_dir=cache)
    assert farthest(weights(tmp_path / "compiled"), weights(tmp_path / "plain")) < 1e-4
