"""Combines the results of attention over chunks of keys: `fold`, `finish`, and the kernel that folds a split call."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import biased_exponent, key_phases, sequence, sequence_of_keys


@triton.jit
def fold(acc, largest, total, part, part_largest, part_total, factor):
    """Combines the results over two ranges of keys."""
    new = tl.maximum(largest, part_largest)
    reference = tl.where(new == float("-inf"), 0.0, new)
    mine = tl.exp2((largest - reference) * factor)
    theirs = tl.exp2((part_largest - reference) * factor)
    acc = tl.fma(acc, mine[:, None], part * theirs[:, None])
    return acc, new, tl.fma(total, mine, part_total * theirs)


@triton.jit
def with_sinks(acc, largest, total, factor, sinks):
    """acc, largest and total with one more score in each row, without a value; largest is now in the exponent of 2."""
    sinks = sinks * 1.4426950408889634
    largest = largest * factor
    new = tl.maximum(largest, sinks)
    reference = tl.where(new == float("-inf"), 0.0, new)
    mine = tl.exp2(largest - reference)
    return acc * mine[:, None], new, tl.fma(total, mine, tl.exp2(sinks - reference))


@triton.jit
def finish(acc, largest, total, factor, sinks, SINKS: tl.constexpr, MATRIX: tl.constexpr = 0):
    """out, and lse in base 2. Adding zero removes negative zeros, which other splits of the same sum might not have.

    sinks: one for each row, if SINKS.
    """
    if MATRIX == 2:
        largest = biased_exponent(largest)
        factor = tl.full((), 1.0, tl.float32)
    if SINKS:
        acc, largest, total = with_sinks(acc, largest, total, factor, sinks)
        factor = tl.full((), 1.0, tl.float32)
    nothing = total == 0.0
    out = acc / tl.where(nothing, 1.0, total)[:, None] + 0.0
    lse = tl.where(nothing, float("-inf"), tl.fma(largest, factor, tl.log2(total)))
    return out, lse


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "sinks_ptr", "tokens_q", "tokens_k", "heads", "part_rows", "places", "window", "factor",
        "chunks",
    ]
)  # fmt: skip
def merge_kernel(
    part_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, tokens_q, tokens_k, heads, part_rows, places, window,
    factor, chunks,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr, AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    """A program folds one row's parts, in the order of the chunks."""
    row = tl.program_id(0) % part_rows
    pair = tl.program_id(0) // part_rows
    head = pair % heads
    index = pair // heads
    start_q, queries = sequence(cu_q_ptr, index, tokens_q, PACKED)
    _, keys, _ = sequence_of_keys(cu_k_ptr, index, tokens_k, PACKED)
    query = row // SHARED
    position = keys - queries + query
    low, _, _, high = key_phases(position, position, keys, window, BLOCK_K, CAUSAL, WINDOW)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # until all parts are in memory; also before a return, as later kernels rely on it
    if query >= queries:
        return
    size = tl.arange(0, HEAD_DIM)
    acc = tl.zeros((1, HEAD_DIM), tl.float32)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    begin, end = low // CHUNK, tl.cdiv(high, CHUNK)
    place = (pair * chunks + begin).to(tl.int64) * part_rows + row + tl.arange(0, 1)
    largest_ptr = part_ptr + places.to(tl.int64) * HEAD_DIM + place
    part_ptr += place[:, None] * HEAD_DIM + size[None, :]
    step = part_rows.to(tl.int64)
    for chunk in range(begin, end, AT_ONCE):
        parts = ()
        for i in tl.static_range(AT_ONCE):  # start all loads before the first fold
            there = chunk + i < end
            part = tl.load(part_ptr + i * step * HEAD_DIM, mask=there, other=0.0)
            part_largest = tl.load(largest_ptr + i * step, mask=there, other=float("-inf"))
            part_total = tl.load(largest_ptr + places + i * step, mask=there, other=0.0)
            parts = parts + ((part, part_largest, part_total),)  # noqa: RUF005 - Triton has no starred tuples
        for i in tl.static_range(AT_ONCE):
            acc, largest, total = fold(acc, largest, total, parts[i][0], parts[i][1], parts[i][2], factor)
        part_ptr += AT_ONCE * step * HEAD_DIM
        largest_ptr += AT_ONCE * step
    sinks = tl.load(sinks_ptr + head * SHARED + row % SHARED + tl.arange(0, 1)) if SINKS else 0.0
    out, lse = finish(acc, largest, total, factor, sinks, SINKS, MATRIX)
    batch = index * (0 if PACKED else 1)
    q_head = head * SHARED + row % SHARED
    out_at = (batch.to(tl.int64) * tokens_q + start_q + query) * (heads * SHARED) + q_head + tl.arange(0, 1)
    lse_at = (batch * heads * SHARED + q_head).to(tl.int64) * tokens_q + start_q + query + tl.arange(0, 1)
    out_ptr += out_at[:, None] * SIZE + size[None, :]
    if SIZE == HEAD_DIM:
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=(size < SIZE)[None, :])
    tl.store(lse_ptr + lse_at, lse)
