"""Gathers and exchanges of some MB by a kernel that reads from peers' memory (kernels/peer_read.py), in stream order.

For what a layer has to wait for: the tokens that it multiplies, the rows of a product. One kernel on the current stream
takes less time than NCCL for these sizes, on the GPU and on the host; a copy engine, which runs beside GEMMs, is for
what travels while something else is computed (peer_copies.py). As for small gathers (small_gathers.py, which has the
order of streams), moves of a group come in the same order on all ranks, eager ones and captured ones by a channel each.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, Pending, is_capturing, stored, stream_is_captured, whole_shape
from .peer_copies import copies_of, transport
from .peer_memory import CudaMachine, driver, looks_of
from .small_gathers import Channel, OnStream
from .wire import gather_objects

logger = logging.getLogger(__name__)

MOST_BYTES = 2**24  # of x that is exchanged in blocks; beyond, copy engines are faster
MOST_GATHERED = 2**23  # of x that goes to all ranks: [4096, 4096] in 16 bits on four ranks


class PeerReads:
    """What a group has on a device: a channel for eager moves and one for captured ones. `moves` counts them."""

    def __init__(self, machine: CudaMachine, eager: Channel, captured: Channel, looks: int, slot: int) -> None:
        from ..kernels.launch import empty_beside
        from ..kernels.peer_gather import TAGS
        from ..kernels.peer_read import PeerRead

        self._machine, self._tags, self.size, self._empty = machine, TAGS, machine.size, empty_beside
        kernel = functools.partial(PeerRead, rank=machine.rank, slot=slot, limit=looks)
        self.eager, self.captured = eager, captured
        self._eagerly, self._in_graphs = (kernel(c.table, c.states) for c in (eager, captured))

    @property
    def moves(self) -> int:
        return self.eager.gathers + self.captured.gathers

    def move(self, x: Tensor, shape: Sequence[int], blocks: int, row: int, side_by_side: bool) -> Pending:
        """What every rank sends to this one, in a new tensor of this shape; the arguments are PeerRead's."""
        stream = self._machine.current()
        capture, channel, kernel = None, self.eager, self._eagerly
        if stream_is_captured():
            capture, channel, kernel = driver().capture(stream.cuda_stream), self.captured, self._in_graphs
        out = self._empty(x, tuple(shape))  # first: where no memory is left, this was no move
        kernel(x, out, blocks, row, side_by_side, channel.next(stream, capture) % self._tags)
        return OnStream(out, self._machine, stream)


def _connect(group: Group, machine: CudaMachine, device: torch.device) -> PeerReads | None:
    """Collective."""
    from ..kernels.peer_read import CHUNKS, buffer_bytes, slot_of

    slot = slot_of(MOST_BYTES, group.size)
    nbytes = buffer_bytes(slot, group.size)
    shared = [machine.share(nbytes) for _ in range(2)]
    if shared[0] is None or shared[1] is None:
        logger.info("NCCL moves some MB too: a rank has no %.0f MiB left for buffers", 2 * nbytes / 2**20)
        return None
    eager, captured = (Channel(buffer, device, CHUNKS) for buffer in shared if buffer is not None)
    torch.cuda.current_stream(device).synchronize()
    gather_objects(None, group)  # nobody writes before all buffers are zero
    return PeerReads(machine, eager, captured, looks_of(group), slot)


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerReads | None]]
_connected = weakref.WeakKeyDictionary()


def reads_of(group: Group, device: torch.device) -> PeerReads | None:
    """The group's PeerReads, None where it has none: the same on every rank. Collective the first time, which cannot be
    in a capture: then there are none yet."""
    assert group.process_group is not None
    of_group = _connected.get(group.process_group)
    if of_group is None:
        of_group = _connected[group.process_group] = {}
    if device not in of_group:
        if is_capturing():
            return None
        copies = copies_of(group, device)
        found = None if isinstance(copies, str) else _connect(group, copies.machine, device)  # type: ignore[arg-type]
        of_group[device] = found
    return of_group[device]


def _start(
    x: Tensor, group: Group, shape: Sequence[int], blocks: int, row: int, side_by_side: bool = False
) -> Pending | None:
    """None where another transport is to do it: TP_INVARIANT_TRANSPORT is not auto, x is not on a GPU, empty, large, or
    of rows that are no multiple of 16 bytes, or the ranks cannot read each other's memory. The same on every rank."""
    most = MOST_GATHERED if blocks == 1 else MOST_BYTES
    if not x.is_cuda or group.size == 1 or not 0 < x.nbytes <= most or row % 16 or transport() != "auto":
        return None
    reads = reads_of(group, x.device)
    if reads is None:
        return None
    x = stored(x)
    return reads.move(x if x.data_ptr() % 16 == 0 else x.clone(), shape, blocks, row, side_by_side)


def start_gather_major(x: Tensor, group: Group) -> Pending | None:
    """Every rank's x, rank-major: [P, ...x]."""
    return _start(x, group, (group.size, *x.shape), 1, x.nbytes)


def start_gather_dim(x: Tensor, dim: int, group: Group) -> Pending | None:
    """Every rank's x, concatenated along `dim`."""
    before = x.shape[: dim % x.dim()].numel()
    return _start(x, group, whole_shape(x, dim, group), 1, x.nbytes // max(before, 1), side_by_side=before > 1)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group) -> Pending | None:
    """Every rank's block of rows that is this rank's, [sum(send_sizes), C] -> [P, rows, C]; None if blocks differ."""
    rows = send_sizes[0]
    if any(size != rows for size in send_sizes):
        return None
    return _start(x, group, (group.size, rows, *x.shape[1:]), group.size, x.nbytes // group.size)


def start_exchange_cols_for_rows(
    x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: Group
) -> Pending | None:
    """From columns split over ranks to rows: x [T, N/P] -> [T/P, N]; None if the splits are uneven."""
    rows, cols = row_sizes[0], col_sizes[0]
    if any(size != rows for size in row_sizes) or any(size != cols for size in col_sizes):
        return None
    return _start(x, group, (rows, group.size * cols), group.size, cols * x.element_size(), side_by_side=True)
