"""What ComfyUI calls the modules of each network: mostly what the original checkpoints do, and diffusers does not.

A map is one dict, ComfyUI's name -> diffusers' name, of whole module names: ``*`` stands for one part between dots
(a block's number), ``**`` for all the rest. On the right may also stand

* a dict {diffusers module: rows}, where the checkpoint has one fused linear: its parts from the top row down, and
  their output rows in multiples of the number of inputs;
* `Swapped(name)`, where the checkpoint has the two halves of the output rows in the other order.

Where several names stand for the same modules, the first is written and all are read. A module that is not in the map
has no ComfyUI name. Sources: diffusers.loaders.single_file_utils (the `convert_*_transformer_*_to_diffusers` of each
model) for what the checkpoint's names mean; ComfyUI's comfy/lora.py (`model_lora_keys_unet`) for what it reads.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache


class Swapped(str):
    """A diffusers module whose two halves of output rows (scale, shift) the checkpoint has as (shift, scale)."""


Names = Mapping[str, str | Mapping[str, int]]


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


SAME: Names = _same("**")

LTX: Names = {
    "patchify_proj": "proj_in",
    "adaln_single.**": "time_embed.**",
    **_same("caption_projection.**", "transformer_blocks.*.attn1.**", "transformer_blocks.*.attn2.**"),
    **_same("transformer_blocks.*.ff.**", "proj_out"),
}

_COG_BLOCK = "transformer_blocks.*"
COGVIDEOX: Names = {  # ComfyUI's own port, comfy/ldm/cogvideo/model.py: there is no other original with these names
    **{f"blocks.*.{x}": f"{_COG_BLOCK}.attn1.to_{x}" for x in "qkv"},
    "blocks.*.attn_out": f"{_COG_BLOCK}.attn1.to_out.0",
    "blocks.*.ff_proj": f"{_COG_BLOCK}.ff.net.0.proj",
    "blocks.*.ff_out": f"{_COG_BLOCK}.ff.net.2",
    "blocks.*.norm1.linear": f"{_COG_BLOCK}.norm1.linear",
    "blocks.*.norm2.linear": f"{_COG_BLOCK}.norm2.linear",
    **{f"{x}_embedding_linear_{i}": f"{x}_embedding.linear_{i}" for x in ("time", "ofs") for i in (1, 2)},
    **_same("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out"),
}


def _hunyuan() -> dict[str, str | dict[str, int]]:
    double, single, text = "transformer_blocks.*", "single_transformer_blocks.*", "context_embedder"
    refiner, times = f"{text}.token_refiner.refiner_blocks.*", "time_text_embed"

    def rows(block: str, *parts: str) -> dict[str, int]:
        return {f"{block}.attn.{part}": 1 for part in parts}

    qkv, layers = ("to_q", "to_k", "to_v"), {1: "in_layer", 2: "out_layer"}
    names: dict[str, str | dict[str, int]] = {
        "img_in.proj": "x_embedder.proj",
        "txt_in.input_embedder": f"{text}.proj_in",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": Swapped("norm_out.linear"),
    }
    for i, layer in layers.items():
        names[f"time_in.{layer}"] = f"{times}.timestep_embedder.linear_{i}"
        names[f"guidance_in.{layer}"] = f"{times}.guidance_embedder.linear_{i}"
        names[f"vector_in.{layer}"] = f"{times}.text_embedder.linear_{i}"
        names[f"txt_in.t_embedder.{layer}"] = f"{text}.{times}.timestep_embedder.linear_{i}"
        names[f"txt_in.c_embedder.{layer}"] = f"{text}.{times}.text_embedder.linear_{i}"
    for stream, attention, out, norm, ff in (
        ("img", qkv, "to_out.0", "norm1", "ff"),
        ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "norm1_context", "ff_context"),
    ):
        at = f"double_blocks.*.{stream}"
        names[f"{at}_attn_qkv"] = rows(double, *attention)
        names[f"{at}_attn_proj"] = f"{double}.attn.{out}"
        names[f"{at}_mod.linear"] = f"{double}.{norm}.linear"
        names[f"{at}_mlp.fc1"] = f"{double}.{ff}.net.0.proj"
        names[f"{at}_mlp.fc2"] = f"{double}.{ff}.net.2"
    names |= {
        "single_blocks.*.linear1": {**rows(single, *qkv), f"{single}.proj_mlp": 4},
        "single_blocks.*.linear2": f"{single}.proj_out",
        "single_blocks.*.modulation.linear": f"{single}.norm.linear",
    }
    at = "txt_in.individual_token_refiner.blocks.*"
    names |= {
        f"{at}.self_attn_qkv": rows(refiner, *qkv),
        f"{at}.self_attn_proj": f"{refiner}.attn.to_out.0",
        f"{at}.mlp.fc1": f"{refiner}.ff.net.0.proj",
        f"{at}.mlp.fc2": f"{refiner}.ff.net.2",
        f"{at}.adaLN_modulation.1": f"{refiner}.norm_out.linear",
    }
    # Read as well: the names of ComfyUI's own modules, and the checkpoint's where ComfyUI knows only its own.
    for pattern, other in (
        (r"_attn_(qkv|proj)", r"_attn.\1"),
        (r"(_mod|modulation)\.linear", r"\1.lin"),
        (r"mlp\.fc1", "mlp.0"),
        (r"mlp\.fc2", "mlp.2"),
        (r"((?:time|guidance)_in|t_embedder)\.in_layer", r"\1.mlp.0"),
        (r"((?:time|guidance)_in|t_embedder)\.out_layer", r"\1.mlp.2"),
        (r"c_embedder\.in_layer", "c_embedder.linear_1"),
        (r"c_embedder\.out_layer", "c_embedder.linear_2"),
    ):
        names |= {re.sub(pattern, other, name): of for name, of in names.items() if re.search(pattern, name)}
    return names


HUNYUAN: Names = _hunyuan()
KNOWN: dict[str, Names] = {"ltx": LTX, "hunyuan": HUNYUAN, "cogvideox": COGVIDEOX}


@dataclass(frozen=True)
class Layer:
    """One linear (or convolution) of the original checkpoint."""

    name: str
    parts: dict[str, int]
    """diffusers modules from the top row down -> rows per input."""
    swapped: bool

    @property
    def fused(self) -> bool:
        return len(self.parts) > 1


def layer_of(module: str, names: Names) -> Layer | None:
    """The layer that the diffusers module is, or is a part of; None where the map has none."""
    for name, parts in names.items():
        for part in _parts(parts):
            if (found := _match(part, module)) is not None:
                return _layer(name, parts, found)
    return None


def layer_named(name: str, names: Names) -> Layer | None:
    """The layer with this ComfyUI name; None where the map has none."""
    for pattern, parts in names.items():
        if (found := _match(pattern, name)) is not None:
            return _layer(pattern, parts, found)
    return None


def detect(modules: Iterable[str], comfyui: bool) -> list[str]:
    """The KNOWN maps that have all `modules`, ComfyUI's or diffusers' names."""
    find = layer_named if comfyui else layer_of
    modules = list(modules)
    return [known for known, names in KNOWN.items() if all(find(module, names) for module in modules)]


def _parts(parts: str | Mapping[str, int]) -> Mapping[str, int]:
    return {parts: 1} if isinstance(parts, str) else parts


def _layer(name: str, parts: str | Mapping[str, int], found: tuple[str, ...]) -> Layer:
    filled = {_fill(part, found): rows for part, rows in _parts(parts).items()}
    return Layer(_fill(name, found), filled, isinstance(parts, Swapped))


def _match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards of `pattern` stand for in `name`."""
    found = _compiled(pattern).fullmatch(name)
    return found and found.groups()


@cache
def _compiled(pattern: str) -> re.Pattern:
    return re.compile(re.escape(pattern).replace(r"\*\*", "(.+)").replace(r"\*", r"([^.]+)"))


def _fill(pattern: str, found: tuple[str, ...]) -> str:
    rest = iter(found)
    return re.sub(r"\*+", lambda _: next(rest), pattern)
