"""Gradient clipping whose norm does not depend on the tensor-parallel degree.

The sum of squares of a sharded gradient would be split differently at each degree, so grad_partial_sums.py splits it
into partial sums whose boundaries do not depend on the degree. This file determines from the parameters' attributes
over which ranks each gradient is sharded, lets the ranks compare that (consistency/same_gradients.py), and scales the
gradients. For a DTensor the groups are those of its mesh, and its placements say how it is sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, OnMesh, gather_major, is_capturing, ranks_of, resolve_group
from ..comm.wire import gather_objects
from ..consistency.agreement import check_agreement, compare_environments, share_error
from ..consistency.compare import LOCAL_ERROR, group_device
from ..consistency.same_gradients import GradientComparison, compare_gradients, maximal_groups
from ..core.dtensors import check_placements, is_dtensor
from ..core.graph_breaks import outside_of_graphs
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.parameter_names import label_of
from ..functional import stock
from ..functional.main_grad import refuse_fused
from .grad_partial_sums import (
    SINGLE_RANK,
    HeldGradient,
    norm_of,
    partial_sums_of,
    partition_dim_of,
    scale,
)
from .parameters import carried_group, groups_in_use, is_sharded, stride_of
from .sequence_chunks import refuse_partial_sums

_USUAL_CAUSES = (
    "The parameter counts as replicated, so its gradient must be the same on every rank. Usual causes: a plain norm "
    "(nn.LayerNorm, a model's own) on sharded tokens, where each rank sums over its own tokens (use ParallelNorm or "
    "LayerNormLinear with tp_group and sequence_parallel=True); different inputs on each rank; dropout on whole "
    "activations with a different mask on each rank; a parameter that each rank uses for its own heads or features "
    "only; torch's clip_grad_norm_ on plain shards, whose norm is another one on each rank (use "
    "tp_invariant.clip_grad_norm_); or a sharded parameter that has lost its attributes "
    "(tp_invariant.parameters.mark_sharded sets them)"
)
_ACROSS_GROUPS_CAUSES = (
    "Layers that are sharded over smaller groups must hold the same values and get the same inputs in each of these "
    "groups, and their gradients must be summed over data parallel ranks before they are clipped"
)


@torch.no_grad()
@outside_of_graphs("it moves bytes between ranks, and a compiler may compute sums in another order")
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    *,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    pp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients in place so that their norm over the whole model is at most max_norm, as torch's does.

    A parameter's attributes determine how it counts. With tensor_model_parallel=True (and partition_dim,
    partition_stride), as this library's layers set them, it is sharded over its `tp_group`, and every element of the
    full parameter counts once. Without, it is replicated and counts once. So a model may mix layers of different
    groups and replicated layers. A tensor that is passed twice counts once (torch counts it twice). Every rank must
    pass the same parameters in the same order.

    Gradients of replicated parameters must be the same on every rank. The ranks compare digests of them: on CPUs in
    every call; on GPUs in the first call with gradients of these shapes, and with TP_INVARIANT_CHECK=1 in every call;
    inside a CUDA graph never. They compare over tp_group and over the groups in the parameters' attributes: a model
    without sharded parameters is compared only if tp_group is given.

    A DTensor, alone or among plain tensors, counts each element of its full tensor once. Its partial sums run along the
    dim of the last Shard among its placements, or along dim 0 if all are Replicate, independent of the mesh's sizes: so
    a full tensor has the same bits on [Shard(1)], on [Replicate(), Shard(1)], on FSDP2 x TP's [Shard(0), Shard(1)], on
    meshes of any size, and as a plain parameter with partition_dim 1. With one Shard only partial sums are gathered;
    with several, the whole gradient is gathered, one parameter at a time. If the mesh of a DTensor has no other rank of
    the parameter's tensor-parallel group (fully_shard over data-parallel ranks of a layer that is sharded over
    tp_group), its full tensor is this rank's shard; then the parameter must have the attributes, which fully_shard
    drops.

    With pp_group the norm is that of all stages of a pipeline together. Their partial sums are gathered and added in
    the order of the stages, so a model that is cut into stages has the norm of the whole model, to the bit, where each
    stage has the parameters that follow those of the stage before. With several stages on a rank, give the parameters
    of all of them: the attribute `pipeline_stage` of each, which data_parallel.Stage sets, is the number of its stage;
    without it the rank in pp_group is, and the bits are those of one order, not those of the whole model. A
    parameter that several stages hold (tied embeddings) counts once for each of them: on all but the first, set the
    attribute `shared = True` of this parameter, as Megatron-LM does. With pp_group such a one is scaled and does not
    count. Its gradient must be the sum over these stages already.

    Args:
        parameters: tensors with .grad; those without one are left out.
        max_norm: gradients with a norm of at most this are not scaled.
        tp_group: a ProcessGroup or 1-D DeviceMesh. Needed only for sharded parameters without a `tp_group` attribute,
            as those of Megatron-LM's own layers. Other sharded parameters must be sharded over the ranks of tp_group.
        pp_group: the ProcessGroup or 1-D DeviceMesh of the pipeline's stages; every stage must make the call.
        norm_type: 2.0 or inf.
        error_if_nonfinite: raise, on every rank, if the norm is NaN or infinite.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor, the same on every rank.

    Raises:
        ValueError: another norm_type; a parameter that is sharded over other ranks than those of tp_group, or over
            unknown ranks; a DTensor that is Partial, that is not on this rank, or whose placements do not determine
            how it is sharded over the group; a pp_group that holds ranks over which a parameter is sharded; with the
            mode on, an L2 norm of gradients on several devices.
        TypeError: a gradient that is sparse or not floating point; a parameter whose tp_group is not a group.
        RuntimeError: a norm that is not finite, with error_if_nonfinite; ranks that disagree, also in the gradient of
            a replicated parameter; a gradient of a part of the chunks of a sequence (context_parallel_); a gradient
            that a layer has added to main_grad; during a CUDA graph capture, no earlier call with the same gradients,
            which builds the kernels' tables.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type!r} is not supported: choose 2.0 or inf")
    call = ClipCall(parameters, None if tp_group is None else resolve_group(tp_group))
    stages = SINGLE_RANK if pp_group is None else resolve_group(pp_group)
    options = {"norm_type, max_norm and error_if_nonfinite": (norm_type, max_norm, error_if_nonfinite)}
    invariant = is_tp_invariant_mode_enabled()
    counted = call.with_grad
    if stages.size > 1:
        counted = [held for held in counted if not _is_shared(held.parameter)]
    own: dict[int, Tensor] = {}  # what of each stage of this rank is added up
    place = messages = call.device
    if stages.size > 1:
        messages = group_device(stages, call.device)
    try:
        refuse_partial_sums([held.parameter for held in call.with_grad], "clip_grad_norm_", "this call")
        _check_stages(call, stages)
        call.agree("clip_grad_norm_", options)
        if not counted and stages.size == 1:
            return torch.tensor(0.0)
        if counted and norm_type == math.inf:
            own = {0: _largest(counted).unsqueeze(0)}
        elif counted and invariant:
            _check_devices(counted, call.rank)
            own = {number: partial_sums_of(held) for number, held in _by_stage(counted, stages).items()}
    except (TypeError, ValueError, RuntimeError) as error:
        share_error(error, stages, messages, set())  # the other stages would wait
        raise
    if stages.size > 1:
        check_agreement({"the TP-invariant mode": invariant, **options}, stages, messages, set())
        place = _device_of_stages(call, stages)
    if norm_type == math.inf:
        total = torch.cat([torch.zeros(1, device=place), _of_all_stages(own, stages, place)]).max()
    elif invariant:
        total = norm_of(_of_all_stages(own, stages, place))
    else:
        total = stock.grad_norm([held.parameter for held in counted], [held.over for held in counted], stages, place)
    total = total.masked_fill(total.isnan(), math.nan)  # one NaN bit pattern, from whichever sum it came
    call.agree_on(total)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}: it cannot be clipped")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = [held.local for held in call.with_grad]
    scale(grads, coefficient)
    if total.device.type == "cpu" and not torch.isfinite(total):  # see cross_entropy.py: a CPU makes several NaNs
        for grad in grads:
            grad.masked_fill_(grad.isnan(), math.nan)
    return total


def _is_shared(parameter: Tensor) -> bool:
    """Whether another stage of a pipeline counts this parameter: Megatron-LM's mark."""
    return bool(getattr(parameter, "shared", False))


