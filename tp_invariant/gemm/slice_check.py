"""A gemm_fn of the user's is tried at a layer's first call: some rows and columns alone against the whole product.

torch.matmul and cuBLAS choose the order of a sum by the number of rows and columns, so that `a @ b` may pass a test of
a small layer and fail at a larger K. The operands of the trial are noise of the call's sizes: zeros in the first batch
hide nothing. `tp_invariant.testing.assert_slice_invariant` tries many more sizes, slices and strides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm.collectives import Group, is_capturing
from ..consistency.agreement import AgreedCalls
from ..core.bits import assert_bitwise_equal
from ..core.identity import identify
from ..core.mode import is_call_check_enabled
from ..core.torch_private import without_dispatch_modes
from .gemm_fn import GemmFn, fault_of, is_bundled, resolve_gemm_fn

# For each kind of device the most rows, and columns, of the trial and the most elements of an operand. Milliseconds.
_MOST = {"cpu": (256, 2**19), "cuda": (4096, 2**25)}


def check_first_product(
    gemm_fn: GemmFn | None, agreed: AgreedCalls, x: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype,
    group: Group, name: str, *, biased: bool,
) -> None:  # fmt: skip
    """Tries the gemm_fn that applies, unless it is the bundled one, once for each layer. Sends nothing.

    Nothing is tried in compiled code, while a CUDA graph is captured, on tensors without values, or once the ranks have
    agreed on a call of the layer: they would not learn of an error.

    Args:
        agreed: the layer's; the caller shares an error with the other ranks by it (see share_error).
        sizes: (M, K, N) of the product; dtype: of its operands.
        name: the layer's, for the error.
        biased: whether the layer has a bias.

    Raises:
        ValueError: a slice differs from the whole product, the bias or out_dtype is ignored, the sum is rounded before
            the bias is added, or the gemm_fn has raised an error. Names the rank.
    """
    if torch.compiler.is_compiling() or is_bundled(gemm_fn, x.device):
        return
    fn = resolve_gemm_fn(gemm_fn, x.device)
    if agreed.tried is fn or (agreed and not is_call_check_enabled()):
        return
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta or is_capturing() or not all(sizes):
        return
    try:
        with without_dispatch_modes(), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            _try_slices(fn, sizes, dtype, x.device, max(group.size, 2), biased)
    except Exception as error:
        said, cause = (error, None) if isinstance(error, AssertionError) else (f"it raised {error!r}", error)
        raise ValueError(f"gemm_fn {identify(fn)!r} of {name} on rank {group.rank} {_FAILS}: {said}") from cause
    agreed.tried = fn


_FAILS = "fails the check of a layer's first call"
_RULE = (
    "c[i, j] must depend on a[i, :] and b[:, j] alone, in an order along K that depends on K alone, which torch.matmul "
    "does not promise; tp_invariant.testing.assert_slice_invariant tests it"
)


def _try_slices(
    fn: GemmFn, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, parts: int, biased: bool
) -> None:
    """Raises an AssertionError that names the slice; the result is wanted in fp32, since 16 bits hide the order."""

    def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        c = fn(a, b, bias=bias, out_dtype=out_dtype)
        if fault := fault_of(c, a, b, out_dtype):
            raise AssertionError(f"it {fault}")
        return c

    m, k, n = sizes
    side, elements = _MOST.get(device.type, _MOST["cpu"])
    most = max(min(side, elements // k), 16)
    m, n, out_dtype = min(m, most), min(n, most), torch.promote_types(dtype, torch.float32)
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(k + m + n, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
    a = noise[: k + m - 1].unfold(0, k, 1).contiguous()  # each row begins one number later: cheaper than m * k numbers
    b, bias = noise[m : k + m + n - 1].unfold(0, k, 1).contiguous().t(), noise[:n] if biased else None
    whole = product(a, b, bias)
    unbiased = product(a[:1], b, None) if biased else whole
    if biased and torch.equal(unbiased, whole[:1]):
        raise AssertionError("it ignores bias, which must be added in fp32 before the one rounding")
    # a few sums may be numbers of 16 bits by chance
    if dtype != out_dtype and n > 8 and any(torch.equal(c, c.to(dtype).to(out_dtype)) for c in (unbiased, whole)):
        raise AssertionError(
            f"it rounds the sum to {dtype} before it {'adds bias or ' if biased else ''}converts to out_dtype "
            f"{out_dtype}: add the sum and bias in fp32, and round once, to out_dtype"
        )
    rows, cols, every = slice(-max(m // parts, 1), None), slice(-max(n // parts, 1), None), slice(None)
    for r, c in ((slice(1), every), (rows, every), (every, slice(1)), (every, cols)):
        part = product(a[r], b[:, c], None if bias is None else bias[c])
        try:
            assert_bitwise_equal(part, whole[r, c], "c")
        except AssertionError as error:
            alone = f"{part.shape[0]} of {m} rows" if c is every else f"{part.shape[1]} of {n} columns"
            of = f"a {(m, k)} @ b {(k, n)}, {dtype}, out_dtype {out_dtype}"
            raise AssertionError(f"{alone} alone differ from the whole product, {of}: {error}. {_RULE}") from None
