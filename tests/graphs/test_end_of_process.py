"""A process that has captured layers ends: destroy_process_group waits for graphs that hold NCCL's kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import on_gpus

WORKER = Path(__file__).parents[1] / "helpers" / "graphs_end_worker.py"


@pytest.mark.parametrize("mode", ["0", "1"])
@pytest.mark.parametrize("transport", ["auto", "nccl"])
@pytest.mark.parametrize("ranks", on_gpus(2, 4, 8))
def test_a_process_ends_after_its_graphs_were_removed(ranks, transport, mode):
    """Also where something refers to what a graph has returned. With the mode off, collectives of NCCL add."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(WORKER)]
    env = {**os.environ, "TP_INVARIANT_MODE": mode, "TP_INVARIANT_TRANSPORT": transport}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.count("ended True") == ranks
