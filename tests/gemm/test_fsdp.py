"""fully_shard over data parallel ranks: what is gathered ahead, or kept, is never what it has freed since."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from meshes import init_device_mesh
from torch.distributed import _composable_state
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import tp_invariant as tpi
from tp_invariant.comm.collectives import Pending
from tp_invariant.core import fsdp, torch_private
from tp_invariant.core.dtensors import local_of
from tp_invariant.core.fsdp import resharded_whole
from tp_invariant.gemm import weights as gemm_weights
from tp_invariant.gemm.weights import WeightLayout, weight_cache
from tp_invariant.testing import assert_bitwise_equal, run_ranks

STEPS = 3


class Block(torch.nn.Module):
    """Its row-parallel layer is the last of the forward, its column-parallel one the first of the backward."""

    def __init__(self, tp=None):
        super().__init__()
        self.up = tpi.Linear(8, 16, bias=False, parallel_mode="column", tp_group=tp)
        self.down = tpi.Linear(16, 8, bias=False, parallel_mode="row", tp_group=tp)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def train(model):
    """Outputs and input gradients of three steps, which all the weights and their gradients have a part in."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 8, generator=generator).to(next(model.parameters()).dtype).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [y.detach(), x.grad]
    return results


def unsharded():
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(True):
        model = torch.nn.Sequential(Block(), Block())
        float64 = torch.nn.Sequential(Block(), Block()).double()
        float64.load_state_dict(model.state_dict())
        results = train(model)
    with tpi.set_tp_invariant_mode(False):
        for got, want in zip(results, train(float64), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    return results


class Late(Pending):
    """A gather that reads its operand when it is waited for, or when fully_shard frees memory: as late as may be."""

    under_way: ClassVar[list[Late]] = []

    def __init__(self, start):
        super().__init__(torch.empty(0), None)
        self._start = start
        self.under_way.append(self)

    def wait(self):
        if not self.waited:
            self.under_way.remove(self)
            self._result = self._start().wait()
        return super().wait()


@contextlib.contextmanager
def garbage_in_freed_memory():
    """fully_shard's memory holds garbage when it is freed, and comes back at the address that it had."""
    start, free = gemm_weights.start_weight, FSDPParam.free_unsharded_param

    def start_weight(weight, layout, peers):
        if weight.untyped_storage().nbytes() == 0:
            weight = torch.full(weight.shape, 1e30)

        def now():
            return start(weight, layout, peers)

        return Late(now) if peers.early else now()

    def free_unsharded_param(self):
        for memory in (output.untyped_storage() for output in self.all_gather_outputs):
            if memory.nbytes():
                memory.fill_(0x7F)
        for late in list(Late.under_way):
            late.wait()
        free(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_weights, "start_weight", start_weight)
        patch.setattr(gemm_weights, "memory_of", lambda weight: (weight.untyped_storage()._cdata, weight.shape))
        patch.setattr(FSDPParam, "free_unsharded_param", free_unsharded_param)
        yield


class Record:
    """Of a parameter, as FSDPParam is."""

    def __init__(self, whole):
        self._unsharded_param = whole


@contextlib.contextmanager
def managed(whole):
    """As if fully_shard had gathered `whole`; gives a list with an item for each look at what it manages."""
    state, looks = FSDPState(), []
    state._fsdp_param_groups = [SimpleNamespace(fsdp_params=[Record(whole)])]
    records = torch_private.fsdp_records_of_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_composable_state, "_module_state_mapping", {0: weakref.ref(state)})
        patch.setattr(torch_private, "fsdp_records_of_groups", lambda state: looks.append(None) or records(state))
        yield looks


def test_what_is_known_of_fully_shards_memory_holds_none_and_is_checked():
    whole = torch.nn.Parameter(torch.ones(2, 3))
    with managed(whole) as looks:
        other = torch.ones(2, 3)
        assert fsdp.resharded_whole(whole.detach()) is whole and len(looks) == 1
        assert fsdp.resharded_whole(other) is None and len(looks) == 2
        memory = whole.untyped_storage().data_ptr()
        whole.data = torch.zeros(2, 3)  # as if the address had gone to another storage
        assert memory in fsdp._records and fsdp._of_memory(fsdp._records, memory) is None
        assert fsdp.resharded_whole(whole.detach()) is whole and len(looks) == 3
    dead = weakref.ref(whole)
    del whole
    gc.collect()
    assert dead() is None


