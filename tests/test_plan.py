"""The plan: buckets of each source, windows, retiming, crops, what is told of it all, and its page."""

import base64
import html
import io
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import cases
import runs
from data import watch
from data.batches import Schedule
from data.buckets import Bucket
from data.sources import Row
from data.video import Probe
from trainers import plan, plan_page, plan_report, publish
from trainers.config import DataOptions, OptionError
from trainers.ltx import LTXTrainer
from trainers.parsing import parse
from trainers.plan import PlanError
from trainers.precompute import frames_of

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """Three clips that show their frame numbers: 49 and 25 frames at 24 fps, 20 at 10 fps; with captions."""
    root = tmp_path_factory.mktemp("long")
    for name, count, fps in (("a", 49, 24), ("b", 25, 24), ("c", 20, 10)):
        cases.clip(root / f"{name}.mp4", count, fps=fps)
        (root / f"{name}.txt").write_text(f"clip {name}")
    return root


def planned(model, source, out, **changes):
    return runs.run(model, source, out, **{"stage": "plan", "data__buckets": ["17x64x96"]} | changes)


def starts(made, name: str) -> list[int]:
    return [sample.start for sample in made.plan.samples if Path(sample.path).stem == name]


# -- windows and retiming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "of_a", "of_b", "of_c"),
    [
        ("first", [0], [0], [0]),
        ("middle", [16], [4], [1]),
        ("uniform:3", [0, 16, 32], [0, 4, 8], [0, 2, 3]),
        ("all", [0, 16, 32], [0, 8], [0, 3]),
    ],
)
def test_windows_show_their_own_frames(tiny_ltx, long, tmp_path, capsys, kind, of_a, of_b, of_c):
    made = planned(tiny_ltx, long, tmp_path / "run", data__windows=kind)
    assert [starts(made, name) for name in "abc"] == [of_a, of_b, of_c]
    for sample in made.plan.samples:  # every frame in turn: no time-lapse
        assert cases.indices_of(frames_of(sample)) == list(range(sample.start, sample.start + 17))
        assert sample.retime is None and sample.fps == (10 if sample.path.endswith("c.mp4") else 24)
    windows = len(of_a + of_b + of_c)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("17x64x96"))
    assert row.split()[1:4] == ["3", str(windows), str(windows)]


def test_a_clip_of_the_bucket_s_length_has_one_window(tiny_ltx, long, tmp_path):
    made = planned(tiny_ltx, long, tmp_path / "run", data__windows="all", data__buckets=["25x64x96", "17x64x96"])
    assert [starts(made, name) for name in "abc"] == [[0, 24], [0], [0, 3]]


def test_repeats_count_every_window(tiny_ltx, long, tmp_path):
    source = json.dumps({"path": str(long), "repeats": 2})
    made = planned(tiny_ltx, source, tmp_path / "run", data__windows="all")
    assert len(made.plan.samples) == 7 and made.plan.total == 14
    assert Counter(made.plan.buckets["17x64x96"]) == dict.fromkeys(range(7), 2)


def test_retiming_is_told_and_takes_the_frames_by_time(tiny_ltx, long, tmp_path, capsys):
    made = planned(tiny_ltx, long, tmp_path / "run", data__fps=12, data__buckets=["9x64x96"])
    told = capsys.readouterr().out
    assert (
        "data.fps: 3 clips retimed to 12 fps, from 10 to 24; frames are repeated in 1 of them, of fewer than 12" in told
    )
    a, b, c = made.plan.samples
    assert (a.retime, a.fps, c.retime, c.fps) == (12, 12, 12, 12)
    assert cases.indices_of(frames_of(a)) == list(range(0, 18, 2)) == cases.indices_of(frames_of(b))
    assert cases.indices_of(frames_of(c)) == [0, 0, 1, 2, 3, 4, 5, 5, 6]
    # the bucket is chosen by the new length: 25 frames at 24 fps are 13 at 12
    made = planned(tiny_ltx, long, tmp_path / "run", data__fps=12, data__buckets=["17x64x96", "9x64x96"])
    assert [s.bucket for s in made.plan.samples] == ["17x64x96", "9x64x96", "17x64x96"]


