"""The kernels of mixtures of experts against torch's, in one run on one GPU.

    python benchmarks/bench_experts.py --out benchmarks/results/experts_h200
    python benchmarks/bench_experts.py --tiles --seconds 2
    python benchmarks/bench_experts.py --block --out benchmarks/results/experts_block_h200
    torchrun --nproc-per-node 2 benchmarks/bench_experts.py --block --out benchmarks/results/experts_block_h200_2

bf16, random data, experts drawn at random for each token. Products: TFLOP/s of the bundled kernel, of torch's
grouped_mm, and of one dense product of as many rows by cuBLAS, in whose place the experts stand; `weights` is the time
of reading the weights alone, at the rate of a copy in the same run. Routing: microseconds of the bundled kernels and of
torch's operations. Every product that is timed is compared: with the dense kernel's bytes for some experts, and the
bytes of all tiles. Writes OUT.csv and OUT.md; a difference ends the script with status 1.

--tiles: the same products with several tile shapes instead, for `rows_tile` and `outer_tile`.
--block: the whole mixture of experts of Qwen3-30B-A3B instead, router included, forward and with backward: our
MixtureOfExperts, transformers' block after `parallelize`, and transformers' block itself with grouped_mm (which needs
transformers). Calls follow one another as in training. Milliseconds, launches of kernels and copies, and how often the
host waits for the GPU. Over several ranks: our MixtureOfExperts with its experts divided over them, tokens whole on
every rank or sharded (sequence parallelism), with the mode on and off, and on one rank; the slowest rank's times. With
the mode on, every rank compares the bytes of output and gradients with those that it computes alone; a difference, or
none with the mode off, ends the script with status 1.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import itertools
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from gpu_timing import Run, in_turn
from triton.errors import TritonError

from tp_invariant.kernels.experts import grouped, routing
from tp_invariant.kernels.experts.grouped_tma import GroupedTile
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig
from tp_invariant.kernels.rowwise.gated import gated_backward, gated_forward
from tp_invariant.kernels.rowwise.reference_gated import halves


class Model(NamedTuple):
    """inner: rows of an expert's weight in the product, which for [gate; up] are both."""

    name: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int


