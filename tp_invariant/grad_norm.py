"""Gradient clipping whose norm does not depend on the tensor-parallel degree.

A sum of squares over a sharded gradient is a sum that the degree splits. It is taken by leaves instead: one for each
index of the sharded dim (a row of a column-parallel weight, a column of a row-parallel one), which some rank holds
whole. The leaves of all parameters are gathered in one collective for each group and folded in TP=1's order on every
rank. A DTensor brings its own groups, those of its mesh, and says by its placements where its leaves are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import stock
from .agreement import agreed_in, check_agreement
from .collectives import Group, gather_major, resolve_group
from .gemm import GemmFn, column_sums, gemm_fn_name
from .layout import unshard
from .mode import is_tp_invariant_mode_enabled

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    *,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    gemm_fn: GemmFn | None = None,
) -> Tensor:
    """Scales gradients in place so that their norm over the whole model is at most max_norm, as torch's does.

    Parameters are taken as sharded over tp_group by their `tensor_model_parallel`, `partition_dim` and
    `partition_stride` attributes (this library's and Megatron's layers set them); others are whole on every rank and
    count once. Every rank must pass the same parameters in the same order.

    DTensors, alone or among plain tensors, count each element of the full tensor once. Their leaves run along the dim
    of the last Shard among their placements, along dim 0 if all are Replicate, whatever the sizes of the mesh: so a
    full tensor has the same bits on [Shard(1)], on [Replicate(), Shard(1)], on FSDP2 x TP's [Shard(0), Shard(1)], on
    meshes of any size, and as a plain parameter of partition_dim 1. One Shard moves leaves only; where several cut a
    tensor, its gradient is gathered whole, one parameter at a time. A DTensor on a mesh without tp_group's other ranks
    (fully_shard over data parallel ranks, of a layer that is sharded over tp_group) must have the three attributes,
    which fully_shard drops: its full tensor is this rank's part then.

    Args:
        parameters: tensors with .grad; those without one are left out.
        max_norm: the largest norm left alone.
        tp_group: a ProcessGroup or 1-D DeviceMesh; None is TP=1.
        norm_type: 2.0 or inf.
        error_if_nonfinite: raise, on every rank, if the norm is NaN or infinite.
        gemm_fn: for the sums of squares (fp32 operands); as for Linear.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor, the same on every rank.

    Raises:
        ValueError: another norm_type; a DTensor that is Partial, not on this rank, or placed so that its part in
            tp_group is not clear.
        TypeError: a gradient that is sparse or not floating point.
        RuntimeError: a norm that is not finite, with error_if_nonfinite; ranks that disagree.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r} is not supported: choose 2.0 or inf")
    group = resolve_group(tp_group)
    everything = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_grad = [p for p in everything if p.grad is not None and p.grad.numel()]
    _check_agreement(everything, with_grad, group, (norm_type, max_norm, error_if_nonfinite), gemm_fn)
    if not with_grad:
        return torch.tensor(0.0)
    for index, p in enumerate(with_grad):
        _check_grad(p, index, group)
    if norm_type == math.inf:
        total = _largest(with_grad, group)
    elif is_tp_invariant_mode_enabled():
        total = _folded_norm(with_grad, group, gemm_fn)
    else:
        total = stock.grad_norm(with_grad, [_is_sharded(p) for p in with_grad], group)
    total = total.masked_fill(total.isnan(), math.nan)  # one NaN, whichever rank's and sum's it was
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}: it cannot be clipped")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for p in with_grad:
        assert p.grad is not None
        grad = _local(p.grad).mul_(coefficient.to(p.grad.device))
        if grad.device.type == "cpu" and not torch.isfinite(total):  # see cross_entropy.py: a CPU makes several NaNs
            grad.masked_fill_(grad.isnan(), math.nan)
    return total


