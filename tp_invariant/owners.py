"""Owner maps: which rank computes which rows and columns of a product whose K is sharded over ranks.

For C = A B (+ bias) with A [T, K] and B [K, N] both sharded along K, someone must hold all of K for each element of C:
adding partial products over ranks is what makes bits depend on the degree. Since a gemm_fn is slice-invariant, who
that is cannot change a bit, so it is a choice of speed alone (volumes per rank):

    replicate  all-gather A and B                           everybody computes all of C: the oracle
    rows       all-to-all A's rows, all-gather B            T/P rows each; SP: done, else all-gather rows
    cols       all-gather A, all-to-all B's columns         N/P columns each; SP: all-to-all, else all-gather columns
    auto       the cheaper of rows and cols by `choose`

`rows` is the weight-gathered layout of Pope et al., arXiv 2211.05102. Uneven splits follow torch.tensor_split.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdRef

from .collectives import (
    Group,
    Pending,
    exchange_cols_for_rows,
    exchange_rows,
    gather_major,
    gather_uneven,
    start_exchange_rows,
    start_gather_major,
)
from .gemm import GemmFn, RankMajor, gemm, gemm_rank_major
from .layout import split_sizes

OWNER_MAPS = ("auto", "replicate", "rows", "cols")


def check_owner_map(owner_map: str) -> str:
    if owner_map not in OWNER_MAPS:
        raise ValueError(f"owner_map={owner_map!r} is unknown: choose one of {', '.join(map(repr, OWNER_MAPS))}")
    return owner_map


# --- the weight operand ---------------------------------------------------------------------------------------------


class WeightCache:
    """Weights gathered ahead of time, or kept after use until they change.

    An entry is used only while the weight is the same tensor at the same autograd version: optimizers, `copy_` and
    other in-place operations raise the version. Writes through `.data` do not: call `clear()` after them, or keep
    nothing (`keep` 0, the default: a prefetched entry is then used once and dropped). All ranks must agree on what is
    cached, which they do when they run the same program.

        keep   how many gathered weights stay after use; the least recently used goes first
    """

    def __init__(self, keep: int = 0) -> None:
        self.keep = keep
        self._entries: OrderedDict[tuple, tuple[tuple, Pending]] = OrderedDict()

    @staticmethod
    def _state(weight: Tensor) -> tuple:
        return weight._version, weight.data_ptr(), tuple(weight.shape), weight.dtype

    def holds(self, weight: Tensor, layout: tuple) -> bool:
        """Whether `layout` of `weight` as it is now is here or on its way."""
        if weight.is_inference():  # has no version to go by
            return False
        entry = self._entries.get((WeakIdRef(weight), *layout))
        return entry is not None and entry[0] == self._state(weight)

    def prefetch(self, weight: Tensor, layout: tuple, start: Callable[[], Pending]) -> None:
        """Starts the communication `start` unless its result is already here or on its way."""
        for key in [key for key in self._entries if key[0]() is None]:  # of weights that are gone
            del self._entries[key]
        if weight.is_inference() or self.holds(weight, layout):
            return
        self._entries[(WeakIdRef(weight), *layout)] = (self._state(weight), start())

    def take(self, weight: Tensor, layout: tuple, start: Callable[[], Pending]) -> Tensor:
        """The result of `start`, from the cache where it is there and current."""
        key = (WeakIdRef(weight), *layout)
        current = self.holds(weight, layout)
        entry = self._entries.pop(key, None)
        pending = entry[1] if current and entry is not None else start()
        result = pending.wait()
        if self.keep and not weight.is_inference():
            self._entries[key] = (self._state(weight), pending)
            while len(self._entries) > self.keep:
                self._entries.popitem(last=False)
        return result

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()


weight_cache = WeightCache()


@dataclass(frozen=True)
class ShardedWeight:
    """B of a sharded product, as this rank holds it.

    local    k_dim 1: [N, K/P] (row-parallel forward); k_dim 0: [K/P, N] (column-parallel dgrad)
    k_dim    the dim that is sharded and summed over
    stride   partition_stride of that dim
    """

    local: Tensor
    k_dim: int
    stride: int
    group: Group

    @property
    def cols(self) -> int:
        """N, the columns of C."""
        return self.local.shape[1 - self.k_dim]

    def _start_gather(self) -> Pending:
        return start_gather_major(self.local, self.group)

    def _start_exchange(self) -> Pending:
        n_first = self.local if self.k_dim == 1 else self.local.t()
        return start_exchange_rows(n_first, split_sizes(self.cols, self.group.size), self.group)

    def prefetch(self, owner_map: str) -> None:
        """Starts gathering what `owner_map` will need of this weight."""
        start = self._start_exchange if owner_map == "cols" else self._start_gather
        weight_cache.prefetch(self.local, self._layout(owner_map), start)

    def is_cached(self, owner_map: str) -> bool:
        return weight_cache.holds(self.local, self._layout(owner_map))

    def whole(self) -> RankMajor:
        """All of B on this rank."""
        buffer = weight_cache.take(self.local, self._layout("rows"), self._start_gather)
        return RankMajor(buffer, self.k_dim, self.stride)

    def own_cols(self) -> RankMajor:
        """All of K of this rank's share of B's columns."""
        buffer = weight_cache.take(self.local, self._layout("cols"), self._start_exchange)
        return RankMajor(buffer, 1, self.stride)

    def _layout(self, owner_map: str) -> tuple:
        return "cols" if owner_map == "cols" else "whole", self.k_dim, id(self.group.process_group)


# --- the maps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
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

    def a_whole(self) -> RankMajor:
        return RankMajor(gather_major(self.a_shard, self.group), 1, self.weight.stride)

    def gemm(self, a: RankMajor, b: RankMajor, bias: Tensor | None) -> Tensor:
        return gemm_rank_major(self.gemm_fn, a, b, bias=bias)


def _replicate(p: Product) -> Tensor:
    c = p.gemm(p.a_whole(), p.weight.whole(), p.bias)
    return c.split(p.row_sizes)[p.group.rank].clone() if p.scatter_rows else c


def _rows(p: Product) -> Tensor:
    # the weight first: where it is gathered ahead of time, nothing waits for it
    weight = p.weight.whole()
    a = RankMajor(exchange_rows(p.a_shard, p.row_sizes, p.group), 1, p.weight.stride)
    c = p.gemm(a, weight, p.bias)
    return c if p.scatter_rows else gather_uneven(c, 0, p.a_shard.shape[0], p.group)


def _cols(p: Product) -> Tensor:
    weight, n = p.weight.own_cols(), p.weight.cols
    col_sizes = split_sizes(n, p.group.size)
    bias = None if p.bias is None else p.bias.split(col_sizes)[p.group.rank]
    c = p.gemm(p.a_whole(), weight, bias)
    return (
        exchange_cols_for_rows(c, p.row_sizes, col_sizes, p.group)
        if p.scatter_rows
        else gather_uneven(c, 1, n, p.group)
    )


_MAPS: dict[str, Callable[[Product], Tensor]] = {"replicate": _replicate, "rows": _rows, "cols": _cols}

# A byte over the link against a byte read from memory. On an H200 NVLink moves 270 GB/s a rank in an all-gather and
# memory 4.3 TB/s.
_LINK_OVER_MEMORY = 16


def choose(
    rows: int, cols: int, k: int, world: int, *, scatter_rows: bool, rows_cached: bool, cols_cached: bool
) -> str:
    """`rows` or `cols`, whichever moves less; a function of global sizes alone, so the same on every rank.

    Counts elements over the link, and those of the weight that a rank must read to compute its share.
    """
    far = _LINK_OVER_MEMORY * (world - 1) / world
    by_rows = rows * k / world * far + (0 if rows_cached else cols * k * far) + cols * k
    by_rows += 0 if scatter_rows else rows * cols * far
    by_cols = rows * k * far + (0 if cols_cached else cols * k / world * far) + cols * k / world
    by_cols += rows * cols * far / (world if scatter_rows else 1)
    return "rows" if by_rows <= by_cols else "cols"


def resolve_owner_map(owner_map: str, a_shard: Tensor, weight: ShardedWeight, scatter_rows: bool) -> str:
    """`owner_map`, or what `auto` stands for here."""
    if owner_map != "auto":
        return owner_map
    return choose(
        a_shard.shape[0],
        weight.cols,
        a_shard.shape[1] * weight.group.size,
        weight.group.size,
        scatter_rows=scatter_rows,
        rows_cached=weight.is_cached("rows"),
        cols_cached=weight.is_cached("cols"),
    )


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
    if weight.group.size == 1:
        return gemm(gemm_fn, a_shard, weight.local if weight.k_dim == 0 else weight.local.t(), bias=bias)
    product = Product(a_shard, weight, bias, scatter_rows, gemm_fn)
    return _MAPS[resolve_owner_map(owner_map, a_shard, weight, scatter_rows)](product)
