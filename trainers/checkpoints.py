"""Checkpoints that appear whole or not at all, and the search for the one to resume from.

A finished `checkpoint-N/` (N in optimizer steps) holds the usable export, and in `state/` what a resumed run needs:
trainable weights, optimizer, random states, and `trainer_state.json`, which is written last and lists every file with
its size. It is built as `.checkpoint-N.partial` and renamed.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from safetensors import SafetensorError
from torch.nn import Parameter

from models.lora_files import share
from trainers import sharding

STATE = "trainer_state.json"
TRAINABLE = "trainable.safetensors"
SHARDS = "sharded"  # folder of a distributed checkpoint


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, unfit for this run, or could not be written."""


def keep_trainable_only(accelerator, trainable: Callable[[], dict[str, Parameter]]) -> None:
    """Makes save_state and load_state handle the trainable parameters alone, by name: no frozen base in a checkpoint.

    For one process and for DDP; sharded weights do not pass through such hooks.
    """
    from safetensors.torch import load_file, save_file

    if accelerator.distributed_type in ("FSDP", "DEEPSPEED"):
        return

    def save(models, weights, folder):
        weights.clear()
        if accelerator.is_main_process:
            save_file({k: p.detach().cpu().contiguous() for k, p in trainable().items()}, Path(folder) / TRAINABLE)

    def load(models, folder):
        models.clear()
        saved = load_file(Path(folder) / TRAINABLE)
        for name, parameter in trainable().items():
            parameter.data.copy_(saved[name])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def write_state(accelerator, model, optimizer, folder: Path) -> None:
    """What goes on from here into `folder`: what trains and its optimizer, in the backend's own form. On every rank."""
    if accelerator.distributed_type == "FSDP":
        sharding.save(model, optimizer.optimizer, folder / SHARDS)
    else:  # the keyword is DeepSpeed's: no frozen base in its checkpoints either
        accelerator.save_state(str(folder), exclude_frozen_parameters=True)


def read_state_into(accelerator, model, optimizer, folder: Path) -> None:
    """What `write_state` wrote, into the prepared model and optimizer. On every rank."""
    if accelerator.distributed_type == "FSDP":
        sharding.load(model, optimizer.optimizer, folder / SHARDS)
    elif accelerator.distributed_type == "DEEPSPEED":
        accelerator.load_state(str(folder), load_module_strict=False)
    else:
        accelerator.load_state(str(folder))


def save(accelerator, root: Path, step: int, write: Callable[[Path], None], state: dict) -> Path:
    """Writes checkpoint-<step>: `write` what all ranks put there, then the list of files and the rename.

    Called on every rank, as is `write`. Raises CheckpointError when the disk is full; what was there before stays as it
    was.
    """
    final, partial = root / f"checkpoint-{step}", root / f".checkpoint-{step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        write(partial)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
            write_json(partial / "state" / STATE, state | {"step": step, "files": files})
            for path in (partial / name for name in files):
                share(path)
                sync(path)  # a power cut after the rename must not leave empty files
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            sync(root)
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(root).free
        shutil.rmtree(partial, ignore_errors=True)
        # torch and safetensors report a full disk without an errno
        if not (getattr(error, "errno", None) == errno.ENOSPC or "space left" in str(error) or free < 1 << 20):
            raise
        raise CheckpointError(
            f"{final}: no space left on the disk ({free} bytes free, the last checkpoint took {size(root)}); earlier "
            "checkpoints are intact. Free some space, lower checkpoint.keep, and go on with checkpoint.resume: latest"
        ) from error
    accelerator.wait_for_everyone()
    return final


def prune(root: Path, keep: int, keep_exports: int | None) -> None:
    """Deletes the resume state beyond the newest `keep` whole checkpoints, the exports beyond `keep_exports`
    (None: none). Also what killed runs left half-written."""
    for left in root.glob(".checkpoint-*.partial"):
        shutil.rmtree(left)
    folders = numbered(root)
    # Whole ones: a broken folder with a higher number must not take the place of the one just saved.
    resumable = [folder for folder in folders if problem(folder) is None][:keep]
    exported = [folder for folder in folders if any(path.name != "state" for path in folder.iterdir())]
    for folder in folders:
        if folder in resumable:
            continue
        if keep_exports is not None and folder not in exported[:keep_exports]:
            shutil.rmtree(folder)
        elif (folder / "state").exists():
            (folder / "state" / STATE).unlink(missing_ok=True)  # first: a half-deleted state never looks whole
            shutil.rmtree(folder / "state")


def find(resume: str, root: Path) -> tuple[Path | None, list[str]]:
    """The folder to resume from, and what to tell the user.

    `latest`: the newest whole checkpoint under `root`, None where there is none; each newer one that is passed over is
    named with its fault. A folder: that one, or CheckpointError.
    """
    if resume != "latest":
        folder = Path(resume)
        if fault := problem(folder):
            there = ", ".join(p.name for p in numbered(root)) or "none"
            raise CheckpointError(f"checkpoint.resume {folder}: {fault}. Checkpoints in {root}: {there}")
        refuse_mixing(folder, root)
        return folder, [f"resuming from {folder}"]
    notes = []
    for folder in numbered(root):
        fault = problem(folder)
        if fault is None:
            return folder, [*notes, f"resuming from {folder}"]
        notes.append(f"passed over {folder}: {fault}")
    return None, [*notes, f"checkpoint.resume is latest and {root} holds no whole checkpoint: starting fresh"]


