"""Checks that the gradients of replicated parameters are the same on every rank that holds them.

Several mistakes give wrong gradients without an error: a plain norm in a sequence-parallel region sums over this rank's
tokens only, and dropout masks or batches that differ between ranks change a rank's results, so that the ranks drift
apart. So a 64-bit digest of each such gradient is computed on its device (from integers, so exact in any order), and
the ranks exchange the sum of the digests with a hash of the call's arguments. Only if these differ is more exchanged,
to find the first gradient that differs. On CPUs every call is compared. On GPUs, where the host would wait for the
device, calls with new arguments or gradients of new shapes are, and with TP_INVARIANT_CHECK=1 all. In a CUDA graph
nothing is compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Group, gather_major, is_capturing, ranks_of
from ..core.mode import is_call_check_enabled
from ..kernels.select import select
from .agreement import compare_environments
from .compare import compare, group_device
from .differences import format_ranks, ranks_by_value
from .environment import FLUSHES, flushes_subnormals

_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()  # calls, by a hash


def maximal_groups(groups: Sequence[Group]) -> list[Group]:
    """The groups that are not contained in another one, in an order that is the same on all ranks.

    Collectives over these groups, one after another in this order, cannot deadlock, whichever groups a rank is in: the
    order is part of one total order of all groups.
    """
    several = {group: ranks_of(group) for group in dict.fromkeys(groups) if group.size > 1}
    if len(several) == 1:
        return list(several)
    found: list[Group] = []
    for group in in_common_order(several):
        if not any(set(several[group]) <= set(several[other]) for other in found):
            found.append(group)
    return found


def in_common_order(groups: Iterable[Group]) -> list[Group]:
    """The groups in their order in one total order of all groups: the larger ones first."""
    return sorted(groups, key=lambda group: (-group.size, ranks_of(group), str(_name(group))))


def _name(group: Group) -> str:
    return str(getattr(group.process_group, "group_name", ""))


class GradientComparison(NamedTuple):
    """What is compared over a group.

    facts    the call's arguments, by name
    grads    the gradients of replicated parameters, as this rank holds them
    names    their names, for an error
    why      why they may differ, for an error
    """

    group: Group
    facts: Mapping[str, Any]
    grads: Sequence[Tensor]
    names: Sequence[str]
    why: str


def compare_gradients(
    comparisons: Sequence[GradientComparison], device: torch.device, caller: str, *, every_call: bool = False
) -> None:
    """Compares calls and the gradients of replicated parameters over each comparison's group. A collective.

    Args:
        device: of the gradients.
        caller: the name of the calling function, for errors.
        every_call: compare this call in any case, and allow ranks of a group to be in different numbers of groups.

    Raises:
        RuntimeError: the same on every rank of the group, and on every rank that shares a group with these: names what
            differs, of the gradients the first.
    """
    if not is_capturing():
        problems = {one.group: _difference(one, device, caller, every_call) for one in comparisons}
        _raise_together(problems, device, every_call)


def _difference(one: GradientComparison, device: torch.device, caller: str, every_call: bool) -> str | None:
    group = one.group
    assert group.process_group is not None
    compare_environments(group, device)
    facts = {**one.facts, FLUSHES: device.type == "cpu" and flushes_subnormals()}
    place, compared = group_device(group, device), _compared.setdefault(group.process_group, set())
    call = hash((caller, *facts.items()))
    if place.type == "cuda" and call in compared and not every_call and not is_call_check_enabled():
        return None
    digests = _digests(one.grads, place)
    sums = compare(facts, group, device, digests.sum().view(1))
    if len({total for (total,) in sums}) == 1:
        compared.add(call)
        return None
    columns = gather_major(digests, group).t().tolist()
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    holders = ranks_by_value(enumerate(columns[differing[0]])).values()
    alike = "; ".join(f"one on {format_ranks(ranks)}" for ranks in holders)
    more = f" and {len(differing) - 1} more gradients of whole parameters differ" if len(differing) > 1 else " differs"
    ranks = f"the {group.size} ranks of the group {ranks_of(group)}"
    return f"{caller}: {one.names[differing[0]]}{more} between {ranks}: {alike}. {one.why}"


def _raise_together(problems: Mapping[Group, str | None], device: torch.device, always: bool) -> None:
    """Raises the errors; if ranks are in several groups, on all ranks that share a group, directly or through one or
    two others. How often a group gathers does not depend on how many groups a rank is in.

    always: gather in a single group, too; without it all ranks of a group must be in several groups, or all in one.
    """
    texts = [text for text in problems.values() if text is not None]
    if always or len(problems) > 1:
        flag = int(bool(texts))
        for _ in range(2):
            for group in problems:
                own = torch.tensor([flag], dtype=torch.int64, device=group_device(group, device))
                flag = int(gather_major(own, group).any())
        if flag and not texts:
            texts = [
                "ranks of a group that shares ranks with this rank's groups have found a difference: see their log"
            ]
    if texts:
        raise RuntimeError(texts[0])


def _digests(grads: Sequence[Tensor], place: torch.device) -> Tensor:
    """int64 [gradients], on the device where the group's messages travel. On the meta device there are no values."""
    digests = torch.zeros(len(grads), dtype=torch.int64, device=place)
    for device in {grad.device for grad in grads if not grad.is_meta}:
        members = [i for i, grad in enumerate(grads) if grad.device == device]
        kernels = select("gradient norm", "cuda" if device.type == "cuda" else "cpu")
        digests[members] = kernels.digests([grads[i] for i in members]).to(place)
    return digests
