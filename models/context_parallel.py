"""Context parallelism: the ranks of a group share the tokens of each sample, by diffusers' plan for the network.

Experimental: compared with one process on CPUs (gloo), not yet on GPUs. The parts of diffusers 0.42's
`enable_parallelism` are called one by one, because as a whole it cannot train LTX-Video:

* its plan splits the text as well, and then attention to text fails: in the forward pass on the mask, which has all
  heads where a rank has its own, and in the backward pass on keys of another length than the queries. Here the text
  stays whole on every rank: each query meets all of it without any exchange;
* it leaves a timestep per token whole beside tokens that are split;
* it takes the rank modulo the number of accelerators, which is 0 on a CPU.

Tokens are exchanged for heads around self-attention (Ulysses). Ring attention needs the log-sum-exp, which torch's own
attention does not return.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn

TO_TEXT = "attn2"  # what diffusers calls a block's attention to text


def problems(net: nn.Module, degree: int) -> list[str]:
    """Why `degree` ranks cannot share the tokens of `net`, which needs no weights."""
    if degree == 1:
        return []
    kind = type(net)
    if not getattr(kind, "_cp_plan", None):
        return [
            f"memory.context_parallel {degree}: diffusers has no context-parallel plan for {kind.__name__}; use 1 "
            "(memory.checkpointing, memory.block_swap and shorter buckets are what fits long clips into memory)"
        ]
    if (heads := net.config.num_attention_heads) % degree:
        return [f"memory.context_parallel {degree} must divide the {heads} attention heads of {kind.__name__}"]
    return []


def indivisible(size: tuple[int, int, int], tokens: int, degree: int) -> str | None:
    """Why `degree` ranks cannot share the video tokens of a sample of `size` (frames, height, width), else None."""
    if tokens % degree:
        return (
            f"{'x'.join(map(str, size))} has {tokens} video tokens, which memory.context_parallel {degree} does not "
            "divide: choose another size or number of ranks"
        )
    return None


def share_tokens(net: nn.Module, degree: int, device: torch.device) -> None:
    """From now on each `degree` ranks in a row call `net` together, with the same input, and get the same output.

    A rank's gradients are those through its own tokens, times `degree`: their mean over all ranks, which is what
    DistributedDataParallel makes, is the gradient of one process. A collective; raises nothing of its own.
    """
    if degree == 1:
        return
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import EquipartitionSharder, apply_context_parallel
    from diffusers.models._modeling_parallel import ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    world = distributed.get_world_size()
    mesh = init_device_mesh(device.type, (world // degree, 1, degree), mesh_dim_names=("group", "ring", "ulysses"))
    context = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    net._parallel_config = ParallelConfig(context_parallel_config=context)
    net._parallel_config.setup(distributed.get_rank(), world, device, mesh=mesh)

    for name, module in net.named_modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config") and not name.endswith(TO_TEXT):
            module.processor._parallel_config = net._parallel_config
    apply_context_parallel(net, context, {name: _without_text(part) for name, part in net._cp_plan.items()})

    def split_timestep(_, args: Sequence, keywords: dict) -> tuple[Sequence, dict]:
        tokens, time = keywords["hidden_states"], keywords["timestep"]
        if time.shape == tokens.shape[:2]:  # [B, S] as the tokens are; [B] and [B, 1] hold for all tokens
            time = EquipartitionSharder.shard(time, 1, context._flattened_mesh)
        return args, keywords | {"timestep": time}

    def scale_gradient(_, args: Sequence, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * degree)

    net.register_forward_pre_hook(split_timestep, with_kwargs=True)
    for name in (name for name, part in net._cp_plan.items() if not isinstance(part, dict)):
        net.get_submodule(name).register_forward_hook(scale_gradient)  # where the tokens are whole again


def _without_text(part):
    """One module's part of a plan without the inputs that are text."""
    if not isinstance(part, dict):
        return part
    return {key: split for key, split in part.items() if not str(key).startswith("encoder_")}
