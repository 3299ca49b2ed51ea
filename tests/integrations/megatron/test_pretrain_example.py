"""examples/pretrain_megatron.py: Megatron's own training loop has the same digest at every degree."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")

ROOT = Path(__file__).parents[3]
HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
with_training = pytest.mark.skipif(not HAS_TRAINING, reason="this megatron-core has no megatron.training: 0.19.2 has")


def run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    program = str(ROOT / "examples" / "pretrain_megatron.py")
    return subprocess.run(
        [sys.executable, *launcher, program, "--steps", "2", "--device", "cpu", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def digest(ranks: int, *arguments: str) -> str:
    done = run(ranks, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    word, value = done.stdout.splitlines()[-1].split()
    assert word == "digest" and len(value) == 64
    return value


@with_training
@pytest.mark.timeout(900)
def test_every_degree_has_the_digest_of_one_rank() -> None:
    """With and without sequence parallelism. The control: with the mode off they differ."""
    assert len({digest(1), digest(2, "--sequence-parallel"), digest(4)}) == 1
    assert digest(1, "--off") != digest(2, "--off")


@with_training
@pytest.mark.timeout(300)
def test_a_hybrid_model() -> None:
    assert digest(1, "--hybrid") == digest(2, "--hybrid", "--sequence-parallel")


@pytest.mark.skipif(HAS_TRAINING, reason="megatron.training is installed")
def test_without_megatron_training_it_says_which_version_it_needs() -> None:
    done = run(1)
    assert done.returncode != 0 and "megatron-core has from 0.19 on" in done.stderr
