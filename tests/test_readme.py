"""What the documents say is true: every command, link, option, file name and code block in them, run or checked."""

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import runs
from data.sources import Source
from runs import LORA
from trainers.config import OptionError, options
from trainers.ltx import LTXConfig, LTXTrainer
from trainers.parsing import parse

pytestmark = pytest.mark.usefixtures("libraries")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# Options of accelerate, torchrun, Slurm and models.export that the pages mention.
FOREIGN = {"config", "config_file", "num_processes", "signal", "help", "to", "base", "out"}
FOREIGN |= {"num_machines", "machine_rank", "main_process_ip", "main_process_port", "nproc_per_node", "nodes", "gpus"}
FOREIGN |= {"parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"}
FOREIGN |= {"minutes", "cases", "cpu"}  # of benchmarks/gpu_smoke.py
FOREIGN |= {"repo", "older", "larger", "dry"}  # of hf download and of python -m data.cache
TRAINERS = runs.trainers_by_name()
OPTIONS = {name: kind.Config for kind in TRAINERS.values() for name, _ in options(kind.Config())}
SECTIONS = {name.split(".")[0] for name in OPTIONS if "." in name}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def commands(page: Path) -> list[str]:
    """The commands of its ```bash blocks, one a line, without comments."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if shlex.split(line, comments=True)]


def launched(command: str) -> tuple[type, list[str]]:
    """The trainer and the words for its script in a command that launches, which is checked up to there."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    words = [word for word in shlex.split(command) if not re.match(r"[A-Z][A-Z0-9_]*=", word)]
    if words[0] == "sbatch":  # whose script passes the rest to accelerate launch
        at = words.index("examples/slurm.sh")
        words = ["accelerate", "launch", *words[at + 1 :]]
    if words[0] == "torchrun":
        arguments = get_args_parser().parse_args(words[1:])
        arguments.config_file = None
    else:
        assert words[:2] == ["accelerate", "launch"], "a kind of command that this test does not know"
        arguments = launch_command_parser().parse_args(words[2:])
    assert (ROOT / arguments.training_script).is_file()
    assert arguments.config_file is None or (ROOT / arguments.config_file).is_file()
    trainer = TRAINERS[arguments.training_script.removeprefix("train_").removesuffix(".py")]
    return trainer, [word for word in arguments.training_script_args if word != "..."]


ALL = [pytest.param(page, command, id=f"{page.stem}: {command[:60]}") for page in PAGES for command in commands(page)]


# -- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "command"), ALL)
def test_commands(page, command, clips, tmp_path, monkeypatch):
    """make has the target, pip the extra, python the module; what is launched parses, its own paths as they are."""
    words = shlex.split(command)
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        for target in words[1:]:
            assert re.search(rf"^\.PHONY:.*\b{target}\b", (ROOT / "Makefile").read_text(), re.M)
            subprocess.run(["make", "-n", target], check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        assert words[2] == "-e" and re.fullmatch(r"\.(\[[a-z]+\])?", words[3]) and len(words) == 4
        assert words[3][2:-1] in ("", *re.findall(r'^        "(\w+)": ', (ROOT / "setup.py").read_text(), re.M))
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2])
    elif words[0] == "python":
        told = subprocess.run([sys.executable, *words[1:], "--list"], check=True, capture_output=True, text=True)
        assert told.stdout.startswith("LoRA\n")
    else:
        trainer, given = launched(command)
        if "--data.train" not in given:
            given += ["--data.train", str(clips)]
        assert parse(trainer.Config, given).data.buckets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", page.read_text(), re.M)) <= set(targets)


def test_there_are_commands_to_check():
    assert [sum(param.values[0].name == name for param in ALL) for name in ("README.md", "quickstart.md")] == [5, 2]
    assert all(os.access(ROOT / file, os.X_OK) for file in (".ci/run",))


def test_the_picture_in_the_readme_is_a_command(clips):
    """The first block shows a folder on the left and a command, with what it ends with, on the right."""
    picture = re.search(r"^```\n(my-clips/.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    right = [
        line[len("my-clips/") :].strip() if line.startswith("my-clips/") else line for line in picture.splitlines()
    ]
    right[1:] = [re.sub(r"^\s*\S+\.mp4\s+\S+\.txt\s+", "", line) for line in right[1:]]
    command = " ".join(line.rstrip("\\").strip() for line in right)
    config = parse(LTXConfig, launched(command)[1])
    assert config.output_dir.endswith("runs/rabbit") and config.data.train[0].path.endswith("my-clips")


