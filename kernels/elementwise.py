"""What the references for a CPU share: sums and functions whose bits do not depend on where an element lies.

torch's CPU kernels take one formula of exp, log or tanh for whole vectors and another for the elements left over, and
cut large tensors into one piece per thread, anywhere. So: whole vectors, in blocks below the size that is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

VECTORS = 64  # elements
BLOCK = 1 << 14


def in_whole_vectors_(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), which works in place; may overwrite x. Elsewhere than on a CPU it is function(x)."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    if flat.numel() % VECTORS:
        flat = F.pad(flat, (0, -flat.numel() % VECTORS), value=1.0)
    for block in flat.split(BLOCK):
        function(block)
    return flat[: x.numel()].view(x.shape)


def sum_by_halves(x: Tensor) -> Tensor:
    """Over the last dim, which stays with size 1: the first half plus the second, until one is left.

    The order depends on the size of that dim alone. (torch.sum splits a long row over threads when there are few rows.)
    """
    while (width := x.shape[-1]) > 1:
        half = width // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., -1:]], dim=-1) if width % 2 else folded
    return x
