"""Operators on DTensors that torch may compute with their local tensors at once: `detach`, Adam's and SGD's steps.

torch sends every operator on a DTensor through a dispatcher, which asks how the result is sharded. For the operators
that a training step applies to every parameter that is most of what DTensors cost the host: autograd detaches each
gradient that it stores in `.grad`, and an optimizer's functions call operators on lists of all parameters. The answer
is known for these. `detach` keeps the placements. Adam and SGD compute each element from one element of each operand,
so that if a parameter, its gradient and its state have equal placements, a rank computes its part of the result from
its own parts: torch's way calls the same operators with the same local tensors, and the bits are the same.

So `shorten` gives torch's dispatcher a handler of `detach` and wraps `torch.optim.adam.adam`, which AdamW calls too,
and `torch.optim.sgd.sgd`. Arguments that are not known to have equal placements go torch's way, as before.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .dtensors import is_dtensor, new_dtensor

_shortened = False


def shorten() -> None:
    """Once in a process. What a release of torch does not have is left as it is."""
    global _shortened
    if _shortened:
        return
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if isinstance(handlers, dict) and hasattr(torch, "_functionalize_unsafe_set"):
        handlers.setdefault(torch.ops.aten.detach.default, _detach)
    for name, refused in {"adam": [], "sgd": ["fused"]}.items():
        module: Any = sys.modules.get(f"torch.optim.{name}")
        if callable(function := getattr(module, name, None)):
            setattr(module, name, _with_local_tensors(function, refused))
    _shortened = True


def _detach(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch.distributed.tensor import DTensor

    (x,) = args
    detached = new_dtensor(DTensor, x._local_tensor.detach(), x._spec)
    torch._functionalize_unsafe_set(detached, x)  # a view has the storage of its base
    return detached


def _with_local_tensors(function: Callable[..., None], refused: list[str]) -> Callable[..., None]:
    """One of torch.optim's functions. Its positional arguments are lists: of parameters, gradients, states.

    refused: options with which torch refuses DTensors, and goes on to.
    """

    @functools.wraps(function)
    def with_local_tensors(*lists: Any, **options: Any) -> None:
        found = None
        if not torch.compiler.is_compiling() and not any(map(options.get, refused)):
            found = _local_lists(lists, options)
        if found is None:
            function(*lists, **options)
            return
        parts = list(itertools.chain.from_iterable(found))
        versions = [part._version for part in parts]
        try:
            function(*found, **options)
        finally:
            # torch's way counts what is written to a DTensor; what is not one has counted it already
            given = itertools.chain.from_iterable(lists)
            states = zip(given, parts, versions, strict=True)
            increment_version([x for x, part, before in states if x is not part and part._version != before])

    return with_local_tensors


def _local_lists(lists: Sequence[Any], options: dict[str, Any]) -> list[list[Tensor]] | None:
    """The lists with local tensors in place of DTensors; None if torch has to look at the placements.

    The parameters are DTensors of one mesh. Each gradient and state has the placements of its parameter, or is a plain
    tensor without dims (an optimizer's count of steps), which is the same on all ranks.
    """
    if not lists or not all(isinstance(tensors, list) for tensors in lists) or not lists[0]:
        return None
    if torch.is_grad_enabled() or any(map(is_dtensor, options.values())):
        return None
    first = lists[0][0]
    if not is_dtensor(first) or first.device_mesh.get_coordinate() is None:
        return None
    from torch.distributed.tensor import DTensor  # not at the top: it is slow to import

    mesh = first.device_mesh
    specs = []
    for p in lists[0]:
        if type(p) is not DTensor or p.is_inference() or p._spec.mesh != mesh:
            return None
        specs.append(p._spec)
    if any(placement.is_partial() for spec in specs for placement in spec.placements):
        return None
    found = []
    for tensors in lists:
        parts = []
        for x, spec in zip(tensors, specs if tensors else [], strict=True):
            if type(x) is DTensor:
                if x._spec is not spec and x._spec != spec:
                    return None
                x = x._local_tensor
            elif not isinstance(x, Tensor) or x.dim():
                return None
            if type(x) is not Tensor or x.is_inference():
                return None
            parts.append(x)
        found.append(parts)
    return found
