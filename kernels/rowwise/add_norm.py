"""A residual addition and the norm of the sum in one launch, with the bits of the two after one another.

    s = x + residual                            rounded to the tensors' dtype, as torch's addition
    y, mean, rstd = norm_forward(s, ..)         norm.py has the formulas, and says what gives sums their order

Rows are spread over threads as norm.py spreads them, by the same functions, so that sums add in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import TRITON_DTYPES, interpreting, launch_on
from ..plans import Kernel
from .norm import _keep, _load, _load_factor, _mean, _row, _rows, row_chunk
from .norm_checks import as_rows, check, check_forward


@triton.jit
def _load_sum(x_row, r_row, cols, H: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    return (_load(x_row, cols, H, CHUNK) + _load(r_row, cols, H, CHUNK)).to(DTYPE).to(tl.float32)


@triton.jit
def _add_norm_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, s_ptr, y_ptr, mean_ptr, rstd_ptr, stride_x, stride_r, eps,
    H: tl.constexpr, CHUNK: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    # What is stored comes last, so that the compiler keeps a row in registers between its loads.
    row = tl.program_id(0).to(tl.int64)
    x_row, r_row = _row(x_ptr, row, stride_x, H), _row(r_ptr, row, stride_r, H)
    mean = tl.full((), 0.0, tl.float32)
    if not RMS:
        total = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, H, CHUNK):
            total += _load_sum(x_row, r_row, start + tl.arange(0, CHUNK), H, CHUNK, DTYPE)
        mean = _mean(total, H)
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        s = _load_sum(x_row, r_row, cols, H, CHUNK, DTYPE)
        centered = _keep(s if RMS else s - mean, cols, H, CHUNK)
        squares += centered * centered
    rstd = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(_mean(squares, H) + eps))
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        s = _load_sum(x_row, r_row, cols, H, CHUNK, DTYPE)
        y = (s if RMS else s - mean) * rstd
        y = y * _load_factor(w_ptr, cols, H, CHUNK, ZERO_CENTERED)
        if HAS_BIAS:
            y = y + _load(b_ptr, cols, H, CHUNK)
        tl.store(y_ptr + row * H + cols, y.to(y_ptr.dtype.element_ty), mask=cols < H)
        tl.store(s_ptr + row * H + cols, s.to(s_ptr.dtype.element_ty), mask=cols < H)
    tl.store(rstd_ptr + row, rstd)
    if not RMS:
        tl.store(mean_ptr + row, mean)


_add_norm = Kernel(_add_norm_kernel, enable_fp_fusion=False)


def add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(s, y, mean, rstd): s = x + residual, contiguous, of their dtype, and what `norm_forward` makes of s.

    x, residual: [.., H] of one shape and dtype, bfloat16, float16 or float32, any strides. The rest as for
    `norm_forward`, which raises the same errors.
    """
    check_forward("add_norm_forward", x, weight, bias, eps, None)
    check("add_norm_forward", "residual", residual, tuple(x.shape), x, (x.dtype,))
    shape, x, residual = x.shape, as_rows(x), as_rows(residual)
    t, h = x.shape
    stored = torch.float32 if interpreting() else x.dtype
    s, y = (torch.empty(shape, device=x.device, dtype=stored) for _ in range(2))
    mean, rstd = (torch.empty(t, device=x.device, dtype=torch.float32) for _ in range(2))
    if t > 0:
        (x_rows, stride_x), (r_rows, stride_r) = _rows(x), _rows(residual)
        w, b = (_rows(weight if vector is None else vector)[0] for vector in (weight, bias))
        chunk, warps = row_chunk(h)
        constants = h, chunk, rms, zero_centered, bias is not None, TRITON_DTYPES[x.dtype]
        numbers = stride_x, stride_r, float(eps)
        with launch_on(x, "add_norm_forward"):
            _add_norm(
                x.device.index, (t,), (x_rows, r_rows, w, b, s, y, mean, rstd, *numbers), constants, num_warps=warps
            )
    return s.to(x.dtype), y.to(x.dtype), None if rms else mean, rstd
