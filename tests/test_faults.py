"""A rank dies in the middle of a step: the others fail at once with its name, and a restart reaches the same bits."""

import itertools
import multiprocessing
import os
import re
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import fault_worker
import pytest
import torch

import tp_invariant as tpi
from tp_invariant.diagnostics.diff import compare, read_log

TIMEOUT = 480  # of the group; gloo's ranks must fail long before


ranks = multiprocessing.get_context("forkserver")  # its server imports once what each rank needs: a second or more
ranks.set_forkserver_preload([fault_worker.__name__, "torch._dynamo"])  # the second by torch's optimizers


@pytest.fixture(scope="module", autouse=True)
def server():
    """The server starts here, as it takes over the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def run(world, *runs, **options):
    """[(exit status, stderr, seconds until its end)] of each rank of processes that do `runs`, one after another."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = {"device": "cpu", "timeout": TIMEOUT, **options, "folder": str(options["folder"]), "runs": runs}
    environment = {}
    if options["device"] == "cuda":  # waiting is on the host, where it can be explained; see comm/liveness.py
        environment["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    outputs = [Path(options["folder"], f"stderr_{rank}") for rank in range(world)]
    start, ends = time.monotonic(), [0.0] * world
    processes = []
    try:
        for rank, output in enumerate(outputs):
            args = (str(output), environment, rank, world, port, options)
            processes.append(ranks.Process(target=fault_worker.in_a_process, args=args))
            processes[-1].start()
        while not all(ends):
            for rank, process in enumerate(processes):
                if not ends[rank] and process.exitcode is not None:
                    ends[rank] = time.monotonic() - start
            assert time.monotonic() - start < 500, "a rank hangs"
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        (process.exitcode, out.read_text(), end) for process, out, end in zip(processes, outputs, ends, strict=True)
    ]


def check_deaths(results, who, within):
    assert results[who][0] == -9
    for rank, (status, text, end) in enumerate(results):
        if rank == who:
            continue
        assert status == 1, text
        errors = [line for line in text.splitlines() if "tp_invariant.comm.liveness.DeadRankError: " in line]
        assert len(errors) == 1, text
        named = rf"rank {who} \(global rank {who}, process \d+ on [^)]+\) has ended"
        assert re.search(named, errors[0]), errors[0]
        assert f"failed on rank {rank} of {len(results)}" in errors[0]
        assert "restart all ranks from the last checkpoint" in errors[0]
        assert end - results[who][2] < within, f"rank {rank} ended {end - results[who][2]:.1f} s after"


def finish(world, *runs, **options):
    for rank, (status, text, _) in enumerate(run(world, *runs, **options)):
        assert status == 0, f"rank {rank}: {text}"


def train_alone(tp_group, runs, common):
    device = torch.device(common.get("device", "cpu"))
    with tpi.set_tp_invariant_mode(True):
        for one in runs:
            fault_worker.train(tp_group, device, {**common, **one})


def restart_after_a_death(folder, world, who, within, **common):
    """Killed in step 3, after the checkpoint of step 2, and resumed at TP=2; compared with TP=1 without faults."""
    common.update(folder=folder, steps=6)
    check_deaths(run(world, dict(log="a.log", save=True, die_at=3, who=who), **common), who, within)
    assert sorted(read_log(folder / "a.log").steps) == [0, 1, 2], "the step in which it died was not logged"
    alone = [dict(log="straight.log"), dict(log="wrong.log", resume=True, pretend=1)]
    tpi.testing.run_ranks(train_alone, 1, alone, common, device=common.get("device", "cpu"))
    finish(2, dict(log="a.log", resume=True), **common)
    straight = read_log(folder / "straight.log")
    text, same = compare(read_log(folder / "a.log"), straight)
    assert same and text.endswith("identical for 6 steps, 0 to 5"), text
    text, same = compare(read_log(folder / "wrong.log"), straight)
    assert not same and "step 3 differs" in text, text


def test_a_rank_dies_and_the_run_is_restarted(tmp_path):
    restart_after_a_death(tmp_path, world=3, who=1, within=TIMEOUT / 3)


def test_the_rank_that_holds_the_store_dies(tmp_path):
    """Rank 0's death ends the job's store, which nothing here needs; with the mode off, in a reduce-scatter."""
    results = run(2, dict(log="a.log", die_at=1, who=0), folder=tmp_path, steps=2, mode=False)
    check_deaths(results, 0, within=TIMEOUT / 3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_dies_on_nccl(tmp_path):
    restart_after_a_death(tmp_path, world=2, who=1, within=60, device="cuda", timeout=20)


def ended(target, arguments):
    """The exit statuses of processes that call target with these arguments."""
    processes = [ranks.Process(target=target, args=args) for args in arguments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(500)
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def test_a_rank_that_never_makes_the_first_call_is_named(tmp_path):
    """Whether it is alive or has ended. All other tests of ranks are the control."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    assert ended(fault_worker.before_the_first_call, [(str(tmp_path), rank, port) for rank in range(3)]) == [0, 3, 0]
    for rank, what in itertools.product((0, 2), ("stays away", "ends")):
        text = Path(tmp_path, f"{what} {rank}").read_text()
        assert text.startswith(
            f"rank {rank} of tp_group has waited for rank 1 (global rank 1), which has not come to the "
            "group's first call: it has ended before, or makes no such call"
        ), text


def test_a_hook_on_one_rank_alone_and_a_dead_rank_are_named(tmp_path):
    arguments = [(str(tmp_path), rank) for rank in range(3)]
    assert ended(fault_worker.a_hook_alone_and_a_death, arguments) == [0, 0, -9]
    alone = Path(tmp_path, "alone").read_text()
    assert alone.startswith(
        "rank 0 of dp_group has waited for rank 1 (global rank 1), which has not come to the group's first call"
    )
    assert "imed out" in alone
    for rank in range(2):
        text = Path(tmp_path, f"died {rank}").read_text()
        assert re.match(r"DeadRankError: rank 1 \(global rank 2, process \d+ on [^)]+\) has ended: ", text), text
