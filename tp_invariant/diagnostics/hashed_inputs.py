"""Inputs that are the same everywhere: hashes of a name and an index, whose bits make floating-point numbers.

They use no random number generator, which may change with a version, and no rounding.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor


def hashed(name: str, count: int) -> Tensor:
    """`count` 32-bit hashes, as int64, that depend only on the name and their index.

    Two rounds of xor-shift and multiply, as in MurmurHash3's last step; the factors are below 2^31, so that no product
    passes 2^63.
    """
    x = torch.arange(count, dtype=torch.int64) * 0x1E3779B9 + zlib.crc32(name.encode()) & 0xFFFFFFFF
    for factor, shift in ((0x21F0AAAD, 16), (0x735A2D97, 15)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x ^ x >> 15


def hashed_floats(name: str, shape: tuple[int, ...], dtype: torch.dtype, exponents: tuple[int, int]) -> Tensor:
    """Normal numbers with hashed signs, fractions, and exponents in [low, high); high - low is a power of two.

    dtype is bfloat16, float16 or float32.
    """
    digits, bias, bits = {
        torch.bfloat16: (7, 127, torch.int16),
        torch.float16: (10, 15, torch.int16),
        torch.float32: (23, 127, torch.int32),
    }[dtype]
    low, high = exponents
    x = hashed(name, math.prod(shape))
    field = (x >> 23 & high - low - 1) + low + bias  # the fraction has the bits below, the sign the highest
    magnitude = field << digits | x & (1 << digits) - 1
    return (magnitude - (x >> 31 << 8 * dtype.itemsize - 1)).to(bits).view(dtype).view(shape)
