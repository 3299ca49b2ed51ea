"""Records of each rank's next collective in shared memory, by which ranks of a gloo group detect that they diverge.

If gloo receives a longer message than it expects, one of its threads aborts: the process ends by SIGABRT without an
error message, and the other ranks see a dead rank. A shorter message it accepts as correct. So before each collective a
rank first writes a record of it (its number in the group, its kind, sizes and dtype, the layer whose forward it belongs
to) and then reads the other ranks' records. In this order, of two ranks that differ at least one sees the difference
and does not start. A rank that has started reads the records again while it waits. So no two ranks start collectives
that differ, no process aborts, and each rank's error says what every rank was about to do.

This needs ranks on one machine, which can share memory; groups over several machines have no records. It costs a few
microseconds of a collective that takes gloo a hundred. On GPUs no collective is recorded.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, repeat
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .liveness import GroupLike

ALL_GATHER, ALL_TO_ALL, OBJECTS, ALL_REDUCE, REDUCE_SCATTER = range(5)
_NAMES = ("an all-gather", "an all-to-all", "a gather of Python objects", "an all-reduce", "a reduce-scatter")
# Calls of a rank that are kept. A rank can be ahead of another by the collectives that it starts before it waits.
_RECORDED = 256
# The oldest call is not compared, because it may be overwritten: a rank writes its mark first, then its count.
_COMPARED = _RECORDED - 1
_COUNT, _TEXT_BYTES, _MARKS = 0, 1, 2  # the words of a rank
_TEXT = 8 * (_MARKS + _RECORDED)  # where its text begins
BYTES = 4096  # of one rank
# Between two checks of the records while a collective waits.
_CHECK_INTERVALS = (timedelta(seconds=0.1), timedelta(seconds=0.2), timedelta(seconds=1))
_ANSWER_SECONDS = 3.0  # for the other ranks to report their call: longer than the longest interval between two checks


class CallContext(threading.local):
    """The Python code that a collective of this thread belongs to; each thread may use a group of its own.

    layer       has `number` and `name`: the layer whose forward is running; None outside of a forward
    comparing   returns a description of the call that ranks are comparing; None if they compare none
    call        the function that a user has called on every rank, for messages (meeting.py)
    """

    layer: Any = None
    comparing: Callable[[], str] | None = None
    call: str | None = None


call_context = CallContext()


class CallRecords:
    """The records of a group, for one rank. `memory` has BYTES for each rank, initially zeros."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._words = memoryview(memory).cast("q")
        self._own = rank * BYTES // 8
        self._others = [other * BYTES // 8 for other in range(size) if other != rank]
        self._count = 0
        self._calls: list[tuple] = [()] * _RECORDED
        self._error: str | None = None

    def begin(self, kind: int, operand: Tensor, sizes: Sequence[int] = ()) -> None:
        """Records a collective on `operand`; call it before the collective starts.

        sizes: all numbers that decide the sizes of the messages; they must be the same on every rank.

        Raises:
            RuntimeError: another rank is about to start a different collective; on every rank, with the same text.
        """
        number = self._next()
        layer, comparing = call_context.layer, call_context.comparing
        call = kind, tuple(operand.shape), operand.dtype, layer, comparing, call_context.call
        self._calls[number % _RECORDED] = call
        if comparing is None:
            dtype = zlib.crc32(str(operand.dtype).encode())
            self._write(number, hash((number, kind, *sizes, dtype, 0 if layer is None else layer.number)))
        else:  # its comparison gives a better error
            self._write(number, hash((number, -2)))

    def _next(self) -> int:
        if self._error is not None:
            raise RuntimeError(self._error)
        self._count += 1
        return self._count

    def _write(self, number: int, mark: int) -> None:
        words, own, place = self._words, self._own, _MARKS + number % _RECORDED
        words[own + place] = mark
        words[own] = number
        for other in self._others:
            if words[other] >= number and words[other + place] != mark and words[other] < number + _COMPARED:
                self._report_divergence(number)

    def wait(self, work: dist.Work) -> None:
        """work.wait(), which also checks the records from time to time. Raises the errors of `work` and of begin."""
        for seconds in chain(_CHECK_INTERVALS, repeat(_CHECK_INTERVALS[-1])):
            start = time.monotonic()
            try:
                work.wait(seconds)
                return
            except RuntimeError:
                # An error of the collective comes before the time-out. is_completed() does not help: some works that
                # failed return False forever.
                if time.monotonic() - start < 0.9 * seconds.total_seconds():
                    raise
            self.check()

    def check(self) -> None:
        """Compares the records of all ranks. Raises as begin."""
        words, own, count = self._words, self._own, self._count
        for number in range(max(1, count - _COMPARED + 1), count + 1):
            place = _MARKS + number % _RECORDED
            for other in self._others:
                if words[other] < number or words[other + place] == words[own + place]:
                    continue
                if words[other] < number + _COMPARED:  # read last: the mark has not been overwritten before this
                    self._report_divergence(number)

    # --- ranks that diverge -----------------------------------------------------------------------------------------

    def _report_divergence(self, number: int) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)
        text = self._described(number).encode()[: BYTES - _TEXT]
        start = self._rank * BYTES + _TEXT
        self._memory[start : start + len(text)] = text
        self._words[self._own + _TEXT_BYTES] = len(text)
        until = time.monotonic() + _ANSWER_SECONDS
        while not all(self._words[other + _TEXT_BYTES] for other in self._others) and time.monotonic() < until:
            time.sleep(0.01)
        ranks_with: dict[str, list[int]] = {}
        for rank in range(self._size):
            ranks_with.setdefault(self._report_of(rank, number), []).append(rank)
        said = "; ".join(f"rank {', '.join(map(str, ranks))} {text}" for text, ranks in ranks_with.items())
        self._error = (
            f"the {self._size} ranks of tp_group make different calls. At collective {number} of the group, {said}. "
            "They must make the same calls in the same order, on data of the same sizes and dtypes; "
            "TP_INVARIANT_CHECK=1 on all ranks finds the first call in which they differ. This group cannot be used "
            "any more: restart all ranks"
        )
        raise RuntimeError(self._error)

    def _report_of(self, rank: int, number: int) -> str:
        words = rank * BYTES // 8
        length = self._words[words + _TEXT_BYTES]
        if not length:
            return "has not come to it" if self._words[words] < number else "makes another call"
        start = rank * BYTES + _TEXT
        return bytes(self._memory[start : start + length]).decode(errors="replace")

    def _described(self, number: int) -> str:
        kind, shape, dtype, layer, comparing, by = self._calls[number % _RECORDED]
        if comparing is not None:
            return f"asks whether all ranks make this call, which is new to it: {comparing()}"
        where = "" if layer is None else f" in the forward of layer {layer.number} of the group, {layer.name}"
        return f"starts {_NAMES[kind]} of {shape} {dtype}{where}" + (f" for {by}" if by else "")


