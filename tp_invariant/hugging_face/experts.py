"""Mixtures of experts of transformers: their experts as this library's, and their routers' own code on its kernels.

An experts module of transformers says its layout by attributes that a decorator sets (has_gate, has_bias,
is_transposed, is_concatenated), and its function between the two products by `_apply_gate`. Experts needs no more.

Routers differ from model to model, so a model's own code runs. It sees all tokens on every rank, at every degree; only
its linear products and its top-k are replaced: products by gemm_fn, whose bits do not depend on the number of threads,
and top-k by one in which equal scores have an order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.autocast import autocast_dtype
from ..core.elementwise import AroundForward, AroundLayers
from ..core.layout import indivisible
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.module_hooks import has_known_forward
from ..functional import stock
from ..functional.linear import LinearCall, replicated_linear
from ..functional.routing import top_k
from ..gemm.gemm_fn import GemmFn
from ..layers.experts import Experts

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def problem_with_experts(experts: nn.Module, group: Group, stored_over: Group | None) -> str | None:
    """Why Experts cannot take the place of this module; None if it can. stored_over: expert_parallel_group."""
    kind = type(experts).__name__
    if not all(isinstance(getattr(experts, name, None), bool) for name in _LAYOUT):
        return f"{kind} does not say the layout of its weights ({', '.join(_LAYOUT)}), as transformers' experts do"
    if getattr(experts, "has_post_expert_norm", False):
        return f"{kind} normalises the output of each expert, which is not supported"
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    wanted = {up, "down_proj", *((f"{up}_bias", "down_proj_bias") if experts.has_bias else ())}
    held = {name for name, _ in experts.named_parameters()}
    if held != wanted or experts.get_parameter("down_proj").dim() != 3:
        return f"{kind} has the parameters {', '.join(sorted(held))}: supported are {', '.join(sorted(wanted))}"
    count, _, inner = _sizes(experts)
    if stored_over is not None and stored_over.size > group.size:
        return indivisible(count, stored_over.size, size_name="num_experts", parts_name="expert-parallel degree")
    name, size = ("intermediate size", inner) if stored_over is None else ("num_experts", count)
    return indivisible(size, group.size, size_name=name)


def _sizes(experts: Any) -> tuple[int, int, int]:
    """E, H, I."""
    count, first, second = experts.down_proj.shape
    return (count, second, first) if experts.is_transposed else (count, first, second)


def experts_of(module: Any, group: Group, gemm_fn: GemmFn | None, stored_over: Group | None) -> Experts:
    """What an experts module of transformers becomes, without values: on the meta device."""
    from transformers.integrations import moe

    interleaved = module.has_gate and not module.is_concatenated
    function: dict[str, Any] = dict(activation=_activation(getattr(module, "act_fn", nn.SiLU())))
    if module.has_gate and type(module)._apply_gate is not moe._default_apply_gate:
        shell = copy.copy(module)  # what _apply_gate reads of it, without the weights
        shell.__dict__["_parameters"] = {}
        clamped = is_clamped_silu(shell._apply_gate, interleaved)
        function = dict(activation="clamped_silu") if clamped else dict(gate_fn=shell._apply_gate)
    return Experts(
        *_sizes(module),
        bias=module.has_bias,
        gated=module.has_gate,
        interleaved=interleaved,
        transposed=module.is_transposed,
        tp_group=group,
        expert_parallel_group=stored_over,
        gemm_fn=gemm_fn,
        device="meta",
        dtype=module.down_proj.dtype,
        **function,
    )


def _activation(function: Callable[[Tensor], Tensor]) -> str | Callable[[Tensor], Tensor]:
    """The name in Experts of one of torch's or transformers', by values; then gate and up are one kernel."""
    if function is not F.silu and not has_known_forward(function):
        return function
    sample = torch.linspace(-12, 12, 257, dtype=torch.float64, device="cpu")
    for name, known in (("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh"))):
        with torch.no_grad():
            if torch.allclose(function(sample.clone()), known(sample), rtol=1e-9, atol=0.0):
                return name
    return function


def is_clamped_silu(function: Callable[[Tensor], Tensor], interleaved: bool) -> bool:
    """Whether a gate, of a [.., 2 I] first product, is gpt-oss's with the numbers that the kernel has.

    By values, inside of both limits and beyond them: models name and nest these numbers differently.
    """
    sample = torch.cartesian_prod(*(torch.linspace(-12, 12, 33, dtype=torch.float64, device="cpu") for _ in range(2)))
    gates, ups = sample.unbind(-1)
    h = sample.flatten() if interleaved else torch.cat([gates, ups])
    with torch.no_grad():
        return torch.allclose(function(h.unsqueeze(0))[0], stock.clamped_silu(gates, ups), rtol=1e-9, atol=0.0)


def use_own_code(model: nn.Module) -> None:
    """Makes transformers' experts run the model's own code: grouped products of torch's take no float64."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


class _Reroute(AroundLayers):
    """Reads the mode at each call, because an interrupt in a forward skips the hook that would remove this object."""

    def __init__(self, gemm_fn: GemmFn | None) -> None:
        super().__init__()
        self.gemm_fn = gemm_fn

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_tp_invariant_mode_enabled():
            if func is F.linear:
                return _linear(self.gemm_fn, *args, **kwargs)
            if func in (torch.topk, Tensor.topk):
                return _top_k(func, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(gemm_fn: GemmFn | None, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.dim() < 2:
        return _linear(gemm_fn, input.unsqueeze(0), weight, bias).squeeze(0)
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return replicated_linear(input, weight, bias, LinearCall(Group(None, 0, 1), False, 0, 1, "auto", gemm_fn))


def _top_k(
    func: Callable, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **more: Any
) -> Any:
    if not largest or more or dim % input.dim() != input.dim() - 1:
        return func(input, k, dim, largest, sorted, **more)
    return torch.return_types.topk(top_k(input, k))


class SafeRouting(AroundForward):
    """Hooks that replace F.linear and torch.topk inside the forward of a module that has experts, in the mode."""

    def __init__(self, module: nn.Module, gemm_fn: GemmFn | None) -> None:
        super().__init__(module, "routing")
        self._gemm_fn = gemm_fn

    def _mode(self) -> _Reroute | None:
        return _Reroute(self._gemm_fn) if is_tp_invariant_mode_enabled() else None
