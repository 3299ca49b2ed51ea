"""The layers' autograd functions as custom ops, which torch.compile puts into its graph whole.

`opaque(Function, ..)` gives what is called in place of `Function.apply`. Eagerly it is Function.apply; while
torch.compile traces it is an op `tp_invariant::name` whose kernel runs Function.forward, with
`tp_invariant::name_backward` as its derivative, whose kernel runs Function.backward. So a compiled graph computes by
the very code that eager mode runs, and there is no second formula that could give other bits. An op takes tensors, the
name of a process group, sizes that may be symbolic, and a text: the settings (a LinearCall, say). They are part of the
graph, and what they came from is guarded like any Python value: the mode, weight.partition_stride, autocast's dtype.

The order of collectives. Inductor orders kernels that do not depend on each other by memory, and by what it measured;
ranks that did so differently would hang or mix up data. Ops of a group of several ranks (`name_ranks`) are therefore
registered with torch's ordered effect: a token goes from one to the next, through forward and through backward, and
every rank runs them in the order of the program. It costs one thing: torch does not recompute such ops in a graph, so
torch.utils.checkpoint inside of a compiled region is an error while compiling (compile what it is given instead). At
TP=1 there is no token.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton as _registry

from .dtensors import as_local, is_dtensor, with_dtensors

_library = torch.library.Library("tp_invariant", "FRAGMENT")  # its ops live as long as this does


def constant(fn: Callable) -> Callable:
    """Marks fn for torch.compile: called while it traces, its result a constant of the graph.

    torch.compiler.assume_constant_result, which would import the compiler with all it needs.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


# --- settings as text -----------------------------------------------------------------------------------------------

_settings: dict[str, type] = {}  # frozen dataclasses by name
_callables: dict[str, Callable] = {}
_group_type: type = type(None)
_new_group: Callable[[dist.ProcessGroup | None], Any] = id  # both until comm/collectives.py says what a group is


def setting(cls: type) -> type:
    """Marks a frozen dataclass that is told to ops."""
    _settings[cls.__name__] = cls
    return cls


def set_group_type(cls: type, new_group: Callable[[dist.ProcessGroup | None], Any]) -> None:
    """Which class stands for a group, with its attribute process_group, and how to get one from a process group."""
    global _group_type, _new_group
    _group_type, _new_group = cls, lru_cache(maxsize=64)(new_group)


@constant
def name_of(fn: Callable) -> str:
    """A name for a gemm_fn, the same on every rank that gives them names in the same order."""
    for name, known in _callables.items():
        if known is fn:
            return name
    name = f"{getattr(fn, '__qualname__', type(fn).__qualname__)}:{len(_callables)}"
    _callables[name] = fn
    return name


def group_name(group: Any) -> str:
    """What ops are told of a group: "" if it is of one rank."""
    return group.process_group.group_name if group.size > 1 else ""


