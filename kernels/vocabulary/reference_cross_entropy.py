"""Cross-entropy for a CPU: plain torch, the contract of loss_spec.py.

exp is written out in multiplications and additions, one IEEE operation at a time: torch's own may take another formula
for the elements that are left over after whole vectors, so that its bits would depend on where an element lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..elementwise import in_whole_vectors_
from .loss_spec import LossSpec, as_rows

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


def row_extremes(logits: Tensor, target: Tensor, columns: int, first: int, spec: LossSpec) -> Tensor:
    """extremes [E, T] of one part of the vocabulary, see loss_spec."""
    logits, target = as_rows(logits, target)
    extremes = logits.new_full((spec.extremes, logits.shape[0]), -math.inf, dtype=torch.float32)
    if spec.label_smoothing:
        extremes[2] = math.inf
    if logits.numel():
        extremes[1] = logits.gather(1, (target.long() - first).clamp_(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    if columns and logits.shape[0]:
        extremes[0] = logits[:, :columns].amax(1)
        if spec.label_smoothing:
            extremes[2] = logits[:, :columns].amin(1)
    return extremes


def _shift_scale(top: Tensor, lowest: Tensor, spec: LossSpec) -> Tensor:
    """fp32 [T]: powers of two that x - top is multiplied by, so that V terms stay within int64."""
    # top - lowest < 2^exponent, read off its bits; the bounds keep the scale a normal number
    exponent = ((top - lowest).view(torch.int32).bitwise_right_shift(23) - 126).clamp(-60, 128)
    return (spec.exp_bits - exponent + 127).bitwise_left_shift(23).view(torch.float32)


def _top(extremes: Tensor) -> Tensor:
    return extremes[:, 0].amax(0) + 0.0  # the maximum of 0.0 and -0.0 may be either; adding 0.0 makes it 0.0


def exp_sums(x: Tensor, one: float) -> Tensor:
    """The sum over each row's exp(x) in fixed point, int64 [T], of fp32 x <= 0 or NaN, which is overwritten."""
    x.masked_fill_(~(x <= 0), -math.inf)  # NaN, in rows whose largest logit is not finite
    return _exp(x).mul_(one).to(torch.int64).sum(1)


def log_of_sums(sums: Tensor, top: Tensor, one: float) -> Tensor:
    """log(sum of exp(x - top)), fp32, from these sums; NaN for a NaN, an inf or nothing but -inf, as torch has it."""
    log_sum = in_whole_vectors_(torch.log_, sums.double() / one).float()
    return torch.where(top.isfinite(), log_sum, math.nan)


def row_sums(logits: Tensor, target: Tensor, columns: int, extremes: Tensor, spec: LossSpec) -> Tensor:
    """sums [S, T] of one part of the vocabulary, from the extremes [P, E, T] of all, see loss_spec."""
    logits, target = as_rows(logits, target)
    sums = torch.zeros((spec.sums, logits.shape[0]), dtype=torch.int64, device=logits.device)
    top = _top(extremes)
    scale = _shift_scale(top, extremes[:, 2].amin(0), spec) if spec.label_smoothing else None
    for rows, x in _chunks(logits[:, :columns]):
        x.sub_(top[rows, None])
        if scale is not None:
            scaled = (x * scale[rows, None]).masked_fill_((x == -math.inf) | x.isnan(), 0.0)
            sums[1, rows] = scaled.to(torch.int64).sum(1)
        sums[0, rows] = exp_sums(x, spec.one)
    return sums


