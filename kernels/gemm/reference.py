"""The gemm_fn for a CPU: plain torch, slice-invariant, close to the speed of torch.mm.

The order of K depends on K alone. K is cut into blocks of 128. Within a block, fp32 fused multiply-adds run in order
from zero; the sums of the blocks are added one after another (with `promote_every`: first within each part of so many
k, then part after part). `chained_matmul` does this elementwise with addcmul_, and is invariant by construction.
`matmul` gets the same bits from the BLAS: it copies both operands to fp32 panels of 128 k, pads M and N with zeros to
multiples of 64, and calls the BLAS once per panel. BLAS libraries change their order of summation with the shape, in
particular at edges that are not a multiple of their tile, but have not done so for the few shapes that remain. No
library promises that, so a process compares each shape with the chain once, and if they differ uses the chain instead,
with a warning.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.torch_private import without_dispatch_modes
from .operands import check_batches, check_operands, check_output, check_promotion

K_BLOCK = 128
_PAD = 64  # the BLAS gets multiples of this many rows and columns
_TILE = 512  # and at most this many at a time, so that it sees only (512 / 64)^2 shapes for each layout


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def check_cpu_operands(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    check_operands(a, b, bias, out_dtype)
    if a.device.type != "cpu":
        raise ValueError(f"a is on {a.device}: this gemm_fn is for the CPU; on CUDA use kernels.matmul")


# --- panels ---------------------------------------------------------------------------------------------------------


def _panels(x: Tensor, k_last: bool) -> list[Tensor]:
    """x [R, K] copied to contiguous fp32 panels of K_BLOCK k, zero-padded to R' rows.

    k_last: panels [R', K_BLOCK], for an x whose rows are contiguous; else [K_BLOCK, R'], for contiguous columns.
    """
    rows, k = x.shape
    padded_rows, blocks = _round_up(rows, _PAD), -(-k // K_BLOCK)
    full = k // K_BLOCK
    whole = rows == padded_rows and k == blocks * K_BLOCK
    make = torch.empty if whole else torch.zeros
    if k_last:
        buffer = make((blocks, padded_rows, K_BLOCK), dtype=torch.float32, device=x.device)
        if full:
            buffer[:full, :rows].copy_(x[:, : full * K_BLOCK].unflatten(1, (full, K_BLOCK)).transpose(0, 1))
        if full < blocks:
            buffer[full, :rows, : k - full * K_BLOCK].copy_(x[:, full * K_BLOCK :])
        return list(buffer.unbind(0))
    flat = make((blocks * K_BLOCK, padded_rows), dtype=torch.float32, device=x.device)
    flat[:k, :rows].copy_(x.t())
    return list(flat.split(K_BLOCK))


def _blas_tile(a_panels: list[Tensor], b_panels: list[Tensor]) -> Tensor:
    acc = torch.mm(a_panels[0], b_panels[0])
    for a, b in zip(a_panels[1:], b_panels[1:], strict=True):
        acc.addmm_(a, b)
    return acc


def _promoted(tile: Callable[..., Tensor], a: list[Tensor], b: list[Tensor], panels: int) -> Tensor:
    """Sums over `panels` panels at a time, added one after another."""
    total = tile(a[:panels], b[:panels])
    for first in range(panels, len(a), panels):
        total += tile(a[first : first + panels], b[first : first + panels])
    return total


def _chain_tile(a_panels: list[Tensor], b_panels: list[Tensor]) -> Tensor:
    acc: Tensor | None = None
    for a, b in zip(a_panels, b_panels, strict=True):
        # every k of the padded block: adding 0 * 0 turns a -0.0 into 0.0, as the BLAS does
        part = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
        for k in range(K_BLOCK):
            part.addcmul_(a[:, k : k + 1], b[k : k + 1])
        acc = part if acc is None else acc.add_(part)
    assert acc is not None
    return acc


# --- the self-check -------------------------------------------------------------------------------------------------

_check_lock = threading.Lock()


def _panel_like(rows: int, k_last: bool, generator: torch.Generator) -> Tensor:
    """Random values over a wide range of exponents, for which every order of summation gives other bits."""
    shape = (rows, K_BLOCK) if k_last else (K_BLOCK, rows)
    exponents = torch.randint(-12, 13, shape, generator=generator, dtype=torch.int64, device="cpu")
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values * torch.exp2(exponents.float())


@functools.cache
def _blas_agrees(rows: int, cols: int, a_k_last: bool, b_k_last: bool, threads: int) -> bool:
    """Whether the BLAS gives the chain's bits for one tile shape, layout and number of threads."""
    # once in a process: selective checkpointing would give what these operators return to those of a recomputed product
    with _check_lock, without_dispatch_modes():
        generator = torch.Generator("cpu").manual_seed(rows * 1031 + cols)
        a = [_panel_like(rows, a_k_last, generator) for _ in range(2)]
        b = [_panel_like(cols, b_k_last, generator) for _ in range(2)]
        a = [x if a_k_last else x.t() for x in a]
        b = [x.t() if b_k_last else x for x in b]
        agrees = torch.equal(_blas_tile(a, b).view(torch.int32), _chain_tile(a, b).view(torch.int32))
    if not agrees:
        warnings.warn(
            f"the BLAS of this torch sums a {rows} x {K_BLOCK} by {K_BLOCK} x {cols} product on {threads} threads in "
            "another order than expected; tp_invariant uses its elementwise form instead: the same bits, but slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return agrees


# --- the gemm_fn ----------------------------------------------------------------------------------------------------


def _as_it_is(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    return fn(*args)


# batch_invariant() routes torch's products to this module, and sets `unrouted` to a function that calls fn without the
# routing. Otherwise the torch.mm above would be routed here again, and in _blas_agrees wait for its own lock.
unrouted: Callable[..., Tensor] = _as_it_is


def _matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    blas: Callable[..., bool],
    out: Tensor | None = None,
    accumulate: bool = False,
    promote_every: int | None = None,
) -> Tensor:
    check_cpu_operands(a, b, bias, out_dtype or getattr(out, "dtype", None))
    out_dtype = check_output(a, b, out, out_dtype, accumulate, bias)
    panels = None if check_promotion(promote_every) is None else promote_every // K_BLOCK
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        b_rows = b.t()
        a_k_last, b_k_last = a.stride(1) == 1, b_rows.stride(1) == 1 and b.stride(1) != 1
        c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device) if out is None else out
        threads = torch.get_num_threads()
        b_strips = [_panels(strip, b_k_last) for strip in b_rows.split(_TILE)]
        if b_k_last:
            b_strips = [[panel.t() for panel in strip] for strip in b_strips]
        for i, a_rows in enumerate(a.split(_TILE)):
            a_strip = _panels(a_rows, a_k_last)
            if not a_k_last:
                a_strip = [panel.t() for panel in a_strip]
            for j, b_strip in enumerate(b_strips):
                tile_shape = a_strip[0].shape[0], b_strip[0].shape[1]
                make = _blas_tile if blas(*tile_shape, a_k_last, b_k_last, threads) else _chain_tile
                tile = make(a_strip, b_strip) if panels is None else _promoted(make, a_strip, b_strip, panels)
                c_tile = c[i * _TILE : (i + 1) * _TILE, j * _TILE : (j + 1) * _TILE]
                tile = tile[: c_tile.shape[0], : c_tile.shape[1]]
                if bias is not None:
                    tile = tile + bias[j * _TILE : (j + 1) * _TILE].float()
                if accumulate:
                    c_tile.add_(tile)
                else:
                    c_tile.copy_(tile)
    return c


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    promote_every: int | None = None,
) -> Tensor:
    """c = a @ b (+ bias), accumulated in fp32 in the order of this module's docstring, rounded once.

    Args:
        a: [M, K], any strides; bfloat16, float16 or float32.
        b: [K, N], any strides, of a's dtype.
        bias: [N] or None, of any of those dtypes; added in fp32.
        out_dtype: any of those dtypes; out's, else a's, if None.
        out, accumulate, promote_every: see operands.py.

    Returns:
        out, or a contiguous [M, N].

    Raises:
        ValueError: shapes that do not agree, an empty operand, an operand not on the CPU, an out that cannot be
            written in place or requires grad while gradients are recorded, a promote_every that is not a multiple of
            128.
        TypeError: dtypes that differ or are not supported (float64 among them: accumulation is fp32).
    """
    return unrouted(_matmul, a, b, bias, out_dtype, _blas_agrees, out, accumulate, promote_every)


def batched_matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """batched.py's: a [B, M, K] and b [B, K, N] -> [B, M, N], each matrix with the bits of `matmul`."""
    check_batches(a, b, out_dtype)
    c = torch.empty((*a.shape[:2], b.shape[2]), dtype=out_dtype or a.dtype, device=a.device)
    for one_a, one_b, one_c in zip(a, b, c, strict=True):
        matmul(one_a, one_b, out=one_c)
    return c


def chained_matmul(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """The bits of `matmul`, computed elementwise and so invariant by construction; several times slower."""
    return unrouted(_matmul, a, b, bias, out_dtype, lambda *shape: False)
