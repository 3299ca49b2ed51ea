"""Muon over sharded matrices: the same bits at every degree, and torch's values on the whole matrices."""

from __future__ import annotations

import pytest
import torch
from error_texts import refused
from meshes import init_device_mesh, mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.gemm import bundled_gemm_fn
from tp_invariant.optim.muon import newton_schulz

pytestmark = pytest.mark.usefixtures("mode_on")


class Block(nn.Module):
    """Sharded along either dim, stacked of pieces, tall, wide, and whole on every rank."""

    def __init__(self, tp) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gated = tpi.LayerNormLinear(24, 96, bias=False, parallel_mode="column", partition_stride=2, tp_group=tp)
        self.down = tpi.Linear(48, 24, parallel_mode="row", tp_group=tp)
        self.up = tpi.Linear(24, 48, parallel_mode="column", gather_output=True, tp_group=tp)
        self.whole = tpi.Linear(48, 24, tp_group=tp)

    def forward(self, x):
        gate, up = self.gated(x).chunk(2, -1)
        return self.whole(self.up(x + self.down(gate.relu() * up)))


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2]


def trained(model, dtype=torch.float32, steps=3, **options):
    model.to(dtype)
    optimizer = tpi.optim.Muon(matrices(model), lr=0.02, **options)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 24, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return optimizer


def on_rank(tp_group, kind, dtype, options, mode=True):
    with tpi.set_tp_invariant_mode(mode):
        model = Block(mesh_or_group(tp_group, kind))
        before = testing.full_parameters(model)
        optimizer = trained(model, dtype, **options)
        after = testing.full_parameters(model)
        assert all(not torch.equal(before[n].to(dtype), p) for n, p in after.items() if p.dim() == 2)
        assert all(torch.equal(before[n].to(dtype), p) for n, p in after.items() if p.dim() == 1)
        return after, tpi.full_optimizer_state_dict(model, optimizer)["state"]


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.bfloat16, {"nesterov": False, "split_stacked": False, "adjust_lr_fn": "match_rms_adamw"}),
    ],
)
def test_the_bits_do_not_depend_on_the_degree(dtype, options):
    expected = run_ranks(on_rank, 1, "group", dtype, options)[0]
    for size in (1, 2, 3, 4):
        for kind in ("group", "mesh"):
            for result in run_ranks(on_rank, size, kind, dtype, options):
                testing.assert_bitwise_equal(result, expected)


def test_off_the_bits_differ():
    """The negative control; and the values stay close."""
    one, two = (run_ranks(on_rank, size, "group", torch.float32, {}, False)[0][0] for size in (1, 2))
    assert testing.digest(one) != testing.digest(two)


# --- values ---------------------------------------------------------------------------------------------------------


def exact(m, coefficients=(3.4445, -4.7750, 2.0315), steps=5):
    """In float64, from the formula."""
    a, b, c = coefficients
    x = m.double() / m.double().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative(x, want):
    return ((x.double() - want).norm() / want.norm()).item()


def one_step(tp_group, kind, split_stacked):
    """The change of each matrix, whole, and its gradient."""
    model = Block(mesh_or_group(tp_group, kind))
    model(torch.randn(64, 24)).square().sum().backward()
    before, grads = testing.full_parameters(model), testing.full_grads(model)
    tpi.optim.Muon(matrices(model), lr=0.5, weight_decay=0.0, split_stacked=split_stacked).step()
    after = testing.full_parameters(model)
    return {n: (before[n] - after[n], grads[n]) for n in before if before[n].dim() == 2}


@pytest.mark.parametrize("split_stacked", [True, False])
@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_the_values_are_torchs(kind, split_stacked):
    """Against float64, beside torch.optim.Muon on the whole matrix."""
    for name, (change, grad) in run_ranks(one_step, 2, kind, split_stacked)[0].items():
        pieces = 2 if split_stacked and name == "gated.weight" else 1
        for own, g in zip(change.chunk(pieces), grad.chunk(pieces), strict=True):
            p = nn.Parameter(torch.zeros_like(g))
            p.grad = g.clone()
            torch.optim.Muon([p], lr=0.5, weight_decay=0.0).step()
            want = 0.5 * max(1.0, g.shape[0] / g.shape[1]) ** 0.5 * exact(g)
            errors = [relative(x, want) for x in (own, -p.detach())]
            assert errors[0] < 0.1 and errors[0] < 2 * errors[1], (name, errors)


def test_newton_schulz_is_as_accurate_as_torchs():
    """Over many matrices: of one, what bfloat16 rounds away differs by chance."""
    options = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5, "eps": 1e-7}
    errors = []
    torch.manual_seed(0)
    for shape in [(16, 48), (64, 32), (40, 40)] * 10:
        m, p = torch.randn(shape), nn.Parameter(torch.zeros(shape))
        p.grad = m.clone()
        torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn=None).step()
        torchs = -p.detach() / max(1.0, shape[0] / shape[1]) ** 0.5
        errors.append([relative(x, exact(m)) for x in (newton_schulz(m.bfloat16(), options, None), torchs)])
    own, torchs = torch.tensor(errors).mean(0).tolist()
    assert own < 1.1 * torchs < 0.1


