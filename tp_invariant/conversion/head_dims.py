"""Finds the dim of a norm's input that holds sharded features, by a run of the model's forward instead of by names.

A copy of a Hugging Face model runs on the CPU, first with all features, then as one of P ranks, where column-parallel
layers return 1/P of their features and row-parallel ones take 1/P. A dim of a module's input that is P times smaller in
the second run is sharded: the heads, for a norm of q and k, at whichever dim the model has them. Each parameter of the
copy is one number, expanded, and each linear layer returns zeros, so that it needs little memory and time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.copies import copy_of_module
from ..core.torch_private import forward_hooks_of, forward_pre_hooks_of

_BATCH, _LENGTHS = 2, (5, 6)
_STOCK_ATTENTION = "sdpa"
WITH_ALL_FEATURES = "its forward raises"  # how a ProbeError of the first run begins


class ProbeError(Exception):
    """Why the shapes could not be determined, with the error that the model's forward raised."""


@dataclass(frozen=True)
class ShardedInput:
    """For a module's first tensor argument: the dim that shrinks when features are sharded, and its full size.

    `with_tokens`: whether the dim grows with the sequence, so that it does not hold features only.
    """

    dim: int
    size: int
    last: bool
    with_tokens: bool


def sharded_inputs(
    model: nn.Module,
    options: Mapping[str, Mapping[str, Any]],
    degree: int,
    names: Collection[str],
    experts: Collection[str] = (),
    shards: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, ShardedInput | None]:
    """{name: where its input is sharded, None if nowhere} of those of `names` that a forward calls.

    Args:
        model: takes input_ids [B, S] by that name. It is not changed.
        options: {name: options of tpi.Linear} of the linear layers that the plan shards.
        degree: P, more than 1; it divides what the plan shards.
        experts: names of experts modules, whose output has their input's shape.
        shards: of modules that stay, by name, the sharded dims of parameters of their own.

    Raises:
        ProbeError: the forward does not run, on all features or on a part of them.
    """
    try:
        twin = _light_copy(model)
    except Exception as error:  # of a foreign class
        raise ProbeError(f"{WITH_ALL_FEATURES}: no copy can be made: {type(error).__name__}: {error}") from error
    whole, longer = (_shapes(twin, {}, {}, 1, names, experts, length) for length in _LENGTHS)
    part = _shapes(twin, options, shards or {}, degree, names, experts, _LENGTHS[0])
    inputs: dict[str, ShardedInput | None] = {}
    for name, calls in whole.items():
        triples = zip(calls, part.get(name, []), longer.get(name, []), strict=False)
        kinds = {_compare(a, b, c, degree) for a, b, c in triples}
        if len(calls) != len(part.get(name, [])) or len(kinds) != 1:
            raise ProbeError(f"{name} is called with other shapes from call to call, or other times: {calls}")
        inputs[name] = kinds.pop()
    return inputs


def _compare(whole: torch.Size, part: torch.Size, longer: torch.Size, degree: int) -> ShardedInput | None:
    if whole == part:
        return None
    differ = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if len(whole) != len(part) or len(differ) != 1 or part[differ[0]] * degree != whole[differ[0]]:
        raise ProbeError(f"an input {tuple(whole)} becomes {tuple(part)} on one of {degree} ranks")
    (dim,) = differ
    return ShardedInput(dim, whole[dim], dim == len(whole) - 1, longer[dim] != whole[dim])


def _shapes(
    twin: nn.Module,
    options: Mapping[str, Mapping[str, Any]],
    shards: Mapping[str, Mapping[str, int]],
    degree: int,
    names: Collection[str],
    experts: Collection[str],
    length: int,
) -> dict[str, list[torch.Size]]:
    """{name: the shape of its first tensor argument at each call}. With `shards` the copy stays one of a rank."""
    shapes: dict[str, list[torch.Size]] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shapes.setdefault(name, []).append(next(x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))

    hooks = []
    try:
        for name, module in twin.named_modules():
            if isinstance(module, nn.Linear):
                zeros = functools.partial(_zeros_of_linear, name, module, options.get(name, {}), degree)
                module.__dict__["forward"] = zeros
            for key, dim in shards.get(name, {}).items():
                full = module.get_parameter(key)
                part = full.detach().narrow(dim, 0, full.shape[dim] // degree)
                setattr(module, key, nn.Parameter(part, False))
            if name in experts:
                module.__dict__["forward"] = lambda hidden_states, *args, **others: torch.zeros_like(hidden_states)
            if name in names:
                hooks.append(module.register_forward_pre_hook(functools.partial(record, name), with_kwargs=True))
        ids = torch.zeros(_BATCH, length, dtype=torch.long, device="cpu")
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            twin(input_ids=ids, use_cache=False)
    except Exception as error:  # a foreign forward may raise anything
        begin = WITH_ALL_FEATURES if degree == 1 else f"its forward as one of {degree} ranks raises"
        raise ProbeError(f"{begin} {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _light_copy(model: nn.Module) -> nn.Module:
    """In evaluation mode, with transformers' own attention, without hooks, which would be called for the copy."""

    def number(p: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.ones((), dtype=p.dtype, device="cpu").expand(p.shape), False)

    def on_cpu(b: Tensor) -> Tensor:
        return torch.zeros(b.shape, dtype=b.dtype, device="cpu") if b.is_meta else b.detach().to("cpu", copy=True)

    memo: dict[int, Any] = {id(p): number(p) for p in model.parameters()}
    twin = copy_of_module(model, memo | {id(b): on_cpu(b) for b in model.buffers()}).eval()
    for module in twin.modules():
        forward_pre_hooks_of(module).clear()
        forward_hooks_of(module).clear()
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, "eager", _STOCK_ATTENTION):
            config._attn_implementation = _STOCK_ATTENTION
    return twin


def _zeros_of_linear(name: str, linear: nn.Linear, options: Mapping[str, Any], degree: int, x: Tensor) -> Tensor:
    """What the layer puts out on one of `degree` ranks, in its shape alone."""
    takes, gives = linear.in_features, linear.out_features
    if options.get("parallel_mode") == "row" and options.get("input_is_parallel", True):
        takes //= degree
    elif options.get("parallel_mode") == "column" and not options.get("gather_output"):
        gives //= degree
    if x.shape[-1] != takes:
        raise ValueError(f"{name} would get {x.shape[-1]} features where the plan has {takes} for it")
    return x.new_zeros((*x.shape[:-1], gives))
