"""Ranks that make different calls later than the first, on gloo: every rank gets an error, and no process aborts."""

import copy
import itertools
import mmap
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import meshes
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant.comm import call_records
from tp_invariant.comm.call_records import ALL_GATHER, ALL_REDUCE, BYTES, CallRecords, call_context
from tp_invariant.comm.collectives import gather_major, resolve_group
from tp_invariant.consistency import agreement
from tp_invariant.functional.regions import gather_sequence
from tp_invariant.layers import parallel_norm, vocab_embedding

ODD = 1  # the rank that is not like the others


def another_group(tp_group, name):
    """A gloo group of the same ranks that no other case uses: after different calls a group cannot be used again."""
    parent = resolve_group(tp_group).process_group
    ranks = dist.get_process_group_ranks(parent)
    made, _ = c10d._new_process_group_helper(
        len(ranks), parent.rank(), ranks, dist.Backend("gloo"), c10d._get_default_store(), c10d.GroupName(name),
        timeout=timedelta(seconds=3000),  # longer than run_ranks waits: no error is of a group whose time is over
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return resolve_group(made)


# --- ranks that part ------------------------------------------------------------------------------------------------


def blocks(group, count=2, **options):
    modules = []
    for _ in range(count):
        modules.append(tpi.Linear(12, 24, parallel_mode="column", tp_group=group, **options))
        modules.append(tpi.Linear(24, 12, parallel_mode="row", tp_group=group, **options))
    return nn.Sequential(*modules)


def step(model, tokens=4, dtype=torch.float32, backward=True):
    y = model(torch.ones(tokens, 12, dtype=dtype, requires_grad=True))
    if backward:
        y.sum().backward()


def other_dtype(group, odd):
    model = blocks(group)
    step(model)
    step(model.bfloat16() if odd else model, dtype=torch.bfloat16 if odd else torch.float32)


def other_length(group, odd):
    model = blocks(group)
    step(model)
    step(model, 6 if odd else 4)


def length_seen_before(group, odd):
    model = blocks(group, sequence_parallel=True)
    for tokens in (2, 4, 4 if odd else 2):
        step(model, tokens)


def more_layers(group, odd):
    step(blocks(group, 2 if odd else 3))


def fewer_layers_later(group, odd):
    model = blocks(group, 3)
    step(model)
    step(model[:4] if odd else model)
    step(model)


def one_forward_more(group, odd):
    model = blocks(group)
    step(model)
    if odd:
        step(model, backward=False)
    step(model)


def swapped_later(group, odd):
    """Layers of one shape that have been called before: their messages have the same sizes."""
    layers = [tpi.Linear(12, 12, parallel_mode="row", tp_group=group, bias=False) for _ in range(2)]
    x = torch.ones(4, 12 // group.size)
    for layer in (*layers, *(reversed(layers) if odd else layers)):
        layer(x)


def another_call_than_a_layers(group, odd):
    layer = tpi.Linear(12, 12, parallel_mode="column", tp_group=group, gather_output=True)
    x = torch.ones(4, 12)
    for _ in range(2):
        gather_sequence(layer(x)[:, :4], group)
    gather_sequence(x[:, :4], group) if odd else layer(x)


IN_ROW = r"in the forward of layer \d of the group, Linear\(24, 12, 'row'\)"
PARTED = {
    other_dtype: r"rank 1 asks .* new to it: .*'column'.* \| the dtype of x is 'torch.bfloat16'.* number is 1",
    other_length: r"rank 1 asks .* new to it: .*'column'.* \| the shape of x is \(6, 12\) .*the layer's number is 1",
    length_seen_before: r"\(\d+, 12\) torch.float32 in the forward of layer 1 .*; rank 1 starts .* in the forward of",
    more_layers: r"rank 0, 2 asks .* new to it: .*column.*the layer's number is 5.*; rank 1 starts an all-\w+ of ",
    fewer_layers_later: r"rank 0, 2 starts .* in the forward of layer 6 .*; rank 1 starts an all-\w+ of [^;]*32\.",
    one_forward_more: rf"rank 0, 2 starts an all-\w+ of [^;]*float32; rank 1 starts .* {IN_ROW}",
    swapped_later: r"in the forward of layer 1 .*'row'.*; rank 1 starts .* in the forward of layer 2 .*'row'",
    another_call_than_a_layers: r"forward of layer 1 of .*; rank 1 starts an all-gather of \(4, 4\) torch.float32\.",
}


def part(tp_group, cases, enabled):
    """{case: the error of this rank}, each on a group of its own."""
    found = {}
    with tpi.set_tp_invariant_mode(enabled), pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_records, "_ANSWER_SECONDS", 200.0)  # every rank answers, a busy one later
        for case in cases:
            name = case.__name__
            group = another_group(tp_group, f"parted {name} {enabled}")
            torch.manual_seed(0)  # ranks have made different layers, and whole parameters are compared
            try:
                case(group, group.rank == ODD)
                found[name] = "nothing"
            except RuntimeError as error:
                found[name] = str(error)
                with pytest.raises(RuntimeError, match="This group cannot be used any more"):
                    gather_major(torch.ones(2), group)
    return found


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_ranks_that_make_different_calls_get_an_error(enabled):
    ranks = run_ranks(part, 3, list(PARTED), enabled)
    for case, pattern in PARTED.items():
        texts = [found[case.__name__] for found in ranks]
        assert len(set(texts)) == 1, texts
        assert texts[0].startswith("the 3 ranks of tp_group make different calls. At collective "), (case, texts[0])
        assert re.search(pattern, texts[0]), (case, texts[0])


# --- ranks that do not ----------------------------------------------------------------------------------------------


def in_step(tp_group):
    """Calls that ranks may make without telling each other, and calls that a record must not find different."""
    group = another_group(tp_group, "in_step")
    with tpi.set_tp_invariant_mode(True):
        model = blocks(group)
        uneven = tpi.Linear(12, 7, parallel_mode="row", tp_group=group, owner_map="cols")
        column = tpi.Linear(8, 9, parallel_mode="column", tp_group=group)
        for tokens in (1, 5, 4):  # what a rank sends differs with an uneven split
            uneven(torch.ones(tokens, 4)).sum().backward()
            x = torch.ones(tokens, 12, requires_grad=True)
            checkpoint(model, x, use_reentrant=False).sum().backward()
            model(x).sum().backward()
        with torch.no_grad():
            column(torch.ones(2, 8))
            if group.rank == 0:  # moves nothing
                column(torch.ones(2, 8))
        if group.rank == 0:
            time.sleep(0.5)  # the others look at the records while they wait
        total = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=group)
    return float(total), call_records._records[group.process_group]._count


