"""A tool that copies one rank's plain shards to the others is noticed at the first call."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
from meshes import mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_invariant as tpi
from tp_invariant import testing


class Model(nn.Module):
    def __init__(self, tp, **options) -> None:
        super().__init__()
        self.embed = tpi.VocabParallelEmbedding(16, 32, tp_group=tp)
        self.fc1 = tpi.LayerNormLinear(32, 64, parallel_mode="column", tp_group=tp, **options)
        self.fc2 = tpi.Linear(64, 32, parallel_mode="row", tp_group=tp, **options)
        self.whole = tpi.Linear(32, 32, tp_group=tp)
        self.head = tpi.Linear(32, 16, parallel_mode="column", bias=False, gather_output=True, tp_group=tp)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.whole(self.fc2(self.fc1(self.embed(ids)))))


def by_fully_shard(model, tp_group, folder):
    fully_shard(model, mesh=DeviceMesh.from_group(tp_group, "cpu"))
    return model


def by_a_load(model, tp_group, folder):
    if tp_group.rank() == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
    torch.distributed.barrier(tp_group)
    model.load_state_dict(torch.load(f"{folder}/rank0.pt"))
    return model


def by_a_broadcast(model, tp_group, folder):
    """As trainers do."""
    for p in model.parameters():
        torch.distributed.broadcast(p.detach(), 0, group=tp_group)
    return model


def by_ddp(model, tp_group, folder):
    return DistributedDataParallel(model, process_group=tp_group)


def message(model, ids):
    with pytest.raises(RuntimeError) as caught:
        model(ids)
    return str(caught.value)


def copied(tp_group, tool, folder):
    torch.manual_seed(0)
    model = Model(tp_group)
    right = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(8)
    wrapped = tool(model, tp_group, folder)
    text = message(wrapped, ids)
    assert message(wrapped, ids) == text  # until it is right again
    if tool in (by_a_load, by_a_broadcast):
        model.load_state_dict(right, strict=False)
        wrapped(ids)
    return text


@pytest.mark.parametrize("tool", [by_fully_shard, by_a_load, by_a_broadcast, by_ddp])
@pytest.mark.parametrize("mode", [True, False])
def test_equal_shards_are_refused(tool, mode, tmp_path):
    with tpi.set_tp_invariant_mode(mode):
        said = run_ranks(copied, 2, tool, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith(
        "the weight of VocabParallelEmbedding(16, 32) is the same on rank 0, 1 of tp_group, which must hold different "
        "parts of it: one rank's part has been copied to the others, or code of yours has drawn the same values on "
        "each. "
    )
    assert "shards_may_be_equal = True" in said[0]


def two_of_four(tp_group):
    """Where some ranks alone are equal, all say so."""
    layer = tpi.Linear(8, 32, parallel_mode="column", tp_group=tp_group)
    torch.manual_seed(max(1, tp_group.rank()))
    layer.weight = nn.Parameter(torch.rand(8, 8))
    if tp_group.rank() == 2:
        torch.manual_seed(1)
        layer.weight = nn.Parameter(torch.rand(8, 8))
    return message(layer, torch.ones(2, 8))


def test_the_ranks_are_named():
    said = run_ranks(two_of_four, 4)
    assert len(set(said)) == 1
    assert "the weight of Linear(8, 32, 'column') is the same on rank 0, 1, 2 of tp_group" in said[0]


def equal_by_right(tp_group, mesh):
    """What may be equal: constants, weights that are whole, and what says so; then the values are right."""
    tp = DeviceMesh.from_group(tp_group, "cpu") if mesh else tp_group
    ids = torch.arange(8)
    for init in (nn.init.zeros_, nn.init.ones_, lambda weight: nn.init.constant_(weight, torch.nan)):
        Model(tp, init_method=init)(ids)
    torch.manual_seed(0)
    layer = tpi.Linear(8, 16, parallel_mode="column", gather_output=True, bias=False, tp_group=tp)
    part = torch.randn(16 // tp_group.size(), 8)
    layer.weight = nn.Parameter(part.clone())
    if tp_group.size() > 1:
        assert "is the same on rank 0, 1" in message(layer, torch.eye(8))
    layer.shards_may_be_equal = True
    layer(torch.eye(8))
    layer = copy.deepcopy(layer)
    layer.shards_may_be_equal, layer.weight.shards_may_be_equal = False, True
    for again in (layer, copy.deepcopy(layer)):
        y = again(torch.eye(8))
        testing.assert_bitwise_equal(y.detach(), torch.cat([part] * tp_group.size()).t().contiguous())


@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_what_may_be_equal(size, mesh):
    with tpi.set_tp_invariant_mode(True):
        run_ranks(equal_by_right, size, mesh)


# --- parts of different full weights ----------------------------------------------------------------------------------


def made_of_others(tp_group, kind, way, seeds):
    """The first call of layers without a parameter that is whole on every rank; what rank 1 was seeded with."""
    group = mesh_or_group(tp_group, kind)
    torch.manual_seed(seeds[tp_group.rank()])
    if way == "embedding":
        layer = tpi.VocabParallelEmbedding(16, 32, padding_idx=0, tp_group=group)
    elif way == "from_linear":
        layer = tpi.Linear.from_linear(nn.Linear(32, 64, bias=False), parallel_mode="row", tp_group=group)
    elif way == "experts":
        layer = tpi.Experts(4, 32, 64, tp_group=group, bias=False)
    else:
        layer = tpi.Linear(32, 64, bias=False, parallel_mode="column", tp_group=group)
    layer = copy.deepcopy(layer).to(torch.bfloat16)
    if way == "written":  # by code that knows of ranks, or loads a checkpoint
        torch.manual_seed(tp_group.rank())
        with torch.no_grad():
            layer.weight.data.normal_()
    if way == "reset":
        torch.manual_seed(1)
        layer.reset_parameters()
    if way == "embedding":
        call = functools.partial(layer, torch.arange(8))
    elif way == "experts":
        x, index = torch.ones(4, 32, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.long)
        call = functools.partial(layer, x, index, torch.ones(4, 1))
    else:
        features = 32 // tp_group.size() if way == "from_linear" else 32
        call = functools.partial(layer, torch.ones(2, features, dtype=torch.bfloat16))
    try:
        call()
        return ""
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_ranks_with_seeds_of_their_own(kind):
    for way in ("drawn", "embedding", "from_linear", "experts"):
        (one, other) = run_ranks(made_of_others, 2, kind, way, (0, 1))
        assert one == other
        assert re.match(
            r"the ranks of tp_group hold parts of different full weights of (Lin|Voc|Exp)\w+.*: one value on rank 0, "
            r"another on rank 1\. Seed all ranks alike",
            one,
        ), (way, one)
        assert run_ranks(made_of_others, 2, kind, way, (1, 1)) == ["", ""]
    for way in ("written", "reset"):
        assert run_ranks(made_of_others, 2, kind, way, (0, 1)) == ["", ""]
