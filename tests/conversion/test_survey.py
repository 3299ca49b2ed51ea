"""Plans and the survey: which module a pattern speaks of, and what parallelize refuses before it changes anything."""

from __future__ import annotations

import copy
import re
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.conversion.convert import parallelize
from tp_invariant.conversion.gradient_flow import FirstForward, IncompleteGradient
from tp_invariant.conversion.head_dims import ProbeError, ShardedInput, sharded_inputs
from tp_invariant.conversion.plans import STYLES, Part, own_plan, resolve
from tp_invariant.hugging_face import models as hugging_face
from tp_invariant.hugging_face.masks import attend

# --- plans ----------------------------------------------------------------------------------------------------------


def test_a_pattern_names_one_component():
    modules = dict(nn.ModuleDict({"a": nn.ModuleDict({"0": nn.Identity()}), "b10": nn.Identity()}).named_modules())
    parts, unused = resolve({"*.0": "replicate", "b*": Part("replicate"), "*.*.0": "colwise"}, modules)
    assert parts == {"a.0": Part("replicate"), "b10": Part("replicate")}
    assert unused == ["*.*.0"]


def test_own_plans_name_the_base_model():
    model = hf_models.build("llama")
    plan = own_plan(model)
    assert plan["lm_head"] == "colwise_gather_output"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert own_plan(model.model)["layers.*.mlp.down_proj"] == "rowwise"


# --- what is refused ------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.up, self.drop = nn.Linear(8, 8), nn.Linear(8, 9), nn.Dropout(0.1)
        self.conv = nn.Conv1d(8, 8, 1)


def refused_on_rank(tp_group):
    torch.manual_seed(tp_group.rank())  # a mistake in the plan is named before weights that differ
    model = Mixture()
    before = list(model.modules())
    with pytest.raises(ValueError) as caught:
        plan = {
            "experts": "moe_identity_expert",
            "up": "colwise",
            "conv": "rowwise",
            "down": "rowwise",
        }
        parallelize(model, tp_group, plan)
    assert list(model.modules()) == before
    with pytest.raises(RuntimeError, match="different weights in 2 of 2 parameters"):  # the control
        parallelize(nn.Sequential(model.experts), tp_group, {"0": "colwise"})
    return str(caught.value)


def test_all_that_cannot_be_honoured_in_one_error():
    for text in run_ranks(refused_on_rank, 2):
        assert text.splitlines() == [
            "Mixture cannot be made tensor-parallel over 2 ranks; nothing was changed:",
            "  plan['down']: no module has such a name",
            "  experts: style 'moe_identity_expert' is not supported (did you mean 'moe_tp_experts'?); supported are "
            + ", ".join(STYLES),
            "  up: out_features=9 is not divisible by TP degree=2: it must be a multiple of 2. TP degrees that fit: "
            "3, 9",
            "  conv: style 'rowwise' needs an nn.Linear, not a Conv1d",
        ]


def refusal(model: nn.Module, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parallelize(model, None, *args, **options)
    return str(caught.value)


@pytest.mark.parametrize("index", (0, 1), ids=("Embedding", "Linear"))
def test_a_forward_of_a_module_and_not_of_its_class(index):
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 8), nn.SiLU())
    layer = model[index]
    layer.forward = lambda x: 3 * type(layer).forward(layer, x)
    assert f"\n  {index}: has a forward of its own, given to this module" in refusal(model, {"1": "colwise"})


def test_the_class_s_own_forward_given_to_a_module():
    """As accelerate leaves it, when it removes its hook."""
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU())
    model[0].forward = model[0].forward
    parallelize(model, None, {"0": "colwise"})
    assert isinstance(model[0], tpi.Linear)


def test_a_forward_given_to_an_activation_is_called():
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU())
    model[1].forward = torch.neg
    parallelize(model, None, {"0": "colwise"})
    x = torch.randn(3, 4)
    with tpi.set_tp_invariant_mode(True):
        assert torch.equal(model(x), -model[0](x))


def test_an_unsafe_attention():
    model = hf_models.build("llama")
    model.config._attn_implementation = "flash_attention_2"
    text = refusal(model)
    assert "attn_implementation='flash_attention_2' may give a head other bits" in text
    assert "choose one of 'sdpa', 'eager'" in text


