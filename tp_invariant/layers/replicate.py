"""Parameters that every rank holds whole, as DTensors beside those of the layers: for modules that are not ours.

torch's clipping and its optimizers refuse plain parameters and DTensors side by side, so in a model over a DeviceMesh
each parameter must be a DTensor. A module that is not ours computes with plain tensors. So its class becomes one of the
same name, in which reading a parameter during a forward gives the local tensor, whose gradient arrives at the DTensor.
So does the class of each module around it, whose forward may read a parameter of a module inside (as
nn.TransformerEncoderLayer does). Whoever reads a parameter at other times, or goes by `named_parameters()`, sees the
DTensor; and so does fully_shard, also during a forward, since between its uses a parameter is not whole.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import resolve_group
from ..consistency.same_weights import check_same_model
from ..core.derived_class import derived_class
from ..core.dtensors import as_local, is_dtensor, local_of
from ..core.parameter_names import name_parameters
from ..core.torch_private import current_backward, forward_pre_hooks_of, tree
from .in_place import Place, all_or_nothing, place_parameters, problems_in_place
from .parameters import KeepsAttributes, ShardedModule, ShardSpec, is_sharded


def replicate_(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Makes the parameters of `module` that are not DTensors yet DTensors that are whole on every rank of `mesh`.

        model = nn.Sequential(tpi.Linear(.., tp_group=mesh["tp"]), MyBlock(..))
        tpi.replicate_(model, mesh["tp"])

    `parallelize` does so by itself. For other models over a DeviceMesh: call it on every rank, before the optimizer is
    made, as DTensors take the places, attributes and gradients of the parameters. Ties stay. A collective, which
    compares the ranks' values first. While the forward of a module that is not this library's runs, its parameters and
    those of such modules in it read as local tensors, whose gradients arrive at the DTensors. The class of such a
    module, and of those around it, becomes one derived from it, of the same name. Call it again when modules have been
    added, or given parametrizations.

    Args:
        mesh: a 1-D DeviceMesh, the one that the model's layers were given as tp_group.

    Raises:
        TypeError: `mesh` is no DeviceMesh.
        ValueError: a parameter that is this rank's part of one (a layer that was made with a ProcessGroup), or a
            DTensor on another mesh, or that has hooks; a hook of `module` itself that computes a weight before its
            forward (torch.nn.utils.weight_norm). Names it; nothing was changed.
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
    if problems := problems_in_place(module, {}, group):
        raise ValueError("\n".join(problems))
    for hook in forward_pre_hooks_of(module).values():
        computed: Any = getattr(hook, "name", None)
        if isinstance(module.__dict__.get(computed), Tensor):
            raise ValueError(
                f"{computed} of the {type(module).__name__} that was given to replicate_ on rank {group.rank} is "
                f"computed by the hook {hook} before its forward, where parameters read as DTensors: give a module "
                "around it, such as nn.Sequential(module), or take torch.nn.utils.parametrizations in place of the hook"
            )
    check_same_model(module, group, {}, plain)
    with all_or_nothing(module, group):
        place_whole(module, mesh)
    name_parameters(module.named_parameters())
    return module


def place_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """`replicate_` without its checks."""
    spec = ShardSpec(resolve_group(mesh), None, 1)
    plain = [(name, p) for name, p in module.named_parameters() if not is_dtensor(p)]
    place_parameters(module, {id(p): Place(name, p, spec) for name, p in plain})
    _show_local(module, set())


def _show_local(module: nn.Module, seen: set[int]) -> bool:
    """Changes the classes of the modules that are not this library's; whether `module` has any of their parameters."""
    if id(module) in seen:
        return isinstance(module, ForeignModule)
    seen.add(id(module))
    below = [_show_local(child, seen) for child in module.children()]
    foreign = isinstance(module, ForeignModule) or not isinstance(module, ShardedModule)
    own: Any = () if foreign else module.SHARDED_PARAMETERS  # the others are a user's own
    names = frozenset(name for name, p in module._parameters.items() if p is not None and name not in own)
    if not names and not (foreign and any(below)):
        return any(below)
    kind: Any = type(module)
    if not isinstance(module, ForeignModule):
        module.__class__ = derived_class(kind, ForeignModule, names)
    elif not all(isinstance(getattr(kind, name, None), _ReadParameter) for name in names):
        base, added, before = kind.derived_from
        module.__class__ = derived_class(base, added, names | before)
    return True


class _Forwards(threading.local):
    """How many forwards of a ForeignModule this thread is inside of, and the DTensors whose local tensors were read.

    What is written to a DTensor does not count as written to its local tensor (core/dtensors.py), and backward may need
    the values that were read. So the count is passed on when backward comes to an output of the outermost forward.
    """

    running = 0
    read: dict[int, Tensor]


_forwards = _Forwards()


def _computes() -> bool:
    """Inside of a forward, also one that backward runs again (torch.utils.checkpoint, from where it was called)."""
    return _forwards.running > 0 or current_backward() != -1


class _ReadParameter:
    """In a class, under a parameter's name: inside a forward the local tensor of one that is shown, else the parameter.

    What is in an instance's __dict__ comes first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        parameter = module._parameters.get(self.name)
        if parameter is None:
            raise AttributeError(self.name)  # then nn.Module's own __getattr__ is asked
        shown = torch.compiler.is_compiling() or _computes()
        if not shown or not module.shows(self.name, parameter):
            return parameter
        if _forwards.running and parameter.requires_grad:
            _forwards.read[id(parameter)] = parameter
        return as_local(parameter)


class ForeignModule(KeepsAttributes):
    """A module that is not ours, over a DeviceMesh: in its forward parameters are local tensors."""

    @staticmethod
    def class_attributes(names: frozenset[str]) -> dict[str, Any]:
        return {name: _ReadParameter(name) for name in names}

    def shows(self, name: str, parameter: Tensor) -> bool:
        """Whether the forward computes with the local tensor of `parameter`: with that of one that is whole."""
        return is_dtensor(parameter) and all(placement.is_replicate() for placement in parameter.placements)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled is a forward, and a thread's count is nothing to guard
            return super().forward(*args, **kwargs)
        if not _forwards.running:
            _forwards.read = {}
        read = _forwards.read
        _forwards.running += 1
        try:
            result = super().forward(*args, **kwargs)
        finally:
            _forwards.running -= 1
        if not _forwards.running and read:
            for tensor in tree.tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(functools.partial(_count_writes, list(read.values())))
        return result


def _count_writes(parameters: list[Tensor], grad: Tensor) -> None:
    for parameter in parameters:
        local_of(parameter)