def token_losses(extremes: Tensor, sums: Tensor, target: Tensor, width: int, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(losses [T], stats [2, T]) from the extremes [P, E, T] and the sums [P, S, T] of all parts, see loss_spec."""
    target = target.reshape(-1)
    smoothing, total = spec.label_smoothing, sums.sum(0)
    top = _top(extremes)
    owner = (target.long() // width).clamp(0, extremes.shape[0] - 1)
    at_target = extremes[:, 1].gather(0, owner.unsqueeze(0)).squeeze(0)
    log_sum = log_of_sums(total[0], top, spec.one)
    losses = log_sum - (at_target - top)
    if smoothing:
        lowest = extremes[:, 2].amin(0)
        mean_shift = (total[1].double() / _shift_scale(top, lowest, spec).double() / spec.vocabulary).float()
        mean_shift = torch.where(top - lowest == math.inf, -math.inf, mean_shift)  # fp32's largest number is less
        losses = (1.0 - smoothing) * losses + smoothing * (log_sum - mean_shift)
    if spec.z_loss:
        losses = losses + spec.z_loss * (top + log_sum).square()
    losses = losses.masked_fill(losses.isnan(), math.nan)  # one NaN bit pattern, from whichever sum it came
    return torch.where(target != spec.ignore_index, losses, 0.0), torch.stack([top, log_sum])


def whole_losses(logits: Tensor, target: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(losses [T], stats [2, T]) of a vocabulary in one part, see loss_spec."""
    extremes = row_extremes(logits, target, spec.vocabulary, 0, spec).unsqueeze(0)
    sums = row_sums(logits, target, spec.vocabulary, extremes, spec).unsqueeze(0)
    return token_losses(extremes, sums, target, logits.shape[-1], spec)


def sum_of_tokens(losses: Tensor, target: Tensor, spec: LossSpec, *, mean: bool) -> tuple[Tensor, Tensor | None]:
    """(total, count or None), see loss_spec.

    The order: padded with zeros to a power of two; adds first and second half until one is left.
    """
    missing = (1 << max(losses.numel() - 1, 0).bit_length()) - losses.numel()
    total = F.pad(losses.double(), (0, missing))
    while total.numel() > 1:
        first, second = total.view(2, -1)
        total = first + second
    total = total.squeeze(0)
    count = (target != spec.ignore_index).sum() if mean else None
    return (total if count is None else total / count).float(), count


def logits_grad(
    grad: Tensor, logits: Tensor, target: Tensor, stats: Tensor, count: Tensor | None, columns: int, first: int,
    spec: LossSpec,
) -> Tensor:  # fmt: skip
    """dlogits [.., N] of one part of the vocabulary, by the formula in cross_entropy.py, see loss_spec."""
    shape = logits.shape
    logits, target = as_rows(logits, target)
    out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    ids, (top, log_sum) = target.long(), stats
    g = (grad if count is None else grad / count).reshape(-1).expand(ids.shape).contiguous()
    of_p = g * (1.0 + 2.0 * spec.z_loss * (top + log_sum)) if spec.z_loss else g
    of_target, everywhere = g * (1.0 - spec.label_smoothing), g * (spec.label_smoothing / spec.vocabulary)
    of_p, of_target, everywhere = (factor.unsqueeze(1) for factor in (of_p, of_target, everywhere))
    here = (ids >= first) & (ids < first + columns)
    place = (ids - first).clamp_(0, max(columns - 1, 0)).unsqueeze(1)
    for rows, x in _chunks(logits[:, :columns]):
        x.sub_(top[rows, None]).sub_(log_sum[rows, None])
        dx = _exp(x).mul_(of_p[rows]).sub_(everywhere[rows])
        if columns:
            at = dx.gather(1, place[rows])
            dx.scatter_(1, place[rows], torch.where(here[rows, None], at - of_target[rows], at))
        dx.masked_fill_((ids[rows] == spec.ignore_index).unsqueeze(1), 0.0)
        out[rows, :columns] = dx.to(logits.dtype)
    # a NaN's bits depend on its neighbours in a SIMD vector
    return out.masked_fill_(out.isnan(), math.nan).view(shape)


def row_entropies(logits: Tensor, target: Tensor, columns: int, stats: Tensor, spec: LossSpec) -> Tensor:
    """entropies [T] of one part of the vocabulary, see loss_spec; 0 where the target is ignored."""
    logits, target = as_rows(logits, target)
    sums = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    top, log_sum = stats
    for rows, x in _chunks(logits[:, :columns]):
        log_p = x.sub_(top[rows, None]).sub_(log_sum[rows, None])
        log_p.masked_fill_(~(log_p <= 0), 0.0)  # rounded up from 0, or NaN: in rows whose top is not finite
        terms = _exp(log_p.clone()).mul_(log_p.clamp_(min=_LEAST)).mul_(-spec.one)
        sums[rows] = terms.to(torch.int64).sum(1)
    return sums.masked_fill_(target == spec.ignore_index, 0)
