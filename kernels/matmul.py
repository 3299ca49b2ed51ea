"""Slice-invariant matrix product in Triton: the bits of C[i, j] depend on A[i, :], B[:, j], K and the dtypes alone.

How one call runs:
  1. `matmul` checks its arguments and picks a tile shape (`choose_config`), which is a matter of speed only.
  2. The kernel gives each output tile to one program. It walks K from 0 upwards, in order, and adds every product
     into one fp32 accumulator. There is no split of K, no second accumulator and no atomic, so neither the number
     of rows and columns nor the place of an element in its tile can reorder a sum.
  3. Bias is added to the fp32 accumulator, and one rounding makes the output.

On Hopper, 16-bit operands that TMA can address go to matmul_tma.py: the same sums, so the same bits, faster.

Under TRITON_INTERPRET=1 (no GPU) the same kernel runs on CPU tensors. That tests the logic, not the GPU's bits.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from .matmul_configs import MatmulConfig, choose_config, choose_tma_config, fit, shared_memory_of
from .matmul_tma import tma_layouts, tma_matmul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# @triton.jit looks at TRITON_INTERPRET when it decorates, that is, when this module is imported. Setting the variable
# later changes nothing about the kernels, so what counts is its value here.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreting() -> bool:
    """True if the kernels of this package run in Triton's interpreter, as decided when they were imported."""
    return _INTERPRETED


def launch_on(tensor: Tensor, operation: str) -> contextlib.AbstractContextManager:
    """Context in which a kernel launch goes to `tensor`'s own device.

    Raises ValueError if that device cannot run Triton kernels; `operation` names the caller in the message.
    """
    if tensor.device.type != "cuda":
        if interpreting():
            return contextlib.nullcontext()
        raise ValueError(
            f"{operation}: the Triton kernel needs CUDA tensors, got device {tensor.device}; allowed: a CUDA device, "
            f"or use {operation} of tp_invariant.kernels.reference, which runs anywhere"
        )
    if tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


# In the interpreter tl.dot is one BLAS call per block, so there block_k does change bits: all shapes share one value.
_INTERPRETER_CONFIG = MatmulConfig(32, 64, 64, num_warps=4, num_stages=2)


# `steps` must stay a run-time value. With one step known at compile time the loop folds away, and Triton then rewrites
# dot(a, b, 0) + bias into dot(a, b, bias): another order of additions, so other bits.
@triton.jit(do_not_specialize=["steps"])
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr,
    M, N, K, steps,
    stride_am, stride_ak, stride_bk, stride_bn, stride_bias,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Tiles in groups of GROUP_M tile rows, column by column within a group: neighbours share their part of B.
    pid = tl.program_id(0)
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
    ks = tl.arange(0, BLOCK_K)
    ks_wide = ks.to(tl.int64)
    # A stride of 1 is a compile-time constant, so the compiler sees along which dimension a load is contiguous.
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks_wide[None, :] * stride_ak
    b_ptrs = b_ptr + ks_wide[:, None] * stride_bk + cols[None, :] * stride_bn
    a_step = tl.full((), BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full((), BLOCK_K, tl.int64) * stride_bk
    row_mask = rows[:, None] < M
    col_mask = cols[None, :] < N

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, steps):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_mask, other=0.0)
            b = tl.load(b_ptrs, mask=col_mask, other=0.0)
        else:
            # Both operands are zeroed past K: a zero times a stray NaN or Inf would poison the sum.
            k_left = K - step * BLOCK_K
            a = tl.load(a_ptrs, mask=row_mask & (ks[None, :] < k_left), other=0.0)
            b = tl.load(b_ptrs, mask=col_mask & (ks[:, None] < k_left), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += a_step
        b_ptrs += b_step

    # Products that underflow can leave -0.0, which the zeros past K turn into +0.0 for some block_k and not for others.
    # Adding +0.0 (which compilers may not drop) makes it +0.0 always, and no bias the same as a bias of zeros.
    acc += 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols * stride_bias, mask=cols < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    c_ptrs = c_ptr + rows[:, None] * N + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=row_mask & col_mask)


