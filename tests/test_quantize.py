"""Quantised bases: which layers become small, how small, one at a time; adapters learn on them and fit the whole base.

The tiny networks' repeated blocks have rows of 32, which every kind can hold.
"""

import json
import re
import shutil
import weakref

import pytest
import torch
from torch import nn

import nets
import runs
from models import adapters, load, lora_commands, precision, quantize
from models.lora_files import AdapterError
from trainers.config import OptionError
from trainers.ltx import LTXTrainer

pytestmark = pytest.mark.usefixtures("libraries")

KINDS = ("nf4", "fp4", "int8", "int8wo", "fp8wo", "int4")
PEFT_LAYERS = {
    **dict.fromkeys(("nf4", "fp4"), ("bnb", "Linear4bit")),
    "int8": ("bnb", "Linear8bitLt"),
    **dict.fromkeys(("int8wo", "fp8wo"), ("torchao", "TorchaoLoraLinear")),
    "int4": ("layer", "Linear"),
}
STEPS = 8
LEARNS = {
    "precision__weights": "bf16",
    "data__cache_dtype": "bf16",
    "train__steps": STEPS,
    "lora__rank": 8,
    "optimizer__learning_rate": 3e-2,
    "optimizer__schedule": "constant",
}


@pytest.fixture(scope="module")
def bnb_on_cpu():
    """diffusers wants a GPU for bitsandbytes, which itself works on a CPU: by the module that checks it."""
    from diffusers.quantizers.bitsandbytes import bnb_quantizer as of

    patch = pytest.MonkeyPatch()
    for kind in (of.BnB4BitDiffusersQuantizer, of.BnB8BitDiffusersQuantizer):
        patch.setattr(kind, "validate_environment", lambda self, *a, **k: None)
        patch.setattr(kind, "update_device_map", lambda self, device_map: device_map or {"": "cpu"})
    yield
    patch.undo()


def quantised(folder, kind, dtype=torch.bfloat16):
    net = load.load(folder, "transformer", dtype)
    quantize.quantize(net, kind, "cpu", LTXTrainer.keep_precise)
    return net


def parts(module) -> list[torch.Tensor]:
    """Every tensor that a quantised layer's weight is made of."""
    weight, state = module.weight, getattr(module.weight, "quant_state", None)
    inner = [*getattr(weight, "tensor_data_names", ()), *getattr(weight, "optional_tensor_data_names", ())]
    found = [getattr(weight, name, None) for name in inner] if inner else [weight]
    found += [getattr(module, "scale", None), getattr(weight, "SCB", None)]
    if state is not None:
        found += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return [tensor for tensor in found if tensor is not None]


# -- which layers, and how small -------------------------------------------------------------------------------------

