"""Gated activations with torch's bits, Triton's and the CPU's: torch's bytes, right, and every element by itself."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant.kernels.elementwise import in_whole_vectors
from tp_invariant.kernels.rowwise import reference_torch_gated, torch_gated
from tp_invariant.kernels.rowwise.torch_gated_checks import ACTIVATIONS
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [torch_gated] if DEVICE == "cuda" else [torch_gated, reference_torch_gated]
FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "relu": F.relu,
}
ERF_IS_ANOTHER = DEVICE == "cuda"  # in the CUDA that Triton brings than in torch's
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_dtype = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # as meant, in the interpreter


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")(test))


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def kernels(request) -> ModuleType:
    return request.param


def data(t: int, h: int, dtype: torch.dtype, spread: int = 3) -> list[Tensor]:
    """gate, up, dy."""
    generator = torch.Generator().manual_seed(0)
    return [wide_randn(t, h, generator=generator, spread=spread).to(DEVICE, dtype) for _ in range(3)]


def skip_where_rounding_is_the_interpreters(kernels: ModuleType, dtype: torch.dtype) -> None:
    if kernels is torch_gated and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 towards zero; float16 tests the same lines")


def everything(kernels: ModuleType, gate: Tensor, up: Tensor, dy: Tensor, activation: str) -> list[Tensor]:
    y = kernels.torch_gated_forward(gate, up, activation)
    return [y, *kernels.torch_gated_backward(dy, gate, up, activation)]


def by_torch(gate: Tensor, up: Tensor, dy: Tensor, activation: str) -> list[Tensor]:
    """With torch's operators and its autograd, on a CPU in full vectors."""
    gate, up = (x.detach().clone().requires_grad_() for x in (gate, up))
    y = in_whole_vectors(FUNCTIONS[activation], gate) * up
    y.backward(dy)
    return [y.detach(), gate.grad, up.grad]


@every_activation
@every_dtype
def test_the_bytes_of_torchs_operators(activation, dtype):
    """Also of infinities, of numbers that are not normal, and of every gate that 16 bits can hold."""
    if activation == "gelu" and ERF_IS_ANOTHER:
        pytest.skip("Triton's erf on GPUs is not torch's")
    kernels = KERNELS[-1]
    gate, up, dy = data(64, 1024, dtype, spread=14)
    if dtype != torch.float32:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).to(DEVICE).view(64, 1024)
        gate = torch.where(every.isnan(), 0.0, every)
    expected = by_torch(gate, up, dy, activation)
    assert_bitwise_equal(everything(kernels, gate, up, dy, activation), expected)
    if dtype != torch.float32 and activation != "relu":
        with pytest.raises(AssertionError):  # the control: without the rounding between activation and product
            assert_bitwise_equal((FUNCTIONS[activation](gate.float()) * up.float()).to(dtype), expected[0])


@gpu
@every_dtype
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "gelu"])
def test_many_elements_on_a_gpu(activation, dtype):
    tensors = data(2048, 2048, dtype, spread=14)
    expected = by_torch(*tensors, activation)
    for _ in range(2):  # the second time by what is remembered
        assert_bitwise_equal(everything(torch_gated, *tensors, activation), expected)


@every_activation
@every_dtype
def test_right(kernels, activation, dtype):
    skip_where_rounding_is_the_interpreters(kernels, dtype)
    gate, up, dy = data(5, 200, dtype)
    exact = by_torch(gate.double(), up.double(), dy.double(), activation)
    theirs = by_torch(gate, up, dy, activation)
    for got, torchs, value in zip(everything(kernels, gate, up, dy, activation), theirs, exact, strict=True):
        assert got.dtype == dtype and got.is_contiguous()
        errors = [float((t.double() - value).norm() / value.norm()) for t in (got, torchs)]
        assert errors[0] <= 1.05 * errors[1] + 4 * 2.0**-23, errors


@every_activation
def test_an_element_depends_on_its_own_alone(kernels, activation):
    """Any rows and columns of the whole, in any strides, have its bytes."""
    tensors = data(9, 260, torch.float32)
    whole = everything(kernels, *tensors, activation)
    for rows, columns in (
        (slice(0, 1), slice(None)), (slice(3, 9), slice(0, 64)), (slice(None), slice(77, 260)),
        (slice(None, None, 2), slice(1, 30)), (slice(8, 9), slice(259, 260)),
    ):  # fmt: skip
        views = [x[rows, columns] for x in tensors]
        expected = [x[rows, columns].contiguous() for x in whole]
        assert_bitwise_equal(everything(kernels, *views, activation), expected)
        turned = [x.t().contiguous().t() for x in views]
        assert_bitwise_equal(everything(kernels, *turned, activation), expected)


def test_views_that_are_negated_by_a_flag(kernels):
    gate, up, dy = data(4, 64, torch.float32)
    negated = torch.complex(gate, -gate).conj().imag
    assert negated.is_neg()
    expected = everything(kernels, gate, up, dy, "silu")
    assert_bitwise_equal(everything(kernels, negated, up, dy, "silu"), expected)


def test_halves_of_one_tensor(kernels):
    """Gradients written into the halves of one tensor, for halves of another."""
    gate, up, dy = data(6, 100, torch.float32)
    both, grads = torch.cat([gate, up], dim=-1), torch.full((6, 200), 7.0, device=DEVICE)
    expected = everything(kernels, gate, up, dy, "gelu")
    y = kernels.torch_gated_forward(*both.chunk(2, dim=-1), "gelu")
    kernels.torch_gated_backward(dy, *both.chunk(2, dim=-1), "gelu", out=grads.chunk(2, dim=-1))
    assert_bitwise_equal([y, *(x.contiguous() for x in grads.chunk(2, dim=-1))], expected)


def test_no_rows(kernels):
    x = torch.empty(0, 64, device=DEVICE)
    assert [t.shape for t in everything(kernels, x, x, x, "silu")] == [(0, 64)] * 3


def test_errors(kernels):
    x = torch.ones(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="torch_gated_forward: activation is 'mish'; allowed: silu, gelu, gelu_tanh"):
        kernels.torch_gated_forward(x, x, "mish")
    with pytest.raises(TypeError, match=r"gate has dtype torch\.float64"):
        kernels.torch_gated_forward(x.double(), x.double(), "silu")
    with pytest.raises(TypeError, match=r"up has dtype torch\.bfloat16"):
        kernels.torch_gated_forward(x, x.bfloat16(), "silu")
    with pytest.raises(ValueError, match=r"dy has shape \(2, 4\)"):
        kernels.torch_gated_backward(x[:, :4], x, x, "silu")
