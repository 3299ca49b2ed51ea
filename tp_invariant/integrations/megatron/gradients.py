"""Megatron's steps between backward and the optimizer, where they depend on the degree or add what is complete.

finalize_model_grads    sums over tensor-parallel ranks the gradients of parameters that are *named* q_layernorm or
                        k_layernorm, where qk_layernorm is set. Those of this package's norms are complete already.
                        Over more than two data-parallel ranks it is refused
gradient norm           Megatron adds each rank's sum of squares. Here it is tp_invariant.clip_grad_norm_'s. For a
                        DistributedOptimizer the data-parallel ranks first gather the gradients that they have reduced,
                        into the buffers in which they lie
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
        NotImplementedError: a precision-aware optimizer; loss scaling of gradients that are not summed in float32.
    """
    distributed = [optimizer for optimizer in optimizers if type(optimizer).__name__ == "DistributedOptimizer"]
    held = [x for optimizer in optimizers if optimizer not in distributed for x in _gradients_of(optimizer)]
    held += _gathered_gradients(distributed)
    stages = parallel_state.get_pipeline_model_parallel_group()
    return float(clip_grad_norm_(held, math.inf, pp_group=stages if stages.size() > 1 else None))


def _gathered_gradients(optimizers: list[Any]) -> list[Tensor]:
    """`_gradients_of` of DistributedOptimizers: whole gradients, though each data-parallel rank updates a part.

    After Megatron's reduce-scatter a rank has the sums of its own part of each bucket, and the rest of it is not
    used again. Here the other ranks' sums come into the rest.
    """
    buffers = {id(buffer): buffer for optimizer in optimizers for buffer in optimizer.buffers}.values()
    for optimizer in optimizers:
        if getattr(optimizer.config, "use_precision_aware_optimizer", False):
            raise NotImplementedError("use_precision_aware_optimizer=True is not supported: set it to False")
        if optimizer.grad_scaler is not None and any(buffer.grad_dtype != torch.float32 for buffer in buffers):
            raise NotImplementedError(
                "loss scaling with a distributed optimizer needs gradients that are summed in float32: set "
                "grad_reduce_in_fp32=True (--accumulate-allreduce-grads-in-fp32)"
            )
    for buffer in buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets if group.size() > 1 else ():
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    held = [(p, p.main_grad.detach()) for buffer in buffers for p in buffer.params]
    for p, stand_in in held:
        stand_in.grad = p.main_grad
        _take_attributes(stand_in, p)
    return [stand_in for _, stand_in in held]


def _gradients_of(optimizer: Any) -> list[Tensor]:
    """Views of the optimizer's parameters with the gradient that it uses and the model's attributes."""
    of_model: dict[Tensor, Tensor] = {}  # {a copy in float32: the model's parameter}
    if hasattr(optimizer, "float16_groups"):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            of_model |= zip(mains, models, strict=True)
    stand_ins = []
    for main in optimizer.get_parameters():
        model, stand_in = of_model.get(main, main), main.detach()
        stand_in.grad = main.grad
        _take_attributes(stand_in, model)
        stand_ins.append(stand_in)
    return stand_ins


def _take_attributes(stand_in: Any, model: Tensor) -> None:
    """Says of a view how the model's parameter is sharded."""
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes", "shared"):
        if hasattr(model, name):
            setattr(stand_in, name, getattr(model, name))
    stand_in.tp_group = carried_group(model)


def invariant_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """get_grad_norm of an optimizer or a chain of them, and with the mode on a norm that depends on no degree."""

    def get_grad_norm(self: Any) -> Any:
        if not is_tp_invariant_mode_enabled():
            return original(self)
        return norm_of(getattr(self, "chained_optimizers", [self]))

    return get_grad_norm


def invariant_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    """MegatronOptimizer.clip_grad_norm likewise: gradients times max_norm / (norm + 1e-6) where that is below 1."""

    def clip_grad_norm(self: Any, clip_grad: float) -> Any:
        if not is_tp_invariant_mode_enabled():
            return original(self, clip_grad)
        norm = norm_of([self])
        if clip_grad > 0.0 and (coefficient := clip_grad / (norm + 1.0e-6)) < 1.0:
            for p in self.get_parameters():
                if p.grad is not None:
                    p.grad.mul_(coefficient)
        return norm

    return clip_grad_norm
