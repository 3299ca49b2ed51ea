"""Column-parallel layers that are given what gather_for_layers returned gather no gradient that nobody reads."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.functional import linear, regions
from tp_invariant.functional.linear import among_unread_parts
from tp_invariant.testing import assert_bitwise_equal

TOKENS, BATCH, K, N = 16, 3, 256, 128


def tensors(dtype, dim, layers=3):
    """x with the tokens in `dim`, the layers' weights [N, K], and the gradients of what they return."""
    generator = torch.Generator().manual_seed(dim)
    shape = [BATCH, BATCH, K]
    shape[dim] = TOKENS

    def drawn(*size):
        scale = torch.exp2(torch.randint(-12, 12, size, generator=generator).float())
        return (torch.randn(size, generator=generator) * scale).to(dtype)

    weights = [drawn(N, K) for _ in range(layers)]
    return drawn(*shape), weights, [drawn(*shape[:-1], N) for _ in range(layers)]


def layers_of(tp_group, weights, dtype=torch.bfloat16, **options):
    """A column-parallel layer for each of these whole weights."""
    group, layers = resolve_group(tp_group), torch.nn.ModuleList()
    for weight in weights:
        layers.append(tpi.Linear(K, N, parallel_mode="column", tp_group=tp_group, bias=False, dtype=dtype, **options))
        with torch.no_grad():
            layers[-1].weight.copy_(weight.chunk(group.size)[group.rank])
    return layers


class Run:
    """One step of layers that share the gathered x. `middle`: x gathered -> what the layers are given."""

    def __init__(
        self,
        tp_group,
        dtype=torch.bfloat16,
        dim=1,
        owner_map="auto",
        mode=True,
        read=lambda x: x,
        gather=regions.gather_for_layers,
    ):
        group = resolve_group(tp_group)
        x, weights, dys = tensors(dtype, dim)
        with tpi.set_tp_invariant_mode(mode), mock.patch.object(linear, "among_unread_parts", self._count):
            self.unread = 0
            layers = layers_of(tp_group, weights, dtype, owner_map=owner_map)
            self.local = x.chunk(group.size, dim)[group.rank].clone().requires_grad_()
            self.whole = gather(self.local, tp_group, dim)
            self.given = read(self.whole)
            self.layers = layers
            self.ys = [layer(self.given) for layer in layers]
            self.dys = [dy.chunk(group.size, -1)[group.rank].contiguous() for dy in dys]
            self.group, self.dim = group, dim

    def _count(self, part, dim, group):
        self.unread += 1
        return among_unread_parts(part, dim, group)

    def backward(self, other=None, around=nullcontext):
        ys, dys = self.ys, self.dys
        if other is not None:
            ys, dys = [*ys, other], [*dys, torch.ones_like(other)]
        with mock.patch.object(linear, "among_unread_parts", self._count), around():
            torch.autograd.backward(ys, dys)
        return self

    def gradients(self):
        """Of x, all tokens, and of the weights, all rows; the same on every rank."""
        assert self.local.grad is not None
        dx = gather_dim(self.local.grad, self.dim, self.group) if self.group.size > 1 else self.local.grad
        dws = [gather_dim(layer.weight.grad, 0, self.group) for layer in self.layers]
        return [dx, *dws]


def of_one_step(tp_group, dtype, dim, owner_map):
    run = Run(tp_group, dtype, dim, owner_map).backward()
    return run.gradients(), run.unread


