"""State of models over a DeviceMesh: this library's checkpoints and full state dicts, torch's, and its pickles."""

from __future__ import annotations

import pytest
import torch
from cases import more
from error_texts import refused
from meshes import init_device_mesh, mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core.dtensors import local_of


class Model(nn.Module):
    def __init__(self, tp, seed: int, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = tpi.VocabParallelEmbedding(30, 16, pad_vocab_to_multiple_of=8, tp_group=tp)
        self.fc1 = tpi.LayerNormLinear(16, 64, bias=bias, parallel_mode="column", partition_stride=2, tp_group=tp)
        self.fc2 = tpi.Linear(32, 16, parallel_mode="row", tp_group=tp)
        self.head = tpi.Linear(16, 32, parallel_mode="column", gather_output=True, bias=False, tp_group=tp)
        self.head.weight = self.embed.weight
        self.foreign = nn.Linear(16, 16)
        self.odd = nn.Linear(16, 6)  # of which fully_shard gives some of four ranks nothing
        self.register_buffer("count", torch.zeros(3))
        if isinstance(tp, DeviceMesh):
            tpi.replicate_(self, tp)

    def forward(self, ids):
        gate, up = self.fc1(self.embed(ids)).chunk(2, -1)
        y = self.foreign(self.fc2(gate.relu() * up))
        return self.head(y) * self.odd(y)[..., :1]


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(30, (12,))).square().sum().backward()
    tpi.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def make(tp, seed=0, steps=2, bias=True, dp=None):
    model = Model(tp, seed, bias)
    if dp is not None:
        fully_shard(model, mesh=dp, shard_placement_fn=tpi.fsdp_placement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(steps):
        step(model, optimizer, i)
    return model, optimizer


def everything(model, optimizer):
    """After one more step too, so that what the optimizer was given counts."""
    states = [(tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer))]
    step(model, optimizer, 99)
    return [*states, (tpi.full_state_dict(model), tpi.full_optimizer_state_dict(model, optimizer))]


def saved(tp_group, kind, folder, bias=True):
    model, optimizer = make(mesh_or_group(tp_group, kind), bias=bias)
    tpi.checkpoint.save(f"{folder}/ours", model, optimizer)
    return everything(model, optimizer)


def loaded(tp_group, kind, folder, full, bias=True):
    return load_both_ways(lambda: make(mesh_or_group(tp_group, kind), seed=1, steps=1, bias=bias), [folder], full)


