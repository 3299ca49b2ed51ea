"""The gated activations as an operator: gradients, shards of features, torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant.functional.gated import invariant_gated
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}
pytestmark = [
    pytest.mark.parametrize("activation", ACTIVATIONS),
    pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str),
]


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
    exact = passes(*(t.double() for t in tensors), lambda gate, up: ACTIVATIONS[activation](gate) * up)
    theirs = passes(*tensors, lambda gate, up: ACTIVATIONS[activation](gate) * up)
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
