"""The products by expert: the bits that each row, or expert, has alone. On a GPU, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpus import gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tp_invariant.kernels.experts import grouped, reference_grouped
from tp_invariant.kernels.gemm import matmul as triton_gemm
from tp_invariant.kernels.gemm import reference as reference_gemm
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = [(grouped, triton_gemm)] + [(reference_grouped, reference_gemm)] * (DEVICE == "cpu")
both_forms = pytest.mark.parametrize("form, gemm", FORMS, ids=("triton", "cpu")[: len(FORMS)])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CONFIGS = (
    MatmulConfig(16, 16, 16, num_warps=2, num_stages=1, group_m=1),
    MatmulConfig(64, 16, 32, num_warps=2, num_stages=3, group_m=2),
    MatmulConfig(32, 32, 128, num_warps=8, num_stages=2, group_m=3),
)
COUNTS = {  # the rows of each expert
    "some": (3, 0, 40, 1, 0, 33),
    "one has all": (0, 0, 35, 0),
    "one expert": (33,),
    "many": tuple(i % 3 for i in range(11)),
}
# every division with one dtype, and every dtype with one division: the dtype matters to loads and stores alone
divisions_and_dtypes = pytest.mark.parametrize(
    "division, dtype", [*(("some", dtype) for dtype in DTYPES), *((name, torch.bfloat16) for name in list(COUNTS)[1:])]
)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: int = 4) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return wide_randn(*shape, generator=generator, spread=spread).to(DEVICE, dtype)


def offsets_of(counts) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)


def slices_of(counts) -> list[slice]:
    return [slice(*ends) for ends in itertools.pairwise((0, *itertools.accumulate(counts)))]


def weights_of(b: Tensor) -> list[Tensor]:
    """b [E, K, N] as it is for dgrad, and in the layout of a model's weight [E, N, K] for forward."""
    return [b, b.mT.contiguous().mT]


@both_forms
@divisions_and_dtypes
def test_rows_have_the_bits_that_they_have_alone(form, gemm, division, dtype):
    counts, k, n = COUNTS[division], 140, 40
    a, b = rand(sum(counts), k, dtype=dtype), rand(len(counts), k, n, dtype=dtype, seed=1)
    bias = rand(len(counts), n, dtype=torch.float32, seed=2)
    for w, out_dtype, added in zip(weights_of(b), (None, torch.float32), (None, bias), strict=True):
        c = form.grouped_matmul(a, w, offsets_of(counts), bias=added, out_dtype=out_dtype)
        assert c.is_contiguous() and c.dtype == (out_dtype or dtype)
        for expert, rows in enumerate(slices_of(counts)):
            one = None if added is None else added[expert]
            options = dict(bias=one, out_dtype=out_dtype)
            if rows.start < rows.stop:
                assert_bitwise_equal(c[rows], gemm.matmul(a[rows], w[expert], **options), f"expert {expert}")
                first = slice(rows.start, rows.start + 1)
                assert_bitwise_equal(c[first], gemm.matmul(a[first], w[expert], **options), f"row of {expert}")
                alone = form.grouped_matmul(a[first], w[expert : expert + 1], offsets_of((1,)), **{
                    **options, "bias": None if added is None else added[expert : expert + 1]
                })  # fmt: skip
                assert_bitwise_equal(c[first], alone, f"row of {expert}, with no other")


@both_forms
@divisions_and_dtypes
def test_experts_have_the_weight_gradient_of_their_rows(form, gemm, division, dtype):
    counts, m, n = COUNTS[division], 40, 33
    a, b = rand(sum(counts), m, dtype=dtype), rand(sum(counts), n, dtype=dtype, seed=1)
    c = form.grouped_outer(a, b, offsets_of(counts))
    wide = form.grouped_outer(a, b, offsets_of(counts), out_dtype=torch.float32)
    assert c.dtype == dtype and c.is_contiguous()
    for expert, rows in enumerate(slices_of(counts)):
        if rows.start == rows.stop:
            assert_bitwise_equal([c[expert], wide[expert]], [torch.zeros_like(c[0]), torch.zeros_like(wide[0])])
        else:
            operands = a[rows].t(), b[rows]
            assert_bitwise_equal(c[expert], gemm.matmul(*operands))
            assert_bitwise_equal(wide[expert], gemm.matmul(*operands, out_dtype=torch.float32))


