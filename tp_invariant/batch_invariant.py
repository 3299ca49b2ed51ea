"""Batch invariance for any model: inside `batch_invariant()` a row has the same bits whatever batch it is in.

torch's matmul, softmax and mean take another order of summation for another number of rows. Inside the context they go
through this library's kernels, whose order depends on the summed dimension alone:

    mm bmm addmm baddbmm mv addmv dot vdot      the process-wide or bundled gemm_fn; out= and in-place forms too
    softmax log_softmax, their backward         kernels/softmax.py
    mean and sum over dims
    F.linear                                    its 2-D form, always: torch rounds once or twice by the input's layout
    F.scaled_dot_product_attention              safe_attention
    exp tanh silu gelu pow rsqrt ..             on a CPU, by whole vectors: torch's kernels have another formula for
                                                the elements left over

Integers are exact in any order and left to torch. What sums in an order of torch's choosing and is not routed
(convolutions, other fused attention, scaled and grouped products) is refused, and so are dtypes, layouts and devices
that the kernels do not take. Reductions of a whole tensor (x.sum()) and the other elementwise functions stay
torch's.

It is a TorchDispatchMode, and not a torch.library registration: a registration is process-wide, is undone by a private
call, and routes calls of other threads meanwhile; a mode is scoped, nests, restores on exceptions, sits below autograd,
which takes it along into the threads of a backward called inside, and keeps torch.compile out: compiled functions run
eagerly in it, so no fused kernel slips by. It costs some microseconds of Python for each operation. It belongs to the
thread that entered it. torch hides function modes from what backward calls, so activation checkpointing is told:

    checkpoint(block, x, use_reentrant=False, context_fn=lambda: (batch_invariant(), batch_invariant()))

With the names of the package batch_invariant_ops, so that changing the import is all:

    from tp_invariant.batch_invariant import set_batch_invariant_mode
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .attention_choice import safe_attention
from .batch_invariant_ops import REFUSED, ROUTES, check_operands, store
from .elementwise import BY_POSITION, at_no_position
from .functions import flatten_tokens

_skipped = threading.local()  # .outer: whether an inner mode that is off handles this thread's operation


class _Routing(TorchDispatchMode):
    """Routes below autograd; with enabled=False it hides the routing modes around it."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for t in types:
            if t.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # a DTensor, say: its own dispatch first, whose local operations come back here
        outer = getattr(_skipped, "outer", False)
        if not self.enabled or outer:
            _skipped.outer = True
            try:
                return func(*args, **kwargs)
            finally:
                _skipped.outer = outer
        handler = _handlers.get(func) or _handlers.setdefault(func, _handler_of(func))
        return handler(self, func, args, kwargs)


Handler = Callable[[_Routing, OpOverload, tuple, dict[str, Any]], Any]
_handlers: dict[OpOverload, Handler] = {}  # asking torch about an overload costs microseconds: once is enough


def _handler_of(func: OpOverload) -> Handler:
    name = func._schema.name
    if func in ROUTES:
        return _route
    if name in REFUSED:
        return _refuse
    if func in BY_POSITION:
        return _at_no_position
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):  # whole only in inference mode
        return _decompose
    return _leave


