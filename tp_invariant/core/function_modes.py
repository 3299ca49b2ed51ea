"""Torch function modes that surround a model's code and have nothing to do inside this library's own layers.

Under a mode torch calls a Python function for every operator and for every `shape` or `dtype` that is read: about a
microsecond each, and a layer's call has a hundred. So a layer takes such a mode off the stack for the time of its call.
Other modes, a user's, stay where they are and see what they saw.
"""

from __future__ import annotations

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.utils._device import DeviceContext


class AroundLayers(TorchFunctionMode):
    """A mode that acts on functions which the layers do not call. It does nothing when it is entered or left."""


def innermost() -> AroundLayers | None:
    """The mode that sees functions first if it is one of these. In compiled code None: there modes cost nothing."""
    if torch.compiler.is_compiling() or not _len_torch_function_stack():
        return None
    mode = _get_current_function_mode()
    return mode if isinstance(mode, AroundLayers) else None


def leave() -> list[AroundLayers]:
    """Takes the innermost modes off the stack as long as they are such. Give what it returns to `enter_again`."""
    left: list[AroundLayers] = []
    if torch.compiler.is_compiling():
        return left
    while depth := _len_torch_function_stack():
        mode = _get_function_stack_at(depth - 1)
        if not isinstance(mode, AroundLayers):
            break
        _pop_torch_function_stack()
        left.append(mode)
    return left


def enter_again(left: list[AroundLayers]) -> None:
    while left:
        _push_on_torch_function_stack(left.pop())


def user_is_told() -> bool:
    """Whether a mode of a user's is told of the functions that are called now, so that each must be called by its name.

    torch's own mode for a default device does not count. In compiled code False.
    """
    if torch.compiler.is_compiling() or not _len_torch_function_stack():
        return False
    return not all(isinstance(mode, (AroundLayers, DeviceContext)) for mode in _get_current_function_mode_stack())
