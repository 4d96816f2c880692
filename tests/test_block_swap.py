"""Block swap changes no number: networks of all models, with what trains, samples and resumes around it; its bytes."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import nets
import runs
from models import adapters, block_swap, memory
from trainers import launch, validation
from trainers.config import MemoryOptions

pytestmark = pytest.mark.usefixtures("libraries")

CPU = torch.device("cpu")
NETS = {
    "ltx": (lambda: nets.ltx(num_layers=5), nets.ltx_inputs, ()),
    "hunyuan": (lambda: nets.hunyuan(num_layers=3, num_single_layers=3), nets.hunyuan_inputs, ()),
    "cogvideox": (lambda: nets.cogvideox(num_layers=5), nets.cogvideox_inputs, ["CogVideoXBlock"]),
}
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def blocks_of(net, names=()):
    return [block for _, block in memory.repeated(net, names)]


def on(device, inputs):
    """Inputs of a network on `device`, the pair of rotary positions too."""
    return {k: torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), v) for k, v in inputs.items()}


def learn(net, inputs, device=CPU, steps=3):
    """All numbers of `steps` optimizer steps of two micro-steps each, with sampling (forward passes alone) after each;
    then the gradients of one more, and the weights."""
    optimizer = torch.optim.AdamW(adapters.trainable(net).values(), lr=1e-2)
    told = []
    for step in range(steps):
        for micro in range(2):
            loss = net(**on(device, inputs(2 * step + micro)))[0].square().mean()
            loss.backward()
            told.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            told += [net(**on(device, inputs(seed)))[0].double().sum().item() for seed in (90, 91, 92)]
        net.train()
    net(**on(device, inputs(99)))[0].square().mean().backward()
    grads = {name: p.grad.cpu() for name, p in adapters.trainable(net).items()}
    return told, grads, {name: tensor.cpu() for name, tensor in net.state_dict().items()}


def ready(make, **lora):
    net = nets.trained(make(), **lora).train()
    memory.checkpoint_blocks(net, "blocks")
    return net


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("count", [3, None], ids=["three", "all"])
def test_swapped_blocks_learn_and_sample_the_same(name, count):
    make, inputs, names = NETS[name]
    plain = learn(ready(make), inputs)
    net = ready(make)
    blocks = blocks_of(net, names)
    made = block_swap.swap(net, block_swap.spread(blocks, count or len(blocks)), CPU)
    swapped = learn(net, inputs)
    assert runs.same(swapped, plain) and all(g.any() for g in plain[1].values())
    assert made.late == 1  # the very first; every other copy was started while the block before was at work
    assert made.copies > 20


def test_trained_parameters_of_swapped_blocks_stay_on_the_device():
    options = dict(also_train=["transformer_blocks.*.scale_shift_table"])
    make, inputs, _ = NETS["ltx"]
    plain = learn(ready(make, **options), inputs)
    net = ready(make, **options)
    made = block_swap.swap(net, blocks_of(net), CPU)
    held = {id(p) for host in made.hosts for p in host.parameters}
    assert not held & {id(p) for p in adapters.trainable(net).values()}
    assert runs.same(learn(net, inputs), plain) and any("scale_shift" in name for name in plain[1])


def test_swapped_blocks_are_spread_over_the_network():
    def places(count, total):
        return block_swap.spread(range(total), count)

    assert places(3, 28) == [4, 14, 23] and places(28, 28) == list(range(28)) and places(3, 3) == [0, 1, 2]
    assert all(len(set(places(k, 60))) == k for k in range(1, 61))


def test_names_and_weights_stay_whole_at_any_time():
    make, inputs, _ = NETS["ltx"]
    plain, net = ready(make), ready(make)
    block_swap.swap(net, blocks_of(net), CPU)
    expected = plain.state_dict()
    seen = []

    def look(*_):
        seen.append(runs.same(dict(net.state_dict()), dict(expected)))

    assert runs.same(dict(net.state_dict()), dict(expected))
    for block in net.transformer_blocks:
        block.register_forward_hook(look)
    net(**inputs())[0].sum().backward()
    look()
    assert len(seen) >= 6 and all(seen)


def test_a_block_that_is_not_checkpointed_is_an_error_not_wrong_gradients():
    make, inputs, _ = NETS["ltx"]
    net = nets.trained(make()).train()
    block_swap.swap(net, blocks_of(net), CPU)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(**inputs())[0].sum().backward()


def storages(tensors):
    """Bytes of the distinct pieces of memory that the tensors lie in."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", NETS)
