"""Gated activations as operators: with the bits of torch's own, and those of experts. Elementwise: a rank computes the
elements that it holds."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..core.compiled import as_custom_op
from ..core.differentiation import once_differentiable
from ..core.layout import fresh_view
from ..kernels.dtypes import DTYPES
from ..kernels.rowwise.reference_gated import halves
from ..kernels.select import select
from .linear import flatten_tokens

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS = get_args(Activation)
_KERNEL = "gated activation"


def gated_activation(
    gate: Tensor, up: Tensor | None = None, activation: Activation = "silu", *, up_first: bool = False
) -> Tensor:
    """act(gate) * up, SwiGLU or GeGLU, as one operator: one launch forward and one backward on a GPU.

        tpi.gated_activation(self.gate_proj(x), self.up_proj(x), "silu")
        tpi.gated_activation(self.gate_up_proj(x), activation="gelu_tanh")

    With the bits of torch's operators: act(gate) and the product are each rounded to the tensors' dtype, and so are the
    gradients. On GPUs "gelu" alone has other last bits than torch's, by another erf. Saves gate and up for backward and
    no intermediate. A rank may hold any of the features: each element depends on its own alone. With torch.compile it
    is one operator with the same bits. It cannot be differentiated twice.

    Args:
        gate: [.., H], bfloat16, float16 or float32, any strides; without `up` [.., 2 H]: both, one after the other.
        up: [.., H], of gate's dtype and device.
        activation: "silu", "gelu" (by erf), "gelu_tanh" or "relu".
        up_first: without `up`: the first half of gate is up.

    Returns:
        [.., H], contiguous, of gate's dtype.

    Raises:
        TypeError: another dtype.
        ValueError: an unknown activation; shapes, dtypes or devices that differ; an odd last dim without `up`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}")
    if gate.dtype not in DTYPES:
        raise TypeError(f"gate has dtype {gate.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"gate has shape {tuple(gate.shape)}: without up its last dim must be even, for both")
        return gated_activation_of_halves(gate, activation, up_first)
    if up_first:
        raise ValueError("up_first=True is for one tensor that holds gate and up: leave up out")
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise ValueError(
            f"gate is {gate.dtype} {tuple(gate.shape)} on {gate.device} and up is {up.dtype} {tuple(up.shape)} on "
            f"{up.device}: they must have one shape, dtype and device"
        )
    return gated_activation_of_two(gate, up, activation)


class GatedActivation(torch.autograd.Function):
    """y = act(gate) * up. kernels/rowwise/gated.py has the formulas and says what is rounded.

    gate, up, y, dgate, dup  [.., H], of one shape and dtype, sharded in any way
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.settings = (activation,)
        return select(_KERNEL, gate.device.type).torch_gated_forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = select(_KERNEL, gate.device.type).torch_gated_backward(dy, gate, up, *ctx.settings)
        need_gate, need_up, _ = ctx.needs_input_grad
        return dgate if need_gate else None, dup if need_up else None, None


gated_activation_of_two = as_custom_op(
    GatedActivation,
    name="gated_activation",
    tensors=("gate", "up"),
    outputs=lambda gate, up, activation: [gate.new_empty(gate.shape)],
    saved=(0, 1),
)


def _halves(x: Tensor, up_first: bool) -> tuple[Tensor, Tensor]:
    """(gate, up), views of x [.., 2 H]."""
    first, second = x.chunk(2, dim=-1)
    return (second, first) if up_first else (first, second)


class GatedActivationOfHalves(torch.autograd.Function):
    """The same of one tensor, and one gradient, of which the kernel writes both halves.

    x, dx  [.., 2 H]: gate and up one after the other, or with up_first up and gate      y  [.., H]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, up_first: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = activation, up_first
        return select(_KERNEL, x.device.type).torch_gated_forward(*_halves(x, up_first), activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        activation, up_first = ctx.settings
        dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        kernels = select(_KERNEL, x.device.type)
        kernels.torch_gated_backward(dy, *_halves(x, up_first), activation, out=_halves(dx, up_first))
        return dx, None, None


def _half(x: Tensor, *settings: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], x.shape[-1] // 2))]


gated_activation_of_halves = as_custom_op(
    GatedActivationOfHalves,
    name="gated_activation_of_halves",
    tensors=("x",),
    outputs=_half,
    saved=(0,),
)


# --- for experts ----------------------------------------------------------------------------------------------------


class GatedHalves(torch.autograd.Function):
    """y = act(gate) * up, with act "silu", "gelu_tanh" or "clamped_silu" (where it is up + 1, both clamped), by the
    experts' formulas; kernels/rowwise/gated.py has them, and says what is rounded.

    x, dx  [.., 2 H]: gate and up one after the other or, interleaved, a column of each in turn      y  [.., H]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, interleaved: bool) -> Tensor:
        gate, up = halves(flatten_tokens(x), interleaved=interleaved)
        y = select(_KERNEL, x.device.type).gated_forward(gate, up, activation)
        ctx.save_for_backward(x)
        ctx.settings = activation, interleaved
        return fresh_view(y.contiguous(), (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        activation, interleaved = ctx.settings
        rows = flatten_tokens(x)
        dx = torch.empty(rows.shape, device=x.device, dtype=x.dtype)
        (gate, up), grads = (halves(tensor, interleaved=interleaved) for tensor in (rows, dx))
        select(_KERNEL, x.device.type).gated_backward(flatten_tokens(dy), gate, up, activation, out=grads)
        return fresh_view(dx.contiguous(), x.shape), None, None


invariant_gated_halves = as_custom_op(
    GatedHalves,
    name="gated_halves",
    tensors=("x",),
    outputs=_half,
    saved=(0,),
)
