"""Softmax, log-softmax and sums along rows in Triton, with bits that depend on the row alone.

    softmax    y = exp(x - top) / total        log    y = (x - top) - log(total)
               top = largest of the row, total = sum of exp(x - top), for log in fixed point: y has
               the bits of minus the cross-entropy (../vocabulary/loss_spec.py)
    softmax_backward    dx = y (dy - sum of dy y)
    row_sums   y = sum of x / divisor

One program per row, in fp32. As in norm.py, the order of a row's tree of additions follows from the chunk and the
warps, both functions of the row length alone, and from what the compiler knows of alignment, which `_rows` makes one
for all tensors of a row length. The length itself is no constexpr here: that of scores grows with every token, and each
new one would be compiled anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import interpreting, launch_on
from ..plans import Kernel
from ..vocabulary.cross_entropy import _log_of_sum, _plain_nan, _row_extremes, _row_sums
from ..vocabulary.loss_spec import fixed_point
from .norm import _rows, row_chunk


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, stride, H, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    top = tl.full((CHUNK,), -float("inf"), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        top = tl.maximum(top, tl.load(x_row + cols, mask=cols < H, other=-float("inf")).to(tl.float32))
    highest = tl.max(top, axis=0)  # may pass over a NaN, which then shows in the total
    exps = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row + cols, mask=cols < H, other=-float("inf")).to(tl.float32)
        exps += tl.where(cols < H, tl.exp(x - highest), 0.0)  # in a row of -inf the padding would be NaN
    total = tl.sum(exps, axis=0)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row + cols, mask=cols < H, other=0.0).to(tl.float32) - highest
        y = tl.div_rn(tl.exp(x), total)
        tl.store(y_ptr + row * H + cols, y.to(y_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def _log_softmax_kernel(x_ptr, y_ptr, stride, H, CHUNK: tl.constexpr, ONE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    top, _ = _row_extremes(x_row, H, H, CHUNK, False)
    top = top + 0.0
    exps, _ = _row_sums(x_row, H, H, top, 1.0, ONE, CHUNK, False)
    log_sum = _log_of_sum(top, exps, ONE)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row + cols, mask=cols < H, other=0.0).to(tl.float32)
        y = _plain_nan((x - top) - log_sum)
        tl.store(y_ptr + row * H + cols, y.to(y_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def _sums_kernel(x_ptr, y_ptr, stride, H, divisor, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        sums += tl.load(x_ptr + row * stride + cols, mask=cols < H, other=0.0).to(tl.float32)
    y = tl.div_rn(tl.sum(sums, axis=0), divisor)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _sums_of_products_kernel(dy_ptr, y_ptr, dots_ptr, H, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * H
    sums = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        dy = tl.load(dy_ptr + row + cols, mask=cols < H, other=0.0)
        sums += dy * tl.load(y_ptr + row + cols, mask=cols < H, other=0.0)
    tl.store(dots_ptr + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit
def _softmax_backward_kernel(dy_ptr, y_ptr, dots_ptr, dx_ptr, H, CHUNK: tl.constexpr):
    # Not in _sums_of_products_kernel, where a dx of 16 bits would give the compiler another order for the sum.
    row = tl.program_id(0).to(tl.int64) * H
    dot = tl.load(dots_ptr + tl.program_id(0))
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        dy = tl.load(dy_ptr + row + cols, mask=cols < H, other=0.0)
        dx = tl.load(y_ptr + row + cols, mask=cols < H, other=0.0) * (dy - dot)
        tl.store(dx_ptr + row + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < H)


_softmax = Kernel(_softmax_kernel, enable_fp_fusion=False)
_log_softmax = Kernel(_log_softmax_kernel, enable_fp_fusion=False)
_sums = Kernel(_sums_kernel, enable_fp_fusion=False)
_sums_of_products = Kernel(_sums_of_products_kernel, enable_fp_fusion=False)
_softmax_backward = Kernel(_softmax_backward_kernel, enable_fp_fusion=False)


def softmax(x: Tensor, *, log: bool, out_dtype: torch.dtype) -> Tensor:
    """Softmax, or log-softmax, of each row of x [T, H] -> contiguous [T, H] of out_dtype.

    x: bfloat16, float16 or float32, any strides; T may be 0. NaN for a row with a NaN or inf, or of -inf alone, as
    torch has it.
    """
    y = torch.empty(x.shape, device=x.device, dtype=torch.float32 if interpreting() else out_dtype)
    if x.shape[0] > 0:
        rows, stride = _rows(x)
        with launch_on(x, "softmax"):
            chunk, warps = row_chunk(x.shape[1])
            kernel, constants = (_log_softmax, (chunk, fixed_point(x.shape[1]))) if log else (_softmax, (chunk,))
            kernel(x.device.index, (x.shape[0],), (rows, y, stride, x.shape[1]), constants, num_warps=warps)
    return y.to(out_dtype)


def softmax_backward(dy: Tensor, y: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """y (dy - the sum of dy y) for each row of y and dy, float32 [T, H] -> contiguous [T, H] of out_dtype.

    The sum has the bits of `row_sums(dy * y)`.
    """
    dx = torch.empty(y.shape, device=y.device, dtype=torch.float32 if interpreting() else out_dtype)
    if y.shape[0] > 0:
        (dy, _), (y, _), dots = _rows(dy.contiguous()), _rows(y.contiguous()), y.new_empty(y.shape[0])
        with launch_on(y, "softmax_backward"):
            chunk, warps = row_chunk(y.shape[1])
            grid, options = (y.shape[0],), dict(num_warps=warps)
            _sums_of_products(y.device.index, grid, (dy, y, dots, y.shape[1]), (chunk,), **options)
            _softmax_backward(y.device.index, grid, (dy, y, dots, dx, y.shape[1]), (chunk,), **options)
    return dx.to(out_dtype)


def row_sums(x: Tensor, *, divisor: int, out_dtype: torch.dtype) -> Tensor:
    """The sum of each row of x [T, H], divided by `divisor` -> [T] of out_dtype; x as of softmax."""
    y = torch.empty(x.shape[0], device=x.device, dtype=torch.float32 if interpreting() else out_dtype)
    if x.shape[0] > 0:
        rows, stride = _rows(x)
        with launch_on(x, "row_sums"):
            chunk, warps = row_chunk(x.shape[1])
            args = rows, y, stride, x.shape[1], float(divisor)
            _sums(x.device.index, (x.shape[0],), args, (chunk,), num_warps=warps)
    return y.to(out_dtype)
