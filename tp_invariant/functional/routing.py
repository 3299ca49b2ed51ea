"""From a router's logits to the experts of each token and their weights, in fp32.

    scores     softmax(logits), sigmoid(logits), or the logits themselves
    choice     scores, plus a correction for each expert; of experts in groups, those of the best groups only
    index      the k experts with the largest choice, in descending order; equal ones by the lower index
    weights    their scores (of logits: softmax over the k), divided by their sum, scaled

Each token's results depend on its logits alone: sums over a token's experts run in one order, and exponentials do not
depend on the position of an element (core/elementwise.py). Ties have an order because torch.topk has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..core.differentiation import once_differentiable
from ..core.elementwise import in_whole_vectors
from ..core.graph_breaks import outside_of_graphs
from ..kernels.select import select
from .linear import flatten_tokens

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted.

    Args:
        top_k: the number of experts for each token.
        scores: "softmax" over all experts (Qwen3, Mixtral), "sigmoid" (DeepSeek-V3), or "softmax_of_chosen": experts
            are chosen by their logits, and the softmax is over the chosen ones (gpt-oss).
        normalize: whether a token's weights are divided by their sum, which is 1 already with "softmax_of_chosen".
        scale: a factor of the weights, after that.
        groups, chosen_groups: with several groups of consecutive experts, only experts of `chosen_groups` of them can
            be chosen: of those whose two best experts have the largest sum.
        epsilon: added to the sum by which `normalize` divides.

    Raises:
        ValueError: an unknown `scores`, or numbers that do not fit.
    """

    top_k: int
    scores: Scores = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.scores not in get_args(Scores):
            raise ValueError(
                f"scores={self.scores!r} is unknown: choose one of {', '.join(map(repr, get_args(Scores)))}"
            )
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(f"chosen_groups={self.chosen_groups} must be from 1 to groups={self.groups}")

    def check_experts(self, experts: int) -> None:
        """Whether these experts can be chosen from.

        Raises:
            ValueError: fewer experts than top_k; or groups that do not divide them, or that have fewer than two.
        """
        if self.groups > 1 and (experts % self.groups or experts < 2 * self.groups):
            raise ValueError(f"groups={self.groups} must divide num_experts={experts} into groups of two or more")
        available = experts // self.groups * self.chosen_groups
        if self.top_k > available:
            raise ValueError(f"top_k={self.top_k} is more than the {available} experts that can be chosen")


class _Chosen(torch.autograd.Function):
    """scores [.., E], index [.., k] of different experts -> their scores. torch's gather would add in backward."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = scores.shape
        return scores.gather(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(-1, index, grad), None


@outside_of_graphs("its kernel is no op")
def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest along the last dim, descending; of equal ones the lower index comes first.

    In place of torch.topk, in which equal scores have no order. NaN is the largest, as there.
    """
    index = _index_of_largest(scores.detach(), k)
    return _Chosen.apply(scores, index), index


def _index_of_largest(scores: Tensor, k: int) -> Tensor:
    return select("routing", scores.device.type).top_k(scores, k)[1]


class _Normalized(torch.autograd.Function):
    """y = w / (sum of w + epsilon) over the last dim; dw = (dy - sum of dy y) / (sum of w + epsilon)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, epsilon: float) -> Tensor:
        y, total = select("routing", weights.device.type).normalized(flatten_tokens(weights), epsilon)
        ctx.save_for_backward(y, total)
        return y.view(weights.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y, total = ctx.saved_tensors
        kernels = select("routing", dy.device.type)
        return kernels.normalized_backward(flatten_tokens(dy), y, total).view(dy.shape), None


class _Softmax(torch.autograd.Function):
    """Over the last dim, in fp32: dlogits = y (dy - sum of dy y)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        kernels = select("softmax", logits.device.type)
        y = kernels.softmax(flatten_tokens(logits), log=False, out_dtype=torch.float32).view(logits.shape)
        ctx.save_for_backward(y)
        ctx.dtype = logits.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        row_sums = select("softmax", y.device.type).row_sums
        dots = row_sums(flatten_tokens(dy * y), divisor=1, out_dtype=torch.float32).view(*y.shape[:-1], 1)
        return (y * (dy - dots)).to(ctx.dtype)


class _Sigmoid(torch.autograd.Function):
    """In fp32: dlogits = dy y (1 - y)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        y = in_whole_vectors(torch.sigmoid, logits.float())
        ctx.save_for_backward(y)
        ctx.dtype = logits.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return (dy * (y * (1 - y))).to(ctx.dtype)


@outside_of_graphs("a compiler may compute sums and exponentials in another order")
def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [.., E] -> (weights [.., k] in fp32, index [.., k], int64).

    correction: [E], added to the scores to choose experts, not to weight them; it gets no gradient.
    """
    if routing.scores == "softmax_of_chosen":
        scores = logits.float()
    else:
        scores = (_Softmax if routing.scores == "softmax" else _Sigmoid).apply(logits)
    index = _choose(scores.detach(), routing, correction)
    weights = _Chosen.apply(scores, index)
    if routing.scores == "softmax_of_chosen":
        weights = _Softmax.apply(weights)
    elif routing.normalize:
        weights = _Normalized.apply(weights, routing.epsilon)
    return (weights if routing.scale == 1.0 else weights * routing.scale), index


def _choose(choice: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
    if correction is not None:
        choice = choice + correction.detach().float()
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = select("routing", choice.device.type).top_k(grouped, 2)[0]
        chosen = _index_of_largest(best[..., 0] + best[..., 1], routing.chosen_groups)
        others = torch.ones_like(best[..., 0], dtype=torch.bool).scatter(-1, chosen, False)
        choice = grouped.masked_fill(others.unsqueeze(-1), float("-inf")).flatten(-2)
    return _index_of_largest(choice, routing.top_k)
