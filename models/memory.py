"""Trading compute for memory: activation checkpointing, compiled blocks, tiled VAE."""

from collections.abc import Sequence

from torch import nn

# `auto` tiles videos of more frames x height x width than this: between 49x768x1024 (whole) and 121x704x1216 (tiled).
AUTO_TILING_ABOVE = 40_000_000


def checkpoint_blocks(net: nn.Module, mode: str) -> None:
    """`mode` "blocks": each block's activations are computed again in the backward pass; "none": they are kept."""
    if mode == "blocks":
        net.enable_gradient_checkpointing()
    else:
        net.disable_gradient_checkpointing()


def compile_blocks(net: nn.Module, mode: str, backend: str = "inductor", blocks: Sequence[str] = ()) -> None:
    """`mode` "blocks": compiles each repeated block in place with torch.compile, so that parameter names stay the same.

    `blocks`: class names of repeated blocks that the network does not declare itself (`_repeated_blocks`).
    """
    if mode == "none":
        return
    repeated = {*(getattr(net, "_repeated_blocks", None) or ()), *blocks}
    if not repeated:
        raise ValueError(f"memory.compile blocks: {type(net).__name__} does not say which blocks repeat; use none")
    net._repeated_blocks = sorted(repeated)
    net.compile_repeated_blocks(backend=backend)


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
