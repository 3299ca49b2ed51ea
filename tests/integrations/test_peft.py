"""LoRA by PEFT on tensor-parallel layers: the bits of one rank, the values of PEFT's own, and PEFT's files."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
from cases import more
from error_texts import refused
from meshes import init_device_mesh, mesh_or_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.hugging_face.experts import use_own_code
from tp_invariant.testing import assert_bitwise_equal

pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")

from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as LinearOfPeft
from peft.utils.save_and_load import _get_tp_info
from ranks import run_ranks
from safetensors.torch import load_file

STEPS = {"qwen3": 4, "llama": 4, "phi3": 4, "qwen2_moe": 4, "gpt_oss": 4}


def register(config: LoraConfig) -> LoraConfig:
    from tp_invariant.integrations import peft

    return peft.register(config)


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    options = dict(tie_word_embeddings=False) if family == "qwen3" else {}
    return hf_models.build(family, dtype, num_hidden_layers=1, **options)


def config_of(**options: Any) -> LoraConfig:
    return LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules="all-linear"), **options})


CONFIGS = {
    # column, row and output layers; the embedding, and a module that is trained whole
    "qwen3": dict(target_modules=["q_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens"], use_rslora=True,
                  modules_to_save=["lm_head", "q_norm"], init_lora_weights=False),
    "llama": dict(lora_bias=True, bias="lora_only", rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 2}),
    # gate and up in one layer, and q, k and v, of two sizes
    "phi3": dict(target_modules=r".*\.(gate_up_proj|qkv_proj|o_proj|down_proj)|lm_head", init_lora_weights=False),
    # mixtures of experts: attention, and a shared expert with its gate; attention with sinks
    "qwen2_moe": dict(init_lora_weights=False),
    "gpt_oss": dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False, bias="lora_only"),
}  # fmt: skip


def with_lora(model: Any, config: LoraConfig) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, config)


def sharded_model(
    family: str, tp_group: Any, kind: str = "group", sequence_parallel: bool = False, **options: Any
) -> Any:
    model = tpi.parallelize(build(family), mesh_or_group(tp_group, kind), sequence_parallel=sequence_parallel)
    return with_lora(model, register(config_of(**{**CONFIGS[family], **options})))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(model: Any, steps: int) -> dict[str, Any]:
    """Loss and norm of each step, the first gradients and the last parameters, of what is trained; whole tensors."""
    names = trainable(model)
    optimizer = torch.optim.SGD(names.values(), lr=0.05, momentum=0.9)
    results: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**hf_models.batch(step % 2)).loss
        loss.backward()
        if not step:
            results["grads"] = {n: g for n, g in testing.full_grads(model).items() if n in names}
        results["norms"].append(tpi.clip_grad_norm_(names.values(), 1.0).detach())
        optimizer.step()
        results["losses"].append(loss.detach())
    return results | {"parameters": {n: p for n, p in testing.full_parameters(model).items() if n in names}}


def trained(tp_group: Any, family: str, kind: str, sequence_parallel: bool, mode: bool = True) -> dict[str, Any]:
    with tpi.set_tp_invariant_mode(mode):
        model = sharded_model(family, tp_group, kind, sequence_parallel)
        assert _get_tp_info(model) is None and not model._tp_size  # not transformers' own tensor parallelism
        assert not any(hasattr(module, "_hf_tp_plan") for module in model.modules())
        return train(model, STEPS[family])


@functools.cache
def at_one(family: str) -> Any:
    return run_ranks(trained, 1, family, "group", False)[0]


# --- bits and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, degree, kind, sequence_parallel",
    [
        ("qwen3", 2, "group", False),
        ("qwen3", 4, "mesh", True),
        ("llama", 2, "group", True),
        ("phi3", 2, "mesh", False),
        more("qwen2_moe", 2, "group", False),
        ("qwen2_moe", 4, "mesh", True),
        more("gpt_oss", 2, "mesh", False),
        ("gpt_oss", 4, "group", True),
    ],
)
def test_the_bits_are_those_of_one_rank(family, degree, kind, sequence_parallel):
    for got in run_ranks(trained, degree, family, kind, sequence_parallel):
        assert_bitwise_equal(got, at_one(family))


def test_with_the_mode_off_they_are_not():
    results = [run_ranks(trained, degree, "phi3", "group", False, False)[0] for degree in (1, 2)]
    assert testing.digest(results[0]) != testing.digest(results[1])


def plain(family: str, dtype: torch.dtype) -> Any:
    """PEFT's own LoRA of transformers' own model."""
    model = build(family, dtype)
    use_own_code(model)
    return train(with_lora(model, config_of(**CONFIGS[family])), STEPS[family])


def norm_wise(got: Any, exact: Any) -> float:
    got, exact = (torch.cat([x.double().flatten() for x in xs]) for xs in (got, exact))
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", CONFIGS)
def test_the_values_are_those_of_peft(family):
    """Four steps: nearer to PEFT's in float64 than twice PEFT's in float32, for each kind of result."""
    exact, theirs, ours = plain(family, torch.float64), plain(family, torch.float32), at_one(family)
    assert ours["parameters"].keys() == exact["parameters"].keys()
    for key in ("losses", "norms", "grads", "parameters"):
        values = [x[key].values() if isinstance(x[key], dict) else x[key] for x in (ours, theirs, exact)]
        errors = [norm_wise(x, values[2]) for x in values[:2]]
        assert errors[0] <= max(2 * errors[1], 1e-6), (key, errors)
    assert exact["losses"][-2] < exact["losses"][0]  # of the same batch


def test_the_adapters_that_are_drawn_are_those_of_peft():
    theirs = dict(with_lora(build("llama"), config_of(init_lora_weights="gaussian")).named_parameters())
    for full in run_ranks(drawn, 2):
        assert_bitwise_equal(full, {name: p.detach() for name, p in theirs.items()})


def drawn(tp_group):
    model = tpi.parallelize(build("llama"), tp_group)
    return testing.full_parameters(with_lora(model, register(config_of(init_lora_weights="gaussian"))))


def scaled_rows(tp_group):
    model = build("gemma3") if tp_group == "plain" else tpi.parallelize(build("gemma3"), tp_group)
    config = config_of(target_modules=["embed_tokens"], init_lora_weights=False)
    with tpi.set_tp_invariant_mode(tp_group != "plain"):
        return with_lora(model, config if tp_group == "plain" else register(config))(
            **hf_models.batch()
        ).logits.detach()


def test_an_embedding_that_scales_its_rows():
    one = run_ranks(scaled_rows, 1)[0]
    assert_bitwise_equal(run_ranks(scaled_rows, 2), [one] * 2)
    torch.testing.assert_close(one, scaled_rows("plain"), rtol=1e-4, atol=1e-4)


# --- layers by hand ---------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """What Sharded computes, of whole layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv, self.gate_up, self.down = nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(24, 16)
        self.whole, self.out = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [S, B]
        x = self.words(ids)
        gate, up = self.gate_up(self.qkv(self.norm(x))).chunk(2, -1)
        return self.out(self.whole(x + self.down(gate * up)))


