"""The bundled GEMM against cuBLAS and a pinned-tile baseline, in one run on one GPU.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h100
    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h100 --wgrad
    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h100 --plot
    python benchmarks/bench_gemm.py --random 150 --seed 1 [--few-rows] --seconds 150 --json FILE

bf16 forward, dgrad and wgrad of Qwen3-8B's layers and of their shards at TP=4, and decoding, on random data. The
baseline is batch_invariant_ops' published configuration (128 x 128 x 64 tiles, 8 warps, 3 stages, pointer loads). The
three are timed in turn, round after round, so that clocks and heat fall on all. Also: what reading rank-major buffers
in place costs over the laid-out form, the host's time for a call, and the error against float64. Writes OUT.csv and
OUT.md.

--wgrad: weight gradients in fp32 instead, as they go into main_grad: written, added to what is there (cuBLAS: torch.mm
with fp32 output, then add_), and with the accumulator promoted. Writes OUT_wgrad.csv and OUT_wgrad.md.
--plot: draws OUT.png from OUT.csv; needs no GPU.
--random: shapes that are drawn (random_gemm.py) against cuBLAS; --help has their ranges.
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

import random_gemm
import torch
import triton
from einops import rearrange
from random_shapes import add_options, check_options
from tune_gemm import operands

from tp_invariant.kernels.gemm.matmul import matmul, matmul_rank_major
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig

LAYERS = {"qkv": (4096, 6144), "o": (4096, 4096), "fc1": (4096, 24576), "fc2": (12288, 4096)}  # name: (K, N)
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


def decoding() -> list[tuple[str, int, int, int]]:
    return sorted(("fwd", m, n, k) for m in (1, 4, 16, 32, 64, 128) for k, n in LAYERS.values())


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
    times = timed_in_turn(
        {
            "laid_out": lambda: matmul(a, b),
            "in_place": lambda: matmul_rank_major(a_shards, b_shards, b_k_dim=b_k_dim, stride=stride),
        },
        options,
    )
    laid_out, in_place = float(times["laid_out_us"]), float(times["in_place_us"])
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


def timed_in_turn(runs: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, float | int | str]:
    """Medians over the rounds of each one's percentiles, as columns of a row.

    Forwards and backwards in turn, since what comes after a product that heats the chip more runs at a lower clock.
    """
    timed: dict[str, list[list[float]]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            timed[name].append(microseconds(runs[name], options.milliseconds))
    columns: dict[str, float | int | str] = {}
    for name, quantiles in timed.items():
        for label, column in zip(("p20", "us", "p80"), zip(*quantiles, strict=True), strict=True):
            columns[f"{name}_{label}"] = round(statistics.median(column), 1)
    return columns


def wgrad_row(m: int, n: int, k: int, options: argparse.Namespace) -> dict:
    """The weight gradient [m, n] of k tokens with fp32 output; ratios are of speed, above 1 where ours is faster."""
    a, b = operands("wgrad", m, n, k)
    fp32, main_grad = torch.float32, torch.zeros(m, n, device="cuda")
    times = timed_in_turn(
        {
            "cublas": lambda: torch.mm(a, b, out_dtype=fp32),
            "written": lambda: matmul(a, b, out_dtype=fp32),
            "promoted_2048": lambda: matmul(a, b, out_dtype=fp32, promote_every=2048),
            "promoted_512": lambda: matmul(a, b, out_dtype=fp32, promote_every=512),
            "cublas_add": lambda: main_grad.add_(torch.mm(a, b, out_dtype=fp32)),
            "added": lambda: matmul(a, b, out=main_grad, accumulate=True),
            "added_promoted_512": lambda: matmul(a, b, out=main_grad, accumulate=True, promote_every=512),
        },
        options,
    )
    row: dict = {"layout": "wgrad", "M": m, "N": n, "K": k, **times}
    for name in ("written", "promoted_2048", "promoted_512", "added", "added_promoted_512"):
        base = "cublas_add" if name.startswith("added") else "cublas"
        row[f"{name}_vs_{base}"] = round(times[f"{base}_us"] / times[f"{name}_us"], 3)  # type: ignore[operator]
    exact = a.double() @ b.double()
    for name, promote_every in (("one accumulator", None), ("promoted_2048", 2048), ("promoted_512", 512)):
        c = matmul(a, b, out_dtype=fp32, promote_every=promote_every)
        row[f"error {name}"] = f"{float((c - exact).norm() / exact.norm()):.3g}"
    row["error cublas"] = f"{float((torch.mm(a, b, out_dtype=fp32) - exact).norm() / exact.norm()):.3g}"
    return row


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def write_wgrad(rows: list[dict], out: Path) -> None:
    ratios = [name for name in rows[0] if "_vs_" in name]
    header = ["M", "N", "K", "cublas_us", "cublas_add_us", *ratios, *(name for name in rows[0] if "error" in name)]
    means = [f"{name} {geometric_mean([row[name] for row in rows]):.3f}" for name in ratios]
    write_files(rows, header, [f"{len(rows)} shapes, geometric means: " + ", ".join(means) + "."], [], out)


def plot(out: Path) -> None:
    """Speed against cuBLAS and against pinned tiles, one point for each shape, from OUT.csv."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    with open(out.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {
        "forward": [row for row in rows if row["layout"] == "fwd" and int(row["M"]) > 128],
        "dgrad": [row for row in rows if row["layout"] == "dgrad"],
        "wgrad": [row for row in rows if row["layout"] == "wgrad"],
        "decoding (M up to 128)": [row for row in rows if row["layout"] == "fwd" and int(row["M"]) <= 128],
    }
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (key, name) in zip(
        figure.subplots(1, 2), (("vs_cublas", "cuBLAS"), ("vs_pinned", "pinned 128 x 128 x 64 tiles")), strict=True
    ):
        for (kind, chosen), marker in zip(kinds.items(), "os^x", strict=True):
            flops = [2 * int(row["M"]) * int(row["N"]) * int(row["K"]) for row in chosen]
            axes.scatter(flops, [float(row[key]) for row in chosen], s=18, marker=marker, label=kind, alpha=0.8)
        axes.axhline(1.0, color="0.4", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("operations of the product")
        axes.set_title(f"speed against {name}", fontsize=10)
        axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(out.with_suffix(".png"), dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="path without an ending; .csv and .md are written")
    parser.add_argument("--milliseconds", type=int, default=15, help="for each timing (default 15)")
    parser.add_argument("--rounds", type=int, default=4, help="timings of each (default 4)")
    parser.add_argument("--wgrad", action="store_true", help="weight gradients in fp32 alone; see above")
    parser.add_argument("--plot", action="store_true", help="draw OUT.png from OUT.csv, and nothing else")
    add_options(parser, random_gemm.RANGES)
    parser.add_argument("--few-rows", action="store_true", help="with --random: few rows, in a CUDA graph")
    options = parser.parse_args()
    check_options(parser, options)
    if options.random is not None:
        sys.exit(random_gemm.main(options))
    out = Path(options.out)
    if options.plot:
        return plot(out)
    if options.wgrad:
        shapes = [shape[1:] for shape in large_shapes() if shape[0] == "wgrad"]
        rows = []
        for shape in shapes:
            rows.append(wgrad_row(*shape, options))
            print(rows[-1], flush=True)
        return write_wgrad(rows, out.with_name(out.name + "_wgrad"))
    rows = []
    for layout, m, n, k in large_shapes() + decoding():
        a, b = operands(layout, m, n, k)
        runs: dict[str, Callable[[], object]] = {
            "cublas": lambda a=a, b=b: torch.matmul(a, b),
            "tp_invariant": lambda a=a, b=b: matmul(a, b),
            "pinned": lambda a=a, b=b: matmul(a, b, config=BASELINE),
        }
        row = {"layout": layout, "M": m, "N": n, "K": k, **timed_in_turn(runs, options)}
        row["vs_cublas"] = round(row["cublas_us"] / row["tp_invariant_us"], 3)
        row["vs_pinned"] = round(row["pinned_us"] / row["tp_invariant_us"], 3)
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
    write(rows, extra, out)


def write(rows: list[dict], extra: list[str], out: Path) -> None:
    def summary(title: str, chosen: list[dict]) -> str:
        parts = []
        for key, name in (("vs_cublas", "cuBLAS"), ("vs_pinned", "pinned tiles")):
            ratios = [row[key] for row in chosen]
            parts.append(f"{geometric_mean(ratios):.3f}x {name} (least {min(ratios):.3f})")
        return f"{title}, {len(chosen)} shapes: geometric mean " + ", ".join(parts)

    large, small = ([row for row in rows if (row["M"] > 128) == is_large] for is_large in (True, False))
    header = ["layout", "M", "N", "K", "cublas_us", "tp_invariant_us", "pinned_us", "vs_cublas", "vs_pinned"]
    summaries = [summary("Layers", large) + ".  ", summary("Decoding", small) + "."]
    write_files(rows, header, summaries, extra, out)


def write_files(rows: list[dict], header: list[str], summaries: list[str], extra: list[str], out: Path) -> None:
    """OUT.csv with all columns, OUT.md with those of `header`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{datetime.date.today()}; bf16, random data, median of medians; `python {' '.join(sys.argv)}`",
        "",
        *summaries,
        "",
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows),
        *(["", *extra] if extra else []),
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(*summaries, sep="\n")


if __name__ == "__main__":
    main()
