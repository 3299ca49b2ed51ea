"""Attention's forward in Gluon, on Hopper, for heads of 64 to 256 in 16 bits: what forward.py computes, to the bit.

The pipeline is written by hand because the compiler's buffers as many blocks of values as of keys, and with 128 keys in
a block only one program then fits on a multiprocessor. Two blocks of keys and one of values let two programs fit, so
that one runs while the other waits. The products of one program hardly overlap with the softmax of the other (measured:
their times add), so speed depends on the number of instructions per key: large blocks and a short loop. For heads of
256 one accumulator takes half of a thread's registers, and blocks are half as large. What earlier chunks gave takes as
many registers again, and is spilled: once for each chunk, since a chunk's blocks have a loop of their own.

Imported by the first call that needs it, because Gluon has no interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from .. import plans
from . import tiles as tiles_of_triton


def own_tile(
    tile: tiles_of_triton.Tile, head_dim: int, masked: bool
) -> tuple[tiles_of_triton.Tile, tuple[int, int], int | None]:
    """This kernel's tile, with as many keys as forward.py's `tile`, which are part of the bits; how many blocks of keys
    and of values are in shared memory; and a thread's largest number of registers, if the compiler is not to choose it.

    A multiprocessor has two programs, or three for heads of 64, which need no more than 168 registers. A mask takes
    shared memory too, for the ones that sum a row's weights.
    """
    if head_dim <= 64:
        return tile, (2, 1), 168
    if head_dim <= 128:
        return tile, (1, 1) if masked else (2, 1), None
    return tile._replace(queries=64, warps=4), (1, 1), None


_tile_of = gluon.jit(tiles_of_triton.tile_of.fn)
_sequence = gluon.jit(tiles_of_triton.sequence.fn)
_key_phases = gluon.jit(tiles_of_triton.key_phases.fn)
_seen = gluon.jit(tiles_of_triton.seen.fn)
_capped = gluon.jit(tiles_of_triton.capped.fn)
_matrix_rows = gluon.jit(tiles_of_triton.matrix_rows.fn)
_with_matrix = gluon.jit(tiles_of_triton.with_matrix.fn)
_biased_exponent = gluon.jit(tiles_of_triton.biased_exponent.fn)


@gluon.jit
def _along(row, WIDE: gl.constexpr):
    """One number for each row, broadcast over the columns of an accumulator."""
    return gl.convert_layout(row, gl.SliceLayout(1, WIDE))[:, None]


@gluon.jit
def _fold(acc, largest, total, part, part_largest, part_total, factor, WIDE: gl.constexpr):
    """merge.fold, in the layouts of tensor-core accumulators."""
    new = gl.maximum(largest, part_largest)
    reference = gl.where(new == float("-inf"), 0.0, new)
    mine = gl.exp2((largest - reference) * factor)
    theirs = gl.exp2((part_largest - reference) * factor)
    acc = gl.fma(acc, _along(mine, WIDE), part * _along(theirs, WIDE))
    return acc, new, gl.fma(total, mine, part_total * theirs)


@gluon.jit
def _load(desc, row, column, ring, full, number, wanted, BUFFERS: gl.constexpr, BYTES: gl.constexpr):
    """Starts loading block `number` into its slot of the ring buffer; the block before must have been read."""
    place = number % BUFFERS
    mbarrier.expect(full.index(place), BYTES, pred=wanted)
    if len(desc.block_type.shape) == 3:  # a tensor's columns end with the head: TMA gives zeros for those behind
        tma.async_copy_global_to_shared(desc, [row, column, 0], full.index(place), ring.index(place), pred=wanted)
    else:
        tma.async_copy_global_to_shared(desc, [row, column], full.index(place), ring.index(place), pred=wanted)


@gluon.jit
def _arrived(ring, full, number, BUFFERS: gl.constexpr, BLOCK_K: gl.constexpr, HEAD_DIM: gl.constexpr):
    place = number % BUFFERS
    mbarrier.wait(full.index(place), number // BUFFERS & 1)
    return ring.index(place).reshape([BLOCK_K, HEAD_DIM])


@gluon.jit
def _clear_rows(block, first, there, BLOCK_K: gl.constexpr, LOADED: gl.constexpr):
    """Sets a block's rows before `first` and from `there` on to zero: they hold other data, and 0 times Inf is NaN."""
    PIECE: gl.constexpr = 32  # registers are few
    for s in gl.static_range(BLOCK_K // PIECE):
        piece = block.slice(s * PIECE, PIECE)
        row = s * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(1, LOADED))
        piece.store(gl.where(((row >= first) & (row < there))[:, None], piece.load(LOADED), 0.0))
    fence_async_shared()


