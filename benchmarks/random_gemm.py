"""bench_gemm.py --random: the bundled GEMM against cuBLAS on shapes that are drawn.

Of every shape 64 rows and 64 columns, the first and the last among them, are compared with float64 and, byte by byte,
with a product of those rows and columns alone by the generic kernel with 64 x 64 tiles.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import time
from dataclasses import dataclass, replace

import torch
from gpu_timing import in_graph, in_turn
from random_shapes import (
    DEVICE,
    EIGHTS,
    Row,
    check_bits,
    check_error,
    compile_ahead,
    log_uniform,
    reduced,
    report,
    run,
)
from torch import Tensor

from tp_invariant.kernels.gemm import autotune
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.gemm.matmul_configs import (
    MatmulConfig,
    choose_config,
    fit,
    shared_memory_of,
)
from tp_invariant.kernels.gemm.matmul_tma import tma_matmul, tma_operands

ROWS, FEW_ROWS, COLUMNS = (256, 32768), (1, 256), (64, 32768)
LAYOUTS = {"fwd": "NT", "dgrad": "NN", "wgrad": "TN"}
RANGES = f"""Layout forward (NT), dgrad (NN) or wgrad (TN), bfloat16 or float16; rows log-uniform from {ROWS[0]} to
{ROWS[1]}, columns and K from {COLUMNS[0]} to {COLUMNS[1]}; columns and K, and wgrad's rows, which are features, are
multiples of 8 with probability {EIGHTS}, and any integer otherwise. With --few-rows {FEW_ROWS[0]} to {FEW_ROWS[1]}
rows, forward and dgrad alone, timed as 16 to 64 products in a CUDA graph, with so many B that together they are larger
than the L2 cache where 64 are."""
SAMPLE = 64  # rows and columns that are checked
CHECKING = MatmulConfig(64, 64, 64, 4, 4)
_IN_A_GRAPH = (16, 64)  # products
_CACHE = 128 << 20  # bytes, more than an L2 cache


@dataclass(frozen=True)
class Shape:
    layout: str
    dtype: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.layout:5} {LAYOUTS[self.layout]} {self.dtype:8} {self.m:5} x {self.n:5} x {self.k:5}"


def draw(seed: int, count: int, few_rows: bool = False) -> list[Shape]:
    """The first `count` shapes of a seed."""
    rng, shapes = random.Random(seed), []
    for _ in range(count):
        layout = rng.choice([name for name in LAYOUTS if not (few_rows and name == "wgrad")])
        dtype = rng.choice(("bfloat16", "float16"))
        m = log_uniform(rng, *(FEW_ROWS if few_rows else ROWS), EIGHTS if layout == "wgrad" else 0.0)
        n, k = (log_uniform(rng, *COLUMNS, EIGHTS) for _ in range(2))
        shapes.append(Shape(layout, dtype, m, n, k))
    return shapes


def operands(shape: Shape, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N] as the layout has them in memory."""
    place = dict(device=DEVICE, dtype=getattr(torch, shape.dtype), generator=generator)
    m, n, k = shape.m, shape.n, shape.k
    a = torch.randn(k, m, **place).t() if shape.layout == "wgrad" else torch.randn(m, k, **place)
    b = torch.randn(n, k, **place).t() if shape.layout == "fwd" else torch.randn(k, n, **place)
    return a, b


def like(shape: Shape) -> Shape:
    """A small shape for which the same kernels are compiled, given the same configuration."""
    return replace(shape, m=reduced(shape.m), n=reduced(shape.n), k=reduced(shape.k))


def configurations(shape: Shape) -> tuple[list[MatmulConfig], bool]:
    """Those that a product of this shape may have, several with TP_INVARIANT_AUTOTUNE=1; whether by the TMA kernel."""
    a, b = operands(like(shape))
    accepted, size = tma_operands(a, b, a.dtype), (shape.m, shape.n, shape.k)
    if accepted is None:
        return [fit(choose_config(*size, a.dtype), 2, shared_memory_of(a.device.index))], False
    layout = accepted.a_transposed, accepted.b_transposed
    row_a, row_b = shape.m if layout[0] else shape.k, shape.k if layout[1] else shape.n
    split = row_a % 16 > 0, row_b % 16 > 0
    call = autotune.Call(*size, *layout, *split, a.dtype, a.dtype, False, False, a.device.index)
    candidates = autotune.candidates(call)  # the usual one first
    return candidates if autotune.is_enabled() else candidates[:1], True


