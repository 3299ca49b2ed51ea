"""Gathers and exchanges of row blocks by copy engines, which run beside GEMMs that hold every SM.

Every rank copies its block into a buffer of each peer's. Kernels of one warp (kernels/peer_flags.py) say who may write
into a buffer, and what is there:

    start     on a stream of its own: `claim` the buffer, which waits until its last use is over here and at the peers;
              my block to each peer; `arrived` at each peer
    wait      the stream that asks goes on when all peers' blocks are there and mine have been sent
    release   what was launched so far is the last that reads it: `free` at each peer

    deadlock  a stream waits only for what its peers launch at the same place of the program or before. So ranks may
              run ahead of each other, and streams may share a hardware queue.
    tags      each use of a buffer has one. Ranks that make other calls wait, as in any collective, and never read
              another use's bytes.
    buffers   are lent: owner_maps.py releases them once its product is launched, tokens.py when the next layer comes.
              Which one is taken depends on the sizes and the order of starts and releases alone, which ranks of one
              program share. What is kept or returned to a caller goes another way, as does what finds no buffer.
    graphs    have buffers of their own, which are made before the capture (`prepare_for_graphs`), because memory cannot
              be had in it. Two graphs that are replayed at the same time wait for each other; as with NCCL, all ranks
              replay them in the same order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import peer_memory
from .group import Group, Pending, is_captured, is_capturing, is_first, stored, whole_shape
from .peer_memory import TRANSPORT_VARIABLE, PeerMemory, Shared, memory_of, transport

logger = logging.getLogger(__name__)

MIN_BYTES = 2**23  # of what a rank sends: for less, the launches keep the host longer than they save the GPU
MIN_BYTES_IN_GRAPHS = 2**20  # there is no host in these
PER_SIZE = 4  # buffers of a size: two weights, in use and on its way, and two activations
MOST_BUFFERS = 64

# of a copy: the peer it goes to, where it lands in the buffer there, where it begins in the source, and its bytes
Block = tuple[int, int, int, int]


class Machine(Protocol):
    """Streams, buffers that peers can write to (numbered alike on all ranks), and flags. It only launches."""

    rank: int
    size: int

    def current(self) -> Any:
        """The stream that is launched into now."""
        ...

    def lane(self, early: bool) -> Any:
        """The stream that copies: one for what is needed soon, another for what is gathered ahead."""
        ...

    def end_of(self, stream: Any) -> Any:
        """An event at the end of what `stream` has now."""
        ...

    def after(self, stream: Any, event: Any) -> None:
        """What `stream` gets from now on runs after the event."""
        ...

    def follow(self, stream: Any, other: Any) -> None:
        """What `stream` gets from now on runs after what `other` has now, unless that is in another CUDA graph."""
        ...

    def new_buffer(self, nbytes: int) -> bool:
        """One more buffer, on all ranks or, False, on none."""
        ...

    def copy(self, stream: Any, buffer: int, source: Any, blocks: Sequence[Block]) -> None:
        """Each block, in any order."""
        ...

    def flags(self, stream: Any, operation: str, buffer: int, tag: int) -> None:
        """An operation of kernels/peer_flags.py."""
        ...


class CudaMachine:
    """A Machine for a group of ranks with a device each."""

    def __init__(self, memory: PeerMemory) -> None:
        self.rank, self.size, self._memory, device = memory.rank, memory.size, memory, memory.device
        self._lanes = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]
        self._buffers: list[Shared] = []
        words = memory.share(4 * 2 * MOST_BUFFERS * self.size)
        assert words is not None
        self._words = words
        self._table = torch.tensor(words.addresses, dtype=torch.int64, device=device)
        self._counts, self._locks = torch.zeros(2, MOST_BUFFERS, dtype=torch.int32, device=device)
        self._limit = peer_memory.MOST_LOOKS
        torch.cuda.current_stream(device).synchronize()

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._memory.device)

    def lane(self, early: bool) -> torch.cuda.Stream:
        return self._lanes[early]

    def end_of(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event()

    def after(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        if stream != other and is_captured(stream) == is_captured(other):
            stream.wait_stream(other)

    def new_buffer(self, nbytes: int) -> bool:
        shared = self._memory.share(nbytes) if len(self._buffers) < MOST_BUFFERS else None
        if shared is not None:
            self._buffers.append(shared)
        return shared is not None

    @torch.inference_mode(False)
    def view(self, buffer: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return self._buffers[buffer].own[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def copy(self, stream: torch.cuda.Stream, buffer: int, source: Tensor, blocks: Sequence[Block]) -> None:
        with torch.cuda.stream(stream):
            copy_blocks(self._buffers[buffer], source, blocks)

    def flags(self, stream: torch.cuda.Stream, operation: str, buffer: int, tag: int) -> None:
        from ..kernels.peer_flags import peer_flags
        from ..kernels.peer_moves import TAGS

        words = self._words.own.view(torch.int32)
        with torch.cuda.stream(stream):
            peer_flags(
                operation, buffer, tag % TAGS, words, self._table, self._counts, self._locks, self.rank, self._limit
            )


@torch.no_grad()
def copy_blocks(buffer: Shared, source: Tensor, blocks: Sequence[Block]) -> None:
    raw = source.detach().view(-1).view(torch.uint8)
    for peer, offset, begin, nbytes in blocks:
        buffer.bytes_of(peer)[offset : offset + nbytes].copy_(raw[begin : begin + nbytes], non_blocking=True)


@dataclass
class _Buffer:
    index: int
    nbytes: int
    tag: int = 0  # of its last use
    lent: bool = False
    released_on: Any = None  # the stream that read it last


class Lease:
    """A buffer while it is filled and read: `wait` on every stream that reads it, then `release` on any."""

    def __init__(self, machine: Machine, buffer: _Buffer, sent: Any) -> None:
        self._machine, self._buffer, self._sent = machine, buffer, sent
        self._read_on: list[Any] = []
        self._released = False

    @property
    def index(self) -> int:
        return self._buffer.index

    def wait(self) -> None:
        assert not self._released, "a buffer is read after it went back"
        stream = self._machine.current()
        if stream in self._read_on:
            return
        self._read_on.append(stream)
        self._machine.after(stream, self._sent)
        self._machine.flags(stream, "wait", self._buffer.index, self._buffer.tag)

    def release(self) -> None:
        if self._released:
            return
        if not self._read_on:
            self.wait()  # so that no peer's next block overtakes this one
        stream = self._machine.current()
        for other in self._read_on:
            self._machine.follow(stream, other)
        self._machine.flags(stream, "free", self._buffer.index, self._buffer.tag)
        self._released, self._buffer.lent, self._buffer.released_on = True, False, stream


def size_class(nbytes: int) -> int:
    """The size of the buffer that is made for so many bytes: four to an octave, in the driver's pages of 2 MiB."""
    nbytes = max(nbytes, 1)
    step = max(2**21, 2 ** (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class PeerCopies:
    """Buffers and what they are lent for. `limit`: bytes of all of them.

    `started` counts what went this way, `refused` what found no buffer.
    """

    def __init__(self, machine: Machine, limit: int) -> None:
        self.machine, self.limit = machine, limit
        self.started = self.refused = 0
        self.buffers: list[_Buffer] = []
        self._tag = 0

    @property
    def allocated(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def provide(self, nbytes: int, count: int) -> bool:
        """Collective: buffers for so many bytes, until there are `count` of their size."""
        size = size_class(nbytes)
        while sum(buffer.nbytes == size for buffer in self.buffers) < count:
            if self.allocated + size > self.limit:
                return False
            if not self.machine.new_buffer(size):
                self.limit = self.allocated  # a rank has no memory left: do not ask all of them each time
                return False
            self.buffers.append(_Buffer(len(self.buffers), size))
        return True

    def _take(self, nbytes: int, may_allocate: bool) -> _Buffer | None:
        size = size_class(nbytes)
        fitting = [b for b in self.buffers if not b.lent and nbytes <= b.nbytes <= 2 * size]
        if fitting:  # of the smallest, the one that peers have freed longest ago
            return min(fitting, key=lambda b: (b.nbytes, b.tag))
        alike = sum(b.nbytes == size for b in self.buffers)
        if not may_allocate or alike >= PER_SIZE or not self.provide(nbytes, alike + 1):
            return None
        return self.buffers[-1]

    def start(self, source: Any, sent: Sequence[tuple[int, int]], early: bool, may_allocate: bool) -> Lease | None:
        """Sends bytes sent[q] = (begin, count) of `source` to rank q, where they land rank-major; None: no buffer.

        The counts are the same on every rank. A rank gets size x sent[rank].count bytes.
        """
        m = self.machine
        buffer = self._take(m.size * max(count for _, count in sent), may_allocate)
        if buffer is None:
            self.refused += 1
            if self.refused == 1:
                used = f"{self.allocated / 2**20:.0f} of {self.limit / 2**20:.0f} MiB are allocated"
                logger.info("no buffer is left to copy into (%s): what finds none goes another way from now on", used)
            return None
        self.started += 1
        self._tag += 1
        buffer.tag, buffer.lent = self._tag, True
        lane = m.lane(early)
        m.after(lane, m.end_of(m.current()))  # also joins the lane to a capture
        if buffer.released_on is not None:  # else this claim may come before that of the last use, on the other lane
            m.follow(lane, buffer.released_on)
        m.flags(lane, "claim", buffer.index, buffer.tag)
        peers = [*range(m.rank + 1, m.size), *range(m.rank)]  # one after another: every rank is sent to by one then
        blocks = [(peer, m.rank * sent[peer][1], *sent[peer]) for peer in peers]
        own = [(m.rank, m.rank * sent[m.rank][1], *sent[m.rank])]
        if not early:  # a copy within a device is a kernel: now, as the next GEMM may take every SM
            m.copy(lane, buffer.index, source, own)
        m.copy(lane, buffer.index, source, blocks)
        m.flags(lane, "arrived", buffer.index, buffer.tag)
        if early:  # needed after the GEMM that is launched next, where SMs come free
            m.copy(lane, buffer.index, source, own)
        return Lease(m, buffer, m.end_of(lane))


# --- for a group ----------------------------------------------------------------------------------------------------


class GroupCopies:
    """What a group has on a device: buffers for eager moves, and others for CUDA graphs once those are prepared for."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self.eager = PeerCopies(CudaMachine(memory), memory.limit)
        self.captured: PeerCopies | None = None

    def prepare_for_graphs(self) -> None:
        """Collective: as many buffers for CUDA graphs as there are outside them."""
        if self.captured is None:
            self.captured = PeerCopies(CudaMachine(self._memory), self._memory.limit)
        for size in {buffer.nbytes for buffer in self.eager.buffers}:
            self.captured.provide(size, sum(buffer.nbytes == size for buffer in self.eager.buffers))

    def start(self, source: Tensor, sent: Sequence[tuple[int, int]], early: bool) -> tuple[Lease, CudaMachine] | None:
        capturing = is_capturing()
        copies = self.captured if capturing else self.eager
        lease = None if copies is None else copies.start(source, sent, early, may_allocate=not capturing)
        if copies is None or lease is None:
            return None
        assert isinstance(copies.machine, CudaMachine)
        return lease, copies.machine


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, GroupCopies | str]]
_known = weakref.WeakKeyDictionary()


def copies_of(group: Group, device: torch.device) -> GroupCopies | str:
    """The group's copies, or why it has none: the same on every rank. Collective the first time."""
    assert group.process_group is not None
    of_group = _known.setdefault(group.process_group, {})
    if device not in of_group:
        memory = memory_of(group, device)
        of_group[device] = memory if isinstance(memory, str) else GroupCopies(memory)
    return of_group[device]


def _made_copies(group: Group, device: torch.device) -> GroupCopies | None:
    """The group's copies if it has any yet: not collective."""
    made = _known.get(group.process_group, {}).get(device) if group.process_group is not None else None
    return made if isinstance(made, GroupCopies) else None


def prepare_for_graphs(group: Group, device: torch.device) -> None:
    """Before a capture, in the steps that warm up, two at least: buffers for the CUDA graph. Collective."""
    if group.size == 1 or device.type != "cuda" or is_capturing() or transport() == "nccl":
        return
    copies = copies_of(group, device)
    if not isinstance(copies, str):
        copies.prepare_for_graphs()


def _copies_for(x: Tensor, group: Group, sent: Sequence[tuple[int, int]]) -> GroupCopies | None:
    choice = transport()
    if choice == "nccl" or group.size == 1 or x.numel() == 0 or (choice == "auto" and not x.is_cuda):
        return None
    if choice == "auto" and x.nbytes < MIN_BYTES_IN_GRAPHS:
        return None
    if x.is_cuda and is_capturing():
        return _made_copies(group, x.device)
    if choice == "auto" and x.nbytes < MIN_BYTES:
        made = _made_copies(group, x.device)
        if made is not None and made.captured is not None:  # a graph will copy it
            # none of them is a weight that is gathered ahead
            made.captured.provide(group.size * max(count for _, count in sent), PER_SIZE - 1)
        return None
    copies = copies_of(group, x.device)
    if not isinstance(copies, str):
        return copies
    if choice == "copy_engine":
        raise RuntimeError(
            f"{TRANSPORT_VARIABLE}=copy_engine, but the {group.size} ranks of tp_group have no peer copies: {copies}. "
            "Set it to auto or nccl on all ranks: the bits are the same"
        )
    return None


class PeerPending(Pending):
    """A result in a lent buffer: to be released."""

    leased = True

    def __init__(self, lease: Lease, received: Tensor, operand: Tensor) -> None:
        super().__init__(received, None, operand)
        self._lease = lease

    def wait(self) -> Tensor:
        self._lease.wait()
        self._operand, self.waited = None, True
        return self._result

    def release(self) -> None:
        self._lease.release()
        self._operand = None


def _start(
    x: Tensor, sent: Sequence[tuple[int, int]], shape: Sequence[int], group: Group, early: bool
) -> Pending | None:
    copies = _copies_for(x, group, sent)
    started = None if copies is None else copies.start(x, sent, early)
    if started is None:
        return None
    lease, machine = started
    return PeerPending(lease, machine.view(lease.index, x.dtype, shape), x)


def start_gather(local: Tensor, group: Group, *, early: bool = False) -> Pending | None:
    """Starts gathering every rank's `local` into a rank-major [P, ...local]; None where NCCL is to do it.

    early: on the side, so that what is needed sooner goes past it. The result must be released.

    Raises:
        ValueError, RuntimeError: TP_INVARIANT_TRANSPORT holds something else, or what the group does not have.
    """
    local, shape = stored(local), (group.size, *local.shape)
    return _start(local, [(0, local.nbytes)] * group.size, shape, group, early)


def start_gather_dim(local: Tensor, dim: int, group: Group) -> Pending | None:
    """As start_gather, concatenated along `dim`; None too where dims before it are larger than one."""
    if not is_first(local, dim):
        return None
    local = stored(local)
    return _start(local, [(0, local.nbytes)] * group.size, whole_shape(local, dim, group), group, False)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, *, early: bool = False) -> Pending | None:
    """As start_gather: rank q gets rows block q of every rank's x. [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    x, shape = stored(x), (group.size, send_sizes[group.rank], *x.shape[1:])
    row = x.nbytes // max(x.shape[0], 1)
    begins = accumulate(send_sizes, initial=0)
    sent = [(begin * row, size * row) for begin, size in zip(begins, send_sizes, strict=False)]
    return _start(x, sent, shape, group, early)
