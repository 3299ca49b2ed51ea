"""docs/tools_tested.md: each row of its tables names tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tools_tested.md").read_text()


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of its tables, without the rows of headings."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "tool" and not row[0].startswith("---")]


@cache
def defined_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def problem_of(row: list[str]) -> str | None:
    if len(row) != 3:
        return f"{len(row)} cells"
    _, result, test = row
    if re.split("[:,]", result)[0] not in ("right", "refused"):
        return f"the result {result!r}"
    for one in test.split(", "):
        path, _, name = one.partition("::")
        if not (ROOT / path).is_file() or not name.startswith("test_") or name not in defined_in(ROOT / path):
            return f"no test {one!r}"
    return None


@pytest.mark.parametrize("row", rows_of(PAGE), ids=lambda row: row[0])
def test_a_row_has_its_test(row):
    assert problem_of(row) is None


def test_there_are_rows():
    assert len(rows_of(PAGE)) > 20


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| a | silent | tests/test_your_tools.py::test_there_are_rows |", "the result 'silent'"),
        ("| a | right | how | tests/test_your_tools.py::test_there_are_rows |", "4 cells"),
        ("| a | right: how | tests/test_your_tools.py::test_gone |", "no test 'tests/test_your_tools.py::test_gone'"),
        (
            "| a | right | tests/test_your_tools.py::test_there_are_rows, tests/gone.py::test_gone |",
            "no test 'tests/gone.py::test_gone'",
        ),
        ("| a | right | tests/gone.py::test_gone |", "no test 'tests/gone.py::test_gone'"),
        ("| a | right | tests/test_your_tools.py::rows_of |", "no test 'tests/test_your_tools.py::rows_of'"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row, problem):
    assert [problem_of(cells) for cells in rows_of(row)] == [problem]
