"""Ordinary tensor parallelism, to compare with: torch's matmul, collectives that add, and Megatron-LM's overlaps.

Under sequence parallelism the column-parallel backward gathers its input again beside dgrad and scatters the sum of dx
beside wgrad; without, dx is summed beside wgrad. The forward's gather and sum, and the row-parallel backward's gather,
are waited for. Activations are [S, B, features], sharded along S.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant.comm.collectives import Group

moved = 0  # bytes that this rank received from others, counted from shapes


def _quiet(fn: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # torch 2.13 renames the functions; 2.11 has only these names
        warnings.simplefilter("ignore", FutureWarning)
        return fn(*args, **kwargs)


def _start_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    global moved
    moved += x.nbytes * (group.size - 1)
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    return out, _quiet(dist.all_gather_into_tensor, out, x, group=group.process_group, async_op=True)


def _start_scattered_sum(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    global moved
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    moved += out.nbytes * (group.size - 1)
    return out, _quiet(dist.reduce_scatter_tensor, out, x, group=group.process_group, async_op=True)


def _start_sum(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    global moved
    moved += 2 * x.nbytes * (group.size - 1) // group.size
    return x, dist.all_reduce(x, group=group.process_group, async_op=True)


def _done(started: tuple[Tensor, dist.Work]) -> Tensor:
    started[1].wait()
    return started[0]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class StockColumn(torch.autograd.Function):
    """x [S/P or S, B, K], w [N/P, K] -> [S, B, N/P]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Group, sp: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group, ctx.sp = group, sp
        return (_done(_start_gather(x, group)) if sp else x) @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        regather = _start_gather(x, ctx.group) if ctx.sp else None
        dx = dy @ w
        x_full = x if regather is None else _done(regather)
        summed = (_start_scattered_sum if ctx.sp else _start_sum)(dx, ctx.group)
        dw = _flat(dy).t() @ _flat(x_full)
        return _done(summed), dw, None, None


class StockRow(torch.autograd.Function):
    """x [S, B, K/P], w [N, K/P] -> [S/P or S, B, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Group, sp: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group, ctx.sp = group, sp
        return _done((_start_scattered_sum if sp else _start_sum)(x @ w.t(), group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dy_full = _done(_start_gather(dy.contiguous(), ctx.group)) if ctx.sp else dy
        return dy_full @ w, _flat(dy_full).t() @ _flat(x), None, None
