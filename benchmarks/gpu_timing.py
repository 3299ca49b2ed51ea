"""The GPU's time for calls, measured in turn."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

_CYCLES_PER_US = 2000  # of a GPU at its highest clock: a sleep is never shorter than asked for
_LONGEST_LAUNCH_US = 2000
Run = Callable[[], object]


@functools.cache
def _flushed() -> torch.Tensor:
    """Zeroing this memory leaves nothing of the operands in the L2 cache."""
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def gpu_microseconds(run: Run, calls: int) -> list[float]:
    """Of each of so many calls, between CUDA events, with an empty L2 cache.

    The GPU sleeps for as long as the host takes to launch a call, so that no kernel waits for the host: what is timed
    is the GPU's work, whatever the host's speed.
    """
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    host_us = min(_LONGEST_LAUNCH_US, 1e6 * (time.perf_counter() - start))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for before, after in events:
        _flushed().zero_()
        torch.cuda._sleep(int((50 + 1.5 * host_us) * _CYCLES_PER_US))
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in events]


def in_turn(
    runs: dict[str, Run], seconds: float, microseconds: Callable[[Run, int], list[float]] = gpu_microseconds
) -> dict[str, float]:
    """The median of each one's microseconds, in about so many seconds and at least four calls of each.

    Forwards and backwards in turn, since what comes after a product that heats the chip more runs at a lower clock.
    """
    for run in runs.values():
        run()  # compiles
    first = {name: statistics.median(microseconds(run, 2)) for name, run in runs.items()}
    calls = {name: max(1, min(20, int(5e3 / max(us, 1)))) for name, us in first.items()}
    # a call also clears the cache, and waits for the host
    round_us = sum((calls[name] + 1) * (us + 250) for name, us in first.items())
    turns = max(4, min(12, 2 * int(seconds * 1e6 / round_us / 2)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            times[name] += microseconds(runs[name], calls[name])
    return {name: statistics.median(found) for name, found in times.items()}


def in_graph(runs: list[Run]) -> Run:
    """Their work on the GPU, replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in 3 * runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay
