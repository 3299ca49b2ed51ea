"""Attention whose bits depend on nothing but the head's own data: one operator, forward and backward.

    q [B, h, Sq, D]   k, v [B, kv, Sk, D]    query head i meets key head i kv / h, query i is at position Sk - Sq + i
    out = softmax(cap(scale q kᵀ) over the keys that the query sees) v

A head's out, dq, dk and dv are the same bits whichever heads, sequences or neighbours in a packing are in the call with
it; and a query's row of out is the same whichever other queries are: a prefill at once, in chunks, or token by token
against a cache of keys. What runs is decided by device and D alone:

    CUDA, D up to 256       the Triton kernel (fp32: IEEE, never TF32)
    CPU; CUDA, larger D     plain torch on the bundled GEMM, in fp32 throughout

In compiled graphs (fullgraph=True) it stands as one node, a torch.library operator.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KERNEL_HEAD_DIM = 256  # at most; kernels/attention.py


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
) -> Tensor:
    """softmax(scale q kᵀ) v for each head, with bits that do not depend on other heads, sequences or queries.

    q [B, h, Sq, D], k [B, kv, Sk, D], v [B, kv, Sk, E] -> [B, h, Sq, E] in q's dtype. bfloat16, float16 or float32, all
    three of one dtype and device (under torch.autocast, of autocast's dtype); any strides. h is a multiple of kv, and
    heads are not repeated. Unlike torch's, the last query stands at the last key, as in flash-attn 2.1 and later: with
    Sq < Sk the first Sk - Sq keys are a cache. A query that sees nothing gives zeros.
    k and v must be finite, those that no query sees too: their weights are 0, and 0 times Inf is NaN.

    Packed sequences: B = 1, all sequences one after another along S, and cu_seqlens. They cover every token: padding at
    the end is a sequence of its own. A sequence sees nothing of the others, NaN neither.

    Args:
        causal: a query at position p sees keys 0 .. p.
        scale: 1 / sqrt(D) if None; positive. It, window, softcap and the longest lengths are numbers, not tensors.
        window: of those the last `window` ones, itself among them; needs causal.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], from 0 to Sq and Sk: where each sequence starts; those of k
            are q's if None, and then Sk is Sq.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length; found if None, which waits for the GPU.
            Given on CUDA, they and cu_seqlens are checked there without waiting: wrong ones end the process's work with
            the GPU by a device-side assertion, as an index out of range does, also in a replayed CUDA graph.

    Raises:
        ValueError: shapes, devices or options that do not fit each other.
        TypeError: a dtype that is not supported; a tensor where a number is meant.
        NotImplementedError: a second derivative, in its backward; another kind of device.
        RuntimeError: forward-mode derivatives.
    """
    if q.device.type not in ("cuda", "cpu"):
        raise NotImplementedError(f"q is on {q.device}: attention runs on cuda and cpu")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.dtype in DTYPES else x for x in (q, k, v))
    _check_tensors(q, k, v)
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    scale = _number(head_dim**-0.5 if scale is None else scale, float, "scale")
    softcap, window = _number(softcap, float, "softcap"), _number(window, int, "window")
    max_seqlen_q, max_seqlen_k = (
        _number(max_seqlen_q, int, "max_seqlen_q"),
        _number(max_seqlen_k, int, "max_seqlen_k"),
    )
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} with causal={causal}: a window is at least 1 and needs causal=True")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be positive and finite, or None for no cap")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be positive and finite: negate q for a negative one")
    if cu_seqlens_q is None:
        for name, given in (
            ("cu_seqlens_k", cu_seqlens_k),
            ("max_seqlen_q", max_seqlen_q),
            ("max_seqlen_k", max_seqlen_k),
        ):
            if given is not None:
                raise ValueError(f"{name} is given and cu_seqlens_q is not: packed sequences need cu_seqlens_q")
    else:
        if cu_seqlens_k is None:
            if q.shape[2] != k.shape[2]:
                raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}: packed sequences need cu_seqlens_k")
            cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_q if max_seqlen_k is None else max_seqlen_k
        _check_lengths(q, cu_seqlens_q, max_seqlen_q, "q")
        _check_lengths(k, cu_seqlens_k, max_seqlen_k, "k")
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"cu_seqlens_q {tuple(cu_seqlens_q.shape)} and cu_seqlens_k {tuple(cu_seqlens_k.shape)} must have one "
                "shape: each sequence has queries and keys, maybe 0 of them"
            )
    if value_dim < head_dim:
        v = F.pad(v, (0, head_dim - value_dim))
    elif value_dim > head_dim:
        q, k = (F.pad(x, (0, value_dim - head_dim)) for x in (q, k))
    longest = max_seqlen_q or 0, max_seqlen_k or 0
    arguments = q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, causal, scale, window or 0, softcap or 0.0
    out: Tensor
    if torch.compiler.is_compiling():
        out, _ = _operator(*arguments)
    elif forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    ):
        out = _Attention.apply(*arguments)
    else:
        out, _ = _forward(*arguments)
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def _number(value: Any, kind: type, name: str) -> Any:
    """`value` as an int or a float, so that a call has one type for it, whatever launched the kernel first."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor: it must be {kind.__name__} or None, and gets no gradient")
    number = kind(value)
    if kind is int and number != value:
        raise ValueError(f"{name}={value} must be a whole number")
    return number


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"

    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes()} must be [batch, heads, sequence, head size]; packed sequences have batch 1")
    if k.shape[:-1] != v.shape[:-1] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{shapes()} do not fit: they need one batch, k and v one sequence and heads, q and k one head size"
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}: q's must be a multiple of k's, and at least 1 of each"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"{shapes()} have heads of size 0: it must be at least 1")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}: attention takes {', '.join(map(str, DTYPES))}")
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} and {name} is {x.dtype}: they must have one dtype")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}: they must be on one device")


