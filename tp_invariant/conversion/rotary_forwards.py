"""Attention modules whose forward calls transformers' function that rotates q and k: they call rotary_embedding's.

That function is a global of the file with the attention class, and other models call it too, so it stays as it is. Such
a module gets a class whose forward is the former one, compiled code and all, with another name in the place of that
global's; under that name the file gets a function that rotates in one launch while the mode is on.

What the function computes is found by running it: forward and backward must have the bytes of rotary_embedding, for
several shapes and dtypes, and neither it nor a function that it calls may have a branch. What it is given at a call
must fit, too. Everything else goes to the former function, which changes no bit.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.bits import raw_bytes
from ..core.function_modes import enter_again, leave, user_is_told
from ..core.mode import is_tp_invariant_mode_enabled
from ..functional.rotary_embedding import apply_rotation
from ..kernels.dtypes import DTYPES
from ..layers.parameters import ShardedModule
from .other_forwards import Found, are_as_found, class_with_forward, found_at, is_straight, maker, takes_a_forward

_PARAMETERS = ["q", "k", "cos", "sin"]  # the first ones of such a function


def install(model: nn.Module) -> None:
    """Gives each such module of a model its forward."""
    for module in model.modules():
        kind: Any = type(module)
        forward = kind.forward
        if isinstance(module, ShardedModule) or not isinstance(forward, FunctionType) or not takes_a_forward(module):
            continue
        for name in _globals_alone(forward.__code__):
            if rotation_of(forward.__globals__.get(name)) is not None:
                module.__class__ = class_with_forward(kind, "rotary_forward", name)
                break


def _globals_alone(code: CodeType) -> list[str]:
    """The names that a function reads as globals, and not also as attributes, which would be renamed with them."""
    uses: dict[str, set[str]] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            uses.setdefault(instruction.argval, set()).add(instruction.opname)
    return [name for name, how in uses.items() if how == {"LOAD_GLOBAL"}]


class RotationKind(NamedTuple):
    """interleaved: which features are a pair; partial: whether features beyond those of cos are passed on."""

    interleaved: bool
    partial: bool


@functools.cache
def _rotation_of(function: FunctionType, code: CodeType) -> tuple[RotationKind, list[Found]] | None:
    """And the functions that it calls, of which this was found out; with the code that it has now."""
    parameters = list(inspect.signature(function).parameters.values())
    helpers = _helpers(function)
    if [p.name for p in parameters[:4]] != _PARAMETERS or helpers is None:
        return None
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[4:]):
        return None
    for interleaved in (False, True):
        if all(_same(function, interleaved, *probe) for probe in _probes(8)):
            partial = all(_same(function, interleaved, *probe) for probe in _probes(4))
            return RotationKind(interleaved, partial), helpers
    return None


def rotation_of(function: Any) -> RotationKind | None:
    """What a function (q, k, cos, sin, ..) computes, None if it is not rotary_embedding."""
    found = _rotation_of(function, function.__code__) if isinstance(function, FunctionType) else None
    return found[0] if found is not None and are_as_found(found[1]) else None


def _helpers(function: FunctionType) -> list[Found] | None:
    """The functions that it calls; None if it has a branch, or calls anything but torch's functions and such ones."""
    if not is_straight(function.__code__):
        return None
    found = []
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType):
            below = None if value is function else _helpers(value)
            if below is None:
                return None
            found += [found_at(function.__globals__, name), *below]
        elif value is not None and not (isinstance(value, ModuleType) and value.__name__ == "torch"):
            return None
    return found


@torch.inference_mode(False)
def _probes(features: int) -> list[tuple[Tensor, ...]]:
    """(q, k, cos, sin, dq, dk), with cos and sin of this number of eight features."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (1, 2):
            shapes = (2, 3, 5, 8), (2, 1, 5, 8), (batch, 5, features), (batch, 5, features), (2, 3, 5, 8), (2, 1, 5, 8)
            tensors = [torch.randn(s, generator=generator, device="cpu") for s in shapes]
            for x in (*tensors[:2], *tensors[4:]):  # zeros of both signs: autograd adds those of slices, and not others
                x *= torch.rand(x.shape, generator=generator, device="cpu") < 0.4
            for x in tensors[:2]:  # what a function may clamp
                x *= torch.exp2(torch.randint(-60, 60, x.shape, generator=generator, device="cpu").float())
                x[0, 0, 0, 0] = float("inf")
            found.append(tuple(x.to(dtype) for x in tensors))
    return found


def _same(
    function: Callable, interleaved: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dq: Tensor, dk: Tensor
) -> bool:
    results = []
    for call in (function, apply_rotation):
        options = () if call is function else (interleaved,)
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            try:
                outputs = call(*leaves, cos, sin, *options)
                results.append([*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, (dq, dk))])
            except Exception:  # it takes something else: foreign code may raise any exception
                return False
    return len(results[0]) == len(results[1]) and all(
        theirs.dtype == ours.dtype and torch.equal(raw_bytes(theirs), raw_bytes(ours))
        for theirs, ours in zip(*results, strict=True)
    )


def _fits(q: Any, k: Any, cos: Any, sin: Any, partial: bool) -> bool:
    if not type(q) is type(k) is type(cos) is type(sin) is Tensor or q.dtype not in DTYPES:
        return False
    if not q.dtype == k.dtype == cos.dtype == sin.dtype or not q.device == k.device == cos.device == sin.device:
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.requires_grad or sin.requires_grad:
        return False
    (batch, _, s, d), of_k, of_cos = q.shape, k.shape, cos.shape
    features = of_cos[2]
    return (
        of_k[0] == batch
        and of_k[2] == s
        and of_k[3] == d
        and (of_cos[0] == batch or of_cos[0] == 1)
        and of_cos[1] == s
        and sin.shape == of_cos
        and (features == d or (partial and features < d))
        and features > 0
        and features % 2 == 0
        and q.device.type in ("cpu", "cuda")
    )


def _substitute(names: dict[str, Any], name: str, function: FunctionType) -> Callable[..., Any]:
    (interleaved, partial), helpers = _rotation_of(function, function.__code__)  # type: ignore[misc]
    found = [found_at(names, name), *helpers]

    @functools.wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        present = names[name]
        if torch.compiler.is_compiling() or present is not function:  # compilers fuse torch's operators
            return present(*args, **kwargs)
        if len(args) == 4 and not kwargs and is_tp_invariant_mode_enabled() and are_as_found(found):
            left = leave()
            try:
                if not user_is_told() and _fits(*args, partial):
                    return apply_rotation(*args, interleaved)
            finally:
                enter_again(left)
        return function(*args, **kwargs)

    return rotate


@maker
def rotary_forward(base: Any, name: str) -> Callable[..., Any]:
    former: Any = base.forward
    names, code = former.__globals__, former.__code__
    function = names.get(name)
    if rotation_of(function) is None:  # of an unpickled model, where the file has another function now
        return former
    own = f"_tp_invariant_{name}"
    names[own] = _substitute(names, name, function)
    renamed = code.replace(co_names=tuple(own if n == name else n for n in code.co_names))
    forward = FunctionType(renamed, names, former.__name__, former.__defaults__, former.__closure__)
    forward.__kwdefaults__ = former.__kwdefaults__
    return forward
