"""docs/plans.md: its program runs as it stands there and says what it claims, and its tables name what there is."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import tp_invariant as tpi
from tp_invariant.conversion.plans import STYLES

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()


def test_the_program_gives_one_digest_at_every_degree(tmp_path):
    (program,) = re.findall(r"```python\n# plan\.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan.py").write_text(program)
    processes = []

    digests: dict[tuple[int, str], set[str]] = {}
    for degree, mode in ((1, "1"), (2, "1"), (2, "0")):  # all at once
        with socket.socket() as free:
            free.bind(("localhost", 0))
            place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "CUDA_VISIBLE_DEVICES": ""}
        place |= {"WORLD_SIZE": str(degree), "TP_INVARIANT_MODE": mode, "OMP_NUM_THREADS": "1"}
        for rank in range(degree):
            environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}  # as torchrun sets them
            process = subprocess.Popen(
                [sys.executable, "plan.py"], cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True
            )
            processes.append(((degree, mode), process))
    for key, process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        digests.setdefault(key, set()).add(out.split()[1])
    assert digests[1, "1"] == digests[2, "1"] and len(digests[1, "1"]) == 1
    assert digests[2, "0"] != digests[1, "1"], "the control"


def test_the_tables_name_every_style_and_option():
    named = set(re.findall(r'"(\w+)"', " ".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    older = {"colwise_rep", "rowwise_rep"}
    assert set(STYLES) - older <= named
    assert all(f'`"{name}"`' in PAGE for name in older)
    options = {field.name for field in dataclasses.fields(tpi.Part)} - {"style"}
    assert options == set(re.findall(r"^\| `(\w+)=", PAGE, re.MULTILINE))
