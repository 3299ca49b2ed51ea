"""Entering and leaving the regions where activations are sharded: collectives of bytes with their autograd adjoints.

    gather_sequence, scatter_sequence    out of and into sequence parallelism; public, so the ranks compare arguments
    gather_features, scatter_features    used by the layers, along the last dim, in TP=1's order

The gradient of a replicated tensor is complete on every rank, so no adjoint sums over ranks. Results and gradients are
contiguous at every degree, and gather_sequence and scatter_sequence return new memory at every degree. So torch's
operations on them, such as a sum over tokens or an addition in place, run in the same way at every degree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import NOT_LENT, Group, gather_dim, resolve_group
from ..consistency.agreement import agreed_in, check_agreement, share_error
from ..consistency.shards import Part
from ..core.compiled import as_custom_op, group_name, stored_copy
from ..core.differentiation import once_differentiable
from ..core.dtensors import as_local
from ..core.layout import Stride, check_sequence, deinterleave, shard

# --- operators of two moves, the one the other's adjoint ------------------------------------------------------------


def _set_context(ctx: Any, dtypes: Any, *configs: Any) -> None:
    ctx.configs, ctx.group = configs, configs[-1]


def region_function(
    name: str, move: Callable[..., Tensor], adjoint: Callable[..., Tensor]
) -> type[torch.autograd.Function]:
    """The autograd function whose forward is `move` and whose backward is `adjoint`, both of (x, *configs).

    The last of configs is the group.
    """

    def forward(ctx: Any, x: Tensor, *configs: Any) -> Tensor:
        _set_context(ctx, None, *configs)
        return move(x, *configs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return adjoint(grad, *ctx.configs), *[None] * len(ctx.configs)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    # Not a class statement: torch names the graph's node after the name that the class has at its creation.
    return type(name, (torch.autograd.Function,), methods)


def gathered(x: Tensor, dim: int, *configs: Any) -> list[int]:
    """x's shape with a dim that is gathered over the group, the last of configs."""
    return [size * configs[-1].size if i == dim % x.dim() else size for i, size in enumerate(x.shape)]


def scattered(x: Tensor, dim: int, *configs: Any) -> list[int]:
    """x's shape with a dim of which a rank of the group, the last of configs, has its part."""
    return [size // configs[-1].size if i == dim % x.dim() else size for i, size in enumerate(x.shape)]


def region_op(
    function: type[torch.autograd.Function], name: str, shape: Callable[..., Any] = lambda x, *configs: x.shape
) -> Callable:
    """The operator of a `region_function`. shape: of its result, from (x, *configs)."""

    def outputs(x: Tensor, *configs: Any) -> list[Tensor]:
        return [x.new_empty(shape(x, *configs))]

    return as_custom_op(function, name=name, tensors=("x",), outputs=outputs, restore=_set_context)


# --- along the sequence ---------------------------------------------------------------------------------------------


def _gather(x: Tensor, dim: int, for_layers: bool, group: Group) -> Tensor:
    if group.size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return gather_dim(x, dim, group, peers=NOT_LENT)


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size, dim)[group.rank]


_GatherSequence = region_function(
    "_GatherSequence", _gather, lambda grad, dim, for_layers, group: _part(grad, dim, group).contiguous()
)
_ScatterSequence = region_function(
    "_ScatterSequence",
    lambda x, dim, group: _part(x, dim, group).clone(memory_format=torch.contiguous_format),
    lambda grad, dim, group: gather_dim(grad, dim, group, peers=NOT_LENT).contiguous(),
)
_gather_sequence = region_op(_GatherSequence, "gather_sequence", gathered)
_scatter_sequence = region_op(_ScatterSequence, "scatter_sequence", scattered)


def _along_sequence(fn: Callable[..., Tensor], name: str, x: Tensor, dim: int, group: Group, *options: bool) -> Tensor:
    agreed = agreed_in(group)
    try:
        if not -x.dim() <= dim < x.dim():
            raise IndexError(f"sequence_dim={dim} is out of range on rank {group.rank}: x has {x.dim()} dims")
        if fn is _scatter_sequence and x.shape[dim] % group.size:  # a compiler builds no text
            check_sequence(x.shape, dim, group.size, f"x on rank {group.rank}")
    except (IndexError, ValueError) as error:
        share_error(error, group, x.device, agreed)
        raise
    dim %= x.dim()
    if group.size == 1 and torch.compiler.is_compiling():
        return stored_copy(as_local(x))
    facts = {"the call": name, "sequence_dim": dim, "the shape of x": tuple(x.shape), "the dtype of x": str(x.dtype)}
    if group.size > 1:
        part = Part(f"x of {name}", x, (dim,), "It gathers parts: leave it out") if fn is _gather_sequence else None
        check_agreement(facts, group, x.device, agreed, part=part)
    return fn(x, dim, *options, group)


def gather_sequence(
    x: Tensor, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, sequence_dim: int = 0
) -> Tensor:
    """Leaves a sequence-parallel region: the shards [.., S/P, ..] -> the full [.., S, ..], the same on every rank.

    The result is a new contiguous tensor, at TP=1 too. Its adjoint takes this rank's slice of the gradient: a gradient
    of a full tensor is complete on every rank, as everywhere in this library, so nothing is summed over ranks.

    Raises:
        IndexError: x has no such dim.
        RuntimeError: the ranks' shapes, dtypes or dims differ; the same error on every rank. Ranks compare them at the
            first call of each kind; with TP_INVARIANT_CHECK=1 at every call, and in backward.
    """
    return _along_sequence(_gather_sequence, "gather_sequence", x, sequence_dim, resolve_group(tp_group), False)


