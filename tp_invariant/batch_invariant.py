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

How. torch's dispatcher has two keys that nothing in torch 2.11 to 2.13 registers: DeferredInit above autograd, Fake
below it. At the first entry the functions above are registered there, for good, and a fallthrough for all others. A
thread inside has the two keys in its thread-local set; so what is not routed costs nothing inside, and nothing at all
is different outside or in another thread. torch takes the set along into the threads of a backward, into what
activation checkpointing computes again, and into the functions that torch's own C++ calls. Other ways: a
TorchDispatchMode has Python run for each operation, some 3000 in a forward of 28 layers, 78 ms against 16 on an H200;
registering at "CUDA", as batch_invariant_ops does, routes every thread's calls.

Its price: the keys and the calls that set them are private. A torch that lacks them, has them elsewhere or uses them
itself is noticed at the first entry, a RuntimeError. Where there is CUDA the elementwise functions are registered at
"CPU" instead, so that a GPU's do not wait for Python; a thread outside then pays some microseconds for a CPU's.

Compiled functions run eagerly while any thread is inside (torch.compiler.set_stance, which is process-wide), so no
fused kernel slips by; the backward of one that ran outside is compiled and stays so.

With the names of the package batch_invariant_ops, so that changing the import is all:

    from tp_invariant.batch_invariant import set_batch_invariant_mode
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._ops import OpOverload

from .attention_choice import safe_attention
from .batch_invariant_ops import REFUSED, ROUTES, addmm, check_operands, mm, overloads, store
from .elementwise import BY_POSITION, at_no_position
from .functions import flatten_tokens
from .gemm import BUNDLED_DTYPES

# --- at the two keys ------------------------------------------------------------------------------------------------

