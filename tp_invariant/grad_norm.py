"""Gradient clipping whose norm does not depend on the tensor-parallel degree.

A sum of squares over a sharded gradient is a sum that the degree splits. It is taken by leaves instead, which
grad_leaves.py has: what is here says which gradients those are, and scales them. A DTensor brings its own groups, those
of its mesh, and says by its placements where its leaves are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import stock
from .agreement import agreed_in, check_agreement
from .collectives import Group, gather_major, resolve_group
from .grad_leaves import folded_norm, is_dtensor, is_sharded, local_part, mesh_shards, scale
from .mode import is_tp_invariant_mode_enabled

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    *,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
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

    Returns:
        The norm before clipping, a 0-dim fp32 tensor, the same on every rank.

    Raises:
        ValueError: another norm_type; a DTensor that is Partial, not on this rank, or placed so that its part in
            tp_group is not clear; with the mode on, an L2 norm of gradients on several devices.
        TypeError: a gradient that is sparse or not floating point.
        RuntimeError: a norm that is not finite, with error_if_nonfinite; ranks that disagree; a CUDA graph's capture
            without such a call of the same gradients before it, which makes the kernels' tables.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r} is not supported: choose 2.0 or inf")
    group = resolve_group(tp_group)
    everything = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_grad = [p for p in everything if p.grad is not None and p.grad.numel()]
    _check_agreement(everything, with_grad, group, (norm_type, max_norm, error_if_nonfinite))
    if not with_grad:
        return torch.tensor(0.0)
    for index, p in enumerate(with_grad):
        _check_grad(p, index, group)
    if norm_type == math.inf:
        total = _largest(with_grad, group)
    elif is_tp_invariant_mode_enabled():
        _check_devices(with_grad, group)
        total = folded_norm(with_grad, group)
    else:
        total = stock.grad_norm(with_grad, [is_sharded(p) for p in with_grad], group)
    total = total.masked_fill(total.isnan(), math.nan)  # one NaN, whichever rank's and sum's it was
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}: it cannot be clipped")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = [local_part(p.grad) for p in with_grad if p.grad is not None]
    scale(grads, coefficient)
    if total.device.type == "cpu" and not torch.isfinite(total):  # see cross_entropy.py: a CPU makes several NaNs
        for grad in grads:
            grad.masked_fill_(grad.isnan(), math.nan)
    return total


def _check_agreement(everything: list[Tensor], with_grad: list[Tensor], group: Group, options: tuple) -> None:
    """Before anything else: a rank without gradients would leave, and the others wait for it."""
    if group.size == 1 or not everything:
        return
    device = everything[0].device
    with_ids = {id(p) for p in with_grad}
    facts = {
        "the TP-invariant mode": is_tp_invariant_mode_enabled(),
        "norm_type, max_norm and error_if_nonfinite of clip_grad_norm_": options,
        **{
            f"the gradient of parameter {index}": _facts(p) if id(p) in with_ids else None
            for index, p in enumerate(everything)
        },
    }
    check_agreement(facts, group, device, agreed_in(group))


def _facts(p: Tensor) -> tuple:
    """What decides which errors follow: so ranks that differ in it get one now, and none waits for another."""
    assert p.grad is not None
    return str(p.grad.dtype), tuple(p.shape), str(p.grad.layout), p.grad.device.type


def _check_grad(p: Tensor, index: int, group: Group) -> None:
    grad = p.grad
    assert grad is not None
    if grad.layout != torch.strided or not grad.is_floating_point():
        raise TypeError(
            f"{_named(p, index, group)} is {grad.layout} {grad.dtype}: only dense floating point is supported"
        )
    if is_sharded(p) and not 0 <= getattr(p, "partition_dim", -1) < p.dim():
        raise ValueError(
            f"parameter {index} with shape {tuple(p.shape)} on rank {group.rank} has tensor_model_parallel=True and "
            f"partition_dim={getattr(p, 'partition_dim', None)}: it must be from 0 to {p.dim() - 1}"
        )
    if is_dtensor(grad):
        _check_dtensor(p, grad, _named(p, index, group), group)


def _check_devices(with_grad: list[Tensor], group: Group) -> None:
    first = with_grad[0].grad
    for index, p in enumerate(with_grad):
        assert p.grad is not None and first is not None
        if p.grad.device != first.device:
            raise ValueError(
                f"{_named(p, index, group)} is on {p.grad.device}: it must be on {first.device}, where parameter 0's is"
            )


def _named(p: Tensor, index: int, group: Group) -> str:
    return f"the gradient of parameter {index} with shape {tuple(p.shape)} on rank {group.rank}"


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
    elif len(common) > 1 and is_sharded(p):
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


def _largest(params: list[Tensor], tp_group: Group) -> Tensor:
    """The largest absolute value: a maximum rounds nothing, so any order gives the same bits."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [local_part(grad).float().abs().flatten() for grad in grads]
    each = [part.max() if part.numel() else part.new_zeros(()) for part in parts]
    largest = torch.stack([one.to(each[0].device) for one in each]).max()
    groups = [tp_group, *(group for grad in grads if is_dtensor(grad) for group, _ in mesh_shards(grad))]
    for group in dict.fromkeys(groups):
        largest = gather_major(largest, group).max()
    return largest
