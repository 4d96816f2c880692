"""Options from text and back: defaults <- YAML files <- command line, then to_yaml, which repeats a run.

YAML scalars are taken as plain text and, like the words of the command line, converted by tyro, so both mean the same.
`python -m trainers.parsing` prints docs/options.md.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import sys
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml

from data.buckets import Bucket
from data.hub import is_hub_id
from data.sources import Source
from trainers.config import (
    DEFAULT_STEPS,
    ComponentOptions,
    Config,
    Option,
    OptionError,
    Place,
    options,
    refuse,
    without_none,
)

NONE, YES, NO = ("none", "null", "~"), ("true", "yes", "on", "1"), ("false", "no", "off", "0")
AnyConfig = TypeVar("AnyConfig", bound=Config)


class Given(NamedTuple):
    """An option as somebody wrote it. A value of None is a bare null of YAML."""

    name: str
    values: list[str | None]
    place: str = ""
    """File and line; empty for the command line."""
    folder: Path = Path()
    """What relative paths are relative to."""

    def __str__(self) -> str:
        return f'{self.place}: "{self.name}"' if self.place else f"--{self.name}"


def read_options(config_class: type[AnyConfig], argv: list[str] | None = None, description: str = "") -> AnyConfig:
    """`parse` for scripts: bad options are told on stderr, once per machine, and end the process with code 2."""
    try:
        return parse(config_class, argv, description)
    except OptionError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(config_class: type[AnyConfig], argv: list[str] | None = None, description: str = "") -> AnyConfig:
    """The options in `argv` (default: of this process), checked, with every path absolute.

    Raises OptionError that lists all that is wrong: first what cannot be read, then what does not fit together.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        example = dataclasses.replace(config_class(), components={"NAME": ComponentOptions()})
        config = "--config FILE [FILE ...] reads options from YAML files; later files, and the command line, win."
        _tyro(example, ["--help"], description=f"{description}\n\n{config}".strip())
    problems: list[str] = []
    words = _from_command_line(argv, problems)
    files = [path for option in words if option.name == "config" for path in option.values]
    given = [option for path in files for option in _from_yaml(config_class, path, problems)]
    given += [option for option in words if option.name != "config"]

    named = {
        part[1] for part in (option.name.split(".") for option in given) if part[0] == "components" and len(part) == 3
    }
    defaults = dataclasses.replace(config_class(), components={name: ComponentOptions() for name in sorted(named)})
    known = dict(options(defaults))
    # A later file or the command line replaces, lists too. Default paths are relative to the working directory.
    last = {name: Given(name, [option.value]) for name, option in known.items() if option.value and _place(option.hint)}
    for option in (_negated(option, known) for option in given):
        if option.name in known:
            last[option.name] = option
        else:
            problems.append(_unknown(option, known))
    tokens = {name: _tokens(option, known[name]) for name, option in last.items()}
    config = _readable(defaults, tokens)
    if config is None:
        problems += [_wrong(last[name], known[name]) for name in _unreadable(defaults, tokens)]
    refuse(problems)
    config.check()
    if config.train.steps is config.train.epochs is config.train.max_samples is None:
        config.train.steps = DEFAULT_STEPS
    return config


# -- from text ----------------------------------------------------------------------------------------------------


def _from_command_line(argv: list[str], problems: list[str]) -> list[Given]:
    found: list[Given] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append(Given(name.replace("-", "_"), [value] if equals else []))
        elif found:
            found[-1].values.append(word)
        else:
            problems.append(f'unexpected "{word}" before the first option; files of options are given with --config')
    problems += ["--config needs a file" for option in found if option.name == "config" and not option.values]
    return found


