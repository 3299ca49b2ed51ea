"""torch's own tools on sharded parameters: right on DTensors; on plain shards right, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from error_texts import refused
from meshes import init_device_mesh, mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import _redistribute
from torch.nn.utils import parametrizations

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core.dtensors import local_of

KINDS = ("group", "mesh")


pytestmark = pytest.mark.usefixtures("mode_on")


class Block(nn.Module):
    def __init__(self, tp) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gated = tpi.LayerNormLinear(32, 128, parallel_mode="column", partition_stride=2, tp_group=tp)
        self.down = tpi.Linear(64, 32, parallel_mode="row", tp_group=tp)
        self.norm = tpi.ParallelNorm(32, normalization="LayerNorm", bias=True, tp_group=tp)

    def forward(self, x):
        gate, up = self.gated(self.norm(x)).chunk(2, -1)
        return x + self.down(gate.relu() * up)


def with_grads(tp_group, kind):
    model = Block(mesh_or_group(tp_group, kind))
    torch.manual_seed(1)
    x = torch.randn(16, 32)
    model(x).square().sum().backward()
    return model, x


# --- clipping -------------------------------------------------------------------------------------------------------


def clipped_by_torch(tp_group, foreach):
    model, _ = with_grads(tp_group, "mesh")
    before = testing.full_grads(model)
    exact = sum(g.double().square().sum() for g in before.values()).sqrt()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach).full_tensor()
    assert (norm - exact).abs() < 1e-6 * exact
    for name, grad in testing.full_grads(model).items():
        torch.testing.assert_close(grad.double(), before[name].double() * 0.5 / exact, rtol=1e-5, atol=0)
    torch.optim.AdamW(model.parameters()).step()
    return testing.digest(norm)


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_clipping_is_right_on_dtensors(foreach):
    assert len(set(run_ranks(clipped_by_torch, 2, foreach))) == 1


def clipped_plain_shards(tp_group):
    model, _ = with_grads(tp_group, "group")
    before = testing.full_parameters(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    text = refused(RuntimeError, optimizer.step)
    assert "AdamW.step: the gradient of parameter" in text and "use tp_invariant.clip_grad_norm_" in text
    testing.assert_bitwise_equal(testing.full_parameters(model), before)

    model, x = with_grads(tp_group, "group")
    optimizer = torch.optim.AdamW(model.parameters())
    tpi.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    for max_norm in (1e9, 0.5):  # what does not scale is harmless; after the first step TP_INVARIANT_CHECK=1 sees it
        optimizer.zero_grad()
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if max_norm > 1:
            optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_INVARIANT_CHECK", "1")
        assert "AdamW.step: the gradient of parameter" in refused(RuntimeError, optimizer.step)


def test_torchs_clipping_of_plain_shards_is_noticed_at_the_first_step():
    run_ranks(clipped_plain_shards, 2)


def gradients_that_differ(tp_group):
    """Steps that are taken although gradients differ, and the one that is refused: (parameters, mode, lr)."""

    def step(model, *others, mode=True, lr=0.1):
        optimizer = torch.optim.SGD([*model.parameters(), *others], lr=lr)
        with tpi.set_tp_invariant_mode(mode):
            optimizer.step()
        return optimizer

    own = nn.Parameter(torch.ones(4))
    own.grad = torch.full((4,), float(tp_group.rank()))
    expert = tpi.Linear(4, 4, parallel_mode="column")
    expert.weight.grad = torch.full((4, 4), float(tp_group.rank()))
    model, _ = with_grads(tp_group, "group")
    assert "tp_group = None" in refused(RuntimeError, lambda: step(model, own))
    own.tp_group = None
    step(model, own, *expert.parameters())
    model.down.bias.grad += tp_group.rank()
    step(model, mode=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_INVARIANT_CHECK", "1")
        assert "tp_group = None" in refused(RuntimeError, lambda: step(model))
    if tp_group.rank() == 0:
        step(model, lr=0.0)  # not a collective
    optimizer = step(model, lr=0.0)
    optimizer.param_groups[0]["lr"] = 0.1
    assert "tp_group = None" in refused(RuntimeError, optimizer.step)  # the step before has compared nothing
    model.down.bias.tp_group = None
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_INVARIANT_CHECK", "1")
        optimizer.step()

    model, _ = with_grads(tp_group, "group")
    model.zero_grad()
    optimizer = step(model)  # as step(closure): gradients come later
    for p in model.parameters():
        p.grad = torch.full_like(p, float(tp_group.rank()))
    assert "SGD.step: the gradient of parameter" in refused(RuntimeError, optimizer.step)


def test_which_gradients_steps_compare():
    run_ranks(gradients_that_differ, 2)


def several_groups(tp_group):
    """Whole parameters of experts over two ranks each, beside one of all four; rank 3 is in the large group alone."""
    everyone = tpi.Linear(4, 4, parallel_mode="row", tp_group=tp_group)
    half = dist.new_group([0, 1])
    parameters = [everyone.bias]
    if tp_group.rank() < 2:
        parameters.append(tpi.Linear(4, 4, parallel_mode="row", tp_group=half).bias)
    for p in parameters:
        p.grad = torch.ones(4)
    torch.optim.SGD(parameters, lr=0.1).step()
    everyone.bias.grad += tp_group.rank() == 3
    refused(RuntimeError, torch.optim.SGD(parameters, lr=0.1).step)


def test_steps_compare_each_group_for_itself():
    run_ranks(several_groups, 4)


# --- gradient scaling -----------------------------------------------------------------------------------------------

FORMS = ({"foreach": False}, {"foreach": True}, {"fused": True})


def scaled(tp_group, kind, scaler, form, steps=3):
    """Three steps; in the second one element of the last rank's shard overflows."""
    model, _ = with_grads(tp_group, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **form)
    grads = {name: local_of(p.grad).clone() for name, p in model.named_parameters()}
    made, changed = scaler("cpu", init_scale=4.0), []
    for step in range(steps):
        scale = made.scale(torch.ones(()))
        for name, p in model.named_parameters():
            local_of(p.grad).copy_(grads[name] * scale)
        if step == 1 and tp_group.rank() == tp_group.size() - 1:
            local_of(model.down.weight.grad)[-1, -1] = float("inf")
        before = testing.full_parameters(model)
        made.step(optimizer)
        made.update()
        after = testing.full_parameters(model)
        changed.append(any(not torch.equal(before[name], p) for name, p in after.items()))
    assert changed == [True, False, True], changed
    return testing.full_parameters(model), made.get_scale()


