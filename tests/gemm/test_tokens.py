"""The gathers of tokens that layers share: when one serves, and what row-parallel layers start."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group, Pending
from tp_invariant.gemm import tokens
from tp_invariant.gemm.tokens import SharedTokens, shared_tokens
from tp_invariant.testing import assert_bitwise_equal

TWO = Group(None, 0, 2)


@pytest.fixture
def starts(monkeypatch):
    """Every x that is gathered, as it was."""
    seen = []

    def start(x, dim, group, **options):
        seen.append(x.detach().clone())
        return Pending(torch.cat([x.detach()] * group.size, dim), None)

    monkeypatch.setattr(tokens, "start_gather_dim", start)
    return seen


def users(count):
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]


def take(gathers, x, user, dim=0):
    result = gathers.take(x, dim, TWO, user).wait()
    assert_bitwise_equal(result, torch.cat([x.detach()] * 2, dim))
    return result


def test_layers_share_a_gather(starts):
    gathers, (q, k, v, up) = SharedTokens(), users(4)
    for step in range(3):
        x, other = torch.randn(2, 3), torch.randn(2, 3)
        for user in (q, k, v):
            take(gathers, x, user)
        take(gathers, other, up)
        assert len(starts) == 2 * (step + 1)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].zero_()], ids=["whole", "view"])
def test_an_input_changed_in_place_is_gathered_again(starts, change):
    gathers, (q, k) = SharedTokens(), users(2)
    x = torch.randn(2, 3)
    take(gathers, x, q)
    change(x)
    take(gathers, x, k)
    take(gathers, x, k, dim=1)
    assert len(starts) == 3


def test_a_layer_gets_a_gather_once(starts):
    """A buffer may hold other values at the next call, written by what raises no version."""
    gathers, (q, k) = SharedTokens(), users(2)
    x = torch.randn(2, 3)
    for _ in range(3):
        take(gathers, x, q)
        take(gathers, x, k)
        x.data.add_(1)
    assert len(starts) == 3


def test_what_is_never_shared(starts):
    gathers, (q, k) = SharedTokens(), users(2)
    with torch.inference_mode():
        x = torch.randn(2, 3)
        for user in (q, k):
            take(gathers, x, user)
    assert (len(starts), gathers._groups[TWO].gathers) == (2, {})
    gathers.enabled = False
    x = torch.randn(2, 3)
    for user in (q, k):
        take(gathers, x, user)
    assert (len(starts), gathers._groups[TWO].gathers) == (4, {})


def test_one_gather_is_held(starts):
    gathers, (q, *_) = SharedTokens(), users(1)
    held = []
    for _ in range(3):
        held.append(torch.utils.weak.TensorWeakRef(take(gathers, torch.randn(2, 3), q, dim=len(held) % 2)))
        assert sum(ref() is not None for ref in held) == 1
    gathers.clear()
    assert all(ref() is None for ref in held)


@pytest.mark.parametrize("between", [False, True])
def test_groups_hold_what_they_gathered_apart(starts, between):
    """Two groups may be used by two threads, whose calls fall together in another way on every rank."""
    gathers, (q, k, other) = SharedTokens(), users(3)
    for step in range(3):
        x = torch.randn(2, 3)
        take(gathers, x, q)
        if between:
            gathers.take(torch.randn(2, 3), 0, Group(None, 1, 2), other).wait()
        take(gathers, x, k)
        assert len(starts) == (step + 1) * (1 + between)


def test_what_a_row_parallel_layer_starts(starts):
    """Nothing for a call whose backward is over, whose input is not held, of another group, or outside of a graph."""
    gathers, x = SharedTokens(), torch.randn(2, 3)
    use = gathers.called_with(x, 0, TWO)
    assert gathers.before(TWO) is use
    assert gathers.before(Group(None, 0, 3)) is None
    gathers.start(gathers.before(TWO), False)
    assert len(starts) == 1
    gathers.clear()
    use.x = None
    gathers.start(use, False)
    gathers.start(gathers.called_with(None, 0, TWO), False)
    gathers.called_with(x, 0, TWO)
    gathers.forget_calls()
    gathers.start(gathers.before(TWO), False)
    assert len(starts) == 1


def test_a_frozen_layer_takes_the_place_of_the_call_before(starts):
    """Its backward gathers no tokens."""
    gathers = SharedTokens()
    gathers.called_with(torch.randn(2, 3), 0, TWO)
    assert gathers.called_with(None, 0, TWO) is None
    gathers.start(gathers.before(TWO), False)
    assert not starts


def frozen_block_last(tp_group):
    """A backward of two blocks: where row-parallel layers may start a gather, and the features of what is gathered."""
    seen, gather, start = [], tokens.start_gather_dim, shared_tokens.start

    def start_gather_dim(x, dim, group, **options):
        seen.append(x.shape[-1])
        return gather(x, dim, group)

    def start_tokens(use, in_graphs):
        seen.append("row")
        start(use, in_graphs)

    options = dict(bias=False, tp_group=tp_group, sequence_parallel=True)
    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(tokens, "start_gather_dim", start_gather_dim)
        patch.setattr(shared_tokens, "start", start_tokens)
        sizes = [(16, 32, "column"), (32, 8, "row"), (8, 32, "column"), (32, 16, "row")]
        layers = [tpi.Linear(k, n, parallel_mode=mode, **options) for k, n, mode in sizes]
        layers[2].requires_grad_(False)
        y = torch.nn.Sequential(*layers)((torch.randn(2, 16) + tp_group.rank()).requires_grad_())
        seen.clear()
        y.sum().backward()
    return seen


def test_the_tokens_of_a_block_before_a_frozen_one_are_gathered_beside_its_own_layers():
    for seen in run_ranks(frozen_block_last, 2):
        assert seen == ["row", "row", 16]


def test_one_started_early_is_taken(starts):
    gathers, (q, k) = SharedTokens(), users(2)
    x = torch.randn(2, 3)
    use = gathers.called_with(x, 0, TWO)
    gathers.start(use, False)
    gathers.start(use, False)
    take(gathers, x, q)
    take(gathers, x, k)
    assert len(starts) == 1


def test_a_call_without_a_backward_does_not_hold_the_graph_of_its_input():
    gathers, x = SharedTokens(), torch.ones(3, requires_grad=True) * 2
    use, alive = gathers.called_with(x, 0, TWO), torch.utils.weak.TensorWeakRef(x)
    assert use is gathers.before(TWO)
    del x
    assert alive() is None
    assert use.x.grad_fn is None


class Counted(Pending):
    waits = releases = 0

    def wait(self):
        self.waits += 1
        return super().wait()

    def release(self):
        self.releases += 1


def test_what_was_started_in_a_capture_is_taken_or_ends_there(monkeypatch):
    started = []

    def start(x, dim, group, **options):
        started.append(Counted(torch.cat([x, x]), None))
        return started[-1]

    monkeypatch.setattr(tokens, "start_gather_dim", start)
    monkeypatch.setattr(tokens, "is_capturing", lambda: True)
    gathers, (user,) = SharedTokens(), users(1)
    x, other = torch.randn(2, 3), torch.randn(2, 3)
    use, of_other = gathers.called_with(x, 0, TWO), gathers.called_with(other, 0, TWO)
    gathers.start(use, False)
    assert not started
    gathers.start(use, True)
    assert gathers.take(x, 0, TWO, user) is started[0]
    assert started[0].exclusive and (started[0].waits, started[0].releases) == (0, 0), "whoever took it does that"
    gathers.start(use, True)
    assert gathers.take(other, 0, TWO, user) is started[2]
    gathers.start(use, True)
    gathers.start(of_other, True)
    assert [(p.waits, p.releases) for p in started] == [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]
    monkeypatch.setattr(tokens, "is_capturing", lambda: False)  # that capture is over, or has failed
    assert gathers.take(other, 0, TWO, user) is started[5]
    assert (started[4].waits, started[4].releases) == (0, 0)
