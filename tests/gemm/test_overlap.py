"""What layers start before they need it: the same bits as without, in an order that hides it, at a bounded cost."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm import wire
from tp_invariant.comm.collectives import Group, Pending, resolve_group
from tp_invariant.functional import linear
from tp_invariant.functional.regions import gather_sequence, scatter_sequence
from tp_invariant.gemm import gemm
from tp_invariant.gemm import scheduler as scheduling
from tp_invariant.gemm.scheduler import Scheduler, scheduler
from tp_invariant.testing import assert_bitwise_equal, full_grads, full_parameters, wide_randn


class Block(torch.nn.Module):
    """q, k and v share an input, gate and up another one; what stands for attention mixes features of a head alone."""

    def __init__(self, tp_group, sp, hidden=32, ffn=64, **options):
        super().__init__()
        place = dict(tp_group=tp_group, sequence_parallel=sp, bias=False, **options)
        column, row = dict(parallel_mode="column", **place), dict(parallel_mode="row", **place)
        self.norm = tpi.ParallelNorm(hidden, tp_group=tp_group, sequence_parallel=sp, device=options.get("device"))
        self.q, self.k, self.v = (tpi.Linear(hidden, hidden, **column) for _ in range(3))
        self.o = tpi.Linear(hidden, hidden, **row)
        self.gate, self.up = (tpi.Linear(hidden, ffn, **column) for _ in range(2))
        self.down = tpi.Linear(ffn, hidden, **row)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.o(self.q(h) * self.k(h) + self.v(h))
        return x + self.down(F.relu(self.gate(x)) * self.up(x))


def train(tp_group, *, sp=True, mode=True, on=True, keep=0, checkpointed=False, steps=2, sizes=(8, 32, 64), **options):
    """Steps of SGD over two micro-batches each; whole outputs, input gradients, gradients and parameters."""
    tokens, hidden, ffn = sizes
    device = options.get("device", "cpu")
    group = resolve_group(tp_group)
    scheduler.ahead = scheduler.share_tokens = on
    scheduler.keep = keep
    torch.manual_seed(0)
    results = {}
    with tpi.set_tp_invariant_mode(mode):
        blocks = [Block(tp_group, sp, hidden, ffn, **options) for _ in range(2)]
        model = torch.nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(steps):
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(10 * step + micro_batch)
                x = wide_randn(tokens, 2, hidden, generator=generator, spread=3).to(device).requires_grad_()
                y = scatter_sequence(x, group) if sp else x
                for block in blocks:
                    y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
                y = gather_sequence(y, group) if sp else y
                y.square().mean().backward()
                results[f"y {step} {micro_batch}"], results[f"dx {step} {micro_batch}"] = y.detach().cpu(), x.grad.cpu()
            for name, grad in full_grads(model).items():
                results[f"d {name} {step}"] = grad.cpu()
            optimizer.step()
            optimizer.zero_grad()
        results |= {name: parameter.cpu() for name, parameter in full_parameters(model).items()}
    return results


OTHER_WAYS = [dict(), dict(keep=3), dict(keep=100), dict(checkpointed=True)]


@pytest.mark.parametrize("sp", [True, False])
def test_same_bits_with_everything_switched_off(sp):
    def on_rank(tp_group):
        want = train(tp_group, sp=sp, on=False)
        for options in [*OTHER_WAYS, dict(owner_map="rows"), dict(owner_map="cols"), dict(owner_map="replicate")]:
            assert_bitwise_equal(train(tp_group, sp=sp, **options), want, str(options))
        return want

    world = 4 if sp else 2
    reference = train(None, sp=sp)
    for rank, got in enumerate(run_ranks(on_rank, world)):
        assert_bitwise_equal(got, reference, f"rank {rank}")
    for got in run_ranks(lambda tp_group: train(tp_group, sp=sp, mode=False, steps=1), world):  # the control
        assert any(not torch.equal(got[name], reference[name]) for name in got if name in reference)


# --- the order of what is started -----------------------------------------------------------------------------------


def trace(tp_group, **options):
    """Names of collectives as they start and of GEMMs as they run, in the second step's second micro-batch."""
    events = []

    def traced(fn, name):
        def call(*args, **kwargs):
            events.append(name)
            return fn(*args, **kwargs)

        return call

    def spy(a, b, *, bias=None, out_dtype=None):
        events.append("gemm")
        return gemm(None, a, b, bias=bias, out_dtype=out_dtype)

    group = resolve_group(tp_group)
    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(wire, "start_all_gather", traced(wire.start_all_gather, "gather"))
        patch.setattr(wire, "start_all_to_all", traced(wire.start_all_to_all, "exchange"))
        x = torch.randn(8, 16)
        column = tpi.Linear(16, 32, bias=False, parallel_mode="column", tp_group=tp_group, gemm_fn=spy, **options)
        row = tpi.Linear(32, 16, bias=False, parallel_mode="row", tp_group=tp_group, gemm_fn=spy, **options)
        for _ in range(3):
            events.clear()
            local = (scatter_sequence(x, group) if options.get("sequence_parallel") else x).requires_grad_()
            y = row(F.relu(column(local)))
            events.append("backward")
            scheduler.forget_tokens()  # where more layers follow it is gone by now
            y.sum().backward()
        return events


