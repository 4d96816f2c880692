"""Which precisions go together, frozen weights stored in fp8, and linear layers that multiply in fp8.

Measured with diffusers 0.42 and peft 0.21: with fp8 storage the LoRA and LoKr gradients equal, bit for bit, those of a
network whose weights were rounded through fp8, with and without activation checkpointing; `problems` has what fails.
"""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
# What decides more than it weighs, in every model and text encoder. Regular expressions, searched in a module's name.
KEPT = ("norm", "embed", r"^proj_(in|out)$", "lm_head", "projector")


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


def device_problems(options, device: torch.device) -> list[str]:
    """What of `options` (trainers.config.PrecisionOptions) this device cannot do; the remedy is in each line."""
    if options.weights == "fp16" and device.type == "cpu":
        return ["precision.weights fp16: on a CPU Accelerate leaves autocast to fp16 out; use bf16 or fp32"]
    if options.fp8_training and device.type not in ("cpu", "cuda"):
        return [f"precision.fp8_training: {device.type} has no products in fp8; turn it off"]
    if options.fp8_training and device.type == "cuda" and (have := torch.cuda.get_device_capability(device)) < (8, 9):
        at = ".".join(map(str, have))
        return [
            f"precision.fp8_training needs CUDA compute capability 8.9 (Ada, Hopper or later) and {device} has {at}: "
            "turn it off"
        ]
    if device.type == "mps" and (options.storage == "fp8" or options.quantize == "fp8wo"):
        name = "storage fp8" if options.storage == "fp8" else "quantize fp8wo"
        return [f"precision.{name}: MPS has no fp8 numbers; use precision.quantize int8wo"]
    if device.type == "mps" and options.quantize in ("nf4", "fp4", "int8"):
        return [
            f"precision.quantize {options.quantize}: bitsandbytes does not train on MPS; use int8wo or int4 (torchao)"
        ]
    return []


def kept(net: nn.Module, keep: Iterable[str] = ()) -> list[str]:
    """Regular expressions for the names of the modules of `net` that no option makes less precise.

    KEPT, what its library excludes itself, and `keep`, the model's own.
    """
    own = ("_skip_layerwise_casting_patterns", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return [*KEPT, *(pattern for name in own for pattern in sorted(getattr(net, name, None) or ())), *keep]


def exactly(parameters: Iterable[str]) -> list[str]:
    """Regular expressions for the names of the modules that hold these parameters, as `kept` takes them."""
    return [f"^{re.escape(module)}$" for module in sorted({name.rpartition(".")[0] for name in parameters})]


def set_tf32(allowed: bool) -> None:
    """Whether float32 matrix products may use TF32 on CUDA; process-wide, other devices do not look at it."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def apply_storage(net: nn.Module, storage: str, compute: torch.dtype, keep: Iterable[str] = ()) -> list[str]:
    """Keeps the frozen layers of `net` in `storage` ("none" | "fp8") and casts each up to `compute` while it runs.

    Call it after the adapter is attached and cast: peft copies a layer's dtype onto new adapter weights. Then run the
    network under autocast, unless `compute` is float32. Adapters, layers with a trainable parameter, and those of
    `kept` stay as they are. Returns the stored parameters' names: DistributedDataParallel must ignore them.
    """
    if storage == "none":
        return []
    from diffusers.hooks import apply_layerwise_casting
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    trained = exactly(name for name, p in net.named_parameters() if p.requires_grad)
    skip = (*DEFAULT_SKIP_MODULES_PATTERN, "lora_", *kept(net, keep), *trained)
    # One expression: more than re keeps compiled (512) would take minutes on a network of some thousand modules.
    apply_layerwise_casting(net, DTYPES[storage], compute, ("|".join(f"(?:{pattern})" for pattern in skip),))
    return [name for name, p in net.named_parameters() if p.dtype == DTYPES[storage]]


def train_in_fp8(net: nn.Module, device: torch.device, keep: Iterable[str] = ()) -> str:
    """Makes the linear layers of `net` multiply in fp8, forward and backward, with a scale per tensor made anew.

    Weights, their names and gradients stay as they are. Layers of `kept` and those whose sides are no multiples of 16
    stay. On a CPU the rounding is emulated: the same numbers, slower. Returns a line to tell the user.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    stay = re.compile("|".join(f"(?:{pattern})" for pattern in kept(net, keep)))
    emulated = device.type == "cpu"
    convert_to_float8_training(
        net,
        config=Float8LinearConfig(emulate=emulated),
        module_filter_fn=lambda m, name: not (stay.search(name) or m.in_features % 16 or m.out_features % 16),
    )
    linear = [m for m in net.modules() if isinstance(m, nn.Linear)]
    made = sum(isinstance(m, Float8Linear) for m in linear)
    if not made:
        raise PrecisionError(
            f"precision.fp8_training: no linear layer of this {type(net).__name__} has sides that are multiples of 16"
        )
    return f"{made} of {len(linear)} linear layers multiply in fp8{', emulated (slow) on this CPU' * emulated}"
