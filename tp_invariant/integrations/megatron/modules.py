"""This library's layers with Megatron's constructors.

Legend: s tokens of a sequence, b sequences, h hidden size, P ranks. Activations are [s, b, h]; under sequence
parallelism [s/P, b, h] outside of the parallel regions. Every argument of Megatron's constructors (of the versions in
versions.py) is taken, or refused by name if it asks for something else than its default.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from ...comm.collectives import resolve_group
from ...functional import cross_entropy
from ...functional.attention import attention
from ...functional.gated import Activation, gated_activation
from ...kernels.elementwise import in_whole_vectors
from ...layers.layernorm_linear import LayerNormLinear
from ...layers.linear import Linear
from ...layers.parallel_norm import ParallelNorm
from ...layers.vocab_embedding import VocabParallelEmbedding as _Embedding
from ..transformer_engine import accept_no_extra_state

# {an activation of Megatron's configuration: its name in this library, for gated layers}
GATED: dict[Any, Activation] = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
_CAUSAL = {"causal", "padding_causal", "causal_bottom_right"}  # names of AttnMaskType


def _group(tp_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Megatron's rule: the group that is given, else that of parallel_state."""
    return parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group


def _refuse(module: str, **asked: Any) -> None:
    """Raises: ValueError: one of these arguments is neither None nor False."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{module}: {name}={value!r} is not supported by tp_invariant.integrations.megatron: leave it out"
            )


def _device(config: Any) -> torch.device:
    """Where Megatron puts parameters."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


def _initialiser(config: Any, init_method: Callable[[Tensor], Any] | None) -> Callable[[Tensor], Any]:
    """What fills a full weight: with the values that Megatron's layers draw on a CPU from the same seed.

    On a GPU Megatron draws each rank's part from a generator that is seeded by the rank. Here each rank draws the whole
    from the default generator, which Megatron seeds alike on the ranks of a tensor-parallel group.
    """
    if not config.perform_initialization or init_method is None:
        return lambda full: None

    def fill(full: Tensor) -> None:
        if full.dtype == torch.float32 or full.device.type != "cpu":
            init_method(full)
        else:
            wide = torch.empty(full.shape, dtype=torch.float32)
            init_method(wide)
            full.copy_(wide)

    return fill


class _ParallelLinear(Linear):
    """What ColumnParallelLinear, RowParallelLinear and the fused norm have in common."""

    config: Any
    _AXES: ClassVar[dict[str, int]]  # {parameter: the dim that is sharded}

    def _take(self, config: Any, tp_group: dist.ProcessGroup, skip_bias_add: bool) -> None:
        """Sets Megatron's attributes of the module and of its parameters."""
        self.config, self.tp_group = config, tp_group
        self.input_size, self.output_size = self.in_features, self.out_features
        self.skip_bias_add = skip_bias_add
        self.is_expert, self.expert_parallel, self.explicit_expert_comm = False, False, False
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        for parameter in self.parameters(recurse=False):
            parameter.allreduce = True  # type: ignore[attr-defined]  # over data-parallel ranks
        self.register_load_state_dict_pre_hook(accept_no_extra_state)

    def get_extra_state(self) -> None:
        """Transformer Engine's layers have one, so checkpoints have a place for it."""

    def set_extra_state(self, state: Any) -> None:
        """Is not used."""

    def backward_dw(self) -> None:
        """Weight gradients are complete when backward returns (config.delay_wgrad_compute is refused)."""

    def reset_parameters(self) -> None:
        """Linear's, with a bias of zeros, as in Megatron."""
        bias, self.bias = self.bias, None  # type: ignore[assignment]
        try:
            super().reset_parameters()
        finally:
            self.bias = bias
        if bias is not None:
            nn.init.zeros_(bias)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """x -> (y, bias); the bias is None unless skip_bias_add leaves it to the caller, and has y's shape."""
        y = super().forward(input)
        return y if isinstance(y, tuple) else (y, None)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron's description of each tensor: which part of which whole tensor it is."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, self._AXES, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=_data_group(metadata),
        )  # fmt: skip


