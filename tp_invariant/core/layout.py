"""The order of a sharded tensor's elements. Pure functions of tensors, without communication.

Legend, for this module and those that import it:
    P        tensor-parallel degree; rank r of P
    stride   partition_stride S: each rank's part of a sharded dim consists of S stacked pieces ([gate_r; up_r] for
             S = 2). The full dim has the order (stride, rank, local); concatenating ranks gives (rank, stride, local).
             A tuple instead of S gives the full sizes of pieces that differ in size ([q; k; v] with fewer heads in k
             and v); each rank has its part of each piece. An int S means S pieces of equal size.
    *_shard  this rank's part; *_full the full tensor; *_major a rank-major gathered buffer [P, ...shard]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

Stride = int | tuple[int, ...]


def fresh_view(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x with another shape, for an x that nothing else refers to: autograd does not treat the result as a view.

    A view that an autograd function returns cannot be changed in place, as users do (`y += residual`, ReLU).
    """
    return torch.ops.aten._unsafe_view.default(x, list(shape))


def indivisible(size: int, parts: int, *, size_name: str, parts_name: str = "TP degree", stride: int = 1) -> str | None:
    """What is wrong where parts times stride does not divide size; None where it does."""
    if not size % (parts * stride):
        return None
    by = f"{parts_name}={parts}" if stride == 1 else f"{parts_name}={parts} times partition_stride={stride}"
    return f"{size_name}={size} is not divisible by {by}: it must be a multiple of {parts * stride}"


def check_divides(size: int, parts: int, *, size_name: str, parts_name: str = "TP degree", stride: int = 1) -> int:
    """size // (parts * stride), or a ValueError that names all three where they do not divide size."""
    if parts < 1:
        raise ValueError(f"{parts_name}={parts} must be at least 1")
    if problem := indivisible(size, parts, size_name=size_name, parts_name=parts_name, stride=stride):
        raise ValueError(problem)
    return size // (parts * stride)


def check_sequence(shape: Sequence[int], dim: int, world: int, where: str) -> None:
    """Whether the degree divides the sequence. where: what has the shape, and the rank.

    Raises:
        ValueError: it does not.
    """
    if shape[dim] % world:
        raise ValueError(
            f"{where} has shape {tuple(shape)}, of which sequence parallelism takes dim {dim} for the sequence: its "
            f"size {shape[dim]} is not divisible by TP degree={world}. Pad the sequence to a multiple of {world}. "
            "If another dim is the sequence, set sequence_dim=.. of this layer or call, which is 0 by default. In a "
            "model that parallelize has converted it is 1 and cannot be set: pad there"
        )


def split_sizes(size: int, parts: int) -> list[int]:
    """The sizes of `parts` consecutive pieces of `size`, by torch.tensor_split's rule: the first ones get one more."""
    small, more = divmod(size, parts)
    return [small + (part < more) for part in range(parts)]


def piece_sizes(size: int, stride: Stride, world: int, size_name: str = "size") -> list[int]:
    """The full sizes of the pieces that `size` is stacked of.

    Raises:
        ValueError: `world` does not divide each of them, or they do not add up to `size`.
    """
    if isinstance(stride, int):
        return [check_divides(size, world, size_name=size_name, stride=stride) * world] * stride
    if sum(stride) != size:
        raise ValueError(f"pieces of sizes {stride} add up to {sum(stride)}: they must add up to {size_name}={size}")
    for piece in stride:
        check_divides(piece, world, size_name=f"a piece of {size_name}={size}: its size")
    return list(stride)


def deinterleave(tensor: Tensor, *, dim: int, world: int, stride: Stride) -> Tensor:
    """Ranks' shards concatenated along `dim` -> the order that TP=1 has: (rank stride local) -> (stride rank local).

    For gated FC1 weights (stride 2): [g0 u0 g1 u1 ...] -> [g0 g1 ... u0 u1 ...]. Any dtype, any number of dims; a copy
    unless stride or world is 1. Pattern from Transformer Engine PR 2977, generalised from stride 2 to any stride.

    Raises:
        ValueError: world * stride does not divide the size of `dim`; see `piece_sizes`.
    """
    sizes = piece_sizes(tensor.shape[dim], stride, world, f"size of dim {dim}")
    if world == 1 or stride == 1:
        return tensor
    if not isinstance(stride, int):
        dim %= tensor.dim()
        pieces = tensor.unflatten(dim, (world, -1)).split([size // world for size in sizes], dim + 1)
        return torch.cat([piece.flatten(dim, dim + 1) for piece in pieces], dim)
    flat = rearrange(
        tensor.movedim(dim, 0), "(rank stride local) ... -> (stride rank local) ...", rank=world, stride=stride
    )
    return flat.movedim(0, dim)


def shard(full: Tensor, *, dim: int, rank: int, world: int, stride: Stride = 1) -> Tensor:
    """Rank `rank`'s part of `full` along `dim`: its piece of each of the `stride` stacked parts. A new tensor.

    Raises:
        ValueError: world * stride does not divide the size of `dim`; see `piece_sizes`.
    """
    sizes = piece_sizes(full.shape[dim], stride, world, f"size of dim {dim}")
    if not isinstance(stride, int):
        widths = [size // world for size in sizes]
        pieces = full.split(sizes, dim)
        return torch.cat([p.narrow(dim, rank * n, n) for p, n in zip(pieces, widths, strict=True)], dim)
    parts = rearrange(
        full.movedim(dim, 0), "(stride rank local) ... -> rank (stride local) ...", rank=world, stride=stride
    )
    return parts[rank].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def unshard(shards: Sequence[Tensor] | Tensor, *, dim: int, stride: Stride = 1) -> Tensor:
    """All ranks' parts, in rank order (a list, or a rank-major tensor), -> the full tensor. The inverse of `shard`."""
    parts = list(shards)
    return deinterleave(torch.cat(parts, dim=dim), dim=dim, world=len(parts), stride=stride).contiguous()


@dataclass(frozen=True)
class TokenSharding:
    """How the tokens of an activation [..., features] are sharded over ranks: along `sequence_dim`; P=1: not sharded.

    The order of tokens is that of the full activation flattened to [T, features], as at TP=1.
    """

    world: int
    sequence_dim: int

    def local_run(self, local_shape: Sequence[int]) -> int:
        """The number of consecutive tokens of the flattened full activation in each contiguous run on a rank.

        `local_shape` is the shape of this rank's activation, features included.
        """
        return math.prod(local_shape[self.sequence_dim : -1])

    def partial_sums_fit(self, local_shape: Sequence[int], rows_per_sum: int) -> bool:
        """Whether no block of `rows_per_sum` consecutive tokens contains tokens of two ranks."""
        return self.world == 1 or self.local_run(local_shape) % rows_per_sum == 0

    def order_partial_sums(self, partial_sums_major: Tensor, local_shape: Sequence[int]) -> Tensor:
        """Partial sums gathered rank-major [P, sums of a rank, H] -> [all sums, H] in the full activation's order."""
        outer = math.prod(local_shape[: self.sequence_dim])
        if outer <= 1:
            return partial_sums_major.flatten(0, 1)  # the same; einops takes the host as long as a launch
        return rearrange(partial_sums_major, "rank (outer part) h -> (outer rank part) h", outer=outer)
