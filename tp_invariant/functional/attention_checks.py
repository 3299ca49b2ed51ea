"""Checks of attention's arguments, made before anything runs; for attention.py and attention_choice.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.autocast import autocast_dtype
from ..kernels.dtypes import DTYPES


def in_autocasts_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, cast to autocast's dtype under torch.autocast.

    Raises:
        TypeError: one of them is not a tensor.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v are {kinds}: they must be tensors [batch, heads, sequence, head size]")
    dtype = autocast_dtype(q.device)
    if dtype is not None:
        q, k, v = (x.to(dtype) if x.dtype in DTYPES else x for x in (q, k, v))
    return q, k, v


def check_score_options(q: Tensor, scale: float | None, softcap: float | None) -> tuple[Tensor, float, float | None]:
    """q and both as numbers, with a positive scale, 1 / sqrt(D) if None: kernels know no other."""
    scale = number(q.shape[-1] ** -0.5 if scale is None else scale, float, "scale")
    softcap = number(softcap, float, "softcap")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be positive and finite, or None for no cap")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale} must be finite")
    if scale <= 0:
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    return q, scale, softcap


def number(value: Any, kind: type, name: str) -> Any:
    """`value` as `kind`, int or float: kernels are compiled for the types of their arguments."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is a tensor: it must be {kind.__name__} or None, and gets no gradient")
    if isinstance(value, (str, bytes, bool)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: it must be {kind.__name__} or None")
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError) as error:  # a list; NaN and Inf as an int
        raise TypeError(f"{name}={value!r} must be {kind.__name__} or None") from error
    if kind is int and converted != value:
        raise ValueError(f"{name}={value} must be a whole number")
    return converted


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"

    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes()} must be [batch, heads, sequence, head size]; packed sequences have batch 1")
    if k.shape[:-1] != v.shape[:-1] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{shapes()} do not fit: all need one batch, k and v the same heads and sequence, q and k one head size"
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}: both must be at least 1, and q's a multiple of k's"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"{shapes()} have heads of size 0: it must be at least 1")
    if q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}: attention takes {', '.join(map(str, DTYPES))}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} and {name} is {x.dtype}: they must have the same dtype")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}: they must be on the same device")


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}: it must be a tensor [heads of q] or None")
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks is {sinks.dtype}: it must be of a floating point dtype")
    if sinks.shape != q.shape[1:2] or sinks.device != q.device:
        raise ValueError(
            f"sinks is {tuple(sinks.shape)} on {sinks.device}: it must be [{q.shape[1]}], one for each head of q, on "
            f"{q.device}"
        )


def check_mask(mask: Tensor, scores: Sequence[int], device: torch.device, name: str) -> None:
    """scores: [B, heads, queries, keys]"""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype in DTYPES):
        kind = str(mask.dtype) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(
            f"{name} is {kind}: it must be a tensor of torch.bool, True where a query sees a key (mask.bool()), or "
            f"of a floating point dtype ({', '.join(map(str, DTYPES))}), added to the scores"
        )
    fit = mask.dim() <= 4 and all(a in (1, b) for a, b in zip(mask.shape[::-1], scores[::-1], strict=False))
    if not fit or mask.device != device:
        raise ValueError(
            f"{name} is {tuple(mask.shape)} on {mask.device}: it must broadcast to [B, heads, queries, keys], here "
            f"{tuple(scores)}, on {device}"
        )


def check_mask_use(mask: Tensor, q: Tensor, packed: bool) -> None:
    """mask: of four dims."""
    if mask.requires_grad and torch.is_grad_enabled() and mask.shape[1] != q.shape[1]:
        raise ValueError(
            f"mask {tuple(mask.shape)} requires a gradient and repeats over {q.shape[1]} heads: the gradient would "
            "be a sum over heads, of which a rank has a part; give each head its own, [.., heads, queries, keys]"
        )
    if packed:
        raise ValueError("mask is given with cu_seqlens_q: packed sequences take causal and window alone")


