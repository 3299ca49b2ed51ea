"""torch's own DDP, FSDP2 and ZeRO over two data parallel ranks, with their options: the bits at TP=2 are those of TP=1.

Sums of two ranks have one order, so that no fixed_order_hook is needed.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from meshes import init_device_mesh, replica_groups
from models import GatedMlp
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import tp_invariant as tpi
from tp_invariant import testing


class Blocks(nn.Module):
    def __init__(self, tp) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(GatedMlp(tp, bias=False) for _ in range(2))
        self.shorter = False

    def forward(self, x):
        for block in self.blocks[: 1 if self.shorter else 2]:
            x = block(x)
        return x


def batch(step, rank):
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def compare(case, ranks, names):
    """Each at TP=1 on `ranks` ranks, and at TP=2 on twice as many; mode off differs."""
    expected = run_ranks(case, ranks, 1, names)
    for rank, found in enumerate(run_ranks(case, 2 * ranks, 2, names)):
        testing.assert_bitwise_equal(found, expected[rank // 2])
    for rank, found in enumerate(run_ranks(case, 2 * ranks, 2, names, False)):
        for name in names:
            assert testing.digest(found[name]) != testing.digest(expected[rank // 2][name]), name
            first, wanted = found[name][0][0], expected[rank // 2][name][0][0]  # before any step
            torch.testing.assert_close(first, wanted, rtol=0.02, atol=0.02)


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def prefetch(model):
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def divide(model):
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)


MIXED = dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
OFFLOADED = dict(offload_policy=CPUOffloadPolicy(pin_memory=False))
FULLY_SHARDED = {  # options of fully_shard, what is done to the model, what accumulates
    "whole after forward": (dict(reshard_after_forward=False), None, None),
    "sharded over two after forward": (dict(reshard_after_forward=2), None, None),
    "offloaded": (OFFLOADED, None, None),
    "prefetched": ({}, prefetch, None),
    "divided": ({}, divide, None),
    "mixed precision, accumulated": (MIXED, None, "set_requires_gradient_sync"),
}
REPLICATED = {
    "accumulated shards": ({}, None, "set_requires_all_reduce"),
    "accumulated": (MIXED, None, "set_requires_gradient_sync"),
    "offloaded": (OFFLOADED, None, None),
    "whole after forward": (dict(reshard_after_forward=False), None, None),
}


def fully_sharded(world_group, tp, names, mode=True):
    count = dist.get_world_size(world_group) // tp
    sizes, dims = ((2, 2, tp), ("copies", "shards", "tp")) if count == 4 else ((2, tp), ("shards", "tp"))
    mesh, index, results = init_device_mesh("cpu", sizes, mesh_dim_names=dims), dist.get_rank() // tp, {}
    for name in names:
        options, change, accumulate = (REPLICATED if count == 4 else FULLY_SHARDED)[name]
        model = Blocks(mesh["tp"])
        for module in (*model.blocks, model):
            over = mesh["copies", "shards"] if count == 4 else mesh["shards"]
            fully_shard(module, mesh=over, shard_placement_fn=tpi.fsdp_placement, **options)
        if change:
            change(model)
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        with tpi.set_tp_invariant_mode(mode):
            for step in range(2):
                optimizer.zero_grad()
                for last in (False, True) if accumulate else (True,):
                    if accumulate:
                        getattr(model, accumulate)(last)
                    y = model(batch(2 * step + last, index))
                    y.square().mean().backward()
                    seen.append(y.detach())
                seen.append((testing.full_grads(model), tpi.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
        results[name] = seen, testing.full_parameters(model)
    return results


@pytest.mark.more
def test_options_of_fully_shard():
    compare(fully_sharded, 2, tuple(FULLY_SHARDED))


def test_replicas_and_shards():
    """HSDP."""
    compare(fully_sharded, 4, tuple(REPLICATED))


# --- DDP and ZeRO ---------------------------------------------------------------------------------------------------


def adamw(parameters, group):
    return torch.optim.AdamW(parameters, lr=1e-2)


def zero(parameters, group):
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=group, lr=1e-2)


WAYS = {  # options of DDP, the hook, the optimizer
    "no_sync": ({}, None, adamw),
    "static graph": (dict(static_graph=True), None, adamw),
    "unused parameters": (dict(find_unused_parameters=True, gradient_as_bucket_view=True), None, adamw),
    "uneven inputs": ({}, None, adamw),
    "fp16": ({}, default_hooks.fp16_compress_hook, adamw),
    "averaged models": ({}, debugging_hooks.noop_hook, adamw),
    "ZeRO": ({}, None, zero),
}


def wrapped(world_group, tp, names, mode=True):
    tp_group, dp_group, _ = replica_groups(2, tp, 1)
    index, results = dist.get_rank() // tp, {}
    for name in names:
        options, hook, make = WAYS[name]
        model, seen = Blocks(tp_group), []
        ddp = DistributedDataParallel(model, process_group=dp_group, **options)
        if hook:
            ddp.register_comm_hook(dp_group, hook)
        optimizer = make(model.parameters(), dp_group)
        averager = PeriodicModelAverager(period=2, process_group=dp_group) if name == "averaged models" else None
        uneven = name == "uneven inputs"
        with tpi.set_tp_invariant_mode(mode), Join([ddp]) if uneven else contextlib.nullcontext():
            for step in range(3 - index if uneven else 3):
                model.shorter = name == "unused parameters" and step == 1
                if name == "no_sync":
                    with ddp.no_sync():
                        ddp(batch(step + 5, index)).square().mean().backward()
                y = ddp(batch(step, index))
                y.square().mean().backward()
                seen.append((y.detach(), testing.full_grads(model)))
                optimizer.step()
                if averager:  # of the parameters that have gradients
                    averager.average_parameters(model.parameters())
                model.zero_grad()
        results[name] = seen, testing.full_parameters(model)
    return results


def test_options_of_ddp_and_optimizers_beside_it():
    compare(wrapped, 2, tuple(WAYS))
