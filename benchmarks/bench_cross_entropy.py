"""Cross-entropy against torch's, on one GPU: the GPU's time, the host's, and the error.

    python benchmarks/bench_cross_entropy.py --out benchmarks/results/cross_entropy_h100
    python benchmarks/bench_cross_entropy.py --blocks        # and the tiles of columns that were not chosen

A whole vocabulary on one rank, mean over the tokens, forward and backward. The GPU's times are between CUDA events with
an empty L2 cache; GB/s counts each logit as read once in forward, and read once and its gradient written once in
backward. The host's are of few tokens, where nothing waits for the GPU. Errors are norm-wise, against float64, of some
rows whose gradients come back whole. Each case checks that rows by themselves, and the vocabulary in parts as ranks
hold it, have the bits of the whole. Writes OUT.csv and OUT.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from gpu_timing import in_turn
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.kernels.vocabulary import cross_entropy as kernels
from tp_invariant.kernels.vocabulary.loss_spec import LossSpec

ROWS = (4096, 16384)
VOCABULARIES = (32000, 151936)
DTYPES = (torch.bfloat16, torch.float32)
CHECKED = 64  # rows
SMALL = 64  # tokens of the calls whose host time is taken
BLOCKS = (1024, 2048, 8192, 16384)


def ours(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return tpi.vocab_parallel_cross_entropy(logits, target, tp_group=None, **options)


def bits(*tensors: Tensor) -> list[bytes]:
    return [t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors]


def check_bits(logits: Tensor, target: Tensor) -> None:
    """Rows by themselves, and columns in parts of a few widths, have the bits of the whole."""
    v = logits.shape[1]
    spec, one = LossSpec(v, -100, 0.1, 1e-4), torch.ones(1, device=logits.device)
    rows = torch.tensor([0, 1, len(target) // 2, len(target) - 1], device=logits.device)
    losses, stats = kernels.whole_losses(logits, target, spec)
    x, ids = logits[rows].contiguous(), target[rows].contiguous()
    some, some_stats = kernels.whole_losses(x, ids, spec)
    if bits(some, some_stats) != bits(losses[rows], stats[:, rows]):
        raise AssertionError(f"rows of {tuple(logits.shape)} {logits.dtype} differ by themselves")
    want = bits(some, some_stats, kernels.logits_grad(one, x, ids, some_stats, None, v, 0, spec))
    for count in (2, 4, 8, 7):
        width = -(-v // count)
        parts = [
            (a, max(0, min(b, v) - a), x[:, a:b]) for a, b in itertools.pairwise(range(0, count * width + 1, width))
        ]
        extremes = torch.stack([kernels.row_extremes(part, ids, n, a, spec) for a, n, part in parts])
        sums = torch.stack([kernels.row_sums(part, ids, n, extremes, spec) for a, n, part in parts])
        got, got_stats = kernels.token_losses(extremes, sums, ids, width, spec)
        dx = [kernels.logits_grad(one, part, ids, got_stats, None, n, a, spec) for a, n, part in parts]
        if bits(got, got_stats, torch.cat(dx, dim=1)) != want:
            raise AssertionError(f"{count} parts of {tuple(logits.shape)} {logits.dtype} differ from the whole")


def errors(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Relative, of loss and gradient, ours and torch's in fp32 and in the logits' dtype."""
    x, ids = logits.detach()[:CHECKED], target[:CHECKED]

    def both(loss_of: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        losses = loss_of(x, ids, reduction="none")
        losses.sum().backward()
        assert x.grad is not None
        return losses.detach().double(), x.grad.double()

    exact = both(F.cross_entropy, x.double())
    found = {
        "ours": both(ours, x),
        "torch": both(F.cross_entropy, x),
        "torch in fp32": both(F.cross_entropy, x.float()),
    }
    return {
        f"{what} error, {name}": float((got - want).norm() / want.norm())
        for name, results in found.items()
        for what, got, want in zip(("loss", "gradient"), results, exact, strict=True)
    }


def runs(logits: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    made: dict[str, Callable[[], object]] = {}
    for name, loss_of in (("ours", ours), ("torch", F.cross_entropy)):

        def forward(loss_of: Callable = loss_of) -> object:
            with torch.no_grad():
                return loss_of(logits, target)

        def step(loss_of: Callable = loss_of) -> object:
            return torch.autograd.grad(loss_of(logits, target), logits)

        made[f"forward, {name}"], made[f"forward and backward, {name}"] = forward, step
    return made


def block_runs(logits: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """The two large kernels with tiles of other sizes and other numbers of warps."""
    spec, one = LossSpec(logits.shape[1], -100, 0.0, 0.0), torch.ones(1, device=logits.device)
    x = logits.detach()
    _, stats = kernels.whole_losses(x, target, spec)
    made: dict[str, Callable[[], object]] = {}
    for block, warps in itertools.product((*BLOCKS, kernels.MAX_BLOCK), (4, 8, 16)):
        if not 4 <= block // (32 * warps) <= 32:
            continue

        def at(call: Callable, block: int = block, warps: int = warps) -> Callable[[], object]:
            def run() -> object:
                before, kernels._block = kernels._block, lambda columns: (block, warps)
                try:
                    return call()
                finally:
                    kernels._block = before

            return run

        made[f"losses, {block} columns, {warps} warps"] = at(lambda: kernels.whole_losses(x, target, spec))
        made[f"gradient, {block} columns, {warps} warps"] = at(
            lambda: kernels.logits_grad(one, x, target, stats, None, x.shape[1], 0, spec)
        )
    return made


def host_microseconds(loss_of: Callable, dtype: torch.dtype, calls: int = 50, rounds: int = 9) -> tuple[float, float]:
    """Of a forward and a backward: the least of some rounds."""
    logits = torch.randn(SMALL, 1024, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.arange(SMALL, device="cuda")
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        forward = backward = 0.0
        for _ in range(calls):
            start = time.perf_counter()
            loss = loss_of(logits, target)
            middle = time.perf_counter()
            loss.backward()
            forward, backward = forward + middle - start, backward + time.perf_counter() - middle
            logits.grad = None
        found.append((1e6 * forward / calls, 1e6 * backward / calls))
    return min(f for f, _ in found), min(b for _, b in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="path without an ending; .csv and .md are written")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the timings of each case (default 4)")
    parser.add_argument("--blocks", action="store_true", help="time other tiles as well")
    options = parser.parse_args()
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{where}, {datetime.date.today()}", flush=True)
    rows = []
    with tpi.set_tp_invariant_mode(True):
        for dtype in DTYPES:
            host = {name: host_microseconds(f, dtype) for name, f in (("ours", ours), ("torch", F.cross_entropy))}
            for name, (forward, backward) in host.items():
                print(f"host, {dtype}, {name}: forward {forward:.0f} us, backward {backward:.0f} us", flush=True)
        for dtype, v, t in itertools.product(DTYPES, VOCABULARIES, ROWS):
            torch.manual_seed(0)
            logits = torch.empty(t, v, device="cuda", dtype=dtype).normal_(std=2.0).requires_grad_()
            target = torch.randint(v, (t,), device="cuda")
            check_bits(logits.detach(), target)
            moved = logits.numel() * logits.element_size()
            times = in_turn(runs(logits, target), options.seconds)
            row: dict[str, Any] = dict(dtype=str(dtype).removeprefix("torch."), tokens=t, vocabulary=v)
            for name, us in times.items():
                row[f"{name}, us"] = round(us, 1)
                row[f"{name}, GB/s"] = round((3 if "backward" in name else 1) * moved / us / 1e3)
            row |= {name: f"{error:.1e}" for name, error in errors(logits, target).items()}
            rows.append(row)
            print(row, flush=True)
            if options.blocks:
                for name, us in in_turn(block_runs(logits, target), options.seconds).items():
                    print(f"    {name}: {us:.0f} us", flush=True)
            del logits
            torch.cuda.empty_cache()
    if options.out:
        path = Path(options.out)
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        command = "python benchmarks/bench_cross_entropy.py --out OUT"
        lines = [f"# Cross-entropy, {where}, {datetime.date.today()}", "", f"`{command}`", ""]
        lines += ["| " + " | ".join(rows[0]) + " |", "| " + " | ".join("---" for _ in rows[0]) + " |"]
        lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
