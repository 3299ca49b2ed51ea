"""How parameters are sharded: what they say of it, and the way from shards to full tensors and back.

Of a layer whose tp_group is a ProcessGroup they are plain tensors with Megatron's attributes; of one whose tp_group is
a DeviceMesh they are DTensors on that mesh, whose placements say it:

    Shard(dim)                  one piece
    _StridedShard(dim, S)       partition_stride S: a dim that is first cut into S pieces, each of which is sharded
    Replicate()                 whole on every rank
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, gather_major, on_mesh, ranks_of, resolve_group
from ..consistency.shards import note_conversion, note_source, source_of
from ..core.derived_class import former_class
from ..core.dtensors import check_placements, is_dtensor, local_of
from ..core.layout import Stride, shard, unshard
from ..core.pieces import offer_pieces
from ..core.torch_private import StridedShard, forward_pre_hooks_of
from .saved_shards import refuse_to_save

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import Self

_ATTRIBUTES = (
    "tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes", "tp_group", "shards_may_be_equal",
    "shared", "tied_stage", "copy_of", "ranks_per_micro_batch", "cut_from", "name_in_model", "sequence_chunks",
)  # fmt: skip


def mark_sharded(
    parameter: Tensor,
    partition_dim: int | None,
    stride: Stride,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> None:
    """Sets what a parameter says about itself: Megatron-LM's attributes, and the group.

        tensor_model_parallel   whether this rank has a part of it only; False for one on a group of one rank, and for
                                a DTensor on the group's mesh, whose placements say it
        partition_dim           the dim that other degrees shard, also on a group of one; -1 if none does
        partition_stride        in how many stacked pieces of one size a rank holds that dim; 1 with partition_sizes
        partition_sizes         the full sizes of its pieces where they differ, else None; Megatron-LM has no such word
        tp_group                the Group over whose ranks it is sharded, or which each hold it whole; None: no other
                                rank has anything of it, or, with tensor_model_parallel=True, nobody has said
        ranks_per_micro_batch   of experts over data-parallel ranks, which set it: how many ranks of tp_group have the
                                same micro-batch; a backward gives gradients of all of the group's micro-batches. Else
                                None, or not there

    A user may set two others: `shards_may_be_equal`, then equal parts on several ranks are no error (shards.py);
    and `shared`, then another stage of a pipeline counts the parameter (grad_norm.py).

    Args:
        partition_dim: None for a parameter that every rank holds whole.
        tp_group: a ProcessGroup, a 1-D DeviceMesh or a Group. None leaves it unsaid, as Megatron's own layers do: then
            tensor_model_parallel goes by partition_dim alone, and clip_grad_norm_ has to be told the group.
    """
    group = None if tp_group is None else resolve_group(tp_group)
    alone = group is not None and group.size == 1
    placed = group is not None and is_dtensor(parameter) and _is_placed_over(parameter, group)
    parameter.tensor_model_parallel = partition_dim is not None and not (alone or placed)  # type: ignore[attr-defined]
    parameter.partition_dim = -1 if partition_dim is None else partition_dim  # type: ignore[attr-defined]
    set_stride(parameter, stride if partition_dim is not None or isinstance(stride, int) else 1)
    parameter.tp_group = None if alone else group  # type: ignore[attr-defined]
    if group is not None and not alone:
        _in_use[id(group)] = group


def _is_placed_over(parameter: DTensor, group: Group) -> bool:
    """Whether the ranks of the group are on the DTensor's mesh, so that placements speak of them."""
    mesh = parameter.device_mesh
    return mesh is group.mesh or on_mesh(mesh).ranks.issuperset(ranks_of(group))


def _placement_over(parameter: DTensor, group: Group) -> Placement | None:
    """How a DTensor is placed over the group's ranks; None if no dim of its mesh has them.

    fully_shard's meshes have more dims than the one of the layer, which comes last.
    """
    mesh, ranks = parameter.device_mesh, ranks_of(group)
    lines = [mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist() for dim in range(mesh.ndim)]
    dims = [dim for dim in range(mesh.ndim) if list(ranks) in lines[dim]]
    return parameter.placements[dims[-1]] if dims else None


