"""Which way bytes travel: a kernel between peers, a copy engine, or the group's collectives; the fastest that works.

All of them move the same bytes, so the choice is one of speed alone. It depends on sizes, on the device and on what a
group's ranks can do, which are the same on every rank.

    early        for something that is not needed yet: on the side, so that what is needed sooner goes past it
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

from . import collectives, peer_copies, peer_kernels
from .collectives import Group, Pending, prefetch_group


def _by_peers(
    kernel: Callable[[], Pending | None], copy: Callable[[], Pending | None], on_the_side: bool
) -> Pending | None:
    pending = copy() if on_the_side else kernel()
    return pending or (kernel() if on_the_side else copy())


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
    if for_graphs:
        _prepare(group, x.device, early)
    return _by_peers(
        lambda: peer_kernels.start_gather_major(x, group),
        lambda: peer_copies.start_gather(x, group, early=early) if lend else None,
        early or overlapped,
    ) or collectives.start_gather_major(x, prefetch_group(group, x.device) if early else group)


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
    return _by_peers(
        lambda: peer_kernels.start_exchange_rows(x, send_sizes, group),
        lambda: peer_copies.start_exchange_rows(x, send_sizes, group, early=early) if lend else None,
        early or overlapped,
    ) or collectives.start_exchange_rows(x, send_sizes, prefetch_group(group, x.device) if early else group)


def exchange_cols_for_rows(x: Tensor, row_sizes: list[int], col_sizes: list[int], group: Group) -> Tensor:
    """From columns split over ranks to rows split over ranks: x [T, col_sizes[rank]] -> [row_sizes[rank], N]."""
    pending = peer_kernels.start_exchange_cols_for_rows(x, row_sizes, col_sizes, group)
    return collectives.exchange_cols_for_rows(x, row_sizes, col_sizes, group) if pending is None else pending.wait()


def start_gather_dim(x: Tensor, dim: int, group: Group, *, overlapped: bool = False) -> Pending:
    """Every rank's x, concatenated along `dim` in rank order."""
    return _by_peers(
        lambda: peer_kernels.start_gather_dim(x, dim, group),
        lambda: peer_copies.start_gather_dim(x, dim, group),
        overlapped,
    ) or collectives.start_gather_dim(x, dim, group)


def gather_along(x: Tensor, dim: int, group: Group) -> Tensor:
    """The same in a tensor that no buffer is lent for."""
    pending = peer_kernels.start_gather_dim(x, dim, group)
    return collectives.gather_dim(x, dim, group) if pending is None else pending.wait()


def gather_by_rank(x: Tensor, group: Group) -> Tensor:
    """Every rank's x, rank-major, in a tensor that no buffer is lent for."""
    pending = peer_kernels.start_gather_major(x, group)
    return collectives.gather_major(x, group) if pending is None else pending.wait()


def gather_uneven(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All `size` rows (dim 0) or columns of a matrix that `layout.split_sizes` splits over ranks."""
    pending = peer_kernels.start_gather_dim(x, dim, group) if x.shape[dim] * group.size == size else None
    return collectives.gather_uneven(x, dim, size, group) if pending is None else pending.wait()


def _prepare(group: Group, device: torch.device, early: bool) -> None:
    peer_copies.prepare_for_graphs(group, device)
    if early:
        prefetch_group(group, device)
