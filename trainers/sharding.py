"""FSDP2 and DeepSpeed: what of them fits our options, what they need to be told, and whole tensors out of their shards.

Which of them runs is the launcher's to say (`accelerate launch --config_file ...`); Accelerate does the rest.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from models.export import saved_dtype
from trainers.config import Config

# "auto" values of these Accelerate takes from `model.config.hidden_size`, which diffusers' networks do not have.
HIDDEN_SIZE_KEYS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# torch's and bitsandbytes' that were run with sharded weights and with flat partitions: same weights, exact resume.
UNDER_FSDP = ("adamw", "sgd", "adamw8bit-ao", "adamw4bit-ao", "adamwfp8-ao")
UNDER_ZERO = ("adamw", "sgd", "adamw8bit", "lion8bit", "ademamix8bit")
# Numbers in a deepspeed_config_file that our options decide.
OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
# What Accelerate refuses in its own config beside a deepspeed_config_file.
NOT_BESIDE_A_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "mixed_precision",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
    "zero_stage",
)


def _on(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def launched() -> str:
    """What `accelerate launch` asked for: "none" (one process or DDP), "fsdp", "zero1", "zero2" or "zero3"."""
    if _on("FSDP"):
        return "fsdp"
    return f"zero{_zero_stage()}" if _on("DEEPSPEED") else "none"


def _own_json() -> tuple[str, dict]:
    """The user's deepspeed_config_file and what it holds; ("", {}) where there is none."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        return "", {}
    try:
        own = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return path, {"unreadable": str(error)}
    fault = _fault(own)
    return path, {"unreadable": fault} if fault else own


def _fault(own) -> str:
    """What in a deepspeed_config_file is not of its kind, of all that is read here; "" where nothing is."""
    if not isinstance(own, dict):
        return "it holds no object"
    zero = own.get("zero_optimization", {})
    parts = {name: own.get(name, {}) for name in ("zero_optimization", "bf16", "fp16", "tensor_parallel")}
    if isinstance(zero, dict):
        parts["zero_optimization.offload_optimizer"] = zero.get("offload_optimizer", {})
        if zero.get("stage", "auto") not in ("auto", 0, 1, 2, 3):
            return f"zero_optimization.stage is {json.dumps(zero['stage'])}; choose 1, 2 or 3"
    found = [f"{name} is {json.dumps(part)}, not an object" for name, part in parts.items() if type(part) is not dict]
    found += [
        f'{name} is {json.dumps(own[name])}, neither a number nor "auto"'
        for name in OURS
        if own.get(name) not in (None, "auto") and type(own[name]) not in (int, float)
    ]
    return "; ".join(found)


def _zero_stage() -> int:
    _, own = _own_json()
    stage = own.get("zero_optimization", {}).get("stage", "auto")
    return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)) if stage == "auto" else int(stage)


# -- what does not fit ------------------------------------------------------------------------------------------------


def contradictions(c: Config) -> list[str]:
    """Where what was launched contradicts the options, or cannot work with them."""
    kind = launched()
    if kind == "none":
        return []
    if kind == "fsdp":
        return _of_fsdp(c)
    return _of_deepspeed(c, int(kind[-1]))


