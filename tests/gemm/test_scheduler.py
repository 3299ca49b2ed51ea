"""The scheduler of gathered weights: what it may serve, what it starts ahead, and what it holds; on one process."""

import gc
import threading
import weakref

import pytest
import torch

from tp_invariant.comm.collectives import Group, Pending
from tp_invariant.gemm import scheduler as scheduling
from tp_invariant.gemm.scheduler import LIMIT, Phase, Schedule, Scheduler
from tp_invariant.testing import assert_bitwise_equal

GROUP = Group(None, 0, 2)


class Layout:
    """A WeightLayout that counts: what a gather of a weight would give, as things stood when it started."""

    def __init__(self, group=GROUP):
        self.group, self.started, self.alive = group, [], []

    def start(self, weight, *, early):
        result = weight.detach().clone()
        self.started.append((weight, early))
        return Pending(result, None)

    def count(self, weight, early=None):
        return sum(w is weight and early in (None, e) for w, e in self.started)


@pytest.fixture(autouse=True)
def gathers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scheduling, "start_weight", lambda weight, layout, *, early, **_: layout.start(weight, early=early)
        )
        yield


def weight_of(value):
    return torch.nn.Parameter(torch.full((2, 3), float(value)))


def take(scheduler, weight, layout, grad=True):
    """As gemm/owner_maps.py does: what is wanted, then what comes next."""
    result = scheduler.take_weight(weight, layout, grad=grad).wait()
    scheduler.start_next_weight(layout.group)
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


def test_clearing_forgets_everything():
    group = Group(None, 0, 2)
    scheduler, weight, layout, alive = Scheduler(keep=1), weight_of(1), Layout(group), weakref.ref(group)
    take(scheduler, weight, layout)
    scheduler.prefetch_weight(weight, Layout(group))
    del layout, group
    gc.collect()
    assert alive() is not None, "the control"
    scheduler.clear()
    gc.collect()
    assert alive() is None, "nor does it keep a group, and so a process group, for a weight that lives on"


# --- what may be served ---------------------------------------------------------------------------------------------


def test_a_prefetched_weight_is_used_once():
    scheduler, weight, layout = Scheduler(), weight_of(1), Layout()
    scheduler.prefetch_weight(weight, layout)
    assert (layout.count(weight), scheduler.holds_weight(weight, layout)) == (1, True)
    scheduler.prefetch_weight(weight, layout)
    assert layout.count(weight) == 1, "already on its way"
    assert_bitwise_equal(take(scheduler, weight, layout), weight.detach())
    assert (layout.count(weight), scheduler.holds_weight(weight, layout)) == (1, False)
    take(scheduler, weight, layout)
    assert layout.count(weight) == 2, "keep=0 keeps nothing"


def test_a_kept_weight_is_gathered_once():
    scheduler, weight, layout = Scheduler(keep=1), weight_of(1), Layout()
    for _ in range(3):
        assert_bitwise_equal(take(scheduler, weight, layout), weight.detach())
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
    scheduler, first, weight, layout = Scheduler(2 if how == "kept" else 0), weight_of(0), weight_of(1), Layout()
    if how == "prefetched":
        scheduler.prefetch_weight(weight, layout)
    elif how == "kept":
        take(scheduler, weight, layout)
    else:
        for used in (first, weight, first):  # weight came after first, so it is started
            take(scheduler, used, layout)
        assert layout.count(weight, early=True) == 1
    assert scheduler.holds_weight(weight, layout)
    before = layout.count(weight)
    with torch.no_grad():
        change(weight)
    assert not scheduler.holds_weight(weight, layout)
    assert_bitwise_equal(take(scheduler, weight, layout), weight.detach())
    assert layout.count(weight, early=False) >= 1
    assert layout.count(weight) == before + 1


def test_an_optimizer_step_invalidates():
    scheduler, weight, layout = Scheduler(keep=2), weight_of(1), Layout()
    before = take(scheduler, weight, layout)
    weight.grad = torch.ones(2, 3)
    torch.optim.SGD([weight], lr=0.5).step()
    assert_bitwise_equal(take(scheduler, weight, layout), before - 0.5)
    assert layout.count(weight) == 2


