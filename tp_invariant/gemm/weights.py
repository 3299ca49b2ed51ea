"""Weights that are sharded along K: gathered one use ahead of it, and kept after it where the user asks for that.

A step uses the same weights in the same order again and again. `Schedule` learns this order, and while one weight is
used the gather of the next one runs beside the GEMM of the first. This is a matter of speed alone:

    bits      What was gathered early serves the very next use alone, and only while the weight has the same memory at
              the same autograd version. `Schedule` says where in a program none is foreseen.
    hangs     Whether a gather starts depends on the group's earlier calls and on versions, which all ranks share, and
              never on when a tensor is freed: the schedule holds what it foresees. Groups have nothing in common.
    never     Weights that a program computes (casts under autocast), inference tensors, and the weights of fully_shard
              (FSDP2), whose memory is freed and filled again at no other version: neither foreseen nor kept.
    graphs    While a CUDA graph is captured, weights are gathered inside it, or are kept ones, which then stay alive
              as long as the process. In graphs that torch.compile makes nothing starts early or is kept
              (core/torch_graphs.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.collectives import Group, Peers, Pending, is_capturing, start_exchange_rows, start_gather_major
from ..core.autocast import autocast_dtype
from ..core.fsdp import resharded_whole
from ..core.layout import split_sizes
from ..core.torch_graphs import in_torch_graph
from ..core.torch_private import current_backward, version_of
from .tokens import drop, shared_tokens

# --- the order of uses ----------------------------------------------------------------------------------------------

PASSES = 8  # of a forward or a backward: what was not used in so many is forgotten


class Phase(IntEnum):
    """Where in a program a weight is used."""

    INFERENCE = 0  # outside backward, gradients off
    FORWARD = 1  # outside backward, gradients on
    BACKWARD = 2


class Schedule:
    """The order in which weights are used. `note` each use; `expected` is the one that comes next.

    It remembers what followed each pair of uses, and each single use, the last time. A first step is all new; from the
    second on each use is foreseen, also where checkpointing uses a forward's weights again in the middle of backward.
    The uses of a group are collectives of it and come in the same order on every rank, so all ranks expect the same.
    """

    def __init__(self, passes: int = PASSES) -> None:
        self._limit, self._passes = passes, 0
        self._followed: dict[tuple, tuple[Hashable, Phase, int]] = {}  # what, and in which pass, after one or two uses
        self._before: tuple = ()  # the last two uses, with their phases
        self._pass: set[Hashable] = set()  # the uses of this pass, in which none comes twice: a forward, a backward
        self._phase, self._task = Phase.INFERENCE, -1

    def note(self, use: Hashable, phase: Phase, task: int = -1) -> None:
        """`use` happens now; `task` distinguishes one backward from another."""
        if (phase, task) != (self._phase, self._task) or use in self._pass:
            self._phase, self._task, self._pass = phase, task, set()
            self._passes += 1
            oldest = self._passes - self._limit
            self._followed = {uses: known for uses, known in self._followed.items() if known[2] >= oldest}
        self._pass.add(use)
        last = self._before[-1:]
        self._followed[last] = self._followed[self._before] = use, phase, self._passes
        self._before = (*last, (use, phase))

    def expected(self) -> Hashable | None:
        """The next use, None where that is unknown or must not be read yet.

        Optimizers and weight loading may write weights between one pass over a model and the next, through `.data`
        too, which raises no version. So what is expected must belong to the same pass: not after the end of a backward,
        not what this pass has used already (then the next pass begins), and gradients on or off as before. From a
        forward into its backward is fine: autograd needs the weights unchanged in between anyway.
        """
        last = self._before[-1:]
        use, phase, _ = self._followed.get(self._before) or self._followed.get(last) or (None, None, 0)
        if phase == self._phase:
            return None if use in self._pass else use
        return use if (self._phase, phase) == (Phase.FORWARD, Phase.BACKWARD) else None


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
    if weight.is_inference() or weight.grad_fn is not None or resharded_whole(weight) is not None:
        return None
    if not isinstance(weight, nn.Parameter) and autocast_dtype(weight.device) is not None:
        return None  # a cast, which has no grad_fn where gradients are off
    use = _Use((*memory_of(weight), layout.part, layout.k_dim))
    use.weight, use.layout = weight.detach(), layout
    return use


def memory_of(weight: Tensor) -> tuple:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


class _Gathered(NamedTuple):
    """A gathered weight, or one on its way."""

    use: _Use
    pending: Pending
    version: int


@dataclass
class _WeightsOfGroup:
    schedule: Schedule
    kept: dict[_Use, _Gathered] = field(default_factory=dict)  # and those that were prefetched; the latest last
    early: dict[bool, _Gathered] = field(default_factory=dict)  # what is foreseen, by whether a graph is captured

    def note(self, use: Hashable, grad: bool) -> None:
        task = current_backward()
        phase = Phase.BACKWARD if task != -1 else Phase.FORWARD if grad else Phase.INFERENCE
        self.schedule.note(use, phase, task)

    def find(self, use: _Use | None, capturing: bool) -> _Gathered | None:
        """What was gathered of `use` as it is now. A graph cannot wait for what was started outside of it."""
        kept = self.kept.get(use) if use is not None else None
        held = self.early.get(capturing), kept if kept is not None and (kept.pending.waited or not capturing) else None
        return next((g for g in held if g is not None and g.use == use and g.version == version_of(g.use.weight)), None)


class WeightCache:
    """See the module. The process has one, `tp_invariant.owners.weight_cache`.

    Writes to weights through `.data` raise no autograd version: after them call `clear()` where weights are kept, or
    where they come between two layers of one pass over a model and are no optimizer's. All ranks must set the same
    options.

        keep    how many gathered weights of each group stay after use; the least recently used goes first
        ahead   whether the next weight's gather starts by itself while one is used
        passes  for how many forwards and backwards a weight that is not used is remembered, and its memory held
        ahead_in_graphs     so too while a CUDA graph is captured. For graphs that hold whole passes over a model: a
                forward, or a forward and its backward. In one that ends between two layers a gather would be left
                over, and CUDA refuses the capture as having unjoined work: call `clear()` after a capture that failed.
    """

    def __init__(self, keep: int = 0, ahead: bool = True, ahead_in_graphs: bool = False, passes: int = PASSES) -> None:
        self.keep, self.ahead, self.ahead_in_graphs, self.passes = keep, ahead, ahead_in_graphs, passes
        self._groups: dict[Group, _WeightsOfGroup] = defaultdict(lambda: _WeightsOfGroup(Schedule(self.passes)))
        self._read_by_graphs: list[Tensor] = []

    def __reduce__(self) -> str:  # a function that is sent to another process finds that one's
        return "weight_cache"

    def holds(self, weight: Tensor, *layouts: WeightLayout) -> list[bool]:
        """Whether each of these layouts of `weight` as it is now, over one group, is here or on its way."""
        if in_torch_graph():
            return [False] * len(layouts)
        of, capturing = self._groups[layouts[0].group], is_capturing()
        return [of.find(_use_of(weight, layout), capturing) is not None for layout in layouts]

    def prefetch(self, weight: Tensor, layout: WeightLayout) -> None:
        """Starts gathering `layout` of `weight` unless it is here or on its way, for its next use."""
        use, of = _use_of(weight, layout), self._groups[layout.group]
        if use is not None and not is_capturing() and of.find(use, False) is None:
            drop(of.kept, use)
            of.kept[use] = self._start_early(use)

    def take(self, weight: Tensor, layout: WeightLayout, *, grad: bool = False) -> Pending:
        """`layout` of `weight`: the gather that is kept or on its way where it is current; else one starts now.

        grad: whether gradients are on (inside an autograd function torch says that they are off).
        """
        if in_torch_graph():
            return self._start(weight, layout, early=False)
        of, use, capturing = self._groups[layout.group], _use_of(weight, layout), is_capturing()
        of.note(layout if use is None else use, grad)
        gathered, early = of.find(use, capturing), of.early.get(capturing)
        if gathered is early:
            of.early.pop(capturing, None)
        else:
            drop(of.early, capturing)
        if capturing and gathered is not early and gathered is not None:
            self._read_by_graphs.append(gathered.pending.result)
            return Pending(gathered.pending.result, None)
        pending = self._start(weight, layout, early=False) if gathered is None else gathered.pending
        if use is not None and not capturing:
            if of.kept.get(use) is gathered:
                of.kept.pop(use, None)
            drop(of.kept, use)
            if self.keep and not pending.leased:
                pending.for_all_streams = True
                of.kept[use] = _Gathered(use, pending, version_of(weight))
                while len(of.kept) > self.keep:
                    drop(of.kept, next(iter(of.kept)))
        return pending

    def start_next(self, group: Group) -> None:
        """Starts the gather that is expected next, if any. Call it where what is needed now has been started."""
        if not self.ahead or in_torch_graph():
            return
        of, capturing = self._groups[group], is_capturing()
        use: Any = of.schedule.expected()
        if not isinstance(use, _Use) or (capturing and not self.ahead_in_graphs):
            return  # it is unknown, never foreseen, or where a graph begins
        if of.find(use, capturing) is None:
            drop(of.early, capturing)
            of.early[capturing] = self._start_early(use)

    def enter(self, place: Hashable) -> None:
        """Where a CUDA graph of one layer begins, in forward or backward: what comes before is not in it.

        `place` stands among the uses of weights from here on, so that nothing is started ahead past it; what came after
        it the time before starts now.
        """
        for group, of in list(self._groups.items()):
            of.note(place, torch.is_grad_enabled())
            self.start_next(group)
        shared_tokens.forget_calls()

    def clear(self) -> None:
        """Forgets everything, also what was learnt of the order of calls, and the tokens that layers share."""
        for of in self._groups.values():
            drop(of.early, is_capturing())
            for use in list(of.kept):
                drop(of.kept, use)
        self._groups.clear()
        shared_tokens.clear()

    def _start_early(self, use: _Use) -> _Gathered:
        return _Gathered(use, self._start(use.weight, use.layout, early=True), version_of(use.weight))

    def _start(self, weight: Tensor, layout: WeightLayout, *, early: bool) -> Pending:
        # a kept weight would hold a lent buffer for good
        peers = Peers(early=early, lend=not self.keep, for_graphs=self.ahead_in_graphs)
        return start_weight(weight, layout, peers)


weight_cache = WeightCache()


def _after_step(*_: Any) -> None:
    """An optimizer may step inside backward, and write through `.data`: what was gathered ahead is of before."""
    for of in weight_cache._groups.values():
        drop(of.early, is_capturing())


register_optimizer_step_post_hook(_after_step)
