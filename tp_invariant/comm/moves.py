"""Which way bytes travel: peer copies, small gathers, or the group's collectives, whichever is fastest where it works.

All of them move the same bytes, so the choice is one of speed alone. It depends on sizes, on the device and on what a
group's ranks can do, which are the same on every rank.

    early        for something that is not needed yet: by the side, so that what is needed sooner goes past it
    lend         whether the result may lie in a buffer that the group's gathers share: then release it once it is read
    for_graphs   whether CUDA graphs will hold moves like this one: what they need is made now, as a capture cannot
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.layout import fresh_view
from . import collectives, peer_copies, small_gathers
from .collectives import Group, Pending, prefetch_group


def start_gather_major(
    x: Tensor, group: Group, *, early: bool = False, lend: bool = True, for_graphs: bool = False
) -> Pending:
    """Every rank's x, rank-major: [P, ...x]."""
    pending = None if early else small_gathers.start_gather(x, group)
    if pending is not None:
        return pending
    if for_graphs:
        _prepare(group, x.device, early)
    if lend:
        pending = peer_copies.start_gather(x, group, early=early)
    if pending is not None:
        return pending
    return collectives.start_gather_major(x, prefetch_group(group, x.device) if early else group)


def start_exchange_rows(
    x: Tensor, send_sizes: list[int], group: Group, *, early: bool = False, lend: bool = True, for_graphs: bool = False
) -> Pending:
    """Every rank's block of the rows of x that are this rank's: [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    if for_graphs:
        _prepare(group, x.device, early)
    pending = peer_copies.start_exchange_rows(x, send_sizes, group, early=early) if lend else None
    if pending is not None:
        return pending
    return collectives.start_exchange_rows(x, send_sizes, prefetch_group(group, x.device) if early else group)


def start_gather_dim(x: Tensor, dim: int, group: Group) -> Pending:
    """Every rank's x, concatenated along `dim` in rank order."""
    pending = peer_copies.start_gather_rows(x, group) if dim % x.dim() == 0 else None
    return small_gathers.start_gather_dim(x, dim, group) if pending is None else pending


def gather_uneven(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All `size` rows (dim 0) or columns of a matrix that `layout.split_sizes` splits over ranks."""
    if x.shape[dim] * group.size == size:
        pending = small_gathers.start_gather(x, group, dim)
        if pending is not None:
            return fresh_view(pending.wait(), (size, x.shape[1]) if dim == 0 else (x.shape[0], size))
    return collectives.gather_uneven(x, dim, size, group)


def _prepare(group: Group, device: torch.device, early: bool) -> None:
    peer_copies.prepare_for_graphs(group, device)
    if early:
        prefetch_group(group, device)
