"""The CUDA side of copy_protocol.py: copies between devices, and flags that streams wait for.

Copies into a peer's memory are done by a copy engine. Flags are 32-bit words, written and waited for by streams
(cuStreamBatchMemOp): the write comes after the copies before it in its stream and after a fence, and a kernel that
follows the wait sees what they wrote. CU_STREAM_WAIT_VALUE_FLUSH is for devices that write over PCIe. None of it takes
an SM, and a call of the driver keeps the host for less time than one of torch's copies or the launch of a kernel.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from . import peer_memory
from .copy_protocol import Block
from .group import handle_of
from .peer_memory import PeerMemory, Shared

MOST_BUFFERS = 64
_TOLD, _COPIED = 2, 3  # further words, for the check of a new group
_CHECK_VALUE, _CHECK_SECONDS = 0x600D, 30.0

# of cuda.h
_WAIT_VALUE_32, _WRITE_VALUE_32, _WAIT_EQUAL, _WORDS = 1, 2, 1, 6


class Driver:
    """The calls of the CUDA driver that torch does not offer.

    Raises:
        OSError, AttributeError: there is no driver, or it has not got them.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._flags, self._copy = library.cuStreamBatchMemOp_v2, library.cuMemcpyDtoDAsync_v2
        self._flags.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
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

    def capture(self, stream: int) -> int | None:
        """The number of the CUDA graph that the stream is captured in; None if in none."""
        status, number = ctypes.c_int(), ctypes.c_uint64()
        self._check(self._capture(stream, ctypes.byref(status), ctypes.byref(number)), "cuStreamGetCaptureInfo")
        return number.value if status.value else None


@cache
def driver() -> Driver:
    return Driver()


def why_not() -> str | None:
    """Why this process cannot use copy engines, by what it can tell alone; None: it may."""
    try:
        driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver does not offer what they need ({error})"
    return None


class CudaMachine:
    """A Machine for a group of ranks with a device each. To make one is collective."""

    def __init__(self, memory: PeerMemory) -> None:
        from ..kernels import launch

        self._launch, self._raw_stream = launch, handle_of()
        self.rank, self.size, self._memory, self._device = memory.rank, memory.size, memory, memory.device
        self._lanes = [torch.cuda.Stream(self._device, priority=-1) for _ in range(2)]
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._buffers: list[Shared] = []
        self._operations: dict[int, tuple[ctypes.Array, int]] = {}
        self._now, self._marks = torch.cuda.Event(), dict[int, torch.cuda.Event]()
        self._driver = driver()
        words = memory.share(4 * 4 * MOST_BUFFERS * self.size)
        if words is None:
            raise RuntimeError("a rank has no memory left")
        self._words = words

    # streams

    def current(self) -> torch.cuda.Stream:
        if not self._launch.thread.has_context:  # this comes before any call of the driver
            self._launch.bind_context(self._device.index)
        raw = self._raw_stream(self._device.index)
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

    def new_buffer(self, nbytes: int) -> bool:
        shared = self._memory.share(nbytes) if len(self._buffers) < MOST_BUFFERS else None
        if shared is not None:
            self._buffers.append(shared)
        return shared is not None

    def view(self, buffer: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return self._buffers[buffer].own[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def copy(self, stream: torch.cuda.Stream, buffer: int, source: Tensor, blocks: Sequence[Block]) -> None:
        addresses, at, raw = self._buffers[buffer].addresses, source.data_ptr(), stream.cuda_stream
        for peer, offset, begin, nbytes in blocks:
            if nbytes:
                self._driver.copy(raw, addresses[peer] + offset, at + begin, nbytes)

    # flags

    def _word(self, at: int, kind: int, buffer: int, of: int) -> int:
        """The address of rank `of`'s word at rank `at`."""
        return self._words.addresses[at] + 4 * ((kind * MOST_BUFFERS + buffer) * self.size + of)

    def flags(
        self, stream: torch.cuda.Stream, buffer: int, number: int, *, tell: int | None = None, until: int | None = None
    ) -> None:
        assert tell is None or until is None
        key = 8 * buffer + (4 + until if tell is None else tell)  # type: ignore[operator]
        made = self._operations.get(key)
        if made is None:
            made = self._operations[key] = self._operations_of(buffer, tell, until)
        operations, count = made
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
    """A Machine for what a CUDA graph holds: its flags are kernels that count by themselves."""

    def __init__(self, memory: PeerMemory) -> None:
        super().__init__(memory)
        self._table = torch.tensor(self._words.addresses, dtype=torch.int64, device=self._device)
        self._counts, self._locks = torch.zeros(2, MOST_BUFFERS, dtype=torch.int32, device=self._device)
        self._limit = peer_memory.MOST_LOOKS
        torch.cuda.current_stream(self._device).synchronize()

    def capture(self) -> int | None:
        return self._driver.capture(self.current().cuda_stream)

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
