"""Fused operators in transformers' modules: what gets them, and that no bit changes."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any
from unittest import mock

import hf_models
import model_types
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.functional.attention_choice import SafeSdpa
from tp_invariant.hugging_face import fused
from tp_invariant.hugging_face.fused import Rotation, gated_block_of, rotation_of
from tp_invariant.testing import assert_bitwise_equal


def gated_blocks(model: nn.Module) -> int:
    return sum(isinstance(module, fused._Gated) for module in model.modules())


def former_code() -> Any:
    """A context in which the former functions and forwards run, with all else as before."""
    return mock.patch.object(fused, "is_tp_invariant_mode_enabled", return_value=False)


def step(model: nn.Module, mode: bool = True) -> dict[str, Tensor]:
    model.zero_grad()
    with tpi.set_tp_invariant_mode(mode):
        output = model(**{name: x.to(next(model.parameters()).device) for name, x in hf_models.batch().items()})
        output.loss.backward()
    return {"logits": output.logits.detach(), **testing.full_grads(model)}


def calls_of(model: nn.Module, mode: bool = True) -> list[str]:
    """Which operators a step calls."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        function = getattr(fused, name)
        return mock.patch.object(fused, name, lambda *args, **options: calls.append(name) or function(*args, **options))

    with noting("gated_activation"), noting("rotary_embedding"):
        step(model, mode)
    return sorted(calls)


BOTH_TWICE = ["gated_activation"] * 2 + ["rotary_embedding"] * 2


# --- bits -----------------------------------------------------------------------------------------------------------


def on_rank(tp_group: Any, family: str, dtype: torch.dtype, sp: bool) -> tuple[Any, Any]:
    model = tpi.parallelize(hf_models.build(family, dtype), tp_group, sequence_parallel=sp)
    assert calls_of(model) == BOTH_TWICE
    with former_code():
        assert calls_of(model) == []
        former = step(model)
    return step(model), former


@pytest.mark.parametrize(
    "family, dtype, sp",
    [("qwen3", torch.float32, True), ("phi3", torch.bfloat16, False), ("gemma2", torch.float32, False)],
    ids=str,
)
def test_the_bits_of_the_models_own_code_at_every_degree(family, dtype, sp):
    """Of silu, and of gelu by tanh; gate and up as two tensors, and as halves of one."""
    expected = None
    for degree in (1, 2):
        for ours, former in run_ranks(on_rank, degree, family, dtype, sp and degree > 1):
            expected = expected or ours
            assert_bitwise_equal(ours, former, f"TP={degree}")
            assert_bitwise_equal(ours, expected, f"TP={degree}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ("qwen3", "phi3", "gemma2"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_bits_on_a_gpu(family, dtype):
    model = tpi.parallelize(hf_models.build(family, dtype).cuda(), None)
    assert calls_of(model) == BOTH_TWICE
    with former_code():
        former = step(model)
    assert_bitwise_equal(step(model), former)


@pytest.fixture(scope="module")
def qwen3() -> nn.Module:
    return tpi.parallelize(hf_models.build("qwen3"), None)


def test_the_former_code_runs_with_the_mode_off_and_for_other_arguments(qwen3):
    from transformers.models.qwen3 import modeling_qwen3

    assert calls_of(qwen3, mode=False) == []
    assert calls_of(hf_models.build("qwen3"), mode=False) == []
    rotate = modeling_qwen3.apply_rotary_pos_emb
    assert rotate.former.__module__ == rotate.__module__ == modeling_qwen3.__name__
    assert not hasattr(rotate.former, "former")
    q, cos, sin = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    k = q.transpose(1, 2)
    with tpi.set_tp_invariant_mode(True), mock.patch.object(fused, "rotary_embedding", side_effect=AssertionError):
        assert_bitwise_equal(rotate(q, q, cos, sin, unsqueeze_dim=2), rotate.former(q, q, cos, sin, 2))
        of_cos = cos.clone().requires_grad_()
        assert_bitwise_equal(rotate(k, k, of_cos, sin), rotate.former(k, k, cos, sin))


def test_copies_and_pickles(qwen3):
    expected = step(qwen3)
    file = io.BytesIO()
    torch.save(qwen3, file)
    file.seek(0)
    for twin in (copy.deepcopy(qwen3), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(qwen3))):
        assert calls_of(twin) == BOTH_TWICE
        assert_bitwise_equal(step(twin), expected)
        assert [type(m) for m in twin.modules()] == [type(m) for m in qwen3.modules()]
        assert type(twin.model.layers[0].mlp).__name__ == "Qwen3MLP"


