"""Ranks that are not alike: an error on every rank, the same one, within seconds; and a group that works afterwards."""

import functools
import pickle
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm import collectives, liveness
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.consistency import agreement, compare, environment
from tp_invariant.core import mode
from tp_invariant.functional.regions import gather_sequence, scatter_sequence
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.kernels.gemm.reference import matmul
from tp_invariant.testing import RankError, assert_bitwise_equal

ODD = 1  # the rank that is not like the others


def error_on_every_rank(case, *args, world=4):
    """The text of the error that case(tp_group, *args) raises on all ranks; and the group still works."""
    with pytest.raises(RankError) as caught:
        run_ranks(case, world, *args)
    errors = caught.value.errors
    assert [type(errors.get(rank)) for rank in range(world)] == [RuntimeError] * world, caught.value
    assert len({str(error) for error in errors.values()}) == 1
    assert run_ranks(in_step, world) == [world * (world - 1) // 2] * world
    return str(errors[0])


def in_step(tp_group):
    """The layers and collectives work on this group, and its ranks have the same."""
    group = resolve_group(tp_group)
    layer = tpi.Linear(8, 8, parallel_mode="row", tp_group=tp_group)
    layer(torch.ones(3, 8 // group.size)).sum().backward()
    return int(collectives.gather_major(torch.tensor([group.rank]), group).sum())


# --- the environment ------------------------------------------------------------------------------------------------


def in_another_environment(tp_group, name, value, variable=None):
    """A fresh group's first call, on one rank with another environment."""
    odd = tp_group.rank() == ODD
    agreement._compared_devices.pop(tp_group, None)
    facts = environment.environment_facts
    try:
        with pytest.MonkeyPatch.context() as patch:
            if odd and variable:
                patch.setenv(variable, value)
            elif odd:
                patch.setattr(agreement, "environment_facts", lambda device: {**facts(device), name: value})
            with ExitStack() as stack:
                if variable == mode.MODE_VARIABLE:
                    stack.enter_context(tpi.set_tp_invariant_mode(None))
                tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group)(torch.ones(3, 8))
    finally:
        agreement._compared_devices.pop(tp_group, None)


@pytest.mark.parametrize(
    ("name", "value", "variable"),
    [
        ("the version of torch", "2.0.0", None),
        ("the version of triton", "1.0", None),
        ("the device", "cuda 9.0", None),
        ("TRITON_INTERPRET", "another", "TRITON_INTERPRET"),
        ("TP_INVARIANT_CHECK", "1", "TP_INVARIANT_CHECK"),
        ("TP_INVARIANT_CHECK", "yes", "TP_INVARIANT_CHECK"),
        ("the source of tp_invariant's kernels", "edited", None),
        ("the TP-invariant mode", "1", "TP_INVARIANT_MODE"),
        ("the TP-invariant mode", "yes", "TP_INVARIANT_MODE"),
    ],
)
def test_another_environment(name, value, variable):
    text = error_on_every_rank(in_another_environment, name, value, variable)
    assert re.search(rf"the 4 ranks of tp_group disagree: .*{name} is .* on rank 0, 2, 3; .* on rank 1", text)
    assert value in text or variable in (mode.MODE_VARIABLE, mode.CHECK_VARIABLE)


def test_the_environment_is_compared_once_for_a_group():
    assert run_ranks(count_environments, 2) == [[1, 1, 1]] * 2


def count_environments(tp_group):
    calls, facts = [], agreement.environment_facts
    agreement._compared_devices.pop(tp_group, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "environment_facts", lambda device: calls.append(1) or facts(device))
        counts = []
        for tokens in (3, 5, 3):
            tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group)(torch.ones(tokens, 8))
            counts.append(len(calls))
    return counts


def test_this_environment():
    facts = environment.environment_facts(torch.device("cpu"))
    assert facts["the version of torch"] == torch.__version__
    assert re.fullmatch(r"3\.\d+", facts["the version of Python"])
    assert facts["the device"].endswith(torch.backends.cpu.get_cpu_capability())
    assert facts["whether the CPU flushes subnormal numbers"] is False
    assert facts["TP_INVARIANT_CHECK"] is False


# --- what a call is -------------------------------------------------------------------------------------------------


# of Linear, LayerNormLinear and ParallelNorm each fact is in tests/layers/test_linear_checks.py


def odd_linear(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    options, x = dict(sequence_parallel=what == "tokens"), torch.ones(4, 8)
    if what == "gemm_fn":
        options["gemm_fn"] = functools.partial(matmul) if odd else matmul
    with tpi.set_tp_invariant_mode(not enabled if odd and what == "mode" else enabled):
        layer = tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group, **options)
        if odd:
            x = {"features": x[:, :4], "tokens": x[:3], "x": x.double()}.get(what, x)
        layer(x)


def odd_norm(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    with tpi.set_tp_invariant_mode(not enabled if odd and what == "mode" else enabled):
        norm = tpi.ParallelNorm(8, tp_group=tp_group, sequence_parallel=True)
        norm.weight.requires_grad_(not (odd and what == "frozen"))
        norm(torch.ones(2, 4 if odd and what == "features" else 8))


def odd_embedding(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    with tpi.set_tp_invariant_mode(not enabled if odd and what == "mode" else enabled):
        dtype = torch.bfloat16 if odd and what == "dtype" else torch.float32
        layer = tpi.VocabParallelEmbedding(16, 8, tp_group=tp_group, dtype=dtype)
        layer(torch.full((3,), 16 if odd and what == "ids" else 2))


def odd_loss(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    with tpi.set_tp_invariant_mode(not enabled if odd and what == "mode" else enabled):
        agreement.agreed_in(resolve_group(tp_group)).clear()
        logits = torch.ones(3, 4, dtype=torch.bfloat16 if odd and what == "dtype" else torch.float32)
        target = torch.zeros(2 if odd and what == "target" else 3, dtype=torch.long)
        tpi.vocab_parallel_cross_entropy(
            logits.requires_grad_(not (odd and what == "frozen")), target, tp_group=tp_group,
            label_smoothing=0.25 if odd and what == "option" else 0.0,
        )  # fmt: skip


def odd_clip(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    agreement.agreed_in(resolve_group(tp_group)).clear()
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    with tpi.set_tp_invariant_mode(not enabled if odd and what == "mode" else enabled):
        for parameter in parameters[: 0 if odd and what == "no gradient" else 1 if odd and what == "gradient" else 2]:
            parameter.grad = torch.ones(4)
        tpi.clip_grad_norm_(parameters, 2.0 if odd and what == "option" else 1.0, tp_group=tp_group)


def odd_log(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    with (
        tempfile.TemporaryDirectory() as folder,
        tpi.set_tp_invariant_mode(not enabled if odd and what == "mode" else enabled),
        tpi.DigestLog(Path(folder, "a.log"), nn.Linear(2, 2), tp_group=tp_group) as log,
    ):
        log.write(0, loss=None if odd and what == "loss" else 1.0)


def odd_state_dict(tp_group, what, enabled):
    odd = tp_group.rank() == ODD
    torch.manual_seed(0)  # ranks that hold other values are refused for that
    model = nn.Sequential(tpi.Linear(8, 8, parallel_mode="row", tp_group=tp_group))
    if odd and what == "keys":
        model.append(nn.Linear(2, 2))
    tpi.full_state_dict(model)


GROUPS = [
    (odd_linear, "mode", "the TP-invariant mode is (True|False) on rank 0, 2, 3; (True|False) on rank 1"),
    (
        odd_linear,
        "tokens",
        r"the shape of x is \(4, 8\) on rank 0, 2, 3; \(3, 8\) on rank 1\. .*must divide the size of",
    ),
    (odd_linear, "gemm_fn", r"gemm_fn is '.*matmul' on rank 0, 2, 3; 'partial\(.*matmul\)' on rank 1"),
    (odd_linear, "x", "an error before the call is nothing on rank 0, 2, 3; .*TypeError: x .* is torch.float64"),
    (
        odd_linear,
        "features",
        r"an error before the call is nothing on rank 0, 2, 3; .*x of .* here has shape \(4, 4\)",
    ),
    (odd_norm, "mode", "the TP-invariant mode is"),
    (odd_norm, "frozen", "whether the weight needs one is True on rank 0, 2, 3; False on rank 1"),
    (odd_norm, "features", "its last dim must be features=8"),
    (odd_embedding, "mode", "the TP-invariant mode is"),
    (odd_embedding, "dtype", "the dtype of the weight is"),
    (odd_embedding, "ids", "IndexError: ids holds 16 here"),
    (odd_loss, "mode", "the TP-invariant mode is"),
    (odd_loss, "dtype", "the dtype of logits is"),
    (odd_loss, "frozen", "whether logits need a gradient is"),
    (odd_loss, "option", "the options of vocab_parallel_cross_entropy is"),
    (odd_loss, "target", r"target \(2,\) here"),
    (odd_clip, "mode", "the TP-invariant mode is"),
    (odd_clip, "option", "clip_grad_norm_ is"),
    (odd_clip, "gradient", "the gradient of parameter 1 is .* on rank 0, 2, 3; None on rank 1"),
    (odd_clip, "no gradient", "the gradient of parameter 0 is .* on rank 0, 2, 3; None on rank 1"),
    (odd_log, "mode", "the TP-invariant mode is"),
    (odd_log, "loss", "what there is to log is"),
    (odd_state_dict, "keys", "what is in the state dict is"),
]


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("case", "what", "message"), GROUPS, ids=[f"{c.__name__}-{w}" for c, w, _ in GROUPS])
def test_ranks_that_disagree(case, what, message, enabled):
    run_ranks(case, 4, "nothing", enabled)  # the control: alike, they do not
    assert re.search(message, error_on_every_rank(case, what, enabled))


def test_an_error_that_all_ranks_find_is_their_own():
    def case(tp_group):
        tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group)(torch.ones(3, 5))

    with pytest.raises(RankError) as caught:
        run_ranks(case, 4)
    assert [type(caught.value.errors[rank]) for rank in range(4)] == [ValueError] * 4
    assert run_ranks(in_step, 4) == [6] * 4


# --- at every call --------------------------------------------------------------------------------------------------


def checked(fn):
    """fn(tp_group, ..) with TP_INVARIANT_CHECK=1, on a group that does not know of it yet."""

    def case(tp_group, *args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(mode.CHECK_VARIABLE, "1")
            return fn(tp_group, *args)

    return case


def later(tp_group, what, enabled):
    """Two steps alike, which a first-time check sees; in the third one rank goes its own way, to a call seen before."""
    odd = tp_group.rank() == ODD
    with tpi.set_tp_invariant_mode(enabled):
        layer = tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group, sequence_parallel=True)
        other = tpi.Linear(8, 8, parallel_mode="row", tp_group=tp_group, sequence_parallel=True)
        for step in range(3):
            for tokens in (2, 3):
                here = 5 - tokens if odd and what == "shape" and step == 2 else tokens
                y = layer(torch.ones(here, 8))
                if odd and what == "layer" and step == 2:
                    y = layer(torch.ones(tokens, 8))
                    continue
                other(y).sum().backward()


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"the shape of x is \(2, 8\) on rank 0, 2, 3; \(3, 8\) on rank 1"),
        ("layer", r"the layer is .*'row'.* on rank 0, 2, 3; .*'column'.* on rank 1"),
    ],
)
def test_every_call_is_compared_on_request(what, message, enabled):
    assert run_ranks(checked(later), 4, "nothing", enabled) == [None] * 4
    assert re.search(message, error_on_every_rank(checked(later), what, enabled))


def odd_sequence(tp_group, what, later):
    odd = tp_group.rank() == ODD
    for step in range(2 if later else 1):
        here = odd and step == later
        shape = (8, 4) if here and what == "shape" else (4, 8)
        x = torch.ones(shape, dtype=torch.float64 if here and what == "dtype" else torch.float32, requires_grad=True)
        gather_sequence(x, tp_group, 1 if here and what == "dim" else 0)
        scatter_sequence(x, tp_group).sum().backward()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"the shape of x is \(4, 8\) on rank 0, 2, 3; \(8, 4\) on rank 1"),
        ("dtype", "the dtype of x is 'torch.float32' on rank 0, 2, 3; 'torch.float64' on rank 1"),
        ("dim", "sequence_dim is 0 on rank 0, 2, 3; 1 on rank 1"),
    ],
)
def test_sequence_functions_are_compared(what, message, later):
    assert run_ranks(checked(odd_sequence), 4, "nothing", True) == [None] * 4
    assert re.search(message, error_on_every_rank(checked(odd_sequence), what, int(later)))


