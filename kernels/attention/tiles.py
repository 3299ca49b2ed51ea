"""Shared by attention's forward and backward kernels: tile sizes, the range of keys, the layout of rows in memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..plans import described
from .spec import LOG2_E, AttentionSpec, PackedLengths

HEAD_DIMS = (16, 32, 64, 128, 256)  # the kernels take other sizes as the next of these, with zeros behind
_ALIGNMENT = 16  # bytes; of a TMA base address and of its row stride
_MAX_SIDE = 2**31 - 1  # TMA coordinates are 32-bit
BOOL, FLOAT = 1, 2  # a kernel's MATRIX


class Tile(NamedTuple):
    """The queries and keys of a step, the number of warps, and the number of pipeline stages for loads."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def forward_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """A function of head size and dtype alone: keys and warps decide the order in which a row's weights are summed."""
    if dtype == torch.float32:
        return Tile(64, 32, 4, 2) if head_dim <= 64 else Tile(64, 16, 8, 1)  # 4 warps at 128 spill 16000 registers
    if head_dim > 128:
        return Tile(64, 64, 8, 2)
    return Tile(64, 128, 4, 2) if head_dim >= 64 else Tile(64, 64, 4, 3)


@functools.cache
def has_room(index: int | None) -> bool:
    """Whether a program may use more than 160 KiB of shared memory: on Hopper, and on Blackwell in servers."""
    return index is not None and torch.version.hip is None and torch.cuda.get_device_capability(index)[0] in (9, 10)


def backward_key_tiles(
    head_dim: int, dtype: torch.dtype, *, causal: bool, aligned: bool, room: bool
) -> tuple[tuple[Tile, bool, bool], ...]:
    """dk and dv: a program holds `keys` keys and loops over the queries. A matter of speed only.

    Returns the tile of each launch, and whether it computes dk, and dv. Heads of 256 have one for each: both sums would
    not fit into registers, and two groups of warps that share their columns would each compute all scores.

    aligned: whether TMA reads each query's log-sum-exp and delta; without it a causal loop spills in larger tiles.
    room: as `has_room` says, and no mask of more than 16 bits, which goes through shared memory, too.
    """
    if dtype == torch.float32:
        tile = Tile(32, 32, 4, 1) if head_dim <= 128 else Tile(16, 32, 8, 1)
    elif head_dim <= 64:
        tile = Tile(64, 64, 4, 3)
    elif head_dim <= 128:
        tile = Tile(64, 64, 4, 2) if aligned or not causal else Tile(32, 64, 4, 3)
    elif room:
        return (Tile(64, 128, 8, 2), False, True), (Tile(32, 128, 8, 2), True, False)
    else:
        tile = Tile(32, 64, 8, 2)
    return ((tile, True, True),)


def backward_query_tile(head_dim: int, dtype: torch.dtype, *, causal: bool, partly: bool, room: bool) -> Tile:
    """dq: a program holds `queries` queries and loops over the keys. A matter of speed only.

    partly: whether a window or a mask hides keys. With a window a small tile sees fewer keys in vain; with a mask the
    compiler would have each product of the larger one wait for the one before.
    """
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if head_dim <= 128 else Tile(32, 16, 8, 1)
    if head_dim <= 64:
        return Tile(64, 64, 4, 3) if causal or partly else Tile(128, 64, 8, 3)
    if head_dim <= 128:
        return Tile(64, 64, 4, 2) if partly else Tile(128, 64, 8, 3)
    return Tile(128, 32, 8, 3) if room else Tile(64, 32, 8, 2)


# --- in a kernel ----------------------------------------------------------------------------------------------------


@triton.jit
def sequence(cu_ptr, index, length, PACKED: tl.constexpr):
    """The start and length of sequence `index`: read from cu_ptr if sequences are packed, else 0 and `length`."""
    if PACKED:
        start = tl.load(cu_ptr + index)
        return start, tl.load(cu_ptr + index + 1) - start
    return 0, length


