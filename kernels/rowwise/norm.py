"""LayerNorm and RMSNorm in Triton, forward and backward, with bits that depend on one row or one column alone.

    xhat = (x - mean) * rstd        (RMSNorm: x * rstd)
    y    = xhat * w + bias          (w = weight, or 1 + weight if zero_centered)
    dx   = (wdy - mean(wdy) - xhat * mean(wdy * xhat)) * rstd,  wdy = dy * w        (RMSNorm: without mean(wdy))
    dw   = sum over rows of dy * xhat,  db = sum over rows of dy

Sums along a row (`norm_forward`, `norm_backward_input`): one program per row. The order of its tree of additions
follows from how the compiler spreads a row over threads, and that from the chunk, the warps, the dtypes, and what it
knows of alignment. So the first two are functions of H, and `_rows` lets it know the same of every tensor of that H.

Sums over rows (the weight gradients) have two phases. `norm_weight_partial_sums` computes one partial sum for each
block of a fixed number of rows, adding row by row, and `fold_partial_sums` adds the partial sums one after another.
Neither mixes columns.

A backward pass is two launches, because a launch takes longer than a small norm: `norm_backward` computes dx and the
partial sums, in different programs, and `fold_weight_gradients` the gradients of weight and bias. On Hopper GPUs the
second is launched while the first runs.

All kernels run in fp32 and are launched with enable_fp_fusion=False: every multiplication and addition rounds on its
own, so no compiler's choice of where to fuse them can show, and the sums over rows equal a plain loop's in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import can_overlap, cdiv, empty, interpreting, launch_on, next_power_of_2
from ..plans import Kernel, Launch, run
from .norm_checks import as_rows, check, check_backward, check_fold, check_forward, check_rows_per_sum

MAX_SINGLE_CHUNK = 16384  # longer rows are walked in chunks of LOOP_CHUNK
LOOP_CHUNK = 8192
FOLD_COLUMNS, FOLD_AT_ONCE = 64, 32  # of a program of the fold, whose few columns must keep all multiprocessors busy


@triton.jit
def _load(ptr, cols, H: tl.constexpr, CHUNK: tl.constexpr):
    if H % CHUNK == 0:
        value = tl.load(ptr + cols)
    else:
        value = tl.load(ptr + cols, mask=cols < H, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _keep(value, cols, H: tl.constexpr, CHUNK: tl.constexpr):
    # Zero past the end of the row, so that it adds nothing to a sum, not even a NaN.
    return value if H % CHUNK == 0 else tl.where(cols < H, value, 0.0)


@triton.jit
def _load_centered(x_row, cols, mean, H: tl.constexpr, CHUNK: tl.constexpr, RMS: tl.constexpr):
    x = _load(x_row, cols, H, CHUNK)
    return x if RMS else x - mean


@triton.jit
def _load_factor(w_ptr, cols, H: tl.constexpr, CHUNK: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    w = _load(w_ptr, cols, H, CHUNK)
    return w + 1.0 if ZERO_CENTERED else w


@triton.jit
def _row(ptr, row, stride, H: tl.constexpr):
    # Where 16 does not divide H the stride is H (see _rows), of which the compiler knows whether 8 or 4 divides it.
    return ptr + row * (stride if H % 16 == 0 else H)


@triton.jit
def _mean(total, H: tl.constexpr):
    return tl.div_rn(tl.sum(total, axis=0), tl.full((), H, tl.float32))


# In the two kernels below a row of one chunk is a loop of one step, which the compiler folds away.
@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, stride_x, eps,
    H: tl.constexpr, CHUNK: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    # Between two loads of a row the compiler keeps it in registers, unless something is stored: KEEP stores last.
    row = tl.program_id(0).to(tl.int64)
    x_row = _row(x_ptr, row, stride_x, H)
    mean = tl.full((), 0.0, tl.float32)
    if not RMS:
        total = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, H, CHUNK):
            total += _load(x_row, start + tl.arange(0, CHUNK), H, CHUNK)
        mean = _mean(total, H)
        if not KEEP:
            tl.store(mean_ptr + row, mean)
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = _keep(_load_centered(x_row, cols, mean, H, CHUNK, RMS), cols, H, CHUNK)
        squares += x * x
    rstd = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(_mean(squares, H) + eps))
    if not KEEP:
        tl.store(rstd_ptr + row, rstd)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        xhat = _load_centered(x_row, cols, mean, H, CHUNK, RMS) * rstd
        y = xhat * _load_factor(w_ptr, cols, H, CHUNK, ZERO_CENTERED)
        if HAS_BIAS:
            y = y + _load(b_ptr, cols, H, CHUNK)
        tl.store(y_ptr + row * H + cols, y.to(y_ptr.dtype.element_ty), mask=cols < H)
    if KEEP:
        tl.store(rstd_ptr + row, rstd)
        if not RMS:
            tl.store(mean_ptr + row, mean)


@triton.jit
def _store_input_gradient(
    row, dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, stride_dy, stride_x,
    H: tl.constexpr, CHUNK: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    dy_row, x_row = _row(dy_ptr, row, stride_dy, H), _row(x_ptr, row, stride_x, H)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.full((), 0.0, tl.float32)
    if not RMS:
        mean = tl.load(mean_ptr + row)
    total_wdy = tl.zeros((CHUNK,), tl.float32)
    total_wdy_xhat = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        xhat = _load_centered(x_row, cols, mean, H, CHUNK, RMS) * rstd
        wdy = _load(dy_row, cols, H, CHUNK) * _load_factor(w_ptr, cols, H, CHUNK, ZERO_CENTERED)
        if not RMS:
            total_wdy += wdy
        total_wdy_xhat += _keep(wdy * xhat, cols, H, CHUNK)
    mean_wdy_xhat = _mean(total_wdy_xhat, H)
    mean_wdy = _mean(total_wdy, H)
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        xhat = _load_centered(x_row, cols, mean, H, CHUNK, RMS) * rstd
        wdy = _load(dy_row, cols, H, CHUNK) * _load_factor(w_ptr, cols, H, CHUNK, ZERO_CENTERED)
        if not RMS:
            wdy = wdy - mean_wdy
        dx = (wdy - xhat * mean_wdy_xhat) * rstd
        tl.store(dx_ptr + row * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def _store_partial_sums(
    sum_index, cols, dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, stride_dy, stride_x, T, rows_per_sum, with_bias,
    H: tl.constexpr, RMS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # HEADS equal parts of a row have a mean and an rstd each.
    inside = cols < H
    dw, db = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    end = tl.minimum(sum_index * rows_per_sum + rows_per_sum, T)
    # A column belongs to one thread, which adds the rows in this order whatever COLUMNS is. The loads of AT_ONCE rows
    # are under way at a time. A row past the end adds +0.0 to sums that are never -0.0, so it changes no bit.
    for start in range(sum_index * rows_per_sum, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            row = start + i
            loaded = inside & (row < end)
            dy = tl.load(_row(dy_ptr, row, stride_dy, H) + cols, mask=loaded, other=0.0).to(tl.float32)
            x = tl.load(_row(x_ptr, row, stride_x, H) + cols, mask=loaded, other=0.0).to(tl.float32)
            if HEADS == 1:
                part, exists = row, row < end
            else:
                part, exists = row * HEADS + tl.minimum(cols // (H // HEADS), HEADS - 1), loaded
            if not RMS:
                x = x - tl.load(mean_ptr + part, mask=exists, other=0.0)
            # product and sum round separately: see the top of this file
            dw += dy * (x * tl.load(rstd_ptr + part, mask=exists, other=0.0))
            db += dy
    sums = sums_ptr + sum_index * H * (1 + with_bias) + cols
    tl.store(sums, dw, mask=inside)
    tl.store(sums + H, db, mask=inside & (with_bias != 0))


@triton.jit(
    do_not_specialize=["mean_ptr", "rstd_ptr", "T", "rows_per_sum", "sum_programs", "row_programs", "with_bias"]
)
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, sums_ptr, stride_dy, stride_x, T, rows_per_sum, sum_programs,
    row_programs, with_bias,
    H: tl.constexpr, CHUNK: tl.constexpr, RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Each block of rows has sum_programs programs for its partial sums, then row_programs for its rows of dx: what one
    # of them loads is in a cache for the others. With none of the one kind the compiled kernel is still the same one,
    # so that dx has the same bits with and without partial sums.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the fold may be launched and wait
    block = tl.program_id(0) // (sum_programs + row_programs)
    program = tl.program_id(0) % (sum_programs + row_programs)
    if program < sum_programs:
        _store_partial_sums(
            block.to(tl.int64), program * COLUMNS + tl.arange(0, COLUMNS), dy_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr,
            stride_dy, stride_x, T, rows_per_sum, with_bias, H, RMS, COLUMNS, AT_ONCE, HEADS,
        )  # fmt: skip
    else:
        _store_input_gradient(
            (block * row_programs + program - sum_programs).to(tl.int64), dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr,
            dx_ptr, stride_dy, stride_x, H, CHUNK, RMS, ZERO_CENTERED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["L", "H"])
def _fold_kernel(
    sums_ptr, dw_ptr, db_ptr, L, H, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    # Programs (.., 0) fold the weight's half of each row, programs (.., 1) the bias's, if there is one.
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < H
    column = sums_ptr + tl.program_id(1) * H + cols
    stride = tl.num_programs(1).to(tl.int64) * H
    total = tl.zeros((COLUMNS,), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # until the partial sums are in memory
    for start in range(0, L, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # past the end +0.0 is added, which changes no bit, as above
            total += tl.load(column + (start + i) * stride, mask=inside & (start + i < L), other=0.0)
    if tl.program_id(1) == 0:
        tl.store(dw_ptr + cols, total.to(dw_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(db_ptr + cols, total.to(db_ptr.dtype.element_ty), mask=inside)


# Every operation rounds on its own: see the top of this file.
_forward = Kernel(_forward_kernel, enable_fp_fusion=False)
_backward = Kernel(_backward_kernel, enable_fp_fusion=False)
_fold = Kernel(_fold_kernel, enable_fp_fusion=False, num_warps=2)


def row_chunk(h: int) -> tuple[int, int]:
    """Chunk and warps, both functions of the row length alone."""
    chunk = max(16, next_power_of_2(h)) if h <= MAX_SINGLE_CHUNK else LOOP_CHUNK
    return chunk, min(16, max(1, chunk // 512))


def sums_tile(chunk: int, warps: int) -> tuple[int, int]:
    """Columns of a program of the partial sums, and how many rows it loads at once. A choice of speed alone.

    Short rows come in few programs, which have to wait little; those of long rows load more bytes at once.
    """
    if warps <= 4:
        return 64 * warps, 8 if warps == 4 else 16
    return (1024, 16 if warps == 8 else 8) if chunk <= 8192 else (2048, 8)


def keeps_row(h: int, rms: bool) -> bool:
    """Whether forward keeps a row in registers or loads it again, from a cache. A choice of speed alone.

    LayerNorm loads it three times, with a sum over all warps after each: 8192 x 8192 ran at 0.83 of a copy, RMSNorm at
    0.97. Kept, its 40 registers a thread still let three rows onto a multiprocessor, as many as before (34, rounded
    up); for shorter rows they would be fewer than before.
    """
    return not rms and 4096 < h <= MAX_SINGLE_CHUNK


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """[T, H] or [H], copied if it is not laid out as every tensor of this H must be, and its row stride.

    Copied too if torch negates it by a bit alone (z.conj().imag), which kernels do not see.
    Triton compiles apart for addresses, and strides, that are multiples of 16; another layout of threads and another
    order of additions may follow. So the address is one always, and the row stride is one if and only if H is.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if interpreting():
        tensor = tensor.float()  # the interpreter gets bfloat16 subnormals wrong: let it see fp32 only
    h = tensor.shape[-1]
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor, h
    # The stride of a dimension of one is arbitrary in torch, so it must not reach the kernel.
    stride = tensor.stride(0) if tensor.dim() == 2 and tensor.shape[0] > 1 else h
    usable = (tensor.stride(-1) == 1 or h == 1) and tensor.data_ptr() % 16 == 0
    if usable and (stride % 16 == 0 if h % 16 == 0 else stride == h):
        return tensor, stride
    return tensor.clone(memory_format=torch.contiguous_format), h


