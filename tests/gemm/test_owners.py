"""Owner maps: the same bits as one rank with all of K, whichever rank computes which part."""

import itertools
import re

import pytest
import torch
from cases import more
from ranks import run_ranks

from tp_invariant.comm import collectives
from tp_invariant.comm.collectives import Group, resolve_group
from tp_invariant.core.layout import shard, split_sizes
from tp_invariant.gemm import gemm, owner_maps
from tp_invariant.gemm.cost_model import Problem, choose, costs_of
from tp_invariant.gemm.owner_maps import OWNER_MAPS, ShardedWeight, check_owner_map, start_product
from tp_invariant.gemm.weights import weight_cache
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DTYPES = (torch.bfloat16, torch.float32)


def problem(t, n, k, dtype):
    """a [t, k], b [k, n], bias [n]. The outer thirds of k are large and cancel, except for rounding errors."""
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


@pytest.mark.parametrize("world", [1, 2, 3, more(5), more(6), 7, 8])
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
                got = start_product(
                    a_shard,
                    weight,
                    bias=bias if with_bias else None,
                    scatter_rows=scatter,
                    owner_map=owner_map,
                    gemm_fn=None,
                )()
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
        start_product(a_shard, weight, scatter_rows=False, owner_map=owner_map, gemm_fn=spy)()
        return shapes

    expected = [[(2, 24, 9)]] * 3 if owner_map == "rows" else [[(6, 24, 3)]] * 3
    assert run_ranks(on_rank, 3) == expected


def test_auto_takes_what_the_cost_model_says():
    group = Group(None, 0, 4)
    picks = set()
    for rows, cols, k in [(4096, 64, 64), (1, 4096, 4096), (64, 4096, 4096)]:
        weight = ShardedWeight(torch.empty(cols, k // 4, device="meta"), 1, 1, group)
        a_shard = torch.empty(rows, k // 4, device="meta")
        for scatter in (False, True):
            problem = Problem(rows, cols, k, 4, scatter_rows=scatter, itemsize=4)
            expected = choose(problem, costs_of(a_shard.device))
            picks.add(expected)
            assert owner_maps.resolve_owner_map("auto", a_shard, weight, scatter) == expected
            for fixed in ("replicate", "rows", "cols"):
                assert owner_maps.resolve_owner_map(fixed, a_shard, weight, scatter) == fixed
            text = owner_maps.explain_choice(rows, cols, k, 4, scatter_rows=scatter, itemsize=4, device=a_shard.device)
            assert text.endswith(f"auto: {expected}")
    assert picks == {"rows", "cols"}


@pytest.mark.parametrize("wrong", ["row", "", None, "ROWS"])
def test_unknown_owner_map(wrong):
    text = f"owner_map={wrong!r} is unknown: choose one of 'auto', 'replicate', 'rows', 'cols'"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_owner_map(wrong)


@pytest.mark.parametrize("owner_map", OWNER_MAPS)
def test_known_owner_maps(owner_map):
    assert check_owner_map(owner_map) == owner_map


def test_prefetch_through_collectives():
    """A prefetched weight needs no other gather; after a change it is gathered again and the new values are used."""

    def on_rank(tp_group):
        group = resolve_group(tp_group)
        a, b, _ = problem(6, 9, 24, torch.float32)
        counts, outputs = [], []
        for owner_map, change in itertools.product(("rows", "cols", "replicate"), (False, True)):
            a_shard, weight = shards(a, b, 1, 1, group)
            weight.prefetch(owner_map)
            cached = weight_cache.holds(weight.local, weight.layout("rows"), weight.layout("cols"))
            assert cached == ([False, True] if owner_map == "cols" else [True, False])
            if change:
                weight.local.mul_(2)
            before = len(traced)
            outputs.append(start_product(a_shard, weight, scatter_rows=False, owner_map=owner_map, gemm_fn=None)())
            counts.append(len(traced) - before)
            assert weight_cache.holds(weight.local, weight.layout(owner_map)) == [False]
        return counts, outputs

    traced = []

    def traced_on_rank(tp_group):
        def counted(fn):
            def call(*args, **kwargs):
                traced.append(fn)
                return fn(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "start_all_gather", counted(collectives.start_all_gather))
            patch.setattr(collectives, "start_all_to_all", counted(collectives.start_all_to_all))
            return on_rank(tp_group)

    a, b, _ = problem(6, 9, 24, torch.float32)
    expected = [gemm(None, a, b * factor) for _ in range(3) for factor in (1, 2)]
    for counts, outputs in run_ranks(traced_on_rank, 3):
        assert_bitwise_equal(outputs, expected)
        # of activations and results: rows exchanges and gathers, cols gathers twice, replicate gathers once
        assert counts == [2, 3, 2, 3, 1, 2]
