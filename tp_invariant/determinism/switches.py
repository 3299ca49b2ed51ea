"""The settings around the layers that make a run give the same bits again: seeds, torch's switches, cuBLAS, NCCL.

    tpi.determinism.enable(seed=0)                 # first thing in main(), on every rank
    with tpi.determinism.deterministic(seed=0): ...
    print(tpi.determinism.report())

settings.py lists them. The layers alone give the same bits at every TP degree; repeating a run needs these settings
too. Give the ranks of one TP group the same seed, and data-parallel replicas that must differ (dropout) different ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .settings import DETERMINISTIC_ALGORITHMS, PROFILES, SETTINGS, Setting, has_started, nccl_groups

__all__ = ["Report", "Row", "checkpoint_kwargs", "deterministic", "enable", "report"]

_MAX_SEED = 2**32  # numpy's limit


# What this module has set, by name: a nested context may change these values, but not those that a user has set.
_written: dict[str, Any] = {}


# Values that CUDA, or these NCCL groups, read when they started inside a context, and keep.
_in_force: dict[str, tuple[str, weakref.WeakSet]] = {}


def _is_effective(setting: Setting) -> bool:
    """Whether the setting has its value now, or had it when the library that reads it once was started."""
    if setting.holds():
        return True
    value, groups = _in_force.get(setting.name, (None, ()))
    started = setting.started is not None and has_started(setting.started)
    return started and value is not None and (setting.started != "NCCL" or all(g in groups for g in nccl_groups()))


def _selected(profiles: Sequence[str], warn_only: bool) -> list[Setting]:
    if isinstance(profiles, str) or not profiles or any(profile not in PROFILES for profile in profiles):
        raise ValueError(f"profiles={profiles!r} is not understood: pass a tuple of {', '.join(map(repr, PROFILES))}")
    chosen = [setting for setting in SETTINGS if set(setting.profiles) & set(profiles)]
    if warn_only:
        relaxed = dataclasses.replace(DETERMINISTIC_ALGORITHMS, value=(True, True))
        chosen = [relaxed if setting is DETERMINISTIC_ALGORITHMS else setting for setting in chosen]
    return chosen


def _check(settings: Sequence[Setting], override: bool) -> None:
    """Raises for a setting that cannot be set, before anything is set."""
    for setting in settings:
        if setting.holds():
            continue
        current = setting.read()
        if current != setting.default and current != _written.get(setting.name) and not override:
            raise ValueError(
                f"{setting.name} is {current!r} and should be {setting.value!r} ({setting.why}): unset it, or pass "
                "override=True to replace it"
            )
        if setting.started and has_started(setting.started) and not _is_effective(setting):
            raise RuntimeError(
                f"{setting.name} is {current!r} and should be {setting.value!r}, but {setting.started} has started in "
                f"this process and has read it: call this before the first use of {setting.started}, or start the "
                f"program with {setting.name}='{setting.value}' in its environment"
            )


def _multiply() -> None:
    one = torch.ones(1, 1, device="cuda")
    torch.mm(one, one)


def _has_read(setting: Setting) -> bool:
    """Whether the library that has started inside a context has read the setting.

    CUDA starts with the first tensor, but cuBLAS reads its settings at the first product. So one is computed here,
    before the setting is restored; if it fails, the next context is refused.
    """
    if setting.started == "CUDA":
        try:
            _multiply()
        except RuntimeError:
            return False
    return True


def _restore(setting: Setting, restore: Callable[[], None], written: Any, started: bool) -> None:
    if setting.started and not started and has_started(setting.started) and setting.holds() and _has_read(setting):
        _in_force[setting.name] = setting.read(), weakref.WeakSet(nccl_groups())
    restore()
    _written[setting.name] = written


def _apply(settings: Sequence[Setting]) -> contextlib.ExitStack:
    """Sets the settings that do not have their values; closing the stack restores all of them, in reverse order."""
    undo = contextlib.ExitStack()
    try:
        for setting in settings:
            if setting.holds():
                undo.callback(setting.restorer())
            else:
                started = setting.started is not None and has_started(setting.started)
                undo.callback(_restore, setting, setting.restorer(), _written.get(setting.name), started)
                setting.write(setting.value)
                _written[setting.name] = setting.value
    except BaseException:
        undo.close()
        raise
    return undo


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed={seed!r} is not understood: pass an integer from 0 to {_MAX_SEED - 1}")


def _seed_all(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)  # also seeds every CUDA device, now or when CUDA starts


def _keep_random_states(undo: contextlib.ExitStack) -> None:
    undo.callback(random.setstate, random.getstate())
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        undo.callback(numpy_random.set_state, numpy_random.get_state())
    if not torch.cuda.is_initialized():  # it may start later with the inner seed: give it the CPU's, by then restored
        undo.callback(lambda: torch.cuda.manual_seed_all(torch.initial_seed()))
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())


def enable(
    seed: int, *, warn_only: bool = False, override: bool = False, profiles: Sequence[str] = ("repeat",)
) -> None:
    """Seeds the generators of python, numpy (if imported) and torch, and sets the settings of `profiles`.

    Call it on every rank before CUDA and NCCL start. If one setting cannot be set, none is. They stay set; inside
    `deterministic`, until that is left.

    Args:
        seed: from 0 to 2**32 - 1; the same on the ranks of a TP group.
        warn_only: torch.use_deterministic_algorithms warns instead of raising where torch has no deterministic kernel;
            the memory-efficient attention's backward is then not deterministic.
        override: replace values that you or your environment set otherwise.
        profiles: of "repeat", "wire", "vllm"; see settings.py.

    Raises:
        ValueError: you have set another value, and override is False; an invalid seed or profile.
        RuntimeError: CUDA or NCCL has already read another value, which override cannot change; says what to do.
    """
    _check_seed(seed)
    settings = _selected(profiles, warn_only)
    _check(settings, override)
    _apply(settings)
    _seed_all(seed)


@contextlib.contextmanager
def deterministic(
    seed: int, *, warn_only: bool = False, override: bool = False, profiles: Sequence[str] = ("repeat",)
) -> Iterator[None]:
    """`enable` as a context manager or decorator: leaving restores all settings and generators, also on an exception.

    It nests. CUDA and NCCL keep what they read inside; that is remembered, so that entering again is allowed.
    Arguments and errors as for enable.
    """
    _check_seed(seed)
    settings = _selected(profiles, warn_only)
    _check(settings, override)
    with _apply(settings) as undo:
        _keep_random_states(undo)
        _seed_all(seed)
        yield


def checkpoint_kwargs() -> dict[str, Any]:
    """Keyword arguments for torch.utils.checkpoint.checkpoint, which has no global switch for them.

    The recomputed forward draws the same random numbers as the first one, and an error says so if its tensors have
    other shapes, dtypes or devices.

        checkpoint(block, x, **tpi.determinism.checkpoint_kwargs())
    """
    return {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}


@dataclass(frozen=True)
class Row:
    """The state of one setting: `is_set` says whether `current` is sufficient; `meaning` what happens otherwise."""

    name: str
    where: str
    current: Any
    wanted: Any
    is_set: bool
    too_late: bool
    meaning: str
    cost: str
    profiles: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        named = f"{self.name} ({self.where}; {', '.join(self.profiles)})"
        if self.is_set:
            return f"set      {named} = {self.current}" + (f"\n         {self.note}" if self.note else "")
        late = ", too late to set in this process" if self.too_late else ""
        return (
            f"NOT SET  {named} = {self.current}, wanted {self.wanted}{late}\n"
            f"         without it: {self.meaning}\n         with it: {self.cost}"
        )


@dataclass(frozen=True)
class Report:
    """The rows of `report()`; prints one line for each row that is set and three for each that is not."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


def _note(setting: Setting) -> str:
    if setting.started is None or not has_started(setting.started):
        return ""
    if not setting.holds() and _is_effective(setting):
        return f"{setting.started} started inside deterministic() and has read {_in_force[setting.name][0]}"
    if setting.holds() and setting.name not in _in_force and setting.name not in _written:
        return (
            f"{setting.started} has started: if the value was set after that, {setting.started} has not read it, and "
            "this report cannot tell"
        )
    return ""


def report(profiles: Sequence[str] = PROFILES) -> Report:
    """The current state of every setting of the profiles; sets nothing, starts nothing.

    Raises:
        ValueError: a profile that does not exist.
    """
    return Report(
        tuple(
            Row(
                name=setting.name,
                where=setting.where,
                current=setting.read(),
                wanted=setting.value,
                is_set=_is_effective(setting),
                too_late=not _is_effective(setting) and setting.started is not None and has_started(setting.started),
                meaning=setting.why,
                cost=setting.cost,
                profiles=setting.profiles,
                note=_note(setting),
            )
            for setting in _selected(profiles, warn_only=False)
        )
    )
