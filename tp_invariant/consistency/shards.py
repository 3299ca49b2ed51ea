"""Finds parts of a sharded parameter that are the same on several ranks, or that come from different full weights.

A plain shard does not say that other ranks hold other parts. DistributedDataParallel and fully_shard over the ranks of
tp_group, trainers, and loads of one rank's file on all ranks make the parts equal; all shapes remain right, and the
model computes something else. Ranks with seeds of their own keep parts of different full weights. So at a layer's first
call its ranks exchange two hashes (agreement.py): of the part; and of the full weight from which the part was cut, as
long as the part has the values that it then had.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.bits import tensor_hash
from ..core.dtensors import local_of
from .differences import format_ranks, format_unnamed, ranks_by_value

_ENDS = 512  # elements at each end that are hashed: a row of zeros at one, as of a padding index, leaves the other


def _has_values(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() > 0
    )  # fake tensors have none


@torch.no_grad()
def _part_hash(part: Tensor) -> int:
    """0 if all elements are equal: weights of zeros or ones are equal on all ranks, and so are parts of padding."""
    first = part.reshape(-1)[0]
    # NaN equals nothing: it is what to_empty() leaves under torch.use_deterministic_algorithms
    constant = (part != part).all() if first != first else (part == first).all()
    return 0 if constant else int(tensor_hash(part.detach()))


@torch.no_grad()
def _ends_hash(tensor: Tensor) -> int:
    tensor = local_of(tensor).detach()
    if not _has_values(tensor):
        return 0
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[[0, -1]].reshape(-1)
    return int(tensor_hash(torch.cat([flat[:_ENDS], flat[-_ENDS:]])))


def note_source(part: Tensor, full: Tensor) -> None:
    """To be called when `part`, a parameter, has the values of this rank's part of `full`."""
    part.cut_from = _ends_hash(full), _ends_hash(part)  # type: ignore[attr-defined]


def source_of(part: Tensor) -> int:
    """The hash of the full weight whose values the parameter still has; 0 if that is not known."""
    full, own = getattr(part, "cut_from", (0, 0))
    return full if own and own == _ends_hash(part) else 0


def note_conversion(part: Tensor, source: int) -> None:
    """To be called when the values of `part` have been converted, to another dtype say; source: `source_of` before."""
    if source:
        part.cut_from = source, _ends_hash(part)  # type: ignore[attr-defined]


def part_numbers(weight: Tensor, allowed: bool) -> tuple[int, int]:
    """The hashes of this rank's part and of its full weight; 0 for what is not compared.

    allowed: equal parts are no error.
    """
    local = local_of(weight)
    allowed = allowed or getattr(weight, "shards_may_be_equal", False)
    return (0 if allowed or not _has_values(local) else _part_hash(local)), source_of(weight)


def check_parts(rows: Sequence[Sequence[int]], layer: str) -> None:
    """Whether the ranks' parts differ and are of one full weight, given each rank's `part_numbers`.

    Raises:
        RuntimeError: the same on every rank; names the ranks whose parts are equal, or of different full weights.
    """
    parts, sources = (ranks_by_value((rank, row[i]) for rank, row in enumerate(rows) if row[i]) for i in range(2))
    if equal := [ranks for ranks in parts.values() if len(ranks) > 1]:
        ranks = "; and on ".join(map(format_ranks, equal))
        raise RuntimeError(
            f"the weight of {layer} is the same on {ranks} of tp_group, which must hold "
            "different parts of it: one rank's part has been copied to the others, or code of yours has drawn the same "
            "values on each. DistributedDataParallel, fully_shard and trainers must be given the data parallel ranks "
            "alone, without those of tp_group; initialise by init_method; load weights by "
            "tp_invariant.load_full_state_dict or tp_invariant.checkpoint.load. Do so, and load the weights again. If "
            "the parts are equal on purpose, set shards_may_be_equal = True, of the weight or of the layer, on every "
            "rank"
        )
    if len(sources) > 1:
        raise RuntimeError(
            f"the ranks of tp_group hold parts of different full weights of {layer}: {format_unnamed(sources)}. Seed "
            "all ranks alike before the layers are made, give from_linear and from_embedding the same full layer on "
            "every rank, or load one checkpoint on all of them; code of yours that fills each rank's part by itself "
            "must do so after the layer is made"
        )
