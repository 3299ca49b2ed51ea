"""The products by expert for a CPU: the GEMM's reference on each expert's rows, the contract of grouped.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..gemm.operands import check_kinds
from ..gemm.reference import matmul


def experts_with_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if first < end:
            yield expert, slice(first, end)


def grouped_matmul(
    a: Tensor, b: Tensor, offsets: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See grouped.grouped_matmul."""
    check_kinds("grouped_matmul", a, b, bias, out_dtype)
    c = torch.empty((a.shape[0], b.shape[2]), dtype=out_dtype or a.dtype, device=a.device)
    for expert, rows in experts_with_rows(offsets):
        matmul(a[rows], b[expert], bias=None if bias is None else bias[expert], out=c[rows])
    return c


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """See grouped.grouped_outer."""
    check_kinds("grouped_outer", a, b, None, out_dtype)
    c = torch.zeros((len(offsets) - 1, a.shape[1], b.shape[1]), dtype=out_dtype or a.dtype, device=a.device)
    for expert, rows in experts_with_rows(offsets):
        matmul(a[rows].t(), b[rows], out=c[expert])
    return c
