"""A whole model's forward: plain torch, tpi.batch_invariant() and pinned tiles, in one run on one GPU.

    python benchmarks/bench_batch_invariant.py --out benchmarks/results/batch_invariant_h200

bf16, Qwen3-0.6B's sizes from examples/train_hf.py, random weights and tokens, causal, no mask, no cache, no gradients;
batch 1, 4 and 16 of 512 and 2048 tokens, logits for all of them. Three ways, timed in turn, round after round, so that
clocks and heat fall on all:

    torch           the model as it is
    tp_invariant    inside tpi.batch_invariant(): products, means and softmax routed, attention its own kernel
    pinned          batch_invariant_ops' published configuration: aten's mm, addmm, _log_softmax and mean.dim
                    re-registered through torch.library, products on pointer kernels of 128 x 128 x 64 tiles, 8 warps, 3
                    stages, rows on the same kernels as tp_invariant's; attention is torch's

A time is that of a forward, the mean of CALLS in a row between two events on the GPU, so the host's launches count
where the GPU waits for them. "host" is the time until a call returns; a GPU that is far behind may hold it up. The host
of a small forward is what is measured, and a shared machine's is noisy: so the turns are short and many.
"bits" says whether the first sequence of the batch gets the logits that it gets alone, byte for byte. Writes OUT.csv
and OUT.md. With --small a short run of a tiny model, in Triton's interpreter where there is no GPU, that shows only
that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which must be there when triton is imported
import triton
from bench_gemm import BASELINE, geometric_mean
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.examples.train_hf import PRESETS
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.rowwise.softmax import row_sums, softmax

SHAPES = [(batch, tokens) for tokens in (512, 2048) for batch in (1, 4, 16)]
SMALL_SHAPES = [(1, 8), (2, 8)]
CALLS = 3
OURS, TORCH, PINNED = "tp_invariant", "torch", "pinned"


# --- the baseline ---------------------------------------------------------------------------------------------------


def pinned_mm(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b, config=BASELINE)


def pinned_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b, bias=bias, config=BASELINE)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Along the last dim."""
    out_dtype = torch.float32 if half_to_float else x.dtype
    return softmax(x.reshape(-1, x.shape[-1]), log=True, out_dtype=out_dtype).view(x.shape)


def mean(x: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Over the last dim."""
    if [d % x.dim() for d in dim] != [x.dim() - 1]:
        raise NotImplementedError(f"mean over {dim} of {x.dim()} dims: this baseline takes the last one alone")
    y = row_sums(x.reshape(-1, x.shape[-1]), divisor=x.shape[-1], out_dtype=dtype or x.dtype).view(x.shape[:-1])
    return y.unsqueeze(-1) if keepdim else y


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """The registrations, process-wide while it lasts."""
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    functions = {"mm": pinned_mm, "addmm": pinned_addmm, "_log_softmax": log_softmax, "mean.dim": mean}
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
            for name, function in functions.items():
                library.impl(name, function, key)
        yield


# --- runs -----------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    TORCH: contextlib.nullcontext,
    OURS: tpi.batch_invariant,
    PINNED: pinned,
}


def build(options: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    """tokens [B, S] -> logits [B, S, V]."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = PRESETS[options.preset]
    config = AutoConfig.for_model(kind, **sizes, use_cache=False)
    with torch.device(options.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=options.dtype).eval()
    return lambda tokens: model(input_ids=tokens).logits


def milliseconds(fn: Callable[[], object], device: str) -> tuple[float, float]:
    """Of a call, the mean of CALLS in a row: between two events on the GPU, and until it returns."""
    fn()  # the way is another than in the last turn
    if device == "cpu":
        start = time.perf_counter()
        fn()
        return 2 * (1e3 * (time.perf_counter() - start),)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    first.record()
    for _ in range(CALLS):
        fn()
    last.record()
    host = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return first.elapsed_time(last) / CALLS, host / CALLS


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    forward, vocabulary = build(options), PRESETS[options.preset][1]["vocab_size"]
    rows = []
    for batch, length in SMALL_SHAPES if options.small else SHAPES:
        tokens = torch.randint(vocabulary, (batch, length), device=options.device)
        row: dict[str, Any] = {"batch": batch, "tokens": length}
        bits = {}
        for name, way in WAYS.items():  # compiles and warms up, too
            with way():
                alone = forward(tokens[:1])
                bits[name] = torch.equal(forward(tokens)[:1].view(torch.uint8), alone.view(torch.uint8))
            del alone
        timed: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        order = list(WAYS)
        stop = time.monotonic() + options.seconds
        while time.monotonic() < stop or len(timed[TORCH]) < 3:
            for name in order:
                with WAYS[name]():
                    timed[name].append(milliseconds(lambda tokens=tokens: forward(tokens), options.device))
            order.append(order.pop(0))
        row["rounds"] = len(timed[TORCH])
        for name, pairs in timed.items():
            times, host = map(sorted, zip(*pairs, strict=True))
            for label, q in (("p20", 0.2), ("ms", 0.5), ("p80", 0.8)):
                row[f"{name}_{label}"] = round(times[int(q * (len(times) - 1))], 3)
            row[f"{name}_host"] = round(statistics.median(host), 3)
        for other in (TORCH, PINNED):
            row[f"{OURS}_vs_{other}"] = round(row[f"{other}_ms"] / row[f"{OURS}_ms"], 3)
        row |= {f"{name}_bits": "same" if same else "differ" for name, same in bits.items()}
        rows.append(row)
        print(row, flush=True)
    return rows


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """OUT.csv with all columns, OUT.md with a table."""
    import transformers

    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    chip = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    means = [
        f"{geometric_mean([row[f'{OURS}_vs_{other}'] for row in rows]):.3f}x the speed of {other}"
        for other in (TORCH, PINNED)
    ]
    times = [
        " | ".join(
            f"{row[f'{name}_ms']} ({row[f'{name}_p20']} to {row[f'{name}_p80']}; {row[f'{name}_host']})"
            for name in WAYS
        )
        for row in rows
    ]
    lines = [
        f"{chip}, torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}, "
        f"{datetime.date.today()}; {options.preset}, {options.dtype}, forward, random weights and tokens, medians; "
        f"`python {' '.join(sys.argv)}`",
        "",
        f"batch_invariant(), geometric means of {len(rows)} shapes: {', '.join(means)}.",
        "",
        "Milliseconds (20th to 80th percentile; the host's), speed of batch_invariant() against the other two, and "
        "whether a sequence's bits in the batch are those that it has alone:",
        "",
        f"| batch | tokens | {' | '.join(WAYS)} | vs torch | vs pinned | {' | '.join(f'bits, {n}' for n in WAYS)} |",
        "|" + " --- |" * (4 + 2 * len(WAYS)),
        *(
            f"| {row['batch']} | {row['tokens']} | {cells} | {row[f'{OURS}_vs_{TORCH}']} | "
            f"{row[f'{OURS}_vs_{PINNED}']} | {' | '.join(row[f'{name}_bits'] for name in WAYS)} |"
            for row, cells in zip(rows, times, strict=True)
        ),
    ]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(lines[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="path without an ending; .csv and .md are written")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="default qwen3-0.6b; with --small qwen3-tiny")
    parser.add_argument("--seconds", type=float, default=12, help="for each shape (default 12)")
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU too, to see that the script works")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.small:
        parser.error("there is no GPU here: only --small runs on a CPU")
    options.preset = options.preset or ("qwen3-tiny" if options.small else "qwen3-0.6b")
    # Triton's interpreter multiplies no bf16
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.no_grad():
        write(measure(options), options)


if __name__ == "__main__":
    main()
