"""Notices a loss that takes this rank's part of a parameter for the whole of it.

A term such as `p.norm()` or `p.square().mean()` has another gradient of a part than of the whole, and torch computes it
without an error where `p` is a plain shard. So in each backward the first formula of this library's walks down from the
loss, through operations that are known here, to the sharded parameters. A result on the way is one of these:

    IMAGE      an elementwise function of parts, which is sharded along `dim` (counted from the end)
    BLOCK      this rank's block of a product whose other blocks no rank has, as of `w @ w.T`
    OWN        a function that looks across this rank's elements; the square of a norm too, which has other bits
    WHOLE      a function of parameters that are whole on this rank
    CONSTANT   what has no gradient

What is not known (another operation, an activation) ends the walk and is allowed. So is each sum over the sharded dim:
what becomes of it may be right, since a sum that is added to over the ranks in place is the same node of the graph. A
loss that is OWN is an error. It costs time for each node that is known, and so those losses are looked at whose first
nodes, or whose number of new nodes, have not been seen before; with TP_INVARIANT_CHECK=1 all are.
"""

from __future__ import annotations

import gc
import math
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..comm.collectives import resolve_group
from ..core import differentiation
from ..core.mode import is_call_check_enabled


class _Value(NamedTuple):
    kind: str
    dim: int = 0
    operation: str = ""
    leaf: Any = None  # the parameter's node


IMAGE, BLOCK, OWN, WHOLE, CONSTANT = "image", "block", "own", _Value("whole"), _Value("constant")

# by the names of their nodes in the graph, without "Backward0"
_ELEMENTWISE = {
    "Abs", "Clamp", "ClampMax", "ClampMin", "Clone", "Cosh", "Erf", "Exp", "Expand", "Expm1", "Gelu", "LeakyRelu",
    "Log", "Log1P", "Neg", "Pow", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Silu", "Softplus", "Sqrt", "Tanh",
    "ToCopy",
}  # fmt: skip
_ADDITIONS, _SCALINGS, _JOINS, _PRODUCTS = {"Add", "Rsub", "Sub"}, {"Div", "Mul"}, {"Cat", "Stack"}, {"Bmm", "Mm"}
_VIEWS = {"Permute", "ReshapeAlias", "Squeeze", "T", "Transpose", "UnsafeView", "Unsqueeze", "View"}
_REDUCTIONS = {
    "Amax", "Amin", "HuberLoss", "LinalgVectorNorm", "LogSoftmax", "Logsumexp", "Max", "Mean", "Median", "Min",
    "MseLoss", "Prod", "SmoothL1Loss", "Softmax", "Std", "Sum", "Var",
}  # fmt: skip
_names = {
    f"{name}Backward{number}": name
    for name in _ELEMENTWISE | _ADDITIONS | _SCALINGS | _JOINS | _PRODUCTS | _VIEWS | _REDUCTIONS
    for number in range(3)
} | {"_ToTorchTensorBackward": "Clone", "RedistributeBackward": "Clone"}  # of fully_shard's DTensors
# on which a result depends; no tensors, which torch has freed where a node has run
_SETTINGS = ("dim", "dim0", "dim1", "dims", "keepdim", "ord", "reduction")


def watch() -> None:
    """From now on each backward that computes a formula of this library's is looked at."""
    differentiation.at_formulas = _look_once


# taken now, since others put a function of their own around it later, as torch.compiler does while it traces
_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__
_backwards: set[int] = set()  # those looked at: several, since a backward may run inside of another one
_right: set[tuple] = set()  # losses that have been looked at
_RIGHT = "tp_invariant: looked at"  # of the node of one
_last_number = 0


