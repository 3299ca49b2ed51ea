"""Which modules a Megatron layer is built of.

python pretrain_gpt.py --spec tp_invariant.integrations.megatron gpt_layer_spec ...
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from .modules import (
    ColumnParallelLinear,
    CoreAttention,
    GatedActivation,
    LayerNormColumnParallelLinear,
    Norm,
    QKNorm,
    RowParallelLinear,
)
from .versions import HAS_HYBRID


class SpecProvider(BackendSpecProvider):
    """Megatron's question which module has which part, answered with the modules of this package."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """config.normalization determines which norm it is, whatever rms_norm says."""
        return QKNorm if for_qk else Norm

    def core_attention(self) -> type:
        return CoreAttention

    def activation_func(self) -> type:
        return GatedActivation

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False) -> Any:
        """Raises: NotImplementedError: mixtures of experts."""
        raise NotImplementedError(
            "config.num_moe_experts: mixtures of experts are not supported by tp_invariant.integrations.megatron. Use "
            "tp_invariant.MixtureOfExperts in a model of your own, or train a dense model (num_moe_experts=None)"
        )


def _mlp() -> Any:
    submodules = MLPSubmodules(
        linear_fc1=LayerNormColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=GatedActivation
    )
    if HAS_HYBRID:
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def _attention(qk_layernorm: bool) -> ModuleSpec:
    norm = QKNorm if qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=LayerNormColumnParallelLinear, core_attention=CoreAttention, linear_proj=RowParallelLinear,
        q_layernorm=norm, k_layernorm=norm,
    )  # fmt: skip
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def gpt_layer_spec(config: Any = None, *, qk_layernorm: bool | None = None) -> ModuleSpec:
    """A layer of a dense GPT model: its norms are parts of the linear layers after them.

    Args:
        config: a TransformerConfig, for its qk_layernorm.
        qk_layernorm: norms of queries and keys by heads; None: as config says, without config none.

    Raises:
        NotImplementedError: config has experts or multi-latent attention.
    """
    for name in ("num_moe_experts", "multi_latent_attention"):
        if getattr(config, name, None):
            raise NotImplementedError(
                f"config.{name}={getattr(config, name)!r} is not supported by tp_invariant.integrations.megatron: "
                "leave it out"
            )
    if qk_layernorm is None:
        qk_layernorm = bool(getattr(config, "qk_layernorm", False))
    submodules = TransformerLayerSubmodules(
        self_attention=_attention(qk_layernorm), self_attn_bda=get_bias_dropout_add, mlp=_mlp(),
        mlp_bda=get_bias_dropout_add,
    )  # fmt: skip
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def gpt_block_spec(
    config: Any, use_transformer_engine: bool = False, *_: Any, vp_stage: int | None = None, **__: Any
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the norm after the last, with the arguments of Megatron's function.

    A layer spec alone leaves that norm to Megatron, whose norms do not take sequence parallelism without Apex or
    Transformer Engine.
    """
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[gpt_layer_spec(config)] * layers, layer_norm=Norm)


def hybrid_stack_spec() -> ModuleSpec:
    """HybridModel's stack of attention ("*") and MLP ("-") layers. Other kinds of layers are not supported.

    Raises:
        NotImplementedError: megatron-core 0.16, which has no HybridModel.
    """
    if not HAS_HYBRID:
        raise NotImplementedError("HybridModel needs megatron-core 0.19: with 0.16 use GPTModel")
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    attention = TransformerLayerSubmodules(
        self_attention=_attention(qk_layernorm=False), self_attn_bda=get_bias_dropout_add
    )
    mlp = TransformerLayerSubmodules(mlp=_mlp(), mlp_bda=get_bias_dropout_add)
    submodules = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    return ModuleSpec(module=HybridStack, submodules=submodules)
