"""Operands that test one property of a tensor core each, and a comparison that names the kinds that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from tp_invariant.kernels.gemm.tensor_core import Recipe
from tp_invariant.testing import raw_bytes

Operands = tuple[Tensor, Tensor]


def numbers(
    shape: tuple[int, int], dtype: torch.dtype, low: int, high: int, generator: torch.Generator, zeros: float = 0.0
) -> Tensor:
    """Random signs and fractions, exponents from `low` to `high` (below the normal ones: subnormal), zeros too."""
    digits, bias = (7, 127) if dtype == torch.bfloat16 else (10, 15)

    def random(least: int, most: int) -> Tensor:
        return torch.randint(least, most + 1, shape, generator=generator)

    field = (random(low, high) + bias).clamp(0, 2 * bias)
    magnitude = field << digits | random(0, (1 << digits) - 1)
    magnitude[torch.rand(shape, generator=generator) < zeros] = 0
    bits = magnitude - (random(0, 1) << 15)
    return bits.to(torch.int16).view(dtype)


def _plain(low: int, high: int, zeros: float = 0.0) -> Callable[..., Operands]:
    def build(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
        a = numbers((m, k), dtype, low, high, generator, zeros)
        return a, numbers((k, n), dtype, low, high, generator, zeros)

    return build


def _two(a_range: tuple[int, int], b_range: tuple[int, int]) -> Callable[..., Operands]:
    def build(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
        return numbers((m, k), dtype, *a_range, generator), numbers((k, n), dtype, *b_range, generator)

    return build


def _cancelling(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Most products occur twice with opposite signs somewhere along K, so that the sum is small."""
    half_a, half_b = _plain(-8, 8)(m, n, k // 2, dtype, generator)
    other = torch.where(torch.rand(half_a.shape, generator=generator) < 0.02, half_a, -half_a)
    order = torch.randperm(k, generator=generator)
    return torch.cat([half_a, other], dim=1)[:, order], torch.cat([half_b, half_b])[order]


def _zero_beside_large(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Every second product is zero times the largest exponent; the others are small."""
    small, large = (-40, 120) if dtype == torch.bfloat16 else (-9, 15)
    a, b = _plain(small, small + 6)(m, n, k, dtype, generator)
    a[:, ::2] = 0.0
    b[::2] = numbers((k // 2, n), dtype, large, large, generator)
    return a, b


def _beyond_fp32(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Ordinary products, and in the third step of 16 two of 2^200 that cancel, which truncate all others to zero."""
    a, b = _plain(-4, 4)(m, n, k, dtype, generator)
    a[:, 40], a[:, 41] = 2.0**100, -(2.0**100)
    b[40:42] = 2.0**100
    return a, b


def _special(values: tuple[float, ...], rate: float) -> Callable[..., Operands]:
    def build(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
        operands = _plain(-4, 4, zeros=0.02)(m, n, k, dtype, generator)
        for x in operands:
            for value in values:
                x[torch.rand(x.shape, generator=generator) < rate] = value
        return operands

    return build


# name: (what builds it, the dtypes for which it means anything)
_BOTH, _BF16, _FP16 = (torch.bfloat16, torch.float16), (torch.bfloat16,), (torch.float16,)
CLASSES: dict[str, tuple[Callable[..., Operands], tuple[torch.dtype, ...]]] = {
    "ordinary": (_plain(-3, 3), _BOTH),
    "wide exponents": (_plain(-14, 14), _BOTH),
    "very wide exponents": (_plain(-55, 55), _BF16),
    "cancelling": (_cancelling, _BOTH),
    "zeros of both signs": (_plain(-12, 12, zeros=0.5), _BOTH),
    "mostly zeros": (_plain(-12, 12, zeros=0.9), _BOTH),
    "zero beside large": (_zero_beside_large, _BOTH),
    "subnormal times large": (_two((-132, -124), (100, 127)), _BF16),
    "subnormal and normal": (_two((-16, -13), (-16, 3)), _FP16),
    "subnormal times subnormal": (_plain(-15, -15), _FP16),
    "subnormal sums": (_plain(-70, -60), _BF16),
    "sums below subnormals": (_plain(-80, -70), _BF16),
    "subnormals all over": (_plain(-132, -50, zeros=0.2), _BF16),
    "overflow": (_plain(55, 63), _BF16),
    "products beyond fp32": (_beyond_fp32, _BF16),
    "infinity of one sign": (_special((float("inf"),), 0.002), _BOTH),
    "infinities": (_special((float("inf"), float("-inf")), 0.0015), _BOTH),
    "NaN": (_special((float("nan"), float("-nan")), 0.001), _BOTH),
    "anything": (_plain(-200, 200, zeros=0.05), _BOTH),
}
CASES = [(name, dtype) for name, (_, dtypes) in CLASSES.items() for dtype in dtypes]


def operands(name: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Operands:
    """a [m, k] and b [k, n] of a class; k is even, and at least 42 for "products beyond fp32"."""
    return CLASSES[name][0](m, n, k, dtype, torch.Generator().manual_seed(seed))


# one change of the recipe each
ALTERNATIVES = {
    "groups of 8": Recipe(group=8),
    "groups of 32": Recipe(group=32),
    "24 bits": Recipe(fraction_bits=24),
    "26 bits": Recipe(fraction_bits=26),
    "accumulators with their own exponent": Recipe(accumulator_floor=None, zero_accumulator=None),
    "zero accumulators from -126": Recipe(zero_accumulator=-126),
    "zero accumulators from -132": Recipe(zero_accumulator=-132),
    "zero accumulators from -134": Recipe(zero_accumulator=-134),
    "zero accumulators without": Recipe(zero_accumulator=None),
    "zero products count": Recipe(zero_products=True),
    "normalized subnormals": Recipe(subnormal_inputs="normalized"),
    "subnormals are zero": Recipe(subnormal_inputs="zero"),
    "flush": Recipe(flush=True),
    "saturate": Recipe(saturate=True),
}


# What an H200 gave (torch 2.11, Triton 3.6), all three of gpu_kernels() the same.
# (class, k): the first 16 digits of the digests of operands(class, *RECORDED_SHAPE, k, bfloat16) and of the fp32 sums
RECORDED_SHAPE = (128, 136)
RECORDED = {
    ("sums below subnormals", 16): ("a492f1664a9dd913", "71d984d97fed3ad6"),
    ("sums below subnormals", 32): ("4a7e8fc47758ab80", "e01fc46977aedb67"),
    ("sums below subnormals", 48): ("93d30aa22e2e8547", "533b03460223bc92"),
    ("sums below subnormals", 64): ("75284ba1da0a2734", "681c4d06407267c9"),
    ("sums below subnormals", 512): ("183a50a33096ed9f", "e8b8718933d8a7d6"),
    ("subnormals all over", 16): ("ef9ce483421b9a5b", "223a49fc43fb0c4e"),
    ("subnormals all over", 32): ("6661be68191a34be", "25e4584c1622d850"),
    ("subnormals all over", 48): ("edbb0c028f9f5166", "4d1a09787903b0ce"),
    ("subnormals all over", 64): ("2be000768f7bbd7f", "89fddaf399be2bcc"),
    ("subnormal sums", 16): ("a4b12939ba75f758", "af9669e6c72d3ea4"),
    ("subnormal sums", 32): ("966ede7c80780f4c", "c7287961c1fda90f"),
    ("subnormal sums", 48): ("1c6e5ebd8ae059fb", "26a31de068d6a3b7"),
    ("subnormal sums", 64): ("5b52f3972d761c2a", "ef62ba22e12fa971"),
}


def gpu_kernels() -> dict[str, Callable[..., Tensor]]:
    """Triton's paths to a tensor core: TMA and wgmma, pointers and wgmma, pointers and mma.sync."""
    from tp_invariant.kernels.gemm.matmul import matmul as triton_matmul
    from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig

    wgmma, mma = MatmulConfig(128, 64, 64, num_warps=4, num_stages=3), MatmulConfig(16, 32, 32, 4, 2)
    return {
        "bundled": triton_matmul,
        "wgmma": lambda a, b, **options: triton_matmul(a, b, config=wgmma, **options),
        "mma.sync": lambda a, b, **options: triton_matmul(a, b, config=mma, **options),
    }


def kind(value: float) -> str:
    if value != value:
        return "NaN"
    if abs(value) == float("inf"):
        return "infinity"
    if value == 0.0:
        return "zero"
    return "subnormal" if abs(value) < 2.0**-126 else "normal"


def mismatches(got: Tensor, want: Tensor, examples: int = 3) -> tuple[int, str]:
    """How many elements of got differ from want in their bytes, and which kinds of them, with some bit patterns."""
    got_bytes, want_bytes = raw_bytes(got), raw_bytes(want)
    differ = (got_bytes != want_bytes).any(dim=1).nonzero().flatten().tolist()
    flat = [t.cpu().reshape(-1).tolist() for t in (got, want)]
    kinds = Counter(f"{kind(flat[1][i])} expected, {kind(flat[0][i])} got" for i in differ)
    lines = [f"{count} x {name}" for name, count in kinds.most_common()]
    for i in differ[:examples]:
        bits = ["0x" + bytes(b[i].tolist()[::-1]).hex() for b in (want_bytes, got_bytes)]
        place = divmod(i, got.shape[1])
        lines.append(f"at {place}: expected {bits[0]} ({flat[1][i]!r}), got {bits[1]} ({flat[0][i]!r})")
    return len(differ), "\n".join(lines)
