"""LayerNorm and RMSNorm for a CPU: plain torch, the contract of norm.py.

A row is summed by halves. Everything is one IEEE operation at a time (mul, add, sub, div, sqrt), because torch's
vectorised and its tail code contract or approximate anything richer differently. Sums over rows are by leaves. What
each function takes, returns and raises is said in norm.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import sum_by_halves
from .norm_checks import check, check_backward, check_fold, check_forward, check_leaves


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
    if x.shape[0] == 0:
        empty = x.new_empty(0, dtype=torch.float32)
        return x.new_empty(x.shape, dtype=out_dtype or x.dtype), None if rms else empty, empty
    x32 = x.float()
    mean = None if rms else _row_mean(x32)
    centered = x32 if mean is None else x32 - mean
    rstd = 1.0 / torch.sqrt(_row_mean(centered * centered) + eps)
    y = centered * rstd * _scale(weight, zero_centered)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or x.dtype), None if mean is None else mean.squeeze(1), rstd.squeeze(1)


def norm_backward_input(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, rms: bool, zero_centered: bool
) -> Tensor:
    """See norm.norm_backward_input."""
    check_backward("norm_backward_input", dy, x, mean, rstd, rms)
    check("norm_backward_input", "weight", weight, (x.shape[1],), x)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    xhat = _normalized(x, mean, rstd)
    wdy = dy.float() * _scale(weight, zero_centered)
    dx = wdy - xhat * _row_mean(xhat * wdy)
    if not rms:
        dx = dx - _row_mean(wdy)
    return (dx * rstd.unsqueeze(1)).to(x.dtype)


def norm_weight_leaves(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, *, leaf_rows: int, rms: bool, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """See norm.norm_weight_leaves."""
    check_backward("norm_weight_leaves", dy, x, mean, rstd, rms, heads=True)
    check_leaves("norm_weight_leaves", leaf_rows)
    dy32 = dy.float()
    products = dy32 * _normalized(x, mean, rstd)
    return _sum_blocks(products, leaf_rows), _sum_blocks(dy32, leaf_rows) if with_bias else None


def _sum_blocks(values: Tensor, leaf_rows: int) -> Tensor:
    return torch.stack([fold_leaves(block) for block in values.split(leaf_rows)]) if len(values) else values


def fold_leaves(leaves: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """See norm.fold_leaves."""
    check_fold(leaves, out_dtype)
    total = leaves.new_zeros(leaves.shape[1])
    for leaf in leaves:
        total += leaf
    return total.to(out_dtype or torch.float32)
