"""Whether all ranks are about to make the same call. Where they are not, collectives would hang or mix up data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Group, gather_major

_MOST = 4096  # how many different calls are remembered as agreed on


def check_agreement(facts: Mapping[str, Any], group: Group, device: torch.device, agreed: set[int]) -> None:
    """Compares `facts` (name -> value) over the group, unless these very facts are in `agreed` already.

    The first call with some facts costs an all-gather of eight bytes and a wait for it; later ones nothing. It finds
    ranks that differ in their first call, or that change at the same time; not one that differs alone later on.

    Raises:
        RuntimeError: the same on every rank; names what differs and which ranks have which value.
    """
    text = repr(sorted(facts.items()))
    mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    if mark in agreed:
        return
    marks = gather_major(torch.tensor([mark], dtype=torch.int64, device=device), group).view(-1).tolist()
    if len(set(marks)) == 1:
        if len(agreed) >= _MOST:
            agreed.clear()  # on all ranks alike, as all have agreed on the same
        agreed.add(mark)
        return
    everyone: list[dict[str, str]] = [{}] * group.size
    mine = {name: repr(value) for name, value in facts.items()}
    dist.all_gather_object(everyone, mine, group=group.process_group)
    parts = []
    for name in mine:
        ranks_with: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_with.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(ranks_with) > 1:
            values = (f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_with.items())
            parts.append(f"{name} is {'; '.join(values)}")
    raise RuntimeError(
        f"the {group.size} ranks of tp_group disagree: {' | '.join(parts)}. They must make the same calls with the "
        "same settings, and under sequence_parallel the degree must divide the sequence"
    )
