"""What parallelize sets in a Hugging Face model besides its modules: its attention function, and its loss.

Both are looked up by name at every call, so that the mode decides then: on, this library's; off, what was there before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .attention_choice import check_no_dropout, safe_attention
from .cross_entropy import vocab_parallel_cross_entropy
from .linear import Linear
from .mode import is_tp_invariant_mode_enabled

SAFE_IMPLEMENTATIONS = ("sdpa", "eager")
_PREFIX = "tp_invariant_"


def problem_with(config: Any) -> str | None:
    """What is wrong with the attention that a Hugging Face config asks for, None if nothing is."""
    asked = config._attn_implementation
    if asked is None or asked.removeprefix(_PREFIX) in SAFE_IMPLEMENTATIONS:
        return None
    return (
        f"attn_implementation={asked!r} may give a head other bits when fewer heads are in the call: choose one of "
        f"{', '.join(map(repr, SAFE_IMPLEMENTATIONS))}, in whose place safe_attention runs while the mode is on"
    )


def install(model: Any) -> None:
    """Registers safe_attention with transformers and has `model` use it, and an invariant causal-LM loss.

    Raises:
        ValueError: at the model's next forward with the mode on, if its attention is changed to an unsafe one.
    """
    from transformers import AttentionInterface
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for original in SAFE_IMPLEMENTATIONS:
        AttentionInterface.register(_PREFIX + original, _HuggingFace(original))
        AttentionMaskInterface.register(_PREFIX + original, ALL_MASK_ATTENTION_FUNCTIONS[original])
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        asked = config._attn_implementation or "sdpa"
        config._attn_implementation = _PREFIX + asked.removeprefix(_PREFIX)
    for module in model.modules():  # each looks its attention up in its config, and any may be called by itself
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.register_forward_pre_hook(_keep_safe)
    if getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = CausalLMLoss(model.get_output_embeddings())


def _keep_safe(module: Any, args: Any) -> None:
    """Keeps ours in the place of an attention that was chosen since: "sdpa" and "eager" mean ours again."""
    config = module.config
    asked = config._attn_implementation
    if asked in SAFE_IMPLEMENTATIONS:
        config._attn_implementation = _PREFIX + asked
    elif is_tp_invariant_mode_enabled() and (problem := problem_with(config)):
        raise ValueError(problem)


class _HuggingFace:
    """A function of transformers' attention interface: query [B, h, S, D], key, value [B, kv, T, D] -> [B, S, h, D]."""

    def __init__(self, original: str) -> None:
        self.original = original

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not is_tp_invariant_mode_enabled():
            given = dict(dropout=dropout, scaling=scaling, is_causal=is_causal, softcap=softcap, **others)
            given = {name: value for name, value in given.items() if value is not None}
            return self._stock(module)(module, query, key, value, attention_mask, **given)
        check_no_dropout(dropout, "attention dropout")
        for name in ("position_bias", "cache", "s_aux"):
            if others.get(name) is not None:
                raise ValueError(f"{type(module).__name__} passes {name}, which safe_attention does not take")
        if attention_mask is not None:
            attention_mask, causal = attention_mask[..., : key.shape[2]], False
        else:  # as transformers reads it: a single token sees all there is
            causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        out = safe_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=causal,
            scale=scaling,
            softcap=softcap,
            enable_gqa=True,
        )
        return out.transpose(1, 2).contiguous(), None

    def _stock(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        if self.original == "eager":  # each model file has its own
            for cls in type(module).__mro__:
                eager = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
                if eager is not None:
                    return eager
            raise NotImplementedError(f"{type(module).__name__} has no eager_attention_forward beside it")
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS[self.original]


class CausalLMLoss:
    """transformers' ForCausalLMLoss: in fp32; with the mode on, by this library's cross-entropy.

    logits [B, S, V], or [B, S, V/P] of an output layer whose plan is "colwise", which gathers nothing.
    """

    def __init__(self, output_layer: Any) -> None:
        self.output_layer = output_layer

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        head = self.output_layer
        sharded = isinstance(head, Linear) and head.parallel_mode == "column" and not head.gather_output
        if not is_tp_invariant_mode_enabled() and not sharded:
            from transformers.loss.loss_utils import ForCausalLMLoss

            stock: Any = ForCausalLMLoss
            return stock(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits.flatten(0, -2),
            shift_labels.reshape(-1).to(logits.device),
            tp_group=head.group if sharded else None,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch
