"""Full optimizer state, by parameter name, as the unsharded model's optimizer would have it; and loading it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.bits import leaves
from ..core.dtensors import is_dtensor, local_of
from ..layers.parameters import ShardSpec
from .full_state import WHOLE, Entry, check_whole, entry_of, gather_entries, model_group, run_on_all_ranks, tensor_specs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TENSOR = "__tensor__"  # in a checkpoint's values: {TENSOR: its name} is in the place of a tensor
_HOW = {"foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not what its state means


def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """{"class": .., "state": {parameter name: {key: full tensor or value}}, "param_groups": [..]}, as without sharding.

    State tensors of the parameter's shape are sharded like it; scalars such as `step` are whole. param_groups hold
    names instead of parameters, "class" is the optimizer's name. Options as for `full_state_dict`. A collective.

    Raises:
        ValueError: a state tensor of another shape (Adafactor), or an optimizer of another model.
        RuntimeError: as for `full_state_dict`, about the optimizer's state.
    """
    group = model_group(model)
    groups, state = run_on_all_ranks(
        group,
        "full_optimizer_state_dict",
        lambda: (optimizer_groups(model, optimizer), optimizer_entries(model, optimizer)),
    )
    flat = {(name, key): entry for name, values in state.items() for key, entry in values.items()}
    tensors = {pair: entry for pair, entry in flat.items() if isinstance(entry, Entry)}
    gathered = gather_entries(tensors, group, rank0_only, cpu_offload)
    if rank0_only and group.rank:
        return {}
    full: dict[str, dict[str, Any]] = {}
    for (name, key), value in flat.items():
        full.setdefault(name, {})[key] = gathered.get((name, key), value)
    return {"class": type(optimizer).__name__, "state": full, "param_groups": groups}


def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads this rank's part of a `full_optimizer_state_dict`, taken at any degree, and replaces all state.

    The optimizer's hyperparameters become the saved ones, also where they differ (a schedule's learning rate).

    Raises:
        ValueError: on every rank, before anything is changed: other parameters in the groups, another optimizer,
            options that give the state another meaning (such as amsgrad), or shapes that are not the parameters'.
    """

    def local_state() -> dict[str, dict[str, Any]]:
        groups = {"groups": state.get("param_groups"), "state": state.get("state"), "class": state.get("class")}
        check_optimizer(model, optimizer, groups, "optimizer state")
        parameters, specs = dict(model.named_parameters()), tensor_specs(model)
        result: dict[str, dict[str, Any]] = {}
        for name, values in state["state"].items():
            check_whole(values, f"the optimizer's state of {name}")
            for key, value in values.items():
                if isinstance(value, Tensor):
                    parameter = parameters[name]
                    value = state_target(name, key, value.shape, value.dtype, parameter, specs[id(parameter)])
                result.setdefault(name, {})[key] = value
        return result

    targets = run_on_all_ranks(model_group(model), "load_full_optimizer_state_dict", local_state)
    for name, values in targets.items():
        for key, target in values.items():
            if isinstance(target, Entry):
                target.fill(state["state"][name][key])
    install_optimizer_state(model, optimizer, state["param_groups"], targets)


def state_target(
    name: str, key: str, shape: torch.Size, dtype: torch.dtype, parameter: Tensor, spec: ShardSpec
) -> Entry:
    """A new tensor to load one full state tensor into: sharded like its parameter, or a scalar on the CPU."""
    like = entry_of(parameter, spec)
    if shape == like.full_shape:
        local = torch.zeros_like(like.tensor, dtype=dtype, requires_grad=False)
        return Entry(local, spec, None if like.placed is None else _like_parameter(local, like.placed))
    if shape:
        raise ValueError(
            f"the optimizer's state {key!r} of {name} has shape {tuple(shape)} where the parameter has "
            f"{tuple(like.full_shape)}"
        )
    return Entry(torch.zeros(shape, dtype=dtype, device="cpu"), WHOLE)


