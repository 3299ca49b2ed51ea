"""Cases whose results must have the same bytes on every rank of a degree and in a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tp_invariant import testing


def run_all(tp_group: Any, run: Callable[..., Any], cases: Sequence[Any]) -> list[Any]:
    return [run(tp_group, case) for case in cases]


def assert_as_alone(
    run: Callable[..., Any],
    cases: Sequence[Any],
    degree: int,
    device: str = "cpu",
    alone: Callable[[Any], Any] = lambda case: case,
    wanted: Callable[[Any], Any] | None = None,
) -> None:
    """run(tp_group, case) of every case gives on every rank of `degree` the bytes of run(None, alone(case)) here.

    wanted: returns instead what is to be compared; of two dictionaries what a rank has.
    """
    if wanted is None:
        expected = run_all(None, run, list(map(alone, cases)))
    else:
        expected = list(map(wanted, cases))
    for rank, results in enumerate(testing.run_ranks(run_all, degree, run, cases, device=device)):
        for case, result, want in zip(cases, results, expected, strict=True):
            try:
                assert result or not wanted
                testing.assert_bitwise_equal(result, {name: want[name] for name in result} if wanted else want)
            except AssertionError as error:
                raise AssertionError(f"rank {rank} of {degree}, {case}: {error}") from None
