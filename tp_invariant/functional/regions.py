"""Into and out of the regions where activations are sharded: collectives of bytes with their autograd adjoints.

    gather_sequence, scatter_sequence    out of and into sequence parallelism; public, so ranks compare what they pass
    gather_features, scatter_features    the layers' own, along the last dim, in TP=1's order

A gradient of something whole is whole and complete on every rank, so that no adjoint sums over ranks. Results and
gradients are contiguous at every degree, and gather_sequence and scatter_sequence give new memory at every degree: what
torch does with them afterwards, a sum over tokens or an addition in place, is then the same thing at each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, gather_dim, resolve_group
from ..consistency.agreement import agreed_in, check_agreement, check_gradient, refuse
from ..core.compiled import opaque
from ..core.layout import Stride, check_divides, deinterleave, shard


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_dim(x, dim, group) if group.size > 1 else x.clone(memory_format=torch.contiguous_format)

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
        return gather_dim(grad, ctx.dim, ctx.group).contiguous(), None, None


def _scaled(x: Tensor, dim: int, by: int, over: int = 1) -> list[Tensor]:
    """A new tensor like x with `dim` times by / over."""
    shape = list(x.shape)
    shape[dim] = shape[dim] * by // over
    return [x.new_empty(shape)]


def _restore_sequence(ctx: Any, dtypes: Any, dim: int, group: Group) -> None:
    ctx.dim, ctx.group = dim, group


_gather_sequence = opaque(
    _GatherSequence,
    name="gather_sequence",
    tensors=("x",),
    outputs=lambda x, dim, group: _scaled(x, dim, group.size),
    restore=_restore_sequence,
)
_scatter_sequence = opaque(
    _ScatterSequence,
    name="scatter_sequence",
    tensors=("x",),
    outputs=lambda x, dim, group: _scaled(x, dim, 1, group.size),
    restore=_restore_sequence,
)


def _along_sequence(fn: Callable[[Tensor, int, Group], Tensor], name: str, x: Tensor, dim: int, group: Group) -> Tensor:
    agreed = agreed_in(group)
    try:
        if not -x.dim() <= dim < x.dim():
            raise IndexError(f"sequence_dim={dim} is out of range on rank {group.rank}: x has {x.dim()} dims")
        if fn is _scatter_sequence:
            check_divides(x.shape[dim], group.size, size_name=f"size of sequence_dim {dim}", parts_name="TP degree")
    except (IndexError, ValueError) as error:
        refuse(error, group, x.device, agreed)
        raise
    if group.size == 1:
        return fn(x, dim, group)
    facts = {"the call": name, "sequence_dim": dim, "the shape of x": tuple(x.shape), "the dtype of x": str(x.dtype)}
    check_agreement(facts, group, x.device, agreed)
    return check_gradient(fn(x, dim, group), name, group, agreed)


def gather_sequence(
    x: Tensor, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, sequence_dim: int = 0
) -> Tensor:
    """Leaves a sequence-parallel region: the shards [.., S/P, ..] -> the whole [.., S, ..], the same on every rank.

    A new contiguous tensor, at TP=1 too. Its adjoint takes this rank's slice: a gradient of the whole is complete on
    every rank, as everywhere in this library, so nothing is summed over ranks.

    Raises:
        IndexError: x has no such dim.
        RuntimeError: the ranks' shapes, dtypes or dims differ; the same on every rank. Compared when first seen, with
            TP_INVARIANT_CHECK=1 at every call, and in backward.
    """
    return _along_sequence(_gather_sequence, "gather_sequence", x, sequence_dim, resolve_group(tp_group))


def scatter_sequence(
    x: Tensor, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, sequence_dim: int = 0
) -> Tensor:
    """Enters a sequence-parallel region: the whole [.., S, ..], the same on every rank, -> this rank's [.., S/P, ..].

    A new contiguous tensor, at TP=1 too. Its adjoint gathers the slices.

    Raises:
        IndexError, RuntimeError: see gather_sequence.
        ValueError: the degree does not divide S.
    """
    return _along_sequence(_scatter_sequence, "scatter_sequence", x, sequence_dim, resolve_group(tp_group))


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: Stride, group: Group) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, stride: Stride, group: Group) -> Tensor:
        ctx.stride, ctx.group = stride, group
        return shard(x, dim=-1, rank=group.rank, world=group.size, stride=stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gathered = gather_dim(grad, grad.dim() - 1, ctx.group)
        return deinterleave(gathered, dim=-1, world=ctx.group.size, stride=ctx.stride).contiguous(), None, None


def _restore_features(ctx: Any, dtypes: Any, stride: Stride, group: Group) -> None:
    ctx.stride, ctx.group = stride, group


_gather_features = opaque(
    _GatherFeatures,
    name="gather_features",
    tensors=("x",),
    outputs=lambda x, stride, group: _scaled(x, -1, group.size),
    restore=_restore_features,
)
_scatter_features = opaque(
    _ScatterFeatures,
    name="scatter_features",
    tensors=("x",),
    outputs=lambda x, stride, group: _scaled(x, -1, 1, group.size),
    restore=_restore_features,
)


def gather_features(x: Tensor, group: Group, stride: Stride = 1) -> Tensor:
    """[.., N/P] -> [.., N] in TP=1's order, the same on every rank. Its adjoint takes this rank's part."""
    return x if group.size == 1 else _gather_features(x, stride, group)


def scatter_features(x: Tensor, group: Group, stride: Stride = 1) -> Tensor:
    """[.., K], the same on every rank -> this rank's [.., K/P]. Its adjoint gathers the parts."""
    return x if group.size == 1 else _scatter_features(x, stride, group)
