"""What the norms take: the same on every device, refused in the same words. No Triton here."""

from __future__ import annotations

from types import EllipsisType

import torch
from torch import Tensor

from ..dtypes import DTYPES


def check(
    operation: str, name: str, tensor: Tensor, shape: tuple | EllipsisType | None, like: Tensor, dtypes=DTYPES
) -> None:
    """Raise unless `tensor` has `shape`, the device of `like`, and one of `dtypes`.

    shape: None is any [rows, H], Ellipsis any [.., H].
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: {name} is a {type(tensor).__name__}; allowed: a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{operation}: {name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
    if isinstance(shape, tuple):
        fits, allowed = tensor.shape == shape, str(shape)
    else:
        dims, allowed = tensor.dim(), f"[{'rows' if shape is None else '..'}, H] with H at least 1"
        fits = (dims == 2 if shape is None else dims > 0) and tensor.shape[-1] > 0
    if not fits:
        raise ValueError(f"{operation}: {name} has shape {tuple(tensor.shape)}; allowed: {allowed}")
    if tensor.device != like.device:
        raise ValueError(f"{operation}: {name} is on {tensor.device}; allowed: the device of the rows, {like.device}")


def as_rows(x: Tensor) -> Tensor:
    """x [.., H] as [T, H]: a view where strides allow."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def check_forward(
    operation: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> None:
    """`check` of what forward is given."""
    check(operation, "x", x, ..., x)
    check(operation, "weight", weight, (x.shape[-1],), x)
    if bias is not None:
        check(operation, "bias", bias, (x.shape[-1],), x)
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"{operation}: out_dtype is {out_dtype}; allowed: {', '.join(map(str, DTYPES))}, None")
    if not eps >= 0:
        raise ValueError(f"{operation}: eps is {eps}; allowed: 0 or more")


def check_backward(
    operation: str, dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, rms: bool, heads: bool = False
) -> int:
    """`check` of what backward is given: dy [.., H] of T rows like x, mean (unless `rms`) and rstd float32 [T].

    heads: these may be [T, heads], of each of as many equal parts of a row. Returns their number.
    """
    check(operation, "x", x, ..., x)
    check(operation, "dy", dy, tuple(x.shape), x)
    shape: tuple = (x.numel() // x.shape[-1],)
    parts = rstd.shape[1] if heads and isinstance(rstd, Tensor) and rstd.dim() == 2 else None
    if parts is not None and parts and x.shape[-1] % parts == 0:
        shape = (*shape, parts)
    check(operation, "rstd", rstd, shape, x, (torch.float32,))
    if not rms:
        check(operation, "mean", mean, shape, x, (torch.float32,))  # type: ignore[arg-type]
    return parts or 1


def check_rows_per_sum(operation: str, rows_per_sum: int) -> None:
    if rows_per_sum < 1:
        raise ValueError(f"{operation}: rows_per_sum is {rows_per_sum}; allowed: 1 or more")


def check_fold(operation: str, partial_sums: Tensor, *out_dtypes: torch.dtype | None) -> None:
    """`check` of what a fold is given; two dtypes that are not None are those of two halves of each row."""
    check(operation, "partial_sums", partial_sums, None, partial_sums, (torch.float32,))
    for out_dtype in out_dtypes:
        if out_dtype is not None and out_dtype not in DTYPES:
            raise TypeError(f"{operation}: out_dtype is {out_dtype}; allowed: {', '.join(map(str, DTYPES))}, None")
    if len(out_dtypes) == 2 and out_dtypes[1] is not None and partial_sums.shape[1] % 2:
        raise ValueError(f"{operation}: partial_sums has shape {tuple(partial_sums.shape)}; allowed: two equal halves")
