"""Modules become layers of this library where they stand, so that all that hangs on them and their parameters stays.

A module gets a class derived from its own and from the layer's. With a ProcessGroup its parameters remain the same
objects, whose `.data` becomes this rank's part; with a DeviceMesh a parameter is a DTensor, which is another object: it
takes the attributes and the gradient of the former one. Whatever fails midway is undone, on every rank.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..comm.collectives import Group
from ..consistency.agreement import compare_call
from ..consistency.shards import note_source
from ..core.derived_class import derived_class
from ..core.dtensors import is_dtensor
from ..core.module_hooks import OF_EVERY_MODULE, has_own_forward
from ..core.torch_private import accumulation_hooks_of, gradient_hooks_of
from .parameters import ShardedModule, ShardSpec, mark_sharded


class Place(NamedTuple):
    """A whole parameter, by one of its names, and how it will be sharded."""

    name: str
    parameter: nn.Parameter
    spec: ShardSpec

    @property
    def is_cut(self) -> bool:
        return self.spec.dim is not None and (self.spec.group.size > 1 or self.spec.padding > 0)


Places = dict[int, Place]  # by the id of the parameter


def _places_of(model: nn.Module, layers: Mapping[str, ShardedModule]) -> Places:
    """Where the parameters of modules go that become `layers`: layers on the meta device, by the modules' names."""
    places: Places = {}
    for name, layer in layers.items():
        for key in layer.SHARDED_PARAMETERS:
            if (parameter := model.get_submodule(name)._parameters.get(key)) is not None:
                full_name = f"{name}.{key}" if name else key
                places.setdefault(id(parameter), Place(full_name, parameter, layer.shard_spec(key)))
    return places


# --- what cannot be ---------------------------------------------------------------------------------------------------


def problems_in_place(model: nn.Module, layers: Mapping[str, ShardedModule], group: Group) -> list[str]:
    """Why modules of `model` cannot become `layers` where they stand, one line each; [] if they can."""
    problems = _problems_of_ties(model, layers)
    for name, layer in layers.items():
        module = model.get_submodule(name)
        kind = type(module)
        if has_own_forward(module) and not layer.derived_by:  # else the module's own code stays
            problems.append(
                f"{name or kind.__name__}: has a forward of its own, given to this module and not to its class, which "
                "would be called in place of the layer's: give it afterwards, or derive a class"
            )
        for key in layer.SHARDED_PARAMETERS:
            if layer._parameters.get(key) is not None and module._parameters.get(key) is None:
                problems.append(
                    f"{name}: its {key} is no parameter but computed, as by a parametrization, pruning or weight_norm: "
                    "apply that afterwards"
                )
        own = {**module._parameters, **module._buffers, **module._modules, **vars(module)}
        for key, value in {**_state_of(layer), **layer._modules}.items():
            if not _same(own.get(key, value), value) or (hasattr(kind, key) and not hasattr(type(layer), key)):
                problems.append(
                    f"{name}: {kind.__name__} has an attribute `{key}` of its own, and the {type(layer).__name__} that "
                    "it becomes needs that name: rename it"
                )
    for name, parameter in model.named_parameters() if group.mesh is not None else ():
        if not is_dtensor(parameter) and (gradient_hooks_of(parameter) or accumulation_hooks_of(parameter)):
            problems.append(
                f"{name}: has hooks, and a DTensor takes its place, which would not have them: register them "
                "afterwards, or give a ProcessGroup (mesh.get_group())"
            )
    plain = {id(p): name for name, p in model.named_parameters() if group.mesh is not None and not is_dtensor(p)}
    for name, module in model.named_modules() if plain else ():
        for key, value in () if isinstance(module, nn.RNNBase) else vars(module).items():  # which reads its list anew
            listed = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if key != "_parameters" and (held := next((plain[id(x)] for x in listed if id(x) in plain), None)):
                problems.append(
                    f"{held}: is also in the attribute {key} of {name or type(model).__name__}, and a DTensor takes "
                    "its place, which would not be: use a ParameterList, or give a ProcessGroup (mesh.get_group())"
                )
    return problems + _live_graphs(_places_of(model, layers))


def _problems_of_ties(model: nn.Module, layers: Mapping[str, ShardedModule]) -> list[str]:
    """Modules that share a parameter must shard it alike."""
    dims: dict[int, dict[str, Any]] = {}
    for name, module in model.named_modules():
        layer = layers.get(name)
        for key, parameter in module.named_parameters(recurse=False):
            spec = None if layer is None or key not in layer.SHARDED_PARAMETERS else layer.shard_spec(key)
            sharded = spec is not None and spec.dim is not None and spec.group.size > 1
            dims.setdefault(id(parameter), {})[name] = (spec.dim, spec.stride) if spec and sharded else None
    return [
        f"{' and '.join(by_name)} share a parameter but not the way it is sharded"
        for by_name in dims.values()
        if len(set(by_name.values())) > 1
    ]


