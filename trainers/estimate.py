"""What a run will hold in memory, by part, before any weight loads: an estimate, counted on the meta device.

Persistent parts are counted parameter by parameter. Activations are the tensors that autograd would keep of one
micro-batch of the largest bucket: `loss` itself runs on tensors without memory, under the rules of autocast, and with
attention kernels that keep no matrix of tokens x tokens. Nothing here has been measured on a GPU: what CUDA itself, its
allocator and the temporaries of kernels take comes on top, and `card` leaves room for them.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from data.buckets import Bucket
from models import adapters, block_swap, footprint, load, memory, precision, quantize
from trainers import optimizers, sharding
from trainers.config import Config, options
from trainers.objectives import Batch

GIB = 2**30
CARDS = (8, 12, 16, 24, 48, 80)  # GB as they are sold; the driver shows about that many GiB
SPARE = 1.1, 1.0  # x the total for fragments and temporaries, + GiB for CUDA and its libraries: assumed, not measured
TILE = ", less with memory.vae_tiling on"
# Kinds of weights that folders are saved in, by quantize.saved_as.
SAVED = {f"bitsandbytes {kind}": kind for kind in quantize.BITSANDBYTES}
SAVED |= {"torchao Int8WeightOnlyConfig": "int8wo", "torchao Float8WeightOnlyConfig": "fp8wo"}


def skeleton(pretrained, name: str) -> nn.Module:
    """A network of diffusers or transformers on the meta device, in the precision that the options load it in."""
    kind = load.model_index(pretrained.folder)[name]
    with torch.device("meta"):
        if kind[0] == "diffusers":
            net = pretrained.skeleton(name)
        else:
            import transformers

            made = getattr(transformers, kind[1])
            net = made(made.config_class.from_dict(pretrained.component_config(name)))
    return nn.Module.to(net.eval(), pretrained.dtype(name))


# -- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Bytes on one device, at the end of the backward pass."""

    weights: int = 0
    """Frozen weights of the network, and what is made whole of them at a time."""
    trained: int = 0
    """Weights of the network that train, adapters apart."""
    adapter: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What is kept for the backward pass, and what that computes again at a time."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Network:
    """The network of a run on the meta device."""

    net: nn.Module
    own: frozenset[str]
    """Its parameters before an adapter was attached."""
    blocks: list[nn.Module]


def network(trainer, config: Config) -> Network:
    """The network that `config` trains, made by the functions that make the real one; not yet quantised."""
    net, c = skeleton(trainer.pretrained, "transformer"), config
    own = frozenset(name for name, _ in net.named_parameters())
    with torch.device("meta"):
        if c.method == "lora":
            adapters.attach(net, c.lora, trainer.lora_targets)
        else:
            adapters.select(net, c.train_modules)
    adapters.cast_trainable(net, precision.DTYPES[c.precision.trainable])
    precision.apply_storage(net, c.precision.storage, trainer.dtype, trainer.keep_precise)
    return Network(net, own, [block for _, block in memory.repeated(net, trainer.repeated_blocks)])


def stored(trainer, config: Config, network: Network) -> tuple[dict[str, int], int]:
    """Bytes of each parameter as it is kept, and of the largest quantised weight while it is made whole."""
    saved = quantize.saved_as(trainer.pretrained.component_config("transformer"))
    kind, packed = config.precision.quantize, {}
    if kind == "none":
        kind = SAVED.get(saved, "none")
    if kind != "none":
        bare = skeleton(trainer.pretrained, "transformer")
        _, _, also = adapters.choose(bare, config.lora, trainer.lora_targets)
        packed = {
            f"{n}.weight" for n in quantize.eligible(bare, kind, [*trainer.keep_precise, *precision.exactly(also)])[0]
        }
    sizes, whole = {}, 0
    for name, p in network.net.named_parameters():
        is_packed = adapters.own_name(name) in packed
        sizes[name] = quantize.weight_bytes(kind, p.shape, p.dtype) if is_packed else p.nbytes
        whole = max(whole, p.nbytes * is_packed)
    return sizes, whole


