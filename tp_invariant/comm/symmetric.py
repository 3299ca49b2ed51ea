"""Gathers and exchanges of row blocks in buffers that NCCL has registered on all ranks of a group as one window.

NCCL 2.27 and later moves blocks between such buffers with a lower latency, and 2.28 by copy engines on a communicator
whose CTA policy is zero: a GEMM of one program per SM that runs beside them keeps all its SMs. NCCL itself makes sure
that nobody writes into a buffer whose owner has not come to that collective, so there are no flags here:

    operands    NCCL takes this way only if what it sends is registered too. What is gathered is first copied to its
                own place in the result, and gathered in place; what is exchanged is first copied into a second buffer.
    buffers     are leased: whoever reads a result waits for it and then releases it. Which buffer is taken depends on
                the sizes and on the order of starts and releases alone, which ranks of one program share; NCCL needs
                the same window on every rank. Where none is free the caller's own way (plain NCCL) is taken.
    streams     A collective starts after what its stream has queued, so a buffer that was released on one stream and
                is taken on another makes the second wait for the first.
    graphs      A CUDA graph replays into the buffers that its capture took, so captures have buffers of their own,
                allocated before (`prepare_for_graphs`), since memory cannot be registered during a capture.

The memory comes from torch.cuda.MemPool and is registered by the process group's register_mem_pool(symm=True), which
leaves torch's symmetric memory, whose backend is one for the whole process, to the user.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import wire
from .collectives import Group, Pending, can_duplicate, duplicate_group, gather_major, is_capturing
from .copy_protocol import PER_CLASS, size_class
from .peer_memory import MEMORY_SHARE, _first, _host, driver

logger = logging.getLogger(__name__)

_OLDEST_NCCL = (2, 28)
_ZERO_CTA = 2  # NCCL_CTA_POLICY_ZERO of nccl.h
_CHECK_BYTES = 2**21


@dataclass
class Buffer:
    """`memory`: bytes. `uses` counts leases; `released_on`: the stream that read it last, None on a CPU."""

    memory: Tensor
    uses: int = 0
    leased: bool = False
    released_on: Any = None
    views: dict[tuple, Tensor] = field(default_factory=dict)

    @torch.inference_mode(False)  # others than the first that uses a view may need gradients
    def view(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        found = self.views.get((dtype, shape))
        if found is None:
            if len(self.views) > 64:  # sizes that change all the time
                self.views.clear()
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            found = self.views[dtype, shape] = self.memory[:nbytes].view(dtype).view(shape)
        return found


class Buffers:
    """The buffers of one communicator. `allocate(nbytes)` is collective: memory on all ranks or, None, on none.

    `limit`: bytes of all of them. `refused` counts the leases for which there was none.
    """

    def __init__(self, allocate: Callable[[int], Tensor | None], limit: int) -> None:
        self._allocate, self.limit = allocate, limit
        self.buffers: list[Buffer] = []
        self.refused = 0
        self._leases = 0

    @property
    def allocated(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self.buffers)

    def lease(self, nbytes: int, stream: Any) -> Buffer | None:
        """A buffer of at least so many bytes, for what `stream` gets from now on."""
        size = size_class(nbytes)
        fitting = [b for b in self.buffers if not b.leased and nbytes <= b.memory.nbytes <= 2 * size]
        # of the smallest, the one that was taken longest ago
        buffer = min(fitting, key=lambda b: (b.memory.nbytes, b.uses), default=None)
        buffer = buffer or self._new(size)
        if buffer is None:
            self.refused += 1
            return None
        self._leases += 1
        buffer.leased, buffer.uses = True, self._leases
        if buffer.released_on is not None and buffer.released_on != stream:
            stream.wait_stream(buffer.released_on)
        return buffer

    def _new(self, size: int) -> Buffer | None:
        if sum(b.memory.nbytes == size for b in self.buffers) >= PER_CLASS or self.allocated + size > self.limit:
            return None
        memory = self._allocate(size)
        if memory is None:
            self.limit = self.allocated  # a rank has no memory left: do not ask all of them each time
            return None
        self.buffers.append(Buffer(memory))
        return self.buffers[-1]

    def provide(self, size: int, count: int) -> None:
        """Collective: buffers of this size until there are `count`."""
        while sum(b.memory.nbytes == size for b in self.buffers) < count and self._new(size) is not None:
            pass


class CapturedBuffers(Buffers):
    """Buffers that CUDA graphs replay into; all graphs of a group share them, and must be replayed in one order."""

    def __init__(self, allocate: Callable[[int], Tensor | None], limit: int) -> None:
        super().__init__(allocate, limit)
        self._capture: int | None = None

    def begin(self, capture: int | None) -> None:
        """What another capture, perhaps one that failed, left leased is free in this one."""
        if capture != self._capture:
            self._capture = capture
            for buffer in self.buffers:
                buffer.leased, buffer.released_on = False, None

    def lease(self, nbytes: int, stream: Any) -> Buffer | None:
        self.limit, limit = 0, self.limit  # memory cannot be registered in a capture
        try:
            return super().lease(nbytes, stream)
        finally:
            self.limit = limit


class Leased(Pending):
    """A result in a leased buffer: to be waited for on every stream that reads it, and released after that."""

    leased = True

    def __init__(
        self, result: Tensor, work: dist.Work | None, group: Group, buffers: list[Buffer], stream: Callable[[], Any]
    ) -> None:
        super().__init__(result, work, group=group)
        self._buffers, self._stream, self._read_on = buffers, stream, list[Any]()

    def wait(self) -> Tensor:
        stream = self._stream()
        if not self.waited or stream not in self._read_on:
            assert self._buffers, "a buffer is read after it was released"
            if self._work is not None:
                assert self._group is not None
                wire.wait(self._work, self._result, self._group)
            self._read_on.append(stream)
            self.waited = True
        return self._result

    def release(self) -> None:
        if not self._buffers:
            return
        if not self.waited:
            self.wait()  # so that what comes next in the buffer starts after this has arrived
        stream = self._stream()
        for other in self._read_on:
            if other != stream:
                stream.wait_stream(other)
        for buffer in self._buffers:
            buffer.leased, buffer.released_on = False, stream
        self._buffers, self._work = [], None


@dataclass
class Channel:
    """A communicator of a group's ranks, with its buffers outside graphs and, once prepared for, inside them."""

    group: Group
    device: torch.device
    buffers: Buffers
    captured: CapturedBuffers | None = None
    _streams: dict[int, Any] = field(default_factory=dict)

    def stream(self) -> Any:
        """The current stream, always the same object for one; None on a CPU."""
        if self.device.type != "cuda":
            return None
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._streams.get(raw)  # to make one takes the host several microseconds
        if found is None:
            found = self._streams[raw] = torch.cuda.current_stream(self.device)
        return found

    def _pool(self) -> Buffers | None:
        if not is_capturing():
            return self.buffers
        if self.captured is not None:
            self.captured.begin(driver().capture(self.stream().cuda_stream))
        return self.captured

    def prepare_for_graphs(self) -> None:
        """Collective: as many buffers for CUDA graphs as there are outside them."""
        if self.captured is None:
            self.captured = CapturedBuffers(self.buffers._allocate, self.buffers.limit)
        sizes = [buffer.memory.nbytes for buffer in self.buffers.buffers]
        for size in sorted(set(sizes)):
            self.captured.provide(size, sizes.count(size))

    def start_gather(self, x: Tensor, shape: tuple[int, ...]) -> Leased | None:
        """Every rank's x, rank-major, as a tensor of `shape`; None where no buffer is free."""
        pool, stream, size = self._pool(), self.stream(), self.group.size
        buffer = None if pool is None else pool.lease(size * x.nbytes, stream)
        if buffer is None:
            return None
        out = buffer.view(x.dtype, (size, x.numel()))
        own = out[self.group.rank]
        own.copy_(x.view(-1))
        work = wire.start_all_gather(out, own, self.group)
        return Leased(buffer.view(x.dtype, shape), work, self.group, [buffer], self.stream)

    def start_exchange(self, x: Tensor, shape: tuple[int, ...]) -> Leased | None:
        """Rank q gets block q of every rank's x, which has a block of one size for each rank; as of `start_gather`."""
        pool, stream = self._pool(), self.stream()
        received = None if pool is None else pool.lease(x.nbytes, stream)
        if received is None or pool is None:
            return None
        sent = pool.lease(x.nbytes, stream)
        if sent is None:
            received.leased, received.released_on = False, stream
            return None
        out, operand = received.view(x.dtype, (x.numel(),)), sent.view(x.dtype, (x.numel(),))
        operand.copy_(x.view(-1))
        # without sizes torch calls ncclAlltoAll; with them it sends and receives, which no copy engine does
        work = wire.start_all_to_all(out, operand, (), (), self.group)
        return Leased(received.view(x.dtype, shape), work, self.group, [received, sent], self.stream)


