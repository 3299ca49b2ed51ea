"""tpi.attention's kernel against torch's SDPA backends, in one run on one GPU.

    python benchmarks/bench_attention.py --out benchmarks/results/attention_h200
    python benchmarks/bench_attention.py --random 40 --seed 1 --seconds 150 --json FILE

bf16, causal, head size 128, 32 query and 8 key heads, batch 1, random data: forward, and forward with backward, of 2048
to 16384 tokens; and a decode step of one query token against 8192 cached ones at batch 1 to 64, called from Python,
replayed from a CUDA graph, and as a model has it: the steps of several layers, each with a cache of its own, in one
graph, whose launch (some 4 us) they share. All are timed in turn, every other round backwards, so that clocks and heat
fall on all. TFLOP/s count the products that a causal mask leaves; a decode step's rate is the bytes of k and v over its
time, beside that of a device-to-device copy in the same run, which counts bytes read and written. The memory-efficient
backend takes no shared key heads: it gets them repeated, outside of the timed part. --chunks 256 512 1024 has ours also
with its keys cut at other places than they are (attention_spec.CHUNK), forward and decode: what that costs and gains.
Writes OUT.csv, OUT.md and OUT.png. With --small a short run in small sizes, on a CPU too, that shows only that the
script works. --random: shapes that are drawn (random_attention.py); --help has their ranges.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.deterministic
import triton
from gpu_timing import in_graph
from random_shapes import add_options, check_options
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tp_invariant as tpi
from tp_invariant.kernels.attention import forward as kernels

TOKENS = (2048, 4096, 8192, 16384)
BATCHES = (1, 4, 16, 64)
CACHED = 8192
LAYERS = 16  # in a graph at batch 1, fewer at larger ones
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
OURS = "tp_invariant"


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.utils.deterministic.fill_uninitialized_memory = False  # would write every new tensor once more
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def sdpa(backend: SDPBackend, strictly: bool = False) -> Callable[..., Callable[[], object]]:
    """run(q, k, v, causal, grad) -> what to time; grad None is forward alone. mask: in place of causal."""
    repeats = backend == SDPBackend.EFFICIENT_ATTENTION

    def run(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, grad: Tensor | None, mask: Tensor | None = None
    ) -> Callable[[], object]:
        if repeats:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).detach() for x in (k, v))
            k, v = (x.requires_grad_(grad is not None) for x in (k, v))

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal and mask is None, enable_gqa=not repeats
            )

        def once() -> list[Tensor]:
            with sdpa_kernel(backend), deterministic() if strictly else contextlib.nullcontext():
                out = attend()
                return [out] if grad is None else [out, *torch.autograd.grad(out, (q, k, v), grad)]

        return once

    return run


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool, grad: Tensor | None) -> Callable[[], object]:
    def once() -> None:
        out = tpi.attention(q, k, v, causal=causal)
        if grad is not None:
            torch.autograd.grad(out, (q, k, v), grad)

    return once


def cut_at(chunk: int) -> Callable[..., Callable[[], object]]:
    """ours, its keys cut at multiples of `chunk`; forward alone."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, grad: Tensor | None) -> Callable[[], object]:
        def once() -> None:
            before, kernels.CHUNK = kernels.CHUNK, chunk
            try:
                tpi.attention(q, k, v, causal=causal)
            finally:
                kernels.CHUNK = before

        return once

    return run


def captured(runs: dict[str, list[Callable[[], object]]]) -> dict[str, Callable[[], object]]:
    """in_graph of each that can be captured."""
    graphs = {}
    for name, fns in runs.items():
        try:
            graphs[name] = in_graph(fns)
        except RuntimeError as error:
            print(f"{name} refuses: {str(error).splitlines()[0]}", flush=True)
    return graphs


