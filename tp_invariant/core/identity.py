"""The identity of a callable as text, which is the same in every process that has the same callable.

A callable may hold values that differ between ranks but do not affect its results, such as a rank number, a device or a
counter of its calls. Such a callable declares its identity:

    class MyGemm:
        tp_invariant_identity = "my_gemm 3, tiles of 128"       # or a method that returns it

        def __init__(self, rank): ..
        def __call__(self, a, b, *, bias=None, out_dtype=None): ..
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_DEPTH = 8  # of values inside values, an instance that holds itself among them
_MOST_BYTES = 1 << 16
_PLAIN = (bool, int, float, complex, str, bytes)
_DECLARED = "tp_invariant_identity"
_ADVICE = f" (declare {_DECLARED} if that may differ)"


def identify(fn: Callable[..., Any]) -> str:
    """ "module.qualified_name #hash", where the hash is of the code, defaults and enclosed values; partials by parts.

    Of an instance, its class, the code of `__call__` and what it holds. Containers, dataclasses, instances, modules of
    torch and tensors on the CPU of up to 64 KiB count by value. What cannot be told apart counts by its type alone:
    larger tensors and those elsewhere by dtype and shape too, enclosed lists, instances of compiled classes, globals
    that the code reads, values nested more than 8 deep. Computed anew each time, as an enclosed value may have changed.

    An attribute `tp_invariant_identity` of a function, a partial or an instance, that is a str or something else that
    can be hashed, or a method or function without arguments that returns it, stands for what is enclosed or held; name
    and code still count. None declares nothing.

    Raises:
        TypeError: a tp_invariant_identity that cannot be hashed.
    """
    text = _identify(fn, 0)
    walked = " holding " in text or getattr(fn, "__closure__", None)
    return text + _ADVICE if walked and not _declared(fn, 0) else text


def _identify(fn: Any, depth: int) -> str:
    declared = _declared(fn, depth)
    if isinstance(fn, FunctionType) and declared:
        return f"{_name(fn)} #{_code(fn.__code__)[:8]}{declared}"
    if isinstance(fn, functools.partial) and not declared:
        given = [_value(value, depth) for value in fn.args]
        given += [f"{name}={_value(value, depth)}" for name, value in sorted(fn.keywords.items())]
        return f"partial({', '.join([_identify(fn.func, depth), *given])})"
    if isinstance(fn, MethodType):
        return f"{_identify(fn.__func__, depth)} of a {_name(type(fn.__self__))}{_held(fn.__self__, depth)}"
    if isinstance(fn, FunctionType):
        return f"{_name(fn)} #{_hash(fn, depth)}"
    if isinstance(fn, (BuiltinFunctionType, type)):
        return _name(fn)
    wrapped = getattr(fn, "__wrapped__", None)  # functools.lru_cache
    if callable(wrapped) and depth < _DEPTH and not declared:
        return f"a {_name(type(fn))} of {_identify(wrapped, depth + 1)}"
    call = inspect.getattr_static(type(fn), "__call__", None)
    code = f" #{_hash(call, depth)}" if isinstance(call, FunctionType) else ""
    return f"a {_name(type(fn))}{code}{_held(fn, depth)}"


def _declared(fn: Any, depth: int) -> str:
    """What `fn` declares itself to be, "" if nothing."""
    # asked of the instance and its class alone: some answer to any name, and a method to those of its function
    if isinstance(fn, (type, MethodType)) or inspect.getattr_static(fn, _DECLARED, None) is None:
        return ""
    value = getattr(fn, _DECLARED)
    value = value() if callable(value) else value
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{_DECLARED} of a {_name(type(fn))} is a {type(value).__name__}, which cannot be hashed: make it a str, a "
            "tuple of such values, or a method that returns one"
        ) from None
    return "" if value is None else f" declared as {_value(value, depth + 1)}"


def _held(instance: Any, depth: int) -> str:
    """What an instance declares, or a digest of its attributes; "" where there is neither."""
    if declared := _declared(instance, depth):
        return declared
    held = dict(getattr(instance, "__dict__", {}))
    slots = [name for kind in type(instance).__mro__ for name in _slots(kind)]
    held |= {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    if not held or depth >= _DEPTH or isinstance(instance, ModuleType):
        return ""
    text = "|".join(f"{name}={_value(value, depth + 1)}" for name, value in sorted(held.items()))
    return f" holding {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _slots(kind: type) -> Iterable[str]:
    names = kind.__dict__.get("__slots__", ())
    names = (names,) if isinstance(names, str) else names
    return (name for name in names if name not in ("__dict__", "__weakref__"))


def _name(fn: Any) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _value(value: Any, depth: int) -> str:
    """A repr without addresses."""
    if value is None or isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
        return repr(value)
    kind = _name(type(value))
    if depth >= _DEPTH:
        return kind
    deeper = depth + 1
    if isinstance(value, (tuple, list)):
        return f"{kind}({', '.join(_value(item, deeper) for item in value)})"
    if isinstance(value, dict):  # in their order, which a callable may follow
        return f"{kind}({', '.join(f'{_value(key, deeper)}: {_value(item, deeper)}' for key, item in value.items())})"
    if isinstance(value, (set, frozenset)):  # whose order differs between processes
        return f"{kind}({', '.join(sorted(_value(item, deeper) for item in value))})"
    if isinstance(value, torch.Tensor):
        return f"{kind}({value.dtype}, {tuple(value.shape)}{_bytes(value)})"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)):
        return _identify(value, deeper)
    return f"{kind}{_held(value, depth)}" if not callable(value) else _identify(value, deeper)


def _bytes(value: torch.Tensor) -> str:
    plain = (
        value.layout == torch.strided and not value.is_quantized and type(value) in (torch.Tensor, torch.nn.Parameter)
    )
    if not plain or value.device.type != "cpu" or value.numel() * value.element_size() > _MOST_BYTES:
        return f", {value.device.type}"
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return f", {hashlib.sha256(bytes(flat.tolist())).hexdigest()[:8]}"


def _hash(fn: FunctionType, depth: int) -> str:
    if depth >= _DEPTH:
        return "deep"
    sha = hashlib.sha256()
    sha.update(_code(fn.__code__).encode())
    for cell in fn.__closure__ or ():
        try:
            held = cell.cell_contents
            # a list is what closures note their calls in: told by its contents, one would be another at each call
            sha.update((_name(list) if type(held) is list else _value(held, depth + 1)).encode())
        except ValueError:  # empty as yet
            sha.update(b"?")
    sha.update(_value(list(fn.__defaults__ or ()), depth + 1).encode())
    sha.update(_value(dict(fn.__kwdefaults__ or {}), depth + 1).encode())
    return sha.hexdigest()[:8]


@functools.lru_cache(maxsize=256)  # what is enclosed may change, code does not
def _code(code: CodeType) -> str:
    return hashlib.sha256("|".join(_parts(code)).encode()).hexdigest()


def _parts(code: CodeType) -> list[str]:
    constants = [part for c in code.co_consts for part in (_parts(c) if isinstance(c, CodeType) else [_value(c, 0)])]
    return [code.co_code.hex(), *code.co_names, *code.co_varnames, *constants]