def persistent(trainer, config: Config, network: Network, kind: str = "none", world: int = 1) -> Parts:
    """What stays from step to step, activations apart, on each of `world` ranks under `kind` (sharding.launched)."""
    c, trains = config, adapters.trainable(network.net)
    mixed = c.precision.weights != "fp32"
    trained = adapter = gradients = state = largest = 0
    for name, p in trains.items():
        dtype = p.dtype
        if mixed and kind == "fsdp":
            dtype = torch.float32  # Accelerate keeps what trains so
        elif mixed and kind != "none":
            dtype = trainer.dtype  # DeepSpeed does, beside float32 copies with the state
            state += 4 * p.numel()
        held = p.numel() * dtype.itemsize
        if adapters.own_name(name) in network.own:
            trained += held
        else:
            adapter += held
        gradients, largest = gradients + held, max(largest, held)
        state += optimizers.state_bytes(c.optimizer.name, p.shape, dtype if kind == "none" else torch.float32, name)
    state = 0 if c.optimizer.cpu_offload else state
    gradients = largest if c.optimizer.fused_backward else gradients
    sizes, whole = stored(trainer, c, network)
    frozen = {name: size for name, size in sizes.items() if name not in trains}
    weights = sum(frozen.values()) + whole - absent(c.memory, network, frozen)
    if kind in ("fsdp", "zero3"):  # a block is gathered for its turn
        gathered = max((sum(p.nbytes for p in block.parameters()) for block in network.blocks), default=0)
        weights, trained, adapter = weights // world + gathered, trained // world, adapter // world
    if kind in ("fsdp", "zero3", "zero2"):
        gradients //= world
    if kind != "none":
        state //= world
    return Parts(weights, trained, adapter, gradients, state)


def absent(options, network: Network, frozen: dict[str, int]) -> int:
    """Bytes of `frozen` that wait in host memory, less the room on the device for those at work."""
    if not memory.moves_weights(options):
        return 0
    names = {p: name for name, p in network.net.named_parameters() if name in frozen}
    per_block = [sum(frozen[names[p]] for p in block.parameters() if p in names) for block in network.blocks]
    if options.group_offload == "leaf":  # what lies outside of blocks waits too; of a block at work all is there
        return sum(frozen.values()) - max(per_block)
    moved = block_swap.spread(per_block, options.block_swap) if options.block_swap else per_block
    return sum(moved) - block_swap.BUFFERS * max(moved)


# -- activations ------------------------------------------------------------------------------------------------------


def example(trainer, bucket: Bucket, rows: int) -> Batch:
    """A micro-batch of `rows` samples of `bucket` on the meta device, as it comes from the cache."""
    vae = skeleton(trainer.pretrained, "vae")
    pixels = torch.zeros(1).expand(1, 3, bucket.frames, bucket.height, bucket.width)  # one number, seen as many
    batch = trainer.encode_video(SimpleNamespace(vae=vae), pixels)
    cached = precision.DTYPES[trainer.config.data.cache_dtype]
    shapes = {key: tuple(value.shape[1:]) for key, value in batch.items()} | trainer.text_shapes()
    made = {
        key: torch.empty(rows, *shape, device="meta", dtype=torch.bool if key in trainer.trims.values() else cached)
        for key, shape in shapes.items()
    }
    return made | {"fps": torch.full((rows,), 24.0)}


@torch.enable_grad()
def activations(trainer, config: Config, network: Network, batch: Batch) -> int:
    """Bytes that the backward pass of `batch` is kept for: `loss` run on it, without memory."""
    m, net, probe = config.memory, network.net, copy.copy(trainer)
    probe.config, probe.device, probe.step, probe.slots = config, torch.device("meta"), 0, [*range(len(batch["fps"]))]
    probe.normal = lambda name, shape: torch.empty(shape, device="meta")
    autocast = None if config.precision.weights == "fp32" else trainer.dtype

    def model(**inputs):
        with footprint.AsOnCuda(autocast):
            out = net(**inputs)
        return tree_map_only(Tensor, lambda t: t.float(), out)

    probe.model = model
    net.train()
    kept = footprint.Kept(footprint.storages([*net.parameters(), *net.buffers()]))
    with kept.counted(), footprint.checkpointed_by(kept.checkpoint):
        memory.checkpoint_blocks(net, m.checkpointing, m.checkpoint_every, blocks=trainer.repeated_blocks)
        loss = probe.loss(batch)
    del loss
    return kept.bytes(m.offload_activations) // m.context_parallel


# -- beside the training ----------------------------------------------------------------------------------------------


