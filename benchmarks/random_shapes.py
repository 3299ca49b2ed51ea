"""Benchmarks on shapes that are drawn, so that nothing can be tuned to them: drawing, the order of a run, its report.

options of a script   add_options, check_options
a run                 compile_ahead, then run: each shape is measured and checked; report
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import tp_invariant as tpi
from tp_invariant.kernels.gemm.autotune import is_enabled

EIGHTS = 0.9  # how often a size that memory is contiguous along is a multiple of 8
WORST = 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU serves the tests
Row = dict[str, Any]


class WrongResult(Exception):
    """What was timed gives wrong numbers or other bits than it must: its time does not count."""


def add_options(parser: argparse.ArgumentParser, ranges: str) -> None:
    """--random and what goes with it; ranges: what is drawn, for --help."""
    group = parser.add_argument_group("shapes that are drawn", ranges)
    group.add_argument("--random", type=int, metavar="N", help="measure N shapes that are drawn, and nothing else")
    group.add_argument("--seed", type=int, default=0, help="of the shapes and the data (default 0)")
    group.add_argument("--seconds", type=float, default=600, help="start no shape after so long (default 600)")
    group.add_argument("--each", type=float, default=0.3, help="seconds of timing for each shape (default 0.3)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    group.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the script with a message unless it has what it needs: --out, or a --random that it can run here."""
    if options.random is None:
        if options.out is None:
            parser.error("--out or --random is needed")
        return
    if options.random < 1 or options.seconds <= 0 or options.workers < 1:
        parser.error("--random and --workers are at least 1, and --seconds more than 0")
    if DEVICE == "cpu":
        parser.error("--random needs a GPU")


def log_uniform(rng: random.Random, low: int, high: int, eights: float = 0.0) -> int:
    """An integer of low .. high whose logarithm is uniform; with probability `eights` a multiple of 8."""
    rounded = rng.random() < eights
    size = round(low * (high / low) ** rng.random())
    return min(high // 8 * 8, max(-(-low // 8) * 8, round(size / 8) * 8)) if rounded else size


def reduced(size: int) -> int:
    """A size below 1024 for which Triton compiles the same kernel: as large modulo 512, and 1 only for 1."""
    return size if size < 1024 else 512 + size % 512


def _finished(function: Callable[[Any], None], job: Any) -> None:
    function(job)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def compile_ahead(
    function: Callable[[Any], None], jobs: Iterable[Any], options: argparse.Namespace, start: float
) -> None:
    """function(job) of each in processes of their own, which leave the compiled kernels in Triton's cache on disk.

    Takes at most half of the time that there is; what is not compiled then is compiled when it is measured.
    """
    jobs = list(jobs)
    if options.workers == 1 or not jobs:
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(options.workers, len(jobs)), context) as pool:
        futures = [pool.submit(_finished, function, job) for job in jobs]
        left = start + options.seconds / 2 - time.monotonic()
        concurrent.futures.wait(futures, timeout=max(0, left))
        pool.shutdown(wait=False, cancel_futures=True)
    ended = [future for future in futures if future.done() and not future.cancelled()]
    errors = [error for error in (future.exception() for future in ended) if error]
    print(f"compiled {len(ended) - len(errors)} of {len(jobs)} in {time.monotonic() - start:.0f} s", flush=True)
    for error in errors[:3]:
        print(f"  not compiled ahead: {(str(error) or repr(error)).splitlines()[0]}", flush=True)


