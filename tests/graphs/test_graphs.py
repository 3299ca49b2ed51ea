"""Layers as CUDA graphs: the bits of the eager layers, and what is refused. Without a GPU an emulation is used."""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpus import on_gpus
from hf_models import build
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tp_invariant as tpi
from tp_invariant.comm import peer_copies
from tp_invariant.comm.collectives import Group, resolve_group, start_gather_major
from tp_invariant.comm.peer_copies import copies_of
from tp_invariant.functional import attention_choice
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.graphs import capture as graphs
from tp_invariant.graphs import checks as graph_checks
from tp_invariant.graphs.graphed_call import GraphedForward
from tp_invariant.testing import assert_bitwise_equal, digest, gpu_ranks, run_ranks

HIDDEN, FFN, TOKENS = 64, 192, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# --- an emulation ---------------------------------------------------------------------------------------------------


def emulated(callables, sample_args, num_warmup_iters=3, allow_unused_input=False, pool=None):
    """torch.cuda.make_graphed_callables without graphs: results are the same tensors each time, overwritten."""

    def grads_of(outputs, inputs, grads):
        outputs, grads = zip(*((o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad), strict=True)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=allow_unused_input))
        return [next(found) if x.requires_grad else None for x in inputs]

    def replay_of(function, static):
        layer = getattr(function._forward, "__self__", None)
        places, modules = {}, [] if layer is None else list(layer.modules())
        parameters = [dict(module._parameters) for module in modules]

        @contextlib.contextmanager
        def as_captured():
            now = [dict(module._parameters) for module in modules]
            for module, then in zip(modules, parameters, strict=True):
                module._parameters.update(then)
            yield
            for module, before in zip(modules, now, strict=True):
                module._parameters.update(before)

        def into_place(name, values):
            known = places.setdefault(name, [None if v is None else v.detach().clone() for v in values])
            for place, value in zip(known, values, strict=True):
                if value is not None:
                    place.copy_(value.detach())
            return tuple(None if place is None else place.detach() for place in known)

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                for mine, given in zip(static, inputs, strict=True):
                    if mine.data_ptr() != given.data_ptr():
                        mine.detach().copy_(given)
                with torch.enable_grad(), as_captured():
                    places["made"] = function(*static)
                return into_place("outputs", places["made"])

            @staticmethod
            def backward(ctx, *grads):
                return into_place("grads", grads_of(places["made"], static, grads))

        return Graphed.apply

    for function, static in zip(callables, sample_args, strict=True):
        for _ in range(num_warmup_iters):
            outputs = function(*static)
            grads_of(outputs, static, [torch.empty_like(o) for o in outputs])
    made = []
    for function, static in zip(callables, sample_args, strict=True):
        made.append(function(*static))
    for outputs, static in zip(reversed(made), reversed(sample_args), strict=True):
        grads_of(outputs, static, [torch.empty_like(o) for o in outputs])
    return tuple(replay_of(f, static) for f, static in zip(callables, sample_args, strict=True))


@contextlib.contextmanager
def emulating(device=DEVICE):
    if device == "cuda":
        yield
    else:
        with (
            mock.patch.object(torch.cuda, "make_graphed_callables", emulated),
            mock.patch.object(torch.cuda, "graph_pool_handle", lambda: (0, 1)),
            mock.patch.object(graphs, "on_gpu", lambda x: True),
            mock.patch.object(graph_checks, "on_gpu", lambda x: True),
        ):
            yield


