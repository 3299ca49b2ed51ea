"""SwiGLU and GeGLU as one operator, act(gate) * up. Elementwise: each rank computes the elements that it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.compiled import as_custom_op
from ..core.layout import reshape_in_place
from ..kernels.select import select
from .linear import flatten_tokens


class Gated(torch.autograd.Function):
    """y = act(gate) * up, with act "silu" or "gelu_tanh"; kernels/rowwise/gated.py says what is rounded.

    gate, up, y, dgate, dup  [.., H], of one shape and dtype, sharded in any way
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        y = select("gated activation", gate.device.type).gated_forward(*map(flatten_tokens, (gate, up)), activation)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return reshape_in_place(y, gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        rows = map(flatten_tokens, (dy, gate, up))
        grads = select("gated activation", gate.device.type).gated_backward(*rows, ctx.activation)
        dgate, dup = (
            reshape_in_place(grad, gate.shape) if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)
        )
        return dgate, dup, None


def _output(gate: Tensor, up: Tensor, activation: str) -> list[Tensor]:
    return [gate.new_empty(gate.shape)]


def _restore(ctx: Any, dtypes: Any, activation: str) -> None:
    ctx.activation = activation


invariant_gated = as_custom_op(
    Gated, name="gated", tensors=("gate", "up"), outputs=_output, restore=_restore, saved=(0, 1)
)
