"""Prompts files for validation: read and checked before any model loads, every problem reported at once."""

import inspect
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path

import yaml

from data.buckets import Bucket, check_buckets

SHORT_NAMES = {
    "frames": "num_frames",
    "fps": "frame_rate",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "videos": "num_videos",
}
TEXT_FIELDS = ("prompt", "negative_prompt", "image")
WHOLE_FIELDS = {"height": 1, "width": 1, "num_frames": 1, "num_inference_steps": 1, "num_videos": 1, "seed": 0}
# Keywords of pipelines that the trainer gives, or that a text file cannot hold.
TRAINERS_OWN = re.compile(
    r"self|generator|latents|output_type|return_dict|num_videos_per_prompt|max_sequence_length|callback_\w+"
    r"|\w*_embeds\w*|\w*attention_mask\w*|conditions|video|\w*prompt_[23]|prompt_template|image_embed_interleave"
)
NULLS, TRUE, FALSE = ("null", "none", "~", ""), ("true", "yes", "on"), ("false", "no", "off")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class PromptError(ValueError):
    """A prompts file that cannot be used; the message lists all that is wrong with it."""


@dataclass(frozen=True)
class Prompt:
    """One entry of a prompts file. None leaves the value to the trainer's and then the pipeline's own default."""

    prompt: str
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    frame_rate: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    num_videos: int = 1
    """How many seeds, from `seed` upwards."""
    image: Path | None = None
    """First frame."""
    extra: dict = field(default_factory=dict)
    """Other keywords of the pipeline's call."""
    name: str = "000"
    """Unique, safe beginning of file names."""

    def keywords(self) -> dict:
        """What the entry says in the pipeline's keywords, without texts, image and seed."""
        names = ("height", "width", "num_frames", "frame_rate", "num_inference_steps", "guidance_scale")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None} | self.extra


OWN_KEYS = [f.name for f in fields(Prompt) if f.name not in ("extra", "name")]


def read_prompts(
    path: str | Path,
    pipeline_call: Callable,
    default_bucket: Bucket,
    config,
    image_call: Callable | None = None,
    frame_rule: tuple[int, int] = (1, 0),
    side_rule: int = 1,
    refuse_size: Callable[[int, int, int], str | None] | None = None,
) -> list[Prompt]:
    """The prompts of a .txt (one per line), .yaml, .yml or .json file, checked against the pipeline they are meant for.

    YAML is a list of texts or mappings, or {defaults: {...}, prompts: [...]}. `pipeline_call` is the `__call__` of the
    pipeline class, `image_call` that of the one for entries with an image (default: the same). A prompt without a size
    takes `default_bucket`, one without a seed config.train.seed. `frame_rule` (a, b): frames are a * k + b; height and
    width are multiples of `side_rule`; `refuse_size`(frames, height, width) may say why such a size is refused all the
    same. Raises PromptError with every problem of the file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"validation.prompts: {path} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"validation.prompts: {path} is not UTF-8 text ({error}); save it as UTF-8") from None
    problems: list[str] = []
    if path.suffix.lower() == ".txt":
        lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1)]
        entries = [(i, {"prompt": (i, line)}) for i, line in lines if line and not line.startswith("#")]
    elif path.suffix.lower() in (".yaml", ".yml", ".json"):
        entries = _yaml_entries(path, text, problems)
    else:
        raise PromptError(f"validation.prompts: {path} must end in .txt, .yaml, .yml or .json")
    if not entries and not problems:
        problems.append("it holds no prompts")
    prompts = []
    for index, (line, entry) in enumerate(entries):
        has_image = entry.get("image", (0, None))[1] is not None
        call = image_call if image_call and has_image else pipeline_call
        where = f"{path.name} line {line}"
        parameters = inspect.signature(call).parameters
        values = _checked(entry, path, parameters, problems)
        if not has_image and "image" in parameters and parameters["image"].default is inspect.Parameter.empty:
            problems.append(f"{where}: image is missing: this model's pipeline starts from a first frame")
        prompt = _prompt(values, where, index, default_bucket, config.train.seed, problems)
        if prompt:
            problems += _size_problems(prompt, where, frame_rule, side_rule)
            if refuse_size and (reason := refuse_size(prompt.num_frames, prompt.height, prompt.width)):
                problems.append(f"{where}: {reason}")
            prompts.append(prompt)
    if problems:
        unique = dict.fromkeys(problems)  # one in the defaults would be told for every entry
        raise PromptError(f"validation.prompts: {path} cannot be used:\n" + "\n".join(f"  {p}" for p in unique))
    return prompts


def _yaml_entries(path: Path, text: str, problems: list[str]) -> list[tuple[int, dict]]:
    """(line, {full key: (line, value)}) of each entry, the file's defaults filled in."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        problems.append(f"it is not YAML: {error}")
        return []
    defaults, listing = {}, root
    if isinstance(root, yaml.MappingNode):
        parts = {key.value: (key, value) for key, value in root.value}
        for name in parts.keys() - {"defaults", "prompts"}:
            problems.append(f"{_at(path, parts[name][0])}: {name!r}: a mapping here has only `defaults` and `prompts`")
        listing = parts.get("prompts", (None, None))[1]
        if "defaults" in parts:
            defaults = _mapping(path, parts["defaults"][1], problems) or {}
    if listing is None:
        return []
    if not isinstance(listing, yaml.SequenceNode):
        problems.append(f"{_at(path, listing)}: prompts must be a list (`- a prompt` or `- prompt: ...`)")
        return []
    entries = []
    for node in listing.value:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            entries.append((line, defaults | {"prompt": (line, node.value)}))
        elif (own := _mapping(path, node, problems)) is not None:
            entries.append((line, defaults | own))
    return entries


