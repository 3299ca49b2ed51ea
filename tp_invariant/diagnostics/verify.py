"""The contract, run on this machine: every part of the library at every degree, byte for byte, beside a control.

    tp-invariant verify                     CPU: TP=1, 2, 3, 4, 8 on gloo; two or more GPUs: up to all of them, on NCCL
    tp-invariant verify --quick --only linear-row --gemm-fn my_kernels:matmul

A check holds if all its cases give TP=1's bytes on every rank of every degree, its controls (the mode off, or another
naive way) do not, and its errors against float64 are within bounds of torch's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.processes import end_with_parent, how_it_ended, temporary_folder
from ..testing.checks import run_ranks
from .onednn import avoid_trapped_units
from .verify_case import load_gemm_fn
from .verify_checks import CHECKS, Check, Setup

_LARGEST_UNIT = 48  # sizes are multiples of all degrees

# --- running them ---------------------------------------------------------------------------------------------------


def _start(tp_group: Any) -> None:
    """Does nothing; calling it starts the pool."""


def run_checks(checks: Sequence[Check], setup: Setup, began: Callable[[str], None] = lambda name: None) -> list[str]:
    """Runs each check and prints its result; returns the names of those that failed. An error fails only its check.

    began: called with each check's name before it runs, and with its verdict afterwards, "held" or "FAILED".
    """
    failed = []
    for check in checks:
        start = time.monotonic()
        began(check.name)
        if sys.stdout.isatty():
            print(f"..      {check.name}", end="\r", flush=True)
        try:
            run_ranks(_start, max(setup.degrees), device=setup.device)  # again after a failure that ended the pool
            found, word = [str(check.run(setup))], "held"
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            found, word = ["", *f"{kind}{error}".splitlines()], "FAILED"
            failed.append(check.name)
        _print_line(word, check.name, time.monotonic() - start, found)
        began(word)
    return failed


def _print_line(word: str, name: str, seconds: float, found: Sequence[str]) -> None:
    """Prints the lines of `found`, the first one beside the name."""
    print(f"{word:<8}{name:<17}{seconds:6.1f} s  " + "\n        ".join(found), flush=True)


# --- in a process of their own --------------------------------------------------------------------------------------
# A product that the CPU refuses, a kernel fault or a lack of memory ends the process that runs a check. So a child runs
# the checks, in a folder that the parent removes. If the child ends, the parent reports its check as failed and starts
# another child for the rest.


_PROGRESS = "progress"


def run_checks_apart(checks: Sequence[Check], setup: Setup) -> list[str]:
    """`run_checks` in a child process, and in a new one after each check that ended the child."""
    failed: list[str] = []
    left = [check.name for check in checks]
    while left:
        start = time.monotonic()
        with temporary_folder("verify") as folder:
            status = _run_child(left, setup, folder, heading=len(left) == len(checks))
            said = (folder / _PROGRESS).read_text().splitlines() if (folder / _PROGRESS).exists() else []
        done = list(zip(said[::2], said[1::2], strict=False))  # a check that was running has no verdict
        failed += [name for name, word in done if word == "FAILED"]
        left = left[len(done) :]
        ended = f"the process that ran it {how_it_ended(status)}"
        if left and len(said) % 2:
            _print_line("FAILED", left[0], time.monotonic() - start, ["", ended])
            failed.append(left.pop(0))
        elif left:  # it ran none of them, and another child would run none either
            _print_line("FAILED", left[0], time.monotonic() - start, ["", f"{ended} before it began"])
            return failed + left
        elif status:
            print(f"after the last check the process that ran them {how_it_ended(status)}", file=sys.stderr)
    return failed


def _run_child(names: Sequence[str], setup: Setup, folder: Path, *, heading: bool) -> int:
    """The exit status of a process that runs these checks, with all its temporary files in `folder`."""
    asked = {"names": names, "setup": dataclasses.asdict(setup), "heading": heading}
    work = json.dumps({**asked, "progress": str(folder / _PROGRESS)})
    command = [
        sys.executable,
        "-c",
        "import sys; from tp_invariant.diagnostics.verify import serve; serve(sys.argv[1])",
        work,
    ]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    sys.stdout.flush()
    # A session of its own, so that Ctrl-C reaches only this process, which then ends the child and so its ranks. If
    # this process is killed, the child ends by itself, and the next verify removes the folder.
    with subprocess.Popen(command, env=environment, start_new_session=True) as child:
        try:
            return child.wait()
        finally:
            child.kill()


def serve(work: str) -> None:
    """Runs in the child process; `work` comes from _run_child."""
    end_with_parent()
    asked = json.loads(work)
    setup = Setup(**{**asked["setup"], "degrees": tuple(asked["setup"]["degrees"])})
    if asked["heading"]:
        print_heading(setup)
    avoid_trapped_units()
    with open(asked["progress"], "a", buffering=1) as progress:
        checks = [check for check in CHECKS if check.name in asked["names"]]
        run_checks(checks, setup, lambda text: print(text, file=progress))


def _named(degrees: Sequence[int]) -> str:
    return f"TP={', '.join(map(str, degrees))}"


def print_heading(setup: Setup) -> None:
    """Called in the child process, because CUDA takes GPU memory when it is asked for the name of the GPU."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in setup.dtypes)
    where = "the CPU (gloo)" if setup.device == "cpu" else f"{torch.cuda.get_device_name()} (NCCL)"
    gemm_fn = setup.gemm_fn or "bundled"
    print(f"{_named(setup.degrees)} on {where}; {dtypes}; seed {setup.seed}; gemm_fn {gemm_fn}", flush=True)


