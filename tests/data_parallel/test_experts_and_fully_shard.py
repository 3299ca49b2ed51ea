"""Mixtures of experts beside fully_shard: the bytes of one process that computes all micro-batches; right values."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import hf_models
import pytest
import torch
from cases import more
from error_texts import error_text
from meshes import init_device_mesh
from models import ExpertNet
from ranks import run_ranks
from same_as_alone import assert_as_alone, run_all
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group
from tp_invariant.data_parallel import MicroBatchTree, TokenCount, fix_reduction_order
from tp_invariant.layers.experts import Experts
from tp_invariant.testing import assert_bitwise_equal, wide_randn

ONE_RANK = Group(None, 0, 1)
HIDDEN, INNER, EXPERTS = 8, 16, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """dp x tp ranks. Experts are divided over those of tp, or over those of `over_data` replicas."""

    dp: int = 1
    tp: int = 1
    model: str = "layers"  # or a family of transformers'
    by_expert: bool = False
    over_data: int = 0
    strided: bool = False  # over every (dp / over_data)-th replica, not consecutive ones
    bias: bool = True
    transposed: bool = False
    sequence_parallel: bool = False
    alone: bool = False  # fully_shard of the experts by themselves, too
    checkpointed: bool = False  # activations
    low_precision: bool = False  # products in bfloat16, by fully_shard
    micro_batches: int = 4
    steps: int = 2
    mode: bool = True

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def in_one_process(self) -> Case:
        return self.with_(
            dp=1, tp=1, over_data=min(self.over_data, 1), strided=False, sequence_parallel=False, checkpointed=False
        )


def make(case: Case, seed: int = 3) -> tuple[nn.Module, Any]:
    """The model, fully_shard of it over dp if there are several ranks, and dp_group."""
    tp_group = dp_group = ep_group = None
    if case.dp * case.tp > 1:
        mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
        tp_group, dp_group = mesh["tp"], mesh["dp"]
    if case.by_expert or case.over_data:
        ep_group = ONE_RANK if tp_group is None else tp_group
        if case.over_data > 1:
            assert case.over_data == case.dp or case.tp == 1
            shape = case.dp // case.over_data, case.over_data * case.tp
            names = ("ep", "copy") if case.strided else ("copy", "ep")
            ep_group = init_device_mesh("cpu", shape[::-1] if case.strided else shape, mesh_dim_names=names)["ep"]
    if case.model == "layers":
        torch.manual_seed(seed)
        mixture = dict(bias=case.bias, transposed=case.transposed, expert_parallel_group=ep_group)
        shared = dict(tp_group=tp_group, sequence_parallel=case.sequence_parallel)
        model: Any = ExpertNet(HIDDEN, INNER, EXPERTS, mixture, **shared)
        blocks = [model.mixture]
    else:
        model = hf_models.build(case.model, num_hidden_layers=1)
        if seed != 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2.0)
        tpi.parallelize(model, tp_group, sequence_parallel=case.sequence_parallel, expert_parallel_group=ep_group)
        blocks = list(model.model.layers)
        if case.checkpointed:
            model.gradient_checkpointing_enable()
    if dp_group is not None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.low_precision else MixedPrecisionPolicy()
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        ignored = {p for module in experts for p in module.parameters()} if case.over_data else set()
        for module in (*(experts if case.alone else ()), *blocks, model):
            fully_shard(
                module, mesh=dp_group, shard_placement_fn=tpi.fsdp_placement, ignored_params=ignored, mp_policy=policy
            )
        fix_reduction_order(model)
    return model, ONE_RANK if dp_group is None else dp_group


def loss_of(model: nn.Module, case: Case, number: int) -> Tensor:
    """Of one micro-batch; their lengths differ, and are multiples of 4."""
    if case.model != "layers":
        return model(**hf_models.batch(number)).loss
    generator = torch.Generator().manual_seed(number)
    x = wide_randn(4 * (1 + number % 3), 2, HIDDEN, generator=generator, spread=2)
    if case.sequence_parallel:
        group = model.up.group  # type: ignore[union-attr]
        x = x.chunk(group.size)[group.rank]
    return model(x).square().sum()  # type: ignore[no-any-return]


def train(world: Any, case: Case) -> dict[str, Any]:
    return trained(case)[2]


def trained(case: Case) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model, its optimizer; losses of this rank's share, each step's whole gradients and norm, the parameters."""
    with tpi.set_tp_invariant_mode(case.mode):
        model, dp_group = make(case)
        tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=case.micro_batches)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found: dict[str, Any] = {}
        for step in range(case.steps):
            for index in tree.share:
                loss = loss_of(model, case, step * case.micro_batches + index)
                loss.backward()
                tree.add(count=1)
                if not case.sequence_parallel:
                    found[f"loss {step} {index}"] = loss.detach()
            tree.reduce()
            found[f"gradients {step}"] = testing.full_grads(model)
            found[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found["parameters"] = tpi.full_state_dict(model)
    return model, optimizer, found


@functools.cache
def in_one_process(case: Case) -> dict[str, Any]:
    return train(None, case)


def assert_as_one_process(cases: list[Case]) -> None:
    alone = lambda case: in_one_process(case.in_one_process)  # noqa: E731
    assert_as_alone(train, cases, cases[0].dp * cases[0].tp, wanted=alone)


LAYERS, TWO_BY_TWO = Case(), Case(dp=2, tp=2)
BY_EXPERT, ALONE = LAYERS.with_(by_expert=True), LAYERS.with_(transposed=True, alone=True, sequence_parallel=True)
QWEN, GPT_OSS = Case(model="qwen3_moe"), Case(model="gpt_oss")
MIXTRAL = Case(model="mixtral", by_expert=True)


def at(dp: int, tp: int, *cases: Case) -> list[Case]:
    return [case.with_(dp=dp, tp=tp) for case in cases]


@pytest.mark.parametrize(
    "cases",
    [
        more(at(2, 1, LAYERS, BY_EXPERT, QWEN.with_(checkpointed=True))),
        more(at(1, 2, ALONE, GPT_OSS)),
        at(2, 2, LAYERS, BY_EXPERT, ALONE, GPT_OSS, MIXTRAL),
    ],
    ids=["2x1", "1x2", "2x2"],
)
def test_experts_over_the_ranks_of_tp(cases):
    assert_as_one_process(cases)


@pytest.mark.parametrize(
    "cases",
    [
        at(2, 1, LAYERS.with_(over_data=2)),
        [
            *at(2, 2, LAYERS.with_(over_data=2, sequence_parallel=True), Case(model="mixtral", over_data=2)),
            *at(4, 1, LAYERS.with_(over_data=4), LAYERS.with_(over_data=2, micro_batches=8)),
            *at(4, 1, LAYERS.with_(over_data=2, micro_batches=8, strided=True)),
        ],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_experts_over_data_parallel_ranks(cases):
    assert_as_one_process(cases)


def test_with_the_mode_off_the_values_are_right_and_the_bits_others():
    cases = at(2, 2, LAYERS.with_(mode=False, steps=1), LAYERS.with_(mode=False, steps=1, over_data=2))
    for results in run_ranks(run_all, 4, train, cases):
        for case, got in zip(cases, results, strict=True):
            on, off = (in_one_process(case.in_one_process.with_(mode=mode)) for mode in (True, False))
            for name, gradient in got["gradients 0"].items():
                torch.testing.assert_close(gradient, on["gradients 0"][name], rtol=1e-3, atol=1e-4)
            assert not torch.equal(got["gradients 0"]["up.weight"], off["gradients 0"]["up.weight"])


@pytest.mark.parametrize("case", [QWEN, GPT_OSS, MIXTRAL], ids=lambda case: case.model)
def test_values_are_those_of_float64(case):
    """Of the gradients that the other tests compare: at most twice the error of transformers' own in float32."""
    found = in_one_process(case)["gradients 0"]
    exact, theirs = (untouched(case, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (found, theirs)]
        assert errors[0] <= max(2 * errors[1], 4e-6), (name, errors)


def untouched(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The mean gradient of the first step's micro-batches."""
    model: Any = hf_models.build(case.model, dtype, num_hidden_layers=1)
    model.config._experts_implementation = "eager"
    for number in range(case.micro_batches):
        loss_of(model, case, number).backward()
    return {n: p.grad / case.micro_batches for n, p in model.named_parameters() if p.grad is not None}


def in_low_precision(world: Any, case: Case) -> dict[str, Any]:
    """As `train`; and, with TokenCount, two micro-batches of each of two ranks, which are added before the ranks'."""
    found = train(world, case)
    if case.dp == 2:
        with tpi.set_tp_invariant_mode(True):
            model, dp_group = make(case)
            tokens = TokenCount(dp_group)
            fix_reduction_order(model, tokens)
            tokens.set(2)
            for last in (False, True):
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
                loss_of(model, case, 2 * last + dp_group.get_local_rank()).backward()
            found["accumulated"] = testing.full_grads(model)
    return found


def test_mixed_precision_and_accumulated_gradients():
    case = QWEN.with_(low_precision=True, steps=1)
    wanted = run_ranks(in_low_precision, 2, case.with_(dp=2))[0]
    exact, theirs = (untouched(QWEN, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, value in exact.items():
        found = wanted["gradients 0"][name], wanted["accumulated"][name], theirs[name]
        *ours, stock = (float((x.double() - value).norm() / value.norm()) for x in found)
        assert max(ours) <= 2 * stock, (name, ours, stock)
    for dp, ranks in ((1, 2), (2, 4)):
        names = ("gradients 0", "norm 0", "parameters", "accumulated")[: 4 if dp == 2 else 3]
        for got in run_ranks(in_low_precision, ranks, case.with_(dp=dp, tp=2)):
            assert_bitwise_equal({name: got[name] for name in names}, {name: wanted[name] for name in names})


def stepped(world: Any, dp: int, frozen: bool) -> dict[str, Any]:
    """Two steps of the integrations', which train the experts alone where the rest is frozen."""
    from tp_invariant.integrations.training import Ranks, Step

    case = LAYERS.with_(dp=dp, over_data=dp)
    found: dict[str, Any] = {}
    with tpi.set_tp_invariant_mode(True):
        model, dp_group = make(case)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or ".experts." in name)
        step = Step(Ranks(model, None if dp == 1 else dp_group), [model])
        for number, micro_batches in enumerate((8, 4)):
            step.start(micro_batches)
            computed = []
            for index in range(micro_batches):
                due = step.due(index, 8 * number + index)
                if due is not None:
                    loss = loss_of(model, case, due[1])
                    loss.backward()
                    step.add(loss)
                    computed.append(due[0])
            assert computed == list(range(dp_group.get_local_rank() if dp > 1 else 0, micro_batches, dp))
            found[f"loss {number}"] = step.finish()
            found[f"gradients {number}"] = testing.full_grads(model)
            model.zero_grad()
    return found


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "experts alone"])
def test_steps_of_the_integrations(frozen):
    want = stepped(None, 1, frozen)
    assert (want["gradients 0"]["up.weight"] is None) == frozen
    for got in run_ranks(stepped, 2, 2, frozen):
        assert_bitwise_equal(got, want)


def clipped_after_an_evaluation(world: Any) -> list[Any]:
    """What MicroBatchTree says to the model's parameters; the norm of the sharded ones before, and after reshard."""
    with tpi.set_tp_invariant_mode(True):
        model, dp_group = make(LAYERS.with_(dp=2))
        parameters = list(model.parameters())
        tree = MicroBatchTree(parameters, dp_group, 2)
        for index in tree.share:
            loss_of(model, LAYERS, index).backward()
            tree.add()
        tree.reduce()
        with torch.no_grad():
            loss_of(model, LAYERS, 2)
        late = error_text(MicroBatchTree, model.parameters(), dp_group, 2)
        norms = [tpi.clip_grad_norm_(parameters, 1e9)]
        model.reshard()
        return [late, *norms, tpi.clip_grad_norm_(model.parameters(), 1e9)]


def test_parameters_that_are_gathered_are_refused():
    """fully_shard's root keeps gathered parameters after a forward alone."""
    for late, norm, again in run_ranks(clipped_after_an_evaluation, 2):
        assert re.search(r"ValueError: parameter \d+ .* of dp_group is one that fully_shard has gathered", late)
        assert torch.equal(norm, again) and norm > 0


# --- states and checkpoints -----------------------------------------------------------------------------------------


def states(model: nn.Module, optimizer: Any) -> Any:
    return tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)


def saved(world: Any, cases: list[Case], folder: str) -> list[Any]:
    results = []
    for number, case in enumerate(cases):
        model, optimizer, _ = trained(case)
        full = states(model, optimizer)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_bitwise_equal({name: found[name] for name in full[0]}, full[0])
        tpi.checkpoint.save(f"{folder}/{number}", model, optimizer)
        results.append(full)
        for other in cases:
            if other.by_expert or other.over_data or not (case.by_expert or case.over_data):
                assert_bitwise_equal(loaded(other, f"{folder}/{number}", full), [full, full])
    return results


def loaded(case: Case, folder: str, full: Any) -> list[Any]:
    """From the folder, and from full states, into models of other values."""
    results = []
    for way in range(2):
        model, dp_group = make(case, seed=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tree = MicroBatchTree(model.parameters(), dp_group, micro_batches=case.dp)
        loss_of(model, case, 0).backward()
        tree.add()
        tree.reduce()
        optimizer.step()
        if way:
            tpi.load_full_state_dict(model, full[0])
            tpi.load_full_optimizer_state_dict(model, optimizer, full[1])
        else:
            tpi.checkpoint.load(folder, model, optimizer)
        results.append(states(model, optimizer))
    return results


@pytest.mark.more
def test_checkpoints_and_full_states(tmp_path):
    short = LAYERS.with_(steps=1)
    cases = at(2, 2, short, short.with_(by_expert=True), short.with_(over_data=2))
    with tpi.set_tp_invariant_mode(True):
        for results in run_ranks(saved, 4, cases, str(tmp_path)):
            for number, (case, full) in enumerate(zip(cases, results, strict=True)):
                one = case.in_one_process
                assert_bitwise_equal(full, states(*trained(one)[:2]))
                assert_bitwise_equal(loaded(one, str(tmp_path / str(number)), full), [full, full])


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(world: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = tpi.MixtureOfExperts(4, 8, 8, tpi.Routing(2), expert_parallel_group=mesh.get_group())
    fully_shard(whole, mesh=mesh)
    x = torch.ones(3, 8)
    with tpi.set_tp_invariant_mode(True):
        texts = [error_text(whole, x)]
        with torch.no_grad():
            texts.append(error_text(whole, x))
        layer = tpi.MixtureOfExperts(4, 8, 8, tpi.Routing(2), expert_parallel_group=mesh)
        fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()))
        texts.append(error_text(MicroBatchTree, layer.parameters(), mesh, 4))
        fix_reduction_order(layer)
        texts.append(error_text(MicroBatchTree, layer.parameters(), mesh, 3))
        layer = tpi.MixtureOfExperts(4, 8, 8, tpi.Routing(2), expert_parallel_group=mesh)
        texts.append(error_text(fully_shard, layer, mesh=mesh))
        layer = tpi.MixtureOfExperts(4, 8, 8, tpi.Routing(2), expert_parallel_group=mesh)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()), mp_policy=policy)
        fix_reduction_order(layer)
        tree = MicroBatchTree(layer.parameters(), mesh, 4)
        texts.append(error_text(layer, x))
        assert tree.share == range(mesh.get_local_rank(), 4, 2)
    return texts


def test_what_is_refused():
    for texts in run_ranks(refused, 2):
        for text in texts[:2]:
            assert re.search(
                r"ValueError: .*Experts\(4, 8, 8\) on rank \d .* leave its parameters out.*ignored_params", text
            )
        assert "call fix_reduction_order(model), without tokens, before MicroBatchTree" in texts[2]
        assert "ValueError: micro_batches=3 over 2 ranks" in texts[3]
        assert texts[4] != "no error"  # torch's own
        assert "TypeError: hidden_states is torch.bfloat16 and gate_up_proj is torch.float32" in texts[5]
