"""torch.distributed.checkpoint is refused plain shards that it would write as whole tensors.

What it finds under one name on several ranks, as plain tensors, it takes for copies of one tensor, and writes one of
them. Of shards that is a part of the parameter; the rest is lost, and nobody notices before the checkpoint is loaded,
when the run may be over. So the tensors in state dicts of sharded layers, and of optimizers that have stepped their
parameters, are remembered, and two functions of torch's look them up: what `save` and `async_save` do with the state
dict first, and what the functions of `torch.distributed.checkpoint.state_dict` do with theirs last, which give such a
part as the full tensor. Nothing that torch offers is called there, so `_watch` replaces these two.

Ranks that save apart are not refused: a process group of ranks that hold the same parts (data-parallel ranks), or
`no_dist=True`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.collectives import Group, ranks_of

_INSTEAD = (
    "Use tp_invariant.checkpoint.save or tp_invariant.full_state_dict, or make the layers with tp_group as a "
    "DeviceMesh, whose DTensors say what they are"
)

_groups = WeakTensorKeyDictionary()  # of tensors that were given away in a state dict: what they are sharded over
_watching = False


def remember(tensor: Tensor, group: Group) -> None:
    """Notes a tensor of a state dict that is this rank's part of one that is sharded over the group."""
    _watch()
    _groups[tensor] = group


def _watch() -> None:
    global _watching
    if _watching:
        return
    from torch.distributed.checkpoint import state_dict, state_dict_saver

    saver: Any = state_dict_saver
    states: Any = state_dict
    called, last = saver._stateful_to_state_dict, states._maybe_full_or_cpu_state_dict

    @functools.wraps(called)
    def to_state_dict(given: Any) -> Any:
        result = called(given)
        caller = sys._getframe(1).f_locals  # of save or async_save
        own_planner = caller.get("planner")
        # a planner of the user's own may know what is a part
        knows = own_planner is not None and not type(own_planner).__module__.startswith("torch.")
        if dist.is_initialized() and not caller.get("no_dist") and not knows:
            _refuse(result, caller.get("process_group"))
        return result

    @functools.wraps(last)
    def full_or_cpu(given: dict[str, Any], info: Any) -> Any:
        if info.full_state_dict:
            for name, tensor in _tensors(given):
                if (group := _groups.get(tensor)) is not None:
                    raise ValueError(
                        f"full_state_dict=True, and {name} of shape {tuple(tensor.shape)} on rank {group.rank} is its "
                        f"part of a parameter that is sharded over the ranks {list(ranks_of(group))}: torch would give "
                        f"it as the full tensor. {_INSTEAD}"
                    )
        result = last(given, info)
        copies = dict(_tensors(result))
        for name, tensor in _tensors(given):
            if tensor in _groups and name in copies:  # copied to the CPU
                _groups[copies[name]] = _groups[tensor]
        return result

    saver._stateful_to_state_dict = to_state_dict
    states._maybe_full_or_cpu_state_dict = full_or_cpu
    _watching = True


def _refuse(given: Any, process_group: dist.ProcessGroup | None) -> None:
    """Raises: ValueError: ranks that save together hold different parts of a tensor under one name."""
    saving = {*dist.get_process_group_ranks(process_group or dist.group.WORLD)}
    for name, tensor in _tensors(given):
        group = _groups.get(tensor)
        if group is not None and len(saving.intersection(ranks_of(group))) > 1:
            raise ValueError(
                f"torch.distributed.checkpoint saves {name} of shape {tuple(tensor.shape)}, which on rank {group.rank} "
                f"is its part of a parameter that is sharded over the ranks {list(ranks_of(group))}: it would write "
                f"one rank's part as the whole. {_INSTEAD}. To write each rank's parts, save with a process_group of "
                "ranks that hold the same parts, or with no_dist=True, and another checkpoint_id for each"
            )


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(the keys that lead to it, tensor) of each tensor in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in items:
            yield from _tensors(child, f"{name}.{key}" if name else str(key))
