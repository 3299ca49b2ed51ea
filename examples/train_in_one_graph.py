"""Whole training steps as one CUDA graph: forward, loss, backward, clipping and the optimizer are one launch.

    python examples/train_in_one_graph.py                                          # uncaptured, anywhere
    python examples/train_in_one_graph.py --graph                                  # on a GPU
    torchrun --nproc-per-node 2 examples/train_in_one_graph.py --graph

The last line is a digest of the parameters: on one kind of device it is the same captured and not, at every degree.
What a graph of a whole step needs is in `run`, at the numbers:

    1   the mode is set while steps run and while the graph is captured: replays have the one of the capture
    2   inputs that stay where they are, written to before each step
    3   an optimizer whose state is on the GPU: capturable=True. A learning rate that changes is a tensor, too
    4   gathers of weights ahead of use inside the graph, from two steps before the capture: it holds whole passes
    5   steps before the capture, on the stream of the capture: they compile, learn the order of weights, and make the
        tables of clip_grad_norm_, which inside the graph neither waits for the GPU nor compares gradients between ranks
    6   gradients are set to None first, so that the graph makes its own
    7   the graph is freed before the process group, which may wait for graphs that hold NCCL's kernels

Memory: the graph keeps the most that one step needs at a time, its gradients too, and parameters and optimizer state
stay outside. What the steps before it have freed is another pool: torch.cuda.empty_cache() before the capture.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tp_invariant as tpi

VOCABULARY = 256


class Block(nn.Module):
    """x + attention, then x + gated MLP; x [B, S, H], whole on every rank."""

    def __init__(self, hidden: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        column = dict(normalization="RMSNorm", bias=False, parallel_mode="column", **options)
        row = dict(bias=False, parallel_mode="row", **options)
        self.qkv, self.out = (
            tpi.LayerNormLinear(hidden, 3 * hidden, partition_stride=3, **column),
            tpi.Linear(hidden, hidden, **row),
        )
        self.up, self.down = (
            tpi.LayerNormLinear(hidden, 4 * hidden, partition_stride=2, **column),
            tpi.Linear(2 * hidden, hidden, **row),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(tpi.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        return x + self.down(tpi.gated_activation(self.up(x)))


class Model(nn.Module):
    """ids [B, S], target [B, S] -> loss."""

    def __init__(self, options: argparse.Namespace, tp_group: Any, **place: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.embedding = tpi.VocabParallelEmbedding(VOCABULARY, options.hidden, tp_group=tp_group, **place)
        sizes = options.hidden, options.heads
        self.blocks = nn.ModuleList(Block(*sizes, tp_group=tp_group, **place) for _ in range(options.layers))
        self.head = tpi.LayerNormLinear(
            options.hidden, VOCABULARY, bias=False, parallel_mode="column", tp_group=tp_group, **place
        )

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return tpi.vocab_parallel_cross_entropy(self.head(x), target, tp_group=self.tp_group)


def run(tp_group: Any, options: argparse.Namespace) -> tuple[list[float], str]:
    """The losses of all steps, and the digest of the parameters after them."""
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    on_gpu = device.type == "cuda"
    if options.graph and not on_gpu:
        raise ValueError(f"--graph needs a GPU, and the device is {device}: leave it out")
    if options.steps <= options.warmup or options.warmup < 2:
        raise ValueError(f"--warmup {options.warmup} of --steps {options.steps}: at least 2, and fewer than all")
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(True):  # 1
        model = Model(options, tp_group, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(1e-3, device=device), capturable=on_gpu)  # 3
        ids = torch.zeros(options.batch, options.length + 1, dtype=torch.int64, device=device)  # 2
        loss = torch.zeros((), device=device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)  # 6
            found = model(ids[:, :-1], ids[:, 1:])
            found.backward()
            tpi.clip_grad_norm_(parameters, 1.0, tp_group=tp_group)
            optimizer.step()
            loss.copy_(found.detach())

        graph, losses = None, []
        stream = torch.cuda.Stream() if on_gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # which may not have written the parameters yet
        ahead, tpi.owners.weight_cache.ahead_in_graphs = tpi.owners.weight_cache.ahead_in_graphs, options.graph  # 4
        try:
            with torch.cuda.stream(stream):
                for number in range(options.steps):
                    generator = torch.Generator().manual_seed(number)
                    ids.copy_(torch.randint(VOCABULARY, ids.shape, generator=generator))
                    if options.graph and number == options.warmup:  # 5
                        torch.cuda.empty_cache()
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph, stream=stream):
                            step()
                    (step if graph is None else graph.replay)()
                    losses.append(loss.item())
        finally:
            tpi.owners.weight_cache.ahead_in_graphs = ahead
        digest = tpi.testing.digest(tpi.testing.full_parameters(model))
    del graph  # 7
    return losses, digest


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--graph", action="store_true", help="capture the step after those of --warmup")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--warmup", type=int, default=3, help="steps before the capture")
    for name, size in dict(steps=8, layers=2, hidden=256, heads=8, batch=2, length=64).items():
        add(f"--{name}", type=int, default=size)
    return parser


def main() -> None:
    options, tp_group = make_parser().parse_args(), None
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        tp_group = dist.group.WORLD
    losses, digest = run(tp_group, options)
    if tp_group is None or dist.get_rank() == 0:
        print(*(f"{loss:.4f}" for loss in losses))
        if options.device == "cuda":
            print(f"at most {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
        print(digest, flush=True)
    if tp_group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
