"""The Accelerator of a run, and what the launcher may and may not say against our options."""

import argparse
import contextlib
import io
import logging
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch

from data.cache import BrokenEntry, DiskFull, NonFinite
from data.places import PlaceError, is_url, place
from data.video import UnreadableClip
from models.adapters import AdapterError
from models.export import ExportError
from models.load import ModelError
from models.precision import PrecisionError
from trainers import sharding
from trainers.checkpoints import CheckpointError
from trainers.config import Config, OptionError, refuse
from trainers.plan import PlanError
from trainers.prompts import PromptError
from trainers.pulse import NonFiniteStep
from trainers.tracking import TrackerError

# Faults of the user's files, options and numbers: they end in one message, without a traceback.
USER_ERRORS = (
    AdapterError,
    BrokenEntry,
    CheckpointError,
    DiskFull,
    ExportError,
    ModelError,
    NonFinite,
    NonFiniteStep,
    OptionError,
    PlaceError,
    PlanError,
    PrecisionError,
    PromptError,
    TrackerError,
    UnreadableClip,
)


# Loggers that, when diffusers is imported, tell of optional kernels and of each other what no user can act on.
TALKATIVE = (
    "bitsandbytes.backends",
    "diffusers.quantizers.torchao",
    "torch.utils._pytree",
    "torchao",
)


def quiet() -> None:
    """Hushes the import-time notes of libraries, for scripts; their errors are still told."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or each forked loader worker tells of it
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def aside() -> Iterator[io.TextIOBase]:
    """Keeps what is printed inside off the stream that it gives, stdout; after an exception it is told."""
    table, told = sys.stdout, io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            yield table
    except BaseException:
        table.write(told.getvalue())
        raise
    finally:
        table.flush()


def named(text: str) -> type:
    """The class that `module:Class` names, for argparse."""
    try:
        return pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} names no trainer ({error})") from error


def accelerator(config: Config):
    """The Accelerator. Raises OptionError naming both values where the launcher's own config contradicts an option."""
    refuse(contradictions(config))
    if config.train.deterministic:
        be_deterministic()
    if os.environ.get("RANK", "0") == "0" and (other := other_versions()):
        print("warning: not tested with these versions:", *other, sep="\n  ", flush=True)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    made = Accelerator(
        mixed_precision=mixed_precision(config),
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
        log_with=config.report_to or None,
        project_dir=config.output_dir,
        step_scheduler_with_optimizer=False,
        **sharding.plugins(config),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.train.process_group_timeout)),
        ],
    )
    sharding.load_whole()
    kind = {"fsdp": "FSDP", "none": None}.get(sharding.launched(), "DEEPSPEED")
    if kind and made.distributed_type != kind:
        raise OptionError(
            f"accelerate was launched with {kind} but runs {made.distributed_type.value} on {made.device}"
        )
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != made.num_processes:
        # Otherwise each would train alone, and all would write to the same folder.
        raise OptionError(
            f"{launched} processes were launched but accelerate joined {made.num_processes}. On CPU, launch with "
            "ACCELERATE_USE_CPU=true in the environment"
        )
    return made


def be_deterministic() -> None:
    """The same bits every time, or an error from torch; before CUDA starts, which reads the variable only then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost a pass over memory that is written next
    torch.backends.cudnn.benchmark = False  # which picks algorithms by their speed


def other_versions() -> list[str]:
    """Installed packages outside the ranges that setup.py gives; none where this project itself is not installed."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("reeltune") or ()]
    except metadata.PackageNotFoundError:
        return []
    found = []
    for r in wanted:
        if r.marker and not r.marker.evaluate({"extra": ""}):
            continue
        try:
            have = metadata.version(r.name)
        except metadata.PackageNotFoundError:
            have = "not"
        if have == "not" or not r.specifier.contains(have, prereleases=True):
            remedy = f"pip install '{r.name}{r.specifier}'"
            found.append(f"{r.name} {have} installed, wanted is {r.specifier}: {remedy}")
    return found


def mixed_precision(config: Config) -> str:
    """Accelerate's word for precision.weights: what autocast computes in."""
    return "no" if config.precision.weights == "fp32" else config.precision.weights


