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

from .dtensors import local_of
from .torch_private import fsdp_records, fsdp_whole

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
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    memory = weight.untyped_storage().data_ptr()
    whole = _of_memory(_records, memory)
    if whole is None:
        # another thread's search may be older than this one, so what is read is this one's
        _records = records = {whole.untyped_storage().data_ptr(): weakref.ref(record) for record, whole in _wholes()}
        whole = _of_memory(records, memory)
    return whole


def sharded_parameters(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """By the id of each that fully_shard has gathered for now: the parameter that is this rank's part of it."""
    given = {id(parameter) for parameter in parameters}
    wholes = ((fsdp_whole(record), record.sharded_param) for record in fsdp_records()) if given else ()
    return {id(whole): part for whole, part in wholes if id(whole) in given}


def _of_memory(records: dict[int, weakref.ref[Any]], memory: int) -> Tensor | None:
    reference = records.get(memory)
    record = None if reference is None else reference()
    whole = None if record is None else local_of(fsdp_whole(record))
    return whole if whole is not None and whole.untyped_storage().data_ptr() == memory else None


def _wholes() -> Iterator[tuple[Any, Tensor]]:
    for record in fsdp_records():
        if type(whole := local_of(fsdp_whole(record))) in (Tensor, nn.Parameter):
            yield record, whole
