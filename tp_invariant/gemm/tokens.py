"""The tokens of activations, which layers gather under sequence parallelism.

A column-parallel layer gathers its input's tokens, and again in backward for its weight's gradient, rather than keep
them. Layers that read one activation (q, k and v; gate and up) share its gather: the last activation that was gathered
is held, with the gather, until another one is. In forward each row-parallel layer learns which column-parallel layer
was called before it (`before`). In backward it starts that one's gather, which then runs beside its own products.

A gather is shared only while the activation has the same memory at the same autograd version, and each layer gets it
once. A layer that asks again may read a buffer with another step's values, written by something that raises no version
(a receive, a kernel of the user's). While a CUDA graph is captured, tokens are gathered inside it, and nothing is
shared; see gemm/weights.py for the rest.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from ..comm.collectives import LENT, Group, Peers, Pending, current_handle, is_capturing, start_gather_dim
from ..core.torch_graphs import in_torch_graph
from ..core.torch_private import current_backward, version_of


@dataclass
class TokenUse:
    """The input of one call of a column-parallel layer whose backward will gather its tokens: None once it has."""

    x: Tensor | None
    dim: int
    group: Group


@dataclass
class _Gather:
    """A gather of the tokens of `source`, an alias of an activation: no other activation gets its address."""

    source: Tensor
    key: tuple
    pending: Pending
    users: list[tuple[Tensor, bool]] = field(default_factory=list)  # weights of layers, and whether in backward

    def has_user(self, user: Tensor, backward: bool) -> bool:
        return any(one is user and in_backward == backward for one, in_backward in self.users)


@dataclass
class _TokensOfGroup:
    shared: _Gather | None = None
    captured: _Gather | None = None  # started in a capture, for the next call in it
    called: TokenUse | None = None  # the last column-parallel call that may have a backward

    def drop(self) -> None:
        """The memory of a gather is free once nothing writes to it."""
        shared, self.shared = self.shared, None
        if shared is not None:
            with suppress(RuntimeError):  # nobody takes these tokens: ranks that part learn of it at their next call
                shared.pending.wait()
                shared.pending.release()

    def drop_captured(self) -> None:
        """What nobody took ends within its graph; of a capture that failed there is nothing to wait for."""
        captured, self.captured = self.captured, None
        if captured is not None and is_capturing():
            captured.pending.wait()
            captured.pending.release()


def _start(x: Tensor, dim: int, group: Group, key: tuple, overlapped: bool = False) -> _Gather:
    return _Gather(x.detach(), key, start_gather_dim(x, dim, group, peers=Peers(overlapped=overlapped)))


def _key(x: Tensor, dim: int) -> tuple:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, version_of(x), dim, current_handle(x)


class SharedTokens:
    """See the module. `enabled`: whether layers that read the same activation share one gather of its tokens."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._groups: dict[Group, _TokensOfGroup] = {}

    def __reduce__(self) -> str:  # a function that is sent to another process finds that one's
        return "shared_tokens"

    def _of(self, group: Group) -> _TokensOfGroup:
        of = self._groups.get(group)
        return self._groups.setdefault(group, _TokensOfGroup()) if of is None else of

    def take(self, x: Tensor, dim: int, group: Group, user: Tensor) -> Pending:
        """All ranks' x [.., features] along `dim`, for the layer that `user` is the weight of.

        To be released by it once it is read if `exclusive`; otherwise it is shared.
        """
        of = self._of(group)
        if is_capturing():
            if of.captured is None or of.captured.key != _key(x, dim):
                of.drop_captured()
                pending = start_gather_dim(x, dim, group, peers=LENT)
            else:
                pending, of.captured = of.captured.pending, None
            pending.exclusive = True
            return pending
        of.drop_captured()
        if not self.enabled or x.is_inference() or user.is_inference() or in_torch_graph():
            of.drop()
            pending = start_gather_dim(x, dim, group, peers=LENT)
            pending.exclusive = True
            return pending
        shared, backward, key = of.shared, current_backward() != -1, _key(x, dim)
        if shared is None or shared.key != key or shared.has_user(user, backward):
            of.drop()
            shared = of.shared = _start(x, dim, group, key)
        shared.users.append((user, backward))
        return shared.pending

    def called_with(self, x: Tensor | None, dim: int, group: Group) -> TokenUse | None:
        """A column-parallel layer is called with x, whose tokens its backward will gather; None for one not to be held,
        and for a frozen layer, whose backward gathers none.

        The layer's backward sets `x` of the result to None, so that nobody starts the gather after it.
        """
        of = self._of(group)
        of.called = None
        if x is not None and not x.is_inference() and not in_torch_graph():
            of.called = TokenUse(x.detach(), dim, group)
        return of.called

    def before(self, group: Group) -> TokenUse | None:
        """For a row-parallel layer in forward: the call whose backward comes after its own, as far as calls tell."""
        return self._of(group).called

    def start(self, use: TokenUse | None, in_graphs: bool) -> None:
        """Starts the gather that the `take` of the backward of that call will ask for.

        in_graphs: whether to do so while a CUDA graph is captured.
        """
        if use is None or use.x is None or not self.enabled or in_torch_graph():
            return
        of, capturing, key = self._of(use.group), is_capturing(), _key(use.x, use.dim)
        if capturing and in_graphs:
            of.drop_captured()
            of.captured = _start(use.x, use.dim, use.group, key, overlapped=True)
        elif not capturing and (of.shared is None or of.shared.key != key):
            of.drop()
            of.shared = _start(use.x, use.dim, use.group, key, overlapped=True)

    def forget_calls(self) -> None:
        """No call so far is followed by a backward in what comes now: a CUDA graph of one layer begins."""
        for of in self._groups.values():
            of.called = None

    def clear(self) -> None:
        """Drops what is shared."""
        for of in self._groups.values():
            of.drop()
            of.drop_captured()
        self._groups.clear()


shared_tokens = SharedTokens()
