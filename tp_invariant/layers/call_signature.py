"""What tells one call of a layer from another: for the layer's own memory of its calls, and for ranks to compare."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled


class CallSignature(NamedTuple):
    """All that a layer's checks depend on, except its group and its gemm_fn. The layer keeps their result under it.

    layer      what the layer's name is made of, and what else decides how its input is checked
    options    pairs of an option's name in error messages and its value
    """

    invariant: bool
    layer: tuple
    options: tuple[tuple[str, Any], ...]
    x_shape: torch.Size
    x_dtype: torch.dtype
    device: torch.device
    x_requires_grad: bool
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    weight_requires_grad: bool
    grad: bool


def signature_of(
    invariant: bool, layer: tuple, options: tuple[tuple[str, Any], ...], x: Tensor, weight: Tensor
) -> CallSignature:
    return CallSignature(
        invariant, layer, options, x.shape, x.dtype, x.device, x.requires_grad,
        weight.shape, weight.dtype, weight.requires_grad, torch.is_grad_enabled(),
    )  # fmt: skip


def facts_of(call: CallSignature, name: str) -> dict[str, Any]:
    """What every rank must have alike: it decides which collectives run, and on what. name: the layer's."""
    return {
        "the TP-invariant mode": call.invariant,
        "the layer": name,
        **dict(call.options),
        "the shape of x": tuple(call.x_shape),
        "the dtype of x": str(call.x_dtype),
        "whether x needs a gradient": call.grad and call.x_requires_grad,
        "whether the weight needs one": call.grad and call.weight_requires_grad,
    }


def mode_of_known_calls() -> bool | None:
    """Whether the mode is on; None where every call is checked anew."""
    if torch.compiler.is_compiling():
        return None
    try:
        return None if is_call_check_enabled() else is_tp_invariant_mode_enabled()
    except ValueError:  # of a variable: who reads it next raises it again
        return None