def test_cloudpickle_finds_the_classes(qwen3):
    """mlflow and Ray pickle with it. A class that no file names it takes apart, with all that its code refers to."""
    cloudpickle = pytest.importorskip("cloudpickle")
    twin = cloudpickle.loads(cloudpickle.dumps(qwen3))
    assert [type(m) for m in twin.modules()] == [type(m) for m in qwen3.modules()]
    assert_bitwise_equal(step(twin), step(qwen3))


def test_gradient_checkpointing(qwen3):
    expected = step(qwen3)
    model = copy.deepcopy(qwen3)
    model.gradient_checkpointing_enable()
    assert_bitwise_equal(step(model), expected)


def test_hooks_of_the_activation_are_called_and_may_change_it(qwen3):
    model = copy.deepcopy(qwen3)
    expected, seen = step(model), []
    mlp = model.model.layers[0].mlp
    with mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(module)):
        assert_bitwise_equal(step(model), expected)
    assert seen == [mlp.act_fn]
    with mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output), pytest.raises(AssertionError):
        assert_bitwise_equal(step(model), expected)
    assert_bitwise_equal(step(model), expected)


def test_what_takes_the_activations_place_is_called(qwen3):
    changed = copy.deepcopy(qwen3)
    for layer in changed.model.layers:
        layer.mlp.act_fn = nn.ReLU()
    with former_code():
        former = step(changed)
    assert_bitwise_equal(step(changed), former)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(former, step(qwen3))


# --- model types ----------------------------------------------------------------------------------------------------

# Of those that work by the table in docs/model_types.md: no gated block outside of experts that is what it must be.
WITHOUT_GATED = {
    "arcee", "cohere2_moe", "flex_olmo", "gpt_neox", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "jais2", "lfm2_moe", "mellum", "minimax", "minimax_m2", "mixtral", "nanochat", "nemotron",
    "nemotron_h", "olmoe", "phi", "phimoe", "qwen3_moe", "seed_oss", "starcoder2",
}  # fmt: skip
# Other pairs, dtypes or signs: cos of half of the features, products in float32.
WITHOUT_ROTATION = {
    "bailing_hybrid", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm", "glm4",
    "gpt_oss", "helium", "kimi_linear", "nanochat",
}  # fmt: skip
SAMPLE = ["qwen3", "glm4", "gpt_neox", "seed_oss", "nanochat", "deepseek_v3", "qwen3_moe", "stablelm", "gemma3_text"]


def working_types() -> list[str]:
    names = [name for name, row in model_types.rows(model_types.DOCUMENT.read_text()).items() if "yes |" in row]
    return [name for name in names if name in model_types.class_names()]


def test_the_model_types_that_get_them(pytestconfig):
    """The numbers of docs/model_types.md; with --all-cases of every type that works, in under a minute."""
    import sys

    names = working_types()
    assert {*names} >= WITHOUT_GATED | WITHOUT_ROTATION
    text = " ".join(model_types.DOCUMENT.read_text().split())
    counts = len(names), len(names) - len(WITHOUT_GATED), len(names) - len(WITHOUT_ROTATION)
    assert "Of the {} model types that work, {} have such blocks and {} such a function".format(*counts) in text
    for name in names if pytestconfig.getoption("--all-cases") else SAMPLE:
        if name not in names:
            continue
        with model_types._quiet():
            model = tpi.parallelize(model_types.build(name, None), None)
        assert (gated_blocks(model) == 0) == (name in WITHOUT_GATED), name
        files = {type(module).__module__ for module in model.modules()}
        functions = [vars(sys.modules[file]).get(fused._ROTATION) for file in files]
        assert any(hasattr(function, "former") for function in functions) != (name in WITHOUT_ROTATION), name


# --- what a module computes -----------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = nn.SiLU() if activation is None else activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class UpFirst(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(up * self.act_fn(self.gate_proj(x)))


class Halves(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)
        self.activation_fn = nn.SiLU() if activation is None else activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class HalvesUpFirst(Halves):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.activation_fn(gate) * up)