EXPECTED_ORDER = {
    # forward: x; z's rows to their owners, row's weight (a pass's first is never ahead), column's weight ahead
    True: "gather gemm exchange gather gather gemm backward "
    # dy; column's x beside row's dgrad and wgrad; dz's rows travel beside column's wgrad; dgrad last
    "gather gather gemm gemm exchange gemm gemm",
    # forward ends with the result's rows to all, backward with dx's
    False: "gemm exchange gather gather gemm gather backward gemm gemm exchange gemm gemm gather",
}


@pytest.mark.parametrize("sp", [True, False])
def test_what_travels_starts_before_what_hides_it(sp):
    for events in run_ranks(lambda tp_group: trace(tp_group, sequence_parallel=sp, owner_map="rows"), 2):
        assert " ".join(events) == EXPECTED_ORDER[sp]


def count_gathers(tp_group, sp, checkpointed, on):
    """How many gathers of tokens, and weights gathered ahead, one block's training starts in the last of four steps."""
    group = resolve_group(tp_group)
    scheduler.ahead = scheduler.share_tokens = on
    counts = {"tokens": 0, "ahead": 0}
    start_next, gather = scheduler.start_next_weight, scheduling.start_gather_dim

    def start_gather_dim(*args, **options):
        counts["tokens"] += 1
        return gather(*args, **options)

    def counted_start_next(of):
        before = scheduler._of(of).early.get(False)
        start_next(of)
        counts["ahead"] += scheduler._of(of).early.get(False) is not before

    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(scheduling, "start_gather_dim", start_gather_dim)
        patch.setattr(scheduler, "start_next_weight", counted_start_next)
        block = Block(tp_group, sp)
        for _ in range(4):
            counts["tokens"] = counts["ahead"] = 0
            x = torch.randn(8 // group.size, 32).requires_grad_()
            y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            y.sum().backward()
        held = scheduler._of(group).shared
        return counts["tokens"], counts["ahead"], held is None or held.pending is None


def test_shared_inputs_are_gathered_once():
    """Two inputs of five column-parallel layers, in forward and in backward; nothing is left when a step is over.

    The last gather of the forward is the first that backward needs, so there are three.
    """
    both = [run_ranks(lambda tp_group, on=on: count_gathers(tp_group, True, False, on), 2) for on in (True, False)]
    # 2 row-parallel forwards and 5 column-parallel dgrads, of which the first is not foreseen
    assert both[0] == [(3, 6, True)] * 2
    assert both[1] == [(10, 0, True)] * 2


def gathered_inputs(tp_group):
    """Which micro-batch's input is gathered each time: two forwards, then their backwards, the first one first."""
    seen, gather = [], scheduling.start_gather_dim

    def start_gather_dim(x, dim, group, **options):
        seen.append(x.flatten()[0].item())
        return gather(x, dim, group)

    options = dict(bias=False, tp_group=tp_group, sequence_parallel=True)
    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(scheduling, "start_gather_dim", start_gather_dim)
        column = tpi.Linear(16, 32, parallel_mode="column", **options)
        row = tpi.Linear(32, 16, parallel_mode="row", **options)
        inputs = [torch.full((4, 16), float(i), requires_grad=True) for i in range(2)]
        for y in [row(F.relu(column(x))) for x in inputs]:
            seen.append("backward")
            y.sum().backward()
    return seen


def test_micro_batches_in_flight_are_told_apart():
    """A row-parallel layer's backward starts the gather for the call that came before its own, and for no other."""
    for seen in run_ranks(gathered_inputs, 2):
        assert seen == [0.0, 1.0, "backward", 0.0, "backward", 1.0]


def test_weights_are_foreseen_under_checkpointing():
    """Saved tensors come back as others with the same memory; the recomputed forward uses its weights once more."""
    for tokens, ahead, held_nothing in run_ranks(lambda tp_group: count_gathers(tp_group, True, True, True), 2):
        assert (ahead, held_nothing) == (8, True)
        assert tokens <= 2 + 2 + 5


def weights_asked_for(tp_group):
    """Whether backward asks for the layer's own weight: the layer lives, or is let go."""
    asked, right = [], []
    with pytest.MonkeyPatch.context() as patch:
        product = lambda a, weight, **_: asked.append(weight.local) or (lambda: a)  # noqa: E731
        patch.setattr(linear, "start_product", product)
        for alive in (True, False):
            with tpi.set_tp_invariant_mode(True):
                layer = tpi.Linear(4, 8, bias=False, parallel_mode="column", tp_group=tp_group).requires_grad_(False)
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
                    y = layer(torch.randn(2, 4, requires_grad=True))
            weight, garbage = torch.utils.weak.TensorWeakRef(layer.weight), layer if alive else None
            del layer
            y.sum().backward()
            right.append(asked[-1] is weight())
            del garbage
    return right


def test_which_weight_backward_asks_for_does_not_depend_on_what_is_garbage():
    """A frozen layer is let go before its backward, where hooks on saved tensors return others with their memory."""
    assert run_ranks(weights_asked_for, 2) == [[True, True]] * 2


# --- the gather that layers share -----------------------------------------------------------------------------------

TWO = Group(None, 0, 2)


@pytest.fixture
def starts(monkeypatch):
    """Every x that is gathered, as it was."""
    seen = []

    def start(x, dim, group, **options):
        seen.append(x.detach().clone())
        return Pending(torch.cat([x.detach()] * group.size, dim), None)

    monkeypatch.setattr(scheduling, "start_gather_dim", start)
    return seen


def users(count):
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]


