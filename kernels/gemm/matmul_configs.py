"""Tile shapes and launch parameters of the matrix product, as data. Nothing here can change a bit of a result."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .matmul_table import LAYOUTS, TIMES


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class MatmulConfig:
    """Tile shape and launch parameters of the matmul kernel. No field can change a bit of the result.

    block_m, block_n: the output tile of one program. Tensor cores compute each element of a tile separately, in the
        same way for every tile shape and instruction (mma.sync or wgmma).
    block_k: how much of K is loaded at a time. It must be a multiple of 16, the number of k that a tensor core adds in
        one step, so that every value gives the same steps in the same order. Past the end of K zeros are added, which
        change no accumulator but a negative zero; the kernel makes that +0.0.
    num_warps, num_stages: the warps that compute a tile, and the number of pipeline stages for loads.
    group_m: the order in which tiles start (L2 reuse).
    halves: whether the TMA kernel stores a tile in two halves, which takes less shared memory.

    The TMA kernel also takes a block_n of 3 * 2**n (with halves): two products side by side, the second `narrow`
    columns wide. It fills a GPU whose multiprocessors are not a power of two: 128 tiles of 128 x 192 are 2048 x 1536.

    Raises ValueError for other blocks, for one below 16, and for a count below 1.
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
            if value < 16 or (value & (value - 1) and not (name == "block_n" and self.narrow >= 16 and self.halves)):
                raise ValueError(f"MatmulConfig: {name} is {value}; allowed: powers of two from 16 up")
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"MatmulConfig: num_warps is {self.num_warps}; allowed: powers of two from 1 up")
        for name in ("num_stages", "group_m"):
            if getattr(self, name) < 1:
                raise ValueError(f"MatmulConfig: {name} is {getattr(self, name)}; allowed: 1 or more")

    @property
    def narrow(self) -> int:
        """A third of a block_n of 3 * 2**n; 0 for a power of two."""
        third, left_over = divmod(self.block_n, 3)
        return third if not left_over and third & (third - 1) == 0 else 0


def promoted_block_k(block_k: int, promote_every: int | None) -> int:
    """block_k, or the largest part of it that divides promote_every."""
    while promote_every and promote_every % block_k:
        block_k //= 2
    return block_k


def choose_config(m: int, n: int, k: int, dtype: torch.dtype, spare_registers: bool = False) -> MatmulConfig:
    """Tile shape for an [m, k] by [k, n] product of `dtype` operands: a heuristic for speed; no choice changes bits.

    spare_registers: promoting needs a second accumulator, and accumulating the contents of c; the largest tile spills.
    """
    if dtype == torch.float32:
        # IEEE fp32 runs on the FMA units out of registers, where larger tiles spill.
        return MatmulConfig(16 if m <= 16 else 64, 64, 32, num_warps=4, num_stages=3)
    if m <= 64:
        # Bound by reading B once: narrow tiles, so that every SM reads a part of B, and a large block_k.
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        return MatmulConfig(block_m, 32 if n <= 4096 else 64, 128, num_warps=4, num_stages=4)
    if (
        _cdiv(m, 128) * _cdiv(n, 256) >= 128 and not spare_registers
    ):  # about one large tile for each SM of a Hopper chip
        return MatmulConfig(128, 256, 64, num_warps=8, num_stages=3)
    if _cdiv(m, 128) * _cdiv(n, 128) >= 64:
        return MatmulConfig(128, 128, 64, num_warps=8, num_stages=4)
    return MatmulConfig(64, 64, 64, num_warps=4, num_stages=4)


# The bytes of a Hopper multiprocessor's shared memory for the operands' stages and the output tile.
_TMA_SHARED_MEMORY = 226 * 1024


def fits_tma(config: MatmulConfig, out_itemsize: int, promoted: bool = False) -> bool:
    """Whether the TMA kernel has enough shared memory and registers for `config` with 16-bit operands."""
    # a thread has 255 registers: two accumulators of 96 fit, two of 128 spill
    fits_registers = not promoted or config.block_m * config.block_n <= 96 * 32 * config.num_warps
    return fits_registers and _tma_bytes(config, out_itemsize, c_tiles=1) < _TMA_SHARED_MEMORY


