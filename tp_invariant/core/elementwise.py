"""Elementwise functions whose bits do not depend on where an element lies; why, and how: kernels/elementwise.py.

On a CPU alone: there functions that a model's own code and its activations call (`AroundLayers`), the activations of
experts, and what runs inside `batch_invariant()` are computed in whole vectors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.elementwise import in_whole_vectors
from .module_hooks import with_key
from .torch_private import DisableTorchFunction, function_modes, schema_of


class AroundLayers(TorchFunctionMode):
    """A mode that replaces functions which a model's code calls, and none that this library's layers call."""


class AroundForward:
    """Hooks of a module, inside of whose forward the mode `_mode()` is on; None: no mode."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self._entered: list[AroundLayers | None] = []
        with_key(module.register_forward_pre_hook(self._enter), key)
        with_key(module.register_forward_hook(self._leave, always_call=True), key)

    def _mode(self) -> AroundLayers | None:
        raise NotImplementedError

    def _enter(self, module: nn.Module, args: Any) -> None:
        mode = self._mode()
        self._entered.append(mode)
        if mode is not None:
            mode.__enter__()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._entered.pop() if self._entered else None  # after an error in another hook without _enter
        if mode is not None:
            mode.__exit__(None, None, None)


def inside_a_layer() -> AbstractContextManager[Any]:
    """Around what a layer computes: inside of an `AroundLayers` no mode sees it, as each function would cost 1 us."""
    if torch.compiler.is_compiling() or not any(isinstance(mode, AroundLayers) for mode in function_modes()):
        return _NO_CONTEXT
    return DisableTorchFunction()


_SHARED_NAMES = (
    "sigmoid silu gelu tanh softplus elu celu selu mish glu softshrink exp exp2 expm1 log log2 log10 log1p sin cos tan "
    "asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv rsqrt lgamma digamma i0 pow"
)
_FUNCTIONS = "expit logsigmoid tanhshrink arcsin arccos arctan arcsinh arccosh arctanh gammaln psi i0e __pow__ __rpow__"
# {a function of torch: the one that does the same and leaves its argument as it is}
POSITION_DEPENDENT_FUNCTIONS: dict[Any, Any] = {
    function: getattr(place, name)
    for name in f"{_SHARED_NAMES} {_FUNCTIONS}".split()
    for place in (torch, torch.special, F, Tensor)
    for function in (getattr(place, name, None), getattr(place, f"{name}_", None))
    if function is not None
} | {Tensor.__ipow__: Tensor.__pow__}
_NO_CONTEXT = nullcontext()
_TARGETS = ("out", "grad_input")
_POWERS = (torch.pow, Tensor.pow, Tensor.__pow__)


def _on_cpu(*values: Any) -> bool:
    return all(x.device.type == "cpu" and x.layout == torch.strided for x in values if isinstance(x, Tensor))


def _in_whole_vectors(function: Any, args: tuple, kwargs: dict[str, Any], written: Tensor | None = None) -> Tensor:
    """function(*args, **kwargs) by `in_whole_vectors`, with torch's strides; in `written`, an argument, if any."""
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    shape = torch.broadcast_shapes(*(value.shape for key, value in tensors.items() if key not in _TARGETS))
    for target in (value for key, value in tensors.items() if key in _TARGETS):
        target.resize_(shape)
    # A 0-dim tensor among others stays as it is, because type promotion depends on that.
    tensors = {key: value for key, value in tensors.items() if value.dim() or not shape}

    def call(*blocks: Tensor) -> Tensor:
        given = values | dict(zip(tensors, blocks, strict=True))
        return function(*(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs})

    result = in_whole_vectors(call, *(value.expand(shape) for value in tensors.values()))
    if written is not None:
        return written.copy_(result)
    like = next((value for value in tensors.values() if value.shape == shape), result)
    return result if like.is_contiguous() else torch.empty_like(like, dtype=result.dtype).copy_(result)