def install_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    groups: Iterable[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Installs loaded groups and this rank's state tensors, with their dtypes.

    Optimizer.load_state_dict would cast floating-point state to the parameter's dtype, and lose bits.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key != "params":
                own = group.get(key)  # a learning rate that is a tensor stays on its device
                group[key] = value.to(own.device) if isinstance(own, Tensor) and isinstance(value, Tensor) else value
        for parameter in group["params"]:
            if names[id(parameter)] not in state:
                continue
            values = {k: v.tensor if isinstance(v, Entry) else v for k, v in state[names[id(parameter)]].items()}
            if is_dtensor(parameter):
                values = {k: _like_parameter(v, parameter) for k, v in values.items()}
            if group.get("capturable") or group.get("fused"):  # torch then requires `step` on the device
                values = {k: v.to(parameter.device) if isinstance(v, Tensor) else v for k, v in values.items()}
            optimizer.state[parameter] = values


def _like_parameter(state: Any, parameter: DTensor) -> Any:
    """State of a DTensor's local shape as a DTensor; scalars (`step`) stay plain."""
    if not isinstance(state, Tensor) or not state.dim() or state.shape != local_of(parameter).shape:
        return state
    from torch.distributed.tensor import DTensor

    where = parameter.device_mesh, parameter.placements
    return DTensor.from_local(state, *where, run_check=False, shape=parameter.shape, stride=parameter.stride())


# --- what there is to save or load ----------------------------------------------------------------------------------


def optimizer_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's param_groups, with parameters' names in place of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        foreign = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if foreign:
            raise ValueError(
                f"param_groups[{index}] holds {len(foreign)} tensors that are not parameters of the model, the "
                f"first of shape {foreign[0]}: pass the model that the optimizer was made for"
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    return groups


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: an Entry for each tensor, other values as they are.

    State of parameters that are no longer in the optimizer's groups (frozen ones) is left out.

    Raises:
        ValueError: a state tensor that has neither its parameter's shape nor a single element, or tensors in a list;
            names it.
    """
    specs = tensor_specs(model)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    result: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in stepped:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (Mapping, list, tuple)) and any(isinstance(leaf, Tensor) for _, leaf in leaves(value)):
                raise ValueError(
                    f"the optimizer's state {key!r} of {name} is a {type(value).__name__} of tensors, whose sharding "
                    f"is not known, so {type(optimizer).__name__} is not supported: use for example AdamW"
                )
            if isinstance(value, Tensor):
                like = value.shape == parameter.shape
                value = entry_of(value, specs[id(parameter)]) if like else Entry(local_of(value), WHOLE)
                if not like and value.tensor.dim():
                    raise ValueError(
                        f"the optimizer's state {key!r} of {name} has shape {tuple(value.tensor.shape)}: only tensors "
                        f"of the parameter's own shape {tuple(parameter.shape)} and scalars can be resharded, so "
                        f"{type(optimizer).__name__} is not supported: use for example AdamW"
                    )
            result.setdefault(name, {})[key] = value
    return result


def check_optimizer(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], source: str) -> None:
    """Raises unless a saved state fits this optimizer.

    Args:
        saved: {"class": its name, "groups": [..], "state": {name: {key: ..}}}.

    Raises:
        ValueError: another form; an optimizer of another class; other parameters in the groups; options that differ and
            give the state another meaning: those that are on or off (amsgrad, maximize, nesterov, centered), and
            momentum if only one of the two has it. Names all differences.
    """
    theirs, state, kind = saved.get("groups"), saved.get("state"), saved.get("class")
    if not isinstance(theirs, list) or not isinstance(state, Mapping):
        raise ValueError(f"the {source} has no optimizer state: it is {reprlib.repr(dict(saved))}")
    groups, own = optimizer_groups(model, optimizer), type(optimizer).__name__
    problems = [] if kind == own else [f"it is a state of {kind}"]
    if len(theirs) != len(groups):
        problems.append(f"{len(theirs)} param_groups against {len(groups)}")
    for index, (mine, other) in enumerate(zip(groups, theirs, strict=False)):
        where = f"param_groups[{index}]"
        if only := sorted(set(mine["params"]) ^ set(other["params"])):
            problems.append(f"only one of the two has in {where}: {', '.join(only)}")
        for key in sorted(mine.keys() & other.keys() - _HOW - {"params"}):
            if not _same_meaning(key, mine[key], other[key]):
                problems.append(f"{where} has {key}={reprlib.repr(other[key])} against {key}={mine[key]!r}")
    grouped = {name for group in theirs for name in group["params"]}
    if alone := sorted(state.keys() - grouped):
        problems.append(f"it has state of parameters that are in none of its groups: {', '.join(alone)}")
    if problems:
        raise ValueError(f"the {source} does not fit this {own}:\n" + "\n".join(problems))


def _is_number(value: Any) -> bool:
    """Also a tensor, such as a learning rate that a captured step reads, and a checkpoint's mark of one."""
    return isinstance(value, (int, float, Tensor)) or (isinstance(value, Mapping) and value.keys() == {TENSOR})


def _same_meaning(key: str, mine: Any, theirs: Any) -> bool:
    """Whether a state made with one value of an option has the same meaning with the other value."""
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return mine is theirs
    if mine is None or theirs is None:
        return True
    if _is_number(mine) != _is_number(theirs):
        return False
    return key != "momentum" or bool(mine) == bool(theirs)
