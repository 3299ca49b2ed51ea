"""Attention under context parallelism: each rank has a part of the tokens, and computes some of the heads whole.

P ranks; s = S/P tokens of this rank, consecutive; h query and kv key heads, all that its tensor-parallel rank has. One
all-to-all before attention and one after it (DeepSpeed-Ulysses, arXiv 2309.14509), and so in backward:

    forward    q [B, s, h, D], k, v [B, s, kv, D]   ->  q [B, h/P, S, D], k, v [B, n, S, D], one exchange
               out [B, h/P, S, D]                   ->  out [B, s, h, D]
    backward   dout [B, s, h, D]                    ->  dout [B, h/P, S, D]
               dq [B, h/P, S, D], dk, dv            ->  dq [B, s, h, D], dk, dv [B, s, kv, D], one exchange

A message has one rank's tokens of one rank's heads, q, k and v side by side for each token. So what has arrived is q, k
and v as views, if there is one sequence. Nothing is added on the wire, and the kernels have all tokens of a head, as on
one rank.

A rank's query heads meet n key heads. If P divides kv, n = kv/P. Else several ranks have query heads of one key head,
and it travels to each of them. The kernels add dk and dv of a key head over its query heads in fp32, in head order, and
round once. So there each rank sends the fp32 parts of its query heads, and the rank that has the tokens adds the parts
of all query heads in this order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..comm.collectives import NOT_LENT, Group, gather_dim, start_exchange_rows
from ..consistency.agreement import agreed_in, check_agreement, share_error
from ..consistency.shards import Part
from ..core.compiled import as_custom_op
from ..core.differentiation import once_differentiable
from .attention_kernels import backward, forward
from .regions import region_function, region_op

_TO_RANKS_OF_HEADS = "b s (ranks heads) d -> ranks b s heads d"
_ALL_TOKENS = "ranks b s heads d -> b heads (ranks s) d"
_TO_RANKS_OF_TOKENS = "b heads (ranks s) d -> ranks b s heads d"
_ALL_HEADS = "ranks b s heads d -> b s (ranks heads) d"


def share_call_error(error: Exception, group: Group, x: Any) -> None:
    """Tells the other ranks of an error in this rank's call, at their first call; see `share_error`."""
    if group.size > 1 and isinstance(x, Tensor):
        share_error(error, group, x.device, agreed_in(group), "cp_group")


def check_parts(q: Tensor, k: Tensor, first_key: int | Tensor, group: Group) -> None:
    """q [B, h, s, D], k [B, kv, s, D]"""
    rank, (heads, queries), keys = group.rank, q.shape[1:3], k.shape[2]
    if heads % group.size:
        raise ValueError(
            f"q has {heads} heads on rank {rank} and cp_group has {group.size} ranks, each of which computes as many "
            "heads: the number of heads must be a multiple of that of ranks"
        )
    if queries != keys:
        raise ValueError(
            f"q has {queries} tokens and k {keys} on rank {rank}: with cp_group both are the rank's part of the same "
            "tokens; a cache of keys and cross-attention are not supported"
        )
    if isinstance(first_key, Tensor) or first_key:
        raise ValueError(f"first_key is given on rank {rank}: with cp_group all keys must be there, and first_key 0")


# --- layouts --------------------------------------------------------------------------------------------------------