def _reading(*tensors: Tensor) -> tuple[Callable[..., tuple[Tensor, ...]], list[int]]:
    """A function that gives tensors of these layouts as `_rows` does, and their row strides."""
    rows, strides = zip(*[_rows(as_rows(x)) for x in tensors], strict=True)
    if all(row.data_ptr() == x.data_ptr() for row, x in zip(rows, tensors, strict=True)):
        return (lambda *xs: xs), list(strides)
    return (lambda *xs: tuple([_rows(as_rows(x))[0] for x in xs])), list(strides)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool, zero_centered: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(y, mean, rstd) of LayerNorm, or of RMSNorm if `rms`, over the last dimension; one row's bits never see another.

    x: [.., H], any strides, of T rows; T may be 0. weight: [H]. bias: [H] or None. Each bfloat16, float16 or float32.
    y: shaped as x, contiguous, of out_dtype or of x's dtype. mean (None if `rms`) and rstd: float32 [T].
    LayerNorm's variance is mean((x - mean)**2), in a second pass over the row. Raises TypeError for a dtype and
    ValueError for a shape, a device or an eps that does not fit.
    """
    return run(_prepare_forward, (x, weight, bias), eps, rms, zero_centered, out_dtype)  # type: ignore[no-any-return]


def _prepare_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool, zero_centered: bool,
    out_dtype: torch.dtype | None,
) -> Callable:  # fmt: skip
    check_forward("norm_forward", x, weight, bias, eps, out_dtype)
    shape, device, h = x.shape, x.device, x.shape[-1]
    t, out_dtype = x.numel() // h, out_dtype or x.dtype
    stored = torch.float32 if interpreting() else out_dtype
    if t > 0:
        launch_on(x, "norm_forward")
        chunk, warps = row_chunk(h)
        constants = (h, chunk, rms, zero_centered, bias is not None, keeps_row(h, rms))
        launch = Launch(_forward, x.get_device(), (t,), constants, num_warps=warps)
        read, (stride, *_) = _reading(x, weight, weight if bias is None else bias)

    new_y, new_statistic = empty(shape, stored, device), empty((t,), torch.float32, device)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        y, rstd = new_y(), new_statistic()
        mean = rstd if rms else new_statistic()
        if t > 0:
            launch(*read(x, weight, weight if bias is None else bias), y, mean, rstd, stride, float(eps))
        return y if stored is out_dtype else y.to(out_dtype), None if rms else mean, rstd

    return call


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, rows_per_sum: int, rms: bool,
    zero_centered: bool, with_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `norm_backward_input` and `norm_weight_partial_sums` return, from one launch."""
    options = "norm_backward", rms, zero_centered, rows_per_sum, with_bias
    return run(_prepare_backward, (dy, x, weight, mean, rstd), *options)  # type: ignore[no-any-return]


