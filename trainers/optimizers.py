"""Optimizers by name, and the learning rate as a function of the optimizer step."""

import math

import torch

from trainers.config import ROUNDS_STOCHASTICALLY, OptimizerOptions


def build(options: OptimizerOptions, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer `options.name` over `parameters`.

    adamw, sgd: torch. adamw8bit: bitsandbytes (8-bit state for tensors of >= 4096 elements). adamw8bit-ao,
    adamw4bit-ao, adamwfp8-ao: torchao, with stochastic rounding where the parameters are bf16.
    """
    rate, decay = options.learning_rate, options.weight_decay
    if options.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=options.momentum, weight_decay=decay)
    adam = dict(lr=rate, betas=tuple(options.betas), eps=options.epsilon, weight_decay=decay)
    if options.name == "adamw":
        # One kernel for all tensors where the device has it; on CPU it is no faster and differs in the last bits.
        return torch.optim.AdamW(parameters, fused=parameters[0].is_cuda, **adam)
    if options.name == "adamw8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **adam)
    if options.name in ROUNDS_STOCHASTICALLY:
        from torchao import optim

        name = {"adamw8bit-ao": "AdamW8bit", "adamw4bit-ao": "AdamW4bit", "adamwfp8-ao": "AdamWFp8"}[options.name]
        bf16 = any(p.dtype == torch.bfloat16 for p in parameters)
        return getattr(optim, name)(parameters, bf16_stochastic_round=bf16, **adam)
    raise ValueError(f"unknown optimizer {options.name!r}")


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
    """Writes `rate` into every parameter group. torchao keeps its rate in a tensor, which must stay one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def apply_options(optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> None:
    """Writes this run's options into every parameter group: a loaded state brings those of the run that saved it."""
    own = {"betas": tuple(options.betas), "eps": options.epsilon, "weight_decay": options.weight_decay}
    own["momentum"] = options.momentum
    for group in optimizer.param_groups:
        group.update({name: value for name, value in own.items() if name in group})
