"""Finds the dim of a module's input that holds sharded features, by running the model's forward instead of by names.

A Hugging Face model runs on fake tensors (torch's, which have shapes but no values, so that nothing is computed and no
memory is used), first with all features, then as one of P ranks, where column-parallel layers return 1/P of their
features and row-parallel ones take 1/P. A dim of a module's input that is P times smaller in the second run is sharded:
the heads, for a norm of q and k, at whichever dim the model has them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
        model: takes input_ids [B, S] by that name. It is not changed: a copy runs, which shares its parameters.
        options: {name: options of tpi.Linear} of the linear layers that the plan shards.
        degree: P, more than 1; it divides what the plan shards.
        experts: names of experts modules, whose output has their input's shape; their code may need values.
        shards: of modules that stay, by name, the sharded dims of parameters of their own.

    Raises:
        ProbeError: the forward does not run, on all features or on a part of them.
    """
    whole = _shapes(model, {}, {}, 1, names, experts, _LENGTHS[0])
    part = _shapes(model, options, shards or {}, degree, names, experts, _LENGTHS[0])
    longer = whole if part == whole else _shapes(model, {}, {}, 1, names, experts, _LENGTHS[1])
    found: dict[str, ShardedInput | None] = {}
    for name, calls in whole.items():
        seen = {
            _compare(a, b, c, degree) for a, b, c in zip(calls, part.get(name, []), longer.get(name, []), strict=False)
        }
        if len(calls) != len(part.get(name, [])) or len(seen) != 1:
            raise ProbeError(f"{name} is called with other shapes from call to call, or other times: {calls}")
        found[name] = seen.pop()
    return found


def _compare(whole: torch.Size, part: torch.Size, longer: torch.Size, degree: int) -> ShardedInput | None:
    if whole == part:
        return None
    differ = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    if len(whole) != len(part) or len(differ) != 1 or part[differ[0]] * degree != whole[differ[0]]:
        raise ProbeError(f"an input {tuple(whole)} becomes {tuple(part)} on one of {degree} ranks")
    (dim,) = differ
    return ShardedInput(dim, whole[dim], dim == len(whole) - 1, longer[dim] != whole[dim])


def _shapes(
    model: nn.Module,
    options: Mapping[str, Mapping[str, Any]],
    shards: Mapping[str, Mapping[str, int]],
    degree: int,
    names: Collection[str],
    experts: Collection[str],
    length: int,
) -> dict[str, list[torch.Size]]:
    """{name: the shape of its first tensor argument at each call}."""
    seen: dict[str, list[torch.Size]] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.setdefault(name, []).append(next(x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))

    try:
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
        use_stock_attention(twin)
        for name, given in options.items():
            linear: Any = twin.get_submodule(name)
            linear.forward = functools.partial(_linear_shapes, name, linear, given, degree)
        for name, dims in shards.items():
            for key, dim in dims.items():
                full = twin.get_submodule(name).get_parameter(key)
                part = full.detach().narrow(dim, 0, full.shape[dim] // degree)
                twin.get_submodule(name)._parameters[key] = nn.Parameter(part, full.requires_grad)
        for name in experts:
            module: Any = twin.get_submodule(name)
            module.forward = lambda hidden_states, *args, **options: torch.zeros_like(hidden_states)
        for name in names:
            twin.get_submodule(name).register_forward_pre_hook(functools.partial(record, name), with_kwargs=True)
        device = next(model.parameters()).device
        with torch.no_grad(), _without_torchs_log(), FakeTensorMode(allow_non_fake_inputs=True):
            twin(input_ids=torch.zeros(_BATCH, length, dtype=torch.long, device=device), use_cache=False)
    except Exception as error:  # a foreign forward may raise anything
        begin = WITH_ALL_FEATURES if degree == 1 else f"its forward as one of {degree} ranks raises"
        raise ProbeError(f"{begin} {type(error).__name__}: {error}") from error
    return seen


@contextlib.contextmanager
def _without_torchs_log() -> Iterator[None]:
    """torch logs what fails on fake tensors, with traces; here it is part of the ProbeError."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def use_stock_attention(twin: nn.Module) -> None:
    """The copy's attention must take fake tensors, which this library's kernels do not."""
    configs = {id(c): c for m in twin.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if getattr(config, "_attn_implementation", None) not in (None, "eager", _STOCK_ATTENTION):
            config._attn_implementation = _STOCK_ATTENTION


def _linear_shapes(name: str, linear: nn.Linear, options: Mapping[str, Any], degree: int, x: Tensor) -> Tensor:
    """Zeros of the shape that the layer puts out on one of `degree` ranks."""
    takes, gives = linear.in_features, linear.out_features
    if options["parallel_mode"] == "row" and options.get("input_is_parallel", True):
        takes //= degree
    elif options["parallel_mode"] == "column" and not options.get("gather_output"):
        gives //= degree
    if x.shape[-1] != takes:
        raise ValueError(f"{name} would get {x.shape[-1]} features where the plan has {takes} for it")
    return x.new_zeros((*x.shape[:-1], gives))
