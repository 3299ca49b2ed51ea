"""Modules that compute down(act(gate(x)) * up(x)), and their forward with gated_activation: two launches for five.

Such a module is found by what it does. Its forward must have no branch and name nothing but its submodules and `chunk`,
so that a trace by torch.fx, with submodules as leaves, shows all that it does; and the trace must be exactly this. The
activation is found by running it: forward and backward must have the bytes of torch's function. Everything else is left
alone, which changes no bit, since gated_activation has those of the operators that it replaces.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from ..core.bits import raw_bytes
from ..core.elementwise import PositionInvariantActivation
from ..core.function_modes import enter_again, leave, user_is_told
from ..core.mode import is_tp_invariant_mode_enabled
from ..functional.gated_activation import gated_activation_of_halves, gated_activation_of_two
from ..kernels.dtypes import DTYPES
from ..layers.parameters import ShardedModule
from .other_forwards import (
    Found,
    are_as_found,
    class_with_forward,
    is_straight,
    maker,
    takes_a_forward,
    what_it_finds,
)


class Recipe(NamedTuple):
    """The submodules of down(act(gate(x)) * up(x)) by name, and whether up comes first: its call, or its half of gate.

    up: "" where gate(x) holds both, as halves.
    """

    gate: str
    up: str
    act: str
    down: str
    up_first: bool


def install(model: nn.Module) -> None:
    """Gives each such module of a model that parallelize has converted its forward."""
    for module in model.modules():
        recipe = recipe_of(module)
        if recipe is None:
            continue
        act: Any = module.get_submodule(recipe.act)
        inner = act.activation if isinstance(act, PositionInvariantActivation) else act
        computes = recognise_activation(inner)
        if computes is None:
            continue
        if act is inner:  # one that is position-invariant by itself
            act = PositionInvariantActivation(inner)
            setattr(module, recipe.act, act)
        act.computes = computes, inner, tuple(_settings(inner).items())
        _remember_class(type(inner), computes)
        kind: Any = type(module)
        module.__class__ = class_with_forward(kind, "gated_forward", *recipe)


# --- what a module computes -----------------------------------------------------------------------------------------


class _Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def recipe_of(module: nn.Module) -> Recipe | None:
    """How a module computes down(act(gate(x)) * up(x)), None if it does not, or does anything else."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    children = {name for name, child in module._modules.items() if child is not None}
    if code is None or isinstance(module, ShardedModule) or not takes_a_forward(module):
        return None
    if not len(children) >= 3 or not {*code.co_names} <= {*children, "chunk"} or not is_straight(code):
        return None
    try:
        return _match(_Leaves().trace(module))
    except Exception:  # torch.fx cannot follow it: foreign code may raise any exception
        return None


def _recipe_of_class(kind: Any, expected: Recipe) -> Recipe | None:
    """The recipe of a module of this class that has the submodules of `expected`."""
    module = object.__new__(kind)
    nn.Module.__init__(module)
    for name in expected[:4]:
        if name:
            module._modules[name] = nn.Identity()
    return recipe_of(module)


def _match(graph: fx.Graph) -> Recipe | None:
    """The recipe of a graph that has nothing else."""
    output: Any = next(node for node in graph.nodes if node.op == "output")
    inputs: list[Any] = [node for node in graph.nodes if node.op == "placeholder"]
    down = output.args[0]
    product = _argument_of(down)
    if len(inputs) != 1 or product is None or product.op != "call_function" or product.target is not operator.mul:
        return None
    act: Any
    up: Any
    for act, up in (product.args, product.args[::-1]):
        gate = _argument_of(act)
        if gate is None or not isinstance(up, fx.Node):
            continue
        needed: list[Any] = [inputs[0], act, product, down, output]
        order = {node: i for i, node in enumerate(graph.nodes)}
        if _argument_of(gate) is inputs[0] and _argument_of(up) is inputs[0] and gate is not up:
            needed += [gate, up]
            recipe = Recipe(gate.target, str(up.target), act.target, down.target, order[up] < order[gate])
        elif (halves := _halves(gate, up)) is not None and _argument_of(halves.args[0]) is inputs[0]:
            needed += [gate, up, halves, halves.args[0]]
            recipe = Recipe(halves.args[0].target, "", act.target, down.target, bool(up.args[1] == 0))
        else:
            continue
        names = [name for name in recipe[:4] if name]
        if {*needed} == {*graph.nodes} and len({*names}) == len(names) and not any("." in name for name in names):
            return recipe
    return None


def _argument_of(node: Any) -> Any:
    """x of a call module(x)."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _halves(gate: Any, up: Any) -> Any:
    """The node x.chunk(2, dim=-1) whose two results these are, in whatever order."""
    if any(node.op != "call_function" or node.target is not operator.getitem for node in (gate, up)):
        return None
    halves = gate.args[0]
    if halves is not up.args[0] or {gate.args[1], up.args[1]} != {0, 1} or halves.op != "call_method":
        return None
    how = (*halves.args[1:], *halves.kwargs.items())
    return halves if halves.target == "chunk" and how in ((2, -1), (2, ("dim", -1))) else None


# Those of gated_activation that have torch's bits on GPUs too: gelu by erf has not (kernels/rowwise/torch_gated.py).
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@functools.cache
@torch.inference_mode(False)
def _probes() -> list[tuple[Tensor, Tensor]]:
    """Inputs of many magnitudes, and gradients; with the largest ones, which an activation may clamp."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for least, most in ((-12, 6), (-126, 127)):
            x, dy = (torch.randn(2, 1024, generator=generator, device="cpu") for _ in range(2))
            scale = torch.exp2(torch.randint(least, most, x.shape, generator=generator, device="cpu").float())
            found.append(((x * scale).to(dtype), dy.to(dtype)))
        infinite = torch.tensor([float("inf"), -float("inf")], device="cpu").repeat(32)
        found.append((infinite.to(dtype), torch.ones_like(infinite).to(dtype)))
    return found


_OF_EVERY_MODULE = {*nn.Module().__dict__}


def _settings(activation: nn.Module) -> dict[str, Any]:
    """What the module has been told, such as `approximate`, by which its function may change."""
    return {name: value for name, value in activation.__dict__.items() if name not in _OF_EVERY_MODULE}


def recognise_activation(activation: nn.Module) -> str | None:
    """The name by which gated_activation knows what this module computes; None if it is none of these.

    Found by running it, forward and backward: transformers has several classes for one function, and one class for
    several.
    """
    stateless = not any(True for _ in (*activation.parameters(), *activation.buffers(), *activation.children()))
    if not stateless or not is_untouched(activation):
        return None
    try:
        tried = copy.deepcopy(activation)  # which may count its calls
    except Exception:  # foreign code may raise any exception
        return None
    before = _settings(tried)
    for name, function in _FUNCTIONS.items():
        if all(_in_both_modes(tried, function, x, dy) for x, dy in _probes()):
            after = _settings(tried)
            same = before.keys() == after.keys() and all(after[key] is value for key, value in before.items())
            return name if same else None
    return None


def _in_both_modes(activation: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> bool:
    for training in (True, False):
        activation.train(training)
        if not _same(activation, function, x, dy):
            return False
    return True


def _same(activation: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> bool:
    results = []
    for call in (activation, function):
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.clone().requires_grad_()
            try:
                y = call(leaf)
                (dx,) = torch.autograd.grad(y, leaf, dy)
            except Exception:  # it takes something else: foreign code may raise any exception
                return False
        results.append((y.detach(), dx))
    return all(
        ours.dtype == theirs.dtype and torch.equal(raw_bytes(ours), raw_bytes(theirs))
        for ours, theirs in zip(*results, strict=True)
    )


# --- the forward ----------------------------------------------------------------------------------------------------


def is_untouched(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward: no hooks, and no forward put in its place."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _is_as_found(act: Any) -> bool:
    """Whether the activation is what `install` has seen, and nobody must be told of its calls."""
    if type(act) is not PositionInvariantActivation or act.computes is None or _has_any_global_hook():
        return False
    _, found, settings = act.computes
    if found is not act.activation or not is_untouched(act) or not is_untouched(found):
        return False
    same = True
    for name, value in settings:  # all() of a generator takes longer
        same = same and getattr(found, name, None) is value
    return same and (torch.compiler.is_compiling() or _class_is_as_found(found, act.computes[0]))


# By the class of an activation that was recognised in this process, and what it computes: its forward, that one's code,
# and what it finds by name. Not a part of pickles: where a model is unpickled the class may be another.
_CLASSES: dict[tuple[Any, str], tuple[Any, Any, list[Found]]] = {}


def _remember_class(kind: Any, computes: str) -> None:
    forward = kind.forward
    names = what_it_finds(forward) if isinstance(forward, FunctionType) else []
    _CLASSES[kind, computes] = forward, getattr(forward, "__code__", None), names


def _class_is_as_found(found: nn.Module, computes: str) -> bool:
    kind: Any = type(found)
    known = _CLASSES.get((kind, computes))
    if known is None:  # unpickled
        if recognise_activation(found) != computes:
            return False
        _remember_class(kind, computes)
        return True
    forward, code, names = known
    return kind.forward is forward and getattr(forward, "__code__", None) is code and are_as_found(names)


def _fits(gate: Any, up: Any) -> bool:
    return (
        not user_is_told()
        and type(gate) is type(up) is Tensor
        and gate.dtype in DTYPES
        and gate.dtype == up.dtype
        and gate.shape == up.shape
        and gate.device == up.device
        and gate.device.type in ("cpu", "cuda")
        and gate.dim() > 0
    )


@maker
def gated_forward(base: Any, gate: str, up: str, act: str, down: str, up_first: bool) -> Callable[..., Any]:
    former = base.forward
    recipe = Recipe(gate, up, act, down, up_first)
    if _recipe_of_class(base, recipe) != recipe:  # of an unpickled model, where the file has another class now
        return former
    names = tuple(name for name in recipe[:4] if name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        children = self._modules
        activation = children.get(act)
        if len(args) != 1 or kwargs or not is_tp_invariant_mode_enabled() or not _is_as_found(activation):
            return former(self, *args, **kwargs)
        for name in names:
            if children.get(name) is None:  # no module took the place of one: a function, perhaps
                return former(self, *args, **kwargs)
        if not up:
            both = children[gate](*args)
            left = leave()
            try:
                if type(both) is Tensor and both.dim() and both.shape[-1] % 2 == 0 and _fits(both, both):
                    h = gated_activation_of_halves(both, activation.computes[0], up_first)
                else:
                    first, second = both.chunk(2, dim=-1)
                    h = activation(second) * first if up_first else activation(first) * second
            finally:
                enter_again(left)
            return children[down](h)
        if up_first:
            to_multiply = children[up](*args)
            to_activate = children[gate](*args)
        else:
            to_activate = children[gate](*args)
            to_multiply = children[up](*args)
        left = leave()
        try:
            if _fits(to_activate, to_multiply):
                h = gated_activation_of_two(to_activate, to_multiply, activation.computes[0])
            else:
                h = activation(to_activate) * to_multiply
        finally:
            enter_again(left)
        return children[down](h)

    return forward
