"""Whether the gradients of whole parameters are the same on every rank that holds them.

Nothing on the way to a wrong gradient looks wrong: a plain norm in a sequence-parallel region sums over this rank's
tokens alone, dropout or a batch of a rank's own changes what it computes, and the ranks drift apart. So a 64-bit digest
of each whole gradient is made on its device (integers, so exact in any order), and sixteen bytes a rank travel: the sum
of the digests, and a hash of what the call is about, so that ranks which do not agree about that are told apart too.
Only if these differ does more travel, to find the first gradient that does.

When the answer is looked at:

    groups of CPUs (gloo)   at once, in every call, before anything is scaled
    groups of GPUs          the first time that gradients of these shapes are seen, and with TP_INVARIANT_CHECK=1, at
                            once: the host waits for the device. Otherwise in the next call, for which the answer has
                            been copied to the host meanwhile: the error comes a step late, and no step waits
    in a CUDA graph         nothing is compared; the calls before the capture are
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Group, gather_major, is_capturing, ranks_of
from ..core.mode import is_call_check_enabled
from ..kernels.select import select
from .agreement import check_agreement, group_device, introduce
from .differences import format_ranks, mark, ranks_by_value


class _Asked(NamedTuple):
    """A comparison whose answer is on its way to the host."""

    arrived: torch.cuda.Event
    answers: Tensor
    digests: Tensor
    names: Sequence[str]
    why: str


_asked: weakref.WeakKeyDictionary[dist.ProcessGroup, _Asked] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
_MOST = 4096  # how many different calls are remembered, for each group


def circles(groups: Sequence[Group]) -> list[Group]:
    """Of the groups those that are no part of another, in an order that is the same for all ranks.

    Collectives over them, one after another in this order, cannot wait for each other in a circle, whichever of them
    each rank is in: it is one order of all the groups there are.
    """
    several = {group: ranks_of(group) for group in dict.fromkeys(groups) if group.size > 1}
    if len(several) == 1:
        return list(several)
    ordered = sorted(several, key=lambda group: (-group.size, several[group], str(_name(group))))
    found: list[Group] = []
    for group in ordered:
        if not any(set(several[group]) <= set(several[other]) for other in found):
            found.append(group)
    return found


def _name(group: Group) -> str:
    return str(getattr(group.process_group, "group_name", ""))


_mark = lru_cache(maxsize=256)(mark)


class Question(NamedTuple):
    """What the ranks of a group are to agree on.

    facts    what the call is about, hashable
    told     the same for an error, by name
    whole    the gradients that all of them hold, this rank's part of each
    names    what they are called
    why      why they may differ, for an error
    """

    group: Group
    facts: Hashable
    told: Callable[[], Mapping[str, Any]]
    whole: Sequence[Tensor]
    names: Sequence[str]
    why: str


def compare(questions: Sequence[Question], device: torch.device, who: str) -> None:
    """Compares calls and whole gradients over each question's group. A collective.

    Args:
        device: of the gradients.
        who: what is called, for errors.

    Raises:
        RuntimeError: the same on every rank of the group, and on every rank that shares a group with these: names what
            differs, of the gradients the first.
    """
    if is_capturing():
        return
    late = {question.group: _look_up(question.group, who) for question in questions}
    _raise_together(late, device)
    found: dict[Group, str | None] = {}
    for question in questions:
        introduce(question.group, device)
        found[question.group] = _ask(question, device, who)
    _raise_together(found, device)


def _ask(question: Question, device: torch.device, who: str) -> str | None:
    group, mark = question.group, _mark(question.facts)
    assert group.process_group is not None
    known = _known.setdefault(group.process_group, set())
    place = group_device(group, device)
    digests = _digests(question.whole, place)
    own = torch.stack([torch.full((), mark, dtype=torch.int64, device=place), digests.sum()])
    everyone = gather_major(own, group)
    if place.type == "cuda" and (who, mark) in known and not is_call_check_enabled():
        on_host = torch.empty(everyone.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        on_host.copy_(everyone, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        _asked[group.process_group] = _Asked(event, on_host, digests, question.names, question.why)
        return None
    answers = everyone.tolist()
    if any(marked != mark for marked, _ in answers):
        check_agreement(question.told(), group, device, set())
        raise RuntimeError(f"the {group.size} ranks of tp_group disagree about what {who} is given")
    if len(known) >= _MOST:
        known.clear()
    known.add((who, mark))
    return _difference(answers, digests, group, question.names, who, question.why)


def _look_up(group: Group, who: str) -> str | None:
    """What the last comparison over this group has found, if nobody has looked yet."""
    if group.process_group is None or (asked := _asked.pop(group.process_group, None)) is None:
        return None
    asked.arrived.synchronize()
    return _difference(asked.answers.tolist(), asked.digests, group, asked.names, f"the last call of {who}", asked.why)


def _difference(
    answers: Sequence[Sequence[int]], digests: Tensor, group: Group, names: Sequence[str], who: str, why: str
) -> str | None:
    if len({tuple(answer) for answer in answers}) == 1:
        return None
    columns = gather_major(digests, group).t().tolist()
    others = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if not others:
        return f"{who}: the ranks of tp_group differ in their calls: every rank must make the same ones"
    holders = ranks_by_value(enumerate(columns[others[0]])).values()
    alike = "; ".join(f"one on {format_ranks(ranks)}" for ranks in holders)
    more = f" and {len(others) - 1} more gradients of whole parameters differ" if len(others) > 1 else " differs"
    return (
        f"{who}: {names[others[0]]}{more} between the {group.size} ranks of the group {ranks_of(group)}: {alike}. {why}"
    )


def _raise_together(found: Mapping[Group, str | None], device: torch.device) -> None:
    """Raises what was found; where ranks are in several groups, on all that can be reached through them."""
    texts = [text for text in found.values() if text is not None]
    if len(found) > 1:
        flag = int(bool(texts))
        for _ in found:
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