def other_length(tp_group, sharded):
    layer = tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group, sequence_parallel=sharded)
    layer(torch.ones(3 if tp_group.rank() == ODD else 4, 8))


@pytest.mark.parametrize("sharded", [True, False])
def test_sequence_dim_is_advised_only_where_it_is_sharded(sharded):
    text = error_on_every_rank(other_length, sharded)
    assert "All ranks of tp_group must pass tensors of the same shape" in text
    assert ("must divide the size of sequence_dim" in text) == sharded


def keeps_more(tp_group, what):
    """A layer that has been called finds how many weights are kept changed, on one rank to another number."""
    layer = tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group)
    layer(torch.ones(4, 8))
    weight_cache.keep = 2 if tp_group.rank() == ODD and what == "keep" else 1
    layer(torch.ones(4, 8))


def test_what_is_kept_is_compared_again_when_it_changes():
    run_ranks(keeps_more, 4, "nothing")
    message = r"and keep is \(True, False, 1\) on rank 0, 2, 3; \(True, False, 2\) on rank 1"
    assert re.search(message, error_on_every_rank(keeps_more, "keep"))


def first_of_sequence(tp_group, what):
    """A region's first call, without the variable; one rank makes another."""
    odd = tp_group.rank() == ODD
    assert not mode.is_call_check_enabled()
    agreement.agreed_in(resolve_group(tp_group)).clear()
    x = torch.ones(
        (8, 4) if odd and what == "shape" else (4, 8), dtype=torch.float64 if odd and what == "dtype" else None
    )
    move = scatter_sequence if what == "split" or (odd and what == "call") else gather_sequence
    move(x[:3] if odd and what == "split" else x, tp_group, {"dim": 1, "no dim": 2}.get(what, 0) if odd else 0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"the shape of x is \(4, 8\) on rank 0, 2, 3; \(8, 4\) on rank 1"),
        ("dtype", "the dtype of x is 'torch.float32' on rank 0, 2, 3; 'torch.float64' on rank 1"),
        ("dim", "sequence_dim is 0 on rank 0, 2, 3; 1 on rank 1"),
        ("call", "the call is 'gather_sequence' on rank 0, 2, 3; 'scatter_sequence' on rank 1"),
        (
            "split",
            "an error before the call is nothing on rank 0, 2, 3; .*ValueError: x here has shape .* size 3 is not",
        ),
        ("no dim", "an error before the call is nothing on rank 0, 2, 3; .*IndexError: sequence_dim=2 is out of range"),
    ],
)
def test_sequence_functions_are_compared_when_first_seen(what, message):
    assert run_ranks(first_of_sequence, 4, "nothing") == [None] * 4
    assert re.search(message, error_on_every_rank(first_of_sequence, what))


