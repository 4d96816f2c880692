"""FSDP2 and DeepSpeed on CPU ranks, which Accelerate alone gives to accelerators: for tests.

Forked ranks: `enable(kind)` before the Accelerator is built. Launched ones: tests/launched is put on PYTHONPATH, whose
sitecustomize.py does the same in each process.
"""

import os

KINDS = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def environment(kind: str) -> dict[str, str]:
    """What `accelerate launch` sets for this backend, as `enable` completes it."""
    if kind == "ddp":
        return {"ACCELERATE_USE_CPU": "true"}
    if kind == "fsdp":
        return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind.removeprefix("zero")}


def enable(kind: str) -> None:
    """In a process of its own: what is launched next joins over gloo, on the CPU, under this backend."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(environment(kind))
    if kind != "ddp":
        patch()


def patch() -> None:
    """Accelerate takes CPU ranks for GPU ranks; DeepSpeed builds no shared-memory extension (19 s) for them."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    prepare = PartialState._prepare_backend

    def on_cpu(self, cpu=False, sagemaker_dp=False, backend=None):
        if not cpu and int(os.environ.get("LOCAL_RANK", -1)) != -1:
            return "gloo", DistributedType.MULTI_GPU
        return prepare(self, cpu, sagemaker_dp, backend)

    PartialState._prepare_backend = on_cpu
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
