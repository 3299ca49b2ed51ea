"""The CUDA side of peer_copies.py: memory that peers write into, copies between devices, flags that streams wait for.

The memory is torch's symmetric memory, without NVLink's multicast. Copies into a peer's are done by a copy engine.
Flags are 32-bit words, written and waited for by streams (cuStreamBatchMemOp): the write comes after the copies before
it in its stream and after a fence, and a kernel that follows the wait sees what they wrote. CU_STREAM_WAIT_VALUE_FLUSH
is for devices that write over PCIe. None of it takes an SM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .collectives import Group
from .copy_protocol import Block
from .exchange_store import meeting_of
from .wire import gather_objects

MOST_BUFFERS = 64
_LOOKS_PER_SECOND = 1_000_000
_MOST_LOOKS = 2**31 - 1
MEMORY_SHARE = 16  # buffers take at most the device's memory divided by this
_TOLD, _COPIED = 2, 3  # further words, for the check of a new group
_CHECK_VALUE, _CHECK_SECONDS = 0x600D, 30.0

# of cuda.h
_WAIT_VALUE_32, _WRITE_VALUE_32, _WAIT_EQUAL, _WORDS = 1, 2, 1, 6
_NOT_SUPPORTED = 801
# CUmemcpyAttributes of all copies of a batch, and the copy that they begin with: the source is read in stream order
_IN_STREAM_ORDER, _OF_THE_FIRST = (ctypes.c_uint32 * 6)(1), (ctypes.c_size_t * 1)(0)


class Driver:
    """The calls of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._flags, self._copy = library.cuStreamBatchMemOp_v2, library.cuMemcpyDtoDAsync_v2
        self._flags.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._batch = getattr(library, "cuMemcpyBatchAsync_v2", None)  # CUDA 13
        if self._batch is not None:
            pointers = [ctypes.c_void_p] * 3
            self._batch.argtypes = [*pointers, ctypes.c_size_t, *pointers[:2], ctypes.c_size_t, ctypes.c_void_p]
        self._capture = library.cuStreamGetCaptureInfo
        self._capture.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)]
        self._explain = library.cuGetErrorString
        self._explain.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def _check(self, status: int, call: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._explain(status, ctypes.byref(text))
            raise RuntimeError(f"{call} failed with CUDA error {status}: {(text.value or b'unknown').decode()}")

    def flags(self, stream: int, operations: ctypes.Array, count: int) -> None:
        self._check(self._flags(stream, count, operations, 0), "cuStreamBatchMemOp")

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        self._check(self._copy(to, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def copy_each(self, stream: int, copies: Sequence[tuple[int, int, int]], captured: bool) -> None:
        """Of each copy where to, where from and how many bytes, in any order; a graph holds none that are a batch."""
        if self._batch is None or captured or len(copies) < 2:
            for copy in copies:
                self.copy(stream, *copy)
            return
        array = ctypes.c_uint64 * len(copies)
        to, source, nbytes = (array(*column) for column in zip(*copies, strict=True))
        status = self._batch(to, source, nbytes, len(copies), _IN_STREAM_ORDER, _OF_THE_FIRST, 1, stream)
        if status == _NOT_SUPPORTED:  # here: it has copied nothing
            self._batch = None
            return self.copy_each(stream, copies, captured)
        self._check(status, "cuMemcpyBatchAsync")

    def capture(self, stream: int) -> int | None:
        """The number of the CUDA graph that the stream is captured in; None if in none."""
        status, number = ctypes.c_int(), ctypes.c_uint64()
        self._check(self._capture(stream, ctypes.byref(status), ctypes.byref(number)), "cuStreamGetCaptureInfo")
        return number.value if status.value else None


@cache
def driver() -> Driver:
    return Driver()


def why_not(device: torch.device) -> str | None:
    """Why this process has no peer copies on `device`, by what it can tell alone; None: it may have them."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device.type}" if device.type != "cuda" else "torch is not built for CUDA"
    try:
        driver()
        from torch.distributed import _symmetric_memory  # noqa: F401
    except (OSError, AttributeError) as error:
        return f"the CUDA driver does not offer what they need ({error})"
    except ImportError as error:
        return f"torch has no symmetric memory here ({error})"
    return None


def looks_of(group: Group) -> int:
    """How often a kernel looks for what a peer is to write, until the group's time-out is over."""
    assert group.process_group is not None
    try:
        seconds = group.process_group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # a backend in a wrapper
        return _MOST_LOOKS
    return int(min(seconds * _LOOKS_PER_SECOND, _MOST_LOOKS))


# --- a group's memory -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    # not from the memory pool of symmetric_memory.empty: each buffer begins where its allocation does
    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


class Shared:
    """A tensor of bytes and its like on all ranks: `addresses` of theirs, as this process sees them. Collective."""

    def __init__(self, own: Tensor, group_name: Any) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        with _without_multicast():
            self._handle = _SymmetricMemory.rendezvous(own, group_name)
        self.own = own
        self.addresses: list[int] = list(self._handle.buffer_ptrs)
        self.views: dict[tuple, Tensor] = {}

    @torch.inference_mode(False)
    def view(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A new one of `views`."""
        if len(self.views) > 64:  # sizes that change all the time
            self.views.clear()
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        view = self.views[dtype, shape] = self.own[:nbytes].view(dtype).view(shape)
        return view


class CudaMachine:
    """peer_copies.Machine for a group of ranks with a device each."""

    def __init__(self, group: Group, device: torch.device) -> None:
        from ..kernels.launch import bind_context

        assert group.process_group is not None
        self._bind_context = bind_context
        self.rank, self.size, self._device = group.rank, group.size, device
        self._process_group, self._name = weakref.ref(group.process_group), meeting_of(group.process_group)
        self._lanes = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._buffers: list[Shared] = []
        self._operations: dict[int, tuple[ctypes.Array, int]] = {}
        self._now, self._marks = torch.cuda.Event(), dict[int, torch.cuda.Event]()
        self._driver = driver()
        self._words = Shared(_allocate(4 * 4 * MOST_BUFFERS * self.size, device), self._name)
        self._words.own.zero_()
        torch.cuda.current_stream(device).synchronize()

    # streams

    def current(self) -> torch.cuda.Stream:
        self._bind_context(self._device.index)  # this comes before any call of the driver
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._streams.get(raw)  # to make one takes the host longer than a copy
        if stream is None:
            stream = self._streams[raw] = torch.cuda.current_stream(self._device)
        return stream

    def lane(self, early: bool) -> torch.cuda.Stream:
        return self._lanes[early]

    # A wait is for what an event has last recorded when it is launched. So events serve again and again: to make one
    # for each mark takes the host as long as a copy. One host thread launches for a group at a time, as in collectives.

    def mark(self, buffer: int, stream: torch.cuda.Stream) -> None:
        event = self._marks.get(buffer)
        if event is None:
            event = self._marks[buffer] = torch.cuda.Event()
        event.record(stream)

    def after(self, stream: torch.cuda.Stream, buffer: int) -> None:
        self._marks[buffer].wait(stream)

    def follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        self._now.record(other)
        self._now.wait(stream)

    # buffers

    @torch.inference_mode(False)  # others than the first to use it may need gradients
    def share(self, nbytes: int) -> Shared | None:
        """Collective: so many bytes on each rank, or None where one has not got them."""
        own = None
        try:
            own = _allocate(nbytes, self._device)
        except RuntimeError:  # what torch's allocator holds on to may be what is missing
            torch.cuda.empty_cache()
            with contextlib.suppress(RuntimeError):
                own = _allocate(nbytes, self._device)
        if not all(gather_objects(own is not None, Group(self._process_group(), self.rank, self.size))):
            return None
        assert own is not None
        return Shared(own, self._name)

    def new_buffer(self, nbytes: int) -> bool:
        shared = self.share(nbytes) if len(self._buffers) < MOST_BUFFERS else None
        if shared is not None:
            self._buffers.append(shared)
        return shared is not None

    def view(self, buffer: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        shared = self._buffers[buffer]
        found = shared.views.get((dtype, shape))
        return shared.view(dtype, shape) if found is None else found

    in_graphs = False

    def copy(self, stream: torch.cuda.Stream, buffer: int, source: Tensor, blocks: Sequence[Block]) -> None:
        addresses, at = self._buffers[buffer].addresses, source.data_ptr()
        copies = [(addresses[peer] + offset, at + begin, nbytes) for peer, offset, begin, nbytes in blocks if nbytes]
        self._driver.copy_each(stream.cuda_stream, copies, self.in_graphs)

    # flags

    def _word(self, at: int, kind: int, buffer: int, of: int) -> int:
        """The address of rank `of`'s word at rank `at`."""
        return self._words.addresses[at] + 4 * ((kind * MOST_BUFFERS + buffer) * self.size + of)

    def flags(
        self, stream: torch.cuda.Stream, buffer: int, number: int, *, tell: int | None = None, until: int | None = None
    ) -> None:
        assert tell is None or until is None
        key = 8 * buffer + (4 + until if tell is None else tell)  # type: ignore[operator]
        known = self._operations.get(key)
        if known is None:
            known = self._operations[key] = self._operations_of(buffer, tell, until)
        operations, count = known
        for i in range(2, _WORDS * count, _WORDS):
            operations[i] = number
        self._driver.flags(stream.cuda_stream, operations, count)

    def _operations_of(self, buffer: int, tell: int | None, until: int | None) -> tuple[ctypes.Array, int]:
        peers = [rank for rank in range(self.size) if rank != self.rank]
        words: list[int] = []  # operation, address, value, flags and two of the driver's own
        if tell is not None:
            for peer in peers:
                words += [_WRITE_VALUE_32, self._word(peer, tell, buffer, self.rank), 0, 0, 0, 0]
        if until is not None:
            for peer in peers:
                words += [_WAIT_VALUE_32, self._word(self.rank, until, buffer, peer), 0, _WAIT_EQUAL, 0, 0]
        return (ctypes.c_uint64 * len(words))(*words), len(words) // _WORDS

    def check(self) -> str | None:
        """Collective: whether what this rank's peers write arrives; else what does not. Comes before any wait."""
        lane, value = self.lane(True), torch.full((1,), _CHECK_VALUE, dtype=torch.int32, device=self._device)
        self.follow(lane, self.current())
        for peer in range(self.size):
            if peer != self.rank:
                self._driver.copy(lane.cuda_stream, self._word(peer, _COPIED, 0, self.rank), value.data_ptr(), 4)
        self.flags(lane, 0, _CHECK_VALUE, tell=_TOLD)
        deadline, peers = time.monotonic() + _CHECK_SECONDS, [rank for rank in range(self.size) if rank != self.rank]
        words = self._words.own.view(torch.int32).view(4, MOST_BUFFERS, self.size)
        while True:
            seen = words[:, 0].cpu()[:, peers] == _CHECK_VALUE
            if seen[_TOLD].all() and seen[_COPIED].all():
                break
            if time.monotonic() > deadline:
                return f"{'flags' if seen[_COPIED].all() else 'copies'} from peers did not arrive"
            time.sleep(0.001)
        self.flags(lane, 0, _CHECK_VALUE, until=_TOLD)
        lane.synchronize()
        return None


class GraphMachine(CudaMachine):
    """peer_copies.Machine for what a CUDA graph holds: its flags are kernels that count by themselves."""

    in_graphs = True

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        self._table = torch.tensor(self._words.addresses, dtype=torch.int64, device=device)
        self._counts, self._locks = torch.zeros(2, MOST_BUFFERS, dtype=torch.int32, device=device)
        self._limit = looks_of(group)
        torch.cuda.current_stream(device).synchronize()
        gather_objects(None, group)  # nobody writes before all words are zero

    def capture(self) -> int | None:
        return driver().capture(self.current().cuda_stream)

    def flags(
        self, stream: torch.cuda.Stream, buffer: int, number: int, *, tell: int | None = None, until: int | None = None
    ) -> None:
        from ..kernels.peer_flags import FREE, peer_flags
        from ..kernels.peer_moves import TAGS

        if tell is not None:
            operation = "free" if tell == FREE else "arrived"
        else:
            operation = "claim" if until == FREE else "wait"
        words = self._words.own.view(torch.int32)
        with torch.cuda.stream(stream):
            peer_flags(
                operation, buffer, number % TAGS, words, self._table, self._counts, self._locks, self.rank, self._limit
            )  # fmt: skip


# --- whether a group has it -----------------------------------------------------------------------------------------


@cache
def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _reachable(uuids: list[str], device: torch.device) -> str | None:
    own = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for uuid in uuids:
        peer = own.get(uuid)  # one that this process does not see shows in the check
        if peer is not None and peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            return f"{device} cannot reach the memory of cuda:{peer}"
    return None


def _first(reasons: list[str | None]) -> str | None:
    return next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason is not None), None)


def connect(group: Group, device: torch.device) -> tuple[CudaMachine, int] | str:
    """Collective: the group's machine and how many bytes its buffers may take, or why it has none."""
    reason, uuid, memory = why_not(device), "", 0
    if reason is None:
        properties = torch.cuda.get_device_properties(device)
        uuid, memory = str(properties.uuid), properties.total_memory
    everyone: list[Any] = gather_objects((reason, _host(), uuid, memory), group)
    reasons, hosts, uuids, memories = map(list, zip(*everyone, strict=True))
    found = _first(reasons)
    if found is None and len(set(hosts)) > 1:
        found = "its ranks are on several hosts"
    shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # torch's own, for its tests
    if found is None and len(set(uuids)) < group.size and not shared:
        found = "several of its ranks share a device"
    if found is not None:
        return found
    found = _first(gather_objects(_reachable(uuids, device), group))
    if found is not None:
        return found
    machine = None
    try:
        machine = CudaMachine(group, device)
    except RuntimeError as error:
        reason = f"symmetric memory failed: {str(error).splitlines()[0]}"
    found = _first(gather_objects(reason, group))  # also: nobody writes before all flags are zero
    if found is None:
        assert machine is not None
        try:
            reason = machine.check()
        except RuntimeError as error:
            reason = str(error)
        found = _first(gather_objects(reason, group))
    if found is not None:
        return found
    assert machine is not None
    return machine, min(memories) // MEMORY_SHARE


def on_this_host() -> str:
    """For a report: what would move large blocks between this host's GPUs, were there a rank for each."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return "nothing to move: fewer than two GPUs"
    devices = [torch.device("cuda", index) for index in range(count)]
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    reasons = [why_not(devices[0]), *(_reachable(uuids, device) for device in devices)]
    return next((f"NCCL: {reason}" for reason in reasons if reason is not None), "copy engines")
