"""What trains: an adapter of peft's on a frozen network, chosen parameters, or everything.

Two kinds of pattern, both case-sensitive and both required to match something:

* modules (`lora.targets`, `lora.exclude`), as in peft: the end of a module's name (`to_q`, `ff.net.2`), or a regular
  expression for the whole name when it holds one of ``* + ? [ ] ( ) { } | ^ $ \\``;
* parameters (`lora.also_train`, `train_modules`): a glob for the whole name (`*norm*`, `transformer_blocks.0.*`), the
  name of a module (all below it), or a regular expression when it holds one of ``^ $ | ( ) + \\``.

Names are the network's own, without what peft or a wrapper adds. Give these functions the unwrapped network.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from models import lora_files, quantize
from models.comfy_names import Names
from models.lora_files import AdapterError

ADAPTABLE = {
    "lora": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "lokr": (nn.Linear, nn.Conv1d, nn.Conv2d),
    "loha": (nn.Linear, nn.Conv1d, nn.Conv2d),
}
BASE_LAYER = ".base_layer"  # peft moves an adapted layer below this name


class LoraOptions(Protocol):
    """trainers.config.LoraOptions."""

    rank: int
    alpha: float
    targets: list[str]
    exclude: list[str]
    also_train: list[str]
    dropout: float
    type: str


@dataclass(frozen=True)
class Report:
    """What `attach` or `select` made trainable."""

    modules: list[str]
    """Modules that got an adapter."""
    parameters: list[str]
    """The network's own parameters that train."""
    trainable: int
    total: int

    def __str__(self) -> str:
        share = 100 * self.trainable / self.total
        what = [f"{len(self.modules)} adapted modules"] * bool(self.modules)
        what += [f"{len(self.parameters)} parameters of the network"] * bool(self.parameters)
        return f"training {self.trainable:,} of {self.total:,} numbers ({share:.2f} %): {', '.join(what)}"


# -- choosing --------------------------------------------------------------------------------------------------------


def attach(net: nn.Module, options: LoraOptions, default_targets: Sequence[str], seed: int = 0) -> Report:
    """Freezes `net` (a diffusers network) and puts an adapter of `options.type` on its targets.

    New weights depend on `seed` alone, so every rank has the same; torch's generators are left as they were. Raises
    ValueError for patterns that match nothing and for what peft cannot do.
    """
    candidates, targets, also = choose(net, options, default_targets)
    net.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # peft makes new weights on the CPU and moves them afterwards
        net.add_adapter(_peft_config(options, _exactly(targets, candidates)))
    _check_attached(net, targets)
    own = _by_own_name(net)
    for name in also:
        own[name].requires_grad_(True)
    return _report(net, targets, also)


