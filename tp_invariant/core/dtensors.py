"""Parameters that are DTensors: read without dispatch, and given gradients that are DTensors too.

A DTensor carries its local tensor as an attribute, which costs nothing to read; `to_local` and `from_local` cost a
hundred times as much and make another tensor at every call, under which nobody would recognise the weight. So an
autograd function is given the DTensor itself, which autograd knows, computes with its local tensor, and wraps the local
gradient with the DTensor's own spec. `with_dtensors` makes such a function of one that knows plain tensors alone.

torch counts the writes to a DTensor (`_version`), and not those to its local tensor that come through the DTensor: an
optimizer's step, `copy_`. What goes by the version of a weight (gemm/weights.py) has the local tensor. So
`local_of` passes the count on, and after an optimizer's step so is that of all its parameters.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .differentiation import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_is_known: dict[type, bool] = {}


def is_dtensor(x: Tensor | None) -> TypeGuard[DTensor]:
    kind = type(x)
    if kind is Tensor or kind is nn.Parameter or x is None:
        return False
    # without a look at what is known: compiled code that had looked would be compiled again when that grows
    known = None if torch.compiler.is_compiling() else _is_known.get(kind)
    return _is_of_dtensors(kind) if known is None else known


def expect_dtensors(ranks: Sequence[int]) -> None:
    """Mends what torch does with DTensors on the mesh of layers, which has these ranks (pieces.py, random_fills.py),
    before there is one."""
    if torch.compiler.is_compiling():  # layers, whose parameters these are, are made before
        return
    from torch.distributed.tensor import DTensor

    from .random_fills import note_mesh

    note_mesh(ranks)
    if DTensor not in _is_known:
        _is_of_dtensors(DTensor)


def _is_of_dtensors(kind: type) -> bool:
    from torch.distributed.tensor import DTensor  # slow to import, and here already if x is one

    found = issubclass(kind, DTensor)
    if not torch.compiler.is_compiling():
        _is_known[kind] = found
        if found:
            from .local_operators import shorten  # these import this module
            from .pieces import mend_torch
            from .random_fills import mend_fills

            mend_torch()
            mend_fills()
            shorten()
    return found


def local_of(x: Any) -> Any:
    """The local tensor of a DTensor, always the same object and outside of autograd; anything else as it is."""
    if not is_dtensor(x):
        return x
    return x._local_tensor if torch.compiler.is_compiling() else _passed_on(x)


def _passed_on(x: DTensor) -> Tensor:
    """`local_of` of what is known to be a DTensor, in eager mode."""
    local = x._local_tensor
    try:
        version = x._version
    except RuntimeError:  # an inference tensor, which has none: to ask first takes as long as the rest
        return local
    if version != getattr(local, "_version_of_dtensor", 0) and not local.is_inference():
        local._version_of_dtensor = version  # type: ignore[attr-defined]
        increment_version(local)
    return local


def _pass_on_all(tensors: Sequence[Tensor]) -> None:
    """`local_of` of many tensors, which takes less time than one by one."""
    written: list[Tensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # else torch takes four times as long to tell a DTensor's version
        for x in tensors:
            if is_dtensor(x) and not x.is_inference() and not x._local_tensor.is_inference():
                local, version = x._local_tensor, x._version
                if version != getattr(local, "_version_of_dtensor", 0):
                    local._version_of_dtensor = version  # type: ignore[attr-defined]
                    written.append(local)
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
    return new_dtensor(type(like), grad, like._spec) if is_dtensor(like) else grad


def new_dtensor(kind: Any, local: Tensor, spec: Any) -> Any:
    """A DTensor with this local tensor and spec, of the class DTensor itself or of one that derives from it.

    DTensor.__new__ sets everything. Its __init__ only tells torch.export of the call, and takes longer than __new__.
    """
    return kind(local, spec, requires_grad=False) if torch.compiler.is_compiling() else new_in_eager(kind, local, spec)


def new_in_eager(kind: Any, local: Tensor, spec: Any) -> Any:
    """`new_dtensor` where nothing is traced: to ask takes as long as what else is done here."""
    if kind.__module__ != "torch.distributed.tensor":
        return kind(local, spec, requires_grad=False)
    return kind.__new__(kind, local, spec, requires_grad=False)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.x = x
        ctx.set_materialize_grads(False)  # no gradient stays none: functional/partial_gradients.py
        local = local_of(x)
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


def _references(grad: Any) -> int:
    return sys.getrefcount(grad)


def _references_of_new() -> int:
    new = object()
    return _references(new)


_ALONE = _references_of_new()  # to what one function has made and another is given


def _is_ours(grad: Any) -> bool:
    """Whether nobody else holds a gradient: a gemm_fn may keep what it returned. autograd sees the DTensor alone."""
    return sys.getrefcount(grad) <= _ALONE and grad._use_count() <= 1 and grad.is_contiguous()


def with_dtensors(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """`function` for arguments some of which are DTensors: it sees their local tensors, and gives local gradients.

    A node of the graph is one of `function` too (`_backward_cls`), and `of_plain` says which.
    """

    # without its own once_differentiable, which is around it all
    local_backward = getattr(function.backward, "__wrapped__", function.backward)

    def forward(ctx: Any, *args: Any) -> Any:
        dtensors, plain = [], list(args)
        for place, x in enumerate(args):
            if is_dtensor(x):
                plain[place] = _passed_on(x)
                dtensors.append((place, x))
        ctx.dtensors = dtensors
        return function.forward(ctx, *plain)

    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        dtensors = ctx.dtensors
        for _, x in dtensors:
            _passed_on(x)  # so that autograd notices what was written to what is saved, as of plain tensors
        found = list(local_backward(ctx, *grads))
        for place, x in dtensors:
            grad, found[place] = found[place], None
            if grad is None:
                continue
            if not _is_ours(grad):
                grad = grad.clone(memory_format=torch.contiguous_format)
            found[place] = new_in_eager(type(x), grad, x._spec)
        return tuple(found)

    name = function.__name__
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    other: Any = type(name, (function,), {**methods, "of_plain": function})
    parts = {"_forward_cls": other, "_autograd_function_id": other._backward_cls._autograd_function_id}
    other._backward_cls = type(f"{name}Backward", (function._backward_cls,), parts)
    return other


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


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if is_dtensor(p) and len(p._spec.placements) > 1:
                    check_placements(p)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a layer's call a weight may be gathered ahead, which goes by the version as well."""
    if not torch.compiler.is_compiling():
        _pass_on_all([p for group in optimizer.param_groups for p in group["params"]])


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
