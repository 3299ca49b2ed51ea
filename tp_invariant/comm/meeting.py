"""Waiting on the CPU, over a group's store, for all of its ranks.

Some functions elsewhere are called on rank 0 alone, and so users do that here too. A collective would then wait for
ranks that never come, and on NCCL end the process without a word.
"""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import suppress

import torch.distributed as dist

from .liveness import GroupLike

_POLL_SECONDS = 0.02
_WARN_SECONDS = 10.0
_WAIT_SECONDS = 1800.0
_logger = logging.getLogger("tp_invariant")
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def wait_for_all(group: GroupLike, call: str, advice: str) -> None:
    """Returns once every rank of the group has called this. Says on which ranks it waits after ten seconds.

    After an error it can be called again, on all ranks: one that has raised no longer counts as waiting.

    Raises:
        RuntimeError: some rank has not come within half an hour. Names the ranks; the message ends with `advice`.
    """
    process_group = group.process_group
    if process_group is None or group.size == 1:
        return
    number = _meetings.get(process_group, 0) + 1
    store = _store(process_group, number)
    start, warned = time.monotonic(), False
    try:
        store.set(str(group.rank), call)
        while missing := [rank for rank in range(group.size) if not store.check([str(rank)])]:
            waited = time.monotonic() - start
            where = f"{call} on rank {group.rank} of {group.size} waits for rank {', '.join(map(str, missing))}"
            if waited > _WAIT_SECONDS:
                raise RuntimeError(f"{where}, for {waited:.0f} seconds now. {advice}")
            if waited > _WARN_SECONDS and not warned:
                _logger.warning("%s: %s", where, advice)
                warned = True
            time.sleep(_POLL_SECONDS)
    except BaseException:
        with suppress(RuntimeError):  # the store may be gone, and the error above says more
            store.delete_key(str(group.rank))  # a rank that comes later would begin collectives without this one
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
    return dist.PrefixStore(f"tp_invariant meeting {number}", process_group.get_group_store())
