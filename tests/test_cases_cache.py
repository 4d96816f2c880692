"""The cache of encodings with what people really keep beside it: other models, half files, equal names.

Which kind of trouble is tested where.

P01 stale after a change: test_a_change_makes_what_it_touches; more: tests/test_precompute.py
P02 other people's entries: test_two_models_in_one_folder; strays: tests/test_encoding.py
P04 half-written entries: test_half_and_empty_entries; kill -9: tests/test_kill.py, tests/test_cache.py
P06 name collision: test_equal_names_are_two_entries; more: tests/test_precompute.py
P07 only new items: tests/test_precompute.py test_only_new_items_and_a_removed_clip_is_gone
P09 NaN from an encoder: tests/test_encoding.py test_nan_from_the_vae_names_the_clip and _the_text_encoder_
P10 ranks that wait: tests/test_encoding.py test_two_ranks_share_the_work_and_wait_for_the_slow_one
P11 scaling of latents: tests/test_latents.py, tests/test_encoding.py test_latents_are_the_pipelines_own
"""

import json
import shutil

import pytest

from caches import encoded, entries, precompute
from cases import planned
from data.cache import Cache
from trainers.cog import CogVideoXTrainer

pytestmark = pytest.mark.usefixtures("libraries")

TEXTS, CLIPS = 5, 4  # of the set "ok": four captions and ""
HEADER = json.dumps({"latents": {"dtype": "F32", "shape": [4, 8, 8], "data_offsets": [0, 1024]}}).encode()
HALF = len(HEADER).to_bytes(8, "little") + HEADER + b"\x00" * 100
"""A safetensors file whose header promises 1024 bytes; 100 are there."""


@pytest.fixture(scope="module")
def four(tiny_ltx, cases, tmp_path_factory):
    """The cache of the set "ok"; not to be changed."""
    folder = tmp_path_factory.mktemp("four") / "cache"
    precompute(tiny_ltx, cases / "sets" / "ok", folder, data__buckets="25x64x96")
    assert len(entries(folder)) == TEXTS + CLIPS
    return folder


@pytest.fixture
def cache(four, tmp_path):
    return shutil.copytree(four, tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "texts", "clips"),
    [
        ({"data__buckets": "25x32x64"}, 0, CLIPS),
        ({"data__buckets": "17x64x96"}, 0, CLIPS),
        ({"prefix": "BW_STYLE "}, TEXTS - 1, 0),
        ({"optimizer__learning_rate": 3e-4, "train__batch_size": 3}, 0, 0),
    ],
    ids=str,
)
def test_a_change_makes_what_it_touches(tiny_ltx, cases, cache, log, capsys, changes, texts, clips):
    changes = {"data__buckets": "25x64x96"} | changes
    source = json.dumps({"path": str(cases / "sets" / "ok"), "caption_prefix": changes.pop("prefix", "")})
    before = entries(cache)
    precompute(tiny_ltx, source, cache, **changes)
    assert encoded(log) == (texts, clips)
    assert entries(cache).items() >= before.items()
    told = capsys.readouterr().out
    assert f"captions: {TEXTS - texts} of {TEXTS} encoded already, {texts} to encode" in told
    assert f"clips: {CLIPS - clips} of {CLIPS} encoded already, {clips} to encode" in told


def test_two_models_in_one_folder(built, cases, cache, log, capsys):
    """CogVideoX into the folder of LTX: what is written is what is read, and each run reads its own."""
    ours = set(entries(cache))
    (cache / "latents.pt").write_bytes(b"of another program")
    options = dict(kind=CogVideoXTrainer, data__buckets="17x64x96")
    made = precompute(built("cogvideox-5b"), cases / "sets" / "ok", cache, **options)
    assert encoded(log) == (TEXTS, CLIPS)
    note = f"note: {cache} holds 1 file that no run wrote there, such as latents.pt: not read, not removed\n"
    assert note in capsys.readouterr().out
    wanted = {item.key for item in made.encoders.text_items() + made.encoders.video_items()}
    assert set(entries(cache)) - ours == wanted and not wanted & ours
    made = precompute(built("ltx"), cases / "sets" / "ok", cache, stage="all", data__buckets="25x64x96", train__steps=1)
    assert encoded(log) == (0, 0) and made.step == 1
    assert (cache / "latents.pt").read_bytes() == b"of another program"


@pytest.mark.parametrize("content", [HALF, b""], ids=["half", "empty"])
def test_half_and_empty_entries(tiny_ltx, cases, cache, four, log, caplog, content):
    """Found broken, made again with a note, the others kept."""
    made = planned(tiny_ltx, cases / "sets" / "ok", cache.parent / "plan", data__cache_dir=cache)
    items = [made.encoders.text_items()[1], made.encoders.video_items()[2]]
    before = entries(cache)
    for item in items:
        made.encoders.cache.path(item.key).write_bytes(content)
    precompute(tiny_ltx, cases / "sets" / "ok", cache, data__buckets="25x64x96")
    assert log.stored == [item.source for item in items] and encoded(log) == (1, 1)
    for item in items:
        assert f"{made.encoders.cache.path(item.key)}: broken entry ({len(content)} bytes, " in caplog.text
        ours, first = Cache(cache).get(item.key), Cache(four).get(item.key)
        assert ours.keys() == first.keys() and all(ours[name].equal(first[name]) for name in ours)
    now = entries(cache)
    assert {key for key in before if now[key] != before[key]} == {item.key for item in items}


def test_equal_names_are_two_entries(tiny_ltx, cases, tmp_path, log):
    source = cases / "sets" / "same_stem"
    made = precompute(tiny_ltx, source, tmp_path / "cache", data__buckets=["25x64x96", "1x64x96"])
    assert encoded(log) == (3, 2)
    clip, still = (made.encoders.cache.get(item.key)["moments"] for item in made.encoders.video_items())
    assert (clip.shape[1], still.shape[1]) == (4, 1) and not clip[:, :1].equal(still)
    assert [sample.caption for sample in made.plan.samples] == ["a moving pattern", "a still pattern"]
