"""The calls of torch.distributed that move bytes; their errors name ranks that have ended (liveness.py).

`group` is a collectives.Group, or anything with its process_group, rank and size.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from .call_records import ALL_GATHER, ALL_TO_ALL, OBJECTS, records_of
from .liveness import GroupLike, explain

T = TypeVar("T")

# The process group's own methods: what torch.distributed's functions put around them (a logger, checks for complex
# tensors and coalescing) takes the host longer than the call. torch 2.13 renames them.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
_GATHER_OPTIONS, _EXCHANGE_OPTIONS = AllgatherOptions(), AllToAllOptions()
_GATHER_OPTIONS.asyncOp = _EXCHANGE_OPTIONS.asyncOp = True


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def diagnosed_error(error: RuntimeError, operand: Tensor, group: GroupLike, what: str) -> Exception:
    """The exception to raise in place of `error`, with which the collective `what` failed; see liveness.explain.

    The ranks' records are checked first: a rank that finds that the ranks make different calls ends, and a rank still
    in a collective sees that only as a lost connection.
    """
    records = records_of(group, operand)
    if records is not None:
        try:
            records.check()
        except RuntimeError as parted:
            return parted
    return explain(error, group, what)


def _diagnosed_transfer_error(error: RuntimeError, operand: Tensor, group: GroupLike) -> Exception:
    return diagnosed_error(error, operand, group, f"moving {tuple(operand.shape)} {operand.dtype} between ranks")


def start_all_gather(out: Tensor, local: Tensor, group: GroupLike) -> dist.Work | None:
    """Starts gathering all ranks' contiguous `local`, one after another, into `out`. Shapes do not matter."""
    records = records_of(group, local)
    if records is not None:
        records.begin(ALL_GATHER, local, (local.numel(),))
    try:  # gloo and NCCL want the ranks stacked along dim 0 of an output with as many dims as the input
        work = getattr(group.process_group, _ALL_GATHER)(out.view(-1), local.view(-1), _GATHER_OPTIONS)
        return _held_until_it_ends(work, out, local)
    except RuntimeError as error:
        raise _diagnosed_transfer_error(error, local, group) from error


def start_all_to_all(
    out: Tensor,
    x: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: GroupLike,
    *,
    alike: Sequence[int] | None = None,
) -> dist.Work | None:
    """alike: numbers, the same on every rank, that decide the sizes of all messages; None: x.numel() and `sent`."""
    records = records_of(group, x)
    if records is not None:
        records.begin(ALL_TO_ALL, x, (x.numel(), *sent) if alike is None else alike)
    try:
        work = getattr(group.process_group, _ALL_TO_ALL)(out, x, list(received), list(sent), _EXCHANGE_OPTIONS)
        return _held_until_it_ends(work, out, x)
    except RuntimeError as error:
        raise _diagnosed_transfer_error(error, x, group) from error


# Collectives on CPUs that may not have ended, and their tensors. A thread of gloo's that drops the last reference to a
# tensor while Python ends needs Python's lock, and the process is aborted.
_running: deque[tuple[dist.Work, tuple[Tensor, ...]]] = deque()
_SECONDS_AT_EXIT = 2.0


def _held_until_it_ends(work: dist.Work, *tensors: Tensor) -> dist.Work:
    if tensors[0].is_cpu:
        while _running and _running[0][0].is_completed():
            _running.popleft()
        _running.append((work, tensors))
    return work


@atexit.register
def _wait_for_all() -> None:
    """A gather that was started ahead of its use may be on its way when a program ends."""
    until = time.monotonic() + _SECONDS_AT_EXIT
    for work, _ in _running:
        with contextlib.suppress(RuntimeError):  # a rank that has ended, or that comes too late
            work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))


def wait(work: dist.Work, operand: Tensor, group: GroupLike) -> None:
    """Waits for a collective on `operand`.

    Raises:
        DeadRankError: ranks of the group have ended; names them.
        RuntimeError: the ranks make different calls (call_records.py), or the collective failed for another reason.
    """
    records = records_of(group, operand)
    try:
        if records is None:
            work.wait()
        else:
            records.wait(work)
    except RuntimeError as error:
        raise _diagnosed_transfer_error(error, operand, group) from error


def gather_objects(own: T, group: GroupLike) -> list[T]:
    """Every rank's `own`, which is pickled, in rank order. Slow: for rare calls."""
    if group.size == 1:
        return [own]
    everyone: list[Any] = [None] * group.size
    records = records_of(group, _NO_BYTES)
    if records is not None:
        records.begin(OBJECTS, _NO_BYTES)
    try:
        dist.all_gather_object(everyone, own, group=group.process_group)
    except RuntimeError as error:
        raise diagnosed_error(error, _NO_BYTES, group, f"gathering a {type(own).__name__} from all ranks") from error
    return everyone
