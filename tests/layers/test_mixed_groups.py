"""Norms and clipping of models that mix groups, of parameters that lost their marks, and of ranks that differ."""

import contextlib
import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from meshes import new_group
from ranks import run_ranks
from torch import nn
from torch.nn.utils import parametrizations

import tp_invariant as tpi
from tp_invariant.comm.collectives import Group, resolve_group
from tp_invariant.layers.parameters import mark_sharded, named_shard_specs
from tp_invariant.testing import assert_bitwise_equal, wide_randn

MODES = (True, False)


def group_of(ranks):
    """The process group of these ranks, of which this one is one; the others need not call."""
    return new_group(tuple(ranks))


def split_group(tp_group, size):
    """This rank's of the groups of `size` consecutive ranks."""
    ranks = dist.get_process_group_ranks(tp_group)
    start = tp_group.rank() // size * size
    return group_of(ranks[start : start + size])


def mixed_model(wide, narrow):
    """Layers over `wide`, over `narrow`, over nobody; whole layers of each kind; other people's."""
    return nn.ModuleDict(
        {
            "embedding": tpi.VocabParallelEmbedding(16, 8, tp_group=wide),
            "whole embedding": tpi.VocabParallelEmbedding(16, 8),
            "column": tpi.Linear(8, 16, parallel_mode="column", partition_stride=2, tp_group=wide),
            "row": tpi.Linear(16, 8, parallel_mode="row", tp_group=wide),
            "narrow": tpi.LayerNormLinear(8, 12, parallel_mode="column", tp_group=narrow),
            "narrow row": tpi.Linear(12, 8, parallel_mode="row", tp_group=narrow),
            "alone": tpi.Linear(8, 8, parallel_mode="row"),
            "replicated": tpi.Linear(8, 8, tp_group=wide),
            "norm": tpi.ParallelNorm(8, tp_group=narrow),
            "foreign": nn.Linear(8, 3),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
        }
    )


def with_gradients(model, seed=0):
    """Gives each parameter its part of a full gradient that depends on its name alone; returns the full ones."""
    generator = torch.Generator().manual_seed(seed)
    full = {}
    for name, parameter, spec in named_shard_specs(model):
        if parameter.requires_grad:
            shape = list(parameter.shape)
            if spec.dim is not None:
                shape[spec.dim] *= spec.group.size
            full[name] = wide_randn(*shape, generator=generator, spread=3)
            parameter.grad = spec.local(full[name])
    return full


def clip(parameters, mode, max_norm=1.0, **options):
    with tpi.set_tp_invariant_mode(mode):
        return tpi.clip_grad_norm_(parameters, max_norm, **options)


def float64_norm(grads):
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


# --- groups ---------------------------------------------------------------------------------------------------------


def test_a_model_that_mixes_groups():
    """TP=4, TP=2 and whole layers: the bits of TP=1 with the mode on, float64's value, on every rank."""

    def on_rank(tp_group, narrow):
        model = mixed_model(tp_group, split_group(tp_group, narrow))
        norms = {}
        for mode in MODES:
            full = with_gradients(model)
            norms[mode] = clip(model.parameters(), mode)
            norms[mode, "scaled"] = {
                name: spec.full(p.grad) for name, p, spec in named_shard_specs(model) if name in full
            }
            with_gradients(model)
            norms[mode, "inf"] = clip(model.parameters(), mode, norm_type=math.inf)
        return norms, full

    single = mixed_model(None, None)
    full = with_gradients(single)
    on = clip(single.parameters(), True)
    scaled = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    expected, largest = float64_norm(full), max(float(grad.abs().max()) for grad in full.values())
    assert on.item() == pytest.approx(expected, rel=1e-6)
    off = set()
    for world, narrow in ((2, 1), (4, 2), (4, 4)):
        for norms, theirs in run_ranks(on_rank, world, narrow):
            assert_bitwise_equal(theirs, full)
            assert_bitwise_equal(norms[True], on, f"TP={world} and {narrow}")
            assert_bitwise_equal(norms[True, "scaled"], scaled, f"TP={world} and {narrow}")
            assert norms[False].item() == pytest.approx(expected, rel=1e-6)
            off.add(norms[False].item())
            assert norms[True, "inf"].item() == norms[False, "inf"].item() == largest