def _data_group(metadata: Any) -> dist.ProcessGroup:
    known = (metadata or {}).get("dp_cp_group")
    return parallel_state.get_data_parallel_group(with_context_parallel=True) if known is None else known


def _column_options(config: Any, tp_group: dist.ProcessGroup, init_method: Any, stride: int) -> dict[str, Any]:
    return dict(
        parallel_mode="column", tp_group=tp_group, sequence_parallel=config.sequence_parallel, sequence_dim=0,
        partition_stride=stride, init_method=_initialiser(config, init_method),
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion, dtype=config.params_dtype,
    )  # fmt: skip


class ColumnParallelLinear(_ParallelLinear):
    """Megatron's ColumnParallelLinear: [s, b, K] (SP: [s/P, b, K]) -> ([s, b, N/P], bias or None).

    Taken: gather_output, stride (partition_stride), skip_bias_add, skip_weight_param_allocation and forward's `weight`
    for tied outputs, runtime_gather_output, tp_group, and config's sequence_parallel, params_dtype,
    gradient_accumulation_fusion, use_cpu_initialization and perform_initialization. tp_comm_buffer_name and name have
    no effect, as in Megatron's own class.

    Raises:
        ValueError: is_expert, disable_grad_reduce, keep_master_weight_for_test or a buffer for deferred gradients of
            the embedding; sizes that the degree does not divide.
    """

    _AXES: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        _refuse(
            "ColumnParallelLinear", keep_master_weight_for_test=keep_master_weight_for_test, is_expert=is_expert,
            embedding_activation_buffer=embedding_activation_buffer, grad_output_buffer=grad_output_buffer,
            disable_grad_reduce=disable_grad_reduce,
        )  # fmt: skip
        group = _group(tp_group)
        super().__init__(
            input_size, output_size, bias, gather_output=gather_output, return_bias=skip_bias_add,
            device="meta" if skip_weight_param_allocation else _device(config),
            **_column_options(config, group, init_method, stride),
        )  # fmt: skip
        if skip_weight_param_allocation:
            self.weight = None  # type: ignore[assignment]
            if bias:
                self.bias = nn.Parameter(torch.zeros_like(self.bias, device=_device(config)))
        self.output_size_per_partition = output_size // self.group.size
        self._take(config, group, skip_bias_add)

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """input_ -> (y, bias), by `weight` [N/P, K] if it is given: that of the embedding, of tied outputs.

        Raises:
            RuntimeError: no weight, or one of another shape.
        """
        own, gathers = self._parameters["weight"], self.gather_output
        if weight is None and own is None:
            raise RuntimeError("ColumnParallelLinear has skip_weight_param_allocation=True: call it with weight=..")
        if weight is not None and tuple(weight.shape) != (self.output_size_per_partition, self.input_size):
            raise RuntimeError(
                f"weight has shape {tuple(weight.shape)} on rank {self.group.rank}: it must be "
                f"{(self.output_size_per_partition, self.input_size)}"
            )
        if weight is not None:
            self._parameters["weight"] = weight  # type: ignore[assignment]
        if runtime_gather_output is not None:
            self.gather_output = runtime_gather_output
        try:
            return super().forward(input_)
        finally:
            self._parameters["weight"], self.gather_output = own, gathers


