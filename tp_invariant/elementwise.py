"""Elementwise functions whose bits do not depend on where an element lies."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mode import is_tp_invariant_mode_enabled

# torch's CPU kernels take one formula of exp or tanh for whole vectors and another for the elements left over, and cut
# large tensors into one piece per thread, anywhere. So: pad to whole vectors, and stay below the size that is cut.
_VECTORS = 64
_BLOCK = 2**14


def in_whole_vectors(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """fn(x) for an elementwise fn; on a CPU by blocks of whole vectors, forward and backward, so that bits are x's."""
    if x.device.type != "cpu" or not x.numel():
        return fn(x)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % _VECTORS))
    return torch.cat([fn(block) for block in flat.split(_BLOCK)])[: x.numel()].view(x.shape)


class WholeVectors(nn.Module):
    """An activation module without parameters, called by `in_whole_vectors` while the mode is on."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return in_whole_vectors(self.activation, x) if is_tp_invariant_mode_enabled() else self.activation(x)
