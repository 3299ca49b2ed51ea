"""A call that every rank must make, made on rank 0 alone: the error names the call and who has not made it."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.comm import meeting
from tp_invariant.testing import assert_bitwise_equal

CALLS = {
    "full_state_dict": lambda model, folder: tpi.full_state_dict(model),
    "saving": lambda model, folder: tpi.checkpoint.save(folder, model),
}


def sharded(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    return tpi.parallelize(model, group, {"0": "colwise", "1": "rowwise"})


def called(world_group, which, others, folder):
    """(the result or error on this rank, what was logged): rank 0 calls; the others do so late, train, or do not."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = sharded(group)
    model(torch.ones(2, 8))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("tp_invariant")
    logger.addHandler(handler)
    result = None
    try:
        with mock.patch.multiple(meeting, _WARN_SECONDS=0.3, _LATE_SECONDS=0.3):
            if dist.get_rank() == 0 or others == "late":
                time.sleep(dist.get_rank())
                result = CALLS[which](model, folder)
            elif others == "train":
                model(torch.ones(2, 8))
    except RuntimeError as error:
        result = str(error)
    finally:
        logger.removeHandler(handler)
    dist.barrier(world_group)
    return result, logged


@pytest.mark.parametrize("others", ["wait", "train"])
@pytest.mark.parametrize("which", CALLS)
def test_a_call_on_rank_0_alone(which, others, tmp_path):
    (text, logged), (other, _) = run_ranks(called, 2, which, others, str(tmp_path / "saved"))
    call = which if which == "full_state_dict" else f"saving {tmp_path / 'saved'}"
    assert text.startswith(
        f"rank 0 of tp_group has waited for rank 1 (global rank 1), which has not come to {call}: it has ended before, "
        "or makes no such call. See its log; every rank of tp_group must. Do not call it under `if rank == 0`"
    )
    assert logged[0].startswith(f"{call} on rank 0 of 2 waits for rank 1. Do not call it under `if rank == 0`")
    if others == "train":  # this rank, too, is told what the other one does
        assert f"for {call}; rank 1 starts an all-" in other


def test_a_rank_that_comes_late_is_waited_for(tmp_path):
    (full, logged), (same, silent) = run_ranks(called, 2, "full_state_dict", "late", str(tmp_path))
    assert len(logged) == 1 and not silent
    assert_bitwise_equal([full, same], [sharded(None).state_dict()] * 2)
