"""Gradient scaling whose ranks agree on whether a step is taken."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..comm.collectives import Group, gather_major, resolve_group
from ..consistency.compare import group_device
from ..consistency.same_gradients import maximal_groups
from ..core.dtensors import is_dtensor, local_of
from ..layers.parameters import carried_group


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks all skip a step where one of them has an infinite or NaN gradient.

    An overflow may be in one rank's shard alone. torch's own scaler agrees on it for DTensors; over plain shards each
    rank would go by its own overflows, so that one steps and another skips. This one gathers one number over each
    group that the optimizer's parameters carry, or whose mesh they are on. Where another rank has an overflow, the
    first element of a gradient becomes infinite before torch looks at it. Everything else is torch's.

    Args:
        pp_group: a ProcessGroup or 1-D DeviceMesh of pipeline stages, whose parameters are others: they agree, too.
    """

    def __init__(
        self, *args: Any, pp_group: dist.ProcessGroup | DeviceMesh | Group | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._pp_group = resolve_group(pp_group)
        self._agreed: set[Optimizer] = set()  # since the last update

    def unscale_(self, optimizer: Optimizer) -> None:
        """torch's. A collective: all ranks of the parameters' groups must call it."""
        self._agree(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """torch's. A collective, unless unscale_ was called."""
        self._agree(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._agreed.clear()
        super().update(*args, **kwargs)

    @torch.no_grad()
    def _agree(self, optimizer: Optimizer) -> None:
        if not self.is_enabled() or optimizer in self._agreed:
            return
        self._agreed.add(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        groups = maximal_groups(_groups_of(parameters))
        stages = [self._pp_group] if self._pp_group.size > 1 else []
        if not groups and not stages:
            return
        grads = [_values_of(p.grad) for p in parameters if p.grad is not None]
        device = parameters[0].device
        norm = torch.nn.utils.get_total_norm(grads, math.inf) if grads else torch.zeros((), device=device)
        overflow = (~norm.isfinite()).float().to(device)
        # each group the same number of times on all its ranks, whichever other groups these are in
        for group in [*groups, *stages, *groups]:
            overflow = gather_major(overflow.to(group_device(group, device)), group).max()
        for grad in [grad for grad in grads if grad.numel()][:1]:
            first = grad.view(-1)[:1]
            first.copy_(torch.where(overflow.to(grad.device) > 0, math.inf, first))


def _values_of(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else local_of(grad)


def _groups_of(parameters: list[Tensor]) -> list[Group]:
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_dtensor(p))  # few, and resolving is slow
    groups = [carried_group(p) for p in parameters if not is_dtensor(p)]
    return [
        *(group for group in dict.fromkeys(groups) if group is not None),
        *(resolve_group(mesh.get_group(axis)) for mesh in meshes for axis in range(mesh.ndim)),
    ]