@both_forms
def test_rows_in_another_order_within_their_expert(form, gemm):
    """A row's bits go with it. The control: a weight gradient is a sum over rows, whose bits change with the order."""
    counts = (20, 0, 30)
    a, b = rand(50, 70), rand(3, 70, 40, seed=1)
    order = torch.cat([torch.arange(20).flip(0), 20 + torch.randperm(30, generator=torch.Generator().manual_seed(0))])
    order = order.to(DEVICE)
    c = form.grouped_matmul(a, b, offsets_of(counts))
    assert_bitwise_equal(form.grouped_matmul(a[order], b, offsets_of(counts)), c[order])
    gradient = form.grouped_outer(a, c, offsets_of(counts))
    assert not torch.equal(form.grouped_outer(a[order], c[order], offsets_of(counts)), gradient)


@both_forms
def test_a_split_sum_has_other_bits(form, gemm):
    """The control: the data show it where K is added in two parts."""
    counts, a, b = (20, 0, 30), rand(50, 256), rand(3, 256, 40, seed=1)
    whole = form.grouped_matmul(a, b, offsets_of(counts))
    parts = [form.grouped_matmul(a[:, k], b[:, k], offsets_of(counts)) for k in (slice(0, 100), slice(100, 256))]
    assert (parts[0] + parts[1] != whole).float().mean() > 0.1
    whole = form.grouped_outer(a, a, offsets_of((50,)))
    halves = form.grouped_outer(a, a, offsets_of((25, 25)))
    assert (halves[0] + halves[1] != whole[0]).float().mean() > 0.1


@both_forms
@every_dtype
def test_against_float64(form, gemm, dtype):
    counts, a, b, dy = (20, 0, 41), rand(61, 300, spread=0), rand(3, 300, 30, seed=1, spread=0), rand(61, 30, seed=2)
    a, b, dy = a.to(dtype), b.to(dtype), dy.to(dtype)
    experts = [(a[rows].double(), b[e].double(), dy[rows].double()) for e, rows in enumerate(slices_of(counts))]
    products = form.grouped_matmul(a, b, offsets_of(counts), out_dtype=torch.float32)
    exact = torch.cat([x @ w for x, w, _ in experts])
    assert (products.double() - exact).norm() / exact.norm() < 300**0.5 * 2.0**-24
    gradient = form.grouped_outer(a, dy, offsets_of(counts), out_dtype=torch.float32)
    exact = torch.stack([x.t() @ d for x, _, d in experts])
    assert (gradient.double() - exact).norm() / exact.norm() < 41**0.5 * 2.0**-24


@both_forms
def test_no_rows_and_no_experts(form, gemm):
    a, b = rand(0, 8), rand(3, 8, 5)
    nothing = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    assert_bitwise_equal(form.grouped_matmul(a, b, nothing), rand(0, 5))
    assert_bitwise_equal(form.grouped_outer(a, a, nothing), torch.zeros(3, 8, 8, device=DEVICE))
    assert_bitwise_equal(form.grouped_matmul(a, b[:0], nothing[:1]), rand(0, 5))
    assert_bitwise_equal(form.grouped_outer(a, a, nothing[:1]), rand(0, 8, 8))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_and_odd_shapes(config):
    """Small integers, whose sums are exact in every order: the interpreter's order follows the tile."""
    for counts, n, k in (((1,), 1, 1), ((17, 0, 70), 65, 17), ((0, 64, 0), 16, 32), ((5,) * 9, 33, 40)):
        a, b, dy = (
            (rand(*shape, spread=0) * 4).round() for shape in ((sum(counts), k), (len(counts), k, n), (sum(counts), n))
        )
        rows = slices_of(counts)
        expected = torch.cat([a[part].double() @ b[expert].double() for expert, part in enumerate(rows)])
        assert_bitwise_equal(grouped.grouped_matmul(a, b, offsets_of(counts), config=config), expected.float() + 0.0)
        expected = torch.stack([a[part].double().t() @ dy[part].double() for part in rows])
        assert_bitwise_equal(grouped.grouped_outer(a, dy, offsets_of(counts), config=config), expected.float() + 0.0)


@settings(deadline=None, max_examples=15)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=9), k=st.integers(1, 40), data=st.data())
def test_random_divisions(counts, k, data):
    """A random row, alone with its expert's weight, has its bits; so has a random expert's weight gradient."""
    a, b = rand(sum(counts), k), rand(len(counts), k, 17, seed=1)
    forms = FORMS if sum(counts) else []
    for form, gemm in forms:
        c = form.grouped_matmul(a, b, offsets_of(counts))
        row = data.draw(st.integers(0, sum(counts) - 1))
        expert = next(e for e, rows in enumerate(slices_of(counts)) if row < rows.stop)
        assert_bitwise_equal(c[row : row + 1], gemm.matmul(a[row : row + 1], b[expert]))
        rows = slices_of(counts)[expert]
        assert_bitwise_equal(
            form.grouped_outer(a, c, offsets_of(counts))[expert], gemm.matmul(a[rows].t(), c[rows]), f"{expert}"
        )