def _mapping(path: Path, node: yaml.Node, problems: list[str]) -> dict | None:
    if not isinstance(node, yaml.MappingNode):
        problems.append(f"{_at(path, node)}: must be a mapping of keywords, such as `prompt: ...`")
        return None
    found = {}
    for key, value in node.value:
        name = SHORT_NAMES.get(key.value, key.value)
        if name in found:
            problems.append(f"{_at(path, key)}: {name} is given twice")
        found[name] = (key.start_mark.line + 1, _value(value, as_text=name in TEXT_FIELDS))
    return found


def _value(node: yaml.Node, as_text: bool = False):
    """A YAML node as a person means it: 1e-3 is a number, what stands in quotes is text."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value) for key, value in node.value}
    text = node.value
    if node.style is not None:  # quoted or a block
        return text
    if text.lower() in NULLS:
        return None
    if as_text:
        return text
    if NUMBER.fullmatch(text):
        return float(text) if set(text) & set(".eE") else int(text)
    return True if text.lower() in TRUE else False if text.lower() in FALSE else text


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path.name} line {node.start_mark.line + 1}"


def _checked(entry: dict, path: Path, parameters, problems: list[str]) -> dict:
    """The entry's usable values by full key; the others become problems."""
    extras = [p for p in parameters if not TRAINERS_OWN.fullmatch(p) and p not in OWN_KEYS]
    values = {}
    for key, (line, value) in entry.items():
        where = f"{path.name} line {line}: {key}"
        problem = ""
        if key in ("prompt", "negative_prompt"):
            if value is not None and not isinstance(value, str):
                problem = "must be text"
        elif key == "image":
            if isinstance(value, str):
                value = path.parent / value
                problem = _image_problem(value, parameters)
            elif value is not None:
                problem = "must be the path of one image"
        elif value is None and key in OWN_KEYS:
            continue  # null: the default
        elif key in WHOLE_FIELDS:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1:
                problem = f"must be a whole number, not {value!r}"
            elif not WHOLE_FIELDS[key] <= value < 2**62:
                problem = f"must be {WHOLE_FIELDS[key]} or more, not {value}"
            else:
                value = int(value)
        elif key in ("frame_rate", "guidance_scale"):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                problem = f"must be a number, not {value!r}"
            elif key == "frame_rate" and value <= 0:
                problem = f"must be above 0, not {value}"
        elif key in extras:
            problem = _type_problem(value, parameters[key])
        elif key in parameters and TRAINERS_OWN.fullmatch(key):
            problem = "is given by the trainer and cannot be set here"
            problem += "; use num_videos" if key == "num_videos_per_prompt" else ""
        else:
            near = get_close_matches(key, [*OWN_KEYS, *SHORT_NAMES, *extras], n=1)
            problem = "is no keyword of the pipeline" + (f"; did you mean {near[0]}?" if near else "")
        if problem:
            problems.append(f"{where} {problem}")
        else:
            values[key] = value
    return values


def _image_problem(path: Path, parameters) -> str:
    if "image" not in parameters:
        return "is not supported: this model's pipeline takes no first frame"
    try:
        load_image(path)
    except FileNotFoundError:
        return f"{path} does not exist"
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError for broken PNG chunks
        return f"{path} is not a readable image ({error})"
    return ""


def _type_problem(value, parameter: inspect.Parameter) -> str:
    default = parameter.default
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else f"must be true or false, not {value!r}"
    if not isinstance(default, (int, float)) or isinstance(value, (int, float)):
        return ""
    is_list = isinstance(value, list) and "list" in str(parameter.annotation).lower()
    return "" if is_list else f"must be a number, not {value!r}"


def _prompt(values: dict, where: str, index: int, bucket: Bucket, seed: int, problems: list[str]) -> Prompt | None:
    text = (values.get("prompt") or "").strip()
    if not text:
        problems.append(f"{where}: the prompt is missing or empty")
        return None
    if ("height" in values) != ("width" in values):
        problems.append(f"{where}: give both height and width, or neither")
        return None
    size = {"num_frames": bucket.frames, "height": bucket.height, "width": bucket.width}
    own = {k: v for k, v in values.items() if k in OWN_KEYS} | {"prompt": text}
    extra = {k: v for k, v in values.items() if k not in OWN_KEYS}
    return Prompt(**{"seed": seed} | size | own, extra=extra, name=safe_name(index, text))


def _size_problems(prompt: Prompt, where: str, frame_rule: tuple[int, int], side_rule: int) -> list[str]:
    try:
        check_buckets([Bucket(prompt.num_frames, prompt.height, prompt.width)], frame_rule, side_rule)
    except ValueError as error:
        return [f"{where}: {str(error).splitlines()[-1].strip()}"]  # below a heading about buckets
    return []


def safe_name(index: int, text: str) -> str:
    """A short ASCII file name for any text; the index keeps it unique."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain)[:60].strip("-")
    return f"{index:03d}-{slug}" if slug else f"{index:03d}"


def load_image(path: Path):
    """The image upright, as RGB PIL image."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
