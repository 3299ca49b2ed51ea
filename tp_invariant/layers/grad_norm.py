"""Gradient clipping whose norm does not depend on the tensor-parallel degree.

A sum of squares over a sharded gradient is a sum that the degree splits. It is taken by leaves instead, which
grad_leaves.py has: what is here finds out which gradients those are and over which ranks each is sharded, from what the
parameters carry; has the ranks compare that (consistency/same_gradients.py); and scales. A DTensor brings its own
groups, those of its mesh, and says by its placements where its leaves are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.collectives import Group, gather_major, ranks_of, resolve_group
from ..consistency.same_gradients import Question, circles, compare
from ..core.dtensors import check_placements, is_dtensor
from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled
from ..functional import stock
from ..functional.main_grad import refuse_fused
from .grad_leaves import ALONE, folded_norm, leaf_dim, local_part, mesh_shards, scale
from .parameters import carried_group, groups_in_use, is_sharded, stride_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OWN_ERROR = "an error before the call"  # consistency/agreement.py shows it alone

_USUALLY = (
    "It is taken as whole, so every rank must have the same. Usually that is a plain norm (nn.LayerNorm, a model's "
    "own) on tokens that are sharded, where each rank sums over its own (take ParallelNorm or LayerNormLinear with "
    "sequence_parallel=True); other inputs on each rank; dropout on whole activations with another mask on each "
    "rank; a parameter that each rank uses for its own heads or features alone; or a sharded parameter that has lost "
    "its attributes (tp_invariant.parameters.mark_sharded sets them)"
)
_ACROSS = (
    "Layers that are sharded over smaller groups must hold the same values and get the same inputs in each of these "
    "groups, and their gradients must be summed over data parallel ranks before they are clipped"
)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    *,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients in place so that their norm over the whole model is at most max_norm, as torch's does.

    What a parameter carries says how it counts: with tensor_model_parallel=True (and partition_dim, partition_stride)
    it is sharded over its `tp_group`, as this library's layers set it, and every element of the full parameter counts
    once; otherwise it is whole and counts once. So a model may mix layers of different groups, whole ones among them. A
    tensor that is passed twice counts once (torch counts it twice). Every rank must pass the same parameters in the
    same order.

    Whole gradients must be the same on every rank. Ranks compare digests of them, in every call on CPUs; on GPUs in
    the first call of gradients of these shapes, and later without waiting, so that a difference is an error in the call
    after; with TP_INVARIANT_CHECK=1 always at once; never inside a CUDA graph. What they compare over are the groups
    that parameters carry and tp_group: a model of whole parameters alone is compared only if tp_group is given.

    DTensors, alone or among plain tensors, count each element of the full tensor once. Their leaves run along the dim
    of the last Shard among their placements, along dim 0 if all are Replicate, whatever the sizes of the mesh: so a
    full tensor has the same bits on [Shard(1)], on [Replicate(), Shard(1)], on FSDP2 x TP's [Shard(0), Shard(1)], on
    meshes of any size, and as a plain parameter of partition_dim 1. One Shard moves leaves only; where several cut a
    tensor, its gradient is gathered whole, one parameter at a time. A DTensor on a mesh without other ranks of its
    tensor-parallel group (fully_shard over data parallel ranks, of a layer that is sharded over tp_group) must have the
    attributes, which fully_shard drops: its full tensor is this rank's part then.

    Args:
        parameters: tensors with .grad; those without one are left out.
        max_norm: the largest norm left alone.
        tp_group: a ProcessGroup or 1-D DeviceMesh, needed for parameters alone that are sharded and carry no group, as
            Megatron-LM's own layers mark them. For others it is checked: sharded parameters must be so over its ranks.
        norm_type: 2.0 or inf.
        error_if_nonfinite: raise, on every rank, if the norm is NaN or infinite.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor, the same on every rank.

    Raises:
        ValueError: another norm_type; a parameter that is sharded over other ranks than tp_group's, or over nobody
            knows which; a DTensor that is Partial, not on this rank, or placed so that its part in the group is not
            clear; with the mode on, an L2 norm of gradients on several devices.
        TypeError: a gradient that is sparse or not floating point; a parameter whose tp_group is no group.
        RuntimeError: a norm that is not finite, with error_if_nonfinite; ranks that disagree, also in a whole gradient;
            a gradient that a layer has added into main_grad; a CUDA graph's capture without such a call of the same
            gradients before it, which makes the kernels' tables.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r} is not supported: choose 2.0 or inf")
    call = _Call(parameters, None if tp_group is None else resolve_group(tp_group))
    call.agree(
        "clip_grad_norm_", {"norm_type, max_norm and error_if_nonfinite": (norm_type, max_norm, error_if_nonfinite)}
    )
    with_grad = [held.parameter for held in call.with_grad]
    over = [held.over for held in call.with_grad]
    if not with_grad:
        return torch.tensor(0.0)
    if norm_type == math.inf:
        total = _largest(with_grad, over)
    elif is_tp_invariant_mode_enabled():
        _check_devices(call.with_grad, call.rank)
        total = folded_norm(with_grad, over)
    else:
        total = stock.grad_norm(with_grad, over)
    total = total.masked_fill(total.isnan(), math.nan)  # one NaN, whichever rank's and sum's it was
    call.agree_on(total)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}: it cannot be clipped")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = [local_part(p.grad) for p in with_grad if p.grad is not None]
    scale(grads, coefficient)
    if total.device.type == "cpu" and not torch.isfinite(total):  # see cross_entropy.py: a CPU makes several NaNs
        for grad in grads:
            grad.masked_fill_(grad.isnan(), math.nan)
    return total


# --- how each parameter is held -------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """A parameter, its place among those given, and the group over which its attributes say that it is sharded."""

    parameter: Tensor
    number: int
    over: Group

    def named(self, rank: int) -> str:
        return f"the gradient of parameter {self.number} with shape {tuple(self.parameter.shape)} on rank {rank}"


class _Call:
    """What a call is given, as this rank has it. What is wrong with it waits in `error` until all ranks know.

    leave_out: whether a parameter that clip_grad_norm_ refuses is left out instead.
    """

    def __init__(self, parameters: Iterable[Tensor] | Tensor, given: Group | None, *, leave_out: bool = False) -> None:
        everything = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.given = given
        self.error: Exception | None = None
        self.held: list[_Held] = []
        self.device = everything[0].device if everything else torch.device("cpu")
        groups = [] if given is None else [given]
        seen: set[int] = set()
        for index, p in enumerate(everything):
            if id(p) in seen:
                continue
            seen.add(id(p))
            over = ALONE
            try:
                if (carried := carried_group(p)) is not None:
                    groups.append(carried)
                over = _sharded_over(p, index, carried, given)
                if leave_out:
                    _check_grad(_Held(p, index, over), given, ALONE.rank)
            except (TypeError, ValueError, RuntimeError) as error:
                if leave_out:
                    continue
                self.error = self.error or error
            self.held.append(_Held(p, index, over))
        self.circles = circles(groups)
        self.rank = (given or next(iter(self.circles), ALONE)).rank
        self.with_grad = [h for h in self.held if h.parameter.grad is not None and h.parameter.grad.numel()]
        try:
            for held in self.held:
                _check_grad(held, given, self.rank)
        except (TypeError, ValueError, RuntimeError) as error:
            self.error = self.error or error

    def agree(self, who: str, options: Mapping[str, Any]) -> None:
        """Has the ranks compare the call and the gradients that they hold whole, then raises `error`."""
        if self.circles and self.held:
            compare([self._question(circle, who, options) for circle in self.circles], self.device, who)
        if self.error is not None:
            raise self.error

    def _question(self, circle: Group, who: str, options: Mapping[str, Any]) -> Question:
        if self.error is not None:
            text = f"{type(self.error).__name__}: {self.error}".replace(f" on rank {self.rank}", " here")
            # alike on all ranks that have one: each raises its own then
            return Question(circle, (_OWN_ERROR,), lambda: {_OWN_ERROR: text}, (), (), "")
        with_grad = {held.number for held in self.with_grad}
        gradients = [(held.number, _facts(held, circle) if held.number in with_grad else None) for held in self.held]
        mode = is_tp_invariant_mode_enabled()

        def told() -> dict[str, Any]:
            each = {
                f"the gradient of parameter {index}": facts and tuple(map(_plain, facts)) for index, facts in gradients
            }
            return {
                "the TP-invariant mode": mode,
                **{f"{name} of {who}": value for name, value in options.items()},
                **each,
            }

        whole = [held for held in self.with_grad if _is_whole_over(held, circle)]
        grads = [local_part(held.parameter.grad) for held in whole if held.parameter.grad is not None]
        names = [f"the gradient of parameter {h.number} with shape {tuple(h.parameter.shape)}" for h in whole]
        facts = mode, tuple(options.values()), tuple(gradients)
        return Question(circle, facts, told, grads, names, _USUALLY)

    def agree_on(self, total: Tensor) -> None:
        """Where layers are sharded over smaller groups than the one that compares, these may have come to different
        norms."""
        if all(held.over.size == 1 or held.over in self.circles for held in self.with_grad) and len(self.circles) < 2:
            return
        who, name = "clip_grad_norm_", "the norm of all gradients"
        asked = [Question(circle, (name,), lambda: {}, [total], [name], _ACROSS) for circle in self.circles]
        compare(asked, total.device, f"{who}, once each rank has its norm")


def _sharded_over(p: Tensor, index: int, carried: Group | None, given: Group | None) -> Group:
    """The group over whose ranks p's attributes say that it is sharded; ALONE if over none."""
    if not is_sharded(p):
        return ALONE
    where = f"parameter {index} with shape {tuple(p.shape)}"
    if leaf_dim(p) is None:
        rank = (carried or given or ALONE).rank
        raise ValueError(
            f"{where} on rank {rank} has tensor_model_parallel=True and "
            f"partition_dim={getattr(p, 'partition_dim', None)}: it must be from 0 to {p.dim() - 1}"
        )
    if carried is None:
        if given is not None:
            return given
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ALONE
        raise ValueError(
            f"{where} has tensor_model_parallel=True and carries no tp_group, so over which ranks it is sharded cannot "
            "be known: pass tp_group=.., or have the parameter say it with "
            "tp_invariant.parameters.mark_sharded(parameter, partition_dim, partition_stride, tp_group)"
        )
    if given is not None and ranks_of(given) != ranks_of(carried):
        raise ValueError(
            f"{where} is sharded over the ranks {ranks_of(carried)}, and tp_group has the ranks {ranks_of(given)}: "
            "leave tp_group out, since parameters carry their groups, or pass theirs"
        )
    return carried