@gluon.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "sinks_ptr", "tokens_q", "tokens_k", "row_kb", "row_kh", "col_kb", "col_kh", "row_vb",
        "row_vh", "col_vb", "col_vh", "stride_qb", "stride_qh", "stride_qs", "heads", "groups", "sequences", "tiles",
        "window", "factor", "inverse_cap", "matrix_ptr", "stride_mb", "stride_mh", "stride_mq", "stride_mk",
    ]
)  # fmt: skip
def forward_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr,
    matrix_ptr, stride_mb, stride_mh, stride_mq, stride_mk,
    tokens_q, tokens_k, row_kb, row_kh, col_kb, col_kh, row_vb, row_vh, col_vb, col_vh,
    stride_qb, stride_qh, stride_qs, heads, groups, sequences, tiles, window, factor, inverse_cap,
    SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, K_BUFFERS: gl.constexpr,
    V_BUFFERS: gl.constexpr, CHUNK: gl.constexpr, UNIT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
    SINKS: gl.constexpr, MATRIX: gl.constexpr, MATRIX_UNIT: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = BLOCK_Q // 16  # the rows of a tensor-core tile
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    BYTES: gl.constexpr = BLOCK_K * HEAD_DIM * 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    tile, head, index = _tile_of(gl.program_id(0), tiles, heads, sequences)
    tile = tiles - 1 - tile  # under a causal mask the last tile has the most work
    kv_head = head // groups
    start_q, queries = _sequence(cu_q_ptr, index, tokens_q, PACKED)
    if PACKED == 2:  # tiles.sequence_of_keys
        start_k = gl.load(cu_k_ptr + 2 * index)
        dropped = gl.load(cu_k_ptr + 2 * index + 1)
        keys = gl.load(cu_k_ptr + 2 * index + 2) - start_k + dropped
        start_k -= dropped
    else:
        start_k, keys = _sequence(cu_k_ptr, index, tokens_k, PACKED)
    batch = index * (0 if PACKED else 1)
    if tile * BLOCK_Q >= queries:
        return
    first = keys - queries + tile * BLOCK_Q
    last = keys - queries + gl.minimum(tile * BLOCK_Q + BLOCK_Q, queries) - 1
    low, clear, full, high = _key_phases(first, last, keys, window, BLOCK_K, CAUSAL, WINDOW)
    blocks = gl.maximum(high - low + BLOCK_K - 1, 0) // BLOCK_K
    row_k = batch * row_kb + kv_head * row_kh + start_k + low
    row_v = batch * row_vb + kv_head * row_vh + start_k + low
    column_k = batch * col_kb + kv_head * col_kh
    column_v = batch * col_vb + kv_head * col_vh

    if SIZE == HEAD_DIM:
        k_ring = gl.allocate_shared_memory(dtype, [K_BUFFERS, BLOCK_K, HEAD_DIM], k_desc.layout)
        v_ring = gl.allocate_shared_memory(dtype, [V_BUFFERS, BLOCK_K, HEAD_DIM], v_desc.layout)
    else:
        k_ring = gl.allocate_shared_memory(dtype, [K_BUFFERS, BLOCK_K, 1, HEAD_DIM], k_desc.layout)
        v_ring = gl.allocate_shared_memory(dtype, [V_BUFFERS, BLOCK_K, 1, HEAD_DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [K_BUFFERS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_BUFFERS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(K_BUFFERS):
        mbarrier.init(k_full.index(s), count=1)
    for s in gl.static_range(V_BUFFERS):
        mbarrier.init(v_full.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(K_BUFFERS):
        _load(k_desc, row_k + s * BLOCK_K, column_k, k_ring, k_full, s, s < blocks, K_BUFFERS, BYTES)
    for s in gl.static_range(V_BUFFERS):
        _load(v_desc, row_v + s * BLOCK_K, column_v, v_ring, v_full, s, s < blocks, V_BUFFERS, BYTES)

    q_row = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, LOADED))
    size = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADED))
    token = (start_q + q_row).to(gl.int64)
    q_at = batch.to(gl.int64) * stride_qb + head.to(gl.int64) * stride_qh + token * stride_qs
    q_inside = (q_row < queries)[:, None] & (size < SIZE)[None, :]
    q_there = gl.load(q_ptr + q_at[:, None] * UNIT + size[None, :], mask=q_inside, other=0.0)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, HEAD_DIM], dtype)
    q = gl.allocate_shared_memory(dtype, [BLOCK_Q, HEAD_DIM], q_layout, q_there)
    fence_async_shared()

    query = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=ROW)
    position = keys - queries + query
    nothing = gl.zeros([BLOCK_Q, BLOCK_K], gl.float32, NARROW)
    acc = gl.zeros([BLOCK_Q, HEAD_DIM], gl.float32, WIDE)
    largest = gl.full([BLOCK_Q], float("-inf"), gl.float32, ROW)
    total = gl.zeros([BLOCK_Q], gl.float32, ROW)
    score_factor, mask_row = factor, query
    if MATRIX:
        ones = gl.allocate_shared_memory(
            dtype, [BLOCK_K, 16], gl.NVMMASharedLayout.get_default_for([BLOCK_K, 16], dtype),
            gl.full([BLOCK_K, 16], 1.0, dtype, gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])),
        )  # fmt: skip
        fence_async_shared()
        nothing_narrow = gl.zeros([BLOCK_Q, 16], gl.float32, SUMS)
        of_head = batch.to(gl.int64) * stride_mb + head.to(gl.int64) * stride_mh
        if MATRIX_UNIT < 0:
            mask_row = _matrix_rows(matrix_ptr, of_head, MATRIX_UNIT)
        else:
            of_query = gl.minimum(query, queries - 1).to(gl.int64) * stride_mq
            mask_row = _matrix_rows(matrix_ptr, of_head + of_query, MATRIX_UNIT)[:, None]
        if MATRIX == 2:
            factor = gl.to_tensor(1.4426950408889634)
    for chunk in range(low // CHUNK, (high + CHUNK - 1) // CHUNK):
        before, before_largest, before_total = acc, largest, total
        acc = gl.zeros([BLOCK_Q, HEAD_DIM], gl.float32, WIDE)
        largest = gl.full([BLOCK_Q], float("-inf"), gl.float32, ROW)
        total = gl.zeros([BLOCK_Q], gl.float32, ROW)
        for start in range(gl.maximum(low, chunk * CHUNK), gl.minimum(high, chunk * CHUNK + CHUNK), BLOCK_K):
            i = (start - low) // BLOCK_K
            k = _arrived(k_ring, k_full, i, K_BUFFERS, BLOCK_K, HEAD_DIM)
            scores = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False)
            if K_BUFFERS == 1:  # this product was the last to read it
                _load(k_desc, row_k + (i + 1) * BLOCK_K, column_k, k_ring, k_full, i + 1, i + 1 < blocks, 1, BYTES)
            scores = _capped(scores, inverse_cap, SOFTCAP)
            if MATRIX:
                key = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, NARROW))
                scores = _with_matrix(
                    scores, score_factor, mask_row, key[None, :], stride_mk, keys, MATRIX, MATRIX_UNIT, True
                )
            if (start >= full) | (start < clear):
                key = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, NARROW))
                see = _seen(position[:, None], key[None, :], keys, window, CAUSAL, WINDOW)
                scores = gl.where(see, scores, float("-inf"))
            new = gl.maximum(largest, gl.max(scores, 1))
            reference = gl.where(new == float("-inf"), 0.0, new)
            if MATRIX == 2:
                weights = gl.exp2((scores - reference[:, None]) * factor)
            else:
                weights = gl.exp2(gl.fma(scores, factor, -(reference * factor)[:, None]))
            decay = gl.exp2((largest - reference) * factor)
            if MATRIX:  # a sum as forward.py has it
                rounded = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
                sums = gl.max(warpgroup_mma(rounded, ones, nothing_narrow, use_acc=False), 1)
                total = gl.fma(total, decay, gl.convert_layout(sums, ROW))
            else:
                total = gl.fma(total, decay, gl.sum(weights, 1))
            largest = new
            weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, WIDE, 2))
            v = _arrived(v_ring, v_full, i, V_BUFFERS, BLOCK_K, HEAD_DIM)
            if PACKED == 2:
                if (start + BLOCK_K > keys) | (start < dropped):
                    _clear_rows(v, dropped - start, keys - start, BLOCK_K, LOADED)
            else:
                if start + BLOCK_K > keys:
                    _clear_rows(v, 0, keys - start, BLOCK_K, LOADED)
            acc = warpgroup_mma(weights, v, acc * _along(decay, WIDE))
            if K_BUFFERS > 1:
                ahead = i + K_BUFFERS
                _load(
                    k_desc, row_k + ahead * BLOCK_K, column_k, k_ring, k_full, ahead, ahead < blocks, K_BUFFERS, BYTES
                )
            ahead = i + V_BUFFERS
            _load(v_desc, row_v + ahead * BLOCK_K, column_v, v_ring, v_full, ahead, ahead < blocks, V_BUFFERS, BYTES)
        acc, largest, total = _fold(before, before_largest, before_total, acc, largest, total, factor, WIDE)
    for s in gl.static_range(K_BUFFERS):
        mbarrier.invalidate(k_full.index(s))
    for s in gl.static_range(V_BUFFERS):
        mbarrier.invalidate(v_full.index(s))

    if MATRIX == 2:  # as merge.finish
        largest = _biased_exponent(largest)
        factor = gl.to_tensor(1.0)
    if SINKS:  # merge.with_sinks
        sink = gl.load(sinks_ptr + head) * 1.4426950408889634
        largest = largest * factor
        new = gl.maximum(largest, sink)
        reference = gl.where(new == float("-inf"), 0.0, new)
        mine = gl.exp2(largest - reference)
        acc = acc * _along(mine, WIDE)
        total = gl.fma(total, mine, gl.exp2(sink - reference))
        largest, factor = new, gl.to_tensor(1.0)
    empty = total == 0.0
    out = acc / _along(gl.where(empty, 1.0, total), WIDE) + 0.0
    lse = gl.where(empty, float("-inf"), gl.fma(largest, factor, gl.log2(total)))
    at = (batch * heads + head).to(gl.int64) * tokens_q + start_q
    row = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    out_at = (batch.to(gl.int64) * tokens_q + start_q + row) * heads + head
    inside = (row < queries)[:, None] & (column < SIZE)[None, :]
    gl.store(out_ptr + out_at[:, None] * SIZE + column[None, :], out.to(dtype), mask=inside)
    gl.store(lse_ptr + at + query, lse, mask=query < queries)


forward = plans.Kernel(forward_kernel, enable_fp_fusion=False)
