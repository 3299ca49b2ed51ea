"""Attention in Triton, backward: `backward(dout, q, k, v, out, lse, spec, lengths)` of spec.py.

No atomics; the formulas are FlashAttention-2's (arXiv 2307.08691). For dk and dv a program holds a block of keys and
loops over the queries, for heads of 256 one program for each of the two; for dq it holds a block of queries and loops
over the keys. Each sum is one chain in a tensor-core accumulator, in the order of the tokens, so the tile shape cannot
change it. This takes seven products, for heads of 256 eight, where one pass with atomics takes five.

If several query heads share a key head, dk and dv are written in fp32 for each query head and added in head order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..known_calls import find_call, keep
from ..launch import Launch, allocator, cdiv, contiguous_strides, empty, launch_on
from .spec import AttentionSpec, PackedLengths, heads_side_by_side, sink_grads, strides_of_heads
from .tiles import (
    Problem,
    Rows,
    Tile,
    aligned,
    aligned_flat,
    as_rows,
    backward_key_tiles,
    backward_query_tile,
    biased_exponent,
    capped,
    has_room,
    key_phases,
    launch,
    load_tokens,
    matrix_arguments,
    matrix_rows,
    pad_heads,
    padded_head_dim,
    problem,
    seen,
    sequence,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See spec.py. `out` and `lse` are the results of forward for the same inputs."""
    key = None
    if lengths is None and mask is None:
        key, known = find_call(("attention backward", spec), q, k, v, dout, out, lse)
        if known is not None:
            dq, dk, dv, delta = _repeat(known, dout, q, k, v, out, lse)
            return dq, dk, dv, None if sinks is None else sink_grads(sinks, delta, lse), None
    head_dim = q.shape[3]
    taken = taken_head_dim(head_dim, q.dtype)
    with launch_on(q, "attention backward"):
        dmask = torch.zeros(mask.shape, device=q.device) if mask is not None and mask_grad else None
        given = (pad_heads(x, taken) for x in (dout, q, k, v, out))
        *grads, delta = _backward(*given, lse, spec, lengths, mask, dmask, key if taken == head_dim else None)
    if taken != head_dim:
        grads = [heads_side_by_side(grad[..., :head_dim]) for grad in grads]
    dq, dk, dv = grads
    return dq, dk, dv, sink_grads(sinks, delta, lse), dmask


class _ByKeys(NamedTuple):
    """A launch for dk and dv, or for one of them."""

    run: Launch
    block: tuple[int, int]
    numbers: tuple
    grid: tuple[int, int, int]


class _Plan(NamedTuple):
    """All of a call that does not depend on its data, which is most of the host's work.

    Of the launches the arguments after the tensors, and the grid; of those with descriptors also their rows, in
    the order of the kernel's, and blocks.
    """

    index: int | None
    matrix_unit: int
    aligned_rows: bool
    delta: Launch
    delta_numbers: tuple
    delta_grid: tuple[int, int, int]
    by_keys: tuple[_ByKeys, ...]
    key_rows: tuple[Rows, Rows]
    parts: tuple[int, ...] | None  # of dk and dv in fp32 for each query head, where several share a key head
    total: Launch | None
    total_numbers: tuple
    total_grid: tuple[int, int, int]
    by_queries: Launch
    query_rows: tuple[Rows, Rows]
    query_block: tuple[int, int]
    query_numbers: tuple
    query_grid: tuple[int, int, int]


class _Known(NamedTuple):
    """An earlier call, with all that the next one with tensors of the same layouts has in common with it: no packing or
    mask, and nothing to copy.

    results    the shape, strides and dtype of dq, dk, dv and delta
    parts      those of dk's and dv's parts, as one tensor, and the bytes of dk's; None if there are none
    delta, total, by_queries   a launch, its arguments after the tensors, and its grid
    by_keys    of each launch the same, and before them what describes q, dout, lse and delta, or None for an address
    query_maps what describes k and v
    """

    index: int
    new: Any
    results: list[tuple]
    parts: tuple[tuple, int] | None
    delta: tuple
    by_keys: list[tuple]
    total: tuple
    by_queries: tuple
    query_maps: tuple[Any, Any]


