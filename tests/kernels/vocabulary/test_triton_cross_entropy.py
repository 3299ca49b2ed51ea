"""The Triton kernels of cross-entropy: exact sums, so equal for every cut and tile; and the reference's values.

Compiled on a GPU, else in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tp_invariant.kernels.vocabulary import cross_entropy, reference_cross_entropy
from tp_invariant.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXP_BITS = 45


def rand(t: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(t, n, device=DEVICE, generator=generator) * 4).to(dtype)


def sums(x: Tensor, columns: int, top: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    exps, shifts = cross_entropy.row_sums(x, columns, top, exp_bits=EXP_BITS, shift_scale=scale)
    assert shifts is not None
    return exps, shifts


def grad_inputs(x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """top, log_sum and factors that logits_grad takes."""
    t = x.shape[0]
    generator = torch.Generator(DEVICE).manual_seed(9)
    factors = torch.randn(3, t, device=DEVICE, generator=generator).unbind(0)
    return x.float().amax(1), (x.float() - x.float().amax(1, keepdim=True)).exp().sum(1).log(), factors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t, n", ((1, 1), (3, 17), (2, 300), (2, 5001)))
def test_against_the_reference_and_float64(t, n, dtype):
    x = rand(t, n, dtype)
    high, low = cross_entropy.row_extremes(x, n, with_low=True)
    assert_bitwise_equal((high, low), (x.float().amax(1), x.float().amin(1)))
    scale = torch.full((t,), 2.0**40, device=DEVICE)
    exps, shifts = sums(x, n, high, scale)
    shifted = x.double() - high.double()[:, None]
    torch.testing.assert_close(exps.double() * 2.0**-EXP_BITS, shifted.exp().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(shifts.double() * 2.0**-40, shifted.sum(1), rtol=1e-6, atol=1e-30)
    their_exps, their_shifts = reference_cross_entropy.row_sums(
        x.cpu(), n, high.cpu(), exp_bits=EXP_BITS, shift_scale=scale.cpu()
    )
    torch.testing.assert_close(exps.cpu().double(), their_exps.double(), rtol=1e-6, atol=0)
    assert_bitwise_equal(shifts.cpu(), their_shifts)  # no exp in it: IEEE operations alone

    target = torch.arange(t, device=DEVICE) % n
    top, log_sum, factors = grad_inputs(x)
    dx = cross_entropy.logits_grad(x, n, 0, target, -100, top, log_sum, factors)
    assert dx.dtype == dtype
    of_p, of_target, everywhere = (factor.double()[:, None] for factor in factors)
    exact = (shifted - log_sum.double()[:, None]).exp() * of_p - everywhere
    exact[torch.arange(t), target] -= of_target[:, 0]
    assert (dx.double() - exact).norm() <= (torch.finfo(dtype).eps / 2 + 1e-6) * exact.norm()
    theirs = reference_cross_entropy.logits_grad(
        x.cpu(), n, 0, target.cpu(), -100, top.cpu(), log_sum.cpu(), tuple(f.cpu() for f in factors)
    )
    assert (dx.cpu().double() - theirs.double()).norm() <= (torch.finfo(dtype).eps + 1e-6) * exact.norm().cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_cut_gives_the_same_bits(dtype, monkeypatch):
    """Parts of any width and alignment, other tiles, a transposed copy: the extremes, the sums and the gradient."""
    t, n = 3, 531
    x = rand(t, n, dtype)
    scale = torch.full((t,), 2.0**40, device=DEVICE)
    top = cross_entropy.row_extremes(x, n, with_low=False)[0]
    want = torch.stack(sums(x, n, top, scale))
    _, log_sum, factors = grad_inputs(x)
    target = torch.tensor([400, 2, -100], device=DEVICE)
    want_dx = cross_entropy.logits_grad(x, n, 0, target, -100, top, log_sum, factors)
    assert not want_dx[2].any()
    for cuts in ((0, 1, 2, 400, n), (0, 255, 256, n), (*range(0, n, 129), n)):
        total, parts = torch.zeros_like(want), []
        highs = []
        for first, last in itertools.pairwise(cuts):
            part = x[:, first:last]
            highs.append(cross_entropy.row_extremes(part, last - first, with_low=False)[0])
            total += torch.stack(sums(part, last - first, top, scale))
            parts.append(cross_entropy.logits_grad(part, last - first, first, target, -100, top, log_sum, factors))
        assert_bitwise_equal(torch.stack(highs).amax(0), top)
        assert_bitwise_equal(total, want, f"cuts {cuts}")
        assert_bitwise_equal(torch.cat(parts, dim=1), want_dx, f"cuts {cuts}")
    assert_bitwise_equal(torch.stack(sums(x.t().contiguous().t(), n, top, scale)), want)
    for block in (64, 256):
        monkeypatch.setattr(cross_entropy, "MAX_BLOCK", block)
        assert_bitwise_equal(torch.stack(sums(x, n, top, scale)), want, f"tiles of {block}")
        again = cross_entropy.logits_grad(x, n, 0, target, -100, top, log_sum, factors)
        assert_bitwise_equal(again, want_dx, f"tiles of {block}")


def test_columns_beyond_the_tensor_are_never_read():
    x = rand(2, 40)
    top = x[:, :23].amax(1)
    scale = torch.ones(2, device=DEVICE)
    want = sums(x[:, :23].contiguous(), 23, top, scale)
    target = torch.tensor([3, 22], device=DEVICE)
    _, log_sum, factors = grad_inputs(x)
    dx = cross_entropy.logits_grad(x[:, :23].contiguous(), 23, 0, target, -100, top, log_sum, factors)
    x[:, 23:] = math.nan
    high, low = cross_entropy.row_extremes(x, 23, with_low=True)
    assert_bitwise_equal((high, low), (x[:, :23].amax(1), x[:, :23].amin(1)))
    assert_bitwise_equal(sums(x, 23, top, scale), want)
    again = cross_entropy.logits_grad(x, 23, 0, target, -100, top, log_sum, factors)
    assert_bitwise_equal(again, torch.cat([dx, torch.zeros(2, 17, device=DEVICE)], dim=1))


def test_no_columns_and_no_rows():
    high, low = cross_entropy.row_extremes(rand(2, 8), 0, with_low=True)
    assert (high.tolist(), low.tolist()) == ([-math.inf] * 2, [math.inf] * 2)
    exps, shifts = sums(rand(2, 8), 0, torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE))
    assert (exps.tolist(), shifts.tolist()) == ([0, 0], [0, 0])
    assert cross_entropy.row_extremes(rand(0, 8), 8, with_low=False)[0].shape == (0,)


def test_values_that_are_not_finite():
    x = rand(4, 33)
    x[0, 5], x[1, 6], x[2, 7] = math.nan, math.inf, -math.inf
    x[3] = -math.inf
    high, low = cross_entropy.row_extremes(x, 33, with_low=True)
    assert high[0].isnan() and high[1] == math.inf and high[2].isfinite() and high[3] == -math.inf
    assert low[2:].tolist() == [-math.inf] * 2
    exps, shifts = sums(x[2:3], 33, high[2:3], torch.ones(1, device=DEVICE))
    rest = torch.cat([x[2:3, :7], x[2:3, 8:]], dim=1)
    assert_bitwise_equal((exps, shifts), sums(rest, 32, high[2:3], torch.ones(1, device=DEVICE)))


@pytest.mark.parametrize(
    ("x", "columns", "kind", "text"),
    [
        (torch.zeros(3), 3, ValueError, r"row_extremes: logits has shape \(3,\); allowed: \[rows, columns\]"),
        (torch.zeros(3, 3).double(), 3, TypeError, "row_extremes: logits has dtype torch.float64; allowed: torch.b"),
        (torch.zeros(3, 3), 4, ValueError, "row_extremes: columns is 4; allowed: 0 to 3"),
    ],
)
def test_what_is_refused(x, columns, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        cross_entropy.row_extremes(x.to(DEVICE), columns, with_low=False)