def take(gathers, x, user, dim=0):
    result = gathers.take_tokens(x, dim, TWO, user).wait()
    assert_bitwise_equal(result, torch.cat([x.detach()] * 2, dim))
    return result


def test_layers_share_a_gather_and_the_last_lets_it_go(starts):
    gathers, (q, k, v, up) = Scheduler(), users(4)
    for step in range(4):
        x, other = torch.randn(2, 3), torch.randn(2, 3)
        for user in (q, k, v):
            take(gathers, x, user)
        assert (gathers._of(TWO).shared is None) == (step > 0), "from the second time on it is known that v is the last"
        take(gathers, other, up)
        assert len(starts) == 2 * (step + 1)
    x = torch.randn(2, 3)
    for user in (v, q, k):  # v is the last no more: gathered twice once, then not again
        take(gathers, x, user)
    assert len(starts) == 10
    x = torch.randn(2, 3)
    for user in (v, q, k):
        take(gathers, x, user)
    assert len(starts) == 11


@pytest.mark.parametrize("alive", [True, False])
def test_who_was_followed_once_is_not_taken_for_the_last(starts, alive):
    """As in an evaluation amid training: whether its x is dead already, which ranks need not share, changes nothing."""
    gathers, (q, k) = Scheduler(), users(2)
    x = torch.randn(2, 3)
    for user in (q, k):
        take(gathers, x, user)
    x = torch.randn(2, 3)
    take(gathers, x, q)  # the evaluation
    keep = x if alive else None
    x = torch.randn(2, 3)
    for user in (q, k):
        take(gathers, x, user)
    assert len(starts) == 3
    del keep


