"""Adapter files: the key names that diffusers and ComfyUI give the same tensors, and reading either.

diffusers: `transformer.<module>.lora_A.weight`, with rank and alpha in the file's metadata. ComfyUI:
`diffusion_model.<module>` with the module names of the original checkpoint, an `.alpha` per module (the update is
scaled by alpha / rank), and `dora_scale` for DoRA's magnitudes. LoKr and LoHa tensors have the same names in peft,
LyCORIS and ComfyUI.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
COMFY_FILE = "pytorch_lora_weights_comfyui.safetensors"
PEFT_FILE = "adapter_model.safetensors"
ALSO_FILE = "also_trained.safetensors"
METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY
COMFY_PREFIX = "diffusion_model"
MAGNITUDE, DORA_SCALE = "lora_magnitude_vector", "dora_scale"

_ENTRY = re.compile(rf"(?P<module>.+?)\.(?P<leaf>(?:lora_|lokr_|hada_).+|alpha|{DORA_SCALE})")
_OTHER_NAMES = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}


class AdapterError(ValueError):
    """An adapter, or a file of one, that does not fit: what it names, trains or holds is not what was asked for."""


def split(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Adapter tensors by module and by what follows its name. ValueError lists keys that are no adapter's."""
    modules: dict[str, dict[str, Tensor]] = {}
    strange = []
    for key, tensor in state.items():
        if match := _ENTRY.fullmatch(key):
            modules.setdefault(match["module"], {})[match["leaf"]] = tensor
        else:
            strange.append(key)
    if strange:
        raise AdapterError(f"not adapter tensors: {', '.join(sorted(strange)[:5])} ({len(strange)} in all)")
    return modules


