"""Small gathers by a kernel that writes into peers' memory (kernels/peer_gather.py), in a stream's own order.

For decoding and for norms' leaves: a gather of a few KiB takes NCCL ten microseconds on the GPU, and more of the host.
This is one kernel on the current stream, which takes four, eager or captured in a CUDA graph. Like other collectives,
gathers of a group come in the same order on all ranks. Those of a process come one after another, whatever its streams:

    eager       one on another stream than the last waits for that stream first
    captured    they have a buffer of their own, and within a capture wait for each other in the same way. Graphs that
                are replayed at the same time, on several streams, have no order among them: where ranks run them in
                different orders they wait for each other, as with NCCL, and read nothing that is not theirs
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, Pending, is_capturing, is_first, stored, stream_is_captured, whole_shape
from .peer_copies import copies_of, transport
from .peer_memory import CudaMachine, Shared, driver, looks_of
from .wire import gather_objects

logger = logging.getLogger(__name__)

MOST_BYTES = 2**20  # of all ranks' together: [32, 12288] in 16 bits; beyond, peer_reads.py is faster


def _capacity(size: int) -> int:
    """Words that a rank sends at most."""
    return MOST_BYTES // size // 4


class Channel:
    """A buffer at every rank, and the order of the gathers that go through it. `gathers` counts them."""

    def __init__(self, shared: Shared, device: torch.device, blocks: int) -> None:
        """blocks: of the kernel's, which count their uses by themselves."""
        shared.own.zero_()
        self._shared = shared
        self.table = torch.tensor(shared.addresses, dtype=torch.int64, device=device)
        self.states = torch.zeros(blocks, dtype=torch.int32, device=device)
        self.gathers = 0
        self._last: tuple[Any, int | None] | None = None

    def next(self, stream: Any, capture: int | None) -> int:
        """The number of the gather that `stream` is about to get; it runs after the one before."""
        if self._last is not None:
            last, within = self._last
            if within == capture and last != stream:
                stream.wait_stream(last)
        self._last = stream, capture
        self.gathers += 1
        return self.gathers


class SmallGathers:
    """What a group has on a device: a channel for eager gathers and one for captured ones."""

    def __init__(self, machine: CudaMachine, eager: Channel, captured: Channel, looks: int) -> None:
        from ..kernels.launch import empty_beside
        from ..kernels.peer_gather import TAGS, PeerGather

        self._machine, self._tags, self.size, self._empty = machine, TAGS, machine.size, empty_beside
        kernel = functools.partial(PeerGather, rank=machine.rank, capacity=_capacity(machine.size), limit=looks)
        self.eager, self.captured = eager, captured
        self._eagerly, self._in_graphs = (kernel(c.table, c.states) for c in (eager, captured))

    def gather(self, x: Tensor, dim: int, shape: tuple[int, ...]) -> Pending:
        """Of all ranks' x, in this shape: one after another (dim 0), or of [R, C] the columns side by side (dim 1)."""
        stream = self._machine.current()
        capture, channel, kernel = None, self.eager, self._eagerly
        if stream_is_captured():
            capture, channel, kernel = driver().capture(stream.cuda_stream), self.captured, self._in_graphs
        # first: where no memory is left, this was no gather
        out = self._empty(x, shape)
        kernel(x, out, dim, channel.next(stream, capture) % self._tags)
        return OnStream(out, self._machine, stream)


class OnStream(Pending):
    """What a kernel on `stream` makes."""

    def __init__(self, result: Tensor, machine: CudaMachine, stream: Any) -> None:
        super().__init__(result, None)
        self._machine, self._stream = machine, stream

    def wait(self) -> Tensor:
        stream = self._machine.current()
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._result.record_stream(stream)
        return super().wait()


def _connect(group: Group, machine: CudaMachine, device: torch.device) -> SmallGathers | None:
    """Collective."""
    from ..kernels.peer_gather import blocks_of, buffer_bytes

    blocks = blocks_of(_capacity(group.size))
    nbytes = buffer_bytes(_capacity(group.size), group.size)
    shared = [machine.share(nbytes) for _ in range(2)]
    if shared[0] is None or shared[1] is None:
        logger.info("NCCL makes small gathers too: a rank has no %.0f MiB left for their buffers", 2 * nbytes / 2**20)
        return None
    eager, captured = (Channel(buffer, device, blocks) for buffer in shared if buffer is not None)
    torch.cuda.current_stream(device).synchronize()
    gather_objects(None, group)  # nobody writes before all buffers are zero
    return SmallGathers(machine, eager, captured, looks_of(group))


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, SmallGathers | None]]
_connected = weakref.WeakKeyDictionary()


def gathers_of(group: Group, device: torch.device) -> SmallGathers | None:
    """The group's SmallGathers, None where it has none: the same on every rank. Collective the first time, which
    cannot be in a capture: then there are none yet."""
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


def start_gather(x: Tensor, group: Group, dim: int = 0, shape: tuple[int, ...] | None = None) -> Pending | None:
    """Every rank's x, of the same shape, rank-major [P, ...x] (dim 0) or, of [R, C], side by side [R, P C] (dim 1); or
    the same elements in another `shape`.

    None where NCCL (or gloo) is to do it: TP_INVARIANT_TRANSPORT is not auto, x is none of a few bytes on a GPU, or the
    group's ranks cannot write into each other's memory. The same on every rank.
    """
    if not x.is_cuda or group.size == 1 or not 0 < group.size * x.nbytes <= MOST_BYTES or transport() != "auto":
        return None
    if (x.nbytes if dim == 0 else x.shape[1] * x.element_size()) % 4:
        return None
    gathers = gathers_of(group, x.device)
    if gathers is None:
        return None
    x = stored(x)
    if shape is None:
        shape = (x.shape[0], group.size * x.shape[1]) if dim else (group.size, *x.shape)
    return gathers.gather(x if x.data_ptr() % 4 == 0 else x.clone(), dim, shape)


def start_gather_dim(local: Tensor, dim: int, group: Group) -> Pending | None:
    """As start_gather, concatenated along `dim`; None too where dims before it are larger than one."""
    if group.size * local.nbytes > MOST_BYTES or not is_first(local, dim):
        return None
    return start_gather(local, group, shape=whole_shape(local, dim, group))
