"""act(gate) * up for a CPU: torch's own operators, in blocks of full vectors (kernels/elementwise.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..elementwise import in_whole_vectors
from .torch_gated_checks import check_torch_gated

# of each activation the function of gate, and its backward, a function of its gradient and gate
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu": F.relu,
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda grad, gate: torch.ops.aten.gelu_backward(grad, gate, approximate="tanh"),
    "relu": lambda grad, gate: torch.ops.aten.threshold_backward(grad, gate, 0),
}


def torch_gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See torch_gated.torch_gated_forward."""
    check_torch_gated("torch_gated_forward", activation, gate=gate, up=up)
    return (in_whole_vectors(_FORWARD[activation], gate) * up).contiguous()


def torch_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See torch_gated.torch_gated_backward."""
    outs = {} if out is None else {"dgate": out[0], "dup": out[1]}
    check_torch_gated("torch_gated_backward", activation, gate=gate, up=up, dy=dy, **outs)
    dgate = in_whole_vectors(_BACKWARD[activation], dy * up, gate)
    dup = dy * in_whole_vectors(_FORWARD[activation], gate)
    if out is None:
        return dgate.contiguous(), dup.contiguous()
    return out[0].copy_(dgate), out[1].copy_(dup)