def join(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of `split`."""
    return {f"{module}.{leaf}": tensor for module, leaves in modules.items() for leaf, tensor in leaves.items()}


def rank_of(leaves: Mapping[str, Tensor]) -> int | None:
    """The rank of one module's adapter; None for a LoKr of two full matrices, which has none."""
    for leaf in ("lora_A.weight", "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if leaf in leaves:
            return leaves[leaf].shape[0]
    return None


def diffusers_to_comfy(
    state: Mapping[str, Tensor], scales: Mapping[str, float], renames: Mapping[str, str], prefix: str = "transformer"
) -> dict[str, Tensor]:
    """Keys as ComfyUI wants them, from `<prefix>.<module>.<leaf>` keys.

    `scales`: per module (without prefix), what its update is multiplied by; stored as alpha = scale * rank. A LoKr of
    two full matrices has no rank and ComfyUI reads no alpha there: the scale goes into the first matrix.
    `renames`: parts of module names, this project's -> the original checkpoint's. ValueError where it is ambiguous.
    """
    out = {}
    for module, leaves in split(_strip(state, prefix)).items():
        rank, scale = rank_of(leaves), scales[module]
        parts = module.split(".")
        if clash := sorted(set(parts) & set(renames.values())):
            raise AdapterError(f"{module}: {clash[0]} is already a ComfyUI name, so the renaming could not be undone")
        name = ".".join([COMFY_PREFIX, *(renames.get(part, part) for part in parts)])
        for leaf, tensor in leaves.items():
            if leaf == MAGNITUDE:  # [out] -> [out, 1]; of a convolution [1, out, 1, ...] -> [out, 1, 1, ...]
                leaf, tensor = DORA_SCALE, tensor[:, None] if tensor.ndim == 1 else tensor.transpose(0, 1)
            elif leaf == "lokr_w1" and rank is None and scale != 1:
                tensor = tensor * scale
            out[f"{name}.{leaf}"] = tensor.contiguous()
        if rank is not None:
            out[f"{name}.alpha"] = torch.tensor(scale * rank, dtype=torch.float32)
    return out


def comfy_to_diffusers(
    state: Mapping[str, Tensor], renames: Mapping[str, str], prefix: str = "transformer"
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The inverse of `diffusers_to_comfy`: (state, scales). A module without alpha has scale 1, as in ComfyUI."""
    back = {theirs: ours for ours, theirs in renames.items()}
    out, scales = {}, {}
    for name, leaves in split(_strip(state, COMFY_PREFIX)).items():
        module = ".".join(back.get(part, part) for part in name.split("."))
        leaves = {_OTHER_NAMES.get(leaf, leaf): tensor for leaf, tensor in leaves.items()}
        alpha, rank = leaves.pop("alpha", None), rank_of(leaves)
        scales[module] = 1.0 if alpha is None or rank is None else alpha.item() / rank
        for leaf, tensor in leaves.items():
            if leaf == DORA_SCALE:
                leaf, tensor = MAGNITUDE, tensor[:, 0] if tensor.ndim == 2 else tensor.transpose(0, 1)
            out[f"{prefix}.{module}.{leaf}"] = tensor.contiguous()
    return out, scales


def _strip(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if foreign := [key for key in state if not key.startswith(f"{prefix}.")]:
        raise AdapterError(f"keys that do not begin with {prefix}.: {', '.join(foreign[:5])} ({len(foreign)} in all)")
    return {key.removeprefix(f"{prefix}."): tensor for key, tensor in state.items()}


@dataclass(frozen=True)
class AdapterFile:
    path: Path
    state: dict[str, Tensor]
    """Tensors under the module names of the diffusers network, as peft has them: `<module>.lora_A.weight`."""
    scales: dict[str, float]
    """Per module, what its update is multiplied by."""


def read(path: str | Path, renames: Mapping[str, str]) -> AdapterFile:
    """An adapter file, or a folder that holds one, with diffusers, ComfyUI or peft key names.

    Raises ValueError for what is not there, cannot be read, or has other names.
    """
    from safetensors import SafetensorError, safe_open

    path = _file(Path(path).expanduser())
    try:
        with safe_open(path, framework="pt") as file:
            keys, metadata = file.keys(), file.metadata() or {}
            state = {key: file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path}: cannot be read as safetensors: {error}") from error
    prefix = next((p for p in ("transformer", "base_model.model", COMFY_PREFIX) if _all_begin(state, p)), None)
    if prefix is None:
        first = next(iter(state), "no tensors at all")
        raise AdapterError(
            f"{path}: keys begin with neither transformer. (diffusers) nor {COMFY_PREFIX}. (ComfyUI): {first}"
        )
    try:
        if prefix == COMFY_PREFIX:
            state, scales = comfy_to_diffusers(state, renames)
            return AdapterFile(path, _strip(state, "transformer"), scales)
        state = _strip(state, prefix)
        if prefix == "transformer":
            config = {
                key.removeprefix("transformer."): v for key, v in json.loads(metadata.get(METADATA_KEY, "{}")).items()
            }
        else:
            config = json.loads((path.parent / "adapter_config.json").read_text(encoding="utf-8"))
        scale = _scale(config)
        return AdapterFile(path, state, dict.fromkeys(split(state), scale))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from error


def _scale(config: dict) -> float:
    """The scale that a peft config means; diffusers takes alpha = rank where a file says nothing."""
    alpha, rank = config.get("lora_alpha", config.get("alpha")), config.get("r")
    if alpha is None or rank is None:
        return 1.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise AdapterError(f"{path}: there is no such file or folder")
    for name in (DIFFUSERS_FILE, PEFT_FILE):
        if (path / name).is_file():
            return path / name
    singles = sorted(path.glob("*.safetensors"))
    if len(singles) != 1:
        raise AdapterError(f"{path}: holds no {DIFFUSERS_FILE}; give the file itself ({len(singles)} there)")
    return singles[0]


def _all_begin(state: Mapping[str, Tensor], prefix: str) -> bool:
    return bool(state) and all(key.startswith(f"{prefix}.") for key in state)
