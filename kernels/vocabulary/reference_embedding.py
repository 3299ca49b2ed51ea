"""The gradient of an embedding's table for a CPU: plain torch, the contract of embedding.py, and its bits."""

from __future__ import annotations

import torch
from torch import Tensor

OCCURRENCES_PER_SUM = 32


def _sum_in_order(rows: Tensor, which: Tensor, place: Tensor, count: int) -> Tensor:
    """sums[s] of rows with which == s, one after another by their `place` 0, 1, 2, ..; from +0.0. fp32 [count, D]."""
    sums = torch.zeros((count, rows.shape[1]), dtype=torch.float32, device=rows.device)
    by_place = torch.argsort(place, stable=True)
    for at in by_place.split(torch.bincount(place).tolist()):
        sums[which[at]] += rows[at].float()  # no sum appears twice at one place
    return sums


def embedding_grad(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """See embedding.embedding_grad."""
    grad = torch.zeros((rows, dy.shape[1]), dtype=dtype, device=dy.device)
    tokens = torch.nonzero(ids < rows).squeeze(1)
    if not len(tokens):
        return grad
    seen, which, counts = torch.unique(ids[tokens], return_inverse=True, return_counts=True)
    order = torch.argsort(which, stable=True)
    starts = counts.cumsum(0) - counts
    which = which[order]
    place = torch.arange(len(order), dtype=torch.int64, device=dy.device) - starts[which]
    sums_each = (counts + OCCURRENCES_PER_SUM - 1) // OCCURRENCES_PER_SUM
    first_sum = sums_each.cumsum(0) - sums_each
    sum_index = first_sum[which] + place // OCCURRENCES_PER_SUM
    partial_sums = _sum_in_order(dy[tokens[order]], sum_index, place % OCCURRENCES_PER_SUM, int(sums_each.sum()))
    owner = torch.repeat_interleave(sums_each)
    place = torch.arange(len(owner), dtype=torch.int64, device=dy.device) - first_sum[owner]
    grad[seen] = _sum_in_order(partial_sums, owner, place, len(seen)).to(dtype)
    return grad