def _look_once() -> None:
    global _last_number
    if (task := torch._C._current_graph_task_id()) in _backwards:
        return
    for seen in (_backwards, _right):
        if len(seen) > 256:
            seen.clear()
    _backwards.add(task)
    values: dict[Any, _Value | None] = {None: CONSTANT}
    for root in _roots():
        if _RIGHT in root.metadata:
            continue  # each backward inside of another one meets the root of that
        new_nodes, _last_number = root._sequence_nr() - _last_number, root._sequence_nr()
        kind = new_nodes, *_first_nodes(root)
        value = _value_of(root, values) if kind not in _right or is_call_check_enabled() else None
        if value is None or value.kind != OWN:
            _right.add(kind)
            root.metadata[_RIGHT] = True
        elif differentiation.is_executed(value.leaf) is not False:
            _refuse(value)


def _first_nodes(root: Any) -> Iterator[tuple]:
    """The same on every rank of one program, so that all look at the same losses."""
    stack = [root]
    for _ in range(32):
        if not stack:
            break
        node = stack.pop()
        name = type(node).__name__  # and not the type, which may hold all that a compiled graph holds
        if name == "AccumulateGrad":
            leaf = node.variable
            yield name, getattr(leaf, "tensor_model_parallel", False), getattr(leaf, "partition_dim", None)
        elif name in _names:
            yield name, *(getattr(node, f"_saved_{setting}", None) for setting in _SETTINGS)
            stack += [below for below, _ in node.next_functions if below is not None]
        else:
            yield (name,)


def _roots() -> list[Any]:
    """The nodes where the backward that runs has begun, and those inside of which it may run.

    Nothing that torch hands to a node says it. The call of the engine does, which may wait in another thread: for a
    GPU, and where checkpoints are nested deeply.
    """
    last_calls = sys._current_frames()
    last_calls[threading.get_ident()] = sys._getframe(1)  # not this one, which would hold itself, and the graph
    roots = []
    for last_call in last_calls.values():
        call: FrameType | None = last_call
        while call is not None:
            if call.f_code is _ENGINE_CALL:
                roots += [y.grad_fn if isinstance(y, Tensor) else y.node for y in call.f_locals["t_outputs"]]
            call = call.f_back
    return [root for root in roots if root is not None]


def _refuse(value: _Value) -> NoReturn:
    shard = value.leaf.variable
    group = resolve_group(shard.tp_group)
    # without those whose __init__ has failed
    modules = [held for held in gc.get_objects() if issubclass(type(held), nn.Module) and "_modules" in vars(held)]
    names = [name for module in modules for name, p in module.named_parameters() if p is shard]
    name = max(names, key=len, default="a parameter")
    raise RuntimeError(
        f"on rank {group.rank} the loss takes {value.operation} of {name} of shape {tuple(shard.shape)}, which is one "
        f"of {group.size} parts of a parameter that is sharded along dim {shard.partition_dim}: its gradient "
        "would differ from that of the whole parameter. Allowed: sums of elementwise functions with a factor that is "
        "the same at every degree, as 0.1 * p.square().sum(), also in place of 0.1 * p.norm() ** 2, divided by the "
        "number of elements of the whole parameter in place of a mean, or by twice the norm of the whole parameter, as "
        "a number, in place of a norm; operations along dims that are whole on each rank; a DeviceMesh as tp_group, "
        "with which operations see whole DTensors"
    )


def _value_of(root: Any, values: dict[Any, _Value | None]) -> _Value | None:
    stack = [root]
    while stack:
        node = stack[-1]
        name = _names.get(type(node).__name__)
        if node in values:
            stack.pop()
        elif type(node).__name__ == "AccumulateGrad":
            values[node] = _leaf(node)
        elif name is None:
            values[node] = None
        elif waits := [below for below, _ in node.next_functions if below not in values]:
            stack += waits
        else:
            values[node] = _result(name, node, [values[below] for below, _ in node.next_functions])
    return values[root]


