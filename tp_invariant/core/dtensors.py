"""Parameters that are DTensors: read without dispatch, and given gradients that are DTensors too.

`to_local` and `from_local` make another tensor at every call, under which nobody would recognise the weight. So an
autograd function is given the DTensor itself, which autograd knows, computes with its local tensor, and wraps the local
gradient with the DTensor's own spec. `with_dtensors` makes such a function of one that knows plain tensors alone.

torch counts the writes to a DTensor, and not those to its local tensor that come through the DTensor: an optimizer's
step, `copy_`. What goes by the version of a weight (gemm/weights.py) has the local tensor. So `local_of` passes the
count on, and after an optimizer's step so is that of all its parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .differentiation import once_differentiable
from .torch_private import local_tensor, spec_of, version_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    kind = type(x)
    if kind is Tensor or kind is nn.Parameter or x is None:
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and here already if x is one

    return issubclass(kind, DTensor)


def prepare_dtensors() -> None:
    """Registers with torch, once in a process that has layers over a DeviceMesh, what it lacks of DTensors."""
    if not torch.compiler.is_compiling():  # layers, whose parameters these are, are made before
        _prepare_dtensors()


@functools.cache
def _prepare_dtensors() -> None:
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.experimental import register_sharding

    from .torch_private import StridedShard

    def is_any_true(x: Any) -> list[tuple[list[Any], list[Any]]]:
        """Ranks gather x, so that all have the answer; torch 2.11 cannot gather stacked pieces, whose ranks do not."""
        stacked = [placement for placement in x.placements if hasattr(placement, "split_factor")]
        return [([Replicate()], [Replicate()]), *(([Partial("max")], [placement]) for placement in stacked)]

    register_sharding(torch.ops.aten._is_any_true.default)(is_any_true)  # torch.autograd.detect_anomaly calls it
    torch.serialization.add_safe_globals([type(StridedShard(0, split_factor=2))])  # as later torches do


def local_of(x: Any) -> Any:
    """The local tensor of a DTensor, always the same object and outside of autograd; anything else as it is."""
    if not is_dtensor(x):
        return x
    local = local_tensor(x)
    if not torch.compiler.is_compiling():
        _pass_on([x])
    return local


def _pass_on(tensors: Sequence[DTensor]) -> None:
    """Counts at the local tensors what was written through DTensors."""
    written: list[Tensor] = []
    for x in tensors:
        local = local_tensor(x)
        if not x.is_inference() and not local.is_inference():  # inference tensors have no count
            version = version_of(x)
            if version != getattr(local, "_version_of_dtensor", 0):
                local._version_of_dtensor = version  # type: ignore[attr-defined]
                written.append(local)
    if written:
        increment_version(written)


def refuse_dtensor(x: Any, name: str) -> None:
    """For an activation: the library's functions compute with local tensors, and would take a part for the whole.

    Raises:
        TypeError: x is a DTensor. `name` says what it is.
    """
    if is_dtensor(x):
        raise TypeError(
            f"{name} is a DTensor of shape {tuple(x.shape)} on rank {x.device_mesh.get_rank()}, placed as "
            f"{x.placements}: activations are plain tensors. Pass this rank's part as x.to_local(), of a Partial one "
            "x.redistribute(..).to_local(); torch's own parallel styles give plain tensors with use_local_output=True"
        )


def as_local(x: Any) -> Any:
    """The local tensor of a DTensor for torch's own operators: a new view of it, whose gradient becomes x's."""
    if not is_dtensor(x):
        return x
    if torch.compiler.is_compiling():
        return x.to_local()
    return _Local.apply(x) if x.requires_grad and torch.is_grad_enabled() else local_of(x)


def grad_like(grad: Tensor, like: Any) -> Any:
    """A local gradient as that of `like`."""
    return type(like)(grad, spec_of(like), requires_grad=False) if is_dtensor(like) else grad


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.x = x
        ctx.set_materialize_grads(False)  # no gradient stays none: functional/partial_gradients.py
        local: Tensor = local_of(x)
        return local.view_as(local)  # autograd writes into what is returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        return None if grad is None else grad_like(grad.contiguous(), ctx.x)


def placed_like(leaf: Tensor, local: Tensor, like: DTensor) -> DTensor:
    """`like` over other memory: a DTensor of `local`, which is `leaf` outside of autograd and gets its gradient."""
    placed: DTensor = _Placed.apply(leaf, (local, like))  # in a tuple, in which autograd looks for no inputs
    placed.__dict__.update(like.__dict__)  # a parameter, with what it says of itself
    return placed


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, made_of: tuple[Tensor, DTensor]) -> Any:
        return grad_like(*made_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return local_of(grad), None


def as_dtensor(local: Tensor, like: tuple[DeviceMesh, tuple[Placement, ...]], name: str) -> DTensor:
    """An activation as a DTensor on a mesh with these placements. Its gradient is not added up over ranks.

    `name`: of what it is, for the error of a gradient that is Partial.
    """
    from torch.distributed.tensor import DTensor

    placed = DTensor.from_local(local, *like, run_check=False)
    if placed.requires_grad:
        placed.register_hook(functools.partial(_refuse_partial, name))
    return placed


def _refuse_partial(name: str, grad: Any) -> None:
    """torch would reduce it, in an order that is the transport's and not that of one rank."""
    if is_dtensor(grad) and any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"the gradient of {name} arrives as a DTensor placed as {grad.placements} on rank "
            f"{grad.device_mesh.get_rank()}: a sum over ranks that has not been added up, of an operation on a "
            "sharded DTensor and a whole one. It must be Shard or Replicate: compute with local tensors there "
            "(use_local_output=True)"
        )


