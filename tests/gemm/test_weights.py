"""Gathered weights: what the cache may serve, what it starts ahead, and what it holds; on one process."""

import functools

import pytest
import torch

from tp_invariant.comm.collectives import Group, Pending
from tp_invariant.gemm import weights as gemm_weights
from tp_invariant.gemm.weights import PASSES, Phase, Schedule, WeightCache
from tp_invariant.testing import assert_bitwise_equal

GROUP = Group(None, 0, 2)


class Layout:
    """A WeightLayout that counts: what a gather of a weight would give, as things stood when it started."""

    def __init__(self, group=GROUP):
        self.group, self.started, self.alive = group, [], []
        self.part, self.k_dim = object(), 0

    def start(self, weight, *, early):
        result = weight.detach().clone()
        self.started.append((weight, early))
        return Pending(result, None)

    def count(self, weight, early=None):
        """Of this weight's gathers, also from memory that it had before."""
        addresses = vars(weight).setdefault("addresses", set())
        addresses.add(weight.data_ptr())
        return sum(w.data_ptr() in addresses and early in (None, e) for w, e in self.started)


@pytest.fixture(autouse=True)
def gathers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gemm_weights, "start_weight", lambda weight, layout, peers: layout.start(weight, early=peers.early)
        )
        yield


def weight_of(value):
    return torch.nn.Parameter(torch.full((2, 3), float(value)))


def take(cache, weight, layout, grad=True):
    """As gemm/owner_maps.py does: what is wanted, then what comes next."""
    result = cache.take(weight, layout, grad=grad).wait()
    cache.start_next(layout.group)
    return result


