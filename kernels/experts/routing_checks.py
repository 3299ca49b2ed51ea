"""What the functions of routing.py take: the same on every device, refused in the same words. No Triton here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DTYPES
from ..rowwise.norm_checks import check

MAX_ROWS = 2**31  # offsets are int32


def check_top_k(scores: Tensor, k: int) -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"top_k: scores is a {type(scores).__name__}; allowed: a torch.Tensor")
    if scores.dtype not in DTYPES:
        raise TypeError(f"top_k: scores has dtype {scores.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if scores.dim() < 1:
        raise ValueError("top_k: scores has shape (); allowed: [.., E]")
    if type(k) is not int or not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"top_k: k is {k!r}; allowed: an int from 1 to the {scores.shape[-1]} scores of a token")


def check_choose(scores: Tensor, choice: Tensor, k: int) -> None:
    check("choose", "scores", scores, None, scores, (torch.float32,))
    if choice is not scores:
        check("choose", "choice", choice, tuple(scores.shape), scores, (torch.float32,))
    check_top_k(scores, k)


def check_choose_backward(dweights: Tensor, y: Tensor) -> None:
    check("choose_backward", "dweights", dweights, tuple(y.shape), y)


def _check_indices(operation: str, name: str, indices: Tensor, dims: str, like: Tensor, limit: int) -> None:
    """Raises unless indices are int64 of these dimensions; on a CPU also unless they are from 0 to limit - 1."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"{operation}: {name} is a {type(indices).__name__}; allowed: a torch.Tensor")
    if indices.dtype != torch.int64:
        raise TypeError(f"{operation}: {name} has dtype {indices.dtype}; allowed: torch.int64")
    if indices.dim() != dims.count(",") + 1 or (indices.dim() == 2 and not indices.shape[1]):
        raise ValueError(f"{operation}: {name} has shape {tuple(indices.shape)}; allowed: {dims}, k at least 1")
    if indices.device != like.device:
        raise ValueError(f"{operation}: {name} is on {indices.device}; allowed: the device of the rows, {like.device}")
    # on a GPU the host would wait for the values
    if indices.device.type == "cpu" and indices.numel() and not 0 <= indices.min() <= indices.max() < limit:
        raise ValueError(
            f"{operation}: {name} has values from {indices.min()} to {indices.max()}; allowed: 0 to {limit - 1}"
        )


def check_combine(rows: Tensor, weights: Tensor | None, places: Tensor) -> None:
    check("combine", "rows", rows, None, rows)
    _check_indices("combine", "places", places, "[T, k]", rows, rows.shape[0])
    if weights is not None:
        check("combine", "weights", weights, tuple(places.shape), rows)


def check_backward_rows(dy: Tensor, weights: Tensor, order: Tensor) -> None:
    operation = "combine_backward_rows"
    check(operation, "dy", dy, None, dy)
    check(operation, "weights", weights, None, dy)
    if weights.shape[0] != dy.shape[0]:
        raise ValueError(
            f"{operation}: weights has shape {tuple(weights.shape)}; allowed: [T, k] with the T of dy, {dy.shape[0]}"
        )
    _check_indices(operation, "order", order, "[R]", dy, weights.numel())


def check_backward(dy: Tensor, weights: Tensor, rows: Tensor, places: Tensor) -> None:
    operation = "combine_backward"
    check_backward_weights(dy, rows, places, operation)
    check(operation, "weights", weights, tuple(places.shape), dy)
    if places.numel() != rows.shape[0]:
        raise ValueError(
            f"{operation}: rows has shape {tuple(rows.shape)}; allowed: [R, H] with an R of T * k, {places.numel()}"
        )


def check_backward_weights(
    dy: Tensor, rows: Tensor, places: Tensor, operation: str = "combine_backward_weights"
) -> None:
    check(operation, "dy", dy, None, dy)
    check(operation, "rows", rows, None, dy, (dy.dtype,))
    if rows.shape[1] != dy.shape[1]:
        raise ValueError(
            f"{operation}: rows has shape {tuple(rows.shape)}; allowed: [R, H] with the H of dy, {dy.shape[1]}"
        )
    _check_indices(operation, "places", places, "[T, k]", dy, rows.shape[0])
    if places.shape[0] != dy.shape[0]:
        raise ValueError(
            f"{operation}: places has shape {tuple(places.shape)}; allowed: [T, k] with the T of dy, {dy.shape[0]}"
        )


def check_gather(x: Tensor, order: Tensor, slots: int) -> None:
    check("gather_rows", "x", x, None, x)
    _check_indices("gather_rows", "order", order, "[R]", x, x.shape[0] * slots)


def check_spread(x: Tensor, places: Tensor) -> None:
    check("spread_rows", "x", x, None, x)
    _check_indices("spread_rows", "places", places, "[T, k]", x, places.numel())
    if places.shape[0] != x.shape[0]:
        raise ValueError(
            f"spread_rows: places has shape {tuple(places.shape)}; allowed: [T, k] with the T of x, {x.shape[0]}"
        )


def check_sort(index: Tensor, experts: int) -> None:
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sort_by_expert: index has dtype {index.dtype}; allowed: torch.int32 or torch.int64")
    if index.dim() != 2 or not index.shape[1] or experts < 1:
        raise ValueError(
            f"sort_by_expert: index has shape {tuple(index.shape)}, for {experts} experts; allowed: [T, k] with k at "
            "least 1, for at least one"
        )
    check_rows(index.numel())


def check_rows(rows: int) -> None:
    if rows >= MAX_ROWS:
        raise ValueError(f"experts get {rows} rows on a rank, one for each token and slot; allowed: fewer than 2**31")
