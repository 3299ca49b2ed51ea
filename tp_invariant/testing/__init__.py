"""Tools for users' tests: ranks on one machine, and checks that compare bits."""

from ..core.bits import assert_bitwise_equal, digest, raw_bytes
from .checks import (
    SHARE_VARIABLE,
    assert_slice_invariant,
    assert_tp_invariant,
    check_large_slices,
    default_device,
    full_grads,
    full_parameters,
    gpu_ranks,
    run_ranks,
    wide_randn,
)
from .rank_pool import RankError

__all__ = [
    "SHARE_VARIABLE",
    "RankError",
    "assert_bitwise_equal",
    "assert_slice_invariant",
    "assert_tp_invariant",
    "check_large_slices",
    "default_device",
    "digest",
    "full_grads",
    "full_parameters",
    "gpu_ranks",
    "raw_bytes",
    "run_ranks",
    "wide_randn",
]
