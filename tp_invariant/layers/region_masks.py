"""Dropout on this rank's part of the activations is noticed in the autograd graph of what a layer is given.

Every rank draws a mask for its own features or tokens, so that the masks of two degrees differ. Nothing tells a layer
of it: dropout may be a function in anybody's code. But the graph of a layer's input has it, as a node of its own or as
a product with a tensor of zeros and one factor: 1 / (1 - p) for dropout on a CPU, another for alpha_dropout anywhere,
which adds a constant to the product. The walk begins at an input that is a part and ends at the layers before, between
which all is a part. It is done where a kind of call is new, and looks at each node once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# what puts out a whole activation, or a part of its own making
_ENDS = ("functional.linear", "functional.regions", "functional.stock", "functional.experts", "layers.vocab_embedding")
_LEAST = 64  # elements of a mask: fewer do not tell
_SQUARE = 1.7580993408473766**2  # of the negative limit of SELU, which alpha_dropout puts in place of what it drops
_LOOKED_AT = "tp_invariant has looked at it"


def dropout_before(x: Tensor) -> str | None:
    """The node of the graph before `x`, a part, that draws a mask for this rank's elements; None if there is none."""
    stack = [] if x.grad_fn is None else [x.grad_fn]
    while stack:
        node: Any = stack.pop()
        function = getattr(type(node), "_forward_cls", None)
        place = getattr(getattr(function, "of_plain", function), "__module__", "")  # of_plain: core/dtensors.py
        if place.startswith("tp_invariant.") and place.endswith(_ENDS):
            continue
        if node.metadata.get(_LOOKED_AT):
            continue
        if _draws_a_mask(node):
            return node.name()
        node.metadata[_LOOKED_AT] = True
        stack += [before for before, _ in node.next_functions if before is not None]
    return None


def _draws_a_mask(node: Any) -> bool:
    p = getattr(node, "_saved_dropout_p", 0.0)  # of attention
    if "Dropout" in node.name():
        p = getattr(node, "_saved_p", 1.0)
    if p:
        return True
    befores = [before for before, _ in node.next_functions]
    if node.name().startswith("AddBackward") and None in befores:  # a limit in place of what is dropped
        return any(_multiplies_by_mask(before, _is_of_alpha_dropout) for before in befores if before is not None)
    return _multiplies_by_mask(node, _is_of_dropout)


def _multiplies_by_mask(node: Any, is_factor: Callable[[float, float, int], bool]) -> bool:
    if node.name() != "MulBackward0":  # MulBackward1 is a product with a number, as in torch.special.ndtr
        return False
    try:
        factors = node._saved_self, node._saved_other
    except RuntimeError:  # written to since
        return False
    return any(
        _is_mask(factor, is_factor) for factor in factors if isinstance(factor, Tensor) and not factor.requires_grad
    )


def _is_mask(factor: Tensor, is_factor: Callable[[float, float, int], bool]) -> bool:
    """Whether its elements are 0 and a factor of dropout's, about as many of each as it makes."""
    if not factor.is_floating_point() or factor.numel() < _LEAST or type(factor) is not Tensor:
        return False
    with torch.no_grad():
        largest, zero = float(factor.amax()), factor == 0
        if largest <= 0 or largest == 1 or math.isinf(largest) or not bool((zero | (factor == largest)).all()):
            return False
        share = float(zero.float().mean())
    return 0 < share < 1 and is_factor(largest, share, factor.numel())


def _is_of_dropout(factor: float, share: float, elements: int) -> bool:
    """factor = 1 / (1 - p), which 16 bits round."""
    return factor > 1 and abs(1 - 1 / factor - share) < 0.01 / factor + _chance(share, elements)


def _is_of_alpha_dropout(factor: float, share: float, elements: int) -> bool:
    """factor = ((_SQUARE p + 1) (1 - p)) ** -0.5"""
    chance = _chance(share, elements)
    error = abs(_SQUARE - 1 - 2 * _SQUARE * share) * chance + _SQUARE * chance**2
    return abs((_SQUARE * share + 1) * (1 - share) - factor**-2) < 0.01 * factor**-2 + error


def _chance(share: float, elements: int) -> float:
    """How far a share of zeros may be from p."""
    return 6 * math.sqrt(share * (1 - share) / elements)
