"""Tiny Hugging Face decoders with random weights, and the results of a few training steps."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch import Tensor

import tp_invariant as tpi

VOCABULARY, BATCH, SEQUENCE = 96, 2, 24
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# family: (config class, model class, options of its own)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(tie_word_embeddings=True)),
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=7)),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),  # ties its embeddings by default, scales them
    "gemma2": (  # softcaps, which transformers up to 5.17 leaves out of "sdpa"
        "Gemma2Config",
        "Gemma2ForCausalLM",
        dict(sliding_window=9, query_pre_attn_scalar=8, attn_implementation="eager"),
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(sliding_window=9, query_pre_attn_scalar=8)),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),  # gathers q, k and v and normalises them whole
}

# mixtures of experts, which tests/conversion/test_mixtures.py covers
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32),
    ),
    "qwen2_moe": (  # with a shared expert and its gate
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            tie_word_embeddings=True,
        ),
    ),
    "glm4_moe": (  # sigmoid, groups and a correction; the first layer is dense
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        dict(
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
            first_k_dense_replace=1, n_group=2, topk_group=1, use_qk_norm=True,
        ),
    ),
    "deepseek_v3": (  # the same, with latent attention
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
            first_k_dense_replace=1, n_group=2, topk_group=1, num_key_value_heads=8, q_lora_rank=32, kv_lora_rank=32,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        ),
    ),
    "deepseek_v2": (  # latent attention whose heads are sharded
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        dict(
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
            first_k_dense_replace=1, n_group=1, topk_group=1, num_key_value_heads=8, q_lora_rank=32, kv_lora_rank=32,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        ),
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", dict(num_experts=4, num_experts_per_tok=2, intermediate_size=32)),
    "gpt_oss": (  # sinks; a sliding layer and a full one; its plan is this library's
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, sliding_window=7),
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32),
    ),
}  # fmt: skip


@functools.cache
def _transformers() -> Any:
    """Most of what models import, which Python's collector then leaves alone: `parallelize` asks it for all objects."""
    import transformers
    import transformers.modeling_utils

    gc.collect()
    gc.freeze()
    return transformers


def build(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The full model, the same on every rank; weights of many magnitudes, so that sums depend on their order."""
    config_name, model_name, own = {**FAMILIES, **MIXTURES}[family]
    config = getattr(_transformers(), config_name)(**{**SIZES, **own, **options})
    torch.manual_seed(0)
    model = getattr(_transformers(), model_name)(config)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            scale = torch.exp2(torch.randint(-2, 3, parameter.shape).float())
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * scale * 0.06)
    return model.to(dtype).train()


def has_plan(family: str) -> bool:
    """Whether there is a plan for the layers: transformers 5.17 has none for GraniteMoe; GptOss has this library's."""
    return family == "gpt_oss" or any("layers." in pattern for pattern in build(family).config.base_model_tp_plan or {})


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    padding = torch.ones_like(ids)
    if step % 2:
        padding[1, -5:] = 0
    return dict(input_ids=ids, attention_mask=padding, labels=ids.masked_fill(padding == 0, -100))


def forward_and_backward(model: Any, optimizer: Any, step: int) -> Any:
    output = model(**{name: value.to(model.device) for name, value in batch(step).items()})
    optimizer.zero_grad()
    output.loss.backward()
    return output


def step(model: Any, optimizer: Any, step: int) -> None:
    forward_and_backward(model, optimizer, step)
    tpi.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train(model: Any, tp_group: Any, steps: int) -> dict[str, Any]:
    """Logits and gradients of the first step, losses and norms of all steps, and the final parameters; full tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results: dict[str, Any] = {}
    for step in range(steps):
        output = forward_and_backward(model, optimizer, step)
        if step == 0:
            results["logits"], results["grads"] = output.logits.detach(), tpi.testing.full_grads(model)
        norm = tpi.clip_grad_norm_(model.parameters(), 1.0, tp_group=tp_group)
        optimizer.step()
        results[f"loss {step}"], results[f"norm {step}"] = output.loss.detach(), norm
    results["parameters"] = tpi.testing.full_parameters(model)
    return results


def tokenizer() -> Any:
    """Each token is a word: its number."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(number): number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="2")


def assert_near_the_model_itself(ours: dict[str, Any], family: str, floor: float) -> None:
    """The error against the model in float64 is at most twice that of the model in float32."""
    exact, theirs = (_untouched(family, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in exact.items():
        got = ours["logits"] if name == "logits" else ours["grads"][name]
        errors = [float((x.double() - value).norm() / value.norm()) for x in (got, theirs[name])]
        assert errors[0] <= max(2 * errors[1], floor), (name, errors)


def _untouched(family: str, dtype: torch.dtype) -> dict[str, Any]:
    model = build(family, dtype)
    model.config._experts_implementation = "eager"
    output = model(**batch(0))
    output.loss.backward()
    return {"logits": output.logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
