"""Elementwise functions whose bits do not depend on where an element lies; why, and how: kernels/elementwise.py.

On a CPU alone: there functions that a model's own code and its activations call (`AroundLayers`), the activations of
experts, and what runs inside `batch_invariant()` are computed in whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.elementwise import in_whole_vectors
from .module_hooks import has_own_forward
from .torch_private import DisableTorchFunction, function_modes, schema_of


def has_known_forward(activation: Any) -> bool:
    """Whether an activation has a forward of torch or transformers, and no tensors.

    A class that derives from one of theirs may have another forward.
    """
    if not isinstance(activation, nn.Module) or has_own_forward(activation):
        return False
    known = type(activation).forward.__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return known and not any(True for _ in (*activation.parameters(), *activation.buffers()))


class AroundLayers(TorchFunctionMode):
    """A mode that replaces functions which a model's code calls, and none that this library's layers call."""


_NO_CONTEXT = nullcontext()


def is_inside(kind: type[AroundLayers]) -> bool:
    """Whether this thread is inside a mode of this kind."""
    return any(type(mode) is kind for mode in function_modes())


def inside_a_layer() -> AbstractContextManager[Any]:
    """Around what a layer computes: inside of an `AroundLayers` no mode sees it, as each function would cost 1 us."""
    if torch.compiler.is_compiling() or not any(isinstance(mode, AroundLayers) for mode in function_modes()):
        return _NO_CONTEXT
    return DisableTorchFunction()


_OF_ONE_TENSOR = (
    "sigmoid expit logsigmoid silu gelu tanh tanhshrink softplus elu celu selu mish glu softshrink exp exp2 expm1 log "
    "log2 log10 log1p sin cos tan asin acos atan sinh cosh asinh acosh atanh arcsin arccos arctan arcsinh arccosh "
    "arctanh erf erfc erfinv rsqrt lgamma gammaln digamma psi i0 i0e pow __pow__ __rpow__"
)
# {a function of torch: the one that does the same and leaves its argument as it is}
POSITION_DEPENDENT_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    function: getattr(place, name)
    for name in _OF_ONE_TENSOR.split()
    for place in (torch, torch.special, F, Tensor)
    if hasattr(place, name)
    for function in (getattr(place, name), getattr(place, f"{name}_", None))
    if function is not None
} | {Tensor.__ipow__: Tensor.__pow__}
_POWERS = (torch.pow, Tensor.pow, Tensor.__pow__)


def call_in_whole_vectors(function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """function(*args, **kwargs) of POSITION_DEPENDENT_FUNCTIONS, on a CPU by `in_whole_vectors`, with torch's strides.

    What has several tensors or no elements torch computes, and squares and cubes, which are products.

    Raises:
        ValueError: out= is given.
    """
    (first, *rest), named = args or (kwargs.get("input"),), {n: v for n, v in kwargs.items() if n != "input"}
    others = [*rest, *(value for name, value in named.items() if name != "out")]
    if function is torch.pow and isinstance(first, (int, float)) and len(others) == 1:  # its exponent is the tensor
        return call_in_whole_vectors(Tensor.__rpow__, (others[0], first), {})
    plain = POSITION_DEPENDENT_FUNCTIONS[function]
    dim = (rest[0] if rest else named.get("dim", -1)) if plain is F.glu else None
    if (
        type(first) not in (Tensor, nn.Parameter)
        or first.device.type != "cpu"
        or first.layout != torch.strided
        or not first.numel()
        or any(isinstance(value, Tensor) for value in others)
        or (plain in _POWERS and others in ([2], [3]))
        or (dim is not None and first.shape[dim] % 2)
    ):
        return function(*args, **kwargs)
    if named.get("out") is not None:
        raise ValueError(
            f"{function.__name__}(.., out=) in a module that calls tensor-parallel layers is not supported on a CPU "
            "with the TP-invariant mode on: leave out= away"
        )
    in_place = plain is not function or named.pop("inplace", False)
    if rest and rest[-1] is True and function.__module__ == F.__name__:  # `inplace`, the last parameter there
        rest, in_place = rest[:-1], True
    with inside_a_layer():
        if dim is not None:
            return in_whole_vectors(lambda a, b: F.glu(torch.stack((a, b)), 0)[0], *first.chunk(2, dim))
        x = first.clone() if in_place else first  # which backward may need
        compiling, order = torch.compiler.is_compiling(), list(range(x.dim()))
        if not compiling:  # a compiler picks strides itself
            strides = torch.empty_like(x, device="meta").stride()  # of torch's result
            order.sort(key=lambda d: (-strides[d], d))
        result = in_whole_vectors(lambda block: plain(block, *rest, **named), x.permute(order))
        result = result.permute(sorted(range(x.dim()), key=order.__getitem__))
        if in_place and not compiling and not torch.can_cast(result.dtype, first.dtype):
            return function(*args, **kwargs)  # torch's error
        return first.copy_(result) if in_place else result


# --- aten's own -----------------------------------------------------------------------------------------------------

_NAMES = (
    "sigmoid silu gelu tanh softplus elu celu selu mish sigmoid_backward silu_backward gelu_backward tanh_backward "
    "softplus_backward elu_backward mish_backward exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh "
    "cosh asinh acosh atanh erf erfc erfinv rsqrt lgamma digamma polygamma igamma igammac i0 special_i0e pow atan2 "
    "logaddexp logaddexp2 xlogy softshrink softshrink_backward glu glu_backward ldexp hypot add sub rsub"
)
_WITH_ALPHA = ("aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::rsub")
# Overloads whose CPU kernel gave an element different bits at different positions in a test, and related overloads.
POSITION_DEPENDENT: frozenset[Any] = frozenset(
    op
    for name in _NAMES.split()
    for packet in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_", None))
    if packet is not None
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if any(str(argument.type) == "Tensor" for argument in schema_of(op).arguments)
)


def position_invariant(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """func(*args, **kwargs) of POSITION_DEPENDENT, below autograd; on a CPU by `in_whole_vectors`.

    Also with out= and in place. An add, sub or rsub depends on the position only with a factor: with alpha = 1, the
    usual case, torch computes it.
    """
    name = schema_of(func).name
    target = next((key for key in ("out", "grad_input") if kwargs.get(key) is not None), None)
    named = {key: value for key, value in kwargs.items() if key != target}
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
    if name in ("aten::glu", "aten::glu_backward"):
        return _glu(func, *args, **kwargs)
    if any(t.device.type != "cpu" or t.layout != torch.strided for t in tensors) or (
        name in _WITH_ALPHA and (args[2] if len(args) > 2 else kwargs.get("alpha", 1)) == 1
    ):
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if not shape.numel():
        return func(*args, **kwargs)
    # A 0-dim tensor among others stays as it is, because type promotion depends on that.
    cut = [t for t in tensors if t.dim() or not shape]

    def call(*blocks: Tensor) -> Tensor:
        others = iter(blocks)

        def block_of(value: Any) -> Any:
            return next(others) if isinstance(value, Tensor) and (value.dim() or not shape) else value

        into = {} if target is None else {target: kwargs[target].new_empty(0)}
        return func(*map(block_of, args), **{key: block_of(value) for key, value in named.items()}, **into)

    result = in_whole_vectors(call, *(t.expand(shape) for t in cut))
    if name.endswith("_"):
        return args[0].copy_(result)
    if target is not None:
        out = kwargs[target]
        return (out if out.shape == shape else out.resize_(shape)).copy_(result)  # torch warns unless it is empty
    like = next((t for t in tensors if t.shape == shape), result)
    return result if like.is_contiguous() else torch.empty_like(like, dtype=result.dtype).copy_(result)


def _glu(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """glu or its backward: an element of the result needs one of each half, so the halves are divided alike."""
    named = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)) | kwargs
    x, dim, grad = named["self"], named.get("dim", -1), named.get("grad_output")
    odd = not -x.dim() <= dim < x.dim() or x.shape[dim] % 2 or not x.numel()
    if odd or x.device.type != "cpu" or x.layout != torch.strided or {"out", "grad_input"} & set(kwargs):
        return func(*args, **kwargs)
    halves = x.chunk(2, dim)
    if grad is None:
        return in_whole_vectors(lambda *both: func(torch.stack(both), 0)[0], *halves)
    if grad.shape != halves[0].shape:
        return func(*args, **kwargs)  # torch's error
    parts = [
        in_whole_vectors(lambda dy, *both, i=i: func(dy[None], torch.stack(both), 0)[i], grad, *halves) for i in (0, 1)
    ]
    return torch.cat(parts, dim)
