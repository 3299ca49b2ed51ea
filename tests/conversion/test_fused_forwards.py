"""Forwards that parallelize gives to gated blocks and attention: what gets one, and that no bit and no tool changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from types import FunctionType
from typing import Any
from unittest import mock

import hf_models
import model_types
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.conversion import convert, gated_blocks, rotary_forwards
from tp_invariant.conversion.gated_blocks import Recipe, recipe_of, recognise_activation
from tp_invariant.conversion.rotary_forwards import RotationKind, rotation_of
from tp_invariant.testing import assert_bitwise_equal


def forwards(model: nn.Module) -> dict[str, int]:
    """How many modules have which of the two forwards."""
    found = {"gated_forward": 0, "rotary_forward": 0}
    for module in model.modules():
        for kind in type(module).__mro__:
            if "_made_of" in vars(kind):
                found[kind._made_of[1]] += 1
    return found


def without_them() -> Any:
    """A context in which parallelize leaves forwards as they are."""
    stack = mock.patch.multiple(
        convert, install_gated_blocks=lambda model: None, install_rotary_forwards=lambda model: None
    )
    return stack


def step(model: nn.Module, mode: bool = True) -> dict[str, Tensor]:
    model.zero_grad()
    with tpi.set_tp_invariant_mode(mode):
        output = model(**hf_models.batch())
        output.loss.backward()
    return {"logits": output.logits.detach(), **testing.full_grads(model)}


def on_rank(tp_group: Any, family: str, dtype: torch.dtype, sp: bool) -> tuple[Any, Any, dict[str, int]]:
    model = tpi.parallelize(hf_models.build(family, dtype), tp_group, sequence_parallel=sp)
    with without_them():
        plain = tpi.parallelize(hf_models.build(family, dtype), tp_group, sequence_parallel=sp)
    assert not any(forwards(plain).values())
    return step(model), step(plain), forwards(model)


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, dtype, sp",
    [("qwen3", torch.float32, True), ("phi3", torch.bfloat16, False), ("gemma2", torch.float32, False)],
    ids=str,
)
def test_the_bits_of_the_models_own_forwards_at_every_degree(family, dtype, sp):
    """Of silu, and of gelu by tanh; gate and up as two tensors, and as halves of one."""
    expected = None
    for degree in (1, 2, 4):
        for with_them, plain, found in run_ranks(on_rank, degree, family, dtype, sp and degree > 1):
            assert found == {"gated_forward": 2, "rotary_forward": 2}
            expected = expected or with_them
            assert_bitwise_equal(with_them, plain, f"TP={degree}")
            assert_bitwise_equal(with_them, expected, f"TP={degree}")


def test_the_operators_are_called_with_the_mode_on_alone():
    """The control: what is compared above was computed by them."""
    model = tpi.parallelize(hf_models.build("qwen3"), None)
    calls = []

    def noting(name: str, function: Any) -> Any:
        return lambda *args: calls.append(name) or function(*args)

    with (
        mock.patch.object(
            gated_blocks, "gated_activation_of_two", noting("gated", gated_blocks.gated_activation_of_two)
        ),
        mock.patch.object(rotary_forwards, "apply_rotation", noting("rotation", rotary_forwards.apply_rotation)),
    ):
        step(model, mode=False)
        assert calls == []
        step(model)
        assert sorted(calls) == ["gated", "gated", "rotation", "rotation"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ("qwen3", "phi3", "gemma2"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_bits_on_a_gpu(family, dtype):
    results = []
    for context in (contextlib.nullcontext(), without_them()):
        with context:
            model = tpi.parallelize(hf_models.build(family, dtype).cuda(), None)
        model.zero_grad()
        with tpi.set_tp_invariant_mode(True):
            output = model(**{name: value.cuda() for name, value in hf_models.batch().items()})
            output.loss.backward()
        results.append({"logits": output.logits.detach(), **testing.full_grads(model)})
    assert_bitwise_equal(*results)


@pytest.fixture(scope="module")
def qwen3() -> nn.Module:
    return tpi.parallelize(hf_models.build("qwen3"), None)


def test_copies_and_pickles(qwen3):
    expected = step(qwen3)
    file = io.BytesIO()
    torch.save(qwen3, file)
    file.seek(0)
    for twin in (copy.deepcopy(qwen3), torch.load(file, weights_only=False)):
        assert forwards(twin) == forwards(qwen3) == {"gated_forward": 2, "rotary_forward": 2}
        assert_bitwise_equal(step(twin), expected)
        assert [type(m) for m in twin.modules()] == [type(m) for m in qwen3.modules()]
        assert [type(m).__name__ for m in twin.model.layers[0].children()][:2] == ["Qwen3Attention", "Qwen3MLP"]


def test_cloudpickle_finds_the_classes(qwen3):
    """mlflow and Ray pickle with it. A class that no file names it takes apart, with all that its code refers to."""
    cloudpickle = pytest.importorskip("cloudpickle")
    twin = cloudpickle.loads(cloudpickle.dumps(qwen3))
    assert [type(m) for m in twin.modules()] == [type(m) for m in qwen3.modules()]
    assert_bitwise_equal(step(twin), step(qwen3))


def tripled(self, x):
    return 3 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_unpickled_where_the_file_has_another_block(qwen3):
    """The factor is not lost: what the class has become is looked at when the forward is made."""
    from transformers.models.qwen3 import modeling_qwen3

    written = pickle.dumps(qwen3)
    with without_them():
        plain = tpi.parallelize(hf_models.build("qwen3"), None)
    with mock.patch.object(modeling_qwen3.Qwen3MLP, "forward", tripled):
        assert_bitwise_equal(step(pickle.loads(written)), step(plain))


def test_other_models_of_the_same_classes_are_as_they_were(qwen3):
    from transformers.models.qwen3 import modeling_qwen3

    other = hf_models.build("qwen3")
    assert type(other.model.layers[0].mlp) is modeling_qwen3.Qwen3MLP
    assert modeling_qwen3.apply_rotary_pos_emb.__module__ == modeling_qwen3.__name__
    with mock.patch.object(rotary_forwards, "apply_rotation", side_effect=AssertionError("called")):
        step(other)


def test_gradient_checkpointing(qwen3):
    expected = step(qwen3)
    model = copy.deepcopy(qwen3)
    model.gradient_checkpointing_enable()
    assert_bitwise_equal(step(model), expected)


def test_lora_on_the_layers_inside(qwen3):
    peft = pytest.importorskip("peft")
    from tp_invariant.integrations.peft import register

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return peft.get_peft_model(copy.deepcopy(model), register(config))

    with without_them():
        plain = tpi.parallelize(hf_models.build("qwen3"), None)
    model = adapted(qwen3)
    assert forwards(model) == {"gated_forward": 2, "rotary_forward": 2}
    results = [step(m) for m in (model, adapted(plain))]
    assert any("lora" in name for name in results[0])
    assert_bitwise_equal(*results)
    with pytest.raises(AssertionError):  # the adapters are in the sum
        assert_bitwise_equal(results[0]["logits"], step(qwen3)["logits"])


# --- model types ----------------------------------------------------------------------------------------------------

# Of those that work by the table in docs/hugging_face.md: no gated block outside of experts that is what it must be.
WITHOUT_GATED = {
    "arcee", "cohere2_moe", "flex_olmo", "gpt_neox", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "jais2", "lfm2_moe", "mellum", "minimax", "minimax_m2", "mixtral", "nanochat", "nemotron", "nemotron_h",
    "olmoe", "phi", "phimoe", "qwen3_moe", "seed_oss", "starcoder2",
}  # fmt: skip
# No attention, or other pairs, dtypes or signs: cos of half of the features, products in float32.
WITHOUT_ROTATION = {
    "bailing_hybrid", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm", "glm4",
    "gpt_oss", "granitemoehybrid", "helium", "kimi_linear", "nanochat", "nemotron_h",
}  # fmt: skip
SAMPLE = ["qwen3", "glm4", "gpt_neox", "seed_oss", "nanochat", "deepseek_v3", "qwen3_moe", "stablelm", "gemma3_text"]


def working_types() -> list[str]:
    lines = [line for line in model_types.DOCUMENT.read_text().splitlines() if "| yes |" in line]
    names = [line.split(" | ")[0].strip("| ") for line in lines]
    return [name for name in names if name in model_types.class_names()]


def test_the_model_types_that_get_them(pytestconfig):
    """The numbers of docs/hugging_face.md; with --all-layouts of every type that works, in under a minute."""
    names = working_types()
    assert {*names} >= WITHOUT_GATED | WITHOUT_ROTATION
    text = " ".join(model_types.DOCUMENT.read_text().split())
    counts = len(names), len(names) - len(WITHOUT_GATED), len(names) - len(WITHOUT_ROTATION)
    assert "Of the {} model types that work, {} have such blocks and {} such attention".format(*counts) in text
    for name in names if pytestconfig.getoption("--all-layouts") else SAMPLE:
        if name not in names:
            continue
        with model_types._quiet():
            model = tpi.parallelize(model_types.build(name, None), None)
        found = forwards(model)
        assert (found["gated_forward"] == 0) == (name in WITHOUT_GATED), (name, found)
        assert (found["rotary_forward"] == 0) == (name in WITHOUT_ROTATION), (name, found)


# --- who must be told of a call --------------------------------------------------------------------------------------


def test_hooks_of_the_activation_are_called_and_may_change_it(qwen3):
    model = copy.deepcopy(qwen3)
    expected, seen = step(model), []
    mlp = model.model.layers[0].mlp
    for place in (mlp.act_fn, mlp.act_fn.activation):
        handle = place.register_forward_hook(lambda module, args, output: seen.append(module) or None)
        assert_bitwise_equal(step(model), expected)
        handle.remove()
    assert seen[0] is mlp.act_fn
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module) or None):
        assert_bitwise_equal(step(model), expected)
    assert sum(module is mlp.act_fn for module in seen) == 2
    handle = mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(step(model), expected)
    handle.remove()
    assert_bitwise_equal(step(model), expected)


def test_what_takes_the_activations_place_is_called(qwen3):
    model = copy.deepcopy(qwen3)
    expected = copy.deepcopy(qwen3)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()
    for layer in expected.model.layers:
        layer.mlp.act_fn.activation = nn.ReLU()
    assert_bitwise_equal(step(model), step(expected))


def test_what_takes_the_rotations_place_in_its_file_is_called(qwen3):
    from transformers.models.qwen3 import modeling_qwen3

    calls = []
    with mock.patch.object(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, *args: calls.append(q) or (q, k)):
        changed = step(qwen3)
    assert len(calls) == 2
    with pytest.raises(AssertionError):
        assert_bitwise_equal(changed["logits"], step(qwen3)["logits"])


def test_forwards_that_are_patched_in_the_class_are_called(qwen3):
    """Before parallelize, when another model of the class has a forward by now, and afterwards."""
    from transformers.models.qwen3 import modeling_qwen3

    of_attention, of_mlp = modeling_qwen3.Qwen3Attention.forward, modeling_qwen3.Qwen3MLP.forward

    def doubled(self, *args, **kwargs):
        output, weights = of_attention(self, *args, **kwargs)
        return 2 * output, weights

    code = of_attention.__code__  # the keys as values too; it rotates by the same global
    names = tuple("k_proj" if name == "v_proj" else name for name in code.co_names)
    without_values = FunctionType(code.replace(co_names=names), of_attention.__globals__)
    expected = step(qwen3)
    for kind, other in (
        (modeling_qwen3.Qwen3Attention, doubled),
        (modeling_qwen3.Qwen3Attention, without_values),
        (modeling_qwen3.Qwen3MLP, lambda self, x: 2 * of_mlp(self, x)),
    ):
        with mock.patch.object(kind, "forward", other):
            with without_them():
                plain = step(tpi.parallelize(hf_models.build("qwen3"), None))
            assert_bitwise_equal(step(qwen3), plain)
            assert_bitwise_equal(step(tpi.parallelize(hf_models.build("qwen3"), None)), plain)
        with pytest.raises(AssertionError):
            assert_bitwise_equal(plain["logits"], expected["logits"])
        assert_bitwise_equal(step(qwen3), expected)


def test_functions_that_the_rotation_calls_may_be_patched(qwen3):
    from transformers.models.qwen3 import modeling_qwen3

    with mock.patch.object(modeling_qwen3, "rotate_half", lambda x: x):
        assert rotation_of(modeling_qwen3.apply_rotary_pos_emb) is None
        with without_them():
            plain = step(tpi.parallelize(hf_models.build("qwen3"), None))
        changed = step(qwen3)
    assert_bitwise_equal(changed, plain)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(changed["logits"], step(qwen3)["logits"])


class _Doubling(TorchFunctionMode):
    """A user's, of one function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = function(*args, **(kwargs or {}))
        return 2 * y if getattr(function, "__name__", "") == self.name else y


