"""The shape of the source tree: which way imports point, what is lazy, how files are named and how long they may be."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = ("trainers", "models", "data")
SCRIPTS = sorted(ROOT.glob("train_*.py"))
MODEL_NAMES = [script.stem.removeprefix("train_") for script in SCRIPTS]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [*SCRIPTS, *(file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))]
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
LAZY = {
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "wandb",
    "tensorboard",
    "bitsandbytes",
    "torchao",
    "deepspeed",
    "pyarrow",
}
BANNED = {"util", "utils", "common", "helper", "helpers", "core", "registry", "factory", "manager"}


# -- imports ------------------------------------------------------------------------------------------------------


def imported(tree: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Dotted names that a module imports, `from a import b` as a.b; only outside functions unless `everywhere`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import absolutely"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(node, everywhere)


def may_import(importer: str, target: str, models: list[str]) -> bool:
    """train_x -> trainers.x -> trainers.base -> the rest of trainers -> models, data. `target` is a name of ours."""
    here, there = importer.split("."), target.split(".")
    if there[0] not in PACKAGES:
        return False  # nothing imports a script, an example or a test
    if here[0] in ("models", "data"):
        return there[0] == here[0]
    if here[0].startswith("train_"):
        return there[:2] == ["trainers", here[0].removeprefix("train_")]
    if there[0] != "trainers" or there[1] == here[1]:
        return True
    if there[1] in models:
        return False
    return there[1] != "base" or here[1] in (*models, "check")  # the kit runs trainers, as a script does


def ours(name: str) -> bool:
    return name.split(".")[0] in (*PACKAGES, "tests", "examples", "benchmarks") or name.startswith("train_")


def test_imports_point_one_way():
    wrong = [
        f"{name} imports {target}"
        for name, tree in TREES.items()
        for target in imported(tree)
        if ours(target) and not may_import(name, target, MODEL_NAMES)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("train_ltx", "trainers.ltx.LTXTrainer", True),
        ("train_ltx", "trainers.base.Trainer", False),
        ("train_ltx", "trainers.cog.CogTrainer", False),
        ("trainers.ltx", "trainers.base.Trainer", True),
        ("trainers.ltx", "models.latents", True),
        ("trainers.ltx", "trainers.cog.CogTrainer", False),
        ("trainers.base", "trainers.plan", True),
        ("trainers.base", "trainers.ltx.LTXTrainer", False),
        ("trainers.plan", "trainers.base.Trainer", False),
        ("trainers.plan", "trainers.config.Config", True),
        ("trainers.plan", "data.buckets.Bucket", True),
        ("trainers.plan", "examples.demo", False),
        ("models.memory", "models.load", True),
        ("models.memory", "data.cache", False),
        ("models.memory", "trainers.config", False),
        ("data.video", "models.load", False),
        ("data.video", "trainers.config", False),
    ],
)
def test_the_rule_itself(importer, target, allowed):
    assert may_import(importer, target, ["ltx", "cog"]) is allowed


def test_slow_libraries_are_imported_inside_functions():
    wrong = [
        f"{name} imports {target}"
        for name, tree in TREES.items()
        for target in imported(tree, everywhere=False)
        if target.split(".")[0] in LAZY
    ]
    assert wrong == []
    assert list(imported(ast.parse("if True:\n import peft\ndef f():\n import torch"), everywhere=False)) == ["peft"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_is_quick(script):
    code = f"""
        import runpy, sys
        sys.argv = [{script.name!r}, "--help"]
        try:
            runpy.run_path({str(script)!r}, run_name="__main__")
        except SystemExit as stop:
            assert stop.code == 0
        print("loaded:", *sorted(name for name in sys.modules if "." not in name))
    """
    run = subprocess.run([sys.executable, "-c", dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--optimizer.learning_rate" in run.stdout
    loaded = set(run.stdout.rpartition("loaded:")[2].split())
    assert "trainers" in loaded
    assert loaded & LAZY == set()


# -- files --------------------------------------------------------------------------------------------------------


def test_names_say_what_is_inside():
    names = {part for name in SOURCES for part in name.split(".")}
    assert {name for name in names if BANNED & set(name.split("_"))} == set()


def test_no_file_is_long():
    files = [*SOURCES.values(), *(ROOT / "examples").rglob("*.py")]
    limits = {f"trainers/{name}.py": 250 for name in MODEL_NAMES} | {script.name: 15 for script in SCRIPTS}
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: count for name, count in lengths.items() if count > limits.get(name, 450)} == {}


def test_every_model_has_a_script_and_a_trainer():
    trainers = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Trainer" for base in node.bases)
    }
    assert trainers == {f"trainers.{name}" for name in MODEL_NAMES} != set()


def test_the_tested_versions_lie_in_the_ranges_of_setup():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    strings = [
        node.value for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Constant)
    ]
    ranges = [Requirement(text) for text in strings if isinstance(text, str) and re.match(r"[\w-]+>=", text)]
    assert len(ranges) > 15
    outside = [f"{r} but {pins.get(r.name.lower().replace('_', '-'))}" for r in ranges if not _holds(r, pins)]
    assert outside == []


def _holds(requirement: Requirement, pins: dict[str, str]) -> bool:
    return pins.get(requirement.name.lower().replace("_", "-"), "") in requirement.specifier


# -- every option is read -----------------------------------------------------------------------------------------

# models/ knows no option classes: what its own names stand for.
STANDS_FOR = {"Override": "ComponentOptions"}


@dataclass
class Fields:
    """The fields of the option classes in a set of modules, and which class each section is of."""

    of: dict[str, list[str]]
    sections: dict[str, str]


def find_fields(trees: dict[str, ast.Module]) -> Fields:
    classes = {
        node.name: [item for item in node.body if isinstance(item, ast.AnnAssign)]
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.search(r"(Options|Config)$", node.name)
    }
    sections, of = {"config": "Config"}, defaultdict(list)
    for name, items in classes.items():
        for item in items:
            held = [n.id for n in ast.walk(item.annotation) if isinstance(n, ast.Name) and n.id in classes]
            if held:
                sections[item.target.id] = held[0]
            else:
                of[name].append(item.target.id)
    return Fields(dict(of), sections)


def find_reads(tree: ast.Module, fields: Fields) -> set[tuple[str, str]]:
    """(class, field) of each `x.field` of a module where x ends in the name of a section or in one that stands for it.

    Methods called `problems` do not count: checking a value is no use of it.
    """
    known = {*fields.of, *fields.sections.values()}
    names: dict[str, set[str]] = defaultdict(set, {name: {cls} for name, cls in fields.sections.items()})
    names["self"] = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} & known

    def classes_of(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Call | ast.Subscript):  # config.components.get(name), config.components[name]
            node = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
            node = node.value if isinstance(node, ast.Subscript) else node
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return names.get(name, set())

    def bind(target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for left, right in zip(target.elts, value.elts, strict=False):
                bind(left, right)
        elif isinstance(target, ast.Name | ast.Attribute):
            names[target.id if isinstance(target, ast.Name) else target.attr] |= classes_of(value)

    nodes = [node for top in _without_problems(tree) for node in ast.walk(top)]
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation:
            named = {n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)}
            names[node.arg] |= {STANDS_FOR.get(name, name) for name in named} & known
    for _ in range(2):  # c = self.config; o = c.optimizer
        for node in nodes:
            if isinstance(node, ast.Assign):
                bind(node.targets[0], node.value)
            elif isinstance(node, ast.NamedExpr):
                bind(node.target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):  # for name, component in config.components.items()
                for left in node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]:
                    bind(left, node.iter)
    return {
        (cls, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for cls in classes_of(node.value)
    }


def _without_problems(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (item for item in node.body if getattr(item, "name", "") != "problems")
        else:
            yield node


def unread(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """(class, field) of the options that no module reads."""
    fields = find_fields(trees)
    reads = set().union(*(find_reads(tree, fields) for tree in trees.values()))
    of_models = {name for cls, name in reads if cls.endswith("Config")}  # self.config is an instance of any of them
    return {
        (cls, name)
        for cls, names in fields.of.items()
        for name in names
        if (cls, name) not in reads and not (cls.endswith("Config") and name in of_models)
    }


def test_every_option_is_read_by_some_code():
    # trainers.parsing is about options as such.
    assert unread({name: tree for name, tree in TREES.items() if name != "trainers.parsing"}) == set()


def test_an_unread_option_is_found():
    options = """
        class InnerOptions:
            name: str = ""
            other: int = 1
        class ThingOptions:
            id: str = ""
        class Config:
            top: int = 1
            inner: InnerOptions = None
            things: dict[str, ThingOptions] = None
            def problems(self):
                return self.inner.name
        class OwnConfig(Config):
            own: int = 1
            unused: int = 1
    """
    use = """
        class Trainer:
            def f(self, module, options: InnerOptions):
                c, self.mine = self.config, self.config.inner
                inner, x = c.inner, 1
                return module.name, x.other, c.top, self.config.own, self.id, {}
    """

    def left(expression: str) -> set[tuple[str, str]]:
        return unread({"a": ast.parse(dedent(options)), "b": ast.parse(dedent(use).format(expression))})

    inner, thing, own = ("InnerOptions", "name"), ("ThingOptions", "id"), ("OwnConfig", "unused")
    other = ("InnerOptions", "other")
    assert left("0") == {inner, other, thing, own}  # module.name is nobody's option
    assert left("inner.name") == {other, thing, own}
    assert left("options.other") == {inner, thing, own}
    assert left("self.mine.other") == {inner, thing, own}
    assert left("c.things['x'].id") == {inner, other, own}
    assert left("c.things.get('x').id") == {inner, other, own}
    assert left("[t.id for t in c.things.values()]") == {inner, other, own}
    assert left("c.unused + c.inner.name") == {other, thing}
