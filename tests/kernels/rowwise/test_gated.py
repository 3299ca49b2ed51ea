"""Gated activations, Triton's and the CPU's: right, rounded where torch rounds, and every element by itself.

Of two families: gated_, for experts, and torch_gated_, with torch's own bits.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from gpus import gpu
from torch import Tensor

from tp_invariant.functional.gated import ACTIVATIONS
from tp_invariant.kernels.elementwise import in_whole_vectors
from tp_invariant.kernels.rowwise import gated, reference_gated
from tp_invariant.kernels.rowwise.reference_gated import halves
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [gated] if DEVICE == "cuda" else [gated, reference_gated]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))


FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "relu": F.relu,
}
EXPERTS = ("silu", "gelu_tanh", "clamped_silu")
# the first part of a kernel's name, and an activation
PAIRS = [("gated", name) for name in EXPERTS] + [("torch_gated", name) for name in ACTIVATIONS]
ERF_IS_ANOTHER = DEVICE == "cuda"  # in the CUDA that Triton brings than in torch's
both_activations = pytest.mark.parametrize("activation", EXPERTS[:2])
every_pair = pytest.mark.parametrize("family, activation", PAIRS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # as meant, in the interpreter


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def kernels(request) -> ModuleType:
    return request.param


def data(t: int, h: int, dtype: torch.dtype, spread: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up, dy."""
    generator = torch.Generator().manual_seed(0)
    return tuple(wide_randn(t, h, generator=generator, spread=spread).to(DEVICE, dtype) for _ in range(3))


def skip_where_bfloat16_is_truncated(kernels: ModuleType, dtype: torch.dtype) -> None:
    if kernels is gated and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 towards zero; float16 tests the same lines")


def backward(kernels: ModuleType, family: str, *args, **options) -> tuple[Tensor, Tensor]:
    return getattr(kernels, f"{family}_backward")(*args, **options)


def everything(
    kernels: ModuleType, gate: Tensor, up: Tensor, dy: Tensor, activation: str, family: str = "gated"
) -> list[Tensor]:
    y = getattr(kernels, f"{family}_forward")(gate, up, activation)
    return [y, *backward(kernels, family, dy, gate, up, activation)]


def by_torch(gate: Tensor, up: Tensor, dy: Tensor, activation: str) -> list[Tensor]:
    """With torch's operators and its autograd, on a CPU in full vectors."""
    gate, up = (x.detach().clone().requires_grad_() for x in (gate, up))
    y = gpt_oss(gate, up) if activation == "clamped_silu" else in_whole_vectors(FUNCTIONS[activation], gate) * up
    y.backward(dy)
    return [y.detach(), gate.grad, up.grad]


@every_pair
@every_dtype
def test_against_float64(kernels, dtype, family, activation):
    """No further from it than torch's own, but for a few units of fp32, in which the formulas differ."""
    skip_where_bfloat16_is_truncated(kernels, dtype)
    tensors = data(9, 300, dtype)
    exact = by_torch(*(x.double() for x in tensors), activation)
    theirs = by_torch(*tensors, activation)
    share, units = (1.02, 2) if family == "gated" else (1.05, 4)
    for got, torchs, value in zip(everything(kernels, *tensors, activation, family), theirs, exact, strict=True):
        assert got.dtype == dtype and got.is_contiguous()
        errors = [float((t.double() - value).norm() / value.norm()) for t in (got, torchs)]
        assert errors[0] <= share * errors[1] + units * 2.0**-23, errors


@both_activations
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_activation_is_rounded_before_the_product(kernels, dtype, activation):
    """As by torch's operations one by one; the control: rounded only once, many elements have other bits."""
    skip_where_bfloat16_is_truncated(kernels, dtype)
    gate, up, dy = data(9, 300, dtype)
    y, dgate, dup = everything(kernels, gate, up, dy, activation)
    act = kernels.gated_forward(gate, torch.ones_like(gate), activation)
    assert_bitwise_equal([y, dup], [act * up, dy * act])
    once = FUNCTIONS[activation](gate.float()) * up.float()
    assert (once.to(dtype) != y).sum() > y.numel() // 20
    plain = kernels.gated_backward(dy * up, gate, torch.ones_like(gate), activation)[0]
    assert_bitwise_equal(dgate, plain)


