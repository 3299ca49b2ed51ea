"""token_log_probs and linear_cross_entropy against logits that are held: time, memory above the inputs, and the error.

    python benchmarks/bench_token_log_probs.py --tokens 32768 --features 1024 --out benchmarks/results/token_log_probs
    python benchmarks/bench_token_log_probs.py --device cpu --tokens 512 --features 128 --vocabulary 8192

Contenders: this library's product and loss apart, torch's (cuBLAS, and log_softmax in fp32), and Liger's fused
cross-entropy where liger_kernel is installed. bfloat16. Each in turn, medians; memory is the peak that torch's
allocator reports. Checks that the bits are those of the product and the loss apart. Writes OUT.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import tp_invariant as tpi


def contenders(hidden: Tensor, head: tpi.Linear, ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    weight = head.weight

    def apart() -> Tensor:
        return 0.0 - tpi.vocab_parallel_cross_entropy(head(hidden), ids, tp_group=None, reduction="none")

    def torchs() -> Tensor:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    made = {
        "token_log_probs": lambda: tpi.token_log_probs(hidden, head, ids),
        "apart": apart,
        "torch": torchs,
        "linear_cross_entropy": lambda: tpi.linear_cross_entropy(hidden, head, ids),
        "torch's cross_entropy": lambda: F.cross_entropy(F.linear(hidden, weight), ids),
    }
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        print("liger_kernel is not installed: left out")
    else:
        loss = LigerFusedLinearCrossEntropyLoss()
        made["Liger's fused cross-entropy"] = lambda: loss(weight, hidden, ids)
    return made


def measured(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds, and the most memory above what was there, in MiB (0 on a CPU)."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    result = run()
    if on_gpu:
        torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - start)
    del result
    return took, (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    head = tpi.Linear(args.features, args.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(args.tokens, args.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, args.vocabulary, (args.tokens,), device=device)
    tpi.set_tp_invariant_mode(True)
    made = contenders(hidden, head, ids)

    with torch.no_grad():
        few = hidden[:64], head, ids[:64]
        ours, whole = tpi.token_log_probs(*few), contenders(*few)["apart"]()
        if ours.view(torch.int32).tolist() != whole.view(torch.int32).tolist():
            raise AssertionError("token_log_probs differs from the product and the loss apart")
        exact = (few[0].double() @ head.weight.double().t()).log_softmax(-1)
        exact = exact.gather(-1, few[2].unsqueeze(-1)).squeeze(-1)
        errors = [float((x.double() - exact).abs().max()) for x in (ours, contenders(*few)["torch"]())]

    def step(run: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run().sum(), (hidden, head.weight))

    def forward(run: Callable[[], Tensor]) -> Callable[[], object]:
        return torch.no_grad()(run)

    rows = []
    for kind, of in (("forward", forward), ("forward and backward", step)):
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for turn in range(args.repeats + 1):
            for name, run in made.items():
                try:
                    results[name].append(measured(of(run), device))
                except torch.cuda.OutOfMemoryError:
                    results[name].append((float("inf"), float("inf")))
            if not turn:  # which compiled
                results = {name: [] for name in made}
        for name, found in results.items():
            took, memory = (statistics.median(values) for values in zip(*found, strict=True))
            rows.append(f"| {kind} | {name} | {took:.2f} | {memory:.0f} |")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    lines = [
        f"`python benchmarks/bench_token_log_probs.py --tokens {args.tokens} --features {args.features} --vocabulary "
        f"{args.vocabulary} --device {args.device}`, bfloat16, {where}, torch {torch.__version__}, Triton "
        f"{triton.__version__}. Largest error of 64 log-probabilities against float64: {errors[0]:.3g}, of torch's "
        f"{errors[1]:.3g}. The bits are those of the product and the loss apart.",
        "",
        "| | | ms | MiB above the inputs |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    print("\n".join(lines))
    if args.out:
        args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
