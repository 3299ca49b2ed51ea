"""A tensor of which one part along a dim is known and the rest is NaN, in one launch: 16 bytes of a thread at a time.

torch's pad fills all of it, and then copies the part.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, cdiv, launch_on

_BLOCK = 1024  # vectors of a program
_VECTOR = 16  # bytes
_WARPS = 8
_MOST_ROWS = 65535  # of a grid's second dim


@triton.jit(do_not_specialize=["part", "whole", "before", "nan"])
def _among_nan_kernel(part_ptr, out_ptr, part, whole, before, nan, BLOCK: tl.constexpr):
    """In vectors: `part` of a row are known of `whole`, `before` others stand before them."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    word = tl.arange(0, 4)[None, :]
    known = (at >= before) & (at < before + part)
    words = tl.load(part_ptr + (row * part + at - before) * 4 + word, mask=known, other=0)
    tl.store(out_ptr + (row * whole + at) * 4 + word, tl.where(known, words, nan), mask=at < whole)


@functools.cache
def _launch(index: int | None) -> Launch:
    return Launch(_among_nan_kernel, num_warps=_WARPS, num_stages=1, sanitize_overflow=False)


@functools.cache
def _nan_word(dtype: torch.dtype) -> int:
    return int(torch.full((4 // dtype.itemsize,), math.nan, dtype=dtype).view(torch.int32))


def among_nan(part: Tensor, dim: int, before: int, after: int) -> Tensor | None:
    """part [.., S, ..] -> [.., before + S + after, ..], contiguous, NaN but for part.

    None where torch's pad is to do it: a part that is not contiguous, is negated by a flag alone, has other elements
    than those of floating point and 16 or 32 bits, or steps along `dim` that are no multiple of 16 bytes. `dim` is not
    counted from the back.
    """
    *lead, size = part.shape[: dim + 1]
    step = math.prod(part.shape[dim + 1 :]) * part.element_size()
    rows = math.prod(lead)
    takes = part.is_floating_point() and part.element_size() in (2, 4) and part.is_contiguous() and part.numel()
    if not takes or step % _VECTOR or part.data_ptr() % _VECTOR or rows > _MOST_ROWS or part.is_neg():
        return None
    vectors, all_sizes = step // _VECTOR, before + size + after
    out = part.new_empty((*lead, all_sizes, *part.shape[dim + 1 :]))
    index = part.get_device() if part.is_cuda else None
    launch, grid = _launch(index), (cdiv(all_sizes * vectors, _BLOCK), rows, 1)
    numbers = size * vectors, all_sizes * vectors, before * vectors, _nan_word(part.dtype), _BLOCK
    with launch_on(part, "among_nan"):
        if launch.direct:
            launch(index, part.data_ptr(), out.data_ptr(), *numbers, grid=grid)
        else:
            launch(index, *(x.view(-1).view(torch.int32) for x in (part, out)), *numbers, grid=grid)
    return out
