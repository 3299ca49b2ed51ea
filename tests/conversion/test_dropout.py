"""Dropout in models of `parallelize`: right where activations are whole, refused in training where they are a part."""

from __future__ import annotations

import functools
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from meshes import mesh_or_group
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant.functional.attention_choice import _Reroute
from tp_invariant.testing import assert_bitwise_equal

HEADS_WHOLE = {"words": "embedding_rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
PLAN = {**HEADS_WHOLE, "layers.*.attention.q": "colwise", "layers.*.attention.out": "rowwise"}


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.q, self.out, self.p = nn.Linear(16, 16), nn.Linear(16, 16), p

    def forward(self, x: Tensor) -> Tensor:
        q, p = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2), self.p if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(q, q, q, dropout_p=p).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, p: dict[str, float]) -> None:
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(p.get("inside", 0.0))
        self.p = p.get("function", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inside(F.dropout(self.up(x).relu(), self.p, self.training)))


class Layer(nn.Module):
    """Attention, whose heads are whole or sharded, and a multilayer perceptron, with dropout at several places."""

    def __init__(self, p: dict[str, float]) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(p.get("attention", 0.0)), Perceptron(p)
        self.after = nn.Dropout(p.get("after", 0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.after(self.mlp(x))


class Model(nn.Module):
    def __init__(self, p: dict[str, float]) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(32, 16), nn.Dropout(p.get("first", 0.0), inplace=True)
        self.layers, self.norm = nn.ModuleList(Layer(p) for _ in range(2)), nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.words(ids))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def step(model: nn.Module, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    y = model(torch.arange(16).view(2, 8))
    if y.requires_grad:
        y.square().mean().backward()
    return {"y": y.detach(), **tpi.testing.full_grads(model)}


def on_rank(tp_group, p, plan=PLAN, training=True, checked=True, kind="group", grads=True, sp=False, seed=1):
    torch.manual_seed(0)
    model = tpi.parallelize(Model(p).train(training), mesh_or_group(tp_group, kind), plan, sequence_parallel=sp)
    own = _Reroute._dropout
    try:
        if not checked:
            _Reroute._dropout = lambda self, func, args, kwargs: func(*args, **kwargs)  # type: ignore[method-assign]
        with tpi.set_tp_invariant_mode(True), torch.set_grad_enabled(grads):
            return step(model, seed)
    except ValueError as error:
        return str(error)
    finally:
        _Reroute._dropout = own  # type: ignore[method-assign]


WHOLE = {"first": 0.3, "after": 0.3}


@pytest.mark.parametrize("kind", ("group", "mesh"))
@pytest.mark.parametrize(("p", "plan"), [(WHOLE, PLAN), ({"attention": 0.3, **WHOLE}, HEADS_WHOLE)])
def test_what_is_whole(p, plan, kind):
    """The mask of one rank, and torch's own."""
    want = on_rank(None, p, plan)
    for got in run_ranks(on_rank, 2, p, plan, True, True, kind):
        assert_bitwise_equal(got, want)
    with pytest.raises(AssertionError):  # the control: another seed has another mask
        assert_bitwise_equal(on_rank(None, p, plan, seed=2)["y"], want["y"])
    torch.manual_seed(0)
    torch.testing.assert_close(want, step(Model(p)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ("inside", "function"))
def test_of_features(place):
    p = {place: 0.3}
    for rank, text in enumerate(run_ranks(on_rank, 2, p)):
        assert text.startswith(f"dropout on rank {rank} of 2 acts on this rank's part of the activations: "), text
    for other in run_ranks(on_rank, 2, p, PLAN, True, False):  # the control
        assert not torch.equal(other["y"], on_rank(None, p)["y"])


def test_of_attention():
    p = {"attention": 0.3}
    assert isinstance(on_rank(None, p), dict)
    name = "dropout_p=0.3 of scaled_dot_product_attention"
    for rank, text in enumerate(run_ranks(on_rank, 2, p)):
        assert text.startswith(f"{name} on rank {rank} of 2 acts on this rank's part of the activations: "), text
    for text in run_ranks(on_rank, 2, p, PLAN, True, True, "group", False):
        assert "activations, or may, as without gradients nothing shows it" in text


def test_of_tokens():
    p = {"after": 0.3}
    for text in run_ranks(on_rank, 2, p, PLAN, True, True, "group", True, True):
        assert text.startswith("dropout on rank "), text
    want = on_rank(None, p)
    for got in run_ranks(on_rank, 2, p):  # not under sequence parallelism they are whole
        assert_bitwise_equal(got, want)


def test_in_evaluation_all_is_right():
    p = dict.fromkeys(("inside", "function", "first", "after", "attention"), 0.3)
    want = on_rank(None, p, PLAN, False)
    for sp in (False, True):
        for got in run_ranks(on_rank, 2, p, PLAN, False, True, "group", True, sp):
            assert_bitwise_equal(got, want)


# --- models of transformers, whose configs have dropout by default --------------------------------------------------

_BERT: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
_BART: dict[str, Any] = dict(
    vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
_LLAMA: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, pad_token_id=0,
)  # fmt: skip
_FFN = {"*.*.layers.*.fc1": "colwise", "*.*.layers.*.fc2": "rowwise"}
_BERT_PLAN = {"bert.encoder.layer.*.intermediate.dense": "colwise", "bert.encoder.layer.*.output.dense": "rowwise"}
# name of a model class: (its config, the options, the plan)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str] | None]] = {
    "BertForMaskedLM": ("BertConfig", _BERT, _BERT_PLAN),
    "BertForTokenClassification": ("BertConfig", _BERT, _BERT_PLAN),
    "BertForSequenceClassification": ("BertConfig", _BERT, {"classifier": "replicate"}),
    "GPT2LMHeadModel": ("GPT2Config", dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4), {"lm_head": "replicate"}),
    "GPT2ForTokenClassification": (
        "GPT2Config", dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4), {"classifier": "replicate"}
    ),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        dict(vocab_size=96, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
        {"*.transformer.layer.*.ffn.lin1": "colwise", "*.transformer.layer.*.ffn.lin2": "rowwise"},
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
             word_embed_proj_dim=32),
        {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"},
    ),
    "BartForConditionalGeneration": ("BartConfig", _BART, _FFN),
    "MarianMTModel": ("MarianConfig", _BART, _FFN),
    "WhisperForConditionalGeneration": (
        "WhisperConfig", dict(_BART, num_mel_bins=8, max_source_positions=16, dropout=0.1), _FFN
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        dict(vocab_size=96, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, decoder_start_token_id=0),
        {"shared": "replicate"},
    ),
    "DebertaV2ForTokenClassification": (  # an attention of its own
        "DebertaV2Config",
        dict(_BERT, relative_attention=True, pos_att_type="p2c|c2p", type_vocab_size=0),
        {name.replace("bert", "deberta", 1): style for name, style in _BERT_PLAN.items()},
    ),
    "LlamaForTokenClassification": ("LlamaConfig", _LLAMA, None),
    "Qwen3ForTokenClassification": ("Qwen3Config", dict(_LLAMA, head_dim=8), None),
    "MixtralForCausalLM": ("MixtralConfig", dict(_LLAMA, num_local_experts=4, router_jitter_noise=0.1), None),
}  # fmt: skip


