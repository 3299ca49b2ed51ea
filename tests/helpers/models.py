"""Small models of this library's layers, and the order of sums over ranks, for tests of data parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tp_invariant as tpi


class GatedMlp(nn.Module):
    """x [.., hidden] + down(relu(gate) * up) of the normed x: sharded along either dim, one weight in two pieces."""

    def __init__(self, tp_group: Any, hidden: int = 32, inner: int = 64, **options: Any) -> None:
        super().__init__()
        shared = dict(tp_group=tp_group, **options)
        self.up = tpi.LayerNormLinear(hidden, 2 * inner, parallel_mode="column", partition_stride=2, **shared)
        self.down = tpi.Linear(inner, hidden, parallel_mode="row", **shared)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(gate.relu() * up)


class ExpertNet(nn.Module):
    """x [.., hidden]: a dense pair of layers around which tokens keep their places, and a mixture of experts.

    mixture: options of MixtureOfExperts; shared: of all layers.
    """

    def __init__(self, hidden: int, inner: int, experts: int, mixture: dict[str, Any], **shared: Any) -> None:
        super().__init__()
        self.up = tpi.Linear(hidden, inner, parallel_mode="column", **shared)
        self.down = tpi.Linear(inner, hidden, parallel_mode="row", **shared)
        self.mixture = tpi.MixtureOfExperts(experts, hidden, inner, tpi.Routing(top_k=2), **mixture, **shared)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.silu(self.up(x)))
        return x + self.mixture(x)


def tree_sum(summands: Any) -> Any:
    """The tree's order, as a recursion: the left half is the largest power of two that leaves a right half."""
    if len(summands) == 1:
        return summands[0]
    left = 1 << (len(summands) - 1).bit_length() - 1
    return tree_sum(summands[:left]) + tree_sum(summands[left:])


def gemm_in_order(a, b, *, bias=None, out_dtype=None):
    """A gemm_fn of a user's: k in order, one rank-1 update after another."""
    c = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        c = c + a[:, k, None].float() * b[None, k].float()
    return (c if bias is None else c + bias.float()).to(out_dtype or a.dtype)
