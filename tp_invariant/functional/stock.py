"""The stock tensor-parallel path, used with the mode off: torch's matmul, and collectives that add.

The only module whose collectives add. With it the same model code runs with the mode on and off, so that the mode's
effect can be seen by changing one variable. After Megatron-LM, arXiv 1909.08053 and 2205.05198.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm.call_records import ALL_REDUCE, REDUCE_SCATTER, records_of
from ..comm.collectives import Group, gather_dim
from ..comm.wire import diagnosed_error
from ..core.compiled import constant
from ..core.differentiation import once_differentiable
from ..kernels.rowwise.reference_gated import ACTIVATIONS
from .linear import LinearCall, flatten_tokens, without_custom_op
from .main_grad import is_asked_for
from .regions import gathered, region_function, region_op, scattered

logger = logging.getLogger(__name__)
_logged = False


def log_once(group: Group) -> None:
    """Logs once per process, at INFO, that bits depend on the degree: at the first call, or when it is compiled."""
    if group.size > 1:
        _log_once(group.size)


@constant
def _log_once(size: int) -> None:
    global _logged
    if not _logged:
        _logged = True
        logger.info(
            "TP-invariant mode is off: tensor-parallel layers (degree %d) take the stock path, whose bits depend on "
            "the degree; set TP_INVARIANT_MODE=1 to turn it on",
            size,
        )


def _sum(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    records = records_of(group, total)
    if records is not None:
        records.begin(ALL_REDUCE, total, (total.numel(), op == dist.ReduceOp.SUM))
    try:
        work = dist.all_reduce(total, op, group=group.process_group, async_op=records is not None)
        if records is not None:
            records.wait(work)
    except RuntimeError as error:
        raise diagnosed_error(error, total, group, f"all-reduce of {tuple(x.shape)} {x.dtype}") from error
    return total


def _sum_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty((moved.shape[0] // group.size, *moved.shape[1:]))
    records = records_of(group, moved)
    if records is not None:
        records.begin(REDUCE_SCATTER, moved, (moved.numel(),))
    try:
        with warnings.catch_warnings():  # torch 2.13 renames the function; 2.11 has only this name
            warnings.simplefilter("ignore", FutureWarning)
            work = dist.reduce_scatter_tensor(out, moved, group=group.process_group, async_op=records is not None)
        if records is not None:
            records.wait(work)
    except RuntimeError as error:
        raise diagnosed_error(error, moved, group, f"reduce-scatter of {tuple(x.shape)} {x.dtype}") from error
    return out.movedim(0, dim).contiguous()  # a pipeline sends it


class _MaxOverRanks(torch.autograd.Function):
    """The elementwise maximum over ranks; no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group, dist.ReduceOp.MAX)


# The adjoint of a copy to all ranks is a sum over them, and the adjoint of a sum is a copy.
_CopyToRegion = region_function("_CopyToRegion", lambda x, group: x.view_as(x), _sum)
_ReduceFromRegion = region_function("_ReduceFromRegion", _sum, lambda grad, group: grad)
_GatherForRegion = region_function("_GatherForRegion", gather_dim, _sum_scatter)
_ReduceScatterFromRegion = region_function("_ReduceScatterFromRegion", _sum_scatter, gather_dim)
_copy_to_region = region_op(_CopyToRegion, "copy_to_region")
_reduce_from_region = region_op(_ReduceFromRegion, "reduce_from_region")
_gather_for_region = region_op(_GatherForRegion, "gather_for_region", gathered)
_reduce_scatter_from_region = region_op(_ReduceScatterFromRegion, "reduce_scatter_from_region", scattered)
_max_over_ranks = region_op(_MaxOverRanks, "max_over_ranks")


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """x, the same on every rank, whose gradient is the sum over the ranks."""
    return x if group.size == 1 else _copy_to_region(x, group)


def sum_over_ranks(x: Tensor, group: Group, scatter_dim: int | None = None) -> Tensor:
    """The sum, whole on every rank or scattered along a dim; its gradient is complete on every rank already."""
    if group.size == 1:
        return x
    if scatter_dim is None:
        return _reduce_from_region(x, group)
    return _reduce_scatter_from_region(x, scatter_dim, group)


def max_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The elementwise maximum over ranks; no gradient."""
    largest = x.detach()
    return largest.clone() if group.size == 1 else _max_over_ranks(largest, group)


def complete_grad(parameter: Tensor | None, group: Group, tokens_sharded: bool) -> Tensor | None:
    """A replicated parameter whose gradient is a sum over all ranks' tokens."""
    if parameter is None or group.size == 1 or not tokens_sharded:
        return parameter
    return _copy_to_region(parameter, group)


