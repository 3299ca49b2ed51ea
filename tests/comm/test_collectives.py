"""Collectives move bytes: compared on every rank with what one process computes from all ranks' inputs."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from meshes import init_device_mesh
from moved_bytes import DTYPES, check_ranks, run_ranks, special, worlds
from torch.distributed.device_mesh import DeviceMesh

from tp_invariant.comm.collectives import (
    Group,
    exchange_cols_for_rows,
    exchange_rows,
    gather_dim,
    gather_major,
    gather_uneven,
    resolve_group,
    start_exchange_rows,
    start_gather_major,
)
from tp_invariant.core.layout import shard, split_sizes, unshard
from tp_invariant.testing import assert_bitwise_equal

GPUS = torch.cuda.device_count()
SIZES = (0, 1, 7, 8, 9, 24)
MEMBERS_ALONE = "make its layers on the ranks of tp_group alone"


# --- raw ------------------------------------------------------------------------------------------------------------


def layouts(x):
    """x, and equal tensors with other strides."""
    yield x
    yield x.t().contiguous().t()
    yield torch.cat([x, x], dim=1)[:, : x.shape[1]]


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers(world, dtype):
    def case(group):
        everyone = [special((3, 5), dtype, seed) for seed in range(group.size)]
        checks = 0
        for mine in layouts(everyone[group.rank]):
            assert_bitwise_equal(gather_major(mine, group), torch.stack(everyone))
            for dim in (0, 1, -1):
                assert_bitwise_equal(gather_dim(mine, dim, group), torch.cat(everyone, dim))
                checks += 1
        cube = [x.view(3, 5, 1).expand(3, 5, 2) for x in everyone]
        for dim in (0, 1, 2, -1):
            assert_bitwise_equal(gather_dim(cube[group.rank], dim, group), torch.cat(cube, dim))
        vector = [x.reshape(-1) for x in everyone]
        assert_bitwise_equal(gather_dim(vector[group.rank], 0, group), torch.cat(vector))
        scalar = [x[0, 1] for x in everyone]
        assert_bitwise_equal(gather_major(scalar[group.rank], group), torch.stack(scalar))
        return checks

    check_ranks(world, case)


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_uneven(world, dtype):
    def case(group):
        checks = 0
        for size, dim in itertools.product(SIZES, (0, 1, -1)):
            whole = special((size, 5) if dim == 0 else (5, size), dtype, size)
            mine = torch.tensor_split(whole, group.size, dim)[group.rank]
            for local in layouts(mine):
                assert_bitwise_equal(gather_uneven(local, dim, size, group), whole, f"{size} along {dim}")
                checks += 1
        return checks

    check_ranks(world, case)


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exchange_rows(world, dtype):
    def case(group):
        checks, uneven = 0, [(3 * rank) % 4 for rank in range(group.size)]  # ranks without a row among them
        for sizes in (*(split_sizes(rows, group.size) for rows in SIZES), uneven):
            everyone = [special((sum(sizes), 4), dtype, seed) for seed in range(group.size)]
            expected = torch.stack([x.split(sizes)[group.rank] for x in everyone])
            for mine in layouts(everyone[group.rank]):
                assert_bitwise_equal(exchange_rows(mine, sizes, group), expected, f"{sizes}")
                checks += 1
        return checks

    check_ranks(world, case)


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exchange_cols_for_rows(world, dtype):
    def case(group):
        checks = 0
        for rows, cols in ((7, 9), (8, 24), (1, 5), (24, 1), (0, 4), (4, 0)):
            whole = special((rows, cols), dtype, rows)
            row_sizes, col_sizes = split_sizes(rows, group.size), split_sizes(cols, group.size)
            mine = whole.split(col_sizes, 1)[group.rank]
            for local in (mine, mine.contiguous(), mine.t().contiguous().t()):
                got = exchange_cols_for_rows(local, row_sizes, col_sizes, group)
                assert_bitwise_equal(got, whole.split(row_sizes)[group.rank], f"{rows} x {cols}")
                checks += 1
        return checks

    check_ranks(world, case)


@worlds
def test_empty_tensors(world):
    def case(group):
        assert_bitwise_equal(gather_major(torch.empty(0, 3), group), torch.empty(group.size, 0, 3))
        assert_bitwise_equal(gather_dim(torch.empty(3, 0), 0, group), torch.empty(3 * group.size, 0))
        assert_bitwise_equal(gather_dim(torch.empty(3, 0), 1, group), torch.empty(3, 0))
        sizes = split_sizes(5, group.size)
        got = exchange_rows(torch.empty(5, 0), sizes, group)
        assert_bitwise_equal(got, torch.empty(group.size, sizes[group.rank], 0))
        return 1

    check_ranks(world, case)


def test_started_collectives_wait_in_any_order():
    def case(group):
        everyone = [torch.full((4, 2), float(rank)) for rank in range(group.size)]
        sizes = split_sizes(4, group.size)
        gathered = start_gather_major(everyone[group.rank], group)
        exchanged = start_exchange_rows(everyone[group.rank], sizes, group)
        expected = torch.stack([x.split(sizes)[group.rank] for x in everyone])
        assert_bitwise_equal(exchanged.wait(), expected)
        assert_bitwise_equal(gathered.wait(), torch.stack(everyone))
        assert_bitwise_equal(gathered.wait(), torch.stack(everyone))
        return 1

    check_ranks(3, case)


def test_one_rank_needs_no_process_group():
    alone, x = Group(None, 0, 1), special((4, 6), torch.float32, 0)
    assert_bitwise_equal(gather_major(x, alone), x[None])
    assert_bitwise_equal(gather_dim(x, 1, alone), x)
    assert_bitwise_equal(gather_uneven(x, 0, 4, alone), x)
    assert_bitwise_equal(exchange_rows(x, [4], alone), x[None])
    assert_bitwise_equal(exchange_cols_for_rows(x, [4], [6], alone), x)


def test_shards_from_a_gather_are_unsharded_by_layout():
    def case(group):
        full = special((12, 5), torch.float32, 9)
        mine = shard(full, dim=0, rank=group.rank, world=group.size, stride=2)
        assert_bitwise_equal(unshard(gather_major(mine, group), dim=0, stride=2), full)
        return 1

    check_ranks(3, case)


# --- which group ----------------------------------------------------------------------------------------------------


def test_no_group_is_one_rank():
    assert resolve_group(None) == Group(None, 0, 1)


@pytest.mark.parametrize("wrong", ["nccl", 4, [0, 1]])
def test_group_of_a_wrong_type(wrong):
    text = f"tp_group={wrong!r} is a {type(wrong).__name__}: pass a ProcessGroup, a 1-D DeviceMesh or None"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        resolve_group(wrong)


def test_groups_and_meshes_on_ranks():
    def on_rank(tp_group):
        group = resolve_group(tp_group)
        assert resolve_group(group) is group
        assert (group.rank, group.size) == (dist.get_rank(), 8)
        assert group.process_group is tp_group
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        row = resolve_group(mesh["tp"])
        assert (row.rank, row.size) == (dist.get_rank() % 4, 4)
        column = resolve_group(mesh["dp"])
        assert (column.rank, column.size) == (dist.get_rank() // 4, 2)
        text = "tp_group is a 2-dimensional DeviceMesh with dims ('dp', 'tp'): pass one dim of it, for example mesh["
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            resolve_group(mesh)
        # and it works: gather over the mesh's own dim
        x = torch.tensor([float(dist.get_rank())])
        first = 4.0 * (dist.get_rank() // 4)
        assert_bitwise_equal(gather_dim(x, 0, row), torch.arange(first, first + 4))
        return True

    assert run_ranks(on_rank, 8) == [True] * 8


def test_a_group_in_any_order_of_ranks():
    """Ranks within the group are used, not global ones."""

    def on_rank(tp_group):
        two = dist.new_group([5, 2])
        if dist.get_rank() not in (2, 5):
            return None
        group = resolve_group(two)
        assert group.rank == dist.get_rank(two)
        mine = torch.tensor([[float(group.rank)]])
        return gather_dim(mine, 0, group).flatten().tolist()

    results = run_ranks(on_rank, 8)
    assert results[2] == results[5] == [0.0, 1.0]


def test_a_group_that_this_rank_is_not_in():
    def on_rank(tp_group):
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            return resolve_group(pair).size
        text = f"tp_group does not contain this rank (global rank {dist.get_rank()}): {MEMBERS_ALONE}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            resolve_group(pair)
        return 0

    assert run_ranks(on_rank, 8) == [2, 2, 0, 0, 0, 0, 0, 0]  # making a group takes all ranks


def test_a_mesh_that_this_rank_is_not_in():
    def on_rank(tp_group):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        if dist.get_rank() < 2:
            return resolve_group(mesh).size
        try:
            return resolve_group(mesh)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    results = run_ranks(on_rank, 8)
    text = f"ValueError: tp_group does not contain this rank (global rank {{}}): {MEMBERS_ALONE}"
    assert results == [2, 2, *(text.format(rank) for rank in range(2, 8))]


def test_a_group_is_copied_by_reference():
    group = Group(None, 0, 1)
    assert copy.deepcopy({"group": group})["group"] is group
