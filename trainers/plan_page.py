"""plan.html: the plan as a page, with a contact sheet of what the network will really see.

The page needs nothing but itself, and runs nothing: pictures are data URIs, all text is escaped, and its own policy
forbids scripts. It is made at stage plan, and by any other run that does not find the page of its own plan.
"""

import base64
import hashlib
import html
import io
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from trainers.plan import PROBES, Picture, Plan, Sample, printable
from trainers.plan_report import bucket_rows, captions, totals
from trainers.precompute import image_of

NAME = "plan.html"
SHOWN = 200  # strips at most, at stage plan
SHOWN_AT_START = (
    24  # at the start of a run, which they must not hold up: a strip of 720p takes about a second to decode
)
PICTURES = 6  # in a strip, evenly from the first frame to the last
HEIGHT = 96  # of a picture, in pixels, at most
BYTES = 8_000_000  # of strips, after which none is added: browsers should open the page at once
ROWS = 5000  # of a list
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="plan" content="{digest}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #ccc; --soft: #666; --back: #fff; --text: #111 }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #444; --soft: #aaa; --back: #161616; --text: #eee }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  background: var(--back); color: var(--text) }}
table {{ border-collapse: collapse }}
th, td {{ border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
ul {{ padding-left: 1.2rem; overflow-wrap: anywhere }}
figure {{ margin: 1.2rem 0; border-top: 1px solid var(--line); padding-top: .6rem }}
figcaption {{ overflow-wrap: anywhere }}
img {{ max-width: 100% }}
.soft {{ color: var(--soft); font-size: 13px }}
.caption {{ white-space: pre-wrap }}
</style>
</head>
<body>
"""


def write(trainer) -> Path:
    """output_dir/plan.html, unless this is not stage plan and the page of this very plan is there."""
    plan, path = trainer.plan, trainer.output_dir / NAME
    title = f"plan of {trainer.config.run_name or trainer.output_dir.resolve().name}"
    head = HEAD.format(digest=digest(plan, title), title=text(title))
    if trainer.config.stage != "plan" and begins_with(path, head.encode()):
        return path
    page = head + "".join(body(plan, title, trainer))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{NAME}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def digest(plan: Plan, title: str) -> str:
    """SHA-256 of all that the page tells."""
    facts = [title, plan.buckets, plan.left_out, plan.bad, plan.notes, *(asdict(sample) for sample in plan.samples)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def begins_with(path: Path, head: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(head)) == head
    except FileNotFoundError:
        return False


def text(value: object) -> str:
    """Any text of others as HTML that shows it and does nothing else."""
    return html.escape(printable(str(value)))


def body(plan: Plan, title: str, trainer) -> Iterable[str]:
    yield f"<h1>{text(title)}</h1>\n<p>{text(totals(plan))}</p>\n"
    names = ("bucket (FxHxW)", "clips", "windows", "samples", "video tokens", "share of tokens")
    yield "<table>\n<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>\n"
    for bucket, clips, windows, samples, _, tokens, share in bucket_rows(plan, trainer.tokens, 1):
        cells = (bucket, clips, windows, samples, tokens, f"{share:.1%}")
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    yield "</table>\n<p>" + "<br>\n".join(map(text, captions(plan))) + "</p>\n"
    yield from listed("Cannot be read, left out", plan.bad)
    yield from listed("Left out", plan.left_out)
    yield from listed("Notes", plan.notes)
    yield from sheet(plan, SHOWN if trainer.config.stage == "plan" else SHOWN_AT_START)
    yield "</body>\n</html>\n"


def listed(title: str, rows: list[str]) -> Iterable[str]:
    if not rows:
        return
    more = f"<li>... and {len(rows) - ROWS} more</li>\n" if len(rows) > ROWS else ""
    items = "".join(f"<li>{text(row)}</li>\n" for row in rows[:ROWS])
    yield f"<h2>{title}: {len(rows)}</h2>\n<ul>\n{items}{more}</ul>\n"


# -- the contact sheet ------------------------------------------------------------------------------------------------


def sheet(plan: Plan, most: int) -> Iterable[str]:
    """A strip for each of at most `most` samples, evenly chosen over the buckets."""
    from tqdm import tqdm

    order = [i for at in plan.buckets.values() for i in sorted(set(at))]
    chosen = [plan.samples[order[k]] for k in evenly(len(order), most)]
    some = f", {len(chosen)} of {len(order)}, evenly chosen" if len(chosen) < len(order) else ""
    some += f" (up to {SHOWN} at --stage plan)" if some and most < SHOWN else ""
    yield f"<h2>What the network will see{some}</h2>\n"
    yield "<p class='soft'>After retiming, resizing and cropping; frames from the first to the last of a window.</p>\n"
    spent = 0
    with (
        ThreadPoolExecutor(PROBES) as pool,
        tqdm(total=len(chosen), desc=NAME, unit="strip", disable=None, leave=False) as bar,
    ):
        for sample, picture in zip(chosen, pool.map(strip, chosen), strict=True):
            bar.update()
            spent += len(picture)
            data = base64.b64encode(picture).decode()
            shown = f'<img alt="frames of {text(Path(sample.path).name)}" src="data:image/jpeg;base64,{data}">'
            yield figure(plan, sample, shown if spent <= BYTES else "<p class='soft'>(left out: the page is full)</p>")


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices below `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def strip(sample: Sample) -> bytes:
    """A few frames of a sample side by side as JPEG, none enlarged. The sample's first crop."""
    from PIL import Image

    frames, height, width = map(int, sample.bucket.split("x"))
    how = (height, width, sample.retime, sample.resize, sample.crops[0])
    small = (max(1, round(width * min(1, HEIGHT / height))), min(height, HEIGHT))
    pictures = [
        image_of(Picture(sample.path, sample.content, sample.start + k, *how)) for k in evenly(frames, PICTURES)
    ]
    joined = Image.new("RGB", (small[0] * len(pictures), small[1]))
    for k, picture in enumerate(pictures):
        joined.paste(
            picture if picture.size == small else picture.resize(small, Image.Resampling.BOX), (k * small[0], 0)
        )
    out = io.BytesIO()
    joined.save(out, "JPEG", quality=85)
    return out.getvalue()


def figure(plan: Plan, sample: Sample, shown: str) -> str:
    frames = sample.bucket.split("x")[0]
    about = [f"{sample.bucket} from frame {sample.start}", f"{sample.fps:g} fps" if frames != "1" else "a still"]
    about += ["retimed"] if sample.retime else []
    about += [sample.resize] if sample.resize != "cover" else []
    about += [f"the first of {len(sample.crops)} crops"] if len(sample.crops) > 1 else []
    about += [f"weight {sample.weight:g}"] if sample.weight != 1 else []
    prefix = f"{sample.path}: "
    about += [note.removeprefix(prefix) for note in plan.notes if note.startswith(prefix)]
    told = "".join(f'<div class="caption">{text(caption)}</div>\n' for caption in sample.captions)
    soft = f'<div class="soft">{text(sample.path)} [{text(sample.where)}]<br>\n{text(", ".join(about))}</div>'
    return f"<figure>\n{shown}\n<figcaption>\n{told}{soft}\n</figcaption>\n</figure>\n"
