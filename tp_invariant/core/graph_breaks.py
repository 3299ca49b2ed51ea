"""What torch.compile must leave to run as in eager mode: it is no op, and compiled its arithmetic would be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .torch_private import mark_disabled, skip_code

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_a_frame_of_its_own(fn: _Function) -> _Function:
    """For a hook: code that is traced may call it, but where torch's own code calls it, it runs as it is, and all below
    it. There torch.compile would look at arguments that are not complete yet, as modules are while they are made."""
    skip_code(fn)
    return fn


def outside_of_graphs(reason: str) -> Callable[[_Function], _Function]:
    """For a function that is no op: while torch.compile traces, it breaks the graph there and runs as in eager mode.

    The same as torch.compiler.disable, without importing the compiler, and at no cost for a call. With fullgraph=True
    it is an error that gives the reason. The function must be plain: its code is marked, and all that it calls runs as
    it is. Place it below torch.no_grad(), whose code all that it decorates have in common.
    """

    def decorate(fn: _Function) -> _Function:
        return never_a_frame_of_its_own(mark_disabled(fn, reason))

    return decorate