def test_the_device_holds_two_blocks_of_the_swapped_ones(name):
    make, inputs, names = NETS[name]
    net = ready(make)
    blocks = blocks_of(net, names)
    frozen = [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in blocks]
    whole = storages(net.parameters())
    made = block_swap.swap(net, blocks, CPU)
    net(**inputs())[0].sum().backward()

    on_host = {host.memory.untyped_storage().data_ptr() for host in made.hosts}
    buffers = [buffer.memory for buffer in made.buffers]
    on_device = storages([p for p in net.parameters() if p.untyped_storage().data_ptr() not in on_host] + buffers)
    rounding = block_swap.ALIGNED * max(len(host.parameters) for host in made.hosts)
    expected = whole - sum(frozen) + 2 * max(frozen)
    assert expected <= on_device <= expected + 2 * rounding
    assert len(buffers) == 2 and len(blocks) >= 5 and on_device < whole
    for host, size in zip(made.hosts, frozen, strict=True):  # the host holds them once, side by side
        assert size <= len(host.memory) <= size + rounding


def test_more_blocks_than_there_are_is_told_before_anything_loads(tiny_ltx, clips, tmp_path):
    from trainers.ltx import LTXTrainer

    made = runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path / "run", memory__block_swap=3)
    with pytest.raises(ValueError, match="block_swap 3: LTXVideoTransformer3DModel has 2 blocks; use at most 2"):
        made.run()
    assert not list(tmp_path.rglob("*.safetensors"))


class Streams:
    """A device with streams that do nothing but tell, in `told`, what was asked of them, and which is current."""

    def __init__(self):
        self.told, self.running, self.events = [], ["compute"], 0

    def get_device_module(self, device):
        return self

    def Stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.told.append(("copies wait for", other.name)))

    def current_stream(self):
        def wait_event(event):
            self.told.append(("compute waits for", event.number))

        return SimpleNamespace(name=self.running[-1], wait_event=wait_event)

    @contextlib.contextmanager
    def stream(self, stream):
        self.running.append("copies")
        yield
        self.running.pop()

    def Event(self):
        self.events += 1
        number = self.events
        return SimpleNamespace(number=number, record=lambda: self.told.append((f"{self.running[-1]} record", number)))


def test_copies_have_a_stream_of_their_own_that_waits_and_is_waited_for(monkeypatch):
    make, inputs, _ = NETS["ltx"]
    net, device = ready(make), Streams()
    monkeypatch.setattr(block_swap, "HAVE_STREAMS", ("cpu",))
    monkeypatch.setattr(torch, "get_device_module", device.get_device_module)
    made = block_swap.swap(net, blocks_of(net), CPU)
    monkeypatch.undo()
    for i, block in enumerate(net.transformer_blocks):
        block.norm1.register_forward_pre_hook(lambda _, args, i=i: device.told.append(("runs", i)))
    net(**inputs())[0].sum().backward()

    copied = {}  # block -> number of the event after its last copy
    order = iter([0, 1, 2, 3, 4, 2, 1, 0])  # as they are copied: 4 and 3 are still there when the backward pass begins
    for n, (what, which) in enumerate(device.told):
        if what == "copies record":
            assert device.told[n - 1] == ("copies wait for", "compute")
            copied[next(order)] = which
        elif what == "runs":
            waits = [number for what, number in device.told[:n] if what == "compute waits for"]
            assert waits[-1] == copied[which]
    assert next(order, None) is None and made.copies == 8
    assert [which for what, which in device.told if what == "runs"] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(built, tmp_path_factory):
    """deep(name) -> the tiny pipeline with four or six blocks in its transformer."""

    def make(name):
        import diffusers

        folder = tmp_path_factory.mktemp("deep") / name
        shutil.copytree(built(name), folder)
        config = json.loads((folder / "transformer" / "config.json").read_text())
        changes = {key: 4 if name.startswith(("ltx", "cog")) else 3 for key in ("num_layers", "num_single_layers")}
        kind = getattr(diffusers, config["_class_name"])
        torch.manual_seed(0)
        kind.from_config(config | {k: v for k, v in changes.items() if k in config}).save_pretrained(
            folder / "transformer"
        )
        return folder

    return make


RUN = {"train__gradient_accumulation_steps": 2, "checkpoint__every": 2, "validation__every": 2}
PROMPT = """- {prompt: a cat, num_frames: 9, height: 64, width: 96, num_inference_steps: 2}"""