def _device_of_stages(call: ClipCall, stages: Group) -> torch.device:
    """Where the stages' norms are added: on the device of this stage's parameters, or, if it has none, of the others'.

    Raises:
        RuntimeError: on every stage, if some have parameters on CPUs and others on GPUs.
    """
    messages = group_device(stages, call.device)
    kind = 0 if not call.held else 2 if call.device.type == "cuda" else 1
    kinds = gather_major(torch.tensor([kind], device=messages), stages).flatten().tolist()
    if {1, 2} <= {*kinds}:
        on_cpus = [stage for stage, kind in enumerate(kinds) if kind == 1]
        raise RuntimeError(
            f"clip_grad_norm_ with pp_group: parameters of the stages {on_cpus} of {stages.size} are on CPUs, those "
            "of others on GPUs: all must be on the same kind of device"
        )
    if 2 in kinds:
        place = call.device if call.device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    else:
        place = call.device if 1 in kinds else messages
    compare_environments(stages, place)
    return place


def _by_stage(counted: Iterable[HeldGradient], stages: Group) -> dict[int, list[HeldGradient]]:
    """The gradients of each stage that this rank has."""
    of: dict[int, list[HeldGradient]] = {}
    for held in counted:
        number = getattr(held.parameter, "pipeline_stage", stages.rank) if stages.size > 1 else 0
        of.setdefault(number, []).append(held)
    return of


