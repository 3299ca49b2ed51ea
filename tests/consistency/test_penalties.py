"""A loss that looks across the elements of a shard has another gradient than at TP=1, and is an error."""

from __future__ import annotations

import functools
import gc
import math
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes import init_device_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.consistency import penalties
from tp_invariant.layers.parameters import mark_sharded
from tp_invariant.testing import assert_bitwise_equal

# of w [8, 6], sharded along dim 0, and v [6, 8], along dim 1; b [6] is whole
REFUSED = {
    "norm": lambda w, v, b: w.norm(),
    "norm of another order": lambda w, v, b: w.norm(3),
    "largest": lambda w, v, b: w.norm(math.inf),
    "a norm's other power": lambda w, v, b: w.norm() ** 3,
    "the square of a norm": lambda w, v, b: 0.3 * w.norm() ** 2,  # right but for its bits, as the next three
    "a norm times itself": lambda w, v, b: 0.3 * (w.norm() * w.norm()),
    "squared norms of columns": lambda w, v, b: 0.3 * w.norm(dim=0).square().sum(),
    "squared norm of norms": lambda w, v, b: 0.3 * torch.stack([p.norm() for p in (w, v, b)]).norm().square(),
    "one of a list of terms": lambda w, v, b: torch.stack([b.exp().cumsum(0).sum(), w.norm()]).sum(),
    "norm of a difference": lambda w, v, b: (0.5 * (w - 0.1)).double().norm(),
    "mean": lambda w, v, b: w.square().mean(),
    "std": lambda w, v, b: w.std(),
    "var of columns": lambda w, v, b: w.var(0).sum(),
    "max": lambda w, v, b: w.max(),
    "max of columns": lambda w, v, b: w.max(0).values.sum(),
    "amax": lambda w, v, b: w.amax(),
    "logsumexp": lambda w, v, b: w.logsumexp(0).sum(),
    "softmax": lambda w, v, b: w.softmax(0).square().sum(),
    "prod": lambda w, v, b: (1 + 0.1 * w).prod(),
    "mse_loss": lambda w, v, b: F.mse_loss(w, torch.zeros_like(w)),
    "norms of columns": lambda w, v, b: w.norm(dim=0).sum(),
    "norms of rows of the other one": lambda w, v, b: v.norm(dim=1).sum(),
    "norms of a transpose": lambda w, v, b: w.t().norm(dim=1).sum(),
    "norms of columns of a view": lambda w, v, b: w.view(-1, 2, 3).flatten(0, 1).norm(dim=0).sum(),
    "normalized columns": lambda w, v, b: F.normalize(w, dim=0).pow(3).sum(),
    "an angle": lambda w, v, b: F.cosine_similarity(w.abs().log1p().flatten(), w.detach().flatten(), dim=0),
    "mean of norms": lambda w, v, b: w.norm(dim=1).mean(),
    "orthogonal rows": lambda w, v, b: (w @ w.t() - torch.eye(len(w))).square().sum(),
    "the same by einsum": lambda w, v, b: (torch.einsum("nk,mk->nm", w, w) - torch.eye(len(w))).norm(),
    "orthogonal columns": lambda w, v, b: (v.t() @ v - torch.eye(v.shape[1])).abs().sum(),
    "all parameters as one": lambda w, v, b: torch.cat([p.flatten() for p in (w, v, b)]).norm(),
    "norm of norms": lambda w, v, b: torch.stack([p.norm() for p in (w, v, b)]).norm(),
    "sum of norms": lambda w, v, b: sum(p.norm() for p in (w, v, b)),
}
RIGHT = {
    "squares": lambda w, v, b: w.square().sum(),
    "elastic net": lambda w, v, b: w.abs().sum() + 0.5 * w.pow(2).sum(),
    "distance from a start": lambda w, v, b: (2 * (w - 0.1).square()).sum(),
    "huber_loss": lambda w, v, b: F.huber_loss(w, torch.zeros_like(w), reduction="sum"),
    "norm of order 1": lambda w, v, b: w.norm(1),
    "norms of rows": lambda w, v, b: w.norm(dim=1).sum(),
    "the same of a transpose": lambda w, v, b: w.t()[None].norm(dim=1).sum(),
    "squared means of rows": lambda w, v, b: w.mean(1).square().sum(),
    "softmax of rows": lambda w, v, b: w.softmax(1).square().sum(),
    "the same of a view": lambda w, v, b: w.view(1, -1, 2, 3).norm(dim=(0, 3)).sum(),
    "normalized rows": lambda w, v, b: F.normalize(w, dim=1).pow(3).sum(),
    "weight norm": lambda w, v, b: (w / w.norm(dim=1, keepdim=True)).pow(3).sum(),
    "trace": lambda w, v, b: (w.t() @ w).trace(),
    "diagonal": lambda w, v, b: (w @ w.t()).diagonal().square().sum(),
    "a whole parameter": lambda w, v, b: b.norm() + b.std() + b.square().mean(),
    "without a gradient": lambda w, v, b: w.square().sum() / (2 * w.detach().norm().new_tensor(3.0)),
}
UNNOTICED = {  # as nodes of the graph these are the same as where code of the user's has added over the ranks in place
    "root of squares": lambda w, v, b: w.square().sum().sqrt(),
    "orthogonality": lambda w, v, b: (w.t() @ w - torch.eye(6)).square().sum(),
    "sums of columns": lambda w, v, b: w.sum(0).square().sum(),
    "a product of both": lambda w, v, b: (v @ w).square().sum(),
    "a mean by hand": lambda w, v, b: w.square().sum() / w.numel(),
    # and with another mask it is right
    "rows that are orthogonal to others": lambda w, v, b: (w @ w.t() * (1 - torch.eye(len(w)))).square().sum(),
}


