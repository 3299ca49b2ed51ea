"""Softmax, log-softmax and sums along rows for a CPU: plain torch, the contract of softmax.py.

A row is added by halves, elementwise, in an order of its length alone; for log-softmax in fixed point. exp is written
out (kernels/vocabulary/reference_cross_entropy.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..elementwise import sum_by_halves
from ..vocabulary.loss_spec import fixed_point
from ..vocabulary.reference_cross_entropy import _chunks, _exp, exp_sums, log_of_sums


def softmax(x: Tensor, *, log: bool, out_dtype: torch.dtype) -> Tensor:
    """See softmax.softmax."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    for rows, part in _chunks(x):
        top = part.amax(1) + 0.0
        part.sub_(top.unsqueeze(1))
        if log:
            one = fixed_point(x.shape[1])
            part.sub_(log_of_sums(exp_sums(part.clone(), one), top, one).unsqueeze(1))
            y[rows] = part.masked_fill_(part.isnan(), math.nan)
        else:
            exps = _exp(part)
            y[rows] = exps.div_(sum_by_halves(exps))
    return y


def softmax_backward(dy: Tensor, y: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """See softmax.softmax_backward."""
    return (y * (dy - row_sums(dy * y, divisor=1, out_dtype=torch.float32).unsqueeze(1))).to(out_dtype)


def row_sums(x: Tensor, *, divisor: int, out_dtype: torch.dtype) -> Tensor:
    """See softmax.row_sums."""
    y = torch.empty(x.shape[0], dtype=out_dtype, device=x.device)
    for rows, part in _chunks(x):
        y[rows] = sum_by_halves(part).squeeze(1).div_(divisor)
    return y
