"""Weights whose memory torch's fully_shard (FSDP2) frees and fills again, at another address, and at no other version.

A tensor does not say so. fully_shard keeps the parameters that forward and backward compute with, and this looks there.
While a model has these, as the root has them after a forward alone, its gradients and the optimizer's are of others.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .dtensors import is_dtensor

# fully_shard's records of parameters, by the storage that each is gathered into, as of the last search. Never the
# tensors themselves: torch moves no parameter that has a weak reference. A storage that is gone may leave its address
# to another, so what is read is checked.
_records: dict[int, weakref.ref[Any]] = {}


def resharded_whole(weight: Tensor) -> Tensor | None:
    """fully_shard's own tensor over the memory of a weight that is used now; None where the memory is not its.

    The weight may be an alias of that tensor which lives for one call alone, as inside a compiled block.

    The same on every rank: while a forward or a backward uses a weight of fully_shard's, its module is alive, since
    fully_shard's hooks hold it. What other modules a process has or had plays no part.
    """
    global _records
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None:
        return None
    memory = weight.untyped_storage()._cdata
    whole = _of_memory(_records, memory)
    if whole is None:
        # another thread's search may be older than this one, so what is read is this one's
        _records = records = {
            whole.untyped_storage()._cdata: weakref.ref(record) for record, whole in _wholes(fsdp.FSDPState)
        }
        whole = _of_memory(records, memory)
    return whole


def sharded_parameters(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """By the id of each that fully_shard has gathered for now: the parameter that is this rank's part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    asked = {id(parameter) for parameter in parameters}
    if fsdp is None or not asked:
        return {}
    found = ((getattr(each, "_unsharded_param", None), each.sharded_param) for each in _of_fsdp(fsdp.FSDPState))
    return {id(whole): part for whole, part in found if id(whole) in asked}


def _of_memory(records: dict[int, weakref.ref[Any]], memory: int) -> Tensor | None:
    reference = records.get(memory)
    record = None if reference is None else reference()
    whole = None if record is None else _whole(record)
    return whole if whole is not None and whole.untyped_storage()._cdata == memory else None


def _wholes(kind: type) -> Iterator[tuple[Any, Tensor]]:
    for record in _of_fsdp(kind):
        if type(whole := _whole(record)) in (Tensor, nn.Parameter):
            yield record, whole


def _of_fsdp(kind: type) -> Iterator[Any]:
    """What fully_shard knows of each parameter of this process."""
    from torch.distributed._composable_state import _module_state_mapping

    for state in {reference() for reference in list(_module_state_mapping.values())}:
        yield from _parameters(state) if isinstance(state, kind) else ()


def _parameters(state: Any) -> list[Any]:
    # one group, or in later versions of torch several
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _whole(parameter: Any) -> Any:
    """This rank's tensor that is gathered over the data parallel ranks; None before the first forward."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole._local_tensor if is_dtensor(whole) else whole