def train(tp_group: Any, names: tuple[str, ...], parallel: bool, training: bool, kind: str = "group") -> Any:
    transformers, found = hf_models._transformers(), {}
    for name in names:
        config, options, plan = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**options)).train(training)
        if parallel:
            tpi.parallelize(model, mesh_or_group(tp_group, kind), plan)
        ids = torch.arange(3, 19).view(2, 8)
        labels = torch.tensor([0, 1]) if "Sequence" in name else ids % 2 if "Token" in name else ids
        inputs = dict(input_ids=ids)
        if "Whisper" in name:
            inputs = dict(input_features=torch.randn(2, 8, 32))
        torch.manual_seed(1)
        with tpi.set_tp_invariant_mode(parallel):
            loss = model(**inputs, labels=labels).loss
            loss.backward()
        found[name] = {"loss": loss.detach(), **tpi.testing.full_grads(model)}
    return found


@functools.cache
def on_one_rank(training: bool) -> Any:
    return train(None, tuple(MODELS), True, training)


@pytest.mark.parametrize("training", (True, False))
def test_models_of_transformers(training):
    """Values are stock's from the same seed, and bytes those of one rank."""
    want, stock = on_one_rank(training), train(None, tuple(MODELS), False, training)
    for name, results in stock.items():
        results = {key: value for key, value in results.items() if value is not None}
        size = max(float(value.norm()) for key, value in results.items() if key != "loss")
        for key, value in results.items():
            error = float((want[name][key] - value).norm())
            assert error <= 1e-4 * max(float(value.norm()), 1e-2 * size), (name, key, error)
        assert training == (float(on_one_rank(False)[name]["loss"]) != float(want[name]["loss"])), name
    for kind in ("group", "mesh") if training else ("group",):
        # DeBERTa's encoder reads the weight of its embedding, which over a mesh is a DTensor
        names = tuple(name for name in MODELS if kind == "group" or "Deberta" not in name)
        for got in run_ranks(train, 2, names, True, training, kind):
            for name in names:
                assert_bitwise_equal(got[name], want[name], name)


def refused_on_rank(tp_group: Any, where: str) -> tuple[bool, str]:
    """Attention of this rank's heads, and an activation's dropout, in models of transformers."""
    transformers = hf_models._transformers()
    torch.manual_seed(0)
    if where == "attention":
        model, plan = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA, attention_dropout=0.1)), None
    else:
        config = transformers.BartConfig(**_BART, activation_dropout=0.1)
        model, plan = transformers.BartForConditionalGeneration(config), _FFN
    tpi.parallelize(model, tp_group, plan)
    ids = torch.arange(3, 19).view(2, 8)
    with tpi.set_tp_invariant_mode(True):
        right = bool(model.eval()(input_ids=ids, labels=ids).loss.isfinite())
        try:
            model.train()(input_ids=ids, labels=ids)
        except ValueError as error:
            return right, str(error)
    return right, ""


@pytest.mark.parametrize(
    ("where", "begin"),
    [("attention", "attention dropout of LlamaAttention=0.1 is not supported"), ("activation", "dropout on rank")],
)
def test_models_of_transformers_with_dropout_of_a_part(where, begin):
    assert refused_on_rank(None, where) == (True, "")
    for right, text in run_ranks(refused_on_rank, 2, where):
        assert right and text.startswith(begin), text
