"""Checks of a matmul's operands, shared by every matmul of this package and so equal on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DTYPES

_ALLOWED = ", ".join(map(str, DTYPES))


def check_kinds(operation: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Raises unless these are tensors on one device and of compatible dtypes."""
    for name, tensor in (("a", a), ("b", b)) if bias is None else (("a", a), ("b", b), ("bias", bias)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name} is a {type(tensor).__name__}; allowed: a torch.Tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operation}: {name} has dtype {tensor.dtype}; allowed: {_ALLOWED}")
        if tensor.device != a.device:
            raise ValueError(f"{operation}: {name} is on {tensor.device}; allowed: the device of a, {a.device}")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"{operation}: out_dtype is {out_dtype}; allowed: {_ALLOWED}, or None for a's dtype")
    if b.dtype != a.dtype:
        raise TypeError(f"{operation}: b has dtype {b.dtype}; allowed: the dtype of a, {a.dtype}")


def check_bias(operation: str, bias: Tensor | None, n: int) -> None:
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{operation}: bias has shape {tuple(bias.shape)}; allowed: [N], here ({n},)")


def check_operands(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, *, may_be_empty: bool = False
) -> None:
    """Raises TypeError or ValueError unless a [M, K], b [K, N] and bias, [N] or None, agree and are supported."""
    check_kinds("matmul", a, b, bias, out_dtype)
    if a.dim() != 2 or b.dim() != 2:
        name, tensor, shape = ("a", a, "[M, K]") if a.dim() != 2 else ("b", b, "[K, N]")
        raise ValueError(f"matmul: {name} has shape {tuple(tensor.shape)}; allowed: two dimensions, {shape}")
    (m, k), (b_k, n) = a.shape, b.shape
    if k != b_k:
        raise ValueError(
            f"matmul: b has shape {tuple(b.shape)}; allowed: [K, N] with the K of a, whose shape is {tuple(a.shape)}"
        )
    if not (may_be_empty or (m and n and k)):
        name, tensor = ("a", a) if not (m and k) else ("b", b)
        raise ValueError(f"matmul: {name} has shape {tuple(tensor.shape)}; allowed: every dimension at least 1")
    check_bias("matmul", bias, n)


def check_batches(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> None:
    """Raises TypeError or ValueError unless a [B, M, K] and b [B, K, N] agree, have elements and are supported."""
    check_kinds("batched_matmul", a, b, None, out_dtype)
    for name, tensor, shape in (("a", a, "[B, M, K]"), ("b", b, "[B, K, N]")):
        if tensor.dim() != 3 or not tensor.numel():
            raise ValueError(
                f"batched_matmul: {name} has shape {tuple(tensor.shape)}; allowed: {shape}, every dimension at least 1"
            )
    if (b.shape[0], b.shape[1]) != (a.shape[0], a.shape[2]):
        raise ValueError(
            f"batched_matmul: b has shape {tuple(b.shape)}; allowed: [B, K, N] with the B and K of a, whose shape is "
            f"{tuple(a.shape)}"
        )
