"""Collectives that move bytes and never add, and their autograd adjoints. The group is always an argument.

Because nothing here adds, no algorithm, protocol, ring order or topology of NCCL or gloo can change a bit of a result.
Activations are [..., features] or [rows, features]; see layout.py for the legend.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from .layout import check_divides, deinterleave, fresh_view, shard, split_sizes


@dataclass(frozen=True)
class Group:
    """A tensor-parallel group as the layers see it: who I am in it and how many we are. size 1 needs no process group.

    Copying a module copies its Group by reference: process groups cannot be copied.
    """

    process_group: dist.ProcessGroup | None = field(repr=False)
    rank: int
    size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self


_OUTSIDE = "tp_group does not contain this rank (global rank {rank}): build its layers elsewhere"


def resolve_group(tp_group: dist.ProcessGroup | DeviceMesh | Group | None) -> Group:
    """The Group for a `tp_group` argument: a ProcessGroup, a 1-D DeviceMesh, or None for TP=1.

    Raises:
        TypeError: anything else.
        ValueError: a DeviceMesh with more than one dim, or a group that this rank is not in.
    """
    if tp_group is None:
        return Group(None, 0, 1)
    if isinstance(tp_group, Group):
        return tp_group
    if isinstance(tp_group, DeviceMesh):
        if tp_group.ndim != 1:
            raise ValueError(
                f"tp_group is a {tp_group.ndim}-dimensional DeviceMesh with dims {tp_group.mesh_dim_names}: "
                'pass one dim of it, for example mesh["tp"]'
            )
        if tp_group.get_coordinate() is None:
            raise ValueError(_OUTSIDE.format(rank=dist.get_rank()))
        tp_group = tp_group.get_group()
    # torch hands ranks outside a new group a placeholder that is no ProcessGroup
    if tp_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_OUTSIDE.format(rank=dist.get_rank()))
    if not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(
            f"tp_group={tp_group!r} is a {type(tp_group).__name__}: pass a ProcessGroup, a 1-D DeviceMesh or None"
        )
    rank = dist.get_rank(tp_group)
    if rank < 0:
        raise ValueError(_OUTSIDE.format(rank=dist.get_rank()))
    return Group(tp_group, rank, dist.get_world_size(tp_group))


class Pending:
    """A collective under way: `wait()` gives its result. Keeps the operands alive until then."""

    def __init__(self, result: Tensor, work: dist.Work | None, operand: Tensor | None = None) -> None:
        self._result, self._work, self._operand = result, work, operand

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._operand = None
        return self._result


def _start_all_gather(out: Tensor, local: Tensor, group: Group) -> dist.Work | None:
    with warnings.catch_warnings():  # torch 2.13 renames the function; 2.11 has only this name
        warnings.simplefilter("ignore", FutureWarning)
        return dist.all_gather_into_tensor(out, local, group=group.process_group, async_op=True)


def start_gather_major(local: Tensor, group: Group) -> Pending:
    """Starts gathering every rank's `local` (same shape everywhere) into a new rank-major [P, ...local]."""
    local = local.contiguous()
    if group.size == 1:
        return Pending(local.unsqueeze(0), None)
    out = local.new_empty((group.size, *local.shape))
    if local.numel() == 0:
        return Pending(out, None)
    # gloo and NCCL want the ranks stacked along dim 0 of an output with as many dims as the input
    return Pending(out, _start_all_gather(out.view(-1), local.view(-1), group), local)


def gather_major(local: Tensor, group: Group) -> Tensor:
    """Every rank's `local` (same shape everywhere) in a rank-major [P, ...local]."""
    return start_gather_major(local, group).wait()