ATTENTION, FEED = ["to_k", "to_out.0", "to_q", "to_v"], ["net.*.proj", "net.2"]
EXPECTED = {
    "ltx": [f"transformer_blocks.*.attn{i}.{x}" for i in (1, 2) for x in ATTENTION]
    + [f"transformer_blocks.*.ff.{x}" for x in FEED],
    "cogvideox-1.5-i2v": [f"transformer_blocks.*.attn1.{x}" for x in ATTENTION]
    + [f"transformer_blocks.*.ff.{x}" for x in FEED],
    "hunyuan-i2v": [f"single_transformer_blocks.*.{x}" for x in ("attn.to_k", "attn.to_q", "attn.to_v")]
    + [f"single_transformer_blocks.*.proj_{x}" for x in ("mlp", "out")]
    + [f"transformer_blocks.*.attn.{x}" for x in ATTENTION]
    + [f"transformer_blocks.*.attn.{x}" for x in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")]
    + [f"transformer_blocks.*.{ff}.{x}" for ff in ("ff", "ff_context") for x in FEED],
}


@pytest.mark.parametrize("model", EXPECTED)
def test_the_blocks_of_each_model_become_small_and_the_rest_stays(built, clips, tmp_path, model):
    kind = runs.trainers_by_name()[re.match("[a-z]+", model)[0].replace("cogvideox", "cog")]
    made = runs.trainer(kind, built(model), clips, tmp_path)
    net = made.pretrained.skeleton("transformer")
    assert all(p.device.type == "meta" for p in net.parameters())
    for to in KINDS:
        names, odd = quantize.eligible(net, to, kind.keep_precise)
        assert sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}) == sorted(EXPECTED[model]) and not odd
    assert len(names) < sum(isinstance(m, nn.Linear) for m in net.modules()) - 4  # embeddings, projections, modulation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_bytes_are_those_of_the_layer(tiny_ltx, kind, dtype):
    net = quantised(tiny_ltx, kind, dtype)
    for name in quantize.eligible(load.load(tiny_ltx, "transformer", dtype), kind, LTXTrainer.keep_precise)[0]:
        module = net.get_submodule(name)
        real = sum({t.data_ptr(): t.nbytes for t in parts(module)}.values())
        predicted = quantize.weight_bytes(kind, (module.out_features, module.in_features), dtype)
        assert predicted == real
    assert quantize.weight_bytes(kind, (3072, 3072), torch.bfloat16) < (0.57 if "4" in kind else 1.01) * 3072**2
    assert quantize.weight_bytes("none", (3, 5), dtype) == 15 * dtype.itemsize


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_network_is_never_on_the_device(tiny_ltx, kind, monkeypatch):
    """The device is the CPU here: a weight counts from the call that moves its layer until it is freed."""
    import bitsandbytes.nn as bnb

    net, alive, most, moved = load.load(tiny_ltx, "transformer", torch.bfloat16), weakref.WeakSet(), [0], []

    def watched(what):
        def call(self, *args, **kwargs):
            if isinstance(self, nn.Module):
                module = self
                self = next((p for p in (self.weight,) if p.dtype == torch.bfloat16), None)
                if type(module) is nn.Linear and self is not None:
                    count(self)
                return what(module, *args, **kwargs)
            count(self)
            return what(self, *args, **kwargs)

        return call

    def count(weight):
        moved.append(weight.numel())
        alive.add(weight)
        most[0] = max(most[0], sum(w.numel() for w in alive if w.dtype == torch.bfloat16))

    monkeypatch.setattr(nn.Linear, "to", watched(nn.Linear.to))
    for of in (bnb.Params4bit, bnb.Int8Params):
        monkeypatch.setattr(of, "_quantize", watched(of._quantize))
    names, _ = quantize.eligible(net, kind, LTXTrainer.keep_precise)
    quantize.quantize(net, kind, "cpu", LTXTrainer.keep_precise)
    assert len(moved) == len(names) == 20
    assert most[0] == max(moved) < sum(moved) / 5


def test_rows_that_a_kind_cannot_hold_stay_and_are_told():
    def net():
        return nn.ModuleDict({"a": nn.Linear(40, 32), "b": nn.Linear(64, 32), "norm_out": nn.Linear(64, 32)})

    odd = net()
    said = quantize.quantize(odd, "int4", "cpu")
    assert "quantised 1 linear layers" in said and "1 layers stay, their rows are no multiple of 32, such as a" in said
    assert type(odd["a"]) is type(odd["norm_out"]) is nn.Linear
    assert "2 linear layers" in quantize.quantize(net(), "nf4", "cpu")
    with pytest.raises(precision.PrecisionError, match=r"quantize int4: ModuleDict has no layer for it .*such as a"):
        quantize.quantize(nn.ModuleDict({"a": nn.Linear(40, 32)}), "int4", "cpu")


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8wo", "fp8wo", "int4"])
def test_products_are_those_of_the_dequantised_weight_and_keep_no_whole_weight(kind):
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    torch.manual_seed(0)
    whole = nn.Linear(96, 64)
    nets_of = nn.ModuleDict({"layer": nn.Linear(96, 64)})
    nets_of.load_state_dict({f"layer.{k}": v for k, v in whole.state_dict().items()})
    quantize.quantize(nets_of, kind, "cpu")
    own = nets_of["layer"]
    config = {
        "int8wo": Int8WeightOnlyConfig,
        "fp8wo": Float8WeightOnlyConfig,
        "int4": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    }[kind]()
    quantize_(whole, config)
    plain = nn.Linear(96, 64)
    plain.weight.data, plain.bias.data = whole.weight.dequantize(), whole.bias.data.clone()

    outs, grads, kept = [], [], []
    for layer in (own, plain):
        x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer.bias.requires_grad_(True)
        layer.bias.grad = None
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=sizes: to.append(t.numel()) or t, lambda t: t):
            out = layer(x)
        out.square().sum().backward()
        outs.append(out.detach())
        grads.append((x.grad, layer.bias.grad))
        kept.append(sizes)
    assert torch.equal(outs[0], outs[1])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) and a.any() for a, b in zip(*grads, strict=True))
    assert 96 * 64 not in kept[0] and 96 * 64 in kept[1]


