"""Parameters over a DeviceMesh: DTensors that say how they are sharded, with the bits of plain shards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.core.dtensors import local_of
from tp_invariant.gemm.weight_cache import weight_cache
from tp_invariant.testing import full_grads, full_parameters, run_ranks

TOKENS = 24


def on_mesh(tp_group) -> DeviceMesh:
    return DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))


class Block(nn.Module):
    """Every kind of layer, a tie, a padded vocabulary, stacked pieces, and a parameter that is nobody's layer's."""

    def __init__(self, tp, sequence_parallel: bool = False, device=None) -> None:
        super().__init__()
        sp = dict(tp_group=tp, sequence_parallel=sequence_parallel, device=device)
        self.embed = tpi.VocabParallelEmbedding(30, 32, pad_vocab_to_multiple_of=8, **sp)
        self.fc1 = tpi.LayerNormLinear(32, 128, parallel_mode="column", partition_stride=2, **sp)
        self.fc2 = tpi.Linear(64, 32, parallel_mode="row", **sp)
        self.norm = tpi.ParallelNorm(32, bias=True, normalization="LayerNorm", **sp)
        self.whole = tpi.Linear(32, 32, **sp)
        sp["sequence_parallel"] = False
        self.head = tpi.Linear(32, 32, parallel_mode="column", bias=False, gather_output=True, **sp)
        self.head.weight = self.embed.weight
        self.sequence_parallel = sequence_parallel

    def forward(self, ids):
        x = self.embed(ids)
        gate, up = self.fc1(x).chunk(2, -1)
        x = self.whole(self.norm(x + self.fc2(F.relu(gate) * up)))
        if self.sequence_parallel:
            x = tpi.regions.gather_sequence(x, self.head.group)
        return self.head(x)


def trained(tp_group, kind: str, sequence_parallel: bool, dtype: torch.dtype, mode: bool = True):
    """Three steps with accumulation: what each gave."""
    tp = on_mesh(tp_group) if kind == "mesh" else tp_group
    torch.manual_seed(0)
    with tpi.set_tp_invariant_mode(mode):
        model = Block(tp, sequence_parallel).to(dtype)
        kinds = {DTensor} if kind == "mesh" else {nn.Parameter}
        assert {type(p) for p in model.parameters()} == kinds and model.head.weight is model.embed.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                torch.manual_seed(10 * step + part)
                y = model(torch.randint(30, (TOKENS,)))
                y.float().square().mean().backward()
            grads = full_grads(model)
            steps.append((y.detach(), grads, tpi.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        for p in model.parameters():
            assert kind != "mesh" or type(p.grad) is DTensor and p.grad.placements == p.placements
        return steps, full_parameters(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_bits_are_those_of_plain_shards(sequence_parallel, dtype):
    expected = run_ranks(trained, 1, "group", sequence_parallel, dtype)[0]
    for size in (1, 2, 4):
        for result in run_ranks(trained, size, "mesh", sequence_parallel, dtype):
            testing.assert_bitwise_equal(result, expected)


def test_off_the_bits_differ():
    """The negative control: on a mesh, too, the layers go by the mode."""
    digests = {
        testing.digest(run_ranks(trained, size, kind, True, torch.float32, False)[0])
        for size, kind in ((1, "mesh"), (2, "mesh"))
    }
    assert len(digests) == 2
    plain = testing.digest(run_ranks(trained, 2, "group", True, torch.float32, False)[0])
    assert plain in digests
