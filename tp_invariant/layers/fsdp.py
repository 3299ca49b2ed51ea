"""fully_shard over data parallel ranks of a model whose parameters are DTensors over tensor parallel ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..core.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """For fully_shard's `shard_placement_fn`: which dim of a parameter to shard over the data parallel ranks.

        fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)

    fully_shard's own choice is dim 0. Of a layer with partition_stride over a DeviceMesh a rank has several pieces of
    that dim, and what is cut once more torch puts together in another order, silently: `full_tensor()` and
    get_model_state_dict give wrong values. This shards another dim of such a parameter, whose size the data parallel
    degree must divide, and leaves all others to fully_shard. Without it `clip_grad_norm_`, full state dicts,
    checkpoints and the first step of an optimizer raise a ValueError.

    Raises:
        ValueError: a parameter that has no other dim: the bias of such a layer.
    """
    if not is_dtensor(parameter):
        return None
    from torch.distributed.tensor import Shard

    dims = {placement.dim for placement in parameter.placements if getattr(placement, "split_factor", 1) > 1}  # type: ignore[attr-defined]
    if not dims:
        return None
    others = [dim for dim in range(parameter.dim()) if dim not in dims]
    if not others:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {parameter.placements}, each rank having "
            "several pieces of its only dim: fully_shard cannot cut it any further. Make the layer with bias=False, or "
            "one layer for each piece"
        )
    return Shard(others[0])
