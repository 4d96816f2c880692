"""Finding and loading the components of a diffusers pipeline: from a folder, the Hub, or a single-file checkpoint.

A component is a name in model_index.json: transformer, vae, text_encoder, tokenizer, scheduler ... Each is loaded
alone, through its own library class, when it is needed.
"""

import hashlib
import importlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from models import quantize
from models.precision import DTYPES

logger = logging.getLogger(__name__)

INDEX = "model_index.json"
CONFIG_PATTERNS = (INDEX, "*/config.json", "scheduler/*.json")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # configs and tokenizers
STEMS = ("diffusion_pytorch_model", "model")  # of weight files: diffusers' and transformers'
IN_SINGLE_FILE = {"transformer": "", "vae": "vae."}  # what a checkpoint may hold, and how its keys begin
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Loaded by class name, transformers 5 gives these a word-piece pre-tokenizer that the Llama-3 vocabulary does not have.
AUTO_TOKENIZERS = ("LlamaTokenizer", "LlamaTokenizerFast")


class ModelError(ValueError):
    """A model or component that cannot be found, downloaded, or loaded; the message says what to do."""


class Override(Protocol):
    """Where one component comes from instead, and its precision (trainers.config.ComponentOptions)."""

    id: str | None
    revision: str | None
    variant: str | None
    subfolder: str | None
    dtype: str | None


# -- finding ---------------------------------------------------------------------------------------------------------


def resolve(
    model: str | Path, revision: str | None = None, variant: str | None = None, names: Sequence[str] | None = None
) -> Path:
    """The local folder (with model_index.json) or single .safetensors file that `model` stands for.

    `model`: such a folder or file, or a Hub id, of which the configs and the components `names` are downloaded (None:
    all, (): configs only) unless cached; HF_HUB_OFFLINE=1 uses the cache alone. Raises ModelError.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError(f"{path}: only .safetensors files are read; other formats can run code when loaded")
        return path
    folder = path if path.is_dir() else _hub_folder(str(model), revision, CONFIG_PATTERNS, "its configs")
    if not (folder / INDEX).is_file():
        raise ModelError(_not_a_pipeline(folder, str(model)))
    if names is None:
        names = [name for name, kind in model_index(folder).items() if isinstance(kind, list) and kind[0]]
    if not path.is_dir():
        _download(str(model), revision, variant, names)
    if absent := [line for name in names for line in _absent(folder / name, variant)]:
        raise ModelError(_incomplete(str(model), path.is_dir(), absent, names))
    return folder


def model_index(folder: Path) -> dict:
    """model_index.json: component name -> [library, class], and the pipeline's `_class_name`."""
    return _read_json(folder / INDEX)


def pipeline_class(folder: Path, allowed: Sequence[str]) -> str:
    """The pipeline class that the folder is for; ModelError when it is not one of `allowed`."""
    name = model_index(folder).get("_class_name")
    if name not in allowed:
        raise ModelError(f"{folder / INDEX}: this is a {name}, and this trainer is for {' or '.join(allowed)}")
    return name


