"""Batched slice-invariant matrix product in Triton: each matrix has the bits that matmul.py gives it alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, interpreting, launch_on
from ..plans import Kernel
from .matmul import INTERPRETER_CONFIG, no_negated_views, product_tile
from .matmul_configs import MatmulConfig, choose_config, fit, shared_memory_of
from .operands import check_batches


@triton.jit(do_not_specialize=["steps"])
def _batched_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, steps,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_cb, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    one = (tl.program_id(0) // tiles).to(tl.int64)
    product_tile(
        tl.program_id(0) % tiles, a_ptr + one * stride_ab, b_ptr + one * stride_bb, c_ptr + one * stride_cb, c_ptr,
        M, N, K, steps, 0, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, 0,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_K, False, False, False,
    )  # fmt: skip


_batched = Kernel(_batched_kernel)


def batched_matmul(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, config: MatmulConfig | None = None
) -> Tensor:
    """C[i] = A[i] B[i] in one launch, each with the bits of `matmul(a[i], b[i], out_dtype=out_dtype)`.

    Args:
        a: [B, M, K], bfloat16, float16 or float32, any strides (a stride of 0, which repeats a matrix, included).
        b: [B, K, N], dtype and device of `a`, any strides.
        out_dtype: as for `matmul`.
        config: tile shape, for tests. It changes no bit.

    Returns:
        Contiguous [B, M, N].

    Raises:
        TypeError: an argument that is not a tensor, an unsupported dtype, a and b of different dtypes.
        ValueError: shapes that do not fit, an empty dimension, different devices, or a device that cannot run Triton
            kernels.
    """
    check_batches(a, b, out_dtype)
    a, b = no_negated_views(a, b)
    out_dtype = out_dtype or a.dtype
    batch, m, k = a.shape
    n = b.shape[2]
    if config is None:
        config = INTERPRETER_CONFIG if interpreting() else choose_config(m, n, k, a.dtype)
        if a.is_cuda:
            config = fit(config, a.element_size(), shared_memory_of(a.device.index))
    with launch_on(a, "batched_matmul"):
        if interpreting():
            a, b = a.float(), b.float()  # as in matmul.py
        c = torch.empty((batch, m, n), device=a.device, dtype=torch.float32 if interpreting() else out_dtype)
        tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
        at_once = max(1, (2**31 - 1) // tiles)  # programs of one launch
        for start in range(0, batch, at_once):
            mine = slice(start, start + at_once)
            _batched(
                a.device.index, (tiles * a[mine].shape[0],),
                (
                    a[mine], b[mine], c[mine], m, n, k, cdiv(k, config.block_k), *a.stride(), *b.stride(),
                    c.stride(0), c.stride(1),
                ),
                (config.block_m, config.block_n, config.block_k, config.group_m, k % config.block_k == 0),
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
        return c.to(out_dtype)
