"""Softmax, log-softmax and sums along rows for a CPU: plain torch, the contract of softmax.py.

A row is added by halves, elementwise, in an order of its length alone. exp is written out
(kernels/vocabulary/reference_cross_entropy.py), and log runs on whole vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import in_whole_vectors_, sum_by_halves
from ..vocabulary.reference_cross_entropy import _chunks, _exp


def softmax(x: Tensor, *, log: bool, out_dtype: torch.dtype) -> Tensor:
    """See softmax.softmax."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    for rows, part in _chunks(x):
        part.sub_(part.amax(1, keepdim=True))
        exps = _exp(part.clone() if log else part)
        total = sum_by_halves(exps)
        y[rows] = part.sub_(in_whole_vectors_(torch.log_, total)) if log else exps.div_(total)
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