def test_what_the_result_is():
    """Singular values near 1, which those of the gradient are not; torch's weight decay and learning rates."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(48, 16))
    p.grad = torch.randn(48, 16) * torch.logspace(0, -1, 16)
    start, grad = p.detach().clone(), p.grad.clone()
    optimizer = tpi.optim.Muon([p], lr=torch.tensor(0.1), weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    assert optimizer.step(lambda: 7) == 7
    update = (start * (1 - 0.1 * 0.5) - p.detach()) / (0.1 * 0.2 * 48**0.5)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6 and values.max() < 1.3
    given = torch.linalg.svdvals(grad)
    assert given.min() < 0.2 * given.max()
    testing.assert_bitwise_equal(
        newton_schulz(torch.zeros(4, 8).bfloat16(), optimizer.param_groups[0], None), torch.zeros(4, 8).bfloat16()
    )


def pieces_of_other_sizes(tp_group):
    torch.manual_seed(0)
    qkv = tpi.Linear(
        32, 64, bias=False, parallel_mode="column", partition_sizes=(32, 16, 16), gather_output=True, tp_group=tp_group
    )
    separate = [nn.Parameter(part.clone()) for part in testing.full_parameters(qkv)["weight"].split((32, 16, 16))]
    qkv(torch.randn(16, 32)).square().sum().backward()
    for p, g in zip(separate, testing.full_grads(qkv)["weight"].split((32, 16, 16)), strict=True):
        p.grad = g.clone()
    for parameters in ([qkv.weight], separate):
        tpi.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw").step()
    testing.assert_bitwise_equal(testing.full_parameters(qkv)["weight"], torch.cat(separate).detach())
    return testing.full_parameters(qkv)


def test_stacked_pieces_are_matrices_of_their_own():
    one, two, four = (run_ranks(pieces_of_other_sizes, size)[0] for size in (1, 2, 4))
    testing.assert_bitwise_equal(two, one)
    testing.assert_bitwise_equal(four, one)


# --- fully_shard ----------------------------------------------------------------------------------------------------


def fully_sharded(tp_group, sizes):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    model = Block(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)
    optimizer = trained(model)  # the same tokens on all data parallel ranks: their mean is exact
    assert type(optimizer.state[model.down.weight]["momentum_buffer"]) is DTensor
    return testing.full_parameters(model)


def test_fully_shard():
    expected = run_ranks(on_rank, 1, "mesh", torch.float32, {})[0][0]
    for sizes in ((2, 4), (4, 2)):
        for result in run_ranks(fully_sharded, 8, sizes):
            testing.assert_bitwise_equal(result, expected)


# --- state, products, and what is refused ---------------------------------------------------------------------------


def continued(tp_group, kind, full):
    """Two steps, the state taken from another degree, one step more."""
    model = Block(mesh_or_group(tp_group, kind))
    optimizer = trained(model, steps=2)
    if full is not None:
        model = Block(mesh_or_group(tp_group, kind))
        optimizer = tpi.optim.Muon(matrices(model), lr=0.5)
        tpi.load_full_state_dict(model, full[0])
        tpi.load_full_optimizer_state_dict(model, optimizer, full[1])
    states = tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer)
    torch.manual_seed(2)
    optimizer.zero_grad()
    model(torch.randn(16, 24)).square().sum().backward()
    optimizer.step()
    return states, testing.full_parameters(model)


def test_state_goes_to_another_degree():
    states, expected = run_ranks(continued, 2, "mesh", None)[0]
    for size, kind in ((1, "group"), (4, "group"), (4, "mesh")):
        testing.assert_bitwise_equal(run_ranks(continued, size, kind, states)[0][1], expected)


class Counting:
    tp_invariant_identity = "counting"

    def __init__(self) -> None:
        self.shapes = []

    def __call__(self, a, b, *, bias=None, out_dtype=None):
        self.shapes.append((a.shape[0], b.shape[1]))
        return bundled_gemm_fn(a.device)(a, b, bias=bias, out_dtype=out_dtype)


def products(tp_group):
    """Each matrix is multiplied on one rank, the one that every rank holds on each."""
    model, count = Block(tp_group), Counting()
    trained(model, steps=1, gemm_fn=count)
    return len(count.shapes)


def disagreeing(tp_group):

    rank = torch.distributed.get_rank(tp_group)
    model = Block(tp_group)
    model(torch.randn(16, 24)).square().sum().backward()
    before = testing.full_parameters(model)
    model.up.weight.grad = model.up.weight.grad if rank else None
    text = refused(RuntimeError, tpi.optim.Muon(matrices(model)).step)
    assert "the gradient of parameter 2 is" in text and "on rank 1" in text
    text = refused(RuntimeError, tpi.optim.Muon([model.gated.weight], ns_steps=5 + rank).step)
    assert "the ns_steps of each group of Muon.step is (5,) on rank 0; (6,) on rank 1" in text
    testing.assert_bitwise_equal(testing.full_parameters(model), before)


def test_ranks_that_disagree_do_not_step():
    run_ranks(disagreeing, 2)


def parts_under_fully_shard(tp_group):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    layer = tpi.Linear(16, 16, bias=False, parallel_mode="column", tp_group=group)
    fully_shard(layer, mesh=mesh["dp"])
    layer(torch.randn(4, 16)).sum().backward()
    step = tpi.optim.Muon(layer.parameters()).step
    assert "fully_shard drops the attributes" in refused(ValueError, step)
    tpi.parameters.mark_sharded(layer.weight, 0, 1, group)
    assert "make the layers with tp_group as a DeviceMesh" in refused(ValueError, step)


def test_fully_shard_of_plain_shards_is_refused():
    run_ranks(parts_under_fully_shard, 8)
