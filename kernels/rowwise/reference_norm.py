"""LayerNorm and RMSNorm for a CPU: plain torch, the contract of norm.py.

A row is summed by halves. Everything is one IEEE operation at a time (mul, add, sub, div, sqrt), because torch's
vectorised and its tail code contract or approximate anything richer differently. Sums over rows are split into partial
sums. norm.py documents each function's arguments, results and errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import sum_by_halves
from .norm_checks import as_rows, check, check_backward, check_fold, check_forward, check_rows_per_sum


def _row_mean(x: Tensor) -> Tensor:
    """x [T, H] fp32 -> [T, 1] fp32."""
    return sum_by_halves(x) / x.shape[1]


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """mean and rstd [T], or [T, heads] of equal parts of a row."""
    if not x.numel():
        return x.float()
    parts = x.float().reshape(x.shape[0], *rstd.shape[1:], -1)
    centered = parts if mean is None else parts - mean.unsqueeze(-1)
    return (centered * rstd.unsqueeze(-1)).view(x.shape)


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    """New rows [T, H] as [.., H], contiguous, and no view: autograd refuses in-place changes of a view that a function
    returns."""
    rows = rows.contiguous()  # of rows that are transposed in memory the results so far are, too
    return rows if rows.shape == shape else torch.ops.aten._unsafe_view.default(rows, shape)


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    zero_centered: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y = (x - mean) * rstd * weight + bias, in fp32, rounded once; RMSNorm has no mean and usually no bias."""
    check_forward("norm_forward", x, weight, bias, eps, out_dtype)
    shape, x = x.shape, as_rows(x)
    if x.shape[0] == 0:
        empty = x.new_empty(0, dtype=torch.float32)
        return x.new_empty(shape, dtype=out_dtype or x.dtype), None if rms else empty, empty
    x32 = x.float()
    mean = None if rms else _row_mean(x32)
    centered = x32 if mean is None else x32 - mean
    rstd = 1.0 / torch.sqrt(_row_mean(centered * centered) + eps)
    y = centered * rstd * _scale(weight, zero_centered)
    if bias is not None:
        y = y + bias.float()
    return _shaped(y.to(out_dtype or x.dtype), shape), None if mean is None else mean.squeeze(1), rstd.squeeze(1)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    rows_per_sum: int,
    rms: bool,
    zero_centered: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    """See norm.norm_backward."""
    check_backward("norm_backward", dy, x, mean, rstd, rms)
    check("norm_backward", "weight", weight, (x.shape[-1],), x)
    check_rows_per_sum("norm_backward", rows_per_sum)
    dx = norm_backward_input(dy, x, weight, mean, rstd, rms=rms, zero_centered=zero_centered)
    sums = norm_weight_partial_sums(dy, x, mean, rstd, rows_per_sum=rows_per_sum, rms=rms, with_bias=with_bias)
    return dx, sums


def norm_backward_input(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, rms: bool, zero_centered: bool
) -> Tensor:
    """See norm.norm_backward_input."""
    check_backward("norm_backward_input", dy, x, mean, rstd, rms)
    check("norm_backward_input", "weight", weight, (x.shape[-1],), x)
    if x.numel() == 0:
        return x.new_empty(x.shape)
    shape, dy, x = x.shape, as_rows(dy), as_rows(x)
    xhat = _normalized(x, mean, rstd)
    wdy = dy.float() * _scale(weight, zero_centered)
    dx = wdy - xhat * _row_mean(xhat * wdy)
    if not rms:
        dx = dx - _row_mean(wdy)
    return _shaped((dx * rstd.unsqueeze(1)).to(x.dtype), shape)


def norm_weight_partial_sums(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, *, rows_per_sum: int, rms: bool, with_bias: bool
) -> Tensor:
    """See norm.norm_weight_partial_sums."""
    check_backward("norm_weight_partial_sums", dy, x, mean, rstd, rms, heads=True)
    check_rows_per_sum("norm_weight_partial_sums", rows_per_sum)
    dy, x = as_rows(dy), as_rows(x)
    dy32 = dy.float()
    products = dy32 * _normalized(x, mean, rstd)
    terms = torch.cat([products, dy32], dim=1) if with_bias else products
    return torch.stack([fold_partial_sums(block) for block in terms.split(rows_per_sum)]) if len(terms) else terms


def fold_partial_sums(partial_sums: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """See norm.fold_partial_sums."""
    check_fold("fold_partial_sums", partial_sums, out_dtype)
    total = partial_sums.new_zeros(partial_sums.shape[1])
    for partial_sum in partial_sums:
        total += partial_sum
    return total.to(out_dtype or torch.float32)


def fold_weight_gradients(
    partial_sums: Tensor, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """See norm.fold_weight_gradients."""
    check_fold("fold_weight_gradients", partial_sums, weight_dtype, bias_dtype)
    if bias_dtype is None:
        return fold_partial_sums(partial_sums, weight_dtype), None
    weight_sums, bias_sums = partial_sums.chunk(2, dim=1)
    return fold_partial_sums(weight_sums, weight_dtype), fold_partial_sums(bias_sums, bias_dtype)
