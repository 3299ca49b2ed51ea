"""The row sums of a cross-entropy in Triton, over a part of the vocabulary, exact and therefore without an order.

    row_extremes   the largest and the smallest logit of each row
    row_sums       sum of exp(x - top), and sum of x - top, in fixed point
    logits_grad    dx = p * of_p - everywhere - [column is the target] * of_target,  p = exp(x - top - log_sum)

A maximum rounds nothing. exp(x - top) is at most one, so a multiple of 2^-exp_bits stands for it in an int64, and sums
of integers are exact: any split of a row over ranks, programs, threads or loop steps gives the same bits. (Kulisch's
exact accumulator, short because the terms are bounded.) What is left is elementwise, launched with
enable_fp_fusion=False so that every operation rounds on its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dtypes import DTYPES
from ..launch import Launches, cdiv, interpreting, launch_on, next_power_of_2

MAX_BLOCK = 4096  # columns at a time; sets the speed only


@triton.jit
def _extremes_kernel(x_ptr, high_ptr, low_ptr, stride, columns, BLOCK: tl.constexpr, WITH_LOW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    high = tl.full((BLOCK,), -float("inf"), tl.float32)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < columns
        x = tl.load(x_ptr + row * stride + cols, mask=inside, other=-float("inf")).to(tl.float32)
        nans = nans | (x != x).to(tl.int32)  # maximum may drop them
        high = tl.maximum(high, x)
        if WITH_LOW:
            low = tl.minimum(low, tl.where(inside, x, float("inf")))
    top = tl.where(tl.max(nans, axis=0) > 0, float("nan"), tl.max(high, axis=0))
    tl.store(high_ptr + row, top)
    if WITH_LOW:
        tl.store(low_ptr + row, tl.min(low, axis=0))


@triton.jit
def _sums_kernel(
    x_ptr, top_ptr, scale_ptr, exps_ptr, shifts_ptr, stride, columns,
    ONE: tl.constexpr, BLOCK: tl.constexpr, WITH_SHIFTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(top_ptr + row)
    exps = tl.zeros((BLOCK,), tl.int64)
    shifts = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < columns, other=-float("inf")).to(tl.float32) - top
        x = tl.where(x <= 0, x, -float("inf"))  # NaN, in rows whose top is not finite
        exps += (tl.exp(x) * ONE).to(tl.int64)
        if WITH_SHIFTS:
            shifts += tl.where(x > -float("inf"), x * tl.load(scale_ptr + row), 0.0).to(tl.int64)
    tl.store(exps_ptr + row, tl.sum(exps, axis=0))
    if WITH_SHIFTS:
        tl.store(shifts_ptr + row, tl.sum(shifts, axis=0))


@triton.jit(do_not_specialize=["first", "ignore_index"])
def _grad_kernel(
    x_ptr, target_ptr, top_ptr, log_sum_ptr, of_p_ptr, of_target_ptr, everywhere_ptr, dx_ptr,
    stride, N, columns, first, ignore_index, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    read = (cols < columns) & (target != ignore_index)
    x = tl.load(x_ptr + row * stride + cols, mask=read, other=0.0).to(tl.float32)
    p = tl.exp((x - tl.load(top_ptr + row)) - tl.load(log_sum_ptr + row))
    dx = p * tl.load(of_p_ptr + row) - tl.load(everywhere_ptr + row)
    dx = tl.where(cols + first == target, dx - tl.load(of_target_ptr + row), dx)
    dx = tl.where(read, dx, 0.0)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


_extremes = Launches(_extremes_kernel, enable_fp_fusion=False)
_sums = Launches(_sums_kernel, enable_fp_fusion=False)
_grad = Launches(_grad_kernel, enable_fp_fusion=False)


def _rows(logits: Tensor) -> tuple[Tensor, int]:
    """[T, N] with neighbouring columns, copied if it is not so, and its row stride."""
    if interpreting():
        logits = logits.float()  # the interpreter gets bfloat16 wrong: let it see fp32 only
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, logits.stride(0)


def _block(columns: int) -> tuple[int, int]:
    """Columns at a time, and warps."""
    block = min(MAX_BLOCK, max(16, next_power_of_2(columns)))
    return block, max(1, min(8, block // 512))


def _check(operation: str, logits: Tensor, columns: int) -> None:
    if logits.dim() != 2:
        raise ValueError(f"{operation}: logits has shape {tuple(logits.shape)}; allowed: [rows, columns]")
    if logits.dtype not in DTYPES:
        raise TypeError(f"{operation}: logits has dtype {logits.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if not 0 <= columns <= logits.shape[1]:
        raise ValueError(f"{operation}: columns is {columns}; allowed: 0 to {logits.shape[1]}")


def row_extremes(logits: Tensor, columns: int, *, with_low: bool) -> tuple[Tensor, Tensor | None]:
    """(largest, smallest or None) of the first `columns` of each row: fp32 [T]; -inf and inf where there are none.

    logits: [T, N], bfloat16, float16 or float32. A row with a NaN has NaN for its largest.
    """
    _check("row_extremes", logits, columns)
    high = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    low = torch.empty_like(high) if with_low else None
    if len(high):
        x, stride = _rows(logits)
        block, warps = _block(columns)
        with launch_on(logits, "row_extremes"):
            _extremes(
                logits.device.index, (len(high),), (x, high, high if low is None else low, stride, columns),
                (block, with_low), num_warps=warps,
            )  # fmt: skip
    return high, low


def row_sums(
    logits: Tensor, columns: int, top: Tensor, *, exp_bits: int, shift_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(sum of exp(x - top), sum of x - top or None) over the first `columns` of each row, in fixed point: int64 [T].

    Each term is multiplied by 2^exp_bits, or by its row's `shift_scale`, and loses its fraction.

    Args:
        logits: [T, N], bfloat16, float16 or float32.
        top: fp32 [T], at least every logit of its row; the sums of rows where it is not finite mean nothing.
        exp_bits: so few that columns * 2^exp_bits, over all parts of the vocabulary, stays within int64.
        shift_scale: fp32 [T], powers of two with the same purpose, or None. An x of -inf adds nothing.
    """
    _check("row_sums", logits, columns)
    exps = torch.empty(logits.shape[0], device=logits.device, dtype=torch.int64)
    shifts = None if shift_scale is None else torch.empty_like(exps)
    if len(exps):
        x, stride = _rows(logits)
        scale, shifts_out = (top, exps) if shift_scale is None or shifts is None else (shift_scale, shifts)
        block, warps = _block(columns)
        with launch_on(logits, "row_sums"):
            _sums(
                logits.device.index, (len(exps),), (x, top, scale, exps, shifts_out, stride, columns),
                (2.0**exp_bits, block, shifts is not None), num_warps=warps,
            )  # fmt: skip
    return exps, shifts


def logits_grad(
    logits: Tensor, columns: int, first: int, target: Tensor, ignore_index: int, top: Tensor, log_sum: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """dx [T, N] in the logits' dtype, by the formula at the top; zero from `columns` on and in rows that are ignored.

    Args:
        logits: [T, N], bfloat16, float16 or float32; its column 0 is column `first` of the whole vocabulary.
        target: int64 [T], columns of the whole vocabulary, or ignore_index.
        top, log_sum: fp32 [T], with log_sum = log(sum of exp(x - top)).
        factors: of_p, of_target, everywhere, each fp32 [T].
    """
    _check("logits_grad", logits, columns)
    t, n = logits.shape
    dx = torch.empty((t, n), device=logits.device, dtype=torch.float32 if interpreting() else logits.dtype)
    if t and n:
        x, stride = _rows(logits)
        block, warps = _block(n)
        with launch_on(logits, "logits_grad"):
            _grad(
                logits.device.index, (t, cdiv(n, block)),
                (x, target, top, log_sum, *factors, dx, stride, n, columns, first, ignore_index),
                (block,), num_warps=warps,
            )  # fmt: skip
    return dx.to(logits.dtype)
