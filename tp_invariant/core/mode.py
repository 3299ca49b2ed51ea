"""The mode: whether the tensor-parallel layers compute invariant bits or take the stock path."""

from __future__ import annotations

import os
from types import TracebackType

import torch

from .torch_private import environment
from .variables import ALIAS_VARIABLE, CHECK_VARIABLE, MODE_VARIABLE, VARIABLES, warn_of_unknown_variables

_VALUES = {"0": False, "1": True}

# What Python code asked for; None leaves the decision to the environment. One value for the whole process and not one
# per thread, because autograd runs backward on threads of its own.
_override: bool | None = None
_is_first_read = True


_KEYS = {name: os.environ.encodekey(name) for name in VARIABLES}  # of `environment`, the dict inside os.environ


def value_of(variable: str) -> str | None:
    """Of one of VARIABLES, in a fifth of the time that os.environ takes; None where it is unset."""
    text = environment.get(_KEYS[variable])
    return text if text is None or isinstance(text, str) else text.decode(errors="surrogateescape")


def _parse(variable: str) -> bool | None:
    text = value_of(variable)
    if text is None:
        return None
    if text not in _VALUES:
        raise ValueError(f"{variable}={text!r} is not understood: set it to 1 (on) or 0 (off), or unset it (off)")
    return _VALUES[text]


def is_tp_invariant_mode_enabled() -> bool:
    """Whether the mode is on, read now: `set_tp_invariant_mode` if it was called, else the environment.

    The variable is `TP_INVARIANT_MODE`, or its alias `NVTE_TP_INVARIANT_MODE`: `1` is on, `0` or unset is off. The
    first read in a process warns of variables whose names begin like this library's and are unknown.

    Raises:
        ValueError: a variable holds anything else, or both are set and differ.
    """
    global _is_first_read
    if not torch.compiler.is_compiling() and _is_first_read:  # in this order compiled code has no guard on the latter
        _is_first_read = False
        warn_of_unknown_variables()
    return _is_on()


def _is_on() -> bool:
    if _override is not None:
        return _override
    mode, alias = _parse(MODE_VARIABLE), _parse(ALIAS_VARIABLE)
    if mode is not None and alias is not None and mode != alias:
        raise ValueError(
            f"{MODE_VARIABLE}={os.environ[MODE_VARIABLE]} and {ALIAS_VARIABLE}={os.environ[ALIAS_VARIABLE]} "
            "contradict each other: unset one of them"
        )
    return bool(mode if mode is not None else alias)


def is_call_check_enabled() -> bool:
    """Whether `TP_INVARIANT_CHECK` asks for every call's facts to be compared over its group, in forward.

    `1` is on, `0` or unset off; read at every call, in both modes, and the same on all ranks. Costs an all-gather of
    24 bytes and a wait for it in each forward of a layer: tens of microseconds on a GPU, a
    millisecond on gloo, and the host loses its lead over the device. For finding where ranks diverge, not for training.

    Raises:
        ValueError: the variable holds anything else.
    """
    return value_of(CHECK_VARIABLE) is not None and bool(
        _parse(CHECK_VARIABLE)
    )  # unset as a rule, which takes less time


def mode_if_cacheable() -> bool | None:
    """Whether the mode is on; None where every call must be checked again, so that results must not be stored."""
    if torch.compiler.is_compiling():
        return None
    try:
        return None if is_call_check_enabled() else _is_on()
    except ValueError:  # an invalid environment variable: the checks read it again and raise this error
        return None


class set_tp_invariant_mode:
    """Turns the mode on (True) or off (False), or lets the environment decide again (None).

    As a plain call it holds until the next call. As a context manager it restores the previous state, also when the
    body raises, and can be nested. A layer reads the mode in forward; its backward uses the mode of its forward.

        tpi.set_tp_invariant_mode(True)
        with tpi.set_tp_invariant_mode(False):
            ...

    Raises:
        TypeError: `enabled` is not True, False or None.
    """

    def __init__(self, enabled: bool | None) -> None:
        global _override
        if enabled is not None and not isinstance(enabled, bool):
            raise TypeError(f"enabled={enabled!r} is not understood: pass True, False or None")
        self._enabled, self._restore, self._entered = enabled, [_override], False
        _override = enabled

    def __enter__(self) -> None:
        global _override
        if self._entered:  # again; the first time, what to restore is what the call found
            self._restore.append(_override)
        self._entered = True
        _override = self._enabled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _override
        _override = self._restore.pop()