def _from_yaml(config_class: type[Config], path: str, problems: list[str]) -> list[Given]:
    """The options of one file. Nodes instead of values: they know their line, and their text as it was written."""
    try:
        root = yaml.compose(Path(path).read_text("utf-8-sig"), Loader=yaml.BaseLoader)
    except OSError as error:
        problems.append(f"--config {path}: {error.strerror}")
        return []
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(f"{path} is not YAML: {error}")
        return []
    known = dict(options(config_class()))
    sections = {name[:end] for name in known for end, letter in enumerate(name) if letter == "."}
    found: dict[str, Given] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        for key, value in node.value:
            place = f"{path} line {key.start_mark.line + 1}"
            name = f"{prefix}{key.value}".replace("-", "_")
            takes_mappings = name in known and known[name].hint == list[Source]
            several = isinstance(value, yaml.SequenceNode)
            items = value.value if several else [value]
            if isinstance(value, yaml.MappingNode) and not takes_mappings:
                walk(value, f"{name}.")
            elif name in found:
                problems.append(f'{place}: "{name}" is given twice, see line {found[name].place.split()[-1]}')
            elif not all(isinstance(item, yaml.ScalarNode) or takes_mappings for item in items) or any(
                isinstance(item, yaml.SequenceNode) for item in items
            ):
                problems.append(f'{place}: "{name}" must be one value or a list of values')
            elif twice := [key for item in items for key in _repeated(item)]:
                problems.append(f'{place}: "{name}" gives {", ".join(twice)} twice in one entry')
            elif several and any(map(_is_null, items)):
                problems.append(f'{place}: "{name}" has an empty entry in its list')
            elif not (
                _is_null(value) and (name in sections or (name.startswith("components") and name.count(".") < 2))
            ):
                found[name] = Given(name, [_text(item) for item in items], place, Path(path).parent)

    if isinstance(root, yaml.MappingNode):
        walk(root, "")
    elif root is not None:
        problems.append(f"{path} must hold a mapping of options, such as model: Lightricks/LTX-Video")
    return list(found.values())


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() in ("", "null", "~")


def _repeated(node: yaml.Node) -> list[str]:
    """The keys that a mapping has more than once, which plain YAML would pass over."""
    keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    return sorted({key for key in keys if keys.count(key) > 1}, key=keys.index)


