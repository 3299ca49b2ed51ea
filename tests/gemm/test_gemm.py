"""The function that all GEMMs go through: which gemm_fn applies, which arguments it gets, and when none is called."""

import re

import pytest
import torch

import tp_invariant as tpi
from tp_invariant.core.layout import shard
from tp_invariant.gemm.gemm_fn import (
    RankMajor,
    bundled,
    bundled_gemm_fn,
    column_sums,
    gemm,
    gemm_rank_major,
    resolve_gemm_fn,
)
from tp_invariant.kernels.gemm import reference
from tp_invariant.testing import assert_bitwise_equal

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def no_default():
    tpi.set_default_gemm_fn(None)
    yield
    tpi.set_default_gemm_fn(None)


def constant(value):
    """A gemm_fn that fills c with `value`, to show which one was called."""

    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        return torch.full((a.shape[0], b.shape[1]), value, dtype=out_dtype or a.dtype)

    return gemm_fn


def refuse(a, b, *, bias=None, out_dtype=None):
    raise AssertionError("no gemm_fn was to be called")


def operands(m, k, n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(m + k + n)
    a, b, bias = (torch.randn(shape, generator=generator) for shape in ((m, k), (k, n), (n,)))
    return a.to(dtype), b.to(dtype), bias.to(dtype)


# --- precedence -----------------------------------------------------------------------------------------------------


def test_the_bundled_one_is_the_reference_on_a_cpu():
    assert bundled_gemm_fn(CPU) is reference.matmul
    assert resolve_gemm_fn(None, CPU) is reference.matmul
    a, b, bias = operands(3, 40, 5)
    assert_bitwise_equal(gemm(None, a, b, bias=bias), reference.matmul(a, b, bias=bias))


def test_argument_then_default_then_bundled():
    a, b, _ = operands(2, 3, 4)
    argument, default = constant(1.0), constant(2.0)
    tpi.set_default_gemm_fn(default)
    assert gemm(argument, a, b).unique().tolist() == [1.0]
    assert gemm(None, a, b).unique().tolist() == [2.0]
    tpi.set_default_gemm_fn(None)
    assert_bitwise_equal(gemm(None, a, b), reference.matmul(a, b))


def test_a_layer_follows_the_precedence():
    layer = tpi.Linear(4, 6, bias=False)
    own = tpi.Linear(4, 6, bias=False, gemm_fn=constant(1.0))
    x = torch.ones(3, 4)
    with tpi.set_tp_invariant_mode(True):
        tpi.set_default_gemm_fn(constant(2.0))
        assert layer(x).unique().tolist() == [2.0]
        assert own(x).unique().tolist() == [1.0]


class FalseButCallable:
    """A gemm_fn whose truth value is False, as for an object with __len__."""

    def __bool__(self):
        return False

    def __call__(self, a, b, *, bias=None, out_dtype=None):
        return torch.full((a.shape[0], b.shape[1]), 3.0, dtype=out_dtype or a.dtype)


def test_a_gemm_fn_is_not_dropped_for_its_truth_value():
    a, b, _ = operands(2, 3, 4)
    assert gemm(FalseButCallable(), a, b).unique().tolist() == [3.0]
    tpi.set_default_gemm_fn(FalseButCallable())
    assert gemm(None, a, b).unique().tolist() == [3.0]


@pytest.mark.parametrize("wrong", ["matmul", 3, torch.zeros(1)])
def test_default_must_be_callable(wrong):
    tpi.set_default_gemm_fn(constant(2.0))
    text = f"gemm_fn={wrong!r} is not callable: pass gemm_fn(a, b, *, bias=None, out_dtype=None) or None"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        tpi.set_default_gemm_fn(wrong)
    a, b, _ = operands(2, 3, 4)
    assert gemm(None, a, b).unique().tolist() == [2.0], "a refused call must change nothing"


def test_a_device_without_a_bundled_gemm_fn():
    text = "no gemm_fn is bundled for device 'meta', only for cuda and cpu: pass gemm_fn= or set_default_gemm_fn"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(text)}$"):
        gemm(None, torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta"))


# --- the contract of an injected one --------------------------------------------------------------------------------


def transposing(a, b, *, bias=None, out_dtype=None):
    return (a @ b).t()


def widening(a, b, *, bias=None, out_dtype=None):
    return (a @ b).double()


def elsewhere(a, b, *, bias=None, out_dtype=None):
    return torch.empty(a.shape[0], b.shape[1], device="meta")


@pytest.mark.parametrize(
    ("gemm_fn", "returned"),
    [
        (transposing, "(4, 2) torch.float32 on cpu"),
        (widening, "(2, 4) torch.float64 on cpu"),
        (elsewhere, "(2, 4) torch.float32 on meta"),
    ],
)
def test_a_gemm_fn_that_returns_something_else(gemm_fn, returned):
    a, b, _ = operands(2, 3, 4)
    text = (
        f"gemm_fn {gemm_fn.__name__!r} returned {returned}; for a (2, 3) and b (3, 4) it must return (2, 4) "
        "torch.float32 on cpu"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        gemm(gemm_fn, a, b)


def test_a_gemm_fn_that_ignores_out_dtype():
    a, b, _ = operands(2, 3, 4, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"returned \(2, 4\) torch.bfloat16 .* must return \(2, 4\) torch.float32"):
        gemm(lambda a, b, *, bias=None, out_dtype=None: a @ b, a, b, out_dtype=torch.float32)


def test_arguments_of_a_gemm_fn():
    calls = []

    def spy(a, b, *, bias=None, out_dtype=None):
        calls.append((a, b, bias, out_dtype))
        return reference.matmul(a, b, bias=bias, out_dtype=out_dtype)

    a, b, bias = operands(2, 3, 4, torch.bfloat16)
    gemm(spy, a, b, bias=bias)
    gemm(spy, a, b, out_dtype=torch.float32)
    assert calls[0][0] is a
    assert calls[0][1] is b
    assert calls[0][2] is bias
    assert [call[3] for call in calls] == [torch.bfloat16, torch.float32]
    assert calls[1][2] is None


# --- empty operands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (2, 3, 0), (0, 0, 0), (0, 3, 0), (2, 0, 0)])
def test_no_rows_or_no_columns(dtype, m, k, n):
    a, b, bias = operands(m, k, n, dtype)
    for options in ({}, {"bias": bias}, {"out_dtype": torch.float32}):
        expected = torch.empty(m, n, dtype=options.get("out_dtype", dtype))
        assert_bitwise_equal(gemm(refuse, a, b, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_an_empty_sum_is_zero_or_the_bias(dtype, out_dtype):
    a, b, bias = operands(2, 0, 4, dtype)
    wanted = out_dtype or dtype
    assert_bitwise_equal(gemm(refuse, a, b, out_dtype=out_dtype), torch.zeros(2, 4, dtype=wanted))
    expected = bias.to(wanted).expand(2, 4)
    assert_bitwise_equal(gemm(refuse, a, b, bias=bias, out_dtype=out_dtype), expected)


EMPTY, B = torch.empty(0, 7), torch.empty(8, 5)


@pytest.mark.parametrize(
    ("error", "text", "a", "b", "options"),
    [
        (ValueError, "b has shape (8, 5); allowed: [K, N] with the K of a", EMPTY, B, {}),
        (ValueError, "b has shape (8, 5); allowed: [K, N] with the K of a", torch.empty(3, 0), B, {}),
        (ValueError, "b has shape (0, 5); allowed: [K, N] with the K of a", torch.empty(3, 7), B[:0], {}),
        (TypeError, "b has dtype torch.float16; allowed: the dtype of a, torch.float32", EMPTY, B[:7].half(), {}),
        (TypeError, "a has dtype torch.float64; allowed: torch.bfloat16", EMPTY.double(), B[:7].double(), {}),
        (TypeError, "out_dtype is torch.int32; allowed: ", EMPTY, B[:7], {"out_dtype": torch.int32}),
        (ValueError, "bias has shape (1,); allowed: [N], here (5,)", torch.empty(3, 0), B[:0], {"bias": torch.ones(1)}),
        (TypeError, "bias has dtype torch.float64; allowed", EMPTY, B[:7], {"bias": torch.ones(5).double()}),
        (ValueError, "b is on meta; allowed: the device of a, cpu", EMPTY, B[:7].to("meta"), {}),
    ],
)
def test_empty_operands_are_checked(error, text, a, b, options):
    """As the bundled kernels check other operands; an injected gemm_fn has its own rules."""
    for gemm_fn in (None, reference.matmul, bundled()):
        with pytest.raises(error, match=re.escape(text)):
            gemm(gemm_fn, a, b, **options)
    if a.dtype == torch.float64:
        assert gemm(refuse, a, b, **options).shape == (0, 5)


@pytest.mark.parametrize("gemm_fn", [None, refuse])
@pytest.mark.parametrize("a", [torch.ones(2, 3, 4), torch.ones(0, 3, 4), torch.ones(4)], ids=lambda a: str(a.dim()))
def test_operands_that_are_not_matrices(gemm_fn, a):
    with pytest.raises(ValueError, match=re.escape(f"a and b must be matrices; a has shape {tuple(a.shape)}")):
        gemm(gemm_fn, a, torch.ones(4, 5))
    with pytest.raises(ValueError, match=re.escape(f"and b {tuple(a.shape)}")):
        gemm(gemm_fn, torch.ones(5, 4), a)


def test_empty_operands_without_data():
    """Without a bundled kernel there is nothing to check and nothing to compute."""
    assert gemm(None, EMPTY.to("meta"), B[:7].to("meta")).shape == (0, 5)


# --- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gemm_fn", [None, lambda a, b, *, bias=None, out_dtype=None: torch.mm(a, b)])
def test_autocast_changes_nothing(gemm_fn):
    a, b, _ = operands(8, 64, 8)
    expected = gemm(gemm_fn, a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(a, b).dtype == torch.bfloat16, "autocast was to be active here"
        assert_bitwise_equal(gemm(gemm_fn, a, b), expected)
        assert_bitwise_equal(column_sums(gemm_fn, a), column_sums(gemm_fn, a.clone()))
        assert torch.is_autocast_enabled("cpu")


# --- sums over rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 3), (128, 4), (300, 7)])
def test_column_sums_add_in_blocks_of_the_reference(dtype, rows, cols):
    x, _, _ = operands(rows, cols, 1, dtype)
    x = x * torch.exp2(torch.arange(rows) % 9 - 4.0).unsqueeze(1).to(dtype)
    total = None
    for block in x.float().split(reference.K_BLOCK):
        part = torch.zeros(cols)
        for row in block:
            part = part + row  # 1.0 * row is exact, so a fused multiply-add is an addition
        total = part if total is None else total + part
    assert_bitwise_equal(column_sums(None, x), total.to(dtype))
    assert_bitwise_equal(column_sums(None, x, out_dtype=torch.float32), total)
    for col in range(cols):
        assert_bitwise_equal(column_sums(None, x[:, col : col + 1]), total[col : col + 1].to(dtype))


def test_column_sums_go_through_the_gemm_fn():
    seen = []

    def spy(a, b, *, bias=None, out_dtype=None):
        seen.append((tuple(a.shape), a.unique().tolist(), b))
        return reference.matmul(a, b, bias=bias, out_dtype=out_dtype)

    x, _, _ = operands(6, 4, 1)
    column_sums(spy, x)
    assert seen[0][:2] == ((1, 6), [1.0])
    assert seen[0][2] is x


def test_column_sums_of_no_rows():
    assert_bitwise_equal(column_sums(refuse, torch.empty(0, 3, dtype=torch.bfloat16)), torch.zeros(3).bfloat16())


# --- rank-major operands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("k_dim", [0, 1])
def test_rank_major_matrix(world, stride, k_dim):
    k, other = 2 * stride * world, 5
    full = torch.arange(float(k * other)).view((k, other) if k_dim == 0 else (other, k))
    buffer = torch.stack([shard(full, dim=k_dim, rank=rank, world=world, stride=stride) for rank in range(world)])
    assert_bitwise_equal(RankMajor(buffer, k_dim, stride).matrix(), full)


def test_rank_major_matrix_by_hand():
    # two ranks, two stacked parts each: rank 0 holds k = 0, 2 and rank 1 holds k = 1, 3
    buffer = torch.tensor([[[0.0, 2.0]], [[1.0, 3.0]]])
    assert RankMajor(buffer, 1, 2).matrix().tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert RankMajor(buffer, 1, 1).matrix().tolist() == [[0.0, 2.0, 1.0, 3.0]]
    assert RankMajor(buffer.mT, 0, 2).matrix().tolist() == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("k_dim", [0, 1])
def test_rank_major_product(stride, k_dim):
    world, k = 3, 48
    a, b, bias = operands(4, k, 5)
    b_stored = b if k_dim == 0 else b.t()
    a_major = torch.stack([shard(a, dim=1, rank=rank, world=world, stride=stride) for rank in range(world)])
    b_major = torch.stack([shard(b_stored, dim=k_dim, rank=rank, world=world, stride=stride) for rank in range(world)])
    got = gemm_rank_major(None, RankMajor(a_major, 1, stride), RankMajor(b_major, k_dim, stride), bias=bias)
    assert_bitwise_equal(got, gemm(None, a, b, bias=bias))