# --- a model --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """x [S, B, hidden] -> x plus a product and a gated MLP of it; also its mean, and how often it was called."""

    def __init__(self, hidden, ffn, device, dtype, stride, **options):
        super().__init__()
        place = dict(device=device, dtype=dtype, bias=False, **options)
        norm = dict(normalization="RMSNorm", parallel_mode="column")
        sizes = (hidden // 2, hidden // 4, hidden // 4)  # of the features between the two
        pieces = dict(partition_stride=stride) if stride else dict(partition_sizes=sizes)
        self.qkv = tpi.LayerNormLinear(hidden, hidden, **pieces, **norm, **place)
        self.o = tpi.Linear(hidden, hidden, parallel_mode="row", **pieces, **place)
        self.fc1 = tpi.LayerNormLinear(hidden, 2 * ffn, partition_stride=2, **norm, **place)
        self.fc2 = tpi.Linear(ffn, hidden, parallel_mode="row", **place)
        self.called = 0

    def forward(self, x, scale=None, *, mix=None, residual=True):
        self.called += 1
        y = self.o(torch.tanh(self.qkv(x)))
        x = x + y if scale is None else x + y * scale
        gate, up = self.fc1(x).chunk(2, dim=-1)
        y = self.fc2(F.silu(gate) * up)
        if mix is not None:
            y = y * mix["by"][0]
        return (x + y if residual else y), {"mean": x.detach().mean(), "kind": "block"}


def model_of(tp_group, hidden=HIDDEN, ffn=FFN, layers=2, dtype=torch.float32, device=DEVICE, stride=None):
    torch.manual_seed(0)
    options = dict(tp_group=tp_group, sequence_parallel=tp_group is not None, device=device, dtype=dtype, stride=stride)
    return torch.nn.ModuleList(Block(hidden, ffn, **options) for _ in range(layers)).train()


def x_of(group, tokens=TOKENS, hidden=HIDDEN, step=0, dtype=torch.float32, device=DEVICE):
    full = torch.randn(tokens, 1, hidden, generator=torch.Generator().manual_seed(step)) * torch.logspace(-2, 2, hidden)
    mine = full.chunk(group.size)[group.rank]
    return mine.to(device, dtype).clone().requires_grad_()


def tp_of(tp_group, kind, device):
    return DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",)) if kind == "mesh" else tp_group


def through(model, x, **options):
    for block in model:
        x, _ = block(x, **options)
    return x


def _whole(t, group):
    return start_gather_major(t, group).wait().flatten(0, 1) if group.size > 1 else t


def train(tp_group, graphed, device, kind=None, tokens=TOKENS, hidden=HIDDEN, ffn=FFN, dtype=torch.float32):
    """Full outputs, input gradients and parameters after three steps of two micro-batches each.

    `kind` "mesh": parameters are DTensors; "group": the same model without.
    """
    tp_group = tp_of(tp_group, kind, device)
    group = resolve_group(tp_group)
    model = model_of(tp_group, hidden, ffn, dtype=dtype, device=device, stride=None if kind is None else 2)
    if graphed:
        handle = graphs.graph_layers(model, lambda: through(model, x_of(group, tokens, hidden, 0, dtype, device)))
    optimizer, results = torch.optim.SGD(model.parameters(), lr=1e-3), []
    called = [block.called for block in model]
    for step in range(3):
        for micro in range(2):
            x = x_of(group, tokens, hidden, 10 * step + micro, dtype, device)
            y = through(model, x)
            (y.square().sum() * 2.0**-12).backward()  # the same gradient of y whatever a rank holds
            results += [_whole(y.detach(), group), _whole(x.grad, group)]
        grads = {type(p.grad) for p in model.parameters()}
        assert grads == {DTensor if kind == "mesh" else torch.Tensor}
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    if graphed:
        assert all(isinstance(block.forward, GraphedForward) for block in model)
    if graphed and device == "cuda":
        assert [block.called for block in model] == called, "no graph ran"
    if graphed:
        handle.remove()
    return [t.cpu() for t in [*results, *tpi.testing.full_parameters(model).values()]]


def trained(tp_group, graphed, mode=True, device="cpu", transport="auto", **sizes):
    with (
        emulating(device),
        mock.patch.dict("os.environ", TP_INVARIANT_TRANSPORT=transport),
        mock.patch.object(peer_copies, "MIN_BYTES", 2**18),
        tpi.set_tp_invariant_mode(mode),
    ):
        results = train(tp_group, graphed, device, **sizes)
        copies = 0
        if device == "cuda" and tp_group.size() > 1 and transport == "auto" and graphed:
            captured = copies_of(resolve_group(tp_group), torch.device(device, torch.cuda.current_device())).captured
            copies = 0 if captured is None else captured.started
        weight_cache.clear()
    return digest(results), results[0], copies


def test_the_bits_of_the_layers_as_they_are():
    want, whole, _ = run_ranks(trained, 1, False, device="cpu")[0]
    for ranks in (1, 2):
        for graphed in (True, False):
            assert {found[0] for found in run_ranks(trained, ranks, graphed, device="cpu")} == {want}, (ranks, graphed)
    off = [run_ranks(trained, ranks, True, False, device="cpu")[0][0] for ranks in (1, 2)]
    assert off[0] != off[1], "the control: without the mode the degree shows"
    # and right
    model, x = model_of(None, device="cpu").double(), x_of(Group(None, 0, 1), device="cpu").double()
    for block in model:
        h = F.rms_norm(x, (HIDDEN,), block.qkv.layer_norm_weight, block.qkv.eps)
        x = x + torch.tanh(h @ block.qkv.weight.t()) @ block.o.weight.t()
        h = F.rms_norm(x, (HIDDEN,), block.fc1.layer_norm_weight, block.fc1.eps)
        gate, up = (h @ block.fc1.weight.t()).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ block.fc2.weight.t()
    torch.testing.assert_close(whole.double(), x.detach(), rtol=1e-4, atol=1e-4)


def trained_as(tp_group, kind, graphed, mode=True):
    return trained(tp_group, graphed, mode, kind=kind)


def test_parameters_that_are_dtensors():
    """The bits of plain shards, in graphs and without."""
    want = run_ranks(trained_as, 1, "group", False, device="cpu")[0][0]
    for ranks, graphed in ((1, True), (2, True), (2, False)):
        found = run_ranks(trained_as, ranks, "mesh", graphed, device="cpu")
        assert {rank[0] for rank in found} == {want}, (ranks, graphed)
    assert run_ranks(trained_as, 2, "mesh", True, False, device="cpu")[0][0] != want, "the control: other bits show"


SHAPES = (TOKENS, TOKENS // 2)


def trained_in_shapes(tp_group, graphed, device, mode=True, dtype=torch.float32):
    """Gradients and outputs of steps of several lengths, the last of which has no graphs."""
    group, size = resolve_group(tp_group), dict(device=device, dtype=dtype)
    with emulating(device), tpi.set_tp_invariant_mode(mode):
        model, results = model_of(tp_group, **size), []
        if graphed:
            forwards = [lambda n=n: through(model, x_of(group, n, **size)) for n in SHAPES]
            handle = graphs.graph_layers(model, forwards, other_calls="eager")
        for step, tokens in enumerate((*SHAPES, *SHAPES[::-1], TOKENS // 4, TOKENS)):
            called, x = model[0].called, x_of(group, tokens, step=step, **size)
            y = through(model, x)
            (y.square().sum() * 2.0**-12).backward()
            results += [_whole(y.detach(), group).cpu(), _whole(x.grad, group).cpu()]
            if graphed and device == "cuda":
                assert model[0].called - called == (tokens not in SHAPES)
        results.append(tpi.testing.full_grads(model))
        if graphed:
            handle.remove()
        weight_cache.clear()
        return digest(results)


def test_several_shapes():
    """Each has graphs of its own, chosen by the arguments; another shape runs as the layers were."""
    want = run_ranks(trained_in_shapes, 1, False, "cpu", device="cpu")
    for ranks, graphed in ((1, True), (2, True), (2, False)):
        assert set(run_ranks(trained_in_shapes, ranks, graphed, "cpu", device="cpu")) == set(want), (ranks, graphed)
    off = run_ranks(trained_in_shapes, 2, True, "cpu", False, device="cpu")
    assert set(off) != set(want), "the control: without the mode the degree shows"


def test_shapes_share_the_memory_of_activations(caplog):
    with emulating():
        xs = [there(n, 4) for n in (4, 2, 3)]
        layer = Odd(lambda m, x: x @ m.weight).to(DEVICE)
        forwards = [lambda x=x: layer(x) for x in xs]
        for wrong, problem in (
            (dict(forward=[forwards[0]] * 2), r"two functions call layers\[0\] \(Odd\) with the same arguments"),
            (dict(forward=[]), "forward is 0 functions: 1 to 16"),
            (dict(forward=forwards, other_calls="slow"), "other_calls='slow': 'error' or 'eager'"),
        ):
            with pytest.raises(ValueError, match=problem):
                graphs.graph_layers([layer], **wrong)
        other = Odd(lambda m, x: x @ m.weight).to(DEVICE)  # of another shape, while the first layer's is the same
        partly = [lambda x=x: other(layer(xs[0])[: len(x)]) for x in xs]
        with pytest.raises(ValueError, match=r"two functions call layers\[0\] \(Odd\) with the same arguments"):
            graphs.graph_layers([layer, other], partly)
        handle = graphs.graph_layers([layer], forwards[:2])
        large = layer(xs[0]).sum()
        layer(xs[1]).sum().backward()
        with pytest.raises(RuntimeError, match="or any for other shapes"):
            large.backward()
        with pytest.raises(ValueError, match=r"shape \(3, 4\).*was.*shape \(4, 4\).*;.*was.*shape \(2, 4\)"):
            layer(xs[2])
        handle.remove()
        graphs.graph_layers([layer], forwards[:2], other_calls="eager")
        for _ in range(2):
            assert_bitwise_equal(layer(xs[2]).detach(), (xs[2] @ layer.weight).detach())
        assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
            "layers[0] (Odd) runs without CUDA graphs, as more calls may"
        ]
        layer.eval()
        assert_bitwise_equal(layer(xs[2]).detach(), (xs[2] @ layer.weight).detach())
        layer.train()
        with tpi.set_tp_invariant_mode(True), pytest.raises(ValueError, match="TP-invariant mode is True"):
            layer(xs[2])


def test_a_loss_of_the_step_before_does_not_matter():
    """Its autograd graph binds the parameters to the stream on which it was created."""
    with emulating(), tpi.set_tp_invariant_mode(True):
        model, x = model_of(None), x_of(Group(None, 0, 1))
        before = through(model, x).sum()
        before.backward(retain_graph=True)
        own = list(model.parameters())
        graphs.graph_layers(model, lambda: through(model, x))
        assert all(p is mine for p, mine in zip(model.parameters(), own, strict=True))
        model.zero_grad()
        through(model, x).sum().backward()
        grads = [p.grad for p in own]
        model.zero_grad()
        before.backward()
        assert_bitwise_equal(grads, [p.grad for p in own])


def hf_steps(tp_group, graphed, device, sizes, kind="group"):
    """Losses and parameters of a Qwen3's steps, with its decoder layers as graphs or not."""
    with emulating(device), tpi.set_tp_invariant_mode(True):
        model = build("qwen3", torch.bfloat16 if device == "cuda" else torch.float32, **sizes).to(device)
        model = tpi.parallelize(model, tp_of(tp_group, kind, device), sequence_parallel=True)

        def batch(step):
            ids = torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(step)).to(device)
            return dict(input_ids=ids, labels=ids, use_cache=False)

        if graphed:
            graphs.graph_layers(model.model.layers, lambda: model(**batch(0)))
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(4):
            loss = model(**batch(step)).loss
            loss.backward()
            tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        weight_cache.clear()
        return digest([losses, tpi.testing.full_parameters(model)])


def test_a_hugging_face_model():
    """Its layers take a mask that is not a tensor, and cosines and sines, by name."""
    pytest.importorskip("transformers")
    want = run_ranks(hf_steps, 1, False, "cpu", {}, device="cpu")
    for kind in ("group", "mesh"):
        assert set(run_ranks(hf_steps, 2, True, "cpu", {}, kind, device="cpu")) == set(want)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture
def captured():
    with emulating(), tpi.set_tp_invariant_mode(True):
        model = model_of(None)
        alone = Group(None, 0, 1)
        scale = torch.ones(HIDDEN, device=x_of(alone).device)
        graphs.graph_layers(model, lambda: through(model, x_of(alone), scale=scale, mix={"by": (0.5, None)}))
        yield model, x_of(alone), dict(scale=scale, mix={"by": (0.5, None)})
        weight_cache.clear()


def test_arguments_by_position_and_name_and_results_in_their_places(captured):
    model, x, options = captured
    y, about = model[0](x, **options)
    assert about["kind"] == "block"
    assert y.requires_grad and not about["mean"].requires_grad
    want, told = model_of(None)[0](x, **options)
    assert_bitwise_equal([y, about["mean"]], [want, told["mean"]])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x, o: (x[:-1], o), "tensor 0 of the arguments is"),
        (lambda x, o: (x.bfloat16(), o), "bfloat16"),
        (lambda x, o: (x.detach(), o), "requires_grad=False, and was .* requires_grad=True"),
        (lambda x, o: (x, {**o, "scale": o["scale"][None]}), r"tensor 1 of the arguments .*\(1, 64\)"),
        (lambda x, o: (x, {**o, "mix": {"by": (0.25, None)}}), "0.25"),
        (lambda x, o: (x, {**o, "residual": False}), "residual"),
        (lambda x, o: (x, {"scale": o["scale"]}), "mix"),
    ],
)
def test_other_arguments_are_refused(captured, change, problem):
    model, x, options = captured
    x, options = change(x, options)
    with pytest.raises(ValueError, match=rf"layers\[0\] \(Block\).*{problem}.*remove\(\)"):
        model[0](x, **options)


