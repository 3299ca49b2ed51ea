"""The calls of torch.distributed that move bytes, whose errors name the rank that is gone (liveness.py).

`group` is a collectives.Group, or anything with its process_group, rank and size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from .liveness import Ranks, explain

T = TypeVar("T")

# The process group's own methods: what torch.distributed's functions put around them (a logger, checks for complex
# tensors and coalescing) takes the host longer than the call. torch 2.13 renames them.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
_GATHER_OPTIONS, _EXCHANGE_OPTIONS = AllgatherOptions(), AllToAllOptions()
_GATHER_OPTIONS.asyncOp = _EXCHANGE_OPTIONS.asyncOp = True


def _explained(error: RuntimeError, operand: Tensor, group: Ranks) -> Exception:
    return explain(error, group, f"moving {tuple(operand.shape)} {operand.dtype} between ranks")


def start_all_gather(out: Tensor, local: Tensor, group: Ranks) -> dist.Work | None:
    try:
        return getattr(group.process_group, _ALL_GATHER)(out, local, _GATHER_OPTIONS)
    except RuntimeError as error:
        raise _explained(error, local, group) from error


def start_all_to_all(
    out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], group: Ranks
) -> dist.Work | None:
    try:
        return getattr(group.process_group, _ALL_TO_ALL)(out, x, list(received), list(sent), _EXCHANGE_OPTIONS)
    except RuntimeError as error:
        raise _explained(error, x, group) from error


def wait(work: dist.Work, operand: Tensor, group: Ranks) -> None:
    """Waits for a collective on `operand`.

    Raises:
        DeadRankError: ranks of the group have ended; names them.
        RuntimeError: the collective failed for another reason.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise _explained(error, operand, group) from error


def gather_objects(own: T, group: Ranks) -> list[T]:
    """Every rank's `own`, which is pickled, in rank order. Slow: for what is rare."""
    if group.size == 1:
        return [own]
    everyone: list[Any] = [None] * group.size
    try:
        dist.all_gather_object(everyone, own, group=group.process_group)
    except RuntimeError as error:
        raise explain(error, group, f"gathering a {type(own).__name__} from all ranks") from error
    return everyone
