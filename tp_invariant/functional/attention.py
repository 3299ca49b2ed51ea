"""Attention whose bits depend on nothing but the head's own data: one operator, forward and backward.

    q [B, h, Sq, D]   k, v [B, kv, Sk, D]    query head i meets key head i kv / h, query i is at position Sk - Sq + i
    out = softmax(cap(scale q kᵀ) over the keys that the query sees) v

The bits of a head's out, dq, dk and dv do not depend on which other heads, sequences or packed neighbours are in the
call. The bits of a query's row of out do not depend on the other queries: a prefill may run at once, in chunks, or
token by token against a cache of keys. Device and D alone decide which implementation runs:

    CUDA, D up to 256       the Triton kernel (fp32: IEEE, never TF32)
    CPU; CUDA, larger D     plain torch on the bundled GEMM, in fp32 throughout

In compiled graphs (fullgraph=True), and wherever else torch traces or intercepts operators, it is a custom operator of
torch.library.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, resolve_group
from ..core.compiled import define, with_derivative
from ..core.dtensors import refuse_dtensor
from ..core.elementwise import inside_a_layer
from ..core.graph_breaks import outside_of_graphs
from ..core.torch_private import dispatch_modes
from ..kernels.attention.spec import CHUNK, AttentionSpec, empty_heads
from .attention_checks import (
    check_first_key,
    check_first_keys,
    check_mask,
    check_mask_use,
    check_packing,
    check_score_options,
    check_sinks,
    check_tensors,
    in_autocasts_dtype,
    number,
)
from .attention_kernels import backward, forward, lengths_of, of_lengths
from .context_parallel import check_parts, context_attention, of_one_size, share_call_error

_ALONE = Group(None, 0, 1)
_MAX_WINDOW = 2**30  # no sequence is longer, and an operator's integers have 64 bits


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    first_key: int | Tensor = 0,
    cp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> Tensor:
    """softmax(scale q kᵀ) v for each head, with bits that do not depend on other heads, sequences or queries.

    q [B, h, Sq, D], k [B, kv, Sk, D], v [B, kv, Sk, E] -> [B, h, Sq, E] in q's dtype. bfloat16, float16 or float32, all
    three of one dtype and on one device (under torch.autocast they are cast to autocast's dtype); any strides. h is a
    multiple of kv; do not repeat the heads of k and v. Unlike in torch, the last query is at the position of the last
    key, as in flash-attn 2.1 and later: with Sq < Sk the first Sk - Sq keys are a cache. A query that sees no key gives
    zeros. k and v must be finite, also where no query sees them: their weights are 0, and 0 times Inf is NaN.

    Packed sequences: B = 1, all sequences one after another along S, and cu_seqlens. They cover every token: padding at
    the end is a sequence of its own. Nothing of one sequence reaches another, not even a NaN.

    Args:
        causal: a query at position p sees keys 0 .. p.
        scale: 1 / sqrt(D) if None. scale, window, softcap and max_seqlen_* are numbers, not tensors.
        window: a query sees only the last `window` of these keys, its own position included; needs causal.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], from 0 to Sq and Sk: where each sequence starts. If
            cu_seqlens_k is None, k has the same lengths as q, and Sk must equal Sq.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length; computed if None, which waits for the GPU.
            If they are given on CUDA, the device checks them and cu_seqlens without making the host wait: wrong values
            fail a device-side assertion, as an index out of range does, also in a replayed CUDA graph. The process can
            then no longer use the GPU.
        sinks: [h] of any floating point dtype, computed with in float32: a score of each head that every query adds to
            its softmax, with a weight and without a value (gpt-oss). Neither scaled nor capped. Their gradient is
            complete for this call's heads: the tokens of a row of the batch are added by halves, then the rows in
            order. So sinks are sharded as heads are; a whole copy on each rank would get a part of its gradient.
        mask: broadcasts to [B, h, Sq, Sk]; not with packed sequences. bool: a query sees a key where it is True and the
            other options let it. Of any other floating point dtype: added in float32 to the scaled and capped scores
            (ALiBi); -inf hides a key. A query from which all keys are hidden gives zeros, as in torch's SDPA; under
            finite biases alone, however low, it does not. A bias may require a gradient if it has each head's own
            values; what it repeats is added by halves along keys and queries, then in order over the batch. The
            gradient takes memory for [B, h, Sq, Sk] in float32.
        first_key: the position of k's first key in its sequence: of a cache that has dropped the keys before it, which
            the window has passed. The bits are those of a call with all keys; k and v are copied. With packed
            sequences int32 [sequences], one for each; nothing is copied, and there are no gradients.
        cp_group: context parallelism: a ProcessGroup or 1-D DeviceMesh of P ranks, each of which passes its consecutive
            part of the tokens, q [B, h, S/P, D], k [B, kv, S/P, D] and v, and gets out [B, h, S/P, E]. The bits are
            those of one rank. P divides h; queries and keys are of the same tokens, without a cache. cu_seqlens_q,
            cu_seqlens_k, sinks and mask are whole, the same on every rank, and so are the gradients of the last two.
            Heads travel for tokens (context_parallel.py).

    Raises:
        ValueError: shapes, devices or options that are not compatible.
        TypeError: a dtype that is not supported; an argument of the wrong type, such as a tensor in place of a number.
        NotImplementedError: another kind of device; in backward, a second derivative.
        RuntimeError: forward-mode derivatives; with cp_group, ranks whose calls differ, the same error on every rank.
    """
    with inside_a_layer():
        group = _ALONE if cp_group is None else resolve_group(cp_group, "cp_group", "cp")
        try:
            for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("mask", mask)):
                refuse_dtensor(x, name)
            q, k, v = in_autocasts_dtype(q, k, v)
            if q.device.type not in ("cuda", "cpu"):
                raise NotImplementedError(f"q is on {q.device}: attention runs on cuda and cpu")
            check_tensors(q, k, v)
            if group.size > 1:
                check_parts(q, k, first_key, group)
            if sinks is not None:
                check_sinks(sinks, q)
                sinks = sinks.float()
            if mask is not None:
                whole = (*q.shape[:2], q.shape[2] * group.size, k.shape[2] * group.size)
                check_mask(mask, whole, q.device, "mask")
                mask = mask[(None,) * (4 - mask.dim())]
                check_mask_use(mask, q, packed=cu_seqlens_q is not None)
            if not isinstance(causal, bool):
                raise TypeError(f"causal is a {type(causal).__name__}: it must be True or False")
            q, scale, softcap = check_score_options(q, scale, softcap)
            window = number(window, int, "window")
            max_seqlen_q = number(max_seqlen_q, int, "max_seqlen_q")
            max_seqlen_k = number(max_seqlen_k, int, "max_seqlen_k")
            if window is not None and (window < 1 or not causal):
                raise ValueError(f"window={window} with causal={causal}: a window is at least 1 and needs causal=True")
            cu_seqlens_k, max_seqlen_k = check_packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            first_keys = None
            if isinstance(first_key, Tensor):
                first_keys = first_key
                check_first_keys(first_keys, cu_seqlens_q, cu_seqlens_k, window, (q, k, v, sinks))
            else:
                first_key = int(number(first_key, int, "first_key") or 0)
                check_first_key(q, k, first_key, window, cu_seqlens_q is not None)
                if first_key:
                    k, v, mask = from_whole_chunks(k, v, mask, first_key)
        except (TypeError, ValueError, NotImplementedError) as error:
            share_call_error(error, group, q)
            raise
        value_dim = v.shape[-1]
        q, k, v = of_one_size(q, k, v)
        tensors = q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k
        seen = min(window or 0, _MAX_WINDOW)
        options = max_seqlen_q or 0, max_seqlen_k or 0, causal, scale, seen, softcap or 0.0
        out: Tensor
        if group.size > 1:
            out = context_attention(*tensors, options, group)
            return out if out.shape[-1] == value_dim else out[..., :value_dim]
        is_traced = _is_traced(*(x for x in (q, k, v, sinks, mask) if x is not None))
        if first_keys is not None:
            if is_traced:
                raise NotImplementedError(
                    "first_key is a tensor, which torch.compile and other tracers do not take: call attention outside "
                    "of them (torch.compiler.disable)"
                )
            longest = max_seqlen_q or 0, max_seqlen_k or 0
            lengths = lengths_of(q, k, cu_seqlens_q, cu_seqlens_k, *longest, check=True, first_keys=first_keys)
            out, _ = of_lengths(q, k, v, sinks, mask, AttentionSpec(causal, scale, seen, softcap or 0.0), lengths)
        elif is_traced:
            out, _ = _operator(*tensors, *options)
        else:
            out = _Attention.apply(*tensors, options)
        return out if out.shape[-1] == value_dim else out[..., :value_dim]


def from_whole_chunks(
    k: Tensor, v: Tensor, mask: Tensor | None, first_key: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """With zeros before the first key, which no query sees, so that the sums over keys are cut at the same positions of
    the sequence as with all keys. A mask that has each key's own values hides them."""
    before, keys = first_key % CHUNK, k.shape[2]
    k, v = (F.pad(x, (0, 0, before, 0)) for x in (k, v))
    if mask is not None and mask.shape[-1] == keys:
        mask = F.pad(mask, (before, 0), value=0.0 if mask.dtype == torch.bool else float("-inf"))
    return k, v, mask