def test_ranks_that_make_equal_calls_get_no_error():
    results = run_ranks(in_step, 3)
    assert len(set(results)) == 1, results
    assert results[0][1] > 50


def in_threads(tp_group):
    """Each thread has a model and a group of its own; the order in which threads run differs between ranks."""
    groups = [another_group(tp_group, f"thread {number}") for number in range(3)]
    models = [blocks(group) for group in groups]

    def steps(model):
        for _ in range(8):
            step(model)

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(steps, models))


def test_threads_do_not_confuse_each_others_layers():
    run_ranks(in_threads, 2)


def without_memory(tp_group, odd_alone):
    group = another_group(tp_group, "without_memory")
    if not odd_alone or group.rank == ODD:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call_records.mmap, "mmap", lambda *args: (_ for _ in ()).throw(OSError("no memory")))
            agreement.compare_environments(group, torch.device("cpu"))
    else:
        agreement.compare_environments(group, torch.device("cpu"))
    step(blocks(group))
    return group.process_group in call_records._records


def test_ranks_that_share_no_memory_go_without():
    assert run_ranks(without_memory, 2, True) == [False] * 2


# --- the records by themselves --------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(call_records, "_ANSWER_SECONDS", 0.05)
    memory = mmap.mmap(-1, 2 * BYTES)
    return CallRecords(memory, 0, 2), CallRecords(memory, 1, 2)


X = torch.ones(3)


def test_the_second_of_two_that_differ_does_not_start(two):
    one, other = two
    for _ in range(300):  # more than are kept
        one.begin(ALL_GATHER, X, (3,))
        other.begin(ALL_GATHER, X, (3,))
    one.begin(ALL_GATHER, X, (3,))
    with pytest.raises(
        RuntimeError, match=r"At collective 301 of the group, rank 0 makes another call; rank 1 starts an"
    ):
        other.begin(ALL_REDUCE, X, (3,))
    with pytest.raises(RuntimeError, match=r"rank 0 starts an all-gather .*; rank 1 starts an all-reduce of"):
        one.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda records: records.begin(ALL_GATHER, X.double(), (3,)),
        lambda records: records.begin(ALL_GATHER, X, (4,)),
        lambda records: records.begin(ALL_GATHER, X.to(torch.int32), (3,)),
    ],
)
def test_what_differs(two, change):
    two[0].begin(ALL_GATHER, X, (3,))
    with pytest.raises(RuntimeError, match="make different calls"):
        change(two[1])


