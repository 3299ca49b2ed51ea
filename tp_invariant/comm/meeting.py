"""Waiting for all ranks of a group before a collective that a user may have started on one rank alone.

Some functions elsewhere are called on rank 0 alone, and so users do that here too. A collective would then wait for
ranks that never come, and on NCCL end the process without a word. This wait is on the CPU, over the group's store.
"""

from __future__ import annotations

import logging
import time
import weakref

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

    Raises:
        RuntimeError: some rank has not come within the group's time-out, or, on gloo within one machine, makes another
            call on the group. Names the ranks; the message ends with `advice`.
    """
    process_group = group.process_group
    if process_group is None or group.size == 1:
        return
    number = _meetings.get(process_group, 0) + 1
    name = f"tp_invariant meeting {number} of {process_group.group_name}"
    store = dist.PrefixStore(name, c10d._get_process_group_store(process_group))
    store.set(str(group.rank), call)
    start, said = time.monotonic(), False
    records = records_of(group, _NO_BYTES)
    try:
        if records is not None:
            records.begin(OBJECTS, _NO_BYTES)
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
    except RuntimeError as error:
        raise RuntimeError(f"{error}. {advice}") from error
    _meetings[process_group] = number  # not before: who calls again after an error meets those that come late


def _timeout(process_group: dist.ProcessGroup) -> float:
    try:
        return process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # NCCL alone, or a backend in a wrapper
        return timeout_of(process_group) or c10d.default_pg_timeout.total_seconds()
