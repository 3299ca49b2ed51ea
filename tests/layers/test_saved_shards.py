"""torch.distributed.checkpoint and plain shards: refused where it would write a part as the whole, else as ever."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import replica_groups
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tp_invariant as tpi
from tp_invariant.testing import assert_bitwise_equal


class Model(nn.Module):
    def __init__(self, tp) -> None:
        super().__init__()
        self.up = tpi.Linear(8, 16, parallel_mode="column", tp_group=tp)
        self.down = tpi.Linear(16, 8, parallel_mode="row", tp_group=tp)


def stepped(tp):
    model = Model(tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.down(model.up(torch.ones(4, 8))).sum().backward()
    optimizer.step()
    return model, optimizer


def refused(call) -> str:
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        warnings.simplefilter("ignore")
        call()
    return str(caught.value)


def saves_that_are_refused(tp_group, folder):
    model, optimizer = stepped(tp_group)
    own, states = model.state_dict(), optimizer.state_dict()
    full = StateDictOptions(full_state_dict=True)
    on_cpu = StateDictOptions(cpu_offload=True)
    cases = {
        "a state dict": lambda: dcp.save(own, checkpoint_id=folder, process_group=tp_group),
        "the ranks of the job": lambda: dcp.save(own, checkpoint_id=folder),
        "a model": lambda: dcp.save({"model": model}, checkpoint_id=folder),
        "a copy of it": lambda: dcp.save({"model": copy.deepcopy(model)}, checkpoint_id=folder),
        "later": lambda: dcp.async_save(own, checkpoint_id=folder),
        "an optimizer alone": lambda: dcp.save({"optimizer": states}, checkpoint_id=folder),
        "torch's state dict": lambda: dcp.save(get_model_state_dict(model), checkpoint_id=folder),
        "both": lambda: dcp.save(dict(enumerate(get_state_dict(model, optimizer))), checkpoint_id=folder),
        "on the CPU": lambda: dcp.save(get_model_state_dict(model, options=on_cpu), checkpoint_id=folder),
        "full": lambda: get_model_state_dict(model, options=full),
        "full, of an optimizer": lambda: get_optimizer_state_dict(model, optimizer, options=full),
    }
    return {name: refused(call) for name, call in cases.items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_parts_are_not_written_as_the_whole(tp, tmp_path):
    everywhere = run_ranks(saves_that_are_refused, tp, str(tmp_path))
    for rank, found in enumerate(everywhere):
        for case, text in found.items():
            name = "state" if "optimizer" in case else "up.weight"
            assert name in text and f"on rank {rank} " in text and f"over the ranks {list(range(tp))}" in text, text
            assert "tp_invariant.checkpoint.save" in text and "DeviceMesh" in text, text
    assert list(tmp_path.iterdir()) == []


def saves_of_equal_parts(tp_group, folder):
    """TP 2 x DP 2: ranks that hold the same parts save together, or each by itself; and loads of what they wrote."""
    tp, dp, _ = replica_groups(2, 2, 2)
    model, optimizer = stepped(tp)
    wanted = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    read = [copy.deepcopy(wanted) for _ in range(2)]
    for tensors in read:
        torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.zero_, tensors)
    own = Path(folder, f"part {dist.get_rank(tp)}")
    dcp.save(wanted, checkpoint_id=own, process_group=dp)
    dcp.load(read[0], checkpoint_id=own, process_group=dp)
    alone = Path(folder, f"rank {dist.get_rank()}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(wanted, checkpoint_id=alone, no_dist=True)
        dcp.load(read[1], checkpoint_id=alone, no_dist=True)
    for found in read:
        assert_bitwise_equal(found, wanted)

    class Planner(dcp.DefaultSavePlanner):
        """Knows, as far as anybody can tell, what is a part."""

    if dist.get_rank(dp) == 0:
        other = Path(folder, "by a planner of the user's own")
        dcp.save(wanted, checkpoint_id=other, process_group=tp, planner=Planner())


def test_ranks_that_hold_the_same_parts_may_save_them(tmp_path):
    run_ranks(saves_of_equal_parts, 4, str(tmp_path))


def saves_of_what_fully_shard_divides(tp_group, folder):
    """TP 2 x DP 2: a DTensor over the data-parallel ranks is a part of a part."""
    tp, dp, _ = replica_groups(2, 2, 2)
    model = fully_shard(Model(tp), mesh=DeviceMesh.from_group(dp, "cpu"))
    text = refused(lambda: dcp.save({"model": model}, checkpoint_id=folder, process_group=tp_group))
    own = Path(folder, f"part {dist.get_rank(tp)}")
    wanted = model.state_dict()
    dcp.save({"model": model}, checkpoint_id=own, process_group=dp)
    read = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load({"model": read}, checkpoint_id=own, process_group=dp)
    assert_bitwise_equal({n: t.to_local() for n, t in read.items()}, {n: t.to_local() for n, t in wanted.items()})
    return text


def test_parts_of_parts_are_not_written_as_the_whole(tmp_path):
    for text in run_ranks(saves_of_what_fully_shard_divides, 4, str(tmp_path)):
        assert "model.up.weight of shape (8, 8)" in text, text


def what_nobody_refuses(tp_group, folder):
    """The control, of copies that nobody remembers: one rank's part is all that is left."""
    model = Model(tp_group)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save(own, checkpoint_id=folder, process_group=tp_group)
    read = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    dcp.load(read, checkpoint_id=folder, process_group=tp_group)
    return own["up.weight"], read["up.weight"]


def test_torch_would_lose_what_is_refused(tmp_path):
    (first, read), (second, again) = run_ranks(what_nobody_refuses, 2, str(tmp_path))
    assert torch.equal(read, again)
    assert torch.equal(read, first) != torch.equal(read, second)


def test_one_rank_saves_as_ever(tmp_path):
    model, optimizer = stepped(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save({"model": model, "optimizer": optimizer.state_dict()["state"]}, checkpoint_id=tmp_path)
        read = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(read, checkpoint_id=tmp_path)
    assert_bitwise_equal(read["model"], dict(model.state_dict()))


def pickled(tp_group, folder):
    """torch.save writes this rank's parts, by themselves: nothing that remembers them is among them."""
    model, optimizer = stepped(tp_group)
    path = Path(folder, f"{dist.get_rank()}.pt")
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    own, states = torch.load(path, weights_only=True)
    assert_bitwise_equal(dict(own), dict(model.state_dict()))
    assert_bitwise_equal(states["state"], optimizer.state_dict()["state"])
    copy.deepcopy(optimizer).load_state_dict(states)


def test_torch_save_is_as_ever(tmp_path):
    run_ranks(pickled, 2, str(tmp_path))
