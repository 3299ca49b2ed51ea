"""Full optimizer state: as the unsharded model's optimizer would have it, by parameter name, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .full_state import WHOLE, Entry, gather_entries, model_group, together
from .parameters import ShardSpec, named_shard_specs


def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """{"state": {parameter name: {key: full tensor or value}}, "param_groups": [..]}, as without sharding.

    State tensors of the parameter's shape are sharded as it is, scalars such as `step` are whole. param_groups hold
    names in place of parameters. Options as for `full_state_dict`. A collective.

    Raises:
        ValueError: a state tensor of another shape (Adafactor), or an optimizer of another model.
    """
    group = model_group(model)
    groups, state = together(
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
    return {"state": full, "param_groups": groups}


def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Takes this rank's part of what `full_optimizer_state_dict` gave, at any degree. Replaces all state there is.

    Raises:
        ValueError: on every rank: other parameters in the groups, or shapes that are not the parameters'.
    """
    specs = {name: (parameter, spec) for name, parameter, spec in named_shard_specs(model)}

    def local_state() -> dict[str, dict[str, Any]]:
        check_groups(optimizer, optimizer_groups(model, optimizer), state["param_groups"], "optimizer state")
        result: dict[str, dict[str, Any]] = {}
        if unknown := sorted(state["state"].keys() - specs.keys()):
            raise ValueError(f"the optimizer state speaks of parameters that the model lacks: {', '.join(unknown)}")
        for name, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    parameter, spec = specs[name]
                    value = state_target(name, key, value.shape, value.dtype, parameter, spec)
                result.setdefault(name, {})[key] = value
        return result

    targets = together(model_group(model), "load_full_optimizer_state_dict", local_state)
    for name, values in targets.items():
        for key, target in values.items():
            if isinstance(target, Entry):
                target.tensor.copy_(target.spec.local(state["state"][name][key]))
    install_optimizer_state(model, optimizer, state["param_groups"], targets)


def state_target(
    name: str, key: str, shape: torch.Size, dtype: torch.dtype, parameter: Tensor, spec: ShardSpec
) -> Entry:
    """A new tensor to load one full state tensor into: sharded like its parameter, or a scalar on the CPU."""
    if shape == Entry(parameter, spec).full_shape:
        return Entry(torch.zeros_like(parameter, dtype=dtype, requires_grad=False), spec)
    if shape:
        raise ValueError(
            f"the optimizer's state {key!r} of {name} has shape {tuple(shape)} where the parameter has "
            f"{tuple(Entry(parameter, spec).full_shape)}"
        )
    return Entry(torch.zeros(shape, dtype=dtype), WHOLE)


def install_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    groups: Iterable[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Puts loaded groups and this rank's state tensors in place, dtypes as they are.

    Optimizer.load_state_dict would cast floating-point state to the parameter's dtype, and lose bits.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for parameter in group["params"]:
            if names[id(parameter)] not in state:
                continue
            values = {k: v.tensor if isinstance(v, Entry) else v for k, v in state[names[id(parameter)]].items()}
            if group.get("capturable") or group.get("fused"):  # torch wants `step` on the device then
                values = {k: v.to(parameter.device) if isinstance(v, Tensor) else v for k, v in values.items()}
            optimizer.state[parameter] = values


# --- what there is to save or load ----------------------------------------------------------------------------------


def optimizer_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's param_groups, with parameters' names in place of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        foreign = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if foreign:
            raise ValueError(
                f"param_groups[{index}] holds {len(foreign)} tensors that are no parameters of the model, the first "
                f"of shape {foreign[0]}: pass the model that the optimizer was made for"
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    return groups


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: an Entry for each tensor, other values as they are.

    Raises:
        ValueError: a state tensor that has neither its parameter's shape nor a single element; names it.
    """
    specs = {id(parameter): spec for _, parameter, spec in named_shard_specs(model)}
    result: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                value = Entry(value, specs[id(parameter)] if value.shape == parameter.shape else WHOLE)
                if value.spec is WHOLE and value.tensor.dim() and value.tensor.shape != parameter.shape:
                    raise ValueError(
                        f"the optimizer's state {key!r} of {name} has shape {tuple(value.tensor.shape)}: only tensors "
                        f"of the parameter's own shape {tuple(parameter.shape)} and scalars can be resharded, so "
                        f"{type(optimizer).__name__} is not supported; use AdamW, say"
                    )
            result.setdefault(name, {})[key] = value
    return result


def check_groups(optimizer: Optimizer, groups: list[dict[str, Any]], saved: list[dict[str, Any]], source: str) -> None:
    """Raises ValueError where the saved param_groups hold other parameters than the optimizer's."""
    problems = [f"{len(saved)} param_groups against {len(groups)}"] if len(saved) != len(groups) else []
    for index, (mine, theirs) in enumerate(zip(groups, saved, strict=False)):
        if only := sorted(set(mine["params"]) ^ set(theirs["params"])):
            problems.append(f"only one of the two has in param_groups[{index}]: {', '.join(only)}")
    if problems:
        raise ValueError(f"the {source} does not fit this {type(optimizer).__name__}:\n" + "\n".join(problems))
