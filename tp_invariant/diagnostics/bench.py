"""What the mode costs on this machine: gated feed-forward layers of sizes of yours, with the mode on and off.

    tp-invariant bench --tp 2 --hidden 4096 --ffn 12288 --tokens 2048 8192

A step is one forward and backward of a few layers in a row, called from Python ("eager") and, on GPUs, with each layer
as a CUDA graph too ("graphs"). Off is ordinary tensor parallelism: torch's products, and sums on the wire. On and off
take turns on random data; a time is the slowest rank's, of its medians of two turns the smaller one. With the mode on,
all gradients must have the bits of TP=1; with it off they must not, or the data could not tell.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.bits import digest
from ..core.mode import set_tp_invariant_mode
from ..functional.attention_choice import SafeSdpa
from ..graphs.capture import graph_layers
from ..layers.layernorm_linear import LayerNormLinear
from ..layers.linear import Linear
from ..testing.checks import RankError, full_grads, run_ranks
from .onednn import avoid_trapped_units

IN_A_ROW = 4  # steps of a round
TURNS = 2  # of on and off, so that neither always meets the cooler chip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FeedForward(nn.Module):
    """x [tokens, hidden], or this rank's tokens under sequence parallelism: norm, gated SwiGLU, and the sum with x."""

    def __init__(self, hidden: int, ffn: int, **options: Any) -> None:
        super().__init__()
        options |= {"bias": False}
        self.fc1 = LayerNormLinear(
            hidden, 2 * ffn, normalization="RMSNorm", parallel_mode="column", partition_stride=2, **options
        )
        self.activation = nn.SiLU()
        SafeSdpa(self.activation)
        self.fc2 = Linear(ffn, hidden, parallel_mode="row", **options)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return x + self.fc2(self.activation(gate) * up)


def _median(step: Callable[[], object], rounds: int, cuda: bool) -> float:
    """Milliseconds of a step: each round has a few in a row, as training has them."""
    taken = []
    for _ in range(rounds + 1):  # one in which kernels are compiled, and the order of weights is learnt
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            step()
        if cuda:
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start) / IN_A_ROW)
    return statistics.median(taken[1:] or taken)


def measure(tp_group: Any, options: argparse.Namespace, tokens: int) -> dict[tuple[str, bool], Any]:
    """On a rank: milliseconds by (way, mode), and by ("bits", mode) the digests of all gradients, one for each way."""
    cuda, sp = options.device == "cuda", not options.no_sp
    place: dict[str, Any] = {"dtype": DTYPES[options.dtype], "device": torch.device(options.device)}
    torch.manual_seed(options.seed)  # the same on every rank
    layers = nn.Sequential(
        *(
            FeedForward(options.hidden, options.ffn, tp_group=tp_group, sequence_parallel=sp, **place)
            for _ in range(options.layers)
        )
    )
    x, dy = torch.randn((2, tokens, options.hidden), **place)
    if sp:
        x, dy = (t.chunk(tp_group.size())[tp_group.rank()].clone() for t in (x, dy))
    x.requires_grad_()

    def step() -> None:
        layers.zero_grad()
        layers(x).backward(dy)

    measured: dict[tuple[str, bool], Any] = {("bits", True): set(), ("bits", False): set()}
    alone = tp_group.size() == 1  # what the others' bits are compared with
    for launch in ("eager", "graphs") if cuda and not alone else ("eager",):
        taken: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(1 if alone else TURNS):
            for mode, medians in taken.items():
                with set_tp_invariant_mode(mode):
                    graphed = graph_layers(list(layers), lambda: layers(x)) if launch == "graphs" else None
                    medians.append(_median(step, 0 if alone else options.rounds, cuda))
                    if turn == 0:  # gathering and hashing them takes longer than the steps
                        measured["bits", mode].add(digest(full_grads(layers)))
                    if graphed is not None:
                        graphed.remove()
        measured |= {(launch, mode): min(medians) for mode, medians in taken.items()}
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tp-invariant bench",
        description="What the mode costs on this machine: feed-forward layers of sizes of yours, forward and backward.",
        epilog="Exit status: 0; 1 if the mode's bits are not those of TP=1; 2 for a wrong option.",
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if gpus > 1 else "cpu", help="default here: %(default)s")
    add("--tp", type=int, default=2 if gpus < 2 else gpus, metavar="P", help="tensor-parallel degree (%(default)s)")
    add("--hidden", type=int, default=4096 if gpus else 512, metavar="N", help="features of x (%(default)s)")
    add("--ffn", type=int, default=12288 if gpus else 1536, metavar="N", help="features between (%(default)s)")
    add("--tokens", type=int, nargs="+", default=[2048, 8192] if gpus else [256], metavar="N", help="(%(default)s)")
    add("--layers", type=int, default=4, metavar="N", help="in a row (%(default)s)")
    add("--rounds", type=int, default=10, metavar="N", help="steps of a median (%(default)s)")
    add("--dtype", choices=tuple(DTYPES), default="bf16" if gpus else "fp32", help="default here: %(default)s")
    add("--no-sp", action="store_true", help="without sequence parallelism")
    add("--seed", type=int, default=0, metavar="N", help="of weights and data (0)")
    return parser


def main(argv: Sequence[str]) -> int:
    """The `bench` command; exit statuses as its help says."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    gpus = torch.cuda.device_count()
    if options.tp < 2:
        parser.error("--tp 1: on and off are compared under tensor parallelism, of two ranks at least")
    if options.device == "cuda" and options.tp > gpus:
        parser.error(f"--tp {options.tp}: torch sees {gpus} GPUs here")
    avoid_trapped_units()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{options.layers} layers, hidden {options.hidden}, ffn {options.ffn}, {options.dtype}, TP={options.tp}, "
        f"sequence parallelism {'off' if options.no_sp else 'on'}; {where}, torch {torch.__version__}\n"
        f"{'tokens':>8}  {'':8}{'off, ms':>10}{'on, ms':>10}{'on / off':>10}  bits against TP=1",
        flush=True,
    )
    right = True
    for tokens in options.tokens:
        try:
            alone = run_ranks(measure, 1, options, tokens, device=options.device)[0]
            ranks = run_ranks(measure, options.tp, options, tokens, device=options.device)
        except RankError as problem:
            print(f"{tokens:>8}  {problem}")
            return 1
        same = {mode: all(rank["bits", mode] == alone["bits", mode] for rank in ranks) for mode in (True, False)}
        right = right and same[True]
        said = f"on: {'the same' if same[True] else 'OTHERS'}; off: {'the same' if same[False] else 'others'}"
        for launch in dict.fromkeys(launch for launch, _ in ranks[0] if launch != "bits"):
            on, off = (max(rank[launch, mode] for rank in ranks) for mode in (True, False))
            print(f"{tokens:>8}  {launch:<8}{off:10.2f}{on:10.2f}{on / off:10.2f}  {said}", flush=True)
    return 0 if right else 1
