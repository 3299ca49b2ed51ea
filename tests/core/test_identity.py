"""A gemm_fn that declares an identity: its data may then differ between ranks, but not its code and its identity."""

import functools
import re

import pytest
import torch

import tp_invariant as tpi
from tp_invariant.core.identity import identify
from tp_invariant.kernels.gemm.reference import matmul
from tp_invariant.testing import RankError, run_ranks


class RankGemm:
    """Holds its rank and counts its calls."""

    def __init__(self, rank, declared=None):
        self.rank, self.calls = rank, 0
        if declared is not None:
            self.tp_invariant_identity = declared

    def __call__(self, a, b, *, bias=None, out_dtype=None):
        self.calls += 1
        return matmul(a, b, bias=bias, out_dtype=out_dtype)


class MethodGemm(RankGemm):
    def tp_invariant_identity(self):
        return "tiles", 128, torch.float32


def enclosing(rank, declared=None):
    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        assert rank >= 0
        return matmul(a, b, bias=bias, out_dtype=out_dtype)

    if declared is not None:
        gemm_fn.tp_invariant_identity = declared
    return gemm_fn


def given(rank, declared=None):
    def gemm_fn(a, b, *, rank, bias=None, out_dtype=None):
        return matmul(a, b, bias=bias, out_dtype=out_dtype)

    partial = functools.partial(gemm_fn, rank=rank)
    if declared is not None:
        partial.tp_invariant_identity = declared
    return partial


def method(rank, declared=None):
    return RankGemm(rank, declared).__call__


KINDS = (RankGemm, enclosing, given, method)


def forward(tp_group, make, *declared):
    """Two forwards with make(rank[, declared of this rank]); what every rank raised."""
    rank = tp_group.rank()
    gemm_fn = make(rank, *declared[rank : rank + 1])
    torch.manual_seed(0)
    layer = tpi.Linear(16, 8, parallel_mode="row", tp_group=tp_group, gemm_fn=gemm_fn)
    with tpi.set_tp_invariant_mode(True):
        return [layer(torch.ones(3, 16 // tp_group.size())) for _ in range(2)][1]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_rank_number_is_refused_unless_an_identity_is_declared(make):
    (alone,) = run_ranks(forward, 1, make)
    for y in run_ranks(forward, 2, make, "my_gemm 3", "my_gemm 3"):
        tpi.testing.assert_bitwise_equal(y, alone)
    for declared, text in (
        ((), r"gemm_fn is .* on rank 0; .* on rank 1"),
        (("my_gemm 3", "my_gemm 4"), r"declared as 'my_gemm 3'. on rank 0; .*declared as 'my_gemm 4'. on rank 1"),
        ((None, "my_gemm 3"), r" on rank 0; .*declared as 'my_gemm 3'. on rank 1"),
    ):
        with pytest.raises(RankError) as caught:
            run_ranks(forward, 2, make, *declared)
        errors = list(map(str, caught.value.errors.values()))
        assert len(errors) == 2 and len(set(errors)) == 1 and re.search(text, errors[0]), errors
        if make is not given:  # whose arguments the error shows
            advised = errors[0].count("(declare tp_invariant_identity if that may differ)")
            assert advised == (0 if len(declared) == 2 and declared[0] else 2 - bool(declared))


def test_a_method_may_declare_it():
    assert run_ranks(forward, 2, MethodGemm)[0].shape == (3, 8)
    assert identify(MethodGemm(0)).endswith(" declared as builtins.tuple('tiles', 128, torch.float32)")
    assert identify(MethodGemm(0)) == identify(MethodGemm(1)) != identify(RankGemm(0))


def test_code_and_name_are_still_compared():
    class RankGemm:  # of another name and other code
        tp_invariant_identity = "v"

        def __call__(self, a, b, *, bias=None, out_dtype=None):
            return matmul(a, b)

    assert identify(globals()["RankGemm"](0, "v")) != identify(RankGemm())
    one, other = (lambda a: a + 1), (lambda a: a + 2)
    one.tp_invariant_identity = other.tp_invariant_identity = "v"
    assert identify(one) != identify(other)


def test_it_stands_for_what_a_value_inside_another_holds():
    assert identify(functools.partial(matmul, RankGemm(0, "v"))) == identify(
        functools.partial(matmul, RankGemm(1, "v"))
    )
    assert identify(enclosing(RankGemm(0))) != identify(enclosing(RankGemm(1)))


def test_what_declares_nothing():
    class AnyName:  # has an attribute of any name
        def __getattr__(self, name):
            return name

        def __call__(self):
            pass

    for fn in (AnyName(), MethodGemm, RankGemm(0)):  # of a class, what is found is a method of its instances
        assert "declared" not in identify(fn)
    none = RankGemm(0)
    none.tp_invariant_identity = None
    assert "holding" in identify(none)


def test_an_identity_must_be_hashable():
    with pytest.raises(
        TypeError, match=r"tp_invariant_identity of a .*RankGemm is a list, which cannot be hashed: make"
    ):
        identify(RankGemm(0, ["v"]))