@pytest.mark.parametrize("kind", KINDS)
def test_eval_mode_between_training_steps_changes_nothing(tiny_ltx, kind):
    """On some CPUs bitsandbytes repacks weights in eval mode for good; validation samples in eval mode."""
    results = []
    for between in (False, True):
        net = quantised(tiny_ltx, kind)
        adapters.attach(net, nets.options(), nets.TARGETS)
        for part in range(2):
            net.train()
            out = net(**nets.ltx_inputs(seed=part, dtype=torch.bfloat16))[0]
            out.float().square().mean().backward()
            if between:
                net.eval()
                with torch.no_grad():
                    net(**nets.ltx_inputs(dtype=torch.bfloat16))
        results.append([p.grad for p in adapters.trainable(net).values()])
    assert runs.same(*results)


# -- runs --------------------------------------------------------------------------------------------------------------


def first_loss(made) -> float:
    """The loss of the run's first step with its weights as they are now: the same samples, noise and levels."""
    made.step = 0
    batch = next(made.batches())
    with torch.no_grad():
        return float(made.loss(made.drop_captions(batch)).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_learns_on_it_resumes_exactly_samples_and_fits_the_whole_base(
    start, tiny_ltx, tmp_path, kind, capsys
):
    from diffusers import LTXPipeline
    from safetensors.torch import load_file

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    sampling = {"validation__prompts": prompts, "validation__num_inference_steps": 2, "validation__every": 4}
    options = LEARNS | sampling | {"precision__quantize": kind, "checkpoint__every": 5}
    whole = start("whole", **options)
    assert "quantised 20 linear layers" in (said := capsys.readouterr().out) and f"as {kind}:" in said
    assert len(list((tmp_path / "whole" / "samples").rglob("*.mp4"))) == 3
    assert first_loss(whole) < 0.85 * runs.losses(tmp_path / "whole")[0]
    layer = type(whole.network.transformer_blocks[0].attn1.to_q)
    assert (layer.__module__, layer.__name__) == ("peft.tuners.lora." + PEFT_LAYERS[kind][0], PEFT_LAYERS[kind][1])

    with pytest.raises(runs.Interrupted):
        start("broken", kind=runs.interrupted(LTXTrainer, 6), **options)
    start("broken", **options, checkpoint__resume="latest")
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "broken")

    pipe = LTXPipeline.from_pretrained(tiny_ltx)
    before = nets.call_ltx(pipe.transformer)
    pipe.load_lora_weights(tmp_path / "whole", adapter_name="default")
    live = {k: v.float() for k, v in adapters.adapter_state(whole.network).items()}
    assert runs.same({k: v.float() for k, v in adapters.adapter_state(pipe.transformer).items()}, live) and live
    assert not torch.allclose(before, nets.call_ltx(pipe.transformer), atol=1e-3)
    state = load_file(tmp_path / "whole" / "checkpoint-8" / "state" / "trainable.safetensors")
    assert all("lora_" in name for name in state)


FITTING = [
    (kind, of)
    for of in ("rslora", "dora", "lokr", "loha")
    for kind in KINDS
    if kind not in quantize.UNFIT_ADAPTERS.get(of, ())
]


@pytest.mark.parametrize("kind, of", FITTING)
def test_the_adapters_that_fit_a_kind_learn_on_it(start, tmp_path, kind, of):
    """Those that do not are refused below."""
    made = start("run", **LEARNS, precision__quantize=kind, lora__type=of, lora__alpha=8)
    assert first_loss(made) < 0.9 * runs.losses(tmp_path / "run")[0]


