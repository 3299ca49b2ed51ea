"""Parameters that every rank holds whole, as DTensors beside those of the layers: for modules that are not ours.

torch's clipping and its optimizers refuse plain parameters and DTensors side by side, so in a model over a DeviceMesh
each parameter must be a DTensor. A module that is not ours computes with plain tensors. So its class becomes one of the
same name, in which reading a parameter during a forward gives the local tensor, whose gradient arrives at the DTensor.
Whoever reads it at other times (fully_shard does), or goes by `named_parameters()`, sees the DTensor.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import resolve_group
from ..consistency.same_weights import check_same_model
from ..core.dtensors import as_local, is_dtensor
from .parameters import KeepsAttributes, ShardedModule, ShardSpec, is_sharded, mark_sharded

_VIEWS: dict[tuple[type, tuple[str, ...]], type] = {}


def replicate_(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Makes the parameters of `module` that are not DTensors yet DTensors that are whole on every rank of `mesh`.

        model = nn.Sequential(tpi.Linear(.., tp_group=mesh["tp"]), MyBlock(..))
        tpi.replicate_(model, mesh["tp"])

    `parallelize` does so by itself. For other models over a DeviceMesh: call it on every rank, before the optimizer is
    made, as the parameters become other objects. Ties stay. A collective, which compares the ranks' values first. While
    the forward of a module that is not this library's runs, its parameters and those of such modules in it read as
    local tensors, whose gradients arrive at the DTensors. The class of such a module becomes one derived from it, of
    the same name.

    Args:
        mesh: a 1-D DeviceMesh, the one that the model's layers were given as tp_group.

    Raises:
        TypeError: `mesh` is no DeviceMesh.
        ValueError: a parameter that is this rank's part of one (a layer that was made with a ProcessGroup), or a
            DTensor on another mesh, or that has hooks or a gradient. Names it; nothing was changed.
        RuntimeError: on every rank: parameters whose values differ between ranks. Names them; nothing was changed.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r} is a {type(mesh).__name__}: pass a 1-D DeviceMesh")
    group = resolve_group(mesh)
    plain: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not is_dtensor(parameter):
            if is_sharded(parameter):
                raise ValueError(
                    f"{name} with shape {tuple(parameter.shape)} on rank {group.rank} is a part of a parameter "
                    "(tensor_model_parallel=True), and cannot be taken as whole: make its layer with "
                    "tp_group as this DeviceMesh"
                )
            plain[name] = parameter
        elif parameter.device_mesh != mesh:
            raise ValueError(
                f"{name} on rank {group.rank} is a DTensor on {parameter.device_mesh}, and mesh is {mesh}: all "
                "parameters must be on one"
            )
    check_replaceable(module, group.rank)
    check_same_model(module, group, {}, plain)
    place_whole(module, mesh)
    return module


def check_replaceable(module: nn.Module, rank: int) -> None:
    """Whether DTensors can take the place of the parameters.

    Raises:
        ValueError: a parameter has hooks or a gradient, which would stay with the tensor that is replaced. Names it.
    """
    for name, parameter in module.named_parameters():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if not is_dtensor(parameter) and (hooks or parameter.grad is not None):
            raise ValueError(
                f"{name} on rank {rank} has {'hooks' if hooks else 'a gradient'}, and a DTensor takes its place, which "
                "would have none: parallelize the model, or call replicate_, before you register hooks and before a "
                "backward"
            )


def place_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """`replicate_` without its checks."""
    spec = ShardSpec(resolve_group(mesh), None, 1)
    placed: dict[int, nn.Parameter] = {}
    kept = []  # so that no id is used twice
    for child in module.modules():
        names = [name for name, p in child._parameters.items() if p is not None and not is_dtensor(p)]
        for name in names:
            old = child._parameters[name]
            assert old is not None
            if id(old) not in placed:
                kept.append(old)
                new = placed[id(old)] = nn.Parameter(spec.placed(old), old.requires_grad)
                new.__dict__.update(old.__dict__)
                mark_sharded(new, None, 1, spec.group)
            child._parameters[name] = placed[id(old)]
        if names and not isinstance(child, ShardedModule):
            child.__class__ = _class_of_views(type(child), tuple(names))


class _Forwards:
    """How many forwards of classes with views this process is inside of."""

    running = 0


_forwards = _Forwards()


class _View:
    """In a class, under a parameter's name: inside a forward the local tensor, else the parameter.

    What is in an instance's __dict__ comes first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if self.name not in module._parameters:
            raise AttributeError(self.name)  # then nn.Module's own __getattr__ is asked
        parameter = module._parameters[self.name]
        return as_local(parameter) if _forwards.running else parameter


def _class_of_views(base: Any, names: tuple[str, ...]) -> type:
    if (base, names) not in _VIEWS:

        def reduce(self: Any, protocol: Any) -> tuple:
            """As of `base`, which can be found by its name."""
            return _new, (base, names), *base.__reduce_ex__(self, protocol)[2:]

        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            _forwards.running += 1
            try:
                return base.forward(self, *args, **kwargs)
            finally:
                _forwards.running -= 1

        parts: dict[str, Any] = {name: _View(name) for name in names}
        attributes = {
            "forward": forward,
            "__reduce_ex__": reduce,
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        }
        attributes |= parts
        _VIEWS[base, names] = type(base.__name__, (KeepsAttributes, base), attributes)
    return _VIEWS[base, names]


def _new(base: type, names: tuple[str, ...]) -> Any:
    cls: Any = _class_of_views(base, names)
    return cls.__new__(cls)
