"""The rotary embedding for a CPU: torch's operators, the contract of rope.py, and what both take. No Triton here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DTYPES


def check_rope(operation: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    """Raise unless q and k are [B, heads, S, D], and cos and sin [B or 1, S, R], of one dtype and device."""
    named = {"q": q, "k": k, "cos": cos, "sin": sin}
    for name, x in named.items():
        if x is None and name == "k":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{operation}: {name} is a {type(x).__name__}; allowed: a torch.Tensor")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise TypeError(
                f"{operation}: {name} has dtype {x.dtype}; allowed: that of q, one of {', '.join(map(str, DTYPES))}"
            )
        if x.device != q.device:
            raise ValueError(f"{operation}: {name} is on {x.device}; allowed: the device of q, {q.device}")
    if q.dim() != 4 or cos.dim() != 3 or q.shape[-1] == 0:
        raise ValueError(
            f"{operation}: q has shape {tuple(q.shape)} and cos {tuple(cos.shape)}; allowed: [B, heads, S, D] and "
            "[B or 1, S, R]"
        )
    batch, _, s, d = q.shape
    if k is not None and (k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (batch, s, d)):
        raise ValueError(f"{operation}: k has shape {tuple(k.shape)}; allowed: {(batch, 'heads', s, d)}")
    r = cos.shape[-1]
    if cos.shape not in ((batch, s, r), (1, s, r)) or sin.shape != cos.shape or r % 2 or not 0 < r <= d:
        raise ValueError(
            f"{operation}: cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; allowed: both [{batch} or 1, "
            f"{s}, R] with R even and at most {d}"
        )


def swapped(x: Tensor, interleaved: bool, negated: int) -> Tensor:
    """Each pair of elements in the other order, the first or the second of them negated afterwards."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (-second, first) if negated == 0 else (second, -first)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """(x * cos) + (rotate(x) * sin) of x [B, heads, S, D] and cos, sin [B or 1, S, R], by torch's operators."""
    cos, sin, r = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    part = x[..., :r] if r < x.shape[-1] else x
    y = (part * cos) + (swapped(part, interleaved, 0) * sin)
    return y if r == x.shape[-1] else torch.cat([y, x[..., r:]], dim=-1)


def _gradient(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin, r = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    part = dy[..., :r]
    dx = (part * cos) + swapped(part * sin, interleaved, 1)
    return (dx if r == dy.shape[-1] else torch.cat([dx, dy[..., r:]], dim=-1)) + 0.0


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backward: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See rope.rope."""
    check_rope("rope", q, k, cos, sin)
    rotate = _gradient if backward else rotated
    return rotate(q, cos, sin, interleaved), None if k is None else rotate(k, cos, sin, interleaved)
