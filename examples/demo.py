"""`make demo`: builds a tiny LTX with random weights, trains a LoRA of it on examples/bunny, and says where things are.

The model is far too small to draw rabbits. What it shows is every stage of a run: plan, precompute, train, sample,
save.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ["--config_file", "configs/accelerate/one_gpu.yaml", "train_ltx.py", "--config", "examples/demo.yaml"]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    os.chdir(ROOT)
    begun = time.monotonic()
    print("building a tiny LTX with random weights in runs/demo-model", flush=True)
    from trainers.launch import quiet

    quiet()
    from transformers.utils import logging

    from models.tiny import build

    logging.disable_progress_bar()
    build("ltx", "runs/demo-model")
    print("running: accelerate launch", *LAUNCH, "\n", flush=True)
    result = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", *LAUNCH])
    if result.returncode:
        raise SystemExit(result.returncode)
    run = Path("runs/demo")
    print(f"\nThe whole run took {time.monotonic() - begun:.0f} s. It left, in {ROOT}:")
    for what, files in (
        ("samples (before, in the middle, after)", sorted(run.glob("samples/*/*.mp4"))),
        ("LoRA, for diffusers and for ComfyUI", sorted(run.glob("*.safetensors"))),
        ("metrics", [run / "metrics.jsonl"]),
    ):
        print(f"  {what}:", *files, sep="\n    ")


if __name__ == "__main__":
    main()