class _Take(torch.autograd.Function):
    """Takes a weight in forward (grad on) and another in backward, as layers do."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_takes = backward
        forward()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.backward_takes()
        return grad, None, None


# --- what may be served ---------------------------------------------------------------------------------------------


def test_a_prefetched_weight_is_used_once():
    cache, weight, layout = WeightCache(), weight_of(1), Layout()
    cache.prefetch(weight, layout)
    assert (layout.count(weight), cache.holds(weight, layout)[0]) == (1, True)
    cache.prefetch(weight, layout)
    assert layout.count(weight) == 1, "already on its way"
    assert_bitwise_equal(take(cache, weight, layout), weight.detach())
    assert (layout.count(weight), cache.holds(weight, layout)[0]) == (1, False)
    take(cache, weight, layout)
    assert layout.count(weight) == 2, "keep=0 keeps nothing"


def test_a_kept_weight_is_gathered_once():
    cache, weight, layout = WeightCache(keep=1), weight_of(1), Layout()
    for _ in range(3):
        assert_bitwise_equal(take(cache, weight, layout), weight.detach())
    assert layout.count(weight) == 1


CHANGES = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(torch.zeros(2, 3)),
    "view": lambda w: w[0].zero_(),
    "init": lambda w: torch.nn.init.constant_(w, 5.0),
    "storage": lambda w: setattr(w, "data", torch.full((2, 3), 7.0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("how", ["prefetched", "kept", "ahead"])
def test_a_change_invalidates(change, how):
    cache, first, weight, layout = WeightCache(2 if how == "kept" else 0), weight_of(0), weight_of(1), Layout()
    if how == "prefetched":
        cache.prefetch(weight, layout)
    elif how == "kept":
        take(cache, weight, layout)
    else:
        for used in (first, weight, first):  # weight came after first, so it is started
            take(cache, used, layout)
        assert layout.count(weight, early=True) == 1
    assert cache.holds(weight, layout)[0]
    before = layout.count(weight)
    with torch.no_grad():
        change(weight)
    assert not cache.holds(weight, layout)[0]
    assert_bitwise_equal(take(cache, weight, layout), weight.detach())
    assert layout.count(weight, early=False) >= 1
    assert layout.count(weight) == before + 1


@pytest.mark.parametrize("steps", [True, False], ids=["an optimizer", "a write"])
def test_an_optimizer_that_writes_through_data_drops_what_was_started_ahead(monkeypatch, steps):
    class Halves(torch.optim.SGD):
        def step(self):
            self.param_groups[0]["params"][0].data.mul_(0.5)

    cache, first, weight, layout = WeightCache(), weight_of(0), weight_of(1), Layout()
    monkeypatch.setattr(gemm_weights, "weight_cache", cache)
    for used in (first, weight, first):  # weight came after first, so it is started
        take(cache, used, layout)
    halves = Halves([weight])
    (halves.step if steps else functools.partial(weight.data.mul_, 0.5))()
    assert torch.equal(take(cache, weight, layout), weight.detach()) == steps


def test_an_optimizer_step_invalidates():
    cache, weight, layout = WeightCache(keep=2), weight_of(1), Layout()
    before = take(cache, weight, layout)
    weight.grad = torch.ones(2, 3)
    torch.optim.SGD([weight], lr=0.5).step()
    assert_bitwise_equal(take(cache, weight, layout), before - 0.5)
    assert layout.count(weight) == 2


def test_prefetching_again_after_a_change_replaces_the_stale_entry():
    cache, weight, layout = WeightCache(), weight_of(1), Layout()
    cache.prefetch(weight, layout)
    with torch.no_grad():
        weight.add_(1)
    cache.prefetch(weight, layout)
    assert layout.count(weight) == 2
    assert_bitwise_equal(take(cache, weight, layout), weight.detach())
    assert layout.count(weight) == 2


def test_the_least_recently_used_goes_first():
    cache, layout = WeightCache(keep=2, ahead=False), Layout()
    weights = [weight_of(i) for i in range(3)]
    for i in (0, 1, 0, 2):  # 1 is the one not used for longest when 2 comes
        take(cache, weights[i], layout)
    assert [cache.holds(w, layout)[0] for w in weights] == [True, False, True]
    assert [layout.count(w) for w in weights] == [1, 1, 1]


def test_a_weight_is_held_for_some_passes_and_no_longer():
    """So the weights of a model that is gone do not stay for ever."""
    cache, layout, weight, other = WeightCache(), Layout(), weight_of(1), weight_of(2)
    take(cache, weight, layout)
    take(cache, other, layout)

    def held():
        uses = (use for before in cache._groups[GROUP].schedule._followed for use, _ in before)
        return {use.weight.data_ptr() for use in uses}

    for passes in range(1, PASSES + 3):
        assert passes > PASSES or weight.data_ptr() in held()
        take(cache, other, layout)
    assert held() == {other.data_ptr()}


def test_layouts_are_kept_apart():
    cache, weight, layouts = WeightCache(keep=4), weight_of(1), [Layout() for _ in range(4)]
    for layout in layouts:
        assert not cache.holds(weight, layout)[0]
        take(cache, weight, layout)
    assert [layout.count(weight) for layout in layouts] == [1] * 4


def test_clear_forgets_everything():
    cache, weight, layout = WeightCache(keep=2), weight_of(1), Layout()
    take(cache, weight, layout)
    cache.clear()
    assert not cache.holds(weight, layout)[0]
    take(cache, weight, layout)
    assert layout.count(weight) == 2


def test_inference_tensors_are_never_kept():
    """They have no version that would tell when they change."""
    with torch.inference_mode():
        weight = torch.ones(2, 3)
    cache, layout = WeightCache(keep=2), Layout()
    cache.prefetch(weight, layout)
    assert (layout.count(weight), cache.holds(weight, layout)[0]) == (0, False)
    for _ in range(2):
        take(cache, weight, layout)
    assert (layout.count(weight), cache.holds(weight, layout)[0]) == (2, False)


# --- what is started ahead ------------------------------------------------------------------------------------------


class Model:
    """Layers' weights used as in training: forward in order, backward from the last; `recompute` repeats forwards."""

    def __init__(self, layers=3, recompute=False, **options):
        self.cache, self.recompute = WeightCache(**options), recompute
        self.row, self.column = Layout(), Layout()
        self.weights = [(weight_of(2 * i), weight_of(2 * i + 1)) for i in range(layers)]

    def step(self):
        """(how many gathers a use had to start by itself, how many were started ahead)."""
        for layout in (self.row, self.column):
            layout.started.clear()
        x = torch.zeros(1, requires_grad=True)
        y = x
        for row, column in self.weights:

            def forward(row=row):
                assert_bitwise_equal(take(self.cache, row, self.row), row.detach())

            def backward(row=row, column=column):
                if self.recompute:
                    assert_bitwise_equal(take(self.cache, row, self.row), row.detach())
                assert_bitwise_equal(take(self.cache, column, self.column), column.detach())

            y = _Take.apply(y, forward, backward)
        y.backward()
        started = [early for layout in (self.row, self.column) for _, early in layout.started]
        return started.count(False), started.count(True)

    def update(self, through_data):
        with torch.no_grad():
            for weight in (w for pair in self.weights for w in pair):
                (weight.data if through_data else weight).add_(1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_all_but_the_first_are_started_ahead(recompute, through_data):
    """And none is started where an optimizer may come in between, so writes that raise no version do no harm."""
    model = Model(recompute=recompute)
    uses = 9 if recompute else 6
    assert model.step() == (uses, 0)
    for step in range(4):
        model.update(through_data)
        needed, ahead = model.step()
        # with recomputation a row's weight has been followed by two others: one step more to tell them apart
        if step or not recompute:
            assert (needed, ahead) == (1, uses - 1)
        else:
            assert uses <= needed + ahead <= uses + 1
        assert not model.cache._groups[GROUP].early, "nothing is on its way when a step is over"


@pytest.mark.parametrize("ahead", [False, True])
def test_while_a_graph_of_whole_passes_is_captured(monkeypatch, ahead):
    model = Model()
    model.cache.ahead_in_graphs = ahead
    model.step()
    monkeypatch.setattr(gemm_weights, "is_capturing", lambda: True)
    assert [model.step() for _ in range(2)] == [(1, 5) if ahead else (6, 0)] * 2
    assert not model.cache._groups[GROUP].early, "all that was started in the graph has been taken in it"
    monkeypatch.undo()
    assert model.step() == (1, 5)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gather_does_not_pass_the_border_of_a_graph(monkeypatch, inside):
    """Neither one that eager work has started into the graph, nor one of a capture that failed out of it."""
    cache, first, second, layout = WeightCache(ahead_in_graphs=True), weight_of(1), weight_of(2), Layout()
    for weight in (first, second) * 2:
        take(cache, weight, layout)
    started = layout.count(second)
    monkeypatch.setattr(gemm_weights, "is_capturing", lambda: inside)
    take(cache, first, layout)
    assert layout.count(second, early=True) and layout.count(second) == started + 1
    (early,) = cache._groups[GROUP].early.values()
    monkeypatch.setattr(gemm_weights, "is_capturing", lambda: not inside)
    assert not cache.holds(second, layout)[0]
    assert_bitwise_equal(take(cache, second, layout), second.detach())
    assert layout.count(second) == started + 2
    monkeypatch.undo()
    cache.clear()
    assert early.pending.waited != inside and not cache._groups[GROUP].early, (
        "of a failed capture there is nothing to wait for"
    )


def test_ahead_off_starts_nothing():
    model = Model(ahead=False)
    assert [model.step() for _ in range(3)] == [(6, 0)] * 3


def test_a_deviation_costs_a_gather_and_no_more():
    cache, layout = WeightCache(), Layout()
    a, b, c, other = (weight_of(i) for i in range(4))
    for used in (a, b, c, a, b):
        take(cache, used, layout)
    assert cache.holds(c, layout)[0]
    assert_bitwise_equal(take(cache, other, layout), other.detach())
    assert not cache.holds(c, layout)[0], "what is not used next is dropped"
    for used in (a, b, c) * 3:
        assert_bitwise_equal(take(cache, used, layout), used.detach())
    assert layout.started[-1][0].data_ptr() == c.data_ptr()
    assert layout.started[-1][1], "back in step"


@pytest.mark.parametrize("phases", [(Phase.INFERENCE, Phase.FORWARD), (Phase.BACKWARD, Phase.FORWARD)], ids=str)
def test_nothing_is_expected_of_another_pass(phases):
    first, second = phases
    schedule = Schedule()
    for _ in range(3):
        schedule.note("a", first, 1)
        assert schedule.expected() is None
        schedule.note("b", second)
    for use in "cdc":
        schedule.note(use, second)
    assert schedule.expected() == "d", "the control: in one pass it is"


class Counted:
    """How many results of its gathers are alive, at most."""

    def __init__(self):
        self.most, self.alive = 0, []

    def start(self, weight, *, early):
        result = weight.detach().clone()
        self.alive = [ref for ref in self.alive if ref() is not None]
        self.alive.append(torch.utils.weak.TensorWeakRef(result))
        self.most = max(self.most, len(self.alive))
        return Pending(result, None)


@pytest.mark.parametrize(("ahead", "most"), [(False, 1), (True, 2)])
def test_at_most_two_gathered_weights_are_alive(ahead, most):
    model, counted = Model(layers=6, ahead=ahead), Counted()
    model.row.start = model.column.start = counted.start
    for _ in range(3):
        model.step()
    assert counted.most == most


def test_memory_at_an_address_that_was_another_weights():
    """Weights replaced through `.data` twice may come back to the address of what was gathered."""
    cache, weight, layout = WeightCache(keep=1), weight_of(1), Layout()
    weight.data = first = torch.full((64, 64), 1.0)
    take(cache, weight, layout)
    address = weight.data_ptr()
    weight.data = torch.full((64, 64), 2.0)
    del first
    others = [torch.full((64, 64), 3.0) for _ in range(1000)]
    weight.data = next((t for t in others if t.data_ptr() == address), others[0])
    assert_bitwise_equal(take(cache, weight, layout), weight.detach())


def test_a_weight_that_a_program_computes_is_not_foreseen():
    """A cast or a product is another tensor at every pass: to foresee the last one would be a gather for nothing."""
    cache, layout, first, second = WeightCache(), Layout(), weight_of(1), weight_of(2)
    for _ in range(3):
        take(cache, first, layout)
        take(cache, second * 2, layout)
    assert [early for _, early in layout.started] == [False] * 6


# --- groups have nothing in common ----------------------------------------------------------------------------------

OTHERS = Group(None, 1, 2)


@pytest.mark.parametrize("between", [False, True])
def test_a_group_keeps_its_weights_whatever_another_one_does(between):
    """Two groups may be used by two threads, whose calls fall together in another way on every rank."""
    cache, mine, other = WeightCache(keep=1), Layout(), Layout(OTHERS)
    weight = weight_of(1)
    for value in range(3):
        take(cache, weight, mine)
        if between:
            take(cache, weight_of(value), other)
    assert mine.count(weight) == 1


# --- a rank's columns -----------------------------------------------------------------------------------------------

ONE_ROW = torch.arange(34.0, dtype=torch.bfloat16).view(2, 17)


@pytest.mark.parametrize(
    "weight",
    (
        torch.arange(48.0, dtype=torch.bfloat16).view(3, 16),
        torch.arange(51.0, dtype=torch.bfloat16)[3:].view(3, 16),
        torch.arange(48.0, dtype=torch.float64).view(16, 3).t(),
        torch.ones(3, 1).expand(3, 16),
        torch.arange(48.0).view(3, 16)._neg_view(),
        ONE_ROW[1:, :16]._neg_view(),
        ONE_ROW[:1, :16],
        torch.ones(3, 0, dtype=torch.bfloat16),
    ),
    ids=("plain", "unaligned", "transposed", "expanded", "negated", "unaligned and negated", "one row", "no columns"),
)
def test_the_columns_of_each_rank_stand_one_after_another(weight):
    by_rank = gemm_weights._columns_by_rank(weight, 2)
    assert not by_rank.is_neg()
    assert_bitwise_equal(by_rank, torch.cat(weight.resolve_neg().chunk(2, 1)))