def test_retiming_to_the_own_rate_changes_nothing(tiny_ltx, long, tmp_path, capsys):
    made = planned(tiny_ltx, long, tmp_path / "run", data__fps=23.976)
    assert [(s.retime, s.fps) for s in made.plan.samples] == [(None, 23.976), (None, 23.976), (23.976, 23.976)]
    assert "1 clip retimed to 23.976 fps, from 10; frames are repeated in 1" in capsys.readouterr().out
    plain = planned(tiny_ltx, long, tmp_path / "run")
    assert [s.retime for s in plain.plan.samples] == [None] * 3
    assert "data.fps" not in capsys.readouterr().out


def test_a_clip_of_two_speeds_is_retimed_to_its_own_mean_rate_too(tiny_ltx, tmp_path):
    """Its 30 frames stay 30, but not the same ones: at 11 fps most of the first second's are passed over."""
    path = cases.clip(tmp_path / "clips" / "a.mp4", 30, times=cases.VARIABLE)
    path.with_suffix(".txt").write_text("two speeds")
    rate = (len(cases.VARIABLE) - 1) * 1000 / cases.VARIABLE[-1]
    made = planned(tiny_ltx, path.parent, tmp_path / "run", data__fps=rate, data__buckets=["9x64x96"])
    (sample,) = made.plan.samples
    shown = [sum(time <= 1000 * k / rate + 0.04 for time in cases.VARIABLE) - 1 for k in range(9)]
    assert shown[:3] == [0, 2, 5] and cases.indices_of(frames_of(sample)) == shown


OPTIONS = st.builds(
    dict,
    windows=st.sampled_from(["first", "middle", "all", "uniform:4"]),
    fps=st.sampled_from([None, 8.0, 24.0]),
    crop=st.sampled_from(["centre", "random"]),
)
ROWS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(16, 400), st.integers(16, 400), st.sampled_from([10.0, 24.0, 29.97])),
    min_size=1,
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(options=OPTIONS, clips=ROWS, repeats=st.integers(1, 3))
def test_nothing_is_lost_and_nothing_twice(monkeypatch, options, clips, repeats):
    """Every clip is in the plan or left out; every window lies in its clip; the schedule serves each as often."""
    found = {f"{i}.mp4": Probe(*clip, "video") for i, clip in enumerate(clips)}
    monkeypatch.setattr(plan, "read_source", lambda _: ([Row(p, ("x",), p, repeats) for p in found], []))
    monkeypatch.setattr(plan, "look", lambda rows, *_: [(found[row.path], f"sha of {row.path}") for row in rows])
    data = DataOptions(
        train=[SimpleNamespace(path="x", buckets=())], resolution=[64, 128], frames=[1, 9, 17], **options
    )
    try:
        made = plan.make(SimpleNamespace(data=data), (8, 1), 32, lambda *size: None, None)
    except PlanError as error:
        assert "nothing to train on" in str(error) and all(path in str(error) for path in found)
        return
    left = {row.partition(":")[0] for row in made.left_out}
    used = {sample.path for sample in made.samples}
    assert left | used == set(found) and not left & used and made.clips == len(used)
    assert len({(s.path, s.start) for s in made.samples}) == len(made.samples)
    for sample in made.samples:
        clip, bucket = found[sample.path], Bucket.parse(sample.bucket)
        length = plan.frames_at(clip, sample.retime) if sample.retime else clip.frames
        assert 0 <= sample.start <= length - bucket.frames
        assert (clip.frames == 1) == (bucket.frames == 1) or sample.retime
    served = Counter(index for at in made.buckets.values() for index in at)
    assert served == dict.fromkeys(range(len(made.samples)), repeats)
    assert made.total == repeats * len(made.samples)
    schedule = Schedule(made.sizes, 1, 0)
    assert Counter(schedule.block(step)[0] for step in range(made.total)) == made.sizes


# -- crops and resizing -----------------------------------------------------------------------------------------------


