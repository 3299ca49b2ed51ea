"""A vocabulary sharded over ranks: which ids each rank holds, and the check that ids are in range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import Group
from ..core.compiled import as_runtime_op, op_config


@op_config
@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary of `size` ids: `width` columns or rows from `first` on.

    All ranks have the same width. The padded vocabulary is width * P; the columns or rows from `size` on are padding.
    """

    group: Group
    size: int
    width: int

    @property
    def first(self) -> int:
        return self.group.rank * self.width

    @property
    def real(self) -> int:
        """How many of this rank's `width` columns or rows are not padding."""
        return min(max(self.size - self.first, 0), self.width)

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that holds each id; an arbitrary rank for ids that are out of range."""
        return (ids // self.width).clamp(0, self.group.size - 1)

    def local(self, ids: Tensor) -> Tensor:
        """Each id's index on its owner; an arbitrary valid index on other ranks and for ids that are out of range."""
        return (ids - self.first).clamp(0, self.width - 1)


def check_ids(ids: Tensor, size: int, *, name: str, rank: int, ignored: int | None = None) -> None:
    """Refuses ids that are neither from 0 to size - 1 nor `ignored`.

    On CUDA this is an assertion on the device: the host does not wait for it, and a later call fails, as with torch's
    own embedding and cross-entropy.

    Raises:
        TypeError: ids that are not int64 or int32.
        IndexError: on a CPU; names the first such id. Every rank holds the same ids, so every rank raises it.
    """
    check_id_dtype(ids, name=name, rank=rank)
    _check_range(ids, size, name, rank, ignored)


def check_id_dtype(ids: Tensor, *, name: str, rank: int) -> None:
    """Raises a TypeError for ids that are not int64 or int32."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} is {ids.dtype} on rank {rank}: it must be torch.int64 or torch.int32")


def _check_range_now(ids: Tensor, size: int, name: str, rank: int, ignored: int | None) -> None:
    inside = (ids >= 0) & (ids < size)
    if ignored is not None:
        inside |= ids == ignored
    allowed = f"from 0 to {size - 1}" + ("" if ignored is None else f", or ignore_index={ignored}")
    if ids.device.type == "cuda":
        torch.ops.aten._assert_async.msg(inside.all(), f"{name} holds an id out of range: allowed is {allowed}")
    elif not inside.all():
        outside = ids[~inside]
        raise IndexError(
            f"{name} holds {outside[0].item()} on rank {rank} ({outside.numel()} of {ids.numel()} ids are out of "
            f"range): allowed is {allowed}"
        )


_check_range = as_runtime_op(
    _check_range_now, name="check_ids", arguments="Tensor ids, int size, str name, int rank, int? ignored"
)
