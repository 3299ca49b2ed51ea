"""Owner maps: which rank computes which rows and columns of a product whose K is sharded over ranks.

For C = A B (+ bias) with A [T, K] and B [K, N] both sharded along K, the rank that computes an element of C must hold
all of K: adding partial products over ranks would make the bits depend on the degree. Because a gemm_fn is
slice-invariant, the choice of this rank cannot change a bit; it changes the speed only (volumes per rank):

    replicate  all-gather A and B                           every rank computes all of C: the reference
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

from ..comm.collectives import (
    NOT_LENT,
    Group,
    Peers,
    Pending,
    exchange_cols_for_rows,
    gather_uneven,
    start_exchange_rows,
    start_gather_major,
)
from ..core.layout import Stride, split_sizes
from ..core.options import OwnerMap
from ..core.torch_graphs import in_torch_graph
from .cost_model import Problem, choose, costs_of, explain
from .gemm_fn import GemmFn, RankMajor, gemm, gemm_rank_major
from .weights import WeightLayout, weight_cache

OWNER_MAPS = get_args(OwnerMap)


def check_owner_map(owner_map: OwnerMap) -> OwnerMap:
    if owner_map not in OWNER_MAPS:
        raise ValueError(f"owner_map={owner_map!r} is unknown: choose one of {', '.join(map(repr, OWNER_MAPS))}")
    return owner_map


# --- the operands ---------------------------------------------------------------------------------------------------


class ShardedWeight(NamedTuple):
    """This rank's shard of B in a product whose K is sharded.

    local    k_dim 1: [N, K/P] (row-parallel forward); k_dim 0: [K/P, N] (column-parallel dgrad)
    k_dim    the dim that is sharded and summed over
    stride   partition_stride of that dim, or the sizes of its pieces
    grad     whether grad mode was on when the layer was called
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

    def start(self, owner_map: str) -> Pending:
        """Starts gathering B, for `cols` only this rank's columns, with all of K; `wait` returns it."""
        return weight_cache.take(self.local, self.layout(owner_map), grad=self.grad)

    def wait(self, pending: Pending, owner_map: str) -> RankMajor:
        """Waits for B, then starts the gather of the weight that is expected to be used next."""
        buffer = pending.wait()
        # its gather may have been started on another stream; a lent buffer is not memory of torch's allocator
        if buffer.is_cuda and not pending.leased:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        weight_cache.start_next(self.group)
        return RankMajor(buffer, self.layout(owner_map).k_dim_that_arrives(self.cols), self.stride)


# --- the maps -------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """C = A B + bias, T rows, N columns. a_shard [T, K/P]; C is whole, or this rank's rows of it if scatter_rows.

    overlapped: whether the caller computes something else before it asks for C.
    """

    a_shard: Tensor
    weight: ShardedWeight
    bias: Tensor | None
    scatter_rows: bool
    gemm_fn: GemmFn | None
    overlapped: bool

    @property
    def group(self) -> Group:
        return self.weight.group

    @property
    def row_sizes(self) -> list[int]:
        return split_sizes(self.a_shard.shape[0], self.group.size)

    @property
    def _peers(self) -> Peers:
        return Peers(overlapped=self.overlapped, for_graphs=weight_cache.ahead_in_graphs)

    def start_whole_a(self) -> Pending:
        """All of A, rank-major: [P, T, K/P]."""
        return start_gather_major(self.a_shard, self.group, peers=self._peers)

    def start_rows_of_a(self) -> Pending:
        """This rank's rows of A, rank-major: [P, T/P, K/P]."""
        return start_exchange_rows(self.a_shard, self.row_sizes, self.group, peers=self._peers)

    def gemm(self, a: Pending, weight: Pending, owner_map: str, bias: Tensor | None) -> Tensor:
        """The product of what this rank holds of A and B by now."""
        try:
            a_major = RankMajor(a.wait(), 1, self.weight.stride)
            # The weight last, so that the gather that starts then does not queue behind this product's operands.
            return gemm_rank_major(self.gemm_fn, a_major, self.weight.wait(weight, owner_map), bias=bias)
        finally:
            a.release()
            weight.release()


def _replicate(p: Product) -> Callable[[], Tensor]:
    a, weight = p.start_whole_a(), p.weight.start("replicate")

    def finish() -> Tensor:
        c = p.gemm(a, weight, "replicate", p.bias)
        return c.split(p.row_sizes)[p.group.rank].clone() if p.scatter_rows else c

    return finish


def _rows(p: Product) -> Callable[[], Tensor]:
    a, weight = p.start_rows_of_a(), p.weight.start("rows")

    def finish() -> Tensor:
        c = p.gemm(a, weight, "rows", p.bias)
        return c if p.scatter_rows else gather_uneven(c, 0, p.a_shard.shape[0], p.group, peers=NOT_LENT)

    return finish


def _cols(p: Product) -> Callable[[], Tensor]:
    a, weight, n = p.start_whole_a(), p.weight.start("cols"), p.weight.cols
    col_sizes = split_sizes(n, p.group.size)

    def finish() -> Tensor:
        c = p.gemm(a, weight, "cols", None if p.bias is None else p.bias.split(col_sizes)[p.group.rank])
        if p.scatter_rows:
            return exchange_cols_for_rows(c, p.row_sizes, col_sizes, p.group, peers=NOT_LENT)
        return gather_uneven(c, 1, n, p.group, peers=NOT_LENT)

    return finish


_MAPS: dict[str, Callable[[Product], Callable[[], Tensor]]] = {"replicate": _replicate, "rows": _rows, "cols": _cols}


def resolve_owner_map(
    owner_map: str, a_shard: Tensor, weight: ShardedWeight, scatter_rows: bool, overlapped: bool = False
) -> str:
    """`owner_map`; for "auto" the cheaper one of rows and cols by cost_model.py."""
    if owner_map != "auto":
        return owner_map
    rows_cached, cols_cached = weight_cache.holds(weight.local, weight.layout("rows"), weight.layout("cols"))
    problem = Problem(
        a_shard.shape[0],
        weight.cols,
        a_shard.shape[1] * weight.group.size,
        weight.group.size,
        scatter_rows,
        a_shard.element_size(),
        rows_cached,
        cols_cached,
        weight_cache.ahead and not in_torch_graph(),
        weight_cache.keep > 0 and not weight.grad and not in_torch_graph(),
        overlapped,
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
        scatter_rows: whether each rank needs only its rows of C (sequence parallelism).
        device: a torch.device, or a name as torch.cuda.get_device_name returns it; None is the current device.
        facts: further fields of cost_model.Problem: itemsize, rows_cached, cols_cached, ahead, kept,
            overlapped.
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
    overlapped: bool = False,
) -> Callable[[], Tensor]:
    """C = A B + bias for A and B sharded along K, bit for bit what one rank with all of K computes.

    The first communication starts now; the returned function does the rest and returns C [T, N], or with scatter_rows
    only this rank's rows of it, from rank * T / P on (T divisible by P).

    a_shard [T, K/P]; weight's local [N, K/P] or [K/P, N]; bias [N], replicated on every rank. overlapped: whether
    something else is computed between the two.
    """
    if weight.group.size == 1:
        return lambda: gemm(gemm_fn, a_shard, weight.local if weight.k_dim == 0 else weight.local.t(), bias=bias)
    product = Product(a_shard, weight, bias, scatter_rows, gemm_fn, overlapped)
    return _MAPS[resolve_owner_map(owner_map, a_shard, weight, scatter_rows, overlapped)](product)
