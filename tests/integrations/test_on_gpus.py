"""Trainer and LoRA in bfloat16 on two GPUs, by their examples as torchrun starts them: the bits of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tp_invariant.diagnostics.diff import compare, read_log

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.timeout(600),
]


def run(example: str, degree: int, *arguments: str, mode: bool = True) -> list[str]:
    """The lines that a program of examples/ prints; of one process without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(degree)] if degree > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments],
        env={**os.environ, "TP_INVARIANT_MODE": str(int(mode))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_the_trainer(tmp_path):
    """Losses, norms, gradients and parameters of ten steps by autocast; two data parallel ranks too."""
    pytest.importorskip("accelerate", reason="the extra tp-invariant[trainer] is not installed")
    kinds = {"one": (1, [], True), "tp": (2, [], True), "dp": (2, ["--dp", "2"], True)}
    kinds |= {"off": (1, [], False), "off, tp": (2, [], False)}
    logs = {}
    for name, (degree, arguments, mode) in kinds.items():
        options = ["--max-steps", "10", "--bf16", "--output-dir", str(tmp_path / name), *arguments]
        run("train_with_trainer.py", degree, *options, mode=mode)
        logs[name] = read_log(str(tmp_path / name / "digests.log"))
    for name in ("tp", "dp"):
        text, same = compare(logs["one"], logs[name])
        assert same and "identical for 10 steps" in text, text
    assert not compare(logs["off"], logs["off, tp"])[1], "the control"


def test_lora():
    """The losses and norms of ten steps, and the adapters, of a bfloat16 model."""
    pytest.importorskip("peft", reason="the extra tp-invariant[peft] is not installed")

    def lines(degree: int, mode: bool = True) -> list[str]:
        printed = run("lora_hf.py", degree, "--steps", "10", "--dtype", "bfloat16", mode=mode)
        kept = [line for line in printed if line.startswith("step ")]
        assert len(kept) == 10 and printed[-1].startswith(f"TP={degree}: adapters ")
        return [*kept, printed[-1].partition(": ")[2]]

    assert lines(2) == lines(1)
    assert lines(2, mode=False) != lines(1, mode=False), "the control"
