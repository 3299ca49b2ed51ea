"""Gradient scaling whose ranks agree on whether a step is taken."""

from __future__ import annotations

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

    An overflow may be in one rank's shard alone. torch's own scaler agrees on it for DTensors; of plain shards each
    rank would go by its own, so that one steps and another skips, and their scales part: refused (step_checks.py). This
    one gathers one number over each group that the optimizer's parameters carry, or whose mesh they are on, and takes
    the largest, which adds nothing on the wire. Everything else is torch's.

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
        groups = maximal_groups([self._pp_group, *(group for p in parameters for group in _groups_of(p))])
        if groups:
            device = parameters[0].device
            largest = torch.stack([v.to(device) for v in found.values()] or [torch.zeros((), device=device)]).max()
            for _ in groups:  # so that it arrives from group to group, whichever they have ranks in common
                for group in groups:
                    largest = gather_major(largest.to(group_device(group, device)), group).max()
            for value in found.values():
                value.copy_(largest)
        return found


def _groups_of(p: Tensor) -> list[Group]:
    if not is_dtensor(p):
        carried = carried_group(p)
        return [] if carried is None else [carried]
    return [resolve_group(p.device_mesh.get_group(axis)) for axis in range(p.device_mesh.ndim)]
