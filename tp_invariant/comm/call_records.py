"""What each rank of a gloo group is about to move, in memory that the ranks share: ranks that part are told so.

Gloo takes a message that is longer than what it awaits for a fatal error, in a thread of its own: the process ends by
SIGABRT, without a word, and the other ranks take it for dead. A message that is shorter it takes for the right one. So
before each collective a rank writes down which one it is (its number in the group, its kind, sizes and dtype, whether
it belongs to a backward, the layer whose forward it belongs to) and looks at what the others have written: first the
one, then the other, so that of two ranks that differ at least one sees it and does not start. Whoever has started looks
again while it waits. So no two ranks ever start collectives that differ, nothing aborts, and each rank's error says
what every rank was about to do.

This takes ranks that share memory, on one machine; a group of several machines goes without. It costs a few
microseconds of a collective that takes gloo a hundred. On GPUs nothing is recorded.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .liveness import Ranks

ALL_GATHER, ALL_TO_ALL, OBJECTS, ALL_REDUCE, REDUCE_SCATTER = range(5)
_NAMES = ("an all-gather", "an all-to-all", "a gather of Python objects", "an all-reduce", "a reduce-scatter")
_KEPT = 64  # calls of a rank that are kept; how far ranks can be apart is what one starts before it waits
_LOOKED_UP = _KEPT - 1  # the one before that is about to be written over: a rank writes its mark first, then its count
_COUNT, _TEXT_BYTES, _MARKS = 0, 1, 2  # the words of a rank
_TEXT = 8 * (_MARKS + _KEPT)  # where its text begins
BYTES = 4096  # of one rank
_LOOKS = (timedelta(seconds=0.1), timedelta(seconds=0.2), timedelta(seconds=1))  # between two looks, while it waits
_ANSWER_SECONDS = 3.0  # for the others to say where they are: more than the longest wait between two looks
_DTYPES = {
    dtype: number
    for number, dtype in enumerate(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
}


class Doing(threading.local):
    """What of this thread's Python a collective belongs to: threads may each use a group of their own.

    layer       has `number` and `name`: the layer whose forward runs; None outside of one
    comparing   says, when called, in which call ranks ask each other; None where they do not
    """

    layer: Any = None
    comparing: Callable[[], str] | None = None


doing = Doing()


class CallRecords:
    """One rank's view of the records of its group; see the module. `memory` has BYTES for each rank, zeros at first."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._words = memoryview(memory).cast("q")
        self._own = rank * BYTES // 8
        self._others = [other * BYTES // 8 for other in range(size) if other != rank]
        self._count = 0
        self._calls: list[tuple] = [()] * _KEPT
        self._error: str | None = None

    def begin(self, kind: int, operand: Tensor, sizes: Sequence[int] = ()) -> None:
        """Before a collective on `operand` starts. `sizes`: all that decides how much travels, the same on every rank.

        Raises:
            RuntimeError: another rank is about to start another one; on every rank, with the same text.
        """
        if self._error is not None:
            raise RuntimeError(self._error)
        number = self._count = self._count + 1
        layer, comparing = doing.layer, doing.comparing
        backward = torch._C._current_graph_task_id() != -1
        place = _MARKS + number % _KEPT
        self._calls[number % _KEPT] = kind, tuple(operand.shape), operand.dtype, backward, layer, comparing
        if comparing is None:
            of_layer = 0 if layer is None else layer.number
            mark = hash((number, kind, *sizes, _DTYPES[operand.dtype], backward, of_layer))
        else:  # whose outcome says more
            mark = hash((number, -2))
        words, own = self._words, self._own
        words[own + place] = mark
        words[own] = number
        for other in self._others:
            if words[other] >= number and words[other + place] != mark and words[other] < number + _LOOKED_UP:
                self._part(number)

    def wait(self, work: dist.Work) -> None:
        """work.wait(), which looks at the records while it takes long. Errors are work's, and begin's."""
        for seconds in chain(_LOOKS, repeat(_LOOKS[-1])):
            start = time.monotonic()
            try:
                work.wait(seconds)
                return
            except RuntimeError:
                # its own error comes at once; is_completed() is no way to ask, some works that failed say no for ever
                if time.monotonic() - start < 0.9 * seconds.total_seconds():
                    raise
            self.look()

    def look(self) -> None:
        """Compares what is recorded of all ranks. Raises as begin."""
        words, own, count = self._words, self._own, self._count
        for number in range(max(1, count - _LOOKED_UP + 1), count + 1):
            place = _MARKS + number % _KEPT
            for other in self._others:
                if words[other] < number or words[other + place] == words[own + place]:
                    continue
                if words[other] < number + _LOOKED_UP:  # read last: until here it has not been written over
                    self._part(number)

    def progress(self) -> str:
        """How far each rank has come, for an error."""
        counts = [self._words[rank * BYTES // 8] for rank in range(self._size)]
        return ", ".join(f"rank {rank} has begun {count}" for rank, count in enumerate(counts))

    # --- ranks that part --------------------------------------------------------------------------------------------

    def _part(self, number: int) -> None:
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
            ranks_with.setdefault(self._said(rank), []).append(rank)
        said = "; ".join(f"rank {', '.join(map(str, ranks))} {text}" for text, ranks in ranks_with.items())
        self._error = (
            f"the {self._size} ranks of tp_group make different calls. At collective {number} of the group, {said}. "
            "They must make the same calls in the same order, on data of the same sizes and dtypes; "
            "TP_INVARIANT_CHECK=1 on all ranks finds the first call in which they part. This group cannot be used any "
            "more: restart all ranks"
        )
        raise RuntimeError(self._error)

    def _said(self, rank: int) -> str:
        length = self._words[rank * BYTES // 8 + _TEXT_BYTES]
        if not length:
            return "has not come to it"
        start = rank * BYTES + _TEXT
        return bytes(self._memory[start : start + length]).decode(errors="replace")

    def _described(self, number: int) -> str:
        kind, shape, dtype, backward, layer, comparing = self._calls[number % _KEPT]
        if comparing is not None:
            return f"asks whether all ranks make this call, which is new to it: {comparing()}"
        inside = "" if layer is None else f" in the forward of {described(layer)}"
        return f"starts {_NAMES[kind]} of {shape} {dtype}{' in a backward' if backward else inside}"


def described(layer: Any) -> str:
    """A layer in messages."""
    return f"layer {layer.number} of the group, {layer.name}"


# --- where they are kept --------------------------------------------------------------------------------------------

_records: weakref.WeakKeyDictionary[dist.ProcessGroup, CallRecords] = weakref.WeakKeyDictionary()


def records_of(group: Ranks, operand: Tensor) -> CallRecords | None:
    """The records of the group, for collectives on `operand`; None where there are none."""
    return _records.get(group.process_group) if operand.is_cpu and group.process_group is not None else None


def share(group: Ranks, gather: Callable[[bytes], list[bytes]]) -> None:
    """Begins to record the collectives of a group, if all its ranks can reach the same memory. Collective.

    gather: every rank's bytes, of one length, in rank order.
    """
    process_group = group.process_group
    assert process_group is not None
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
        _records[process_group] = CallRecords(memory, group.rank, group.size)


_PATH_BYTES = 256


def _new_file(size: int) -> str:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    handle, path = tempfile.mkstemp(prefix="tp_invariant_calls_", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)  # a full folder is an error here, later it would be a SIGBUS
        else:
            os.write(handle, bytes(size))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path
