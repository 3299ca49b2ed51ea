"""Sums of squares by slice, their sum, and scaling, for a CPU: plain torch, the contract and the bits of kernel.py.

A slice is the part of a tensor at one index of one dim. The order of its sum:

    lanes   lane l of LANES adds the squares of elements l, l + LANES, l + 2 LANES .., each product rounded to fp32
            first; elements in the order in which the tensor has them
    tree    then neighbours: lanes 0 and 1, 2 and 3 .., and so on with the results, until one is left

It depends on the slice's length alone. Padding with zeros changes nothing, because no sum of squares is -0.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 128
FOLDED = 4096  # one step of `fold` reduces so many numbers to one


def _sum_rows(rows: Tensor, square: bool) -> Tensor:
    """[L, n] -> fp32 [L], each row in the order above."""
    count, n = rows.shape
    lanes = min(LANES, 1 << max(n - 1, 0).bit_length())
    total = torch.zeros(count, lanes, dtype=torch.float32, device=rows.device)
    for start in range(0, n, lanes):
        part = rows[:, start : start + lanes].float()
        total[:, : part.shape[1]] += part * part if square else part
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total[:, 0]


def sums_of_squares(xs: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """fp32 [number of slices]: one sum for each index of a tensor's dim, tensor after tensor.

    xs: at least one, bfloat16, float16 or float32, any strides, all on one device; dims: one for each tensor, 0 for a
    tensor without dims, which is one slice.
    """
    rows = [x.reshape(1) if not x.dim() else x.movedim(dim, 0) for x, dim in zip(xs, dims, strict=True)]
    return torch.cat([_sum_rows(x.reshape(x.shape[0], x[:1].numel()), square=True) for x in rows])


def fold(v: Tensor) -> Tensor:
    """The sum of an fp32 vector, 0-dim: FOLDED numbers at a time become one, each in the order above, until one is
    left; 0.0 for none. For vectors without -0.0."""
    while v.numel() > 1:
        v = _sum_rows(F.pad(v, (0, -v.numel() % min(FOLDED, v.numel()))).view(-1, min(FOLDED, v.numel())), square=False)
    return v.sum()


def scale_(xs: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies xs in place by factor, a 0-dim fp32 tensor, in fp32 and rounded once; 1.0 leaves all bits.
    (torch's mul_ would round factor to 16 bits first.)
    """
    for x in xs:
        x.mul_(factor) if x.dtype == torch.float32 else x.copy_(x.float().mul_(factor))


# --- digests --------------------------------------------------------------------------------------------------------

STEP, MIX1, MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64's, as int64
_SMALL = 1 << 16  # bytes: gradients of up to so many are hashed together, as calls of torch cost more than they
_WIDTH = 1 << 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(xs: Sequence[Tensor]) -> Tensor:
    """int64 [tensors]: a 64-bit digest of the bytes of each, the same for the same bytes in the same order, whatever
    the strides, and for others practically never; those of one tensor at several places of xs differ. Sums that wrap,
    of integers: exact in any order. Made to notice accidents, not forgeries.

    xs: any dtypes of real numbers, on one device. A GPU's digests (kernel.py) are other ones.
    """
    flat = [x.detach().resolve_neg().reshape(-1).view(_INTEGERS[x.element_size()]) for x in xs]
    result = torch.empty(len(xs), dtype=torch.int64, device="cpu")  # whatever the default device is
    small: dict[torch.dtype, list[int]] = {}
    for i, words in enumerate(flat):
        if words.nbytes <= _SMALL:
            small.setdefault(words.dtype, []).append(i)
        else:
            result[i] = _digest(words)
    for members in small.values():
        words = torch.cat([flat[i] for i in members]).long()
        ends = torch.tensor([flat[i].numel() for i in members], device="cpu").cumsum(0)
        sums = F.pad(words.mul_(_multipliers(words.numel())).cumsum(0), (1, 0))
        result[torch.tensor(members, device="cpu")] = sums[ends] - sums[F.pad(ends, (1, 0))[:-1]]
    return result * _multipliers(len(xs))


def _digest(words: Tensor) -> Tensor:
    """Of a large tensor: pieces of _WIDTH 32-bit words, each times an odd number of its own, are added up, and the
    words of the sum weighted by their places. One pass at the speed of memory; mixing each word would take ten."""
    size = words.element_size()
    if words.nbytes % 4:
        words = F.pad(words, (0, -words.nbytes % 4 // size))
    elif words.storage_offset() * size % 4:
        words = words.clone()
    total = torch.zeros(_WIDTH, dtype=torch.int32, device="cpu")
    pieces = words.view(torch.int32).split(_WIDTH)
    for piece, factor in zip(pieces, _factors(len(pieces)), strict=True):
        total[: len(piece)].add_(piece, alpha=factor)
    return (total.long() * _multipliers(_WIDTH)).sum()


@functools.lru_cache(maxsize=64)
def _factors(count: int) -> list[int]:
    """Odd numbers below 2^31, without a pattern."""
    return (_multipliers(count) & (2**31 - 1)).tolist()


@functools.lru_cache(maxsize=64)
def _multipliers(count: int) -> Tensor:
    """int64 [count], odd, without a pattern."""
    z = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * STEP
    for shift, factor in ((30, MIX1), (27, MIX2)):
        z = (z ^ (z >> shift)) * factor
    return (z ^ (z >> 31)) | 1
