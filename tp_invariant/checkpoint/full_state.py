"""Full state dicts: those of the unsharded model, and loading them; full_optimizer_state.py has the optimizer's.

Full tensors do not depend on the degree, so any degree can load what another one has saved. They are gathered one at a
time, but the whole model passes through each rank's memory; save_load.py writes shards instead.

Replicated tensors (parameters, buffers) are first compared by 64-bit hashes, because only one rank's copy is used, and
if copies differ it is not known which is right. This costs a pass over these tensors and one gather.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, on_mesh, ranks_of, resolve_group
from ..comm.meeting import on_all_ranks
from ..comm.wire import gather_objects
from ..consistency.agreement import check_agreement
from ..consistency.differences import NOTHING, format_unnamed, format_values, ranks_by_value
from ..core.bits import raw_bytes, tensor_hash
from ..core.dtensors import check_placements, is_dtensor, local_of
from ..core.layout import piece_sizes
from ..core.pieces import pieces_of
from ..core.torch_private import process_groups, tree
from ..layers.parameters import ShardSpec, is_over_data, named_shard_specs
from .stages import gather_stages, state_for_stage

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
WHOLE = ShardSpec(Group(None, 0, 1), None, 1)
_SHOWN = 5
_EVERY_RANK = "Do not call it under `if rank == 0`: each rank has its own part to give"
_ERRORS = {error.__name__: error for error in (ValueError, TypeError)}  # error_of_ranks keeps these types


@dataclass(frozen=True)
class Entry:
    """This rank's part of a tensor, and how the tensor is sharded."""

    tensor: Tensor
    spec: ShardSpec
    placed: DTensor | None = None  # what `tensor` is the local part of, where fully_shard has cut it too

    @property
    def full_shape(self) -> torch.Size:
        spec, placed = self.spec, self.placed
        shape = list(self.tensor.shape if placed is None else placed.shape)
        if spec.dim is not None:
            shape[spec.dim] = shape[spec.dim] * (1 if placed is not None else spec.group.size) - spec.padding
        return torch.Size(shape)

    @property
    def parts(self) -> int:
        """In how many parts the tensor is, each on a rank of its own but for replicas."""
        if self.placed is None:
            return 1 if self.spec.dim is None else self.spec.group.size
        sizes = zip(self.placed.placements, self.placed.device_mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if not placement.is_replicate())

    def full(self) -> Tensor:
        """The full tensor, on every rank. A collective."""
        return self.spec.full(self.tensor if self.placed is None else self.placed)

    def fill(self, full: Tensor) -> None:
        """Copies this rank's part of the full tensor to its place."""
        with torch.no_grad():
            if self.spec.padding:
                self.tensor.detach().zero_()  # no piece covers the padding
            for offsets, view in self.pieces():
                view.copy_(full[tuple(map(slice, offsets, map(add, offsets, view.shape)))])

    def pieces(self) -> list[tuple[torch.Size, Tensor]]:
        """(offsets in the full tensor, view of this rank's tensor) of each box; there are partition_stride boxes."""
        spec, local = self.spec, self.tensor.detach()
        if self.placed is not None:
            return self._placed_pieces(self.placed)
        if spec.dim is None:
            return [(torch.Size([0] * local.dim()), local)]
        world, total = spec.group.size, local.shape[spec.dim] * spec.group.size
        here = before = 0  # where the piece begins in this rank's tensor, and in the full one
        boxes = []
        for piece in piece_sizes(total, spec.stride if world > 1 else 1, world):
            width, offsets = piece // world, [0] * local.dim()
            offsets[spec.dim] = before + spec.group.rank * width
            size = min(width, self.full_shape[spec.dim] - offsets[spec.dim])  # less if the rest is padding
            if size > 0:
                boxes.append((torch.Size(offsets), local.narrow(spec.dim, here, size)))
            here, before = here + width, before + piece
        return boxes

    def _placed_pieces(self, placed: DTensor) -> list[tuple[torch.Size, Tensor]]:
        """Those of a DTensor that fully_shard has cut: of a rank that has nothing, none."""
        boxes, dim = [], self.spec.dim
        for offsets, view in pieces_of(placed, self.tensor.detach()):
            if dim is not None and self.spec.padding:
                view = view.narrow(dim, 0, max(0, min(view.shape[dim], self.full_shape[dim] - offsets[dim])))
            if view.numel() or not placed.numel():
                boxes.append((offsets, view))
        return boxes