@pytest.mark.parametrize("kind, of", [(k, a) for a, kinds in quantize.UNFIT_ADAPTERS.items() for k in kinds])
def test_the_adapters_that_do_not_fit_fail_in_peft_and_are_refused(clips, tiny_ltx, tmp_path, kind, of):
    with pytest.raises(OptionError, match=rf"quantize {kind} with lora.type {of}: .*use lora or rslora"):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path, precision__quantize=kind, lora__type=of)
    net = quantised(tiny_ltx, kind)
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        adapters.attach(net, nets.options(type=of), nets.TARGETS)
        net.train()
        for _ in range(2):
            net(**nets.ltx_inputs(dtype=torch.bfloat16))[0].float().square().mean().backward()


def facts(model, clips, out, options) -> dict:
    made = runs.trainer(LTXTrainer, model, clips, out, **options)
    made.run()
    how = [made.accelerator.num_processes, made.accelerator.distributed_type.value]
    return {"how": how, "losses": runs.losses(out), "trained": runs.trained(made).tolist()}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_with_twice_the_accumulation(tiny_ltx, clips, cache, tmp_path, kind):
    shared = LEARNS | {"data__cache_dir": cache, "precision__quantize": kind, "optimizer__name": "sgd"}
    shared |= {"train__steps": 3, "optimizer__learning_rate": 1.0}
    one = facts(tiny_ltx, clips, tmp_path / "one", shared | {"train__gradient_accumulation_steps": 2})
    two = runs.forked(facts, tiny_ltx, clips, tmp_path / "two", shared)
    assert one["how"] == [1, "NO"] and [rank["how"] for rank in two] == [[2, "MULTI_CPU"]] * 2
    assert two[0]["trained"] == two[1]["trained"]
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two[0]["trained"] == pytest.approx(one["trained"], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8", "int8wo", "int4"])
def test_compiled_blocks_compute_the_same(start, tmp_path, kind):
    both = LEARNS | {"precision__quantize": kind, "train__steps": 2, "memory__compile_backend": "eager"}
    for compile_ in ("none", "blocks"):
        start(compile_, **both, memory__compile=compile_)
    assert runs.losses(tmp_path / "blocks") == pytest.approx(runs.losses(tmp_path / "none"), rel=1e-4)


def test_what_trains_beside_the_adapter_is_not_quantised(start):
    also = "transformer_blocks.0.ff.net.2"
    made = start("run", **LEARNS | {"train__steps": 2}, precision__quantize="int8wo", lora__also_train=also)
    net = made.network
    assert type(net.get_submodule(also)) is nn.Linear and net.get_submodule(also).weight.requires_grad
    assert type(net.get_submodule(also.replace("blocks.0", "blocks.1"))) is quantize.WeightOnlyLinear


# -- folders that are quantised already --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_ltx, tmp_path_factory, bnb_on_cpu):
    """saved(kind) -> a copy of the tiny pipeline whose transformer diffusers has quantised and saved."""
    from diffusers import BitsAndBytesConfig, LTXVideoTransformer3DModel, TorchAoConfig
    from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    skip = {"modules_to_not_convert": ["proj_in", "proj_out", "time_embed", "caption_projection"]}
    configs = {
        "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
        "int8wo": lambda: TorchAoConfig(Int8WeightOnlyConfig(), **skip),
        "fp8wo": lambda: TorchAoConfig(Float8WeightOnlyConfig(), **skip),
        "dynamic": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), **skip),
    }

    def make(kind):
        folder = tmp_path_factory.mktemp("saved") / kind
        shutil.copytree(tiny_ltx, folder)
        net = LTXVideoTransformer3DModel.from_pretrained(
            folder / "transformer", quantization_config=configs[kind](), dtype=torch.bfloat16
        )
        shutil.rmtree(folder / "transformer")
        net.save_pretrained(folder / "transformer")
        return folder

    return make


