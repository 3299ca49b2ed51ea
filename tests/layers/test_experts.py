"""Experts and MixtureOfExperts: the same bytes at every degree, stored by inner features or by expert; right values."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from models import gemm_in_order
from ranks import run_ranks
from same_as_alone import assert_as_alone
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group, gather_dim, resolve_group
from tp_invariant.graphs import checks as graph_checks
from tp_invariant.testing import assert_bitwise_equal, full_grads, full_parameters, wide_randn

BATCH, SEQUENCE, HIDDEN, INNER = 2, 12, 16, 24
ONE_RANK = Group(None, 0, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    experts: int = 6
    chosen: int = 2
    routed: str = "random"  # "one": all tokens to the first experts; "few": most experts get none
    bias: bool = False
    layout: str = "stacked"
    gated: bool = True
    by_expert: bool = False
    sequence_parallel: bool = False
    sequence_dim: int = 1
    group: str = "group"
    dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype = torch.float32
    own_gemm: bool = False
    mode: bool = True

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def clamped(h: Tensor) -> Tensor:
    """gpt-oss's, as a function of a user's."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def build(case: Case, tp_group: Any) -> tpi.Experts:
    torch.manual_seed(1)
    layout: dict[str, Any] = {
        "stacked": {},
        "gpt-oss": dict(interleaved=True, transposed=True, activation="clamped_silu"),
        "own gate": dict(interleaved=True, transposed=True, gate_fn=clamped),
        "gelu": dict(activation="gelu_tanh", transposed=True),
    }[case.layout]
    tp_group = None if tp_group is None else mesh_or_group(tp_group, case.group)
    return tpi.Experts(
        case.experts,
        HIDDEN,
        INNER,
        bias=case.bias,
        gated=case.gated,
        tp_group=tp_group,
        expert_parallel_group=(ONE_RANK if tp_group is None else tp_group) if case.by_expert else None,
        sequence_parallel=case.sequence_parallel,
        sequence_dim=case.sequence_dim,
        gemm_fn=gemm_in_order if case.own_gemm else None,
        dtype=case.dtype,
        **layout,
    )