def test_prefetching_again_after_a_change_replaces_the_stale_entry():
    scheduler, weight, layout = Scheduler(), weight_of(1), Layout()
    scheduler.prefetch_weight(weight, layout)
    with torch.no_grad():
        weight.add_(1)
    scheduler.prefetch_weight(weight, layout)
    assert layout.count(weight) == 2
    assert_bitwise_equal(take(scheduler, weight, layout), weight.detach())
    assert layout.count(weight) == 2


def test_the_least_recently_used_goes_first():
    scheduler, layout = Scheduler(keep=2, ahead=False), Layout()
    weights = [weight_of(i) for i in range(3)]
    for i in (0, 1, 0, 2):  # 1 is the one not used for longest when 2 comes
        take(scheduler, weights[i], layout)
    assert [scheduler.holds_weight(w, layout) for w in weights] == [True, False, True]
    assert [layout.count(w) for w in weights] == [1, 1, 1]


def test_layouts_are_kept_apart():
    scheduler, weight, layouts = Scheduler(keep=4), weight_of(1), [Layout() for _ in range(4)]
    for layout in layouts:
        assert not scheduler.holds_weight(weight, layout)
        take(scheduler, weight, layout)
    assert [layout.count(weight) for layout in layouts] == [1] * 4


def test_clear_forgets_everything():
    scheduler, weight, layout = Scheduler(keep=2), weight_of(1), Layout()
    take(scheduler, weight, layout)
    scheduler.clear()
    assert not scheduler.holds_weight(weight, layout)
    take(scheduler, weight, layout)
    assert layout.count(weight) == 2


def test_inference_tensors_are_never_kept():
    """They have no version that would tell when they change."""
    with torch.inference_mode():
        weight = torch.ones(2, 3)
    scheduler, layout = Scheduler(keep=2), Layout()
    scheduler.prefetch_weight(weight, layout)
    assert (layout.count(weight), scheduler.holds_weight(weight, layout)) == (0, False)
    for _ in range(2):
        take(scheduler, weight, layout)
    assert (layout.count(weight), scheduler.holds_weight(weight, layout)) == (2, False)


def test_another_tensor_at_the_same_id_is_not_confused():
    scheduler, layout = Scheduler(), Layout()
    storage = torch.ones(2, 3)
    weight = storage.detach()
    take(scheduler, weight, layout)
    address, use = id(weight), scheduler._of(GROUP).use(weight, layout)
    layout.started.clear()
    del weight
    gc.collect()
    others = []
    while len(others) < 10000:  # same storage, same version: only the object is another one
        again = storage.detach()
        if id(again) == address:
            break
        others.append(again)
    else:
        pytest.fail("no tensor came to the same id")
    assert scheduler._of(GROUP).use(again, layout) is not use


# --- what is started ahead ------------------------------------------------------------------------------------------


class Model:
    """Layers' weights used as in training: forward in order, backward from the last; `recompute` repeats forwards."""

    def __init__(self, layers=3, recompute=False, **options):
        self.scheduler, self.recompute = Scheduler(**options), recompute
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
                assert_bitwise_equal(take(self.scheduler, row, self.row), row.detach())

            def backward(row=row, column=column):
                if self.recompute:
                    assert_bitwise_equal(take(self.scheduler, row, self.row), row.detach())
                assert_bitwise_equal(take(self.scheduler, column, self.column), column.detach())

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
        assert not model.scheduler._of(GROUP).early, "nothing is on its way when a step is over"


@pytest.mark.parametrize("ahead", [False, True])
def test_while_a_graph_of_whole_passes_is_captured(monkeypatch, ahead):
    model = Model()
    model.scheduler.ahead_in_graphs = ahead
    model.step()
    monkeypatch.setattr(scheduling, "_capturing", lambda weight: True)
    assert [model.step() for _ in range(2)] == [(1, 5) if ahead else (6, 0)] * 2
    assert not model.scheduler._of(GROUP).early, "all that was started in the graph has been taken in it"
    monkeypatch.undo()
    assert model.step() == (1, 5)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gather_does_not_pass_the_border_of_a_graph(monkeypatch, inside):
    """Neither one that eager work has started into the graph, nor one of a capture that failed out of it."""
    scheduler, first, second, layout = Scheduler(ahead_in_graphs=True), weight_of(1), weight_of(2), Layout()
    for weight in (first, second) * 2:
        take(scheduler, weight, layout)
    started = layout.count(second)
    monkeypatch.setattr(scheduling, "_capturing", lambda weight: inside)
    take(scheduler, first, layout)
    assert layout.count(second, early=True) and layout.count(second) == started + 1
    (early,) = scheduler._of(GROUP).early.values()
    monkeypatch.setattr(scheduling, "_capturing", lambda weight: not inside)
    assert not scheduler.holds_weight(second, layout)
    assert_bitwise_equal(take(scheduler, second, layout), second.detach())
    assert layout.count(second) == started + 2
    scheduler.clear()
    assert early.pending.waited != inside and not scheduler._of(GROUP).early, (
        "of a failed capture there is nothing to wait for"
    )


