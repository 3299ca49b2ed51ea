"""core/identity.py: names that are the same on every rank for the same function."""

import functools

import pytest
import torch

import tp_invariant as tpi
from tp_invariant.core.identity import identify
from tp_invariant.gemm.gemm_fn import bundled_gemm_fn
from tp_invariant.testing import RankError, run_ranks


class Tiles:
    def __init__(self, size: int) -> None:
        self.size = size

    def tp_invariant_identity(self) -> str:
        return f"tiles of {self.size}"

    def __call__(self, a, b, *, bias=None, out_dtype=None):
        return bundled_gemm_fn(a.device)(a, b, bias=bias, out_dtype=out_dtype)


def test_names():
    assert identify(torch.mm) == "torch.mm" or identify(torch.mm).endswith(".mm")
    assert identify(test_names) == f"{__name__}.test_names"
    assert identify(functools.partial(torch.mm, 1, out=None)) == f"partial({identify(torch.mm)}, 1, out=None)"
    assert identify(functools.partial(torch.mm, object())) == f"partial({identify(torch.mm)}, builtins.object)"
    assert identify(Tiles(8)) == f"{__name__}.Tiles declared as tiles of 8"


def called(tp_group, sizes):
    layer = tpi.Linear(8, 16, parallel_mode="column", tp_group=tp_group, gemm_fn=Tiles(sizes[tp_group.rank()]))
    with tpi.set_tp_invariant_mode(True):
        layer(torch.ones(2, 8))


def test_ranks_compare_what_is_declared():
    run_ranks(called, 2, (8, 8))
    with pytest.raises(RankError, match="tiles of 16"):
        run_ranks(called, 2, (8, 16))