def contenders(device: str) -> dict[str, Callable[..., Callable[[], object]]]:
    if device == "cpu":
        return {OURS: ours, "math": sdpa(SDPBackend.MATH)}
    return {
        OURS: ours,
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "flash deterministic": sdpa(SDPBackend.FLASH_ATTENTION, strictly=True),
        "memory-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "memory-efficient deterministic": sdpa(SDPBackend.EFFICIENT_ATTENTION, strictly=True),
    }


def microseconds(fn: Callable[[], object], milliseconds: int, device: str) -> list[float]:
    """20th, 50th and 80th percentile; CUDA events around single calls, the L2 cache cleared between them."""
    if device == "cpu":
        times = []
        for _ in range(5):
            start = time.perf_counter()
            fn()
            times.append(1e6 * (time.perf_counter() - start))
        return [sorted(times)[i] for i in (1, 2, 3)]
    return [1e3 * t for t in triton.testing.do_bench(fn, warmup=5, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])]


def timed(runs: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, list[float]]:
    """name -> medians over rounds of the three percentiles; a backend that refuses the call is left out, by name."""
    rounds: dict[str, list[list[float]]] = {}
    for number in range(options.rounds):
        for name, fn in [*runs.items()][:: -1 if number % 2 else 1]:
            if number and name not in rounds:
                continue
            try:
                rounds.setdefault(name, []).append(microseconds(fn, options.milliseconds, options.device))
            except RuntimeError as error:
                del rounds[name]
                print(f"{name} refuses: {str(error).splitlines()[0]}", flush=True)
    return {name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in rounds.items()}


def operands(batch: int, queries: int, keys: int, options: argparse.Namespace, grads: bool) -> list[Tensor]:
    """q, k, v, grad laid out as models do: [B, S, heads, D] transposed; cached keys as caches do: contiguous."""
    made = []
    for tokens, heads in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (queries, HEADS)):
        x = torch.randn(batch, tokens, heads, HEAD_DIM, device=options.device, dtype=options.dtype).transpose(1, 2)
        made.append((x if queries == keys else x.contiguous()).requires_grad_(grads and len(made) < 3))
    return made