def test_another_mode_or_autocast_is_refused(captured):
    model, x, options = captured
    with tpi.set_tp_invariant_mode(False), pytest.raises(ValueError, match="TP-invariant mode is False, and was True"):
        model[0](x, **options)
    with mock.patch.object(torch, "is_autocast_enabled", lambda device: True):  # where there is no GPU none can be on
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with pytest.raises(ValueError, match=r"autocast is torch\.bfloat16, and was None"):
            model[0](x, **options)


def test_another_parameter_is_refused(captured):
    model, x, options = captured
    old = model[0].o.weight
    model[0].o.weight = torch.nn.Parameter(old.detach().clone())
    with pytest.raises(ValueError, match="in o a module, parameter, buffer or other tensor is another"):
        model[0](x, **options)
    model[0].o.weight = old
    old.requires_grad_(False)
    with pytest.raises(ValueError, match="another requires_grad"):
        model[0](x, **options)
    old.requires_grad_(True)
    model[0](x, **options)
    old.data = old.data.clone()  # moved
    with pytest.raises(ValueError, match="lies elsewhere"):
        model[0](x, **options)


def test_a_backward_whose_activations_are_gone_is_refused(captured):
    model, x, options = captured
    first = model[0](x, **options)[0].sum()
    second = model[0](x, **options)[0].sum()
    with pytest.raises(RuntimeError, match=r"layers\[0\] \(Block\).*activations of this backward are gone"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gone"):
        second.backward()
    later = through(model, x, **options).sum()
    with torch.no_grad():
        model[0](x.detach(), **options)
    with pytest.raises(RuntimeError, match=r"layers\[1\]"):  # its forward's memory was written by the one before it
        later.backward()


def test_no_replay_overwrites_what_was_returned(captured):
    model, x, options = captured
    results = []
    for step in range(3):
        given = x_of(Group(None, 0, 1), step=step)
        y = through(model, given, **options)
        grads = torch.autograd.grad(y.square().sum(), [given, *model.parameters()])
        results.append([y.detach(), *grads])
    kept = [[t.clone() for t in result] for result in results]
    for _ in range(2):
        through(model, x, **options).sum().backward()
    assert_bitwise_equal(results, kept)
    assert not torch.equal(results[0][2], results[1][2])


def test_eval_and_remove_give_the_layer_as_it_was(captured):
    model, x, _ = captured
    graphed = model[0].forward
    called = model[0].called
    model.eval()
    model[0](x[:-1], residual=False)  # arguments of a layer's own
    assert model[0].called == called + 1
    model.train()
    assert model[0].forward is graphed
    graphed.remove()
    model[0](x[:-1], residual=False)
    graphed(x[:-1], residual=False)  # what had wrapped it meanwhile calls it
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.eval(), r"layers\[0\] \(Block\) is in eval"),
        (lambda m: m.append(m[0]), "stands in `layers` twice"),
        (lambda m: m.append(m[0].fc2), "inside another"),
        (lambda m: setattr(m[0].o, "fuse_wgrad_accumulation", True), "fuse_wgrad_accumulation"),
        (lambda m: m.requires_grad_(False), "no parameter to train"),
    ],
)
def test_layers_that_cannot_be_captured(change, problem):
    model = model_of(None)
    change(model)
    with emulating(), pytest.raises(ValueError, match=problem):
        graphs.graph_layers(model, lambda: through(model, x_of(Group(None, 0, 1))))


