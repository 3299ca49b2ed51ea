"""Gated activations for a CPU: plain torch, the contract of gated.py, one operation at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import in_whole_vectors_
from .gated_checks import ACTIVATIONS, check_gated


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
    check_gated("gated_forward", activation, gate=gate, up=up)
    g, u = _clamped(gate, up, activation)
    act = (g / (_exp_and_slope(g, activation)[0] + 1.0)).to(gate.dtype)
    return (act.float() * u).to(gate.dtype, memory_format=torch.contiguous_format)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See gated.gated_backward."""
    outs = {} if out is None else {"dgate": out[0], "dup": out[1]}
    check_gated("gated_backward", activation, gate=gate, up=up, dy=dy, **outs)
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
