"""The way of an activation through a layer's forward: how many files of the package it enters, and how deep."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import tp_invariant as tpi
from tp_invariant import kernels
from tp_invariant.testing import run_ranks

PACKAGE = {Path(module.__path__[0]).resolve() for module in (tpi, kernels)}


def files_of_a_second_call(tp_group, parallel_mode, sequence_parallel):
    """The files that it enters, and the files of each stack, one after another."""
    torch.manual_seed(tp_group.rank())
    x = torch.randn(
        4 if sequence_parallel and parallel_mode == "column" else 8, 2, 16 if parallel_mode == "column" else 8
    )
    with tpi.set_tp_invariant_mode(True):
        torch.manual_seed(0)
        layer = tpi.Linear(
            16, 16, parallel_mode=parallel_mode, tp_group=tp_group, sequence_parallel=sequence_parallel
        )  # fmt: skip
        layer(x)
        entered, stacks, active = set(), set(), []

        def note(frame, event, arg):
            if event == "call":
                path = Path(frame.f_code.co_filename).resolve()
                active.append(path if PACKAGE.intersection(path.parents) else None)
                ours = [path for path in active if path is not None]
                entered.update(ours)
                stacks.add(tuple(path for path, before in zip(ours, [None, *ours], strict=False) if path != before))
            elif event == "return" and active:
                active.pop()

        with mock.patch.dict(sys.modules):
            sys.modules.pop("torch.distributed.fsdp", None)  # other tests' fully_shard, whose weights are looked up
            sys.setprofile(note)
            layer(x)
            sys.setprofile(None)
    return entered, stacks


# most files in all, and most in one stack
LIMITS = {("column", False): (14, 6), ("column", True): (20, 6), ("row", False): (22, 7), ("row", True): (23, 7)}


@pytest.mark.parametrize("parallel_mode, sequence_parallel", LIMITS)
def test_the_way_of_x_is_short_and_goes_downward_once(parallel_mode, sequence_parallel):
    most, deepest = LIMITS[parallel_mode, sequence_parallel]
    for entered, stacks in run_ranks(files_of_a_second_call, 2, parallel_mode, sequence_parallel):
        assert len(entered) <= most, sorted(map(str, entered))
        assert max(map(len, stacks)) <= deepest, max(stacks, key=len)
        twice = [stack for stack in stacks if len(set(stack)) < len(stack)]
        assert not twice, twice
