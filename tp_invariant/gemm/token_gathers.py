"""One gather of an activation's tokens for every layer that reads it: q, k and v; gate and up; in forward and backward.

Under sequence parallelism a column-parallel layer gathers its input's tokens, and again in backward for its weight's
gradient, rather than keep them. `token_gathers` holds the last activation that was gathered, until another one is, it
dies, or the layer is through that was the last to ask for it the time before: so not more than one is held, and none
where inputs are not shared. It goes by the tensor itself and its autograd version, so that one changed in place is
gathered again; inference tensors, which have no version, are never held, nor what a CUDA graph being captured gathers.
A layer gets a gather once: if it asks again, the tensor may be a buffer that holds another step's values, written by
something that raises no version (a receive, a kernel of the user's).

Like the weight cache it decides by what ranks of one program share, so all gather or none does. When an x dies they
need not share, where it waits for the garbage collector: so who was once followed is never again taken for the last to
ask. A gather may lie in a lent buffer (comm/peer_copies.py). A layer launches all that reads it before another asks, so
it is released when the next one does: at a place of the program that ranks share, which the death of a tensor need not
be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from ..comm import peer_copies, small_gathers
from ..comm.collectives import Group, Pending, is_capturing


@dataclass
class _Held:
    key: tuple
    pending: Pending
    users: list[tuple] = field(default_factory=list)  # who took it, in order


class TokenGathers:
    """See the module. `reuse` False gathers anew each time."""

    def __init__(self, reuse: bool = True) -> None:
        self.reuse = reuse
        self._held: _Held | None = None
        self._let_go: tuple | None = None  # key and user of what its last user let go
        self._last_users: set[tuple] = set()
        self._followed: set[tuple] = set()  # who was once followed by another that asked for the same
        self._spent: list[Pending] = []  # let go and not yet released
        self._captured: tuple[tuple, Pending] | None = None  # started in a capture, for the next to take

    def start(self, x: Tensor, dim: int, group: Group, *, in_graphs: bool) -> None:
        """Starts gathering x [.., features] along `dim` before a `take` of the same asks for it.

        in_graphs: so too in a capture, which then must hold that `take`.
        """
        self._release()
        if is_capturing():
            if in_graphs and self.reuse and not x.is_inference():
                self._drop_captured()
                self._captured = _name(x, dim, group), start_gather_tokens(x, dim, group)
            return
        key = self._key(x, dim, group)
        if self.reuse and key is not None and (self._held is None or self._held.key != key):
            self._drop()
            self._held = _Held(key, start_gather_tokens(x, dim, group))

    def take(self, x: Tensor, dim: int, group: Group, user: Tensor) -> Pending:
        """All ranks' x [.., features] along `dim`, for the layer that `user` is the weight of.

        To be released by it once it is read if `for_taker`; otherwise it is shared.
        """
        self._release()
        key = self._key(x, dim, group)
        if group.size == 1 or not self.reuse or key is None or user.is_inference():
            self._let_go_of_held()  # as a rank has done where its x is dead
            if self._captured is not None and is_capturing() and self._captured[0] == _name(x, dim, group):
                alone, self._captured = self._captured[1], None
            else:
                self._drop_captured()
                alone = start_gather_tokens(x, dim, group)
            alone.for_taker = True
            return alone
        held, asks = self._held, (WeakIdRef(user), _in_backward())
        if held is None or held.key != key or asks in held.users:
            self._drop()
            held = _Held(key, start_gather_tokens(x, dim, group))
        before = held.users[-1] if held.users else None
        if self._let_go is not None and self._let_go[0] == key:
            before = self._let_go[1]
        if before not in (None, asks):  # it was not the last user, and is not trusted to be one again
            self._last_users.discard(before)
            self._followed.add(before)
        held.users.append(asks)
        self._held, self._let_go = held, None
        if asks in self._last_users:
            self._held, self._let_go = None, (key, asks)
            self._spent.append(held.pending)
        return held.pending

    def _key(self, x: Tensor, dim: int, group: Group) -> tuple | None:
        # a captured CUDA graph gathers by itself: what it reads must change when x does
        if x.is_inference() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None
        return WeakIdRef(x, self._forget), x._version, dim, group, stream

    def _forget(self, dead: Any) -> None:
        if self._held is not None and self._held.key[0] is dead:
            self._held.pending.wait()
            self._spent.append(self._held.pending)
            self._held = None

    def _let_go_of_held(self) -> None:
        if self._held is not None and not is_capturing():
            self._forget(self._held.key[0])
            self._release()

    def _drop_captured(self) -> None:
        """What nobody took ends within its graph, whose replays would wait for its buffer; of a dead one, nothing."""
        captured, self._captured = self._captured, None
        if captured is not None and is_capturing():
            captured[1].wait()
            captured[1].release()

    def _drop(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        held.pending.wait()  # its memory is free once nothing writes to it
        held.pending.release()
        if held.users and held.users[-1] not in self._followed:
            self._last_users = {user for user in self._last_users if user[0]() is not None} | {held.users[-1]}
            self._followed = {user for user in self._followed if user[0]() is not None}

    def _release(self) -> None:
        if self._spent and is_capturing():
            return  # a release is no part of the graph
        for pending in self._spent:
            pending.release()
        self._spent.clear()

    def clear(self) -> None:
        """Forgets everything, also who asked last."""
        self._release()
        self._drop()
        self._last_users.clear()
        self._followed.clear()
        self._let_go = None


def _name(x: Tensor, dim: int, group: Group) -> tuple:
    return WeakIdRef(x), x._version, dim, group


def start_gather_tokens(x: Tensor, dim: int, group: Group) -> Pending:
    """All ranks' x [.., features] along `dim`, by the fastest way there is; to be released once it is read."""
    lent = peer_copies.start_gather_rows(x, group) if dim % x.dim() == 0 else None
    return small_gathers.start_gather_dim(x, dim, group) if lent is None else lent


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


token_gathers = TokenGathers()