def test_ahead_off_starts_nothing():
    model = Model(ahead=False)
    assert [model.step() for _ in range(3)] == [(6, 0)] * 3


def test_an_optimizer_drops_what_is_on_its_way():
    """One that writes through .data between two uses of one pass: no version tells."""

    class ThroughData(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(1)

    def run(step):
        scheduler, layout, a, b = Scheduler(), Layout(), weight_of(1), weight_of(2)
        for used in (a, b, a):
            take(scheduler, used, layout)
        assert scheduler.holds_weight(b, layout)
        step(b)
        return take(scheduler, b, layout), b.detach()

    got, want = run(lambda b: ThroughData([b], lr=1.0).step())
    assert_bitwise_equal(got, want)
    with pytest.raises(AssertionError, match="elements differ"):  # the control: what no optimizer announces
        assert_bitwise_equal(*run(lambda b: b.data.sub_(1)))


def test_a_deviation_costs_a_gather_and_no_more():
    scheduler, layout = Scheduler(), Layout()
    a, b, c, other = (weight_of(i) for i in range(4))
    for used in (a, b, c, a, b):
        take(scheduler, used, layout)
    assert scheduler.holds_weight(c, layout)
    assert_bitwise_equal(take(scheduler, other, layout), other.detach())
    assert not scheduler.holds_weight(c, layout), "what is not used next is dropped"
    for used in (a, b, c) * 3:
        assert_bitwise_equal(take(scheduler, used, layout), used.detach())
    assert layout.started[-1][0] is c
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


def test_a_schedule_that_grows_too_long_learns_anew():
    schedule, hits = Schedule(), 0
    for use in range(2 * LIMIT + 10):
        hits += schedule.expected() == use % 3
        schedule.note(use % 3, Phase.INFERENCE)
    assert len(schedule._seen) <= LIMIT
    assert hits > 1.3 * LIMIT  # two of three: the next round's first is never expected


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


# --- whether a weight is alive changes nothing -----------------------------------------------------------------------


class Shapes(Layout):
    """Holds no weight, and counts which of its gathers were waited for."""

    def __init__(self):
        super().__init__()
        self.pending = []

    def start(self, weight, *, early):
        self.started.append((tuple(weight.shape), weight.dtype, early))
        self.pending.append(Pending(weight.detach().clone(), None))
        return self.pending[-1]


def alive_and_dead(program):
    """What program(scheduler, layout, weight, let_go) gives where `let_go(weight)` frees it and where garbage holds it.

    Garbage in reference cycles lives longer on one rank than on another, and a rank that gathers alone waits for ever.
    """
    results = []
    for alive in (True, False):
        garbage, scheduler, layout = [], Scheduler(), Shapes()
        weight = torch.nn.Parameter(torch.zeros(4, 5))
        reference = torch.utils.weak.TensorWeakRef(weight)
        if alive:
            garbage.append(weight)
        run = program(scheduler, layout, weight)
        next(run)
        del weight
        gc.collect()
        results.append((next(run), layout.started, [pending.waited for pending in layout.pending]))
        assert alive or reference() is None, "nor does the scheduler hold a weight that its model has let go"
    return results


def used_before_another_model(scheduler, layout, weight):
    shared, other = weight_of(0), weight_of(1)
    take(scheduler, shared, layout)
    take(scheduler, weight, layout)
    del weight
    yield
    take(scheduler, shared, layout)
    early = layout.started[-1]
    for _ in range(3):
        for used in (other, shared):
            assert_bitwise_equal(take(scheduler, used, layout), used.detach())
    yield early


def changed_before_another_model(scheduler, layout, weight):
    """It was used in float32 and is bfloat16 when it is let go."""
    used = used_before_another_model(scheduler, layout, weight)
    next(used)
    weight.data = weight.data.bfloat16()
    del weight
    yield
    yield next(used)


@pytest.mark.parametrize("program", [used_before_another_model, changed_before_another_model])
def test_what_is_started_does_not_depend_on_when_a_weight_dies(program):
    alive, dead = alive_and_dead(program)
    assert alive == dead
    assert alive[0] == ((4, 5), torch.float32, True), "the control: it was foreseen"


def prefetched_and_never_used(scheduler, layout, weight):
    other = weight_of(1)
    scheduler.prefetch_weight(weight, layout)
    del weight
    yield
    waited = []
    for _ in range(4):
        scheduler.prefetch_weight(other, layout)
        take(scheduler, other, layout)
        waited.append(layout.pending[0].waited)
    yield waited


def test_when_a_prefetched_weight_goes_does_not_depend_on_when_it_dies():
    """It is for the two passes that come next, and gone after them."""
    alive, dead = alive_and_dead(prefetched_and_never_used)
    assert alive == dead
    assert alive[0] == [False, False, False, True]


def test_a_prefetched_weight_does_not_end_inside_a_graph(monkeypatch):
    scheduler, layout, other = Scheduler(ahead_in_graphs=True), Shapes(), weight_of(1)
    scheduler.prefetch_weight(weight_of(0), layout)
    for capturing in (True, False):
        monkeypatch.setattr(scheduling, "_capturing", lambda weight, capturing=capturing: capturing)
        for _ in range(5):
            take(scheduler, other, layout)
        assert layout.pending[0].waited != capturing


def test_memory_at_an_address_that_was_another_weights():
    """Weights replaced through `.data` twice may come back to the address of what was gathered."""
    scheduler, weight, layout = Scheduler(keep=1), weight_of(1), Layout()
    weight.data = first = torch.full((64, 64), 1.0)
    take(scheduler, weight, layout)
    address = weight.data_ptr()
    weight.data = torch.full((64, 64), 2.0)
    del first
    others = [torch.full((64, 64), 3.0) for _ in range(1000)]
    weight.data = next((t for t in others if t.data_ptr() == address), others[0])
    assert_bitwise_equal(take(scheduler, weight, layout), weight.detach())


def test_a_weight_that_a_program_computes_is_not_foreseen():
    """A cast or a product is another tensor at every pass: to foresee the last one would be a gather for nothing."""
    scheduler, layout, first, second = Scheduler(), Shapes(), weight_of(1), weight_of(2)
    for _ in range(3):
        take(scheduler, first, layout)
        take(scheduler, second * 2, layout)
    assert [early for *_, early in layout.started] == [False] * 6


# --- groups have nothing in common ----------------------------------------------------------------------------------

OTHERS = Group(None, 1, 2)


@pytest.mark.parametrize("between", [False, True])
def test_a_group_keeps_its_weights_whatever_another_one_does(between):
    """Two groups may be used by two threads, whose calls fall together in another way on every rank."""
    scheduler, mine, other = Scheduler(keep=1), Layout(), Layout(OTHERS)
    weight = weight_of(1)
    for value in range(3):
        take(scheduler, weight, mine)
        if between:
            take(scheduler, weight_of(value), other)
    assert mine.count(weight) == 1


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_optimizer_of_another_thread_drops_nothing(elsewhere):
    scheduler, layout, a, b = Scheduler(), Layout(), weight_of(1), weight_of(2)
    for used in (a, b, a):
        take(scheduler, used, layout)

    def step():
        torch.optim.SGD([weight_of(3)], lr=1.0).step()

    if elsewhere:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    else:
        step()
    assert scheduler.holds_weight(b, layout) == elsewhere, "the control: one of its own thread does"


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
    by_rank = scheduling._columns_by_rank(weight, 2)
    assert not by_rank.is_neg()
    assert_bitwise_equal(by_rank, torch.cat(weight.resolve_neg().chunk(2, 1)))
