"""What is gathered ahead of its use, or kept after it: weights, and the tokens of activations.

The owner maps and the layers' formulas ask `scheduler` for what they need next, and it asks nothing of them. What will
be needed it knows from the calls before.

    weights   A step uses the same weights in the same order again and again. The scheduler writes that order down, and
              while one weight is used the gather of the next one runs, beside the GEMM of the first. At most two
              gathered weights of a group are alive then: the one in use and the one on its way.
    tokens    Under sequence parallelism a column-parallel layer gathers its input's tokens, and again in backward for
              its weight's gradient, rather than keep them. Layers that read one activation (q, k and v; gate and up)
              share its gather. The last activation that was gathered is held until another one is, it dies, or the
              layer is through that was the last to ask for it the time before. In forward each row-parallel layer
              learns which column-parallel layer was called before it (`tokens_before`); in backward it starts that
              one's gather, which then runs beside its own products.

That is a matter of speed alone, and safe:

    bits      What was gathered early serves only while the tensor is the same at the same autograd version. A weight
              serves only the very next use; `Schedule` says over which stretches of a program none is foreseen, and an
              optimizer's step drops what is on its way. A layer gets one gather of an activation once: if it asks
              again, the tensor may be a buffer that holds another step's values, written by something that raises no
              version (a receive, a kernel of the user's). Inference tensors have no version: they are neither held nor
              gathered early.
    fsdp      fully_shard (FSDP2) frees the memory of a block's weights after the block's forward, and fills it again
              for backward, at no other version and perhaps at another address, on one rank alone. So a weight of its is
              gathered ahead only while its memory is there and never over the end of a forward, and it is neither kept
              nor prefetched. core/fsdp.py asks fully_shard about the weight itself, when it is used for the first time.
              A weight that the program computes (a cast, FullyShardedDataParallel's views) is another tensor at every
              pass, so it is not gathered ahead.
    hangs     Whether a gather starts is a function of the group's calls before it, which all its ranks share, and of
              versions, which ranks of one program share. Groups have nothing in common: the calls of two groups that
              two threads use are interleaved in another way on every rank. A gather is started where all ranks pass in
              the same order. When a tensor dies ranks need not share, where it waits for the garbage collector: so its
              death frees memory and decides nothing. Where a gather of it would start, one of any bytes starts
              (`_alive_or_like`). A gathered weight, and its memory, are held as long as the gather is, so that no
              other gets their id or address.
    memory    A result is allocated on the stream that starts its gather and is used on the stream that waits for it;
              the collective itself starts after what that first stream has queued. What is dropped is waited for first,
              so its memory is not given away while bytes still arrive. A shared gather may lie in a lent buffer
              (comm/peer_copies.py). A layer launches all that reads it before another asks, so it is released when the
              next one does: at a place of the program that ranks share, which the death of a tensor need not be. What
              is not lent is freed with the last reference. Nothing here holds an activation, or a weight of which
              there is no gather. The one exception is fully_shard's weights: whether their memory is empty decides, and
              ranks would not share the answer once one of them has freed the tensor. Mostly it is empty between uses.
              Where it stays whole (`reshard_after_forward=False`, the root module, after an evaluation), it outlives
              its model until `clear()`.
    graphs    While a CUDA graph is captured nothing that is under way outside it is used, waited for or released:
              weights and tokens are gathered inside the graph, or weights are kept ones. A kept one stays alive as long
              as the process, for replays read it; when its weight changes, capture again. Inside it a gather starts
              early only with `ahead_in_graphs`, since what starts in a graph must end in it, and whether the next use
              is captured too only the caller knows. In graphs that torch.compile makes nothing starts early, is kept or
              shared (core/torch_graphs.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from threading import get_ident
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef

from ..comm.collectives import Group, Pending, is_capturing, stream_is_captured
from ..comm.moves import start_exchange_rows, start_gather_dim, start_gather_major
from ..core.fsdp import resharded_whole
from ..core.layout import split_sizes
from ..core.torch_graphs import in_torch_graph

# --- the order of uses ----------------------------------------------------------------------------------------------

# Forgets everything after so many uses and learns again: a hundred steps of a large model. Some megabytes at most where
# each use is of a new tensor (under autocast, say).
LIMIT = 16384


class Phase(Enum):
    """Where in a program a weight is used."""

    INFERENCE = 0  # outside backward, gradients off
    FORWARD = 1  # outside backward, gradients on
    BACKWARD = 2


class Schedule:
    """The order in which gathered weights are used. `note` each use; `expected` says what comes next.

    Writes down every use and looks up where it has seen the last two before: what came next then is expected now. A
    first step is all new; from the second on each use is foreseen, also where activation checkpointing uses a forward's
    weights again in the middle of backward, and after a deviation (another branch, an evaluation) the place is found
    again after two rounds at most.

    What it answers depends on the uses alone. They come in the same order on every rank of a group, since each of them
    is a collective of that group, so all ranks expect the same.
    """

    def __init__(self) -> None:
        self._forget()
        self._round: set[Hashable] = set()
        self.rounds = 0  # stretches in which no use comes twice: a forward, a backward
        self._phase: tuple[Phase, int] | None = None

    def _forget(self) -> None:
        self._seen: list[tuple[Hashable, Phase]] = []
        self._next_place: dict[tuple, int] = {}  # (use,) and (use before, use) -> where what followed them stands
        self._place: int | None = None  # of what is expected next

    def note(self, use: Hashable, phase: Phase, task: int = -1) -> None:
        """`use` happens now; `task` tells one backward from another."""
        if (phase, task) != self._phase or use in self._round:
            self._round.clear()
            self.rounds += 1
        self._phase = phase, task
        self._round.add(use)
        if len(self._seen) >= LIMIT:
            self._forget()
        pair = self._seen[-1][0] if self._seen else None, use
        if self._place is not None and self._place < len(self._seen) and self._seen[self._place][0] == use:
            self._place += 1
        else:
            self._place = self._next_place.get(pair, self._next_place.get((use,)))
        self._seen.append((use, phase))
        self._next_place[pair] = self._next_place[(use,)] = len(self._seen)

    def expected(self, into_backward: bool = True) -> Hashable | None:
        """What is used next, None where that is unknown or must not be read yet.

        into_backward: whether a forward may foresee the first use of its backward.

        Optimizers and weight loading may write weights between one pass over a model and the next, through `.data`
        too, which raises no version. So what is expected must belong to the same pass: not after the end of a backward,
        not what this pass has used already (then the next pass begins), and gradients on or off as now. From a forward
        into its backward is fine: autograd needs the weights unchanged in between anyway.
        """
        if self._place is None or self._place >= len(self._seen) or self._phase is None:
            return None
        use, phase = self._seen[self._place]
        now = self._phase[0]
        if phase == now:
            return None if use in self._round else use
        return use if into_backward and (now, phase) == (Phase.FORWARD, Phase.BACKWARD) else None


# Which backward this thread is inside of, -1 outside.
_backward_task = torch._C._current_graph_task_id


def _phase_of(task: int, grad: bool) -> Phase:
    return Phase.BACKWARD if task != -1 else Phase.FORWARD if grad else Phase.INFERENCE


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


def start_weight(weight: Tensor, layout: WeightLayout, *, early: bool, lend: bool, for_graphs: bool) -> Pending:
    """Starts moving [P, ...weight's shape], or of its columns [P, N/P, K/P] or [P, K/P, N/P], as `layout` says; the
    options are those of comm/moves.py."""
    local, group = weight.detach(), layout.group
    early = early and weight.is_cuda
    if layout.part == "whole":
        return start_gather_major(local, group, early=early, lend=lend, for_graphs=for_graphs)
    cols = local.shape[1 - layout.k_dim]
    if layout.k_dim_that_arrives(cols) == 0:
        local, sizes = _columns_by_rank(local, group.size), [local.shape[0]] * group.size
    else:
        local, sizes = local if layout.k_dim == 1 else local.t(), split_sizes(cols, group.size)
    return start_exchange_rows(local, sizes, group, early=early, lend=lend, for_graphs=for_graphs)


def _columns_by_rank(local: Tensor, world: int) -> Tensor:
    """[K/P, N] -> [P K/P, N/P], the columns of each rank one after another; elements are moved eight bytes at a time,
    as torch's copies take as long for an element of two."""
    local = local.resolve_neg()
    aligned = local.storage_offset() * local.element_size() % 8 == local.data_ptr() % 8 == 0
    words = local
    if aligned and local.is_contiguous():  # one row is, whatever its stride
        words = local.view(-1).view(torch.int64).view(local.shape[0], local.shape[1] * local.element_size() // 8)
    return rearrange(words, "k (rank col) -> (rank k) col", rank=world).view(local.dtype)


class _Use:
    """One layout of one weight: the same object as long as the weight lives, so that it is compared at no cost."""

    __slots__ = ("computed", "layout", "like", "resharded", "weight")

    def __init__(self, weight: Tensor, layout: WeightLayout) -> None:
        self.weight, self.layout, self.like = WeakIdRef(weight), layout, _like(weight)
        self.computed = weight.grad_fn is not None  # by the program: another tensor at every pass
        # fully_shard's tensor where it manages the weight's memory: whether that is empty decides. Not the weight,
        # which may be an alias that lives for one call. It is held: ranks need not share when it would die.
        self.resharded = None if self.computed else resharded_whole(weight)


@dataclass(slots=True)
class _Entry:
    """A gathered weight, or one on its way. While there is an entry its weight is alive, on every rank."""

    use: _Use
    weight: Tensor
    pending: Pending
    task: int = -1
    captured: bool = False  # started inside a CUDA graph that was being captured, to be used there
    round: int = 0  # of the schedule, where it was prefetched
    thread: int = field(default_factory=get_ident)
    state: tuple = ()
    source: Tensor | None = None  # the memory that was gathered: no other memory gets its address

    def __post_init__(self) -> None:
        self.state, self.source = _state(self.weight), self.weight.detach()
        if self.use.computed:  # and not foreseen; the tensor itself would hold the graph that made it
            self.weight = self.source


@dataclass(slots=True)
class TokenUse:
    """The input of one call of a column-parallel layer whose backward will gather x's tokens: None once it has.

    It does not hold x, which holds the graph that made it: without a backward nobody would let go of them.
    """

    x: WeakIdRef | None
    like: tuple
    dim: int
    group: Group


@dataclass(slots=True)
class _SharedTokens:
    """A gather of an activation's tokens, for all layers that read it. Its users are known on when the tensor dies."""

    key: tuple
    pending: Pending | None  # None once the activation is dead
    users: list[tuple] = field(default_factory=list)  # who took it, in order


def _state(weight: Tensor) -> tuple:
    return weight._version, weight.data_ptr(), weight.shape, weight.dtype


def _like(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.device


def _is_empty(x: Tensor) -> bool:
    return x.numel() > 0 and x.untyped_storage().nbytes() == 0


def _alive_or_like(reference: WeakIdRef, like: tuple) -> Tensor:
    """The tensor; where it is gone, or its memory is, or it is not `like` by now, one that is, with any bytes.

    A program that has let a tensor go cannot ask for what is gathered of it. But one rank may have freed it while on
    another it waits for the garbage collector, so all take part in a gather whose result nobody will read.
    """
    x = reference()
    if x is not None and _like(x) == like and not _is_empty(x):
        return x
    shape, stride, dtype, device = like
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _stream(x: Tensor) -> int | None:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and stream_is_captured()


def _end(pending: Pending) -> None:
    """For what is dropped: its memory is free once nothing writes to it."""
    pending.wait()
    pending.release()


@dataclass(slots=True, eq=False)
class _OfGroup:
    """What is known of one group: two groups of a process, perhaps used by two threads, have nothing in common."""

    group: Group | None = None
    schedule: Schedule = field(default_factory=Schedule)
    uses: dict[tuple[int, WeightLayout], _Use] = field(default_factory=dict)  # by the weight's id
    # kept ones, and those that were prefetched
    entries: OrderedDict[_Use, _Entry] = field(default_factory=OrderedDict)
    # what was started without being asked for, by whether a CUDA graph is being captured
    early: dict[bool, _Entry] = field(default_factory=dict)
    # tokens
    references: dict[int, WeakIdRef] = field(default_factory=dict)  # one of each activation, by its id
    shared: _SharedTokens | None = None
    let_go: tuple | None = None  # key and user of what its last user let go
    # whether a user is the last to ask: never again if once followed
    last_user: dict[tuple, bool] = field(default_factory=dict)
    spent: list[Pending] = field(default_factory=list)  # let go, and to be waited for or released
    captured_tokens: tuple[tuple, Pending] | None = None  # started in a capture, for the next to take
    called: TokenUse | None = None  # the last column-parallel call that may have a backward

    def use(self, weight: Tensor, layout: WeightLayout) -> _Use:
        key = id(weight), layout
        use = self.uses.get(key)
        if use is not None and use.weight() is weight:
            use.like = _like(weight)
        else:  # a weight that is gone may have had this id
            if len(self.uses) >= LIMIT:
                self.uses = {key: use for key, use in self.uses.items() if use.weight() is not None}
            use = self.uses[key] = _Use(weight, layout)
        return use

    def drop_unused(self, keep: int) -> None:
        """Drops weights that were prefetched and not used for two passes. Where weights are kept they go by `keep`."""
        if self.entries and not keep:
            for use in [use for use, entry in self.entries.items() if entry.round + 2 < self.schedule.rounds]:
                self.drop(use)

    def drop(self, use: _Use, unless: _Entry | None = None) -> None:
        entry = self.entries.pop(use, None)
        if entry is not None and entry is not unless:
            _end(entry.pending)

    def drop_early(self, capturing: bool) -> None:
        entry = self.early.pop(capturing, None)
        if entry is not None:
            _end(entry.pending)

    def drop_all_early(self) -> None:
        """All that can be waited for here; what was left over in a capture that failed is nothing to wait for."""
        self.drop_early(is_capturing())
        if not is_capturing():
            self.early.clear()

    def reference(self, x: Tensor) -> WeakIdRef:
        """The same object as long as x lives, so that who compares two of them need not know whether x still does."""
        reference = self.references.get(id(x))
        if reference is None or reference() is not x:
            reference = self.references[id(x)] = WeakIdRef(x, self.forget)
        return reference

    def drop_tokens(self) -> None:
        shared, self.shared = self.shared, None
        if shared is None:
            return
        if shared.pending is not None:
            _end(shared.pending)
        if shared.users and self.last_user.setdefault(shared.users[-1], True):
            self.last_user = {user: last for user, last in self.last_user.items() if user[0]() is not None}

    def drop_captured_tokens(self) -> None:
        """What nobody took ends within its graph, whose replays would wait for its buffer; of a dead one, nothing."""
        captured, self.captured_tokens = self.captured_tokens, None
        if captured is not None and is_capturing():
            _end(captured[1])

    def end_spent(self) -> None:
        if not self.spent or is_capturing():
            return  # neither to wait nor to release is part of the graph
        spent, self.spent = self.spent, []
        for pending in spent:
            if not pending.waited:
                pending.wait()
            pending.release()

    def forget(self, dead: Any) -> None:
        """An activation has died, and its gather goes too: at once, unless something is left to do for it.

        A tensor dies anywhere, also while a CUDA graph is captured, and at another place on every rank. So nothing is
        waited for here, and no buffer goes back, before the group asks next.
        """
        if self.references.get(hash(dead)) is dead:
            del self.references[hash(dead)]
        shared = self.shared
        if shared is not None and shared.key[0] is dead and shared.pending is not None:
            pending, shared.pending = shared.pending, None
            if pending.leased or not pending.waited:
                self.spent.append(pending)

    def forget_tokens(self) -> None:
        self.end_spent()
        self.drop_tokens()
        self.drop_captured_tokens()
        self.last_user.clear()
        self.let_go = self.called = None


class Scheduler:
    """See the module. Its public name is `tp_invariant.owners.weight_cache`.

    A gathered weight is used only while the weight is the same tensor at the same autograd version: optimizers, `copy_`
    and other in-place operations raise the version. Writes through `.data` do not: after them call `clear()` where
    weights are kept, or where they come between two layers of one pass over a model. All ranks must agree on what is
    kept, which they do when they run the same program.

        keep    how many gathered weights of each group stay after use; the least recently used goes first
        ahead   whether the next weight's gather starts by itself while one is used
        ahead_in_graphs     so too while a CUDA graph is captured. For graphs that hold whole passes over a model: a
                forward, or a forward and its backward. In one that ends between two layers a gather would be left
                over, and CUDA refuses the capture as having unjoined work: call `clear()` after a capture that failed.
        share_tokens        whether layers that read the same activation share one gather of its tokens
    """

    def __init__(
        self, keep: int = 0, ahead: bool = True, ahead_in_graphs: bool = False, share_tokens: bool = True
    ) -> None:
        self.keep, self.ahead, self.ahead_in_graphs, self.share_tokens = keep, ahead, ahead_in_graphs, share_tokens
        self._groups: dict[Any, _OfGroup] = {}  # by process group, which hashes faster than a Group
        self._captured: list[Tensor] = []
        self._watching = False

    def __reduce__(self) -> str:  # the process's only one, by name: a function sent to another process finds that one's
        return "scheduler"

    def _of(self, group: Group) -> _OfGroup:
        if in_torch_graph():
            return _OfGroup()  # dropped with all that it notes and holds
        key = group.process_group
        of = self._groups.get(group if key is None else key)
        return self._groups.setdefault(group if key is None else key, _OfGroup(group)) if of is None else of

    # --- weights ----------------------------------------------------------------------------------------------------

    def holds_weight(self, weight: Tensor, layout: WeightLayout) -> bool:
        """Whether `layout` of `weight` as it is now is here or on its way."""
        return self.holds_any(weight, layout)[0]

    def holds_any(self, weight: Tensor, *layouts: WeightLayout) -> list[bool]:
        """`holds_weight` of each of some layouts over one group."""
        if weight.is_inference():  # has no version to go by
            return [False] * len(layouts)
        of, capturing = self._of(layouts[0].group), _capturing(weight)
        if not of.entries:  # mostly so, and asked for every product
            early = of.early.get(capturing)
            if early is None or early.weight is not weight:
                return [False] * len(layouts)
        return [self._is_here(of, of.use(weight, layout), weight, capturing) for layout in layouts]

    def prefetch_weight(self, weight: Tensor, layout: WeightLayout) -> None:
        """Starts gathering `layout` of `weight` unless it is already here or on its way."""
        if weight.is_inference() or _capturing(weight):
            return
        of = self._of(layout.group)
        of.drop_unused(self.keep)
        use = of.use(weight, layout)
        if use.resharded is not None or self._is_here(of, use, weight, False):
            return
        of.drop(use)
        of.entries[use] = _Entry(use, weight, self._start(weight, layout, early=True), round=of.schedule.rounds)

    def take_weight(self, weight: Tensor, layout: WeightLayout, *, grad: bool = False) -> Pending:
        """`layout` of `weight`: the gather that is kept or on its way where it is current; else one starts now.

        `grad`: whether gradients are on (inside an autograd function torch says that they are off).
        """
        if weight.is_inference():
            return self._start(weight, layout, early=False)
        of = self._of(layout.group)
        use = of.use(weight, layout)
        capturing = _capturing(weight)
        if not capturing:
            of.drop_unused(self.keep)
        kept = of.entries.get(use)
        if capturing:
            if kept is not None and self._serves(kept, use, weight, capturing):
                self._captured.append(kept.pending.result)
                return _there(kept.pending.result)
            if not self.ahead_in_graphs:
                return self._start(weight, layout, early=False)
        task = _backward_task()
        of.schedule.note(use, _phase_of(task, grad), task)
        entry = of.early.get(capturing)
        if self._serves(entry, use, weight, capturing):
            del of.early[capturing]
        else:
            of.drop_early(capturing)
            entry = None
        if capturing:
            return self._start(weight, layout, early=False) if entry is None else entry.pending
        if entry is None and self._serves(kept, use, weight, capturing):
            entry = kept
        if entry is not kept or not self.keep:
            of.drop(use, unless=entry)
        if entry is None:
            entry = _Entry(use, weight, self._start(weight, layout, early=False))
        if self.keep and use.resharded is None:
            entry.task, entry.pending.for_all_streams = -1, True
            of.entries[use] = entry
            of.entries.move_to_end(use)
            while len(of.entries) > self.keep:
                of.drop(next(iter(of.entries)))
        return entry.pending

    def start_next_weight(self, group: Group) -> None:
        """Starts the gather that is expected next, if any. Call it where what is needed now has been started."""
        of = self._of(group)
        use: Any = of.schedule.expected() if self.ahead else None
        if not isinstance(use, _Use) or use.computed:  # unknown, or where a graph begins
            return
        if use.resharded is not None and (_is_empty(use.resharded) or of.schedule.expected(False) is None):
            return
        weight, layout = _alive_or_like(use.weight, use.like), use.layout
        capturing = _capturing(weight)
        if (capturing and not self.ahead_in_graphs) or self._is_here(of, use, weight, capturing):
            return
        if not self._watching:  # optimizers of others write through .data
            self._watching = True
            register_optimizer_step_pre_hook(lambda *_: self._before_step())
        of.drop_early(capturing)
        pending = self._start(weight, layout, early=True)
        of.early[capturing] = _Entry(use, weight, pending, _backward_task(), capturing)

    def _before_step(self) -> None:
        """An optimizer's step drops what its thread has started. When another thread would lose what it has started
        depends on how the calls of the two fall together, which is another way on every rank."""
        for of in list(self._groups.values()):
            if any(entry.thread == get_ident() for entry in of.early.values()):
                of.drop_all_early()

    def _start(self, weight: Tensor, layout: WeightLayout, *, early: bool) -> Pending:
        # a kept weight would hold a lent buffer for good
        return start_weight(weight, layout, early=early, lend=not self.keep, for_graphs=self.ahead_in_graphs)

    def _is_here(self, of: _OfGroup, use: _Use, weight: Tensor, capturing: bool) -> bool:
        if self._serves(of.early.get(capturing), use, weight, capturing):
            return True
        return bool(of.entries) and self._serves(of.entries.get(use), use, weight, capturing)

    def _serves(self, entry: _Entry | None, use: _Use, weight: Tensor, capturing: bool) -> bool:
        if entry is None or entry.use is not use or entry.state != _state(weight):
            return False
        if self.keep and entry.pending.leased:  # started before `keep` was set
            return False
        if entry.task not in (-1, _backward_task()):  # started by itself inside another backward
            return False
        return entry.pending.waited or entry.captured == capturing

    # --- tokens -----------------------------------------------------------------------------------------------------

    def take_tokens(self, x: Tensor, dim: int, group: Group, user: Tensor) -> Pending:
        """All ranks' x [.., features] along `dim`, for the layer that `user` is the weight of.

        To be released by it once it is read if `exclusive`; otherwise it is shared.
        """
        of = self._of(group)
        of.end_spent()
        key = self._tokens_key(x, dim, group)
        if group.size == 1 or not self.share_tokens or key is None or user.is_inference():
            return self._take_alone(x, dim, group)
        shared, asks = of.shared, (WeakIdRef(user), _backward_task() != -1)
        if shared is None or shared.pending is None or shared.key != key or asks in shared.users:
            of.drop_tokens()
            pending = start_gather_dim(x, dim, group)
            shared = _SharedTokens(key, pending)
        else:
            pending = shared.pending
        before = shared.users[-1] if shared.users else None
        if of.let_go is not None and of.let_go[0] == key:
            before = of.let_go[1]
        if before not in (None, asks):
            of.last_user[before] = False
        shared.users.append(asks)
        of.shared, of.let_go = shared, None
        if of.last_user.get(asks):
            of.shared, of.let_go = None, (key, asks)
            if pending.leased:
                of.spent.append(pending)
        return pending

    def called_with(self, x: Tensor | None, dim: int, group: Group, *, gathers: bool = True) -> TokenUse | None:
        """A column-parallel layer is called with x, whose tokens its backward will gather; None for one not to be held.

        gathers: False for a frozen layer, whose backward gathers no tokens. Then a layer that was called before with
            the same x is still the one whose gather comes next, and else there is none.

        The layer's backward sets `x` of the result to None, so that nobody starts the gather after it.
        """
        of = self._of(group)
        if not gathers:
            before = of.called
            if before is not None and (x is None or before.x is not of.reference(x)):
                of.called = None
            return None
        if x is None or x.is_inference():
            of.called = None
        else:
            of.called = TokenUse(of.reference(x), _like(x), dim, group)
        return of.called

    def tokens_before(self, group: Group) -> TokenUse | None:
        """For a row-parallel layer in forward: whose backward comes after its own, as far as the calls tell."""
        return self._of(group).called

    def start_tokens(self, use: TokenUse | None) -> None:
        """Starts the gather that the `take_tokens` of the backward of that call will ask for."""
        if use is None or use.x is None:
            return
        x, dim, group = _alive_or_like(use.x, use.like), use.dim, use.group
        version = x._version if x is use.x() else -1  # nobody is given what stands in for an input
        of = self._of(group)
        of.end_spent()
        if is_capturing():
            if self.ahead_in_graphs and self.share_tokens:
                of.drop_captured_tokens()
                of.captured_tokens = (use.x, dim, version), start_gather_dim(x, dim, group, overlapped=True)
            return
        key = use.x, dim, _stream(x), version
        if self.share_tokens and (of.shared is None or of.shared.key[:-1] != key[:-1]):
            of.drop_tokens()
            of.shared = _SharedTokens(key, start_gather_dim(x, dim, group, overlapped=True))

    def forget_tokens(self) -> None:
        """Drops what is shared, and forgets which layers asked for it."""
        for of in list(self._groups.values()):
            of.forget_tokens()

    def _take_alone(self, x: Tensor, dim: int, group: Group) -> Pending:
        of = self._of(group)
        if not is_capturing():
            of.drop_tokens()
        captured = of.captured_tokens
        if captured is not None and is_capturing() and captured[0] == (of.reference(x), dim, x._version):
            pending, of.captured_tokens = captured[1], None
        else:
            of.drop_captured_tokens()
            pending = start_gather_dim(x, dim, group)
        pending.exclusive = True
        return pending

    def _tokens_key(self, x: Tensor, dim: int, group: Group) -> tuple | None:
        # a captured CUDA graph gathers by itself: what it reads must change when x does
        if x.is_inference() or _capturing(x):
            return None
        return self._of(group).reference(x), dim, _stream(x), x._version

    # --- both -------------------------------------------------------------------------------------------------------

    def enter(self, place: Hashable) -> None:
        """Where a CUDA graph of one layer begins, in forward or backward: what comes before is not in it.

        `place` stands among the uses of weights from here on, so that nothing is started ahead past it; what came after
        it the time before starts now.
        """
        task = _backward_task()
        for of in list(self._groups.values()):
            of.schedule.note(place, _phase_of(task, torch.is_grad_enabled()), task)
            assert of.group is not None
            self.start_next_weight(of.group)
            of.called = None

    def clear(self) -> None:
        """Forgets everything, also what was learnt of the order of calls."""
        for of in list(self._groups.values()):
            of.drop_all_early()
            for use in list(of.entries):
                of.drop(use)
            of.forget_tokens()
        self._groups.clear()


def _there(result: Tensor) -> Pending:
    pending = Pending(result, None)
    pending.wait()
    return pending


scheduler = Scheduler()