def _of_both(c: Config, name: str, optimizers: Sequence[str]) -> list[tuple[object, str]]:
    kinds = ", ".join(optimizers)
    return [
        (
            c.precision.quantize != "none",
            f"precision.quantize {c.precision.quantize} under {name}, which cannot shard or cast such weights: launch "
            "with DDP (MULTI_GPU), which holds them once per GPU, or use precision.quantize none",
        ),
        (
            c.optimizer.name not in optimizers,
            f"optimizer.name {c.optimizer.name} under {name}: it cannot update shards; use one of {kinds}, or DDP",
        ),
        (
            c.optimizer.cpu_offload,
            f"optimizer.cpu_offload under {name}: use its own offloading to the CPU instead, as in "
            f"configs/accelerate/{'fsdp2' if name == 'FSDP2' else 'zero2'}_offload.yaml",
        ),
        (
            c.optimizer.fused_backward,
            f"optimizer.fused_backward under {name}: it shards gradients already; turn it off",
        ),
        (
            c.memory.context_parallel > 1,
            f"memory.context_parallel {c.memory.context_parallel} under {name}: it works with DDP (MULTI_GPU); launch "
            "so, or use 1",
        ),
        (c.memory.block_swap, f"memory.block_swap under {name}, which moves weights itself: use 0, or DDP"),
        (c.memory.group_offload != "none", f"memory.group_offload under {name}, which moves weights itself: use none"),
        (
            c.precision.trainable == "bf16",  # DeepSpeed has fp32 copies, Accelerate casts before FSDP2 shards
            f"precision.trainable bf16 under {name}, where what trains is kept in fp32 all the same: use fp32",
        ),
        (
            c.precision.weights == "fp16",
            f"precision.weights fp16 under {name} is not supported: use bf16, or fp16 with DDP or one process",
        ),
    ]


