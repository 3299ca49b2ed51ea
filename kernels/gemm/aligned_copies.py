"""Operands and outputs that TMA cannot address, by copies that it can, where that is faster than the generic kernel.

TMA needs rows that begin at multiples of 16 bytes: of a vocabulary of 50257 columns every row but each eighth begins
elsewhere. A copy whose rows have room for a few elements more has the same elements, and TMA reads no others, so C has
the same bits. Torch's own kernels for such operands are several times slower than those for others.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import matmul_tma
from .matmul_configs import choose_config, estimated_us, fit, tma_configs
from .matmul_table import COPIES, GENERIC
from .matmul_tma import tma_layout
from .output import written

_BYTES_AT_ONCE = 256 << 20  # of copies of rows of A and C: what they take of memory besides a copy of B
Unaligned = tuple[bool, bool, bool]  # whether A, B and C must be copied


def copy_features(m: int, n: int, k: int, unaligned: Unaligned, out_itemsize: int) -> tuple[float, ...]:
    """What copies make the GPU do: launches, and megabytes that are read and written."""
    a, b, c = unaligned
    return a + b + c, 1e-6 * (4 * (a * m * k + b * n * k) + 2 * c * out_itemsize * m * n)


def generic_features(
    m: int, n: int, k: int, unaligned: Unaligned, dtype: torch.dtype, multiprocessors: int
) -> tuple[float, ...]:
    """What a product makes the generic kernel do, as `features` in matmul_configs.py: a launch, rounds of tiles, K of
    these, elements that are loaded one by one since they are not aligned, and products."""
    config = fit(choose_config(m, n, k, dtype), dtype.itemsize, 227 * 1024)
    rounds = -(-(-(-m // config.block_m) * -(-n // config.block_n)) // multiprocessors)
    rounds_k = rounds * -(-k // config.block_k) * config.block_k
    single = config.block_m * unaligned[0] + config.block_n * unaligned[1]
    return 1.0, rounds, 1e-3 * rounds_k, 1e-5 * rounds_k * single, 1e-7 * rounds_k * config.block_m * config.block_n


@functools.lru_cache(maxsize=4096)
def _pay(
    m: int, n: int, k: int, transposed: tuple[bool, bool], unaligned: Unaligned, dtype: torch.dtype,
    out_itemsize: int, accumulate: bool, promoted: bool, multiprocessors: int,
) -> bool:  # fmt: skip
    """Whether copies and the TMA kernel are estimated to take less time than the generic kernel."""
    product = tma_configs(m, n, k, *transposed, out_itemsize, multiprocessors, accumulate, promoted)[0][0]
    copies = estimated_us(COPIES, copy_features(m, n, k, unaligned, out_itemsize))
    return product + copies < estimated_us(GENERIC, generic_features(m, n, k, unaligned, dtype, multiprocessors))


def copied_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate: bool = False,
    promote_every: int | None = None,
    always: bool = False,
) -> Tensor | None:
    """`matmul`, whose arguments these are and which has checked them, on the current device; or None.

    None where TMA does not support the device or the dtypes, and where the generic kernel is estimated to be faster;
    `always` leaves out the estimate.
    """
    (m, k), n = a.shape, b.shape[1]
    if not matmul_tma.supports_tma(a, 0, out_dtype) or max(m, n, k) > matmul_tma.MAX_SIDE:
        return None
    result = torch.empty((m, n), device=a.device, dtype=out_dtype) if out is None else out
    unaligned = tma_layout(a) is None, tma_layout(b) is None, not _is_addressable(result)
    transposed = _is_transposed(a), _is_transposed(b)
    multiprocessors = matmul_tma.multiprocessors_of(a.get_device())
    facts = m, n, k, transposed, unaligned, a.dtype, out_dtype.itemsize, accumulate, bool(promote_every)
    if not always and not _pay(*facts, multiprocessors):
        return None
    b = _aligned(b)
    per_row = unaligned[0] * k * a.element_size() + unaligned[2] * n * out_dtype.itemsize
    at_once = max(256, _BYTES_AT_ONCE // max(1, per_row) // 256 * 256)
    for first in range(0, m, at_once):
        rows = slice(first, first + at_once)
        a_rows, here = _aligned(a[rows]), result[rows]
        c = here if not unaligned[2] else _with_room(here)
        if accumulate and c is not here:
            c.copy_(here)
        operands = matmul_tma.tma_operands(a_rows, b, out_dtype, c)
        assert operands is not None
        matmul_tma.tma_matmul(operands, bias, out_dtype, out=c, accumulate=accumulate, promote_every=promote_every)
        if c is not here:
            here.copy_(c)
    return result if out is None else written(result)


def _is_transposed(x: Tensor) -> bool:
    """Whether the columns stand in memory one after another, and the rows do not."""
    return x.stride(0) == 1 and x.stride(1) != 1


def _is_addressable(c: Tensor) -> bool:
    begin, row = c.data_ptr(), c.stride(0) * c.element_size()
    return c.stride(1) == 1 and c.stride(0) >= c.shape[1] and begin % 16 == 0 and row % 16 == 0


def _with_room(x: Tensor) -> Tensor:
    """Memory for x with rows that TMA can address."""
    unit = 16 // x.element_size()
    rows, cols = x.shape
    return torch.empty((rows, -(-cols // unit) * unit), device=x.device, dtype=x.dtype)[:, :cols]


def _aligned(x: Tensor) -> Tensor:
    if tma_layout(x) is not None:
        return x
    if _is_transposed(x):
        return _aligned(x.t()).t()
    return _with_room(x).copy_(x)
