"""Optimizers that no list names: those that compute with several elements of a plain shard are refused by a trial."""

from __future__ import annotations

import functools
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.optimizer import Optimizer

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.layers.parameters import mark_sharded
from tp_invariant.optim import cuts


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


SEES_OTHERS = (OfDistance, OfNorms, OfBlocks, OfMatrices, OfRows, Noisy)


def layers(tp):
    torch.manual_seed(0)
    return nn.Sequential(
        tpi.Linear(32, 64, parallel_mode="column", tp_group=tp), tpi.Linear(64, 32, parallel_mode="row", tp_group=tp)
    )


def trained(tp_group, make, kind="group", mode=True, steps=3):
    """Parameters after steps of make(parameters), or what the first one says."""
    model, x = layers(mesh_or_group(tp_group, kind)), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    optimizer = make(model.parameters())
    with tpi.set_tp_invariant_mode(mode):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            before = testing.full_parameters(model)
            torch.manual_seed(2)
            try:
                optimizer.step()
            except TypeError as error:
                testing.assert_bitwise_equal(testing.full_parameters(model), before)
                return str(error)
    return testing.full_parameters(model)


def test_parts_fill_vectors_and_begin_inside_of_blocks():
    for shape, parts in cuts._PARTS.values():
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        for dim, part in enumerate(parts):
            of_part = numbers.narrow(dim, part.start, part.stop - part.start)
            assert of_part.numel() % cuts.ALIGNED == 0 and of_part.numel() > 4096
            assert of_part.flatten()[0] % 8


def test_an_elementwise_optimizer_of_the_users_has_the_bits_of_one_rank():
    (expected,) = run_ranks(trained, 1, Elementwise)
    for kind in ("group", "mesh"):
        for found in run_ranks(trained, 2, Elementwise, kind):
            testing.assert_bitwise_equal(found, expected)
    assert testing.digest(run_ranks(trained, 2, Elementwise, "group", False)[0]) != testing.digest(expected)


def knowing(kind):
    def make(parameters):
        optimizer = kind(parameters)
        optimizer.takes_shards = True
        return optimizer

    return make


@pytest.mark.parametrize("kind", SEES_OTHERS, ids=lambda kind: kind.__name__)
def test_optimizers_that_see_other_elements_are_refused_on_plain_shards(kind):
    (expected,) = run_ranks(trained, 1, kind)
    for rank, text in enumerate(run_ranks(trained, 2, kind)):
        assert text.startswith(f"{kind.__name__} of a parameter of shape (")
        assert f"on rank {rank} of 2" in text and "of a part along dim" in text and "takes_shards = True" in text
    # the control: what it says would be so
    assert testing.digest(run_ranks(trained, 2, knowing(kind))[0]) != testing.digest(expected)


def test_on_dtensors_they_are_right_in_value():
    for kind in (OfNorms, OfBlocks, OfRows, Noisy):
        one, two = (run_ranks(trained, size, kind, "mesh")[0] for size in (1, 2))
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)


def column_parallel_alone(tp_group):
    layer = tpi.Linear(32, 64, parallel_mode="column", tp_group=tp_group, bias=False)
    layer(torch.ones(2, 32)).square().sum().backward()
    OfRows(layer.parameters()).step()


def test_what_is_whole_along_the_sharded_dim_is_taken():
    """Rows of a column-parallel weight are whole on a rank."""
    with tpi.set_tp_invariant_mode(True):
        run_ranks(column_parallel_alone, 2)


def untried(tp_group):
    class Around(Optimizer):
        def __init__(self, params, base):
            super().__init__(params, {})
            self.base = base(self.param_groups)

        def step(self):
            self.base.step()

    class Summed(Own):
        def change(self, p, grad):
            dist.all_reduce(grad, group=tp_group)
            return grad

    said = []
    with mock.patch.object(cuts._log, "warning", lambda text, *args: said.append(text % args)):
        for make in (lambda ps: Around(ps, Elementwise), Summed, lambda ps: torch.optim.AdamW(ps)):
            trained(tp_group, make, steps=2)
    return said


def test_what_cannot_be_tried_is_said():
    for around, summed in run_ranks(untried, 2):
        assert around.startswith("Around steps parameters of which this rank has a part, and could not be tried")
        assert "missing 1 required positional argument: 'base'" in around and "takes_shards = True" in around
        assert summed.startswith("Summed steps") and "it communicates by c10d.allreduce_" in summed
    assert logging.getLogger("tp_invariant") is cuts._log


ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_elementwise_optimizers_pass_the_trial(dtype):
    for name in ELEMENTWISE:
        for form in ({}, {"foreach": True}, {"fused": True}):
            if "fused" in form and name not in ("SGD", "Adam", "AdamW", "Adagrad"):
                continue
            options = dict(lr=1e-3, **form, **({"momentum": 0.9, "nesterov": True} if name == "SGD" else {}))
            for dim in range(2):
                kind, told = getattr(torch.optim, name), tuple(options.items())
                assert not cuts._sees_others(kind, told, 2, dim, dtype, torch.device("cpu")), (name, form)


