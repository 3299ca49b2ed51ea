"""Finds values that differ between the ranks of a group, and formats for messages which ranks hold which value."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ..comm.collectives import Group
from ..comm.wire import gather_objects

T = TypeVar("T", bound=Hashable)
NOTHING = "nothing"  # the value for a rank that does not have the name


def mark(value: Any) -> int:
    """64 bits that differ where repr(value) does."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


def ranks_by_value(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """The ranks that hold each value, given (rank, value)."""
    found: dict[T, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return found


def differences(everyone: Sequence[Mapping[str, Hashable]]) -> dict[str, dict[Any, list[int]]]:
    """The ranks that hold each value, for every name whose value is not the same on all; given each rank's values."""
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    found = {name: ranks_by_value(enumerate(theirs.get(name, NOTHING) for theirs in everyone)) for name in names}
    return {name: values for name, values in found.items() if len(values) > 1}


def gather_differences(own: Mapping[str, Hashable], group: Group) -> dict[str, dict[Any, list[int]]]:
    """`differences` between the ranks' `own`, the same on every rank. A collective."""
    return differences(gather_objects(own, group))


def format_ranks(ranks: Iterable[int]) -> str:
    """How messages name ranks: "rank 0, 2"."""
    return f"rank {', '.join(map(str, ranks))}"


def format_values(values: Mapping[Any, Iterable[int]]) -> str:
    """How messages say which ranks hold which value: "8 on rank 0, 2; 16 on rank 1"."""
    return "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in values.items())


def format_unnamed(values: Mapping[Any, Iterable[int]]) -> str:
    """The same without the values, for hashes and the like: "one value on rank 0, 2, another on rank 1"."""
    return "one value on " + ", another on ".join(map(format_ranks, values.values()))
