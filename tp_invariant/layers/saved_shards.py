"""torch.distributed.checkpoint is refused plain shards in state dicts, which it would write as whole tensors.

What it finds under one name on several ranks, as plain tensors, it takes for copies of one tensor, and writes one of
them: the other ranks' parts would be lost, and nobody would notice before the checkpoint is loaded. It asks a tensor
that has an attribute `__create_write_items__` what to write; this one raises. Copies of such a tensor have no such
attribute, and neither have tensors that torch.save has written.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..comm.collectives import Group, ranks_of
from ..core.dtensors import local_of


def refuse_to_save(tensor: Tensor, group: Group) -> None:
    """Has torch.distributed.checkpoint raise a ValueError for a state dict's tensor, which the group's ranks share."""

    def refuse(name: str, _: Any) -> Any:
        raise ValueError(
            f"torch.distributed.checkpoint saves {name} of shape {tuple(tensor_shape)}, which on rank {rank} is its "
            f"part of a parameter that is sharded over the ranks {ranks}: it would write one rank's part as the whole. "
            "Use tp_invariant.checkpoint.save or tp_invariant.full_state_dict, or make the layers with tp_group as a "
            "DeviceMesh, whose DTensors say what they are. To write each rank's parts by themselves, give copies "
            "({name: tensor.clone() ..}), and another checkpoint_id for each"
        )

    tensor_shape, rank, ranks = tensor.shape, group.rank, list(ranks_of(group))
    local: Any = local_of(tensor)  # which a DTensor over data-parallel ranks asks
    local.__create_write_items__ = refuse
    local.__getstate__ = dict  # pickled, the tensor has no attributes