def _check_agreement(
    everything: list[Tensor], with_grad: list[Tensor], group: Group, options: tuple, gemm_fn: GemmFn | None
) -> None:
    """Before anything else: a rank without gradients would leave, and the others wait for it."""
    if group.size == 1 or not everything:
        return
    device = everything[0].device
    with_ids = {id(p) for p in with_grad}
    facts = {
        "the TP-invariant mode": is_tp_invariant_mode_enabled(),
        "norm_type, max_norm and error_if_nonfinite of clip_grad_norm_": options,
        "its gemm_fn": gemm_fn_name(gemm_fn, device),
        **{
            f"the gradient of parameter {index}": (str(p.dtype), tuple(p.shape)) if id(p) in with_ids else None
            for index, p in enumerate(everything)
        },
    }
    check_agreement(facts, group, device, agreed_in(group))


def _check_grad(p: Tensor, index: int, group: Group) -> None:
    where = f"the gradient of parameter {index} with shape {tuple(p.shape)} on rank {group.rank}"
    if p.grad is not None and (p.grad.layout != torch.strided or not p.grad.is_floating_point()):
        raise TypeError(f"{where} is {p.grad.layout} {p.grad.dtype}: only dense floating point is supported")
    if _is_sharded(p) and not 0 <= getattr(p, "partition_dim", -1) < p.dim():
        raise ValueError(
            f"parameter {index} with shape {tuple(p.shape)} on rank {group.rank} has tensor_model_parallel=True and "
            f"partition_dim={getattr(p, 'partition_dim', None)}: it must be from 0 to {p.dim() - 1}"
        )
    if _is_dtensor(p.grad):
        _check_dtensor(p, p.grad, where, group)


def _check_dtensor(p: Tensor, grad: DTensor, where: str, group: Group) -> None:
    mesh = grad.device_mesh
    me = dist.get_rank()
    tp_ranks = {me} if group.size == 1 else set(dist.get_process_group_ranks(group.process_group))
    common = tp_ranks.intersection(mesh.mesh.flatten().tolist())
    if any(placement.is_partial() for placement in grad.placements):
        wrong = (
            ": a Partial is a sum still to be taken, and taking it here would add on the wire. Redistribute the "
            "gradient to Shard or Replicate first; its bits are the same at every degree only if that sum's are"
        )
    elif mesh.get_coordinate() is None:
        wrong = f", which global rank {me} is not in: leave the parameter out there"
    elif len(common) > 1 and _is_sharded(p):
        wrong = (
            f", which has ranks {sorted(common)} in common with tp_group, and the parameter has "
            "tensor_model_parallel=True: over these ranks the placements say how it is sharded, so unset the attribute"
        )
    elif common != tp_ranks and not hasattr(p, "tensor_model_parallel"):
        wrong = (
            f", without ranks {sorted(tp_ranks - common)} of tp_group, and nothing says whether these hold other parts "
            "or the same (fully_shard drops the attributes): set tensor_model_parallel, partition_dim and "
            "partition_stride on the parameter, as tp_invariant.parameters.mark_sharded does"
        )
    else:
        return
    raise ValueError(f"{where} is a DTensor placed as {grad.placements} on the mesh {mesh.mesh.tolist()}{wrong}")


def _is_dtensor(x: Tensor | None) -> TypeGuard[DTensor]:
    if x is None or type(x) is Tensor:
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and here already if x is one

    return isinstance(x, DTensor)


def _local(grad: Tensor) -> Tensor:
    """This rank's part of a gradient, in the same memory."""
    grad = grad.detach()
    return grad.to_local() if _is_dtensor(grad) else grad


def _mesh_shards(grad: DTensor) -> list[tuple[Group, int]]:
    """(group of the mesh dim, tensor dim) for each mesh dim that cuts the tensor, also one of a single rank."""
    return [
        (resolve_group(grad.device_mesh.get_group(axis)), placement.dim % grad.dim())  # type: ignore[attr-defined]
        for axis, placement in enumerate(grad.placements)
        if not placement.is_replicate()
    ]


def _is_sharded(p: Tensor) -> bool:
    return bool(getattr(p, "tensor_model_parallel", False))


