"""The row sums of a cross-entropy for a CPU: plain torch, the contract of cross_entropy.py.

exp is written out in multiplications and additions, one IEEE operation at a time: torch's own may take another formula
for the elements that are left over after whole vectors, so that its bits would depend on where an element lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 18  # elements at a time, so that the passes of exp stay in a cache; sets the speed only
_LN2_HIGH = 0.693359375  # 9 bits, so that its products with whole numbers are exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_LEAST = -87.0  # below this the result is zero: nothing here goes where flushing denormals would show


def _exp(x: Tensor) -> Tensor:
    """exp of an fp32 x <= 0, in place of x, within 2 units in the last place."""
    zero = x < _LEAST
    x.clamp_(min=_LEAST)
    n = (x * (1 / math.log(2))).round_()
    x.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
    series = torch.full_like(x, 1 / math.factorial(7))
    for power in range(6, -1, -1):  # |x| <= ln(2) / 2: what is left out is below 2^-27
        series.mul_(x).add_(1 / math.factorial(power))
    series.mul_((n.to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32))
    return series.masked_fill_(zero, 0.0)


def _chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, a fresh fp32 copy of them)."""
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        yield rows, logits[rows].to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def row_extremes(logits: Tensor, columns: int, *, with_low: bool) -> tuple[Tensor, Tensor | None]:
    """See cross_entropy.row_extremes."""
    high = logits.new_full((logits.shape[0],), -math.inf, dtype=torch.float32)
    low = torch.full_like(high, math.inf) if with_low else None
    if columns and len(high):
        high.copy_(logits[:, :columns].amax(1))
        if low is not None:
            low.copy_(logits[:, :columns].amin(1))
    return high, low


def row_sums(
    logits: Tensor, columns: int, top: Tensor, *, exp_bits: int, shift_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """See cross_entropy.row_sums."""
    exps = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    shifts = None if shift_scale is None else torch.zeros_like(exps)
    for rows, x in _chunks(logits[:, :columns]):
        x.sub_(top[rows, None])
        x.masked_fill_(~(x <= 0), -math.inf)  # NaN, in rows whose top is not finite
        if shifts is not None and shift_scale is not None:
            scaled = (x * shift_scale[rows, None]).masked_fill_(x == -math.inf, 0.0)
            shifts[rows] = scaled.to(torch.int64).sum(1)
        exps[rows] = _exp(x).mul_(2.0**exp_bits).to(torch.int64).sum(1)
    return exps, shifts


def logits_grad(
    logits: Tensor,
    columns: int,
    first: int,
    target: Tensor,
    ignore_index: int,
    top: Tensor,
    log_sum: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """See cross_entropy.logits_grad."""
    out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    of_p, of_target, everywhere = (factor.unsqueeze(1) for factor in factors)
    here = (target >= first) & (target < first + columns)
    place = (target - first).clamp_(0, max(columns - 1, 0)).unsqueeze(1)
    for rows, x in _chunks(logits[:, :columns]):
        x.sub_(top[rows, None]).sub_(log_sum[rows, None])
        dx = _exp(x).mul_(of_p[rows]).sub_(everywhere[rows])
        if columns:
            at = dx.gather(1, place[rows])
            dx.scatter_(1, place[rows], torch.where(here[rows, None], at - of_target[rows], at))
        dx.masked_fill_((target[rows] == ignore_index).unsqueeze(1), 0.0)
        out[rows, :columns] = dx.to(logits.dtype)
    return out
