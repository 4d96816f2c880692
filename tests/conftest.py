"""What tests share: an offline environment, one thread, tiny models and clips that are built once, and runs on them."""

import functools
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

import runs

torch.set_num_threads(1)  # forked ranks and loader workers hang if the parent computed with more


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """built(name) -> the folder of that tiny pipeline, made once; not to be changed."""
    from models.tiny import build

    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: build(name, root / name))


@pytest.fixture(scope="session")
def tiny_ltx(built) -> Path:
    """A tiny pipeline of the 0.9.0 family."""
    return built("ltx")


@pytest.fixture(scope="session")
def tiny_ltx_condition(built) -> Path:
    """A tiny pipeline of the 0.9.5 family."""
    return built("ltx-condition")


@pytest.fixture(scope="module")
def folders(request, built) -> dict[str, Path]:
    """The tiny pipelines that a test file lists in NAMES."""
    return {name: built(name) for name in request.module.NAMES}


@pytest.fixture(scope="module")
def pipes(folders):
    """The pipelines of `folders` as a user loads them, their progress bars silent; not to be changed."""
    from diffusers import DiffusionPipeline

    made = {name: DiffusionPipeline.from_pretrained(folder) for name, folder in folders.items()}
    for pipe in made.values():
        pipe.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="session")
def clips(tmp_path_factory) -> Path:
    """Seven clips in a folder, with captions: five of 17 frames 64x96 at 24 fps, two of 9 frames 96x64 at 10 fps."""
    root = tmp_path_factory.mktemp("clips")
    for i in range(5):
        runs.write_clip(root / f"wide_{i}.mp4", 17, 64, 96, 24, seed=i)
        (root / f"wide_{i}.txt").write_text(f"a wide cat number {i}")
    for i in range(2):
        runs.write_clip(root / f"tall_{i}.mp4", 9, 96, 64, 10, seed=10 + i)
        (root / f"tall_{i}.txt").write_text(f"a tall dog number {i}")
    return root


@pytest.fixture(scope="session")
def cases(tmp_path_factory) -> Path:
    """The troublesome files that tests/cases.py makes: media, images, sets; not to be changed."""
    from cases import make

    return make(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def libraries():
    """For files that fork: `pytestmark = pytest.mark.usefixtures("libraries")`."""
    with runs.libraries():
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """One cache for all runs of a test file: encoding is not what they are about. Empty until the first of them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def encoded_cache(tiny_ltx, clips, tmp_path_factory) -> Path:
    """A cache that holds `clips` in each precision, for the runs of a test file."""
    folder = tmp_path_factory.mktemp("encoded") / "cache"
    for weights in ("fp32", "bf16"):
        out = folder.parent / weights
        runs.run(tiny_ltx, clips, out, stage="precompute", data__cache_dir=folder, precision__weights=weights)
    return folder


@pytest.fixture(scope="session")
def filled(tiny_ltx, clips, tmp_path_factory) -> Path:
    """The cache of an undisturbed precompute of `clips`; not to be changed."""
    from caches import CLIPS, TEXTS, entries, precompute

    folder = tmp_path_factory.mktemp("filled") / "cache"
    precompute(tiny_ltx, clips, folder)
    assert len(entries(folder)) == TEXTS + CLIPS
    return folder


@pytest.fixture
def log(monkeypatch):
    """What the encoders are handed from now on, see caches.watch."""
    from caches import watch

    return watch(monkeypatch)


@pytest.fixture
def aligned(monkeypatch):
    """Weights begin at multiples of 64, as those of a swapped block and of ZeRO do: of a file they lie where that has
    them, and products on the CPU are rounded by where their factors lie."""
    from models import memory

    place = memory.place

    def realign(net, *arguments):
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
        place(net, *arguments)

    monkeypatch.setattr(memory, "place", realign)


@pytest.fixture
def start(tiny_ltx, clips, cache, tmp_path):
    """start(name of the run, options ...) -> the trainer after its run in tmp_path / name."""
    from trainers.ltx import LTXTrainer

    def run(name: str = "run", kind=LTXTrainer, model=tiny_ltx, **changes):
        made = runs.trainer(kind, model, clips, tmp_path / name, **{"data__cache_dir": cache} | changes)
        made.run()
        return made

    return run