def with_dtensors(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """`function` for arguments some of which are DTensors: it sees their local tensors, and gives local gradients.

    The nodes of the graph are those of the class that is returned, whose `of_plain` is `function`. The local gradients
    become those of the parameters as they are, so that `function` must return memory of its own.
    """
    # without its own once_differentiable, which is around it all
    local_backward = getattr(function.backward, "__wrapped__", function.backward)

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.dtensors = [(place, x) for place, x in enumerate(args) if is_dtensor(x)]
        return function.forward(ctx, *map(local_of, args))

    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        _pass_on([x for _, x in ctx.dtensors])  # so that autograd notices what was written to what is saved
        results = list(local_backward(ctx, *grads))
        for place, x in ctx.dtensors:
            if (grad := results[place]) is not None:
                results[place] = grad_like(grad.contiguous(), x)
        return tuple(results)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "of_plain": function}
    return type(function.__name__, (function,), methods)


# --- what other tools place ------------------------------------------------------------------------------------------


def sharded_already(model: nn.Module) -> str:
    """Why a model is known to be sharded by another tool, or this library, and what to do; "" if it is not known."""
    named = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, tensor in named if is_dtensor(tensor)), None)
    degree = getattr(model, "_tp_size", None)  # transformers'
    if name is None and degree in (None, 1):
        return ""
    what = f"it was loaded over {degree} ranks" if name is None else f"{name} is a DTensor"
    return (
        f"{what}: the model is sharded already. The full model is needed on every rank. If from_pretrained was given "
        "tp_plan=.., device_mesh=.. or distributed_config=.., leave them out and call tp_invariant.parallelize. If "
        "parallelize_module was called, import ColwiseParallel, RowwiseParallel and SequenceParallel from tp_invariant "
        "in place of torch.distributed.tensor.parallel, and do not call parallelize. Call fully_shard afterwards"
    )


def check_placements(x: DTensor) -> None:
    """Whether torch can put this DTensor's parts together again.

    Raises:
        ValueError: a dim of which each rank has several pieces (partition_stride) is cut by another mesh dim too, as
            fully_shard does unless it is told otherwise. The placements then say another order than the parts have, and
            `full_tensor()` and all that goes by placements give other values, silently.
    """
    if len(x.placements) > 1 and not _are_clear(x.placements, x.device_mesh.shape):
        raise ValueError(
            f"a parameter of shape {tuple(x.shape)} is placed as {x.placements} on {x.device_mesh}: each rank has "
            "several pieces of a dim (partition_stride) that fully_shard has cut again, so that torch would put it "
            "together in another order. Shard another dim over the data parallel ranks: fully_shard(.., "
            "shard_placement_fn=tp_invariant.fsdp_placement)"
        )


def _are_clear(placements: tuple[Any, ...], sizes: tuple[int, ...]) -> bool:
    for axis, placement in enumerate(placements):
        stride = getattr(placement, "split_factor", 1)
        if stride == 1:
            continue
        same = [i for i, other in enumerate(placements) if getattr(other, "dim", None) == getattr(placement, "dim", -1)]
        # FSDP2's own stride counts the parts that later mesh dims have made
        if len(same) > 1 and stride != math.prod(sizes[i] for i in same if i > axis):
            return False
    return True


_OFFERS = "_tp_invariant_offers_pieces"  # of an optimizer whose state dicts do


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for p in _dtensors_of(optimizer):
        if len(p.placements) > 1:
            check_placements(p)
        if _OFFERS not in optimizer.__dict__ and any(getattr(x, "split_factor", 1) > 1 for x in p.placements):
            from .pieces import offer_pieces_of_states  # which imports this module

            optimizer.__dict__[_OFFERS] = True
            optimizer.register_state_dict_post_hook(offer_pieces_of_states)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a layer's call a weight may be gathered ahead, which goes by the version as well."""
    if not torch.compiler.is_compiling():
        _pass_on(_dtensors_of(optimizer))


def _dtensors_of(optimizer: torch.optim.Optimizer) -> list[DTensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
