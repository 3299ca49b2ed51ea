"""Checks of a matmul's operands and options, shared by every matmul of this package and so equal on every device.

The options of every matmul for its output and for promotion:

    out            [M, N] to write into instead of a new tensor, rows contiguous
    accumulate     adds the product to out: the product is rounded to fp32 first, so that the bytes are those of
                   `out.add_(matmul(a, b, out_dtype=torch.float32))`, without another pass over memory
    promote_every  after this many k the accumulator is added to a second fp32 accumulator and starts again from zero.
                   It changes the order of K and so the bits; None is one accumulator for all of K

Why promote: a tensor core truncates its accumulator at every step, so one accumulator over 12288 k has a relative error
of 1.4e-5 in the norm, and sums over shorter parts of K one of 2e-6. Rounding to 16 bits hides the difference (4e-3).
DeepGEMM does the same for fp8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DTYPES

_ALLOWED = ", ".join(map(str, DTYPES))
PROMOTION_MULTIPLE = 128  # the step along K of every kernel divides it


def check_kinds(operation: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Raises unless these are tensors on one device and of compatible dtypes."""
    for name, tensor in (("a", a), ("b", b)) if bias is None else (("a", a), ("b", b), ("bias", bias)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name} is a {type(tensor).__name__}; allowed: a torch.Tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{operation}: {name} has dtype {tensor.dtype}; allowed: {_ALLOWED}")
        if tensor.device != a.device:
            raise ValueError(f"{operation}: {name} is on {tensor.device}; allowed: the device of a, {a.device}")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"{operation}: out_dtype is {out_dtype}; allowed: {_ALLOWED}, or None for a's dtype")
    if b.dtype != a.dtype:
        raise TypeError(f"{operation}: b has dtype {b.dtype}; allowed: the dtype of a, {a.dtype}")


def check_bias(operation: str, bias: Tensor | None, n: int) -> None:
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{operation}: bias has shape {tuple(bias.shape)}; allowed: [N], here ({n},)")


def check_operands(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, *, may_be_empty: bool = False
) -> None:
    """Raises TypeError or ValueError unless a [M, K], b [K, N] and bias, [N] or None, agree and are supported."""
    check_kinds("matmul", a, b, bias, out_dtype)
    if a.dim() != 2 or b.dim() != 2:
        name, tensor, shape = ("a", a, "[M, K]") if a.dim() != 2 else ("b", b, "[K, N]")
        raise ValueError(f"matmul: {name} has shape {tuple(tensor.shape)}; allowed: two dimensions, {shape}")
    (m, k), (b_k, n) = a.shape, b.shape
    if k != b_k:
        raise ValueError(
            f"matmul: b has shape {tuple(b.shape)}; allowed: [K, N] with the K of a, whose shape is {tuple(a.shape)}"
        )
    if not (may_be_empty or (m and n and k)):
        name, tensor = ("a", a) if not (m and k) else ("b", b)
        raise ValueError(f"matmul: {name} has shape {tuple(tensor.shape)}; allowed: every dimension at least 1")
    check_bias("matmul", bias, n)


def check_batches(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> None:
    """Raises TypeError or ValueError unless a [B, M, K] and b [B, K, N] agree, have elements and are supported."""
    check_kinds("batched_matmul", a, b, None, out_dtype)
    for name, tensor, shape in (("a", a, "[B, M, K]"), ("b", b, "[B, K, N]")):
        if tensor.dim() != 3 or not tensor.numel():
            raise ValueError(
                f"batched_matmul: {name} has shape {tuple(tensor.shape)}; allowed: {shape}, every dimension at least 1"
            )
    if (b.shape[0], b.shape[1]) != (a.shape[0], a.shape[2]):
        raise ValueError(
            f"batched_matmul: b has shape {tuple(b.shape)}; allowed: [B, K, N] with the B and K of a, whose shape is "
            f"{tuple(a.shape)}"
        )


def check_promotion(promote_every: int | None) -> int | None:
    """promote_every, or a ValueError or TypeError if it is neither None nor a positive multiple of 128."""
    if promote_every is None:
        return None
    if isinstance(promote_every, bool) or not isinstance(promote_every, int):
        raise TypeError(f"promote_every={promote_every!r} must be an int, a multiple of {PROMOTION_MULTIPLE}, or None")
    if promote_every < 1 or promote_every % PROMOTION_MULTIPLE:
        raise ValueError(
            f"promote_every={promote_every} is not a multiple of {PROMOTION_MULTIPLE}: pass for example 512, or None"
        )
    return promote_every


def check_output(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate: bool,
    bias: Tensor | None = None,
) -> torch.dtype:
    """The dtype of the product, for operands that have been checked.

    Raises:
        TypeError: an out that is not a tensor or not of out_dtype, or, with accumulate, not float32.
        ValueError: accumulate without out; an out of another shape or device, without contiguous rows, that requires
            grad while gradients are recorded, or that shares memory with an operand or the bias, which the kernel would
            overwrite before it has read all of it.
    """
    if out is None:
        if accumulate:
            raise ValueError("matmul: accumulate=True needs out=, the tensor to add to")
        return out_dtype or a.dtype
    if not isinstance(out, Tensor):
        raise TypeError(f"matmul: out is a {type(out).__name__}; allowed: a torch.Tensor")
    if out_dtype not in (None, out.dtype):
        raise TypeError(f"matmul: out has dtype {out.dtype}; allowed: out_dtype, which is {out_dtype}")
    if accumulate and out.dtype != torch.float32:
        raise TypeError(f"matmul: out has dtype {out.dtype}; allowed with accumulate=True: torch.float32")
    shape = (a.shape[0], b.shape[1])
    if out.shape != shape:
        raise ValueError(f"matmul: out has shape {tuple(out.shape)}; allowed: [M, N], here {shape}")
    if out.device != a.device:
        raise ValueError(f"matmul: out is on {out.device}; allowed: the device of a, {a.device}")
    (rows, cols), (outer, inner) = shape, out.stride()
    if (cols > 1 and inner != 1) or (rows > 1 and outer < cols):
        raise ValueError(f"matmul: out has strides {out.stride()}; allowed: contiguous rows that do not overlap")
    check_memory(out, a, b, bias)
    return out.dtype


def check_memory(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """The checks of `check_output` that are not of layouts: whether out requires grad, and shares memory."""
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("matmul: out requires grad, which a product written into it would not have: pass out.detach()")
    for name, read in (("a", a), ("b", b), ("bias", bias)):
        if read is not None and overlap(out, read):
            raise ValueError(f"matmul: out shares memory with {name}; allowed: memory of its own")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the memory ranges of x and y, each from its first to its last element, overlap."""
    (x_first, x_last), (y_first, y_last) = _ends(x), _ends(y)
    return x_first <= y_last and y_first <= x_last


def _ends(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + extent(x) - 1


def extent(x: Tensor) -> int:
    """The bytes from the first element of x, which is not empty, to after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (reach + 1) * x.element_size()


def written(out: Tensor) -> Tensor:
    """out, after telling autograd that a kernel changed it, as torch's own in-place operations do."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
