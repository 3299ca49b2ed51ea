"""Gated activations for a CPU: plain torch, the contract of gated.py, and what both take. No Triton here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..elementwise import in_whole_vectors, in_whole_vectors_


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


def halves(x: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up), views of x [.., 2 H] that holds them one after the other, or a column of each in turn."""
    if x.shape[-1] % 2:
        raise ValueError(f"halves: x has shape {tuple(x.shape)}; allowed: an even last dim, for gate and up")
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return gate, up


def _exp_and_slope(g: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """exp(-z) and z'(g); see gated.py."""
    scale, cubic, _ = ACTIVATIONS[activation]
    if not cubic:
        return in_whole_vectors_(torch.exp_, -(g * scale)), scale
    square = g * g
    z = (g + square * g * cubic) * scale
    return in_whole_vectors_(torch.exp_, -z), (square * (3 * cubic) + 1.0) * scale


def _clamped(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """In fp32, gate clamped, and the clamped up + 1, where the activation has a limit."""
    g, u, limit = gate.float(), up.float(), ACTIVATIONS[activation].limit
    return (g.clamp(max=limit), u.clamp(-limit, limit) + 1.0) if limit else (g, u)


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See gated.gated_forward."""
    g, u = _clamped(gate, up, activation)
    act = (g / (_exp_and_slope(g, activation)[0] + 1.0)).to(gate.dtype)
    return (act.float() * u).to(gate.dtype, memory_format=torch.contiguous_format)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See gated.gated_backward."""
    g, u = _clamped(gate, up, activation)
    exp, slope = _exp_and_slope(g, activation)
    act, sigmoid = (g / (exp + 1.0)).to(gate.dtype).float(), 1.0 / (exp + 1.0)
    dact = (dy.float() * u).to(gate.dtype).float()
    rest = torch.where(exp > 1.0, 1.0 - sigmoid, exp * sigmoid)
    grads = dact * (sigmoid * (g * rest * slope + 1.0)), dy.float() * act
    if limit := ACTIVATIONS[activation].limit:
        passes = gate <= limit, (up >= -limit) & (up <= limit)
        grads = tuple(torch.where(passed, grad, 0.0) for passed, grad in zip(passes, grads, strict=True))
    dgate, dup = out or (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    return dgate.copy_(grads[0]), dup.copy_(grads[1])


# --- with torch's bits: its own operators, in blocks of full vectors (kernels/elementwise.py) -------------------------

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
    """See gated.torch_gated_forward."""
    return (in_whole_vectors(_FORWARD[activation], gate) * up).contiguous()


def torch_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See gated.torch_gated_backward."""
    dgate = in_whole_vectors(_BACKWARD[activation], dy * up, gate)
    dup = dy * in_whole_vectors(_FORWARD[activation], gate)
    if out is None:
        return dgate.contiguous(), dup.contiguous()
    return out[0].copy_(dgate), out[1].copy_(dup)