def count_gathers(tp_group, check):
    """(gathers of 32 bytes in two equal steps of a layer, forward and backward; the gradients)."""
    gathers, gather = [], compare.gather_major
    agreement.compare_environments(resolve_group(tp_group), torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(mode.CHECK_VARIABLE, str(int(check)))
        patch.setattr(compare, "gather_major", lambda *args: gathers.append(1) or gather(*args))
        torch.manual_seed(0)
        layer = tpi.Linear(64, 8, parallel_mode="row", tp_group=tp_group)
        for _ in range(2):
            y = layer(torch.randn(5, 64).chunk(tp_group.size(), 1)[tp_group.rank()])
            y += 1.0  # what users do; a view would refuse
            y.square().sum().backward()
    return len(gathers), y.detach(), tpi.testing.full_grads(layer)


def test_the_check_costs_nothing_unless_asked_for_and_changes_no_bit():
    plain, checking = (run_ranks(count_gathers, 2, check) for check in (False, True))
    assert [result[0] for result in plain] == [1, 1]
    assert [result[0] for result in checking] == [2, 2]
    for one, other in zip(plain, checking, strict=True):
        assert_bitwise_equal(other[1:], one[1:])


@pytest.mark.parametrize("text", ["yes", "", "2"])
def test_anything_else_in_the_variable_is_an_error(monkeypatch, text):
    monkeypatch.setenv("TP_INVARIANT_CHECK", text)
    expected = f"TP_INVARIANT_CHECK={text!r} is not understood: set it to 1 (on) or 0 (off), or unset it (off)"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        mode.is_call_check_enabled()


# --- the weights ----------------------------------------------------------------------------------------------------


PLAN = {"0": "colwise", "2": "rowwise"}


def parallelized(tp_group, what):
    """parallelize; one rank has something else."""
    odd = tp_group.rank() == ODD
    torch.manual_seed(0)
    hidden = 16 if odd and what == "shape" else 8
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 8), nn.LayerNorm(8))
    names = {"weight": ["2.weight"], "seed": [name for name, _ in model.named_parameters()]}.get(what, [])
    with torch.no_grad():
        for name in names if odd else []:
            weight = model.get_parameter(name).view(-1)
            weight[-1] = weight[-1] * -1 if weight[-1] else -0.0  # one bit
    if odd and what == "order":
        model[0].weight.data = model[0].weight.data.flip(0)
    if what == "meta" and odd:
        model = model.to("meta")
    before = dict(model.named_modules())
    plan = {"0": "colwise"} if odd and what == "plan" else PLAN
    if what == "problem" and odd:
        model[0].forward = torch.neg
        before = dict(model.named_modules())
    try:
        tpi.parallelize(model, tp_group, plan)
    except RuntimeError:
        assert dict(model.named_modules()) == before, "nothing is changed"
        raise


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "weight",
            r"different weights in 1 of 6 parameters; .*\n  2.weight: one value on rank 0, 2, 3, another on rank 1$",
        ),
        ("seed", r"in 6 of 6 parameters(.*\n){6}  and 1 more$"),
        ("order", "in 1 of 6 parameters"),
        ("shape", r"the dtype and shape of 0.weight is .*\(8, 8\)\) on rank 0, 2, 3; .*\(16, 8\)\) on rank 1"),
        ("plan", "the plan of 2 is .*rowwise.* on rank 0, 2, 3; nothing on rank 1"),
        ("problem", r"what parallelize cannot honour is \[\] on rank 0, 2, 3; .*0: has a forward of its own"),
    ],
)
def test_ranks_with_different_models(what, message):
    assert re.search(message, error_on_every_rank(parallelized, what))


