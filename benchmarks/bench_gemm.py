"""The bundled GEMM against cuBLAS and a pinned-tile baseline, in one run on one GPU.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h200

bf16 forward, dgrad and wgrad of Qwen3-8B's layers and of their shards at TP=4, and decoding, on random data. The
baseline is batch_invariant_ops' published configuration (128 x 128 x 64 tiles, 8 warps, 3 stages, pointer loads). The
three are timed in turn, round after round, so that clocks and heat fall on all. Also: what reading rank-major buffers
in place costs over the laid-out form, the host's time for a call, and the error against float64. Writes OUT.csv and
OUT.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from einops import rearrange
from tune_gemm import large_shapes, operands, small_shapes

from tp_invariant.kernels.matmul import matmul, matmul_rank_major
from tp_invariant.kernels.matmul_configs import MatmulConfig

BASELINE = MatmulConfig(128, 128, 64, 8, 3)
IN_PLACE = [  # M, N, K, P, partition_stride, k_dim of B: forward of O and FC2, dgrad of QKV and gated FC1, TP=4
    (2048, 4096, 4096, 4, 1, 1),
    (2048, 4096, 12288, 4, 1, 1),
    (8192, 4096, 12288, 4, 1, 1),
    (2048, 4096, 6144, 4, 1, 0),
    (2048, 4096, 24576, 4, 2, 0),
    (8192, 4096, 24576, 4, 2, 0),
]
ERRORS = [
    ("fwd", 2048, 4096, 4096),
    ("fwd", 2048, 4096, 12288),
    ("dgrad", 2048, 4096, 24576),
    ("wgrad", 4096, 4096, 8192),
]


def microseconds(fn: Callable[[], object], milliseconds: int) -> list[float]:
    """20th, 50th and 80th percentile."""
    times = triton.testing.do_bench(fn, warmup=5, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return [1e3 * t for t in times]


def in_place_row(m: int, n: int, k: int, world: int, stride: int, b_k_dim: int, options: argparse.Namespace) -> str:
    """One row of the table of rank-major buffers."""
    a, b = operands("fwd" if b_k_dim == 1 else "dgrad", m, n, k)
    pattern = "row (stride rank k) -> rank row (stride k)"
    a_shards = rearrange(a, pattern, stride=stride, rank=world).contiguous()
    b_shards = rearrange(b.t(), pattern, stride=stride, rank=world)
    b_shards = (b_shards if b_k_dim == 1 else b_shards.transpose(1, 2)).contiguous()
    timed: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        timed[0].append(microseconds(lambda: matmul(a, b), options.milliseconds)[1])
        fn = lambda: matmul_rank_major(a_shards, b_shards, b_k_dim=b_k_dim, stride=stride)  # noqa: E731
        timed[1].append(microseconds(fn, options.milliseconds)[1])
    laid_out, in_place = map(statistics.median, timed)
    shape = f"| {m} | {n} | {k} | {world} | {stride} | {'[P, N, K/P]' if b_k_dim == 1 else '[P, K/P, N]'} "
    return f"{shape}| {laid_out:.1f} | {in_place:.1f} | {in_place / laid_out:.3f} |"


def host_microseconds(fn: Callable[[], object], calls: int = 500) -> float:
    """The host's time for a call, without waiting for the GPU: the median of 7 loops."""
    loops = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        loops.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(loops[1:])


def error_row(layout: str, m: int, n: int, k: int) -> str:
    """Norm-wise relative error against float64: ours and torch's."""
    a, b = operands(layout, m, n, k)
    exact = a.double() @ b.double()
    cells = []
    for out_dtype in (torch.bfloat16, torch.float32):
        ours = matmul(a, b, out_dtype=out_dtype)
        theirs = torch.mm(a, b, out_dtype=out_dtype) if out_dtype != a.dtype else a @ b
        cells += [f"{float((c.double() - exact).norm() / exact.norm()):.3g}" for c in (ours, theirs)]
    return f"| {layout} | {m} | {n} | {k} | " + " | ".join(cells) + " |"


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
    extra = [
        "Operands gathered from P ranks, read in place, against the laid-out form:",
        "",
        "| M | N | K | P | stride | B | laid out, us | in place, us | ratio |",
        "|" + " --- |" * 9,
        *(in_place_row(*case, options) for case in IN_PLACE),
    ]
    a, b = operands("fwd", 64, 256, 256)
    ours, theirs = host_microseconds(lambda: matmul(a, b)), host_microseconds(lambda: torch.matmul(a, b))
    extra += ["", f"Host time of a call: {ours:.1f} us, torch.matmul {theirs:.1f} us."]
    extra += [
        "",
        "Norm-wise relative error against float64:",
        "",
        "| layout | M | N | K | bf16 output | torch | fp32 output | torch |",
        "|" + " --- |" * 8,
        *(error_row(*shape) for shape in ERRORS),
    ]
    write(rows, extra, Path(options.out))


def write(rows: list[dict], extra: list[str], out: Path) -> None:
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
        "",
        *extra,
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(*lines[2:4], sep="\n")


if __name__ == "__main__":
    main()
