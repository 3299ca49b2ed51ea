"""Operands and outputs that TMA cannot address, by copies that it can, where that is faster than the generic kernel.

TMA needs rows that begin at multiples of 16 bytes: of a vocabulary of 50257 columns every row but each eighth begins
elsewhere. A copy whose rows have room for a few elements more has the same elements, and TMA reads no others, so C has
the same bits. Torch's own kernels for such operands are several times slower than those for others. Where rows of an
operand are multiples of 16 bytes and not of 32, TMA reads up to a fourth more than they hold, by twice the requests: a
copy may pay there too. On an H100 products of such operands took 1.2 to 1.6 times the time of aligned ones.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, next_power_of_2
from ..plans import Kernel, planned
from . import matmul_tma
from .matmul_configs import Product, choose_config, estimated_us, fit, tma_configs
from .matmul_table import COPIES, GENERIC
from .matmul_tma import tma_layout
from .operands import written

_BYTES_AT_ONCE = 256 << 20  # of copies of rows of A and C: what they take of memory besides a copy of B
_HOST_US = 5.0  # what a copy that is not needed must save at least, since the host needs as long to launch it
Unaligned = tuple[bool, bool, bool]  # whether A, B and C must be copied
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # what rows are copied in, by bytes
_UNITS_OF_A_PROGRAM, _UNITS_OF_A_ROW = 2048, 256


def copy_features(m: int, n: int, k: int, unaligned: Unaligned, out_itemsize: int) -> tuple[float, ...]:
    """What copies make the GPU do: launches, and megabytes that are read and written."""
    a, b, c = unaligned
    return a + b + c, 1e-6 * (4 * (a * m * k + b * n * k) + 2 * c * out_itemsize * m * n)


def generic_features(x: Product, dtype: torch.dtype) -> tuple[float, ...]:
    """What a product makes the generic kernel do, as `features` in matmul_configs.py: a launch, rounds of tiles, K of
    these, elements that are loaded one by one, and products.

    Of a size or a stride Triton knows whether 16 divides it, and nothing else. So an operand is loaded one element at a
    time where 16 does not divide the distance between its rows or their length: TMA needs 8, and of the distance alone.
    """
    config = fit(choose_config(x.m, x.n, x.k, dtype), dtype.itemsize, 227 * 1024)
    rounds = -(-(-(-x.m // config.block_m) * -(-x.n // config.block_n)) // x.multiprocessors)
    rounds_k = rounds * -(-x.k // config.block_k) * config.block_k
    row_a, row_b = x.m if x.a_transposed else x.k, x.k if x.b_transposed else x.n
    single = config.block_m * (x.a_split or row_a % 16 > 0) + config.block_n * (x.b_split or row_b % 16 > 0)
    return 1.0, rounds, 1e-3 * rounds_k, 1e-5 * rounds_k * single, 1e-7 * rounds_k * config.block_m * config.block_n


@planned
def _which(product: Product, unaligned: Unaligned, dtype: torch.dtype, promoted: bool) -> Unaligned | None:
    """What to copy for the TMA kernel to take the least time by estimate; None where the generic kernel takes less.

    unaligned: what TMA cannot address, which is copied. A and B besides, where their rows are split, if that is less.
    """
    sizes, best = product[:3], None
    least = math.inf
    if any(unaligned):
        least = estimated_us(GENERIC, generic_features(product, dtype))
    for a_too, b_too in itertools.product(*[(False, True) if split else (False,) for split in product[5:7]]):
        copies = unaligned[0] or a_too, unaligned[1] or b_too, unaligned[2]
        as_copied = product._replace(
            a_split=product.a_split and not copies[0], b_split=product.b_split and not copies[1]
        )
        us = estimated_us(COPIES, copy_features(*sizes, copies, product.out_itemsize))
        us += tma_configs(as_copied, promoted)[0][0] + _HOST_US * (copies.count(True) - unaligned.count(True))
        if us < least:
            least, best = us, copies
    return best


def worthwhile_copies(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None, promote_every: int | None, always: bool = False
) -> Unaligned | None:
    """What `copied_matmul` copies; None where it has no result, besides one for which there is no memory."""
    (m, k), n = a.shape, b.shape[1]
    if not matmul_tma.supports_tma(a, 0, out_dtype) or max(m, n, k) > matmul_tma.MAX_SIDE:
        return None
    addressable = tma_layout(a), tma_layout(b)
    c_fits = _fits(n, out_dtype) if out is None else _is_addressable(out)
    unaligned: Unaligned | None = (addressable[0] is None, addressable[1] is None, not c_fits)
    if not always:
        a_split, b_split = (x is None or x[0].strides[0] % 16 > 0 for x in addressable)
        if not any(unaligned) and not a_split and not b_split:
            return None
        multiprocessors = matmul_tma.multiprocessors_of(a.get_device())
        product = Product(
            m, n, k, _is_transposed(a), _is_transposed(b), a_split, b_split, out_dtype.itemsize, multiprocessors
        )  # fmt: skip
        unaligned = _which(product, unaligned, a.dtype, bool(promote_every))
    return unaligned if unaligned is not None and any(unaligned) else None


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

    None where TMA does not support the device or the dtypes, where nothing needs to be copied, and where the generic
    kernel is estimated to be faster. `always` leaves out the estimate, and copies what TMA cannot address.
    """
    unaligned = worthwhile_copies(a, b, out_dtype, out, promote_every, always)
    if unaligned is None:
        return None
    (m, k), n, addressable = a.shape, b.shape[1], tma_layout(a)
    copies_a, copies_b, copies_c = unaligned
    result = torch.empty((m, n), device=a.device, dtype=out_dtype) if out is None else out
    if copies_b:
        try:
            b = _copy(b)
        except torch.OutOfMemoryError:
            return None
    per_row = copies_a * k * a.element_size() + copies_c * n * out_dtype.itemsize
    at_once = max(256, _BYTES_AT_ONCE // max(1, per_row) // 256 * 256)
    for first in range(0, m, at_once):
        rows = slice(first, first + at_once)
        here = result[rows]
        c = _with_room(here) if copies_c else here
        if accumulate and copies_c:
            _copy_rows(here, c)
        part = a[rows]
        if copies_a:
            try:
                part = _copy(part)
            except torch.OutOfMemoryError:
                if addressable is None:
                    raise
        operands = matmul_tma.tma_operands(part, b, out_dtype, c)
        assert operands is not None
        matmul_tma.tma_matmul(operands, bias, out_dtype, out=c, accumulate=accumulate, promote_every=promote_every)
        if copies_c:
            _copy_rows(c, here)
    return result if out is None else written(result)


def _is_transposed(x: Tensor) -> bool:
    """Whether the columns stand in memory one after another, and the rows do not."""
    return x.stride(0) == 1 and x.stride(1) != 1


def _fits(columns: int, dtype: torch.dtype) -> bool:
    return columns * dtype.itemsize % 16 == 0


def _is_addressable(c: Tensor) -> bool:
    dense = c.stride(1) == 1 and c.stride(0) >= c.shape[1]
    return dense and c.data_ptr() % 16 == 0 and _fits(c.stride(0), c.dtype)


def _with_room(x: Tensor) -> Tensor:
    """Memory for x with rows that begin at multiples of 128 bytes."""
    unit = 128 // x.element_size()
    rows, cols = x.shape
    return torch.empty((rows, -(-cols // unit) * unit), device=x.device, dtype=x.dtype)[:, :cols]


def _copy(x: Tensor) -> Tensor:
    return _copy(x.t()).t() if _is_transposed(x) else _copy_rows(x, _with_room(x))


# If an alignment of the target were known, a thread would have several units of a row, and the loads of a warp would
# lie apart: with units of two bytes a copy then took 1.6 times torch's time on an H100.
@triton.jit(do_not_specialize_on_alignment=["from_stride", "to_stride"])
def _copy_kernel(
    from_ptr, to_ptr, rows, columns, from_stride, to_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    in_a_row = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // in_a_row * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % in_a_row * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row = row.to(tl.int64)[:, None]
    x = tl.load(from_ptr + row * from_stride + column[None, :], mask=inside)
    tl.store(to_ptr + row * to_stride + column[None, :], x, mask=inside)


_copy_by_units = Kernel(_copy_kernel)


def _copy_rows(x: Tensor, to: Tensor) -> Tensor:
    """to, after x, which has its shape and dtype, is copied there: where rows are contiguous, by a kernel of its own.

    Torch copies such rows element by element. Here it is by the largest unit that divides rows and what is between: at
    1.5 to 1.8 times torch's speed.
    """
    if x.stride(1) != 1 or to.stride(1) != 1:
        return to.copy_(x)
    size = x.element_size()
    lengths = x.shape[1], x.stride(0), to.stride(0), x.storage_offset(), to.storage_offset()  # the last two for view
    places = [x.data_ptr(), to.data_ptr(), *(size * n for n in lengths)]
    unit = next(unit for unit in _UNITS if all(place % unit == 0 for place in places))
    source, target = x.view(_UNITS[unit]), to.view(_UNITS[unit])
    rows, columns = source.shape
    at_once = min(_UNITS_OF_A_ROW, next_power_of_2(columns))
    constants = _UNITS_OF_A_PROGRAM // at_once, at_once
    grid = (cdiv(rows, constants[0]) * cdiv(columns, at_once),)
    args = source, target, rows, columns, source.stride(0), target.stride(0)
    _copy_by_units(x.get_device(), grid, args, constants)
    return to
