"""What a run trains and writes: fp8 storage, which numbers move, and file names without wrappers."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runs
from runs import LORA, forked, losses
from trainers.ltx import LTXTrainer

pytestmark = pytest.mark.usefixtures("libraries")

BASE = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def cache(encoded_cache) -> Path:
    return encoded_cache


# -- fp8 storage --------------------------------------------------------------------------------------------------

FP8 = dict(precision__storage="fp8", precision__weights="bf16")


def test_fp8_storage_through_a_whole_run(start, tmp_path, tiny_ltx, clips, cache):
    from diffusers import LTXPipeline

    words = runs.options(tiny_ltx, clips, tmp_path / "run", data__cache_dir=cache, train__steps=80)
    words += ["--precision.storage", "fp8", "--precision.weights", "bf16", "--optimizer.schedule", "constant"]
    LTXTrainer.main(words)
    seen = losses(tmp_path / "run")
    assert sum(seen[-20:]) < 0.93 * sum(seen[:20])
    saved = load_file(tmp_path / "run" / LORA)
    assert {v.dtype for v in saved.values()} == {torch.float32}  # the adapter alone, in full precision
    pipe = LTXPipeline.from_pretrained(tiny_ltx, dtype=torch.float32)
    pipe.load_lora_weights(tmp_path / "run")
    loaded = {n: p for n, p in pipe.transformer.named_parameters() if ".lora_" in n}
    assert len(loaded) == len(saved) == 32
    for name, p in loaded.items():
        assert torch.equal(p, saved[f"transformer.{name.replace('.default_0', '')}"])


def test_fp8_storage_never_holds_adapters_or_norms(start, tmp_path):
    made = start(train__steps=2, lora__also_train="proj_out", **FP8)
    kinds = {name: p.dtype for name, p in made.network.named_parameters()}
    fp8 = {name for name, kind in kinds.items() if kind == torch.float8_e4m3fn}
    assert len([n for n in fp8 if ".to_q.base_layer.weight" in n]) == 4  # two blocks, two attentions
    assert len(fp8) > 30 and not [n for n in fp8 if "lora_" in n or "norm" in n or "proj_out" in n]
    linear = {n for n, m in made.network.named_modules() if isinstance(m, torch.nn.Linear)}
    blocks = {f"{n}.weight" for n in linear if n.startswith("transformer_blocks") and "lora_" not in n}
    assert blocks and blocks <= fp8
    assert {kind for name, kind in kinds.items() if "lora_" in name or "proj_out" in name} == {torch.float32}
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "state" / "trainable.safetensors")
    assert len(saved) == 34 and {v.dtype for v in saved.values()} == {torch.float32}


def test_fp8_storage_resumes_exactly(start):
    whole = start("whole", **FP8)
    with pytest.raises(runs.Interrupted):
        start("parts", kind=runs.interrupted(LTXTrainer, 2), checkpoint__every=2, **FP8)
    parts = start("parts", checkpoint__resume="latest", checkpoint__every=2, **FP8)
    assert torch.equal(runs.trained(parts), runs.trained(whole))
    assert losses(parts.output_dir) == losses(whole.output_dir)


def test_fp8_storage_is_for_frozen_weights(tiny_ltx, clips, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        LTXTrainer.main(runs.options(tiny_ltx, clips, tmp_path / "run", method="full", **FP8))
    assert error.value.code == 2
    assert "precision.storage fp8" in capsys.readouterr().err


def two_fp8_ranks(model, clips, cache, out) -> list:
    made = runs.trainer(LTXTrainer, model, clips, out, data__cache_dir=cache, **FP8)
    made.run()
    kinds = {str(p.dtype) for n, p in made.network.named_parameters() if n.endswith("to_k.base_layer.weight")}
    return [made.world, type(made.model).__name__, sorted(kinds), runs.trained(made).tolist()]


def test_fp8_storage_on_two_ranks(tiny_ltx, clips, cache, tmp_path, start):
    ranks = forked(two_fp8_ranks, tiny_ltx, clips, cache, tmp_path / "two")
    assert ranks[0] == ranks[1]
    assert ranks[0][:3] == [2, "DistributedDataParallel", ["torch.float8_e4m3fn"]]
    alone = start("one", train__gradient_accumulation_steps=2, **FP8)
    torch.testing.assert_close(torch.tensor(ranks[0][3]), runs.trained(alone), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "two")), torch.tensor(losses(tmp_path / "one")))


# -- what moves ---------------------------------------------------------------------------------------------------


def moved(network, base: dict) -> tuple[set[str], set[str]]:
    """(names of parameters that changed, names of those that train), by the names they have in the base."""
    own = {name.replace(".base_layer.", "."): p for name, p in network.named_parameters() if "lora_" not in name}
    assert own.keys() == base.keys()
    changed = {name for name, p in own.items() if not torch.equal(p, base[name])}
    return changed, {name for name, p in own.items() if p.requires_grad}


def test_lora_moves_all_of_itself_and_nothing_else(start, tiny_ltx, monkeypatch):
    class Started(LTXTrainer):
        def build(self):
            super().build()
            self.before = {n: p.detach().clone() for n, p in self.network.named_parameters() if p.requires_grad}

    made = start(kind=Started, train__steps=3)
    assert moved(made.network, load_file(tiny_ltx / BASE)) == (set(), set())
    now = dict(made.network.named_parameters())
    assert len(made.before) == 32 and all(not torch.equal(now[n], old) for n, old in made.before.items())


def test_also_train_moves_what_it_names(start, tiny_ltx, tmp_path):
    made = start(train__steps=2, lora__also_train=["proj_out", "transformer_blocks.1.scale_shift_table"])
    names = {"proj_out.weight", "proj_out.bias", "transformer_blocks.1.scale_shift_table"}
    assert moved(made.network, load_file(tiny_ltx / BASE)) == (names, names)
    beside = load_file(tmp_path / "run" / "also_trained.safetensors")
    now = dict(made.network.named_parameters())
    assert beside.keys() == names and all(torch.equal(tensor, now[name]) for name, tensor in beside.items())


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["transformer_blocks.0.attn1"], r"transformer_blocks\.0\.attn1\..*"),
        (["*norm*", "proj_in"], r".*norm.*|proj_in\..*"),
        ([], r".*"),
    ],
)
def test_full_moves_what_train_modules_names(patterns, names, start, tiny_ltx):
    base = load_file(tiny_ltx / BASE)
    made = start(method="full", train_modules=patterns, train__steps=2)
    expected = {name for name in base if re.fullmatch(names, name)}
    assert expected and moved(made.network, base) == (expected, expected)


def test_a_target_that_matches_nothing_is_named(tiny_ltx, clips, cache, tmp_path, start, capsys):
    words = runs.options(tiny_ltx, clips, tmp_path / "run", data__cache_dir=cache)
    with pytest.raises(SystemExit, match=r"lora.targets: nothing matches 'to_qq'.*nearest.*to_q"):
        LTXTrainer.main([*words, "--lora.targets", "to_q", "to_qq"])
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    capsys.readouterr()
    start("good", lora__targets=["to_q", "attn1.to_k"], train__steps=1)
    # six modules of rank 4 on 32 x 32 weights
    assert "training 1,536 of " in (out := capsys.readouterr().out) and "6 adapted modules" in out


# -- wrappers -----------------------------------------------------------------------------------------------------


def compiled_rank(model, clips, cache, out, compile_mode, method, resume) -> list:
    changes = dict(checkpoint__every=2, memory__compile=compile_mode, memory__compile_backend="eager", method=method)
    kind = LTXTrainer if resume else runs.interrupted(LTXTrainer, 2)
    resumed = {"checkpoint__resume": "latest"} if resume else {}
    made = runs.trainer(kind, model, clips, out, data__cache_dir=cache, **changes, **resumed)
    with contextlib.suppress(runs.Interrupted):
        made.run()
    compiled = [m for m in made.network.modules() if m._compiled_call_impl is not None]
    return [made.world, type(made.model).__name__, len(compiled), runs.trained(made).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_no_wrapper_shows_in_any_file(method, tiny_ltx, clips, cache, tmp_path):
    """Compiled blocks and two ranks, half way; then on without compiling; and the other way round."""
    results = {}
    for first, second in (("blocks", "none"), ("none", "blocks")):
        out = tmp_path / first
        one = forked(compiled_rank, tiny_ltx, clips, cache, out, first, method, False)
        two = forked(compiled_rank, tiny_ltx, clips, cache, out, second, method, True)
        for ranks, mode in ((one, first), (two, second)):
            assert [rank[:3] for rank in ranks] == [[2, "DistributedDataParallel", 2 if mode == "blocks" else 0]] * 2
        results[first] = torch.tensor(two[0][3])
        files = list(out.rglob("*.safetensors"))
        assert len(files) == (8 if method == "lora" else 5)
        for file in files:
            keys = "\n".join(load_file(file))
            assert not re.search(r"_orig_mod|(^|\W)module\.|base_model\.model", keys), file
    torch.testing.assert_close(results["blocks"], results["none"], rtol=1e-4, atol=1e-5)
