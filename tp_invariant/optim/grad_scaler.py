"""Gradient scaling whose ranks agree on whether a step is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, gather_major, resolve_group
from ..consistency.agreement import group_device
from ..consistency.same_gradients import maximal_groups
from ..core.dtensors import is_dtensor
from ..layers.parameters import carried_group


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks all skip a step where one of them has found an infinite or NaN gradient.

    An overflow may be in one rank's shard alone. torch's own scaler agrees on it for DTensors; over plain shards
    each rank would go by its own overflows, so that one steps and another skips. This one gathers one number over each
    group that the optimizer's parameters carry, or whose mesh they are on, and takes the largest.

    Args:
        pp_group: a ProcessGroup or 1-D DeviceMesh of pipeline stages, whose parameters are others: they agree, too.
    """

    def __init__(
        self, *args: Any, pp_group: dist.ProcessGroup | DeviceMesh | Group | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._pp_group = resolve_group(pp_group)

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        """unscale_() and fused optimizers' step() both come here, on every rank."""
        found = super()._unscale_grads_(optimizer, *args)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        groups = maximal_groups(_groups_of(parameters))
        stages = [self._pp_group] if self._pp_group.size > 1 else []
        if groups or stages:
            device = parameters[0].device
            largest = torch.stack([v.to(device) for v in found.values()] or [torch.zeros((), device=device)]).max()
            # each group the same number of times on all its ranks, whichever other groups these are in
            for group in [*groups, *stages, *groups]:
                largest = gather_major(largest.to(group_device(group, device)), group).max()
            for value in found.values():
                value.copy_(largest)
        return found


def _groups_of(parameters: Sequence[Tensor]) -> list[Group]:
    meshes: dict[DeviceMesh, None] = {}  # few, and resolving is slow
    groups: dict[Group, None] = {}
    for p in parameters:
        if is_dtensor(p):
            meshes[p.device_mesh] = None
        elif (carried := carried_group(p)) is not None:
            groups[carried] = None
    return [*groups, *(resolve_group(mesh.get_group(axis)) for mesh in meshes for axis in range(mesh.ndim))]
