"""Shared by the references for a CPU: sums and functions whose bits do not depend on an element's position.

torch's CPU kernels compute exp, log or tanh by one formula for full SIMD vectors and by another for the remaining
elements, and split large tensors among threads at any element. So: full vectors, in blocks that torch does not split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

VECTORS = 64  # elements
BLOCK = 1 << 14


def in_whole_vectors(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors) for an elementwise function of tensors of one shape; on a CPU in blocks of full vectors.

    The last vector is filled with the first element: at another value the derivative may not exist, and torch's search
    for anomalies in backward would find that.

    On other devices than a CPU, function is applied to all at once.
    """
    first = tensors[0]
    if first.device.type != "cpu" or not first.numel():
        return function(*tensors)
    flat = [x.reshape(-1) for x in tensors]
    flat = [torch.cat((x, x[:1].detach().expand(-len(x) % VECTORS))).split(BLOCK) for x in flat]
    return torch.cat([function(*blocks) for blocks in zip(*flat, strict=True)])[: first.numel()].view(first.shape)


def in_whole_vectors_(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a function that works in place, in blocks of full vectors; may overwrite x.

    On other devices than a CPU, function is applied to all of x.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    if flat.numel() % VECTORS:
        flat = F.pad(flat, (0, -flat.numel() % VECTORS), value=1.0)
    for block in flat.split(BLOCK):
        function(block)
    return flat[: x.numel()].view(x.shape)


def sum_by_halves(x: Tensor) -> Tensor:
    """The sum over the last dim, which is kept with size 1: adds first and second half until one element is left.

    The order depends on the size of that dim alone. (torch.sum splits a long row over threads when there are few rows.)
    """
    while (width := x.shape[-1]) > 1:
        half = width // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., -1:]], dim=-1) if width % 2 else folded
    return x
