"""The README and the pages: their programs run as they stand there and say what they claim; tables name what is."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tp_invariant as tpi
from tp_invariant.conversion.plans import STYLES

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PAGE = (ROOT / "docs" / "own_models.md").read_text()


def program(page: str, name: str) -> str:
    (found,) = re.findall(rf"```python\n# {re.escape(name)}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return found


def tiny_qwen3(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=256)
    counts = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    config = AutoConfig.for_model("qwen3", **sizes, **counts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def test_a_program_of_its_own_gives_one_digest_at_every_degree(tmp_path):
    """At TP=2 as torchrun starts it, at TP=1 on a rank here; the control is that of the test below."""
    source = program("docs/own_models.md", "plan.py")
    (tmp_path / "plan.py").write_text(source)
    with tpi.set_tp_invariant_mode(True):
        ((_, alone),) = tpi.testing.run_ranks(run_program, 1, source, [], device="cpu")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "CUDA_VISIBLE_DEVICES": ""}
    place |= {"WORLD_SIZE": "2", "TP_INVARIANT_MODE": "1", "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}  # as torchrun sets them
        command = [sys.executable, "plan.py"]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True))
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        assert out.split() == [str(rank), alone]


def run_program(tp_group, source: str, arguments: list[str]) -> tuple[object, ...]:
    """What a program prints, in a process that has its group already."""
    printed: list[tuple[object, ...]] = []
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(dist, "get_rank", lambda *group: tp_group.rank()),
        mock.patch.object(dist, "group", SimpleNamespace(WORLD=tp_group)),
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(sys, "argv", ["program.py", *arguments]),
    ):
        exec(
            compile(source, "program.py", "exec"),
            {"__name__": "__main__", "print": lambda *values: printed.append(values)},
        )
    (line,) = printed
    return line


@pytest.mark.parametrize(
    ("page", "name", "degrees"),
    [
        ("README.md", "own_model.py", (1, 2, 4)),
        ("README.md", "small_qwen3.py", (1, 2, 4)),
        ("docs/own_models.md", "plan.py", (1, 2, 4)),
        ("docs/hugging_face.md", "hf_model.py", (1, 2)),
        ("docs/meshes.md", "experts.py", (1, 2, 4)),
    ],
)
def test_programs_give_one_digest_at_every_degree(tmp_path, page, name, degrees):
    arguments = [str(tmp_path)] if "sys.argv" in program(page, name) else []
    if arguments:
        tiny_qwen3(tmp_path)

    def digests(degree: int, mode: bool) -> set[object]:
        with tpi.set_tp_invariant_mode(mode):
            lines = tpi.testing.run_ranks(run_program, degree, program(page, name), arguments, device="cpu")
        assert [rank for rank, _ in lines] == list(range(degree))
        return {digest for _, digest in lines}

    on = digests(1, True)
    assert len(on) == 1 and all(digests(degree, True) == on for degree in degrees[1:])
    off = [digests(degree, False) for degree in degrees]
    assert len(on.union(*off)) == 1 + len(degrees), "the control"


def test_the_tables_name_every_style_and_option():
    named = set(re.findall(r'"(\w+)"', " ".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    older = {"colwise_rep", "rowwise_rep"}
    assert set(STYLES) - older <= named
    assert all(f'`"{name}"`' in PAGE for name in older)
    options = {field.name for field in dataclasses.fields(tpi.Part)} - {"style"}
    assert options == set(re.findall(r"^\| `(\w+)=", PAGE, re.MULTILINE))


def test_the_readme_counts_the_model_types_that_the_table_has():
    (counted,) = re.findall(r"(\d+) model types of transformers", (ROOT / "README.md").read_text())
    assert f" {counted} work." in (ROOT / "docs" / "model_types.md").read_text()


def tables(page: str) -> list[list[list[str]]]:
    """Each table's rows, the headings first and without the line below them; a row is a list of its cells."""
    found = re.findall(r"(?:^\|.*\|\n)+", (ROOT / page).read_text(), re.MULTILINE)
    split = [[[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()] for table in found]
    return [[headings, *rows] for headings, _, *rows in split]


def test_the_readme_has_the_speeds_of_the_page():
    """Each ratio stands on docs/performance.md, in a row and a column of the same names."""
    measured = {
        (row[0], heading): cell
        for headings, *rows in tables("docs/performance.md")
        for row in rows
        for heading, cell in zip(headings, row, strict=True)
    }
    (shown,) = [table for table in tables("README.md") if "CUDA graphs" in table[0]]
    headings, *rows = shown
    assert len(rows) == 4
    for row in rows:
        ratios = {heading: cell for heading, cell in zip(headings[1:], row[1:], strict=True) if cell}
        assert ratios == {heading: measured[row[0], heading] for heading in ratios}


def test_the_reference_has_every_public_name():
    documented = re.findall(r"<!-- api: tp_invariant\.(\S+) -->", (ROOT / "docs" / "api.md").read_text())
    for name in set(tpi.__all__) - {"__version__"}:
        if isinstance(getattr(tpi, name), ModuleType):
            assert any(entry.startswith(f"{name}.") for entry in documented), name
        else:
            assert any(entry in (name, f"{name}.{name}") for entry in documented), name


def test_the_reference_says_what_the_docstrings_say():
    writer = subprocess.run([sys.executable, ROOT / "docs" / "write_api.py", "--check"], capture_output=True, text=True)
    assert writer.returncode == 0, writer.stderr


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page):
    folders = "tp_invariant|kernels|tests|benchmarks|examples|docs"
    named = set(re.findall(rf"(?<![\w/.])(?:\.\./)?((?:{folders})/[\w/.]*\w)", (ROOT / page).read_text()))
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
    assert named or page in ("docs/api.md", "docs/limits.md", "docs/silent_cases.md")
