"""What the gated activations with torch's bits take: the same on every device. No Triton here."""

from __future__ import annotations

from torch import Tensor

from ..dtypes import DTYPES

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def check_torch_gated(operation: str, activation: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are [.., H] of the first one's shape, device and dtype."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operation}: activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{operation}: {name} is a {type(x).__name__}; allowed: a torch.Tensor")
        if x.dtype not in DTYPES or x.dtype != like.dtype:
            raise TypeError(
                f"{operation}: {name} has dtype {x.dtype}; allowed: {first}'s, one of {', '.join(map(str, DTYPES))}"
            )
        if x.dim() == 0 or x.shape[-1] == 0 or x.shape != like.shape:
            raise ValueError(
                f"{operation}: {name} has shape {tuple(x.shape)}; allowed: [.., H] with H at least 1, that of {first}"
            )
        if x.device != like.device:
            raise ValueError(f"{operation}: {name} is on {x.device}; allowed: the device of {first}, {like.device}")