class Sharded(nn.Module):
    """Sequence parallel; stacked pieces of two kinds; a norm and its linear layer in one; a padded vocabulary."""

    def __init__(self, tp_group: Any) -> None:
        super().__init__()
        full, common = Plain(), dict(tp_group=tp_group, sequence_parallel=True)
        column = dict(parallel_mode="column", **common)
        self.words = tpi.VocabParallelEmbedding.from_embedding(full.words, pad_vocab_to_multiple_of=16, **common)
        # the norm's gain is one and its offset zero, as LayerNormLinear starts
        options = dict(partition_sizes=(16, 8, 8), gather_output=True, return_layernorm_output=True)
        self.qkv = tpi.LayerNormLinear.from_linear(full.qkv, **column, **options)
        self.gate_up = tpi.Linear.from_linear(
            full.gate_up, parallel_mode="column", tp_group=tp_group, partition_stride=2, return_bias=True
        )
        self.down = tpi.Linear.from_linear(full.down, parallel_mode="row", **common)
        self.whole = tpi.Linear.from_linear(full.whole, parallel_mode=None, **common)
        self.out = tpi.Linear.from_linear(full.out, gather_output=True, **column)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        y, normed = self.qkv(x)
        assert normed.shape == x.shape
        y, bias = self.gate_up(y)
        gate, up = (y + bias).chunk(2, -1)
        return self.out(self.whole(x + self.down(gate * up)))


