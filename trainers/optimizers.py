"""Optimizers by name, and the learning rate as a function of the optimizer step."""

import importlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainers.config import Config, OptimizerOptions, OptionError
from trainers.fused_backward import FusedBackward, Joined
from trainers.rules import ROUNDS_STOCHASTICALLY

# name -> (module, class, arguments that no option sets)
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {}),
    "sgd": ("torch.optim", "SGD", {}),
    # The scale at which AdamW's learning rate and weight decay fit: 0.2 sqrt(max(rows, columns)), arXiv:2502.16982.
    "muon": ("torch.optim", "Muon", {"adjust_lr_fn": "match_rms_adamw"}),
    "adamw8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "lion8bit": ("bitsandbytes.optim", "Lion8bit", {}),
    "ademamix8bit": ("bitsandbytes.optim", "AdEMAMix8bit", {}),
    "paged_adamw8bit": ("bitsandbytes.optim", "PagedAdamW8bit", {}),
    "paged_lion8bit": ("bitsandbytes.optim", "PagedLion8bit", {}),
    "paged_ademamix8bit": ("bitsandbytes.optim", "PagedAdEMAMix8bit", {}),
    "adamw8bit-ao": ("torchao.optim", "AdamW8bit", {}),
    "adamw4bit-ao": ("torchao.optim", "AdamW4bit", {}),
    "adamwfp8-ao": ("torchao.optim", "AdamWFp8", {}),
    "adamw-kahan": ("optimi", "AdamW", {}),
    # The rate is the one given: neither falling by itself nor a multiple of a tensor's own size (0 for a new lora_B).
    "adafactor": ("transformers.optimization", "Adafactor", {"scale_parameter": False, "relative_step": False}),
    "came": ("came_pytorch", "CAME", {}),
    # As its authors advise for diffusion models and for warm-up.
    "prodigy": ("prodigyopt", "Prodigy", {"use_bias_correction": True, "safeguard_warmup": True}),
    "schedulefree": ("schedulefree", "AdamWScheduleFree", {}),
}
# module -> package, of the extra `optimizers`
EXTRAS = {
    "optimi": "torch-optimi",
    "came_pytorch": "came-pytorch",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
}
CPU = torch.device("cpu")
SLOWEST_BETA = 0.9999  # of AdEMAMix' slow average and of CAME's confidence: their papers' value
HIDDEN = re.compile(r"blocks\.\d+\.")  # inside a repeated block
TABLES = ("_table", "_embedding")  # ends of the names of parameters that are added to activations, as biases are


def problems(c: Config, device: torch.device, processes: int) -> list[str]:
    """What optimizer.name, cpu_offload and fused_backward need and this launch does not have."""
    if c.precompute_only or c.stage not in ("all", "train"):
        return []
    found, module = [], CLASSES[c.optimizer.name][0]
    for option in ("cpu_offload", "fused_backward"):
        if getattr(c.optimizer, option) and processes > 1:
            found.append(
                f"optimizer.{option} on {processes} processes: it takes gradients before the processes have averaged "
                "them; launch one process, or turn it off (DeepSpeed and FSDP2 have an offloading of their own)"
            )
    if module in EXTRAS and find_spec(module) is None:
        found.append(
            f"optimizer.name {c.optimizer.name} needs the package {EXTRAS[module]}, which is not installed: "
            "pip install -e '.[optimizers]'"
        )
    if c.optimizer.cpu_offload and device.type != "cuda":
        found.append(
            f"optimizer.cpu_offload moves the optimizer off a CUDA device and this run is on {device.type}: turn it off"
        )
    return found


def build(
    options: OptimizerOptions, parameters: dict[str, Parameter], device: torch.device = CPU
) -> torch.optim.Optimizer:
    """The optimizer `options.name` over `parameters`, by name, which will be on `device` when it steps.

    muon updates the matrices of repeated blocks and leaves the rest to AdamW; torchao's round stochastically where the
    parameters are bf16. Every group holds its factor of the learning rate (`set_rate`) and of the weight decay.
    Raises ValueError for an unknown name, OptionError for muon without such a matrix.
    """
    if options.name not in CLASSES:
        raise ValueError(f"unknown optimizer {options.name!r}")
    if options.name == "muon":
        hidden = {name: p for name, p in parameters.items() if takes_muon(name, p.shape)}
        if not hidden:
            raise OptionError("optimizer.name muon is for matrices of the network's blocks, and none trains: use adamw")
        rest = {name: p for name, p in parameters.items() if name not in hidden}
        made = _made("muon", options, hidden, device)
        made = Joined(made, _made("adamw", options, rest, device)) if rest else made
    else:
        made = _made(options.name, options, parameters, device)
    return FusedBackward(made, parameters) if options.fused_backward else made