def test_no_gpu():
    with pytest.raises(ValueError, match="is on cpu: CUDA graphs need all of it on the current GPU"):
        graphs.graph_layers(model_of(None, device="cpu"), lambda: None)


def test_forward_calls_them_in_order(captured):
    model, x = model_of(None), x_of(Group(None, 0, 1))
    with pytest.raises(ValueError, match=r"in order.*: it called layers\[1\] \(Block\), layers\[0\] \(Block\)"):
        graphs.graph_layers(model, lambda: through([model[1], model[0]], x))
    with pytest.raises(ValueError, match="none of them"):
        graphs.graph_layers(model, lambda: None)
    with pytest.raises(ValueError, match="there are no layers"):
        graphs.graph_layers([], lambda: None)
    with pytest.raises(TypeError, match="layers is a Block: it must be a sequence"):
        graphs.graph_layers(model[0], lambda: None)
    with pytest.raises(ValueError, match="num_warmup_iters=1: at least 2"):
        graphs.graph_layers(model, lambda: through(model, x), num_warmup_iters=1)
    with pytest.raises(ValueError, match="captured already"):
        graphs.graph_layers(captured[0], lambda: through(captured[0], x))


def one_rank_refuses(tp_group):
    with emulating("cpu"), tpi.set_tp_invariant_mode(True):
        model = model_of(tp_group, device="cpu")
        if tp_group.rank() == 1:
            model.eval()
        try:
            graphs.graph_layers(model, lambda: through(model, x_of(resolve_group(tp_group), device="cpu")))
        except ValueError as error:
            return str(error)


