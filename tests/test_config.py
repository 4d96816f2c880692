"""What option values must be, alone and together."""

from dataclasses import dataclass

import pytest

from trainers.config import Config, Fraction, OptionError
from trainers.parsing import parse

NEEDED = ["--model", "org/name", "--data.train", "clips", "--data.buckets", "49x512x768"]


@dataclass
class OwnConfig(Config):
    first_frame_p: Fraction = 0.1

    def problems(self) -> list[str]:
        return super().problems() + ["lora.rank must not be 13"] * (self.lora.rank == 13)


def read(*argv: str) -> OwnConfig:
    return parse(OwnConfig, [*NEEDED, *argv])


def complaint(*argv: str) -> str:
    with pytest.raises(OptionError) as error:
        read(*argv)
    return str(error.value)


def test_what_is_required():
    with pytest.raises(OptionError) as error:
        parse(Config, [])
    assert [line.split(" is ")[0] for line in str(error.value).splitlines()] == [
        "3 problems:",
        "  - model",
        "  - data.train",
        "  - data.buckets",
    ]


RANGES = [
    ("data.caption_dropout", "1.1", "1"),
    ("data.caption_dropout", "nan", "0"),
    ("data.encode_batch_size", "0", "1"),
    ("data.num_workers", "-1", "0"),
    ("lora.rank", "0", "1"),
    ("lora.alpha", "0", "1"),
    ("lora.dropout", "1", "0.9"),
    ("optimizer.learning_rate", "0", "1e-9"),
    ("optimizer.learning_rate", "inf", "1"),
    ("optimizer.epsilon", "0", "1e-8"),
    ("optimizer.weight_decay", "-0.1", "0"),
    ("optimizer.momentum", "1", "0"),
    ("optimizer.warmup_steps", "-1", "0"),
    ("optimizer.min_lr_ratio", "1.5", "1"),
    ("optimizer.power", "0", "2"),
    ("optimizer.cycles", "0", "1"),
    ("optimizer.max_grad_norm", "-1", "0"),
    ("train.steps", "0", "1"),
    ("train.epochs", "0", "0.5"),
    ("train.max_samples", "0", "1"),
    ("train.batch_size", "0", "1"),
    ("train.gradient_accumulation_steps", "0", "1"),
    ("train.seed", "-1", "0"),
    ("train.max_hours", "0", "0.1"),
    ("train.log_every", "0", "1"),
    ("train.process_group_timeout", "0", "1"),
    ("validation.every", "-1", "0"),
    ("validation.num_inference_steps", "0", "1"),
    ("checkpoint.every", "-1", "0"),
    ("checkpoint.keep", "0", "1"),
    ("checkpoint.keep_exports", "0", "1"),
    ("noise.mean", "nan", "-3"),
    ("noise.std", "0", "0.1"),
    ("noise.mode_scale", "1.8", "1.75"),
    ("noise.shift", "0", "1"),
    ("noise.min", "-0.1", "0"),
    ("noise.max", "1.1", "1"),
    ("loss.huber_delta", "0", "1"),
    ("first_frame_p", "2", "1"),
]


@pytest.mark.parametrize(("name", "bad", "good"), RANGES)
def test_ranges(name, bad, good):
    assert f"{name} is {float(bad) if '.' in bad or bad in ('nan', 'inf') else ''}" in complaint(f"--{name}", bad)
    read(f"--{name}", good)


def test_betas_are_checked_one_by_one():
    assert complaint("--optimizer.betas", "0.9", "1") == "optimizer.betas is 1.0; it must be in [0, 1)"


TOGETHER = [
    (["--checkpoint.resume", "latest", "--overwrite"], "choose one"),
    (["--train.steps", "1", "--train.max_samples", "2"], "only one of train.steps (1) and train.max_samples (2)"),
    (
        ["--method", "full", "--lora.init_from", "x", "--lora.targets", "q"],
        "lora.init_from, lora.targets: for method lora",
    ),
    (["--train_modules", "norm"], "train_modules is for method full"),
    (["--method", "full", "--precision.storage", "fp8"], "precision.storage fp8"),
    (["--precision.trainable", "bf16"], "rounds stochastically: use fp32, or optimizer.name adamw8bit-ao"),
    (["--precision.trainable", "bf16", "--optimizer.name", "adamw8bit"], "rounds stochastically"),
    (["--precompute_only", "text", "--stage", "train"], "precompute_only text encodes"),
    (["--data.precompute", "off", "--stage", "precompute"], "need data.precompute disk"),
    (["--noise.min", "0.5", "--noise.max", "0.5"], "noise.min (0.5) must be below noise.max (0.5)"),
    (["--validation.from_export"], "validation.from_export"),
    (["--data.buckets", "1x32x32", "9x32x32", "1x32x32"], "data.buckets names 1x32x32 more than once"),
    (["--output_dir", ""], "output_dir is required"),
]


@pytest.mark.parametrize(("argv", "words"), TOGETHER)
def test_what_does_not_fit_together(argv, words):
    assert words in complaint(*argv)


def test_rules_are_reported_together():
    argv = ["--lora.rank", "0", "--train_modules", "norm", "--train.steps", "1", "--train.epochs", "1"]
    assert complaint(*argv) == (
        "3 problems:\n"
        "  - lora.rank is 0; it must be 1 or more\n"
        "  - only one of train.steps (1) and train.epochs (1.0) can be set: make the others null\n"
        "  - train_modules is for method full; with method lora use lora.also_train"
    )


def test_what_fits():
    read("--precision.trainable", "bf16", "--optimizer.name", "adamw4bit-ao")
    read("--method", "full", "--train_modules", "norm", "--lora.rank", "4")
    read("--precision.storage", "fp8", "--lora.init_from", "x")
    read("--precompute_only", "video", "--stage", "precompute")


def test_a_model_adds_rules():
    assert complaint("--lora.rank", "13", "--first_frame_p", "-1") == (
        "2 problems:\n  - first_frame_p is -1.0; it must be in [0, 1]\n  - lora.rank must not be 13"
    )


def test_steps_default_only_where_no_length_is_given():
    assert read().train.steps == 2000
    assert read("--train.epochs", "1.5").train.steps is None
    assert read("--train.max_samples", "7").train.steps is None
    assert "train.steps (5) and train.epochs (1.0)" in complaint("--train.steps", "5", "--train.epochs", "1")
