"""`as_boxes`: what a program can say itself where torch is not mended (core/pieces.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.dtensors import is_dtensor
from ..core.pieces import as_boxes_of


def as_boxes(state_dict: Any) -> Any:
    """The same state dict, in the same memory, whose DTensors offer a box for each piece that this rank has.

    `dcp.save` and `dcp.load` of torch.distributed.checkpoint ask for it by themselves in a process that has made a
    layer over a DeviceMesh, or called one. This is for programs that have done neither and handle state dicts alone.

    Args:
        state_dict: a nest of dicts, lists and tuples.

    Raises:
        ValueError: a DTensor whose pieces are cut again by another mesh dim (fully_shard's default placement, see
            `fsdp_placement`), or are not of one size.
    """
    if isinstance(state_dict, Mapping):
        return {key: as_boxes(value) for key, value in state_dict.items()}
    if isinstance(state_dict, (list, tuple)):
        return type(state_dict)(map(as_boxes, state_dict))
    return as_boxes_of(state_dict) if is_dtensor(state_dict) else state_dict