def test_all_ranks_say_what_one_cannot():
    texts = run_ranks(one_rank_refuses, 2, device="cpu")
    assert texts[0] == texts[1] and "rank 1: layers[0] (Block) is in eval()" in texts[0]


class Odd(torch.nn.Module):
    """x -> the result of `does` for the layer and x."""

    def __init__(self, does):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 4), 0.5))
        self.register_buffer("steps", torch.zeros(()))
        self.inner = torch.nn.Dropout(0.0)
        self.does = does

    def forward(self, *xs, **named):
        return self.does(self, *xs, **named)


def odd(does, *xs, **named):
    """The layer, captured with these arguments."""
    layer = Odd(does).to(DEVICE)
    graphs.graph_layers([layer], lambda: layer(*xs, **named))
    return layer


def there(*size, grad=True):
    return torch.randn(*size, device=DEVICE).requires_grad_(grad)


elsewhere = torch.nn.Parameter(torch.ones(4, 4, device=DEVICE))


@pytest.mark.parametrize(
    ("does", "problem"),
    [
        (lambda m, x: x @ m.weight @ elsewhere, r"computes with a tensor of shape \(4, 4\) that wants a gradient"),
        (lambda m, x: x * 2, "makes no use of weight, which want a gradient"),
        (lambda m, x: (x @ m.weight).detach(), "nothing that .* returns wants a gradient"),
    ],
)
def test_layers_that_a_graph_would_get_wrong(does, problem):
    with emulating(), pytest.raises(ValueError, match=rf"layers\[0\] \(Odd\).*{problem}|{problem}"):
        odd(does, there(2, 4))


