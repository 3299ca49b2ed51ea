"""What this library's autograd functions have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as torchs


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.function.once_differentiable, which turns gradients off even where they are off already.

    They are in every backward without create_graph=True, and to turn them off takes the host as long as to allocate
    two tensors.
    """
    twice = torchs(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        return (twice if torch.is_grad_enabled() else backward)(ctx, *grads)

    return once
