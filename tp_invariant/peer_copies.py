"""Gathers and exchanges of row blocks by peer copies: the copy engine moves them, beside GEMMs that hold every SM.

NCCL's kernels take SMs, and a GEMM of one program per SM that runs beside one ends late by the whole collective. Here
every rank copies its block into a buffer of each peer's. Who may write and what is there is said by flags, numbers that
streams write into peers' memory and wait for, so that no kernel has to start for it:

    start     once all have freed what a buffer held before: my block to each peer, then ARRIVED
    wait      the stream that asks goes on when all peers' ARRIVED are there and my blocks have been sent. It waits by
              itself, as CUDA may queue others' kernels behind a wait of this kind, which it cannot see the end of
    release   what was launched so far is the last that reads it: FREE at each peer

    numbers   each use of a buffer has one. Waits are for that very number, neither less nor more, so that ranks which
              part hang, as in any collective, and never read or overwrite another use's bytes.
    deadlock  a stream waits only for what its peers launch at the same place of the program or before. So ranks may
              run ahead of each other, and streams may share a hardware queue.
    buffers   are lent: owners.py releases them once its product is launched, token_gathers.py when the next layer
              comes. Which one is taken depends on the sizes and the order of starts and releases alone, which ranks of
              one program share. What is kept, returned to a caller or captured in a CUDA graph goes by NCCL; so does
              what finds no buffer free.

Which transport is used is a matter of speed alone; both move bytes. peer_memory.py is the CUDA side.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, Pending, is_capturing
from .peer_memory import CudaMachine, GraphMachine, connect, on_this_host

logger = logging.getLogger(__name__)

TRANSPORT_VARIABLE = "TP_INVARIANT_TRANSPORT"
TRANSPORTS = ("nccl", "auto", "copy_engine")
_KEY = os.environ.encodekey(TRANSPORT_VARIABLE)
MIN_BYTES = 2**23  # of what a rank sends: for less, a dozen driver calls keep the host longer than they save the GPU
PER_CLASS = 4  # buffers of a size: two weights, in use and on its way, and two activations


def transport() -> str:
    """What `TP_INVARIANT_TRANSPORT` asks for, read now; the same on all ranks. Unset is "nccl".

        nccl          NCCL (or gloo) for everything
        auto          peer copies for large blocks where a group's ranks have them, else NCCL
        copy_engine   peer copies for blocks of any size; an error where a group has none

    Raises:
        ValueError: the variable holds anything else.
    """
    text = os.environ._data.get(_KEY, b"nccl")  # type: ignore[attr-defined]  # a third of what os.environ.get takes
    choice = os.fsdecode(text)
    if choice not in TRANSPORTS:
        raise ValueError(
            f"{TRANSPORT_VARIABLE}={choice!r} is not understood: set it to one of {', '.join(TRANSPORTS)}, the same on "
            "all ranks, or unset it (nccl)"
        )
    return choice


def explain_transport() -> str:
    """What moves large blocks between this host's GPUs and why, as far as one process can tell."""
    try:
        choice = transport()
    except ValueError as error:
        return str(error)
    if choice == "nccl":
        return f"NCCL; {TRANSPORT_VARIABLE}=auto would try copy engines"
    return on_this_host()


# --- the protocol ---------------------------------------------------------------------------------------------------


class Flag(IntEnum):
    """What a rank tells its peers of a buffer: each has a place for each peer's word."""

    FREE = 0  # you may write into mine
    ARRIVED = 1  # my block is in yours


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

    def mark(self, stream: Any) -> Any: ...
    def after(self, stream: Any, mark: Any) -> None:
        """What `stream` gets from now on runs after what was in the marked stream."""
        ...

    def new_buffer(self, nbytes: int) -> bool:
        """One more buffer, on all ranks or, False, on none."""
        ...

    def copy(self, stream: Any, peer: int, buffer: int, offset: int, source: Any, begin: int, nbytes: int) -> None: ...
    def flags(
        self, stream: Any, buffer: int, number: int, *, tell: Flag | None = None, until: Flag | None = None
    ) -> None:
        """Writes `number` as my word `tell` at every peer, or waits until every peer's word `until` here is it."""
        ...


@dataclass
class _Buffer:
    index: int
    nbytes: int
    number: int = 0  # of its last use
    lent: bool = False
    released_on: Any = None  # the stream that read it last