def layers(tp_group):
    made = nn.Sequential(
        tpi.Linear(6, 8, parallel_mode="column", bias=False, tp_group=tp_group),
        tpi.Linear(8, 6, parallel_mode="row", tp_group=tp_group),
    )
    torch.manual_seed(0)
    for name, p in made.named_parameters():
        layer, leaf = made.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        full = torch.randn(6 if leaf == "bias" or name[0] == "1" else 8, *[8 if name[0] == "1" else 6][: p.dim() - 1])
        with torch.no_grad():
            p.copy_(layer.shard_spec(leaf).placed(layer.shard_spec(leaf).local(full)))
    return made


def backward(model, penalty, **options):
    """The whole gradients of a loss with the penalty, or the error's text."""
    w, v, b = model[0].weight, model[1].weight, model[1].bias
    loss = model(torch.ones(3, 6)).square().mean() + 0.1 * penalty(w, v, b)
    model.zero_grad()
    try:
        loss.backward(**options)
    except RuntimeError as error:
        return str(error)
    return [model[0].shard_spec("weight").full(w.grad), model[1].shard_spec("weight").full(v.grad), b.grad]


def all_forms(tp_group=None):
    unfinished = nn.Linear.__new__(nn.Linear)  # it has no parameters that could be searched for a shard
    with tpi.set_tp_invariant_mode(True):
        model = layers(tp_group)
        assert type(unfinished) is nn.Linear
        return {name: backward(model, form) for name, form in (REFUSED | RIGHT | UNNOTICED).items()}


@functools.cache
def found():
    return all_forms(), run_ranks(all_forms, 2)


def is_right(name):
    one, two = found()
    return all(torch.equal(a, b) for of_rank in two for a, b in zip(one[name], of_rank[name], strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_allowed(name):
    assert is_right(name)


@pytest.mark.parametrize("name", UNNOTICED)
def test_what_is_not_noticed_is_wrong(name):
    assert not is_right(name)


def gradients_of_parts(tp_group=None):
    model = layers(tp_group)
    w, v, b = model[0].weight, model[1].weight, model[1].bias
    found = {}
    for name, form in REFUSED.items():
        grads = torch.autograd.grad(form(w, v, b), [w, v], allow_unused=True)
        specs = [model[0].shard_spec("weight"), model[1].shard_spec("weight")]
        found[name] = [
            s.full(torch.zeros_like(p) if g is None else g) for s, p, g in zip(specs, (w, v), grads, strict=True)
        ]
    return found


def test_what_is_refused_is_wrong():
    one, two = gradients_of_parts(), run_ranks(gradients_of_parts, 2)[0]
    for name in REFUSED:
        assert not all(torch.equal(a, b) for a, b in zip(one[name], two[name], strict=True)), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_across_a_shard_is_refused_on_every_rank(name):
    one, two = found()
    assert not isinstance(one[name], str)
    for rank, results in enumerate(two):
        assert isinstance(results[name], str), "no error"
        assert f"on rank {rank} the loss takes " in results[name]


def test_the_error_says_what_to_write():
    text = found()[1][1]["mean"]
    assert "takes mean of 0.weight of shape (4, 6), which is one of 2 parts" in text
    assert "sharded along dim 0" in text
    assert "0.1 * p.square().sum()" in text


def test_nothing_of_the_graph_is_held():
    penalties.watch()
    layer = tpi.Linear(6, 6)
    gc.collect()
    gc.disable()
    try:
        with tpi.set_tp_invariant_mode(True):
            loss = layer(torch.ones(3, 6)).square().mean()
            held = weakref.ref(loss)
            loss.backward()
            del loss
            assert held() is None
    finally:
        gc.enable()


def test_a_loss_is_looked_at_once_whatever_runs_inside_of_its_backward(monkeypatch):
    penalties.watch()
    layer, y, looked = tpi.Linear(6, 6), torch.ones(3, 6, requires_grad=True), []
    monkeypatch.setattr(penalties, "_first_nodes", lambda root: looked.append(root) or [])
    with tpi.set_tp_invariant_mode(True):
        for _ in range(3):
            y = checkpoint(layer, y, use_reentrant=True)
        loss = y.sum()
        loss.backward()
    assert looked.count(loss.grad_fn) == 1
    assert len(looked) == 4


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


def added_in_place(w, v, b):
    total = w.square().sum()
    with torch.no_grad():
        dist.all_reduce(total, group=w.tp_group.process_group)
    return total.sqrt()


def with_mode_on(program):
    @functools.wraps(program)
    def run(*args):
        with tpi.set_tp_invariant_mode(True):
            return program(*args)

    return run


@with_mode_on
def other_cases(tp_group):
    model, x = layers(tp_group), torch.ones(3, 6)
    w, v = model[0].weight, model[1].weight
    right = [backward(model, RIGHT["squares"]) for _ in range(3)]
    late = backward(model, REFUSED["norm"])
    unknown = backward(model, lambda w, v, b: Opaque.apply(w.norm()))
    in_place = backward(model, added_in_place)
    twice = backward(model, REFUSED["mean"], retain_graph=True)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum() + w.norm(), [x])  # of no parameter
    recomputed = checkpoint(model, x, use_reentrant=True).sum()  # a backward inside of a backward
    with pytest.raises(RuntimeError, match="takes linalg_vector_norm of 0"):
        (recomputed + w.norm()).backward()
    with pytest.raises(RuntimeError, match="takes std of 1"):
        torch.autograd.grad(model(x).sum() + v.std(), [w, v])
    return right, late, unknown, in_place, twice, dx


def test_other_cases():
    right, late, unknown, in_place, twice, dx = run_ranks(other_cases, 2)[0]
    assert not any(isinstance(grads, str) for grads in right)
    assert "linalg_vector_norm" in late
    assert not isinstance(unknown, str)
    assert "takes mean" in twice
    assert dx.shape == (3, 6)
    with tpi.set_tp_invariant_mode(False):
        one = all_forms()["norm"]  # what is added over the ranks in place is right
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(in_place, one, strict=True))