def data(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, index, weights, and the gradient of the output."""
    g = torch.Generator().manual_seed(2)
    lead = (BATCH, SEQUENCE)
    scores = torch.rand(*lead, case.experts, generator=g)
    if case.routed == "one":
        scores = -torch.arange(case.experts).float().expand(*lead, -1)
    elif case.routed == "few":
        scores[..., case.chosen + 1 :] = -1.0
    index = scores.argsort(-1, descending=True)[..., : case.chosen]
    x, dy = (wide_randn(*lead, HIDDEN, generator=g, spread=2).to(case.dtype) for _ in range(2))
    return x, index, torch.rand(*lead, case.chosen, generator=g).to(case.weights_dtype), dy


def part(tensor: Tensor, case: Case, tp_group: Any) -> Tensor:
    """This rank's tokens."""
    group = resolve_group(tp_group)
    return tensor.chunk(group.size, case.sequence_dim)[group.rank].contiguous() if case.sequence_parallel else tensor


def run(tp_group: Any, case: Case) -> dict[str, Any]:
    """Whole outputs and gradients after two micro-batches, of which the second has the tokens in reverse order."""
    group = resolve_group(tp_group)
    results: dict[str, Any] = {}
    with tpi.set_tp_invariant_mode(case.mode):
        layer = build(case, tp_group)
        x, index, weights, dy = data(case)
        for micro in range(2):
            x, index, weights, dy = (t.flip(1) for t in (x, index, weights, dy)) if micro else (x, index, weights, dy)
            x_own, weights_own = (part(t, case, tp_group).clone().requires_grad_() for t in (x, weights))
            y = layer(x_own, part(index, case, tp_group), weights_own)
            y.backward(part(dy, case, tp_group))
            assert x_own.grad is not None and weights_own.grad is not None
            for name, tensor in (("y", y.detach()), ("dx", x_own.grad), ("dweights", weights_own.grad)):
                whole = gather_dim(tensor, case.sequence_dim, group) if case.sequence_parallel else tensor
                results[f"{name} {micro}"] = whole
        results["gradients"] = full_grads(layer)
        results["norm"] = tpi.clip_grad_norm_(layer.parameters(), 1.0)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
        results["parameters"] = full_parameters(layer)
    return results


CASES = [
    Case(),
    Case(bias=True, sequence_parallel=True),
    Case(experts=5, chosen=3, routed="few", sequence_parallel=True, dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    Case(experts=2, chosen=1, sequence_parallel=True, sequence_dim=0, bias=True),
    Case(routed="one", bias=True, layout="gpt-oss", dtype=torch.bfloat16),
    Case(layout="gelu", bias=True, sequence_parallel=True, dtype=torch.float16),
    Case(gated=False, chosen=3, own_gemm=True),
    Case(experts=12, by_expert=True, bias=True),
    Case(experts=12, by_expert=True, layout="gpt-oss", bias=True, sequence_parallel=True, dtype=torch.bfloat16),
    Case(experts=4, layout="own gate", bias=True, sequence_parallel=True),
    Case(experts=12, by_expert=True, routed="one", group="mesh"),
    Case(experts=4, bias=True, group="mesh", sequence_parallel=True),
]


def possible(case: Case, degree: int) -> bool:
    return not (case.sequence_parallel and (BATCH, SEQUENCE)[case.sequence_dim] % degree)


@pytest.mark.parametrize("degree", (2, 3, 4))
def test_every_degree_has_the_bytes_of_one(degree):
    cases = [case for case in CASES if possible(case, degree)]
    assert_as_alone(run, cases, degree, alone=lambda case: case.with_(group="group"))


def test_how_weights_are_stored_changes_only_the_order_of_the_norm():
    """A norm adds squares slice by slice of what is sharded: by expert, or by inner feature."""
    case = Case(experts=12, by_expert=True, bias=True)
    by_features = run(None, case.with_(by_expert=False))
    for result in run_ranks(run, 2, case):
        torch.testing.assert_close(result.pop("norm"), by_features["norm"])
        torch.testing.assert_close(result.pop("parameters"), by_features["parameters"])
        assert_bitwise_equal(result["y 1"], by_features["y 1"])
        assert_bitwise_equal(result["dweights 1"], by_features["dweights 1"])
        assert_bitwise_equal(result["gradients"], by_features["gradients"])


def test_with_the_mode_off_bits_depend_on_the_degree():
    cases = [Case(mode=False), Case(mode=False, bias=True, sequence_parallel=True), Case(mode=False, by_expert=True)]
    found = run_ranks(lambda tp_group: [run(tp_group, case) for case in cases], 2)
    for case, *results in zip(cases, *found, strict=True):
        alone = run(None, case.with_(by_expert=False))
        for result in results:
            for name in ("y 0", "dx 0", "dweights 0"):
                torch.testing.assert_close(result[name], alone[name])
            torch.testing.assert_close(result["gradients"], alone["gradients"])
        if not case.by_expert:
            assert not torch.equal(results[0]["y 0"], alone["y 0"])


# --- values ---------------------------------------------------------------------------------------------------------


def reference(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """One forward and backward by torch alone, in `dtype`."""
    layer = build(case, None).to(dtype)
    x, index, weights, dy = data(case)
    x, weights = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
    y = torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=dtype)
    up = layer.gate_up_proj if case.gated else layer.up_proj
    for expert in range(case.experts):
        w_up, w_down = (w[expert].T if layer.transposed else w[expert] for w in (up, layer.down_proj))
        b_up = getattr(layer, f"{layer.up_name}_bias")[expert] if case.bias else None
        inner = layer._gate(F.linear(x, w_up, b_up))
        outer = F.linear(inner, w_down, layer.down_proj_bias[expert] if case.bias else None)
        y = y + outer * ((index == expert) * weights).sum(-1, keepdim=True)
    y.backward(dy.to(dtype))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **grads}


def ours(case: Case) -> dict[str, Tensor]:
    with tpi.set_tp_invariant_mode(True):
        layer = build(case, None)
        x, index, weights, dy = data(case)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        y = layer(x, index, weights)
        y.backward(dy)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **grads}