@pytest.mark.parametrize("inner", [False, True], ids=["model", "base"])
def test_an_unsafe_attention_set_later(inner):
    model = parallelize(hf_models.build("llama"), None)
    model.config._attn_implementation = "flex_attention"
    with tpi.set_tp_invariant_mode(True), pytest.raises(ValueError, match="flex_attention"):
        (model.model if inner else model)(input_ids=hf_models.batch()["input_ids"])


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_safe_attention_set_later_means_ours(name, monkeypatch):
    calls = []
    monkeypatch.setattr(hugging_face, "attend", lambda *a, **k: calls.append(0) or attend(*a, **k))
    model = parallelize(hf_models.build("llama"), None)
    model.set_attn_implementation(name)
    with tpi.set_tp_invariant_mode(True):
        model(input_ids=hf_models.batch()["input_ids"])
    assert len(calls) == len(model.model.layers)


def test_twice():
    model = parallelize(hf_models.build("llama"), None)
    assert "  lm_head: is a Linear already, a layer of this library: call parallelize once" in refusal(model)


def test_no_plan():
    assert "brings no tensor-parallel plan" in refusal(nn.Sequential(nn.Linear(2, 2)))


def test_the_model_itself():
    model = nn.Linear(2, 2)
    assert parallelize(model, None, {"": "colwise"}) is model and type(model) is tpi.Linear


def test_conflicting_patterns():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=re.escape("plan asks 'colwise' and 'rowwise' of 0: leave one")):
        parallelize(model, None, {"*": "colwise", "0": "rowwise"})


def test_a_norm_over_sharded_heads_needs_its_style():
    model = hf_models.build("qwen3")
    plan = {k: v for k, v in own_plan(model).items() if not k.endswith("k_norm")}
    text = refusal(model, plan)
    wanted = "needs the style 'replicated_with_grad_allreduce'"
    assert f"k_norm: normalises what model.layers.0.self_attn.k_proj has sharded: it {wanted}" in text


def test_heads_that_the_models_own_plan_leaves_out():
    """A model's own plan may leave them out, as older ones did: the class tells."""
    model = hf_models.build("qwen3")
    model._tp_plan = {k: v for k, v in own_plan(model).items() if "_norm" not in k}
    model.config.base_model_tp_plan = {}
    norm = parallelize(model, None).model.layers[1].self_attn.k_norm
    assert (norm.heads, norm.heads_dim) == (4, 2)


class GatedHeads(nn.Module):
    """As Qwen3.5's: queries and gates out of one projection, so that its size does not tell the number of heads."""

    def __init__(self, old: nn.Module, heads_dim: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.heads_dim = old.config, old.layer_idx, heads_dim
        self.q_proj, self.k_proj = nn.Linear(64, 128), nn.Linear(64, 64)
        self.v_proj, self.o_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.for_queries, self.for_keys = nn.RMSNorm(8), nn.LayerNorm(8)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        def heads(x: Tensor) -> Tensor:
            x = x.unflatten(-1, (-1, 8))
            return x.transpose(1, 2) if self.heads_dim == 1 else x

        q, gate = (t.flatten(-2) for t in self.q_proj(hidden_states).unflatten(-1, (-1, 16)).chunk(2, dim=-1))
        q, k, v = (
            self.for_queries(heads(q)),
            self.for_keys(heads(self.k_proj(hidden_states))),
            heads(self.v_proj(hidden_states)),
        )
        if self.heads_dim == 2:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.o_proj(out * gate.tanh()), None


def gated(heads_dim: int) -> nn.Module:
    model = hf_models.build("llama")
    for layer in model.model.layers:
        layer.self_attn = GatedHeads(layer.self_attn, heads_dim)
    return model


def gated_on_rank(tp_group: Any, heads_dim: int) -> Any:
    model = parallelize(gated(heads_dim), tp_group)
    with tpi.set_tp_invariant_mode(True):
        model(**hf_models.batch()).loss.backward()
    norms = [model.model.layers[0].self_attn.get_submodule(name) for name in ("for_queries", "for_keys")]
    return testing.full_grads(model), [(norm.heads, norm.heads_dim) for norm in norms]


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_heads_are_seen_where_no_name_and_no_size_tells_them(heads_dim):
    """And their gradients are whole, the same bits at both degrees, and right."""
    ((expected, seen),) = run_ranks(gated_on_rank, 1, heads_dim)
    assert seen == [(8, heads_dim)] * 2
    for got, _ in run_ranks(gated_on_rank, 4, heads_dim):
        testing.assert_bitwise_equal(got, expected)
    model = gated(heads_dim)
    model(**hf_models.batch()).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_probe_leaves_the_model_as_it_is():
    model = gated(2)
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.RMSNorm, nn.LayerNorm))]
    options = {f"model.layers.{i}.self_attn.{n}_proj": dict(parallel_mode="column") for i in (0, 1) for n in "qkv"}
    options |= {f"model.layers.{i}.self_attn.o_proj": dict(parallel_mode="row") for i in (0, 1)}
    found = sharded_inputs(model, options, 2, names)
    assert found == dict.fromkeys(names, ShardedInput(2, 8, False, False))
    testing.assert_bitwise_equal(dict(model.state_dict()), before)
    assert all(p is parameters[n] and type(p) is nn.Parameter for n, p in model.named_parameters())
    assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    assert testing.digest(model(**hf_models.batch()).loss) == testing.digest(gated(2)(**hf_models.batch()).loss)