class Described(torch.autograd.Function):
    """What it keeps has the names that nodes of torch's have."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable, ctx._saved_dim = [], [{}]
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


def of_one_branch(y, w):
    """The other branch's nodes have run before, and what they had saved is freed."""
    other = 2.0 ** torch.ones(1, requires_grad=True)
    other.sum().backward()
    return *torch.autograd.grad((other + y.square()).sum(), [w], retain_graph=True), y.sum()


LOSSES = {  # of outputs y, with a weight w: its gradient, and a loss
    "a power of a tensor": lambda y, w: 2.0 ** y.mean(),
    "a tensor as an exponent": lambda y, w: (y.square().mean() + 1) ** torch.tensor(1.5),
    "in a checkpoint": lambda y, w: checkpoint(lambda y: 2.0 ** y.mean(), y, use_reentrant=False),
    "a function of a user's": lambda y, w: Described.apply(y).mean(),
    "a branch that has run": lambda y, w: sum(map(Tensor.sum, of_one_branch(y, w))),
    "several": lambda y, w: [y.mean(), y.sum(), 0.1 * w.square().sum()],
    "an edge of the graph": lambda y, w: torch.autograd.graph.get_gradient_edge(y.square().mean()),
}


@with_mode_on
def gradients_of_losses(tp_group=None):
    model, found = layers(tp_group), {}
    for name, loss in LOSSES.items():
        model.zero_grad()
        torch.autograd.backward(loss(model(torch.ones(3, 6)), model[0].weight))
        found[name] = testing.full_grads(model)
    engine = torch.autograd.graph._engine_run_backward
    with mock.patch.object(torch.autograd, "_engine_run_backward", lambda *args, **options: engine(*args, **options)):
        found["through a function of others"] = backward(model, REFUSED["norm"])
    return found


def test_right_losses_have_the_gradients_of_one_rank():
    one = gradients_of_losses()
    for found in run_ranks(gradients_of_losses, 2):
        assert "takes linalg_vector_norm" in found.pop("through a function of others")
        for name, grads in found.items():
            assert_bitwise_equal(grads, one[name])


def test_a_loss_is_found_from_other_threads():
    """As on a GPU, whose nodes run in a thread of torch's, while a hook may run in the one that waits."""
    found = []

    def hook(grad):
        thread = threading.Thread(target=lambda: found.extend(penalties._roots()))
        thread.start()
        thread.join()

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    loss = (2 * x).sum()
    loss.backward()
    assert loss.grad_fn in found


@with_mode_on
def fully_sharded(tp_group):
    model = layers(tp_group)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))["dp"])
    w, found = model[0].weight, []
    mark_sharded(w, 0, 1, tp_group)
    for form in (REFUSED["mean"], RIGHT["squares"]):
        try:
            (model(torch.ones(3, 6)).sum() + form(w, None, None).full_tensor()).backward()
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_parts_of_parts_by_fully_shard():
    for wrong, right in run_ranks(fully_sharded, 2):
        assert "takes mean of a parameter of shape (4, 6)" in wrong
        assert right == "no error"


@with_mode_on
def on_a_mesh(_):
    model = layers(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    (0.1 * model[0].weight.norm().full_tensor() + model(torch.ones(3, 6)).square().mean()).backward()
    return model[0].weight.grad.full_tensor()


def test_dtensors_are_whole():
    one = all_forms()["norm"][0]
    assert torch.allclose(run_ranks(on_a_mesh, 2)[0], one, rtol=1e-4, atol=1e-5)
