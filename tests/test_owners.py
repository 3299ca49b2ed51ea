"""Owner maps: the same bits as one rank with all of K, whoever computes what; and the cache of gathered weights."""

import functools
import gc
import itertools
import re

import pytest
import torch
import torch.distributed as dist

from tp_invariant import collectives, owners, testing
from tp_invariant.collectives import Group, Pending, resolve_group
from tp_invariant.gemm import gemm
from tp_invariant.layout import shard, split_sizes
from tp_invariant.owners import (
    OWNER_MAPS,
    ShardedWeight,
    WeightCache,
    check_owner_map,
    choose,
    sharded_product,
)
from tp_invariant.testing import assert_bitwise_equal, wide_randn

run_ranks = functools.partial(testing.run_ranks, device="cpu")

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="session", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, 8)


def problem(t, n, k, dtype):
    """a [t, k], b [k, n], bias [n]. The outer thirds of k are large and cancel, but for rounding errors."""
    generator = torch.Generator().manual_seed(0)
    a, b = wide_randn(t, k, generator=generator, spread=2), wide_randn(k, n, generator=generator, spread=2)
    third = k // 3
    a[:, :third] = wide_randn(t, third, generator=generator, spread=12)
    b[:third] = wide_randn(third, n, generator=generator, spread=12)
    a[:, k - third :], b[k - third :] = -a[:, :third].flip(1), b[:third].flip(0)
    return a.to(dtype), b.to(dtype), wide_randn(n, generator=generator, spread=2).to(dtype)


def shards(a, b, k_dim, stride, group):
    """This rank's a_shard and ShardedWeight."""
    stored = b if k_dim == 0 else b.t().contiguous()
    place = {"rank": group.rank, "world": group.size, "stride": stride}
    return shard(a, dim=1, **place), ShardedWeight(shard(stored, dim=k_dim, **place), k_dim, stride, group)


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (5, torch.float32), (16, torch.bfloat16)]
)
def test_products_are_those_of_one_rank(world, tokens, dtype):
    def on_rank(tp_group):
        group = resolve_group(tp_group)
        checks = 0
        for k_dim, stride in itertools.product((0, 1), (1, 2, 3)):
            n, k = 11, 24 * stride * world  # 11 columns divide over no number of ranks
            a, b, bias = problem(tokens, n, k, dtype)
            a_shard, weight = shards(a, b, k_dim, stride, group)
            whole = {flag: gemm(None, a, b, bias=bias if flag else None) for flag in (False, True)}
            sizes = split_sizes(tokens, world)
            for owner_map, scatter in itertools.product(OWNER_MAPS, (False, True)):
                # half of all cases each: with another number of ranks, dim or stride, the other half
                with_bias = (world + k_dim + stride + scatter) % 2 == 0
                got = sharded_product(
                    a_shard,
                    weight,
                    bias=bias if with_bias else None,
                    scatter_rows=scatter,
                    owner_map=owner_map,
                    gemm_fn=None,
                )
                expected = whole[with_bias]
                if scatter:
                    expected = expected.split(sizes)[group.rank] if tokens else expected
                what = f"k_dim {k_dim} stride {stride} {owner_map} bias {with_bias} scatter {scatter}"
                assert_bitwise_equal(got, expected, what)
                checks += 1
        return checks

    assert run_ranks(on_rank, world) == [48] * world


@pytest.mark.parametrize("world", [2, 3, 5, 6, 7, 8])
def test_adding_partial_products_would_differ(world):
    """The control: on the same data, adding the ranks' own products gives other bits, so the test above can fail."""
    for tokens, dtype, stride in itertools.product((1, 5, 16), DTYPES, (1, 2, 3)):
        a, b, _ = problem(tokens, 11, 24 * stride * world, dtype)
        parts = []
        for rank in range(world):
            a_shard, weight = shards(a, b, 0, stride, Group(None, rank, world))
            parts.append(gemm(None, a_shard, weight.local, out_dtype=torch.float32))
        total = sum(parts[1:], parts[0]).to(dtype)
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(total, gemm(None, a, b), f"{tokens} {dtype} {stride}")


