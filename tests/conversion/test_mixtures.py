"""parallelize of transformers' mixtures of experts: the same bits at every degree, the model's values, and refusals."""

from __future__ import annotations

import functools
import re
from typing import Any

import hf_models
import pytest
import torch

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group
from tp_invariant.layers.experts import Experts
from tp_invariant.testing import assert_bitwise_equal

run_ranks = functools.partial(testing.run_ranks, device="cpu")
FAMILIES = sorted(hf_models.MIXTURES)
ONE_RANK = Group(None, 0, 1)


def train_on_rank(tp_group, family, options, mode=True, steps=3):
    model = tpi.parallelize(
        hf_models.build(family, options.get("dtype", torch.float32)),
        tp_group,
        expert_parallel_group=(ONE_RANK if tp_group is None else tp_group) if options.get("by_expert") else None,
        sequence_parallel=options.get("sequence_parallel", False),
    )
    with tpi.set_tp_invariant_mode(mode):
        return hf_models.train(model, tp_group, steps)


@functools.cache
def trained(family: str, dtype: torch.dtype = torch.float32, mode: bool = True, by_expert: bool = False) -> Any:
    """At TP=1, once for all degrees."""
    return train_on_rank(None, family, dict(dtype=dtype, by_expert=by_expert), mode)


@pytest.mark.parametrize(
    ("family", "degree", "options"),
    [
        ("qwen3_moe", 2, {}),
        ("qwen3_moe", 2, dict(by_expert=True)),
        ("qwen3_moe", 4, dict(sequence_parallel=True)),
        ("qwen3_moe", 4, dict(dtype=torch.bfloat16)),
        ("mixtral", 2, dict(sequence_parallel=True)),
        ("mixtral", 4, dict(by_expert=True, sequence_parallel=True)),
        ("qwen2_moe", 2, dict(sequence_parallel=True)),
        ("glm4_moe", 2, {}),
        ("glm4_moe", 4, dict(sequence_parallel=True, by_expert=True)),
    ],
    ids=str,
)
def test_training_has_the_same_bits_at_every_degree(family, degree, options):
    expected = trained(family, options.get("dtype", torch.float32), by_expert=options.get("by_expert", False))
    for rank, got in enumerate(run_ranks(train_on_rank, degree, family, options)):
        assert_bitwise_equal(got, expected, f"{family} on rank {rank} of {degree}, {options}")
    routers = [grad for name, grad in expected["grads"].items() if name.endswith("mlp.gate.weight")]
    assert routers and all(grad.any() for grad in routers)


def test_with_the_mode_off_the_bits_depend_on_the_degree():
    one, on = trained("mixtral", mode=False), trained("mixtral")
    for options in ({}, dict(sequence_parallel=True), dict(by_expert=True)):
        for got in run_ranks(train_on_rank, 2, "mixtral", options, False, 1):
            assert not torch.equal(got["logits"], one["logits"])
            for name in one["grads"]:
                torch.testing.assert_close(got["grads"][name], on["grads"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_near_the_model_itself(family):
    """The error against the model in float64 is at most twice that of the model in float32."""
    ours = trained(family)
    exact, theirs = (untouched(family, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        got = ours["logits"] if name == "logits" else ours["grads"][name]
        errors = [float((x.double() - value).norm() / value.norm()) for x in (got, theirs[name])]
        assert errors[0] <= max(2 * errors[1], 4e-6), (name, errors)


def untouched(family, dtype):
    model = hf_models.build(family, dtype)
    model.config._experts_implementation = "eager"
    output = model(**hf_models.batch(0))
    output.loss.backward()
    return {"logits": output.logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def test_equal_scores_go_to_the_lower_expert():
    def chosen(mode):
        model = hf_models.build("mixtral")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.zero_()
        tpi.parallelize(model, None)
        seen = []
        for module in model.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
        with tpi.set_tp_invariant_mode(mode), torch.no_grad():
            model(**hf_models.batch(0))
        return torch.cat(seen)

    assert (chosen(True) == torch.tensor([0, 1])).all()
    assert chosen(False).shape == chosen(True).shape


def saved(tp_group, folder, by_expert):
    group = tp_group if by_expert else None
    model = tpi.parallelize(hf_models.build("qwen3_moe"), tp_group, expert_parallel_group=group)
    model.save_pretrained(folder)
    experts = model.model.layers[0].mlp.experts
    return experts.by_expert, tuple(experts.gate_up_proj.shape), tuple(experts.down_proj.shape)


@pytest.mark.parametrize("by_expert", (False, True))
def test_save_pretrained_writes_whole_experts(by_expert, tmp_path):
    shapes = run_ranks(saved, 2, str(tmp_path), by_expert)
    assert shapes[0] == ((True, (3, 64, 64), (3, 64, 32)) if by_expert else (False, (6, 32, 64), (6, 64, 16)))
    model = hf_models.build("qwen3_moe")
    read = type(model).from_pretrained(tmp_path)
    assert_bitwise_equal(dict(read.named_parameters()), dict(model.named_parameters()))


def test_the_load_balancing_loss():
    """Its router logits are whole on every rank."""

    def losses(tp_group):
        model = tpi.parallelize(hf_models.build("mixtral", output_router_logits=True), tp_group)
        with tpi.set_tp_invariant_mode(True):
            output = model(**hf_models.batch(1))
            output.loss.backward()
        return output.loss.detach(), output.aux_loss.detach(), testing.full_grads(model)

    want = losses(None)
    assert want[1] > 0
    for found in run_ranks(losses, 2):
        assert_bitwise_equal(found, want)


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(family="qwen3_moe", change=lambda model: None, tp_group=None, **options):
    model = hf_models.build(family, **options)
    change(model)
    before = list(model.named_modules())
    with pytest.raises(ValueError) as caught:
        tpi.parallelize(model, tp_group)
    assert list(model.named_modules()) == before
    return str(caught.value)


def test_what_is_not_supported_is_named():
    def with_norm(model):
        model.model.layers[1].mlp.experts.has_post_expert_norm = True

    def without_layout(model):
        del model.model.layers[1].mlp.experts.is_transposed

    def with_more(model):
        model.model.layers[1].mlp.experts.scale = torch.nn.Parameter(torch.ones(1))

    name = re.escape("model.layers.1.mlp.experts: Qwen3MoeExperts ")
    assert re.search(name + "normalises the output of each expert", refused(change=with_norm))
    assert re.search(name + "does not say the layout of its weights", refused(change=without_layout))
    assert re.search(name + r"has the parameters down_proj, gate_up_proj, scale: supported", refused(change=with_more))
    assert "config.router_jitter_noise=0.1: random noise" in refused("mixtral", router_jitter_noise=0.1)


def test_sizes_that_the_degree_does_not_divide():
    def on_rank(tp_group):
        return refused(tp_group=tp_group, moe_intermediate_size=33)

    for text in run_ranks(on_rank, 2):
        assert "mlp.experts: intermediate size=33 is not divisible by TP degree=2" in text
