"""`detach`, Adam's and SGD's steps of DTensors with local tensors: all that torch's own way does, and nothing else."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest
import torch
from meshes import init_device_mesh
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core import local_operators
from tp_invariant.core.dtensors import as_local, is_dtensor

PLACEMENTS = ([Shard(0)], [Shard(1)], [Replicate()])
SHAPES = ((16, 8), (5, 6), (7, 2))  # over two ranks the second and third are cut unevenly, too

MAKE = {
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW, for-loop": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW, lr is a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), fused=True, maximize=True),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=True, amsgrad=True, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, foreach=True),
    "SGD, momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "SGD, for-loop": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
}


@contextlib.contextmanager
def torchs_way():
    """Without this library's short ways."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    (detach,) = (operator for operator, handler in handlers.items() if handler is local_operators._detach)
    assert str(detach) == "aten.detach.default"
    handler = handlers.pop(detach)
    try:
        with mock.patch.object(local_operators, "_local_lists", lambda lists, options: None):
            yield
    finally:
        handlers[detach] = handler


@contextlib.contextmanager
def counted():
    """A list of whether each call of torch.optim's functions went with local tensors."""
    calls, look = [], local_operators._local_lists

    def local_lists(lists, options):
        found = look(lists, options)
        calls.append(found is not None)
        return found

    with mock.patch.object(local_operators, "_local_lists", local_lists):
        yield calls


def parameters(mesh):
    torch.manual_seed(0)
    ps = [nn.Parameter(distribute_tensor(torch.randn(s), mesh, p)) for s in SHAPES for p in PLACEMENTS]
    assert all(map(is_dtensor, ps))
    return ps


def stepped(mesh, make, steps=3):
    """(parameters, optimizer) after steps with the gradients of a product of each parameter."""
    ps = parameters(mesh)
    optimizer = make(ps)
    for step in range(steps):
        for i, p in enumerate(ps):
            torch.manual_seed(100 * step + i)
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, p.placements)
        optimizer.step()
    return ps, optimizer


def everything(ps, optimizer):
    """What can be seen of steps: values, kinds, and whether writes have been counted."""
    found = {}
    for i, p in enumerate(ps):
        for name, x in {"p": p, "grad": p.grad, **optimizer.state[p]}.items():
            local = x._local_tensor if is_dtensor(x) else x
            kind = (type(x), tuple(x.shape), x.placements if is_dtensor(x) else None)
            found[f"{i}.{name}"] = local.detach().clone(), kind, x._version > 0
    return found


# --- optimizers -----------------------------------------------------------------------------------------------------


def both_ways(tp_group, name):
    mesh = init_device_mesh("cpu", (2,))
    with counted() as calls:
        ps, optimizer = stepped(mesh, MAKE[name])
    assert calls == [name not in ("SGD, momentum", "SGD, for-loop"), True, True], calls  # SGD makes its state itself
    with torchs_way():
        expected = everything(*stepped(mesh, MAKE[name]))
    found = everything(ps, optimizer)
    assert found.keys() == expected.keys()
    for key, (value, kind, written) in found.items():
        assert kind == expected[key][1], key
        assert written or not expected[key][2], key
        testing.assert_bitwise_equal(value, expected[key][0])
    assert all((p._version > 0) == ("fused" not in name and "tensor" not in name) for p in ps)  # as plain tensors
    full, state = [p.full_tensor().detach() for p in ps], optimizer.state_dict()["state"]
    moments = [v.full_tensor() for s in state.values() for v in s.values() if is_dtensor(v)]
    return full, moments


def in_float64(name):
    """The parameters of whole plain ones in float64."""
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(s).double()) for s in SHAPES for _ in PLACEMENTS]
    optimizer = MAKE[name](ps)
    for step in range(3):
        for i, p in enumerate(ps):
            torch.manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape).double()
        optimizer.step()
    return [p.detach() for p in ps]


