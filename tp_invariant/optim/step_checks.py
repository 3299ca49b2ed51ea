"""Before an optimizer's first step: are the gradients of replicated parameters the same on all ranks?

torch.nn.utils.clip_grad_norm_ on plain shards scales by another norm on each rank, and a module in a sequence-parallel
region that knows nothing of it gets a part of its gradient: afterwards the gradients of whole parameters differ between
the ranks. So with the mode on, before the first step of each optimizer that has gradients and a learning rate other
than 0, the ranks compare those of the parameters that carry a `tp_group`, each over this group, and of those that say
nothing, over the group of the others if that is one. Clipping that begins to scale later is not noticed, nor are models
all of whose other parameters are sharded, nor the mode off. With TP_INVARIANT_CHECK=1 every step compares all
parameters, in both modes, as tp_invariant.clip_grad_norm_ does, but for those whose `tp_group` is None: no other rank
has anything of them.

From its first step on, torch.distributed.checkpoint is refused an optimizer's state of plain shards, which it would
write as whole tensors (layers/saved_shards.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..comm.collectives import Group, is_capturing
from ..consistency.same_gradients import compare_gradients, in_common_order, maximal_groups
from ..core.dtensors import is_dtensor
from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled
from ..core.parameter_names import name_parameters
from ..layers.grad_norm import ClipCall
from ..layers.parameters import carried_group, is_sharded
from ..layers.saved_shards import refuse_to_save

_WAY_OUT = (
    "Of a parameter that is meant to differ between these ranks, say so: parameter.tp_group = None and "
    "parameter.tensor_model_parallel = False"
)
_COMPARED = "_tp_invariant_compared"  # of an optimizer: the groups whose ranks have compared its gradients
_REFUSES_SAVES = "_tp_invariant_refuses_saves"  # of an optimizer: that its state dicts have the hook below


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _watch_states(optimizer)
    if is_capturing():
        return
    if is_call_check_enabled():
        _compare_all(optimizer)
    elif is_tp_invariant_mode_enabled():
        _compare_replicated(optimizer)


def _watch_states(optimizer: Optimizer) -> None:
    if _REFUSES_SAVES not in optimizer.__dict__ and any(map(is_sharded, _parameters(optimizer))):
        optimizer.__dict__[_REFUSES_SAVES] = True
        optimizer.register_state_dict_post_hook(_refuse_to_save_state)


def _refuse_to_save_state(optimizer: Optimizer, _: Any) -> None:
    for p in _parameters(optimizer):
        group = carried_group(p) if is_sharded(p) else None
        if group is not None:
            for value in optimizer.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    refuse_to_save(value, group)


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
    _take_names(optimizer)
    call = ClipCall(
        _parameters(optimizer), None, leave_out=lambda p: not is_sharded(p) and getattr(p, "tp_group", p) is None
    )
    if call.maximal_groups and not _is_idle(optimizer):
        _compare(optimizer, dict.fromkeys(call.maximal_groups, call))


def _compare_replicated(optimizer: Optimizer) -> None:
    """Compares the gradients of parameters that ranks hold whole, over these ranks.

    Each parameter is compared over its own group alone: groups may be parts of one another, and get other inputs, as
    experts do. A group counts as compared once there were gradients, which all its ranks know alike: were they not the
    same parameters' on all of them, the comparison would have raised.
    """
    parameters = _parameters(optimizer)
    over = maximal_groups([group for p in parameters if (group := carried_group(p)) is not None])
    others = over[0] if len(over) == 1 else None  # of parameters that say nothing
    done: set[Group] = optimizer.__dict__.setdefault(_COMPARED, set())
    held: dict[Group, dict[int, Tensor]] = {}  # by place
    for number, p in enumerate(parameters):
        group = None if is_sharded(p) else carried_group(p)
        if not hasattr(p, "tp_group") and not is_sharded(p) and not is_dtensor(p):
            group = others
        if p.requires_grad and group is not None and group.size > 1 and group not in done:
            held.setdefault(group, {})[number] = p
    if held and not _is_idle(optimizer):
        _take_names(optimizer)
        calls = {
            group: ClipCall(held[group].values(), None, leave_out=lambda p: False, numbers=[*held[group]])
            for group in in_common_order(held)
        }
        _compare(optimizer, calls)
        done.update(group for group, call in calls.items() if call.with_grad)


def _compare(optimizer: Optimizer, calls: Mapping[Group, ClipCall]) -> None:
    caller = f"{type(optimizer).__name__}.step"
    comparisons = [call.comparison(group, caller, {}) for group, call in calls.items()]
    comparisons = [one._replace(why=f"{one.why}. {_WAY_OUT}") for one in comparisons]
    compare_gradients(comparisons, _parameters(optimizer)[0].device, caller, every_call=True)


def _take_names(optimizer: Optimizer) -> None:
    """Stores the names of an optimizer that was made of named_parameters() on parameters that have none."""
    for group in optimizer.param_groups:
        named = zip(group.get("param_names", ()), group["params"], strict=False)
        name_parameters((name, p) for name, p in named if not hasattr(p, "name_in_model"))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


register_optimizer_step_pre_hook(_before_step)
