"""Attention in Triton, forward: `forward(q, k, v, spec, lengths)` of spec.py; `backward` is beside it.

A program holds a tile of queries and loops over the keys from position 0 of their sequence. The bits of a row of out
depend only on its query and the keys that this query sees, because

- scores and outputs are tensor-core products, whose bits do not depend on the tile;
- a maximum does not depend on the order, and a row's weights are summed in an order that the tile's keys and warps
  decide, which are fixed for a head size and dtype;
- the running result is cut every CHUNK keys, and the chunks are folded in order. One program may compute all chunks, or
  one program each, with another kernel to fold them, as for a decode step (flash-decoding's split, at positions that
  are fixed);
- a block that a query does not see does not change its bits: the weights are 0 and the factors 1. This needs finite
  keys and values, since queries of the same sequence share a tile and 0 times Inf is NaN.

The query heads of one key head may share a tile as rows, so that a decode step reads the keys once. On Hopper, calls
that are not split run the kernel of hopper.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import can_overlap, cdiv, empty, launch_on, multiprocessors_of
from ..plans import Kernel, Launch, run
from .backward import backward
from .merge import finish, fold, merge_kernel
from .spec import CHUNK, AttentionSpec, PackedLengths, heads_side_by_side, strides_of_heads
from .tiles import (
    LOG2_E,
    Problem,
    Rows,
    Tile,
    aligned,
    as_matrix,
    as_numbers,
    as_options,
    capped,
    forward_tile,
    from_options,
    has_room,
    key_phases,
    load_paged_tokens,
    load_tokens,
    matrix_rows,
    matrix_strides,
    pad_heads,
    padded_head_dim,
    problem,
    rows_of,
    seen,
    sequence,
    sequence_of_keys,
    taken,
    taken_head_dim,
    tile_for,
    tile_of,
    unit_strides,
    with_matrix,
)

__all__ = ["backward", "forward"]

_MIN_COLUMNS = 64
_MERGE_WIDTH = 16  # chunks
_MAX_SCRATCH = 2**28  # bytes


@triton.jit
def _attend(
    q, k_desc, v_desc, mask_row, stride_mk, row_k, column_k, row_v, column_v, v_offset, position,
    before, before_largest, before_total, acc, largest, total,
    low, high, keys, dropped, window, score_factor, factor, inverse_cap, pages_ptr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, FOLDS: tl.constexpr, PACKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr, MATRIX: tl.constexpr,
    MATRIX_UNIT: tl.constexpr, CLIPPED: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The online softmax (arXiv 1805.02867, 2205.14135) over the key blocks from low to high: acc, largest and total of
    the current chunk. With FOLDS they are folded into those of the chunks before whenever a new chunk begins.

    One loop covers all chunks, so that loads continue while a chunk is folded. MASKED: rows of v before the first key
    and past the last are set to zero in registers, so v is loaded without a pipeline, which would need more shared
    memory.
    """
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        if PAGE:
            k = load_paged_tokens(
                k_desc, pages_ptr, row_k, column_k, start, 0, keys, BLOCK_K, q.shape[1], CLIPPED, SIZE, PAGE, UNIT
            )
            v = load_paged_tokens(
                v_desc, pages_ptr, row_v, column_v, start, v_offset, keys, BLOCK_K, acc.shape[1], CLIPPED, SIZE, PAGE,
                UNIT,
            )  # fmt: skip
        else:
            k = load_tokens(k_desc, row_k + start, column_k, 0, BLOCK_K, q.shape[1], CLIPPED)
            v = load_tokens(v_desc, row_v + start, column_v, v_offset, BLOCK_K, acc.shape[1], CLIPPED)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if FOLDS:  # noqa: SIM102 - a constexpr: no branch is compiled if it is False
            if start % CHUNK == 0:
                before, before_largest, before_total = fold(
                    before, before_largest, before_total, acc, largest, total, factor
                )
                acc = tl.zeros_like(acc)
                largest = tl.full(largest.shape, float("-inf"), tl.float32)
                total = tl.zeros_like(total)
        scores = capped(scores, inverse_cap, SOFTCAP)
        if MATRIX:
            key = tl.multiple_of(start, BLOCK_K) + tl.arange(0, BLOCK_K)
            scores = with_matrix(
                scores, score_factor, mask_row, key[None, :], stride_mk, keys, MATRIX, MATRIX_UNIT, MASKED
            )
        if MASKED:
            key = start + tl.arange(0, BLOCK_K)
            see = seen(position[:, None], key[None, :], keys, window, CAUSAL, WINDOW)
            scores = tl.where(see, scores, float("-inf"))
            there = key < keys
            if PACKED == 2:
                there = there & (key >= dropped)
            v = tl.where(there[:, None], v, 0.0)  # rows of other data: 0 times Inf is NaN
        new = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new == float("-inf"), 0.0, new)
        if MATRIX == 2:
            weights = tl.exp2((scores - reference[:, None]) * factor)  # large biases: their difference is exact
        else:
            weights = tl.exp2(tl.fma(scores, factor, -(reference * factor)[:, None]))
        decay = tl.exp2((largest - reference) * factor)  # exactly 1 where the largest score is unchanged
        if MATRIX:
            # The loads of a matrix make the compiler lay scores out anew, differently in each compiled form, and with
            # the layout goes the order of tl.sum. A product has one order; its columns are all the same sum.
            ones = tl.full((BLOCK_K, 16), 1.0, v.dtype)
            total = tl.fma(total, decay, tl.max(tl.dot(weights.to(v.dtype), ones, input_precision="ieee"), 1))
        else:
            total = tl.fma(total, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        largest = new
    return before, before_largest, before_total, acc, largest, total


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "sinks_ptr", "tokens_q", "tokens_k", "row_kb", "row_kh", "col_kb", "col_kh", "row_vb",
        "row_vh", "col_vb", "col_vh", "stride_qb", "stride_qh", "stride_qs", "heads", "groups", "sequences", "tiles",
        "window", "factor", "inverse_cap", "chunks", "part_rows", "places", "matrix_ptr", "stride_mb", "stride_mh",
        "stride_mq", "stride_mk", "pages_ptr", "stride_pages",
    ]
)  # fmt: skip
def _forward_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, pages_ptr, sinks_ptr,
    matrix_ptr, stride_mb, stride_mh, stride_mq, stride_mk, part_ptr,
    tokens_q, tokens_k, row_kb, row_kh, col_kb, col_kh, row_vb, row_vh, col_vb, col_vh,
    stride_qb, stride_qh, stride_qs, heads, groups, sequences, tiles, window, factor, inverse_cap,
    chunks, part_rows, places, stride_pages,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr, SHARED: tl.constexpr, SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, OVERLAP: tl.constexpr,
    SINKS: tl.constexpr, MATRIX: tl.constexpr, MATRIX_UNIT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    # A head has SIZE columns, which are taken as HEAD_DIM with zeros behind.
    # Row r of a tile is query r // SHARED of head h * SHARED + r % SHARED; `heads` counts the h.
    tile, head, index = tile_of(tl.program_id(0), tiles, heads, sequences)
    tile = tiles - 1 - tile  # under a causal mask the last tile has the most work
    v_offset = tl.program_id(1) * V_COLUMNS
    kv_head = head if SHARED > 1 else head // groups
    start_q, queries = sequence(cu_q_ptr, index, tokens_q, PACKED)
    start_k, keys, dropped = sequence_of_keys(cu_k_ptr, index, tokens_k, PACKED)
    batch = index * (0 if PACKED else 1)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    if tile * BLOCK_Q >= queries * SHARED:
        return
    query = rows // SHARED
    inside = query < queries
    first = keys - queries + tile * BLOCK_Q // SHARED
    last = keys - queries + tl.minimum((tile * BLOCK_Q + BLOCK_Q - 1) // SHARED, queries - 1)
    low, clear, full, high = key_phases(first, last, keys, window, BLOCK_K, CAUSAL, WINDOW)
    if SPLIT:
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()  # merge_kernel may be launched and wait
        low = tl.maximum(low, tl.program_id(2) * CHUNK)
        high = tl.minimum(high, tl.program_id(2) * CHUNK + CHUNK)
        clear = tl.maximum(tl.minimum(clear, high), low)
        full = tl.maximum(tl.minimum(full, high), clear)
        if low >= high:
            return
    size = tl.arange(0, HEAD_DIM)
    q_head = head * SHARED + rows % SHARED
    q_at = batch.to(tl.int64) * stride_qb + q_head.to(tl.int64) * stride_qh + (start_q + query).to(tl.int64) * stride_qs
    q_there = inside[:, None] if SIZE == HEAD_DIM else inside[:, None] & (size < SIZE)[None, :]
    q = tl.load(q_ptr + q_at[:, None] * UNIT + size[None, :], mask=q_there, other=0.0)
    row_k = batch * row_kb + kv_head * row_kh + start_k
    row_v = batch * row_vb + kv_head * row_vh + start_k
    column_k = batch * col_kb + kv_head * col_kh
    column_v = batch * col_vb + kv_head * col_vh
    if PAGE:  # k_desc and v_desc are pointers, and the numbers are the strides of pages, heads and tokens
        k_desc += kv_head.to(tl.int64) * row_kh * UNIT
        v_desc += kv_head.to(tl.int64) * row_vh * UNIT
        pages_ptr += index.to(tl.int64) * stride_pages
        row_k, column_k, row_v, column_v = row_kb, col_kb, row_vb, col_vb
    position = keys - queries + query
    acc = tl.zeros((BLOCK_Q, V_COLUMNS), tl.float32)
    largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    before, before_largest, before_total = acc, largest, total
    score_factor, mask_row = factor, query
    if MATRIX:
        if MATRIX_UNIT < 0 and SHARED == 1:
            of_head = batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh
            mask_row = matrix_rows(matrix_ptr, of_head, MATRIX_UNIT)
        else:
            of_query = tl.minimum(query, queries - 1).to(tl.int64) * stride_mq + batch.to(tl.int64) * stride_mb
            mask_row = matrix_rows(matrix_ptr, of_query + q_head.to(tl.int64) * stride_mh, MATRIX_UNIT)[:, None]
        if MATRIX == 2:
            factor = tl.full((), 1.4426950408889634, tl.float32)  # of 2
    if WINDOW:
        before, before_largest, before_total, acc, largest, total = _attend(
            q, k_desc, v_desc, mask_row, stride_mk, row_k, column_k, row_v, column_v, v_offset, position,
            before, before_largest, before_total, acc, largest, total,
            low, clear, keys, dropped, window, score_factor, factor, inverse_cap, pages_ptr,
            CHUNK, BLOCK_K, True, not SPLIT, PACKED, CAUSAL, WINDOW, SOFTCAP, 1, MATRIX, MATRIX_UNIT,
            SIZE != HEAD_DIM, SIZE, PAGE, UNIT,
        )  # fmt: skip
    before, before_largest, before_total, acc, largest, total = _attend(
        q, k_desc, v_desc, mask_row, stride_mk, row_k, column_k, row_v, column_v, v_offset, position,
        before, before_largest, before_total, acc, largest, total,
        clear, full, keys, dropped, window, score_factor, factor, inverse_cap, pages_ptr,
        CHUNK, BLOCK_K, False, not SPLIT, PACKED, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT,
        SIZE != HEAD_DIM, SIZE, PAGE, UNIT,
    )  # fmt: skip
    before, before_largest, before_total, acc, largest, total = _attend(
        q, k_desc, v_desc, mask_row, stride_mk, row_k, column_k, row_v, column_v, v_offset, position,
        before, before_largest, before_total, acc, largest, total,
        full, high, keys, dropped, window, score_factor, factor, inverse_cap, pages_ptr,
        CHUNK, BLOCK_K, True, not SPLIT, PACKED, CAUSAL, WINDOW, SOFTCAP, 1, MATRIX, MATRIX_UNIT,
        SIZE != HEAD_DIM, SIZE, PAGE, UNIT,
    )  # fmt: skip

    columns = v_offset + tl.arange(0, V_COLUMNS)
    if SPLIT:
        place = ((index * heads + head) * chunks + tl.program_id(2)).to(tl.int64) * part_rows + rows
        largest_ptr = part_ptr + places.to(tl.int64) * HEAD_DIM
        tl.store(part_ptr + place[:, None] * HEAD_DIM + columns[None, :], acc, mask=inside[:, None])
        tl.store(largest_ptr + place, largest, mask=inside)
        tl.store(largest_ptr + places + place, total, mask=inside)
    else:
        acc, largest, total = fold(before, before_largest, before_total, acc, largest, total, factor)
        sinks = tl.load(sinks_ptr + q_head, mask=inside, other=0.0) if SINKS else 0.0
        out, lse = finish(acc, largest, total, factor, sinks, SINKS, MATRIX)
        out_at = (batch.to(tl.int64) * tokens_q + start_q + query) * (heads * SHARED) + q_head
        lse_at = (batch * heads * SHARED + q_head).to(tl.int64) * tokens_q + start_q + query
        out = out.to(out_ptr.dtype.element_ty)
        there = inside[:, None] if SIZE == HEAD_DIM else inside[:, None] & (columns < SIZE)[None, :]
        tl.store(out_ptr + out_at[:, None] * SIZE + columns[None, :], out, mask=there)
        tl.store(lse_ptr + lse_at, lse, mask=inside)


def _max_scratch(cache: int) -> int:
    """How many bytes of scratch memory a split may take; cache: the bytes of keys and values.

    A decode step needs at most about cache / 4, unless sequences are much shorter than max_seqlen_k says.
    """
    return max(_MAX_SCRATCH, cache // 2)


def _has_own_kernel(index: int | None, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether hopper.py computes this: the same bits, faster."""
    hopper = index is not None and torch.version.hip is None and torch.cuda.get_device_capability(index) == (9, 0)
    return hopper and head_dim in (64, 128, 256) and dtype != torch.float32


_attention = Kernel(_forward_kernel, enable_fp_fusion=False)
_merge = Kernel(merge_kernel, enable_fp_fusion=False)


class _Plan(NamedTuple):
    """How attention is computed.

    is_own    by hopper.py's kernel, not by this file's
    blocks    of keys and of values that a step loads
    attend    its launch, and the numbers after its tensors
    merge     the launch that folds chunks which had a program each; None if one program had all of them
    parts     the number of fp32 values that programs then leave to it
    """

    is_own: bool
    blocks: tuple[tuple[int, int], tuple[int, int]]
    attend: tuple[Launch, tuple]
    merge: tuple[Launch, tuple] | None = None
    parts: int = 0


def _plan(
    shape: tuple[int, ...], keys: int, q_units: tuple[int, int, int], k_rows: Rows, v_rows: Rows, dtype: torch.dtype,
    index: int | None, p: Problem, chunk: int, page: int = 0,
) -> _Plan:  # fmt: skip
    heads, tokens, size = shape[1:]
    head_dim = padded_head_dim(size)
    causal, window, _, packed = p.flags
    groups = heads // p.kv_heads
    tile = tile_for(p, forward_tile(head_dim, dtype), index)
    tiles = cdiv(p.longest_q, tile.queries)
    chunks = cdiv(p.longest_k, chunk)
    # Splitting changes no bits; it helps calls that would leave most of the GPU idle.
    shared_tiles = cdiv(p.longest_q * groups, tile.queries)
    idle = index is not None and tiles * heads * p.sequences < multiprocessors_of(index)
    scratch = 4 * heads * p.sequences * p.longest_q * chunks * (head_dim + 2)
    cache = 2 * p.kv_heads * keys * head_dim * dtype.itemsize * (1 if packed else p.sequences)
    most = _max_scratch(cache if shared_tiles == 1 else 0)
    split = chunks > 1 and (shared_tiles == 1 or idle) and scratch <= most
    is_own = not split and not page and _has_own_kernel(index, head_dim, dtype)
    unit, masks = 16 // dtype.itemsize, (p.sinks, p.matrix, p.matrix_unit)
    launch_index = -1 if index is None else index
    if is_own:
        from . import hopper

        tile, buffers, registers = hopper.own_tile(tile, head_dim, p.matrix > 0)
        tiles = cdiv(p.longest_q, tile.queries)
    shared, slots = 1, 1
    if split:
        tiles, shared, slots = shared_tiles, groups, chunks
        if has_room(index) and not p.matrix:
            tile = tile._replace(stages=3)
    programs = tiles * (heads // shared) * p.sequences
    numbers = (
        tokens, keys, *k_rows.places, *v_rows.places, *q_units, heads // shared, groups, p.sequences, tiles,
        p.window, p.factor, p.inverse_cap,
    )  # fmt: skip
    k_block = v_block = tile.keys, head_dim
    if is_own:
        constants = size, head_dim, tile.queries, tile.keys, *buffers, chunk, unit, *p.flags, *masks
        options = tile.options if registers is None else {**tile.options, "maxnreg": registers}
        launch = Launch(hopper.forward, launch_index, (programs,), constants, **options)
        return _Plan(True, (k_block, v_block), (launch, numbers))
    v_columns = head_dim
    # If half of the GPU would still be idle, each program computes half of v's columns and its own scores. Not in fp32,
    # where the compiler derives the order of a row's sum of weights from all shapes of a program.
    while split and v_columns > _MIN_COLUMNS and dtype != torch.float32 and index is not None:
        if 2 * programs * slots * (head_dim // v_columns) > multiprocessors_of(index):
            break
        v_columns //= 2
    part_rows = p.longest_q * shared
    pairs = (heads // shared) * p.sequences
    places = pairs * chunks * part_rows if split else 0
    overlap = can_overlap(index)
    constants = (
        size, head_dim, v_columns, tile.queries, tile.keys, tile.stages, chunk, unit, shared, split, *p.flags, overlap,
        *masks, page,
    )  # fmt: skip
    grid = programs, head_dim // v_columns, slots
    launch = Launch(_attention, launch_index, grid, constants, **tile.options)
    attend = launch, (*numbers, chunks, part_rows, places)
    blocks = k_block, (tile.keys, v_columns)
    if not split:
        return _Plan(False, blocks, attend)
    merge_tile = Tile(1, 0, max(1, head_dim // 32), 1)  # one column for each thread, so that registers hold many parts
    constants = size, head_dim, chunk, tile.keys, shared, causal, window, packed, overlap, _MERGE_WIDTH
    options = {**merge_tile.options, "launch_pdl": True} if overlap else merge_tile.options
    launch = Launch(_merge, launch_index, (part_rows * pairs,), (*constants, p.sinks, p.matrix), **options)
    numbers = tokens, keys, heads // shared, part_rows, places, p.window, p.exponent, chunks
    return _Plan(False, blocks, attend, (launch, numbers), places * (head_dim + 2))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    lengths: PackedLengths | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See spec.py. Raises ValueError for a device without Triton, and for a mask whose strides have over 32 bits."""
    packed, options = as_options(spec, lengths)
    pages = None if lengths is None else lengths.pages
    return run(_prepare, (q, k, v, sinks, mask, *packed, pages), *options)  # type: ignore[no-any-return]


def _itself(x: Tensor) -> Tensor:
    return x


def _in_place(x: Tensor) -> Tensor:
    """Keys or values in pages, which are read where they are."""
    if aligned(x) is not x:
        raise ValueError(
            f"pages of {x.dtype} {tuple(x.shape)} with strides {x.stride()}: each row must begin at a multiple of 16 "
            "bytes, since pages are not copied"
        )
    return x


def _prepare(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Callable:
    """`forward` of tensors of these layouts; the others are sinks, mask, three of `lengths`, and numbers."""
    launch_on(q, "attention")
    head_dim, padded = q.shape[3], taken_head_dim(q.shape[3], q.dtype)
    if padded == head_dim:
        return _prepare_taken(q, k, v, *others)
    if others[4] is not None:
        _in_place(k)  # raises: rows of this size do not align
    attend = _prepare_taken(*(pad_heads(x, padded) for x in (q, k, v)), *others)

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = attend(*(pad_heads(x, padded) for x in (q, k, v)), *others)
        return heads_side_by_side(out[..., :head_dim]), lse

    return call


def _prepare_taken(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None, pages: Tensor | None, *options: Any,
) -> Callable:  # fmt: skip
    """The same of a head size that kernels take."""
    shape, strides, dtype, device, keys = (*q.shape,), strides_of_heads(q.shape), q.dtype, q.device, k.shape[2]

    new_lse = empty(shape[:3], torch.float32, device)

    def results() -> tuple[Tensor, Tensor]:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device), new_lse()

    def without_keys(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        out, lse = results()
        return out.zero_(), lse.fill_(float("-inf")) if sinks is None else lse.copy_((sinks * LOG2_E)[:, None])

    if q.numel() == 0:
        return lambda *_: results()
    if keys == 0:
        return without_keys
    mask = None if mask is None else mask.resolve_neg()
    of_keys = as_matrix if pages is None else _in_place
    takes = aligned, of_keys, of_keys, Tensor.resolve_neg, as_numbers
    (q, k, v, sinks, _), take = taken(takes, (q, k, v, sinks, mask))
    p, page = problem(q, k, *from_options(cu_q, cu_k, *options), sinks, mask), 0
    if pages is None:
        k_rows, v_rows = rows_of(k), rows_of(v)
    else:
        k_rows, v_rows = (Rows((), (), *unit_strides(x), 0) for x in (k, v))
        page, keys = keys, p.longest_k * p.sequences
    plan = _plan(shape, keys, unit_strides(q), k_rows, v_rows, dtype, device.index, p, CHUNK, page)
    make: Any = TensorDescriptor
    if plan.is_own:
        from ..gluon_descriptor import make
    of_k: Any = _itself
    of_v: Any = _itself
    if pages is None:
        of_k, of_v = k_rows.described(k, plan.blocks[0], make), v_rows.described(v, plan.blocks[1], make)
    stride_pages = 0 if pages is None else pages.stride(0)
    (attend, numbers), merge, parts, has_part = plan.attend, plan.merge, plan.parts, not plan.is_own
    numbers_of_mask = matrix_strides(mask, p.matrix_unit)

    def call(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, *packed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        *starts, pages = packed
        q, k, v, sinks, mask = take(q, k, v, sinks, mask)
        out, lse = results()
        part = (torch.empty(parts, dtype=torch.float32, device=device) if parts else None,) if has_part else ()
        own = (pages,) if has_part else ()
        last = (stride_pages,) if has_part else ()
        attend(q, of_k(k), of_v(v), out, lse, *starts, *own, sinks, mask, *numbers_of_mask, *part, *numbers, *last)
        if merge is not None:
            launch, more_numbers = merge
            launch(*part, out, lse, *starts, sinks, *more_numbers)
        return out, lse

    return call