def check_first_key(q: Tensor, k: Tensor, first_key: int | None, window: int | None, packed: bool) -> None:
    if first_key is None or first_key < 0:
        raise ValueError(f"first_key={first_key} must be at least 0, the position of k's first key in its sequence")
    if first_key and packed:
        raise ValueError(
            f"first_key={first_key} is given with cu_seqlens_q: packed sequences need one for each, int32 [sequences]"
        )
    first_query = first_key + k.shape[2] - q.shape[2]
    sees = 0 if window is None else max(0, first_query - window + 1)
    if first_key > sees:
        raise ValueError(
            f"first_key={first_key} with window={window}, {q.shape[2]} queries and {k.shape[2]} keys: the first query "
            f"sees keys from position {sees} on, which k does not have"
        )


def check_first_keys(
    first_keys: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, window: int | None, tensors: Sequence[Tensor | None]
) -> None:
    """Those of packed sequences; tensors: of which there are no gradients. On CUDA the device checks the values."""
    if cu_q is None or cu_k is None or window is None:
        raise ValueError("first_key is a tensor: it needs packed sequences (cu_seqlens_q) and a window")
    wanted = torch.int32, (cu_q.shape[0] - 1,), cu_q.device
    if (first_keys.dtype, tuple(first_keys.shape), first_keys.device) != wanted:
        raise ValueError(
            f"first_key is {first_keys.dtype} {tuple(first_keys.shape)} on {first_keys.device}: with packed sequences "
            f"it must be int32 [sequences], here {wanted[1]}, on {wanted[2]}"
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "first_key is a tensor, and q, k, v or sinks requires a gradient, which there is none of: call attention "
            "under torch.no_grad(), or give each sequence in a call of its own"
        )
    first_queries = first_keys + cu_k.diff() - cu_q.diff()
    fits = ((first_keys >= 0) & (first_keys <= (first_queries - window + 1).clamp(min=0))).all()
    if fits.is_cuda:
        torch.ops.aten._assert_async.msg(fits, f"a first_key is not between 0 and what window={window} has passed")
    elif not fits:
        raise ValueError(
            f"first_key={first_keys.tolist()} with window={window}, and first queries at {first_queries.tolist()}: a "
            "sequence has to have all keys that its first query sees"
        )


def check_packing(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, max_k: int | None
) -> tuple[Tensor | None, int | None]:
    """cu_seqlens_k and max_seqlen_k, which may be left out where they are q's."""
    if cu_q is None:
        for name, given in (("cu_seqlens_k", cu_k), ("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
            if given is not None:
                raise ValueError(f"{name} is given and cu_seqlens_q is not: packed sequences need cu_seqlens_q")
        return None, None
    if cu_k is None:
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}: packed sequences need cu_seqlens_k")
        cu_k, max_k = cu_q, max_q if max_k is None else max_k
    _check_lengths(q, cu_q, max_q, "q")
    _check_lengths(k, cu_k, max_k, "k")
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q {tuple(cu_q.shape)} and cu_seqlens_k {tuple(cu_k.shape)} must have the "
            "same shape: an entry for each sequence, also if it has no queries or no keys"
        )
    return cu_k, max_k


def _check_lengths(x: Tensor, cu: Tensor, longest: int | None, name: str) -> None:
    if not isinstance(cu, Tensor):
        raise TypeError(f"cu_seqlens_{name} is a {type(cu).__name__}: it must be an int32 tensor [sequences + 1]")
    if x.shape[0] != 1:
        raise ValueError(f"{name} has batch {x.shape[0]}: packed sequences (cu_seqlens_{name}) have batch 1")
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 2 or cu.device != x.device:
        raise ValueError(
            f"cu_seqlens_{name} is {cu.dtype} {tuple(cu.shape)} on {cu.device}: it must be int32 [sequences + 1], at "
            f"least 2, on {x.device}"
        )
    if longest is not None and longest < 0:
        raise ValueError(f"max_seqlen_{name}={longest} must be at least 0, or None to compute it")
