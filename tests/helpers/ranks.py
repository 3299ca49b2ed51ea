"""Rank processes of the tests, on CPUs also where there are GPUs."""

import contextlib
import functools
from unittest import mock

from tp_invariant import testing
from tp_invariant.testing import rank_pool

run_ranks = functools.partial(testing.run_ranks, device="cpu")


def nothing(tp_group):
    """The first case of a pool decides how many ranks it has."""


@contextlib.contextmanager
def pool_of_two():
    """A pool of its own. transformers' engine makes a group for each run, which torch names after its ranks alone where
    there are others, and ranks then find the addresses of the group before."""
    with mock.patch.object(rank_pool, "_pools", {}):
        run_ranks(nothing, 2)
        yield
        rank_pool.discard_pool("cpu")
