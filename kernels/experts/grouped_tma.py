"""Products by expert on Hopper: the sums of grouped.py's kernels, fed by the tensor memory accelerator (TMA).

    rows    C[rows of e] = A[rows of e] B[e] + bias[e]      A [R, K], B [E, K, N] or in memory [E, N, K], C [R, N]
    outer   C[e] = A[rows of e]ᵀ B[rows of e]               A [R, M], B [R, N], C [E, M, N]

Each tile goes through K in order with one fp32 accumulator, as in matmul_tma.py, so the bits are the same.

An expert's rows begin and end anywhere, and a tile must neither read nor write the rows of the next expert: a NaN there
times a zero is a NaN. TMA checks every coordinate against the size of its dim, but the end of an expert's rows is known
on the device alone. So the descriptor of R rows has two more dims of which only the addresses count, as in Triton's
tools/ragged_tma.py: row i of n rows that begin at f is at (2**30, f + n, 2**30 - n + i, col), where the third dim has
2**30 rows, so that it ends where the expert's rows do. The strides are (2**34 - s, s, s, 1) for rows of stride s, and
the sum of the first and the others is f + i rows, because addresses are taken modulo 2**64.

Which tiles there are is computed on the device, from the offsets: the host does not wait for them. The programs of a
launch loop over the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.matmul_tma import MAX_SIDE, supports_tma
from ..launch import cdiv, multiprocessors_of, next_power_of_2
from ..plans import Kernel, descriptor

_ALIGNMENT = 16  # bytes; of a TMA base address and of its strides
_BOUND = 2**30  # rows of the third dim of a descriptor of rows
_WRAP = 2**34  # times _BOUND, and a 16-bit or 32-bit element's bytes, it is a multiple of 2**64


@dataclass(frozen=True)
class GroupedTile:
    """Tile shape and launch parameters of the kernels of this file. No field can change a bit of the result.

    The first five as in MatmulConfig. group_m: the order in which tiles of an expert start (L2 reuse).
    halves: whether a tile is stored in two halves, which takes less shared memory.
    programs: for each multiprocessor. With two, one computes while the other stores.
    ahead: whether the loads of the next tile start while this one is stored. In `rows` the compiler makes one loop of
        those over tiles and over K; where the number of steps varies it cannot, and grouped_hopper.py does it by hand,
        for a C of 16 bits.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    halves: bool = True
    programs: int = 1
    ahead: bool = True


@triton.jit
def _at(first, count, row):
    """The leading coordinates of a row of an expert that has `count` rows from `first` on: see the top of this file."""
    return 1073741824, first + count, 1073741824 - count + row


