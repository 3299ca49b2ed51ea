"""Which way bytes travel: a kernel between peers, a copy engine, or the group's collectives; the fastest that works.

All of them move the same bytes, so the choice is one of speed alone. It depends on sizes, on the device and on what a
group's ranks can do, which are the same on every rank.

    early        for something that is not needed yet: by the side, so that what is needed sooner goes past it; a kernel
                 moves at once what is too small for a copy engine
    overlapped   whether something else is computed meanwhile, before the result is waited for. In a CUDA graph this
                 goes by a copy engine, which leaves the SMs alone; from Python its dozen calls of the driver cost more
                 than they save, unless the block is large
    lend         whether the result may lie in a buffer that the group's gathers share: then release it once it is read
    for_graphs   whether CUDA graphs will hold moves like this one: what they need is made now, as a capture cannot
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import collectives, peer_copies, peer_reads, small_gathers
from .collectives import Group, Pending, prefetch_group

_Start = Callable[[], Pending | None]


def _first(kernel: _Start, copy: _Start, overlapped: bool) -> Pending | None:
    """By a kernel or, if it is asked first, a copy engine; the other one where the first cannot."""
    pending = copy() if overlapped else kernel()
    if pending is None:
        pending = kernel() if overlapped else copy()
    return pending


def start_gather_major(
    x: Tensor,
    group: Group,
    *,
    early: bool = False,
    overlapped: bool = False,
    lend: bool = True,
    for_graphs: bool = False,
) -> Pending:
    """Every rank's x, rank-major: [P, ...x]."""
    pending = None if early else small_gathers.start_gather(x, group)
    if pending is not None:
        return pending
    if for_graphs:
        _prepare(group, x.device, early)

    def copy() -> Pending | None:
        return peer_copies.start_gather(x, group, early=early) if lend else None

    pending = _first(lambda: peer_reads.start_gather_major(x, group), copy, overlapped or early)
    if pending is not None:
        return pending
    return collectives.start_gather_major(x, prefetch_group(group, x.device) if early else group)


def start_exchange_rows(
    x: Tensor,
    send_sizes: list[int],
    group: Group,
    *,
    early: bool = False,
    overlapped: bool = False,
    lend: bool = True,
    for_graphs: bool = False,
) -> Pending:
    """Every rank's block of the rows of x that are this rank's: [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    if for_graphs:
        _prepare(group, x.device, early)

    def copy() -> Pending | None:
        return peer_copies.start_exchange_rows(x, send_sizes, group, early=early) if lend else None

    def kernel() -> Pending | None:
        return peer_reads.start_exchange_rows(x, send_sizes, group)

    pending = _first(kernel, copy, overlapped or early)
    if pending is not None:
        return pending
    return collectives.start_exchange_rows(x, send_sizes, prefetch_group(group, x.device) if early else group)


def exchange_cols_for_rows(x: Tensor, row_sizes: list[int], col_sizes: list[int], group: Group) -> Tensor:
    """From columns split over ranks to rows split over ranks: x [T, col_sizes[rank]] -> [row_sizes[rank], N]."""
    pending = peer_reads.start_exchange_cols_for_rows(x, row_sizes, col_sizes, group)
    if pending is not None:
        return pending.wait()
    return collectives.exchange_cols_for_rows(x, row_sizes, col_sizes, group)


def start_gather_dim(x: Tensor, dim: int, group: Group, *, overlapped: bool = False) -> Pending:
    """Every rank's x, concatenated along `dim` in rank order."""
    ways = [peer_reads.start_gather_dim, peer_copies.start_gather_dim]
    for way in (small_gathers.start_gather_dim, *(reversed(ways) if overlapped else ways)):
        pending = way(x, dim, group)
        if pending is not None:
            return pending
    return collectives.start_gather_dim(x, dim, group)


def gather_along(x: Tensor, dim: int, group: Group) -> Tensor:
    """The same in a tensor that no buffer is lent for."""
    for kernel in (small_gathers.start_gather_dim, peer_reads.start_gather_dim):
        pending = kernel(x, dim, group)
        if pending is not None:
            return pending.wait()
    return collectives.gather_dim(x, dim, group)


def gather_by_rank(x: Tensor, group: Group) -> Tensor:
    """Every rank's x, rank-major, in a tensor that no buffer is lent for."""
    for kernel in (small_gathers.start_gather, peer_reads.start_gather_major):
        pending = kernel(x, group)
        if pending is not None:
            return pending.wait()
    return collectives.gather_major(x, group)


def gather_uneven(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All `size` rows (dim 0) or columns of a matrix that `layout.split_sizes` splits over ranks."""
    if x.shape[dim] * group.size == size:
        pending = small_gathers.start_gather(x, group, dim, (size, x.shape[1]) if dim == 0 else (x.shape[0], size))
        if pending is not None:
            return pending.wait()
        pending = peer_reads.start_gather_dim(x, dim, group)
        if pending is not None:
            return pending.wait()
    return collectives.gather_uneven(x, dim, size, group)


def _prepare(group: Group, device: torch.device, early: bool) -> None:
    peer_copies.prepare_for_graphs(group, device)
    if early:
        prefetch_group(group, device)
