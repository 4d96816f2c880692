"""What a user takes away: adapter files for diffusers and ComfyUI, or a transformer folder; and proof of both.

Files of an adapter (each `save_*` writes into a folder that the caller renames once `verify_*` has passed):

* `pytorch_lora_weights.safetensors`: `pipeline.load_lora_weights(folder)`; rank and alpha are in its metadata.
* `pytorch_lora_weights_comfyui.safetensors`: for ComfyUI's LoraLoader, unless its format cannot hold this adapter.
* LoKr and LoHa, which `load_lora_weights` cannot read, have peft's own two files in place of the first:
  `peft.PeftModel.from_pretrained(pipeline.transformer, folder)`.
* `also_trained.safetensors`, with `lora.also_train`: the network's own parameters, by name. Load it first:
  `pipeline.transformer.load_state_dict(load_file(path), strict=False)`.

Sharded networks: pass `full`, the whole state dict gathered on this rank, to each function.
`python -m models.export --help`: what can be done with adapter files afterwards (models/lora_commands.py).
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from models import adapters, lora_files
from models.comfy_names import Names
from models.lora_files import ALSO_FILE, COMFY_FILE, DIFFUSERS_FILE, PEFT_FILE, AdapterError, B

WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"
PEFT_PREFIX = (
    "base_model.model."  # part of peft's file format: without it PeftModel.from_pretrained loads nothing, quietly
)
# What starts at zero: while all of these are zero the adapter changes nothing.
ZERO_AT_START = re.compile(r".*\.(lora_B\.weight|lokr_w1|lokr_w1_a|hada_w2_b)")


class ExportError(ValueError):
    """Written weights that are unreadable, not finite, without effect, or not those of the network."""


# -- adapters --------------------------------------------------------------------------------------------------------


def save_lora(
    pipeline_class: type,
    net: nn.Module,
    folder: Path,
    comfy_names: Names,
    full: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Writes the adapter of `net` (unwrapped) into `folder`, in both key styles; see the module's docstring.

    `comfy_names`: the model's map in models.comfy_names. Returns lines to tell the user.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state, prefix = _on_cpu(adapters.adapter_state(net, full)), _prefix(pipeline_class)
    if _is_lora(net):
        pipeline_class.save_lora_weights(
            folder,
            **{f"{prefix}_lora_layers": state, f"{prefix}_lora_adapter_metadata": _adapter_config(net)},
        )
    else:
        save_file({PEFT_PREFIX + key: tensor for key, tensor in state.items()}, folder / PEFT_FILE)
        config = json.dumps(_adapter_config(net), indent=2, sort_keys=True)
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")
    if also := _on_cpu(adapters.also_trained(net, full)):
        save_file(also, folder / ALSO_FILE, metadata={"format": "pt"})
    try:
        comfy = _for_comfyui(net, state, comfy_names)
    except AdapterError as error:
        (folder / COMFY_FILE).unlink(missing_ok=True)
        return [f"no {COMFY_FILE}: {error}"]
    save_file(comfy, folder / COMFY_FILE, metadata={"format": "pt"})
    return []


def verify_lora(
    pipeline_class: type,
    folder: Path,
    net: nn.Module,
    comfy_names: Names,
    full: Mapping[str, Tensor] | None = None,
) -> None:
    """Reads back what `save_lora` wrote, as its users' loaders do, and compares it with the adapter of `net`.

    Raises ExportError: unreadable, keys missing or too many, empty tensors, NaN or infinity, other values, another rank
    or alpha, or an adapter without effect.
    """
    live, prefix = _on_cpu(adapters.adapter_state(net, full)), _prefix(pipeline_class)
    file = folder / (DIFFUSERS_FILE if _is_lora(net) else PEFT_FILE)
    if _is_lora(net):
        state, metadata = _reading(
            file,
            lambda: pipeline_class.lora_state_dict(
                folder,
                weight_name=DIFFUSERS_FILE,
                use_safetensors=True,
                local_files_only=True,
                return_lora_metadata=True,
            ),
        )
        expected, config = _prefixed(live, prefix), _prefixed(_adapter_config(net), prefix)
    else:
        state = _read_tensors(file)
        metadata = _reading(file, lambda: json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))
        expected, config = {PEFT_PREFIX + key: tensor for key, tensor in live.items()}, _adapter_config(net)
    _compare(file, state, expected)
    metadata = metadata or {}
    differ = [
        f"{k} {metadata.get(k)} for {v}" for k, v in config.items() if metadata.get(k) != json.loads(json.dumps(v))
    ]
    if differ:
        raise ExportError(f"{file}: its metadata is not the adapter's: {', '.join(differ)}")
    if not any(tensor.any() for key, tensor in live.items() if ZERO_AT_START.fullmatch(key)):
        raise ExportError(f"{file}: the adapter has no effect: all the matrices that start at zero are still zero")
    if also := _on_cpu(adapters.also_trained(net, full)):
        _compare(folder / ALSO_FILE, _read_tensors(folder / ALSO_FILE), also)
    _verify_comfyui(folder / COMFY_FILE, net, live, comfy_names)


def _verify_comfyui(file: Path, net: nn.Module, live: Mapping[str, Tensor], comfy_names: Names) -> None:
    try:
        expected = _for_comfyui(net, live, comfy_names)
    except AdapterError:  # told by save_lora
        return
    found = _read_tensors(file)
    _compare(file, found, expected)
    back, back_scales = lora_files.from_comfyui(found, comfy_names)
    scales = adapters.scales(net)
    _compare(file, _with_effect(back), _with_effect(_rescaled(live, scales)))
    ranks = {module: lora_files.rank_of(leaves) for module, leaves in lora_files.split(live).items()}
    for module, rank in ranks.items():
        scale = 1.0 if rank is None else scales[module]
        if module in back_scales and abs(back_scales[module] - scale) > 1e-6 * scale:
            raise ExportError(f"{file}: {module} is scaled by {back_scales[module]}, not by {scale}")


def _for_comfyui(net: nn.Module, state: Mapping[str, Tensor], comfy_names: Names) -> dict[str, Tensor]:
    rows = {name: m.out_features for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    return lora_files.to_comfyui(state, adapters.scales(net), comfy_names, rows)


def _with_effect(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the modules of a LoRA whose B is zero: one part of a fused layer does not show there."""
    modules = lora_files.split(state)
    return lora_files.join({m: leaves for m, leaves in modules.items() if B not in leaves or leaves[B].any()})


