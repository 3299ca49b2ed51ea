"""LoRA by PEFT on tensor-parallel layers: the bits of one rank, the values of PEFT's own, and PEFT's files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
from meshes import init_device_mesh, mesh_or_group
from torch import nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal

pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")

from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as LinearOfPeft
from peft.utils.save_and_load import _get_tp_info
from safetensors.torch import load_file

run_ranks = functools.partial(testing.run_ranks, device="cpu")
STEPS = 10


@pytest.fixture(scope="module", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, 4)


def register(config: LoraConfig) -> LoraConfig:
    from tp_invariant.integrations import peft

    return peft.register(config)


def refused(kind: Any, call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


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
}  # fmt: skip


def with_lora(model: Any, config: LoraConfig) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, config)


def sharded_model(family: str, tp_group: Any, kind: str = "group", sequence_parallel: bool = False, **options: Any) -> Any:
    model = tpi.parallelize(build(family), mesh_or_group(tp_group, kind), sequence_parallel=sequence_parallel)
    return with_lora(model, register(config_of(**{**CONFIGS[family], **options})))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(model: Any, steps: int = STEPS) -> dict[str, Any]:
    """Loss and norm of each step, the first gradients and the last parameters, of what is trained; whole tensors."""
    names = trainable(model)
    optimizer = torch.optim.SGD(names.values(), lr=0.05, momentum=0.9)
    results: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**hf_models.batch(step)).loss
        loss.backward()
        if not step:
            results["grads"] = {n: g for n, g in testing.full_grads(model).items() if n in names}
        results["norms"].append(tpi.clip_grad_norm_(names.values(), 1.0).detach())
        optimizer.step()
        results["losses"].append(loss.detach())
    return results | {"parameters": {n: p for n, p in testing.full_parameters(model).items() if n in names}}


def trained(tp_group: Any, family: str, kind: str, sequence_parallel: bool, mode: bool, steps: int = STEPS, **options: Any):
    with tpi.set_tp_invariant_mode(mode):
        model = sharded_model(family, tp_group, kind, sequence_parallel, **options)
        assert _get_tp_info(model) is None and not model._tp_size  # not transformers' own tensor parallelism
        assert not any(hasattr(module, "_hf_tp_plan") for module in model.modules())
        return train(model, steps)


@functools.cache
def at_one(family: str, mode: bool = True, steps: int = STEPS) -> Any:
    return run_ranks(trained, 1, family, "group", False, mode, steps)[0]


# --- bits and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, degree, kind, sequence_parallel",
    [("qwen3", 2, "group", False), ("qwen3", 4, "mesh", True), ("llama", 4, "group", True), ("phi3", 2, "mesh", False)],
)
def test_the_bits_are_those_of_one_rank(family, degree, kind, sequence_parallel):
    for got in run_ranks(trained, degree, family, kind, sequence_parallel, True):
        assert_bitwise_equal(got, at_one(family))


def test_with_the_mode_off_they_are_not():
    results = [run_ranks(trained, degree, "phi3", "group", False, False, 1)[0] for degree in (1, 2)]
    assert testing.digest(results[0]) != testing.digest(results[1])


def plain(family: str, dtype: torch.dtype) -> Any:
    """PEFT's own LoRA of transformers' own model."""
    return train(with_lora(build(family, dtype), config_of(**CONFIGS[family])))


def norm_wise(got: Any, exact: Any) -> float:
    got, exact = (torch.cat([x.double().flatten() for x in xs]) for xs in (got, exact))
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", CONFIGS)
def test_the_values_are_those_of_peft(family):
    """Ten steps: nearer to PEFT's in float64 than twice PEFT's in float32, for each kind of result."""
    exact, theirs, ours = plain(family, torch.float64), plain(family, torch.float32), at_one(family)
    assert ours["parameters"].keys() == exact["parameters"].keys()
    for key in ("losses", "norms", "grads", "parameters"):
        values = [x[key].values() if isinstance(x[key], dict) else x[key] for x in (ours, theirs, exact)]
        errors = [norm_wise(x, values[2]) for x in values[:2]]
        assert errors[0] <= max(2 * errors[1], 1e-6), (key, errors)
    assert exact["losses"][-2] < exact["losses"][0] - 0.01  # of the same kind of batch


def test_the_adapters_that_are_drawn_are_those_of_peft():
    theirs = dict(with_lora(build("llama"), config_of(init_lora_weights="gaussian")).named_parameters())
    for full in run_ranks(drawn, 2):
        assert_bitwise_equal(full, {name: p.detach() for name, p in theirs.items()})


def drawn(tp_group):
    model = tpi.parallelize(build("llama"), tp_group)
    return testing.full_parameters(with_lora(model, register(config_of(init_lora_weights="gaussian"))))
