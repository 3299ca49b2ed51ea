"""rotary_embedding as an operator: torch's bytes with its gradients, compiled, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)


def data(dtype: torch.dtype) -> list[Tensor]:
    """q, k, cos, sin, dq, dk; [B, heads, S, D]."""
    generator = torch.Generator().manual_seed(0)
    q, k, dq, dk = (wide_randn(2, h, 5, 16, generator=generator, spread=4).to(DEVICE, dtype) for h in (4, 2, 4, 2))
    cos, sin = (torch.rand(2, 1, 5, 16, generator=generator) * 6.3).cos().to(DEVICE, dtype).unbind()
    return [q, k, cos, sin, dq, dk]


def by_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def rotate(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)

    return tuple((x * cos.unsqueeze(1)) + (rotate(x) * sin.unsqueeze(1)) for x in (q, k))


def passes(function, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    outputs = function(*leaves, cos, sin)
    return [x.detach().contiguous() for x in (*outputs, *torch.autograd.grad(outputs, leaves, (dq, dk)))]


@every_dtype
def test_the_bytes_of_torchs_operators(dtype):
    tensors = data(dtype)
    expected = passes(by_torch, *tensors)
    assert_bitwise_equal(passes(tpi.rotary_embedding, *tensors), expected)
    compiled = torch.compile(tpi.rotary_embedding, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(passes(compiled, *tensors), expected)

    def tokens_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        found = tpi.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        return [x.transpose(1, 2) for x in found]

    assert_bitwise_equal(passes(tokens_first, *tensors), expected)
    with pytest.raises(AssertionError):  # the control
        assert_bitwise_equal(passes(lambda *args: tpi.rotary_embedding(*args, interleaved=True), *tensors), expected)


def test_one_of_the_two_needs_a_gradient_or_gets_one():
    q, k, cos, sin, dq, dk = data(torch.float32)
    *_, dq_whole, dk_whole = passes(by_torch, q, k, cos, sin, dq, dk)
    rotated_q, rotated_k = tpi.rotary_embedding(q.requires_grad_(), k, cos, sin)
    assert not rotated_k.requires_grad
    assert_bitwise_equal(torch.autograd.grad(rotated_q, q, dq)[0], dq_whole)
    rotated_q, rotated_k = tpi.rotary_embedding(q.detach(), k.requires_grad_(), cos, sin)
    assert not rotated_q.requires_grad
    assert_bitwise_equal(torch.autograd.grad(rotated_k, k, dk)[0], dk_whole)
    _, rotated_k = tpi.rotary_embedding(q, k, cos, sin)  # both need one, and one of them gets none
    found = torch.autograd.grad(rotated_k, (q, k), dk, allow_unused=True)
    assert found[0] is None
    assert_bitwise_equal(found[1], dk_whole)


def test_a_second_derivative_is_an_error():
    q, k, cos, sin, dq, _ = data(torch.float32)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(tpi.rotary_embedding(q, k, cos, sin)[0], q, dq.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: tpi.rotary_embedding(x, k, cos, sin)[0].sum())(q.detach())


def test_errors():
    q, k, cos, sin, _, _ = data(torch.float32)
    with pytest.raises(ValueError, match="unsqueeze_dim=0: choose 1"):
        tpi.rotary_embedding(q, k, cos, sin, unsqueeze_dim=0)
    with pytest.raises(ValueError, match="cos or sin requires a gradient"):
        tpi.rotary_embedding(q, k, cos.clone().requires_grad_(), sin)
    with pytest.raises(TypeError, match=r"sin has dtype torch\.bfloat16"):
        tpi.rotary_embedding(q, k, cos, sin.bfloat16())
    with pytest.raises(ValueError, match=r"cos has shape \(1, 4, 16\)"):
        tpi.rotary_embedding(q, k, cos[:, 1:], sin)
