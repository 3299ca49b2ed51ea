"""Rotary position embedding of q and k as one operator. By pairs of features: each rank computes the heads it holds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..core.differentiation import once_differentiable
from ..core.dtensors import is_dtensor
from ..kernels.rowwise.reference_rope import check_rope, rotated
from ..kernels.select import select


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """(x * cos) + (rotate(x) * sin) for x = q and k: one launch forward and one backward on a GPU.

        cos, sin = self.rotary_emb(x, position_ids)
        q, k = tpi.rotary_embedding(q, k, cos, sin)

    With the bits of torch's operators: both products and the sum are rounded to the tensors' dtype, forward and
    backward. rotate(x) is cat(-x2, x1) of x's halves or, interleaved, (-x[1], x[0], -x[3], x[2], ..). Features beyond
    those of cos are copied. Saves cos and sin alone. A rank may hold any of the heads. In compiled code it is torch's
    operators, which the compiler fuses. It cannot be differentiated twice.

    Args:
        q, k: [B, heads, S, D], or [B, S, heads, D] with unsqueeze_dim=2; each with a number of heads of its own.
        cos, sin: [B, S, R] or [1, S, R], R even and at most D; they get no gradient.
        unsqueeze_dim: the dim of q and k that holds the heads, 1 or 2.

    Returns:
        q and k rotated, of their shapes and dtype.

    Raises:
        TypeError: dtypes that are not one of bfloat16, float16 and float32, or differ.
        ValueError: shapes or devices that do not fit, another unsqueeze_dim, cos or sin that require a gradient.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim={unsqueeze_dim}: choose 1 for [B, heads, S, D] or 2 for [B, S, heads, D]")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos or sin requires a gradient, which this operator does not compute: detach them")
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if torch.compiler.is_compiling():
        check_rope("rotary_embedding", q, k, cos, sin)
        rotated_q, rotated_k = (rotated(x, cos, sin, interleaved) for x in (q, k))
    else:
        for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
            if is_dtensor(x):
                raise TypeError(f"{name} of rotary_embedding is a DTensor: pass local tensors")
        rotated_q, rotated_k = apply_rotation(q, k, cos, sin, interleaved)
    if unsqueeze_dim == 2:
        return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)
    return rotated_q, rotated_k


class Rotation(torch.autograd.Function):
    """kernels/rowwise/rope.py has the formulas.

    q, k, their gradients  [B, heads, S, D], this rank's heads, or tokens      cos, sin  [B or 1, S, R]
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.set_materialize_grads(False)
        rotated_q, rotated_k = select("rotary embedding", q.device.type).rope(q, k, cos, sin, interleaved=interleaved)
        need_q, need_k = ctx.needs_input_grad[:2]
        if need_q != need_k:
            ctx.mark_non_differentiable(rotated_k if need_q else rotated_q)
        return rotated_q, rotated_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        rotate = functools.partial(
            select("rotary embedding", cos.device.type).rope,
            cos=cos,
            sin=sin,
            interleaved=ctx.interleaved,
            backward=True,
        )
        if dq is not None and dk is not None:
            return *rotate(dq, dk), None, None, None
        dq = None if dq is None else rotate(dq, None)[0]
        dk = None if dk is None else rotate(dk, None)[0]
        return dq, dk, None, None, None


apply_rotation = Rotation.apply
