"""How parameters are sharded: Megatron's attributes on them, and the way from shards to full tensors and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import Group, gather_major
from .layout import Stride, shard, unshard

_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes")


def mark_sharded(parameter: Tensor, partition_dim: int | None, stride: Stride) -> None:
    """Sets Megatron-LM's attributes; partition_dim None for a parameter that every rank holds whole.

    Megatron-LM has no word for pieces of different sizes: they stand in `partition_sizes`, and partition_stride is 1.
    """
    parameter.tensor_model_parallel = partition_dim is not None  # type: ignore[attr-defined]
    parameter.partition_dim = -1 if partition_dim is None else partition_dim  # type: ignore[attr-defined]
    set_stride(parameter, stride if partition_dim is not None or isinstance(stride, int) else 1)


def set_stride(parameter: Tensor, stride: Stride) -> None:
    """Says of what pieces a parameter's sharded dim is stacked."""
    equal = isinstance(stride, int)
    parameter.partition_stride = stride if equal else 1  # type: ignore[attr-defined]
    parameter.partition_sizes = None if equal else stride  # type: ignore[attr-defined]


def stride_of(parameter: Tensor) -> Stride:
    """What `set_stride` or Megatron-LM said; 1 of a parameter without attributes."""
    sizes: tuple[int, ...] | None = getattr(parameter, "partition_sizes", None)
    return getattr(parameter, "partition_stride", 1) if sizes is None else sizes


def _attributes(parameter: Tensor) -> dict[str, Any]:
    return {name: getattr(parameter, name) for name in _ATTRIBUTES if hasattr(parameter, name)}


def _set_attributes(parameter: Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


class KeepsAttributes(nn.Module):
    """A module whose parameters keep their attributes where new ones take their place.

    That is: `to_empty()`, `copy.deepcopy`, `load_state_dict(assign=True)`, `module.weight = nn.Parameter(..)`.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        old = self._parameters.get(name)
        super().register_parameter(name, param)  # what assignment comes down to, too
        if old is not None and param is not None:
            _set_attributes(param, {**_attributes(old), **_attributes(param)})

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        before = {name: _attributes(parameter) for name, parameter in self.named_parameters(recurse=False)}
        result = super()._apply(fn, recurse)
        for name, parameter in self.named_parameters(recurse=False):
            _set_attributes(parameter, before[name])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        for name, parameter in self.named_parameters(recurse=False):
            _set_attributes(twin.get_parameter(name), _attributes(parameter))
        return twin


@dataclass(frozen=True)
class ShardSpec:
    """Where a parameter is sharded: `dim` None means whole on every rank.

    `padding`: how many slices of zeros follow the full tensor along `dim`, so that the degree divides it.
    """

    group: Group
    dim: int | None
    stride: Stride
    padding: int = 0

    def full(self, local: Tensor) -> Tensor:
        """The full tensor, on every rank, from this rank's part. A collective."""
        if self.dim is None or self.group.size == 1:
            full = local.detach().clone()
        else:
            full = unshard(gather_major(local.detach(), self.group), dim=self.dim, stride=self.stride)
        if self.dim is None or not self.padding:
            return full
        return full.narrow(self.dim, 0, full.shape[self.dim] - self.padding).clone()

    def local(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor."""
        if self.dim is None:
            return full.detach().clone()
        if self.padding:
            zeros = list(full.shape)
            zeros[self.dim] = self.padding
            full = torch.cat([full, full.new_zeros(zeros)], dim=self.dim)
        return shard(full.detach(), dim=self.dim, rank=self.group.rank, world=self.group.size, stride=self.stride)


class ShardedModule(KeepsAttributes):
    """What the layers of this library have in common: they can say how each of their own parameters is sharded."""

    def shard_spec(self, name: str) -> ShardSpec:
        """The ShardSpec of the parameter called `name`, as things stand now (partition_stride may be set late)."""
        raise NotImplementedError


def named_shard_specs(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardSpec]]:
    """(qualified name, parameter, spec) for each parameter; those of other modules count as whole on every rank."""
    whole = ShardSpec(Group(None, 0, 1), None, 1)
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            spec = child.shard_spec(name) if isinstance(child, ShardedModule) else whole
            yield f"{prefix}.{name}" if prefix else name, parameter, spec


@contextmanager
def full_initialisation(local: Tensor, full_shape: torch.Size | tuple[int, ...], spec: ShardSpec) -> Iterator[Tensor]:
    """Gives the full tensor to write values into and keeps this rank's part, so that values do not depend on P.

    Every rank draws the full tensor: seed them all alike, as for any replicated parameter.
    """
    full = local.new_empty(full_shape)
    yield full
    with torch.no_grad():
        local.copy_(spec.local(full))