def _is_whole_over(held: _Held, circle: Group) -> bool:
    """Whether all ranks of the circle have the same part of the gradient, as parameters and placements say."""
    if held.over.size > 1:
        return False
    grad = held.parameter.grad
    if not is_dtensor(grad):
        return True
    ranks = set(ranks_of(circle))
    return all(len(ranks.intersection(ranks_of(group))) < 2 for group, _ in mesh_shards(grad))


# --- what is checked ------------------------------------------------------------------------------------------------


def _facts(held: _Held, circle: Group) -> tuple:
    """What decides which errors follow and what is gathered: so ranks that differ in it get one now, and none waits
    for another."""
    p, over = held.parameter, held.over
    grad = p.grad
    assert grad is not None
    facts: tuple = (grad.dtype, p.shape, grad.layout, grad.device.type)
    if is_dtensor(grad):
        facts = *facts, str(grad.placements)
    if over.size > 1:
        ranks = "these ranks" if over is circle or over == circle else f"{over.size} ranks of another group"
        facts = *facts, f"sharded along dim {leaf_dim(p)}, stride {stride_of(p)}, over {ranks}"
    return facts


def _plain(fact: Any) -> Any:
    return tuple(fact) if isinstance(fact, torch.Size) else fact if isinstance(fact, str) else str(fact)


