"""The norm of all gradients from partial sums, the same bits at every tensor-parallel degree.

A partial sum is the sum of squares of one slice of a gradient, at one index of its sharded dim: of a row of a
column-parallel weight, of a column of a row-parallel one. One rank holds the whole slice and computes it. The partial
sums of all parameters are gathered, in one collective for each group, put into TP=1's order, and added on every rank.
kernels/grad_norm/reference.py states the order of both sums.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import Group, OnMesh, gather_major, on_mesh
from ..core.dtensors import is_dtensor
from ..core.layout import Stride, unshard
from ..core.parameter_names import label_of
from ..core.torch_private import local_tensor
from ..kernels.dtypes import DTYPES
from ..kernels.select import select
from .parameters import stride_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_part(grad: Tensor) -> Tensor:
    """This rank's part of a gradient, in the same memory; waits for an asynchronous collective that produces it."""
    local = local_tensor(grad) if is_dtensor(grad) else grad
    return local.wait() if hasattr(local, "wait") else local  # AsyncCollectiveTensor


def mesh_shards(grad: DTensor, mesh: OnMesh) -> list[tuple[Group, int]]:
    """(group of the mesh dim, tensor dim) for each dim of its mesh that shards the tensor, also one of a single rank.

    There are none for a tensor that is not on this rank.
    """
    return [
        (group, placement.dim % grad.dim())
        for group, placement in zip(mesh.groups, grad.placements, strict=False)
        if hasattr(placement, "dim")
    ]


# --- gradients ------------------------------------------------------------------------------------------------------

SINGLE_RANK = Group(None, 0, 1)


def partition_dim_of(p: Tensor) -> int | None:
    """The dim in the parameter's attribute partition_dim; None if it names none."""
    dim = getattr(p, "partition_dim", -1)
    return dim if isinstance(dim, int) and 0 <= dim < p.dim() else None


class MeshLayout(NamedTuple):
    """How a DTensor is placed on its mesh.

    mesh     the ranks of that mesh, and its groups
    shards   (group of the mesh dim, tensor dim) for each mesh dim that shards it; none if it is not on this rank
    stride   partition_stride of the dim that is sharded
    text     the placements as text
    """

    mesh: OnMesh
    shards: list[tuple[Group, int]]
    stride: int
    text: str


class HeldGradient(NamedTuple):
    """The gradient of a parameter, and how it is sharded.

    number   the parameter's place in the list handed over
    label    what errors call it
    over     the group over which the parameter is sharded according to its attributes, or SINGLE_RANK
    grad     the gradient, or None
    local    this rank's part of it
    layout   None unless it is a DTensor
    """

    parameter: Tensor
    number: int
    label: str
    over: Group
    grad: Any
    local: Any
    layout: MeshLayout | None

    @classmethod
    def of(cls, p: Tensor, number: int, over: Group) -> HeldGradient:
        grad, layout = p.grad, None
        if grad is not None and is_dtensor(grad):
            # what is not on this rank, or is Partial, is refused later
            stride = max(getattr(placement, "split_factor", 1) for placement in grad.placements)
            mesh = on_mesh(grad.device_mesh)
            layout = MeshLayout(mesh, mesh_shards(grad, mesh), stride, str(grad.placements))
        return cls(p, number, label_of(p, number), over, grad, None if grad is None else local_part(grad), layout)

    @property
    def is_empty(self) -> bool:
        return not self.local.numel() and not self.grad.numel()

    def named(self, rank: int) -> str:
        return f"the gradient of {self.label} with shape {tuple(self.parameter.shape)} on rank {rank}"


# --- where partial sums are -----------------------------------------------------------------------------------------


class _SlicedGradient(NamedTuple):
    """A gradient and how its slices are distributed.

    local    this rank's part of the gradient
    dim      the dim that is sliced: one partial sum for each index
    group    the ranks over which the slices are sharded
    rows     the number of slices on the first rank of the group, which has the most
    stride   partition_stride of `dim`, or the sizes of its pieces
    whole    the number of slices of the whole parameter
    """

    local: Tensor
    dim: int
    group: Group
    rows: int
    stride: Stride
    whole: int


