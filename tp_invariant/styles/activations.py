"""What a layer of a parallel style takes and returns: plain tensors or DTensors, as in torch's styles.

A layer computes with this rank's part. A DTensor is placed as the style says, or the call is an error: nothing is moved
but by the layer itself, which adds nothing on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm.collectives import Group
from ..core.dtensors import as_dtensor, is_dtensor
from ..core.module_hooks import with_key


@dataclass(frozen=True)
class ActivationLayouts:
    """Hooks of a layer's forward. A negative dim of a Shard counts from the end.

    group             over a mesh
    source            the style's argument that says `taken`, for errors
    taken, returned   how x and y are placed
    """

    group: Group
    source: str
    taken: Placement
    returned: Placement
    use_local_output: bool

    def install(self, module: nn.Module) -> None:
        with_key(module.register_forward_pre_hook(self.take, with_kwargs=True), "layout")
        with_key(module.register_forward_hook(self.give), "layout")

    @property
    def mesh(self) -> DeviceMesh:
        assert self.group.mesh is not None
        return self.group.mesh

    def take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        name = "" if args else next(iter(kwargs), "")
        x = args[0] if args else kwargs.get(name)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{type(module).__name__} on rank {self.group.rank} was given {type(x).__name__} as its first "
                "argument: it must be a tensor"
            )
        if not is_dtensor(x):
            return args, kwargs
        if x.device_mesh != self.mesh or x.placements != (_of_dims(self.taken, x.dim()),):
            raise ValueError(
                f"x of {type(module).__name__} on rank {self.group.rank} is a DTensor placed as {x.placements} on "
                f"{x.device_mesh}, and {self.source}={self.taken} on {self.mesh}: give the style the layout that x has "
                "if it takes that one, or redistribute x before"
            )
        local = x.to_local()
        # one that is still on its way (redistribute(.., async_op=True)) has no memory that a kernel could read
        local = local if type(local) is Tensor else local.clone()
        return ((local, *args[1:]), kwargs) if args else (args, {**kwargs, name: local})

    def give(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        if self.use_local_output:
            return y
        return as_dtensor(y, (self.mesh, (_of_dims(self.returned, y.dim()),)), f"the output of {type(module).__name__}")


def _of_dims(placement: Placement, dims: int) -> Placement:
    """As DTensors have it: a Shard's dim counted from the front."""
    return Shard(placement.dim % dims) if isinstance(placement, Shard) and placement.dim < 0 else placement