def _check_grad(held: _Held, given: Group | None, rank: int) -> None:
    grad = held.parameter.grad
    if grad is None:
        refuse_fused([held.parameter], "clip_grad_norm_", held.number)
        return
    if not grad.numel():
        return
    if grad.layout != torch.strided or not grad.is_floating_point():
        raise TypeError(f"{held.named(rank)} is {grad.layout} {grad.dtype}: only dense floating point is supported")
    if is_dtensor(grad):
        _check_dtensor(held, grad, given, rank)


def _check_devices(with_grad: list[_Held], rank: int) -> None:
    first = with_grad[0].parameter.grad
    for held in with_grad:
        grad = held.parameter.grad
        assert grad is not None and first is not None
        if grad.device != first.device:
            raise ValueError(
                f"{held.named(rank)} is on {grad.device}: it must be on {first.device}, where parameter "
                f"{with_grad[0].number}'s is"
            )


def _check_dtensor(held: _Held, grad: DTensor, given: Group | None, rank: int) -> None:
    p, mesh = held.parameter, grad.device_mesh
    check_placements(grad)
    me = dist.get_rank()
    on_mesh = set(mesh.mesh.flatten().tolist())
    own = held.over if held.over.size > 1 else given
    tp_ranks = set(ranks_of(own)) if own is not None else {me}
    if own is None and not hasattr(p, "tensor_model_parallel"):
        # nobody says what the parameter is a part of; its layer may be sharded over any group that this process uses
        tp_ranks.update(*(ranks_of(group) for group in groups_in_use(besides=on_mesh)))
    common = tp_ranks & on_mesh
    if any(placement.is_partial() for placement in grad.placements):
        wrong = (
            ": a Partial is a sum still to be taken, and taking it here would add on the wire. Redistribute the "
            "gradient to Shard or Replicate first; its bits are the same at every degree only if that sum's are"
        )
    elif mesh.get_coordinate() is None:
        wrong = f", which global rank {me} is not in: leave the parameter out there"
    elif len(common) > 1 and is_sharded(p):
        wrong = (
            f", which has ranks {sorted(common)} in common with tp_group, and the parameter has "
            "tensor_model_parallel=True: over these ranks the placements say how it is sharded, so unset the attribute"
        )
    elif common != tp_ranks and not hasattr(p, "tensor_model_parallel"):
        wrong = (
            f", without ranks {sorted(tp_ranks - common)} of tp_group, and nothing says whether these hold other parts "
            "or the same (fully_shard drops the attributes): set tensor_model_parallel, partition_dim, "
            "partition_stride and tp_group on the parameter, as tp_invariant.parameters.mark_sharded does"
        )
    else:
        return
    raise ValueError(
        f"{held.named(rank)} is a DTensor placed as {grad.placements} on the mesh {mesh.mesh.tolist()}{wrong}"
    )


def _largest(params: list[Tensor], over: list[Group]) -> Tensor:
    """The largest absolute value: a maximum rounds nothing, so any order gives the same bits."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [local_part(grad).float().abs().flatten() for grad in grads]
    each = [part.max() if part.numel() else part.new_zeros(()) for part in parts]
    largest = torch.stack([one.to(each[0].device) for one in each]).max()
    groups = [*over, *(group for grad in grads if is_dtensor(grad) for group, _ in mesh_shards(grad))]
    for group in dict.fromkeys(groups):
        largest = gather_major(largest, group).max()
    return largest


# --- with TP_INVARIANT_CHECK=1, also where nobody clips ---------------------------------------------------------------


def _check_before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step of any optimizer: compares the whole gradients that it is about to use, as clip_grad_norm_ does.

    What that refuses (sparse or complex gradients, DTensors that do not say enough, parameters that are sharded over
    nobody has said which ranks) an optimizer may well step: these are left out.
    """
    if torch.compiler.is_compiling() or not is_call_check_enabled():
        return
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    call = _Call(everything, None, leave_out=True)
    if call.circles:
        call.agree(f"{type(optimizer).__name__}.step", {})


register_optimizer_step_pre_hook(_check_before_step)