def _as_known(plan: _Plan, results: Sequence[Tensor], lse: Tensor) -> _Known:
    """results: dq, dk, dv, delta."""
    by_keys, parts = [], None
    for run, block, numbers, grid in plan.by_keys:
        of_q, of_dout = (x.describer(run, place, block) for place, x in enumerate(plan.key_rows))
        of_rows = [None, None]
        if plan.aligned_rows:
            of_rows = [run.describer(place, block[:1], (lse.numel(),), (1,)) for place in (2, 3)]
        by_keys.append((of_q, of_dout, *of_rows, run, _NOTHING + numbers, grid))
    if plan.parts is not None:
        parts = (plan.parts, contiguous_strides(plan.parts), torch.float32), 4 * math.prod(plan.parts[1:])
    return _Known(
        index=lse.get_device(),
        new=allocator(lse.device),
        results=[(tuple(x.shape), x.stride(), x.dtype) for x in results],
        parts=parts,
        delta=(plan.delta, plan.delta_numbers, plan.delta_grid),
        by_keys=by_keys,
        total=(plan.total, plan.total_numbers, plan.total_grid),
        by_queries=(plan.by_queries, (*_NOTHING, None, *plan.query_numbers), plan.query_grid),
        query_maps=tuple(
            x.describer(plan.by_queries, place, plan.query_block) for place, x in enumerate(plan.query_rows)
        ),
    )


_NOTHING = (None, None, *matrix_arguments(None))  # cu_q, cu_k, mask