def _made(
    name: str, options: OptimizerOptions, parameters: dict[str, Parameter], device: torch.device
) -> torch.optim.Optimizer:
    module, kind, fixed = CLASSES[name]
    groups, rate = _groups(name, options, parameters), options.learning_rate
    if options.cpu_offload:
        return _offloaded(groups, rate)
    if name == "adamw":
        # One kernel for all tensors where the device has it; on CPU it is no faster and differs in the last bits.
        fixed = {"fused": device.type == "cuda"}
    elif name in ROUNDS_STOCHASTICALLY:
        fixed = {"bf16_stochastic_round": any(p.dtype == torch.bfloat16 for p in parameters.values())}
    made = getattr(importlib.import_module(module), kind)(groups, lr=rate, **fixed)
    if name == "schedulefree":
        made.train()
    return made


def _groups(name: str, options: OptimizerOptions, parameters: dict[str, Parameter]) -> list[dict[str, Any]]:
    """`parameters` by what sets their rate and decay, the same groups whatever the options: they may change on resume.

    No weight decay on biases, norms and tables that are added; lora_B by itself for LoRA+ (arXiv:2402.12354).
    """
    kinds: dict[tuple[bool, bool], list[Parameter]] = {}
    for full, p in parameters.items():
        decays = p.ndim > 1 and not full.endswith(TABLES)
        kinds.setdefault((decays, "lora_B" in full), []).append(p)
    groups = []
    for (decays, is_b), members in kinds.items():
        group = {"params": members, "lr": options.learning_rate, "decay_factor": float(decays), "is_lora_b": is_b}
        groups.append(group | _settings(name, options, group))
    return groups


def _settings(name: str, options: OptimizerOptions, group: dict[str, Any]) -> dict[str, Any]:
    """What the options say of a group, by the names that the algorithm `name` reads in it."""
    betas, eps = tuple(options.betas), {"eps": options.epsilon}
    own = {
        "rate_factor": options.lora_plus_ratio if group["is_lora_b"] else 1.0,
        "weight_decay": options.weight_decay * group["decay_factor"],
    }
    if name in ("sgd", "muon"):
        return own | {"momentum": options.momentum}
    if name == "adafactor":
        return own
    if name == "came":
        return own | {"betas": (*betas, SLOWEST_BETA)}
    if name == "adamw-kahan":
        return own | eps | {"beta1": betas[0], "beta2": betas[1]}
    if name.endswith("lion8bit"):
        return own | {"betas": betas}
    if name.endswith("ademamix8bit"):
        return own | eps | {"betas": (*betas, SLOWEST_BETA)}
    return own | eps | {"betas": betas}


