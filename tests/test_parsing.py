"""Options as text: what YAML and the command line mean, what is refused in which words, that to_yaml repeats a run."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest

from data.buckets import Bucket
from data.sources import Source
from trainers import parsing
from trainers.config import (
    ComponentOptions,
    Config,
    DataOptions,
    Fraction,
    LoraOptions,
    OptionError,
    options,
    without_none,
)
from trainers.parsing import parse, read_options, to_yaml

ROOT = Path(__file__).parent.parent
NEEDED = ["--model", "org/name", "--data.train", "clips", "--data.buckets", "49x512x768"]


@dataclass
class OwnConfig(Config):
    """A model's Config: it adds an option and changes a default."""

    first_frame_p: Fraction = 0.1
    """How often the first frame is given."""
    data: DataOptions = field(default_factory=lambda: DataOptions(caption_technique="zero"))


def read(*argv: str, yaml: str | None = None, folder: Path | None = None) -> OwnConfig:
    """The options of `argv`, and of a my.yaml in `folder` if its text is given, over the needed ones."""
    if yaml is None:
        return parse(OwnConfig, [*NEEDED, *argv])
    (folder / "needed.yaml").write_text("{model: org/name, data: {train: clips, buckets: 49x512x768}}")
    (folder / "my.yaml").write_text(yaml, encoding="utf-8")
    return parse(OwnConfig, ["--config", str(folder / "needed.yaml"), str(folder / "my.yaml"), *argv])


def complaint(*argv: str, yaml: str | None = None, folder: Path | None = None) -> str:
    with pytest.raises(OptionError) as error:
        read(*argv, yaml=yaml, folder=folder)
    return str(error.value).replace(f"{folder}/", "")


def get(config: Config, name: str):
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


# -- what a value means -------------------------------------------------------------------------------------------

VALUES = [
    ("optimizer.learning_rate", "1e-4", 1e-4),
    ("optimizer.learning_rate", "2", 2.0),
    ("noise.mean", "-0.5", -0.5),
    ("noise.shift", "null", None),
    ("train.epochs", "None", None),
    ("train.max_samples", "none", None),
    ("run_name", "~", None),
    ("precompute_only", "null", None),
    ("precompute_only", "text", "text"),
    ("run_name", "123", "123"),
    ("run_name", "off", "off"),
    ("memory.vae_tiling", "off", "off"),
    ("memory.vae_tiling", "no", "off"),
    ("memory.vae_tiling", "true", "on"),
    ("data.precompute", "off", "off"),
    ("memory.compile", "none", "none"),
    ("memory.compile", "null", "none"),
    ("memory.checkpointing", "off", "none"),
    ("overwrite", "yes", True),
    ("overwrite", "on", True),
    ("validation.at_start", "off", False),
    ("validation.at_start", "no", False),
    ("validation.at_start", "False", False),
    ("report_to", "wandb", ["wandb"]),
    ("report_to", "none", []),
    ("lora.targets", "null", []),
    ("data.buckets", "1x32x64", [Bucket(1, 32, 64)]),
    ("components.vae.dtype", "fp32", "fp32"),
    ("components.vae.id", "other/vae", "other/vae"),
    ("components.vae.subfolder", "null", None),
    ("first_frame_p", "1", 1.0),
]


@pytest.mark.parametrize(("name", "text", "meaning"), VALUES)
def test_yaml_and_command_line_mean_the_same(name, text, meaning, tmp_path):
    section, _, leaf = name.rpartition(".")
    nested = f"{leaf}: {text}"
    for part in reversed(section.split(".") if section else []):
        nested = f"{part}: {{{nested}}}"
    for config in (
        read(f"--{name}", text),
        read(f"--{name}={text}"),
        read(f"--{name.replace('_', '-')}", text),
        read(yaml=nested, folder=tmp_path),
        read(yaml=f"{name}: {text}", folder=tmp_path),
    ):
        assert get(config, name) == meaning
        assert type(get(config, name)) is type(meaning)


def test_lists_and_tuples(tmp_path):
    config = read("--optimizer.betas", "0.8", "0.9", "--report_to", "wandb", "tensorboard", "--lora.targets", "q", "k")
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.report_to == ["wandb", "tensorboard"]
    assert config.lora.targets == ["q", "k"]
    config = read(yaml="optimizer: {betas: [0.8, 0.9]}\nreport_to: []\nlora: {targets: [q, 'k: 1']}", folder=tmp_path)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.report_to == []
    assert config.lora.targets == ["q", "k: 1"]