BY_HAND = dict(
    target_modules=["words", "qkv", "gate_up", "down", "whole", "out"], init_lora_weights=False, lora_dropout=0.1
)


def by_hand(tp_group: Any, kind: str, mode: bool = True, folder: str = "") -> Any:
    """Output and gradients of a step, what is saved and loaded, without the adapters, and what merging gives."""
    with tpi.set_tp_invariant_mode(mode):
        base = (Plain() if kind == "plain" else Sharded(tp_group)).train()
        model = with_lora(base, config_of(**BY_HAND) if kind == "plain" else register(config_of(**BY_HAND)))
        ids = torch.randint(30, (8, 2), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(5)  # for dropout
        out = model(ids)
        out.square().mean().backward()
        grads = {name: g for name, g in testing.full_grads(model).items() if g is not None}
        results = {"out": out.detach(), "grads": grads}
        model.eval()
        results["eval"] = model(ids).detach()
        with model.disable_adapter():
            results["base"] = model(ids).detach()
        model.save_pretrained(folder)
        results["file"] = load_file(f"{folder}/adapter_model.safetensors")
        for name, p in model.named_parameters():
            if "lora_" in name:
                nn.init.zeros_(p)
        model.load_adapter(folder, "default")
        assert_bitwise_equal(model(ids).detach(), results["eval"])
        model.merge_adapter(safe_merge=True)
        results["merged"] = model(ids).detach()
        results["merged weights"] = {n: p for n, p in testing.full_parameters(model).items() if "base_layer" in n}
        model.unmerge_adapter()
        results["unmerged"] = model(ids).detach()
        unloaded = model.merge_and_unload()
        assert type(unloaded.down) is (nn.Linear if kind == "plain" else tpi.Linear)
        return results | {"unloaded": unloaded(ids).detach()}


def test_layers_by_hand(tmp_path):
    folders = iter(str(tmp_path / str(number)) for number in range(5))
    expected = run_ranks(by_hand, 1, "group", True, next(folders))[0]
    for degree in (2, 4):
        for got in run_ranks(by_hand, degree, "group", True, next(folders)):
            assert_bitwise_equal(got, expected)
    assert testing.digest(run_ranks(by_hand, 2, "group", False, next(folders))[0]) != testing.digest(expected)
    assert_bitwise_equal(expected["unloaded"], expected["merged"])
    theirs = by_hand(None, "plain", folder=next(folders))
    assert expected["file"].keys() == theirs["file"].keys()
    for name, value in expected.items():
        values = value if isinstance(value, dict) else {"": value}
        for key in (key for key in values if "layer_norm" not in key):
            want = theirs[name][key] if key else theirs[name]
            torch.testing.assert_close(values[key], want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(expected["merged"], expected["eval"], rtol=1e-5, atol=1e-6)
    assert (expected["eval"] - expected["base"]).abs().max() > 0.1


def beside_a_foreign_layer(tp_group):
    """A layer of torch's own gets PEFT's adapters."""
    mesh = mesh_or_group(tp_group, "mesh")
    torch.manual_seed(0)
    full = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(tpi.Linear.from_linear(full[0], parallel_mode="column", tp_group=mesh, gather_output=True))
    model.append(full[1])
    with tpi.set_tp_invariant_mode(True):
        model = with_lora(model, register(config_of(target_modules=["0", "1"], init_lora_weights=False)))
        tpi.replicate_(model, mesh)
        assert {type(p) for p in model.parameters()} == {DTensor}
        assert isinstance(model.base_model.model[1], LinearOfPeft)
        y = model(torch.ones(3, 8))
        y.square().sum().backward()
        tpi.clip_grad_norm_(model.parameters(), 1.0)
        return y.detach(), {name: grad for name, grad in testing.full_grads(model).items() if grad is not None}


def test_layers_of_torch_beside_them():
    one = run_ranks(beside_a_foreign_layer, 1)[0]
    assert len(one[1]) == 4
    for got in run_ranks(beside_a_foreign_layer, 2):
        assert_bitwise_equal(got, one)


# --- files ------------------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The tensors' file, and the config, in which target_modules is a set."""
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"].sort()
    return (folder / "adapter_model.safetensors").read_bytes(), config


def saved(tp_group, kind, folder):
    """After two steps: whole tensors, and logits."""
    with tpi.set_tp_invariant_mode(True):
        model = sharded_model("qwen3", tp_group, kind)
        train(model, 2)
        model.save_pretrained(folder)
        given = refused(ValueError, lambda: model.save_pretrained(f"{folder}/no", state_dict=model.state_dict()))
        model.save_pretrained(f"{folder}/given", state_dict=tpi.full_state_dict(model))
        return tpi.full_state_dict(model), model(**hf_models.batch()).logits.detach(), given


def loaded(tp_group, kind, folder):
    """The same from the files, also as a second adapter; and what is written again."""
    with tpi.set_tp_invariant_mode(True):
        model = tpi.parallelize(build("qwen3"), mesh_or_group(tp_group, kind))
        text = refused(ValueError, lambda: PeftModel.from_pretrained(model, folder))
        model = PeftModel.from_pretrained(model, folder, config=register(LoraConfig.from_pretrained(folder)))
        full, logits = tpi.full_state_dict(model), model(**hf_models.batch()).logits.detach()
        model.load_adapter(folder, "second")
        model.set_adapter("second")
        assert_bitwise_equal(model(**hf_models.batch()).logits.detach(), logits)
        model.save_pretrained(f"{folder}/{kind}", selected_adapters=["second"])
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**hf_models.batch()).logits, logits, rtol=1e-4, atol=1e-4)
        merged.save_pretrained(f"{folder}/merged {kind}")
        return full, logits, text


