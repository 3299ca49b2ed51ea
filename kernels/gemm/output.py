"""The options of every matmul of this package for its output and for promotion.

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

PROMOTION_MULTIPLE = 128  # the step along K of every kernel divides it


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
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("matmul: out requires grad, which a product written into it would not have: pass out.detach()")
    for name, read in (("a", a), ("b", b), ("bias", bias)):
        if read is not None and _overlap(out, read):
            raise ValueError(f"matmul: out shares memory with {name}; allowed: memory of its own")
    return out.dtype


def _overlap(x: Tensor, y: Tensor) -> bool:
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
