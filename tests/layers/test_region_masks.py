"""Dropout of this rank's part of the activations is refused where a node has the name; of what is whole it is not."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.layers import linear
from tp_invariant.regions import gather_sequence

INSIDE = {
    "fused": lambda x: torch.native_dropout(x, 0.3, True)[0],  # the operator of GPUs
    "further away": lambda x: torch.native_dropout(x, 0.3, True)[0].relu() + x,
}
RIGHT = {
    "p=0": lambda x: F.dropout(x, 0.0),
    "in evaluation": lambda x: F.dropout(x, 0.5, False),
}


def forward(
    tp_group, inside="nothing", outside="nothing", sequence_parallel=False, checked=True, allowed=False, kind="group"
):
    """Two blocks with a residual; what they give, or the error."""
    between, after = ({"nothing": lambda x: x, **INSIDE, **RIGHT}[name] for name in (inside, outside))
    torch.manual_seed(0)
    options = dict(tp_group=mesh_or_group(tp_group, kind), sequence_parallel=sequence_parallel)
    layers = []
    for _ in range(2):
        layers.append(tpi.LayerNormLinear(24, 96, parallel_mode="column", **options))
        layers.append(tpi.Linear(96, 24, parallel_mode="row", **options))
    for layer in layers:
        layer.masks_are_whole = allowed
    x = torch.randn(8, 2, 24)
    if sequence_parallel:
        x = x.chunk(tp_group.size())[tp_group.rank()]
    torch.manual_seed(1)
    patch = contextlib.nullcontext() if checked else mock.patch.object(linear, "_dropout_before", lambda x: None)
    with tpi.set_tp_invariant_mode(True), patch:
        try:
            for column, row in (layers[:2], layers[2:]):
                x = x + after(row(between(column(x))))
        except ValueError as error:
            return str(error)
        return (gather_sequence(x, layers[0].group) if sequence_parallel else x).detach()


@pytest.mark.parametrize("name", INSIDE)
def test_of_features(name):
    (one,) = run_ranks(forward, 1, name)
    assert isinstance(one, torch.Tensor)
    for rank, text in enumerate(run_ranks(forward, 2, name)):
        begin = f"x of Linear(96, 24, 'row') on rank {rank} is this rank's part of the features, and dropout has acted"
        assert text.startswith(begin), text
    for other in run_ranks(forward, 2, name, "nothing", False, False):  # the control
        assert not torch.equal(one, other)


def test_of_tokens():
    (one,) = run_ranks(forward, 1, "nothing", "fused", True)
    for rank, text in enumerate(run_ranks(forward, 2, "nothing", "fused", True)):
        begin = f"x of LayerNormLinear(24, 96, 'column') on rank {rank} is this rank's part of the tokens, and dropout"
        assert text.startswith(begin), text
    for other in run_ranks(forward, 2, "nothing", "fused", True, True, True):  # what the user has said is not so
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    (one,) = run_ranks(forward, 1, name)
    for sequence_parallel in (False, True):
        for other in run_ranks(forward, 2, name, "nothing", sequence_parallel):
            testing.assert_bitwise_equal(other, one)


def test_dropout_of_what_is_whole_is_right():
    (one,) = run_ranks(forward, 1, "nothing", "fused")
    for kind in ("group", "mesh"):
        for other in run_ranks(forward, 2, "nothing", "fused", False, True, False, kind):
            testing.assert_bitwise_equal(other, one)