def _check_lengths(x: Tensor, cu: Tensor, longest: int | None, name: str) -> None:
    if x.shape[0] != 1:
        raise ValueError(f"{name} has batch {x.shape[0]}: packed sequences (cu_seqlens_{name}) have batch 1")
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 2 or cu.device != x.device:
        raise ValueError(
            f"cu_seqlens_{name} is {cu.dtype} {tuple(cu.shape)} on {cu.device}: it must be int32 [sequences + 1], at "
            f"least 2, on {x.device}"
        )
    if longest is not None and longest < 0:
        raise ValueError(f"max_seqlen_{name}={longest} must be at least 0, or None to find it")


# --- forward and backward -------------------------------------------------------------------------------------------


def _kernel(q: Tensor) -> Any:
    """The module that computes it."""
    if q.is_cuda and q.shape[-1] <= _KERNEL_HEAD_DIM:
        from .kernels import attention

        return attention
    from .kernels import reference_attention

    return reference_attention


@functools.lru_cache(maxsize=4096)
def _spec(causal: bool, scale: float, window: int, softcap: float) -> Any:
    from .kernels.attention_spec import AttentionSpec

    return AttentionSpec(causal, scale, window, softcap)


def _lengths(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, check: bool
) -> Any:
    """PackedLengths or None; 0 for a longest length that is not known. check: unless another call has, on CUDA."""
    if cu_q is None or cu_k is None:
        return None
    from .kernels.attention_spec import PackedLengths

    found: list[int] = []
    for name, x, cu, longest in (("q", q, cu_q, max_q), ("k", k, cu_k, max_k)):
        if cu.is_cuda and longest:
            if check and not (found and cu is cu_q and (max_k, k.shape[2]) == (max_q, q.shape[2])):
                _assert_lengths(cu, x.shape[2], longest, name)
        else:
            starts = cu.tolist()
            sizes = [stop - start for start, stop in itertools.pairwise(starts)]
            if starts[0] != 0 or starts[-1] != x.shape[2] or min(sizes) < 0:
                raise ValueError(f"cu_seqlens_{name}={starts} must rise from 0 to {x.shape[2]}, the tokens of {name}")
            if longest and longest < max(sizes):
                raise ValueError(
                    f"max_seqlen_{name}={longest} is less than the longest sequence, {max(sizes)}: raise it"
                )
            longest = longest or max(sizes)
        found.append(longest)
    return PackedLengths(cu_q.contiguous(), cu_k.contiguous(), *found)


def _assert_lengths(cu: Tensor, tokens: int, longest: int, name: str) -> None:
    """The same by the device, which nobody waits for."""
    sizes = cu.diff()
    fits = (sizes.clamp(0, longest) == sizes).all()
    torch._assert_async(fits, f"cu_seqlens_{name} must rise, by at most max_seqlen_{name}={longest}")
    torch._assert_async((cu[0] == 0) & (cu[-1] == tokens), f"cu_seqlens_{name} must go from 0 to the tokens of {name}")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """out [B, h, Sq, D], lse [B, h, Sq]; kernels/attention_spec.py says what they are."""
    lengths = _lengths(q, k, cu_q, cu_k, max_q, max_k, check=True)
    out, lse = _kernel(q).forward(q, k, v, _spec(causal, scale, window, softcap), lengths)
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, in the shapes of q, k, v."""
    spec, lengths = _spec(causal, scale, window, softcap), _lengths(q, k, cu_q, cu_k, max_q, max_k, check=False)
    dq, dk, dv = _kernel(q).backward(dout, q, k, v, out, lse, spec, lengths)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    """Outside of compiled graphs: an operator costs the host 40 us more in forward, and 100 with a gradient.

    It has no jvp, so autograd refuses tangents, which the kernels alone would drop.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, *options: Any) -> Tensor:
        out, lse = _forward(q, k, v, cu_q, cu_k, *options)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_AttentionBackward.apply(dout, *ctx.saved_tensors, *ctx.options), *[None] * 8


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        _refuse(ctx, *grads)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("attention has no second derivative: call backward without create_graph=True")


# --- the same as operators, for compiled graphs ---------------------------------------------------------------------

_operator = torch.library.custom_op("tp_invariant::attention", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("tp_invariant::attention_backward", _backward, mutates_args=())


@_operator.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward_operator.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_backward_operator(dout, *ctx.saved_tensors, *ctx.options), *[None] * 8


_operator.register_autograd(_differentiate, setup_context=_save)
_backward_operator.register_autograd(_refuse)