class IncompatibleKeys(NamedTuple):
    """The keys that `load_full_state_dict` with strict=False has ignored."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# --- what there is to save or load ----------------------------------------------------------------------------------


def model_group(model: nn.Module) -> Group:
    """The tensor-parallel group of a model's layers; one of size 1 if no layer is sharded.

    If layers have different groups (TP=4 and TP=2), it is the group that contains the ranks of all others. If
    fully_shard has cut parameters over other ranks too, it is a process group of these and those, where there is one:
    often all ranks of the job.

    Raises:
        ValueError: layers have different groups, and none contains the ranks of all; names a layer of each.
    """
    reshard(model)
    base = layers_group(model)
    cut = [on_mesh(p.device_mesh).ranks for _, p, spec in named_shard_specs(model) if spec.is_cut_further(p)]
    # of a mesh without all of these, as of plain shards that fully_shard has cut, each rank would know other ranks
    ranks = frozenset().union(*(each for each in cut if each.issuperset(ranks_of(base))))
    if len(ranks) > base.size:
        for process_group in process_groups():  # in the order in which they were made, on every rank
            if set(dist.get_process_group_ranks(process_group)) == ranks:
                return resolve_group(process_group)
    return base


def reshard(model: nn.Module) -> None:
    """Gives the model fully_shard's parameters again where, after a forward alone, it still has the gathered ones."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def check_members(entries: Mapping[str, Entry], group: Group) -> None:
    """Raises ValueError unless the ranks over which fully_shard has cut a tensor are all in the group."""
    for name, entry in entries.items():
        if entry.placed is None:
            continue
        ranks = sorted(on_mesh(entry.placed.device_mesh).ranks)
        if not set(ranks) <= set(ranks_of(group)):
            raise ValueError(
                f"{name} is placed as {entry.placed.placements} over the ranks {ranks} (fully_shard), and the group "
                f"has the ranks {ranks_of(group)}: give the group of all ranks that have parts of the model as `group`"
            )


def layers_group(model: nn.Module, *, of_replica: bool = False) -> Group:
    """`model_group` without the ranks over which fully_shard has cut parameters.

    of_replica: the group of one replica: without experts that are divided over several of them.
    """
    groups: dict[int, tuple[str, Group]] = {}
    for name, parameter, spec in named_shard_specs(model):
        if spec.group.size > 1 and not (of_replica and is_over_data(parameter)):
            groups.setdefault(id(spec.group.process_group), (name, spec.group))
    if not groups:
        return WHOLE.group
    members = {key: set(dist.get_process_group_ranks(group.process_group)) for key, (_, group) in groups.items()}
    for key, (_, group) in groups.items():
        if all(ranks <= members[key] for ranks in members.values()):
            return group
    named = ", ".join(f"{sorted(members[key])} ({name})" for key, (name, _) in groups.items())
    raise ValueError(
        f"the model's layers have {len(groups)} different tp_groups, with ranks {named}, none of which has the ranks "
        "of all others: save and load checkpoints with the group of all ranks as `group`"
    )


def tensor_specs(model: nn.Module) -> dict[int, ShardSpec]:
    """How each parameter of the model is sharded, by id(parameter); a layer that shards it decides, not a plain module.

    Raises:
        ValueError: names a parameter that two layers shard in different ways.
    """
    named: dict[int, tuple[str, ShardSpec]] = {}
    for name, parameter, spec in named_shard_specs(model):
        first, known = named.setdefault(id(parameter), (name, spec))
        if known == spec or spec.dim is None:
            continue
        if known.dim is None or known == replace(spec, padding=known.padding):
            # an embedding knows its padding, a layer that is tied to it does not
            named[id(parameter)] = name, replace(spec, padding=max(spec.padding, known.padding))
        elif spec.group.size > 1 or known.group.size > 1:
            raise ValueError(f"{first} and {name} are one parameter, and their layers shard it in different ways")
    return {key: spec for key, (_, spec) in named.items()}


def entry_of(tensor: Tensor, spec: ShardSpec) -> Entry:
    return Entry(local_of(tensor), spec, tensor if spec.is_cut_further(tensor) else None)