def jobs(shapes: list[Shape]) -> list[tuple[Shape, MatmulConfig]]:
    """A shape and a configuration for each kernel that the shapes may need, those of aligned copies among them."""
    found = {}
    for shape in shapes:
        copy = replace(shape, m=-(-shape.m // 8) * 8, n=-(-shape.n // 8) * 8, k=-(-shape.k // 8) * 8)
        configs, by_tma = configurations(shape)
        for config in configs:
            sizes = [shape.m % 16, shape.n % 16, shape.k % 16, shape.k % config.block_k]
            form = () if by_tma else tuple(size == 0 for size in sizes)
            found[shape.layout, shape.dtype, config, form, shape.m == 1] = shape, config
        if not by_tma:
            found |= {(copy.layout, copy.dtype, c, (), False): (copy, c) for c in configurations(copy)[0]}
    return list(found.values())


def compile_kernels(job: tuple[Shape, MatmulConfig]) -> None:
    shape, config = job
    a, b = operands(like(shape))
    accepted = tma_operands(a, b, a.dtype)
    if accepted is not None:
        c = tma_matmul(accepted, None, a.dtype, config)
    else:
        c = matmul(a, b, config=config)
    check_sample(c, a, b, torch.matmul(a, b))


def _sample(size: int) -> Tensor:
    places = torch.randint(0, size, (SAMPLE,), device=DEVICE)
    places[0], places[1] = 0, size - 1
    return places


def check_sample(c: Tensor, a: Tensor, b: Tensor, theirs: Tensor) -> None:
    """Raises WrongResult unless sampled elements of c are right, and have the bits of other tiles and other calls."""
    rows, columns = _sample(a.shape[0]), _sample(b.shape[1])
    a_rows, b_columns = a[rows].contiguous(), b[:, columns].contiguous()
    exact = a_rows.double() @ b_columns.double()
    ours, torchs = (x[rows][:, columns] for x in (c, theirs))
    # cuBLAS may split K and so round its sums in fp32 less: seen only where float16 rounds a long sum
    check_error("elements of C", ours, torchs, exact, factor=1.5)
    check_bits(
        "elements of C and their rows' and columns' own product", ours, matmul(a_rows, b_columns, config=CHECKING)
    )


def measure(shape: Shape, *, seed: int, seconds: float, few_rows: bool) -> list[Row]:
    a, b = operands(shape, torch.Generator(DEVICE).manual_seed(seed))
    if not few_rows:
        us = in_turn({"cublas": lambda: torch.matmul(a, b), "ours": lambda: matmul(a, b)}, seconds)
        c, theirs, count = matmul(a, b), torch.matmul(a, b), 1
    else:
        beyond_cache = math.ceil(_CACHE / (b.numel() * b.element_size()))  # so many B are together
        count = max(_IN_A_GRAPH[0], min(_IN_A_GRAPH[1], beyond_cache))
        copies = [b, *(b.clone() for _ in range(min(count, beyond_cache) - 1))]
        last: dict[str, Tensor] = {}

        def product(name: str, function, copy: Tensor) -> None:
            last[name] = function(a, copy)

        runs = {
            name: in_graph([functools.partial(product, name, function, copies[i % len(copies)]) for i in range(count)])
            for name, function in (("cublas", torch.matmul), ("ours", matmul))
        }
        us = in_turn(runs, seconds)
        c, theirs = last["ours"], last["cublas"]
    check_sample(c, a, b, theirs)
    return [
        {"case": shape.layout, "contender": "cublas", "contender_us": us["cublas"] / count, "us": us["ours"] / count}
    ]


def main(options: argparse.Namespace) -> int:
    start = time.monotonic()
    torch.manual_seed(options.seed)
    shapes = draw(options.seed, options.random, options.few_rows)
    compile_ahead(compile_kernels, jobs(shapes), options, start)
    settings = dict(seed=options.seed, seconds=options.each, few_rows=options.few_rows)
    rows = run(shapes, functools.partial(measure, **settings), options.seconds, start)
    return report(rows, options.random, options.seed, "cuBLAS's", options.json)
