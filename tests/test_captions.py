"""Orders of tags, preambles, prefixes: which texts a clip is trained with."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import runs
from data.captions import prepare, strip_preamble, variants
from trainers.config import Config, DataOptions

ROOT = Path(__file__).parents[1]


# -- orders of tags -------------------------------------------------------------------------------------------------


def test_orders_differ_and_keep_the_first_tags():
    caption = "BW, 1girl, red, green, blue, grey"
    orders = variants(caption, 8, 2)
    assert len(set(orders)) == 8
    for order in orders:
        tags = order.split(", ")
        assert tags[:2] == ["BW", "1girl"] and sorted(tags[2:]) == ["blue", "green", "grey", "red"]
    assert variants(caption, 12, 2)[:8] == orders  # more orders keep those that are encoded already
    firsts = {order.split(", ")[0] for order in variants(caption, 100, 0)}
    assert firsts == {"BW", "1girl", "red", "green", "blue", "grey"}


@pytest.mark.parametrize(("caption", "keep", "tags"), [("a,b ,c", 0, 3), ("k, a, b,  c,", 1, 3), ("a, b", 0, 2)])
def test_all_orders_where_there_are_fewer_than_asked_for(caption, keep, tags):
    rest = [tag.strip() for tag in caption.strip(",").split(",")]
    every = {", ".join([*rest[:keep], *order]) for order in itertools.permutations(rest[keep:])}
    assert len(every) == {2: 2, 3: 6}[tags]
    assert set(variants(caption, 100, keep)) == every


def test_tags_that_are_the_same_are_no_new_order():
    assert sorted(variants("a, a, b", 100, 0)) == ["a, a, b", "a, b, a", "b, a, a"]
    assert variants("a,  a", 5, 0) == ("a,  a",)
    assert len(variants(", ".join("a" * 3000 + "b"), 5, 0)) == 5


@pytest.mark.parametrize("caption", ["", "one  tag", "kept ,one", " ,, "])
def test_a_caption_of_one_order_stays_as_it_is_written(caption):
    assert variants(caption, 5, 1) == (caption,)
    assert variants("b,a", 0, 0) == ("b,a",)


def test_every_process_gives_the_same_orders():
    """Not Python's own hash, which is another one in each process."""
    code = "from data.captions import variants; print(variants('a, b, c, d, \\u00e9', 3, 0))"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, env={"PYTHONHASHSEED": "7"})
    assert found.strip() == repr(variants("a, b, c, d, é", 3, 0))
    assert variants("a, b, c, d, é", 3, 0) == ("a, b, d, é, c", "é, c, b, d, a", "é, a, d, b, c")


# -- preambles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caption", "stripped"),
    [
        ("The video shows a red cat.", "A red cat."),
        ("This video depicts waves; the video shows foam.", "Waves; the video shows foam."),
        ("In this video, a man walks.", "A man walks."),
        ("In the short clip, we can see a dog.", "A dog."),
        ("In this image we see snow.", "Snow."),
        ("The image shows that it is late.", "It is late."),
        ("the footage captures élan", "Élan"),
        ("The video appears to show a fox", "A fox"),
        ("The scene opens with rain.", "Rain."),
        ("The video is a close-up of a hand.", "A close-up of a hand."),
        ("This is a short video of a horse.", "A horse."),
        ("Here is a description of the video: a train", "A train"),
        ("Here's a detailed caption for this clip:\n\nA boat.", "A boat."),
        ("Sure! Here is the prompt: The video shows a bee.", "A bee."),
        ("Certainly, here\u2019s a caption: 3 bees", "3 bees"),
        ("**Caption:** fog", "Fog"),
        ('The video features "STOP" signs', '"STOP" signs'),
        ("The video game shows a knight.", None),
        ("In this video game, a knight rides.", None),
        ("The videographer shows a card.", None),
        ("A cat. The video shows it twice.", None),
        ("The video shows off a car.", None),
        ("The image shows how it is made.", None),
        ("Here is a cat: it sleeps.", None),
        ("Sure, the man nods.", None),
        ("The video shows", None),
        ("The video shows ", None),
        ("iPhone on a table", None),
        ("", None),
    ],
)
def test_preambles(caption, stripped):
    assert strip_preamble(caption) == (caption if stripped is None else stripped)


# -- all of it ------------------------------------------------------------------------------------------------------


def test_the_prefix_stays_in_front_of_every_order():
    captions = ("BW, The video shows b, a", "BW, c")
    assert prepare(captions, "BW, ") == captions
    assert prepare(captions, "BW, ", strip=True) == ("BW, B, a", "BW, c")
    found = prepare(captions, "BW, ", tag_shuffle=4, strip=True)
    assert found[1::2] == ("BW, c", "BW, c")  # as often as the orders of the other caption
    assert sorted(found[::2]) == ["BW, B, a", "BW, a, B"]
    assert prepare(("",), "BW", 3, 1, True) == ("BW",)


def test_a_plan_trains_on_all_of_them(tiny_ltx, clips, tmp_path):
    """Captions of two columns, each in two orders, prefix in front; every one is encoded."""
    first = next(path for path in sorted(clips.rglob("*.mp4")))
    listing = tmp_path / "mine.csv"
    listing.write_text(f'file_name,short,long\n{first},"The video shows b, a","c"\n')
    source = {"path": str(listing), "caption_column": "short,long", "caption_prefix": "BW, "}
    changes = dict(data__tag_shuffle=3, data__strip_preamble="true", stage="precompute")
    made = runs.run(tiny_ltx, json.dumps(source), tmp_path / "run", **changes)
    (sample,) = made.plan.samples
    assert sorted(sample.captions) == ["BW, B, a", "BW, a, B", "BW, c", "BW, c"]
    assert {text.caption for text in made.encoders.texts} == {"", *sample.captions}
    assert made.encoders.missing()["captions"] == (0, 4)


def test_kept_tags_need_a_shuffle():
    found = Config(data=DataOptions(keep_tags=2)).problems()
    assert any("data.keep_tags 2" in text and "keep_tags 0" in text for text in found)
    shuffled = Config(data=DataOptions(keep_tags=2, tag_shuffle=4)).problems()
    assert not any("keep_tags" in text for text in shuffled)
