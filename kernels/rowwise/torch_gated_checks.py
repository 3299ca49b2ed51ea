"""What the gated activations with torch's bits take: the same on every device. No Triton here."""

from __future__ import annotations

from torch import Tensor

from .norm_checks import check

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def check_torch_gated(operation: str, activation: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are [T, H] of the first one's shape, device and dtype."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operation}: activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    first, *others = tensors.items()
    check(operation, *first, None, first[1])
    for name, tensor in others:
        check(operation, name, tensor, tuple(first[1].shape), first[1], (first[1].dtype,))