def _of_fsdp(c: Config) -> list[str]:
    version = os.environ.get("FSDP_VERSION", "1")
    checkpointing = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower() == "true"
    ranks, copies, shards = (
        int(os.environ.get(key, 1))
        for key in ("WORLD_SIZE", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE")
    )
    rules = [
        (version != "2", f"accelerate is launched with fsdp_version {version}; set fsdp_version: 2 in its fsdp_config"),
        (
            checkpointing,
            "accelerate is launched with fsdp_activation_checkpointing true: set it to false, "
            f"memory.checkpointing (here {c.memory.checkpointing}) decides",
        ),
        (
            os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true",
            "accelerate is launched with FSDP and use_cpu, which it would run as DDP: leave one of them out",
        ),
        (
            ignored := os.environ.get("FSDP_IGNORED_MODULES"),
            f"accelerate is launched with fsdp_ignored_modules {ignored}, whose gradients would differ from rank to "
            "rank: remove it there",
        ),
        (
            _on("PARALLELISM_CONFIG") and (copies * shards != ranks or shards < 2),
            f"accelerate is launched with parallelism_config_dp_replicate_size {copies}, "
            f"parallelism_config_dp_shard_size {shards} and {ranks} processes: their product must be the number of "
            "processes, and dp_shard_size 2 or more",
        ),
        *_of_both(c, "FSDP2", UNDER_FSDP),
    ]
    return [text for broken, text in rules if broken]


def _of_deepspeed(c: Config, stage: int) -> list[str]:
    path, own = _own_json()
    where = f"the DeepSpeed config {path}" if path else "accelerate's deepspeed_config"
    if "unreadable" in own:
        return [f"{where} cannot be read: {own['unreadable']}"]
    zero = own.get("zero_optimization", {})
    offload = zero.get("offload_optimizer", {}).get("device", "none") if path else "auto"
    if offload == "auto":
        offload = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    if not path:  # accumulation: trainers/launch.py
        own = {"gradient_clipping": os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")}
    batch, micro, ranks = c.train.batch_size, c.train.gradient_accumulation_steps, int(os.environ.get("WORLD_SIZE", 1))
    said = {
        "train_batch_size": (f"{batch} x {micro} accumulation x {ranks} processes make", batch * micro * ranks),
        "train_micro_batch_size_per_gpu": ("train.batch_size is", batch),
        "gradient_accumulation_steps": ("train.gradient_accumulation_steps is", micro),
        "gradient_clipping": ("optimizer.max_grad_norm is", c.optimizer.max_grad_norm),
    }
    differ = [
        f"{where} has {key} {own[key]}, but {words} {ours}: make it auto there, or change the option"
        for key, (words, ours) in said.items()
        if own.get(key) not in (None, "auto") and float(own[key]) != ours
    ]
    bf16 = own.get("bf16", {}).get("enabled", "auto")
    beside = sorted({*os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")} & {*NOT_BESIDE_A_FILE})
    rules = [
        (
            _missing("deepspeed"),
            "accelerate is launched with DeepSpeed, which is not installed: pip install -e '.[deepspeed]'",
        ),
        (stage not in (1, 2, 3), f"{where}: ZeRO stage {stage}; choose 1, 2 or 3, or launch with DDP (MULTI_GPU)"),
        (
            path and "zero_optimization" not in own,
            f'{where} has no zero_optimization: add one with "stage" 1, 2 or 3',
        ),
        (
            path and beside,
            f"accelerate's config has {', '.join(beside)} beside deepspeed_config_file {path}, which Accelerate does "
            "not take: remove them there",
        ),
        (
            bf16 not in ("auto", c.precision.weights == "bf16"),
            f"{where} has bf16.enabled {str(bf16).lower()}, but precision.weights is {c.precision.weights}: make it "
            "auto there, or change the option",
        ),
        (
            own.get("fp16", {}).get("enabled", "auto") is True,
            f"{where} enables fp16: use bf16 and precision.weights bf16",
        ),
        ("optimizer" in own, f"{where} has an optimizer: remove it, optimizer.name and the options beside it hold"),
        (
            own.get("tensor_parallel", {}).get("autotp_size", 0) > 1,
            f"{where} has tensor_parallel, which is not supported: remove it, ZeRO-3 and FSDP2 shard the weights too",
        ),
        ("scheduler" in own, f"{where} has a scheduler: remove it, optimizer.schedule holds"),
        (
            offload != "none" and c.optimizer.name != "adamw",
            f"optimizer.name {c.optimizer.name} with offload_optimizer {offload}: DeepSpeed updates on the CPU with "
            "its own Adam only; use adamw, or offload_optimizer none",
        ),
        (
            c.precision.storage == "fp8",
            "precision.storage fp8 under DeepSpeed: it casts all weights to one precision; use none, or launch with "
            "FSDP2 or DDP",
        ),
        (c.precision.fp8_training, "precision.fp8_training under DeepSpeed: use FSDP2, DDP or one process"),
        *_of_both(c, "DeepSpeed", UNDER_ZERO),
    ]
    return differ + [text for broken, text in rules if broken]


def _missing(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is None


# -- what they are told -----------------------------------------------------------------------------------------------


def plugins(c: Config) -> dict:
    """Keywords for Accelerator(): the launched backend's plugin, with what our options say written into it."""
    kind = launched()
    if kind == "none":
        return {}
    if kind == "fsdp":
        return {"fsdp_plugin": _fsdp_plugin()}
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    zero = plugin.deepspeed_config["zero_optimization"]
    for key in HIDDEN_SIZE_KEYS:
        if zero.get(key) == "auto":
            del zero[key]  # DeepSpeed's own default
    plugin.deepspeed_config |= {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": c.train.batch_size,
        "gradient_accumulation_steps": c.train.gradient_accumulation_steps,
        "gradient_clipping": c.optimizer.max_grad_norm,
    }
    return {"deepspeed_plugin": plugin}


def _fsdp_plugin():
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    # Autocast chooses precisions, as on one GPU: a policy that casts would round timesteps and coordinates to bf16.
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        # Loads on rank 0 alone, but Accelerate 1.15 cannot do it for parameters at a network's top (LTX has one).
        cpu_ram_efficient_loading=False,
    )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.cuda.is_available():
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator
    return plugin


def load_whole() -> None:
    """transformers loads whole networks: told of ZeRO-3 it would give text encoders in shards, which nobody gathers."""
    if launched() == "zero3":
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def fit(accelerator, net: nn.Module, blocks: Sequence[str]) -> None:
    """Makes `net` and the backend of `accelerator` ready for prepare: sharded units, autocast, accumulation.

    `blocks`: class names of repeated blocks that the network does not declare itself.
    """
    if accelerator.distributed_type == "FSDP":
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        plugin, known = accelerator.state.fsdp_plugin, {*(getattr(net, "_repeated_blocks", None) or ()), *blocks}
        present = {type(module).__name__ for module in net.modules()}
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = sorted(known & present)
        if accelerator.mixed_precision == "bf16":  # Accelerate does so for one process and DDP, not for FSDP2
            net.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(net.forward)
    elif accelerator.distributed_type == "DEEPSPEED":
        config = accelerator.deepspeed_plugin.deepspeed_config
        config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps


def name(accelerator) -> str:
    """The backend in words, for a checkpoint: what its state can be read by."""
    if accelerator.distributed_type == "FSDP":
        return "FSDP2"
    if accelerator.distributed_type == "DEEPSPEED":
        return f"DeepSpeed ZeRO-{accelerator.deepspeed_plugin.zero_stage} on {accelerator.num_processes} processes"
    return "one process or DDP"


def facts(accelerator, c: Config) -> dict[str, str]:
    """What a checkpoint of this backend must share with the run that resumes it."""
    if accelerator.distributed_type != "DEEPSPEED":
        return {"distribution": name(accelerator)}
    # Its files are named by the precision that it computes in.
    return {"distribution": name(accelerator), "precision.weights": c.precision.weights}


def described(accelerator) -> str:
    """`name`, and under HSDP how many times the network is held: for the plan."""
    mesh = accelerator.parallelism_config
    if mesh is None or not mesh.dp_shard_enabled:
        return name(accelerator)
    return f"{name(accelerator)}, {mesh.dp_replicate_size} copies of the network in {mesh.dp_shard_size} shards each"


def shares_weights(accelerator) -> bool:
    """Whether each rank holds a part of the weights, so that every forward pass needs all ranks."""
    if accelerator.distributed_type == "DEEPSPEED":
        return accelerator.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == "FSDP"


# -- whole tensors ----------------------------------------------------------------------------------------------------


def gathered(accelerator, net: nn.Module, trained_only: bool, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The weights of `net`, whole and on the CPU of the main process ({} on others); None where `net` has them whole.

    A collective, tensor by tensor, so that a rank holds no more of the others' shards at a time. `trained_only`: what
    trains, in its own precision (float32 from DeepSpeed, whose network is a copy in bf16); else all, as exported in
    `dtype`.
    """
    if accelerator.distributed_type not in ("FSDP", "DEEPSPEED"):
        return None
    whole, own = {}, dict(net.named_parameters())
    kept = own.keys() if trained_only else net.state_dict().keys()
    own |= dict(net.named_buffers())
    for name in kept:
        if trained_only and not own[name].requires_grad:
            continue
        tensor = _whole(own[name])
        if accelerator.is_main_process:
            kind = tensor.dtype if trained_only else saved_dtype(net, name, tensor, dtype)
            whole[name] = tensor.detach().to("cpu", kind).contiguous()
    return whole


def _whole(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):  # of ZeRO-3; of what trains under ZeRO-1 and 2
        import deepspeed

        if tensor.requires_grad:
            return deepspeed.utils.safe_get_full_fp32_param(tensor)
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """The trained weights and the optimizer state under FSDP2, each rank its shards. A collective."""
    from torch.distributed import checkpoint

    with _failures():
        checkpoint.save(_state(model, optimizer), checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """What `save` wrote, on any number of ranks. A collective."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _state(model, optimizer)
    with _failures():
        checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["weights"],
        optim_state_dict=state["optimizer"],
        options=_options(),
    )


@contextmanager
def _failures() -> Iterator[None]:
    """torch raises what is no Exception where a rank cannot read or write: here a RuntimeError of the first one's."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(failure).__name__}: {failure}") from error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer, options=_options())
    return {"weights": weights, "optimizer": state}


def _options():
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(ignore_frozen_params=True, strict=False)
