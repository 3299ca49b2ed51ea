"""LayerNorm and RMSNorm with invariant gradients, for activations whole or sharded along the sequence.

The gradients of gamma and beta are sums over tokens. They are split into leaves of LEAF_ROWS consecutive tokens of the
full activation, wherever its tokens live; each rank sums the leaves that it holds, the leaves are gathered and folded
in token order on every rank. Where a shard boundary would cut a leaf, the operands are gathered instead. A norm of each
head of q or k has its heads spread over ranks instead of its tokens: there a head's sum is one leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.collectives import Group, Pending, gather_dim
from ..comm.small_gathers import start_gather_major
from ..core.compiled import opaque, setting
from ..core.layout import TokenSharding, own_shape
from ..core.options import Normalization
from ..kernels.select import select
from .linear import flatten_tokens
from .stock import complete_grad

LEAF_ROWS = 32

NORMALIZATIONS = get_args(Normalization)


setting(TokenSharding)


@setting
@dataclass(frozen=True)
class NormCall:
    """What one call of a norm is told besides its tensors. `sharding.world` is 1 unless the tokens are sharded.

    `heads_dim`: the dim of x that holds this rank's heads, for a norm over what each head has; None for others.
    """

    group: Group
    sharding: TokenSharding
    eps: float
    rms: bool
    zero_centered: bool
    heads_dim: int | None = None


class Norm(torch.autograd.Function):
    """y = xhat * gamma + beta over the last dim, xhat = (x - mean) * rstd (RMSNorm: x * rstd).

    x, y  [.., H], this rank's tokens      weight (gamma), bias (beta)  [H], whole on every rank
    dx    by rows                          dgamma, dbeta  summed over all ranks' tokens, complete on every rank
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall) -> Tensor:
        kernels = select("norm", x.device.type)
        y, mean, rstd = kernels.norm_forward(
            flatten_tokens(x), weight, bias, eps=call.eps, rms=call.rms, zero_centered=call.zero_centered
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        return own_shape(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        call: NormCall = ctx.call
        kernels = select("norm", x.device.type)
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = dweight = dbias = leaves = None
        dy = dy.contiguous()  # once for all that reads it
        dy_rows, x_rows = flatten_tokens(dy), flatten_tokens(x)
        if need_weight or need_bias:  # before dx, behind which they travel
            start = _start_leaves if call.heads_dim is None else _start_head_leaves
            leaves = start(kernels, call, dy_rows, x_rows, x.shape, mean, rstd, need_bias)
        if need_x:
            dx = kernels.norm_backward_input(
                dy_rows, x_rows, weight, mean, rstd, rms=call.rms, zero_centered=call.zero_centered
            )
            dx = own_shape(dx, x.shape)
        if leaves is not None:
            weight_leaves, bias_leaves = leaves()
            if need_weight:
                dweight = kernels.fold_leaves(weight_leaves, weight.dtype)
            if bias_leaves is not None:
                dbias = kernels.fold_leaves(bias_leaves, ctx.bias_dtype)
        return dx, dweight, dbias, None


_Leaves = tuple[Tensor, Tensor | None]  # of gamma and of beta


def _start_leaves(
    kernels: ModuleType,
    call: NormCall,
    dy: Tensor,
    x: Tensor,
    shape: torch.Size,
    mean: Tensor | None,
    rstd: Tensor,
    with_bias: bool,
) -> Callable[[], _Leaves]:
    """The leaves of the full activation, in token order, on every rank: on their way, and there when called.

    dy, x: [T, H], this rank's, of an activation of this shape.
    """
    fits = call.sharding.leaves_fit(shape, LEAF_ROWS)
    if not fits:
        dim, group = call.sharding.sequence_dim, call.group
        dy, x = (flatten_tokens(gather_dim(t.view(shape), dim, group)) for t in (dy, x))
        rstd = gather_dim(rstd.view(shape[:-1]), dim, group).reshape(-1)
        mean = None if mean is None else gather_dim(mean.view(shape[:-1]), dim, group).reshape(-1)
    leaves, bias_leaves = kernels.norm_weight_leaves(
        dy, x, mean, rstd, leaf_rows=LEAF_ROWS, rms=call.rms, with_bias=with_bias
    )
    if call.sharding.world == 1 or not fits:
        return lambda: (leaves, bias_leaves)
    # one collective for both
    local = leaves if bias_leaves is None else torch.cat([leaves, bias_leaves], dim=1)
    pending = start_gather_major(local, call.group)

    def finish() -> _Leaves:
        ordered = call.sharding.order_leaves(pending.wait(), shape)
        if bias_leaves is None:
            return ordered, None
        weight_part, bias_part = ordered.split(shape[-1], dim=1)
        return weight_part, bias_part

    return finish


def _start_head_leaves(
    kernels: ModuleType,
    call: NormCall,
    dy: Tensor,
    x: Tensor,
    shape: torch.Size,
    mean: Tensor | None,
    rstd: Tensor,
    with_bias: bool,
) -> Callable[[], _Leaves]:
    """One leaf for each head of all ranks, in head order: the sum over its tokens, taken by blocks of LEAF_ROWS.

    dy, x: [T * heads, D], of an activation of this shape.
    """
    dim, last = call.heads_dim, len(shape) - 2
    assert dim is not None
    heads = shape[dim]

    def heads_last(t: Tensor, *sizes: int) -> Tensor:
        if dim != last:
            t = t.view(*shape[:-1], *t.shape[1:]).movedim(dim, last)
        return t.reshape(-1, *sizes)

    leaves = kernels.norm_weight_leaves(
        heads_last(dy, heads * shape[-1]),
        heads_last(x, heads * shape[-1]),
        None if mean is None else heads_last(mean, heads),
        heads_last(rstd, heads),
        leaf_rows=LEAF_ROWS,
        rms=call.rms,
        with_bias=with_bias,
    )

    def start(blocks: Tensor | None) -> Pending | None:
        if blocks is None:
            return None
        return start_gather_major(kernels.fold_leaves(blocks).view(heads, shape[-1]), call.group)

    pending = [start(blocks) for blocks in leaves]

    def finish() -> _Leaves:
        weight_leaves, bias_leaves = (None if p is None else p.wait().flatten(0, 1) for p in pending)
        assert weight_leaves is not None
        return weight_leaves, bias_leaves

    return finish


def _norm_outputs(x: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall) -> list[Tensor | None]:
    mean, rstd = (x.new_empty(x.shape[:-1].numel(), dtype=torch.float32) for _ in range(2))
    return [x.new_empty(x.shape), None if call.rms else mean, rstd]


def _restore(ctx: Any, dtypes: Any, call: NormCall) -> None:
    ctx.call, ctx.bias_dtype = call, dtypes[2]


invariant_norm = opaque(
    Norm,
    name="norm",
    tensors=("x", "weight", "bias?"),
    outputs=_norm_outputs,
    restore=_restore,
    saved=(0, 1, None, None),
)


def stock_norm(x: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall) -> Tensor:
    """The mode off: torch's norm; where tokens or heads are sharded the gradients of gamma and beta are all-reduced."""
    sharded = call.sharding.world > 1 or call.heads_dim is not None
    gamma, beta = complete_grad(weight, call.group, sharded), complete_grad(bias, call.group, sharded)
    assert gamma is not None
    if call.zero_centered:
        gamma = gamma + 1
    gamma = gamma.to(x.dtype)
    if call.rms:
        return F.rms_norm(x, x.shape[-1:], gamma, call.eps)
    return F.layer_norm(x, x.shape[-1:], gamma, None if beta is None else beta.to(x.dtype), call.eps)