def _live_graphs(places: Places) -> list[str]:
    """Autograd graphs that are alive are of whole parameters, which end where ranks get parts of them."""

    def lines() -> list[str]:
        return [
            f"{place.name}: is in an autograd graph that is alive, whose backward needs the whole parameter: delete "
            "the outputs and losses of earlier forwards (del loss), or run such forwards under torch.no_grad()"
            for place in places.values()
            if place.is_cut and place.spec.group.mesh is None and is_in_graph(place.parameter)
        ]

    if lines():
        gc.collect()  # the graph may be unreachable
    return lines()


def held_outside(model: nn.Module, layers: Mapping[str, ShardedModule], group: Group) -> list[str]:
    """What this process has besides `model` that would go on with its whole parameters; one line each."""
    cut = {key for key, place in _places_of(model, layers).items() if place.is_cut}
    changed = {id(p): name for name, p in model.named_parameters() if group.mesh is not None or id(p) in cut}
    own = {id(module) for module in model.modules()}
    converted = {id(model.get_submodule(name)): name for name in layers}
    own |= {id(vars(module).get("forward")) for module in model.modules()}  # as accelerate leaves it

    def lines() -> Iterator[str]:
        for thing in gc.get_objects():
            kind = type(thing)  # isinstance would call a proxy's __class__
            if kind is MethodType and (name := converted.get(id(thing.__self__))) is not None:
                if thing.__func__ is type(thing.__self__).forward and id(thing) not in own:
                    yield f"{name}: its method forward is held somewhere, and is not the layer's: hold the module"
            elif issubclass(kind, nn.Module) and id(thing) not in own:
                for key, value in (thing.__dict__.get("_parameters") or {}).items():
                    if id(value) in changed:
                        yield (
                            f"{changed[id(value)]}: is also {kind.__name__}.{key} of a module outside of the model, "
                            "which would no longer be tied to it: give parallelize the model that holds both"
                        )

    found = set(lines())
    if found:
        gc.collect()  # what is found may be unreachable
        found = set(lines())
    return sorted(found)


def is_in_graph(parameter: Tensor) -> bool:
    """Whether a node of an autograd graph that is alive accumulates the parameter's gradient.

    While there is one, torch gives the same node again, with what was noted in it.
    """
    if not parameter.requires_grad or not parameter.is_leaf:
        return False
    with torch.inference_mode(False):
        if parameter.is_inference():
            return False
        node: Any = get_gradient_edge(parameter).node
        node.metadata["tp_invariant"] = True
        del node  # which is alive from here on if a graph has it
        node = get_gradient_edge(parameter).node
        return node.metadata.pop("tp_invariant", False) is True


def _same(one: Any, other: Any) -> bool:
    plain = (type(None), bool, int, float, str, tuple)
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)


# --- the change -------------------------------------------------------------------------------------------------------


def _state_of(layer: nn.Module) -> dict[str, Any]:
    """What the layer's class has set besides the attributes of every module."""
    return {
        name: value for name, value in vars(layer).items() if name not in OF_EVERY_MODULE | layer._parameters.keys()
    }


def convert(model: nn.Module, layers: Mapping[str, ShardedModule]) -> None:
    """The modules of `model` by these names become `layers`; whole parameters become this rank's parts."""
    modules = {name: model.get_submodule(name) for name in layers}
    place_parameters(model, _places_of(model, layers))
    for name, layer in layers.items():
        module = modules[name]
        if not has_own_forward(module):
            vars(module).pop("forward", None)  # the former class's, as accelerate leaves it
        module.__class__ = derived_class(type(module), type(layer), *layer.derived_by)
        vars(module).update(_state_of(layer))
        module._modules.update(layer._modules)  # of experts, an activation
        assert isinstance(module, ShardedModule)
        for key in layer.SHARDED_PARAMETERS:
            if (parameter := module._parameters.get(key)) is not None:
                module._mark(key, parameter)


def place_parameters(model: nn.Module, places: Places) -> None:
    """Makes whole parameters this rank's parts, wherever they are in `model`."""
    placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the former ones, so that no id is used again
    for module in model.modules():
        for key, former in module._parameters.items():
            if former is None or (place := places.get(id(former))) is None:
                continue
            if id(former) not in placed:
                placed[id(former)] = former, _placed(place)
            module._parameters[key] = placed[id(former)][1]