@pytest.mark.parametrize(
    "case",
    [
        Case(bias=True),
        Case(bias=True, layout="gpt-oss", dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
        Case(layout="own gate", bias=True),
        Case(gated=False, routed="one"),
        Case(layout="gelu", own_gemm=True),
    ],
    ids=str,
)
def test_values_and_gradients_are_right(case):
    exact, near, found = reference(case, torch.float64), reference(case, case.dtype), ours(case)
    for name, want in exact.items():
        error, torchs = ((r[name].double() - want).norm() / want.norm() for r in (found, near))
        assert error <= max(2 * torchs, 1e-6), (name, float(error), float(torchs))


def test_an_expert_without_a_token_has_a_zero_gradient():
    found = ours(Case(routed="one", bias=True))
    assert found["gate_up_proj"][:2].any() and not found["gate_up_proj"][2:].any()
    assert not found["down_proj_bias"][2:].any()


def test_a_row_does_not_depend_on_the_others():
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        layer = build(Case(bias=True), None)
        x, index, weights, _ = data(Case())
        whole = layer(x, index, weights)
        for start, end in ((0, 1), (3, 8), (5, 12)):
            rows = layer(x[:, start:end], index[:, start:end], weights[:, start:end])
            assert_bitwise_equal(rows, whole[:, start:end].contiguous())


# --- parameters -----------------------------------------------------------------------------------------------------


def state_of(tp_group, by_expert):
    layer = build(Case(experts=12, bias=True, by_expert=by_expert), tp_group)
    full = tpi.full_state_dict(layer)
    twin = copy.deepcopy(layer)
    for parameter in twin.parameters():
        parameter.data.zero_()
    tpi.load_full_state_dict(twin, full)
    later = build_on_meta(tp_group, by_expert)
    return {"full": full, "again": tpi.full_state_dict(twin), "meta": tpi.full_state_dict(later)}


def build_on_meta(tp_group, by_expert):
    layer = tpi.Experts(
        12, HIDDEN, INNER, bias=True, tp_group=tp_group, device="meta",
        expert_parallel_group=tp_group if by_expert else None,
    )  # fmt: skip
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    return layer


@pytest.mark.parametrize("by_expert", (False, True))
def test_parameters_are_the_same_at_every_degree_and_in_both_ways_of_storing(by_expert):
    want = state_of(None, False)
    assert_bitwise_equal(want["again"], want["full"])
    assert_bitwise_equal(want["meta"], want["full"])
    for found in run_ranks(state_of, 3, by_expert):
        assert_bitwise_equal(found, want)


def placements(tp_group, by_expert):
    layer = build(Case(experts=4, bias=True, by_expert=by_expert, group="mesh"), tp_group)
    full = tpi.full_state_dict(layer)
    for name, parameter in layer.named_parameters():
        assert_bitwise_equal(parameter.full_tensor().detach(), full[name])
    return {name: str(parameter.placements) for name, parameter in layer.named_parameters()}


def test_placements_of_dtensors():
    by_features, by_expert = run_ranks(placements, 2, False)[0], run_ranks(placements, 2, True)[0]
    assert "_StridedShard(dim=1, sf=2)" in by_features["gate_up_proj"] and "Shard(dim=2)" in by_features["down_proj"]
    assert "Replicate" in by_features["down_proj_bias"]
    assert all(re.search(r"Shard\(dim=0\)", text) for text in by_expert.values())


# --- the mixture ----------------------------------------------------------------------------------------------------

ROUTINGS = {
    "qwen3": (tpi.Routing(top_k=3), {}),
    "mixtral": (tpi.Routing(top_k=2), dict(weights_in_fp32=True)),
    "deepseek": (
        tpi.Routing(top_k=3, scores="sigmoid", groups=4, chosen_groups=2, scale=2.5, epsilon=1e-20),
        dict(correction=True, logits_in_fp32=True, weights_in_fp32=True),
    ),
    "gpt-oss": (tpi.Routing(top_k=2, scores="softmax_of_chosen"), dict(router_bias=True)),
}


def mixture(tp_group, name, sequence_parallel, dtype, ties, mode=True):
    group = resolve_group(tp_group)
    with tpi.set_tp_invariant_mode(mode):
        torch.manual_seed(3)
        routing, options = ROUTINGS[name]
        layer = tpi.MixtureOfExperts(
            8, HIDDEN, INNER, routing, tp_group=tp_group, sequence_parallel=sequence_parallel, sequence_dim=1,
            dtype=dtype, **options,
        )  # fmt: skip
        if ties:  # half of the experts have the same scores
            with torch.no_grad():
                layer.gate.weight[4:] = layer.gate.weight[4]
        if layer.gate.e_score_correction_bias is not None:
            layer.gate.e_score_correction_bias.copy_(torch.randn(8))
        case = Case(sequence_parallel=sequence_parallel, dtype=dtype)
        x, _, _, dy = data(case)
        x = part(x, case, tp_group).clone().requires_grad_()
        y = layer(x)
        y.backward(part(dy, case, tp_group))
        whole = [gather_dim(t, 1, group) if sequence_parallel else t for t in (y.detach(), x.grad)]
    return {"y": whole[0], "dx": whole[1], "gradients": full_grads(layer)}


MIXTURES = [
    ("qwen3", True, torch.bfloat16, False),
    ("qwen3", False, torch.float32, True),
    ("mixtral", True, torch.bfloat16, True),
    ("deepseek", True, torch.float32, False),
    ("deepseek", False, torch.bfloat16, False),
    ("gpt-oss", True, torch.bfloat16, False),
]


@pytest.mark.parametrize("degree", (2, 3, 4))
def test_mixtures_have_the_bytes_of_one_rank(degree):
    found = run_ranks(lambda tp_group: [mixture(tp_group, *case) for case in MIXTURES], degree)
    for number, case in enumerate(MIXTURES):
        want = mixture(None, *case)
        assert want["gradients"]["gate.weight"].any()
        for result in found:
            assert_bitwise_equal(result[number], want)


def test_logits_in_fp32_are_those_of_a_float32_router():
    options = dict(logits_in_fp32=True, weights_in_fp32=True, dtype=torch.bfloat16)
    torch.manual_seed(3)
    gate = tpi.MixtureOfExperts(8, HIDDEN, INNER, tpi.Routing(3), **options).gate
    x = data(Case(dtype=torch.bfloat16))[0]
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        found = gate(x)
        assert_bitwise_equal(found, copy.deepcopy(gate).float()(x.float()))
        gate.logits_in_fp32 = False
        assert not torch.equal(gate(x)[0], found[0])


def test_the_mixture_with_the_mode_off_differs():
    found = run_ranks(mixture, 2, "qwen3", True, torch.float32, False, False)
    want = mixture(None, "qwen3", True, torch.float32, False, False)
    assert not torch.equal(found[0]["y"], want["y"])
    torch.testing.assert_close(found[0], want)


def transformers_block(name):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(5)
    if name == "qwen3":
        config = transformers.Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
        )
        block = Qwen3MoeSparseMoeBlock(config)
    else:
        config = transformers.MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=8, num_experts_per_tok=2
        )
        block = MixtralSparseMoeBlock(config)
    config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.3)
    return block