def group_named(name: str) -> Any:
    """By torch's own table of names, in which a group that was destroyed is no more."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return _new_group(resolve(name) if name else None)


def define(
    name: str,
    schema: str,
    kernel: Callable,
    fake: Callable,
    *,
    ordered: bool = False,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> Any:
    """The op tp_invariant::name. `ordered`: never moved past another such op."""
    _library.define(name + schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tp_invariant::{name}", fake, lib=_library)
    if ordered:
        # torch.library._register_effectful_op(..), which would import the compiler with all it needs
        _registry.find(f"tp_invariant::{name}").effect.register(EffectType.ORDERED)
    if backward is not None:
        torch.library.register_autograd(f"tp_invariant::{name}", backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.tp_invariant, name).default


def plain(value: Any) -> Any:
    """A setting that text can be made of: a number (an eps), or a tuple with such.

    torch.compile makes a symbol of a number once it has met another value: here it is the value again, and guarded.
    """
    if not torch.compiler.is_compiling():
        return value
    if isinstance(value, tuple):
        return tuple([plain(item) for item in value])
    if not isinstance(value, (int, float)):
        return value
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # imports sympy, so only here

    return guard_scalar(value)


def _encode(value: Any, groups: list[str]) -> Any:
    """`value` in literals; the names of groups in it are added to `groups`. Traced by torch.compile."""
    if isinstance(value, _group_type):
        groups.append(group_name(value))
        return ("group",)
    if isinstance(value, (int, float)):
        return plain(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ("tuple", *[_encode(item, groups) for item in value])
    name = type(value).__name__
    if name in _settings:
        return (name, *[_encode(getattr(value, field), groups) for field in _fields(name)])
    return ("callable", name_of(value))


@constant
def _fields(name: str) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(_settings[name]))


def _decode(value: Any, group: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, *items = value
    if kind == "group":
        return group
    if kind == "callable":
        return _callables[items[0]]
    decoded = [_decode(item, group) for item in items]
    return tuple(decoded) if kind == "tuple" else _settings[kind](*decoded)


@lru_cache(maxsize=4096)
def _read(text: str, group: Any) -> tuple:
    return _decode(ast.literal_eval(text), group)


# --- functions without a result -------------------------------------------------------------------------------------


def at_run_time(function: Callable[..., None], *, name: str, arguments: str) -> Callable[..., None]:
    """`function`, and while torch.compile traces an op that calls it, in the order of the ops of several ranks.

    Its first argument is a tensor, be it an empty one, which tells inductor on which device the op runs. Inductor
    collects C++ loops and writes them out before the next op that has a device. One without is written at once, before
    the loops that it comes after, and so are the `del` of buffers that these loops have yet to read.
    """
    if not arguments.startswith("Tensor "):
        raise ValueError(f"tp_invariant::{name}({arguments}) must take a tensor first, which says where it runs")
    op = define(name, f"({arguments}) -> ()", function, lambda *args: None, ordered=True)

    def call(*args: Any) -> None:
        (op if torch.compiler.is_compiling() else function)(*args)

    return call


# --- ops ------------------------------------------------------------------------------------------------------------


class _Context:
    """What Function.forward and Function.backward are given in place of autograd's context."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def _alias(tensor: Tensor | None) -> Tensor | None:
    """Another object for the same bytes, except for parameters.

    Compiled code writes new values into the memory, and even the tensor object, of one that it needs no more, and does
    not raise its version: by neither would gemm/scheduler.py see that it is another.
    """
    return tensor if tensor is None or isinstance(tensor, torch.nn.Parameter) else tensor.detach()


_NOTHING = (0, 0, 0)  # the shape that stands for None among saved tensors: no tensor of ours has it