def gather_for_layers(
    x: Tensor, tp_group: dist.ProcessGroup | DeviceMesh | Group | None, sequence_dim: int = 0
) -> Tensor:
    """`gather_sequence`, where nothing but layers and operators reads the result's gradient.

    The adjoint reads this rank's slice of it alone. So column-parallel layers that are given the result compute this
    slice, and do not gather the others, which are NaN: a hook on the result, or torch.autograd.grad of it, gets these.
    """
    return _along_sequence(_gather_sequence, "gather_sequence", x, sequence_dim, resolve_group(tp_group), True)


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


def sequence_part(x: Tensor, cp_group: dist.ProcessGroup | DeviceMesh | Group | None, dim: int = 1) -> Tensor:
    """This rank's part of the sequence of token ids, targets or positions under context parallelism.

        ids, targets = tpi.sequence_part(tokens[:, :-1], cp_group), tpi.sequence_part(tokens[:, 1:], cp_group)

    x [.., S, ..], the same on every rank of cp_group -> [.., S/cp, ..], contiguous: consecutive tokens, in rank order.
    No collective. Shift targets before, as above: a part's last target is the next part's first token.

    Raises:
        IndexError: x has no such dim.
        ValueError: the degree does not divide S; x needs a gradient, which `regions.scatter_sequence` completes.
    """
    group = resolve_group(cp_group, "cp_group", "cp")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim={dim} is out of range on rank {group.rank} of cp_group: x has {x.dim()} dims")
    if x.requires_grad:
        raise ValueError(
            f"x of shape {tuple(x.shape)} on rank {group.rank} of cp_group needs a gradient, of which a rank would "
            "have its part alone: use tpi.regions.scatter_sequence"
        )
    if x.shape[dim] % group.size:
        raise ValueError(
            f"dim {dim} of x with shape {tuple(x.shape)} on rank {group.rank} of cp_group is the sequence: its length "
            f"must be a multiple of the context parallel degree {group.size}"
        )
    return _part(x, dim, group).contiguous()


# --- along the features ---------------------------------------------------------------------------------------------


def _whole_features(x: Tensor, stride: Stride, group: Group) -> Tensor:
    return deinterleave(
        gather_dim(x, x.dim() - 1, group, peers=NOT_LENT), dim=-1, world=group.size, stride=stride
    ).contiguous()


def _part_of_features(x: Tensor, stride: Stride, group: Group) -> Tensor:
    return shard(x, dim=-1, rank=group.rank, world=group.size, stride=stride)


_GatherFeatures = region_function("_GatherFeatures", _whole_features, _part_of_features)
_ScatterFeatures = region_function("_ScatterFeatures", _part_of_features, _whole_features)
_gather_features = region_op(_GatherFeatures, "gather_features", lambda x, stride, group: gathered(x, -1, group))
_scatter_features = region_op(_ScatterFeatures, "scatter_features", lambda x, stride, group: scattered(x, -1, group))


def gather_features(x: Tensor, group: Group, stride: Stride = 1) -> Tensor:
    """[.., N/P] -> [.., N] in TP=1's order, the same on every rank. Its adjoint takes this rank's part."""
    if group.size == 1:
        return x
    whole = _gather_features(x, stride, group)
    whole.whole_over = group_name(group)
    return whole


def is_gathered(x: Tensor, group: Group) -> bool:
    """Whether x is what `gather_features` over this group has returned. Nothing that is computed from it says so."""
    return group.size > 1 and getattr(x, "whole_over", None) == group_name(group)


def scatter_features(x: Tensor, group: Group, stride: Stride = 1) -> Tensor:
    """[.., K], the same on every rank -> this rank's [.., K/P]. Its adjoint gathers the parts."""
    return x if group.size == 1 else _scatter_features(x, stride, group)


# --- from one to all heads ------------------------------------------------------------------------------------------


def _to_heads(x: Tensor, heads: int, group: Group) -> Tensor:
    return x.expand(-1, heads, -1, -1).clone(memory_format=torch.contiguous_format)


def _sum_of_heads(grad: Tensor, heads: int, group: Group) -> Tensor:
    """Gathered and added as at TP=1: a kernel of torch's may add in another order for another shape."""
    whole = gather_dim(grad, 1, group, peers=NOT_LENT) if group.size > 1 else grad
    added = whole.contiguous().sum(1, keepdim=True, dtype=torch.promote_types(grad.dtype, torch.float32))
    return added.to(grad.dtype)


_ExpandHeads = region_function("_ExpandHeads", _to_heads, _sum_of_heads)
_expand_heads = region_op(_ExpandHeads, "expand_heads", lambda x, heads, group: (x.shape[0], heads, *x.shape[2:]))


def expand_heads(x: Tensor, heads: int, group: Group) -> Tensor:
    """[B, 1, S, D], the same on every rank -> [B, h/P, S, D], for this rank's heads.

    Its adjoint gathers the gradients of all heads, and adds them in fp32 with one rounding.
    """
    return _expand_heads(x, heads, group)
