"""Which options fit together, for every model; trainers/config.py asks, and says what each may be by itself."""

from models.quantize import UNFIT_ADAPTERS

ROUNDS_STOCHASTICALLY = ("adamw8bit-ao", "adamw4bit-ao", "adamwfp8-ao")
UPDATES_BF16 = (*ROUNDS_STOCHASTICALLY, "adamw-kahan")  # without losing what is below half a step of bf16
HAS_LORA_B = ("lora", "dora", "rslora")


def together(c) -> list[tuple[object, str]]:
    """(broken if true, what to tell the user) for each rule on a trainers.config.Config."""
    lora, train, precision = c.lora, c.train, c.precision
    lengths = {"steps": train.steps, "epochs": train.epochs, "max_samples": train.max_samples}
    given = [f"train.{name} ({value})" for name, value in lengths.items() if value is not None]
    of_lora = [f"lora.{name}" for name in ("init_from", "targets", "exclude", "also_train") if getattr(lora, name)]
    half = "transformer" in c.components and c.components["transformer"].dtype
    repeated = sorted({str(bucket) for bucket in c.data.buckets if c.data.buckets.count(bucket) > 1})
    return [
        (not c.model, "model is required: a Hub id, a folder in diffusers layout or a .safetensors file"),
        (not c.output_dir, "output_dir is required: the folder that the run writes to"),
        (not c.data.train, "data.train is required: a folder of clips and captions, or a metadata file"),
        (
            not (c.data.buckets or c.data.resolution or (c.data.train and all(s.buckets for s in c.data.train))),
            "data.buckets is required: the sizes to train at, such as 49x512x768 (or data.resolution with data.frames)",
        ),
        (
            c.data.buckets and (c.data.resolution or c.data.frames),
            "data.buckets and data.resolution with data.frames are two ways to say one thing: give one of them",
        ),
        (
            bool(c.data.resolution) != bool(c.data.frames),
            "data.resolution and data.frames belong together: 512 and 49 train at 49 frames of about 512x512 pixels",
        ),
        (
            c.data.crop == "random" and c.data.resize != "cover",
            f"data.crop random cuts what resize cover leaves over; with data.resize {c.data.resize} use crop centre",
        ),
        (
            c.data.keep_tags and not c.data.tag_shuffle,
            f"data.keep_tags {c.data.keep_tags} says what data.tag_shuffle leaves in place, but that is 0 and shuffles "
            "nothing: give tag_shuffle a number of orders, such as 4, or keep_tags 0",
        ),
        (repeated, f"data.buckets names {', '.join(repeated)} more than once"),
        (len(given) > 1, f"only one of {' and '.join(given)} can be set: make the others null"),
        (
            c.checkpoint.resume and c.overwrite,
            "checkpoint.resume continues the run in output_dir and overwrite starts it anew: choose one (the "
            "configs set checkpoint.resume: latest; with overwrite make it null)",
        ),
        (
            c.method == "full" and of_lora,
            f"{', '.join(of_lora)}: for method lora, but method is full (its patterns are train_modules)",
        ),
        (
            c.method == "lora" and c.train_modules,
            "train_modules is for method full; with method lora use lora.also_train",
        ),
        (
            c.method == "full" and precision.storage == "fp8",
            "precision.storage fp8 keeps frozen weights only and needs method lora: with method full use none",
        ),
        (
            precision.storage == "fp8" and lora.type == "dora",
            "precision.storage fp8 with lora.type dora: DoRA computes with the stored weights themselves, which "
            "fp8 cannot do; use lora.type lora or precision.storage none",
        ),
        (
            precision.storage == "fp8" and c.memory.compile != "none",
            "precision.storage fp8 with memory.compile: compiled code keeps weights for the backward pass that are "
            "cast back to fp8 before it; use one of the two",
        ),
        (
            precision.quantize != "none" and c.method == "full",
            f"precision.quantize {precision.quantize} with method full: quantised weights are frozen; use method lora, "
            "or precision.quantize none",
        ),
        (
            precision.quantize != "none" and precision.storage != "none",
            f"precision.quantize {precision.quantize} and precision.storage {precision.storage} both change how frozen "
            "weights are kept: use one of them (quantize fp8wo is the nearest to both)",
        ),
        (
            precision.quantize in UNFIT_ADAPTERS.get(lora.type, ()) and c.method == "lora",
            f"precision.quantize {precision.quantize} with lora.type {lora.type}: peft cannot read such weights for "
            "it; use lora or rslora, or precision.quantize fp8wo",
        ),
        (
            precision.fp8_training and c.method == "lora",
            "precision.fp8_training is for method full; with method lora use precision.quantize fp8wo, which keeps the "
            "frozen weights in fp8",
        ),
        (
            precision.fp8_training and precision.weights == "fp16",
            "precision.fp8_training with precision.weights fp16: its range is too small beside fp8's scales; use bf16",
        ),
        *(
            (
                component.quantize and not name.startswith("text_encoder"),
                f"components.{name}.quantize {component.quantize}: only text encoders are quantised by it"
                + ("; use precision.quantize" if name == "transformer" else "; leave it out"),
            )
            for name, component in c.components.items()
        ),
        (
            precision.trainable == "bf16" and c.optimizer.name not in UPDATES_BF16,
            "precision.trainable bf16 needs an optimizer that compensates or rounds stochastically: use fp32, or "
            "optimizer.name " + " or ".join(UPDATES_BF16),
        ),
        *_of_optimizer(c),
        *_of_memory(c),
        (
            precision.weights == "fp32" and half in ("bf16", "fp16"),
            f"components.transformer.dtype {half}: precision.weights fp32 computes in fp32, which such weights "
            "cannot; leave the dtype out, or set precision.weights too",
        ),
        (
            c.memory.context_parallel > 1 and c.memory.compile != "none",
            f"memory.context_parallel {c.memory.context_parallel} with memory.compile {c.memory.compile}: compiled "
            "blocks that wait for other ranks were never compared; use memory.compile none",
        ),
        (
            c.memory.context_parallel > 1 and c.memory.group_offload != "none",
            f"memory.context_parallel {c.memory.context_parallel} with memory.group_offload "
            f"{c.memory.group_offload}: both take over the network's forward; use memory.block_swap",
        ),
        (
            c.memory.context_parallel > 1 and c.memory.attention not in (None, "native"),
            f"memory.context_parallel {c.memory.context_parallel} with memory.attention {c.memory.attention}: tokens "
            "are shared by the native backend only; use native or leave it out",
        ),
        (
            c.precompute_only and c.stage == "train",
            f"precompute_only {c.precompute_only} encodes and stage train does not: choose one",
        ),
        (
            c.data.precompute == "off" and (c.precompute_only or c.stage == "precompute"),
            "stage precompute and precompute_only fill the cache and need data.precompute disk, not off",
        ),
        (
            c.noise.min >= c.noise.max,
            f"noise.min ({c.noise.min}) must be below noise.max ({c.noise.max})",
        ),
        (
            c.validation.from_export and not c.validation.prompts,
            "validation.from_export samples validation.prompts, and none is given",
        ),
    ]


