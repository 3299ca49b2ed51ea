"""The kernels of attention, forward and backward, of arguments that attention.py has checked."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention.spec import CHUNK, AttentionSpec, PackedLengths, bias_grad
from ..kernels.select import select

_KERNEL_HEAD_DIM = 256  # the largest that kernels/attention/forward.py takes


def kernel_for(q: Tensor) -> Any:
    """The module that computes attention of q."""
    return select("attention", "cuda" if q.is_cuda and q.shape[-1] <= _KERNEL_HEAD_DIM else "cpu")


def lengths_of(
    q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, check: bool,
    first_keys: Tensor | None = None,
) -> PackedLengths | None:  # fmt: skip
    """None without packing. max_q and max_k are 0 if not known.

    check: whether to check lengths on CUDA; backward does not repeat what its forward has checked.
    first_keys: attention's first_key of packed sequences.
    """
    if cu_q is None or cu_k is None:
        return None
    max_lengths: list[int] = []
    for name, x, cu, longest in (("q", q, cu_q, max_q), ("k", k, cu_k, max_k)):
        if cu.is_cuda and longest:
            if check and not (max_lengths and cu is cu_q and (max_k, k.shape[2]) == (max_q, q.shape[2])):
                _assert_lengths(cu, x.shape[2], longest, name)
        else:
            starts = cu.tolist()
            sizes = [stop - start for start, stop in itertools.pairwise(starts)]
            if starts[0] != 0 or starts[-1] != x.shape[2] or min(sizes) < 0:
                raise ValueError(f"cu_seqlens_{name}={starts} must rise from 0 to {x.shape[2]}, the tokens of {name}")
            if longest and longest < max(sizes):
                raise ValueError(
                    f"max_seqlen_{name}={longest} is less than the longest sequence: pass at least {max(sizes)}"
                )
            longest = longest or max(sizes)
        max_lengths.append(longest)
    if first_keys is not None:
        cu_k = torch.stack([cu_k, F.pad(first_keys % CHUNK, (0, 1))], 1)
        max_lengths[1] += CHUNK - 1
    max_q, max_k = max_lengths
    return PackedLengths(cu_q.contiguous(), cu_k.contiguous(), max_q, max_k)


def _assert_lengths(cu: Tensor, tokens: int, longest: int, name: str) -> None:
    """The same check by the device; the host does not wait for it."""
    sizes = cu.diff()
    fits = (sizes.clamp(0, longest) == sizes).all()
    torch.ops.aten._assert_async.msg(fits, f"cu_seqlens_{name} must rise, by at most max_seqlen_{name}={longest}")
    torch.ops.aten._assert_async.msg(
        (cu[0] == 0) & (cu[-1] == tokens), f"cu_seqlens_{name} must go from 0 to the tokens of {name}"
    )


def _as_kernels_take(
    q: Tensor, k: Tensor, sinks: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    whole = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    return None if sinks is None else sinks.contiguous(), whole


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, causal: bool, scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, h, Sq, D], lse [B, h, Sq]; kernels/attention/spec.py says what they are."""
    lengths = lengths_of(q, k, cu_q, cu_k, max_q, max_k, check=True)
    return of_lengths(q, k, v, sinks, mask, AttentionSpec(causal, scale, window, softcap), lengths)


def of_lengths(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, spec: AttentionSpec,
    lengths: PackedLengths | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sinks, mask = _as_kernels_take(q, k, sinks, mask)
    out, lse = kernel_for(q).forward(q, k, v, spec, lengths, sinks, mask)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, mask: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, mask_grad: bool, key_parts: bool, max_q: int, max_k: int, causal: bool,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dsinks, dmask, in the shapes of q, k, v, sinks, mask; an empty tensor for what is not asked for.

    key_parts: dk and dv are those of each query head, [B, h, Sk, D] fp32.
    """
    spec = AttentionSpec(causal, scale, window, softcap)
    lengths = lengths_of(q, k, cu_q, cu_k, max_q, max_k, check=False)
    options = _as_kernels_take(q, k, sinks, mask)
    of_call = dout, q, k, v, out, lse, spec, lengths
    dq, dk, dv, dsinks, dmask = kernel_for(q).backward(*of_call, *options, mask_grad, key_parts)
    if dmask is not None and mask is not None:
        dmask = bias_grad(dmask, mask.shape).to(mask.dtype)
    empty = lse.new_empty(0)
    return dq, dk, dv, empty if dsinks is None else dsinks, empty.clone() if dmask is None else dmask
