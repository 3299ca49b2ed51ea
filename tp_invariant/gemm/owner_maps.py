"""Owner maps: which rank computes which rows and columns of a product whose K is sharded over ranks.

For C = A B (+ bias) with A [T, K] and B [K, N] both sharded along K, someone must hold all of K for each element of C:
adding partial products over ranks is what makes bits depend on the degree. Since a gemm_fn is slice-invariant, who
that is cannot change a bit, so it is a choice of speed alone (volumes per rank):

    replicate  all-gather A and B                           everybody computes all of C: the oracle
    rows       all-to-all A's rows, all-gather B            T/P rows each; SP: done, else all-gather rows
    cols       all-gather A, all-to-all B's columns         N/P columns each; SP: all-to-all, else all-gather columns
    auto       the cheaper of rows and cols by cost_model.py

`rows` is the weight-gathered layout of Pope et al., arXiv 2211.05102. Uneven splits follow torch.tensor_split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ..comm import peer_copies, small_gathers
from ..comm.collectives import (
    Group,
    Pending,
    exchange_cols_for_rows,
    gather_uneven,
    side_group,
    start_exchange_rows,
    start_gather_major,
)
from ..core.layout import Stride, fresh_view, split_sizes
from ..core.options import OwnerMap
from .cost_model import Problem, choose, costs_of, explain
from .gemm_fn import GemmFn, RankMajor, gemm, gemm_rank_major
from .weight_cache import weight_cache

OWNER_MAPS = get_args(OwnerMap)


def check_owner_map(owner_map: OwnerMap) -> OwnerMap:
    if owner_map not in OWNER_MAPS:
        raise ValueError(f"owner_map={owner_map!r} is unknown: choose one of {', '.join(map(repr, OWNER_MAPS))}")
    return owner_map


# --- what travels ---------------------------------------------------------------------------------------------------


def _start(x: Tensor, sizes: list[int] | None, group: Group, *, early: bool = False, kept: bool = False) -> Pending:
    """x of all ranks, rank-major; with `sizes`, of its rows those of this rank. To be released once it is read."""
    pending = None
    if sizes is None and not early:
        pending = small_gathers.start_gather(x, group)
        if pending is not None:
            return pending
    if weight_cache.ahead_in_graphs:  # in a capture neither could be made
        peer_copies.prepare_for_graphs(group, x.device)
        if early:
            side_group(group, x.device)
    if not kept:
        if sizes is None:
            pending = peer_copies.start_gather(x, group, early=early)
        else:
            pending = peer_copies.start_exchange_rows(x, sizes, group, early=early)
    if pending is not None:
        return pending
    group = side_group(group, x.device) if early else group
    return start_gather_major(x, group) if sizes is None else start_exchange_rows(x, sizes, group)


def _gather(c: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All `size` rows (dim 0) or columns of C, from this rank's."""
    if c.shape[dim] * group.size == size:
        pending = small_gathers.start_gather(c, group, dim)
        if pending is not None:
            return fresh_view(pending.wait(), (size, c.shape[1]) if dim == 0 else (c.shape[0], size))
    return gather_uneven(c, dim, size, group)


# --- the weight operand ---------------------------------------------------------------------------------------------


class WeightLayout(NamedTuple):
    """What a map wants of a weight that is sharded along `k_dim`: "whole", or all of K of this rank's "cols"."""

    part: str
    k_dim: int
    group: Group

    def start(self, weight: Tensor, *, early: bool) -> Pending:
        """[P, ...weight's shape], or [P, N/P, K/P]. `early`: on the side, so that activations go past it."""
        local, sizes = weight.detach(), None
        if self.part == "cols":
            local = local if self.k_dim == 1 else local.t()
            sizes = split_sizes(local.shape[0], self.group.size)
        # what is kept would keep a buffer from others
        return _start(local, sizes, self.group, early=early and weight.is_cuda, kept=weight_cache.keep > 0)


class ShardedWeight(NamedTuple):
    """B of a sharded product, as this rank holds it.

    local    k_dim 1: [N, K/P] (row-parallel forward); k_dim 0: [K/P, N] (column-parallel dgrad)
    k_dim    the dim that is sharded and summed over
    stride   partition_stride of that dim, or the sizes of its pieces
    grad     whether gradients are on where the product is asked for
    """

    local: Tensor
    k_dim: int
    stride: Stride
    group: Group
    grad: bool = False

    @property
    def cols(self) -> int:
        """N, the columns of C."""
        return self.local.shape[1 - self.k_dim]

    def layout(self, owner_map: str) -> WeightLayout:
        return WeightLayout("cols" if owner_map == "cols" else "whole", self.k_dim, self.group)

    def prefetch(self, owner_map: str) -> None:
        """Starts gathering what `owner_map` will need of this weight."""
        weight_cache.prefetch(self.local, self.layout(owner_map))

    def is_cached(self, owner_map: str) -> bool:
        return weight_cache.holds(self.local, self.layout(owner_map))

    def start(self, owner_map: str) -> Pending:
        """All of B, or for `cols` all of K of this rank's share of its columns; `wait` below gives it."""
        return weight_cache.take(self.local, self.layout(owner_map), grad=self.grad)

    def wait(self, pending: Pending, owner_map: str) -> RankMajor:
        """B when it is needed; what is expected to be needed next starts here."""
        buffer = pending.wait()
        if buffer.is_cuda:  # its gather may have been started on another stream
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        weight_cache.run_ahead(self.group)
        return RankMajor(buffer, 1 if owner_map == "cols" else self.k_dim, self.stride)