def _of_optimizer(c) -> list[tuple[object, str]]:
    o = c.optimizer
    return [
        (
            o.name == "adamw-kahan" and c.precision.trainable != "bf16",
            "optimizer.name adamw-kahan compensates the rounding of bf16 weights: set precision.trainable bf16, or use "
            "adamw",
        ),
        (
            o.name == "prodigy" and o.learning_rate < 0.1,
            f"optimizer.learning_rate {o.learning_rate} with optimizer.name prodigy: it finds the rate itself and "
            "multiplies it by this; use 1",
        ),
        (
            o.name == "schedulefree" and o.schedule != "constant",
            f"optimizer.schedule {o.schedule} with optimizer.name schedulefree: its averaging stands for the schedule; "
            "use constant (warm-up stays)",
        ),
        (
            o.name == "schedulefree" and o.betas[0] == 0,
            "optimizer.betas 0 with optimizer.name schedulefree, which divides by the first one: use 0.9",
        ),
        (
            o.lora_plus_ratio != 1 and (c.method != "lora" or c.lora.type not in HAS_LORA_B),
            f"optimizer.lora_plus_ratio {o.lora_plus_ratio} is for the B matrices of method lora with lora.type "
            f"{' or '.join(HAS_LORA_B)}: use 1 here",
        ),
        (
            o.lora_plus_ratio != 1 and o.name == "prodigy",
            f"optimizer.lora_plus_ratio {o.lora_plus_ratio} with optimizer.name prodigy, which has one rate for all: "
            "use 1, or adamw",
        ),
        (
            o.cpu_offload and o.name != "adamw",
            f"optimizer.cpu_offload with optimizer.name {o.name}: it is for adamw; for less state on the device use "
            "adamw8bit, paged_adamw8bit or adamw4bit-ao without it",
        ),
        (
            o.cpu_offload and o.max_grad_norm,
            f"optimizer.cpu_offload with optimizer.max_grad_norm {o.max_grad_norm:g}: gradients go to the host during "
            "the backward pass, before their norm is known; set max_grad_norm 0",
        ),
        (
            o.fused_backward and o.max_grad_norm,
            f"optimizer.fused_backward with optimizer.max_grad_norm {o.max_grad_norm:g}: weights are updated before "
            "the norm of all gradients is known; set max_grad_norm 0",
        ),
        (
            o.fused_backward and c.train.gradient_accumulation_steps > 1,
            "optimizer.fused_backward with train.gradient_accumulation_steps "
            f"{c.train.gradient_accumulation_steps}: weights are updated in every backward pass; use 1 and a larger "
            "train.batch_size",
        ),
        (
            (o.fused_backward or o.cpu_offload) and c.precision.weights == "fp16",
            "optimizer.fused_backward and cpu_offload with precision.weights fp16: they take gradients before the loss "
            "scale is divided out; use bf16",
        ),
        (
            o.fused_backward and (o.name == "prodigy" or o.cpu_offload),
            "optimizer.fused_backward with optimizer.name prodigy or cpu_offload, whose updates need all gradients: "
            "turn it off, or use another optimizer",
        ),
    ]