def _own(tensor: Tensor, others: Sequence[Tensor | None]) -> Tensor:
    """Contiguous, and with bytes of its own: an op's output may not be a view of what it was given."""
    storage = tensor.untyped_storage().data_ptr()
    if storage and any(other is not None and other.untyped_storage().data_ptr() == storage for other in others):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def opaque(
    function: type[torch.autograd.Function],
    *,
    name: str,
    tensors: Sequence[str],
    outputs: Callable[..., Sequence[Tensor | None]],
    restore: Callable[..., None],
    saved: Sequence[int | None] = (),
) -> Callable[..., Any]:
    """function.apply, and while torch.compile traces a custom op that runs function's forward and backward.

    Tensors may be DTensors: function sees their local tensors (dtensors.py).

    Args:
        name: of the op; the name in graphs and profiles.
        tensors: function's first arguments, "x" or "bias?" for one that may be None. The rest are settings.
        outputs: (*arguments) -> empty tensors like forward's result and those of `saved` that are None.
        saved: what forward saves for backward: the position of an argument, or None for a tensor that it makes.
        restore: (ctx, dtypes, *settings), sets what else forward sets on its context; dtypes are those of the tensors.
    """
    count = len(tensors)
    arguments = ", ".join(f"Tensor{'?' if t.endswith('?') else ''} {t.rstrip('?')}" for t in tensors)

    def run(*args: Any) -> list[Tensor]:
        inputs, (group, sizes, text) = [_alias(t) for t in args[:count]], args[count:]
        ctx = _Context()
        ctx.needs_input_grad = (False,) * len(args)
        result = function.forward(ctx, *inputs, *_with_sizes(_read(text, group_named(group)), sizes))
        extras = [t for t, position in zip(ctx.saved_tensors, saved, strict=True) if position is None]
        return [
            _own(result, inputs),
            *(result.new_empty(_NOTHING) if t is None else _own(t, inputs) for t in extras),
        ]

    def run_fake(*args: Any) -> list[Tensor]:
        inputs, (group, sizes, text) = args[:count], args[count:]
        made_up = outputs(*inputs, *_with_sizes(_read(text, group_named(group)), sizes))
        return [inputs[0].new_empty(_NOTHING) if t is None else t for t in made_up]

    def run_backward(
        grad: Tensor, kept: list[Tensor | None], needs: list[bool], shapes: Sequence[int], group: str, text: str
    ) -> list[Tensor]:
        settings, _, dtypes = _read(text, group_named(group))
        ctx = _Context()
        ctx.saved_tensors = tuple(_alias(t) for t in kept)
        ctx.needs_input_grad = (*needs, *[False] * len(settings))
        restore(ctx, [getattr(torch, name) if name else None for name in dtypes], *settings)
        grads = function.backward(ctx, grad)
        wanted = [g for g, need in zip(grads, needs, strict=False) if need]
        return [_own(g, [grad, *kept]) for g in wanted]

    def run_backward_fake(
        grad: Tensor, kept: list[Tensor | None], needs: list[bool], shapes: Sequence[int], group: str, text: str
    ) -> list[Tensor]:
        _, dims, dtype_names = _read(text, group_named(group))
        left, grads = list(shapes), []
        for need, dim, dtype_name in zip(needs, dims, dtype_names, strict=True):
            shape, left = left[:dim], left[dim:]
            if need:
                grads.append(grad.new_empty(shape, dtype=getattr(torch, dtype_name)))
        return grads

    def setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        own, extras = inputs[:count], iter(output[1:])
        kept = [next(extras) if position is None else own[position] for position in saved]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*kept)
        ctx.shapes = [] if not count else [size for t in own if t is not None for size in t.shape]
        names = tuple("" if t is None else str(t.dtype).removeprefix("torch.") for t in own)
        ctx.group, sizes, text = inputs[count:]
        ctx.of_sizes = None if sizes else []  # autograd wants a list for an empty list
        dims = tuple(0 if t is None else t.dim() for t in own)
        ctx.text = repr(("tuple", ast.literal_eval(text), ("tuple", *dims), ("tuple", *names)))

    def derivative(backward_op: Callable) -> Callable:
        def backward(ctx: Any, grads: list[Tensor]) -> tuple:
            needs = list(ctx.needs_input_grad[:count])
            kept = [None if tuple(t.shape) == _NOTHING else t for t in ctx.saved_tensors]
            found = iter(backward_op(grads[0], kept, needs, ctx.shapes, ctx.group, ctx.text))
            return *(next(found) if need else None for need in needs), None, ctx.of_sizes, None

        return backward

    ops = []
    for ending in ("", "_ranks"):
        schema = "(Tensor grad, Tensor?[] saved, bool[] needs, SymInt[] shapes, str group, str settings) -> Tensor[]"
        adjoint = define(f"{name}{ending}_backward", schema, run_backward, run_backward_fake, ordered=bool(ending))
        schema = f"({arguments}, str group, SymInt[] sizes, str settings) -> Tensor[]"
        op = define(
            f"{name}{ending}",
            schema,
            run,
            run_fake,
            ordered=bool(ending),
            backward=derivative(adjoint),
            setup_context=setup_context,
        )
        ops.append(op)
    alone, of_ranks = ops
    of_dtensors = with_dtensors(function)

    def apply(*args: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            return (of_dtensors if any(map(is_dtensor, args[:count])) else function).apply(*args)
        args = (*map(as_local, args[:count]), *args[count:])
        groups: list[str] = []
        sizes: list[int] = []
        settings = []
        for value in args[count:]:
            if isinstance(value, torch.Size):
                sizes.extend(value)
                value = ("sizes",)
            settings.append(_encode(value, groups))
        op = of_ranks if groups[0] else alone
        return op(*args[:count], groups[0], sizes, repr(("tuple", *settings)))[0]

    return apply


def _with_sizes(settings: tuple, sizes: Sequence[int]) -> tuple:
    return tuple(list(sizes) if value == ("sizes",) else value for value in settings)
