"""Megatron's steps between backward and the optimizer, where they depend on the degree or add what is complete.

finalize_model_grads    sums over tensor-parallel ranks the gradients of parameters that are *named* q_layernorm or
                        k_layernorm, where qk_layernorm is set. Those of this package's norms are complete already.
start_grad_sync         more than two data-parallel ranks: a collective's order of addition depends on where a parameter
                        lies in a buffer, so on the degree. Here it is tp_invariant.data_parallel's fixed order
gradient norm           Megatron adds each rank's sum of squares. Here it is tp_invariant.clip_grad_norm_'s. The
                        distributed optimizer cuts parameters anywhere, so gradients are made whole before
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from ...comm.collectives import resolve_group, start_all_gather
from ...core.mode import is_tp_invariant_mode_enabled
from ...data_parallel.fixed_order import sum_over_ranks
from ...layers.grad_norm import clip_grad_norm_
from ...layers.parameters import carried_group
from .modules import QKNorm


def without_complete_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's reduction over tensor-parallel ranks, without the gradients of QKNorm."""

    def reduce(model: list[Any], config: Any, tp_group: Any = None) -> None:
        replicas = parallel_state.get_data_parallel_world_size()
        others = [type(chunk).__name__ for chunk in model if not isinstance(chunk, DistributedDataParallel)]
        if replicas > 2 and others and is_tp_invariant_mode_enabled():
            raise NotImplementedError(
                f"{replicas} data-parallel ranks of a {others[0]}: the order in which it adds gradients may depend "
                "on the tensor-parallel degree. Use Megatron's DistributedDataParallel, or at most 2 ranks"
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


def in_a_fixed_order(original: Callable[..., None]) -> Callable[..., None]:
    """start_grad_sync of Megatron's buckets, and with the mode on a sum of more than two ranks in a fixed order.

    Sums of two need none. Megatron's own function does what it does besides (checks, waits, scaling) over a group of
    this rank alone.
    """

    def start_grad_sync(self: Any, *args: Any, **options: Any) -> None:
        config = self.ddp_config
        name = "data_parallel_group"
        if config.use_distributed_optimizer:
            name = "intra_distributed_optimizer_instance_group"
        replicas = getattr(self, name)
        many = replicas.size() * config.num_distributed_optimizer_instances
        if many <= 2 or not is_tp_invariant_mode_enabled():
            return original(self, *args, **options)
        faults = [
            f"{field}={value}: set it to {wanted}"
            for field, wanted in (
                ("overlap_grad_reduce", False), ("average_in_collective", False),
                ("num_distributed_optimizer_instances", 1),
            )
            if (value := getattr(config, field)) != wanted
        ]  # fmt: skip
        if faults:
            raise NotImplementedError(
                f"{many} data-parallel ranks: gradients are added in a fixed order, with which " + "; ".join(faults)
            )
        try:
            setattr(self, name, parallel_state.get_context_parallel_group())
            original(self, True)  # of whole buckets
        finally:
            setattr(self, name, replicas)
        for bucket in self.buckets:
            bucket.grad_data.copy_(sum_over_ranks(bucket.grad_data, resolve_group(replicas)))

    return start_grad_sync


def with_order_of_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """DistributedOptimizer's constructor, which remembers the parameters in the order of other optimizers."""

    def construct(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        self.parameters_in_order = [p for group in groups for p in group["params"]]
        original(self, optimizer, *args, **kwargs)

    return construct


def norm_of(optimizers: list[Any]) -> float:
    """The gradient norm over the model of these Megatron optimizers, on every rank, also of other pipeline stages.

    Raises:
        NotImplementedError: options of a distributed optimizer.
        RuntimeError: a distributed optimizer that was constructed before install().
    """
    held = [stand_in for optimizer in optimizers for stand_in in _gradients_of(optimizer)]
    stages = parallel_state.get_pipeline_model_parallel_group()
    return float(clip_grad_norm_(held, math.inf, pp_group=stages if stages.size() > 1 else None))


def _gradients_of(optimizer: Any) -> list[Tensor]:
    """Views of the optimizer's parameters with the gradient that it uses and the model's attributes."""
    if hasattr(optimizer, "data_parallel_group_idx"):  # a DistributedOptimizer
        return _whole_gradients_of(optimizer)
    of_model: dict[Tensor, Tensor] = {}  # {a copy in float32: the model's parameter}
    if hasattr(optimizer, "float16_groups"):
        for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            of_model |= zip(mains, models, strict=True)
    mains = optimizer.get_parameters()
    return [_stand_in(main.detach(), main.grad, of_model.get(main, main)) for main in mains]


def _whole_gradients_of(optimizer: Any) -> list[Tensor]:
    """The same of a distributed optimizer: each rank's part of Megatron's buffers is gathered into the buffers."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if not hasattr(optimizer, "parameters_in_order"):
        raise RuntimeError(
            "this DistributedOptimizer was constructed before tp_invariant.integrations.megatron.install(), so the "
            "order of its parameters is unknown: call install() first"
        )
    faults = {
        "use_precision_aware_optimizer=True": optimizer.config.use_precision_aware_optimizer,
        "use_megatron_fsdp=True": optimizer.ddp_config.use_megatron_fsdp,
        "loss scaling of gradients that are not summed in float32 (set grad_reduce_in_fp32=True, "
        "--accumulate-allreduce-grads-in-fp32)": optimizer.grad_scaler is not None
        and any(buffer.grad_dtype != torch.float32 for buffer in optimizer.buffers),
    }
    if refused := [text for text, is_so in faults.items() if is_so]:
        raise NotImplementedError(f"a distributed optimizer with {', '.join(refused)} is not supported: leave that out")
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    group = resolve_group(optimizer.data_parallel_group)
    for bucket in buckets if group.size == 2 else ():  # more ranks have whole sums already, by in_a_fixed_order
        work = start_all_gather(bucket.grad_data, bucket.grad_data.chunk(group.size)[group.rank], group)
        if work is not None:
            work.wait()
    return [_stand_in(p.main_grad.detach(), p.main_grad, p) for p in optimizer.parameters_in_order]


def _stand_in(values: Tensor, grad: Tensor | None, model: Tensor) -> Tensor:
    """`values` with this gradient and with the attributes of the model's parameter that say how it is sharded."""
    values.grad = grad
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes", "shared"):
        if hasattr(model, name):
            setattr(values, name, getattr(model, name))
    values.tp_group = carried_group(model)  # type: ignore[attr-defined]
    return values


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
