"""The gate: which values the environment and `set_tp_invariant_mode` accept, and when they are read."""

import os
import re
import threading

import pytest

import tp_invariant as tpi
from tp_invariant.core.mode import ALIAS_VARIABLE, MODE_VARIABLE

BOTH = (MODE_VARIABLE, ALIAS_VARIABLE)


@pytest.fixture(autouse=True)
def environment_decides(monkeypatch):
    """Every test starts and ends with no mode set in Python and neither variable set."""
    for variable in BOTH:
        monkeypatch.delenv(variable, raising=False)
    with tpi.set_tp_invariant_mode(None):
        yield


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        *(({name: text}, text == "1") for name in BOTH for text in ("0", "1")),
        *((dict.fromkeys(BOTH, text), text == "1") for text in ("0", "1")),
    ],
    ids=str,
)
def test_the_variables(monkeypatch, environment, expected):
    assert BOTH == ("TP_INVARIANT_MODE", "NVTE_TP_INVARIANT_MODE")
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    assert tpi.is_tp_invariant_mode_enabled() is expected


@pytest.mark.parametrize(("mode", "alias"), [("0", "1"), ("1", "0")])
def test_variables_that_contradict_each_other(monkeypatch, mode, alias):
    monkeypatch.setenv(MODE_VARIABLE, mode)
    monkeypatch.setenv(ALIAS_VARIABLE, alias)
    text = f"TP_INVARIANT_MODE={mode} and NVTE_TP_INVARIANT_MODE={alias} contradict each other: unset one of them"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        tpi.is_tp_invariant_mode_enabled()


@pytest.mark.parametrize("variable", BOTH)
@pytest.mark.parametrize("text", ["true", "", " 1"])
def test_anything_else_is_an_error(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    expected = f"{variable}={text!r} is not understood: set it to 1 (on) or 0 (off), or unset it (off)"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        tpi.is_tp_invariant_mode_enabled()


@pytest.mark.parametrize("variable", BOTH)
def test_bytes_that_are_not_text_are_an_error_too(monkeypatch, variable):
    monkeypatch.setitem(os.environb, variable.encode(), b"\xff1")
    with pytest.raises(ValueError, match=rf"^{variable}='\\udcff1' is not understood: set it to 1"):
        tpi.is_tp_invariant_mode_enabled()


@pytest.mark.parametrize("text", ["0", "1"])
@pytest.mark.parametrize("asked", [False, True])
def test_python_wins_over_the_environment(monkeypatch, text, asked):
    monkeypatch.setenv(MODE_VARIABLE, text)
    with tpi.set_tp_invariant_mode(asked):
        assert tpi.is_tp_invariant_mode_enabled() is asked
    assert tpi.is_tp_invariant_mode_enabled() is (text == "1")


def test_a_call_holds_until_the_next_and_none_restores_the_variable(monkeypatch):
    for asked in (True, False, None):
        tpi.set_tp_invariant_mode(asked)
        assert tpi.is_tp_invariant_mode_enabled() is bool(asked)
    for text in ("1", "0", "1"):  # read at each call
        monkeypatch.setenv(MODE_VARIABLE, text)
        assert tpi.is_tp_invariant_mode_enabled() is (text == "1")


def test_contexts_nest_and_restore():
    seen = []
    with tpi.set_tp_invariant_mode(True):
        with tpi.set_tp_invariant_mode(False):
            with tpi.set_tp_invariant_mode(True):
                seen.append(tpi.is_tp_invariant_mode_enabled())
            seen.append(tpi.is_tp_invariant_mode_enabled())
        seen.append(tpi.is_tp_invariant_mode_enabled())
    seen.append(tpi.is_tp_invariant_mode_enabled())
    assert seen == [True, False, True, False]


def test_a_context_restores_what_a_call_inside_it_changed_and_on_exceptions():
    tpi.set_tp_invariant_mode(True)
    with pytest.raises(ZeroDivisionError), tpi.set_tp_invariant_mode(False):
        assert tpi.is_tp_invariant_mode_enabled() is False
        tpi.set_tp_invariant_mode(False)
        raise ZeroDivisionError
    assert tpi.is_tp_invariant_mode_enabled() is True


def test_one_object_used_as_a_context_twice():
    mode = tpi.set_tp_invariant_mode(True)
    seen = []
    for _ in range(2):
        with mode:
            seen.append(tpi.is_tp_invariant_mode_enabled())
        seen.append(tpi.is_tp_invariant_mode_enabled())
    assert seen == [True, False, True, False]


@pytest.mark.parametrize("enabled", [1, "1", [True]])
def test_wrong_type(enabled):
    tpi.set_tp_invariant_mode(True)
    text = f"enabled={enabled!r} is not understood: pass True, False or None"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        tpi.set_tp_invariant_mode(enabled)
    assert tpi.is_tp_invariant_mode_enabled() is True, "a refused call must change nothing"


def test_other_threads_see_it():
    seen = []
    with tpi.set_tp_invariant_mode(True):
        thread = threading.Thread(target=lambda: seen.append(tpi.is_tp_invariant_mode_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]
