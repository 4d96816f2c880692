"""The cases of gpu_smoke.py: which options, on which network, what each needs and what it must show."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, get_args

import torch

from trainers import optimizers
from trainers.config import OptimizerName, Quantized


@dataclass(frozen=True)
class Network:
    trainer: str
    tiny: str
    """Of models/tiny.py."""
    width: int
    layers: int
    bucket: str


LTX, HUNYUAN, COG = "trainers.ltx:LTXTrainer", "trainers.hunyuan:HunyuanVideoTrainer", "trainers.cog:CogVideoXTrainer"
ON_CUDA = {
    "ltx": Network(LTX, "ltx", 1024, 28, "49x512x768"),
    "small": Network(LTX, "ltx", 512, 8, "17x256x384"),
    "ltx-condition": Network(LTX, "ltx-condition", 1024, 8, "17x256x384"),
    "hunyuan": Network(HUNYUAN, "hunyuan", 1024, 6, "17x256x384"),
    "cogvideox-2b": Network(COG, "cogvideox-2b", 1024, 8, "17x256x384"),
    "cogvideox-5b": Network(COG, "cogvideox-5b", 1024, 8, "17x256x384"),
}
ON_CPU = {name: Network(of.trainer, of.tiny, 32, 6, "17x64x96") for name, of in ON_CUDA.items()}


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    network: str = "ltx"
    needs: tuple[str, ...] = ()
    """ "cuda", "8.9" (its compute capability), or packages; without them the case is left out."""
    launch: str = ""
    """configs/accelerate/<launch>.yaml: in a process of its own, by `accelerate launch`."""
    same_as: str = ""
    """The case whose losses and trained weights it must repeat bit for bit."""
    waits: bool = True
    """False: in the second half of its steps nothing may wait for the device, except for what a log line reads."""


FULL = {"method": "full"}
UNCLIPPED = {"optimizer.max_grad_norm": 0}
EXACT = {"train.deterministic": True}
# What an optimizer needs beside its name.
BESIDE = {"prodigy": {"optimizer.learning_rate": 1}, "adamw-kahan": {"precision.trainable": "bf16"}}
BESIDE |= {name: {"precision.trainable": "bf16"} for name in optimizers.ROUNDS_STOCHASTICALLY}


def cases(blocks: int) -> list[Case]:
    """All of them, what matters most first; `blocks`: of the main network."""
    attentions = {"native": (), "_native_math": (), "_native_efficient": ("cuda",), "_native_cudnn": ("cuda",)}
    attentions |= {"xformers": ("cuda", "xformers")}
    families = [name for name in ON_CUDA if name not in ("ltx", "small")]
    kinds = [kind for kind in get_args(Quantized) if kind != "none"]
    names = sorted(get_args(OptimizerName), key=lambda name: name.endswith("-ao"))  # those compile their step: last
    return [
        Case("LoRA"),
        *(Case(f"checkpointing {m}", {"memory.checkpointing": m}) for m in ("none", "every_n", "ffn")),
        Case("offload_activations", {"memory.offload_activations": True}),
        Case("block_swap half", {"memory.block_swap": blocks // 2}),
        Case("block_swap all", {"memory.block_swap": blocks}),
        Case("group_offload block", {"memory.group_offload": "block"}),
        Case("group_offload leaf", {"memory.group_offload": "leaf"}),
        Case("deterministic", EXACT),
        Case("block_swap, same bits", EXACT | {"memory.block_swap": blocks}, same_as="deterministic"),
        Case("group_offload leaf, same bits", EXACT | {"memory.group_offload": "leaf"}, same_as="deterministic"),
        Case("offload_activations, same bits", EXACT | {"memory.offload_activations": True}, same_as="deterministic"),
        *(
            Case(f"no waiting, {name}", network=name, needs=("cuda",), waits=False)
            for name in ("ltx", "hunyuan", "cogvideox-5b")
        ),
        Case("no waiting, block_swap", {"memory.block_swap": blocks}, needs=("cuda",), waits=False),
        *(Case(f"quantize {kind}", {"precision.quantize": kind}) for kind in kinds),
        Case("storage fp8", {"precision.storage": "fp8"}),
        Case("text encoder nf4", {"components.text_encoder.quantize": "nf4", "data.precompute": "off"}),
        Case("full", FULL),
        Case("full, fused_backward", FULL | UNCLIPPED | {"optimizer.fused_backward": True}),
        Case("full, adamw-kahan", FULL | BESIDE["adamw-kahan"] | {"optimizer.name": "adamw-kahan"}, needs=("optimi",)),
        Case("full, cpu_offload", FULL | UNCLIPPED | {"optimizer.cpu_offload": True}, needs=("cuda",)),
        Case("full, fp8_training", FULL | {"precision.fp8_training": True}, needs=("8.9",)),
        Case("weights fp32", {"precision.weights": "fp32"}),
        Case("weights fp32, allow_tf32", {"precision.weights": "fp32", "precision.allow_tf32": True}),
        *(Case(f"family {name}", network=name) for name in families),
        Case("weights fp16, cogvideox-2b", {"precision.weights": "fp16"}, "cogvideox-2b", needs=("cuda",)),
        Case("launched ddp", launch="ddp"),
        Case("launched fsdp2", launch="fsdp2", needs=("cuda",)),
        Case("launched zero2", launch="zero2", needs=("cuda", "deepspeed")),
        *(Case(f"attention {n}", {"memory.attention": n}, needs=needs) for n, needs in attentions.items()),
        *(
            Case(
                f"optimizer {name}",
                FULL | {"optimizer.name": name} | BESIDE.get(name, {}),
                "small",
                needs=tuple({optimizers.CLASSES[name][0]} & {*optimizers.EXTRAS}),
            )
            for name in names
        ),
        Case("compile blocks", {"memory.compile": "blocks"}),
        Case("launched zero3", launch="zero3", needs=("cuda", "deepspeed")),
        Case("launched zero1", launch="zero1", needs=("cuda", "deepspeed")),
    ]


def lacking(case: Case) -> str:
    """What of its needs this machine does not have, "" if nothing."""
    for need in case.needs:
        if need == "cuda":
            if not torch.cuda.is_available():
                return "no CUDA"
        elif need[0].isdigit():  # a CPU emulates what that is for
            if torch.cuda.is_available() and torch.cuda.get_device_capability() < tuple(map(int, need.split("."))):
                return f"compute capability below {need}"
        elif find_spec(need) is None:
            return f"no {optimizers.EXTRAS.get(need, need)}"
    return ""