def _rescaled(state: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """`state` with the scale of rankless LoKr modules inside their first matrix, as ComfyUI's format has it."""
    modules = lora_files.split(state)
    for module, leaves in modules.items():
        if lora_files.rank_of(leaves) is None and scales[module] != 1:
            leaves["lokr_w1"] = leaves["lokr_w1"] * scales[module]
    return lora_files.join(modules)


def _is_lora(net: nn.Module) -> bool:
    return net.peft_config["default"].peft_type.value == "LORA"


def _adapter_config(net: nn.Module) -> dict:
    """The adapter's peft config as JSON has it, the same text every time."""
    config = net.peft_config["default"].to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def _prefix(pipeline_class: type) -> str:
    return getattr(pipeline_class, "transformer_name", "transformer")


def _prefixed(state: Mapping, prefix: str) -> dict:
    return {f"{prefix}.{key}": value for key, value in state.items()}


# -- the transformer -------------------------------------------------------------------------------------------------


def save_transformer(
    net: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    full: Mapping[str, Tensor] | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Writes `net` (unwrapped) as a diffusers folder in `dtype`, casting one shard at a time; `net` stays as it is."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    net.save_config(folder)
    state = net.state_dict() if full is None else full
    # Shapes alone decide the shards: tensors without data, in the dtype that will be written.
    shapes = {k: torch.empty(v.shape, dtype=saved_dtype(net, k, v, dtype), device="meta") for k, v in state.items()}
    plan = split_torch_state_dict_into_shards(shapes, filename_pattern=WEIGHTS, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        shard = {name: state[name].detach().to("cpu", shapes[name].dtype).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / f"{WEIGHTS.format(suffix='')}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def verify_transformer(
    folder: Path, net: nn.Module, dtype: torch.dtype, full: Mapping[str, Tensor] | None = None
) -> None:
    """Reads back what `save_transformer` wrote: every tensor of `net`, no other, finite, equal after the cast."""
    state = net.state_dict() if full is None else full
    seen: set[str] = set()
    for file in sorted(folder.glob(WEIGHTS.format(suffix="*"))):
        shard = _read_tensors(file)
        expected = {k: state[k].detach().to("cpu", saved_dtype(net, k, state[k], dtype)) for k in shard if k in state}
        _compare(file, shard, expected)
        seen |= shard.keys()
    if missing := sorted(state.keys() - seen):
        raise ExportError(f"{folder}: {len(missing)} tensors were not written, such as {missing[0]}")
    _reading(folder / "config.json", lambda: type(net).load_config(folder, local_files_only=True))


def saved_dtype(net: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """`dtype` for floating tensors, but float32 for what the model itself always loads in float32."""
    if not tensor.is_floating_point():
        return tensor.dtype
    kept = getattr(net, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in kept for part in name.split(".")) else dtype


# -- comparing -------------------------------------------------------------------------------------------------------


def _on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().to("cpu").contiguous() for key, tensor in state.items()}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return _reading(file, lambda: load_file(file))


def _reading(file: Path, read):
    from safetensors import SafetensorError

    try:
        return read()
    except (OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"{file}: cannot be read back: {error}") from error


def _compare(file: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    wrong = [f"{_some(expected.keys() - found.keys())} missing"] if expected.keys() - found.keys() else []
    wrong += [f"{_some(found.keys() - expected.keys())} too many"] if found.keys() - expected.keys() else []
    shared = [key for key in expected if key in found]
    for fault, is_wrong in (
        ("empty", lambda key: found[key].numel() == 0),
        ("not finite", lambda key: not torch.isfinite(found[key].float()).all()),
        ("not as in the network", lambda key: not _equal(found[key], expected[key])),
    ):
        if keys := [key for key in shared if is_wrong(key)]:
            wrong.append(f"{_some(keys)} {fault}")
    if wrong:
        raise ExportError(f"{file}: {'; '.join(wrong)}")


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _some(keys: Iterable[str]) -> str:
    keys = sorted(keys)
    return f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}"


if __name__ == "__main__":
    from models.lora_commands import main

    raise SystemExit(main())
