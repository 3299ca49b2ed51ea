"""Gathers and exchanges by a kernel on the current stream that reads or writes peers' memory (kernels/peer_moves.py).

For what a layer has to wait for: one kernel takes less time than NCCL for up to some MB, eager or captured in a CUDA
graph. A copy engine, which runs beside GEMMs, is for what travels while something else is computed (peer_copies.py).
Like other collectives, moves of a group come in the same order on all ranks. Those of a process come one after another,
whatever its streams:

    eager       one on another stream than the last waits for that stream first
    captured    they have buffers of their own, and within a capture wait for each other in the same way. Graphs that
                are replayed at the same time, on several streams, have no order among them: where ranks run them in
                different orders they wait for each other, as with NCCL, and read nothing that is not theirs
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import peer_memory
from .group import Group, Pending, current_handle, handle_of, is_captured, is_capturing, stored, whole_shape
from .peer_memory import PeerMemory, Shared, memory_of

logger = logging.getLogger(__name__)

SMALL_BYTES = 2**20  # of all ranks' x together, up to which peer_gather is faster: [32, 12288] in 16 bits
MOST_GATHERED = 2**23  # of x that goes to all ranks: [4096, 4096] in 16 bits on four ranks
MOST_BYTES = 2**24  # of x that is exchanged in blocks; beyond, copy engines are faster


class Channel:
    """A buffer at every rank, and the order of the moves that go through it. `moves` counts them."""

    def __init__(self, kernel: Callable, shared: Shared, device: torch.device, blocks: int, **options: int) -> None:
        """kernel: one of kernels/peer_moves.py, with `options`. blocks: of it, which count their uses by themselves."""
        self._shared = shared
        table = torch.tensor(shared.addresses, dtype=torch.int64, device=device)
        states = torch.zeros(blocks, dtype=torch.int32, device=device)
        self.kernel = partial(kernel, table=table, states=states, **options)
        self.moves = 0
        self.stream: Any = None  # of the last move, and its handle
        self._handle, self._device = -1, device

    def next(self, stream: int) -> int:
        """The number of the move that the current stream, of this handle, gets now; it runs after the one before.

        A stream that is captured waits for none of a capture that is over.
        """
        if stream != self._handle:
            last, self.stream, self._handle = self.stream, torch.cuda.current_stream(self._device), stream
            if last is not None and is_captured(last) == is_captured(self.stream):
                self.stream.wait_stream(last)
        self.moves += 1
        return self.moves


class PeerKernels:
    """What a group has on a device: channels for small moves and for large ones, by whether they are captured."""

    def __init__(self, size: int, small: dict[bool, Channel], large: dict[bool, Channel]) -> None:
        from ..kernels.peer_moves import TAGS

        self.size, self._tags, self.small, self.large = size, TAGS, small, large

    @property
    def moves(self) -> int:
        return sum(channel.moves for channels in (self.small, self.large) for channel in channels.values())

    def move(self, x: Tensor, shape: Sequence[int], row: int, blocks: int, side_by_side: bool) -> Pending:
        """What every rank sends to this one, in a new tensor of this shape; the arguments are peer_read's."""
        small = blocks == 1 and self.size * x.nbytes <= SMALL_BYTES
        alignment = 4 if small else 16
        x = x if x.data_ptr() % alignment == 0 else x.clone()
        stream, captured = handle_of()(x.get_device()), torch.cuda.is_current_stream_capturing()
        out = x.new_empty(shape)  # first: where no memory is left, this was no move
        channel = (self.small if small else self.large)[captured]
        tag = channel.next(stream) % self._tags
        if small:
            channel.kernel(x, out, row if side_by_side else x.nbytes, tag)
        else:
            channel.kernel(x, out, blocks, row, side_by_side, tag)
        return OnStream(out, channel.stream, stream)


class OnStream(Pending):
    """What a kernel on `stream`, of this handle, makes."""

    def __init__(self, result: Tensor, stream: Any, handle: int) -> None:
        super().__init__(result, None)
        self._stream, self._handle = stream, handle

    def wait(self) -> Tensor:
        if current_handle(self._result) != self._handle:
            stream = torch.cuda.current_stream(self._result.device)
            stream.wait_stream(self._stream)
            self._result.record_stream(stream)
        return super().wait()


