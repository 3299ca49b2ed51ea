"""The positions of elements of sharded tensors: round trips, hand-written examples and brute force."""

import itertools
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tp_invariant.core.layout import TokenSharding, deinterleave, shard, split_sizes, unshard
from tp_invariant.testing import assert_bitwise_equal

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)


def numbered(shape, dtype=torch.int64):
    """Elements that are distinct if the dtype has enough values."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).view(shape)
    return torch.arange(count).view(shape).to(dtype)


@st.composite
def sharded_tensors(draw):
    """(tensor, dim, world, stride): 1 to 4 dims, `dim` counted from either end, world * stride dividing its size."""
    ndim, world, stride = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    dim = draw(st.integers(-ndim, ndim - 1))
    shape = [draw(st.integers(0, 3)) for _ in range(ndim)]
    shape[dim] = world * stride * draw(st.integers(0, 3))
    tensor = numbered(shape, draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):  # strides that are not the contiguous ones
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor, dim, world, stride


# --- shard, unshard, deinterleave ------------------------------------------------------------------------------------


@unhurried
@given(sharded_tensors())
def test_unshard_undoes_shard(case):
    full, dim, world, stride = case
    shards = [shard(full, dim=dim, rank=rank, world=world, stride=stride) for rank in range(world)]
    assert_bitwise_equal(unshard(shards, dim=dim, stride=stride), full)
    assert_bitwise_equal(unshard(torch.stack(shards), dim=dim, stride=stride), full)


@unhurried
@given(sharded_tensors())
def test_shard_takes_this_ranks_piece_of_every_stacked_part(case):
    full, dim, world, stride = case
    local = full.shape[dim] // (world * stride)
    for rank in range(world):
        starts = [part * world * local + rank * local for part in range(stride)]
        index = torch.tensor([start + i for start in starts for i in range(local)], dtype=torch.int64)
        expected = full.index_select(dim, index)
        assert_bitwise_equal(shard(full, dim=dim, rank=rank, world=world, stride=stride), expected)


@unhurried
@given(sharded_tensors())
def test_shards_are_contiguous_and_share_no_memory(case):
    full, dim, world, stride = case
    before = full.clone()
    part = shard(full, dim=dim, rank=world - 1, world=world, stride=stride)
    assert part.is_contiguous()
    part.zero_()
    assert_bitwise_equal(full, before)


def test_deinterleave_gated_by_hand():
    g0, g1, u0, u1 = (torch.full((2, 3), value) for value in (1.0, 2.0, 3.0, 4.0))
    gathered = torch.cat([g0, u0, g1, u1])
    expected = torch.cat([g0, g1, u0, u1])
    assert_bitwise_equal(deinterleave(gathered, dim=0, world=2, stride=2), expected)
    assert_bitwise_equal(deinterleave(gathered.t(), dim=1, world=2, stride=2), expected.t())


@pytest.mark.parametrize(("world", "stride"), [(1, 3), (3, 1), (1, 1)])
def test_deinterleave_leaves_trivial_layouts_alone(world, stride):
    x = numbered((6, 2))
    assert_bitwise_equal(deinterleave(x, dim=0, world=world, stride=stride), x)


@unhurried
@given(sharded_tensors())
def test_payloads_pass_through(case):
    full, dim, world, stride = case
    special = torch.full(full.shape, 0x7FC1_2345, dtype=torch.int32).view(torch.float32)  # a NaN with a payload
    special.view(-1)[::2] = -0.0
    shards = [shard(special, dim=dim, rank=rank, world=world, stride=stride) for rank in range(world)]
    assert_bitwise_equal(unshard(shards, dim=dim, stride=stride), special)


def test_deinterleave_of_a_size_that_does_not_divide():
    with pytest.raises(ValueError, match="size of dim 1=10 is not divisible by TP degree=2 times partition_stride=2"):
        deinterleave(torch.zeros(3, 10), dim=1, world=2, stride=2)


def test_shard_of_a_size_that_does_not_divide():
    text = "size of dim -1=10 is not divisible by TP degree=3 times partition_stride=2: it must be a multiple of 6"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        shard(torch.zeros(3, 10), dim=-1, rank=0, world=3, stride=2)


# --- sizes ----------------------------------------------------------------------------------------------------------


@unhurried
@given(st.integers(0, 100), st.integers(1, 16))
def test_split_sizes_are_those_of_tensor_split(size, parts):
    assert split_sizes(size, parts) == [len(piece) for piece in torch.tensor_split(torch.zeros(size), parts)]


# --- leaves of tokens -----------------------------------------------------------------------------------------------


def leaf_sums(x, rows_per_sum):
    """[partial sums, H]: sums of `rows_per_sum` consecutive tokens of x [.., H]."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.stack([block.sum(0) for block in flat.split(rows_per_sum)]) if len(flat) else flat


