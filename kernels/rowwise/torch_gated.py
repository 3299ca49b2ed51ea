"""act(gate) * up with torch's formulas and roundings, forward and backward, in one launch each.

    y     = act(gate) * up          each of the two rounded to the tensors' dtype, as torch's two operators round
    dup   = dy * act(gate)          act(gate) is computed again, so that gate and up are all that is saved
    dact  = dy * up                 rounded
    dgate = what torch's backward of act makes of dact and gate

    silu      g / (1 + exp(-g))
    gelu      0.5 * g * (1 + erf(g / sqrt(2)))
    gelu_tanh 0.5 * g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3)))
    relu      max(g, 0)

Every element depends on its own alone. So that bits do not change where this takes the place of torch's operators, each
operation in fp32 stands where torch's CUDA kernels have it: exp, erf and tanh are CUDA's, divisions are rounded
correctly, and a product and a sum are one operation (tl.fma) exactly where CUDA's compiler makes them one of torch's
formulas. Launched with enable_fp_fusion=False, so that Triton's compiler adds no others. CUDA's erf is another one in
the CUDA that Triton brings than in torch's: gelu has other last bits than torch's in one of 80 elements in fp32, and
the others have torch's in all. rowwise/gated.py, for experts, has formulas of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from ..known_calls import find_call, remember
from ..launch import Launches, cdiv, interpreting, launch_on, next_power_of_2
from .torch_gated_checks import check_torch_gated

COLUMNS = 1024  # of a program, at most
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


_torch_gated = Launches(_torch_gated_kernel, enable_fp_fusion=False)
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def torch_gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous [.., H], for gate and up [.., H] of any strides and one of three dtypes.

    activation: "silu", "gelu", "gelu_tanh" or "relu". Raises TypeError for a dtype and ValueError for what else does
    not fit.
    """
    key, known = find_call(("torch_gated_forward", activation), gate, up)
    if known is not None:
        (y,) = known.results()
        known.run(gate, up, gate, y, y)
        return y
    check_torch_gated("torch_gated_forward", activation, gate=gate, up=up)
    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    _launch("torch_gated_forward", activation, gate, up, None, (y,), key)
    return y


def torch_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(dgate, dup), each contiguous [.., H]; arguments and errors as for `torch_gated_forward`.

    out: tensors to write into, of gate's shape and dtype, such as the halves of one.
    """
    key, known = find_call(("torch_gated_backward", activation, out is None), dy, gate, up, *(out or ()))
    if known is not None:
        dgate, dup = known.results() if out is None else out
        known.run(gate, up, dy, dgate, dup)
        return dgate, dup
    outs = {} if out is None else {"dgate": out[0], "dup": out[1]}
    check_torch_gated("torch_gated_backward", activation, gate=gate, up=up, dy=dy, **outs)
    made = out or tuple(torch.empty(gate.shape, device=gate.device, dtype=gate.dtype) for _ in range(2))
    _launch("torch_gated_backward", activation, gate, up, dy, made, key)
    return made[0], made[1]


def _launch(
    operation: str, activation: str, gate: Tensor, up: Tensor, dy: Tensor | None, outs: tuple[Tensor, ...],
    key: tuple | None,
) -> None:  # fmt: skip
    if gate.numel() == 0:
        return
    given = *(gate, up, gate if dy is None else dy), outs[0], outs[-1]
    read = [_readable(x) for x in given[:3]]
    stored = [_writable(x) for x in outs]
    pointers = *read, stored[0], stored[-1]
    rows, h = read[0].shape
    if all(x.is_contiguous() for x in pointers):  # one row
        rows, h = 1, rows * h
    columns = min(COLUMNS, max(32, next_power_of_2(h)))
    blocks = cdiv(h, columns)
    numbers = *((x.stride(0) if rows > 1 else 0) for x in pointers), blocks, h
    constants = columns, activation, _DTYPES[outs[0].dtype], dy is not None, not interpreting()
    with launch_on(gate, operation):
        launch = _torch_gated(
            gate.device.index, (rows * blocks,), (*pointers, *numbers), constants, num_warps=max(1, columns // 256)
        )
    for x, y in zip(outs, stored, strict=True):
        if x.data_ptr() != y.data_ptr():
            x.copy_(y.view(x.shape))
    copied_nothing = all(x.data_ptr() == y.data_ptr() for x, y in zip(given, pointers, strict=True))
    if copied_nothing:
        remember(key, launch, outs, (*numbers, *constants), (rows * blocks,))


def _readable(x: Tensor) -> Tensor:
    """[rows, H], with columns of stride 1: a view where there is one."""
    x = x.resolve_neg()
    if interpreting():
        x = x.float()  # the interpreter gets bfloat16 subnormals wrong
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


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