# --- the records of each group --------------------------------------------------------------------------------------

_records: weakref.WeakKeyDictionary[dist.ProcessGroup, CallRecords] = weakref.WeakKeyDictionary()


def records_of(group: GroupLike, operand: Tensor) -> CallRecords | None:
    """The group's records for collectives on `operand`; None if such collectives are not recorded."""
    return _records.get(group.process_group) if operand.is_cpu and group.process_group is not None else None


def share_records(group: GroupLike, gather: Callable[[bytes], list[bytes]]) -> None:
    """Starts recording the collectives of a group if all its ranks can map the same memory. A collective.

    gather: returns every rank's bytes, which have one length, in rank order.
    """
    size, path, memory = group.size * BYTES, "", None
    if group.rank == 0:
        with suppress(OSError):
            path = _new_file(size)
    try:
        path = gather(path.encode().ljust(_PATH_BYTES)[:_PATH_BYTES])[0].decode().rstrip()
        with suppress(OSError, ValueError), open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        everyone_can = all(answer == b"1" for answer in gather(b"0" if memory is None else b"1"))
    finally:
        if group.rank == 0 and path:
            with suppress(OSError):
                os.unlink(path)
    if memory is not None and everyone_can:
        assert group.process_group is not None
        _records[group.process_group] = CallRecords(memory, group.rank, group.size)


_PATH_BYTES = 256


def _new_file(size: int) -> str:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    handle, path = tempfile.mkstemp(prefix="tp_invariant_calls_", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)  # a full file system raises here; later it would be a SIGBUS
        else:
            os.write(handle, bytes(size))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path
