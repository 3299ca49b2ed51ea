"""Gated activations in Triton, act(gate) * up, forward and backward, in one launch each, by two sets of formulas.

gated_forward, gated_backward: for experts.

    y     = act(gate) * up                  act: silu(g) = g * sigmoid(g)
    dup   = dy * act(gate)                       gelu_tanh(g) = g * sigmoid(z(g)), z(g) = 2c * (g + 0.044715 * g**3)
    dgate = (dy * up) * act'(gate)          with c = sqrt(2 / pi); it equals 0.5 * g * (1 + tanh(z / 2))

    clamped_silu (gpt-oss): y = g * sigmoid(1.702 * g) * (u + 1) for g = min(gate, 7) and u = up within -7 and 7;
    beyond these limits gradients are zero

torch_gated_forward, torch_gated_backward: with the formulas, and so the bits, of torch's operators.

    dact  = dy * up                 rounded
    dgate = what torch's backward of act makes of dact and gate

    silu      g / (1 + exp(-g))
    gelu      0.5 * g * (1 + erf(g / sqrt(2)))
    gelu_tanh 0.5 * g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3)))
    relu      max(g, 0)

Every element depends on its own alone. act(gate), dy * up and the results are rounded to the tensors' dtype, as they
are where torch computes act and the products one by one; all between is fp32. Backward computes act(gate) again, so
that gate and up are all that is saved. Launched with enable_fp_fusion=False: each operation rounds by itself.

So that bits do not change where torch_gated takes the place of torch's operators, each operation in fp32 stands where
torch's CUDA kernels have it: exp, erf and tanh are CUDA's, divisions are rounded correctly, and a product and a sum are
one operation (tl.fma) exactly where CUDA's compiler makes them one of torch's formulas. CUDA's erf is another one in
the CUDA that Triton brings than in torch's: gelu has other last bits than torch's in one of 80 elements in fp32, and
the others have torch's in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from ..gemm.operands import written
from ..launch import TRITON_DTYPES, cdiv, interpreting, launch_on, next_power_of_2, readable_rows
from ..plans import Kernel
from .reference_gated import ACTIVATIONS

COLUMNS = 1024  # of a program, at most


# --- for experts ----------------------------------------------------------------------------------------------------


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


_gated = Kernel(_gated_kernel, enable_fp_fusion=False)


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous [T, H], for gate and up [T, H] of any strides and one of three dtypes.

    activation: "silu", "gelu_tanh" or "clamped_silu".
    """
    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    _launch("gated_forward", activation, gate, up, None, (y, y))
    return y


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(dgate, dup), each contiguous [T, H]; arguments as for `gated_forward`.

    out: tensors to write into, of gate's shape and dtype and any strides, such as the halves of one.
    """
    if out is None:
        out = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype), gate.new_empty(gate.shape)
    _launch("gated_backward", activation, gate, up, dy, out)
    return written(out[0]), written(out[1])


def _launch(
    operation: str, activation: str, gate: Tensor, up: Tensor, dy: Tensor | None, outs: tuple[Tensor, Tensor]
) -> None:
    t, h = gate.shape
    if t == 0:
        return
    gate, up, dy_rows = (x.resolve_neg() for x in (gate, up, gate if dy is None else dy))
    if interpreting():  # which gets bfloat16 subnormals wrong
        gate, up, dy_rows = gate.float(), up.float(), dy_rows.float()
    step = 2 if gate.stride(1) == up.stride(1) == 2 else 1  # interleaved, or not
    gate, up = (x if x.stride(1) == step else x.contiguous() for x in (gate, up))
    dy_rows = dy_rows if dy_rows.stride(1) == 1 else dy_rows.contiguous()
    stored = outs
    if interpreting() or outs[0].stride() != outs[1].stride():
        y = torch.empty((t, h), device=gate.device, dtype=torch.float32 if interpreting() else outs[0].dtype)
        stored = y, y if dy is None else torch.empty_like(y)
    columns = min(COLUMNS, max(32, next_power_of_2(h)))
    strides = [x.stride(0) for x in (gate, up, dy_rows, stored[0])]
    with launch_on(gate, operation):
        _gated(
            gate.device.index, (t, cdiv(h, columns)),
            (gate, up, dy_rows, *stored, *strides, gate.stride(1), stored[0].stride(1), h),
            (columns, *ACTIVATIONS[activation], TRITON_DTYPES[outs[0].dtype], dy is not None),
            num_warps=max(1, columns // 256),
        )  # fmt: skip
    if stored is not outs:
        for x, y in zip(outs, stored, strict=True):
            x.copy_(y)


# --- with torch's bits ----------------------------------------------------------------------------------------------

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_GELU_PDF = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_TANH_BETA = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_KAPPA = tl.constexpr(0.044715)
_TANH_KAPPA_3 = tl.constexpr(3 * 0.044714998453855515)  # of kappa rounded to fp32


@triton.jit
def _exp(x, LIBDEVICE: tl.constexpr):
    return libdevice.exp(x) if LIBDEVICE else tl.exp(x)


@triton.jit
def _erf(x, LIBDEVICE: tl.constexpr):
    return libdevice.erf(x) if LIBDEVICE else tl.erf(x)


@triton.jit
def _tanh(x, LIBDEVICE: tl.constexpr):
    return libdevice.tanh(x) if LIBDEVICE else 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _one_over_one_plus_exp(g, LIBDEVICE: tl.constexpr):
    return tl.div_rn(tl.full(g.shape, 1.0, tl.float32), 1.0 + _exp(-g, LIBDEVICE))


@triton.jit
def _tanh_of_gelu(g, LIBDEVICE: tl.constexpr):
    cube = (g * g) * g
    return _tanh(tl.fma(tl.full(g.shape, _TANH_KAPPA, tl.float32), cube, g) * _TANH_BETA, LIBDEVICE)


@triton.jit
def _act(g, KIND: tl.constexpr, LIBDEVICE: tl.constexpr):
    if KIND == "silu":
        return tl.div_rn(g, 1.0 + _exp(-g, LIBDEVICE))
    elif KIND == "gelu":
        return (g * 0.5) * (1.0 + _erf(g * _SQRT_HALF, LIBDEVICE))
    elif KIND == "gelu_tanh":
        return (0.5 * g) * (1.0 + _tanh_of_gelu(g, LIBDEVICE))
    else:
        return tl.where(g <= 0.0, 0.0, g)  # NaN stays


@triton.jit
def _dgate(dact, g, KIND: tl.constexpr, LIBDEVICE: tl.constexpr):
    one = tl.full(g.shape, 1.0, tl.float32)
    if KIND == "silu":
        sigmoid = _one_over_one_plus_exp(g, LIBDEVICE)
        return (dact * sigmoid) * tl.fma(g, 1.0 - sigmoid, one)
    elif KIND == "gelu":
        cdf = 0.5 * (1.0 + _erf(g * _SQRT_HALF, LIBDEVICE))
        pdf = _exp((-0.5 * g) * g, LIBDEVICE) * _GELU_PDF
        return dact * (cdf + g * pdf)
    elif KIND == "gelu_tanh":
        tanh = _tanh_of_gelu(g, LIBDEVICE)
        left, right = 0.5 * g, 1.0 + tanh
        of_inner = tl.fma(tl.full(g.shape, _TANH_KAPPA_3, tl.float32), g * g, one) * _TANH_BETA
        of_left, factor = 0.5 * right, left * tl.fma(-tanh, tanh, one)
        return dact * (of_left + factor * of_inner)
    else:
        return tl.where(g <= 0.0, 0.0, dact)


@triton.jit(do_not_specialize=["blocks"])
def _torch_gated_kernel(
    gate_ptr, up_ptr, dy_ptr, first_ptr, second_ptr, stride_gate, stride_up, stride_dy, stride_first, stride_second,
    blocks, H,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, BACKWARD: tl.constexpr, LIBDEVICE: tl.constexpr,
):  # fmt: skip
    # Stores y, or dgate and dup. A row has this number of blocks.
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    gate = tl.load(gate_ptr + row * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + cols, mask=inside, other=0.0).to(tl.float32)
    act = _act(gate, KIND, LIBDEVICE).to(DTYPE).to(tl.float32)
    first = first_ptr + row * stride_first + cols
    if BACKWARD:
        dy = tl.load(dy_ptr + row * stride_dy + cols, mask=inside, other=0.0).to(tl.float32)
        dact = (dy * up).to(DTYPE).to(tl.float32)
        tl.store(first, _dgate(dact, gate, KIND, LIBDEVICE).to(first_ptr.dtype.element_ty), mask=inside)
        second = second_ptr + row * stride_second + cols
        tl.store(second, (dy * act).to(second_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(first, (act * up).to(first_ptr.dtype.element_ty), mask=inside)


_torch_gated = Kernel(_torch_gated_kernel, enable_fp_fusion=False)


def torch_gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous [.., H], for gate and up [.., H] of any strides and one of three dtypes.

    activation: "silu", "gelu", "gelu_tanh" or "relu".
    """
    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    _launch_torch("torch_gated_forward", activation, gate, up, None, (y,))
    return y


