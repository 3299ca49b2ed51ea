"""The table of environment variables: what the sources read, what docs/api.md lists, and unknown names."""

import re
import warnings
from pathlib import Path

import pytest

import tp_invariant as tpi
from tp_invariant.core import mode
from tp_invariant.core.variables import ALIAS_VARIABLE, MODE_VARIABLE, SET_FOR_RANKS, VARIABLES

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\b(?:NVTE_)?TP_INVARIANT_[A-Z_]*[A-Z]\b")


def test_the_table_has_the_names_that_the_sources_have():
    files = [path for folder in ("tp_invariant", "kernels", "examples") for path in (ROOT / folder).rglob("*.py")]
    example = "TP_INVARIANT_MODES"  # of an unknown one, in a docstring
    assert {name for path in files for name in NAME.findall(path.read_text())} == {*VARIABLES, *SET_FOR_RANKS, example}


def test_the_table_of_the_documents_is_this_one():
    section = (
        (ROOT / "docs" / "api.md").read_text().partition("## Variables of the environment\n")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1:3] for line in section.splitlines() if NAME.search(line)]
    cells = {name: tuple(re.findall(r"`(\w+)`", values)) for names, values in rows for name in NAME.findall(names)}
    assert cells == VARIABLES


@pytest.fixture
def first_read(monkeypatch):
    """Reads the mode as the first time, twice, and returns the warnings."""

    def read(**environment):
        monkeypatch.setattr(mode, "_is_first_read", True)
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpi.is_tp_invariant_mode_enabled()
            tpi.is_tp_invariant_mode_enabled()
        return [str(one.message) for one in caught]

    return read


@pytest.mark.parametrize(
    ("unknown", "near"),
    [("TP_INVARIANT_MODES", MODE_VARIABLE), ("NVTE_TP_INVARIANT_MOD", ALIAS_VARIABLE), ("TP_INVARIANT_Q", None)],
)
def test_an_unknown_variable_is_warned_about_once(first_read, unknown, near):
    (text,) = first_read(**{unknown: "1"})
    assert text == (
        f"the environment variable {unknown} is unknown to tp_invariant, and has no effect"
        f"{'.' if near is None else f': did you mean {near}?'} Known are {', '.join(VARIABLES)}"
    )


def test_known_variables_are_not(first_read):
    assert first_read(TP_INVARIANT_CHECK="0", TP_INVARIANT_RANK_DEVICE="cpu", TP_INVARIANT="1") == []
