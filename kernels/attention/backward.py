"""Attention in Triton, backward: `backward(dout, q, k, v, out, lse, spec, lengths)` of spec.py.

No atomics; the formulas are FlashAttention-2's (arXiv 2307.08691). For dk and dv a program holds a block of keys and
loops over the queries, for heads of 256 one program for each of the two; for dq it holds a block of queries and loops
over the keys. Each sum is one chain in a tensor-core accumulator, in the order of the tokens, so the tile shape cannot
change it. This takes seven products, for heads of 256 eight, where one pass with atomics takes five.

If several query heads share a key head, dk and dv are written in fp32 for each query head and added in head order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, empty, launch_on
from ..plans import Kernel, Launch, described, run
from .spec import AttentionSpec, PackedLengths, heads_side_by_side, sink_grads, strides_of_heads
from .tiles import (
    Problem,
    Tile,
    aligned,
    aligned_flat,
    as_matrix,
    as_numbers,
    as_options,
    backward_key_tiles,
    backward_query_tile,
    biased_exponent,
    capped,
    from_options,
    has_room,
    key_phases,
    load_tokens,
    matrix_rows,
    matrix_strides,
    pad_heads,
    padded_head_dim,
    problem,
    rows_of,
    seen,
    sequence,
    taken,
    taken_head_dim,
    tile_for,
    tile_of,
    unit_strides,
    with_matrix,
)

_DELTA_TILE = Tile(32, 0, 4, 1)
_SUM_TILE = Tile(1024, 0, 4, 1)  # elements for each program of the sum over query heads; whole rows


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "tokens", "stride_ob", "stride_oh", "stride_os", "stride_db", "stride_dh", "stride_ds",
    ]
)  # fmt: skip
def _delta_kernel(
    out_ptr, dout_ptr, delta_ptr, rows, heads, tokens,
    stride_ob, stride_oh, stride_os, stride_db, stride_dh, stride_ds,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """delta = the sum of out * dout over a row, which the softmax's backward subtracts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    size = tl.arange(0, HEAD_DIM)
    inside = row < rows
    batch, head, token = row // tokens // heads, row // tokens % heads, row % tokens
    o_at = batch * stride_ob + head * stride_oh + token * stride_os
    d_at = batch * stride_db + head * stride_dh + token * stride_ds
    there = inside[:, None] if SIZE == HEAD_DIM else inside[:, None] & (size < SIZE)[None, :]
    out = tl.load(out_ptr + o_at[:, None] * UNIT + size[None, :], mask=there, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + d_at[:, None] * UNIT + size[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(out * dout, 1), mask=inside)


@triton.jit
def _score_grads(scores, weights, dweights, delta, SOFTCAP: tl.constexpr):
    """The gradient of q kᵀ without the factor scale; with a softcap, `scores` are the tanh values."""
    dscores = weights * (dweights - delta)
    if SOFTCAP:
        dscores *= 1.0 - scores * scores
    return dscores


@triton.jit
def _of_queries(rows, at, start, queries, BLOCK_Q: tl.constexpr, TAIL: tl.constexpr, ALIGNED: tl.constexpr):
    """One number for each query of a block; those past the last query are any.

    ALIGNED: rows is a descriptor. Without TMA each thread loads all numbers of a block.
    """
    if ALIGNED:
        return rows.load([(at + start).to(tl.int32)])
    else:
        query = start + tl.arange(0, BLOCK_Q)
        return tl.load(rows + at + query, mask=query < queries, other=0.0) if TAIL else tl.load(rows + at + query)


@triton.jit
def _walk_queries(
    k, v, q_desc, dout_desc, mask_ptr, stride_mq, stride_mk, lse_rows, delta_rows, row_q, column_q, row_d, column_d,
    at, key, dk, dv, low, high, queries, keys, window, score_factor, factor, inverse_cap,
    BLOCK_Q: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, MATRIX: tl.constexpr, MATRIX_UNIT: tl.constexpr,
    CLIPPED: tl.constexpr, ALIGNED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BLOCK_Q, num_stages=STAGES):
        q = load_tokens(q_desc, row_q + start, column_q, 0, BLOCK_Q, k.shape[1], CLIPPED)
        dout = load_tokens(dout_desc, row_d + start, column_d, 0, BLOCK_Q, k.shape[1], CLIPPED)
        query = start + tl.arange(0, BLOCK_Q)
        lse = _of_queries(lse_rows, at, start, queries, BLOCK_Q, TAIL, ALIGNED)
        if TAIL:
            # rows past the last query belong to other sequences or heads: 0 times Inf would be NaN
            inside = query < queries
            q = tl.where(inside[:, None], q, 0.0)
            dout = tl.where(inside[:, None], dout, 0.0)
        # transposed, so that weights and their gradients are first operands of the products that follow
        scores = capped(tl.dot(k, q.T, input_precision="ieee"), inverse_cap, SOFTCAP)
        exponents = scores
        if MATRIX:
            mask_row = mask_ptr
            if MATRIX_UNIT >= 0:
                of_query = tl.minimum(query, queries - 1) if TAIL else query
                mask_row = matrix_rows(mask_ptr, of_query.to(tl.int64) * stride_mq, MATRIX_UNIT)[None, :]
            exponents = with_matrix(
                scores, score_factor, mask_row, key[:, None], stride_mk, keys, MATRIX, MATRIX_UNIT, True
            )
            if MATRIX == 2:
                exponents = biased_exponent(exponents)
        weights = tl.exp2(tl.fma(exponents, factor, -lse[None, :]))
        if MATRIX:
            weights = tl.where(exponents == float("-inf"), 0.0, weights)  # also where lse is -inf
        if MASKED:
            see = seen((keys - queries + query)[None, :], key[:, None], keys, window, CAUSAL, WINDOW)
            if TAIL:
                see = see & inside[None, :]
            weights = tl.where(see, weights, 0.0)
        if DV:
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
        if DK:
            delta = _of_queries(delta_rows, at, start, queries, BLOCK_Q, TAIL, ALIGNED)
            dweights = tl.dot(v, dout.T, input_precision="ieee")
            dscores = _score_grads(scores, weights, dweights, delta[None, :], SOFTCAP)
            if MASKED:
                dscores = tl.where(see, dscores, 0.0)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "row_qb", "row_qh", "col_qb", "col_qh", "row_db", "row_dh", "col_db", "col_dh",
        "stride_kb", "stride_kh", "stride_ks", "stride_vb", "stride_vh", "stride_vs", "heads", "groups", "sequences",
        "tiles", "tokens_q", "tokens_k", "window", "factor", "inverse_cap", "scale", "matrix_ptr", "stride_mb",
        "stride_mh", "stride_mq", "stride_mk",
    ]
)  # fmt: skip
def _dk_dv_kernel(
    q_desc, dout_desc, lse_rows, delta_rows, k_ptr, v_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    matrix_ptr, stride_mb, stride_mh, stride_mq, stride_mk,
    row_qb, row_qh, col_qb, col_qh, row_db, row_dh, col_db, col_dh,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, heads, groups, sequences, tiles,
    tokens_q, tokens_k, window, factor, inverse_cap, scale,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, MATRIX: tl.constexpr,
    MATRIX_UNIT: tl.constexpr, ALIGNED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    tile, head, index = tile_of(tl.program_id(0), tiles, heads, sequences)  # causal: the first keys have most queries
    kv_head = head // groups
    start_q, queries = sequence(cu_q_ptr, index, tokens_q, PACKED)
    start_k, keys = sequence(cu_k_ptr, index, tokens_k, PACKED)
    batch = index * (0 if PACKED else 1)
    first = tile * BLOCK_K
    if first >= keys:
        return
    key = first + tl.arange(0, BLOCK_K)
    last = tl.minimum(first + BLOCK_K, keys) - 1
    inside = key < keys
    size = tl.arange(0, HEAD_DIM)
    token = (start_k + key).to(tl.int64)
    k_at = batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh + token * stride_ks
    v_at = batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh + token * stride_vs
    there = inside[:, None] if SIZE == HEAD_DIM else inside[:, None] & (size < SIZE)[None, :]
    k = tl.load(k_ptr + k_at[:, None] * UNIT + size[None, :], mask=there, other=0.0)
    v = k
    if DK:
        v = tl.load(v_ptr + v_at[:, None] * UNIT + size[None, :], mask=there, other=0.0)

    # Query i is at position keys - queries + i. Queries low .. high see some of these keys, whole .. clear see all.
    offset = keys - queries
    low = tl.minimum(queries, 0)  # 0, which the compiler does not know
    high = queries
    whole = low
    clear = queries
    if CAUSAL:
        low = tl.maximum(first - offset, 0) // BLOCK_Q * BLOCK_Q
        whole = tl.maximum(last - offset, 0)
    if WINDOW:
        high = tl.minimum(queries, tl.maximum(last + window - offset, 0))
        clear = tl.minimum(queries, tl.maximum(first + window - offset, 0))
    whole = (whole + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    clear = clear // BLOCK_Q * BLOCK_Q
    whole = tl.maximum(low, tl.minimum(whole, (high + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q))
    clear = tl.maximum(clear, whole)

    row_q = batch * row_qb + head * row_qh + start_q
    row_d = batch * row_db + head * row_dh + start_q
    column_q = batch * col_qb + head * col_qh
    column_d = batch * col_db + head * col_dh
    at = (batch * heads + head).to(tl.int64) * tokens_q + start_q
    dk = tl.zeros((BLOCK_K, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_K, HEAD_DIM), tl.float32)
    edge = queries // BLOCK_Q * BLOCK_Q  # whole blocks of queries end here
    score_factor, mask_ptr = factor, key
    if MATRIX:
        mask_ptr = matrix_rows(matrix_ptr, batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh, MATRIX_UNIT)
        if MATRIX == 2:
            factor = tl.full((), 1.0, tl.float32)
    # Not causal: no iteration. Without this loop ptxas serialises the products of the next one if there is a mask
    # (its remark C7515), since their sums begin as constants.
    if CAUSAL or MATRIX:
        dk, dv = _walk_queries(
            k, v, q_desc, dout_desc, mask_ptr, stride_mq, stride_mk, lse_rows, delta_rows, row_q, column_q, row_d,
            column_d, at, key, dk, dv,
            low, tl.minimum(whole, tl.minimum(high, edge)), queries, keys, window, score_factor, factor, inverse_cap,
            BLOCK_Q, True, False, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, SIZE != HEAD_DIM, ALIGNED,
            DK, DV,
        )  # fmt: skip
    dk, dv = _walk_queries(
        k, v, q_desc, dout_desc, mask_ptr, stride_mq, stride_mk, lse_rows, delta_rows, row_q, column_q, row_d,
        column_d, at, key, dk, dv,
        whole, clear, queries, keys, window, score_factor, factor, inverse_cap,
        BLOCK_Q, False, False, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, SIZE != HEAD_DIM, ALIGNED, DK, DV,
    )  # fmt: skip
    if WINDOW:
        dk, dv = _walk_queries(
            k, v, q_desc, dout_desc, mask_ptr, stride_mq, stride_mk, lse_rows, delta_rows, row_q, column_q, row_d,
            column_d, at, key, dk, dv,
            clear, tl.minimum(high, edge), queries, keys, window, score_factor, factor, inverse_cap,
            BLOCK_Q, True, False, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, SIZE != HEAD_DIM, ALIGNED,
            DK, DV,
        )  # fmt: skip
    dk, dv = _walk_queries(
        k, v, q_desc, dout_desc, mask_ptr, stride_mq, stride_mk, lse_rows, delta_rows, row_q, column_q, row_d,
        column_d, at, key, dk, dv,
        tl.maximum(low, edge), high, queries, keys, window, score_factor, factor, inverse_cap,
        BLOCK_Q, True, True, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, SIZE != HEAD_DIM, ALIGNED, DK, DV,
    )  # fmt: skip
    to = ((batch.to(tl.int64) * tokens_k + token) * heads + head)[:, None] * SIZE + size[None, :]
    if DK:
        tl.store(dk_ptr + to, (dk * scale + 0.0).to(dk_ptr.dtype.element_ty), mask=there)
    if DV:
        tl.store(dv_ptr + to, (dv + 0.0).to(dv_ptr.dtype.element_ty), mask=there)


@triton.jit
def _walk_keys(
    q, dout, k_desc, v_desc, mask_row, stride_mk, dmatrix_ptr, dmatrix_at, inside,
    row_k, column_k, row_v, column_v, position, lse, delta, dq,
    low, high, keys, window, score_factor, factor, inverse_cap,
    BLOCK_K: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, MATRIX: tl.constexpr, MATRIX_UNIT: tl.constexpr,
    MATRIX_GRAD: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        k = load_tokens(k_desc, row_k + start, column_k, 0, BLOCK_K, q.shape[1], CLIPPED)
        v = load_tokens(v_desc, row_v + start, column_v, 0, BLOCK_K, q.shape[1], CLIPPED)
        key = start + tl.arange(0, BLOCK_K)
        if TAIL:
            k = tl.where((key < keys)[:, None], k, 0.0)  # as in _walk_queries
        scores = capped(tl.dot(q, k.T, input_precision="ieee"), inverse_cap, SOFTCAP)
        exponents = scores
        if MATRIX:
            exponents = with_matrix(
                scores, score_factor, mask_row, tl.multiple_of(key, BLOCK_K)[None, :], stride_mk, keys, MATRIX,
                MATRIX_UNIT, TAIL,
            )  # fmt: skip
            if MATRIX == 2:
                exponents = biased_exponent(exponents)
        weights = tl.exp2(tl.fma(exponents, factor, -lse[:, None]))
        if MATRIX:
            weights = tl.where(exponents == float("-inf"), 0.0, weights)  # also where lse is -inf
        dweights = tl.dot(dout, v.T, input_precision="ieee")
        dscores = _score_grads(scores, weights, dweights, delta[:, None], SOFTCAP)
        if MASKED:
            see = seen(position[:, None], key[None, :], keys, window, CAUSAL, WINDOW)
            dscores = tl.where(see, dscores, 0.0)
        if MATRIX_GRAD:
            dbias = weights * (dweights - delta[:, None])  # before the cap's slope
            if MASKED:
                dbias = tl.where(see, dbias, 0.0)
            there = inside[:, None] & (key < keys)[None, :]
            tl.store(dmatrix_ptr + dmatrix_at[:, None] + key[None, :], dbias, mask=there)
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(
    do_not_specialize=[
        "cu_q_ptr", "cu_k_ptr", "row_kb", "row_kh", "col_kb", "col_kh", "row_vb", "row_vh", "col_vb", "col_vh",
        "stride_qb", "stride_qh", "stride_qs", "stride_db", "stride_dh", "stride_ds", "heads", "groups", "sequences",
        "tiles", "tokens_q", "tokens_k", "window", "factor", "inverse_cap", "scale", "matrix_ptr", "stride_mb",
        "stride_mh", "stride_mq", "stride_mk",
    ]
)  # fmt: skip
def _dq_kernel(
    q_ptr, dout_ptr, k_desc, v_desc, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    matrix_ptr, stride_mb, stride_mh, stride_mq, stride_mk, dmatrix_ptr,
    row_kb, row_kh, col_kb, col_kh, row_vb, row_vh, col_vb, col_vh,
    stride_qb, stride_qh, stride_qs, stride_db, stride_dh, stride_ds, heads, groups, sequences, tiles,
    tokens_q, tokens_k, window, factor, inverse_cap, scale,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, MATRIX: tl.constexpr,
    MATRIX_UNIT: tl.constexpr, MATRIX_GRAD: tl.constexpr,
):  # fmt: skip
    tile, head, index = tile_of(tl.program_id(0), tiles, heads, sequences)
    tile = tiles - 1 - tile
    kv_head = head // groups
    start_q, queries = sequence(cu_q_ptr, index, tokens_q, PACKED)
    start_k, keys = sequence(cu_k_ptr, index, tokens_k, PACKED)
    batch = index * (0 if PACKED else 1)
    if tile * BLOCK_Q >= queries:
        return
    query = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = query < queries
    size = tl.arange(0, HEAD_DIM)
    token = (start_q + query).to(tl.int64)
    q_at = batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + token * stride_qs
    d_at = batch.to(tl.int64) * stride_db + head.to(tl.int64) * stride_dh + token * stride_ds
    there = inside[:, None] if SIZE == HEAD_DIM else inside[:, None] & (size < SIZE)[None, :]
    q = tl.load(q_ptr + q_at[:, None] * UNIT + size[None, :], mask=there, other=0.0)
    dout = tl.load(dout_ptr + d_at[:, None] * UNIT + size[None, :], mask=there, other=0.0)
    at = (batch * heads + head).to(tl.int64) * tokens_q + token
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0)

    row_k = batch * row_kb + kv_head * row_kh + start_k
    row_v = batch * row_vb + kv_head * row_vh + start_k
    column_k = batch * col_kb + kv_head * col_kh
    column_v = batch * col_vb + kv_head * col_vh
    position = keys - queries + query
    first = keys - queries + tile * BLOCK_Q
    last = keys - queries + tl.minimum(tile * BLOCK_Q + BLOCK_Q, queries) - 1
    low, clear, full, high = key_phases(first, last, keys, window, BLOCK_K, CAUSAL, WINDOW)
    dq = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    edge = keys // BLOCK_K * BLOCK_K  # whole blocks of keys end here
    score_factor, mask_row, dmatrix_at = factor, query, at
    if MATRIX:
        of_head = batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh
        if MATRIX_UNIT >= 0:
            of_query = tl.minimum(query, queries - 1).to(tl.int64) * stride_mq
            mask_row = matrix_rows(matrix_ptr, of_head + of_query, MATRIX_UNIT)[:, None]
        else:
            mask_row = matrix_rows(matrix_ptr, of_head, MATRIX_UNIT)
        dmatrix_at = at * tokens_k
        if MATRIX == 2:
            factor = tl.full((), 1.0, tl.float32)
    if WINDOW:
        dq = _walk_keys(
            q, dout, k_desc, v_desc, mask_row, stride_mk, dmatrix_ptr, dmatrix_at, inside,
            row_k, column_k, row_v, column_v, position, lse, delta, dq,
            low, tl.minimum(clear, edge), keys, window, score_factor, factor, inverse_cap,
            BLOCK_K, True, False, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, MATRIX_GRAD,
            SIZE != HEAD_DIM,
        )  # fmt: skip
    dq = _walk_keys(
        q, dout, k_desc, v_desc, mask_row, stride_mk, dmatrix_ptr, dmatrix_at, inside,
        row_k, column_k, row_v, column_v, position, lse, delta, dq,
        clear, full, keys, window, score_factor, factor, inverse_cap,
        BLOCK_K, False, False, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, MATRIX_GRAD,
        SIZE != HEAD_DIM,
    )  # fmt: skip
    if CAUSAL:
        dq = _walk_keys(
            q, dout, k_desc, v_desc, mask_row, stride_mk, dmatrix_ptr, dmatrix_at, inside,
            row_k, column_k, row_v, column_v, position, lse, delta, dq,
            full, tl.minimum(high, edge), keys, window, score_factor, factor, inverse_cap,
            BLOCK_K, True, False, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, MATRIX_GRAD,
            SIZE != HEAD_DIM,
        )  # fmt: skip
    dq = _walk_keys(
        q, dout, k_desc, v_desc, mask_row, stride_mk, dmatrix_ptr, dmatrix_at, inside,
        row_k, column_k, row_v, column_v, position, lse, delta, dq,
        tl.maximum(low, edge), high, keys, window, score_factor, factor, inverse_cap,
        BLOCK_K, True, True, CAUSAL, WINDOW, SOFTCAP, STAGES, MATRIX, MATRIX_UNIT, MATRIX_GRAD,
        SIZE != HEAD_DIM,
    )  # fmt: skip
    dq = dq * scale + 0.0
    to = ((batch.to(tl.int64) * tokens_q + token) * heads + head)[:, None] * SIZE + size[None, :]
    tl.store(dq_ptr + to, dq.to(dq_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "groups"])
def _sum_heads_kernel(
    dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, rows, groups,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Parts [rows, groups, SIZE] fp32 -> dk and dv [rows, SIZE], added in order, rounded once."""
    parts_ptr, out_ptr = dk_parts_ptr, dk_ptr
    if tl.program_id(1) == 1:
        parts_ptr, out_ptr = dv_parts_ptr, dv_ptr
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    size = tl.arange(0, HEAD_DIM)
    inside = (row < rows)[:, None] if SIZE == HEAD_DIM else (row < rows)[:, None] & (size < SIZE)[None, :]
    part_ptr = parts_ptr + (row * groups * SIZE)[:, None] + size[None, :]
    total = tl.load(part_ptr, mask=inside, other=0.0)
    for _ in range(1, groups):
        part_ptr += SIZE
        total += tl.load(part_ptr, mask=inside, other=0.0)
    tl.store(out_ptr + (row * SIZE)[:, None] + size[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


_delta = Kernel(_delta_kernel, enable_fp_fusion=False)
_dk_dv = Kernel(_dk_dv_kernel, enable_fp_fusion=False)
_sum_heads = Kernel(_sum_heads_kernel, enable_fp_fusion=False)
_dq = Kernel(_dq_kernel, enable_fp_fusion=False)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    lengths: PackedLengths | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_grad: bool = False,
    key_parts: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See spec.py. `out` and `lse` are the results of forward for the same inputs."""
    packed, options = as_options(spec, lengths)
    dmask = torch.zeros(mask.shape, device=q.device) if mask is not None and mask_grad else None
    dq, dk, dv, delta = run(_prepare, (dout, q, k, v, out, lse, mask, dmask, *packed), key_parts, *options)
    return dq, dk, dv, sink_grads(sinks, delta, lse), dmask


def _are_aligned(lse: Tensor, p: Problem) -> bool:
    """Whether TMA can read blocks of lse's rows: it takes multiples of 16 bytes."""
    packed = p.flags[3]
    return not packed and lse.shape[2] % 4 == 0 and lse.numel() < 2**31


def _prepare(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *others: Any) -> Callable:
    """What gives dq, dk, dv and delta [B, Hq, Sq], and writes dmask, for tensors of these layouts."""
    launch_on(q, "attention backward")
    head_dim, padded = q.shape[3], taken_head_dim(q.shape[3], q.dtype)
    if padded == head_dim:
        return _prepare_taken(dout, q, k, v, out, *others)
    differentiate = _prepare_taken(*(pad_heads(x, padded) for x in (dout, q, k, v, out)), *others)

    def call(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        *grads, delta = differentiate(*(pad_heads(x, padded) for x in (dout, q, k, v, out)), *others)
        return *(heads_side_by_side(grad[..., :head_dim]) for grad in grads), delta

    return call


def _prepare_taken(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, dmask: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, key_parts: bool, *options: Any,
) -> Callable:  # fmt: skip
    """The same of a head size that kernels take."""
    dtype, device, index, launch_index = q.dtype, q.device, q.device.index, q.get_device()
    of_keys, of_key_dtype = (k.shape, dtype) if not key_parts else ((*q.shape[:2], *k.shape[2:]), torch.float32)
    grads = [((*q.shape,), dtype), *[((*of_keys,), of_key_dtype)] * 2]

    def results() -> list[Tensor]:
        return [torch.empty_strided(x, strides_of_heads(x), dtype=kind, device=device) for x, kind in grads]

    if q.numel() == 0 or k.numel() == 0:
        return lambda dout, q, k, v, out, lse, *_: (*(grad.zero_() for grad in results()), torch.zeros_like(lse))
    mask = None if mask is None else mask.resolve_neg()
    takes = as_matrix, as_matrix, as_matrix, as_matrix, aligned, aligned_flat, as_numbers
    (dout, q, k, v, out, lse, _), take = taken(takes, (dout, q, k, v, out, lse, mask))
    spec, lengths = from_options(cu_q, cu_k, *options)
    p = problem(q, k, spec, lengths, mask=mask)
    of_q, of_k, of_v, of_dout = map(rows_of, (q, k, v, dout))
    (batch, heads, tokens, size), (kv_heads, tokens_k) = q.shape, k.shape[1:3]
    head_dim, groups, unit = padded_head_dim(size), heads // kv_heads, 16 // q.element_size()
    causal, window = p.flags[:2]
    room = has_room(index) and (p.matrix_dtype is None or p.matrix_dtype.itemsize <= 2)
    matrix = matrix_strides(mask, p.matrix_unit)

    def numbers_of(tiles: int) -> tuple:
        return heads, groups, p.sequences, tiles, tokens, tokens_k, p.window, p.factor, p.inverse_cap, spec.scale

    rows, tile = batch * heads * tokens, _DELTA_TILE
    constants: tuple = size, head_dim, tile.queries, unit
    launch_delta = Launch(_delta, launch_index, (cdiv(rows, tile.queries),), constants, **tile.options)
    numbers_of_delta = rows, heads, tokens, *unit_strides(out), *unit_strides(dout)

    aligned_rows = _are_aligned(lse, p)
    key_launches = []
    for tile, *which in backward_key_tiles(head_dim, dtype, causal=causal, aligned=aligned_rows, room=room):
        block, tiles = (tile.queries, head_dim), cdiv(p.longest_k, tile.keys)
        constants = (
            size, head_dim, tile.queries, tile.keys, tile.stages, unit, *p.flags, p.matrix, p.matrix_unit, aligned_rows,
            *which,
        )  # fmt: skip
        places = *of_q.places, *of_dout.places, *unit_strides(k), *unit_strides(v)
        key_launches.append((
            Launch(_dk_dv, launch_index, (tiles * heads * p.sequences,), constants, **tile.options),
            of_q.described(q, block), of_dout.described(dout, block),
            described(lse, (lse.numel(),), (1,), block[:1]) if aligned_rows else lambda x: x,
            (*matrix, *places, *numbers_of(tiles)),
        ))  # fmt: skip

    # dk and dv, where several query heads share a key head in fp32 for each, which are then added
    new_parts, totals = empty((2, batch, tokens_k, heads, size), torch.float32, device), batch * tokens_k * kv_heads
    if groups > 1:
        rows_at_once = max(1, _SUM_TILE.queries // head_dim)
        constants, grid = (size, head_dim, rows_at_once), (cdiv(totals, rows_at_once), 2)
        launch_sum = Launch(_sum_heads, launch_index, grid, constants, **_SUM_TILE.options)

    tile = backward_query_tile(head_dim, dtype, causal=causal, partly=window or p.matrix > 0, room=room)
    tile = tile_for(p, tile, index)
    block, tiles = (tile.keys, head_dim), cdiv(p.longest_q, tile.queries)
    constants = (
        size, head_dim, tile.queries, tile.keys, tile.stages, unit, *p.flags, p.matrix, p.matrix_unit,
        dmask is not None,
    )  # fmt: skip
    launch_dq = Launch(_dq, launch_index, (tiles * heads * p.sequences,), constants, **tile.options)
    k_block, v_block = of_k.described(k, block), of_v.described(v, block)
    numbers_of_dq = *of_k.places, *of_v.places, *unit_strides(q), *unit_strides(dout), *numbers_of(tiles)

    def call(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
        dmask: Tensor | None, *packed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dout, q, k, v, out, lse, mask = take(dout, q, k, v, out, lse, mask)
        dq, dk, dv = results()
        delta = torch.empty_like(lse)
        launch_delta(out, dout, delta, *numbers_of_delta)
        parts = new_parts().unbind(0) if groups > 1 and not key_parts else (dk, dv)
        for launch, q_block, dout_block, row_block, numbers in key_launches:
            of_rows = row_block(lse), row_block(delta)
            launch(q_block(q), dout_block(dout), *of_rows, k, v, *parts, *packed, mask, *numbers)
        if groups > 1 and not key_parts:
            launch_sum(*parts, dk, dv, totals, groups)
        launch_dq(q, dout, k_block(k), v_block(v), lse, delta, dq, *packed, mask, *matrix, dmask, *numbers_of_dq)
        return dq, dk, dv, delta

    return call
