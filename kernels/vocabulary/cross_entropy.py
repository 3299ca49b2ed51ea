"""Cross-entropy in Triton over a vocabulary that may be divided into parts; loss_spec.py has the functions' contract.

    row_extremes   one program per row
    row_sums       one program per row, which folds the extremes of all parts by itself
    token_losses   a block of tokens per program: adds the parts' integers, and computes the losses
    whole_losses   the three in one launch, one program per row, for a vocabulary that is not divided
    sum_of_tokens  one program: token t goes to lane t mod LANES, a lane adds its tokens in order, and the lanes are
                   added by halves. fp64
    row_entropies  one program per row
    logits_grad    dx = p * of_p - everywhere - [column is the target] * of_target,  p = exp(x - top - log_sum)
                   of_p = g (1 + 2 z (top + log_sum)),  everywhere = g smoothing / V,  of_target = g (1 - smoothing)

A maximum rounds nothing, and sums are of integers, so how a row is cut into tiles and parts shows nowhere. The rest is
elementwise, launched with enable_fp_fusion=False so that every operation rounds on its own, and written once for all
kernels. The rows of targets that are ignored are not read.

A target out of range fails an assertion on the device: debug=True keeps assertions in the compiled kernel, and
sanitize_overflow=False leaves out those that Triton would add to each addition of integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, interpreting, launch_on, next_power_of_2, readable_rows
from ..plans import Kernel
from .loss_spec import LossSpec, as_rows

MAX_BLOCK = 4096  # columns at a time; sets the speed only
TOKENS = 128  # of a program of token_losses; sets the speed only
LANES = 2048  # of the sum over tokens, a power of two; another number gives other bits
_ASSERTING = dict(debug=True, sanitize_overflow=False)


@triton.jit
def _load_target(target_ptr, row, target_stride, vocabulary, ignore_index):
    """(id, whether the token counts). An id out of range fails an assertion, and is not followed."""
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    in_range = (target >= 0) & (target < vocabulary)
    ignored = target == ignore_index
    tl.device_assert(in_range | ignored, "target holds an id that is neither in the vocabulary nor ignore_index")
    return target, in_range & (ignored == 0)


@triton.jit
def _row_extremes(x_row, columns, width, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr):
    """(largest, smallest) of a row; NaN for the largest if there is one; -inf and inf without columns.

    Padding is loaded and then left out: a multiple of 16 for `width` lets the compiler load vectors.
    """
    high = tl.full((BLOCK,), -float("inf"), tl.float32)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    nans = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < columns
        x = tl.load(x_row + cols, mask=cols < width, other=0.0).to(tl.float32)
        x = tl.where(inside, x, -float("inf"))
        nans = nans | (x != x).to(tl.int32)  # maximum may drop them
        high = tl.maximum(high, x)
        if SMOOTHING:
            low = tl.minimum(low, tl.where(inside, x, float("inf")))
    top = tl.where(tl.max(nans, axis=0) > 0, float("nan"), tl.max(high, axis=0))
    return top, tl.min(low, axis=0)


@triton.jit
def _row_sums(x_row, columns, width, top, scale, ONE: tl.constexpr, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr):
    """(sum of exp(x - top), sum of x - top) in fixed point; they mean nothing if top is not finite."""
    exps = tl.zeros((BLOCK,), tl.int64)
    shifts = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + cols, mask=cols < width, other=0.0).to(tl.float32) - top
        x = tl.where((cols < columns) & (x <= 0), x, -float("inf"))  # NaN, in rows whose top is not finite
        exps += (tl.exp(x) * ONE).to(tl.int64)
        if SMOOTHING:
            shifts += tl.where(x > -float("inf"), x * scale, 0.0).to(tl.int64)
    return tl.sum(exps, axis=0), tl.sum(shifts, axis=0)


@triton.jit
def _shift_scale(top, lowest, EXP_BITS: tl.constexpr):
    """A power of two that x - top is multiplied by; |top - lowest| * scale is below 2^EXP_BITS."""
    # top - lowest < 2^exponent, read off its bits; the bounds keep the scale a normal number
    exponent = ((top - lowest).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.minimum(tl.maximum(exponent, -60), 128)
    return ((EXP_BITS - exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _plain_nan(x):
    """x with each NaN replaced by torch's own, whatever sign and payload it had."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _log_of_sum(top, exps, ONE: tl.constexpr):
    """log(sum of exp(x - top)) from the sum in fixed point; NaN for a NaN, an inf or nothing but -inf, as torch."""
    log_sum = tl.log(exps.to(tl.float64) / ONE).to(tl.float32)
    return tl.where(tl.abs(top) < float("inf"), log_sum, float("nan"))


