"""tp_invariant.optim.check: an optimizer that steps a part of a parameter otherwise than the whole is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from meshes import mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.optimizer import Optimizer

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.layers.parameters import mark_sharded


class Own(Optimizer):
    """p -= lr * change(p, grad)."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change(p, p.grad), alpha=group["lr"])


class Elementwise(Own):
    def change(self, p, grad):
        return grad.clamp(-1, 1) + 0.1 * p


class OfNorms(Own):
    def change(self, p, grad):
        return grad * (p.norm() / grad.norm())


class OfBlocks(Own):
    """As 8-bit states: each block of the flattened gradient has its own scale."""

    def change(self, p, grad, block=64):
        flat = nn.functional.pad(grad.flatten(), (0, -grad.numel() % block)).view(-1, block)
        scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        return ((flat / scale).round() * scale).flatten()[: grad.numel()].view_as(grad)


class OfMatrices(Own):
    def change(self, p, grad):
        return grad if grad.dim() < 2 else torch.linalg.solve(grad @ grad.T + torch.eye(len(grad)), grad)


class OfRows(Own):
    def change(self, p, grad):
        return grad if grad.dim() < 2 else grad / (1 + grad.square().sum(1, keepdim=True))


class Noisy(Own):
    def change(self, p, grad):
        return grad + 0.1 * torch.randn_like(p)


class OfDistance(Own):
    """As Prodigy: a rate that grows with how far all elements have come along their gradients."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr)
        self.rate, self.start = 1e-6, {}

    def change(self, p, grad):
        start = self.start.setdefault(p, p.detach().clone())
        self.rate = max(self.rate, float((grad * (start - p)).sum() / grad.abs().sum()))
        return self.rate * grad.sign()


class OfOptions(Own):
    """What it does is said by arguments of a class that it derives from, or by its own attributes."""

    def __init__(self, params, by_rows=False, **others):
        super().__init__(params, **others)
        self.by_rows = by_rows

    def change(self, p, grad):
        return OfRows.change(self, p, grad) if self.by_rows else grad


class ScheduleFree(OfRows):
    training = False

    def train(self):
        self.training = True

    def change(self, p, grad):
        assert self.training
        return super().change(p, grad)


class Around(Optimizer):
    def __init__(self, params, base):
        super().__init__(params, {})
        self.base = base(self.param_groups)


class WithoutRate(Elementwise):
    """transformers' Adafactor by default has lr=None."""

    def __init__(self, params, lr=None):
        super().__init__(params, lr=lr)

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=1e-2)


SEES_OTHERS = (OfDistance, OfNorms, OfBlocks, OfMatrices, OfRows, Noisy)


def layers(tp):
    torch.manual_seed(0)
    return nn.Sequential(
        tpi.Linear(32, 64, parallel_mode="column", tp_group=tp), tpi.Linear(64, 32, parallel_mode="row", tp_group=tp)
    )


def trained(tp_group, make, kind="group", mode=True, steps=3):
    """Whether `check` takes the optimizer make(parameters), and the parameters after some steps."""
    model, x = layers(mesh_or_group(tp_group, kind)), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    optimizer = make(model.parameters())
    try:
        tpi.optim.check(optimizer)
        taken = True
    except TypeError:
        taken = False
    with tpi.set_tp_invariant_mode(mode):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            torch.manual_seed(2)
            optimizer.step()
    return taken, testing.full_parameters(model)


def test_an_elementwise_optimizer_of_the_users_has_the_bits_of_one_rank():
    ((_, expected),) = run_ranks(trained, 1, Elementwise)
    for kind in ("group", "mesh"):
        for taken, parameters in run_ranks(trained, 2, Elementwise, kind):
            assert taken
            testing.assert_bitwise_equal(parameters, expected)
    assert testing.digest(run_ranks(trained, 2, Elementwise, "group", False)[0][1]) != testing.digest(expected)


@pytest.mark.parametrize("kind", SEES_OTHERS, ids=lambda kind: kind.__name__)
def test_what_is_refused_would_have_other_bits(kind):
    ((taken, expected),) = run_ranks(trained, 1, kind)
    assert taken  # whole parameters are anyone's
    for taken, parameters in run_ranks(trained, 2, kind):
        assert not taken and testing.digest(parameters) != testing.digest(expected)


