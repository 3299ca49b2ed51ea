"""Gated activations as operators: torch's bytes with its gradients, one tensor or two, compiled; what is refused; and
the experts'."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.core.elementwise import in_whole_vectors
from tp_invariant.functional.gated import invariant_gated_halves
from tp_invariant.kernels.rowwise.reference_gated import halves
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "relu": F.relu,
}
if DEVICE == "cuda":
    del FUNCTIONS["gelu"]  # Triton's erf on GPUs is not torch's: tests/kernels/rowwise/test_gated.py
every_activation = pytest.mark.parametrize("activation", FUNCTIONS)
every_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """torch.compile counts what it has compiled of one function, and gives up after some."""
    torch._dynamo.reset()


def data(dtype: torch.dtype) -> list[Tensor]:
    """gate, up, dy."""
    generator = torch.Generator().manual_seed(0)
    return [wide_randn(2, 9, 120, generator=generator, spread=6).to(DEVICE, dtype) for _ in range(3)]


def passes(gate: Tensor, up: Tensor, dy: Tensor, function) -> list[Tensor]:
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    y = function(gate, up)
    y.backward(dy)
    return [y.detach(), gate.grad, up.grad]


def by_torch(activation: str):
    return lambda gate, up: in_whole_vectors(FUNCTIONS[activation], gate) * up


@every_activation
@every_dtype
def test_the_bytes_of_torchs_operators(activation, dtype):
    tensors = data(dtype)
    expected = passes(*tensors, by_torch(activation))
    assert_bitwise_equal(passes(*tensors, lambda gate, up: tpi.gated_activation(gate, up, activation)), expected)
    for degree in (2, 3, 8):  # every rank's part of the features
        shards = zip(*(t.chunk(degree, dim=-1) for t in tensors), strict=True)
        found = [passes(*shard, lambda gate, up: tpi.gated_activation(gate, up, activation)) for shard in shards]
        assert_bitwise_equal([torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)], expected)
    with pytest.raises(AssertionError):  # the control
        other = "relu" if activation == "silu" else "silu"
        assert_bitwise_equal(passes(*tensors, lambda gate, up: tpi.gated_activation(gate, up, other)), expected)


@every_activation
@every_dtype
def test_compiled(activation, dtype):
    tensors = data(dtype)
    compiled = torch.compile(lambda g, u: tpi.gated_activation(g, u, activation), backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(passes(*tensors, compiled), passes(*tensors, by_torch(activation)))


@every_dtype
@pytest.mark.parametrize("up_first", (False, True))
def test_one_tensor(up_first, dtype):
    """Eager and compiled; the gradient is one tensor."""
    gate, up, dy = data(dtype)
    expected = passes(gate, up, dy, by_torch("silu"))
    both = torch.cat([up, gate] if up_first else [gate, up], dim=-1)

    def function(x: Tensor) -> Tensor:
        return tpi.gated_activation(x, activation="silu", up_first=up_first)

    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x = both.clone().requires_grad_()
        y = call(x)
        y.backward(dy)
        grads = x.grad.chunk(2, dim=-1)
        assert x.grad.is_contiguous()
        found = [y.detach(), *(t.contiguous() for t in (grads[::-1] if up_first else grads))]
        assert_bitwise_equal(found, expected)


def test_only_the_gradients_that_are_needed():
    gate, up, dy = data(torch.float32)
    _, dgate, dup = passes(gate, up, dy, by_torch("gelu_tanh"))
    for wanted, x, expected in ((gate, 0, dgate), (up, 1, dup)):
        leaves = [t.detach().clone() for t in (gate, up)]
        leaves[x].requires_grad_()
        (found,) = torch.autograd.grad(tpi.gated_activation(*leaves, "gelu_tanh"), leaves[x], dy)
        assert_bitwise_equal(found, expected)
        assert wanted.grad is None
    with torch.no_grad():
        assert tpi.gated_activation(gate, up).grad_fn is None


def test_a_second_derivative_is_an_error():
    gate, up, dy = data(torch.float32)
    gate.requires_grad_()
    (dgate,) = torch.autograd.grad(tpi.gated_activation(gate, up), gate, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dgate.sum().backward()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda g: tpi.gated_activation(g, up).sum())(gate.detach())


def test_errors():
    x = torch.ones(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="activation='mish' is unknown: choose one of silu, gelu, gelu_tanh, relu"):
        tpi.gated_activation(x, x, "mish")
    with pytest.raises(ValueError, match=r"gate is torch.float32 \(2, 8\) .* up is torch.float32 \(2, 4\)"):
        tpi.gated_activation(x, x[:, :4])
    with pytest.raises(ValueError, match="they must have one shape, dtype and device"):
        tpi.gated_activation(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"gate has shape \(2, 7\): without up its last dim must be even"):
        tpi.gated_activation(x[:, :7])
    with pytest.raises(ValueError, match="up_first=True is for one tensor"):
        tpi.gated_activation(x, x, up_first=True)
    with pytest.raises(TypeError, match=r"gate has dtype torch\.float64"):
        tpi.gated_activation(x.double(), x.double())


# --- for experts ------------------------------------------------------------------------------------------------------


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))


EXPERTS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_silu": gpt_oss,
}
every_expert_activation = pytest.mark.parametrize("activation", EXPERTS)


def of_experts(gate: Tensor, up: Tensor, dy: Tensor, activation: str, interleaved: bool = False, compiled=False):
    x = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
    x.requires_grad_()
    function = invariant_gated_halves
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    y = function(x, activation, interleaved)
    y.backward(dy)
    assert x.grad.is_contiguous()
    return [y.detach(), *(half.contiguous() for half in halves(x.grad, interleaved=interleaved))]


@every_expert_activation
@every_dtype
def test_every_shard_of_the_features_has_the_bits_of_the_whole(activation, dtype):
    """In either order of gate and up, eager and compiled; and the values are torch's."""
    tensors = [t / 8 for t in data(dtype)]
    whole = of_experts(*tensors, activation)
    for degree in (2, 3, 8):
        shards = zip(*(t.chunk(degree, dim=-1) for t in tensors), strict=True)
        found = [of_experts(*shard, activation, interleaved=degree == 3) for shard in shards]
        assert_bitwise_equal([torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)], whole, f"{degree}")
    for interleaved in (False, True):
        assert_bitwise_equal(of_experts(*tensors, activation, interleaved, compiled=True), whole)
    exact = passes(*(t.double() for t in tensors), EXPERTS[activation])
    theirs = passes(*tensors, EXPERTS[activation])
    for got, torchs, value in zip(whole, theirs, exact, strict=True):
        errors = [float((t.double() - value).norm() / value.norm()) for t in (got, torchs)]
        assert errors[0] <= 1.02 * errors[1] + 2 * 2.0**-23, errors
    with pytest.raises(AssertionError):  # the control
        assert_bitwise_equal(of_experts(*tensors, "gelu_tanh" if activation == "silu" else "silu"), whole)


def test_halves_of_an_odd_number_of_features():
    with pytest.raises(ValueError, match=r"halves: x has shape \(18, 239\); allowed: an even last dim"):
        invariant_gated_halves(torch.ones(2, 9, 239, device=DEVICE), "silu", False)