def _glu(glu: Any, *args: Any) -> Tensor:
    """glu or its backward: an element of the result needs one of each half, so the halves are divided alike."""
    *grad, x = (value for value in args if isinstance(value, Tensor))
    dim = next((value for value in args if not isinstance(value, Tensor)), -1)
    halves = x.chunk(2, dim) if -x.dim() <= dim < x.dim() and x.shape[dim] % 2 == 0 and x.numel() else ()
    if not halves or any(dy.shape != halves[0].shape for dy in grad):
        return glu(*args)  # torch's result of no elements, or its error
    if not grad:
        return in_whole_vectors(lambda *both: glu(torch.stack(both), 0)[0], *halves)
    backward = [lambda dy, *both, i=i: glu(dy[None], torch.stack(both), 0)[i] for i in (0, 1)]
    return torch.cat([in_whole_vectors(half, *grad, *halves) for half in backward], dim)


def call_in_whole_vectors(function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """function(*args, **kwargs) of POSITION_DEPENDENT_FUNCTIONS, on a CPU by `in_whole_vectors`, with torch's strides.

    What has several tensors or no elements torch computes, and squares and cubes, which are products.

    Raises:
        ValueError: out= is given.
    """
    plain, inplace = POSITION_DEPENDENT_FUNCTIONS[function], kwargs.get("inplace", False)
    named = {name: value for name, value in kwargs.items() if name not in ("out", "inplace")}
    values = (*args, *named.values())
    tensors: list[Any] = [value for value in values if isinstance(value, Tensor)]
    x, *others = tensors or [None]
    is_product = plain in _POWERS and not others and values[0] is x and values[1:] in ((2,), (3,))
    if others or is_product or type(x) not in (Tensor, nn.Parameter) or not (_on_cpu(x) and x.numel()):
        return function(*args, **kwargs)
    if kwargs.get("out") is not None:
        raise ValueError(
            f"{function.__name__}(.., out=) in a module that calls tensor-parallel layers is not supported on a CPU "
            "with the TP-invariant mode on: leave out= away"
        )
    if args[1:] and args[-1] is True and function.__module__ == F.__name__:  # `inplace`, the last parameter there
        args, inplace = args[:-1], True
    with inside_a_layer():
        if function is F.glu:
            return _glu(F.glu, *values)
        result = _in_whole_vectors(plain, args, named)
        if not inplace and plain is function:
            return result
        return x.copy_(result) if result.dtype == x.dtype else function(*args, **kwargs)  # torch's error


# --- aten's own -----------------------------------------------------------------------------------------------------

_SUMS = ("add", "sub", "rsub")
_OPERATORS = (
    "sigmoid_backward silu_backward gelu_backward tanh_backward softplus_backward elu_backward mish_backward "
    "softshrink_backward glu_backward polygamma igamma igammac special_i0e atan2 logaddexp logaddexp2 xlogy ldexp hypot"
)
# Overloads whose CPU kernel gave an element different bits at different positions in a test, and related overloads.
POSITION_DEPENDENT: frozenset[Any] = frozenset(
    op
    for name in (*_SHARED_NAMES.split(), *_OPERATORS.split(), *_SUMS)
    for packet in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_", None))
    if packet is not None
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if any(str(argument.type) == "Tensor" for argument in schema_of(op).arguments)
)


def position_invariant(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """func(*args, **kwargs) of POSITION_DEPENDENT, below autograd; on a CPU by `in_whole_vectors`.

    With alpha = 1, the usual case, torch computes an add, sub or rsub: it goes by the position with a factor alone.
    """
    name = schema_of(func).name.removeprefix("aten::")
    factor = (args[2] if len(args) > 2 else kwargs.get("alpha", 1)) if name.rstrip("_") in _SUMS else None
    if factor == 1 or not _on_cpu(*args, *kwargs.values()):
        return func(*args, **kwargs)
    if name in ("glu", "glu_backward"):
        return func(*args, **kwargs) if kwargs else _glu(func, *args)
    written = args[0] if name.endswith("_") else next((kwargs[key] for key in _TARGETS if key in kwargs), None)
    return _in_whole_vectors(func, args, kwargs, written)
