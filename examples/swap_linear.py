"""An MLP of plain torch made tensor-parallel in two ways, with one digest for both, at every degree.

python examples/swap_linear.py                                # TP=1
torchrun --nproc-per-node=4 examples/swap_linear.py           # TP=4: the same digest
TP_INVARIANT_MODE=0 torchrun --nproc-per-node=4 examples/swap_linear.py   # stock: another one
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tp_invariant as tpi


class MLP(nn.Module):
    """x [.., 256] -> [.., 256]. `linear` makes its layers; parallel_mode tells how each is sharded."""

    def __init__(self, linear=lambda k, n, parallel_mode: nn.Linear(k, n)) -> None:
        super().__init__()
        self.up = linear(256, 1024, parallel_mode="column")
        self.act = nn.GELU()
        self.down = linear(1024, 256, parallel_mode="row")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def constructed(tp_group, device) -> nn.Module:
    """tpi.Linear in nn.Linear's place: no full weight is ever kept."""

    def linear(k: int, n: int, parallel_mode: str) -> tpi.Linear:
        return tpi.Linear(k, n, parallel_mode=parallel_mode, tp_group=tp_group, device=device)

    return MLP(linear)


def swapped(tp_group, device) -> nn.Module:
    """The finished model's layers swapped, by a plan."""
    return tpi.parallelize(MLP().to(device), tp_group, {"up": "colwise", "down": "rowwise"})


def train(model: nn.Module, tp_group, device) -> str:
    """Three steps; the digest of all losses, norms and full parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for step in range(3):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
        optimizer.step()
        seen += [loss, norm]
    return tpi.testing.digest((seen, tpi.testing.full_parameters(model)))


def main() -> None:
    os.environ.setdefault("TP_INVARIANT_MODE", "1")  # read at every call
    tp_group, device = None, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" in os.environ:  # under torchrun
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        tp_group = dist.group.WORLD
    for make in (constructed, swapped):
        torch.manual_seed(0)  # the same on every rank
        digest = train(make(tp_group, device), tp_group, device)
        if tp_group is None or dist.get_rank() == 0:
            print(make.__name__, digest)
    if tp_group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
