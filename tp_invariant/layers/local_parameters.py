"""Parameters of modules that are not this library's, of which each rank holds a part: attention sinks, one a head.

Such a module computes with this rank's features or heads, between a column-parallel and a row-parallel layer, and its
own parameter is one number for each of them. Its code stays as it is and sees this rank's part, whose gradient is then
complete: no rank has another summand of it, and nothing is sent. The module's class becomes one of the same name that
says how the parameter is sharded, so that checkpoints, full state dicts and clipping know. On a DeviceMesh the
parameter is a DTensor, which the module's forward reads as its local tensor (replicate.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import Tensor

from ..comm.collectives import Group
from ..core.dtensors import is_dtensor
from .parameters import ShardedModule, ShardSpec
from .replicate import ForeignModule


def parts_on_meta(group: Group, dims: Mapping[str, int]) -> PartsOfForeignModule:
    """What a module becomes of whose own parameters each rank of `group` has a part (layers/in_place.py).

    dims: {name of a parameter: the dim that is sharded}; the degree divides its size.
    """
    parts = PartsOfForeignModule()
    parts.group, parts.part_dims = group, dict(dims)
    return parts


class PartsOfForeignModule(ForeignModule, ShardedModule):
    """What the classes of these modules have in common."""

    part_dims: dict[str, int]

    @property
    def derived_by(self) -> tuple[Hashable, ...]:  # type: ignore[override]
        return (frozenset(self.part_dims),)

    @property
    def SHARDED_PARAMETERS(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.part_dims)

    def shard_spec(self, name: str) -> ShardSpec:
        return ShardSpec(self.group, self.part_dims.get(name), 1)

    def shows(self, name: str, parameter: Tensor) -> bool:
        """Not while fully_shard has cut the parameter once more, over a mesh of more dims."""
        part = is_dtensor(parameter) and name in self.part_dims and parameter.device_mesh == self.group.mesh
        return part or super().shows(name, parameter)
