"""What classes of a user's own do stays, their scale, initialisation and attributes, or it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing


class Scaled(nn.Embedding):
    def __init__(self, *sizes: int, scale: Any = 4.0) -> None:
        super().__init__(*sizes)
        self.embed_scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale


class WithDropout(Scaled):
    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(super().forward(ids), 0.5, self.training)


class WithOption(Scaled):
    def forward(self, ids: Tensor, scale: bool = True) -> Tensor:
        return super().forward(ids) * 1.0


class Small(nn.Linear):
    """Its initialisation is its own."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.weight.data.mul_(0.02)


class Twice(nn.Module):
    """`again` is the module `up`, and `listed` has a parameter that is no ParameterList's."""

    def __init__(self, listed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.gain = Small(8, 16), Small(16, 8), nn.Parameter(torch.rand(8))
        self.again, self.listed = self.up, [self.gain] if listed else []

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x) + self.again(x * self.gain)))


class Grouped(nn.Linear):
    group = "mine"


PLAN = {"up": "colwise", "again": "colwise", "down": "rowwise"}


def refusal(model: nn.Module, tp_group: Any, plan: Any) -> str:
    with pytest.raises(ValueError) as caught:
        tpi.parallelize(model, tp_group, plan)
    return str(caught.value)


def scaled(tp_group: Any) -> Any:
    source = Scaled(8, 4)
    with torch.device("meta"):
        model = nn.ModuleList([Scaled(8, 4)])
    tpi.parallelize(model, tp_group, {"0": "embedding_rowwise"})
    model.to_empty(device="cpu")
    tpi.load_full_state_dict(model, {"0.weight": source.weight.detach()})
    for own in (WithDropout(8, 4).eval(), WithOption(8, 4), Scaled(8, 4, scale=nn.Parameter(torch.ones(())))):
        assert "is no nn.Embedding times an embed_scale" in refusal(
            nn.ModuleList([own]), tp_group, {"0": "embedding_rowwise"}
        )
    ids = torch.arange(8)
    with tpi.set_tp_invariant_mode(True):
        testing.assert_bitwise_equal(model[0](ids), source(ids))


def test_scaled_embeddings():
    for degree in (1, 2):
        run_ranks(scaled, degree)


def initialised(tp_group: Any, kind: str) -> Any:
    with torch.device("meta"):
        model = Twice()
    tpi.parallelize(model, mesh_or_group(tp_group, kind), PLAN)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        model.gain.fill_(1)
    model.up.reset_parameters()
    model.down.reset_parameters()
    return tpi.full_state_dict(model)


def test_the_initialisation_of_a_class_stays():
    model = Twice()
    torch.manual_seed(1)
    nn.init.ones_(model.gain)
    model.up.reset_parameters()
    model.down.reset_parameters()
    want = dict(model.state_dict())
    for degree, kind in ((1, "group"), (2, "group"), (2, "mesh")):
        for got in run_ranks(initialised, degree, kind):
            testing.assert_bitwise_equal({key: got[key] for key in want}, want)


def refused(tp_group: Any) -> Any:
    mesh = mesh_or_group(tp_group, "mesh")
    assert "again: is up, too, of which the plan asks 'colwise'" in refusal(
        Twice(), tp_group, PLAN | {"again": "rowwise"}
    )
    assert "gain: is also in the attribute listed of Twice" in refusal(Twice(listed=True), mesh, PLAN)
    assert "has an attribute `group` of its own" in refusal(nn.Sequential(Grouped(8, 8)), tp_group, {"0": "colwise"})
    model = Twice(listed=True)
    tpi.parallelize(model, tp_group, PLAN)
    assert "up: is a Small already" in refusal(model, tp_group, PLAN)
    model = Twice()
    former = list(model.parameters())
    tpi.parallelize(model, mesh, PLAN)
    with pytest.raises(ValueError, match="is the former gain, in whose place the model has a DTensor"):
        tpi.clip_grad_norm_(former, 1.0)


def test_what_cannot_stay_is_refused():
    for degree in (1, 2):
        run_ranks(refused, degree)
