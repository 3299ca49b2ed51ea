"""What a DTensor parameter costs the host in each part of a training step, beside a plain one, in microseconds.

    python benchmarks/bench_dtensor_host.py

One process, a mesh of one rank, parameters so small that their arithmetic is short. Times are the
process's own time on the CPU, the least of many runs in turn, so that other programs on the machine count little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tp_invariant as tpi
from tp_invariant.core.dtensors import grad_like, is_dtensor, with_dtensors
from tp_invariant.layers.parameters import mark_sharded

SHAPE = (16, 8)


class Product(torch.autograd.Function):
    """The host's part of a layer: it keeps the weight and makes a gradient for it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad, torch.empty_like(ctx.saved_tensors[0])


def parts(count: int, group, mesh) -> dict[str, Callable[[], float]]:
    """A timed run of each part of parameters of layers over the group, DTensors on the mesh or plain ones without."""
    placements = ([Shard(0)], [Shard(1)], [Replicate()])
    local = [torch.randn(SHAPE) for _ in range(count)]
    if mesh is not None:
        local = [DTensor.from_local(x, mesh, placements[i % 3], run_check=False) for i, x in enumerate(local)]
    ps = [torch.nn.Parameter(x) for x in local]
    for i, p in enumerate(ps):
        mark_sharded(p, (0, 1, None)[i % 3], 1, group)  # as layers do; clipping goes by it
    product = with_dtensors(Product) if is_dtensor(ps[0]) else Product

    def timed(run: Callable[[], object]) -> float:
        start = time.thread_time()
        run()
        return 1e6 * (time.thread_time() - start) / count

    def backward() -> float:
        for p in ps:
            p.grad = None
        x = torch.ones(2, requires_grad=True)
        for p in ps:
            x = product.apply(x, p)
        return timed(x.sum().backward)

    def of(call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            for p in ps:
                p.grad = grad_like(torch.full(SHAPE, 0.1), p)
            return timed(call)

        return run

    forms = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    steps = {f"AdamW, {name}": of(torch.optim.AdamW(ps, **form).step) for name, form in forms.items()}
    sgd = torch.optim.SGD(ps, momentum=0.9, foreach=True)
    clip = of(lambda: tpi.clip_grad_norm_(ps, 1e9))
    return {"backward": backward, "clip_grad_norm_": clip, **steps, "SGD, foreach": of(sgd.step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    kinds = {
        "plain": parts(options.parameters, mesh, None),
        "DTensors": parts(options.parameters, mesh, mesh),
    }
    print(f"torch {torch.__version__}, {options.parameters} parameters, us for each")
    with tpi.set_tp_invariant_mode(True):
        for part in kinds["plain"]:
            least = dict.fromkeys(kinds, float("inf"))
            for _ in range(options.runs):
                for kind, runs in kinds.items():
                    least[kind] = min(least[kind], runs[part]())
            print(f"{part:16}", *(f"{kind} {us:.1f}  " for kind, us in least.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
