"""A model that has trained can be moved to another dtype or device, as nn.Module's methods do it."""

import copy
import weakref

import pytest
import torch
from meshes import mesh_or_group
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.core.dtensors import local_of
from tp_invariant.testing import assert_bitwise_equal

MOVES = {
    "cpu": lambda model: model.cpu(),
    "to_dtype": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
}
PLAN = {"0": "replicate", "1": "colwise", "3": "rowwise", "4": "replicate"}


def whole_model():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 8))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 4
    model[4].bias.requires_grad_(False)
    return model


def inputs():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def train(model, clip):
    """Two steps, so that a second one has found what the first may have stored."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs()).square().mean().backward()
        clip(model.parameters(), 0.1)
        optimizer.step()
    return model


def moved(tp_group, kind, name):
    """The outputs after the move, and the parameters' own: of the moved model, of a copy that never trained."""
    with tpi.set_tp_invariant_mode(True):
        model = tpi.parallelize(whole_model(), mesh_or_group(tp_group, kind), PLAN)
        train(model, tpi.clip_grad_norm_)
        state, full = model.state_dict(), tpi.full_state_dict(model)
        assert not any(weakref.getweakrefs(x) for p in model.parameters() for x in (p, local_of(p)))
        copied = copy.deepcopy(model)
        before = {key: local_of(value).clone() for key, value in state.items()}
        moved = MOVES[name](model)
        assert moved is model
        dtype = next(model.parameters()).dtype
        for key, value in model.state_dict().items():
            assert_bitwise_equal(local_of(value), before[key].to(dtype), key)
        x = inputs().to(dtype)
        out = model(x)
        MOVES[name](copied)
        assert_bitwise_equal(out, copied(x), "a copy that was moved")
        model.zero_grad()
        out.float().square().mean().backward()
        total = tpi.clip_grad_norm_(model.parameters(), 0.1)
        grads = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
        assert grads and all(grad.dtype == dtype for grad in grads)
        return out.detach(), total, full, {key: x.clone() for key, x in tpi.full_state_dict(model).items()}


@pytest.mark.parametrize("kind", ["mesh", "group"])
@pytest.mark.parametrize("name", MOVES)
def test_a_trained_model_is_moved(name, kind):
    one, *several = [run_ranks(moved, world, kind, name) for world in (1, 2)]
    for results in several:
        for result in results:
            assert_bitwise_equal(result, one[0], f"{name} over a {kind}")
    assert not torch.equal(one[0][2]["1.weight"], whole_model()[1].weight), "the control: it has trained"
    stock = train(whole_model(), torch.nn.utils.clip_grad_norm_)
    out, _, full, after = one[0]
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(full[key], value, rtol=1e-4, atol=1e-4)
    expected = MOVES[name](stock)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(out.dtype, 1e-4)
    torch.testing.assert_close(out, expected(inputs().to(out.dtype)), rtol=tolerance, atol=tolerance)
    assert all(value.dtype == out.dtype for value in after.values())
