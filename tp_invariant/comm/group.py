"""A tensor-parallel group, and a collective of it that is in flight."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.compiled import set_group_type
from ..core.dtensors import prepare_dtensors
from ..core.torch_private import resolve_process_group, without_dispatch_modes
from .call_records import records_of
from .wire import transfer_error


@dataclass(frozen=True)
class Group:
    """A tensor-parallel group as the layers see it: who I am in it and how many we are. size 1 needs no process group.

    mesh: the 1-D DeviceMesh that it was given as. Parameters over it are DTensors on that mesh. The ranks are the same
    with it or without, so groups that differ in nothing else are equal.

    Copying a module or a parameter copies its Group by reference: process groups cannot be copied. A pickled Group
    holds the name and the ranks, and becomes the process group of that name and these ranks where it is unpickled; one
    that is not there gives a Group that says so as soon as it is used. torch.load(.., weights_only=True) takes it too.
    """

    process_group: dist.ProcessGroup | None = field(repr=False)
    rank: int
    size: int
    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mesh is not None:
            prepare_dtensors()

    def __eq__(self, other: object) -> bool:  # faster than dataclass's, for every call
        if self is other:
            return True
        if not isinstance(other, Group):
            return NotImplemented
        return self.process_group == other.process_group and self.rank == other.rank and self.size == other.size

    def __hash__(self) -> int:  # faster than dataclass's, which hashes all fields; layers hash it at every call
        return hash(self.process_group)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple:
        group = self.process_group
        if group is None:
            return Group, (None, self.rank, self.size)
        mesh = () if self.mesh is None else (self.mesh,)
        if isinstance(group, _MissingProcessGroup):
            return _unpickled_group, (group.name, group.ranks, self.rank, *mesh)
        return _unpickled_group, (str(group.group_name), ranks_of(self), self.rank, *mesh)


class _MissingProcessGroup:
    """Replaces a process group that does not exist in the process which unpickled a Group."""

    def __init__(self, name: str, ranks: list[int]) -> None:
        self.name, self.ranks = name, ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look these up
            raise AttributeError(name)
        raise ValueError(
            f"this tp_group was pickled in a process where it was called {self.name!r} and had the global ranks "
            f"{self.ranks}; this process has no such group: load the values into a model built with a group of its own"
        )


def _unpickled_group(name: str, ranks: list[int], rank: int, mesh: DeviceMesh | None = None) -> Group:
    if dist.is_available() and dist.is_initialized():
        with suppress(LookupError, RuntimeError):  # no process group has the name
            process_group = resolve_process_group(name)
            if dist.get_process_group_ranks(process_group) == ranks:
                return replace(resolve_group(process_group), mesh=mesh)
    missing: Any = _MissingProcessGroup(name, ranks)
    return Group(missing, rank, len(ranks), mesh)


torch.serialization.add_safe_globals([Group, _unpickled_group])

_NOT_A_MEMBER = "{name} does not contain this rank (global rank {rank}): make its layers on the ranks of {name} alone"


def resolve_group(
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None, name: str = "tp_group", dim: str = "tp"
) -> Group:
    """The Group for a `tp_group` argument: a ProcessGroup, a 1-D DeviceMesh, or None for TP=1.

    name: the argument's, for errors; dim: what a mesh calls the dim that it should be.

    Raises:
        TypeError: anything else.
        ValueError: a DeviceMesh with more than one dim, or a group that this rank is not in.
    """
    if tp_group is None:
        return Group(None, 0, 1)
    if isinstance(tp_group, Group):
        return tp_group
    if isinstance(tp_group, DeviceMesh):
        if tp_group.ndim != 1:
            raise ValueError(
                f"{name} is a {tp_group.ndim}-dimensional DeviceMesh with dims {tp_group.mesh_dim_names}: "
                f'pass one dim of it, for example mesh["{dim}"]'
            )
        if tp_group.get_coordinate() is None:
            raise ValueError(_NOT_A_MEMBER.format(name=name, rank=dist.get_rank()))
        group = tp_group.get_group()
        return Group(group, dist.get_rank(group), dist.get_world_size(group), tp_group)
    # on ranks outside a new group torch returns a placeholder that is not a ProcessGroup
    if tp_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER.format(name=name, rank=dist.get_rank()))
    if not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(
            f"{name}={tp_group!r} is a {type(tp_group).__name__}: pass a ProcessGroup, a 1-D DeviceMesh or None"
        )
    rank = dist.get_rank(tp_group)
    if rank < 0:
        raise ValueError(_NOT_A_MEMBER.format(name=name, rank=dist.get_rank()))
    return Group(tp_group, rank, dist.get_world_size(tp_group))


def ranks_of(group: Group) -> list[int]:
    """The global ranks of a group, in its order; this rank alone without a process group."""
    if isinstance(group.process_group, _MissingProcessGroup):
        return group.process_group.ranks
    if group.process_group is None:
        return [dist.get_rank()] if dist.is_available() and dist.is_initialized() else [0]
    return dist.get_process_group_ranks(group.process_group)


class OnMesh(NamedTuple):
    """The ranks of a whole DeviceMesh, and this rank's group along each of its dims: none if this rank is not on it."""

    ranks: frozenset[int]
    groups: tuple[Group, ...]