def test_random_crops_are_keyed_by_the_clip(tiny_ltx, long, tmp_path, capsys):
    changes = dict(data__buckets=["17x64x64"], data__crop="random", data__crops=3)
    made, other = (planned(tiny_ltx, long, tmp_path / "run", train__seed=seed, **changes) for seed in (1, 2))
    assert made.plan.samples == other.plan.samples  # not by the seed: another run finds them encoded
    crops = [sample.crops for sample in made.plan.samples]
    assert [len(set(places)) for places in crops] == [3, 3, 3] and len({*crops}) == 3
    assert {v for places in crops for v, _ in places} == {0.5}
    assert "clips: 0 of 9 encoded already, 9 to encode" in capsys.readouterr().out
    # where nothing is cut there is one crop, and one encoding
    whole = planned(tiny_ltx, long, tmp_path / "run", **changes | {"data__buckets": ["17x64x96"]})
    assert {sample.crops for sample in whole.plan.samples} == {((0.5, 0.5),)}


def test_resize_matters_where_ratios_differ(tiny_ltx, long, tmp_path):
    for kind, note in (("pad", "50% of 17x64x192 is black"), ("stretch", "is stretched 2.0 times more")):
        made = planned(tiny_ltx, long, tmp_path / "run", data__buckets=["17x64x192"], data__resize=kind)
        assert {sample.resize for sample in made.plan.samples} == {kind}
        assert sum(note in row for row in made.plan.notes) == 3
        same = planned(tiny_ltx, long, tmp_path / "run", data__resize=kind)
        assert {sample.resize for sample in same.plan.samples} == {"cover"}


# -- buckets ----------------------------------------------------------------------------------------------------------


def test_automatic_buckets_fit_the_clips(tiny_ltx, clips, tmp_path, capsys):
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", stage="plan")
    made.config.data.buckets, made.config.data.resolution, made.config.data.frames = [], [80], [9, 17]
    made.run()
    assert made.plan.sizes == {"17x64x96": 5, "9x96x64": 2}  # of nine shapes and two lengths, those that are used
    assert made.validation.prompts == [] and "17x64x96" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("resolution", "frames", "message"),
    [([64], [24], r"data\.frames: 24 frames is not 8k\+1 \(nearest: 17 or 25\)"), ([64], [25], "nothing to train on")],
)
def test_automatic_buckets_are_refused_too(tiny_ltx, clips, tmp_path, resolution, frames, message):
    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", stage="plan")
    made.config.data.buckets, made.config.data.resolution, made.config.data.frames = [], resolution, frames
    with pytest.raises(PlanError, match=message):
        made.run()


def test_sizes_that_the_model_refuses_are_not_chosen(tiny_ltx, clips, tmp_path):
    class Landscape(LTXTrainer):
        def refuse_bucket(self, frames, height, width):
            return f"{frames}x{height}x{width}: only landscape" if height > width else None

    def run(kind):
        made = runs.trainer(kind, tiny_ltx, clips, tmp_path / "run", stage="plan")
        made.config.data.buckets, made.config.data.resolution, made.config.data.frames = [], [80], [9]
        made.run()
        return made.plan

    found = run(Landscape)
    assert all(int(b.split("x")[1]) <= int(b.split("x")[2]) for b in found.buckets) and found.clips == 7
    assert any("sizes are not used, such as 9x128x64: 9x128x64: only landscape" in note for note in found.notes)

    class Nothing(LTXTrainer):
        def refuse_bucket(self, frames, height, width):
            return "too small"

    with pytest.raises(PlanError, match=r"data\.resolution: the model takes none of the \d+ sizes; .*too small"):
        run(Nothing)


def test_a_source_has_its_own_buckets(tiny_ltx, long, tmp_path):
    whole = runs.trainer(LTXTrainer, tiny_ltx, long, tmp_path / "run", stage="plan")
    source = whole.config.data.train[0]
    source = type(source)(source.path, buckets=("9x64x64",))
    whole.config.data.train = [source, whole.config.data.train[0]]
    whole.config.data.buckets = [Bucket(17, 64, 96)]
    whole.run()
    assert whole.plan.sizes == {"9x64x64": 3, "17x64x96": 3}
    assert any(note.startswith("3 clips named again or copied") for note in whole.plan.notes)
    whole.config.data.train = [type(source)(source.path, buckets=("24x64x64",))]
    with pytest.raises(PlanError, match=rf"(?s)data\.train {source.path}: buckets: .*24 frames is not 8k\+1"):
        whole.run()


