"""Checks that are made once for a kind of call: what a kind is, on ranks that part, and where nothing is compared."""

from __future__ import annotations

import copy
import pickle
import re
from contextlib import ExitStack, contextmanager

import meshes
import pytest
import torch
from ranks import run_ranks
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import tp_invariant as tpi
from tp_invariant.consistency import agreement
from tp_invariant.core.dtensors import local_of
from tp_invariant.gemm import set_default_gemm_fn
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.kernels.gemm.reference import matmul
from tp_invariant.layers import call_signature
from tp_invariant.layers import linear as layers_linear
from tp_invariant.testing import assert_bitwise_equal


def other_gemm(a, b, *, bias=None, out_dtype=None):
    return matmul(a, b, bias=bias, out_dtype=out_dtype)


def in_float64(a, b, *, bias=None, out_dtype=None):
    c = a @ b
    return (c if bias is None else c + bias).to(out_dtype or a.dtype)


# --- every fact is a part of the kind -------------------------------------------------------------------------------


@contextmanager
def default_gemm():
    set_default_gemm_fn(other_gemm)
    try:
        yield
    finally:
        set_default_gemm_fn(None)


@contextmanager
def other_costs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers_linear, "_costs_text", lambda device: "other costs")
        yield


def attribute(name, value):
    return lambda layer, x, stack: setattr(layer, name, value)


def context(manager):
    return lambda layer, x, stack: stack.enter_context(manager())


def main_grad(layer, x, stack):
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    layer.fuse_wgrad_accumulation = True


def in_bfloat16(layer, x, stack):
    layer.bfloat16()
    return x.bfloat16()


def frozen(layer, x, stack):
    layer.weight.requires_grad_(False)


def with_another_trained_norm(layer, x, stack):
    """As many parameters as before, but partial sums of another one."""
    layer.layer_norm_weight.requires_grad_()
    layer.layer_norm_bias.requires_grad_(False)


def with_a_frozen_bias(layer, x, stack):
    layer.bias.requires_grad_(False)


# (the fact, what changes it: in the layer, or the x that it returns)
OF_BOTH = [
    ("the TP-invariant mode", context(lambda: tpi.set_tp_invariant_mode(not tpi.is_tp_invariant_mode_enabled()))),
    ("the shape of x", lambda layer, x, stack: x[:2]),
    ("the dtype of x", in_bfloat16),
    ("whether x needs a gradient", lambda layer, x, stack: x.requires_grad_()),
    ("whether the weight needs one", frozen),
]


@contextmanager
def keeps():
    before, weight_cache.keep = weight_cache.keep, 3
    try:
        yield
    finally:
        weight_cache.keep = before


OF_LINEAR = [
    *OF_BOTH,
    ("the layer", attribute("in_features", 16)),
    ("the layer", attribute("out_features", 16)),
    ("the layer", attribute("parallel_mode", "row")),
    ("bias", attribute("bias", None)),
    ("partition_stride", lambda layer, x, stack: setattr(layer.weight, "partition_stride", 2)),
    ("sequence_parallel", attribute("sequence_parallel", False)),
    ("sequence_dim", attribute("sequence_dim", 1)),
    ("owner_map", attribute("owner_map", "replicate")),
    ("what owner_map='auto' goes by", context(other_costs)),
    ("gemm_fn", attribute("gemm_fn", other_gemm)),
    ("gemm_fn", context(default_gemm)),
    ("gather_output", attribute("gather_output", True)),
    ("return_bias", attribute("return_bias", True)),
    ("fuse_wgrad_accumulation", main_grad),
    ("weight_cache's ahead, ahead_in_graphs and keep", context(keeps)),
]
OF_LAYERNORM_LINEAR = [
    *OF_LINEAR,
    ("the norm", attribute("normalization", "RMSNorm")),
    ("the norm", attribute("eps", 1e-3)),
    ("the norm", attribute("zero_centered_gamma", True)),
    ("which parameters of the norm need a gradient", with_another_trained_norm),
    ("return_layernorm_output", attribute("return_layernorm_output", False)),
    ("return_layernorm_output", attribute("return_layernorm_output_gathered", True)),
]
OF_NORM = [
    *OF_BOTH,
    ("the layer", attribute("normalization", "LayerNorm")),
    ("the layer", attribute("eps", 1e-3)),
    ("the layer", attribute("zero_centered_gamma", True)),
    ("the layer", attribute("sequence_dim", 1)),
    ("whether the bias needs a gradient", with_a_frozen_bias),
]
OF_HEADS = [
    ("the layer", lambda layer, x, stack: setattr(layer, "heads_dim", 1) or x.transpose(1, 2)),
    ("the layer", lambda layer, x, stack: setattr(layer, "heads", 8) or torch.cat([x, x], 2)),
]


