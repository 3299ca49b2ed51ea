"""A sharded dim that is stacked of unequal pieces ([q; k; v] with fewer heads of k and v in one Linear)."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from layer_cases import Case, assert_cases_invariant, check_accuracy, run
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant.core.layout import deinterleave, shard, unshard
from tp_invariant.testing import RankError, assert_bitwise_equal, full_grads, full_parameters

DEGREES = (2, 3)


# --- the layout -----------------------------------------------------------------------------------------------------


def test_the_shards_are_those_of_each_piece_and_come_back():
    full = torch.arange(5 * 36).view(5, 36)
    for sizes, world, dim in itertools.product([(24, 6, 6), (6, 30), (36,), (12, 12, 12)], (1, 2, 3), (1, -1)):
        shards = [shard(full, dim=dim, rank=rank, world=world, stride=sizes) for rank in range(world)]
        pieces = [piece.chunk(world, 1) for piece in full.split(sizes, 1)]
        for rank, mine in enumerate(shards):
            assert torch.equal(mine, torch.cat([piece[rank] for piece in pieces], 1))
        assert torch.equal(unshard(shards, dim=dim, stride=sizes), full)
        in_rank_order = torch.cat(shards, dim)
        assert torch.equal(deinterleave(in_rank_order, dim=dim, world=world, stride=sizes), full)
        if sizes == (12, 12, 12):
            assert torch.equal(shards[0], shard(full, dim=dim, rank=0, world=world, stride=3))
    with pytest.raises(ValueError, match="a piece of size of dim 1=36: its size=6 is not divisible by TP degree=4"):
        shard(full, dim=1, rank=0, world=4, stride=(24, 6, 6))
    with pytest.raises(ValueError, match=r"\(24, 6\) add up to 30: they must add up to size of dim 1=36"):
        unshard([full], dim=1, stride=(24, 6))


# --- layers ---------------------------------------------------------------------------------------------------------


def cases(degree: int) -> list[Case]:
    """Column- and row-parallel, every owner map, with and without SP, and the options that move features."""
    found = []
    sizes = (17 * degree, 3 * degree, degree)
    total = sum(sizes)
    for owner_map, sp in itertools.product(("replicate", "rows", "cols", "auto"), (False, True)):
        shared = dict(stride=sizes, owner_map=owner_map, sequence_parallel=sp, tokens=(2 * degree, 3))
        dtype = torch.bfloat16 if owner_map == "cols" else torch.float32
        found += [Case("column", 53, total, dtype=dtype, **shared), Case("row", total, 53, dtype=dtype, **shared)]
    shared = dict(stride=sizes, tokens=(degree, 3))
    found += [
        Case("column", 53, total, norm="RMSNorm", sequence_parallel=True, **shared),
        Case("column", 53, total, gather_output=True, return_bias=True, **shared),
        Case("row", total, 53, input_is_parallel=False, **shared),
        Case("column", 53, total, gather_output=True, backend="aot_eager", **shared),
        Case("row", total, 53, input_is_parallel=False, backend="aot_eager", **shared),
    ]
    return found


@pytest.mark.parametrize("degree", DEGREES)
def test_layers_have_the_same_bits_at_every_degree(degree):
    assert_cases_invariant(cases(degree), degree)


def test_they_are_right_and_the_mode_off_differs():
    sizes = (128, 32, 32)
    for mode, k, n in (("column", 64, 192), ("row", 192, 64)):
        case = Case(mode, k, n, (64,), stride=sizes)
        check_accuracy(case)
        one = run(None, case)
        name = "dx0" if mode == "column" else "y0"
        for got in run_ranks(run, 2, case.with_(mode=False)):
            assert not torch.equal(got[name], one[name])
            torch.testing.assert_close(got[name], one[name], rtol=1e-4, atol=1e-3)


def test_the_layer_says_its_sizes_and_refuses_wrong_ones():
    layer = tpi.Linear(4, 8, parallel_mode="column", partition_sizes=[4, 2, 2])
    assert (layer.partition_sizes, layer.partition_stride) == ((4, 2, 2), 1)
    assert (layer.weight.partition_sizes, layer.bias.partition_stride) == ((4, 2, 2), 1)
    assert layer.shard_spec("weight").stride == (4, 2, 2)
    twin = copy.deepcopy(layer)
    assert (twin.weight.partition_sizes, twin.partition_sizes) == ((4, 2, 2), (4, 2, 2))
    equal = tpi.Linear(4, 6, parallel_mode="column", partition_sizes=(2, 2, 2))
    assert (equal.partition_sizes, equal.partition_stride, equal.weight.partition_stride) == (None, 3, 3)
    layer.weight.partition_stride = 2
    with pytest.raises(ValueError, match=r"partition_stride=2 and partition_sizes=\(4, 2, 2\): leave one"):
        layer(torch.randn(3, 4))
    for options, text in (
        (dict(parallel_mode="column", partition_sizes=(4, 2)), r"\(4, 2\) add up to 6: .* out_features=8"),
        (dict(parallel_mode="row", partition_sizes=(4, 2)), r"\(4, 2\) add up to 6: .* in_features=4"),
        (dict(parallel_mode="column", partition_sizes=(8, 0)), r"must be positive integers"),
        (dict(parallel_mode="column", partition_sizes="8"), r"must be positive integers"),
        (dict(parallel_mode="column", partition_sizes=(4, 4), partition_stride=2), r"no partition_stride"),
        (dict(partition_sizes=(4, 4)), r"goes with parallel_mode='column' or 'row'"),
    ):
        with pytest.raises(ValueError, match=text):
            tpi.Linear(4, 8, **options)


# --- a fused [q; k; v] of grouped-query attention, by a plan --------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, HEAD = 32, 6, 3, 4
SIZES = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, sum(SIZES))
        self.o = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        parts = qkv.split([size * qkv.shape[-1] // sum(SIZES) for size in SIZES], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


PLAN = {"qkv": tpi.Part("colwise", sizes=SIZES), "o": "rowwise"}


def build() -> Attention:
    torch.manual_seed(0)
    return Attention()


def train(tp_group, path, mode=True):
    """Two steps with clipping, a checkpoint in between; all that should not depend on the degree."""
    with tpi.set_tp_invariant_mode(mode):
        model = tpi.parallelize(build(), tp_group, PLAN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        log = tpi.DigestLog(path / f"{tp_group.size() if tp_group else 1}.log", model, tp_group=tp_group)
        seen = []
        for step in range(2):
            x = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            norm = tpi.clip_grad_norm_(model.parameters(), 0.1, tp_group=tp_group)
            log.write(step, loss=loss, gradient_norm=norm)
            seen += [loss.detach(), norm, full_grads(model)]
            optimizer.step()
            optimizer.zero_grad()
        if path and mode:
            tpi.checkpoint.save(path / "saved", model, optimizer)
        state = tpi.full_optimizer_state_dict(model, optimizer)
        return [seen, full_parameters(model), tpi.full_state_dict(model), state["state"]]


def load(tp_group, path):
    model = tpi.parallelize(build(), tp_group, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tpi.checkpoint.load(path / "saved", model, optimizer)
    state = tpi.full_optimizer_state_dict(model, optimizer)
    return [full_parameters(model), tpi.full_state_dict(model), state["state"]]


def test_a_fused_qkv_trains_saves_and_loads_at_every_degree(tmp_path):
    one = train(None, tmp_path)
    (tmp_path / "other").mkdir()
    for got in run_ranks(train, 3, tmp_path / "other"):
        assert_bitwise_equal(got, one)
    for got in run_ranks(load, 3, tmp_path):  # written at TP=1
        assert_bitwise_equal(got, one[1:])
    assert_bitwise_equal(load(None, tmp_path / "other"), one[1:])  # written at TP=3
    assert (tmp_path / "1.log").read_text().splitlines()[1:] == (tmp_path / "other/3.log").read_text().splitlines()[1:]
    off = run_ranks(train, 3, tmp_path / "other", False)[0]
    with pytest.raises(AssertionError):
        assert_bitwise_equal(off, one)
    exact = build().double()
    exact(torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(0)).double()).square().mean().backward()
    torch.testing.assert_close(off[2]["qkv.weight"], one[2]["qkv.weight"], rtol=1e-2, atol=1e-3)
    norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters()])
    assert abs(one[0][1] / norm - 1) < 1e-5
    for name, parameter in exact.named_parameters():
        clipped = parameter.grad * 0.1 / norm
        assert (one[0][2][name] - clipped).norm() < 1e-5 * clipped.norm(), name


def test_a_plan_with_wrong_sizes_is_refused():
    for sizes, text in (
        ((24, 12), r"qkv: partition_sizes=\(24, 12\) add up to 36: they must add up to out_features=48"),
        ((24, 0, 24), r"qkv: partition_sizes=\(24, 0, 24\) must be positive integers"),
    ):
        with pytest.raises(ValueError, match=text):
            tpi.parallelize(build(), None, {"qkv": tpi.Part("colwise", sizes=sizes), "o": "rowwise"})
    with pytest.raises(RankError, match="qkv: a piece of out_features=48: its size=13 is not divisible by TP degree=2"):
        run_ranks(parallelized, 2, {"qkv": tpi.Part("colwise", sizes=(24, 13, 11)), "o": "rowwise"})
    with pytest.raises(ValueError, match=r"sizes and partition_stride"):
        tpi.Part("colwise", sizes=SIZES, partition_stride=3)
    with pytest.raises(ValueError, match="sizes are of linear layers"):
        tpi.Part("replicate", sizes=SIZES)


def parallelized(tp_group, plan):
    tpi.parallelize(build(), tp_group, plan)