def problem(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; None when it is whole."""
    if not folder.is_dir():
        return "there is no such folder"
    state = folder / "state" / STATE
    if not state.exists():
        return f"incomplete: it has no state/{STATE} (only the export was kept, or writing was cut off)"
    try:
        files = json.loads(state.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError) as error:
        return f"state/{STATE} cannot be read ({error})"
    for name, length in files.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != length:
            return f"incomplete: {name} has {found} of {length} bytes" if found is not None else f"{name} is missing"
    return None


def read_state(folder: Path) -> dict:
    """The run's own state: step, facts, loss window, token count."""
    return json.loads((folder / "state" / STATE).read_text(encoding="utf-8"))


def compare(folder: Path, saved: dict, own: dict) -> None:
    """Raises CheckpointError listing every fact that both have, and not alike, with both values."""
    both = [name for name in own if name in saved]
    differ = [f"{k}: {saved[k]} in the checkpoint, {own[k]} in this run" for k in both if saved[k] != own[k]]
    if saved.get("distribution") != own["distribution"] and "DeepSpeed" in f"{saved.get('distribution')}{own}":
        differ.append("DeepSpeed keeps its optimizer state in parts that only the same launch reads")
    if differ:
        raise CheckpointError(
            f"{folder} does not fit this run:\n  " + "\n  ".join(differ) + "\nGive the options of the checkpoint "
            "(config.yaml in its run), or start a new run in another output_dir (from its weights: lora.init_from)"
        )


def compare_trained(folder: Path, saved: Collection[str], own: Collection[str]) -> None:
    """Raises CheckpointError where other parameters train than did: sharded states would be loaded all the same."""
    if odd := sorted({*saved} ^ {*own}):
        raise CheckpointError(
            f"{folder}: trains other parameters than this run, e.g. {odd[0]} ({len(odd)} differ). Give lora.targets, "
            "lora.exclude, lora.also_train or train_modules of the checkpoint (config.yaml in its run), or start a new "
            "run in another output_dir"
        )


def accumulation(train, world: int, global_batch: int) -> int:
    """Micro-steps per optimizer step that make `global_batch`, which a resumed run keeps on any number of ranks."""
    if global_batch % (train.batch_size * world) == 0:
        return global_batch // train.batch_size // world
    share = global_batch // world
    works = [f"{b} x {share // b}" for b in range(1, share + 1) if share % b == 0 and global_batch % world == 0]
    raise CheckpointError(
        f"the checkpoint was trained with a global batch of {global_batch}; {world} processes with train.batch_size "
        f"{train.batch_size} cannot make it. train.batch_size x train.gradient_accumulation_steps that can: "
        + (", ".join(works) or f"none with {world} processes, take a divisor of {global_batch}")
    )


def refuse_leftovers(config, root: Path) -> None:
    """Raises CheckpointError where a fresh run would mix with an earlier one in output_dir."""
    trains = config.stage in ("all", "train") and not config.precompute_only
    if trains and not config.checkpoint.resume and not config.overwrite and (found := leftovers(root)):
        raise CheckpointError(
            f"output_dir {root} holds an earlier run ({', '.join(p.name for p in found[:4])}): continue it with "
            "checkpoint.resume: latest, choose another output_dir, or replace it with overwrite: true"
        )


def refuse_mixing(folder: Path, root: Path) -> None:
    """Raises CheckpointError where `root` holds another run than the one `folder` is of, or what came after it."""
    if folder.resolve().parent == root.resolve():
        step = read_state(folder)["step"]
        others = [p for p in numbered(root) if problem(p) is None and read_state(p)["step"] > step]
    else:
        others = leftovers(root)
    if others:
        raise CheckpointError(
            f"checkpoint.resume {folder}: output_dir {root} also holds {', '.join(p.name for p in others[:4])}, which "
            "a run from there would mix with: go on from those with checkpoint.resume: latest, choose another "
            "output_dir, or move them away"
        )


def changes(folder: Path, saved: dict, own: dict) -> list[str]:
    """What differs from the run that wrote the checkpoint and is allowed to, in words."""
    return [f"note: {k} was {saved.get(k)} in {folder.name}, now {v}" for k, v in own.items() if saved.get(k) != v]


def numbered(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, newest first."""
    found = [p for p in root.glob("checkpoint-*") if p.is_dir() and p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: -int(p.name.removeprefix("checkpoint-")))


def clear(root: Path) -> None:
    """Removes an earlier run from `root` (overwrite: true); the cache stays."""
    for path in leftovers(root):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def leftovers(root: Path) -> list[Path]:
    """What an earlier run left in `root` that a fresh run would mix with or overwrite."""
    names = ("metrics.jsonl", "samples", "transformer", "adapter_config.json")
    return [*numbered(root), *(root / name for name in names if (root / name).exists()), *root.glob("*.safetensors")]


def write_json(path: Path, value: dict) -> None:
    """JSON under a temporary name, synced, then renamed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    sync(partial)
    os.replace(partial, path)


def sync(path: Path) -> None:
    if os.name == "nt":  # opens no folders, and flushes no file that is open for reading alone
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size(root: Path) -> int:
    """Bytes of the newest checkpoint."""
    return sum(p.stat().st_size for folder in numbered(root)[:1] for p in folder.rglob("*") if p.is_file())
