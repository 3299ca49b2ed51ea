"""Collectives that move bytes and never add. The group is always an argument; regions.py adds autograd adjoints.

Because nothing here adds, no algorithm, protocol, ring order or topology of NCCL or gloo can change a bit of a result.
Activations are [..., features] or [rows, features]; see core/layout.py for the legend.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..core.compiled import set_group_type
from ..core.dtensors import prepare_dtensors
from ..core.layout import split_sizes
from . import wire


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
        for process_group in c10d._world.pg_map:
            if str(process_group.group_name) == name and dist.get_process_group_ranks(process_group) == ranks:
                return replace(resolve_group(process_group), mesh=mesh)
    missing: Any = _MissingProcessGroup(name, ranks)
    return Group(missing, rank, len(ranks), mesh)


torch.serialization.add_safe_globals([Group, _unpickled_group])

_NOT_A_MEMBER = "tp_group does not contain this rank (global rank {rank}): build its layers elsewhere"


def resolve_group(tp_group: dist.ProcessGroup | DeviceMesh | Group | None) -> Group:
    """The Group for a `tp_group` argument: a ProcessGroup, a 1-D DeviceMesh, or None for TP=1.

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
                f"tp_group is a {tp_group.ndim}-dimensional DeviceMesh with dims {tp_group.mesh_dim_names}: "
                'pass one dim of it, for example mesh["tp"]'
            )
        if tp_group.get_coordinate() is None:
            raise ValueError(_NOT_A_MEMBER.format(rank=dist.get_rank()))
        group = tp_group.get_group()
        return Group(group, dist.get_rank(group), dist.get_world_size(group), tp_group)
    # on ranks outside a new group torch returns a placeholder that is not a ProcessGroup
    if tp_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER.format(rank=dist.get_rank()))
    if not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(
            f"tp_group={tp_group!r} is a {type(tp_group).__name__}: pass a ProcessGroup, a 1-D DeviceMesh or None"
        )
    rank = dist.get_rank(tp_group)
    if rank < 0:
        raise ValueError(_NOT_A_MEMBER.format(rank=dist.get_rank()))
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


_on_meshes: dict[int, tuple[weakref.ref[DeviceMesh], OnMesh]] = {}


def on_mesh(mesh: DeviceMesh) -> OnMesh:
    """What torch computes anew whenever a mesh is asked, in 30 to 100 us: too long for every parameter of a model."""
    key = id(mesh)  # equal meshes may have other groups
    known = _on_meshes.get(key)
    if known is not None and known[0]() is mesh:
        return known[1]
    dims = range(mesh.ndim) if mesh.get_coordinate() is not None else ()
    found = OnMesh(frozenset(mesh.mesh.flatten().tolist()), tuple(resolve_group(mesh.get_group(dim)) for dim in dims))
    _on_meshes[key] = weakref.ref(mesh, lambda _: _on_meshes.pop(key, None)), found
    return found


_prefetch_groups: dict[Group, Group] = {}


def prefetch_group(group: Group, device: torch.device) -> Group:
    """A second group of the same ranks, for prefetches. The first call is collective; later calls return its result.

    device: of the tensors that it will move.

    NCCL runs a communicator's collectives one after another, so a prefetched weight would delay activations that are
    needed now; a second communicator has its own stream. All ranks start the collectives of both in the same order, and
    each communicator can finish without the other, so they cannot deadlock. Gloo runs collectives concurrently and
    needs no second group. The result is `group` itself in two more cases. If the job is bound to devices
    (init_process_group(device_id=..)), torch splits a new communicator off the whole job's, which is a collective of
    all its ranks: a smaller group cannot do that alone. And if the first call is captured in a CUDA graph, NCCL cannot
    connect.
    """
    side = _prefetch_groups.get(group)  # looked up for every weight that is gathered ahead
    if side is not None:
        return side
    side = group
    if can_duplicate(group):
        if is_capturing():
            return group
        side = duplicate_group(group, "nccl", "weights")
        gather_major(torch.zeros(1, device=device), side)  # connects
    _prefetch_groups[group] = side
    return side


def can_duplicate(group: Group) -> bool:
    """Whether the group is on NCCL and its ranks alone can make a further communicator."""
    if group.process_group is None or "nccl" not in dist.get_backend_config(group.process_group):
        return False
    world = dist.group.WORLD
    return group.size == dist.get_world_size() or world is None or world.bound_device_id is None


def duplicate_group(group: Group, backend: str, purpose: str, options: Any = None) -> Group:
    """A new process group on `backend` with the ranks of `group`, and collective over these ranks only.

    It can be made once for each purpose. `options`: the backend's, a ProcessGroupNCCL.Options for NCCL.

    dist.new_group(.., use_local_synchronization=True) names a group after the number of groups in the process: ranks
    that are in different numbers of groups would use different names and wait for each other forever. So this calls the
    function below it, with a name that is the same on these ranks.

    Raises:
        ValueError: the group has been made before.
    """
    parent = group.process_group
    assert parent is not None
    ranks = dist.get_process_group_ranks(parent)
    again, _ = c10d._new_process_group_helper(
        group.size,
        group.rank,
        ranks,
        dist.Backend(backend),
        c10d._get_default_store(),
        c10d.GroupName(f"tp_invariant, {purpose} of {parent.group_name}: {'_'.join(map(str, ranks))}"),
        backend_options=options,
        timeout=c10d._get_default_timeout(dist.Backend(backend)),
        group_desc=f"tp_invariant {purpose}",
    )
    c10d._world.pg_group_ranks[again] = {rank: place for place, rank in enumerate(ranks)}
    return resolve_group(again)


