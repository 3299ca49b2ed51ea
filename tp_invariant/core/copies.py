"""Copies of a module in which its functions hold the copy.

copy.deepcopy takes a function as it is, so that a lambda, a hook or a local function that holds a module of the model
would call the original's from the copy.
"""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import nn

from .torch_private import with_cells

T = TypeVar("T", bound=nn.Module)


def copy_of_module(module: T, memo: dict[int, Any] | None = None) -> T:
    """copy.deepcopy(module, memo), also for functions in attributes of its modules, lists and dicts of them, hooks."""
    memo = {} if memo is None else memo
    twin = copy.deepcopy(module, memo)
    for child in twin.modules():
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                child.__dict__[name] = _of_copy(value, memo)
    return twin


def _of_copy(value: Any, memo: dict[int, Any]) -> Any:
    """What stands for `value` in the copy; `memo` has copies by the id of the originals."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        cells = tuple(CellType() for _ in value.__closure__ or ())
        twin = memo[id(value)] = with_cells(value, cells)
        twin.__dict__.update(vars(value))
        twin.__qualname__, twin.__module__ = value.__qualname__, value.__module__
        twin.__defaults__ = _of_copy(value.__defaults__, memo)
        twin.__kwdefaults__ = _of_copy(value.__kwdefaults__, memo)
        for cell, former in zip(cells, value.__closure__ or (), strict=True):
            try:
                cell.cell_contents = _of_copy(former.cell_contents, memo)
            except ValueError:  # a variable that has no value yet
                continue
        return twin
    if type(value) is functools.partial:
        return functools.partial(_of_copy(value.func, memo), *value.args, **value.keywords)
    if type(value) in (list, tuple):
        items = [_of_copy(item, memo) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, dict):
        copies = {key: _of_copy(item, memo) for key, item in value.items()}
        if any(copies[key] is not item for key, item in value.items()):
            value = copy.copy(value)
            value.update(copies)
    return value