# --- the maps -------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """C = A B + bias, T rows, N columns. a_shard [T, K/P]; C is whole, or this rank's rows of it if scatter_rows."""

    a_shard: Tensor
    weight: ShardedWeight
    bias: Tensor | None
    scatter_rows: bool
    gemm_fn: GemmFn | None

    @property
    def group(self) -> Group:
        return self.weight.group

    @property
    def row_sizes(self) -> list[int]:
        return split_sizes(self.a_shard.shape[0], self.group.size)

    def gemm(self, a: Pending, weight: Pending, owner_map: str, bias: Tensor | None) -> Tensor:
        try:
            a_major = RankMajor(a.wait(), 1, self.weight.stride)
            # the weight last: what it starts ahead then waits for nothing that this product waits for
            return gemm_rank_major(self.gemm_fn, a_major, self.weight.wait(weight, owner_map), bias=bias)
        finally:
            a.release()
            weight.release()


def _replicate(p: Product) -> Callable[[], Tensor]:
    a, weight = _start(p.a_shard, None, p.group), p.weight.start("replicate")

    def finish() -> Tensor:
        c = p.gemm(a, weight, "replicate", p.bias)
        return c.split(p.row_sizes)[p.group.rank].clone() if p.scatter_rows else c

    return finish


def _rows(p: Product) -> Callable[[], Tensor]:
    a, weight = _start(p.a_shard, p.row_sizes, p.group), p.weight.start("rows")

    def finish() -> Tensor:
        c = p.gemm(a, weight, "rows", p.bias)
        return c if p.scatter_rows else _gather(c, 0, p.a_shard.shape[0], p.group)

    return finish


def _cols(p: Product) -> Callable[[], Tensor]:
    a, weight, n = _start(p.a_shard, None, p.group), p.weight.start("cols"), p.weight.cols
    col_sizes = split_sizes(n, p.group.size)

    def finish() -> Tensor:
        c = p.gemm(a, weight, "cols", None if p.bias is None else p.bias.split(col_sizes)[p.group.rank])
        if p.scatter_rows:
            return exchange_cols_for_rows(c, p.row_sizes, col_sizes, p.group)
        return _gather(c, 1, n, p.group)

    return finish


_MAPS: dict[str, Callable[[Product], Callable[[], Tensor]]] = {"replicate": _replicate, "rows": _rows, "cols": _cols}


def resolve_owner_map(owner_map: str, a_shard: Tensor, weight: ShardedWeight, scatter_rows: bool) -> str:
    """`owner_map`, or what `auto` stands for here: the cheaper of rows and cols by cost_model.py."""
    if owner_map != "auto":
        return owner_map
    problem = Problem(
        a_shard.shape[0],
        weight.cols,
        a_shard.shape[1] * weight.group.size,
        weight.group.size,
        scatter_rows,
        a_shard.element_size(),
        weight.is_cached("rows"),
        weight.is_cached("cols"),
        weight_cache.ahead,
        weight_cache.keep > 0 and not weight.grad,
    )
    return _choose(problem, costs_of(a_shard.device))


_choose = lru_cache(maxsize=4096)(choose)


def explain_choice(
    rows: int,
    cols: int,
    k: int,
    world: int,
    *,
    scatter_rows: bool,
    device: str | torch.device | None = None,
    **facts: Any,
) -> str:
    """What owner_map="auto" picks for C [rows, cols] = A [rows, k] B, k sharded over `world` ranks, and why, as text.

    Args:
        scatter_rows: whether each rank wants its rows of C alone (sequence parallelism).
        device: a torch.device, or a name as torch.cuda.get_device_name gives it; None is the current device.
        facts: others of cost_model.Problem's fields: itemsize, rows_cached, cols_cached, ahead, kept.
    """
    problem = Problem(rows, cols, k, world, scatter_rows=scatter_rows, **{"ahead": weight_cache.ahead, **facts})
    return explain(problem, costs_of(device))


def start_product(
    a_shard: Tensor,
    weight: ShardedWeight,
    *,
    bias: Tensor | None = None,
    scatter_rows: bool,
    owner_map: str,
    gemm_fn: GemmFn | None,
) -> Callable[[], Tensor]:
    """`sharded_product` in two: what must travel first starts now, and calling what is returned does the rest."""
    if weight.group.size == 1:
        return lambda: gemm(gemm_fn, a_shard, weight.local if weight.k_dim == 0 else weight.local.t(), bias=bias)
    product = Product(a_shard, weight, bias, scatter_rows, gemm_fn)
    return _MAPS[resolve_owner_map(owner_map, a_shard, weight, scatter_rows)](product)


def sharded_product(
    a_shard: Tensor,
    weight: ShardedWeight,
    *,
    bias: Tensor | None = None,
    scatter_rows: bool,
    owner_map: str,
    gemm_fn: GemmFn | None,
) -> Tensor:
    """C = A B + bias for A and B sharded along K, bit for bit what one rank with all of K computes.

    a_shard [T, K/P]; weight's local [N, K/P] or [K/P, N]; bias [N], whole on every rank.
    Returns [T, N], or rows rank*T/P .. of it if scatter_rows (T divisible by P).
    """
    return start_product(a_shard, weight, bias=bias, scatter_rows=scatter_rows, owner_map=owner_map, gemm_fn=gemm_fn)()
