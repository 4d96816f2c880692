"""`python -m models.export convert|merge|info FILE`: what can be done with an adapter file, whoever made it."""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models import comfy_names, load, lora_files
from models.lora_files import ALSO_FILE, COMFY_FILE, DIFFUSERS_FILE, MAGNITUDE, A, AdapterError, AdapterFile, B, Leaves

WHOLE = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that are not quantised
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


# -- convert ---------------------------------------------------------------------------------------------------------


def convert(path: Path, to: str, model: str | None = None, out: Path | None = None) -> list[str]:
    """Writes the adapter file `path` with the key names of `to` ("diffusers" or "comfyui"); returns what to tell.

    `model`: a name in comfy_names.KNOWN (None: found by the module names). `out`: a file, or a folder for one of the
    usual name (None: beside the original); what exists is never replaced. AdapterError: what cannot be converted.
    """
    from safetensors.torch import save_file

    file = _read(path)
    if file.style == to:
        raise AdapterError(f"{file.path}: already has the key names of {to}")
    if file.style != "comfyui" and to == "diffusers":  # peft's: the same module names
        model, names = None, comfy_names.SAME
    else:
        model = model or _model_of(file)
        names = comfy_names.KNOWN[model]
    out = out or file.path.with_name(f"{file.path.stem}_{to}.safetensors")
    if out.is_dir():
        out = out / (COMFY_FILE if to == "comfyui" else DIFFUSERS_FILE)
    if out.exists():
        raise AdapterError(f"{out}: exists already; move it away, or give another --out")
    file = lora_files.read(path, names)
    fresh = out.with_name(f".{out.name}.partial")
    try:
        if to == "comfyui":
            state = lora_files.to_comfyui(file.state, file.scales, names)
            save_file(state, fresh, metadata={"format": "pt"})
        else:
            lora_files.save_diffusers(fresh, file.state, file.scales)
        if lost := _effect_differs(file, lora_files.read(fresh, names)):
            raise AdapterError(f"{lost} would not come back from the converted file")
        lora_files.share(fresh)
        fresh.rename(out)
    except AdapterError as error:
        raise AdapterError(f"{file.path}: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)
    as_model = f" ({model} names)" if model else ""
    return [f"{out}: {len(lora_files.split(file.state))} modules, from {file.style} to {to}{as_model}"]


def _read(path: Path) -> AdapterFile:
    """The file as it is; the names of an original checkpoint count as ComfyUI's, whatever stands before them."""
    file = lora_files.read_as_it_is(path)
    modules = lora_files.split(file.state)
    if not comfy_names.detect(modules, comfyui=False) and comfy_names.detect(modules, comfyui=True):
        return replace(file, style="comfyui")
    return file


def _model_of(file: AdapterFile) -> str:
    modules = lora_files.split(file.state)
    fits = comfy_names.detect(modules, file.style == "comfyui")
    if len(fits) == 1:
        return fits[0]
    known, first = ", ".join(comfy_names.KNOWN), next(iter(modules))
    which = f"the module names fit {' and '.join(fits)}" if fits else f"no known model has all of them, such as {first}"
    raise AdapterError(f"{file.path}: {which}; say with --model which it is ({known})")


def _effect_differs(one: AdapterFile, other: AdapterFile) -> str | None:
    """The first module whose update is another one; a module without effect may be missing."""
    modules, others = lora_files.split(one.state), lora_files.split(other.state)
    for module in sorted(modules.keys() | others.keys()):
        both = ((modules, one), (others, other))
        sides = [(side[module], file.scales[module]) for side, file in both if module in side]
        alive = [leaves for leaves, _ in sides if B not in leaves or leaves[B].any()]
        if alive and (len(sides) < 2 or not _same(*sides)):
            return module
    return None


def _same(one: tuple[Leaves, float], other: tuple[Leaves, float]) -> bool:
    (leaves, scale), (others, other_scale) = one, other
    if leaves.keys() != others.keys():
        return False
    if lora_files.rank_of(leaves) is None:  # a LoKr whose scale is inside its first matrix
        leaves = leaves | {"lokr_w1": leaves["lokr_w1"] * (scale / other_scale)}
    elif abs(scale - other_scale) > 1e-6 * abs(scale):
        return False
    return all(torch.equal(leaves[leaf], others[leaf]) for leaf in leaves)


# -- merge -----------------------------------------------------------------------------------------------------------


def merge(path: Path, base: Path, out: Path, model: str | None = None) -> list[str]:
    """Adds an adapter to a transformer's weights and writes them as a new transformer folder.

    `base`: a diffusers pipeline folder, or its transformer folder. One weight file at a time is read, in float32 each
    weight is merged, and rounded once to its own dtype. AdapterError: a quantised base, modules or sizes that are not
    the base's, weights that are not finite, or an adapter that rounding makes vanish.
    """
    folder = base / "transformer" if (base / "transformer").is_dir() else base
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise AdapterError(f"{out}: exists already; give another --out")
    files, stored = _weights_of(folder)
    file = _read(path)
    if file.style == "comfyui":
        model = model or _model_of(file)
    file = lora_files.read(path, comfy_names.KNOWN[model] if model else comfy_names.SAME)
    modules = lora_files.split(file.state)
    also = _also_trained(file.path)
    wanted = [f"{module}.weight" for module in modules] + list(also)
    if absent := sorted(name for name in wanted if name not in stored):
        raise AdapterError(f"{file.path} is not for {folder}: it has no {absent[0]} ({len(absent)} missing in all)")
    if packed := sorted(name for name in wanted if stored[name] not in WHOLE):
        kind = str(stored[packed[0]]).removeprefix("torch.")
        raise AdapterError(f"{folder}: {packed[0]} is stored as {kind}: merge into the weights it was quantised from")

    fresh = out.with_name(f".{out.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        for other in folder.iterdir():
            if other.is_file() and other.suffix in (".json", ".md", ".txt"):
                shutil.copy2(other, fresh / other.name)
        changed = sum(_merge_file(source, fresh / source.name, file, modules, also) for source in files)
        if not changed:
            raise AdapterError(f"{file.path}: nothing of it is left after rounding to the base's dtype")
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            out.rmdir()
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    lines = [f"{out}: {changed} of {len(modules)} adapted weights changed, {len(stored)} in all"]
    lines += [f"with {len(also)} weights of {file.path.with_name(ALSO_FILE)}"] if also else []
    kind = _config(out).get("_class_name", "AutoModel")
    return [*lines, f"to use it: from_pretrained({str(base)!r}, transformer={kind}.from_pretrained({str(out)!r}))"]


def _weights_of(folder: Path) -> tuple[list[Path], dict[str, torch.dtype]]:
    """The weight files of a transformer folder, and the dtype of each of its tensors."""
    if not (folder / "config.json").is_file():
        raise AdapterError(f"{folder}: no config.json; --base is a diffusers pipeline folder or its transformer folder")
    if quantised := _config(folder).get("quantization_config"):
        how = quantised.get("quant_method", "some way")
        raise AdapterError(f"{folder}: is quantised ({how}): merge into the weights it was quantised from")
    files, _ = load.weight_files(folder)
    if missing := [str(file) for file in files if not file.is_file()]:
        raise AdapterError(f"{missing[0]}: there is no such file ({len(missing)} missing in all)")
    if not files:
        raise AdapterError(f"{folder}: holds no weights as safetensors")
    stored = {}
    for file in files:
        with _opened(file) as opened:
            stored |= {key: _dtype(opened, key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    return files, stored


def _config(folder: Path) -> dict:
    return load.component_config(folder.absolute().parent, folder.absolute().name)


def _opened(file: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise AdapterError(f"{file}: cannot be read as safetensors: {error}") from error


def _dtype(opened, key: str) -> torch.dtype:
    piece = opened.get_slice(key)  # an empty piece of it costs nothing to read
    return piece[:0].dtype if piece.get_shape() else opened.get_tensor(key).dtype


def _also_trained(adapter: Path) -> dict[str, Tensor]:
    beside = adapter.with_name(ALSO_FILE)
    return _tensors(beside)[0] if beside.is_file() else {}


def _tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    with _opened(file) as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118 (not a dict)


def _merge_file(source: Path, target: Path, file: AdapterFile, modules: dict[str, Leaves], also: dict) -> int:
    """Writes one weight file with the adapter added and reads it back; how many weights the adapter changed."""
    from safetensors.torch import save_file

    (state, metadata), changed = _tensors(source), 0
    for name, tensor in also.items():
        if name in state:
            state[name] = _same_shape(tensor, state[name], name).to(state[name].dtype)
    for module, leaves in modules.items():
        if (name := f"{module}.weight") in state:
            before = state[name]
            state[name] = merged(before, leaves, file.scales[module], module).to(before.dtype)
            changed += not torch.equal(before, state[name])
            if not torch.isfinite(state[name]).all():
                raise AdapterError(f"{file.path}: {module} merged into {before.dtype} is not finite")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, target, metadata=metadata)
    lora_files.share(target)
    with _opened(target) as opened:
        if wrong := [name for name, tensor in state.items() if not torch.equal(opened.get_tensor(name), tensor)]:
            raise AdapterError(f"{target}: {wrong[0]} was not written as it should be ({len(wrong)} in all)")
    return changed


def merged(weight: Tensor, leaves: Leaves, scale: float, module: str) -> Tensor:
    """`weight` with one module's adapter added, float32. Raises AdapterError for another size or kind."""
    if {A, B} <= leaves.keys() <= {A, B, MAGNITUDE}:
        update = leaves[B].float().flatten(1) @ leaves[A].float().flatten(1)
    elif leaves.keys() == set(LOHA):
        w1_a, w1_b, w2_a, w2_b = (leaves[leaf].float() for leaf in LOHA)
        update = (w1_a @ w1_b) * (w2_a @ w2_b)
    elif all(re.fullmatch("lokr_w[12](_[ab])?", leaf) for leaf in leaves):
        one, two = (_lokr_factor(leaves, f"lokr_w{i}") for i in (1, 2))
        update = torch.kron(one.reshape(*one.shape, *[1] * (two.ndim - 2)), two)
    else:
        raise AdapterError(f"{module}: an adapter of {', '.join(sorted(leaves))} cannot be merged")
    if update.numel() != weight.numel() or update.shape[0] != weight.shape[0]:
        raise AdapterError(f"{module}: the adapter is for {list(update.shape)}, the weight has {list(weight.shape)}")
    out = weight.float() + scale * update.reshape(weight.shape)
    if MAGNITUDE in leaves:
        norm = leaves[MAGNITUDE].float().flatten() / out.flatten(1).norm(dim=1)
        out = out * norm.reshape(-1, *[1] * (out.ndim - 1))
    return out


def _lokr_factor(leaves: Leaves, name: str) -> Tensor:
    if name in leaves:
        return leaves[name].float()
    return leaves[f"{name}_a"].float() @ leaves[f"{name}_b"].float()


def _same_shape(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    if tensor.shape != like.shape:
        raise AdapterError(f"{ALSO_FILE}: {name} has {list(tensor.shape)}, the base {list(like.shape)}")
    return tensor


# -- info ------------------------------------------------------------------------------------------------------------


def info(path: Path) -> list[str]:
    """What an adapter file holds, as lines to print."""
    file = _read(path)
    modules = lora_files.split(file.state)
    fits = comfy_names.detect(modules, file.style == "comfyui")
    numbers, size = sum(t.numel() for t in file.state.values()), sum(t.nbytes for t in file.state.values())
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in file.state.values()})
    bad = sorted(key for key, tensor in file.state.items() if not torch.isfinite(tensor.float()).all())
    idle = [module for module, leaves in modules.items() if not _acts(leaves)]
    kinds = sorted({_kind(leaves) for leaves in modules.values()})
    lines = [
        f"file      {file.path}",
        f"names     {file.style}",
        f"model     {' or '.join(fits) or 'unknown'} (by its module names)",
        f"type      {', '.join(kinds)}",
        f"tensors   {len(file.state)}, {numbers:,} numbers, {', '.join(dtypes)}, {size / 1e6:.1f} MB",
        f"finite    {f'NO: {_first(bad)}' if bad else 'yes'}",
        f"effect    {'NONE' if len(idle) == len(modules) else f'none in {_first(idle)}' if idle else 'yes'}",
        *_targets(file, modules),
    ]
    also = file.path.with_name(ALSO_FILE)
    lines += [f"beside it {also}: load that first"] if also.is_file() else []
    return lines + [f"metadata  {key}: {_short(value)}" for key, value in sorted(file.metadata.items())]


def _targets(file: AdapterFile, modules: dict[str, Leaves]) -> list[str]:
    """A line for each kind of module, numbers as *: count, rank, alpha. A line for each module where these differ."""
    rows: dict[str, dict[str, tuple]] = {}
    for module, leaves in modules.items():
        rank = lora_files.rank_of(leaves)
        alpha = None if rank is None else round(file.scales[module] * rank, 6)
        rows.setdefault(re.sub(r"\.\d+(?=\.)", ".*", module), {})[module] = (rank, alpha)
    lines = [f"modules   {len(modules)}"]
    for pattern, each in sorted(rows.items()):
        if len(set(each.values())) == 1:
            lines.append(f"  {len(each):4} x {pattern}: {_strength(*next(iter(each.values())))}")
        else:
            lines += [f"         {module}: {_strength(*values)}" for module, values in sorted(each.items())]
    return lines


def _strength(rank: int | None, alpha: float | None) -> str:
    return "no rank" if rank is None else f"rank {rank}, alpha {alpha:g}, scale {alpha / rank:g}"


def _kind(leaves: Leaves) -> str:
    if any(leaf.startswith("lokr_") for leaf in leaves):
        return "LoKr"
    if any(leaf.startswith("hada_") for leaf in leaves):
        return "LoHa"
    return "DoRA" if MAGNITUDE in leaves else "LoRA"


def _acts(leaves: Leaves) -> bool:
    """Whether any product that the update is made of can be other than zero; a DoRA's magnitudes may act alone."""
    return MAGNITUDE in leaves or all(tensor.any() for tensor in leaves.values())


def _first(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _short(value: str, limit: int = 300) -> str:
    value = " ".join(value.split())
    return value if len(value) <= limit else f"{value[:limit]}... ({len(value)} characters)"


# -- command line ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(1, f"{self.prog}: {message} (--help tells more)\n")


def parser() -> Parser:
    top = Parser(prog="python -m models.export", description="Convert, merge or describe a LoRA file.")
    commands = top.add_subparsers(dest="command", required=True)
    file = "an adapter file, or the folder that holds it: diffusers, ComfyUI or peft key names"
    model = "whose module names they are; found by the names themselves where these leave no doubt"

    one = commands.add_parser("convert", help="from one key style to the other")
    one.add_argument("file", type=Path, help=file)
    one.add_argument("--to", required=True, choices=("diffusers", "comfyui"))
    one.add_argument("--model", choices=tuple(comfy_names.KNOWN), help=model)
    one.add_argument("--out", type=Path, help="file or folder to write; default: beside FILE, named after it")

    one = commands.add_parser("merge", help="into the weights of a transformer")
    one.add_argument("file", type=Path, help=file)
    one.add_argument("--base", type=Path, required=True, help="a diffusers pipeline folder, or its transformer folder")
    one.add_argument("--out", type=Path, required=True, help="the transformer folder to write")
    one.add_argument("--model", choices=tuple(comfy_names.KNOWN), help=model)

    one = commands.add_parser("info", help="rank, alpha, targets, metadata; whether it is finite and does anything")
    one.add_argument("file", type=Path, help=file)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; prints what it did, or the error in one line. Returns the exit code, 0 or 1."""
    given = vars(parser().parse_args(arguments))
    run = {"convert": convert, "merge": merge, "info": info}[given.pop("command")]
    given["path"] = given.pop("file").expanduser()
    try:
        print(*run(**given), sep="\n")
    except (AdapterError, load.ModelError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
