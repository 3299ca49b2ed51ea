"""The bundled GEMM against cuBLAS and a pinned-tile baseline, in one run on one GPU.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h200

bf16 forward, dgrad and wgrad of Qwen3-8B's layers and of their shards at TP=4, and decoding, on random data. The
baseline is batch_invariant_ops' published configuration (128 x 128 x 64 tiles, 8 warps, 3 stages, pointer loads). The
three are timed in turn, round after round, so that clocks and heat fall on all. Writes OUT.csv and OUT.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from tune_gemm import large_shapes, operands, small_shapes

from tp_invariant.kernels.matmul import matmul
from tp_invariant.kernels.matmul_configs import MatmulConfig

BASELINE = MatmulConfig(128, 128, 64, 8, 3)


def microseconds(fn: Callable[[], object], milliseconds: int) -> list[float]:
    """20th, 50th and 80th percentile."""
    times = triton.testing.do_bench(fn, warmup=5, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return [1e3 * t for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="path without an ending; .csv and .md are written")
    parser.add_argument("--milliseconds", type=int, default=15, help="for each timing (default 15)")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each (default 3)")
    options = parser.parse_args()
    rows = []
    for layout, m, n, k in large_shapes() + small_shapes():
        a, b = operands(layout, m, n, k)
        runs: dict[str, Callable[[], object]] = {
            "cublas": lambda a=a, b=b: torch.matmul(a, b),
            "tp_invariant": lambda a=a, b=b: matmul(a, b),
            "pinned": lambda a=a, b=b: matmul(a, b, config=BASELINE),
        }
        timed: dict[str, list[list[float]]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, fn in runs.items():
                timed[name].append(microseconds(fn, options.milliseconds))
        row: dict[str, object] = {"layout": layout, "M": m, "N": n, "K": k}
        for name, quantiles in timed.items():
            for label, column in zip(("p20", "us", "p80"), zip(*quantiles, strict=True), strict=True):
                row[f"{name}_{label}"] = round(statistics.median(column), 1)
        row["vs_cublas"] = round(row["cublas_us"] / row["tp_invariant_us"], 3)  # type: ignore[operator]
        row["vs_pinned"] = round(row["pinned_us"] / row["tp_invariant_us"], 3)  # type: ignore[operator]
        rows.append(row)
        print(row, flush=True)
    write(rows, Path(options.out))


def write(rows: list[dict], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)

    def summary(title: str, chosen: list[dict]) -> str:
        parts = []
        for key, name in (("vs_cublas", "cuBLAS"), ("vs_pinned", "pinned tiles")):
            ratios = [row[key] for row in chosen]
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            parts.append(f"{mean:.3f}x {name} (least {min(ratios):.3f})")
        return f"{title}, {len(chosen)} shapes: geometric mean " + ", ".join(parts)

    large, small = ([row for row in rows if (row["M"] > 128) == is_large] for is_large in (True, False))
    header = ["layout", "M", "N", "K", "cublas_us", "tp_invariant_us", "pinned_us", "vs_cublas", "vs_pinned"]
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{datetime.date.today()}; bf16, random data, median of medians; `python {' '.join(sys.argv)}`",
        "",
        summary("Layers", large) + ".  ",
        summary("Decoding", small) + ".",
        "",
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows),
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(*lines[2:4], sep="\n")


if __name__ == "__main__":
    main()