def of_a_mesh(tp_group):
    """Modules that are not this library's: replicated and frozen parameters; and what is refused."""
    mesh, x = tp_of(tp_group, "mesh", "cpu"), torch.randn(2, 4)
    with emulating("cpu"):
        layers = [Odd(lambda m, x: x @ m.weight * m.scale) for _ in range(2)]
        for layer in layers:
            layer.scale = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
            tpi.replicate_(layer, mesh)
        graphs.graph_layers(layers[:1], lambda: layers[0](x))
        for layer in layers:
            layer(x).square().sum().backward()
            layer(x).sum().backward()
        assert_bitwise_equal(layers[0].weight.grad.to_local(), layers[1].weight.grad.to_local())
        torch.testing.assert_close(layers[0](x).detach(), x @ layers[0].weight.to_local().detach() * 2)
        for key in ("weight", "scale"):
            y = layers[0](x)
            with torch.no_grad():
                getattr(layers[0], key).mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        layers[0].weight._local_tensor = layers[0].weight._local_tensor.clone()
        with pytest.raises(ValueError, match="lies elsewhere"):
            layers[0](x)
        layer = Odd(lambda m, x: x @ m.weight)
        whole = fully_shard(torch.nn.Sequential(layer), mesh=mesh)
        for problem in ("fully_shard's are gathered anew", "is fully_shard's, which is gathered anew"):
            with pytest.raises(ValueError, match=rf"weight of layers\[0\] \(Odd\) .*{problem}"):
                graphs.graph_layers([layer], lambda: None)
            with torch.no_grad():
                whole(x)  # after which the gathered ones stay


def test_dtensors_of_other_modules_and_of_fully_shard():
    run_ranks(of_a_mesh, 2, device="cpu")


def test_an_argument_that_is_written_to_is_refused():
    with emulating(), pytest.raises(ValueError, match=r"layers\[0\] \(Odd\) writes to tensor 1 of its arguments"):
        odd(lambda m, x, total: x @ m.weight + total.add_(1.0), there(2, 4), there(2, 4, grad=False))


def test_conditions_that_forward_changes_are_refused():
    x = there(2, 4)
    with emulating():
        layer = Odd(lambda m, x: x @ m.weight).to(DEVICE)

        def under(context):
            with context():
                layer(x)

        for context, problem in (
            (lambda: tpi.set_tp_invariant_mode(True), "TP-invariant mode is True, and was False"),
            (torch.no_grad, "gradients are off"),
        ):
            with pytest.raises(ValueError, match=problem):
                graphs.graph_layers([layer], lambda context=context: under(context))
        with torch.no_grad(), pytest.raises(ValueError, match="gradients are off"):
            graphs.graph_layers([layer], lambda: layer(x))
        with mock.patch.dict("os.environ", TP_INVARIANT_CHECK="1"), pytest.raises(ValueError, match="compares every"):
            graphs.graph_layers([layer], lambda: layer(x))
        assert layer(x).shape == x.shape and "forward" not in vars(layer)


def test_an_unused_parameter_gets_no_gradient():
    with emulating():
        layer = Odd(lambda m, x: x * 2).to(DEVICE)
        x = there(2, 4)
        graphs.graph_layers([layer], lambda: layer(x), allow_unused_input=True)
        layer(x).sum().backward()
        assert layer.weight.grad is None and x.grad is not None


def test_a_result_that_takes_no_part_in_backward_is_refused():
    with emulating():
        x = there(2, 4)
        layer = odd(lambda m, x: (x @ m.weight, {"b": (x - x).abs().sum().sqrt(), "a": x.detach().sum()}), x)
        y, others = layer(x)
        assert list(others) == ["b", "a"], "in the order in which they stand"
        with pytest.raises(RuntimeError, match="tensor 1 of what it returns takes no part in this backward"):
            y.sum().backward()