set_group_type(Group, resolve_group)


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
        """The result; raises the errors of wire.wait."""
        if self._work is not None:
            assert self._group is not None
            wire.wait(self._work, self._result, self._group)
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


def start_gather_major(local: Tensor, group: Group, finish: Callable[[Tensor], Tensor] | None = None) -> Pending:
    """Starts gathering every rank's `local` (same shape everywhere) into a new rank-major [P, ...local].

    `finish` makes the result of that.
    """
    if group.size == 1:
        return Pending(local.contiguous().unsqueeze(0), None, finish=finish)
    return _start_gather(local, (group.size, *local.shape), group, finish)


def _start_gather(
    local: Tensor, shape: Sequence[int], group: Group, finish: Callable[[Tensor], Tensor] | None = None
) -> Pending:
    local = local.contiguous()
    out = local.new_empty(shape)
    if local.numel() == 0:
        return Pending(out, None, finish=finish)
    return Pending(out, wire.start_all_gather(out, local, group), local, group, finish)


def gather_major(local: Tensor, group: Group) -> Tensor:
    """Every rank's `local` (same shape everywhere) in a rank-major [P, ...local]."""
    return start_gather_major(local, group).wait()


def stored(x: Tensor) -> Tensor:
    """x with its elements as they are in its memory, contiguous: for what reads the memory. torch negates and
    conjugates some views by a flag alone, and its own collectives heed it."""
    x = x.contiguous()
    return x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x


def is_first(x: Tensor, dim: int) -> bool:
    """Whether all dims before `dim` are of size 1, so that what is concatenated along it stands rank by rank."""
    return x.shape[: dim % x.dim()].numel() == 1


def whole_shape(x: Tensor, dim: int, group: Group) -> tuple[int, ...]:
    """Of every rank's x, concatenated along `dim`."""
    shape = list(x.shape)
    shape[dim] *= group.size
    return tuple(shape)


def start_gather_dim(local: Tensor, dim: int, group: Group) -> Pending:
    """Starts gathering every rank's `local` (same shape everywhere), concatenated along `dim` in rank order."""
    if group.size == 1:
        return Pending(local, None)
    if not is_first(local, dim):
        return start_gather_major(local, group, lambda major: torch.cat(major.unbind(0), dim=dim))
    return _start_gather(local, whole_shape(local, dim, group), group)


def gather_dim(local: Tensor, dim: int, group: Group) -> Tensor:
    """See `start_gather_dim`."""
    return start_gather_dim(local, dim, group).wait()


def gather_uneven(local: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """The whole of a dim of `size` elements that `layout.split_sizes` splits over ranks, from this rank's piece."""
    if group.size == 1:
        return local
    sizes = split_sizes(size, group.size)
    if sizes[0] == sizes[-1]:
        return gather_dim(local, dim, group)
    # gloo gathers equal shapes only: send the largest piece's shape and drop what is padding. Unwritten bytes in the
    # padding never reach the result.
    shape = list(local.shape)
    shape[dim] = sizes[0]
    padded = local.new_empty(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    major = gather_major(padded, group)
    return torch.cat([major[rank].narrow(dim, 0, sizes[rank]) for rank in range(group.size)], dim=dim)


def start_exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group) -> Pending:
    """Starts an all-to-all of row blocks: rank q gets rows block q of every rank's x, stacked rank-major.

    x [sum(send_sizes), C], the same shape on every rank -> [P, send_sizes[rank], C].
    """
    x = x.contiguous()
    mine = send_sizes[group.rank]
    if group.size == 1:
        return Pending(x.unsqueeze(0), None)
    out = x.new_empty((group.size, mine, *x.shape[1:]))
    if x.numel() == 0:
        return Pending(out, None)
    work = wire.start_all_to_all(out.view(-1, *x.shape[1:]), x, [mine] * group.size, send_sizes, group)
    return Pending(out, work, x, group)


def exchange_rows(x: Tensor, send_sizes: Sequence[int], group: Group) -> Tensor:
    """See `start_exchange_rows`."""
    return start_exchange_rows(x, send_sizes, group).wait()


def exchange_flat(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, alike: Sequence[int]
) -> Tensor:
    """An all-to-all of the rows of x: its block q, of sent[q] rows, goes to rank q; rank q's comes, of received[q].

    Of a 1-D x the rows are its elements.

    alike: numbers, the same on every rank, that decide all sizes.
    """
    out = x.new_empty((sum(received), *x.shape[1:]))
    if group.size == 1 or not any(alike):
        return out.copy_(x)
    return Pending(out, wire.start_all_to_all(out, x, received, sent, group, alike=alike), x, group).wait()


def exchange_cols_for_rows(x: Tensor, row_sizes: Sequence[int], col_sizes: Sequence[int], group: Group) -> Tensor:
    """From columns split over ranks to rows split over ranks: x [T, col_sizes[rank]] -> [row_sizes[rank], N]."""
    if group.size == 1:
        return x
    mine = row_sizes[group.rank]
    # blocks differ in width, so they are sent as flat tensors
    out = x.new_empty(mine * sum(col_sizes))
    if sum(row_sizes) * sum(col_sizes) == 0:
        return out.view(mine, sum(col_sizes))
    sent = [rows * x.shape[1] for rows in row_sizes]
    received = [mine * cols for cols in col_sizes]
    flat = x.contiguous().view(-1)
    alike = *row_sizes, *col_sizes
    out = Pending(out, wire.start_all_to_all(out, flat, received, sent, group, alike=alike), flat, group).wait()
    blocks = [block.view(mine, cols) for block, cols in zip(out.split(received), col_sizes, strict=True)]
    return torch.cat(blocks, dim=1)