@pytest.mark.parametrize("name", ("qwen3", "mixtral"))
def test_a_mixture_is_transformers_block(name):
    block = transformers_block(name)
    routing, options = ROUTINGS[name]
    layer = tpi.MixtureOfExperts(8, HIDDEN, INNER, routing, **options)
    layer.load_state_dict(block.state_dict())
    x, _, _, dy = data(Case())
    grads = []
    for module, dtype in (
        (block.double(), torch.float64),
        (copy.deepcopy(block).float(), torch.float32),
        (layer, None),
    ):
        given = x.to(dtype or torch.float32).clone().requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            y = module(given)
            y.backward(dy.to(y.dtype))
        grads.append({"y": y, "dx": given.grad, **{n: p.grad for n, p in module.named_parameters()}})
    exact, near, found = grads
    assert exact.keys() == found.keys()
    for key, want in exact.items():
        error, theirs = ((r[key].double() - want).norm() / want.norm() for r in (found, near))
        assert error <= max(2 * theirs, 1e-6), (key, float(error), float(theirs))


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(activation="swish"), "activation='swish' is unknown: choose one of 'silu'"),
        (dict(gated=False, interleaved=True), "interleaved=True needs gated=True"),
        (dict(num_experts=0), "num_experts=0 must be at least 1"),
    ],
)
def test_options_that_do_not_fit(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        tpi.Experts(**{**dict(num_experts=4, hidden_size=8, intermediate_size=8), **options})


def test_sizes_that_the_degree_does_not_divide():
    def refused(tp_group):
        errors = []
        for options in (dict(num_experts=4, intermediate_size=9), dict(num_experts=5, intermediate_size=9)):
            group = tp_group if options["num_experts"] == 5 else None
            with pytest.raises(ValueError) as caught:
                tpi.Experts(hidden_size=8, tp_group=tp_group, expert_parallel_group=group, **options)
            errors.append(str(caught.value))
        return errors

    for errors in run_ranks(refused, 2):
        assert "intermediate_size=9 is not divisible by TP degree=2" in errors[0]
        assert "num_experts=5 is not divisible by expert-parallel degree=2" in errors[1]


def test_inputs_that_do_not_fit():
    layer = tpi.Experts(4, 8, 8)
    x, index, weights = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2)
    with tpi.set_tp_invariant_mode(True):
        with pytest.raises(ValueError, match="top_k_index has shape"):
            layer(x, index[:2], weights[:2])
        with pytest.raises(TypeError, match=r"hidden_states is torch\.float64"):
            layer(x.double(), index, weights)
        with pytest.raises(IndexError, match="top_k_index holds 4 on rank 0"):
            layer(x, index + 4, weights)


