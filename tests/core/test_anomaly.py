"""torch.autograd.detect_anomaly with parameters over a DeviceMesh: it raises on every rank where one has a NaN."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tp_invariant as tpi
from tp_invariant.testing import run_ranks


def backward(tp_group, kind, bad_rank):
    """What detect_anomaly raises in a step; on rank `bad_rank` the gradient of the first weight has a NaN."""
    mesh = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    plan = {"0": "replicate", "1": "colwise", "3": "rowwise"}
    tpi.parallelize(model, mesh if kind == "mesh" else tp_group, plan)
    x = torch.randn(4, 8)
    x[0] = 0  # and its gradient infinite, of which nothing but the weight's gradient is computed
    hidden = model[1](x)
    if tp_group.rank() == bad_rank:
        hidden.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf))
    y = model[3](model[2](hidden))
    try:
        y.square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return None


def detected(tp_group, *args):
    with tpi.set_tp_invariant_mode(True), torch.autograd.detect_anomaly():
        return backward(tp_group, *args)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("size", [1, 2])
def test_a_nan_raises_at_its_function_on_every_rank(size):
    for kind in ("group", "mesh"):
        assert run_ranks(detected, size, kind, None) == [None] * size
    for error in run_ranks(detected, size, "mesh", size - 1):
        assert "Function 'ColumnLinearBackward' returned nan values" in error
