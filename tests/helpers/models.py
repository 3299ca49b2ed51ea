"""Small models of this library's layers, for tests of states, optimizers, norms and data parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

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


class SmallModel(nn.Module):
    """ids -> logits, with every kind of parameter: padded vocabulary, gated, sharded by rows, whole, tied; a buffer.

    A DeviceMesh as tp_group makes all of them DTensors.
    """

    def __init__(
        self, tp_group: Any, seed: int = 0, *, vocabulary: int = 30, hidden: int = 16, inner: int = 32, pad: int = 8,
        bias: bool = True, tied: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = tpi.VocabParallelEmbedding(vocabulary, hidden, pad_vocab_to_multiple_of=pad, tp_group=tp_group)
        self.mlp = GatedMlp(tp_group, hidden, inner, bias=bias)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.whole = nn.Linear(hidden, hidden)
        padded = -(-vocabulary // pad) * pad
        self.head = tpi.Linear(hidden, padded, False, parallel_mode="column", gather_output=True, tp_group=tp_group)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.tensor(0))
        if isinstance(tp_group, DeviceMesh):
            tpi.replicate_(self, tp_group)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.whole(self.mlp(self.embedding(ids)) * self.scale))


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
