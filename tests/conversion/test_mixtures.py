"""parallelize of transformers' mixtures of experts: the same bits at every degree, the model's values, and refusals."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import hf_models
import pytest
import torch
from cases import more
from meshes import mesh_or_group
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import Group
from tp_invariant.layers.experts import Experts
from tp_invariant.testing import assert_bitwise_equal

FAMILIES = sorted(hf_models.MIXTURES)
ONE_RANK = Group(None, 0, 1)


def train_on_rank(tp_group, family, options, mode=True, steps=2):
    model = tpi.parallelize(
        hf_models.build(family, options.get("dtype", torch.float32)),
        mesh_or_group(tp_group, "mesh") if options.get("mesh") else tp_group,
        expert_parallel_group=(ONE_RANK if tp_group is None else tp_group) if options.get("by_expert") else None,
        sequence_parallel=options.get("sequence_parallel", False),
    )
    with tpi.set_tp_invariant_mode(mode):
        return hf_models.train(model, None if options.get("mesh") else tp_group, steps)


@functools.cache
def trained(family: str, dtype: torch.dtype = torch.float32, mode: bool = True, by_expert: bool = False) -> Any:
    """At TP=1, once for all degrees."""
    return train_on_rank(None, family, dict(dtype=dtype, by_expert=by_expert), mode)


# (family, degree, options); whole layouts with data parallelism, and more of experts by expert: test_mixture_layouts.py
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("mixtral", 2, {}),
    more("qwen2_moe", 2, {}),
    *((family, 4, dict(sequence_parallel=True)) for family in FAMILIES),
    ("qwen3_moe", 2, dict(by_expert=True)),
    ("qwen3_moe", 4, dict(dtype=torch.bfloat16)),
    ("deepseek_v3", 8, {}),  # fewer experts than ranks
    ("gpt_oss", 2, dict(mesh=True)),
    more("deepseek_v2", 2, dict(mesh=True)),
    more("gpt_oss", 4, dict(dtype=torch.bfloat16)),
    ("gpt_oss", 2, dict(by_expert=True, sequence_parallel=True)),
]


@pytest.mark.parametrize(("family", "degree", "options"), CASES, ids=str)
def test_training_has_the_same_bits_at_every_degree(family, degree, options):
    """Logits, gradients, losses, gradient norms and parameters."""
    expected = trained(family, options.get("dtype", torch.float32), by_expert=options.get("by_expert", False))
    for rank, got in enumerate(run_ranks(train_on_rank, degree, family, options)):
        assert_bitwise_equal(got, expected, f"{family} on rank {rank} of {degree}, {options}")
    routers = [grad for name, grad in expected["grads"].items() if re.search(r"(gate|router.*)\.weight", name)]
    assert routers and all(grad.any() for grad in routers)
    sinks = [grad for name, grad in expected["grads"].items() if name.endswith(".sinks")]
    assert len(sinks) == (2 if family == "gpt_oss" else 0) and all(grad.all() for grad in sinks)


@pytest.mark.parametrize("family", (more("mixtral"), "gpt_oss", more("deepseek_v2")))
def test_with_the_mode_off_the_bits_depend_on_the_degree(family):
    one, on = trained(family, mode=False), trained(family)
    for options in ({}, dict(sequence_parallel=True), dict(by_expert=True)):
        for got in run_ranks(train_on_rank, 2, family, options, False, 1):
            assert not torch.equal(got["logits"], one["logits"])
            for name in one["grads"]:
                torch.testing.assert_close(got["grads"][name], on["grads"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_near_the_model_itself(family):
    hf_models.assert_near_the_model_itself(trained(family), family, 4e-6)


def with_equal_scores(tp_group, slots):
    """The results of two steps, in the first of which all experts have the same scores; and the experts chosen."""
    model = hf_models.build("mixtral", num_experts_per_tok=slots)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    tpi.parallelize(model, tp_group)
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with tpi.set_tp_invariant_mode(True):
        return hf_models.train(model, tp_group, 2), seen


@pytest.mark.parametrize("slots", (1, 2))
def test_equal_scores_go_to_the_lower_expert(slots):
    """All tokens to one expert or two, which few ranks compute: the others have no row."""
    want, seen = with_equal_scores(None, slots)
    assert all((index == torch.arange(slots)).all() for index in seen[:2])
    for name, grad in want["grads"].items():
        if ".experts." in name:
            assert grad[:slots].any() and not grad[slots:].any()
    for got, _ in run_ranks(with_equal_scores, 4, slots):
        assert_bitwise_equal(got, want)


def other_uses(tp_group):
    """After verify: steps whose layers are recomputed in backward, and decoding, of one token on all ranks."""
    model = hf_models.build("qwen3_moe")
    with tpi.set_tp_invariant_mode(True):
        tpi.parallelize(model, None if tp_group is None else mesh_or_group(tp_group, "mesh"), verify=True)
        model.gradient_checkpointing_enable()
        results = hf_models.train(model, None, 2)
        ids = model.eval().generate(
            hf_models.batch()["input_ids"][:1, :5], max_new_tokens=3, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    return results, ids.sequences, list(ids.logits)


def test_verify_checkpointing_and_decoding():
    want = other_uses(None)
    assert_bitwise_equal(want[0], trained("qwen3_moe"))
    for got in run_ranks(other_uses, 2):
        assert_bitwise_equal(got, want)


def saved(tp_group, folder, by_expert):
    group = tp_group if by_expert else None
    model = tpi.parallelize(hf_models.build("qwen3_moe"), tp_group, expert_parallel_group=group)
    model.save_pretrained(folder)
    layer = model.model.layers[0].mlp.experts
    return layer.by_expert, tuple(layer.gate_up_proj.shape), tuple(layer.down_proj.shape)


@pytest.mark.parametrize("by_expert", (False, True))
def test_save_pretrained_writes_whole_experts(by_expert, tmp_path):
    shapes = run_ranks(saved, 2, str(tmp_path), by_expert)
    assert shapes[0] == ((True, (3, 64, 64), (3, 64, 32)) if by_expert else (False, (6, 32, 64), (6, 64, 16)))
    model = hf_models.build("qwen3_moe")
    read = type(model).from_pretrained(tmp_path)
    assert_bitwise_equal(dict(read.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("degree", (more(2), 4))
def test_the_load_balancing_loss(degree):
    """transformers' own. Its router logits are whole on every rank, also under sequence parallelism."""

    def losses(tp_group, sequence_parallel, padded):
        model = hf_models.build("mixtral", output_router_logits=True)
        model.router_aux_loss_coef = 3.0
        model = tpi.parallelize(model, tp_group, sequence_parallel=sequence_parallel)
        inputs = hf_models.batch(1 if padded else 0)
        with tpi.set_tp_invariant_mode(True):
            output = model(**inputs)
            output.loss.backward()
        own = tpi.load_balancing_loss(output.router_logits, 2, mask=inputs["attention_mask"].flatten())
        torch.testing.assert_close(own, output.aux_loss)
        return output.loss.detach(), output.aux_loss.detach(), testing.full_grads(model)

    def both(tp_group):
        return [losses(tp_group, False, False), losses(tp_group, tp_group is not None, True)]

    want = both(None)
    assert want[0][1] > 0 and want[0][1] != want[1][1]
    for found in run_ranks(both, degree):
        assert_bitwise_equal(found, want)


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(family="qwen3_moe", change=lambda model: None, tp_group=None, plan=None, sp=False, **options):
    model = hf_models.build(family, **options)
    change(model)
    before = list(model.named_modules())
    with pytest.raises(ValueError) as caught:
        tpi.parallelize(model, tp_group, plan, sequence_parallel=sp)
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


