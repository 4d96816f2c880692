"""Adapter files: the tensors as diffusers, ComfyUI and peft store them, and reading any of these.

diffusers: `transformer.<module>.lora_A.weight`, with rank and alpha in the file's metadata. ComfyUI:
`diffusion_model.<module>` with the module names of the original checkpoint (models.comfy_names), an `.alpha` per module
whose update is scaled (by alpha / rank; without one it is not), and `dora_scale` for DoRA's magnitudes. LoKr and LoHa
tensors have the same names in peft, LyCORIS and ComfyUI.

Where the checkpoint has one fused linear for several modules (q, k, v), their LoRAs become one: with A stacked and B
block-diagonal the product is that of each module in its own rows, exactly, at the sum of the ranks.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from models.comfy_names import Layer, Names, layer_named, layer_of

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
COMFY_FILE = "pytorch_lora_weights_comfyui.safetensors"
PEFT_FILE = "adapter_model.safetensors"
ALSO_FILE = "also_trained.safetensors"
METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY
PREFIXES = {"diffusers": "transformer", "comfyui": "diffusion_model", "peft": "base_model.model"}
A, B = "lora_A.weight", "lora_B.weight"
MAGNITUDE, DORA_SCALE = "lora_magnitude_vector", "dora_scale"

_ENTRY = re.compile(rf"(?P<module>.+?)\.(?P<leaf>(?:lora_|lokr_|hada_).+|alpha|{DORA_SCALE})")
_OTHER_NAMES = {"lora_down.weight": A, "lora_up.weight": B}
_ROWS = (B, MAGNITUDE, "hada_w1_a", "hada_w2_a")  # leaves that have one row per output


class AdapterError(ValueError):
    """An adapter, or a file of one, that does not fit: what it names, trains or holds is not what was asked for."""


Leaves = dict[str, Tensor]
"""One module's adapter tensors by what follows the module's name: `lora_A.weight` [rank, in], ..."""


def split(state: Mapping[str, Tensor]) -> dict[str, Leaves]:
    """Adapter tensors by module and by what follows its name. AdapterError lists keys that are no adapter's."""
    modules: dict[str, Leaves] = {}
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
    for leaf in (A, "hada_w1_b", "lokr_w2_b", "lokr_w1_b"):
        if leaf in leaves:
            return leaves[leaf].shape[0]
    return None


# -- ComfyUI ---------------------------------------------------------------------------------------------------------


