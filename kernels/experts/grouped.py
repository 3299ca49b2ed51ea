"""Products of rows sorted by expert, in Triton, with the bits that matmul.py gives each expert's rows alone.

    grouped_matmul   C[rows of e] = A[rows of e] B[e] + bias[e]      forward, and dgrad with B transposed
    grouped_outer    C[e] = A[rows of e]ᵀ B[rows of e]               wgrad; K is an expert's rows, in their order

A tile of C is computed by matmul.py's `product_tile`, for one expert's rows: it goes through K in order, and neither
the number of an expert's rows nor the other experts can reorder a sum. Which rows are whose is read from `offsets` on
the device, so the host does not wait: `grouped_matmul` launches a program for each tile that any division of R rows
among E experts can have, and those that the division at hand does not need return at once.

On Hopper, grouped_tma.py computes 16-bit operands that TMA can address, where experts have enough rows: the same sums,
so the same bits, faster.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.matmul import INTERPRETER_CONFIG, no_negated_views, product_tile
from ..gemm.matmul_configs import MatmulConfig, choose_config, fit, shared_memory_of
from ..gemm.operands import check_kinds
from ..launch import cdiv, interpreting, launch_on, next_power_of_2
from ..plans import Kernel
from . import grouped_tma
from .grouped_tma import GroupedTile


@triton.jit(do_not_specialize=["experts", "steps"])
def _grouped_matmul_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, offsets_ptr, experts, N, K, steps,
    stride_am, stride_ak, stride_be, stride_bk, stride_bn, stride_cm, stride_bias_e, stride_bias,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Programs are numbered expert by expert: `ends` are the numbers at which each expert's end. EXPERTS is a power of
    # two from `experts` up, and those that do not exist have no programs.
    pid = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    exists = numbers < experts
    counts = tl.load(offsets_ptr + numbers + 1, mask=exists, other=0)
    counts -= tl.load(offsets_ptr + numbers, mask=exists, other=0)
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M) * tl.cdiv(N, BLOCK_N), axis=0)
    expert = tl.sum((ends <= pid).to(tl.int32), axis=0)
    before = tl.max(tl.where(ends <= pid, ends, 0), axis=0)
    if expert < experts:
        first = tl.load(offsets_ptr + expert)
        rows = tl.load(offsets_ptr + expert + 1) - first
        first_wide, expert_wide = first.to(tl.int64), expert.to(tl.int64)
        product_tile(
            pid - before, a_ptr + first_wide * stride_am, b_ptr + expert_wide * stride_be,
            c_ptr + first_wide * stride_cm, bias_ptr + expert_wide * stride_bias_e,
            rows, N, K, steps, 0, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_bias,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_K, HAS_BIAS, False, False,
        )  # fmt: skip


@triton.jit
def _grouped_outer_kernel(
    a_ptr, b_ptr, c_ptr, offsets_ptr, M, N, stride_ar, stride_am, stride_br, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // tiles
    first = tl.load(offsets_ptr + expert)
    rows = tl.load(offsets_ptr + expert + 1) - first
    first_wide = first.to(tl.int64)
    product_tile(
        tl.program_id(0) % tiles, a_ptr + first_wide * stride_ar, b_ptr + first_wide * stride_br,
        c_ptr + expert.to(tl.int64) * M * N, c_ptr, M, N, rows, tl.cdiv(rows, BLOCK_K), 0,
        stride_am, stride_ar, stride_br, stride_bn, N, 0,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, False, False, False, False,
    )  # fmt: skip


_grouped_matmul = Kernel(_grouped_matmul_kernel)
_grouped_outer = Kernel(_grouped_outer_kernel)


def _fitted(config: MatmulConfig, a: Tensor) -> MatmulConfig:
    return fit(config, a.element_size(), shared_memory_of(a.device.index)) if a.is_cuda else config


def rows_config(rows: int, experts: int, n: int, k: int, dtype: torch.dtype) -> MatmulConfig:
    """Tile shape for `grouped_matmul`, from the average rows of an expert; a matter of speed only.

    The tiles of all experts share the GPU, so those of experts with few rows need not be narrow to fill it.
    """
    average = cdiv(rows, experts)
    if average > 64 or dtype == torch.float32:
        config = choose_config(rows, n, k, dtype)
        # Measured on an H100: a fourth stage of the largest tile takes 5% off, as most experts end in a part of a tile.
        return replace(config, num_stages=4) if config.block_m * config.block_n == 128 * 256 else config
    config = choose_config(average, n, k, dtype)
    fills = min(rows, experts) * cdiv(n, 128) >= 264  # twice the multiprocessors of a Hopper chip
    return replace(config, block_n=128, block_k=64) if fills else config


def outer_config(m: int, experts: int, n: int, k: int, dtype: torch.dtype) -> MatmulConfig:
    """Tile shape for `grouped_outer`; a matter of speed only."""
    config = choose_config(experts * m, n, k, dtype)
    return replace(config, block_m=min(config.block_m, max(16, next_power_of_2(m))))


def _no_tile(operation: str, config: GroupedTile | None) -> None:
    if config is not None:
        raise ValueError(
            f"{operation}: config is {config}, and TMA cannot address these operands; allowed: a MatmulConfig, or "
            "16-bit operands on Hopper whose addresses and strides are multiples of 16 bytes"
        )


def grouped_matmul(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | GroupedTile | None = None,
) -> Tensor:
    """C [R, N], where row r of expert e has the bits of `matmul(a[r : r + 1], b[e], bias=bias[e])`.

    Args:
        a: [R, K], bfloat16, float16 or float32, any strides; the rows of expert 0, then those of expert 1, and so on.
        b: [E, K, N], dtype and device of `a`, any strides; fastest where K or N is contiguous.
        offsets: int32 [E + 1] on a's device: the rows of expert e are offsets[e] to offsets[e + 1] - 1, maybe none;
            offsets[0] is 0 and offsets[E] is R. They are not checked, so the host never waits for a GPU.
        bias: [E, N] of any of these dtypes, or None; added in fp32 before the one final rounding.
        out_dtype: dtype of the result, any of the three; None means a's.
        config: tile shape, for tests and tuning: of this file's kernel, or a GroupedTile of grouped_tma.py's. It
            changes no bit.

    Returns:
        Contiguous [R, N]; R and E may be 0.

    Raises:
        TypeError: an argument that is not a tensor, an unsupported dtype, a and b of different dtypes.
        ValueError: different devices, a device that cannot run Triton kernels, or a GroupedTile for operands that TMA
            cannot address.
    """
    check_kinds("grouped_matmul", a, b, bias, out_dtype)
    (r, k), (experts, _, n) = a.shape, b.shape
    out_dtype = out_dtype or a.dtype
    a, b, bias = no_negated_views(a, b, bias)
    if r > 0 and not isinstance(config, MatmulConfig):
        operands = grouped_tma.rows_operands(a, b, out_dtype)
        tile = config or grouped_tma.rows_tile(r, experts, out_dtype.itemsize)
        if operands is not None and tile is not None:
            with launch_on(a, "grouped_matmul"):
                return grouped_tma.rows(operands, offsets, bias, out_dtype, tile)
        config = _no_tile("grouped_matmul", config)
    c = torch.empty((r, n), device=a.device, dtype=torch.float32 if interpreting() else out_dtype)
    if r > 0:
        if config is None:
            config = INTERPRETER_CONFIG if interpreting() else _fitted(rows_config(r, experts, n, k, a.dtype), a)
        with launch_on(a, "grouped_matmul"):
            if interpreting():
                a, b = a.float(), b.float()  # as in matmul.py
                bias = None if bias is None else bias.float()
            # An expert's last tile may be partly filled: at most one for each expert, and no tile is without rows.
            tile_rows = min(r, r // config.block_m + experts)
            _grouped_matmul(
                a.device.index, (tile_rows * cdiv(n, config.block_n),),
                (
                    a, b, c, c if bias is None else bias, offsets.contiguous(), experts, n, k, cdiv(k, config.block_k),
                    *a.stride(), *b.stride(), n, *((0, 0) if bias is None else bias.stride()),
                ),
                (
                    next_power_of_2(experts), config.block_m, config.block_n, config.block_k, config.group_m,
                    k % config.block_k == 0, bias is not None,
                ),
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
    return c.to(out_dtype)


def grouped_outer(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | GroupedTile | None = None,
) -> Tensor:
    """C [E, M, N], where C[e] has the bits of `matmul(a[rows].t(), b[rows], ...)` of the rows of expert e, in order.

    Args:
        a: [R, M] and b: [R, N], rows, dtypes and strides as for `grouped_matmul`, and so offsets.
        out_dtype: dtype of the result; None means a's.
        config: tile shape, for tests and tuning. It changes no bit.

    Returns:
        Contiguous [E, M, N]. An expert without rows has zeros.

    Raises:
        TypeError, ValueError: as for `grouped_matmul`.
    """
    check_kinds("grouped_outer", a, b, None, out_dtype)
    out_dtype = out_dtype or a.dtype
    (r, m), n, experts = a.shape, b.shape[1], len(offsets) - 1
    a, b = no_negated_views(a, b)
    if experts > 0 and not isinstance(config, MatmulConfig):
        readable = grouped_tma.can_read_outer(a, b, out_dtype)
        tile = config or grouped_tma.outer_tile(m, n, r, experts, out_dtype.itemsize)
        if readable and tile is not None:
            c = torch.empty((experts, m, n), device=a.device, dtype=out_dtype)
            with launch_on(c, "grouped_outer"):
                grouped_tma.outer(a, b, offsets, c, tile)
            return c
        config = _no_tile("grouped_outer", config)
    c = torch.empty((experts, m, n), device=a.device, dtype=torch.float32 if interpreting() else out_dtype)
    if experts > 0:
        if config is None:
            chosen = outer_config(m, experts, n, cdiv(r, experts), a.dtype)
            config = INTERPRETER_CONFIG if interpreting() else _fitted(chosen, a)
        with launch_on(c, "grouped_outer"):
            if interpreting():
                a, b = a.float(), b.float()  # as in matmul.py
            _grouped_outer(
                c.device.index, (experts * cdiv(m, config.block_m) * cdiv(n, config.block_n),),
                (a, b, c, offsets.contiguous(), m, n, *a.stride(), *b.stride()),
                (config.block_m, config.block_n, config.block_k, config.group_m),
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
    return c.to(out_dtype)
