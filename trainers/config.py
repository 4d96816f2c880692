"""The options every model shares: what there is, what it may be, what fits together. trainers/parsing.py reads them.

An option is one dataclass field: its type says which values are allowed, the string under it is its help.
A model's own options are fields of its own Config, which may also change a default and add to `problems`.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from data.buckets import Bucket
from data.places import is_url
from data.sources import Source
from trainers import rules

DEFAULT_STEPS = 2000


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a test that NaN fails."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Place:
    """Marks text that is a path, made absolute when read; with `or_hub` only if it exists. `words` are no paths, nor is
    a URL with `or_url`."""

    or_hub: bool = False
    or_url: bool = False
    words: tuple[str, ...] = ()

    def absolute(self, text: str, folder: Path) -> str:
        """The absolute path of what is named in `folder`, or the text itself if it is no path."""
        path = os.path.abspath(folder / os.path.expanduser(text))
        hub = self.or_hub and text[0] not in "./~" and not os.path.exists(path)
        return text if text in self.words or hub or (self.or_url and is_url(text)) else path


WINDOWS = Rule("first, middle, uniform:N or all", lambda x: re.fullmatch(r"first|middle|all|uniform:[1-9]\d*", x))
Finite = Annotated[float, Rule("finite", math.isfinite)]
Positive = Annotated[float, Rule("above 0", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Rule("0 or more", lambda x: 0 <= x < math.inf)]
Fraction = Annotated[float, Rule("in [0, 1]", lambda x: 0 <= x <= 1)]
BelowOne = Annotated[float, Rule("in [0, 1)", lambda x: 0 <= x < 1)]
Count = Annotated[int, Rule("1 or more", lambda x: x >= 1)]
CountOrZero = Annotated[int, Rule("0 or more", lambda x: x >= 0)]
LocalPath = Annotated[str, Place()]
UrlOrPath = Annotated[str, Place(or_url=True)]
HubOrPath = Annotated[str, Place(or_hub=True)]


OptimizerName = Literal[
    "adamw",
    "adamw8bit",
    "lion8bit",
    "ademamix8bit",
    "paged_adamw8bit",
    "paged_lion8bit",
    "paged_ademamix8bit",
    "adamw8bit-ao",
    "adamw4bit-ao",
    "adamwfp8-ao",
    "adamw-kahan",
    "muon",
    "adafactor",
    "came",
    "prodigy",
    "schedulefree",
    "sgd",
]
Quantized = Literal["none", "nf4", "fp4", "int8", "int8wo", "fp8wo", "int4"]


class OptionError(ValueError):
    """Options that cannot be used; the message lists every one of them."""


@dataclass
class ComponentOptions:
    id: HubOrPath | None = None
    """Hub id or folder to take this component from instead of from the model."""
    revision: str | None = None
    """Branch, tag or commit of that Hub id."""
    variant: str | None = None
    """Variant of the weight files, such as fp16."""
    subfolder: str | None = None
    """Subfolder that holds the component; null means the one named after it."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Precision to load it in; null means precision.weights."""
    quantize: Literal["nf4", "fp4", "int8", "int8wo", "fp8wo", "int4"] | None = None
    """For a text encoder: as precision.quantize, while it encodes; null keeps it as it is."""


