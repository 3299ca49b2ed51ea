"""The regions' collectives and adjoints: compared with what one process computes from all ranks' inputs."""

import pytest
import torch
from moved_bytes import DTYPES, check_ranks, run_ranks, special, worlds

from tp_invariant.comm.collectives import Group, resolve_group
from tp_invariant.core.layout import shard
from tp_invariant.functional import regions
from tp_invariant.functional.regions import gather_features, gather_sequence, scatter_features, scatter_sequence
from tp_invariant.testing import assert_bitwise_equal


def forward_and_adjoint(fn, x, grad):
    x = x.clone().requires_grad_()
    y = fn(x)
    y.backward(grad)
    return y, x.grad


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequence_regions(world, dtype):
    def case(group):
        checks = 0
        for dim in range(3):
            shape = [2, 3, 4, 5]
            shape[dim] = 2 * group.size
            x, grad = special(shape, dtype, 1), special(shape, dtype, 2)
            x_mine, grad_mine = (t.chunk(group.size, dim)[group.rank] for t in (x, grad))
            for tp_group in (group, group.process_group):
                gathered = forward_and_adjoint(lambda t, g=tp_group, d=dim: gather_sequence(t, g, d), x_mine, grad)
                assert_bitwise_equal(gathered, (x, grad_mine))
                scattered = forward_and_adjoint(lambda t, g=tp_group, d=dim: scatter_sequence(t, g, d), x, grad_mine)
                assert_bitwise_equal(scattered, (x_mine, grad))
                assert gathered[1].is_contiguous()
                assert scattered[0].is_contiguous()
                checks += 1
        return checks

    check_ranks(world, case)


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feature_regions(world, dtype):
    def case(group):
        checks = 0
        for stride in (1, 2, 3):
            shape = (3, 2, 2 * stride * group.size)
            x, grad = special(shape, dtype, 3), special(shape, dtype, 4)
            x_mine, grad_mine = (shard(t, dim=-1, rank=group.rank, world=group.size, stride=stride) for t in (x, grad))
            gathered = forward_and_adjoint(lambda t, s=stride: gather_features(t, group, s), x_mine, grad)
            assert_bitwise_equal(gathered, (x, grad_mine))
            scattered = forward_and_adjoint(lambda t, s=stride: scatter_features(t, group, s), x, grad_mine)
            assert_bitwise_equal(scattered, (x_mine, grad))
            assert gathered[0].is_contiguous()
            checks += 1
        return checks

    check_ranks(world, case)


def test_gathered_gated_features_are_in_the_order_of_one_rank():
    def case(group):
        mine = torch.tensor([[10.0 + group.rank, 20.0 + group.rank]])  # [gate_r up_r]
        y = gather_features(mine, group, 2)
        expected = [10.0 + rank for rank in range(group.size)] + [20.0 + rank for rank in range(group.size)]
        assert_bitwise_equal(y, torch.tensor([expected]))
        return 1

    check_ranks(3, case)


def test_scatter_of_a_sequence_that_does_not_divide():
    def case(group):
        text = "of which sequence parallelism takes dim 1 for the sequence: its size 4 is not divisible by TP degree=3"
        with pytest.raises(ValueError, match=text) as caught:
            scatter_sequence(torch.zeros(3, 4, 2), group, 1)
        for part in ("x on rank", "shape (3, 4, 2)", "multiple of 3", "set sequence_dim", "parallelize has converted"):
            assert part in str(caught.value)
        return 1

    check_ranks(3, case)


def test_one_rank_needs_no_process_group():
    alone, x = Group(None, 0, 1), special((4, 6), torch.float32, 0)
    assert_bitwise_equal(gather_sequence(x, None), x)
    assert_bitwise_equal(scatter_sequence(x, None), x)
    assert_bitwise_equal(gather_features(x, alone, 3), x)
    assert_bitwise_equal(scatter_features(x, alone, 3), x)


def heads_on_rank(tp_group):
    group = resolve_group(tp_group)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 1, 5, 12, generator=generator), torch.randn(2, 8, 5, 12, generator=generator)
    x.requires_grad_()
    y = regions.expand_heads(x, 8 // group.size, group)
    y.backward(dy.chunk(group.size, 1)[group.rank])
    return regions.gather_sequence(y.detach(), group, 1), x.grad, dy


def test_one_key_for_all_heads():
    (y, dx, dy), *_ = run_ranks(heads_on_rank, 1)
    torch.testing.assert_close(dx.double(), dy.double().sum(1, keepdim=True), rtol=1e-6, atol=1e-6)
    assert (y == y[:, :1]).all()
    for degree in (2, 8):
        for got in run_ranks(heads_on_rank, degree):
            assert_bitwise_equal(got, (y, dx, dy))