def component_config(folder: Path, name: str) -> dict:
    """The config of component `name` in a pipeline folder, read without loading diffusers."""
    for file in ("config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if (folder / name / file).is_file():
            return _read_json(folder / name / file)
    raise ModelError(f"{folder}: no {name}/config.json")


def locate(
    model: Path,
    name: str,
    override: Override | None = None,
    config: Path | None = None,
    weights: bool = True,
) -> Path:
    """The folder, or the single file, that holds component `name`.

    `model`: what `resolve` gave; `config`: for a single file, the pipeline folder that has everything else. An
    override's Hub id is downloaded: all of the component, or without `weights` its config only (a single file has none:
    the pipeline's holds).
    """
    if override is not None and override.id and (weights or not Path(override.id).expanduser().is_file()):
        return _locate_override(override, name, weights)
    if model.is_dir():
        return model / ((override and override.subfolder) or name)
    if config is None:
        raise ModelError(f"{model}: a single file needs model_config, a pipeline folder or Hub id, for its {name}")
    if name in IN_SINGLE_FILE and any(key.startswith(IN_SINGLE_FILE[name]) for key in _tensor_names(model)):
        return model
    return config / name


def _locate_override(override: Override, name: str, weights: bool) -> Path:
    where, path = override.subfolder or name, Path(override.id).expanduser()
    if path.is_file():
        return resolve(path)
    root = path
    if not path.is_dir():
        root = _hub_folder(override.id, override.revision, ("config.json", *CONFIG_PATTERNS), f"{where}'s config")
    # A repository may be one component alone, with its files at the top.
    if not override.subfolder and not (root / where).is_dir() and (root / "config.json").is_file():
        where = ""
    if not path.is_dir() and weights:
        _download(override.id, override.revision, override.variant, [where])
    if weights and (absent := _absent(root / where, override.variant)):
        raise ModelError(_incomplete(override.id, path.is_dir(), absent, [where]))
    return root / where


def weight_files(folder: Path, variant: str | None = None) -> tuple[list[Path], str | None]:
    """The weight files that `from_pretrained(folder, variant=...)` reads, and their variant (None: the plain one).

    A component without files of that variant falls back to the plain ones, as diffusers pipelines do. Files that an
    index lists are returned whether they exist or not; no weights at all give an empty list.
    """
    for tag in (variant, None) if variant else (None,):
        dotted = f".{tag}" if tag else ""
        for stem in STEMS:
            index = folder / f"{stem}.safetensors.index{dotted}.json"
            if index.is_file():
                return [folder / file for file in sorted(set(_read_json(index)["weight_map"].values()))], tag
            if (folder / f"{stem}{dotted}.safetensors").is_file():
                return [folder / f"{stem}{dotted}.safetensors"], tag
    return [], None


def _absent(folder: Path, variant: str | None) -> list[str]:
    """The files that component folder `folder` should have and has not."""
    if not folder.is_dir():
        return [f"{folder.name}/"]
    files, _ = weight_files(folder, variant)
    if not files and (folder / "config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return [f"{folder.name}/{STEMS[0]}.safetensors (or {STEMS[1]}.safetensors, or shards with their index)"]
    return [f"{folder.name}/{file.name}" for file in files if not file.is_file()]


# -- the Hub ---------------------------------------------------------------------------------------------------------


def _hub_folder(model: str, revision: str | None, patterns: Sequence[str], what: str) -> Path:
    """The cached snapshot of a Hub repository, with the files of `patterns` downloaded; ModelError in plain words."""
    if not HUB_ID.fullmatch(model):
        raise ModelError(f"{model}: there is no such file or folder, and a Hub id has the form owner/name")
    from huggingface_hub import constants, errors, snapshot_download

    at = f"{model} (revision {revision})" if revision else model
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{at} is gated: accept its licence at {constants.ENDPOINT}/{model}, then log in with `hf auth login` "
            "(or set HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{model}: there is no such folder here and no such public repository on the Hub; for a private one log in "
            "with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision}: give a branch, tag or commit of it") from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise ModelError(
            f"{at}: {why}, and {what} cannot be found in the cache ({constants.HF_HUB_CACHE}). There is no folder of "
            f"that name here either. On a machine with a network: {_download_command(model, revision, patterns)}"
        ) from error
    except (OSError, errors.HFValidationError) as error:
        raise ModelError(f"{at}: the download failed: {error}") from error


def _download(model: str, revision: str | None, variant: str | None, names: Sequence[str]) -> None:
    """Fetches components into the cache: the small files, and of the weights only what `weight_files` will ask for.

    Repositories also hold other variants, pickles, and single files of many gigabytes beside the components.
    """
    if not names:
        return
    wanted = [_patterns(name, variant) for name in names]
    folder = _hub_folder(model, revision, [p for group in wanted for p in group], ", ".join(names))
    plain = [name for name in names if weight_files(folder / name, variant)[1] != variant]
    if plain:
        _hub_folder(model, revision, [p for name in plain for p in _patterns(name, None)], ", ".join(plain))


def _patterns(name: str, variant: str | None) -> list[str]:
    at, dotted = f"{name}/" if name else "", f".{variant}" if variant else ""
    weights = [f"{stem}{part}.safetensors" for stem in STEMS for part in (dotted, f"{dotted}-?????-of-?????")]
    older = [f"{stem}-?????-of-?????{dotted}.safetensors" for stem in STEMS if variant]
    return [at + file for file in (*SMALL_FILES, *weights, *older)]


def _download_command(model: str, revision: str | None, patterns: Iterable[str]) -> str:
    folders = {f"{p.rpartition('/')[0]}/*" if "/" in p else p for p in patterns}
    includes = " ".join(f"--include '{p}'" for p in sorted({"*/*", INDEX} if "*/*" in folders else folders))
    return f"hf download {model}{f' --revision {revision}' if revision else ''} {includes}".rstrip()


def _not_a_pipeline(folder: Path, model: str) -> str:
    config = folder / "config.json"
    if config.is_file():
        kind = _read_json(config).get("_class_name", "model")
        return (
            f"{model} has no {INDEX}: it is a single {kind}, not a pipeline. Give the pipeline it belongs to as model, "
            "and this folder as components.<name>.id"
        )
    hint = "the parent of transformer/, vae/ and the rest"
    if singles := sorted(folder.glob("*.safetensors")):
        hint += f"; a single-file checkpoint is given by its own path, such as {singles[0]}"
    return f"{model} has no {INDEX}, so it is not a pipeline in diffusers layout: {hint}"


def _incomplete(model: str, local: bool, absent: list[str], names: Sequence[str]) -> str:
    files = "\n  ".join(absent)
    remedy = "copy or download them again"
    if not local:
        remedy = f"fetch them with a network: {_download_command(model, None, [f'{n}/*' if n else '*' for n in names])}"
    return f"{model}: files are missing, {remedy}\n  {files}"


# -- identity --------------------------------------------------------------------------------------------------------


def fingerprint(
    model: Path,
    names: Iterable[str],
    memo_path: Path,
    overrides: Mapping[str, Override] | None = None,
    config: Path | None = None,
    variant: str | None = None,
) -> str:
    """SHA-256 of everything that the components `names` are made of: weights, configs, tokenizer files.

    Files are hashed once: `memo_path` (JSON) remembers them by path, size and time of change. A file in the Hub cache
    is a link to a blob that is already named by its hash.
    """
    overrides = overrides or {}
    memo = _read_memo(memo_path)
    known = dict(memo)
    digest = hashlib.sha256()
    for name in sorted(names):
        override = overrides.get(name)
        path = locate(model, name, override, config)
        for file in _files(path, name, (override and override.variant) or variant, config or model):
            digest.update(f"{name}\0{file.name}\0{_file_digest(file, known)}\n".encode())
    if known != memo:
        _write_memo(memo_path, known)
    return digest.hexdigest()


def _files(path: Path, name: str, variant: str | None, config: Path) -> list[Path]:
    if path.is_file():  # a single file takes its config from the pipeline folder
        return [path, *sorted((config / name).glob("*config.json"))]
    small = {file for pattern in SMALL_FILES for file in path.glob(pattern) if ".safetensors.index" not in file.name}
    return sorted({*small, *weight_files(path, variant)[0]})


def _file_digest(file: Path, memo: dict[str, list]) -> str:
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs":
        return target.name
    stat = target.stat()
    facts = [stat.st_size, stat.st_mtime_ns]
    known = memo.get(str(target))
    if known is None or known[:2] != facts:
        digest = hashlib.sha256()
        with target.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
        memo[str(target)] = [*facts, digest.hexdigest()]
    return memo[str(target)][2]


def _read_memo(path: Path) -> dict[str, list]:
    """The remembered hashes; a file that is absent or damaged only costs hashing again."""
    try:
        memo = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(memo, dict) and all(isinstance(v, list) and len(v) == 3 for v in memo.values())
    return memo if whole else {}


def _write_memo(path: Path, memo: dict[str, list]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(memo, stream)
        os.replace(temporary, path)
    except OSError as error:  # a cache that can only be read: weights are hashed again next time
        logger.warning("%s cannot be written (%s): weights are hashed again at the next start", path, error.strerror)


# -- loading ---------------------------------------------------------------------------------------------------------


def load(
    model: Path,
    name: str,
    dtype: torch.dtype | None = None,
    *,
    override: Override | None = None,
    config: Path | None = None,
    variant: str | None = None,
):
    """Component `name`, loaded on the CPU by its own library class: a network in eval mode, a tokenizer, a scheduler.

    `model`, `config`: as in `locate`. `dtype`: of a network, None is float32; the override's own dtype wins. Raises
    ModelError for files that are missing, broken, or of another architecture.
    """
    path = locate(model, name, override, config)
    kind = component_class(config or model, name)
    if override is not None and override.dtype:
        dtype = DTYPES[override.dtype]
    if kind.__name__ in AUTO_TOKENIZERS:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, padding_side="right", local_files_only=True)
    try:
        if path.is_file():
            return _from_single_file(kind, path, name, dtype or torch.float32, config or model)
        if issubclass(kind, torch.nn.Module):
            wanted = (override and override.variant) or variant
            return _from_folder(kind, path, dtype or torch.float32, wanted)
        return kind.from_pretrained(path, local_files_only=True)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: {kind.__name__} could not be loaded from it: {error}") from error


def component_class(folder: Path, name: str) -> type:
    """The class of component `name` in model_index.json: diffusers' or transformers', never a repository's own code."""
    library, class_name = model_index(folder).get(name) or (None, None)
    if class_name is None:
        raise ModelError(f"{folder / INDEX}: this pipeline has no {name}")
    found = (
        getattr(importlib.import_module(library), class_name, None)
        if library in ("diffusers", "transformers")
        else None
    )
    if found is None:
        raise ModelError(
            f"{folder / INDEX}: {name} is a {library}.{class_name}, which the installed versions do not have"
        )
    return found


def _from_folder(kind: type, folder: Path, dtype: torch.dtype, variant: str | None):
    saved = _read_json(folder / "config.json").get("_class_name", kind.__name__)
    if saved != kind.__name__:
        raise ModelError(f"{folder / 'config.json'}: this is a {saved}, and the pipeline needs a {kind.__name__}")
    if kind.__module__.startswith("transformers."):
        from transformers.utils import logging

        logging.disable_progress_bar()  # one per rank, and it would run into ours
    module, report = kind.from_pretrained(
        folder,
        variant=weight_files(folder, variant)[1],
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        dtype=dtype,
    )
    if missing := sorted(report["missing_keys"]):  # they would be random numbers
        raise ModelError(f"{folder}: no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    return quantize.ready(module.eval())


def _from_single_file(kind: type, file: Path, name: str, dtype: torch.dtype, config: Path):
    if not hasattr(kind, "from_single_file"):
        raise ModelError(f"{file}: diffusers cannot read a {kind.__name__} from a single file; use a pipeline folder")
    try:
        module = kind.from_single_file(
            str(file), config=str(config), subfolder=name, dtype=dtype, local_files_only=True
        )
    except NotImplementedError as error:  # a parameter stayed without data, on the meta device
        raise ModelError(
            f"{file}: it does not hold all weights of the {name} that {config / name} describes"
        ) from error
    return module.eval()


def _tensor_names(file: Path) -> list[str]:
    """The tensors in a .safetensors file, from its header alone."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= file.stat().st_size:
            raise ModelError(f"{file}: not a safetensors file, or cut short")
        return [key for key in json.loads(stream.read(length)) if key != "__metadata__"]


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
