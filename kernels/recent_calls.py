"""Earlier calls, found by one check of all their tensors: in an eighth of the time that their layouts take to ask for.

The check is the one that torch.compile makes of a compiled function's arguments. It holds for tensors of the same type,
dtype, device, sizes, strides and dispatch keys (a view that is negated by a flag has another), of which the same need
gradients, in the same modes (autocast, inference). It does not look at addresses: what is found here has all of them at
multiples of 16. Without this check, in another torch, nothing is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment,misc]

_MOST = 4  # of the same facts and shape: each is tried
_PATIENCE = 64  # calls that none of them was, before another takes the place of one: sizes may change all the time
_MAX_PLACES = 1024


class _Entry(NamedTuple):
    is_like: Callable[..., bool]
    present: int | list[bool]  # how many tensors; or which, where some were None
    found: Any


def _check_of(*tensors: Tensor) -> Callable[..., bool] | None:
    first = [next(i for i, other in enumerate(tensors) if other is x) for x in tensors]
    different = sorted(set(first))
    if len(different) < len(tensors):  # it takes no tensor twice
        is_like = _check_of(*[tensors[i] for i in different])
        if is_like is None:
            return None
        again = [(i, of) for i, of in enumerate(first) if i != of]
        return lambda *xs: all([xs[i] is xs[of] for i, of in again]) and is_like(*[xs[i] for i in different])
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]  # None would be any
    try:
        check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (TypeError, ValueError, RuntimeError, SystemError):  # of a torch that wants other arguments, or has none
        return None


@functools.cache
def _tells_apart() -> bool:
    """Whether the check of this torch, which is not public, tells layouts from each other."""
    new = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")  # whatever a program's defaults are
    x = new(2, 3, 4)
    is_like = _check_of(x)
    if is_like is None or not is_like(new(2, 3, 4)):
        return False
    others = [
        new(2, 3, 5), new(3, 2, 4), new(2, 4, 3).mT, new(2, 3, 8)[..., ::2], x[0], new(6, 4), x.int(), x.double(),
        torch._neg_view(x), x.to("meta"), torch.nn.Parameter(x), [0.0], None,
    ]  # fmt: skip
    return not any([is_like(other) for other in others])


def _place(facts: Hashable, tensors: Sequence[Tensor | None]) -> tuple:
    """Where to look: a model's calls of one operation differ in the weight, which comes second, if in anything."""
    return facts, getattr(tensors[1], "shape", None) if len(tensors) > 1 else None


class RecentCalls:
    """What was found out about calls, by facts and tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[_Entry]] = {}
        self._missed = 0

    @property
    def now(self) -> dict:
        """Where `keep` writes. `clear` puts another in its place, so that what was looked up before it is dropped."""
        return self._known

    def find(self, facts: Hashable, tensors: Sequence[Tensor | None]) -> Any:
        """What `keep` was told of such a call, else None."""
        try:
            entries = self._known.get(_place(facts, tensors))
        except (RuntimeError, TypeError):  # of tensors without sizes, or with symbolic ones
            return None
        if entries is None:
            return None
        given = [x for x in tensors if x is not None]
        present = len(given) if len(given) == len(tensors) else [x is not None for x in tensors]
        for is_like, as_then, found in entries:
            if as_then == present and is_like(*given):
                for x in given:
                    address = x.data_ptr()
                    if address & 15 or not address:
                        return None
                return found
        return None

    def keep(self, facts: Hashable, tensors: Sequence[Tensor | None], found: Any, now: dict) -> None:
        """`found` is what is known of this call; not for tensors that are intercepted, or have no memory.

        now: as it was before `found` was looked up. If another thread has called `clear` since, nothing is kept.
        """
        place = _place(facts, tensors)
        entries = now.get(place, [])
        if len(entries) >= _MOST:
            self._missed += 1
            if self._missed % _PATIENCE:
                return
        given = [x for x in tensors if x is not None]
        if not _tells_apart() or any([x.data_ptr() % 16 or not x.data_ptr() for x in given]):
            return
        check = _check_of(*given)
        if check is None:
            return
        if len(now) >= _MAX_PLACES:
            now.clear()
        present = len(given) if len(given) == len(tensors) else [x is not None for x in tensors]
        # a new list: another thread may be going through this one
        now[place] = [_Entry(check, present, found), *entries][:_MOST]

    def clear(self) -> None:
        self._known = {}
