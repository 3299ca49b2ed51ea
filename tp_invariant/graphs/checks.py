"""What graph_layers refuses, and how ranks agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.collectives import Group, ranks_of
from ..comm.wire import gather_objects
from ..consistency.differences import format_ranks, gather_differences
from ..core.dtensors import is_dtensor, local_of
from ..core.fsdp import resharded_whole
from ..layers.experts import Experts
from .graphed_call import GraphedForward


def problem_with(layer: nn.Module, name: str) -> str:
    """Why a layer cannot be captured, "" if it can."""
    if not isinstance(layer, nn.Module):
        return f"{name} is no nn.Module"
    if isinstance(layer.__dict__.get("forward"), GraphedForward):
        return f"{name} is captured already: call remove() of what captured it first"
    if not layer.training:
        return f"{name} is in eval(): call train() first"
    for key, held in (*layer.named_parameters(), *layer.named_buffers()):
        if problem := _placement_problem(held, layer):
            return f"{key} of {name} {problem}"
        if not on_gpu(held):
            return f"{key} of {name} is on {held.device}: CUDA graphs need all of it on the current GPU"
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return f"{name} has no parameter to train: torch.cuda.graph captures a forward"
    for key, module in layer.named_modules():
        if isinstance(module, Experts) and module.group.size > 1:
            return (
                f"{key or name} in {name} has experts over {module.group.size} ranks: their all-to-alls have sizes "
                "that follow from the routing, and a graph cannot. Capture the attention alone"
            )
        if getattr(module, "fuse_wgrad_accumulation", False):
            return f"{key or name} has fuse_wgrad_accumulation=True: a graph cannot see when main_grad changes"
    return ""


def _placement_problem(held: Tensor, layer: nn.Module) -> str:
    """Why a graph cannot hold to this tensor's memory, or gather what is not there, "" if it can."""
    if resharded_whole(local_of(held)) is not None:
        return "is fully_shard's, which is gathered anew for each call"
    if not is_dtensor(held):
        return ""
    meshes = [getattr(getattr(module, "group", None), "mesh", None) for module in layer.modules()]
    is_whole = all(placement.is_replicate() for placement in held.placements)
    if held.device_mesh.ndim > 1 or not (is_whole or held.device_mesh in meshes):
        return (
            f"is a DTensor placed as {held.placements} on {held.device_mesh}, which is not the tp_group of a layer in "
            "it: fully_shard's are gathered anew for each call"
        )
    return ""


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.get_device() == torch.cuda.current_device()


def groups_of(layers: Sequence[Any]) -> list[Group]:
    """The tensor-parallel groups of the modules in there, each once."""
    modules = (module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules())
    groups = (getattr(module, "group", None) for module in modules)
    return list(dict.fromkeys(group for group in groups if isinstance(group, Group) and group.size > 1))


def raise_on_all_ranks(problem: str, groups: Sequence[Group], what: str) -> None:
    """Raises on every rank of the groups if one rank has a problem."""
    problems = {f"rank {dist.get_rank()}": problem} if groups else {"": problem}
    for group in groups:
        everyone = gather_objects((dist.get_rank(), problem), group)
        problems |= {f"rank {rank}": text for rank, text in everyone}
    problems = {who: text for who, text in problems.items() if text}
    if problems:
        raise ValueError(f"{what}: " + "; ".join(f"{who}: {text}" if who else text for who, text in problems.items()))


def check_same(facts: dict[str, Any], groups: Sequence[Group]) -> None:
    """Raises on every rank of a group if its ranks differ in one of the facts."""
    for group in groups:
        numbers = ranks_of(group)
        for name, values in gather_differences({name: str(value) for name, value in facts.items()}, group).items():
            by_value = (f"{format_ranks(numbers[rank] for rank in ranks)}: {value}" for value, ranks in values.items())
            raise ValueError(f"graph_layers: ranks differ in {name}: {'; '.join(by_value)}")