def test_a_rank_far_ahead_or_behind_gets_no_error(two):
    one, other = two
    for number in range(300):
        one.begin(ALL_GATHER, torch.ones(number), (number,))
    for number in range(300):
        other.begin(ALL_GATHER, torch.ones(number), (number,))
    one.check()


def test_a_mark_whose_count_is_not_yet_written_gets_no_error(two):
    """It is in the slot of 256 calls ago, whose count is still the last one written."""
    one, other = two
    for records in (one, other):
        for _ in range(call_records._RECORDED):
            records.begin(ALL_GATHER, X, (3,))
    other._words[other._own + call_records._MARKS + 1] = -1
    one.check()


def test_an_error_of_the_collective_is_raised_unchanged(two):
    def fail(*timeout):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"):
        two[0].wait(SimpleNamespace(wait=fail, is_completed=lambda: True))


def test_no_layer_is_left_behind(monkeypatch):
    """Also if its forward fails: checkpointing, for example, ends a recomputation by an exception."""
    seen = []

    def failing(*args, **options):
        seen.append(call_context.layer)
        raise ZeroDivisionError

    monkeypatch.setattr(parallel_norm, "invariant_norm", failing)
    monkeypatch.setattr(vocab_embedding, "_vocab_embedding", failing)
    for module, x in (
        (tpi.Linear(4, 4, gemm_fn=failing), torch.ones(2, 4)),
        (tpi.LayerNormLinear(4, 4, gemm_fn=failing), torch.ones(2, 4)),
        (tpi.ParallelNorm(4), torch.ones(2, 4)),
        (tpi.VocabParallelEmbedding(4, 4), torch.arange(3)),
    ):
        with tpi.set_tp_invariant_mode(False):
            module(x)
        assert call_context.layer is None
        module._agreed.tried = failing  # so that it fails in forward and not in a first call's check
        with tpi.set_tp_invariant_mode(True), pytest.raises(ZeroDivisionError):
            module(x)
        assert call_context.layer is None
        assert seen.pop() is module._agreed and not seen


# --- layers that are called in another order ------------------------------------------------------------------------


