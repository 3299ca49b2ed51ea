"""The invariant CPU GEMM against torch.mm, both in one run: python benchmarks/bench_cpu_gemm.py

Prints median milliseconds and the ratio torch.mm / ours for each shape. The two are timed alternately, so that whatever
else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from tp_invariant.kernels.gemm.reference import matmul

SHAPES = [(512, 512, 2048), (1024, 1024, 1024), (2048, 512, 512), (64, 4096, 1024), (1, 1024, 1024)]


def seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31, help="timed calls of each, after 3 untimed (default 31)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()], help="thread counts")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, CPU capability "
          f"{torch.backends.cpu.get_cpu_capability()}")  # fmt: skip
    print("| threads | M, N, K | dtype | torch.mm ms | tp_invariant ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for threads in sorted(set(options.threads)):
        torch.set_num_threads(threads)
        for (m, n, k), dtype in [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[0], torch.bfloat16)]:
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            stock, ours = (lambda a=a, b=b: torch.mm(a, b)), (lambda a=a, b=b: matmul(a, b))
            for _ in range(3):
                stock(), ours()
            times = [(seconds(stock), seconds(ours)) for _ in range(options.repeats)]
            stock_ms, ours_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            name = str(dtype).removeprefix("torch.")
            print(f"| {threads} | {m}, {n}, {k} | {name} | {stock_ms:.2f} | {ours_ms:.2f} | {stock_ms / ours_ms:.2f} |")


if __name__ == "__main__":
    main()
