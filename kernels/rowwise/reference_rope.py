"""The rotary embedding for a CPU: torch's own operators, the contract of rope.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .rope_checks import check_rope


def _swapped(x: Tensor, interleaved: bool, negated: int) -> Tensor:
    """Each pair of elements in the other order, the first or the second of them negated afterwards."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (-second, first) if negated == 0 else (second, -first)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """(x * cos) + (rotate(x) * sin) of x [B, heads, S, D] and cos, sin [B or 1, S, R], by torch's operators."""
    cos, sin, r = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    part = x[..., :r] if r < x.shape[-1] else x
    y = (part * cos) + (_swapped(part, interleaved, 0) * sin)
    return y if r == x.shape[-1] else torch.cat([y, x[..., r:]], dim=-1)


def _gradient(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin, r = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    part = dy[..., :r]
    dx = (part * cos) + _swapped(part * sin, interleaved, 1)
    return (dx if r == dy.shape[-1] else torch.cat([dx, dy[..., r:]], dim=-1)) + 0.0


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backward: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See rope.rope."""
    check_rope("rope", q, k, cos, sin)
    rotate = _gradient if backward else rotated
    return rotate(q, cos, sin, interleaved), None if k is None else rotate(k, cos, sin, interleaved)
