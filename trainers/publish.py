"""The result of a run in its output_dir: the last export, a model card, and a sample made as a user would make it."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from models.lora_files import ALSO_FILE
from trainers.config import Config
from trainers.sharding import shares_weights

LORA = "pytorch_lora_weights.safetensors"


def publish(checkpoint: Path, root: Path) -> list[Path]:
    """Puts the export of `checkpoint` into `root` under the same names, file by file or folder by folder at once."""
    out = []
    for source in sorted(p for p in checkpoint.iterdir() if p.name != "state"):
        target, fresh = root / source.name, root / f".{source.name}.partial"
        if source.is_dir():
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(source, fresh, copy_function=link_or_copy)
            old = root / f".{source.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.unlink(missing_ok=True)
            link_or_copy(source, fresh)
            os.replace(fresh, target)
            fresh.unlink(missing_ok=True)  # a rename between two links to one file does nothing
        out.append(target)
    return out


def link_or_copy(source, target) -> None:
    """A hard link where the file system has them: an export of a large model is not stored twice."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def load_adapter(pipe, folder: Path) -> None:
    """Loads an exported adapter into a pipeline with the base transformer, by the calls that the model card shows."""
    from safetensors.torch import load_file

    also = folder / ALSO_FILE
    if also.exists():
        pipe.transformer.load_state_dict(load_file(also), strict=False)
    if (folder / LORA).exists():
        pipe.load_lora_weights(folder, weight_name=LORA)
        return
    from peft import PeftModel  # LoKr and LoHa, which load_lora_weights does not read

    PeftModel.from_pretrained(pipe.transformer, folder)  # injects the adapter into the network in place


def write_card(root: Path, pipeline_name: str, config: Config, buckets: Iterable[str]) -> Path:
    """README.md for the Hub: what it is, the sizes it was trained at, the lines that load it. No local path is told."""
    published = not Path(config.model).exists()
    task = "image-to-video" if "ImageToVideo" in pipeline_name else "text-to-video"
    front = ["---", "library_name: diffusers", "tags:", f"- {task}", f"- {config.method}", "- reeltune"]
    front += [f"base_model: {config.model}"] if published else []
    base = config.model if published else "PATH_OR_ID_OF_THE_BASE_MODEL"
    lines = ["import torch", f"from diffusers import {pipeline_name}", ""]
    if config.method == "lora":
        diffusers_reads, also = (root / LORA).exists(), (root / ALSO_FILE).exists()
        lines[2:2] = ["from safetensors.torch import load_file"] * also
        lines[2:2] = ["from peft import PeftModel"] * (not diffusers_reads)
        lines += [
            f'pipe = {pipeline_name}.from_pretrained("{base}", dtype=torch.bfloat16).to("cuda")',
            # Before the adapter, which renames the layers it is put on.
            *[f'pipe.transformer.load_state_dict(load_file("THIS_FOLDER/{ALSO_FILE}"), strict=False)'] * also,
            'pipe.load_lora_weights("THIS_REPOSITORY_OR_FOLDER")'
            if diffusers_reads
            else 'PeftModel.from_pretrained(pipe.transformer, "THIS_REPOSITORY_OR_FOLDER")',
        ]
        what = f"{config.lora.type} of rank {config.lora.rank}, alpha {config.lora.alpha:g}"
    else:
        lines += [
            "from diffusers import AutoModel",
            "",
            'transformer = AutoModel.from_pretrained("THIS_REPOSITORY_OR_FOLDER", subfolder="transformer", '
            "dtype=torch.bfloat16)",
            f'pipe = {pipeline_name}.from_pretrained("{base}", transformer=transformer, dtype=torch.bfloat16)',
        ]
        what = "full fine-tune of the transformer"
    body = [
        f"# {config.run_name or root.resolve().name}",
        "",
        f"A {what}, trained with reeltune at {', '.join(buckets)} (frames x height x width).",
        "",
        "```python",
        *lines,
        "```",
    ]
    path, partial = root / "README.md", root / ".README.md.partial"
    partial.write_text("\n".join([*front, "---", "", *body]) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def sample(trainer) -> None:
    """validation.from_export: the prompts once more, from the published files in a fresh network. On all ranks."""
    if not shares_weights(trainer.accelerator):
        trainer.network.to("cpu")  # two large ones would not fit
    fresh = None

    def pipeline(prompt):
        nonlocal fresh
        if fresh is not None:
            return trainer.pipeline(prompt, fresh)
        if trainer.config.method == "full":
            kind = trainer.pretrained.type_named(trainer.transformer_class)
            net = kind.from_pretrained(trainer.output_dir / "transformer", dtype=trainer.dtype)
        else:
            net = trainer.pretrained.component("transformer")
        pipe = trainer.pipeline(prompt, net.to(trainer.device).eval())
        if trainer.config.method == "lora":
            load_adapter(pipe, trainer.output_dir)
        fresh = pipe.transformer
        return pipe

    trainer.validation.run(trainer.step, pipeline, "from_export")
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        trainer.validation.results(trainer.step, pipeline, "from_export")
