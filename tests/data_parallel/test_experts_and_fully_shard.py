"""Mixtures of experts beside fully_shard: the bytes of one process that computes all micro-batches; right values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hf_models
import pytest
import torch
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group
from tp_invariant.data_parallel import MicroBatchTree, TokenCount, fix_reduction_order
from tp_invariant.layers.experts import Experts
from tp_invariant.testing import assert_bitwise_equal, wide_randn

run_ranks = functools.partial(testing.run_ranks, device="cpu")
ONE_RANK = Group(None, 0, 1)
HIDDEN, INNER, EXPERTS = 8, 16, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """dp x tp ranks. Experts are divided over those of tp, or with over_data over all."""

    dp: int = 1
    tp: int = 1
    model: str = "layers"  # or a family of transformers'
    by_expert: bool = False
    over_data: bool = False
    bias: bool = True
    transposed: bool = False
    sequence_parallel: bool = False
    alone: bool = False  # fully_shard of the experts by themselves, too
    micro_batches: int = 4
    steps: int = 2
    mode: bool = True

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def in_one_process(self) -> Case:
        return self.with_(dp=1, tp=1, sequence_parallel=False)


class Net(nn.Module):
    """A dense pair of layers around which tokens keep their places, and a mixture of experts."""

    def __init__(self, case: Case, tp_group: Any, ep_group: Any) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(tp_group=tp_group, sequence_parallel=case.sequence_parallel)
        self.up = tpi.Linear(HIDDEN, INNER, parallel_mode="column", **shared)
        self.down = tpi.Linear(INNER, HIDDEN, parallel_mode="row", **shared)
        self.mixture = tpi.MixtureOfExperts(
            EXPERTS, HIDDEN, INNER, tpi.Routing(top_k=2), bias=case.bias, transposed=case.transposed,
            expert_parallel_group=ep_group, **shared,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.nn.functional.silu(self.up(x)))
        return x + self.mixture(x)


def make(case: Case, seed: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    """The model, fully_shard of it over dp if there are several ranks, and dp_group."""
    tp_group = dp_group = ep_group = None
    if case.dp * case.tp > 1:
        mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
        tp_group, dp_group = mesh["tp"], mesh["dp"]
    if case.by_expert or case.over_data:
        ep_group = ONE_RANK if tp_group is None else tp_group
        if case.over_data and tp_group is not None:
            ep_group = init_device_mesh("cpu", (case.dp * case.tp,), mesh_dim_names=("ep",))
    if case.model == "layers":
        torch.manual_seed(seed)
        model: Any = Net(case, tp_group, ep_group)
        blocks = [model.mixture]
    else:
        model = hf_models.build(case.model)
        if seed != 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2.0)
        tpi.parallelize(
            model, tp_group, sequence_parallel=case.sequence_parallel, expert_parallel_group=ep_group
        )
        blocks = list(model.model.layers)
    if dp_group is not None:
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        ignored = {p for module in experts for p in module.parameters()} if case.over_data else set()
        for module in (*(experts if case.alone else ()), *blocks, model):
            fully_shard(
                module, mesh=dp_group, shard_placement_fn=tpi.fsdp_placement, ignored_params=ignored, **options
            )
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
    """Losses of this rank's share, and each step's whole gradients, norm and parameters."""
    with tpi.set_tp_invariant_mode(case.mode):
        model, dp_group = make(case)
        if case.dp * case.tp > 1:
            fix_reduction_order(model)
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
    return found


@functools.cache
def in_one_process(case: Case) -> dict[str, Any]:
    return train(None, case)


def assert_as_one_process(cases: list[Case]) -> None:
    wanted = [in_one_process(case.in_one_process) for case in cases]
    for rank, results in enumerate(run_ranks(train_all, cases[0].dp * cases[0].tp, cases)):
        for case, got, want in zip(cases, results, wanted, strict=True):
            try:
                assert_bitwise_equal(got, {name: want[name] for name in got})
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, {case}: {error}") from None


def train_all(world: Any, cases: list[Case]) -> list[dict[str, Any]]:
    return [train(world, case) for case in cases]


LAYERS = Case()
TWO_BY_TWO = Case(dp=2, tp=2)


def all_layouts(*cases: Case) -> list[list[Case]]:
    return [[case.with_(dp=dp, tp=tp) for case in cases] for dp, tp in ((2, 1), (1, 2), (2, 2))]


@pytest.mark.parametrize(
    "cases", all_layouts(LAYERS, LAYERS.with_(by_expert=True), LAYERS.with_(transposed=True, alone=True)),
    ids=["2x1", "1x2", "2x2"],
)
def test_layers(cases):
    assert_as_one_process(cases)


@pytest.mark.parametrize(
    "cases",
    all_layouts(Case(model="qwen3_moe"), Case(model="gpt_oss"), Case(model="mixtral", by_expert=True)),
    ids=["2x1", "1x2", "2x2"],
)
def test_models(cases):
    assert_as_one_process(cases)
