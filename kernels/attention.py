"""Attention in Triton, forward: `forward(q, k, v, spec, lengths)` of attention_spec.py; `backward` is beside it.

A program holds a tile of queries and walks the keys from position 0 of their sequence. Its bits are a function of a
query and the keys it sees alone, because

- scores and outputs are tensor-core products, whose bits depend on no tile;
- largest scores have no order, and a row's weights are summed in an order that lies in the tile's keys and warps, which
  are fixed for a head size and dtype;
- the running result is cut at every CHUNK keys and chunks are folded in order, whether one program walks them all or
  each has its own and another kernel folds them, as for a decode step (flash-decoding's split, at places that depend
  on the position alone);
- a block that a query does not see changes none of its bits: weights of 0, factors of 1. That takes finite keys and
  values: 0 times Inf is NaN, for queries of the same sequence that share a tile.

The query heads of one key head may share a tile as rows, so that a decode step reads keys once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_backward import backward
from .attention_spec import AttentionSpec, PackedLengths
from .attention_tiles import (
    CHUNK,
    DTYPES,
    Problem,
    Tile,
    aligned,
    as_rows,
    capped,
    forward_tile,
    key_phases,
    launch,
    pad_heads,
    padded_head_dim,
    problem,
    seen,
    sequence,
    tile_of,
    unit_strides,
)
from .launch import launch_on

__all__ = ["backward", "forward"]

_MERGED_ROWS = 16
_LEAST_COLUMNS = 64
_MERGE_TILE = Tile(_MERGED_ROWS, 0, 4, 1)


@triton.jit
def _fold(acc, largest, total, part, part_largest, part_total, factor):
    """The results over two stretches of keys as one."""
    new = tl.maximum(largest, part_largest)
    reference = tl.where(new == float("-inf"), 0.0, new)
    mine = tl.exp2((largest - reference) * factor)
    theirs = tl.exp2((part_largest - reference) * factor)
    acc = tl.fma(acc, mine[:, None], part * theirs[:, None])
    return acc, new, tl.fma(total, mine, part_total * theirs)


@triton.jit
def _attend(
    q, k_desc, v_desc, row_k, column_k, row_v, column_v, position, acc, largest, total,
    low, high, keys, window, factor, inverse_cap,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The online softmax (arXiv 1805.02867, 2205.14135) over the key blocks from low to high.

    The few masked blocks are loaded without a pipeline: values that pass through registers need more shared memory, of
    which two programs have to fit on a multiprocessor.
    """
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        k = k_desc.load([row_k + start, column_k])
        v = v_desc.load([row_v + start, column_v])
        scores = capped(tl.dot(q, k.T, input_precision="ieee"), inverse_cap, SOFTCAP)
        if MASKED:
            key = start + tl.arange(0, BLOCK_K)
            see = seen(position[:, None], key[None, :], keys, window, CAUSAL, WINDOW)
            scores = tl.where(see, scores, float("-inf"))
            v = tl.where((key < keys)[:, None], v, 0.0)  # other rows of the matrix stand there: 0 times Inf is NaN
        new = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(tl.fma(scores, factor, -(reference * factor)[:, None]))
        decay = tl.exp2((largest - reference) * factor)  # exactly 1 where the largest stays what it was
        total = tl.fma(total, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        largest = new
    return acc, largest, total


@triton.jit
def _finish(acc, largest, total, factor):
    """out, and lse in base 2. Adding zero leaves no negative zero, which other cuts of the same sum might not have."""
    nothing = total == 0.0
    out = acc / tl.where(nothing, 1.0, total)[:, None] + 0.0
    lse = tl.where(nothing, float("-inf"), tl.fma(largest, factor, tl.log2(total)))
    return out, lse


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "tokens_q", "tokens_k", "row_kb", "row_kh", "col_kb", "col_kh", "row_vb", "row_vh",
        "col_vb", "col_vh", "stride_qb", "stride_qh", "stride_qs", "heads", "groups", "sequences", "tiles", "window",
        "factor", "inverse_cap", "chunks", "part_rows",
    ]
)  # fmt: skip
def _forward_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, part_ptr, part_largest_ptr, part_total_ptr, cu_q_ptr, cu_k_ptr,
    tokens_q, tokens_k, row_kb, row_kh, col_kb, col_kh, row_vb, row_vh, col_vb, col_vh,
    stride_qb, stride_qh, stride_qs, heads, groups, sequences, tiles, window, factor, inverse_cap,
    chunks, part_rows,
    HEAD_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    CHUNK: tl.constexpr, UNIT: tl.constexpr, SHARED: tl.constexpr, SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    # Row r of a tile is query r // SHARED of head h * SHARED + r % SHARED; `heads` counts the h.
    tile, head, index = tile_of(tl.program_id(0), tiles, heads, sequences)
    tile = tiles - 1 - tile  # under a causal mask the last has most to do
    column = tl.program_id(1) * V_COLUMNS
    kv_head = head if SHARED > 1 else head // groups
    start_q, queries = sequence(cu_q_ptr, index, tokens_q, PACKED)
    start_k, keys = sequence(cu_k_ptr, index, tokens_k, PACKED)
    batch = index * (0 if PACKED else 1)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    if tile * BLOCK_Q >= queries * SHARED:
        return
    query = rows // SHARED
    q_head = head * SHARED + rows % SHARED
    inside = query < queries
    size = tl.arange(0, HEAD_DIM)
    q_at = batch.to(tl.int64) * stride_qb + q_head.to(tl.int64) * stride_qh + (start_q + query).to(tl.int64) * stride_qs
    q = tl.load(q_ptr + q_at[:, None] * UNIT + size[None, :], mask=inside[:, None], other=0.0)

    row_k = batch * row_kb + kv_head * row_kh + start_k
    row_v = batch * row_vb + kv_head * row_vh + start_k
    column_k = batch * col_kb + kv_head * col_kh
    column_v = batch * col_vb + kv_head * col_vh + column
    position = keys - queries + query
    first = keys - queries + tile * BLOCK_Q // SHARED
    last = keys - queries + tl.minimum((tile * BLOCK_Q + BLOCK_Q - 1) // SHARED, queries - 1)
    low, clear, full, high = key_phases(first, last, keys, window, BLOCK_K, CAUSAL, WINDOW)

    acc = tl.zeros((BLOCK_Q, V_COLUMNS), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    if SPLIT:
        first_chunk = tl.program_id(2) * CHUNK
        last_chunk = tl.minimum(first_chunk + CHUNK, high)
    else:
        first_chunk = low // CHUNK * CHUNK
        last_chunk = high
    for chunk in range(first_chunk, last_chunk, CHUNK):
        part = tl.zeros((BLOCK_Q, V_COLUMNS), tl.float32)
        part_largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        part_total = tl.zeros((BLOCK_Q,), tl.float32)
        chunk_end = chunk + CHUNK
        if WINDOW:
            part, part_largest, part_total = _attend(
                q, k_desc, v_desc, row_k, column_k, row_v, column_v, position, part, part_largest, part_total,
                tl.maximum(low, chunk), tl.minimum(clear, chunk_end), keys, window, factor, inverse_cap,
                BLOCK_K, True, CAUSAL, WINDOW, SOFTCAP, 1,
            )  # fmt: skip
        part, part_largest, part_total = _attend(
            q, k_desc, v_desc, row_k, column_k, row_v, column_v, position, part, part_largest, part_total,
            tl.maximum(clear, chunk), tl.minimum(full, chunk_end), keys, window, factor, inverse_cap,
            BLOCK_K, False, CAUSAL, WINDOW, SOFTCAP, STAGES,
        )  # fmt: skip
        part, part_largest, part_total = _attend(
            q, k_desc, v_desc, row_k, column_k, row_v, column_v, position, part, part_largest, part_total,
            tl.maximum(full, chunk), tl.minimum(high, chunk_end), keys, window, factor, inverse_cap,
            BLOCK_K, True, CAUSAL, WINDOW, SOFTCAP, 1,
        )  # fmt: skip
        if SPLIT:
            acc, largest, total = part, part_largest, part_total
        else:
            acc, largest, total = _fold(acc, largest, total, part, part_largest, part_total, factor)

    columns = column + tl.arange(0, V_COLUMNS)
    if SPLIT:
        place = ((index * heads + head) * chunks + tl.program_id(2)).to(tl.int64) * part_rows + rows
        tl.store(part_ptr + place[:, None] * HEAD_DIM + columns[None, :], acc, mask=inside[:, None])
        tl.store(part_largest_ptr + place, largest, mask=inside)
        tl.store(part_total_ptr + place, total, mask=inside)
    else:
        out, lse = _finish(acc, largest, total, factor)
        at = (batch * heads * SHARED + q_head).to(tl.int64) * tokens_q + start_q + query
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * HEAD_DIM + columns[None, :], out, mask=inside[:, None])
        tl.store(lse_ptr + at, lse, mask=inside)


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "tokens_q", "tokens_k", "heads", "sequences", "part_rows", "window", "factor",
        "chunks",
    ]
)  # fmt: skip
def _merge_kernel(
    part_ptr, part_largest_ptr, part_total_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    tokens_q, tokens_k, heads, sequences, part_rows, window, factor, chunks,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, SHARED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = program % heads
    index = program // heads % sequences
    tile = program // heads // sequences
    start_q, queries = sequence(cu_q_ptr, index, tokens_q, PACKED)
    _, keys = sequence(cu_k_ptr, index, tokens_k, PACKED)
    batch = index * (0 if PACKED else 1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    query = rows // SHARED
    inside = query < queries
    size = tl.arange(0, HEAD_DIM)
    first = keys - queries + tile * ROWS // SHARED
    last = keys - queries + tl.minimum((tile * ROWS + ROWS - 1) // SHARED, queries - 1)
    low, _, _, high = key_phases(first, last, keys, window, BLOCK_K, CAUSAL, WINDOW)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    base = ((index * heads + head) * chunks).to(tl.int64) * part_rows + rows
    for chunk in tl.range(low // CHUNK, tl.cdiv(high, CHUNK), loop_unroll_factor=8):
        place = base + chunk * part_rows
        part = tl.load(part_ptr + place[:, None] * HEAD_DIM + size[None, :], mask=inside[:, None], other=0.0)
        part_largest = tl.load(part_largest_ptr + place, mask=inside, other=float("-inf"))
        part_total = tl.load(part_total_ptr + place, mask=inside, other=0.0)
        acc, largest, total = _fold(acc, largest, total, part, part_largest, part_total, factor)
    out, lse = _finish(acc, largest, total, factor)
    at = ((batch * heads + head) * SHARED + rows % SHARED).to(tl.int64) * tokens_q + start_q + query
    tl.store(out_ptr + at[:, None] * HEAD_DIM + size[None, :], out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + at, lse, mask=inside)


def _cdiv(size: int, block: int) -> int:
    return -(-size // block)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, lengths: PackedLengths | None = None
) -> tuple[Tensor, Tensor]:
    """See attention_spec.py.

    Raises:
        ValueError: a device without Triton, a dtype or head size that the kernel does not take, a scale that is not
            positive.
    """
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}: the attention kernel takes {', '.join(map(str, DTYPES))}")
    head_dim = q.shape[3]
    padded = padded_head_dim(head_dim)
    with launch_on(q, "attention"):
        out, lse = _forward(*(pad_heads(x, padded) for x in (q, k, v)), problem(q, k, spec, lengths), lengths)
    return (out if padded == head_dim else out[..., :head_dim].contiguous()), lse


def _forward(q: Tensor, k: Tensor, v: Tensor, p: Problem, lengths: PackedLengths | None) -> tuple[Tensor, Tensor]:
    heads, tokens, head_dim = q.shape[1:]
    groups, index = heads // k.shape[1], q.device.index
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    tile = forward_tile(head_dim, q.dtype, p.longest_k if p.longest_q > 64 else 0)
    tiles = _cdiv(p.longest_q, tile.queries)
    chunks = _cdiv(p.longest_k, CHUNK)
    # Splitting changes no bits: it is for calls that would leave most of the chip idle.
    shared_tiles = _cdiv(p.longest_q * groups, tile.queries)
    idle = q.is_cuda and tiles * heads * p.sequences < _multiprocessors(index)
    split = chunks > 1 and (idle or shared_tiles == 1)
    shared, parts = 1, 1
    if split:
        tiles, shared, parts = shared_tiles, groups, chunks
    programs = tiles * (heads // shared) * p.sequences
    v_columns = head_dim
    # Programs may take halves of the value's columns, each with its own scores. Not in fp32, where a row's weights are
    # summed in an order that the compiler draws from all of a program's shapes.
    while split and v_columns > _LEAST_COLUMNS and q.dtype != torch.float32 and q.is_cuda:
        if programs * parts * (head_dim // v_columns) >= _multiprocessors(index):
            break
        v_columns //= 2
    q, k_rows, v_rows = aligned(q), as_rows(aligned(k)), as_rows(aligned(v))
    part = part_largest = part_total = None
    part_rows = p.longest_q * shared
    if split:
        places = p.sequences * (heads // shared) * chunks * part_rows
        part = torch.empty((places, head_dim), dtype=torch.float32, device=q.device)
        part_largest, part_total = torch.empty((2, places), dtype=torch.float32, device=q.device)
    cu_q, cu_k = (None, None) if lengths is None else (lengths.cu_q, lengths.cu_k)
    unit = 16 // q.element_size()
    constants = (head_dim, v_columns, tile.queries, tile.keys, tile.stages, CHUNK, unit, shared, split, *p.flags)
    run = launch(_forward_kernel, index, (q.dtype,), tile, constants)
    run(
        index, q, *k_rows.descriptor(run, 0, (tile.keys, head_dim)),
        *v_rows.descriptor(run, 1, (tile.keys, v_columns)), out, lse, part, part_largest, part_total, cu_q, cu_k,
        tokens, k.shape[2], *k_rows.places, *v_rows.places, *unit_strides(q),
        heads // shared, groups, p.sequences, tiles, p.window, p.factor, p.inverse_cap, chunks, part_rows,
        *constants,
        grid=(programs, head_dim // v_columns, parts),
    )  # fmt: skip
    if split:
        causal, window, _, packed = p.flags
        constants = (head_dim, _MERGED_ROWS, CHUNK, tile.keys, shared, causal, window, packed)
        run = launch(_merge_kernel, index, (q.dtype,), _MERGE_TILE, constants)
        run(
            index, part, part_largest, part_total, out, lse, cu_q, cu_k, tokens, k.shape[2],
            heads // shared, p.sequences, part_rows, p.window, p.factor, chunks, *constants,
            grid=(_cdiv(part_rows, _MERGED_ROWS) * (heads // shared) * p.sequences, 1, 1),
        )  # fmt: skip
    return out, lse
