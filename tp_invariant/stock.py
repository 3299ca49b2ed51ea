"""The stock tensor-parallel path that the mode off takes: torch's matmul, and collectives that add.

The only room that adds on the wire. It is here so that the same model code runs both ways and the difference that the
mode makes is one variable away. After Megatron-LM, arXiv 1909.08053 and 2205.05198.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collectives import Group, gather_dim
from .functions import LinearCall

logger = logging.getLogger(__name__)
_logged = False


def log_once(group: Group) -> None:
    """Says once per process, at INFO, that bits depend on the degree here."""
    global _logged
    if not _logged and group.size > 1:
        _logged = True
        logger.info(
            "TP-invariant mode is off: tensor-parallel layers (degree %d) take the stock path, whose bits depend on "
            "the degree; set TP_INVARIANT_MODE=1 to turn it on",
            group.size,
        )


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.process_group)
    return total


def _sum_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty((moved.shape[0] // group.size, *moved.shape[1:]))
    with warnings.catch_warnings():  # torch 2.13 renames the function; 2.11 has only this name
        warnings.simplefilter("ignore", FutureWarning)
        dist.reduce_scatter_tensor(out, moved, group=group.process_group)
    return out.movedim(0, dim)


class _CopyToRegion(torch.autograd.Function):
    """Identity; its adjoint sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Sums over ranks; its adjoint is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherForRegion(torch.autograd.Function):
    """Gathers the sequence; its adjoint sums over ranks and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_dim(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatterFromRegion(torch.autograd.Function):
    """Sums over ranks and scatters the sequence; its adjoint gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _sum_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_dim(grad, ctx.dim, ctx.group), None, None


def sum_over_ranks(x: Tensor, group: Group, scatter_dim: int | None = None) -> Tensor:
    """The sum, whole on every rank or scattered along a dim; its gradient is complete on every rank already."""
    if group.size == 1:
        return x
    if scatter_dim is None:
        return _ReduceFromRegion.apply(x, group)
    return _ReduceScatterFromRegion.apply(x, scatter_dim, group)


def max_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The largest of each element; no gradient."""
    largest = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
    return largest


def complete_grad(parameter: Tensor | None, group: Group, tokens_sharded: bool) -> Tensor | None:
    """A replicated parameter whose gradient is a sum over all ranks' tokens."""
    if parameter is None or group.size == 1 or not tokens_sharded:
        return parameter
    return _CopyToRegion.apply(parameter, group)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Shapes as functions.ColumnLinear."""
    if call.group.size > 1:
        if call.sequence_parallel:
            x = _GatherForRegion.apply(x, call.sequence_dim, call.group)
        else:
            x = _CopyToRegion.apply(x, call.group)
    return F.linear(x, weight, bias)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Shapes as functions.RowLinear. The bias is added once, after the sum over ranks."""
    if call.group.size == 1:
        return F.linear(x, weight, bias)
    y = F.linear(x, weight)
    if call.sequence_parallel:
        y = _ReduceScatterFromRegion.apply(y, call.sequence_dim, call.group)
    else:
        y = _ReduceFromRegion.apply(y, call.group)
    bias = complete_grad(bias, call.group, call.sequence_parallel)
    return y if bias is None else y + bias


def replicated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Shapes as functions.ReplicatedLinear."""
    whole_weight = complete_grad(weight, call.group, call.sequence_parallel)
    assert whole_weight is not None
    return F.linear(x, whole_weight, complete_grad(bias, call.group, call.sequence_parallel))


def grad_norm(params: list[Tensor], sharded: list[bool], group: Group) -> Tensor:
    """The L2 norm of all gradients, fp32: sharded parameters summed over ranks, whole ones counted once.

    A DTensor's norm is a DTensor too, whose full_tensor sums over its mesh.
    """
    norms = [torch.linalg.vector_norm(p.grad.float()) for p in params if p.grad is not None]
    squares = [(n.full_tensor() if hasattr(n, "full_tensor") else n).square() for n in norms]
    parallel = [s for s, is_sharded in zip(squares, sharded, strict=True) if is_sharded]
    whole = [s for s, is_sharded in zip(squares, sharded, strict=True) if not is_sharded]
    total = torch.stack(parallel).sum() if parallel else squares[0].new_zeros(())
    if group.size > 1:
        total = _sum(total, group)
    return (total + sum(whole)).sqrt()
