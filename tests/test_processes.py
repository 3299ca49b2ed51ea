"""The library as a user starts it: one script, torchrun, the environment variable; digests compared between runs.

Few runs, as each starts interpreters: a run trains with the variable that it was started with, then without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPT = """
import copy, os, pathlib, sys
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
start = copy.deepcopy(mlp.state_dict())

def train():
    mlp.load_state_dict(start)
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        loss = mlp(torch.randn(33, 96, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        tpi.clip_grad_norm_(mlp.parameters(), 0.5, tp_group=mesh["tp"])
        optimizer.step()
    return tpi.testing.digest((loss, tpi.testing.full_grads(mlp), tpi.testing.full_parameters(mlp)))

with_it = train()
del os.environ[sys.argv[2]]
text = f"{with_it} {train()}"
pathlib.Path(sys.argv[1], str(dist.get_rank())).write_text(text)  # ranks' prints may run into each other
dist.destroy_process_group()
"""


def digests(script: Path, degree: int, variable: str) -> tuple[str, str]:
    """The digests after training with one torchrun, with the variable and without it; all ranks must agree."""
    folder = script.parent / f"digests_{variable}"
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if "TP_INVARIANT_MODE" not in k}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={degree}"]
    done = subprocess.run(
        [*command, str(script), str(folder), variable],
        env=environment | {variable: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written.keys() == {str(rank) for rank in range(degree)}
    (text,) = set(written.values())
    on, off = text.split()
    return on, off


def test_separate_runs(tmp_path):
    """With either variable every degree gives the same digest; without one they differ."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with ThreadPoolExecutor() as both:
        one, two = both.map(digests, [script] * 2, (1, 2), ("TP_INVARIANT_MODE", "NVTE_TP_INVARIANT_MODE"))
    assert one[0] == two[0]
    assert len({one[0], one[1], two[1]}) == 3
