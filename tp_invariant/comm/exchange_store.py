"""The store over which torch's symmetric memory meets, made to count alike on all ranks of a group.

torch numbers the exchanges of all groups of a process in one row (pytorch/pytorch#196082). Ranks of a group that have
met in different numbers of other groups then look for each other under different numbers, for ever. Here they are
numbered by the group, whose ranks have the same ones in the same order.
"""

from __future__ import annotations

import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..core.torch_private import register_process_group, unregister_process_group


class InStepStore(dist.Store):
    """`store`, with the number in keys "../number/rank" replaced by how many others came before it here."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        head, _, rank = key.rpartition("/")
        kind, _, number = head.rpartition("/")
        if not number.isdigit():
            return key
        return f"{kind}/{self._numbers.setdefault(head, len(self._numbers))} of the group/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._key(key) for key in keys], *(() if timeout is None else (timeout,)))

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._key(key))


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, Any, Any]] = weakref.WeakKeyDictionary()
_lives: Counter[str] = Counter()


def meeting_of(process_group: dist.ProcessGroup) -> str:
    """The name of a process group of the same ranks, without a backend, for symmetric memory to meet in: of a group
    symmetric memory wants the store, the rank and the size. Not collective, but all ranks are to ask."""
    found = _meetings.get(process_group)
    if found is None:
        rank, size = process_group.rank(), process_group.size()
        ranks = "_".join(map(str, dist.get_process_group_ranks(process_group)))
        # a group that is destroyed and made again has the name that it had, and finds its old keys in the store
        name = f"tp_invariant symmetric memory, {process_group.group_name}: {ranks}"
        _lives[name] += 1
        name = f"{name}, life {_lives[name]}"
        store = InStepStore(dist.PrefixStore(name, process_group.get_group_store()))
        meeting = dist.ProcessGroup(store, rank, size)
        register_process_group(name, meeting)
        weakref.finalize(process_group, unregister_process_group, name).atexit = False
        # C++ alone would keep neither the store's methods nor the group alive
        found = _meetings[process_group] = name, meeting, store
    return found[0]