@dataclass(frozen=True)
class _Leaves:
    """Sums of squares, one for each index of the leaf dim, fp32.

    local    [n], those of this rank, zeros at the end where it has less than the first rank of `group`
    group    the ranks over which the leaves are spread
    stride   partition_stride of the leaf dim
    count    how many leaves the whole parameter has
    """

    local: Tensor
    group: Group
    stride: int
    count: int


_ALONE = Group(None, 0, 1)


def _sums_of_squares(grad: Tensor, dim: int, gemm_fn: GemmFn | None) -> Tensor:
    """One for each index of `dim`: fp32 [n]."""
    if grad.numel() == 0:  # a rank past the end of a DTensor that is split unevenly
        return grad.new_zeros(0, dtype=torch.float32)
    grad = grad.float()
    if grad.dim() == 0:
        return (grad * grad).view(1)
    squares = (grad * grad).movedim(dim, 0)
    return column_sums(gemm_fn, squares.reshape(squares.shape[0], -1).t())


def _leaves(p: Tensor, tp_group: Group, gemm_fn: GemmFn | None) -> _Leaves:
    assert p.grad is not None
    grad = p.grad.detach()
    if _is_dtensor(grad):
        from torch.distributed.tensor import Shard

        shards = _mesh_shards(grad)
        dim = shards[-1][1] if shards else 0
        kinds = [type(placement) for placement in grad.placements if not placement.is_replicate()]
        if kinds == [Shard] and not _is_sharded(p):  # FSDP2 has a _StridedShard, whose pieces are in another order
            group, size = shards[0][0], grad.shape[dim]
            leaves = _sums_of_squares(grad.to_local(), dim, gemm_fn)
            rows = -(-size // group.size)  # torch.chunk's: full pieces, then one shorter, then none
            return _Leaves(F.pad(leaves, (0, rows - leaves.numel())), group, 1, size)
        grad = grad.full_tensor()  # of Shard and Replicate: gathers bytes
    else:
        dim = 0
    if not _is_sharded(p):
        leaves = _sums_of_squares(grad, dim, gemm_fn)
        return _Leaves(leaves, _ALONE, 1, leaves.numel())
    leaves = _sums_of_squares(grad, p.partition_dim, gemm_fn)  # type: ignore[attr-defined]
    return _Leaves(leaves, tp_group, getattr(p, "partition_stride", 1), leaves.numel() * tp_group.size)


def _folded_norm(params: list[Tensor], tp_group: Group, gemm_fn: GemmFn | None) -> Tensor:
    found = [_leaves(p, tp_group, gemm_fn) for p in params]
    whole = [leaves.local for leaves in found]
    spread: dict[Group, list[int]] = {}
    for index, leaves in enumerate(found):
        if leaves.group.size > 1:
            spread.setdefault(leaves.group, []).append(index)
    for group, indices in spread.items():
        sizes = [whole[i].numel() for i in indices]
        gathered = gather_major(torch.cat([whole[i] for i in indices]), group).split(sizes, dim=1)
        for i, major in zip(indices, gathered, strict=True):
            whole[i] = unshard(major, dim=0, stride=found[i].stride)[: found[i].count]
    sums = torch.cat([column_sums(gemm_fn, leaves.unsqueeze(1)) for leaves in whole])
    return column_sums(gemm_fn, sums.unsqueeze(1)).squeeze(0).sqrt()


def _largest(params: list[Tensor], tp_group: Group) -> Tensor:
    """The largest absolute value: a maximum rounds nothing, so any order gives the same bits."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [_local(grad).float().abs().flatten() for grad in grads]
    largest = torch.stack([part.max() if part.numel() else part.new_zeros(()) for part in parts]).max()
    groups = [tp_group, *(group for grad in grads if _is_dtensor(grad) for group, _ in _mesh_shards(grad))]
    for group in dict.fromkeys(groups):
        largest = gather_major(largest, group).max()
    return largest
