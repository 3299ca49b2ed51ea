"""Gated activations in Triton, forward and backward, in one launch each; every element depends on its own alone.

    y     = act(gate) * up                  act: silu(g) = g * sigmoid(g)
    dup   = dy * act(gate)                       gelu_tanh(g) = g * sigmoid(z(g)), z(g) = 2c * (g + 0.044715 * g**3)
    dgate = (dy * up) * act'(gate)          with c = sqrt(2 / pi); it equals 0.5 * g * (1 + tanh(z / 2))

    clamped_silu (gpt-oss): y = g * sigmoid(1.702 * g) * (u + 1) for g = min(gate, 7) and u = up within -7 and 7;
    beyond these limits gradients are zero

act(gate), dy * up and the results are rounded to the tensors' dtype, as they are where torch computes act and the
products one by one; all between is fp32. Launched with enable_fp_fusion=False, so that each operation rounds by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.output import written
from ..known_calls import find_call, remember
from ..launch import Launches, cdiv, interpreting, launch_on, next_power_of_2
from .gated_checks import ACTIVATIONS, check_gated

COLUMNS = 1024  # of a program, at most


@triton.jit
def _exp_and_slope(g, SCALE: tl.constexpr, CUBIC: tl.constexpr):
    """exp(-z) and z'(g) for z = SCALE * (g + CUBIC * g**3)."""
    if CUBIC == 0.0:
        return tl.exp(-(SCALE * g)), tl.full(g.shape, SCALE, tl.float32)
    square = g * g
    return tl.exp(-(SCALE * (g + CUBIC * (square * g)))), SCALE * (1.0 + (3.0 * CUBIC) * square)


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr, dy_ptr, first_ptr, second_ptr, stride_gate, stride_up, stride_dy, stride_out, step, step_out, H,
    COLUMNS: tl.constexpr, SCALE: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    # Stores y, or dgate and dup. `step` is from one column of gate and up to the next, `step_out` of what is stored.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    gate = tl.load(gate_ptr + row * stride_gate + cols * step, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols * step, mask=inside, other=0.0).to(tl.float32)
    g, u = gate, up
    if LIMIT > 0.0:  # by comparisons, so that NaN stays
        g = tl.where(gate > LIMIT, LIMIT, gate)
        u = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    exp, slope = _exp_and_slope(g, SCALE, CUBIC)
    act = tl.div_rn(g, 1.0 + exp).to(DTYPE).to(tl.float32)
    first, second = first_ptr + row * stride_out + cols * step_out, second_ptr + row * stride_out + cols * step_out
    if BACKWARD:
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), 1.0 + exp)
        dact = (dy * u).to(DTYPE).to(tl.float32)
        rest = tl.where(exp > 1.0, 1.0 - sigmoid, exp * sigmoid)  # 1 - sigmoid, of which no digits cancel
        dgate = dact * (sigmoid * (1.0 + (g * rest) * slope))
        dup = dy * act
        if LIMIT > 0.0:
            dgate = tl.where(gate <= LIMIT, dgate, 0.0)
            dup = tl.where((up >= -LIMIT) & (up <= LIMIT), dup, 0.0)
        tl.store(first, dgate.to(first_ptr.dtype.element_ty), mask=inside)
        tl.store(second, dup.to(second_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(first, (act * u).to(first_ptr.dtype.element_ty), mask=inside)


_gated = Launches(_gated_kernel, enable_fp_fusion=False)
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous [T, H], for gate and up [T, H] of any strides and one of three dtypes.

    activation: "silu", "gelu_tanh" or "clamped_silu". Raises TypeError for a dtype and ValueError for what else does
    not fit.
    """
    key, known = find_call(("gated_forward", activation), gate, up)
    if known is not None:
        (y,) = known.results()
        known.run(gate, up, gate, y, y)
        return y
    check_gated("gated_forward", activation, gate=gate, up=up)
    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    _launch("gated_forward", activation, gate, up, None, (y, y), key)
    return y


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(dgate, dup), each contiguous [T, H]; arguments and errors as for `gated_forward`.

    out: tensors to write into, of gate's shape and dtype and any strides, such as the halves of one.
    """
    key = known = None
    if out is not None:
        key, known = find_call(("gated_backward", activation), dy, gate, up, *out)
    if out is not None and known is not None:
        known.run(gate, up, dy, *out)
        return written(out[0]), written(out[1])
    outs = {} if out is None else {"dgate": out[0], "dup": out[1]}
    check_gated("gated_backward", activation, gate=gate, up=up, dy=dy, **outs)
    if out is None:
        out = tuple(torch.empty(gate.shape, device=gate.device, dtype=gate.dtype) for _ in range(2))
    _launch("gated_backward", activation, gate, up, dy, out, key)
    return written(out[0]), written(out[1])


def _launch(
    operation: str, activation: str, gate: Tensor, up: Tensor, dy: Tensor | None, outs: tuple[Tensor, Tensor],
    key: tuple | None = None,
) -> None:  # fmt: skip
    """key: to remember the call, if it copies nothing."""
    t, h = gate.shape
    if t == 0:
        return
    given = gate, up, gate if dy is None else dy
    gate, up, dy_rows = (_readable(x) for x in given)
    step = 2 if gate.stride(1) == up.stride(1) == 2 else 1  # interleaved, or not
    gate, up = (x if x.stride(1) == step else x.contiguous() for x in (gate, up))
    dy_rows = dy_rows if dy_rows.stride(1) == 1 else dy_rows.contiguous()
    stored = outs
    if interpreting() or outs[0].stride() != outs[1].stride():
        y = torch.empty((t, h), device=gate.device, dtype=torch.float32 if interpreting() else outs[0].dtype)
        stored = y, y if dy is None else torch.empty_like(y)
    columns = min(COLUMNS, max(32, next_power_of_2(h)))
    tensors = gate, up, dy_rows, *stored
    strides = tuple(x.stride(0) for x in (gate, up, dy_rows, stored[0]))
    numbers, grid = (*strides, gate.stride(1), stored[0].stride(1), h), (t, cdiv(h, columns))
    constants = (columns, *ACTIVATIONS[activation], _DTYPES[outs[0].dtype], dy is not None)
    with launch_on(gate, operation):
        launch = _gated(
            gate.device.index, grid, (*tensors, *numbers), constants, num_warps=max(1, columns // 256)
        )  # fmt: skip
    if stored is not outs:
        for x, y in zip(outs, stored, strict=True):
            x.copy_(y)
    elif all(x is y for x, y in zip(given, tensors, strict=False)):
        remember(key, launch, outs[:1], (*numbers, *constants), grid)


def _readable(x: Tensor) -> Tensor:
    x = x.resolve_neg()
    return x.float() if interpreting() else x  # the interpreter gets bfloat16 subnormals wrong
