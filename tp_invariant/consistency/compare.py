"""What ranks ask each other: are these facts the same on all of you?

Each rank sends a hash of its facts, which takes a gather of 32 bytes and a wait for it. Only if the hashes differ do
the ranks exchange the facts, and every rank raises the same error, which says which rank has which value. Other numbers
that a caller needs of every rank travel with the hash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.call_records import call_context
from ..comm.collectives import Group, gather_major
from ..comm.wire import gather_objects
from .differences import differences, format_values, mark

LOCAL_ERROR = "an error before the call"  # the fact of a rank that has one; ranks agree if all have any
LAYER_NUMBER = "the layer's number"
HASH_OF = "the hash of the values of"
HASH_OF_PARAMETER = "the hash of the whole parameter"
CALL_NAMES = ("the layer", "the call")
_SAME_SETTINGS = "They must make the same calls with the same settings"
_ADVICE = {  # by how the name of a fact that differs begins
    LAYER_NUMBER: "Layers are numbered in the order in which they are made for a tp_group: make the same layers on "
    "every rank, and call them in the same order",
    "the TP-invariant mode": "Set TP_INVARIANT_MODE, or call set_tp_invariant_mode, alike on every rank",
    HASH_OF: "Ranks of a tp_group must be given the same batch: a data loader divides it over data parallel ranks "
    "alone",
    HASH_OF_PARAMETER: "Seed all ranks alike before the layers are made, or load one checkpoint on every rank",
}
_LEAST_NUMBERS = 3  # so that a rank that makes another call meets the others in a gather of the same size
_SHOWN = 8  # differences in one error


def group_device(group: Group, device: torch.device) -> torch.device:
    """The device of a group's small messages, the same kind on all ranks even if their tensors' devices differ."""
    if "cpu:" in dist.get_backend_config(group.process_group):
        return torch.device("cpu")
    return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def compare(
    facts: Mapping[str, Any],
    group: Group,
    device: torch.device,
    numbers: Sequence[int] | Tensor = (),
    *,
    name: str = "tp_group",
    rule: str = "",
    describe: Callable[[], str] | None = None,
) -> list[list[int]]:
    """Every rank's `numbers`, in rank order, if all ranks have the same facts. A collective.

    Args:
        facts: (name -> value); values are compared by their repr.
        device: the device of the call's tensors.
        numbers: 64-bit integers, as many on every rank.
        name: that of the argument which gives the group, for the error.
        rule: what the ranks must do, a sentence of the error.
        describe: returns what the call is, for the error of ranks that are not comparing anything.

    Raises:
        RuntimeError: the same on every rank; names what differs and which ranks have which value.
    """
    place = group_device(group, device)
    count = len(numbers)
    own = torch.zeros(1 + max(count, _LEAST_NUMBERS), dtype=torch.int64, device=place)
    own[0] = mark(LOCAL_ERROR if LOCAL_ERROR in facts else sorted(facts.items()))
    own[1 : 1 + count] = torch.as_tensor(numbers, dtype=torch.int64, device=place)
    call_context.comparing = describe or (lambda: ", ".join(list(facts)[:_SHOWN]))
    try:
        rows = gather_major(own, group).view(group.size, -1).tolist()
    finally:
        call_context.comparing = None
    if len({row[0] for row in rows}) == 1:
        return [row[1 : 1 + count] for row in rows]
    found = differences(gather_objects({key: repr(value) for key, value in facts.items()}, group))
    if LOCAL_ERROR in found:
        found = {LOCAL_ERROR: found[LOCAL_ERROR]}
    elif "the call" in found:  # other facts are those of another call
        found = {key: found[key] for key in found if key in CALL_NAMES}
    found = {key: values for key, values in found.items() if not key.startswith((HASH_OF, HASH_OF_PARAMETER))} or found
    first = sorted(found, key=lambda key: key not in (LAYER_NUMBER, "the layer"))
    parts = [f"{key} is {format_values(found[key])}" for key in first[:_SHOWN]]
    parts += [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
    advice = [text for start, text in _ADVICE.items() if any(key.startswith(start) for key in first[:_SHOWN])]
    if name == "tp_group" and any(key.startswith("the shape of ") for key in found):
        advice.append("All ranks of tp_group must pass tensors of the same shape")
        sharded_dim = "the sequence_dim that is sharded"
        sharded = facts.get("sequence_parallel", "sequence_dim" in facts) or facts.get(sharded_dim) is not None
        if sharded or "sequence_parallel" in found or sharded_dim in found:  # the same on every rank
            advice.append("Under sequence_parallel the TP degree must divide the size of sequence_dim")
    rule = rule or _SAME_SETTINGS
    raise RuntimeError(f"the {group.size} ranks of {name} disagree: {' | '.join(parts)}. {'. '.join([rule, *advice])}")
