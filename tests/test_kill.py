"""kill -9 at every moment of precompute, of writing a checkpoint and of publishing the result: the next run goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

import runs
from caches import CLIPS, TEXTS, entries, precompute
from data.cache import Cache
from models import export
from runs import die, killed
from trainers import checkpoints, publish

pytestmark = pytest.mark.usefixtures("libraries")

ROOT = Path(__file__).parents[1]
ENTRIES = TEXTS + CLIPS


@pytest.fixture
def stored(monkeypatch) -> list[str]:
    """The sources of the entries that are written from now on."""
    seen, put = [], Cache.put

    def note_and_put(self, key, tensors, note):
        put(self, key, tensors, note)
        seen.append(note["source"])

    monkeypatch.setattr(Cache, "put", note_and_put)
    return seen


# -- precompute ---------------------------------------------------------------------------------------------------


def die_in_put(moment: str, count: int, model, clips, cache) -> None:
    """Precomputes until the `count`-th entry is being written, then dies at that moment of it."""
    put, fsync, calls = Cache.put, os.fsync, []

    def cut_off(descriptor):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        die()

    def whole(descriptor):
        fsync(descriptor)
        die()

    def dying_put(self, key, tensors, note):
        calls.append(key)
        if len(calls) == count:
            if moment == "nothing written":
                die()
            os.fsync = {"half written": cut_off, "not renamed": whole}.get(moment, fsync)
        put(self, key, tensors, note)
        if len(calls) == count:
            die()

    Cache.put = dying_put
    precompute(model, clips, cache)


def test_precompute_killed_again_and_again_goes_on(tiny_ltx, clips, tmp_path, stored):
    undisturbed = tmp_path / "undisturbed"
    precompute(tiny_ltx, clips, undisturbed)
    assert len(stored) == ENTRIES
    stored.clear()

    cache, have = tmp_path / "cache", {}
    moments = ["half written", "renamed", "nothing written", "not renamed"]
    for n in range(20):
        if len(have) > ENTRIES - 3:
            break
        moment = moments[n % 4]
        killed(die_in_put, moment, 3, tiny_ltx, clips, cache)
        now = entries(cache)
        assert len(now) == len(have) + (3 if moment == "renamed" else 2), moment
        assert now.items() >= have.items()  # made before, not made again
        have = now
    assert n >= 5
    assert list((cache / "tmp").iterdir())  # what the kills left behind
    precompute(tiny_ltx, clips, cache)
    assert len(stored) == len(set(stored)) == ENTRIES - len(have) > 0
    now = entries(cache)
    assert now.items() >= have.items() and now.keys() == entries(undisturbed).keys()
    for key in now:
        ours, theirs = Cache(cache).get(key), Cache(undisturbed).get(key)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.slow
def test_the_real_script_killed_while_it_encodes(tiny_ltx, tmp_path, stored):
    """30 clips, 31 captions; SIGKILL from outside once clips are being encoded."""
    data = tmp_path / "clips"
    data.mkdir()
    for i in range(30):
        runs.write_clip(data / f"{i}.mp4", 9, 64, 96, 24, seed=i)
        (data / f"{i}.txt").write_text(f"a cat number {i}")
    cache = tmp_path / "run" / "cache"
    words = runs.options(tiny_ltx, data, tmp_path / "run", stage="precompute", data__buckets="9x64x96")
    process = subprocess.Popen([sys.executable, "train_ltx.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(Cache(cache).keys()) < 33 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    have = entries(cache)
    assert 33 <= len(have) < 61
    made = precompute(tiny_ltx, data, cache, data__buckets="9x64x96")
    assert len(stored) == len(set(stored)) == 61 - len(have)
    assert entries(cache).items() >= have.items()
    assert made.encoders.missing() == {"captions": (0, 31), "clips": (0, 30)}


# -- checkpoints --------------------------------------------------------------------------------------------------

FILES = ("trainable.safetensors", "optimizer.bin", "random_states_0.pkl", "pytorch_lora_weights.safetensors")
FILES += ("pytorch_lora_weights_comfyui.safetensors", "trainer_state.json")


def train(model, clips, root: Path, **changes):
    """Six steps with a checkpoint every two; the cache is shared."""
    given = dict(train__steps=6, checkpoint__every=2, data__cache_dir=root.parent / "cache") | changes
    return runs.run(model, clips, root, **given)


@pytest.fixture(scope="module")
def unbroken(tiny_ltx, clips, tmp_path_factory):
    """(the folder that holds runs and their cache, trained numbers and metrics of an unbroken run)."""
    root = tmp_path_factory.mktemp("runs") / "unbroken"
    made = train(tiny_ltx, clips, root)
    return root.parent, runs.trained(made), runs.losses(root)


def half_a_file(call, content, file):
    """A write that is cut off in the middle."""
    call(content, file)
    os.truncate(file, os.path.getsize(file) // 2)
    die()


def instead(call, *arguments, **keywords):
    die()


def after(call, *arguments, **keywords):
    call(*arguments, **keywords)
    die()


# Where it dies: (module, function, how), at the first call with this text in an argument; and the newest checkpoint
# that is whole afterwards.
DEATHS = {
    "in the very first checkpoint": (torch, "save", half_a_file, ".checkpoint-2.partial/state/optimizer.bin", None),
    "trainable half written": (safetensors.torch, "save_file", half_a_file, "4.partial/state/trainable.safetensors", 2),
    "trainable written": (safetensors.torch, "save_file", after, "4.partial/state/trainable.safetensors", 2),
    "optimizer half written": (torch, "save", half_a_file, "4.partial/state/optimizer.bin", 2),
    "random states half written": (torch, "save", half_a_file, "4.partial/state/random_states_0.pkl", 2),
    "no export yet": (export, "save_lora", instead, ".checkpoint-4.partial", 2),
    "export written": (export, "save_lora", after, ".checkpoint-4.partial", 2),
    "export verified": (export, "verify_lora", after, ".checkpoint-4.partial", 2),
    "list of files not renamed": (os, "replace", instead, ".checkpoint-4.partial/state/trainer_state.json", 2),
    "list of files written": (checkpoints, "write_json", after, ".checkpoint-4.partial", 2),
    "before the rename": (Path, "rename", instead, ".checkpoint-4.partial", 2),
    "after the rename": (Path, "rename", after, ".checkpoint-4.partial", 4),
    "before the last rename": (Path, "rename", instead, ".checkpoint-6.partial", 4),
    "before publishing": (publish, "publish", instead, "checkpoint-6", 6),
    "one file published": (publish, "link_or_copy", after, "checkpoint-6", 6),
}


def die_in_training(death: str, model, clips, root: Path) -> None:
    of, name, how, where, _ = DEATHS[death]
    call = getattr(of, name)

    def watched(*arguments, **keywords):
        if any(where in str(argument) for argument in arguments if isinstance(argument, str | Path)):
            return how(call, *arguments, **keywords)
        return call(*arguments, **keywords)

    setattr(of, name, watched)
    train(model, clips, root)


@pytest.mark.parametrize("death", DEATHS)
def test_killed_while_it_saves_it_goes_on_from_the_last_whole_checkpoint(death, tiny_ltx, clips, unbroken):
    folder, weights, losses = unbroken
    root = folder / death.replace(" ", "-")
    killed(die_in_training, death, tiny_ltx, clips, root)
    step = DEATHS[death][-1]
    found, _ = checkpoints.find("latest", root)
    assert found == (root / f"checkpoint-{step}" if step else None)
    for whole in checkpoints.numbered(root):
        assert {p.name for p in whole.rglob("*") if p.is_file()} == set(FILES), (
            "a checkpoint is there, but not all of it"
        )

    made = train(tiny_ltx, clips, root, checkpoint__resume="latest")
    assert torch.equal(runs.trained(made), weights)
    assert runs.losses(root) == losses
    assert [p.name for p in checkpoints.numbered(root)] == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]
    assert not list(root.glob(".*"))  # nothing half-made is left
    last, published = (p / publish.LORA for p in (root / "checkpoint-6", root))
    assert published.read_bytes() == last.read_bytes()


def test_what_a_killed_run_left_half_written_is_removed(tiny_ltx, clips, unbroken):
    """Also where no later checkpoint has the same number."""
    root = unbroken[0] / "left"
    killed(die_in_training, "before the rename", tiny_ltx, clips, root)
    assert (root / ".checkpoint-4.partial").is_dir()
    train(tiny_ltx, clips, root, checkpoint__resume="latest", checkpoint__every=3)
    assert [p.name for p in checkpoints.numbered(root)] == ["checkpoint-6", "checkpoint-3", "checkpoint-2"]
    assert not list(root.glob(".*"))


def die_in_prune(moment: str, model, clips, root: Path) -> None:
    remove = shutil.rmtree

    def half(path, *arguments, **keywords):
        if path == root / "checkpoint-2" / "state":
            if moment == "half deleted":
                (path / "optimizer.bin").unlink()
            die()
        remove(path, *arguments, **keywords)

    shutil.rmtree = half
    train(model, clips, root, checkpoint__keep=1)


@pytest.mark.parametrize("moment", ["marker gone", "half deleted"])
def test_killed_while_old_state_is_deleted(moment, tiny_ltx, clips, unbroken):
    """Half-deleted state never looks whole: it is passed over, and a run told to use it says what is wrong."""
    folder, weights, _ = unbroken
    root = folder / f"prune-{moment.replace(' ', '-')}"
    killed(die_in_prune, moment, tiny_ltx, clips, root)
    old, new = root / "checkpoint-2", root / "checkpoint-4"
    assert (old / "state").is_dir() and checkpoints.find("latest", root)[0] == new
    with pytest.raises(checkpoints.CheckpointError, match="checkpoint-2: incomplete"):
        train(tiny_ltx, clips, root, checkpoint__resume=old)
    made = train(tiny_ltx, clips, root, checkpoint__resume="latest", checkpoint__keep=1)
    assert torch.equal(runs.trained(made), weights)
    assert not (old / "state").exists() and (old / publish.LORA).exists()  # the export stays
