"""What limits a product: cuBLAS's kernel and this library's under Nsight Compute, counter by counter.

    python benchmarks/profile_gemm.py --out gemm_profile

Runs itself under ncu, which must be on the PATH, and writes OUT.md. Each kernel runs alone and cold, so that a chip's
power limit, which a row of products reaches, shows in bench_gemm.py's times and not in these.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import subprocess
import sys
from pathlib import Path

import torch
import triton
from tune_gemm import operands

from tp_invariant.kernels.gemm.matmul import matmul

SHAPES = [  # where the ratio to cuBLAS is least, and the largest of each layout
    ("fwd", 2048, 1536, 4096),
    ("fwd", 8192, 24576, 4096),
    ("dgrad", 2048, 4096, 4096),
    ("dgrad", 8192, 4096, 24576),
    ("wgrad", 4096, 1024, 2048),
    ("wgrad", 4096, 12288, 8192),
]
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "LaunchStats")
COLUMNS = {  # ncu's name: heading, what it is divided by
    "gpu__time_duration.sum": ("us", 1e3),
    "gpc__cycles_elapsed.avg.per_second": ("GHz", 1e9),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("tensor cores busy, %", 1),
    "sm__inst_issued.avg.pct_of_peak_sustained_elapsed": ("issue slots used, %", 1),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("L2, %", 1),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("memory, %", 1),
    "launch__registers_per_thread": ("registers", 1),
    "launch__cluster_size": ("cluster", 1),
}


def run() -> None:
    """What ncu looks at: each product once by cuBLAS and once by this library, warm."""
    cases = [operands(*shape) for shape in SHAPES]
    for start in (False, True):
        if start:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
        for a, b in cases:
            torch.matmul(a, b)
            matmul(a, b)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profile() -> str:
    """ncu's raw page, as CSV."""
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    for section in SECTIONS:
        command += ["--section", section]
    done = subprocess.run([*command, sys.executable, __file__, "--run"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout[done.stdout.index('"ID"') :]


def markdown(raw: str) -> str:
    kernels = list(csv.DictReader(io.StringIO(raw)))[1:]  # the first row is the units
    assert len(kernels) == 2 * len(SHAPES), f"{len(kernels)} kernels for {len(SHAPES)} products"
    headings = [heading for heading, _ in COLUMNS.values()]
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{datetime.date.today()}; bf16, random data, each kernel alone; `python {' '.join(sys.argv)}`",
        "",
        "| layout | M | N | K | kernel | " + " | ".join(headings) + " |",
        "|" + " --- |" * (5 + len(headings)),
    ]
    for i, kernel in enumerate(kernels):
        name = kernel["Kernel Name"] if i % 2 == 0 else "tp_invariant"
        numbers = [float(kernel[key].replace(",", "")) / scale for key, (_, scale) in COLUMNS.items()]
        lines.append("| " + " | ".join([*map(str, SHAPES[i // 2]), name, *(f"{x:.4g}" for x in numbers)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gemm_profile", help="path without an ending; .md is written")
    parser.add_argument("--run", action="store_true", help="what ncu runs")
    options = parser.parse_args()
    if options.run:
        return run()
    Path(options.out).with_suffix(".md").write_text(markdown(profile()))


if __name__ == "__main__":
    main()
