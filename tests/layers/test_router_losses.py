"""load_balancing_loss and router_z_loss: the same bytes at every degree, values of float64 and of transformers."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from meshes import init_device_mesh
from ranks import run_ranks
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.testing import assert_bitwise_equal, full_grads, wide_randn

BATCH, SEQUENCE, EXPERTS = 3, 8, 5


def logits_of(layers: int, kind: str = "random") -> tuple[list[Tensor], Tensor]:
    """Logits of each layer and a mask of the tokens."""
    g = torch.Generator().manual_seed(1)
    every = [wide_randn(BATCH, SEQUENCE, EXPERTS, generator=g, spread=2) for _ in range(layers)]
    if kind == "ties":
        every = [torch.zeros_like(one) for one in every]
    elif kind == "large":
        every = [one * 200 for one in every]
    elif kind == "one":
        every = [one + 50 * (torch.arange(EXPERTS) == 3) for one in every]
    return every, torch.rand(BATCH, SEQUENCE, generator=g) < 0.7


def in_float64(every: list[Tensor], top_k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both losses by torch, with equal logits to the lower index."""
    logits = torch.cat([one.reshape(-1, EXPERTS) for one in every]).double()
    weights = torch.ones(len(logits)) if mask is None else mask.flatten().repeat(len(every))
    weights = weights.double().unsqueeze(1)
    chosen = logits.detach().sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    counts = (torch.nn.functional.one_hot(chosen, EXPERTS).sum(1) * weights).sum(0) / weights.sum()
    mean = (logits.softmax(-1) * weights).sum(0) / weights.sum()
    z = logits.logsumexp(-1, keepdim=True)
    return EXPERTS * (counts * mean).sum(), (z * z * weights).sum() / weights.sum()


def losses(tp_group: Any, layers: int, kind: str, masked: bool, sequence_dim: int | None) -> list[Any]:
    """Both losses, and the whole gradients of the logits."""
    group = resolve_group(tp_group)
    every, mask = logits_of(layers, kind)
    options: dict[str, Any] = {}
    if sequence_dim is not None and group.size > 1:
        every, mask = (
            [one.chunk(group.size, sequence_dim)[group.rank] for one in every],
            mask.chunk(group.size, sequence_dim)[group.rank],
        )
        options = dict(tp_group=tp_group, sequence_parallel=True, sequence_dim=sequence_dim)
    found: list[Any] = []
    for loss in (functools.partial(tpi.load_balancing_loss, top_k=2), tpi.router_z_loss):
        leaves = [one.clone().requires_grad_() for one in every]
        value = loss(leaves if layers > 1 else leaves[0], mask=mask if masked else None, **options)
        (value * 0.3).backward()
        found.append(value.detach())
        for leaf in leaves:
            assert leaf.grad is not None
            found.append(gather_dim(leaf.grad, sequence_dim, group) if options else leaf.grad)
    return found


CASES = [
    (1, "random", False, 1),
    (3, "random", True, 1),
    (2, "ties", True, None),
    (1, "large", False, 1),
    (1, "one", True, 1),
]


@pytest.mark.parametrize("degree", (2, 4))
def test_every_degree_has_the_bytes_of_one(degree):
    wanted = [losses(None, *case) for case in CASES]
    for results in run_ranks(lambda tp_group: [losses(tp_group, *case) for case in CASES], degree):
        for case, got, want in zip(CASES, results, wanted, strict=True):
            assert case and assert_bitwise_equal(got, want) is None


