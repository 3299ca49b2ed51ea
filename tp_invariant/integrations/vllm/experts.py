"""Mixtures of experts in vLLM: the routers of known models, and experts without a sum over ranks.

Legend: P ranks, T tokens, k slots (the experts chosen for a token), R = T k rows, E experts, H hidden features, I inner
features. All ranks route all tokens and compute all rows, each its part of the features:

    w13_weight   [E, 2I/P, H]   this rank's columns of the first product, as vLLM has them
    w2_weight    [E, H/P, I]    rows of the down projection, where vLLM has columns [E, H, I/P]
    w13_bias, w2_bias           [E, 2I/P], [E, H/P]

    x [T, H] -> rows [R, H] -> [R, 2I/P] -> gate [R, I/P] -> gathered [R, I] -> [R, H/P] -> combined [T, H/P] -> [T, H]

A token's k rows are added in slot order in fp32 and rounded once, as in the trainer (functional/experts.py).

The weights of a token's experts come from a formula that transformers has in each model's router. vLLM's settings do
not say whether they are rounded to the model's dtype. So a model whose router is not in `ROUTERS` is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    GateLinear,
    MoEActivation,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
    runner,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.utils import set_weight_attrs

from ...comm.collectives import Group
from ...functional.experts import combine, dispatch, token_rows
from ...functional.gated import invariant_gated_halves
from ...functional.routing import top_k
from ...gemm.grouped import grouped_matmul
from .layers import Invariant, gathered, linear_layer

_ALONE = Group(None, 0, 1)  # each rank has all rows
Router = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]

# --- routers --------------------------------------------------------------------------------------------------------
# logits [T, E], k, whether to divide by the sum -> weights [T, k], index [T, k]
# torch's softmax and sum compute a row by itself, in an order of its length alone.


def _of_all(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    weights, index = top_k(F.softmax(logits, dim=-1, dtype=torch.float), k)
    return (weights / weights.sum(dim=-1, keepdim=True) if normalize else weights), index


def _of_all_rounded(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    weights, index = _of_all(logits, k, normalize)
    return weights.to(logits.dtype), index


def _of_chosen(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    values, index = top_k(logits, k)
    return F.softmax(values, dim=-1, dtype=values.dtype), index


ROUTERS: dict[str, Router] = {"gpt_oss": _of_chosen, "mixtral": _of_all, "qwen3_moe": _of_all_rounded}
# {vLLM's name: (this library's, whether gate and up alternate)}
_ACTIVATIONS = {MoEActivation.SILU: ("silu", False), MoEActivation.SWIGLUOAI: ("clamped_silu", True)}


# --- weights --------------------------------------------------------------------------------------------------------


class Method(Invariant, UnquantizedFusedMoEMethod):
    """The weights of this file's table. vLLM's own kernel is not made."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.rank, self.world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self, layer: RoutedExperts, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **attributes: Any,
    ) -> None:  # fmt: skip
        world, inner, inner_of_rank = self.world, self.moe.intermediate_size, intermediate_size_per_partition
        if hidden_size % world or inner != inner_of_rank * world:
            raise NotImplementedError(
                f"experts with hidden_size={hidden_size} and intermediate_size={inner}, of which a rank has "
                f"{inner_of_rank}, on {world} ranks: the tensor-parallel degree must divide both, and experts "
                "must not be divided over other ranks (expert and data parallelism)"
            )
        for name, outputs, inputs, own in (
            ("w13", 2 * inner_of_rank, hidden_size, {}),
            ("w2", hidden_size // world, inner, {"weight_loader": self.load_rows}),
        ):
            shapes = {"weight": (num_experts, outputs, inputs), "bias": (num_experts, outputs)}
            for kind in shapes if self.moe.has_bias else ("weight",):
                parameter = nn.Parameter(torch.empty(shapes[kind], dtype=params_dtype), requires_grad=False)
                set_weight_attrs(parameter, attributes | own)
                layer.register_parameter(f"{name}_{kind}", parameter)

    def load_rows(
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """param [E, H/P, ..] from one expert's whole [H, I], [I, H] as gpt-oss has it, or bias [H]."""
        whole = loaded_weight.t() if shard_id == "gpt_oss_w2" and loaded_weight.dim() == 2 else loaded_weight
        wanted = (param.shape[1] * self.world, *param.shape[2:])
        if tuple(whole.shape) != wanted:
            raise ValueError(f"{weight_name} of expert {expert_id} is {tuple(whole.shape)}: pass all of it, {wanted}")
        param.data[expert_id].copy_(whole.chunk(self.world, 0)[self.rank])
        return True if return_success else None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


# --- forward --------------------------------------------------------------------------------------------------------


class MoERunner(Invariant, runner.moe_runner.MoERunner):
    """Of vLLM's it has the names and the parts, and none of the steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = get_current_vllm_config().model_config.hf_text_config

    def faults(self) -> list[str]:
        """What is not supported, each a verb and its object."""
        experts, kind, router = self.routed_experts, self.config.model_type, self.router
        gate = [getattr(self.config, name, number) for name, number in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))]
        parts = (self.shared_experts, self.routed_input_transform, self.routed_output_transform)
        faults = {
            f"has the weights of {type(experts.quant_method).__name__}": type(experts.quant_method) is not Method,
            f"routes as {kind}, and not as one of {', '.join(ROUTERS)}": kind not in ROUTERS,
            f"routes by {type(router).__name__}": type(router) is not CPURouter,
            "routes by groups, by a correction or by a function": (
                experts.use_grouped_topk
                or experts.scoring_func != "softmax"
                or experts.custom_routing_function is not None
                or experts.e_score_correction_bias is not None
            ),
            f"computes {experts.activation.value}": experts.activation not in _ACTIVATIONS,
            f"computes swigluoai with the numbers {gate}": (
                experts.activation == MoEActivation.SWIGLUOAI and gate != [1.702, 7.0]
            ),
            "has shared experts or transforms": any(part is not None for part in parts),
            "scales its results": self.routed_scaling_factor != 1.0 or experts.routed_scaling_factor != 1.0,
            "weights the inputs of experts": experts.apply_router_weight_on_input,
            "leaves its sum over ranks to a later layer": self.moe_config.skip_final_all_reduce,
        }
        return [text for text, is_so in faults.items() if is_so]

    def forward(
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        experts: Any = self.routed_experts
        x, logits = hidden_states, router_logits if self.gate is None else self.gate(hidden_states)[0]
        weights, index = ROUTERS[self.config.model_type](logits, experts.top_k, experts.renormalize)
        dispatched = dispatch(index, experts.global_num_experts, _ALONE, None)

        def product(rows: Tensor, name: str) -> Tensor:
            weight, bias = getattr(experts, f"{name}_weight"), getattr(experts, f"{name}_bias", None)
            return grouped_matmul(None, rows, weight.mT, dispatched.offsets, bias=bias)

        inner = invariant_gated_halves(product(token_rows(x, dispatched), "w13"), *_ACTIVATIONS[experts.activation])
        world = experts.quant_method.world
        outer = product(gathered(inner) if world > 1 else inner, "w2")
        y = combine(outer, weights, dispatched)
        return gathered(y) if world > 1 else y


def register() -> None:
    """Registers this file's classes with vLLM under the names of those that they derive from; a second time nothing."""
    if MoERunner.__name__ in op_registry_oot:
        return
    PluggableLayer.register_oot(name=GateLinear.__name__)(linear_layer(GateLinear))
    PluggableLayer.register_oot(name=MoERunner.__name__)(MoERunner)
    CustomOp.register_oot(name=UnquantizedFusedMoEMethod.__name__)(Method)
    ModelRegistry.register_model("GptOssForCausalLM", f"{__package__}.gpt_oss:GptOssForCausalLM")
