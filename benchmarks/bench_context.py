"""A layer of a Qwen3-8B under context parallelism, against the same layout in plain torch.

    torchrun --nproc-per-node 4 benchmarks/bench_context.py --tokens 32768 131072 [--tp 2]
    torchrun --nproc-per-node 2 benchmarks/bench_context.py --device cpu --tokens 256      # to see that it runs

32 query heads, 8 key heads of 128, hidden size 4096, 12288 inner features; bf16, one sequence, causal. cp is the number
of ranks over --tp; each rank has a cp-th of the tokens. The layer is that of bench_layer.py, without sequence
parallelism; on this library's side with its gated activation, as parallelize has it in a model. Plain torch: torch's
linear layers (all-reduced over tp), one all-to-all of q, k and v, scaled_dot_product_attention by cuDNN or flash, one
all-to-all of its output. Both sides are timed in turn in one run: after a barrier, the mean of a few calls, of the
slowest rank; medians over the rounds. Forward alone is without gradients; captured is the replay of a CUDA graph.
`attention's backward` is that of the kernels on whole sequences of a rank's heads, without an exchange; `exchanges` are
the four of a step alone. Prints a table.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from bench_layer_contenders import QWEN3_8B, SMALL, Part, fast_attention
from gpu_timing import in_graph
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group, resolve_group
from tp_invariant.functional import context_parallel

Call = Callable[[], Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Exchange = Callable[[Tensor, Group], Tensor]


class AllToAll(torch.autograd.Function):
    """x [cp, ..]: block r goes to rank r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group.process_group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllToAll.forward(ctx, grad, ctx.group), None


def stock_attention(cp: Group) -> Attend:
    """One all-to-all of q, k and v, torch's fastest attention, one all-to-all of its output; of one sequence."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, s, D], k, v; messages [cp, s, heads / cp, D]"""
        blocks = [x[0].transpose(0, 1).unflatten(1, (cp.size, -1)).transpose(0, 1) for x in (q, k, v)]
        counts = [x.shape[2] for x in blocks]
        received = AllToAll.apply(torch.cat(blocks, 2), cp).flatten(0, 1)
        out = fast_attention(*(x.transpose(0, 1)[None] for x in received.split(counts, 1)))
        sent = out[0].transpose(0, 1).unflatten(0, (cp.size, -1))
        return AllToAll.apply(sent, cp).transpose(0, 1).flatten(1, 2).transpose(0, 1)[None]

    return attend


class Layer(Part):
    """With this library's gated activation where the layers are its own."""

    def _mlp(self, x: Tensor) -> Tensor:
        if self.contender == "stock":
            return super()._mlp(x)
        return self._linear("fc2", tpi.gated_activation(self._linear("fc1", x)))


class Attention(Part):
    """The projections and attention alone, without norms."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name in self.local.keys() - {"qkv", "o"}:
            for kept in (self.local, getattr(self, "layers", {name: None})):
                del kept[name]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self._linear("o", self._attend(self._linear("qkv", x)))


def one_time(call: Call, inner: int, device: torch.device) -> float:
    """Milliseconds, of the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(inner):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor((time.perf_counter() - start) / inner * 1e3, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def medians(calls: dict[str, Call], rounds: int, inner: int, device: torch.device) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first compiles
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            times[name].append(one_time(calls[name], inner if turn else 1, device))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def forward_of(layer: nn.Module, x: Tensor) -> Call:
    return torch.no_grad()(lambda: layer(x))


def training_of(layer: nn.Module, x: Tensor, dy: Tensor) -> Call:
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), wanted, dy)


def backward_of(attend: Callable[..., Tensor], qkv: list[Tensor], dout: Tensor) -> Call:
    out = attend(*qkv)
    return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)


def exchanges_of(exchange: Exchange, heads: Sequence[int], own: int, cp: Group, x: Tensor) -> Call:
    """Those of a forward and a backward: [cp, 1, tokens, heads, D] each."""
    sent = [x.new_empty(cp.size, 1, own, n, QWEN3_8B.head_dim).normal_() for n in heads]
    return lambda: [exchange(one, cp) for one in sent]


def compare(
    tokens: int, layers: dict[str, Part], cp: Group, options: argparse.Namespace, device: torch.device
) -> list[str]:
    """Rows of the table."""
    size, sizes = cp.size * options.tp, layers["ours"].sizes
    own = tokens // cp.size
    x, dy = (torch.randn(own, 1, sizes.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    heads = sizes.heads, sizes.kv, sizes.kv, sizes.heads
    shapes = [(1, n // size, tokens, sizes.head_dim) for n in heads]
    qkv_heads = (sizes.heads + 2 * sizes.kv) // size
    *qkv, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    qkv = [x.requires_grad_() for x in qkv]
    attentions = {"torch": fast_attention, "ours": lambda *x: tpi.attention(*x, causal=True)}
    exchange: dict[str, Exchange] = {"torch": AllToAll.apply, "ours": context_parallel._exchange}
    of_kind: dict[str, Callable[[str], Call]] = {
        "forward": lambda name: forward_of(layers[name], x),
        "forward and backward": lambda name: training_of(layers[name], x, dy),
        "attention's backward": lambda name: backward_of(attentions[name], qkv, dout),
        "exchanges": lambda name: exchanges_of(exchange[name], (qkv_heads, sizes.heads // size) * 2, own, cp, x),
    }
    rows = []
    for kind, make in of_kind.items():
        calls = {name: make(name) for name in layers}
        timed = {kind: calls}
        if device.type == "cuda" and "attention" not in kind:
            timed[f"{kind}, captured"] = {name: in_graph([call]) for name, call in calls.items()}
        for what, these in timed.items():
            found = medians(these, options.rounds, options.inner, device)
            ratio = found["ours"] / found["torch"]
            rows.append(f"| {tokens} | {what} | {found['torch']:.2f} | {found['ours']:.2f} | {ratio:.2f} |")
        del calls, timed
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--part", choices=("layer", "attention"), default="layer", help="attention: with projections")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inner", type=int, default=2, help="calls in a row for one time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % options.tp or QWEN3_8B.kv % ranks:
        parser.error(f"--tp {options.tp} with {ranks} ranks: it must divide them, and they the {QWEN3_8B.kv} key heads")
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(options.device, (ranks // options.tp, options.tp), mesh_dim_names=("cp", "tp"))
    cp, tp = (resolve_group(mesh.get_group(name)) for name in ("cp", "tp"))
    torch.manual_seed(0)
    tpi.set_tp_invariant_mode(True)
    sizes = QWEN3_8B if options.device == "cuda" else SMALL
    weights = sizes.weights(dict(device=device, dtype=torch.bfloat16))
    attentions = {"torch": stock_attention(cp), "ours": lambda *x: tpi.attention(*x, causal=True, cp_group=cp)}
    kind = Attention if options.part == "attention" else Layer
    contenders = {"torch": "stock", "ours": "tp_invariant"}
    layers = {
        name: kind("layer", contender, sizes, tp, False, weights, attentions[name])
        for name, contender in contenders.items()
    }
    torch.manual_seed(cp.rank)
    rows = [row for tokens in options.tokens for row in compare(tokens, layers, cp, options, device)]
    if rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(
            f"{where}, torch {torch.__version__}, {datetime.date.today()}: CP {cp.size} x TP {tp.size}, milliseconds\n"
        )
        print("| tokens | what | plain torch | tp_invariant | ratio |\n| --- | --- | --- | --- | --- |")
        print("\n".join(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