def test_a_changed_module_is_refused():
    with emulating():
        x = there(2, 4)
        layer = odd(lambda m, x: m.inner(x @ m.weight) + m.steps, x)
        layer(x)
        layer.inner.eval()
        with pytest.raises(ValueError, match=r"in inner a module, .* is another, .*or training"):
            layer(x)
        layer.inner = torch.nn.Dropout(0.0)
        with pytest.raises(ValueError, match=r"in layers\[0\] \(Odd\) a module, .* is another"):
            layer(x)


def test_a_tensor_that_is_a_plain_attribute_is_held_to():
    with emulating():
        x = there(2, 4)
        layer = Odd(lambda m, x: x @ m.weight + m.extra).to(DEVICE)
        layer.extra = torch.ones(4, device=DEVICE)
        graphs.graph_layers([layer], lambda: layer(x))
        layer(x)
        layer.extra = torch.zeros(4, device=DEVICE)
        with pytest.raises(ValueError, match="or other tensor is another"):
            layer(x)


def test_a_buffer_that_becomes_another_tensor_is_refused():
    def does(m, x):
        m.steps = m.steps + 1
        return x @ m.weight

    with emulating():
        layer, x = Odd(does).to(DEVICE), there(2, 4)
        before = layer.steps
        with pytest.raises(ValueError, match=r"makes its buffer .*steps another tensor"):
            graphs.graph_layers([layer], lambda: layer(x))
        assert layer.steps is before and before == 0


def test_under_torch_compile_the_layer_runs_as_it_was():
    with emulating():
        x = there(2, 4)
        layer = odd(lambda m, x: x @ m.weight, x)
        want = layer(x)
        assert_bitwise_equal(torch.compile(layer, backend="eager", fullgraph=True)(x), want)


@pytest.mark.parametrize("which", ["weight", "frozen"])
def test_a_parameter_that_is_written_between_forward_and_backward_is_refused(which):
    with emulating():
        x, layer = there(2, 4), Odd(lambda m, x: x @ m.weight @ m.frozen).to(DEVICE)
        layer.frozen = torch.nn.Parameter(torch.ones(4, 4, device=DEVICE), requires_grad=False)
        graphs.graph_layers([layer], lambda: layer(x))
        y = layer(x)
        with torch.no_grad():
            getattr(layer, which).mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_the_same_tensor_twice_is_one_tensor():
    with emulating():
        x = there(2, 4)
        layer = odd(lambda m, q, k: q @ m.weight if q is k else k @ m.weight - q, x, x)
        y = layer(x, x)
        y.sum().backward()
        assert_bitwise_equal([y.detach(), x.grad], [(x @ layer.weight).detach(), torch.full_like(x, 2.0)])
        with pytest.raises(ValueError, match=r"\(tensor 0, tensor 1\)|'tensor 0', 'tensor 1'"):
            layer(x, there(2, 4))


def test_constants_that_python_calls_equal():
    with emulating():
        x = there(2, 4)
        layer = odd(lambda m, x, a, b: x @ m.weight * a, x, 0.0, float("nan"))
        layer(x, 0.0, float("nan"))
        for other in (-0.0, 0, False):
            with pytest.raises(ValueError, match="the arguments are"):
                layer(x, other, float("nan"))


def test_what_a_capture_leaves_behind():
    """Generators and buffers are as before."""
    with emulating():
        x, generator = there(2, 4), torch.cuda.get_rng_state if DEVICE == "cuda" else lambda: torch.zeros(1)
        layer, before = Odd(lambda m, x: x @ m.weight + m.steps.add_(1.0).detach()).to(DEVICE), generator()
        graphs.graph_layers([layer], lambda: layer(x + torch.rand_like(x)))
        assert layer.steps == 0
        assert_bitwise_equal(generator(), before)


def twice(layer, x):
    return x @ layer.weight * 2


def test_a_copy_is_not_captured():
    with emulating():
        x = there(2, 4)
        layer = odd(lambda m, x: x @ m.weight, x)
        copied = copy.deepcopy(layer)
        with torch.no_grad():
            copied.weight.zero_()
        assert not copied(x[:1]).any() and layer(x).any()
        patched = Odd(lambda m, x: x @ m.weight).to(DEVICE)
        patched.forward = functools.partial(twice, patched)  # as something that wraps layers does
        graphs.graph_layers([patched], lambda: patched(x))
        assert_bitwise_equal(copy.deepcopy(patched)(x[:1]), twice(patched, x[:1]))


