"""The bench command: times of both ways, and bits that it tells from others."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from tp_invariant.diagnostics import bench
from tp_invariant.diagnostics.cli import main

SMALL = ["--device", "cpu", "--hidden", "96", "--ffn", "240", "--layers", "2", "--rounds", "1"]


def test_a_run_on_the_cpu(capsys):
    assert main(["bench", *SMALL, "--tp", "2", "--tokens", "32", "64"]) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert "hidden 96, ffn 240, fp32, TP=2, sequence parallelism on; CPU" in heading
    assert len(lines) == 2
    for line, tokens in zip(lines, ("32", "64"), strict=True):
        found = re.fullmatch(r" *(\d+)  eager +([\d.]+) +([\d.]+) +([\d.]+)  on: the same; off: others", line)
        assert found and found[1] == tokens
        off, on, ratio = map(float, found.groups()[1:])
        assert off > 0 and on > 0 and abs(ratio - on / off) < 0.02 * ratio + 0.006 * (1 + ratio) / min(off, 1)


def test_other_bits_are_a_failure(capsys):
    def measured(fn, world, options, tokens, device):
        return [{("eager", True): 1.0, ("eager", False): 1.0, ("bits", True): {f"{rank}"}, ("bits", False): {"0"}}
                for rank in range(world)]  # fmt: skip

    with mock.patch.object(bench, "run_ranks", measured):
        assert main(["bench", *SMALL, "--tokens", "32"]) == 1
    assert "on: OTHERS; off: the same" in capsys.readouterr().out


def test_a_wrong_option(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *SMALL, "--tp", "1"])
    assert "of two ranks at least" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_on_gpus(capsys):
    assert main(["bench", "--hidden", "512", "--ffn", "1536", "--tokens", "256", "--rounds", "2", "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("on: the same; off: others") == 2 and "graphs" in out