def load_both_ways(make_other, folders, full):
    """From the folders, and from full states if they are given; into models of other values."""
    results = []
    for folder in folders if full is None else (*folders, None):
        model, optimizer = make_other()
        if folder is not None:
            tpi.checkpoint.load(f"{folder}/ours", model, optimizer)
        else:
            tpi.load_full_state_dict(model, full[0])
            tpi.load_full_optimizer_state_dict(model, optimizer, full[1])
        if DTensor in map(type, model.parameters()):
            assert {type(p) for p in model.parameters()} == {DTensor}
            kinds = {type(s[key]) for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
            assert kinds == {DTensor}
        results.append(everything(model, optimizer))
    return results


pytestmark = pytest.mark.usefixtures("mode_on")


def test_our_checkpoints_and_full_states(tmp_path):
    """Whoever writes, whoever reads: plain shards or DTensors, at any degree; full states are of the first two."""
    expected = None
    for size, kind, full in ((1, "group", True), (4, "mesh", True), (2, "mesh", False), (2, "group", False)):
        folder = tmp_path / f"{size}{kind}"
        folder.mkdir()
        for result in run_ranks(saved, size, kind, str(folder)):
            expected = expected or result
            testing.assert_bitwise_equal(result, expected)
        for other_size, other_kind in {(1, "mesh"), (2, "mesh"), (4, "group" if kind == "mesh" else "mesh")}:
            for results in run_ranks(loaded, other_size, other_kind, str(folder), expected[0] if full else None):
                testing.assert_bitwise_equal(results, [expected, expected] if full else [expected])


def fully_sharded_states(tp_group, sizes, folder, older, expected):
    """Writes a folder; and reads it, older ones, and full states, which are the expected bits."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    model, optimizer = make(mesh["tp"], bias=False, dp=mesh["dp"])
    with torch.no_grad():
        model(torch.arange(12))  # after which a model keeps the gathered weights
    few = mesh["dp" if sizes[0] == 1 else "tp"]
    text = refused(ValueError, lambda: tpi.checkpoint.save(f"{folder}/other", model, optimizer, group=few))
    assert "over the ranks [0, 1, 2, 3] (fully_shard), and the group has the ranks" in text
    tpi.checkpoint.save(f"{folder}/ours", model, optimizer)
    assert len(tpi.full_state_dict(model, rank0_only=True)) == (len(expected[0][0]) if tp_group.rank() == 0 else 0)
    testing.assert_bitwise_equal(everything(model, optimizer), expected)
    with torch.no_grad():
        model.odd.weight.to_local().add_(tp_group.rank() == 1)  # another copy of a part, unless nobody else has it
    if sizes == (4, 1):
        tpi.full_state_dict(model)
        alone = make(None, seed=1, steps=0, bias=False, dp=mesh["dp"])[0]  # fully_shard without tensor parallelism
        tpi.load_full_state_dict(alone, expected[0][0])
        testing.assert_bitwise_equal(tpi.full_state_dict(alone), expected[0][0])
    else:
        text = refused(RuntimeError, lambda: tpi.checkpoint.save(f"{folder}/ours", model, optimizer))
        assert "odd.weight: " in text
    results = load_both_ways(lambda: make(mesh["tp"], 1, 1, False, mesh["dp"]), [folder, *older], expected[0])
    testing.assert_bitwise_equal(results, [expected] * len(results))
    plain = Model(mesh["tp"].get_group(), 0, bias=False)
    fully_shard(plain, mesh=mesh["dp"])
    if mesh["tp"].size() > 1:
        text = refused(TypeError, lambda: tpi.full_state_dict(plain))
        assert "embed.weight in the model's state dict" in text and "needs a DeviceMesh as tp_group" in text


@pytest.mark.more
def test_checkpoints_and_full_states_after_fully_shard(tmp_path):
    """Any dp x tp writes and reads, and models that are not fully sharded."""
    run_ranks(lambda tp_group: None, 3)  # a process group of three of the ranks, which none of them may take
    folders = {name: str(tmp_path / name) for name in ("plain", "2x2", "1x4", "4x1")}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
    expected = run_ranks(saved, 2, "group", folders["plain"], False)[0]
    testing.assert_bitwise_equal(run_ranks(lambda tp_group: everything(*make(tp_group, bias=False)), 1)[0], expected)
    for name, older in {"2x2": ["plain"], "1x4": ["2x2"], "4x1": ["2x2", "plain"]}.items():
        sizes = tuple(map(int, name.split("x")))
        run_ranks(fully_sharded_states, 4, sizes, folders[name], [folders[other] for other in older], expected)
    for size, kind, name in ((1, "mesh", "2x2"), (2, "group", "4x1"), (2, "mesh", "2x2")):
        for results in run_ranks(loaded, size, kind, folders[name], expected[0], False):
            testing.assert_bitwise_equal(results, [expected, expected])


def dtensors_given(tp_group):
    model, optimizer = make(mesh_or_group(tp_group, "mesh"))
    other, other_optimizer = make(mesh_or_group(tp_group, "mesh"), seed=1)
    before = everything(*make(mesh_or_group(tp_group, "mesh"), seed=1))
    text = refused(TypeError, lambda: tpi.load_full_state_dict(other, model.state_dict()))
    assert "embed.weight in the state dict is a DTensor placed as (Shard(dim=0),): only full tensors" in text
    full = tpi.full_optimizer_state_dict(model, optimizer)
    full["state"]["fc1.weight"]["exp_avg"] = optimizer.state[model.fc1.weight]["exp_avg"]
    text = refused(TypeError, lambda: tpi.load_full_optimizer_state_dict(other, other_optimizer, full))
    assert "exp_avg in the optimizer's state of fc1.weight is a DTensor" in text
    testing.assert_bitwise_equal(everything(other, other_optimizer), before)


def test_dtensors_in_place_of_full_tensors():
    run_ranks(dtensors_given, 2)


def full_tensors_assigned(tp_group):
    """After a forward, when equal parts are no longer looked for."""
    model, _ = make(mesh_or_group(tp_group, "mesh"))
    before, full = tpi.full_state_dict(model), tpi.full_state_dict(make(None, seed=1)[0])
    full["embed.weight"] = full["head.weight"] = torch.ones(32, 16)  # with its padding
    sharded = [name for name, p in model.named_parameters() if local_of(p).shape != p.shape]
    text = refused(RuntimeError, lambda: model.load_state_dict(full, assign=True))
    assert len(sharded) == 4 and all(f'named "{name}"' in text for name in sharded)
    assert "load whole weights by tp_invariant.load_full_state_dict" in text
    with pytest.raises(ValueError, match=r"weight of Linear is given a plain tensor of shape \(16, 32\) on rank"):
        model.fc2.weight = nn.Parameter(torch.ones(16, 32))
    after = tpi.full_state_dict(model)
    testing.assert_bitwise_equal({name: after[name] for name in sharded}, {name: before[name] for name in sharded})
    model.fc2.weight = nn.Parameter(torch.ones(16, 16))  # this rank's part
    assert model.fc2.weight.shape == (16, 32)


def test_full_tensors_that_are_assigned():
    run_ranks(full_tensors_assigned, 2)


# --- torch's own ------------------------------------------------------------------------------------------------------


def torchs_state(tp_group, kind, folder):
    """get and set by torch.distributed.checkpoint.state_dict, full and sharded, and what dcp and torch.save wrote."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )

    tp = mesh_or_group(tp_group, kind)
    model, optimizer = make(tp)
    first = everything(*make(tp))
    full = tpi.full_state_dict(model)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    padded = {"embed.weight", "head.weight"}  # with the vocabulary's padding, which a DTensor's shape counts
    for name, tensor in found.items():
        assert type(tensor) is torch.Tensor
        rows = full["embed.weight"].shape[0] if name in padded else len(tensor)
        testing.assert_bitwise_equal(tensor[:rows], full[name][:rows])
    results = []
    for whole in (True, False):
        options = StateDictOptions(full_state_dict=whole)
        other, other_optimizer = make(tp, seed=1, steps=1)
        states = get_state_dict(*make(tp), options=options)  # which shares memory with those
        set_state_dict(other, other_optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
        results.append(everything(other, other_optimizer))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/dcp", process_group=tp_group)
    path = f"{folder}/{tp_group.rank()}.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    for assign in (False, True):
        other, other_optimizer = make(tp, seed=1, steps=1)
        weights, state = torch.load(path, weights_only=True)
        if assign:
            tied = weights.pop("head.weight")
            assert tied.placements == weights["embed.weight"].placements
            other.load_state_dict(weights, assign=True, strict=False)
            other.head.weight = other.embed.weight
            assert all(hasattr(p, "tensor_model_parallel") for p in other.parameters())
            other_optimizer = torch.optim.AdamW(other.parameters())
        else:
            other.load_state_dict(weights)
        other_optimizer.load_state_dict(state)
        results.append(everything(other, other_optimizer))
    part = nn.Sequential(model.fc2, model.foreign)  # a module, pickled
    torch.save(part, path)
    again = torch.load(path, weights_only=False)
    assert again[0].group.mesh == tp and {type(p) for p in again.parameters()} == {DTensor}
    x = torch.randn(3, 32).chunk(tp_group.size(), 1)[tp_group.rank()]
    testing.assert_bitwise_equal(again(x).detach(), part(x).detach())
    for result in results:
        testing.assert_bitwise_equal(result, first)
    return first


def from_dcp(tp_group, kind, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = make(mesh_or_group(tp_group, kind), seed=1, steps=1)
    states = get_state_dict(model, optimizer)
    states = {"model": states[0], "optimizer": states[1]}
    dcp.load(states, checkpoint_id=f"{folder}/dcp", process_group=tp_group)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return everything(model, optimizer)


def test_torchs_state_dicts_and_checkpoints(tmp_path):
    expected = None
    for size in (1, 2, 4):
        folder = tmp_path / str(size)
        folder.mkdir()
        for result in run_ranks(torchs_state, size, "mesh", str(folder)):
            expected = expected or result
            testing.assert_bitwise_equal(result, expected)
        for result in run_ranks(from_dcp, {1: 2, 2: 4, 4: 1}[size], "mesh", str(folder)):
            testing.assert_bitwise_equal(result, expected)


# --- fully_shard over data parallel ranks -----------------------------------------------------------------------------


def two_steps(model):
    """(the optimizer, gradients and norms of two steps and the parameters after them)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for i in range(2):  # the same tokens on all data parallel ranks: their mean is exact
        torch.manual_seed(i)
        optimizer.zero_grad()
        model(torch.randint(30, (12,))).square().sum().backward()
        results.append((testing.full_grads(model), tpi.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return optimizer, [*results, testing.full_parameters(model)]


def fully_sharded(tp_group, sizes, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    start = testing.full_parameters(Model(mesh["tp"], 0, bias=False))
    default = Model(mesh["tp"], 0, bias=False)
    fully_shard(default, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(default.parameters(), lr=1e-2)
    default(torch.arange(12)).square().sum().backward()
    calls = [
        lambda: tpi.clip_grad_norm_(default.parameters(), 1.0),
        optimizer.step,
        default.state_dict,
        lambda: testing.full_parameters(default),
        lambda: tpi.full_state_dict(default),
        lambda: tpi.load_full_state_dict(default, {}),
    ]
    for call in calls:
        assert "shard_placement_fn=tp_invariant.fsdp_placement" in refused(ValueError, call)
    biased = Model(mesh["tp"], 0)
    text = refused(ValueError, lambda: fully_shard(biased, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement))
    assert "a parameter of shape (64,) is placed as (_StridedShard(dim=0, sf=2),)" in text

    model = Model(mesh["tp"], 0, bias=False)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)
    assert model.fc1.weight.placements[0] == Shard(1)
    testing.assert_bitwise_equal(testing.full_parameters(model), start)
    full = tpi.full_state_dict(model)
    testing.assert_bitwise_equal(
        {name: full[name] for name in start if name != "head.weight"},
        {name: value for name, value in start.items() if name != "head.weight"},
    )
    optimizer, results = two_steps(model)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, tensor in found.items():
        full = results[-1].get(name)
        if full is not None:
            testing.assert_bitwise_equal(tensor[: len(full)], full)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    return results


def alone(tp_group, folder):
    """The same on one rank without data parallelism; and what fully_sharded wrote."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    tp = mesh_or_group(tp_group, "mesh")
    model = Model(tp, 0, bias=False)
    optimizer, results = two_steps(model)
    if folder is not None:
        other = Model(tp, 1, bias=False)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        step(other, other_optimizer, 5)
        states = get_state_dict(other, other_optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder, process_group=tp_group)
        set_state_dict(other, other_optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        testing.assert_bitwise_equal(everything(other, other_optimizer), everything(model, optimizer))
    return results


@pytest.mark.parametrize("sizes", [(2, 4), more((4, 2))])
def test_fully_shard(tmp_path, sizes):
    expected = run_ranks(alone, 1, None)[0]
    for result in run_ranks(fully_sharded, 8, sizes, str(tmp_path / "dcp")):
        testing.assert_bitwise_equal(result, expected)
    run_ranks(alone, 2, str(tmp_path / "dcp"))
