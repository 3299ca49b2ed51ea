"""Slice-invariant matrix product in Triton: the bits of C[i, j] depend on A[i, :], B[:, j], K and the dtypes alone.

How one call runs:
  1. `matmul` checks its arguments and picks a tile shape (`choose_config`), which is a matter of speed only.
  2. One program computes each output tile. It goes through K in order from 0 and adds every product to one fp32
     accumulator. K is not split and there are no atomics, so neither the number of rows and columns nor the position of
     an element in its tile can reorder a sum. Only `promote_every` adds a second accumulator; the steps at which the
     first is added to it depend on K alone.
  3. Bias is added to the fp32 accumulator, and the output is rounded once. `accumulate` adds the contents of `out`.

On Hopper, matmul_tma.py computes 16-bit operands that TMA can address: the same sums, so the same bits, faster.

Under TRITON_INTERPRET=1 (no GPU) the same kernel runs on CPU tensors. That tests the logic, not the GPU's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, interpreting, launch_on
from ..plans import Kernel, Launch, run
from .aligned_copies import copied_matmul, worthwhile_copies
from .autotune import check_unmeasured, is_enabled, switch
from .matmul_configs import MatmulConfig, choose_config, fit, promoted_block_k, shared_memory_of
from .matmul_tma import prepare_tma, rank_major_operands, split, tma_operands
from .operands import check_bias, check_kinds, check_memory, check_operands, check_output, check_promotion, written

# In the interpreter tl.dot is one BLAS call per block, so block_k does change bits there: all shapes share one value.
INTERPRETER_CONFIG = MatmulConfig(32, 64, 64, num_warps=4, num_stages=2)


@triton.jit
def _walk(
    a_ptrs, b_ptrs, a_step, b_step, first, last, K, row_mask, col_mask,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The sum of the products of steps first .. last, and the pointers of the next step."""
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, last):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_mask, other=0.0)
            b = tl.load(b_ptrs, mask=col_mask, other=0.0)
        else:
            # Both operands are zero past K, because zero times a NaN or Inf would be NaN.
            k_left = K - step * BLOCK_K
            a = tl.load(a_ptrs, mask=row_mask & (ks[None, :] < k_left), other=0.0)
            b = tl.load(b_ptrs, mask=col_mask & (ks[:, None] < k_left), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += a_step
        b_ptrs += b_step
    return acc, a_ptrs, b_ptrs


@triton.jit
def product_tile(
    pid, a_ptr, b_ptr, c_ptr, bias_ptr,
    M, N, K, steps, promoted_steps,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_bias,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """Tile number `pid` of C.

    `steps` must stay a run-time value: if the compiler knows that there is one step, it removes the loop and rewrites
    dot(a, b, 0) + bias into dot(a, b, bias), which is another order of additions and so other bits. The same holds for
    `promoted_steps`, with the second accumulator in place of the bias.
    """
    # Tiles run in groups of GROUP_M tile rows, column by column within a group, so that neighbours share a part of B.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    pid_in_group = pid % (GROUP_M * tiles_n)
    tile_m = group * GROUP_M + pid_in_group % group_rows
    tile_n = pid_in_group // group_rows

    # Offsets are 64-bit, since a row or column index times its stride passes 2**31 in large tensors.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks_wide = tl.arange(0, BLOCK_K).to(tl.int64)
    # A stride of 1 is a compile-time constant, so the compiler sees along which dimension a load is contiguous.
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks_wide[None, :] * stride_ak
    b_ptrs = b_ptr + ks_wide[:, None] * stride_bk + cols[None, :] * stride_bn
    a_step = tl.full((), BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full((), BLOCK_K, tl.int64) * stride_bk
    row_mask = rows[:, None] < M
    col_mask = cols[None, :] < N

    if PROMOTE:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, steps, promoted_steps):
            last = tl.minimum(first + promoted_steps, steps)
            part, a_ptrs, b_ptrs = _walk(
                a_ptrs, b_ptrs, a_step, b_step, first, last, K, row_mask, col_mask, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K
            )
            acc += part
    else:
        acc, a_ptrs, b_ptrs = _walk(
            a_ptrs, b_ptrs, a_step, b_step, 0, steps, K, row_mask, col_mask, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K
        )

    # Products that underflow can leave -0.0, which the zeros past K turn into +0.0 for some block_k and not for others.
    # Adding +0.0 (which compilers must keep) always gives +0.0, and makes no bias equal to a bias of zeros.
    acc += 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols * stride_bias, mask=cols < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    if ACCUMULATE:
        acc += tl.load(c_ptrs, mask=row_mask & col_mask, other=0.0)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=row_mask & col_mask)


@triton.jit(do_not_specialize=["steps", "promoted_steps"])
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr,
    M, N, K, steps, promoted_steps,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_bias,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    product_tile(
        tl.program_id(0), a_ptr, b_ptr, c_ptr, bias_ptr, M, N, K, steps, promoted_steps,
        stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_bias,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_K, HAS_BIAS, ACCUMULATE, PROMOTE,
    )  # fmt: skip


_matmul = Kernel(_matmul_kernel)


def _check_rank_major(
    a: Tensor, b: Tensor, b_k_dim: int, stride: int, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Raises if the operands do not fit: TMA reads zeros outside of a tensor, so the kernel would not notice."""
    name = "matmul_rank_major"
    check_kinds(name, a, b, bias, out_dtype)
    if b_k_dim not in (0, 1):
        raise ValueError(f"{name}: b_k_dim is {b_k_dim!r}; allowed: 1 for b [P, N, K/P], 0 for b [P, K/P, N]")
    b_shape = ("[P, K/P, N]", "[P, N, K/P]")[b_k_dim]
    for operand, tensor, shape in (("a", a, "[P, M, K/P]"), ("b", b, b_shape)):
        if tensor.dim() != 3:
            raise ValueError(f"{name}: {operand} has shape {tuple(tensor.shape)}; allowed: three dimensions, {shape}")
    ranks, _, k_local = a.shape
    if (b.shape[0], b.shape[1 + b_k_dim]) != (ranks, k_local):
        raise ValueError(
            f"{name}: b has shape {tuple(b.shape)}; allowed: {b_shape} with the P and K/P of a, whose shape is "
            f"{tuple(a.shape)}"
        )
    if type(stride) is not int or stride < 1 or k_local % stride:
        raise ValueError(
            f"{name}: stride is {stride!r}; allowed: an int of at least 1 that divides K/P, here {k_local}"
        )
    check_bias(name, bias, b.shape[2 - b_k_dim])


def no_negated_views(*tensors: Tensor | None) -> list[Any]:
    """The tensors, with a copy of each that torch negates only by a flag (z.conj().imag), which kernels do not see."""
    return [tensor if tensor is None or not tensor.is_neg() else tensor.resolve_neg() for tensor in tensors]


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    promote_every: int | None = None,
    config: MatmulConfig | None = None,
) -> Tensor:
    """C = A B + bias, where C[i, j] has the same bits whichever other rows and columns are computed with it.

    Args:
        a: [M, K], bfloat16, float16 or float32, any strides (transposed, sliced and expanded views included).
        b: [K, N], dtype and device of `a`, any strides.
        bias: [N] of any of these dtypes, or None; added in fp32 before the one final rounding.
        out_dtype: dtype of the result, any of the three; None means out's, else a's.
        out: [M, N] to write into, with contiguous rows, in memory of its own; None makes a new tensor.
        accumulate: add the product to out, which is float32: the bytes of `out.add_(matmul(a, b, bias=bias,
            out_dtype=torch.float32))`.
        promote_every: None, or the number of k, a multiple of 128, after which the accumulator is added to a second
            one. It changes the order of K and so the bits. See operands.py.
        config: tile shape for this module's kernel, for tests and tuning. None uses `choose_config`, and on Hopper the
            TMA kernel if possible, of copies if need be. Neither changes a bit.

    Returns:
        out, or contiguous [M, N]. Accumulated in fp32; fp32 operands are multiplied in IEEE fp32, never TF32.
        Not differentiable by itself: call it inside a torch.autograd.Function.

    Raises:
        TypeError: an argument that is not a tensor, an unsupported dtype, a and b of different dtypes, an out whose
            dtype is not out_dtype or, with accumulate, not float32.
        ValueError: wrong shapes, an empty dimension (M, N or K is 0), different devices, an out without contiguous
            rows, that shares memory with an operand or the bias, or that is negated by a flag, accumulate without out,
            a promote_every that is not a multiple of 128, or a device that cannot run Triton kernels.
    """
    tensors, options = (a, b, bias, out), (out_dtype, accumulate, promote_every)
    if config is not None:
        return _prepare(*tensors, *options, None, config)(*tensors)
    return run(_prepare, tensors, *options, switch())  # type: ignore[no-any-return]


_Product = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def _prepare(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None, out_dtype: torch.dtype | None, accumulate: bool,
    promote_every: int | None, switch: bool | None, config: MatmulConfig | None = None,
) -> _Product:  # fmt: skip
    """`matmul` of tensors of these layouts. switch: the one that `is_enabled` goes by."""
    check_operands(a, b, bias, out_dtype or getattr(out, "dtype", None))
    out_dtype = check_output(a, b, out, out_dtype, accumulate, bias)
    check_promotion(promote_every)
    if out is not None and out.is_neg():
        raise ValueError("matmul: out is a view that torch negates (is_neg() is True); allowed: a tensor that is not")
    launch_on(a, "matmul")
    negated = any(x is not None and x.is_neg() for x in (a, b, bias))
    options = out_dtype, accumulate, promote_every, config
    product: _Product
    if config is None and is_enabled():  # at each call by what has been measured until then

        def product(*tensors: Any) -> Tensor:
            return _prepare_plain(*tensors, *options)(*tensors)
    else:
        product = _prepare_plain(*no_negated_views(a, b, bias), out, *options)
    if out is None and not negated:
        return product

    def call(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if out is not None:
            check_memory(out, a, b, bias)
        return product(*no_negated_views(a, b, bias), out)

    return call


def _prepare_plain(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None, out_dtype: torch.dtype, accumulate: bool,
    promote_every: int | None, config: MatmulConfig | None, may_copy: bool = True,
) -> _Product:  # fmt: skip
    """The same of tensors that have been checked."""
    (m, k), n, index = a.shape, b.shape[1], a.get_device()
    if config is None:
        operands = tma_operands(a, b, out_dtype, out)
        may_copy = may_copy and (operands is None or any(split(operands.a, operands.b)))
        if may_copy and worthwhile_copies(a, b, out_dtype, out, promote_every) is not None:
            return partial(_with_copies, (out_dtype, accumulate, promote_every))
        if operands is not None:
            options = dict(out=out, accumulate=accumulate, promote_every=promote_every)
            return prepare_tma(operands, bias, out_dtype, **options)
        check_unmeasured(a)
        spare = accumulate or promote_every is not None
        config = INTERPRETER_CONFIG if interpreting() else choose_config(m, n, k, a.dtype, spare_registers=spare)
        if a.is_cuda:
            config = fit(config, a.element_size(), shared_memory_of(index))
    c_dtype = torch.float32 if interpreting() else out_dtype
    grid = (cdiv(m, config.block_m) * cdiv(n, config.block_n),)
    block_k = promoted_block_k(config.block_k, promote_every)
    sizes = m, n, k, cdiv(k, block_k), (promote_every or 0) // block_k
    constants = (
        config.block_m, config.block_n, block_k, config.group_m, k % block_k == 0, bias is not None, accumulate,
        bool(promote_every),
    )  # fmt: skip
    launch = Launch(_matmul, index, grid, constants, num_warps=config.num_warps, num_stages=config.num_stages)

    def call(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if interpreting():
            # The interpreter's tl.dot and its subnormals are wrong in bfloat16, and it rounds to bfloat16 by
            # truncation: give it fp32 only, and let torch convert before and after.
            a, b = a.float(), b.float()
            bias = None if bias is None else bias.float()
        in_place = out is not None and out.dtype == c_dtype
        c = out if in_place else torch.empty((m, n), device=a.device, dtype=c_dtype)
        strides = *a.stride(), *b.stride(), c.stride(0), 0 if bias is None else bias.stride(0)
        launch(a, b, c, c if bias is None else bias, *sizes, *strides)
        if out is None:
            return c.to(out_dtype)
        return written(out) if in_place else out.copy_(c)

    return call


def _with_copies(
    options: tuple[torch.dtype, bool, int | None], a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    out_dtype, accumulate, promote_every = options
    with launch_on(a, "matmul"):
        c = copied_matmul(a, b, bias, out_dtype, out, accumulate, promote_every)
    if c is None:  # there is no memory for them
        return _prepare_plain(a, b, bias, out, *options, None, may_copy=False)(a, b, bias, out)
    return c


def matmul_rank_major(
    a: Tensor,
    b: Tensor,
    *,
    b_k_dim: int,
    stride: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    promote_every: int | None = None,
) -> Tensor | None:
    """The product of operands gathered from P ranks, read in place, or None if that is not possible.

    TP=1's order of K is (stride, rank, local); the bytes equal those of `matmul` of the operands copied to that order.

    Args:
        a: [P, M, K/P], contiguous.
        b: [P, N, K/P] (b_k_dim 1) or [P, K/P, N] (b_k_dim 0), contiguous, of a's dtype and device.
        stride: the partition_stride of K, which divides K/P.
        bias, out_dtype, promote_every: as for `matmul`.

    Returns:
        Contiguous [M, N], or None: not a Hopper GPU, not a 16-bit dtype, K/P/stride not a multiple of 16, an empty
        operand, or rows that TMA cannot address. Then copy the operands to TP=1's order and call `matmul`.

    Raises:
        TypeError: an argument that is not a tensor, an unsupported dtype, a and b of different dtypes.
        ValueError: shapes that do not fit each other, a stride that does not divide K/P, an invalid b_k_dim,
            different devices, a promote_every that is not a multiple of 128.
    """
    return run(_prepare_rank_major, (a, b, bias), b_k_dim, stride, out_dtype, promote_every)  # type: ignore[no-any-return]


def _prepare_rank_major(
    a: Tensor, b: Tensor, bias: Tensor | None, b_k_dim: int, stride: int, out_dtype: torch.dtype | None,
    promote_every: int | None,
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor | None]:  # fmt: skip
    _check_rank_major(a, b, b_k_dim, stride, bias, out_dtype)
    check_promotion(promote_every)
    plain = no_negated_views(a, b, bias)
    out_dtype, operands = out_dtype or a.dtype, None
    if a.numel() and b.numel():
        operands = rank_major_operands(*plain[:2], b_k_dim=b_k_dim, stride=stride, out_dtype=out_dtype)
    if operands is None:
        return lambda *_: None
    launch_on(a, "matmul")
    product = prepare_tma(operands, plain[2], out_dtype, promote_every=promote_every)
    if any(x is not y for x, y in zip(plain, (a, b, bias), strict=True)):
        return lambda a, b, bias: product(*no_negated_views(a, b, bias))
    return product
