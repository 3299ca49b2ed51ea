"""The bundled norm kernels against torch's and against a copy, in one run on one GPU.

    python benchmarks/bench_norm.py --out benchmarks/results/norm_h200
    python benchmarks/bench_norm.py --random 100 --seed 1 --seconds 150 --json FILE

bf16, random data. A kernel's rate is the bytes that it must read and write over its time; `share` is that over the rate
of a device-to-device copy in the same run. dw stands for the weight gradients with their fold. "forward, kept" and
"forward, loaded again" are forward with the row in registers or not, whatever `kernels.rowwise.norm.keeps_row` says of
it, and "32 registers" with no more of them a thread, so that more rows run at a time; their bits are checked to be
forward's. Writes OUT.csv and OUT.md. --random: shapes that are drawn (random_norm.py); --help has their ranges.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import random_norm
import torch
import torch.nn.functional as F
import triton
from random_shapes import add_options, check_options

from tp_invariant.functional.norm import ROWS_PER_SUM
from tp_invariant.kernels.plans import Kernel
from tp_invariant.kernels.rowwise import norm as kernels
from tp_invariant.kernels.rowwise.norm import (
    fold_weight_gradients,
    norm_backward,
    norm_backward_input,
    norm_forward,
    norm_weight_partial_sums,
)

ROWS = 8192
HIDDEN = (1024, 4096, 8192, 16384)
EPS = 1e-6


def microseconds(fn: Callable[[], object], milliseconds: int) -> list[float]:
    """20th, 50th and 80th percentile."""
    times = triton.testing.do_bench(fn, warmup=5, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return [1e3 * t for t in times]


def variants(forward: Callable[[], tuple]) -> dict[str, Callable[[], object]]:
    """Forward in the ways that keeps_row chooses from, with and without a bound on registers."""
    expected, made = forward()[0], {}
    for keep, kept in ((True, "kept"), (False, "loaded again")):
        for most in (None, 32):
            limit = {} if most is None else {"maxnreg": most}
            kernel = Kernel(kernels._forward_kernel, enable_fp_fusion=False, **limit)

            def once(keep: bool = keep, kernel: Kernel = kernel) -> tuple:
                before = kernels.keeps_row, kernels._forward
                kernels.keeps_row, kernels._forward = (lambda h, rms: keep), kernel
                try:
                    return forward()
                finally:
                    kernels.keeps_row, kernels._forward = before

            name = f"forward, {kept}" + ("" if most is None else f", {most} registers")
            assert torch.equal(once()[0].view(torch.int16), expected.view(torch.int16)), name
            made[name] = once
    return made


def cases(hidden: int, rms: bool) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> (call, bytes that it must move)."""
    place = dict(device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(ROWS, hidden, **place) for _ in range(2))
    w = torch.randn(hidden, **place).requires_grad_()
    b = None if rms else torch.randn(hidden, **place).requires_grad_()
    size = x.numel() * x.element_size()
    _, mean, rstd = norm_forward(x, w, b, eps=EPS, rms=rms, zero_centered=False)
    options = dict(rms=rms, zero_centered=False)

    sums_options = dict(rows_per_sum=ROWS_PER_SUM, with_bias=not rms)

    def fold(sums: torch.Tensor) -> None:
        fold_weight_gradients(sums, w.dtype, None if b is None else b.dtype)

    def torch_forward(x: torch.Tensor = x) -> torch.Tensor:
        return F.rms_norm(x, (hidden,), w, EPS) if rms else F.layer_norm(x, (hidden,), w, b, EPS)

    x_grad = x.clone().requires_grad_()
    y = torch_forward(x_grad)
    wanted = [t for t in (x_grad, w, b) if t is not None]

    def ours_backward() -> None:
        fold(norm_backward(dy, x, w, mean, rstd, **options, **sums_options)[1])

    def forward() -> tuple:
        return norm_forward(x, w, b, eps=EPS, **options)

    return {
        "forward": (forward, 2 * size),
        **{name: (fn, 2 * size) for name, fn in variants(forward).items()},
        "forward, torch": (torch_forward, 2 * size),
        "dx": (lambda: norm_backward_input(dy, x, w, mean, rstd, **options), 3 * size),
        "dw": (lambda: fold(norm_weight_partial_sums(dy, x, mean, rstd, rms=rms, **sums_options)), 2 * size),
        "backward": (ours_backward, 3 * size),
        "backward, torch": (lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True), 3 * size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="path without an ending; .csv and .md are written")
    parser.add_argument("--milliseconds", type=int, default=20, help="for each timing (default 20)")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each (default 3)")
    add_options(parser, random_norm.RANGES)
    options = parser.parse_args()
    check_options(parser, options)
    if options.random is not None:
        sys.exit(random_norm.main(options))
    rows = []
    for hidden in HIDDEN:
        source = torch.randn(ROWS, hidden, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        moved = 2 * source.numel() * source.element_size()
        copy = statistics.median(
            microseconds(lambda s=source, t=target: t.copy_(s), options.milliseconds)[1] for _ in range(options.rounds)
        )
        for name, rms in (("RMSNorm", True), ("LayerNorm", False)):
            runs = cases(hidden, rms)
            timed: dict[str, list[list[float]]] = {key: [] for key in runs}
            for _ in range(options.rounds):
                for key, (fn, _) in runs.items():
                    timed[key].append(microseconds(fn, options.milliseconds))
            for key, (_, size) in runs.items():
                p20, us, p80 = (statistics.median(column) for column in zip(*timed[key], strict=True))
                rate = size / us / 1e6
                rows.append(
                    {
                        "norm": name, "rows": ROWS, "hidden": hidden, "pass": key, "p20": round(p20, 1),
                        "us": round(us, 1), "p80": round(p80, 1), "TB/s": round(rate, 2),
                        "share": round(rate / (moved / copy / 1e6), 3),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{datetime.date.today()}; bf16, random data, median of medians; `python {' '.join(sys.argv)}`",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + " --- |" * len(rows[0]),
        *("| " + " | ".join(map(str, row.values())) + " |" for row in rows),
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