@dataclass
class DataOptions:
    train: list[Source] = field(default_factory=list)
    """What to train on: folders, metadata files, or (YAML, here JSON) mappings of path, repeats, caption_prefix ..."""
    buckets: list[Bucket] = field(default_factory=list)
    """Sizes to train at, frames x height x width, such as 49x512x768; stills go to 1xHxW."""
    resolution: list[Count] = field(default_factory=list)
    """Instead of buckets: about this many pixels squared, such as 512, in all the shapes that the clips have."""
    frames: list[Count] = field(default_factory=list)
    """Numbers of frames that resolution is trained at, such as 1 and 49."""
    max_upscale: Annotated[float, Rule("1 or more", lambda x: 1 <= x < math.inf)] = 2.0
    """Clips that a bucket would enlarge more than so many times are left out of it."""
    resize: Literal["cover", "pad", "stretch"] = "cover"
    """How a picture fills its bucket: cover cuts what is over, pad adds black, stretch distorts."""
    crop: Literal["centre", "random"] = "centre"
    """What cover keeps: the centre, or for each epoch one of `crops` places."""
    crops: Count = 4
    """Places of crop random; each is encoded."""
    fps: Positive | None = None
    """Frames per second that clips are retimed to, by their timestamps; null keeps each clip's own speed."""
    windows: Annotated[str, WINDOWS] = "first"
    """Which part of a clip longer than its bucket is trained on: first, middle, uniform:N (N parts) or all."""
    precompute: Literal["disk", "off"] = "disk"
    """disk encodes every clip and caption once, before training; off in each step, and keeps the encoders loaded."""
    cache_dir: UrlOrPath | None = None
    """Where encoded clips and captions are kept, may be shared between runs and be a URL such as s3://bucket/folder;
    null means output_dir/cache."""
    cache_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of what is kept there."""
    caption_dropout: Fraction = 0.0
    """Probability that a sample trains without its caption."""
    caption_technique: Literal["empty", "zero"] = "empty"
    """What replaces a dropped caption: the encoding of "" or zeros."""
    tag_shuffle: CountOrZero = 0
    """Train on this many orders of the tags of a caption, separated by commas; 0 keeps the caption as it is."""
    keep_tags: CountOrZero = 0
    """Tags at the start that tag_shuffle leaves in their places, such as a trigger word."""
    strip_preamble: bool = False
    """Remove what language models say before a description, such as "The video shows"."""
    encode_batch_size: Count = 1
    """Clips or captions that are encoded at a time."""
    on_bad: Literal["error", "skip"] = "error"
    """Clips that cannot be read: stop and name all, or leave them out, named and counted."""
    decode_timeout: Positive = 300.0
    """Seconds after which a file that is still being looked at counts as one that cannot be read."""
    num_workers: CountOrZero = 2
    """Workers per rank that decode clips ahead of the encoder, and read batches ahead of the step; 0: none ahead."""


@dataclass
class LoraOptions:
    rank: Count = 64
    """Rank of the update matrices."""
    alpha: Positive = 64.0
    """Scale of the update: it is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Modules that get an adapter, as name endings or patterns; empty means the model's own choice."""
    exclude: list[str] = field(default_factory=list)
    """Modules to leave out of the targets."""
    also_train: list[str] = field(default_factory=list)
    """Modules trained in full beside the adapters, such as norms."""
    dropout: BelowOne = 0.0
    """Dropout on the adapters' input."""
    type: Literal["lora", "dora", "rslora", "lokr", "loha"] = "lora"
    """Kind of adapter."""
    init_from: LocalPath | None = None
    """LoRA file to start from, with a fresh optimizer and step 0; to continue a run use checkpoint.resume."""


@dataclass
class PrecisionOptions:
    weights: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the frozen weights and of the computation."""
    trainable: Literal["fp32", "bf16"] = "fp32"
    """Precision of the trained weights; bf16 needs optimizer.name adamw8bit-ao, its kin or adamw-kahan."""
    quantize: Quantized = "none"
    """Kind of the frozen linear weights: nf4, fp4, int8 (bitsandbytes), int8wo, fp8wo, int4 (torchao, weight-only)."""
    storage: Literal["none", "fp8"] = "none"
    """fp8 halves the memory of frozen weights: they are kept in fp8 and cast up layer by layer."""
    fp8_training: bool = False
    """For method full: the linear layers multiply in fp8 (torchao); emulated, and slow, on a CPU."""
    allow_tf32: bool = False
    """Let float32 matrix products on CUDA use TF32: faster, with 10 bits of mantissa."""


@dataclass
class MemoryOptions:
    checkpointing: Literal["none", "blocks", "every_n", "ffn"] = "blocks"
    """What the backward pass computes again instead of keeping it: blocks, every n-th block, or feed-forwards only."""
    checkpoint_every: Count = 2
    """n of checkpointing every_n."""
    offload_activations: bool = False
    """Keep what checkpointing keeps (the inputs of blocks) in host memory until the backward pass."""
    block_swap: CountOrZero = 0
    """Keep the frozen weights of this many blocks in host memory; two of these blocks at a time are on the device."""
    group_offload: Literal["none", "block", "leaf"] = "none"
    """Keep frozen weights in host memory: block is block_swap of all blocks; leaf moves each layer to and fro."""
    attention: str | None = None
    """Attention backend of diffusers, such as native, flash or sage; null means the model's own."""
    context_parallel: Count = 1
    """Experimental: this many ranks share the tokens of each sample."""
    compile: Literal["none", "blocks"] = "none"
    """blocks compiles the repeated blocks with torch.compile: once for all sizes where there are several buckets."""
    compile_backend: str = "inductor"
    """Backend of torch.compile."""
    vae_tiling: Literal["auto", "on", "off"] = "auto"
    """Encode and decode video in tiles: less memory, slightly other latents; auto decides by size."""


