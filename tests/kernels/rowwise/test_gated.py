"""SwiGLU and GeGLU, Triton's and the CPU's: right, rounded where torch rounds, and every element by itself."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant.kernels.rowwise import gated, reference_gated
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [gated] if DEVICE == "cuda" else [gated, reference_gated]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TORCHS = {"silu": F.silu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}
both_activations = pytest.mark.parametrize("activation", TORCHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # as meant, in the interpreter


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def kernels(request) -> ModuleType:
    return request.param


def data(t: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up, dy."""
    generator = torch.Generator().manual_seed(0)
    return tuple(wide_randn(t, h, generator=generator, spread=3).to(DEVICE, dtype) for _ in range(3))


def skip_where_bfloat16_is_truncated(kernels: ModuleType, dtype: torch.dtype) -> None:
    if kernels is gated and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 towards zero; float16 tests the same lines")


def everything(kernels: ModuleType, gate: Tensor, up: Tensor, dy: Tensor, activation: str) -> list[Tensor]:
    return [kernels.gated_forward(gate, up, activation), *kernels.gated_backward(dy, gate, up, activation)]


def torchs(gate: Tensor, up: Tensor, dy: Tensor, activation: str, dtype: torch.dtype) -> list[Tensor]:
    gate, up = (t.to(dtype, copy=True).requires_grad_() for t in (gate, up))
    y = TORCHS[activation](gate) * up
    y.backward(dy.to(dtype))
    return [y.detach(), gate.grad, up.grad]


@both_activations
@every_dtype
def test_against_float64(kernels, dtype, activation):
    """No further from it than torch's own, but for two units of fp32, in which the formulas differ."""
    skip_where_bfloat16_is_truncated(kernels, dtype)
    args = *data(9, 300, dtype), activation
    exact = torchs(*args, torch.float64)
    for got, theirs, value in zip(everything(kernels, *args), torchs(*args, dtype), exact, strict=True):
        assert got.dtype == dtype and got.is_contiguous()
        error, torch_error = (float((t.double() - value).norm() / value.norm()) for t in (got, theirs))
        assert error <= 1.02 * torch_error + 2 * 2.0**-23, (error, torch_error)


@both_activations
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_activation_is_rounded_before_the_product(kernels, dtype, activation):
    """As by torch's operations one by one; the control: rounded only once, many elements have other bits."""
    skip_where_bfloat16_is_truncated(kernels, dtype)
    gate, up, dy = data(9, 300, dtype)
    y, dgate, dup = everything(kernels, gate, up, dy, activation)
    act = kernels.gated_forward(gate, torch.ones_like(gate), activation)
    assert_bitwise_equal([y, dup], [act * up, dy * act])
    once = TORCHS[activation](gate.float()) * up.float()
    assert (once.to(dtype) != y).sum() > y.numel() // 20
    plain = kernels.gated_backward(dy * up, gate, torch.ones_like(gate), activation)[0]
    assert_bitwise_equal(dgate, plain)


@both_activations
@every_dtype
def test_elements_have_the_bits_of_the_whole(kernels, dtype, activation):
    """Any rows, any columns, and halves of one tensor."""
    gate, up, dy = data(5, 70, dtype)
    whole = everything(kernels, gate, up, dy, activation)
    both = torch.cat([gate, up], dim=1)
    assert_bitwise_equal(everything(kernels, *both.chunk(2, dim=1), dy, activation), whole)
    for part in ((slice(1, 3),), (slice(0, None, 2), slice(3, 38)), (slice(None), slice(69, 70)), (slice(0, 0),)):
        got = everything(kernels, gate[part], up[part], dy[part], activation)
        assert_bitwise_equal(got, [t[part].clone(memory_format=torch.contiguous_format) for t in whole], str(part))
    transposed = everything(kernels, gate.t().contiguous().t(), up, dy, activation)
    assert_bitwise_equal(transposed, whole)


@both_activations
def test_large_gates_saturate(kernels, activation):
    """No NaN where exp overflows: act is 0 far below zero and the gate far above."""
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4]], device=DEVICE)
    ones = torch.ones_like(gate)
    y, dgate, dup = everything(kernels, gate, ones, ones, activation)
    assert_bitwise_equal([y.abs(), dup.abs()], [gate.clamp(min=0)] * 2)
    assert_bitwise_equal(dgate.abs(), (gate > 0).float())


X = torch.ones(4, 8)


@pytest.mark.parametrize(
    "error, message, args",
    (
        (ValueError, "gated_forward: activation is 'relu'; allowed: silu, gelu_tanh", (X, X, "relu")),
        (ValueError, "gated_forward: up has shape (4, 4); allowed: (4, 8)", (X, X[:, :4], "silu")),
        (TypeError, "gated_forward: up has dtype torch.float16; allowed: torch.float32", (X, X.half(), "silu")),
        (TypeError, "gated_forward: gate has dtype torch.float64; allowed: ", (X.double(), X, "silu")),
        (ValueError, "gated_backward: dy has shape (2, 8); allowed: (4, 8)", (X[:2], X, X, "silu")),
    ),
)
def test_errors(kernels, error, message, args):
    with pytest.raises(error, match=re.escape(message)):
        getattr(kernels, message.partition(":")[0])(*args)