def shards(*shape, dim=1, dtype=torch.float32):
    p = nn.Parameter(torch.ones(*shape, dtype=dtype))
    mark_sharded(p, dim, 1)
    return [p]


def refused(kind, optimizer):
    with pytest.raises(kind) as caught:
        tpi.optim.check(optimizer)
    return str(caught.value)


@pytest.mark.parametrize("kind", [*SEES_OTHERS, ScheduleFree, torch.optim.Muon, torch.optim.Adafactor])
def test_what_computes_with_several_elements_is_refused_by_name(kind):
    text = refused(TypeError, kind(shards(4, 6)))
    assert text.startswith(f"{kind.__name__} of a shard of shape (4, 6) along dim 1: it steps a part of a parameter")
    assert "takes_shards = True" in text


def test_what_cannot_be_tried_is_refused():
    text = refused(TypeError, Around(shards(4, 6), Elementwise))
    assert "could not be tried" in text and "missing 1 required positional argument: 'base'" in text
    optimizer = torch.optim.LBFGS(shards(4, 6))
    assert "missing 1 required positional argument: 'closure'" in refused(TypeError, optimizer)
    optimizer.takes_shards = True
    tpi.optim.check(optimizer)


def test_what_is_taken():
    tpi.optim.check(OfRows(shards(4, 6, dim=0)))  # rows of a column-parallel weight are whole on a rank
    tpi.optim.check(OfNorms([nn.Parameter(torch.ones(4, 6))]))
    tpi.optim.check(tpi.optim.Muon(shards(4, 6)))
    tpi.optim.check(WithoutRate(shards(4, 6)))
    tpi.optim.check(OfOptions(shards(4, 6), by_rows=False))
    refused(TypeError, OfOptions(shards(4, 6), by_rows=True))


def test_a_trial_draws_no_random_numbers_of_the_users():
    state = torch.get_rng_state()
    refused(TypeError, Noisy(shards(4, 6)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="shows what the vector loops of x86 leave over",
)
def test_shards_that_end_inside_of_a_vector():
    """tests/test_optimizers.py::test_what_does_not_hold shows that trained weights would differ."""

    class Named(torch.optim.SGD):
        def __init__(self, params, **others):
            super().__init__(params, **others)

    fused = dict(lr=0.1, momentum=0.9, fused=True)
    text = refused(ValueError, torch.optim.AdamW(shards(2, 4), fused=True))
    assert "AdamW(fused=True) steps elements of torch.float32 on cpu otherwise at the end of a vector" in text
    assert "SGD() steps elements of torch.bfloat16" in refused(
        ValueError, torch.optim.SGD(shards(2, 4, dtype=torch.bfloat16))
    )
    assert "Named(fused=True)" in refused(ValueError, Named(shards(5, 7), **fused))
    tpi.optim.check(Named(shards(8, 8), **fused))  # full vectors
    tpi.optim.check(torch.optim.AdamW(shards(2, 4), foreach=False))
    tpi.optim.check(torch.optim.AdamW(shards(2, 4, dtype=torch.bfloat16)))


def step_alone(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


def stepped_in_backward(tp_group, kind, by_torch, mode=True):
    model, x = layers(mesh_or_group(tp_group, kind)), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    if by_torch:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1e-2})
    else:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(functools.partial(step_alone, torch.optim.SGD([p], lr=1e-2)))
    with tpi.set_tp_invariant_mode(mode):
        for _ in range(3):
            model(x).square().sum().backward()
    return testing.full_parameters(model)


@pytest.mark.parametrize("by_torch", [True, False])
def test_optimizers_that_step_in_backward(by_torch):
    (expected,) = run_ranks(stepped_in_backward, 1, "group", by_torch)
    assert testing.digest(expected) != testing.digest(testing.full_parameters(layers(None)))
    for kind in ("group", "mesh"):
        for found in run_ranks(stepped_in_backward, 2, kind, by_torch):
            testing.assert_bitwise_equal(found, expected)
    off = run_ranks(stepped_in_backward, 2, "group", by_torch, False)[0]
    assert testing.digest(off) != testing.digest(expected)