def test_neighbours_in_memory_are_not_read():
    big = torch.full((60, 60), float("nan"), device=DEVICE)
    big[5:25, :40] = 1
    b = torch.full((4, 50, 50), float("nan"), device=DEVICE)
    b[1:3, :40, :30] = 1
    a, b = big[5:25, :40], b[1:3, :40, :30]
    assert grouped.grouped_matmul(a, b, offsets_of((3, 17))).isfinite().all()
    assert grouped.grouped_outer(a, a, offsets_of((3, 17))).isfinite().all()


@both_forms
def test_what_is_refused(form, gemm):
    a, b, offsets = torch.ones(4, 8), torch.ones(2, 8, 3), torch.tensor([0, 1, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"grouped_matmul: b has dtype torch\.float16; allowed: the dtype of a"):
        form.grouped_matmul(a, b.half(), offsets)
    with pytest.raises(TypeError, match=r"grouped_outer: a has dtype torch\.float64; allowed: torch\.bfloat16"):
        form.grouped_outer(a.double(), a.double(), offsets)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


# rows, experts, hidden, inner: Qwen3-30B-A3B's, its decoding, Mixtral's, odd ones
MODELS = ((8192, 128, 2048, 768), (16, 128, 2048, 768), (3000, 8, 4096, 14336), (1000, 7, 1000, 333))


def random_counts(rows: int, experts: int) -> list[int]:
    """Unequal, some of them zero."""
    generator = torch.Generator().manual_seed(rows)
    chances = torch.rand(experts, generator=generator) ** 3
    chosen = torch.multinomial(chances, rows, replacement=True, generator=generator)
    return torch.bincount(chosen, minlength=experts).tolist()


@gpu
@every_dtype
@pytest.mark.parametrize("rows, experts, hidden, inner", MODELS)
def test_models_on_a_gpu(rows, experts, hidden, inner, dtype):
    """Bits of the dense product, which on Hopper is the TMA kernel's, for every expert; in every tile shape; errors."""
    counts = random_counts(rows, experts)
    x, dy = rand(rows, hidden, dtype=dtype), rand(rows, inner, dtype=dtype, seed=1)
    weight, offsets = rand(experts, inner, hidden, dtype=dtype, seed=2), offsets_of(counts)
    y = grouped.grouped_matmul(x, weight.mT, offsets, out_dtype=torch.float32)
    dx = grouped.grouped_matmul(dy, weight, offsets)
    dw = grouped.grouped_outer(dy, x, offsets, out_dtype=torch.float32)
    for expert, part in enumerate(slices_of(counts)):
        if part.start < part.stop:
            w = weight[expert]
            assert_bitwise_equal(y[part], triton_gemm.matmul(x[part], w.t(), out_dtype=torch.float32), f"{expert}")
            assert_bitwise_equal(dx[part], triton_gemm.matmul(dy[part], w), f"{expert}")
            dense = triton_gemm.matmul(dy[part].t(), x[part], out_dtype=torch.float32)
            assert_bitwise_equal(dw[expert], dense, f"{expert}")
    busiest = max(range(experts), key=counts.__getitem__)
    part = slices_of(counts)[busiest]
    for got, a, b in (
        (y[part], x[part], weight[busiest].t()), (dx[part], dy[part], weight[busiest]),
        (dw[busiest], dy[part].t(), x[part]),
    ):  # fmt: skip
        exact = a.double() @ b.double()
        own = (torch.matmul(a, b).double() - exact).norm()
        assert (got.double() - exact).norm() <= 1.1 * own + 2.0**-16 * exact.norm()
    for config in (*CONFIGS, MatmulConfig(64, 128, 64, 4, 3), MatmulConfig(128, 128, 64, 8, 3)):
        if dtype != torch.float32 or config in CONFIGS:
            assert_bitwise_equal(
                grouped.grouped_matmul(x, weight.mT, offsets, out_dtype=torch.float32, config=config), y, f"{config}"
            )
            assert_bitwise_equal(
                grouped.grouped_outer(dy, x, offsets, out_dtype=torch.float32, config=config), dw, f"{config}"
            )


@gpu
def test_the_host_does_not_wait():
    counts = random_counts(500, 16)
    x, w, offsets = rand(500, 256), rand(16, 256, 128), offsets_of(counts)
    dy = grouped.grouped_matmul(x, w, offsets)
    grouped.grouped_outer(x, dy, offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped.grouped_matmul(x, w, offsets)
        grouped.grouped_outer(x, dy, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