def _leaf(node: Any) -> _Value | None:
    leaf = node.variable
    if not getattr(leaf, "tensor_model_parallel", False):
        return WHOLE if type(leaf) in (Tensor, nn.Parameter) else None  # a DTensor adds over the ranks
    if getattr(leaf, "tp_group", None) is None:
        return None  # nobody has said who has the other parts
    return _Value(IMAGE, _from_end(leaf.partition_dim, leaf.dim()), leaf=node)


def _result(name: str, node: Any, of: Sequence[_Value | None]) -> _Value | None:
    """What a node computes, given what its operands are."""
    own = next((value for value in of if value is not None and value.kind == OWN), None)
    if own is not None and name in _ADDITIONS | _JOINS:
        return own
    known = [value for value in of if value is not None]
    sharded = [value for value in known if value not in (WHOLE, CONSTANT)]
    if len(known) < len(of) or not sharded:
        return WHOLE if len(known) == len(of) else None
    if own is not None and name in _SCALINGS:
        return own
    first = sharded[0]
    if name in _PRODUCTS:
        is_block = [(value.kind, value.dim) for value in known] == [(IMAGE, -2), (IMAGE, -1)]
        return first._replace(kind=BLOCK, operation=_spelt(name)) if is_block else None
    if any((value.kind, value.dim) != (first.kind, first.dim) for value in sharded):
        return None
    if name in _JOINS and (name != "Cat" or first.kind != IMAGE or CONSTANT in known):
        return None
    if name in _SCALINGS and first.kind == BLOCK:
        return None  # by a mask, perhaps, of what is right
    if name in _REDUCTIONS | _VIEWS:
        edge = next(edge for edge in node.next_functions if edge[0] is not None)
        return (_reduction if name in _REDUCTIONS else _view)(name, node, first, _shape(*edge))
    return first


def _reduction(name: str, node: Any, value: _Value, shape: Sequence[int]) -> _Value | None:
    power = float(node._saved_ord) if name == "LinalgVectorNorm" else None
    if value.kind != IMAGE:
        return value._replace(kind=OWN)
    dims = getattr(node, "_saved_dim", None)
    over = {_from_end(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims or range(len(shape)))}
    how = ("none", "mean", "sum")[getattr(node, "_saved_reduction", 1)]  # of a loss function
    if value.dim not in over or how == "none":
        kept = how == "none" or name in ("LogSoftmax", "Softmax") or getattr(node, "_saved_keepdim", False)
        return value if kept else value._replace(dim=value.dim + sum(dim > value.dim for dim in over))
    is_sum = name == "Sum" or power in (0, 1) or how == "sum"
    return None if is_sum else value._replace(kind=OWN, dim=0, operation=_spelt(name))


def _view(name: str, node: Any, value: _Value, before: Sequence[int]) -> _Value | None:
    after = _shape(node, 0)
    if value.kind != IMAGE:
        return value
    dims = list(range(-len(before), 0))
    if name == "Permute":
        dims = [_from_end(dim, len(dims)) for dim in node._saved_dims]
    elif name in ("T", "Transpose"):
        a, b = (_from_end(getattr(node, f"_saved_dim{i}", -i), len(dims)) for i in (0, 1))
        dims[a], dims[b] = dims[b], dims[a]
    else:  # the same elements in the same order: which dim has all of this one, if any
        size, ahead = before[value.dim], math.prod(before[: value.dim])
        spans = {d: (math.prod(after[:d]), math.prod(after[:d]) * after[d]) for d in range(-len(after), 0)}
        found = [d for d, (start, end) in spans.items() if start <= ahead < ahead * size <= end]
        return value._replace(dim=found[0]) if found else None
    return value._replace(dim=dims.index(value.dim) - len(dims))


def _shape(node: Any, output: int) -> Sequence[int]:
    return node._input_metadata[output].shape


def _from_end(dim: int, ndim: int) -> int:
    dim = dim - (1 << 64) if dim >> 63 == 1 else dim  # torch shows a negative number of a node as an unsigned one
    return dim if dim < 0 else dim - ndim


def _spelt(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
