"""What this library's autograd functions have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .graph_breaks import outside_of_graphs
from .torch_private import will_execute


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
    autograd.grad(loss, x, create_graph=True): a penalty on them would have a gradient without a summand.

    Compiled autograd would trace the formula, and a compiler computes it in another order: it runs as in eager mode,
    unless it is `traced`, as that of a function which is in compiled graphs without being an op.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        # torch.autograd.grad runs only what leads to its inputs: the leaves, and what the incoming gradients depend on
        leaves = [node.variable for node, _ in getattr(ctx, "next_functions", ()) if hasattr(node, "variable")]
        of = torch.empty(0, requires_grad=True), *grads, *leaves  # the first: so that the results require a gradient
        marked = _Once.apply(len(of), *of, *(results if isinstance(results, tuple) else (results,)))
        return marked if isinstance(results, tuple) else marked[0]

    return once if traced else outside_of_graphs("a compiler may compute a gradient's sums in another order")(once)


def is_executed(node: Any) -> bool | None:
    """Whether the backward that runs executes `node`; None if torch.autograd.grad asks for the gradient of its leaf.

    `ctx.needs_input_grad` says what some backward may want; this one may be of other inputs, or the first half of a
    pipeline stage's backward. torch has no public question for it; its own FullyShardedDataParallel asks the same.
    """
    try:
        return bool(will_execute(node))
    except RuntimeError as error:
        # it answers False for a leaf that is not wanted, and refuses one that torch.autograd.grad was given as input
        if "A leaf node was passed" not in str(error):
            raise
        return None
