"""SwiGLU, GeGLU and gpt-oss's form as one operator. Elementwise: each rank computes the elements that it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.compiled import as_custom_op
from ..core.differentiation import once_differentiable
from ..core.layout import fresh_view
from ..kernels.rowwise.reference_gated import halves
from ..kernels.select import select
from .linear import flatten_tokens


class Gated(torch.autograd.Function):
    """y = act(gate) * up, with act "silu", "gelu_tanh" or "clamped_silu" (where it is up + 1, both clamped).

    kernels/rowwise/gated.py has the formulas and says what is rounded.

    gate, up, y, dgate, dup  [.., H], of one shape and dtype, sharded in any way
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        y = select("gated activation", gate.device.type).gated_forward(*map(flatten_tokens, (gate, up)), activation)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return fresh_view(y.contiguous(), gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        rows = map(flatten_tokens, (dy, gate, up))
        grads = select("gated activation", gate.device.type).gated_backward(*rows, ctx.activation)
        dgate, dup = (
            fresh_view(grad.contiguous(), gate.shape) if needed else None
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


class GatedHalves(torch.autograd.Function):
    """The same of one tensor, and one gradient that is written in place: two copies less.

    x, dx  [.., 2 H]: gate and up one after the other or, interleaved, a column of each in turn      y  [.., H]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, interleaved: bool) -> Tensor:
        gate, up = halves(flatten_tokens(x), interleaved=interleaved)
        y = select("gated activation", x.device.type).gated_forward(gate, up, activation)
        ctx.save_for_backward(x)
        ctx.activation, ctx.interleaved = activation, interleaved
        return fresh_view(y.contiguous(), (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = flatten_tokens(x)
        dx = torch.empty(rows.shape, device=x.device, dtype=x.dtype)
        gate, up = halves(rows, interleaved=ctx.interleaved)
        select("gated activation", x.device.type).gated_backward(
            flatten_tokens(dy), gate, up, ctx.activation, out=halves(dx, interleaved=ctx.interleaved)
        )
        return fresh_view(dx.contiguous(), x.shape), None, None


def _halves_output(x: Tensor, activation: str, interleaved: bool) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], x.shape[-1] // 2))]


def _restore_halves(ctx: Any, dtypes: Any, activation: str, interleaved: bool) -> None:
    ctx.activation, ctx.interleaved = activation, interleaved


invariant_gated_halves = as_custom_op(
    GatedHalves,
    name="gated_halves",
    tensors=("x",),
    outputs=_halves_output,
    restore=_restore_halves,
    saved=(0,),
)
