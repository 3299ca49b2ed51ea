"""What this library's autograd functions have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .graph_breaks import outside_of_graphs

_is_of_a_transform = torch._C._functorch.is_functorch_wrapped_tensor


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply, for a function without setup_context, in two thirds of the host's time, of ordinary tensors.

    torch's looks in all arguments for tensors that are left of an earlier torch.func transform, and takes the tensors
    that they stand for: a gradient of theirs would reach nobody. `are_ordinary` finds them.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def are_ordinary(tensors: Sequence[Any]) -> bool:
    """Whether each is a Tensor, a Parameter or None, and no transform of torch.func is active or has left one.

    A tensor that a transform has left is of the class Tensor itself. Inside of a transform torch's own apply raises:
    see `Function.apply`.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:
        kind = type(x)
        if kind is Tensor:
            if _is_of_a_transform(x):
                return False
        elif kind is not Parameter and x is not None:
            return False
    return True


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`direct_apply` for all arguments: with one that a transform has left torch's own is called."""
    direct = direct_apply(function)

    def apply(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        for x in args:
            if type(x) is Tensor and _is_of_a_transform(x):
                return function.apply(*args)
        return direct(*args)

    return apply


class _Once(torch.autograd.Function):
    """Gradients as they are, which cannot be differentiated with respect to `of`, the first of `tensors`."""

    @staticmethod
    def forward(ctx: Any, of: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.detach() for grad in tensors[of:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")


def once_differentiable(backward: Callable[..., Any], *, traced: bool = False) -> Callable[..., Any]:
    """For backward of an autograd function: what it returns cannot be differentiated.

    torch's of the same name returns gradients that pass as constants if those that come in require none, as in
    autograd.grad(loss, x, create_graph=True): a penalty on them would have a gradient without a summand. It also turns
    gradients off where they are off already, as they are in every backward without create_graph=True, and that takes
    the host as long as to allocate two tensors.

    Compiled autograd would trace the formula, and a compiler computes it in another order: it runs as in eager mode,
    unless it is `traced`, as that of a function which is in compiled graphs without being an op.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        # torch.autograd.grad runs only what leads to its inputs: the leaves, and what the incoming gradients depend on
        leaves = [node.variable for node, _ in getattr(ctx, "next_functions", ()) if hasattr(node, "variable")]
        of = torch.empty(0, requires_grad=True), *grads, *leaves  # the first: so that the results require a gradient
        marked = _Once.apply(len(of), *of, *(found if isinstance(found, tuple) else (found,)))
        return marked if isinstance(found, tuple) else marked[0]

    return once if traced else outside_of_graphs("a compiler may compute a gradient's sums in another order")(once)


def is_executed(node: Any) -> bool | None:
    """Whether the backward that runs executes `node`; None if torch.autograd.grad asks for the gradient of its leaf.

    `ctx.needs_input_grad` says what some backward may want; this one may be of other inputs, or the first half of a
    pipeline stage's backward. torch has no public question for it; its own FullyShardedDataParallel asks the same.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # it answers False for a leaf that is not wanted, and refuses one that torch.autograd.grad was given as input
        if "A leaf node was passed" not in str(error):
            raise
        return None
