"""vLLM's layers with this library's products: whole sums, in one order, and collectives that move bytes.

    column-parallel   y = x Wᵀ + b of this rank's rows of W, as vLLM has them
    row-parallel      each rank holds rows of W [N/P, K] and not columns: x's parts are gathered, y's columns too
    embedding         each rank's rows of the tokens, gathered; a token's own is taken, not added
    output layer      this rank's columns of the logits, which vLLM gathers

Row-parallel weights are made as rows from the start, with a weight_loader that takes rows of the whole weight: what is
loaded, and what is sent to the running engine later, arrives in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers import activation, layernorm, linear, logits_processor
from vllm.model_executor.layers import vocab_parallel_embedding as vocab
from vllm.model_executor.layers.rotary_embedding import base as rope
from vllm.model_executor.layers.rotary_embedding import linear_scaling_rope, llama3_rope, yarn_scaling_rope
from vllm.model_executor.utils import set_weight_attrs

from ...batch_invariant.context import batch_invariant
from ...batch_invariant.dispatch import unrouted
from ...functional.gated import gated_activation
from ...functional.rotary_embedding import rotary_embedding
from ...gemm.gemm_fn import gemm
from ...kernels.elementwise import in_whole_vectors
from ...kernels.select import select


class Invariant:
    """What all layers of this package are instances of."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [.., K], weight [N, K] -> [.., N]."""
    y = gemm(None, x.reshape(-1, x.shape[-1]), weight.t(), bias=bias, out_dtype=out_dtype)
    return y.view(*x.shape[:-1], -1)


def gathered(x: Tensor) -> Tensor:
    """[.., n] of each rank -> [.., n P] in rank order."""
    return tensor_model_parallel_all_gather(x.contiguous(), dim=-1)


# --- linear layers --------------------------------------------------------------------------------------------------


class _Product:
    """Weights stay as they are loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, layer.weight, bias)


class Method(_Product, linear.UnquantizedLinearMethod):
    pass


def _check_unquantized(layer: nn.Module, allowed: type) -> None:
    if type(layer.quant_method) is not allowed:
        raise NotImplementedError(
            f"{type(layer).__name__} with {type(layer.quant_method).__name__}: quantized weights are not supported by "
            "tp_invariant in vLLM; load the model in bfloat16, float16 or float32"
        )


def linear_layer(base: type) -> type:
    """A class like base, one of vLLM's linear layers, with this library's product."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]
        _check_unquantized(self, linear.UnquantizedLinearMethod)
        self.quant_method = Method()

    return type(base.__name__, (Invariant, base), {"__init__": __init__, "__module__": __name__})


class RowParallelLinear(Invariant, linear.RowParallelLinear):
    """With rows of the weight: [N/P, K]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        linear.RowParallelLinear.__init__(self, *args, **kwargs)
        _check_unquantized(self, linear.UnquantizedLinearMethod)
        self.quant_method = Method()
        if self.tp_size == 1:
            return
        if self.output_size % self.tp_size or not self.reduce_results:
            raise NotImplementedError(
                f"RowParallelLinear({self.input_size}, {self.output_size}) with reduce_results={self.reduce_results} "
                f"on {self.tp_size} ranks: the degree must divide the second size, and results must be whole (experts "
                "that add their parts later are not supported)"
            )
        rows = torch.empty(self.output_size // self.tp_size, self.input_size, dtype=self.params_dtype)
        self.weight = nn.Parameter(rows, requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": self.load_rows, "output_dim": 0})

    def load_rows(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """param [N/P, K] from the whole weight [N, K]."""
        if tuple(loaded_weight.shape) != (self.output_size, self.input_size):
            raise ValueError(
                f"a weight of shape {tuple(loaded_weight.shape)} for RowParallelLinear({self.input_size}, "
                f"{self.output_size}): pass the whole weight, {(self.output_size, self.input_size)}"
            )
        param.data.copy_(loaded_weight.chunk(self.tp_size, 0)[self.tp_rank])

    def forward(self, input_: Tensor) -> Any:
        bias = None if self.skip_bias_add else self.bias
        if self.tp_size > 1:
            x = gathered(input_) if self.input_is_parallel else input_
            own = None if bias is None else bias.chunk(self.tp_size)[self.tp_rank]
            y = gathered(product(x, self.weight, own))
        else:
            y = product(input_, self.weight, bias)
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y


# --- the vocabulary -------------------------------------------------------------------------------------------------


class EmbeddingMethod(_Product, vocab.UnquantizedEmbeddingMethod):
    """Of the embedding and the output layer."""


class _Vocabulary(Invariant):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_unquantized(self, vocab.UnquantizedEmbeddingMethod)  # type: ignore[arg-type]
        self.quant_method = EmbeddingMethod()


class VocabParallelEmbedding(_Vocabulary, vocab.VocabParallelEmbedding):
    def forward(self, input_: Tensor) -> Tensor:
        shard, ids = self.shard_indices, input_.long()
        if self.tp_size == 1:
            return self.quant_method.embedding(self, ids)
        width, first = shard.num_org_elements_padded, shard.org_vocab_start_index
        here = (ids >= first) & (ids < shard.org_vocab_end_index)
        own = self.quant_method.embedding(self, (ids - first).masked_fill(~here, 0))
        whole = gathered(own).unflatten(-1, (self.tp_size, -1))  # [.., P, H]
        owner = (ids // width).unsqueeze(-1).unsqueeze(-1).expand(*ids.shape, 1, own.shape[-1])
        return whole.gather(-2, owner).squeeze(-2)


class ParallelLMHead(_Vocabulary, vocab.ParallelLMHead):
    pass


class LogitsProcessor(Invariant, logits_processor.LogitsProcessor):
    """Logits of the model's dtype, or in fp32 without a rounding (vLLM's head_dtype), capped and scaled as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scale <= 0 or torch.frexp(torch.tensor(self.scale, dtype=torch.float64))[0] != 0.5:
            raise NotImplementedError(
                f"logits are multiplied by {self.scale}: only powers of two are supported, for which it is the same "
                "whether a trainer multiplies or divides"
            )

    def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        return product(hidden_states, lm_head.weight, embedding_bias, self.head_dtype)

    def forward(
        self, lm_head: nn.Module, hidden_states: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
    ) -> Tensor | None:
        logits: Tensor | None = hidden_states
        if not self.logits_as_input:
            logits = self._get_logits(hidden_states, lm_head, embedding_bias, skip_gather)
        if logits is not None and self.soft_cap is not None:
            logits = in_whole_vectors(torch.tanh, logits / self.soft_cap) * self.soft_cap
        return logits if logits is None or self.scale == 1.0 else logits * self.scale


