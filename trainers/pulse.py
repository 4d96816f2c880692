"""What all ranks must know of a step, wall-clock time, and the numbers that name a random draw."""

import hashlib
import math
import sys
import time
from contextlib import contextmanager

import torch
from torch import Tensor

SCALER_TRIES = 30  # 2**-30 times its first scale of 65536 is past all that fp16 can hold


class NonFiniteStep(ArithmeticError):
    """A loss or gradient norm that is NaN or infinite; the message names the step and its samples."""


def seed_of(*what: int | str) -> int:
    """A seed in [0, 2**63) that names a draw, the same on every machine: SHA-256, since hash() differs by process."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big") >> 1


class Pulse:
    """The mean loss, the gradient norm and any rank's wish to stop, in one small gather per step.

    Sent without waiting for the device and read before the next update, when it has long arrived.
    """

    def __init__(self, accelerator, copies: int = 1):
        """`copies`: as many ranks in a row train on the same samples."""
        self.accelerator, self.copies, self.pending, self.stop = accelerator, copies, False, 0
        self.overflows = 0  # in a row

    def send(self, losses: list[Tensor], norm: Tensor | float, stop: int) -> None:
        """`losses`: one [B] per micro-step; `norm`: a DTensor from FSDP2, a number from DeepSpeed; `stop`: 0, or why
        this rank wants to stop."""
        self.losses = losses
        mean = torch.stack([loss.mean() for loss in losses]).mean()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
        row = torch.stack([mean, norm.to(mean), mean.new_full((), stop)])
        rows = self.accelerator.gather(row[None])  # [world, 3]
        self.rows, self.arrived = rows.to("cpu", non_blocking=rows.is_cuda), None
        if rows.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        self.pending = True

    def read(self) -> tuple[float, float, bool]:
        """(mean loss over the ranks, gradient norm, whether the run may go on: both finite); sets `stop`."""
        if self.arrived:
            self.arrived.synchronize()
        self.pending = False
        loss, norm, stop = self.rows[:, 0].mean().item(), self.rows[:, 1].max().item(), self.rows[:, 2].max().item()
        self.stop = int(stop)
        finite = math.isfinite(norm)
        self.overflows = 0 if finite else self.overflows + 1
        # fp16's gradient scaler leaves such a step out and halves its scale; only if that never ends it is a fault.
        finite = finite or (self.accelerator.scaler is not None and self.overflows <= SCALER_TRIES)
        return loss, norm, finite and bool(self.rows[:, 0].isfinite().all())

    def refuse(self, step: int, samples: list[str]) -> None:
        """Raises NonFiniteStep, naming those of the step's samples (by slot) whose own loss is not finite, else all.

        A collective: what every rank read is the same.
        """
        flags = self.accelerator.gather((~torch.stack(self.losses).isfinite())[None])  # [ranks, accumulation, batch]
        odd = (
            flags[:: self.copies].transpose(0, 1).flatten().nonzero().flatten().tolist()
        )  # slot = (micro * world + rank) * batch + row
        loss, norm, _ = self.rows.mean(0).tolist()
        named = "\n  ".join(dict.fromkeys(samples[slot] for slot in odd) if odd else dict.fromkeys(samples))
        raise NonFiniteStep(
            f"step {step}: loss {loss}, gradient norm {norm}. {'Samples with such a loss' if odd else 'Its samples'}:\n"
            f"  {named}\nNothing of this step was saved. Look at these clips, lower optimizer.learning_rate or "
            "optimizer.max_grad_norm, then go on with checkpoint.resume: latest"
        )


class Clock:
    """Wall-clock time: seconds per step, saving and sampling not counted, and the end of train.max_hours."""

    def __init__(self, max_hours: float | None):
        self.mark, self.step = time.monotonic(), 0
        self.end = math.inf if max_hours is None else self.mark + 3600 * max_hours

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def lap(self, step: int) -> float:
        """Seconds per step since the last lap."""
        now = time.monotonic()
        seconds = (now - self.mark) / max(1, step - self.step)
        self.mark, self.step = now, step
        return seconds

    @contextmanager
    def paused(self):
        begun = time.monotonic()
        yield
        self.mark += time.monotonic() - begun


def peak_memory(device: torch.device) -> int:
    """The most memory in use so far, in MiB: allocated on a CUDA (or XPU) device, else resident in this process.

    MPS keeps no maximum: what its driver holds now, which it seldom gives back.
    """
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).max_memory_allocated(device) >> 20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() >> 20
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        import psutil  # which Accelerate requires

        return psutil.Process().memory_info().peak_wset >> 20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