@contextlib.contextmanager
def _other_code(function: Any, other: Any) -> Any:
    before, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = before


def test_what_is_patched_in_torch_and_in_the_code_of_functions_is_heard(qwen3):
    """After parallelize: as a model without these forwards hears it. Another process unpickles the model."""
    from transformers.models.qwen3 import modeling_qwen3

    kind = type(qwen3.model.layers[0].mlp.act_fn.activation)
    with without_them():
        plain = tpi.parallelize(hf_models.build("qwen3"), None)
    unpickled = pickle.loads(pickle.dumps(qwen3))
    assert forwards(unpickled) == forwards(qwen3)
    for patch, before in (
        (mock.patch.object(kind, "forward", lambda self, x: 2 * F.silu(x)), False),
        (mock.patch.object(F, "silu", lambda x, *options: x.sigmoid()), False),
        (_other_code(kind.forward, lambda self, input: input.tanh()), True),
        (_other_code(modeling_qwen3.rotate_half, lambda x: x), True),
        (_other_code(modeling_qwen3.apply_rotary_pos_emb, lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)), True),
        (_other_code(modeling_qwen3.Qwen3MLP.forward, lambda self, x: x), True),
        (_Doubling("silu"), False),
        (_Doubling("cat"), False),  # of the halves that it rotates
    ):
        unpickled = pickle.loads(pickle.dumps(qwen3)) if before else unpickled
        with patch, mock.patch.dict(gated_blocks._CLASSES, clear=before):
            changed = step(plain)
            for model in (qwen3, unpickled):
                assert_bitwise_equal(step(model), changed)
        with pytest.raises(AssertionError):
            assert_bitwise_equal(changed["logits"], step(qwen3)["logits"])
    with mock.patch.dict(gated_blocks._CLASSES, clear=True):
        assert_bitwise_equal(step(unpickled), step(plain))
        assert gated_blocks._CLASSES, "recognised again"
    ours = mock.patch.object(gated_blocks, "gated_activation_of_two", side_effect=ZeroDivisionError)
    with torch.device("cpu"), ours, pytest.raises(ZeroDivisionError):  # a mode for a default device is no user's
        step(qwen3)


