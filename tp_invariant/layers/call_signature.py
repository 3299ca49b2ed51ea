"""The signature of a layer's call: the key under which a layer stores checked calls, and what ranks compare."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class CallSignature(NamedTuple):
    """Everything that a layer's checks depend on, except its group and its gemm_fn: the key of the checks' result.

    layer      the attributes in the layer's name, and the others that decide how its input is checked
    options    the values of the layer's options
    """

    invariant: bool
    layer: tuple
    options: tuple
    x_shape: torch.Size
    x_dtype: torch.dtype
    device: torch.device
    x_requires_grad: bool
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    weight_requires_grad: bool
    grad: bool


def signature_of(invariant: bool, layer: tuple, options: tuple, x: Tensor, weight: Tensor) -> CallSignature:
    return CallSignature(
        invariant, layer, options, x.shape, x.dtype, x.device, x.requires_grad,
        weight.shape, weight.dtype, weight.requires_grad, torch.is_grad_enabled(),
    )  # fmt: skip


def facts_to_compare(call: CallSignature, name: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """What must be equal on every rank, because it decides which collectives run and on which data.

    name: the layer's. options: the names of the call's options, for error messages.
    """
    return {
        "the TP-invariant mode": call.invariant,
        "the layer": name,
        **dict(zip(options, call.options, strict=True)),
        "the shape of x": tuple(call.x_shape),
        "the dtype of x": str(call.x_dtype),
        "whether x needs a gradient": call.grad and call.x_requires_grad,
        "whether the weight needs one": call.grad and call.weight_requires_grad,
    }
