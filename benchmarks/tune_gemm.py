"""Times every tile configuration of the TMA kernel on the shapes of Qwen3-8B's layers and prints the best ones.

    python benchmarks/tune_gemm.py --out tune.json

The rule in kernels/matmul_configs.py was read off its output. Needs a Hopper GPU. Configurations are compiled by
several processes first, since compiling takes longer than timing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import astuple

import torch
import triton

from tp_invariant.kernels.matmul_configs import MatmulConfig
from tp_invariant.kernels.matmul_tma import tma_layouts, tma_matmul

LAYERS = {"qkv": (4096, 6144), "o": (4096, 4096), "fc1": (4096, 24576), "fc2": (12288, 4096)}  # name: (K, N)
LARGE = [
    *(MatmulConfig(128, 256, 64, 8, stages, group, halves)
      for stages, halves in ((3, False), (3, True), (4, True)) for group in (4, 8, 16)),
    *(MatmulConfig(256, 128, 64, 8, stages, group, halves)
      for stages, halves in ((3, False), (4, True)) for group in (4, 8, 16)),
    *(MatmulConfig(128, 128, block_k, warps, stages, 8)
      for block_k, warps, stages in ((64, 8, 4), (64, 4, 4), (128, 8, 3))),
    MatmulConfig(64, 256, 64, 4, 4, 8, True),
    MatmulConfig(128, 64, 64, 4, 5, 8),
]  # fmt: skip
SMALL = [
    MatmulConfig(m, n, k, 4, stages, 8)
    for m in (16, 64, 128)
    for n, k, stages in (
        (16, 256, 6),
        (32, 128, 8),
        (32, 256, 5),
        (64, 128, 6),
        (64, 64, 8),
        (128, 64, 6),
        (128, 128, 3),
    )
]


def operands(layout: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 a [M, K] and b [K, N] standing in memory as forward, dgrad or wgrad of a linear layer have them."""
    place = dict(device="cuda", dtype=torch.bfloat16)
    a = torch.randn(k, m, **place).t() if layout == "wgrad" else torch.randn(m, k, **place)
    b = torch.randn(n, k, **place).t() if layout == "fwd" else torch.randn(k, n, **place)
    return a, b


def large_shapes() -> list[tuple[str, int, int, int]]:
    """(layout, M, N, K) of forward, dgrad and wgrad, of whole layers and of their shards at TP=4."""
    shapes = set()
    for name, (k, n) in LAYERS.items():
        column = name in ("qkv", "fc1")
        for world in (1, 4):
            for tokens in (2048, 8192, 32768):
                k_local, n_local = (k, n // world) if column else (k // world, n)
                shapes |= {("fwd", tokens, n_local, k_local), ("dgrad", tokens, k_local, n_local)}
                shapes.add(("wgrad", n_local, k_local, tokens))
    return sorted(shapes)


def small_shapes() -> list[tuple[str, int, int, int]]:
    """Decoding: few rows, forward."""
    return sorted(("fwd", m, n, k) for m in (1, 4, 16, 32, 64, 128) for k, n in LAYERS.values())


def _run(config: MatmulConfig, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    layouts = tma_layouts(a, b, a.dtype)
    assert layouts is not None
    return tma_matmul(a, b, None, a.dtype, layouts, config)


def _compile(job: tuple[str, MatmulConfig]) -> str | None:
    layout, config = job
    try:
        _run(config, *operands(layout, 512, 512, 512))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: recorded, not timed
        return f"{layout} {config}: {str(error).splitlines()[0]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file for all timings")
    parser.add_argument("--milliseconds", type=int, default=25, help="how long to time each (default 25)")
    parser.add_argument("--seconds", type=float, default=480, help="stop after this long (default 480)")
    parser.add_argument("--workers", type=int, default=12, help="compiling processes (default 12)")
    options = parser.parse_args()
    start = time.monotonic()
    print(f"torch {torch.__version__}, triton {triton.__version__}", flush=True)
    jobs = [(layout, config) for layout in ("fwd", "dgrad", "wgrad") for config in LARGE]
    jobs += [("fwd", config) for config in SMALL]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        failed = [message for message in pool.map(_compile, jobs, chunksize=1) if message]
    print(f"compiled in {time.monotonic() - start:.0f} s; failed: {len(failed)}", *failed, sep="\n", flush=True)
    bad = {message.split(":")[0] for message in failed}
    rows = []
    for layout, m, n, k in small_shapes() + large_shapes():
        if time.monotonic() - start > options.seconds:
            print("out of time", flush=True)
            break
        a, b = operands(layout, m, n, k)

        def median_us(fn) -> float:
            return 1e3 * triton.testing.do_bench(fn, warmup=5, rep=options.milliseconds, return_mode="median")

        stock = median_us(lambda a=a, b=b: torch.matmul(a, b))
        times = []
        for config in SMALL + LARGE[-5:] if m <= 128 else LARGE:
            if f"{layout} {config}" not in bad and (m > 128 or config.block_m <= max(16, 2 * m)):
                times.append((median_us(lambda a=a, b=b, c=config: _run(c, a, b)), astuple(config)))
        times.sort()
        rows.append({"shape": (layout, m, n, k), "cublas_us": stock, "times": times})
        best = times[0]
        print(f"{layout:5} {m:6} {n:6} {k:6} cublas {stock:8.1f} best {best[0]:8.1f} {stock / best[0]:.3f} {best[1]}",
              flush=True)  # fmt: skip
        with open(options.out, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
