"""A CPU model of the Hopper tensor core: a gemm_fn that gives an H200's bits without one, for bfloat16 and float16.

For one element of C, K is added in order, 16 at a time, to one fp32 accumulator. In each step
  1. the 16 products are exact; a product's exponent is ea + eb, so its significand lies in [1, 4), not renormalised.
     A subnormal operand has the smallest normal exponent and no hidden bit;
  2. all 17 terms, products and accumulator, are aligned to the largest exponent among them and truncated toward zero
     to 25 fraction bits below it. A zero product has no exponent; a subnormal accumulator has -126, a zero one -133,
     so that a step never keeps bits below 2^-158;
  3. the 17 integers are added exactly, and the sum is truncated toward zero to fp32: 24 bits, fewer if subnormal.
     What reaches 2^128 is infinite.
Then, as in matmul.py: +0.0 is added (so no zero is negative), bias is added in fp32, and one rounding to
nearest even gives the output. NaN and infinity follow IEEE arithmetic, and every NaN is 0x7fffffff (16 bit: 0x7fff).

Measured on an H200 (torch 2.11, Triton 3.6) with benchmarks/probe_tensor_core.py, which tests each of these points.
MMA-Sim (arXiv 2511.10909) publishes most of them for this chip, with -126 for every zero. The -133 of a zero
accumulator is the only value that gives every bit of sums near 2^-149 (-132 misses 0.4% of them, -134 0.2%, no exponent
0.3%, -126 38%); the reason is not known. `Recipe` holds what such a probe may vary.

All of it is elementwise float64 arithmetic, and every operation is exact or a truncation: products have at most 22
bits, aligned terms are integers below 2^27 (their sum below 2^32), and scales are powers of two. So threads, tiles and
vector width cannot change the result, and infinity and NaN need no special case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dtypes import HALF_DTYPES as DTYPES
from .operands import check_promotion
from .reference import check_cpu_operands

_TILE_ROWS, _TILE_COLS = 64, 512  # of C at a time, so that the float64 tiles of one step stay in a core's cache
_LOWEST = -400  # for terms without an exponent: below that of every product (-266 for bf16)
_MIN_NORMAL, _MIN_SUBNORMAL, _OVERFLOW = 2.0**-126, 2.0**-149, 2.0**128  # of fp32


@dataclass(frozen=True)
class Recipe:
    """What may differ between tensor cores. The defaults are Hopper's, and what `matmul` computes.

    group: products added in one step.
    fraction_bits: kept below the largest exponent.
    accumulator_floor: the least exponent of an accumulator; None: no limit.
    zero_accumulator: the exponent of a zero accumulator; None: it has none.
    zero_products: whether a zero operand has the smallest normal exponent, instead of none.
    subnormal_inputs: "kept" as point 1 says; "normalized": with an exponent of their own; "zero".
    flush: whether subnormal sums become zero.
    saturate: whether overflow gives the largest finite fp32 instead of infinity.
    """

    group: int = 16
    fraction_bits: int = 25
    accumulator_floor: int | None = -126
    zero_accumulator: int | None = -133
    zero_products: bool = False
    subnormal_inputs: str = "kept"
    flush: bool = False
    saturate: bool = False


HOPPER = Recipe()


def _pow2(exponent: Tensor) -> Tensor:
    """2^exponent as float64, made from its bits; exponents from -1022 to 1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of float64 x, int16; -1023 for zero, 1024 for infinity and NaN."""
    return ((x.view(torch.int64) >> 52 & 0x7FF) - 1023).to(torch.int16)


def _decode(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """x of 16 bits -> its values, float64, and its exponents, int16, both contiguous."""
    digits, bias = (7, 127) if x.dtype == torch.bfloat16 else (10, 15)
    # from the bits, since a conversion flushes subnormals after torch.set_flush_denormal(True)
    bits = x.contiguous().view(torch.int16).to(torch.int64)
    field, fraction = bits >> digits & (2 * bias + 1), bits & (1 << digits) - 1
    exponent = field.clamp_min(1) - bias
    significand = fraction + ((field > 0).to(torch.int64) << digits)
    if recipe.subnormal_inputs == "zero":
        significand[field == 0] = 0
    value = significand.double() * _pow2(exponent - digits)
    special = field == 2 * bias + 1
    value[special] = torch.where(fraction[special] == 0, torch.inf, torch.nan).double()
    value = torch.where(bits < 0, -value, value)
    exponent = exponent.to(torch.int16)
    if recipe.subnormal_inputs == "normalized":
        exponent = torch.where(significand == 0, exponent, _exponent(value))
    if not recipe.zero_products:
        exponent[significand == 0] = _LOWEST
    return value, exponent


def _to_fp32(x: Tensor, lowest: int, highest: int, recipe: Recipe) -> Tensor:
    """float64 sums truncated toward zero to fp32 values; the bounds hold for their last bits and exponents."""
    x = (x.view(torch.int64) & -(1 << 29)).view(torch.float64)  # 53 bits to 24, a quiet NaN stays one
    if lowest < -149:
        x = (x / _MIN_SUBNORMAL).trunc_() * _MIN_SUBNORMAL
    if recipe.flush:
        x = torch.where(x.abs() < _MIN_NORMAL, 0.0, x)
    if highest >= 128:
        limit = torch.finfo(torch.float32).max if recipe.saturate else torch.inf
        over = (x.abs() >= _OVERFLOW) & x.isfinite()
        x = torch.where(over, x.sign() * limit, x)
    return x


def _tile(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], recipe: Recipe) -> Tensor:
    """The accumulators [M, N] (float64, holding values of fp32) for a = values, exponents [K, M, 1], b [K, 1, N]."""
    (a_values, a_exponents), (b_values, b_exponents) = a, b
    depth, rows, cols = a_values.shape[0], a_values.shape[1], b_values.shape[2]
    acc = torch.zeros((rows, cols), dtype=torch.float64, device=a_values.device)
    term, exponent = torch.empty_like(acc), torch.empty_like(acc, dtype=torch.int16)
    floor = _LOWEST if recipe.accumulator_floor is None else recipe.accumulator_floor
    zero_floor = _LOWEST if recipe.zero_accumulator is None else recipe.zero_accumulator
    for start in range(0, depth, recipe.group):
        ks = range(start, min(start + recipe.group, depth))
        top = _exponent(acc).clamp_min_(floor)
        if zero_floor != floor:
            top[acc == 0] = zero_floor
        for k in ks:
            torch.add(a_exponents[k], b_exponents[k], out=exponent)
            torch.maximum(top, exponent, out=top)
        top.clamp_min_(_LOWEST)
        scale = _pow2(recipe.fraction_bits - top)
        total = (acc * scale).trunc_()
        for k in ks:
            torch.mul(a_values[k], b_values[k], out=term)
            total += term.mul_(scale).trunc_()
        lowest, highest = int(top.min()) - recipe.fraction_bits, int(top.max()) + 7  # 17 terms below 4, or 33
        acc = _to_fp32(total * _pow2(top - recipe.fraction_bits), lowest, highest, recipe)
    return acc


def model(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    recipe: Recipe = HOPPER,
    promote_every: int | None = None,
) -> Tensor:
    """`matmul` with another recipe, for probes."""
    out_dtype = out_dtype or a.dtype
    check_cpu_operands(a, b, bias, out_dtype)
    stretch = check_promotion(promote_every) or a.shape[1]
    if a.dtype not in DTYPES:
        raise TypeError(
            f"a is {a.dtype}: the tensor core model takes {', '.join(map(str, DTYPES))}; IEEE fp32 products do not run "
            "on tensor cores: use kernels.gemm.reference.matmul or a GPU"
        )
    c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    with torch.no_grad():
        a_strips = [_decode(strip, recipe) for strip in a.t().split(_TILE_ROWS, dim=1)]
        for col in range(0, b.shape[1], _TILE_COLS):
            cols = slice(col, col + _TILE_COLS)
            b_values, b_exponents = _decode(b[:, cols], recipe)
            for i, (a_values, a_exponents) in enumerate(a_strips):
                # adding to +0.0 leaves no negative zero
                tile = a_values.new_zeros((a_values.shape[1], b_values.shape[1]), dtype=torch.float32)
                for k in range(0, a.shape[1], stretch):
                    ks = slice(k, k + stretch)
                    acc = _tile(
                        (a_values[ks].unsqueeze(2), a_exponents[ks].unsqueeze(2)),
                        (b_values[ks].unsqueeze(1), b_exponents[ks].unsqueeze(1)),
                        recipe,
                    )
                    tile += acc.float()
                if bias is not None:
                    tile += bias[cols].float()
                c[i * _TILE_ROWS : (i + 1) * _TILE_ROWS, cols] = tile
        fp32 = out_dtype == torch.float32
        c.view(torch.int32 if fp32 else torch.int16)[c.isnan()] = 0x7FFFFFFF if fp32 else 0x7FFF
    return c


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    promote_every: int | None = None,
) -> Tensor:
    """c = a @ b (+ bias), the bits that kernels.gemm.matmul.matmul gives on a Hopper GPU. A gemm_fn, on CPU tensors.

    Args:
        a: [M, K], any strides; bfloat16 or float16.
        b: [K, N], any strides, of a's dtype.
        bias: [N] or None; bfloat16, float16 or float32, added in fp32.
        out_dtype: any of those; a's if None.
        promote_every: as for kernels.gemm.matmul.matmul.

    Returns:
        [M, N], contiguous. After torch.set_flush_denormal(True) subnormal results are zero, which a GPU's are not.

    Raises:
        ValueError: shapes that do not agree, an empty operand, an operand not on the CPU.
        TypeError: dtypes that differ or are not supported (float32 among them: it runs on no tensor core).
    """
    return model(a, b, bias, out_dtype, promote_every=promote_every)
