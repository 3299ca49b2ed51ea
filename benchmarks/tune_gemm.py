"""Measures the TMA kernel's tiles on drawn shapes, and fits and tests the times in kernels/gemm/matmul_table.py.

    python benchmarks/tune_gemm.py --measure rows.jsonl --seconds 400 --seed 7
    python benchmarks/tune_gemm.py --fit rows.jsonl --table kernels/gemm/matmul_table.py
    python benchmarks/tune_gemm.py --measure others.jsonl --seconds 120 --seed 8 --test

The first needs a Hopper GPU: it draws bf16 shapes, times every candidate on each, and appends a line of JSON a shape.
The second needs none: it fits the microseconds of each candidate as a sum of what a product makes it do (`features` in
kernels/gemm/matmul_configs.py), keeps the candidates that are worth it, and says how good the choice is on shapes that
it was not fitted to (a fifth of the shapes at a time). The third says the same of the table that is in use, on other
shapes. Every candidate's result is compared with the first one's, byte by byte.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from tp_invariant.kernels.gemm.aligned_copies import copied_matmul, copy_features, generic_features
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.gemm.matmul_configs import (
    MatmulConfig,
    Product,
    choose_config,
    estimated_us,
    features,
    fits_tma,
    is_sensible,
    shared_memory_of,
)
from tp_invariant.kernels.gemm.matmul_configs import (
    fit as fit_to_memory,
)
from tp_invariant.kernels.gemm.matmul_tma import tma_matmul, tma_operands

SIDES, FEW_ROWS, ROWS = (64, 32768), (1, 256), (256, 32768)
LAYOUTS = ("fwd", "dgrad", "wgrad")
KEPT = 28  # candidates that the table has; more are not worth it
KEPT_OF_A_FORM = 6  # of those that fit with fp32 output, added to what is there, promoted
CANDIDATES = [
    config
    for fields in (
        # large tiles: the last number is how many rows of tiles start one after another
        *((128, 256, 64, 8, 3, group, False) for group in (4, 8, 16, 24)),
        *((128, 256, 64, 8, 4, group, True) for group in (4, 8, 16, 24, 32)),
        *((128, 256, 64, 8, 3, group, True) for group in (8, 16)),  # these have room for fp32 output
        *((256, 128, 64, 8, 3, group, False) for group in (4, 8)),
        *((256, 128, 64, 8, 4, group, True) for group in (4, 8, 16)),
        *((128, 192, 64, 8, 4, group, True) for group in (4, 8, 16)),
        *((256, 192, 64, 8, 3, group, True) for group in (2, 4, 16)),
        (128, 256, 32, 8, 5, 8, True), (128, 192, 64, 8, 5, 8, True), (128, 192, 64, 4, 4, 8, True),
        (256, 96, 64, 8, 4, 8, True), (256, 64, 64, 4, 4, 8, False), (256, 64, 64, 8, 4, 8, False),
        (128, 128, 32, 4, 6, 8, False), (128, 128, 64, 4, 4, 8, False), (128, 128, 64, 4, 4, 16, False),
        (128, 128, 64, 4, 6, 8, False), (128, 128, 64, 8, 4, 8, True), (128, 128, 64, 8, 5, 8, False),
        (128, 128, 128, 4, 3, 8, True), (128, 128, 128, 8, 3, 8, False), (128, 96, 128, 4, 3, 8, True),
        (64, 256, 64, 4, 4, 8, True), (64, 256, 64, 4, 5, 8, True), (64, 256, 128, 4, 2, 8, True),
        # for less work than there are multiprocessors
        (128, 64, 64, 4, 6, 8, False), (128, 64, 128, 4, 4, 8, False), (128, 64, 128, 8, 4, 8, False),
        (128, 48, 128, 4, 4, 8, True), (128, 48, 128, 8, 4, 8, True), (128, 32, 128, 4, 5, 8, False),
        (128, 16, 256, 4, 2, 8, False), (64, 192, 64, 4, 5, 8, True), (64, 192, 128, 4, 3, 8, True),
        (64, 128, 64, 4, 6, 8, False), (64, 128, 128, 4, 4, 8, False), (64, 96, 128, 4, 4, 8, True),
        (64, 64, 64, 4, 8, 8, False), (64, 64, 128, 4, 6, 8, False), (64, 64, 256, 4, 3, 8, False),
        (64, 48, 128, 4, 6, 8, True), (64, 32, 128, 4, 8, 8, False), (64, 32, 256, 4, 4, 8, False),
        (64, 16, 256, 4, 5, 8, False), (64, 16, 512, 4, 2, 8, False),
        # for few rows: bound by reading b, or where there are few columns too by the walk over K
        (32, 192, 128, 4, 3, 8, True), (32, 64, 128, 4, 6, 8, False), (32, 64, 256, 4, 4, 8, False),
        (32, 32, 256, 4, 5, 8, False), (32, 16, 256, 4, 6, 8, False), (32, 16, 256, 2, 6, 8, False),
        (32, 16, 512, 2, 3, 8, False), (16, 192, 128, 4, 3, 8, True), (16, 128, 64, 4, 6, 8, False),
        (16, 64, 128, 4, 6, 8, False), (16, 64, 256, 4, 3, 8, False), (16, 32, 128, 4, 8, 8, False),
        (16, 32, 256, 4, 5, 8, False), (16, 32, 256, 2, 5, 8, False), (16, 16, 256, 4, 6, 8, False),
        (16, 16, 256, 2, 6, 8, False), (16, 16, 256, 1, 6, 8, False), (16, 16, 512, 4, 3, 8, False),
        (16, 16, 512, 2, 3, 8, False),
    )
    if fits_tma(config := MatmulConfig(*fields), 2)
]  # fmt: skip
Row = dict[str, Any]
Table = dict[str, dict[MatmulConfig, tuple[float, ...]]]


# --- what is measured -----------------------------------------------------------------------------------------------


def operands(layout: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 a [M, K] and b [K, N] standing in memory as forward, dgrad or wgrad of a linear layer have them."""
    place = dict(device="cuda", dtype=torch.bfloat16)
    a = torch.randn(k, m, **place).t() if layout == "wgrad" else torch.randn(m, k, **place)
    b = torch.randn(n, k, **place).t() if layout == "fwd" else torch.randn(k, n, **place)
    return a, b