def row(group):
    return tpi.Linear(16, 16, parallel_mode="row", tp_group=group), torch.ones(4, 16 // group.size)


def column(group):
    return tpi.Linear(16, 16, parallel_mode="column", tp_group=group, gather_output=True), torch.ones(4, 16)


def normed(group):
    layer = tpi.LayerNormLinear(16, 16, parallel_mode="column", tp_group=group, sequence_parallel=True)
    return layer, torch.ones(4, 16)


def norm(group):
    return tpi.ParallelNorm(16, tp_group=group, sequence_parallel=True), torch.ones(4, 16)


def embedding(group):
    return tpi.VocabParallelEmbedding(16, 8, tp_group=group), torch.arange(4)


def copied(group):
    """A copy of a layer that has been called; the copy has not."""
    layer, x = row(group)
    layer(x)
    return copy.deepcopy(layer), x


def moved(group):
    layer = tpi.Linear(16, 16, parallel_mode="row", tp_group=group, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    return layer, torch.ones(4, 16 // group.size)


def from_linear(group):
    layer = tpi.Linear.from_linear(nn.Linear(16, 16), parallel_mode="row", tp_group=group)
    return layer, torch.ones(4, 16 // group.size)


MAKERS = (row, column, normed, norm, embedding, copied, moved, from_linear)


def of_dtensors(group):
    return row(resolve_group(meshes.mesh_or_group(group.process_group, "mesh")))


def swapped(tp_group, make, enabled, check, backend=None):
    """The error of each rank if one calls two layers of one shape in another order, at first or with the check."""
    group, found = resolve_group(tp_group), []
    odd = group.rank == ODD
    with tpi.set_tp_invariant_mode(enabled), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_INVARIANT_CHECK", str(int(check)))
        agreement._compared_devices.pop(group.process_group, None)
        call_records._records.pop(group.process_group, None)
        layers, calls = [make(group) for _ in range(2)], []
        if backend:
            torch.compiler.reset()
            calls = [(torch.compile(layer, backend=backend, fullgraph=True), x) for layer, x in layers]
        calls = calls or layers
        if check:  # first calls in order
            for call, x in calls:
                call(x)
        try:
            for call, x in calls[::-1] if odd else calls:
                call(x)
            found.append("nothing")
        except RuntimeError as error:
            found.append(str(error))
        layers = [make(group) for _ in range(2)]  # and after that the group is as usable as before
        for layer, x in layers * 2:
            layer(x)
        agreement._compared_devices.pop(group.process_group, None)
    return found


@pytest.mark.parametrize("check", [False, True], ids=["first", "check"])
def test_layers_of_one_shape_in_another_order(check):
    for make in MAKERS:
        for enabled in (True, False):
            (text,), *others = run_ranks(swapped, 2, make, enabled, check)
            assert others == [[text]]
            pattern = r"disagree: the layer's number is (\d) on rank 0; (\d) on rank 1\. .*numbered in the order"
            match = re.search(pattern, text)
            assert match and match[1] < match[2], (make, text)


@pytest.mark.parametrize(
    "backend, makers, check",
    [
        ("aot_eager", (column, normed, norm, embedding, copied, moved), False),
        ("aot_eager", (row, of_dtensors), True),
        ("inductor", (row, of_dtensors), False),
    ],
)
def test_compiled_layers_of_one_shape_in_another_order(backend, makers, check):
    """Which share one graph: it knows a layer by its weight."""
    for make in makers:
        (text,), *others = run_ranks(swapped, 2, make, True, check, backend)
        assert others == [[text]]
        pattern = r"disagree: the layer's number is (\d) on rank 0; (\d) on rank 1\. .*numbered in the order"
        match = re.search(pattern, text)
        assert match and match[1] < match[2], (make, text)


def graphs_of_equal_layers(tp_group):
    """How many graphs three equal layers have, each compiled."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    torch.compiler.reset()
    with tpi.set_tp_invariant_mode(True):
        for make in (row, row, row):
            layer, x = make(resolve_group(tp_group))
            torch.compile(layer, backend=backend, fullgraph=True)(x)
    return len(made)


def test_equal_layers_share_one_graph():
    """So it does not contain a layer's number."""
    assert run_ranks(graphs_of_equal_layers, 2) == [1] * 2


def compared_again(tp_group, compiled):
    """How many calls are compared when three layers have been called with three lengths, and are once more."""
    compared, compare = [], agreement.compare
    torch.compiler.reset()
    with tpi.set_tp_invariant_mode(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_MAX_AGREED", 4)
        layers = [row(resolve_group(tp_group))[0] for _ in range(3)]
        calls = [torch.compile(layer, backend="eager", dynamic=True) for layer in layers] if compiled else layers
        for sweep in range(2):
            if sweep:
                patch.setattr(agreement, "compare", lambda *a, **options: compared.append(a) or compare(*a, **options))
            for tokens, call in itertools.product((2, 3, 4), calls):
                with torch.no_grad():
                    call(torch.ones(tokens, 16 // tp_group.size()))
    return len(compared)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_does_not_forget_calls_because_of_others(compiled):
    """More calls in all than are kept, of each layer fewer."""
    assert run_ranks(compared_again, 2, compiled) == [0] * 2


def numbers(tp_group):
    """The numbers of layers in two groups, which ranks create in another order, and of copies."""
    one, other = resolve_group(tp_group), another_group(tp_group, "numbers")
    made = {}
    for name, group in (("a", one), ("b", other)) if one.rank else (("b", other), ("a", one)):
        for k in range(2):
            torch.manual_seed(0)  # the order is another one, and whole parameters are compared
            made[f"{name}{k}"] = row(group)[0]
    made["copy"] = copy.deepcopy(made["a0"])
    made["whole"] = tpi.Linear(4, 4)
    for key in ("a0", "b1", "a1", "copy", "b0"):
        made[key](torch.ones(4, 16 // one.size))
    return {key: layer._agreed.number for key, layer in sorted(made.items())}


def test_numbers_are_those_of_the_group():
    """As in pipeline stages: only the order within a group matters."""
    want = {"a0": 1, "a1": 2, "b0": 1, "b1": 2, "copy": 3, "whole": 0}
    assert run_ranks(numbers, 2) == [want] * 2
