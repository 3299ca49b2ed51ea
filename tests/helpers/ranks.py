"""Rank processes of the tests, on CPUs also where there are GPUs."""

import functools

from tp_invariant import testing

run_ranks = functools.partial(testing.run_ranks, device="cpu")
