"""parallelize and the styles convert modules where they stand: what hangs on modules and parameters stays."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import hf_models
import pytest
import torch
from meshes import mesh_or_group
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.conversion import convert
from tp_invariant.layers.in_place import is_in_graph
from tp_invariant.styles import parallelize_module

STEPS = 5


class Projection(nn.Linear):
    """A user's own class, with nn.Linear's forward."""


class CentredNorm(nn.LayerNorm):
    """A user's own class, with nn.LayerNorm's forward."""


class Net(nn.Module):
    """Modules that are also in a list, a partial and a bound method, with tensors and hooks of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.act, self.out_norm = (
            nn.Embedding(24, 16),
            CentredNorm(16),
            nn.GELU(),
            nn.RMSNorm(16),
        )
        self.up, self.down = nn.Linear(16, 32), Projection(32, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.listed, self.raise_ = [self.down], functools.partial(self.up)
        self.normalise = self.norm.__call__
        self.down.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.norm.shift = nn.Parameter(torch.full((16,), 0.1))
        self.up.register_buffer("calls", torch.zeros(()))
        self.up.register_forward_hook(count_call)
        self.down.bias.register_hook(half)
        self.norm.weight.register_post_accumulate_grad_hook(note_accumulation)
        self.up.weight.no_decay = self.norm.weight.no_decay = True
        self.down.rate = 0.5

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.raise_(self.normalise(x) + self.norm.shift)
        return self.head(self.out_norm(x + self.listed[0](self.act(h)) * self.down.gain))


def count_call(module: nn.Module, args: Any, output: Tensor) -> None:
    module.calls += 1


def half(grad: Tensor) -> Tensor:
    return grad / 2


def note_accumulation(parameter: Tensor) -> None:
    parameter.accumulated = getattr(parameter, "accumulated", 0) + 1


PLAN = {
    "embed": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_gather_output",
    "norm": "replicate", "out_norm": "replicate",
}  # fmt: skip


def without_hooks(kind: str) -> Net:
    """Over a mesh, parameters with hooks are refused."""
    model = Net()
    if kind == "mesh":
        model.down.bias._backward_hooks = model.norm.weight._post_accumulate_grad_hooks = None
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay by class and by an attribute of parameters, in every usual idiom."""
    norms = {id(p) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for p in m.parameters()}
    linears = {id(m.weight) for m in model.modules() if isinstance(m, Projection)}
    groups: dict[float, list[nn.Parameter]] = {0.0: [], 0.1: [], 0.3: []}
    for p in model.parameters():
        groups[0.0 if id(p) in norms or hasattr(p, "no_decay") else 0.3 if id(p) in linears else 0.1].append(p)
    return torch.optim.AdamW([dict(params=ps, weight_decay=decay) for decay, ps in groups.items()], lr=0.05)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        ids = torch.randint(24, (3, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(tp_group: Any, kind: str, before: bool, mode: bool) -> Any:
    with tpi.set_tp_invariant_mode(mode):
        model = without_hooks(kind)
        optimizer = optimizer_of(model) if before else None
        tpi.parallelize(model, mesh_or_group(tp_group, kind), PLAN)
        losses = steps_of(model, optimizer or optimizer_of(model))
        return tpi.full_state_dict(model), losses


def test_optimizers_made_before_and_after_give_the_same_bytes():
    """Next to bits, values: those of the model itself, which nothing has converted, on one process."""
    (want,) = run_ranks(trained, 1, "group", False, True)
    for degree in (1, 2):
        for before in (True, False):
            for got in run_ranks(trained, degree, "group", before, True):
                testing.assert_bitwise_equal(got, want)
    (plain,) = run_ranks(trained, 1, "group", False, False)
    assert any(not torch.equal(plain[0][name], value) for name, value in want[0].items()), "the control"
    model = Net()
    losses = steps_of(model, optimizer_of(model))
    assert want[0].keys() == model.state_dict().keys() and want[0]["up.calls"] == STEPS
    torch.testing.assert_close(want[1], losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(want[0], dict(model.state_dict()), rtol=1e-2, atol=1e-3)
    rates = [p.no_decay for p in model.parameters() if hasattr(p, "no_decay")]
    assert rates == [True, True] and model.norm.weight.accumulated == STEPS


def on_a_mesh(tp_group: Any) -> Any:
    mesh = mesh_or_group(tp_group, "mesh")
    model = without_hooks("mesh")
    optimizer = optimizer_of(model)
    tpi.parallelize(model, mesh, PLAN)
    with pytest.raises(RuntimeError) as caught:
        steps_of(model, optimizer)
    hooked = Net()
    with pytest.raises(ValueError, match=r"down\.bias: has hooks, and a DTensor takes its place"):
        tpi.parallelize(hooked, mesh, PLAN)
    assert type(hooked.up) is nn.Linear
    return str(caught.value), [hasattr(p, "no_decay") for p in (model.up.weight, model.norm.weight)]


def test_over_a_mesh_an_optimizer_made_before_raises_and_one_made_after_trains():
    without = "group"  # the bytes of the hooks' halved gradient cannot be had over a mesh
    for text, attributes in run_ranks(on_a_mesh, 2):
        assert "AdamW has the former " in text and "Make the optimizer after that, of model.parameters()" in text
        assert attributes == [True, True]
    (want,) = run_ranks(trained_without_hooks, 1, without)
    for kind in ("group", "mesh"):
        for got in run_ranks(trained_without_hooks, 2, kind):
            testing.assert_bitwise_equal(got, want)


def trained_without_hooks(tp_group: Any, kind: str) -> Any:
    with tpi.set_tp_invariant_mode(True):
        model = without_hooks("mesh")
        tpi.parallelize(model, mesh_or_group(tp_group, kind), PLAN)
        losses = steps_of(model, optimizer_of(model))
        return tpi.full_state_dict(model), losses


# --- objects ----------------------------------------------------------------------------------------------------------


def objects_stay(tp_group: Any) -> Any:
    model = Net()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    full = {name: p.detach().clone() for name, p in parameters.items()}
    model(torch.arange(24).view(3, 8)).square().sum().backward()
    grads = {name: (p.grad, p.grad.clone()) for name, p in parameters.items() if p.grad is not None}
    tpi.parallelize(model, tp_group, PLAN)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(p is parameters[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert isinstance(model.norm, CentredNorm) and isinstance(model.norm, tpi.ParallelNorm)
    assert isinstance(model.down, Projection) and isinstance(model.down, tpi.Linear)
    assert isinstance(model.out_norm, nn.RMSNorm) and type(model.up) is tpi.Linear
    assert model.head.weight is model.embed.weight and model.listed[0] is model.down and model.down.rate == 0.5
    for name, p in model.named_parameters():
        if name in grads:
            assert p.grad is grads[name][0] and p.grad.shape == p.shape
    testing.assert_bitwise_equal(testing.full_parameters(model), full)
    testing.assert_bitwise_equal(testing.full_grads(model), {name: value for name, (_, value) in grads.items()})
    return model.up.weight.shape[0]


def test_objects_and_gradients_stay():
    assert run_ranks(objects_stay, 2) == [16, 16]


def test_a_converted_model_is_copied_pickled_saved_and_compiled():
    model, ids = Net(), torch.arange(24).view(3, 8)
    tpi.parallelize(model, None, PLAN)
    saved = io.BytesIO()
    model.up._forward_hooks.clear()
    with tpi.set_tp_invariant_mode(True):
        want = model(ids).detach()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            assert list(map(type, twin.modules())) == list(map(type, model.modules()))
            assert twin.head.weight is twin.embed.weight is not model.embed.weight
            assert twin.state_dict().keys() == model.state_dict().keys()
            testing.assert_bitwise_equal(twin(ids).detach(), want)
        compiled = torch.compile(model, backend="eager")
        testing.assert_bitwise_equal(compiled(ids).detach(), want)


# --- undone midway ----------------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> Any:
    """The ids of all objects that hang on a model, and the bytes of its tensors."""
    modules = [
        (id(m), type(m), [(key, id(value)) for key, value in vars(m).items()],
         [(key, list(map(id, value.values()))) for key, value in vars(m).items() if isinstance(value, dict)])
        for m in model.modules()
    ]  # fmt: skip
    parameters = [
        (id(p), p.data_ptr(), p.shape, dict(vars(p)), id(p.grad), None if p.grad is None else p.grad.data_ptr())
        for p in model.parameters()
    ]
    config = getattr(model, "config", None)
    values = [None if config is None else dict(vars(config)), testing.digest(dict(model.state_dict()))]
    grads = [testing.digest(p.grad) for p in model.parameters() if p.grad is not None]
    return modules, parameters, values, grads


def failing_midway(tp_group: Any, kind: str, family: str, culprit: int) -> Any:
    """One rank fails at the end of the conversion."""
    model = without_hooks(kind) if family == "" else hf_models.build(family)
    inputs = (torch.arange(24).view(3, 8),) if family == "" else (hf_models.batch()["input_ids"],)
    output = model(*inputs)
    (output if family == "" else output.logits).square().mean().backward()
    del output
    plan, group = (PLAN if family == "" else None), mesh_or_group(tp_group, kind)
    before = everything(model)
    original = convert.FirstForward

    def fail(*args: Any) -> None:
        original(*args)
        if tp_group.rank() == culprit:
            raise MemoryError("planted")

    convert.FirstForward = fail
    try:
        with pytest.raises((MemoryError, RuntimeError), match="planted"):
            tpi.parallelize(model, group, plan)
    finally:
        convert.FirstForward = original
    assert everything(model) == before
    tpi.parallelize(model, group, plan)  # and layers have the same numbers on all ranks
    with tpi.set_tp_invariant_mode(True):
        output = model(*inputs)
    return output.detach() if family == "" else output.logits.detach()


@pytest.mark.parametrize("family", ("", "qwen3"))
@pytest.mark.parametrize("kind", ("group", "mesh"))
def test_undone_midway_the_model_is_as_it_was(kind, family):
    (want,) = run_ranks(failing_midway, 1, "group", family, 0)
    for got in run_ranks(failing_midway, 2, kind, family, 1):
        testing.assert_bitwise_equal(got, want)


# --- what is refused before anything is touched -----------------------------------------------------------------------


def refusals(tp_group: Any) -> Any:
    def text_of(model: nn.Module, plan: Any = None) -> str:
        before = everything(model)
        try:
            tpi.parallelize(model, tp_group, plan or PLAN)
        except ValueError as error:
            assert everything(model) == before
            return str(error)
        return ""

    model = Net()
    loss = model(torch.arange(24).view(3, 8)).sum()
    in_graph = text_of(model)
    del loss
    model = Net()
    model.method = model.up.forward
    by_method = text_of(model)
    model = Net()
    model.norm.heads = 2
    model.up.register_buffer("group", torch.zeros(2))
    by_name = text_of(model)
    assert "up: Linear has an attribute `group` of its own" in by_name
    model = nn.Sequential(nn.Linear(4, 8))
    nn.utils.parametrizations.weight_norm(model[0])
    computed = text_of(model, {"0": "colwise"})
    return in_graph, by_method, by_name, computed


def test_what_cannot_stay_is_refused_before_anything_is_touched():
    always = (
        "up: its method forward is held somewhere",
        "norm: CentredNorm has an attribute `heads` of its own, and the ParallelNorm that it becomes needs that name",
        "0: its weight is no parameter but computed",
    )
    of_parts = "up.weight: is in an autograd graph that is alive"
    for found in run_ranks(refusals, 2):
        for text, wanted in zip(found, (of_parts, *always), strict=True):
            assert wanted in text
            assert "out_norm" not in text, "whole parameters stay as they are"
    for found in run_ranks(refusals, 1):
        assert found[0] == "", "on one rank nothing is cut"
        for text, wanted in zip(found[1:], always, strict=True):
            assert wanted in text


def with_state(tp_group: Any, make: Any) -> str:
    model = Net()
    optimizer = make(model)
    steps_of(model, optimizer)
    tpi.parallelize(model, tp_group, PLAN)
    optimizer.zero_grad()
    before = everything(model)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert everything(model) == before
        optimizer.state.clear()
        steps_of(model, optimizer)
        return str(error)
    steps_of(model, optimizer)
    return ""


def momentum_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def rows_and_columns_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def test_an_optimizer_with_state_for_whole_parameters_raises_at_its_next_step():
    for make, name, first, state in (
        (optimizer_of, "AdamW", "up.weight", "exp_avg, exp_avg_sq"),
        (momentum_of, "SGD", "embed.weight", "momentum_buffer"),
        (rows_and_columns_of, "Adafactor", "embed.weight", "row_var"),
    ):
        wanted = f"{name} has state for the whole parameter {first} ({state}), of which this rank has a part"
        for text in run_ranks(with_state, 2, make):
            assert text.startswith(wanted), text
        assert run_ranks(with_state, 1, make) == [""], "on one rank nothing is cut"


def test_whether_a_parameter_is_in_a_graph():
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(half)
    assert not is_in_graph(layer.weight)
    y = layer(torch.ones(1, 2))
    assert is_in_graph(layer.weight) and is_in_graph(layer.weight), "asking changes nothing"
    loss = y.sum()
    loss.backward()
    del y
    assert is_in_graph(layer.weight)
    del loss
    assert not is_in_graph(layer.weight)
    layer.requires_grad_(False)
    assert not is_in_graph(layer.weight) and not is_in_graph(nn.Linear(2, 2, device="meta").weight)


# --- Hugging Face, and the styles -------------------------------------------------------------------------------------


def hugging_face(tp_group: Any, before: bool) -> Any:
    model = hf_models.build("qwen3")
    norm, layer = model.model.layers[0].input_layernorm, model.model.layers[1].mlp.down_proj
    kind, seen = type(norm), []
    norm.weight.no_decay = True
    layer.register_buffer("calls", torch.zeros(()))
    layer.register_forward_hook(count_call)
    model.spare = [layer]

    def optimizer() -> torch.optim.Optimizer:
        norms = {id(m.weight) for m in model.modules() if isinstance(m, kind)}
        decayed = [p for p in model.parameters() if id(p) not in norms]
        whole = [p for p in model.parameters() if id(p) in norms]
        seen.append(len(whole))
        return torch.optim.AdamW([dict(params=decayed), dict(params=whole, weight_decay=0.0)], lr=1e-3)

    made = optimizer() if before else None
    tpi.parallelize(model, tp_group)
    made = made or optimizer()
    assert seen == [9] and norm.weight.no_decay and model.model.layers[0].input_layernorm is norm
    assert isinstance(norm, tpi.ParallelNorm) and model.spare[0] is layer is model.model.layers[1].mlp.down_proj
    with tpi.set_tp_invariant_mode(True):
        losses = []
        for step in range(STEPS):
            losses.append(hf_models.forward_and_backward(model, made, step).loss.item())
            made.step()
        return tpi.full_state_dict(model), losses


def test_a_hugging_face_model_keeps_its_objects():
    (want,) = run_ranks(hugging_face, 1, False)
    for degree in (1, 2):
        for got in run_ranks(hugging_face, degree, True):
            testing.assert_bitwise_equal(got, want)
    assert want[0]["model.layers.1.mlp.down_proj.calls"] == STEPS
    model = hf_models.build("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, loss in enumerate(want[1]):
        torch.testing.assert_close(
            hf_models.forward_and_backward(model, optimizer, step).loss.item(), loss, rtol=1e-3, atol=1e-3
        )
        optimizer.step()


def styled(tp_group: Any) -> Any:
    mesh = mesh_or_group(tp_group, "mesh")
    model = without_hooks("mesh")
    optimizer, modules = optimizer_of(model), list(model.modules())
    apply = parallelize_module
    replicate, shard = torch.distributed.tensor.Replicate(), torch.distributed.tensor.Shard(-1)
    plan = {
        "embed": tpi.RowwiseParallel(input_layouts=replicate), "up": tpi.ColwiseParallel(),
        "down": tpi.RowwiseParallel(), "head": tpi.ColwiseParallel(output_layouts=replicate),
    }  # fmt: skip
    apply(model, mesh, plan)
    tpi.replicate_(model, mesh)
    assert list(model.modules()) == modules and isinstance(model.down, Projection)
    assert model.head.weight is model.embed.weight and model.up.weight.no_decay and model.down.rate == 0.5
    with pytest.raises(RuntimeError, match="AdamW has the former"):
        steps_of(model, optimizer)
    tied = nn.ModuleList([nn.Embedding(8, 8), nn.Linear(8, 8)])
    tied[1].weight = tied[0].weight
    apply(tied, mesh, {"0": tpi.RowwiseParallel(input_layouts=replicate)})
    with pytest.raises(ValueError, match="is the same parameter as weight, which is placed as"):
        apply(tied, mesh, {"1": tpi.RowwiseParallel(input_layouts=shard)})
    assert type(tied[1]) is nn.Linear and tied[1].weight.shape == (8, 8)
    several = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 7))
    before = everything(several)
    with pytest.raises(ValueError, match="out_features=7 is not divisible"):
        apply(several, mesh, {"0": tpi.ColwiseParallel(), "1": tpi.ColwiseParallel()})
    assert everything(several) == before
    losses = steps_of(model, optimizer_of(model))
    return losses, set(model.state_dict())


def test_styles_keep_objects_and_ties():
    (want,) = run_ranks(trained_without_hooks, 1, "group")
    for losses, keys in run_ranks(styled, 2):
        torch.testing.assert_close(losses, want[1], rtol=1e-4, atol=1e-4)
        assert keys == set(Net().state_dict())