class Calling(torch.nn.Module):
    """A layer that calls SDPA itself, so that the hook that makes this safe is on the layer."""

    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def test_the_hooks_of_the_layer_hold_in_its_graph():
    with emulating(), tpi.set_tp_invariant_mode(True):
        layer, x, calls = Calling().to(DEVICE), there(2, 8, 64), []
        attention_choice.SafeSdpa(layer)
        safe = attention_choice._safe_sdpa
        with mock.patch.object(attention_choice, "_safe_sdpa", lambda *a, **k: calls.append(1) or safe(*a, **k)):
            graphs.graph_layers([layer], lambda: layer(x))
        assert len(calls) > 3, "the recorded call, those that warm up, and the capture"


def differing(tp_group, what):
    with emulating("cpu"), tpi.set_tp_invariant_mode(True):
        model, group = model_of(tp_group, device="cpu"), resolve_group(tp_group)
        options = dict(num_warmup_iters=2 + (what == "warmup" and group.rank))
        layers = model[: 1 + (group.rank == 0)] if what == "layers" else model
        try:
            graphs.graph_layers(layers, lambda: through(model, x_of(group, device="cpu")), **options)
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize(
    "what, problem", [("warmup", "num_warmup_iters: rank 0: 2; rank 1: 3"), ("layers", "layers: ")]
)
def test_ranks_that_differ(what, problem):
    texts = run_ranks(differing, 2, what, device="cpu")
    assert texts[0] == texts[1] and f"graph_layers: ranks differ in {problem}" in texts[0]


# --- on GPUs --------------------------------------------------------------------------------------------------------

LARGE = dict(hidden=1024, ffn=3072, tokens=1536, dtype=torch.bfloat16)


@pytest.mark.parametrize("transport", ["auto", "nccl"])
@pytest.mark.parametrize("ranks", on_gpus(1, 2, 4, 8))
def test_on_gpus(ranks, transport):
    if transport == "nccl" and torch.cuda.device_count() < gpu_ranks():
        pytest.skip("gloo, which ranks that share a GPU have, cannot be captured")
    want = _trained_on_gpus(1, False, "nccl")[0]
    found = _trained_on_gpus(ranks, True, transport)
    assert {found[0]} == {want}
    if transport == "auto" and ranks > 1:
        assert found[2] > 0, "no copy engine was used in a graph"
        off = [_trained_on_gpus(r, True, "nccl", mode=False)[0] for r in (1, ranks)]
        assert off[0] != off[1]


@pytest.mark.parametrize("ranks", on_gpus(1, 2, 4, 8, shared=False))
def test_several_shapes_on_gpus(ranks):
    sizes = "cuda", True, torch.bfloat16
    want = run_ranks(trained_in_shapes, 1, False, *sizes, device="cuda")
    assert set(run_ranks(trained_in_shapes, ranks, True, *sizes, device="cuda")) == set(want)


@pytest.mark.parametrize("ranks", on_gpus(1, 2, 4, 8, shared=False))
def test_parameters_that_are_dtensors_on_gpus(ranks):
    """Graphs with DTensors have the bits of graphs with plain shards, and of the layers as they are."""
    want = _trained_on_gpus(1, False, "nccl", kind="group")[0]
    for kind, graphed in (("mesh", True), ("mesh", False), ("group", True)):
        for transport in ("auto", "nccl") if graphed else ("auto",):
            assert _trained_on_gpus(ranks, graphed, transport, kind=kind)[0] == want, (kind, graphed, transport)
    if ranks > 1:
        off = [_trained_on_gpus(r, True, "nccl", mode=False, kind="mesh")[0] for r in (1, ranks)]
        assert off[0] != off[1]


def _trained_on_gpus(ranks, graphed, transport, mode=True, kind=None):
    found = run_ranks(_large, ranks, graphed, mode, transport, kind, device="cuda")
    assert len({rank[0] for rank in found}) == 1
    return found[0][0], found[0][1], min(rank[2] for rank in found)


def _large(tp_group, graphed, mode, transport, kind):
    return trained(tp_group, graphed, mode, "cuda", transport, kind=kind, **LARGE)


@pytest.mark.parametrize("ranks", on_gpus(1, 2, 4))
def test_a_hugging_face_model_on_gpus(ranks):
    pytest.importorskip("transformers")
    sizes = dict(hidden_size=128, intermediate_size=256)
    want = run_ranks(hf_steps, 1, False, "cuda", sizes, device="cuda")
    for kind in ("group", "mesh"):
        assert set(run_ranks(hf_steps, ranks, True, "cuda", sizes, kind, device="cuda")) == set(want)
