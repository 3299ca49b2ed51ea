"""The example of reinforcement learning: one digest at every degree, and a difference of exactly 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tp_invariant as tpi

pytest.importorskip("transformers", reason="the extra tp-invariant[hf] is not installed")
from tp_invariant.examples import on_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "on_policy.py"
SMALL = ["--device", "cpu", "--steps", "2", "--prompts", "4", "--generations", "4", "--tokens", "8"]
NAME = "largest difference of log-probabilities: "


def run(ranks, *options, mode="1"):
    """Its last two lines: (digest, difference)."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "TP_INVARIANT_MODE": mode, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, str(EXAMPLE), *SMALL, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return results(done.stdout)


def results(printed):
    *_, digest, difference = printed.splitlines()
    assert digest.startswith("digest of texts and weights: ") and difference.startswith(NAME)
    return digest, float(difference.removeprefix(NAME))


def test_sampler_and_trainer_agree_at_every_degree(tmp_path, pytestconfig, capsys):
    """Alone in this process, and as torchrun starts it."""
    with tpi.set_tp_invariant_mode(True):
        assert on_policy.main([*SMALL, "--record", str(tmp_path / "on.jsonl")]) == 0
    alone = results(capsys.readouterr().out)
    assert alone[1] == 0
    steps = [json.loads(line) for line in (tmp_path / "on.jsonl").read_text().splitlines()]
    assert [(step["least"], step["most"]) for step in steps] == [(1.0, 1.0)] * 2
    assert run(2, "--sampler-tp", "2") == alone  # the trainer at dp x tp = 2 x 1
    if pytestconfig.getoption("--all-cases"):
        assert run(4, "--sampler-tp", "2", "--trainer-tp", "4") == alone
    off = run(2, "--sampler-tp", "2", mode="0")
    assert off[1] > 0 and off[0] != alone[0]
