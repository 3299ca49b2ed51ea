"""Buffers are compared as parameters are (tests/consistency/test_agreement.py), before parallelize changes anything."""

import re

import pytest
import torch
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant.testing import RankError

BUFFERS = ("1.running_mean", "1.num_batches_tracked", "3.inv_freq", "3.seen")


class Rotary(nn.Module):
    """A buffer of another kind each, none of which a checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -torch.arange(0, 1, 0.25), persistent=False)
        self.register_buffer("seen", torch.zeros(2, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x):
        return x * self.inv_freq


def parallelized(tp_group, kind, name):
    """parallelize; on rank 1 the buffer `name` has another last bit, dtype, or no values."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), Rotary())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    if tp_group.rank() == 1:
        buffer = model.get_buffer(name)
        if kind == "bits":
            buffer.view(-1)[-1:].view(torch.uint8)[-1] ^= 1
        owner, _, key = name.rpartition(".")
        if kind == "dtype":
            model.get_submodule(owner)._buffers[key] = buffer.half()
        if kind == "meta":
            model.get_submodule(owner)._buffers[key] = buffer.to("meta")
    before = list(model.children())
    try:
        tpi.parallelize(model, tp_group, {"0": "colwise_gather_output", "2": "rowwise_split_input"})
    except RuntimeError:
        assert list(model.children()) == before, "nothing is changed"
        raise
    return type(model[0]) is tpi.Linear


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_differs_is_named(name):
    for kind, text in (
        ("bits", rf"different weights in 1 of 6 buffers; .*\n  {name}: one value on rank 0, another on rank 1$"),
        ("dtype", rf"the dtype and shape of {name} is \(.*\) on rank 0; \(.*float16.*\) on rank 1"),
    ):
        with pytest.raises(RankError) as caught:
            run_ranks(parallelized, 2, kind, name)
        errors = list(map(str, caught.value.errors.values()))
        assert len(errors) == 2 and len(set(errors)) == 1 and re.search(text, errors[0]), errors


def test_buffers_that_are_alike_or_not_yet_there():
    for kind in ("nothing", "meta"):
        assert run_ranks(parallelized, 2, kind, "3.inv_freq") == [True] * 2