# --- the command ----------------------------------------------------------------------------------------------------


def _degrees(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive whole numbers, as in 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**62):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**62 - 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tp-invariant verify",
        description="Run the contract on this machine: the same bytes at every tensor-parallel degree.",
        epilog="Exit status: 0 if every check held, its controls differed and its errors are within bounds; 1 if not; "
        "2 for a wrong option.",
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there are two or more GPUs, else cpu")
    add(
        "--degrees",
        type=_degrees,
        metavar="P,P,..",
        help="to compare with TP=1 (default on a CPU: 1,2,3,4,8, with --quick 1,2,3,4; on GPUs: 3 and powers of two)",
    )
    add("--quick", action="store_true", help="fewer cases of each check: a minute on two cores, instead of four")
    add("--only", action="append", metavar="NAME", help="this check alone; may be repeated")
    add("--list", action="store_true", help="list the checks and run none")
    add("--seed", type=_seed, default=0, metavar="N", help="seed of all data (default: 0)")
    add("--gemm-fn", metavar="MODULE:NAME", help="your gemm_fn for every GEMM, instead of the bundled one")
    return parser


def _setup(options: argparse.Namespace, error: Callable[[str], Any]) -> Setup:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = options.device or ("cuda" if gpus > 1 else "cpu")
    if device == "cuda" and gpus < 2:
        error(
            f"--device cuda: torch sees {gpus} GPUs here, and comparing degrees takes two; tp-invariant doctor checks "
            "what one GPU can show, --device cpu runs the contract on the CPU"
        )
    most = (4 if options.quick else 8) if device == "cpu" else gpus
    usual = [3, *(2**i for i in range(most.bit_length()))]  # 3: a degree that is not a power of two
    degrees = tuple(sorted({1, *(options.degrees or (degree for degree in usual if degree <= most))}))
    if len(degrees) == 1:
        error("--degrees 1 leaves nothing to compare: give one more, as in 1,2")
    if device == "cuda" and degrees[-1] > gpus:
        error(f"--degrees: {degrees[-1]} is more than the {gpus} GPUs here")
    if math.lcm(*degrees) > _LARGEST_UNIT:
        error(f"--degrees: sizes are multiples of all of them, {math.lcm(*degrees)}, which is too large; give fewer")
    if options.gemm_fn is not None:
        sys.path.append(os.getcwd())  # for a module of the user's; last, so that it hides nothing
        try:
            load_gemm_fn(options.gemm_fn)
        except ValueError as problem:
            error(f"--gemm-fn: {problem}")
    return Setup(degrees, device, options.seed, options.quick, options.gemm_fn)


def _chosen(only: Sequence[str] | None, error: Callable[[str], Any]) -> list[Check]:
    names = [check.name for check in CHECKS]
    if unknown := [name for name in only or () if name not in names]:
        error(f"--only {unknown[0]}: choose from {', '.join(names)}")
    chosen = [check for check in CHECKS if not only or check.name in only]
    if importlib.util.find_spec("safetensors") is None and any(check.name == "checkpoint" for check in chosen):
        if only:
            error("--only checkpoint needs safetensors: pip install safetensors")
        print("checkpoint is not run: it needs safetensors (pip install safetensors)")
        chosen = [check for check in chosen if check.name != "checkpoint"]
    return chosen


def main(argv: Sequence[str]) -> int:
    """The `verify` command; exit statuses as its help says, and 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    if options.list:
        print("\n".join(f"{check.name:<17} {check.what}" for check in CHECKS))
        return 0
    setup = _setup(options, parser.error)
    chosen = _chosen(options.only, parser.error)
    degrees = _named(setup.degrees)
    start = time.monotonic()
    try:
        failed = run_checks_apart(chosen, setup)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    took = f"{time.monotonic() - start:.0f} s"
    if failed:
        print(f"Verdict: FAILED: {', '.join(failed)} ({len(failed)} of {len(chosen)} checks, {took})")
        return 1
    print(f"Verdict: all {len(chosen)} checks held: {degrees} are byte for byte the same on every rank ({took})")
    return 0