def seen(optimizer) -> bool:
    (shard,) = optimizer.param_groups[0]["params"]
    mark_sharded(shard, 1, 1)
    return cuts.shard_that_is_no_part(optimizer) is not None


def parameter(*shape):
    return [nn.Parameter(torch.ones(*shape))]


def test_options_in_attributes_are_tried():
    assert seen(OfOptions(parameter(4, 6), by_rows=True))
    assert not seen(OfOptions(parameter(4, 6), by_rows=False))


def test_options_of_classes_that_it_derives_from_are_tried():
    class Named(torch.optim.SGD):
        def __init__(self, params, **others):
            super().__init__(params, **others)

    told = dict(lr=0.1, momentum=0.9)
    marked = Named(parameter(5, 7), **told)
    mark_sharded(marked.param_groups[0]["params"][0], 1, 1)
    cuts.check_cuts(marked)
    marked.param_groups[0]["fused"] = True
    with pytest.raises(ValueError, match=r"Named\(fused=True\) steps an element"):
        cuts.check_cuts(marked)


def test_groups_that_differ_in_their_rate_alone_are_tried_together():
    groups = [{"params": parameter(5, 7), "lr": 0.1 / n, "weight_decay": n % 2} for n in range(1, 9)]
    for group in groups:
        mark_sharded(group["params"][0], 1, 1)
    with mock.patch.object(cuts, "_sees_cuts", return_value=False) as tried:
        cuts.check_cuts(torch.optim.AdamW(groups))
    assert tried.call_count == 2


def test_optimizers_that_must_be_told_to_train_are_tried():
    class ScheduleFree(OfRows):
        training = False

        def train(self):
            self.training = True

        def change(self, p, grad):
            if not self.training:
                raise RuntimeError("not in train mode")
            return super().change(p, grad)

    assert seen(ScheduleFree(parameter(4, 6)))


def test_the_trial_lets_a_step_be_compiled():
    compiled = []

    @torch.compile(fullgraph=True, backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    def change(grad):
        return grad.clamp(-1, 1)

    class Compiled(Own):
        def change(self, p, grad):
            return change(grad)

    optimizer = Compiled(parameter(4, 6))
    assert not seen(optimizer) and not compiled
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones(4, 6)
    optimizer.step()
    assert len(compiled) == 1


def test_the_trial_leaves_random_numbers_as_they_are():
    state = torch.get_rng_state()
    assert cuts._sees_others(Noisy, (("lr", 1e-2),), 2, 0, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


def without_a_rate(tp_group):
    """transformers' Adafactor by default has lr=None."""

    class Scheduled(Elementwise):
        def __init__(self, params, lr=None):
            super().__init__(params, lr=lr)

        def step(self):
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad, alpha=1e-2)

    return trained(tp_group, Scheduled)


def test_a_rate_that_is_none():
    with tpi.set_tp_invariant_mode(True):
        (expected,) = run_ranks(without_a_rate, 1)
        for found in run_ranks(without_a_rate, 2):
            testing.assert_bitwise_equal(found, expected)


def step_alone(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


def stepped_in_backward(tp_group, kind, way, mode=True):
    model, x = layers(mesh_or_group(tp_group, kind)), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    if way == "torch's":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1e-2})
    else:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(functools.partial(step_alone, torch.optim.SGD([p], lr=1e-2)))
    with tpi.set_tp_invariant_mode(mode):
        for _ in range(3):
            model(x).square().sum().backward()
    return testing.full_parameters(model)


@pytest.mark.parametrize("way", ["torch's", "hooks"])
def test_optimizers_that_step_in_backward(way):
    (expected,) = run_ranks(stepped_in_backward, 1, "group", way)
    assert testing.digest(expected) != testing.digest(testing.full_parameters(layers(None)))
    for kind in ("group", "mesh"):
        for found in run_ranks(stepped_in_backward, 2, kind, way):
            testing.assert_bitwise_equal(found, expected)
        off = run_ranks(stepped_in_backward, 2, kind, way, False)[0]
        assert testing.digest(off) != testing.digest(expected)
