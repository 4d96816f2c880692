"""What a network keeps for its backward pass and holds while it runs, counted on the meta device: without memory.

The forward pass runs on tensors that have shapes and no numbers, by the rules of CUDA where they decide what is kept:
autocast's casts, and attention kernels that keep no matrix of tokens x tokens.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from models import memory

# What autocast runs in 16 bits and in float32 on CUDA (ATen/autocast_mode.h), by the names that networks call it.
NARROW = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"}
NARROW |= {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"}
WIDE = {"layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "pow", "rsqrt", "exp", "log", "reciprocal"}
WIDE |= {"sum", "prod", "cumsum", "norm", "mse_loss", "huber_loss", "l1_loss", "smooth_l1_loss", "softplus"}

Storages = dict[int, torch.UntypedStorage]  # by address; held, or a later one could be taken for one that is gone


def storages(tensors: Iterable[Tensor]) -> Storages:
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}


class Flash(torch.autograd.Function):
    """scaled_dot_product_attention as fused kernels keep it: q, k, v, mask, the result, a float32 per query and head.

    The result lies in memory as q does, so joining its heads copies nothing where splitting q's did not.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q[..., : v.shape[-1]])
        mask = None if mask is None else mask.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out


class AsOnCuda(TorchFunctionMode):
    """Runs what meta tensors leave out: fused attention, and the casts of autocast to `dtype` (None: no autocast)."""

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        to = self.dtype if name in NARROW else torch.float32 if name in WIDE else None
        if self.dtype is not None and to is not None:
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(to) if t.is_floating_point() else t, (args, kwargs))
        if name == "scaled_dot_product_attention":
            named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            return Flash.apply(named["query"], named["key"], named["value"], named.get("attn_mask"))
        return function(*args, **kwargs)


class Live(TorchDispatchMode):
    """`peak`: bytes of all tensors made inside that were alive at the same time; `there`: what was there before."""

    def __init__(self, there: Storages):
        super().__init__()
        self.there, self.sizes = there, {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for key, storage in storages(t for t in tree_leaves(out) if isinstance(t, Tensor)).items():
            if key not in self.there and key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, key)
        self.peak = max(self.peak, self.now)
        return out

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class Kept:
    """Counts what autograd keeps, in bytes of distinct storages; checkpointed calls keep their inputs.

    A block like one that was seen is not run again: its outputs are made from the other's.
    """

    def __init__(self, there: Storages):
        """`there`: what is there anyway, such as weights."""
        self.there = there
        self.storages: Storages = {}
        self.inputs: Counter[int] = Counter()
        """Those that checkpointed calls keep, by how many do."""
        self.entered = self.again = 0
        """The largest inputs of one such call, and the most that is computed again for one."""
        self.seen: dict = {}

    def pack(self, tensor: Tensor) -> Tensor:
        self.storages |= {key: s for key, s in storages([tensor]).items() if key not in self.there}
        return tensor

    def counted(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def sum(self, among: set[int] | None = None) -> int:
        return sum(s.nbytes() for key, s in self.storages.items() if among is None or key in among)

    def checkpoint(self, function: Callable, *args, use_reentrant: bool = False, **kwargs):
        """In place of torch.utils.checkpoint.checkpoint."""
        given = [self.pack(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        entered = storages(given).keys() & self.storages.keys()
        self.inputs.update(entered)
        self.entered = max(self.entered, self.sum(entered))
        module, key = getattr(function, "__self__", function), None
        if isinstance(module, nn.Module):
            key = (type(module), *((t.shape, t.dtype, t.requires_grad) for t in [*given, *module.parameters()]))
        if key not in self.seen or key is None:
            inside = Kept(self.there | self.storages)
            with inside.counted():
                self.seen[key] = function(*args, **kwargs)
            self.again = max(self.again, inside.sum())
            return self.seen[key]
        return tree_map_only(Tensor, lambda t: torch.empty_like(t).requires_grad_(t.requires_grad), self.seen[key])

    def bytes(self, offloaded: bool) -> int:
        """The most at one time; `offloaded`: what checkpointed calls keep waits in host memory."""
        if not offloaded:
            return self.sum() + self.again
        own = {key for key, calls in self.inputs.items() if calls == 1}  # what all are given stays
        return self.sum() - self.sum(own) + self.entered + self.again


@contextmanager
def checkpointed_by(function: Callable) -> Iterator[None]:
    """What models.memory checkpoints is done by `function`, which takes what torch's checkpoint takes."""
    own, memory.checkpoint = memory.checkpoint, function
    try:
        yield
    finally:
        memory.checkpoint = own