@pytest.mark.parametrize("kind", ["nf4", "int8", "int8wo", "fp8wo"])
def test_a_folder_that_is_quantised_trains_as_it_is(start, saved, tiny_ltx, tmp_path, kind):
    from diffusers import LTXPipeline

    folder = saved(kind)
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    made = start("run", model=folder, **LEARNS)
    assert first_loss(made) < 0.85 * runs.losses(tmp_path / "run")[0]
    assert all(path.read_bytes() == bytes_ for path, bytes_ in before.items())
    pipe = LTXPipeline.from_pretrained(tiny_ltx)  # the whole one
    pipe.load_lora_weights(tmp_path / "run")
    # The skeleton that patterns are checked on.
    assert made.pretrained.skeleton("transformer").proj_out.weight.is_meta

    for given, says in (
        ({"precision__quantize": "int8wo"}, r"already quantised \(\w+ \w+\): make precision.quantize none"),
        ({"method": "full"}, r"already quantised .*method full needs whole weights: use method lora"),
        ({"precision__storage": "fp8"}, r"already quantised .*make precision.storage none"),
        (
            {"memory__group_offload": "leaf"},
            r"already quantised .*group_offload move whole weights only: leave them out",
        ),
        ({"lora__type": "dora"}, r"lora.type dora cannot adapt such layers") if kind == "int8" else ({}, None),
    ):
        if says:
            with pytest.raises(OptionError, match=says):
                start("refused", model=folder, **given)
    assert not (tmp_path / "refused").exists() or not list((tmp_path / "refused").rglob("*.safetensors"))

    adapter = tmp_path / "run"
    with pytest.raises(AdapterError, match=r"is quantised \(\w+\): merge into the weights it was quantised from"):
        lora_commands.merge(adapter, folder, tmp_path / "merged")


def test_what_was_quantised_in_a_way_that_cannot_train_is_refused(start, saved, tiny_ltx, tmp_path):
    with pytest.raises(OptionError, match=r"torchao Int8DynamicActivationInt8WeightConfig\), which cannot be trained"):
        start("dynamic", model=saved("dynamic"))
    folder = tmp_path / "quanto"
    shutil.copytree(tiny_ltx, folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quanto", "weights_dtype": "int8"}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=r"already quantised \(quanto\), which cannot be trained on"):
        start("run", model=folder)


def test_a_quantised_folder_cannot_be_sharded():
    options = runs.TINY | {"model": "m", "data.train": "d"}
    from trainers.parsing import parse

    c = parse(LTXTrainer.Config, runs.words(options))
    assert quantize.folder_problems({"transformer": "bitsandbytes nf4"}, c, sharded=False) == []
    (said,) = quantize.folder_problems({"transformer": "bitsandbytes nf4"}, c, sharded=True)
    assert "FSDP and DeepSpeed cannot shard it: launch with DDP" in said


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, says",
    [
        ({"precision__quantize": "nf4", "method": "full"}, "quantize nf4 with method full: .*use method lora"),
        ({"precision__quantize": "nf4", "precision__storage": "fp8"}, "quantize nf4 and precision.storage fp8 both"),
        ({"components.vae.quantize": "int8"}, "components.vae.quantize int8: only text encoders"),
        ({"components.transformer.quantize": "int8"}, "components.transformer.quantize int8: .*use precision.quantize"),
    ],
)
def test_what_does_not_fit_is_refused(clips, tiny_ltx, tmp_path, given, says):
    with pytest.raises(OptionError, match=says):
        runs.trainer(LTXTrainer, tiny_ltx, clips, tmp_path, **given)


# -- text encoders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "int8", "int8wo"])
def test_a_text_encoder_is_quantised_while_it_encodes(start, tmp_path, filled, kind, capsys):
    from caches import TEXTS

    cache = tmp_path / "cache"
    shutil.copytree(filled, cache)
    common = {"stage": "precompute", "data__cache_dir": cache}
    plain = start("plain", **common)
    assert plain.encoders.missing()["captions"][0] == 0
    entries = {path.name for path in cache.rglob("*") if path.is_file()}
    made = start("run", **common, **{"components.text_encoder.quantize": kind})
    assert re.search(r"text_encoder: quantised \d+ linear layers", capsys.readouterr().out)
    fresh = {path.name for path in cache.rglob("*.safetensors")} - entries
    assert len(fresh) == TEXTS  # the captions again, no clip
    text = plain.encoders.texts[1]
    a, b = (of.encoders.text(text)["text"].float() for of in (plain, made))
    assert 0 < (a - b).norm() / a.norm() < (0.5 if kind == "nf4" else 0.1)
    start("none", **common, **{"components.text_encoder.quantize": None})
    assert {path.name for path in cache.rglob("*.safetensors")} - entries == fresh


def test_a_text_encoder_that_is_quantised_already_is_refused(start, tiny_ltx, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_ltx, folder)
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=r"text_encoder is already quantised \(bitsandbytes int8\); leave it out"):
        start("run", model=folder, **{"components.text_encoder.quantize": "nf4"})
