"""Megatron's steps between backward and the optimizer, where they depend on the degree or add what is complete.

finalize_model_grads    sums over tensor-parallel ranks the gradients of parameters that are *named* q_layernorm or
                        k_layernorm, where qk_layernorm is set. Those of this package's norms are complete already.
                        Over more than two data-parallel ranks it is refused
gradient norm           Megatron adds each rank's sum of squares. Here it is tp_invariant.clip_grad_norm_'s
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ...core.mode import is_tp_invariant_mode_enabled
from ...layers.grad_norm import clip_grad_norm_
from ...layers.parameters import carried_group
from .modules import QKNorm


def without_complete_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's reduction over tensor-parallel ranks, without the gradients of QKNorm."""

    def reduce(model: list[Any], config: Any, tp_group: Any = None) -> None:
        replicas = parallel_state.get_data_parallel_world_size()
        if replicas > 2 and is_tp_invariant_mode_enabled():
            raise NotImplementedError(
                f"{replicas} data-parallel ranks: Megatron's DistributedDataParallel adds their gradients in an order "
                "that depends on where a parameter lies in its buffers, so on the tensor-parallel degree. At most 2 "
                "are supported: accumulate micro-batches, or sum gradients by tp_invariant.data_parallel"
            )
        ours = {id(p) for chunk in model for m in chunk.modules() if isinstance(m, QKNorm) for p in m.parameters()}
        named = [p for chunk in model for name, p in chunk.named_parameters() if _is_named(name)]
        if ours and config.qk_layernorm:
            if others := [p for p in named if id(p) not in ours]:
                raise ValueError(
                    f"{len(others)} parameters of norms of queries or keys are not of tp_invariant's QKNorm, and "
                    f"{len(ours)} are: finalize_model_grads cannot sum the gradients of some. Use QKNorm for all"
                )
            config = copy.copy(config)
            config.qk_layernorm = False
        original(model, config, tp_group)

    return reduce


def _is_named(name: str) -> bool:
    return "q_layernorm" in name or "k_layernorm" in name


def norm_of(optimizers: list[Any]) -> float:
    """The gradient norm over the model of these Megatron optimizers, on every rank, also of other pipeline stages.

    Raises:
        NotImplementedError: a distributed optimizer over several data-parallel ranks, or decoupled gradients.
    """
    held: list[Tensor] = []
    for optimizer in optimizers:
        held += _gradients_of(optimizer)
    stages = parallel_state.get_pipeline_model_parallel_group()
    return float(clip_grad_norm_(held, math.inf, pp_group=stages if stages.size() > 1 else None))


def _gradients_of(optimizer: Any) -> list[Tensor]:
    """Stand-ins of the optimizer's parameters: empty views of them with the gradient and the model's attributes."""
    if type(optimizer).__name__ == "DistributedOptimizer":
        raise NotImplementedError(
            "use_distributed_optimizer=True: its buffers cut parameters anywhere, so their gradients have no norm that "
            "is independent of the degrees. Use tp_invariant.optim or use_distributed_optimizer=False"
        )
    pairs = _pairs_of(optimizer)
    stand_ins = []
    for model, main in pairs:
        grad = main.grad
        stand_in = torch.empty_like(main, requires_grad=False) if grad is None else main.detach()
        stand_in.grad = grad
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes", "shared"):
            if hasattr(model, name):
                setattr(stand_in, name, getattr(model, name))
        stand_in.tp_group = carried_group(model)  # type: ignore[attr-defined]
        stand_ins.append(stand_in)
    return stand_ins


def _pairs_of(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """(the model's parameter, that of the inner optimizer with the gradient in float32) in the model's order."""
    if hasattr(optimizer, "float16_groups"):
        groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        copies = {id(main): model for models, mains in groups for model, main in zip(models, mains, strict=True)}
    else:
        copies = {}
    return [(copies.get(id(p), p), p) for p in optimizer.get_parameters()]


def invariant_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """MegatronOptimizer.get_grad_norm, and with the mode on the norm that does not depend on the degree."""

    def get_grad_norm(self: Any) -> Any:
        return norm_of([self]) if is_tp_invariant_mode_enabled() else original(self)

    return get_grad_norm


def invariant_grad_norm_of_chain(original: Callable[..., Any]) -> Callable[..., Any]:
    """ChainedOptimizer.get_grad_norm likewise, of all its optimizers together."""

    def get_grad_norm(self: Any) -> Any:
        return norm_of(self.chained_optimizers) if is_tp_invariant_mode_enabled() else original(self)

    return get_grad_norm


def invariant_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    """MegatronOptimizer.clip_grad_norm likewise: gradients times max_norm / (norm + 1e-6) where that is below 1."""

    def clip_grad_norm(self: Any, clip_grad: float) -> Any:
        if not is_tp_invariant_mode_enabled():
            return original(self, clip_grad)
        norm = norm_of([self])
        if clip_grad > 0.0:
            scale_by_norm([self], clip_grad, norm)
        return norm

    return clip_grad_norm


def scale_by_norm(optimizers: list[Any], clip_grad: float, norm: float) -> None:
    """Scales the optimizers' gradients in place: what Megatron's own function does, in torch."""
    coefficient = clip_grad / (norm + 1.0e-6)
    if coefficient >= 1.0:
        return
    for optimizer in optimizers:
        for p in optimizer.get_parameters():
            if p.grad is not None:
                p.grad.mul_(coefficient)