def drawn(seed: int) -> Iterator[tuple[str, int, int, int]]:
    """(layout, M, N, K) without end; each third has few rows. Sizes are multiples of 64, 16, 8, or nothing."""
    rng = random.Random(seed)

    def side(low: int, high: int) -> int:
        unit = rng.choices((64, 16, 8, 1), (0.3, 0.15, 0.45, 0.1))[0]
        return max(unit, round(low * (high / low) ** rng.random() / unit) * unit)

    while True:
        few = rng.random() < 1 / 3
        layout, n, k = rng.choice(LAYOUTS), side(*SIDES), side(*SIDES)
        m = side(*ROWS) if not few else rng.choice((rng.randint(*FEW_ROWS), 2 ** rng.randint(0, 8)))
        if 1e7 < 2.0 * m * n * k < 1.2e13 and m * k + n * k + m * n < 1.5e9:
            yield layout, m, n, k


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


class Clock:
    """Times calls as a CUDA graph of them replays, so that no host is waited for."""

    def __init__(self) -> None:
        self.keeper = torch.cuda.CUDAGraph()  # without it the pool would go with the first graph
        with torch.cuda.graph(self.keeper):
            self.held = torch.zeros(1, device="cuda")

    def microseconds(self, calls: Sequence[Callable[[], torch.Tensor]]) -> float:
        """Of one call: the median of three replays."""
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, pool=self.keeper.pool()):
            for call in calls:
                call()
        graph.replay()
        for _ in range(3):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            torch.cuda.synchronize()
            times.append(1e3 * before.elapsed_time(after) / len(calls))
        graph.reset()
        return statistics.median(times)