def test_small_clips_are_left_out_by_name(tiny_ltx, long, tmp_path, capsys):
    made = planned(tiny_ltx, long, tmp_path / "run", data__buckets=["17x128x192", "9x192x320"], data__max_upscale=2)
    assert made.plan.sizes == {"17x128x192": 3}
    with pytest.raises(PlanError) as error:
        planned(tiny_ltx, long, tmp_path / "run", data__buckets=["17x128x192"], data__max_upscale=1.9)
    assert str(error.value).count("17x128x192 would enlarge it 2.00 times, more than data.max_upscale 1.9") == 3
    short = planned(tiny_ltx, long, tmp_path / "run", data__buckets=["25x64x96"])
    assert [row.split(": ")[1] for row in short.plan.left_out] == ["20 frames, the smallest bucket needs 25 [c.txt]"]
    assert "left out: 1\n" in capsys.readouterr().out


# -- bad files, and the second start ----------------------------------------------------------------------------------


def test_the_second_start_decodes_nothing(tiny_ltx, long, tmp_path, monkeypatch):
    folder = shutil.copytree(long, tmp_path / "clips")
    first = planned(tiny_ltx, folder, tmp_path / "run", stage="precompute")
    decoded, give = [], watch._Worker.give
    noted = lambda worker, path, *rest: decoded.append(Path(path).name) or give(worker, path, *rest)  # noqa: E731
    monkeypatch.setattr(watch._Worker, "give", noted)
    monkeypatch.setattr("trainers.precompute.read_frames", lambda *_: pytest.fail("a clip was decoded"))
    again = planned(tiny_ltx, folder, tmp_path / "run", stage="precompute")
    assert decoded == [] and again.plan.samples == first.plan.samples
    cases.clip(folder / "b.mp4", 33)  # a file that changes is looked at again, and no other
    monkeypatch.undo()
    monkeypatch.setattr(watch._Worker, "give", noted)
    planned(tiny_ltx, folder, tmp_path / "run")
    assert decoded == ["b.mp4"]


def test_skipping_keeps_pairs_and_counts(tiny_ltx, long, tmp_path, capsys):
    folder = shutil.copytree(long, tmp_path / "clips")
    (folder / "b.mp4").write_bytes(b"")
    (folder / "d.mp4").write_bytes(b"<html>no such page</html>")
    (folder / "d.txt").write_text("clip d")
    with pytest.raises(PlanError) as error:
        planned(tiny_ltx, folder, tmp_path / "run")
    text = str(error.value)
    assert text.startswith("2 problems in the data (data.on_bad: skip leaves out clips that cannot be read):")
    assert f"{folder / 'b.mp4'}: empty file" in text and f"{folder / 'd.mp4'}: not media but a saved web page" in text
    made = planned(tiny_ltx, folder, tmp_path / "run", data__on_bad="skip")
    assert {Path(s.path).stem: s.caption for s in made.plan.samples} == {"a": "clip a", "c": "clip c"}
    told, bars = capsys.readouterr()
    assert "probing" not in bars and "plan.html" not in bars  # no progress bars where nobody watches
    assert "cannot be read: 2" in told and "cannot be read, left out: 2\n" in told
    assert f"  {folder / 'b.mp4'}: empty file" in told


@pytest.mark.parametrize(
    ("changes", "file", "code"),
    [
        ({"data__on_bad": "maybe"}, None, 2),
        ({"data__buckets": ["24x64x96"]}, None, 1),
        ({}, "bad.mp4", 1),
        ({"data__buckets": ["121x64x96"]}, None, 1),
    ],
)
def test_the_exit_code_says_whether_training_could_start(tiny_ltx, long, tmp_path, changes, file, code):
    folder = shutil.copytree(long, tmp_path / "clips")
    if file:
        (folder / file).write_bytes(b"")
        (folder / "bad.txt").write_text("bad")
    runs.fresh_state()
    with pytest.raises(SystemExit) as stop:
        LTXTrainer.main(runs.options(tiny_ltx, folder, tmp_path / "run", stage="plan", **changes))
    assert (stop.value.code if code == 2 else 1) == code and (code == 2 or "error: " in stop.value.code)


