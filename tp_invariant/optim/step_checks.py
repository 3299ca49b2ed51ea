"""Before a step of any optimizer: what takes a shard for a whole parameter is refused.

A plain shard looks to torch like any other tensor. An optimizer that computes sums over a whole parameter, and a scaler
that decides on each rank whether to step, give other results on each rank, without an error: they are refused by name.

torch.nn.utils.clip_grad_norm_ on plain shards scales by another norm on each rank, and a module in a sequence-parallel
region that knows nothing of it gets a part of its gradient. Nothing meets either itself, but the gradients of whole
parameters differ between the ranks afterwards. So with the mode on, before the first step of each optimizer that has
gradients and a learning rate other than 0, the ranks compare those of the parameters that carry a `tp_group`, each over
this group, and of those that say nothing, over the group of the others if that is one. The same steps find whether the
optimizer depends on where a parameter is cut (cuts.py). What is not seen: clipping that begins to scale later, models
all of whose other parameters are sharded, and the mode off. With TP_INVARIANT_CHECK=1 every step compares all
parameters, in both modes, as tp_invariant.clip_grad_norm_ does, but for those whose `tp_group` is None: no other rank
has anything of them.

From its first step on, an optimizer's state dicts are looked at, too: torch.distributed.checkpoint would write its
shards as whole tensors (layers/saved_shards.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..comm.collectives import Group, is_capturing
from ..consistency.same_gradients import compare, in_common_order, maximal_groups
from ..core.dtensors import is_dtensor
from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled
from ..layers.grad_norm import ClipCall
from ..layers.parameters import carried_group, is_sharded
from ..layers.saved_shards import remember
from .cuts import check_cuts, shard_that_is_no_part

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
_WAY_OUT = (
    "Of a parameter that is meant to differ between these ranks, say so: parameter.tp_group = None and "
    "parameter.tensor_model_parallel = False"
)
_COMPARED = "_tp_invariant_compared"  # of an optimizer: the groups whose ranks have compared its gradients
_REMEMBERED = "_tp_invariant_remembered"  # of an optimizer: that the tensors in its state dicts are remembered
_SETTLED = "_tp_invariant_settled"  # of an optimizer: its parameters, when all their groups had been compared
_FRAMES = 8  # between a scaler's step and this hook: torch's wrappers, a schedule's, a trainer's


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _refuse(optimizer)
    if is_capturing():
        return
    if is_call_check_enabled():
        if is_tp_invariant_mode_enabled() and not _is_idle(optimizer):
            _try(optimizer)
        _compare_all(optimizer)
    elif is_tp_invariant_mode_enabled():
        _compare_replicated(optimizer)


def _refuse(optimizer: Optimizer) -> None:
    """Raises: TypeError: what steps plain shards takes them for whole parameters."""
    shard = next((p for group in optimizer.param_groups for p in group["params"] if is_sharded(p)), None)
    if shard is None:
        return
    if _REMEMBERED not in optimizer.__dict__:
        optimizer.__dict__[_REMEMBERED] = True
        optimizer.register_state_dict_post_hook(_remember_state)
    if not getattr(optimizer, "takes_shards", False):
        for kind in type(optimizer).__mro__:
            name = kind.__name__.lower()
            if (why := _NEED_WHOLE.get("muon" if "muon" in name else name)) is not None:  # MuonWithAuxAdam, ..
                raise TypeError(
                    f"{type(optimizer).__name__} of {_named(shard)}: {kind.__name__} {why}. An optimizer that knows of "
                    "shards says so by an attribute, takes_shards = True"
                )
    scaler = _calling_scaler()
    if scaler is not None and type(scaler)._unscale_grads_ is torch.amp.GradScaler._unscale_grads_:
        raise TypeError(
            f"{type(scaler).__module__}.{type(scaler).__name__} steps {_named(shard)}: each rank would go by its own "
            "overflows, and one step where another skips. Use tp_invariant.optim.GradScaler, which has the same "
            "arguments, or make the layers with tp_group as a DeviceMesh"
        )


def _remember_state(optimizer: Optimizer, _: Any) -> None:
    for p in _parameters(optimizer):
        group = carried_group(p) if is_sharded(p) else None
        if group is not None:
            for value in optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    remember(value, group)


def _try(optimizer: Optimizer) -> None:
    """Raises: TypeError, ValueError: on small parameters and parts of them the optimizer gives other elements."""
    if (found := shard_that_is_no_part(optimizer)) is not None:
        shard, dim = found
        raise TypeError(
            f"{type(optimizer).__name__} of {_named(shard)}: of a part along dim {dim} it makes other elements than of "
            "the whole parameter, as a trial with small ones has shown. It computes with several elements of a "
            "parameter (a norm, a block's statistics, a matrix), or with random numbers, so that what it trains would "
            "depend on the degree. Use AdamW, SGD or another elementwise one, or tp_invariant.optim.Muon; or make the "
            "layers with tp_group as a DeviceMesh, where torch's operations on parameters are right in value. An "
            "optimizer that knows of shards says so by an attribute, takes_shards = True"
        )
    check_cuts(optimizer)


def _is_idle(optimizer: Optimizer) -> bool:
    """Whether every learning rate is 0: get_optimizer_state_dict steps so to make the state, perhaps on one rank."""
    rates = [group.get("lr") for group in optimizer.param_groups]  # None where an optimizer has a schedule of its own
    return all(rate is not None and float(rate) == 0 for rate in rates)


def _compare_all(optimizer: Optimizer) -> None:
    """Compares the gradients of replicated parameters as clip_grad_norm_ does.

    An optimizer may step parameters that clip_grad_norm_ refuses (sparse or complex gradients, DTensors whose
    placements are not enough, parameters that are sharded over unknown ranks): these are left out, as those are which
    say that no other rank has anything of them.
    """
    call = ClipCall(
        _parameters(optimizer), None, leave_out=lambda p: not is_sharded(p) and getattr(p, "tp_group", p) is None
    )
    if call.maximal_groups and not _is_idle(optimizer):
        _compare(optimizer, dict.fromkeys(call.maximal_groups, call), _WAY_OUT)


def _compare_replicated(optimizer: Optimizer) -> None:
    """Compares the gradients of parameters that ranks hold whole, over these ranks, and looks at the optimizer.

    Each parameter is compared over its own group alone: groups may be parts of one another, and get other inputs, as
    experts do. A group counts as compared once there were gradients, which all its ranks know alike: were they not the
    same parameters' on all of them, the comparison would have raised. Once all groups are, later steps of the same
    parameters look at nothing but these being the same.
    """
    parameters = _parameters(optimizer)
    settled: list[Tensor] = optimizer.__dict__.get(_SETTLED, [])
    if len(settled) == len(parameters) and all(map(is_, settled, parameters)):
        return
    if not _is_idle(optimizer):
        _try(optimizer)
    over = maximal_groups([group for p in parameters if (group := carried_group(p)) is not None])
    others = over[0] if len(over) == 1 else None  # of parameters that say nothing
    done: set[Group] = optimizer.__dict__.setdefault(_COMPARED, set())
    held: dict[Group, list[Tensor]] = {}
    left = False
    for p in parameters:
        group = None if is_sharded(p) else carried_group(p)
        if not hasattr(p, "tp_group") and not is_sharded(p) and not is_dtensor(p):
            group = others
        if group is not None and group.size > 1 and group not in done:
            left = True
            if p.requires_grad:
                held.setdefault(group, []).append(p)
    if not left:
        optimizer.__dict__[_SETTLED] = parameters
    if held and not _is_idle(optimizer):
        calls = {group: ClipCall(held[group], None, leave_out=lambda p: False) for group in in_common_order(held)}
        _compare(optimizer, calls, f"Parameters are numbered among the replicated ones of this group. {_WAY_OUT}")
        done.update(group for group, call in calls.items() if call.with_grad)


def _compare(optimizer: Optimizer, calls: Mapping[Group, ClipCall], why: str) -> None:
    caller = f"{type(optimizer).__name__}.step"
    questions = [call.question(group, caller, {}) for group, call in calls.items()]
    questions = [question._replace(why=f"{question.why}. {why}") for question in questions]
    compare(questions, _parameters(optimizer)[0].device, caller, at_once=True)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


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