def measure(clock: Clock, shape: tuple[str, int, int, int], bad: set[str]) -> Row:
    """Microseconds: cuBLAS before and after, the bundled kernel as it is, and every candidate, or copies of operands
    that TMA cannot address."""
    layout, m, n, k = shape
    copies = max(1, min(12, math.ceil(120e6 / (2 * (m * k + n * k + m * n)))))  # beyond the L2 cache
    sets = [operands(*shape) for _ in range(copies)]
    count = copies * max(1, round(400 / copies / max(5, 2 * m * n * k / 6e8)))  # about 400 us in a graph

    def times(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        function(*sets[0])
        return clock.microseconds([lambda s=sets[i % copies]: function(*s) for i in range(count)])

    row: Row = {"shape": shape, "cublas": times(torch.matmul), "now": times(matmul)}
    wanted = matmul(*sets[0]).view(torch.uint8)
    if tma_operands(*sets[0], torch.bfloat16) is None:

        def copied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            c = copied_matmul(a, b, None, a.dtype, always=True)
            assert c is not None
            return c

        def generic(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            config = choose_config(m, n, k, a.dtype)
            return matmul(a, b, config=fit_to_memory(config, 2, shared_memory_of(a.device.index)))

        row |= {"copied": times(copied), "generic": times(generic)}
        row["same bits"] = all(torch.equal(wanted, f(*sets[0]).view(torch.uint8)) for f in (copied, generic))
    else:
        chosen = [c for c in CANDIDATES if f"{layout} {c}" not in bad and is_sensible(c, m, n)]
        row["same bits"] = all(torch.equal(wanted, _run(c, *sets[0]).view(torch.uint8)) for c in chosen)
        row["times"] = sorted((times(lambda a, b, c=c: _run(c, a, b)), astuple(c)) for c in chosen)
    row["cublas"] = math.sqrt(row["cublas"] * times(torch.matmul))
    return row


def measure_all(options: argparse.Namespace) -> list[Row]:
    start = time.monotonic()
    jobs = [(layout, config) for layout in LAYOUTS for config in CANDIDATES]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        failed = [message for message in pool.map(_compile, jobs, chunksize=2) if message]
    print(f"compiled in {time.monotonic() - start:.0f} s; failed: {len(failed)}", *failed, sep="\n", flush=True)
    clock, rows, bad = Clock(), [], {message.split(":")[0] for message in failed}
    with open(options.measure, "a") as file:
        for shape in drawn(options.seed):
            if time.monotonic() - start > options.seconds:
                break
            rows.append(measure(clock, shape, bad))
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    wrong = [row["shape"] for row in rows if not row["same bits"]]
    print(f"{len(rows)} shapes of seed {options.seed}; other bits: {wrong or 'none'}", flush=True)
    return rows


# --- what is fitted -------------------------------------------------------------------------------------------------


def non_negative(points: Sequence[tuple[Sequence[float], float]]) -> tuple[float, ...]:
    """Coefficients of least relative error that are not negative (Lawson and Hanson's active set), with less weight for
    the points that fit worst."""
    rows, us = (torch.tensor(part, dtype=torch.float64) for part in zip(*points, strict=True))
    relative, weight = rows / us[:, None], torch.ones_like(us)
    for _ in range(4):
        found = _active_set(relative * weight[:, None], weight)
        weight = (relative @ found - 1).abs().clamp_min(0.05) ** -0.5
    return tuple(round(x, 6) for x in found.tolist())


def _active_set(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    gram, right = a.T @ a, a.T @ b
    x, active = torch.zeros_like(right), torch.zeros(len(right), dtype=torch.bool)
    for _ in range(3 * len(right)):
        gradient = (right - gram @ x).masked_fill(active, -math.inf)
        if gradient.max() < 1e-9:
            break
        active[gradient.argmax()] = True
        while True:
            solution = torch.zeros_like(x)
            places = active.nonzero().flatten()
            solution[places] = torch.linalg.lstsq(gram[places][:, places], right[places, None]).solution.flatten()
            falling = active & (solution <= 0)
            if not falling.any():
                x = solution
                break
            x = x + (x / (x - solution))[falling].min() * (solution - x)
            active &= x > 1e-12
            x = x.masked_fill(~active, 0.0)
    return x


def product_of(row: Row, multiprocessors: int) -> Product:
    layout, m, n, k = row["shape"]
    row_a, row_b = m if layout == "wgrad" else k, k if layout == "fwd" else n
    return Product(
        m, n, k, layout == "wgrad", layout == "fwd", row_a % 16 > 0, row_b % 16 > 0, 2, multiprocessors
    )  # fmt: skip


def fit(rows: Sequence[Row], multiprocessors: int, kept: Sequence[MatmulConfig] | None = None) -> Table:
    points: dict[str, dict[MatmulConfig, list]] = {layout: collections.defaultdict(list) for layout in LAYOUTS}
    for row in rows:
        layout = row["shape"][0]
        for us, fields in row.get("times", ()):
            config = MatmulConfig(*fields)
            if kept is None or config in kept:
                points[layout][config].append((features(config, product_of(row, multiprocessors)), us))
    return {
        layout: {config: non_negative(found) for config, found in each.items() if len(found) > 12}
        for layout, each in points.items()
    }


def worth_keeping(rows: Sequence[Row]) -> list[MatmulConfig]:
    """One after another the candidate that brings the shapes nearest to their best time; for each form of a call."""
    rows = [row for row in rows if "times" in row]
    best = [row["times"][0][0] for row in rows]
    times: dict[MatmulConfig, dict[int, float]] = collections.defaultdict(dict)
    for i, row in enumerate(rows):
        for us, fields in row["times"]:
            times[MatmulConfig(*fields)][i] = us

    def greedy(candidates: list[MatmulConfig], count: int) -> list[MatmulConfig]:
        chosen: list[MatmulConfig] = []
        now = [20 * us for us in best]

        def loss(config: MatmulConfig) -> float:
            return sum(math.log(min(us, times[config].get(i, us)) / best[i]) for i, us in enumerate(now))

        while len(chosen) < min(count, len(candidates)):
            chosen.append(min((c for c in candidates if c not in chosen), key=loss))
            now = [min(us, times[chosen[-1]].get(i, us)) for i, us in enumerate(now)]
        return chosen

    found = greedy(list(times), KEPT)
    for promoted in (False, True):
        fitting = [c for c in times if fits_tma(c, 4, promoted)]
        found += [c for c in greedy(fitting, KEPT_OF_A_FORM) if c not in found]
    return sorted(found, key=astuple)


def estimate(table: Table, row: Row, multiprocessors: int) -> MatmulConfig:
    """The candidate that was timed and has the least estimated time."""
    layout = row["shape"][0]
    timed = [MatmulConfig(*fields) for _, fields in row["times"]]

    def us(config: MatmulConfig) -> float:
        return estimated_us(table[layout][config], features(config, product_of(row, multiprocessors)))

    return min((config for config in timed if config in table[layout]), key=us)


def say(name: str, rows: Sequence[Row], chosen_us: Sequence[float]) -> None:
    """How the chosen times stand to cuBLAS's and to the best candidate's."""
    for label, few in (("few rows", True), ("others", False)):
        pairs = [(row, us) for row, us in zip(rows, chosen_us, strict=True) if (row["shape"][1] <= FEW_ROWS[1]) == few]
        if not pairs:
            continue
        parts = []
        for of, speeds in (
            ("cuBLAS", sorted(row["cublas"] / us for row, us in pairs)),
            ("the best", sorted(min(best_of(row), us) / us for row, us in pairs)),
        ):
            mean = math.exp(statistics.fmean(map(math.log, speeds)))
            parts.append(f"of {of} {mean:.3f}, 5th percentile {speeds[len(speeds) // 20]:.3f}, least {speeds[0]:.3f}")
        print(f"{name}, {len(pairs)} shapes with {label}: {'; '.join(parts)}", flush=True)


def best_of(row: Row) -> float:
    return row["times"][0][0] if "times" in row else min(row["copied"], row["generic"])


def cross_validated(rows: Sequence[Row], kept: Sequence[MatmulConfig], multiprocessors: int) -> None:
    rows = [row for row in rows if "times" in row]
    chosen: list[float] = [0.0] * len(rows)
    for fold in range(5):
        table = fit([row for i, row in enumerate(rows) if i % 5 != fold], multiprocessors, kept)
        for i in range(fold, len(rows), 5):
            config = astuple(estimate(table, rows[i], multiprocessors))
            chosen[i] = next(us for us, fields in rows[i]["times"] if tuple(fields) == config)
    say("fitted to other shapes", rows, chosen)


def fit_copies(rows: Sequence[Row], table: Table, multiprocessors: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Coefficients of what copies take besides the product, and of the generic kernel on such operands."""
    copies, generic = [], []
    for row in rows:
        if "copied" not in row:
            continue
        layout, m, n, k = row["shape"]
        unaligned = (m if layout == "wgrad" else k) % 8 > 0, (k if layout == "fwd" else n) % 8 > 0, n % 8 > 0
        x = product_of(row, multiprocessors)
        generic.append((generic_features(x, torch.bfloat16), row["generic"]))
        x = x._replace(a_split=x.a_split and not unaligned[0], b_split=x.b_split and not unaligned[1])
        product = min(estimated_us(coefficients, features(config, x)) for config, coefficients in table[layout].items())
        if row["copied"] > product:
            copies.append((copy_features(m, n, k, unaligned, 2), row["copied"] - product))
    return non_negative(copies), non_negative(generic)


def write_table(path: Path, table: Table, copies: tuple, generic: tuple, source: str, multiprocessors: int) -> None:
    lines = [
        f'"""What benchmarks/tune_gemm.py fitted: {source}.',
        "",
        "Generated, do not edit. Sets speed, never bits.",
        "",
        "A configuration is (block_m, block_n, block_k, num_warps, num_stages, group_m, halves).",
        '"""',
        "",
        "Fields = tuple[int, int, int, int, int, int, bool]",
        f"MEASURED_MULTIPROCESSORS = {multiprocessors}",
        'LAYOUTS = {(False, True): "fwd", (False, False): "dgrad", (True, False): "wgrad", (True, True): "wgrad"}',
        "",
        "# layout: configuration: microseconds for each of matmul_configs.features",
        "TIMES: dict[str, dict[Fields, tuple[float, ...]]] = {",
    ]
    for layout in LAYOUTS:
        entries = sorted((astuple(config), times) for config, times in table[layout].items())
        lines += [f'    "{layout}": {{', *(f"        {config}: {times}," for config, times in entries), "    },"]
    lines += [
        "}",
        "# microseconds for each of aligned_copies.copy_features and generic_features",
        f"COPIES = {copies}",
        f"GENERIC = {generic}",
    ]
    path.write_text("\n".join(lines) + "\n")


# --- the command line -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="append the times of drawn shapes, as JSON lines")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (default 0)")
    parser.add_argument("--seconds", type=float, default=400, help="stop after so long (default 400)")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile (default 14)")
    parser.add_argument("--test", action="store_true", help="say how good the choice of the table in use is")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="FILE", help="fit to these times")
    parser.add_argument("--table", type=Path, help="with --fit: write the table here")
    parser.add_argument("--multiprocessors", type=int, default=132, help="of the GPU of --fit's times (default 132)")
    options = parser.parse_args()
    if options.measure is None and options.fit is None:
        parser.error("--measure or --fit is needed")
    if options.measure is not None:
        rows = measure_all(options)
        if options.test:
            say("as it is", rows, [row["now"] for row in rows])
    if options.fit is not None:
        rows = [json.loads(line) for file in options.fit for line in file.read_text().splitlines()]
        kept = worth_keeping(rows)
        cross_validated(rows, kept, options.multiprocessors)
        table = fit(rows, options.multiprocessors, kept)
        copies, generic = fit_copies(rows, table, options.multiprocessors)
        print(f"{len(kept)} of {len(CANDIDATES)} candidates kept; copies {copies}; generic kernel {generic}")
        if options.table is not None:
            source = f"{len(rows)} drawn shapes, bf16, {options.multiprocessors} multiprocessors (sm90)"
            write_table(options.table, table, copies, generic, source, options.multiprocessors)


if __name__ == "__main__":
    main()