def test_ignoring_the_stride_would_differ():
    a, b, _ = problem(4, 11, 36, torch.float32)
    world, stride = 3, 2
    rank_order = torch.cat([shard(torch.arange(36), dim=0, rank=r, world=world, stride=stride) for r in range(world)])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(gemm(None, a[:, rank_order], b[rank_order]), gemm(None, a, b))


@pytest.mark.parametrize("owner_map", ["rows", "cols"])
def test_every_rank_computes_only_its_share(owner_map):
    def on_rank(tp_group):
        group = resolve_group(tp_group)
        shapes = []

        def spy(a, b, *, bias=None, out_dtype=None):
            shapes.append((a.shape[0], a.shape[1], b.shape[1]))
            return gemm(None, a, b, bias=bias, out_dtype=out_dtype)

        a, b, _ = problem(6, 9, 24, torch.float32)
        a_shard, weight = shards(a, b, 1, 1, group)
        sharded_product(a_shard, weight, scatter_rows=False, owner_map=owner_map, gemm_fn=spy)
        return shapes

    expected = [[(2, 24, 9)]] * 3 if owner_map == "rows" else [[(6, 24, 3)]] * 3
    assert run_ranks(on_rank, 3) == expected


def test_auto_takes_what_choose_says():
    group = Group(None, 0, 4)
    for rows, cols, k in [(4096, 64, 64), (1, 4096, 4096)]:
        weight = ShardedWeight(torch.empty(cols, k // 4, device="meta"), 1, 1, group)
        a_shard = torch.empty(rows, k // 4, device="meta")
        for scatter in (False, True):
            expected = choose(rows, cols, k, 4, scatter_rows=scatter, rows_cached=False, cols_cached=False)
            assert owners.resolve_owner_map("auto", a_shard, weight, scatter) == expected
            for fixed in ("replicate", "rows", "cols"):
                assert owners.resolve_owner_map(fixed, a_shard, weight, scatter) == fixed


# --- choose ---------------------------------------------------------------------------------------------------------

SIZES = [(t, n, k, p) for t in (1, 64, 8192) for n in (64, 4096) for k in (64, 12288) for p in (2, 8)]


@pytest.mark.parametrize("scatter_rows", [False, True])
@pytest.mark.parametrize(("t", "n", "k", "world"), SIZES)
def test_choose_weighs_what_is_cached(t, n, k, world, scatter_rows):
    def pick(rows_cached, cols_cached):
        options = {"scatter_rows": scatter_rows, "rows_cached": rows_cached, "cols_cached": cols_cached}
        picks = {choose(t, n, k, world, **options) for _ in range(3)}
        assert len(picks) == 1
        assert picks <= {"rows", "cols"}
        return picks.pop()

    # a cached weight never speaks against its own map
    assert (pick(False, False), pick(True, False)) != ("rows", "cols")
    assert (pick(False, True), pick(True, True)) != ("rows", "cols")
    assert (pick(False, False), pick(False, True)) != ("cols", "rows")
    assert (pick(True, False), pick(True, True)) != ("cols", "rows")


def test_choose_changes_with_the_cache():
    both = {"rows_cached": False, "cols_cached": False, "scatter_rows": True}
    assert choose(512, 4096, 4096, 8, **both) == "cols"
    assert choose(512, 4096, 4096, 8, **{**both, "rows_cached": True}) == "rows"
    assert choose(8192, 4096, 4096, 8, **both) == "rows"
    assert choose(8192, 64, 4096, 8, **both) == "rows"


def test_choose_many_tokens_gather_the_weight_and_few_the_tokens():
    none = {"rows_cached": False, "cols_cached": False, "scatter_rows": True}
    picks = [choose(t, 4096, 4096, 8, **none) for t in (1, 8, 64, 512, 4096, 32768, 262144)]
    assert picks == sorted(picks), "once rows pays for itself it does so for every larger number of tokens"
    assert picks[0] == "cols"
    assert picks[-1] == "rows"


@pytest.mark.parametrize(("t", "n", "k", "world"), SIZES)
def test_choose_without_scatter_does_not_depend_on_k(t, n, k, world):
    """Both maps then bring all of C to every rank, and everything else grows with K alike."""
    none = {"rows_cached": False, "cols_cached": False, "scatter_rows": False}
    assert choose(t, n, k, world, **none) == choose(t, n, 16 * k, world, **none)


def test_choose_of_a_square_problem_reads_less_of_the_weight():
    none = {"rows_cached": False, "cols_cached": False, "scatter_rows": False}
    assert choose(64, 64, 4096, 8, **none) == "cols"
    assert choose(128, 64, 4096, 8, **none) == "rows"


@pytest.mark.parametrize("wrong", ["row", "", None, "ROWS"])
def test_unknown_owner_map(wrong):
    text = f"owner_map={wrong!r} is unknown: choose one of 'auto', 'replicate', 'rows', 'cols'"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_owner_map(wrong)


@pytest.mark.parametrize("owner_map", OWNER_MAPS)
def test_known_owner_maps(owner_map):
    assert check_owner_map(owner_map) == owner_map


# --- the cache ------------------------------------------------------------------------------------------------------


class Starts:
    """A counting `start`: what a gather of `weight` would give, as things stood when it was called."""

    def __init__(self, weight):
        self.weight, self.count = weight, 0

    def __call__(self):
        self.count += 1
        return Pending(self.weight.detach().clone(), None)


LAYOUT = ("whole", 1, 0)


def weight_of(value):
    return torch.nn.Parameter(torch.full((2, 3), float(value)))


def test_a_prefetched_weight_is_used_once():
    cache, weight = WeightCache(), weight_of(1)
    start = Starts(weight)
    cache.prefetch(weight, LAYOUT, start)
    assert (start.count, cache.holds(weight, LAYOUT)) == (1, True)
    cache.prefetch(weight, LAYOUT, start)
    assert start.count == 1, "already on its way"
    assert_bitwise_equal(cache.take(weight, LAYOUT, start), weight.detach())
    assert (start.count, cache.holds(weight, LAYOUT)) == (1, False)
    cache.take(weight, LAYOUT, start)
    assert start.count == 2, "keep=0 keeps nothing"


def test_a_kept_weight_is_gathered_once():
    cache, weight = WeightCache(keep=1), weight_of(1)
    start = Starts(weight)
    for _ in range(3):
        assert_bitwise_equal(cache.take(weight, LAYOUT, start), weight.detach())
    assert start.count == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(1),
        lambda w: w.copy_(torch.zeros(2, 3)),
        lambda w: w[0].zero_(),
        lambda w: torch.nn.init.constant_(w, 5.0),
    ],
    ids=["add_", "copy_", "view", "init"],
)
@pytest.mark.parametrize("keep", [0, 2])
def test_an_in_place_change_invalidates(change, keep):
    cache, weight = WeightCache(keep), weight_of(1)
    start = Starts(weight)
    cache.prefetch(weight, LAYOUT, start)
    with torch.no_grad():
        change(weight)
    assert not cache.holds(weight, LAYOUT)
    assert_bitwise_equal(cache.take(weight, LAYOUT, start), weight.detach())
    assert start.count == 2


def test_an_optimizer_step_invalidates():
    cache, weight = WeightCache(keep=2), weight_of(1)
    start = Starts(weight)
    before = cache.take(weight, LAYOUT, start)
    weight.grad = torch.ones(2, 3)
    torch.optim.SGD([weight], lr=0.5).step()
    after = cache.take(weight, LAYOUT, start)
    assert start.count == 2
    assert_bitwise_equal(after, before - 0.5)


def test_new_storage_invalidates():
    cache, weight = WeightCache(keep=2), weight_of(1)
    start = Starts(weight)
    cache.take(weight, LAYOUT, start)
    weight.data = torch.full((2, 3), 7.0)
    assert_bitwise_equal(cache.take(weight, LAYOUT, start), torch.full((2, 3), 7.0))
    assert start.count == 2


def test_prefetching_again_after_a_change_replaces_the_stale_entry():
    cache, weight = WeightCache(), weight_of(1)
    start = Starts(weight)
    cache.prefetch(weight, LAYOUT, start)
    with torch.no_grad():
        weight.add_(1)
    cache.prefetch(weight, LAYOUT, start)
    assert start.count == 2
    assert_bitwise_equal(cache.take(weight, LAYOUT, start), weight.detach())
    assert start.count == 2


def test_the_least_recently_used_goes_first():
    cache = WeightCache(keep=2)
    weights = [weight_of(i) for i in range(3)]
    starts = [Starts(w) for w in weights]
    for i in (0, 1, 0, 2):  # 1 is the one not used for longest when 2 comes
        cache.take(weights[i], LAYOUT, starts[i])
    assert [cache.holds(w, LAYOUT) for w in weights] == [True, False, True]
    assert [s.count for s in starts] == [1, 1, 1]


def test_layouts_are_kept_apart():
    cache, weight = WeightCache(keep=4), weight_of(1)
    start = Starts(weight)
    for layout in (("whole", 1, 0), ("cols", 1, 0), ("whole", 0, 0), ("whole", 1, 9)):
        assert not cache.holds(weight, layout)
        cache.take(weight, layout, start)
    assert start.count == 4


def test_clear_forgets_everything():
    cache, weight = WeightCache(keep=2), weight_of(1)
    start = Starts(weight)
    cache.take(weight, LAYOUT, start)
    cache.clear()
    assert not cache.holds(weight, LAYOUT)
    cache.take(weight, LAYOUT, start)
    assert start.count == 2


def test_inference_tensors_are_never_kept():
    """They have no version that would tell when they change."""
    with torch.inference_mode():
        weight = torch.ones(2, 3)
    cache, start = WeightCache(keep=2), Starts(weight)
    cache.prefetch(weight, LAYOUT, start)
    assert (start.count, cache.holds(weight, LAYOUT)) == (0, False)
    for _ in range(2):
        cache.take(weight, LAYOUT, start)
    assert (start.count, cache.holds(weight, LAYOUT)) == (2, False)


def test_another_tensor_at_the_same_id_is_not_confused():
    cache = WeightCache(keep=8)
    storage = torch.ones(2, 3)
    weight = storage.detach()
    cache.take(weight, LAYOUT, Starts(weight))
    address = id(weight)
    del weight
    gc.collect()
    others = []
    while len(others) < 10000:  # same storage, same version: only the object is another one
        again = storage.detach()
        if id(again) == address:
            break
        others.append(again)
    else:
        pytest.fail("no tensor came to the same id")
    assert not cache.holds(again, LAYOUT)
    start = Starts(again)
    cache.take(again, LAYOUT, start)
    assert start.count == 1


def test_prefetch_through_collectives():
    """A prefetched weight saves its gather; changed afterwards, it is gathered again and the new values are used."""

    def on_rank(tp_group):
        group = resolve_group(tp_group)
        a, b, _ = problem(6, 9, 24, torch.float32)
        counts, outputs = [], []
        for owner_map, change in itertools.product(("rows", "cols", "replicate"), (False, True)):
            a_shard, weight = shards(a, b, 1, 1, group)
            weight.prefetch(owner_map)
            cached = [weight.is_cached(m) for m in ("rows", "cols")]
            assert cached == ([False, True] if owner_map == "cols" else [True, False])
            if change:
                weight.local.mul_(2)
            before = len(traced)
            outputs.append(sharded_product(a_shard, weight, scatter_rows=False, owner_map=owner_map, gemm_fn=None))
            counts.append(len(traced) - before)
            assert not weight.is_cached(owner_map)
        return counts, outputs

    traced = []

    def traced_on_rank(tp_group):
        def counted(fn):
            def call(*args, **kwargs):
                traced.append(fn)
                return fn(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "_start_all_gather", counted(collectives._start_all_gather))
            patch.setattr(dist, "all_to_all_single", counted(dist.all_to_all_single))
            return on_rank(tp_group)

    a, b, _ = problem(6, 9, 24, torch.float32)
    expected = [gemm(None, a, b * factor) for _ in range(3) for factor in (1, 2)]
    for counts, outputs in run_ranks(traced_on_rank, 3):
        assert_bitwise_equal(outputs, expected)
        # of activations and results: rows exchanges and gathers, cols gathers twice, replicate gathers once
        assert counts == [2, 3, 2, 3, 1, 2]
