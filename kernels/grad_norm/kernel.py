"""The kernels of gradient clipping in Triton: sums of squares by slice, their sum, and scaling; many tensors a launch.

reference.py states the order of each sum. These kernels follow it with explicit lanes and an explicit tree, so that the
bits equal a CPU's: no choice of the compiler, no tile and no alignment can change them. Kernels run with
enable_fp_fusion=False.

A model has hundreds of gradients, and one launch for each would take longer than the sums. So one launch processes all
gradients of one dtype and layout. It reads two tables: their addresses, built for each call, and their shapes, cached.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..cached_tensors import capturing, hold_until_read, refuse_in_capture
from ..launch import cdiv, interpreting, launch_on
from ..plans import Kernel
from .reference import FOLDED, LANES, MIX1, MIX2, STEP

_LANES, _LEVELS = tl.constexpr(LANES), tl.constexpr(LANES.bit_length() - 1)
# How a slice's elements lie in memory: consecutive; one in each row; in several runs; or the slice has one element.
_ROWS, _COLUMNS, _STRETCHES, _SINGLE = 0, 1, 2, 3
_IS_ROWS, _IS_COLUMNS, _IS_SINGLE = tl.constexpr(_ROWS), tl.constexpr(_COLUMNS), tl.constexpr(_SINGLE)
_SLICES_PER_PROGRAM = {_ROWS: 16, _COLUMNS: 64, _STRETCHES: 16, _SINGLE: 1024}
_SCALED = 4096  # elements of a program
_STEP, _MIX1, _MIX2 = tl.constexpr(STEP), tl.constexpr(MIX1), tl.constexpr(MIX2)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _tree(lanes, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """[COUNT, 2 ** LEVELS] -> [COUNT]: neighbours first."""
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(lanes, (COUNT, 2 ** (LEVELS - level - 1), 2)))
        lanes = left + right
    return tl.reshape(lanes, (COUNT,))


@triton.jit
def _squares_kernel(
    addresses_ptr, shapes_ptr, tiles_ptr, out_ptr, like_ptr,
    SLICES: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    which = tl.load(tiles_ptr + 2 * tile)
    indices = tl.load(tiles_ptr + 2 * tile + 1).to(tl.int64) * SLICES + tl.arange(0, SLICES)
    shape = shapes_ptr + 4 * which
    outer, slices, inner, at = tl.load(shape), tl.load(shape + 1), tl.load(shape + 2), tl.load(shape + 3)
    x = tl.load(addresses_ptr + which).to(tl.pointer_type(like_ptr.dtype.element_ty))
    if VECTOR > 1:
        x = tl.multiple_of(x, 16)
        slices = slices if KIND == _IS_ROWS else tl.multiple_of(slices, VECTOR)
        inner = tl.multiple_of(inner, VECTOR) if KIND == _IS_ROWS else inner
    inside = indices < slices
    if KIND == _IS_SINGLE:
        value = tl.load(x + indices, mask=inside, other=0).to(tl.float32)
        sums = value * value
    elif KIND == _IS_COLUMNS:
        lanes = tl.zeros((_LANES, SLICES), tl.float32)
        for start in tl.range(0, outer, _LANES):
            j = start + tl.arange(0, _LANES)
            part = tl.load(
                x + j[:, None] * slices + indices[None, :], mask=(j < outer)[:, None] & inside[None, :], other=0
            )
            value = part.to(tl.float32)
            lanes += value * value
        sums = _tree(tl.trans(lanes), SLICES, _LEVELS)
    else:
        lanes = tl.zeros((SLICES, _LANES), tl.float32)
        for start in tl.range(0, outer * inner, _LANES, loop_unroll_factor=4):
            j = start + tl.arange(0, _LANES)
            if KIND == _IS_ROWS:
                place = indices[:, None] * inner + j[None, :]
            else:
                place = (j // inner * slices * inner + j % inner)[None, :] + indices[:, None] * inner
            value = tl.load(x + place, mask=inside[:, None] & (j < outer * inner)[None, :], other=0).to(tl.float32)
            lanes += value * value
        sums = _tree(lanes, SLICES, _LEVELS)
    tl.store(out_ptr + at + indices, sums, mask=inside)


@triton.jit
def _fold_kernel(v_ptr, out_ptr, COUNT: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.zeros((1, _LANES), tl.float32)
    for start in tl.static_range(0, COUNT, _LANES):
        lanes += tl.load(v_ptr + row.to(tl.int64) * COUNT + start + tl.arange(0, _LANES))[None, :]
    tl.store(out_ptr + row + tl.arange(0, 1), _tree(lanes, 1, _LEVELS))


@triton.jit
def _part_of_program(addresses_ptr, sizes_ptr, tiles_ptr, like_ptr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Of the tensor that this program works on: its number, its address, the program's elements, which of them exist.

    VECTOR: elements of 16 bytes, if the address and the size are multiples of them; else 1.
    """
    tile = tl.program_id(0)
    which = tl.load(tiles_ptr + 2 * tile)
    at = tl.load(tiles_ptr + 2 * tile + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(sizes_ptr + which)
    x = tl.load(addresses_ptr + which).to(tl.pointer_type(like_ptr.dtype.element_ty))
    if VECTOR > 1:
        x = tl.multiple_of(x, 16)
        size = tl.multiple_of(size, VECTOR)
    return which, x, at, at < size


@triton.jit
def _scale_kernel(
    addresses_ptr, sizes_ptr, tiles_ptr, factor_ptr, like_ptr, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        _, x, at, inside = _part_of_program(addresses_ptr, sizes_ptr, tiles_ptr, like_ptr, BLOCK, VECTOR)
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        tl.store(x + at, (value * factor).to(like_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _digest_kernel(addresses_ptr, sizes_ptr, tiles_ptr, out_ptr, like_ptr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    which, x, at, inside = _part_of_program(addresses_ptr, sizes_ptr, tiles_ptr, like_ptr, BLOCK, VECTOR)
    z = tl.load(x + at, mask=inside, other=0).to(tl.int64) + (at + which.to(tl.int64) * 2**40 + 1) * _STEP
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    z = tl.where(inside, z ^ (z >> 31), 0)
    tl.atomic_add(out_ptr + which, tl.sum(z, axis=0))


_squares = Kernel(_squares_kernel, enable_fp_fusion=False)
_digest = Kernel(_digest_kernel, enable_fp_fusion=False)
_fold = Kernel(_fold_kernel, enable_fp_fusion=False)
_scale = Kernel(_scale_kernel, enable_fp_fusion=False)

# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LaunchGroup:
    """The tensors of one launch. tiles: int32 [programs, 2], the tensor's index and the index of the program in it."""

    first: int
    tiles: Tensor
    kind: int
    vector: int


def _group(kinds: Sequence[tuple], programs: Sequence[int], device: torch.device) -> list[_LaunchGroup]:
    """One for each of `kinds`, which end in (.., kind, vector); programs: how many each tensor has."""
    members_of: dict[tuple, list[int]] = {}
    for i, kind in enumerate(kinds):
        members_of.setdefault(kind, []).append(i)
    groups = []
    for kind, members in members_of.items():
        counts = [programs[i] for i in members]
        numbers = torch.repeat_interleave(_int64(members), _int64(counts))
        if len(numbers):
            which = torch.cat([torch.arange(count, device="cpu") for count in counts])
            tiles = torch.stack([numbers, which], dim=1).to(torch.int32).to(device)
            groups.append(_LaunchGroup(members[0], tiles, *kind[-2:]))
    return groups


@functools.lru_cache(maxsize=32)
def _slice_plan(facts: tuple, device: torch.device) -> tuple[int, Tensor, list[_LaunchGroup]]:
    """(number of slices, int64 [tensors, 4] of outer, slices, inner, first slice, launches).

    facts: for each tensor (dtype, outer, slices, inner, whether the address is a multiple of 16).
    """
    refuse_in_capture(device.type, "sums_of_squares")
    shapes, kinds, at = [], [], 0
    for dtype, outer, slices, inner, aligned in facts:
        shapes.append((outer, slices, inner, at))
        at += slices
        if outer * inner == 1:
            kind = _SINGLE
        else:
            kind = _ROWS if outer == 1 else _COLUMNS if inner == 1 else _STRETCHES
        vector = 16 // dtype.itemsize
        fits = aligned and kind != _STRETCHES and (inner if kind == _ROWS else slices) % vector == 0
        kinds.append((dtype, kind, vector if fits else 1))
    programs = [
        cdiv(slices, _SLICES_PER_PROGRAM[kind]) for (_, slices, _, _), (_, kind, _) in zip(shapes, kinds, strict=True)
    ]
    return at, _int64(shapes).to(device), _group(kinds, programs, device)


@functools.lru_cache(maxsize=32)
def _scale_plan(facts: tuple, device: torch.device) -> tuple[Tensor, list[_LaunchGroup]]:
    """(int64 [tensors] of sizes, launches). facts: for each tensor (dtype, size, whether the address is a multiple of
    16)."""
    refuse_in_capture(device.type, "scale_")
    kinds = [
        (dtype, 0, 16 // dtype.itemsize if aligned and size * dtype.itemsize % 16 == 0 else 1)
        for dtype, size, aligned in facts
    ]
    sizes = [size for _, size, _ in facts]
    return _int64(sizes).to(device), _group(kinds, [cdiv(size, _SCALED) for size in sizes], device)


def _on_device(addresses: list[int], device: torch.device) -> Tensor:
    """int64 [tensors], without making the host wait for the device."""
    if device.type != "cuda":
        return _int64(addresses)
    if capturing(device.type):
        # A graph would read pinned memory at each replay. A fill's value is part of the graph.
        return torch.stack([torch.full((), address, dtype=torch.int64, device=device) for address in addresses])
    return _int64(addresses, pin_memory=True).to(device, non_blocking=True)


def _int64(values: Sequence, **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu", **options)  # whatever the default device is


def _split(x: Tensor, dim: int) -> tuple[int, int, int]:
    """(outer, slices, inner) of a contiguous tensor."""
    shape = x.shape
    if not shape:
        return 1, 1, 1
    return shape[:dim].numel(), shape[dim], shape[dim + 1 :].numel()


# --- public functions -----------------------------------------------------------------------------------------------


def sums_of_squares(xs: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """fp32 [number of slices]: one sum for each index of a tensor's dim, tensor after tensor; a sum's bits do not
    depend on other slices. Arguments as for `sums_of_squares` of reference.py; tensors that are not contiguous are
    copied."""
    xs = [x.resolve_neg().contiguous() for x in xs]
    addresses = [x.data_ptr() for x in xs]
    device = xs[0].device
    facts = tuple(
        (x.dtype, *_split(x, dim), address % 16 == 0) for x, dim, address in zip(xs, dims, addresses, strict=True)
    )
    with launch_on(_without_memory(xs, addresses), "sums_of_squares"):
        count, shapes, groups = _slice_plan(facts, device)
        out = torch.empty(count, dtype=torch.float32, device=device)
        table = _on_device(addresses, device)
        hold_until_read(shapes, *(group.tiles for group in groups))
        for group in groups:
            _squares(
                device.index, (len(group.tiles),), (table, shapes, group.tiles, out, xs[group.first]),
                (_SLICES_PER_PROGRAM[group.kind], group.kind, group.vector),
            )  # fmt: skip
    return out


def fold(v: Tensor) -> Tensor:
    """The sum of an fp32 vector, 0-dim, as `fold` of reference.py."""
    if not v.numel():
        return v.new_zeros(())
    with launch_on(v, "fold"):
        while v.numel() > 1:
            padded = F.pad(v, (0, -v.numel() % FOLDED)).contiguous()
            v = torch.empty(len(padded) // FOLDED, dtype=torch.float32, device=v.device)
            _fold(v.device.index, (len(v),), (padded, v), (FOLDED,))
    return v.view(())


def digests(xs: Sequence[Tensor]) -> Tensor:
    """int64 [tensors], as `digests` of reference.py: each number is mixed with its position and its tensor's index, and
    the resulting integers are added, in any order."""
    flat = [x.detach().resolve_neg().contiguous().view(-1).view(_INTEGERS[x.element_size()]) for x in xs]
    out = torch.zeros(len(xs), dtype=torch.int64, device=xs[0].device)
    _on_elements("digests", flat, _digest, out)
    return out


def scale_(xs: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies xs in place by factor, as `scale_` of reference.py."""
    # the interpreter does not round to 16 bits as a GPU does
    dense = [
        i
        for i, x in enumerate(xs)
        if x.is_contiguous() and not x.is_neg() and not (interpreting() and x.dtype.itemsize < 4)
    ]
    chosen = {dense[at] for at in without_overlap([xs[i] for i in dense])}
    flat = [xs[i] for i in sorted(chosen)]
    if flat:
        _on_elements("scale_", flat, _scale, factor)
        torch.autograd.graph.increment_version(flat)
    for i, x in enumerate(xs):
        if i not in chosen:
            x.copy_(x.float() * factor)


def _on_elements(operation: str, xs: Sequence[Tensor], kernel: Kernel, extra: Tensor) -> None:
    """Launches over all elements of xs, contiguous ones: those of a kind together."""
    addresses = [x.data_ptr() for x in xs]
    device = xs[0].device
    facts = tuple((x.dtype, x.numel(), address % 16 == 0) for x, address in zip(xs, addresses, strict=True))
    with launch_on(_without_memory(xs, addresses), operation):
        sizes, groups = _scale_plan(facts, device)
        table = _on_device(addresses, device)
        hold_until_read(sizes, *(group.tiles for group in groups))
        for group in groups:
            kernel(
                device.index, (len(group.tiles),), (table, sizes, group.tiles, extra, xs[group.first]),
                (_SCALED, group.vector),
            )  # fmt: skip


def without_overlap(xs: Sequence[Tensor]) -> list[int]:
    """Indices of xs, contiguous tensors, that can be in one launch, whose programs have no order: of tensors that
    overlap in memory only the one with the lowest address."""
    end, indices = 0, []
    for address, i in sorted((x.data_ptr(), i) for i, x in enumerate(xs)):
        if address >= end:
            indices.append(i)
            end = address + xs[i].nbytes
    return indices


def _without_memory(xs: Sequence[Tensor], addresses: Sequence[int]) -> Tensor:
    """The tensor to pass to launch_on: one without memory, if there is one, so that it raises."""
    return next((x for x, address in zip(xs, addresses, strict=True) if address == 0 and x.numel()), xs[0])
