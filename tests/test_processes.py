"""The library as a user starts it: one script, torchrun, the environment variable; digests compared between runs."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

SCRIPT = """
import pathlib, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import tp_invariant as tpi

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
mlp = torch.nn.Sequential(
    tpi.LayerNormLinear(96, 1536, parallel_mode="column", tp_group=mesh["tp"]),
    tpi.Linear(1536, 96, parallel_mode="row", tp_group=mesh["tp"]),
)
optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
data = torch.Generator().manual_seed(1)
for _ in range(3):
    loss = mlp(torch.randn(33, 96, generator=data)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    tpi.clip_grad_norm_(mlp.parameters(), 0.5, tp_group=mesh["tp"])
    optimizer.step()
digest = tpi.testing.digest((loss, tpi.testing.full_grads(mlp), tpi.testing.full_parameters(mlp)))
pathlib.Path(sys.argv[1], str(dist.get_rank())).write_text(digest)  # ranks' prints may run into each other
dist.destroy_process_group()
"""


def digests(script: Path, degree: int, **variables: str) -> set[str]:
    """The digests that the ranks of one torchrun write; a set, as they should all be one."""
    folder = script.parent / f"digests_{uuid.uuid4().hex}"
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if "TP_INVARIANT_MODE" not in k} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={degree}"]
    command += [str(script), str(folder)]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written.keys() == {str(rank) for rank in range(degree)}
    return set(written.values())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_separate_runs_agree_with_the_variable_set(script):
    runs = [digests(script, degree, TP_INVARIANT_MODE="1") for degree in (1, 3)]
    runs.append(digests(script, 2, NVTE_TP_INVARIANT_MODE="1"))
    assert len(set.union(*runs)) == 1


def test_separate_runs_differ_without_it(script):
    assert digests(script, 1) != digests(script, 2)
