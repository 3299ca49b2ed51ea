"""context.py's use of torch's dispatcher: two dispatch keys, the functions registered at them, and threads' key sets.

The keys are DeferredInit, above autograd, and Fake, below it. torch 2.11 to 2.13 registers nothing at either.
context.py explains the choice.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core import torch_private
from ..core.elementwise import POSITION_DEPENDENT, position_invariant
from ..core.torch_private import DispatchKey, DispatchKeySet, OpOverload, exclude, include, included, schema_of
from .ops import REFUSED, REFUSED_OVER_DIMS, ROUTES, check_operands, over_dims, overloads, store

_ABOVE, _BELOW = "DeferredInit", "Fake"  # autograd
_lock = threading.Lock()


def _keys() -> tuple[DispatchKey, DispatchKey]:
    """_ABOVE and _BELOW.

    Raises:
        RuntimeError: this torch does not have them where they were, or uses them.
    """
    try:
        above, below = map(torch_private.dispatch_key, (_ABOVE, _BELOW))
    except RuntimeError:
        above = below = DispatchKey.Undefined
    order = (DispatchKey.BackendSelect, below, DispatchKey.ADInplaceOrView, DispatchKey.AutocastCUDA, above)
    places = [key.value for key in order]
    used = any(torch.ops.aten.mm.default.has_kernel_for_dispatch_key(key) for key in (above, below))
    if places != sorted(set(places)) or used:
        raise RuntimeError(
            f"batch_invariant() needs the dispatch keys {_ABOVE} and {_BELOW}, which torch {torch.__version__} lacks, "
            "has in another order or uses itself (or torchdistx, if it is imported): use torch 2.11 to 2.13, without it"
        )
    return above, below


Handler = Callable[[tuple, dict[str, Any]], Any]


def _kernel(handle: Handler, leave: Callable[[DispatchKeySet], bool], otherwise: Callable[..., Any]) -> Callable:
    """The function to register: handle(args, kwargs), inside which nothing is routed; `otherwise` if leave(keys)."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if leave(keys):
            return otherwise(keys, *args, **kwargs)
        include(_below, False)
        try:
            return handle(args, kwargs)
        finally:
            include(_below, True)

    return kernel


def _is_off(keys: DispatchKeySet) -> bool:
    return not included(_below)


def _redispatch(func: OpOverload, later: DispatchKeySet, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    return func.redispatch(keys & later, *args, **kwargs)


def _is_for_python(keys: DispatchKeySet) -> bool:
    """Whether a dispatch mode or a tensor subclass (DTensor, say) handles the call.

    In torch 2.11 it runs after _BELOW, and hides that key while it runs.
    """
    return keys.has(DispatchKey.Python)


def _python_first(func: OpOverload) -> Callable[..., Any]:
    """func without _BELOW, a key that torch also removes for the functions that the mode or the subclass calls."""

    def call(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        _register_behind_python()
        exclude(_below, True)
        try:
            return func(*args, **kwargs)
        finally:
            exclude(_below, False)

    return call


def _router(func: OpOverload) -> Callable[[tuple, dict[str, Any]], Tensor]:
    compute, in_place = ROUTES[func], schema_of(func).name.endswith("_")
    target = next((argument.name for argument in schema_of(func).arguments if argument.is_out), None)

    def route(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        plain = kwargs if target is None else {name: value for name, value in kwargs.items() if name != target}
        if not check_operands(func, args, plain):
            return func(*args, **kwargs)
        result = compute(*args, **plain)
        if target is not None:
            return store(func, result, kwargs[target])
        return store(func, result, args[0]) if in_place else result

    return route


def _refusal(func: OpOverload, advice: str, unless: Callable[[tuple, dict[str, Any]], bool] | None = None) -> Handler:
    def refuse(args: tuple, kwargs: dict[str, Any]) -> Any:
        if unless is not None and unless(args, kwargs):
            return func(*args, **kwargs)
        raise NotImplementedError(
            f"{func}: inside batch_invariant() no kernel computes this with bits that do not depend on the batch; "
            f"{advice}, or leave it out with set_batch_invariant_mode(False)"
        )

    return refuse


def _refusal_over_dims(func: OpOverload, advice: str, place: int) -> Handler:
    def whole(args: tuple, kwargs: dict[str, Any]) -> bool:
        """Or of integers, which are exact in any order."""
        dim = args[place] if len(args) > place else kwargs.get("dim")
        return dim is None or dim == [] or not (args[0].is_floating_point() or args[0].is_complex())

    return _refusal(func, advice, whole)


def _above_autograd(replacement: Callable[..., Tensor]) -> Callable:
    """The function at _ABOVE that replaces one which torch decomposes differently by shape or layout."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Tensor:
        include(_above, False)
        try:
            return replacement(keys, *args, **kwargs)
        finally:
            include(_above, True)

    return kernel


def unrouted(fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """fn(*args, **kwargs), inside of which nothing is routed."""
    was = included(_below)
    if not was:
        return fn(*args, **kwargs)
    include(_below, False)
    try:
        return fn(*args, **kwargs)
    finally:
        include(_below, True)


_above = _below = DispatchKey.Undefined  # until register
_handlers: dict[OpOverload, Handler] = {}
_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


def register(replaced: dict[OpOverload, Callable[..., Tensor]]) -> tuple[DispatchKey, DispatchKey]:
    """Registers all of it, once for the process; returns the keys above and below autograd.

    replaced: called in place of a function, above autograd, with the call's keys as first argument.

    Raises: see _keys.
    """
    global _above, _below
    with _lock:
        if _libraries:
            return _above, _below
        _above, _below = _keys()
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        for name in (_ABOVE, _BELOW):
            everything.fallback(torch.library.fallthrough_kernel, name)
        for func, replacement in replaced.items():
            aten.impl(func, _above_autograd(replacement), _ABOVE, with_keyset=True)
        _handlers.update({func: _router(func) for func in ROUTES})
        _handlers.update({func: _refusal(func, advice) for name, advice in REFUSED.items() for func in overloads(name)})
        for name, advice in REFUSED_OVER_DIMS.items():
            for func in overloads(name):
                if (place := over_dims(func)) is not None:
                    _handlers[func] = _refusal_over_dims(func, advice, place)
        by_position = {func: functools.partial(position_invariant, func) for func in POSITION_DEPENDENT}
        for func, handle in (_handlers | by_position).items():
            aten.impl(func, _kernel(handle, _is_for_python, _python_first(func)), _BELOW, with_keyset=True)
        from ..kernels.gemm import reference

        reference.unrouted = unrouted
        _libraries.extend((everything, aten))
        return _above, _below


def _register_behind_python() -> None:
    """Registers routed and refused functions at BackendSelect too, through which the calls of all threads pass."""
    with _lock:
        if len(_libraries) == 2:
            aten = torch.library.Library("aten", "IMPL")
            later = torch_private.keys_after(DispatchKey.BackendSelect)
            for func, handle in _handlers.items():
                kernel = _kernel(handle, _is_off, functools.partial(_redispatch, func, later))
                aten.impl(func, kernel, "BackendSelect", with_keyset=True)
            _libraries.append(aten)


def is_on() -> bool:
    """Whether this thread's operations are routed now."""
    return bool(_libraries) and included(_below)
