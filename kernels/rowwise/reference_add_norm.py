"""A residual addition and the norm of the sum for a CPU: torch's addition, then this library's norm."""

from __future__ import annotations

from torch import Tensor

from .norm_checks import check, check_forward
from .reference_norm import norm_forward


def add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """See add_norm.add_norm_forward."""
    check_forward("add_norm_forward", x, weight, bias, eps, None)
    check("add_norm_forward", "residual", residual, tuple(x.shape), x, (x.dtype,))
    s = (x + residual).contiguous()
    return s, *norm_forward(s, weight, bias, eps=eps, rms=rms, zero_centered=zero_centered)