def contradictions(config: Config) -> list[str]:
    """Where `accelerate launch` or its config file contradicts the options; `no`, 1 and nothing agree with all."""
    found = []
    asked, own = os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), mixed_precision(config)
    if asked not in ("no", own):
        found.append(
            f"accelerate is launched with mixed_precision {asked}, but precision.weights is "
            f"{config.precision.weights}: set mixed_precision to no there, or change the option"
        )
    asked, own = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"), config.train.gradient_accumulation_steps
    if asked not in ("1", "auto", str(own)):
        found.append(
            f"accelerate is launched with gradient_accumulation_steps {asked}, but "
            f"train.gradient_accumulation_steps is {own}: remove it there, or change the option"
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        found.append(
            f"accelerate is launched with dynamo_backend {backend.lower()}, but memory.compile is "
            f"{config.memory.compile}: set dynamo_backend to no there; memory.compile: blocks compiles"
        )
    return found + parallelism(config) + sharding.contradictions(config)


def parallelism(config: Config) -> list[str]:
    """Where the launcher splits the network or its tokens itself, or started too few ranks to share tokens."""
    env, degree, found = os.environ, config.memory.context_parallel, []
    asked = {}
    if env.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        asked = {kind: int(env.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1)) for kind in ("TP", "CP", "SP")}
    if asked.get("TP", 1) > 1:
        found.append(
            f"accelerate is launched with parallelism_config_tp_size {asked['TP']}: tensor parallelism is not "
            "supported; use FSDP2, which shards the weights too, or remove it there"
        )
    found += [
        f"accelerate is launched with parallelism_config_{kind.lower()}_size {asked[kind]}: its context parallelism is "
        "for language models; remove it there and set memory.context_parallel"
        for kind in ("CP", "SP")
        if asked.get(kind, 1) > 1
    ]
    if env.get("ACCELERATE_USE_MEGATRON_LM", "false").lower() == "true":
        found.append(
            "accelerate is launched with MEGATRON_LM: its tensor parallelism knows no diffusers network; use FSDP2, "
            "which shards the weights too"
        )
    if (ranks := int(env.get("WORLD_SIZE", 1))) % degree:
        found.append(
            f"memory.context_parallel {degree} needs a multiple of {degree} processes, and {ranks} "
            f"{'is' if ranks == 1 else 'are'} launched: launch another number, or change the option"
        )
    return found


def useless_paths(config: Config) -> list[str]:
    """Folders that cannot be written to, and files that are not there: known before anything is computed."""
    folders, found = {"output_dir": config.output_dir}, []
    if is_url(config.cache_dir):
        found += unusable_urls(config)
    elif config.data.cache_dir and config.stage != "train":  # which only reads it
        folders["data.cache_dir"] = config.data.cache_dir
    for name, folder in folders.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            found.append(f"{name} {folder}: cannot be written to ({error.strerror}); choose another folder")
    if config.lora.init_from and not Path(config.lora.init_from).exists():
        found.append(f"lora.init_from {config.lora.init_from}: there is no such file or folder")
    return found


def unusable_urls(config: Config) -> list[str]:
    """Why what data.cache_dir names, a URL, cannot be used; asks the store."""
    url = config.cache_dir
    if url.startswith("memory://") and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return [f"data.cache_dir {url}: each process has its own memory; launch one, or name a folder"]
    try:
        place(url).check(writes=config.stage != "train")
    except PlaceError as error:
        return [f"data.cache_dir {error}"]
    return []


def main_first(accelerator, make: Callable):
    """make() on every rank, first on the main one, which leaves in files what the others need not compute again.

    A user's mistake, on whichever rank, ends them all and is raised on the main one alone.
    """
    made = fault = None
    with accelerator.main_process_first():
        try:
            made = make()
        except USER_ERRORS as error:
            fault = error
    faults = [str(fault)] if fault else []
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        faults = gather_object(faults)
    if faults and not accelerator.is_main_process:
        raise SystemExit(1)
    if faults:
        raise fault or PlanError(faults[0])
    return made


def on_main(accelerator, make: Callable):
    """make() of the main process, on every rank. A user's mistake is raised there alone; the others end silently."""
    result: list = [None, None]
    if accelerator.is_main_process:
        try:
            result[0] = make()
        except USER_ERRORS as error:
            result[1] = error
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        failed = result[1]
        result = [result[0], str(failed) if failed else None]
        broadcast_object_list(result)
        if failed:
            raise failed
        if result[1]:
            raise SystemExit(1)
    elif result[1]:
        raise result[1]
    return result[0]