@pytest.mark.parametrize("model", ["ltx", "hunyuan", "cogvideox-2b"])
def test_a_run_with_samples_export_and_resume_is_the_same(model, deep, start, tmp_path, aligned, monkeypatch):
    kind = next(kind for kind in runs.trainers_by_name().values() if model in kind.tiny)
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text(PROMPT)
    options = RUN | {"kind": kind, "model": deep(model), "validation__prompts": prompts}
    frames, as_uint8 = [], validation.as_uint8  # not the files: the encoder's bytes differ from time to time
    monkeypatch.setattr(validation, "as_uint8", lambda given: frames.append(as_uint8(given)) or frames[-1])
    start("plain", **options)
    placed, prepare = [], Accelerator.prepare_model
    monkeypatch.setattr(
        Accelerator,
        "prepare_model",
        lambda *given, **how: placed.append(how["device_placement"]) or prepare(*given, **how),
    )
    start("swapped", **options, memory__block_swap=3)
    assert placed == [False]  # or all weights would be moved to the device
    runs.assert_same_outcome(tmp_path / "plain", tmp_path / "swapped")
    assert len(frames) == 6 and runs.same(frames[:3], frames[3:])

    with pytest.raises(runs.Interrupted):
        start("resumed", **options | {"kind": runs.interrupted(kind, 3)}, memory__block_swap=3)
    start("resumed", **options, memory__block_swap=3, checkpoint__resume="latest")
    runs.assert_same_outcome(tmp_path / "plain", tmp_path / "resumed")


def ranks(model, clips, out, cache, swap):
    from trainers.ltx import LTXTrainer

    made = runs.trainer(LTXTrainer, model, clips, out, memory__block_swap=swap, data__cache_dir=cache, **RUN)
    made.run()
    return str(made.accelerator.distributed_type.value), made.world, runs.losses(out), runs.trained(made).tolist()


def test_two_ranks_with_swapped_blocks_are_two_without(deep, clips, cache, tmp_path, aligned):
    model = deep("ltx")
    plain, swapped = (runs.forked(ranks, model, clips, tmp_path / str(n), cache, n) for n in (0, 3))
    assert plain == swapped and [row[:2] for row in plain] == [("MULTI_CPU", 2)] * 2


# -- on a GPU --------------------------------------------------------------------------------------------------------


def peak_of(net, inputs, steps=2):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    told = learn(net, inputs, torch.device("cuda"), steps)
    torch.cuda.synchronize()
    return told, torch.cuda.max_memory_allocated()


@pytest.fixture
def exact():
    """CUDA that gives the same bits every time."""
    launch.be_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@CUDA
@pytest.mark.parametrize("name", NETS)
def test_on_cuda_the_numbers_are_the_same(name, exact):
    make, inputs, names = NETS[name]
    plain = learn(ready(make).to("cuda"), inputs, torch.device("cuda"))
    net = ready(make)
    made = block_swap.swap(net, blocks_of(net, names), torch.device("cuda"))
    assert all(host.memory.is_pinned() for host in made.hosts)
    assert runs.same(learn(net, inputs, torch.device("cuda")), plain) and made.late == 1


@CUDA
@pytest.mark.parametrize("kind", ["block", "leaf"])
def test_on_cuda_group_offload_learns_the_same(kind, exact):
    make, inputs, names = NETS["ltx"]
    cuda = torch.device("cuda")
    plain = learn(ready(make).to(cuda), inputs, cuda)
    net = ready(make)
    memory.place(net, MemoryOptions(group_offload=kind), cuda, names)
    assert runs.same(learn(net, inputs, cuda), plain)
    assert all(p.is_cuda for p in adapters.trainable(net).values())
    assert kind == "block" or not net.transformer_blocks[0].ff.net[2].weight.is_cuda


@CUDA
def test_on_cuda_large_blocks_leave_room(exact):
    """16 blocks of 32 MiB in bf16 that take longer to copy than to compute: the order of streams is what is tested."""

    def make():
        with torch.device("cuda"):
            net = nets.ltx(num_layers=16, num_attention_heads=8, attention_head_dim=128, cross_attention_dim=1024)
        return net.to("cpu", torch.bfloat16)

    def inputs(seed):
        return nets.ltx_inputs(seed, torch.bfloat16)

    plain, without = peak_of(ready(make).to("cuda"), inputs)
    torch.cuda.empty_cache()
    net = ready(make)
    made = block_swap.swap(net, blocks_of(net), torch.device("cuda"))
    swapped, with_swap = peak_of(net, inputs)
    assert runs.same(swapped, plain) and made.late == 1
    saved = sum(len(host.memory) for host in made.hosts) - 2 * max(len(host.memory) for host in made.hosts)
    assert without - with_swap > 0.9 * saved