def _leave(mode: _Routing, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _decompose(mode: _Routing, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    with mode:
        return func.decompose(*args, **kwargs)


def _refuse(mode: _Routing, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"{func}: inside batch_invariant() no kernel computes this with bits that do not depend on the batch; "
        f"{REFUSED[func._schema.name]}, or leave it out with set_batch_invariant_mode(False)"
    )


def _at_no_position(mode: _Routing, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    return at_no_position(func, args, kwargs)


def _route(mode: _Routing, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    plain = {name: value for name, value in kwargs.items() if name not in ("out", "grad_input")}
    if not check_operands(func, args, plain):
        return func(*args, **kwargs)
    result = ROUTES[func](*args, **plain)
    out = args[0] if func._schema.name.endswith("_") else kwargs.get("out", kwargs.get("grad_input"))
    return result if out is None else store(func, result, out)


_OPERATORS = (Tensor.matmul, Tensor.__rmatmul__)  # the first is what a @ b calls
_WATCHED = {F.linear, F.scaled_dot_product_attention, F.multi_head_attention_forward, *_OPERATORS}


class _Reroute(TorchFunctionMode):
    """Above autograd, for the functions that torch decomposes in one way or another by shape, layout or grad mode."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WATCHED and is_batch_invariant_mode_enabled():
            if func is F.linear:
                return _linear(*args, **kwargs)
            if func is F.scaled_dot_product_attention:
                return _attention(*args, **kwargs)
            if func is F.multi_head_attention_forward:  # torch hides this mode from what it calls
                raise NotImplementedError(
                    "nn.MultiheadAttention: inside batch_invariant() its projections would be rounded once or twice by "
                    "layout; write it with nn.Linear and F.scaled_dot_product_attention, or leave it out with "
                    "set_batch_invariant_mode(False)"
                )
            if func in _OPERATORS:
                try:
                    return func(*args, **kwargs)
                except TypeError as error:  # which Python would take for an operator that is not there
                    raise RuntimeError(str(error)) from error
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(flatten_tokens(input), weight, bias).reshape(*input.shape[:-1], *weight.shape[:-1])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p}: inside batch_invariant() attention takes no dropout, whose mask depends on the "
            "batch; set it to 0"
        )
    with set_batch_invariant_mode(False):  # its products are invariant already: nothing to route twice
        return safe_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


# --- public ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """A context, or a decorator: routes what this module's docstring lists, or with False lets torch do it again.

    Nests, restores on exceptions, and holds for this thread. A backward pass is routed if it is called inside.

    Raises (inside, at the operation):
        TypeError: a dtype or layout that the kernels do not take; names the operation and the operand. From `a @ b`
            and `a.matmul(b)` a RuntimeError, because Python swallows a TypeError there.
        NotImplementedError: an operation or a device for which there is no batch-invariant kernel.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled={enabled!r} is not understood: pass True or False")
    with _Reroute(), _Routing(enabled):
        yield


def batch_invariant() -> contextlib._GeneratorContextManager[None]:
    """Context or decorator inside which a model's forward gives a row the same bits in any batch.

        with tpi.batch_invariant():
            logits = model(tokens)

    Raises: see set_batch_invariant_mode.
    """
    return set_batch_invariant_mode(True)


def _modes() -> Iterator[_Routing]:
    """This thread's, the innermost first."""
    return (mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, _Routing))


def is_batch_invariant_mode_enabled() -> bool:
    """Whether operations of this thread are routed now."""
    mode = next(_modes(), None)
    return mode is not None and mode.enabled


_enabled = threading.local()  # .context: what enable_batch_invariant_mode entered on this thread


def enable_batch_invariant_mode() -> None:
    """Turns the mode on for the rest of this thread, or until disable_batch_invariant_mode; twice is as once."""
    if getattr(_enabled, "context", None) is None:
        modes = _Reroute(), _Routing(True)
        for mode in modes:
            mode.__enter__()
        _enabled.context = modes


def disable_batch_invariant_mode() -> None:
    """Undoes enable_batch_invariant_mode; nothing if it was not called on this thread.

    Raises:
        RuntimeError: contexts entered since then are still open.
    """
    modes = getattr(_enabled, "context", None)
    if modes is None:
        return
    if modes[1] is not _get_current_dispatch_mode_stack()[-1] or modes[0] is not _get_current_function_mode():
        raise RuntimeError(
            "disable_batch_invariant_mode() inside a torch mode that was entered after enable_batch_invariant_mode(): "
            "leave that one first, or use set_batch_invariant_mode(False) as a context"
        )
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    _enabled.context = None
