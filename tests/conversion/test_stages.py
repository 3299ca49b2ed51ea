"""Hugging Face models cut into pipeline stages: one process's bits, over stages, data and tensor parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hf_models import VOCABULARY, build
from meshes import init_device_mesh
from ranks import run_ranks
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import gather_major, resolve_group
from tp_invariant.checkpoint.full_state import entry_of
from tp_invariant.conversion.stages import cut_into_stages, problems_with_stages
from tp_invariant.layers.parameters import named_shard_specs
from tp_invariant.testing import full_grads, full_parameters

RANKS, MICRO_BATCHES, ROWS, TOKENS, LAYERS, STEPS = 8, 4, 2, 16, 5, 2
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MODELS = {
    "qwen3 tied": ("qwen3", {}),
    "qwen3": ("qwen3", dict(tie_word_embeddings=False)),
    "llama tied": ("llama", dict(tie_word_embeddings=True)),
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),  # scales its embeddings, which are tied
    "granite": ("granite", dict(tie_word_embeddings=True)),  # scales them in the model's forward, and its logits
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


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def whole(tp_group, kind, dtype=torch.float32, mode=True):
    """Without stages: the micro-batches one after another."""
    with tpi.set_tp_invariant_mode(mode):
        model = tpi.parallelize(model_of(kind, dtype), tp_group)
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


def stage_of(mesh, kind, dtype=torch.float32, sequence_parallel=False):
    model = tpi.parallelize(model_of(kind, dtype), mesh["tp"], sequence_parallel=sequence_parallel)
    cut_into_stages(model, resolve_group(mesh["pp"]))
    return model


def mesh_of(pp, dp, tp):
    sizes = RANKS // (pp * dp * tp), pp, dp, tp
    return init_device_mesh("cpu", sizes, mesh_dim_names=("copy", "pp", "dp", "tp"))


def staged(world, kind, layout, schedule, sequence_parallel, dtype=torch.float32, mode=True, tie=True):
    """As `whole`, what this rank has."""
    mesh = mesh_of(*layout)
    stage, stages = mesh["pp"].get_local_rank(), layout[0]
    with tpi.set_tp_invariant_mode(mode):
        model = stage_of(mesh, kind, dtype, sequence_parallel)
        for p in model.parameters() if not tie else ():
            vars(p).pop("tied_stage", None)
            vars(p).pop("copy_of", None)
        tree = tpi.data_parallel.MicroBatchTree(model.parameters(), mesh["dp"], MICRO_BATCHES)
        part = tpi.data_parallel.Stage(model, mesh["pp"], "cpu", tree=tree)
        run = SCHEDULES[schedule](part, len(tree.share), loss_fn=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = {}
        for step in range(STEPS):
            ids, targets = (x[tree.share.start : tree.share.stop] for x in batch(step))
            part.counts, losses = [int((one != -100).sum()) for one in targets], []
            last = dict(target=targets.flatten(0, 1), losses=losses) if stage == stages - 1 else {}
            run.step(*([ids.flatten(0, 1)] if stage == 0 else []), **last)
            tree.reduce()
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


LAYOUTS = [(1, 1, 4), (1, 4, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]  # pp, dp, tp


@pytest.fixture(scope="module")
def expected():
    kept = {}

    def of(*args):
        if args not in kept:
            kept[args] = run_ranks(whole, 1, *args)[0]
        return kept[args]

    return of


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout, schedule, expected):
    for sequence_parallel in (False, True) if layout[2] > 1 else (False,):
        check_same(run_ranks(staged, RANKS, "qwen3 tied", layout, schedule, sequence_parallel), expected("qwen3 tied"))


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


def state_of(mesh, kind, save=None, load=None):
    """(the whole model's state, this stage's state, its optimizer's) after a step that is saved, or after a load."""
    with tpi.set_tp_invariant_mode(True):
        model = stage_of(mesh, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        groups = dict(group=torch.distributed.group.WORLD, pp_group=mesh["pp"])
        if save is not None:
            trained(model, optimizer)
            tpi.checkpoint.save(save, model, optimizer, extra={"step": 1}, **groups)
        if load is not None:
            assert tpi.checkpoint.load(load, model, optimizer, **groups) == {"step": 1}
        whole = tpi.full_state_dict(model, pp_group=mesh["pp"])
        on_rank_0 = tpi.full_state_dict(model, pp_group=mesh["pp"], rank0_only=True, cpu_offload=True)
        assert (on_rank_0.keys() == whole.keys()) is (mesh["pp"].get_local_rank() == mesh["tp"].get_local_rank() == 0)
        own = tpi.full_state_dict(model)
        stage = stage_of(mesh, kind)
        tpi.load_full_state_dict(stage, whole)
        testing.assert_bitwise_equal(tpi.full_state_dict(stage), own)
        stage = stage_of(mesh, kind)
        tpi.load_full_state_dict(stage, {name: x for name, x in whole.items() if name != "lm_head.weight"},
                                 strict="tied" in kind)  # fmt: skip
        if "tied" in kind:
            testing.assert_bitwise_equal(tpi.full_state_dict(stage), own)
        state = tpi.full_optimizer_state_dict(model, optimizer)["state"]
        copies = {name: p.copy_of for name, p in model.named_parameters() if hasattr(p, "copy_of")}
        return whole, own, {copies.get(name, name): values for name, values in state.items()}


def saved_and_loaded(world, kind, folder):
    """What each layout has of a checkpoint: the first is saved and loaded by others."""
    layouts = [(2, 2, 2), (1, 1, 4), (4, 1, 2), (2, 1, 4), (1, 1, 1)]
    found = [state_of(mesh_of(*layouts[0]), kind, save=f"{folder}/0")]
    found += [state_of(mesh_of(*layout), kind, load=f"{folder}/0") for layout in layouts[1:]]
    found.append(state_of(mesh_of(*layouts[1]), kind, save=f"{folder}/1"))
    found.append(state_of(mesh_of(*layouts[2]), kind, load=f"{folder}/1"))
    return found


@pytest.mark.parametrize("kind", ["qwen3 tied", "llama"])
def test_checkpoints_of_all_stages(kind, tmp_path):
    names = list(model_of(kind).state_dict())
    fresh = model_of(kind).state_dict()
    for found in run_ranks(saved_and_loaded, RANKS, kind, str(tmp_path)):
        first, _, _ = found[0]
        for whole, own, optimizer in found:
            assert list(whole) == names
            testing.assert_bitwise_equal(whole, first)
            testing.assert_bitwise_equal(own, {name: first[name] for name in own})
            assert {name for name in optimizer} == {name for name in own if "tied" not in kind or name != "lm_head.weight"} | (
                {"model.embed_tokens.weight"} if "tied" in kind and "lm_head.weight" in own else set()
            )
        every = found[4][2]  # of the layout with one stage
        for _, _, optimizer in found:
            testing.assert_bitwise_equal(optimizer, {name: every[name] for name in optimizer})
        assert all(testing.digest(first[name]) != testing.digest(fresh[name]) for name in names)
