"""Parameters of modules that are not this library's, of which each rank holds a part: attention sinks, one a head.

Such a module computes with this rank's features or heads, between a column-parallel and a row-parallel layer, and its
own parameter is one number for each of them. Its code stays as it is and sees this rank's part, whose gradient is then
complete: no rank has another summand of it, and nothing is sent. The module's class becomes one of the same name that
says how the parameter is sharded, so that checkpoints, full state dicts and clipping know. On a DeviceMesh the
parameter is a DTensor, which the module's forward reads as its local tensor (replicate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.derived_class import derived_class
from ..core.dtensors import is_dtensor
from .in_place import Place, Places, place_parameters
from .parameters import ShardedModule, ShardSpec
from .replicate import ForeignModule


def shard_parameters(module: nn.Module, group: Group, dims: Mapping[str, int]) -> None:
    """Each rank of `group` keeps its part of parameters that `module` holds itself.

    Args:
        module: of a class that is not this library's, with full parameters; it has no attribute `group`.
        dims: {name of a parameter: the dim that is sharded}; the degree divides its size.
    """
    kind: Any = type(module)
    place_parameters(module, places_of_parts(module, group, dims))
    module.__class__ = derived_class(kind, PartsOfForeignModule, frozenset(dims))
    assert isinstance(module, PartsOfForeignModule)
    module.group, module.part_dims = group, dict(dims)


def places_of_parts(module: nn.Module, group: Group, dims: Mapping[str, int], name: str = "") -> Places:
    """Where these parameters go. name: the module's in its model."""
    named = {key: (module.get_parameter(key), f"{name}.{key}" if name else key) for key in dims}
    return {id(p): Place(full_name, p, ShardSpec(group, dims[key], 1)) for key, (p, full_name) in named.items()}


class PartsOfForeignModule(ForeignModule, ShardedModule):
    """What the classes of these modules have in common."""

    part_dims: dict[str, int]

    @property
    def SHARDED_PARAMETERS(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.part_dims)

    def shard_spec(self, name: str) -> ShardSpec:
        return ShardSpec(self.group, self.part_dims.get(name), 1)

    def shows(self, name: str, parameter: Tensor) -> bool:
        """Not while fully_shard has cut the parameter once more, over a mesh of more dims."""
        part = is_dtensor(parameter) and name in self.part_dims and parameter.device_mesh == self.group.mesh
        return part or super().shows(name, parameter)
