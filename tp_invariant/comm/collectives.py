"""Collectives that move bytes and never add. The group is always an argument; regions.py adds autograd adjoints.

Because nothing here adds, no algorithm, protocol, ring order or topology of NCCL or gloo can change a bit of a result.
With `peers` what is on a GPU may travel by other ways than the group's backend (moves.py), with the same bytes.
Activations are [..., features] or [rows, features]; see core/layout.py for the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from ..core.layout import split_sizes
from . import moves
from .call_records import ALL_GATHER, ALL_TO_ALL, records_of
from .group import (
    LENT,
    NOT_LENT,
    Group,
    OnMesh,
    Peers,
    Pending,
    concatenated,
    current_handle,
    is_captured,
    is_capturing,
    is_first,
    on_mesh,
    ranks_of,
    resolve_group,
    stored,
    whole_shape,
)
from .wire import held_until_it_ends, transfer_error

__all__ = [
    "LENT",
    "NOT_LENT",
    "Group",
    "OnMesh",
    "Peers",
    "Pending",
    "current_handle",
    "exchange_cols_for_rows",
    "exchange_flat",
    "exchange_rows",
    "gather_dim",
    "gather_major",
    "gather_uneven",
    "is_captured",
    "is_capturing",
    "is_first",
    "on_mesh",
    "ranks_of",
    "resolve_group",
    "start_all_gather",
    "start_all_to_all",
    "start_exchange_rows",
    "start_gather_dim",
    "start_gather_major",
    "stored",
    "whole_shape",
]


# The group's own methods, where they are public: torch.distributed's functions put a logger and checks around them,
# which keep the host longer than the call does.
_GATHER_OPTIONS, _EXCHANGE_OPTIONS = AllgatherOptions(), AllToAllOptions()
_GATHER_OPTIONS.asyncOp = _EXCHANGE_OPTIONS.asyncOp = True


def _all_gather(out: Tensor, local: Tensor, process_group: Any) -> dist.Work:
    if hasattr(process_group, "all_gather_single"):  # since torch 2.13
        return process_group.all_gather_single(out, local, _GATHER_OPTIONS)
    return dist.all_gather_into_tensor(out, local, process_group, async_op=True)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def start_all_gather(out: Tensor, local: Tensor, group: Group) -> dist.Work | None:
    """Starts gathering all ranks' contiguous `local`, one after another, into `out`. Shapes do not matter."""
    records = records_of(group, local)
    if records is not None:
        records.begin(ALL_GATHER, local, (local.numel(),))
    try:  # gloo and NCCL want the ranks stacked along dim 0 of an output with as many dims as the input
        work = _all_gather(out.view(-1), local.view(-1), group.process_group)
        return held_until_it_ends(work, out, local)
    except RuntimeError as error:
        raise transfer_error(error, local, group) from error


def start_all_to_all(
    out: Tensor,
    x: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: Group,
    *,
    alike: Sequence[int] | None = None,
) -> dist.Work | None:
    """alike: numbers, the same on every rank, that decide the sizes of all messages; None: x.numel() and `sent`."""
    records = records_of(group, x)
    if records is not None:
        records.begin(ALL_TO_ALL, x, (x.numel(), *sent) if alike is None else alike)
    try:
        process_group: Any = group.process_group
        work = process_group.alltoall_base(out, x, list(received), list(sent), _EXCHANGE_OPTIONS)
        return held_until_it_ends(work, out, x)
    except RuntimeError as error:
        raise transfer_error(error, x, group) from error


def start_gather_major(
    local: Tensor,
    group: Group,
    finish: Callable[[Tensor], Tensor] | None = None,
    *,
    peers: Peers | None = None,
) -> Pending:
    """Starts gathering every rank's `local` (same shape everywhere) into a new rank-major [P, ...local].

    `finish` makes the result of that.
    """
    if group.size == 1:
        return Pending(local.contiguous().unsqueeze(0), None, finish=finish)
    if pending := peers and _is_on_gpu(local) and moves.start_gather_major(local, group, peers):
        return pending
    return _start_gather(local, (group.size, *local.shape), group, finish)


def _start_gather(
    local: Tensor, shape: Sequence[int], group: Group, finish: Callable[[Tensor], Tensor] | None = None
) -> Pending:
    local = local.contiguous()
    out = local.new_empty(shape)
    if local.numel() == 0:
        return Pending(out, None, finish=finish)
    return Pending(out, start_all_gather(out, local, group), local, group, finish)