def shards_of(full, world, sequence_dim):
    return [shard(full, dim=sequence_dim, rank=rank, world=world) for rank in range(world)]


def crosses_a_boundary(full, world, sequence_dim, rows_per_sum):
    """Brute force: does a partial sum of the full activation have tokens of two ranks, or a rank a part of one?"""
    owner = torch.zeros(full.shape[:-1], dtype=torch.int64)
    for rank, part in enumerate(owner.chunk(world, sequence_dim)):
        part.fill_(rank)
    return any(len(set(leaf.tolist())) > 1 for leaf in owner.reshape(-1).split(rows_per_sum))


TOKEN_CASES = [
    ((*lead, 3), sequence_dim, world)
    for lead in [(16,), (24,), (8, 3), (3, 8), (4, 12), (2, 3, 8), (2, 8, 3), (8, 2, 3), (1, 8, 1)]
    for sequence_dim in range(len(lead))
    for world in (1, 2, 3, 4, 8)
    if lead[sequence_dim] % world == 0
]


@pytest.mark.parametrize(("shape", "sequence_dim", "world"), TOKEN_CASES)
def test_leaves_from_shards_are_those_of_the_full_activation(shape, sequence_dim, world):
    full = numbered(shape)
    parts = shards_of(full, world, sequence_dim)
    sharding = TokenSharding(world, sequence_dim)
    fitting = []
    for rows_per_sum in (1, 2, 3, 4, 8, 16):
        fits = sharding.partial_sums_fit(parts[0].shape, rows_per_sum)
        if fits and world > 1:
            fitting.append(rows_per_sum)
            major = torch.stack([leaf_sums(part, rows_per_sum) for part in parts])
            assert_bitwise_equal(sharding.order_partial_sums(major, parts[0].shape), leaf_sums(full, rows_per_sum))
            assert not crosses_a_boundary(full, world, sequence_dim, rows_per_sum)
        elif world == 1:
            assert fits
        else:  # leaves that no boundary cuts may be refused only where a rank's last leaf would be short
            tokens = full[..., 0].numel() // world
            assert crosses_a_boundary(full, world, sequence_dim, rows_per_sum) or tokens % rows_per_sum
    assert world == 1 or 1 in fitting


@pytest.mark.parametrize(("shape", "sequence_dim", "world"), TOKEN_CASES)
def test_local_run_by_brute_force(shape, sequence_dim, world):
    full = torch.arange(torch.Size(shape[:-1]).numel()).view(shape[:-1])
    part = full.chunk(world, sequence_dim)[0].reshape(-1)
    breaks = [i for i, (left, right) in enumerate(itertools.pairwise(part.tolist()), 1) if right != left + 1]
    run = TokenSharding(world, sequence_dim).local_run((*full.chunk(world, sequence_dim)[0].shape, shape[-1]))
    assert all(place % run == 0 for place in breaks), "a run holds a gap"
    assert world == 1 or not breaks or breaks[0] == run


@pytest.mark.parametrize(("shape", "sequence_dim"), [((0, 3), 0), ((0, 4, 3), 0), ((4, 0, 3), 0), ((4, 0, 3), 1)])
def test_no_tokens(shape, sequence_dim):
    sharding = TokenSharding(2, sequence_dim)
    assert sharding.partial_sums_fit(shape, 32)
    assert sharding.order_partial_sums(torch.empty(2, 0, 3), shape).shape == (0, 3)