MODELS = (
    Model("Qwen3-30B-A3B", 8192, 2048, 2 * 768, 128, 8),
    Model("Qwen3-30B-A3B", 1024, 2048, 2 * 768, 128, 8),
    Model("Qwen3-30B-A3B, decoding", 16, 2048, 2 * 768, 128, 8),
    Model("Qwen3-30B-A3B, down", 8192, 768, 2048, 128, 8),
    Model("Mixtral-8x7B", 8192, 4096, 2 * 14336, 8, 2),
    Model("DeepSeek-V3, 32 experts", 1024, 7168, 2 * 2048, 32, 8),
    Model("gpt-oss-20b", 8192, 2880, 2 * 2880, 32, 4),
)
DEVICE = "cuda"
TILES = (
    MatmulConfig(16, 64, 128, 4, 4),
    MatmulConfig(16, 128, 128, 4, 3),
    MatmulConfig(32, 128, 64, 4, 4),
    MatmulConfig(64, 64, 64, 4, 4),
    MatmulConfig(64, 128, 64, 4, 4),
    MatmulConfig(64, 256, 64, 8, 3),
    MatmulConfig(128, 128, 64, 8, 3),
    MatmulConfig(128, 128, 64, 4, 4),
    MatmulConfig(128, 256, 64, 8, 3),
    GroupedTile(64, 128, 128, 4, 4),
    GroupedTile(64, 128, 64, 4, 4, programs=2),
    GroupedTile(128, 128, 32, 4, 6, programs=2),
    GroupedTile(128, 128, 64, 4, 3, programs=2, ahead=False),
    GroupedTile(128, 128, 64, 8, 5, halves=False),
    GroupedTile(128, 256, 64, 8, 3, halves=False),
    GroupedTile(128, 256, 64, 8, 4),
    GroupedTile(128, 256, 64, 8, 4, group_m=32),
    GroupedTile(128, 256, 64, 8, 4, ahead=False),
)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Products:
    """The three products of an expert's layer, and what they must be."""

    def __init__(self, model: Model) -> None:
        _, tokens, hidden, inner, experts, top_k = model
        scores = torch.rand(tokens, experts, device="cuda")
        _, index = routing.top_k(scores, top_k)
        counts = torch.bincount(index.view(-1), minlength=experts)
        self.offsets = F.pad(counts.cumsum(0), (1, 0)).int()
        self.rows = tokens * top_k
        self.flops = 2 * self.rows * hidden * inner
        self.x, self.dy, self.weight = randn(self.rows, hidden), randn(self.rows, inner), randn(experts, inner, hidden)
        ends = self.offsets[1:]
        self.runs = {
            "forward": (
                lambda config=None: grouped.grouped_matmul(self.x, self.weight.mT, self.offsets, config=config),
                lambda: F.grouped_mm(self.x, self.weight.mT, offs=ends),
                lambda: torch.mm(self.x, self.weight[0].t()),
            ),
            "dgrad": (
                lambda config=None: grouped.grouped_matmul(self.dy, self.weight, self.offsets, config=config),
                lambda: F.grouped_mm(self.dy, self.weight, offs=ends),
                lambda: torch.mm(self.dy, self.weight[0]),
            ),
            "wgrad": (
                lambda config=None: grouped.grouped_outer(self.dy, self.x, self.offsets, config=config),
                lambda: F.grouped_mm(self.dy.t(), self.x, offs=ends),
                lambda: torch.mm(self.dy.t(), self.x),
            ),
        }

    def differs(self) -> list[str]:
        """The products with an expert whose bytes are not those of the dense kernel."""
        found, offsets = [], self.offsets.tolist()
        got = {name: ours() for name, (ours, *_) in self.runs.items()}
        for expert in range(0, len(offsets) - 1, max(1, len(offsets) // 8)):
            rows = slice(*offsets[expert : expert + 2])
            if rows.start == rows.stop:
                continue
            x, dy, w = self.x[rows], self.dy[rows], self.weight[expert]
            wanted = {"forward": matmul(x, w.t()), "dgrad": matmul(dy, w), "wgrad": matmul(dy.t(), x)}
            for name, want in wanted.items():
                part = got[name][expert] if name == "wgrad" else got[name][rows]
                if not torch.equal(part.view(torch.int16), want.view(torch.int16)):
                    found.append(f"{name} of expert {expert}")
        return found


def copy_rate() -> float:
    """Bytes for each microsecond that a copy reads and writes."""
    source = randn(1 << 28)
    target = torch.empty_like(source)
    return 2 * source.nbytes / in_turn({"copy": lambda: target.copy_(source)}, 1.0)["copy"]


def product_lines(model: Model, seconds: float, rate: float) -> tuple[list[dict], list[str]]:
    products = Products(model)
    lines = []
    for name, contenders in products.runs.items():
        runs = dict(zip(("ours", "grouped_mm", "one dense"), contenders, strict=True))
        times = in_turn(runs, seconds)
        teraflops = {who: round(products.flops / us / 1e6) for who, us in times.items()}
        lines.append(
            {
                "model": model.name, "rows": products.rows, "pass": name, "us": round(times["ours"], 1), **teraflops,
                "ours / grouped_mm": round(times["grouped_mm"] / times["ours"], 3),
                "weights, us": round(products.weight.nbytes / rate, 1),
            }
        )  # fmt: skip
        print(lines[-1], flush=True)
    return lines, [f"{model}: {text}" for text in products.differs()]


def tile_lines(model: Model, seconds: float) -> list[str]:
    """Prints the TFLOP/s of every tile shape; returns those whose bytes differ."""
    products, found = Products(model), []
    for name, (ours, *_) in products.runs.items():
        runs, usual = {"usual": ours}, ours()
        for config in TILES:
            try:
                same = torch.equal(ours(config).view(torch.int16), usual.view(torch.int16))
            except TritonError:  # too much shared memory
                continue
            runs[str(config)] = lambda config=config, ours=ours: ours(config)
            if not same:
                found.append(f"{model}: {name} with {config}")
        for config, us in sorted(in_turn(runs, seconds).items(), key=lambda item: item[1]):
            print(
                f"{model.name} {products.rows} {name}: {products.flops / us / 1e6:6.0f} TFLOP/s  {config}", flush=True
            )
    return found


def routing_lines(model: Model, seconds: float) -> list[dict]:
    name, tokens, hidden, inner, experts, top_k = model
    scores, x, weights = torch.randn(tokens, experts, device="cuda"), randn(tokens, hidden), randn(tokens, top_k)
    order = torch.randperm(tokens * top_k, device="cuda")
    places, rows = order.argsort().view(tokens, top_k), randn(tokens * top_k, hidden)
    pair, dy = halves(randn(tokens * top_k, inner), interleaved=False), randn(tokens * top_k, inner // 2)
    contenders = {
        "top_k": (lambda: routing.top_k(scores, top_k), lambda: scores.topk(top_k)),
        "combine": (
            lambda: routing.combine(rows, weights, places),
            lambda: (rows[places] * weights.unsqueeze(-1)).sum(1),
        ),
        "drows": (
            lambda: routing.combine_backward_rows(x, weights, order),
            lambda: x[order // top_k] * weights.view(-1)[order].unsqueeze(1),
        ),
        "dweights": (
            lambda: routing.combine_backward_weights(x, rows, places),
            lambda: (rows[places] * x.unsqueeze(1)).sum(-1),
        ),
        "silu": (lambda: gated_forward(*pair, "silu"), lambda: F.silu(pair[0]) * pair[1]),
        "silu, backward": (lambda: gated_backward(dy, *pair, "silu"), None),
    }
    lines = []
    for what, (ours, torchs) in contenders.items():
        times = in_turn({"ours": ours, **({} if torchs is None else {"torch": torchs})}, seconds)
        lines.append(
            {"model": name, "tokens": tokens, "kernel": what, **{f"{who}, us": round(t, 1) for who, t in times.items()}}
        )
        print(lines[-1], flush=True)
    return lines


def blocks(model: Model) -> dict[str, torch.nn.Module]:
    """The same weights in each. transformers' experts take grouped_mm."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import tp_invariant

    def theirs() -> torch.nn.Module:
        config = Qwen3MoeConfig(
            hidden_size=model.hidden, moe_intermediate_size=model.inner // 2, num_experts=model.experts,
            num_experts_per_tok=model.top_k, norm_topk_prob=True, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=128, decoder_sparse_step=1, mlp_only_layers=[],
            experts_implementation="grouped_mm",
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config).to(DEVICE, torch.bfloat16)

    stock, converted = theirs(), theirs()
    own = tp_invariant.MixtureOfExperts(
        model.experts, model.hidden, model.inner // 2, tp_invariant.Routing(top_k=model.top_k), device=DEVICE,
        dtype=torch.bfloat16,
    )  # fmt: skip
    block = stock.model.layers[0].mlp
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02)
    own.load_state_dict(block.state_dict())
    converted.load_state_dict(stock.state_dict())
    tp_invariant.parallelize(converted, None)
    if block.experts.config._experts_implementation != "grouped_mm":
        sys.exit(f"transformers' experts run {block.experts.config._experts_implementation!r}, not 'grouped_mm'")
    return {"MixtureOfExperts": own, "parallelize": converted.model.layers[0].mlp, "transformers": block}


def back_to_back(run: Run, calls: int) -> list[float]:
    """Microseconds of a call among several that follow one another; as many groups of three as calls."""
    times = []
    for _ in range(calls):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        before.record()
        for _ in range(3):
            run()
        after.record()
        torch.cuda.synchronize()
        times.append(1e3 * before.elapsed_time(after) / 3)
    return times


def launches_and_waits(run: Run) -> tuple[int, int]:
    """What one call launches on the GPU, kernels and copies, and how often the host waits for it."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return launches, len(waits)


def block_lines(model: Model, seconds: float) -> list[dict]:
    import tp_invariant

    tp_invariant.set_tp_invariant_mode(True)
    x, dy = randn(1, model.tokens, model.hidden).requires_grad_(), randn(1, model.tokens, model.hidden)
    found = blocks(model)

    def forward(block: torch.nn.Module) -> None:
        with torch.no_grad():
            block(x)

    def step(block: torch.nn.Module) -> None:
        block.zero_grad()
        x.grad = None
        block(x).backward(dy)

    lines = []
    for what, call in (("forward", forward), ("forward and backward", step)):
        runs = {name: functools.partial(call, block) for name, block in found.items()}
        times = in_turn(runs, seconds, back_to_back)
        for name, us in times.items():
            launches, waits = launches_and_waits(runs[name])
            lines.append(
                {
                    "block": name, "tokens": model.tokens, "pass": what, "ms": round(us / 1e3, 3),
                    "transformers / this": round(times["transformers"] / us, 2), "launches": launches,
                    "host waits": waits,
                }
            )  # fmt: skip
            print(lines[-1], flush=True)
    return lines


def slowest(values: list[float]) -> list[float]:
    """Each value's largest over the ranks."""
    found = torch.tensor(values, device=DEVICE, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def rank_lines(model: Model) -> tuple[list[dict], list[str]]:
    """Lines, and what is wrong: the same on every rank."""
    import tp_invariant

    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, dy = randn(1, model.tokens, model.hidden), randn(1, model.tokens, model.hidden)
    for tensor in (x, dy):
        dist.broadcast(tensor, 0)

    def block(**options: object) -> torch.nn.Module:
        torch.manual_seed(0)
        return tp_invariant.MixtureOfExperts(
            model.experts, model.hidden, model.inner // 2, tp_invariant.Routing(top_k=model.top_k), device=DEVICE,
            dtype=torch.bfloat16, **options,
        )  # fmt: skip

    def of_rank(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.detach().chunk(ranks, dim)[rank]

    whole = dict(tp_group=dist.group.WORLD, expert_parallel_group=dist.group.WORLD)
    forms = {
        "one rank": (block(), x, dy),
        "tokens whole": (block(**whole), x, dy),
        "tokens sharded": (block(**whole, sequence_parallel=True, sequence_dim=1), of_rank(x, 1), of_rank(dy, 1)),
    }

    def run(name: str, mode: bool, backward: bool = True) -> list[torch.Tensor]:
        """Output and gradients, of the tokens and the experts of this rank."""
        layer, tokens, gradient = forms[name]
        with tp_invariant.set_tp_invariant_mode(mode), torch.set_grad_enabled(backward):
            if not backward:
                return [layer(tokens)]
            layer.zero_grad()
            tokens = tokens.detach().requires_grad_()
            y = layer(tokens)
            y.backward(gradient)
        return [y, tokens.grad, *(p.grad for p in layer.parameters())]

    def same(name: str, mode: bool) -> bool:
        wanted = run("one rank", True)
        if name != "one rank":  # the router's gradient is whole on every rank
            dims = (*((1, 1) if name == "tokens sharded" else (None, None)), None, 0, 0)
            wanted = [t if dim is None else of_rank(t, dim) for t, dim in zip(wanted, dims, strict=True)]
        differ = [
            not torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(run(name, mode), wanted, strict=True)
        ]
        return not any(slowest([float(d) for d in differ]))

    lines, wrong = [], []
    kinds = [("one rank", True), *itertools.product(list(forms)[1:], (True, False))]
    for what, backward in (("forward", False), ("forward and backward", True)):
        runs = {kind: functools.partial(run, *kind, backward) for kind in kinds}
        times: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
        for _ in range(5):  # as many on every rank
            for kind, call in runs.items():
                dist.barrier()
                times[kind] += back_to_back(call, 3)
        medians = dict(zip(kinds, slowest([statistics.median(found) for found in times.values()]), strict=True))
        for (name, mode), us in medians.items():
            launches, waits = launches_and_waits(runs[name, mode])
            lines.append(
                {
                    "block": name, "mode": "on" if mode else "off", "ranks": 1 if name == "one rank" else ranks,
                    "tokens": model.tokens, "pass": what, "ms": round(us / 1e3, 3),
                    "one rank / this": round(medians["one rank", True] / us, 2), "launches": launches,
                    "host waits": waits, "bytes of one rank": same(name, mode),
                }
            )  # fmt: skip
            if lines[-1]["bytes of one rank"] != mode:
                wrong.append(f"{name}, mode {lines[-1]['mode']}")
            if rank == 0:
                print(lines[-1], flush=True)
    return lines, wrong


def table(lines: list[dict]) -> list[str]:
    names = list(lines[0])
    return [
        "| " + " | ".join(names) + " |",
        "|" + " --- |" * len(names),
        *("| " + " | ".join(str(line.get(name, "")) for name in names) + " |" for line in lines),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="path without an ending; .csv and .md are written")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each comparison (default 1)")
    parser.add_argument("--tiles", action="store_true", help="tile shapes instead of contenders")
    parser.add_argument("--block", action="store_true", help="the whole mixture instead of its parts")
    parser.add_argument("--models", nargs="*", help="only those whose name has one of these")
    options = parser.parse_args()
    chosen = [m for m in MODELS if not options.models or any(part in m.name for part in options.models)]
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.block and ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        lines, wrong = rank_lines(MODELS[0])
        tables = [lines] if dist.get_rank() == 0 else []
        dist.destroy_process_group()
    elif options.block:
        tables, wrong = [block_lines(MODELS[0], options.seconds)], []
    elif options.tiles:
        tables, wrong = [], [text for model in chosen for text in tile_lines(model, options.seconds)]
    else:
        rate, products, wrong, routes = copy_rate(), [], [], []
        for model in chosen:
            lines, differences = product_lines(model, options.seconds, rate)
            products, wrong = products + lines, wrong + differences
            routes += routing_lines(model, options.seconds)
        tables = [products, routes]
    if options.out and tables:
        write(Path(options.out), tables)
    if wrong:
        sys.exit("bytes differ: " + "; ".join(wrong))


def write(out: Path, tables: list[list[dict]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, tables[0][0])
        writer.writeheader()
        writer.writerows(tables[0])
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if "transformers" in sys.modules:
        versions += f", transformers {sys.modules['transformers'].__version__}"
    head = (
        f"{torch.cuda.get_device_name()}, {versions}, {datetime.date.today()}; bf16, TFLOP/s where no unit is named; "
        f"`python {' '.join(sys.argv)}`"
    )
    out.with_suffix(".md").write_text("\n".join([head, *itertools.chain(*(["", *table(t)] for t in tables))]) + "\n")


if __name__ == "__main__":
    main()
