"""SwiGLU and GeGLU for a CPU: plain torch, the contract of gated.py, one operation at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import in_whole_vectors_
from .gated_checks import CUBIC, SCALE, check_gated


def _exp_and_slope(g: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """exp(-z) and z'(g); see gated.py."""
    if activation == "silu":
        return in_whole_vectors_(torch.exp_, -g), 1.0
    square = g * g
    z = (g + square * g * CUBIC) * (2 * SCALE)
    return in_whole_vectors_(torch.exp_, -z), (square * (3 * CUBIC) + 1.0) * (2 * SCALE)


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See gated.gated_forward."""
    check_gated("gated_forward", activation, gate=gate, up=up)
    g = gate.float()
    act = (g / (_exp_and_slope(g, activation)[0] + 1.0)).to(gate.dtype)
    return (act.float() * up.float()).to(gate.dtype, memory_format=torch.contiguous_format)


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """See gated.gated_backward."""
    check_gated("gated_backward", activation, gate=gate, up=up, dy=dy)
    g = gate.float()
    exp, slope = _exp_and_slope(g, activation)
    act, sigmoid = (g / (exp + 1.0)).to(gate.dtype).float(), 1.0 / (exp + 1.0)
    dact = (dy.float() * up.float()).to(gate.dtype).float()
    rest = torch.where(exp > 1.0, 1.0 - sigmoid, exp * sigmoid)
    grads = dact * (sigmoid * (g * rest * slope + 1.0)), dy.float() * act
    dgate, dup = (grad.to(gate.dtype, memory_format=torch.contiguous_format) for grad in grads)
    return dgate, dup
