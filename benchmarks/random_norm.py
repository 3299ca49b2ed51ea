"""bench_norm.py --random: the norm kernels against torch's on shapes that are drawn.

y, dx and the gradients of gamma and beta are compared with float64, all of them, with torch's own error as the measure;
and rows and partial sums, byte by byte, with what a part of the rows gives by itself.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from gpu_timing import in_turn
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

from tp_invariant.functional.norm import ROWS_PER_SUM
from tp_invariant.kernels.rowwise.norm import (
    fold_weight_gradients,
    norm_backward,
    norm_backward_input,
    norm_forward,
    norm_weight_partial_sums,
)

HIDDEN, ROWS = (128, 16384), (64, 65536)
MOST = 1 << 27  # elements of x
EPS = 1e-6
RANGES = f"""RMSNorm, or LayerNorm with bias, bfloat16 or float16; rows of {HIDDEN[0]} to {HIDDEN[1]} elements,
log-uniform, a multiple of 8 with probability {EIGHTS} and any integer otherwise; {ROWS[0]} to {ROWS[1]} rows,
log-uniform, fewer where x would have more than 2^27 elements. backward is dx and the gradients of gamma and beta."""


@dataclass(frozen=True)
class Shape:
    rms: bool
    dtype: str
    rows: int
    hidden: int

    def __str__(self) -> str:
        return f"{'RMSNorm' if self.rms else 'LayerNorm':9} {self.dtype:8} {self.rows:5} x {self.hidden:5}"


def draw(seed: int, count: int) -> list[Shape]:
    """The first `count` shapes of a seed."""
    rng, shapes = random.Random(seed), []
    for _ in range(count):
        rms, dtype = rng.choice((True, False)), rng.choice(("bfloat16", "float16"))
        hidden = log_uniform(rng, *HIDDEN, EIGHTS)
        shapes.append(Shape(rms, dtype, min(log_uniform(rng, *ROWS), MOST // hidden), hidden))
    return shapes


class Operands:
    """Of one shape: tensors, our passes and torch's."""

    def __init__(self, shape: Shape, generator: torch.Generator | None = None) -> None:
        place = dict(device=DEVICE, dtype=getattr(torch, shape.dtype), generator=generator)
        self.rms, self.hidden = shape.rms, shape.hidden
        self.x, self.dy = (torch.randn(shape.rows, shape.hidden, **place) for _ in range(2))
        self.w = torch.randn(shape.hidden, **place)
        self.b = None if shape.rms else torch.randn(shape.hidden, **place)
        self.options = dict(rms=shape.rms, zero_centered=False)
        self.sums = dict(rows_per_sum=ROWS_PER_SUM, with_bias=not shape.rms)

    def forward(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return norm_forward(self.x, self.w, self.b, eps=EPS, **self.options)

    def partial_sums(self, mean: Tensor | None, rstd: Tensor, first: int = 0) -> Tensor:
        dy, x, rstd = self.dy[first:], self.x[first:], rstd[first:]
        mean = None if mean is None else mean[first:]
        return norm_weight_partial_sums(dy, x, mean, rstd, rms=self.rms, **self.sums)

    def backward(self, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx, and the gradients of gamma and beta in their dtype."""
        dx, sums = norm_backward(self.dy, self.x, self.w, mean, rstd, **self.options, **self.sums)
        return dx, *fold_weight_gradients(sums, self.w.dtype, None if self.b is None else self.b.dtype)

    def torch_forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.rms_norm(x, (self.hidden,), w, EPS) if self.rms else F.layer_norm(x, (self.hidden,), w, b, EPS)

    def torch_passes(self, dtype: torch.dtype) -> tuple[Tensor, Callable[[], tuple[Tensor, ...]]]:
        """y, and what computes its gradients."""
        inputs = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in (self.x, self.w, self.b)]
        y = self.torch_forward(*inputs)
        wanted, dy = [t for t in inputs if t is not None], self.dy.to(dtype)
        return y, lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)


def check(case: Operands) -> None:
    """Raises WrongResult unless our passes are right and their bits are those of a part of the rows."""
    y, mean, rstd = case.forward()
    ours = [t for t in (y, *case.backward(mean, rstd)) if t is not None]
    torch_y, torch_grads = case.torch_passes(y.dtype)
    exact_y, exact_grads = case.torch_passes(torch.float64)
    names = ("y", "dx", "dgamma", "dbeta")
    for name, mine, theirs, exact in zip(
        names, ours, [torch_y, *torch_grads()], [exact_y, *exact_grads()], strict=False
    ):
        check_error(name, mine, theirs.detach(), exact.detach())
    rows = slice(len(y) // 3, len(y) // 3 + 100)
    part = norm_forward(case.x[rows], case.w, case.b, eps=EPS, **case.options)
    check_bits("y of some rows alone and with others", part[0], y[rows])
    part_mean = None if mean is None else mean[rows]
    dx = norm_backward_input(case.dy[rows], case.x[rows], case.w, part_mean, rstd[rows], **case.options)
    check_bits("dx of some rows alone and with others", dx, ours[1][rows])
    whole, part = case.partial_sums(mean, rstd), case.partial_sums(mean, rstd, ROWS_PER_SUM)
    check_bits("partial sums of some rows alone and with others", part, whole[1:])


def measure(shape: Shape, *, seed: int, seconds: float) -> list[Row]:
    case = Operands(shape, torch.Generator(DEVICE).manual_seed(seed))
    _, mean, rstd = case.forward()
    _, torch_backward = case.torch_passes(case.x.dtype)
    runs = {
        "forward": (case.forward, lambda: case.torch_forward(case.x, case.w, case.b)),
        "backward": (lambda: case.backward(mean, rstd), torch_backward),
    }
    rows = []
    for name, (ours, theirs) in runs.items():
        us = in_turn({"torch": theirs, "ours": ours}, seconds / len(runs))
        rows.append({"case": name, "contender": "torch", "contender_us": us["torch"], "us": us["ours"]})
    check(case)
    return rows


def like(shape: Shape) -> Shape:
    """A small shape for which the same kernels are compiled."""
    return replace(shape, rows=reduced(shape.rows))


def compile_kernels(shape: Shape) -> None:
    check(Operands(shape))


def main(options: argparse.Namespace) -> int:
    start = time.monotonic()
    torch.manual_seed(options.seed)
    shapes = draw(options.seed, options.random)
    compile_ahead(compile_kernels, dict.fromkeys(map(like, shapes)), options, start)
    rows = run(shapes, functools.partial(measure, seed=options.seed, seconds=options.each), options.seconds, start)
    return report(rows, options.random, options.seed, "torch's", options.json)