def test_the_order_of_the_groups_is_one_order():
    """Rows and columns of a grid of ranks: neither group is part of the other, and each rank is in one of both."""

    def on_rank(tp_group):
        ranks, me = dist.get_process_group_ranks(tp_group), tp_group.rank()
        row = group_of(ranks[me // 2 * 2 : me // 2 * 2 + 2])
        column = group_of(ranks[me % 2 :: 2])
        model = nn.ModuleList([tpi.Linear(4, 4, parallel_mode="column", tp_group=g) for g in (row, column)])
        norm = nn.LayerNorm(3)
        results = []
        for mode in MODES:
            full = with_gradients(model)
            norm.weight.grad = torch.ones(3)
            results.append(clip([*model.parameters(), norm.weight], mode).item())
        with_gradients(model)
        norm.weight.grad = torch.full((3,), 1.0 + (me == 3))  # ranks 1 and 2 share a group with it, rank 0 does not
        with pytest.raises(RuntimeError, match="differ"):
            clip([*model.parameters(), norm.weight], True)
        return results, float64_norm(full | {"norm": torch.ones(3)})

    for norms, expected in run_ranks(on_rank, 4):
        assert norms == pytest.approx([expected] * 2, rel=1e-6)


def refuses(error, text, parameters, **options):
    parameters = list(parameters)
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    for mode in MODES:
        with pytest.raises(error, match=text):
            clip(parameters, mode, **options)
    assert_bitwise_equal([p.grad for p in parameters if p.grad is not None], [g for g in before if g is not None])


def test_a_group_that_is_not_the_parameters():
    def on_rank(tp_group):
        narrow = split_group(tp_group, 2)
        norms = []
        for own, other in ((tp_group, narrow), (narrow, tp_group)):
            model = nn.Sequential(nn.LayerNorm(4), tpi.Linear(4, 8, parallel_mode="column", tp_group=own))
            full = with_gradients(model)
            ranks = [dist.get_process_group_ranks(group) for group in (own, other)]
            text = (
                rf"parameter 2 with shape \(\d, 4\) is sharded over the ranks \{ranks[0]}, and tp_group has the ranks "
                rf"\{ranks[1]}: leave tp_group out"
            ).replace("]", r"\]")
            refuses(ValueError, text, model.parameters(), tp_group=other)
            refuses(ValueError, "is sharded over the ranks", model.parameters(), tp_group=Group(None, 0, 1))
            again = group_of(ranks[0])  # the same ranks, another process group
            norms += [
                clip(model.parameters(), mode, 1e9, tp_group=group) for mode in MODES for group in (None, own, again)
            ]
            norms.append(float64_norm(full))
        return norms

    for norms in run_ranks(on_rank, 4):
        for i in (0, 7):
            assert [float(x) for x in norms[i : i + 6]] == pytest.approx([norms[i + 6]] * 6, rel=1e-6)


def test_sharded_over_nobody_knows_whom():
    """As Megatron's own layers mark their weights."""

    def on_rank(tp_group):
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        mark_sharded(p, 0, 1)
        refuses(ValueError, "^parameter 0 with shape .* carries no tp_group, so over which ranks it is sharded", [p])
        norms = [clip([p], mode, 1e9, tp_group=tp_group).item() for mode in MODES]
        p.tp_group = tp_group  # a bare process group will do
        norms += [clip([p], mode, 1e9).item() for mode in MODES]
        p.tp_group = "tp"
        refuses(TypeError, "is a str: pass a ProcessGroup", [p])
        return norms

    for norms in run_ranks(on_rank, 2):
        assert norms == pytest.approx([math.sqrt(50)] * 4)


def test_a_gradient_that_went_into_main_grad():
    layer = tpi.Linear(4, 4, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(4, 4)
    layer(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^clip_grad_norm_ takes .* parameter 1 with shape .* into its main_grad"):
        tpi.clip_grad_norm_([nn.Parameter(torch.zeros(1)), layer.weight], 1.0)


# --- marks that were lost -------------------------------------------------------------------------------------------


def loss_of(model, x):
    return model["row"](model["column"](x).tanh()).square().sum() + model["embedding"](torch.arange(6)).square().sum()


def pair(tp_group, **options):
    torch.manual_seed(1)
    return nn.ModuleDict(
        {
            "column": tpi.Linear(6, 12, parallel_mode="column", partition_stride=3, tp_group=tp_group, **options),
            "row": tpi.Linear(12, 6, parallel_mode="row", partition_stride=3, tp_group=tp_group, **options),
            "embedding": tpi.VocabParallelEmbedding(8, 4, tp_group=tp_group),
        }
    )


def lose_marks(model, how):
    """The parameters to clip, whose gradients a loss gives, and how to compute it."""
    if how == "del":
        for layer in model.values():
            for name in list(layer._parameters):
                value = getattr(layer, name).detach().clone()
                delattr(layer, name)
                setattr(layer, name, nn.Parameter(value))
    elif how == "functional_call":
        given = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}

        class Called(nn.Module):
            def __getitem__(self, name):
                mine = {n.partition(".")[2]: p for n, p in given.items() if n.startswith(f"{name}.")}
                return lambda x: torch.func.functional_call(model[name], mine, (x,))

        return list(given.values()), Called()
    elif how == "weight_norm":
        parametrizations.weight_norm(model["column"])
    elif how == "old weight_norm":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(model["column"])
    return list(model.parameters()), model


@pytest.mark.parametrize("how", ["nothing", "del", "functional_call", "weight_norm", "old weight_norm"])
def test_marks_that_were_lost(how):
    def on_rank(tp_group):
        norms = []
        for mode in MODES:
            parameters, model = lose_marks(pair(tp_group), how)
            with tpi.set_tp_invariant_mode(mode):
                loss_of(model, torch.linspace(-1, 1, 30).view(5, 6)).backward()
            norms.append(clip(parameters, mode, 1e9))
        return norms

    (expected,) = run_ranks(on_rank, 1)
    for world in (2, 4):
        for on, off in run_ranks(on_rank, world):
            assert_bitwise_equal(on, expected[0], f"TP={world}")
            assert off.item() == pytest.approx(expected[0].item(), rel=1e-5)


# --- ranks that differ ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def call_check():
    os.environ["TP_INVARIANT_CHECK"] = "1"
    try:
        yield
    finally:
        del os.environ["TP_INVARIANT_CHECK"]


def regions(tp_group, kind):
    """A hand-built model that does one thing wrong on several ranks; the names of its whole parameters that show it."""
    rank, group = tp_group.rank(), resolve_group(tp_group)
    torch.manual_seed(0)
    column = tpi.Linear(8, 16, parallel_mode="column", tp_group=tp_group, sequence_parallel=kind == "norm")
    row = tpi.Linear(16, 8, parallel_mode="row", tp_group=tp_group, sequence_parallel=kind == "norm")
    norm, gain = nn.LayerNorm(8), nn.Parameter(torch.ones(()))
    x = torch.randn(8, 3, 8)
    if kind == "norm":
        x = x[rank * 8 // group.size : (rank + 1) * 8 // group.size]
    if kind == "batch":
        x = x + rank
    normed = norm(x)
    if kind == "dropout":
        normed = normed * (torch.rand(normed.shape, generator=torch.Generator().manual_seed(rank)) > 0.5)
    hidden = column(normed)
    if kind == "gain":
        hidden = hidden * gain
    row(hidden).square().sum().backward()
    return {"norm": norm.weight, "column": column.weight, "row": row.weight, "gain": gain}


@pytest.mark.parametrize("kind", ["norm", "batch", "dropout", "gain"])
def test_whole_gradients_that_differ(kind):
    """Seen by clipping, by an optimizer's first step with the mode on, and with the check by each. Nothing changes."""

    def on_rank(tp_group):
        for mode in MODES:
            with tpi.set_tp_invariant_mode(mode):
                parameters = regions(tp_group, kind)
                first = r"parameter 3 with shape \(\)" if kind == "gain" else r"parameter 0 with shape \(8,\)"
                text = (
                    rf"^clip_grad_norm_: the gradient of {first} differs between the 2 ranks .*: one on rank 0; one on"
                )
                refuses(RuntimeError, text, parameters.values())
                optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
                before = parameters["row"].detach().clone()
                with (
                    call_check(),
                    pytest.raises(RuntimeError, match=r"^SGD\.step: the gradient of parameter .* differs"),
                ):
                    optimizer.step()
                assert_bitwise_equal(parameters["row"].detach(), before)
                if mode:  # they say nothing of a group, and count as whole over that of the layers
                    with pytest.raises(RuntimeError, match=r"^SGD\.step: the gradient of parameter .* differs"):
                        optimizer.step()
                    for name in ("norm", "gain"):
                        parameters[name].tp_group = None
                optimizer.step()
                assert not torch.equal(parameters["row"], before)
        return [name for name, p in parameters.items() if p.grad is not None]

    run_ranks(on_rank, 2)


def test_an_optimizer_may_step_what_clipping_refuses():
    """With the check too: sparse and complex gradients, main_grad, a mark without a group. The others are compared."""

    def on_rank(tp_group):
        layer = tpi.Linear(4, 4, parallel_mode="column", tp_group=tp_group, sequence_parallel=True)
        fused = tpi.Linear(4, 4, bias=False, fuse_wgrad_accumulation=True)
        fused.weight.main_grad = torch.zeros(4, 4)
        embedding = nn.Embedding(8, 4, sparse=True)
        nn.init.ones_(embedding.weight)
        turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        marked, norm = nn.Parameter(torch.ones(4)), nn.LayerNorm(4)
        marked.tensor_model_parallel, marked.partition_dim = True, 0
        x = norm((fused(embedding(torch.arange(2))) * turn).real.contiguous() * marked)
        layer(x).sum().backward()
        parameters = [embedding.weight, turn, marked, fused.weight, *layer.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        before = [p.detach().clone() for p in parameters]
        with call_check():
            optimizer.step()
            assert [torch.equal(p, old) for p, old in zip(parameters, before, strict=True)] == [False] * 3 + [True] + [
                False
            ] * 2
            norm.weight.grad.add_(tp_group.rank())
            optimizer.add_param_group({"params": norm.parameters()})
            with pytest.raises(
                RuntimeError, match=r"^SGD\.step: the gradient of parameter 6 with shape \(4,\) differs"
            ):
                optimizer.step()

    run_ranks(on_rank, 2)


def test_one_bit_of_one_of_many_gradients():
    """Large and small, of each dtype; the first that differs is named."""
    shapes = [((3,), torch.float32), ((300, 257), torch.float32), ((5, 3), torch.bfloat16), ((70, 700), torch.float16)]
    shapes += [((9,), torch.float64), ((40, 1000), torch.float64), ((), torch.float32)]

    def on_rank(tp_group):
        rank = tp_group.rank()
        for number, (_, dtype) in enumerate(shapes):
            ps = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in shapes]
            for p in ps:
                p.grad = torch.ones_like(p).mT.contiguous().mT if p.dim() == 2 and rank == 0 else torch.ones_like(p)
            clip(ps, False, 1e9, tp_group=tp_group)
            odd = ps[number].grad.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
            if rank == 1:
                odd[(-1,) * odd.dim()] ^= 1
            with pytest.raises(
                RuntimeError, match=rf"the gradient of parameter {number} with shape .* differs between"
            ):
                clip(ps, False, 1e9, tp_group=tp_group)

    run_ranks(on_rank, 2)


def test_a_rank_that_differs_late():
    """After many calls that all ranks made alike: no rank waits for another."""

    def on_rank(tp_group):
        rank = tp_group.rank()
        layer, norm = tpi.Linear(4, 4, parallel_mode="column", tp_group=tp_group), nn.LayerNorm(4)
        parameters = [*layer.parameters(), *norm.parameters()]

        def fill():
            for p in parameters:
                p.grad = torch.ones_like(p)

        fill()
        clip(parameters, True)
        fill()
        if rank == 1:
            norm.bias.grad = None
        refuses(RuntimeError, "the gradient of parameter 3 is .* on rank 0; None on rank 1", parameters)
        fill()
        refuses(RuntimeError, "max_norm .* on rank 0; .* on rank 1", parameters, max_norm=2.0 + rank)
        if rank == 1:
            layer.weight.partition_dim = 7
        refuses(RuntimeError, "an error before the call is 'nothing' on rank 0|partition_dim=7", parameters)
        layer.weight.partition_dim = 0
        return clip(parameters, True).item()

    for norm in run_ranks(on_rank, 2):
        assert norm == pytest.approx(math.sqrt(28))
