"""The rotary embedding for a CPU: torch's own operators, the contract of rope.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .rope_checks import check_rope, rotated, swapped


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
