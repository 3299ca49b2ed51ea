"""The rotary embedding, Triton's and the CPU's: torch's bytes forward and backward, and every head by itself."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from gpus import gpu
from torch import Tensor

from tp_invariant.kernels.rowwise import reference_rope, rope
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [rope] if DEVICE == "cuda" else [rope, reference_rope]
every_dtype = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
interleaved_or_not = pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
# B, S, heads of q, heads of k, D, features of cos, batch of cos
SHAPES = [(2, 5, 4, 2, 16, 16, 1), (2, 3, 3, 1, 20, 12, 2), (1, 7, 1, 6, 64, 64, 1)]


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def kernels(request) -> ModuleType:
    return request.param


def data(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, cos, sin, dq, dk, as projections give them: [B, S, heads, D], transposed. With zeros of both signs."""
    batch, s, heads, heads_k, d, r, batch_cos = shape
    generator = torch.Generator().manual_seed(0)
    q, k, dq, dk = (
        wide_randn(batch, s, h, d, generator=generator, spread=4).to(DEVICE, dtype) for h in (heads, heads_k) * 2
    )
    for x in (q, dq):
        x.view(-1)[::3] *= 0.0
    angles = torch.rand(2, batch_cos, s, r, generator=generator) * 6.3
    cos, sin = angles.cos().to(DEVICE, dtype).unbind()
    return [*(x.transpose(1, 2) for x in (q, k)), cos, sin, *(x.transpose(1, 2) for x in (dq, dk))]


def by_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor, interleaved: bool) -> list[Tensor]:
    """By the operators that transformers' models have."""

    def rotate(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    leaves, outputs, r = [x.detach().clone().requires_grad_() for x in (q, k)], [], cos.shape[-1]
    for x in leaves:
        part, rest = (x, None) if r == x.shape[-1] else (x[..., :r], x[..., r:])
        y = (part * cos.unsqueeze(1)) + (rotate(part) * sin.unsqueeze(1))
        outputs.append(y if rest is None else torch.cat([y, rest], dim=-1))
    grads = torch.autograd.grad(outputs, leaves, (dq, dk))
    return [x.detach().contiguous() for x in (*outputs, *grads)]


def everything(
    kernels: ModuleType, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor, interleaved: bool
) -> list[Tensor]:
    found = kernels.rope(q, k, cos, sin, interleaved=interleaved)
    found += kernels.rope(dq, dk, cos, sin, interleaved=interleaved, backward=True)
    return [x.contiguous() for x in found]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interleaved_or_not
@every_dtype
def test_the_bytes_of_torchs_operators(kernels, shape, interleaved, dtype):
    if kernels is rope and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 towards zero; float16 tests the same lines")
    tensors = data(shape, dtype)
    expected = by_torch(*tensors, interleaved)
    assert_bitwise_equal(everything(kernels, *tensors, interleaved), expected)
    with pytest.raises(AssertionError):  # the control
        assert_bitwise_equal(everything(kernels, *tensors, not interleaved), expected)


@gpu
@interleaved_or_not
@every_dtype
def test_many_elements_on_a_gpu(interleaved, dtype):
    for shape in ((2, 512, 16, 8, 128, 128, 1), (3, 257, 5, 1, 96, 64, 3)):
        tensors = data(shape, dtype)
        expected = by_torch(*tensors, interleaved)
        for _ in range(2):  # the second time by what is remembered
            assert_bitwise_equal(everything(rope, *tensors, interleaved), expected)


@interleaved_or_not
def test_right(kernels, interleaved):
    """Within the three roundings of an element of float64's value."""
    tensors = data(SHAPES[0], torch.float32)
    exact = by_torch(*(x.double() for x in tensors), interleaved)
    for got, value in zip(everything(kernels, *tensors, interleaved), exact, strict=True):
        assert float((got.double() - value).norm() / value.norm()) < 4 * 2.0**-24


def test_heads_and_tokens_by_themselves(kernels):
    q, k, cos, sin, dq, dk = data(SHAPES[1], torch.float32)
    whole = everything(kernels, q, k, cos, sin, dq, dk, False)
    for head in range(3):
        part = everything(kernels, q[:, head : head + 1], k, cos, sin, dq[:, head : head + 1], dk, False)
        expected = [x if i % 2 else x[:, head : head + 1].contiguous() for i, x in enumerate(whole)]
        assert_bitwise_equal(part, expected)
    at = slice(1, 2)
    part = everything(
        kernels, *(x[:, :, at] for x in (q, k)), cos[:, at], sin[:, at], dq[:, :, at], dk[:, :, at], False
    )
    assert_bitwise_equal(part, [x[:, :, at].contiguous() for x in whole])


def test_one_tensor_alone(kernels):
    q, k, cos, sin, _, _ = data(SHAPES[0], torch.float32)
    alone, nothing = kernels.rope(q, None, cos, sin)
    assert nothing is None
    assert_bitwise_equal(alone, kernels.rope(q, k, cos, sin)[0])


def test_errors(kernels):
    q, k, cos, sin, _, _ = data(SHAPES[0], torch.float32)
    with pytest.raises(TypeError, match=r"cos has dtype torch\.float64; allowed: that of q"):
        kernels.rope(q, k, cos.double(), sin)
    with pytest.raises(ValueError, match=r"k has shape \(2, 2, 4, 16\)"):
        kernels.rope(q, k[:, :, 1:], cos, sin)
    with pytest.raises(ValueError, match=r"cos has shape \(1, 4, 16\)"):
        kernels.rope(q, k, cos[:, 1:], sin)
    with pytest.raises(ValueError, match=r"R even and at most 16"):
        kernels.rope(q, k, cos[..., :15], sin[..., :15])
