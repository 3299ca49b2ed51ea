"""What collectives share, and gathering objects; the errors name ranks that have ended (liveness.py).

`group` is a collectives.Group, or anything with its process_group, rank and size.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections import deque
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .call_records import OBJECTS, records_of
from .liveness import GroupLike, explain

T = TypeVar("T")

_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


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


def transfer_error(error: RuntimeError, operand: Tensor, group: GroupLike) -> Exception:
    return diagnosed_error(error, operand, group, f"moving {tuple(operand.shape)} {operand.dtype} between ranks")


# Collectives on CPUs that may not have ended, and their tensors. A thread of gloo's that drops the last reference to a
# tensor while Python ends needs Python's lock, and the process is aborted.
_running: deque[tuple[dist.Work, tuple[Tensor, ...]]] = deque()
_SECONDS_AT_EXIT = 2.0
_SECONDS_TO_DROP = 0.05


def held_until_it_ends(work: dist.Work, *tensors: Tensor) -> dist.Work:
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
    if _running:  # gloo's thread drops its references after it has reported the end: on a busy machine not at once
        _running.clear()
        time.sleep(_SECONDS_TO_DROP)


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
