"""Waiting on the CPU, over a group's store, for all of its ranks.

Some functions elsewhere are called on rank 0 alone, and so users do that here too. A collective would then wait for
ranks that never come, and on NCCL end the process without a word.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from .call_records import call_context
from .liveness import DeadRankError, GroupLike

_POLL_SECONDS = 0.02
_WARN_SECONDS = 10.0
_WAIT_SECONDS = 1800.0
_LATE_SECONDS = 5.0  # how much later than another rank's failure a rank may come
_logger = logging.getLogger("tp_invariant")
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def wait_for_all(group: GroupLike, call: str, advice: str) -> None:
    """Returns once every rank of the group has called this. Says on which ranks it waits after ten seconds.

    After an error it can be called again, on all ranks: one that has raised no longer counts as waiting.

    Raises:
        RuntimeError: some rank has not come within half an hour. Names the ranks; the message ends with `advice`.
    """
    if group.process_group is None or group.size == 1:
        return
    number, store = _next_store(group.process_group)
    where, start = f"{call} on rank {group.rank} of {group.size} waits for", time.monotonic()
    try:
        store.set(str(group.rank), call)
        if missing := _missing(store, group, min(_WARN_SECONDS, _WAIT_SECONDS)):
            _logger.warning("%s rank %s: %s", where, ", ".join(map(str, missing)), advice)
        if missing := _missing(store, group, _WAIT_SECONDS - _WARN_SECONDS):
            waited = time.monotonic() - start
            raise RuntimeError(f"{where} rank {', '.join(map(str, missing))}, for {waited:.0f} seconds now. {advice}")
    except BaseException:
        with suppress(RuntimeError):  # the store may be gone, and the error above says more
            store.delete_key(str(group.rank))  # a rank that comes later would begin collectives without this one
        raise
    _meetings[group.process_group] = number  # not before: who calls again after an error meets those that come late


@contextmanager
def on_all_ranks(
    group: GroupLike, call: str, *, name: str = "tp_group", advice: str = "", warns: bool = True
) -> Iterator[None]:
    """Around the first collective of a call: if it fails, the error names the ranks that have not come to the call.

    A rank that ends breaks the others' connections at once, while a third one may still be on its way: for this one
    it waits some seconds. Inside of another such call it does nothing.

    Args:
        call: what every rank has to call; name: that of the argument which gives the group; both for the error.
        advice: a sentence of the error and of the warning.
        warns: whether to warn if some rank has not come after ten seconds. On NCCL nothing else says it, because the
            process ends with the group's time-out.

    Raises:
        RuntimeError: a DeadRankError if ranks have ended: see above.
    """
    if group.process_group is None or group.size == 1 or call_context.call is not None:
        yield
        return
    number, store = _next_store(group.process_group)
    store.set(str(group.rank), call)
    if warns and (missing := _missing(store, group, _WARN_SECONDS)):
        waited = ", ".join(map(str, missing))
        _logger.warning("%s on rank %d of %d waits for rank %s. %s", call, group.rank, group.size, waited, advice)
    call_context.call = call
    try:
        yield
    except RuntimeError as error:
        missing = []
        with suppress(RuntimeError):  # the store may have ended, too
            missing = _missing(store, group, _LATE_SECONDS)
        if not missing:
            raise
        ranks = dist.get_process_group_ranks(group.process_group)
        named = ", ".join(f"{rank} (global rank {ranks[rank]})" for rank in missing)
        message = (
            f"rank {group.rank} of {name} has waited for rank {named}, which has not come to {call}: it has ended "
            f"before, or makes no such call. See its log; every rank of {name} must. {advice}{' ' * bool(advice)}"
            f"({error})"
        )
        if isinstance(error, DeadRankError):
            raise DeadRankError(message, error.ranks) from error
        raise RuntimeError(message) from error
    finally:
        call_context.call = None
    _meetings[group.process_group] = number


def _missing(store: dist.Store, group: GroupLike, seconds: float) -> list[int]:
    """The ranks of the group that have not come after so many seconds; returns as soon as all have."""
    until = time.monotonic() + seconds
    while missing := [rank for rank in range(group.size) if not store.check([str(rank)])]:
        if time.monotonic() > until:
            return missing
        time.sleep(_POLL_SECONDS)
    return []


def wait_without_limit(group: GroupLike) -> None:
    """Returns once every rank of the group has called this, however long one of them works before.

    For a rank that writes files while the others have nothing to do: in a collective they would wait no longer than the
    group's time-out, after which NCCL ends the process. Every rank must have begun the work in question. A rank that is
    interrupted here counts as come, as no other one may wait for it forever.
    """
    process_group = group.process_group
    if process_group is None or group.size == 1:
        return
    _meetings[process_group], store = _next_store(process_group)
    store.set(str(group.rank), "")
    _missing(store, group, math.inf)


def _next_store(process_group: dist.ProcessGroup) -> tuple[int, dist.Store]:
    """The number of the group's next meeting, and where its ranks leave word."""
    number = _meetings.get(process_group, 0) + 1
    return number, dist.PrefixStore(f"tp_invariant meeting {number}", process_group.get_group_store())