def linear(tp_group):
    return tpi.Linear(8, 8, parallel_mode="column", tp_group=tp_group, sequence_parallel=True)


def layernorm_linear(tp_group):
    options = dict(parallel_mode="column", tp_group=tp_group, sequence_parallel=True, return_layernorm_output=True)
    layer = tpi.LayerNormLinear(8, 8, **options)
    layer.layer_norm_weight.requires_grad_(False)
    return layer


def norm(tp_group):
    return tpi.ParallelNorm(8, bias=True, tp_group=tp_group, sequence_parallel=True)


def norm_of_heads(tp_group):
    return tpi.ParallelNorm(8, tp_group=tp_group, heads=4, heads_dim=2)


CASES = {linear: OF_LINEAR, layernorm_linear: OF_LAYERNORM_LINEAR, norm: OF_NORM, norm_of_heads: OF_HEADS}


def part_company(tp_group, make, enabled):
    """For each change of one rank's: what it raises, beside one with more tokens; and all facts' names."""
    rank, found, names, check = tp_group.rank(), [], set(), agreement.check_agreement
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            call_signature,
            "check_agreement",
            lambda facts, *args, **named: names.update(facts) or check(facts, *args, **named),
        )
        for _, change in CASES[make]:
            with ExitStack() as stack:
                stack.enter_context(tpi.set_tp_invariant_mode(enabled))
                layer, x = make(tp_group), torch.ones(4, 4, 2, 8)
                for _ in range(2):
                    layer(x)
                if rank == 0:
                    changed = change(layer, x, stack)
                    x = x if changed is None else changed
                else:
                    x = torch.ones(6, 4, 2, 8)
                try:
                    layer(x)
                    found.append("nothing")
                except RuntimeError as error:
                    found.append(str(error))
    return found, names


@pytest.mark.parametrize("enabled", (True, False), ids=("on", "off"))
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_rank_that_parts_is_compared_whatever_it_changes(make, enabled):
    """Else it would go on, with what was settled before, while the other waits for its word."""
    (errors, names), others = run_ranks(part_company, 2, make, enabled)
    assert others == (errors, names), "the same on both ranks"
    for error, (fact, _) in zip(errors, CASES[make], strict=True):
        assert f"{fact} is " in error, (fact, error)
        assert "the shape of x is" in error
    names -= {"whether hooks may read all of x's gradient: register them on every rank"}  # test_unread_gradients.py
    assert make is norm_of_heads or names == {fact for fact, _ in CASES[make]}, "no fact without a case"


# --- what is settled goes when what is agreed on goes ---------------------------------------------------------------


