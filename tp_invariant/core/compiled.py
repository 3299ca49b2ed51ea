"""The layers' autograd functions as custom ops, each of which torch.compile puts into its graph as one node.

`as_custom_op(Function, ..)` returns the function to call in place of `Function.apply`. In eager mode it calls
Function.apply. While torch.compile traces it calls an op `tp_invariant::name` whose kernel runs Function.forward; its
derivative is `tp_invariant::name_backward`, whose kernel runs Function.backward. So a compiled graph runs the same
code as eager mode, and there is no second formula that could give other bits. An op takes tensors, the name of a
process group, sizes that may be symbolic, and a text: the configs (a LinearCall, say). The text is part of the graph,
and the Python values that it was made from have guards: the mode, weight.partition_stride, autocast's dtype.

The order of collectives. Inductor orders independent kernels by memory use and by measurements; if ranks ordered them
differently, they would hang or mix up data. Ops of a group of several ranks (`name_ranks`) are therefore registered
with torch's ordered effect: each op passes a token to the next one, through forward and through backward, so that
every rank runs them in program order. The disadvantage: torch does not recompute such ops in a graph, so
torch.utils.checkpoint inside a compiled region is an error of torch's (compile the function that is passed to it
instead), as is compiled autograd. At TP=1 there is no token.

CUDA graphs. Where torch is about to make them of what it traces (mode="reduce-overhead"), the text of an op of several
ranks says so, and the op runs as torch_graphs.py describes.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.node import has_side_effect

from . import torch_private
from .dtensors import as_local, is_dtensor, with_dtensors
from .graph_breaks import outside_of_graphs
from .torch_graphs import torch_graph

_library = torch.library.Library("tp_invariant", "FRAGMENT")  # its ops live as long as this does


def constant(fn: Callable) -> Callable:
    """Marks fn for torch.compile: fn is called during tracing, and its result is a constant of the graph."""
    return torch_private.mark_constant(fn)


# --- configs as text ------------------------------------------------------------------------------------------------

_op_configs: dict[str, type] = {}  # frozen dataclasses by name
_callables: dict[str, Callable] = {}
_group_type: type = type(None)
_new_group: Callable[[dist.ProcessGroup | None], Any] = id  # comm/collectives.py sets both


def op_config(cls: type) -> type:
    """Registers a frozen dataclass whose instances can be passed to ops, as text."""
    _op_configs[cls.__name__] = cls
    return cls


def set_group_type(cls: type, new_group: Callable[[dist.ProcessGroup | None], Any]) -> None:
    """Sets the class of groups, which has the attribute process_group, and the function that makes one from it."""
    global _group_type, _new_group
    _group_type, _new_group = cls, lru_cache(maxsize=64)(new_group)


@constant
def callable_id(fn: Callable) -> str:
    """A name for a gemm_fn; the same on every rank if all ranks name their gemm_fns in the same order."""
    for name, known in _callables.items():
        if known is fn:
            return name
    name = f"{getattr(fn, '__qualname__', type(fn).__qualname__)}:{len(_callables)}"
    _callables[name] = fn
    return name


def group_name(group: Any) -> str:
    """The name by which ops refer to a group; "" for a group of one rank."""
    return group.process_group.group_name if group.size > 1 else ""


def group_by_name(name: str) -> Any:
    """The group with this name in torch's own table, from which destroyed groups are removed."""
    if not name:
        return _new_group(None)
    return _new_group(torch_private.resolve_process_group(name))


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
    # a frame that torch.compile leaves to run as in eager mode may call the op, and it would compile the kernel's code
    _library.impl(name, outside_of_graphs("the kernel of an op")(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tp_invariant::{name}", fake, lib=_library)
    if ordered:
        torch_private.register_ordered(f"tp_invariant::{name}")
    if backward is not None:
        torch.library.register_autograd(f"tp_invariant::{name}", backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.tp_invariant, name).default


def specialize(value: Any) -> Any:
    """`value` with symbolic numbers replaced by their values, so that it can be written as text; also inside tuples.

    torch.compile replaces a number (an eps, say) by a symbol once it has seen two values of it. Here the symbol becomes
    the number again, with a guard.
    """
    if not torch.compiler.is_compiling():
        return value
    if isinstance(value, tuple):
        return tuple([specialize(item) for item in value])
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
        return specialize(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ("tuple", *[_encode(item, groups) for item in value])
    name = type(value).__name__
    if name in _op_configs:
        return (name, *[_encode(getattr(value, field), groups) for field in _fields(name)])
    return ("callable", callable_id(value))


@constant
def _fields(name: str) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(_op_configs[name]))


def _decode(value: Any, group: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, *items = value
    if kind == "group":
        return group
    if kind == "callable":
        return _callables[items[0]]
    decoded = [_decode(item, group) for item in items]
    return tuple(decoded) if kind == "tuple" else _op_configs[kind](*decoded)


_SIZES = ("sizes",)  # stands in a text for sizes, which are given beside it


def _settings(group: str, *values: Any) -> str:
    """The text of an op's settings: the name of its group, and what `_decode` reads."""
    return repr((group, *values))


_IN_GRAPH = "in a CUDA graph of torch's: "  # what the text of an op begins with that runs in one


def _with_place(text: str) -> str:
    """The text of an op of several ranks, which torch puts into its graph now."""
    return _IN_GRAPH + text if _makes_cuda_graphs() else text


def _makes_cuda_graphs() -> bool:
    """Whether torch makes CUDA graphs of what it compiles now, by a setting of inductor's."""
    inductor = sys.modules.get(torch_private.INDUCTOR_CONFIG)
    return inductor is not None and bool(inductor.triton.cudagraphs)


@lru_cache(maxsize=4096)
def _literals(text: str) -> tuple:
    return ast.literal_eval(text.removeprefix(_IN_GRAPH))


def _group_of(text: str) -> Any:
    return group_by_name(_literals(text)[0])


@lru_cache(maxsize=4096)
def _read(text: str, group: Any) -> list:
    """The configs of a text; group: the one that it names, which may be another than of an earlier program."""
    return [_decode(value, group) for value in _literals(text)[1:]]


def _configs(text: str, sizes: Sequence[int]) -> tuple:
    return tuple([list(sizes) if value == _SIZES else value for value in _read(text, _group_of(text))])


class _Adjoint(NamedTuple):
    """What the text of a backward op says. Of each tensor argument of its forward: whether its gradient is needed, how
    many dims it has, and its dtype, None for one that is None."""

    configs: tuple
    needs: tuple[bool, ...]
    needs_of_all: tuple[bool, ...]  # of the configs too
    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    noted: Any


@lru_cache(maxsize=4096)
def _read_adjoint(text: str, group: Any) -> _Adjoint:
    _, values, needs, dims, names, noted = _literals(text)
    configs = tuple([_decode(value, group) for value in values])
    dtypes = tuple([getattr(torch, name) if name else None for name in names])
    return _Adjoint(configs, needs, (*needs, *_NO_GRADS[: len(configs)]), dims, dtypes, noted)


# --- functions without a result -------------------------------------------------------------------------------------


def as_runtime_op(function: Callable[..., None], *, name: str, arguments: str) -> Callable[..., None]:
    """`function`; while torch.compile traces, an op that calls it when the graph runs, ordered like multi-rank ops.

    Its first argument is a tensor, possibly an empty one, from which inductor knows the op's device. Inductor collects
    C++ loops and emits them before the next op that has a device. It would emit an op without a device at once, before
    the loops that precede it, together with the `del` of buffers that these loops have not read yet.
    """
    op = define(name, f"({arguments}) -> ()", function, lambda *args: None, ordered=True)

    def call(*args: Any) -> None:
        (op if torch.compiler.is_compiling() else function)(*args)

    return call


# --- ops ------------------------------------------------------------------------------------------------------------


_ANYWHERE = nullcontext()


def _place_of(text: str) -> Any:
    return torch_graph() if text.startswith(_IN_GRAPH) else _ANYWHERE


class _Context:
    """The context object for Function.forward and Function.backward inside an op, in place of autograd's."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    needs_input_grad: tuple[bool, ...] = (False,) * 32  # for more arguments than any function has
    noted: Any = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def _alias(tensor: Tensor | None) -> Tensor | None:
    """Another object for the same bytes, except for parameters.

    Compiled code writes new values into the memory, and even the tensor object, of one that it needs no more, and does
    not raise its version: by neither would gemm/weights.py see that it is another.
    """
    return tensor if tensor is None or isinstance(tensor, torch.nn.Parameter) else tensor.detach()


_NO_GRADS = _Context.needs_input_grad
_NONE_SHAPE = (0, 0, 0)  # the shape that represents None among saved tensors; no other saved tensor has it


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """What an op returns in place of None, where no graph reads it: the same each time, and without memory."""
    return torch.empty(_NONE_SHAPE, device=device, dtype=dtype)


def _with_own_memory(tensor: Tensor, others: Sequence[Tensor | None]) -> Tensor:
    """`tensor`, contiguous and in memory of its own: an op's output must not be a view of its inputs."""
    memory = tensor.untyped_storage().data_ptr()
    if any(other is not None and other.untyped_storage().data_ptr() == memory for other in others):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


_derivatives: dict[type, str] = {}  # the classes of nodes, and the name of the op that each is the derivative of


def traced_op(x: Tensor) -> tuple[str, tuple]:
    """While torch traces gradients: the name and the settings of the op of `as_custom_op` that returned x, or "", ().

    Also "", () where torch runs what it has traced op by op (backend="eager"): then x has a node of this run.
    """
    node = x.grad_fn if torch_private.TracingContext.try_get() is not None else None
    name = _derivatives.get(type(node), "")
    return (name, node.settings) if node is not None and name else ("", ())  # type: ignore[attr-defined]


def with_derivative(op: Any, schema: str, backward: Callable, setup_context: Callable, *, ordered: bool = False) -> Any:
    """An op that calls `op`, and has a derivative.

    It is decomposed while torch traces, so that a graph holds `op` alone, whose calls then pass no kernel of autograd:
    one written in Python takes as long as what such an op does itself.

    schema: of both. backward: (ctx, *gradients) -> those of all arguments. setup_context: as of an autograd.Function.
    ordered: of `op`. While a graph still calls what is decomposed later, that call is kept even if nothing uses it.
        The last argument is a text, which then says where the op runs.
    """
    in_a_list = [str(result.type) for result in torch_private.schema_of(op).returns] == ["List[Tensor]"]

    def forward(*args: Any) -> Any:
        results = op(*args[:-1], _with_place(args[-1])) if ordered else op(*args)
        return tuple(results) if in_a_list else results

    methods = {"forward": forward, "backward": backward, "setup_context": setup_context}
    opname = torch_private.schema_of(op).name.partition("::")[2]
    name = f"{opname}_with_derivative"
    function: Any = type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in methods.items()})
    _derivatives[torch_private.node_class(function)] = opname

    def call(*args: Any) -> Any:
        results = function.apply(*args)
        return list(results) if in_a_list else results

    _library.define(name + schema)
    _library.impl(name, call, "CompositeImplicitAutograd")
    overload = getattr(torch.ops.tp_invariant, name).default
    return has_side_effect(overload) if ordered else overload


_library.define("store_(Tensor(a!) x) -> ()")
_library.impl("store_", lambda x: None, "CompositeExplicitAutograd")
torch.library.register_fake("tp_invariant::store_", lambda x: None, lib=_library)


def _stored_copy(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    torch.ops.tp_invariant.store_.default(x)
    return x


class _StoredCopy(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _stored_copy(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass  # torch.func asks for it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _stored_copy(grad)


# What an op of several ranks that moves x is on one rank: x in memory of its own, and so its gradient, for the same
# roundings. A compiler computes what is before and after it apart, each rounded to its dtype, and copies where somebody
# else needs the same memory. `store_` says to it that memory is written, and does nothing.
_library.define("stored_copy(Tensor x) -> Tensor")
_library.impl("stored_copy", lambda x: _StoredCopy.apply(x), "CompositeImplicitAutograd")
stored_copy = torch.ops.tp_invariant.stored_copy.default


def _set_settings(ctx: Any, dtypes: Any, *settings: Any) -> None:
    ctx.settings = settings


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def as_custom_op(
    function: type[torch.autograd.Function],
    *,
    name: str,
    tensors: Sequence[str],
    outputs: Callable[..., Sequence[Tensor | None]],
    restore: Callable[..., None] | None = None,
    saved: Sequence[int | None] = (),
    note: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """function.apply, and while torch.compile traces a custom op that runs function's forward and backward.

    Tensors may be DTensors: function sees their local tensors (dtensors.py).

    Args:
        name: of the op; the name in graphs and profiles.
        tensors: function's first arguments, "x" or "bias?" for one that may be None. The rest are settings.
        outputs: (*arguments) -> empty tensors like forward's result and those of `saved` that are None.
        saved: what forward saves for backward: the position of an argument, or None for a tensor that it makes.
        restore: (ctx, dtypes, *settings), sets what else forward sets on its context; dtypes are those of the tensors.
            If None, forward sets ctx.settings, a tuple of the settings.
        note: (*arguments) -> a number or None, called where torch traces the op, whose first tensor has a node in the
            graph of gradients then; backward finds the result as ctx.noted.
    """
    restore = restore or _set_settings
    count = len(tensors)
    arguments = ", ".join(f"Tensor{'?' if t.endswith('?') else ''} {t.rstrip('?')}" for t in tensors)
    made = [i for i, position in enumerate(saved) if position is None]
    not_saved = [i for i in range(count) if i not in saved]

    def run(inputs: tuple[Tensor | None, ...], sizes: Sequence[int], text: str) -> Any:
        ctx = _Context()
        result = function.forward(ctx, *inputs, *_configs(text, sizes))
        result = _with_own_memory(result, inputs)
        if not made:
            return result
        results = [result]
        for i in made:
            t = ctx.saved_tensors[i]
            results.append(_nothing(result.device, result.dtype) if t is None else _with_own_memory(t, inputs))
        return results

    def run_fake(*args: Any) -> Any:
        *inputs, sizes, text = args
        made_up = outputs(*inputs, *_configs(text, sizes))
        results = [inputs[0].new_empty(_NONE_SHAPE) if t is None else t for t in made_up]
        return results if made else results[0]

    def run_backward(grad: Tensor, saved_tensors: tuple[Tensor | None, ...], text: str) -> list[Tensor]:
        configs, needs, needs_of_all, _, dtypes, noted = _read_adjoint(text, _group_of(text))
        ctx = _Context()
        ctx.saved_tensors, ctx.needs_input_grad, ctx.noted = saved_tensors, needs_of_all, noted
        restore(ctx, dtypes, *configs)
        grads = function.backward(ctx, grad)
        others = grad, *saved_tensors
        return [_with_own_memory(grads[i], others) for i in range(count) if needs[i]]

    def run_backward_fake(grad: Tensor, *args: Any) -> list[Tensor]:
        *saved_tensors, sizes, text = args
        _, needs, _, dims, dtypes, _ = _read_adjoint(text, _group_of(text))
        left, shapes = list(sizes), {}
        for i in not_saved:
            shapes[i], left = left[: dims[i]], left[dims[i] :]
        for position, t in zip(saved, saved_tensors, strict=True):
            if position is not None and t is not None:
                shapes[position] = t.shape
        return [grad.new_empty(shapes[i], dtype=dtypes[i]) for i in range(count) if needs[i]]

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        own, others = inputs[:count], output[1:] if made else ()
        extras = iter(others)
        saved_tensors = [next(extras) if position is None else own[position] for position in saved]
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(*saved_tensors)
        ctx.sizes = [size for i in not_saved if own[i] is not None for size in own[i].shape]
        names = tuple("" if t is None else str(t.dtype).removeprefix("torch.") for t in own)
        group, *values = _literals(inputs[-1])
        ctx.settings = group, tuple(values), tuple(0 if t is None else t.dim() for t in own), names
        ctx.noted = None if note is None else note(*own, *_configs(inputs[-1], inputs[-2]))

    def derivative(backward_op: Callable) -> Callable:
        def backward(ctx: Any, grad: Tensor, *_: None) -> tuple:
            group, values, dims, names = ctx.settings
            needs = tuple(ctx.needs_input_grad[:count])
            saved_tensors = [None if t is None or tuple(t.shape) == _NONE_SHAPE else t for t in ctx.saved_tensors]
            text = _settings(group, values, needs, dims, names, ctx.noted)
            grads = iter(backward_op(grad, *saved_tensors, ctx.sizes, _with_place(text) if group else text))
            return *(next(grads) if need else None for need in needs), None, None

        return backward

    def single_rank(*args: Any) -> Any:
        return run(args[:count], *args[count:])

    def multi_rank(*args: Any) -> Any:
        with _place_of(args[-1]):
            return run(tuple([_alias(t) for t in args[:count]]), *args[count:])

    def single_rank_backward(grad: Tensor, *args: Any) -> list[Tensor]:
        return run_backward(grad, args[:-2], args[-1])

    def multi_rank_backward(grad: Tensor, *args: Any) -> list[Tensor]:
        with _place_of(args[-1]):
            return run_backward(grad, tuple([_alias(t) for t in args[:-2]]), args[-1])

    saved_arguments = "".join([f"Tensor? saved_{i}, " for i in range(len(saved))])
    ops = []
    for ending, kernel, kernel_backward in (
        ("", single_rank, single_rank_backward),
        ("_ranks", multi_rank, multi_rank_backward),
    ):
        schema = f"(Tensor grad, {saved_arguments}SymInt[] sizes, str settings) -> Tensor[]"
        adjoint = define(f"{name}{ending}_backward", schema, kernel_backward, run_backward_fake, ordered=bool(ending))
        schema = f"({arguments}, SymInt[] sizes, str settings) -> Tensor{'[]' if made else ''}"
        op = define(f"{name}{ending}", schema, kernel, run_fake, ordered=bool(ending))
        ops.append(with_derivative(op, schema, derivative(adjoint), setup_context, ordered=bool(ending)))
    single_rank_op, multi_rank_op = ops
    of_dtensors = with_dtensors(function)

    def apply(*args: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            plain = _PLAIN.issuperset(map(type, args[:count])) or not any(map(is_dtensor, args[:count]))
            return (function if plain else of_dtensors).apply(*args)
        args = (*map(as_local, args[:count]), *args[count:])
        groups: list[str] = []
        sizes: list[int] = []
        configs = []
        for value in args[count:]:
            if isinstance(value, torch.Size):
                sizes.extend(value)
                value = _SIZES
            configs.append(_encode(value, groups))
        group = groups[0] if groups else ""  # without a group, as on one rank
        op = multi_rank_op if group else single_rank_op
        results = op(*args[:count], sizes, _settings(group, *configs))
        return results[0] if made else results

    return apply