@pytest.mark.parametrize("name", MAKE)
def test_steps_are_those_of_torchs_way(name):
    results = run_ranks(both_ways, 2, name)
    exact = in_float64(name)
    for full, moments in results:
        assert moments or name == "SGD"
        testing.assert_bitwise_equal([full, moments], list(results[0]))
        for x, y in zip(full, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)


def scaled(tp_group):
    """Fused AdamW under GradScaler, which gives it the scale and whether to step; the second gradient overflows."""
    mesh = init_device_mesh("cpu", (2,))

    def run():
        ps = parameters(mesh)
        optimizer, scaler = MAKE["AdamW, fused"](ps), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            for i, p in enumerate(ps):
                torch.manual_seed(100 * step + i)
                full = 1024 * torch.randn(p.shape)
                if step == 1 and i == 4:
                    full[0, 0] = torch.inf
                p.grad = distribute_tensor(full, mesh, p.placements)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        return everything(ps, optimizer), scaler.get_scale()

    with counted() as calls:
        found, scale = run()
    with torchs_way():
        expected, expected_scale = run()
    assert all(calls) and calls and scale == expected_scale == 512
    for key, (value, *seen) in found.items():
        assert seen == list(expected[key][1:]), key
        testing.assert_bitwise_equal(value, expected[key][0])


def test_scaled_gradients():
    run_ranks(scaled, 2)


def otherwise_placed(tp_group):
    """Each of these goes torch's way, to its results or its errors."""
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    whole = torch.arange(32.0).view(4, 8)

    def sharded(placements=PLACEMENTS[0], on=mesh):
        return nn.Parameter(distribute_tensor(whole, on, placements))

    def outcome(make):
        ps = make()
        optimizer = torch.optim.AdamW(ps, lr=1e-2, foreach=False)
        try:
            optimizer.step()
        except (RuntimeError, ValueError, AssertionError) as error:
            return type(error).__name__
        return [p.full_tensor().detach() if is_dtensor(p) else p.detach().clone() for p in ps]

    def with_grads(*pairs):
        ps = []
        for p, grad in pairs:
            p.grad = grad
            ps.append(p)
        return ps

    def replicated_grad():
        return with_grads((sharded(), distribute_tensor(whole, mesh, [Replicate()])))

    def partial_grad():
        return with_grads((sharded([Replicate()]), DTensor.from_local(whole, mesh, [Partial()])))

    def two_meshes():
        one, two = sharded(), sharded([Replicate(), Shard(0)], other)
        return with_grads((one, distribute_tensor(whole, mesh, [Shard(0)])), (two, two.detach().clone()))

    def plain_beside():
        one, two = sharded(), nn.Parameter(whole.clone())
        return with_grads((one, distribute_tensor(whole, mesh, [Shard(0)])), (two, whole.clone()))

    values = 0
    for make in (replicated_grad, partial_grad, two_meshes, plain_beside):
        with counted() as calls:
            found = outcome(make)
        assert calls == [False], make.__name__
        with torchs_way():
            expected = outcome(make)
        assert type(found) is type(expected)
        if isinstance(found, list):
            values += 1
            testing.assert_bitwise_equal(found, expected)
        else:
            assert found == expected
    assert values
    p = sharded()
    p.grad = distribute_tensor(whole, mesh, [Shard(0)])
    with counted() as calls:
        torch.optim.AdamW([p], differentiable=True)
        local = [[p], [p.grad]]
        assert local_operators._local_lists(local, {}) is None  # gradients are recorded
        with torch.no_grad():
            assert local_operators._local_lists(local, {}) is not None
            assert local_operators._local_lists(local, {"found_inf": p.grad}) is None
            assert local_operators._local_lists([[p], [None]], {}) is None
            assert local_operators._local_lists([[p], [torch.ones(2, 8)]], {}) is None
        with torch.inference_mode():
            q = sharded()
        with torch.no_grad():
            assert local_operators._local_lists([[q]], {}) is None
    with pytest.raises(NotImplementedError):
        torch.optim.SGD([p], fused=True).step()


