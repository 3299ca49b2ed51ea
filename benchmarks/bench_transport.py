"""Gathers and exchanges by NCCL, by copy engine and by a kernel that reads peers' memory, alone and beside GEMMs.

    torchrun --nproc-per-node 4 benchmarks/bench_transport.py --out benchmarks/results/transport_h100

What they move, and what the GEMMs lose. Each transfer of so many MB (all that a rank has afterwards) is started, waited
for and released, one after another: GB/s that a rank receives from the others. Beside GEMMs: while a stream computes
products of --gemm, one program per SM, transfers run on another; the products' time over their time alone, and the
transfers' GB/s meanwhile. `host`: what the call that starts a transfer takes the host. Bytes are compared with NCCL's
in the same run. The kernel takes what is not too large (comm/peer_kernels.py). The slowest rank's medians; writes
OUT.csv and OUT.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_invariant.comm import peer_copies, peer_kernels, peer_memory
from tp_invariant.comm.collectives import Group, Pending, resolve_group, start_exchange_rows, start_gather_major
from tp_invariant.core.layout import split_sizes

MEGABYTE = 1e6
ROW = 8192  # bytes of a row
TRANSPORTS = ("nccl", False), ("kernel", False), ("copy_engine", False), ("copy_engine", True)
HEAD_START = 1_000_000  # cycles that the device idles, so that the host is ahead of it


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="path without an ending")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 32, 64, 96])
    parser.add_argument("--gemm", type=int, nargs=3, default=[8192, 4096, 4096], metavar=("M", "N", "K"))
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


Start = Callable[[Tensor], Pending]


def starts(what: str, transport: str, early: bool, group: Group) -> Start:
    """The call that starts a transfer of x [rows, columns], with the variable set for it. `early`: as for weights."""
    # copy_engine: of any size, or an error
    os.environ[peer_memory.TRANSPORT_VARIABLE] = "auto" if transport == "kernel" else transport

    def start(x: Tensor) -> Pending:
        sizes = split_sizes(x.shape[0], group.size)
        if transport == "nccl":
            return start_gather_major(x, group) if what == "gather" else start_exchange_rows(x, sizes, group)
        if transport == "kernel":
            started = peer_kernels.start_gather_major(x, group) if what == "gather" else None
            started = peer_kernels.start_exchange_rows(x, sizes, group) if what == "exchange" else started
        else:
            started = peer_copies.start_gather_major(x, group, early=early) if what == "gather" else None
            started = peer_copies.start_exchange_rows(x, sizes, group, early=early) if what == "exchange" else started
        assert started is not None, "the ranks do not reach each other's memory: see tp-invariant doctor"
        return started

    return start


def finish(pending: Pending) -> None:
    pending.wait()
    pending.release()


def median(values: list[float], group: Group) -> float:
    """Of the slowest rank."""
    own = torch.tensor([sorted(values)[len(values) // 2]], device="cuda", dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group.process_group)
    return own.item()


def timed(call: Callable[[], Any], rounds: int, group: Group) -> float:
    """Microseconds of a call on the current stream."""
    taken = []
    for _ in range(rounds):
        dist.barrier(group.process_group)
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        taken.append(1e3 * first.elapsed_time(last))
    return median(taken, group)


def host_time(start: Start, x: Tensor, rounds: int, group: Group) -> float:
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        before = time.perf_counter()
        pending = start(x)
        taken.append(1e6 * (time.perf_counter() - before))
        finish(pending)
    return median(taken, group)


def beside(start: Start, x: Tensor, gemms: Callable[[], None], group: Group, rounds: int) -> tuple[float, float]:
    """Microseconds of the products while transfers run beside them, and of one of these transfers."""
    side, of_products, of_transfers = torch.cuda.Stream(), [], []
    for _ in range(rounds):
        dist.barrier(group.process_group)
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        count = 4
        events[0].record()
        with torch.cuda.stream(side):
            side.wait_event(events[0])
            events[2].record()
            for _ in range(count):
                finish(start(x))
            events[3].record()
        gemms()
        events[1].record()
        torch.cuda.synchronize()
        of_products.append(1e3 * events[0].elapsed_time(events[1]))
        of_transfers.append(1e3 * events[2].elapsed_time(events[3]) / count)
    return median(of_products, group), median(of_transfers, group)


def main() -> None:
    options = parse()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = resolve_group(dist.group.WORLD)
    from tp_invariant.kernels.gemm.matmul import matmul

    m, n, k = options.gemm
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    rows: list[dict[str, Any]] = []
    for what in ("gather", "exchange"):
        for megabytes in options.megabytes:
            held = int(megabytes * MEGABYTE) // (ROW * group.size) * group.size  # rows, of all blocks together
            mine = held // group.size if what == "gather" else held
            x = torch.randint(0, 256, (mine, ROW), device="cuda", dtype=torch.uint8)
            received = held * ROW * (group.size - 1) / group.size
            want = starts(what, "nccl", False, group)(x).wait()
            for transport, early in TRANSPORTS:
                most = peer_kernels.MOST_GATHERED if what == "gather" else peer_kernels.MOST_BYTES
                if transport == "kernel" and x.nbytes > most:
                    continue
                start = starts(what, transport, early, group)
                pending = start(x)
                same = torch.equal(pending.wait(), want)
                pending.release()
                for _ in range(3):
                    finish(start(x))
                alone = timed(lambda start=start, x=x: finish(start(x)), options.rounds, group)
                # as many products as four transfers take
                one = timed(lambda: matmul(a, b), options.rounds, group)
                count = max(2, round(4 * alone / one))
                products = lambda count=count: [matmul(a, b) for _ in range(count)]  # noqa: E731
                undisturbed = timed(products, options.rounds, group)
                disturbed, meanwhile = beside(start, x, products, group, options.rounds)
                row = {
                    "what": what,
                    "MB": megabytes,
                    "transport": transport + (", for weights" if early else ""),
                    "us": round(alone, 1),
                    "GB/s": round(received / alone / 1e3, 1),
                    "host us": round(host_time(start, x, options.rounds, group), 1),
                    "GB/s beside GEMMs": round(received / meanwhile / 1e3, 1),
                    "GEMMs, us": round(undisturbed, 1),
                    "GEMMs beside it": round(disturbed / undisturbed, 3),
                    "same bytes": same,
                }
                rows.append(row)
                if group.rank == 0:
                    print(*row.values(), sep="  ", flush=True)
    if group.rank == 0:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out.with_suffix(".csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        lines = [
            f"{group.size} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}; "
            f"medians, the slowest rank; `torchrun --nproc-per-node {group.size} {' '.join(sys.argv)}`",
            "",
            "| " + " | ".join(rows[0]) + " |",
            "|" + " --- |" * len(rows[0]),
            *("| " + " | ".join(map(str, row.values())) + " |" for row in rows),
        ]
        out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