def model_entries(model: nn.Module) -> dict[str, Entry]:
    """The model's state dict, buffers included, with how each tensor is sharded.

    Without what modules return from get_extra_state.

    Raises:
        TypeError: the state dict has other values than plain tensors and DTensors of this library's layers,
            `replicate_` and fully_shard; or fully_shard has cut plain shards.
        ValueError: see `tensor_specs` and `check_placements`.
    """
    reshard(model)
    specs, extra = tensor_specs(model), modules_with_extra_state(model, "get_extra_state")
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in extra}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} in the model's state dict is a {type(value).__name__}: only tensors are supported")
        if is_dtensor(value):
            check_placements(value)
            spec = specs.get(id(value), WHOLE)
            if spec.is_cut_further(value) or _says_the_same(value, spec):
                continue
            raise TypeError(
                f"{name} in the model's state dict is a DTensor placed as {value.placements} on {value.device_mesh}, "
                f"which does not say how it is cut over the ranks {ranks_of(spec.group)} of its layer's tp_group: "
                "fully_shard needs a DeviceMesh as tp_group"
            )
        if hasattr(value, "__tensor_flatten__") or value.layout != torch.strided:
            kind = type(value).__name__ if value.layout == torch.strided else value.layout
            raise TypeError(
                f"{name} in the model's state dict is a {kind} tensor: only dense plain tensors are supported"
            )
    return {name: entry_of(tensor, specs.get(id(tensor), WHOLE)) for name, tensor in state.items()}


def modules_with_extra_state(model: nn.Module, method: str) -> dict[str, nn.Module]:
    """{key in the state dict: the module} of those whose class has a `method` of its own, {get,set}_extra_state."""
    return {
        f"{name}._extra_state" if name else "_extra_state": module
        for name, module in model.named_modules()
        if getattr(type(module), method) is not getattr(nn.Module, method)
    }


def _says_the_same(tensor: DTensor, spec: ShardSpec) -> bool:
    """Whether a DTensor is whole on every rank where the spec says so, and else is on the mesh of the spec's group."""
    if all(placement.is_replicate() for placement in tensor.placements):
        return spec.dim is None or spec.group.size == 1
    return tensor.device_mesh == spec.group.mesh


# --- errors on every rank -------------------------------------------------------------------------------------------


def run_on_all_ranks(group: Group, what: str, step: Callable[[], T]) -> T:
    """step() on every rank; if it fails on one rank, every rank raises an error, so that none waits for another.

    what: names the call, for errors.

    Raises:
        RuntimeError: names the ranks and their errors, or those that have not come to the call; a ValueError or
            TypeError if all errors are of that type. If all ranks have the same error, that error; KeyboardInterrupt
            and SystemExit on the ranks that got them.
    """
    failure: BaseException | None = None
    result: Any = None
    try:
        result = step()
    except BaseException as error:
        failure = error
    own = None if failure is None else (type(failure).__name__, str(failure))
    with on_all_ranks(group, what, advice=_EVERY_RANK):
        failures = gather_objects(own, group)
    if failure is not None and (not isinstance(failure, Exception) or len(set(failures)) == 1):
        raise failure
    if any(failures):
        raise error_of_ranks(what, {rank: error for rank, error in enumerate(failures) if error}, group) from failure
    return result


def error_of_ranks(what: str, failures: Mapping[int, tuple[str, str]], group: Group) -> Exception:
    """The exception that every rank raises if some ranks failed, given the kind and text of each rank's error."""
    kinds = {kind for kind, _ in failures.values()}
    named = "\n".join(f"rank {rank} of {group.size}: {kind}: {text}" for rank, (kind, text) in sorted(failures.items()))
    raised = _ERRORS.get(kinds.pop(), RuntimeError) if len(kinds) == 1 else RuntimeError
    return raised(f"{what} failed:\n{named}")