@triton.jit
def sequence_of_keys(cu_ptr, index, length, PACKED: tl.constexpr):
    """The same of keys: the start of the first chunk, its keys and those that follow, and how many of the first ones
    were dropped. If some may have been (PACKED is 2), the row of a dropped key has other data, or none."""
    if PACKED == 2:
        start = tl.load(cu_ptr + 2 * index)
        dropped = tl.load(cu_ptr + 2 * index + 1)
        return start - dropped, tl.load(cu_ptr + 2 * index + 2) - start + dropped, dropped
    start, keys = sequence(cu_ptr, index, length, PACKED)
    return start, keys, 0


@triton.jit
def tile_of(program, tiles, heads, sequences):
    """The tile, head and sequence of a program: by groups of heads, whose data stays in the cache, then by tiles."""
    GROUP: tl.constexpr = 16
    group = program // (tiles * GROUP)
    size = tl.minimum(heads * sequences - group * GROUP, GROUP)
    in_group = program - group * tiles * GROUP
    pair = group * GROUP + in_group % size
    return in_group // size, pair % heads, pair // heads


@triton.jit
def load_tokens(desc, row, column, offset, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CLIPPED: tl.constexpr):
    """BLOCK rows from `row` on and the head's columns from `offset` on, of a descriptor that `Rows` describes."""
    if CLIPPED:
        return tl.reshape(desc.load([row, column, offset]), (BLOCK, COLUMNS))
    else:
        return desc.load([row, column + offset])


@triton.jit
def load_paged_tokens(
    ptr, pages_ptr, stride_page, stride_token, start, offset, keys,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, CLIPPED: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The same of keys in pages of PAGE rows: of the head at `ptr`, from key `start` on; 0 past the last key.

    Strides are in units of 16 bytes, UNIT elements. SIZE: the head's columns, if CLIPPED.
    """
    key = start + tl.arange(0, BLOCK)
    column = offset + tl.arange(0, COLUMNS)
    there = key < keys
    page = tl.load(pages_ptr + key // PAGE, mask=there, other=0).to(tl.int64)
    at = (page * stride_page + (key % PAGE) * stride_token) * UNIT
    inside = there[:, None]
    if CLIPPED:
        inside = inside & (column < SIZE)[None, :]
    return tl.load(ptr + at[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def capped(scores, inverse_cap, SOFTCAP: tl.constexpr):
    """With a softcap tanh(scores * inverse_cap), else scores; the exponent's factor multiplies by the cap."""
    if SOFTCAP:
        x = scores * inverse_cap
        # for small x the formula with exp cancels, while the series has a relative error of 3e-7
        square = x * x
        series = tl.fma(square, 62.0 / 2835.0, -17.0 / 315.0)
        series = tl.fma(series, square, 2.0 / 15.0)
        series = tl.fma(series, square, -1.0 / 3.0)
        series = tl.fma(series, square * x, x)
        return tl.where(square < 0.1225, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))
    return scores


