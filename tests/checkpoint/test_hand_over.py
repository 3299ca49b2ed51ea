"""A trainer's weights in a sampler of another degree: byte for byte, and an error before anything is written."""

import hf_models
import pytest
import torch
from meshes import init_device_mesh, shard_fully
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.testing import RankError, assert_bitwise_equal, digest


def models(tp_group, source, target):
    """Two models with other weights, each over ranks of the four as said."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {"one": None, "two": mesh["tp"], "four": tp_group, "fully": mesh["tp"], "plain": None}
    made = []
    for number, kind in enumerate((source, target)):
        model = hf_models.build("qwen3")
        with torch.no_grad():
            [p.mul_(1 + number) for p in model.parameters()]
        if kind != "plain":
            model = tpi.parallelize(model, groups[kind])
        if kind == "fully":
            shard_fully(model, mesh["dp"])
        made.append(model)
    return made


def handed_over(tp_group, source, target):
    first, second = models(tp_group, source, target)
    before = digest(tpi.full_state_dict(second))
    tpi.hand_over(first, second)
    return before, tpi.full_state_dict(first), tpi.full_state_dict(second)


@pytest.mark.parametrize(
    ("source", "target"), [("one", "four"), ("four", "two"), ("fully", "four"), ("two", "plain"), ("plain", "fully")]
)
def test_every_rank_has_the_sources_bytes(source, target):
    (expected,) = run_ranks(reference, 1)
    for before, first, second in run_ranks(handed_over, 4, source, target):
        assert_bitwise_equal(first, expected)
        assert_bitwise_equal(second, expected)
        assert before != digest(expected)


def reference(tp_group):
    return tpi.full_state_dict(hf_models.build("qwen3"))


def refused(tp_group):
    source, target = hf_models.build("llama"), tpi.parallelize(hf_models.build("llama", torch.bfloat16), tp_group)
    before = digest(tpi.full_state_dict(target))
    try:
        tpi.hand_over(source, target)
    finally:
        assert digest(tpi.full_state_dict(target)) == before


def test_other_dtypes_are_refused():
    with pytest.raises(RankError, match=r"lm_head.weight is torch.float32 \(96, 64\) in the source and torch.bfloat16"):
        run_ranks(refused, 2)


def into_tied(tp_group):
    source = tpi.parallelize(hf_models.build("qwen3", tie_word_embeddings=False), tp_group)
    tpi.hand_over(source, hf_models.build("qwen3"))


def test_two_parameters_do_not_go_into_one():
    with pytest.raises(RankError, match=r"weight and lm_head\.weight are one parameter in target, and two"):
        run_ranks(into_tied, 2)
