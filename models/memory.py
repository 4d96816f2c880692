"""Trading compute and copies for memory: checkpointing, offloading, compiled blocks, attention backends, tiled VAE.

`options` below is trainers.config.MemoryOptions; `blocks` are class names of repeated blocks that a network does not
declare itself (`_repeated_blocks`). Everything that is asked of a network's shape works on a skeleton without weights.
"""

import os
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import block_swap
from models.load import ModelError

# `auto` tiles videos of more frames x height x width than this: between 49x768x1024 (whole) and 121x704x1216 (tiled).
AUTO_TILING_ABOVE = 40_000_000
# torch's own 8 are not enough for one kind of block: with and without gradients, for a batch of 1 and of more, first
# block (whose input needs no gradient) and others, each static and then dynamic. Beyond it torch stops compiling.
COMPILED_AT_MOST = 32
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def repeated(net: nn.Module, blocks: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """(name, module) of the blocks that repeat, in the order of the forward pass; fit for a skeleton on meta."""
    kinds = {*(getattr(net, "_repeated_blocks", None) or ()), *blocks}
    return [
        (f"{name}.{i}" if name else str(i), block)
        for name, module in net.named_modules()
        if isinstance(module, nn.ModuleList)
        for i, block in enumerate(module)
        if type(block).__name__ in kinds
    ]


def problems(net: nn.Module, options, blocks: Sequence[str] = ()) -> list[str]:
    """Which of `options` a network of this shape (a skeleton will do) cannot be given."""
    name, found, count = type(net).__name__, [], len(repeated(net, blocks))
    for option, asked in (
        ("checkpointing every_n", options.checkpointing == "every_n"),
        ("block_swap", options.block_swap),
        ("group_offload block", options.group_offload == "block"),
        ("compile blocks", options.compile == "blocks"),
    ):
        if asked and not count:
            found.append(f"memory.{option}: {name} does not say which of its blocks repeat; leave it out")
    if count and options.block_swap > count:
        found.append(f"memory.block_swap {options.block_swap}: {name} has {count} blocks; use at most {count}")
    if options.checkpointing in ("blocks", "every_n") and not getattr(net, "_supports_gradient_checkpointing", False):
        found.append(f"memory.checkpointing {options.checkpointing}: {name} has no checkpointing; use ffn or none")
    if options.checkpointing == "ffn" and not feed_forwards(net, blocks):
        found.append(f"memory.checkpointing ffn: the blocks of {name} have no feed-forward module; use blocks")
    return found


# -- activations -----------------------------------------------------------------------------------------------------


def checkpoint_blocks(
    net: nn.Module, mode: str, every: int = 1, to_host: bool = False, blocks: Sequence[str] = ()
) -> None:
    """What is computed again in the backward pass instead of being kept; numbers stay the same, bit for bit.

    `mode` "none": nothing; "blocks": every block; "every_n": the first of each `every` repeated blocks; "ffn": the
    feed-forward modules of repeated blocks (HunyuanVideo's single blocks have none: theirs is part of the attention).
    `to_host`: the inputs of checkpointed blocks wait for it in host memory, pinned on CUDA.
    """
    if mode in ("blocks", "every_n"):
        chosen = {id(block) for _, block in repeated(net, blocks)[::every]} if mode == "every_n" else None
        net.enable_gradient_checkpointing(_ToHost(chosen) if to_host else partial(_recompute, chosen))
        return
    net.disable_gradient_checkpointing()
    if mode == "ffn":
        for module in feed_forwards(net, blocks):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def feed_forwards(net: nn.Module, blocks: Sequence[str] = ()) -> list[nn.Module]:
    """The feed-forward modules of the repeated blocks."""
    from diffusers.models.attention import FeedForward

    return [m for _, block in repeated(net, blocks) for m in block.modules() if isinstance(m, FeedForward)]


def _recompute(chosen: set[int] | None, block: nn.Module, *args):
    """A block's output; its activations are computed again where its id is among `chosen` (None: all are)."""
    if chosen is None or id(block) in chosen:
        return checkpoint(block, *args, use_reentrant=False)
    return block(*args)


class _ToHost:
    """As `_recompute`; what the block is given goes to the host until then.

    Not what the block before was given too, such as the text: it is there for all of them anyway, and would be copied
    for each. A checkpoint keeps in `save_on_cpu` what it is called with, and as it is what its function holds.
    """

    def __init__(self, chosen: set[int] | None):
        self.chosen, self.before = chosen, []

    def __call__(self, block: nn.Module, *args):
        tensors = [a for a in args if isinstance(a, Tensor)]
        shared = [t for t in tensors if any(t is known() for known in self.before)]
        self.before = [weakref.ref(t) for t in tensors]
        if self.chosen is not None and id(block) not in self.chosen:
            return block(*args)
        own = [i for i, a in enumerate(args) if isinstance(a, Tensor) and not any(a is t for t in shared)]
        rest = [None if i in own else a for i, a in enumerate(args)]

        def run(*given: Tensor):
            whole = list(rest)
            for i, tensor in zip(own, given, strict=True):
                whole[i] = tensor
            return block(*whole)

        with torch.autograd.graph.save_on_cpu(pin_memory=tensors[0].device.type == "cuda"):
            return checkpoint(run, *(args[i] for i in own), use_reentrant=False)


# -- weights ---------------------------------------------------------------------------------------------------------


def moves_weights(options) -> bool:
    """Whether frozen weights stay in host memory: then nothing else may move the network."""
    return options.block_swap > 0 or options.group_offload != "none"


def place(net: nn.Module, options, device: torch.device, blocks: Sequence[str] = ()) -> None:
    """Moves `net`, adapters attached, from the host to `device`, but for what `options` keep on the host."""
    found = [block for _, block in repeated(net, blocks)]
    if options.block_swap:
        block_swap.swap(net, block_swap.spread(found, options.block_swap), device)
    elif options.group_offload == "block":
        block_swap.swap(net, found, device)
    elif options.group_offload == "leaf":
        _offload_leaves(net, device)


def _offload_leaves(net: nn.Module, device: torch.device) -> None:
    """Keeps the weights of frozen layers on the host; each is copied to `device` for its forward pass and back.

    diffusers' group offloading, layer by layer: on a whole network, or on blocks, it moves what trains as well, away
    from its gradients. A layer's product keeps the weights it needs for the backward pass.
    """
    from diffusers.hooks import apply_group_offloading

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
    leaves = [m for m in net.modules() if isinstance(m, kinds) and not any(p.requires_grad for p in m.parameters())]
    held = {id(tensor) for leaf in leaves for tensor in leaf.parameters()}
    block_swap.move(net, device, held)
    for leaf in leaves:
        apply_group_offloading(leaf, onload_device=device, offload_type="leaf_level")


def allocator_advice(device: torch.device, buckets: int, options) -> list[str]:
    """A line to tell the user, or none: memory of changing sizes is cut into pieces unless segments can grow."""
    set_already = any("expandable_segments" in os.environ.get(name, "") for name in ALLOCATOR)
    if device.type != "cuda" or set_already or not (buckets > 1 or moves_weights(options)):
        return []
    why = f"{buckets} buckets" if buckets > 1 else "weights that come and go"
    return [
        f"advice: with {why}, set {ALLOCATOR[0]}=expandable_segments:True in the environment, or CUDA's memory falls "
        "into pieces too small to use"
    ]


# -- compute ---------------------------------------------------------------------------------------------------------


def compile_blocks(
    net: nn.Module, mode: str, backend: str = "inductor", blocks: Sequence[str] = (), buckets: int = 1
) -> None:
    """`mode` "blocks": compiles each repeated block in place with torch.compile, so that parameter names stay the same.

    All blocks of a kind share their code. With several `buckets` it is compiled for any size at once: two times (the
    first block and the others) with gradients, and again without. With one, for that size first, and when another text
    length comes, for any. Raises ModelError where nothing repeats.
    """
    if mode == "none":
        return
    kinds = sorted({type(block).__name__ for _, block in repeated(net, blocks)})
    if not kinds:
        raise ModelError(f"memory.compile blocks: {type(net).__name__} does not say which blocks repeat; use none")
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILED_AT_MOST)
    net._repeated_blocks = kinds
    net.compile_repeated_blocks(backend=backend, dynamic=True if buckets > 1 else None)


