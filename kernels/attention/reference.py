"""Attention in plain torch, in fp32 throughout: the contract of spec.py on a CPU, and for calls that the Triton kernel
does not support.

Keys are processed in blocks of 128 from position 0, each only with the queries that see some of its keys: so masked
keys enter a query's sums only within such a block. Products use the device's slice-invariant GEMM, one head at a time;
the rest is elementwise, over all heads together:

    forward, for each block     s = scale log2(e) q kᵀ        m' = max(m, max s)       p = 2^(s - m')     a = 2^(m - m')
                                l' = a l + sum of p           acc' = a acc + p v
    in the end                  out = acc / l                 lse = m + log2 l
    backward                    p = 2^(s - lse)               dp = dout vᵀ             delta = sum of dout out
                                ds = scale p (dp - delta)     dq = sum over blocks of ds k, in order
                                dk = dsᵀ q, dv = pᵀ dout: one product for each query head, added in head order

A sink is one more score, without a value, after the last block. A mask changes the scores of a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..elementwise import in_whole_vectors_, sum_by_halves
from .spec import LOG2_E, AttentionSpec, PackedLengths, heads_side_by_side, sink_grads

KEY_BLOCK = 128
_ELEMENTS = 1 << 21  # scores computed at a time, which limits how many heads are taken together; a matter of speed only


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        from ..gemm.matmul import matmul
    else:
        from ..gemm.reference import matmul
    return matmul(a, b)


# --- what meets what ------------------------------------------------------------------------------------------------


def _sequences(q: Tensor, k: Tensor, lengths: PackedLengths | None) -> Iterator[tuple[slice, slice, int]]:
    """The queries and keys of each sequence, and how many of the first chunk's keys were dropped."""
    if lengths is None:
        yield slice(0, q.shape[2]), slice(0, k.shape[2]), 0
        return
    cu_q, starts = lengths.cu_q.tolist(), lengths.cu_k.view(len(lengths.cu_q), -1).tolist()
    for n, ((begin, *dropped), (end, *_)) in enumerate(itertools.pairwise(starts)):
        yield slice(cu_q[n], cu_q[n + 1]), slice(begin, end), sum(dropped)


