"""What a callable is, in words that are the same in every process which was given the same one."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes)


def identify(fn: Callable[..., Any]) -> str:
    """ "module.qualified_name #hash", where the hash is of the code, defaults and enclosed values; partials by parts.

    Of an instance, its class and the code of `__call__`. Two functions of one name and different code differ; two
    instances of a class do not, whatever they hold.
    """
    try:
        return _identify_once(fn)
    except TypeError:  # cannot be hashed
        return _identify(fn)


@functools.lru_cache(maxsize=64)
def _identify_once(fn: Callable[..., Any]) -> str:
    return _identify(fn)


def _identify(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        given = [*map(_value, fn.args), *(f"{name}={_value(value)}" for name, value in sorted(fn.keywords.items()))]
        return f"partial({', '.join([_identify(fn.func), *given])})"
    if isinstance(fn, MethodType):
        return f"{_identify(fn.__func__)} of a {_name(type(fn.__self__))}"
    if isinstance(fn, FunctionType):
        return f"{_name(fn)} #{_hash(fn)}"
    if isinstance(fn, (BuiltinFunctionType, type)):
        return _name(fn)
    call = inspect.getattr_static(type(fn), "__call__", None)
    return f"a {_name(type(fn))}" + (f" #{_hash(call)}" if isinstance(call, FunctionType) else "")


def _name(fn: Any) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _value(value: Any) -> str:
    """A repr without addresses."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_value, value))})"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)):
        return _name(value) if isinstance(value, type) else _identify(value)
    return repr(value) if type(value).__module__ == "torch" and type(value).__name__ == "dtype" else _name(type(value))


def _hash(fn: FunctionType) -> str:
    sha = hashlib.sha256()
    for part in _parts(fn.__code__):
        sha.update(f"{part}|".encode())
    for cell in fn.__closure__ or ():
        try:
            sha.update(_value(cell.cell_contents).encode())
        except (ValueError, RecursionError):  # empty as yet, or the function itself
            sha.update(b"?")
    sha.update(_value(list(fn.__defaults__ or ())).encode())
    sha.update(_value([*(fn.__kwdefaults__ or {}).values()]).encode())
    return sha.hexdigest()[:8]


def _parts(code: CodeType) -> list[str]:
    constants = [part for c in code.co_consts for part in (_parts(c) if isinstance(c, CodeType) else [_value(c)])]
    return [code.co_code.hex(), *code.co_names, *code.co_varnames, *constants]
