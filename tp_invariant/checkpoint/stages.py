"""The state of a model whose parts are the stages of a pipeline, from what each stage has.

The names of a stage's parameters are those of the whole model. A weight that the last stage holds as a copy of the
first one's (data_parallel/tied_stages.py) is in the state under both names, and its optimizer's state under the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.collectives import Group
from ..comm.wire import gather_objects
from ..layers.other_stage import names_of_other_stages, stages_of


def copies_in(model: nn.Module) -> dict[str, str]:
    """{name in this stage: name in the first stage} of the weights that this stage has as copies."""
    return {name: p.copy_of for name, p in model.named_parameters() if hasattr(p, "copy_of")}


def state_for_stage(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a whole model's state what this stage takes: without what cut_into_stages has left to others."""
    others = names_of_other_stages(model)
    taken = {name: value for name, value in state.items() if not name.startswith(others)}
    for name, first in copies_in(model).items():
        if first in state:
            taken.setdefault(name, state[first])
    return taken


def gather_stages(
    model: nn.Module, own: Mapping[str, Any], stages: Group, rank0_only: bool, cpu_offload: bool
) -> dict[str, Any]:
    """The full tensors of all stages, in their order, from those `own` of each rank's `model`. A collective.

    With rank0_only a rank that has nothing of its own is one of several that hold its stage, and gets nothing.

    Raises:
        ValueError: on every rank: some stages are missing, as where one of several on a rank is given.
    """
    placed = [(part, *getattr(part, "pipeline_stage", (stages.rank, stages.size))) for part in stages_of(model)]
    count = placed[0][2]
    held = {number for numbers in gather_objects([n for _, n, _ in placed], stages) for number in numbers}
    if len(held) < count:
        raise ValueError(
            f"rank {stages.rank} of pp_group: the ranks give the stages {sorted(held)} of {count}: pass the model that "
            "parallelize returned, which has all stages of a rank, and not one of stages_of(model)"
        )
    parts = [(number, part.state_dict()) for part, number, _ in placed]
    stage_of = {name: number for number, state in reversed(parts) for name in state}
    whats = {name: (x.shape, x.dtype) if isinstance(x, Tensor) else x for name, x in own.items()}
    described = gather_objects({name: (stage_of[name], what) for name, what in whats.items()}, stages)
    device = next((x.device for x in own.values() if isinstance(x, Tensor)), torch.device("cpu"))
    full: dict[str, Any] = {}
    for rank, theirs in enumerate(described):
        for name, (_, what) in theirs.items():
            value: Any = own.get(name, what)
            if isinstance(what, tuple) and isinstance(what[1], torch.dtype):
                mine = rank == stages.rank
                value = own[name].contiguous() if mine else torch.empty(what[0], dtype=what[1], device=device)
                dist.broadcast(value, group=stages.process_group, group_src=rank)
            if name not in full and not (rank0_only and stages.rank):
                full[name] = value.cpu() if cpu_offload and isinstance(value, Tensor) else value
    numbers = {name: number for theirs in reversed(described) for name, (number, _) in theirs.items()}
    return dict(sorted(full.items(), key=lambda item: numbers[item[0]]))


def merge_optimizers(of_stages: list[Any]) -> Any:
    """One optimizer's values (class, groups, state) from those of the stages, in their order.

    Raises:
        ValueError: the stages' optimizers differ in their class, or in the options of their groups.
    """
    first, *others = of_stages
    if first is None or not others:
        return first

    def kind(values: Any) -> Any:
        return values and (values["class"], [{**group, "params": None} for group in values["groups"]])

    for stage, values in enumerate(others, 1):
        if kind(values) != kind(first):
            raise ValueError(f"the optimizers of the stages 0 and {stage} differ: {kind(first)} and {kind(values)}")
    groups = [
        {**group, "params": [name for values in of_stages for name in values["groups"][index]["params"]]}
        for index, group in enumerate(first["groups"])
    ]
    return first | {"groups": groups, "state": {k: v for values in of_stages for k, v in values["state"].items()}}


def without_copies(model: nn.Module, values: Any) -> Any:
    """An optimizer's values without those of copies, which the first stage has."""
    copies = copies_in(model)
    groups = [{**g, "params": [name for name in g["params"] if name not in copies]} for g in values["groups"]]
    return values | {"groups": groups, "state": {k: v for k, v in values["state"].items() if k not in copies}}


def optimizer_of_stage(model: nn.Module, values: Any) -> Any:
    """Of the values of the whole model's optimizer those of this stage's parameters, under the names that it has."""
    copies = copies_in(model)
    own = {copies.get(name, name): name for name, _ in model.named_parameters()}
    groups = [{**g, "params": [own[name] for name in g["params"] if name in own]} for g in values["groups"]]
    return values | {"groups": groups, "state": {own[k]: v for k, v in values["state"].items() if k in own}}
