"""The routing of rows to experts and back, in Triton: a token's result depends on its own scores and rows alone.

Legend: T tokens, k slots (experts chosen for a token), R rows (one for each token and slot that is here), E experts.

    top_k                      the k largest scores of a token, in descending order; equal ones by the lower index
    choose                     index[t] = the top k of choice[t], weights[t, s] = scores[t, index[t, s]], maybe over
                               their sum + epsilon, times a factor; choose_backward: dscores
    sort_by_expert             the order of rows by (expert, token, slot), and where each expert's rows begin
    gather_rows                rows[i] = x[token of row i]; its backward is `combine` without weights
    spread_rows                the same where all rows of the tokens are here: x is read once
    combine                    y[t] = sum over slots s of weights[t, s] * rows[places[t, s]]
    combine_backward_rows      drows[i] = weights[t, s] * dy[t] for the token and slot of row i
    combine_backward_weights   dweights[t, s] = dy[t] . rows[places[t, s]]
    combine_backward           the last two at once, where all rows of the tokens are here: dy is read once

Scores are compared as integers, and indices break ties, so that a maximum has no order to depend on. Slots are added in
their order, elementwise. A dot product is a sum along a row, whose order is fixed as in kernels/rowwise/norm.py: chunk
and warps are functions of H, and `_rows` lets the compiler know the same of all tensors of that H. Everything is
computed in fp32 and launched with enable_fp_fusion=False: each operation rounds on its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, interpreting, launch_on, next_power_of_2, readable_rows
from ..plans import Kernel
from ..rowwise.norm import _load, _row, _rows, row_chunk
from . import reference_routing
from .reference_routing import check_top_k

__all__ = [
    "choose", "choose_backward", "combine", "combine_backward", "combine_backward_rows", "combine_backward_weights",
    "gather_rows", "sort_by_expert", "spread_rows", "top_k",
]  # fmt: skip

MAX_COUNTED = 512  # experts for which a block of rows is counted at once
_NO_EXPERT = tl.constexpr("top_k_index holds an expert that does not exist")
COLUMNS = 1024  # of a program of the elementwise kernels, at most; sets the speed only


_NONE = tl.constexpr(-9223372036854775808)  # below every key


@triton.jit
def _keys(row, cols, experts, WIDTH: tl.constexpr):
    """Integers in the order of a row's scores, all different: -0.0 equals 0.0, and NaN is the largest."""
    x = tl.load(row + cols, mask=cols < experts, other=0.0).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    places = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    keys = places.to(tl.int64) * 4294967296 + (WIDTH - cols)
    return tl.where(cols < experts, keys, _NONE)


