"""Gradients for each chunk of the sequence: the same bits at every degree of context, data and tensor parallelism."""

import copy
import functools
import io
import math

import pytest
import torch
from cases import more
from error_texts import refused
from meshes import init_device_mesh
from models import tree_sum
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant.comm.group import Group
from tp_invariant.data_parallel import MicroBatchTree
from tp_invariant.layers.sequence_chunks import context_parallel_
from tp_invariant.testing import assert_bitwise_equal, wide_randn

pytestmark = pytest.mark.usefixtures("mode_on")
MICRO_BATCHES, BATCH, LENGTH, CHUNKS, VOCABULARY, HIDDEN = 4, 2, 16, 4, 64, 32


class Scale(nn.Module):
    """A user's own module: [B S, H] -> [B S, H] by elementwise operators, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2, HIDDEN))

    def forward(self, x, *, power):
        return {"scaled": x * self.gain**power, "power": power}


class Model(nn.Module):
    """Tied embeddings, norms, sharded layers, a module of a user's own and a mixture of experts; token by token."""

    def __init__(self, tp_group, sequence_dim=1, bias=True, recompute=None):
        super().__init__()
        self.dim, self.recompute = sequence_dim, recompute
        shared = dict(tp_group=tp_group, sequence_dim=sequence_dim)
        self.embed = tpi.VocabParallelEmbedding(VOCABULARY, HIDDEN, **shared)
        self.up = tpi.LayerNormLinear(HIDDEN, 2 * 64, bias=bias, parallel_mode="column", partition_stride=2, **shared)
        self.down = tpi.Linear(64, HIDDEN, bias=bias, parallel_mode="row", return_bias=bias, **shared)
        self.scale = Scale()
        self.mixture = tpi.MixtureOfExperts(
            4, HIDDEN, 16, tpi.Routing(top_k=2), return_router_logits=True, **shared
        )  # fmt: skip
        self.norm = tpi.ParallelNorm(HIDDEN, **shared)
        self.head = tpi.Linear(HIDDEN, VOCABULARY, bias=False, parallel_mode="column", gather_output=True, **shared)
        self.head.weight = self.embed.weight

    def block(self, x):
        gate, up = self.up(x).chunk(2, -1)
        y = self.down(gate.relu() * up)
        y = y if isinstance(y, torch.Tensor) else y[0] + y[1]
        y, _ = self.mixture(self.scale(y.flatten(0, 1), power=2)["scaled"].view(y.shape))
        return x + y

    def forward(self, ids):
        x = self.embed(ids)
        x = self.block(x) if self.recompute is None else checkpoint(self.block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


def build(tp_group, **options):
    torch.manual_seed(0)
    model = Model(tp_group, **options)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.dim() > 1 and "weight" in name:
                p.mul_(4)
    return model


def micro_batch(index):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return ids[0], ids[1]


def loss_of(model, ids, targets):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten(), reduction="none").sum()


def trained(tp_group, sizes, settings):
    return train(sizes, **settings)