@dataclass
class OptimizerOptions:
    name: OptimizerName = "adamw"
    """8bit: bitsandbytes (paged: state moves to the host when needed); -ao: torchao; muon: AdamW outside of blocks;
    adamw-kahan, came, prodigy and schedulefree need the extra `optimizers`."""
    learning_rate: Positive = 1e-4
    """Learning rate after the warm-up; about 1 for prodigy, which finds its own and scales it by this."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square; sgd and adafactor have none of them, and muon has them
    outside of blocks only."""
    epsilon: Positive = 1e-8
    """Added to the denominator of AdamW and its kin; lion8bit, adafactor, came and sgd have none."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, in sgd an L2 penalty; none on biases, norms and tables that are added to activations."""
    momentum: BelowOne = 0.9
    """Momentum of sgd and muon; no other has it."""
    schedule: Literal["constant", "linear", "cosine", "polynomial", "cosine_with_restarts"] = "cosine"
    """Course of the learning rate after the warm-up, as a function of the optimizer step."""
    warmup_steps: CountOrZero = 100
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Where the schedule ends, as a fraction of learning_rate."""
    power: Positive = 1.0
    """Exponent of the polynomial schedule."""
    cycles: Count = 1
    """Number of cosines in cosine_with_restarts."""
    max_grad_norm: NotNegative = 1.0
    """Norm that gradients are clipped to; 0 does not clip."""
    lora_plus_ratio: Positive = 1.0
    """LoRA+: the learning rate of the B matrices as a multiple of that of all else; 16 is its authors' choice."""
    cpu_offload: bool = False
    """Keep AdamW's state, and update the weights, in host memory (torchao; one CUDA device, without clipping)."""
    fused_backward: bool = False
    """Update each weight in the backward pass and free its gradient at once; for one process without accumulation."""


@dataclass
class TrainOptions:
    steps: Count | None = None
    """Optimizer steps to train; 2000 when neither epochs nor max_samples is given."""
    epochs: Positive | None = None
    """Train until every sample was seen this many times, instead of steps."""
    max_samples: Count | None = None
    """Train on this many samples, instead of steps."""
    batch_size: Count = 1
    """Samples per rank in one forward pass."""
    gradient_accumulation_steps: Count = 1
    """Forward passes per optimizer step."""
    seed: CountOrZero = 42
    """Decides everything random."""
    max_hours: Positive | None = None
    """Save and stop after this many hours, counted from the start of the program; checkpoint.resume continues."""
    log_every: Count = 10
    """Optimizer steps between two log lines."""
    deterministic: bool = False
    """Only operations that give the same bits every time; slower on CUDA."""
    process_group_timeout: Count = 7200
    """Seconds that ranks wait for each other before giving up."""


@dataclass
class ValidationOptions:
    prompts: LocalPath | None = None
    """File of prompts to sample: one per line, or YAML with keywords of the pipeline per prompt."""
    every: CountOrZero = 250
    """Optimizer steps between two validations; 0 validates only at the start and at the end."""
    at_start: bool = True
    """Sample before the first step too, for comparison."""
    num_inference_steps: Count | None = None
    """Denoising steps per sample; null means the model's own default."""
    scheduler: str | None = None
    """diffusers scheduler class to sample with, such as UniPCMultistepScheduler; null means the model's own."""
    from_export: bool = False
    """Sample once more from the exported files in a fresh pipeline, as a user would."""


@dataclass
class CheckpointOptions:
    every: CountOrZero = 500
    """Optimizer steps between two checkpoints; 0 saves only at the end."""
    keep: Count = 3
    """Newest checkpoints whose state for resuming is kept."""
    keep_exports: Count | None = None
    """Newest checkpoints whose exported weights are kept; null keeps all."""
    resume: Annotated[str, Place(words=("latest",))] | None = None
    """latest, or the folder of a checkpoint to continue from."""


@dataclass
class NoiseOptions:
    density: Literal["logit_normal", "uniform", "mode", "cosmap"] = "logit_normal"
    """Distribution that training noise levels are drawn from."""
    mean: Finite = 0.0
    """Mean of the normal in logit_normal."""
    std: Positive = 1.0
    """Standard deviation of the normal in logit_normal."""
    mode_scale: Annotated[float, Rule("in [-1, 1.75]", lambda x: -1 <= x <= 1.75)] = 1.29
    """Scale of the mode density: above 0 favours the middle, below 0 the ends."""
    shift: Positive | None = None
    """Shift towards high noise, in the model's own parametrisation; null means the model's own rule."""
    min: Fraction = 0.0
    """Smallest noise level, in [0, 1)."""
    max: Fraction = 1.0
    """Largest noise level, in (0, 1]."""


