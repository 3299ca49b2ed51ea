"""The name of a callable, which ranks compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_DECLARED = "tp_invariant_identity"


def identify(fn: Callable[..., Any]) -> str:
    """ "module.qualified_name" of a function, of an instance that of its class; of a partial with its arguments.

    What a function encloses or an instance holds does not count. An attribute `tp_invariant_identity`, a str or a
    method that returns one, is added to the name.
    """
    if isinstance(fn, functools.partial):
        arguments = [*map(_argument, fn.args)]
        arguments += [f"{name}={_argument(value)}" for name, value in sorted(fn.keywords.items())]
        return f"partial({', '.join([identify(fn.func), *arguments])})"
    named: Any = fn if hasattr(fn, "__qualname__") else type(fn)
    name = f"{named.__module__}.{named.__qualname__}"
    declared = getattr(fn, _DECLARED, None)
    declared = declared() if callable(declared) else declared
    return name if declared is None else f"{name} declared as {declared}"


def _argument(value: Any) -> str:
    """Without addresses, which differ between processes."""
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    return repr(value) if plain else identify(value)
