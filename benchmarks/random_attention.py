"""bench_attention.py --random: tpi.attention against the fastest of torch's backends on shapes that are drawn.

The backends are tried once each, and the fastest is timed in turn with ours. 64 queries of a head are compared with
float64; all gradients with the backend's; and the first key head and its query heads, byte by byte, with what they give
by themselves.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import bench_attention
import torch
from gpu_timing import gpu_microseconds, in_turn
from random_shapes import (
    DEVICE,
    EIGHTS,
    Row,
    WrongResult,
    check_bits,
    check_error,
    compile_ahead,
    log_uniform,
    reduced,
    relative_error,
    report,
    run,
)
from torch import Tensor
from torch.nn.attention import SDPBackend

import tp_invariant as tpi

HEAD_DIMS, HEADS, BATCHES, TOKENS = (64, 96, 128, 256), (8, 16, 32), (1, 8), (512, 32768)
MASKS = ("causal", "full", "window")
MATRICES = (None, None, "bool", "bias")  # besides; not with a window
WINDOWS = (128, 4096)
MOST = 1 << 28  # elements of q, or of a mask's matrix
RANGES = f"""bfloat16; head_dim of {HEAD_DIMS}; {HEADS} query heads, and a power of two of them for each key head, from
one (MHA) to all (MQA); mask of {MASKS}, a window of {WINDOWS[0]} to {WINDOWS[1]} keys, log-uniform; tokens log-uniform
from {TOKENS[0]} to {TOKENS[1]}, a multiple of 8 with probability {EIGHTS} and any integer otherwise; batch {BATCHES[0]}
to {BATCHES[1]}, less where q would have more than 2^28 elements; half of those without a window have a mask besides, a
matrix [batch or 1, query heads or 1, tokens, tokens] of bool or bfloat16, of at most 2^28 elements. Contenders:
scaled_dot_product_attention by cuDNN, flash and the memory-efficient kernel; with a matrix, into which the causal mask
goes too, the first and the last; for a window these with a mask, and torch's flash kernel with a window of its own."""
SAMPLE = 64
# of a gradient's norm: two kernels that round weights to bfloat16 differ by some 0.005, with a block of keys left out
# by more
DIFFERENT = 0.03


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    mask: str
    window: int | None = None
    matrix: str | None = None
    of_batch: bool = False  # whether each sequence, and each head, has a matrix of its own
    of_heads: bool = False

    def __str__(self) -> str:
        mask = f"{self.mask} {self.window}" if self.window else self.mask
        if self.matrix:
            own = ("", "B")[self.of_batch] + ("", "h")[self.of_heads]
            mask += f" {self.matrix}{own and f' {own}'}"
        return (
            f"B {self.batch} heads {self.heads:2}/{self.kv_heads:2} tokens {self.tokens:5} D {self.head_dim:3} {mask}"
        )

    @property
    def causal(self) -> bool:
        return self.mask != "full"