@pytest.mark.parametrize("kind, degree", [("mesh", 2), ("group", 2)])
def test_files_are_those_of_peft_and_load_at_any_degree(tmp_path, kind, degree):
    full, logits, given = run_ranks(saved, degree, kind, str(tmp_path / "a"))[0]
    assert "in the state_dict that was given to save_pretrained on rank 0" in given
    theirs = PeftModel.from_pretrained(build("qwen3"), tmp_path / "a")
    assert_bitwise_equal(dict(theirs.state_dict()), full)
    torch.testing.assert_close(theirs(**hf_models.batch()).logits, logits, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "b")
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b") == files_in(tmp_path / "a" / "given")
    other_kind, other_degree = ("group", 4) if kind == "mesh" else ("mesh", 1)
    for got in run_ranks(loaded, other_degree, other_kind, str(tmp_path / "a")):
        assert_bitwise_equal(got[:2], (full, logits))
        assert "PeftModel.from_pretrained takes config=register(LoraConfig.from_pretrained(..))" in got[2]
    again = load_file(tmp_path / "a" / other_kind / "second" / "adapter_model.safetensors")
    assert_bitwise_equal(again, load_file(tmp_path / "a" / "adapter_model.safetensors"))
    merged = load_file(tmp_path / "a" / f"merged {other_kind}" / "model.safetensors")
    for name, value in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6)


def saved_after_fully_shard(world_group, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded_model("qwen3", mesh["tp"].get_group() if folder is None else mesh["tp"])
    if folder is not None:
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)
        model.save_pretrained(folder)
        assert "cannot be merged after fully_shard" in refused(ValueError, model.merge_adapter)
    with tpi.set_tp_invariant_mode(True):
        loss = model(**hf_models.batch()).loss
        loss.backward()
    return loss.detach(), {name: grad for name, grad in testing.full_grads(model).items() if grad is not None}


def test_fully_shard(tmp_path):
    """Of the same batch on both data parallel ranks: the mean of their gradients is each one's."""
    results = [got for folder in (str(tmp_path), None) for got in run_ranks(saved_after_fully_shard, 4, folder)]
    assert len(results[0][1]) == 12
    assert_bitwise_equal(results, results[:1] * 8)
    theirs = with_lora(build("qwen3"), config_of(**CONFIGS["qwen3"]))
    theirs.save_pretrained(tmp_path / "plain")
    assert files_in(tmp_path)[0] == files_in(tmp_path / "plain")[0]