def _check(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    allowed = ", ".join(str(dtype) for dtype in DTYPES)
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"matmul: {name} is a {type(tensor).__name__}; allowed: a torch.Tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"matmul: {name} has dtype {tensor.dtype}; allowed: {allowed}")
        if tensor.device != a.device:
            raise ValueError(f"matmul: {name} is on {tensor.device}; allowed: the device of a, {a.device}")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"matmul: out_dtype is {out_dtype}; allowed: {allowed}, or None for a's dtype")
    if b.dtype != a.dtype:
        raise TypeError(f"matmul: b has dtype {b.dtype}; allowed: the dtype of a, {a.dtype}")
    for name, tensor, shape in (("a", a, "[M, K]"), ("b", b, "[K, N]")):
        if tensor.dim() != 2:
            raise ValueError(f"matmul: {name} has shape {tuple(tensor.shape)}; allowed: two dimensions, {shape}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"matmul: b has shape {tuple(b.shape)}; allowed: [K, N] with the K of a, whose shape is {tuple(a.shape)}"
        )
    for name, tensor in (("a", a), ("b", b)):
        if tensor.numel() == 0:
            raise ValueError(f"matmul: {name} has shape {tuple(tensor.shape)}; allowed: every dimension at least 1")
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(f"matmul: bias has shape {tuple(bias.shape)}; allowed: [N], here ({b.shape[1]},)")


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | None = None,
) -> Tensor:
    """C = A B + bias, where C[i, j] has the same bits whichever other rows and columns are computed with it.

    Args:
        a: [M, K], bfloat16, float16 or float32, any strides (transposed, sliced and expanded views included).
        b: [K, N], dtype and device of `a`, any strides.
        bias: [N] of any of these dtypes, or None; added in fp32 before the one final rounding.
        out_dtype: dtype of the result, any of the three; None means a's.
        config: tile shape for this module's kernel, for tests and tuning. None leaves the choice to `choose_config`,
            and on Hopper takes the TMA kernel where it can. Neither changes a bit.

    Returns:
        Contiguous [M, N]. Accumulated in fp32; fp32 operands are multiplied in IEEE fp32, never TF32.
        Not differentiable by itself: call it inside a torch.autograd.Function.

    Raises:
        TypeError: an argument that is not a tensor, an unsupported dtype, or a and b of different dtypes.
        ValueError: wrong shapes, an empty dimension (M, N or K is 0), different devices, or a device that cannot run
            Triton kernels.
    """
    _check(a, b, bias, out_dtype)
    m, k = a.shape
    n = b.shape[1]
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if config is None and (layouts := tma_layouts(a, b, out_dtype)) is not None:
        with launch_on(a, "matmul"):
            return tma_matmul(a, b, bias, out_dtype, layouts, choose_tma_config(m, n, out_dtype))
    if config is None:
        config = _INTERPRETER_CONFIG if interpreting() else choose_config(m, n, k, a.dtype)
        if a.is_cuda:
            config = fit(config, a.element_size(), shared_memory_of(a.device.index))

    with launch_on(a, "matmul"):
        if interpreting():
            # The interpreter's tl.dot on bfloat16 is garbage, its bfloat16 subnormals are wrong and it rounds to
            # bfloat16 by truncation: let it see fp32 only, and let torch convert on both sides.
            a, b = a.float(), b.float()
            bias = None if bias is None else bias.float()
        c = torch.empty((m, n), device=a.device, dtype=torch.float32 if interpreting() else out_dtype)
        grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
        _matmul_kernel[grid](
            a, b, c, c if bias is None else bias,
            m, n, k, triton.cdiv(k, config.block_k),
            a.stride(0), a.stride(1), b.stride(0), b.stride(1), 0 if bias is None else bias.stride(0),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            EVEN_K=k % config.block_k == 0, HAS_BIAS=bias is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return c.to(out_dtype)
