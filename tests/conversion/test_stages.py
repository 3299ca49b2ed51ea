"""Hugging Face models cut into pipeline stages: one process's bits, over stages, data and tensor parallelism."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hf_models import VOCABULARY, build
from meshes import init_device_mesh
from ranks import run_ranks
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.checkpoint.full_state import entry_of
from tp_invariant.comm.collectives import gather_major, resolve_group
from tp_invariant.conversion.stages import _Boundary, problems_with_stages
from tp_invariant.layers.parameters import named_shard_specs
from tp_invariant.testing import full_grads, full_parameters

RANKS, MICRO_BATCHES, ROWS, TOKENS, LAYERS, STEPS = 8, 4, 2, 16, 5, 2
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
INTERLEAVED = {"interleaved": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}
MODELS = {
    "qwen3 tied": ("qwen3", {}),
    "qwen3": ("qwen3", dict(tie_word_embeddings=False)),
    "llama tied": ("llama", dict(tie_word_embeddings=True)),
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),  # scales its embeddings, which are tied
    "granitemoe tied": (  # scales them in the model's forward, and its logits
        "granitemoe",
        dict(tie_word_embeddings=True, embedding_multiplier=3.0, logits_scaling=2.0),
    ),
    "qwen3_moe": ("qwen3_moe", {}),
}


@pytest.fixture(scope="module", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, RANKS)


def model_of(kind, dtype=torch.float32):
    family, options = MODELS[kind]
    return build(family, dtype, num_hidden_layers=LAYERS, **options)


def batch(step):
    """Token ids [n, B, S] and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (MICRO_BATCHES, ROWS, TOKENS), generator=generator)
    return ids, ids.roll(-1, 2).masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)


def loss_of(logits, targets, cp_group=None):
    """The sum of all tokens' losses, in one order at every layout."""
    each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return tpi.regions.gather_sequence(each.view(targets.shape), cp_group, 1).sum()


def whole(tp_group, kind, dtype=torch.float32, chunks=1, mode=True):
    """Without stages: the micro-batches one after another."""
    with tpi.set_tp_invariant_mode(mode):
        model = tpi.parallelize(model_of(kind, dtype), tp_group, sequence_chunks=chunks)
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), tp_group, MICRO_BATCHES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = {}
        for step in range(STEPS):
            losses = []
            for ids, targets in zip(*batch(step), strict=True):
                losses.append(loss_of(model(ids).logits, targets))
                losses[-1].backward()
                tree.add(count=int((targets != -100).sum()))
            tree.reduce()
            found |= measured(step, losses, model, None)
            optimizer.step()
            optimizer.zero_grad()
        return found | named("after", full_parameters(model))


def named(of, tensors):
    return {(of, name): tensor for name, tensor in tensors.items()}


def measured(step, losses, model, pp_group):
    grads = named(f"gradient {step}", full_grads(model))
    norm = tpi.clip_grad_norm_(model.parameters(), 0.1, pp_group=pp_group)
    losses = {("losses", step): torch.stack(losses).detach()} if losses else {}
    return grads | losses | {("norm", step): norm}


def stage_of(mesh, kind, dtype=torch.float32, **options):
    return tpi.parallelize(model_of(kind, dtype), mesh=mesh, **options)


