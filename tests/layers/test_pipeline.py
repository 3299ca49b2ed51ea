"""Stages of torch.distributed.pipelining beside tensor parallelism: the bits of the whole model, and its norm."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import more
from meshes import init_device_mesh
from ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.testing import full_grads, full_parameters
from tp_invariant.testing.rank_pool import discard_pool

RANKS, MICRO_BATCHES, TOKENS, HIDDEN, VOCABULARY = 8, 6, 16, 32, 48


class Block(nn.Module):
    """Two column-parallel layers read what came from the stage before."""

    def __init__(self, tp) -> None:
        super().__init__()
        sp = dict(tp_group=tp, sequence_parallel=True, sequence_dim=1)
        self.gate, self.up = (tpi.Linear(HIDDEN, 64, parallel_mode="column", **sp) for _ in range(2))
        self.down = tpi.Linear(64, HIDDEN, parallel_mode="row", **sp)
        self.norm = tpi.ParallelNorm(HIDDEN, **sp)

    def forward(self, x):
        return self.norm(x + self.down(F.relu(self.gate(x)) * self.up(x)))


class Head(nn.Module):
    def __init__(self, tp) -> None:
        super().__init__()
        self.linear = tpi.Linear(
            HIDDEN, VOCABULARY, parallel_mode="column", gather_output=True, sequence_parallel=True, sequence_dim=1,
            tp_group=tp,
        )  # fmt: skip

    def forward(self, x):
        return self.linear(x)


def model_of(tp) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = tpi.VocabParallelEmbedding(VOCABULARY, HIDDEN, tp_group=tp, sequence_parallel=True, sequence_dim=1)
    return nn.Sequential(embedding, *(Block(tp) for _ in range(4)), Head(tp))


def loss_of(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(1).flatten())


def batch(step: int):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2 * MICRO_BATCHES, TOKENS), generator=generator)


def whole(tp_group):
    """Without stages: the micro-batches one after another."""
    with tpi.set_tp_invariant_mode(True):
        model = model_of(tp_group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = []
        for step in range(2):
            losses = []
            for ids in batch(step).chunk(MICRO_BATCHES):
                losses.append(loss_of(model(ids), ids))
                losses[-1].backward()
            for p in model.parameters():
                p.grad.div_(MICRO_BATCHES)
            grads = full_grads(model)
            steps.append((torch.stack(losses).detach(), grads, tpi.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return steps, full_parameters(model)


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
INTERLEAVED = {"interleaved": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}


def staged(world, schedule: str, tp: int, mode: bool = True):
    """With two stages, in 8 / (2 x tp) copies, or with two on each of two ranks: as `whole`, what this rank has."""
    mesh = init_device_mesh("cpu", (RANKS // (2 * tp), 2, tp), mesh_dim_names=("copy", "pp", "tp"))
    pp, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    with tpi.set_tp_invariant_mode(mode):
        whole_model = model_of(mesh["tp"])
        cuts = [0, 3, 6] if schedule in SCHEDULES else [0, 2, 3, 4, 6]
        numbers = range(rank, len(cuts) - 1, 2)
        parts = [whole_model[cuts[n] : cuts[n + 1]] for n in numbers]
        names = {n: name for n, part in zip(numbers, parts, strict=True) for name, _ in part.named_parameters()}
        assert names and all(isinstance(p, DTensor) for part in parts for p in part.parameters())
        stages = [
            PipelineStage(part, number, len(cuts) - 1, torch.device("cpu"), group=pp)
            for number, part in zip(numbers, parts, strict=True)
        ]
        of = stages[0] if schedule in SCHEDULES else stages
        run = (SCHEDULES | INTERLEAVED)[schedule](of, MICRO_BATCHES, loss_fn=loss_of)
        own = nn.ModuleDict({str(i): whole_model[i] for n in numbers for i in range(cuts[n], cuts[n + 1])})
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        steps = []
        for step in range(2):
            ids, losses = batch(step), []
            if rank == 0:
                run.step(ids, **(dict(target=ids, losses=losses) if len(stages) > 1 else {}))
            else:
                run.step(target=ids, losses=losses)
            grads = full_grads(own)
            norm = tpi.clip_grad_norm_(own.parameters(), 0.1, pp_group=pp)
            steps.append((torch.stack(losses).detach() if losses else None, grads, norm))
            optimizer.step()
            optimizer.zero_grad()
        return steps, full_parameters(own)


def check_same(of_rank, expected):
    """What a rank has is that of the whole model; the losses, where it has them."""
    (steps, parameters), (whole_steps, whole_parameters) = of_rank, expected
    for (losses, grads, norm), (all_losses, all_grads, whole_norm) in zip(steps, whole_steps, strict=True):
        if losses is not None:
            testing.assert_bitwise_equal(losses, all_losses)
        testing.assert_bitwise_equal(grads, {name: all_grads[name] for name in grads})
        testing.assert_bitwise_equal(norm, whole_norm)
    testing.assert_bitwise_equal(parameters, {name: whole_parameters[name] for name in parameters})


@pytest.fixture(scope="module")
def expected():
    run_ranks(lambda tp_group: None, RANKS)
    return run_ranks(whole, 1)[0]


@pytest.mark.parametrize(("schedule", "tp"), [("GPipe", 2), more("1F1B", 1), ("1F1B", 2), more("1F1B", 4)])
def test_stages_have_the_bits_of_the_whole_model(schedule, tp, expected):
    ranks = run_ranks(staged, RANKS, schedule, tp)
    for rank in ranks:
        check_same(rank, expected)
    assert {name for _, parameters in ranks for name in parameters} == set(expected[1])


@pytest.fixture(scope="module")
def interleaved(expected):
    return run_ranks(staged, RANKS, "interleaved", 1)


def check_interleaved(ranks, interleaved, expected):
    """Gradients are those of the whole model. The norm's order is that of the ranks, the same at every degree."""
    for steps, _ in ranks:
        _, grads, norm = steps[0]
        testing.assert_bitwise_equal(grads, {name: expected[0][0][1][name] for name in grads})
        torch.testing.assert_close(norm, expected[0][0][2], rtol=1e-6, atol=0)
    assert {testing.digest(rank) for rank in ranks} == {testing.digest(rank) for rank in interleaved}