def train(sizes, chunks=CHUNKS, steps=2, plain=False, **options):
    """Of (dp, cp, tp): outputs of the first micro-batch, and full gradients, norms and parameters of every step."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp"))
    dim = options.get("sequence_dim", 1)
    model = build(mesh["tp"].get_group() if plain else mesh["tp"], **options)
    if not plain:
        tpi.replicate_(model, mesh["tp"])
    context_parallel_(model, mesh["cp"], sequence_chunks=chunks, sequence_dim=dim)
    tree = MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=MICRO_BATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        for i in tree.share:
            ids, targets = (x if dim else x.t().contiguous() for x in micro_batch(i))
            ids, targets = (tpi.sequence_part(x, mesh["cp"], dim) for x in (ids, targets))
            if i == 0:
                with torch.no_grad():
                    found[f"outputs {step}"] = tpi.regions.gather_sequence(model(ids), mesh["cp"], dim)
            loss_of(model, ids, targets).backward()
            tree.add(count=BATCH * LENGTH)
            assert all(p.grad is None for p in model.parameters())
        tree.reduce()
        found[f"grads {step}"] = tpi.testing.full_grads(model)
        found[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found[f"parameters {step}"] = tpi.testing.full_parameters(model)
    return found


def run(sizes, **options):
    return run_ranks(trained, math.prod(sizes), sizes, options)


@functools.cache
def alone(**options):
    return run((1, 1, 1), **options)[0]


def same(found, expected, what):
    """Of ranks that hold micro-batch 0, the outputs too."""
    for rank, one in enumerate(found):
        assert_bitwise_equal(one, {name: value for name, value in expected.items() if name in one}, f"{what}, {rank}")
    assert found[0].keys() == expected.keys()


def differs(found, expected, *path):
    for name in path:
        found, expected = found[name], expected[name]
    return tpi.testing.digest(found) != tpi.testing.digest(expected)


@pytest.mark.parametrize(
    "sizes", [(1, 4, 1), more((1, 2, 1)), more((2, 2, 1)), more((1, 2, 2)), (2, 1, 2), (2, 2, 2)], ids=str
)
def test_same_bits_at_every_layout(sizes):
    same(run(sizes), alone(), sizes)


@pytest.mark.parametrize(
    "options",
    [dict(plain=True), more(dict(sequence_dim=0)), more(dict(recompute=False)), dict(recompute=True), dict(bias=False)],
    ids=str,
)
def test_ways_to_compute(options):
    expected = alone(**options)
    same(run((1, 2, 2), **options), expected, options)


def test_controls():
    """Another number of chunks has other bits and the same values, those of stock torch on whole sequences."""
    whole, cut = alone(chunks=1), alone()
    assert_bitwise_equal(whole["outputs 0"], cut["outputs 0"])
    assert all(differs(whole, cut, "grads 0", name) for name in cut["grads 0"])
    model = build(None)
    with tpi.set_tp_invariant_mode(False):
        for i in range(MICRO_BATCHES):
            loss_of(model, *micro_batch(i)).backward()
        assert differs(run((1, 4, 1))[0], run((1, 1, 1))[0], "grads 0"), "the mode off"
    for name, p in model.named_parameters():
        expected = p.grad / (MICRO_BATCHES * BATCH * LENGTH)
        for found in (whole, cut):
            error = (found["grads 0"][name] - expected).norm() / expected.norm()
            assert error < 1e-5, (name, error)


class Product(nn.Module):
    """The gradient of its weight for a token is that token."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return x * self.weight


def token(micro_batch, chunk):
    generator = torch.Generator().manual_seed(10 * micro_batch + chunk)
    return wide_randn(7, generator=generator, spread=4)


def summed(tp_group, dp, cp, chunks, micro_batches):
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    model = context_parallel_(Product(), mesh["cp"], sequence_chunks=chunks)
    tree = MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=micro_batches)
    for _ in range(2):
        model.zero_grad()
        for i in tree.share:
            x = torch.stack([token(i, chunk) for chunk in range(chunks)])[None]
            model(tpi.sequence_part(x, mesh["cp"])).sum().backward()
            tree.add()
        tree.reduce()
    return model.weight.grad


@pytest.mark.parametrize("chunks, micro_batches", [(6, 1), (6, 3), (6, 5), (12, 2)])
def test_the_order_of_the_tree(chunks, micro_batches):
    """Also where neither number is a power of two, or a rank has no micro-batch."""
    expected = tree_sum([token(i, chunk) for chunk in range(chunks) for i in range(micro_batches)])
    for dp, cp in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 2), (2, 3), (1, 6), (4, 2)):
        for rank, grad in enumerate(run_ranks(summed, dp * cp, dp, cp, chunks, micro_batches)):
            assert_bitwise_equal(grad, expected, f"dp={dp}, cp={cp}, rank {rank}")


# --- what hangs on parameters -----------------------------------------------------------------------------------------


def chunked(chunks=2, **options):
    return context_parallel_(build(None, **options), None, sequence_chunks=chunks)


def grads_of(model, *indices):
    tree = MicroBatchTree(model.parameters(), Group(None, 0, 1), micro_batches=len(indices))
    for index in indices:
        loss_of(model, *micro_batch(index)).backward()
        tree.add()
    tree.reduce()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_until_the_tree_takes_them():
    """`.grad` is NaN, and zero_grad() drops what waits: a warm-up, a step that is given up."""
    model, fresh = chunked(), chunked()
    loss_of(model, *micro_batch(0)).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())
    model.zero_grad()
    loss_of(model, *micro_batch(1)).backward()
    model.zero_grad()
    assert_bitwise_equal(grads_of(model, 2, 3), grads_of(fresh, 2, 3))


