"""The Triton matmul: right, and slice-invariant. Compiled on a GPU, else in Triton's interpreter. Tests of what the
CPU's matmul shares run on both.

The interpreter tests the logic (masks, offsets, order of blocks), not the bits of a tensor core: its tl.dot is one BLAS
call per block of K. So the tests use data whose sums are exact in any order if block_k differs.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from gpus import gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tp_invariant.kernels import launch
from tp_invariant.kernels.gemm import reference
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig
from tp_invariant.kernels.launch import interpreting
from tp_invariant.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONFIGS = (
    MatmulConfig(16, 16, 16, num_warps=2, num_stages=1, group_m=1),
    MatmulConfig(16, 64, 32, num_warps=4, num_stages=2),
    MatmulConfig(64, 16, 32, num_warps=2, num_stages=3, group_m=2),
    MatmulConfig(64, 64, 64, num_warps=4, num_stages=3),
    MatmulConfig(32, 32, 128, num_warps=8, num_stages=2, group_m=3),
)
ODD_SHAPES = ((1, 1, 1), (1, 65, 17), (3, 5, 128), (17, 1, 40), (33, 70, 64), (65, 17, 300), (70, 130, 15))


# on a CPU also the forms in plain torch, which have the same contract
ALL = [matmul] if DEVICE == "cuda" else [matmul, reference.matmul, reference.chained_matmul]
every_matmul = pytest.mark.parametrize("fn", ALL, ids=("triton", "cpu", "chained")[: len(ALL)])


def rand(*shape: int, dtype: torch.dtype, seed: int = 0, wide: bool = False) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(*shape, device=DEVICE, generator=generator)
    if wide:
        x = x * torch.exp2(torch.randint(-9, 4, shape, device=DEVICE, generator=generator).float())
    return x.to(dtype)


def exact_operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Small integers times a power of two per row of A and per column of B: every sum is exact, in every order."""
    generator = torch.Generator().manual_seed(m + n + k)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-7, 8, shape, generator=generator).float()

    a = integers(m, k) * torch.exp2(torch.randint(-3, 4, (m, 1), generator=generator).float())
    b = integers(k, n) * torch.exp2(torch.randint(-3, 4, (1, n), generator=generator).float())
    return a.to(DEVICE, dtype), b.to(DEVICE, dtype)


def relative_error(c: Tensor, exact: Tensor) -> float:
    return ((c.double() - exact).norm() / exact.norm()).item()


def error_limit(a: Tensor, b: Tensor, exact: Tensor) -> float:
    """1.1 times torch.mm's own norm-wise relative error. In fp32, where torch may split K and so round less often than
    one accumulator, twice its error or sqrt(K) * 2**-24, the random walk of an accumulator (TF32 errs by 2**-11)."""
    torch_error = relative_error(torch.mm(a, b), exact)
    return max(2 * torch_error, a.shape[1] ** 0.5 * 2.0**-24) if a.dtype == torch.float32 else 1.1 * torch_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", ((65, 130, 300), (17, 40, 1000), (128, 64, 64)))