def to_comfyui(
    state: Mapping[str, Tensor], scales: Mapping[str, float], names: Names, rows: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """The ComfyUI file of an adapter, whose tensors are named `<module>.<leaf>` after the diffusers network.

    `scales`: per module, what its update is multiplied by; stored as alpha = scale * rank unless it is 1, so that
    diffusers, whose loaders refuse alpha, can read the file too. A LoKr of two full matrices has no rank and ComfyUI
    reads no alpha there: the scale goes into the first matrix. `rows`: outputs of the network's modules, for parts of a
    fused layer without an adapter; else the published ones. AdapterError lists what has no place in such a file.
    """
    layers: dict[str, Layer] = {}
    members: dict[str, dict[str, Leaves]] = {}
    wrong = []
    for module, leaves in split(state).items():
        if layer := layer_of(module, names):
            layers[layer.name] = layer
            members.setdefault(layer.name, {})[module] = leaves
        else:
            wrong.append(f"{module} has no ComfyUI name")
    out = {}
    for name, layer in layers.items():
        try:
            leaves, scale = _assembled(layer, members[name], scales, rows or {})
        except AdapterError as error:
            wrong.append(str(error))
            continue
        rank = rank_of(leaves)
        for leaf, tensor in leaves.items():
            if leaf == MAGNITUDE:  # [out] -> [out, 1]; of a convolution [1, out, 1, ...] -> [out, 1, 1, ...]
                leaf, tensor = DORA_SCALE, tensor[:, None] if tensor.ndim == 1 else tensor.transpose(0, 1)
            elif leaf == "lokr_w1" and rank is None and scale != 1:
                tensor = tensor * scale
            out[f"{PREFIXES['comfyui']}.{name}.{leaf}"] = tensor.contiguous()
        if rank is not None and scale != 1:
            out[f"{PREFIXES['comfyui']}.{name}.alpha"] = torch.tensor(scale * rank, dtype=torch.float32)
    if wrong:
        raise AdapterError(f"{'; '.join(wrong[:3])}{f' ({len(wrong)} in all)' if len(wrong) > 3 else ''}")
    return out


def from_comfyui(state: Mapping[str, Tensor], names: Names) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The inverse of `to_comfyui`: (state, scales). A module without alpha has scale 1, as in ComfyUI.

    Of a fused layer, a part that no column of B reaches has no adapter, if each column reaches one part; otherwise the
    parts were trained as one: each gets the whole A and its own rows of B.
    """
    modules, scales = _tidied(_strip(state, PREFIXES["comfyui"]))
    modules, scales = _renamed(modules, scales, names)
    return join(modules), scales


def _renamed(modules: Mapping[str, Leaves], scales: Mapping[str, float], names: Names):
    """Modules under ComfyUI's names to those of diffusers."""
    out: dict[str, Leaves] = {}
    out_scales, wrong = {}, []
    for name, leaves in modules.items():
        layer = layer_named(name, names)
        if layer is None:
            wrong.append(f"{name} is no ComfyUI name of this model")
            continue
        try:
            parts = _taken_apart(layer, leaves)
        except AdapterError as error:
            wrong.append(str(error))
            continue
        out |= parts
        out_scales |= dict.fromkeys(parts, scales.get(name, 1.0))
    if wrong:
        raise AdapterError(f"{'; '.join(wrong[:3])}{f' ({len(wrong)} in all)' if len(wrong) > 3 else ''}")
    return out, out_scales


def _tidied(state: Mapping[str, Tensor]) -> tuple[dict[str, Leaves], dict[str, float]]:
    """Modules with peft's names for their tensors, and the scales of those that have an alpha."""
    modules, scales = split(state), {}
    for module, leaves in modules.items():
        leaves = {_OTHER_NAMES.get(leaf, leaf): tensor for leaf, tensor in leaves.items()}
        alpha, rank = leaves.pop("alpha", None), rank_of(leaves)
        if alpha is not None and rank is not None:
            scales[module] = alpha.item() / rank
        if (magnitude := leaves.pop(DORA_SCALE, None)) is not None:
            leaves[MAGNITUDE] = magnitude[:, 0] if magnitude.ndim == 2 else magnitude.transpose(0, 1)
        modules[module] = {leaf: tensor.contiguous() for leaf, tensor in leaves.items()}
    return modules, scales


def _assembled(
    layer: Layer, members: Mapping[str, Leaves], scales: Mapping[str, float], rows: Mapping[str, int]
) -> tuple[Leaves, float]:
    """The adapter of a layer from those of its parts, and its scale."""
    scale, *others = {scales[module] for module in members}
    if not layer.fused:
        (leaves,) = members.values()
        return _halves_swapped(layer, leaves) if layer.swapped else leaves, scale
    _check_fusible(layer, members)
    if others:
        raise AdapterError(f"{layer.name} has one alpha, and {' and '.join(members)} are scaled differently")
    parts = [members.get(part) for part in layer.parts]
    present = [leaves for leaves in parts if leaves is not None]
    first = present[0][A]
    if len(present) == len(parts) and all(torch.equal(leaves[A], first) for leaves in present):
        leaves = {A: first, B: torch.cat([leaves[B] for leaves in present])}  # trained as one
    else:
        blocks = [
            first.new_zeros(rows.get(part) or count * first.shape[1], 0) if leaves is None else leaves[B]
            for leaves, (part, count) in zip(parts, layer.parts.items(), strict=True)
        ]
        leaves = {A: torch.cat([leaves[A] for leaves in present]), B: torch.block_diag(*blocks)}
    if MAGNITUDE in present[0]:  # a DoRA's norms are per row: the rows of one part know nothing of another's
        leaves[MAGNITUDE] = torch.cat([leaves[MAGNITUDE] for leaves in present])
    return leaves, scale


def _check_fusible(layer: Layer, members: Mapping[str, Leaves]) -> None:
    kinds = {frozenset(leaves) for leaves in members.values()}
    if kinds == {frozenset((A, B))}:
        return
    what = ", ".join(sorted({leaf for leaves in members.values() for leaf in leaves}))
    if kinds != {frozenset((A, B, MAGNITUDE))}:
        raise AdapterError(f"{layer.name} is one layer in ComfyUI, and {' and '.join(members)} ({what}) cannot be one")
    if missing := [part for part in layer.parts if part not in members]:
        raise AdapterError(f"{layer.name} is one layer in ComfyUI, and a DoRA of it needs {' and '.join(missing)} too")


def _taken_apart(layer: Layer, leaves: Leaves) -> dict[str, Leaves]:
    """The inverse of `_assembled`: the adapters of a layer's parts."""
    if not layer.fused:
        (part,) = layer.parts
        return {part: _halves_swapped(layer, leaves) if layer.swapped else leaves}
    if leaves.keys() - {MAGNITUDE} != {A, B}:
        raise AdapterError(f"{layer.name}: {', '.join(sorted(leaves))} cannot be divided over {', '.join(layer.parts)}")
    rank, inputs = leaves[A].shape
    heights = [count * inputs for count in layer.parts.values()]
    heights[-1] = leaves[B].shape[0] - sum(heights[:-1])
    if heights[-1] <= 0:
        raise AdapterError(f"{layer.name}: {leaves[B].shape[0]} rows are too few for {', '.join(layer.parts)}")
    blocks = leaves[B].split(heights)
    reached = torch.stack([block.ne(0).any(0) for block in blocks])
    if (reached.sum(0) > 1).any():
        columns = [list(range(rank))] * len(blocks)
    else:
        owners = _owners(reached)
        columns = [[c for c in range(rank) if owners[c] == i] for i in range(len(blocks))]
    magnitudes = leaves[MAGNITUDE].split(heights) if MAGNITUDE in leaves else None
    out = {}
    for i, part in enumerate(layer.parts):
        if columns[i]:
            out[part] = {A: leaves[A][columns[i]], B: blocks[i][:, columns[i]].contiguous()}
            if magnitudes:
                out[part][MAGNITUDE] = magnitudes[i].clone()
        elif magnitudes:
            raise AdapterError(f"{layer.name}: a DoRA whose columns do not reach {part}")
    return out


def _owners(reached: Tensor) -> list[int]:
    """Which part each column is of, from where B is not zero: bool [parts, rank], at most one True per column.

    A column that is all zero reaches nothing. It is placed so that the parts have equal ranks, and as many as possible
    have one: as in an adapter of which one part never moved.
    """
    count, rank = reached.shape
    seen = [int(column.int().argmax()) if column.any() else None for column in reached.T]
    for n in range(count, 0, -1):
        for chosen in combinations(range(count), n) if rank % n == 0 else ():
            owners = [part for part in chosen for _ in range(rank // n)]
            if all(part in (None, owner) for part, owner in zip(seen, owners, strict=True)):
                return owners
    last, owners = next(part for part in seen if part is not None), []
    for part in seen:
        last = last if part is None else part
        owners.append(last)
    return owners


def _halves_swapped(layer: Layer, leaves: Leaves) -> Leaves:
    if any(leaf.startswith("lokr_") for leaf in leaves):
        raise AdapterError(f"{layer.name} has its rows in another order than {next(iter(layer.parts))}: no LoKr has")
    return {leaf: tensor.roll(tensor.shape[0] // 2, 0) if leaf in _ROWS else tensor for leaf, tensor in leaves.items()}


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterFile:
    path: Path
    style: str
    """diffusers, comfyui or peft."""
    state: dict[str, Tensor]
    """Tensors as peft has them, `<module>.lora_A.weight`, without the style's prefix."""
    scales: dict[str, float]
    """Per module, what its update is multiplied by."""
    metadata: dict[str, str]


def read(path: str | Path, names: Names) -> AdapterFile:
    """An adapter file, or a folder that holds one, with its modules named after the diffusers network.

    Raises AdapterError for what is not there, cannot be read, or has other names.
    """
    file = read_as_it_is(path)
    modules = split(file.state)
    # Some trainers put transformer. before the names of the original checkpoint.
    foreign = all(layer_named(m, names) for m in modules) and not all(layer_of(m, names) for m in modules)
    if file.style != "comfyui" and not foreign:
        return file
    try:
        modules, scales = _renamed(modules, file.scales, names)
    except AdapterError as error:
        raise AdapterError(f"{file.path}: {error}") from error
    return replace(file, state=join(modules), scales=scales)


def read_as_it_is(path: str | Path) -> AdapterFile:
    """As `read`, but with the module names that are in the file."""
    from safetensors import SafetensorError, safe_open

    path = _file(Path(path).expanduser())
    try:
        with safe_open(path, framework="pt") as file:
            keys, metadata = file.keys(), file.metadata() or {}
            state = {key: file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path}: cannot be read as safetensors: {error}") from error
    style = next((s for s, prefix in PREFIXES.items() if _all_begin(state, prefix)), None)
    if style is None:
        first = next(iter(state), "no tensors at all")
        raise AdapterError(
            f"{path}: keys begin with neither transformer. (diffusers) nor diffusion_model. (ComfyUI): {first}"
        )
    try:
        modules, alphas = _tidied(_strip(state, PREFIXES[style]))
        config = {}
        if style == "diffusers":
            config = json.loads(metadata.get(METADATA_KEY, "{}"))
            config = {key.removeprefix("transformer."): value for key, value in config.items()}
        elif style == "peft":
            config = json.loads((path.parent / "adapter_config.json").read_text(encoding="utf-8"))
        scales = {module: _scale(config, module, rank_of(leaves)) for module, leaves in modules.items()} | alphas
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from error
    return AdapterFile(path, style, join(modules), scales, metadata)


def _scale(config: dict, module: str, rank: int | None) -> float:
    """The scale that a peft config means; diffusers takes alpha = rank where a file says nothing."""
    alpha = config.get("lora_alpha", config.get("alpha"))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # peft.utils.other.get_pattern_key
            alpha = value
            break
    rank = rank or config.get("r")
    if alpha is None or rank is None:
        return 1.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def save_diffusers(path: Path, state: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
    """Writes an adapter as `load_lora_weights` reads it, with ranks and alphas in the metadata.

    AdapterError for LoKr and LoHa, which diffusers' pipelines cannot read.
    """
    from safetensors.torch import save_file

    modules = split(state)
    if other := sorted({leaf for leaves in modules.values() for leaf in leaves} - {A, B, MAGNITUDE}):
        raise AdapterError(f"diffusers' pipelines read LoRA and DoRA only, not {', '.join(other)}")
    ranks = {module: leaves[A].shape[0] for module, leaves in modules.items()}
    alphas = {module: scales[module] * rank for module, rank in ranks.items()}
    rank, alpha = (max(set(values := list(of.values())), key=values.count) for of in (ranks, alphas))
    config = {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{module}": value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{module}": value for module, value in alphas.items() if value != alpha},
        "target_modules": "|".join(map(re.escape, sorted(modules))),  # a list would also match ends of names
        "use_dora": any(MAGNITUDE in leaves for leaves in modules.values()),
    }
    metadata = json.dumps({f"transformer.{key}": value for key, value in config.items()}, sort_keys=True)
    keys = {f"transformer.{key}": tensor.contiguous() for key, tensor in state.items()}
    save_file(keys, path, metadata={"format": "pt", METADATA_KEY: metadata})


def _strip(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if foreign := [key for key in state if not key.startswith(f"{prefix}.")]:
        raise AdapterError(f"keys that do not begin with {prefix}.: {', '.join(foreign[:5])} ({len(foreign)} in all)")
    return {key.removeprefix(f"{prefix}."): tensor for key, tensor in state.items()}


def share(file: Path) -> None:
    """Gives a file the permissions of its folder: safetensors makes it readable for its owner alone."""
    file.chmod(file.parent.stat().st_mode & 0o666)


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
        there = ", ".join(file.name for file in singles[:4]) or "there is no .safetensors file in it"
        raise AdapterError(f"{path}: holds no {DIFFUSERS_FILE}; give the file itself ({there})")
    return singles[0]


def _all_begin(state: Mapping[str, Tensor], prefix: str) -> bool:
    return bool(state) and all(key.startswith(f"{prefix}.") for key in state)
