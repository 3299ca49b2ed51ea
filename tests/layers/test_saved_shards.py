"""torch.distributed.checkpoint and plain shards: refused where it would write a part as the whole, else as ever."""

from __future__ import annotations

import copy
import functools
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
    get_model_state_dict,
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
    with warnings.catch_warnings(), pytest.raises((ValueError, dcp.api.CheckpointException)) as caught:
        warnings.simplefilter("ignore")
        call()
    return str(caught.value)


def saves_that_are_refused(tp_group, folder):
    model, optimizer = stepped(tp_group)
    own, states = model.state_dict(), optimizer.state_dict()
    cases = {
        "a state dict": own,
        "a model": {"model": model},
        "a copy of it": {"model": copy.deepcopy(model)},
        "an optimizer alone": {"optimizer": states},
        "torch's state dict": get_model_state_dict(model),
        "both": dict(enumerate(get_state_dict(model, optimizer))),
    }
    save = functools.partial(dcp.save, checkpoint_id=folder, process_group=tp_group)
    return {name: refused(functools.partial(save, case)) for name, case in cases.items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_parts_are_not_written_as_the_whole(tp, tmp_path):
    everywhere = run_ranks(saves_that_are_refused, tp, str(tmp_path))
    for rank, found in enumerate(everywhere):
        for case, text in found.items():
            name = "state" if "optimizer" in case else "up.weight"
            assert name in text and f"on rank {rank} " in text and f"over the ranks {list(range(tp))}" in text, text
            assert "tp_invariant.checkpoint.save" in text and "DeviceMesh" in text, text
    assert list(tmp_path.iterdir()) == []


def saves_of_each_ranks_parts(tp_group, folder):
    """TP 2 x DP 2: ranks that hold the same parts save copies of them together."""
    tp, dp, _ = replica_groups(2, 2, 2)
    wanted = stepped(tp)[0].state_dict()
    own = Path(folder, f"part {dist.get_rank(tp)}")
    dcp.save({name: tensor.clone() for name, tensor in wanted.items()}, checkpoint_id=own, process_group=dp)
    read = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(read, checkpoint_id=own, process_group=dp)
    assert_bitwise_equal(read, dict(wanted))


def test_ranks_that_hold_the_same_parts_may_save_copies(tmp_path):
    run_ranks(saves_of_each_ranks_parts, 4, str(tmp_path))


def saves_of_what_fully_shard_divides(tp_group, folder):
    """TP 2 x DP 2: a DTensor over the data-parallel ranks is a part of a part."""
    tp, dp, _ = replica_groups(2, 2, 2)
    model = fully_shard(Model(tp), mesh=DeviceMesh.from_group(dp, "cpu"))
    text = refused(lambda: dcp.save({"model": model}, checkpoint_id=folder, process_group=tp_group))
    return text


def test_parts_of_parts_are_not_written_as_the_whole(tmp_path):
    for text in run_ranks(saves_of_what_fully_shard_divides, 4, str(tmp_path)):
        assert "model.up.weight of shape (8, 8)" in text, text


def what_nobody_refuses(tp_group, folder):
    """The control, of copies, which are not refused: one rank's part is all that is left."""
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