def test_several_stages_on_each_rank(interleaved, expected):
    check_interleaved(interleaved, interleaved, expected)
    check_interleaved(run_ranks(staged, RANKS, "interleaved", 2), interleaved, expected)


def nodes_outlive_outputs() -> bool:
    """Whether an autograd.Function's place in the graph lasts as long as something refers to it, as other nodes do."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    y = Twice.apply(torch.ones((), requires_grad=True))
    node = y.grad_fn
    y.detach_()
    try:
        return len(node._input_metadata) == 1
    except RuntimeError:
        return False


def test_zero_bubble(interleaved, expected):
    """torch frees a stage's outputs between the two halves of its backward. In torch 2.11 the nodes of any
    autograd.Function end with them, and there the schedule raises on every rank."""
    if nodes_outlive_outputs():
        check_interleaved(run_ranks(staged, RANKS, "zero bubble", 2), interleaved, expected)
        return
    assert torch.__version__.startswith("2.11.")
    with pytest.raises(testing.RankError, match="'_input_metadata' is invalid") as caught:
        run_ranks(staged, RANKS, "zero bubble", 2)
    discard_pool("cpu")  # some had sent what others had not yet received
    assert len(caught.value.errors) == RANKS


def test_off_the_bits_differ(expected):
    """The negative control: stages of stock tensor parallelism, and the whole model's values."""
    digests = []
    for tp in (1, 2):
        ranks = run_ranks(staged, RANKS, "1F1B", tp, False)
        digests.append({testing.digest(rank) for rank in ranks})
        for steps, _ in ranks:
            torch.testing.assert_close(steps[0][2], expected[0][0][2], rtol=1e-4, atol=0)
    assert len(digests[0]) == len(digests[1]) == 2 and not digests[0] & digests[1]


def test_the_whole_models_values_are_right(expected):
    """Losses, gradients and norm of the first step against float64."""
    with tpi.set_tp_invariant_mode(True):
        full = {name: p.detach().double().requires_grad_() for name, p in full_parameters(model_of(None)).items()}

    def forward(ids):
        x = full["0.weight"][ids]
        for i in range(1, 5):
            w = {name: full[f"{i}.{name}"] for name in ("gate.weight", "up.weight", "down.weight", "norm.weight")}
            b = {name: full[f"{i}.{name}.bias"] for name in ("gate", "up", "down")}
            inner = F.relu(F.linear(x, w["gate.weight"], b["gate"])) * F.linear(x, w["up.weight"], b["up"])
            x = F.rms_norm(x + F.linear(inner, w["down.weight"], b["down"]), (HIDDEN,), w["norm.weight"], 1e-6)
        return F.linear(x, full["5.linear.weight"], full["5.linear.bias"])

    losses = torch.stack([loss_of(forward(ids), ids) for ids in batch(0).chunk(MICRO_BATCHES)])
    losses.mean().backward()
    norm = torch.stack([p.grad.norm() for p in full.values()]).norm()
    (found_losses, found_grads, found_norm), _ = expected[0]
    pairs = [(found_losses, losses), (found_norm, norm), *((found_grads[name], p.grad) for name, p in full.items())]
    for found, exact in pairs:
        assert (found.double() - exact).norm() < 2e-6 * exact.norm()


# --- the norm of all stages ------------------------------------------------------------------------------------------


