"""Times the TMA kernel's configurations on the shapes of Qwen3-8B's layers and writes kernels/gemm/matmul_table.py.

    python benchmarks/tune_gemm.py --out tune.json --table kernels/gemm/matmul_table.py
    python benchmarks/tune_gemm.py --out tune.json --table kernels/gemm/matmul_table.py --lacking

The second times only the shapes that the table lacks, and leaves the rest of it. Needs a Hopper GPU. Configurations are
compiled by several processes first, since compiling takes longer than timing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import astuple
from pathlib import Path

import torch
import triton

from tp_invariant.kernels.gemm import matmul_table
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig, fits_tma
from tp_invariant.kernels.gemm.matmul_tma import tma_matmul, tma_operands

FEW = (16, 32, 64, 128)  # rows of decoding that are timed; the table takes the next of them
ROUNDS = 4  # timings of each configuration
LAYERS = {"qkv": (4096, 6144), "o": (4096, 4096), "fc1": (4096, 24576), "fc2": (12288, 4096)}  # name: (K, N)
LARGE = [
    *(MatmulConfig(128, 256, 64, 8, stages, group, halves)
      for stages, halves in ((3, False), (4, True)) for group in (4, 8, 16, 24)),
    *(MatmulConfig(128, 256, 64, 8, 3, group, True) for group in (8, 16)),  # the one of these with room for fp32 output
    *(MatmulConfig(256, 128, 64, 8, stages, group, halves) for stages, halves, group in ((3, False, 8), (4, True, 16))),
    *(MatmulConfig(128, 192, 64, 8, stages, group, True) for stages, group in ((4, 4), (4, 8), (5, 8), (4, 16))),
    MatmulConfig(128, 128, 64, 4, 4, 8),
    MatmulConfig(128, 128, 64, 4, 4, 16),
    MatmulConfig(128, 128, 64, 8, 5, 8),
    MatmulConfig(128, 128, 128, 4, 3, 8, True),
    MatmulConfig(128, 96, 128, 4, 3, 8, True),
    MatmulConfig(64, 256, 64, 4, 4, 8, True),
    MatmulConfig(64, 256, 64, 4, 5, 8, True),
]  # fmt: skip
SMALL = [
    config
    for m, n, k, warps, stages in (
        (16, 16, 256, 4, 6), (16, 32, 128, 4, 8), (16, 32, 256, 4, 5), (16, 64, 128, 4, 6), (16, 64, 256, 4, 3),
        (16, 128, 64, 4, 6), (16, 192, 128, 4, 3),
        (32, 16, 256, 4, 6), (32, 32, 256, 4, 5), (32, 64, 128, 4, 6), (32, 64, 256, 4, 4), (32, 192, 128, 4, 3),
        (64, 32, 128, 4, 8), (64, 32, 256, 4, 4), (64, 48, 128, 4, 6), (64, 64, 128, 4, 6), (64, 64, 256, 4, 3),
        (64, 128, 64, 4, 6), (64, 192, 128, 4, 3),
        (128, 32, 128, 4, 5), (128, 48, 128, 4, 4), (128, 48, 128, 8, 4), (128, 64, 128, 4, 4), (128, 64, 128, 8, 4),
        (128, 128, 64, 4, 6), (128, 128, 128, 8, 3), (128, 192, 64, 8, 5), (128, 192, 64, 8, 4),
        # for few columns, where a tile's walk over K is all the time: fewer warps, that wait less for each other
        (16, 16, 256, 1, 6), (16, 16, 256, 2, 6), (16, 16, 512, 2, 3), (16, 16, 512, 4, 3), (16, 32, 256, 2, 5),
        (32, 16, 256, 2, 6), (32, 16, 512, 2, 3), (64, 16, 256, 4, 5), (64, 16, 512, 4, 2), (128, 16, 256, 4, 2),
    )
    if fits_tma(config := MatmulConfig(m, n, k, warps, stages, 8, n % 3 == 0), 2)
]  # fmt: skip


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


def owned_shapes() -> list[tuple[str, int, int, int]]:
    """What a rank computes of the products whose K is sharded, where it owns rows: forward and dgrad."""
    shapes = set()
    for name, (k, n) in LAYERS.items():
        for rows in {tokens // world for tokens in (2048, 8192) for world in (2, 4, 8)}:
            shapes.add(("dgrad", rows, k, n) if name in ("qkv", "fc1") else ("fwd", rows, n, k))
    return sorted(shapes)


def small_shapes() -> list[tuple[str, int, int, int]]:
    """Decoding: few rows, forward; of whole layers and, in either kind of layer, of a rank's columns."""
    return sorted(("fwd", m, n // world, k) for m in FEW for k, n in LAYERS.values() for world in (1, 2, 4, 8))


def _run(config: MatmulConfig, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    accepted = tma_operands(a, b, a.dtype)
    assert accepted is not None
    return tma_matmul(accepted, None, a.dtype, config)


def _compile(job: tuple[str, MatmulConfig]) -> str | None:
    layout, config = job
    try:
        _run(config, *operands(layout, 512, 512, 512))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: recorded, not timed
        return f"{layout} {config}: {str(error).splitlines()[0]}"
    return None


def fit(rows: list[dict], layout: str) -> list[tuple[tuple, float, float]]:
    """(configuration, fixed_us, us_per_k) of a round of tiles, by least squares of the relative error."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    points: dict[tuple, list[tuple[float, float, float]]] = {}
    for row in rows:
        row_layout, m, n, k = row["shape"]
        if layout == ("few rows" if m <= FEW[-1] else row_layout):
            for us, config in row["times"]:
                tiles = triton.cdiv(m, config[0]) * triton.cdiv(n, config[1])
                points.setdefault(tuple(config), []).append((triton.cdiv(tiles, multiprocessors), k, us))
    entries = []
    for config, seen in points.items():
        rounds, ks, us = (torch.tensor(column, dtype=torch.float64) for column in zip(*seen, strict=True))
        design = torch.stack([rounds / us, rounds * ks / us], dim=1)
        fixed, per_k = torch.linalg.lstsq(design, torch.ones(len(seen), 1, dtype=torch.float64)).solution.flatten()
        entries.append((config, round(max(fixed.item(), 0.0), 3), round(per_k.item(), 6)))
    return sorted(entries)


def write_table(rows: list[dict], path: Path, rounds: dict, measured: dict) -> None:
    """kernels/gemm/matmul_table.py: the best configuration of each shape, and for other shapes what a round takes.

    rounds, measured: of the table before that stay; rounds are fitted anew if there are none.
    """
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    lines = [
        f'"""What benchmarks/tune_gemm.py measured on {torch.cuda.get_device_name()} (sm90), bf16, torch',
        f"{torch.__version__}, triton {triton.__version__}: generated, do not edit. Sets speed, never bits.",
        "",
        "A configuration is (block_m, block_n, block_k, num_warps, num_stages, group_m, halves).",
        '"""',
        "",
        "Fields = tuple[int, int, int, int, int, int, bool]",
        f"MEASURED_MULTIPROCESSORS = {multiprocessors}",
        f"FEW = {FEW}  # up to so many rows a product is bound by reading b; those that were measured",
        'LAYOUTS = {(False, True): "fwd", (False, False): "dgrad", (True, False): "wgrad", (True, True): "wgrad"}',
        "",
        "# layout: (configuration, microseconds of a round of tiles, microseconds more for each k)",
        "ROUNDS: dict[str, tuple[tuple[Fields, float, float], ...]] = {",
    ]
    for layout in ("few rows", "fwd", "dgrad", "wgrad"):
        lines += [f'    "{layout}": (', *(f"        {e}," for e in rounds.get(layout) or fit(rows, layout)), "    ),"]
    lines += ["}", "", "# (layout, M, N, K): the fastest configuration", "MEASURED: dict[tuple, Fields] = {"]
    best = measured | {tuple(row["shape"]): tuple(row["times"][0][1]) for row in rows}
    lines += [f"    {shape}: {config},".replace("'", '"') for shape, config in best.items()]
    path.write_text("\n".join([*lines, "}"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="JSON file for all timings")
    parser.add_argument("--table", type=Path, required=True, help="the table to write")
    parser.add_argument("--milliseconds", type=int, default=20, help="how long to time each (default 20)")
    parser.add_argument("--seconds", type=float, default=480, help="stop after this long (default 480)")
    parser.add_argument("--lacking", action="store_true", help="time only shapes that the table lacks")
    parser.add_argument("--workers", type=int, default=14, help="compiling processes (default 14)")
    options = parser.parse_args()
    start = time.monotonic()
    print(f"torch {torch.__version__}, triton {triton.__version__}", flush=True)
    large = [config for config in LARGE if fits_tma(config, 2)]
    jobs = [(layout, config) for layout in ("fwd", "dgrad", "wgrad") for config in large]
    jobs += [("fwd", config) for config in SMALL]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        failed = [message for message in pool.map(_compile, jobs, chunksize=1) if message]
    print(f"compiled in {time.monotonic() - start:.0f} s; failed: {len(failed)}", *failed, sep="\n", flush=True)
    bad = {message.split(":")[0] for message in failed}
    rows: list[dict] = []
    rounds, measured = (matmul_table.ROUNDS, matmul_table.MEASURED) if options.lacking else ({}, {})
    shapes = [s for s in dict.fromkeys(small_shapes() + large_shapes() + owned_shapes()) if s not in measured]
    for layout, m, n, k in shapes:
        if time.monotonic() - start > options.seconds:
            print("out of time", flush=True)
            break
        a, b = operands(layout, m, n, k)

        def median_us(fn) -> float:
            rep = options.milliseconds / ROUNDS
            return 1e3 * triton.testing.do_bench(fn, warmup=2, rep=rep, return_mode="median")

        chosen = [
            config
            for config in (SMALL if m <= FEW[-1] else large)
            if f"{layout} {config}" not in bad and (m > FEW[-1] or config.block_m <= max(64, 2 * m))
        ]
        timed: dict[MatmulConfig | None, list[float]] = {config: [] for config in (None, *chosen)}
        for turn in range(ROUNDS):
            # in turn, forwards and backwards, so that clocks and heat fall on all alike
            for config in list(timed)[:: -1 if turn % 2 else 1]:
                timed[config].append(
                    median_us(lambda a=a, b=b, c=config: torch.matmul(a, b) if c is None else _run(c, a, b))
                )
        stock = statistics.median(timed.pop(None))
        times = sorted((statistics.median(us), astuple(config)) for config, us in timed.items() if config)
        rows.append({"shape": (layout, m, n, k), "cublas_us": stock, "times": times})
        best = times[0]
        print(f"{layout:5} {m:6} {n:6} {k:6} cublas {stock:8.1f} best {best[0]:8.1f} {stock / best[0]:.3f} {best[1]}",
              flush=True)  # fmt: skip
        with open(options.out, "w") as file:
            json.dump(rows, file)
        write_table(rows, options.table, rounds, measured)


if __name__ == "__main__":
    main()
