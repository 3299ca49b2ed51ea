"""Calls of kernels that came before: a repeated one needs its results' memory and its launch, and no checks.

A call is known by a key of all that it depends on, except addresses and values: its options, and the layout of each of
its tensors. It is remembered only if it copied none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import Launch, allocator, interpreting, is_observed, layout
from .recent_calls import RecentCalls


class KnownCall(NamedTuple):
    """An earlier call, with all that the next one with arguments of the same layouts has in common with it.

    Its checks passed. Later calls pass addresses, which saves Triton from asking tensors for theirs.

    new        makes a result
    layouts    the shape, strides and dtype of each result
    numbers    the kernel's arguments after the addresses
    """

    launch: Launch
    index: int
    new: Any
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    numbers: tuple
    grid: tuple[int, int, int]

    def results(self) -> list[Tensor]:
        return [self.new(*of_result) for of_result in self.layouts]

    def run(self, *tensors: Tensor) -> None:
        """tensors: all of the kernel's, in its order."""
        self.at(*[x.data_ptr() for x in tensors])

    def at(self, *addresses: int) -> None:
        """`run`, by what tensors' data_ptr() is."""
        self.launch(self.index, *addresses, *self.numbers, grid=self.grid)


_MAX_KNOWN = 4096
_known: dict[tuple, Any] = {}
_recent = RecentCalls()


def find_call(options: tuple, *tensors: Tensor | None) -> tuple[tuple | None, Any]:
    """`key_of` a call and what `find` finds by it, sooner where such a call was found before; then the key is None."""
    if is_observed():
        return None, None
    known = _recent.find(options, tensors)
    if known is not None and known.index == torch._C._cuda_getDevice():
        return None, known
    key, now = key_of(options, *tensors), _recent.now
    known = find(key)
    if known is not None:
        _recent.keep(options, tensors, known, now)
    return key, known


def key_of(options: tuple, *tensors: Tensor | None) -> tuple | None:
    """The key of a call; options begin with the operation's name. None: the call must be looked at in full."""
    if is_observed():
        return None
    try:
        return (options, *[None if x is None else layout(x) for x in tensors])
    except (AttributeError, RuntimeError):  # no tensor, or one without memory
        return None


def find(key: tuple | None) -> Any:
    """What is kept under this key, if its call was on the current device."""
    known = _known.get(key) if key is not None else None
    return known if known is not None and known.index == torch._C._cuda_getDevice() else None


def remember(key: tuple | None, launch: Launch, results: Sequence[Tensor], numbers: tuple, grid: tuple) -> None:
    like = results[0]
    layouts = tuple((tuple(result.shape), result.stride(), result.dtype) for result in results)
    keep(key, KnownCall(launch, like.get_device(), allocator(like.device), layouts, numbers, (*grid, 1, 1)[:3]))


def keep(key: tuple | None, known: Any) -> None:
    """For what `KnownCall` does not suffice for; `known.index` is its device's."""
    if key is None or interpreting():
        return
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
        _recent.clear()
    _known[key] = known
