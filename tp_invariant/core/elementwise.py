"""Elementwise functions whose bits do not depend on where an element lies; why, and how: kernels/elementwise.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

from ..kernels.elementwise import BLOCK, VECTORS, in_whole_vectors
from .mode import is_tp_invariant_mode_enabled


class PositionInvariantActivation(nn.Module):
    """An activation module without parameters; while the mode is on it is called by `in_whole_vectors`.

    computes: the name by which functional/gated_activation.py knows its function, where conversion has found that out;
        the module of which it was found out, and the module's own attributes then.
    """

    computes: tuple[str, nn.Module, tuple[tuple[str, Any], ...]] | None = None

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return in_whole_vectors(self.activation, x) if is_tp_invariant_mode_enabled() else self.activation(x)


# --- functions that a model's own code calls ------------------------------------------------------------------------

_OF_ONE_TENSOR = (
    "sigmoid expit silu gelu tanh tanhshrink softplus elu celu selu mish glu softshrink exp exp2 expm1 log "
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

_POWERS = frozenset((torch.pow, Tensor.pow, Tensor.pow_, Tensor.__pow__, Tensor.__ipow__))


def call_in_whole_vectors(function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """function(*args, **kwargs) of POSITION_DEPENDENT_FUNCTIONS; on a CPU by `in_whole_vectors`, with torch's strides.

    Of several tensors, such as torch.pow(2, exponents), torch computes it; so it does squares and cubes, by products.

    Raises:
        ValueError: out= is given.
    """
    first, *rest = args or (kwargs.get("input"),)
    named = kwargs if args else {name: value for name, value in kwargs.items() if name != "input"}
    others = (*rest, *(value for name, value in named.items() if name != "out"))
    if (
        type(first) not in (Tensor, nn.Parameter)
        or first.device.type != "cpu"
        or first.layout != torch.strided
        or not first.numel()
        or any(isinstance(value, Tensor) for value in others)
        or (function in _POWERS and others in ((2,), (3,)))
    ):
        return function(*args, **kwargs)
    if named.get("out") is not None:
        raise ValueError(
            f"{function.__name__}(.., out=) in a module that calls tensor-parallel layers is not supported on a CPU "
            "with the TP-invariant mode on: leave out= away"
        )
    plain = POSITION_DEPENDENT_FUNCTIONS[function]
    in_place = plain is not function or named.get("inplace", False)
    named = {name: value for name, value in named.items() if name != "inplace"}
    if rest and rest[-1] is True and function.__module__ == F.__name__:  # `inplace`, the last parameter there
        rest, in_place = rest[:-1], True

    def told(block: Tensor) -> Tensor:
        """plain(block, ..), of which a user's mode is told, as it is not of the operations that make blocks."""
        with torch._C._EnableTorchFunction():
            return plain(block, *rest, **named)

    with torch._C.DisableTorchFunction():
        if plain is F.glu:
            dim = rest[0] if rest else named.get("dim", -1)
            if first.shape[dim] % 2:
                return function(*args, **kwargs)  # torch's error
            rest, named = [], {"dim": 0}
            return in_whole_vectors(lambda a, b: told(torch.stack((a, b)))[0], *first.chunk(2, dim))
        x = first.clone() if in_place else first  # which backward may need
        if not x.is_contiguous():
            strides = torch.empty_like(x, device="meta").stride()  # of torch's result
            order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
            result = in_whole_vectors(told, x.permute(order))
            result = result.permute(sorted(range(x.dim()), key=order.__getitem__))
        elif x.numel() % VECTORS == 0 and x.numel() <= BLOCK:
            result = told(x)  # whole vectors as it is
        else:
            result = in_whole_vectors(told, x)
        if in_place and not torch.can_cast(result.dtype, first.dtype):
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
POSITION_DEPENDENT: frozenset[OpOverload] = frozenset(
    op
    for name in _NAMES.split()
    for packet in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_", None))
    if packet is not None
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if any(str(argument.type) == "Tensor" for argument in op._schema.arguments)
)


