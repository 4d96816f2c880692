"""Sizes and batches for the clips that people really have: one bucket per batch, and nobody lost without a word.

Which kind of trouble is tested where; all files are those of tests/cases.py.

B01 mixed lengths: test_mixed_lengths_share_no_batch
B02 bucket smaller than the batch: test_a_bucket_smaller_than_the_batch; on two ranks: tests/test_exactness.py
B03 frame rule: test_the_frame_rule_is_told, test_clips_are_cut_down_to_the_rule
B04 order of the numbers: test_the_frame_rule_is_told
B05 stills and clips: test_stills_and_clips, test_image_to_video_refuses_stills
M01 1, 3 and 5 samples on two ranks: tests/test_exactness.py test_few_or_uneven_samples_do_not_hang
"""

from collections import Counter
from pathlib import Path

import pytest

import runs
from cases import BUCKETS, NAMES, STILLS_AND_CLIPS, indices_of, names, uncaptioned
from trainers.hunyuan import HunyuanVideoTrainer
from trainers.ltx import LTXTrainer
from trainers.plan import PlanError
from trainers.precompute import frames_of

pytestmark = pytest.mark.usefixtures("libraries")

LENGTHS = ["25x64x96", "33x64x96", "49x64x96"]
OWN = {"25x64x96": {"a.mp4", "c.mp4"}, "33x64x96": {"d.mp4"}, "49x64x96": {"b.mp4"}}


class Seen(LTXTrainer):
    """Keeps what each micro-batch held: its bucket, the latents' frames, the clips, their frame rates."""

    def build(self):
        super().build()
        self.seen, finish = [], self.encoders.finish

        def noted(batch, bucket, picks):
            clips = [self.plan.samples[self.plan.buckets[bucket][i]] for i in picks]
            made = finish(batch, bucket, picks)
            self.seen.append((bucket, made["moments"].shape[2], names(clips), made["fps"].tolist()))
            return made

        self.encoders.finish = noted


Seen.__name__ = LTXTrainer.__name__


def train(model, source, out, **changes) -> Seen:
    made = runs.trainer(Seen, model, source, out, **changes)
    made.run()
    return made


def test_mixed_lengths_share_no_batch(tiny_ltx, cases, tmp_path):
    changes = dict(data__buckets=LENGTHS, train__batch_size=2, train__steps=8)
    made = train(tiny_ltx, cases / "sets" / "mixed_lengths", tmp_path / "run", **changes)
    assert made.step == 8 and len(made.seen) == 8
    for bucket, latent_frames, clips, _ in made.seen:
        assert set(clips) <= OWN[bucket] and len(clips) == 2
        assert latent_frames == (int(bucket[:2]) - 1) // 8 + 1
    assert Counter(name for _, _, clips, _ in made.seen for name in clips) == dict.fromkeys(NAMES, 4)


def test_a_bucket_smaller_than_the_batch(tiny_ltx, cases, tmp_path, capsys):
    """Batches of 2, twice accumulated, from buckets of 2, 1 and 1: told, and every clip is seen equally often."""
    changes = dict(data__buckets=LENGTHS, train__batch_size=2, train__gradient_accumulation_steps=2, train__steps=8)
    made = train(tiny_ltx, cases / "sets" / "mixed_lengths", tmp_path / "run", **changes)
    told = capsys.readouterr().out
    assert told.count("fewer samples than a global batch of 4: served about once in 4 epochs") == 2
    assert told.count("fewer samples than a global batch of 4: served about once in 2 epochs") == 1
    assert made.step == 8 and len(made.seen) == 16
    assert Counter(name for _, _, clips, _ in made.seen for name in clips) == dict.fromkeys(NAMES, 8)


@pytest.mark.parametrize(
    ("kind", "name", "bucket", "message"),
    [
        (LTXTrainer, "ltx", "24x64x96", r"24x64x96: 24 frames is not 8k\+1 \(nearest: 17 or 25\)"),
        (LTXTrainer, "ltx", "96x64x25", r"order is FxHxW.*\n.*96 frames is not 8k\+1.*; was 25x64x96 meant\?"),
        (HunyuanVideoTrainer, "hunyuan", "48x64x96", r"48x64x96: 48 frames is not 4k\+1 \(nearest: 45 or 49\)"),
    ],
)
def test_the_frame_rule_is_told(built, cases, tmp_path, kind, name, bucket, message):
    made = runs.trainer(kind, built(name), cases / "sets" / "ok", tmp_path / "run", data__buckets=bucket)
    with pytest.raises(PlanError, match=message):
        made.run()
    assert not hasattr(made, "network") and not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize(("kind", "name", "fits"), [(LTXTrainer, "ltx", 17), (HunyuanVideoTrainer, "hunyuan", 21)])
def test_clips_are_cut_down_to_the_rule(built, cases, tmp_path, kind, name, fits):
    """24 frames: 17 of them in 8k+1, 21 in 4k+1, from the first on."""
    buckets = [f"{fits}x64x96", "25x64x96"]
    source = uncaptioned(cases / "media" / "frames_24.mp4")
    made = runs.trainer(kind, built(name), source, tmp_path / "run", data__buckets=buckets, stage="plan")
    made.run()
    (sample,) = made.plan.samples
    assert sample.bucket == buckets[0] and indices_of(frames_of(sample)) == list(range(fits))


@pytest.mark.parametrize("precompute", ["disk", "off"])
def test_stills_and_clips(tiny_ltx, cases, tmp_path, precompute):
    changes = dict(data__buckets=["25x64x96", "1x64x96"], train__batch_size=2, train__steps=4)
    source = cases / "sets" / "mixed_image_video"
    made = train(tiny_ltx, source, tmp_path / "run", data__precompute=precompute, **changes)
    captions = {Path(sample.path).name: sample.caption for sample in made.plan.samples}
    assert captions == STILLS_AND_CLIPS
    own = {"25x64x96": {"a.mp4", "b.mp4"}, "1x64x96": {"still_0.png", "still_1.png"}}
    assert made.step == 4 and Counter(bucket for bucket, *_ in made.seen) == {"25x64x96": 2, "1x64x96": 2}
    for bucket, latent_frames, clips, fps in made.seen:
        assert set(clips) == own[bucket] and latent_frames == (4 if bucket == "25x64x96" else 1)
        assert min(fps) > 0
    assert all(0 < loss < 10 for loss in runs.losses(tmp_path / "run"))


def test_image_to_video_refuses_stills(built, cases, tmp_path):
    source = cases / "sets" / "mixed_image_video"

    def plan(name: str, buckets: list[str]):
        options = dict(data__buckets=buckets, stage="plan")
        made = runs.trainer(HunyuanVideoTrainer, built("hunyuan-i2v"), source, tmp_path / name, **options)
        made.run()
        return made.plan

    with pytest.raises(PlanError, match=r"data\.buckets: 1x64x96: leave it out, an image-to-video model is given"):
        plan("asked", [*BUCKETS, "1x64x96"])
    found = plan("left", BUCKETS)
    assert names(found.samples) == ["a.mp4", "b.mp4"] and [s.caption for s in found.samples] == ["moving", "moving too"]
    assert [row.split(": a still")[0] for row in found.left_out] == [str(source / f"still_{i}.png") for i in range(2)]