def norm_backward_input(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, rms: bool, zero_centered: bool
) -> Tensor:
    """dx, like x, contiguous; one row's bits never see another. See the top of this file for the formula.

    dy, x: [.., H], of T rows; weight: [H]; each bfloat16, float16 or float32, any strides. mean (None if `rms`) and
    rstd: float32 [T], from `norm_forward`. Raises TypeError for a dtype and ValueError for a shape or a device that
    does not fit.
    """
    options = "norm_backward_input", rms, zero_centered, None, False
    return run(_prepare_backward, (dy, x, weight, mean, rstd), *options)[0]  # type: ignore[no-any-return]


def norm_weight_partial_sums(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, *, rows_per_sum: int, rms: bool, with_bias: bool
) -> Tensor:
    """Partial sums for dweight, float32 [ceil(T / rows_per_sum), H], or with_bias [.., 2 * H]: those for dbias beside
    them. `fold_weight_gradients` takes them. Columns are independent.

    Partial sum s starts from +0.0 and adds, in row order, dy * xhat (for dbias: dy) of rows s * rows_per_sum to
    (s + 1) * rows_per_sum - 1; the product is rounded to fp32 before it is added. Arguments and errors as for
    `norm_backward_input`; rows_per_sum below 1 raises ValueError. mean and rstd may be [T, heads]: then a row consists
    of `heads` equal parts, the heads of one token, and each part is normalised separately.
    """
    options = "norm_weight_partial_sums", rms, False, rows_per_sum, with_bias
    return run(_prepare_backward, (dy, x, None, mean, rstd), *options)[1]  # type: ignore[no-any-return]