def of_vae(trainer, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Bytes of the VAE's weights, and of what it holds at its most while it encodes and decodes a video of this size.

    In tiles: of one tile of all frames, and the decoded video twice, in tiles and joined.
    """
    vae, joined = skeleton(trainer.pretrained, "vae"), 0
    there = footprint.storages([*vae.parameters(), *vae.buffers()])
    if memory.tiles(trainer.config.memory.vae_tiling, frames, height, width):
        joined = 2 * 3 * frames * height * width * vae.dtype.itemsize
        height = min(height, getattr(vae, "tile_sample_min_height", height))
        width = min(width, getattr(vae, "tile_sample_min_width", width))
    pixels = torch.empty(1, 3, frames, height, width, device="meta", dtype=vae.dtype)
    with torch.no_grad(), footprint.Live(there) as encoding, footprint.AsOnCuda():
        latents = vae.encode(pixels).latent_dist.mean
    timestep = {"temb": latents.new_empty(1)} if getattr(vae.config, "timestep_conditioning", False) else {}
    with torch.no_grad(), footprint.Live(there) as decoding, footprint.AsOnCuda():
        vae.decode(latents, **timestep)
    weights = sum(storage.nbytes() for storage in there.values())
    return weights, encoding.peak + pixels.nbytes, decoding.peak + joined


def of_text(trainer) -> int:
    """Bytes of the text encoders' weights, which are all loaded to encode captions."""
    c, total = trainer.config, 0
    for name in trainer.pretrained.text_components:
        if not name.startswith("text_encoder"):
            continue
        net, own = skeleton(trainer.pretrained, name), c.components.get(name)
        kind = own.quantize if own and own.quantize else "none"
        packed = {f"{n}.weight" for n in quantize.eligible(net, kind)[0]} if kind != "none" else ()
        total += sum(
            quantize.weight_bytes(kind, p.shape, p.dtype) if n in packed else p.nbytes
            for n, p in net.named_parameters()
        )
    return total


# -- the table --------------------------------------------------------------------------------------------------------

LORA = (
    {"memory.checkpointing": "blocks"},
    {"optimizer.name": "adamw8bit"},
    {"memory.offload_activations": True},
    {"precision.storage": "fp8"},
    {"precision.storage": "none", "precision.quantize": "int8wo"},
    {"precision.storage": "none", "precision.quantize": "nf4"},
    {"precision.storage": "none", "precision.quantize": "none", "memory.block_swap": "all"},
)
FULL = (
    {"memory.checkpointing": "blocks"},
    {"optimizer.name": "adamw8bit"},
    {"memory.offload_activations": True},
    {"precision.trainable": "bf16", "optimizer.name": "adamw-kahan"},
    {"precision.trainable": "bf16", "optimizer.name": "adamw8bit-ao"},
    {"optimizer.fused_backward": True, "optimizer.max_grad_norm": 0.0, "train.gradient_accumulation_steps": 1},
)


def changed(config: Config, changes: dict) -> Config:
    made = copy.deepcopy(config)
    for name, value in changes.items():
        section, option = name.split(".")
        setattr(getattr(made, section), option, value)
    return made


def fits(config: Config, saved: str | None) -> bool:
    """Whether options go together, with what was launched, and with how the transformer's folder is quantised."""
    of_folder = quantize.folder_problems({"transformer": saved}, config, sharding.launched() != "none")
    return not (config.problems() or sharding.contradictions(config) or of_folder)


def ladder(
    config: Config, blocks: int, price: Callable[[Config], Parts], saved: str | None = None
) -> Iterator[tuple[str, Parts]]:
    """This run and cheaper ones, each with the options of the one before and those that it is named by.

    Only what `fits` and lowers the total by 1 % or more. `blocks`: how many repeat; `saved`: see `fits`.
    """
    parts = price(config)
    yield "this run", parts
    for rung in LORA if config.method == "lora" else FULL:
        now = {name: option.value for name, option in options(config)}
        new = {name: blocks if value == "all" else value for name, value in rung.items()}
        new = {name: value for name, value in new.items() if value != now[name]}
        made = changed(config, new)
        if new and fits(made, saved) and (less := price(made)).total <= 0.99 * parts.total:
            config, parts = made, less
            yield "+ " + ", ".join(f"{name} {str(value).lower()}" for name, value in new.items()), less


def card(size: int) -> str:
    """The smallest common card that this many bytes should fit, with what is assumed to come on top."""
    share, fixed = SPARE
    return next((f"{gb} GB" for gb in CARDS if share * size / GIB + fixed <= gb), f"over {CARDS[-1]} GB")


class Estimate:
    """The estimates of one run; networks and activations are shared by runs that do not differ in them."""

    def __init__(self, trainer):
        def tokens(bucket: Bucket) -> int:
            return trainer.tokens(bucket.frames, bucket.height, bucket.width)

        self.trainer, self.kind, self.world = trainer, sharding.launched(), trainer.accelerator.num_processes
        self.bucket = max(map(Bucket.parse, trainer.plan.buckets), key=tokens)
        self.unknown = "" if trainer.text_shapes() else f"{type(trainer).__name__} has no text_shapes"
        self.networks: dict[tuple, Network] = {}
        self.counts: dict[tuple, int] = {}
        self.of_vae = cache(partial(of_vae, trainer))

    @cached_property
    def batch(self) -> Batch:
        return example(self.trainer, self.bucket, self.trainer.config.train.batch_size)

    def parts(self, config: Config) -> Parts:
        p, m = config.precision, config.memory
        key = (p.trainable, p.storage, m.checkpointing)
        if key not in self.networks:
            self.networks[key] = network(self.trainer, config)
        made, key = self.networks[key], (*key, m.offload_activations)
        if key not in self.counts:
            self.counts[key] = self.count(config, made)
        kept = persistent(self.trainer, config, made, self.kind, self.world)
        return replace(kept, activations=self.counts[key])

    def count(self, config: Config, made: Network) -> int:
        if self.unknown:
            return 0
        try:
            return activations(self.trainer, config, made, self.batch)
        except (RuntimeError, TypeError) as error:  # a model of one's own that looks at numbers: here are none
            self.unknown = f"loss or encode_video needs numbers ({str(error).splitlines()[0][:90]})"
            return 0

    def table(self) -> list[str]:
        """A row for this run, and one for each cheaper one."""
        c = self.trainer.config
        self.parts(c)
        (some,) = self.networks.values()
        saved = quantize.saved_as(self.trainer.pretrained.component_config("transformer"))
        rows = list(ladder(c, len(some.blocks), self.parts, saved))
        names, width = [*(part.name for part in fields(Parts)), "total"], max(len(name) for name, _ in rows)
        wide = {name: max(7, len(name)) for name in names}
        many = f" on each of {self.world} processes ({self.kind})" if self.world > 1 else ""
        size = f"{c.train.batch_size} x {self.bucket}"
        lines = [
            f"memory{many}, estimated, not measured on a GPU: GiB at most in a step, whose largest batch is {size}",
            " ".join([" " * width, *(f"{name:>{wide[name]}}" for name in names), " should fit"]),
        ]
        for name, parts in rows:
            cells = [f"{getattr(parts, part) / GIB:{wide[part]}.1f}" for part in names]
            lines.append(" ".join([f"{name:{width}}", *cells, f"{card(parts.total):>11}"]))
        return lines

    def stages(self, to_encode: bool) -> list[str]:
        """Encoding and validation, which come before and between steps, and the card for the most of all.

        `to_encode`: whether clips or captions are left to encode.
        """
        c, parts, lines = self.trainer.config, self.parts(self.trainer.config), []
        peaks, lower = (
            {"a training step": parts.total},
            {"encoding text": ", less with components.text_encoder.quantize"},
        )
        tiling = c.memory.vae_tiling
        if to_encode or c.data.precompute == "off":
            b, text = self.bucket, of_text(self.trainer)
            vae, encoding, _ = self.of_vae(b.frames, b.height, b.width)
            lines.append(f"encoding: text encoders {text / GIB:.1f}, then VAE {vae / GIB:.1f} + {encoding / GIB:.1f}")
            peaks |= {"encoding text": text, "encoding clips": vae + encoding}
            lower["encoding clips"] = "" if memory.tiles(tiling, b.frames, b.height, b.width) else TILE
            if c.data.precompute == "off":
                peaks = {"a training step": parts.total + text + vae + encoding}
                lines[-1] += ", all beside the training (data.precompute off)"
        if prompts := self.trainer.validation.prompts:
            size = max(((p.num_frames, p.height, p.width) for p in prompts), key=math.prod)
            vae, _, decoding = self.of_vae(*size)
            beside = parts.total - parts.gradients - parts.activations
            peaks["validation"] = beside + vae + decoding
            shape, lower["validation"] = "x".join(map(str, size)), "" if memory.tiles(tiling, *size) else TILE
            lines.append(
                f"validation: weights and optimizer {beside / GIB:.1f} + VAE {vae / GIB:.1f} + decoding {shape} "
                f"{decoding / GIB:.1f}"
            )
        stage = max(peaks, key=peaks.get)
        most, (share, fixed) = peaks[stage], SPARE
        lines.append(
            f"the smallest common card for this run: {card(most)} ({most / GIB:.1f} in {stage}{lower.get(stage, '')}; "
            f"x {share} and {fixed:.0f} for CUDA itself are assumed)"
        )
        return lines


def report(trainer, missing: dict[str, tuple[int, int]]) -> list[str]:
    """The estimate as text: all of it at stage plan, else that of a training step in a line.

    `missing`: as plan_report.report has it, kind -> (to encode, of); empty where it is not known.
    """
    made, stage = Estimate(trainer), trainer.config.stage
    if stage == "plan":
        to_encode = not missing or any(lacking for lacking, _ in missing.values())
        lines = ["", *made.table(), *made.stages(to_encode)]
    else:
        parts = made.parts(trainer.config)
        each = ", ".join(f"{part.name} {getattr(parts, part.name) / GIB:.1f}" for part in fields(Parts))
        lines = [f"memory of a training step, estimated: {parts.total / GIB:.1f} GiB ({each}); stage plan tells more"]
    if made.unknown:
        lines.append(f"activations are left out: {made.unknown}")
    c = trainer.config
    return lines + memory.allocator_advice(trainer.device, len(trainer.plan.buckets), c.memory)
