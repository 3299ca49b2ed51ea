"""Latent attention of DeepSeek-V2 and its like: the part of the keys that all heads share, with a complete gradient.

    k of a head = [its own features, out of kv_b_proj (column-parallel); one rotated vector, the same for all heads]

The shared part comes from a projection that is whole on every rank (kv_a_proj_with_mqa), and meets this rank's heads
where the model's code expands it over them. torch's gradient of that is the sum over this rank's heads alone. So in the
forward of such a module `Tensor.expand` of a [B, 1, S, D] over heads becomes functional/regions.py's expand_heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Group
from ..core.elementwise import AroundForward, AroundLayers
from ..core.mode import is_tp_invariant_mode_enabled
from ..functional import stock
from ..functional.regions import expand_heads


class _Reroute(AroundLayers):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.expand and not kwargs and (heads := _heads_of(*args)) is not None:
            x = args[0]
            if is_tp_invariant_mode_enabled():
                return expand_heads(x, heads, self.group)
            return stock.copy_to_ranks(x, self.group).expand(-1, heads, -1, -1)
        return func(*args, **(kwargs or {}))


def _heads_of(x: Tensor, *sizes: Any) -> int | None:
    """Over how many heads x [B, 1, S, D] is expanded; None if it is something else that is expanded."""
    asked = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if x.dim() != 4 or len(asked) != 4 or x.shape[1] != 1 or asked[1] == -1 or not x.requires_grad:
        return None
    others = all(asked[dim] in (-1, x.shape[dim]) for dim in (0, 2, 3))
    return int(asked[1]) if others else None


class SharedKeys(AroundForward):
    """Hooks of a module with latent attention, whose heads are sharded over `group`."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__(module, "shared_keys")
        self._group = group

    def _mode(self) -> _Reroute | None:
        return _Reroute(self._group) if torch.is_grad_enabled() else None
