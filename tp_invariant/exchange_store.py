"""The store over which torch's symmetric memory meets, made to count alike on all ranks of a group.

torch (at least up to 2.11) numbers the exchanges of all groups of a process in one row. Ranks of a group that have met
in different numbers of other groups then look for each other under different numbers, for ever. Here they are numbered
by the group, whose ranks have the same ones in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class InStepStore(dist.Store):
    """`store`, with the number in keys "../number/rank" replaced by how many others came before it here."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._numbers = store, {}  # type: ignore[var-annotated]

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


def meet_in_step(process_group: dist.ProcessGroup) -> None:
    """Gives symmetric memory such a store for this group, unless somebody has enabled it there already. Not
    collective, but to be called by all ranks before their first rendezvous."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory
    from torch.distributed import distributed_c10d as c10d

    known, name = getattr(_symmetric_memory, "_group_name_to_store", None), process_group.group_name
    if known is None or name in known:
        return
    ranks = "_".join(map(str, dist.get_process_group_ranks(process_group)))
    store = InStepStore(
        dist.PrefixStore(f"tp_invariant symmetric memory {name} {ranks}", c10d._get_process_group_store(process_group))
    )
    _SymmetricMemory.set_group_info(name, process_group.rank(), process_group.size(), store)
    known[name] = store  # C++ alone would not keep its methods alive