def _is_traced(*tensors: Tensor) -> bool:
    """Whether torch traces, fakes, records or otherwise intercepts operators: then the call must be an operator.

    That is so under torch.compile; under a dispatch mode (make_fx, FakeTensorMode, selective checkpointing, ..); and
    for tensors without memory of their own (fake tensors, DTensor), which a kernel would read at address 0.
    """
    if torch.compiler.is_compiling() or dispatch_modes():
        return True
    return not all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


# --- forward and backward -------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """out = softmax(cap(scale q kᵀ)) v, in eager mode; kernels/attention/spec.py has the formulas.

    q, out, dout, dq  [B, h, Sq, D]      k, v, dk, dv  [B, kv, Sk, D]      lse  [B, h, Sq]
    sinks, dsinks  [h] or None           mask, dmask  broadcast to [B, h, Sq, Sk], or None

    The function has no jvp, so autograd refuses tangents, which the kernels would silently drop.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        cu_q: Tensor | None,
        cu_k: Tensor | None,
        options: tuple,
    ) -> Tensor:
        out, lse = forward(q, k, v, sinks, mask, cu_q, cu_k, *options)
        ctx.save_for_backward(q, k, v, out, lse, sinks, mask, cu_q, cu_k)
        ctx.options = options
        return out

    @staticmethod
    @outside_of_graphs("a compiler may compute a gradient's sums in another order")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        arguments = dout, *ctx.saved_tensors, ctx.needs_input_grad[4], False, *ctx.options
        differentiate = _AttentionBackward.apply if torch.is_grad_enabled() else backward
        return _gradients(ctx, differentiate(*arguments))[:8]


