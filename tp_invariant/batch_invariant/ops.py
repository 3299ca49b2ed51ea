"""The aten operations that context.py routes: each as a function of plain tensors, below autograd.

ROUTES maps an overload to the function that computes its result; REFUSED names operations that sum in an order of
torch's choosing, with what to do about each. The memory-efficient attention is in neither: its forward kept every bit
under slicing on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.torch_private import OpOverload, schema_of
from ..gemm.gemm_fn import BUNDLED_DTYPES, gemm, uses_bundled
from ..kernels.select import select

# --- what is taken --------------------------------------------------------------------------------------------------


def check_operands(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation rounds, so that it must be routed; integers do not, nor do tensors without data.

    Raises:
        TypeError: an operand's dtype or layout, or an output dtype, that the kernels do not take.
        NotImplementedError: a device that they do not run on.
    """
    named = [*zip((argument.name for argument in schema_of(func).arguments), args, strict=False), *kwargs.items()]
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    dtypes = [(name, value) for name, value in named if isinstance(value, torch.dtype)]
    kinds = [t.dtype for _, t in tensors] + [dtype for _, dtype in dtypes]
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in kinds):
        return False
    if any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for _, t in tensors):
        return False  # a FakeTensor, which dispatched to itself and now asks for a shape
    for name, tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(
                f"{func}: {name} has layout {tensor.layout}: inside batch_invariant() only dense tensors are taken"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"{func}: {name} is on {tensor.device}: kernels for batch_invariant() are bundled for cuda and cpu only"
            )
    floating = [(name, t.dtype) for name, t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]
    for name, dtype in floating + dtypes:
        if dtype not in BUNDLED_DTYPES:
            raise TypeError(
                f"{func}: {name} is {dtype}: inside batch_invariant() {', '.join(map(str, BUNDLED_DTYPES))} are taken; "
                "convert it, or compute this outside"
            )
    return True


def store(func: OpOverload, result: Tensor, out: Tensor) -> Tensor:
    """`result` written to out=, or in place.

    Raises:
        TypeError: out has another dtype.
        ValueError: out has another shape, and elements.
    """
    if out.dtype != result.dtype:
        raise TypeError(f"{func}: out is {out.dtype}: it must be {result.dtype}")
    if out.shape != result.shape:
        if out.numel():
            raise ValueError(f"{func}: out has shape {tuple(out.shape)}: it must be {tuple(result.shape)}, or empty")
        out.resize_(result.shape)
    return out.copy_(result)


# --- products -------------------------------------------------------------------------------------------------------


def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied: give [M, K] and [K, N]")
    return gemm(None, a, b, out_dtype=out_dtype)


def _bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(
            f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied: give [B, M, K] and [B, K, N]"
        )
    batch, m, k = a.shape
    if batch and b.stride(0) == 0:  # one matrix for all, as matmul expands it
        return gemm(None, a.reshape(batch * m, k), b[0], out_dtype=out_dtype).view(batch, m, -1)
    if a.numel() and b.numel() and a.dtype == b.dtype and uses_bundled(None):
        return select("batched GEMM", a.device.type).batched_matmul(a, b, out_dtype=out_dtype)
    c = a.new_empty((batch, m, b.shape[2]), dtype=out_dtype or a.dtype)
    for one_a, one_b, one_c in zip(a, b, c, strict=True):  # a gemm_fn takes matrices
        one_c.copy_(gemm(None, one_a, one_b, out_dtype=out_dtype))
    return c


def _plus(c: Tensor, product: Tensor, out_dtype: torch.dtype, beta: float, alpha: float) -> Tensor:
    """beta c + alpha product, the product in fp32: each step rounds on its own, to out_dtype once at the end."""
    total = product if alpha == 1 else product * alpha
    if beta != 0:  # else c is not read: it may be NaN
        total = total + (c.float() if beta == 1 else c.float() * beta)
    return total.to(out_dtype)