# -- options, links, names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist_and_take_the_values_shown(page, clips):
    text = page.read_text()
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z_]*(?:\.[a-z_]+)*)", text)) - FOREIGN
    if page.name != "CONTRIBUTING.md":  # which also speaks of ruff and pytest
        named = {name for name in named if not name.startswith("components.")}  # of which there may be any
        assert named <= OPTIONS.keys(), f"no such options: {sorted(named - OPTIONS.keys())}"
    quoted = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?:: ([^`{{}}]+))?`", text)
    tops = re.findall(r"`(method|model|stage|report_to|first_frame_p): ([^`{}\[\]]+)`", text)
    base = ["--model", "x/y", "--data.train", str(clips), "--data.buckets", "9x64x96"]
    for name, value in quoted + tops:
        if (ROOT / name.replace(".", "/")).exists() or name.endswith(".py"):
            continue
        assert name in OPTIONS or name.startswith("components."), f"{name} in {page.name} is no option"
        if value and value.isascii() and value not in ("FILE",):
            try:
                parse(OPTIONS.get(name, LTXConfig), [*base, f"--{name}", value])
            except OptionError as error:  # it may need another option beside it, but must be one of its values
                assert not re.search("expected|unknown|must be", str(error)), f"{name}: {value} in {page.name}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = set(re.findall(r"(?<![\w/.])((?:trainers|models|data|tests|configs|examples|docs|\.ci)/[\w./]*\w)", text))
    made_up = {"trainers/mochi.py"}  # the worked example of docs/new_model.md
    assert sorted(path for path in paths - made_up if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_compiles(page):
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict)


def test_prompts_of_the_quick_start(tiny_ltx, clips, tmp_path):
    from PIL import Image

    (block,) = blocks(ROOT / "docs" / "quickstart.md", "yaml")
    (tmp_path / "prompts.yaml").write_text(block)
    Image.new("RGB", (96, 64)).save(tmp_path / "first_frame.png")
    made = runs.run(tiny_ltx, clips, tmp_path / "run", stage="plan", validation__prompts=tmp_path / "prompts.yaml")
    first, second = made.validation.prompts
    assert first.prompt == "a rabbit waves from a meadow" and (first.height, first.width) == (64, 96)
    assert (first.num_inference_steps, first.guidance_scale, first.seed) == (40, 3.0, 1)
    assert (second.num_frames, second.height, second.width) == (49, 512, 768)
    assert second.image == tmp_path / "first_frame.png" and second.seed == 1


def test_sources_of_the_data_page(tmp_path):
    page = ROOT / "docs" / "data.md"
    (block,) = blocks(page, "yaml")
    (tmp_path / "my.yaml").write_text(block)
    config = parse(LTXConfig, ["--config", str(tmp_path / "my.yaml"), "--model", "x/y"])
    clips, more, cats, hub = config.data.train
    assert clips == Source(str(tmp_path / "clips"))
    prefixed = dict(repeats=3, caption_prefix="BW_STYLE, ", caption_column="short,long", buckets=("1x512x768",))
    assert more == Source(str(tmp_path / "more" / "metadata.csv"), **prefixed)
    assert cats == Source(str(tmp_path / "cats"), weight=0.5)
    assert hub == Source("owner/name", split="train", revision="main", clip_column="video")
    assert [str(bucket) for bucket in config.data.buckets] == ["49x512x768", "49x768x512", "1x512x768"]
    (line,) = re.findall(r"`(--data\.train [^`]*)`", page.read_text())
    config = parse(LTXConfig, [*shlex.split(line), "--model", "x/y", "--data.buckets", "9x64x96"])
    assert [source.repeats for source in config.data.train] == [1, 3]


# -- the README's run ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rabbit(tiny_ltx, clips, tmp_path_factory):
    """The README's GPU commands, in order, with the tiny model and small sizes; (output_dir, what each printed)."""
    root = tmp_path_factory.mktemp("readme")
    swap = {"my-clips/": str(clips), "runs/rabbit": str(root / "rabbit")}
    (root / "prompts.txt").write_text("a rabbit\n")
    small = ["--model", tiny_ltx, "--data.buckets", "17x64x96", "9x96x64", "--train.steps", "2", "--lora.rank", "4"]
    small += ["--validation.prompts", root / "prompts.txt", "--validation.num_inference_steps", "2"]
    printed = []
    for command in [c for c in commands(ROOT / "README.md") if c.startswith("accelerate")]:
        words = [swap.get(word, word) for word in launched(command)[1]]
        assert len([word for word in words if word in swap.values()]) == 2
        words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
        runs.fresh_state()
        with contextlib.redirect_stdout(io.StringIO()) as lines:
            LTXTrainer.main([*words, *map(str, small)])
        printed.append(lines.getvalue())
    return root / "rabbit", printed


def test_readme_run(rabbit, tiny_ltx):
    run, (plan, train) = rabbit
    assert "7 to encode" in plan and "saved" not in plan  # it prints and stops
    assert "done: " in train and len(load_file(run / LORA)) == 32
    again = [c for c in commands(ROOT / "README.md") if c.startswith("accelerate")][1]
    assert parse(LTXConfig, launched(again)[1]).checkpoint.resume == "latest"


def execute(block: str, swap: dict[str, str]) -> dict:
    """Runs a python block with texts replaced; its names afterwards."""
    for old, new in swap.items():
        assert old in block
        block = block.replace(old, new)
    names: dict = {}
    exec(compile(block, "block", "exec"), names)
    return names


def test_readme_python(rabbit, tiny_ltx):
    run, _ = rabbit
    (block,) = blocks(ROOT / "README.md", "python")
    swap = {"Lightricks/LTX-Video": str(tiny_ltx), '.to("cuda")': "", "runs/rabbit": str(run)}
    check_pipe(execute(block, swap)["pipe"], run)


def test_model_card_python(rabbit, tiny_ltx):
    run, _ = rabbit
    (block,) = blocks(run / "README.md", "python")
    swap = {"PATH_OR_ID_OF_THE_BASE_MODEL": str(tiny_ltx), '.to("cuda")': "", "THIS_REPOSITORY_OR_FOLDER": str(run)}
    check_pipe(execute(block, swap)["pipe"], run)
    assert str(tiny_ltx.parent) not in (run / "README.md").read_text()


def check_pipe(pipe, run: Path) -> None:
    """The pipeline holds the adapter of the run."""
    saved = load_file(run / LORA)
    own = {n: p for n, p in pipe.transformer.named_parameters() if ".lora_" in n}
    assert len(own) == len(saved)
    for name, p in own.items():
        assert torch.equal(p, saved[f"transformer.{name.replace('.default_0', '')}"].to(p.dtype))


def table(page: Path, head: str) -> dict[str, str]:
    """The rows of the table that begins with `head`: first cell without backticks -> second."""
    rows = page.read_text().split(head)[1].split("\n\n")[0].splitlines()[2:]
    return {row.split("|")[1].strip(" `"): row.split("|")[2].strip() for row in rows}


def test_the_table_of_what_a_run_leaves(rabbit, tiny_ltx, clips, tmp_path):
    """Everything in it is left by some run, and a run leaves nothing that is not in it."""
    lora, _ = rabbit
    full = runs.run(tiny_ltx, clips, tmp_path / "full", method="full", train__steps=1).output_dir
    also = runs.run(tiny_ltx, clips, tmp_path / "also", lora__also_train="proj_out", train__steps=1).output_dir
    left = {
        re.sub(r"\d+", "N", path.name) + "/" * path.is_dir() for run in (lora, full, also) for path in run.iterdir()
    }
    rows = table(ROOT / "docs" / "quickstart.md", "| in `output_dir`")
    assert {name.replace("samples/step-NNNNNN/", "samples/") for name in rows} == left
    assert [path.name for path in sorted((lora / "samples").iterdir())] == ["step-000000", "step-000002"]
    assert sorted(path.suffix for path in (lora / "samples" / "step-000002").iterdir()) == [".json", ".mp4"]
    assert {path.name for path in (lora / "checkpoint-2").iterdir()} == {
        "state",
        *(p.name for p in lora.glob("*.saf*")),
    }
    assert rows["metrics.jsonl"].split(", ") == list(runs.metrics(lora)[0])


def test_config_repeats_the_run(rabbit, tmp_path):
    """`--config output_dir/config.yaml` repeats the run, bit for bit."""
    run, _ = rabbit
    runs.fresh_state()
    changes = ["--output_dir", str(tmp_path / "again"), "--checkpoint.resume", "null"]
    LTXTrainer.main(["--config", str(run / "config.yaml"), *changes])
    ours, theirs = load_file(tmp_path / "again" / LORA), load_file(run / LORA)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.mark.slow
def test_make_demo(tmp_path):
    """What `make demo` runs, in a copy of the tree: under three minutes, and what it names at the end is there."""
    assert re.search(r"^demo:.*\n\t\$\(BIN\)/python examples/demo\.py$", (ROOT / "Makefile").read_text(), re.M)
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    done = subprocess.run([sys.executable, "examples/demo.py"], cwd=tree, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"^    (\S+)$", done.stdout.split("The whole run took")[1], re.M)
    assert [Path(name).suffix for name in named] == [".mp4"] * 6 + [".safetensors"] * 2 + [".jsonl"]
    assert all((tree / name).stat().st_size > 0 for name in named)
    rows = runs.metrics(tree / "runs" / "demo")
    assert [row["step"] for row in rows] == list(range(5, 41, 5))
    assert sum(row["loss"] for row in rows[-4:]) < sum(row["loss"] for row in rows[:4])
    noise = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"(?i)warn|fail|error", line)]
    assert [line for line in noise if "real_accelerator" not in line] == []  # which DeepSpeed's import prints
