"""The signature of a layer's call, under which the layer stores it, and the checks of a signature's first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..consistency.agreement import check_agreement, share_error
from ..consistency.shards import Part


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


def check_first_use(
    layer: Any,
    x: Tensor,
    check: Callable[[], bool],
    signature: Callable[[bool], CallSignature],
    options: tuple[str, ...],
    sharded_weight: Tensor | None = None,
    weight: Tensor | None = None,
    part: Part | None = None,
) -> bool:
    """Checks a layer's call on this rank, then over its ranks if they move bytes. Later calls do not come here.

    Args:
        check: the checks of this rank; says whether the mode is on. All ranks get to know of an error.
        signature: that of the call, given whether the mode is on.
        options: the names of its options, for error messages.
        sharded_weight, weight, part: as for check_agreement.

    Returns:
        Whether the mode is on.
    """
    try:
        invariant = check()
    except (TypeError, ValueError) as error:
        if layer._moves_bytes:
            share_error(error, layer.group, x.device, layer._agreed)
        raise
    if layer._moves_bytes:
        facts = facts_to_compare(signature(invariant), layer._name, options)
        check_agreement(
            facts, layer.group, x.device, layer._agreed, sharded_weight, layer.shards_may_be_equal, weight, part,
            whole=layer._whole_parameters(),
        )  # fmt: skip
    return invariant
