"""What torch.compile must leave to run as in eager mode: it is no op, and compiled its arithmetic would be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_eval_frame: Any = torch._C._dynamo.eval_frame
_AS_IT_IS = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def never_a_frame_of_its_own(fn: _Function) -> _Function:
    """For a hook: code that is traced may call it, but where torch's own code calls it, it runs as it is, and all below
    it. There torch.compile would look at arguments that are not complete yet, as modules are while they are made."""
    _eval_frame.set_code_exec_strategy(fn.__code__, _AS_IT_IS)
    return fn


def outside_of_graphs(reason: str) -> Callable[[_Function], _Function]:
    """For a function that is no op: while torch.compile traces, it breaks the graph there and runs as in eager mode.

    The same as torch.compiler.disable, without importing the compiler, and at no cost for a call. With fullgraph=True
    it is an error that gives the reason. The function must be plain: its code is marked, and all that it calls runs as
    it is. Place it below torch.no_grad(), whose code all that it decorates have in common.
    """

    def decorate(fn: _Function) -> _Function:
        # what torch.compiler.disable sets too, by which a call in code that is traced is known
        fn._torchdynamo_disable, fn._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
        return never_a_frame_of_its_own(fn)

    return decorate
