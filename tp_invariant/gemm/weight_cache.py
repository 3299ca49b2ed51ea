"""Gathered weights: started before they are needed, or kept after use until they change.

When a weight is taken, the gather of the one that the schedule expects next starts, and runs beside the GEMM of the
first. At most two gathered weights are alive then: the one in use and the one on its way. That is a matter of speed
alone, and safe:

    bits     What was gathered early serves only while the weight is the same tensor at the same autograd version, and
             only the very next use; weight_schedule.py says over which stretches of a program nothing is foreseen, and
             an optimizer's step drops what is on its way.
    hangs    Whether a gather starts is a function of the uses before it, which all ranks share, and of versions, which
             ranks of one program share. It is started where all ranks pass in the same order.
    memory   A result is allocated on the stream that starts its gather and is used on the stream that waits for it; the
             collective itself starts after what that first stream has queued. What is dropped is waited for first, so
             its memory is not given away while bytes still arrive, and `record_stream` says where it was used.
    graphs   While a CUDA graph is captured nothing that is under way outside it is used: weights are gathered inside
             the graph, or are kept ones. A kept one stays alive as long as the process, for replays read it; when its
             weight changes, capture again. Inside it a gather starts early only with `ahead_in_graphs`, since what
             starts in a graph must end in it, and whether the next use is captured too only the caller knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef

from ..comm.collectives import Group, Pending, is_capturing
from .weight_schedule import LIMIT, Phase, Schedule


class Layout(Protocol):
    """What of a weight is wanted, and how it is had. Hashable; must not refer to the weight."""

    @property
    def group(self) -> Group: ...
    def start(self, weight: Tensor, *, early: bool) -> Pending:
        """Starts the communication; `early` if it must not hold up others."""
        ...


class _Use:
    """One layout of one weight: the same object as long as the weight lives, so that it is compared at no cost."""

    __slots__ = ("layout", "weight")

    def __init__(self, weight: Tensor, layout: Layout) -> None:
        self.weight, self.layout = WeakIdRef(weight), layout


def _state(weight: Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.shape, weight.dtype


# Which backward this thread is inside of, -1 outside.
_backward_task = torch._C._current_graph_task_id


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class _Entry:
    use: _Use
    state: tuple
    task: int
    pending: Pending
    captured: bool = False  # started inside a CUDA graph that was being captured, to be used there


class WeightCache:
    """Weights gathered ahead of time, or kept after use until they change.

    An entry is used only while the weight is the same tensor at the same autograd version: optimizers, `copy_` and
    other in-place operations raise the version. Writes through `.data` do not: after them call `clear()` where weights
    are kept, or where they come between two layers of one pass over a model. All ranks must agree on what is cached,
    which they do when they run the same program.

        keep    how many gathered weights stay after use; the least recently used goes first
        ahead   whether the next weight's gather starts by itself while one is used
        ahead_in_graphs     so too while a CUDA graph is captured. For graphs that hold whole passes over a model: a
                forward, or a forward and its backward. In one that ends between two layers a gather would be left
                over, and CUDA refuses the capture as having unjoined work: call `clear()` after a capture that failed.
    """

    def __init__(self, keep: int = 0, ahead: bool = True, ahead_in_graphs: bool = False) -> None:
        self.keep, self.ahead, self.ahead_in_graphs = keep, ahead, ahead_in_graphs
        self._uses: dict[tuple[int, Layout], _Use] = {}  # by the weight's id
        self._entries: OrderedDict[_Use, _Entry] = OrderedDict()
        # what this cache started by itself: one for a group, and for whether a CUDA graph is being captured
        self._early: dict[tuple[Group, bool], _Entry] = {}
        self._schedules: dict[Group, Schedule] = {}
        self._captured: list[Tensor] = []
        self._watching = False

    def _use(self, weight: Tensor, layout: Layout) -> _Use:
        key = id(weight), layout
        use = self._uses.get(key)
        if use is None or use.weight() is not weight:  # a weight that is gone may have had this id
            if len(self._uses) >= LIMIT:
                self._uses = {key: use for key, use in self._uses.items() if use.weight() is not None}
            use = self._uses[key] = _Use(weight, layout)
        return use

    def holds(self, weight: Tensor, layout: Layout) -> bool:
        """Whether `layout` of `weight` as it is now is here or on its way."""
        if weight.is_inference():  # has no version to go by
            return False
        use, early = self._use(weight, layout), self._early.get((layout.group, _capturing(weight)))
        return self._serves(early, use, weight) or self._serves(self._entries.get(use), use, weight)

    def _serves(self, entry: _Entry | None, use: _Use, weight: Tensor) -> bool:
        if entry is None or entry.use is not use or entry.state != _state(weight):
            return False
        if self.keep and entry.pending.lent:  # started before `keep` was set
            return False
        if entry.task not in (-1, _backward_task()):  # started by itself inside another backward
            return False
        return entry.pending.waited or entry.captured == _capturing(weight)

    def prefetch(self, weight: Tensor, layout: Layout) -> None:
        """Starts gathering `layout` of `weight` unless it is already here or on its way."""
        for use in [use for use in self._entries if use.weight() is None]:  # of weights that are gone
            self._drop(use)
        if weight.is_inference() or self.holds(weight, layout) or _capturing(weight):
            return
        use = self._use(weight, layout)
        self._drop(use)
        self._entries[use] = _Entry(use, _state(weight), -1, layout.start(weight, early=True))

    def take(self, weight: Tensor, layout: Layout, *, grad: bool = False) -> Pending:
        """`layout` of `weight`, from the cache where it is there and current; else its gather starts now.

        `grad`: whether gradients are on (inside an autograd function torch says that they are off).
        """
        if weight.is_inference():
            return layout.start(weight, early=False)
        use = self._use(weight, layout)
        kept, capturing = self._entries.get(use), _capturing(weight)
        if capturing:
            if kept is not None and self._serves(kept, use, weight):
                self._captured.append(kept.pending.result)
                return _there(kept.pending.result)
            if not self.ahead_in_graphs:
                return layout.start(weight, early=False)
        task = _backward_task()
        phase = Phase.BACKWARD if task != -1 else Phase.FORWARD if grad else Phase.INFERENCE
        schedule = self._schedules.get(layout.group)
        if schedule is None:
            schedule = self._schedules[layout.group] = Schedule()
        schedule.note(use, phase, task)
        entry = self._early.get((layout.group, capturing))
        if self._serves(entry, use, weight):
            del self._early[layout.group, capturing]
        else:
            self._drop_early(layout.group, capturing)
            entry = None
        if capturing:
            return layout.start(weight, early=False) if entry is None else entry.pending
        if entry is None and self._serves(kept, use, weight):
            entry = kept
        if entry is not kept or not self.keep:
            self._drop(use, unless=entry)
        if entry is None:
            entry = _Entry(use, _state(weight), -1, layout.start(weight, early=False))
        if self.keep:
            entry.task, entry.pending.for_all_streams = -1, True
            self._entries[use] = entry
            self._entries.move_to_end(use)
            while len(self._entries) > self.keep:
                self._drop(next(iter(self._entries)))
        return entry.pending

    def enter(self, place: Hashable) -> None:
        """Where a CUDA graph of one layer begins, in forward or backward: what comes before is not in it.

        `place` stands among the uses from here on, so that nothing is started ahead past it; what came after it the
        time before starts now.
        """
        task = _backward_task()
        phase = Phase.BACKWARD if task != -1 else Phase.FORWARD if torch.is_grad_enabled() else Phase.INFERENCE
        for group, schedule in self._schedules.items():
            schedule.note(place, phase, task)
            self.run_ahead(group)

    def run_ahead(self, group: Group) -> None:
        """Starts the gather that is expected next, if any. Call it where what is needed now has been started."""
        schedule = self._schedules.get(group)
        use: Any = schedule.expected() if schedule is not None and self.ahead else None
        if not isinstance(use, _Use):  # unknown, or where a graph begins
            return
        weight, layout = use.weight(), use.layout
        # FSDP frees the storage of what is not in use
        if weight is None or weight.untyped_storage().nbytes() == 0:
            return
        capturing = _capturing(weight)
        if (capturing and not self.ahead_in_graphs) or self.holds(weight, layout):
            return
        if not self._watching:  # optimizers of others write through .data
            self._watching = True
            register_optimizer_step_pre_hook(lambda *_: self._drop_all_early())
        self._drop_early(group, capturing)
        pending = layout.start(weight, early=True)
        self._early[group, capturing] = _Entry(use, _state(weight), _backward_task(), pending, capturing)

    def _drop(self, use: _Use, unless: _Entry | None = None) -> None:
        entry = self._entries.pop(use, None)
        if entry is not None and entry is not unless:
            entry.pending.wait()  # its memory is free once nothing writes to it
            entry.pending.release()

    def _drop_early(self, group: Group, capturing: bool) -> None:
        entry = self._early.pop((group, capturing), None)
        if entry is not None:
            entry.pending.wait()
            entry.pending.release()

    def _drop_all_early(self) -> None:
        """All that can be waited for here; what was left over in a capture that failed is nothing to wait for."""
        capturing = is_capturing()
        for group, inside in list(self._early):
            if inside == capturing:
                self._drop_early(group, inside)
            elif inside:
                del self._early[group, inside]

    def clear(self) -> None:
        """Forgets everything, also what was learnt of the order of uses."""
        self._drop_all_early()
        for use in list(self._entries):
            self._drop(use)
        self._schedules.clear()
        self._uses.clear()


def _there(result: Tensor) -> Pending:
    pending = Pending(result, None)
    pending.wait()
    return pending


weight_cache = WeightCache()
