"""MixtureOfExperts: a router, the experts that it chooses for each token, and experts that every token has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group
from ..functional.routing import Routing, route
from ..gemm.gemm_fn import GemmFn
from .experts import Experts
from .linear import Linear


class Router(Linear):
    """x [.., H] -> (weights [.., k], index [.., k]) of the experts of each token; logits by a whole linear layer.

    The gradients of weight and bias are complete on every rank, also where the tokens are sharded.

    Args:
        routing: how experts are chosen and weighted.
        correction: whether there is a buffer `e_score_correction_bias` [E], fp32, that is added to the scores when
            experts are chosen (DeepSeek-V3). Nothing here changes its values.
        logits_in_fp32: whether x and the weight are converted to float32 before the product (DeepSeek-V3).
        weights_in_fp32: whether the weights stay in float32 (Mixtral), instead of x's dtype (Qwen3).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        bias: bool = False,
        *,
        correction: bool = False,
        logits_in_fp32: bool = False,
        weights_in_fp32: bool = False,
        **options: Any,
    ) -> None:
        routing.check_experts(num_experts)
        super().__init__(hidden_size, num_experts, bias, **options)
        self.routing = routing
        self.logits_in_fp32, self.weights_in_fp32 = logits_in_fp32, weights_in_fp32
        values = torch.zeros(num_experts, device=options.get("device"), dtype=torch.float32) if correction else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", values)

    def _product_dtype(self, device: torch.device) -> torch.dtype | None:
        return torch.float32 if self.logits_in_fp32 else super()._product_dtype(device)

    def forward(self, x: Tensor, return_logits: bool = False) -> Any:
        logits = super().forward(x)
        dtype = torch.float32 if self.weights_in_fp32 else x.dtype
        chosen = route(logits, self.routing, self.e_score_correction_bias, dtype)
        return (*chosen, logits) if return_logits else chosen

    def with_logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(weights, index, logits [.., E]): for the losses of functional/router_losses.py."""
        weights, index, logits = self.forward(x, True)
        return weights, index, logits


class MixtureOfExperts(nn.Module):
    """y = the weighted sum of the experts that the router chooses for each token, plus shared experts; x, y [.., H].

    `gate` is the Router, `experts` are the Experts, `shared_experts` is a module or None; parameters have the names
    that transformers gives them: gate.weight, experts.gate_up_proj, experts.down_proj. The same bits at every degree.
    There is no capacity factor: no token is dropped.

    Args:
        num_experts, hidden_size, intermediate_size: of Experts.
        routing: how experts are chosen and weighted: tpi.Routing(top_k=8), for example.
        router_bias, correction, logits_in_fp32, weights_in_fp32: of Router.
        shared_experts: a module [.., H] -> [.., H] whose output is added, built by the caller with the same tp_group
            and sequence_parallel.
        return_router_logits: whether the layer returns (y, the router's logits [.., E]), for load_balancing_loss and
            router_z_loss. Under sequence parallelism the logits are those of this rank's tokens.
        tp_group, sequence_parallel, sequence_dim, gemm_fn, device, dtype: of both, as for Linear.
        expert_options: further arguments of Experts: bias, activation, expert_parallel_group, ..

    Raises:
        ValueError, TypeError: see Routing, Experts and Linear.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        *,
        router_bias: bool = False,
        correction: bool = False,
        logits_in_fp32: bool = False,
        weights_in_fp32: bool = False,
        shared_experts: nn.Module | None = None,
        return_router_logits: bool = False,
        tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        gemm_fn: GemmFn | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **expert_options: Any,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = dict(
            tp_group=tp_group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, gemm_fn=gemm_fn,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.gate = Router(
            hidden_size, num_experts, routing, router_bias, correction=correction, logits_in_fp32=logits_in_fp32,
            weights_in_fp32=weights_in_fp32, **shared,
        )  # fmt: skip
        self.experts = Experts(num_experts, hidden_size, intermediate_size, **expert_options, **shared)
        self.shared_experts = shared_experts
        self.return_router_logits = return_router_logits

    def forward(self, x: Tensor) -> Any:
        # x is used several times, and its gradients are added here first, before a residual's: so it is, too, where
        # fully_shard makes the layer a unit
        x = x.view_as(x)
        logits = None
        if self.return_router_logits:
            weights, index, logits = self.gate.with_logits(x)
        else:
            weights, index = self.gate(x)
        y = self.experts(x, index, weights)
        y = y if self.shared_experts is None else y + self.shared_experts(x)
        return y if logits is None else (y, logits)