# by identity, which is cheap: a mesh compares and hashes its ranks. {id: (the mesh, if it still lives, its groups)}
_meshes: dict[int, tuple[weakref.ref[DeviceMesh], OnMesh]] = {}


def on_mesh(mesh: DeviceMesh) -> OnMesh:
    known, found = _meshes.get(id(mesh), (None, None))
    if found is not None and known is not None and known() is mesh:
        return found
    dims = range(mesh.ndim) if mesh.get_coordinate() is not None else ()
    groups = tuple(resolve_group(mesh.get_group(dim)) for dim in dims)
    with without_dispatch_modes():  # a FakeTensorMode refuses the mesh's tensor of ranks
        ranks = frozenset(mesh.mesh.flatten().tolist())
    key, found = id(mesh), OnMesh(ranks, groups)
    _meshes[key] = weakref.ref(mesh, lambda _: _meshes.pop(key, None)), found
    return found


set_group_type(Group, resolve_group)


# --- collectives in flight -------------------------------------------------------------------------------------------


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def handle_of() -> Callable[[int], int]:
    """Of a device's index, the handle of its current stream: a Stream of torch's takes longer to make."""
    from triton.runtime import driver

    return driver.active.get_current_stream


def current_handle(x: Tensor) -> int | None:
    """That of x's device; None on a CPU."""
    return handle_of()(x.get_device()) if x.is_cuda else None


def is_captured(stream: torch.cuda.Stream) -> bool:
    """Whether this CUDA stream is."""
    with torch.cuda.stream(stream):
        return is_capturing()


class Pending:
    """A collective in flight: `wait()` returns its result. Keeps the operands alive until then.

    `finish` computes the result from the received tensor. With `for_all_streams` set, on CUDA, a later `wait` may be on
    another stream than the first. `leased`: the result is in a shared buffer and valid until `release`. `exclusive`:
    the caller that took it is its only reader, and calls `release`.
    """

    leased = exclusive = for_all_streams = waited = False
    _arrived: torch.cuda.Event | None = None

    def __init__(
        self,
        received: Tensor,
        work: dist.Work | None,
        operand: Tensor | None = None,
        group: Group | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._result, self._work, self._operand, self._group = received, work, operand, group
        self._finish = finish

    def wait(self) -> Tensor:
        """The result.

        Raises:
            DeadRankError: ranks of the group have ended; names them.
            RuntimeError: the ranks make different calls (call_records.py), or the collective failed otherwise.
        """
        if self._work is not None:
            assert self._group is not None
            records = records_of(self._group, self._result)
            try:
                if records is None:
                    self._work.wait()
                else:
                    records.wait(self._work)
            except RuntimeError as error:
                raise transfer_error(error, self._result, self._group) from error
            self._work = self._operand = None  # work too keeps the operand alive
        if self._arrived is not None:
            torch.cuda.current_stream(self._result.device).wait_event(self._arrived)
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        if self.for_all_streams and not self.waited and self._result.is_cuda:
            self._arrived = torch.cuda.current_stream(self._result.device).record_event()
        self.waited = True
        return self._result

    def release(self) -> None:
        """Returns a leased buffer; else does nothing. Call it once all kernels that read the result are launched."""

    @property
    def result(self) -> Tensor:
        """The result of a collective after `wait`, without waiting again."""
        assert self.waited
        return self._result


class Peers(NamedTuple):
    """How bytes may travel between GPUs of one host that reach each other's memory; a matter of speed alone.

    early        for something that is not needed yet: on the side, so that what is needed sooner goes past it
    overlapped   whether something else is computed meanwhile, before the result is waited for
    lend         whether the result may lie in a buffer that the group's gathers share: then release it once it is read
    for_graphs   whether CUDA graphs will hold moves like this one: what they need is made now, as a capture cannot
    """

    early: bool = False
    overlapped: bool = False
    lend: bool = True
    for_graphs: bool = False


LENT, NOT_LENT = Peers(), Peers(lend=False)


def stored(x: Tensor) -> Tensor:
    """x with its elements as they are in its memory, contiguous: for what reads the memory. torch negates and
    conjugates some views by a flag alone, and its own collectives heed it."""
    x = x.contiguous()
    return x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x


def concatenated(dim: int) -> Callable[[Tensor], Tensor]:
    """Makes what stands rank-major one tensor, with the ranks' parts one after another along `dim`."""
    return lambda major: torch.cat(major.unbind(0), dim=dim)


def is_first(x: Tensor, dim: int) -> bool:
    """Whether all dims before `dim` are of size 1, so that what is concatenated along it stands rank by rank."""
    return x.shape[: dim % x.dim()].numel() == 1


def whole_shape(x: Tensor, dim: int, group: Group) -> tuple[int, ...]:
    """Of every rank's x, concatenated along `dim`."""
    shape = list(x.shape)
    shape[dim] *= group.size
    return tuple(shape)