def _of_all_stages(own: Mapping[int, Tensor], stages: Group, place: torch.device) -> Tensor:
    """The vectors of all stages, in the order of their numbers, on a device; their lengths may differ."""
    mine = torch.cat([torch.zeros(0, device=place), *(x.to(place) for x in own.values())])
    if stages.size == 1:
        return mine
    lengths = gather_objects([(number, len(x)) for number, x in own.items()], stages)
    longest = max(sum(length for _, length in theirs) for theirs in lengths)
    vectors = [(-1, mine[:0])]
    for theirs, vector in zip(lengths, gather_major(F.pad(mine, (0, longest - len(mine))), stages), strict=True):
        ends = itertools.accumulate(length for _, length in theirs)
        vectors += [(number, vector[end - length : end]) for (number, length), end in zip(theirs, ends, strict=True)]
    return torch.cat([vector for _, vector in sorted(vectors, key=lambda one: one[0])])


# --- how each parameter is held -------------------------------------------------------------------------------------


class ClipCall:
    """The parameters of one call on this rank. An error is stored in `error` and raised once all ranks know of it.

    leave_out: which parameters are left out. If it is given, those that clip_grad_norm_ refuses are left out, too, and
        DTensors of which nothing says how they are sharded besides.
    numbers: the places of the parameters in the list that the user handed over, if these are not all of it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Tensor,
        given: Group | None,
        *,
        leave_out: Callable[[Tensor], bool] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        everything = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.given = given
        self.error: Exception | None = None
        self.held: list[HeldGradient] = []
        self.device = everything[0].device if everything else torch.device("cpu")
        groups = [] if given is None else [given]
        seen: set[int] = set()
        for index, p in zip(numbers or range(len(everything)), everything, strict=True):
            if id(p) in seen:
                continue
            seen.add(id(p))
            if leave_out is not None and (leave_out(p) or (is_dtensor(p) and not hasattr(p, "tensor_model_parallel"))):
                continue  # _check_dtensor would look at which other parameters are alive, on each rank by itself
            over = SINGLE_RANK
            try:
                if (replaced := vars(p).get("replaced_by")) is not None:
                    raise ValueError(
                        f"{label_of(p, index)} is the former {replaced[0]}, in whose place the model has a DTensor "
                        "since it was converted over a DeviceMesh: pass model.parameters() of now"
                    )
                if (carried := carried_group(p)) is not None:
                    groups.append(carried)
                over = _sharded_over(p, index, carried, given)
                if leave_out is not None:
                    _check_grad(HeldGradient.of(p, index, over), given, SINGLE_RANK.rank)
            except (TypeError, ValueError, RuntimeError) as error:
                if leave_out is not None:
                    continue
                self.error = self.error or error
            self.held.append(HeldGradient.of(p, index, over))
        self.maximal_groups = maximal_groups(groups)
        self.rank = (given or next(iter(self.maximal_groups), SINGLE_RANK)).rank
        self.with_grad = [held for held in self.held if held.grad is not None and not held.is_empty]
        try:
            for held in self.held:
                _check_grad(held, given, self.rank)
        except (TypeError, ValueError, RuntimeError) as error:
            self.error = self.error or error

    def agree(self, caller: str, options: Mapping[str, Any]) -> None:
        """Compares the call and the gradients of replicated parameters across ranks, then raises `error`, if any."""
        if self.maximal_groups and self.held:
            comparisons = [self.comparison(compared_group, caller, options) for compared_group in self.maximal_groups]
            compare_gradients(comparisons, self.device, caller)
        if self.error is not None:
            raise self.error

    def comparison(self, compared_group: Group, caller: str, options: Mapping[str, Any]) -> GradientComparison:
        """What is compared over a group."""
        if self.error is not None:
            text = f"{type(self.error).__name__}: {self.error}".replace(f" on rank {self.rank}", " here")
            # equal on all ranks that have an error: then each rank raises its own
            return GradientComparison(compared_group, {LOCAL_ERROR: text}, (), (), "")
        facts = {
            "the TP-invariant mode": is_tp_invariant_mode_enabled(),
            **{f"{name} of {caller}": value for name, value in options.items()},
        }
        with_grad = {held.number for held in self.with_grad}
        for held in self.held:
            of_gradient = _facts(held, compared_group) if held.number in with_grad else None
            facts[f"the gradient of {held.label}"] = of_gradient
        whole = _whole_over(self.with_grad, compared_group)
        names = [f"the gradient of {held.label} with shape {tuple(held.parameter.shape)}" for held in whole]
        return GradientComparison(compared_group, facts, [held.local for held in whole], names, _USUAL_CAUSES)

    def agree_on(self, total: Tensor) -> None:
        """Compares the norm across ranks if layers are sharded over smaller groups than the one that compares: such
        groups may have computed different norms."""
        if (
            all(held.over.size == 1 or held.over in self.maximal_groups for held in self.with_grad)
            and len(self.maximal_groups) < 2
        ):
            return
        caller, name = "clip_grad_norm_", "the norm of all gradients"
        comparisons = [
            GradientComparison(compared_group, {"the call": name}, [total], [name], _ACROSS_GROUPS_CAUSES)
            for compared_group in self.maximal_groups
        ]
        compare_gradients(comparisons, total.device, f"{caller}, once each rank has its norm")


def _sharded_over(p: Tensor, index: int, carried: Group | None, given: Group | None) -> Group:
    """The group over which p is sharded according to its attributes; SINGLE_RANK if it is not sharded."""
    if not is_sharded(p):
        return SINGLE_RANK
    where = f"{label_of(p, index)} with shape {tuple(p.shape)}"
    if partition_dim_of(p) is None:
        rank = (carried or given or SINGLE_RANK).rank
        raise ValueError(
            f"{where} on rank {rank} has tensor_model_parallel=True and "
            f"partition_dim={getattr(p, 'partition_dim', None)}: it must be from 0 to {p.dim() - 1}"
        )
    if carried is None:
        if given is not None:
            return given
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return SINGLE_RANK
        raise ValueError(
            f"{where} has tensor_model_parallel=True and carries no tp_group, so over which ranks it is sharded cannot "
            "be known: pass tp_group=.., or set the attribute with "
            "tp_invariant.parameters.mark_sharded(parameter, partition_dim, partition_stride, tp_group)"
        )
    if given is not None and ranks_of(given) != ranks_of(carried):
        raise ValueError(
            f"{where} is sharded over the ranks {ranks_of(carried)}, and tp_group has the ranks {ranks_of(given)}: "
            "leave tp_group out, since parameters carry their groups, or pass theirs"
        )
    return carried


def _whole_over(all_held: list[HeldGradient], compared_group: Group) -> list[HeldGradient]:
    """Those of which all ranks of the group hold the same part of the gradient, by attributes and placements."""
    ranks = set(ranks_of(compared_group))
    return [
        held
        for held in all_held
        if held.over.size == 1
        and (held.layout is None or all(len(ranks.intersection(ranks_of(g))) < 2 for g, _ in held.layout.shards))
    ]


# --- what is checked ------------------------------------------------------------------------------------------------


def _facts(held: HeldGradient, compared_group: Group) -> tuple[Any, ...]:
    """What decides which errors are raised later and what is gathered. If ranks differ in it, every rank raises an
    error now, so that no rank waits for another."""
    p, over, local = held.parameter, held.over, held.local
    facts: tuple[Any, ...] = str(local.dtype), tuple(p.shape), str(local.layout), local.device.type
    facts += () if held.layout is None else (held.layout.text,)
    facts += ("shared=True",) if _is_shared(p) else ()
    if over.size > 1:
        ranks = "these ranks" if over == compared_group else f"{over.size} ranks of another group"
        facts += (f"sharded along dim {partition_dim_of(p)}, stride {stride_of(p)}, over {ranks}",)
    return facts


def _check_grad(held: HeldGradient, given: Group | None, rank: int) -> None:
    local = held.local
    if local is None:
        refuse_fused([(held.label, held.parameter)], "clip_grad_norm_")
    elif not held.is_empty:
        if local.layout != torch.strided or not local.is_floating_point():
            raise TypeError(
                f"{held.named(rank)} is {local.layout} {local.dtype}: only dense floating point is supported"
            )
        if held.layout is not None:
            _check_dtensor(held, held.layout.mesh, given, rank)


def _check_stages(call: ClipCall, stages: Group) -> None:
    if stages.size == 1:
        return
    if is_capturing():
        raise RuntimeError("clip_grad_norm_ with pp_group cannot be captured in a CUDA graph: the host reads lengths")
    meshes = {held.layout.mesh.ranks for held in call.with_grad if held.layout is not None}
    sharded = [*map(ranks_of, call.maximal_groups), *meshes]
    me = dist.get_rank()
    for ranks in sharded:
        if common := sorted({*ranks} & {*ranks_of(stages)} - {me}):
            raise ValueError(
                f"pp_group has the ranks {ranks_of(stages)}, and rank {me} shares parameters with {common} of them: "
                "it must have one rank of each stage"
            )


def _check_devices(with_grad: list[HeldGradient], rank: int) -> None:
    first = with_grad[0].local.device
    for held in with_grad:
        if held.local.device != first:
            raise ValueError(
                f"{held.named(rank)} is on {held.local.device}: it must be on {first}, as that of "
                f"{with_grad[0].label} is"
            )


def _check_dtensor(held: HeldGradient, its_mesh: OnMesh, given: Group | None, rank: int) -> None:
    p, grad, mesh = held.parameter, held.grad, held.grad.device_mesh
    check_placements(grad)
    me = dist.get_rank()
    mesh_ranks, groups = its_mesh
    own = held.over if held.over.size > 1 else given
    tp_ranks = set(ranks_of(own)) if own is not None else {me}
    before = 2 if grad.placements[0].is_replicate() else 1  # mesh dims of fully_shard's, which come first
    if own is None and not hasattr(p, "tensor_model_parallel") and mesh.ndim <= before:
        # unknown whether the parameter is a shard: its layer may be sharded over any group that this process uses
        tp_ranks.update(*(ranks_of(group) for group in groups_in_use(besides=mesh_ranks)))
    common = tp_ranks & mesh_ranks
    if any(placement.is_partial() for placement in grad.placements):
        wrong = (
            ": a Partial is a sum that is not yet reduced, and reducing it here would add in a collective. "
            "Redistribute the gradient to Shard or Replicate first; its bits are the same at every degree only if "
            "those of the sum are"
        )
    elif not groups:
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


def _largest(every: list[HeldGradient]) -> Tensor:
    """The largest absolute value: a maximum rounds nothing, so any order gives the same bits."""
    parts = [held.local.float().abs().flatten() for held in every]
    each = [part.max() if part.numel() else part.new_zeros(()) for part in parts]
    largest = torch.stack([one.to(each[0].device) for one in each]).max()
    of_meshes = [group for held in every if held.layout is not None for group, _ in held.layout.shards]
    for group in dict.fromkeys([*[held.over for held in every], *of_meshes]):
        largest = gather_major(largest, group).max()
    return largest