class _AttentionBackward(torch.autograd.Function):
    """With create_graph=True: its own backward refuses."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _refuse(ctx, *grads)


def _gradients(ctx: Any, of_tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Of all arguments of forward; autograd takes no gradient for None."""
    wanted = [x if needs else None for x, needs in zip(of_tensors, ctx.needs_input_grad, strict=False)]
    return *wanted, *[None] * 8


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("attention has no second derivative: call backward without create_graph=True")


# --- as custom operators --------------------------------------------------------------------------------------------


def _forward_fake(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    sinks, mask, _, _, mask_grad, *_ = others
    of_options = (x if wanted else lse.new_empty(0) for x, wanted in ((sinks, sinks is not None), (mask, mask_grad)))
    return *(empty_heads(x) for x in (q, k, v)), *(x.new_empty(x.shape) for x in of_options)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, mask, cu_q, cu_k, *options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, mask, cu_q, cu_k)
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, _backward_operator(dout, *ctx.saved_tensors, ctx.needs_input_grad[4], False, *ctx.options))


def _as_operator(name: str, kernel: Any, fake: Any, derivative: Any, save: Any) -> Any:
    schema = torch.library.infer_schema(kernel, mutates_args=())
    return with_derivative(define(name, schema, kernel, fake), schema, derivative, save)


_operator = _as_operator("attention", forward, _forward_fake, _differentiate, _save)
_backward_operator = _as_operator("attention_backward", backward, _backward_fake, _refuse, lambda *_: None)
