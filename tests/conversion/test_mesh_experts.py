"""Experts over ranks of dp and tp, with chunks of the sequence, context parallelism and stages: one process's bits."""

from __future__ import annotations

import dataclasses
import functools
import math
from functools import partial
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from cases import more
from error_texts import error_text
from meshes import init_device_mesh, new_group
from models import ExpertNet
from ranks import run_ranks
from torch.distributed.pipelining import Schedule1F1B

import tp_invariant as tpi
from tp_invariant.data_parallel import MicroBatchTree, Stage
from tp_invariant.hugging_face.experts import use_own_code
from tp_invariant.layers.experts import Experts
from tp_invariant.testing import assert_bitwise_equal, digest, full_grads

DIMS = ("pp", "dp", "cp", "tp")
RANKS, MICRO_BATCHES, BATCH, LENGTH, EXPERTS = 8, 4, 2, 16, 8


@pytest.fixture(scope="module", autouse=True)
def pool():
    run_ranks(lambda tp_group: None, RANKS)


@dataclasses.dataclass(frozen=True)
class Case:
    """sizes: of pp, dp, cp and tp. over: the dims that expert_parallel_group has; "two replicas": a process group."""

    sizes: tuple[int, int, int, int] = (1, 1, 1, 1)
    chunks: int = 2
    over: Any = ("dp", "tp")
    family: str = "qwen3_moe"
    dims: tuple[str, ...] = DIMS
    sp: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    mode: bool = True
    steps: tuple[int, ...] = (0, 1)
    load: str | None = None
    save: str | None = None

    def with_(self, *sizes: int, **changes: Any) -> Case:
        return dataclasses.replace(self, **({"sizes": sizes} if sizes else {}), **changes)

    @property
    def alone(self) -> Case:
        return Case(chunks=self.chunks, family=self.family, dtype=self.dtype, mode=self.mode)


def build(case: Case) -> Any:
    name = "num_experts" if case.family == "qwen3_moe" else "num_local_experts"
    model = hf_models.build(case.family, case.dtype, num_hidden_layers=2, **{name: EXPERTS})
    if case.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets [n, B, S]."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, hf_models.VOCABULARY, (MICRO_BATCHES, BATCH, LENGTH + 1), generator=generator)
    return tokens[..., :-1], tokens[..., 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor, cp: Any) -> torch.Tensor:
    each = tpi.vocab_parallel_cross_entropy(logits, targets, tp_group=None, reduction="none")
    return tpi.regions.gather_sequence(each, cp, 1).sum()


def experts_group(mesh: Any, over: Any) -> Any:
    if over != "two replicas":
        return None if over is None else mesh[over]
    pairs = mesh.mesh.t().reshape(-1, 2).tolist()  # of [dp, cp]
    return new_group(next(tuple(pair) for pair in pairs if torch.distributed.get_rank() in pair))