def test_an_activation_that_is_told_another_function():
    """As transformers' GELUTanh by its `act`, and nn.GELU by `approximate`."""
    results = []
    for context in (without_them(), contextlib.nullcontext()):
        with context:
            model = tpi.parallelize(nn.Sequential(Gated(nn.GELU(approximate="tanh"))), None, PLAN)
        assert forwards(model)["gated_forward"] == len(results)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
        for name, parameter in sorted(model.named_parameters()):
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        with tpi.set_tp_invariant_mode(True), torch.no_grad():
            before = model(x)
            model[0].act.activation.approximate = "none"
            results.append([before, model(x)])
    assert_bitwise_equal(*results)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(*results[0])


def test_functions_in_the_place_of_submodules():
    model = tpi.parallelize(nn.Sequential(Gated()), None, PLAN)
    x = torch.randn(3, 8)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        expected = model(x)
        for name in ("up", "act"):
            module = getattr(model[0], name)
            delattr(model[0], name)
            setattr(model[0], name, functools.partial(module))
            assert_bitwise_equal(model(x), expected)


# --- what a module computes -----------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.both = nn.Linear(8, 32)
        self.act = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class UpFirst(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(up * self.act(self.gate(x)))


class Halves(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class HalvesUpFirst(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


PLAN = {"0.gate": "colwise", "0.up": "colwise", "0.both": "colwise", "0.down": "rowwise"}


@pytest.mark.parametrize(
    "kind, expected",
    [
        (Gated, Recipe("gate", "up", "act", "down", False)),
        (UpFirst, Recipe("gate", "up", "act", "down", True)),
        (Halves, Recipe("both", "", "act", "down", False)),
        (HalvesUpFirst, Recipe("both", "", "act", "down", True)),
    ],
)
@pytest.mark.parametrize("activation", (nn.SiLU, functools.partial(nn.GELU, approximate="tanh"), nn.ReLU))
def test_blocks_that_get_a_forward(kind, expected, activation):
    torch.manual_seed(0)
    block = kind(activation())
    assert recipe_of(block) == expected
    model = nn.Sequential(block)
    results = []
    for context in (without_them(), contextlib.nullcontext()):
        with context:
            twin = tpi.parallelize(copy.deepcopy(model), None, PLAN)
        assert forwards(twin)["gated_forward"] == len(results)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            y = twin(x)
            y.square().sum().backward()
        results.append(
            {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in twin.named_parameters() if p.grad is not None}}
        )
    assert_bitwise_equal(*results)


class Branches(Gated):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.down(self.act(self.gate(x)) * self.up(x))
        return x


class AddsToIt(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) + x


class UsesItTwice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        a = self.act(self.gate(x))
        return self.down(a * (self.up(x) * a))


class NotTheInput(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(self.act(gate) * self.up(gate))


class OtherDim(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=0)
        return self.down(self.act(gate) * up)


class OneHalf(Gated):
    def forward(self, x: Tensor) -> Tensor:
        halves = self.both(x).chunk(2, dim=-1)
        return self.down(self.act(halves[0]) * halves[0])


class Sums(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) + self.up(x))


class Counts(Gated):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("kind", (Branches, AddsToIt, UsesItTwice, NotTheInput, OtherDim, OneHalf, Sums, Counts))
def test_blocks_that_are_left_alone(kind):
    block = kind()
    assert recipe_of(block) is None
    assert getattr(block, "calls", 0) == 0  # nor was it run


def test_a_forward_of_the_module_itself_is_left_alone():
    block = Gated()
    block.forward = lambda x: x
    assert recipe_of(block) is None


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


class CountsCalls(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.silu(x)


def test_activations_that_are_silu_at_times_alone():
    for activation in (Clamped(), OtherInTraining().eval(), CountsCalls()):
        before = dict(vars(activation))
        assert recognise_activation(activation) is None
        assert vars(activation) == before  # nor was it told anything


def test_recognition_does_not_depend_on_where_it_is_done():
    rotary_forwards._rotation_of.cache_clear()
    gated_blocks._probes.cache_clear()
    from transformers.models.qwen3 import modeling_qwen3

    with torch.inference_mode(), torch.device("meta"):
        assert recognise_activation(nn.SiLU()) == "silu"
        assert rotation_of(modeling_qwen3.apply_rotary_pos_emb) is not None


def test_activations_by_what_they_compute():
    from transformers.activations import ACT2FN

    names = ("silu", "swish", "gelu_pytorch_tanh", "relu")
    assert [recognise_activation(ACT2FN[name]) for name in names] == ["silu", "silu", "gelu_tanh", "relu"]
    others = ["gelu", "gelu_new", "gelu_python", "gelu_fast", "quick_gelu", "relu2", "relu6", "mish", "sigmoid", "tanh"]
    assert not any(recognise_activation(ACT2FN[name]) for name in others)
    assert recognise_activation(OtherGradient()) is None
    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda *args: None)
    assert recognise_activation(hooked) is None


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def by_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def in_float32(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(((x.float() * cos) + (rotate_half(x.float()) * sin)).to(x.dtype) for x in (q, k))


def other_zeros(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (by_chunks(q) * sin), (k * cos) + (by_chunks(k) * sin)


def with_a_branch(q, k, cos, sin):
    if q.shape[2] > 1000:
        return q, k
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def clamped(q, k, cos, sin):
    cos, sin, q, k = cos.unsqueeze(1), sin.unsqueeze(1), torch.clamp(q, -65504, 65504), torch.clamp(k, -65504, 65504)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def tokens_first(q, k, cos, sin, unsqueeze_dim=2):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def other_names(a, b, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (a * cos) + (rotate_half(a) * sin), (b * cos) + (rotate_half(b) * sin)


def test_functions_that_rotate_by_what_they_compute():
    from transformers.models.gpt_neox import modeling_gpt_neox
    from transformers.models.qwen3 import modeling_qwen3

    assert rotation_of(modeling_qwen3.apply_rotary_pos_emb) == RotationKind(interleaved=False, partial=False)
    assert rotation_of(modeling_gpt_neox.apply_rotary_pos_emb) == RotationKind(interleaved=False, partial=True)
    for function in (
        in_float32,
        other_zeros,
        with_a_branch,
        clamped,
        tokens_first,
        other_names,
        rotate_half,
        len,
        None,
    ):
        assert rotation_of(function) is None, function


def test_a_name_that_is_an_attribute_too_is_not_renamed():
    """Code has one list of names, for globals and attributes."""

    def forward(self, q, k, cos, sin):
        return self.tokens_first(*other_names(q, k, cos, sin))

    assert rotary_forwards._globals_alone(forward.__code__) == ["other_names"]

    def with_both(self, q, k, cos, sin):
        return self.other_names(other_names(q, k, cos, sin))

    assert rotary_forwards._globals_alone(with_both.__code__) == []