def copy_rate(options: argparse.Namespace) -> float:
    """TB/s of a copy, bytes read and written."""
    source = torch.randn(1 << (20 if options.small else 29), device=options.device, dtype=options.dtype)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / microseconds(lambda: target.copy_(source), options.milliseconds, options.device)[1] / 1e6


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    cuts = {f"{OURS}, chunks of {chunk}": cut_at(chunk) for chunk in options.chunks}

    def add(
        case: str, size: int, work: float, unit: str, runs: dict[str, Callable[[], object]], times: int = 1
    ) -> None:
        """work: floating-point operations or bytes; both over microseconds are 1e-6 of the unit. A run does it `times`
        times."""
        for name, found in timed(runs, options).items():
            p20, us, p80 = (t / times for t in found)
            rate = round(work / us / 1e6, 2 if unit == "TB/s" else 1)
            us_of = {"p20": round(p20, 1), "us": round(us, 1), "p80": round(p80, 1)}
            rows.append({"case": case, "size": size, "name": name, **us_of, "rate": rate, "unit": unit})
            print(rows[-1], flush=True)

    every = contenders(options.device)
    ways = {**every, **cuts}
    for tokens in (64, 256) if options.small else TOKENS:
        q, k, v, grad = operands(1, tokens, tokens, options, grads=True)
        flops = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
        with torch.no_grad():
            forward = {name: run(q, k, v, True, None) for name, run in ways.items()}
            add("forward", tokens, flops, "TFLOP/s", forward)
        add("both", tokens, 3.5 * flops, "TFLOP/s", {name: run(q, k, v, True, grad) for name, run in every.items()})
    for batch in (1, 2) if options.small else BATCHES:
        q, k, v, _ = operands(batch, 1, options.cached, options, grads=False)
        moved = 2 * k.numel() * k.element_size()
        with torch.no_grad():
            eager = {name: run(q, k, v, False, None) for name, run in ways.items()}
            add("decode", batch, moved, "TB/s", eager)
            if options.device == "cuda":
                add("decode in a graph", batch, moved, "TB/s", captured({n: [fn] for n, fn in eager.items()}))
                layers = max(1, LAYERS // batch)
                caches = [operands(batch, 1, options.cached, options, grads=False)[1:3] for _ in range(layers)]
                steps = {name: [run(q, *cache, False, None) for cache in caches] for name, run in ways.items()}
                add("decode of layers in a graph", batch, moved, "TB/s", captured(steps), layers)
    return rows


TITLES = {
    "forward": "Forward, causal",
    "both": "Forward and backward, causal",
    "decode": "Decode step, {} cached tokens, called from Python",
    "decode in a graph": "Decode step, {} cached tokens, replayed from a CUDA graph",
    "decode of layers in a graph": "Decode step of a layer, {} cached tokens, of several replayed from one CUDA graph",
}


def table(case: str, rows: list[dict], cached: int) -> list[str]:
    names = list(dict.fromkeys(row["name"] for row in rows))
    unit, size = rows[0]["unit"], "batch" if case.startswith("decode") else "tokens"
    cells = {(row["size"], row["name"]): f"{row['rate']} ({row['us']} us)" for row in rows}
    return [
        f"{TITLES[case].format(cached)}: {unit} (median time)",
        "",
        f"| {size} | " + " | ".join(names) + " |",
        "|" + " --- |" * (1 + len(names)),
        *(
            f"| {s} | " + " | ".join(cells.get((s, name), "refuses") for name in names) + " |"
            for s in dict.fromkeys(row["size"] for row in rows)
        ),
        "",
    ]


def plot(rows: list[dict], out: Path, cached: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = pyplot.subplots(1, len(measured), figsize=(5 * len(measured), 4.5))
    for axis, case in zip(axes, measured, strict=True):
        title, chosen = TITLES[case], [row for row in rows if row["case"] == case]
        for name in dict.fromkeys(row["name"] for row in chosen):
            own = [row for row in chosen if row["name"] == name]
            width = 2.5 if name == OURS else 1.2
            axis.plot(
                [str(row["size"]) for row in own], [row["rate"] for row in own], "o-", label=name, linewidth=width
            )
        by = "batch" if case.startswith("decode") else "tokens"
        axis.set(title=title.format(cached), ylabel=chosen[0]["unit"], xlabel=by)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out.with_suffix(".png"), dpi=120)


def main() -> None:
    import random_attention  # which imports this module

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="path without an ending; .csv, .md and .png are written")
    parser.add_argument("--milliseconds", type=int, default=50, help="for each timing (default 50)")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each (default 3)")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="cut the keys here too, say 256 512 1024")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU too, to see that the script works")
    add_options(parser, random_attention.RANGES)
    options = parser.parse_args()
    check_options(parser, options)
    if options.random is not None:
        sys.exit(random_attention.main(options))
    step = kernels.forward_tile(HEAD_DIM, torch.bfloat16).keys
    if wrong := [chunk for chunk in options.chunks if chunk < step or chunk % step]:
        parser.error(f"--chunks {wrong}: a chunk is a multiple of {step} keys, the kernels' step")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cpu" and not options.small:
        parser.error("there is no GPU here: only --small runs on a CPU")
    options.dtype, options.cached = torch.bfloat16, 256 if options.small else CACHED
    torch.manual_seed(0)
    copied = copy_rate(options)
    rows = measure(options)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    chip = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    lines = [
        f"{chip}, torch {torch.__version__}, triton {triton.__version__}, {datetime.date.today()}; bf16, {HEADS} query "
        f"and {KV_HEADS} key heads of {HEAD_DIM}, random data, chunks of {kernels.CHUNK} keys, median of medians; "
        f"`python {' '.join(sys.argv)}`",
        "",
        f"A copy in the same run: {copied:.2f} TB/s, bytes read and written.",
        "",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        lines += table(case, [row for row in rows if row["case"] == case], options.cached)
    out.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    plot(rows, out, options.cached)


if __name__ == "__main__":
    main()