def many_kinds(tp_group, make, kinds):
    """Of ranks with small memories, one sees one kind more, of the same facts: x needs a gradient that is not given."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(agreement, "_MAX_AGREED", 12)
        patch.setattr(agreement, "_MAX_RESOLVED", 5)
        layer = make(tp_group)
        layer(torch.ones(3, 8))
        layer(torch.ones(3, 8, requires_grad=tp_group.rank() == 1))
        for k in range(kinds):
            layer(torch.ones(4 + (k * 7919 % 101) * (k % 3 + 1) % 23, 8))


@pytest.mark.parametrize("make", (linear, layernorm_linear, norm), ids=lambda make: make.__name__)
def test_ranks_stay_in_step_when_they_forget(make):
    assert run_ranks(many_kinds, 2, make, 150) == [None] * 2


@pytest.mark.parametrize("layer", [tpi.Linear(8, 8), tpi.LayerNormLinear(8, 8), tpi.ParallelNorm(8)])
def test_a_copied_layer_has_settled_nothing(layer):
    want = layer(torch.ones(3, 8))
    assert layer._agreed.resolved
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not other._agreed.resolved
        assert_bitwise_equal(other(torch.ones(3, 8)).detach(), want.detach())


# --- where nothing is compared --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [tpi.Linear(8, 8), tpi.LayerNormLinear(8, 8), tpi.ParallelNorm(8)])
def test_sizes_that_are_symbols(layer):
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    with tpi.set_tp_invariant_mode(False):
        trace = make_fx(lambda p, x: functional_call(layer, p, (x,)), tracing_mode="symbolic")
        graph, x = trace(parameters, torch.randn(5, 8)), torch.randn(7, 8)
        assert_bitwise_equal(graph(parameters, x), layer(x).detach())


def test_another_default_may_take_other_dtypes():
    """Linear's product; not a norm's kernels, which are always the bundled ones."""
    x, named = torch.ones(3, 8, dtype=torch.float64), pytest.raises(TypeError, match=r"x on rank 0 is torch\.float64")
    linear, norm = tpi.Linear(8, 8, dtype=x.dtype), tpi.ParallelNorm(8, dtype=x.dtype)
    both = tpi.LayerNormLinear(8, 8, dtype=x.dtype)
    with tpi.set_tp_invariant_mode(True):
        try:
            set_default_gemm_fn(in_float64)
            linear(x)
            for layer in (norm, both):
                with named:
                    layer(x)
        finally:
            set_default_gemm_fn(None)
        with named:
            linear(x)


# --- whole parameters -------------------------------------------------------------------------------------------------


WITH_WHOLE = {
    "bias": lambda group: tpi.Linear(8, 8, parallel_mode="row", tp_group=group, input_is_parallel=False),
    "layer_norm_bias": lambda group: tpi.LayerNormLinear(8, 8, parallel_mode="column", tp_group=group),
    "weight": lambda group: tpi.ParallelNorm(8, tp_group=group, sequence_parallel=True),
}


def whole_that_differ(tp_group, name, enabled, kind):
    """What a first call says to a whole parameter that differs between ranks, and with the check a later one."""
    texts, x = [], torch.ones(4, 8)
    with tpi.set_tp_invariant_mode(enabled), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        layer = WITH_WHOLE[name](meshes.mesh_or_group(tp_group, kind))
        whole = local_of(getattr(layer, name))
        with torch.no_grad():
            for check in ("0", "1"):
                patch.setenv("TP_INVARIANT_CHECK", check)
                whole.view(torch.int32)[3] += tp_group.rank()
                with pytest.raises(RuntimeError) as caught:
                    layer(x)
                texts.append(str(caught.value))
                whole.view(torch.int32)[3] -= tp_group.rank()
                layer(x)
                whole.mul_(2)  # another value than before, the same on every rank
                layer(x)
    return texts


@pytest.mark.parametrize("name", WITH_WHOLE)
def test_whole_parameters_that_differ(name):
    """As of ranks that were seeded differently; a bias that is added by whoever computes a row shows in no gradient."""
    for enabled, kind in ((True, "group"), (False, "group"), (True, "mesh")):
        one, other = run_ranks(whole_that_differ, 2, name, enabled, kind)
        assert one == other
        for text in one:
            pattern = rf"the hash of the whole parameter {name} is -?\d+ on rank 0; -?\d+ on rank 1\. .*Seed all ranks"
            assert re.search(pattern, text), text