def test_ranks_with_the_same_model_or_none_yet():
    for what in ("nothing", "meta"):
        assert run_ranks(parallelized, 4, what) == [None] * 4


# --- who is alive ---------------------------------------------------------------------------------------------------


def test_contacts_travel_as_they_are():
    contact = liveness.Contact(3, 4711, "a host", "10.0.0.7", 5000)
    assert len(contact.encode()) == liveness.CONTACT_BYTES
    assert liveness.Contact.decode(contact.encode()) == contact


def explained(tp_group):
    """What errors are explained by while all ranks live, and whether a port where nobody listens counts as ended."""
    group = resolve_group(tp_group)
    agreement.compare_environments(group, torch.device("cpu"))
    with liveness.socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    host = liveness._contacts[0].host
    ended = [liveness._has_ended(liveness.Contact(9, 1, name, "127.0.0.1", port)) for name in (host, "elsewhere")]
    errors = [RuntimeError(text) for text in ("sizes differ", "Connection closed", "Timed out waiting 9ms")]
    found = [liveness.explain(error, group, "all-gather of x") for error in errors]
    gather_sequence(torch.ones(2, 2), tp_group)  # so that no rank ends before
    return ended, [error is same for error, same in zip(errors, found, strict=True)], str(found[-1])


def test_live_ranks_are_not_said_to_have_ended():
    for rank, (ended, unchanged, late) in enumerate(run_ranks(explained, 3)):
        assert (ended, unchanged) == ([True, False], [True, True, False])
        assert late.startswith(f"all-gather of x failed on rank {rank} of 3 with all ranks alive: some did not join it")
        assert "TP_INVARIANT_CHECK=1" in late and late.endswith("(Timed out waiting 9ms)")


def test_ended_ranks_are_named(monkeypatch):
    monkeypatch.setattr(liveness.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(liveness.dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    own = liveness.own_contact()
    contacts = {0: own, 3: own}
    for rank in (1, 2):
        with liveness.socket.create_server(("127.0.0.1", 0)) as s:
            contacts[rank] = liveness.Contact(rank, 40 + rank, own.host, *s.getsockname())
    monkeypatch.setattr(liveness, "_contacts", contacts)
    group = SimpleNamespace(process_group=object(), rank=0, size=4)
    error = liveness.explain(RuntimeError("Connection closed by peer"), group, "all-gather of x")
    named = f"rank 1 (global rank 1, process 41 on {own.host}), 2 (global rank 2, process 42 on {own.host}) have ended"
    assert str(error).startswith(f"{named}: all-gather of x failed on rank 0 of 4. Look for")
    assert isinstance(error, tpi.DeadRankError)
    assert error.ranks == (1, 2) == pickle.loads(pickle.dumps(error)).ranks
