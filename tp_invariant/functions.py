"""The invariant layers as autograd functions: forward, dgrad, wgrad and bias gradient, one formula each.

Legend (P ranks, this one is r; S pieces of partition_stride; `..` are token dims, T tokens in all):
    x_full [.., K]      x_seq_shard [.., K] with sequence_dim divided by P      x_shard_k [.., K/P]
    w_shard_n [N/P, K]  w_shard_k [N, K/P]
Sums over tokens (wgrad, bias gradient) walk the tokens in the order of the full activation, so sequence-parallel
operands are gathered along sequence_dim first. Products over a sharded K go to owners.py, where the order of the rows
is free: there the sequence comes first, so that a rank's rows are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collectives import Group, gather_dim
from .gemm import GemmFn, column_sums, gemm
from .layout import fresh_view
from .owners import ShardedWeight, sharded_product


@dataclass(frozen=True)
class LinearCall:
    """What one call of a linear layer is told besides its tensors. Frozen, so that backward follows its forward."""

    group: Group
    sequence_parallel: bool
    sequence_dim: int
    stride: int
    owner_map: str
    gemm_fn: GemmFn | None

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens in TP=1's order, from this rank's tokens if they are sharded."""
        return gather_dim(x, self.sequence_dim, self.group) if self.sequence_parallel else x

    def product(self, a: Tensor, weight: Tensor, k_dim: int, bias: Tensor | None = None) -> Tensor:
        """a [.., K/P], all tokens -> [.., N], all tokens or this rank's; weight sharded along its `k_dim`."""
        scatter = self.sequence_parallel and self.group.size > 1
        lead = list(a.shape[:-1])
        if scatter:
            a = a.movedim(self.sequence_dim, 0)
            sequence = lead.pop(self.sequence_dim) // self.group.size
            lead = [sequence, *lead]
        c = sharded_product(
            flatten_tokens(a),
            ShardedWeight(weight, k_dim, self.stride, self.group),
            bias=bias,
            scatter_rows=scatter,
            owner_map=self.owner_map,
            gemm_fn=self.gemm_fn,
        )
        c = fresh_view(c, [*lead, weight.shape[1 - k_dim]])
        return c.movedim(0, self.sequence_dim).contiguous() if scatter and self.sequence_dim else c


def flatten_tokens(x: Tensor) -> Tensor:
    """[.., features] -> [T, features]; a view where strides allow."""
    return x.reshape(_count(x.shape[:-1]), x.shape[-1])


def _count(shape: Sequence[int]) -> int:
    tokens = 1  # reshape(-1, ..) cannot tell the number of rows of an empty tensor
    for size in shape:
        tokens *= size
    return tokens


def _local(call: LinearCall, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [.., K] @ b [K, N] (+ bias), nothing sharded along K."""
    return fresh_view(gemm(call.gemm_fn, flatten_tokens(a), b, bias=bias), [*a.shape[:-1], b.shape[1]])


def _wgrad(call: LinearCall, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return gemm(call.gemm_fn, flatten_tokens(dy).t(), flatten_tokens(x), out_dtype=weight.dtype)


def _grads(
    ctx: Any, weight: Tensor, dgrad: Callable[[], Tensor], dy: Callable[[], Tensor], x: Callable[[], Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients that autograd asks for; dy and x give all tokens and are called only when needed."""
    need_x, need_w, need_b, *_ = ctx.needs_input_grad
    dx = dgrad() if need_x else None
    dw = db = None
    if need_w or need_b:
        dy_full = dy()
        if need_w:
            dw = _wgrad(ctx.call, dy_full, x(), weight)
        if need_b:
            db = column_sums(ctx.call.gemm_fn, flatten_tokens(dy_full), out_dtype=ctx.bias_dtype)
    return dx, dw, db, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def keep(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> None:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype


class ColumnLinear(_Linear):
    """Column-parallel: y_shard_n = x_full w_shard_nᵀ + b_shard_n.

    x   [.., K] whole, or x_seq_shard under SP     w [N/P, K]     b [N/P] or None     y [.., N/P], all tokens
    dx = dy W, summed over N, which is sharded: by an owner map; shaped as x
    dw = dy_shard_nᵀ x_full        db = column sums of dy_shard_n
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        _Linear.keep(ctx, x, weight, bias, call)
        return _local(call, call.gather_tokens(x), weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call: LinearCall = ctx.call
        return _grads(ctx, weight, lambda: call.product(dy, weight, 0), lambda: dy, lambda: call.gather_tokens(x))


class RowLinear(_Linear):
    """Row-parallel: y = x W ᵀ + b, summed over K, which is sharded: by an owner map.

    x   [.., K/P], all tokens     w [N, K/P]     b [N] whole or None     y [.., N] whole, or y_seq_shard under SP
    dx = dy_full w_shard_k         dw = dy_fullᵀ x_shard_k        db = column sums of dy_full
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        _Linear.keep(ctx, x, weight, bias, call)
        return call.product(x, weight, 1, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy_full = ctx.call.gather_tokens(dy)  # dgrad, wgrad and the bias gradient share it
        return _grads(ctx, weight, lambda: _local(ctx.call, dy_full, weight), lambda: dy_full, lambda: x)


class ReplicatedLinear(_Linear):
    """Nothing sharded but, under SP, the tokens: y = x Wᵀ + b, with dw and db summed over all ranks' tokens.

    x [.., K]     w [N, K]     b [N] or None     y [.., N]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
        _Linear.keep(ctx, x, weight, bias, call)
        return _local(call, x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call: LinearCall = ctx.call
        return _grads(
            ctx, weight, lambda: _local(call, dy, weight), lambda: call.gather_tokens(dy), lambda: call.gather_tokens(x)
        )


class ExpandBias(torch.autograd.Function):
    """bias [N] -> a view of shape [.., N], so that the sum over tokens of its gradient is ours and not the caller's.

    `tokens_sharded`: the view stands beside a y_seq_shard, so its gradient is gathered over ranks before the sum.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, lead: Sequence[int], tokens_sharded: bool, call: LinearCall) -> Tensor:
        ctx.call, ctx.tokens_sharded = call, tokens_sharded
        return bias.expand(*lead, bias.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        full = ctx.call.gather_tokens(grad) if ctx.tokens_sharded else grad
        return column_sums(ctx.call.gemm_fn, flatten_tokens(full)), None, None, None
