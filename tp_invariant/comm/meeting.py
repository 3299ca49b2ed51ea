"""Waiting for all ranks of a group before a collective that a user may have started on one rank alone.

Some functions elsewhere are called on rank 0 alone, and so users do that here too. A collective would then wait for
ranks that never come, and on NCCL end the process without a word. This wait is on the CPU, over the group's store.
"""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .call_records import OBJECTS, records_of
from .liveness import GroupLike
from .watch import timeout_of
from .wire import _NO_BYTES

_POLL_SECONDS = 0.02
_SAY_SECONDS = 10.0
_logger = logging.getLogger("tp_invariant")
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def wait_for_all(group: GroupLike, call: str, advice: str) -> None:
    """Returns once every rank of the group has called this. Says on which ranks it waits after ten seconds.

    After an error it can be called again, on all ranks: one that has raised no longer counts as waiting.

    Raises:
        RuntimeError: some rank has not come within the group's time-out, or, on gloo within one machine, makes another
            call on the group. Names the ranks; the message ends with `advice`.
    """
    process_group = group.process_group
    if process_group is None or group.size == 1:
        return
    number = _meetings.get(process_group, 0) + 1
    store = _store(process_group, number)
    start, said, recorded = time.monotonic(), False, False
    records = records_of(group, _NO_BYTES)
    try:
        store.set(str(group.rank), call)
        if records is not None:
            records.begin(OBJECTS, _NO_BYTES)
            recorded = True
        while late := [rank for rank in range(group.size) if not store.check([str(rank)])]:
            waited = time.monotonic() - start
            where = f"{call} on rank {group.rank} of {group.size} waits for rank {', '.join(map(str, late))}"
            if waited > _timeout(process_group):
                raise RuntimeError(f"{where}, for {waited:.0f} seconds now")
            if waited > _SAY_SECONDS and not said:
                _logger.warning("%s: %s", where, advice)
                said = True
            if records is not None:
                records.check()
            time.sleep(_POLL_SECONDS)
    except BaseException as error:
        with suppress(Exception):  # the store may be gone, and the error above says more
            store.delete_key(str(group.rank))  # a rank that comes later would begin collectives without this one
        if records is not None and recorded:
            records.take_back()
        if isinstance(error, RuntimeError):
            raise RuntimeError(f"{error}. {advice}") from error
        raise
    _meetings[process_group] = number  # not before: who calls again after an error meets those that come late


def wait_without_limit(group: GroupLike) -> None:
    """Returns once every rank of the group has called this, however long one of them works before.

    For a rank that writes files while the others have nothing to do: in a collective they would wait no longer than the
    group's time-out, after which NCCL ends the process. Every rank must have begun the work in question. A rank that is
    interrupted here counts as come, as no other one may wait for it forever.
    """
    process_group = group.process_group
    if process_group is None or group.size == 1:
        return
    number = _meetings[process_group] = _meetings.get(process_group, 0) + 1
    store = _store(process_group, number)
    store.set(str(group.rank), "")
    ranks = [str(rank) for rank in range(group.size)]
    while not store.check(ranks):
        time.sleep(_POLL_SECONDS)


def _store(process_group: dist.ProcessGroup, number: int) -> dist.Store:
    name = f"tp_invariant meeting {number} of {process_group.group_name}"
    return dist.PrefixStore(name, c10d._get_process_group_store(process_group))


def _timeout(process_group: dist.ProcessGroup) -> float:
    try:
        return process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # NCCL alone, or a backend in a wrapper
        return timeout_of(process_group) or c10d.default_pg_timeout.total_seconds()