def choose(
    net: nn.Module, options: LoraOptions, default_targets: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """(modules that could be adapted, those that are, parameters that train beside them); needs no weights.

    Raises AdapterError for patterns that match nothing.
    """
    kinds = ADAPTABLE.get(options.type, ADAPTABLE["lora"])
    candidates = [name for name, module in net.named_modules() if isinstance(module, kinds)]
    matched = _matching(candidates, options.targets or default_targets, "lora.targets", _module_matches)
    excluded = _matching(matched, options.exclude, "lora.exclude", _module_matches) if options.exclude else []
    targets = [name for name in matched if name not in set(excluded)]
    if not targets:
        raise AdapterError("lora.exclude leaves nothing of lora.targets to train")
    return (
        candidates,
        targets,
        _matching(list(_by_own_name(net)), options.also_train, "lora.also_train", _parameter_matches),
    )


def select(net: nn.Module, patterns: Sequence[str] = ()) -> Report:
    """Makes the parameters of `net` that match `patterns` trainable and freezes the rest; no patterns: all train."""
    own = _by_own_name(net)
    chosen = _matching(list(own), patterns, "train_modules", _parameter_matches) if patterns else list(own)
    net.requires_grad_(False)
    for name in chosen:
        own[name].requires_grad_(True)
    return _report(net, [], chosen)


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by their full name in `net`."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def require_gradients(net: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Raises AdapterError naming those of `parameters` (all that train) that the backward pass did not reach.

    Where no gradient is left to see, as under DeepSpeed, which updates inside backward, nothing is known.
    """
    seen = [p.grad is not None for p in parameters]
    if all(seen) or not any(seen):
        return
    named = trainable(net)
    missed = [own_name(name) for name, p in named.items() if p.grad is None]
    raise AdapterError(
        f"{len(missed)} of {len(named)} trained parameters got no gradient and would never change, such as "
        f"{missed[0]}: leave them out of what trains, or set memory.checkpointing: none"
    )


def cast_trainable(net: nn.Module, dtype: torch.dtype) -> None:
    """Gives every trainable parameter this dtype, in place: an optimizer that already holds them keeps them."""
    for parameter in trainable(net).values():
        parameter.data = parameter.data.to(dtype)


def _peft_config(options: LoraOptions, targets: list[str] | str):
    from peft import LoHaConfig, LoKrConfig, LoraConfig

    if options.type in ("lokr", "loha"):
        if options.dropout:
            raise AdapterError(f"lora.dropout {options.dropout}: peft has no input dropout for {options.type}; use 0")
        kind = LoKrConfig if options.type == "lokr" else LoHaConfig
        return kind(r=options.rank, alpha=options.alpha, target_modules=targets)
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        use_dora=options.type == "dora",
        use_rslora=options.type == "rslora",
    )


def _exactly(targets: list[str], candidates: Iterable[str]) -> list[str] | str:
    """`targets` so that peft takes these and no others: it would also take modules whose names end like one of them."""
    ends = tuple(f".{name}" for name in targets)
    if set(targets) == {name for name in candidates if name in targets or name.endswith(ends)}:
        return targets
    return "|".join(map(re.escape, targets))


def _check_attached(net: nn.Module, targets: list[str]) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {name for name, module in net.named_modules() if isinstance(module, BaseTunerLayer)}
    if found != set(targets):
        raise AdapterError(f"peft adapted other modules than asked: {sorted(found ^ set(targets))[:5]}")


def _report(net: nn.Module, modules: list[str], parameters: list[str]) -> Report:
    count = sum(p.numel() for p in trainable(net).values())
    return Report(modules, parameters, count, sum(quantize.numel(p) for p in net.parameters()))


# -- patterns --------------------------------------------------------------------------------------------------------


def _module_matches(name: str, pattern: str) -> bool:
    if re.search(r"[*+?\[\](){}|^$\\]", pattern):
        return re.fullmatch(pattern, name) is not None
    return name == pattern or name.endswith(f".{pattern}")


def _parameter_matches(name: str, pattern: str) -> bool:
    if re.search(r"[\^$|()+\\]", pattern):
        return re.fullmatch(pattern, name) is not None
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _matching(names: list[str], patterns: Sequence[str], option: str, matches) -> list[str]:
    """The names that match any pattern, in the network's order. ValueError lists each pattern that matches none."""
    unmatched = []
    for pattern in patterns:
        try:
            if not any(matches(name, pattern) for name in names):
                unmatched.append(f"{pattern!r}{_nearest(pattern, names)}")
        except re.error as error:
            unmatched.append(f"{pattern!r} is not a regular expression ({error})")
    if unmatched:
        raise AdapterError(f"{option}: nothing matches " + "; nothing matches ".join(unmatched))
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def _nearest(pattern: str, names: list[str]) -> str:
    """The endings of names that are most like `pattern`, as part of a message."""
    endings = {".".join(name.split(".")[-n:]) for name in names for n in (1, 2, 3)}
    near = difflib.get_close_matches(pattern, sorted(endings), n=3, cutoff=0.3)
    return f" (nearest: {', '.join(near)})" if near else ""


# -- state -----------------------------------------------------------------------------------------------------------


def own_name(name: str) -> str:
    """A parameter's name in the network before peft changed it."""
    return name.replace(f"{BASE_LAYER}.", ".")


def _by_own_name(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `net` by the names that they have without an adapter."""
    return {own_name(name): p for name, p in net.named_parameters()}


def _adapter_parameters(net: nn.Module) -> set[str]:
    if not hasattr(net, "peft_config"):
        return set()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [name for name, module in net.named_modules() if isinstance(module, BaseTunerLayer)]
    below = [f"{layer}.{name}" for layer in layers for name, _ in net.get_submodule(layer).named_parameters()]
    return {name for name in below if BASE_LAYER not in name}


def adapter_state(net: nn.Module, full: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter's tensors by peft's names, `<module>.lora_A.weight`.

    `full`: the whole state dict of `net`, gathered, where its parameters are sharded over ranks.
    """
    from peft import get_peft_model_state_dict

    return {k: v.detach() for k, v in get_peft_model_state_dict(net, state_dict=full and dict(full)).items()}


def also_trained(net: nn.Module, full: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The network's own parameters that train, by their own names; `full` as in `adapter_state`."""
    adapter = _adapter_parameters(net)
    return {
        own_name(name): (full[name] if full is not None else p).detach()
        for name, p in trainable(net).items()
        if name not in adapter
    }


def set_adapter_state(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies what `adapter_state` gave, or `AdapterFile.state`, into the adapter. ValueError for unknown keys."""
    from peft import set_peft_model_state_dict

    if unknown := sorted(state.keys() - adapter_state(net).keys()):
        raise AdapterError(f"no such adapter tensors here: {', '.join(unknown[:3])} ({len(unknown)} in all)")
    set_peft_model_state_dict(net, dict(state))


def scales(net: nn.Module) -> dict[str, float]:
    """What each module's update is multiplied by: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: m.scaling["default"] for name, m in net.named_modules() if isinstance(m, BaseTunerLayer)}


def load_lora_into(net: nn.Module, path: str | Path, comfy_names: Names) -> list[str]:
    """Starts the attached adapter from a file (`lora.init_from`): diffusers, ComfyUI or peft names.

    Its rank, scale and kind must be those of the adapter, and every tensor in it must have a place; ValueError lists
    all that does not fit. Returns lines to tell the user: adapted modules that the file says nothing about start fresh.
    `comfy_names`: the model's map in models.comfy_names.
    """
    file = lora_files.read(path, comfy_names)
    own, own_scales = lora_files.split(adapter_state(net)), scales(net)
    theirs = lora_files.split(file.state)
    wrong = []
    if unknown := sorted(theirs.keys() - own.keys()):
        wrong.append(f"{len(unknown)} modules that lora.targets does not cover, such as {unknown[0]}")
    for module in theirs.keys() & own.keys():
        wrong += _misfits(theirs[module], file.scales[module], own[module], own_scales[module])
    if wrong:
        each = dict.fromkeys(sorted(wrong))  # mostly the same for all modules
        raise AdapterError(f"lora.init_from {file.path} does not fit this run: " + "; ".join(each))
    set_adapter_state(net, file.state)
    if not (fresh := sorted(own.keys() - theirs.keys())):
        return []
    return [f"{file.path} has nothing for {len(fresh)} adapted modules, such as {fresh[0]}: they start fresh"]


def _misfits(theirs: dict[str, Tensor], their_scale: float, own: dict[str, Tensor], own_scale: float) -> list[str]:
    if theirs.keys() != own.keys():
        return [f"another type of adapter ({', '.join(sorted(theirs))} in the file, {', '.join(sorted(own))} here)"]
    rank, own_rank = lora_files.rank_of(theirs), lora_files.rank_of(own)
    if rank != own_rank:
        return [f"rank {rank} in the file, lora.rank {own_rank} here"]
    if shapes := [leaf for leaf in own if theirs[leaf].shape != own[leaf].shape]:
        return [f"{shapes[0]} is {list(theirs[shapes[0]].shape)} in the file, {list(own[shapes[0]].shape)} here"]
    if abs(their_scale - own_scale) > 1e-6 * own_scale:
        alphas = [f"{scale * (rank or 1):g}" for scale in (their_scale, own_scale)]
        return [f"alpha {alphas[0]} in the file, alpha {alphas[1]} here (alpha / rank scales the update)"]
    return []