class RowParallelLinear(_ParallelLinear):
    """Megatron's RowParallelLinear: [s, b, K/P] -> ([s, b, N] (SP: [s/P, b, N]), bias or None).

    Taken: input_is_parallel, skip_bias_add, stride, tp_group, and config as for ColumnParallelLinear.

    Raises:
        ValueError: is_expert or keep_master_weight_for_test; sizes that the degree does not divide.
        RuntimeError: sequence parallelism of an input that is not parallel, as in Megatron.
    """

    _AXES: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        _refuse(
            "RowParallelLinear", keep_master_weight_for_test=keep_master_weight_for_test, is_expert=is_expert
        )  # fmt: skip
        if config.sequence_parallel and not input_is_parallel:
            raise RuntimeError("RowParallelLinear: config.sequence_parallel=True needs input_is_parallel=True")
        group = _group(tp_group)
        options = _column_options(config, group, init_method, stride) | {"parallel_mode": "row"}
        super().__init__(
            input_size, output_size, bias, input_is_parallel=input_is_parallel, return_bias=skip_bias_add,
            device=_device(config), **options,
        )  # fmt: skip
        self.input_size_per_partition = input_size // self.group.size
        self._take(config, group, skip_bias_add)


class LayerNormColumnParallelLinear(_ParallelLinear, LayerNormLinear):
    """The norm of config and a ColumnParallelLinear, in one module: Transformer Engine's in Megatron.

    Its parameters are weight, bias, layer_norm_weight and layer_norm_bias, the keys of Megatron's checkpoints.

    Raises:
        ValueError: gather_output, is_expert or skip_weight_param_allocation, as in Megatron's own class.
    """

    _AXES: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        _refuse(
            "LayerNormColumnParallelLinear", gather_output=gather_output, is_expert=is_expert,
            skip_weight_param_allocation=skip_weight_param_allocation,
        )  # fmt: skip
        group = _group(tp_group)
        super().__init__(
            input_size, output_size, config.layernorm_epsilon, bias, normalization=config.normalization,
            zero_centered_gamma=config.layernorm_zero_centered_gamma, return_bias=skip_bias_add,
            device=_device(config), **_column_options(config, group, init_method, stride),
        )  # fmt: skip
        self.output_size_per_partition = output_size // self.group.size
        self._take(config, group, skip_bias_add)


class VocabParallelEmbedding(_Embedding):
    """Megatron's VocabParallelEmbedding: ids [b, s] -> [b, s, h], or [s/P, b, h] with reduce_scatter_embeddings.

    The rows are looked up as [s, b], so that the transposition which Megatron's model makes of the result moves
    nothing, and a row's gradient is summed in the same order with and without sequence parallelism.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any],
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        group = _group(tp_group)
        super().__init__(
            num_embeddings, embedding_dim, tp_group=group, sequence_parallel=reduce_scatter_embeddings, sequence_dim=0,
            init_method=_initialiser(config, init_method), device=_device(config), dtype=config.params_dtype,
        )  # fmt: skip
        self.config, self.tp_group, self.reduce_scatter_embeddings = config, group, reduce_scatter_embeddings
        self.num_embeddings_per_partition = num_embeddings // self.group.size
        self.vocab_start_index = self.group.rank * self.num_embeddings_per_partition
        self.vocab_end_index = self.vocab_start_index + self.num_embeddings_per_partition

    def forward(self, input_: Tensor) -> Tensor:
        """ids [b, s], int64 or int32, the same on every rank -> as the class says.

        Raises:
            ValueError: ids that are not [b, s].
        """
        if input_.dim() != 2:
            raise ValueError(f"ids have shape {tuple(input_.shape)} on rank {self.group.rank}: they must be [b, s]")
        rows = super().forward(input_.t().contiguous())
        return rows if self.reduce_scatter_embeddings else rows.transpose(0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron's description of the table, which is loaded also where it is padded to another size."""
        weight = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.weight, key=f"{prefix}weight", allow_shape_mismatch=True, prepend_offsets=sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=_data_group(metadata),
        )  # fmt: skip
        return {f"{prefix}weight": weight}


