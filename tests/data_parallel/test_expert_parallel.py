"""Experts divided over data-parallel ranks: the bytes of one process that computes all micro-batches; right values."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
import torch.distributed as dist
from error_texts import error_text
from meshes import init_device_mesh, replica_groups
from models import ExpertNet, gemm_in_order
from ranks import run_ranks
from same_as_alone import assert_as_alone
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group, gather_dim, resolve_group
from tp_invariant.core.dtensors import local_of
from tp_invariant.data_parallel import MicroBatchTree, micro_batch_tree
from tp_invariant.integrations.training import Ranks
from tp_invariant.testing import assert_bitwise_equal, full_parameters, wide_randn
from tp_invariant.testing.rank_pool import discard_pool

ONE_RANK = Group(None, 0, 1)
HIDDEN, INNER, EXPERTS = 8, 16, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """dp x tp ranks; experts over `ep` replicas, so that dp / ep ranks hold the same experts."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    strided: bool = False  # expert_parallel_group has every (dp / ep)-th replica, not consecutive ones
    micro_batches: int = 4
    routed: str = "random"
    bias: bool = False
    transposed: bool = False
    sequence_dim: int | None = None  # sequence parallelism
    mesh: bool = False
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    own_gemm: bool = False
    optimizer: str = "adamw"
    steps: int = 2
    mode: bool = True

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def alone(self) -> Case:
        return self.with_(dp=1, tp=1, ep=1, strided=False, sequence_dim=None, mesh=False)


def groups(case: Case) -> tuple[Any, Any, Any]:
    """tp_group, dp_group and expert_parallel_group of this rank."""
    if case.dp * case.tp == 1:
        return None, ONE_RANK, ONE_RANK
    return replica_groups(case.dp, case.tp, case.ep, case.strided, case.mesh)


def make(case: Case, tp_group: Any, ep_group: Any) -> ExpertNet:
    shared: dict[str, Any] = dict(tp_group=tp_group, dtype=case.dtype)
    if case.sequence_dim is not None:
        shared |= dict(sequence_parallel=True, sequence_dim=case.sequence_dim)
    mixture = dict(bias=case.bias, transposed=case.transposed, expert_parallel_group=ep_group)
    mixture["gemm_fn"] = gemm_in_order if case.own_gemm else None
    model = ExpertNet(HIDDEN, INNER, EXPERTS, mixture, **shared)
    if case.routed != "random":
        with torch.no_grad():  # all tokens to experts 0 and 1, or ties between all
            local_of(model.mixture.gate.weight).zero_()
    return model


def tokens(step: int, micro_batch: int, case: Case) -> Tensor:
    """[2, S, H] of one micro-batch; S differs between them, and is a multiple of 4."""
    g = torch.Generator().manual_seed(100 * step + micro_batch)
    length = 4 * (1 + (micro_batch + step) % 3)
    return wide_randn(2, length, HIDDEN, generator=g, spread=2).to(case.dtype)