def test_sizes_that_the_degree_does_not_divide():
    def on_rank(tp_group):
        return refused(tp_group=tp_group, moe_intermediate_size=33)

    for text in run_ranks(on_rank, 2):
        assert "mlp.experts: intermediate size=33 is not divisible by TP degree=2" in text


@pytest.fixture(scope="module")
def gpt_oss():
    """Its config; attn_implementation as transformers sets it."""
    transformers = pytest.importorskip("transformers")
    sizes = {**hf_models.SIZES, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = dict(rope_type="default", rope_theta=1e4)
    return transformers.GptOssConfig(**sizes, rope_parameters=rope, experts_implementation="eager")


@pytest.mark.parametrize("theirs", (None, {"embed_tokens": "embedding_rowwise"}), ids=("none", "the embedding's"))
def test_gpt_oss_has_a_plan_of_its_layers(theirs):
    """Versions of transformers differ in what is left of their own."""
    model = hf_models.build("gpt_oss")
    model.config.base_model_tp_plan, model._tp_plan = theirs, {"lm_head": "colwise_gather_output"}
    plan = tpi.plans.own_plan(model)
    assert plan["model.layers.*.mlp.experts"] == "moe_tp_experts" and "lm_head" in plan
    assert plan.get("model.embed_tokens") == (theirs or {}).get("embed_tokens")


def generated(tp_group, mode):
    """Three times as many tokens as the sliding layers' window has, and the logits of one forward of them all."""
    model = tpi.parallelize(hf_models.build("gpt_oss"), tp_group).eval()
    with tpi.set_tp_invariant_mode(mode), torch.no_grad():
        out = model.generate(
            hf_models.batch()["input_ids"][:, :5], max_new_tokens=16, min_new_tokens=16, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        whole = model(out.sequences[:, :-1], use_cache=False).logits[:, 4:]
    return out.sequences, torch.stack(out.logits, 1), whole


def test_gpt_oss_decodes_with_a_sliding_cache():
    """Each row of logits is that of a whole forward, at every degree."""
    want = generated(None, True)
    assert want[0].shape == (2, 21)
    assert_bitwise_equal(want[1], want[2])
    for degree in (2, 4):
        for got in run_ranks(generated, degree, True):
            assert_bitwise_equal(got, want)
    assert not torch.equal(run_ranks(generated, 2, False)[0][2], want[2])


def goes_on(tp_group, folder, save):
    """A step, and another in a model that loads what was saved after the first."""
    with tpi.set_tp_invariant_mode(True):
        model = tpi.parallelize(hf_models.build("gpt_oss"), None if tp_group is None else mesh_or_group(tp_group, save))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if save != "load":
            hf_models.step(model, optimizer, 0)
            tpi.checkpoint.save(folder, model, optimizer)
        else:
            tpi.checkpoint.load(folder, model, optimizer)
        hf_models.step(model, optimizer, 1)
    return tpi.full_state_dict(model)


def test_a_checkpoint_of_gpt_oss_goes_on_at_another_degree(tmp_path):
    want = goes_on(None, str(tmp_path / "one"), "group")
    for kind in ("group", "mesh"):
        for got in run_ranks(goes_on, 2, str(tmp_path / kind), kind):
            assert_bitwise_equal(got, want)
    for degree, folder in ((4, "mesh"), (2, "one"), (1, "group")):
        for got in run_ranks(goes_on, degree, str(tmp_path / folder), "load"):
            assert_bitwise_equal(got, want)


def test_sinks_need_their_heads():
    """Whole on each rank they would get a part of their gradient."""
    plan = tpi.plans.own_plan(hf_models.build("gpt_oss"))
    whole = {name: style for name, style in plan.items() if not name.endswith("sinks")}

    def on_rank(tp_group):
        model = tpi.parallelize(hf_models.build("gpt_oss"), tp_group, whole)
        for mode in (True, False):
            with tpi.set_tp_invariant_mode(mode), pytest.raises((ValueError, RuntimeError)):
                model(**hf_models.batch())

    run_ranks(on_rank, 2)
    name = "model.layers.*.self_attn.sinks"
    assert "layers.0.self_attn.sinks: Part(style='packed_colwise'" in refused(
        "gpt_oss", plan={**plan, name: "packed_colwise"}
    )


def test_a_latent_projection_needs_sharded_heads_beside_it():
    plan = tpi.plans.own_plan(hf_models.build("deepseek_v2"))
    whole = {name: style for name, style in plan.items() if ".self_attn." not in name or style == "mla_kv_a_proj"}
    text = refused("deepseek_v2", plan=whole)
    assert "kv_a_proj_with_mqa: style 'mla_kv_a_proj': no layer beside it has the style 'colwise'" in text

    def on_rank(tp_group):
        model = hf_models.build("deepseek_v2")
        own = model.config.base_model_tp_plan, model._tp_plan  # without it nothing completes the gradient
        left = ({name: style for name, style in one.items() if style != "mla_kv_a_proj"} for one in own)
        model.config.base_model_tp_plan, model._tp_plan = left
        tpi.parallelize(model, tp_group)
        with pytest.raises(
            ValueError, match=r"kv_a_proj_with_mqa\.weight.*: the same on every rank, and meets this rank"
        ):
            model(**hf_models.batch())

    run_ranks(on_rank, 2)


def gpt_oss_block(config, dtype=torch.float32):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    torch.manual_seed(0)
    block = GptOssMLP(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.3)
    return block.to(dtype)


def step_of_block(block: Any, mode: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, 12, 64, generator=generator).to(next(block.parameters()).dtype) * 3 for _ in range(2))
    x.requires_grad_()
    with tpi.set_tp_invariant_mode(mode):
        y, scores = block(x)
        y.backward(dy)
    return {"y": y.detach(), "scores": scores.detach(), "dx": x.grad, **testing.full_grads(block)}


def gpt_oss_on_rank(tp_group, config, mode=True):
    block = tpi.parallelize(gpt_oss_block(config), tp_group, {"experts": "moe_tp_experts"})
    return step_of_block(block, mode), (block.experts.activation, block.experts.gate_fn is None)


@pytest.mark.parametrize(("limit", "fused"), [(7.0, True), (2.0, False)])
def test_the_block_of_gpt_oss(gpt_oss, limit, fused):
    """By itself, with a plan by hand. The kernel has one limit: with another one the model's own function runs."""
    config = copy.deepcopy(gpt_oss)
    config.swiglu_limit = limit
    alone, (activation, by_kernel) = gpt_oss_on_rank(None, config)
    assert by_kernel == fused and (activation == "clamped_silu") == fused
    for got, _ in run_ranks(gpt_oss_on_rank, 4, config):
        assert_bitwise_equal(got, alone)
    assert not torch.equal(run_ranks(gpt_oss_on_rank, 2, config, False)[0][0]["y"], alone["y"])
    exact, theirs = (step_of_block(gpt_oss_block(config, dtype), False) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (alone, theirs)]
        assert errors[0] <= max(2 * errors[1], 1e-6), (name, errors)


def test_activations_of_torch_are_known_by_their_values():
    class SiLU(torch.nn.Module):
        """Not torch's, in spite of its name."""

        def forward(self, x):
            return x * torch.sigmoid(2 * x)

    class Swish(torch.nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    model = hf_models.build("mixtral")
    name = next(n for n, m in model.named_modules() if hasattr(m, "down_proj") and hasattr(m, "act_fn"))
    found = []
    for act_fn in (SiLU(), Swish(), torch.nn.SiLU(inplace=True), torch.nn.ReLU()):
        twin = copy.deepcopy(model)
        twin.get_submodule(name).act_fn = act_fn
        found.append(tpi.parallelize(twin, None).get_submodule(name).activation)
    assert found[2] == "silu", "torch's, by its values; a forward of the user's own is called"
    assert type(found[0]) is SiLU and type(found[1]) is Swish and type(found[3]) is torch.nn.ReLU
