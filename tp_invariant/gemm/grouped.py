"""Products by expert: rows sorted by expert, each multiplied by its own expert's matrix.

    offsets   int32 [E + 1]: the rows of expert e are offsets[e] : offsets[e + 1], none or any number

The bundled kernels take all experts in one launch, and the host does not wait for the offsets. Any other gemm_fn is
called once for each expert that has rows, and on a GPU the host waits for the offsets. Because a gemm_fn is
slice-invariant, a row's bits depend on this row and its expert's matrix alone.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..kernels.experts.reference_grouped import experts_with_rows
from ..kernels.select import select
from .gemm_fn import GemmFn, bundled_gemm_fn, column_sums, gemm, resolve_gemm_fn, uses_bundled


def _kernels(gemm_fn: GemmFn | None, a: Tensor) -> ModuleType | None:
    """The bundled kernels, where the gemm_fn that applies is the bundled one without options."""
    kind = "cuda" if a.is_cuda else a.device.type
    if kind not in ("cuda", "cpu"):
        return None
    own = uses_bundled(gemm_fn) or resolve_gemm_fn(gemm_fn, a.device) is bundled_gemm_fn(a.device)
    return select("grouped GEMM", kind) if own else None


def grouped_matmul(
    gemm_fn: GemmFn | None, a: Tensor, b: Tensor, offsets: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """a [R, K], b [E, K, N], any strides, bias [E, N] -> [R, N]: each row times its expert's matrix, plus its bias."""
    if kernels := _kernels(gemm_fn, a):
        return kernels.grouped_matmul(a, b, offsets, bias=bias)
    c = a.new_empty((a.shape[0], b.shape[2]))
    for expert, rows in experts_with_rows(offsets):
        c[rows] = gemm(gemm_fn, a[rows], b[expert], bias=None if bias is None else bias[expert])
    return c


def grouped_outer(gemm_fn: GemmFn | None, a: Tensor, b: Tensor, offsets: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """a [R, M], b [R, N] -> [E, M, N]: for each expert aᵀ b over its rows, in their order; zeros where it has none."""
    if kernels := _kernels(gemm_fn, a):
        return kernels.grouped_outer(a, b, offsets, out_dtype=out_dtype)
    c = a.new_zeros((len(offsets) - 1, a.shape[1], b.shape[1]), dtype=out_dtype)
    for expert, rows in experts_with_rows(offsets):
        c[expert] = gemm(gemm_fn, a[rows].t(), b[rows], out_dtype=out_dtype)
    return c


def grouped_column_sums(gemm_fn: GemmFn | None, x: Tensor, offsets: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """x [R, N] -> [E, N]: for each expert the sum of its rows, in their order; zeros where it has none."""
    if kernels := _kernels(gemm_fn, x):
        return kernels.grouped_outer(x.new_ones((x.shape[0], 1)), x, offsets, out_dtype=out_dtype).squeeze(1)
    sums = x.new_zeros((len(offsets) - 1, x.shape[1]), dtype=out_dtype)
    for expert, rows in experts_with_rows(offsets):
        sums[expert] = column_sums(gemm_fn, x[rows], out_dtype=out_dtype)
    return sums