@dataclass
class LossOptions:
    type: Literal["mse", "huber"] = "mse"
    """Distance between prediction and target."""
    huber_delta: Positive = 0.1
    """Where huber turns from squared to linear."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """Weight of a sample by its noise level."""


@dataclass
class Config:
    model: HubOrPath = ""
    """Hub id, local folder in diffusers layout, or a single .safetensors file (required)."""
    model_revision: str | None = None
    """Branch, tag or commit of the Hub id."""
    model_variant: str | None = None
    """Variant of the weight files, such as fp16."""
    model_config: HubOrPath | None = None
    """For a single file: diffusers folder or Hub id that has the configs, the text encoder and the tokenizer."""
    components: dict[str, ComponentOptions] = field(default_factory=dict)
    """Where to take single components from and in which precision, such as components.vae.dtype: fp32."""
    output_dir: LocalPath = "runs/reeltune"
    """Folder of checkpoints, samples, metrics and exported weights."""
    overwrite: bool = False
    """Start anew in an output_dir that already holds a run."""
    stage: Literal["all", "plan", "precompute", "train"] = "all"
    """Stop after this stage; train needs a filled cache."""
    precompute_only: Literal["text", "video"] | None = None
    """Encode only captions or only clips, so that two launches can fill one cache together."""
    method: Literal["lora", "full"] = "lora"
    """Train an adapter or the transformer's own weights."""
    train_modules: list[str] = field(default_factory=list)
    """For method full: patterns of the parameters to train; empty means all."""
    report_to: list[Literal["wandb", "tensorboard"]] = field(default_factory=list)
    """Trackers beside metrics.jsonl, which is always written."""
    project: str = "reeltune"
    """Project name in the trackers."""
    run_name: str | None = None
    """Name of the run in the trackers."""
    data: DataOptions = field(default_factory=DataOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    loss: LossOptions = field(default_factory=LossOptions)

    @property
    def cache_dir(self) -> Path | str:
        """Where encoded clips and captions are kept; a URL as text."""
        own = self.data.cache_dir
        return own if own and is_url(own) else Path(own or Path(self.output_dir) / "cache")

    @property
    def memo_dir(self) -> Path:
        """Where what is remembered of local files is kept: beside the encodings, if these are in a folder."""
        return Path(self.output_dir) / "cache" if is_url(self.cache_dir) else self.cache_dir

    def problems(self) -> list[str]:
        """Everything that is out of range or does not fit together. A subclass adds its own to super().problems()."""
        found = [
            f"{name} is {value}; it must be {rule.words}"
            for name, option in options(self)
            for rule, value in _rules(option.hint, option.value)
            if not rule.holds(value)
        ]
        return found + [text for broken, text in rules.together(self) if broken]

    def check(self) -> None:
        """Raises OptionError that lists all `problems`, if there are any."""
        refuse(self.problems())


def refuse(problems: list[str]) -> None:
    """Raises OptionError that lists `problems`, if there are any."""
    if problems:
        raise OptionError(
            problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems:", *problems])
        )


@dataclass(frozen=True)
class Option:
    hint: Any
    """Its type, with Rule and Place."""
    value: Any
    owner: type
    """The dataclass it is a field of."""


def options(section: Any, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """(dotted name, Option) of every option of a Config or of one of its sections, in the order of the fields."""
    hints = get_type_hints(type(section), include_extras=True)
    for f in fields(section):
        name, value = prefix + f.name, getattr(section, f.name)
        if isinstance(value, dict):
            for key, entry in value.items():
                yield from options(entry, f"{name}.{key}.")
        elif is_dataclass(value):
            yield from options(value, f"{name}.")
        else:
            yield name, Option(hints[f.name], value, type(section))


def without_none(hint: Any) -> Any:
    """X of `X | None`, and every other type as it is."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return hint


def _rules(hint: Any, value: Any) -> Iterator[tuple[Rule, Any]]:
    """The rules of a type with the value, or the element of a tuple, that each is about."""
    hint = without_none(hint)
    if get_origin(hint) is tuple:
        for kind, element in zip(get_args(hint), value, strict=True):
            yield from _rules(kind, element)
    elif get_origin(hint) is Annotated and value is not None:
        yield from ((mark, value) for mark in hint.__metadata__ if isinstance(mark, Rule))
