"""The gradient of an embedding's table in Triton: sums over each id's own occurrences, in their order, no atomics.

A stable sort brings each id's tokens together, in token order. Every LEAF_OCCURRENCES of them, counted from the id's
own first, are a leaf: added one after another from +0.0, by one program. An id with one leaf is done; the leaves of
the others are added one after another from +0.0. So a row's bits depend on the gradients of its own tokens alone: not
on which other ids are in the batch, nor on which rank holds the row. Nothing waits for the device: programs are
launched for every token, and those that start no leaf return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dtypes import DTYPES
from ..launch import Launches, cdiv, interpreting, launch_on, next_power_of_2

LEAF_OCCURRENCES = 32  # part of the order of summation
MAX_BLOCK = 1024  # columns per program; sets the speed only


@triton.jit(do_not_specialize=["rows"])
def _leaves_kernel(
    dy_ptr, ids_ptr, order_ptr, first_ptr, last_ptr, slot_ptr, leaves_ptr, grad_ptr, stride, D, rows,
    LEAF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    row = tl.load(ids_ptr + at)
    first, last = tl.load(first_ptr + at), tl.load(last_ptr + at)
    if (row < rows) & ((at - first) % LEAF == 0):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(at, tl.minimum(at + LEAF, last)):
            token = tl.load(order_ptr + i)
            total += tl.load(dy_ptr + token * stride + cols, mask=cols < D, other=0.0).to(tl.float32)
        if last - first <= LEAF:
            tl.store(grad_ptr + row.to(tl.int64) * D + cols, total.to(grad_ptr.dtype.element_ty), mask=cols < D)
        else:
            tl.store(leaves_ptr + tl.load(slot_ptr + at) * D + cols, total, mask=cols < D)


@triton.jit(do_not_specialize=["rows"])
def _fold_kernel(
    ids_ptr, first_ptr, last_ptr, slot_ptr, leaves_ptr, grad_ptr, D, rows, LEAF: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0)
    row = tl.load(ids_ptr + at)
    first, last = tl.load(first_ptr + at), tl.load(last_ptr + at)
    if (row < rows) & (at == first) & (last - first > LEAF):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        slot = tl.load(slot_ptr + at)
        for i in range(0, tl.cdiv(last - first, LEAF)):
            total += tl.load(leaves_ptr + (slot + i) * D + cols, mask=cols < D, other=0.0)
        tl.store(grad_ptr + row.to(tl.int64) * D + cols, total.to(grad_ptr.dtype.element_ty), mask=cols < D)


_leaves = Launches(_leaves_kernel)
_fold = Launches(_fold_kernel)


def embedding_grad(dy: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """grad [rows, D]: row v is the sum of dy over the tokens with id v, in fp32, by leaves, rounded once to `dtype`.

    dy: [T, D], any strides; ids: int64 [T], from 0; those of `rows` and above count nowhere. Each of dy.dtype and
    dtype is bfloat16, float16 or float32. Raises TypeError for another one.
    """
    for name, given in (("dy.dtype", dy.dtype), ("dtype", dtype)):
        if given not in DTYPES:
            raise TypeError(f"embedding_grad: {name} is {given}; allowed: {', '.join(map(str, DTYPES))}")
    t, d = dy.shape
    grad = torch.zeros((rows, d), device=dy.device, dtype=torch.float32 if interpreting() else dtype)
    if t and d:
        dy = dy.float() if interpreting() else dy  # the interpreter gets bfloat16 wrong
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        ids, order = torch.sort(ids.clamp(max=rows).to(torch.int32), stable=True)
        first = torch.searchsorted(ids, ids, out_int32=True)
        last = torch.searchsorted(ids, ids, out_int32=True, right=True)
        place = torch.arange(t, device=dy.device, dtype=torch.int32) - first
        in_many = (place % LEAF_OCCURRENCES == 0) & (last - first > LEAF_OCCURRENCES)
        slot = in_many.cumsum(0) - 1
        # an id with more than one leaf has at most two for each LEAF_OCCURRENCES of its tokens
        leaves = torch.empty((2 * t // LEAF_OCCURRENCES, d), device=dy.device, dtype=torch.float32)
        block = min(MAX_BLOCK, next_power_of_2(d))
        grid = (t, cdiv(d, block))
        index, sizes = dy.device.index, (LEAF_OCCURRENCES, block)
        with launch_on(dy, "embedding_grad"):
            _leaves(index, grid, (dy, ids, order, first, last, slot, leaves, grad, dy.stride(0), d, rows), sizes)
            _fold(index, grid, (ids, first, last, slot, leaves, grad, d, rows), sizes)
    return grad.to(dtype)
