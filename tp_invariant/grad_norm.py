"""Gradient clipping whose norm does not depend on the tensor-parallel degree.

A sum of squares over a sharded gradient is a sum that the degree splits. It is taken by leaves instead: one for each
index of the sharded dim (a row of a column-parallel weight, a column of a row-parallel one), which some rank holds
whole. The leaves of all parameters are gathered in one collective and folded in TP=1's order on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import stock
from .collectives import Group, gather_major, resolve_group
from .gemm import GemmFn, column_sums
from .layout import unshard
from .mode import is_tp_invariant_mode_enabled


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
        ValueError: another norm_type.
        TypeError: a DTensor gradient.
        RuntimeError: a norm that is not finite, with error_if_nonfinite.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r} is not supported: choose 2.0 or inf")
    group = resolve_group(tp_group)
    everything = [parameters] if isinstance(parameters, Tensor) else parameters
    with_grad = [p for p in everything if p.grad is not None and p.grad.numel()]
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
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}: it cannot be clipped")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for p in with_grad:
        assert p.grad is not None
        p.grad.mul_(coefficient.to(p.grad.device))
    return total


def _check_grad(p: Tensor, index: int, group: Group) -> None:
    where = f"the gradient of parameter {index} with shape {tuple(p.shape)} on rank {group.rank}"
    if type(p.grad).__name__ == "DTensor":
        raise TypeError(f"{where} is a DTensor: only plain tensors are supported")
    if p.grad is not None and (p.grad.layout != torch.strided or not p.grad.is_floating_point()):
        raise TypeError(f"{where} is {p.grad.layout} {p.grad.dtype}: only dense floating point is supported")
    if _is_sharded(p) and not 0 <= getattr(p, "partition_dim", -1) < p.dim():
        raise ValueError(
            f"parameter {index} with shape {tuple(p.shape)} on rank {group.rank} has tensor_model_parallel=True and "
            f"partition_dim={getattr(p, 'partition_dim', None)}: it must be from 0 to {p.dim() - 1}"
        )


def _is_sharded(p: Tensor) -> bool:
    return bool(getattr(p, "tensor_model_parallel", False))


def _leaves(p: Tensor, gemm_fn: GemmFn | None) -> Tensor:
    """Sums of squares, one for each index of the sharded dim (the first one of whole parameters): fp32 [n]."""
    assert p.grad is not None
    grad = p.grad.detach().float()
    if grad.dim() == 0:
        return (grad * grad).view(1)
    dim = p.partition_dim if _is_sharded(p) else 0  # type: ignore[attr-defined]
    squares = (grad * grad).movedim(dim, 0)
    return column_sums(gemm_fn, squares.reshape(squares.shape[0], -1).t())


def _folded_norm(params: list[Tensor], group: Group, gemm_fn: GemmFn | None) -> Tensor:
    leaves = [_leaves(p, gemm_fn) for p in params]
    sharded = [i for i, p in enumerate(params) if _is_sharded(p)]
    if sharded and group.size > 1:
        sizes = [leaves[i].numel() for i in sharded]
        gathered = gather_major(torch.cat([leaves[i] for i in sharded]), group).split(sizes, dim=1)
        for i, major in zip(sharded, gathered, strict=True):
            leaves[i] = unshard(major, dim=0, stride=getattr(params[i], "partition_stride", 1))
    sums = torch.cat([column_sums(gemm_fn, leaf.unsqueeze(1)) for leaf in leaves])
    return column_sums(gemm_fn, sums.unsqueeze(1)).squeeze(0).sqrt()


def _largest(params: list[Tensor], group: Group) -> Tensor:
    """The largest absolute value: a maximum rounds nothing, so any order gives the same bits."""
    local = torch.stack([p.grad.detach().float().abs().max() for p in params if p.grad is not None])
    return gather_major(local.max(), group).max()
