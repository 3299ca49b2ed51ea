"""A rank that captures layers, trains and ends, for tests/graphs/test_end_of_process.py. Started by torchrun."""

from __future__ import annotations

import faulthandler
import os

import torch
import torch.distributed as dist

import tp_invariant as tpi

TOKENS, HIDDEN, FFN = 8192, 4096, 12288


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = dict(
            bias=False, tp_group=dist.group.WORLD, sequence_parallel=True, device="cuda", dtype=torch.bfloat16
        )
        self.up = tpi.Linear(HIDDEN, FFN, parallel_mode="column", **options)
        self.down = tpi.Linear(FFN, HIDDEN, parallel_mode="row", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)  # alike on all ranks, as for any layers
    layers = [Mlp(), Mlp()]
    tokens = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x = tokens.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()

    def forward() -> torch.Tensor:
        return layers[1](layers[0](x))

    handle = tpi.graphs.graph_layers(layers, forward)
    assert len(handle._cuda_graphs) == 2 * len(layers)
    for _ in range(12):
        y = forward()
        y.sum().backward()
    y = forward()  # has no backward, and refers to the graphs until the process ends
    handle.remove()
    dist.barrier()
    faulthandler.dump_traceback_later(60, exit=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    print("ended", y.grad_fn is not None, flush=True)


if __name__ == "__main__":
    main()
