"""Checks that all ranks hold the same full model before it is sharded.

After sharding, differing weights can no longer be detected. Each parameter and buffer (running statistics, a rotary
embedding's frequencies, also buffers that are not in checkpoints) is hashed on its device (bits.slice_hashes: integers,
so exact in any order), and one collective gathers eight bytes of each. The cost is one pass over the weights:
milliseconds for a gigabyte on a GPU, a second or two on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.bits import tensor_hash
from .agreement import compare_environments
from .compare import compare
from .differences import format_unnamed, ranks_by_value

_SHOWN = 5


def check_same_model(
    model: nn.Module,
    group: Group,
    facts: Mapping[str, Any],
    only: Mapping[str, Tensor] | None = None,
    error: Exception | None = None,
    name: str = "tp_group",
) -> None:
    """Compares the ranks' models, tensor by tensor, and `facts`, the arguments of the calling function. A collective.

    A tensor on the meta device is not compared on the ranks that have it there. only: the parameters that are compared,
    and their gradients where they have some; None for all of them, and the buffers. error: of the arguments, which
    `facts` state: it is raised if the ranks have the same facts, whatever their weights. name: of the argument that
    gives the group.

    Raises:
        Exception: `error`.
        RuntimeError: the same on every rank; names the first parameters and buffers that differ, and which ranks hold
            which.
    """
    kinds: dict[str, Mapping[str, Tensor]] = {
        "parameters": dict(model.named_parameters()) if only is None else only,
        "buffers": dict(model.named_buffers()) if only is None else {},
    }
    grads = ((f"{name}.grad", p.grad) for name, p in kinds["parameters"].items())
    kinds["gradients"] = {name: grad for name, grad in grads if grad is not None}
    named = {name: t for tensors in kinds.values() for name, t in tensors.items()}
    if group.process_group is None or group.size == 1 or not named:
        return
    device = next((t.device for t in named.values() if not t.is_meta), torch.device("cpu"))
    counts = ", ".join(f"{len(tensors)} {kind}" for kind, tensors in kinds.items())
    shapes = {f"the dtype and shape of {name}": (str(t.dtype), tuple(t.shape)) for name, t in named.items()}
    compare_environments(group, device, name)
    hashes = torch.stack([tensor_hash(t.detach()).cpu() for t in named.values()])
    facts = {"the model": f"{type(model).__name__}, {counts}", **shapes, **facts}
    everyone = zip(*compare(facts, group, device, hashes, name=name), strict=True)
    if error is not None:
        raise error
    problems = {}
    for tensor, column in zip(named, everyone, strict=True):
        values = ranks_by_value((rank, value) for rank, value in enumerate(column) if value)
        if len(values) > 1:
            problems[tensor] = f"  {tensor}: {format_unnamed(values)}"
    if problems:
        found = {kind: len(tensors.keys() & problems.keys()) for kind, tensors in kinds.items()}
        where = " and ".join(f"{count} of {len(kinds[kind])} {kind}" for kind, count in found.items() if count)
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise RuntimeError(
            f"the {group.size} ranks of {name} hold different weights in {where}; nothing was changed. Load the same "
            "checkpoint on every rank, or seed all ranks alike before the model is made:\n"
            + "\n".join(list(problems.values())[:_SHOWN])
            + more
        )
