"""The gemm_fn protocol: the one function that computes every GEMM of every layer.

    gemm_fn(a, b, *, bias=None, out_dtype=None) -> c
        a     [M, K], any strides (a transposed view is normal)
        b     [K, N], any strides
        bias  [N] or None, added in fp32 before the one final rounding
        c     [M, N], dtype out_dtype or a.dtype

It must be slice-invariant: c[i, j] depends on a[i, :] and b[:, j] alone, in an order along K that depends on K alone.
`tp_invariant.testing.assert_slice_invariant` checks that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor

from ..core.compiled import constant, define
from ..core.identity import identify
from ..core.layout import Stride, deinterleave
from ..kernels.dtypes import DTYPES
from ..kernels.select import select


class GemmFn(Protocol):
    """The signature in this module's docstring."""

    def __call__(
        self, a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor: ...


_default: GemmFn | None = None


def set_default_gemm_fn(gemm_fn: GemmFn | None) -> None:
    """Sets the process-wide gemm_fn for modules without their own; None restores the bundled one for each device.

    Raises:
        TypeError: gemm_fn is neither None nor a callable that takes (a, b, *, bias=None, out_dtype=None).
    """
    global _default
    _default = check_signature(gemm_fn)


_WRAPPER = """it must take (a, b, *, bias=None, out_dtype=None). Wrap a product of yours \
in a Python function (not torch.matmul, whose bits depend on the number of rows and columns):
    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        return my_product(a, b, bias, out_dtype or a.dtype)"""


def check_signature(gemm_fn: GemmFn | None) -> GemmFn | None:
    """Returns gemm_fn, or raises a TypeError if it cannot be called as one.

    A builtin whose signature Python cannot read, such as torch.matmul, is refused. It is not tried by a call, because a
    kernel for one kind of device may end the process if it gets operands on another.
    """
    if gemm_fn is None:
        return None
    if not callable(gemm_fn):
        raise TypeError(
            f"gemm_fn={gemm_fn!r} is not callable: pass gemm_fn(a, b, *, bias=None, out_dtype=None) or None"
        )
    try:
        signature = inspect.signature(gemm_fn)
    except ValueError:
        raise TypeError(f"gemm_fn={gemm_fn!r} has no signature that Python can read: {_WRAPPER}") from None
    try:
        signature.bind(None, None, bias=None, out_dtype=None)
    except TypeError as error:
        raise TypeError(f"gemm_fn={gemm_fn!r} takes {signature} ({error}): {_WRAPPER}") from None
    return gemm_fn


def bundled_gemm_fn(device: torch.device) -> Callable[..., Tensor]:
    """The bundled gemm_fn: Triton on CUDA, torch on a CPU.

    Raises:
        NotImplementedError: another kind of device.
    """
    if device.type not in ("cuda", "cpu"):
        raise NotImplementedError(
            f"no gemm_fn is bundled for device {str(device)!r}, only for cuda and cpu: pass gemm_fn= or "
            "set_default_gemm_fn"
        )
    return select("GEMM", device.type).matmul


def _bundled(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    promote_every: int | None = None,
) -> Tensor:
    if (out_dtype or (a if out is None else out).dtype) != torch.float32:
        promote_every = None
    matmul = bundled_gemm_fn(a.device)
    return matmul(a, b, bias=bias, out_dtype=out_dtype, out=out, accumulate=accumulate, promote_every=promote_every)


def bundled(*, promote_every: int | None = None) -> GemmFn:
    """The bundled gemm_fn of each device, with options. The layers treat it as the bundled one.

    Args:
        promote_every: for float32 output, such as weight gradients in `main_grad`: after this many k, a multiple of
            128 (512, say), add the accumulator to a second one and set it to zero. More accurate for a long K, and
            slower; the bits differ from those without it, and are again the same at every degree. For 16-bit output the
            option has no effect.

    Raises:
        ValueError, TypeError: a promote_every that is neither None nor a positive multiple of 128.
    """
    from ..kernels.gemm.operands import check_promotion

    return functools.partial(_bundled, promote_every=check_promotion(promote_every))


def _as_bundled(gemm_fn: GemmFn | None, device: torch.device) -> Callable[..., Tensor] | None:
    """The bundled gemm_fn if it applies, which also takes out=; None if a user's gemm_fn applies."""
    fn = _default if gemm_fn is None else gemm_fn
    if fn is None or (isinstance(fn, functools.partial) and fn.func is _bundled):
        return fn or bundled_gemm_fn(device)
    return fn if device.type in ("cuda", "cpu") and fn is bundled_gemm_fn(device) else None


BUNDLED_DTYPES = DTYPES


def check_dtype(gemm_fn: GemmFn | None, x: Tensor, name: str) -> None:
    """Raises a TypeError that names x if the bundled gemm_fn applies and does not take x's dtype."""
    if x.dtype not in BUNDLED_DTYPES and _as_bundled(gemm_fn, x.device) is not None:
        raise TypeError(f"{_unsupported_dtype(x, name)}, or pass a gemm_fn of your own")


def check_norm_dtype(x: Tensor, name: str) -> None:
    """Raises a TypeError that names x if the norms do not take its dtype; their kernels are always bundled."""
    if x.dtype not in BUNDLED_DTYPES:
        raise TypeError(_unsupported_dtype(x, name))


def _unsupported_dtype(x: Tensor, name: str) -> str:
    taken = ", ".join(map(str, BUNDLED_DTYPES))
    return f"{name} is {x.dtype}: the bundled kernels take {taken}; convert the layer and its input"


def resolve_gemm_fn(gemm_fn: GemmFn | None, device: torch.device) -> GemmFn:
    """Precedence: the module's own, then the process-wide default, then the bundled one for the device."""
    for fn in (gemm_fn, _default):
        if fn is not None:
            return fn
    return bundled_gemm_fn(device)


@constant
def gemm_fn_name(gemm_fn: GemmFn | None, device: torch.device) -> str:
    """An identity of `resolve_gemm_fn`'s result that ranks can compare; "none" if none is bundled for the device."""
    try:
        if gemm_fn is None and _default is None:
            return _bundled_name(device.type)
        return identify(resolve_gemm_fn(gemm_fn, device))
    except NotImplementedError:
        return "none"


@functools.cache
def _bundled_name(device_type: str) -> str:
    """Cached, because every call of a layer needs it."""
    return identify(bundled_gemm_fn(torch.device(device_type)))


def gemm(
    gemm_fn: GemmFn | None, a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """c = a @ b (+ bias) by the gemm_fn that applies; for empty operands no gemm_fn is called.

    Raises:
        RuntimeError: the gemm_fn returned another shape, dtype or device than its contract requires.
        ValueError, TypeError: a or b is not a matrix; or the bundled kernels refuse the operands, empty ones too.
    """
    out_dtype = out_dtype or a.dtype
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"a and b must be matrices; a has shape {tuple(a.shape)} and b {tuple(b.shape)}")
    rows, k = a.shape
    cols = b.shape[1]
    if not (rows and k and cols):
        return _empty_product(gemm_fn, a, b, bias, out_dtype)
    fn, kind = _default if gemm_fn is None else gemm_fn, a.device.type
    is_bundled = fn is None
    if fn is None:
        fn = bundled_gemm_fn(a.device)
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return gemm(gemm_fn, a, b, bias=bias, out_dtype=out_dtype)
    c = fn(a, b, bias=bias, out_dtype=out_dtype)
    if is_bundled:
        return c  # it needs no check
    if fault := fault_of(c, a, b, out_dtype):
        raise RuntimeError(f"gemm_fn {getattr(fn, '__qualname__', fn)!r} {fault}")
    return c


def fault_of(c: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> str:
    """What is wrong with the kind, shape, dtype or device of a gemm_fn's result, as text; "" if nothing is."""
    shape, returned = (a.shape[0], b.shape[1]), "returned"
    if isinstance(c, Tensor):
        if c.shape == shape and c.device == a.device:
            if c.dtype == out_dtype:
                return ""
            if c.dtype == a.dtype:
                returned = "ignores out_dtype: it returned"
        got = f"{tuple(c.shape)} {c.dtype} on {c.device}"
    else:
        got = f"a {type(c).__name__}"
    wanted = f"for a {tuple(a.shape)} and b {tuple(b.shape)} it must return {shape} {out_dtype} on {a.device}"
    return f"{returned} {got}; {wanted}"


def is_bundled(gemm_fn: GemmFn | None, device: torch.device) -> bool:
    """Whether the one that applies is the device's own, with options or without."""
    return uses_bundled(gemm_fn) or _as_bundled(gemm_fn, device) is not None


def uses_bundled(gemm_fn: GemmFn | None) -> bool:
    """Whether the one that applies is the device's own."""
    return gemm_fn is None and _default is None


def _empty_product(gemm_fn: GemmFn | None, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`gemm` of empty operands: nothing, or an empty sum, zero."""
    if a.device.type in ("cpu", "cuda") and _as_bundled(gemm_fn, a.device) is not None:
        from ..kernels.gemm.operands import check_operands

        check_operands(a, b, bias, out_dtype, may_be_empty=True)
    c = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    return c + bias.to(out_dtype) if bias is not None and c.numel() else c


def gemm_into(gemm_fn: GemmFn | None, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out = a @ b, or out += a @ b: the product in out's dtype, rounded once, is written or added.

    The bundled kernels do it as they finish a tile, any other gemm_fn's result takes one more pass over memory: the
    same bits. Of an empty K nothing is added, zeros are written.

    Raises:
        TypeError: the bundled kernels accumulate into float32 only.
        ValueError: the bundled kernels cannot write into out (see kernels/gemm/operands.py).
    """
    if a.shape[1] == 0 or out.numel() == 0:
        if not accumulate:
            out.zero_()
        return
    own = _as_bundled(gemm_fn, a.device)
    if own is not None:
        own(a, b, out=out, accumulate=accumulate)
        return
    c = gemm(gemm_fn, a, b, out_dtype=out.dtype)
    if accumulate:
        out.add_(c)
    else:
        out.copy_(c)


class RankMajor(NamedTuple):
    """A matrix whose dim `k_dim` was sharded over ranks, as it is after the gather: `buffer[rank]` is rank's shard.

    A GEMM kernel may read `buffer` in place by walking the sharded dim as (stride, rank, local); other kernels take
    `matrix()`, which copies if necessary.

        buffer   [P, rows, K/P] for k_dim = 1, [P, K/P, cols] for k_dim = 0
        stride   partition_stride of the sharded dim, or the sizes of its pieces (core/layout.py)
    """

    buffer: Tensor
    k_dim: int
    stride: Stride = 1

    def matrix(self) -> Tensor:
        """The full matrix in TP=1's order: [rows, K] for k_dim = 1, [K, cols] for k_dim = 0."""
        if not isinstance(self.stride, int):
            dim, world = self.k_dim, self.buffer.shape[0]
            in_rank_order = torch.cat(self.buffer.unbind(), dim=dim)
            return deinterleave(in_rank_order, dim=dim, world=world, stride=self.stride)
        if self.k_dim == 0 and self.stride == 1:
            return self.buffer.flatten(0, 1)  # the same; einops takes the host as long as a launch
        if self.k_dim == 0:
            return rearrange(self.buffer, "rank (stride k) col -> (stride rank k) col", stride=self.stride)
        return rearrange(self.buffer, "rank row (stride k) -> row (stride rank k)", stride=self.stride)


def gemm_rank_major(
    gemm_fn: GemmFn | None,
    a: RankMajor,
    b: RankMajor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """c = a @ b for operands gathered rank-major: a over [rows, K], b over [N, K] (k_dim 1) or [K, N] (k_dim 0).

    The bundled Triton kernel reads the buffers in place where it can; otherwise it copies both into TP=1's order.
    """
    out_dtype = out_dtype or a.buffer.dtype
    own = None
    if a.buffer.is_cuda and a.stride == b.stride and isinstance(a.stride, int):  # a kernel walks equal pieces only
        own = _as_bundled(gemm_fn, a.buffer.device)
    if own is not None:
        assert isinstance(a.stride, int)
        from ..kernels.gemm.matmul import matmul_rank_major

        promote_every = None
        if isinstance(own, functools.partial) and out_dtype == torch.float32:
            promote_every = own.keywords["promote_every"]
        c = matmul_rank_major(
            a.buffer,
            b.buffer,
            b_k_dim=b.k_dim,
            stride=a.stride,
            bias=bias,
            out_dtype=out_dtype,
            promote_every=promote_every,
        )
        if c is not None:
            return c
    b_matrix = b.matrix()
    return gemm(gemm_fn, a.matrix(), b_matrix if b.k_dim == 0 else b_matrix.t(), bias=bias, out_dtype=out_dtype)


def column_sums(gemm_fn: GemmFn | None, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the rows of x [T, N] -> [N], computed as a GEMM with a row of ones, so it is slice-invariant."""
    return gemm(gemm_fn, x.new_ones((1, x.shape[0])), x, out_dtype=out_dtype).squeeze(0)


# --- as an op -------------------------------------------------------------------------------------------------------


def _gemm_kernel(a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return gemm(None, a, b, bias=bias, out_dtype=out_dtype).contiguous()


def _gemm_fake(a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"a {tuple(a.shape)} @ b {tuple(b.shape)}: both must be matrices, of one K")
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _gemm_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gemm_backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    """da = dc bᵀ, db = aᵀ dc, dbias = column sums of dc; dc in the operands' dtype, each sum rounded once."""
    a, b = ctx.saved_tensors
    dc, op = dc.to(a.dtype), torch.ops.tp_invariant.gemm
    need_a, need_b, *more = ctx.needs_input_grad  # for the arguments that were passed
    da = op(dc, b.t(), out_dtype=a.dtype) if need_a else None
    db = op(a.t(), dc, out_dtype=b.dtype) if need_b else None
    dbias = op(dc.new_ones((1, dc.shape[0])), dc, out_dtype=ctx.bias_dtype).squeeze(0) if any(more) else None
    return da, db, dbias, None


# For products in users' code, eager or compiled: c = torch.ops.tp_invariant.gemm(a, b, bias, out_dtype), by the
# process-wide gemm_fn if there is one, else the bundled one.
_SCHEMA = "(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
define("gemm", _SCHEMA, _gemm_kernel, _gemm_fake, backward=_gemm_backward, setup_context=_gemm_context)
