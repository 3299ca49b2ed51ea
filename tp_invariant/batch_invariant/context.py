"""Batch invariance for any model: inside `batch_invariant()` a row has the same bits in every batch.

The order of summation in torch's matmul, softmax and mean depends on the number of rows. Inside the context they are
computed by this library's kernels, whose order depends on the summed dimension alone:

    mm bmm addmm baddbmm mv addmv dot vdot      the process-wide or bundled gemm_fn; out= and in-place forms too
    softmax log_softmax, their backward         kernels/rowwise/softmax.py
    mean and sum over dims
    F.linear                                    its 2-D form, always: torch rounds once or twice by the input's layout
    F.scaled_dot_product_attention              safe_attention
    exp tanh silu gelu pow rsqrt ..             on a CPU, in full vectors: torch's kernels use another formula for
                                                the remaining elements

Operations on integers are exact in any order and left to torch. Refused are convolutions, other fused attention, scaled
and grouped products, and prod, nansum, norm, var and std over dims, whose order of summation torch chooses; also
dtypes, layouts and devices that the kernels do not take. Not changed are reductions of a whole tensor (x.sum()), the
other elementwise functions, and other computations with rows (cumulative sums, torch.linalg, FFTs, pooling,
scatter_add).

Implementation. torch's dispatcher has two keys that nothing in torch 2.11 to 2.13 registers: DeferredInit above
autograd, and Fake below it. At the first entry the functions above are registered there permanently, and a fallthrough
for all others. A thread inside the context has the two keys in its thread-local set. So an operation that is not routed
costs nothing inside, and nothing changes outside or in other threads. torch copies this set to the threads of a
backward, to recomputations of activation checkpointing, and to the functions that torch's own C++ calls. Alternatives:
a TorchDispatchMode runs Python for each operation, about 3000 in a forward of 28 layers, 78 ms against 16 on an H200;
registering at "CUDA", as batch_invariant_ops does, routes every thread's calls.

Disadvantages: the keys, and the functions that set them, are private. If a torch version lacks them, has them at other
places or uses them itself (2.13 already names Fake as the key of a future FakeTensor mode), the first entry raises a
RuntimeError. In torch 2.11 a dispatch mode or a DTensor inside the context hides Fake from the functions that it calls;
then routed and refused functions are registered at BackendSelect too, a product outside pays about 5 us, and
elementwise functions on a CPU are torch's there.

Compiled functions run eagerly while any thread is inside (torch.compiler.set_stance, which is process-wide), so that no
fused kernel runs; the backward of a compiled function that ran outside stays compiled.

The names are those of the package batch_invariant_ops, so that only the import has to be changed:

    from tp_invariant.batch_invariant import set_batch_invariant_mode
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.torch_private import DispatchKeySet, OpOverload, eval_frame
from ..functional.attention_choice import safe_attention
from ..functional.linear import flatten_tokens
from .dispatch import include, included, is_on, register, unrouted


def _linear(keys: DispatchKeySet, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = input if input.dim() == 2 else flatten_tokens(input)
    y = F.linear(x, weight, bias)
    return y if x is input else y.view(*input.shape[:-1], *weight.shape[:-1])


def _matmul(keys: DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
    try:
        return torch.matmul(a, b)
    except TypeError as error:  # Python would treat a TypeError as an unsupported operator
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
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return unrouted(safe_attention, query, key, value, **options)  # its products are invariant already


_REPLACED: dict[OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.matmul.default: _matmul,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
}


# --- public ---------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    contexts = 0  # open ones
    enabled: tuple[contextlib.AbstractContextManager[None], int] | None = None  # enable_'s, and how many were open then


_thread = _Thread()
_opening = threading.Lock()
_open = 0  # contexts of all threads
_stance: Any = None  # restores torch.compile's stance from before the first context


@contextlib.contextmanager
def _compilation_disabled() -> Iterator[None]:
    """Disables torch.compile: on this thread, if a compiled function enters; on all until the last one exits."""
    global _open, _stance
    callback = eval_frame.set_eval_frame(None)
    try:
        with _opening:
            if _open == 0:
                _stance = torch.compiler.set_stance("force_eager")
            _open += 1
        try:
            yield
        finally:
            with _opening:
                _open -= 1
                if _open == 0:
                    _stance.__exit__(None, None, None)
    finally:
        eval_frame.set_eval_frame(callback)


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
    keys = register(_REPLACED)
    before = [included(key) for key in keys]
    with _compilation_disabled():
        _thread.contexts += 1
        for key in keys:
            include(key, enabled)
        try:
            yield
        finally:
            for key, was in zip(keys, before, strict=True):
                include(key, was)
            _thread.contexts -= 1


def batch_invariant() -> contextlib.AbstractContextManager[None]:
    """Context or decorator inside which a model's forward gives a row the same bits in any batch.

        with tpi.batch_invariant():
            logits = model(tokens)

    Raises: see set_batch_invariant_mode.
    """
    return set_batch_invariant_mode(True)


def is_batch_invariant_mode_enabled() -> bool:
    """Whether operations of this thread are routed now."""
    return is_on()


def enable_batch_invariant_mode() -> None:
    """Turns the mode on for this thread until disable_batch_invariant_mode; a second call has no effect."""
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
