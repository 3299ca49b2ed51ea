"""Before a step of any optimizer: what takes a shard for a whole parameter is refused.

A plain shard looks to torch like any other tensor. An optimizer that computes sums over a whole parameter, and a scaler
that decides on each rank whether to step, give other results on each rank, without an error: they are refused by name.

torch.nn.utils.clip_grad_norm_ on plain shards scales by another norm on each rank. Nothing meets it itself, but the
gradients of replicated parameters differ between the ranks afterwards. So the ranks compare these, as
tp_invariant.clip_grad_norm_ does, before the first step of each optimizer (with TP_INVARIANT_CHECK=1 before every
step). What is not seen: clipping that begins to scale later, and models all of whose parameters are sharded.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..core.mode import is_call_check_enabled
from ..layers.grad_norm import ClipCall
from ..layers.parameters import is_sharded

# by the name of the class or of one that it derives from: other libraries have optimizers of these names, too
_NEED_WHOLE = {
    "muon": "makes whole matrices orthogonal: use tp_invariant.optim.Muon",
    "adafactor": "keeps means over the rows and columns of whole matrices: use AdamW",
    "lbfgs": "takes products of whole gradients: make the layers with tp_group as a DeviceMesh",
    "shampoo": "needs whole matrices: use tp_invariant.optim.Muon",
    "soap": "needs whole matrices: use tp_invariant.optim.Muon",
    "lamb": "scales by the norms of whole parameters: use AdamW",
    "lars": "scales by the norms of whole parameters: use SGD",
}
_COMPARED = "_tp_invariant_compared"  # of an optimizer: whether its ranks have compared their gradients
_FRAMES = 8  # between a scaler's step and this hook: torch's wrappers, a schedule's, a trainer's


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _refuse(optimizer)
    if not getattr(optimizer, _COMPARED, False) or is_call_check_enabled():
        _compare_gradients(optimizer)
        setattr(optimizer, _COMPARED, True)


def _refuse(optimizer: Optimizer) -> None:
    """Raises: TypeError: what steps plain shards takes them for whole parameters."""
    shard = next((p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)), None)
    if shard is None:
        return
    if not getattr(optimizer, "takes_shards", False):
        for kind in type(optimizer).__mro__:
            if (why := _NEED_WHOLE.get(kind.__name__.lower())) is not None:
                raise TypeError(f"{type(optimizer).__name__} of {_named(shard)}: {kind.__name__} {why}")
    scaler = _calling_scaler()
    if scaler is not None and type(scaler)._unscale_grads_ is torch.amp.GradScaler._unscale_grads_:
        raise TypeError(
            f"{type(scaler).__module__}.{type(scaler).__name__} steps {_named(shard)}: each rank would go by its own "
            "overflows, and one step where another skips. Use tp_invariant.optim.GradScaler, which has the same "
            "arguments, or make the layers with tp_group as a DeviceMesh"
        )


def _compare_gradients(optimizer: Optimizer) -> None:
    """Compares the gradients of replicated parameters as clip_grad_norm_ does.

    An optimizer may step parameters that clip_grad_norm_ refuses (sparse or complex gradients, DTensors whose
    placements are not enough, parameters that are sharded over unknown ranks): these are left out.
    """
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    call = ClipCall(everything, None, leave_out=True)
    if call.maximal_groups:
        call.agree(f"{type(optimizer).__name__}.step", {})


def _named(shard: Tensor) -> str:
    group: Any = getattr(shard, "tp_group", None)
    where = "" if group is None else f" on rank {group.rank} of {group.size}"
    return f"a parameter of shape {tuple(shard.shape)}{where}, which is a part of one (tensor_model_parallel=True)"


def _calling_scaler() -> torch.amp.GradScaler | None:
    """The scaler by whose step() the optimizer is being stepped. Nothing that torch hands to a hook says it."""
    steps = torch.amp.GradScaler.step.__code__
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code is steps:
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None


register_optimizer_step_pre_hook(_before_step)