def position_invariant(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """func(*args, **kwargs) of POSITION_DEPENDENT, below autograd; on a CPU in blocks of full vectors.

    Also with out= and in place. An add, sub or rsub depends on the position only with a factor: with alpha = 1, the
    usual case, torch computes it.
    """
    if func._schema.name in ("aten::glu", "aten::glu_backward"):
        return _glu(func, *args, **kwargs)
    if any(isinstance(value, Tensor) and value.is_cuda for value in args):
        return func(*args, **kwargs)
    target = next((name for name in ("out", "grad_input") if name in kwargs), None)
    operands = [*args, *(value for name, value in kwargs.items() if name != target)]
    tensors = [value for value in operands if isinstance(value, Tensor)]
    if any(t.device.type != "cpu" or t.layout != torch.strided for t in tensors) or (
        func._schema.name in _WITH_ALPHA and (args[2] if len(args) > 2 else kwargs.get("alpha", 1)) == 1
    ):
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    count = shape.numel()
    if not count:
        return func(*args, **kwargs)
    size = count + -count % VECTORS

    def padded(value: Any) -> list[Any]:
        """`value` for each block. A 0-dim tensor among others stays 0-dim, because type promotion depends on that."""
        if not isinstance(value, Tensor) or (value.dim() == 0 and len(shape)):
            return [value] * -(-size // BLOCK)
        flat = value.new_zeros(size)
        flat[:count].view(shape).copy_(value)
        return list(flat.split(BLOCK))

    out = None if target is None else kwargs[target]
    named: dict[Any, list[Any]] = {name: padded(value) for name, value in kwargs.items() if name != target}
    if target is not None and out is not None:
        named[target] = list(out.new_empty(size).split(BLOCK))
    columns = [padded(value) for value in args]
    blocks = [
        func(*(column[i] for column in columns), **{name: column[i] for name, column in named.items()})
        for i in range(-(-size // BLOCK))
    ]
    result = torch.cat(blocks)[:count].view(shape)
    if func._schema.name.endswith("_"):
        return args[0].copy_(result)
    if out is not None:
        if out.shape != shape:
            out.resize_(shape)  # warns, as torch does, unless it is empty
        return out.copy_(result)
    like = next((t for t in tensors if t.shape == shape), result)
    return result if like.is_contiguous() else torch.empty_like(like, dtype=result.dtype).copy_(result)


def _glu(func: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """glu or its backward: an element of the result needs one of each half, so the halves are divided alike."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    x, dim, grad = named["self"], named.get("dim", -1), named.get("grad_output")
    shape = list(x.shape)
    fits = -x.dim() <= dim < x.dim() and shape[dim] % 2 == 0 and x.numel() > 0
    if fits:
        shape[dim] //= 2
    if (
        not fits
        or x.device.type != "cpu"
        or x.layout != torch.strided
        or (grad is not None and list(grad.shape) != shape)
    ):
        return func(*args, **kwargs)
    halves = x.chunk(2, dim)
    flat = [F.pad(t.reshape(-1), (0, -t.numel() % VECTORS)) for t in halves]
    blocks = [torch.stack(pair) for pair in zip(*(t.split(BLOCK) for t in flat), strict=True)]
    op = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::")).default
    if grad is None:
        result = torch.cat([op(block, 0)[0] for block in blocks])[: halves[0].numel()].view(shape)
    else:
        grads = F.pad(grad.reshape(-1), (0, -grad.numel() % VECTORS)).split(BLOCK)
        both = torch.cat([op(part[None], block, 0) for part, block in zip(grads, blocks, strict=True)], 1)
        result = torch.cat([part.view(shape) for part in both[:, : grad.numel()]], dim)
    out = kwargs.get("out", kwargs.get("grad_input"))
    if out is None:
        return result
    if not torch.can_cast(result.dtype, out.dtype):
        return func(*args, **kwargs)  # torch's error
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)
