"""The matrix product on Hopper: the same sums as matmul.py's kernel, fed by the tensor memory accelerator (TMA).

A persistent grid, one program for each multiprocessor, loops over the output tiles. K is added in order to one fp32
accumulator, exactly as in matmul.py, so the bits are the same and the choice is a matter of speed only. An operand may
be in memory as [M, K], [K, N] or transposed: TMA loads the tile as it is, and the tensor core reads it transposed. So
all three products of a linear layer (X Wᵀ, dY W, dYᵀ X) run without a copy.

Operands gathered from P ranks are read in place. Rank r's shard holds K/P of K in S pieces (S is the partition_stride),
and TP=1's order of K is piece by piece, within a piece rank by rank. So the kernel goes through K as (piece, rank,
local) in steps that never cross a piece, and one descriptor has all shards one below the other: A [P * M, K/P],
B [P * N, K/P] or [P * K/P, N]. A tile at the lower edge of a shard also loads rows of the next shard; these become rows
of C past M, which are not stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dtypes import HALF_DTYPES
from ..launch import cdiv, empty, launch_on, multiprocessors_of
from ..plans import Kernel, Launch, described, planned
from . import autotune
from .matmul_configs import MatmulConfig, Product, is_flattened, promoted_block_k, tma_configs
from .operands import written

_ALIGNMENT = 16  # bytes; of a TMA base address and of its row stride
MAX_SIDE = 2**31 - 1  # TMA coordinates are 32-bit


@triton.jit
def _walk(
    a_desc, b_desc, b_narrow_desc, row, col, first, last, rank, start, local, M, N, steps, ranks, piece_k,
    BLOCK_M: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, RANK_MAJOR: tl.constexpr,
):  # fmt: skip
    """The sums of the products of steps first .. last, and the next step's position in a rank-major buffer."""
    acc = tl.zeros((BLOCK_M, WIDE), dtype=tl.float32)
    acc_narrow = tl.zeros((BLOCK_M, NARROW if NARROW else 1), dtype=tl.float32)
    for step in range(first, last):
        if RANK_MAJOR:
            k_a = start + local
            row_a = rank * M + row
            k_b = k_a if B_TRANSPOSED else rank * (steps * BLOCK_K // ranks) + k_a
            col_b = rank * N + col if B_TRANSPOSED else col
        else:
            k_a = step * BLOCK_K
            row_a = row
            k_b = k_a
            col_b = col
        # TMA loads zeros past the edges of M, N and K
        if A_TRANSPOSED:
            a = a_desc.load([k_a, row_a]).T
        else:
            a = a_desc.load([row_a, k_a])
        if B_TRANSPOSED:
            b = b_desc.load([col_b, k_b]).T
        else:
            b = b_desc.load([k_b, col_b])
        acc = tl.dot(a, b, acc)
        if NARROW:
            if B_TRANSPOSED:
                b_narrow = b_narrow_desc.load([col_b + WIDE, k_b]).T
            else:
                b_narrow = b_narrow_desc.load([k_b, col_b + WIDE])
            acc_narrow = tl.dot(a, b_narrow, acc_narrow)
        if RANK_MAJOR:
            local += BLOCK_K
            rank += (local == piece_k).to(tl.int32)
            local = tl.where(local == piece_k, 0, local)
            start += tl.where(rank == ranks, piece_k, 0)
            rank = tl.where(rank == ranks, 0, rank)
    return acc, acc_narrow, rank, start, local


@triton.jit
def _finish(
    acc, c_desc, bias_ptr, row, col, N, stride_bias,
    COLS: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """For COLS columns: adds the bias and, with ACCUMULATE, the contents of c; rounds; stores."""
    acc += 0.0  # no negative zero, as in matmul.py
    if HAS_BIAS:
        cols = col + tl.arange(0, COLS)
        acc += tl.load(bias_ptr + cols * stride_bias, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if HALVES:
        # half a tile at a time needs half the shared memory, which leaves room for another stage of loads
        PART: tl.constexpr = COLS // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, PART)), (0, 2, 1)))
        _store(left, c_desc, row, col, ACCUMULATE)
        _store(right, c_desc, row, col + PART, ACCUMULATE)
    else:
        _store(acc, c_desc, row, col, ACCUMULATE)


@triton.jit
def _store(c, c_desc, row, col, ACCUMULATE: tl.constexpr):
    # TMA's own addition (cp.reduce) flushes subnormals, and loads by pointers spill registers.
    if ACCUMULATE:
        c += c_desc.load([row, col])
    c_desc.store([row, col], c.to(c_desc.dtype))


# No argument is specialised on its value, so that one compiled kernel serves all shapes; for `steps` and
# `promoted_steps` the bits need it too, as in matmul.py.
@triton.jit(do_not_specialize=["bias_ptr", "M", "N", "steps", "promoted_steps", "stride_bias", "ranks", "piece_k"])
def _persistent_matmul_kernel(
    a_desc, b_desc, b_narrow_desc, c_desc, bias_ptr,
    M, N, steps, promoted_steps, stride_bias, ranks, piece_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, RANK_MAJOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, PROMOTE: tl.constexpr, HALVES: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    # A tile of 3 * 2**n columns is two products side by side, of two thirds and one third of the columns.
    NARROW: tl.constexpr = 0 if (BLOCK_N & (BLOCK_N - 1)) == 0 else BLOCK_N // 3
    WIDE: tl.constexpr = BLOCK_N - NARROW
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    # FLATTEN: into one loop with that over K, see matmul_configs.is_flattened
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        group = tile // tiles_in_group
        group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        in_group = tile % tiles_in_group
        row = (group * GROUP_M + in_group % group_rows) * BLOCK_M
        col = (in_group // group_rows) * BLOCK_N

        rank = tl.full((), 0, tl.int32)
        start = tl.full((), 0, tl.int32)  # of the piece, within the shard
        local = tl.full((), 0, tl.int32)  # within the piece
        if PROMOTE:
            acc = tl.zeros((BLOCK_M, WIDE), dtype=tl.float32)
            acc_narrow = tl.zeros((BLOCK_M, NARROW if NARROW else 1), dtype=tl.float32)
            for first in range(0, steps, promoted_steps):
                part, part_narrow, rank, start, local = _walk(
                    a_desc, b_desc, b_narrow_desc, row, col, first, tl.minimum(first + promoted_steps, steps),
                    rank, start, local, M, N, steps, ranks, piece_k,
                    BLOCK_M, WIDE, NARROW, BLOCK_K, A_TRANSPOSED, B_TRANSPOSED, RANK_MAJOR,
                )  # fmt: skip
                acc += part
                acc_narrow += part_narrow
        else:
            acc, acc_narrow, rank, start, local = _walk(
                a_desc, b_desc, b_narrow_desc, row, col, 0, steps,
                rank, start, local, M, N, steps, ranks, piece_k,
                BLOCK_M, WIDE, NARROW, BLOCK_K, A_TRANSPOSED, B_TRANSPOSED, RANK_MAJOR,
            )  # fmt: skip

        _finish(acc, c_desc, bias_ptr, row, col, N, stride_bias, WIDE, HAS_BIAS, ACCUMULATE, HALVES)
        if NARROW:
            _finish(acc_narrow, c_desc, bias_ptr, row, col + WIDE, N, stride_bias, NARROW, HAS_BIAS, ACCUMULATE, False)


class Rows(NamedTuple):
    """A matrix whose rows are contiguous in memory, with this shape and strides, from where x begins."""

    x: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TmaOperands(NamedTuple):
    """Two matrices that TMA can address, in the form that the kernel takes.

    a, b          as they are in memory: [M, K] or [K, M]; [K, N] or [N, K]; rank-major: shards one below the other
    a_transposed  a is [K, M] in memory; b_transposed: b is [N, K]
    ranks         P of rank-major operands; 1 otherwise
    piece_k       K / (P * S), how much of K is contiguous; K if ranks is 1
    """

    a: Rows
    b: Rows
    a_transposed: bool
    b_transposed: bool
    m: int
    n: int
    k: int
    ranks: int = 1
    piece_k: int = 0


def tma_layout(x: Tensor) -> tuple[Rows, bool] | None:
    """x or its transpose, whichever has contiguous rows that TMA can address, and whether it is the transpose."""
    if x.data_ptr() % _ALIGNMENT:
        return None
    (rows, cols), (outer, inner) = x.shape, x.stride()
    unit = _ALIGNMENT // x.element_size()
    if inner == 1 and outer >= cols and outer % unit == 0:
        return Rows(x, (rows, cols), (outer, 1)), False
    if outer == 1 and inner >= rows and inner % unit == 0:
        return Rows(x, (cols, rows), (inner, 1)), True
    return None


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


def supports_tma(a: Tensor, c_stride: int, out_dtype: torch.dtype) -> bool:
    """Whether the TMA kernel supports the device, the dtypes and the row stride of C."""
    if not a.is_cuda or a.dtype not in HALF_DTYPES or not _is_hopper(a.device.index):
        return False
    return c_stride * out_dtype.itemsize % _ALIGNMENT == 0


def tma_operands(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> TmaOperands | None:
    """The kernel's operands for a [M, K] @ b [K, N] (into out), or None if TMA cannot address them."""
    (m, k), n = a.shape, b.shape[1]
    if not supports_tma(a, n if out is None else out.stride(0), out_dtype) or max(m, n, k) > MAX_SIDE:
        return None
    if out is not None and (out.data_ptr() % _ALIGNMENT or out.stride(0) < n or out.stride(1) != 1):
        return None
    a_stands, b_stands = tma_layout(a), tma_layout(b)
    if a_stands is None or b_stands is None:
        return None
    return TmaOperands(a_stands[0], b_stands[0], a_stands[1], b_stands[1], m, n, k)


def rank_major_operands(
    a: Tensor, b: Tensor, *, b_k_dim: int, stride: int, out_dtype: torch.dtype
) -> TmaOperands | None:
    """`tma_operands` for rank-major a [P, M, K/P] and b [P, N, K/P] (b_k_dim 1) or [P, K/P, N] (b_k_dim 0).

    None if the kernel cannot read them in place: then copy them to TP=1's order first (gemm.RankMajor.matrix).
    """
    ranks, m, k_local = a.shape
    n = b.shape[2 - b_k_dim]
    if not supports_tma(a, n, out_dtype) or not a.is_contiguous() or not b.is_contiguous():
        return None
    piece_k, left_over = divmod(k_local, stride)
    if left_over or piece_k % 16 or ranks * max(m, n, k_local) > MAX_SIDE:
        return None
    a_stands, b_stands = tma_layout(a.view(-1, k_local)), tma_layout(b.view(-1, b.shape[2]))
    if a_stands is None or b_stands is None:
        return None
    return TmaOperands(a_stands[0], b_stands[0], False, b_k_dim == 1, m, n, ranks * k_local, ranks, piece_k)


_persistent_matmul = Kernel(_persistent_matmul_kernel)


class _Plan(NamedTuple):
    """The tile configuration of a product, and what follows from it: blocks, steps along K, grid, constexprs."""

    config: MatmulConfig
    a_block: tuple[int, int]
    b_block: tuple[int, int]
    narrow_block: tuple[int, int] | None
    c_block: tuple[int, int]
    programs: int
    steps: int
    promoted_steps: int
    constants: tuple


@planned
def _plan(
    m: int, n: int, k: int, ranks: int, piece_k: int, a_transposed: bool, b_transposed: bool,
    a_split: bool, b_split: bool, out_dtype: torch.dtype, has_bias: bool, accumulate: bool,
    promote_every: int | None, multiprocessors: int, config: MatmulConfig | None,
) -> _Plan:  # fmt: skip
    if config is None:
        promoted = bool(promote_every)
        product = Product(
            m, n, k, a_transposed, b_transposed, a_split, b_split, out_dtype.itemsize, multiprocessors
        )  # fmt: skip
        config = tma_configs(product, promoted)[0][1]
    block_m, block_n, block_k = config.block_m, config.block_n, promoted_block_k(config.block_k, promote_every)
    while ranks > 1 and piece_k % block_k:
        block_k //= 2  # a step stays within a piece
    wide = block_n - config.narrow

    def b_block(cols: int) -> tuple[int, int]:
        return (cols, block_k) if b_transposed else (block_k, cols)

    return _Plan(
        config,
        a_block=(block_k, block_m) if a_transposed else (block_m, block_k),
        b_block=b_block(wide),
        narrow_block=b_block(config.narrow) if config.narrow else None,
        c_block=(block_m, wide // 2 if config.halves else wide),
        programs=min(multiprocessors, cdiv(m, block_m) * cdiv(n, block_n)),
        steps=cdiv(k, block_k),
        promoted_steps=(promote_every or 0) // block_k,
        constants=(
            block_m, block_n, block_k, config.group_m, a_transposed, b_transposed, ranks > 1,
            has_bias, accumulate, bool(promote_every), config.halves,
            is_flattened(config, out_dtype.itemsize, accumulate, bool(promote_every)),
        ),
    )  # fmt: skip


def split(a: Rows, b: Rows) -> tuple[bool, bool]:
    """Whether rows in memory are no multiple of 32 bytes."""
    return a.strides[0] % 16 > 0, b.strides[0] % 16 > 0


def _autotuned(x: TmaOperands, bias: Tensor | None, c: Tensor, accumulate: bool) -> MatmulConfig | None:
    """The measured configuration of a product, whose output c is left alone. See `autotune.configuration`."""
    has_bias, index = bias is not None, c.get_device()
    scratch = functools.cache(lambda: torch.empty_strided(c.shape, c.stride(), device=c.device, dtype=c.dtype))

    def launch(config: MatmulConfig) -> None:
        tma_matmul(x, bias, c.dtype, config, out=scratch(), accumulate=accumulate)

    call = autotune.Call(
        x.m, x.n, x.k, x.a_transposed, x.b_transposed, *split(x.a, x.b),
        x.a.x.dtype, c.dtype, has_bias, accumulate, index,
    )  # fmt: skip
    return autotune.configuration(call, launch)


def prepare_tma(
    x: TmaOperands,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    config: MatmulConfig | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    promote_every: int | None = None,
) -> Callable[..., Tensor]:
    """c [M, N] = a @ b (+ bias) of operands of these layouts; matmul.matmul has checked the arguments.

    The result takes a, b, bias and optionally out. config: for tests and tuning; None takes the table's.
    """
    a, b, a_transposed, b_transposed, m, n, k, ranks, piece_k = x
    device, index, copies_bias = a.x.device, a.x.get_device(), False
    if bias is not None and n * bias.stride(0) > MAX_SIDE:
        bias, copies_bias = bias.contiguous(), True  # the kernel's offsets are 32-bit
    c = torch.empty((m, n), device=device, dtype=out_dtype) if out is None else out
    if config is None and ranks == 1 and promote_every is None and autotune.is_enabled():
        with launch_on(a.x, "matmul"):
            config = _autotuned(x, bias, c, accumulate)
    plan = _plan(
        m, n, k, ranks, piece_k, a_transposed, b_transposed, *split(a, b),
        out_dtype, bias is not None, accumulate, promote_every, multiprocessors_of(index), config,
    )  # fmt: skip
    numbers = m, n, plan.steps, plan.promoted_steps, 0 if bias is None else bias.stride(0), ranks, piece_k
    of_a, of_b, of_c = (
        described(*a, plan.a_block),
        described(*b, plan.b_block),
        described(c, c.shape, c.stride(), plan.c_block),
    )
    narrow = None if plan.narrow_block is None else described(*b, plan.narrow_block)
    options = dict(num_warps=plan.config.num_warps, num_stages=plan.config.num_stages)
    new_c = empty((m, n), out_dtype, device)
    launch = Launch(_persistent_matmul, index, (plan.programs,), plan.constants, **options)

    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        c = new_c() if out is None else out
        if copies_bias and bias is not None:
            bias = bias.contiguous()
        launch(of_a(a), of_b(b), None if narrow is None else narrow(b), of_c(c), c if bias is None else bias, *numbers)
        return c if out is None else written(out)

    return product


def tma_matmul(x: TmaOperands, bias: Tensor | None, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    """What `prepare_tma`, whose arguments these are, makes of them."""
    return prepare_tma(x, bias, *args, out=out, **options)(x.a.x, x.b.x, bias, out)