def sharded(tp_group, kind, keep, simulated, rule):
    """`train` with fully_shard of every block over two data parallel ranks with the same data."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"] if kind == "mesh" else mesh["tp"].get_group()
    weight_cache.keep = keep
    with contextlib.ExitStack() as stack:
        stack.enter_context(tpi.set_tp_invariant_mode(True))
        model = torch.nn.Sequential(Block(tp), Block(tp))
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        if simulated:
            stack.enter_context(garbage_in_freed_memory())
        if not rule:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                gemm_weights, "resharded_whole", lambda weight: None
            )
        results = train(model)
        model[0].unshard()
        weight, layout = local_of(model[0].up.weight), WeightLayout("whole", 0, model[0].up.group)
        weight_cache.prefetch(weight, layout)
        assert weight_cache.holds(weight, layout) == [not rule], "it would be of memory that is freed"
        assert resharded_whole(weight) is weight and resharded_whole(torch.zeros(2)) is None, "of the weight alone"
        weight_cache.clear()
        model[0].reshard()
    return results


@pytest.mark.parametrize("kind", ["group", "mesh"])
@pytest.mark.parametrize("simulated", [False, True])
def test_same_bits_under_fully_shard_of_every_block(kind, simulated):
    want = unsharded()
    for keep in (0, 100):
        for rank, got in enumerate(run_ranks(sharded, 4, kind, keep, simulated, True, device="cpu")):
            assert_bitwise_equal(got, want, f"rank {rank}, keep={keep}")


def flat(tp_group, keep):
    """The same with FSDP's first form, FullyShardedDataParallel."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight_cache.keep = keep
    wrap = functools.partial(
        FullyShardedDataParallel,
        process_group=mesh["dp"].get_group(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    with tpi.set_tp_invariant_mode(True):
        return train(wrap(torch.nn.Sequential(*(wrap(Block(mesh["tp"].get_group())) for _ in range(2)))))


def test_same_bits_under_fully_sharded_data_parallel():
    """Its weights are views that each forward makes anew, so none is foreseen, nor found where weights are kept."""
    for keep in (0, 100):
        for rank, got in enumerate(run_ranks(flat, 4, keep, device="cpu")):
            assert_bitwise_equal(got, unsharded(), f"rank {rank}, keep={keep}")


@pytest.mark.parametrize("keep", [0, 100])
def test_without_the_rule_bits_differ(keep):
    """The control: a gather of freed memory, and a weight that was kept over an optimizer's step."""
    for got in run_ranks(sharded, 4, "group", keep, True, False, device="cpu"):
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise_equal(got, unsharded())


class Several(torch.nn.Module):
    """Uses its input three times, beside a residual."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(tpi.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        a, b, c = (part(x) for part in self.parts)
        return a * b + c


def input_gradient(tp_group, shard):
    torch.manual_seed(0)
    blocks, x = torch.nn.ModuleList(Several() for _ in range(2)), torch.randn(8, 32, requires_grad=True)
    mesh = init_device_mesh("cpu", (tp_group.size(),))
    y = x
    with tpi.set_tp_invariant_mode(True):
        for block in blocks:
            y = y + (fully_shard(block, mesh=mesh) if shard else block)(y)
        y.square().sum().backward()
    return x.grad


def test_an_input_that_is_used_several_times_has_one_order_at_every_degree_of_fully_shard():
    plain, one, *two = (
        *(run_ranks(input_gradient, 1, s)[0] for s in (False, True)),
        *run_ranks(input_gradient, 2, True),
    )
    assert_bitwise_equal(two, [one, one])
    assert not torch.equal(plain, one)
    torch.testing.assert_close(plain, one)