def torch_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(dgate, dup), each contiguous [.., H]; arguments as for `torch_gated_forward`.

    out: tensors to write into, of gate's shape and dtype, such as the halves of one.
    """
    made = out or tuple(torch.empty(gate.shape, device=gate.device, dtype=gate.dtype) for _ in range(2))
    _launch_torch("torch_gated_backward", activation, gate, up, dy, made)
    return made[0], made[1]


def _launch_torch(
    operation: str, activation: str, gate: Tensor, up: Tensor, dy: Tensor | None, outs: tuple[Tensor, ...]
) -> None:
    if gate.numel() == 0:
        return
    read = [readable_rows(x.reshape(-1, x.shape[-1])) for x in (gate, up, gate if dy is None else dy)]
    stored = [_writable(x) for x in outs]
    pointers = *read, stored[0], stored[-1]
    rows, h = read[0].shape
    if all(x.is_contiguous() for x in pointers):  # one row
        rows, h = 1, rows * h
    columns = min(COLUMNS, max(32, next_power_of_2(h)))
    blocks = cdiv(h, columns)
    strides = [x.stride(0) if rows > 1 else 0 for x in pointers]
    with launch_on(gate, operation):
        _torch_gated(
            gate.device.index, (rows * blocks,), (*pointers, *strides, blocks, h),
            (columns, activation, TRITON_DTYPES[outs[0].dtype], dy is not None, not interpreting()),
            num_warps=max(1, columns // 256),
        )  # fmt: skip
    for x, y in zip(outs, stored, strict=True):
        if x.data_ptr() != y.data_ptr():
            x.copy_(y.view(x.shape))


def _writable(x: Tensor) -> Tensor:
    """[rows, H] of the same memory, or else new memory."""
    h = x.shape[-1]
    if not interpreting():
        try:
            rows = x.view(-1, h)
        except RuntimeError:  # its strides allow none
            rows = None
        if rows is not None and (rows.stride(1) == 1 or h == 1):
            return rows
    return torch.empty((x.numel() // h, h), device=x.device, dtype=torch.float32 if interpreting() else x.dtype)