def _runs(heads: int, kv_heads: int, ranks: int) -> int:
    """The query heads of a rank come in runs of so many, each of one key head, which the rank gets once for each."""
    return math.gcd(heads // ranks, heads // kv_heads)


def _sent(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, list[int]]:
    """The messages of q [B, s, h, D], k and v, [ranks, B, s, all heads of a message, D]; how many heads are each's."""
    copies = q.shape[2] // k.shape[2] // _runs(q.shape[2], k.shape[2], ranks)
    if copies > 1:
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    blocks = [rearrange(x, _TO_RANKS_OF_HEADS, ranks=ranks) for x in (q, k, v)]
    return torch.cat(blocks, 3), [x.shape[3] for x in blocks]


def _all_tokens(received: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, heads, S, D], k and v of what `_sent` has made."""
    of_keys = (received.shape[3] - heads) // 2
    q, k, v = (rearrange(x, _ALL_TOKENS) for x in received.split([heads, of_keys, of_keys], 3))
    return q, k, v


def _exchange(x: Tensor, group: Group) -> Tensor:
    """x [P, B, s, heads, D]: block r goes to rank r, and block r of the result comes from it. Its own adjoint."""
    x = x.contiguous()
    rows = x.shape[1] * x.shape[2]
    received = start_exchange_rows(x.flatten(3).flatten(0, 2), [rows] * group.size, group, peers=NOT_LENT).wait()
    return received.view(x.shape)


def of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros after the smaller of D and E, the head sizes of q and k, and of v."""
    larger = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == larger else F.pad(x, (0, larger - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def of_own_heads(x: Tensor | None, dim: int, heads: int, group: Group) -> Tensor | None:
    """That of this rank's heads, of what has each head's own values."""
    return x if x is None or x.shape[dim] != heads else x.chunk(group.size, dim)[group.rank]


# --- with the kernels -----------------------------------------------------------------------------------------------


class _ContextAttention(torch.autograd.Function):
    """The table above; sinks [h] and mask, which broadcasts to [B, h, S, S], are whole on every rank, and so are their
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, cu_q: Tensor | None,
        cu_k: Tensor | None, kv_heads: int, options: tuple, group: Group,
    ) -> Tensor:  # fmt: skip
        _set_context(ctx, None, kv_heads, options, group)
        heads = q.shape[2]
        received = _exchange(_sent(q, k, v, group.size)[0], group)
        of_heads = of_own_heads(sinks, 0, heads, group), of_own_heads(mask, 1, heads, group)
        out, lse = forward(*_all_tokens(received, heads // group.size), *of_heads, cu_q, cu_k, *options)
        ctx.save_for_backward(received, out.transpose(1, 2), lse, sinks, mask, cu_q, cu_k)
        return rearrange(_exchange(rearrange(out, _TO_RANKS_OF_TOKENS, ranks=group.size), group), _ALL_HEADS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        received, out, lse, sinks, mask, cu_q, cu_k = ctx.saved_tensors
        group, heads = ctx.group, dout.shape[2]
        groups = heads // ctx.kv_heads
        of_heads = of_own_heads(sinks, 0, heads, group), of_own_heads(mask, 1, heads, group)
        in_parts = _runs(heads, ctx.kv_heads, group.size) < groups
        dout = rearrange(_exchange(rearrange(dout, _TO_RANKS_OF_HEADS, ranks=group.size), group), _ALL_TOKENS)
        *grads, dsinks, dmask = backward(
            dout, *_all_tokens(received, heads // group.size), out.transpose(1, 2), lse, *of_heads, cu_q, cu_k,
            ctx.needs_input_grad[4], in_parts, *ctx.options,
        )  # fmt: skip
        # fp32 travels as numbers of q's dtype, as many more
        places = [x.element_size() // dout.element_size() for x in grads]
        blocks = [
            rearrange(x.view(dout.dtype), "b heads (ranks s) (n d) -> ranks b s (heads n) d", ranks=group.size, n=n)
            for x, n in zip(grads, places, strict=True)
        ]
        arrived = _exchange(torch.cat(blocks, 3), group).split([x.shape[3] for x in blocks], 3)
        dq, dk, dv = (
            rearrange(x, "ranks b s (heads n) d -> b s (ranks heads) (n d)", n=n).contiguous().view(grad.dtype)
            for x, n, grad in zip(arrived, places, grads, strict=True)
        )
        if in_parts:
            dk, dv = (_sum_of_parts(x, groups).to(dq.dtype) for x in (dk, dv))
        of_sinks = gather_dim(dsinks, 0, group, peers=NOT_LENT) if ctx.needs_input_grad[3] else None
        of_mask = gather_dim(dmask, 1, group, peers=NOT_LENT) if ctx.needs_input_grad[4] else None
        return dq, dk, dv, of_sinks, of_mask, None, None, None, None, None


def _sum_of_parts(parts: Tensor, groups: int) -> Tensor:
    """[B, s, kv groups, D] -> [B, s, kv, D], added in order, as the kernels do."""
    return functools.reduce(torch.add, parts.unflatten(2, (-1, groups)).unbind(3))


def _set_context(ctx: Any, dtypes: Any, kv_heads: int, options: tuple, group: Group) -> None:
    ctx.kv_heads, ctx.options, ctx.group = kv_heads, options, group


def _outputs(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    """out, and what is saved: what was received, out of this rank's heads, lse."""
    group = others[-1]
    received, _ = _sent(q, k, v, group.size)
    batch, tokens, heads, size = q.shape
    of_heads = batch, tokens * group.size, heads // group.size
    lse = q.new_empty((of_heads[0], of_heads[2], of_heads[1]), dtype=torch.float32)
    return [q.new_empty(q.shape), q.new_empty(received.shape), q.new_empty((*of_heads, size)), lse]


_context_attention = as_custom_op(
    _ContextAttention,
    name="context_attention",
    tensors=("q", "k", "v", "sinks?", "mask?", "cu_q?", "cu_k?"),
    outputs=_outputs,
    restore=_set_context,
    saved=(None, None, None, 3, 4, 5, 6),
)


def _check_agreement(
    name: str, q: Tensor, k: Tensor, v: Tensor, facts: dict[str, Any], same: dict[str, Tensor], group: Group
) -> None:
    """q, k, v [B, .., s, D]"""
    shapes = {f"the shape of {name}": tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    facts = {"the call": name, "the dtype of q": str(q.dtype), **shapes, **facts}
    part = Part("q of attention", q, (2,), "Pass this rank's part of the tokens, or leave out cp_group")
    check_agreement(facts, group, q.device, agreed_in(group), part=part, same=same, name="cp_group")


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None, options: tuple, group: Group,
) -> Tensor:  # fmt: skip
    """out [B, h, s, D] for q, k, v [B, .., s, D]; options: the numbers of `forward`.

    Raises:
        RuntimeError: the ranks' shapes, dtypes or options differ, or their q are the same; on every rank.
    """
    facts = {
        "the options of attention": (*options, sinks is not None, cu_q is not None),
        "the shape of mask": () if mask is None else tuple(mask.shape),
    }
    same = {name: x for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("sinks", sinks)) if x is not None}
    _check_agreement("attention", q, k, v, facts, same, group)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _context_attention(q, k, v, sinks, mask, cu_q, cu_k, k.shape[2], options, group).transpose(1, 2)


# --- with torch's attention -----------------------------------------------------------------------------------------


_ExchangeHeads = region_function("_ExchangeHeads", _exchange, _exchange)
_exchange_heads = region_op(_ExchangeHeads, "exchange_heads")


def with_all_tokens(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """attend(q, k, v) of all tokens of this rank's heads, exchanged back: for attention with the mode off.

    q [B, h, s, D], k [B, kv, s, D], v [B, kv, s, E] -> out [B, h, s, E]; attend may get D and E padded to the larger,
    so it must be given its scale.
    """
    _check_agreement("attention with the mode off", q, k, v, {}, {}, group)
    value_dim = v.shape[-1]
    q, k, v = of_one_size(q, k, v)
    sent, heads = _sent(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), group.size)
    out = attend(*_all_tokens(_exchange_heads(sent, group), heads[0]))
    received = _exchange_heads(rearrange(out, _TO_RANKS_OF_TOKENS, ranks=group.size), group)
    return rearrange(received, _ALL_HEADS).transpose(1, 2)[..., :value_dim]