def gather_dim(local: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's `local` (same shape everywhere) concatenated along `dim` in rank order."""
    if group.size == 1:
        return local
    major = gather_major(local, group)
    if dim % local.dim() == 0:
        return fresh_view(major, [group.size * local.shape[0], *local.shape[1:]])
    return torch.cat(major.unbind(0), dim=dim)


def gather_uneven(local: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """The whole of a dim of `size` elements that `layout.split_sizes` splits over ranks, from this rank's piece."""
    if group.size == 1:
        return local
    sizes = split_sizes(size, group.size)
    if sizes[0] == sizes[-1]:
        return gather_dim(local, dim, group)
    # gloo gathers equal shapes only: send the largest piece's shape and drop what is padding. Unwritten bytes in the
    # padding never reach the result.
    shape = list(local.shape)
    shape[dim] = sizes[0]
    padded = local.new_empty(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    major = gather_major(padded, group)
    return torch.cat([major[rank].narrow(dim, 0, sizes[rank]) for rank in range(group.size)], dim=dim)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group) -> Pending:
    """Starts an all-to-all of row blocks: rank q gets rows block q of every rank's x, stacked rank-major.

    x [sum(send_sizes), C], the same shape on every rank -> [P, send_sizes[rank], C].
    """
    x = x.contiguous()
    mine = send_sizes[group.rank]
    if group.size == 1:
        return Pending(x.unsqueeze(0), None)
    out = x.new_empty((group.size, mine, *x.shape[1:]))
    if x.numel() == 0:
        return Pending(out, None)
    work = dist.all_to_all_single(
        out.view(-1, *x.shape[1:]), x, [mine] * group.size, list(send_sizes), group=group.process_group, async_op=True
    )
    return Pending(out, work, x)


def exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group) -> Tensor:
    """See `start_exchange_rows`."""
    return start_exchange_rows(x, send_sizes, group).wait()


def exchange_cols_for_rows(x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: Group) -> Tensor:
    """From columns split over ranks to rows split over ranks: x [T, col_sizes[rank]] -> [row_sizes[rank], N]."""
    if group.size == 1:
        return x
    mine = row_sizes[group.rank]
    # blocks of different widths, so they travel flat
    out = x.new_empty(mine * sum(col_sizes))
    if sum(row_sizes) * sum(col_sizes) == 0:
        return out.view(mine, sum(col_sizes))
    sent = [rows * x.shape[1] for rows in row_sizes]
    received = [mine * cols for cols in col_sizes]
    dist.all_to_all_single(out, x.contiguous().view(-1), received, sent, group=group.process_group)
    blocks = [block.view(mine, cols) for block, cols in zip(out.split(received), col_sizes, strict=True)]
    return torch.cat(blocks, dim=1)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_dim(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.group.size, ctx.dim)[ctx.group.rank].contiguous(), None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_dim(grad, ctx.dim, ctx.group), None, None


def gather_sequence(
    x: Tensor, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, sequence_dim: int = 0
) -> Tensor:
    """Leaves a sequence-parallel region: the shards [.., S/P, ..] -> the whole [.., S, ..], the same on every rank.

    Its adjoint takes this rank's slice: a gradient of the whole is complete on every rank, as everywhere in this
    library, so nothing is summed over ranks.
    """
    group = resolve_group(tp_group)
    return x if group.size == 1 else _GatherSequence.apply(x, sequence_dim, group)


def scatter_sequence(
    x: Tensor, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, sequence_dim: int = 0
) -> Tensor:
    """Enters a sequence-parallel region: the whole [.., S, ..], the same on every rank, -> this rank's [.., S/P, ..].

    Its adjoint gathers the slices.

    Raises:
        ValueError: the degree does not divide S.
    """
    group = resolve_group(tp_group)
    if group.size == 1:
        return x
    check_divides(
        x.shape[sequence_dim], group.size, size_name=f"size of sequence_dim {sequence_dim}", parts_name="TP degree"
    )
    return _ScatterSequence.apply(x, sequence_dim, group)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int, group: Group) -> Tensor:
        ctx.stride, ctx.group = stride, group
        gathered = gather_dim(x, x.dim() - 1, group)
        return deinterleave(gathered, dim=-1, world=group.size, stride=stride).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group: Group = ctx.group
        return shard(grad, dim=-1, rank=group.rank, world=group.size, stride=ctx.stride), None, None


class _ScatterFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int, group: Group) -> Tensor:
        ctx.stride, ctx.group = stride, group
        return shard(x, dim=-1, rank=group.rank, world=group.size, stride=stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gathered = gather_dim(grad, grad.dim() - 1, ctx.group)
        return deinterleave(gathered, dim=-1, world=ctx.group.size, stride=ctx.stride), None, None


def gather_features(x: Tensor, group: Group, stride: int = 1) -> Tensor:
    """[.., N/P] -> [.., N] in TP=1's order, the same on every rank. Its adjoint takes this rank's part."""
    return x if group.size == 1 else _GatherFeatures.apply(x, stride, group)


def scatter_features(x: Tensor, group: Group, stride: int = 1) -> Tensor:
    """[.., K], the same on every rank -> this rank's [.., K/P]. Its adjoint gathers the parts."""
    return x if group.size == 1 else _ScatterFeatures.apply(x, stride, group)
