"""A gather with which each rank begins a call, so that ranks whose calls differ all get an error.

agreement.py compares a call when it is new, because comparing costs a gather. Where a call has to gather a few numbers
at its start anyway, as experts over data-parallel ranks do, what the ranks compare travels with them, at every call and
on every backend. All calls of a group that begin so, of whatever kind, meet in the same gather: a rank that leaves out
a layer meets the others with its next call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ..comm.collectives import Group, gather_major
from ..comm.wire import gather_objects
from .agreement import compare_environments, group_device
from .differences import differences, format_values, mark

_mark = lru_cache(maxsize=1024)(mark)


def gather_if_same_call(
    numbers: Tensor, facts: Mapping[str, Hashable], group: Group, name: str, error: Exception | None = None
) -> list[list[int]]:
    """Every rank's `numbers`, 1-D and integers, of one length in all calls of the group. A collective.

    Args:
        facts: (name -> value) what must be the same on every rank; begins with the call.
        name: that of the argument which gives the group, for errors.
        error: what this rank has found wrong in its call.

    Raises:
        RuntimeError: on every rank: the ranks' facts differ; or another rank has found an error.
        Exception: `error`, on this rank.
    """
    compare_environments(group, numbers.device)
    device = group_device(group, numbers.device)
    head = torch.tensor([_mark(tuple(facts.items())), int(error is not None)], dtype=torch.int64)
    rows = gather_major(torch.cat([head.to(device), numbers.to(device, torch.int64)]), group).tolist()
    if all(row[:2] == [rows[0][0], 0] for row in rows):
        return [row[2:] for row in rows]
    said = None if error is None else f"{type(error).__name__}: {error}".replace(f" on rank {group.rank}", " here")
    everyone = gather_objects((said, {key: repr(value) for key, value in facts.items()}), group)
    if error is not None:
        raise error
    wrong: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            wrong.setdefault(text, []).append(rank)
    if wrong:
        raise RuntimeError(
            f"of the {group.size} ranks of {name} some have an error in this call: {format_values(wrong)}"
        )
    found = differences([theirs for _, theirs in everyone])
    if "the call" in found:  # the others' facts are those of another call
        found = {"the call": found["the call"]}
    parts = " | ".join(f"{key} is {format_values(values)}" for key, values in found.items())
    raise RuntimeError(
        f"the {group.size} ranks of {name} disagree: {parts}. They must make the same calls in the same order, in each "
        "micro-batch of a step"
    )