class Norm(ParallelNorm):
    """LayerNorm or RMSNorm as config says, of tokens: [s, b, h] (SP: [s/P, b, h]) -> the same.

    The gradients of its parameters are complete on every rank, so they do not have Megatron's mark `sequence_parallel`.

    Args:
        eps, hidden_size: as in Megatron.
        persist_layer_norm, has_residual: have no effect.
        zero_centered_gamma, normalization: of config, as in Megatron; another value than config's is refused.
    """

    _BY_HEADS = False

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str | None = None,
        has_residual: bool = False,
    ) -> None:
        if zero_centered_gamma and not config.layernorm_zero_centered_gamma:
            raise ValueError("Norm: zero_centered_gamma=True, but config.layernorm_zero_centered_gamma=False")
        if normalization is not None and normalization != config.normalization:
            raise ValueError(
                f"Norm: normalization={normalization!r}, but config.normalization={config.normalization!r}"
            )
        _refuse("Norm", fused_residual_rmsnorm=getattr(config, "fused_residual_rmsnorm", False))
        group = resolve_group(_group(None))
        heads = dict(heads=group.size, heads_dim=2) if self._BY_HEADS else {}
        super().__init__(
            hidden_size, eps, normalization=config.normalization, bias=config.normalization == "LayerNorm",
            zero_centered_gamma=config.layernorm_zero_centered_gamma, tp_group=group,
            sequence_parallel=config.sequence_parallel and not heads, sequence_dim=0,
            device=_device(config), dtype=config.params_dtype, **heads,
        )  # fmt: skip
        self.config = config


class QKNorm(Norm):
    """The same of each head: [s, b, heads/P, D] -> the same, for config.qk_layernorm.

    One class for queries and keys, whose numbers of heads differ: it takes as many as a call has.
    """

    _BY_HEADS = True

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        self.heads, self.heads_dim = x.shape[-2] * self.group.size, x.dim() - 2
        return super().forward(x, residual)


class CoreAttention(nn.Module):
    """Attention of this rank's heads: q [s, b, h/P, D], k and v [s, b, kv/P, D] -> [s, b, (h/P) D].

    Packed sequences (qkv_format "thd"): [t, h/P, D] -> [t, (h/P) D]; they leave attention_mask unused. Else
    attention_mask, where it is True, hides a key besides those that attn_mask_type hides; "no_mask" leaves it unused.

    Raises:
        ValueError: dropout, context parallelism, another softmax_type than "vanilla", or an attention_bias.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _refuse("CoreAttention", attention_dropout=dropout or None)
        _refuse("CoreAttention", context_parallel_size=config.context_parallel_size > 1 or None)
        softmax_type = getattr(config, "softmax_type", "vanilla")
        _refuse("CoreAttention", softmax_type=None if softmax_type == "vanilla" else softmax_type)
        self.config, self.layer_number = config, max(1, layer_number)
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.softmax_scale = softmax_scale
        self.window = _window(config, self.layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """As the class says."""
        _refuse("CoreAttention", attention_bias=attention_bias)
        kind = attn_mask_type or self.attn_mask_type
        causal = kind.name in _CAUSAL
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        options: dict[str, Any] = dict(causal=causal, scale=self.softmax_scale, window=self.window if causal else None)
        if packed:
            options |= _lengths(packed_seq_params, causal)
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        else:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            if attention_mask is not None and kind.name != "no_mask":
                options["mask"] = ~attention_mask
        y = attention(q, k, v, **options)
        return y.squeeze(0).transpose(0, 1).flatten(1) if packed else y.permute(2, 0, 1, 3).flatten(2)


def without_causal_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of a model with causal layers: None in place of an attention_mask that is the causal one.

    Megatron's loaders make one in each batch, and attention is faster without. Other masks stay, with the values of
    Megatron's local layers. It waits for the GPU, so a captured CUDA graph keeps every mask.

    Raises:
        ValueError: the mask does not hide a later token, or hides all tokens from one: causal layers would have other
            values than Megatron's local ones.
    """
    mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
    kinds = {m.attn_mask_type.name for m in model.modules() if isinstance(m, CoreAttention)}
    if mask is None or kwargs.get("packed_seq_params") is not None or not kinds <= _CAUSAL:
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    ids, keys = args[0] if args else kwargs.get("input_ids"), mask.shape[-1]
    queries = mask.shape[-2] if ids is None else ids.shape[-1]
    later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1 + keys - queries)
    facts = (later & ~mask).any(), mask.all(-1).any(), (mask & ~later).any()
    shows, all_hidden, hides_more = torch.stack(facts).tolist()
    if shows or all_hidden:
        what = "does not hide later tokens" if shows else "hides every token from one"
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} {what}, and attn_mask_type is causal: a mask is True where a token is "
            "hidden. Hide all later tokens and no token from itself, leave attention_mask out, or give "
            "attn_mask_type=AttnMaskType.arbitrary in the layer's spec"
        )
    if hides_more:
        return None
    if len(args) > 2:
        return (*args[:2], None, *args[3:]), kwargs
    return args, kwargs | {"attention_mask": None}


