"""The fuzzer finds defects: each of these, planted into the ranks, within a bounded number of random programs."""

import fuzz_plans
import fuzz_planted
import fuzz_programs
import fuzz_runner
import pytest
import torch

import tp_invariant as tpi
from tp_invariant.testing.rank_pool import discard_pool

DRAWN = 200
MOST = 60
BATCH = 12


def _planted(tp_group, name, programs):
    with fuzz_planted.AT_DEGREES[name]():
        return fuzz_runner.at_degree(tp_group, programs, True, "cpu")


def _alone(programs):
    """{index: the result at TP=1}"""
    single = {}
    for found in tpi.testing.run_ranks(fuzz_runner.alone, 2, programs, "cpu", False, False, device="cpu"):
        single |= found
    assert not any(one.error for one in single.values())
    return single


@pytest.fixture(scope="module")
def drawn():
    """The same for all defects, of degree 2 for speed."""
    return fuzz_runner.collect(fuzz_programs.programs(most=8, degrees=(2,)), DRAWN, 1)


@pytest.fixture(scope="module")
def programs(drawn):
    return drawn[:MOST], _alone(drawn[:MOST])


@pytest.mark.parametrize("name", fuzz_planted.AT_DEGREES)
def test_a_planted_defect_is_found(drawn, request, name):
    if name in fuzz_planted.NEEDS:
        chosen = [program for program in drawn if fuzz_planted.NEEDS[name](program)][:BATCH]
        single = _alone(chosen)
    else:
        chosen, single = request.getfixturevalue("programs")
    for start in range(0, len(chosen), BATCH):
        some = chosen[start : start + BATCH]
        try:
            ranks = tpi.testing.run_ranks(_planted, 2, name, some, device="cpu")
        except tpi.testing.RankError as error:
            assert "program" in str(error)  # a library that checks itself says so, with the program
            return
        for results in ranks:
            if any(result != single[start + index].on for index, result in enumerate(results)):
                return
    pytest.fail(f"{name}: not found in {len(chosen)} programs")


def _plans_unchecked(tp_group, programs):
    with fuzz_planted.plans_are_not_checked():
        return fuzz_plans.run_plans(tp_group, programs)


def test_plans_that_nobody_checks_are_found():
    """The control of test_fuzz.py::test_random_plans."""
    drawn = fuzz_runner.collect(fuzz_plans.plans(), DRAWN, 0)
    chosen = [program for program in drawn if program["degree"] == 2]
    for start in range(0, len(chosen), BATCH):
        some = chosen[start : start + BATCH]
        for outcome, lines in tpi.testing.run_ranks(_plans_unchecked, 2, some, device="cpu")[0]:
            if outcome == "wrong" and any("from the unsharded model's" in line for line in lines):
                return
    pytest.fail(f"not found in {len(chosen)} plans")


def test_without_a_planted_defect_nothing_is_found(programs):
    chosen, single = programs
    for results in tpi.testing.run_ranks(fuzz_runner.at_degree, 2, chosen[:BATCH], True, "cpu", device="cpu"):
        assert [r == single[i].on for i, r in enumerate(results)] == [True] * BATCH


def test_what_is_wrong_at_every_degree_is_found(programs):
    """By the comparison with float64: all degrees give the same wrong bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chosen = [p for p in programs[0] if p["dtype"] == "float32"]
    found = []
    for program in chosen:
        if not any(layer["kind"] == "norm" or layer.get("norm") for layer in program["layers"]):
            continue
        with fuzz_planted.results_off_by_a_thousandth():
            results = fuzz_runner._run(None, program, True)
        found += fuzz_runner.wrong(program, fuzz_runner.errors_of(program, results))
        if found:
            break
    torch.set_num_threads(threads)
    assert found


def _drifts_unseen(tp_group, programs):
    with fuzz_planted.ranks_are_not_compared():
        return [fuzz_runner.drift_on_rank(tp_group, program) for program in programs]


def test_ranks_that_nobody_compares_are_found():
    """The control of test_fuzz.py::test_ranks_that_make_different_calls, which asks for an error on every rank."""
    chosen = {}
    for kind in fuzz_programs.DRIFTS:
        drawn = fuzz_runner.collect(fuzz_programs.drifting(kind), 20, 0)
        chosen[kind] = [program for program in drawn if program["degrees"] == [2]][:4]
    kinds = sorted(chosen, key="order".__eq__)  # last, since the ranks may be out of step with each other after it
    programs = [program for kind in kinds for program in chosen[kind]]
    silent = {kind: 0 for kind in kinds}
    for program, *errors in zip(
        programs, *tpi.testing.run_ranks(_drifts_unseen, 2, programs, device="cpu"), strict=True
    ):
        silent[program["drift"]["kind"]] += None in errors
    discard_pool("cpu")
    assert all(silent.values()), silent
