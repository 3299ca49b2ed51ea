"""The fuzzer finds defects: each of these, planted into the ranks, within a bounded number of random programs."""

import fuzz_planted
import fuzz_programs
import fuzz_runner
import pytest
import torch

import tp_invariant as tpi

MOST = 60
BATCH = 12


def _planted(tp_group, name, programs):
    with fuzz_planted.AT_DEGREES[name]():
        return fuzz_runner.at_degree(tp_group, programs, True, "cpu")


@pytest.fixture(scope="module")
def programs():
    """(programs, {index: the result at TP=1}): the same for all defects, of degree 2 for speed."""
    chosen = fuzz_runner.collect(fuzz_programs.programs(most=8, degrees=(2,)), MOST, 1)
    single = {}
    for found in tpi.testing.run_ranks(fuzz_runner.alone, 2, chosen, "cpu", False, False, device="cpu"):
        single |= found
    assert not any(one.error for one in single.values())
    return chosen, single


@pytest.mark.parametrize("name", fuzz_planted.AT_DEGREES)
def test_a_planted_defect_is_found(programs, name):
    chosen, single = programs
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
