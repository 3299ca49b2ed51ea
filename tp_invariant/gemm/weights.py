"""Weights that are sharded along K: gathered one use ahead of it, and kept after it where the user asks for that.

A step uses the same weights in the same order again and again. `Schedule` learns this order, and while one weight is
used the gather of the next one runs beside the GEMM of the first. Then at most two gathered weights of a group are
alive: the one in use and the one on its way. This is a matter of speed alone:

    bits      What was gathered early serves only while the weight has the same memory at the same autograd version,
              and only the very next use. `Schedule` says where in a program none is foreseen, and an optimizer's step
              drops what is on its way.
    hangs     Whether a gather starts is a function of the group's earlier calls and of versions, which all ranks of one
              program share. Nothing depends on when a tensor is freed: the schedule holds what it foresees. Groups
              have nothing in common, because two threads may use them in another order on every rank.
    memory    The memory of weights that were used in the last passes is held; `clear()` lets it go. A result is
              allocated on the stream that starts its gather and is used on the stream that waits for it. What is
              dropped is waited for first, so its memory is not given away while bytes still arrive.
    never     Weights that a program computes (casts under autocast), inference tensors and the weights of fully_shard
              (FSDP2), whose memory is freed and filled again at no other version: neither foreseen nor kept.
    graphs    While a CUDA graph is captured, weights are gathered inside it, or are kept ones, which then stay alive
              as long as the process. Inside it a gather starts early only with `ahead_in_graphs`. In graphs that
              torch.compile makes nothing starts early or is kept (core/torch_graphs.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from threading import get_ident
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.collectives import Group, Peers, Pending, is_capturing, start_exchange_rows, start_gather_major
from ..core.fsdp import resharded_whole
from ..core.layout import split_sizes
from ..core.torch_graphs import in_torch_graph
from ..core.torch_private import current_backward, version_of
from .tokens import shared_tokens

# --- the order of uses ----------------------------------------------------------------------------------------------

PASSES = 4  # of a forward or a backward: what was not used in so many is forgotten


class Phase(IntEnum):
    """Where in a program a weight is used."""

    INFERENCE = 0  # outside backward, gradients off
    FORWARD = 1  # outside backward, gradients on
    BACKWARD = 2


def phase_of(task: int, grad: bool) -> Phase:
    return Phase.BACKWARD if task != -1 else Phase.FORWARD if grad else Phase.INFERENCE


class Schedule:
    """The order in which weights are used. `note` each use; `expected` is the one that comes next.

    It remembers what followed each pair of uses, and each single use, the last time. A first step is all new; from the
    second on each use is foreseen, also where checkpointing uses a forward's weights again in the middle of backward.
    The result depends on the uses alone. They come in the same order on every rank of a group, since each of them is a
    collective of that group, so all ranks expect the same.
    """

    def __init__(self, passes: int = PASSES) -> None:
        self._most_passes = passes
        self._followers: dict[tuple, tuple[Hashable, Phase]] = {}  # by the one or two uses before
        self._before: tuple = ()  # the last two uses, with their phases
        self._pass: set[Hashable] = set()  # the uses of this pass, in which none comes twice: a forward, a backward
        self._phase: tuple[Phase, int] | None = None
        self._passes = 0
        self._last_pass: dict[Hashable, int] = {}  # of each use

    def note(self, use: Hashable, phase: Phase, task: int = -1) -> None:
        """`use` happens now; `task` distinguishes one backward from another."""
        if (phase, task) != self._phase or use in self._pass:
            self._phase, self._pass = (phase, task), set()
            self._passes += 1
            self._forget(self._passes - self._most_passes)
        self._pass.add(use)
        self._last_pass[use] = self._passes
        last = self._before[-1:]
        self._followers[last] = self._followers[self._before] = use, phase
        self._before = (*last, (use, phase))

    def _forget(self, oldest: int) -> None:
        old = {use for use, last in self._last_pass.items() if last < oldest}
        if old:
            self._last_pass = {use: last for use, last in self._last_pass.items() if use not in old}
            self._followers = {
                before: follower
                for before, follower in self._followers.items()
                if follower[0] not in old and not any(use in old for use, _ in before)
            }

    def expected(self) -> Hashable | None:
        """The next use, None where that is unknown or must not be read yet.

        Optimizers and weight loading may write weights between one pass over a model and the next, through `.data`
        too, which raises no version. So what is expected must belong to the same pass: not after the end of a backward,
        not what this pass has used already (then the next pass begins), and gradients on or off as before. From a
        forward into its backward is fine: autograd needs the weights unchanged in between anyway.
        """
        use, phase = self._followers.get(self._before) or self._followers.get(self._before[-1:]) or (None, None)
        if use is None or self._phase is None:
            return None
        if phase == self._phase[0]:
            return None if use in self._pass else use
        return use if (self._phase[0], phase) == (Phase.FORWARD, Phase.BACKWARD) else None


# --- what is wanted -------------------------------------------------------------------------------------------------


class WeightLayout(NamedTuple):
    """What is wanted of a weight that is sharded along `k_dim`: "whole", or all of K of this rank's "cols"."""

    part: str
    k_dim: int
    group: Group

    def k_dim_that_arrives(self, cols: int) -> int:
        """Of a weight of `cols` columns: 0 if [P, K/P, ..] arrives, 1 if [P, .., K/P] does.

        A rank's columns of a [K/P, N] are copied before they are sent: row by row where all ranks get as many, in rows
        that a kernel can address (16 bytes of 16-bit elements), else as rows of the transpose, which takes five times
        as long.
        """
        return 1 if self.part == "cols" and cols % (8 * self.group.size) else self.k_dim