class Lease:
    """A buffer while it is filled and read: `wait` on every stream that reads it, then `release` on any."""

    def __init__(self, machine: Machine, buffer: _Buffer, started_on: Any, sent: Any) -> None:
        self._machine, self._buffer, self._started_on, self._sent = machine, buffer, started_on, sent
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
        if stream != self._started_on:  # which copied my own block
            self._machine.after(stream, self._machine.mark(self._started_on))
        self._machine.flags(stream, self._buffer.index, self._buffer.number, until=Flag.ARRIVED)

    def release(self) -> None:
        if self._released:
            return
        if not self._read_on:
            self.wait()  # so that no peer's next block overtakes this one
        stream = self._machine.current()
        for other in self._read_on:
            if other != stream:
                self._machine.after(stream, self._machine.mark(other))
        self._machine.flags(stream, self._buffer.index, self._buffer.number, tell=Flag.FREE)
        self._released, self._buffer.lent, self._buffer.released_on = True, False, stream


def size_class(nbytes: int) -> int:
    """The size of the buffer that is made for so many bytes: four to an octave, in the driver's pages of 2 MiB."""
    nbytes = max(nbytes, 1)
    step = max(2**21, 2 ** (nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class PeerCopies:
    """The buffers of a group and what they are lent for. `limit`: bytes of all of them.

    `started` counts what went this way, `refused` what found no buffer. `captured`: those for CUDA graphs, if any.
    """

    claims = False  # whether a buffer is this rank's, too, only after its lane has waited for it

    def __init__(self, machine: Machine, limit: int) -> None:
        self.machine, self.limit = machine, limit
        self.started = self.refused = 0
        self.captured: CapturedCopies | None = None
        self._buffers: list[_Buffer] = []
        self._number = 0

    @property
    def allocated(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def _take(self, nbytes: int) -> _Buffer | None:
        size = size_class(nbytes)
        fits = [b for b in self._buffers if not b.lent and nbytes <= b.nbytes <= 2 * size]
        if fits:  # of the smallest, the one that peers have freed longest ago
            return min(fits, key=lambda b: (b.nbytes, b.number))
        return self._new(size)

    def _new(self, size: int) -> _Buffer | None:
        alike = sum(b.nbytes == size for b in self._buffers)
        if alike >= PER_CLASS or self.allocated + size > self.limit:
            return None
        if not self.machine.new_buffer(size):
            self.limit = self.allocated  # a rank has no memory left: do not ask all of them each time
            return None
        self._buffers.append(_Buffer(len(self._buffers), size))
        return self._buffers[-1]

    def start(self, source: Any, sent: Sequence[tuple[int, int]], early: bool) -> Lease | None:
        """Sends bytes sent[q] = (begin, count) of `source` to rank q, where they land rank-major; None: no buffer.

        The counts are the same on every rank. A rank gets size x sent[rank].count bytes.
        """
        m = self.machine
        buffer = self._take(m.size * max(count for _, count in sent))
        if buffer is None:
            self.refused += 1
            if self.refused == 1:
                used = f"{self.allocated / 2**20:.0f} of {self.limit / 2**20:.0f} MiB are allocated"
                logger.info("no buffer is left to copy into (%s): NCCL moves what finds none, from here on too", used)
            return None
        self.started += 1
        stream, lane = m.current(), m.lane(early)
        if buffer.released_on not in (None, stream):
            m.after(stream, m.mark(buffer.released_on))
        m.after(lane, m.mark(stream))
        m.flags(lane, buffer.index, buffer.number, until=Flag.FREE)
        self._number = self._number % 0xFFFFFFFF + 1  # 0 is what flags hold at first
        buffer.number, buffer.lent = self._number, True

        def send(to: Any, peer: int) -> None:
            begin, count = sent[peer]
            m.copy(to, peer, buffer.index, m.rank * count, source, begin, count)

        if not early:  # a copy within a device is a kernel: now, as the next GEMM may take every SM
            send(lane if self.claims else stream, m.rank)
        for step in range(1, m.size):  # in each step every rank is sent to by one
            send(lane, (m.rank + step) % m.size)
        m.flags(lane, buffer.index, buffer.number, tell=Flag.ARRIVED)
        if early:  # needed after the GEMM that is launched next, where SMs come free
            send(lane, m.rank)
        return Lease(m, buffer, stream, m.mark(lane))

    def prepare_for_graphs(self, machine: Callable[[], GraphMachine]) -> None:
        """Collective: as many buffers for CUDA graphs as there are outside them."""
        if self.captured is None:
            self.captured = CapturedCopies(machine(), self.limit)
        self.captured.provide([buffer.nbytes for buffer in self._buffers])


class CapturedCopies(PeerCopies):
    """The same inside CUDA graphs, with buffers and flags of their own (kernels/peer_flags.py), made before a capture.

    Graphs share them. Two that are replayed at the same time wait for each other, and where ranks replay them in
    different orders they fail, as their tags differ; as with NCCL, say in which order they come.
    """

    claims = True

    def __init__(self, machine: GraphMachine, limit: int) -> None:
        super().__init__(machine, limit)
        self._graphs = machine
        self._provided = 0
        self._capture: int | None = None

    def provide(self, sizes: Sequence[int]) -> None:
        if len(sizes) == self._provided:
            return
        self._provided = len(sizes)
        for size in sizes:
            if sum(b.nbytes == size for b in self._buffers) < sizes.count(size):
                super()._new(size)

    def _new(self, size: int) -> _Buffer | None:
        return None  # memory cannot be had in a capture

    def start(self, source: Any, sent: Sequence[tuple[int, int]], early: bool) -> Lease | None:
        capture = self._graphs.capture()
        if capture != self._capture:  # what another capture, perhaps one that failed, left of them is nothing here
            self._capture = capture
            for buffer in self._buffers:
                buffer.lent, buffer.released_on = False, None
        return super().start(source, sent, early)


# --- for a group ----------------------------------------------------------------------------------------------------

_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerCopies | str]]
_connected = weakref.WeakKeyDictionary()


def copies_of(group: Group, device: torch.device) -> PeerCopies | str:
    """The group's PeerCopies, or why it has none: the same on every rank. Collective the first time."""
    assert group.process_group is not None
    of_group = _connected.setdefault(group.process_group, {})
    if device not in of_group:
        found = connect(group, device)
        name = f"the group of {group.size} ranks of rank {dist.get_rank()}"
        if isinstance(found, str):
            logger.info("NCCL moves all between %s: no peer copies, as %s", name, found)
            of_group[device] = found
        else:
            logger.info("copy engines move large blocks between %s", name)
            of_group[device] = PeerCopies(*found)
    return of_group[device]


def prepare_for_graphs(group: Group, device: torch.device) -> None:
    """Before a capture, in the steps that warm up: buffers for the CUDA graph. Collective."""
    if transport() == "nccl" or group.size == 1 or device.type != "cuda" or is_capturing():
        return
    copies = copies_of(group, device)
    if not isinstance(copies, str):
        copies.prepare_for_graphs(lambda: GraphMachine(group, device))


def _copies_for(x: Tensor, group: Group) -> PeerCopies | None:
    choice = transport()
    if choice == "nccl" or group.size == 1 or x.numel() == 0:
        return None
    if choice == "auto" and (x.device.type != "cuda" or x.nbytes < MIN_BYTES):
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        assert group.process_group is not None
        known = _connected.get(group.process_group, {}).get(x.device)
        return known.captured if isinstance(known, PeerCopies) else None
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

    lent = True

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
    copies = _copies_for(x, group)
    if copies is None:
        return None
    lease = copies.start(x, sent, early)
    if lease is None:
        return None
    assert isinstance(copies.machine, CudaMachine)
    return PeerPending(lease, copies.machine.view(lease.index, x.dtype, tuple(shape)), x)


def start_gather(local: Tensor, group: Group, *, early: bool = False) -> Pending | None:
    """Starts gathering every rank's `local` into a rank-major [P, ...local]; None where NCCL is to do it.

    `early`: on the side, so that what is needed sooner goes past it. The result must be released.

    Raises:
        ValueError, RuntimeError: TP_INVARIANT_TRANSPORT holds something else, or what the group does not have.
    """
    local = local.contiguous()
    return _start(local, [(0, local.nbytes)] * group.size, (group.size, *local.shape), group, early)


def start_gather_rows(local: Tensor, group: Group) -> Pending | None:
    """As start_gather, the ranks' [S, ..] concatenated to [P S, ..]."""
    local = local.contiguous()
    shape = group.size * local.shape[0], *local.shape[1:]
    return _start(local, [(0, local.nbytes)] * group.size, shape, group, False)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group, *, early: bool = False) -> Pending | None:
    """As start_gather: rank q gets rows block q of every rank's x. [sum(send_sizes), C] -> [P, send_sizes[rank], C]."""
    x = x.contiguous()
    row = x.nbytes // max(x.shape[0], 1)
    begins = accumulate(send_sizes, initial=0)
    sent = [(begin * row, size * row) for begin, size in zip(begins, send_sizes, strict=False)]
    return _start(x, sent, (group.size, send_sizes[group.rank], *x.shape[1:]), group, early)