def _text(node: yaml.Node) -> str | None:
    """A scalar as text, anything else (an item of data.train) as JSON with the types of Source's fields."""
    if isinstance(node, yaml.ScalarNode):
        return None if _is_null(node) else node.value
    hints = get_type_hints(Source)

    def typed(key: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [typed("", item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {inner.value: typed("", item) for inner, item in node.value}
        value = _text(node)
        if hints.get(key) is bool and value is not None:
            return {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}.get(value.lower(), value)
        if hints.get(key) in (int, float) and value is not None:
            with contextlib.suppress(ValueError):  # Source says what is wrong with it
                return hints[key](value)
        return value

    return json.dumps({key.value: typed(key.value, value) for key, value in node.value})


def _negated(given: Given, known: dict[str, Option]) -> Given:
    """`--no_overwrite`, `--data.no_strip_preamble` and `--no_data.strip_preamble` as the option set to false."""
    section, dot, leaf = given.name.rpartition(".")
    for name in (given.name.removeprefix("no_"), section + dot + leaf.removeprefix("no_")):
        if name != given.name and name in known and known[name].hint is bool and not given.values:
            return given._replace(name=name, values=["false"])
    return given


def _tokens(given: Given, option: Option) -> list[str]:
    """The words that tyro reads: null, true and false in its own spelling, paths made absolute."""
    hint = without_none(option.hint)
    kind, values = _bare(hint), given.values
    if kind is bool and not values:
        values = ["true"]
    if get_origin(kind) is list:
        if len(values) == 1 and (values[0] is None or values[0].lower() in NONE):
            values = []
        hint, kind = get_args(kind)[0], _bare(get_args(kind)[0])
    place = _place(hint)

    def word(text: str | None) -> str | None:
        low = "null" if text is None else text.lower()
        if low in NONE and without_none(option.hint) is not option.hint:
            return "None"
        if kind is bool:
            return "True" if low in YES else "False" if low in NO else text
        if get_origin(kind) is Literal and text not in get_args(kind):
            meant = ("off", "none") if low in NO + NONE else ("on",) if low in YES else ()
            return next((choice for choice in meant if choice in get_args(kind)), text)
        if text and kind is Source:
            return (_located if text.lstrip().startswith("{") else _source)(text, given.folder)
        if text and place:
            return place.absolute(text, given.folder)
        return text

    words = [text for text in map(word, values) if text is not None]  # a null too many is a value too few
    return [f"--{given.name}={words[0]}"] if len(words) == 1 else [f"--{given.name}", *words]


def _place(hint: Any) -> Place | None:
    return next((mark for mark in getattr(without_none(hint), "__metadata__", ()) if isinstance(mark, Place)), None)


def _source(path: str, folder: Path) -> str:
    return path if is_hub_id(path, folder) else Place().absolute(path, folder)


def _located(source: str, folder: Path) -> str:
    """A JSON source with its path made absolute; Source.parse explains what is wrong with a bad one."""
    try:
        mapping = json.loads(source)
    except json.JSONDecodeError:
        return source
    if isinstance(mapping.get("path"), str) and mapping["path"]:
        mapping["path"] = _source(mapping["path"], folder)
    return json.dumps(mapping)


def _tyro(defaults: AnyConfig, words: list[str], **more: str) -> AnyConfig:
    """tyro's reading of `words`. Raises SystemExit for words that it cannot read, and after printing --help."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def from_text(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type not in (Bucket, Source):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="FRAMESxHEIGHTxWIDTH" if info.type is Bucket else "PATH|JSON",
            instance_from_str=lambda words: info.type.parse(words[0]),
            is_instance=lambda value: isinstance(value, info.type),
            str_from_instance=lambda value: [str(value)],
        )

    flags = (tyro.conf.FlagConversionOff,)
    return tyro.cli(
        type(defaults), default=defaults, args=words, use_underscores=True, config=flags, registry=registry, **more
    )


def _readable(defaults: AnyConfig, tokens: dict[str, list[str]]) -> AnyConfig | None:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        return _tyro(defaults, [word for words in tokens.values() for word in words])
    return None


def _unreadable(defaults: AnyConfig, tokens: dict[str, list[str]]) -> list[str]:
    """The options that tyro cannot read, found by halving: it names only the first, and takes its time."""
    if _readable(defaults, tokens) is not None:
        return []
    names = list(tokens)
    if len(names) == 1:
        return names
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    return [name for half in halves for name in _unreadable(defaults, {name: tokens[name] for name in half})]


# -- what is wrong ------------------------------------------------------------------------------------------------


def _wrong(given: Given, option: Option) -> str:
    kind = _bare(option.hint)
    if kind in (list[Source], list[Bucket]):
        reasons = []
        for value in given.values:
            try:
                get_args(kind)[0].parse(value or "")
            except ValueError as error:
                reasons.append(str(error))
        return f"{given}: {'; '.join(reasons)}"
    values = " ".join("null" if value is None else value for value in given.values)
    return f'{given} is "{values}", expected {_kind(option.hint)}'


def _unknown(given: Given, known: dict[str, Option]) -> str:
    dashes = "" if given.place else "--"
    section, _, leaf = given.name.rpartition(".")
    if leaf in {field.name for field in dataclasses.fields(Source)} and section in ("", "data", "data.train"):
        return f'{given} belongs to an entry of data.train: {{"path": "clips/", "{leaf}": ...}} (docs/data.md)'
    if section in known:
        return f"{given}: {section} is an option, not a section"
    inside = [name for name in known if name.startswith(f"{given.name}.")]
    if inside:
        return f"{given} is a section, not an option; it has {', '.join(dashes + name for name in inside)}"
    homes = [name for name in known if name.rpartition(".")[2] == leaf and not name.startswith("components.")]
    if homes and (not section or len(homes) == 1):
        where = [f"the section {name.rpartition('.')[0]}" if "." in name else "no section" for name in homes]
        return f"{given} belongs to {' or '.join(where)}: {' or '.join(dashes + name for name in homes)}"

    def likeness(name: str) -> float:
        home, _, other = name.rpartition(".")
        parts, others = leaf.split("_"), other.split("_")
        abbreviates = leaf == "".join(part[0] for part in others) or (
            len(parts) == len(others[: len(parts)]) and all(map(str.startswith, others, parts))
        )
        words = SequenceMatcher(None, leaf, other).ratio()
        whole = SequenceMatcher(None, given.name.replace(".", "_"), name.replace(".", "_")).ratio()
        return max(0.9 * abbreviates, words, whole) + 0.2 * (home == section != "")

    nearest = max(known, key=likeness)
    advice = f"nearest: {dashes}{nearest}" if likeness(nearest) > 0.6 else "--help lists all"
    return (
        f'{given.place}: unknown option "{given.name}"; {advice}'
        if given.place
        else f"unknown option {given}; {advice}"
    )


# -- back to text -------------------------------------------------------------------------------------------------


def to_yaml(config: Config) -> str:
    """All options as YAML; as `--config` it gives an equal Config from anywhere."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if isinstance(value, Bucket):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _bare(hint: Any) -> Any:
    """A type without None, Rule and Place."""
    hint = without_none(hint)
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _kind(hint: Any) -> str:
    """A type in words."""
    kind = _bare(hint)
    names = {Bucket: "FRAMESxHEIGHTxWIDTH", Source: "path or mapping", bool: "true or false"}
    if get_origin(kind) is Literal:
        text = "one of " + ", ".join(get_args(kind))
    elif get_origin(kind) is list:
        text = f"list of {_kind(get_args(kind)[0]).removeprefix('one of ')}"
    elif get_origin(kind) is tuple:
        text = f"{len(get_args(kind))} of {_kind(get_args(kind)[0])}"
    else:
        text = names.get(kind, kind.__name__)
    for mark in getattr(without_none(hint), "__metadata__", ()):
        if isinstance(mark, Place):
            text = " or ".join([*mark.words, *["Hub id"] * mark.or_hub, *["URL"] * mark.or_url, "path"])
        else:
            text += f" {mark.words}"
    return text if without_none(hint) is hint else f"{text}, or null"


def document(config_class: type[Config], beyond: type[Config] | None = None) -> str:
    """Markdown tables of the options of a Config, one per section; only those that differ from `beyond`, if given."""
    example = {"NAME": ComponentOptions()}
    base = dict(options(dataclasses.replace(beyond(), components=example))) if beyond else {}
    tables: dict[str, list[str]] = {}
    for name, option in options(dataclasses.replace(config_class(), components=example)):
        section, _, leaf = name.rpartition(".")
        if name not in base or base[name].value != option.value:
            default = json.dumps(_plain(option.value), ensure_ascii=False)
            why = _help(config_class).get(section, "")  # a model's reason to change the section
            help_text = f"{_help(option.owner)[leaf]} {why}".strip()
            cells = [f"`{name}`", _kind(option.hint), f"`{default}`", help_text]
            tables.setdefault(section, []).append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    head = ["| option | type | default | |", "|---|---|---|---|"]
    order = sorted(tables, key=bool)  # the options of no section first
    return "\n\n".join("\n".join(([f"### {key}", ""] if key else []) + head + tables[key]) for key in order) + "\n"


def _help(owner: type) -> dict[str, str]:
    """The string under each field of a dataclass and of what it derives from."""
    found: dict[str, str] = {}
    for cls in (cls for cls in reversed(owner.__mro__) if dataclasses.is_dataclass(cls)):
        body = ast.parse(dedent(inspect.getsource(cls))).body[0].body
        for line, below in pairwise(body):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[line.target.id] = " ".join(below.value.value.split())
    return found


def page() -> str:
    """docs/options.md: the shared options, and per trainer what it adds or changes."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        importlib.import_module(f"trainers.{file.stem}")
    text = (
        "# Options\n\n`data.train` in YAML is `data: {train: ...}`, on the command line `--data.train ...`; "
        "the command line wins over `--config` files, and later files over earlier ones. Relative paths are relative "
        "to the file they stand in.\n\nThis page is printed by `python -m trainers.parsing`.\n\n" + document(Config)
    )
    for cls in Config.__subclasses__():
        if cls.__module__.startswith("trainers."):
            script = cls.__module__.replace("trainers.", "train_")
            text += f"\n## {script}.py\n\n{document(cls, beyond=Config)}"
    return text


if __name__ == "__main__":
    sys.stdout.write(page())
