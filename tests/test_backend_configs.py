"""What a launcher may say against the options, DeepSpeed's JSON files, and rules that hold on every backend."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch

import backends
import runs
from models.export import ExportError
from test_readme import commands
from test_sharding import farthest, launch, weights
from trainers import checkpoints, sharding
from trainers import launch as launcher
from trainers.config import OptimizerName
from trainers.ltx import LTXConfig, LTXTrainer
from trainers.parsing import parse

pytestmark = pytest.mark.usefixtures("libraries")
ROOT = Path(__file__).parents[1]
JSONS = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "4"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "WORLD_SIZE": "4"}
MORE = ["--data.train", "clips"]
HSDP = FSDP | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.fixture(scope="module", autouse=True)
def deepspeed():
    """Imported before anything is forked: 2 s that each rank would spend."""
    import deepspeed

    return deepspeed


@pytest.fixture
def told(monkeypatch):
    """told(environment of a launch, options ...) -> what is said against that launch."""

    def ask(environment: dict[str, str], **changes) -> list[str]:
        for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        config = parse(LTXConfig, ["--model", "x/y", "--data.train", "clips", "--data.buckets", "9x64x96"])
        for name, value in changes.items():  # one by one, without what goes with it in a run
            section, _, option = name.rpartition("__")
            setattr(getattr(config, section) if section else config, option, value)
        return launcher.contradictions(config)

    return ask


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [FSDP, ZERO], ids=["fsdp", "zero"])
def test_what_fits(environment, told):
    assert told(environment) == []
    assert told(environment, method="full", precision__weights="fp32", optimizer__name="sgd") == []


@pytest.mark.parametrize(
    "environment, changes, says",
    [
        ({"FSDP_VERSION": "1"}, {}, "fsdp_version 1; set fsdp_version: 2 in its fsdp_config"),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {"memory__checkpointing": "ffn"},
            "fsdp_activation_checkpointing true: set it to false, memory.checkpointing (here ffn) decides",
        ),
        ({"FSDP_IGNORED_MODULES": "proj_out"}, {}, "fsdp_ignored_modules proj_out, whose gradients would differ"),
        ({"ACCELERATE_USE_CPU": "True"}, {}, "FSDP and use_cpu, which it would run as DDP"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {}, None),
    ],
)
def test_fsdp_configs(environment, changes, says, told):
    found = told(FSDP | environment, **changes)
    assert len(found) == (says is not None) and (not says or says in found[0]), found


@pytest.mark.parametrize("copies, shards, fits", [(2, 2, True), (1, 4, True), (2, 4, False), (4, 1, False)])
def test_hsdp_sizes_make_the_processes(copies, shards, fits, told):
    sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": f"{copies}", "PARALLELISM_CONFIG_DP_SHARD_SIZE": f"{shards}"}
    found = told(HSDP | sizes)
    assert len(found) == (not fits), found
    assert fits or (
        f"dp_replicate_size {copies}, parallelism_config_dp_shard_size {shards} and 4 processes" in found[0]
        and "their product must be the number of processes, and dp_shard_size 2 or more" in found[0]
    )


def test_fsdp_version_1_by_default_is_refused(told):
    (said,) = told({"ACCELERATE_USE_FSDP": "true"})
    assert "fsdp_version 1" in said


@pytest.mark.parametrize("environment, name", [(FSDP, "FSDP2"), (ZERO, "DeepSpeed")])
def test_optimizers_that_cannot_update_shards(environment, name, told):
    fit = {"FSDP2": sharding.UNDER_FSDP, "DeepSpeed": sharding.UNDER_ZERO}[name]
    for optimizer in get_args(OptimizerName):
        found = told(environment, optimizer__name=optimizer)
        if optimizer in fit:
            assert found == []
        else:
            (said,) = found
            assert f"optimizer.name {optimizer} under {name}: it cannot update shards; use one of adamw, " in said
            assert said.endswith(", or DDP") and "paged" not in said.partition("use one of")[2]


BOTH = {
    "precision.quantize nf4": {"precision__quantize": "nf4"},
    "optimizer.cpu_offload": {"optimizer__cpu_offload": True},
    "optimizer.fused_backward": {"optimizer__fused_backward": True},
    "memory.context_parallel 2": {"memory__context_parallel": 2},
    "memory.block_swap": {"memory__block_swap": 4},
    "memory.group_offload": {"memory__group_offload": "block"},
    "precision.trainable bf16": {"precision__trainable": "bf16"},
    "precision.weights fp16": {"precision__weights": "fp16"},
}
OF_ZERO = {
    "precision.storage fp8": {"precision__storage": "fp8"},
    "precision.fp8_training": {"precision__fp8_training": True},
}


@pytest.mark.parametrize(
    "environment, name, option",
    [*((FSDP, "FSDP2", o) for o in BOTH), *((ZERO, "DeepSpeed", o) for o in (*BOTH, *OF_ZERO))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_fit_sharding(environment, name, option, told):
    (said,) = told(environment, **(BOTH | OF_ZERO)[option])
    assert said.startswith(f"{option} under {name}") and any(word in said for word in ("use ", "turn it off")), said


@pytest.mark.parametrize(
    "environment, changes, says",
    [
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            {"train__gradient_accumulation_steps": 2},
            "gradient_accumulation_steps 4, but train.gradient_accumulation_steps is 2",
        ),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {"train__gradient_accumulation_steps": 4}, None),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, {"train__gradient_accumulation_steps": 4}, None),
        (
            {"ACCELERATE_GRADIENT_CLIPPING": "0.5"},
            {},
            "accelerate's deepspeed_config has gradient_clipping 0.5, but optimizer.max_grad_norm is 1.0: make it auto",
        ),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, {}, None),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, {}, "ZeRO stage 0; choose 1, 2 or 3, or launch with DDP"),
        (
            {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            {"optimizer__name": "adamw8bit"},
            "optimizer.name adamw8bit with offload_optimizer cpu: DeepSpeed updates on the CPU with its own Adam only",
        ),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {}, None),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision__weights": "fp32"}, "mixed_precision bf16, but precision"),
    ],
)
def test_deepspeed_configs(environment, changes, says, told):
    found = told(ZERO | environment, **changes)
    assert len(found) == (says is not None) and (not says or says in found[0]), found


def test_deepspeed_that_is_not_installed(told, monkeypatch):
    monkeypatch.setattr(sharding, "_missing", lambda package: package == "deepspeed")
    assert told(ZERO) == [
        "accelerate is launched with DeepSpeed, which is not installed: pip install -e '.[deepspeed]'"
    ]


def of_file(path: Path) -> dict[str, str]:
    """What `accelerate launch` says of a deepspeed_config_file."""
    plain = {name: value for name, value in ZERO.items() if "STAGE" not in name}
    return plain | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


def test_a_file_that_says_otherwise_is_told_all_at_once(told, tmp_path):
    own = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR"},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 0},
    }
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own))
    found = told(of_file(path) | {"ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero_stage,mixed_precision"})
    for text in (
        "has train_batch_size 32, but 1 x 1 accumulation x 4 processes make 4: make it auto there, or change",
        "has train_micro_batch_size_per_gpu 2, but train.batch_size is 1: make it auto there",
        "has gradient_accumulation_steps 4, but train.gradient_accumulation_steps is 1: make it auto there",
        "has gradient_clipping 0.5, but optimizer.max_grad_norm is 1.0: make it auto there",
        "has bf16.enabled false, but precision.weights is bf16: make it auto there",
        "enables fp16: use bf16 and precision.weights bf16",
        "has an optimizer: remove it, optimizer.name and the options beside it hold",
        "has a scheduler: remove it, optimizer.schedule holds",
        "has tensor_parallel, which is not supported",
        "ZeRO stage 0; choose 1, 2 or 3, or launch with DDP",
    ):
        (said,) = [line for line in found if text in line]
        assert said.startswith(f"the DeepSpeed config {path}")
    (said,) = [line for line in found if "mixed_precision, zero_stage beside deepspeed_config_file" in line]
    assert len(found) == 11


def test_files_that_are_none(told, tmp_path):
    absent, broken, listed, bare = (tmp_path / f"{name}.json" for name in ("absent", "broken", "listed", "bare"))
    broken.write_text("{")
    listed.write_text("[]")
    bare.write_text("{}")
    for path, says in (
        (absent, "cannot be read: [Errno 2]"),
        (broken, "cannot be read: Expecting property name"),
        (listed, "cannot be read: it holds no object"),
        (bare, 'has no zero_optimization: add one with "stage" 1, 2 or 3'),
    ):
        (said,) = told(of_file(path))
        assert f"the DeepSpeed config {path} {says}" in said


@pytest.mark.parametrize(
    "own, says",
    [
        ({"zero_optimization": 2}, "zero_optimization is 2, not an object"),
        ({"zero_optimization": None}, "zero_optimization is null, not an object"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage is "two"; choose 1, 2 or 3'),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, 'offload_optimizer is "cpu", not an object'),
        ({"bf16": True, "fp16": 1}, "bf16 is true, not an object; fp16 is 1, not an object"),
        ({"gradient_clipping": "none"}, 'gradient_clipping is "none", neither a number nor "auto"'),
    ],
)
def test_values_of_the_wrong_kind(own, says, told, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | own))
    (said,) = told(of_file(path))
    assert f"the DeepSpeed config {path} cannot be read: " in said and says in said


def environment_of(command: str) -> tuple[dict[str, str], list[str]]:
    """What a command of the pages sets for its ranks, and what follows the script."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words if re.match(r"[A-Z][A-Z0-9_]*=", word))
    words = words[len(given) :]
    script = next(i for i, word in enumerate(words) if re.fullmatch(r"train_\w+\.py", word))
    if words[0] == "torchrun":
        return given | {"WORLD_SIZE": words[words.index("--nproc_per_node") + 1]}, words[script + 1 :]
    if words[0] == "sbatch":
        nodes, each = (words[words.index(name) + 1] for name in ("--nodes", "--gpus-per-node"))
        file = given.get("CONFIG", "configs/accelerate/multi_node.yaml")
        launch = ["--config_file", file, "--num_machines", nodes, "--num_processes", str(int(nodes) * int(each))]
        words = [*launch, "--machine_rank", "1", "--main_process_ip", "node0", *words[script:]]
    else:
        words = words[2:]
    parsed = launch_command_parser().parse_args(["--main_process_port", str(runs.free_port()), *words])
    parsed, _, named = _validate_launch_command(parsed)
    if parsed.use_deepspeed:
        parsed.deepspeed_fields_from_accelerate_config = ",".join(["mixed_precision"] * named)
        _, made = prepare_deepspeed_cmd_env(parsed)
    else:
        made = prepare_multi_gpu_env(parsed)
    made = {k: v for k, v in made.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
    return made | {"ACCELERATE_USE_CPU": "false", "WORLD_SIZE": str(parsed.num_processes)}, parsed.training_script_args


PAGES = [ROOT / "docs" / "distributed.md", ROOT / "docs" / "quickstart.md"]
COMMANDS = [line for page in PAGES for line in commands(page) if " train_" in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_pages_are_not_refused(command, monkeypatch):
    """The options of each fit what it launches."""
    monkeypatch.chdir(ROOT)
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]:
        monkeypatch.delenv(name)
    environment, words = environment_of(command)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    script = re.search(r"train_(\w+)\.py", command)[1]
    config = parse(runs.trainers_by_name()[script].Config, [word for word in words if word != "..."] + MORE)
    assert launcher.contradictions(config) == []
    kinds = {"zero|DEEPSPEED": "zero", "[hf]sdp|FSDP": "fsdp", "": "none"}
    asked = next(kind for pattern, kind in kinds.items() if re.search(pattern, command))
    assert sharding.launched().rstrip("123") == asked


# -- configs/deepspeed ------------------------------------------------------------------------------------------------

SGD = {"optimizer__name": "sgd", "optimizer__learning_rate": 0.5, "optimizer__max_grad_norm": 0.05}
ADAM = {"optimizer__max_grad_norm": 0.05}


def test_shipped_files_leave_to_the_options_what_is_theirs(told):
    assert {file.stem for file in JSONS} == {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    for file in JSONS:
        assert told(of_file(file), train__batch_size=3, optimizer__max_grad_norm=0, precision__weights="fp32") == []
        zero = json.loads(file.read_text())["zero_optimization"]
        assert f"zero{zero['stage']}" == file.stem.removesuffix("_offload")
        assert ("offload_optimizer" in zero) == file.stem.endswith("_offload")
        assert not any(zero.get(key) == "auto" for key in sharding.HIDDEN_SIZE_KEYS)


def engine_run(file: Path, model, clips, out, changes) -> dict:
    """A run on this rank under a DeepSpeed file; what DeepSpeed itself says of its settings."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file))
    backends.patch()
    made = runs.trainer(LTXTrainer, model, clips, out, **changes)
    made.run()
    engine = made.model
    offload = [engine.zero_offload_optimizer(), engine.zero_offload_param()]
    return {
        "stage": engine.zero_optimization_stage(),
        "batch": [engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()],
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "bf16": engine.bfloat16_enabled(),
        "offload": [where is not None and str(where.device) for where in offload],
    }


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("file", JSONS, ids=lambda file: file.stem)
def test_auto_takes_our_values(file, weights, tiny_ltx, clips, cache, tmp_path):
    """DeepSpeed accumulates and clips as told; what it trains is what one process does."""
    offloads = file.stem.endswith("_offload")
    if offloads:  # torch's AdamW instead of one that is built here, for 30 s
        own = json.loads(file.read_text()) | {"zero_force_ds_cpu_optimizer": False}
        file = tmp_path / file.name
        file.write_text(json.dumps(own))
    changes = {"data__cache_dir": cache, "precision__weights": weights, "train__steps": 3, "train__batch_size": 2}
    changes |= ADAM if offloads else SGD
    out, single = tmp_path / "run", tmp_path / "single"
    more = changes | {"train__gradient_accumulation_steps": 3}
    facts = runs.forked(engine_run, file, tiny_ltx, clips, out, more)
    assert (
        facts[0]
        == facts[1]
        == {
            "stage": int(file.stem[4]),
            "batch": [2, 12],
            "accumulation": 3,
            "clipping": 0.05,
            "bf16": weights == "bf16",
            "offload": ["cpu" if offloads else False, "cpu" if file.stem == "zero3_offload" else False],
        }
    )
    runs.run(tiny_ltx, clips, single, **changes, train__gradient_accumulation_steps=6)
    ours, theirs = runs.metrics(out), runs.metrics(single)
    assert min(row["grad_norm"] for row in theirs) > 0.05  # so that clipping shows
    bound = 1e-5 if weights == "fp32" else 0.02
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], abs=bound)
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=10 * bound)


# -- HSDP -------------------------------------------------------------------------------------------------------------


def hsdp_run(model, clips, out, changes) -> list[str]:
    """A run on this rank of four, two copies of the network in two shards each; how its parameters lie."""
    sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    os.environ.update(sizes, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    backends.enable("fsdp")
    made = runs.trainer(LTXTrainer, model, clips, out, **changes)
    made.run()
    whole = sharding.gathered(made.accelerator, made.network, True, torch.float32)
    if made.accelerator.is_main_process:
        torch.save(whole, out / "weights.pt")
    return sorted({f"{tuple(p.device_mesh.shape)} {p.placements}" for p in made.network.parameters()})


def test_hsdp_holds_copies_of_shards_and_goes_on_as_fsdp(tiny_ltx, clips, cache, tmp_path):
    whole, again, single = tmp_path / "whole", tmp_path / "again", tmp_path / "single"
    options = {"data__cache_dir": cache}
    layouts = runs.forked(hsdp_run, tiny_ltx, clips, whole, options | {"checkpoint__every": 2}, world=4)
    assert layouts == [["(2, 2) (Replicate(), Shard(dim=0))"]] * 4
    made = runs.run(tiny_ltx, clips, single, **options, train__gradient_accumulation_steps=4)
    for name, parameter in weights(whole).items():
        assert (parameter - made.network.get_parameter(name)).abs().max() < 1e-4
    assert runs.losses(whole) == pytest.approx(runs.losses(single), abs=1e-5)

    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    changes = options | {"train__gradient_accumulation_steps": 2}
    launch("fsdp", tiny_ltx, clips, again, checkpoint__resume="latest", **changes)
    assert farthest(weights(again), weights(whole)) < 1e-5
    assert runs.losses(again) == pytest.approx(runs.losses(whole)[2:], abs=1e-6)


# -- on every backend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("backend", ["fsdp", "zero3"])
def test_few_or_uneven_samples_do_not_hang(backend, count, tiny_ltx, clips, cache, tmp_path):
    """Two ranks with batches of 2 from 1, 3 and 5 samples, in two buckets where there are several."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in ["tall_0", "wide_0", "tall_1", "wide_1", "wide_2"][:count]:
        for path in clips.glob(f"{name}.*"):
            shutil.copy(path, folder)
    options = {"data__cache_dir": cache, "train__batch_size": 2, "train__steps": 3}
    launch(backend, tiny_ltx, folder, tmp_path / "run", **options)
    rows = runs.metrics(tmp_path / "run")
    assert [(row["step"], row["samples_seen"]) for row in rows] == [(1, 4), (2, 8), (3, 12)]
    assert checkpoints.problem(tmp_path / "run" / "checkpoint-3") is None


def saves_and_rates(backend, model, clips, out, changes) -> dict:
    """A run on this rank; at which steps it saved its state, and the rate of its optimizer at each update."""
    backends.enable(backend)
    made = runs.trainer(LTXTrainer, model, clips, out, **changes)
    saved, rates, write, after = [], [], checkpoints.write_state, made.after_step

    def counted(*arguments):
        saved.append(made.step)
        write(*arguments)

    def stepped():
        rates.append([float(group["lr"]) for group in made.optimizer.param_groups])
        after()

    checkpoints.write_state, made.after_step = counted, stepped
    made.run()
    return {"saved": saved, "rates": rates, "step": made.step}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("backend", backends.KINDS)
def test_every_rank_saves_and_rates_are_of_optimizer_steps(backend, accumulation, tiny_ltx, clips, cache, tmp_path):
    """The rate that the optimizer has, whatever wraps it: linear, warmed up in 2 steps, at its end with the last."""
    schedule = {"optimizer__schedule": "linear", "optimizer__warmup_steps": 2, "optimizer__learning_rate": 8e-3}
    changes = {"data__cache_dir": cache, "train__steps": 10, "checkpoint__every": 5} | schedule
    changes["train__gradient_accumulation_steps"] = accumulation
    ranks = runs.forked(saves_and_rates, backend, tiny_ltx, clips, tmp_path / "run", changes)
    for rank in ranks:
        assert rank["step"] == 10 and rank["saved"] == [5, 10]
        assert [rates[0] for rates in rank["rates"]] == pytest.approx(
            [4e-3, 8e-3, 8e-3, 7e-3, 6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3]
        )
        assert all(len(set(rates)) == 1 for rates in rank["rates"])


def test_empty_tensors_from_gathering_are_never_written(tiny_ltx, clips, cache, tmp_path, monkeypatch):
    """As ZeRO-3 holds them outside of its layers: an error, no export of them, and what was saved before stays."""
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path, data__cache_dir=cache, checkpoint__every=2)
    gather = sharding.gathered

    def emptied(accelerator, net, *rest):
        if made.step < 4:
            return gather(accelerator, net, *rest)
        return {name: torch.empty(0) for name, p in net.named_parameters() if p.requires_grad}

    monkeypatch.setattr(sharding, "gathered", emptied)
    with pytest.raises(ExportError, match=r"pytorch_lora_weights\.safetensors: transformer\..* and 31 more empty"):
        made.run()
    assert [p.name for p in checkpoints.numbered(tmp_path)] == ["checkpoint-2"]
    assert checkpoints.problem(tmp_path / "checkpoint-2") is None and not (tmp_path / runs.LORA).exists()
