"""The example of reinforcement learning: one digest at every degree, and a difference of exactly 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "on_policy.py"
SMALL = ["--device", "cpu", "--steps", "2", "--prompts", "4", "--generations", "4", "--tokens", "8"]
NAME = "largest difference of log-probabilities: "


def run(ranks, *options, mode="1"):
    """Its last two lines: (digest, difference)."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "TP_INVARIANT_MODE": mode, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, str(EXAMPLE), *SMALL, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, digest, difference = done.stdout.splitlines()
    assert digest.startswith("digest of texts and weights: ") and difference.startswith(NAME)
    return digest, float(difference.removeprefix(NAME))


def test_sampler_and_trainer_agree_at_every_degree(tmp_path, pytestconfig):
    alone = run(1, "--record", str(tmp_path / "on.jsonl"))
    assert alone[1] == 0
    steps = [json.loads(line) for line in (tmp_path / "on.jsonl").read_text().splitlines()]
    assert [(step["least"], step["most"]) for step in steps] == [(1.0, 1.0)] * 2
    assert run(2, "--sampler-tp", "2") == alone  # the trainer at dp x tp = 2 x 1
    if pytestconfig.getoption("--all-cases"):
        assert run(4, "--sampler-tp", "2", "--trainer-tp", "4") == alone
    off = run(2, "--sampler-tp", "2", mode="0")
    assert off[1] > 0 and off[0] != alone[0]