# -- the report -------------------------------------------------------------------------------------------------------


def test_captions_are_counted(tiny_ltx, long, tmp_path, capsys):
    folder = shutil.copytree(long, tmp_path / "clips")
    (folder / "b.txt").write_text("clip a")
    (folder / "c.txt").write_text("word " * 40)
    planned(tiny_ltx, folder, tmp_path / "run", max_sequence_length=32)
    told = capsys.readouterr().out
    assert "captions: 2 different, 2 to 40 words, median 21\n" in told
    assert "used by more than one clip: 1, such as 'clip a' by 2 clips" in told
    tokens = re.search(r"tokenizer: 1 of 2 captions lose their end: over 32 tokens, up to (\d+) \('word word", told)
    assert tokens and int(tokens[1]) > 40
    encoded = dict(max_sequence_length=32, data__cache_dir=tmp_path / "cache")
    planned(tiny_ltx, folder, tmp_path / "run", **encoded, stage="precompute")
    for changes in (encoded, {"max_sequence_length": 32, "data__precompute": "off"}):  # there is nothing to encode
        capsys.readouterr()
        planned(tiny_ltx, folder, tmp_path / "run", **changes)
        assert "tokenizer: 1 of 2 captions lose their end" in capsys.readouterr().out, changes
    source = json.dumps({"path": str(folder), "allow_empty_captions": True})
    (folder / "c.txt").unlink()
    planned(tiny_ltx, source, tmp_path / "run")
    assert "empty: of 1 clip\n" in capsys.readouterr().out


def test_the_cache_that_is_needed_is_the_cache_that_is_written(tiny_ltx, long, tmp_path, capsys):
    changes = dict(data__windows="all", data__cache_dtype="bf16")
    made = planned(tiny_ltx, long, tmp_path / "run", **changes)
    missing = made.encoders.missing()
    disk = plan_report.disk(made, missing)
    done = planned(tiny_ltx, long, tmp_path / "run", stage="precompute", **changes)
    numbers = Counter()
    for kind, items in (("clips", done.encoders.video_items()), ("captions", done.encoders.text_items())):
        numbers[kind] = sum(t.nbytes for item in items for t in done.encoders.cache.get(item.key).values())
    assert disk.clips == numbers["clips"] > 0 and disk.captions >= numbers["captions"] > 0
    assert plan_report.disk(done, done.encoders.missing()) is None
    capsys.readouterr()
    (folder,) = [p.parent for p in (tmp_path / "run" / "cache").rglob(f"{done.encoders.video_items()[0].key}*")]
    shutil.rmtree(folder)
    part = plan_report.disk(done, done.encoders.missing())
    assert 0 < part.clips < disk.clips


def test_a_full_disk_is_told_before_anything_is_encoded(tiny_ltx, long, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_report.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for stage in ("plan", "precompute"):
        with pytest.raises(PlanError, match=r"data\.cache_dir .*: encoding needs 0\.\d+ MB, 0\.00 MB are free"):
            planned(tiny_ltx, long, tmp_path / "run", stage=stage)
    assert not list((tmp_path / "run").rglob("*.safetensors")) and "disk: 0.0" in capsys.readouterr().out


def test_lists_are_cut_with_a_count():
    rows = plan_report.listed("notes", [f"row {i}\x1b[2J" for i in range(25)])
    assert rows[0] == "notes: 25" and len(rows) == 22 and rows[-1] == "  ... and 5 more, in plan.html"
    assert rows[1] == "  row 0\\x1b[2J"  # a terminal obeys no file name


# -- the page ---------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The tags, attributes and text of a page, as a browser would read them."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.words = Counter(), Counter(), ""
        self.images = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attributes)
        self.images += [value for name, value in attributes if name == "src"]

    def handle_data(self, data):
        self.words += data

    def pictures(self) -> list[torch.Tensor]:
        """uint8 [3, h, w] each."""
        raw = [base64.b64decode(image.removeprefix("data:image/jpeg;base64,")) for image in self.images]
        return [torch.from_numpy(np.array(Image.open(io.BytesIO(b)))).permute(2, 0, 1) for b in raw]