def train(world: Any, case: Case) -> dict[str, Any]:
    """What each micro-batch of this rank's share gives, and the norm and whole parameters after each step."""
    tp_group, dp_group, ep_group = groups(case)
    tp = resolve_group(tp_group)
    found: dict[str, Any] = {}
    with tpi.set_tp_invariant_mode(case.mode):
        torch.manual_seed(3)
        model = make(case, tp_group, ep_group)
        tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=case.micro_batches)
        kinds: dict[str, Any] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        }
        optimizer = kinds[case.optimizer](model.parameters())
        for step in range(case.steps):
            for index in tree.share:
                whole = tokens(step, index, case)
                dim = case.sequence_dim
                x = whole if dim is None else whole.chunk(tp.size, dim)[tp.rank].contiguous()
                x = x.clone().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    y = model(x)
                y.square().sum().backward()
                assert x.grad is not None
                for name, tensor in (("y", y.detach()), ("dx", x.grad)):
                    found[f"{name} {step} {index}"] = tensor if dim is None else gather_dim(tensor, dim, tp)
                tree.add(count=whole[..., 0].numel())
                assert all(p.grad is None for p in model.parameters())
            tree.reduce()
            found[f"gradients {step}"] = testing.full_grads(model)
            found[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found[f"parameters {step}"] = full_parameters(model)
    return found


def of_share(everything: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return {name: everything[name] for name in part}


TWO = Case(dp=2, ep=2)
FOUR = Case(dp=4, ep=4)


@pytest.mark.parametrize(
    "cases",
    [
        [
            TWO,
            TWO.with_(routed="ties", bias=True),
            TWO.with_(bias=True, transposed=True, dtype=torch.bfloat16),
            TWO.with_(autocast=True, bias=True, micro_batches=6),
            TWO.with_(own_gemm=True, micro_batches=2, optimizer="sgd"),
            TWO.with_(mesh=True),
        ],
        [
            FOUR,
            FOUR.with_(routed="ties", micro_batches=12),
            FOUR.with_(ep=2, micro_batches=12, bias=True),
            FOUR.with_(ep=2, strided=True, micro_batches=8),
            Case(dp=2, tp=2, ep=2, bias=True),
            Case(dp=2, tp=2, ep=2, sequence_dim=1, micro_batches=6),
            Case(dp=2, tp=2, ep=2, sequence_dim=0, dtype=torch.bfloat16),
            Case(dp=2, tp=2, ep=2, mesh=True),
        ],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_every_layout_has_the_bytes_of_one_process(cases):
    assert_as_alone(train, cases, cases[0].dp * cases[0].tp, wanted=lambda case: train(None, case.alone))


def test_with_the_mode_off_the_values_are_right_and_the_bits_others():
    case = TWO.with_(mode=False, optimizer="sgd", steps=1)
    alone = train(None, case.alone)
    for got in run_ranks(train, 2, case):
        torch.testing.assert_close(got, of_share(alone, got), rtol=1e-3, atol=1e-4)
        assert not torch.equal(
            got["gradients 0"]["mixture.experts.down_proj"], alone["gradients 0"]["mixture.experts.down_proj"]
        )


# --- values ---------------------------------------------------------------------------------------------------------


def routed_by_hand(case: Case) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """For each micro-batch x, index and weights, of 5, 0, 7 and 1 tokens; the first all to experts 5 and 6."""
    g = torch.Generator().manual_seed(7)
    batches = []
    for number, count in enumerate((5, 0, 7, 1)):
        x = wide_randn(count, HIDDEN, generator=g, spread=1)
        index = torch.rand(count, EXPERTS, generator=g).argsort(-1)[:, :2] if number else torch.tensor([[6, 5]] * count)
        batches.append((x, index, torch.rand(count, 2, generator=g)))
    return batches, torch.arange(HIDDEN).float()


def experts_alone(world: Any, case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    tp_group, dp_group, ep_group = groups(case)
    torch.manual_seed(5)
    layer = tpi.Experts(EXPERTS, HIDDEN, INNER, bias=True, tp_group=tp_group, expert_parallel_group=ep_group)
    tree = MicroBatchTree(layer.parameters(), dp_group, micro_batches=4)
    batches, dy = routed_by_hand(case)
    found: dict[str, Any] = {}
    with tpi.set_tp_invariant_mode(case.mode):
        for number in tree.share:
            x, index, weights = batches[number]
            x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            y = layer(x, index, weights)
            (y * dy).sum().backward()
            tree.add(count=len(x))
            found |= {f"y {number}": y.detach(), f"dx {number}": x.grad, f"dweights {number}": weights.grad}
        tree.reduce()
    return found | {"gradients": testing.full_grads(layer)}


def by_torch(dtype: torch.dtype) -> dict[str, Any]:
    """The same by torch alone: every token through every expert."""
    torch.manual_seed(5)
    layer = tpi.Experts(EXPERTS, HIDDEN, INNER, bias=True).to(dtype)
    batches, dy = routed_by_hand(FOUR)
    found: dict[str, Any] = {}
    loss = torch.zeros((), dtype=dtype)
    inputs = []
    for number, (x, index, weights) in enumerate(batches):
        x, weights = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
        h = torch.einsum("th,eih->tei", x, layer.gate_up_proj) + layer.gate_up_proj_bias
        inner = torch.nn.functional.silu(h[..., :INNER]) * h[..., INNER:]
        every = torch.einsum("tei,ehi->teh", inner, layer.down_proj) + layer.down_proj_bias
        y = (every.gather(1, index.unsqueeze(-1).expand(-1, -1, HIDDEN)) * weights.unsqueeze(-1)).sum(1)
        loss = loss + (y * dy.to(dtype)).sum()
        found[f"y {number}"] = y.detach()
        inputs.append((x, weights))
    loss.backward()
    for number, (x, weights) in enumerate(inputs):
        found |= {f"dx {number}": x.grad, f"dweights {number}": weights.grad}
    return found | {"gradients": {name: p.grad / 13 for name, p in layer.named_parameters()}}


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30)) if exact.numel() else 0.0


@pytest.mark.parametrize("case", [FOUR, Case(dp=2, tp=2, ep=2)], ids=["dp 4", "dp 2 tp 2"])
def test_values_are_those_of_float64_also_without_tokens(case):
    exact, plain = by_torch(torch.float64), by_torch(torch.float32)
    alone = experts_alone(None, case.alone)
    for got in run_ranks(experts_alone, 4, case):
        assert_bitwise_equal(got, of_share(alone, got))
        for name in got:
            pairs = [(got[name], plain[name], exact[name])]
            if name == "gradients":
                pairs = [(got[name][key], plain[name][key], exact[name][key]) for key in exact[name]]
            for found, stock, wanted in pairs:
                assert found.shape == wanted.shape
                assert error_of(found, wanted) <= 2 * error_of(stock, wanted) + 1e-7, name


# --- other tools ----------------------------------------------------------------------------------------------------


def saved_and_loaded(world: Any, case: Case, folder: str) -> Any:
    tp_group, dp_group, ep_group = groups(case)
    torch.manual_seed(3)
    model = make(case, tp_group, ep_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=4)
    for index in tree.share:
        model(tokens(0, index, case)).square().sum().backward()
        tree.add()
    tree.reduce()
    optimizer.step()
    whole = tpi.full_state_dict(model)
    tpi.checkpoint.save(folder, model, optimizer)
    torch.manual_seed(4)
    again = make(case, tp_group, ep_group)
    steps = torch.optim.AdamW(again.parameters(), lr=0.02)
    tpi.checkpoint.load(folder, again, steps)
    assert_bitwise_equal(tpi.full_state_dict(again), whole)
    assert_bitwise_equal([p.detach() for p in again.parameters()], [p.detach() for p in model.parameters()])
    torch.manual_seed(5)
    third = make(case, tp_group, ep_group)
    tpi.load_full_state_dict(third, whole)
    assert_bitwise_equal(tpi.full_state_dict(third), whole)
    return whole


def loaded(folder: str) -> Any:
    torch.manual_seed(6)
    model = make(Case(), None, ONE_RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tpi.checkpoint.load(folder, model, optimizer)
    return tpi.full_state_dict(model)


@pytest.mark.parametrize("case", [Case(dp=2, tp=2, ep=2), Case(dp=2, tp=2, ep=2, mesh=True)], ids=["group", "mesh"])
def test_checkpoints_and_full_state_dicts(case, tmp_path):
    with tpi.set_tp_invariant_mode(True):
        for whole in run_ranks(saved_and_loaded, 4, case, str(tmp_path / "a")):
            assert_bitwise_equal(loaded(str(tmp_path / "a")), whole)


# --- models of transformers -----------------------------------------------------------------------------------------


def train_mixtral(world: Any, case: Case) -> dict[str, Any]:
    """Two steps of a whole model with its load-balancing loss."""
    tp_group, dp_group, ep_group = groups(case)
    model = hf_models.build("mixtral", output_router_logits=True)
    sp = case.sequence_dim is not None
    model = tpi.parallelize(model, tp_group, expert_parallel_group=ep_group, sequence_parallel=sp, verify=sp)
    found: dict[str, Any] = {}
    chunk = mock.patch.object(micro_batch_tree, "_CHUNK", 1001)  # whose last one is of one element or so
    with tpi.set_tp_invariant_mode(True), chunk:
        tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            for index in tree.share:
                output = model(**hf_models.batch(10 * number + index))
                output.loss.backward()
                tree.add(count=1)
                found[f"loss {number} {index}"] = output.loss.detach(), output.aux_loss.detach()
            tree.reduce()
            found[f"norm {number}"] = tpi.clip_grad_norm_(model.parameters(), 0.5)
            found[f"gradients {number}"] = testing.full_grads(model)
            optimizer.step()
            optimizer.zero_grad()
        found["parameters"] = full_parameters(model)
    return found


def test_parallelize_divides_a_mixtures_experts_over_data_parallel_ranks():
    want = train_mixtral(None, Case())
    case = Case(dp=2, tp=2, ep=2)
    for changed in (case, case.with_(sequence_dim=1), Case(dp=4, ep=2)):
        for got in run_ranks(train_mixtral, 4, changed):
            assert_bitwise_equal(got, of_share(want, got))


# --- what is refused ------------------------------------------------------------------------------------------------


def backwards(layer: Any, tree: Any, extra: str | None) -> list[Tensor]:
    """A step's gradients; `extra` is what happens before each micro-batch's own backward, and counts for nothing."""
    scale = torch.ones(3, HIDDEN, requires_grad=True)

    def loss() -> Tensor:  # two uses of the layer in one backward
        return (call(layer, expert=5) * scale).sum() + call(layer).square().sum()

    for number in tree.share:
        if extra == "warm-up":
            loss().backward()
            layer.zero_grad()
        elif extra == "raises":
            factor = torch.ones((), requires_grad=True)
            y = call(layer) * factor
            factor.register_hook(mock.Mock(side_effect=ZeroDivisionError))
            with pytest.raises(ZeroDivisionError):
                (y.sum() + (torch.zeros((), requires_grad=True) * factor)).backward()
            layer.zero_grad()
        elif extra == "other inputs":
            torch.autograd.grad(loss(), scale)
            loss().backward(inputs=[scale])
        elif extra == "evaluation":
            with torch.no_grad():
                loss()
            loss()
        once = loss() * (number + 1)
        once.backward(retain_graph=True)
        once.backward()
        tree.add()
        layer.zero_grad(set_to_none=extra != "zeros")
    tree.reduce()
    return [local_of(p.grad) for p in layer.parameters()]


def what_counts_for_nothing(world: Any, case: Case) -> tuple[list[list[Tensor]], Any]:
    with tpi.set_tp_invariant_mode(True):
        results = []
        for extra in (None, "warm-up", "raises", "other inputs", "evaluation", "zeros"):
            layer, tree = layer_and_tree(case)
            results.append(backwards(layer, tree, extra))
        return results, testing.full_grads(layer)


@pytest.mark.parametrize("mesh", [False, True], ids=["group", "mesh"])
def test_backwards_that_count_for_nothing(mesh):
    case = TWO.with_(mesh=mesh)
    _, alone = what_counts_for_nothing(None, case.alone)
    for results, full in run_ranks(what_counts_for_nothing, 2, case):
        assert_bitwise_equal(full, alone)
        for found in results[1:]:
            assert_bitwise_equal(found, results[0])


def saved_by_several(world: Any, case: Case, folder: str) -> None:
    tp_group, _, ep_group = groups(case)
    torch.manual_seed(3)
    tpi.checkpoint.save(f"{folder}/a", make(case, tp_group, ep_group), group=world)


def test_a_checkpoint_of_several_groups_with_the_same_experts(tmp_path):
    run_ranks(saved_by_several, 4, Case(dp=4, ep=2), str(tmp_path))
    torch.manual_seed(3)
    model = make(Case(), None, ONE_RANK)
    whole = tpi.full_state_dict(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    tpi.checkpoint.load(str(tmp_path / "a"), model)
    assert_bitwise_equal(tpi.full_state_dict(model), whole)


def layer_and_tree(case: Case, micro_batches: int = 4, tree: bool = True, **options: Any) -> Any:
    tp_group, dp_group, ep_group = groups(case)
    torch.manual_seed(3)
    layer = tpi.Experts(EXPERTS, HIDDEN, INNER, tp_group=tp_group, expert_parallel_group=ep_group, **options)
    return layer, MicroBatchTree(layer.parameters(), dp_group, micro_batches=micro_batches) if tree else None


def call(layer: Any, tokens: int = 3, expert: int = 1) -> Tensor:
    index = torch.tensor([[0, expert]] * tokens)
    return layer(torch.ones(tokens, HIDDEN), index, torch.ones(tokens, 2))


def step(layer: Any, tree: Any, skip_forward: Any = None, skip_backward: Any = None) -> None:
    layer.zero_grad()
    for number, _ in enumerate(tree.share):
        if number != skip_forward:
            y = call(layer)
            if number != skip_backward:
                y.sum().backward()
        tree.add()
    tree.reduce()


def mistakes(world: Any, name: str) -> str:
    """What one kind of mistake gives on this rank; where ranks differ, rank 1 makes it."""
    me = dist.get_rank()
    odd = me == 1
    with tpi.set_tp_invariant_mode(True):
        if name == "no tree":
            return error_text(call, layer_and_tree(TWO, tree=False)[0])
        if name == "no tree on one rank":
            layer, tree = layer_and_tree(TWO)
            del tree
            layer.requires_grad_(True)
            keep = MicroBatchTree(layer.parameters(), groups(TWO)[1], micro_batches=4)
            if odd:
                del keep
            return error_text(call, layer)
        if name == "a tree that is freed":
            layer, tree = layer_and_tree(TWO)
            y = call(layer)
            del tree
            return error_text(y.sum().backward)
        if name == "micro-batches":
            return error_text(layer_and_tree, TWO, 5)
        if name == "dp_group":
            layer, _ = layer_and_tree(TWO, tree=False)
            return error_text(MicroBatchTree, layer.parameters(), ONE_RANK, 4)
        if name == "regulariser":
            layer, tree = layer_and_tree(TWO)
            (call(layer).sum() + layer.down_proj.square().sum()).backward()
            return error_text(tree.add)
        if name == "autograd.grad":
            layer, tree = layer_and_tree(TWO)
            return error_text(torch.autograd.grad, call(layer).sum(), layer.down_proj)
        if name in ("before reduce", "written to"):
            layer, tree = layer_and_tree(TWO)
            call(layer).sum().backward()
            if name == "before reduce":
                return f"{all(bool(p.grad.isnan().all()) for p in layer.parameters())}"
            layer.zero_grad(set_to_none=False)
            return error_text(tree.add)
        if name == "number of experts":
            return error_text(lambda: tpi.Experts(7, HIDDEN, INNER, expert_parallel_group=groups(TWO)[2]))
        if name == "parametrized":
            layer, tree = layer_and_tree(TWO)
            nn.utils.parametrize.register_parametrization(layer, "down_proj", nn.Identity())
            return error_text(call, layer)
        if name == "a copied shard":
            layer, tree = layer_and_tree(TWO)
            with torch.no_grad():
                for p in layer.parameters():
                    dist.broadcast(p.detach(), 0, group=groups(TWO)[1])
            return error_text(call, layer)
        if name == "recomputed":  # no mistake
            layer, tree = layer_and_tree(TWO)
            x, index = torch.ones(3, HIDDEN, requires_grad=True), torch.tensor([[0, 5]] * 3)
            results = []
            for again in (False, True):
                with mock.patch.dict(os.environ, TP_INVARIANT_CHECK="1"):
                    for number in tree.share:
                        rows = slice(0, 1 + number % 3)
                        own = (x[rows], index[rows], torch.ones(3, 2)[rows])
                        y = checkpoint(layer, *own, use_reentrant=False) if again else layer(*own)
                        y.sum().backward()
                        tree.add()
                tree.reduce()
                results.append([p.grad.clone() for p in layer.parameters()])
                layer.zero_grad()
            return error_text(assert_bitwise_equal, *results)
        layer, tree = layer_and_tree(TWO)
        assert error_text(step, layer, tree) == "no error"  # what is compared at a first call alone is over
        if name == "index":
            return error_text(call, layer, 3, 8 if odd else 1)
        if name == "mode":
            with tpi.set_tp_invariant_mode(not odd):
                return error_text(call, layer)
        if name == "gradient":
            with torch.set_grad_enabled(not odd):
                return error_text(call, layer)
        if name == "a forward left out":
            return error_text(step, layer, tree, 0 if odd else None)
        if name == "a backward left out":
            return error_text(step, layer, tree, None, 0 if odd else None)
        if name == "add left out":
            return error_text(
                lambda: (layer.zero_grad(), call(layer).sum().backward(), None if odd else tree.add(), tree.reduce())
            )
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "on_the_odd_rank", "on_the_other"),
    [
        ("no tree", "ValueError: gate_up_proj .* partial sums, which data_parallel.MicroBatchTree adds", None),
        ("no tree on one rank", "ValueError: .*MicroBatchTree adds", "RuntimeError: .*MicroBatchTree adds.* on rank 1"),
        ("a tree that is freed", "RuntimeError: the MicroBatchTree .* was freed between", None),
        ("micro-batches", "ValueError: micro_batches=5 over 2 ranks .* must divide", None),
        ("dp_group", r"ValueError: dp_group .* ranks \[1\], .* over the ranks \[0, 1\]", r"dp_group .* \[0\]"),
        ("regulariser", "RuntimeError: parameter 1 .* has a .grad", None),
        ("autograd.grad", "RuntimeError: torch.autograd.grad asks for the gradient of an expert", None),
        ("before reduce", "True", None),
        ("written to", "RuntimeError: parameter 0 .* has a .grad.* set_to_none", None),
        ("number of experts", "ValueError: num_experts=7 .*expert-parallel degree=2", None),
        ("parametrized", "ValueError: down_proj .* is not a parameter", None),
        ("a copied shard", "RuntimeError: the weight of Experts.* is the same on rank 0, 1", None),
        ("recomputed", "no error", None),
        ("index", "IndexError: top_k_index holds 8", "RuntimeError: .*top_k_index holds 8 .*on rank 1"),
        ("mode", "RuntimeError: .*the TP-invariant mode is True on rank 0; False on rank 1", None),
        ("gradient", "RuntimeError: .*what needs a gradient is", None),
        ("a forward left out", "RuntimeError: .*the call is", None),
        ("a backward left out", "RuntimeError: .* make different calls", None),
        ("add left out", "RuntimeError: .*the number of micro-batches added is 1 on rank 0; 0 on rank 1", None),
    ],
)  # fmt: skip
def test_mistakes_give_errors_on_every_rank(name, on_the_odd_rank, on_the_other):
    other, odd = run_ranks(mistakes, 2, name)
    try:
        assert re.search(on_the_odd_rank, odd), odd
        assert re.search(on_the_other or on_the_odd_rank, other), other
    finally:
        if name.endswith("left out"):
            discard_pool("cpu")


def odd_groups(world: Any) -> list[str]:
    case = Case(dp=2, tp=2, ep=2)
    tp_group, dp_group, _ = groups(case)
    found = [error_text(lambda: tpi.Experts(8, HIDDEN, INNER, tp_group=tp_group, expert_parallel_group=dp_group))]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _, _, whole = groups(case)
    found.append(error_text(lambda: tpi.Experts(8, HIDDEN, INNER, tp_group=mesh["tp"], expert_parallel_group=whole)))
    found.append(error_text(Ranks, make(case, tp_group, whole), None))
    _, all_ranks, some = groups(Case(dp=4, ep=2))
    found.append(error_text(Ranks, make(case, None, some), all_ranks))
    ranks = Ranks(make(case, tp_group, whole), dp_group)
    assert (ranks.tp.size, ranks.dp.size, ranks.holders.size) == (2, 2, 4) and ranks.experts_over_data and ranks.saves
    found.append(error_text(ranks.check_shared, 3, "a step has"))
    return found


def test_groups_that_do_not_fit_are_named():
    for text in run_ranks(odd_groups, 4):
        assert re.search(r"ValueError: expert_parallel_group has the global ranks \[\d, \d\] and tp_group", text[0])
        assert re.search("ValueError: of tp_group and expert_parallel_group one is a DeviceMesh", text[1])
        for refused in text[2:4]:
            assert re.search("ValueError: mixture.experts.gate_up_proj belongs to experts that are divided", refused)
        assert re.search("ValueError: a step has 3 micro-batches .* or with experts over data parallel ranks", text[4])