_in_use: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def groups_in_use(besides: Set[int]) -> set[Group]:
    """The groups in `tp_group` of this process's live parameters, without groups whose ranks are all in `besides`."""
    return {group for group in list(_in_use.values()) if not set(ranks_of(group)) <= besides}


def is_sharded(parameter: Tensor) -> bool:
    """Whether this rank holds only a part of the parameter, by its attributes. A DTensor has placements instead."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def carried_group(parameter: Tensor) -> Group | None:
    """The Group in the parameter's attribute `tp_group`; None if it has none.

    Raises:
        TypeError: tp_group is not a group.
    """
    carried = getattr(parameter, "tp_group", None)
    return carried if carried is None or isinstance(carried, Group) else resolve_group(carried)


def is_over_data(parameter: Tensor) -> bool:
    """Whether it belongs to experts that are divided over the ranks of several replicas (data-parallel ranks)."""
    return getattr(parameter, "ranks_per_micro_batch", None) is not None


def set_stride(parameter: Tensor, stride: Stride) -> None:
    """Sets the attributes that describe the stacked pieces of a parameter's sharded dim."""
    equal = isinstance(stride, int)
    parameter.partition_stride = stride if equal else 1  # type: ignore[attr-defined]
    parameter.partition_sizes = None if equal else stride  # type: ignore[attr-defined]


def stride_of(parameter: Tensor) -> Stride:
    """The stride that `set_stride` or Megatron-LM has set; 1 for a parameter without these attributes."""
    sizes: tuple[int, ...] | None = getattr(parameter, "partition_sizes", None)
    return getattr(parameter, "partition_stride", 1) if sizes is None else sizes


def _attributes(parameter: Tensor) -> dict[str, Any]:
    return {name: getattr(parameter, name) for name in _ATTRIBUTES if hasattr(parameter, name)}


