"""Steps of Megatron's GPTModel, DDP and Adam have the bytes of TP=1 at every degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_runs import differing, on_new_ranks, steps

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'tp-invariant[megatron]'")

CASES: dict[str, tuple[dict[str, Any], bool]] = {  # {name: (changes of the configuration, whether outputs are tied)}
    "plain": ({}, False),
    "tied": ({"sequence_parallel": True}, True),
    "qk norm": ({"sequence_parallel": True, "qk_layernorm": True}, False),
    "LayerNorm": ({"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False}, True),
    "recomputed": ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, False),
    "core attention recomputed": ({"recompute_granularity": "selective"}, False),
    "main_grad": ({"gradient_accumulation_fusion": True, "sequence_parallel": True}, True),
    "bf16": ({"sequence_parallel": True, "qk_layernorm": True, "params_dtype": torch.bfloat16}, False),
}


def runs(rank: int, world: int, mode: bool) -> dict[str, Any]:
    if not mode:
        return {name: steps(world, mode, *CASES[name]) for name in ("plain", "tied")}
    from tp_invariant.integrations.megatron.versions import HAS_HYBRID

    results = {name: steps(world, mode, changes, tied) for name, (changes, tied) in CASES.items()}
    if HAS_HYBRID:
        results["hybrid"] = steps(world, mode, {"num_layers": 4, "sequence_parallel": True}, hybrid=True)
    return results


def runs_of_megatron(rank: int, world: int) -> dict[str, Any]:
    return {name: steps(world, False, *CASES[name], local=True) for name in ("plain", "qk norm", "LayerNorm")}


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return on_new_ranks(runs, 1, True)[0]


@pytest.mark.parametrize("tp", [2, 4])
def test_every_degree_has_the_bytes_of_one_rank(tp: int, single: dict[str, Any]) -> None:
    for rank, results in enumerate(on_new_ranks(runs, tp, True)):
        for name, result in results.items():
            assert not (names := differing(single[name], result)), (rank, name, names)


def test_with_the_mode_off_they_differ() -> None:
    one, two = on_new_ranks(runs, 1, False)[0], on_new_ranks(runs, 2, False)[0]
    for name in one:
        assert len(differing(one[name], two[name])) > len(one[name]) // 2, name


def test_the_values_are_those_of_megatrons_own_layers(single: dict[str, Any]) -> None:
    """Losses, norms and all gradients of two steps; the second follows Adam's first, which enlarges differences."""
    for case, theirs in on_new_ranks(runs_of_megatron, 1)[0].items():
        names = [name for name in theirs if not name.startswith("parameter")]
        assert set(names) == {name for name in single[case] if not name.startswith("parameter")}
        for name in names:
            ours, wanted = (torch.as_tensor(run[name]).double() for run in (single[case], theirs))
            tolerance = 1e-5 if " 0" in name else 1e-2
            assert (ours - wanted).norm() <= tolerance * wanted.norm(), (case, name)


def test_recomputation_and_fused_accumulation_change_nothing(single: dict[str, Any]) -> None:
    assert not differing(single["plain"], single["recomputed"])
    assert not differing(single["plain"], single["core attention recomputed"])
    assert not differing(single["tied"], single["main_grad"])