def test_what_is_learnt_does_not_depend_on_when_an_input_dies(starts):
    """As when checkpointing runs a layer again in backward: k is the last to ask, then the first of others.

    Garbage in cycles lives longer on one rank than on another, and a rank that gathers alone waits for ever.
    """
    counts = []
    for alive in (True, False):
        gathers, (q, k) = Scheduler(), users(2)
        starts.clear()
        x = torch.randn(2, 3)
        for user in (q, k):
            take(gathers, x, user)
        keep = x if alive else None
        del x
        assert (gathers._of(TWO).shared.pending is not None) == alive, "the control"
        for _ in range(3):
            x = torch.randn(2, 3)
            for user in (k, q):
                take(gathers, x, user)
        counts.append(len(starts))
        del keep
    assert counts[0] == counts[1]


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].zero_()], ids=["whole", "view"])
def test_an_input_changed_in_place_is_gathered_again(starts, change):
    gathers, (q, k) = Scheduler(), users(2)
    x = torch.randn(2, 3)
    take(gathers, x, q)
    change(x)
    take(gathers, x, k)
    take(gathers, x, k, dim=1)
    assert len(starts) == 3


def test_a_layer_gets_a_gather_once(starts):
    """A buffer may hold other values at the next call, written by what raises no version."""
    gathers, (q, k) = Scheduler(), users(2)
    x = torch.randn(2, 3)
    for _ in range(3):
        take(gathers, x, q)
        take(gathers, x, k)
        x.data.add_(1)
    assert len(starts) == 3


def test_what_is_never_shared(starts):
    gathers, (q, k) = Scheduler(), users(2)
    with torch.inference_mode():
        x = torch.randn(2, 3)
        for user in (q, k):
            take(gathers, x, user)
    assert (len(starts), gathers._of(TWO).shared) == (2, None)
    gathers.share_tokens = False
    x = torch.randn(2, 3)
    for user in (q, k):
        take(gathers, x, user)
    assert (len(starts), gathers._of(TWO).shared) == (4, None)


def test_one_gather_is_held_and_none_of_a_dead_input(starts):
    gathers, (q, *_) = Scheduler(), users(1)
    held = []
    for _ in range(3):
        x = torch.randn(2, 3)
        held.append(torch.utils.weak.TensorWeakRef(take(gathers, x, q, dim=len(held) % 2)))
        assert sum(ref() is not None for ref in held) <= 1
    gathers, x = Scheduler(), torch.randn(2, 3)
    take(gathers, x, q)
    assert gathers._of(TWO).shared.pending is not None, "the control"
    del x
    gc.collect()
    assert gathers._of(TWO).shared.pending is None


@pytest.mark.parametrize("reuse", [True, False])
def test_what_is_not_shared_ends_what_is_held(monkeypatch, starts, reuse):
    """A buffer goes back at the same place on a rank whose x is dead and on one where garbage keeps it alive."""
    released = []
    monkeypatch.setattr(Pending, "release", lambda self: released.append(self))
    monkeypatch.setattr(Pending, "leased", True)
    for alive in (True, False):
        gathers, (q, k) = Scheduler(), users(2)
        x = torch.randn(2, 3)
        take(gathers, x, q)
        keep = x if alive else None
        del x
        gc.collect()
        assert (gathers._of(TWO).shared.pending is not None, released) == (alive, []), "the control"
        gathers.share_tokens = reuse
        with torch.inference_mode(reuse):
            take(gathers, torch.randn(2, 3), k)
        assert (gathers._of(TWO).shared, len(released), list(gathers._of(TWO).last_user.values())) == (None, 1, [True])
        released.clear()
        del keep


