"""Which precisions go together, and frozen weights stored in fp8.

Measured with diffusers 0.42 and peft 0.21: with fp8 storage the LoRA and LoKr gradients equal, bit for bit, those of a
network whose weights were rounded through fp8, with and without activation checkpointing; `problems` has what fails.
"""

import re
from collections.abc import Sequence

import torch
from torch import nn

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
ROUNDING_OPTIMIZERS = ("adamw8bit-ao", "adamw4bit-ao", "adamwfp8-ao")
# Adapters, norms and the time embedding are small and sensitive: they never become fp8. Regular expressions, searched.
KEPT_PATTERNS = ("norm", "lora_", "time_embed")


class PrecisionError(ValueError):
    """Precisions that the model or the hardware does not stand."""


def problems(config, half_precision: Sequence[str] = ("bf16",)) -> list[str]:
    """What is wrong with the precisions in `config` (trainers.config.Config), known before anything loads.

    `half_precision`: the 16-bit formats that the model was trained to run in.
    """
    found = []
    fp16 = "fp16 ends at 65504 and this model's activations pass that (NaN, black video): use bf16, or fp32"
    if "fp16" not in half_precision:
        if config.precision.weights == "fp16":
            found.append(f"precision.weights fp16: {fp16}")
        for name, component in config.components.items():
            if component.dtype == "fp16" and name.startswith(("transformer", "text_encoder")):
                found.append(f"components.{name}.dtype fp16: {fp16}")
    if config.precision.trainable == "bf16" and config.optimizer.name not in ROUNDING_OPTIMIZERS:
        found.append(
            f"precision.trainable bf16 with optimizer.name {config.optimizer.name}: plain rounding loses most updates "
            f"in bf16's 8 bits; use fp32, or an optimizer that rounds stochastically: {', '.join(ROUNDING_OPTIMIZERS)}"
        )
    if config.precision.storage == "fp8":
        if config.method == "full":
            found.append("precision.storage fp8 with method full: trained weights cannot live in fp8; use method lora")
        elif config.lora.type == "dora":
            found.append(
                "precision.storage fp8 with lora.type dora: DoRA computes with the stored weights themselves, which "
                "fp8 cannot do; use lora.type lora or precision.storage none"
            )
        if config.memory.compile != "none":
            found.append(
                f"precision.storage fp8 with memory.compile {config.memory.compile}: compiled code keeps weights for "
                "the backward pass that are cast back to fp8 before it; use one of the two"
            )
    return found


def check(config, half_precision: Sequence[str] = ("bf16",)) -> None:
    """Raises PrecisionError that lists every one of `problems`."""
    if found := problems(config, half_precision):
        raise PrecisionError("\n".join(found))


def apply_storage(net: nn.Module, storage: str, compute: torch.dtype) -> list[str]:
    """Keeps the frozen layers of `net` in `storage` ("none" | "fp8") and casts each up to `compute` while it runs.

    Call it after the adapter is attached and cast: peft copies a layer's dtype onto new adapter weights. Then run the
    network under autocast, unless `compute` is float32. Layers with a trainable parameter, norms and what the model
    itself excludes stay as they are. Returns the stored parameters' names.
    """
    if storage == "none":
        return []
    from diffusers.hooks import apply_layerwise_casting
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    trained = {name.rpartition(".")[0] for name, p in net.named_parameters() if p.requires_grad}
    skip = (
        *DEFAULT_SKIP_MODULES_PATTERN,
        *(getattr(net, "_skip_layerwise_casting_patterns", None) or ()),
        *(getattr(net, "_keep_in_fp32_modules", None) or ()),
        *KEPT_PATTERNS,
        *(f"^{re.escape(name)}$" for name in sorted(trained)),
    )
    apply_layerwise_casting(net, DTYPES[storage], compute, skip)
    stored = [name for name, p in net.named_parameters() if p.dtype == DTYPES[storage]]
    # DistributedDataParallel broadcasts at its start, which gloo cannot do in fp8; every rank has loaded the same.
    net._ddp_params_and_buffers_to_ignore = stored
    return stored
