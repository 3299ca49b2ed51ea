"""Which causal language models of transformers `parallelize` takes: tries every model type, writes the table of docs.

    python model_types.py --results results.json [TYPE ..]  # the types without a result, or those named; slow
    python tests/helpers/model_types.py --results results.json --write       # docs/model_types.md, from the results

Each type of AutoModelForCausalLM gets a tiny config (`tiny_config`), a model with random weights, and one forward and
backward at TP=1 and TP=2, with the mode on, without and with sequence parallelism, with the output layer tied to the
embedding and not. A model works if

    bits    loss, logits and every whole gradient are the same bytes at TP=1 and on both ranks of TP=2
    right   each of these is as near to the model of transformers itself in float64 as that model in float32: the
            norm-wise relative error is at most 4 times as large, or 1e-5; for gradients that nearly vanish, the error
            is at most 1e-6 of the norm of all gradients. The same at TP=2 with the mode off, which shows a plan that is
            wrong whatever the order of sums
    whole   the parameters gathered from TP=2 are the model's own, and the same ones have gradients

and is refused if `parallelize`, or this library in the forward, raises a ValueError, TypeError, NotImplementedError or
AttributeError with the reason. Anything else is a defect of this library, and the script's exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.hugging_face.experts import use_own_code

DOCUMENT = Path(__file__).parents[2] / "docs" / "model_types.md"
BATCH, SEQUENCE, VOCABULARY = 2, 24, 96
MOST_PARAMETERS = 60_000_000  # of a model that counts as tiny; a larger one is a config that was not shrunk

# --- tiny configs ---------------------------------------------------------------------------------------------------

# The first pattern that matches an integer field's name gives its value, at most the default's.
_SIZES: list[tuple[str, int]] = [
    (r"vocab_size_per_layer_input|.*vocab.*", VOCABULARY),
    (r".*token_(id|index)|.*_(idx|index)", 2),
    (r"num_(attention|key_value|kv|query|v|k)?_?heads|.*_heads|n_head|num_query_groups|.*attention_heads", 4),
    (r"num_(key_value|kv)_heads|kv_n_heads", 2),
    (r"(num_)?(hidden_|encoder_|decoder_)?layers|n_layers?|depth|num_blocks|num_.*_layers|n_layers_per.*", 2),
    (r"(moe_|num_|n_|moe_num_)?(routed_|local_)?experts|zero_expert_num", 4),
    (r".*experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|.*shared_experts", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"n_group|topk_group|n_groups|num_expert_group|.*_n_groups|mamba_ngroups", 1),
    (r"qk_rope_head_dim|qk_nope_head_dim", 8),
    (r".*head_dim|.*_d_head|d_head|dim_head|d_kv|kv_channels|attention_head_size|mamba_headdim|.*_head_size", 16),
    (r"rotary_dim", 8),
    (r".*(ffn|intermediate|feed_forward|mlp|dff|d_ff|dim_ff|n_inner|d_inner|ffn_hidden).*", 128),
    (r".*(lora_rank|_rank|d_state|state_size|latent).*", 32),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_dim|embedding_size|emb_dim|_dim|hidden_dim|lru_width).*", 64),
    (r".*(max_position|n_positions|n_ctx|max_seq_len|context_length|max_.*positions|model_max_length).*", 64),
    (r".*(sliding_window|window|chunk_size|block_size|attention_chunk).*", 9),
    (r".*image_size|crop_size", 32),
    (r".*patch_size", 4),
]
# What the default config needs to be one.
_ASSISTANT = dict(text_config=dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=0))
_FIRST: dict[str, dict[str, Any]] = {
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "dbrx": dict(attn_config=dict(rope_theta=1e4, clip_qkv=8.0)),
}
# What no rule on names can know: fields of single model types, and of their sub-configs ("text_config.field").
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1),
    "granitemoehybrid": dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=1),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "reformer": dict(axial_pos_embds_dim=[32, 32], axial_pos_shape=[4, 6], num_buckets=None),
    "cohere_compass_text": dict(
        rope_parameters={"full_attention": dict(rope_type="default", rope_theta=1e4)},
        layer_types=["full_attention", "full_attention"],
    ),
    "qwen4_exp_text": dict(
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4
    ),
    "qwen4_exp": {
        f"text_config.indexer_{name}": size
        for name, size in dict(n_heads=4, kv_heads=1, head_dim=16, budget=8, compress_ratio=4).items()
    },
    "dots3_note": {"audio_config.adapter_input_size": 64},
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "deepseek_v2": dict(num_experts_per_tok=2, n_group=1, topk_group=1),
    "flint": dict(mlp_only_layers=[0], layer_types=["full_attention", "sliding_attention"]),
    "mimo_v2_flash": dict(
        num_key_value_heads=2, layer_types=["full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse"]
    ),
}


def _shrunk(name: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size) if value > 0 else value
    return value


def shrink(config: Any, overrides: dict[str, Any]) -> Any:
    """A new config of the same class with small sizes; lists with an entry for each layer are cut."""
    fields = vars(config)  # a field that differs from layer to layer cannot be read from the config itself
    layers = next((fields[n] for n in _LAYERS if isinstance(fields.get(n), int)), None)
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if name.startswith("_") or name in ("model_type", "transformers_version"):
            continue
        if hasattr(value, "to_dict"):
            inner = {k.partition(".")[2]: v for k, v in overrides.items() if k.startswith(f"{name}.")}
            changed[name] = shrink(value, inner).to_dict()
        elif isinstance(value, bool) or not isinstance(value, (int, list, tuple, float, dict)):
            continue
        elif isinstance(value, int):
            if (new := _shrunk(name, value)) != value:
                changed[name] = new
        elif isinstance(value, float):
            if value and ("dropout" in name or "jitter" in name or name.endswith(("pdrop", "layerdrop"))):
                changed[name] = 0.0
        elif isinstance(value, (list, tuple)) and isinstance(layers, int) and len(value) == layers > 4:
            kinds = list(dict.fromkeys(value)) if all(isinstance(v, (str, int)) for v in value) else []
            changed[name] = kinds[:4] if len(kinds) > 1 else list(value[:2])
    counts = [len(v) for v in changed.values() if isinstance(v, list)]
    if counts:
        changed |= {name: max(counts) for name in _LAYERS if name in fields}
        changed |= {k: (v * 4)[: max(counts)] for k, v in changed.items() if isinstance(v, list)}
    if "head_dim" in fields and fields["head_dim"] is None:
        changed["head_dim"] = 16
    if "qk_rope_head_dim" in changed:
        rope, nope = changed["qk_rope_head_dim"], changed.get("qk_nope_head_dim", 0)
        changed |= {name: size for name, size in (("head_dim", rope), ("qk_head_dim", rope + nope)) if name in changed}
    if "num_kv_shared_layers" in fields:
        changed["num_kv_shared_layers"] = 0
    heads, kv = changed.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads and "num_key_value_heads" in fields and (kv is None or kv >= fields["num_attention_heads"]):
        changed["num_key_value_heads"] = heads
    changed |= {k: v for k, v in overrides.items() if "." not in k}
    return type(config)(**changed)


def tiny_config(model_type: str) -> Any:
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    first = _FIRST.get(model_type, {})
    inner = {f"{part}.{name}": v for part, fields in first.items() for name, v in fields.items()}
    overrides = {**inner, **_OVERRIDES.get(model_type, {})}
    return shrink(kind(**first), overrides)


# --- models ---------------------------------------------------------------------------------------------------------


def class_names() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type: str, tied: bool | None) -> Any:
    """The full model, the same on every rank; tied None: as the config has it."""
    import transformers

    config = tiny_config(model_type)
    cls = getattr(transformers, class_names()[model_type])
    if not isinstance(config, cls.config_class):  # AutoModelForCausalLM takes the part that is of the class, too
        config = next((c for c in vars(config).values() if isinstance(c, cls.config_class)), config)
    for one in {id(c): c for c in (config, *_text_configs(config))}.values():
        if tied is not None:
            one.tie_word_embeddings = tied
        if getattr(one, "is_decoder", None) is False:
            one.is_decoder = True  # BERT and its like are encoders otherwise
        if hasattr(one, "use_cache"):
            one.use_cache = False
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise RuntimeError(f"{model_type}: the config was not shrunk, {count:,} parameters are left")
    torch.manual_seed(0)
    model = cls(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            else:
                spread = torch.exp2(torch.randint(-2, 3, parameter.shape, generator=generator).float())
                parameter.copy_(noise * spread * 0.06)
    return model.train()


def lacks(model_type: str) -> list[str]:
    """Names of module classes that a model of the default config has, and the tiny one has not."""
    import transformers

    cls = getattr(transformers, class_names()[model_type])
    config = transformers.CONFIG_MAPPING[model_type](**_FIRST.get(model_type, {}))
    if not isinstance(config, cls.config_class):
        config = next((c for c in vars(config).values() if isinstance(c, cls.config_class)), config)
    with _quiet():
        tiny = build(model_type, None)
        try:
            with torch.device("meta"):
                default = cls(config)
        except Exception:  # a default that is none: fields without one
            return []
    names = [{type(module).__name__ for module in model.modules()} for model in (default, tiny)]
    return sorted(names[0] - names[1] - {"Dropout"})


def _text_configs(config: Any) -> list[Any]:
    try:
        return [config.get_text_config()]
    except ValueError:  # several
        return []


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(100))
    return dict(input_ids=ids, labels=ids)


def step(model: Any) -> dict[str, Tensor | None]:
    """Loss, logits and every gradient, whole."""
    output = model(**batch())
    output.loss.backward()
    grads = testing.full_grads(model)
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **grads}


_REFUSALS = (ValueError, TypeError, NotImplementedError, AttributeError)


def run_on_rank(tp_group: Any, model_type: str, tied: bool | None, sp: bool, mode: bool) -> dict[str, Any]:
    """{"refused": reason}, or what a step of the parallelized model gives, and its parameters."""
    with _quiet():
        full = build(model_type, tied)
        model = copy.deepcopy(full)
        try:
            tpi.parallelize(model, tp_group, sequence_parallel=sp)
        except ValueError as error:
            return {"refused": str(error)}
        testing.assert_bitwise_equal(
            testing.full_parameters(model), dict(full.named_parameters(remove_duplicate=False))
        )
        with tpi.set_tp_invariant_mode(mode):
            try:
                return {"step": step(model)}
            except _REFUSALS as error:
                _raised_by_us(error)
                return {"refused": f"at its forward: {error}"}


def _raised_by_us(error: BaseException) -> None:
    """Raises it again if it comes from elsewhere: torch's or the model's own errors are crashes."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = str(Path(tpi.__file__).parent)
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(package):
        raise error