def _connect(group: Group, memory: PeerMemory, device: torch.device) -> PeerKernels | None:
    """Collective."""
    from ..kernels import peer_moves

    capacity, slot = SMALL_BYTES // group.size // 4, peer_moves.slot_of(MOST_BYTES, group.size)
    options = dict(rank=memory.rank, limit=peer_memory.MOST_LOOKS)
    small_bytes = peer_moves.gather_buffer_bytes(capacity, group.size)
    large_bytes = peer_moves.read_buffer_bytes(slot, group.size)
    shared = [memory.share(nbytes) for nbytes in (small_bytes, small_bytes, large_bytes, large_bytes)]
    if any(one is None for one in shared):
        needed = 2 * (small_bytes + large_bytes) / 2**20
        logger.info("NCCL moves what kernels could: a rank has no %.0f MiB left for their buffers", needed)
        return None
    small, large = (
        {captured: Channel(kernel, shared.pop(0), device, blocks, **options, **more) for captured in (False, True)}  # type: ignore[arg-type]
        for kernel, blocks, more in (
            (peer_moves.peer_gather, peer_moves.blocks_of(capacity), dict(capacity=capacity)),
            (peer_moves.peer_read, peer_moves.CHUNKS, dict(slot=slot)),
        )
    )
    torch.cuda.current_stream(device).synchronize()
    return PeerKernels(group.size, small, large)


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerKernels | None]]
_connected = weakref.WeakKeyDictionary()


def kernels_of(group: Group, device: torch.device) -> PeerKernels | None:
    """The group's PeerKernels, None where it has none: the same on every rank. Collective the first time, which cannot
    be in a capture: then there are none yet."""
    assert group.process_group is not None
    of_group = _connected.setdefault(group.process_group, {})
    if device not in of_group:
        if is_capturing():
            return None
        memory = memory_of(group, device)
        of_group[device] = None if isinstance(memory, str) else _connect(group, memory, device)
    return of_group[device]


def _start(
    x: Tensor, group: Group, shape: Sequence[int], row: int, blocks: int = 1, side_by_side: bool = False
) -> Pending | None:
    """None where another transport is to do it: x is not on a GPU, empty, large, or of rows of odd sizes, or the ranks
    cannot reach each other's memory. The same on every rank."""
    most, nbytes = MOST_GATHERED if blocks == 1 else MOST_BYTES, x.nbytes
    alignment = 4 if blocks == 1 and group.size * nbytes <= SMALL_BYTES else 16
    if not x.is_cuda or group.size == 1 or not 0 < nbytes <= most or row % alignment:
        return None
    kernels = kernels_of(group, x.device)
    return None if kernels is None else kernels.move(stored(x), shape, row, blocks, side_by_side)


def start_gather_major(x: Tensor, group: Group, **_: Any) -> Pending | None:
    """Every rank's x, rank-major: [P, ...x]. The rest is for copy engines, which take the same arguments."""
    return _start(x, group, (group.size, *x.shape), x.nbytes)


def start_gather_dim(x: Tensor, dim: int, group: Group, **_: Any) -> Pending | None:
    """Every rank's x, concatenated along `dim`."""
    before = x.shape[: dim % x.dim()].numel()
    return _start(x, group, whole_shape(x, dim, group), x.nbytes // max(before, 1), side_by_side=before > 1)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, **_: Any) -> Pending | None:
    """Every rank's block of rows that is this rank's, [sum(send_sizes), C] -> [P, rows, C]; None if blocks differ."""
    rows = send_sizes[0]
    if len({*send_sizes}) > 1:
        return None
    return _start(x, group, (group.size, rows, *x.shape[1:]), x.nbytes // group.size, group.size)


def start_exchange_cols_for_rows(
    x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: Group
) -> Pending | None:
    """From columns split over ranks to rows: x [T, N/P] -> [T/P, N]; None if the splits are uneven."""
    rows, cols = row_sizes[0], col_sizes[0]
    if len({*row_sizes}) > 1 or len({*col_sizes}) > 1:
        return None
    return _start(x, group, (rows, group.size * cols), cols * x.element_size(), group.size, side_by_side=True)
