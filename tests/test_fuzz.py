"""Random composed models at TP=1, 2, 3 and 4: the same bytes on every rank, and right.

A few fixed ones here; `pytest tests/test_fuzz.py --fuzz 500 --fuzz-seed 7` runs as many others, on GPUs with
`--fuzz-device cuda`; `-k context` those with a cp dim alone. A failing one is shrunk and printed as a script.
"""

import collections
import os
import time

import fuzz_context
import fuzz_plans
import fuzz_programs
import fuzz_runner
import pytest
import torch

from tp_invariant import testing

FEW = 30
FEW_PLANS = 12
FEW_WITH_CONTEXT = 4


@pytest.fixture(scope="module")
def one_thread():
    """With small products, several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _options(config, few):
    count, number = config.getoption("--fuzz"), config.getoption("--fuzz-seed")
    return (few, 0) if count is None else (count, int(time.time()) if number is None else number)


def _say(capsys, text):
    with capsys.disabled():
        print(f"\n{text}", flush=True)


def _run_models(request, capsys, device):
    count, number = _options(request.config, FEW)
    start = time.time()
    try:
        gpus = testing.gpu_ranks() if device == "cuda" else 4
        degrees = None if gpus >= 4 else tuple(range(2, gpus + 1))
        counts = fuzz_runner.fuzz(fuzz_programs.programs(degrees=degrees), count, number, device)
    except fuzz_runner.Found as error:
        path = os.path.join(request.config.getoption("--fuzz-scripts"), f"fuzz_{number}.py")
        with open(path, "w") as file:
            file.write(error.script)
        pytest.fail(f"--fuzz-seed {number}: {error}\n\n{error.script}\nThis script is in {path}", pytrace=False)
    if request.config.getoption("--fuzz") is not None:
        _say(capsys, f"--fuzz-seed {number}: {counts}, in {time.time() - start:.0f} s")
    assert counts.programs
    assert counts.tensors > 20 * counts.programs
    assert counts.off > counts.programs / 4  # the negative control: stock tensor parallelism is told from this


@pytest.mark.fast
def test_composed_models(request, capsys, one_thread):
    device = request.config.getoption("--fuzz-device")
    if device == "cuda":
        pytest.skip("--fuzz-device cuda: see test_composed_models_on_gpus")
    _run_models(request, capsys, "cpu")


@pytest.mark.gpu
def test_composed_models_on_gpus(request, capsys):
    if testing.gpu_ranks() < 2:
        pytest.skip("needs two GPUs")
    _run_models(request, capsys, "cuda")


def test_composed_models_with_context_parallelism(request, capsys, one_thread):
    """In layouts (cp, tp) of up to four ranks, compared with one rank that has as many chunks of the sequence."""
    count, number = _options(request.config, FEW_WITH_CONTEXT)
    start = time.time()
    try:
        counts = fuzz_runner.fuzz(fuzz_context.programs(), count, number, script=fuzz_context.script)
    except fuzz_runner.Found as error:
        pytest.fail(f"--fuzz-seed {number}: {error}\n\n{error.script}", pytrace=False)
    if request.config.getoption("--fuzz") is not None:
        _say(capsys, f"--fuzz-seed {number}: {counts}, in {time.time() - start:.0f} s")
    assert counts.programs == count
    assert counts.tensors > 20 * counts.programs
    assert counts.off > counts.programs / 4


@pytest.mark.parametrize("strategy, few", [("plans", FEW_PLANS), ("plans_with_context", FEW_PLANS)])
def test_random_plans(request, capsys, one_thread, strategy, few):
    """`parallelize` is right or refuses, whatever the plan."""
    count, number = _options(request.config, few)
    counts, start = collections.Counter(), time.time()
    try:
        fuzz_runner.fuzz(
            getattr(fuzz_plans, strategy)(), count, number, "cpu", check=fuzz_plans.check_plans,
            script=fuzz_plans.script, counts=counts,
        )  # fmt: skip
    except fuzz_runner.Found as error:
        pytest.fail(f"--fuzz-seed {number}: {error}\n\n{error.script}", pytrace=False)
    if request.config.getoption("--fuzz") is not None:
        _say(capsys, f"--fuzz-seed {number}: {sum(counts.values())} plans, {dict(counts)}, {time.time() - start:.0f} s")
    assert counts["right"] >= 2
    assert counts["refused"]


@pytest.mark.parametrize("kind", fuzz_programs.DRIFTS)
def test_ranks_that_make_different_calls(request, capsys, one_thread, kind):
    """If one rank makes another call, every rank gets an error, not wrong numbers or an endless wait."""
    count, number = _options(request.config, 2)
    programs = fuzz_runner.collect(fuzz_programs.drifting(kind), count, number)
    silent = []
    for program in programs:
        outcome = fuzz_runner.drift_outcome(program)
        if outcome is not None:
            silent.append((outcome, program))
    assert programs
    if silent:
        smallest = min(silent, key=lambda found: len(found[1]["ops"]))
        pytest.fail(
            f"{len(silent)} of {len(programs)} programs: {smallest[0]}\n\n{fuzz_runner.script(smallest[1])}",
            pytrace=False,
        )


def test_a_failing_program_is_shrunk_to_a_script(one_thread, tmp_path):
    """With a check that refuses every program with a row-parallel layer: the smallest has only that layer."""
    import subprocess
    import sys

    def check(programs, device, counts):
        return [["row-parallel"] * any(layer.get("mode") == "row" for layer in p["layers"]) for p in programs]

    with pytest.raises(fuzz_runner.Found) as found:
        fuzz_runner.fuzz(fuzz_programs.programs(), 20, 0, "cpu", check=check)
    program = found.value.program
    assert len(program["ops"]) <= 3
    path = tmp_path / "shrunk.py"
    path.write_text(found.value.script.replace("def case(r):", "def case(r):\n    print('building')"))
    # a plain interpreter, without the test suite's folder on its path
    done = subprocess.run([sys.executable, str(path), "--one"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "building" in done.stdout
