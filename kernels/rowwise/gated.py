"""SwiGLU and GeGLU in Triton, forward and backward, in one launch each; every element depends on its own alone.

    y     = act(gate) * up                  act: silu(g) = g * sigmoid(g)
    dup   = dy * act(gate)                       gelu_tanh(g) = g * sigmoid(z(g)), z(g) = 2c * (g + 0.044715 * g**3)
    dgate = (dy * up) * act'(gate)          with c = sqrt(2 / pi); it equals 0.5 * g * (1 + tanh(z / 2))

act(gate), dy * up and the results are rounded to the tensors' dtype, as they are where torch computes act and the
products one by one; all between is fp32. Launched with enable_fp_fusion=False, so that each operation rounds by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launches, cdiv, interpreting, launch_on, next_power_of_2
from .gated_checks import CUBIC, SCALE, check_gated

COLUMNS = 1024  # of a program, at most


@triton.jit
def _exp_and_slope(g, GELU: tl.constexpr, TWO_C: tl.constexpr, CUBIC: tl.constexpr):
    """exp(-z) and z'(g); for silu z is g."""
    if not GELU:
        return tl.exp(-g), tl.full(g.shape, 1.0, tl.float32)
    square = g * g
    return tl.exp(-(TWO_C * (g + CUBIC * (square * g)))), TWO_C * (1.0 + (3.0 * CUBIC) * square)


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr, dy_ptr, first_ptr, second_ptr, stride_gate, stride_up, stride_dy, H,
    COLUMNS: tl.constexpr, GELU: tl.constexpr, TWO_C: tl.constexpr, CUBIC: tl.constexpr, DTYPE: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    # Stores y, or dgate and dup.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    g = tl.load(gate_ptr + row * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * stride_up + cols, mask=inside, other=0.0).to(tl.float32)
    exp, slope = _exp_and_slope(g, GELU, TWO_C, CUBIC)
    act = tl.div_rn(g, 1.0 + exp).to(DTYPE).to(tl.float32)
    if BACKWARD:
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), 1.0 + exp)
        dact = (dy * u).to(DTYPE).to(tl.float32)
        rest = tl.where(exp > 1.0, 1.0 - sigmoid, exp * sigmoid)  # 1 - sigmoid, of which no digits cancel
        dgate = dact * (sigmoid * (1.0 + (g * rest) * slope))
        tl.store(first_ptr + row * H + cols, dgate.to(first_ptr.dtype.element_ty), mask=inside)
        tl.store(second_ptr + row * H + cols, (dy * act).to(second_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(first_ptr + row * H + cols, (act * u).to(first_ptr.dtype.element_ty), mask=inside)


_gated = Launches(_gated_kernel, enable_fp_fusion=False)
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous [T, H], for gate and up [T, H] of any strides and one of three dtypes.

    activation: "silu" or "gelu_tanh". Raises TypeError for a dtype and ValueError for what else does not fit.
    """
    check_gated("gated_forward", activation, gate=gate, up=up)
    return _launch("gated_forward", activation, gate, up, None)[0]


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(dgate, dup), each contiguous [T, H]; arguments and errors as for `gated_forward`."""
    check_gated("gated_backward", activation, gate=gate, up=up, dy=dy)
    dgate, dup = _launch("gated_backward", activation, gate, up, dy)
    return dgate, dup


def _launch(operation: str, activation: str, gate: Tensor, up: Tensor, dy: Tensor | None) -> list[Tensor]:
    t, h = gate.shape
    rows = [_strided_rows(x) for x in (gate, up, gate if dy is None else dy)]
    dtype = torch.float32 if interpreting() else gate.dtype
    outs = [torch.empty((t, h), device=gate.device, dtype=dtype) for _ in range(1 if dy is None else 2)]
    columns = min(COLUMNS, max(32, next_power_of_2(h)))
    if t > 0:
        with launch_on(gate, operation):
            _gated(
                gate.device.index, (t, cdiv(h, columns)),
                (*rows, outs[0], outs[-1], *(x.stride(0) for x in rows), h),
                (columns, activation == "gelu_tanh", 2 * SCALE, CUBIC, _DTYPES[gate.dtype], dy is not None),
                num_warps=max(1, columns // 256),
            )  # fmt: skip
    return [out.to(gate.dtype) for out in outs]


def _strided_rows(x: Tensor) -> Tensor:
    """x if its rows are contiguous, as those of the halves of one tensor are; else a copy."""
    x = x.resolve_neg()
    if interpreting():
        x = x.float()  # the interpreter gets bfloat16 subnormals wrong
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
