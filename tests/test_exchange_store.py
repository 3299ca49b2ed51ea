"""Symmetric memory's exchanges meet under the same keys, however many each rank has had in other groups."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from tp_invariant import exchange_store
from tp_invariant.exchange_store import InStepStore, meet_in_step


def exchange(store, name, number, rank, value):
    """What torch does in C++, number by number of its own."""
    store.set(f"{name}/{number}/{rank}", value)

    def look(other):
        key = f"{name}/{number}/{other}"
        store.wait([key], timedelta(seconds=1))
        return store.get(key)

    return look


def two_ranks(make):
    """Stores that call `make`'s from C++, as torch does, which keeps no reference to what is Python's."""
    shared = dist.HashStore()
    kept.extend(make(dist.PrefixStore("group", shared)) for _ in range(2))
    return [dist.PrefixStore("CUDA", store) for store in kept[-2:]]


kept = []


def test_ranks_with_other_numbers_meet():
    first, second = two_ranks(InStepStore)
    for step, (mine, theirs) in enumerate(((0, 4), (1, 5), (7, 6))):
        looks = exchange(first, "x", mine, 0, f"a{step}"), exchange(second, "x", theirs, 1, f"b{step}")
        assert looks[0](1) == f"b{step}".encode()
        assert looks[1](0) == f"a{step}".encode()


def test_without_it_they_do_not():
    first, second = two_ranks(lambda store: store)
    look = exchange(first, "x", 0, 0, "a")
    exchange(second, "x", 4, 1, "b")
    with pytest.raises(dist.DistStoreError):
        look(1)


def test_other_keys_are_left_alone():
    under = dist.HashStore()
    store = InStepStore(under)
    store.set("plain", "a")
    store.set("with/a name/0", "b")
    assert under.get("plain") == b"a" == store.get("plain")
    assert under.get("with/a name/0") == b"b"
    assert store.check(["plain"]) and store.add("count", 2) == 2
    assert store.delete_key("plain") and not store.check(["plain"])


def test_a_group_gets_one_unless_it_has_one(monkeypatch):
    known, told = {}, []
    monkeypatch.setattr(_symmetric_memory, "_group_name_to_store", known)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory.set_group_info", lambda *info: told.append(info))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            meet_in_step(dist.group.WORLD)
        ((name, rank, size, store),) = told
        assert (name, rank, size) == (dist.group.WORLD.group_name, 0, 1)
        assert isinstance(store, exchange_store.InStepStore) and known == {name: store}
    finally:
        dist.destroy_process_group()