def run(
    shapes: Sequence[Any],
    measure: Callable[[Any], list[Row]],
    seconds: float,
    start: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The rows of every shape that could be started in time, printed as they come.

    measure: a row for each pass over the shape, {"case", "contender", "contender_us", "us"}; raises WrongResult.
    A shape that memory does not suffice for is left out, by name. A wrong one has a row too, with its error.
    """
    rows: list[Row] = []
    for number, shape in enumerate(shapes):
        if clock() - start >= seconds:
            break
        try:
            found = measure(shape)
        except WrongResult as error:
            found = [{"case": "all", "error": str(error)}]
        except torch.OutOfMemoryError:
            found = [{"case": "all", "skipped": "out of memory"}]
        for row in found:
            if "us" in row:
                row["speed"] = row["contender_us"] / row["us"]
            rows.append({"number": number, "shape": str(shape), **row})
            print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    start = f"{row['shape']:56} {row['case']:8}"
    if "error" in row:
        return f"{start} WRONG: {row['error']}"
    if "skipped" in row:
        return f"{start} skipped: {row['skipped']}"
    return f"{start} {row['us']:10.1f} us   {row['contender']} {row['contender_us']:10.1f} us   {row['speed']:.3f}"


def statistics_of(speeds: Sequence[float]) -> dict[str, float]:
    """Geometric mean, 5th percentile (interpolated between the two nearest) and least."""
    ordered = sorted(speeds)
    place = 0.05 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return {
        "geometric mean": math.exp(statistics.fmean(map(math.log, ordered))),
        "5th percentile": ordered[below] + (place - below) * (ordered[above] - ordered[below]),
        "least": ordered[0],
    }


def environment() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tp_invariant": tpi.__version__,
        "date": str(datetime.date.today()),
        "autotune": is_enabled(),
        "command": " ".join(["python", *sys.argv]),
    }


def summary(rows: list[Row], asked: int, seed: int) -> dict[str, Any]:
    timed = [row for row in rows if "speed" in row]
    cases = {case: [row["speed"] for row in timed if row["case"] == case] for case in {r["case"]: 0 for r in timed}}
    if len(cases) > 1:
        cases = {"all": [row["speed"] for row in timed], **cases}
    return {
        **environment(),
        "seed": seed,
        "asked": asked,
        "measured": len({row["number"] for row in timed}),
        "wrong": len({row["number"] for row in rows if "error" in row}),
        "skipped": len({row["number"] for row in rows if "skipped" in row}),
        "speed": {case: {"count": len(speeds), **statistics_of(speeds)} for case, speeds in cases.items()},
    }


def report(rows: list[Row], asked: int, seed: int, unit: str, file: Path | None) -> int:
    """Prints the summary and the worst rows, writes all of it to `file`, and returns the exit status: 1 if any is wrong
    or none was measured. unit: what a speed of 1 is."""
    facts = summary(rows, asked, seed)
    print()
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, tp_invariant {facts['tp_invariant']}")
    print(f"{facts['date']}; `{facts['command']}`; seed {seed}{'; autotuned' * facts['autotune']}")
    print(
        f"{facts['measured']} of {asked} shapes measured, {facts['wrong']} wrong, {facts['skipped']} skipped for want "
        f"of memory or contenders, {asked - len({row['number'] for row in rows})} not reached in time"
    )
    print(f"speed, as a multiple of {unit}:")
    for case, numbers in facts["speed"].items():
        parts = ", ".join(f"{name} {numbers[name]:.3f}" for name in ("geometric mean", "5th percentile", "least"))
        print(f"  {case} ({numbers['count']}): {parts}")
    worst = sorted((row for row in rows if "speed" in row), key=lambda row: row["speed"])[:WORST]
    wrong = [row for row in rows if "error" in row]
    if worst or wrong:
        print("the worst first:")
    for row in [*wrong, *worst]:
        print(f"  {line(row)}")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return int(bool(wrong) or not worst)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the norms, inf where got has a NaN that exact lacks."""
    error = float((got.double() - exact).norm() / exact.norm().clamp_min(1e-300))
    return error if error == error else math.inf


def check_error(name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    """Raises WrongResult unless ours errs at most `factor` times as much as theirs."""
    error, limit = relative_error(ours, exact), factor * relative_error(theirs, exact) + 1e-6
    if not error <= limit:
        raise WrongResult(f"{name}: error {error:.3g} against float64, {factor} times torch's is {limit:.3g}")


def check_bits(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises WrongResult unless both have the same bytes."""
    differ = int((got.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).sum())
    if differ:
        raise WrongResult(f"{name}: {differ} bytes differ")