@dataclass
class Channels:
    """`soon` for what is needed next, with the least latency; `early` for what runs beside GEMMs, by copy engines."""

    soon: Channel
    early: Channel

    def of(self, early: bool) -> Channel:
        return self.early if early else self.soon


# --- whether a group has them ----------------------------------------------------------------------------------------


def why_not(group: Group, device: torch.device) -> str | None:
    """Why this process has no registered buffers on `device` for the group, by what it can tell alone."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device.type}" if device.type != "cuda" else "torch is not built for CUDA"
    if not can_duplicate(group):
        return "the group is not on NCCL, or a part of a job that init_process_group(device_id=..) binds to devices"
    version = torch.cuda.nccl.version()
    if version < _OLDEST_NCCL:
        return f"NCCL is {'.'.join(map(str, version))}; from {'.'.join(map(str, _OLDEST_NCCL))} on it has them"
    assert group.process_group is not None
    if not hasattr(group.process_group._get_backend(device), "register_mem_pool"):
        return "this torch does not register memory with NCCL"
    return None


def _allocator(group: Group, device: torch.device, pools: list[Any]) -> Callable[[int], Tensor | None]:
    """Memory that NCCL has registered for the communicator of `group`; `pools` keeps what it is taken from."""
    assert group.process_group is not None
    backend: Any = group.process_group._get_backend(device)

    @torch.inference_mode(False)
    def allocate(nbytes: int) -> Tensor | None:
        pool, memory = torch.cuda.MemPool(backend.mem_allocator), None
        try:
            with torch.cuda.use_mem_pool(pool, device):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError:  # what torch's allocator holds on to may be what is missing
            torch.cuda.empty_cache()
        if not all(wire.gather_objects(memory is not None, group)):
            return None
        backend.register_mem_pool(pool, symm=True)
        pools.append(pool)
        return memory

    return allocate


def _channel(group: Group, device: torch.device, policy: int | None, limit: int) -> Channel:
    """Collective: one more communicator of the group's ranks."""
    options: Any = dist.ProcessGroupNCCL.Options()
    if policy is not None:
        options.config.cta_policy = policy
    purpose = "registered memory" if policy is None else f"registered memory, CTA policy {policy}"
    again = duplicate_group(group, "nccl", purpose, options)
    gather_major(torch.zeros(1, device=device), again)  # connects
    return Channel(again, device, Buffers(_allocator(again, device, []), limit))