def test_flags():
    assert read("--overwrite").overwrite is True
    assert read("--overwrite", "--no_overwrite").overwrite is False
    assert read("--overwrite", "false").overwrite is False
    assert read("--no-validation.at-start").validation.at_start is False
    assert read("--validation.no_at_start").validation.at_start is False


def test_the_command_line_wins_over_files_and_later_files_over_earlier(tmp_path):
    (tmp_path / "a.yaml").write_text("lora: {rank: 1, alpha: 1, targets: [q, k]}\ntrain: {seed: 1}\n")
    (tmp_path / "b.yaml").write_text("lora:\n  rank: 2\n  alpha: 2\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--lora.rank", "3", "--config", str(tmp_path / "b.yaml")]
    config = read(*files, "--lora.targets", "v")
    assert config.lora == LoraOptions(rank=3, alpha=2.0, targets=["v"])  # a list replaces, it does not append
    assert config.train.seed == 1
    assert read("--config", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")).lora.rank == 2


def test_empty_sections_and_files_are_no_options(tmp_path):
    plain = read(yaml="run_name: null", folder=tmp_path)
    assert read(yaml="", folder=tmp_path) == plain
    assert read(yaml="# nothing\nlora:\ncomponents: null\ndata:\n  # buckets: 1x2x3\n", folder=tmp_path) == plain


def test_sources(tmp_path):
    text = """
    data:
      train:
        - clips/
        - {path: ../more, repeats: 3, caption_prefix: "BW: ", allow_empty_captions: yes}
        - path: /abs
          caption_column: null
    """
    config = read(yaml=text, folder=tmp_path)
    assert config.data.train == [
        Source(str(tmp_path / "clips")),
        Source(str(tmp_path.parent / "more"), repeats=3, caption_prefix="BW: ", allow_empty_captions=True),
        Source("/abs"),
    ]
    assert read(yaml="data: {train: {path: x, repeats: 2}}", folder=tmp_path).data.train == [
        Source(str(tmp_path / "x"), repeats=2)
    ]
    config = read("--data.train", "a", '{"path": "b", "repeats": 2}')
    assert config.data.train == [Source(str(Path.cwd() / "a")), Source(str(Path.cwd() / "b"), repeats=2)]
    text = "{path: x, weight: 0.5, buckets: [9x64x32, 1x32x32], repeats: 2}"
    (source,) = read(yaml=f"data: {{train: {text}}}", folder=tmp_path).data.train
    assert source == Source(str(tmp_path / "x"), 2, weight=0.5, buckets=("9x64x32", "1x32x32"))
    (source,) = read("--data.train", '{"path": "x", "weight": 2, "buckets": "9x64x32"}').data.train
    assert (source.weight, source.buckets) == (2.0, ("9x64x32",)) and isinstance(source.weight, float)
    found = complaint(yaml="data: {train: {path: x, weight: heavy, buckets: [9x64]}}", folder=tmp_path)
    assert "weight must be float, got 'heavy'" in found and "bucket '9x64': three whole numbers" in found


def test_a_source_on_the_hub_stays_as_it_is(tmp_path):
    (tmp_path / "clips").mkdir()
    text = "data: {train: [owner/name, {path: owner/other, split: train}, clips/none, owner/list.csv, ./owner/name]}"
    found = [source.path for source in read(yaml=text, folder=tmp_path).data.train]
    local = [str(tmp_path / path) for path in ("clips/none", "owner/list.csv", "owner/name")]
    assert found == ["owner/name", "owner/other", *local]


def test_relative_paths(tmp_path, monkeypatch):
    folder, here = tmp_path / "configs", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    (folder / "vae").mkdir()
    (here / "local").mkdir()
    monkeypatch.chdir(here)
    text = """
    model: org/name
    model_config: ./not-there
    components: {vae: {id: vae}, transformer: {id: org/other}}
    output_dir: ../runs/x
    data: {cache_dir: cache}
    validation: {prompts: p.txt}
    lora: {init_from: a.safetensors}
    checkpoint: {resume: latest}
    """
    config = read(yaml=text, folder=folder)
    assert config.model == "org/name"  # a Hub id: there is no such folder
    assert config.model_config == str(folder / "not-there")  # no Hub id starts with a dot
    assert config.components["vae"].id == str(folder / "vae")
    assert config.components["transformer"].id == "org/other"
    assert config.output_dir == str(tmp_path / "runs" / "x")
    assert config.data.cache_dir == str(folder / "cache")
    assert config.validation.prompts == str(folder / "p.txt")
    assert config.lora.init_from == str(folder / "a.safetensors")
    assert config.checkpoint.resume == "latest"
    config = read("--model", "local", "--checkpoint.resume", "run/checkpoint-5", "--output_dir", "~/out")
    assert config.model == str(here / "local")
    assert config.checkpoint.resume == str(here / "run" / "checkpoint-5")
    assert config.output_dir == str(Path.home() / "out")
    assert read().output_dir == str(here / "runs" / "reeltune")  # the default too


def test_a_model_changes_a_default():
    assert read().data.caption_technique == "zero"
    assert parse(Config, NEEDED).data.caption_technique == "empty"


# -- and back -----------------------------------------------------------------------------------------------------


def other(name: str, option) -> list[str]:
    """Words for a value that differs from the option's own."""
    kind = without_none(option.hint)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return [next(choice for choice in get_args(kind) if choice != option.value)]
    words = {bool: [str(not option.value)], int: ["7"], float: ["0.3"], str: ["yes: é"], list[str]: ["a.*", "#: [c]"]}
    exact = {
        "data.train": ["a", '{"path": "b c", "caption_prefix": "\'x\': #\\n"}'],
        "data.buckets": ["9x64x32", "1x32x32"],
        "data.resolution": ["512", "768"],
        "data.frames": ["1", "49"],
        "report_to": ["tensorboard"],
        "optimizer.betas": ["0.123456789", "1e-3"],
        "optimizer.epsilon": ["3e-17"],
    }
    return exact[name] if name in exact else words[kind]


def test_to_yaml_repeats_every_option(tmp_path, monkeypatch):
    monkeypatch.setattr(Config, "problems", lambda self: [])  # all options at once do not make sense
    known = dict(options(OwnConfig(components={"vae": ComponentOptions()})))
    config = parse(OwnConfig, [word for name in known for word in (f"--{name}", *other(name, known[name]))])
    for name, option in known.items():
        assert get(config, name) != option.value, name
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = parse(OwnConfig, ["--config", str(tmp_path / "config.yaml")])
    for name in known:
        assert get(again, name) == get(config, name), name
    assert again == config


def test_to_yaml_of_a_whole_run_from_another_folder(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(tmp_path)
    config = read(
        "--output_dir", "run", "--components.vae.dtype", "fp32", "--train.epochs", "2", "--first_frame_p", "0"
    )
    (run / "config.yaml").write_text(to_yaml(config))
    monkeypatch.chdir("/")
    assert parse(OwnConfig, ["--config", str(run / "config.yaml")]) == config


# -- what is refused ----------------------------------------------------------------------------------------------


def test_unknown_and_misplaced_options_are_all_named_with_the_nearest(tmp_path):
    text = """\
optimizer: {lr: 1e-4}
learning_rate: 1
train:
  learning_rate: 2
  seeed: 3
lora: 8
output_dir: {name: x}
"""
    assert complaint(
        "--lora_rank", "4", "--learning_rate=1", "--zzzz", "--grad-accum", "2", yaml=text, folder=tmp_path
    ) == (
        "10 problems:\n"
        '  - my.yaml line 1: unknown option "optimizer.lr"; nearest: optimizer.learning_rate\n'
        '  - my.yaml line 2: "learning_rate" belongs to the section optimizer: optimizer.learning_rate\n'
        '  - my.yaml line 4: "train.learning_rate" belongs to the section optimizer: optimizer.learning_rate\n'
        '  - my.yaml line 5: unknown option "train.seeed"; nearest: train.seed\n'
        '  - my.yaml line 6: "lora" is a section, not an option; it has lora.rank, lora.alpha, lora.targets, '
        "lora.exclude, lora.also_train, lora.dropout, lora.type, lora.init_from\n"
        '  - my.yaml line 7: "output_dir.name": output_dir is an option, not a section\n'
        "  - unknown option --lora_rank; nearest: --lora.rank\n"
        "  - --learning_rate belongs to the section optimizer: --optimizer.learning_rate\n"
        "  - unknown option --zzzz; --help lists all\n"
        "  - unknown option --grad_accum; nearest: --train.gradient_accumulation_steps"
    )
    assert complaint("--every", "3") == (
        "--every belongs to the section validation or the section checkpoint: --validation.every or --checkpoint.every"
    )
    assert (
        complaint("--components.vae.dtyp", "bf16")
        == "unknown option --components.vae.dtyp; nearest: --components.vae.dtype"
    )


def test_wrong_types_are_all_named_with_what_is_expected(tmp_path):
    text = "train: {steps: many, epochs: [1, 2]}\nnoise: {mean: null}\nloss: {type: l1}\noverwrite: perhaps\n"
    found = complaint(
        *("--lora.rank", "1.5", "--optimizer.betas", "0.9", "--report_to", "wandb", "comet", "--project", "a", "b"),
        *("--model_variant", "--data.buckets", "49x512", "--data.train", '{"path": "a", "repeat": 2}'),
        yaml=text,
        folder=tmp_path,
    )
    bucket = next(line for line in found.splitlines() if "--data.buckets" in line)
    source = next(line for line in found.splitlines() if "--data.train" in line)
    assert "49x512" in bucket
    assert "repeat" in source
    assert sorted(set(found.splitlines()) - {bucket, source}) == [
        '  - --lora.rank is "1.5", expected int 1 or more',
        '  - --model_variant is "", expected str, or null',
        '  - --optimizer.betas is "0.9", expected 2 of float in [0, 1)',
        '  - --project is "a b", expected str',
        '  - --report_to is "wandb comet", expected list of wandb, tensorboard',
        '  - my.yaml line 1: "train.epochs" is "1 2", expected float above 0, or null',
        '  - my.yaml line 1: "train.steps" is "many", expected int 1 or more, or null',
        '  - my.yaml line 2: "noise.mean" is "null", expected float finite',
        '  - my.yaml line 3: "loss.type" is "l1", expected one of mse, huber',
        '  - my.yaml line 4: "overwrite" is "perhaps", expected true or false',
        "12 problems:",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2", "my.yaml is not YAML"),
        ("- a\n- b", "my.yaml must hold a mapping of options"),
        ("just text", "my.yaml must hold a mapping of options"),
        ("lora: {rank: 1}\nlora.rank: 2", 'my.yaml line 2: "lora.rank" is given twice, see line 1'),
        ("lora: {targets: [q, [k]]}", 'my.yaml line 1: "lora.targets" must be one value or a list of values'),
        ("lora: {targets: [q, {k: v}]}", 'my.yaml line 1: "lora.targets" must be one value or a list of values'),
        ("lora:\n  targets:\n    - q\n    -\n", 'my.yaml line 2: "lora.targets" has an empty entry in its list'),
    ],
)
def test_bad_files(text, words, tmp_path):
    assert complaint(yaml=text, folder=tmp_path).startswith(words)


def test_stray_words_and_missing_files():
    with pytest.raises(OptionError, match=r'unexpected "my.yaml" before the first option; .* with --config'):
        parse(OwnConfig, ["my.yaml", *NEEDED])
    assert complaint("--config", "not-there.yaml") == "--config not-there.yaml: No such file or directory"
    assert complaint("--config") == "--config needs a file"


def test_scripts_end_with_code_2_and_no_traceback(capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        read_options(OwnConfig, [*NEEDED, "--loss.type", "l1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(': --loss.type is "l1", expected one of mse, huber\n')
    monkeypatch.setenv("LOCAL_RANK", "1")  # rank 0 has said it
    with pytest.raises(SystemExit):
        read_options(OwnConfig, [*NEEDED, "--loss.type", "l1"])
    assert capsys.readouterr().err == ""


# -- help and docs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["allow_empty_captions", "data.allow_empty_captions", "data.train.repeats"])
def test_what_belongs_to_a_source_is_told_so(name):
    with pytest.raises(OptionError, match=rf'--{name} belongs to an entry of data.train: .*"{name.split(".")[-1]}"'):
        parse(OwnConfig, [f"--{name}", "true"])


def test_help_names_every_option_with_its_help_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        read_options(OwnConfig, ["--lora.rank", "x", "--help"], description="launch me like this")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "launch me like this" in text
    assert "--config FILE" in text
    words = " ".join(text.replace("│", " ").split())
    for name, option in options(OwnConfig()):
        leaf = name.rpartition(".")[2]
        assert f"--{name} " in words
        assert parsing._help(option.owner)[leaf] in words, name
    assert "(default: 0.0001)" in words


def test_every_option_has_a_help_text():
    for name, option in options(OwnConfig(components={"vae": ComponentOptions()})):
        assert parsing._help(option.owner)[name.rpartition(".")[2]], name


def test_document_shows_what_a_model_adds_and_changes():
    text = parsing.document(OwnConfig, beyond=Config)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    dropped = 'What replaces a dropped caption: the encoding of "" or zeros.'
    assert rows == [
        "| `first_frame_p` | float in [0, 1] | `0.1` | How often the first frame is given. |",
        f'| `data.caption_technique` | one of empty, zero | `"zero"` | {dropped} |',
    ]


def test_docs_are_current():
    printed = subprocess.run(
        [sys.executable, "-m", "trainers.parsing"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    stale = "run: python -m trainers.parsing > docs/options.md"
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == printed, stale
