"""Rotary position embedding of q and k in one launch, with torch's roundings; every pair of elements by itself.

    y = (x * cos) + (rotate(x) * sin)       each product and the sum rounded to the tensors' dtype, as torch's operators

    rotate pairs element i with i + R / 2, or interleaved 2 i with 2 i + 1, of the first R features:
    y[first]  = x[first] * cos[first]   - x[second] * sin[first]
    y[second] = x[second] * cos[second] + x[first] * sin[second]
    features from R on are copied

    backward:
    dx[first]  = dy[first] * cos[first]   + dy[second] * sin[second]
    dx[second] = dy[second] * cos[second] - dy[first] * sin[first]
    a zero is +0.0, since autograd adds the zeros of each slice's gradient

Launched with enable_fp_fusion=False, so that each operation rounds by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import TRITON_DTYPES, cdiv, launch_on, next_power_of_2, readable_rows
from ..plans import Kernel
from .reference_rope import check_rope

PAIRS = 512  # of a program, about


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos_row, sin_row, heads_at, HEADS, stride_x_head, stride_y_head,
    R: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr, AT_ONCE: tl.constexpr,
    INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, PADDED)[None, :]
    head = (heads_at + tl.arange(0, AT_ONCE)).to(tl.int64)[:, None]
    here = head < HEADS
    inside = here & (pair < R // 2)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + R // 2
    in_row = pair < R // 2
    x_head, y_head = x_ptr + head * stride_x_head, y_ptr + head * stride_y_head
    x1 = tl.load(x_head + first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_head + second, mask=inside, other=0.0).to(tl.float32)
    cos1 = tl.load(cos_row + first, mask=in_row, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_row + second, mask=in_row, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_row + first, mask=in_row, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_row + second, mask=in_row, other=0.0).to(tl.float32)
    a1, a2 = (x1 * cos1).to(DTYPE).to(tl.float32), (x2 * cos2).to(DTYPE).to(tl.float32)
    if BACKWARD:
        b1, b2 = (x2 * sin2).to(DTYPE).to(tl.float32), (x1 * sin1).to(DTYPE).to(tl.float32)
        y1, y2 = (a1 + b1).to(DTYPE).to(tl.float32) + 0.0, (a2 - b2).to(DTYPE).to(tl.float32) + 0.0
    else:
        b1, b2 = (x2 * sin1).to(DTYPE).to(tl.float32), (x1 * sin2).to(DTYPE).to(tl.float32)
        y1, y2 = a1 - b1, a2 + b2
    tl.store(y_head + first, y1.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_head + second, y2.to(y_ptr.dtype.element_ty), mask=inside)
    if D > R:
        rest = tl.arange(0, REST)[None, :] + R
        inside = here & (rest < D)
        value = tl.load(x_head + rest, mask=inside, other=0.0)
        if BACKWARD:
            value = (value.to(tl.float32) + 0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_head + rest, value, mask=inside)


@triton.jit(do_not_specialize=["blocks", "blocks_q", "heads_q", "heads_k", "S"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh,
    stride_ks, stride_cb, stride_cs, stride_sb, stride_ss, stride_oqb, stride_oqh, stride_oqs, stride_okb, stride_okh,
    stride_oks, S, heads_q, heads_k, blocks, blocks_q,
    R: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr, AT_ONCE: tl.constexpr,
    INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    # A token has this number of blocks of AT_ONCE heads, those of q first.
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, position = (token // S).to(tl.int64), (token % S).to(tl.int64)
    cos_row = cos_ptr + batch * stride_cb + position * stride_cs
    sin_row = sin_ptr + batch * stride_sb + position * stride_ss
    if block < blocks_q:
        _rotate_heads(
            q_ptr + batch * stride_qb + position * stride_qs, q_out_ptr + batch * stride_oqb + position * stride_oqs,
            cos_row, sin_row, block * AT_ONCE, heads_q, stride_qh, stride_oqh,
            R, D, PADDED, REST, AT_ONCE, INTERLEAVED, DTYPE, BACKWARD,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr + batch * stride_kb + position * stride_ks, k_out_ptr + batch * stride_okb + position * stride_oks,
            cos_row, sin_row, (block - blocks_q) * AT_ONCE, heads_k, stride_kh, stride_okh,
            R, D, PADDED, REST, AT_ONCE, INTERLEAVED, DTYPE, BACKWARD,
        )  # fmt: skip


_rope = Kernel(_rope_kernel, enable_fp_fusion=False)


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backward: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(q, k), rotated; with `backward` their gradients for given gradients. See the top of this file for the formulas.

    q: [B, heads, S, D], k: [B, heads of its own, S, D] or None; cos, sin: [B or 1, S, R], R even and at most D. All of
    one dtype, bfloat16, float16 or float32, any strides. The results are dense, their dims in the order of the strides
    of what they are made of. Raises TypeError for a dtype and ValueError for a shape or a device that does not fit.
    """
    check_rope("rope", q, k, cos, sin)
    given = tuple(x for x in (q, k) if x is not None)
    read, (cos_read, sin_read) = [readable_rows(x) for x in given], [readable_rows(x) for x in (cos, sin)]
    made = [torch.empty_like(x) for x in read]
    (batch, heads, s, d), r = q.shape, cos.shape[-1]
    if q.numel() + (0 if k is None else k.numel()):
        padded, rest = next_power_of_2(r // 2), next_power_of_2(max(1, d - r))
        heads_k = 0 if k is None else k.shape[1]
        at_once = min(max(1, PAIRS // padded), next_power_of_2(max(heads, heads_k)))
        blocks_q = cdiv(heads, at_once)
        blocks = blocks_q + cdiv(heads_k, at_once)
        strides = [x.stride()[:3] for x in (read[0], read[-1])]
        of_rows = [(0 if x.shape[0] == 1 else x.stride(0), x.stride(1)) for x in (cos_read, sin_read)]
        out_strides = [x.stride()[:3] for x in (made[0], made[-1])]
        numbers = (
            *(n for part in (*strides, *of_rows, *out_strides) for n in part), s, heads, heads_k, blocks, blocks_q,
        )  # fmt: skip
        constants = r, d, padded, rest, at_once, interleaved, TRITON_DTYPES[q.dtype], backward
        grid = (batch * s * blocks, 1, 1)
        with launch_on(q, "rope"):
            _rope(
                q.device.index, grid, (read[0], read[-1], cos_read, sin_read, made[0], made[-1], *numbers), constants,
                num_warps=max(1, min(4, at_once * padded // 128)),
            )  # fmt: skip
    made = [x.to(q.dtype) for x in made]
    return made[0], made[1] if k is not None else None