def other_ways(tp_group, kind, folder):
    """transformers' own functions for adapters; a copy, and this library's checkpoints."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # it reports what does not fit
    options = dict(target_modules=["q_proj", "o_proj", "embed_tokens"], init_lora_weights=False)
    with tpi.set_tp_invariant_mode(True):
        models = [tpi.parallelize(build("llama"), mesh_or_group(tp_group, kind)) for _ in range(3)]
        torch.manual_seed(3)
        models[0].add_adapter(register(config_of(**options)))
        models[0].save_pretrained(folder)
        if kind == "mesh":
            models[1].load_adapter(folder, peft_config=register(config_of(**options)))
            losses = [model(**hf_models.batch()).loss for model in models]
            assert losses[0] == losses[1] != losses[2]
        else:
            refused(RuntimeError, lambda: models[1].load_adapter(folder, peft_config=register(config_of(**options))))
        model = with_lora(models[2], register(config_of(**options)))
        expected = train(model, 1)["parameters"]
        twin = copy.deepcopy(model)
        tpi.checkpoint.save(f"{folder}/checkpoint", model)
        with torch.no_grad():
            for p in trainable(model).values():
                p.zero_()
        twin.save_pretrained(f"{folder}/twin")  # the copy's own adapters
        tpi.checkpoint.load(f"{folder}/checkpoint", model)
        model.save_pretrained(f"{folder}/model")
        for found in (twin, model):
            assert_bitwise_equal({n: p for n, p in testing.full_parameters(found).items() if n in expected}, expected)


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_adapters_of_transformers_copies_and_checkpoints(tmp_path, kind):
    run_ranks(other_ways, 2, kind, str(tmp_path))
    assert files_in(tmp_path / "twin") == files_in(tmp_path / "model")
    whole = with_lora(
        build("llama"), config_of(target_modules=["q_proj", "o_proj", "embed_tokens"], init_lora_weights=False)
    )
    whole.save_pretrained(tmp_path / "plain")
    assert files_in(tmp_path)[0] == files_in(tmp_path / "plain")[0]


# --- several adapters, and what trains -----------------------------------------------------------------------------


def several(tp_group):
    with tpi.set_tp_invariant_mode(True):
        model = sharded_model(
            "llama", tp_group, init_lora_weights="orthogonal", bias="none", lora_bias=False, r=2, rank_pattern={}
        )
        torch.manual_seed(4)
        model.add_adapter(
            "b", register(config_of(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False))
        )
        results = {}
        for name in ("default", "b"):
            model.set_adapter(name)
            results[name] = model(**hf_models.batch()).logits.detach(), sorted(trainable(model))
        model.base_model.set_adapter(["default", "b"])
        results["both"] = model(**hf_models.batch()).logits.detach()
        model.delete_adapter("default")
        results["left"] = model(**hf_models.batch()).logits.detach(), sorted(testing.full_parameters(model))
        plain = tpi.parallelize(build("llama"), tp_group)
        torch.manual_seed(3)
        found = inject_adapter_in_model(register(config_of(target_modules=["o_proj"])), plain)
        return results | {"injected": sorted(trainable(found))}


def test_several_adapters():
    expected = run_ranks(several, 1)[0]
    for got in run_ranks(several, 2):
        assert_bitwise_equal(got, expected)
    logits = [expected[key][0] if key != "both" else expected[key] for key in ("default", "b", "both")]
    assert len({testing.digest(x) for x in logits}) == 3
    assert_bitwise_equal(expected["left"][0], expected["b"][0])
    assert all(".lora_embedding_" in name or ".q_proj.lora_" in name for name in expected["b"][1])
    assert expected["injected"] == [f"model.layers.0.self_attn.o_proj.lora_{x}.default.weight" for x in "AB"]


def recomputed(tp_group, kind, checkpointing):
    with tpi.set_tp_invariant_mode(True), torch.autocast("cpu", torch.bfloat16):
        model = sharded_model("qwen3", tp_group, kind, lora_dropout=0.2)
        if checkpointing:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable()
        torch.manual_seed(6)
        return train(model, 1)


def test_dropout_autocast_and_gradient_checkpointing():
    expected = run_ranks(recomputed, 1, "group", False)[0]
    for got in run_ranks(recomputed, 2, "mesh", True):
        assert_bitwise_equal(got, expected)


def data_parallel(world_group, dp, kind="group", mode=True):
    """Norms of ten steps of four micro-batches, the first gradients and the last adapters."""
    mesh = init_device_mesh("cpu", (dp, world_group.size() // dp), mesh_dim_names=("dp", "tp"))
    with tpi.set_tp_invariant_mode(mode):
        model = sharded_model("phi3", mesh["tp"] if kind == "mesh" else mesh["tp"].get_group())
        names = trainable(model)
        tree = tpi.data_parallel.MicroBatchTree(names.values(), mesh["dp"], micro_batches=4)
        optimizer = torch.optim.AdamW(names.values(), lr=0.01)
        norms, grads = [], None
        for step in range(10):
            for i in tree.share:
                model(**hf_models.batch(4 * step + i), num_items_in_batch=1).loss.backward()
                tree.add(count=1)
            tree.reduce()
            grads = grads or {n: g for n, g in testing.full_grads(model).items() if n in names}
            norms.append(tpi.clip_grad_norm_(names.values(), 1.0).detach())
            optimizer.step()
            optimizer.zero_grad()
        return norms, grads, {n: p for n, p in testing.full_parameters(model).items() if n in names}


@pytest.mark.more
def test_data_parallel_ranks():
    """2 x 2 and 4 x 1 have the bits of one process."""
    (one,) = run_ranks(data_parallel, 1, 1)
    for dp, kind in ((2, "group"), (2, "mesh"), (4, "group")):
        for got in run_ranks(data_parallel, 4, dp, kind):
            assert_bitwise_equal(got, one)
    off = [run_ranks(data_parallel, ranks, dp, "group", False)[0] for ranks, dp in ((1, 1), (4, 2))]
    assert testing.digest(off[0]) != testing.digest(off[1]), "the control"


def row_spec(tp_group, stride):
    sizes = {} if stride == 1 else {"partition_sizes": stride}
    return tpi.Linear(12, 2, parallel_mode="row", tp_group=tp_group, **sizes).shard_spec("weight")


def masks(tp_group):
    from tp_invariant.integrations.peft import Dropout

    x = torch.arange(1.0, 3 * 8 * 12 + 1).view(3, 8, 12)
    rank, world = tp_group.rank(), tp_group.size()
    group = tpi.Linear(2, 2, tp_group=tp_group).group
    found = []
    for sequence_dim, stride in ((None, None), (1, None), (None, 1), (None, (4, 8))):
        part = x.chunk(world, 1)[rank] if sequence_dim else x
        if stride:
            spec = row_spec(tp_group, stride)
            part = torch.stack([spec.local(row) for row in x])
        torch.manual_seed(0)
        y = Dropout(0.4, group, sequence_dim, stride)(part)
        parts = [torch.empty_like(y) for _ in range(world)]
        torch.distributed.all_gather(parts, y.contiguous(), group=tp_group)
        whole = torch.cat(parts, 1) if sequence_dim else y
        found.append(torch.stack([spec.full(row) for row in y]) if stride else whole)
    torch.manual_seed(rank)
    return found, refused(RuntimeError, lambda: Dropout(0.4, group, None, None)(x))


def test_dropout_is_of_the_whole_input():
    x = torch.arange(1.0, 3 * 8 * 12 + 1).view(3, 8, 12)
    torch.manual_seed(0)
    expected = nn.functional.dropout(x, 0.4)
    assert 0 < (expected == 0).sum() < x.numel()
    for found, text in run_ranks(masks, 4):
        assert_bitwise_equal(found, [expected] * 4)
        assert "the state of torch's generator, for dropout in an adapter" in text


# --- what is refused --------------------------------------------------------------------------------------------------

UNSUPPORTED = dict(
    use_dora=True, fan_in_fan_out=True, layer_replication=[(0, 1)], target_parameters=["weight"],
    trainable_token_indices=[1], ensure_weight_tying=True, use_qalora=True, alora_invocation_tokens=[1],
    megatron_config={"a": 1},
)  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_options_that_are_not_supported(name):
    text = refused(ValueError, lambda: register(config_of(**{name: UNSUPPORTED[name]})))
    assert text.startswith(f"{name}={UNSUPPORTED[name]!r} of the LoraConfig on rank 0 is not supported")


class Linear4bit(nn.Linear):
    """As quantised layers are: an nn.Linear whose weight holds packed numbers in another shape."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)