def draw(seed: int, count: int) -> list[Shape]:
    """The first `count` shapes of a seed."""
    rng, of_matrices, shapes = random.Random(seed), random.Random(f"matrices {seed}"), []
    for _ in range(count):
        heads, head_dim, mask = rng.choice(HEADS), rng.choice(HEAD_DIMS), rng.choice(MASKS)
        kv_heads = heads >> rng.randint(0, heads.bit_length() - 1)
        tokens, batch = log_uniform(rng, *TOKENS, EIGHTS), log_uniform(rng, *BATCHES)
        window = min(tokens, log_uniform(rng, *WINDOWS))
        batch = max(1, min(batch, MOST // (tokens * heads * head_dim)))
        shape = Shape(batch, heads, kv_heads, tokens, head_dim, mask, window if mask == "window" else None)
        matrix, of_batch, of_heads = (of_matrices.choice(x) for x in (MATRICES, (False, True), (False, True)))
        if matrix and shape.window is None and tokens**2 <= MOST:
            of_heads = of_heads and heads * tokens**2 <= MOST
            of_batch = of_batch and batch * (heads if of_heads else 1) * tokens**2 <= MOST
            shape = replace(shape, matrix=matrix, of_batch=of_batch, of_heads=of_heads)
        shapes.append(shape)
    return shapes


@functools.lru_cache(maxsize=1)
def matrix_of(shape: Shape) -> Tensor | None:
    """[batch or 1, heads or 1, tokens, tokens]; of the causal keys each query sees some, itself among them."""
    if shape.matrix is None:
        return None
    sizes = shape.batch if shape.of_batch else 1, shape.heads if shape.of_heads else 1, shape.tokens, shape.tokens
    generator = torch.Generator(DEVICE).manual_seed(shape.tokens)
    if shape.matrix == "bool":
        drawn = torch.randint(0, 2, sizes, device=DEVICE, dtype=torch.int8, generator=generator).bool()
        drawn.diagonal(dim1=2, dim2=3).fill_(True)
        return drawn
    return torch.randn(sizes, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def operands(shape: Shape, generator: torch.Generator | None = None) -> list[Tensor]:
    """q, k, v and the gradient of out, in memory as models have them: [B, S, heads, D]."""
    place = dict(device=DEVICE, dtype=torch.bfloat16, generator=generator)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    made = [torch.randn(shape.batch, shape.tokens, h, shape.head_dim, **place).transpose(1, 2) for h in heads]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


Pass = Callable[[], list[Tensor]]  # gives out, and with a gradient those of q, k and v


def ours(shape: Shape, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Pass:
    options: dict[str, Any] = dict(causal=shape.causal, window=shape.window)
    if (mask := matrix_of(shape)) is not None:
        options["mask"] = mask[: q.shape[0], : q.shape[1]]  # of the first heads, where q has only those

    def once() -> list[Tensor]:
        out = tpi.attention(q, k, v, **options)
        return [out] if grad is None else [out, *torch.autograd.grad(out, (q, k, v), grad)]

    return once


def flash_with_window(window: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> Pass:
    """Torch's flash kernel with the window that it has and scaled_dot_product_attention does not pass on."""
    tokens = q.shape[2]

    def once() -> list[Tensor]:
        by_token = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.ops.aten._flash_attention_forward(
            *by_token, None, None, tokens, tokens, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )[0].transpose(1, 2)
        return [out] if grad is None else [out, *torch.autograd.grad(out, (q, k, v), grad)]

    return once


def visible(shape: Shape, queries: Tensor) -> Tensor:
    """[queries, tokens], whether a query sees a key; a matrix may hide more."""
    keys = torch.arange(shape.tokens, device=queries.device, dtype=torch.int32)
    distance = queries[:, None] - keys[None, :]
    if shape.mask == "full":
        return torch.ones_like(distance, dtype=torch.bool)
    return (distance >= 0) & (distance < (shape.window or math.inf))


def whole_mask(shape: Shape) -> Tensor:
    """All of a shape's masks in one."""
    mask = visible(shape, torch.arange(shape.tokens, device=DEVICE, dtype=torch.int32))
    if (matrix := matrix_of(shape)) is None:
        return mask
    return matrix & mask if matrix.dtype == torch.bool else matrix.masked_fill(~mask, -math.inf)


def backends(shape: Shape, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> dict[str, Pass]:
    kinds = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    if shape.window is None and shape.matrix is None:
        return {name: bench_attention.sdpa(kind)(q, k, v, shape.causal, grad) for name, kind in kinds.items()}
    mask = whole_mask(shape)
    del kinds["flash"]  # takes no masks
    masked = {name: bench_attention.sdpa(kind)(q, k, v, True, grad, mask) for name, kind in kinds.items()}
    if shape.window is None:
        return masked
    return {"flash": flash_with_window(shape.window, q, k, v, grad), **masked}


def fastest(passes: dict[str, Pass], is_right: Callable[[list[Tensor]], bool]) -> tuple[str, Pass] | None:
    """Of those that run and are right."""
    times = {}
    for name, once in passes.items():
        try:
            if is_right(once()):
                times[name] = gpu_microseconds(once, 1)[0]
        except RuntimeError:
            continue
    if not times:
        return None
    name = min(times, key=times.__getitem__)
    return name, passes[name]


class Sample:
    """Some queries of the last head, and their out in float64."""

    def __init__(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.queries = torch.randint(0, shape.tokens, (SAMPLE,), device=DEVICE)
        self.queries[0], self.queries[1] = 0, shape.tokens - 1
        q, k, v = (x.detach()[-1, -1].double() for x in (q, k, v))
        scores = q[self.queries] @ k.t() / math.sqrt(shape.head_dim)
        hidden = ~visible(shape, self.queries)
        if (matrix := matrix_of(shape)) is not None:
            rows = matrix[-1, -1][self.queries]
            hidden, scores = (hidden | ~rows, scores) if rows.dtype == torch.bool else (hidden, scores + rows)
        self.exact = scores.masked_fill_(hidden, -math.inf).softmax(-1) @ v

    def of(self, out: Tensor) -> Tensor:
        return out.detach()[-1, -1][self.queries]


def check_gradients(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for name, x, y in zip(("dq", "dk", "dv"), mine[1:], theirs[1:], strict=True):
        if y.shape != x.shape:  # of heads that were repeated
            y = y.double().unflatten(1, (x.shape[1], -1)).sum(2)
        if not (distance := relative_error(x, y)) <= DIFFERENT:
            raise WrongResult(f"{name}: {distance:.3g} from torch's, allowed {DIFFERENT}")


def check_first_head(shape: Shape, tensors: list[Tensor], mine: list[Tensor]) -> None:
    """The first key head and its query heads, of the first sequence, have the bits that they have alone."""
    group = shape.heads // shape.kv_heads
    parts = [x.detach()[:1, :count].clone() for x, count in zip(tensors, (group, 1, 1, group), strict=True)]
    alone = ours(shape, *(x.requires_grad_() for x in parts[:3]), parts[3])()
    for name, x, y in zip(("out", "dq", "dk", "dv"), alone, mine, strict=True):
        check_bits(f"{name} of a head alone and with others", x.detach(), y.detach()[:1, : x.shape[1]])


def measure(shape: Shape, *, seed: int, seconds: float) -> list[Row]:
    q, k, v, grad = operands(shape, torch.Generator(DEVICE).manual_seed(seed))
    sample, rows = Sample(shape, q, k, v), []
    for case, dout in (("forward", None), ("both", grad)):
        with torch.set_grad_enabled(dout is not None):
            found = fastest(
                backends(shape, q, k, v, dout), lambda outs: relative_error(sample.of(outs[0]), sample.exact) < 0.02
            )
            if found is None:
                rows.append({"case": case, "skipped": "no backend of torch's takes it"})
                continue
            (name, theirs), mine = found, ours(shape, q, k, v, dout)
            us = in_turn({name: theirs, "ours": mine}, seconds)
            outs, torchs = mine(), theirs()
        check_error("sampled rows of out", sample.of(outs[0]), sample.of(torchs[0]), sample.exact)
        if dout is not None:
            check_gradients(outs, torchs)
            check_first_head(shape, [q, k, v, grad], outs)
        rows.append({"case": case, "contender": name, "contender_us": us[name], "us": us["ours"]})
    return rows


def like(shape: Shape) -> Shape:
    """A small shape for which the same kernels are compiled."""
    return replace(shape, tokens=reduced(shape.tokens))


def jobs(shapes: list[Shape]) -> list[Shape]:
    """What to compile, one of each kind first: most of the others then find their kernels in Triton's cache."""
    seen: collections.Counter[tuple] = collections.Counter()

    def turn(shape: Shape) -> int:
        kind = shape.head_dim, shape.mask, shape.matrix
        seen[kind] += 1
        return seen[kind]

    return sorted(dict.fromkeys(map(like, shapes)), key=turn)


def compile_kernels(shape: Shape) -> None:
    q, k, v, grad = operands(shape)
    with torch.no_grad():
        ours(shape, q, k, v, None)()
    outs = ours(shape, q, k, v, grad)()
    check_first_head(shape, [q, k, v, grad], outs)


def main(options: argparse.Namespace) -> int:
    start = time.monotonic()
    torch.manual_seed(options.seed)
    shapes = draw(options.seed, options.random)
    compile_ahead(compile_kernels, jobs(shapes), options, start)
    rows = run(shapes, functools.partial(measure, seed=options.seed, seconds=options.each), options.seconds, start)
    return report(rows, options.random, options.seed, "the fastest torch backend's", options.json)
