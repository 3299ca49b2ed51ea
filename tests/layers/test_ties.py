"""Shared parameters: parallelize keeps ties, and refuses those to modules outside of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from meshes import mesh_or_group
from torch import nn

import tp_invariant as tpi
from tp_invariant import testing


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def refused(make) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


def parallelized(tp_group):
    torch.manual_seed(0)
    model = nn.Sequential(*tied().values())
    tpi.parallelize(model, tp_group, {"1": "colwise"})
    assert model[0].weight is model[1].weight
    full = tied()
    inner = nn.Sequential(full["embed"])
    text = refused(lambda: tpi.parallelize(inner, tp_group, {"0": "embedding_rowwise"}))
    assert "0.weight: is also Linear.weight of a module outside of the model" in text
    assert type(inner[0]) is nn.Embedding and full["head"].weight is inner[0].weight
    twin = copy.deepcopy(inner)
    tpi.parallelize(twin, tp_group, {"0": "embedding_rowwise"})
    copied_elsewhere(tp_group)
    one, other = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
    other[0] = one[0]  # two models share a module, whose parameters one module alone holds
    both = nn.ModuleList([one, other])
    tpi.parallelize(both, tp_group, {"*.0": "colwise", "*.1": "rowwise"})
    assert type(one[0]) is tpi.Linear and other[0] is one[0]
    return True


def copied_elsewhere(tp_group):
    """A model inside of another, and one whose former holder is garbage, are no ties."""
    model = nn.Sequential(*nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    tpi.parallelize(nn.ModuleList([model])[0], tp_group, {"0": "colwise", "1": "rowwise"})


def test_parallelize_keeps_ties_and_refuses_those_to_the_outside():
    assert testing.run_ranks(parallelized, 2, device="cpu") == [True, True]


def trained(tp_group, kind, order, plan):
    """Output and gradients of a model with three places of one weight."""
    torch.manual_seed(0)
    parts = dict(tied().items())
    parts["again"] = nn.Linear(4, 8, bias=False)
    parts["again"].weight = parts["embed"].weight
    model = nn.ModuleDict({name: parts[name] for name in order})
    with tpi.set_tp_invariant_mode(True):
        tpi.parallelize(model, mesh_or_group(tp_group, kind), plan)
        assert model["head"].weight is model["embed"].weight is model["again"].weight
        x = model["embed"](torch.arange(8).view(2, 4))
        y = model["head"](x) + 2 * model["again"](x.tanh())
        y.square().sum().backward()
        return y.detach(), testing.full_grads(model)


@pytest.mark.parametrize("kind", ("group", "mesh"))
@pytest.mark.parametrize("sharded", (False, True))
def test_ties_are_kept_wherever_they_come(kind, sharded):
    """Over a mesh, embeddings that are whole were untied from an output layer that comes after them."""
    plan = {"head": "colwise_gather_output", "again": "colwise_gather_output"} if sharded else {}
    for order in (("embed", "head", "again"), ("head", "embed", "again")):
        (want,) = testing.run_ranks(trained, 1, "group", order, plan, device="cpu")
        for got in testing.run_ranks(trained, 2, kind, order, plan, device="cpu"):
            testing.assert_bitwise_equal(got, want)
    torch.manual_seed(0)
    weight = tied()["embed"].weight.double().detach().requires_grad_()
    x = weight.view(2, 4, 4)
    (x @ weight.T + 2 * x.tanh() @ weight.T).square().sum().backward()
    torch.testing.assert_close(want[1]["embed.weight"].double(), weight.grad, rtol=1e-4, atol=1e-4)
