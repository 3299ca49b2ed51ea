"""The gated activations as an operator: gradients, shards of features, torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant.functional.gated import invariant_gated, invariant_gated_halves
from tp_invariant.kernels.rowwise.reference_gated import halves
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))


ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_silu": gpt_oss,
}
pytestmark = [
    pytest.mark.parametrize("activation", ACTIVATIONS),
    pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str),
]


@pytest.fixture(autouse=True)
def nothing_compiled():
    """torch.compile counts what it has compiled of one function, and gives up after some."""
    torch._dynamo.reset()


def data(dtype: torch.dtype) -> list[Tensor]:
    """gate, up, dy."""
    generator = torch.Generator().manual_seed(0)
    return [wide_randn(2, 9, 120, generator=generator, spread=3).to(DEVICE, dtype) for _ in range(3)]


def passes(gate: Tensor, up: Tensor, dy: Tensor, function, *options) -> list[Tensor]:
    gate, up = (t.detach().clone().requires_grad_() for t in (gate, up))
    y = function(gate, up, *options)
    y.backward(dy)
    return [y.detach(), gate.grad, up.grad]


def test_every_shard_of_the_features_has_the_bits_of_the_whole(activation, dtype):
    tensors = data(dtype)
    whole = passes(*tensors, invariant_gated, activation)
    for degree in (2, 3, 8):
        shards = zip(*(t.chunk(degree, dim=-1) for t in tensors), strict=True)
        found = [passes(*shard, invariant_gated, activation) for shard in shards]
        assert_bitwise_equal([torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)], whole, f"{degree}")


def test_it_is_what_torch_computes(activation, dtype):
    tensors = data(dtype)
    exact = passes(*(t.double() for t in tensors), ACTIVATIONS[activation])
    theirs = passes(*tensors, ACTIVATIONS[activation])
    for got, torchs, value in zip(passes(*tensors, invariant_gated, activation), theirs, exact, strict=True):
        errors = [float((t.double() - value).norm() / value.norm()) for t in (got, torchs)]
        assert errors[0] <= 1.02 * errors[1] + 2 * 2.0**-23, errors


def test_only_the_gradients_that_are_needed(activation, dtype):
    gate, up, dy = data(dtype)
    expected = passes(gate, up, dy, invariant_gated, activation)
    (dup,) = torch.autograd.grad(invariant_gated(gate, up.requires_grad_(), activation), up, dy)
    assert_bitwise_equal(dup, expected[2])


def test_compiled(activation, dtype):
    compiled = torch.compile(invariant_gated, backend="aot_eager", fullgraph=True)
    tensors = data(dtype)
    assert_bitwise_equal(
        passes(*tensors, compiled, activation), passes(*tensors, invariant_gated, activation), "compiled"
    )


@pytest.mark.parametrize("interleaved", (False, True), ids=("stacked", "interleaved"))
def test_halves_of_one_tensor(activation, dtype, interleaved):
    """The bytes of the two tensors, eager and compiled; a shard of the features has both its halves."""
    gate, up, dy = data(dtype)
    expected = passes(gate, up, dy, invariant_gated, activation)
    both = torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)
    for function in (
        invariant_gated_halves, torch.compile(invariant_gated_halves, backend="aot_eager", fullgraph=True)
    ):  # fmt: skip
        x = both.clone().requires_grad_()
        y = function(x, activation, interleaved)
        y.backward(dy)
        grads = [half.contiguous() for half in halves(x.grad, interleaved=interleaved)]
        assert x.grad.is_contiguous()
        assert_bitwise_equal([y.detach(), *grads], expected)
    with pytest.raises(ValueError, match=r"halves: x has shape \(18, 239\); allowed: an even last dim"):
        invariant_gated_halves(both[..., 1:], activation, interleaved)