def train(world: Any, case: Case) -> dict[str, Any]:
    """What this rank has of each step's losses, gradients and norm, and the whole state at last."""
    sizes = [size for name, size in zip(DIMS, case.sizes, strict=True) if name in case.dims]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=case.dims)
    cp, pp = (mesh[name] if name in case.dims else None for name in ("cp", "pp"))
    found: dict[str, Any] = {}
    with tpi.set_tp_invariant_mode(case.mode):
        group = experts_group(mesh, case.over)
        options: dict[str, Any] = dict(sequence_parallel=case.sp, expert_parallel_group=group)
        model = tpi.parallelize(build(case), mesh=mesh, sequence_chunks=case.chunks, **options)
        tree = MicroBatchTree(model.parameters(), mesh=mesh, micro_batches=MICRO_BATCHES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if case.load is not None:
            tpi.checkpoint.load(case.load, model, optimizer, group=world, pp_group=pp)
        for step in case.steps:
            ids, targets = (x[tree.share.start : tree.share.stop] for x in batch(step))
            counts = [one.numel() for one in targets]
            ids, targets = (tpi.sequence_part(x, cp, 2) for x in (ids, targets))
            losses: list[torch.Tensor] = []
            if case.sizes[0] > 1:
                stage = Stage(model, pp, "cpu", tree=tree, counts=counts)
                schedule = Schedule1F1B(stage, len(counts), loss_fn=partial(loss_of, cp=cp))
                last = dict(target=targets.flatten(0, 1), losses=losses) if stage.is_last else {}
                schedule.step(*([ids.flatten(0, 1)] if stage.is_first else []), **last)
            else:
                for x, y, count in zip(ids, targets, counts, strict=True):
                    losses.append(loss_of(model(x).logits, y, cp))
                    losses[-1].backward()
                    tree.add(count=count)
            tree.reduce()
            found |= {f"loss {step} {i}": x.detach() for i, x in zip(tree.share, losses, strict=False)}
            found |= {f"gradient {step} {name}": x for name, x in full_grads(model).items() if x is not None}
            found[f"norm {step}"] = tpi.clip_grad_norm_(model.parameters(), 1.0, pp_group=pp)
            optimizer.step()
            optimizer.zero_grad()
        if case.save is not None:
            tpi.checkpoint.save(case.save, model, optimizer, group=world, pp_group=pp)
        return found | {"state": tpi.full_state_dict(model, pp_group=pp)}


def run(case: Case) -> list[dict[str, Any]]:
    return run_ranks(train, math.prod(case.sizes), case)


@functools.cache
def alone(case: Case) -> dict[str, Any]:
    return run(case)[0]


def same(case: Case) -> None:
    expected = alone(case.alone)
    for rank, found in enumerate(run(case)):
        assert_bitwise_equal(found, {name: expected[name] for name in found}, f"{case}, rank {rank}")


TWO = Case(chunks=2)
CASES = [
    more(TWO.with_(1, 2, 1, 1)),
    TWO.with_(1, 2, 2, 1, over="dp"),
    more(TWO.with_(1, 2, 1, 2)),
    TWO.with_(1, 2, 1, 2, sp=True, recompute=True),
    TWO.with_(1, 2, 2, 2),
    more(TWO.with_(1, 4, 2, 1)),
    TWO.with_(1, 1, 2, 2, over="tp"),
    TWO.with_(1, 4, 2, 1, over="two replicas", dims=("dp", "cp")),
    TWO.with_(1, 2, 2, 1, over="dp", dims=("dp", "cp"), family="mixtral"),
    TWO.with_(1, 2, 2, 1, dtype=torch.bfloat16),
    Case(chunks=4, family="gpt_oss").with_(1, 2, 2, 1),
    TWO.with_(2, 2, 1, 2, sp=True),
    more(TWO.with_(2, 2, 2, 1)),
]


def name_of(case: Case) -> str:
    """What is not the default."""
    own = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    return ", ".join(
        str(value) if name == "sizes" else f"{name} {value}" for name, value in own.items() if value != vars(TWO)[name]
    )


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_bits_are_those_of_one_process(case):
    same(case)


def test_stop_at_one_layout_and_go_on_at_others(tmp_path):
    """The second half of a run, of experts that are divided in another way."""
    folder = str(tmp_path / "checkpoint")
    run(TWO.with_(2, 2, 1, 2, steps=(0,), save=folder))
    for layout in (TWO.with_(2, 1, 2, 2, over="tp"), TWO.with_(1, 4, 2, 1)):
        same(layout.with_(steps=(1,), load=folder))


def test_values_and_controls():
    """With the mode off layouts differ, and all have the values of stock torch."""
    off = TWO.with_(1, 2, 2, 2, mode=False, steps=(0,))
    found, one, exact = run(off)[0], alone(off.alone), build(TWO).double()
    use_own_code(exact)
    with tpi.set_tp_invariant_mode(False):
        for ids, targets in zip(*batch(0), strict=True):
            F.cross_entropy(exact(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for name, p in exact.named_parameters():
        key, expected = f"gradient 0 {name}", p.grad / (MICRO_BATCHES * BATCH * LENGTH)
        for gradients in (found, one, alone(TWO)):
            assert (gradients[key] - expected).norm() < 1e-5 * expected.norm(), name
        if "experts" in name:
            assert digest(found[key]) != digest(one[key]) and digest(one[key]) != digest(alone(TWO)[key]), name
            assert digest(alone(TWO)[key]) != digest(alone(Case(chunks=4))[key]), name


# --- what is refused --------------------------------------------------------------------------------------------------


def refusals(world: Any) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=DIMS)
    staged = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=DIMS)
    named_ep = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
    shifted = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "cp"))

    def converted(mesh: Any, group: Any) -> Any:
        return tpi.parallelize(build(TWO), mesh=mesh, sequence_chunks=2, expert_parallel_group=group)

    texts = {
        "cp": error_text(converted, mesh, mesh["cp", "tp"]),
        "pp": error_text(converted, staged, staged["pp", "tp"]),
        "ep": error_text(converted, named_ep, named_ep["ep"]),
    }
    # layers by hand: experts over ranks of cp; and over other replicas at cp=1 than at cp=0
    experts = ExpertNet(8, 16, EXPERTS, dict(expert_parallel_group=shifted["cp"].get_group()))
    texts["by hand"] = error_text(partial(tpi.context_parallel_, experts, shifted["cp"], sequence_chunks=2))
    pairs = ([[0, 2], [4, 6]], [[1, 5], [3, 7]])[shifted["cp"].get_local_rank()]
    pair = new_group(next(tuple(pair) for pair in pairs if torch.distributed.get_rank() in pair))
    model = converted(shifted, pair)
    texts["other replicas"] = error_text(partial(MicroBatchTree, model.parameters(), mesh=shifted, micro_batches=4))
    texts["one rank"] = error_text(converted, staged, None if staged.get_rank() == 0 else staged["dp", "tp"])
    return texts


def test_what_is_refused():
    expected = {
        "cp": "ValueError: expert_parallel_group has the global ranks {group} on rank {rank}, of which {others} are at "
        'another place of the dims pp or cp: give mesh["dp", "tp"], or mesh["tp"]',
        "pp": "are at another place of the dims pp or cp",
        "ep": "mesh has the dims ep: known are pp, dp, cp, tp. Leave it out, and give expert_parallel_group=mesh[",
        "by hand": "its experts are divided over the ranks {pair} of cp_group (expert_parallel_group): divide ",
        "one rank": "ranks of the mesh give expert_parallel_group as 'NoneType', ('dp', 'tp'): give the same",
        "other replicas": "the ranks of dp_group in expert_parallel_group is [",
    }
    for rank, texts in enumerate(run_ranks(refusals, RANKS)):
        group = [rank // 4 * 4 + i for i in range(4)]
        others = [i for i in group if i // 2 != rank // 2]
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        for name, text in expected.items():
            assert text.format(group=group, rank=rank, others=others, pair=pair) in texts[name], texts[name]


def one_group(world: Any) -> bool:
    """Two models over one mesh have one process group for their experts."""
    mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=DIMS)
    models = [tpi.parallelize(build(TWO), mesh=mesh, expert_parallel_group=mesh["dp", "tp"], sequence_chunks=2)] * 2
    groups = {layer.group for model in models for layer in model.modules() if isinstance(layer, Experts)}
    return len(groups) == 1


def test_one_group_for_all_layers():
    assert all(run_ranks(one_group, RANKS))