def _set_attributes(parameter: Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


class KeepsAttributes(nn.Module):
    """A module that copies a parameter's attributes to the parameter that replaces it.

    Parameters are replaced by `to_empty()`, `copy.deepcopy`, `load_state_dict(assign=True)` and
    `module.weight = nn.Parameter(..)`. fully_shard replaces them without a copy: so
    what a user may say of a parameter (`shards_may_be_equal`) the module may say, too.
    """

    shards_may_be_equal = False

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        old = self._parameters.get(name)
        super().register_parameter(name, param)  # assignment calls it too
        if param is not None and old is not None:
            _set_attributes(param, {**_attributes(old), **_attributes(param)})

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        before = {name: _attributes(parameter) for name, parameter in self.named_parameters(recurse=False)}
        result = super()._apply(fn, recurse)
        for name, parameter in self.named_parameters(recurse=False):
            _set_attributes(parameter, before[name])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        self._copy_attributes(twin)
        return twin

    def _copy_attributes(self, twin: nn.Module) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            copied = twin._parameters.get(name)
            if copied is not None and copied is not parameter:  # a copy may share it
                _set_attributes(copied, _attributes(parameter))
                copied.grad = None  # nn.Parameter's own way; a DTensor would copy it


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded: along `dim`, or replicated on every rank if `dim` is None.

    `padding`: the number of slices of zeros after the full tensor along `dim`, so that the degree divides it.
    """

    group: Group
    dim: int | None
    stride: Stride
    padding: int = 0

    def full(self, local: Tensor) -> Tensor:
        """The full tensor, on every rank, from this rank's part, or from a DTensor of it. A collective.

        Raises:
            ValueError: a DTensor whose placements do not say where its parts are (core/dtensors.py).
        """
        if self.is_cut_further(local):
            check_placements(local)
            full = local.full_tensor().detach().clone()
        elif self.dim is None or self.group.size == 1:
            local = local_of(local)
            full = local.detach().clone()
        else:
            local = local_of(local)
            full = unshard(gather_major(local.detach(), self.group), dim=self.dim, stride=self.stride)
        if self.dim is None or not self.padding:
            return full
        return full.narrow(self.dim, 0, full.shape[self.dim] - self.padding).clone()

    def is_cut_further(self, tensor: Tensor) -> TypeGuard[DTensor]:
        """Whether a DTensor is on more ranks than the group's, as after fully_shard; then its placements say it all."""
        if not is_dtensor(tensor) or not _is_placed_over(tensor, self.group):
            return False
        alone = self.group.size == 1 and not all(placement.is_replicate() for placement in tensor.placements)
        return tensor.device_mesh.ndim > 1 or (alone and tensor.device_mesh.size() > 1)

    def check_placed(self) -> None:
        """Whether a DTensor can say this.

        Raises:
            ValueError: pieces of different sizes, on a mesh: no placement of torch's says them.
        """
        if self.group.mesh is not None and not isinstance(self.stride, int):
            raise ValueError(
                f"partition_sizes={self.stride} cannot be had with tp_group as a DeviceMesh: no placement of a DTensor "
                "says pieces of different sizes. Give a ProcessGroup (mesh.get_group()), which keeps plain tensors, or "
                "a layer for each piece"
            )

    def placed(self, local: Tensor) -> Tensor:
        """This rank's part as a DTensor, in the same memory, on the group's mesh; as it is where that has none.

        Raises:
            ValueError: see `check_placed`.
        """
        mesh = self.group.mesh
        if mesh is None:
            return local
        self.check_placed()
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement: Placement = Replicate()
        if self.dim is not None:
            assert isinstance(self.stride, int)
            placement = Shard(self.dim) if self.stride == 1 else StridedShard(self.dim, split_factor=self.stride)
        return DTensor.from_local(local.detach(), mesh, [placement], run_check=False)

    def local(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor."""
        if self.dim is None:
            return full.detach().clone()
        if self.padding:
            zeros = list(full.shape)
            zeros[self.dim] = self.padding
            full = torch.cat([full, full.new_zeros(zeros)], dim=self.dim)
        return shard(full.detach(), dim=self.dim, rank=self.group.rank, world=self.group.size, stride=self.stride)


class ShardedModule(KeepsAttributes):
    """What the layers of this library have in common: they can say how each of their own parameters is sharded."""

    group: Group
    SHARDED_PARAMETERS: tuple[str, ...] = ()  # the names that shard_spec knows; others are the user's own
    derived_by: tuple[Hashable, ...] = ()  # the options of `derived_class` for a module that becomes a layer like this

    def shard_spec(self, name: str) -> ShardSpec:
        """The ShardSpec of the parameter called `name`, as things stand now (partition_stride may be set late)."""
        raise NotImplementedError

    def _with_parts_of(self, full: nn.Module) -> Self:
        """This layer, with this rank's parts of the parameters of `full`, which has them under the same names."""
        for name in self.SHARDED_PARAMETERS:
            whole = getattr(full, name, None)
            if whole is not None:
                spec = self.shard_spec(name)
                setattr(self, name, nn.Parameter(spec.local(whole), whole.requires_grad))
                if spec.dim is not None:
                    note_source(getattr(self, name), whole)
        return self.train(full.training)

    def _reset_as_before(self) -> bool:
        """Calls the reset_parameters of a user's own class that became this layer, with whole tensors in their places.

        False if there is none. What it does not fill stays.
        """
        former: Any = former_class(type(self))
        own = getattr(former, "reset_parameters", None)
        parts = {name: p for name in self.SHARDED_PARAMETERS if (p := self._parameters.get(name)) is not None}
        if own is None or issubclass(former, ShardedModule) or own.__module__.partition(".")[0] == "torch":
            return False
        if any(part.is_meta for part in parts.values()):
            return False
        specs = {name: self.shard_spec(name) for name in parts}
        try:
            for name, part in parts.items():
                spec, local = specs[name], local_of(part)
                shape = list(local.shape)
                if spec.dim is not None:
                    shape[spec.dim] = shape[spec.dim] * spec.group.size - spec.padding
                self._parameters[name] = nn.Parameter(local.new_full(shape, math.nan), part.requires_grad)
            own(self)
            filled = {name: self.get_parameter(name) for name in parts}
        finally:
            self._parameters.update(parts)
        for name, full in filled.items():
            spec = specs[name]
            if not full.isnan().all():
                with torch.no_grad():
                    local_of(parts[name]).copy_(spec.local(full))
                if spec.dim is not None and spec.group.size > 1:
                    note_source(parts[name], full)
        return True

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """nn.Module's, and the parameter says what this module knows of it, whatever was there before, or nothing.

        On a mesh a plain one, which is this rank's part, becomes another parameter that is a DTensor.
        """
        if param is not None and name in self.SHARDED_PARAMETERS and self.group.mesh is not None:
            param = self._on_mesh(name, param)
        super().register_parameter(name, param)
        if param is not None and name in self.SHARDED_PARAMETERS:
            self._mark(name, param)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.SHARDED_PARAMETERS:
            tensor = destination.get(prefix + name)
            if tensor is None or (spec := self.shard_spec(name)).dim is None or spec.group.size == 1:
                continue
            if keep_vars:
                continue
            # a DTensor may be over data-parallel ranks alone: fully_shard's part of a plain shard
            if not is_dtensor(tensor) or not _is_placed_over(tensor, spec.group):
                refuse_to_save(tensor, spec.group)
            else:
                offer_pieces(tensor)

    def _on_mesh(self, name: str, param: nn.Parameter) -> nn.Parameter:
        spec = self.shard_spec(name)
        if is_dtensor(param):
            (wanted,) = spec.placed(local_of(param)).placements  # type: ignore[attr-defined]
            given = _placement_over(param, spec.group)
            if given != wanted:
                where = f"on {param.device_mesh}, which does not have the ranks of" if given is None else "over"
                raise ValueError(
                    f"{name} of {type(self).__name__} is a DTensor placed as {param.placements} on rank "
                    f"{spec.group.rank} {where} {spec.group.mesh}: it must be placed as ({wanted!r},) over this mesh"
                )
            return cast(nn.Parameter, param)
        old = self._parameters.get(name)
        if old is not None and is_dtensor(old) and param.shape == old.shape != local_of(old).shape:
            raise ValueError(
                f"{name} of {type(self).__name__} is given a plain tensor of shape {tuple(param.shape)} on rank "
                f"{spec.group.rank}, which is that of the whole parameter, and would be taken for this rank's part, of "
                f"shape {tuple(local_of(old).shape)}: load whole weights by tp_invariant.load_full_state_dict, or "
                "give a DTensor"
            )
        placed = nn.Parameter(spec.placed(param), param.requires_grad)
        _set_attributes(placed, _attributes(param))
        return placed

    def _mark(self, name: str, tensor: Tensor) -> None:
        """Sets the attributes of `tensor`, the parameter `name` or its replacement, from shard_spec."""
        spec = self.shard_spec(name)
        # Megatron sets partition_stride after construction
        stride = getattr(tensor, "partition_stride", spec.stride) if isinstance(spec.stride, int) else spec.stride
        mark_sharded(tensor, spec.dim, stride, spec.group)
        self._number_weight()

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        own = {name: self._parameters.get(name) for name in self.SHARDED_PARAMETERS}
        sources = {name: source_of(p) for name, p in own.items() if p is not None}
        result = super()._apply(fn, recurse)
        for name, source in sources.items():
            note_conversion(self.get_parameter(name), source)
        self._number_weight()
        return result

    def _copy_attributes(self, twin: nn.Module) -> None:
        super()._copy_attributes(twin)
        assert isinstance(twin, ShardedModule)
        twin._number_weight()

    def _number_weight(self) -> None:
        """Sets the layer's number on its weight, by which compiled code knows the layer (consistency/agreement.py)."""
        agreed, weight = self.__dict__.get("_agreed"), self._parameters.get("weight")
        if agreed is not None and agreed.number and weight is not None:
            local_of(weight).layer_number = agreed.number

    def _whole_parameters(self) -> dict[str, Tensor]:
        """Those of SHARDED_PARAMETERS that every rank holds whole, for check_agreement; {} in compiled code."""
        if torch.compiler.is_compiling():
            return {}
        own = {name: self._parameters.get(name) for name in self.SHARDED_PARAMETERS}
        return {name: p for name, p in own.items() if p is not None and self.shard_spec(name).dim is None}

    def _mark_replacement(self, name: str, tensor: Tensor, spec: ShardSpec) -> None:
        """Sets the attributes of an unmarked tensor that a call finds in place of a parameter, and of its sources.

        The tensor may be an argument of torch.func.functional_call, whose gradient is clipped later. Or it is computed:
        parametrizations (nn.utils.parametrize, nn.utils.weight_norm) replace a parameter by parameters of their own.
        Of these, the ones whose size along the sharded dim equals this rank's part are taken to be sharded along it.
        """
        if torch.compiler.is_compiling():
            return
        mark_sharded(tensor, spec.dim, spec.stride, spec.group)
        if name in self._parameters:
            return
        self._check_parametrizations(name, tensor, spec)
        own = [p for key, p in self._parameters.items() if p is not None and key.startswith(f"{name}_")]
        parametrizations: Any = self._modules.get("parametrizations") or {}
        for p in [*own, *(parametrizations[name].parameters() if name in parametrizations else ())]:
            if hasattr(p, "tensor_model_parallel") or spec.dim is None or p.dim() <= spec.dim:
                continue
            if p.shape[spec.dim] == tensor.shape[spec.dim]:
                mark_sharded(p, spec.dim, spec.stride, spec.group)

    def _check_parametrizations(self, name: str, tensor: Tensor, spec: ShardSpec) -> None:
        """Whether this rank's part can be computed from its part of what the parametrizations hold.

        Raises:
            ValueError: a norm over what several ranks hold parts of; or weight_norm of DTensors, whose backward torch
                does not have.
        """
        sharded = spec.dim is not None and self.group.size > 1
        listed: Any = self._modules.get("parametrizations") or {}
        hooks = [h for h in forward_pre_hooks_of(self).values() if getattr(h, "name", None) == name]
        for found in [*(listed[name] if name in listed else ()), *hooks]:  # noqa: SIM401  # a ModuleDict has no get
            kind, dim = type(found).__name__.strip("_"), getattr(found, "dim", None)
            if kind not in ("WeightNorm", "SpectralNorm", "Orthogonal"):
                continue
            if kind == "WeightNorm":
                dim = None if dim in (None, -1) else dim % tensor.dim()
                kind = f"weight_norm with dim={dim}"
                if self.group.mesh is None and dim is not None and dim == spec.dim:
                    continue
            if self.group.mesh is not None or sharded:
                way = "with tp_group as a ProcessGroup, and for it " if self.group.mesh is not None else ""
                raise ValueError(
                    f"{kind} of {name} of a {type(self).__name__} on rank {self.group.rank}: each rank would take its "
                    f"part for the whole. Supported is, {way}weight_norm with dim={spec.dim}, the dim that is sharded"
                )


def named_shard_specs(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardSpec]]:
    """(qualified name, parameter, spec) for each parameter; those of foreign modules count as replicated."""
    whole = ShardSpec(Group(None, 0, 1), None, 1)
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            spec = child.shard_spec(name) if isinstance(child, ShardedModule) else whole
            yield f"{prefix}.{name}" if prefix else name, parameter, spec


@contextmanager
def full_initialisation(local: Tensor, full_shape: torch.Size | tuple[int, ...], spec: ShardSpec) -> Iterator[Tensor]:
    """Yields the full tensor, to be filled, and then stores this rank's part, so that the values do not depend on P.

    Every rank draws the full tensor: use the same seed on all ranks, as for any replicated parameter.
    """
    parameter, local = local, local_of(local)
    full = local.new_empty(full_shape)
    yield full
    with torch.no_grad():
        local.copy_(spec.local(full))
    if spec.dim is not None and spec.group.size > 1:
        note_source(parameter, full)
