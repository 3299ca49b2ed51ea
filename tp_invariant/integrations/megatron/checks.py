"""What would break the contract in a configuration or a model: every fault at once, in one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...layers.parameters import ShardedModule

# {field of TransformerConfig: (whether a value breaks the contract, what to do)}; fields that a version lacks are well
_FAULTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_dropout": (bool, "set it to 0: masks of parts of activations depend on the degree"),
    "attention_dropout": (bool, "set it to 0: masks of parts of activations depend on the degree"),
    "context_parallel_size": (lambda n: n > 1, "set it to 1"),
    "num_moe_experts": (bool, "leave it out: mixtures of experts are not supported here"),
    "multi_latent_attention": (bool, "leave it out: it is not supported"),
    "mtp_num_layers": (bool, "leave it out: prediction of several tokens is not supported"),
    "fp8": (bool, "leave it out: fp8 is not supported"),
    "fp4": (bool, "leave it out: fp4 is not supported"),
    "tp_comm_overlap": (bool, "set it to False: it is Transformer Engine's, whose collectives add"),
    "batch_invariant_mode": (bool, "set it to False: it replaces torch's products by others"),
    "delay_wgrad_compute": (bool, "set it to False"),
    "defer_embedding_wgrad_compute": (bool, "set it to False"),
    "cpu_offloading": (bool, "set it to False"),
    "fused_residual_rmsnorm": (bool, "set it to False"),
    "qk_clip": (bool, "set it to False"),
    "qk_l2_norm": (bool, "set it to False"),
    "use_kitchen": (bool, "set it to False"),
    "use_te_op_fuser": (bool, "set it to False"),
    "inference_fuse_tp_communication": (bool, "set it to False"),
    "gtp_weight_remat_size": (lambda n: n > 1, "set it to 1"),
    "normalization": (lambda kind: kind not in ("LayerNorm", "RMSNorm"), "choose LayerNorm or RMSNorm"),
    "softmax_type": (lambda kind: kind != "vanilla", "choose vanilla"),
}


def check_config(config: Any) -> None:
    """Raises: ValueError: fields of this TransformerConfig would break the contract; it names all of them."""
    faults = []
    for name, (breaks, advice) in _FAULTS.items():
        value = getattr(config, name, None)
        if value is not None and breaks(value):
            faults.append(f"{name}={value!r}: {advice}")
    groups, degree = config.num_query_groups, config.tensor_model_parallel_size
    if groups and groups % degree:
        faults.append(
            f"num_query_groups={groups}: it must be divisible by tensor_model_parallel_size={degree}, since Megatron "
            "otherwise repeats heads of keys and values"
        )
    _raise(faults, "this configuration cannot have the same bits at every tensor-parallel degree")


def padded_vocab_size(vocab_size: int, multiple: int, degree: int) -> int:
    """The least multiple of `multiple` that is at least vocab_size: a size that does not depend on the degree.

    Megatron pads to a multiple of `multiple` times the degree, and so has another softmax at each degree.

    Raises:
        ValueError: the degree does not divide `multiple`.
    """
    if multiple % degree:
        raise ValueError(
            f"make_vocab_size_divisible_by={multiple} must be divisible by tensor_model_parallel_size={degree}: give a "
            "multiple of every degree that you want"
        )
    return -(-vocab_size // multiple) * multiple


def check_model(model: nn.Module) -> None:
    """Raises: ValueError: modules of Megatron or Transformer Engine that add over ranks; it names all of them."""
    faults = []
    for name, module in model.named_modules():
        kind = type(module)
        own = any(True for _ in module.parameters(recurse=False))
        theirs = own and kind.__module__.startswith(("megatron.", "transformer_engine.", "apex."))
        plain = isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm))
        if kind.__name__.endswith("DotProductAttention") or (
            (plain or theirs) and not isinstance(module, ShardedModule)
        ):
            faults.append(f"{name} is a {kind.__module__}.{kind.__name__}")
    _raise(faults, "these modules have other bits at each degree: build them by the specs of this package")


def _raise(faults: list[str], what: str) -> None:
    if faults:
        raise ValueError(f"{what}:\n" + "\n".join(f"  {n}. {fault}" for n, fault in enumerate(faults, 1)))
