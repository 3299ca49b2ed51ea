"""How bench_layer.py runs a contender: its calls, times in turn, peak memory, bytes moved, and its bits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bench_layer_stock as stock
import torch
import torch.distributed as dist
from bench_layer_contenders import Stack, as_contender, part_of_rank
from torch import Tensor

from tp_invariant import graphs
from tp_invariant.comm import collectives, peer_copies, peer_kernels, peer_memory
from tp_invariant.comm.collectives import Group
from tp_invariant.gemm.weights import weight_cache

Call = Callable[[], Any]


def forward_call(part: Stack, x: Tensor) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return part(x)

    return call


def training_call(part: Stack, x: Tensor, dy: Tensor) -> Call:
    wanted = [x, *part.local.values()]

    def call() -> tuple[Tensor, ...]:
        y = part(x)
        return y.detach(), *torch.autograd.grad(y, wanted, dy)

    return call


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _one_time(call: Call, inner: int, device: torch.device, group: Group) -> float:
    """Microseconds of a call, the mean of `inner` in a row after a barrier."""
    if group.size > 1:
        dist.barrier(group.process_group)
    synchronize(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(inner):
            call()
        return 1e6 * (time.perf_counter() - start) / inner
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(inner):
        call()
    last.record()
    torch.cuda.synchronize()
    return 1e3 * first.elapsed_time(last) / inner


def times(
    calls: dict[str, Call], keep: int, rounds: int, inner: int, device: torch.device, group: Group
) -> dict[str, list[float]]:
    """20th, 50th and 80th percentile of each contender's time, this rank's; timed in turn, round after round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            with as_contender(name, keep):
                call()  # the settings are others than in the last turn: find the place again
                taken_us = _one_time(call, inner, device, group)
            if turn:
                taken[name].append(taken_us)
    return {
        name: [sorted(values)[int(q * (len(values) - 1))] for q in (0.2, 0.5, 0.8)] for name, values in taken.items()
    }


def slowest(values: list[float], device: torch.device, group: Group) -> list[float]:
    """The largest over the ranks."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    if group.size > 1:
        dist.all_reduce(own, dist.ReduceOp.MAX, group=group.process_group)
    return own.tolist()


@contextmanager
def _counting() -> Iterator[Callable[[], tuple[int, int]]]:
    """Bytes that this rank receives from others, counted from the shapes of what is moved; those by copy engine."""
    gather, exchange, total = collectives.start_all_gather, collectives.start_all_to_all, 0
    copy, copied, move = peer_copies.PeerCopies.start, 0, peer_kernels.PeerKernels.move

    def counted_gather(out: Tensor, local: Tensor, group: Any) -> Any:
        nonlocal total
        total += out.nbytes - local.nbytes
        return gather(out, local, group)

    def counted_exchange(out: Tensor, x: Tensor, received: Any, sent: Any, group: Any, **options: Any) -> Any:
        nonlocal total
        sizes = received or [1] * group.size
        total += out.nbytes * (sum(sizes) - sizes[group.rank]) // max(sum(sizes), 1)
        return exchange(out, x, received, sent, group, **options)

    def counted_copy(copies: Any, source: Any, sent: Any, early: bool) -> Any:
        nonlocal copied
        lease = copy(copies, source, sent, early)
        if lease is not None:
            copied += (copies.machine.size - 1) * sent[copies.machine.rank][1]
        return lease

    def counted_move(kernels: Any, x: Tensor, shape: Any, row: int, blocks: int, side_by_side: bool) -> Any:
        nonlocal total
        total += (kernels.size - 1) * x.nbytes // blocks
        return move(kernels, x, shape, row, blocks, side_by_side)

    collectives.start_all_gather, collectives.start_all_to_all = counted_gather, counted_exchange
    peer_copies.PeerCopies.start, peer_kernels.PeerKernels.move = counted_copy, counted_move
    stock.moved = 0
    try:
        yield lambda: (total + copied + stock.moved, copied)
    finally:
        collectives.start_all_gather, collectives.start_all_to_all = gather, exchange
        peer_copies.PeerCopies.start, peer_kernels.PeerKernels.move = copy, move


def cost(name: str, call: Call, keep: int, device: torch.device) -> tuple[float, float, float]:
    """MB that a call has allocated at most beyond its operands and lent buffers, MB that it receives, MB of them by
    copy engine; when it is warm."""
    with as_contender(name, keep):
        call()
        call()
        synchronize(device)
        gc.collect()
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with _counting() as moved:
            call()
            synchronize(device)
            peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
            return peak / 1e6, moved()[0] / 1e6, moved()[1] / 1e6


def lent_buffers(group: Group, device: torch.device) -> str:
    """What this rank's copies have taken so far, outside torch's allocator, in words; "" where there are none."""
    if peer_memory.transport() == "nccl" or group.size == 1 or device.type != "cuda":
        return ""
    copies = peer_copies.copies_of(group, device)
    if isinstance(copies, str):
        return ""
    graphs = 0 if copies.captured is None else copies.captured.allocated
    return (
        f"TP={group.size}: buffers that copies land in took {copies.allocated / 1e6:.0f} MB a rank in the end, "
        f"those for CUDA graphs {graphs / 1e6:.0f} MB: for all parts and sizes above, for any number of layers.\n"
    )


def own_part(reference: Any, names: list[str], group: Group, sp: bool) -> list[Tensor]:
    """This rank's part of what TP=1 computed: y or (y, dx, a gradient for each of `names`)."""
    results = [reference] if isinstance(reference, Tensor) else list(reference)

    def tokens(t: Tensor) -> Tensor:
        return t.chunk(group.size)[group.rank] if sp else t

    grads = zip(names, results[2:], strict=bool(results[2:]))
    parts = [part_of_rank(name.rpartition(".")[2], grad, group) for name, grad in grads]
    return [*map(tokens, results[:2]), *parts]


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def same_bits(
    name: str, call: Call, want: list[Tensor], keep: int, device: torch.device, group: Group, busy: bool
) -> bool:
    """Whether every result of every rank is what TP=1 computed, byte for byte; `busy`: beside other work on the GPU."""
    load = torch.randn(4096, 4096, device=device) if busy else None
    side = torch.cuda.Stream() if busy else None
    with as_contender(name, keep):
        for _ in range(2):  # the second time with what was started ahead
            if side is not None and load is not None:
                with torch.cuda.stream(side):
                    for _ in range(30):
                        load @ load
            got = call()
    synchronize(device)
    results = [got] if isinstance(got, Tensor) else list(got)
    equal = all(torch.equal(_bytes(g), _bytes(w)) for g, w in zip(results, want, strict=True))
    return slowest([0.0 if equal else 1.0], device, group)[0] == 0.0


def in_graph(call: Call) -> Call:
    """The call captured in a CUDA graph; for calls that have run before, on the stream that is current now."""
    synchronize(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        result = call()

    def replay(keeps: Call = call) -> Any:  # the weights that the graph reads
        graph.replay()
        return result

    return replay


_graphed: list[graphs.GraphedLayers] = []


def graph_layers(stack: Stack, call: Call) -> Call:
    """The call with each layer's forward and backward a CUDA graph, until `forget`."""
    _graphed.append(graphs.graph_layers(stack.parts, call))
    return call


def forget() -> None:
    """Drops what the library keeps between calls, and graphs: NCCL's communicators end after those that hold them."""
    while _graphed:
        _graphed.pop().remove()
    weight_cache.clear()
    gc.collect()
