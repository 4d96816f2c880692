"""Block swap: the frozen weights of some blocks stay in host memory; two buffers on the device hold those at work.

When a block's turn comes, its weights are in one of the buffers, and the next block's are on their way into the other:
on CUDA by a stream of their own, while the block computes. In the backward pass, where activation checkpointing runs
the blocks again from last to first, so does the order of copies. Weights are only ever copied to the device, never
back: they are frozen. What trains in these blocks stays on the device.

A buffer is written over while later blocks run. So a swapped block must be checkpointed, or run without gradients:
what autograd had kept of its weights would be another block's. Its weights count as changed when their buffer is taken,
so that autograd refuses (`modified by an inplace operation`) instead of computing wrong gradients.

The parameters stay in the network under their names, whole at any time: they look at the host copy while idle, at the
buffer from the block's turn on until that is taken.
"""

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

BUFFERS = 2  # one at work, one being filled
ALIGNED = 256  # bytes; as CUDA's allocator aligns, so that every kernel takes these weights
HAVE_STREAMS = ("cuda", "xpu")


def spread(blocks: Sequence[nn.Module], count: int) -> list[nn.Module]:
    """`count` of the blocks, evenly spaced, so that a copy has the blocks between two of them to finish."""
    return [blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count)]


def swap(net: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> "BlockSwap":
    """Moves `net` from the host to `device`, but for the frozen parameters of `blocks` (in the order of the forward
    pass), which are swapped from now on. Nothing may move the network afterwards."""
    made = BlockSwap(blocks, device)
    move(net, device, {id(p) for host in made.hosts for p in host.parameters})
    return made


def move(net: nn.Module, device: torch.device, but: Collection[int]) -> None:
    """Moves the parameters and buffers of `net` to `device`, in place, except those with these ids."""
    for tensor in (*net.parameters(), *net.buffers()):
        if id(tensor) not in but:
            tensor.data = tensor.data.to(device)


class Host:
    """The frozen parameters of one block, side by side in one piece of host memory (pinned on CUDA)."""

    def __init__(self, block: nn.Module, pinned: bool):
        self.parameters = [p for p in block.parameters() if not p.requires_grad]
        self.places, end = [], 0  # first byte of each
        for parameter in self.parameters:
            self.places.append(end)
            end += -(-parameter.numel() * parameter.element_size() // ALIGNED) * ALIGNED
        self.memory = torch.empty(end, dtype=torch.uint8)
        if pinned and end:
            self._pin()
        self.views = self.cut(self.memory)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def _pin(self) -> None:
        """Pins exactly this memory: torch's own pinned memory comes in powers of two, up to twice the size."""
        from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

        pin_memory(self.memory.data_ptr(), len(self.memory))
        weakref.finalize(self, unpin_memory, self.memory.data_ptr()).atexit = False  # CUDA may be gone by then

    def cut(self, memory: Tensor) -> list[Tensor]:
        """The parameters as views of `memory` (bytes), laid out as they are here."""
        return [
            memory[start : start + p.numel() * p.element_size()].view(p.dtype).view(p.shape)
            for start, p in zip(self.places, self.parameters, strict=True)
        ]

    def look_at(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view


@dataclass
class Buffer:
    memory: Tensor
    """Bytes on the device, enough for the largest of the blocks."""
    holds: int | None = None
    """Index of the block whose weights are in it, or on their way."""
    arrived: torch.Event | None = None
    """When they are there, on devices with streams."""


class BlockSwap:
    """The swapped blocks of a network, what of them is on the device, and what was copied."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device):
        self.hosts = [Host(block, device.type == "cuda") for block in blocks]
        size = max((len(host.memory) for host in self.hosts), default=0)
        self.buffers = [Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(BUFFERS)]
        self.module = torch.get_device_module(device) if device.type in HAVE_STREAMS else None
        self.stream = self.module.Stream(device) if self.module else None
        self.at = 0
        self.copies, self.late = 0, 0  # how often a block was copied; how often only when its turn had come
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, i))

    def _enter(self, i: int, block: nn.Module, args) -> None:
        """Block i is about to run: all that used the blocks before it is queued on the device already."""
        held = next((buffer for buffer in self.buffers if buffer.holds == i), None)
        if held is None:
            self.late += 1
            held = self._fetch(i, self.buffers[0])
        if held.arrived:
            self.module.current_stream().wait_event(held.arrived)
        self.hosts[i].look_at(self.hosts[i].cut(held.memory))
        ahead, self.at = self._ahead(i), i
        if all(buffer.holds != ahead for buffer in self.buffers):
            self._fetch(ahead, next(buffer for buffer in self.buffers if buffer is not held))

    def _ahead(self, i: int) -> int:
        """The block that will follow block i, or be the next but one: at the turn from forward to backward, and from
        backward to forward, the same block comes again."""
        last = len(self.hosts) - 1
        if i == last:  # without gradients the next denoising step begins; with them, backward
            return max(last - 1, 0) if torch.is_grad_enabled() else 0
        return i - 1 if 0 < i < self.at else i + 1

    def _fetch(self, i: int, buffer: Buffer) -> Buffer:
        """Starts to copy the weights of block i into `buffer`, after all that is queued for the block in it."""
        if buffer.holds is not None:
            before = self.hosts[buffer.holds]
            before.look_at(before.views)
            torch.autograd.graph.increment_version(before.parameters)
        host, self.copies = self.hosts[i], self.copies + 1
        buffer.holds, target = i, buffer.memory[: len(host.memory)]
        if self.stream is None:
            target.copy_(host.memory)
            return buffer
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            target.copy_(host.memory, non_blocking=True)
            buffer.arrived = self.module.Event()
            buffer.arrived.record()
        return buffer
