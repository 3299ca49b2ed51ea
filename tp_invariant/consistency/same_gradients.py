"""Checks that the gradients of replicated parameters are the same on every rank that holds them.

Several mistakes give wrong gradients without an error: a plain norm in a sequence-parallel region sums over this rank's
tokens only, and dropout masks or batches that differ between ranks change a rank's results, so that the ranks drift
apart. So a 64-bit digest of each such gradient is computed on its device (from integers, so exact in any order), and
the ranks exchange sixteen bytes each: the sum of the digests, and a hash of the call's arguments, which also detects
ranks that make different calls. Only if these differ is more exchanged, to find the first gradient that differs.

When the result is read:

    groups of CPUs (gloo)   at once, in every call, before anything is scaled
    groups of GPUs          at once in the first call with gradients of these shapes, and with TP_INVARIANT_CHECK=1 in
                            every call: the host waits for the device. Otherwise in the next call; until then the result
                            is copied to the host: the error comes one step late, and no step waits
    in a CUDA graph         nothing is compared, except in the calls before the capture
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Group, gather_major, is_capturing, ranks_of
from ..core.mode import is_call_check_enabled
from ..kernels.select import select
from .agreement import check_agreement, compare_environments, group_device
from .differences import format_ranks, mark, ranks_by_value
from .environment import FLUSHES, flushes_subnormals


class _PendingComparison(NamedTuple):
    """A comparison whose result is being copied to the host."""

    arrived: torch.cuda.Event
    answers: Tensor
    digests: Tensor
    names: Callable[[], Sequence[str]]
    why: str


_pending_comparisons: weakref.WeakKeyDictionary[dist.ProcessGroup, _PendingComparison] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
_MAX_KNOWN = 4096  # how many different calls are remembered, for each group


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


class Question(NamedTuple):
    """A comparison over a group.

    facts          the call's arguments, hashable
    named_facts    returns the same by name, for an error
    whole          the gradients of replicated parameters, as this rank holds them
    names          returns the names of these gradients, for an error
    why            why they may differ, for an error
    """

    group: Group
    facts: Hashable
    named_facts: Callable[[], Mapping[str, Any]]
    whole: Sequence[Tensor]
    names: Callable[[], Sequence[str]]
    why: str


def compare(questions: Sequence[Question], device: torch.device, caller: str, *, at_once: bool = False) -> None:
    """Compares calls and the gradients of replicated parameters over each question's group. A collective.

    Args:
        device: of the gradients.
        caller: the name of the calling function, for errors.
        at_once: wait for the result, and allow ranks of a group to be in different numbers of groups.

    Raises:
        RuntimeError: the same on every rank of the group, and on every rank that shares a group with these: names what
            differs, of the gradients the first.
    """
    if is_capturing():
        return
    late = {question.group: _look_up(question.group, caller) for question in questions}
    _raise_together(late, device, at_once)
    found: dict[Group, str | None] = {}
    for question in questions:
        compare_environments(question.group, device)
        found[question.group] = _ask(question, device, caller, at_once)
    _raise_together(found, device, at_once)


def _ask(question: Question, device: torch.device, caller: str, at_once: bool) -> str | None:
    group, flushes = question.group, device.type == "cpu" and flushes_subnormals()
    own_mark = mark((question.facts, flushes))
    assert group.process_group is not None
    known = _known.setdefault(group.process_group, set())
    place = group_device(group, device)
    digests = _digests(question.whole, place)
    own = torch.stack([torch.full((), own_mark, dtype=torch.int64, device=place), digests.sum()])
    everyone = gather_major(own, group)
    if place.type == "cuda" and (caller, own_mark) in known and not at_once and not is_call_check_enabled():
        on_host = torch.empty(everyone.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        on_host.copy_(everyone, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        _pending_comparisons[group.process_group] = _PendingComparison(
            event, on_host, digests, question.names, question.why
        )
        return None
    answers = everyone.tolist()
    if any(marked != own_mark for marked, _ in answers):
        check_agreement({**question.named_facts(), FLUSHES: flushes}, group, device, set())
        raise RuntimeError(f"the {group.size} ranks of tp_group disagree about what {caller} is given")
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known.add((caller, own_mark))
    return _difference(answers, digests, group, question.names, caller, question.why)


def _look_up(group: Group, caller: str) -> str | None:
    """The error of the last comparison over this group, if its result has not been read yet; None if there is none."""
    if group.process_group is None or (asked := _pending_comparisons.pop(group.process_group, None)) is None:
        return None
    asked.arrived.synchronize()
    return _difference(
        asked.answers.tolist(), asked.digests, group, asked.names, f"the last call of {caller}", asked.why
    )


def _difference(
    answers: Sequence[Sequence[int]],
    digests: Tensor,
    group: Group,
    names: Callable[[], Sequence[str]],
    caller: str,
    why: str,
) -> str | None:
    if len({tuple(answer) for answer in answers}) == 1:
        return None
    columns = gather_major(digests, group).t().tolist()
    others = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if not others:
        return f"{caller}: the ranks of tp_group differ in their calls: every rank must make the same ones"
    holders = ranks_by_value(enumerate(columns[others[0]])).values()
    alike = "; ".join(f"one on {format_ranks(ranks)}" for ranks in holders)
    more = f" and {len(others) - 1} more gradients of whole parameters differ" if len(others) > 1 else " differs"
    ranks = f"the {group.size} ranks of the group {ranks_of(group)}"
    return f"{caller}: {names()[others[0]]}{more} between {ranks}: {alike}. {why}"


def _raise_together(found: Mapping[Group, str | None], device: torch.device, always: bool) -> None:
    """Raises the errors found; if ranks are in several groups, on all ranks that share a group, directly or through
    one or two others. How often a group gathers does not depend on how many groups a rank is in.

    always: gather in a single group, too; without it all ranks of a group must be in several groups, or all in one.
    """
    texts = [text for text in found.values() if text is not None]
    if always or len(found) > 1:
        flag = int(bool(texts))
        for _ in range(2):
            for group in found:
                own = torch.tensor([flag], dtype=torch.int64, device=group_device(group, device))
                flag = int(gather_major(own, group).any())
        if flag and not texts:
            texts = [
                "ranks of a group that shares ranks with this rank's groups have found a difference: see their log"
            ]
    if texts:
        raise RuntimeError(texts[0])


def _digests(grads: Sequence[Tensor], place: torch.device) -> Tensor:
    """int64 [gradients], on the device where the group's messages travel."""
    if not grads:
        return torch.zeros(0, dtype=torch.int64, device=place)
    by_device: dict[torch.device, list[int]] = {}
    for i, grad in enumerate(grads):
        by_device.setdefault(grad.device, []).append(i)
    parts = []
    for device, members in by_device.items():
        if device.type == "meta":  # there are no values
            parts.append(torch.zeros(len(members), dtype=torch.int64, device=place))
            continue
        kernels = select("gradient norm", "cuda" if device.type == "cuda" else "cpu")
        parts.append(kernels.digests([grads[i] for i in members]).to(place))
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([i for members in by_device.values() for i in members], device="cpu")
    return torch.cat(parts)[order.argsort().to(place)]