@triton.jit
def _losses(
    top, lowest, at_target, exps, shifts, counts, vocabulary, smoothing, rest, z_loss,
    ONE: tl.constexpr, EXP_BITS: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """(losses, log_sum) of a token or of a block of tokens; rest = 1 - smoothing."""
    log_sum = _log_of_sum(top, exps, ONE)
    loss = log_sum - (at_target - top)
    if SMOOTHING:
        mean = (shifts.to(tl.float64) / _shift_scale(top, lowest, EXP_BITS).to(tl.float64) / vocabulary).to(tl.float32)
        mean = tl.where(top - lowest == float("inf"), -float("inf"), mean)  # fp32's largest number is less
        loss = rest * loss + smoothing * (log_sum - mean)
    if Z_LOSS:
        lse = top + log_sum
        loss = loss + z_loss * (lse * lse)
    return tl.where(counts, _plain_nan(loss), 0.0), log_sum


@triton.jit(do_not_specialize=["first", "vocabulary", "ignore_index", "T"])
def _extremes_kernel(
    x_ptr, target_ptr, extremes_ptr, stride, columns, width, first, target_stride, vocabulary, ignore_index, T,
    BLOCK: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    target, counts = _load_target(target_ptr, row, target_stride, vocabulary, ignore_index)
    high, low = _row_extremes(x_row, tl.where(counts, columns, 0), width, BLOCK, SMOOTHING)
    place = target - first
    here = counts & (place >= 0) & (place < columns)
    out = extremes_ptr + row
    tl.store(out, high)
    tl.store(out + T.to(tl.int64), tl.load(x_row + place, mask=here, other=0.0).to(tl.float32))
    if SMOOTHING:
        tl.store(out + 2 * T.to(tl.int64), low)


@triton.jit(do_not_specialize=["ignore_index", "T", "parts"])
def _sums_kernel(
    x_ptr, target_ptr, extremes_ptr, sums_ptr, stride, columns, width, target_stride, ignore_index, T, parts,
    ONE: tl.constexpr, EXP_BITS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts = tl.load(target_ptr + row * target_stride).to(tl.int64) != ignore_index
    part = tl.arange(0, PARTS)
    kinds = 3 if SMOOTHING else 2
    of_part = extremes_ptr + part.to(tl.int64) * kinds * T + row
    highs = tl.load(of_part, mask=part < parts, other=-float("inf"))
    is_nan = tl.max((highs != highs).to(tl.int32), axis=0) > 0
    top = tl.where(is_nan, float("nan"), tl.max(highs, axis=0)) + 0.0  # as in _losses_kernel
    scale = tl.full((), 1.0, tl.float32)
    if SMOOTHING:
        lowest = tl.min(tl.load(of_part + 2 * T.to(tl.int64), mask=part < parts, other=float("inf")), axis=0)
        scale = _shift_scale(top, lowest, EXP_BITS)
    read = tl.where(counts, columns, 0)
    exps, shifts = _row_sums(x_ptr + row * stride, read, width, top, scale, ONE, BLOCK, SMOOTHING)
    tl.store(sums_ptr + row, exps)
    if SMOOTHING:
        tl.store(sums_ptr + T.to(tl.int64) + row, shifts)


@triton.jit(do_not_specialize=["width", "vocabulary", "ignore_index", "T", "parts"])
def _losses_kernel(
    extremes_ptr, sums_ptr, target_ptr, losses_ptr, stats_ptr, width, target_stride, vocabulary, ignore_index, T, parts,
    smoothing, rest, z_loss,
    ONE: tl.constexpr, EXP_BITS: tl.constexpr, TOKENS: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < T
    target = tl.load(target_ptr + token * target_stride, mask=inside, other=0).to(tl.int64)
    counts = inside & (target != ignore_index)
    tokens = T.to(tl.int64)
    top = tl.full((TOKENS,), -float("inf"), tl.float32)
    lowest = tl.full((TOKENS,), float("inf"), tl.float32)
    nans = tl.zeros((TOKENS,), tl.int32)
    exps = tl.zeros((TOKENS,), tl.int64)
    shifts = tl.zeros((TOKENS,), tl.int64)
    kinds = 3 if SMOOTHING else 2
    for part in range(parts):
        of_part = extremes_ptr + part * kinds * tokens + token
        high = tl.load(of_part, mask=inside, other=0.0)
        nans = nans | (high != high).to(tl.int32)
        top = tl.maximum(top, high)
        of_part_sums = sums_ptr + part * (kinds - 1) * tokens + token
        exps += tl.load(of_part_sums, mask=inside, other=0)
        if SMOOTHING:
            lowest = tl.minimum(lowest, tl.load(of_part + 2 * tokens, mask=inside, other=0.0))
            shifts += tl.load(of_part_sums + tokens, mask=inside, other=0)
    top = tl.where(nans > 0, float("nan"), top) + 0.0  # the largest of 0.0 and -0.0 may be either: now 0.0
    owner = tl.where(counts, target // width, 0)
    at_target = tl.load(extremes_ptr + owner * kinds * tokens + tokens + token, mask=counts, other=0.0)
    losses, log_sum = _losses(
        top, lowest, at_target, exps, shifts, counts, vocabulary, smoothing, rest, z_loss,
        ONE, EXP_BITS, SMOOTHING, Z_LOSS,
    )  # fmt: skip
    tl.store(losses_ptr + token, losses, mask=inside)
    tl.store(stats_ptr + token, top, mask=inside)
    tl.store(stats_ptr + tokens + token, log_sum, mask=inside)


@triton.jit(do_not_specialize=["ignore_index", "T"])
def _whole_kernel(
    x_ptr, target_ptr, losses_ptr, stats_ptr, stride, vocabulary, width, target_stride, ignore_index, T,
    smoothing, rest, z_loss,
    ONE: tl.constexpr, EXP_BITS: tl.constexpr, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * stride
    target, counts = _load_target(target_ptr, row, target_stride, vocabulary, ignore_index)
    columns = tl.where(counts, vocabulary, 0)
    at_target = tl.load(x_row + target, mask=counts, other=0.0).to(tl.float32)
    top, lowest = _row_extremes(x_row, columns, width, BLOCK, SMOOTHING)
    top = top + 0.0  # as in _losses_kernel
    scale = _shift_scale(top, lowest, EXP_BITS)
    exps, shifts = _row_sums(x_row, columns, width, top, scale, ONE, BLOCK, SMOOTHING)
    loss, log_sum = _losses(
        top, lowest, at_target, exps, shifts, counts, vocabulary, smoothing, rest, z_loss,
        ONE, EXP_BITS, SMOOTHING, Z_LOSS,
    )  # fmt: skip
    tl.store(losses_ptr + row, loss)
    tl.store(stats_ptr + row, top)
    tl.store(stats_ptr + T.to(tl.int64) + row, log_sum)


@triton.jit
def _sum_by_halves(x, SIZE: tl.constexpr):
    """The sum of SIZE elements, a power of two: adds first and second half until one is left."""
    if SIZE == 1:
        return tl.sum(x, axis=0)
    else:
        return _sum_by_halves(tl.sum(tl.reshape(x, (2, SIZE // 2)), axis=0), SIZE // 2)


@triton.jit(do_not_specialize=["ignore_index", "T"])
def _total_kernel(
    losses_ptr, target_ptr, total_ptr, count_ptr, target_stride, ignore_index, T,
    LANES: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, LANES)
    totals = tl.zeros((LANES,), tl.float64)
    counted = tl.zeros((LANES,), tl.int64)
    for start in range(0, T, LANES):
        token = start + lanes
        totals += tl.load(losses_ptr + token, mask=token < T, other=0.0).to(tl.float64)
        if MEAN:
            at = target_ptr + token.to(tl.int64) * target_stride
            target = tl.load(at, mask=token < T, other=0).to(tl.int64)
            counted += ((token < T) & (target != ignore_index)).to(tl.int64)
    total = _sum_by_halves(totals, LANES)
    if MEAN:
        count = tl.sum(counted, axis=0)
        tl.store(count_ptr, count)
        total = total / count.to(tl.float64)
    tl.store(total_ptr, _plain_nan(total.to(tl.float32)))


@triton.jit(do_not_specialize=["ignore_index", "T"])
def _entropies_kernel(
    x_ptr, target_ptr, stats_ptr, entropies_ptr, stride, columns, width, target_stride, ignore_index, T,
    ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts = tl.load(target_ptr + row * target_stride).to(tl.int64) != ignore_index
    top = tl.load(stats_ptr + row)
    log_sum = tl.load(stats_ptr + T.to(tl.int64) + row)
    terms = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tl.where(counts, columns, 0), BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        log_p = (x - top) - log_sum
        # left out: what is rounded up from 0, a NaN (in rows whose top is not finite), and p = 0
        log_p = tl.where((cols < columns) & (log_p <= 0) & (log_p > -float("inf")), log_p, 0.0)
        terms += ((tl.exp(log_p) * log_p) * (-ONE)).to(tl.int64)
    tl.store(entropies_ptr + row, tl.sum(terms, axis=0))


@triton.jit(do_not_specialize=["first", "ignore_index", "T"])
def _grad_kernel(
    grad_ptr, x_ptr, target_ptr, stats_ptr, count_ptr, dx_ptr,
    grad_stride, stride, N, columns, first, target_stride, ignore_index, T, rest, everywhere, twice_z_loss,
    BLOCK: tl.constexpr, MEAN: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row * target_stride).to(tl.int64)
    read = (cols < columns) & (target != ignore_index)
    loaded = (cols < N) & (target != ignore_index)
    x = tl.load(x_ptr + row * stride + cols, mask=loaded, other=0.0).to(tl.float32)
    top = tl.load(stats_ptr + row)
    log_sum = tl.load(stats_ptr + T.to(tl.int64) + row)
    g = tl.load(grad_ptr + row * grad_stride)
    if MEAN:
        g = tl.div_rn(g, tl.load(count_ptr).to(tl.float32))
    of_p = g
    if Z_LOSS:
        of_p = g * (1.0 + twice_z_loss * (top + log_sum))
    dx = tl.exp((x - top) - log_sum) * of_p - g * everywhere
    dx = tl.where(cols + first == target, dx - g * rest, dx)
    dx = tl.where(read, dx, 0.0)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


_extremes = Kernel(_extremes_kernel, enable_fp_fusion=False, **_ASSERTING)
_sums = Kernel(_sums_kernel, enable_fp_fusion=False)
_token_losses = Kernel(_losses_kernel, enable_fp_fusion=False)
_whole = Kernel(_whole_kernel, enable_fp_fusion=False, **_ASSERTING)
_total = Kernel(_total_kernel, enable_fp_fusion=False)
_entropies = Kernel(_entropies_kernel, enable_fp_fusion=False)
_grad = Kernel(_grad_kernel, enable_fp_fusion=False)


def _block(columns: int) -> tuple[int, int]:
    """Columns at a time, and warps."""
    block = min(MAX_BLOCK, max(16, next_power_of_2(columns)))
    return block, max(1, min(8, block // 512))


def row_extremes(logits: Tensor, target: Tensor, columns: int, first: int, spec: LossSpec) -> Tensor:
    """extremes [E, T] of one part of the vocabulary, see loss_spec."""
    logits, target = as_rows(logits, target)
    t = logits.shape[0]
    extremes = torch.empty((spec.extremes, t), device=logits.device, dtype=torch.float32)
    if t:
        x = readable_rows(logits)
        block, warps = _block(columns)
        with launch_on(logits, "row_extremes"):
            _extremes(
                logits.device.index, (t,),
                (
                    x, target, extremes, x.stride(0), columns, logits.shape[1], first, target.stride(0),
                    spec.vocabulary, spec.ignore_index, t,
                ),
                (block, spec.label_smoothing > 0), num_warps=warps,
            )  # fmt: skip
    return extremes


def row_sums(logits: Tensor, target: Tensor, columns: int, extremes: Tensor, spec: LossSpec) -> Tensor:
    """sums [S, T] of one part of the vocabulary, from the extremes [P, E, T] of all, see loss_spec."""
    logits, target = as_rows(logits, target)
    t, parts = logits.shape[0], extremes.shape[0]
    sums = torch.empty((spec.sums, t), device=logits.device, dtype=torch.int64)
    if t:
        x = readable_rows(logits)
        block, warps = _block(columns)
        bits = spec.exp_bits
        with launch_on(logits, "row_sums"):
            _sums(
                logits.device.index, (t,),
                (
                    x, target, extremes, sums, x.stride(0), columns, logits.shape[1], target.stride(0),
                    spec.ignore_index, t, parts,
                ),
                (2.0**bits, bits, block, next_power_of_2(parts), spec.label_smoothing > 0), num_warps=warps,
            )  # fmt: skip
    return sums


def token_losses(extremes: Tensor, sums: Tensor, target: Tensor, width: int, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(losses [T], stats [2, T]) from the extremes [P, E, T] and the sums [P, S, T] of all parts, see loss_spec."""
    t, target = extremes.shape[2], target.reshape(-1)
    losses = torch.empty((t,), device=extremes.device, dtype=torch.float32)
    stats = torch.empty((2, t), device=extremes.device, dtype=torch.float32)
    if t:
        smoothing, z_loss, bits = spec.label_smoothing, spec.z_loss, spec.exp_bits
        with launch_on(extremes, "token_losses"):
            _token_losses(
                extremes.device.index, (cdiv(t, TOKENS),),
                (
                    extremes, sums, target, losses, stats, width, target.stride(0), spec.vocabulary, spec.ignore_index,
                    t, extremes.shape[0], float(smoothing), 1.0 - smoothing, float(z_loss),
                ),
                (2.0**bits, bits, TOKENS, smoothing > 0, z_loss > 0), num_warps=4,
            )  # fmt: skip
    return losses, stats


def whole_losses(logits: Tensor, target: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """(losses [T], stats [2, T]) of a vocabulary in one part, with the bits of the three functions, see loss_spec."""
    rows, ids = as_rows(logits, target)
    t = ids.shape[0]
    losses = torch.empty((t,), device=logits.device, dtype=torch.float32)
    stats = torch.empty((2, t), device=logits.device, dtype=torch.float32)
    if t:
        x = readable_rows(rows)
        block, warps = _block(spec.vocabulary)
        smoothing, z_loss, bits = spec.label_smoothing, spec.z_loss, spec.exp_bits
        numbers = (
            x.stride(0), spec.vocabulary, rows.shape[1], ids.stride(0), spec.ignore_index, t,
            float(smoothing), 1.0 - smoothing, float(z_loss),
        )  # fmt: skip
        constants = 2.0**bits, bits, block, smoothing > 0, z_loss > 0
        with launch_on(logits, "whole_losses"):
            _whole(
                logits.device.index, (t,), (x, ids, losses, stats, *numbers), constants, num_warps=warps
            )  # fmt: skip
    return losses, stats


def sum_of_tokens(losses: Tensor, target: Tensor, spec: LossSpec, *, mean: bool) -> tuple[Tensor, Tensor | None]:
    """(total, count or None), see loss_spec. One order for each number of tokens."""
    ids = target.reshape(-1)
    results = [torch.empty((), device=losses.device, dtype=torch.float32)]
    if mean:
        results.append(torch.empty((), device=losses.device, dtype=torch.int64))
    numbers, constants = (ids.stride(0), spec.ignore_index, losses.shape[0]), (LANES, mean)
    with launch_on(losses, "sum_of_tokens"):
        _total(
            losses.device.index, (1,), (losses, ids, results[0], results[-1], *numbers), constants, num_warps=8
        )  # fmt: skip
    return results[0], results[1] if mean else None


def logits_grad(
    grad: Tensor, logits: Tensor, target: Tensor, stats: Tensor, count: Tensor | None, columns: int, first: int,
    spec: LossSpec,
) -> Tensor:  # fmt: skip
    """dlogits [.., N] of one part of the vocabulary, by the formula at the top, see loss_spec."""
    rows, ids = as_rows(logits, target)
    t, n = rows.shape
    dx = torch.empty(logits.shape, device=logits.device, dtype=torch.float32 if interpreting() else logits.dtype)
    if t and n:
        x, grads = readable_rows(rows), grad.resolve_neg().reshape(-1)
        block, warps = _block(n)
        numbers = (
            grads.stride(0) if grads.shape[0] > 1 else 0, x.stride(0), n, columns, first, ids.stride(0),
            spec.ignore_index, t, 1.0 - spec.label_smoothing, spec.label_smoothing / spec.vocabulary, 2.0 * spec.z_loss,
        )  # fmt: skip
        constants, grid = (block, count is not None, spec.z_loss > 0), (t, cdiv(n, block))
        with launch_on(logits, "logits_grad"):
            _grad(
                logits.device.index, grid, (grads, x, ids, stats, stats if count is None else count, dx, *numbers),
                constants, num_warps=warps,
            )  # fmt: skip
    return dx.to(logits.dtype)


def row_entropies(logits: Tensor, target: Tensor, columns: int, stats: Tensor, spec: LossSpec) -> Tensor:
    """entropies [T] of one part of the vocabulary, see loss_spec; 0 where the target is ignored."""
    logits, target = as_rows(logits, target)
    t = logits.shape[0]
    entropies = torch.empty((t,), device=logits.device, dtype=torch.int64)
    if t:
        x = readable_rows(logits)
        block, warps = _block(columns)
        numbers = x.stride(0), columns, logits.shape[1], target.stride(0), spec.ignore_index, t
        with launch_on(logits, "row_entropies"):
            _entropies(
                logits.device.index, (t,), (x, target, stats, entropies, *numbers), (spec.one, block), num_warps=warps
            )  # fmt: skip
    return entropies
