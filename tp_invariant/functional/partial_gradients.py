"""Gradients of experts whose rows come from several data-parallel ranks: one partial sum for each rank's micro-batch.

One backward of such a layer computes, on the rank that owns an expert, products over the rows of several micro-batches.
A dense parameter's gradients of these micro-batches are summed over ranks by data_parallel.MicroBatchTree, in the order
of its tree. So an expert's must not be added here: they wait in the parameter's attribute `partial_gradients`, which
MicroBatchTree sets and reads, and `.grad` stays None until its reduce().
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PartialGradients:
    """The gradients of one parameter for each of several micro-batches, since the last `take`."""

    def __init__(self) -> None:
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sums: list[Tensor | None] | None = None

    def read_by(self, reader: Any) -> None:
        """`reader` will take them, as long as it exists."""
        self._readers.add(reader)

    @property
    def is_read(self) -> bool:
        return len(self._readers) > 0

    def add(self, sums: Sequence[Tensor | None]) -> None:
        """sums: one for each micro-batch, of the parameter's dtype, in which autograd too adds to .grad; None: none."""
        if self._sums is None:
            self._sums = list(sums)
            return
        for place, (old, new) in enumerate(zip(self._sums, sums, strict=True)):
            self._sums[place] = old if new is None else new if old is None else old + new

    def take(self) -> list[Tensor | None] | None:
        """What was added since the last call; None if nothing was."""
        sums, self._sums = self._sums, None
        return sums

    def __reduce__(self) -> tuple:  # a copy of the parameter has no reader
        return PartialGradients, ()


torch.serialization.add_safe_globals([PartialGradients])


def partial_gradients_of(parameter: Tensor) -> PartialGradients | None:
    """Those of a parameter that a MicroBatchTree reads; None if none does."""
    found: PartialGradients | None = getattr(parameter, "partial_gradients", None)
    return found if found is not None and found.is_read else None