def _of_memory(c) -> list[tuple[object, str]]:
    m = c.memory
    asked = f"memory.group_offload {m.group_offload}"
    if m.block_swap:
        asked = f"memory.block_swap {m.block_swap}"
    moves = m.block_swap > 0 or m.group_offload != "none"
    return [
        (
            m.offload_activations and m.checkpointing not in ("blocks", "every_n"),
            f"memory.offload_activations with memory.checkpointing {m.checkpointing}: it moves the inputs of "
            "checkpointed blocks; use checkpointing blocks or every_n",
        ),
        (
            0 < m.block_swap < 3,
            f"memory.block_swap {m.block_swap} saves nothing, since the device holds two swapped blocks at a time: use "
            "3 or more, or 0",
        ),
        (
            m.block_swap and m.group_offload != "none",
            f"memory.block_swap {m.block_swap} with memory.group_offload {m.group_offload}: both move the weights; "
            "use one of them",
        ),
        (
            moves and c.method != "lora",
            f"{asked} with method {c.method}: weights that train cannot be copied from the host without losing their "
            "updates; use method lora, or DeepSpeed's or FSDP2's offloading for method full",
        ),
        (
            moves and m.checkpointing != "blocks",
            f"{asked} with memory.checkpointing {m.checkpointing}: what is not computed again keeps its weights on the "
            "device until the backward pass, and their memory would be written over; use checkpointing blocks",
        ),
        (
            moves and m.compile != "none",
            f"{asked} with memory.compile {m.compile}: compiled code holds on to the memory of weights, which here "
            "changes; use compile none",
        ),
        (
            moves and c.precision.quantize != "none",
            f"{asked} with precision.quantize {c.precision.quantize}: quantised weights are more than one piece of "
            "memory; use one of the two",
        ),
        (
            m.group_offload == "leaf" and c.lora.type == "dora",
            "memory.group_offload leaf with lora.type dora: DoRA computes with weights while they are on the host; use "
            "group_offload block or another type",
        ),
        (
            moves and c.precision.storage != "none",
            f"{asked} with precision.storage {c.precision.storage}: casting moves the weights out of their place; use "
            "one of the two",
        ),
    ]