def check_replicas(what: str, entries: Mapping[Any, Entry], group: Group, stage: int = 0) -> None:
    """Compares the ranks' copies of whole tensors, and of shards of smaller groups than `group`. A collective.

    stage: of a pipeline, this rank's; other stages have other tensors.

    Raises:
        RuntimeError: the same on every rank; names the tensors that differ, in dtype, shape, degree or bytes, or that
            not all ranks have, and the ranks.
    """
    if group.size == 1:
        return
    own: dict[str, tuple[str, str, tuple[int, ...] | None]] = {}
    for key, entry in entries.items():
        name, spec = key if isinstance(key, str) else ".".join(key), entry.spec
        sharded = entry.parts > 1
        kind = f"{entry.tensor.dtype} {tuple(entry.full_shape)}"
        part = f"part {spec.group.rank} of {spec.group.size} of " if sharded else ""
        if entry.placed is not None:
            part = f"the part at {', '.join(str(list(offsets)) for offsets, _ in entry.pieces())} of "
        alike = not sharded or entry.parts != group.size  # otherwise each part is on one rank only
        value = tuple(int(tensor_hash(view)) for _, view in entry.pieces()) if alike else None
        own[name] = (f"{kind} in {entry.parts} parts" if sharded else kind), part, value
    everyone = gather_objects((stage, own), group)
    problems = []
    for name in dict.fromkeys(name for _, theirs in everyone for name in theirs):
        at = {its_stage for its_stage, theirs in everyone if name in theirs}
        facts = {
            rank: theirs.get(name, (NOTHING, "", None))
            for rank, (its_stage, theirs) in enumerate(everyone)
            if its_stage in at
        }
        if len(kinds := ranks_by_value((rank, kind) for rank, (kind, _, _) in facts.items())) > 1:
            problems.append(f"  {name}: {format_values(kinds)}")
            continue
        for part in dict.fromkeys(part for _, part, _ in facts.values()):
            held = ((rank, value) for rank, (_, own_part, value) in facts.items() if own_part == part)
            if len(values := ranks_by_value(held)) > 1:
                problems.append(f"  {part}{name}: {format_unnamed(values)}")
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise RuntimeError(
            f"{what}: the {group.size} ranks hold different copies of replicated tensors. Weights: start all ranks "
            "from the same weights and give them the same gradients. Statistics of each rank's own data: save one "
            "replica, or make them equal first:\n" + "\n".join(problems[:_SHOWN]) + more
        )


def check_whole(tensors: Mapping[str, Any], what: str) -> None:
    """Raises TypeError for a DTensor."""
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(
                f"{name} in {what} is a DTensor placed as {tensor.placements}: only full tensors can be loaded here, "
                "such as those of tp_invariant.full_state_dict; DTensors are for model.load_state_dict"
            )


def check_match(
    entries: Mapping[str, Entry],
    given: Mapping[str, tuple[torch.Size, torch.dtype]],
    *,
    strict: bool,
    source: str,
    absent: Sequence[str] = (),
) -> IncompatibleKeys:
    """Compares the model's entries with the tensors of a source. absent: other keys that the source lacks.

    Raises:
        ValueError: one error that names every key that is missing, unexpected (with strict), or of another shape or
            dtype than the model's.
    """
    missing, unexpected = sorted([*(entries.keys() - given.keys()), *absent]), sorted(given.keys() - entries.keys())
    problems, shards = [], []
    if strict and missing:
        problems.append(f"missing in the {source}: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected in the {source}: {', '.join(unexpected)}")
    for name in entries.keys() & given.keys():
        entry, (shape, dtype) = entries[name], given[name]
        if entry.tensor.is_meta:
            problems.append(f"{name} is on the meta device: call model.to_empty(device=...) first")
        elif entry.full_shape != shape or entry.tensor.dtype != dtype:
            problems.append(
                f"{name} is {dtype} {tuple(shape)} in the {source} and {entry.tensor.dtype} {tuple(entry.full_shape)} "
                "in the model"
            )
            shards += [entry.spec.group] if entry.parts > 1 and shape == entry.tensor.shape else []
    if problems:
        hint = ""
        if shards:
            hint = (
                f"\nIt looks like the shards of rank {shards[0].rank} of {shards[0].size}, as model.state_dict() gives "
                "them. Give the whole tensors of tp_invariant.full_state_dict(model), which every rank calls; "
                "model.load_state_dict takes this rank's shards"
            )
        raise ValueError(f"the {source} does not fit the model:\n" + "\n".join(sorted(problems)) + hint)
    return IncompatibleKeys(missing, unexpected)


# --- gathering ------------------------------------------------------------------------------------------------------


