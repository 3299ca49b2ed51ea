"""How copy engines move row blocks: who may write where and when, and which buffer is lent for what. No CUDA here.

Every rank copies its block into a buffer of each peer's. Who may write and what is there is said by flags, numbers that
streams write into peers' memory and wait for, so that no kernel has to start for it:

    start     once all have freed what a buffer held before: my block to each peer, then ARRIVED
    wait      the stream that asks goes on when all peers' ARRIVED are there and my blocks have been sent. It waits by
              itself, as CUDA may queue others' kernels behind a wait of this kind, which it cannot see the end of
    release   what was launched so far is the last that reads it: FREE at each peer

    numbers   each use of a buffer has one. Waits are for that very number, neither less nor more, so that ranks which
              part hang, as in any collective, and never read or overwrite another use's bytes.
    deadlock  a stream waits only for what its peers launch at the same place of the program or before. So ranks may
              run ahead of each other, and streams may share a hardware queue.
    buffers   are lent: owner_maps.py releases them once its product is launched, tokens.py when the next layer
              comes. Which one is taken depends on the sizes and the order of starts and releases alone, which ranks of
              one program share. What is kept or returned to a caller goes another way, as does what finds no buffer.
    graphs    `CapturedCopies` have buffers of their own, and flags that count by themselves instead of numbers

copy_machine.py is the CUDA side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

logger = logging.getLogger(__name__)

PER_SIZE = 4  # buffers of a size: two weights, in use and on its way, and two activations


class Flag(IntEnum):
    """What a rank tells its peers of a buffer: each has a place for each peer's word."""

    FREE = 0  # you may write into mine
    ARRIVED = 1  # my block is in yours


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

    def mark(self, buffer: int, stream: Any) -> None:
        """The end of `stream` as it is now; there is one such place for each buffer."""
        ...

    def after(self, stream: Any, buffer: int) -> None:
        """What `stream` gets from now on runs after the place that was marked for `buffer`."""
        ...

    def follow(self, stream: Any, other: Any) -> None:
        """What `stream` gets from now on runs after what is in `other` now."""
        ...

    def new_buffer(self, nbytes: int) -> bool:
        """One more buffer, on all ranks or, False, on none."""
        ...

    def copy(self, stream: Any, buffer: int, source: Any, blocks: Sequence[Block]) -> None:
        """Each block, in any order."""
        ...

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

    def __init__(self, machine: Machine, buffer: _Buffer, started_on: Any) -> None:
        self._machine, self._buffer, self._started_on = machine, buffer, started_on
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
        self._machine.after(stream, self._buffer.index)
        if stream != self._started_on:  # which copied my own block
            self._machine.follow(stream, self._started_on)
        self._machine.flags(stream, self._buffer.index, self._buffer.number, until=Flag.ARRIVED)

    def release(self) -> None:
        if self._released:
            return
        if not self._read_on:
            self.wait()  # so that no peer's next block overtakes this one
        stream = self._machine.current()
        for other in self._read_on:
            if other != stream:
                self._machine.follow(stream, other)
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
    allocates = True  # whether `start` makes buffers

    def __init__(self, machine: Machine, limit: int) -> None:
        self.machine, self.limit = machine, limit
        self.started = self.refused = 0
        self.captured: CapturedCopies | None = None
        self._provided = 0  # of the buffers, those that `captured` has the like of
        self._buffers: list[_Buffer] = []
        self._number = 0

    @property
    def allocated(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def provide(self, nbytes: int, count: int) -> bool:
        """Collective: buffers for so many bytes, until there are `count` of their size."""
        size = size_class(nbytes)
        while sum(buffer.nbytes == size for buffer in self._buffers) < count:
            if self.allocated + size > self.limit:
                return False
            if not self.machine.new_buffer(size):
                self.limit = self.allocated  # a rank has no memory left: do not ask all of them each time
                return False
            self._buffers.append(_Buffer(len(self._buffers), size))
        return True

    def _take(self, nbytes: int) -> _Buffer | None:
        size = size_class(nbytes)
        best: _Buffer | None = None
        for b in self._buffers:  # of the smallest, the one that peers have freed longest ago
            fits = not b.lent and nbytes <= b.nbytes <= 2 * size
            if fits and (best is None or (b.nbytes, b.number) < (best.nbytes, best.number)):
                best = b
        if best is not None:
            return best
        alike = sum(b.nbytes == size for b in self._buffers)
        if not self.allocates or alike >= PER_SIZE or not self.provide(nbytes, alike + 1):
            return None
        return self._buffers[-1]

    def start(self, source: Any, sent: Sequence[tuple[int, int]], early: bool) -> Lease | None:
        """Sends bytes sent[q] = (begin, count) of `source` to rank q, where they land rank-major; None: no buffer.

        The counts are the same on every rank. A rank gets size x sent[rank].count bytes.
        """
        m = self.machine
        buffer = self._take(m.size * max([count for _, count in sent]))
        if buffer is None:
            self.refused += 1
            if self.refused == 1:
                used = f"{self.allocated / 2**20:.0f} of {self.limit / 2**20:.0f} MiB are allocated"
                logger.info("no buffer is left to copy into (%s): what finds none goes another way from now on", used)
            return None
        self.started += 1
        stream, lane = m.current(), m.lane(early)
        if buffer.released_on not in (None, stream):
            m.follow(stream, buffer.released_on)
        m.follow(lane, stream)
        m.flags(lane, buffer.index, buffer.number, until=Flag.FREE)
        self._number = self._number % 0xFFFFFFFF + 1  # 0 is what flags hold at first
        buffer.number, buffer.lent = self._number, True

        peers = [*range(m.rank + 1, m.size), *range(m.rank)]  # one after another: every rank is sent to by one then
        blocks = [(peer, m.rank * count, begin, count) for peer in peers for begin, count in (sent[peer],)]
        begin, count = sent[m.rank]
        own = [(m.rank, m.rank * count, begin, count)]
        if not early:  # a copy within a device is a kernel: now, as the next GEMM may take every SM
            m.copy(lane if self.claims else stream, buffer.index, source, own)
        m.copy(lane, buffer.index, source, blocks)
        m.flags(lane, buffer.index, buffer.number, tell=Flag.ARRIVED)
        if early:  # needed after the GEMM that is launched next, where SMs come free
            m.copy(lane, buffer.index, source, own)
        m.mark(buffer.index, lane)
        return Lease(m, buffer, stream)

    def prepare_for_graphs(self, machine: Callable[[], GraphMachine]) -> None:
        """Collective: as many buffers for CUDA graphs as there are outside them."""
        if self.captured is None:
            self.captured = CapturedCopies(machine(), self.limit)
        if len(self._buffers) != self._provided:
            self._provided = len(self._buffers)
            for size in {buffer.nbytes for buffer in self._buffers}:
                self.captured.provide(size, sum(buffer.nbytes == size for buffer in self._buffers))


class GraphMachine(Machine, Protocol):
    def capture(self) -> int | None:
        """The number of the CUDA graph that is captured now."""
        ...


class CapturedCopies(PeerCopies):
    """The same inside CUDA graphs, with buffers and flags of their own (kernels/peer_flags.py), made before a capture,
    because memory cannot be had in it.

    Graphs share them. Two that are replayed at the same time wait for each other, and where ranks replay them in
    different orders they fail, as their tags differ; as with NCCL, say in which order they come.
    """

    claims, allocates = True, False

    def __init__(self, machine: GraphMachine, limit: int) -> None:
        super().__init__(machine, limit)
        self._graphs = machine
        self._capture: int | None = None

    def start(self, source: Any, sent: Sequence[tuple[int, int]], early: bool) -> Lease | None:
        capture = self._graphs.capture()
        if capture != self._capture:  # what another capture, perhaps one that failed, left of them is nothing here
            self._capture = capture
            for buffer in self._buffers:
                buffer.lent, buffer.released_on = False, None
        return super().start(source, sent, early)