def start_weight(weight: Tensor, layout: WeightLayout, peers: Peers) -> Pending:
    """Starts moving [P, ...weight's shape], or of its columns [P, N/P, K/P] or [P, K/P, N/P], as `layout` says."""
    local, group = weight.detach(), layout.group
    if layout.part == "whole":
        return start_gather_major(local, group, peers=peers)
    cols = local.shape[1 - layout.k_dim]
    if layout.k_dim_that_arrives(cols) == 0:
        local, sizes = _columns_by_rank(local, group.size), [local.shape[0]] * group.size
    else:
        local, sizes = local if layout.k_dim == 1 else local.t(), split_sizes(cols, group.size)
    return start_exchange_rows(local, sizes, group, peers=peers)


def _columns_by_rank(local: Tensor, world: int) -> Tensor:
    """[K/P, N] -> [P K/P, N/P], the columns of each rank one after another; elements are moved eight bytes at a time,
    as torch's copies take as long for an element of two."""
    local = local.resolve_neg()
    aligned = local.storage_offset() * local.element_size() % 8 == local.data_ptr() % 8 == 0
    words = local
    if aligned and local.is_contiguous():  # one row is, whatever its stride
        words = local.view(-1).view(torch.int64).view(local.shape[0], local.shape[1] * local.element_size() // 8)
    return rearrange(words, "k (rank col) -> (rank k) col", rank=world).view(local.dtype)


# --- what is gathered -----------------------------------------------------------------------------------------------


class _Use(tuple):
    """A layout of the weight in this memory, which `weight`, an alias, holds: no other weight gets its address."""

    weight: Tensor
    layout: WeightLayout


def _use_of(weight: Tensor, layout: WeightLayout) -> _Use | None:
    """None for a weight that is never foreseen nor kept; see the module."""
    if weight.is_inference() or weight.grad_fn is not None:
        return None
    kind = weight.device.type
    if (
        not isinstance(weight, nn.Parameter)
        and torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
    ):
        return None  # a cast, which has no grad_fn where gradients are off
    if resharded_whole(weight) is not None:
        return None
    use = _Use((*_memory_of(weight), layout.part, layout.k_dim))
    use.weight, use.layout = weight.detach(), layout
    return use


def _memory_of(weight: Tensor) -> tuple:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


@dataclass
class _Gathered:
    """A gathered weight, or one on its way."""

    use: _Use
    pending: Pending
    task: int = -1  # the backward that started it by itself
    captured: bool = False  # whether it was started inside the CUDA graph that is being captured
    version: int = field(init=False)
    thread: int = field(default_factory=get_ident)

    def __post_init__(self) -> None:
        self.version = version_of(self.use.weight)

    def serves(self, use: _Use, capturing: bool) -> bool:
        if self.use != use or self.version != version_of(use.weight) or self.task not in (-1, current_backward()):
            return False
        return self.pending.waited or self.captured == capturing

    def end(self) -> None:
        """For what is dropped: its memory is free once nothing writes to it."""
        self.pending.wait()
        self.pending.release()


@dataclass
class _WeightsOfGroup:
    schedule: Schedule
    kept: OrderedDict[_Use, _Gathered] = field(default_factory=OrderedDict)  # and those that were prefetched
    # what was started without being asked for, by whether a CUDA graph is being captured
    early: dict[bool, _Gathered] = field(default_factory=dict)

    def drop(self, use: _Use, unless: _Gathered | None = None) -> None:
        gathered = self.kept.pop(use, None)
        if gathered is not None and gathered is not unless:
            gathered.end()

    def drop_early(self, capturing: bool) -> None:
        gathered = self.early.pop(capturing, None)
        if gathered is not None:
            gathered.end()

    def find(self, use: _Use, capturing: bool) -> _Gathered | None:
        for one in self.early.get(capturing), self.kept.get(use):
            if one is not None and one.serves(use, capturing):
                return one
        return None


class WeightCache:
    """See the module. The process has one, `tp_invariant.owners.weight_cache`.

    Writes to weights through `.data` raise no autograd version: after them call `clear()` where weights are kept, or
    where they come between two layers of one pass over a model. All ranks must set the same options.

        keep    how many gathered weights of each group stay after use; the least recently used goes first
        ahead   whether the next weight's gather starts by itself while one is used
        passes  for how many forwards and backwards a weight that is not used is remembered, and its memory held
        ahead_in_graphs     so too while a CUDA graph is captured. For graphs that hold whole passes over a model: a
                forward, or a forward and its backward. In one that ends between two layers a gather would be left
                over, and CUDA refuses the capture as having unjoined work: call `clear()` after a capture that failed.
    """

    def __init__(self, keep: int = 0, ahead: bool = True, ahead_in_graphs: bool = False, passes: int = PASSES) -> None:
        self.keep, self.ahead, self.ahead_in_graphs, self.passes = keep, ahead, ahead_in_graphs, passes
        self._groups: dict[Group, _WeightsOfGroup] = {}
        self._read_by_graphs: list[Tensor] = []
        self._has_hook = False

    def __reduce__(self) -> str:  # a function that is sent to another process finds that one's
        return "weight_cache"

    def _of(self, group: Group) -> _WeightsOfGroup:
        of = self._groups.get(group)
        return self._groups.setdefault(group, _WeightsOfGroup(Schedule(self.passes))) if of is None else of

    def holds(self, weight: Tensor, *layouts: WeightLayout) -> list[bool]:
        """Whether each of these layouts of `weight` as it is now, over one group, is here or on its way."""
        if in_torch_graph():
            return [False] * len(layouts)
        of, capturing = self._of(layouts[0].group), is_capturing()
        if not (of.kept or capturing in of.early):
            return [False] * len(layouts)
        uses = [_use_of(weight, layout) for layout in layouts]
        return [use is not None and of.find(use, capturing) is not None for use in uses]

    def prefetch(self, weight: Tensor, layout: WeightLayout) -> None:
        """Starts gathering `layout` of `weight` unless it is here or on its way, for its next use."""
        use, of = _use_of(weight, layout), self._of(layout.group)
        if use is None or is_capturing() or of.find(use, False) is not None:
            return
        of.drop(use)
        of.kept[use] = _Gathered(use, self._start(weight, layout, early=True))

    def take(self, weight: Tensor, layout: WeightLayout, *, grad: bool = False) -> Pending:
        """`layout` of `weight`: the gather that is kept or on its way where it is current; else one starts now.

        grad: whether gradients are on (inside an autograd function torch says that they are off).
        """
        if in_torch_graph():
            return self._start(weight, layout, early=False)
        of, use, capturing, task = self._of(layout.group), _use_of(weight, layout), is_capturing(), current_backward()
        of.schedule.note(layout if use is None else use, phase_of(task, grad), task)
        gathered = None if use is None else of.find(use, capturing)
        early = of.early.pop(capturing, None)
        if early is not None and early is not gathered:
            early.end()
        if use is None:
            return self._start(weight, layout, early=False)
        if capturing:
            if gathered is None or gathered is early:
                return self._start(weight, layout, early=False) if gathered is None else gathered.pending
            self._read_by_graphs.append(gathered.pending.result)
            return Pending(gathered.pending.result, None)
        if gathered is None:
            gathered = _Gathered(use, self._start(weight, layout, early=False))
        of.drop(use, unless=gathered)
        if self.keep and not gathered.pending.leased:
            gathered.task, gathered.pending.for_all_streams = -1, True
            of.kept[use] = gathered
            while len(of.kept) > self.keep:
                of.drop(next(iter(of.kept)))
        return gathered.pending

    def start_next(self, group: Group) -> None:
        """Starts the gather that is expected next, if any. Call it where what is needed now has been started."""
        if not self.ahead or in_torch_graph():
            return
        of, capturing = self._of(group), is_capturing()
        use: Any = of.schedule.expected()
        if not isinstance(use, _Use):  # unknown, never foreseen, or where a graph begins
            return
        if (capturing and not self.ahead_in_graphs) or of.find(use, capturing) is not None:
            return
        if not self._has_hook:  # optimizers of others write through .data
            self._has_hook = True
            register_optimizer_step_pre_hook(lambda *_: self._before_step())
        of.drop_early(capturing)
        of.early[capturing] = _Gathered(
            use, self._start(use.weight, use.layout, early=True), current_backward(), capturing
        )

    def enter(self, place: Hashable) -> None:
        """Where a CUDA graph of one layer begins, in forward or backward: what comes before is not in it.

        `place` stands among the uses of weights from here on, so that nothing is started ahead past it; what came after
        it the time before starts now.
        """
        task = current_backward()
        for group, of in list(self._groups.items()):
            of.schedule.note(place, phase_of(task, torch.is_grad_enabled()), task)
            self.start_next(group)
        shared_tokens.forget_calls()

    def clear(self) -> None:
        """Forgets everything, also what was learnt of the order of calls, and the tokens that layers share."""
        for of in self._groups.values():
            of.drop_early(is_capturing())  # what was left over in a capture that failed is nothing to wait for
            for use in list(of.kept):
                of.drop(use)
        self._groups.clear()
        shared_tokens.clear()

    def _before_step(self) -> None:
        """An optimizer's step drops what its thread has started. When another thread would lose what it has started
        depends on how the calls of the two fall together, which is another way on every rank."""
        capturing = is_capturing()
        for of in list(self._groups.values()):
            early = of.early.get(capturing)
            if early is not None and early.thread == get_ident():
                of.drop_early(capturing)

    def _start(self, weight: Tensor, layout: WeightLayout, *, early: bool) -> Pending:
        # a kept weight would hold a lent buffer for good
        peers = Peers(early=early, lend=not self.keep, for_graphs=self.ahead_in_graphs)
        return start_weight(weight, layout, peers)


weight_cache = WeightCache()
