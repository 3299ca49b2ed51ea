"""Which way bytes travel between GPUs of one host: by a kernel, a copy engine or neither, whichever is the fastest.

All of them move the same bytes, so the choice is one of speed alone. It depends on sizes, on the device and on what a
group's ranks can do, which are the same on every rank. What is overlapped goes by a copy engine, which leaves the SMs
alone; from Python its launches cost more than they save, unless the block is large. None: by the group's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from . import peer_copies, peer_kernels
from .group import Group, Peers, Pending
from .peer_kernels import start_exchange_cols_for_rows

__all__ = ["start_exchange_cols_for_rows", "start_exchange_rows", "start_gather_dim", "start_gather_major"]


def _first(
    x: Tensor, group: Group, peers: Peers, kernel: Callable[[], Pending | None], copy: Callable[[], Pending | None]
) -> Pending | None:
    if peers.for_graphs:
        peer_copies.prepare_for_graphs(group, x.device)
    copy_first = peers.lend and (peers.early or peers.overlapped)
    pending = copy() if copy_first else kernel()
    if pending is None and peers.lend:
        pending = kernel() if copy_first else copy()
    return pending


def start_gather_major(x: Tensor, group: Group, peers: Peers) -> Pending | None:
    """Every rank's x, rank-major: [P, ...x]."""
    return _first(
        x, group, peers,
        lambda: peer_kernels.start_gather_major(x, group),
        lambda: peer_copies.start_gather(x, group, early=peers.early),
    )  # fmt: skip


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, peers: Peers) -> Pending | None:
    """Every rank's block of the rows of x that are this rank's: [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    return _first(
        x, group, peers,
        lambda: peer_kernels.start_exchange_rows(x, send_sizes, group),
        lambda: peer_copies.start_exchange_rows(x, send_sizes, group, early=peers.early),
    )  # fmt: skip


def start_gather_dim(x: Tensor, dim: int, group: Group, peers: Peers) -> Pending | None:
    """Every rank's x, concatenated along `dim` in rank order."""
    return _first(
        x, group, peers,
        lambda: peer_kernels.start_gather_dim(x, dim, group),
        lambda: peer_copies.start_gather_dim(x, dim, group),
    )  # fmt: skip