@torch.no_grad()
def _placed(place: Place) -> nn.Parameter:
    """The parameter that holds this rank's part, marked as such: the same object, or over a mesh another one."""
    name, parameter, spec = place
    full, grad = parameter.data, parameter.grad
    part = spec.local(full) if place.is_cut else full
    part_of_grad = grad if grad is None or not place.is_cut else spec.local(grad)
    result = parameter
    if spec.group.mesh is not None:
        placed: Any = spec.placed(part)
        other, known = vars(parameter).get("replaced_by", ("", None))
        if known is not None:  # at another module, by another call
            if known.placements != placed.placements:
                raise ValueError(
                    f"{name} would be placed as {placed.placements}, and is the same parameter as {other}, which is "
                    f"placed as {known.placements} already: place both alike, or untie them before"
                )
            return known
        result = nn.Parameter(placed, parameter.requires_grad)
        vars(result).update(vars(parameter))
        if part_of_grad is not None:
            result.grad = spec.placed(part_of_grad)
        parameter.replaced_by = name, result  # type: ignore[attr-defined]
    elif place.is_cut:
        parameter.cut_as = name, full.shape  # type: ignore[attr-defined]
        parameter.data = part
        if grad is not None and part_of_grad is not None:
            grad.data = part_of_grad
    mark_sharded(result, spec.dim, spec.stride, spec.group)
    if place.is_cut and spec.group.size > 1:
        note_source(result, full)
    return result


def _refuse_former(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises: RuntimeError: the optimizer has a parameter in whose place is a DTensor, or state for a whole one."""
    if torch.compiler.is_compiling():
        return
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    for parameter in parameters:
        if (replaced := vars(parameter).get("replaced_by")) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} has the former {replaced[0]} of shape {tuple(parameter.shape)}, in whose "
                "place the model has a DTensor since it was converted over a DeviceMesh: this step would train "
                "nothing. Make the optimizer after that, of model.parameters(), or convert the model over a "
                "ProcessGroup (mesh.get_group()), where parameters stay the same objects"
            )
    cut = {parameter: vars(parameter)["cut_as"] for parameter in parameters if "cut_as" in vars(parameter)}
    if not cut:
        return
    part_in_all = sum(parameter.numel() for parameter in parameters)
    whole_in_all = part_in_all + sum(shape.numel() - parameter.numel() for parameter, (_, shape) in cut.items())
    for parameter in parameters:
        name, shape = cut.get(parameter, (next(iter(cut.values()))[0], parameter.shape))
        former = _shapes_of_state(shape, whole_in_all) - _shapes_of_state(parameter.shape, part_in_all)
        state = optimizer.state.get(parameter, {}).items()
        if whole := [str(key) for key, value in state if isinstance(value, Tensor) and value.shape in former]:
            raise RuntimeError(
                f"{type(optimizer).__name__} has state for the whole parameter {name} ({', '.join(whole)}), of which "
                "this rank has a part since the model was converted: convert it before the optimizer's first step, or "
                "make another one afterwards"
            )
    for parameter in cut:
        del parameter.cut_as  # state of later steps may be of any shape


def _shapes_of_state(shape: torch.Size, in_all: int) -> set[tuple[int, ...]]:
    """Of a parameter's element, of its rows or columns (Adafactor), and of all elements of all parameters (LBFGS)."""
    rows, columns = shape[:-1], (*shape[:-2], *shape[-1:])
    return {tuple(shape), tuple(rows), (*rows, 1), columns, (*shape[:-2], 1, *shape[-1:]), (in_all,)}


register_optimizer_step_pre_hook(_refuse_former)


# --- undoing ----------------------------------------------------------------------------------------------------------


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Around what changes `model`: if it raises, classes, attributes, tensors and configs are as before."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if hasattr(c := getattr(m, "config", None), "__dict__")}
    objects = [(thing, type(thing), _contents(thing)) for thing in (*modules, *configs.values())]
    plain = [p for p in model.parameters() if not is_dtensor(p)]  # of others none changes
    tensors = [(p, p.data, vars(p).copy(), p.grad, None if p.grad is None else p.grad.data) for p in plain]
    try:
        yield
    except BaseException:
        for thing, kind, contents in objects:
            object.__setattr__(thing, "__class__", kind)
            for container, former in contents:
                container.clear()
                container.update(former)
        for parameter, data, attributes, grad, values in tensors:
            parameter.grad = None
            parameter.data = data
            if grad is not None and values is not None:
                grad.data = values
                parameter.grad = grad
            vars(parameter).clear()
            vars(parameter).update(attributes)
        raise


def _contents(thing: Any) -> list[tuple[Any, Any]]:
    """The object's attributes and those of its attributes that are dicts or sets, each with a copy."""
    own = vars(thing)
    return [(one, one.copy()) for one in (own, *own.values()) if type(one) in (dict, OrderedDict, set)]


@contextmanager
def all_or_nothing(model: nn.Module, group: Group) -> Iterator[None]:
    """`undone_on_error` on every rank if it raises on any of them. A collective.

    Raises:
        RuntimeError: on every rank, if not all have raised.
    """
    with undone_on_error(model):
        error = None
        try:
            yield
        except Exception as raised:
            if group.size == 1:
                raise
            error = raised
        if group.size > 1:
            device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
            facts = {"the change of": type(model).__name__}
            compare_call(torch.zeros(1, dtype=torch.int64, device=device), facts, group, "tp_group", error)
