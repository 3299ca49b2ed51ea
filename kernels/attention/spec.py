"""What one attention call computes, apart from its tensors: shared by forward.py (Triton) and reference.py.

Both have the same two functions and the same contract:

    forward(q, k, v, spec, lengths=None, sinks=None, mask=None) -> out, lse
    backward(dout, q, k, v, out, lse, spec, lengths=None, sinks=None, mask=None, mask_grad=False, key_parts=False)
        -> dq, dk, dv, dsinks, dmask
        q         [B, Hq, Sq, D]     any strides; Hq a multiple of Hkv, and query heads
        k, v      [B, Hkv, Sk, D]    i Hq/Hkv .. share key head i
        sinks     [Hq]               fp32, contiguous, or None: a score that every query of a head adds to its sum of
                                     weights, and that has no value
        mask      [B, Hq, Sq, Sk]    any strides, or None; bool: True where a query sees a key, if spec lets it;
                                     floating point: added to the scaled and capped scores, and -inf hides
        out       [B, Hq, Sq, D]     in q's dtype; 0 where a query sees nothing
        lse       [B, Hq, Sq]        fp32: log2 of the sum of 2^(scaled and capped score * log2 e), the sink's too; -inf
                                     where a query sees nothing and has no sink
        dq, dk, dv, dsinks           in the dtypes and shapes of q, k, v, sinks; dsinks None without sinks
        dmask     [B, Hq, Sq, Sk]    fp32, contiguous; None without mask_grad

out, dq, dk and dv lie in memory as [B, S, H, D] would (`empty_heads`), lse is contiguous.

Query i is at key position Sk - Sq + i, the last query at the last key, as in flash-attn 2.1 and later. Keys are
processed from position 0 of their sequence in blocks that depend only on dtype and head size. So the bits of
out[b, h, i] depend only on q[b, h, i], k[b, h'] and v[b, h']: they are the same in a full prefill, a chunk or one
decode step, in any batch, packing or slice of the heads. dk and dv of a key head are the sums of its query heads' fp32
parts, in head order, rounded once. With key_parts these parts are returned in place of dk and dv, [B, Hq, Sk, D] fp32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..elementwise import in_whole_vectors_, sum_by_halves

LOG2_E = 1 / math.log(2)

# The number of keys that the Triton kernels add to one partial result before they fold it into the total. Sums over
# keys are cut only here, so one program may compute all chunks, or one program each: a decode step then fills the GPU
# and has the bits of a prefill. Another value gives other bits; it must be a multiple of the largest tile's keys.
# Each cut costs a prefill some 190 instructions per warp: 1024 makes it up to 6% faster on an H200 (2048 to 16384
# tokens, head size 128), and a decode step of one sequence 8% slower (benchmarks/bench_attention.py --chunks).
CHUNK = 512


@dataclass(frozen=True)
class AttentionSpec:
    """Which keys a query sees, and how a score is computed.

    causal: a query at key position p sees keys 0 .. p; else all of them.
    scale: multiplies q kᵀ.
    window: only the last `window` of those, p - window < j <= p; 0 is no window; needs causal.
    softcap: scaled scores s become softcap * tanh(s / softcap); 0.0 is no cap.
    """

    causal: bool
    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class PackedLengths:
    """Sequences packed one after another into B = 1, Sq and Sk being the totals of tokens.

    Sequence n has queries cu_q[n] .. cu_q[n + 1] and keys cu_k[n] .. cu_k[n + 1]: int32 [sequences + 1] on the tensors'
    device, from 0 to the total. max_q and max_k are at least the longest sequence's lengths; they set the size of the
    grid and no bits.

    In forward cu_k may also be [sequences + 1, 2], contiguous: beside each start, how many keys of the sequence's first
    chunk were dropped, less than CHUNK. No query sees those. They move the positions at which the sums over keys are
    cut, so that these are the positions of the whole sequence. max_k counts them.

    pages: in forward, None or int32 [sequences, any], contiguous. Keys and values are then in pages, k and v [number of
    pages, Hkv, P, D], and key j of sequence n is row j % P of page pages[n, j // P]; cu_k gives their numbers alone.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    pages: Tensor | None = None

    @property
    def packing(self) -> int:
        """The kernels' PACKED: 2 with dropped keys."""
        return self.cu_k.dim()


def bias_grad(dmask: Tensor, shape: torch.Size) -> Tensor:
    """dmask [B, Hq, Sq, Sk] summed over what `shape`, of four dims, has once: keys, then queries, each by halves, then
    the batch in order."""
    if shape[3] == 1:
        dmask = sum_by_halves(dmask)
    if shape[2] == 1:
        dmask = sum_by_halves(dmask.mT).mT
    if shape[0] == 1 and dmask.shape[0]:
        first, *others = dmask.split(1)
        dmask = functools.reduce(torch.add, others, first)
    return dmask if dmask.shape == shape else dmask.new_zeros(shape)


def sink_grads(sinks: Tensor | None, delta: Tensor, lse: Tensor) -> Tensor | None:
    """dsinks [Hq] = the sum over queries of -2^(sink log2(e) - lse) delta; delta, lse [B, Hq, Sq] fp32.

    A sink has no value, so the gradient of its weight is 0, less the row's delta as for every other weight. The tokens
    of a row of the batch are added by halves, then the rows in order: by Sq and B alone, whatever heads are there.
    """
    if sinks is None:
        return None
    if lse.numel() == 0:
        return torch.zeros_like(sinks)
    exponent = ((sinks * LOG2_E)[:, None] - lse).masked_fill(lse == -math.inf, -math.inf)
    rows = sum_by_halves(in_whole_vectors_(torch.exp2_, exponent).mul_(delta)).squeeze(-1)
    total = torch.zeros_like(sinks)
    for row in rows:
        total = total - row
    return total


def empty_heads(like: Tensor) -> Tensor:
    """[B, H, S, D] in memory as [B, S, H, D]: code that joins the heads of a token then needs no copy.

    It is not a view: autograd refuses in-place changes of a view that a function returns.
    """
    return like.new_empty_strided(like.shape, strides_of_heads(like.shape))


def strides_of_heads(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Those of `empty_heads`."""
    _, heads, tokens, size = shape
    return tokens * heads * size, size, heads * size, 1


def heads_side_by_side(x: Tensor) -> Tensor:
    """A copy of x [B, H, S, D] in the memory layout of `empty_heads`."""
    return empty_heads(x).copy_(x)