def norms(world, kind: str):
    """Norms of gradients of 1 to 1000 over tp x pp = 2 x 2 (twice): L2, the largest, with a stage that has none."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copy", "pp", "tp"))
    stage, tp = mesh["pp"].get_local_rank(), mesh["tp"].get_group()
    layer = tpi.Linear(20, 24, parallel_mode="column", tp_group=mesh["tp"] if kind == "mesh" else tp)
    values = torch.arange(1.0, 1001.0)[:960].view(2, 24, 20)

    def clip(norm_type=2.0, mode=True, **options):
        weight, bias = layer.weight, layer.bias
        for p, full in ((weight, values[stage]), (bias, values[stage][:, 0])):
            local = layer.shard_spec("weight" if p is weight else "bias").local(full)
            if kind == "mesh":
                local = DTensor.from_local(local, mesh["tp"], p.placements)
            p.grad = None if options.get("without") == stage else local
        with tpi.set_tp_invariant_mode(mode):
            group = options.get("group", mesh["pp"])
            return tpi.clip_grad_norm_([weight, bias], 1e9, pp_group=group, norm_type=norm_type)

    def said(**options):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            clip(**options)
        return str(caught.value)

    cases = itertools.product((True, False), (2.0, torch.inf), ({}, {"without": 1}))
    found = [clip(norm_type, mode, **options) for mode, norm_type, options in cases]
    refused = [said(group=tp), said(norm_type=2.0 if stage else torch.inf), said(mode=stage == 0)]
    return found, refused


@pytest.mark.parametrize("kind", ["mesh", "group"])
def test_norms_of_stages(kind):
    values = torch.arange(1.0, 1001.0).double()[:960].view(2, 24, 20)
    each = torch.cat([values.flatten(1), values[:, :, 0]], dim=1)
    exact = [each.norm(), each[0].norm(), each.max(), each[0].max()] * 2
    for found, (overlap, other_type, other_mode) in run_ranks(norms, RANKS, kind):
        torch.testing.assert_close(torch.stack(found).double(), torch.stack(exact), rtol=1e-6, atol=0)
        assert "it must have one rank of each stage" in overlap
        assert "norm_type, max_norm and error_if_nonfinite is" in other_type
        assert "the TP-invariant mode is" in other_mode


def of_tied(world):
    """Norms and gradients of three parameters: of one model, and of two stages which both hold the first."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copy", "pp", "tp"))
    stage = mesh["pp"].get_local_rank()

    def make(seed):
        layer = tpi.Linear(20, 24, parallel_mode="column", bias=False, tp_group=mesh["tp"])
        spec, full = layer.shard_spec("weight"), torch.randn(24, 20, generator=torch.Generator().manual_seed(seed))
        layer.weight.grad = spec.placed(spec.local(full))
        return layer.weight

    with tpi.set_tp_invariant_mode(True):
        parameters = [make(seed) for seed in range(3)]
        whole = tpi.clip_grad_norm_(parameters, 0.1), [p.grad.full_tensor() for p in parameters]
        tied, *others = (make(seed) for seed in range(3))
        own = [tied, others[0]] if stage == 0 else [others[1], tied]
        twice = tpi.clip_grad_norm_(own, 1e9, pp_group=mesh["pp"])
        tied.shared = mesh["tp"].get_local_rank() == 1
        with pytest.raises(RuntimeError, match="shared=True"):
            tpi.clip_grad_norm_(own, 0.1, pp_group=mesh["pp"])
        tied.shared = stage == 1
        largest = tpi.clip_grad_norm_(own, 1e9, pp_group=mesh["pp"], norm_type=torch.inf)
        alone = tpi.clip_grad_norm_([tied], 1e9)
        staged = tpi.clip_grad_norm_(own, 0.1, pp_group=mesh["pp"]), [p.grad.full_tensor() for p in (tied, *others)]
    return whole, staged, twice, largest, alone, stage


def test_a_parameter_that_two_stages_hold():
    """It counts once where the second is marked, and both are scaled."""
    full = [torch.randn(24, 20, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]
    exact = torch.cat(full).norm()
    for whole, staged, twice, largest, alone, stage in run_ranks(of_tied, RANKS):
        testing.assert_bitwise_equal(staged[0], whole[0])
        mine = [0, 1] if stage == 0 else [0, 2]
        testing.assert_bitwise_equal([staged[1][i] for i in mine], [whole[1][i] for i in mine])
        assert (staged[0].double() - exact).abs() < 1e-6 * exact < (twice.double() - exact).abs()
        assert largest == torch.stack(full).abs().max().float()
        torch.testing.assert_close(alone.double(), full[0].norm(), rtol=1e-6, atol=0)


def with_an_empty_stage(world):
    """A stage without parameters gets the norm of the other."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copy", "pp", "tp"))
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.full((4,), 2.0)
    found = []
    for mode, norm_type in itertools.product((True, False), (2.0, torch.inf)):
        for parameters in ([] if mesh["pp"].get_local_rank() else [p], []):
            with tpi.set_tp_invariant_mode(mode):
                found.append(tpi.clip_grad_norm_(parameters, 1e9, pp_group=mesh["pp"], norm_type=norm_type))
    return torch.stack(found).tolist()


def test_a_stage_without_parameters():
    assert run_ranks(with_an_empty_stage, RANKS) == [[4.0, 0.0, 2.0, 0.0] * 2] * RANKS
