"""Layers of a Qwen3-8B under tensor parallelism: ordinary, gathering everything, and this library, in one run.

    torchrun --nproc-per-node 4 benchmarks/bench_layer.py --out benchmarks/results/layer_h200
    torchrun --nproc-per-node 2 benchmarks/bench_layer.py --small --device cpu --out /tmp/layer      # a dry run

bf16, random data. Parts: the attention projections (QKV, O), the gated MLP, and the whole layer, with each contender's
own attention (stock: the fastest SDPA; ours: the invariant one) and with the fastest SDPA for all. Contenders are timed
in turn, round after round, after a barrier, several layers in a row; times and bytes moved are per layer, peak memory
(beyond weights, x and dy, without the buffers that copy engines fill) is that of all of them, and a time is the slowest
rank's. `bits`: whether all results of all ranks are byte for byte what TP=1 computes in the same run, alone and beside
a second stream that keeps the GPU busy.
Decoding: a forward of few tokens without gradients, eagerly and in a CUDA graph, gathered weights kept. With --graph
forward and backward are captured as one graph, too, and each layer's as graphs of its own by graphs.graph_layers (bits
are then the replay's, memory the eager call's).
Writes OUT.csv, OUT.md, OUT.png where matplotlib is there, and with --profile OUT.profile.txt.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_layer_runs as runs
import torch
import torch.distributed as dist
from bench_layer_contenders import (
    CONTENDERS,
    PARTS,
    QWEN3_8B,
    SMALL,
    Part,
    Sizes,
    Stack,
    as_contender,
    fast_attention,
    invariant_attention,
)
from torch import Tensor

from tp_invariant.comm import peer_memory
from tp_invariant.comm.collectives import Group, resolve_group


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="path without an ending")
    parser.add_argument("--tp", type=int, nargs="+", help="degrees that divide the ranks (default: their number)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192], help="of forward and training")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64], help="tokens of decoding; none: skip it")
    parser.add_argument("--sequence", type=int, default=8192, help="longest sequence; more tokens make a batch")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sp", type=int, nargs="+", choices=(0, 1), default=[1, 0], help="sequence parallelism")
    parser.add_argument("--layers", type=int, default=4, help="of the same part in a row")
    parser.add_argument("--transport", choices=peer_memory.TRANSPORTS, default="auto", help="of tp_invariant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inner", type=int, default=2, help="calls in a row for one time")
    parser.add_argument("--graph", action="store_true", help="training captured in CUDA graphs, too")
    parser.add_argument("--profile", action="store_true", help="where the time goes: one table for each contender")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.small:
        options.tokens, options.decode, options.rounds, options.inner, options.layers = [32], [2], 1, 1, 2
    return options


class Bench:
    """One run at one degree on this rank."""

    def __init__(self, options: argparse.Namespace, group: Group, device: torch.device) -> None:
        self.options, self.group, self.device = options, group, device
        self.sizes: Sizes = SMALL if options.small else QWEN3_8B
        self.place: dict[str, Any] = dict(
            device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16
        )
        self.weights = self.sizes.weights(self.place)
        self.rows: list[dict[str, Any]] = []
        self.profiles: list[str] = []

    def data(self, tokens: int) -> tuple[Tensor, Tensor]:
        """x and dy [S, B, hidden], all tokens, the same on every rank."""
        length = min(tokens, self.options.sequence)
        generator = torch.Generator(self.device).manual_seed(2)
        shape = (length, tokens // length, self.sizes.hidden)
        x, dy = (torch.randn(shape, generator=generator, **self.place) for _ in range(2))
        return x, dy

    def stack(self, part: str, contender: str, group: Group, sp: bool, same_attention: bool) -> Stack:
        fast = same_attention or contender == "stock"
        attention = fast_attention if fast else invariant_attention
        made = (
            Part(part, contender, self.sizes, group, sp, self.weights, attention) for _ in range(self.options.layers)
        )
        return Stack(list(made))

    def measure(self, name: str, part: str, tokens: int, sp: bool, what: str, same_attention: bool = False) -> None:
        """One row for each contender: `what` is forward, training or decode, the last two maybe with ", graph"; or
        "training, graphed layers"."""
        x, dy = self.data(tokens)
        alone, keep = Group(None, 0, 1), 100 if what.startswith("decode") else 0

        def call_of(contender: str, group: Group) -> tuple[Stack, Callable[[], Any]]:
            built = self.stack(part, contender, group, sp, same_attention)
            mine = [t.chunk(group.size)[group.rank].clone() if built.sp else t for t in (x, dy)]
            if what.startswith("training"):
                return built, runs.training_call(built, mine[0].requires_grad_(), mine[1])
            return built, runs.forward_call(built, mine[0])

        with as_contender("tp_invariant"):
            reference = call_of("tp_invariant", alone)[1]()
        calls, rows = {}, {}
        for contender in CONTENDERS:
            built, call = call_of(contender, self.group)
            want = runs.own_part(reference, list(built.local), self.group, built.sp)
            peak, moved, copied = runs.cost(contender, call, keep, self.device)
            if what.endswith("graph"):
                with as_contender(contender, keep):
                    call = runs.in_graph(call)
            elif what.endswith("layers"):
                with as_contender(contender):
                    call = runs.graph_layers(built, call)
            bits = {}
            if not same_attention:  # the fastest attention has bits of its own, ours or not
                busy = self.device.type == "cuda"
                check = [contender, call, want, keep, self.device, self.group]
                bits = dict(bits=runs.same_bits(*check, False), bits_busy=runs.same_bits(*check, True) if busy else "")
            layers = self.options.layers
            rows[contender] = dict(peak_MB=round(peak, 1), moved_MB=round(moved / layers, 2))
            rows[contender] |= dict(copied_MB=round(copied / layers, 2), **bits)
            calls[contender] = call
        del reference, want
        taken = runs.times(calls, keep, self.options.rounds, self.options.inner, self.device, self.group)
        stock = runs.slowest(taken["stock"], self.device, self.group)[1] / self.options.layers
        for contender in CONTENDERS:
            slowest = runs.slowest(taken[contender], self.device, self.group)
            p20, us, p80 = (t / self.options.layers for t in slowest)
            row = dict(part=name, tp=self.group.size, sp=int(sp), tokens=tokens, what=what, contender=contender)
            row |= dict(p20=round(p20, 1), us=round(us, 1), p80=round(p80, 1), vs_stock=round(us / stock, 3))
            row |= dict(bits="", bits_busy="") | rows[contender]
            self.rows.append(row)
            if dist.get_rank() == 0:
                print(*row.values(), sep="  ", flush=True)
        if self.options.profile and what in ("forward", "training"):
            self.profile(f"{name} TP={self.group.size} SP={int(sp)} {tokens} tokens {what}", calls)
        runs.forget()

    def profile(self, title: str, calls: dict[str, Callable[[], Any]]) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        by = "self_cpu_time_total"
        if self.device.type == "cuda":
            activities, by = [*activities, torch.profiler.ProfilerActivity.CUDA], "self_cuda_time_total"
        for contender, call in calls.items():
            with as_contender(contender):
                call()
                runs.synchronize(self.device)
                with torch.profiler.profile(activities=activities) as profiler:
                    for _ in range(3):
                        call()
                    runs.synchronize(self.device)
            table = profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=80)
            self.profiles.append(f"{title}: {contender}, 3 calls\n{table}")

    def run(self) -> None:
        o = self.options
        named = [(part, part, False) for part in o.parts]
        named += [("layer, same attention", "layer", True)] if "layer" in o.parts else []
        passes = ["forward", "training", *(["training, graph", "training, graphed layers"] if o.graph else [])]
        for tokens, sp, (name, part, same), what in itertools.product(o.tokens, o.sp, named, passes):
            self.measure(name, part, tokens, bool(sp), what, same)
        whats = ("decode", "decode, graph") if self.device.type == "cuda" else ("decode",)
        decoded = [part for part in o.parts if part != "layer"]  # attention over a cache is bench_attention.py's
        for tokens, part, what in itertools.product(o.decode, decoded, whats):
            self.measure(part, part, tokens, False, what)


def markdown(rows: list[dict[str, Any]], device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, a dry run: times mean nothing"
    lines = [
        f"{dist.get_world_size()} x {name}, torch {torch.__version__}, {datetime.date.today()}; bf16 (fp32 on a CPU), "
        f"random data, medians, the slowest rank; `torchrun --nproc-per-node {dist.get_world_size()} "
        f"{' '.join(sys.argv)}`",
        "",
        "| part | TP | SP | tokens | pass | " + " | ".join(f"{c}, us" for c in CONTENDERS) + " | "
        "tp_invariant / stock | peak MB, stock | tp_invariant | moved MB, stock | tp_invariant | by copy engine | "
        "bits as at TP=1 |",
        "|" + " --- |" * 15,
    ]
    for same in (rows[i : i + len(CONTENDERS)] for i in range(0, len(rows), len(CONTENDERS))):
        stock, _, ours = same
        bits = ours["bits"] if ours["bits_busy"] == "" else ours["bits"] and ours["bits_busy"]
        cells = [ours[key] for key in ("part", "tp", "sp", "tokens", "what")] + [row["us"] for row in same]
        cells += [ours["vs_stock"], stock["peak_MB"], ours["peak_MB"], stock["moved_MB"], ours["moved_MB"]]
        cells.append(ours["copied_MB"])
        cells.append({True: "yes", False: "NO", "": "not compared"}[bits])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["contender"] != "stock" and row["what"] in ("forward", "training")]
    labels = list(dict.fromkeys(f"{r['part']} TP={r['tp']} SP={r['sp']} {r['tokens']} {r['what']}" for r in shown))
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(labels)))
    for offset, contender in enumerate(CONTENDERS[1:]):
        values = [row["vs_stock"] for row in shown if row["contender"] == contender]
        axes.barh([i + 0.4 * offset for i in range(len(values))], values, height=0.4, label=contender)
    axes.set_yticks([i + 0.2 for i in range(len(labels))], labels, fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time over ordinary tensor parallelism's")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    options = parse()
    os.environ[peer_memory.TRANSPORT_VARIABLE] = options.transport
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # captures need one besides the default stream, and the same as the gradients of calls before them
        torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world, rows, profiles, lent = dist.get_world_size(), [], [], []
    for degree in options.tp or [world]:
        if world % degree:
            raise SystemExit(f"--tp {degree} does not divide the {world} ranks")
        groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, world, degree)]
        bench = Bench(options, resolve_group(groups[dist.get_rank() // degree]), device)
        bench.run()
        rows, profiles = rows + bench.rows, profiles + bench.profiles
        lent.append(runs.lent_buffers(bench.group, device))
    if dist.get_rank() == 0:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out.with_suffix(".csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        out.with_suffix(".md").write_text("\n".join([markdown(rows, device), *filter(None, lent)]))
        plot(rows, out.with_suffix(".png"))
        if profiles:
            out.with_suffix(".profile.txt").write_text("\n\n".join(profiles))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