def full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    pp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> dict[str, Any]:
    """The state dict that the unsharded model would have: keys, shapes, dtypes and order. A collective.

    Gated layers are in TP=1's order, a padded vocabulary has its own rows alone. No two tensors share memory, tied
    weights neither, so that `safetensors.torch.save_file` takes them. What modules return from get_extra_state is each
    rank's own. Of a model over a DeviceMesh that fully_shard has
    cut over data parallel ranks too, on all of these.

    Args:
        rank0_only: return {} on all ranks but the group's first.
        cpu_offload: move each tensor to the CPU as soon as it is gathered.
        pp_group: the ProcessGroup or 1-D DeviceMesh of a pipeline's stages, of which `model` is this rank's: the state
            of the whole model, on every rank; with rank0_only, on the first rank of the first stage. Without: of this
            stage.

    Raises:
        ValueError: no tp_group of the layers contains all ranks; two layers shard one parameter in different ways.
        TypeError: the state dict has other values than dense tensors.
        RuntimeError: on every rank, if the copies of a replicated parameter or buffer differ; names them.
    """
    group = model_group(model)
    entries = run_on_all_ranks(group, "full_state_dict", lambda: model_entries(model))
    stages = resolve_group(pp_group)
    full: dict[str, Any] = gather_entries(entries, group, rank0_only, cpu_offload and stages.size == 1)
    if stages.size > 1:
        return gather_stages(model, full, stages, rank0_only, cpu_offload)
    if len(full) < len(entries) or not modules_with_extra_state(model, "get_extra_state"):
        return full

    def copied(x: Tensor) -> Tensor:
        return x.detach().to("cpu" if cpu_offload else x.device, copy=True)

    state = model.state_dict(keep_vars=True).items()
    return {name: full[name] if name in full else tree.tree_map_only(Tensor, copied, value) for name, value in state}


def gather_entries(
    entries: Mapping[Any, Entry], group: Group, rank0_only: bool, cpu_offload: bool
) -> dict[Any, Tensor]:
    """Each entry's full tensor, one after another; options as for `full_state_dict`."""
    if group.size > 1:
        names = hashlib.sha256(repr(list(entries)).encode()).hexdigest()[:12]
        devices = (entry.tensor.device for entry in entries.values())
        # not the device of scalars such as `step`: NCCL cannot use the CPU
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        check_agreement({"what is in the state dict": f"{len(entries)} tensors, {names}"}, group, device, set())
        check_replicas("gathering full tensors", entries, group)
    full: dict[Any, Tensor] = {}
    for name, entry in entries.items():
        tensor = entry.full()
        if not rank0_only or group.rank == 0:
            full[name] = tensor.cpu() if cpu_offload else tensor
    return full


# --- loading --------------------------------------------------------------------------------------------------------


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
    """Copies this rank's part of each full tensor into the model. Every rank needs the whole `state_dict`.

    Modules with set_extra_state get theirs by it.

    Args:
        state_dict: from `full_state_dict` at any degree, or an unsharded model's `state_dict()`. One of several tied
            names is enough, as Hugging Face saves them. A stage that parallelize has cut takes the whole model's.
        strict: whether missing and unexpected keys are an error.

    Returns:
        (missing_keys, unexpected_keys), for strict=False.

    Raises:
        ValueError: on every rank, and before anything is written: keys, shapes or dtypes that differ, all named; or,
            whatever `strict`, two values for tied names.
        TypeError: in the same way, DTensors.
    """
    entries, group = model_entries(model), model_group(model)
    extra = modules_with_extra_state(model, "set_extra_state")
    state_dict = state_for_stage(model, state_dict)
    given = {
        name: x if isinstance(x, Tensor) else torch.empty(0) for name, x in state_dict.items() if name not in extra
    }
    offered = {name: (x.shape, x.dtype) for name, x in given.items()}
    named: dict[int, list[str]] = {id(entry.tensor): [] for entry in entries.values()}  # several names: tied
    for name, entry in entries.items():
        if name in offered:
            named[id(entry.tensor)].append(name)

    def check() -> IncompatibleKeys:
        check_whole(state_dict, "the state dict")
        wanted = {name: entry for name, entry in entries.items() if name in offered or not named[id(entry.tensor)]}
        absent = [name for name in extra if name not in state_dict]
        keys = check_match(wanted, offered, strict=strict, source="state dict", absent=absent)
        for first, *others in filter(None, named.values()):
            for other in others:
                if not torch.equal(raw_bytes(state_dict[first]), raw_bytes(state_dict[other])):
                    raise ValueError(
                        f"{other} and {first} are one parameter in the model and two in the state dict: leave one of "
                        "them out, or untie them in the model"
                    )
        return keys

    keys = run_on_all_ranks(group, "load_full_state_dict", check)
    for name, entry in entries.items():
        if name in state_dict:
            entry.fill(state_dict[name])
    for name, module in extra.items():
        if name in state_dict:
            module.set_extra_state(state_dict[name])
    return keys
