"""For tests of the encode stage: runs that only encode, and what they handed to the encoders, stored and loaded."""

import time
from pathlib import Path
from types import SimpleNamespace

import runs
from data.cache import Cache
from trainers.ltx import LTXTrainer
from trainers.precompute import Encoders
from trainers.pretrained import Pretrained

TEXTS, CLIPS = 8, 7  # of the fixture `clips`: seven captions and "", seven clips


def precompute(model, clips, cache: Path, kind=LTXTrainer, stage="precompute", **changes):
    """A run with its own output_dir that shares `cache` with others; by default it only encodes. The trainer."""
    out = changes.pop("output_dir", cache.parent / f"run-{time.monotonic_ns()}")
    made = runs.trainer(kind, model, clips, out, stage=stage, data__cache_dir=cache, **changes)
    made.run()
    return made


def entries(cache: Path) -> dict[str, int]:
    """Key -> time of change of every entry; each can be read."""
    store = Cache(cache)
    keys = store.keys()
    assert all(store.get(key) for key in keys)
    return {key: store.path(key).stat().st_mtime_ns for key in keys}


def watch(monkeypatch) -> SimpleNamespace:
    """What is handed to the encoders (texts, clips), stored (sources) and loaded (components) from now on."""
    seen = SimpleNamespace(texts=[], clips=0, stored=[], loaded=[])
    encode_texts, encode_pixels, put = Encoders.encode_texts, Encoders.encode_pixels, Cache.put
    component = Pretrained.component

    def texts(self, wanted):
        seen.texts += [text.caption for text in wanted]
        return encode_texts(self, wanted)

    def pixels(self, frames):
        seen.clips += len(frames)
        return encode_pixels(self, frames)

    def store(self, key, tensors, note):
        put(self, key, tensors, note)
        seen.stored.append(note["source"])

    def load(self, name):
        seen.loaded.append(name)
        return component(self, name)

    monkeypatch.setattr(Encoders, "encode_texts", texts)
    monkeypatch.setattr(Encoders, "encode_pixels", pixels)
    monkeypatch.setattr(Cache, "put", store)
    monkeypatch.setattr(Pretrained, "component", load)
    return seen


def encoded(log) -> tuple[int, int]:
    """(captions, clips) encoded since the last call; each was encoded once and stored once."""
    assert len(set(log.stored)) == len(log.stored) == len(log.texts) + log.clips
    counts = len(log.texts), log.clips
    log.texts, log.clips, log.stored, log.loaded = [], 0, [], []
    return counts
