"""The modules that may get only this rank's features: those between column-parallel and row-parallel layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class FeatureBlocks:
    """The blocks of a model: modules that directly contain layers whose output or input features are sharded.

    Args:
        modules: {name: module}, of the whole model.
        options: {name: options of tpi.Linear} of what the plan names; {} of what is no linear layer.
        layers_prefix: of the names of the decoder layers ("model.layers."), None if there are none.
        own_plan: whether the plan is the model's own, which leaves out modules that get all features.
        head_dims: the config's head sizes; several if layers differ, none if unknown.
    """

    modules: Mapping[str, nn.Module]
    options: Mapping[str, Mapping[str, Any]]
    layers_prefix: str | None
    own_plan: bool
    head_dims: frozenset[int]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        sharded = (
            name for name in self.options if _output_is_sharded(self.options[name]) or self._input_is_sharded(name)
        )
        return frozenset(name.rpartition(".")[0] for name in sharded)

    def _input_is_sharded(self, name: str) -> bool:
        options = self.options[name]
        return options.get("parallel_mode") == "row" and options.get("input_is_parallel", True)

    def may_shard(self, name: str, module: nn.Module) -> bool:
        """Whether `module`, which stands at `name`, may see a part of the features in any block above it."""
        return any(self._may_shard(block, name, module) for block in self.names)

    def _may_shard(self, block: str, name: str, module: nn.Module) -> bool:
        prefix = f"{block}." if block else ""
        if name == block or not name.startswith(prefix):
            return name == block
        child, _, below = name.removeprefix(prefix).partition(".")
        size = _features_of(module)
        if self._is_model(block, prefix):  # its column-parallel layer is the output layer, the last
            return not below and size is None and not isinstance(module, nn.Embedding)
        if isinstance(self.modules[block], nn.Sequential):
            return self._is_sharded_before(prefix, child)
        if not self.own_plan or size is None or size in self.head_dims:
            return True
        return size not in self._whole_sizes(block, prefix)

    def _is_model(self, block: str, prefix: str) -> bool:
        if self.layers_prefix is not None and self.layers_prefix.startswith(prefix):
            return True
        inner = any(name != block and name.startswith(prefix) for name in self.names)
        return inner and any(n.startswith(prefix) and isinstance(m, nn.Embedding) for n, m in self.modules.items())

    def _is_sharded_before(self, prefix: str, child: str) -> bool:
        """In an nn.Sequential the order tells: what the last parallel layer before `child` has left."""
        sharded = False
        for name in self.modules:
            if name.startswith(prefix) and name.removeprefix(prefix).partition(".")[0] == child:
                break
            if name.startswith(prefix) and self.options.get(name):
                sharded = _output_is_sharded(self.options[name])
        return sharded

    def _whole_sizes(self, block: str, prefix: str) -> set[int]:
        """What column-parallel layers take in and row-parallel ones put out: hidden states, a latent of MLA."""
        sizes = set()
        for child, linear in self.modules[block].named_children():
            mode = self.options.get(f"{prefix}{child}", {}).get("parallel_mode")
            if mode is not None and isinstance(linear, nn.Linear):
                sizes.add(linear.in_features if mode == "column" else linear.out_features)
        return sizes


def _output_is_sharded(options: Mapping[str, Any]) -> bool:
    return options.get("parallel_mode") == "column" and not options.get("gather_output")


def is_norm(module: nn.Module) -> bool:
    """Whether the name of its class contains "norm", and it has parameters."""
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))


def _features_of(module: nn.Module) -> int | None:
    """The size of the last dim of what a linear layer or a norm takes; None of others."""
    if type(module) is nn.Linear:
        return module.in_features
    weight = getattr(module, "weight", None)
    return weight.numel() if is_norm(module) and isinstance(weight, Tensor) else None
