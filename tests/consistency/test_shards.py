"""Parts that are equal on several ranks are noticed at a call's first use: copied parameters, and whole inputs."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_or_group
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.consistency import shards
from tp_invariant.functional.regions import gather_sequence


class Model(nn.Module):
    def __init__(self, tp, **options) -> None:
        super().__init__()
        self.embed = tpi.VocabParallelEmbedding(16, 32, tp_group=tp)
        self.fc1 = tpi.LayerNormLinear(32, 64, parallel_mode="column", tp_group=tp, **options)
        self.fc2 = tpi.Linear(64, 32, parallel_mode="row", tp_group=tp, **options)
        self.whole = tpi.Linear(32, 32, tp_group=tp)
        self.head = tpi.Linear(32, 16, parallel_mode="column", bias=False, gather_output=True, tp_group=tp)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.whole(self.fc2(self.fc1(self.embed(ids)))))


def by_fully_shard(model, tp_group, folder):
    fully_shard(model, mesh=DeviceMesh.from_group(tp_group, "cpu"))
    return model


def by_a_load(model, tp_group, folder):
    if tp_group.rank() == 0:
        torch.save(model.state_dict(), f"{folder}/rank0.pt")
    torch.distributed.barrier(tp_group)
    model.load_state_dict(torch.load(f"{folder}/rank0.pt"))
    return model


def by_a_broadcast(model, tp_group, folder):
    """As trainers do."""
    for p in model.parameters():
        torch.distributed.broadcast(p.detach(), 0, group=tp_group)
    return model


def by_ddp(model, tp_group, folder):
    return DistributedDataParallel(model, process_group=tp_group)


def message(model, ids):
    with pytest.raises(RuntimeError) as caught:
        model(ids)
    return str(caught.value)


def copied(tp_group, tool, folder):
    torch.manual_seed(0)
    model = Model(tp_group)
    right = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(8)
    wrapped = tool(model, tp_group, folder)
    text = message(wrapped, ids)
    assert message(wrapped, ids) == text  # until it is right again
    if tool in (by_a_load, by_a_broadcast):
        model.load_state_dict(right, strict=False)
        wrapped(ids)
    return text


@pytest.mark.parametrize("tool", [by_fully_shard, by_a_load, by_a_broadcast, by_ddp])
@pytest.mark.parametrize("mode", [True, False])
def test_equal_shards_are_refused(tool, mode, tmp_path):
    with tpi.set_tp_invariant_mode(mode):
        said = run_ranks(copied, 2, tool, str(tmp_path))
    assert said[0] == said[1]
    assert said[0].startswith(
        "the weight of VocabParallelEmbedding(16, 32) is the same on rank 0, 1 of tp_group, which must hold different "
        "parts of it: one rank's part has been copied to the others, or code of yours has drawn the same values on "
        "each. "
    )
    assert "shards_may_be_equal = True" in said[0]


def two_of_four(tp_group):
    """Where some ranks alone are equal, all say so."""
    layer = tpi.Linear(8, 32, parallel_mode="column", tp_group=tp_group)
    torch.manual_seed(max(1, tp_group.rank()))
    layer.weight = nn.Parameter(torch.rand(8, 8))
    if tp_group.rank() == 2:
        torch.manual_seed(1)
        layer.weight = nn.Parameter(torch.rand(8, 8))
    return message(layer, torch.ones(2, 8))


def test_the_ranks_are_named():
    said = run_ranks(two_of_four, 4)
    assert len(set(said)) == 1
    assert "the weight of Linear(8, 32, 'column') is the same on rank 0, 1, 2 of tp_group" in said[0]


def equal_by_right(tp_group, mesh):
    """What may be equal: constants, weights that are whole, and what says so; then the values are right."""
    tp = DeviceMesh.from_group(tp_group, "cpu") if mesh else tp_group
    ids = torch.arange(8)
    for init in (nn.init.zeros_, nn.init.ones_, lambda weight: nn.init.constant_(weight, torch.nan)):
        Model(tp, init_method=init)(ids)
    torch.manual_seed(0)
    layer = tpi.Linear(8, 16, parallel_mode="column", gather_output=True, bias=False, tp_group=tp)
    part = torch.randn(16 // tp_group.size(), 8)
    layer.weight = nn.Parameter(part.clone())
    if tp_group.size() > 1:
        assert "is the same on rank 0, 1" in message(layer, torch.eye(8))
    layer.shards_may_be_equal = True
    layer(torch.eye(8))
    layer = copy.deepcopy(layer)
    layer.shards_may_be_equal, layer.weight.shards_may_be_equal = False, True
    for again in (layer, copy.deepcopy(layer)):
        y = again(torch.eye(8))
        testing.assert_bitwise_equal(y.detach(), torch.cat([part] * tp_group.size()).t().contiguous())


@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_what_may_be_equal(size, mesh):
    with tpi.set_tp_invariant_mode(True):
        run_ranks(equal_by_right, size, mesh)


# --- parts of different full weights ----------------------------------------------------------------------------------


def made_of_others(tp_group, kind, way, seeds):
    """The first call of layers without a parameter that is whole on every rank; what rank 1 was seeded with."""
    group = mesh_or_group(tp_group, kind)
    torch.manual_seed(seeds[tp_group.rank()])
    if way == "embedding":
        layer = tpi.VocabParallelEmbedding(16, 32, padding_idx=0, tp_group=group)
    elif way == "from_linear":
        layer = tpi.Linear.from_linear(nn.Linear(32, 64, bias=False), parallel_mode="row", tp_group=group)
    elif way == "experts":
        layer = tpi.Experts(4, 32, 64, tp_group=group, bias=False)
    else:
        layer = tpi.Linear(32, 64, bias=False, parallel_mode="column", tp_group=group)
    layer = copy.deepcopy(layer).to(torch.bfloat16)
    if way == "written":  # by code that knows of ranks, or loads a checkpoint
        torch.manual_seed(tp_group.rank())
        with torch.no_grad():
            layer.weight.data.normal_()
    if way == "reset":
        torch.manual_seed(1)
        layer.reset_parameters()
    if way == "embedding":
        call = functools.partial(layer, torch.arange(8))
    elif way == "experts":
        x, index = torch.ones(4, 32, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.long)
        call = functools.partial(layer, x, index, torch.ones(4, 1))
    else:
        features = 32 // tp_group.size() if way == "from_linear" else 32
        call = functools.partial(layer, torch.ones(2, features, dtype=torch.bfloat16))
    try:
        call()
        return ""
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_ranks_with_seeds_of_their_own(kind):
    for way in ("drawn", "embedding", "from_linear", "experts"):
        (one, other) = run_ranks(made_of_others, 2, kind, way, (0, 1))
        assert one == other
        assert re.match(
            r"the ranks of tp_group hold parts of different full weights of (Lin|Voc|Exp)\w+.*: one value on rank 0, "
            r"another on rank 1\. Seed all ranks alike",
            one,
        ), (way, one)
        assert run_ranks(made_of_others, 2, kind, way, (1, 1)) == ["", ""]
    for way in ("written", "reset"):
        assert run_ranks(made_of_others, 2, kind, way, (0, 1)) == ["", ""]


# --- inputs -----------------------------------------------------------------------------------------------------------


def whole_or_cut(tp_group, what, whole, mode):
    """The loss and a gradient, or the error, of what is passed whole or as this rank's part."""
    torch.manual_seed(0)
    size, rank = tp_group.size(), tp_group.rank()
    tokens, sp = torch.randn(8, 2, 16), dict(tp_group=tp_group, sequence_parallel=True)
    part = tokens if whole else tokens.chunk(size, 0)[rank]
    with tpi.set_tp_invariant_mode(mode):
        if what == "logits":
            weight, target = torch.randn(16, 32, requires_grad=True), torch.randint(32, (8, 2))
            logits = tokens @ (weight if whole else weight.chunk(size, 1)[rank])
            call, inputs = lambda: tpi.vocab_parallel_cross_entropy(logits, target, tp_group=tp_group), weight
        elif what == "features":
            layer = tpi.Linear(16, 8, parallel_mode="row", tp_group=tp_group)
            x = tokens[..., : 16 // size] if whole else tokens.chunk(size, 2)[rank]
            call, inputs = lambda: layer(x), layer.weight
        elif what == "gathered":
            call, inputs = lambda: gather_sequence(part, tp_group), None
        elif what == "heads":
            heads = torch.randn(2, 4, 8, 16)
            norm = tpi.ParallelNorm(16, tp_group=tp_group, heads=8, heads_dim=2)
            x = heads[:, :, : 8 // size] if whole else heads.chunk(size, 2)[rank]
            call, inputs = lambda: norm(x), norm.weight
        elif what == "experts":
            layer = tpi.Experts(4, 16, 32, **sp)
            index = torch.zeros(*part.shape[:2], 1, dtype=torch.long)
            call, inputs = lambda: layer(part, index, torch.ones(index.shape)), layer.down_proj
        else:
            layer = {
                "column": lambda: tpi.Linear(16, 32, parallel_mode="column", **sp),
                "norm and column": lambda: tpi.LayerNormLinear(16, 32, parallel_mode="column", **sp),
                "replicated": lambda: tpi.Linear(16, 32, **sp),
                "norm": lambda: tpi.ParallelNorm(16, **sp),
            }[what]()
            call, inputs = lambda: layer(part), next(layer.parameters())
        try:
            y = call()
        except RuntimeError as error:
            return str(error)
        if inputs is None:
            return y
        y.sum().backward()
        return inputs.grad


INPUTS = {
    "logits": r"logits of vocab_parallel_cross_entropy is .*\. Pass tp_group=None for whole logits, .*parallel_mode='c",
    "features": r"x of Linear\(16, 8, 'row'\) is .*\. Pass this rank's features, .* or all 16 of them and input_is_par",
    "column": r"x of Linear\(16, 32, 'column'\) is .*\. Pass this rank's tokens, which scatter_sequence cuts",
    "norm and column": r"x of LayerNormLinear\(16, 32, 'column'\) is .*\. Pass this rank's tokens",
    "replicated": r"x of Linear\(16, 32, None\) is .*\. Pass this rank's tokens",
    "norm": r"x of ParallelNorm\(16, .*\) is .*\. Pass this rank's tokens",
    "heads": r"x of ParallelNorm\(16, .*\) is .*\. Pass this rank's heads",
    "experts": r"hidden_states of Experts\(4, 16, 32\) is .*\. Pass this rank's tokens",
    "gathered": r"x of gather_sequence is .*\. It gathers parts: leave it out",
}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("what", INPUTS)
def test_whole_inputs_are_refused_where_parts_are_meant(what, mode):
    texts = run_ranks(whole_or_cut, 4, what, True, mode)
    assert len(set(texts)) == 1
    assert "the same on rank 0, 1, 2, 3 of tp_group, each of which must pass another part" in texts[0]
    assert re.search(INPUTS[what], texts[0]) and "shards_may_be_equal = True" in texts[0]
    # a control: parts pass, and what they give is right
    results = run_ranks(whole_or_cut, 4, what, False, mode)
    assert all(isinstance(result, torch.Tensor) for result in results)
    if what == "gathered":
        testing.assert_bitwise_equal(results, run_ranks(whole_or_cut, 1, what, True, mode) * 4)


def loss_of_whole_logits(tp_group, how):
    """The bytes and the value of a loss of logits that a head has gathered, and the head's gradient."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(16, 32))
    x, target = torch.randn(6, 16), torch.randint(32, (6,))
    tpi.parallelize(head, tp_group, {"0": "colwise_gather_output" if how != "sharded" else "colwise"})
    logits = torch.compile(head, backend="aot_eager", fullgraph=True)(x) if how == "compiled" else head(x)
    if how == "changed":
        logits = logits.view(2, 3, -1).flatten(0, 1)
    group = None if how == "whole" else tp_group
    try:
        loss = tpi.vocab_parallel_cross_entropy(logits, target, tp_group=group)
    except RuntimeError as error:
        return str(error)
    loss.backward()
    weight, bias = (full.double() for full in tpi.full_state_dict(head).values())
    return loss.detach(), nn.functional.cross_entropy(x.double() @ weight.t() + bias, target), testing.full_grads(head)


def test_a_loss_of_whole_logits_is_right_or_refused():
    with tpi.set_tp_invariant_mode(True):
        (alone,) = run_ranks(loss_of_whole_logits, 1, "sharded")
        assert abs(alone[0] - alone[1]) < 1e-5
        for degree in (2, 4):
            for how in ("sharded", "whole", "gathered", "compiled"):
                for result in run_ranks(loss_of_whole_logits, degree, how):
                    testing.assert_bitwise_equal(result, alone)
            texts = run_ranks(loss_of_whole_logits, degree, "changed")
            assert len(set(texts)) == 1 and "logits of vocab_parallel_cross_entropy is the same on" in texts[0]


def right_programs(tp_group, what):
    """Calls in which parts are equal on all ranks, and right. Each of them would be refused with one thing changed."""
    torch.manual_seed(0)
    size, rank = tp_group.size(), tp_group.rank()
    sp = dict(tp_group=tp_group, sequence_parallel=True)
    column = tpi.Linear(16, 32, parallel_mode="column", **sp)
    row = tpi.Linear(32, 16, parallel_mode="row", tp_group=tp_group)
    tokens = torch.randn(8, 2, 16)
    value = torch.randn(2, 1, 32 // size)
    if what == "one token":  # of each rank, all with one id; and heads that share a key and see one token
        column(tokens[:1].expand(1, 2, 16))
        row(value)
    elif what == "one id":
        column(tokens[:1].expand(2, 2, 16))
        row(value[:1].expand(2, 5, 32 // size))
    elif what == "padding":  # of sequences of one token
        row(torch.cat([value, torch.zeros(2, 4, 32 // size)], 1))
        x = torch.zeros(8, 2, 16)
        x[1 :: 8 // size] = tokens[0]
        column(x.chunk(size, 0)[rank])
    elif what == "constants":
        for number in (0.0, 1.0, float("nan")):
            row(torch.full((5, 32 // size), number))
            column(torch.full((2, 2, 16), number))
        row(torch.randn(5, 1).expand(5, 32 // size))  # behind a column-parallel layer of ones
        head = tpi.Linear(16, 32, parallel_mode="column", bias=False, tp_group=tp_group)
        nn.init.constant_(head.weight, 0.5)
        tpi.vocab_parallel_cross_entropy(head(tokens), torch.zeros(8, 2, dtype=torch.long), tp_group=tp_group)
    elif what == "some ranks":  # say the same: two halves of a text that are one
        column(torch.cat([tokens[:2], tokens[:2], tokens[2:6]]).chunk(size, 0)[rank])
    elif what == "a later call":  # of shapes that were compared
        row(tokens.view(8, 32).chunk(size, 1)[rank])
        row(tokens.view(8, 32)[:, : 32 // size])
    else:
        x = tokens[..., : 32 // size] if size > 2 else tokens
        row.shards_may_be_equal = what == "layer"
        x.shards_may_be_equal = what == "tensor"
        row(x)


@pytest.mark.parametrize(
    "what", ["one token", "one id", "padding", "constants", "some ranks", "a later call", "layer", "tensor"]
)
def test_equal_inputs_of_right_programs(what):
    run_ranks(right_programs, 4, what)


def later_call(tp_group):
    """The error of a call that repeats an earlier one's shapes, where each call is compared; then parts pass again."""
    torch.manual_seed(0)
    row, x = tpi.Linear(16, 8, parallel_mode="row", tp_group=tp_group), torch.randn(3, 16)
    part = x.chunk(tp_group.size(), 1)[tp_group.rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_INVARIANT_CHECK", "1")
        y = row(part)
        text = message(row, x[:, : part.shape[1]])
        testing.assert_bitwise_equal(row(part), y)
    return text


def test_each_call_is_compared_on_request():
    for text in run_ranks(later_call, 2):
        assert text.startswith("x of Linear(16, 8, 'row') is the same on rank 0, 1 of tp_group")


# --- stages of a pipeline -------------------------------------------------------------------------------------------


class Noting(nn.Linear):
    learns: list[bool]

    def forward(self, x):
        self.learns.append(shards._stage_learns_shapes())
        return super().forward(x)


def stages_that_learn_shapes(group):
    """Whether each call of a stage's module, in two steps, is for shapes alone."""
    layer = Noting(4, 4)
    layer.learns = []
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    stage = PipelineStage(layer, rank, ranks, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: y.sum())
    x = torch.ones(2, 4)
    for _ in range(2):
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == ranks - 1 else {}))
    layer.learns.append(shards._stage_learns_shapes())
    return layer.learns


def test_a_stage_that_learns_shapes_is_known():
    """Its inputs are not compared: torch.empty can give the ranks the same numbers."""
    for first, *others in run_ranks(stages_that_learn_shapes, 2):
        assert first is True and others == [False] * 5
