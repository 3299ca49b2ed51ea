"""A rank dies in the middle of a step: the others fail at once with its name, and a restart reaches the same bits."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import fault_worker
import pytest
import torch

import tp_invariant as tpi
from tp_invariant.diagnostics.diff import compare, read_log

TIMEOUT = 480  # of the group; gloo's ranks must fail long before


def run(world, *runs, blocking_wait=True, **options):
    """[(exit status, stderr, seconds until its end)] of each rank of processes that do `runs`, one after another."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = {"device": "cpu", "timeout": TIMEOUT, **options, "folder": str(options["folder"]), "runs": runs}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if options["device"] == "cuda":  # whether waiting is on the host, where it can be explained; see comm/liveness.py
        environment["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocking_wait))
        environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # the watchdog waits for four times that: a minute
    # into files: a full pipe would hold up a rank
    outputs = [Path(options["folder"], f"stderr_{rank}") for rank in range(world)]
    start, ends = time.monotonic(), [0.0] * world
    processes = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, fault_worker.__file__, str(rank), str(world), str(port), json.dumps(options)]
            with output.open("w") as file:
                processes.append(subprocess.Popen(command, env=environment, stderr=file))
        while not all(ends):
            for rank, process in enumerate(processes):
                if not ends[rank] and process.poll() is not None:
                    ends[rank] = time.monotonic() - start
            assert time.monotonic() - start < 500, "a rank hangs"
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        (process.returncode, out.read_text(), end) for process, out, end in zip(processes, outputs, ends, strict=True)
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


def check_watch(results, who, within):
    """For ranks that torch's watchdog ends: its message comes last, and the library's before it."""
    assert results[who][0] == -9
    for rank, (status, text, end) in enumerate(results):
        if rank == who:
            continue
        assert status != 0, text
        before = text.partition("collective operation timeout")[0]
        named = (
            rf"^tp_invariant: rank {who} \(global rank {who}, process \d+ on [^)]+\) has ended\. .* time-out of 20 s "
        )
        assert len(re.findall(named, before, re.MULTILINE)) == 1, text
        assert end - results[who][2] < within, f"rank {rank} ended {end - results[who][2]:.1f} s after"


def finish(world, *runs, **options):
    for rank, (status, text, _) in enumerate(run(world, *runs, **options)):
        assert status == 0, f"rank {rank}: {text}"
        assert "tp_invariant: rank" not in text, text  # none that ended well is said to have died


def train_alone(tp_group, runs, common):
    device = torch.device(common.get("device", "cpu"))
    with tpi.set_tp_invariant_mode(True):
        for one in runs:
            fault_worker.train(tp_group, device, {**common, **one})


def restart_after_a_death(folder, world, who, within, check=check_deaths, **common):
    """Killed in step 3, after the checkpoint of step 2, and resumed at TP=2; compared with TP=1 without faults."""
    common.update(folder=folder, steps=6)
    check(run(world, dict(log="a.log", save=True, die_at=3, who=who), **common), who, within)
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
@pytest.mark.parametrize("blocking_wait, check", [(True, check_deaths), (False, check_watch)])
def test_a_rank_dies_on_nccl(tmp_path, blocking_wait, check):
    common = dict(device="cuda", timeout=20, blocking_wait=blocking_wait)
    restart_after_a_death(tmp_path, world=2, who=1, within=60, check=check, **common)


# Rank 1 does not come to the first call of a group, while it lives; then, in another group, it ends before the call.
# The groups' time-out, which passes, is short; what takes longer on a busy machine is done before it counts.
BEFORE_THE_FIRST = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import tp_invariant as tpi
from tp_invariant.consistency.environment import environment_facts

rank, port = int(sys.argv[1]), int(sys.argv[2])
patience = timedelta(seconds=300)
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=patience)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
groups = {what: dist.new_group([0, 1, 2]) for what in ("stays away", "ends")}
tpi.Linear(12, 12)(torch.ones(4, 12))
environment_facts(torch.device("cpu"))
for what, group in groups.items():
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=10), group)
    dist.barrier()
    if rank == 1 and what == "ends":
        sys.exit(3)
    if rank != 1:
        layer = tpi.Linear(12, 12, parallel_mode="row", tp_group=group)
        try:
            layer(torch.ones(4, 4))
            print(what, "nothing was raised")
        except RuntimeError as error:
            print(what, error)
    store.set(f"{what} {rank}", "")
    store.wait([f"{what} 0", f"{what} 2"], patience)  # rank 0 has the store
"""


def test_a_rank_that_never_makes_the_first_call_is_named():
    """Whether it is alive or has ended. All other tests of ranks are the control."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    commands = [[sys.executable, "-c", BEFORE_THE_FIRST, str(rank), str(port)] for rank in range(3)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TP_INVARIANT_MODE": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    try:
        said, texts = zip(*[process.communicate(timeout=500) for process in processes], strict=True)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 3, 0], texts
    for rank in (0, 2):
        lines = said[rank].splitlines()
        assert len(lines) == 2, said[rank]
        for line, what in zip(lines, ("stays away", "ends"), strict=True):
            assert line.startswith(
                f"{what} rank {rank} of tp_group has waited for rank 1 (global rank 1), which has not come to the "
                "group's first call: it has ended before, or makes no such call"
            ), line