def test_strips_show_what_the_network_sees(tiny_ltx, long, tmp_path):
    planned(tiny_ltx, long, tmp_path / "run", data__windows="all", data__fps=12, data__buckets=["9x64x96"])
    page = Tags((tmp_path / "run" / "plan.html").read_text())
    strips = [cases.indices_of(torch.stack(p.split(96, dim=2), 1)) for p in page.pictures()]
    (a0, a1, a2, b0, b1, *rest) = strips
    assert a0 == b0 == [0, 2, 6, 8, 12, 16]  # frames 0 1 3 4 6 8 of the window at half the speed
    assert a1 == [16, 18, 22, 24, 28, 32] and a2 == [32, 34, 38, 40, 44, 48]
    assert b1 == [8, 10, 14, 16, 20, 24] and len(rest) == 3
    for words in ("9x64x96 from frame 8, 12 fps, retimed", "clip a", str(long / "c.mp4")):
        assert words in page.words


def test_large_pictures_are_made_small(tiny_ltx, long, tmp_path):
    planned(tiny_ltx, long, tmp_path / "run", data__buckets=["9x192x128"], data__max_upscale=3)
    page = Tags((tmp_path / "run" / "plan.html").read_text())
    assert {tuple(p.shape) for p in page.pictures()} == {(3, 96, 6 * 64)}


HOSTILE = ['<script>alert("x")</script>', "\"' onerror='x' <img src=x>", "</div></body>&lt;&#60;", "a\x1b[2J\u202eb"]


def test_names_and_captions_are_inert(tiny_ltx, long, tmp_path, capsys):
    folder = tmp_path / "clips"
    folder.mkdir()
    for i, words in enumerate(HOSTILE):
        name = words.replace("/", "_")
        shutil.copy(long / "c.mp4", folder / f"{name}.mp4")
        (folder / f"{name}.txt").write_text(f"{words} {i}")
    (folder / "<b>short.png.mp4").write_bytes(b"")
    (folder / "<b>short.png.txt").write_text("x")
    planned(tiny_ltx, folder, tmp_path / "run", data__on_bad="skip", data__buckets=["9x64x96"])
    text = (tmp_path / "run" / "plan.html").read_text()
    page = Tags(text)
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th", "td", "ul", "li"}
    assert (
        set(page.tags) <= allowed | {"figure", "img", "figcaption", "div", "br"}
        and page.tags["img"] == page.tags["figure"] == 4
    )
    assert set(page.attributes) <= {"lang", "charset", "name", "content", "http-equiv", "class", "alt", "src"}
    assert all(image.startswith("data:image/jpeg;base64,") for image in page.images)
    for i, words in enumerate(HOSTILE[:3]):
        assert f"{words} {i}" in page.words and html.escape(f"{words} {i}") in text
    assert "<b>short.png.mp4: empty file" in page.words
    assert "\x1b" not in text and "\u202e" not in text and "\x1b" not in capsys.readouterr().out
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text and "http" not in page.words


def test_the_page_is_made_once_for_a_plan(tiny_ltx, long, tmp_path, monkeypatch):
    run = tmp_path / "run"
    planned(tiny_ltx, long, run, stage="precompute")
    first = (run / "plan.html").read_bytes()
    asked, sheet = [], plan_page.sheet
    monkeypatch.setattr(plan_page, "sheet", lambda plan, most: asked.append(most) or sheet(plan, most))
    made, strip = [], plan_page.strip
    monkeypatch.setattr(plan_page, "strip", lambda sample: made.append(sample.path) or strip(sample))
    planned(tiny_ltx, long, run, stage="precompute")
    assert made == [] and (run / "plan.html").read_bytes() == first
    planned(tiny_ltx, long, run, stage="precompute", data__windows="middle")
    assert len(made) == 3 and (run / "plan.html").read_bytes() != first
    planned(tiny_ltx, long, run, data__windows="middle")  # stage plan always looks
    assert asked == [plan_page.SHOWN_AT_START, plan_page.SHOWN]
    assert len(made) == 6 and not list(run.glob(".*partial"))