def set_attention(net: nn.Module, name: str | None) -> None:
    """Lets the attention of `net` be computed by the diffusers backend `name`. Raises ModelError as `try_attention`."""
    if name is None:
        return
    _check_attention(net, name)
    try:
        net.set_attention_backend(name)
    except (RuntimeError, ValueError, ImportError) as error:
        raise ModelError(f"memory.attention {name}: {error}") from error


def try_attention(
    net: nn.Module, name: str | None, device: torch.device, dtype: torch.dtype, masked: bool = False
) -> None:
    """One small attention with the backend, forward and backward, with a mask if the network masks text (`masked`).

    `net` may be a skeleton. Raises ModelError: an unknown name, a missing package, a device, precision or mask that
    the backend cannot do, or a network that computes attention in its own way.
    """
    if name is None:
        return
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    _check_attention(net, name)
    size = getattr(net.config, "attention_head_dim", 64)
    q, k, v = (torch.ones(1, 16, 1, size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 1, 16, device=device, dtype=torch.bool) if masked else None
    try:
        with attention_backend(name):
            dispatch_attention_fn(q, k, v, attn_mask=mask).sum().backward()
    except (RuntimeError, ValueError, ImportError) as error:
        what = f"training {dtype} on {device.type}{' with a text mask' * masked}"
        raise ModelError(
            f"memory.attention {name} does not work for {what}: {str(error).rstrip('.')}. Use another of "
            f"{', '.join(attentions())}, or null for the model's own"
        ) from error


def attentions() -> list[str]:
    """The names of diffusers' attention backends."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return sorted(backend.value for backend in AttentionBackendName)


def _check_attention(net: nn.Module, name: str) -> None:
    if name not in attentions():
        raise ModelError(f"memory.attention {name}: diffusers has no such backend; it has {', '.join(attentions())}")
    if not any(hasattr(getattr(m, "processor", None), "_attention_backend") for m in net.modules()):
        raise ModelError(
            f"memory.attention {name}: {type(net).__name__} takes no backend, its attention is torch's own; use null"
        )


# -- the VAE ---------------------------------------------------------------------------------------------------------


def tiles(mode: str, frames: int, height: int, width: int) -> bool:
    """Whether a video of this size goes through the VAE in tiles; `mode` is "auto" | "on" | "off"."""
    return mode == "on" or (mode == "auto" and frames * height * width > AUTO_TILING_ABOVE)


def tile_vae(vae, mode: str, frames: int, height: int, width: int) -> None:
    """Sets the VAE's tiling and slicing for videos of this size, encoding and decoding alike."""
    if tiles(mode, frames, height, width):
        vae.enable_tiling()
        vae.enable_slicing()
    else:
        vae.disable_tiling()
        vae.disable_slicing()


def tiling_facts(mode: str, frames: int, height: int, width: int) -> dict[str, bool]:
    """What belongs into the cache key of a video of this size: tiles change the latents a little."""
    return {"vae_tiling": tiles(mode, frames, height, width)}
