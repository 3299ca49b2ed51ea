"""A second derivative of this library's functions is an error, also where torch's decorator would take a constant."""

from __future__ import annotations

import pytest
import torch
from meshes import mesh_or_group
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import resolve_group
from tp_invariant.functional.regions import expand_heads
from tp_invariant.functional.routing import Routing, route

FUNCTIONS = {
    "linear": lambda x: tpi.Linear(8, 8)(x).sum(),
    "norm": lambda x: tpi.ParallelNorm(8)(x).sum(),
    "cross-entropy": lambda x: tpi.vocab_parallel_cross_entropy(x, torch.tensor([0, 3, 7]), tp_group=None),
    "heads": lambda x: expand_heads(x.view(1, 1, 3, 8), 2, resolve_group(None)).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_penalty_on_a_gradient_is_refused(name):
    """autograd.grad of a sum hands the layer a gradient that requires none."""
    x = torch.randn(3, 8, requires_grad=True)
    with tpi.set_tp_invariant_mode(True):
        loss = FUNCTIONS[name](x)
        (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    testing.assert_bitwise_equal(grad.detach(), plain)
    penalized = loss + grad.square().sum()
    if name != "heads":  # whose x is no leaf, and has no second derivative
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(penalized, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        penalized.backward()


class Stop(torch.autograd.Function):
    """The identity, whose gradient is undefined, as that of an argument with no influence."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("function", ("softmax", "sigmoid", "softmax_of_chosen", "linear"))
@pytest.mark.parametrize("backend", (None, "eager", "aot_eager"))
def test_an_undefined_gradient_is_zeros(function, backend):
    x = torch.randn(3, 8, requires_grad=True)
    with tpi.set_tp_invariant_mode(True):
        layer = tpi.Linear(8, 8)
        run = layer if function == "linear" else lambda x: route(x, Routing(2, scores=function))[0]
        call = run if backend is None else torch.compile(run, backend=backend)
        (grad,) = torch.autograd.grad(Stop.apply(call(x)).sum(), x)
        testing.assert_bitwise_equal(grad, torch.zeros(3, 8))
        if function == "linear" and backend is not None:
            inside = torch.compile(lambda x: Stop.apply(layer(x)).sum(), backend=backend)
            testing.assert_bitwise_equal(torch.autograd.grad(inside(x), x)[0], grad)


LAYERS = {"linear": tpi.Linear, "norm and linear": tpi.LayerNormLinear, "norm": lambda size, _: tpi.ParallelNorm(size)}


@pytest.mark.parametrize("name", LAYERS)
def test_a_tensor_that_is_left_of_a_transform_stands_for_its_value(name):
    """Also for the graph that the value has outside of the transform."""
    x, w, left = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True), []

    def inside(x):
        left.append(x + w)
        return left[0].sum()

    torch.func.grad(inside)(x)
    layer, factors = LAYERS[name](8, 8), torch.randn(4, 8)
    with tpi.set_tp_invariant_mode(True):
        (found,) = torch.autograd.grad((layer(left[0]) * factors).sum(), w)
        (want,) = torch.autograd.grad((layer(x + w) * factors).sum(), w)
    assert want.any()
    testing.assert_bitwise_equal(found, want)


def penalty(tp_group, kind):
    layer = tpi.Linear(8, 8, parallel_mode="column", tp_group=mesh_or_group(tp_group, kind))
    with tpi.set_tp_invariant_mode(True):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        of_x, of_weight = torch.autograd.grad(layer(x).sum(), (x, layer.weight), create_graph=True)
    for grad in (of_x, of_weight):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()


@pytest.mark.parametrize("kind", ("group", "mesh"))
def test_over_ranks(kind):
    run_ranks(penalty, 2, kind)