def mesh_of(pp, dp, cp, tp):
    sizes, names = (pp, dp, cp, tp), ("pp", "dp", "cp", "tp")
    return init_device_mesh("cpu", (RANKS // math.prod(sizes), *sizes), mesh_dim_names=("copy", *names))[names]


def staged(
    world, kind, layout, schedule, sequence_parallel, dtype=torch.float32, chunks=1, mode=True, without=None,
    steps=STEPS,
):  # fmt: skip
    """As `whole`, what this rank has; with two stages on it for an interleaved schedule.

    without: "the exchange" of tied embeddings' gradients, or "numbers" of stages on parameters.
    """
    mesh, per_rank = mesh_of(*layout), 2 if schedule in INTERLEAVED else 1
    options = dict(sequence_parallel=sequence_parallel, sequence_chunks=chunks, stages_per_rank=per_rank)
    with tpi.set_tp_invariant_mode(mode):
        model = stage_of(mesh, kind, dtype, **options)
        if without == "the exchange":
            model.has_tied_stage = False
        for p in model.parameters() if without == "the exchange" else ():
            vars(p).pop("tied_stage", None)
            vars(p).pop("copy_of", None)
        parts = []
        for part in tpi.data_parallel.stages_of(model):
            tree = tpi.data_parallel.MicroBatchTree(part.parameters(), mesh=mesh, micro_batches=MICRO_BATCHES)
            parts.append(tpi.data_parallel.Stage(part, mesh["pp"], "cpu", tree=tree))
        assert [part.stage_index for part in parts] == [
            *range(mesh["pp"].get_local_rank(), parts[0].num_stages, layout[0])
        ]
        of = parts if schedule in INTERLEAVED else parts[0]
        for p in model.parameters() if without == "numbers" else ():
            del p.pipeline_stage
        loss_fn = partial(loss_of, cp_group=mesh["cp"])
        run = (SCHEDULES | INTERLEAVED)[schedule](of, len(tree.share), loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = {}
        for step in range(steps):
            ids, targets = (x[tree.share.start : tree.share.stop] for x in batch(step))
            counts, losses = [int((one != -100).sum()) for one in targets], []
            ids, targets = (tpi.sequence_part(x, mesh["cp"], 2) for x in (ids, targets))
            for part in parts:
                part.counts = counts
            last = dict(target=targets.flatten(0, 1), losses=losses) if parts[-1].is_last else {}
            run.step(*([ids.flatten(0, 1)] if parts[0].is_first else []), **last)
            for part in parts:
                part.tree.reduce()
            found |= measured(step, losses, model, mesh["pp"])
            if losses:
                found["losses", step] = gather_major(found["losses", step], resolve_group(mesh["dp"])).flatten()
            optimizer.step()
            optimizer.zero_grad()
        return found | named("after", full_parameters(model))


def check_same(ranks, expected):
    """What each rank has is that of one process; together they have all of it, and a copy of what is tied."""
    tied = {key: expected[key[0], "model.embed_tokens.weight"] for key in all_keys(ranks) - expected.keys()}
    assert {name for _, name in tied} <= {"lm_head.weight"}
    for found in ranks:
        testing.assert_bitwise_equal(found, {key: (expected | tied)[key] for key in found})
    assert expected.keys() <= all_keys(ranks)


def all_keys(ranks):
    return set().union(*ranks)


def frozen(world, layout):
    """Gradients of the attention alone, as of adapters: the tied embeddings have none."""
    mesh = mesh_of(*layout)
    with tpi.set_tp_invariant_mode(True):
        model = stage_of(mesh, "qwen3 tied")
        for name, p in model.named_parameters():
            p.requires_grad_("self_attn" in name)
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=MICRO_BATCHES)
        stage = tpi.data_parallel.Stage(model, mesh["pp"], "cpu", tree=tree)
        ids, targets = (x.flatten(0, 1) for x in batch(0))
        given = ([ids] if stage.is_first else []), (dict(target=targets) if stage.is_last else {})
        Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of).step(*given[0], **given[1])
        tree.reduce()
        return {name: grad for name, grad in full_grads(model).items() if grad is not None}


def test_tied_embeddings_that_are_frozen():
    expected, *_ = run_ranks(frozen, RANKS, (1, 1, 1, 1))
    for found in run_ranks(frozen, RANKS, (2, 1, 1, 1)):
        testing.assert_bitwise_equal(found, {name: expected[name] for name in found})


CASES = [  # kind, (pp, dp, cp, tp), schedule, sequence_parallel, dtype, chunks; the last five without --all-cases
    ("qwen3 tied", (1, 1, 1, 4), "GPipe", True, torch.float32, 1),
    ("qwen3 tied", (1, 4, 1, 1), "1F1B", False, torch.float32, 1),
    ("qwen3 tied", (4, 1, 1, 1), "1F1B", False, torch.float32, 1),
    ("qwen3 tied", (1, 2, 1, 2), "1F1B", False, torch.float32, 1),
    ("qwen3 tied", (2, 1, 1, 2), "GPipe", False, torch.float32, 1),
    ("qwen3 tied", (2, 1, 1, 2), "1F1B", True, torch.bfloat16, 1),
    ("qwen3 tied", (2, 2, 1, 1), "1F1B", False, torch.float32, 1),
    ("qwen3 tied", (2, 2, 1, 2), "GPipe", False, torch.float32, 1),
    ("qwen3", (2, 1, 1, 2), "1F1B", True, torch.float32, 1),
    ("gemma3", (4, 1, 1, 1), "GPipe", False, torch.float32, 1),
    ("qwen3_moe", (4, 1, 1, 1), "GPipe", False, torch.float32, 1),
    ("qwen3 tied", (2, 2, 1, 2), "1F1B", True, torch.float32, 1),
    ("qwen3 tied", (2, 2, 1, 2), "GPipe", True, torch.bfloat16, 2),
    ("llama tied", (4, 1, 1, 2), "1F1B", True, torch.float32, 1),
    ("granitemoe tied", (4, 1, 1, 2), "1F1B", False, torch.float32, 1),
    ("llama", (1, 1, 1, 2), "interleaved", False, torch.float32, 1),
    ("qwen3 tied", (2, 1, 1, 2), "interleaved", True, torch.float32, 1),
    ("llama", (2, 2, 1, 2), "interleaved", True, torch.float32, 1),
    ("qwen3 tied", (2, 1, 2, 2), "1F1B", True, torch.bfloat16, 2),
    ("llama", (2, 2, 1, 2), "GPipe", True, torch.float32, 1),
    ("qwen3_moe", (2, 2, 1, 2), "1F1B", True, torch.float32, 1),
    ("qwen3 tied", (4, 1, 1, 1), "GPipe", False, torch.bfloat16, 1),
    ("gemma3", (2, 1, 1, 2), "1F1B", True, torch.float32, 1),
    ("qwen3 tied", (2, 1, 2, 2), "interleaved", True, torch.bfloat16, 2),
    ("qwen3_moe", (2, 2, 2, 1), "interleaved", False, torch.float32, 2),
    ("llama", (2, 1, 1, 2), "zero bubble", True, torch.float32, 1),
]


@pytest.fixture(scope="module")
def expected():
    """The results of one process, computed once for each model and dtype."""
    kept = {}

    def of(*case):
        if case not in kept:
            kept[case] = run_ranks(whole, 1, *case)[0]
        return kept[case]

    return of


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = CASES if metafunc.config.getoption("--all-cases") else CASES[-5:]
        metafunc.parametrize("case", cases, ids=[" ".join(map(str, case)) for case in cases])


def test_layouts(case, expected):
    if case[2] == "zero bubble" and torch.__version__.startswith("2.11."):
        pytest.skip("tests/layers/test_pipeline.py::test_zero_bubble says why torch 2.11 cannot run it")
    check_same(run_ranks(staged, RANKS, *case), expected(case[0], *case[-2:]))


@pytest.mark.parametrize("kind", ["qwen3 tied", "gemma3", "llama", "qwen3_moe"])
def test_values(kind, expected):
    """Losses, gradients and the norm of the first step against the model of transformers in float64."""
    model, found = model_of(kind, torch.float64), expected(kind, torch.float32, 1)
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    ids, targets = batch(0)
    losses = torch.stack([
        F.cross_entropy(model(i).logits.flatten(0, 1), t.flatten(), reduction="sum")
        for i, t in zip(ids, targets, strict=True)
    ])  # fmt: skip
    (losses.sum() / (targets != -100).sum()).backward()
    exact = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in exact.values()]).norm()
    pairs = [(found["losses", 0], losses.detach()), (found["norm", 0], norm)]
    pairs += [(found["gradient 0", name], grad) for name, grad in exact.items()]
    for ours, reference in pairs:
        assert (ours.double() - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved"])
def test_off_the_bits_differ(schedule, expected):
    case = "qwen3 tied", (2, 1, 1, 2), schedule, True, torch.float32, 1
    on = expected(case[0], *case[-2:])
    off = {key: x for rank in run_ranks(staged, RANKS, *case, False, None, 1) for key, x in rank.items()}
    torch.testing.assert_close(off["norm", 0], on["norm", 0], rtol=1e-4, atol=0)
    first = [key for key in on if key[0] == "gradient 0"]
    assert sum(testing.digest(off[key]) != testing.digest(on[key]) for key in first) > len(first) / 2


def one_after_another(world):
    """Logits of the model, and of its two stages one after the other, which are on one rank; of two lengths.

    Sequence parallelism does not divide the second one: no layer then scatters, of either stage.
    """
    mesh = mesh_of(1, 1, 1, 2)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        model = stage_of(mesh, "llama", sequence_parallel=True, stages_per_rank=2)
        first, last = tpi.data_parallel.stages_of(model)
        assert [*first.parameters(), *last.parameters()] == [*model.parameters()]
        found = []
        for tokens in (TOKENS, TOKENS - 1):
            ids = batch(0)[0][0, :, :tokens]
            states = first(ids)
            assert states.shape == (ROWS, tokens, model.config.hidden_size)
            found.append((model(ids).logits, last(states).logits))
        return found


def test_stages_are_parts_of_the_model():
    for found in run_ranks(one_after_another, RANKS):
        for whole_model, in_stages in found:
            testing.assert_bitwise_equal(in_stages, whole_model)


def test_tied_embeddings_without_the_exchange(expected):
    """Each stage then has its own gradient, and their sum after the tree is rounded otherwise than before it."""
    case = "qwen3 tied", (2, 1, 1, 2), "1F1B", True, torch.float32, 1
    ranks = run_ranks(staged, RANKS, *case, True, "the exchange", 1)
    grads = {key: x for rank in ranks for key, x in rank.items() if key[0] == "gradient 0"}
    exact = expected(case[0], *case[-2:])["gradient 0", "model.embed_tokens.weight"]
    first, last = (grads["gradient 0", f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    assert not torch.allclose(first, exact, rtol=1e-3) and not torch.allclose(last, exact, rtol=1e-3)
    torch.testing.assert_close(first + last, exact, rtol=1e-4, atol=1e-6)
    assert testing.digest(first + last) != testing.digest(exact)


def test_the_norm_without_the_numbers_of_stages(expected):
    """It is then summed in the order of the ranks: the gradients' own bits, and another norm."""
    case = "qwen3 tied", (2, 1, 1, 2), "interleaved", True, torch.float32, 1
    found, whole_model = run_ranks(staged, RANKS, *case, True, "numbers", 1)[0], expected(case[0], *case[-2:])
    first = [key for key in found if key[0] == "gradient 0"]
    testing.assert_bitwise_equal([found[key] for key in first], [whole_model[key] for key in first])
    assert testing.digest(found["norm", 0]) != testing.digest(whole_model["norm", 0])
    torch.testing.assert_close(found["norm", 0], whole_model["norm", 0], rtol=1e-6, atol=0)


# --- state ----------------------------------------------------------------------------------------------------------


def trained(model, optimizer):
    """One step whose gradients are powers of two drawn for each element, the same at every layout."""
    for name, p in sorted(model.named_parameters()):
        name = getattr(p, "copy_of", name)
        generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        spec = next(spec for _, other, spec in named_shard_specs(model) if other is p)
        full = torch.randn(entry_of(p, spec).full_shape, generator=generator)
        p.grad = spec.placed(spec.local(full))
    optimizer.step()


def state_of(mesh, kind, save=None, load=None, **options):
    """(the whole model's state, this stage's state, its optimizer's) after a step that is saved, or after a load."""
    with tpi.set_tp_invariant_mode(True):
        model = stage_of(mesh, kind, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        groups = dict(group=torch.distributed.group.WORLD, pp_group=mesh["pp"])
        if load is None:
            trained(model, optimizer)
        else:
            assert tpi.checkpoint.load(load, model, optimizer, **groups) == {"step": 1}
        if save is not None:
            tpi.checkpoint.save(save, model, optimizer, extra={"step": 1}, **groups)
        whole = tpi.full_state_dict(model, pp_group=mesh["pp"])
        on_rank_0 = tpi.full_state_dict(model, pp_group=mesh["pp"], rank0_only=True, cpu_offload=True)
        assert (on_rank_0.keys() == whole.keys()) is (mesh["pp"].get_local_rank() == mesh["tp"].get_local_rank() == 0)
        own = tpi.full_state_dict(model)
        for p in model.parameters():
            p.detach().zero_()
        tied = {"lm_head.weight"} if "tied" in kind else set()  # which transformers leaves out of its files
        tpi.load_full_state_dict(model, {name: x for name, x in whole.items() if name not in tied})
        testing.assert_bitwise_equal(tpi.full_state_dict(model), own)
        state = tpi.full_optimizer_state_dict(model, optimizer)["state"]
        copies = {name: p.copy_of for name, p in model.named_parameters() if hasattr(p, "copy_of")}
        return whole, own, {copies.get(name, name): values for name, values in state.items()}


def saved_and_loaded(world, kind, folder):
    """What each layout has of a checkpoint of two stages, of one stage, and of two stages on each of two ranks."""
    return [
        state_of(mesh_of(2, 2, 1, 2), kind, save=f"{folder}/0"),
        state_of(mesh_of(1, 1, 1, 4), kind, load=f"{folder}/0", save=f"{folder}/1"),
        state_of(mesh_of(2, 2, 1, 2), kind, load=f"{folder}/1", save=f"{folder}/2", stages_per_rank=2),
        state_of(mesh_of(4, 1, 1, 2), kind, load=f"{folder}/2"),
    ]


@pytest.mark.parametrize("kind", ["qwen3 tied"])
def test_checkpoints_of_all_stages(kind, tmp_path):
    names = list(model_of(kind).state_dict())
    fresh = model_of(kind).state_dict()
    for found in run_ranks(saved_and_loaded, RANKS, kind, str(tmp_path)):
        first, _, _ = found[0]
        for whole, own, optimizer in found:
            assert list(whole) == names
            testing.assert_bitwise_equal(whole, first)
            testing.assert_bitwise_equal(own, {name: first[name] for name in own})
            tied = {"lm_head.weight": "model.embed_tokens.weight"} if "tied" in kind else {}
            assert optimizer.keys() == {tied.get(name, name) for name in own}
        every = found[1][2]  # of the layout with one stage
        for _, _, optimizer in found:
            testing.assert_bitwise_equal(optimizer, {name: every[name] for name in optimizer})
        assert all(testing.digest(first[name]) != testing.digest(fresh[name]) for name in names)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_cut():
    import transformers

    model = model_of("llama")
    (text,) = problems_with_stages(model, LAYERS + 1)
    assert text == "pp=6: 5 layers in model.layers are fewer than stages"
    (text,) = problems_with_stages(torch.nn.Sequential(torch.nn.Linear(2, 2)), 2)
    assert text.startswith("pp=2: Sequential has no decoder layers") and "Cut it yourself" in text
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16))
    assert "GPT2LMHeadModel has no decoder layers" in problems_with_stages(gpt2, 2)[0]
    model.model.layers[4].mlp = model.model.layers[0].mlp
    model.extra = torch.nn.Linear(2, 2)
    shared, *_, extra = sorted(problems_with_stages(model, 2), key=lambda text: "are one parameter" not in text)
    assert "model.layers.0.mlp.gate_proj.weight and model.layers.4.mlp.gate_proj.weight are one parameter" in shared
    assert "extra." in extra and "is in no decoder layer, embedding, final norm or output layer" in extra
    assert problems_with_stages(model, 1) == []
    (text,) = problems_with_stages(model_of("llama"), 2, 3)
    assert text == "pp=2, stages_per_rank=3: 5 layers in model.layers are fewer than stages"
    for number in (0, -1, 1.0, True, "2"):
        (text,) = problems_with_stages(model, 2, number)
        assert text == f"stages_per_rank={number!r}: it must be an int, and at least 1"
    (text,) = problems_with_stages(model_of("qwen3 tied"), 1, 2)
    assert text == (
        "pp=1, stages_per_rank=2: model.embed_tokens.weight and lm_head.weight are one parameter, in the stages 0 and "
        "1, and on one rank: give stages_per_rank=1"
    )
    assert problems_with_stages(model_of("qwen3 tied"), 2, 2) == problems_with_stages(model_of("llama"), 1, 2) == []


def refused(world):
    """Errors of stages that are called or saved in other ways than they can be."""
    mesh = mesh_of(2, 1, 1, 1)
    stage = stage_of(mesh, "qwen3 tied")
    said = []

    def note(call, *args, **options):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
            call(*args, **options)
        said.append(str(caught.value))

    note(stage.save_pretrained, "nowhere")
    note(tpi.data_parallel.Stage, stage, mesh["pp"], "cpu")
    if mesh["pp"].get_local_rank():
        note(stage, torch.ones(1, 4, dtype=torch.long))
        boundary = _Boundary(1, 2)
        x = torch.ones(1, requires_grad=True)
        note(boundary.check_arguments, stage.model.layers[-1], (x, {"kept": (x,)}), {})
        note(boundary.check_output, stage.model.layers[-1], (x,), (x, None))
    tree = tpi.data_parallel.MicroBatchTree(stage.parameters(), mesh["dp"], MICRO_BATCHES)
    part = tpi.data_parallel.Stage(stage, mesh["pp"], "cpu", tree=tree)
    note(part.backward_one_chunk, 0, full_backward=False)
    pp = mesh_of(4, 1, 1, 1)["pp"]
    part = tpi.data_parallel.Stage(stage, pp, "cpu", tree=tree, stage_index=pp.get_local_rank(), num_stages=4)
    note(Schedule1F1B, part, 2)
    stage = stage_of(mesh, "qwen3", sequence_chunks=2)
    tree = tpi.data_parallel.MicroBatchTree(stage.parameters(), mesh["dp"], MICRO_BATCHES)
    part = tpi.data_parallel.Stage(stage, mesh["pp"], "cpu", tree=tree)
    note(part.backward_one_chunk, 0, full_backward=False)
    return said


def test_stages_that_are_used_otherwise():
    for saving, untied, *called, later, few, by_chunk in run_ranks(refused, RANKS):
        assert "is a stage of a pipeline" in saving and "full_state_dict(model, pp_group=..)" in saving
        assert "an embedding that another stage shares: give it a tree" in untied
        if called:
            ids, arguments, output = called
            assert ids.startswith("stage 1 of 2 takes the hidden states [B, S, H] of the stage before, and got")
            assert ids.endswith("torch.int64 (1, 4)")
            assert "takes more activations than its hidden states" in arguments
            assert "returns a tuple" in output
        assert "an embedding that another stage shares" in later and "choose GPipe or 1F1B" in later
        assert "2" in few and "4" in few
        assert "has 2 chunks of each sequence on this rank" in by_chunk


def refused_interleaved(world):
    mesh = mesh_of(2, 1, 1, 1)
    stage = mesh["pp"].get_local_rank()
    said = []

    def note(call, *args, **options):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
            call(*args, **options)
        said.append(str(caught.value))

    own = torch.nn.Sequential(torch.nn.Linear(2, 2))
    note(stage_of, mesh, "qwen3 tied", stages_per_rank=2 + stage)
    note(stage_of, mesh, "qwen3 tied", stages_per_rank=0)
    note(tpi.parallelize, own, mesh=mesh, plan={"0": "colwise"}, stages_per_rank=2)
    model = stage_of(mesh, "qwen3 tied", stages_per_rank=2)
    note(model, torch.ones(1, 4, dtype=torch.long))
    note(tpi.full_state_dict, tpi.data_parallel.stages_of(model)[0], pp_group=mesh["pp"])
    tied, other = sorted(tpi.data_parallel.stages_of(model), key=lambda part: not part.has_tied_stage)
    note(tpi.data_parallel.Stage, tied, mesh["pp"], "cpu")
    assert tpi.data_parallel.Stage(other, mesh["pp"], "cpu").num_stages == 4
    tree = tpi.data_parallel.MicroBatchTree(tied.parameters(), mesh["dp"], MICRO_BATCHES)
    part = tpi.data_parallel.Stage(tied, mesh["pp"], "cpu", tree=tree)
    note(part.backward_one_chunk, 0, full_backward=False)
    return said


def test_interleaved_stages_that_are_used_otherwise():
    for rank, found in enumerate(run_ranks(refused_interleaved, RANKS)):
        disagree, none, own, whole_model, half, untied, later = found
        assert "the ranks give the stages [0, 1] of 4: pass the model" in half
        assert "stages_per_rank is" in disagree and "2" in disagree and "3" in disagree
        assert "stages_per_rank=0: it must be an int, and at least 1" in none
        assert "stages_per_rank=2: Sequential is no model of transformers" in own
        numbers = [0, 2] if rank % 2 == 0 else [1, 3]
        assert f"has the stages {numbers} of 4 on this rank" in whole_model and "stages_of(model)" in whole_model
        assert "an embedding that another stage shares: give it a tree" in untied
        assert "choose GPipe or 1F1B" in later