def _repeat(
    known: _Known, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, delta. Addresses are passed, which saves Triton from asking tensors for theirs."""
    index, new, results, parts, (run_delta, delta_numbers, delta_grid), by_keys, total, by_queries, (of_k, of_v) = known
    dq, dk, dv, delta = [new(*of_result) for of_result in results]
    at_q, at_k, at_v, at_dout, at_lse = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), lse.data_ptr()
    at_delta, at_dk, at_dv = delta.data_ptr(), dk.data_ptr(), dv.data_ptr()
    to_dk, to_dv = at_dk, at_dv
    if parts is not None:
        of_parts, size = parts
        both = new(*of_parts)
        to_dk = both.data_ptr()
        to_dv = to_dk + size
    run_delta(index, out.data_ptr(), at_dout, at_delta, *delta_numbers, grid=delta_grid)
    for of_q, of_dout, of_lse, of_delta, run, numbers, grid in by_keys:
        lse_args, delta_args = ((at_lse,), (at_delta,)) if of_lse is None else (of_lse(lse), of_delta(delta))
        run(index, *of_q(q), *of_dout(dout), *lse_args, *delta_args, at_k, at_v, to_dk, to_dv, *numbers, grid=grid)
    if parts is not None:
        run, numbers, grid = total
        run(index, to_dk, to_dv, at_dk, at_dv, *numbers, grid=grid)
    run, numbers, grid = by_queries
    run(index, at_q, at_dout, *of_k(k), *of_v(v), at_lse, at_delta, dq.data_ptr(), *numbers, grid=grid)
    return dq, dk, dv, delta


def _plan(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, rows: Sequence[Rows], scale: float,
    p: Problem, matrix_grad: bool,
) -> _Plan:  # fmt: skip
    """rows: of q, k, v and dout."""
    batch, heads, tokens, size = q.shape
    head_dim = padded_head_dim(size)
    kv_heads, tokens_k = k.shape[1:3]
    groups = heads // kv_heads
    index, unit = q.device.index, 16 // q.element_size()
    queries = batch * heads * tokens
    constants: tuple = (size, head_dim, _DELTA_TILE.queries, unit)
    delta = launch(_delta_kernel, index, (q.dtype,), _DELTA_TILE, constants)
    delta_numbers = queries, heads, tokens, *unit_strides(out), *unit_strides(dout), *constants
    of_q, of_k, of_v, of_dout = rows

    causal, window = p.flags[:2]
    room = has_room(index) and (p.matrix_dtype is None or p.matrix_dtype.itemsize <= 2)
    parts = None if groups == 1 else (2, batch, tokens_k, heads, size)
    dtypes, by_keys = (q.dtype, q.dtype if parts is None else torch.float32, p.matrix_dtype), []
    aligned_rows = _are_aligned(lse, p)
    key_tiles = backward_key_tiles(head_dim, q.dtype, causal=causal, aligned=aligned_rows, room=room)
    for tile, *which in key_tiles:
        constants = (
            size, head_dim, tile.queries, tile.keys, tile.stages, unit, *p.flags, p.matrix, p.matrix_unit, aligned_rows,
            *which,
        )  # fmt: skip
        tiles = cdiv(p.longest_k, tile.keys)
        numbers = (
            *of_q.places, *of_dout.places, *unit_strides(k), *unit_strides(v), heads, groups, p.sequences, tiles,
            tokens, tokens_k, p.window, p.factor, p.inverse_cap, scale, *constants,
        )  # fmt: skip
        run = launch(_dk_dv_kernel, index, dtypes, tile, constants)
        by_keys.append(_ByKeys(run, (tile.queries, head_dim), numbers, (tiles * heads * p.sequences, 1, 1)))

    total, totals = None, batch * tokens_k * kv_heads
    constants = (size, head_dim, max(1, _SUM_TILE.queries // head_dim))
    if parts is not None:
        total = launch(_sum_heads_kernel, index, (q.dtype,), _SUM_TILE, constants)
    total_numbers, total_grid = (totals, groups, *constants), (cdiv(totals, constants[2]), 2, 1)

    partly = window or p.matrix > 0
    tile = backward_query_tile(head_dim, q.dtype, causal=causal, partly=partly, room=room)
    tile = tile_for(p, tile, index)
    tiles = cdiv(p.longest_q, tile.queries)
    constants = (
        size, head_dim, tile.queries, tile.keys, tile.stages, unit, *p.flags, p.matrix, p.matrix_unit, matrix_grad,
    )  # fmt: skip
    by_queries = launch(_dq_kernel, index, (q.dtype, p.matrix_dtype), tile, constants)
    query_numbers = (
        *of_k.places, *of_v.places, *unit_strides(q), *unit_strides(dout), heads, groups, p.sequences, tiles, tokens,
        tokens_k, p.window, p.factor, p.inverse_cap, scale, *constants,
    )  # fmt: skip
    return _Plan(
        index=index,
        matrix_unit=p.matrix_unit,
        aligned_rows=aligned_rows,
        delta=delta,
        delta_numbers=delta_numbers,
        delta_grid=(cdiv(queries, _DELTA_TILE.queries), 1, 1),
        by_keys=tuple(by_keys),
        key_rows=(of_q, of_dout),
        parts=parts,
        total=total,
        total_numbers=total_numbers,
        total_grid=total_grid,
        by_queries=by_queries,
        query_rows=(of_k, of_v),
        query_block=(tile.keys, head_dim),
        query_numbers=query_numbers,
        query_grid=(tiles * heads * p.sequences, 1, 1),
    )


def _are_aligned(lse: Tensor, p: Problem) -> bool:
    """Whether TMA can read blocks of lse's rows: it takes multiples of 16 bytes."""
    packed = p.flags[3]
    return not packed and lse.shape[2] % 4 == 0 and lse.numel() < 2**31


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    lengths: PackedLengths | None,
    mask: Tensor | None,
    dmask: Tensor | None,
    key: tuple | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and delta [B, Hq, Sq]; writes dmask. key: to remember the call by."""
    dq, dk, dv = [empty(x.shape, x.dtype, x.device, strides_of_heads(x.shape)) for x in (q, k, v)]
    mask = None if mask is None else mask.resolve_neg()
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(lse)
    given = q, k, v, dout, out, lse
    q, k, v, dout, out = (aligned(x) for x in (q, k, v, dout, out))
    lse = aligned_flat(lse)
    # only these are read through descriptors; a copy of one is another tensor for the pointers, too
    (q_matrix, of_q), (k_matrix, of_k), (v_matrix, of_v), (dout_matrix, of_dout) = map(as_rows, (q, k, v, dout))
    p = problem(q, k, spec, lengths, mask=mask)
    plan = _plan(q, k, v, dout, out, lse, (of_q, of_k, of_v, of_dout), spec.scale, p, dmask is not None)
    delta = empty(lse.shape, lse.dtype, lse.device)  # like lse, which is contiguous here
    parts: tuple[Tensor, ...] = (dk, dv)
    if plan.parts is not None:
        parts = empty(plan.parts, torch.float32, q.device).unbind(0)
    cu_q, cu_k = (None, None) if lengths is None else (lengths.cu_q, lengths.cu_k)
    matrix, index = matrix_arguments(mask, plan.matrix_unit), plan.index
    k_args = of_k.descriptor(plan.by_queries, 0, k_matrix, plan.query_block)
    v_args = of_v.descriptor(plan.by_queries, 1, v_matrix, plan.query_block)
    plan.delta(index, out, dout, delta, *plan.delta_numbers, grid=plan.delta_grid)
    for run, block, numbers, grid in plan.by_keys:
        q_args, dout_args = of_q.descriptor(run, 0, q_matrix, block), of_dout.descriptor(run, 1, dout_matrix, block)
        lse_args, delta_args = ((lse,), (delta,))
        if plan.aligned_rows:
            lse_args, delta_args = (
                run.descriptor(place, x, block[:1], (lse.numel(),), (1,)) for place, x in ((2, lse), (3, delta))
            )
        run(
            index, *q_args, *dout_args, *lse_args, *delta_args, k, v, *parts, cu_q, cu_k, *matrix, *numbers,
            grid=grid,
        )  # fmt: skip
    if plan.total is not None:
        plan.total(index, *parts, dk, dv, *plan.total_numbers, grid=plan.total_grid)
    plan.by_queries(
        index, q, dout, *k_args, *v_args, lse, delta, dq, cu_q, cu_k, *matrix, dmask,
        *plan.query_numbers, grid=plan.query_grid,
    )  # fmt: skip
    used = q_matrix, k_matrix, v_matrix, dout_matrix, out, lse
    if key is not None and all(map(is_, used, given)):
        keep(key, _as_known(plan, (dq, dk, dv, delta), lse))
    return dq, dk, dv, delta