def addmm(
    c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    out_dtype = out_dtype or a.dtype
    if alpha == beta == 1 and c.dim() in (1, 2) and c.shape[-1] == c.numel() == b.shape[-1] and a.dim() == b.dim() == 2:
        if a.shape[1] != b.shape[0]:
            mm(a, b)  # says what is wrong
        return gemm(None, a, b, bias=c.reshape(-1), out_dtype=out_dtype)
    return _plus(c, mm(a, b, torch.float32), out_dtype, beta, alpha)


def _baddbmm(
    c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _plus(c, _bmm(a, b, torch.float32), out_dtype or a.dtype, beta, alpha)


def _mv(a: Tensor, x: Tensor) -> Tensor:
    return mm(a, x.unsqueeze(-1)).squeeze(-1)


def _addmv(c: Tensor, a: Tensor, x: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _plus(c, mm(a, x.unsqueeze(-1), torch.float32).squeeze(-1), a.dtype, beta, alpha)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return mm(x.unsqueeze(0), y.unsqueeze(-1)).view(())


# --- along rows -----------------------------------------------------------------------------------------------------


def _as_rows(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, list[int]]:
    """x with `dims` last and flattened, [rows, n], and the order that its dims have there."""
    if list(dims) == [x.dim() - 1]:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), list(range(x.dim()))
    order = [d for d in range(x.dim()) if d not in dims] + list(dims)
    n = math.prod(x.shape[d] for d in dims)
    rows = math.prod(x.shape[d] for d in range(x.dim()) if d not in dims)
    return x.permute(order).reshape(rows, n), order


def _dims(dim: int | Sequence[int] | None, ndim: int) -> list[int]:
    listed = [dim] if isinstance(dim, int) else list(dim or range(ndim))
    for d in listed:
        if not -ndim <= d < ndim:
            raise IndexError(f"dim {d} is out of range: it must be from {-ndim} to {ndim - 1}")
    dims = sorted({d % ndim for d in listed})
    if len(dims) < len(listed):
        raise ValueError(f"dim {listed} names a dim twice")
    return dims


def _softmax_of(x: Tensor, dim: int, out_dtype: torch.dtype, log: bool) -> Tensor:
    if x.dim() == 0:
        return _softmax_of(x.view(1), dim, out_dtype, log).view(())
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=out_dtype)
    rows, order = _as_rows(x, _dims(dim, x.dim()))
    y = select("softmax", x.device.type).softmax(rows, log=log, out_dtype=out_dtype)
    inverse = [order.index(d) for d in range(x.dim())]
    return y.view([x.shape[d] for d in order]).permute(inverse).contiguous()


def _softmax(x: Tensor, dim: int, half_to_float: bool, *, log: bool = False) -> Tensor:
    return _softmax_of(x, dim, torch.float32 if half_to_float else x.dtype, log)


def _softmax_int(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, log: bool = False) -> Tensor:
    return _softmax_of(x if dtype is None else x.to(dtype), dim, dtype or x.dtype, log)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros where every x is -inf."""
    nothing = (x == -math.inf).all(dim, keepdim=True)
    return _softmax_int(x, dim, dtype).masked_fill(nothing, 0.0)


def _reduce(
    x: Tensor,
    dim: int | Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    mean: bool = False,
) -> Tensor:
    if x.dim() == 0:
        return _reduce(x.view(1), dim, dtype=dtype, mean=mean)
    out_dtype = dtype or x.dtype
    if not x.dtype.is_floating_point:
        x = x.to(out_dtype)
    dims = _dims(dim, x.dim())
    rows, _ = _as_rows(x, dims)
    count = rows.shape[1]
    if count == 0:
        y = rows.new_full((rows.shape[0],), math.nan if mean else 0.0, dtype=out_dtype)
    else:
        y = select("softmax", x.device.type).row_sums(rows, divisor=count if mean else 1, out_dtype=out_dtype)
    kept = [(1 if d in dims else size) for d, size in enumerate(x.shape) if keepdim or d not in dims]
    return y.view(kept)


def _softmax_backward(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    weighted = grad.float() * y.float()
    return (weighted - y.float() * _reduce(weighted, dim, True)).to(input_dtype)


def _log_softmax_backward(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad = grad.float()
    # the softmax of log-probabilities is their exp, which torch's CPU kernel would take by position
    return (grad - _softmax_of(y, dim, torch.float32, log=False) * _reduce(grad, dim, True)).to(input_dtype)


# --- the tables -----------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mm": mm,
    "bmm": _bmm,
    "addmm": addmm,
    "addmm_": addmm,
    "baddbmm": _baddbmm,
    "baddbmm_": _baddbmm,
    "mv": _mv,
    "addmv": _addmv,
    "addmv_": _addmv,
    "dot": _dot,
    "vdot": _dot,
    "_softmax": _softmax,
    "_log_softmax": partial(_softmax, log=True),
    "_safe_softmax": _safe_softmax,
    "softmax": _softmax_int,
    "log_softmax": partial(_softmax_int, log=True),
    "mean": partial(_reduce, mean=True),
    "sum": _reduce,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
}


def overloads(name: str) -> list[OpOverload]:
    """Of an aten function, with or without "aten::"; none if this torch does not have it."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _routed(name: str) -> list[OpOverload]:
    if name.startswith("add") or name in ("mm", "bmm", "baddbmm", "baddbmm_", "mv", "dot", "vdot"):
        return overloads(name)
    schemas = ((op, schema_of(op).arguments) for op in overloads(name))
    return [op for op, arguments in schemas if any(a.name == "dim" and "int" in str(a.type) for a in arguments)]


ROUTES = {op: function for name, function in _FUNCTIONS.items() for op in _routed(name)}

_PRODUCT = "write it as matmul and elementwise operations"
_ATTENTION = "call F.scaled_dot_product_attention, which is routed"
_VARIANCE = "write it as (x - x.mean(dim, keepdim=True)).square().mean(dim)"
_MODULE = "write it with nn.Linear, or in eval mode call torch.backends.mha.set_fastpath_enabled(False)"

REFUSED = {
    f"aten::{name}": advice
    for advice, names in {
        _PRODUCT: (
            "addbmm addbmm_ _addmm_activation _trilinear _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm "
            "_scaled_grouped_mm_v2 mkldnn_linear _mixed_dtypes_linear _weight_int8pack_mm _weight_int4pack_mm "
            "convolution _convolution"
        ),
        _ATTENTION: (
            "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
            "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable "
            "_flash_attention_forward"
        ),
        _MODULE: "_cudnn_rnn mkldnn_rnn_layer _native_multi_head_attention _transformer_encoder_layer_fwd",
    }.items()
    for name in names.split()
}

# Refused where they run over some dims; of a whole tensor they stay torch's, as x.sum() does.
REFUSED_OVER_DIMS = {
    f"aten::{name}": advice
    for name, advice in {
        "prod": "write it as a product of slices",
        "nansum": "write it as torch.where(x.isnan(), 0.0, x).sum(dim)",
        "linalg_vector_norm": "write it with abs, pow and sum(dim)",
        "norm": "write it with abs, pow and sum(dim)",
        "var": _VARIANCE,
        "std": _VARIANCE,
        "var_mean": _VARIANCE,
        "std_mean": _VARIANCE,
    }.items()
}


def over_dims(func: OpOverload) -> int | None:
    """Which argument of func, by place, says over which dims it runs."""
    places = [place for place, argument in enumerate(schema_of(func).arguments) if argument.name == "dim"]
    return places[0] if places else None