def _offloaded(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """torchao's AdamW on the host, with two things set right that loading a state leaves wrong in torchao 0.18."""
    from torchao.optim import CPUOffloadOptimizer

    class Offloaded(CPUOffloadOptimizer):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if self.d_opt is not None:  # its groups are new ones: rates written into the old would not reach it
                self.d_param_groups = self.d_opt.param_groups
            for on_device, on_host in self.param_d2h_map.items():  # the host's weights are what is updated
                on_host.copy_(on_device.detach())

    return Offloaded(groups, torch.optim.AdamW, lr=rate)


def takes_muon(parameter: str, shape: Sequence[int]) -> bool:
    """Whether optimizer.name muon updates this parameter with Muon, and not with AdamW."""
    return len(shape) == 2 and HIDDEN.search(parameter) is not None and not parameter.endswith(TABLES)


def state_bytes(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, parameter: str = "") -> int:
    """Bytes of state that optimizer `name` keeps for a tensor, counters of a few bytes left out.

    `parameter`: its full name, for muon, which has AdamW for what is outside of blocks, and for prodigy, which keeps
    less of what starts at zero (lora_B). sgd: with momentum.
    """
    n, size = math.prod(shape), dtype.itemsize
    if name == "muon":
        name = "sgd" if takes_muon(parameter, shape) else "adamw"
    if name == "sgd":
        return n * size
    if name == "adamw-kahan":
        return n * size * (3 if size == 2 else 2)
    if name == "prodigy":
        return n * size * (3 if "lora_B" in parameter else 4)
    if name in ("adafactor", "came"):
        # Sums of rows and columns over the last two dimensions, in float32; CAME has two of them, and a mean.
        sums = n // shape[-1] + n // shape[-2] if len(shape) > 1 else n
        return 4 * sums if name == "adafactor" else 4 * (n + (2 * sums if len(shape) > 1 else n))
    if name in ROUNDS_STOCHASTICALLY:
        block, code, table = (128, 0.5, 64) if name == "adamw4bit-ao" else (256, 1, 1024)
        table = 0 if name == "adamwfp8-ao" else table
        if n < 4096 or n % block:
            return 2 * n * size
        return int(2 * (n * code + 4 * n // block + table))
    for kind, moments in (("adamw8bit", 2), ("ademamix8bit", 3), ("lion8bit", 1)):
        if name.endswith(kind):
            return moments * (4 * n if n < 4096 else n + 4 * math.ceil(n / 256))
    if name in ("adamw", "schedulefree"):
        return 2 * n * size
    raise ValueError(f"unknown optimizer {name!r}")


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of a run of `steps`: linear warm-up, then the schedule.

    No step has rate 0: warm-up starts at 1/warmup_steps of the full rate, and the schedule's end (min_lr_ratio of the
    full rate) is where step `steps`, one after the last, would be, as in diffusers and transformers.
    """
    warmup = min(options.warmup_steps, steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if options.schedule == "constant":
        ratio = 1.0
    elif options.schedule == "linear":
        ratio = 1 - done
    elif options.schedule == "cosine":
        ratio = 0.5 * (1 + math.cos(math.pi * done))
    elif options.schedule == "polynomial":
        ratio = (1 - done) ** options.power
    elif options.schedule == "cosine_with_restarts":
        ratio = 0.0 if done == 1 else 0.5 * (1 + math.cos(math.pi * (done * options.cycles % 1)))
    else:
        raise ValueError(f"unknown schedule {options.schedule!r}")
    return options.learning_rate * (options.min_lr_ratio + (1 - options.min_lr_ratio) * ratio)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Writes `rate` times its own factor into every group. torchao keeps its rate in a tensor, which must stay one."""
    for group in optimizer.param_groups:
        own = rate * group["rate_factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def apply_options(optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> None:
    """Writes this run's options into every parameter group: a loaded state brings those of the run that saved it."""
    for group in optimizer.param_groups:
        name = "adamw" if options.name == "muon" and "betas" in group else options.name
        group.update(_settings(name, options, group))
        if "step" in group:  # of adamw-kahan, which reads it in every step: loaded onto the device, each would wait
            group["step"] = group["step"].cpu()


def clip(accelerator, optimizer: torch.optim.Optimizer, parameters: list[Parameter], max_norm: float) -> Tensor:
    """Clips the gradients to `max_norm` (0: does not) and returns the norm that they had, on the device.

    With fused_backward, which frees them and is refused with clipping, it is the one that the backward pass noted.
    """
    if isinstance(optimizer.optimizer, FusedBackward):
        return optimizer.optimizer.gradient_norm()
    return accelerator.clip_grad_norm_(parameters, max_norm or math.inf)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, the weights are those to use: the averaged ones of schedulefree; every other optimizer has no others.

    Afterwards the weights that train are back bit for bit, from a copy on the host: schedulefree's own way back rounds.
    """
    if "train_mode" not in optimizer.param_groups[0]:
        yield
        return
    kept = [(p, p.detach().to("cpu", copy=True)) for group in optimizer.param_groups for p in group["params"]]
    optimizer.eval()
    try:
        yield
    finally:
        for parameter, training in kept:
            parameter.data.copy_(training)
        for group in optimizer.param_groups:
            group["train_mode"] = True