# --- norms, activations, the rotary embedding -----------------------------------------------------------------------


class _Native(Invariant):
    """A CustomOp with one forward on all platforms."""

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        return self.invariant(*args, **kwargs)  # type: ignore[attr-defined]

    forward_cuda = forward_cpu = forward_oot = forward_native


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool, zero: bool
) -> Any:
    x = x if residual is None else residual + x
    y, _, _ = select("norm", x.device.type).norm_forward(x, weight, bias, eps=eps, rms=rms, zero_centered=zero)
    return y if residual is None else (y, x)


class RMSNorm(_Native, layernorm.RMSNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None:
            raise NotImplementedError(f"RMSNorm with var_hidden_size={self.variance_size_override} is not supported")

    def invariant(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return _normed(x, residual, self.weight.data, None, self.variance_epsilon, rms=True, zero=False)


class GemmaRMSNorm(_Native, layernorm.GemmaRMSNorm):
    def invariant(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return _normed(x, residual, self.weight.data, None, self.variance_epsilon, rms=True, zero=True)


class LayerNorm(_Native, layernorm.LayerNorm):
    def invariant(self, x: Tensor) -> Tensor:
        weight = torch.ones(self.normalized_shape, dtype=x.dtype) if self.weight is None else self.weight.data
        return _normed(x, None, weight, self.bias, self.eps, rms=False, zero=False)


class SiluAndMul(_Native, activation.SiluAndMul):
    def invariant(self, x: Tensor) -> Tensor:
        return gated_activation(x, activation="silu")


class GeluAndMul(_Native, activation.GeluAndMul):
    def invariant(self, x: Tensor) -> Tensor:
        return gated_activation(x, activation="gelu_tanh" if self.approximate == "tanh" else "gelu")


class _Rotary(_Native):
    """Frequencies by torch's functions, cos and sin on whole vectors, and the rotation, as in the trainer."""

    def _compute_inv_freq(self, base: float) -> Tensor:
        parent: Any = super()
        return unrouted(parent._compute_inv_freq, base)

    def _compute_cos_sin_cache(self) -> Tensor:
        base: Any = super()
        with batch_invariant():
            return base._compute_cos_sin_cache()

    def invariant(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        cache = self._match_cos_sin_cache_dtype(query).index_select(0, positions.flatten())
        double = torch.cat if self.is_neox_style else (lambda pair, dim: torch.stack(pair, dim).flatten(-2))
        cos, sin = (double((half, half), -1).unsqueeze(0) for half in cache.chunk(2, -1))
        of_key = query if key is None else key
        q, k = (x.view(1, cache.shape[0], -1, self.head_size) for x in (query, of_key))
        q, k = rotary_embedding(q, k, cos, sin, unsqueeze_dim=2, interleaved=not self.is_neox_style)
        return q.reshape(query.shape), None if key is None else k.reshape(key.shape)


_LINEAR = (
    linear.ReplicatedLinear, linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.QKVParallelLinear,
)  # fmt: skip
_ROTARY = (
    rope.RotaryEmbedding, llama3_rope.Llama3RotaryEmbedding, linear_scaling_rope.LinearScalingRotaryEmbedding,
    yarn_scaling_rope.YaRNScalingRotaryEmbedding,
)  # fmt: skip
_LAYERS = (RowParallelLinear, VocabParallelEmbedding, ParallelLMHead, LogitsProcessor)
_OPS = (RMSNorm, GemmaRMSNorm, LayerNorm, SiluAndMul, GeluAndMul)


def register() -> None:
    """Registers this file's classes with vLLM under the names of those that they derive from; a second time nothing."""
    if "RowParallelLinear" in op_registry_oot:
        return
    for layer in (*map(linear_layer, _LINEAR), *_LAYERS):
        PluggableLayer.register_oot(name=layer.__name__)(layer)
    rotary = (type(cls.__name__, (_Rotary, cls), {"__module__": __name__}) for cls in _ROTARY)
    for op in (*_OPS, *rotary):
        CustomOp.register_oot(name=op.__name__)(op)
