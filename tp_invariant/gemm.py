"""The gemm_fn protocol: the one door through which every GEMM of every layer goes.

    gemm_fn(a, b, *, bias=None, out_dtype=None) -> c
        a     [M, K], any strides (a transposed view is normal)
        b     [K, N], any strides
        bias  [N] or None, added in fp32 before the one final rounding
        c     [M, N], dtype out_dtype or a.dtype

It must be slice-invariant: c[i, j] depends on a[i, :] and b[:, j] alone, in an order along K that depends on K alone.
`tp_invariant.testing.assert_slice_invariant` checks that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor


class GemmFn(Protocol):
    """The signature in this module's docstring."""

    def __call__(
        self, a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


_default: GemmFn | None = None


def set_default_gemm_fn(gemm_fn: GemmFn | None) -> None:
    """Sets the process-wide gemm_fn for modules that were given none; None goes back to the bundled one per device.

    Raises:
        TypeError: gemm_fn is neither callable nor None.
    """
    global _default
    _default = check_callable(gemm_fn)


def check_callable(gemm_fn: GemmFn | None) -> GemmFn | None:
    if gemm_fn is not None and not callable(gemm_fn):
        raise TypeError(
            f"gemm_fn={gemm_fn!r} is not callable: pass gemm_fn(a, b, *, bias=None, out_dtype=None) or None"
        )
    return gemm_fn


def bundled_gemm_fn(device: torch.device) -> GemmFn:
    """The bundled gemm_fn: Triton on CUDA, torch on a CPU.

    Raises:
        NotImplementedError: another kind of device.
    """
    if device.type == "cuda":
        from .kernels.matmul import matmul  # imports triton, so only here

        return matmul
    if device.type == "cpu":
        from .kernels.reference import matmul as reference_matmul

        return reference_matmul
    raise NotImplementedError(
        f"no gemm_fn is bundled for device {str(device)!r}, only for cuda and cpu: pass gemm_fn= or set_default_gemm_fn"
    )


BUNDLED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(gemm_fn: GemmFn | None, x: Tensor, name: str) -> None:
    """A TypeError that names x if the bundled gemm_fn would get a dtype that it does not take."""
    if gemm_fn is None and _default is None and x.dtype not in BUNDLED_DTYPES:
        raise TypeError(
            f"{name} is {x.dtype}: the bundled kernels take {', '.join(map(str, BUNDLED_DTYPES))}; convert the layer "
            "and its input, or pass a gemm_fn of your own"
        )


def resolve_gemm_fn(gemm_fn: GemmFn | None, device: torch.device) -> GemmFn:
    """Precedence: the module's own, then the process-wide default, then the bundled one for the device."""
    for fn in (gemm_fn, _default):
        if fn is not None:
            return fn
    return bundled_gemm_fn(device)


def gemm(
    gemm_fn: GemmFn | None, a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """c = a @ b (+ bias) through the gemm_fn that applies; empty operands need no kernel and call none.

    Raises:
        RuntimeError: the gemm_fn returned another shape, dtype or device than its contract says.
    """
    out_dtype = out_dtype or a.dtype
    rows, cols = a.shape[0], b.shape[1]
    if rows == 0 or cols == 0:
        return a.new_empty((rows, cols), dtype=out_dtype)
    if a.shape[1] == 0:  # an empty sum
        zeros = a.new_zeros((rows, cols), dtype=out_dtype)
        return zeros if bias is None else zeros + bias.to(out_dtype)
    fn = resolve_gemm_fn(gemm_fn, a.device)
    if torch.is_autocast_enabled(a.device.type):  # entering the context costs as much as a launch
        with torch.autocast(a.device.type, enabled=False):
            c = fn(a, b, bias=bias, out_dtype=out_dtype)
    else:
        c = fn(a, b, bias=bias, out_dtype=out_dtype)
    if not isinstance(c, Tensor) or c.shape != (rows, cols) or c.dtype != out_dtype or c.device != a.device:
        got = f"{tuple(c.shape)} {c.dtype} on {c.device}" if isinstance(c, Tensor) else f"a {type(c).__name__}"
        raise RuntimeError(
            f"gemm_fn {getattr(fn, '__qualname__', fn)!r} returned {got}; for a "
            f"{tuple(a.shape)} and b {tuple(b.shape)} it must return {(rows, cols)} {out_dtype} on {a.device}"
        )
    return c


@dataclass(frozen=True)
class RankMajor:
    """A matrix whose dim `k_dim` is sharded over ranks, gathered rank-major, not laid out: `buffer[rank]` is a shard.

    A GEMM kernel may read `buffer` in place by walking the sharded dim as (stride, rank, local); one that cannot takes
    `matrix()`, which copies where it must.

        buffer   [P, rows, K/P] for k_dim = 1, [P, K/P, cols] for k_dim = 0
        stride   partition_stride of the sharded dim
    """

    buffer: Tensor
    k_dim: int
    stride: int = 1

    def matrix(self) -> Tensor:
        """The full matrix in TP=1's order: [rows, K] for k_dim = 1, [K, cols] for k_dim = 0."""
        if self.k_dim == 0:
            return rearrange(self.buffer, "rank (stride k) col -> (stride rank k) col", stride=self.stride)
        return rearrange(self.buffer, "rank row (stride k) -> row (stride rank k)", stride=self.stride)


def gemm_rank_major(
    gemm_fn: GemmFn | None,
    a: RankMajor,
    b: RankMajor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """c = a @ b for operands gathered rank-major: a over [rows, K], b over [N, K] (k_dim 1) or [K, N] (k_dim 0).

    The bundled Triton kernel reads the buffers in place where it can; otherwise both are laid out first.
    """
    out_dtype = out_dtype or a.buffer.dtype
    if (
        a.buffer.is_cuda
        and a.stride == b.stride
        and resolve_gemm_fn(gemm_fn, a.buffer.device) is bundled_gemm_fn(a.buffer.device)
    ):
        from .kernels.matmul import matmul_rank_major

        c = matmul_rank_major(a.buffer, b.buffer, b_k_dim=b.k_dim, stride=a.stride, bias=bias, out_dtype=out_dtype)
        if c is not None:
            return c
    b_matrix = b.matrix()
    return gemm(gemm_fn, a.matrix(), b_matrix if b.k_dim == 0 else b_matrix.t(), bias=bias, out_dtype=out_dtype)


def column_sums(gemm_fn: GemmFn | None, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the rows of x [T, N] -> [N], as a GEMM with a row of ones, so that it has a GEMM's invariance."""
    return gemm(gemm_fn, x.new_ones((1, x.shape[0])), x, out_dtype=out_dtype).squeeze(0)