def _window(config: Any, layer_number: int) -> int | None:
    """How many keys a query of this layer sees, its own included; None: all."""
    size, skipped = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    if size is None:
        return None
    if isinstance(skipped, int) and layer_number % skipped == 0:
        return None
    if isinstance(skipped, list) and not skipped[layer_number - 1]:
        return None
    if size[1] not in (0, -1) or size[0] < 0:
        raise ValueError(f"config.window_size={size}: it must be (keys before, 0)")
    return int(size[0]) + 1


def _lengths(packed: Any, causal: bool) -> dict[str, Any]:
    """attention's options for packed sequences. Padding at the end of a sequence counts as its last tokens."""
    q, k = packed.cu_seqlens_q, packed.cu_seqlens_kv
    if packed.cu_seqlens_q_padded is not None:
        if not causal:
            raise ValueError("packed_seq_params.cu_seqlens_q_padded without a causal mask: pack without padding")
        q, k = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    longest = dict(max_seqlen_q=packed.max_seqlen_q, max_seqlen_k=packed.max_seqlen_kv)
    longest = {name: None if size is None else int(size) for name, size in longest.items()}
    return dict(cu_seqlens_q=q.to(torch.int32), cu_seqlens_k=k.to(torch.int32), **longest)


class GatedActivation(nn.Module):
    """The activation of config between an MLP's two layers: [.., H] -> [.., H], or gated [.., 2 H] -> [.., H].

    Raises:
        ValueError: gated, and another activation_func than silu, gelu or relu, or one with a clamp or an offset.
    """

    def __init__(self, *, config: Any) -> None:
        super().__init__()
        self.activation_func, self.gated = config.activation_func, config.gated_linear_unit
        if self.gated and self.activation_func not in GATED:
            known = ", ".join(name for name in GATED.values())
            raise ValueError(
                f"config.activation_func={self.activation_func!r} with gated_linear_unit=True is not supported: "
                f"choose one of torch.nn.functional's {known}"
            )
        for name in ("activation_func_clamp_value", "glu_linear_offset"):
            _refuse("GatedActivation", **{name: getattr(config, name, None) or None})

    def forward(self, input_: Tensor) -> Tensor:
        if self.gated:
            return gated_activation(input_, activation=GATED[self.activation_func])
        return in_whole_vectors(self.activation_func, input_)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Nothing: it has no parameters. Megatron 0.16's MLP asks every module of its own."""
        return {}


def with_activation_module(config: Any) -> Any:
    """A copy of config with which Megatron's MLP calls the activation among its submodules, fused ones or not."""
    config = copy.copy(config)
    config.use_te_activation_func, config.bias_activation_fusion = True, False
    return config


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Megatron's function: logits [s, b, V/P], target [s, b] -> the loss of each token [s, b], float32."""
    return cross_entropy.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, tp_group=_group(tp_group), label_smoothing=label_smoothing, reduction="none"
    )