def _out_of_pages(x: Tensor, lengths: PackedLengths) -> Tensor:
    """[pages, Hkv, P, D] -> [1, Hkv, keys of all sequences, D]"""
    assert lengths.pages is not None
    parts = []
    for table, (begin, end) in zip(lengths.pages, itertools.pairwise(lengths.cu_k.tolist()), strict=True):
        key = torch.arange(end - begin, device=x.device)
        parts.append(x[table[key // x.shape[2]].long(), :, key % x.shape[2]])
    return torch.cat(parts).transpose(0, 1).unsqueeze(0)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of the key heads of rows [N, S, groups, D] that are processed together."""
    step = max(1, _ELEMENTS // max(1, rows.shape[1] * rows.shape[2] * KEY_BLOCK))
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)


def _blocks(
    queries: int, keys: int, spec: AttentionSpec, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """For each block of keys: the queries that see some of it, its keys, and the mask [queries, keys] of unseen keys.

    The keys are those of the padded sequence, so the last block is whole.
    """
    first = keys - queries  # the first query's position
    for start in range(0, keys, KEY_BLOCK):
        stop = min(start + KEY_BLOCK, keys)
        low, high = (max(0, start - first), queries) if spec.causal else (0, queries)
        if spec.window:
            high = min(high, stop - 1 + spec.window - first)
        if low >= high:
            continue
        key = torch.arange(start, start + KEY_BLOCK, dtype=torch.int64, device=device)
        position = torch.arange(first + low, first + high, dtype=torch.int64, device=device).unsqueeze(1)
        hidden = (key >= keys).expand(high - low, -1)
        if spec.causal:
            hidden = hidden | (key > position)
        if spec.window:
            hidden = hidden | (key <= position - spec.window)
        yield slice(low, high), slice(start, start + KEY_BLOCK), hidden


def _by_key_head(x: Tensor, groups: int) -> Tensor:
    """[B, kv * groups, S, D] -> fp32 [B * kv, S, groups, D], contiguous: the query rows of each key head."""
    return rearrange(x.float(), "b (kv groups) s d -> (b kv) s groups d", groups=groups).contiguous()


def _padded_keys(x: Tensor, dropped: int = 0) -> Tensor:
    """[B, kv, S, D] -> fp32 [B * kv, dropped keys and S in whole blocks, D]."""
    return F.pad(x.flatten(0, 1).float(), (0, 0, dropped, -(dropped + x.shape[2]) % KEY_BLOCK))


def _per_head(a: Tensor, b: Tensor) -> Tensor:
    """a [N, S, groups, K] @ b [N, K, M] -> [N, S, groups, M]"""
    c = a.new_empty((*a.shape[:-1], b.shape[-1]))
    for one_a, one_b, one_c in zip(a, b, c, strict=True):
        one_c.view(-1, c.shape[-1]).copy_(_matmul(one_a.reshape(-1, a.shape[-1]), one_b))
    return c


def _matrix(mask: Tensor | None, heads: slice, groups: int, rows: slice, block: slice) -> Tensor | None:
    """A block of mask [B, Hq, Sq, Sk] for the key heads of a chunk, as scores are: [N, S, groups, KEY_BLOCK]."""
    if mask is None:
        return None
    part = mask[:, :, rows, block].unflatten(1, (-1, groups)).transpose(2, 3)  # [B, kv, S, groups, keys]
    kv_heads = part.shape[1]
    ours = range(*heads.indices(part.shape[0] * kv_heads))
    part = torch.stack([part[n // kv_heads, n % kv_heads] for n in ours])
    return F.pad(part, (0, KEY_BLOCK - part.shape[-1]))


def _scores(
    q: Tensor, k: Tensor, spec: AttentionSpec, hidden: Tensor, matrix: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scaled, capped scores of a block times log2(e), -inf where hidden; and their tanh if they are capped.

    Only -inf hides: a bias as low as float32's lowest number stays finite, so that a row with such biases alone has
    equal weights, as in torch.
    """
    scores, tanh = _per_head(q, k.transpose(1, 2)), None
    if spec.softcap:
        tanh = in_whole_vectors_(torch.tanh_, scores.mul_(spec.scale / spec.softcap))
        scores = tanh * (spec.softcap * LOG2_E)
    else:
        scores.mul_(spec.scale * LOG2_E)
    if matrix is not None and matrix.dtype == torch.bool:
        scores.masked_fill_(~matrix, -math.inf)
    elif matrix is not None:
        bias = matrix.float()
        lowest = torch.finfo(torch.float32).min
        scores.add_((bias * LOG2_E).clamp_(min=lowest).masked_fill_(bias == -math.inf, -math.inf))
    return scores.masked_fill_(hidden.unsqueeze(1), -math.inf), tanh


# --- forward --------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    lengths: PackedLengths | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, D], lse [B, Hq, Sq]; see spec.py. Any device that has a slice-invariant GEMM."""
    if lengths is not None and lengths.pages is not None:
        k, v = (_out_of_pages(x, lengths) for x in (k, v))
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    of_heads = None if sinks is None else sinks.repeat(q.shape[0]).view(-1, groups)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for queries, keys, dropped in _sequences(q, k, lengths):
            rows, count = _by_key_head(q[:, :, queries], groups), dropped + keys.stop - keys.start
            padded_k, padded_v = (_padded_keys(x[:, :, keys], dropped) for x in (k, v))
            for heads in _chunks(rows):
                own = None if of_heads is None else of_heads[heads]
                matrix = functools.partial(_matrix, mask, heads, groups)
                one_out, one_lse = _forward(rows[heads], padded_k[heads], padded_v[heads], count, spec, own, matrix)
                out.unflatten(1, (-1, groups)).flatten(0, 1)[heads, :, queries] = one_out.transpose(1, 2)
                lse.unflatten(1, (-1, groups)).flatten(0, 1)[heads, :, queries] = one_lse.transpose(1, 2)
    return heads_side_by_side(out), lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, keys: int, spec: AttentionSpec, sinks: Tensor | None, matrix: functools.partial
) -> tuple[Tensor, Tensor]:
    """q [N, S, groups, D], k, v [N, keys in whole blocks, D], sinks [N, groups] -> out, lse [N, S, groups, ..]"""
    top = q.new_full(q.shape[:-1], -math.inf)
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for rows, block, hidden in _blocks(q.shape[1], keys, spec, q.device):
        scores, _ = _scores(q[:, rows], k[:, block], spec, hidden, matrix(rows, block))
        new_top = torch.maximum(top[:, rows], scores.amax(-1))
        reference = new_top.masked_fill(new_top == -math.inf, 0.0)  # a mask may hide all keys so far
        shrink = in_whole_vectors_(torch.exp2_, top[:, rows] - reference)
        powers = in_whole_vectors_(torch.exp2_, scores.sub_(reference.unsqueeze(-1)))
        top[:, rows] = new_top
        total[:, rows] = total[:, rows] * shrink + sum_by_halves(powers).squeeze(-1)
        acc[:, rows] = acc[:, rows] * shrink.unsqueeze(-1) + _per_head(powers, v[:, block])
    if sinks is not None:
        sink = (sinks * LOG2_E).unsqueeze(1).expand_as(top)
        new_top = torch.maximum(top, sink)
        reference = new_top.masked_fill(new_top == -math.inf, 0.0)
        shrink = in_whole_vectors_(torch.exp2_, top - reference)
        total = total * shrink + in_whole_vectors_(torch.exp2_, sink - reference)
        top = new_top
        acc.mul_(shrink.unsqueeze(-1))
    seen = total != 0  # of a NaN, too
    lse = torch.where(seen, top + in_whole_vectors_(torch.log2_, total.clone()), -math.inf)
    out = acc.div_(total.masked_fill(~seen, 1.0).unsqueeze(-1))
    # a block that a mask hides adds 0, which makes a negative 0 a positive one: so all are
    return out if matrix.args[0] is None else out.add_(0.0), lse


# --- backward -------------------------------------------------------------------------------------------------------


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
    """See spec.py."""
    groups, of_keys = q.shape[1] // k.shape[1], torch.float32 if key_parts else k.dtype
    if key_parts:
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.empty_like(x, dtype=of_keys, memory_format=torch.contiguous_format) for x in (k, v))
    dmask = None if mask is None or not mask_grad else torch.zeros(mask.shape, device=mask.device)
    of_mask = None if dmask is None else dmask.unflatten(1, (-1, groups)).flatten(0, 1)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for queries, keys, _ in _sequences(q, k, lengths):
            rows = [_by_key_head(x[:, :, queries], groups) for x in (dout, q, out, lse.unsqueeze(-1))]
            columns, count = [_padded_keys(x[:, :, keys]) for x in (k, v)], keys.stop - keys.start
            for heads in _chunks(rows[0]):
                matrix = functools.partial(_matrix, mask, heads, groups)
                own = None if of_mask is None else of_mask[heads]
                one_dq, *of_keys = _backward(*(x[heads] for x in rows + columns), count, spec, matrix, own)
                dq.unflatten(1, (-1, groups)).flatten(0, 1)[heads, :, queries] = one_dq.transpose(1, 2)
                for whole, one in zip((dk, dv), of_keys, strict=True):
                    whole.flatten(0, 1)[heads, keys] = one[:, :count]
        dsinks = None
        if sinks is not None:
            dsinks = sink_grads(sinks, sum_by_halves(dout.float() * out.float()).squeeze(-1), lse)
    return heads_side_by_side(dq), heads_side_by_side(dk), heads_side_by_side(dv), dsinks, dmask


def _backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, keys: int, spec: AttentionSpec,
    matrix: functools.partial, dmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dout, q, out [N, S, groups, D], lse [.., 1], k, v [N, keys in whole blocks, D] -> dq, dk, dv, fp32; writes dmask
    [N, groups, S, keys]."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = sum_by_halves(dout * out)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # such a query sees nothing, and its scores are -inf
    for rows, block, hidden in _blocks(q.shape[1], keys, spec, q.device):
        scores, tanh = _scores(q[:, rows], k[:, block], spec, hidden, matrix(rows, block))
        powers = in_whole_vectors_(torch.exp2_, scores.sub_(lse[:, rows]))
        slopes = _per_head(dout[:, rows], v[:, block].transpose(1, 2)).sub_(delta[:, rows]).mul_(powers)
        if dmask is not None:
            part = dmask[:, :, rows, block]
            part.copy_(slopes.transpose(1, 2)[..., : part.shape[-1]])
        if tanh is not None:
            slopes.mul_(1 - tanh * tanh)
        slopes.mul_(spec.scale)
        dq[:, rows] += _per_head(slopes, k[:, block])
        _add_by_query_head(dk[:, block], slopes, q[:, rows])
        _add_by_query_head(dv[:, block], powers, dout[:, rows])
    return dq, dk, dv


def _add_by_query_head(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [N, K, D] = the sum over groups, in order, of a[:, :, group]ᵀ b[:, :, group]; a [N, S, groups, K]."""
    for one_total, one_a, one_b in zip(total, a, b, strict=True):
        first, *others = (_matmul(one_a[:, group].t(), one_b[:, group]) for group in range(a.shape[2]))
        one_total.copy_(first)
        for other in others:
            one_total.add_(other)
