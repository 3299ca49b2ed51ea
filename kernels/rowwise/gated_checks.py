"""What the gated activations take, and their numbers: the same on every device. No Triton here."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from .norm_checks import check


class Numbers(NamedTuple):
    """Those of gated.py's formulas; a limit of 0 stands for none."""

    scale: float
    cubic: float = 0.0
    limit: float = 0.0


ACTIVATIONS = {
    "silu": Numbers(1.0),
    "gelu_tanh": Numbers(2 * math.sqrt(2 / math.pi), cubic=0.044715),
    "clamped_silu": Numbers(1.702, limit=7.0),
}


def check_gated(operation: str, activation: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are [T, H] of the first one's shape, device and dtype."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operation}: activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    first, *others = tensors.items()
    check(operation, *first, None, first[1])
    for name, tensor in others:
        check(operation, name, tensor, tuple(first[1].shape), first[1], (first[1].dtype,))


def halves(x: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up), views of x [.., 2 H] that holds them one after the other, or a column of each in turn."""
    if x.shape[-1] % 2:
        raise ValueError(f"halves: x has shape {tuple(x.shape)}; allowed: an even last dim, for gate and up")
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return gate, up
