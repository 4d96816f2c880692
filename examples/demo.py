"""`make demo`: builds a tiny LTX with random weights, trains a LoRA of it on examples/bunny, and says where things are.

The model is far too small to draw rabbits. What it shows is every stage of a run: plan, precompute, train, sample,
save.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from models.tiny import build

    build("ltx", ROOT / "runs" / "demo-model")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "DIFFUSERS_VERBOSITY": "error"}
    command = [*launch, "train_ltx.py", "--config", "examples/demo.yaml"]
    print("running: HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=true accelerate launch", *command[3:], flush=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    run = ROOT / "runs" / "demo"
    print("\nsamples  ", *sorted((run / "samples").rglob("*.mp4")), sep="\n  ")
    print("LoRA     ", *sorted(run.glob("*.safetensors")), sep="\n  ")
    print("metrics  ", run / "metrics.jsonl", sep="\n  ")


if __name__ == "__main__":
    main()
