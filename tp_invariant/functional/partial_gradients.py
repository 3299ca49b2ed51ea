"""Gradients of experts whose rows come from several data-parallel ranks: one partial sum for each rank's micro-batch.

One backward of such a layer computes, on the rank that owns an expert, products over the rows of several micro-batches.
A dense parameter's gradients of these micro-batches are summed over ranks by data_parallel.MicroBatchTree, in the order
of its tree. So an expert's must not be added here: they wait in the parameter's attribute `partial_gradients`, which
MicroBatchTree sets and reads. A rank that holds several chunks of the sequence computes one for each of them
besides, chunk by chunk (layers/sequence_chunks.py).

Until then `.grad` is a placeholder, NaN of one element's memory. So zero_grad() drops what waits, as it drops a dense
gradient (a warm-up, a step that is given up); and what reads `.grad` too early gets NaN, not a missing gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..core.differentiation import is_executed
from ..core.dtensors import grad_like, is_dtensor, local_of
from ..core.torch_private import after_backward, current_backward, version_of

_Sums = list[Tensor | None]


def is_wanted(parameter: Tensor) -> bool:
    """Whether the backward that runs would add to parameter.grad: not torch.autograd.grad(loss, inputs).

    Raises:
        RuntimeError: torch.autograd.grad asks for the parameter's gradient itself.
    """
    if not parameter.requires_grad:
        return False
    executed = is_executed(get_gradient_edge(parameter).node)
    if executed is None:
        raise RuntimeError(
            f"torch.autograd.grad asks for the gradient of an expert parameter of shape {tuple(parameter.shape)}, "
            "whose experts are divided over data-parallel ranks: its gradients are partial sums, which "
            "data_parallel.MicroBatchTree adds. Call backward(), then the tree's add() and reduce()"
        )
    return executed


def _plus(old: _Sums | None, new: Sequence[Tensor | None]) -> _Sums:
    if old is None:
        return list(new)
    return [a if b is None else b if a is None else a + b for a, b in zip(old, new, strict=True)]


class PartialGradients:
    """The gradients of one parameter for each of several micro-batches, since the last `take`.

    dp_ranks: the global ranks of the readers' dp_group, some of which may hold the same experts.
    """

    def __init__(self) -> None:
        self.dp_ranks: frozenset[int] = frozenset()
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sums: _Sums | None = None
        self._running: dict[int, _Sums] = {}  # of backwards that have not ended
        self._placeholder: tuple[Tensor, Tensor] | None = None  # the element, and what is set as .grad

    def read_by(self, reader: Any, dp_ranks: Sequence[int]) -> None:
        """`reader` will take them, as long as it exists."""
        self.dp_ranks |= frozenset(dp_ranks)
        self._readers.add(reader)

    @property
    def is_read(self) -> bool:
        return len(self._readers) > 0

    def add(self, parameter: Tensor, sums: Sequence[Tensor | None]) -> None:
        """Called in a backward. sums: one for each micro-batch, of the parameter's dtype; None: none.

        What one backward computes in several calls is added first, then the result to what waits, as autograd does it
        with .grad. A backward that raises leaves nothing.
        """
        backward = current_backward()
        if backward not in self._running:
            end = functools.partial(self._end, backward, parameter)
            after_backward(end)
        self._running[backward] = _plus(self._running.get(backward), sums)

    def _end(self, backward: int, parameter: Tensor) -> None:
        sums = self._running.pop(backward, None)
        if sums is None:
            return
        if parameter.grad is None:  # nothing waits, or zero_grad() has been called since
            self._sums = None
            own = local_of(parameter)
            element = torch.full((), torch.nan, dtype=own.dtype, device=own.device)
            grad = element.expand(own.shape)
            grad = grad_like(grad, parameter) if is_dtensor(parameter) else grad
            self._placeholder = element, grad
            parameter.grad = grad
        self._sums = _plus(self._sums, sums)

    def take(self, parameter: Tensor) -> _Sums | None:
        """What was added since the last call, or since zero_grad(); None if nothing was. Sets .grad to None.

        A .grad that is not the placeholder, or a placeholder that somebody has written to, stays.
        """
        sums, placeholder = self._sums, self._placeholder
        self._sums = self._placeholder = None
        self._running.clear()
        if placeholder is None or placeholder[1] is not parameter.grad or version_of(placeholder[0]) > 0:
            return None
        parameter.grad = None
        return sums

    def __reduce__(self) -> tuple:  # a copy of the parameter has no reader
        return PartialGradients, ()


torch.serialization.add_safe_globals([PartialGradients])


class PartialGradientsOfChunk(NamedTuple):
    """What an alias of a parameter, for one of several chunks of the sequence, has in place of its PartialGradients.

    chunk: the place of the chunk among the `chunks` of this rank. The parameter's sums are then one for each chunk and
    micro-batch: those of chunk 0, then those of chunk 1.
    """

    gradients: PartialGradients
    parameter: weakref.ref[Tensor]
    chunk: int
    chunks: int

    @property
    def is_read(self) -> bool:
        return self.gradients.is_read

    def add(self, alias: Tensor, sums: Sequence[Tensor | None]) -> None:
        """PartialGradients.add of the parameter."""
        none: _Sums = [None] * len(sums)
        if (parameter := self.parameter()) is not None:
            later = self.chunks - 1 - self.chunk
            self.gradients.add(parameter, [*none * self.chunk, *sums, *none * later])


def partial_gradients_of(parameter: Tensor) -> PartialGradients | PartialGradientsOfChunk | None:
    """Those of a parameter that a MicroBatchTree reads; None if none does."""
    gradients: PartialGradients | PartialGradientsOfChunk | None = getattr(parameter, "partial_gradients", None)
    return gradients if gradients is not None and gradients.is_read else None
