"""LayerNorm and RMSNorm with invariant gradients, for activations that are replicated or sharded along the sequence.

The gradients of gamma and beta are sums over tokens. They are split into partial sums over ROWS_PER_SUM consecutive
tokens of the full activation, whichever rank holds them. Each rank computes the partial sums of its tokens; these are
gathered, and every rank adds them in token order. If a shard boundary would split a partial sum, the operands are
gathered instead. In a norm over each head of q or k the heads are sharded instead of the tokens: there each head has
one partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import NOT_LENT, Group, gather_dim, start_gather_major
from ..core.compiled import as_custom_op, op_config
from ..core.differentiation import once_differentiable
from ..core.dtensors import is_dtensor, with_dtensors
from ..core.layout import TokenSharding
from ..core.options import Normalization
from ..kernels.select import select
from .linear import flatten_tokens
from .stock import complete_grad

ROWS_PER_SUM = 32

NORMALIZATIONS = get_args(Normalization)


op_config(TokenSharding)


@op_config
@dataclass(frozen=True)
class NormCall:
    """The arguments of one call of a norm besides its tensors. `sharding.world` is 1 unless the tokens are sharded.

    `heads_dim`: for a norm over each head's features, the dim of x that holds this rank's heads; else None.
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
        kernels = select("norm", "cuda" if x.is_cuda else x.device.type)  # to ask for the type takes longer
        y, mean, rstd = kernels.norm_forward(
            x, weight, bias, eps=call.eps, rms=call.rms, zero_centered=call.zero_centered
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        return *_gradients(ctx, dy, need_x, need_weight, need_bias), None


class AddNorm(torch.autograd.Function):
    """s = x + residual, rounded to their dtype, and y = Norm's of s.

    x, residual, s, y  [.., H], this rank's tokens      weight, bias  [H], whole on every rank
    dx, dresidual      both are the gradient of s: Norm's dx and that of s's other uses, added and rounded as autograd
                       adds them
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall
    ) -> tuple[Tensor, Tensor]:
        kernels = select("residual addition and norm", x.device.type)
        s, y, mean, rstd = kernels.add_norm_forward(
            x, residual, weight, bias,
            eps=call.eps, rms=call.rms, zero_centered=call.zero_centered,
        )  # fmt: skip
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight, need_bias, _ = ctx.needs_input_grad
        need_s = need_x or need_residual
        dnorm = dweight = dbias = None
        if dy is not None:
            dnorm, dweight, dbias = _gradients(ctx, dy, need_s, need_weight, need_bias)
        if need_s and dnorm is not None and ds is not None:
            dnorm = ds + dnorm
        elif need_s and dnorm is None:
            dnorm = ds
        return dnorm if need_x else None, dnorm if need_residual else None, dweight, dbias, None


def _gradients(
    ctx: Any, dy: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of a norm, those that are needed."""
    x, weight, mean, rstd = ctx.saved_tensors
    call: NormCall = ctx.call
    kernels = select("norm", "cuda" if x.is_cuda else x.device.type)
    dx = dweight = dbias = finish = None
    if not dy.is_contiguous():
        dy = dy.contiguous()  # once, for all kernels that read it
    if not x.is_contiguous():
        x = flatten_tokens(x).view(x.shape)  # the same
    rms, zero_centered = call.rms, call.zero_centered
    # the heads of a token in a row
    if call.heads_dim == x.dim() - 2 and x.is_cuda and need_x and need_weight and not need_bias:
        x, whole = x.contiguous(), call.group.size == 1  # rows may lie evenly where a token's heads do not: a slice
        dx, dweight = kernels.norm_backward_of_heads(
            dy, x, weight, mean, rstd,
            rows_per_sum=ROWS_PER_SUM, rms=rms, zero_centered=zero_centered, folded=whole,
        )  # fmt: skip
        if not whole:
            sums = gather_dim(dweight, 0, call.group, peers=NOT_LENT)
            dweight, _ = kernels.fold_weight_gradients(sums, weight.dtype, None)
        return dx, dweight, None
    if need_weight or need_bias:
        whole_sums = call.heads_dim is None and call.sharding.partial_sums_fit(x.shape, ROWS_PER_SUM)
        if need_x and whole_sums:
            dx, sums = kernels.norm_backward(
                dy, x, weight, mean, rstd,
                rows_per_sum=ROWS_PER_SUM, rms=rms, zero_centered=zero_centered, with_bias=need_bias,
            )  # fmt: skip
            finish = _start_gather(call, sums, x.shape)
        else:  # the partial sums before dx, whose kernel overlaps their gather
            start = _start_partial_sums if call.heads_dim is None else _start_head_sums
            rows = flatten_tokens(dy), flatten_tokens(x)
            finish = start(kernels, call, *rows, x.shape, mean, rstd, need_bias)
    if need_x and dx is None:
        dx = kernels.norm_backward_input(dy, x, weight, mean, rstd, rms=rms, zero_centered=zero_centered)
    if finish is not None:
        dweight, dbias = kernels.fold_weight_gradients(finish(), weight.dtype, ctx.bias_dtype if need_bias else None)
    return dx, dweight if need_weight else None, dbias


def _start_partial_sums(
    kernels: ModuleType,
    call: NormCall,
    dy: Tensor,
    x: Tensor,
    shape: torch.Size,
    mean: Tensor | None,
    rstd: Tensor,
    with_bias: bool,
) -> Callable[[], Tensor]:
    """Starts gathering the partial sums of the full activation; the returned function gives them in token order,
    gamma's and beta's side by side.

    dy, x: [T, H], this rank's rows of an activation of this shape.
    """
    fits = call.sharding.partial_sums_fit(shape, ROWS_PER_SUM)
    if not fits:
        dim, group = call.sharding.sequence_dim, call.group
        dy, x = (flatten_tokens(gather_dim(t.view(shape), dim, group)) for t in (dy, x))
        rstd = gather_dim(rstd.view(shape[:-1]), dim, group).reshape(-1)
        mean = None if mean is None else gather_dim(mean.view(shape[:-1]), dim, group).reshape(-1)
    sums = kernels.norm_weight_partial_sums(
        dy, x, mean, rstd, rows_per_sum=ROWS_PER_SUM, rms=call.rms, with_bias=with_bias
    )
    return _start_gather(call, sums, shape) if fits else lambda: sums


def _start_gather(call: NormCall, sums: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
    """One collective for the partial sums of gamma and beta; what it returns waits for it."""
    if call.sharding.world == 1:
        return lambda: sums
    pending = start_gather_major(sums, call.group, peers=NOT_LENT)
    return lambda: call.sharding.order_partial_sums(pending.wait(), shape)


def _start_head_sums(
    kernels: ModuleType,
    call: NormCall,
    dy: Tensor,
    x: Tensor,
    shape: torch.Size,
    mean: Tensor | None,
    rstd: Tensor,
    with_bias: bool,
) -> Callable[[], Tensor]:
    """Starts gathering one partial sum for each head of all ranks; the returned function gives them in head order.

    A head's sum over its tokens is computed in blocks of ROWS_PER_SUM tokens.
    dy, x: [T * heads, D], of an activation of this shape.
    """
    dim, last = call.heads_dim, len(shape) - 2
    assert dim is not None
    heads = shape[dim]

    def heads_last(t: Tensor, *sizes: int) -> Tensor:
        if dim != last:
            t = t.view(*shape[:-1], *t.shape[1:]).movedim(dim, last)
        return t.reshape(-1, *sizes)

    blocks = kernels.norm_weight_partial_sums(
        heads_last(dy, heads * shape[-1]),
        heads_last(x, heads * shape[-1]),
        None if mean is None else heads_last(mean, heads),
        heads_last(rstd, heads),
        rows_per_sum=ROWS_PER_SUM,
        rms=call.rms,
        with_bias=with_bias,
    )
    of_heads = kernels.fold_partial_sums(blocks).view(-1, heads, shape[-1])  # of gamma, and of beta if with_bias
    pending = [start_gather_major(sums, call.group, peers=NOT_LENT) for sums in of_heads]

    def finish() -> Tensor:
        gathered = [p.wait().flatten(0, 1) for p in pending]
        return torch.cat(gathered, dim=1) if with_bias else gathered[0]

    return finish


def _norm_outputs(x: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall) -> list[Tensor | None]:
    mean, rstd = (x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32) for _ in range(2))
    return [x.new_empty(x.shape), None if call.rms else mean, rstd]


def _restore(ctx: Any, dtypes: Any, call: NormCall) -> None:
    ctx.call, ctx.bias_dtype = call, dtypes[2]


invariant_norm = as_custom_op(
    Norm,
    name="norm",
    tensors=("x", "weight", "bias?"),
    outputs=_norm_outputs,
    restore=_restore,
    saved=(0, 1, None, None),
)


_add_norm_of_plain, _add_norm_of_dtensors = AddNorm.apply, with_dtensors(AddNorm).apply


def invariant_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall
) -> tuple[Tensor, Tensor]:
    """(y, s): s = x + residual, and the norm of s. In compiled code the addition is torch's."""
    if torch.compiler.is_compiling():
        s = x + residual
        return invariant_norm(s, weight, bias, call), s
    plain = not is_dtensor(weight) and not is_dtensor(bias)
    return (_add_norm_of_plain if plain else _add_norm_of_dtensors)(x, residual, weight, bias, call)


def stock_norm(x: Tensor, weight: Tensor, bias: Tensor | None, call: NormCall) -> Tensor:
    """The mode off: torch's norm; where tokens or heads are sharded the gradients of gamma and beta are all-reduced."""
    sharded = call.sharding.world > 1 or call.heads_dim is not None
    gamma, beta = complete_grad(weight, call.group, sharded), complete_grad(bias, call.group, sharded)
    assert gamma is not None
    if call.zero_centered:
        gamma = gamma + 1
    gamma = gamma.to(x.dtype)
    if call.rms:
        y = F.rms_norm(x, x.shape[-1:], gamma, call.eps)
        return y if beta is None else y + beta.to(y.dtype)
    return F.layer_norm(x, x.shape[-1:], gamma, None if beta is None else beta.to(x.dtype), call.eps)