@triton.jit
def seen(position, key, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the query at `position` sees `key`; the two broadcast."""
    see = key < keys
    if CAUSAL:
        see = see & (key <= position)
    if WINDOW:
        see = see & (position - key < window)
    return see


@triton.jit
def matrix_rows(matrix_ptr, at, UNIT: tl.constexpr):
    """Pointers to rows of a mask's matrix, `at` so many units from its first element; see `matrix_unit`."""
    if UNIT > 1 or UNIT < -1:
        SIZE: tl.constexpr = UNIT if UNIT > 0 else -UNIT
        return tl.multiple_of(matrix_ptr + at * SIZE, SIZE * (matrix_ptr.dtype.element_ty.primitive_bitwidth // 8))
    else:
        return matrix_ptr + at


@triton.jit
def with_matrix(
    scores, factor, row_ptr, key, stride_k, keys, MATRIX: tl.constexpr, UNIT: tl.constexpr, EDGE: tl.constexpr
):
    """Scores with a mask's matrix: BOOL: -inf where it hides a key; FLOAT: scaled by `factor`, plus its bias.

    row_ptr, key: broadcast to the scores. EDGE: there may be keys past the last, whose scores are then any.
    """
    if UNIT != 0:
        SIZE: tl.constexpr = UNIT if UNIT > 0 else -UNIT
        # the rest of a vector that holds the last key is read too, so that the whole vector has one predicate
        given = tl.load(row_ptr + key, mask=key // SIZE * SIZE < keys, other=0) if EDGE else tl.load(row_ptr + key)
    else:
        at = row_ptr + key.to(tl.int64) * stride_k
        given = tl.load(at, mask=key < keys, other=0) if EDGE else tl.load(at)
    if MATRIX == 1:
        return tl.where(given != 0, scores, float("-inf"))
    return tl.fma(scores, factor, given.to(tl.float32))


@triton.jit
def biased_exponent(scores):
    """The exponents of 2 of scores that have their biases.

    Only -inf hides: a score as low as float32's lowest number stays finite, so that a row with such biases alone has
    equal weights, as in torch.
    """
    exponent = scores * 1.4426950408889634
    lowest = -3.4028234663852886e38
    exponent = tl.where(exponent < lowest, lowest, exponent)  # tl.maximum drops NaN
    return tl.where(scores == float("-inf"), scores, exponent)


@triton.jit
def key_phases(first, last, keys, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The key blocks that queries at positions first .. last see: whole in [clear, full), else partly.

    Returns low, clear, full, high; all but high are multiples of BLOCK.
    """
    low = 0
    high = keys
    whole = keys  # all queries see the keys before this one
    clear = low
    if CAUSAL:
        high = tl.minimum(keys, last + 1)
        whole = tl.minimum(keys, first + 1)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // BLOCK * BLOCK
        clear = (tl.maximum(last - window + 1, 0) + BLOCK - 1) // BLOCK * BLOCK
    full = tl.maximum(whole, 0) // BLOCK * BLOCK
    clear = tl.minimum(clear, tl.maximum(high, 0))
    return low, clear, tl.maximum(full, clear), tl.maximum(high, 0)


# --- on the host ----------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A tensor [B, H, S, D] as a matrix that TMA can address: element (b, h, s, d) is in row b * row_batch + h *
    row_head + s and column b * column_batch + h * column_head + d.

    If D is no head size of the kernels, the matrix has three dimensions, the last of size D, so that TMA gives zeros
    for columns past it: d is then the place in the last one, and the rest of the column that in the middle one.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row_batch: int
    row_head: int
    column_batch: int
    column_head: int

    def described(self, x: Tensor, block: tuple[int, int], make: Any = TensorDescriptor) -> Callable[[Tensor], Any]:
        """plans.described of x."""
        return described(x, self.shape, self.strides, block if len(self.shape) == 2 else (block[0], 1, block[1]), make)

    @property
    def places(self) -> tuple[int, int, int, int]:
        return self[2:]


def aligned_flat(x: Tensor) -> Tensor:
    """x, or a copy of it that is contiguous and begins at a multiple of 16 bytes; see `aligned` about negated views."""
    x = x.resolve_neg()
    return x if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def aligned(x: Tensor) -> Tensor:
    """x [B, H, S, D], or a contiguous copy of it where a row does not begin at a multiple of 16 bytes.

    Copied too if torch negates it by a bit alone (z.conj().imag), which kernels do not see.
    """
    x = x.resolve_neg()
    batch, head, token, one = x.stride()
    if one != 1 or x.data_ptr() % _ALIGNMENT or (batch | head | token) % (_ALIGNMENT // x.element_size()):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def unit_strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of x's batch, head and token in units of 16 bytes, so that the compiler knows how they align."""
    unit = _ALIGNMENT // x.element_size()
    batch, head, token, _ = x.stride()
    return batch // unit, head // unit, token // unit


def _rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> Rows | None:
    batch, heads, tokens, size = shape
    stride_b, stride_h, stride_s, _ = strides
    clipped = size not in HEAD_DIMS
    if strides == (heads * tokens * size, tokens * size, size, 1):
        middle = (1,) * clipped
        return Rows(
            (batch * heads * tokens, *middle, size),
            (size, *(size * x for x in middle), 1),
            heads * tokens,
            tokens,
            0,
            0,
        )
    if tokens > 1 and stride_s >= size:
        row_b, column_b = divmod(stride_b, stride_s) if batch > 1 else (0, 0)
        row_h, column_h = divmod(stride_h, stride_s) if heads > 1 else (0, 0)
        rows = (batch - 1) * row_b + (heads - 1) * row_h + tokens
        columns = (batch - 1) * column_b + (heads - 1) * column_h + size
        if columns <= stride_s and rows <= _MAX_SIDE:
            if clipped:
                step = math.gcd(column_b, column_h) or size
                if stride_s % step:  # CUDA asks that each stride is a multiple of the one before
                    return None
                sides = rows, (columns - size) // step + 1, size
                return Rows(sides, (stride_s, step, 1), row_b, row_h, column_b // step, column_h // step)
            return Rows((rows, columns), (stride_s, 1), row_b, row_h, column_b, column_h)
    return None


def as_matrix(x: Tensor) -> Tensor:
    """x as `aligned` gives it, or a contiguous copy of it if it is not a matrix of `Rows`."""
    x = aligned(x)
    return x if _rows(x.shape, x.stride()) is not None else x.clone(memory_format=torch.contiguous_format)


def rows_of(x: Tensor) -> Rows:
    """x comes from `as_matrix`."""
    rows = _rows(x.shape, x.stride())
    assert rows is not None
    return rows


def taken(takes: Sequence[Callable], tensors: Sequence[Tensor | None]) -> tuple[list[Any], Callable[..., Sequence]]:
    """What each of `takes` makes of its tensor, and a function that does so with tensors of the same layouts.

    It gives them as they are where that is what they are made of.
    """

    def take(*tensors: Tensor | None) -> list[Any]:
        return [x if x is None else function(x) for function, x in zip(takes, tensors, strict=True)]

    made = take(*tensors)
    return made, (lambda *tensors: tensors) if all(map(operator.is_, made, tensors)) else take


def padded_head_dim(head_dim: int) -> int:
    """The kernels' head size for one of `head_dim`, which is at most the largest."""
    return next(size for size in HEAD_DIMS if head_dim <= size)


def taken_head_dim(head_dim: int, dtype: torch.dtype) -> int:
    """The head size that tensors must have: head_dim if rows can begin at multiples of 16 bytes, else the kernels'."""
    padded = padded_head_dim(head_dim)
    return head_dim if head_dim * dtype.itemsize % _ALIGNMENT == 0 else padded


def pad_heads(x: Tensor, head_dim: int) -> Tensor:
    """x [.., D] with columns of zeros up to head_dim: they add nothing to a score, and their output is cut off."""
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def _strides_of_matrix(mask: Tensor) -> list[int]:
    return [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]


def matrix_unit(mask: Tensor) -> int:
    """How the kernels read a mask [B, Hq, Sq, Sk]: 0 if keys are not adjacent, else the elements of the largest vector,
    of at most 16 bytes, in whose multiples all rows begin; negative if all queries of a head have one row."""
    *rows, of_key = _strides_of_matrix(mask)
    if of_key != 1:
        return 0
    size = mask.element_size()
    unit = max(1, math.gcd(_ALIGNMENT, mask.data_ptr(), *(stride * size for stride in rows)) // size)
    return unit if rows[2] else -unit


def matrix_strides(mask: Tensor | None, unit: int = 1) -> tuple[int | None, ...]:
    """The strides of a mask [B, Hq, Sq, Sk] as the kernels take them, those of rows in units.

    Raises:
        ValueError: a stride that has more than 32 bits.
    """
    if mask is None:
        return (None,) * 4
    *rows, of_key = _strides_of_matrix(mask)
    strides = *(stride // max(abs(unit), 1) for stride in rows), of_key
    if max(strides) > _MAX_SIDE:
        raise ValueError(
            f"mask has strides {mask.stride()}: at most {_MAX_SIDE} is allowed; give it a size of 1 where it repeats, "
            "or fewer sequences at a time"
        )
    return strides


def as_numbers(mask: Tensor) -> Tensor:
    """A mask as the kernels take it, without a view that torch negates."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask.resolve_neg()


class Problem(NamedTuple):
    """A call's sizes and options in the form that the kernels take."""

    kv_heads: int
    sequences: int
    longest_q: int
    longest_k: int
    window: int
    factor: float  # multiplies a (capped) score: in the exponent of 2, or before a bias is added
    inverse_cap: float  # scale / softcap
    flags: tuple[bool, bool, bool, int]  # CAUSAL, WINDOW, SOFTCAP, PACKED: 2 with dropped keys
    sinks: bool
    matrix: int  # 0, BOOL or FLOAT: how the kernels read a mask
    matrix_dtype: torch.dtype | None
    matrix_unit: int  # as `matrix_unit` says

    @property
    def exponent(self) -> float:
        """What multiplies scores, with their biases if there are any, in the exponent of 2."""
        return LOG2_E if self.matrix == FLOAT else self.factor


def as_options(spec: AttentionSpec, lengths: PackedLengths | None) -> tuple[tuple, tuple]:
    """The two tensors of a call's lengths, and its numbers, which `from_options` takes."""
    numbers = spec.causal, spec.scale, spec.window, spec.softcap
    if lengths is None:
        return (None, None), (*numbers, 0, 0)
    return (lengths.cu_q, lengths.cu_k), (*numbers, lengths.max_q, lengths.max_k)


def from_options(
    cu_q: Tensor | None, cu_k: Tensor | None, causal: bool, scale: float, window: int, softcap: float, *longest: int
) -> tuple[AttentionSpec, PackedLengths | None]:
    """The inverse of `as_options`."""
    packed = cu_q is not None and cu_k is not None
    return AttentionSpec(causal, scale, window, softcap), PackedLengths(cu_q, cu_k, *longest) if packed else None


def tile_for(p: Problem, tile: Tile, index: int | None) -> Tile:
    """With fewer stages if there is a mask, whose matrix goes through shared memory, too. A matter of speed only."""
    return tile._replace(stages=min(tile.stages, 2 if has_room(index) else 1)) if p.matrix else tile


def problem(
    q: Tensor,
    k: Tensor,
    spec: AttentionSpec,
    lengths: PackedLengths | None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Problem:
    """spec.scale is positive: the kernels take the maximum before they scale."""
    capped_scores = spec.softcap != 0.0
    longest_k = k.shape[2] if lengths is None else lengths.max_k
    matrix = 0 if mask is None else BOOL if mask.dtype == torch.bool else FLOAT
    return Problem(
        k.shape[1],
        q.shape[0] if lengths is None else lengths.cu_q.shape[0] - 1,
        q.shape[2] if lengths is None else lengths.max_q,
        longest_k,
        min(spec.window, max(longest_k, 1)),  # a longer one hides no more, and might overflow 32 bits
        (spec.softcap if capped_scores else spec.scale) * (1.0 if matrix == FLOAT else LOG2_E),
        spec.scale / spec.softcap if capped_scores else 0.0,
        (spec.causal, spec.window > 0, capped_scores, 0 if lengths is None else lengths.packing),
        sinks is not None,
        matrix,
        None if mask is None else mask.dtype,
        0 if mask is None else matrix_unit(mask),
    )