@every_pair
@every_dtype
def test_elements_have_the_bits_of_the_whole(kernels, dtype, family, activation):
    """Any rows, any columns, in any strides, halves of one tensor, and what a flag negates."""
    gate, up, dy = data(9, 260, dtype)
    whole = everything(kernels, gate, up, dy, activation, family)
    both = torch.cat([gate, up], dim=1)
    assert_bitwise_equal(everything(kernels, *both.chunk(2, dim=1), dy, activation, family), whole)
    for part in (
        (slice(0, 1),), (slice(3, 9), slice(0, 64)), (slice(None), slice(77, 260)),
        (slice(0, None, 2), slice(3, 38)), (slice(8, 9), slice(259, 260)), (slice(0, 0),),
    ):  # fmt: skip
        views = [x[part] for x in (gate, up, dy)]
        expected = [x[part].clone(memory_format=torch.contiguous_format) for x in whole]
        for given in (views, [x.t().contiguous().t() for x in views]):
            assert_bitwise_equal(everything(kernels, *given, activation, family), expected, str(part))
    negated = torch._neg_view(-gate)
    assert_bitwise_equal(everything(kernels, negated, up, dy, activation, family), whole)


@both_activations
def test_large_gates_saturate(kernels, activation):
    """No NaN where exp overflows: act is 0 far below zero and the gate far above."""
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4]], device=DEVICE)
    ones = torch.ones_like(gate)
    y, dgate, dup = everything(kernels, gate, ones, ones, activation)
    assert_bitwise_equal([y.abs(), dup.abs()], [gate.clamp(min=0)] * 2)
    assert_bitwise_equal(dgate.abs(), (gate > 0).float())


def test_beyond_the_limits_gradients_are_zero(kernels):
    """clamped_silu: of gate above 7, of up beyond -7 and 7; on the limits they are not, as torch has it."""
    gate = torch.tensor([[-20.0, 7.0, 7.5, 1e4, 1.0, 1.0, 1.0, 1.0, math.inf]], device=DEVICE)
    up = torch.tensor([[1.0, 1.0, 1.0, 1.0, -7.0, 7.0, 7.5, -7.5, -math.inf]], device=DEVICE)
    dy = torch.ones_like(gate)
    y, dgate, dup = everything(kernels, gate, up, dy, "clamped_silu")
    theirs = by_torch(gate, up, dy, "clamped_silu")
    torch.testing.assert_close([y, dgate, dup], theirs, rtol=3e-6, atol=1e-12)
    assert (dgate == 0).tolist() == [[False, False, True, True, False, False, False, False, True]]
    assert (dup == 0).tolist() == [[False] * 6 + [True] * 3]
    nans = everything(kernels, torch.full_like(gate, math.nan), torch.full_like(up, math.nan), dy, "clamped_silu")
    assert nans[0].isnan().all()


@every_pair
@every_dtype
def test_written_into_halves_of_one_tensor(kernels, dtype, family, activation):
    gate, up, dy = data(5, 70, dtype)
    expected = everything(kernels, gate, up, dy, activation, family)
    for interleaved in (False, True):
        both = torch.stack([gate, up], dim=-1).flatten(1) if interleaved else torch.cat([gate, up], dim=1)
        pair = halves(both, interleaved=interleaved)
        assert_bitwise_equal([x.contiguous() for x in pair], [gate, up])
        grads = torch.full_like(both, 7.0)
        outs = halves(grads, interleaved=interleaved)
        got = backward(kernels, family, dy, *pair, activation, out=outs)
        assert_bitwise_equal([x.contiguous() for x in got], expected[1:])
        assert_bitwise_equal(everything(kernels, *pair, dy, activation, family), expected)
        assert [x.data_ptr() for x in got] == [x.data_ptr() for x in outs]


@pytest.mark.parametrize("activation", ACTIVATIONS)
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
    assert_bitwise_equal(everything(kernels, gate, up, dy, activation, "torch_gated"), expected)
    if dtype != torch.float32 and activation != "relu":
        with pytest.raises(AssertionError):  # the control: without the rounding between activation and product
            assert_bitwise_equal((FUNCTIONS[activation](gate.float()) * up.float()).to(dtype), expected[0])


@gpu
@every_dtype
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "gelu"])
def test_many_elements_on_a_gpu(activation, dtype):
    tensors = data(2048, 2048, dtype, spread=14)
    expected = by_torch(*tensors, activation)
    for _ in range(2):  # the second time by the table of plans
        assert_bitwise_equal(everything(gated, *tensors, activation, "torch_gated"), expected)


def test_no_rows(kernels):
    x = torch.empty(0, 64, device=DEVICE)
    assert [t.shape for t in everything(kernels, x, x, x, "silu", "torch_gated")] == [(0, 64)] * 3
