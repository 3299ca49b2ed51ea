"""The cost of the owner maps `rows` and `cols`, in microseconds, by which owner_map="auto" chooses.

For C [T, N] = A [T, K] B [K, N] with K sharded over P ranks, a map's cost is the time to move A, the exposed time to
move B (the part that no other work overlaps), the GEMM, and the time to redistribute C. A move takes a fixed latency
plus its bytes over the link's bandwidth; a GEMM takes its flops at the matrix units' rate or its bytes at the memory's
bandwidth, whichever is longer. The choice is a function of global sizes, of what is cached and of the device's numbers,
so it is the same on every rank on which these are the same. Ranks compare the numbers at their first call
(consistency/agreement.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Costs:
    """A kind of device and its link. Rates in units per microsecond (1e6 a second), which is MB/s and Mflop/s.

    gather, exchange    bytes that a rank receives in an all-gather, in an all-to-all
    ahead               bytes that a rank receives of a weight that is moved ahead of its use; 0: as of other things
    latency             microseconds that a collective takes whatever its size
    memory              bytes read
    flops               of a 16-bit GEMM
    """

    name: str
    gather: float
    exchange: float
    latency: float
    memory: float
    flops: float
    ahead: float = 0.0

    @cached_property
    def text(self) -> str:
        """All fields as text, for ranks to compare."""
        return repr(self)


# Measured on four H100 with NVLink: kernels between peers gather at 300 GB/s a rank and exchange at 250, copy engines
# move 350. Of an H200, which has the same link, by its data sheet: memory and flops.
_NVLINK = dict(gather=300e3, exchange=250e3, ahead=350e3, latency=12.0)
_H100 = Costs("NVIDIA H100", **_NVLINK, memory=3.0e6, flops=650e6)
_H200 = Costs("NVIDIA H200", **_NVLINK, memory=4.3e6, flops=700e6)
# Not measured. A link that is slow for the GPU's speed, as PCIe is.
_OTHER = Costs("any other device", gather=20e3, exchange=20e3, latency=50.0, memory=1e6, flops=100e6)

# A weight that is gathered ahead overlaps this product's GEMM and some more GEMM time of layers before it (FC1 before
# FC2; two weight gradients and a dgrad between two column-parallel dgrads). Of 20 products in five drawn models (512 to
# 3072 tokens, four H100) this number chooses the map that is measured to be the faster one but where both take as long.
_OVERLAPPED_GEMMS = 2.2


@cache
def costs_of(device: torch.device | str | None = None) -> Costs:
    """The costs for a device: the table's by the device's name, else conservative ones."""
    name = device
    if isinstance(device, torch.device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    elif device is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    return next((costs for costs in (_H200, _H100) if str(name).startswith(costs.name)), _OTHER)


class Problem(NamedTuple):
    """C [rows, cols] = A B with K sharded over `world` ranks.

    scatter_rows                whether each rank needs only its rows of C; else all ranks need all of C
    itemsize                    bytes of an element
    rows_cached, cols_cached    whether the part of B that the map needs is gathered already, or being gathered
    ahead                       whether B is gathered ahead of its use
    kept                        whether B stays cached after use and does not change, so that moving it once is free
    overlapped                  whether a product as large as this one, the weight's gradient, runs while A moves
    """

    rows: int
    cols: int
    k: int
    world: int
    scatter_rows: bool
    itemsize: int = 2
    rows_cached: bool = False
    cols_cached: bool = False
    ahead: bool = True
    kept: bool = False
    overlapped: bool = False


class Terms(NamedTuple):
    """A map's cost, microseconds."""

    move_a: float
    move_b: float
    gemm: float
    move_c: float

    @property
    def total(self) -> float:
        return self.move_a + self.move_b + self.gemm + self.move_c


def _terms(p: Problem, costs: Costs) -> dict[str, Terms]:
    remote_bytes = p.itemsize * (p.world - 1) / p.world  # bytes of an element times the share on other ranks

    def move(elements: float, rate: float) -> float:
        return costs.latency + elements * remote_bytes / rate if elements and p.world > 1 else 0.0

    def gemm(rows: int, cols: int) -> float:
        read = p.itemsize * (rows * p.k + p.k * cols + rows * cols)
        return max(2 * rows * cols * p.k / costs.flops, read / costs.memory)

    def exposed(moving: float, cached: bool, behind: float) -> float:
        if cached or p.kept:
            return 0.0
        return max(0.0, moving - _OVERLAPPED_GEMMS * behind) if p.ahead else moving

    def move_a(elements: float, rate: float, behind: float) -> float:
        moving = move(elements, rate)
        return max(0.0, moving - behind) if p.overlapped else moving

    # the slowest rank's share; elements that a rank ends up with
    rows, cols = -(-p.rows // p.world), -(-p.cols // p.world)
    by_rows, by_cols = gemm(rows, p.cols), gemm(p.rows, cols)
    whole, columns = costs.gather, costs.exchange
    if p.ahead and costs.ahead:
        whole = columns = costs.ahead
    all_a, all_b, all_c = p.rows * p.k, p.cols * p.k, p.rows * p.cols
    return {
        "rows": Terms(
            move_a(rows * p.k, costs.exchange, by_rows),
            exposed(move(all_b, whole), p.rows_cached, by_rows),
            by_rows,
            0.0 if p.scatter_rows else move(all_c, costs.gather),
        ),
        "cols": Terms(
            move_a(all_a, costs.gather, by_cols),
            exposed(move(cols * p.k, columns), p.cols_cached, by_cols),
            by_cols,
            move(rows * p.cols, costs.exchange) if p.scatter_rows else move(all_c, costs.gather),
        ),
    }


def choose(problem: Problem, costs: Costs) -> str:
    """ "rows" or "cols", whichever costs less; rows where they are equal."""
    terms = _terms(problem, costs)
    return "rows" if terms["rows"].total <= terms["cols"].total else "cols"


def explain(problem: Problem, costs: Costs) -> str:
    """The result of `choose` and the terms that it compares, as lines of text."""
    p = problem
    lines = [
        f"C [{p.rows}, {p.cols}] = A [{p.rows}, {p.k}] B, K over {p.world} ranks, {p.itemsize} bytes an element, "
        f"{'each rank its rows of C' if p.scatter_rows else 'all of C on every rank'}; {costs.name}"
    ]
    notes = {"rows": p.rows_cached, "cols": p.cols_cached}
    for name, terms in _terms(problem, costs).items():
        b = "kept" if p.kept else "here or on its way" if notes[name] else "gathered ahead" if p.ahead else "gathered"
        lines.append(
            f"  {name}: {terms.total:8.1f} us = move A {terms.move_a:.1f} + move B {terms.move_b:.1f} ({b}) "
            f"+ GEMM {terms.gemm:.1f} + move C {terms.move_c:.1f}"
        )
    return "\n".join([*lines, f"  auto: {choose(problem, costs)}"])