@contextlib.contextmanager
def _quiet() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def stock(model_type: str, tied: bool | None, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The untouched model's."""
    with _quiet():
        model = build(model_type, tied).to(dtype)
        use_own_code(model)
        output = model(**batch())
        output.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
        return {"loss": output.loss.detach(), "logits": output.logits.detach(), **grads}


def wrong(got: dict[str, Any], exact: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The first tensor that is further from `exact` than the rule allows, with both errors; "" if there is none."""
    grads = [v.double().norm() for n, v in exact.items() if n not in ("loss", "logits") and v is not None]
    overall = float(torch.stack(grads).norm()) if grads else 0.0
    for name, value in exact.items():
        mine = got.get(name)
        if value is None or mine is None:
            if (value is None or not value.any()) != (mine is None or not mine.any()):
                return f"{name}: one has a gradient and the other none"
            continue
        if mine.shape != value.shape:
            return f"{name}: shape {tuple(mine.shape)} instead of {tuple(value.shape)}"
        size = float(value.norm()) or 1.0
        errors = [float((x.double() - value.double()).norm()) / size for x in (mine, theirs[name])]
        vanishes = name not in ("loss", "logits") and errors[0] * size <= 1e-6 * overall
        if not (errors[0] <= max(4 * errors[1], 1e-5) or vanishes):
            return f"{name}: relative error {errors[0]:.1e}, transformers' own in float32 {errors[1]:.1e}"
    return ""


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def examine(model_type: str, tied: bool | None, sp: bool) -> dict[str, str]:
    """{"state": "works" | "refused" | "defect" | "no model", "why": ..} of one model type."""
    try:
        exact, theirs = (stock(model_type, tied, dtype) for dtype in (torch.float64, torch.float32))
    except Exception as error:  # then nothing is compared, but it may be refused
        exact = theirs = None  # type: ignore[assignment]
        unusable = _in_a_line(error)
    try:
        results = [
            testing.run_ranks(run_on_rank, degree, model_type, tied, sp, mode, device="cpu")
            for degree, mode in ((2, True), (1, True), (2, False))
        ]
    except testing.RankError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        if exact is None:
            return {"state": "no model", "why": unusable}
        return {"state": "defect", "why": "raised " + " | ".join(lines[-3:])[-600:]}
    two, one, off = results
    outcomes = [*two, *one, *off]
    refused = [r["refused"] for r in outcomes if "refused" in r]
    if "refused" in two[0]:
        return {"state": "refused", "why": two[0]["refused"]}
    if refused:
        return {"state": "defect", "why": f"refused in some runs only: {refused[0]}"}
    if exact is None:
        return {"state": "no model", "why": unusable}
    expected = one[0]["step"]
    for rank, result in enumerate(two):
        try:
            testing.assert_bitwise_equal(result["step"], expected)
        except AssertionError as error:
            return {"state": "defect", "why": f"bits, rank {rank} of TP=2: {error}"}
    for what, result in (("mode on", expected), ("mode off at TP=2", off[0]["step"])):
        if text := wrong(result, exact, theirs):
            return {"state": "defect", "why": f"wrong, {what}: {text}"}
    return {"state": "works", "why": ""}


def variants(model_type: str) -> list[tuple[bool | None, bool]]:
    """(tied, sequence_parallel): both ties where the class can tie."""
    import transformers

    ties: list[bool | None] = [None]
    cls = getattr(transformers, class_names()[model_type])
    if getattr(cls, "_tied_weights_keys", None):
        ties = [False, True]
    return [(tied, sp) for sp in (False, True) for tied in ties]


def examine_type(model_type: str) -> dict[str, dict[str, str]]:
    results: dict[str, dict[str, str]] = {}
    for tied, sp in variants(model_type):
        name = ", ".join([*(["tied"] if tied else []), *(["sp"] if sp else [])]) or "plain"
        earlier = results.get("plain")
        if earlier is not None and (earlier["state"] == "no model" or "brings " in earlier["why"]):
            results[name] = earlier  # nothing that these options could change
        else:
            results[name] = examine(model_type, tied, sp)
    # Where the tiny model lacks modules of the default one, a refusal still holds for both, but "works" does not.
    if any(found["state"] == "works" for found in results.values()) and (missing := lacks(model_type)):
        return {"plain": {"state": "no model", "why": f"the tiny model has no {', '.join(missing)}"}}
    return results


# --- the table ------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- generated by tests/helpers/model_types.py -->", "<!-- end of the generated part -->"
_STATES = {"works": "yes", "refused": "refused", "no model": "not tried", "defect": "DEFECT"}


def row(model_type: str, results: dict[str, dict[str, str]]) -> str:
    """What a line of the table has beside the type: plain | tied | sp | tied, sp | the first reason |."""
    cells = [_STATES[results[name]["state"]] if name in results else "" for name in ("plain", "tied", "sp", "tied, sp")]
    reason = next((_reason(found["why"]) for found in results.values() if found["state"] != "works"), "")
    return f"{' | '.join(cells)} | {reason.replace(class_names()[model_type], 'it')} |"


def rows(page: str) -> dict[str, str]:
    """What the page has of each model type, as `row` gives it."""
    lines = [line.removeprefix("| ").partition(" | ") for line in page.partition(_BEGIN)[2].splitlines()]
    return {name: rest for names, _, rest in lines if rest for name in names.split(", ")}


def _line(why: str) -> str:
    """The first problem of parallelize's error, which has a headline above them; the whole of another."""
    headline, _, problems = why.partition("\n")
    return problems.partition("\n")[0].strip() if "nothing was changed" in headline else " ".join(why.split())


def _reason(why: str) -> str:
    return re.split(r"; | \(|, and |: give |: choose |, since ", _line(why))[0].replace("|", "/")[:200]


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """The generated part of the document: types of which the same is so are one line."""
    works = sum(any(found["state"] == "works" for found in r.values()) for r in results.values())
    alike: dict[str, list[str]] = {}
    for model_type, found in results.items():
        alike.setdefault(row(model_type, found), []).append(model_type)
    head = "| model types | TP | tied | SP | tied, SP | why not |\n| --- | --- | --- | --- | --- | --- |"
    lines = [f"| {', '.join(alike[text])} | {text}" for text in sorted(alike, key=lambda text: "yes" not in text)]
    return "\n".join([f"Of {len(results)} model types {works} work.\n", head, *lines]) + "\n"


def write(results: dict[str, dict[str, dict[str, str]]]) -> None:
    before, _, rest = DOCUMENT.read_text().partition(_BEGIN)
    DOCUMENT.write_text(f"{before}{_BEGIN}\n\n{table(results)}\n{_END}{rest.partition(_END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for model_type in options.types or (
        [] if options.write else [name for name in class_names() if name not in results]
    ):
        try:
            results[model_type] = examine_type(model_type)
        except Exception as error:
            results[model_type] = {"plain": {"state": "no model", "why": _in_a_line(error)}}
        options.results.write_text(json.dumps(results, indent=1))
        for variant, found in results[model_type].items():
            print(f"{model_type:24} {variant:9} {found['state']:9} {_line(found['why'])[:200]}", flush=True)
    results = {name: results[name] for name in class_names() if name in results}
    if options.write:
        write(results)
    return int(any(found["state"] == "defect" for of_type in results.values() for found in of_type.values()))


if __name__ == "__main__":
    sys.exit(main())