def over_both(tp_group: Any) -> list[Any]:
    """`losses` of CASES[1], of this rank's part of its context-parallel rank's part of the tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    groups = [resolve_group(mesh[name]) for name in ("cp", "tp")]
    every, mask = logits_of(3)
    for group in groups:
        *every, mask = (one.chunk(2, 1)[group.rank] for one in (*every, mask))
    options: dict[str, Any] = dict(tp_group=mesh["tp"], cp_group=mesh["cp"], sequence_parallel=True, sequence_dim=1)
    found: list[Any] = []
    for loss in (functools.partial(tpi.load_balancing_loss, top_k=2), tpi.router_z_loss):
        leaves = [one.clone().requires_grad_() for one in every]
        value = loss(leaves, mask=mask, **options)
        (value * 0.3).backward()
        grads = [gather_dim(gather_dim(leaf.grad, 1, groups[1]), 1, groups[0]) for leaf in leaves]
        found += [value.detach(), *grads]
    return found


def test_context_and_sequence_parallelism():
    for found in run_ranks(over_both, 4):
        assert_bitwise_equal(found, losses(None, *CASES[1]))


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_float64(case):
    layers, kind, masked, _ = case
    every, mask = logits_of(layers, kind)
    got = losses(None, *case)
    leaves = [one.double().requires_grad_() for one in every]
    for number, value in enumerate(in_float64(leaves, 2, mask if masked else None)):
        grads = torch.autograd.grad(value * 0.3, leaves)
        at = number * (layers + 1)
        torch.testing.assert_close(got[at].double(), value.detach(), rtol=1e-6, atol=0)
        for found, exact in zip(got[at + 1 : at + 1 + layers], grads, strict=True):
            assert (found.double() - exact).norm() <= 2e-6 * exact.norm() + 1e-9
            assert not masked or not found[~mask].any()


def test_autocast_does_not_round():
    every, _ = logits_of(1)
    want = [tpi.load_balancing_loss(every, 2), tpi.router_z_loss(every)]
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise_equal([tpi.load_balancing_loss(every, 2), tpi.router_z_loss(every)], want)


def trained(tp_group: Any, sequence_parallel: bool) -> Any:
    """A step of two mixtures with both losses."""
    group = resolve_group(tp_group)
    torch.manual_seed(2)
    options: dict[str, Any] = dict(tp_group=tp_group, sequence_parallel=sequence_parallel, sequence_dim=1)
    layers = torch.nn.ModuleList(
        tpi.MixtureOfExperts(6, 8, 12, tpi.Routing(top_k=2), return_router_logits=True, **options) for _ in range(2)
    )
    x = wide_randn(2, SEQUENCE, 8, generator=torch.Generator().manual_seed(3), spread=2)
    x = x.chunk(group.size, 1)[group.rank] if sequence_parallel else x
    every = []
    with tpi.set_tp_invariant_mode(True):
        for layer in layers:
            y, logits = layer(x)
            x = x + y
            every.append(logits)
        balance = tpi.load_balancing_loss(every, 2, **options)
        z = tpi.router_z_loss(every, **options)
        (x.square().sum() + 2 * balance + z).backward()  # each rank's part of the first, the whole others
        return balance.detach(), z.detach(), full_grads(layers)


def test_mixtures_with_both_losses():
    want = trained(None, False)
    for sequence_parallel in (False, True):
        for got in run_ranks(trained, 2, sequence_parallel):
            assert_bitwise_equal(got, want)


def test_what_is_refused():
    logits = torch.zeros(3, 4)
    for fn, text in (
        (lambda: tpi.load_balancing_loss([], 2), "router_logits is empty"),
        (lambda: tpi.load_balancing_loss(logits, 5), "top_k=5 must be from 1 to 4"),
        (
            lambda: tpi.router_z_loss([logits, logits[:2]]),
            re.escape("router_logits[1] is torch.float32 of shape (2, 4)"),
        ),
        (lambda: tpi.router_z_loss(logits, mask=torch.ones(4)), r"mask has shape \(4,\)"),
        (lambda: tpi.router_z_loss(logits[:0]), "no tokens"),
        (lambda: tpi.router_z_loss(logits, sequence_parallel=True, sequence_dim=1), "sequence_dim=1"),
    ):
        with pytest.raises(ValueError, match=text):
            fn()


@pytest.mark.parametrize("loss", [lambda x: tpi.load_balancing_loss(x, 2), tpi.router_z_loss])
def test_other_dtypes_are_refused(loss):
    with pytest.raises(TypeError, match=r"router_logits\[0\] is torch.float64 on rank 0; allowed: torch.bfloat16"):
        loss(torch.randn(4, 8, dtype=torch.float64))
