"""What layers start before they need it: the same bits as without, in an order that hides it, at a bounded cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm import collectives
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.functional import linear
from tp_invariant.functional.regions import gather_sequence, scatter_sequence
from tp_invariant.gemm import gemm, tokens
from tp_invariant.gemm.tokens import shared_tokens
from tp_invariant.gemm.weights import weight_cache
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
    weight_cache.ahead = shared_tokens.enabled = on
    weight_cache.keep = keep
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
        for options, owner_map in zip(OTHER_WAYS, ("auto", "rows", "cols", "replicate"), strict=True):
            got = train(tp_group, sp=sp, owner_map=owner_map, **options)
            assert_bitwise_equal(got, want, f"{options}, {owner_map}")
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
        patch.setattr(collectives, "start_all_gather", traced(collectives.start_all_gather, "gather"))
        patch.setattr(collectives, "start_all_to_all", traced(collectives.start_all_to_all, "exchange"))
        x = torch.randn(8, 16)
        column = tpi.Linear(16, 32, bias=False, parallel_mode="column", tp_group=tp_group, gemm_fn=spy, **options)
        row = tpi.Linear(32, 16, bias=False, parallel_mode="row", tp_group=tp_group, gemm_fn=spy, **options)
        for _ in range(3):
            events.clear()
            local = (scatter_sequence(x, group) if options.get("sequence_parallel") else x).requires_grad_()
            y = row(F.relu(column(local)))
            events.append("backward")
            shared_tokens.clear()  # where more layers follow it is gone by now
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
    weight_cache.ahead = shared_tokens.enabled = on
    counts = {"tokens": 0, "ahead": 0}
    start_next, gather = weight_cache.start_next, tokens.start_gather_dim

    def start_gather_dim(*args, **options):
        counts["tokens"] += 1
        return gather(*args, **options)

    def counted_start_next(of):
        before = weight_cache._groups[of].early.get(False)
        start_next(of)
        counts["ahead"] += weight_cache._groups[of].early.get(False) is not before

    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(tokens, "start_gather_dim", start_gather_dim)
        patch.setattr(weight_cache, "start_next", counted_start_next)
        block = Block(tp_group, sp)
        for _ in range(4):
            counts["tokens"] = counts["ahead"] = 0
            x = (torch.randn(8 // group.size, 32) + group.rank).requires_grad_()
            y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            y.sum().backward()
        return counts["tokens"], counts["ahead"]


def test_shared_inputs_are_gathered_once():
    """Two inputs of five column-parallel layers, in forward and in backward.

    The last gather of the forward is the first that backward needs, so there are three.
    """
    both = [run_ranks(lambda tp_group, on=on: count_gathers(tp_group, True, False, on), 2) for on in (True, False)]
    # 2 row-parallel forwards and 5 column-parallel dgrads, of which the first is not foreseen
    assert both[0] == [(3, 6)] * 2
    assert both[1] == [(10, 0)] * 2


def gathered_inputs(tp_group):
    """Which micro-batch's input is gathered each time: two forwards, then their backwards, the first one first."""
    seen, gather = [], tokens.start_gather_dim

    def start_gather_dim(x, dim, group, **options):
        seen.append(x.flatten()[0].item())
        return gather(x, dim, group)

    options = dict(bias=False, tp_group=tp_group, sequence_parallel=True)
    with pytest.MonkeyPatch.context() as patch, tpi.set_tp_invariant_mode(True):
        patch.setattr(tokens, "start_gather_dim", start_gather_dim)
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
    for gathers, ahead in run_ranks(lambda tp_group: count_gathers(tp_group, True, True, True), 2):
        assert ahead == 8
        assert gathers <= 2 + 2 + 5


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
    weight_cache.keep = keep
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
    weight_cache.ahead_in_graphs = ahead
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
        weight_cache.ahead_in_graphs = False
    return results


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_training_step_in_a_graph(ahead):
    reference = testing.run_ranks(train_in_a_graph, 1, ahead, device="cuda")[0]
    for rank, got in enumerate(testing.run_ranks(train_in_a_graph, 2, ahead, device="cuda")):
        want = [whole.chunk(2)[rank] for whole in reference]
        assert_bitwise_equal(got, want)