@triton.jit
def _top_k_kernel(scores_ptr, values_ptr, indices_ptr, stride, experts, k, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = scores_ptr + token * stride
    keys = _keys(row, tl.arange(0, WIDTH), experts, WIDTH)
    for slot in range(k):
        best = tl.max(keys, axis=0)
        index = WIDTH - (best & 4294967295)
        tl.store(indices_ptr + token * k + slot, index)
        tl.store(values_ptr + token * k + slot, tl.load(row + index))
        keys = tl.where(keys == best, _NONE, keys)


@triton.jit
def _choose_kernel(
    choice_ptr, scores_ptr, weights_ptr, index_ptr, y_ptr, total_ptr, experts, k, epsilon, scale,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    # weights = y * scale, where y are the chosen scores, or with NORMALIZE these over total
    token = tl.program_id(0).to(tl.int64)
    keys = _keys(choice_ptr + token * experts, tl.arange(0, WIDTH), experts, WIDTH)
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int64)
    y = tl.zeros((SLOTS,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for slot in range(k):
        best = tl.max(keys, axis=0)
        index = WIDTH - (best & 4294967295)
        score = tl.load(scores_ptr + token * experts + index)
        chosen = tl.where(slots == slot, index, chosen)
        y = tl.where(slots == slot, score, y)
        total = tl.where(slot == 0, score, total + score)
        keys = tl.where(keys == best, _NONE, keys)
    at = token * k + slots
    if NORMALIZE:
        total += epsilon
        y = tl.div_rn(y, total)
        tl.store(total_ptr + token, total)
    tl.store(y_ptr + at, y, mask=slots < k)
    tl.store(index_ptr + at, chosen, mask=slots < k)
    tl.store(weights_ptr + at, (y * scale).to(weights_ptr.dtype.element_ty), mask=slots < k)


@triton.jit
def _choose_backward_kernel(
    dweights_ptr, index_ptr, y_ptr, total_ptr, dscores_ptr, experts, k, scale,
    WIDTH: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    dot = tl.full((), 0.0, tl.float32)
    if NORMALIZE:
        for slot in range(k):
            dy = tl.load(dweights_ptr + token * k + slot).to(tl.float32) * scale
            term = dy * tl.load(y_ptr + token * k + slot)
            dot = tl.where(slot == 0, term, dot + term)
        total = tl.load(total_ptr + token)
    dscores = tl.zeros((WIDTH,), tl.float32)
    for slot in range(k):
        dy = tl.load(dweights_ptr + token * k + slot).to(tl.float32) * scale
        if NORMALIZE:
            dy = tl.div_rn(dy - dot, total)
        dscores = tl.where(cols == tl.load(index_ptr + token * k + slot), dy, dscores)
    tl.store(dscores_ptr + token * experts + cols, dscores, mask=cols < experts)


# A stable sort by counting: how many of a block of rows each expert has; sums over the experts and blocks before; then
# each row's place. EXPERTS is a power of two from `experts` up. Sums of integers have no order to depend on.
@triton.jit
def _experts_of(index_ptr, rows, experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index_ptr + at, mask=at < rows, other=-1)
    exists = (expert >= 0) & (expert < experts)  # before 2**32 + 3 becomes 3
    return at, exists, exists[:, None] & (expert.to(tl.int32)[:, None] == tl.arange(0, EXPERTS)[None, :])


@triton.jit(do_not_specialize=["rows", "experts", "blocks"])
def _count_kernel(index_ptr, counts_ptr, rows, experts, blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    at, exists, chosen = _experts_of(index_ptr, rows, experts, BLOCK, EXPERTS)
    tl.device_assert(exists | (at >= rows), _NO_EXPERT)
    numbers = tl.arange(0, EXPERTS).to(tl.int64)
    counts = tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(counts_ptr + numbers * blocks + tl.program_id(0), counts, mask=numbers < experts)


@triton.jit(do_not_specialize=["rows", "experts", "blocks"])
def _place_kernel(
    index_ptr, ends_ptr, order_ptr, places_ptr, offsets_ptr, rows, experts, blocks,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    # ends: of the rows of each expert and block, in the order in which they are sorted
    at, exists, chosen = _experts_of(index_ptr, rows, experts, BLOCK, EXPERTS)
    numbers = tl.arange(0, EXPERTS).to(tl.int64)
    part = numbers * blocks + tl.program_id(0)
    first = tl.load(ends_ptr + part - 1, mask=(numbers < experts) & (part > 0), other=0)
    place = tl.sum(tl.where(chosen, tl.cumsum(chosen.to(tl.int32), axis=0) - 1 + first[None, :], 0), axis=1)
    tl.store(order_ptr + place, at.to(tl.int64), mask=exists)
    tl.store(places_ptr + at, place.to(tl.int64), mask=exists)
    if tl.program_id(0) == 0:
        ends = tl.load(ends_ptr + (numbers + 1) * blocks - 1, mask=numbers < experts, other=0)
        tl.store(offsets_ptr + numbers + 1, ends, mask=numbers < experts)
        tl.store(offsets_ptr + numbers, 0, mask=numbers == 0)


@triton.jit
def _gather_kernel(
    x_ptr, order_ptr, rows_ptr, stride, rows, slots, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(order_ptr + row, mask=row < rows, other=0) // slots
    inside = (row < rows)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + token[:, None] * stride + cols[None, :], mask=inside, other=0.0)
    tl.store(rows_ptr + row[:, None] * H + cols[None, :], x, mask=inside)


@triton.jit
def _spread_kernel(x_ptr, places_ptr, rows_ptr, stride, H, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + token * stride + cols, mask=cols < H, other=0.0)
    for slot in tl.static_range(SLOTS):
        place = tl.load(places_ptr + token * SLOTS + slot)
        tl.store(rows_ptr + place * H + cols, x, mask=cols < H)


@triton.jit
def _combine_kernel(
    rows_ptr, weights_ptr, places_ptr, y_ptr, stride, H,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    for slot in tl.static_range(SLOTS):
        place = tl.load(places_ptr + token * SLOTS + slot)
        term = tl.load(rows_ptr + place * stride + cols, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            term = term * tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32)
        if slot == 0:
            total = term
        else:
            total = total + term
    tl.store(y_ptr + token * H + cols, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(dy_ptr, weights_ptr, order_ptr, drows_ptr, stride, slots, H, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    at = tl.load(order_ptr + row)
    dy = tl.load(dy_ptr + at // slots * stride + cols, mask=inside, other=0.0).to(tl.float32)
    drow = dy * tl.load(weights_ptr + at).to(tl.float32)
    tl.store(drows_ptr + row * H + cols, drow.to(drows_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["places_ptr", "dots_ptr", "weights_ptr", "slots"])
def _dots_kernel(
    dy_ptr, rows_ptr, places_ptr, dots_ptr, weights_ptr, drows_ptr, stride_dy, stride_rows, slots,
    H: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    # SCALE: stores drows as well. The dot product is added in the same order with and without, as both load alike.
    at = tl.program_id(0).to(tl.int64)
    dy = _row(dy_ptr, at // slots, stride_dy, H)
    place = tl.load(places_ptr + at)
    row = _row(rows_ptr, place, stride_rows, H)
    products = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        one = _load(dy, cols, H, CHUNK)
        products += one * _load(row, cols, H, CHUNK)
        if SCALE:
            drow = (one * tl.load(weights_ptr + at).to(tl.float32)).to(drows_ptr.dtype.element_ty)
            tl.store(drows_ptr + place * H + cols, drow, mask=cols < H)
    tl.store(dots_ptr + at, tl.sum(products, axis=0))


# Every operation rounds on its own: see the top of this file.
_top_k = Kernel(_top_k_kernel)
_choose = Kernel(_choose_kernel, enable_fp_fusion=False)
_choose_backward = Kernel(_choose_backward_kernel, enable_fp_fusion=False)
_count = Kernel(_count_kernel, debug=True, sanitize_overflow=False)  # debug keeps the assertion
_place = Kernel(_place_kernel)
_gather = Kernel(_gather_kernel)
_spread = Kernel(_spread_kernel)
_combine = Kernel(_combine_kernel, enable_fp_fusion=False)
_scale = Kernel(_scale_kernel, enable_fp_fusion=False)
_dots = Kernel(_dots_kernel, enable_fp_fusion=False)


def _contiguous(x: Tensor) -> Tensor:
    return readable_rows(x).contiguous()


def _columns(h: int) -> tuple[int, int]:
    """Columns of a program, and warps."""
    columns = min(COLUMNS, max(32, next_power_of_2(h)))
    return columns, max(1, columns // 256)


def _width(experts: int) -> tuple[int, int]:
    """Of a row of scores, and warps."""
    width = max(16, next_power_of_2(experts))
    return width, min(8, max(1, width // 512))


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, device=like.device, dtype=torch.float32 if interpreting() else like.dtype)


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, int64 indices) of the k largest of scores [.., E] along the last dim, in descending order: both [.., k].

    scores: bfloat16, float16 or float32, any strides. Equal ones, to which -0.0 and 0.0 belong, come by their index,
    and NaN is the largest. Raises TypeError for a dtype, and ValueError for a k that is not from 1 to E.
    """
    check_top_k(scores, k)
    shape, experts = (*scores.shape[:-1], k), scores.shape[-1]
    rows = readable_rows(scores.reshape(-1, experts))
    t = rows.shape[0]
    values, indices = _empty(scores, t, k), torch.empty((t, k), device=scores.device, dtype=torch.int64)
    if t > 0:
        width, warps = _width(experts)
        with launch_on(scores, "top_k"):
            _top_k(
                scores.device.index, (t,), (rows, values, indices, rows.stride(0), experts, k), (width,),
                num_warps=warps,
            )  # fmt: skip
    return values.to(scores.dtype).view(shape), indices.view(shape)


def choose(
    scores: Tensor,
    choice: Tensor,
    k: int,
    *,
    normalize: bool,
    epsilon: float,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(weights, index, y, total): a token's experts with the k largest of choice [T, E], as `top_k`, and their weights.

    y: float32 [T, k], the chosen of scores [T, E]; with normalize these divided by total [T], their sum in the order of
    slots, + epsilon. weights: y times scale, rounded once to out_dtype. scores and choice: float32. Raises ValueError
    as `top_k`.
    """
    check_top_k(choice, k)
    (t, experts), device = scores.shape, scores.device
    scores, choice = _contiguous(scores), _contiguous(choice)
    index, y = torch.empty((t, k), device=device, dtype=torch.int64), scores.new_empty((t, k))
    weights = torch.empty((t, k), device=device, dtype=torch.float32 if interpreting() else out_dtype)
    total = scores.new_empty(t) if normalize else None
    if t > 0:
        width, warps = _width(experts)
        numbers, constants = (experts, k, float(epsilon), float(scale)), (width, next_power_of_2(k), normalize)
        tensors = choice, scores, weights, index, y, y if total is None else total
        with launch_on(scores, "choose"):
            _choose(device.index, (t,), (*tensors, *numbers), constants, num_warps=warps)
    return weights.to(out_dtype), index, y, total


def choose_backward(
    dweights: Tensor, index: Tensor, y: Tensor, total: Tensor | None, *, experts: int, scale: float
) -> Tensor:
    """dscores, float32 [T, E], of `choose`'s results and dweights [T, k]; zeros where an expert was not chosen.

    With a total dscores = (dy - sum of dy y) / total, the sum in the order of slots, where dy = dweights times scale.
    """
    t, k = y.shape
    dscores = y.new_empty((t, experts))
    if t > 0:
        width, warps = _width(experts)
        own, numbers, constants = _contiguous(dweights), (experts, k, float(scale)), (width, total is not None)
        tensors = own, index, y, y if total is None else total, dscores
        with launch_on(dweights, "choose_backward"):
            _choose_backward(y.device.index, (t,), (*tensors, *numbers), constants, num_warps=warps)
    return dscores


def sort_by_expert(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, places, offsets) of the rows of index [T, k], the experts of each token, int32 or int64.

    order: int64 [R], the rows token * k + slot, sorted by (expert, token, slot); places: int64 [T, k], its inverse;
    offsets: int32 [E + 1], where in `order` each expert's rows begin. An expert from 0 to experts - 1 is not checked by
    the host: an assertion on the device fails for another one.
    """
    if experts > MAX_COUNTED or not index.numel():
        torch.ops.aten._assert_async.msg(((index >= 0) & (index < experts)).all(), _NO_EXPERT.value)
        return reference_routing.sort_by_expert(index, experts)
    rows, width = index.numel(), max(16, next_power_of_2(experts))
    block = 8192 // width
    blocks = cdiv(rows, block)
    order = torch.empty(rows, device=index.device, dtype=torch.int64)
    places, offsets = torch.empty_like(order), order.new_empty(experts + 1, dtype=torch.int32)
    counts = order.new_empty(experts * blocks, dtype=torch.int32)
    flat = index.reshape(-1).contiguous()  # of one column of a wider tensor reshape makes a view with its stride
    with launch_on(index, "sort_by_expert"):
        device, numbers = index.device.index, (rows, experts, blocks)
        _count(device, (blocks,), (flat, counts, *numbers), (block, width), num_warps=4)
        ends = counts.cumsum(0, dtype=torch.int32)
        _place(device, (blocks,), (flat, ends, order, places, offsets, *numbers), (block, width), num_warps=4)
    return order, places.view(index.shape), offsets


def spread_rows(x: Tensor, places: Tensor) -> Tensor:
    """rows [T * k, H] with rows[places[t, s]] = x[t], for x [T, H], any strides, int64 places [T, k], each row once.

    `gather_rows` of their inverse, where all rows of the tokens are here: x is read once.
    """
    (t, slots), h, own, own_places = places.shape, x.shape[1], readable_rows(x), places.contiguous()
    rows = torch.empty((t * slots, h), device=x.device, dtype=own.dtype)
    if t > 0:
        columns, warps = _columns(h)
        grid, numbers, constants = (t, cdiv(h, columns)), (own.stride(0), h), (slots, columns)
        with launch_on(x, "spread_rows"):
            _spread(x.device.index, grid, (own, own_places, rows, *numbers), constants, num_warps=warps)
    return rows.to(x.dtype)


def gather_rows(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """rows[i] = x[order[i] // slots], for x [T, H] of any strides and int64 order [R]."""
    (r, h), own = (len(order), x.shape[1]), readable_rows(x)
    rows = torch.empty((r, h), device=x.device, dtype=own.dtype)
    if r > 0:
        columns, _ = _columns(h)
        with launch_on(x, "gather_rows"):
            _gather(
                x.device.index, (cdiv(r, 8), cdiv(h, columns)),
                (own, order.contiguous(), rows, own.stride(0), r, slots, h), (8, columns), num_warps=4,
            )  # fmt: skip
    return rows.to(x.dtype)


def combine(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """y [T, H], where y[t] is the sum over slots s, in their order, of weights[t, s] * rows[places[t, s]].

    rows: [R, H], bfloat16, float16 or float32, any strides. weights: [T, k], of any of these, or None for ones.
    places: int64 [T, k], rows' indices. In fp32, where products and sums round on their own, then rounded once to rows'
    dtype.
    """
    (t, slots), h = places.shape, rows.shape[1]
    y = _empty(rows, t, h)
    if t > 0:
        x = readable_rows(rows)
        w, own_places = x if weights is None else _contiguous(weights), places.contiguous()
        columns, warps = _columns(h)
        grid, numbers, constants = (t, cdiv(h, columns)), (x.stride(0), h), (slots, columns, weights is not None)
        with launch_on(rows, "combine"):
            _combine(rows.device.index, grid, (x, w, own_places, y, *numbers), constants, num_warps=warps)
    return y.to(rows.dtype)


def combine_backward_rows(dy: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """drows [R, H]: row i is weights[t, s] * dy[t] for order[i] = t * k + s, in fp32, rounded once to dy's dtype.

    dy: [T, H], weights: [T, k]; order: int64 [R].
    """
    r, (h, slots) = len(order), (dy.shape[1], weights.shape[1])
    drows = _empty(dy, r, h)
    if r > 0:
        x = readable_rows(dy)
        columns, warps = _columns(h)
        with launch_on(dy, "combine_backward_rows"):
            _scale(
                dy.device.index, (r, cdiv(h, columns)),
                (x, _contiguous(weights), order.contiguous(), drows, x.stride(0), slots, h), (columns,),
                num_warps=warps,
            )  # fmt: skip
    return drows.to(dy.dtype)


def combine_backward_weights(dy: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """dweights, float32 [T, k]: the dot product of dy[t] and rows[places[t, s]], in an order of H and the dtype alone.

    dy: [T, H] and rows: [R, H], of one dtype; places: int64 [T, k].
    """
    return _dots_of(dy, rows, places, None)[0]


def combine_backward(dy: Tensor, weights: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """(drows [R, H], dweights): `combine_backward_rows` of the inverse of places, and `combine_backward_weights`.

    dy: [T, H], weights: [T, k], rows: [R, H], of dy's dtype; places: int64 [T, k], each row once.
    """
    dots, drows = _dots_of(dy, rows, places, weights)
    assert drows is not None
    return drows, dots


def _dots_of(dy: Tensor, rows: Tensor, places: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    (t, slots), h = places.shape, dy.shape[1]
    dots = torch.empty((t, slots), device=dy.device, dtype=torch.float32)
    drows = None if weights is None else _empty(dy, *rows.shape)
    if t > 0:
        (dy_rows, dy_stride), (x, stride), own_places = _rows(dy), _rows(rows), places.contiguous()
        w = dots if weights is None else _contiguous(weights)
        chunk, warps = row_chunk(h)
        tensors = dy_rows, x, own_places, dots, w, x if drows is None else drows
        numbers, constants = (dy_stride, stride, slots), (h, chunk, weights is not None)
        with launch_on(dy, "combine_backward_weights" if weights is None else "combine_backward"):
            _dots(dy.device.index, (t * slots,), (*tensors, *numbers), constants, num_warps=warps)
    return dots, None if drows is None else drows.to(dy.dtype)
