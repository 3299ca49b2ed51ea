"""The calls of torch.distributed that move bytes, whose errors name the rank that is gone (liveness.py).

`group` is a collectives.Group, or anything with its process_group, rank and size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from .liveness import Ranks, explain

T = TypeVar("T")


def _explained(error: RuntimeError, operand: Tensor, group: Ranks) -> Exception:
    return explain(error, group, f"moving {tuple(operand.shape)} {operand.dtype} between ranks")


def start_all_gather(out: Tensor, local: Tensor, group: Ranks) -> dist.Work | None:
    try:
        with warnings.catch_warnings():  # torch 2.13 renames the function; 2.11 has only this name
            warnings.simplefilter("ignore", FutureWarning)
            return dist.all_gather_into_tensor(out, local, group=group.process_group, async_op=True)
    except RuntimeError as error:
        raise _explained(error, local, group) from error


def start_all_to_all(
    out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], group: Ranks
) -> dist.Work | None:
    try:
        return dist.all_to_all_single(out, x, list(received), list(sent), group=group.process_group, async_op=True)
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
