"""The choice of owner_map="auto": the same on every rank, it considers what is cached, and prints its reasons."""

import itertools

import pytest
import torch

from tp_invariant.gemm import cost_model
from tp_invariant.gemm.cost_model import Costs, Problem, choose, costs_of, explain

H200 = costs_of("NVIDIA H200")
SIZES = [
    Problem(t, n, k, p, scatter)
    for t, n, k, p, scatter in itertools.product((1, 64, 8192), (64, 4096), (64, 12288), (2, 8), (False, True))
]


def pick(problem, costs=H200, **changes):
    return choose(problem._replace(**changes), costs)


@pytest.mark.parametrize("costs", [H200, costs_of("cpu")], ids=["h200", "other"])
def test_a_cached_weight_never_raises_the_cost_of_its_map(costs):
    changed = 0
    for problem, ahead in itertools.product(SIZES, (False, True)):
        none, rows, cols, both = (
            pick(problem, costs, ahead=ahead, rows_cached=r, cols_cached=c)
            for r, c in ((False, False), (True, False), (False, True), (True, True))
        )
        assert {none, rows, cols, both} <= {"rows", "cols"}
        assert ("rows", "cols") not in [(none, rows), (cols, both)]
        assert ("cols", "rows") not in [(none, cols), (rows, both)]
        changed += len({none, rows, cols, both}) > 1
    assert changed, "the control: somewhere the cache decides"


def test_more_tokens_favour_gathering_the_weight():
    for ahead in (False, True):
        problem = Problem(1, 4096, 4096, 8, scatter_rows=True, ahead=ahead)
        picks = [pick(problem, rows=t) for t in (1, 8, 64, 512, 4096, 32768, 262144)]
        assert picks == sorted(picks), "once rows pays for itself it does so for every larger number of tokens"
        assert (picks[0], picks[-1]) == ("cols", "rows")


def test_decoding_picks_cached_columns():
    """For one or two rows, reading N/P columns of the weight is faster than reading all of it."""
    for tokens, world in itertools.product((1, 4, 16, 64), (2, 4, 8)):
        problem = Problem(tokens, 4096, 12288, world, scatter_rows=False, ahead=False)
        assert pick(problem, cols_cached=True) == pick(problem, kept=True) == "cols"
        # also where only the whole is there as yet: moving the columns once counts for nothing
        assert pick(problem, kept=True, rows_cached=True) == "cols"


def test_training_on_nvlink_gathers_weights_that_hide():
    for cols, k in ((4096, 12288), (4096, 24576), (4096, 4096), (4096, 6144)):
        assert pick(Problem(8192, cols, k, 4, scatter_rows=True)) == "rows"


def test_costs_by_device():
    assert costs_of("NVIDIA H200").name == costs_of("NVIDIA H200 NVL").name == "NVIDIA H200"
    assert costs_of(torch.device("cpu")) == costs_of("anything else") == costs_of("cpu")
    mine = Costs("mine", gather=1.0, exchange=1e9, latency=0.0, memory=1e9, flops=1e9)
    problem = Problem(8192, 64, 64, 2, scatter_rows=True)
    assert (pick(problem), pick(problem, mine, ahead=False)) == ("rows", "rows")
    assert pick(Problem(64, 8192, 64, 2, scatter_rows=True), mine, ahead=False) == "cols"


def test_the_terms_add_up_and_are_printed():
    problem = Problem(8192, 4096, 12288, 4, scatter_rows=True, ahead=False)
    terms = cost_model._terms(problem, H200)
    # 4096 x 12288 weight, three quarters of it from others, at 300 GB/s, and 12 us; ahead of its use at 350 GB/s
    assert terms["rows"].move_b == pytest.approx(12 + 4096 * 12288 * 2 * 0.75 / 300e3)
    few = problem._replace(rows=64, ahead=True)
    few_terms = cost_model._terms(few, H200)["rows"]
    assert few_terms.move_b == pytest.approx(12 + 4096 * 12288 * 2 * 0.75 / 350e3 - 2.2 * few_terms.gemm)
    # an exchange of its rows of A, which the weight's gradient hides
    assert terms["rows"].move_a == pytest.approx(12 + 2048 * 12288 * 2 * 0.75 / 250e3)
    assert cost_model._terms(problem._replace(overlapped=True), H200)["rows"].move_a == 0.0
    assert terms["rows"].move_c == 0.0
    assert terms["rows"].gemm == pytest.approx(2 * 2048 * 4096 * 12288 / 700e6)
    text = explain(problem, H200)
    for name, t in terms.items():
        assert t.total == t.move_a + t.move_b + t.gemm + t.move_c
        assert f"{name}: {t.total:8.1f} us" in text
    assert f"auto: {choose(problem, H200)}" in text
    assert "gathered)" in text
    assert "gathered ahead)" in explain(problem._replace(ahead=True), H200)
    assert cost_model._terms(problem._replace(world=1), H200)["rows"].move_a == 0.0