def test_weights_that_are_loaded_copied_and_converted():
    expected = grads_of(chunked(), 0)
    model = chunked()
    grads_of(model, 1)  # it has aliases now
    names = set(build(None).state_dict())
    assert set(model.state_dict()) == names == {*dict(model.named_parameters()), "head.weight"}
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    model.load_state_dict(build(None).state_dict())
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (model, copy.deepcopy(model), torch.load(stream, weights_only=False), model.to_empty(device="cpu")):
        twin.load_state_dict(build(None).state_dict())
        twin.zero_grad()
        assert_bitwise_equal(grads_of(twin, 0), expected)
    assert {type(module).__name__ for module in model.modules()} == {type(m).__name__ for m in build(None).modules()}


def test_a_stride_that_is_set_late():
    """Gradient norms are summed by the bias' stride, which is the weight's from the first forward on."""
    model = context_parallel_(nn.Sequential(tpi.Linear(4, 8, parallel_mode="column")), None, sequence_chunks=2)
    model[0].weight.partition_stride = 2
    model(torch.ones(1, 4, 4))
    assert model[0].bias.partition_stride == 2


def test_frozen_parameters_and_other_lengths():
    model = chunked()
    model.up.requires_grad_(False)
    frozen = set(dict(model.named_parameters())) - {f"up.{name}" for name, _ in model.up.named_parameters()}
    tree = MicroBatchTree(model.parameters(), Group(None, 0, 1), micro_batches=1)
    loss_of(model, *micro_batch(0)).backward()
    tree.add()
    tree.reduce()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == frozen
    ids, _ = micro_batch(0)
    with torch.no_grad():
        assert_bitwise_equal(model(ids[:, :5]), build(None)(ids[:, :5]))


# --- what is refused --------------------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A parameter beside a module with parameters."""

    def __init__(self):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)


def test_what_is_refused_before_anything_is_touched():
    def text(module, **options):
        options = dict(sequence_chunks=2) | options
        before = [type(m) for m in module.modules()]
        found = refused(ValueError, lambda: context_parallel_(module, None, **options))
        assert [type(m) for m in module.modules()] == before
        assert not any(hasattr(p, "sequence_chunks") for p in module.parameters())
        return found

    assert "0, a Beside: has gain itself and modules with parameters inside" in text(nn.Sequential(Beside()))
    assert "0, a Conv1d: does not compute token by token" in text(nn.Sequential(nn.Conv1d(4, 4, 3)))
    assert "0, a LSTM: does not compute token by token" in text(nn.Sequential(nn.LSTM(4, 4)))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert "0, a ParametrizedLinear: is parametrized" in text(nn.Sequential(normed))
    fused = tpi.Linear(4, 4, fuse_wgrad_accumulation=True)
    assert "fuse_wgrad_accumulation=True adds the gradients of all chunks" in text(fused)
    for chunks in (0, True, 1.5):
        assert f"sequence_chunks={chunks!r} on rank 0 of cp_group must be a positive multiple" in text(
            nn.Linear(4, 4), sequence_chunks=chunks
        )
    assert "sequence_dim=2 on rank 0 of cp_group must be 0 or 1" in text(nn.Linear(4, 4), sequence_dim=2)
    model = chunked()
    assert "has chunks of a sequence already" in refused(
        ValueError, lambda: context_parallel_(model, None, sequence_chunks=2)
    )


def test_calls_that_are_refused():
    model = chunked(4)
    ids, _ = micro_batch(0)
    assert "has 14 tokens of each sequence: this rank's 4 of sequence_chunks=4" in refused(
        ValueError, lambda: model(ids[:, :14])
    )
    assert "norm, a ParallelNorm, on rank 0 of cp_group is called outside of a forward of Model" in refused(
        RuntimeError, lambda: model.norm(torch.zeros(2, 16, HIDDEN))
    )
    model.block = lambda x: model.down(torch.zeros(2, 3, 64))
    assert (
        "down, a Linear, on rank 0 of cp_group has an input of shape (2, 3, 64), in which 16 tokens of each of 2"
        in (refused(ValueError, lambda: model(ids)))
    )
    model = nn.Sequential(Mean())
    context_parallel_(model, None, sequence_chunks=2)
    assert "0, a Mean, on rank 0 of cp_group gives for 8 tokens of each of 2 sequences a tensor of shape (3,)" in (
        refused(ValueError, lambda: model(torch.zeros(2, 16, 3)))
    )


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.gain).mean((0, 1))


