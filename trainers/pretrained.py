"""The published pipeline that a run starts from: where its parts are, what they are, loading them one at a time."""

import difflib
import inspect
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch

from models import load
from models.precision import DTYPES
from trainers.config import Config


class Pretrained:
    """The model that the options name. Configs are read at once; weights are fetched and loaded when asked for.

    `allowed`: the pipeline classes that the trainer is for. Methods raise models.load.ModelError.
    """

    def __init__(self, config: Config, allowed: tuple[str, ...]):
        self.config, self.allowed = config, allowed
        self.memo_path = config.memo_dir / "weights.json"

    @cached_property
    def folder(self) -> Path:
        """The pipeline folder with model_index.json and the configs; for a single file that of model_config."""
        c = self.config
        found = load.resolve(c.model, c.model_revision, c.model_variant, names=())
        if found.is_file():
            if not c.model_config:
                raise load.ModelError(
                    f"model {c.model}: a single file needs model_config, the pipeline folder or Hub id with its "
                    "configs, text encoder and tokenizer"
                )
            found = load.resolve(c.model_config, names=())
        kind, parts = load.pipeline_class(found, self.allowed), load.model_index(found)
        parts = [name for name, part in parts.items() if isinstance(part, list) and part[0]]
        if unknown := [name for name in c.components if name not in parts]:
            raise load.ModelError(
                f"components.{', components.'.join(unknown)}: {kind} has no such component; it has {', '.join(parts)}"
            )
        return found

    @cached_property
    def pipeline_name(self) -> str:
        """The pipeline class that the folder names, one of the allowed."""
        return load.pipeline_class(self.folder, self.allowed)

    @property
    def names(self) -> list[str]:
        """What the transformer's weights are called: last parts of Hub ids and paths, the name they were saved by."""
        own = self.config.components.get("transformer")
        saved = self.component_config("transformer").get("_name_or_path")
        return [Path(name).name for name in (self.config.model, own and own.id, saved) if name]

    @property
    def pipeline_type(self) -> type:
        return self.type_named(self.pipeline_name)

    @staticmethod
    def type_named(name: str) -> type:
        """A diffusers class by its name; diffusers is imported here and not before."""
        import diffusers

        return getattr(diffusers, name)

    @cached_property
    def text_components(self) -> tuple[str, ...]:
        """All that turns captions into tensors: tokenizers, text encoders, image processors."""
        names = [name for name, kind in load.model_index(self.folder).items() if isinstance(kind, list) and kind[0]]
        return tuple(name for name in names if not name.startswith(("transformer", "vae", "scheduler")))

    def component_config(self, name: str) -> dict:
        """The config of a component, its override's if it has one."""
        where = load.locate(self.folder, name, self.config.components.get(name), weights=False)
        config, wanted = load.component_config(where.parent, where.name), load.model_index(self.folder)[name][1]
        # Of schedulers some published folders name two: that of model_index.json counts.
        if name != "scheduler" and config.get("_class_name", wanted) != wanted:
            raise load.ModelError(f"{where}: this is a {config['_class_name']}, and the pipeline needs a {wanted}")
        return config

    def settings(self, name: str) -> SimpleNamespace:
        """The config of a diffusers component, with its class's defaults for the keys that an older file lacks."""
        kind = self.type_named(load.model_index(self.folder)[name][1])
        parameters = inspect.signature(kind.__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        return SimpleNamespace(**(defaults | self.component_config(name)))

    def dtype(self, name: str) -> torch.dtype:
        """The precision a component is loaded in: components.<name>.dtype, else precision.weights."""
        own = self.config.components.get(name)
        return DTYPES[(own and own.dtype) or self.config.precision.weights]

    def component(self, name: str):
        """One component, loaded on the CPU: a network in eval mode, a tokenizer, a scheduler."""
        c = self.config
        return load.load(self.root(name), name, self.dtype(name), **self.source(name), variant=c.model_variant)

    def skeleton(self, name: str) -> torch.nn.Module:
        """A diffusers network without its weights: what its modules and parameters are called."""
        from accelerate import init_empty_weights

        kind = self.type_named(load.model_index(self.folder)[name][1])
        with init_empty_weights():
            return kind.from_config(self.component_config(name))

    @cached_property
    def vae(self):
        """The VAE that decodes samples; whoever uses it parks it on the CPU afterwards."""
        return self.component("vae")

    def sampler(self, name: str, network, scheduler: str | None = None):
        """The pipeline class `name` with this network, a fresh scheduler and the VAE; it has no text encoder."""
        parts = {"transformer": network, "scheduler": self.scheduler(scheduler), "vae": self.vae}
        return self.assemble(self.type_named(name), **parts)

    def scheduler(self, name: str | None):
        """A fresh scheduler: the folder's own, or the class `name` with the folder's settings."""
        own = self.component("scheduler")
        if name is None:
            return own
        import diffusers

        kind = getattr(diffusers, name, None)
        if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
            near = difflib.get_close_matches(name, [c.__name__ for c in own.compatibles] or dir(diffusers), 3, 0.3)
            raise load.ModelError(f"validation.scheduler {name}: no such diffusers scheduler; near: {', '.join(near)}")
        try:
            return kind.from_config(own.config)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise load.ModelError(
                f"validation.scheduler {name} does not fit this model's scheduler: {error}"
            ) from error

    def fingerprint(self, names: tuple[str, ...]) -> str:
        """SHA-256 over the files of the named components, remembered in memo_dir."""
        c = self.config
        root = self.root(*names)
        config = None if root.is_dir() else self.folder
        return load.fingerprint(root, names, self.memo_path, c.components, config, c.model_variant)

    def root(self, *names: str) -> Path:
        """The folder or single file with the weights of these components, downloaded if need be."""
        c = self.config
        own = [n for n in names if not (n in c.components and c.components[n].id)]
        found = load.resolve(c.model, c.model_revision, c.model_variant, names=() if Path(c.model).is_file() else own)
        if found.is_file():
            load.resolve(c.model_config, names=own)
        return found

    def source(self, name: str) -> dict:
        return {
            "override": self.config.components.get(name),
            "config": self.folder if Path(self.config.model).is_file() else None,
        }

    @staticmethod
    def assemble(kind: type, **parts):
        """A pipeline of these parts alone; the others are None."""
        parameters = [p for p in inspect.signature(kind.__init__).parameters.values() if p.name != "self"]
        empty = {p.name: None for p in parameters if p.default is inspect.Parameter.empty}
        return kind(**(empty | parts))