def test_a_plan_that_does_not_fit_is_seen():
    """A projection that is whole before a row-parallel layer that takes a part."""
    model = gated(2)
    options = {"model.layers.0.self_attn.o_proj": dict(parallel_mode="row")}
    with pytest.raises(ProbeError, match="o_proj would get 64 features where the plan has 32 for it"):
        sharded_inputs(model, options, 2, ["model.norm"])


class Raises(nn.Module):
    """A norm of another library whose own code raises what nobody foresees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor, gate: Any = None) -> Tensor:
        return x * self.weight * gate.sigmoid()


class RaisesNorm(Raises):
    pass


class NotCopiedNorm(Raises):
    def __deepcopy__(self, memo: Any) -> Any:
        raise LookupError("no copies")


def test_what_raises_under_the_survey_is_a_line():
    model = hf_models.build("llama")
    model.model.layers[0].odd, model.model.layers[1].odd = RaisesNorm(), NotCopiedNorm()
    assert "layers.0.odd: RaisesNorm is no LayerNorm or RMSNorm that this library knows" in refusal(
        model, sequence_parallel=True
    )
    assert "  model.layers.1.odd: NotCopiedNorm was not understood: LookupError: no copies" in refusal(model)


def sharded_by_transformers(tp_group: Any) -> list[str]:
    """As from_pretrained does for tp_plan="auto", which itself needs accelerate."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh, texts = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",)), []
    model = hf_models.build("llama")
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    linear = model.model.layers[0].mlp.up_proj
    for call in (lambda: parallelize(model, tp_group), lambda: tpi.ColwiseParallel()._apply(linear, mesh)):
        with pytest.raises(ValueError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_what_transformers_has_sharded():
    module = pytest.importorskip("transformers.distributed.tensor_parallel", exc_type=ImportError)
    if not hasattr(module, "apply_tensor_parallelism"):
        pytest.skip("this release of transformers shards in another way")
    for model, layer in run_ranks(sharded_by_transformers, 2):
        assert "model.embed_tokens.weight is a DTensor: the model is sharded already" in model
        assert "weight is a DTensor: the model is sharded already" in layer
        assert "leave them out and call tp_invariant.parallelize" in model


def test_an_unknown_norm_stays_where_all_is_whole():
    class OddNorm(nn.BatchNorm1d):
        pass

    model = hf_models.build("llama")
    model.model.layers[0].odd = OddNorm(64)
    assert type(parallelize(copy.deepcopy(model), None).model.layers[0].odd) is OddNorm
    assert "layers.0.odd: OddNorm is no LayerNorm or RMSNorm that this library knows" in refusal(
        model, sequence_parallel=True
    )


class Heads(nn.Module):
    """Two projections with something between them, applied to their heads of 8."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.q, self.between, self.out = nn.Linear(8, 32), between, nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.between(self.q(x).unflatten(-1, (-1, 8))).flatten(-2))


HEADS_PLAN = {"q": "colwise", "out": "rowwise"}


def heads_partial_on_rank(tp_group, style):
    torch.manual_seed(0)
    model = Heads(nn.Sequential(nn.PReLU()))
    parallelize(model, tp_group, {**HEADS_PLAN, "between.0": style})
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    if tp_group.size() > 1:
        with pytest.raises(IncompleteGradient, match=r"between\.0\.weight: the same on every rank, and"):
            model(x)
    with torch.no_grad():
        model(x)
    for key in [key for key, hook in model._forward_hooks.items() if isinstance(hook, FirstForward)]:
        del model._forward_hooks[key]
    model(x).sum().backward()
    return model.between[0].weight.grad


def test_what_the_first_forward_refuses_would_have_been_partial():
    """Said to see all features though it does not, its gradient is a part."""
    one, *_ = run_ranks(heads_partial_on_rank, 1, "replicate")
    parts = run_ranks(heads_partial_on_rank, 2, "replicate")
    torch.testing.assert_close(sum(parts), one)
    assert all((part - one).abs() > 1e-3 for part in parts)


NORMS = {"Phi": ("q_layernorm", "k_layernorm"), "HunYuanDenseV1": ("query_layernorm", "key_layernorm")}


def with_norms(name: str) -> Any:
    import transformers

    own = {"qk_layernorm": True} if name == "Phi" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**hf_models.SIZES, **own)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    if name != "Phi":  # its own plan has nothing in its layers
        model.config.base_model_tp_plan = hf_models.build("llama").config.base_model_tp_plan
    return model


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_heads_by_other_names(name):
    model = with_norms(name)
    text = refusal(model, own_plan(model))
    for norm in NORMS[name]:
        assert f"layers.1.self_attn.{norm}: normalises what model.layers.1.self_attn." in text
    attention = parallelize(model, None).model.layers[1].self_attn
    assert [(m.heads, m.heads_dim) for m in map(attention.get_submodule, NORMS[name])] == [(8, 1), (4, 1)]


def test_a_plan_for_the_output_layer_only():
    model = hf_models.build("llama")
    model._tp_plan, model.config.base_model_tp_plan = {"lm_head": "colwise_gather_output"}, {}
    assert "brings a tensor-parallel plan for its output layer only (lm_head), none for its layers: give " in refusal(
        model
    )


class Around(nn.Module):
    """Has its model's attributes, as PEFT's models have."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)


def test_a_plan_of_the_model_inside():
    text = refusal(Around(hf_models.build("llama")))
    assert "matches none of its layers (model.layers.*.self_attn.q_proj, " in text
    assert "whose names begin with inner.model.layers.: parallelize the model that the plan is of, and put" in text


def test_a_layer_whose_weight_has_another_shape_than_it_says():
    """As transformers 5.0 leaves tied output layers when it resizes embeddings; nothing is half done then."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[1].weight = nn.Parameter(torch.zeros(6, 8))
    wanted = "1: its weight has shape (6, 8), and out_features=4, in_features=8: set them to what it has"
    assert wanted in refusal(model, {"0": "colwise"})
    assert type(model[0]) is nn.Linear


def test_parameters_that_a_module_holds_itself():
    model = Heads(nn.Identity())
    model.sinks = nn.Parameter(torch.tensor(0.0))
    assert "sinks: has no dim: it cannot be sharded" in refusal(model, {**HEADS_PLAN, "sinks": "colwise"})
    (name,) = (name for name in HEADS_PLAN if HEADS_PLAN[name] == "rowwise")
    text = f"{name}.weight: is a parameter of a Linear: name that module in the plan"
    assert text in refusal(model, {**HEADS_PLAN, f"{name}.weight": "rowwise", "sinks": "colwise"})


def ties_on_rank(tp_group: Any) -> None:
    torch.manual_seed(0)
    with_what_stays = nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4))
    with_what_stays[1].bias = with_what_stays[0].bias
    both_sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both_sharded[1].weight = both_sharded[0].weight
    for model, plan in ((with_what_stays, {"0": "colwise"}), (both_sharded, {"0": "colwise", "1": "rowwise"})):
        with pytest.raises(ValueError, match="0 and 1 share a parameter but not the way it is sharded"):
            parallelize(model, tp_group, plan)
        assert type(model[0]) is nn.Linear
        parallelize(copy.deepcopy(model), None, plan)  # on one rank nothing is cut
    parallelize(with_what_stays, tp_group, {"0": "replicate"})
    assert isinstance(with_what_stays[0], tpi.Linear) and with_what_stays[1].bias is with_what_stays[0].bias
    parallelize(both_sharded, tp_group, {"0": "colwise", "1": "colwise_gather_output"})
    assert both_sharded[1].weight is both_sharded[0].weight and both_sharded[1].weight.shape == (2, 4)


def test_ties_that_are_not_sharded_alike():
    run_ranks(ties_on_rank, 2)


class Shifted(nn.Embedding):
    """As position embeddings of OPT and BART: the rows of other numbers than those that are given."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2)


EMBEDDINGS = {
    "derived": lambda: Shifted(12, 8),
    "max_norm": lambda: nn.Embedding(12, 8, max_norm=0.5),
    "by frequency": lambda: nn.Embedding(12, 8, scale_grad_by_freq=True),
}


def with_embedding(tp_group: Any, kind: str, mesh: str) -> Any:
    found = {}
    for name, make in EMBEDDINGS.items():
        torch.manual_seed(0)
        model = nn.Sequential(make(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        if kind == "ours" and mesh == "mesh" and name == "max_norm":  # in place, of what is a view of a DTensor there
            with pytest.raises(ValueError, match="0: max_norm and sparse are not supported over a DeviceMesh"):
                parallelize(model, mesh_or_group(tp_group, mesh), {"1": "colwise"})
            continue
        if kind == "ours":
            parallelize(model, mesh_or_group(tp_group, mesh), {"1": "colwise", "3": "rowwise"})
        with tpi.set_tp_invariant_mode(kind == "ours"):
            y = model(torch.tensor([[1, 3, 3, 9]]))
            y.square().sum().backward()
        found[name] = {
            "y": y.detach(),
            **testing.full_grads(model),
            "after": testing.full_parameters(model)["0.weight"],
        }
    return found


@pytest.mark.parametrize("mesh", ("group", "mesh"))
def test_embeddings_of_other_kinds_stay_where_they_are_whole(mesh):
    """max_norm changes the weight in place, on every rank alike."""
    stock, want = with_embedding(None, "stock", "group"), with_embedding(None, "ours", "group")
    torch.testing.assert_close(want, stock)
    for got in run_ranks(with_embedding, 2, "ours", mesh):
        testing.assert_bitwise_equal(got, {name: want[name] for name in got})
    for name, make in EMBEDDINGS.items():
        what = "Shifted is no nn.Embedding times an" if name == "derived" else "max_norm, scale_grad_by_freq and sparse"
        assert f"  0: {what}" in refusal(nn.Sequential(make()), {"0": "embedding_rowwise"})
        assert type(parallelize(nn.Sequential(make()), None, {"0": "replicate"})[0]) is not tpi.VocabParallelEmbedding


def test_what_sequence_parallel_cannot_place():
    model = hf_models.build("llama")
    model.model.layers[1].extra = nn.Linear(64, 64)
    model.model.layers[1].norms = nn.ModuleList([nn.LayerNorm(64)])
    model.model.layers[1].inner = nn.Sequential(nn.Embedding(4, 4), nn.Conv1d(4, 4, 1))
    assert isinstance(parallelize(copy.deepcopy(model), None).model.layers[1].extra, tpi.Linear)
    assert refusal(model, sequence_parallel=True).splitlines()[1:] == [
        "  model.layers.1.extra: is in no pattern of the plan, and under sequence_parallel sees this rank's tokens",
        "  model.layers.1.norms.0: is a norm neither of a decoder layer itself nor in a block: which tokens it "
        "sees is unknown",
        "  model.layers.1.inner.0: is an embedding inside a decoder layer: not supported under sequence_parallel",
        "  model.layers.1.inner.1: Conv1d has parameters and would see this rank's tokens only",
    ]
    assert "no decoder layers, or several" in refusal(
        nn.Sequential(nn.Linear(2, 2)), {"0": "colwise"}, sequence_parallel=True
    )


def test_names_that_are_nearly_right():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "plan['1x']: no module has such a name; did you mean '1'?" in refusal(model, {"1x": "colwise"})
    text = "  0: style 'column' is not supported (did you mean 'colwise'?); supported are "
    assert text in refusal(model, {"0": "column"})