@pytest.mark.parametrize("between", [False, True])
def test_groups_hold_what_they_gathered_apart(starts, between):
    """Two groups may be used by two threads, whose calls fall together in another way on every rank."""
    gathers, (q, k, other) = Scheduler(), users(3)
    for step in range(3):
        x = torch.randn(2, 3)
        take(gathers, x, q)
        if between:
            gathers.take_tokens(torch.randn(2, 3), 0, Group(None, 1, 2), other).wait()
        take(gathers, x, k)
        assert len(starts) == (step + 1) * (1 + between)


def test_what_a_row_parallel_layer_starts(starts):
    """Nothing for a call whose backward is over, whose input is not held, of another group, or outside of a graph."""
    gathers, x = Scheduler(), torch.randn(2, 3)
    use = gathers.called_with(x, 0, TWO)
    assert gathers.tokens_before(TWO) is use
    assert gathers.tokens_before(Group(None, 0, 3)) is None
    gathers.start_tokens(gathers.tokens_before(TWO))
    assert len(starts) == 1
    gathers.forget_tokens()
    use.x = None
    gathers.start_tokens(use)
    gathers.start_tokens(gathers.called_with(None, 0, TWO))
    gathers.called_with(x, 0, TWO)
    gathers.enter("a graph")
    gathers.start_tokens(gathers.tokens_before(TWO))
    assert len(starts) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_frozen_layer_takes_the_place_of_the_call_before(starts, shared):
    """Its backward gathers no tokens. The call before is still the next one if it has the same input (q and k)."""
    gathers, (x, other) = Scheduler(), (torch.randn(2, 3), torch.randn(2, 3))
    use = gathers.called_with(x, 0, TWO)
    assert gathers.called_with(x if shared else other, 0, TWO, gathers=False) is None
    assert gathers.tokens_before(TWO) is (use if shared else None)
    gathers.start_tokens(gathers.tokens_before(TWO))
    assert len(starts) == shared
    gathers.called_with(None, 0, TWO, gathers=False)
    assert gathers.tokens_before(TWO) is None


def frozen_block_last(tp_group):
    """A backward of two blocks: where row-parallel layers may start a gather, and the features of what is gathered."""
    seen, gather, start = [], scheduling.start_gather_dim, scheduler.start_tokens

    def start_gather_dim(x, dim, group, **options):
        seen.append(x.shape[-1])
        return gather(x, dim, group)

    def start_tokens(use):
        seen.append("row")
        start(use)

    options = dict(bias=False, tp_group=tp_group, sequence_parallel=True)
    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(scheduling, "start_gather_dim", start_gather_dim)
        patch.setattr(scheduler, "start_tokens", start_tokens)
        sizes = [(16, 32, "column"), (32, 8, "row"), (8, 32, "column"), (32, 16, "row")]
        layers = [tpi.Linear(k, n, parallel_mode=mode, **options) for k, n, mode in sizes]
        layers[2].requires_grad_(False)
        y = torch.nn.Sequential(*layers)(torch.randn(2, 16, requires_grad=True))
        seen.clear()
        y.sum().backward()
    return seen


def test_the_tokens_of_a_block_before_a_frozen_one_are_gathered_beside_its_own_layers():
    for seen in run_ranks(frozen_block_last, 2):
        assert seen == ["row", "row", 16]


def test_one_started_early_is_taken(starts):
    gathers, (q, k) = Scheduler(), users(2)
    x = torch.randn(2, 3)
    use = gathers.called_with(x, 0, TWO)
    gathers.start_tokens(use)
    gathers.start_tokens(use)
    take(gathers, x, q)
    take(gathers, x, k)
    assert len(starts) == 1


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

    monkeypatch.setattr(scheduling, "start_gather_dim", start)
    monkeypatch.setattr(scheduling, "is_capturing", lambda: True)
    gathers, (user,) = Scheduler(), users(1)
    monkeypatch.setattr(gathers, "_tokens_key", lambda x, dim, group: None)  # as in a capture
    x, other = torch.randn(2, 3), torch.randn(2, 3)
    use, of_other = gathers.called_with(x, 0, TWO), gathers.called_with(other, 0, TWO)
    gathers.start_tokens(use)
    assert not started
    gathers.ahead_in_graphs = True
    gathers.start_tokens(use)
    assert gathers.take_tokens(x, 0, TWO, user) is started[0]
    assert started[0].exclusive and (started[0].waits, started[0].releases) == (0, 0), "whoever took it does that"
    gathers.start_tokens(use)
    assert gathers.take_tokens(other, 0, TWO, user) is started[2]
    gathers.start_tokens(use)
    gathers.start_tokens(of_other)
    assert [(p.waits, p.releases) for p in started] == [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]
    monkeypatch.setattr(scheduling, "is_capturing", lambda: False)  # that capture is over, or has failed
    assert gathers.take_tokens(other, 0, TWO, user) is started[5]
    assert (started[4].waits, started[4].releases) == (0, 0)


