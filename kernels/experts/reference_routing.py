"""The routing of rows to experts and back for a CPU: plain torch, the contract of routing.py.

Products and sums are one IEEE operation at a time; a dot product is added by halves, in an order of its length alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DTYPES
from ..elementwise import sum_by_halves


def check_top_k(scores: Tensor, k: int) -> None:
    """For routing.py, too."""
    if scores.dtype not in DTYPES:
        raise TypeError(f"top_k: scores has dtype {scores.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if type(k) is not int or not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"top_k: k is {k!r}; allowed: an int from 1 to the {scores.shape[-1]} scores of a token")


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See routing.top_k."""
    check_top_k(scores, k)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def _sum_of_slots(x: Tensor) -> Tensor:
    first, *others = x.unbind(1)
    for other in others:
        first = first + other
    return first


def choose(
    scores: Tensor,
    choice: Tensor,
    k: int,
    *,
    normalize: bool,
    epsilon: float,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See routing.choose."""
    index = top_k(choice, k)[1]
    y, total = scores.gather(1, index), None
    if normalize:
        total = _sum_of_slots(y) + epsilon
        y = y / total.unsqueeze(1)
    return (y * scale).to(out_dtype), index, y, total


def choose_backward(
    dweights: Tensor, index: Tensor, y: Tensor, total: Tensor | None, *, experts: int, scale: float
) -> Tensor:
    """See routing.choose_backward."""
    dy = dweights.float() * scale
    if total is not None:
        dy = (dy - _sum_of_slots(dy * y).unsqueeze(1)) / total.unsqueeze(1)
    return dy.new_zeros((len(y), experts)).scatter_(1, index, dy)


def sort_by_expert(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See routing.sort_by_expert. Here a value of index that is no expert is not noticed."""
    by_expert, order = index.flatten().int().sort(stable=True)
    bounds = torch.arange(experts + 1, device=index.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return order, places.view(index.shape), offsets


def spread_rows(x: Tensor, places: Tensor) -> Tensor:
    """See routing.spread_rows."""
    rows = torch.empty((places.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    rows[places] = x.unsqueeze(1)
    return rows


def gather_rows(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """See routing.gather_rows."""
    return x.index_select(0, order // slots)


def combine(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """See routing.combine."""
    total = None
    for slot, place in enumerate(places.unbind(1)):
        term = rows[place].float()
        if weights is not None:
            term = term * weights[:, slot, None].float()
        total = term if total is None else total + term
    return total.to(rows.dtype)


def combine_backward_rows(dy: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """See routing.combine_backward_rows."""
    factors = weights.reshape(-1)[order].float()
    return (dy[order // weights.shape[1]].float() * factors.unsqueeze(1)).to(dy.dtype)


def combine_backward_weights(dy: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """See routing.combine_backward_weights."""
    dots = [sum_by_halves(dy.float() * rows[place].float()) for place in places.unbind(1)]
    return torch.cat(dots, dim=1)


def combine_backward(dy: Tensor, weights: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """See routing.combine_backward."""
    order = torch.empty_like(places.flatten())
    order[places.flatten()] = torch.arange(len(order), device=order.device)
    return combine_backward_rows(dy, weights, order), combine_backward_weights(dy, rows, places)
