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
# Adapters, norms and the time embedding are small and sensitive: they never become fp8. Regular expressions, searched.
KEPT_PATTERNS = ("norm", "lora_", "time_embed")


class PrecisionError(ValueError):
    """Precisions that the model or the hardware does not stand."""


def problems(config, half_precision: Sequence[str] = ("bf16",)) -> list[str]:
    """Where `config` (trainers.config.Config) asks for a 16-bit format that the model does not stand.

    `half_precision`: those that it was trained to run in. What fits together for every model is Config's to say.
    """
    found = []
    fp16 = "fp16 ends at 65504 and this model's activations pass that (NaN, black video): use bf16, or fp32"
    if "fp16" not in half_precision:
        if config.precision.weights == "fp16":
            found.append(f"precision.weights fp16: {fp16}")
        for name, component in config.components.items():
            if component.dtype == "fp16" and name.startswith(("transformer", "text_encoder")):
                found.append(f"components.{name}.dtype fp16: {fp16}")
    return found


def check(config, half_precision: Sequence[str] = ("bf16",)) -> None:
    """Raises PrecisionError that lists every one of `problems`."""
    if found := problems(config, half_precision):
        raise PrecisionError("\n".join(found))


def apply_storage(net: nn.Module, storage: str, compute: torch.dtype) -> list[str]:
    """Keeps the frozen layers of `net` in `storage` ("none" | "fp8") and casts each up to `compute` while it runs.

    Call it after the adapter is attached and cast: peft copies a layer's dtype onto new adapter weights. Then run the
    network under autocast, unless `compute` is float32. Layers with a trainable parameter, norms and what the model
    itself excludes stay as they are. Returns the stored parameters' names: DistributedDataParallel must ignore them.
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
    return [name for name, p in net.named_parameters() if p.dtype == DTYPES[storage]]