def _check(channel: Channel) -> str | None:
    """Collective: whether a gather brings every rank's bytes."""
    group = channel.group
    own = torch.full((_CHECK_BYTES // group.size,), group.rank, dtype=torch.uint8, device=channel.device)
    pending = channel.start_gather(own, (group.size, own.numel()))
    if pending is None:
        return "a rank has no memory left for registered buffers"
    expected = torch.arange(group.size, dtype=torch.uint8, device=channel.device)[:, None]
    right = bool((pending.wait() == expected).all())
    pending.release()
    return None if right else "a gather in registered memory brought other bytes"


def connect(group: Group, device: torch.device) -> Channels | str:
    """Collective: the group's channels, or why it has none: the same on every rank."""
    reason = why_not(group, device)
    memory = 0 if reason is not None else torch.cuda.get_device_properties(device).total_memory
    reasons, hosts, memories = map(list, zip(*wire.gather_objects((reason, _host(), memory), group), strict=True))
    found = _first(reasons)
    if found is None and len(set(hosts)) > 1:
        found = "its ranks are on several hosts"
    if found is not None:
        return found
    limit, channels = min(memories) // MEMORY_SHARE, None
    try:
        channels = Channels(_channel(group, device, None, limit), _channel(group, device, _ZERO_CTA, limit))
    except (RuntimeError, TypeError, AttributeError) as error:  # of NCCL; of a torch that knows no symm or cta_policy
        reason = str(error).splitlines()[0]
    found = _first(wire.gather_objects(reason, group))
    if found is not None:
        return found
    assert channels is not None
    checks = [_check(channels.soon), _check(channels.early)]  # both on every rank, as they are collectives
    found = _first(wire.gather_objects(checks[0] or checks[1], group))
    return channels if found is None else found


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Channels | str]]
_connected = weakref.WeakKeyDictionary()


def channels_of(group: Group, device: torch.device) -> Channels | str:
    """The group's channels on a device, or why it has none: the same on every rank. Collective the first time."""
    assert group.process_group is not None
    of_group = _connected.setdefault(group.process_group, {})
    if device not in of_group:
        if is_capturing():
            return "a communicator cannot be made during a capture"
        found = of_group[device] = connect(group, device)
        name = f"the group of {group.size} ranks of rank {dist.get_rank()}"
        if isinstance(found, str):
            logger.info("plain NCCL moves all between %s, as %s", name, found)
        else:
            logger.info("NCCL moves blocks between %s in registered memory", name)
    return of_group[device]