def test_an_activation_in_place():
    """It would change what backward needs, silently. The mode off, which keeps what autograd asks for, takes it."""
    layer = tpi.Experts(4, 8, 8, activation=torch.nn.ELU(inplace=True))
    x, index, weights = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2)
    with tpi.set_tp_invariant_mode(True):
        with pytest.raises(ValueError, match="changes its input in place, which backward needs as it was"):
            layer(x, index, weights)
        layer.activation = torch.nn.ELU()
        layer(x, index, weights).sum().backward()


def test_a_captured_layer_over_several_ranks(monkeypatch):
    monkeypatch.setattr(graph_checks, "on_gpu", lambda x: True)
    for size, problem in ((1, ""), (2, "experts in layers[0] has experts over 2 ranks: their all-to-alls have sizes")):
        group = Group(None, 0, size)
        layer = tpi.MixtureOfExperts(4, 8, 8, tpi.Routing(2), tp_group=group)
        assert graph_checks.problem_with(layer, "layers[0]").startswith(problem)
        assert bool(graph_checks.problem_with(layer, "layers[0]")) == bool(problem)


def test_ranks_with_different_routings_are_told():
    def differ(tp_group):
        layer = tpi.Experts(4, 8, 8, tp_group=tp_group)
        index = torch.full((3, 2), resolve_group(tp_group).rank)
        with (
            tpi.set_tp_invariant_mode(True),
            pytest.raises(RuntimeError, match="the hash of the values of top_k_index"),
        ):
            layer(torch.ones(3, 8), index, torch.ones(3, 2))

    run_ranks(differ, 2)
