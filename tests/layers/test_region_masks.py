"""Dropout of what is this rank's part of the activations is refused, by whatever code; of what is whole it is not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from ranks import run_ranks
from torch import nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.layers import linear, region_masks
from tp_invariant.regions import gather_sequence


def _attention(x, p):
    q, k, v = x.unflatten(-1, (-1, 3, 8)).permute(3, 1, 2, 0, 4)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p).permute(2, 0, 1, 3).flatten(2)


def _padding(x):
    """Zeros and ones, and others that are no dropout's."""
    mask = (torch.arange(x.shape[0]) < 5).to(x.dtype)[:, None, None]
    return (x * mask * (x > 0) * (4 * mask) * (4.0 * (x > 0)) * (0.5 * (x < 1))).cos()


def _selected(x):
    """Half of it, and the largest of each feature, by the factors that alpha_dropout has for such shares of zeros."""
    return x * (0.886 * (x > 0)) + x * (1.47 * (x == x.amax(0, keepdim=True)))


INSIDE = {
    "function": lambda x: F.dropout(x, 0.3),
    "module": nn.Dropout(0.25),
    "in place": lambda x: F.dropout(x * 1, 0.5, inplace=True).relu(),
    "whole features": lambda x: F.dropout1d(x.movedim(0, -1), 0.5).movedim(-1, 0),
    "fused": lambda x: torch.native_dropout(x, 0.3, True)[0],  # the operator of GPUs
    "by hand": lambda x: x * (torch.rand_like(x) > 0.5) / 0.5 * torch.bernoulli(torch.full_like(x, 0.8)).div(0.8),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha of features": lambda x: F.feature_alpha_dropout(x.movedim(0, -1), 0.2, True).movedim(-1, 0),
    "attention": lambda x: F.pad(_attention(x, 0.4), (0, 2 * x.shape[-1] // 3)),
}
RIGHT = {
    "padding": _padding,
    "selected": _selected,
    "a product with a number below autograd": torch.special.ndtr,
    "p=0": lambda x: F.dropout(x, 0.0),
    "in evaluation": lambda x: F.dropout(x, 0.5, False),
}


def forward(
    tp_group, inside="nothing", outside="nothing", sequence_parallel=False, looks=True, allowed=False, kind="group"
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
    patch = mock.patch.object(linear, "dropout_before", region_masks.dropout_before if looks else lambda x: None)
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
    (one,) = run_ranks(forward, 1, "nothing", "function", True)
    for rank, text in enumerate(run_ranks(forward, 2, "nothing", "function", True)):
        begin = f"x of LayerNormLinear(24, 96, 'column') on rank {rank} is this rank's part of the tokens, and dropout"
        assert text.startswith(begin), text
    for other in run_ranks(forward, 2, "nothing", "function", True, True, True):  # what the user has said is not so
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    (one,) = run_ranks(forward, 1, name)
    for sequence_parallel in (False, True):
        for other in run_ranks(forward, 2, name, "nothing", sequence_parallel):
            testing.assert_bitwise_equal(other, one)


def test_dropout_of_what_is_whole_is_right():
    (one,) = run_ranks(forward, 1, "nothing", "function")
    for kind in ("group", "mesh"):
        for other in run_ranks(forward, 2, "nothing", "function", False, True, False, kind):
            testing.assert_bitwise_equal(other, one)
