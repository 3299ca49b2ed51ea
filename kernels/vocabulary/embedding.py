"""The gradient of an embedding's table in Triton: sums over each id's own occurrences, in their order, no atomics.

A stable sort groups the tokens by id, in token order. Each OCCURRENCES_PER_SUM tokens of an id, counted from its first,
give one partial sum: one program adds them to +0.0 one after another. For an id with several partial sums, these are
then added to +0.0 one after another. So a row's bits depend only on the gradients of its own tokens: not on which other
ids are in the batch, nor on which rank holds the row. The host does not wait for the device: programs are launched for
every token, and those at which no partial sum starts return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, interpreting, launch_on, next_power_of_2, readable_rows
from ..plans import Kernel

OCCURRENCES_PER_SUM = 32  # part of the order of summation
MAX_BLOCK = 1024  # columns per program; sets the speed only


@triton.jit(do_not_specialize=["rows"])
def _partial_sums_kernel(
    dy_ptr, ids_ptr, order_ptr, first_ptr, last_ptr, slot_ptr, partial_sums_ptr, grad_ptr, stride, D, rows,
    PER_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = tl.load(ids_ptr + at)
    first, last = tl.load(first_ptr + at), tl.load(last_ptr + at)
    if (row < rows) & ((at - first) % PER_SUM == 0):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(at, tl.minimum(at + PER_SUM, last)):
            token = tl.load(order_ptr + i)
            total += tl.load(dy_ptr + token * stride + cols, mask=cols < D, other=0.0).to(tl.float32)
        if last - first <= PER_SUM:
            tl.store(grad_ptr + row.to(tl.int64) * D + cols, total.to(grad_ptr.dtype.element_ty), mask=cols < D)
        else:
            tl.store(partial_sums_ptr + tl.load(slot_ptr + at) * D + cols, total, mask=cols < D)


@triton.jit(do_not_specialize=["rows"])
def _fold_kernel(
    ids_ptr,
    first_ptr,
    last_ptr,
    slot_ptr,
    partial_sums_ptr,
    grad_ptr,
    D,
    rows,
    PER_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(ids_ptr + at)
    first, last = tl.load(first_ptr + at), tl.load(last_ptr + at)
    if (row < rows) & (at == first) & (last - first > PER_SUM):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        slot = tl.load(slot_ptr + at)
        for i in range(0, tl.cdiv(last - first, PER_SUM)):
            total += tl.load(partial_sums_ptr + (slot + i) * D + cols, mask=cols < D, other=0.0)
        tl.store(grad_ptr + row.to(tl.int64) * D + cols, total.to(grad_ptr.dtype.element_ty), mask=cols < D)


_partial_sums = Kernel(_partial_sums_kernel)
_fold = Kernel(_fold_kernel)


def embedding_grad(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """grad [rows, D]: row v is the sum of dy over the tokens with id v, in fp32, from partial sums, rounded once.

    dy: [T, D], any strides; ids: int64 [T], from 0; ids of `rows` and above are ignored. dy.dtype and `dtype`, that of
    grad, are bfloat16, float16 or float32.
    """
    t, d = dy.shape
    grad = torch.zeros((rows, d), device=dy.device, dtype=torch.float32 if interpreting() else dtype)
    if t and d:
        dy = readable_rows(dy)
        ids, order = torch.sort(ids.clamp(max=rows).to(torch.int32), stable=True)
        first = torch.searchsorted(ids, ids, out_int32=True)
        last = torch.searchsorted(ids, ids, out_int32=True, right=True)
        place = torch.arange(t, device=dy.device, dtype=torch.int32) - first
        in_many = (place % OCCURRENCES_PER_SUM == 0) & (last - first > OCCURRENCES_PER_SUM)
        slot = in_many.cumsum(0) - 1
        # an id with several partial sums has at most two for each OCCURRENCES_PER_SUM of its tokens
        partial_sums = torch.empty((2 * t // OCCURRENCES_PER_SUM, d), device=dy.device, dtype=torch.float32)
        block = min(MAX_BLOCK, next_power_of_2(d))
        grid = (t, cdiv(d, block))
        index, sizes = dy.device.index, (OCCURRENCES_PER_SUM, block)
        with launch_on(dy, "embedding_grad"):
            _partial_sums(
                index, grid, (dy, ids, order, first, last, slot, partial_sums, grad, dy.stride(0), d, rows), sizes
            )
            _fold(index, grid, (ids, first, last, slot, partial_sums, grad, d, rows), sizes)
    return grad.to(dtype)
