"""The norms, Triton's and the CPU's: right, and the bits of a row or column do not depend on the others.

Triton's are compiled on a GPU, else run in Triton's interpreter. The interpreter tests the logic; the order of a row's
tree of additions exists on a GPU only.
"""

from __future__ import annotations

import functools
import itertools
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from gpus import gpu
from torch import Tensor

from tp_invariant.comm.collectives import Group
from tp_invariant.core.layout import TokenSharding
from tp_invariant.functional import norm as functional_norm
from tp_invariant.kernels.rowwise import norm, reference_norm
from tp_invariant.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 0.25  # large, so that its place in the formula shows, and that dx does not cancel to nothing at H = 1
KERNELS = [norm] if DEVICE == "cuda" else [norm, reference_norm]
both_norms = pytest.mark.parametrize("rms", (False, True), ids=("layernorm", "rmsnorm"))


@pytest.fixture(params=KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
def norms(request) -> ModuleType:
    return request.param


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, wide: bool = False) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(*shape, device=DEVICE, generator=generator)
    if wide:
        x = x * torch.exp2(torch.randint(-6, 4, shape, device=DEVICE, generator=generator).float())
    return x.to(dtype)


def case(t: int, h: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, dy."""
    x = rand(t, h, dtype=torch.float32) * 2 + 0.5
    return x.to(dtype), rand(h, seed=1, dtype=dtype), rand(h, seed=2, dtype=dtype), rand(t, h, seed=3, dtype=dtype)


def everything(
    norms: ModuleType, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, rms: bool, zero_centered: bool = False
) -> dict:
    y, mean, rstd = norms.norm_forward(x, w, b, eps=EPS, rms=rms, zero_centered=zero_centered)
    options = dict(rows_per_sum=4, rms=rms, zero_centered=zero_centered, with_bias=b is not None)
    dx, sums = norms.norm_backward(dy, x, w, mean, rstd, **options)
    dw, db = norms.fold_weight_gradients(sums, torch.float32, None if b is None else torch.float32)
    return {"y": y, "mean": mean, "rstd": rstd, "dx": dx, "dw": dw, "db": db}


def partial_sums(norms: ModuleType, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The weight's and the bias's, each contiguous."""
    sums = norms.norm_weight_partial_sums(*args, **options)
    return tuple(part.contiguous() for part in sums.chunk(2, dim=1)) if options["with_bias"] else (sums, None)


def with_autograd(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, rms: bool, zero_centered: bool, dtype) -> dict:
    """The same by torch's own operations and autograd in `dtype`."""
    x, w, b, dy = (None if z is None else z.to(dtype, copy=True).requires_grad_() for z in (x, w, b, dy))
    mean = None if rms else x.mean(1)
    centered = x if rms else x - mean[:, None]
    rstd = torch.rsqrt(centered.square().mean(1) + EPS)
    y = centered * rstd[:, None] * (w + 1 if zero_centered else w)
    y = y if b is None else y + b
    y.backward(dy.detach())
    return {"y": y, "mean": mean, "rstd": rstd, "dx": x.grad, "dw": w.grad, "db": None if b is None else b.grad}


def check_close(norms: ModuleType, *args: Any) -> None:
    """Norm-wise: at most one rounding to the output's dtype, plus twice torch's own fp32 error, plus two fp32 units
    (torch may be exact by chance, for example in a single row's rstd)."""
    actual, dtype = everything(norms, *args), args[0].dtype
    exact, torch32 = (with_autograd(*args, precision) for precision in (torch.float64, torch.float32))
    for name, expected in exact.items():
        if expected is None:
            assert actual[name] is None, name
            continue
        rounding = torch.finfo(dtype if name in ("y", "dx") else torch.float32).eps / 2 + 2 * 2.0**-23
        error, torch_error = ((z[name].double() - expected).norm() for z in (actual, torch32))
        assert error <= rounding * expected.norm() + 2 * torch_error, f"{name}: {error} of {expected.norm()}"


@both_norms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t, h", ((1, 1), (4, 7), (2, 300), (1, 1000), (1, 5000)))
def test_against_float64(norms, t, h, dtype, rms):
    x, w, b, dy = case(t, h, dtype)
    for zero_centered, bias in zip((False, True), (None, b) if t == 1 else (b, None), strict=True):
        args = (x, w, bias, dy, rms, zero_centered)
        check_close(norms, *args)


@both_norms
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_rounded_once(norms, dtype, rms):
    """Whatever the dtypes of the inputs, an output in another dtype is the fp32 output, rounded by torch."""
    x, w, b, _ = case(4, 40, dtype)
    forward = functools.partial(norms.norm_forward, x, w.float(), b.bfloat16(), eps=EPS, rms=rms, zero_centered=True)
    y32, mean, rstd = forward(out_dtype=torch.float32)
    assert rstd.dtype == torch.float32 and (mean is None if rms else mean.dtype == torch.float32)
    for out_dtype in DTYPES:
        assert_bitwise_equal(forward(out_dtype=out_dtype)[0], y32.to(out_dtype))
    assert forward()[0].dtype == dtype


def test_variance_is_of_the_centered_row(norms):
    """mean(x**2) - mean(x)**2 would lose everything here: mean 2**12, deviations of 1."""
    x = torch.tensor([[1.0, -1.0] * 32], device=DEVICE) + 2.0**12
    _, mean, rstd = norms.norm_forward(x, x[0], None, eps=0.0, rms=False, zero_centered=False)
    assert mean.item() == 2.0**12 and rstd.item() == 1.0


@both_norms
def test_rows_longer_than_a_chunk(norms, rms):
    x, w, b, dy = case(1, 17001)
    args = (x, w, b, dy, rms, False)
    check_close(norms, *args)


def check_rows_alone(
    norms: ModuleType, t: int, h: int, dtype: torch.dtype, rms: bool, slices: tuple[slice, ...]
) -> None:
    x, w, b, dy = case(t, h, dtype)
    whole = everything(norms, x, w, b, dy, rms)
    padded = torch.full((t, h + 3), float("nan"), device=DEVICE, dtype=dtype)
    padded[:, 1:-2] = x  # every row at another alignment, neighbours that would be seen
    transposed = dy.t().contiguous().t()
    views = {"strided": (padded[:, 1:-2], dy), "transposed": (x, transposed), "as is": (x, dy)}
    for rows, (name, (x_view, dy_view)) in itertools.product(slices, views.items()):
        part = everything(norms, x_view[rows], w, b, dy_view[rows], rms)
        for key in ("y", "mean", "rstd", "dx"):
            expected = None if whole[key] is None else whole[key][rows]
            assert_bitwise_equal(part[key], expected, f"{key}, {name}, {rows}")
    shifted = torch.cat((w[:1], w))[1:]  # a parameter inside a flat buffer is not aligned
    for key, value in everything(norms, x, shifted, b, dy, rms).items():
        assert_bitwise_equal(value, whole[key], f"{key}, shifted weight")


@both_norms
@pytest.mark.parametrize("dtype, h", ((torch.bfloat16, 48), (torch.float32, 7), (torch.float16, 1)))
def test_rows_have_the_bits_of_the_whole(norms, dtype, h, rms):
    check_rows_alone(norms, 5, h, dtype, rms, (slice(4, 5), slice(1, 3), slice(0, None, 2)))


@both_norms
def test_the_number_of_threads_changes_nothing(rms):
    before = torch.get_num_threads()
    args = (*(z.cpu() for z in case(40, 300, torch.bfloat16)), rms)
    try:
        results = [torch.set_num_threads(count) or everything(reference_norm, *args) for count in (1, 2)]
    finally:
        torch.set_num_threads(before)
    assert_bitwise_equal(*results)


@both_norms
def test_views_negated_by_a_flag_are_negated(norms, rms):
    """As z.conj().imag is, also in some other dtypes; kernels see its own bytes, which have the other sign."""

    def negated(z: Tensor) -> Tensor:
        return torch._neg_view(-z)

    x, w, b, dy = case(5, 20)
    assert_bitwise_equal(everything(norms, *map(negated, (x, w, b, dy)), rms), everything(norms, x, w, b, dy, rms))
    _, mean, rstd = norms.norm_forward(x, w, b, eps=EPS, rms=rms, zero_centered=False)
    results = []
    for view in (lambda z: z, negated):
        stats = None if rms else view(mean), view(rstd)
        dx = norms.norm_backward_input(dy, x, w, *stats, rms=rms, zero_centered=False)
        results.append((dx, *partial_sums(norms, dy, x, *stats, rows_per_sum=4, rms=rms, with_bias=True)))
    assert_bitwise_equal(*results)
    assert_bitwise_equal(norms.fold_partial_sums(negated(dy)), norms.fold_partial_sums(dy))


@both_norms
def test_nan_stays_in_its_row(norms, rms):
    x, w, b, dy = case(5, 20)
    clean = everything(norms, x, w, b, dy, rms)
    x[2, 19] = float("nan")
    dirty = everything(norms, x, w, b, dy, rms)
    for key in ("y", "dx"):
        assert dirty[key][2].isnan().all()
        assert_bitwise_equal(dirty[key][[0, 1, 3, 4]], clean[key][[0, 1, 3, 4]], key)


def sequential_sums(rows: Tensor, rows_per_sum: int) -> Tensor:
    """fp32 [T, H] -> [partial sums, H]: from +0.0, one row after another."""
    leaves = torch.zeros(-(-len(rows) // rows_per_sum), rows.shape[1], device=rows.device)
    for index, row in enumerate(rows):
        leaves[index // rows_per_sum] += row
    return leaves


@both_norms
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("t, h, rows_per_sum", ((1, 1, 1), (9, 300, 4), (8, 20, 4), (5, 7, 100), (70, 20, 32)))
def test_partial_sums_add_in_row_order(norms, t, h, rows_per_sum, dtype, rms):
    """Equal to a loop in torch, bit for bit, on data of wide exponents, for which another order gives other bits."""
    x, dy = rand(t, h, dtype=dtype, wide=True), rand(t, h, dtype=dtype, seed=1, wide=True)
    mean, rstd = None if rms else rand(t, seed=2), rand(t, seed=3).abs()
    dw, db = partial_sums(norms, dy, x, mean, rstd, rows_per_sum=rows_per_sum, rms=rms, with_bias=True)
    xhat = (x.float() if rms else x.float() - mean[:, None]) * rstd[:, None]
    assert_bitwise_equal(dw, sequential_sums(dy.float() * xhat, rows_per_sum), "dw")
    assert_bitwise_equal(db, sequential_sums(dy.float(), rows_per_sum), "db")
    assert_bitwise_equal(norms.fold_partial_sums(dw), sequential_sums(dw, len(dw))[0], "fold")
    without_bias = partial_sums(norms, dy, x, mean, rstd, rows_per_sum=rows_per_sum, rms=rms, with_bias=False)
    assert without_bias[1] is None
    assert_bitwise_equal(without_bias[0], dw)
    for rows in (slice(0, rows_per_sum), slice(rows_per_sum, None)):  # the leaves that another rank would hold
        leaves = slice(0, 1) if rows.start == 0 else slice(1, None)
        stats = (None if rms else mean[rows], rstd[rows])
        part, _ = partial_sums(norms, dy[rows], x[rows], *stats, rows_per_sum=rows_per_sum, rms=rms, with_bias=False)
        assert_bitwise_equal(part, dw[leaves], f"leaves of {rows}")
    for cols in (slice(0, 1), slice(h // 2, None), slice(0, None, 3)):
        part, _ = partial_sums(
            norms, dy[:, cols], x[:, cols], mean, rstd, rows_per_sum=rows_per_sum, rms=rms, with_bias=False
        )
        assert_bitwise_equal(part, dw[:, cols].clone(memory_format=torch.contiguous_format), f"columns {cols}")


@both_norms
def test_partial_sums_of_heads_side_by_side(norms, rms):
    """Each head's columns equal a norm of that head alone; with one rstd for all heads they would not."""
    t, heads, size = 9, 3, 20
    x, dy = rand(t, heads * size, wide=True), rand(t, heads * size, seed=1, wide=True)
    mean, rstd = None if rms else rand(t, heads, seed=2), rand(t, heads, seed=3).abs()
    leaves = partial_sums(norms, dy, x, mean, rstd, rows_per_sum=4, rms=rms, with_bias=True)
    for head in range(heads):
        cols = slice(head * size, head * size + size)
        stats = (None if rms else mean[:, head], rstd[:, head])
        alone = partial_sums(norms, dy[:, cols], x[:, cols], *stats, rows_per_sum=4, rms=rms, with_bias=True)
        assert_bitwise_equal([part[:, cols].contiguous() for part in leaves], list(alone), f"head {head}")
    stats = (None if rms else mean[:, 0].contiguous(), rstd[:, 0].contiguous())
    assert (partial_sums(norms, dy, x, *stats, rows_per_sum=4, rms=rms, with_bias=False)[0] != leaves[0]).any()


def check_one_launch(norms: ModuleType, t: int, h: int, dtype: torch.dtype, rms: bool) -> None:
    """One launch for dx and the partial sums gives the bits of a launch for each, and one fold those of two."""
    x, w, b, dy = case(t, h, dtype)
    _, mean, rstd = norms.norm_forward(x, w, b, eps=EPS, rms=rms, zero_centered=True)
    dx = norms.norm_backward_input(dy, x, w, mean, rstd, rms=rms, zero_centered=True)
    for with_bias in (False, True):
        options = dict(rows_per_sum=32, rms=rms, with_bias=with_bias)
        sums = norms.norm_weight_partial_sums(dy, x, mean, rstd, **options)
        both = norms.norm_backward(dy, x, w, mean, rstd, zero_centered=True, **options)
        assert_bitwise_equal(list(both), [dx, sums], f"with_bias={with_bias}")
        folded = norms.fold_weight_gradients(sums, dtype, torch.float32 if with_bias else None)
        halves = [part.contiguous() for part in sums.chunk(2, dim=1)] if with_bias else [sums]
        expected = [
            norms.fold_partial_sums(part, kind) for part, kind in zip(halves, (dtype, torch.float32), strict=False)
        ]
        assert_bitwise_equal([part for part in folded if part is not None], expected)
    assert (sums[:, :h] != sums[:, h:]).any() and len(folded[1]) == h


@both_norms
@pytest.mark.parametrize("t, h, dtype", ((33, 20, torch.bfloat16), (3, 130, torch.float32), (34, 7, torch.float16)))
def test_one_launch_gives_the_bits_of_two(norms, t, h, dtype, rms):
    check_one_launch(norms, t, h, dtype, rms)


@both_norms
@pytest.mark.parametrize("heads, h, dtype", ((3, 16, torch.bfloat16), (1, 24, torch.float32)))
def test_backward_of_heads(heads, h, dtype, rms):
    """The bits of the calls that it is made of, also of a call that repeats an earlier one: on a GPU, all but the
    first of each layout."""
    for seed in range(4 if DEVICE == "cuda" else 2):  # the interpreter has no plans that a third call would repeat
        t = (70, 5)[seed % 2]
        x, dy = (rand(t, heads, h, dtype=dtype, seed=10 * seed + i, wide=True) for i in range(2))
        w = rand(h, seed=seed)
        _, mean, rstd = norm.norm_forward(x, w, None, eps=EPS, rms=rms, zero_centered=True)
        given = dict(rms=rms, zero_centered=True)
        dx, dw = norm.norm_backward_of_heads(dy, x, w, mean, rstd, rows_per_sum=32, **given)
        rows, by_head = (
            [None if z is None else z.view(t, -1) for z in zs] for zs in ((dy, x), (None if rms else mean, rstd))
        )
        sums = norm.norm_weight_partial_sums(*rows, *by_head, rows_per_sum=32, rms=rms, with_bias=False)
        folded = norm.fold_partial_sums(norm.fold_partial_sums(sums).view(heads, h), w.dtype)
        assert_bitwise_equal([dx, dw], [norm.norm_backward_input(dy, x, w, mean, rstd, **given), folded], f"{seed}")


@both_norms
def test_backward_of_slices_of_heads(monkeypatch, rms):
    """The norm of q where a projection has q and a gate side by side in each head: rows lie evenly, tokens do not."""
    monkeypatch.setattr(functional_norm, "select", lambda *_: norm)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    one_rank = Group(None, 0, 1)
    call = functional_norm.NormCall(one_rank, TokenSharding(1, 0), EPS, rms, False, heads_dim=2)
    of_all = []
    for _ in range(2):  # the second repeats the first without its checks
        both, dy, w = rand(1, 12, 3, 32, seed=1), rand(1, 12, 3, 16, seed=2, wide=True), rand(16, seed=3)
        given = []
        for x in (both[..., :16], both[..., :16].contiguous()):
            x, w = (t.detach().requires_grad_() for t in (x, w))
            functional_norm.Norm.apply(x, w, None, call).backward(dy)
            given.append([x.grad, w.grad])
        assert_bitwise_equal(*given)
        of_all.append(given[0])
    assert_bitwise_equal(*of_all)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_fold_rounds_once(norms, dtype):
    leaves = rand(5, 300, wide=True)
    assert_bitwise_equal(norms.fold_partial_sums(leaves, dtype), sequential_sums(leaves, 5)[0].to(dtype))


def test_another_order_of_rows_gives_other_bits():
    """The control: the test above can fail on such data."""
    rows = rand(9, 300, wide=True)
    assert (sequential_sums(rows, 9) != sequential_sums(rows.flip(0), 9)).any()


def test_fold_takes_any_strides(norms):
    leaves = rand(5, 300, wide=True)
    expected = sequential_sums(leaves, 5)[0]
    assert_bitwise_equal(norms.fold_partial_sums(leaves.t().contiguous().t()), expected)
    assert_bitwise_equal(norms.fold_partial_sums(leaves[:, 7:]), expected[7:])


def test_sums_of_rows_start_from_plus_zero(norms):
    """A sum of only -0.0 is 0.0."""
    minus, ones = torch.full((3, 4), -0.0, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    for count in (0, 1, 3):
        assert_bitwise_equal(norms.fold_partial_sums(minus[:count]), torch.zeros(4, device=DEVICE))
    leaves = partial_sums(norms, minus, ones, None, ones[:, 0], rows_per_sum=2, rms=True, with_bias=True)
    assert_bitwise_equal(leaves, [torch.zeros(2, 4, device=DEVICE)] * 2)


@both_norms
def test_no_rows(norms, rms):
    x, w, b, dy = case(0, 5, torch.bfloat16)
    y, mean, rstd = norms.norm_forward(x, w, b, eps=EPS, rms=rms, zero_centered=False)
    assert y.shape == (0, 5) and y.dtype == x.dtype and rstd.shape == (0,)
    assert norms.norm_backward_input(dy, x, w, mean, rstd, rms=rms, zero_centered=False).shape == (0, 5)
    dw, db = partial_sums(norms, dy, x, mean, rstd, rows_per_sum=4, rms=rms, with_bias=True)
    assert dw.shape == db.shape == (0, 5)
    assert_bitwise_equal(norms.fold_partial_sums(dw), torch.zeros(5, device=DEVICE))


X, W, STAT, R3 = torch.ones(4, 8), torch.ones(8), torch.ones(4), torch.ones(4, 3)
NAMES = "torch.bfloat16, torch.float16, torch.float32"
OPTIONS = {
    "norm_forward": dict(eps=EPS, rms=False, zero_centered=False),
    "norm_backward_input": dict(rms=False, zero_centered=False),
    "norm_backward": dict(rms=False, zero_centered=False, with_bias=True, rows_per_sum=4),
    "norm_weight_partial_sums": dict(rms=False, with_bias=True, rows_per_sum=4),
    "fold_weight_gradients": {},
    "fold_partial_sums": {},
}


@pytest.mark.parametrize(
    "error, message, args, options",
    (
        (TypeError, "norm_forward: x is a list; allowed: a torch.Tensor", ([1], W, W), {}),
        (TypeError, f"norm_forward: bias has dtype torch.float64; allowed: {NAMES}", (X, W, W.double()), {}),
        (TypeError, "norm_forward: out_dtype is torch.int8; allowed: ", (X, W, W), dict(out_dtype=torch.int8)),
        (ValueError, "norm_forward: x has shape (); allowed: [.., H] with H at least 1", (W[0], W, W), {}),
        (ValueError, "norm_forward: weight has shape (4,); allowed: (8,)", (X, STAT, None), {}),
        (ValueError, "norm_forward: weight is on meta; allowed: the device", (X, W.to("meta"), None), {}),
        (ValueError, "norm_forward: eps is -1; allowed: 0 or more", (X, W, W), dict(eps=-1)),
        (ValueError, "norm_backward_input: dy has shape (8,); allowed: (4, 8)", (W, X, W, STAT, STAT), {}),
        (TypeError, "norm_backward_input: mean is a NoneType; allowed: ", (X, X, W, None, STAT), {}),
        (ValueError, "norm_weight_partial_sums: rstd has shape (8,); allowed: (4,)", (X, X, STAT, W), {}),
        (ValueError, "norm_weight_partial_sums: rows_per_sum is 0;", (X, X, STAT, STAT), dict(rows_per_sum=0)),
        (TypeError, "fold_partial_sums: out_dtype is torch.int8; allowed:", (X, torch.int8), {}),
        (ValueError, "fold_weight_gradients: partial_sums has shape (4, 3); allowed: tw", (R3, *2 * [R3.dtype]), {}),
        (TypeError, "fold_partial_sums: partial_sums has dtype torch.float16; allowed: torch.fl", (X.half(),), {}),
        (ValueError, "fold_partial_sums: partial_sums has shape (8,); allowed: [rows, H]", (W,), {}),
    ),
)
def test_errors(norms, error, message, args, options):
    operation = message.partition(":")[0]
    with pytest.raises(error, match=re.escape(message)):
        getattr(norms, operation)(*args, **{**OPTIONS[operation], **options})


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@gpu
@both_norms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t, h", ((515, 128), (259, 300), (259, 4096), (37, 16384), (37, 20000), (19, 65536)))
def test_large(norms, t, h, dtype, rms):
    x, w, b, dy = case(t, h, dtype)
    args = (x, w, b, dy, rms, True)
    check_close(norms, *args)
    check_rows_alone(norms, t, h, dtype, rms, (slice(0, 1), slice(1, None), slice(3, 12), slice(0, None, 3)))
    check_one_launch(norms, t, h, dtype, rms)
    check_one_launch(norms, 1000, h, dtype, rms)