@pytest.mark.parametrize("kind, up_first", [(Gated, False), (UpFirst, True), (Halves, False), (HalvesUpFirst, True)])
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "relu"))
def test_blocks_that_get_a_forward(kind, up_first, activation):
    torch.manual_seed(0)
    act = {"silu": nn.SiLU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}[activation]
    block = kind(act)
    with torch.inference_mode(), torch.device("meta"):  # what is found does not depend on where it is looked for
        found = gated_block_of(block)
    assert (found.up_first, found.computes) == (up_first, activation)
    fused.install(nn.Sequential(block))
    SafeSdpa(act)
    assert gated_blocks(block) == 1
    x = torch.randn(64, 8)
    results = []
    with tpi.set_tp_invariant_mode(True):
        for context in (contextlib.nullcontext(), former_code()):
            block.zero_grad()
            leaf = x.clone().requires_grad_()
            with context:
                y = block(leaf)
            y.square().sum().backward()
            results.append({"y": y.detach(), "dx": leaf.grad, **{n: p.grad for n, p in block.named_parameters()}})
        with mock.patch.object(fused, "gated_activation", side_effect=EOFError), pytest.raises(EOFError):
            block(x)
    assert_bitwise_equal(*results)


class Branches(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x


class AddsToIt(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Limited(Gated):
    limit = 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=self.limit)) * self.up_proj(x))


class UsesItTwice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        a = self.act_fn(self.gate_proj(x))
        return self.down_proj(a * (self.up_proj(x) * a))


class NotTheInput(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * self.up_proj(gate))


class OneHalf(Halves):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_up_proj(x).chunk(2, dim=-1)[0]
        return self.down_proj(self.activation_fn(gate) * gate)


class Sums(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Holds(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize("kind", (Branches, AddsToIt, Limited, UsesItTwice, NotTheInput, OneHalf, Sums, Holds))
def test_blocks_that_are_left_alone(kind):
    assert gated_block_of(kind()) is None


def test_a_forward_of_the_module_itself_is_left_alone():
    block = Gated()
    block.forward = lambda x: x
    assert gated_block_of(block) is None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class OtherGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(x)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x.clamp(max=1000.0))


class OtherInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * 2 if self.training else F.silu(x)


def test_activations_by_what_they_compute():
    from transformers.activations import ACT2FN

    def name_of(activation: Any) -> str | None:
        found = gated_block_of(Gated(activation))
        return None if found is None else found.computes

    names = ("silu", "swish", "gelu_pytorch_tanh", "relu")
    assert [name_of(ACT2FN[name]) for name in names] == ["silu", "silu", "gelu_tanh", "relu"]
    others = ["gelu", "gelu_new", "gelu_python", "gelu_fast", "quick_gelu", "relu2", "relu6", "mish", "sigmoid", "tanh"]
    assert not any(name_of(ACT2FN[name]) for name in others)
    assert not any(name_of(kind()) for kind in (OtherGradient, Clamped, OtherInTraining))


# --- what a function rotates ----------------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def in_float32(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(((x.float() * cos) + (rotate_half(x.float()) * sin)).to(x.dtype) for x in (q, k))


def other_zeros(q, k, cos, sin):
    def by_chunks(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (by_chunks(q) * sin), (k * cos) + (by_chunks(k) * sin)


def clamped(q, k, cos, sin):
    cos, sin, q, k = cos.unsqueeze(1), sin.unsqueeze(1), torch.clamp(q, -65504, 65504), torch.clamp(k, -65504, 65504)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def tokens_first(q, k, cos, sin, unsqueeze_dim=2):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def test_functions_that_rotate_by_what_they_compute():
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.llama import modeling_llama

    with torch.inference_mode(), torch.device("meta"):
        assert rotation_of(modeling_llama.apply_rotary_pos_emb) == Rotation(interleaved=False, partial=False)
    assert rotation_of(modeling_gpt_neox.apply_rotary_pos_emb) == Rotation(interleaved=False, partial=True)
    for function in (in_float32, other_zeros, clamped, tokens_first, rotate_half, len):
        assert rotation_of(function) is None, function


def test_a_block_is_tried_once_and_its_activation_stays_as_it_is(monkeypatch):
    """Of each class, as it computes now."""
    tries = []
    monkeypatch.setattr(fused, "_found", {})
    monkeypatch.setattr(
        fused, "_computes", lambda kind, block, tried=fused._computes: tries.append(kind) or tried(kind, block)
    )
    model = tpi.parallelize(hf_models.build("llama").train(), None)
    blocks = [layer.mlp for layer in model.model.layers]
    assert len(blocks) > 1 and len(tries) == 1 and all(isinstance(block, fused._Gated) for block in blocks)
    assert all(block.act_fn.training for block in blocks)
    kind = tries[0]
    monkeypatch.setattr(
        kind, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
    )
    model = tpi.parallelize(hf_models.build("llama"), None)
    assert not any(isinstance(layer.mlp, fused._Gated) for layer in model.model.layers)