def _tma_bytes(config: MatmulConfig, out_itemsize: int, c_tiles: int) -> int:
    stages = (config.block_m + config.block_n) * config.block_k * 2 * config.num_stages
    c_cols = (config.block_n - config.narrow) // (2 if config.halves else 1)
    return stages + c_tiles * config.block_m * c_cols * out_itemsize


def is_flattened(config: MatmulConfig, out_itemsize: int, accumulate: bool, promoted: bool) -> bool:
    """Whether the TMA kernel makes one loop of tiles and K, so that a tile's loads start while another is stored.

    Not with two products side by side, where it is slower (128 x 192 at 2048 x 1536 x 4096: 59 us against 41), nor with
    promotion, because Triton does not flatten three nested loops. In the one loop the contents of c are loaded while
    all stages of the operands are in use, so a large tile that accumulates has no room for it. It is worth more than
    the loop: on an H100, with 16384 tokens, the gradient of a 4096 x 4096 weight is added in 718 us by tiles of 128 x
    256, and in 902 us by the tiles that have the room.
    """
    if config.narrow or promoted:
        return False
    return not accumulate or _tma_bytes(config, out_itemsize, c_tiles=2) < _TMA_SHARED_MEMORY


def is_sensible(config: MatmulConfig, m: int, n: int) -> bool:
    """False for tiles that are mostly outside of C, and for small ones of a large C: these are not timed nor taken."""
    if config.block_m > max(64, 2 * _power_of_two(m)) or config.block_n > max(32, 2 * _power_of_two(n)):
        return False
    share = config.block_m * config.block_n / (128 * 256)
    tiles = _cdiv(m, config.block_m) * _cdiv(n, config.block_n)
    return not ((tiles > 1000 and share < 0.53) or (tiles > 500 and share < 1 / 3))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Product(NamedTuple):
    """A product of 16-bit operands, as the estimate of its time sees it: its sizes, and how A and B are in memory.

    a_split, b_split: whether rows in memory are no multiple of 32 bytes, the unit in which the L2 cache is read
    """

    m: int
    n: int
    k: int
    a_transposed: bool
    b_transposed: bool
    a_split: bool
    b_split: bool
    out_itemsize: int
    multiprocessors: int


def features(config: MatmulConfig, x: Product) -> tuple[float, ...]:
    """What a product makes the TMA kernel do; the table has microseconds for each.

    A launch; rounds of tiles, since a GPU computes one tile on each multiprocessor at a time; K of these rounds, in
    thousands; the same as if the last round were shared by all; megabytes of A, B and C; megabytes that tiles read; of
    these, those of a split A and of a split B; the share of multiprocessors that have a tile at all.
    """
    tiles = _cdiv(x.m, config.block_m) * _cdiv(x.n, config.block_n)
    rounds, shared = _cdiv(tiles, x.multiprocessors), tiles / x.multiprocessors
    steps_k = _cdiv(x.k, config.block_k) * config.block_k
    megabytes = (2 * (x.m * x.k + x.n * x.k) + x.out_itemsize * x.m * x.n) * 1e-6
    read_a, read_b = (2e-6 * tiles * block * steps_k for block in (config.block_m, config.block_n))
    work = rounds, 1e-3 * rounds * steps_k, 1e-3 * shared * steps_k
    return 1.0, *work, megabytes, read_a + read_b, x.a_split * read_a, x.b_split * read_b, min(1.0, shared)


def estimated_us(coefficients: Sequence[float], quantities: Sequence[float]) -> float:
    return sum(map(operator.mul, coefficients, quantities))


_TIMES = {layout: [(MatmulConfig(*fields), us) for fields, us in times.items()] for layout, times in TIMES.items()}


def tma_configs(x: Product, promoted: bool = False) -> list[tuple[float, MatmulConfig]]:
    """The table's configurations that fit, with their estimated microseconds, the fastest first. None changes bits."""
    estimates = [
        (not is_sensible(config, x.m, x.n), estimated_us(coefficients, features(config, x)), config)
        for config, coefficients in _TIMES[LAYOUTS[x.a_transposed, x.b_transposed]]
        if fits_tma(config, x.out_itemsize, promoted)
    ]
    return [(us, config) for _, us, config in sorted(estimates, key=operator.itemgetter(0, 1))]


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
