"""Tile shapes and launch parameters of the matrix product, as data. Nothing here can change a bit of a result."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class MatmulConfig:
    """Tile shape and launch parameters of the matmul kernel. No field can change a bit of the result.

    block_m, block_n: the output tile of one program. Tensor cores reduce each element of a tile on its own, in the
        same way for every tile shape and instruction (mma.sync or wgmma).
    block_k: how much of K is loaded at a time. It must be a multiple of 16, the tensor core's own group of k, so that
        every value cuts K into the same groups of 16, taken in the same order by the one accumulator. Past the end of
        K zeros are added, which change no accumulator but a negative zero; the kernel maps that one to +0.0.
    num_warps, num_stages: who computes a tile, and how far ahead loads run.
    group_m: the order in which tiles start (L2 reuse).
    halves: whether the TMA kernel stores a tile in two halves, which takes less shared memory.

    Raises ValueError for a block that is not a power of two or is below 16, and for a count below 1.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    halves: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"MatmulConfig: {name} is {value}; allowed: powers of two from 16 up")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"MatmulConfig: num_warps is {self.num_warps}; allowed: powers of two from 1 up")
        for name in ("num_stages", "group_m"):
            if getattr(self, name) < 1:
                raise ValueError(f"MatmulConfig: {name} is {getattr(self, name)}; allowed: 1 or more")


def choose_config(m: int, n: int, k: int, dtype: torch.dtype) -> MatmulConfig:
    """Tile shape for an [m, k] by [k, n] product of `dtype` operands: a guess about speed, never about bits."""
    if dtype == torch.float32:
        # IEEE fp32 runs on the FMA units out of registers, where larger tiles spill.
        return MatmulConfig(16 if m <= 16 else 64, 64, 32, num_warps=4, num_stages=3)
    if m <= 64:
        # Reading B once is all the time there is: narrow tiles so that every SM reads a part of it, deep in K.
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        return MatmulConfig(block_m, 32 if n <= 4096 else 64, 128, num_warps=4, num_stages=4)
    if _cdiv(m, 128) * _cdiv(n, 256) >= 128:  # about one large tile for each SM of a Hopper chip
        return MatmulConfig(128, 256, 64, num_warps=8, num_stages=3)
    if _cdiv(m, 128) * _cdiv(n, 128) >= 64:
        return MatmulConfig(128, 128, 64, num_warps=8, num_stages=4)
    return MatmulConfig(64, 64, 64, num_warps=4, num_stages=4)


def choose_tma_config(m: int, n: int, out_dtype: torch.dtype) -> MatmulConfig:
    """The same for the TMA kernel: what benchmarks/tune_gemm.py found on an H200, as a rule. Never about bits."""
    if m <= 16:
        # bound by reading B: narrow tiles, so that all multiprocessors read
        return MatmulConfig(16, 32, 256, 4, 5) if n <= 4096 else MatmulConfig(16, 64, 128, 4, 6)
    if m <= 128:
        return MatmulConfig(64, 64, 128, 4, 6)
    # a whole tile of fp32 would leave no shared memory for the loads
    large = MatmulConfig(128, 256, 64, 8, 3, group_m=4, halves=out_dtype == torch.float32)
    medium = MatmulConfig(128, 128, 64, 4, 4)
    # A large tile does more with what it loads, a smaller one leaves fewer multiprocessors idle in the last round.
    return large if _rounds(m, n, large) * 2 * 0.9 <= _rounds(m, n, medium) else medium


def _rounds(m: int, n: int, config: MatmulConfig) -> int:
    """How many tiles the busiest of the 132 multiprocessors of an H100 or H200 computes."""
    return _cdiv(_cdiv(m, config.block_m) * _cdiv(n, config.block_n), 132)


@functools.cache
def shared_memory_of(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 48 * 1024)


def fit(config: MatmulConfig, itemsize: int, shared_memory: int) -> MatmulConfig:
    """`config` with stages, then tile sides, reduced until its operand buffers fit into `shared_memory` bytes."""

    def bytes_needed(c: MatmulConfig) -> int:
        return (c.block_m + c.block_n) * c.block_k * itemsize * c.num_stages

    while bytes_needed(config) > shared_memory:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif max(config.block_m, config.block_n) > 64:
            side = "block_n" if config.block_n >= config.block_m else "block_m"
            config = replace(config, **{side: getattr(config, side) // 2})
        else:
            break
    return config
