"""Frozen linear weights in few bits: which layers, how they are made one at a time, and how many bytes they take.

Kinds: nf4, fp4 and int8 are bitsandbytes' layers (QLoRA: blocks of 64 with scales quantised once more; LLM.int8());
int8wo, fp8wo (a scale per row) and int4 (a scale per 32 weights) are made by torchao and held by `WeightOnlyLinear`.
"""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.precision import PrecisionError, kept

BITSANDBYTES = ("nf4", "fp4", "int8")  # the others are torchao's
PACKED = ("nf4", "fp4", "int4")
# Adapters of peft 0.21 that fail: LoKr and LoHa take the shape of their update from the stored weight, which is packed;
# DoRA takes the weight itself and cannot unpack these two.
UNFIT_ADAPTERS = {"lokr": PACKED, "loha": PACKED, "dora": ("int8", "int4")}
# torchao's own that have a backward pass and a layer in peft; the others were not tried or fail.
TRAINABLE_SAVED = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")
GROUP = 32  # weights of a row that share a scale in int4
OUTLIERS = 6.0  # of an activation: such columns stay in 16 bits; the value of the LLM.int8() paper


def eligible(net: nn.Module, kind: str, keep: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """(names of the linear layers that become `kind`, names of those that it cannot hold); `net` may be on meta."""
    stay, fits, misfits = re.compile("|".join(f"(?:{pattern})" for pattern in kept(net, keep))), [], []
    for name, module in net.named_modules():
        if type(module) is nn.Linear and not stay.search(name):
            (misfits if kind == "int4" and module.in_features % GROUP else fits).append(name)
    return fits, misfits


def quantize(net: nn.Module, kind: str, device: torch.device | str, keep: Iterable[str] = ()) -> str:
    """Moves `net` to `device` with its linear layers as `kind`, one at a time: it is never whole there in full.

    `net`: on the CPU, of diffusers or transformers. Returns a line to tell the user. Raises PrecisionError where no
    layer can be quantised.
    """
    names, misfits = eligible(net, kind, keep)
    odd = f"{len(misfits)} layers stay, their rows are no multiple of {GROUP}, such as {misfits[0]}" if misfits else ""
    if not names:
        raise PrecisionError(f"quantize {kind}: {type(net).__name__} has no layer for it {odd and f'({odd})'}".rstrip())
    make = _bitsandbytes if kind in BITSANDBYTES else _torchao
    before = after = 0
    for name in names:
        linear = net.get_submodule(name)
        before += linear.weight.nbytes
        after += weight_bytes(kind, linear.weight.shape, linear.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(net.get_submodule(parent), leaf, make(linear, kind, device))
    # By these peft knows which of its layers to put around bitsandbytes' ones.
    net.is_loaded_in_4bit, net.is_loaded_in_8bit = kind in ("nf4", "fp4"), kind == "int8"
    net.to(device)
    sizes = f"{before / 2**20:,.1f} MiB as {kind}: {after / 2**20:,.1f} MiB"
    return f"quantised {len(names)} linear layers, {sizes}{odd and f'; {odd}'}"


def ready(net: nn.Module) -> nn.Module:
    """Readies a network that was loaded quantised, or has been made so, for training; returns it."""
    for module in net.modules():
        # On CPUs with AVX512-BF16 a layer in eval mode would repack its weight for good, and not train after it.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # tells of a cast, at every call
    warnings.filterwarnings("ignore", message=r".*without `get_apply_tensor_subclass`")  # peft: about merging
    return net


def weight_bytes(kind: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a linear weight [rows, columns] of `dtype` as `kind` ("none": as it is), with its scales and tables."""
    rows, columns = shape
    numbers = rows * columns
    if kind == "none":
        return numbers * dtype.itemsize
    if kind in ("nf4", "fp4"):
        blocks = -(-numbers // 64)  # one byte of scale each, a float per 256 of these, an offset, tables of 16 and 256
        return -(-numbers // 2) + blocks + 4 * -(-blocks // 256) + 4 + 4 * (16 + 256)
    if kind == "int4":
        return numbers // 2 + numbers // GROUP * dtype.itemsize
    return numbers + rows * (5 if kind == "int8wo" else 4)  # a float per row; torchao's int8 has a zero point too


def numel(parameter: Tensor) -> int:
    """Numbers that a parameter stands for: packed 4-bit weights hold two in a byte."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return state.shape.numel()
    return parameter.numel() * (2 if getattr(parameter, "two_in_a_byte", False) else 1)


# -- layers ----------------------------------------------------------------------------------------------------------


def _bitsandbytes(linear: nn.Linear, kind: str, device) -> nn.Linear:
    from bitsandbytes import nn as bnb

    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    if kind == "int8":
        new = bnb.Linear8bitLt(*shape, has_fp16_weights=False, threshold=OUTLIERS, device="meta")
        new.weight = bnb.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        new = bnb.Linear4bit(*shape, compute_dtype=linear.weight.dtype, quant_type=kind, device="meta")
        new.weight = bnb.Params4bit(linear.weight.data, requires_grad=False, quant_type=kind, module=new)
    new.bias = linear.bias
    return ready(new.train(linear.training)).to(device)  # which quantises there


def _torchao(linear: nn.Linear, kind: str, device) -> nn.Linear:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    configs = {
        "int8wo": lambda: Int8WeightOnlyConfig(),
        "fp8wo": lambda: Float8WeightOnlyConfig(),
        "int4": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(GROUP)),
    }
    dtype = linear.weight.dtype
    linear.to(device)
    quantize_(linear, configs[kind]())
    return ready(WeightOnlyLinear(linear, dtype))


class WeightOnlyLinear(nn.Linear):
    """A frozen weight of torchao, made whole for each product and again in the backward pass.

    torchao's own product keeps the whole weight from the forward to the backward pass, of every layer at once. int4 is
    packed here, two in a byte: torchao 0.18 gives each a byte of its own, and its packed kinds have no backward pass.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias, self.dtype, weight = linear.bias, dtype, linear.weight
        self.register_buffer("scale", None, persistent=False)
        if hasattr(weight, "target_dtype"):  # of [-8, 7], symmetric: the zero points are zeros
            self.scale = weight.scale
            digits = (weight.qdata + 8).to(torch.uint8)
            weight = digits[:, ::2] | digits[:, 1::2] << 4
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight.two_in_a_byte = self.scale is not None
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.scale, self.bias)


def _whole(weight: Tensor, scale: Tensor | None) -> Tensor:
    """[rows, columns] in full, of a torchao tensor, or of bytes [rows, columns / 2] with `scale` [rows, groups]."""
    if scale is None:
        return weight.dequantize()
    digits = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1).to(torch.int8) - 8
    return (digits.unflatten(1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.scale, ctx.dtype = weight, scale, x.dtype
        return functional.linear(x, _whole(weight, scale), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ _whole(ctx.weight, ctx.scale).to(gradient.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_x, None, None, of_bias


# -- folders that are quantised already ------------------------------------------------------------------------------


def saved_as(config: dict) -> str | None:
    """How the network with this config.json was quantised, "bitsandbytes nf4", "torchao Int8WeightOnlyConfig", or None.

    Other libraries than these two by their own name.
    """
    saved = config.get("quantization_config")
    if not saved:
        return None
    method = saved.get("quant_method", "unknown")
    if method == "bitsandbytes":
        return f"bitsandbytes {'int8' if saved.get('load_in_8bit') else saved.get('bnb_4bit_quant_type', 'fp4')}"
    if method == "torchao":
        return f"torchao {next(_types(saved.get('quant_type')), 'unknown')}"
    return method


def _types(saved) -> Iterator[str]:
    """Class names in torchao's JSON, outermost first."""
    if isinstance(saved, str):
        yield saved
    if isinstance(saved, dict):
        if "_type" in saved:
            yield saved["_type"]
        for value in saved.values():
            yield from _types(value) if isinstance(value, dict) else ()


def folder_problems(saved: Mapping[str, str | None], c, sharded: bool) -> list[str]:
    """Where options (trainers.config.Config) do not fit components that were saved quantised; nothing is loaded yet.

    `saved`: component -> what `saved_as` says of it. `sharded`: FSDP or DeepSpeed runs.
    """
    other = "or the folder that it was quantised from"
    again = [
        f"components.{name}.quantize {c.components[name].quantize}: this {name} is already quantised ({how}); leave it "
        f"out, {other}"
        for name, how in saved.items()
        if how and name != "transformer"
    ]
    if not (how := saved.get("transformer")):
        return again
    library, _, kind = how.partition(" ")
    here = f"the transformer is already quantised ({how})"
    rules = [
        (
            library not in ("bitsandbytes", "torchao") or (library == "torchao" and kind not in TRAINABLE_SAVED),
            f"{here}, which cannot be trained on: use bitsandbytes or torchao's {', '.join(TRAINABLE_SAVED)}, {other}",
        ),
        (c.precision.quantize != "none", f"{here}: make precision.quantize none, or use the folder it was made from"),
        (c.method == "full", f"{here}, and method full needs whole weights: use method lora, {other}"),
        (c.precision.storage != "none", f"{here}: make precision.storage none"),
        (
            c.lora.type in UNFIT_ADAPTERS and kind in UNFIT_ADAPTERS[c.lora.type],
            f"{here}, and lora.type {c.lora.type} cannot adapt such layers: use lora or rslora",
        ),
        (
            c.memory.block_swap or c.memory.group_offload != "none",
            f"{here}, and memory.block_swap and group_offload move whole weights only: leave them out, {other}",
        ),
        (sharded, f"{here}, and FSDP and DeepSpeed cannot shard it: launch with DDP (MULTI_GPU), or use {other[3:]}"),
    ]
    return [*again, *(text for broken, text in rules if broken)]