def test_error_is_no_worse_than_torch(m, n, k, dtype):
    a, b = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1).t()
    exact = a.double() @ b.double()
    assert relative_error(matmul(a, b), exact) <= error_limit(a, b, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", ODD_SHAPES)
def test_exact_at_odd_sizes(m, n, k, dtype):
    a, b = exact_operands(m, n, k, dtype)
    c = matmul(a, b, out_dtype=torch.float32)
    assert c.shape == (m, n) and c.is_contiguous()
    assert torch.equal(c.double(), a.double() @ b.double())


@every_matmul
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_output_is_rounded_once(fn, dtype, out_dtype):
    """The fp32 output is within the bound of a one-accumulator sum; others are that output, rounded by torch."""
    a, b = rand(33, 300, dtype=dtype), rand(300, 40, dtype=dtype, seed=1)
    c32 = fn(a, b, out_dtype=torch.float32)
    bound = 300 * 2.0**-23 * (a.double().abs() @ b.double().abs())
    assert ((c32.double() - a.double() @ b.double()).abs() <= bound).all()
    assert_bitwise_equal(fn(a, b, out_dtype=out_dtype), c32.to(out_dtype))
    assert fn(a, b).dtype == dtype


@every_matmul
@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_in_fp32_before_the_rounding(fn, dtype, bias_dtype):
    for k in (1, 40):
        a, b = rand(33, k, dtype=dtype), rand(k, 70, dtype=dtype, seed=1)
        bias = rand(140, dtype=bias_dtype, seed=2)[::2]  # strided
        expected = fn(a, b, out_dtype=torch.float32) + bias.float()
        assert_bitwise_equal(fn(a, b, bias=bias), expected.to(dtype), f"k={k}")
        assert_bitwise_equal(fn(a, b, bias=-torch.zeros(70, device=DEVICE)), fn(a, b), f"k={k}")


@every_matmul
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_survive(fn, dtype):
    """Subnormals, infinities, the largest numbers and signed zeros reach the product unchanged."""
    info = torch.finfo(dtype)
    values = torch.tensor([info.smallest_normal / 2, -info.smallest_normal, info.max, -info.max, float("inf")])
    c = fn(values.to(DEVICE, dtype)[:, None], torch.ones(1, 3, device=DEVICE, dtype=dtype))
    assert torch.equal(c, values.to(DEVICE, dtype)[:, None].expand(5, 3))


@every_matmul
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(fn, dtype):
    m, n, k = 33, 40, 70
    a, b = rand(m, k, dtype=dtype), rand(k, n, dtype=dtype, seed=1)
    expected = fn(a, b)

    def sliced(x: Tensor) -> Tensor:
        big = torch.full((x.shape[0] * 2 + 1, x.shape[1] * 3 + 1), float("nan"), device=DEVICE, dtype=dtype)
        big[1::2, 1::3] = x
        return big[1::2, 1::3]

    layouts = {"contiguous": lambda x: x, "transposed": lambda x: x.t().contiguous().t(), "sliced": sliced}
    for a_layout, b_layout in itertools.product(layouts, layouts):
        c = fn(layouts[a_layout](a), layouts[b_layout](b))
        assert_bitwise_equal(c, expected, f"{a_layout}, {b_layout}")
    for dim in (0, 1):
        row, col = a.narrow(dim, 2, 1).expand_as(a), b.narrow(dim, 2, 1).expand_as(b)
        assert_bitwise_equal(fn(row, col), fn(row.contiguous(), col.contiguous()), f"expanded {dim}")


def test_views_negated_by_a_flag_are_negated():
    """z.conj().imag is such a view, also in another dtype; kernels see its bytes, which are those of z.imag."""
    a, b, bias = (rand(*shape, dtype=torch.float32, seed=3) for shape in ((33, 40), (40, 20), (20,)))
    for dtype in DTYPES:
        negated = [torch._neg_view(-x.to(dtype)) for x in (a, b, bias)]
        expected = matmul(a.to(dtype), b.to(dtype), bias=bias.to(dtype))
        assert_bitwise_equal(matmul(*negated[:2], bias=negated[2]), expected, f"{dtype}")
    out = torch._neg_view(torch.zeros(33, 20, device=DEVICE))
    with pytest.raises(ValueError, match=r"out is a view that torch negates"):
        matmul(a, b, out=out)


@pytest.mark.parametrize("k", (40, 64))
def test_neighbours_in_memory_are_not_read(k):
    m, n = 17, 19
    a_big = torch.full((m + 50, k + 50), float("nan"), device=DEVICE)
    b_big = torch.full((k + 50, n + 50), float("nan"), device=DEVICE)
    a_big[:m, :k], b_big[:k, :n] = 1, 2
    for config in (None, *CONFIGS[1:]):
        assert matmul(a_big[:m, :k], b_big[:k, :n], config=config).isfinite().all()


@every_matmul
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row_and_column(fn, bad, dtype):
    a, b = rand(20, 40, dtype=dtype), rand(40, 70, dtype=dtype, seed=1)
    clean = fn(a, b)
    a[3, 39] = bad
    b[0, 66] = bad
    c = fn(a, b)
    assert not c[3].isfinite().any() and not c[:, 66].isfinite().any()
    touched = torch.zeros(20, 70, dtype=torch.bool, device=DEVICE)
    touched[3], touched[:, 66] = True, True
    assert_bitwise_equal(c.masked_fill(touched, 0), clean.masked_fill(touched, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (17, 128))
def test_slices_have_the_bits_of_the_whole(k, dtype):
    m, n = 70, 75
    a, b = rand(m, k, dtype=dtype, wide=True), rand(n, k, dtype=dtype, seed=1, wide=True).t()
    bias = rand(n, dtype=torch.float32, seed=2)
    whole = matmul(a, b, bias=bias, out_dtype=torch.float32)
    for rows in (slice(0, 1), slice(69, 70), slice(1, 18), slice(3, 68), slice(0, None, 3)):
        assert_bitwise_equal(matmul(a[rows], b, bias=bias, out_dtype=torch.float32), whole[rows], f"{rows}")
    for cols in (slice(0, 1), slice(74, 75), slice(5, 22), slice(2, 67), slice(0, None, 4)):
        assert_bitwise_equal(matmul(a, b[:, cols], bias=bias[cols], out_dtype=torch.float32), whole[:, cols], f"{cols}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (1, 15, 16, 17, 40, 128, 300))
def test_config_changes_no_bit(k, dtype):
    a, b = exact_operands(33, 20, k, dtype)
    for config in CONFIGS:
        c = matmul(a, b, out_dtype=torch.float32, config=config)
        assert torch.equal(c.double(), a.double() @ b.double()), config

    a, b = rand(33, k, dtype=dtype, wide=True), rand(k, 20, dtype=dtype, seed=1, wide=True)
    first: dict[int, Tensor] = {}
    for config in CONFIGS:
        c = matmul(a, b, out_dtype=torch.float32, config=config)
        # See the top of this file: in the interpreter only configurations of one block_k are comparable.
        expected = first.setdefault(config.block_k if interpreting() else 0, c)
        assert_bitwise_equal(c, expected, f"{config}")


@pytest.mark.parametrize("k", (1, 16, 40, 64, 128))
def test_no_config_makes_a_negative_zero(k):
    """Products that underflow from below: -0.0 must not depend on how many zeros pad K."""
    a = torch.full((17, k), -1e-30, device=DEVICE)
    b = torch.full((k, 16), 1e-30, device=DEVICE)
    for config in CONFIGS:
        assert_bitwise_equal(matmul(a, b, config=config), torch.zeros(17, 16, device=DEVICE), f"{config}")


@pytest.mark.parametrize("field, value", (("block_m", 8), ("block_k", 48), ("num_warps", 3), ("num_stages", 0)))
def test_bad_config(field, value):
    good = dict(block_m=16, block_n=16, block_k=16, num_warps=1, num_stages=1)
    with pytest.raises(ValueError, match=f"MatmulConfig: {field} is {value}; allowed: "):
        MatmulConfig(**{**good, field: value})


A, B = torch.ones(4, 8), torch.ones(8, 3)
DTYPE_NAMES = "torch.bfloat16, torch.float16, torch.float32"


@pytest.mark.parametrize(
    "error, message, args, kwargs",
    (
        (TypeError, "a is a list; allowed: a torch.Tensor", ([1], B), {}),
        (TypeError, f"a has dtype torch.int32; allowed: {DTYPE_NAMES}", (A.int(), B), {}),
        (TypeError, f"b has dtype torch.float64; allowed: {DTYPE_NAMES}", (A, B.double()), {}),
        (TypeError, "b has dtype torch.float16; allowed: the dtype of a, torch.float32", (A, B.half()), {}),
        (TypeError, f"bias has dtype torch.int64; allowed: {DTYPE_NAMES}", (A, B), {"bias": torch.arange(3)}),
        (TypeError, f"out_dtype is torch.float64; allowed: {DTYPE_NAMES}", (A, B), {"out_dtype": torch.float64}),
        (ValueError, "a has shape (4,); allowed: two dimensions, [M, K]", (A[:, 0], B), {}),
        (ValueError, "b has shape (1, 8, 3); allowed: two dimensions, [K, N]", (A, B[None]), {}),
        (ValueError, "b has shape (7, 3); allowed: [K, N] with the K of a, whose shape is (4, 8)", (A, B[1:]), {}),
        (ValueError, "a has shape (0, 8); allowed: every dimension at least 1", (A[:0], B), {}),
        (ValueError, "b has shape (8, 0); allowed: every dimension at least 1", (A, B[:, :0]), {}),
        (ValueError, "a has shape (4, 0); allowed: every dimension at least 1", (A[:, :0], B[:0]), {}),
        (ValueError, "bias has shape (4,); allowed: [N], here (3,)", (A, B), {"bias": torch.ones(4)}),
        (ValueError, "bias has shape (1, 3); allowed: [N], here (3,)", (A, B), {"bias": torch.ones(1, 3)}),
        (ValueError, "b is on meta; allowed: the device of a, cpu", (A, B.to("meta")), {}),
    ),
)
@every_matmul
def test_errors(fn, error, message, args, kwargs):
    with pytest.raises(error, match=re.escape("matmul: " + message)):
        fn(*args, **kwargs)


def test_cpu_tensors_are_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(launch, "_INTERPRETED", False)
    with pytest.raises(ValueError, match=r"needs CUDA tensors, got device cpu; allowed: .*kernels\.gemm\.reference"):
        matmul(A, B)


def layer_layouts(tokens: int, k: int, n: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    x, w, dy = rand(tokens, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1), rand(tokens, n, dtype=dtype, seed=2)
    return {"forward": (x, w.t()), "dgrad": (dy, w), "wgrad": (dy.t(), x)}


@gpu
@pytest.mark.parametrize("layout", ("forward", "dgrad", "wgrad"))
def test_large(layout):
    a, b = layer_layouts(8192, 4096, 4096, torch.bfloat16)[layout]
    c = matmul(a, b)
    exact = a.double() @ b.double()
    assert relative_error(c, exact) <= error_limit(a, b, exact)
    for block_m, block_n, block_k, num_warps, num_stages, group_m in (
        (128, 256, 64, 8, 3, 8), (256, 128, 64, 8, 3, 4), (128, 128, 64, 4, 4, 8), (128, 128, 128, 8, 2, 1),
        (64, 128, 32, 4, 4, 8), (64, 64, 64, 4, 3, 16), (32, 64, 128, 4, 3, 8), (16, 256, 16, 2, 2, 8),
    ):  # fmt: skip
        config = MatmulConfig(block_m, block_n, block_k, num_warps, num_stages, group_m)
        assert_bitwise_equal(matmul(a, b, config=config), c, f"{config}")
    for parts in (3, 8):
        for rows, expected in zip(a.tensor_split(parts), c.tensor_split(parts), strict=True):
            assert_bitwise_equal(matmul(rows, b), expected, f"rows of {parts}")
        for cols, expected in zip(b.tensor_split(parts, 1), c.tensor_split(parts, 1), strict=True):
            assert_bitwise_equal(matmul(a, cols), expected, f"columns of {parts}")
    for count in (1, 16, 64, 100):
        assert_bitwise_equal(matmul(a[:count], b), c[:count], f"{count} rows")


@gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_large_other_dtypes(dtype):
    for name, (a, b) in layer_layouts(1031, 2048, 1536, dtype).items():
        c, exact = matmul(a, b), a.double() @ b.double()
        assert relative_error(c, exact) <= error_limit(a, b, exact), name
        for count in (1, 100, 1000):
            assert_bitwise_equal(matmul(a[-count:], b), c[-count:], f"{name} {count}")
            assert_bitwise_equal(matmul(a, b[:, -count:]), c[:, -count:], f"{name} {count}")


@gpu
def test_more_than_two_to_the_31_elements():
    a, b = torch.zeros(262147, 8200, device=DEVICE, dtype=torch.bfloat16), rand(8200, 16, dtype=torch.bfloat16)
    a[-5:] = rand(5, 8200, dtype=torch.bfloat16, seed=1)
    expected = matmul(a[-5:].clone(), b)
    assert expected.float().abs().sum() > 0
    assert_bitwise_equal(matmul(a, b)[-5:], expected)
    tall = a.view(8200, 262147)  # K is the outer dimension of a transposed operand
    tall[:, -5:] = rand(8200, 5, dtype=torch.bfloat16, seed=2)
    assert_bitwise_equal(matmul(tall.t(), b)[-5:], matmul(tall[:, -5:].t().contiguous(), b))


def test_a_tensor_without_memory_is_refused():
    with FakeTensorMode():
        a = torch.empty(16, 16, device=DEVICE)
        with pytest.raises(ValueError, match=r"^matmul: a FakeTensor \(16, 16\) has no memory for a kernel to read"):
            matmul(a, a)
