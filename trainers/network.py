"""The network of a run: loaded, adapted, stored and placed as the options say; and what of them it does not stand."""

from torch import nn

from models import adapters, context_parallel, memory, precision, quantize
from trainers import sharding
from trainers.config import MemoryOptions, refuse


def build(trainer) -> nn.Module:
    """The transformer with what trains of it, in training mode, ready for Accelerate's prepare.

    It comes from the disk to the host; what is quantised, or placed by a memory option, is on the device already.
    """
    c = trainer.config
    net = trainer.pretrained.component("transformer")
    if c.precision.quantize != "none":
        _, _, also = adapters.choose(net, c.lora, trainer.lora_targets)
        keep = [*trainer.keep_precise, *precision.exactly(also)]
        trainer.say(quantize.quantize(net, c.precision.quantize, trainer.device, keep))
    if c.method == "lora":
        found = adapters.attach(net, c.lora, trainer.lora_targets, c.train.seed)
    else:
        found = adapters.select(net, c.train_modules)
    adapters.cast_trainable(net, precision.DTYPES[c.precision.trainable])
    trainer.say(str(found))
    if c.lora.init_from:
        notes = adapters.load_lora_into(net, c.lora.init_from, trainer.comfy_names)
        trainer.say(f"starting from the weights of {c.lora.init_from}", *notes)
    precision.apply_storage(net, c.precision.storage, trainer.dtype, trainer.keep_precise)
    if c.precision.fp8_training:
        trainer.say(precision.train_in_fp8(net, trainer.device, trainer.keep_precise))
    m, blocks = c.memory, trainer.repeated_blocks
    memory.set_attention(net, m.attention)
    memory.checkpoint_blocks(net, m.checkpointing, m.checkpoint_every, m.offload_activations, blocks)
    sizes = len(trainer.plan.buckets) if m.compile != "none" else 1
    memory.compile_blocks(net, m.compile, m.compile_backend, blocks, sizes)
    memory.place(net, m, trainer.device, blocks)
    context_parallel.share_tokens(net, c.memory.context_parallel, trainer.device)
    net.train()
    return net


def unfit_folders(trainer) -> list[str]:
    """Options that do not fit components which were saved quantised."""
    c = trainer.config
    names = ["transformer", *(name for name, o in c.components.items() if o.quantize)]
    saved = {name: quantize.saved_as(trainer.pretrained.component_config(name)) for name in names}
    return quantize.folder_problems(saved, c, sharding.launched() != "none")


def check(trainer) -> None:
    """Raises AdapterError, ModelError or OptionError for what does not fit the network; reads its config alone."""
    c, blocks = trainer.config, trainer.repeated_blocks
    if c.memory != MemoryOptions():
        net = trainer.pretrained.skeleton("transformer")
        wrong = memory.problems(net, c.memory, blocks)
        refuse(wrong + context_parallel.problems(net, c.memory.context_parallel))
        memory.try_attention(net, c.memory.attention, trainer.device, trainer.dtype, masked=bool(trainer.trims))
    if c.train_modules:
        adapters.select(trainer.pretrained.skeleton("transformer"), c.train_modules)
    elif c.lora.init_from:
        net = trainer.pretrained.skeleton("transformer")
        adapters.attach(net, c.lora, trainer.lora_targets)
        adapters.load_lora_into(net, c.lora.init_from, trainer.comfy_names)
    elif c.lora.targets or c.lora.exclude or c.lora.also_train:
        adapters.choose(trainer.pretrained.skeleton("transformer"), c.lora, trainer.lora_targets)
