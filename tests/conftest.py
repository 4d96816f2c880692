"""What every test shares: an offline environment, one thread, tiny models and clips that are built once."""

import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    WANDB_MODE=os.environ.get("WANDB_MODE", "offline"),
    DIFFUSERS_VERBOSITY="error",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    TORCHAO_FORCE_SKIP_LOADING_SO_FILES="1",
    ACCELERATE_USE_CPU="true",
    OMP_NUM_THREADS="1",
)
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

torch.set_num_threads(1)  # forked ranks and loader workers hang if the parent computed with more


@pytest.fixture(scope="session")
def tiny_ltx(tmp_path_factory) -> Path:
    """A tiny pipeline of the 0.9.0 family."""
    from models.tiny import build

    return build("ltx", tmp_path_factory.mktemp("models") / "ltx")


@pytest.fixture(scope="session")
def tiny_ltx_condition(tmp_path_factory) -> Path:
    """A tiny pipeline of the 0.9.5 family."""
    from models.tiny import build

    return build("ltx-condition", tmp_path_factory.mktemp("models") / "ltx-condition")


@pytest.fixture(scope="session")
def clips(tmp_path_factory) -> Path:
    """Seven clips in a folder, with captions: five of 17 frames 64x96 at 24 fps, two of 9 frames 96x64 at 10 fps."""
    from runs import write_clip

    root = tmp_path_factory.mktemp("clips")
    for i in range(5):
        write_clip(root / f"wide_{i}.mp4", 17, 64, 96, 24, seed=i)
        (root / f"wide_{i}.txt").write_text(f"a wide cat number {i}")
    for i in range(2):
        write_clip(root / f"tall_{i}.mp4", 9, 96, 64, 10, seed=10 + i)
        (root / f"tall_{i}.txt").write_text(f"a tall dog number {i}")
    return root
