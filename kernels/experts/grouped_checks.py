"""What the products by expert take: the same on every device, refused in the same words. No Triton here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gemm.operands import check_kinds, check_output, overlap


def _check_dims(operation: str, name: str, tensor: Tensor, shape: str, first: int) -> None:
    """Raises unless the tensor has the dimensions of `shape`, those from `first` on at least 1."""
    if tensor.dim() != shape.count(",") + 1 or not all(tensor.shape[first:]):
        empty = f"{', '.join(shape[1:-1].split(', ')[first:])} at least 1"
        raise ValueError(f"{operation}: {name} has shape {tuple(tensor.shape)}; allowed: {shape} with {empty}")


def check_offsets(operation: str, offsets: Tensor, experts: int | None, a: Tensor) -> int:
    """The number of experts. Raises unless offsets is int32 [E + 1], on a CPU also unless it divides a's rows."""
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{operation}: offsets is a {type(offsets).__name__}; allowed: a torch.Tensor")
    if offsets.dtype != torch.int32:
        raise TypeError(f"{operation}: offsets has dtype {offsets.dtype}; allowed: torch.int32")
    if offsets.dim() != 1 or not len(offsets) or experts not in (None, len(offsets) - 1):
        allowed = "[E + 1]" if experts is None else f"[E + 1] with the E of b, here ({experts + 1},)"
        raise ValueError(f"{operation}: offsets has shape {tuple(offsets.shape)}; allowed: {allowed}")
    if offsets.device != a.device:
        raise ValueError(f"{operation}: offsets is on {offsets.device}; allowed: the device of a, {a.device}")
    if len(offsets) == 1 and a.shape[0]:
        raise ValueError(f"{operation}: a has shape {tuple(a.shape)}; allowed: no rows where there are no experts")
    if offsets.device.type == "cpu":  # on a GPU the host would wait for the values
        values = offsets.tolist()
        if values[0] != 0 or values[-1] != a.shape[0] or values != sorted(values):
            raise ValueError(
                f"{operation}: offsets is {values}; allowed: ascending values from 0 to the rows of a, {a.shape[0]}"
            )
    return len(offsets) - 1


def check_grouped_matmul(
    a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    operation = "grouped_matmul"
    check_kinds(operation, a, b, bias, out_dtype)
    _check_dims(operation, "a", a, "[R, K]", 1)
    _check_dims(operation, "b", b, "[E, K, N]", 1)
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{operation}: b has shape {tuple(b.shape)}; allowed: [E, K, N] with the K of a, whose shape is "
            f"{tuple(a.shape)}"
        )
    if bias is not None and bias.shape != (b.shape[0], b.shape[2]):
        raise ValueError(
            f"{operation}: bias has shape {tuple(bias.shape)}; allowed: [E, N], here {(b.shape[0], b.shape[2])}"
        )
    check_offsets(operation, offsets, b.shape[0], a)


def check_grouped_outer(
    a: Tensor, b: Tensor, offsets: Tensor, out: Tensor | None, accumulate: bool, out_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of the result."""
    operation = "grouped_outer"
    check_kinds(operation, a, b, None, out_dtype)
    _check_dims(operation, "a", a, "[R, M]", 1)
    _check_dims(operation, "b", b, "[R, N]", 1)
    if a.shape[0] != b.shape[0]:
        raise ValueError(
            f"{operation}: b has shape {tuple(b.shape)}; allowed: [R, N] with the R of a, whose shape is "
            f"{tuple(a.shape)}"
        )
    experts = check_offsets(operation, offsets, None, a)
    if isinstance(out, Tensor):
        shape = (experts, a.shape[1], b.shape[1])
        if out.shape != shape or not out.is_contiguous() or out.is_neg():
            raise ValueError(
                f"{operation}: out has shape {tuple(out.shape)} and strides {out.stride()}; allowed: contiguous "
                f"[E, M, N], here {shape}, that torch does not negate by a flag"
            )
        for name, read in (("a", a), ("b", b)):
            if out.numel() and read.numel() and overlap(out, read):
                raise ValueError(f"{operation}: out shares memory with {name}; allowed: memory of its own")
        if not experts:
            return out.dtype
        out = out[0]
    return check_output(a.t(), b, out, out_dtype, accumulate)