@pytest.mark.parametrize("owner_map", ("rows", "cols", "replicate", "auto"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dim", (0, 1))
def test_gradients(dim, dtype, owner_map):
    ((want, unread),) = run_ranks(of_one_step, 1, dtype, dim, owner_map)
    assert unread == 0
    for world in (2, 8):
        for got, unread in run_ranks(of_one_step, world, dtype, dim, owner_map):
            assert_bitwise_equal(got, want)
            assert unread == 3
    _, weights, dys = tensors(dtype, dim)
    weights, dys = [weight.double() for weight in weights], [dy.double() for dy in dys]
    exact = sum(dy @ weight for dy, weight in zip(dys, weights, strict=True))
    terms = sum(dy.abs() @ weight.abs() for dy, weight in zip(dys, weights, strict=True))
    bound = (4 if dtype == torch.bfloat16 else 16) * torch.finfo(dtype).eps * terms
    assert ((want[0].double() - exact).abs() <= bound).all()


def with_the_mode_off(tp_group):
    run = Run(tp_group, mode=False)
    with tpi.set_tp_invariant_mode(False):
        run.backward()
    return run.gradients()


def test_with_the_mode_off_the_bytes_differ():
    (want,) = run_ranks(with_the_mode_off, 1)
    for got in run_ranks(with_the_mode_off, 4):
        assert not torch.equal(got[0], want[0])


# --- who reads the gradient of what was gathered --------------------------------------------------------------------


def read_by_a_hook(tp_group, gather):
    run, seen = Run(tp_group, gather=gather), []
    run.whole.register_hook(seen.append)
    run.backward()
    return [*seen, *run.gradients()], run.unread, run.group


def test_a_reader_of_what_gather_sequence_returned_gets_all_of_it():
    ((want, _, _),) = run_ranks(read_by_a_hook, 1, regions.gather_sequence)
    for got, unread, _ in run_ranks(read_by_a_hook, 4, regions.gather_sequence):
        assert_bitwise_equal(got, want)
        assert unread == 0


def test_a_reader_of_what_gather_for_layers_returned_sees_its_rank_and_nan():
    ((want, _, _),) = run_ranks(read_by_a_hook, 1, regions.gather_for_layers)
    for got, unread, group in run_ranks(read_by_a_hook, 4, regions.gather_for_layers):
        assert_bitwise_equal(got[1:], want[1:])
        for rank, (part, wanted) in enumerate(zip(got[0].chunk(4, 1), want[0].chunk(4, 1), strict=True)):
            assert torch.equal(part, wanted) if rank == group.rank else part.isnan().all()
        assert unread == 3


def of_other_uses(tp_group, kind):
    """The gathered x is used by more than the layers, or the layers get something that was made of it."""
    if kind == "between":
        run = Run(tp_group, read=lambda x: x * 3)
        run.backward()
    elif kind == "beside":
        run = Run(tp_group)
        run.backward(other=run.whole.float().square() * 1e-3)
    elif kind == "anomaly":
        run = Run(tp_group)
        run.backward(around=torch.autograd.detect_anomaly)
    else:  # backward twice
        run = Run(tp_group)
        with mock.patch.object(linear, "among_unread_parts", run._count):
            torch.autograd.backward(run.ys, run.dys, retain_graph=True)
        run.backward()
    return run.gradients(), run.unread


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind, unread_parts", [("between", 0), ("beside", 3), ("anomaly", 0), ("twice", 6)])
def test_other_uses(kind, unread_parts):
    ((want, _),) = run_ranks(of_other_uses, 1, kind)
    for world in (2, 4):
        for got, unread in run_ranks(of_other_uses, world, kind):
            assert_bitwise_equal(got, want)
            assert unread == unread_parts


def of_dim(tp_group, dim):
    """x [B, S, K] gathered along any dim, counted from the front or the back."""
    group, unread = resolve_group(tp_group), []
    x = torch.randn(4, 8, K, generator=torch.Generator().manual_seed(1))
    local = x.chunk(group.size, dim)[group.rank].clone().requires_grad_()

    def count(part, dim, group):
        unread.append(dim)
        return among_unread_parts(part, dim, group)

    with tpi.set_tp_invariant_mode(True), mock.patch.object(linear, "among_unread_parts", count):
        (layer,) = layers_of(tp_group, tensors(torch.float32, 1, layers=1)[1], torch.float32)
        layer(regions.gather_for_layers(local, tp_group, dim)).square().sum().backward()
    return gather_dim(local.grad, dim % 3, group) if group.size > 1 else local.grad, unread


@pytest.mark.parametrize("dim, unread_dims", [(-3, [0]), (-2, [1]), (-1, []), (2, [])])
def test_dims_from_the_back_and_features(dim, unread_dims):
    ((want, _),) = run_ranks(of_dim, 1, dim)
    for world in (2, 4):
        for got, unread in run_ranks(of_dim, world, dim):
            assert_bitwise_equal(got, want)
            assert unread == unread_dims


# --- in a checkpoint, and in torch.compile --------------------------------------------------------------------------


def of_a_block(tp_group, kind):
    """The gradients of a block that gathers x for its layers, and the dims of what was among unread parts."""
    torch.compiler.reset()
    group = resolve_group(tp_group)
    x, weights, dys = tensors(torch.bfloat16, 1)
    unread = []

    def count(part, dim, group):
        unread.append(dim)
        return among_unread_parts(part, dim, group)

    with tpi.set_tp_invariant_mode(True), mock.patch.object(linear, "among_unread_parts", count):
        layers = layers_of(tp_group, weights)
        local = x.chunk(group.size, 1)[group.rank].clone().requires_grad_()
        gather = regions.gather_for_layers  # torch 2.11 would import this file for a global of it

        def block(local):
            whole = gather(local, tp_group, 1)
            return tuple(layer(whole) for layer in layers)

        if kind in ("aot_eager", "eager"):
            ys = torch.compile(block, backend=kind)(local)
        else:
            ys = checkpoint(block, local, use_reentrant=kind == "reentrant")
        torch.autograd.backward(ys, [dy.chunk(group.size, -1)[group.rank].contiguous() for dy in dys])
    dx = gather_dim(local.grad, 1, group) if group.size > 1 else local.grad
    return [dx, *(gather_dim(layer.weight.grad, 0, group) for layer in layers)], unread


@pytest.mark.parametrize("kind, unread_parts", [("not reentrant", 3), ("reentrant", 3), ("aot_eager", 3), ("eager", 0)])
def test_in_a_checkpoint_and_compiled(kind, unread_parts):
    ((want, _),) = run_ranks(of_a_block, 1, kind)
    for got, unread in run_ranks(of_a_block, 2, kind):
        assert_bitwise_equal(got, want)
        assert unread == [1] * unread_parts
