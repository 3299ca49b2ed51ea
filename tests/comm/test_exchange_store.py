"""Symmetric memory's exchanges meet under the same keys, however many each rank has had in other groups."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from tp_invariant import testing
from tp_invariant.comm import exchange_store
from tp_invariant.comm.exchange_store import InStepStore, meeting_of


def exchange(store, name, number, rank, value):
    """What torch does in C++ with a number of its own: up to 2.12 by wait and get, later by multi_get."""
    store.set(f"{name}/{number}/{rank}", value)

    def look(other):
        key = f"{name}/{number}/{other}"
        store.wait([key], timedelta(seconds=1))
        (value,) = store.multi_get([key])
        assert store.get(key) == value
        return value

    return look


kept = []


def two_ranks(make):
    """Stores that call the stores of `make` from C++, as torch does, which keeps no reference to Python objects."""
    shared = dist.HashStore()
    kept.extend(make(dist.PrefixStore("group", shared)) for _ in range(2))
    return [dist.PrefixStore("CUDA", store) for store in kept[-2:]]


def test_ranks_with_different_numbers_meet():
    first, second = two_ranks(InStepStore)
    for step, (mine, theirs) in enumerate(((0, 4), (1, 5), (7, 6))):
        looks = exchange(first, "x", mine, 0, f"a{step}"), exchange(second, "x", theirs, 1, f"b{step}")
        assert looks[0](1) == f"b{step}".encode()
        assert looks[1](0) == f"a{step}".encode()


def test_without_the_store_they_do_not_meet():
    first, second = two_ranks(lambda store: store)
    look = exchange(first, "x", 0, 0, "a")
    exchange(second, "x", 4, 1, "b")
    with pytest.raises(dist.DistStoreError):
        look(1)


def test_other_keys_are_not_changed():
    under = dist.HashStore()
    store = InStepStore(under)
    store.set("plain", "a")
    store.set("with/a name/0", "b")
    assert under.get("plain") == b"a" == store.get("plain")
    assert under.get("with/a name/0") == b"b"
    assert store.check(["plain"]) and store.add("count", 2) == 2
    assert store.delete_key("plain") and not store.check(["plain"])


def test_a_group_meets_in_one_of_the_same_ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        name = meeting_of(dist.group.WORLD)
        assert meeting_of(dist.group.WORLD) == name != dist.group.WORLD.group_name
        meeting = _resolve_process_group(name)
        assert (meeting.rank(), meeting.size()) == (0, 1)
    finally:
        dist.destroy_process_group()


def test_groups_of_one_name_after_another():
    """Destroyed and created again, alone or with the job, on a store that has the keys of the first."""
    shared = dist.HashStore()
    seen = []
    for life in range(2):
        dist.init_process_group("gloo", store=shared, rank=0, world_size=1)
        try:
            for again in range(2):
                group = dist.new_group([0], use_local_synchronization=True)
                seen.append((group.group_name, meeting_of(group)))
                look = exchange(exchange_store._meetings[group][2], "x", 0, 0, f"{life} {again}")
                assert look(0) == f"{life} {again}".encode()
                dist.destroy_process_group(group)
                del group
        finally:
            dist.destroy_process_group()
    names, meetings = zip(*seen, strict=True)
    assert len(set(names)) < 4, "the control: names come back"
    assert len(set(meetings)) == 4
    assert not exchange_store._meetings
    with pytest.raises(RuntimeError):  # gone with their groups
        _resolve_process_group(meetings[-1])


def meet(tp_group, subgroup):
    """Exchanges in the group of all ranks, after which number by the process's own count."""
    name = meeting_of(tp_group)
    number = 3 if tp_group.rank() in subgroup else 0  # as though some had met elsewhere before
    store = exchange_store._meetings[tp_group][2]
    look = exchange(dist.PrefixStore("CUDA", store), "x", number, tp_group.rank(), f"{tp_group.rank()}")
    return name, [look(other).decode() for other in range(tp_group.size())]


def test_ranks_of_a_job_meet():
    names, seen = zip(*testing.run_ranks(meet, 3, (0, 1), device="cpu"), strict=True)
    assert len(set(names)) == 1
    assert list(seen) == [["0", "1", "2"]] * 3