def _sliced_gradient(held: HeldGradient) -> _SlicedGradient:
    p, over, layout, local = held.parameter, held.over, held.layout, held.local
    own_dim = partition_dim_of(p)
    dim = own_dim or 0
    if layout is not None:
        shards = layout.shards
        if own_dim is None and shards:
            dim = shards[-1][1]
        # several Shards are in an order that is FSDP2's, or the mesh's
        if len(shards) == 1 and over.size == 1 and dim == shards[0][1]:
            group, shape = shards[0][0], held.grad.shape
            if not local.numel():  # its shape is whatever was given to from_local
                local = local.new_empty([0 if i == dim else n for i, n in enumerate(shape)])
            size = shape[dim]
            # torch.chunk's rule: full pieces, then one shorter, then none
            if layout.stride == 1 or size % (layout.stride * group.size) == 0:
                return _SlicedGradient(local, dim, group, -(-size // group.size), layout.stride, size)
        if shards:
            local = local_part(held.grad.full_tensor())  # gathers bytes
    rows = local.shape[dim] if local.dim() else 1
    stride = stride_of(p) if over.size > 1 else 1
    return _SlicedGradient(local, dim, over, rows, stride, rows * over.size)


class _GatherPlan(NamedTuple):
    """Index tensors, int64.

    selected     for each group: which elements of [this rank's partial sums, 0] are gathered over it
    positions    for each partial sum of the whole model, in TP=1's order: its index in the concatenation [this rank's
                 partial sums, 0, what the first group gathered, ..]
    """

    selected: list[Tensor]
    positions: Tensor


@functools.lru_cache(maxsize=16)
def _gather_plan(facts: tuple[tuple[int, int, int, int, Stride, int], ...], device: torch.device) -> _GatherPlan:
    """facts: for each parameter (slices here, rows, index of the group or -1, its size, stride, slices in all)."""
    from ..kernels.cached_tensors import refuse_in_capture

    refuse_in_capture(device.type, "clip_grad_norm_")
    starts = list(itertools.accumulate((fact[0] for fact in facts), initial=0))
    base = starts[-1] + 1
    selected: list[Tensor] = []
    spread: dict[int, Tensor] = {}
    for number in range(max(fact[2] for fact in facts) + 1):
        members = [i for i, fact in enumerate(facts) if fact[2] == number]
        here = [_range(starts[i], starts[i + 1]) for i in members]
        padded = [F.pad(x, (0, facts[i][1] - len(x)), value=starts[-1]) for i, x in zip(members, here, strict=True)]
        selected.append(torch.cat(padded).to(device))
        size, width = facts[members[0]][3], sum(map(len, padded))
        major = _range(base, base + size * width).view(size, width)
        for i, place in zip(members, major.split([len(x) for x in padded], dim=1), strict=True):
            spread[i] = unshard(place, dim=0, stride=facts[i][4])[: facts[i][5]]
        base += size * width
    positions = [spread[i] if i in spread else _range(starts[i], starts[i + 1]) for i in range(len(facts))]
    return _GatherPlan(selected, torch.cat(positions).to(device))


def _range(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, device="cpu")  # not on torch's default device


def _in_tp1_order(partial_sums: Tensor, parts: Sequence[_SlicedGradient]) -> Tensor:
    """This rank's partial sums [n] -> those of the whole model, in TP=1's order."""
    from ..kernels.cached_tensors import hold_until_read

    groups = list(dict.fromkeys(part.group for part in parts if part.group.size > 1))
    if not groups:
        return partial_sums  # every rank has all of them
    numbers = {group: number for number, group in enumerate(groups)}
    slices = [part.local.shape[part.dim] if part.local.dim() else 1 for part in parts]
    facts = tuple(
        (here, part.rows, numbers.get(part.group, -1), part.group.size, part.stride, part.whole)
        for here, part in zip(slices, parts, strict=True)
    )
    make = _gather_plan if type(partial_sums) is Tensor else _gather_plan.__wrapped__  # fake tensors must not be kept
    order = make(facts, partial_sums.device)
    hold_until_read(order.positions, *order.selected)
    with_zero = F.pad(partial_sums, (0, 1))
    gathered = [
        gather_major(with_zero[select], group).flatten() for select, group in zip(order.selected, groups, strict=True)
    ]
    return torch.cat([with_zero, *gathered])[order.positions]


# --- sums and scaling -----------------------------------------------------------------------------------------------


def _kernels(tensors: Sequence[Tensor]) -> Any:
    """The kernels for these tensors: plain torch also for fake tensors and those on meta, which have no memory."""
    return select("gradient norm", "cuda" if all(type(x) is Tensor and x.is_cuda for x in tensors) else "cpu")


def partial_sums_of(held: Sequence[HeldGradient]) -> Tensor:
    """The partial sums of all these gradients, fp32, in TP=1's order, the same on every rank. Call it under no_grad."""
    parts = list(map(_sliced_gradient, held))
    grads = [part.local if part.local.dtype in DTYPES else part.local.float() for part in parts]
    partial_sums = _kernels(grads).sums_of_squares(grads, [part.dim for part in parts])
    return _in_tp1_order(partial_sums, parts)


def norm_of(partial_sums: Tensor) -> Tensor:
    """The L2 norm, fp32 and 0-dim."""
    return _kernels([partial_sums]).fold(partial_sums).sqrt()


def scale(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies grads in place by a 0-dim fp32 tensor, element by element."""
    for device in dict.fromkeys(grad.device for grad in grads):
        here, there = [grad for grad in grads if grad.device == device], factor.to(device)
        if supported := [grad for grad in here if grad.dtype in DTYPES]:
            _kernels(supported).scale_(supported, there)
        for grad in here:
            if grad.dtype not in DTYPES:
                grad.mul_(there)
