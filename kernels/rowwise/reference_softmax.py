"""Softmax, log-softmax and sums along rows for a CPU: plain torch, the contract of softmax.py.

A row is added by halves, elementwise, in an order of its length alone. exp is written out
(kernels/vocabulary/reference_cross_entropy.py), and log runs on whole vectors, below the size that torch cuts for its
threads: torch's own take another formula for the elements that are left over.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..vocabulary.reference_cross_entropy import _chunks, _exp

_VECTORS = 64
_BLOCK = 2**14


def _sum_by_halves(x: Tensor) -> Tensor:
    """[T, H] -> [T, 1]: the first half plus the second, until one is left."""
    while (width := x.shape[1]) > 1:
        half = width // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat([folded, x[:, -1:]], dim=1) if width % 2 else folded
    return x


def _log(x: Tensor) -> Tensor:
    padded = F.pad(x, (0, -x.numel() % _VECTORS), value=1.0)
    return torch.cat([block.log() for block in padded.split(_BLOCK)])[: x.numel()]


def softmax(x: Tensor, *, log: bool, out_dtype: torch.dtype) -> Tensor:
    """See softmax.softmax."""
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    for rows, part in _chunks(x):
        part.sub_(part.amax(1, keepdim=True))
        exps = _exp(part.clone() if log else part)
        total = _sum_by_halves(exps)
        y[rows] = part.sub_(_log(total.squeeze(1)).unsqueeze(1)) if log else exps.div_(total)
    return y


def row_sums(x: Tensor, *, divisor: int, out_dtype: torch.dtype) -> Tensor:
    """See softmax.row_sums."""
    y = torch.empty(x.shape[0], dtype=out_dtype, device=x.device)
    for rows, part in _chunks(x):
        y[rows] = _sum_by_halves(part).squeeze(1).div_(divisor)
    return y
