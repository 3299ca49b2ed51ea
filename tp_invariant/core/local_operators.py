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
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .dtensors import is_dtensor, new_dtensor

_shortened = False
_DTensor: Any = None  # torch's classes, once one is met: their module is slow to import
_Partial: Any = None
_backward_task = torch._C._current_graph_task_id  # which backward this thread is inside of, -1 outside


def shorten() -> None:
    """Once in a process. What a release of torch does not have is left as it is."""
    global _shortened, _DTensor, _Partial
    if _shortened:
        return
    from torch.distributed.tensor import DTensor, Partial

    _DTensor, _Partial = DTensor, Partial
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if isinstance(handlers, dict) and hasattr(torch, "_functionalize_unsafe_set"):
        handlers.setdefault(torch.ops.aten.detach.default, _detach)
    for name, refused in {"adam": [], "sgd": ["fused"]}.items():
        module: Any = sys.modules.get(f"torch.optim.{name}")
        if callable(function := getattr(module, name, None)):
            setattr(module, name, _with_local_tensors(function, refused))
        kind: Any = getattr(module, {"adam": "Adam", "sgd": "SGD"}[name], None)
        if callable(listing := getattr(kind, "_init_group", None)):
            kind._init_group = _listing_quickly(listing)
    _shortened = True


_references_of_held: int | None = None  # that `_detach` sees to a DTensor which one variable holds; None: not known
_measured: list[int] | None = None


def _detach(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A gradient that nobody but autograd holds is given back as it is: it stores that in `.grad`, and drops its own.

    A call of a user's has two references more, the caller's variable and the one by which a method is called.
    """
    global _references_of_held, _measured
    (x,) = args
    references = sys.getrefcount(x)
    if _measured is not None:
        _measured.append(references)
    elif _backward_task() != -1 and not x.requires_grad:
        if _references_of_held is None:
            held = new_dtensor(_DTensor, x._local_tensor, x._spec)
            _measured = []
            held.detach()
            _references_of_held, _measured = min(_measured, default=0), None
        if references <= _references_of_held - 2:
            return x
    detached = new_dtensor(_DTensor, x._local_tensor.detach(), x._spec)
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
        # torch's way counts what is written to a DTensor. An optimizer writes to all tensors of a list or to none,
        # unless it fails midway: then any of them may have been written to.
        watched = [(given, parts[0], parts[0]._version) for given, parts in zip(lists, found, strict=True) if parts]
        failed = True
        try:
            function(*found, **options)
            failed = False
        finally:
            written = [given for given, part, before in watched if failed or part._version != before]
            increment_version([x for given in written for x in given if type(x) is _DTensor])  # others have counted it

    return with_local_tensors


def _listing_quickly(init_group: Callable[..., Any]) -> Callable[..., Any]:
    """`_init_group` of an optimizer, which reads a dozen attributes of each parameter and makes lists of them.

    Of a DTensor each takes twice as long, since torch looks for a __torch_function__, which DTensors have turned off.
    """

    @functools.wraps(init_group)
    def listing(self: Any, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not {Tensor, torch.nn.Parameter, _DTensor}.issuperset(map(type, group["params"])):
            return init_group(self, group, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return init_group(self, group, *args, **kwargs)

    return listing


def _local_lists(lists: Sequence[Any], options: dict[str, Any]) -> list[list[Tensor]] | None:
    """The lists with local tensors in place of DTensors; None if torch has to look at the placements.

    The parameters are DTensors of one mesh. Each gradient and state has the placements of its parameter, or is a plain
    tensor without dims (an optimizer's count of steps), which is the same on all ranks. A gradient or state whose spec
    equals its parameter's gets this one, so that the next step need not compare them: that takes longer than the rest.
    """
    if not lists or not all(isinstance(tensors, list) for tensors in lists) or not lists[0]:
        return None
    if torch.is_grad_enabled() or any(map(is_dtensor, options.values())):
        return None
    first = lists[0][0]
    if not is_dtensor(first) or first.device_mesh.get_coordinate() is None or first.is_inference():
        return None
    if not _are_all(_DTensor, lists[0]):
        return None
    specs = [p._spec for p in lists[0]]
    mesh = specs[0].mesh
    if any([spec.mesh is not mesh and spec.mesh != mesh for spec in specs]):
        return None
    if any(issubclass(kind, _Partial) for kind in {type(placement) for spec in specs for placement in spec.placements}):
        return None
    found = []
    for tensors in lists:
        parts = _local_parts(tensors, specs if tensors else [])
        if parts is None or (parts and parts[0].is_inference()):  # has no version
            return None
        found.append(parts)
    return found


def _are_all(kind: type, tensors: Sequence[Any]) -> bool:
    return all(map(is_, map(type, tensors), itertools.repeat(kind)))


def _local_parts(tensors: Sequence[Any], specs: Sequence[Any]) -> list[Tensor] | None:
    """One list's local tensors; None if torch has to look at the placements."""
    same = len(tensors) == len(specs) and _are_all(_DTensor, tensors)
    if same and all(map(is_, [x._spec for x in tensors], specs)):  # as in all steps but the first
        parts = [x._local_tensor for x in tensors]
        return parts if _are_all(Tensor, parts) else None
    parts = []
    for x, spec in zip(tensors, specs, strict=True):
        if type(x) is _DTensor:
            if x._spec is not spec:
                if x._spec != spec:
                    return None
                x._spec = spec
            x = x._local_tensor
        elif not isinstance(x, Tensor) or x.dim():
            return None
        if type(x) is not Tensor:
            return None
        parts.append(x)
    return parts