@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_skip_the_same_steps(form):
    expected = run_ranks(scaled, 1, "group", torch.amp.GradScaler, form)[0]
    assert expected[1] == 2.0
    for kind, scaler in (
        ("group", tpi.optim.GradScaler),
        ("mesh", tpi.optim.GradScaler),
        ("mesh", torch.amp.GradScaler),
    ):
        for size in (2,) if "fused" in form else (2, 4):  # at 4 the shards of a bias end inside of a vector
            for result in run_ranks(scaled, size, kind, scaler, form):
                testing.assert_bitwise_equal(result, expected)


def unscaled_over_several_groups(tp_group):
    """Two layers over groups of two ranks that overlap nowhere, and pipeline stages across them."""
    mesh = init_device_mesh("cpu", (tp_group.size() // 2, 2), mesh_dim_names=("pp", "tp"))
    layer = tpi.Linear(16, 16, parallel_mode="column", tp_group=mesh["tp"].get_group())
    found = []
    for pp_group in (None, mesh["pp"]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer.weight.grad = torch.full_like(layer.weight, float("inf") if tp_group.rank() == 0 else 1.0)
        scaler = tpi.optim.GradScaler("cpu", pp_group=pp_group)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        found.append([float(v) for v in scaler._found_inf_per_device(optimizer).values()])
    return found


def test_pipeline_stages_agree():
    results = run_ranks(unscaled_over_several_groups, 4)
    assert [r[0] for r in results] == [[1.0], [1.0], [0.0], [0.0]]
    assert [r[1] for r in results] == [[1.0]] * 4


# --- optimizers -----------------------------------------------------------------------------------------------------

MAKE = {
    "AdamW, for-loop": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD, for-loop": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, foreach=False),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, foreach=True),
}


def optimized(tp_group, kind, name):
    model, x = with_grads(tp_group, kind)
    optimizer = MAKE[name](model.parameters())
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().sum().backward()
    return testing.full_parameters(model)


@pytest.mark.parametrize("name", MAKE)
def test_elementwise_optimizers_have_the_bits_of_one_rank(name):
    """Every shard is a multiple of 64 elements, so that fused ones hold, too."""
    expected = run_ranks(optimized, 1, "group", name)[0]
    for kind in KINDS:
        for result in run_ranks(optimized, 2, kind, name):
            testing.assert_bitwise_equal(result, expected)


def torchs_muon_and_lbfgs(tp_group, kind):
    model, x = with_grads(tp_group, kind)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    torch.manual_seed(5)
    for p, name in zip(matrices, ("gated", "down"), strict=True):
        full = torch.randn(p.shape)
        local_of(p.grad).copy_(getattr(model, name).shard_spec("weight").local(full))
    before = testing.full_parameters(model)
    torch.optim.Muon(matrices, lr=0.1).step()
    after = testing.full_parameters(model)
    changes = [before[name] - p for name, p in after.items() if p.dim() == 2]
    model, x = with_grads(tp_group, kind)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    try:
        return changes, [float(optimizer.step(closure).detach()) for _ in range(2)]
    except RuntimeError as error:  # torch 2.11 flattens no tensor that is sharded along its second dim
        if hasattr(_redistribute, "_StridedShardNotDecodableError") or "flatten" not in str(error):
            raise
        return changes, []


def test_torchs_muon_and_lbfgs_are_right_on_dtensors():
    """In value: bfloat16 products of DTensors are added on the wire."""
    (expected, losses), (found, others) = (run_ranks(torchs_muon_and_lbfgs, size, "mesh")[0] for size in (1, 2))
    for own, other in zip(found, expected, strict=True):
        assert (own - other).norm() < 0.08 * other.norm()
    assert others == pytest.approx(losses, rel=1e-6)


# --- copies, averages, other parameters -----------------------------------------------------------------------------


def averaged(tp_group, kind, multi):
    from torch.optim import swa_utils

    model, x = with_grads(tp_group, kind)
    average = swa_utils.get_ema_multi_avg_fn(0.5) if multi else None
    ema = swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=multi)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(3):
        optimizer.step()
        ema.update_parameters(model)
        seen.append(testing.full_parameters(model))
    found = testing.full_parameters(ema.module)
    for name, p in found.items():
        old, middle, new = (s[name].double() for s in seen)
        want = ((old + middle) / 2 + new) / 2 if multi else (old + middle + new) / 3
        torch.testing.assert_close(p.double(), want, rtol=1e-5, atol=1e-6)
    ema(x).square().sum().backward()
    return found, testing.full_grads(ema.module), tpi.clip_grad_norm_(ema.parameters(), 1.0)


@pytest.mark.parametrize("multi", [False, True])
def test_averaged_models(multi):
    expected = run_ranks(averaged, 1, "group", multi)[0]
    for kind in KINDS:
        for result in run_ranks(averaged, 2, kind, multi):
            testing.assert_bitwise_equal(result, expected)


def copied(tp_group, kind):
    model, x = with_grads(tp_group, kind)
    results = []
    for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert type(p) is type(q) and p.partition_dim == q.partition_dim
            assert q.grad is None  # as torch's copies of parameters
        other(x).square().sum().backward()
        results.append((testing.full_grads(other), tpi.clip_grad_norm_(other.parameters(), 1.0)))
    new = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, new, (x,)).square().sum().backward()
    assert all(hasattr(p, "tensor_model_parallel") for p in new.values())
    full = {name: _whole(model, name, p.grad) for name, p in new.items()}
    norm = tpi.clip_grad_norm_(new.values(), 1.0)
    exact = sum(g.double().square().sum() for g in full.values()).sqrt()
    assert (norm - exact).abs() < 1e-6 * exact
    return results, full, norm


def _whole(model, name, grad):
    layer, _, key = name.partition(".")
    return model.get_submodule(layer).shard_spec(key).full(grad)


def test_copies_and_functional_calls():
    expected = run_ranks(copied, 1, "group")[0]
    for kind in KINDS:
        for result in run_ranks(copied, 2, kind):
            testing.assert_bitwise_equal(result, expected)


# --- parametrizations -----------------------------------------------------------------------------------------------


def refused_parametrizations(tp_group):
    ways = {
        "weight_norm with dim=0": lambda layer: parametrizations.weight_norm(layer, dim=0),
        "weight_norm with dim=None": lambda layer: parametrizations.weight_norm(layer, dim=None),
        "SpectralNorm": parametrizations.spectral_norm,
        "Orthogonal": parametrizations.orthogonal,
        "weight_norm with dim=0, old": lambda layer: nn.utils.weight_norm(layer, dim=0),
    }
    for kind in KINDS:
        for name, apply in ways.items():
            if kind == "mesh" and name not in ("weight_norm with dim=0", "weight_norm with dim=None"):
                continue  # torch itself refuses most of these
            model, x = with_grads(tp_group, kind)
            apply(model.down)
            text = refused(ValueError, lambda model=model, x=x: model(x))
            assert f"{name.partition(',')[0]} of weight of a " in text and f"on rank {tp_group.rank()}: " in text


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_parametrizations_over_what_is_sharded_are_refused():
    run_ranks(refused_parametrizations, 2)


# --- export ---------------------------------------------------------------------------------------------------------


def exported(tp_group, kind):
    model, x = with_grads(tp_group, kind)
    program = torch.export.export(model, (x,))
    y = program.module()(x)
    testing.assert_bitwise_equal(y.detach(), model(x).detach())
    return y.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_exported_programs(kind):
    expected = run_ranks(exported, 1, "group")[0]
    for result in run_ranks(exported, 2, kind):
        testing.assert_bitwise_equal(result, expected)