def quantised(tp_group):
    """What parallelize says of a model with such layers."""
    model = build("llama")
    for block in model.model.layers:
        block.mlp.down_proj = Linear4bit(block.mlp.down_proj)
    return refused(ValueError, lambda: tpi.parallelize(model, tp_group))


@pytest.mark.parametrize("degree", [1, 2])
def test_quantised_layers_are_refused(degree):
    """QLoRA: packed weights cannot be sharded by their rows and columns."""
    for said in run_ranks(quantised, degree):
        assert "down_proj: style 'rowwise' needs an nn.Linear, not a Linear4bit" in said


def test_an_option_that_nobody_knows_is_refused():
    """One that a later version of PEFT may have."""
    import dataclasses

    from tp_invariant.integrations.peft import check_config

    later = dataclasses.make_dataclass("Later", [("r", int, 8), ("new", bool, False)])
    with mock.patch("tp_invariant.integrations.peft.LoraConfig", later):
        assert "new=True of the LoraConfig" in refused(ValueError, lambda: check_config(later(new=True)))


@pytest.mark.parametrize("value", ["pissa", "olora", "mica"])
def test_initialisations_from_the_whole_weight_are_refused(value):
    text = refused(ValueError, lambda: register(config_of(init_lora_weights=value)))
    assert text.startswith(f"init_lora_weights={value!r} of the LoraConfig on rank 0") and "'gaussian'" in text


