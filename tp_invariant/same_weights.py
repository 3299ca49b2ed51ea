"""Whether all ranks hold the same full model, before each keeps its own part of it: different weights never show again.

Each parameter is hashed on its device (bits.leaf_hashes: integers, so exact in any order), and eight bytes a parameter
travel, in one collective. The cost is one pass over the weights: milliseconds for a gigabyte on a GPU, a second or two
on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .agreement import check_agreement, group_device
from .bits import digest, leaf_hashes
from .collectives import Group, gather_major

_SHOWN = 5


def _hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the tensor's bytes, never 0: int64, 0-dim, on its device. 0 for a tensor without values."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    rows = leaf_hashes(tensor if tensor.dim() else tensor.view(1), 0)
    return leaf_hashes(rows.unsqueeze(0), 0)[0].bitwise_or_(1)


def check_same_model(model: nn.Module, group: Group, facts: Mapping[str, Any]) -> None:
    """Compares the ranks' models, parameter by parameter, and `facts` about what is to be done with them. A collective.

    Parameters on the meta device are left out on ranks that have them there.

    Raises:
        RuntimeError: the same on every rank; names the first parameters that differ, and which ranks hold which.
    """
    named = dict(model.named_parameters())
    if group.process_group is None or group.size == 1 or not named:
        return
    place = group_device(group, next((p.device for p in named.values() if not p.is_meta), torch.device("cpu")))
    what = {name: (str(p.dtype), tuple(p.shape)) for name, p in named.items()}
    alike = {"the model": f"{type(model).__name__}, {len(named)} parameters, {digest(what)[:12]}", **facts}
    check_agreement(alike, group, place, set())
    own = torch.stack([_hash(p.detach()).to(place) for p in named.values()])
    everyone = gather_major(own, group).t().tolist()
    problems = []
    for name, hashes in zip(named, everyone, strict=True):
        ranks_with: dict[int, list[int]] = {}
        for rank, value in enumerate(hashes):
            if value:
                ranks_with.setdefault(value, []).append(rank)
        if len(ranks_with) > 1:
            alike_on = (f"rank {', '.join(map(str, ranks))}" for ranks in ranks_with.values())
            problems.append(f"  {name}: one value on {', another on '.join(alike_on)}")
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise RuntimeError(
            f"the {group.size} ranks of tp_group hold different weights in {len(problems)} of {len(named)} parameters; "
            "nothing was changed. Load the same checkpoint on every rank, or seed all ranks alike before the model is "
            "made:\n" + "\n".join(problems[:_SHOWN]) + more
        )
