"""Parameters that a module of one's own holds itself, of which each rank has a part: bits, copies, fully_shard."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest
import torch
from meshes import init_device_mesh, mesh_or_group
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import assert_bitwise_equal

SIZE, HEADS, KV = 32, 8, 4
PLAN = {"q": "colwise", "k": "colwise", "v": "colwise", "sinks": "colwise", "": "local_params", "o": "rowwise"}


class Block(nn.Module):
    """Attention with a sink for each head."""

    plain = False  # in torch's own operators

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.k, self.v = (nn.Linear(SIZE, SIZE * KV // HEADS) for _ in range(2))
        self.sinks = nn.Parameter(torch.empty(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (-1, SIZE // HEADS)).transpose(1, 2) for t in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.plain:
            k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
            scores = q @ k.mT / (SIZE // HEADS) ** 0.5
            scores = torch.cat([scores, self.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
            return scores.softmax(-1)[..., :-1] @ v
        return tpi.attention(q, k, v, sinks=self.sinks)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.to(dtype)


def plan():
    return {f"blocks.*.{name}".rstrip("."): style for name, style in PLAN.items()}


def batch(step=0):
    return torch.randn(2, 20, SIZE, generator=torch.Generator().manual_seed(step))


def train(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        y = model(batch(step))
        y.square().mean().backward()
        grads = testing.full_grads(model)
        results.append((y.detach(), grads, tpi.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return results, tpi.full_state_dict(model)


def on_rank(tp_group, kind, mode):
    model = tpi.parallelize(build(), None if tp_group is None else mesh_or_group(tp_group, kind), plan())
    block = model.blocks[0]
    assert type(block).__name__ == "Block" and isinstance(block, Block)
    if tp_group is not None:
        size = tp_group.size()
        assert len(block.sinks.to_local() if kind == "mesh" else block.sinks) == HEADS // size
        assert {type(p) for p in model.parameters()} == ({DTensor} if kind == "mesh" else {nn.Parameter})
    with tpi.set_tp_invariant_mode(mode):
        return train(model)


def test_the_bits_at_every_degree():
    want = on_rank(None, "group", True)
    assert all(grad.any() for grad in want[0][0][1].values())
    for degree, kind in ((1, "mesh"), (2, "group"), (4, "mesh")):
        for got in run_ranks(on_rank, degree, kind, True):
            assert_bitwise_equal(got, want)
    off = run_ranks(on_rank, 2, "group", False)[0]
    assert testing.digest(off) != testing.digest(run_ranks(on_rank, 1, "group", False)[0])
    assert_bitwise_equal(run_ranks(on_rank, 2, "mesh", False)[0][0][0][:2], off[0][0][:2])


def test_near_float64():
    ours = on_rank(None, "group", True)[0][0]
    exact, theirs = (plain_step(dtype) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        got = ours[0] if name == "y" else ours[1][name]
        # A constant added to all keys moves only what the sink takes, so that the parts of a key's bias nearly
        # cancel, and what is left of them is no measure of its error. The gradient of the same layer's weight is.
        scale = exact[name.replace("bias", "weight")].norm()
        errors = [float((x.double() - value).norm() / scale) for x in (got, theirs[name])]
        assert errors[0] <= max(2 * errors[1], 1e-5), (name, errors)


def plain_step(dtype):
    model = build(dtype)
    for block in model.blocks:
        block.plain = True
    y = model(batch().to(dtype))
    y.square().mean().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def copies(tp_group, kind):
    model = tpi.parallelize(build(), mesh_or_group(tp_group, kind), plan())
    twins = [copy.deepcopy(model)]
    if kind == "group":
        twins.append(pickle.loads(cloudpickle.dumps(model)))
    with tpi.set_tp_invariant_mode(True):
        results = [train(one) for one in (model, *twins)]
    for twin in twins:
        assert twin.blocks[0].sinks is not model.blocks[0].sinks
        assert twin.blocks[0].sinks.partition_dim == 0
    return results


@pytest.mark.parametrize("kind", ("group", "mesh"))
def test_copies_are_sharded_alike(kind):
    want = on_rank(None, "group", True)
    for results in run_ranks(copies, 2, kind):
        for got in results:
            assert_bitwise_equal(got, want)


def after_fully_shard(world_group, tp):
    mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    model = tpi.parallelize(build(), mesh["tp"], plan())
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)
    with tpi.set_tp_invariant_mode(True):
        return train(model)  # the same batches on all: their mean is exact


def test_after_fully_shard():
    want = on_rank(None, "group", True)
    for tp in (1, 2):
        for got in run_ranks(after_fully_shard, 4, tp):
            assert_bitwise_equal(got, want)


def test_a_module_with_a_group_of_its_own_is_refused():
    model = build()
    model.blocks[1].group = None
    with pytest.raises(ValueError, match=r"blocks\.1: Block has an attribute `group` of its own"):
        tpi.parallelize(model, None, plan())


class Gain(nn.Module):
    """What a rank's part of the parameter is multiplied by has a gradient that torch adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(SIZE, 34), nn.Linear(34, SIZE), nn.Parameter(torch.ones(34))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gain)


def test_verify_finds_what_torch_adds_up():
    """Other uses than as sinks: the bits of the gradient depend on the degree."""

    def on_rank(tp_group):
        torch.manual_seed(0)
        styles = {"up": "colwise", "gain": "colwise", "": "local_params", "down": "rowwise"}
        x = testing.wide_randn(2, 37, SIZE, generator=torch.Generator().manual_seed(0))
        with (
            tpi.set_tp_invariant_mode(True),
            pytest.raises(ValueError, match=r"but the gradient of gain has other bytes"),
        ):
            tpi.parallelize(Gain(), tp_group, styles, verify=True, example_inputs=x)

    run_ranks(on_rank, 2)


class Mixing(nn.Module):
    """A square parameter that is no Linear's, which may be cut along either dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale.flatten()[0])


def test_ranks_with_different_plans_for_a_parameter():
    def on_rank(tp_group):
        style = ("colwise", "rowwise")[tp_group.rank()]
        with pytest.raises(RuntimeError, match=r"plan of scale"):
            tpi.parallelize(
                Mixing(), tp_group, {"up": "colwise", "scale": style, "": "local_params", "down": "rowwise"}
            )

    run_ranks(on_rank, 2)
