"""examples/layers_by_hand.py, the pytest beside it, and docs/layers_by_hand.md, which shows both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tp_invariant as tpi
from tp_invariant.examples import layers_by_hand

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = (ROOT / "docs" / "layers_by_hand.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE, TEST = (ROOT / "examples" / name for name in ("layers_by_hand.py", "test_layers_by_hand.py"))


def code(text: str) -> str:
    """Without blank lines, which end a block of the page."""
    return "\n".join(line for line in text.splitlines() if line.strip())


def test_the_page_shows_the_whole_example_and_parts_of_its_test():
    of_the_example = [block for block in BLOCKS if code(block) in code(EXAMPLE.read_text())]
    assert code("\n".join(of_the_example)) == code(EXAMPLE.read_text())
    of_the_test = [block for block in BLOCKS if code(block) in code(TEST.read_text())]
    assert len(of_the_test) == 2 and len(BLOCKS) == len(of_the_example) + 3, "the third one is run below"


# name of a copy: what is changed, and the tests that fail
COPIES = {
    "as_it_stands": (("", ""), set()),
    "a_forgotten_stride": ((", partition_stride=2", ""), {"bits", "values"}),  # gate and up are mixed by degree
    "another_activation": (('"silu"', '"gelu"'), {"values"}),  # the same bits everywhere, of another model
}


@pytest.mark.more
def test_its_pytest_as_copies(tmp_path, pytestconfig):
    """Each under a name of its own, in one run."""
    copies = dict([*COPIES.items()][: None if pytestconfig.getoption("--all-cases") else 2])
    for name, (change, _) in copies.items():
        (tmp_path / f"{name}.py").write_text(EXAMPLE.read_text().replace(*change))
        (tmp_path / f"test_{name}.py").write_text(TEST.read_text().replace("layers_by_hand", name))
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "."]
    done = subprocess.run(pytest_here, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    found = re.findall(r"^(PASSED|FAILED) test_(\w+)\.py::test_the_(?:same_)?(bits|values)_", done.stdout, re.MULTILINE)
    expected = {
        ("FAILED" if what in failed else "PASSED", name, what)
        for name, (_, failed) in copies.items()
        for what in ("bits", "values")
    }
    assert set(found) == expected and len(found) == len(expected), done.stdout + done.stderr


def test_torchrun_prints_the_digest_of_one_rank():
    with tpi.set_tp_invariant_mode(True):
        ((_, losses, digest),) = tpi.testing.run_ranks(trained, 1, None, device="cpu")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLE]
    environment = {name: value for name, value in os.environ.items() if name != "TP_INVARIANT_MODE"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"digest {digest}"
    assert losses[-1] < losses[0] - 1


def trained(tp_group, snippet):
    """The rank, the losses, the digest as the example prints it, after the snippet of the page if there is one."""
    losses, model = layers_by_hand.train(tp_group)
    if snippet is not None:
        optimizer = torch.optim.AdamW(model.parameters())
        exec(snippet, {"tpi": tpi, "model": model, "optimizer": optimizer})
    return tp_group.rank(), losses, tpi.testing.digest((losses, tpi.testing.full_parameters(model)))


def test_the_snippet_that_saves_and_loads(tmp_path):
    pytest.importorskip("safetensors")
    (snippet,) = (block for block in BLOCKS if "checkpoint.save" in block)
    snippet = snippet.replace('"ckpt"', repr(str(tmp_path / "ckpt")))
    with tpi.set_tp_invariant_mode(True):
        ranks = [
            *tpi.testing.run_ranks(trained, 1, None, device="cpu"),
            *tpi.testing.run_ranks(trained, 2, snippet, device="cpu"),
        ]
    assert len(ranks) == 3 and len({digest for _, _, digest in ranks}) == 1
    assert (tmp_path / "ckpt").is_dir()