def test_a_large_plan_shows_some_and_says_so(monkeypatch):
    sample = plan.Sample("a.mp4", ("words",), "9x64x96", 0, 24.0, "sha", "list line 1")
    many = plan.Plan([sample] * 1000, {"9x64x96": list(range(1000))})
    decoded = []
    monkeypatch.setattr(plan_page, "strip", lambda _: decoded.append(1) or b"x" * 100_000)
    page = "".join(plan_page.sheet(many, plan_page.SHOWN))
    assert "What the network will see, 200 of 1000, evenly chosen" in page and len(decoded) == 200
    assert page.count("<figure>") == 200 and page.count("<img") == 80 and page.count("the page is full") == 120
    assert len(page) < 11_000_000
    assert "24 of 1000, evenly chosen (up to 200 at --stage plan)" in "".join(plan_page.sheet(many, 24))
    assert plan_page.evenly(1000, 200)[::199] == [0, 999] and plan_page.evenly(3, 200) == [0, 1, 2]


def test_options_that_say_one_thing_twice(tiny_ltx, long, tmp_path):
    with pytest.raises(OptionError, match=r"data\.buckets and data\.resolution"):
        planned(tiny_ltx, long, tmp_path / "run", data__resolution=64, data__frames=9)


@pytest.mark.parametrize("name", ["ltx", "hunyuan", "hunyuan-i2v", "cogvideox-2b"])
def test_every_model_counts_captions_that_are_cut(built, long, tmp_path, capsys, name):
    kind = next(kind for kind in runs.trainers_by_name().values() if name in kind.tiny)
    folder = shutil.copytree(long, tmp_path / "clips")
    (folder / "c.txt").write_text("word " * 300)
    made = runs.trainer(kind, built(name), folder, tmp_path / "run", stage="plan", data__buckets=["17x64x96"])
    made.run()
    told = capsys.readouterr().out
    for tokenizer, limit in made.caption_limits().items():
        line = rf"  {tokenizer}: 1 of 3 captions lose their end: over {limit} tokens, up to \d+ \('word word"
        assert re.search(line, told), told
        count = made.pretrained.component(tokenizer)
        texts = (" ".join(["word"] * n + [*"abcdefgh"][:m]) for n in range(limit) for m in range(9))
        fits = next(text for text in texts if len(count(text).input_ids) == limit)
        plans = [SimpleNamespace(samples=[SimpleNamespace(captions=[text])]) for text in (fits, f"{fits} a")]
        told_of = [next(r for r in plan_report.cut_captions(p, made) if f" {tokenizer}:" in r) for p in plans]
        assert [" lose their end" in row for row in told_of] == [False, True]


@pytest.mark.parametrize("automatic", [True, False])
def test_data_buckets_are_not_needed_where_others_are_given(tiny_ltx, clips, tmp_path, capsys, automatic):
    source = {"path": str(clips)} | ({} if automatic else {"buckets": ["17x64x96", "9x96x64"]})
    words = ["--data.resolution", "80", "--data.frames", "9", "17"] if automatic else []
    given = {"model": tiny_ltx, "output_dir": tmp_path / "run", "data.train": json.dumps(source), "stage": "plan"}
    runs.fresh_state()
    LTXTrainer.main([*runs.words(given), *words])
    told = capsys.readouterr().out
    assert re.search(r"17x64x96 +5 +5 +5 ", told) and re.search(r"9x96x64 +2 +2 +2 ", told)


def test_the_card_names_the_sizes_that_were_trained(tmp_path):
    words = ["--model", "a/b", "--data.train", "c", "--data.resolution", "80", "--data.frames", "9"]
    card = publish.write_card(
        tmp_path, "LTXPipeline", parse(LTXTrainer.Config, words), {"9x64x96": [0], "9x96x64": [1]}
    )
    assert "trained with reeltune at 9x64x96, 9x96x64 (frames x height x width)" in card.read_text()