@pytest.mark.parametrize("held", [1, 2])
def test_an_optimizer_without_the_tree_is_refused(held):
    """Of one chunk the gradient is a partial sum, of several NaN."""
    model = context_parallel_(Product(), Group(None, 0, 2 // held), sequence_chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4, 7)).sum().backward()
    assert (
        "SGD has the gradient of parameter 0 with shape (7,) on rank 0 of cp_group for a part of 2 chunks"
        in refused(RuntimeError, optimizer.step)
    )
    assert_bitwise_equal(model.weight.detach(), torch.ones(7))


def test_gradients_by_another_way_are_refused():
    model = chunked()
    tree = MicroBatchTree(model.parameters(), Group(None, 0, 1), micro_batches=1)
    (loss_of(model, *micro_batch(0)) + model.up.weight.square().sum()).backward()
    text = refused(RuntimeError, tree.add)
    assert "has a .grad, besides those of its 2 chunks of the sequence" in text and "(128, 32) on rank 0" in text


def refusals_of_ranks(tp_group):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    texts = {}
    sharded = nn.Sequential(
        tpi.Linear(8, 8, parallel_mode="row", sequence_parallel=True, tp_group=mesh["tp"].get_group())
    )
    texts["sp"] = refused(ValueError, lambda: context_parallel_(sharded, mesh["cp"], sequence_chunks=4))
    texts["chunks"] = refused(ValueError, lambda: context_parallel_(sharded, mesh["cp"], sequence_chunks=3))
    torch.manual_seed(mesh["cp"].get_local_rank())
    other = nn.Linear(8, 8)
    texts["weights"] = refused(RuntimeError, lambda: context_parallel_(other, mesh["cp"], sequence_chunks=2))
    torch.manual_seed(0)
    model = context_parallel_(nn.Linear(8, 8), mesh["cp"], sequence_chunks=2)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp"))
    texts["mesh"] = refused(ValueError, lambda: MicroBatchTree(model.parameters(), mesh=alone, micro_batches=4))
    mixed = [*model.parameters(), nn.Parameter(torch.zeros(2))]
    texts["mixed"] = refused(ValueError, lambda: MicroBatchTree(mixed, mesh=mesh, micro_batches=4))
    tree = MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=1)
    model(torch.zeros(2, 4, 8)).sum().backward()
    tree.add(count=4 + mesh["cp"].get_local_rank())
    texts["counts"] = refused(RuntimeError, tree.reduce)
    return texts


def test_parts_of_a_sequence():
    x = torch.arange(24).view(2, 12)
    group = Group(None, 2, 3)
    assert_bitwise_equal(tpi.sequence_part(x, group), x[:, 8:].contiguous())
    assert_bitwise_equal(tpi.sequence_part(x.t(), group, 0), x.t()[8:].contiguous())
    assert "multiple of the context parallel degree 3" in refused(ValueError, lambda: tpi.sequence_part(x, group, 0))
    assert "dim=2 is out of range" in refused(IndexError, lambda: tpi.sequence_part(x, group, 2))
    assert "use tpi.regions.scatter_sequence" in refused(
        ValueError, lambda: tpi.sequence_part(x.float().requires_grad_(), group)
    )


def test_what_ranks_are_refused():
    for rank, texts in enumerate(run_ranks(refusals_of_ranks, 4)):
        assert f"0 on rank {rank // 2} of cp_group has sequence_parallel=True, and a rank holds 2 chunks" in texts["sp"]
        assert (
            f"sequence_chunks=3 on rank {rank // 2} of cp_group must be a positive multiple of the" in texts["chunks"]
        )
        assert "the 2 ranks of cp_group hold different weights in 2 of 2 parameters" in texts["weights"]
        assert 'the dim "cp" of mesh has 1 ranks, and the parameters' in texts["mesh"]
        assert "parameter 2 with shape (2,)" in texts["mixed"] and "has a gradient for 1 chunks" in texts["mixed"]
        assert "gave the counts [4, 5]: give every rank of cp_group the count of whole sequences" in texts["counts"]