class _LinearIntoMainGrad(torch.autograd.Function):
    """F.linear whose weight gradient, in fp32, is added to main_grad; with `sum_dw` after a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, sum_dw: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.sum_dw = call, sum_dw
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, _, need_b, *_ = ctx.needs_input_grad
        dx = dy @ weight if need_x else None
        rows, dw, main_grad = flatten_tokens(dy), None, ctx.call.main_grad
        if is_asked_for(ctx, 1):
            a, b = rows.t(), flatten_tokens(x)
            wide = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
            with torch.autocast(a.device.type, enabled=False):
                product = torch.mm(a, b, out_dtype=torch.float32) if wide else a.float() @ b.float()
            if ctx.sum_dw:
                product = _sum(product, ctx.call.group)
            if main_grad.accumulate:
                main_grad.buffer().add_(product)
            else:
                main_grad.buffer().copy_(product)
            dw = main_grad.done(weight)
        return dx, dw, rows.sum(0) if need_b else None, None, None


_linear_into_main_grad = without_custom_op(_LinearIntoMainGrad)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, sum_dw: bool = False) -> Tensor:
    if call.main_grad is None:
        return F.linear(x, weight, bias)
    return _linear_into_main_grad(x, weight, bias, call, sum_dw and call.group.size > 1)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Shapes as linear.ColumnLinear."""
    if call.group.size > 1:
        if call.sequence_parallel:
            x = _gather_for_region(x, call.sequence_dim, call.group)
        else:
            x = _copy_to_region(x, call.group)
    return _linear(x, weight, bias, call)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Shapes as linear.RowLinear. The bias is added once, after the sum over ranks."""
    if call.group.size == 1:
        return _linear(x, weight, bias, call)
    y = _linear(x, weight, None, call)
    if call.sequence_parallel:
        y = _reduce_scatter_from_region(y, call.sequence_dim, call.group)
    else:
        y = _reduce_from_region(y, call.group)
    bias = complete_grad(bias, call.group, call.sequence_parallel)
    return y if bias is None else y + bias


def replicated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """Shapes as linear.ReplicatedLinear."""
    bias = complete_grad(bias, call.group, call.sequence_parallel)
    if call.main_grad is not None:
        return _linear(x, weight, bias, call, sum_dw=call.sequence_parallel)
    whole_weight = complete_grad(weight, call.group, call.sequence_parallel)
    assert whole_weight is not None
    return F.linear(x, whole_weight, bias)


def clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gated activation, with the numbers of kernels/rowwise/gated.py."""
    scale, _, limit = ACTIVATIONS["clamped_silu"]
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * scale))


def gemm(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """torch's product as a gemm_fn, for experts over data-parallel ranks."""
    c = torch.matmul(a, b)
    return (c if bias is None else c + bias).to(out_dtype or a.dtype)


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    parameters: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    group: Group,
    *,
    first: int,
    by_features: bool,
    gate: Callable[[Tensor], Tensor],
    transposed: bool,
    sequence_dim: int | None,
) -> Tensor:
    """y = sum over a token's experts, each from what this rank has of its weights, and then over the ranks.

    x [.., H], index and weights [.., k]: this rank's tokens with a sequence_dim, else all of them. parameters: weight
    and bias of the first product and of the second, of the experts from `first` on, whole or this rank's part of their
    inner features (by_features). Then each rank has the whole bias of the second, and the first rank alone adds it.
    """
    up, up_bias, down, down_bias = parameters
    if group.size > 1 and sequence_dim is not None:
        x, weights = (_gather_for_region(t, sequence_dim, group) for t in (x, weights))
        index = gather_dim(index, sequence_dim, group)
    elif group.size > 1:
        x, weights = _copy_to_region(x, group), _copy_to_region(weights, group)
    if down_bias is not None and by_features and group.size > 1:
        down_bias = _copy_to_region(down_bias, group) * (group.rank == 0)
    rows, chosen, factors = flatten_tokens(x), flatten_tokens(index), flatten_tokens(weights)
    y = torch.zeros_like(rows)
    for expert in range(down.shape[0]):
        token, slot = torch.where(chosen == first + expert)
        w_up, w_down = (up[expert].T, down[expert].T) if transposed else (up[expert], down[expert])
        inner = gate(F.linear(rows[token], w_up, None if up_bias is None else up_bias[expert]))
        outer = F.linear(inner, w_down, None if down_bias is None else down_bias[expert])
        y = y.index_add(0, token, (outer * factors[token, slot].unsqueeze(1)).to(y.dtype))
    return sum_over_ranks(y.view(x.shape), group, sequence_dim)


def grad_norm(params: list[Tensor], over: list[Group], stages: Group, place: torch.device) -> Tensor:
    """The L2 norm of all gradients, fp32: squares of sharded parameters are summed over the ranks of their groups, and
    all squares over the stages; replicated parameters count once.

    over: for each parameter the group over which it is sharded according to its attributes; of size 1 if it is not.
    place: the device on which stages are added, of the same kind on all of them.
    A DTensor's norm is a DTensor too, whose full_tensor sums over its mesh.
    """
    grads = [p.grad for p in params if p.grad is not None]
    plain = [g if g.element_size() <= 4 else g.float() for g in grads if not hasattr(g, "full_tensor")]
    # torch's clip_grad_norm_ has it too
    norms = iter(torch.ops.aten._foreach_norm.Scalar(plain, 2, torch.float32) if plain else ())
    every = [
        torch.linalg.vector_norm(g.float()).full_tensor() if hasattr(g, "full_tensor") else next(norms) for g in grads
    ]
    chosen: dict[Group | None, list[Tensor]] = {}
    for norm, group in zip(every, over, strict=True):
        chosen.setdefault(group if group.size > 1 else None, []).append(norm.to(every[0].device))
    total = every[0].new_zeros(()) if every else torch.zeros((), device=place)
    for shared_by, members in chosen.items():
        squares = torch.stack(members).square().sum()
        total = total + (squares if shared_by is None else _sum(squares, shared_by))
    return (total if stages.size == 1 else _sum(total.to(place), stages)).sqrt()