def test_what_the_last_user_was_given_is_freed_when_it_is_through(starts):
    """At once, where no leased buffer has to go back."""
    gathers, (q, k) = Scheduler(), users(2)
    for step in range(2):
        x = torch.randn(2, 3)
        take(gathers, x, q)
        result = torch.utils.weak.TensorWeakRef(take(gathers, x, k))
        assert (result() is None) == (step == 1), "the control: from the second time on k is known to be the last"


def test_a_call_without_a_backward_does_not_hold_its_input():
    """Which holds the graph that made it, and what that has saved."""
    gathers, x = Scheduler(), torch.ones(3, requires_grad=True) * 2
    use, alias = gathers.called_with(x, 0, TWO), torch.utils.weak.TensorWeakRef(x)
    assert use is gathers.tokens_before(TWO)
    del x
    assert alias() is None


@pytest.mark.parametrize("before", [False, True])
def test_what_a_row_parallel_layer_starts_does_not_depend_on_when_an_input_dies(starts, before):
    """`before`: the input's gather is the last one that was started."""
    shapes = []
    for alive in (True, False):
        gathers, (q, k) = Scheduler(), users(2)
        x, other = torch.randn(2, 3), torch.randn(4, 5)
        use = gathers.called_with(x, 0, TWO)
        if before:
            take(gathers, x, q)
        keep = x if alive else None
        del x
        for _ in range(2):
            gathers.start_tokens(use)
        take(gathers, other, k)
        gathers.start_tokens(use)
        shapes.append([x.shape for x in starts])
        starts.clear()
        del keep
    assert shapes[0] == shapes[1] == [(2, 3), (4, 5), (2, 3)]


def test_an_input_whose_memory_was_away_is_gathered_again(starts):
    """As where a tool frees an activation after forward and fills it again before its layer's backward."""
    gathers, (q, k) = Scheduler(), users(2)
    x = torch.randn(2, 3)
    use, values, memory = gathers.called_with(x, 0, TWO), x.clone().untyped_storage(), x.untyped_storage()
    memory.resize_(0)
    gathers.start_tokens(use)
    memory.resize_(values.nbytes())
    memory.copy_(values)
    take(gathers, x, q)
    take(gathers, x, k)
    assert len(starts) == 2


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_an_input_that_dies_in_a_capture_waits_for_nothing_there(monkeypatch, leased, taken):
    """Nor does a leased buffer go back there: both come when the group asks next, outside of the graph."""
    monkeypatch.setattr(
        scheduling, "start_gather_dim", lambda x, dim, group, **options: Counted(torch.cat([x, x]), None)
    )
    monkeypatch.setattr(Counted, "leased", leased)
    gathers, (user,) = Scheduler(), users(1)
    x = torch.randn(2, 3)
    gathers.start_tokens(gathers.called_with(x, 0, TWO))
    pending = gathers._of(TWO).shared.pending
    if taken:
        gathers.take_tokens(x, 0, TWO, user).wait()
    monkeypatch.setattr(scheduling, "is_capturing", lambda: True)
    del x
    gc.collect()
    gathers.take_tokens(torch.randn(2, 3), 0, TWO, user)
    assert (pending.waits, pending.releases) == (taken, 0)
    monkeypatch.setattr(scheduling, "is_capturing", lambda: False)
    gathers.take_tokens(torch.randn(2, 3), 0, TWO, user)
    assert (pending.waits, pending.releases) == (1, leased or not taken)


