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

from ..core.compiled import as_custom_op, define
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
    def forward(ctx: Any, scores: Tensor, index: Tensor, experts: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.settings = (experts,)
        return scores.gather(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,), (experts,) = ctx.saved_tensors, ctx.settings
        return grad.new_zeros((*index.shape[:-1], experts)).scatter(-1, index, grad), None, None


_chosen = as_custom_op(
    _Chosen,
    name="chosen_scores",
    tensors=("scores", "index"),
    outputs=lambda scores, index, experts: [scores.new_empty(index.shape)],
    saved=(1,),
)


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest along the last dim, descending; of equal ones the lower index comes first.

    In place of torch.topk, in which equal scores have no order. NaN is the largest, as there.
    """
    index = _index_of_largest(scores.detach(), k)
    return _chosen(scores, index, scores.shape[-1]), index


def _index(scores: Tensor, k: int) -> Tensor:
    return select("routing", scores.device.type).top_k(scores, k)[1]


# An op, because a graph that began after it would have the values as an input, and the compiler's backward refuses an
# input that a router then normalises in place (values /= values.sum(..), as transformers' do).
_index_op = define(
    "index_of_largest",
    "(Tensor scores, int k) -> Tensor",
    _index,
    lambda scores, k: scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64),
)


def _index_of_largest(scores: Tensor, k: int) -> Tensor:
    return (_index_op if torch.compiler.is_compiling() else _index)(scores, k)


class _Softmax(torch.autograd.Function):
    """Over the last dim of [T, k], in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        y = select("softmax", logits.device.type).softmax(logits, log=False, out_dtype=torch.float32)
        ctx.save_for_backward(y)
        ctx.dtype = logits.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return select("softmax", y.device.type).softmax_backward(dy, y, out_dtype=ctx.dtype)


_softmax = _Softmax.apply


class _Route(torch.autograd.Function):
    """logits [T, E] -> (weights [T, k], index), with the softmax or the sigmoid of the logits as scores."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, correction: Tensor | None, routing: Routing, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        kind = logits.device.type
        if routing.scores == "softmax":
            scores = select("softmax", kind).softmax(logits, log=False, out_dtype=torch.float32)
        else:
            scores = in_whole_vectors(torch.sigmoid, logits.float())
        weights, index, y, total = select("routing", kind).choose(
            scores, _choice(scores, routing, correction), routing.top_k, normalize=routing.normalize,
            epsilon=routing.epsilon, scale=routing.scale, out_dtype=out_dtype,
        )  # fmt: skip
        ctx.save_for_backward(scores, index, y, total)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # of index, in a launch
        ctx.routing, ctx.dtype = routing, logits.dtype
        return weights, index

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor | None, _: Any) -> tuple[Tensor, None, None, None]:
        scores, index, y, total = ctx.saved_tensors
        if dweights is None:
            dweights = torch.zeros_like(y)
        kind = scores.device.type
        dscores = select("routing", kind).choose_backward(
            dweights, index, y, total, experts=scores.shape[1], scale=ctx.routing.scale
        )
        if ctx.routing.scores == "softmax":
            return select("softmax", kind).softmax_backward(dscores, scores, out_dtype=ctx.dtype), None, None, None
        return (dscores * (scores * (1 - scores))).to(ctx.dtype), None, None, None


_route = _Route.apply


@outside_of_graphs("a compiler may compute sums and exponentials in another order")
def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """logits [.., E] -> (weights [.., k], in fp32 rounded once to out_dtype, index [.., k], int64).

    correction: [E], added to the scores to choose experts, not to weight them; it gets no gradient.
    """
    rows, shape = flatten_tokens(logits), (*logits.shape[:-1], routing.top_k)
    if routing.scores == "softmax_of_chosen":
        scores = rows.float()
        index = _index_of_largest(_choice(scores.detach(), routing, correction), routing.top_k)
        weights = _softmax(_chosen(scores, index, scores.shape[-1]))
        weights = (weights if routing.scale == 1.0 else weights * routing.scale).to(out_dtype)
    else:
        weights, index = _route(rows, correction, routing, out_dtype)
    return weights.view(shape), index.view(shape)


def _choice(choice: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
    """What experts are chosen by, from the scores [T, E]."""
    if correction is not None:
        choice = choice + correction.detach().float()
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = select("routing", choice.device.type).top_k(grouped, 2)[0]
        chosen = _index_of_largest(best[..., 0] + best[..., 1], routing.chosen_groups)
        others = torch.ones_like(best[..., 0], dtype=torch.bool).scatter(-1, chosen, False)
        choice = grouped.masked_fill(others.unsqueeze(-1), float("-inf")).flatten(-2)
    return choice
