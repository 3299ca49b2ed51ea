"""ParallelNorm with a residual: the bytes of an addition and a norm, forward and backward, at every degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.testing import assert_bitwise_equal, wide_randn

NORMS = {"RMSNorm": dict(zero_centered_gamma=True), "LayerNorm": dict(bias=True)}
every_norm = pytest.mark.parametrize("kind", NORMS)


def norm_of(kind: str, group: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tpi.ParallelNorm:
    norm = tpi.ParallelNorm(48, normalization=kind, tp_group=group, dtype=dtype, **NORMS[kind], **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(48, generator=generator))
    return norm


def data(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, residual, and the gradients of y and of s."""
    generator = torch.Generator().manual_seed(0)
    return [wide_randn(2, 64, 48, generator=generator, spread=4).to(dtype) for _ in range(4)]


def two_operations(norm: tpi.ParallelNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return norm(s), s


def passes(norm: tpi.ParallelNorm, call: Any, x: Tensor, residual: Tensor, dy: Tensor, ds: Tensor) -> dict[str, Tensor]:
    norm.zero_grad()
    x, residual = (t.detach().clone().requires_grad_() for t in (x, residual))
    y, s = call(norm, x, residual)
    torch.autograd.backward([y, s], [dy, ds])
    grads = {name: p.grad for name, p in norm.named_parameters()}
    return {"y": y.detach(), "s": s.detach(), "dx": x.grad, "dresidual": residual.grad, **grads}


def one_operation(norm: tpi.ParallelNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return norm(x, residual)


@every_norm
@pytest.mark.parametrize("mode", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_bytes_of_the_two_operations(kind, mode, dtype):
    norm, tensors = norm_of(kind, dtype=dtype), data(dtype)
    with tpi.set_tp_invariant_mode(mode):
        expected = passes(norm, two_operations, *tensors)
        found = passes(norm, one_operation, *tensors)
        assert_bitwise_equal(found, expected)
        names = {type(y.grad_fn).__name__ for y in one_operation(norm, tensors[0].requires_grad_(), tensors[1])}
        assert names == ({"AddNormBackward"} if mode else names - {"AddNormBackward"})
        with pytest.raises(AssertionError):  # the control
            assert_bitwise_equal(passes(norm, one_operation, *tensors[1:], tensors[0]), expected)


@every_norm
def test_right(kind):
    tensors, norm = data(), norm_of(kind)
    x, residual = (t.double() for t in tensors[:2])
    s, weight = x + residual, norm.weight.detach().double()
    if kind == "RMSNorm":
        exact = torch.nn.functional.rms_norm(s, (48,), weight + 1, 1e-6)
    else:
        exact = torch.nn.functional.layer_norm(s, (48,), weight, norm.bias.detach().double(), 1e-6)
    with tpi.set_tp_invariant_mode(True):
        y, _ = norm(*tensors[:2])
    assert float((y.double() - exact).norm() / exact.norm()) < 1e-6


def on_rank(tp_group: Any, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    norm = norm_of(kind, tp_group, dtype, sequence_parallel=True, sequence_dim=1)
    rank, degree = torch.distributed.get_rank(tp_group), torch.distributed.get_world_size(tp_group)
    with tpi.set_tp_invariant_mode(True):
        return passes(norm, one_operation, *(t.chunk(degree, dim=1)[rank].contiguous() for t in data(dtype)))


@every_norm
def test_every_degree_under_sequence_parallelism(kind):
    with tpi.set_tp_invariant_mode(True):
        expected = passes(norm_of(kind), one_operation, *data())
    for degree in (2, 4):
        ranks = run_ranks(on_rank, degree, kind, torch.float32)
        for name, value in expected.items():
            parts = [rank[name] for rank in ranks]
            if value.dim() == 1:  # of the parameters: whole on every rank
                for part in parts:
                    assert_bitwise_equal(part, value, name)
            else:
                assert_bitwise_equal(torch.cat(parts, dim=1), value, name)


def test_gradients_that_nothing_asks_for():
    x, residual, dy, ds = data()
    norm = norm_of("LayerNorm")
    with tpi.set_tp_invariant_mode(True):
        y, s = norm(x.requires_grad_(), residual)
        assert_bitwise_equal(torch.autograd.grad(s, x, ds)[0], ds)
        y, s = norm(x, residual)
        alone = torch.autograd.grad(y, x, dy)[0]
        expected = torch.autograd.grad(norm(x + residual), x, dy)[0]
        assert_bitwise_equal(alone, expected)
        y, s = norm(x.detach(), residual)
        assert y.requires_grad and not s.requires_grad
        y, s = norm(x, residual)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


def test_compiled():
    torch._dynamo.reset()
    norm, tensors = norm_of("RMSNorm"), data()
    with tpi.set_tp_invariant_mode(True):
        expected = passes(norm, one_operation, *tensors)
        compiled = torch.compile(one_operation, backend="aot_eager", fullgraph=True)
        assert_bitwise_equal(passes(norm, compiled, *tensors), expected)


def test_errors():
    x, residual, *_ = data()
    norm = norm_of("RMSNorm")
    with pytest.raises(ValueError, match=r"residual is torch\.float32 \(2, 64, 40\) .* one shape, dtype and device"):
        norm(x, residual[..., :40])
    with pytest.raises(ValueError, match=r"residual is torch\.bfloat16"):
        norm(x, residual.bfloat16())
    with pytest.raises(ValueError, match="a residual was given to a norm over heads=64: add it before"):
        norm_of("RMSNorm", heads=64, heads_dim=1)(x, residual)