def failing(tp_group):
    """What a step that fails midway has written to is counted, whichever tensor of a list that is."""
    mesh = init_device_mesh("cpu", (2,))
    ps = parameters(mesh)[:2]
    before = [p._version for p in ps]

    def step(params, grads):
        params[1].add_(1)
        raise MemoryError("midway")

    for p in ps:
        p.grad = p.detach().clone()
    with counted() as calls, torch.no_grad(), pytest.raises(MemoryError, match="midway"):
        local_operators._with_local_tensors(step, [])(ps, [p.grad for p in ps])
    assert calls == [True] and ps[1]._version > before[1]


def test_a_step_that_fails_midway_is_counted():
    run_ranks(failing, 2)


def test_what_is_placed_otherwise_goes_torchs_way():
    run_ranks(otherwise_placed, 2)


def fully_sharded(tp_group):
    """FSDP2 over tensor parallel ranks: digests of parameters after two steps in both ways, with both forms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def run(form):
        torch.manual_seed(0)
        model = nn.Sequential(
            tpi.Linear(16, 32, parallel_mode="column", tp_group=mesh["tp"]),
            tpi.Linear(32, 16, parallel_mode="row", tp_group=mesh["tp"]),
        )
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=tpi.fsdp_placement)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **form)
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(4, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.device_mesh.ndim == 2 for p in model.parameters())
        return [p.full_tensor().detach() for p in model.parameters()]

    for form in ({"fused": True}, {"foreach": True}):
        with counted() as calls:
            found = run(form)
        with torchs_way():
            expected = run(form)
        assert calls == [True, True]
        testing.assert_bitwise_equal(found, expected)


def test_fully_sharded_parameters():
    run_ranks(fully_sharded, 4)


def compiled(tp_group):
    mesh = init_device_mesh("cpu", (2,))

    def run():
        optimizer = torch.optim.AdamW(ps := parameters(mesh)[:1], lr=1e-2, foreach=True)
        step = torch.compile(optimizer.step, backend="eager")
        for p in ps:
            p.grad = distribute_tensor(torch.full(p.shape, 0.1), mesh, p.placements)
        step()
        return [p.full_tensor() for p in ps]

    adam = sys.modules["torch.optim.adam"]
    with counted() as calls:
        found = run()
    torch.compiler.reset()
    with mock.patch.object(adam, "adam", adam.adam.__wrapped__), torchs_way():
        testing.assert_bitwise_equal(found, run())
    torch.compiler.reset()
    return calls


def test_compiled_optimizers_trace_torchs_way():
    for calls in run_ranks(compiled, 2):
        assert not any(calls)


# --- detach ---------------------------------------------------------------------------------------------------------


def detached(tp_group):
    mesh = init_device_mesh("cpu", (2,))

    class Own(DTensor):
        pass

    def look(x):
        y = x.detach()
        aliases = y.untyped_storage()._cdata == x.untyped_storage()._cdata, y._version == x._version
        with torch.no_grad():
            x.mul_(2)
        seen = type(y), y._spec == x._spec, tuple(y.shape), y.stride(), y.requires_grad, y.is_leaf, y._is_view()
        return seen, aliases, y._version == x._version, y._local_tensor.clone(), y._local_tensor.data_ptr()

    def cases():
        for placements in (*PLACEMENTS, [Partial()]):
            x = DTensor.from_local(torch.arange(6.0).view(3, 2), mesh, placements, run_check=False)
            yield x
            yield nn.Parameter(x.clone())
            yield Own(x._local_tensor, x._spec, requires_grad=False)
            yield x.t()

    for x, y in zip(cases(), cases(), strict=True):
        *found, at = look(x)
        assert at == x._local_tensor.data_ptr()
        with torchs_way():
            *expected, at = look(y)
        assert at == y._local_tensor.data_ptr()
        assert found[:3] == expected[:3], (found, expected)
        testing.assert_bitwise_equal(found[3], expected[3])


def test_detach_is_that_of_torchs_way():
    run_ranks(detached, 2)


def accumulated(tp_group):
    """.grad of one and of two backwards, and of one that is differentiable."""
    mesh = init_device_mesh("cpu", (2,))

    def run():
        layer = tpi.Linear(8, 6, parallel_mode="column", tp_group=mesh, bias=True)
        seen = []
        for _ in range(2):
            layer(torch.ones(3, 8)).square().sum().backward()
            for p in layer.parameters():
                seen.append(
                    (p.grad._local_tensor.clone(), (type(p.grad), p.grad._spec == p._spec, p.grad.requires_grad))
                )
        x = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        (x * x).sum().full_tensor().backward(create_graph=True)
        return [*seen, (x.grad._local_tensor.detach(), x.grad.requires_grad)]

    torch.manual_seed(0)
    found = run()
    torch.manual_seed(0)
    with torchs_way():
        expected = run()
    for (value, seen), (other, also) in zip(found, expected, strict=True):
        assert seen == also
        testing.assert_bitwise_equal(value, other)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_are_those_of_torchs_way():
    run_ranks(accumulated, 2)


# --- other releases of torch ----------------------------------------------------------------------------------------


def missing(tp_group):
    """Where torch lacks something, only that is left as it is."""
    adam, sgd = sys.modules["torch.optim.adam"], sys.modules["torch.optim.sgd"]
    step = adam.adam
    with (
        mock.patch.object(local_operators, "_shortened", False),
        mock.patch.object(DTensor, "_op_dispatcher", object()),
        mock.patch.dict(sys.modules, {"torch.optim.sgd": None}),
        mock.patch.object(adam, "adam", step.__wrapped__),
    ):
        before = sgd.sgd
        local_operators.shorten()
        assert adam.adam.__wrapped__ is step.__wrapped__ and sgd.sgd is before
        wrapped = adam.adam
        local_operators.shorten()
        assert adam.adam is wrapped
    assert adam.adam is step
    handlers = DTensor._op_dispatcher._custom_op_handlers
    (detach,) = (operator for operator, handler in handlers.items() if handler is local_operators._detach)
    assert str(detach) == "aten.detach.default"
    with (
        mock.patch.object(local_operators, "_shortened", False),
        mock.patch.dict(handlers, {detach: len}),
        mock.patch.dict(sys.modules, {"torch.optim.adam": None, "torch.optim.sgd": None}),
    ):
        local_operators.shorten()
        assert handlers[detach] is len  # torch's own, if it has one
    assert handlers[detach] is local_operators._detach


def test_what_torch_lacks():
    run_ranks(missing, 2)


def test_a_gradient_that_somebody_holds_is_detached():
    """Else a write to `.grad` would be one to what a hook has kept."""

    def on_rank(tp_group):
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False))
        kept = []
        for hooked in (False, True):  # the first measures how many references a variable is
            p.grad = None
            if hooked:
                p.register_hook(lambda grad: kept.append(grad.detach()))
            as_local(p).sum().backward()
            assert type(p.grad) is DTensor and not p.grad.requires_grad and p.grad.is_leaf
        assert kept[0] is not p.grad
        return p.grad.to_local()

    for grad in testing.run_ranks(on_rank, 2, device="cpu"):
        assert grad.tolist() == [[1.0, 1.0]] * 4


def test_parameters_of_other_kinds_are_listed_in_torchs_way():
    """An optimizer's list of its parameters looks for no __torch_function__, unless one of them may have one."""
    local_operators.shorten()
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    plain, watched = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).as_subclass(Watched))
    for kind in (torch.optim.Adam, torch.optim.SGD):
        optimizer = kind([plain, watched], lr=0.1)
        watched.grad = torch.ones(2)
        seen.clear()
        optimizer.step()
        assert torch.Tensor.grad.__get__ in seen
    looks = local_operators._listing_quickly(lambda self, group: torch._C._is_torch_function_enabled())
    assert looks(None, {"params": [plain, watched]}) and not looks(None, {"params": [plain]})
    assert torch._C._is_torch_function_enabled()
