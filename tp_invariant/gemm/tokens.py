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

from collections import defaultdict
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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
    users: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # weights of layers, by whether in backward


def drop(gathers: dict[Any, Any], key: Hashable) -> None:
    """Drops gathers[key], if there is one: its memory is free once nothing writes to it.

    True and False are the keys of gathers inside and outside of the CUDA graph that is captured. What is left over in a
    graph ends within it; of a capture that failed there is nothing to wait for.
    """
    gather = gathers.pop(key, None)
    if gather is not None and key != (not is_capturing()):
        with suppress(RuntimeError):  # nobody takes its result: ranks that part learn of it at their next call
            gather.pending.wait()
            gather.pending.release()


@dataclass
class _TokensOfGroup:
    # outside of graphs (False) the last one, which layers share; inside (True) what is started for the next call there
    gathers: dict[bool, _Gather] = field(default_factory=dict)
    called: TokenUse | None = None  # the last column-parallel call that may have a backward

    def start(self, x: Tensor, dim: int, group: Group, captured: bool, peers: Peers) -> _Gather:
        """The gather of x's tokens that is held already, or one that takes its place."""
        gather, key = self.gathers.get(captured), _key(x, dim)
        if gather is None or gather.key != key:
            drop(self.gathers, captured)
            gather = self.gathers[captured] = _Gather(x.detach(), key, start_gather_dim(x, dim, group, peers=peers))
        return gather


def _key(x: Tensor, dim: int) -> tuple:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, version_of(x), dim, current_handle(x)


class SharedTokens:
    """See the module. `enabled`: whether layers that read the same activation share one gather of its tokens."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._groups: dict[Group, _TokensOfGroup] = defaultdict(_TokensOfGroup)

    def __reduce__(self) -> str:  # a function that is sent to another process finds that one's
        return "shared_tokens"

    def take(self, x: Tensor, dim: int, group: Group, user: Tensor) -> Pending:
        """All ranks' x [.., features] along `dim`, for the layer that `user` is the weight of.

        To be released by it once it is read if `exclusive`; otherwise it is shared.
        """
        of, capturing = self._groups[group], is_capturing()
        if not capturing:
            drop(of.gathers, True)
        if not (capturing or not self.enabled or x.is_inference() or user.is_inference() or in_torch_graph()):
            place = id(user), current_backward() != -1
            if False in of.gathers and place in of.gathers[False].users:
                drop(of.gathers, False)
            gather = of.start(x, dim, group, False, LENT)
            gather.users[place] = user
            return gather.pending
        if capturing and True in of.gathers and of.gathers[True].key == _key(x, dim):
            pending = of.gathers.pop(True).pending
        else:
            drop(of.gathers, capturing)
            pending = start_gather_dim(x, dim, group, peers=LENT)
        pending.exclusive = True
        return pending

    def called_with(self, x: Tensor | None, dim: int, group: Group) -> TokenUse | None:
        """A column-parallel layer is called with x, whose tokens its backward will gather; None for one not to be held,
        and for a frozen layer, whose backward gathers none.

        The layer's backward sets `x` of the result to None, so that nobody starts the gather after it.
        """
        called = None if x is None or x.is_inference() or in_torch_graph() else TokenUse(x.detach(), dim, group)
        self._groups[group].called = called
        return called

    def before(self, group: Group) -> TokenUse | None:
        """For a row-parallel layer in forward: the call whose backward comes after its own, as far as calls tell."""
        return self._groups[group].called

    def start(self, use: TokenUse | None, in_graphs: bool) -> None:
        """Starts the gather that the `take` of the backward of that call will ask for.

        in_graphs: whether to do so while a CUDA graph is captured.
        """
        capturing = is_capturing()
        if use is None or use.x is None or not self.enabled or in_torch_graph() or (capturing and not in_graphs):
            return
        self._groups[use.group].start(use.x, use.dim, use.group, capturing, Peers(overlapped=True))

    def forget_calls(self) -> None:
        """No call so far is followed by a backward in what comes now: a CUDA graph of one layer begins."""
        for of in self._groups.values():
            of.called = None

    def clear(self) -> None:
        """Drops what is shared."""
        for of in self._groups.values():
            drop(of.gathers, False)
            drop(of.gathers, True)
        self._groups.clear()


shared_tokens = SharedTokens()
