"""Notices that ranks keep their parts of different full weights, as after seeds of their own.

A layer draws or is given the full weight on every rank, and keeps this rank's part of it. The parts must differ, and so
show nothing. So the parameter says which full weight its part was cut from, by a hash of some elements of that weight,
and by one of the part, which tells whether it still has those values. The ranks compare the former at the layer's first
call (agreement.py). Parts that have been written to since, by a checkpoint or by code of the user's, say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.bits import tensor_hash
from ..core.dtensors import local_of
from .differences import format_unnamed, ranks_by_value

_SHOWN = 512  # elements at each end: a row of zeros at one, as of a padding index, leaves the other


def _hash_of_ends(tensor: Tensor) -> int:
    """0 for a tensor without values."""
    tensor = local_of(tensor)
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return 0
    with torch.no_grad():
        flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[[0, -1]].reshape(-1)
        return int(tensor_hash(torch.cat([flat[:_SHOWN], flat[-_SHOWN:]])))


def note_source(part: Tensor, full: Tensor) -> None:
    """To be called when `part`, a parameter, has the values of this rank's part of `full`."""
    part.cut_from = _hash_of_ends(full), _hash_of_ends(part)  # type: ignore[attr-defined]


def source_of(part: Tensor) -> int:
    """The hash of the full weight whose values the parameter still has; 0 if that is not known."""
    full, own = getattr(part, "cut_from", (0, 0))
    return full if own and own == _hash_of_ends(part) else 0


def note_conversion(part: Tensor, source: int) -> None:
    """To be called when the values of `part` have been converted, to another dtype say; source: `source_of` before."""
    if source:
        part.cut_from = source, _hash_of_ends(part)  # type: ignore[attr-defined]


def check_sources(sources: Sequence[int], layer: str) -> None:
    """Whether the ranks' parts are of one full weight, given each rank's `source_of`.

    Raises:
        RuntimeError: the same on every rank; names the ranks whose parts are of different full weights.
    """
    found = ranks_by_value((rank, source) for rank, source in enumerate(sources) if source)
    if len(found) > 1:
        raise RuntimeError(
            f"the ranks of tp_group hold parts of different full weights of {layer}: {format_unnamed(found)}. Seed all "
            "ranks alike before the layers are made, give from_linear and from_embedding the same full layer on every "
            "rank, or load one checkpoint on all of them; code of yours that fills each rank's part by itself must do "
            "so after the layer is made"
        )