# --- on GPUs --------------------------------------------------------------------------------------------------------

GPUS = torch.cuda.device_count()


def train_while_busy(tp_group, **options):
    """`train` while another stream keeps the GPU busy."""
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        with torch.cuda.stream(side):
            busy @ busy
    results = train(tp_group, device="cuda", dtype=torch.float32, sizes=(256, 1024, 2048), **options)
    torch.cuda.synchronize()
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("degree", [2, 4])
def test_same_bits_on_gpus(degree, sp):
    if degree > GPUS:
        pytest.skip(f"needs {degree} GPUs")

    def on_rank(tp_group):
        want = train_while_busy(tp_group, sp=sp, on=False)
        for options in [*OTHER_WAYS, dict(on=False)] * 2:
            assert_bitwise_equal(train_while_busy(tp_group, sp=sp, **options), want, str(options))
        return want

    reference = testing.run_ranks(lambda tp_group: train_while_busy(tp_group, sp=sp), 1, device="cuda")[0]
    for rank, got in enumerate(testing.run_ranks(on_rank, degree, device="cuda")):
        assert_bitwise_equal(got, reference, f"rank {rank}")


def decode_in_a_graph(tp_group, keep):
    """A block's forward of four tokens, eagerly and replayed, before and after a change of the weights."""
    scheduler.keep = keep
    torch.manual_seed(0)
    results = []
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        block = Block(tp_group, False, 1024, 2048, device="cuda", dtype=torch.bfloat16).bfloat16()
        x = torch.randn(4, 1, 1024, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            eager = block(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = block(x)
        for _ in range(2):
            x.copy_(torch.randn(4, 1, 1024, generator=torch.Generator().manual_seed(1)))
            eager = block(x)
            if not keep:  # gathered inside the graph, so it sees changes
                for parameter in block.parameters():
                    parameter.mul_(2)
                eager = block(x)
            graph.replay()
            torch.cuda.synchronize()
            assert_bitwise_equal(captured.cpu(), eager.cpu())
            results.append(eager.cpu())
    return results


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("keep", [0, 100])
def test_cuda_graphs(keep):
    reference = testing.run_ranks(decode_in_a_graph, 1, keep, device="cuda")[0]
    for got in testing.run_ranks(decode_in_a_graph, 2, keep, device="cuda"):
        assert_bitwise_equal(got, reference)


def train_in_a_graph(tp_group, ahead):
    """A block's training step, eagerly and replayed, before and after a change of the weights."""
    scheduler.ahead_in_graphs = ahead
    torch.manual_seed(0)
    results = []
    try:
        with tpi.set_tp_invariant_mode(True):
            block = Block(tp_group, True, 1024, 2048, device="cuda", dtype=torch.bfloat16).bfloat16()
            rank, size = tp_group.rank(), tp_group.size()
            x = torch.zeros(512 // size, 1, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

            def step():
                y = block(x)
                return y.detach(), *torch.autograd.grad(y.square().sum(), (x, *block.parameters()))

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
            for seed in range(2):
                whole = torch.randn(512, 1, 1024, generator=torch.Generator().manual_seed(seed))
                with torch.no_grad():
                    x.copy_(whole.chunk(size)[rank])
                    for parameter in block.parameters():
                        parameter.mul_(2)
                eager = [result.cpu() for result in step()]
                graph.replay()
                torch.cuda.synchronize()
                assert_bitwise_equal([result.cpu() for result in captured], eager)
                results.append(eager[0])
    finally:
        scheduler.ahead_in_graphs = False
    return results


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_training_step_in_a_graph(ahead):
    reference = testing.run_ranks(train_in_a_graph, 1, ahead, device="cuda")[0]
    for rank, got in enumerate(testing.run_ranks(train_in_a_graph, 2, ahead, device="cuda")):
        want = [whole.chunk(2)[rank] for whole in reference]
        assert_bitwise_equal(got, want)
