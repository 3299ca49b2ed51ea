"""Draws from softmax in Triton: the id with the largest score plus a Gumbel number, which is drawn like softmax's.

    value = x + g,   g = -log(-log(u)),   u of (key, position, vocabulary index) alone, by Philox4x32-10

A row is cut into blocks, each of one program, and `largest` compares their values; so do the ranks that hold parts of a
vocabulary. All but integers is fp64 and one IEEE operation at a time, log too (see reference_draw.log), launched with
enable_fp_fusion=False: a CPU, a GPU and the reference draw the same id with the same value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, launch_on, next_power_of_2, readable_rows
from ..plans import Kernel
from . import reference_draw
from .reference_draw import exp_weights, largest

MAX_BLOCK = 1024  # columns of a program; sets the speed only
_TERMS = tl.constexpr(reference_draw._TERMS)
_SQRT_HALF_BITS = tl.constexpr(reference_draw._SQRT_HALF_BITS)
_LN2_HIGH = tl.constexpr(reference_draw._LN2_HIGH)
_LN2_LOW = tl.constexpr(reference_draw._LN2_LOW)
_HALF_UNIT = tl.constexpr(2.0**-53)

__all__ = ["draw", "exp_weights", "largest"]


@triton.jit
def _log(x):
    """See reference_draw.log."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    e = exponent.to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = tl.full(s.shape, 1 / (2 * _TERMS + 1), tl.float64)
    for k in tl.static_range(_TERMS - 1, 0, -1):
        series = series * square + 1 / (2 * k + 1)
    s = s + s
    return e * _LN2_HIGH + (s + (s * (square * series) + e * _LN2_LOW))


@triton.jit
def _gumbel(high, low):
    """See reference_draw.uniform."""
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    u = (bits * 2 + 1).to(tl.float64) * _HALF_UNIT
    return -_log(-_log(u))


@triton.jit
def _score(x_row, column, columns):
    """(the fp64 score at each column, -inf outside; whether it is NaN)"""
    x = tl.load(x_row + column, mask=(column >= 0) & (column < columns), other=-float("inf")).to(tl.float64)
    return x, x != x


@triton.jit(do_not_specialize=["first", "R"])
def _draw_kernel(x_ptr, key_ptr, value_ptr, id_ptr, stride, columns, first, R, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = first // 2 + part * (BLOCK // 2) + tl.arange(0, BLOCK // 2)  # of vocabulary indices; each is one call
    even = pair.to(tl.int64) * 2
    x_row = x_ptr + row * stride
    x0, nan0 = _score(x_row, even - first, columns)
    x1, nan1 = _score(x_row, even - first + 1, columns)
    value = tl.maximum(x0, x1)
    if tl.max(value, axis=0) > -float("inf"):  # else truncated altogether
        key, position = tl.load(key_ptr + row * 2), tl.load(key_ptr + row * 2 + 1)
        zero = tl.zeros((BLOCK // 2,), tl.uint32)
        low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
        high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        a, b, c, d = tl.philox(key, low, high, pair.to(tl.uint32), zero)
        x0 += _gumbel(a, b)
        x1 += _gumbel(c, d)
    value = tl.maximum(x0, x1)
    top = tl.max(value, axis=0)
    ids = tl.where(x0 == top, even, tl.where(x1 == top, even + 1, 0x7FFFFFFFFFFFFFFF))
    is_nan = tl.max((nan0 | nan1).to(tl.int32), axis=0) > 0  # maximum may drop them
    out = part * R.to(tl.int64) + row
    tl.store(value_ptr + out, tl.where(is_nan, float("nan"), top))
    tl.store(id_ptr + out, tl.min(ids, axis=0))


_draw = Kernel(_draw_kernel, enable_fp_fusion=False)


def draw(x: Tensor, key: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [R], values fp64 [R]): in each row the id with the largest value, the lowest of equal ones.

    x: fp32 [R, V], V > 0, scores of the ids `first` and following: logits over the temperature, -inf for ids that must
    not be drawn. key: int64 [R, 2], a key of 64 bits and a position. The value of a row is NaN where x has one, -inf
    where all of x is, and inf where x has inf; its id then means nothing.
    """
    r, v = x.shape
    block = min(MAX_BLOCK, max(16, next_power_of_2(v)))
    parts = cdiv(v + first % 2, block)  # a part of a vocabulary may begin with the second index of a pair
    values = torch.empty((parts, r), dtype=torch.float64, device=x.device)
    ids = torch.empty((parts, r), dtype=torch.int64, device=x.device)
    if r:
        x, key = readable_rows(x), key.contiguous()
        with launch_on(x, "draw"):
            _draw(
                x.device.index, (r, parts), (x, key, values, ids, x.stride(0), v, first, r), (block,),
                num_warps=max(1, block // 256),
            )  # fmt: skip
    return largest(values, ids)