def norm_backward_of_heads(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *, rows_per_sum: int, rms: bool,
    zero_centered: bool, folded: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx and dweight of a norm over each head of x [.., heads, H], contiguous like dy: `norm_backward_input`, and one
    partial sum for each head over all tokens, in blocks of rows_per_sum; dweight is their sum in head order. Not
    `folded`: those sums instead of dweight, float32 [heads, H]."""
    options = rows_per_sum, rms, zero_centered, folded
    return run(_prepare_of_heads, (dy, x, weight, mean, rstd), *options)  # type: ignore[no-any-return]


def _prepare_of_heads(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, rows_per_sum: int, rms: bool,
    zero_centered: bool, folded: bool,
) -> Callable:  # fmt: skip
    heads, h = x.shape[-2:]

    def of_tokens(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor | None, ...]:
        by_head = [None if t is None else t.view(-1, heads) for t in (mean, rstd)]
        return dy.view(-1, heads * h), x.view(-1, heads * h), None, *by_head

    tokens = of_tokens(dy, x, mean, rstd)
    sum_blocks = _prepare_backward(*tokens, "norm_weight_partial_sums", rms, False, rows_per_sum, False)  # type: ignore[arg-type]
    blocks = torch.empty(cdiv(len(tokens[0]), rows_per_sum), heads * h, device=x.device)  # type: ignore[arg-type]
    fold_blocks = _prepare_fold(blocks, "fold_partial_sums", None, None)
    fold_heads = _prepare_fold(blocks.new_empty(heads, h), "fold_partial_sums", weight.dtype, None)
    differentiate = _prepare_backward(
        dy, x, weight, mean, rstd, "norm_backward_input", rms, zero_centered, None, False
    )  # fmt: skip

    def call(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
        sums = fold_blocks(sum_blocks(*of_tokens(dy, x, mean, rstd))[1])[0].view(heads, h)
        dx = differentiate(dy, x, weight, mean, rstd)[0]
        return dx, fold_heads(sums)[0] if folded else sums

    return call


def _prepare_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor, operation: str, rms: bool,
    zero_centered: bool, rows_per_sum: int | None, with_bias: bool,
) -> Callable:  # fmt: skip
    """What gives dx, empty if weight is None, and the partial sums, empty if rows_per_sum is."""
    heads = check_backward(operation, dy, x, mean, rstd, rms, heads=weight is None)
    device, dtype, h = x.device, x.dtype, x.shape[-1]
    t = x.numel() // h
    if weight is not None:
        check(operation, "weight", weight, (h,), x)
    if rows_per_sum is not None:
        check_rows_per_sum(operation, rows_per_sum)
    rows, count = 0 if weight is None else t, 0 if rows_per_sum is None else cdiv(t, rows_per_sum)
    shape, of_sums = (0, h) if weight is None else x.shape, (count, 2 * h if with_bias else h)
    stored = torch.float32 if interpreting() else dtype
    if t > 0:
        launch_on(x, operation)
        read, (dy_stride, x_stride, _) = _reading(dy, x, x if weight is None else weight)
        dense = all(sums is None or sums.is_contiguous() for sums in (mean, rstd))
        chunk, warps = row_chunk(h)
        columns, at_once = sums_tile(chunk, warps)
        sum_programs = cdiv(h, columns) if count else 0
        block = rows_per_sum or t
        numbers = dy_stride, x_stride, t, block, sum_programs, block if rows else 0, int(with_bias)
        constants = h, chunk, rms, zero_centered, columns, at_once, heads, can_overlap(device.index)
        grid = (count * sum_programs + rows,)
        launch = Launch(_backward, x.get_device(), grid, constants, num_warps=warps)

    new_dx, new_sums = empty(shape, stored, device), empty(of_sums, torch.float32, device)

    def call(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
        dx, sums = new_dx(), new_sums()
        if t > 0:
            if not dense or rstd.is_neg():
                mean, rstd = None if mean is None else _contiguous(mean), _contiguous(rstd)
            means = rstd if rms or mean is None else mean
            launch(*read(dy, x, x if weight is None else weight), means, rstd, dx, sums, *numbers)
        return dx if stored is dtype else dx.to(dtype), sums

    return call


def fold_partial_sums(partial_sums: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The sum of float32 partial sums [L, H] as [H] of out_dtype, or float32: adds rows 0, 1, .. in order to +0.0, and
    rounds once; zeros if L is 0.

    Raises TypeError for another dtype and ValueError for another shape.
    """
    return run(_prepare_fold, (partial_sums,), "fold_partial_sums", out_dtype, None)[0]  # type: ignore[no-any-return]


def fold_weight_gradients(
    partial_sums: Tensor, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """(dweight, dbias) from `norm_weight_partial_sums`, each as `fold_partial_sums` gives it, from one launch.

    bias_dtype is None, and so is dbias, if the partial sums are without those of the bias.
    """
    options = "fold_weight_gradients", weight_dtype, bias_dtype
    return run(_prepare_fold, (partial_sums,), *options)  # type: ignore[no-any-return]


def _prepare_fold(
    sums: Tensor, operation: str, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> Callable:
    check_fold(operation, sums, weight_dtype, bias_dtype)
    launch_on(sums, operation)
    halves, device, dense = 1 if bias_dtype is None else 2, sums.device, sums.is_contiguous()
    count, h = sums.shape[0], sums.shape[1] // halves
    dtypes = (weight_dtype or torch.float32, bias_dtype)[:halves]
    overlap = can_overlap(device.index)
    options = {"launch_pdl": True} if overlap else {}
    grid, constants = (cdiv(h, FOLD_COLUMNS), halves), (FOLD_COLUMNS, FOLD_AT_ONCE, overlap)
    launch = Launch(_fold, sums.get_device(), grid, constants, **options)

    new_outs = [empty((h,), dtype, device) for dtype in ([torch.float32] * halves if interpreting() else dtypes)]  # type: ignore[arg-type]

    def call(sums: Tensor) -> tuple[Tensor, Tensor | None]:
        outs = [new() for new in new_outs]
        launch(sums if dense and not sums.is_neg() else _contiguous(sums), outs[0], outs[-1], count, h)
        if interpreting():
            outs = [out.to(dtype) for out, dtype in zip(outs, dtypes, strict=True)]
        return outs[0], outs[1] if halves == 2 else None

    return call