def test_only_this_librarys_layers_are_refused_without_register():
    """The control."""
    assert isinstance(with_lora(build("llama"), config_of()).model.lm_head, nn.Linear)
    assert type(with_lora(build("llama"), register(config_of())).model.model.layers[0].mlp.up_proj) is LinearOfPeft


def problems(tp_group, kind):
    tp = mesh_or_group(tp_group, kind)

    def model():
        return tpi.parallelize(build("llama"), tp)

    texts = [refused(ValueError, lambda: with_lora(model(), config_of()))]
    texts.append(refused(ValueError, lambda: with_lora(model(), IA3Config(task_type="CAUSAL_LM"))))
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    texts.append(refused(ValueError, lambda: with_lora(model(), prompts)))
    texts.append(refused(ValueError, lambda: register(IA3Config())))
    before = get_peft_model(build("llama"), config_of(target_modules=["q_proj"]))
    texts.append(refused(ValueError, lambda: tpi.parallelize(before.base_model.model, tp)))
    whole = model()
    torch.manual_seed(tp_group.rank())
    texts.append(refused(RuntimeError, lambda: get_peft_model(whole, register(config_of()))))
    torch.manual_seed(0)
    peft_model = get_peft_model(model(), register(config_of()))
    texts.append(refused(ValueError, lambda: peft_model.add_adapter("b", config_of(use_dora=True))))
    batch = hf_models.batch()
    texts.append(refused(ValueError, lambda: peft_model.eval()(**batch, adapter_names=["default"] * 2)))
    with torch.no_grad():
        peft_model.model.model.layers[0].mlp.down_proj.lora_B["default"].weight.fill_(float("inf"))
    texts.append(refused(ValueError, lambda: peft_model.merge_adapter(safe_merge=True)))
    return texts


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_what_is_refused(kind):
    wanted = [
        "would take a Linear of tp_invariant for a whole layer of torch's. Pass the LoraConfig to",
        "IA3Model on rank 0 of 2 is given a VocabParallelEmbedding of tp_invariant: of PEFT's methods LoRA alone",
        "PeftModelForCausalLM on rank 0 of 2 is given a VocabParallelEmbedding of tp_invariant: of PEFT's methods LoRA",
        "IA3Config on rank 0: of PEFT's methods LoRA alone",
        "model.layers.0.self_attn.q_proj: style 'colwise' needs an nn.Linear",
        "adapter 'default' (seed all ranks alike before get_peft_model",
        "use_dora=True of the LoraConfig on rank 0",
        "adapter_names in a call on rank 0",
        "the sum of the weight and adapter 'default' is not finite",
    ]
    texts = run_ranks(problems, 2, kind)[0]
    for text, part in zip(texts, wanted, strict=True):
        assert part in text
