"""Which rank computes which row: without sequence parallelism no rank has to be asked, so one process sees them all."""

from __future__ import annotations

import itertools

import pytest
import torch

from tp_invariant.comm.collectives import Group
from tp_invariant.functional import experts as functions
from tp_invariant.functional.experts import dispatch, expert_range


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize(("tokens", "experts", "slots"), [(24, 6, 2), (7, 5, 3), (1, 8, 2), (2, 2, 1), (0, 4, 2)])
def test_rows_meet_their_owner_in_the_order_of_one_rank(world, tokens, experts, slots):
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    index = scores.argsort(-1)[:, :slots]
    alone = dispatch(index, experts, Group(None, 0, 1), None)
    ways = [dispatch(index, experts, Group(None, rank, world), None) for rank in range(world)]
    assert torch.equal(torch.cat([way.order for way in ways]), alone.order)
    rows = torch.cat([way.offsets.diff() for way in ways])
    assert torch.equal(rows, alone.offsets.diff()) and torch.equal(rows, index.flatten().bincount(minlength=experts))
    assert [e for rank in range(world) for e in expert_range(experts, Group(None, rank, world))] == list(range(experts))

    # every (token, slot), numbered as on one rank, on the way to its owner and back
    starts = list(itertools.accumulate((len(way.places) * slots for way in ways), initial=0))
    leaving = [(way.departure + start).split(way.sent) for way, start in zip(ways, starts, strict=False)]
    for rank, way in enumerate(ways):
        assert way.counts == ways[0].counts and way.received == [len(blocks[rank]) for blocks in leaving]
        arrived = torch.cat([blocks[rank] for blocks in leaving])
        ordered = torch.empty_like(arrived)
        ordered[way.arrival] = arrived
        assert torch.equal(ordered, way.order)
        own = torch.arange(starts[rank], starts[rank + 1]).view(way.places.shape)
        assert torch.equal((way.departure + starts[rank])[way.places], own)


@pytest.mark.parametrize("world", (1, 2))
def test_more_rows_than_offsets_can_count(monkeypatch, world):
    monkeypatch.setattr(functions, "MAX_ROWS", 6)
    with pytest.raises(ValueError, match="experts get 6 rows on a rank"):
        dispatch(torch.tensor([[0, 1]] * 3), 4, Group(None, 0, world), None)