def gather_major(local: Tensor, group: Group, *, peers: Peers | None = None) -> Tensor:
    """Every rank's `local` (same shape everywhere) in a rank-major [P, ...local]."""
    return start_gather_major(local, group, peers=peers).wait()


def start_gather_dim(local: Tensor, dim: int, group: Group, *, peers: Peers | None = None) -> Pending:
    """Starts gathering every rank's `local` (same shape everywhere), concatenated along `dim` in rank order."""
    if group.size == 1:
        return Pending(local, None)
    if pending := peers and _is_on_gpu(local) and moves.start_gather_dim(local, dim, group, peers):
        return pending
    if not is_first(local, dim):
        return start_gather_major(local, group, concatenated(dim))
    return _start_gather(local, whole_shape(local, dim, group), group)


def gather_dim(local: Tensor, dim: int, group: Group, *, peers: Peers | None = None) -> Tensor:
    """See `start_gather_dim`."""
    return start_gather_dim(local, dim, group, peers=peers).wait()


def gather_uneven(local: Tensor, dim: int, size: int, group: Group, *, peers: Peers | None = None) -> Tensor:
    """The whole of a dim of `size` elements that `layout.split_sizes` splits over ranks, from this rank's piece."""
    if group.size == 1:
        return local
    sizes = split_sizes(size, group.size)
    if sizes[0] == sizes[-1]:
        return gather_dim(local, dim, group, peers=peers)
    # gloo gathers equal shapes only: send the largest piece's shape and drop what is padding. Unwritten bytes in the
    # padding never reach the result.
    shape = list(local.shape)
    shape[dim] = sizes[0]
    padded = local.new_empty(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    major = gather_major(padded, group)
    return torch.cat([major[rank].narrow(dim, 0, sizes[rank]) for rank in range(group.size)], dim=dim)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, *, peers: Peers | None = None) -> Pending:
    """Starts an all-to-all of row blocks: rank q gets rows block q of every rank's x, stacked rank-major.

    x [sum(send_sizes), C], the same shape on every rank -> [P, send_sizes[rank], C].
    """
    x = x.contiguous()
    mine = send_sizes[group.rank]
    if group.size == 1:
        return Pending(x.unsqueeze(0), None)
    if pending := peers and _is_on_gpu(x) and moves.start_exchange_rows(x, send_sizes, group, peers):
        return pending
    out = x.new_empty((group.size, mine, *x.shape[1:]))
    if x.numel() == 0:
        return Pending(out, None)
    work = start_all_to_all(out.view(-1, *x.shape[1:]), x, [mine] * group.size, send_sizes, group)
    return Pending(out, work, x, group)


def exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group) -> Tensor:
    """See `start_exchange_rows`."""
    return start_exchange_rows(x, send_sizes, group).wait()


def exchange_flat(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, alike: Sequence[int]
) -> Tensor:
    """An all-to-all of the rows of x: its block q, of sent[q] rows, goes to rank q; rank q's comes, of received[q].

    Of a 1-D x the rows are its elements.

    alike: numbers, the same on every rank, that decide all sizes.
    """
    out = x.new_empty((sum(received), *x.shape[1:]))
    if group.size == 1 or not any(alike):
        return out.copy_(x)
    return Pending(out, start_all_to_all(out, x, received, sent, group, alike=alike), x, group).wait()


def exchange_cols_for_rows(
    x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: Group, *, peers: Peers | None = None
) -> Tensor:
    """From columns split over ranks to rows split over ranks: x [T, col_sizes[rank]] -> [row_sizes[rank], N]."""
    if group.size == 1:
        return x
    if pending := peers and _is_on_gpu(x) and moves.start_exchange_cols_for_rows(x, row_sizes, col_sizes, group, peers):
        return pending.wait()
    mine = row_sizes[group.rank]
    # blocks differ in width, so they are sent as flat tensors
    out = x.new_empty(mine * sum(col_sizes))
    if sum(row_sizes) * sum(col_sizes) == 0:
        return out.view(mine, sum(col_sizes))
    sent = [rows * x.shape[1] for rows in row_sizes]
    received = [mine * cols for cols in col_sizes]
    flat = x.contiguous().view(-1)
    alike = *row_sizes, *col_sizes
    out = Pending(out, start_all_to_all(out, flat, received, sent, group, alike=alike), flat, group).wait()
    blocks = [block.view(mine, cols) for block, cols in zip(out.split(received), col_sizes, strict=True)]
    return torch.cat(blocks, dim=1)
