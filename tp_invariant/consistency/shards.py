"""Finds parts that are the same on several ranks, or parameters that come from different full weights.

A tensor does not say that other ranks hold other parts of it. DistributedDataParallel and fully_shard over the ranks of
tp_group, trainers, and loads of one rank's file on all ranks make the parts of a parameter equal; all shapes remain
right, and the model computes something else. So it does where logits, tokens or features that are whole on every rank
are passed for this rank's part. Ranks with seeds of their own keep parts of different full weights. So ranks that
compare a call exchange three hashes with it (agreement.py): of the part of the layer's parameter, and of the full
weight from which it was cut, as long as it has the values that it then had, both at a layer's first call alone; and of
the part of the call's input.

Parts may be equal in right programs, too, and are then not compared: parameters whose elements are all the same; an
input whose features are, as behind such parameters; and one whose tokens are, but for zeros: a single token, several
of the same id, padding, or an attention whose heads share their keys and see one token. What is left are heads that are
the same on purpose, and a text that repeats itself with the period of a rank's part: `shards_may_be_equal` allows them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.bits import tensor_hash
from ..core.dtensors import local_of
from .differences import format_ranks, format_unnamed, ranks_by_value

_ENDS = 512  # elements at each end that are hashed: a row of zeros at one, as of a padding index, leaves the other
_SLICES = 64  # tokens, and features of each, by which it is decided whether an input is compared


class Part(NamedTuple):
    """The input of a call, of which each rank must hold another part.

    name     what it is, for an error
    tensor   this rank's part
    dims     of the tokens, and of the features if these are divided: it is not compared if it is the same along one
    advice   what to pass where every rank has it whole, a sentence
    """

    name: str
    tensor: Tensor
    dims: tuple[int, ...]
    advice: str


def part_of_tokens(name: str, x: Tensor, sequence_dim: int) -> Part:
    """The Part of an input that is this rank's tokens."""
    advice = "Pass this rank's tokens, which scatter_sequence cuts from whole ones, or leave out sequence_parallel"
    return Part(name, x, (sequence_dim,), advice)


def _has_values(tensor: Tensor) -> bool:
    """Fake tensors have none."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() > 0


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


def _stage_learns_shapes() -> bool:
    """Whether a stage of torch.distributed.pipelining calls its module for shapes alone, as before its first forward.

    It does so with torch.empty, where a rank may find what it has freed, as others do. It computes by
    forward_one_chunk.
    """
    callers, frame = set(), inspect.currentframe()
    while frame is not None and "torch.distributed.pipelining" in sys.modules:
        if frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage":
            callers.add(frame.f_code.co_name)
        frame = frame.f_back
    return bool(callers) and "forward_one_chunk" not in callers


@torch.no_grad()
def _input_hash(part: Part) -> int:
    """0 if the tokens that are not zeros, or the features, are all equal; or if nothing may have been written to it."""
    if _stage_learns_shapes():
        return 0
    sample = part.tensor.detach()
    for dim in part.dims:
        size = sample.shape[dim]
        sample = sample.index_select(dim, torch.linspace(0, size - 1, min(size, _SLICES), device=sample.device).long())
    for dim in part.dims:
        slices = sample.movedim(dim, 0).reshape(sample.shape[dim], -1)
        slices = slices[(slices != 0).any(1)]
        if not ((slices != slices[:1]) & ((slices == slices) | (slices[:1] == slices[:1]))).any():  # NaN equals nothing
            return 0
    return int(tensor_hash(part.tensor.detach()))


def part_numbers(weight: Tensor | None, part: Part | None, allowed: bool) -> list[int]:
    """The hashes of this rank's part of a parameter, of its full weight, and of its part of a call's input.

    0 for what is not compared. allowed: equal parts are no error.
    """

    def is_compared(tensor: Tensor) -> bool:
        return not allowed and not getattr(tensor, "shards_may_be_equal", False) and _has_values(local_of(tensor))

    numbers = [0, 0, 0]
    if weight is not None:
        numbers[0] = _part_hash(local_of(weight)) if is_compared(weight) else 0
        numbers[1] = source_of(weight)
    if part is not None and is_compared(part.tensor):
        numbers[2] = _input_hash(part)
    return numbers


def check_parts(
    rows: Sequence[Sequence[int]],
    layer: str,
    part: Part | None,
    weight: Tensor | None = None,
    name: str = "tp_group",
) -> None:
    """Whether the ranks' parts differ and are of one full weight, given each rank's `part_numbers`.

    An input must be the same on all ranks to be an error: two ranks may have the same tokens by chance.

    Raises:
        RuntimeError: the same on every rank; names the ranks whose parts are equal, or of different full weights.
    """
    parts, sources, inputs = (ranks_by_value((i, row[n]) for i, row in enumerate(rows) if row[n]) for n in range(3))
    named = getattr(weight, "name_in_model", None)
    layer = layer if named is None else f"{layer} ({named})"
    if equal := [ranks for ranks in parts.values() if len(ranks) > 1]:
        raise RuntimeError(
            f"the weight of {layer} is the same on {'; and on '.join(map(format_ranks, equal))} of tp_group, which "
            "must hold different parts of it: one rank's part has been copied to the others, or code of yours has "
            "drawn the same values on each. DistributedDataParallel, fully_shard and trainers must be given the data "
            "parallel ranks alone, without those of tp_group; initialise by init_method; load weights by "
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
    if part is not None and any(len(ranks) == len(rows) for ranks in inputs.values()):
        raise RuntimeError(
            f"{part.name} is the same on {format_ranks(range(len(rows)))} of {name}, each of which must pass another "
            f"part: what every rank has whole was passed for it. {part.advice}. If the parts are equal on purpose, set "
            "shards_may_be_equal = True, of the tensor or of the layer, on every rank"
        )
