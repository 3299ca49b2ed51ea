"""Which way bytes travel between GPUs of one host: by a kernel, a copy engine or neither, whichever is the fastest.

All of them move the same bytes, so the choice is one of speed alone. It depends on sizes, on the device and on what a
group's ranks can do, which are the same on every rank. What is overlapped goes by a copy engine, which leaves the SMs
alone; from Python its launches cost more than they save, unless the block is large. None: by the group's backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from . import peer_copies, peer_kernels
from .group import Group, Peers, Pending
from .peer_memory import transport


def _order(x: Tensor, group: Group, peers: Peers, choice: str) -> tuple[ModuleType, ...]:
    """Who may move x, whoever is the faster first. choice: what `transport` says."""
    if choice == "nccl":
        return ()
    if peers.for_graphs:
        peer_copies.prepare_for_graphs(group, x.device)
    if choice == "copy_engine":
        return (peer_copies,) if peers.lend else ()
    if not peers.lend:
        return (peer_kernels,)
    return (peer_copies, peer_kernels) if peers.early or peers.overlapped else (peer_kernels, peer_copies)


def start_gather_major(x: Tensor, group: Group, peers: Peers) -> Pending | None:
    """Every rank's x, rank-major: [P, ...x]."""
    choice = transport()
    for by in _order(x, group, peers, choice):
        if pending := by.start_gather_major(x, group, early=peers.early, choice=choice):
            return pending
    return None


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, peers: Peers) -> Pending | None:
    """Every rank's block of the rows of x that are this rank's: [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    choice = transport()
    for by in _order(x, group, peers, choice):
        if pending := by.start_exchange_rows(x, send_sizes, group, early=peers.early, choice=choice):
            return pending
    return None


def start_gather_dim(x: Tensor, dim: int, group: Group, peers: Peers) -> Pending | None:
    """Every rank's x, concatenated along `dim` in rank order."""
    choice = transport()
    for by in _order(x, group, peers, choice):
        if pending := by.start_gather_dim(x, dim, group, choice=choice):
            return pending
    return None


def start_exchange_cols_for_rows(
    x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: Group, peers: Peers
) -> Pending | None:
    """From columns split over ranks to rows: x [T, N/P] -> [T/P, N]; None if the splits are uneven."""
    if peer_kernels not in _order(x, group, peers, transport()):
        return None
    return peer_kernels.start_exchange_cols_for_rows(x, row_sizes, col_sizes, group)