_ABOVE, _BELOW = "DeferredInit", "Fake"  # autograd
_lock = threading.Lock()
_included: Callable[[DispatchKey], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_include: Callable[[DispatchKey, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
_exclude: Callable[[DispatchKey, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded


def _keys() -> tuple[DispatchKey, DispatchKey]:
    """_ABOVE and _BELOW.

    Raises:
        RuntimeError: this torch does not have them where they were, or uses them.
    """
    try:
        above, below = (torch._C._dispatch_key_parse(name) for name in (_ABOVE, _BELOW))
    except RuntimeError:
        above = below = DispatchKey.Undefined
    order = (DispatchKey.BackendSelect, below, DispatchKey.ADInplaceOrView, DispatchKey.AutocastCUDA, above)
    places = [key.value for key in order]
    entries = torch._C._dispatch_dump_table("aten::mm").splitlines()
    if places != sorted(set(places)) or any(line.startswith((f"{_ABOVE}:", f"{_BELOW}:")) for line in entries):
        raise RuntimeError(
            f"batch_invariant() needs the dispatch keys {_ABOVE} and {_BELOW}, which torch {torch.__version__} lacks, "
            "has in another order or uses itself (or torchdistx, if it is imported): use torch 2.11 to 2.13, without it"
        )
    return above, below


Handler = Callable[[tuple, dict[str, Any]], Any]


def _kernel(handle: Handler, leave: Callable[[DispatchKeySet], bool], otherwise: Callable[..., Any]) -> Callable:
    """What is registered: handle(args, kwargs), inside of which nothing is routed; `otherwise` where leave(keys)."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if leave(keys):
            return otherwise(keys, *args, **kwargs)
        _include(_below, False)
        try:
            return handle(args, kwargs)
        finally:
            _include(_below, True)

    return kernel


def _is_off(keys: DispatchKeySet) -> bool:
    return not _included(_below)


def _redispatch(func: OpOverload, later: DispatchKeySet, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    return func.redispatch(keys & later, *args, **kwargs)


def _is_for_python(keys: DispatchKeySet) -> bool:
    """In torch 2.11 a dispatch mode or a subclass, a DTensor say, comes behind _BELOW, and hides it while it runs."""
    return keys.has(DispatchKey.Python)


def _python_first(func: OpOverload) -> Callable[..., Any]:
    """func without _BELOW, which torch takes away for what the mode or the subclass calls, too."""

    def call(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        _register_behind_python()
        _exclude(_below, True)
        try:
            return func(*args, **kwargs)
        finally:
            _exclude(_below, False)

    return call


def _goes_by_cpu(func: OpOverload) -> bool:
    """Whether a kernel at "CPU" can stand in for func.

    Not for one of two tensors (add): torch hands over a number in place of the second, which cannot be passed on. Nor
    for a composite one: what it is made of does, and a kernel of its own would take its derivative.
    """
    tensors = sum(str(argument.type) == "Tensor" and not argument.is_out for argument in func._schema.arguments)
    composite = func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    direct = func.has_kernel_for_dispatch_key(DispatchKey.CPU)
    return (tensors == 1 or "backward" in func._schema.name) and (direct or not composite)


def _router(func: OpOverload) -> Callable[[tuple, dict[str, Any]], Tensor]:
    compute, in_place = ROUTES[func], func._schema.name.endswith("_")
    target = next((argument.name for argument in func._schema.arguments if argument.is_out), None)

    def route(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        plain = kwargs if target is None else {name: value for name, value in kwargs.items() if name != target}
        if not check_operands(func, args, plain):
            return func(*args, **kwargs)
        result = compute(*args, **plain)
        if target is not None:
            return store(func, result, kwargs[target])
        return store(func, result, args[0]) if in_place else result

    return route


def _refusal(func: OpOverload) -> Callable[[tuple, dict[str, Any]], Any]:
    def refuse(args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError(
            f"{func}: inside batch_invariant() no kernel computes this with bits that do not depend on the batch; "
            f"{REFUSED[func._schema.name]}, or leave it out with set_batch_invariant_mode(False)"
        )

    return refuse


def _above_autograd(replacement: Callable[..., Tensor]) -> Callable:
    """What _ABOVE has in place of a function that torch decomposes in one way or another by shape or layout."""

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Tensor:
        _include(_above, False)
        try:
            return replacement(keys, *args, **kwargs)
        finally:
            _include(_above, True)

    return kernel


@functools.cache
def _is_plain(keys: int) -> bool:
    """Whether a call's keys say that it is of a CPU's or a GPU's dense tensors and nobody else's: no autocast, no vmap."""
    plain = DispatchKeySet(_above) | DispatchKeySet(_below)
    for key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "BackendSelect"):
        plain = plain | DispatchKeySet(getattr(DispatchKey, key))
    return (plain | DispatchKeySet.from_raw_repr(keys)).raw_repr() == plain.raw_repr()


def _linear(keys: DispatchKeySet, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = input if input.dim() == 2 else flatten_tokens(input)
    if (
        _is_plain(keys.raw_repr())
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None))
        and x.dtype is weight.dtype
        and x.dtype in BUNDLED_DTYPES
        and weight.dim() == 2
    ):  # what it comes to, without the way through the dispatcher
        _include(_below, False)
        try:
            y = mm(x, weight.t()) if bias is None else addmm(bias, x, weight.t())
        finally:
            _include(_below, True)
    else:
        y = F.linear(x, weight, bias)
    return y if x is input else y.view(*input.shape[:-1], *weight.shape[:-1])


def _matmul(keys: DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
    try:
        return torch.matmul(a, b)
    except TypeError as error:  # which Python would take for an operator that is not there
        raise RuntimeError(str(error)) from error


def _attention(
    keys: DispatchKeySet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
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


_REPLACED: dict[OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.matmul.default: _matmul,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
}
_above = _below = DispatchKey.Undefined  # until _register
_handlers: dict[OpOverload, Handler] = {}
_libraries: list[torch.library.Library] = []  # what is registered lives as long as they do


def _register() -> None:
    """Registers all of it, once for the process.

    Raises: see _keys.
    """
    global _above, _below
    with _lock:
        if _libraries:
            return
        _above, _below = _keys()
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        for name in (_ABOVE, _BELOW):
            everything.fallback(torch.library.fallthrough_kernel, name)
        for func, replacement in _REPLACED.items():
            aten.impl(func, _above_autograd(replacement), _ABOVE, with_keyset=True)
        _handlers.update({func: _router(func) for func in ROUTES})
        _handlers.update({func: _refusal(func) for name in REFUSED for func in overloads(name)})
        by_cpu = set(filter(_goes_by_cpu, BY_POSITION)) if torch.cuda.is_available() else set()
        by_position = {func: functools.partial(at_no_position, func) for func in BY_POSITION}
        for func, handle in (_handlers | by_position).items():
            if func not in by_cpu:
                kernel = _kernel(handle, _is_for_python, _python_first(func))
                aten.impl(func, kernel, _BELOW, with_keyset=True)
                continue
            kernel = _kernel(handle, _is_off, torch.library.get_kernel(func, "CPU").call_boxed)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
                aten.impl(func, kernel, "CPU", with_keyset=True)
        _libraries.extend((everything, aten))


def _register_behind_python() -> None:
    """What is routed or refused once more at BackendSelect, which every thread passes: only once it is needed."""
    with _lock:
        if len(_libraries) == 2:
            aten = torch.library.Library("aten", "IMPL")
            later = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
            for func, handle in _handlers.items():
                kernel = _kernel(handle, _is_off, functools.partial(_redispatch, func, later))
                aten.impl(func, kernel, "BackendSelect", with_keyset=True)
            _libraries.append(aten)


# --- public ---------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    contexts = 0  # open ones
    enabled: tuple[contextlib.AbstractContextManager[None], int] | None = None  # enable_'s, and how many were open then


_thread = _Thread()
_open = 0  # contexts of all threads
_stance: Any = None  # gives back what the first of them found of torch.compile's stance


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """torch.compile stands back: on this thread, if a compiled function enters; for all, until the last one leaves."""
    global _open, _stance
    callback = set_eval_frame(None)
    try:
        with _lock:
            if _open == 0:
                _stance = torch.compiler.set_stance("force_eager")
            _open += 1
        try:
            yield
        finally:
            with _lock:
                _open -= 1
                if _open == 0:
                    _stance.__exit__(None, None, None)
    finally:
        set_eval_frame(callback)


@contextlib.contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """A context, or a decorator: routes what this module's docstring lists, or with False lets torch do it again.

    Nests, restores on exceptions, and holds for this thread. A backward pass is routed if it is called inside.

    Raises (inside, at the operation):
        TypeError: a dtype or layout that the kernels do not take; names the operation and the operand. From `a @ b`
            and matmul a RuntimeError, because Python swallows a TypeError there.
        NotImplementedError: an operation or a device for which there is no batch-invariant kernel.
    Raises (at the entry):
        RuntimeError: in a compiled function; or under a torch whose dispatcher is another (see above).
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled={enabled!r} is not understood: pass True or False")
    _register()
    keys = _above, _below
    before = [_included(key) for key in keys]
    with _nothing_compiled():
        _thread.contexts += 1
        for key in keys:
            _include(key, enabled)
        try:
            yield
        finally:
            for key, was in zip(keys, before, strict=True):
                _include(key, was)
            _thread.contexts -= 1


def batch_invariant() -> contextlib._GeneratorContextManager[None]:
    """Context or decorator inside which a model's forward gives a row the same bits in any batch.

        with tpi.batch_invariant():
            logits = model(tokens)

    Raises: see set_batch_invariant_mode.
    """
    return set_batch_invariant_mode(True)


def is_batch_invariant_mode_enabled() -> bool:
    """Whether operations of this thread are routed now."""
    return bool(_libraries) and _included(_below)


def enable_batch_invariant_mode() -> None:
    """Turns the mode on for the rest of this thread, or until disable_batch_invariant_mode; twice is as once."""
    if _thread.enabled is None:
        context = set_batch_invariant_mode(True)
        context.__enter__()
        _thread.enabled = context, _thread.contexts


def disable_batch_invariant_mode() -> None:
    """Undoes enable_batch_invariant_mode; nothing if it was not called on this thread.

    Raises:
        RuntimeError: contexts entered since then are still open.
    """
    if _thread.enabled is None:
        return
    context, contexts = _thread.enabled
    if contexts != _thread.contexts:
        raise RuntimeError(
            "disable_batch_invariant_mode() inside a context that was entered after enable_batch_invariant_mode(): "
            "leave that one first, or use set_batch_invariant_mode(False) as a context"
        )
    _thread.enabled = None
    context.__exit__(None, None, None)