@triton.jit
def _sum_of_rows(
    a_desc, b_desc, row, col, expert, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, steps):
        k = step * BLOCK_K  # TMA loads zeros past K
        a = a_desc.load([row, k])  # rows of the next expert too, whose rows of C are not stored
        if B_TRANSPOSED:
            b = b_desc.load([expert, col, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = b_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _sum_over_rows(
    a_desc, b_desc, row, col, first, count,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(count, BLOCK_K)):
        wrap, end, at = _at(first, count, step * BLOCK_K)  # TMA loads zeros past the expert's rows
        a = a_desc.load([wrap, end, at, row]).reshape(BLOCK_K, BLOCK_M)
        b = b_desc.load([wrap, end, at, col]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a.T, b, acc)
    return acc


@triton.jit
def _tile(number, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile, in groups of GROUP_M tile rows, column by column within a group, as in matmul.py."""
    group = number // (GROUP_M * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    in_group = number % (GROUP_M * tiles_n)
    return group * GROUP_M + in_group % group_rows, in_group // group_rows


@triton.jit
def _store_rows(c, c_desc, first, count, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    wrap, end, at = _at(first, count, row)  # TMA stores nothing past the expert's rows
    c_desc.store([wrap, end, at, col], c.to(c_desc.dtype).reshape(1, 1, ROWS, COLS))


@triton.jit
def _store_outer(c, c_desc, expert, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    c_desc.store([expert, row, col], c.to(c_desc.dtype).reshape(1, ROWS, COLS))


# No argument is specialised on its value, so that one compiled kernel serves all shapes; for the number of steps the
# bits need it too, as in matmul.py.
@triton.jit(do_not_specialize=["bias_ptr", "offsets_ptr", "experts", "N", "steps", "stride_bias_e", "stride_bias"])
def _rows_kernel(
    a_desc, b_desc, c_desc, bias_ptr, offsets_ptr, experts, N, steps, stride_bias_e, stride_bias,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, HALVES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # Tiles are numbered expert by expert: `ends` are the numbers at which each expert's end. EXPERTS is a power of two
    # from `experts` up, and those that do not exist have no tiles.
    numbers = tl.arange(0, EXPERTS)
    exists = numbers < experts
    counts = tl.load(offsets_ptr + numbers + 1, mask=exists, other=0)
    counts -= tl.load(offsets_ptr + numbers, mask=exists, other=0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M) * tiles_n, axis=0)
    for tile in tl.range(tl.program_id(0), tl.max(ends), tl.num_programs(0), flatten=AHEAD):
        expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
        before = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
        first = tl.load(offsets_ptr + expert)
        count = tl.load(offsets_ptr + expert + 1) - first
        tile_m, tile_n = _tile(tile - before, tl.cdiv(count, BLOCK_M), tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = _sum_of_rows(a_desc, b_desc, first + row, col, expert, steps, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED)
        acc += 0.0  # no negative zero, as in matmul.py
        if HAS_BIAS:
            cols = col + tl.arange(0, BLOCK_N)
            bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_bias_e + cols * stride_bias
            acc += tl.load(bias_ptrs, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            PART: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART)), (0, 2, 1)))
            _store_rows(left, c_desc, first, count, row, col, BLOCK_M, PART)
            _store_rows(right, c_desc, first, count, row, col + PART, BLOCK_M, PART)
        else:
            _store_rows(acc, c_desc, first, count, row, col, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["offsets_ptr", "experts", "M", "N"])
def _outer_kernel(
    a_desc, b_desc, c_desc, offsets_ptr, experts, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n * experts, tl.num_programs(0)):
        expert = tile // (tiles_m * tiles_n)
        first = tl.load(offsets_ptr + expert)
        count = tl.load(offsets_ptr + expert + 1) - first
        tile_m, tile_n = _tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = _sum_over_rows(a_desc, b_desc, row, col, first, count, BLOCK_M, BLOCK_N, BLOCK_K)
        acc += 0.0
        if HALVES:
            PART: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, PART)), (0, 2, 1)))
            _store_outer(left, c_desc, expert, row, col, BLOCK_M, PART)
            _store_outer(right, c_desc, expert, row, col + PART, BLOCK_M, PART)
        else:
            _store_outer(acc, c_desc, expert, row, col, BLOCK_M, BLOCK_N)


# --- what TMA can address -------------------------------------------------------------------------------------------


def _aligned(x: Tensor, *strides: int) -> bool:
    return x.data_ptr() % _ALIGNMENT == 0 and all(stride * x.element_size() % _ALIGNMENT == 0 for stride in strides)


def _is_rows(x: Tensor) -> bool:
    """Whether TMA can address x [R, C] by rows: its columns are contiguous."""
    (rows, cols), (outer, inner) = x.shape, x.stride()
    return inner == 1 and (outer >= cols or rows == 1) and _aligned(x, outer) and rows < _BOUND and cols <= MAX_SIDE


def _of_experts(x: Tensor) -> tuple[Tensor, bool] | None:
    """x [E, K, N], or its transpose by expert if that is how it is in memory, and whether it is; else None."""
    for matrices, transposed in ((x, False), (x.mT, True)):
        (experts, rows, cols), (each, outer, inner) = matrices.shape, matrices.stride()
        whole = (outer >= cols or rows == 1) and (each >= rows * outer or experts == 1)
        if inner == 1 and whole and _aligned(x, each, outer) and max(experts, rows, cols) <= MAX_SIDE:
            return matrices, transposed
    return None


class RowsOperands(NamedTuple):
    """b: [E, K, N], or [E, N, K] if b_transposed."""

    a: Tensor
    b: Tensor
    b_transposed: bool


def rows_operands(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> RowsOperands | None:
    """The operands of `rows` for a [R, K] and b [E, K, N], or None if TMA cannot address them or C."""
    if not supports_tma(a, b.shape[2], out_dtype) or a.shape[0] >= _BOUND or not _is_rows(a):
        return None
    matrices = _of_experts(b)
    return None if matrices is None else RowsOperands(a, *matrices)


def can_read_outer(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether TMA can address the operands of `outer`, a [R, M] and b [R, N], and C."""
    return (
        supports_tma(a, b.shape[1], out_dtype)
        and a.shape[0] > 0
        and _is_rows(a)
        and _is_rows(b)
        and (a.shape[1] * b.shape[1] * out_dtype.itemsize) % _ALIGNMENT == 0
    )


def _rows_stride(x: Tensor) -> int:
    """The stride of rows, which torch leaves undefined where there is one row."""
    return x.stride(0) if x.shape[0] > 1 else cdiv(x.shape[1], 8) * 8


def _ragged(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the descriptor of x [R, C] whose rows are experts': see the top of this file."""
    stride = _rows_stride(x)
    return (MAX_SIDE, MAX_SIDE, _BOUND, x.shape[1]), (_WRAP - stride, stride, stride, 1)


# --- launches -------------------------------------------------------------------------------------------------------

_SHARED_MEMORY = 226 * 1024  # bytes of a Hopper multiprocessor for stages and output tiles


def fits(tile: GroupedTile, out_itemsize: int) -> bool:
    """Whether the kernels have enough shared memory and registers for a tile of 16-bit operands."""
    stages = (tile.block_m + tile.block_n) * tile.block_k * 2 * tile.num_stages
    stored = tile.block_m * tile.block_n // (2 if tile.halves else 1) * out_itemsize
    registers = tile.block_m * tile.block_n // (32 * tile.num_warps)
    return tile.programs * (stages + stored + 1024) <= _SHARED_MEMORY + 1024 and registers <= 128


def rows_tile(rows: int, experts: int, out_itemsize: int) -> GroupedTile | None:
    """Tile shape of `rows`, from the average rows of an expert; None where grouped.py's kernel is faster.

    A matter of speed only. An expert's last tile is filled by half on average, and where experts have few rows, what
    counts is to read their weights once.
    """
    average = cdiv(rows, experts)
    if average <= 16:
        return None
    if average <= 64:
        return GroupedTile(64, 128, 128, 4, 4)
    if average <= 128:
        return GroupedTile(64, 128, 64, 4, 4, programs=2)
    return GroupedTile(128, 256, 64, 8, 4 if out_itemsize == 2 else 3, group_m=32)


def outer_tile(m: int, n: int, rows: int, experts: int, out_itemsize: int) -> GroupedTile | None:
    """Tile shape of `outer`, from the average rows of an expert; None where grouped.py's kernel is faster.

    A matter of speed only. Where a tile has few steps, what counts is that another is computed while it is stored.
    """
    average = cdiv(rows, experts)
    if min(m, n) < 64:
        return None
    if out_itemsize == 4:
        return GroupedTile(128, 128, 64, 4, 2, programs=2, ahead=False)
    if average <= 96:
        return GroupedTile(128, 128, 64, 8, 5, halves=False)
    if average <= 768:
        return GroupedTile(128, 128, 32, 4, 6, programs=2)
    return GroupedTile(128, 256, 64, 8, 4, group_m=32)


_rows = Kernel(_rows_kernel)
_outer = Kernel(_outer_kernel)


def _grid(tile: GroupedTile, tiles: int, index: int | None) -> tuple[int]:
    multiprocessors = 2 if index is None else multiprocessors_of(index)
    return (min(tiles, multiprocessors * tile.programs),)


def rows(x: RowsOperands, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tile: GroupedTile) -> Tensor:
    """C [R, N] of `rows_operands`, on the current device; grouped.grouped_matmul has checked the arguments."""
    a, b, b_transposed = x
    (r, k), experts = a.shape, b.shape[0]
    n = b.shape[1] if b_transposed else b.shape[2]
    index = a.get_device() if a.is_cuda else None
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    offsets, bias = offsets.contiguous(), None if bias is None else bias.contiguous()
    c = torch.empty((r, n), device=a.device, dtype=out_dtype)
    each, inner = (b.stride(0), b.stride(1)) if experts > 1 else (b.shape[1] * b.stride(1), b.stride(1))
    _rows(
        index, _grid(tile, min(r, r // bm + experts) * cdiv(n, bn), index),
        (
            descriptor(a, (r, k), (_rows_stride(a), 1), (bm, bk)),
            descriptor(b, b.shape, (each, inner, 1), (1, bn, bk) if b_transposed else (1, bk, bn)),
            descriptor(c, *_ragged(c), (1, 1, bm, bn // 2 if tile.halves else bn)),
            c if bias is None else bias, offsets, experts, n, cdiv(k, bk), 0 if bias is None else n, 1,
        ),
        (
            next_power_of_2(experts), bm, bn, bk, tile.group_m, b_transposed, bias is not None, tile.halves,
            tile.ahead,
        ),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return c


def outer(a: Tensor, b: Tensor, offsets: Tensor, c: Tensor, tile: GroupedTile) -> None:
    """Writes C [E, M, N]; `can_read_outer` has accepted the operands."""
    m, n, experts = a.shape[1], b.shape[1], len(offsets) - 1
    if tile.ahead and c.element_size() != 2:
        tile = replace(tile, ahead=False)
    index = a.get_device() if a.is_cuda else None
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    kernel, describe, options = _outer, descriptor, dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    constants: tuple = (tile.halves,)
    if tile.ahead:
        from .. import gluon_descriptor
        from . import grouped_hopper

        kernel, describe = grouped_hopper.outer_ahead, gluon_descriptor.descriptor
        options = dict(num_warps=tile.num_warps)
        constants = tile.num_stages, tile.num_warps, tile.halves
    kernel(
        index, _grid(tile, experts * cdiv(m, bm) * cdiv(n, bn), index),
        (
            describe(a, *_ragged(a), (1, 1, bk, bm)), describe(b, *_ragged(b), (1, 1, bk, bn)),
            describe(c, (experts, m, n), (m * n, n, 1), (1, bm, bn // 2 if tile.halves else bn)),
            offsets.contiguous(), experts, m, n,
        ),
        (bm, bn, bk, tile.group_m, *constants), **options,
    )  # fmt: skip
